"""Concurrent enqueues of one process share one commit on PostgreSQL. Line K09.

The table is locked while the first is on its way, so that others gather behind it. What shares a transaction shares
its `xmin`.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from duly.errors import AnswerLost, EnqueueUnknown, StoreRefused, StoreUnavailable
from duly.model import NewJob, Terms
from duly.store import caller, group_commit, ops
from duly.store.op import Held, Op
from duly.store.postgres import driver as postgres
from duly.store.postgres.driver import PostgresDriver
from tests.contract.stores import PostgresStore, new_id, spoiled


@pytest.fixture
def fleet(postgres_url: str) -> Iterator[PostgresStore]:
    store = PostgresStore(postgres_url)
    store.driver.run(ops.clock())
    yield store
    store.close()


def plain(**terms: Any) -> Op[Any]:
    return ops.enqueue(Terms(**{"task": "work", **terms}), [NewJob(new_id(), '{"n":1}')])


def keyed(key: str, payload: str = "1") -> Op[Any]:
    return ops.enqueue(Terms("work"), [NewJob(new_id(), payload, key=key)])


def until(happened: Callable[[], Any]) -> None:
    give_up = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < give_up
        time.sleep(0.002)


@contextmanager
def locked(fleet: PostgresStore) -> Iterator[psycopg.Connection[Any]]:
    """Let nobody write jobs until the end."""
    with psycopg.connect(fleet.url) as theirs:
        theirs.execute("lock table duly.duly_job in access exclusive mode")
        yield theirs
        theirs.rollback()


def blocked(fleet: PostgresStore) -> list[int]:
    return [pid for (pid,) in fleet.query("select pid from pg_locks where not granted and locktype = 'relation'")]


class Crowd:
    """Callers of all kinds whose enqueues gather behind one that is held up."""

    def __init__(self, fleet: PostgresStore) -> None:
        self.fleet = fleet
        self.threads = ThreadPoolExecutor(32)
        self.loop = asyncio.new_event_loop()
        self.looping = threading.Thread(target=self.loop.run_forever)
        self.looping.start()

    def send(self, op: Op[Any], kind: str) -> Future[Any]:
        if kind == "thread":
            return self.threads.submit(self.fleet.driver.run, op)
        return asyncio.run_coroutine_threadsafe(self.fleet.driver.arun(op), self.loop)

    def gather(self, requests: list[Op[Any]], kinds: str | list[str]) -> list[Future[Any]]:
        """Send them one after the other; the first is being written when the others come."""
        kinds = [kinds] * len(requests) if isinstance(kinds, str) else kinds
        first = self.send(requests[0], kinds[0])
        until(lambda: blocked(self.fleet))
        sent = [first]
        for op, kind in zip(requests[1:], kinds[1:], strict=True):
            sent.append(self.send(op, kind))
            until(lambda: len(self.fleet.driver._gathering._waiting) == len(sent) - 1)
        return sent

    def close(self) -> None:
        self.threads.shutdown()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.looping.join()
        self.loop.close()


@pytest.fixture
def crowd(fleet: PostgresStore) -> Iterator[Crowd]:
    crowd = Crowd(fleet)
    yield crowd
    crowd.close()


def transactions(fleet: PostgresStore) -> list[int]:
    """How many jobs each transaction has left, in order."""
    return [n for (n,) in fleet.query("select count(*) from duly_job group by xmin::text order by min(id::text)")]


KINDS = ["thread", "coroutine"]
MIXED = ["thread", "coroutine", "thread", "thread", "coroutine", "coroutine", "thread"]


@pytest.mark.parametrize("kinds", [*KINDS, MIXED], ids=[*KINDS, "mixed"])
def test_k09_writes_that_arrive_during_a_commit_share_the_next_commit(fleet, crowd, kinds):
    requests = [
        plain(), plain(), plain(), plain(priority=5), keyed("a"), plain(queue="other"),
        ops.enqueue(Terms("work"), [NewJob(new_id(), "1"), NewJob(new_id(), "2")]),
    ]  # fmt: skip
    with locked(fleet):
        sent = crowd.gather(requests, kinds)
    ids = [answer.id for future in sent for answer in future.result(60)]
    assert len(ids) == 8
    assert sorted(ids) == sorted(job_id for (job_id,) in fleet.query("select id::text from duly_job"))
    assert transactions(fleet) == [1, 7]


def test_k09_each_keeps_its_own_terms_payload_and_answer(fleet, crowd):
    taken = fleet.enqueue_key("b", payload='"first"')
    requests = [
        plain(), plain(priority=7), keyed("a", '"x"'), keyed("b", '"other"'), plain(queue="mail", delay_ms=60_000),
    ]  # fmt: skip
    with locked(fleet):
        sent = crowd.gather(requests, "thread")
    [_], [second], [third], [fourth], [fifth] = (future.result(60) for future in sent)
    assert (fleet.get(second.id).priority, fleet.get(third.id).payload) == (7, "x")
    assert (fourth.id, fourth.deduplicated, fourth.conflict) == (taken.id, True, True)
    assert (fleet.get(fifth.id).queue, fleet.state(fifth.id)) == ("mail", "scheduled")


def test_k09_of_two_with_one_key_in_a_batch_the_first_gets_it(fleet, crowd):
    with locked(fleet):
        sent = crowd.gather([plain(), keyed("z"), keyed("k"), keyed("k")], "coroutine")
    [_, [z], [first], [second]] = [future.result(60) for future in sent]
    assert (first.deduplicated, second.deduplicated, second.id) == (False, True, first.id)
    assert z.id != first.id


def test_k09_plain_enqueues_with_the_same_terms_are_one_statement(fleet):
    empty = ops.enqueue(Terms("work"), [])
    lines = fleet.driver._work([plain(), keyed("a"), plain(), empty, plain(queue="mail"), plain()])
    assert [line.params["payloads"].count('"[') for line in lines if line.section == "enqueue"] == [3]
    assert [line.params["queue"] for line in lines if line.section == "enqueue_one"] == ["mail"]
    assert fleet.driver._commit_together([empty, empty]) == [[], []]
    assert fleet.query("select count(*) from duly_job") == [(0,)]


@pytest.mark.parametrize("kinds", KINDS)
def test_k09_a_refused_write_fails_alone(fleet, crowd, kinds):
    with locked(fleet):
        sent = crowd.gather([plain(), plain(), spoiled(plain()), keyed("a"), spoiled(keyed("b")), plain()], kinds)
    failed = [type(future.exception(60)) for future in sent]
    assert [kind is StoreRefused for kind in failed] == [False, False, True, False, True, False]
    assert fleet.query("select count(*) from duly_job") == [(4,)]
    assert fleet.query("select key from duly_key") == [("a",)]


@pytest.mark.parametrize("kinds", KINDS)
def test_j01_each_caller_retries_when_a_shared_connection_closes(fleet, crowd, kinds, monkeypatch):
    """The commit of a batch breaks twice: while the first is alone, and while the others are in it."""
    monkeypatch.setattr(postgres, "SHORT_LOCK_TIMEOUT", "set local lock_timeout = '60s'")
    requests = [plain(), plain(), keyed("a"), plain(keep_ms=0), plain()]
    with locked(fleet):
        sent = crowd.gather(requests, kinds)
        [first] = blocked(fleet)
        fleet.query("select pg_terminate_backend(?)", first)
        until(lambda: len({*blocked(fleet)} - {first}) == 2)  # the first asks again, beside the batch of the others
        for pid in {*blocked(fleet)} - {first}:
            fleet.query("select pg_terminate_backend(?)", pid)
        until(lambda: sent[3].done())  # in the batch that broke, and never repeated by itself
    assert isinstance(sent.pop(3).exception(60), EnqueueUnknown)
    ids = [future.result(60)[0].id for future in sent]
    assert sorted(ids) == sorted(job_id for (job_id,) in fleet.query("select id::text from duly_job"))
    assert fleet.driver.failures >= 2


def test_j01_a_failed_connection_is_reported_as_nothing_sent():
    driver = PostgresDriver("postgresql://postgres@127.0.0.1:1/none")
    with ThreadPoolExecutor(8) as threads:
        sent = [threads.submit(driver.run, plain(keep_ms=0)) for _ in range(8)]
        failures = [future.exception(60) for future in sent]
    assert {type(failure) for failure in failures} == {StoreUnavailable}
    assert driver.failures
    first, second = driver._commit_together([plain(), plain()])
    assert str(first) == str(second)
    assert first is not second  # each is raised in a thread of its own
    driver.close()


def test_k09_a_cancelled_coroutine_is_left_out_of_the_group_without_harm(fleet, crowd):
    with locked(fleet):
        sent = crowd.gather([plain(), plain(), plain(), plain()], "coroutine")
        sent[2].cancel()
        sent[0].cancel()  # on its way already
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), crowd.loop).result(60)
    assert [len(sent[place].result(60)) for place in (1, 3)] == [1, 1]
    assert transactions(fleet) == [1, 2]


def test_k09_a_cancelled_caller_does_not_keep_others_from_their_answers():
    async def main() -> list[Any]:
        gone, here = (asyncio.get_running_loop().create_future() for _ in range(2))
        gone.cancel()
        group_commit._tell([(gone, []), (here, [[1]])])
        return await here

    assert asyncio.run(main()) == [[1]]


def test_k09_an_enqueue_that_waits_for_a_key_does_not_hold_up_the_others(fleet, monkeypatch):
    monkeypatch.setattr(postgres, "LOCK_TIMEOUT", "set local lock_timeout = 0")
    with psycopg.connect(fleet.url) as theirs, ThreadPoolExecutor(2) as threads:
        caller.run(theirs, keyed("k"))
        waiting = threads.submit(fleet.run, keyed("k"))
        until(lambda: fleet.query("select 1 from pg_locks where not granted"))
        for _ in range(5):
            threads.submit(fleet.run, plain()).result(60)
        assert not waiting.done()
        theirs.commit()
        assert waiting.result(60)[0].deduplicated


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_k09_an_interrupted_leader_leaves_no_caller_waiting(fleet, crowd, monkeypatch, error, committed):
    """Nor is anybody told that his job was refused, or has it twice, when it had been committed by then."""
    transact = fleet.driver._transact
    led, go_on = threading.Event(), threading.Event()

    def interrupted(batch: Any, lock_timeout: Any) -> Any:
        if not go_on.is_set():
            led.set()
            go_on.wait(60)
            return transact(batch, lock_timeout)
        monkeypatch.setattr(fleet.driver, "_transact", transact)
        if committed:
            transact(batch, lock_timeout)
        raise error

    monkeypatch.setattr(fleet.driver, "_transact", interrupted)
    sent = [crowd.send(plain(), "thread")]
    led.wait(60)
    for kind in ("thread", "thread", "coroutine"):
        sent.append(crowd.send(plain(), kind))
        until(lambda: len(fleet.driver._gathering._waiting) == len(sent) - 1)
    go_on.set()
    failed = [type(future.exception(60)) for future in sent]
    assert failed == [type(None), error, type(None), type(None)]
    assert fleet.query("select count(*) from duly_job") == [(4 if committed else 3,)]


def test_k09_an_interrupted_waiter_passes_on_the_group_it_was_to_lead():
    done: list[str] = []
    gathering = group_commit.Gathering(
        lambda batch: [done.append(op.name) or [] for op in batch],
        lost=lambda op, error: AnswerLost(op.name),
        start=lambda work: work(),
    )
    first = group_commit.Answer()
    gathering._led = True
    gathering._waiting.append(group_commit.Waiting(plain(), first))
    gathering._hand_on()
    assert first.result() is group_commit.Word.LEAD
    gathering._leave(first)
    second = group_commit.Answer()
    gathering._waiting.append(group_commit.Waiting(plain(), second))
    gathering._leave(second)
    assert not gathering._waiting
    assert gathering.run(plain()) == []
    assert len(done) == 1


def test_k09_a_batch_has_its_limits(fleet, crowd, monkeypatch):
    monkeypatch.setattr(group_commit, "MOST_OPS", 3)
    with locked(fleet):
        sent = crowd.gather([plain() for _ in range(8)], "coroutine")
    [future.result(60) for future in sent]
    assert transactions(fleet) == [1, 3, 3, 1]
    fleet.query("delete from duly_job")
    monkeypatch.setattr(group_commit, "MOST_CHARS", len('{"n":1}') + 1)
    with locked(fleet):
        sent = crowd.gather([plain() for _ in range(3)], "thread")
    [future.result(60) for future in sent]
    assert transactions(fleet) == [1, 1, 1]


def test_k09_two_processes_that_enqueue_the_same_keys_in_other_orders_do_not_wait_in_a_circle(fleet):
    other = PostgresDriver(fleet.url)
    names = [f"key-{n}" for n in range(30)]
    with ThreadPoolExecutor(2) as threads:
        for turn in range(10):
            batch = [keyed(f"{turn}-{name}") for name in names]
            same = [keyed(f"{turn}-{name}") for name in reversed(names)]
            work = [
                threads.submit(fleet.driver._transact, batch, postgres.LOCK_TIMEOUT),
                threads.submit(other._transact, same, postgres.LOCK_TIMEOUT),
            ]
            [one.result(60) for one in work]
    other.close()
    assert fleet.query("select count(*) from duly_job") == [(300,)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from 3.12 on Python warns of fork with threads
def test_j06_a_child_that_was_forked_during_a_commit_enqueues_too(fleet, crowd):
    with locked(fleet):
        sent = crowd.gather([plain(), plain()], "thread")
        child = os.fork()
        if child == 0:
            try:
                fleet.driver.run(plain())
            finally:
                os._exit(0)
        until(lambda: len(blocked(fleet)) == 2)
    [future.result(60) for future in sent]
    os.waitpid(child, 0)
    assert fleet.query("select count(*) from duly_job") == [(3,)]


def test_k09_enqueues_that_lock_more_than_one_key_or_jobs_share_no_commit(fleet):
    """Each of these was seen to wait in a circle with another: see the races of the proof."""
    driver = fleet.driver
    held = Held(new_id(), 1)
    several = ops.enqueue(Terms("mail"), [NewJob(new_id(), "{}", key=key) for key in "ab"])
    by_handler = ops.enqueue(Terms("mail"), [NewJob(new_id(), "{}", key="a")], parent=held)
    for alone in (several, by_handler, keyed("a").again, plain().again):
        assert not driver._gathers(alone)
    for shared in (plain(), keyed("a"), ops.enqueue(Terms("mail"), [NewJob(new_id(), "{}")], parent=held)):
        assert driver._gathers(shared)
