"""Pruning: what goes when it has had its time, in which order and how much at once, and what never goes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from duly.errors import ConfigError
from duly.model import Change, State
from duly.store import ops
from tests.contract.stores import NOW, D1Store, PostgresStore, Store, new_id

HOUR, DAY = 3_600_000, 86_400_000


def prune(store: Store, what: str, limit: int = 1000, keep_ms: int = 7 * DAY) -> int:
    return store.run(ops.prune(what, limit, keep_ms=keep_ms, now=store.now))


def hear_every_answer(store: Store) -> None:
    """Lose no answer: a chunk that is asked for again takes a second one."""
    if isinstance(store, D1Store):
        store.lose(None)


def count(store: Store, table: str) -> int:
    return store.query(f"select count(*) from {table}")[0][0]


def ids(store: Store, table: str) -> set[str]:
    return {row[0] for row in store.query(f"select id from {table}")}


def chunks(store: Store, what: str, limit: int) -> list[int]:
    """Prune until nothing is left to take."""
    taken = [prune(store, what, limit)]
    while taken[-1]:
        taken.append(prune(store, what, limit))
    return taken


def done(store: Store, number: int = 1, *, result: str | None = None, **terms: int) -> list[str]:
    made = store.enqueue(number, **terms)
    for job in store.claim(number):
        store.succeed(job, result)
    return made


@pytest.fixture
def impatient(postgres_url: str) -> Iterator[PostgresStore]:
    """A store whose statements fail when they would wait for a lock."""
    made = PostgresStore(postgres_url + "?options=-c%20lock_timeout%3D2s")
    yield made
    made.close()


# J20: how long results are kept


def test_j20_a_result_is_hidden_from_the_moment_its_time_is_over(store: Store) -> None:
    (job_id,) = done(store, result='{"x":1}', result_ttl_ms=HOUR)
    store.now += HOUR - 1
    assert store.get(job_id).result == {"x": 1}
    assert store.run(ops.listing(now=store.now))[0].result == {"x": 1}
    store.now += 1
    job = store.get(job_id)
    assert job is not None
    assert (job.state, job.result, job.result_until) == (State.SUCCEEDED, None, store.now)
    assert store.run(ops.listing(now=store.now))[0].result is None
    assert store.query("select result from duly_done") == [('{"x":1}',)]  # hidden before it is removed


def test_j20_results_are_removed_in_bounded_chunks_and_their_jobs_stay(store: Store) -> None:
    hear_every_answer(store)
    old = done(store, 5, result="1", result_ttl_ms=HOUR)
    store.now += HOUR - 1
    (young,) = done(store, result="2", result_ttl_ms=HOUR)
    assert prune(store, "results") == 0
    store.now += 1
    assert chunks(store, "results", 2) == [2, 2, 1, 0]
    assert [row[0] for row in store.query("select id from duly_done where result is not null")] == [young]
    assert [store.state(job_id) for job_id in old] == ["succeeded"] * 5
    assert store.get(old[0]).result_until == NOW + HOUR  # so that its reader knows there was one


def test_j20_a_result_without_a_key_is_deleted_before_its_row(store: Store) -> None:
    (job_id,) = done(store, result="1", result_ttl_ms=HOUR, keep_ms=2 * HOUR)
    store.now += HOUR
    prune(store, "results")
    assert prune(store, "done") == 0
    store.now += HOUR
    prune(store, "done")
    assert store.get(job_id) is None


def test_j20_a_keyed_result_is_kept_as_long_as_its_key(store: Store) -> None:
    terms = {"result_ttl_ms": HOUR, "key_ttl_ms": 2 * DAY, "keep_ms": 7 * DAY}
    job_id = store.enqueue_key("k", **terms).id
    store.succeed(store.claim()[0], "42")
    store.now += 2 * DAY - 1
    prune(store, "results")
    prune(store, "keys")
    assert store.get(job_id).result == 42
    assert store.enqueue_key("k", **terms).result == "42"
    store.now += 1
    assert store.get(job_id).result is None
    prune(store, "results")
    assert store.query("select result from duly_done") == [(None,)]


def test_j20_a_keyed_result_outlives_its_row(store: Store) -> None:
    job_id = store.enqueue_key("k", keep_ms=HOUR, key_ttl_ms=2 * DAY).id
    store.succeed(store.claim()[0], "42")
    store.now += HOUR
    prune(store, "results")
    prune(store, "done")
    assert store.get(job_id) is None
    found = store.enqueue_key("k")
    assert (found.id, found.succeeded, found.result) == (job_id, True, "42")


def test_j20_a_short_ttl_of_a_result_does_not_shorten_a_longer_key_nor_the_other_way_round(store: Store) -> None:
    job_id = store.enqueue_key("k", result_ttl_ms=DAY, key_ttl_ms=HOUR).id
    store.succeed(store.claim()[0], "42")
    store.now += HOUR
    prune(store, "results")
    prune(store, "keys")
    assert store.get(job_id).result == 42  # its own time is longer
    assert not store.enqueue_key("k").deduplicated


# J22: finished rows


def test_j22_a_finished_row_is_deleted_after_its_own_keep(store: Store) -> None:
    (short,) = done(store, keep_ms=1000)
    (long,) = done(store, keep_ms=2000)
    store.now += 999
    assert prune(store, "done") == 0
    store.now += 1
    prune(store, "done")
    assert ids(store, "duly_done") == {long}
    assert store.get(short) is None


def test_j22_keep_counts_from_the_finish_and_the_oldest_is_deleted_first(store: Store) -> None:
    hear_every_answer(store)
    store.enqueue(4, keep_ms=DAY)
    jobs = store.claim(4)
    for job in reversed(jobs):  # against the order of their ids
        store.now += 10
        store.succeed(job)
    store.now += DAY
    assert prune(store, "done", limit=2) == 2
    assert ids(store, "duly_done") == {jobs[0].id, jobs[1].id}
    store.now -= 5  # now only the third to finish has had its day
    assert prune(store, "done") == 1
    assert ids(store, "duly_done") == {jobs[0].id}


def test_j22_succeeded_partial_and_cancelled_are_deleted_dead_and_live_never(store: Store) -> None:
    store.enqueue(5, keep_ms=1)
    succeeded, partial, cancelled, dead, running = store.claim(5)
    store.succeed(succeeded, "1")
    store.finish(partial, Change(State.PARTIAL, reason="x", result="1"))
    store.finish(cancelled, Change(State.CANCELLED, reason="x"))
    store.kill(dead)
    (ready,) = store.enqueue(keep_ms=1)
    (scheduled,) = store.enqueue(keep_ms=1, delay_ms=DAY)
    store.now += 10_000 * DAY
    for what in ops.PRUNABLE:
        prune(store, what)
    assert ids(store, "duly_done") == {dead.id}
    assert ids(store, "duly_job") == {running.id, ready, scheduled}


def test_j22_a_replayed_or_resolved_dead_job_stays_too(store: Store) -> None:
    replayed, resolved = store.dead(2, keep_ms=1)
    store.run(ops.replay([ops.Replay(replayed, new_id())], now=store.now))
    store.run(ops.resolve([resolved], by="a", why="b", now=store.now))
    store.now += 1000 * DAY
    assert prune(store, "done") == 0
    assert ids(store, "duly_done") == {replayed, resolved}


def test_j22_a_row_takes_its_attempts_and_steps_along_and_no_others(store: Store) -> None:
    old, young, live = store.enqueue(3, keep_ms=1000)
    for job in store.claim(3):
        store.retry(job, after_ms=0)
    for job in store.claim(2):
        store.succeed(job)
        store.now += 500
    for job_id in (old, young, live):
        store.query(
            "insert into duly_step (job_id, name, kind, state, created_at, changed_at) "
            "values (?, 's', 'step', 'done', 1, 1)",
            job_id,
        )
    store.now += 400
    prune(store, "done")
    assert ids(store, "duly_done") == {young}
    assert store.run(ops.attempts(old)) == store.run(ops.steps(old)) == []
    for kept in (young, live):
        assert len(store.run(ops.attempts(kept))) == len(store.run(ops.steps(kept))) == 1


def test_j22_a_chunk_of_rows_takes_no_more_children_than_its_rows_have(store: Store) -> None:
    hear_every_answer(store)
    store.enqueue(5, keep_ms=1)
    for job in store.claim(5):
        store.retry(job, after_ms=0)
    for job in store.claim(5):
        store.succeed(job)
    store.now += 1
    for left in (3, 1, 0):
        prune(store, "done", limit=2)
        kept = ids(store, "duly_done")
        assert len(kept) == left
        assert {row[0] for row in store.query("select job_id from duly_attempt")} == kept


# J22: the rest


def fill(store: Store, what: str, number: int, at: int) -> None:
    """Add rows whose time counts from `at`."""
    match what:
        case "results":
            for one in range(number):
                store.query(
                    "insert into duly_done (id, task, queue, priority, state, attempt, max_attempts, crashes, "
                    "created_at, lease_ms, finished_at, keep_ms, result_ttl_ms, prune_at, replay_count, payload, "
                    "result) values (?, 't', 'q', 0, 'succeeded', 1, 1, 0, 1, 1, ?, ?, ?, ?, 0, '{}', '1')",
                    *(new_id(), at + one, 1000 * DAY, 7 * DAY, at + one + 7 * DAY),
                )
        case "done":
            for one in range(number):
                store.query(
                    "insert into duly_done (id, task, queue, priority, state, attempt, max_attempts, crashes, "
                    "created_at, lease_ms, finished_at, keep_ms, result_ttl_ms, prune_at, replay_count, payload) "
                    "values (?, 't', 'q', 0, 'succeeded', 1, 1, 0, 1, 1, ?, ?, 0, ?, 0, '{}')",
                    *(new_id(), at + one, 7 * DAY, at + one + 7 * DAY),
                )
        case "keys":
            for one in range(number):
                store.query(
                    "insert into duly_key (task, key, job_id, state, fingerprint, expires_at) "
                    "values ('t', ?, ?, 'succeeded', 'f', ?)",
                    *(new_id(), new_id(), at + one + 7 * DAY),
                )
        case "events":
            for one in range(number):
                store.query("insert into duly_event (at, name) values (?, 'x')", at + one)
        case "fires":
            for one in range(number):
                store.query(
                    "insert into duly_fire (schedule, due_at, outcome, at) values (?, 1, 'fired', ?)",
                    new_id(),
                    at + one,
                )
        case "batches":
            for one in range(number):
                store.query(
                    "insert into duly_batch (id, name, created_at, sealed_at, completed_at) values (?, 'b', 1, 1, ?)",
                    *(new_id(), at + one),
                )
        case "workers":
            for one in range(number):
                store.query(
                    "insert into duly_worker (id, host, pid, queues, tasks, beat_ms, started_at, seen_at) "
                    "values (?, 'h', 1, '[]', '[]', 1, 1, ?)",
                    *(new_id(), at + one),
                )
        case "lanes":  # which are made anew when they are needed, so an hour is enough
            for one in range(number):
                store.query(
                    "insert into duly_lane (name, task, used_at) values (?, 't', ?)",
                    *(new_id(), at + one + 7 * DAY - 3_600_000),
                )


TABLE = {
    "results": "duly_done where result is not null",
    "done": "duly_done",
    "keys": "duly_key",
    "events": "duly_event",
    "fires": "duly_fire",
    "batches": "duly_batch",
    "workers": "duly_worker",
    "lanes": "duly_lane",
}


def test_j22_everything_that_can_be_pruned_is_tested() -> None:
    assert set(TABLE) == set(ops.PRUNABLE)


@pytest.mark.parametrize("what", TABLE)
def test_j22_a_chunk_deletes_at_most_its_limit_and_only_old_rows(store: Store, what: str) -> None:
    hear_every_answer(store)
    fill(store, what, 5, at=NOW - 7 * DAY - 4)
    fill(store, what, 2, at=NOW - 7 * DAY + 1)
    assert chunks(store, what, 2) == [2, 2, 1, 0]
    assert count(store, TABLE[what]) == 2
    store.now += 1
    assert prune(store, what) == 1


@pytest.mark.parametrize("what", ["events", "fires", "batches", "workers"])
def test_j22_how_long_these_are_kept_is_an_argument(store: Store, what: str) -> None:
    fill(store, what, 1, at=NOW - HOUR)
    assert prune(store, what, keep_ms=HOUR + 1) == 0
    prune(store, what, keep_ms=HOUR)
    assert count(store, TABLE[what]) == 0


@pytest.mark.parametrize("what", TABLE)
def test_j22_prunes_at_the_same_time_on_postgres_skip_each_others_rows(impatient: PostgresStore, what: str) -> None:
    fill(impatient, what, 10, at=NOW - 8 * DAY)
    table = TABLE[what].split()[0]
    with psycopg.connect(impatient.url) as other:
        other.execute(f"select 1 from duly.{table} limit 3 for update")
        assert prune(impatient, what) == 7
        other.rollback()
    assert prune(impatient, what) == 3


def test_j22_many_prunes_at_once_take_each_row_once(store: Store) -> None:
    hear_every_answer(store)
    fill(store, "done", 60, at=NOW - 8 * DAY)
    with ThreadPoolExecutor(4) as threads:
        taken = list(threads.map(lambda _: prune(store, "done", 10), range(12)))
    assert sum(taken) == 60
    assert max(taken) == 10
    assert count(store, "duly_done") == 0


def test_j22_a_live_key_is_never_pruned(store: Store) -> None:
    store.enqueue_key("k")
    store.now += 1000 * DAY
    assert prune(store, "keys") == 0
    assert store.enqueue_key("k").deduplicated


def test_j22_a_batch_stays_while_it_is_open_or_a_finished_job_of_it_is_kept(store: Store) -> None:
    open_, dead_in_it, empty, unsealed = (new_id() for _ in range(4))
    for batch_id, open_jobs, completed_at in ((open_, 1, 1), (dead_in_it, 1, 1), (empty, 0, 1), (unsealed, 0, None)):
        store.query(
            "insert into duly_batch (id, name, created_at, open, completed_at) values (?, 'b', 1, ?, ?)",
            *(batch_id, open_jobs, completed_at),
        )
    store.dead(batch_id=dead_in_it)
    prune(store, "batches")
    assert ids(store, "duly_batch") == {open_, dead_in_it, unsealed}


def test_j22_a_worker_that_still_beats_stays(store: Store) -> None:
    for name in ("gone", "alive"):
        store.run(ops.register(name, host="h", pid=1, queues=["q"], tasks=["t"], beat_ms=1, now=store.now))
    store.now += 8 * DAY
    store.run(ops.register("alive", host="h", pid=1, queues=["q"], tasks=["t"], beat_ms=1, now=store.now))
    prune(store, "workers")
    assert ids(store, "duly_worker") == {"alive"}


def test_j22_a_worker_between_two_beats_stays_however_short_workers_are_kept(store: Store) -> None:
    store.run(ops.register("alive", host="h", pid=1, queues=["q"], tasks=["t"], beat_ms=10_000, now=store.now))
    store.now += 29_000
    assert store.run(ops.prunable(keep_ms=1, now=store.now))["workers"] == 0
    prune(store, "workers", keep_ms=1)
    assert ids(store, "duly_worker") == {"alive"}
    store.now += 2_000
    assert store.run(ops.prunable(keep_ms=1, now=store.now))["workers"] == 1
    prune(store, "workers", keep_ms=1)
    assert ids(store, "duly_worker") == set()


def test_j22_only_prunable_rows_are_deleted(store: Store) -> None:
    with pytest.raises(ConfigError, match="cannot prune 'jobs'"):
        ops.prune("jobs")
