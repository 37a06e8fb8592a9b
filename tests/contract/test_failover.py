"""PostgreSQL with a standby: what an answer is worth, and what happens when the primary goes. Lines H01 to H04."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from duly.errors import AnswerLost, StoreError, StoreUnavailable
from duly.model import NewJob, Terms
from duly.store import health, ops
from duly.store.op import Op, Rows
from duly.store.postgres import driver as postgres_driver
from duly.store.postgres import health as postgres_health
from duly.store.postgres.connection import connect
from duly.store.postgres.driver import PostgresDriver
from duly.store.postgres.listen import PARK
from duly.store.postgres.schema import bring_up_to_date, look, migration_statements
from duly.store.postgres.translate import describe
from tests.contract.stores import PostgresStore, new_id
from tests.contract.test_lost_answers import SCENARIOS
from tests.databases import SETTINGS, Pool
from tests.servers.pair import Forwarder, Pair, ask, wait_until
from tests.servers.postgres import PostgresServer, free_port

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("failover")]

# No standby is there, and only sessions that ask for it wait for one.
ALONE = {**SETTINGS, "synchronous_standby_names": "b", "synchronous_commit": "local"}
AND_WAIT = "?options=-c%20synchronous_commit%3Don"
IN_WAIT = """
select pid, xact_start from pg_stat_activity where wait_event = 'SyncRep' and datname = current_database()
"""


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

    def __init__(self, store: PostgresStore, *, user: str = "postgres", **options: Any) -> None:
        super().__init__(store.url.replace("postgres@", f"{user}@") + AND_WAIT, connect_s=30, **options)
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
            wait_until(lambda: end(store) and answer.done(), "the end of the operation")
            driver.close()


def waits(store: PostgresStore) -> list[tuple[Any, ...]]:
    """The transactions that wait for the standby."""
    return ask(store.url, IN_WAIT)


def end(store: PostgresStore) -> bool:
    """End the sessions that wait for the standby; return whether there were none."""
    return not ask(store.url, f"select pg_terminate_backend(pid) from ({IN_WAIT}) as one")


@pytest.mark.parametrize("which", SCENARIOS)
def test_h02_a_repetition_waits_for_the_standby_as_the_first_try_did(store: PostgresStore, which: str) -> None:
    op = SCENARIOS[which].op(store)
    with asked(Shaken(store), op, store) as answer:
        assert not answer.done(), answer.exception() or answer.result()
        end(store)
        with pytest.raises(AnswerLost) as lost:
            answer.result(30)
    assert lost.value.again.repeated  # type: ignore[attr-defined]


@pytest.mark.parametrize("which", ["leave", "wake"])
def test_h02_behind_a_pooler_a_repetition_of_one_statement_waits_too(store: PostgresStore, which: str) -> None:
    with asked(Shaken(store, prepared=False), SCENARIOS[which].op(store), store) as answer:
        assert not answer.done()


@pytest.mark.parametrize("which", ["lone", "enqueue", "claim"])
def test_h02_a_cancelled_wait_is_a_lost_answer(store: PostgresStore, which: str) -> None:
    """The server acknowledges such a commit, with a warning."""
    op = lone() if which == "lone" else SCENARIOS[which].op(store)
    with asked(waiting_driver(store), op, store) as answer:
        tries = cancelled_until_done(store, [answer])
        with pytest.raises(AnswerLost, match=f"{op.name}: .* was cancelled: a failover may lose it"):
            answer.result(0)
    assert tries == 2  # the second is a repetition, which waits too


@pytest.mark.parametrize(("which", "prepared"), [("lone", True), ("claim", True), ("lone", False), ("claim", False)])
def test_h02_a_cancelled_wait_is_a_lost_answer_where_warnings_are_hidden(
    store: PostgresStore, which: str, prepared: bool
) -> None:
    op = lone() if which == "lone" else SCENARIOS[which].op(store)
    driver = waiting_driver(store, "%20-c%20client_min_messages%3Derror", prepared=prepared)
    driver._schema_checked = prepared  # as if the setting were changed after the first connection
    with asked(driver, op, store) as answer:
        assert cancelled_until_done(store, [answer]) == 2
        with pytest.raises(AnswerLost, match="was cancelled: a failover may lose it"):
            answer.result(0)


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
    store.driver.execute(lone())  # on the same connection, whose last operation may have been interrupted


def lone() -> Op[Any]:
    return ops.enqueue(Terms("work"), [NewJob(new_id(), "1")])


def waiting_driver(store: PostgresStore, more: str = "", **options: Any) -> PostgresDriver:
    driver = PostgresDriver(store.url + AND_WAIT + more, connect_s=30, **options)
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


def test_h01_an_enqueue_after_a_hint_waits_for_the_standby(store: PostgresStore) -> None:
    """The hint waits for nothing, and has the same connection."""
    driver = waiting_driver(store)
    with psycopg.connect(store.url, autocommit=True) as idle:
        idle.execute(PARK)
        with driver._pool.connection() as conn:
            conn.hint()
        with asked(driver, lone(), store) as answer:
            assert not answer.done()


@pytest.mark.parametrize("which", ["enqueue", "claim", "finish plain"])
def test_h02_without_its_message_a_repetition_is_answered_at_once(
    store: PostgresStore, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test above would show nothing."""
    monkeypatch.setattr(postgres_driver, "WAIT_FOR_STANDBY", "select 1")
    with asked(Shaken(store), SCENARIOS[which].op(store), store) as answer:
        assert answer.result(30)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """A primary and its synchronous standby, which stay what they are."""
    with Pair() as made:
        bring_up_to_date(made.url)
        yield made


