"""Enqueue: durable, repeatable, in time, once per key. Lines J01, J04, J05, K01 to K04, K09 and M01."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from duly.errors import ConfigError, EnqueueUnknown, PayloadTooLarge, StoreRefused
from duly.model import DAY_MS, Change, Enqueued, Envelope, NewJob, State, Terms
from duly.rules import envelope
from duly.rules.codec import MAX_PAYLOAD
from duly.store import ops
from duly.store.driver import Point
from duly.store.op import Finish, Held, Op
from tests.contract.stores import NOW, D1OnFile, D1Store, PostgresStore, SQLiteStore, Store, new_id, snooze, spoiled

HOUR_MS = 3_600_000


def names_and_states(store: Store) -> list[tuple[str, str]]:
    return sorted(store.query("select id, state from duly_job"))


@contextmanager
def next_answer_lost(store: Store, op: str, *, meanwhile: Callable[[], None] | None = None) -> Iterator[list[str]]:
    """Lose the answer of the next `op`, after its commit; `meanwhile` happens before it is asked again."""
    lost: list[str] = []

    def due(name: str) -> bool:
        if lost or name != op:
            return False
        lost.append(name)
        return True

    if isinstance(store, D1Store):
        number = store.database.calls + 1
        store.lose(lambda call: call == number and due(op))
        assert isinstance(store.driver, D1OnFile)
        store.driver.before_again = meanwhile
        yield lost
        store.lose(lambda call: call % 7 == 0)
        return

    def hook(point: Point) -> None:
        if (point.moment, point.section) == ("after", "commit") and due(point.op):
            if meanwhile:
                meanwhile()
            broken = sqlite3.OperationalError if store.kind == "sqlite" else psycopg.OperationalError
            raise broken("the connection broke")

    store.driver.hook = hook
    yield lost
    store.driver.hook = None


# J01


@pytest.mark.parametrize("key", [None, "k"])
def test_j01_a_job_is_visible_to_every_connection_when_enqueue_returns(store: Store, key: str | None) -> None:
    """`query` looks through a connection of its own, which sees only what is committed."""
    job = NewJob(new_id(), '{"n":1}', key=key)
    store.run(ops.enqueue(Terms("work"), [job], now=NOW))
    assert names_and_states(store) == [(job.id, "ready")]


def test_j01_sqlite_commits_are_synced_to_the_disk_before_enqueue_returns(tmp_path) -> None:
    store = SQLiteStore(tmp_path / "duly.db")
    conn = store.driver.connect()
    assert conn.execute("pragma synchronous").fetchone() == (2,)  # FULL
    assert conn.execute("pragma journal_mode").fetchone() == ("wal",)
    conn.close()
    order: list[str] = []
    store.driver.hook = lambda point: order.append(point.section) if point.moment == "after" else None
    store.enqueue()
    order.append("returned")
    store.close()
    assert order == ["enqueue_one", "commit", "returned"]


@pytest.mark.parametrize("key", [None, "k"])
def test_j01_a_job_under_an_id_that_another_has_is_refused_and_not_taken_for_added(
    store: Store, key: str | None
) -> None:
    """Ids are made by chance. On D1 a request may come twice, so there each enqueue finds a job of its id."""
    job = NewJob(new_id(), '{"n":1}')
    store.run(ops.enqueue(Terms("work"), [job], now=NOW))
    before = store.snapshot()
    same = ops.enqueue(Terms("work"), [NewJob(new_id(), "2", key=key and "j"), NewJob(job.id, "3", key=key)])
    if isinstance(store, D1Store):
        store.run(same)
        assert store.get(job.id).payload == {"n": 1}
        return
    with pytest.raises(StoreRefused):
        store.run(same)
    assert store.snapshot() == before


def run_it(store: Store, change: Change, *, then_prune: bool = False) -> None:
    [job] = store.claim(1)
    store.finish(job, change)
    if then_prune:
        for what in ("results", "done"):
            store.run(ops.prune(what, now=NOW + 8 * DAY_MS))


MEANWHILE: dict[str, Callable[[Store], None]] = {
    "still waits": lambda store: None,
    "is running": lambda store: store.claim(1) and None,
    "has succeeded": lambda store: run_it(store, Change(State.SUCCEEDED, result='"done"')),
    "is partial": lambda store: run_it(store, Change(State.PARTIAL, reason="a", result='"done"')),
    "is dead": lambda store: run_it(store, Change(State.DEAD, reason="no")),
    "was cancelled": lambda store: run_it(store, Change(State.CANCELLED, reason="no")),
}
KEYED_MEANWHILE = {
    **MEANWHILE,
    "was pruned": lambda store: run_it(store, Change(State.SUCCEEDED, result='"done"'), then_prune=True),
}


@pytest.mark.parametrize("fate", MEANWHILE)
def test_j01_enqueue_repeated_after_a_lost_answer_changes_nothing(store: Store, fate: str) -> None:
    job = NewJob(new_id(), '{"n":1}')
    seen: list[Any] = []

    def meanwhile() -> None:
        MEANWHILE[fate](store)
        seen.append(store.snapshot())

    with meanwhile_on_another_thread(store, meanwhile) as go, next_answer_lost(store, "enqueue", meanwhile=go) as lost:
        answer = store.run(ops.enqueue(Terms("work"), [job], now=NOW))
    assert lost
    assert answer == [Enqueued(job.id)]
    assert store.snapshot() == seen[0]
    if fate != "still waits":
        assert store.claim(10) == []


@pytest.mark.parametrize("fate", KEYED_MEANWHILE)
def test_j01_keyed_enqueue_repeated_after_a_lost_answer_changes_nothing(store: Store, fate: str) -> None:
    job = NewJob(new_id(), '{"n":1}', key="k")
    seen: list[Any] = []

    def meanwhile() -> None:
        KEYED_MEANWHILE[fate](store)
        seen.append(store.snapshot())

    with meanwhile_on_another_thread(store, meanwhile) as go, next_answer_lost(store, "enqueue", meanwhile=go) as lost:
        [answer] = store.run(ops.enqueue(Terms("work"), [job], now=NOW))
    assert lost
    assert (answer.id, answer.deduplicated, answer.conflict) == (job.id, False, False)
    assert answer.succeeded == (fate in ("has succeeded", "is partial", "was pruned"))
    assert store.snapshot() == seen[0]
    if fate != "still waits":
        assert store.claim(10) == []


@contextmanager
def meanwhile_on_another_thread(store: Store, what: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """SQLite's writer thread cannot wait for itself: what happens meanwhile comes from a second driver."""
    if not isinstance(store, SQLiteStore):
        yield what
        return
    ours, store.driver = store.driver, SQLiteStore(store.path).driver
    other, store.driver = store.driver, ours

    def switched() -> None:
        store.driver = other
        what()
        store.driver = ours

    yield switched
    other.close()


