"""Claim and keep: each job once, in order, fenced by its token. Lines J06 to J10, J15, J23, J26, J28, R10 and B09."""

from __future__ import annotations

import itertools
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace
from psycopg.conninfo import make_conninfo

from duly.errors import ConfigError
from duly.model import Change, Claimed, Envelope, Failure, NewJob, Sighting, State, Terms
from duly.rules.lifecycle import ARROWS
from duly.store import lanes, ops, queues
from duly.store.lanes import Walk
from duly.store.op import Finish, Held, Op
from duly.store.ops import Mark
from duly.store.sqlite.driver import SQLiteDriver
from tests.contract.stores import (
    NOW,
    D1OnFile,
    D1Store,
    PostgresStore,
    SQLiteStore,
    Store,
    held,
    new_id,
    new_token,
    snooze,
)
from tests.servers.d1 import D1Mannered

FAILURE = Failure("builtins.ValueError", "no", "a traceback")


def another(store: Store) -> Store:
    """A second driver on the same database, as another worker would have."""
    if isinstance(store, SQLiteStore):
        return SQLiteStore(store.path)
    if isinstance(store, PostgresStore):
        return PostgresStore(store.url)
    assert isinstance(store, D1Store)
    twin = object.__new__(D1Store)
    twin.path, twin.database = store.path, D1Mannered(store.path, lose=lambda call: call % 7 == 0)
    twin.driver, twin.now = D1OnFile(twin.database), store.now
    return twin


def ids(jobs: list[Claimed]) -> list[str]:
    return [job.id for job in jobs]


def written(store: Store, verdict: str) -> bool:
    """Whether a write was recorded; on D1, which loses answers, it may say so the second time only."""
    return verdict == "recorded" or (store.kind == "d1" and verdict == "already")


def rescue_all(store: Store) -> None:
    store.run(ops.rescue(store.run(ops.expired_leases(now=store.now)), now=store.now))


# J06


