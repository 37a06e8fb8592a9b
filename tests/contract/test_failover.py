"""PostgreSQL with a standby: what an answer is worth, and what happens when the primary goes. Lines H01 to H04."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from duly.errors import AnswerLost
from duly.model import NewJob, Terms
from duly.store import ops
from duly.store.op import Op, Rows
from duly.store.postgres import driver as postgres_driver
from duly.store.postgres.driver import PostgresDriver
from duly.store.postgres.schema import bring_up_to_date
from tests.contract.stores import PostgresStore, new_id
from tests.contract.test_lost_answers import SCENARIOS
from tests.databases import SETTINGS, Pool
from tests.servers.pair import ask, wait_until
from tests.servers.postgres import PostgresServer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("failover")]

# No standby is there, and only sessions that ask for it wait for one.
ALONE = {**SETTINGS, "synchronous_standby_names": "b", "synchronous_commit": "local"}
AND_WAIT = "?options=-c%20synchronous_commit%3Don"
WAITING = "wait_event = 'SyncRep' and datname = current_database()"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Databases of a server whose only standby is away."""
    with PostgresServer(settings=ALONE) as server:
        template = server.new_database()
        bring_up_to_date(template)
        yield Pool(server, template)


@pytest.fixture
def store(request: pytest.FixtureRequest, pool: Pool) -> Iterator[PostgresStore]:
    """A store that waits for no standby."""
    with pool.lend(request.node) as url:
        made = PostgresStore(url)
        yield made
        made.close()


class Shaken(PostgresDriver):
    """Loses the answer to the first try, which is committed, and waits for the standby in the repetition."""

    def __init__(self, store: PostgresStore) -> None:
        super().__init__(store.url + AND_WAIT)
        self._pauses = (0.0,)
        self._first: PostgresDriver | None = store.driver  # type: ignore[assignment]

    def execute(self, op: Op[Any]) -> Rows:
        if self._first is None:
            return super().execute(op)
        first, self._first = self._first, None
        first.execute(op)
        raise AnswerLost("the connection broke")


@contextmanager
def asked(driver: PostgresDriver, op: Op[Any], store: PostgresStore) -> Iterator[Any]:
    """Run an operation in a thread until it waits for the standby or is answered."""
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(driver.run, op)
        try:
            wait_until(lambda: answer.done() or waits(store) != [], "the operation to wait or to be answered")
            yield answer
        finally:
            end(store)
            answer.exception(30)
            driver.close()


def waits(store: PostgresStore) -> list[tuple[Any, ...]]:
    """The transactions that wait for the standby."""
    return ask(store.url, f"select pid, xact_start from pg_stat_activity where {WAITING}")


def end(store: PostgresStore) -> None:
    ask(store.url, f"select pg_terminate_backend(pid) from pg_stat_activity where {WAITING}")


@pytest.mark.parametrize("which", SCENARIOS)
def test_h02_a_repetition_waits_for_the_standby_as_the_first_try_did(store: PostgresStore, which: str) -> None:
    op = SCENARIOS[which].op(store)
    with asked(Shaken(store), op, store) as answer:
        assert not answer.done()
        end(store)
        with pytest.raises(AnswerLost) as lost:
            answer.result(30)
    assert lost.value.again.repeated  # type: ignore[attr-defined]


@pytest.mark.parametrize("which", ["lone", "enqueue", "claim"])
def test_h02_a_cancelled_wait_is_a_lost_answer(store: PostgresStore, which: str) -> None:
    """The server acknowledges such a commit, with a warning."""
    op = lone() if which == "lone" else SCENARIOS[which].op(store)
    with asked(waiting_driver(store), op, store) as answer:
        tries = cancelled_until_done(store, [answer])
        with pytest.raises(AnswerLost, match=f"{op.name}: .* was cancelled: a failover may lose it"):
            answer.result(0)
    assert tries == 2  # the second is a repetition, which waits too


def test_h02_a_cancelled_wait_of_a_shared_commit_is_a_lost_answer_to_each(store: PostgresStore) -> None:
    driver = waiting_driver(store)
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(driver.run, lone())
        wait_until(lambda: waits(store) != [], "the first to wait")
        others = [threads.submit(driver.run, lone()) for _ in range(2)]
        wait_until(lambda: len(driver._gathering._waiting) == 2, "the others to gather")
        tries = cancelled_until_done(store, [first, *others])
    driver.close()
    assert [type(one.exception()) for one in (first, *others)] == [AnswerLost] * 3
    assert tries == 5  # one commit of two, and a repetition of each
    assert store.query("select count(*) from duly_job") == [(3,)]


@pytest.mark.parametrize(
    ("text", "cancelled"),
    [("canceling wait for synchronous replication due to user request", True), ("a trigger was here", False)],
)
def test_h02_of_all_warnings_only_that_of_a_cancelled_wait_counts(
    store: PostgresStore, text: str, cancelled: bool
) -> None:
    with store.driver._pool.connection() as conn:  # type: ignore[attr-defined]
        conn.execute(f"do $$ begin raise warning '{text}'; end $$")
        assert conn.wait_cancelled is cancelled


def lone() -> Op[Any]:
    return ops.enqueue(Terms("work"), [NewJob(new_id(), "1")])


def waiting_driver(store: PostgresStore) -> PostgresDriver:
    driver = PostgresDriver(store.url + AND_WAIT)
    driver._pauses = (0.0,)
    return driver


def cancelled_until_done(store: PostgresStore, answers: list[Future[Any]]) -> int:
    """Cancel each wait for the standby; return how many there were."""
    seen: set[tuple[Any, ...]] = set()

    def cancel() -> bool:
        for transaction in waits(store):
            if transaction not in seen:
                seen.add(transaction)
                ask(store.url, "select pg_cancel_backend(%s)", transaction[0])
        return all(answer.done() for answer in answers)

    wait_until(cancel, "the answers")
    return len(seen)


@pytest.mark.parametrize("which", ["enqueue", "claim", "finish plain"])
def test_h02_without_its_message_a_repetition_is_answered_at_once(
    store: PostgresStore, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test above would show nothing."""
    monkeypatch.setattr(postgres_driver, "WAIT_FOR_STANDBY", "select 1")
    with asked(Shaken(store), SCENARIOS[which].op(store), store) as answer:
        assert answer.result(30)