def test_j01_a_keyless_job_of_keep_0_is_never_enqueued_twice_automatically(store: Store) -> None:
    asked: list[str] = []
    execute = store.driver.execute

    def counting(op: Op[Any]) -> Any:
        asked.append(op.name)
        return execute(op)

    store.driver.execute = counting  # type: ignore[method-assign]
    with next_answer_lost(store, "enqueue"), pytest.raises(EnqueueUnknown, match="may or may not"):
        store.enqueue(keep_ms=0)
    assert asked == ["enqueue"]
    assert len(names_and_states(store)) == 1


def test_j01_a_keyed_job_of_keep_0_is_repeated_safely(store: Store) -> None:
    with next_answer_lost(store, "enqueue") as lost:
        first = store.enqueue_key("k", keep_ms=0)
    assert lost
    assert names_and_states(store) == [(first.id, "ready")]


def test_j01_a_cancelled_caller_does_not_stop_the_writer(tmp_path) -> None:
    """A cancelled coroutine leaves a cancelled answer behind, which must not be the end of everybody's writes."""
    store = SQLiteStore(tmp_path / "duly.db")
    running, go_on = threading.Event(), threading.Event()

    def hook(point: Point) -> None:
        if point == Point("before", "enqueue", "commit", 0):
            running.set()
            go_on.wait(10)

    async def main() -> None:
        store.driver.hook = hook
        taken = asyncio.create_task(store.driver.arun(ops.enqueue(Terms("work"), [NewJob(new_id(), "1")])))
        await asyncio.to_thread(running.wait, 10)
        queued = asyncio.create_task(store.driver.arun(ops.enqueue(Terms("work"), [NewJob(new_id(), "2")])))
        await asyncio.sleep(0)
        for task in (taken, queued):
            task.cancel()
        await asyncio.gather(taken, queued, return_exceptions=True)
        store.driver.hook = None
        go_on.set()
        await asyncio.wait_for(store.driver.arun(ops.enqueue(Terms("work"), [NewJob(new_id(), "3")])), 10)

    asyncio.run(main())
    # What had begun was written all the same; what had not was not.
    assert sorted(row[0] for row in store.query("select payload from duly_job")) == ["1", "3"]
    store.close()