@pytest.mark.parametrize("marks", [[], [Mark(5, NOW, new_id())]], ids=["", "from a mark on"])
def test_j06_eight_claimers_get_each_of_400_jobs_once(store: Store, marks: list[Mark]) -> None:
    expected = set(store.enqueue(200)) | set(store.enqueue(200, due_at=NOW - 1, priority=1))
    store.query("update duly_job set state = 'scheduled' where priority = 1")
    stores = [another(store) for _ in range(8)]
    got: list[list[str]] = [[] for _ in stores]
    barrier = threading.Barrier(len(stores))

    def work(mine: Store, found: list[str]) -> None:
        barrier.wait(30)
        while jobs := mine.claim(7, marks=marks):
            assert len(jobs) <= 7
            found.extend(ids(jobs))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(stores, got, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in stores:
        one.close()
    everything = list(itertools.chain.from_iterable(got))
    assert len(everything) == 400
    assert set(everything) == expected
    assert {row[0] for row in store.query("select attempt from duly_job where state = 'running'")} == {1}


PLANS = {
    "as the planner likes": "",
    "no nested loops": "-c enable_nestloop=off",
    "only nested loops": "-c enable_hashjoin=off -c enable_mergejoin=off -c enable_material=off",
    "no index": "-c enable_indexscan=off -c enable_bitmapscan=off -c enable_indexonlyscan=off",
    "no table scan": "-c enable_seqscan=off -c enable_sort=off",
}


@pytest.mark.parametrize("plan", PLANS)
def test_j06_a_claim_for_n_takes_n_under_every_plan(postgres_url: str, plan: str) -> None:
    store = PostgresStore(make_conninfo(postgres_url, options=f"-c jit=off {PLANS[plan]}"))
    expected = store.enqueue(30) + store.enqueue(30, delay_ms=10)
    store.now += 10
    got: list[str] = []
    for limit in (1, 2, 3, 5, 8, 13, 21):
        jobs = store.claim(limit)
        assert len(jobs) == limit
        assert store.query("select count(*) from duly_job where token = ?", jobs[0].token) == [(limit,)]
        got += ids(jobs)
    got += ids(store.claim(100))
    assert got == expected
    first, *others = store.enqueue(5, due_at=NOW - 1000) + store.enqueue(5, due_at=NOW - 1000, priority=-1)
    for limit in (1, 3, 5):
        jobs = store.claim(limit, marks=[Mark(0, NOW - 1000, others[0]), Mark(-1, NOW - 1000, first)])
        assert len(jobs) == limit
        assert ids(jobs) == others[:limit]
        assert store.query("select count(*) from duly_job where token = ?", jobs[0].token) == [(limit,)]
        del others[:limit]
    assert ids(store.claim(9)) == [first]
    store.close()


@pytest.mark.parametrize("limit", [1, 3, 10])
def test_j06_a_claim_takes_no_more_than_its_limit(store: Store, limit: int) -> None:
    store.enqueue(10)
    store.enqueue(10, delay_ms=10)
    store.now += 10
    assert len(store.claim(limit)) == limit
    assert store.query("select count(*) from duly_job where state = 'running'") == [(limit,)]


def test_j06_a_claim_for_zero_jobs_takes_none(store: Store) -> None:
    store.enqueue(3)
    assert store.claim(0) == []
    assert store.query("select count(*) from duly_job where state = 'running'") == [(0,)]


def test_j06_postgres_claimers_do_not_wait_for_each_other(postgres_url: str) -> None:
    """A claim that is not committed yet holds its rows, and the next claimer walks past them."""
    store = PostgresStore(postgres_url)
    first, second, third = store.enqueue(2) + store.enqueue(1, delay_ms=1)
    store.now += 1
    other = psycopg.connect(postgres_url)
    other.execute("select id from duly.duly_job where id = any(%s::uuid[]) for update", [[first]])
    assert ids(store.claim(5)) == [second, third]
    other.rollback()
    other.close()
    store.close()


# J07


def test_j07_higher_priority_first_then_earlier_due_then_id(store: Store) -> None:
    same = store.enqueue(3)
    late, early = store.enqueue(due_at=NOW - 1)[0], store.enqueue(due_at=NOW - 9)[0]
    high, low = store.enqueue(priority=5)[0], store.enqueue(priority=-1, due_at=NOW - 99)[0]
    expected = [high, early, late, *same, low]
    assert ids(store.claim(3)) == expected[:3]
    assert ids(store.claim(50)) == expected[3:]


def test_j07_older_ids_are_claimed_first_in_any_order_of_arrival(store: Store) -> None:
    jobs = [NewJob(new_id(), "1") for _ in range(5)]
    store.run(ops.enqueue(Terms("work"), [jobs[i] for i in (3, 0, 4, 1, 2)], now=NOW))
    assert ids(store.claim(2)) + ids(store.claim(2)) + ids(store.claim(2)) == [job.id for job in jobs]


def test_j07_promoted_rows_stand_in_the_order_of_all_ready_ones(store: Store) -> None:
    [later_high] = store.enqueue(delay_ms=20, priority=5)
    [sooner] = store.enqueue(delay_ms=10)
    store.now += 30
    [ready] = store.enqueue()
    [ready_high] = store.enqueue(priority=5)
    assert store.run(ops.promote("default", now=store.now)) == 2 or store.kind == "d1"
    assert store.state(sooner) == store.state(later_high) == "ready"
    assert [ids(store.claim(1)) for _ in range(4)] == [[later_high], [ready_high], [sooner], [ready]]


def test_j07_promote_takes_due_jobs_in_chunks_earliest_first(store: Store) -> None:
    due = [store.enqueue(delay_ms=ms)[0] for ms in (3, 1, 2)]
    [future] = store.enqueue(delay_ms=100)
    [elsewhere] = store.enqueue(delay_ms=1, queue="other")
    store.now += 50
    counts = []
    for _ in range(3):
        if isinstance(store, D1Store):
            store.lose(None)
        counts.append(store.run(ops.promote("default", 2, now=store.now)))
        if len(counts) == 1:
            assert [store.state(job) for job in due] == ["scheduled", "ready", "ready"]
    assert counts == [2, 1, 0]
    assert [store.state(job) for job in (*due, future, elsewhere)] == ["ready"] * 3 + ["scheduled"] * 2


def test_j07_a_due_scheduled_row_is_claimed_without_promotion(store: Store) -> None:
    second, first = store.enqueue(delay_ms=20)[0], store.enqueue(delay_ms=10)[0]
    store.now += 20
    [ready] = store.enqueue(due_at=store.now)
    assert ids(store.claim(1)) == [ready]
    assert ids(store.claim(1)) == [first]
    assert ids(store.claim(1)) == [second]


def test_j07_next_due_is_the_earliest_scheduled_row_of_the_queue(store: Store) -> None:
    assert store.run(ops.next_due("default", now=store.now)) is None
    store.enqueue(delay_ms=500)
    store.enqueue(delay_ms=300)
    store.enqueue(delay_ms=100, queue="other")
    store.enqueue()
    assert store.run(ops.next_due("default", now=store.now)) == 300


def marked(store: Store, limit: int, *marks: Mark, **more: Any) -> list[str]:
    return ids(store.claim(limit, marks=marks, **more))


def test_j07_a_claim_with_a_mark_takes_jobs_from_the_mark_on_and_other_priorities(store: Store) -> None:
    """SQLite has no use for a mark, and begins at the head whatever it says."""
    store.now += 1000
    before = store.enqueue(2, due_at=NOW)
    later = store.enqueue(3, due_at=NOW + 1)
    [above], [below] = store.enqueue(priority=1, due_at=NOW), store.enqueue(priority=-1, due_at=NOW - 99)
    [top], [bottom] = store.enqueue(priority=2**31 - 1), store.enqueue(priority=-(2**31))
    mark = Mark(0, NOW + 1, later[1])
    skipped = [*before, later[0]] if store.kind == "postgres" else []
    expected = [top, above, *before, later[0], *later[1:], below, bottom]
    assert marked(store, 50, mark) == [job for job in expected if job not in skipped]
    assert marked(store, 50) == skipped


def test_j07_a_mark_in_each_priority_holds_for_that_one_alone(postgres_url: str) -> None:
    store = PostgresStore(postgres_url)
    store.now += 1000
    high = store.enqueue(3, priority=5, due_at=NOW)
    between = store.enqueue(2, priority=4, due_at=NOW)
    low = store.enqueue(3, due_at=NOW)
    marks = Mark(0, NOW, low[2]), Mark(5, NOW, high[1])
    assert marked(store, 3, *marks) == [*high[1:], between[0]]
    assert marked(store, 9, *marks) == [between[1], low[2]]
    assert marked(store, 9) == [high[0], *low[:2]]
    store.close()


def test_j07_a_mark_works_in_the_highest_and_the_lowest_priority(postgres_url: str) -> None:
    store = PostgresStore(postgres_url)
    store.now += 1000
    most, least = 2**31 - 1, -(2**31)
    high, low = store.enqueue(2, priority=most, due_at=NOW), store.enqueue(2, priority=least, due_at=NOW)
    [middle] = store.enqueue()
    assert marked(store, 9, Mark(most, NOW, high[1]), Mark(least, NOW, low[1])) == [high[1], middle, low[1]]
    store.close()


def test_j07_a_recent_mark_leaves_room_for_late_commits(postgres_url: str) -> None:
    store = PostgresStore(postgres_url)
    store.now += 1000
    early = store.enqueue(due_at=store.now - 101)
    late = store.enqueue(2, due_at=store.now - 100)
    assert marked(store, 9, Mark(0, store.now, new_id())) == late
    assert marked(store, 9) == early
    store.close()


def test_j07_the_head_is_the_next_job_of_a_claim(store: Store) -> None:
    assert store.run(ops.head("default", now=NOW)).mark is None
    store.enqueue(priority=9, queue="other")
    store.enqueue(priority=8, task="unknown")
    store.enqueue(priority=7, task="paused")
    store.enqueue(priority=6, expires_ms=5)
    store.run(ops.pause("task", "paused", by="ann", why="a leak", now=NOW))
    store.now += 5
    first, second = store.enqueue(2)
    for job_id in (first, second):
        head = store.run(ops.head("default", tasks=["work", "paused"], now=store.now))
        assert head.mark == Mark(0, store.now, job_id)
        assert (head.took_ms is None) == (store.kind != "postgres")
        assert marked(store, 1, tasks=["work", "paused"]) == [job_id]


def test_j07_postgres_returns_the_distance_to_the_head(postgres_url: str) -> None:
    """Somebody's open transaction keeps what was claimed from being cleared away."""
    store = PostgresStore(postgres_url)
    holder = psycopg.connect(postgres_url)
    holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    holder.execute("select pg_current_xact_id()")
    store.enqueue(5000)
    short = min(store.run(ops.head("default", now=NOW)).took_ms for _ in range(5))
    for _ in range(5):
        store.claim(1000)
    [last] = store.enqueue()
    long = [store.run(ops.head("default", now=NOW)) for _ in range(5)]
    assert {head.mark.id for head in long} == {last}
    assert min(head.took_ms for head in long) > 3 * short
    holder.close()
    store.close()


def test_j08_asking_again_with_a_mark_gives_the_same_jobs(store: Store) -> None:
    store.now += 1000
    jobs = store.enqueue(4, due_at=NOW)
    op = ops.claim("default", limit=2, token=new_token(), worker="w1", marks=[Mark(0, NOW, jobs[1])], now=store.now)
    first = store.run(op)
    assert op.again is not None
    assert store.run(op.again) == store.run(op.again) == first
    assert ids(first) == (jobs[1:3] if store.kind == "postgres" else jobs[:2])


# J08


def test_j08_a_claim_writes_token_lease_end_worker_and_attempt_at_once(store: Store) -> None:
    [job_id] = store.enqueue(lease_ms=12_345, max_attempts=3, priority=4, queue="mail", task="send")
    token = new_token()
    [job] = store.claim(1, queue="mail", token=token)
    assert (job.token, job.attempt, job.lease_ms, job.lease_until) == (token, 1, 12_345, NOW + 12_345)
    assert (job.id, job.task, job.queue, job.priority, job.max_attempts) == (job_id, "send", "mail", 4, 3)
    assert (job.due_at, job.created_at, job.crashes, job.suspect) == (NOW, NOW, 0, False)
    rows = store.query("select state, token, worker, lease_until, attempt from duly_job where id = ?", job_id)
    assert rows == [("running", token, "w1", NOW + 12_345, 1)]


def test_j08_asking_again_with_the_same_token_gives_the_same_jobs_and_no_more(store: Store) -> None:
    store.enqueue(2)
    store.enqueue(1, delay_ms=1)
    store.now += 1
    op = ops.claim("default", limit=5, token=new_token(), worker="w1", now=store.now)
    assert op.again is not None
    jobs = store.run(op)
    assert len(jobs) == 3
    store.enqueue(10, priority=9)
    before = store.snapshot()
    assert store.run(op.again) == jobs
    assert store.run(ops.recall(jobs[0].token)) == jobs
    store.run(op)  # which PostgreSQL answers with what it takes, so with nothing
    assert store.snapshot() == before
    store.succeed(jobs[1])
    assert store.run(op.again) == [jobs[0], jobs[2]]


def test_j08_a_claim_that_did_not_arrive_takes_the_jobs_when_repeated(store: Store) -> None:
    low, high = store.enqueue(1), store.enqueue(2, priority=3)
    op = ops.claim("default", limit=5, token=new_token(), worker="w1", now=store.now)
    assert op.again is not None
    assert ids(store.run(op.again)) == [*high, *low]


def test_j08_asking_again_also_gives_the_jobs_when_the_queue_was_paused_meanwhile(store: Store) -> None:
    store.enqueue(2)
    op = ops.claim("default", limit=2, token=new_token(), worker="w1", now=store.now)
    assert op.again is not None
    jobs = store.run(op)
    store.run(ops.pause("queue", "default", by="me", why="no", now=NOW))
    assert len(jobs) == 2
    assert store.run(op.again) == jobs


def test_j08_recall_takes_nothing_new(store: Store) -> None:
    store.enqueue(2)
    assert store.run(ops.recall(new_token())) == []
    assert {row[0] for row in store.query("select state from duly_job")} == {"ready"}


def test_j08_each_claim_counts_an_attempt_and_clears_the_last_ones_progress(store: Store) -> None:
    store.enqueue()
    [job] = store.claim(1)
    store.run(ops.progress(held(job), 40, "parsing"))
    store.run(ops.heartbeat(held(job), now=NOW + 1))
    before = store.get(job.id)
    assert (before.progress, before.progress_message, before.heartbeat_at) == (40, "parsing", NOW + 1)
    store.retry(job, after_ms=0)
    [again] = store.claim(1)
    assert (again.attempt, again.token != job.token) == (2, True)
    now = store.get(job.id)
    assert (now.progress, now.progress_message, now.heartbeat_at, now.reason) == (None, None, None, None)


# J09


def stale(store: Store) -> Claimed:
    """A job whose lease ended, that was rescued, and that another worker runs now."""
    store.enqueue()
    [job] = store.claim(1)
    store.now = job.lease_until
    rescue_all(store)
    assert ids(store.claim(1, alone=True)) == [job.id]
    return job


def rescued(store: Store) -> Claimed:
    """A job that was rescued, by my token, and that nobody runs yet."""
    store.enqueue()
    [job] = store.claim(1)
    store.now = job.lease_until
    rescue_all(store)
    return job


def not_mine(store: Store) -> Claimed:
    """A job that runs, named with the token of a worker that never had it."""
    store.enqueue(2)
    [mine], [other] = store.claim(1), store.claim(1)
    return replace(other, token=mine.token)


def never_claimed(store: Store) -> Claimed:
    """A job that nobody has claimed, named with some token."""
    store.enqueue()
    [job] = store.claim(1)
    store.run(ops.release([job], now=store.now))
    store.query("update duly_job set last_token = null")
    return job


def finished_by_another(store: Store) -> Claimed:
    store.enqueue(keep_ms=1000)
    [job] = store.claim(1)
    store.now = job.lease_until
    rescue_all(store)
    store.succeed(store.claim(1, alone=True)[0], '"theirs"')
    return job


def deleted(store: Store) -> Claimed:
    """A job of which nothing is left."""
    store.enqueue()
    [job] = store.claim(1)
    store.query("delete from duly_job where id = ?", job.id)
    return job


SITUATIONS: dict[str, tuple[Callable[[Store], Claimed], str]] = {
    "a stale token": (stale, "lost"),
    "a token that never had it": (not_mine, "lost"),
    "a job nobody holds": (never_claimed, "lost"),
    "a job finished by another": (finished_by_another, "lost"),
    "a deleted job": (deleted, "gone"),
}
FINISHES: dict[str, Callable[[Claimed, int], Op[Any]]] = {
    "succeed": lambda job, now: ops.finish([Finish(job, Change(State.SUCCEEDED, result="1"))], now=now),
    "succeed with a key": lambda job, now: ops.finish(
        [Finish(replace(job, key="k"), Change(State.SUCCEEDED, result="1"))], now=now
    ),
    "fail and retry": lambda job, now: ops.finish(
        [Finish(job, Change(State.SCHEDULED, after_ms=1, error=FAILURE))], now=now
    ),
    "fail for good": lambda job, now: ops.finish([Finish(job, Change(State.DEAD, error=FAILURE))], now=now),
    "cancel": lambda job, now: ops.finish([Finish(job, Change(State.CANCELLED, reason="no"))], now=now),
    "wait": lambda job, now: ops.finish(
        [Finish(job, Change(State.WAITING, reason="event", give_back_attempt=True))], now=now
    ),
    "release": lambda job, now: ops.release([job], now=now),
    "snooze": lambda job, now: snooze(job, 1000, now=now),
}
BEATS: dict[str, tuple[Callable[[Claimed, int], Op[Any]], Any]] = {
    "extend": (lambda job, now: ops.extend([held(job)], now=now), {}),
    "progress": (lambda job, now: ops.progress(held(job), 50, "x"), False),
    "heartbeat": (lambda job, now: ops.heartbeat(held(job), now=now), False),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_j09_a_worker_that_lost_its_lease_writes_nothing(store: Store, situation: str) -> None:
    make, verdict = SITUATIONS[situation]
    job = make(store)
    before = store.snapshot()
    for name, finish in FINISHES.items():
        assert store.run(finish(job, store.now + 1)) == {job.id: verdict}, name
        assert store.snapshot() == before, name
    for name, (beat, answer) in BEATS.items():
        assert store.run(beat(job, store.now + 1)) == answer, name
        assert store.snapshot() == before, name


def test_j09_the_jobs_of_a_batch_are_judged_each_on_its_own(store: Store) -> None:
    """One finish holds a lost job, a vanished one, one done before and one that is still mine."""
    lost = stale(store)
    gone = deleted(store)
    store.enqueue(2)
    done, mine = store.claim(2)
    store.succeed(done)
    change = Change(State.SUCCEEDED)
    verdicts = store.run(ops.finish([Finish(job, change) for job in (lost, gone, done, mine)], now=store.now))
    assert (verdicts[lost.id], verdicts[gone.id], verdicts[done.id]) == ("lost", "gone", "already")
    assert verdicts[mine.id] in ("recorded", "already")  # plain successes are only counted, then asked about
    assert [store.state(job.id) for job in (lost, gone, done, mine)] == ["running", None, "succeeded", "succeeded"]


@pytest.mark.parametrize("keep_ms", [0, 60_000])
@pytest.mark.parametrize("stale_first", [True, False])
def test_j09_the_current_holder_gets_recorded_beside_its_own_older_attempt(
    store: Store, stale_first: bool, keep_ms: int
) -> None:
    """A worker that lost a lease may claim the job anew before the first attempt of it ends."""
    store.enqueue(keep_ms=keep_ms)
    [older] = store.claim(1)
    store.now = older.lease_until
    rescue_all(store)
    [mine] = store.claim(1, alone=True)
    both = (older, mine) if stale_first else (mine, older)
    verdicts = store.run(ops.finish([Finish(job, Change(State.SUCCEEDED)) for job in both], now=store.now))
    assert set(verdicts) == {mine.id}
    assert written(store, verdicts[mine.id]) or (store.kind == "d1" and keep_ms == 0)
    assert store.state(mine.id) == (None if keep_ms == 0 else "succeeded")


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("stale_first", [True, False])
def test_j09_the_current_holder_gets_recorded_beside_an_older_and_a_lost_attempt(
    store: Store, stale_first: bool, keyed: bool
) -> None:
    ids = [store.enqueue_key(key).id for key in ("one", "two")] if keyed else store.enqueue(2)
    older, lost = store.claim(2)
    store.now = older.lease_until
    rescue_all(store)
    [mine] = store.claim(1, alone=True)
    assert mine.id == older.id
    both = (older, mine) if stale_first else (mine, older)
    verdicts = store.run(ops.finish([Finish(job, Change(State.SUCCEEDED)) for job in (*both, lost)], now=store.now))
    assert verdicts == {mine.id: "already", lost.id: "lost"}
    assert [store.state(job_id) for job_id in ids] == ["succeeded", "ready"]


@pytest.mark.parametrize("name", FINISHES)
def test_j09_a_repeated_finish_is_answered_already_and_changes_nothing(store: Store, name: str) -> None:
    if name == "succeed with a key":
        store.enqueue_key("k")
    else:
        store.enqueue()
    [job] = store.claim(1)
    finish = FINISHES[name]
    assert written(store, store.run(finish(job, store.now))[job.id])
    before = store.snapshot()
    for other in FINISHES.values():
        assert store.run(other(job, store.now + 5)) == {job.id: "already"}
        assert store.snapshot() == before


def test_j09_a_repeated_retry_is_already_also_while_the_next_attempt_waits_or_runs(store: Store) -> None:
    store.enqueue()
    [job] = store.claim(1)
    store.retry(job, after_ms=1)
    store.now += 1
    [second] = store.claim(1)
    before = store.snapshot()
    assert store.retry(job, after_ms=1) == "already"
    assert store.snapshot() == before
    assert written(store, store.retry(second, after_ms=1))
    # One token back is all that a row remembers: an older one is told that it is no longer its job.
    assert store.retry(job, after_ms=1) == "lost"


def test_j09_a_rescued_job_is_already_for_its_last_holder_and_unchanged(store: Store) -> None:
    job = rescued(store)
    before = store.snapshot()
    for finish in FINISHES.values():
        store.run(finish(job, store.now))
        assert store.snapshot() == before


def test_j09_a_vanished_job_of_keep_0_is_gone_and_not_lost(store: Store) -> None:
    if isinstance(store, D1Store):
        store.lose(None)
    store.enqueue(keep_ms=0)
    [job] = store.claim(1)
    assert store.succeed(job) == "recorded"
    assert store.succeed(job) == "gone"
    assert store.kill(job) == "gone"
    assert store.snapshot()["duly_done"] == []


# J10, J15


def test_j10_extend_succeeds_after_the_lease_expired_while_the_token_is_current(store: Store) -> None:
    store.enqueue(2, lease_ms=1000)
    jobs = store.claim(2)
    store.now += 3_600_000
    assert store.run(ops.extend(map(held, jobs), now=store.now)) == {job.id: None for job in jobs}
    assert {store.get(job.id).lease_until for job in jobs} == {store.now + 1000}
    assert store.run(ops.expired_leases(now=store.now)) == []


def test_j10_extend_returns_cancel_requests_and_omits_lost_leases(store: Store) -> None:
    store.enqueue(3)
    asked, quiet, lost = store.claim(3)
    store.run(ops.cancel([asked.id], by="me", why="no", now=NOW + 7))
    beats = [held(asked), held(quiet), Held(lost.id, lost.token + 1_000_000)]
    assert store.run(ops.extend(beats, now=NOW + 9)) == {asked.id: NOW + 7, quiet.id: None}
    assert store.get(lost.id).lease_until == lost.lease_until


def test_j10_progress_and_heartbeat_do_not_extend_the_lease(store: Store) -> None:
    store.enqueue()
    [job] = store.claim(1)
    assert store.run(ops.progress(held(job), 250, "far")) is True
    assert store.run(ops.heartbeat(held(job), now=NOW + 99)) is True
    now = store.get(job.id)
    assert (now.progress, now.progress_message, now.heartbeat_at) == (100, "far", NOW + 99)
    assert now.lease_until == job.lease_until


def test_j15_snooze_gives_the_attempt_back_and_the_job_runs_later(store: Store) -> None:
    store.enqueue(max_attempts=2)
    for _ in range(6):
        [job] = store.claim(1)
        assert job.attempt == 1
        assert written(store, store.run(snooze(job, 1000, now=store.now))[job.id])
        record = store.get(job.id)
        assert (record.state, record.attempt, record.due_at) == (State.SCHEDULED, 0, store.now + 1000)
        store.now += 999
        assert store.claim(1) == []
        store.now += 1
    assert store.run(ops.attempts(job.id)) == []


def test_j15_release_gives_the_attempt_back_and_the_job_is_ready_at_its_old_place(store: Store) -> None:
    first, _ = store.enqueue(2)
    [job] = store.claim(1)
    store.now += 1000
    assert written(store, store.run(ops.release([job], now=store.now))[job.id])
    record = store.get(first)
    assert (record.state, record.attempt, record.due_at) == (State.READY, 0, NOW)
    assert ids(store.claim(1)) == [first]


# J23


@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize("how", ["fails", "crashes"])
def test_j23_a_job_runs_at_most_max_attempts_times(store: Store, limit: int, how: str) -> None:
    [job_id] = store.enqueue(max_attempts=limit)
    attempts = []
    for _ in range(limit + 3):
        for job in store.claim(1) + store.claim(1, alone=True):
            attempts.append(job.attempt)
            if how == "crashes":
                store.now = job.lease_until
                rescue_all(store)
            elif job.attempt < limit:
                store.retry(job, after_ms=0)
            else:
                store.kill(job)
    assert attempts == list(range(1, limit + 1))
    assert store.state(job_id) == "dead"
    assert [a.outcome for a in store.run(ops.attempts(job_id))] == ["failed" if how == "fails" else "crashed"] * limit


@pytest.mark.parametrize("state", ["ready", "scheduled", "waiting"])
def test_j23_the_database_refuses_a_job_that_would_run_once_too_often(store: Store, state: str) -> None:
    store.enqueue(max_attempts=2)
    with pytest.raises((sqlite3.IntegrityError, psycopg.errors.CheckViolation)):
        store.query("update duly_job set attempt = 2, state = ?", state)


# J26


def scheduled(store: Store) -> Claimed:
    store.enqueue()
    [job] = store.claim(1)
    store.run(snooze(job, 10_000, now=store.now))
    return job


def ready(store: Store) -> Claimed:
    store.enqueue()
    [job] = store.claim(1)
    store.run(ops.release([job], now=store.now))
    return job


def running(store: Store) -> Claimed:
    store.enqueue()
    [job] = store.claim(1)
    return job


def waiting(store: Store) -> Claimed:
    store.enqueue()
    [job] = store.claim(1)
    store.finish(job, Change(State.WAITING, reason="event", give_back_attempt=True))
    return job


def ended(state: State) -> Callable[[Store], Claimed]:
    def make(store: Store) -> Claimed:
        store.enqueue()
        [job] = store.claim(1)
        store.finish(job, Change(state, reason="so"))
        return job

    return make


MADE: dict[State, Callable[[Store], Claimed]] = {
    State.SCHEDULED: scheduled,
    State.READY: ready,
    State.RUNNING: running,
    State.WAITING: waiting,
    **{state: ended(state) for state in State if state.ended},
}


def ways_to(end: State, job: Claimed, now: int) -> Iterator[Op[Any]]:
    """Every operation that leads to `end`, by whoever held the job last and by a stranger."""
    after = 0 if end in (State.SCHEDULED, State.WAITING) else None
    change = Change(end, after_ms=after, give_back_attempt=not end.ended, reason="x")
    if end is not State.RUNNING:
        for token in (job.token, new_token()):
            yield ops.finish([Finish(replace(job, token=token), change)], now=now)
            yield ops.finish([Finish(replace(job, token=token, key="k"), change)], now=now)
    match end:
        case State.RUNNING:
            for alone in (False, True):
                yield ops.claim("default", limit=5, token=new_token(), worker="w", alone=alone, now=now)
        case State.READY:
            yield ops.promote("default", now=now)
            yield ops.rescue([Sighting(job.id, job.token, job.lease_until, job.lease_ms, "w1")], now=now)
        case State.CANCELLED:
            yield ops.cancel([job.id], by="me", why="no", now=now)
            yield ops.expire([job.id], now=now)


@pytest.mark.parametrize("start", list(State))
def test_j26_only_the_arrows_of_the_lifecycle_exist(store: Store, start: State) -> None:
    job = MADE[start](store)
    assert store.state(job.id) == start.value
    before = store.snapshot()
    for end in State:
        if end in ARROWS[start]:
            continue
        for op in ways_to(end, job, store.now + (0 if start is State.SCHEDULED else 1)):
            if start is State.RUNNING:
                assert end is State.RUNNING
            store.run(op)
            assert store.snapshot() == before, f"{start} -> {end} by {op.name}"


@pytest.mark.parametrize("end", [end for end in State if end in ARROWS[State.RUNNING] - {State.READY}])
def test_j26_the_arrows_of_a_running_job_do_exist(store: Store, end: State) -> None:
    [job_id] = store.enqueue()
    [job] = store.claim(1)
    after = 5 if end is State.SCHEDULED else None
    store.finish(job, Change(end, after_ms=after, give_back_attempt=end is State.WAITING))
    assert store.state(job_id) == end.value
    assert store.query("select count(*) from duly_job") == [(0 if end.ended else 1,)]


def test_j26_a_job_that_waits_too_long_is_made_ready(store: Store) -> None:
    store.enqueue()
    [job] = store.claim(1)
    store.finish(job, Change(State.WAITING, after_ms=1000, reason="event", give_back_attempt=True))
    store.now += 999
    store.run(ops.promote("default", now=store.now))
    assert store.claim(1) == []
    store.now += 1
    store.run(ops.promote("default", now=store.now))
    assert store.get(job.id).reason == "timed out"
    assert ids(store.claim(1)) == [job.id]


BROKEN_SHAPES = {
    "running without a token": "update duly_job set token = null where state = 'running'",
    "running without a lease": "update duly_job set lease_until = null where state = 'running'",
    "running and finished": "update duly_job set finished_at = 1 where state = 'running'",
    "running for the 0th time": "update duly_job set attempt = 0 where state = 'running'",
    "running once too often": "update duly_job set attempt = max_attempts + 1 where state = 'running'",
    "ready with a token": "update duly_job set token = 1 where state = 'ready'",
    "ready with a lease": "update duly_job set lease_until = 1 where state = 'ready'",
    "ready and finished": "update duly_job set finished_at = 1 where state = 'ready'",
    "ready but never due": "update duly_job set due_at = null where state = 'ready'",
    "ready with a negative attempt": "update duly_job set attempt = -1 where state = 'ready'",
    "ready once too often": "update duly_job set attempt = max_attempts where state = 'ready'",
    "ready and parked": "update duly_job set parked_version = 1 where state = 'ready'",
    "released with its token": "update duly_job set state = 'ready' where state = 'running'",
    "claimed without a token": "update duly_job set state = 'running', attempt = 1 where state = 'ready'",
    "scheduled for never": "update duly_job set state = 'scheduled', due_at = null where state = 'ready'",
    "scheduled with a token": "update duly_job set state = 'scheduled' where state = 'running'",
    "waiting with a token": "update duly_job set state = 'waiting' where state = 'running'",
    "ended at no time": "update duly_job set state = 'succeeded' where state = 'ready'",
    "ended with its token": "update duly_job set state = 'dead', finished_at = 1 where state = 'running'",
    "in a state nobody knows": "update duly_job set state = 'done', finished_at = 1 where state = 'ready'",
    "in no state": "update duly_job set state = null",
    "a key without a fingerprint": "update duly_job set key = 'k' where state = 'ready'",
    "without a task": "update duly_job set task = ''",
    "without a queue": "update duly_job set queue = ''",
    "further than everything": "update duly_job set progress = 101",
    "less far than not at all": "update duly_job set progress = -1",
    "kept for less than no time": "update duly_job set keep_ms = -1",
    "its result for less than no time": "update duly_job set result_ttl_ms = -1",
    "no attempts at all": "update duly_job set max_attempts = 0",
    "no lease at all": "update duly_job set lease_ms = 0",
    "a done row that lives": "update duly_done set state = 'ready'",
    "a dead row to be pruned": "update duly_done set prune_at = 1 where state = 'dead'",
    "a live key that expires": "update duly_key set expires_at = 1",
    "a kept key that never expires": "update duly_key set state = 'succeeded'",
    "a key in between": "update duly_key set state = 'dead'",
    "more ended than begun": "update duly_batch set open = -1",
    "a pause of nothing": "insert into duly_queue (kind, name) values ('worker', 'w')",
}


def test_j26_the_database_refuses_a_row_that_cannot_be(store: Store) -> None:
    store.dead()
    store.enqueue()
    store.claim(1)
    store.enqueue()
    store.enqueue_key("k")
    store.query("insert into duly_batch (id, name, created_at) values (?, 'b', 1)", new_id())
    before = store.snapshot()
    for shape, sql in BROKEN_SHAPES.items():
        try:
            store.query(sql)
        except (sqlite3.IntegrityError, psycopg.errors.IntegrityError):
            assert store.snapshot() == before, shape
        else:
            pytest.fail(f"it took a job that is {shape}")


def test_j26_a_job_that_is_tried_as_often_as_can_be_is_claimed_kept_and_ended_like_others(store: Store) -> None:
    store.enqueue(2, max_attempts=2**31 - 1)
    for change in (Change(State.SCHEDULED, after_ms=0), Change(State.SUCCEEDED)):
        claimed = store.claim(2)
        assert len(claimed) == 2
        held = [Held(job.id, job.token) for job in claimed]
        assert set(store.run(ops.extend(held, now=store.now))) == {job.id for job in claimed}
        assert {store.finish(job, change) for job in claimed} == {"recorded"}


# J28


def test_j28_a_process_whose_clock_is_an_hour_fast_changes_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    hour_ms = 3_600_000
    real_time, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real_time() + 3600)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + 3_600_000_000_000)
    before = store.run(ops.clock())
    now, later = (NewJob(new_id(), "1", key=key) for key in "ab")
    store.run(ops.enqueue(Terms("work", lease_ms=1000), [now]))
    store.run(ops.enqueue(Terms("work", delay_ms=hour_ms // 2), [later]))
    jobs = store.run(ops.claim("default", limit=5, token=1, worker="w"))
    assert ids(jobs) == [now.id]
    assert store.run(ops.expired_leases()) == []
    store.run(ops.finish([Finish(jobs[0], Change(State.SUCCEEDED, result="1"))]))
    after = store.run(ops.clock())
    assert after - before < hour_ms / 2
    record = store.run(ops.get(now.id))
    for moment in (record.created_at, record.due_at, record.finished_at, jobs[0].lease_until - 1000):
        assert before <= moment <= after
    assert before <= store.run(ops.get(later.id)).due_at - hour_ms // 2 <= after


def every_op(now: int | None) -> list[Op[Any]]:
    """One of each operation there is."""
    job = Claimed(
        new_id(), 1, "work", "default", 0, "1", Envelope(), None, 1, 5, 0, False, 30_000, 7, 7, 7, 7, None, None, 0,
        None,
    )  # fmt: skip
    made: dict[str, Op[Any]] = {
        "enqueue": ops.enqueue(Terms("work"), [NewJob(job.id, "1")], now=now),
        "claim": ops.claim("default", limit=1, token=1, worker="w", now=now),
        "claim_lanes": lanes.claim("default", [Walk("work")], limit=1, lanes=1, token=1, worker="w", now=now),
        "claim_limited": queues.claim("default", ageing_ms=1, retries=1, limit=1, token=1, worker="w", now=now),
        "next_permit": lanes.next_permit("default", ["work"], now=now),
        "head": ops.head("default", tasks=["work"], now=now),
        "recall": ops.recall(1),
        "extend": ops.extend([held(job)], now=now),
        "progress": ops.progress(held(job), 1),
        "heartbeat": ops.heartbeat(held(job), now=now),
        "finish": ops.finish(
            [Finish(job, Change(State.SUCCEEDED)), Finish(job, Change(State.DEAD, error=FAILURE))], now=now
        ),
        "release": ops.release([job], now=now),
        "snooze": snooze(job, 1, now=now),
        "expired_leases": ops.expired_leases(now=now),
        "rescue": ops.rescue([], now=now),
        "promote": ops.promote("default", now=now),
        "next_due": ops.next_due("default"),
        "expirable": ops.expirable(now=now),
        "expire": ops.expire([job.id], now=now),
        "prune": ops.prune("done", now=now),
        "cancel": ops.cancel([job.id], by="me", why="no", now=now),
        "replay": ops.replay([ops.Replay(job.id, new_id())], now=now),
        "resolve": ops.resolve([job.id], by="me", why="no", now=now),
        "purge": ops.purge([job.id], by="me", why="no", now=now),
        "pause": ops.pause("queue", "default", by="me", why="no", until_ms=5, now=now),
        "resume": ops.resume("queue", "default", by="me", why="no", now=now),
        "paused": ops.paused(now=now),
        "register": ops.register("w", host="h", pid=1, queues=[], tasks=[], beat_ms=1, now=now),
        "leave": ops.leave("w"),
        "workers": ops.workers(now=now),
        "get": ops.get(job.id, now=now),
        "listing": ops.listing(now=now),
        "dead_list": ops.dead_list(now=now),
        "dead_metrics": ops.dead_metrics(now=now),
        "attempts": ops.attempts(job.id),
        "steps": ops.steps(job.id),
        "events": ops.events(),
        "clock": ops.clock(),
    }
    return [*made.values(), ops.enqueue(Terms("work"), [NewJob(job.id, "1", key="k")], now=now)]


def test_j28_no_operation_carries_a_time_of_this_process_into_a_statement() -> None:
    for op in every_op(None):
        assert op.params.get("now") is None, op.name
        for name, value in op.params.items():
            assert not isinstance(value, int | float) or value < 1_600_000_000_000, f"{op.name}: {name}"


# R10


def test_r10_fifteen_poisoned_rows_at_the_head_do_not_block_other_jobs(store: Store) -> None:
    """They crash their worker each time; from the first crash on they wait for somebody who runs them alone."""
    poisoned = store.enqueue(15, priority=9, lease_ms=1000)
    good = store.enqueue(20)
    assert ids(store.claim(15)) == poisoned
    store.now += 1000
    rescue_all(store)
    assert ids(store.claim(50)) == good


def test_r10_unknown_tasks_do_not_block_known_ones(store: Store) -> None:
    store.enqueue(15, priority=9, task="unknown")
    good = store.enqueue(3)
    assert ids(store.claim(3, tasks=["work"])) == good


# Who may be claimed


def test_j12_suspects_are_claimed_only_by_workers_that_run_them_alone(store: Store) -> None:
    suspect, healthy = store.enqueue(2, lease_ms=1000)
    assert ids(store.claim(1)) == [suspect]
    store.now += 1000
    rescue_all(store)
    assert ids(store.claim(5)) == [healthy]
    [job] = store.claim(5, alone=True)
    assert (job.id, job.suspect, job.crashes) == (suspect, True, 0)
    # An attempt that ends, however, clears it.
    store.retry(job, after_ms=0)
    [again] = store.claim(5)
    assert (again.id, bool(again.suspect)) == (suspect, False)


def test_j19_only_the_tasks_that_a_worker_knows_are_claimed(store: Store) -> None:
    a, b, c = (store.enqueue(task=task)[0] for task in "abc")
    later = store.enqueue(task="d", delay_ms=1)[0]
    store.now += 1
    assert store.claim(5, tasks=[]) == []
    assert ids(store.claim(5, tasks=["c", "a", "z"])) == [a, c]
    assert store.claim(5, tasks=["z"]) == []
    assert ids(store.claim(5, tasks={"d"})) == [later]
    assert ids(store.claim(5)) == [b]


def test_j19_a_claim_takes_its_own_queue_only(store: Store) -> None:
    [mail] = store.enqueue(queue="mail")
    assert store.claim(5) == []
    assert ids(store.claim(5, queue="mail")) == [mail]


# B09


@pytest.mark.parametrize("kind", ["queue", "task"])
def test_b09_a_paused_queue_or_task_is_not_claimed_until_it_is_resumed(store: Store, kind: str) -> None:
    name = {"queue": "default", "task": "work"}[kind]
    paused = store.enqueue() + store.enqueue(delay_ms=1)
    [other] = store.enqueue(task="other", queue="other")
    store.now += 1
    store.run(ops.pause(kind, name, by="ann", why="a leak", now=store.now))
    assert store.claim(5) == []
    assert ids(store.claim(5, queue="other")) == [other]
    [pause] = store.run(ops.paused(now=store.now))
    assert (pause.kind, pause.name, pause.paused_by, pause.paused_why) == (kind, name, "ann", "a leak")
    assert (pause.paused_at, pause.paused_until) == (store.now, None)
    assert store.run(ops.resume(kind, name, by="bob", why="fixed", now=store.now + 5)) is True
    assert store.run(ops.paused(now=store.now)) == []
    assert ids(store.claim(5)) == paused
    told = [(e.name, e.subject, e.by, e.why, e.at) for e in store.run(ops.events())]
    assert told == [
        (f"{kind}.paused", name, "ann", "a leak", store.now),
        (f"{kind}.resumed", name, "bob", "fixed", store.now + 5),
    ]


@pytest.mark.parametrize("kind", ["queue", "task"])
def test_b09_a_pause_until_a_time_ends_automatically(store: Store, kind: str) -> None:
    name = {"queue": "default", "task": "work"}[kind]
    job = store.enqueue()
    store.run(ops.pause(kind, name, by="ann", why="a leak", until_ms=1000, now=store.now))
    store.now += 999
    assert store.claim(5) == []
    assert [pause.paused_until for pause in store.run(ops.paused(now=store.now))] == [NOW + 1000]
    store.now += 1
    assert store.run(ops.paused(now=store.now)) == []
    assert ids(store.claim(5)) == job


def test_b09_a_paused_task_does_not_stop_other_tasks(store: Store) -> None:
    store.enqueue(3, task="paused", priority=9)
    good = store.enqueue(2)
    store.run(ops.pause("task", "paused", by="ann", why="a leak", now=NOW))
    assert ids(store.claim(2)) == good


@pytest.mark.parametrize("delay_ms", [0, 1000])
def test_b09_a_queue_and_a_task_of_one_name_are_paused_apart(store: Store, delay_ms: int) -> None:
    [job] = store.enqueue(task="mail", delay_ms=delay_ms)
    store.enqueue(queue="mail", delay_ms=delay_ms)
    store.now += delay_ms
    store.run(ops.pause("queue", "mail", by="ann", why="a leak", now=store.now))
    assert ids(store.claim(5)) == [job]
    assert store.claim(5, queue="mail") == []


def test_b09_a_second_pause_after_the_first_expired_is_recorded_too(store: Store) -> None:
    for _ in range(2):
        store.run(ops.pause("queue", "default", by="ann", why="a leak", until_ms=1000, now=store.now))
        store.now += 1000
    assert [(e.name, e.at) for e in store.run(ops.events())] == [("queue.paused", NOW), ("queue.paused", NOW + 1000)]


def test_b09_resuming_an_unpaused_queue_returns_false_and_changes_nothing(store: Store) -> None:
    before = store.snapshot()
    assert store.run(ops.resume("queue", "default", by="ann", why="x", now=NOW)) is False
    assert store.snapshot() == before


def test_b09_only_queues_and_tasks_are_paused() -> None:
    with pytest.raises(ConfigError, match="queue"):
        ops.pause("worker", "w", by="ann", why="x")


def test_b09_running_jobs_continue_while_their_queue_is_paused(store: Store) -> None:
    store.enqueue()
    [job] = store.claim(1)
    store.run(ops.pause("queue", "default", by="ann", why="a leak", now=NOW))
    assert store.run(ops.extend([held(job)], now=NOW)) == {job.id: None}
    assert written(store, store.succeed(job))


def test_j08_jobs_with_line_breaks_in_payloads_are_returned_separately(store: Store) -> None:
    payloads = ['{"text":"one\\ntwo"}', '{\n"text":\n"three"\n}', '{"text":"\u2028\u0085,[]"}']
    ids = [store.enqueue(payload=payload)[0] for payload in payloads]
    assert [(job.id, job.payload) for job in store.claim(10)] == list(zip(ids, payloads, strict=True))


def test_j08_jobs_too_long_for_one_text_are_all_returned(tmp_path: Path) -> None:
    driver = SQLiteDriver(tmp_path / "jobs.db")
    jobs = [NewJob(new_id(), f'{{"text":"{"x" * 1000}"}}') for _ in range(20)]
    driver.run(ops.enqueue(Terms(task="work"), jobs))
    assert driver._writer is not None
    driver._writer._conn.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 5_000)
    claimed = driver.run(ops.claim("default", limit=20, token=new_token(), worker="w1"))
    driver.close()
    assert [(job.id, job.payload) for job in claimed] == [(job.id, job.payload) for job in jobs]