def test_h03_the_host_that_takes_writes_is_found_wherever_it_stands(pair: Pair) -> None:
    a, b = pair.standby.port, pair.primary.port
    url = pair.url_of(pair.primary).replace(f"127.0.0.1:{b}", f"127.0.0.1:{a},127.0.0.1:{b}")
    driver = PostgresDriver(url)
    assert driver.run(lone())
    assert driver.about().where == f"127.0.0.1:{a},127.0.0.1:{b}/{pair.database}"
    assert describe("host=a,b port=1 dbname=x") == "PostgreSQL a:1,b:1/x"
    driver.close()


def test_h03_a_standby_can_be_examined_and_read_if_there_is_no_other(pair: Pair) -> None:
    driver = PostgresDriver(pair.url_of(pair.standby))
    with pytest.raises(StoreUnavailable, match="the URL leads to no primary now"):
        driver.examine()
    driver.to_read = True
    [writes] = [one for one in driver.examine() if one.name == "writes"]
    assert (writes.level, writes.remedy) == ("error", "name the primary in the URL")
    driver.close()
    assert look(driver.url) == look(pair.url)
    reader = PostgresDriver(driver.url + "?target_session_attrs=any")
    assert reader.run(ops.workers()) == []
    reader.close()
    for url, found in ((pair.url, pair.primary), (driver.url, pair.standby)):
        with connect(psycopg.connect, url, 2.0, to_read=True) as conn:
            assert conn.info.port == found.port