# J04


def test_j04_a_payload_of_exactly_the_limit_is_taken(store: Store) -> None:
    payload = '"' + "x" * (MAX_PAYLOAD - 2) + '"'
    assert len(payload) == 96_000
    store.enqueue(payload=payload)
    assert store.claim(1)[0].payload == payload


@pytest.mark.parametrize("letter", ["x", "ä", "語", "😀"])
@pytest.mark.parametrize("key", [None, "k"])
def test_j04_one_byte_more_is_refused_with_size_limit_and_task(store: Store, letter: str, key: str | None) -> None:
    """Bytes count, not characters."""
    filler = letter * ((MAX_PAYLOAD - 2) // len(letter.encode()) + 1)
    payload = f'"{filler}"'
    size = len(payload.encode())
    before = store.snapshot()
    with pytest.raises(PayloadTooLarge) as refusal:
        store.run(ops.enqueue(Terms("mail.send"), [NewJob(new_id(), "1", key=key), NewJob(new_id(), payload, key=key)]))
    for part in ("mail.send", f"{size:,}", "96,000"):
        assert part in str(refusal.value)
    assert store.snapshot() == before


def test_j04_multi_byte_text_just_below_the_limit_is_taken(store: Store) -> None:
    payload = '"' + "語" * ((MAX_PAYLOAD - 2) // 3) + '"'
    assert len(payload.encode()) in range(MAX_PAYLOAD - 2, MAX_PAYLOAD + 1)
    store.enqueue(payload=payload)
    assert store.claim(1)[0].payload == payload


# J05


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("when", [{"delay_ms": 5000}, {"due_at": NOW + 5000}, {"due_at": NOW + 5000, "delay_ms": 9}])
def test_j05_a_job_is_never_early(store: Store, when: dict[str, int], key: str | None) -> None:
    job = NewJob(new_id(), "1", key=key)
    store.run(ops.enqueue(Terms("work", **when), [job], now=NOW))
    assert store.state(job.id) == "scheduled"
    assert store.get(job.id).due_at == NOW + 5000
    store.now = NOW + 4999
    store.run(ops.promote("default", now=store.now))
    assert store.state(job.id) == "scheduled"
    assert store.claim(5) == []
    store.now = NOW + 5000
    assert [taken.id for taken in store.claim(5)] == [job.id]


def test_j05_a_time_in_the_past_means_now_and_keeps_its_due_time(store: Store) -> None:
    [late] = store.enqueue(due_at=NOW - HOUR_MS)
    assert store.state(late) == "ready"
    assert [(job.id, job.due_at) for job in store.claim(5)] == [(late, NOW - HOUR_MS)]


def test_j05_a_delay_counts_from_the_databases_clock_when_no_moment_is_given(store: Store) -> None:
    job = NewJob(new_id(), "1")
    before = store.run(ops.clock())
    store.run(ops.enqueue(Terms("work", delay_ms=HOUR_MS), [job]))
    after = store.run(ops.clock())
    assert before + HOUR_MS <= store.get(job.id).due_at <= after + HOUR_MS
    assert store.run(ops.claim("default", limit=5, token=1, worker="w")) == []


@pytest.mark.parametrize("limit", [{"expires_ms": 1000}, {"expires_at": NOW + 1000}])
@pytest.mark.parametrize("when", [{}, {"delay_ms": 500}])
def test_j05_a_job_that_did_not_start_in_time_is_cancelled_as_expired(
    store: Store, limit: dict[str, int], when: dict[str, int]
) -> None:
    [late] = store.enqueue(**limit, **when)
    store.now = NOW + 999
    assert store.run(ops.expirable(now=store.now)) == []
    assert store.run(ops.expire([late], now=store.now)) == []
    store.now = NOW + 1000
    assert store.claim(5) == []
    assert store.run(ops.expirable(now=store.now)) == [late]
    assert store.run(ops.expire([late], now=store.now)) == [late]
    job = store.get(late)
    assert (job.state, job.reason, job.finished_at) == (State.CANCELLED, "expired", NOW + 1000)


def test_j05_a_job_is_claimed_until_the_moment_it_expires(store: Store) -> None:
    [last_moment] = store.enqueue(expires_ms=1000)
    store.now = NOW + 999
    assert [job.id for job in store.claim(5)] == [last_moment]


def started(store: Store, how: str) -> str:
    """A job that has been started and, but for `runs`, waits to go on."""
    [job_id] = store.enqueue(expires_ms=1000)
    [job] = store.claim(1)
    match how:
        case "retries":
            store.retry(job, after_ms=10)
        case "was snoozed":
            store.run(snooze(job, 10, now=store.now))
        case "was rescued":
            store.now = job.lease_until
            store.run(ops.rescue(store.run(ops.expired_leases(now=store.now)), now=store.now))
    return job_id


@pytest.mark.parametrize("how", ["runs", "retries", "was snoozed", "was rescued"])
def test_j05_a_job_that_has_started_does_not_expire(store: Store, how: str) -> None:
    job_id = started(store, how)
    store.now = max(store.now, NOW + 5000)
    assert store.run(ops.expirable(now=store.now)) == []
    assert store.run(ops.expire([job_id], now=store.now)) == []
    assert store.state(job_id) in ("running", "scheduled", "ready")
    if how != "runs":
        assert [job.id for job in store.claim(5, alone=how == "was rescued")] == [job_id]


# K01


def test_k01_the_key_of_a_live_job_gives_that_job(store: Store) -> None:
    first = store.enqueue_key("k")
    assert first.deduplicated is False
    for fate in ("waits", "runs", "retries"):
        if fate == "runs":
            [job] = store.claim(1)
        if fate == "retries":
            store.retry(job)
        again = store.enqueue_key("k")
        assert (again.id, again.deduplicated, again.conflict, again.succeeded) == (first.id, True, False, False), fate
    assert len(names_and_states(store)) == 1


def test_k01_the_same_key_of_another_task_is_another_key(store: Store) -> None:
    one, two = store.enqueue_key("k", task="one"), store.enqueue_key("k", task="two", payload='{"n":2}')
    assert not one.deduplicated
    assert not two.deduplicated
    assert not two.conflict
    assert len(names_and_states(store)) == 2
    for job in store.claim(2):
        store.kill(job) if job.task == "one" else store.succeed(job)
    assert not store.enqueue_key("k", task="one").deduplicated
    assert store.enqueue_key("k", task="two", payload='{"n":2}').id == two.id


def test_k01_another_payload_under_the_key_of_a_live_job_is_a_conflict(store: Store) -> None:
    first = store.enqueue_key("k", payload='{"n":1}')
    before = store.snapshot()
    other = store.enqueue_key("k", payload='{"n":2}')
    assert (other.id, other.conflict) == (first.id, True)
    assert store.snapshot() == before


def test_k01_another_payload_under_the_key_of_a_succeeded_job_is_a_conflict(store: Store) -> None:
    first = store.enqueue_key("k", payload='{"n":1}')
    store.succeed(store.claim(1)[0], '"done"')
    before = store.snapshot()
    other = store.enqueue_key("k", payload='{"n":2}')
    assert (other.id, other.conflict) == (first.id, True)
    assert store.snapshot() == before


def test_k01_the_order_of_names_in_a_payload_makes_no_other_payload(store: Store) -> None:
    first = store.enqueue_key("k", payload='{"a":1,"b":{"x":1,"y":[1,2]}}')
    again = store.enqueue_key("k", payload='{ "b": {"y": [1, 2], "x": 1}, "a": 1 }')
    assert (again.id, again.deduplicated, again.conflict) == (first.id, True, False)
    assert store.enqueue_key("k", payload='{"a":1,"b":{"x":1,"y":[2,1]}}').conflict


def test_k01_the_same_key_twice_in_one_enqueue_is_one_job(store: Store) -> None:
    jobs = [NewJob(new_id(), payload, key=key) for key, payload in [("b", "1"), ("a", "1"), ("b", "1"), ("b", "2")]]
    answers = store.run(ops.enqueue(Terms("work"), jobs, now=NOW))
    assert [answer.id for answer in answers] == [jobs[0].id, jobs[1].id, jobs[0].id, jobs[0].id]
    assert [answer.deduplicated for answer in answers] == [False, False, True, True]
    assert [answer.conflict for answer in answers] == [False, False, False, True]
    assert names_and_states(store) == sorted([(jobs[0].id, "ready"), (jobs[1].id, "ready")])


def test_k01_the_first_of_two_takes_an_expired_key(store: Store) -> None:
    store.enqueue_key("k", key_ttl_ms=1000)
    store.succeed(store.claim(1)[0])
    store.now += 1000
    jobs = [NewJob(new_id(), "1", key="k") for _ in range(2)]
    answers = store.run(ops.enqueue(Terms("work"), jobs, now=store.now))
    assert [answer.id for answer in answers] == [jobs[0].id, jobs[0].id]
    assert [job.id for job in store.claim(5)] == [jobs[0].id]


# K02


@pytest.mark.parametrize("end", [State.SUCCEEDED, State.PARTIAL])
def test_k02_after_success_the_key_gives_the_job_and_its_result(store: Store, end: State) -> None:
    first = store.enqueue_key("k")
    store.finish(store.claim(1)[0], Change(end, result='{"x":1}'))
    again = store.enqueue_key("k")
    assert again == Enqueued(first.id, deduplicated=True, succeeded=True, result='{"x":1}')
    assert store.claim(5) == []


@pytest.mark.parametrize("keep_ms", [0, 1000])
def test_k02_the_same_id_is_given_after_the_row_was_pruned(store: Store, keep_ms: int) -> None:
    first = store.enqueue_key("k", keep_ms=keep_ms)
    store.succeed(store.claim(1)[0], '"done"')
    store.now += 1000
    for what in ops.PRUNABLE:
        store.run(ops.prune(what, now=store.now))
    assert store.get(first.id) is None
    again = store.enqueue_key("k")
    assert again == Enqueued(first.id, deduplicated=True, succeeded=True, result='"done"')
    assert store.claim(5) == []


@pytest.mark.parametrize(("size", "kept"), [(65_536, True), (65_537, False)])
@pytest.mark.parametrize("letter", ["x", "ä"])
def test_k02_a_result_over_64_kb_is_not_kept_with_the_key(store: Store, size: int, kept: bool, letter: str) -> None:
    room = size - 2
    filler = letter * (room // len(letter.encode()))
    result = f'"{filler}{"x" * (room - len(filler.encode()))}"'
    assert len(result.encode()) == size
    for key, borrowed in (("k", False), ("on the caller's connection", True)):
        first = store.enqueue_key(key)
        done = Finish(store.claim(1)[0], Change(State.SUCCEEDED, result=result))
        store.run(ops.finish([done], borrowed=borrowed, now=store.now))
        again = store.enqueue_key(key)
        assert (again.id, again.succeeded) == (first.id, True)
        assert (again.result, again.result_dropped) == ((result, False) if kept else (None, True))


# K03


def end_it(store: Store, how: str, job_id: str) -> None:
    match how:
        case "dead":
            store.kill(store.claim(1)[0])
        case "cancelled by its handler":
            store.finish(store.claim(1)[0], Change(State.CANCELLED, reason="no"))
        case "cancelled":
            store.run(ops.cancel([job_id], by="me", why="no", now=store.now))
        case "expired":
            store.run(ops.expire([job_id], now=store.now + 10))
        case "killed its worker":
            job = store.claim(1)[0]
            store.now = job.lease_until
            store.run(ops.rescue(store.run(ops.expired_leases(now=store.now)), now=store.now))


@pytest.mark.parametrize("how", ["dead", "cancelled by its handler", "cancelled", "expired", "killed its worker"])
def test_k03_death_and_cancelling_free_the_key(store: Store, how: str) -> None:
    first = store.enqueue_key("k", expires_ms=10, max_attempts=1)
    other = store.enqueue_key("other", due_at=NOW + DAY_MS)
    end_it(store, how, first.id)
    assert store.state(first.id) in ("dead", "cancelled")
    again = store.enqueue_key("k", payload='{"n":2}')
    assert again == Enqueued(again.id)
    assert again.id != first.id
    assert [job.id for job in store.claim(5)] == [again.id]
    assert store.enqueue_key("other").id == other.id


def test_k03_an_old_death_does_not_free_the_key_of_a_later_job(store: Store) -> None:
    first = store.enqueue_key("k")
    [job] = store.claim(1)
    store.kill(job)
    second = store.enqueue_key("k")
    store.kill(job)  # the same write, repeated late
    assert store.enqueue_key("k").id == second.id
    assert first.id != second.id


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_k03_threads_racing_for_one_key_get_one_job(kind: str, tmp_path, request: pytest.FixtureRequest) -> None:
    made = (
        (lambda: SQLiteStore(tmp_path / "duly.db"))
        if kind == "sqlite"
        else (lambda url: lambda: PostgresStore(url))(request.getfixturevalue("postgres_url"))
    )
    stores = [made() for _ in range(8)]
    rounds = 25
    answers: list[list[Enqueued]] = [[] for _ in stores]
    barrier = threading.Barrier(len(stores))

    def race(mine: Store, found: list[Enqueued]) -> None:
        for number in range(rounds):
            barrier.wait(30)
            found.append(mine.enqueue_key(f"k{number}"))

    threads = [threading.Thread(target=race, args=pair) for pair in zip(stores, answers, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(rounds):
        of_round = [found[number] for found in answers]
        assert len({answer.id for answer in of_round}) == 1
        assert [answer.deduplicated for answer in of_round].count(False) == 1
    assert len(names_and_states(stores[0])) == rounds
    for one in stores:
        one.close()


# K04


def test_k04_keys_are_kept_15_days_and_results_one_by_default(store: Store) -> None:
    first = store.enqueue_key("k")
    [plain] = store.enqueue()
    for job in store.claim(2):
        store.succeed(job, '"done"')
    store.now = NOW + DAY_MS
    assert store.get(plain).result is None
    store.now = NOW + 15 * DAY_MS - 1
    assert store.enqueue_key("k").id == first.id
    store.run(ops.prune("keys", now=store.now))
    assert store.enqueue_key("k").id == first.id
    store.now = NOW + 15 * DAY_MS
    again = store.enqueue_key("k", payload='{"n":2}')
    assert again == Enqueued(again.id)
    assert again.id != first.id


def test_k04_an_expired_key_is_free_before_and_after_pruning(store: Store) -> None:
    for prune in (False, True):
        first = store.enqueue_key("k", key_ttl_ms=1000)
        store.succeed(store.claim(1)[0], '"old"')
        store.now += 1000
        if prune:
            store.run(ops.prune("keys", now=store.now))
            assert store.query("select count(*) from duly_key")[0][0] == 0
        again = store.enqueue_key("k")
        assert again.id != first.id
        assert (again.succeeded, again.result) == (False, None)
        store.kill(store.claim(1)[0])


def test_k04_the_key_of_a_live_job_never_expires(store: Store) -> None:
    first = store.enqueue_key("k", delay_ms=400 * DAY_MS)
    store.now += 399 * DAY_MS
    store.run(ops.prune("keys", now=store.now))
    assert store.enqueue_key("k").id == first.id


# K09


def test_k09_a_conflict_leaves_the_others_of_its_batch_enqueued(store: Store) -> None:
    taken = store.enqueue_key("b", payload="1")
    jobs = [NewJob(new_id(), "2", key=key) for key in "abc"]
    answers = store.run(ops.enqueue(Terms("work"), jobs, now=NOW))
    assert [answer.conflict for answer in answers] == [False, True, False]
    assert [answer.id for answer in answers] == [jobs[0].id, taken.id, jobs[2].id]
    assert names_and_states(store) == sorted((i, "ready") for i in (jobs[0].id, taken.id, jobs[2].id))


@pytest.mark.parametrize("terms", [({}, {}), ({"lane": "a"}, {"lane": "b"}), ({"key": "a"}, {"key": "b"})])
def test_j01_two_jobs_of_one_list_with_the_same_id_are_refused(terms: tuple[dict[str, str], ...]) -> None:
    same = new_id()
    with pytest.raises(ConfigError, match="work: one enqueue got two jobs with the same id"):
        ops.enqueue(Terms("work"), [NewJob(same, "1", **one) for one in terms])


def test_j01_a_repetition_has_the_original_jobs_even_if_the_list_changed() -> None:
    jobs = [NewJob(new_id(), "1")]
    op = ops.enqueue(Terms("work"), jobs, now=NOW)
    [job] = jobs
    jobs.clear()
    assert op.again is not None
    assert job.id in op.again.params["payloads"]


def test_k09_jobs_with_and_without_keys_are_not_mixed_in_one_operation() -> None:
    with pytest.raises(ConfigError, match="split them"):
        ops.enqueue(Terms("work"), [NewJob(new_id(), "1", key="k"), NewJob(new_id(), "1")])


LONE_TERMS = {
    "all": Terms(
        "work", queue="mail", priority=7, max_attempts=3, lease_ms=9000, keep_ms=DAY_MS, result_ttl_ms=70, schedule="s",
        on_dead='{"task":"t"}',
    ),
    "none": Terms("work"),
    "delayed": Terms("work", delay_ms=HOUR_MS, expires_ms=2 * HOUR_MS),
    "at": Terms("work", due_at=NOW + 5, expires_at=NOW + 9),
    "past": Terms("work", due_at=NOW - 5),
}  # fmt: skip


@pytest.mark.parametrize("terms", LONE_TERMS.values(), ids=LONE_TERMS)
def test_j05_a_job_that_is_enqueued_alone_is_like_one_of_a_list(store: Store, terms: Terms) -> None:
    envelope = Envelope(subject="s", correlation_id="c")
    jobs = [NewJob(new_id(), '{"n":1}', envelope=envelope, lane="work:x") for _ in range(3)]
    alone = ops.enqueue(terms, jobs[:1], now=NOW)
    assert alone.sections == ("enqueue_one",)
    assert [one.id for one in store.run(alone)] == [jobs[0].id]
    store.run(ops.enqueue(terms, jobs[1:], now=NOW))
    rows = store.snapshot()["duly_job"]
    assert len(rows) == 3
    assert len({tuple(value for value in row if value not in [job.id for job in jobs]) for row in rows}) == 1


def test_j05_only_jobs_that_need_no_lookup_take_the_short_path(store: Store) -> None:
    def sections(terms: Terms, **options: Any) -> tuple[str, ...]:
        return ops.enqueue(terms, [NewJob(new_id(), "1", lane="work:x")], now=NOW, **options).sections

    store.enqueue()
    [parent] = store.claim()
    assert sections(Terms("work"), parent=Held(parent.id, parent.token)) == ("hold_parent", "enqueue")
    assert sections(Terms("work", ordering_dead="block")) == ("enqueue", "hand_out")
    assert sections(Terms("work", batch_id=new_id())) == ("enqueue",)


def test_k09_a_refused_job_fails_alone_within_its_group_commit(tmp_path) -> None:
    """The writer is held in a commit while five operations gather behind it; the third cannot be written."""
    store = SQLiteStore(tmp_path / "duly.db")
    running, go_on = threading.Event(), threading.Event()
    points: list[Point] = []

    def hook(point: Point) -> None:
        points.append(point)
        if point.section == "commit" and point.moment == "before" and not running.is_set():
            running.set()
            go_on.wait(10)

    def enqueue(payload: str, key: str | None) -> Op[Any]:
        return ops.enqueue(Terms("work"), [NewJob(new_id(), payload, key=key)])

    def same(op: Op[Any]) -> Op[Any]:
        return op

    async def main() -> list[Any]:
        store.driver.hook = hook
        first = asyncio.create_task(store.driver.arun(ops.enqueue(Terms("work"), [NewJob(new_id(), "0")])))
        await asyncio.to_thread(running.wait, 10)
        points.clear()
        gathered = [
            asyncio.create_task(
                store.driver.arun(change(ops.enqueue(Terms("work"), [NewJob(new_id(), str(n), key=key)])))
            )
            for n, (change, key) in enumerate([(same, None), (same, "k"), (spoiled, None), (same, "k"), (same, None)])
        ]
        await asyncio.sleep(0)
        go_on.set()
        return await asyncio.gather(first, *gathered, return_exceptions=True)

    answers = asyncio.run(main())
    store.driver.hook = None
    # They did travel together: more than one enqueue began before any commit.
    begun = [p.section for p in points if p.moment == "after"]
    assert begun[1:4] == ["enqueue_one", "reserve_keys", "enqueue_keyed"]
    assert [type(answer).__name__ for answer in answers] == ["list", "list", "list", "StoreRefused", "list", "list"]
    assert answers[4][0].conflict
    assert sorted(row[0] for row in store.query("select payload from duly_job")) == ["0", "0", "1", "4"]
    store.close()


def test_k09_a_refused_job_writes_nothing_and_raises(store: Store) -> None:
    before = store.snapshot()
    with pytest.raises(StoreRefused):
        store.run(spoiled(ops.enqueue(Terms("work"), [NewJob(new_id(), "1", key="k")], now=NOW)))
    assert store.snapshot() == before
    assert not store.enqueue_key("k").deduplicated


# M01

ENVELOPE = Envelope(
    schema_version=3,
    correlation_id="order-42",
    causation_id="request-7",
    subject="customer/ä",
    traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    payload_ref="blob://x",
)


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("end", [State.SUCCEEDED, State.DEAD])
def test_m01_the_envelope_survives_from_enqueue_to_the_finished_job(store: Store, key: str | None, end: State) -> None:
    job = NewJob(new_id(), '{"n":1}', key=key, envelope=ENVELOPE)
    store.run(ops.enqueue(Terms("mail.send"), [job], now=NOW))

    def carried() -> tuple[Any, ...]:
        record = store.get(job.id)
        return (
            record.task, record.key, record.schema_version, record.correlation_id, record.causation_id, record.subject,
            record.traceparent, record.payload_ref, record.payload, record.created_at,
        )  # fmt: skip

    expected = (
        "mail.send", key, 3, "order-42", "request-7", "customer/ä", ENVELOPE.traceparent, "blob://x", {"n": 1}, NOW
    )  # fmt: skip
    assert carried() == expected
    store.now += 5
    [claimed] = store.claim(1)
    assert (claimed.task, claimed.key, claimed.envelope, claimed.created_at) == ("mail.send", key, ENVELOPE, NOW)
    assert carried() == expected
    store.finish(claimed, Change(end))
    assert store.state(job.id) == end.value
    assert carried() == expected


def test_m01_each_job_of_a_list_is_of_its_own_kind(store: Store) -> None:
    plain = Envelope()
    kinds = [
        (None, ENVELOPE),
        (None, plain),
        ("é", plain),
        ('"', plain),
        ("é", Envelope(subject="a")),
        (None, ENVELOPE),
    ]
    jobs = [NewJob(new_id(), str(n), lane=lane, envelope=one) for n, (lane, one) in enumerate(kinds)]
    store.run(ops.enqueue(Terms("work"), jobs, now=NOW))
    packed = [envelope.pack(one) for _, one in kinds]
    expected = [(job.id, job.payload, job.lane, text) for job, text in zip(jobs, packed, strict=True)]
    rows = store.query("select id, payload, lane, envelope from duly_job order by payload")
    assert [(str(id_), *others) for id_, *others in rows] == expected


def test_m01_a_job_without_correlation_is_its_own(store: Store) -> None:
    [job_id] = store.enqueue()
    record = store.get(job_id)
    assert (record.correlation_id, record.causation_id, record.schema_version) == (job_id, None, 1)


def test_m01_created_at_is_the_databases_clock(store: Store) -> None:
    plain, keyed = NewJob(new_id(), "1"), NewJob(new_id(), "1", key="k")
    before = store.run(ops.clock())
    for job in (plain, keyed):
        store.run(ops.enqueue(Terms("work"), [job]))
    after = store.run(ops.clock())
    for job in (plain, keyed):
        assert before <= store.get(job.id).created_at <= after


@pytest.mark.parametrize("key", [None, "k"])
def test_j09_a_handler_that_lost_its_lease_enqueues_nothing(store: Store, key: str | None) -> None:
    store.enqueue(lease_ms=1000)
    (parent,) = store.claim()
    child = ops.enqueue(
        Terms("child"), [NewJob(new_id(), "{}", key=key)], parent=Held(parent.id, parent.token), now=store.now
    )
    assert len(store.run(child)) == 1
    store.now += 1000
    store.run(ops.rescue(store.run(ops.expired_leases(now=store.now)), now=store.now))
    before = store.snapshot()
    late = ops.enqueue(
        Terms("late"), [NewJob(new_id(), "{}", key=key)], parent=Held(parent.id, parent.token), now=store.now
    )
    assert store.run(late) == []
    assert store.snapshot() == before