@pytest.mark.parametrize("by", ["PGTARGETSESSIONATTRS", "PGSERVICE", "service"])
def test_h03_which_host_is_wanted_can_be_set_outside_of_the_url(
    pair: Pair, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = pair.url_of(pair.standby)
    if by == "PGTARGETSESSIONATTRS":
        monkeypatch.setenv(by, "any")
    else:
        services = tmp_path / "services"
        services.write_text(f"[reading]\nhost=127.0.0.1\nport={pair.standby.port}\ndbname={pair.database}\n")
        monkeypatch.setenv("PGSERVICEFILE", str(services))
        url = "postgresql://postgres@" + ("/?service=reading" if by == "service" else "")
        if by == "PGSERVICE":
            monkeypatch.setenv(by, "reading")
    reader = PostgresDriver(url)
    assert reader.run(ops.workers()) == []
    reader.close()


def test_h03_a_primary_that_refuses_the_role_is_named_and_no_promotion_advised(pair: Pair) -> None:
    role = new_role(pair.url_of(pair.primary))
    rules = pair.primary._home / "data" / "pg_hba.conf"
    before = rules.read_text()
    try:
        rules.write_text(f"host all {role} all reject\n{before}")
        pair.on_primary("select pg_reload_conf()")
        wait_until(lambda: "rejects" in unavailable(pair.url_of(pair.primary).replace("postgres@", f"{role}@")), "it")
        said = unavailable(pair.url.replace("postgres@", f"{role}@"))
    finally:
        rules.write_text(before)
        pair.on_primary("select pg_reload_conf()")
    assert f"refuses the connection (host '127.0.0.1', port: '{pair.primary.port}'" in said
    assert "pg_hba.conf rejects" in said
    assert "promote" not in said
    assert "read-only" not in said  # a reader, such as the command line, may show the last host only


def test_h03_no_promotion_is_advised_while_a_host_is_merely_unreachable(pair: Pair) -> None:
    standby, gone = f"127.0.0.1:{pair.standby.port}", f"127.0.0.1:{free_port()}"
    for hosts in (f"{gone},{standby}", f"{standby},{gone}", f"{standby},host.invalid"):
        said = unavailable(f"postgresql://postgres@{hosts}/{pair.database}")
        assert "has no primary that can be reached (" in said
        assert "promote" not in said
    said = unavailable(f"postgresql://postgres@{standby},{standby}/{pair.database}")
    assert "session is read-only): the URL leads to no primary now" in said


def unavailable(url: str) -> str:
    driver = PostgresDriver(url)
    with pytest.raises(StoreError) as told:
        driver.run(lone())
    return str(told.value)


@pytest.mark.parametrize("more", ["", "?target_session_attrs=any"])
def test_h03_no_connection_stays_on_a_standby_once_the_url_leads_to_the_primary(pair: Pair, more: str) -> None:
    """With `any`, a write is refused, as by a server that stops taking writes later."""
    with Forwarder(pair.standby) as forwarder:
        driver = PostgresDriver(f"postgresql://postgres@127.0.0.1:{forwarder.port}/{pair.database}{more}")
        with pytest.raises(
            StoreUnavailable, match=f":{forwarder.port}/.* takes no writes .* the URL leads to no primary"
        ):
            driver.run(lone())
        assert driver.failures == 1
        forwarder.to = pair.primary
        assert driver.run(lone())
        driver.close()


def test_h03_a_server_that_stops_taking_writes_is_left_by_its_listener_too(pair: Pair) -> None:
    admin = pair.url_of(pair.primary) + "?options=-c%20default_transaction_read_only%3Doff"
    driver, woken = PostgresDriver(pair.url), threading.Event()
    watch = driver.watch(woken.set)
    driver.run(lone())
    watch.arm()
    [before] = ask(admin, LISTENING)
    try:
        for value in ("on", "off"):
            ask(admin, f"alter system set default_transaction_read_only = {value}")
            ask(admin, "select pg_reload_conf()")
            if value == "on":
                wait_until(lambda: refused(driver), "the server to take no writes")
                assert woken.wait(30)
                watch.arm()
        wait_until(lambda: not refused(driver), "the server to take writes")
        wait_until(lambda: ask(admin, LISTENING) not in ([], [before]), "another connection to listen")
    finally:
        watch.close()
        driver.close()


def test_h03_a_refused_write_does_not_wait_for_a_listener_that_is_connecting(pair: Pair) -> None:
    """Other callers may wait for its thread, which commits for them."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nowhere = f"postgresql://127.0.0.1:{silent.getsockname()[1]}/x"
        url = pair.url_of(pair.standby) + "?target_session_attrs=any"
        driver = PostgresDriver(url, connect_s=5, listen_url=nowhere)
        watch = driver.watch(lambda: None)
        watch.arm()
        thread = watch._listener._thread  # type: ignore[attr-defined]
        with pytest.raises(StoreUnavailable, match="takes no writes"):
            driver.run(lone())
        assert thread.is_alive()
    thread.join(30)
    for one in (watch, driver):
        one.close()  # type: ignore[attr-defined]


LISTENING = "select pid from pg_stat_activity where query ~ 'pg_advisory_lock' and pid <> pg_backend_pid()"


def refused(driver: PostgresDriver) -> bool:
    try:
        driver.run(lone())
    except StoreUnavailable:
        return True
    return False


def test_h02_a_repetition_is_acknowledged_when_the_standby_has_it_and_not_before(pair: Pair) -> None:
    driver = PostgresDriver(pair.url)
    op = lone()
    count = "select count(*) from duly.duly_job where id = %s"
    with ThreadPoolExecutor(1) as thread:
        with pair.standby_away():
            answer = thread.submit(driver.run, op)
            wait_until(lambda: pair.on_primary(IN_WAIT) != [], "the enqueue to wait")
            [[first, _]] = pair.on_primary(IN_WAIT)
            pair.on_primary("select pg_terminate_backend(%s, 5000)", first)
            wait_until(lambda: pair.on_primary(IN_WAIT) != [], "the repetition to wait")
            assert pair.on_primary(count, op.params["id"]) == [(1,)]
            assert pair.on_standby(count, op.params["id"]) == [(0,)]
            assert not answer.done()
        assert answer.result(30)
    assert pair.on_standby(count, op.params["id"]) == [(1,)]
    driver.close()


def test_h04_wake_ups_continue_after_a_promotion() -> None:
    with Pair() as pair:
        bring_up_to_date(pair.url)
        driver, producer, woken = PostgresDriver(pair.url), PostgresDriver(pair.url), threading.Event()
        watch = driver.watch(woken.set)
        watch.arm()
        pair.kill_primary()
        pair.promote()
        assert woken.wait(30)  # there is a connection again, and notifications may have been missed
        woken.clear()
        wait_until(watch.rearm, "the watch to be armed")
        producer.run(lone())
        assert woken.wait(30)
        for one in (watch, driver, producer):
            one.close()  # type: ignore[attr-defined]


def test_h04_with_no_host_up_an_enqueue_fails_in_time_and_names_them_all() -> None:
    """One host does not answer, and the other is down."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{free_port()}"
        driver = PostgresDriver(f"postgresql://me@{hosts}/x")
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=f"PostgreSQL {hosts}/x cannot be reached"):
            driver.run(lone())
        assert time.monotonic() - began < 2 * 2.0 + 1


def test_h04_the_standbys_are_named_and_what_a_failover_may_lose(pair: Pair) -> None:
    """A role without rights sees only the names of other roles' standbys."""
    pair.on_primary("create role modest login")
    pair.on_primary("grant usage on schema duly to modest")
    pair.on_primary("grant select on all tables in schema duly to modest")
    urls = [pair.url, pair.url.replace("postgres@", "modest@")]
    assert [replication(url) for url in urls] == [("ok", "synchronous standby b")] * 2
    hangs = ("error", "every write waits for a standby, and none is connected")
    with pair.standby_away():
        assert [replication(url) for url in urls] == [hangs] * 2
        doctor = [sys.executable, "-m", "duly", "doctor", "--url", pair.url]
        told = subprocess.run(doctor, capture_output=True, text=True, check=False, timeout=30)
        assert (told.returncode, hangs[1] in told.stdout) == (1, True)
    pair.wait_for_commits(False)
    loses = ("ok", "1 asynchronous standby: a failover may lose the last commits")
    assert [replication(url) for url in urls] == [loses] * 2
    pair.wait_for_commits(True)
    assert replication(pair.url_of(pair.standby)) == ("ok", "no standby")


@pytest.mark.parametrize("view", ["pg_stat_replication", "pg_replication_slots"])
def test_h04_a_worker_starts_though_its_role_may_not_read_the_standbys(pair: Pair, view: str) -> None:
    unknown = "standbys unknown: this role may not read pg_stat_replication"
    driver = PostgresDriver(pair.url.replace("postgres@", f"{new_role(pair.url_of(pair.primary))}@"))
    pair.on_primary(f"revoke select on {view} from public")
    try:
        found = {one.name: (one.level, one.text) for one in driver.examine()}
        assert found["replication"] == ("warning", unknown)
        assert found["rights"][0] == "ok"  # the rest is examined too
        with driver._pool.connection() as conn:
            assert health.failover(postgres_health.standbys(conn)) == unknown  # its first line, and it goes on
            driver.about()
    finally:
        driver.close()
        pair.on_primary(f"grant select on {view} to public")


def test_h02_a_role_that_may_not_confirm_a_repetition_is_named_with_the_grant(store: PostgresStore) -> None:
    function = "pg_logical_emit_message(boolean,text,text)"
    ask(store.url, f"revoke execute on function {function} from public")
    driver = Shaken(store, user=(role := new_role(store.url)))
    try:
        with pytest.raises(AnswerLost, match=r"broke; the repetition failed: .* pg_logical_emit_message"):
            driver.run(lone())
        [rights] = [one for one in driver.examine() if one.name == "rights"]
        assert rights.remedy == f"run `grant execute on function {function} to {role}` as a superuser"
        ask(store.url, rights.remedy.split("`")[1])
        [rights] = [one for one in driver.examine() if one.name == "rights"]
        assert rights.level == "ok"
    finally:
        driver.close()
        ask(store.url, f"grant execute on function {function} to public")


def new_role(url: str) -> str:
    """Make a role that may use the tables, and nothing more."""
    name = f"r{new_id().replace('-', '')}"
    for statement in (f"create role {name} login", *migration_statements("duly", (), grant=name)):
        ask(url, statement)
    return name


def replication(url: str) -> tuple[str, str]:
    driver = PostgresDriver(url)
    driver.to_read = True
    [found] = [one for one in driver.examine() if one.name == "replication"]
    driver.close()
    return found.level, found.text
