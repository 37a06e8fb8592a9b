"""Finish and every other ending: the whole tail, in one operation. Lines J09, J17, J20, B02, B03, R04 and R08."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from duly.model import DAY_MS, Change, Claimed, Failure, NewJob, State, Terms
from duly.rules import failure as failures
from duly.store import ops
from duly.store.op import Finish, Held
from tests.contract.stores import NOW, D1Store, PostgresStore, Store, new_id, new_token, snooze

FAILURE = Failure("builtins.ValueError", "no", "a traceback")
UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def written(store: Store, verdict: str) -> bool:
    """Whether a write was recorded; on D1, which loses answers, it may say so the second time only."""
    return verdict == "recorded" or (store.kind == "d1" and verdict == "already")


@contextmanager
def no_loss(store: Store) -> Iterator[None]:
    """Let every answer of D1 arrive, where a lost one is not what the test is about."""
    if isinstance(store, D1Store):
        store.lose(None)
        yield
        store.lose(lambda call: call % 7 == 0)
    else:
        yield


def callback(task: str, **more: Any) -> tuple[str, str]:
    """A callback as a batch and `on_dead` hold it: a whole job as JSON, and its id."""
    job_id = new_id()
    spec = {
        "id": job_id, "task": task, "queue": "hooks", "priority": 3, "payload": '{"from":"batch"}', "envelope": None,
        "max_attempts": 4, "lease_ms": 5000, "keep_ms": 1000, "result_ttl_ms": 100, **more,
    }  # fmt: skip
    return job_id, json.dumps(spec)


class Batch:
    """A batch made by hand, with all three callbacks."""

    def __init__(self, store: Store, *, open: int, sealed: bool = True) -> None:
        self.store, self.id = store, new_id()
        self.complete, on_complete = callback("on_complete")
        self.success, on_success = callback("on_success")
        self.first_dead, on_first_dead = callback("on_first_dead")
        store.query(
            "insert into duly_batch (id, name, created_at, sealed_at, open, on_complete, on_success, on_first_dead)"
            " values (?, 'b', ?, ?, ?, ?, ?, ?)",
            self.id, NOW, NOW if sealed else None, open, on_complete, on_success, on_first_dead,
        )  # fmt: skip

    def counts(self) -> tuple[Any, ...]:
        [row] = self.store.query(
            "select open, succeeded, partial, dead, cancelled from duly_batch where id = ?", self.id
        )
        return row

    def times(self) -> tuple[Any, ...]:
        [row] = self.store.query("select completed_at, first_dead_at from duly_batch where id = ?", self.id)
        return row

    def fired(self) -> list[str]:
        names = {self.complete: "complete", self.success: "success", self.first_dead: "first dead"}
        rows = self.store.query("select id from duly_job union all select id from duly_done")
        return sorted(names[row[0]] for row in rows if row[0] in names)


# One finish of many kinds


def test_j09_one_finish_takes_successes_retries_deaths_and_keyed_jobs_together(store: Store) -> None:
    plain = store.enqueue(3)
    keyed = [store.enqueue_key(key).id for key in "ab"]
    batch = Batch(store, open=1)
    [in_batch] = store.enqueue(batch_id=batch.id)
    jobs = {job.id: job for job in store.claim(10)}
    changes = {
        plain[0]: Change(State.SUCCEEDED, result='{"x":1}'),
        plain[1]: Change(State.SCHEDULED, after_ms=500, error=FAILURE),
        plain[2]: Change(State.DEAD, reason="not retried", error=FAILURE),
        keyed[0]: Change(State.SUCCEEDED, result='"a"'),
        keyed[1]: Change(State.CANCELLED, reason="never mind"),
        in_batch: Change(State.PARTIAL, reason="partial: a", result="1"),
    }
    store.now += 7
    verdicts = store.run(ops.finish([Finish(jobs[i], change) for i, change in changes.items()], now=store.now))
    assert set(verdicts) == set(changes)
    assert all(written(store, verdict) for verdict in verdicts.values())
    assert {job_id: store.state(job_id) for job_id in changes} == {i: c.state.value for i, c in changes.items()}
    assert store.get(plain[0]).result == {"x": 1}
    assert store.get(plain[1]).due_at == store.now + 500
    assert store.enqueue_key("a").id == keyed[0]
    assert store.enqueue_key("b").id != keyed[1]
    assert batch.counts() == (0, 0, 1, 0, 0)
    told = {(event.name, event.job_id) for event in store.run(ops.events())}
    assert told == {("job.dead", plain[2]), ("job.cancelled", keyed[1]), ("job.partial", in_batch)}
    ended = {i for i, c in changes.items() if c.state.ended}
    assert {row[0] for row in store.query("select id from duly_done")} == ended


@pytest.mark.parametrize("how", ["plain", "key", "batch", "schedule"])
def test_j09_a_finished_job_is_moved_with_all_it_has(store: Store, how: str) -> None:
    """The short way and the long way out write the same row."""
    batch = Batch(store, open=1)
    store.query("insert into duly_schedule (name, task, spec, mode, interval_ms) values ('s', 'work', '', 'rate', 1)")
    _, on_dead = callback("told")
    terms = Terms(
        "work", queue="mail", priority=7, max_attempts=3, lease_ms=9000, expires_ms=50_000, keep_ms=2 * DAY_MS,
        result_ttl_ms=3000, key_ttl_ms=4000, batch_id=batch.id if how == "batch" else None,
        schedule="s" if how == "schedule" else None, on_dead=on_dead,
    )  # fmt: skip
    new = NewJob(new_id(), '{"n":1}', key="k" if how == "key" else None)
    store.run(ops.enqueue(terms, [new], now=NOW))
    token = new_token()
    [job] = store.claim(1, queue="mail", token=token)
    store.run(ops.progress(Held(job.id, token), 50, "half"))
    store.run(ops.cancel([job.id], by="me", why="no", now=NOW + 3))
    store.now += 10
    assert written(store, store.succeed(job, '"r"'))
    columns = (
        "id, task, queue, priority, state, payload, attempt, max_attempts, crashes, created_at, due_at, expires_at,"
        " lease_ms, token, worker, progress, progress_message, cancel_requested_at, error, result, result_until,"
        " finished_at, keep_ms, result_ttl_ms, prune_at, replay_count, on_dead, replayed_as, resolved_at"
    )
    [row] = store.query(f"select {columns} from duly_done")
    result_ms = 4000 if how == "key" else 3000
    assert row == (
        new.id, "work", "mail", 7, "succeeded", '{"n":1}', 1, 3, 0, NOW, NOW, NOW + 50_000, 9000, token, "w1", 50.0,
        "half", NOW + 3, None, '"r"', NOW + 10 + result_ms, NOW + 10, 2 * DAY_MS, 3000, NOW + 10 + result_ms, 0,
        on_dead, None, None,
    )  # fmt: skip
    assert store.query("select key, batch_id, schedule from duly_done") == [
        ("k" if how == "key" else None, batch.id if how == "batch" else None, "s" if how == "schedule" else None)
    ]
    assert store.query("select id from duly_job where id = ?", new.id) == []


def test_j22_success_with_keep_0_leaves_nothing_behind(store: Store) -> None:
    with no_loss(store):
        store.enqueue(keep_ms=0)
    [job] = store.claim(1)
    store.retry(job, after_ms=0)
    store.query(
        "insert into duly_step (job_id, name, kind, state, created_at, changed_at)"
        " values (?, 's', 'step', 'done', 1, 1)",
        job.id,
    )
    [again] = store.claim(1)
    store.succeed(again, "1")
    assert {table: rows for table, rows in store.snapshot().items() if rows} == {}


@pytest.mark.parametrize("end", [State.DEAD, State.PARTIAL, State.CANCELLED])
def test_j22_every_other_end_is_kept_also_with_keep_0(store: Store, end: State) -> None:
    with no_loss(store):
        store.enqueue(keep_ms=0)
    [job] = store.claim(1)
    store.finish(job, Change(end, reason="so", error=FAILURE if end is State.DEAD else None))
    assert store.state(job.id) == end.value
    assert len(store.run(ops.attempts(job.id))) == (end is State.DEAD)


# Attempts


def test_r04_every_attempt_that_failed_is_kept_with_its_error_and_traceback(store: Store) -> None:
    [job_id] = store.enqueue(max_attempts=3)
    for number in (1, 2, 3):
        [job] = store.claim(1)
        store.now += 10
        store.retry(job, after_ms=0, message=f"try {number}") if number < 3 else store.kill(job, "try 3")
    attempts = store.run(ops.attempts(job_id))
    assert [(a.attempt, a.at, a.worker, a.outcome, a.error, a.traceback) for a in attempts] == [
        (n, NOW + 10 * n, "w1", "failed", f"builtins.ValueError: try {n}", "a traceback") for n in (1, 2, 3)
    ]
    job = store.get(job_id)
    assert (job.state, job.error, job.reason) == (State.DEAD, "builtins.ValueError: try 3", "builtins.ValueError")


def test_r04_success_after_failures_forgets_the_error_and_keeps_the_attempts(store: Store) -> None:
    [job_id] = store.enqueue()
    store.retry(store.claim(1)[0], after_ms=0)
    assert store.get(job_id).error == "builtins.ValueError: no"
    batch = Batch(store, open=1)
    store.query("update duly_job set batch_id = ?", batch.id)  # the long way out
    store.succeed(store.claim(1)[0])
    assert store.get(job_id).error is None
    assert [a.attempt for a in store.run(ops.attempts(job_id))] == [1]


def test_r04_nul_and_lone_surrogates_in_errors_are_escaped(store: Store) -> None:
    [job_id] = store.enqueue()
    try:
        raise ValueError("a\x00b\udc80c\ud83d")
    except ValueError as error:
        failure = failures.describe(error)
    [job] = store.claim(1)
    assert written(store, store.finish(job, Change(State.DEAD, error=failure)))
    [attempt] = store.run(ops.attempts(job_id))
    assert attempt.error == "ValueError: a\\u0000b\\udc80c\\ud83d"
    assert "a\\u0000b" in attempt.traceback
    assert store.get(job_id).error == attempt.error


def test_r04_texts_of_people_are_escaped_too(store: Store) -> None:
    store.enqueue(2)
    [running] = store.claim(1)
    assert store.run(ops.progress(Held(running.id, running.token), 1, "a\x00b\ud800")) is True
    assert store.get(running.id).progress_message == "a\\u0000b\\ud800"
    store.run(ops.cancel([running.id], by="m\x00e", why="\udfff", now=NOW))
    store.run(ops.pause("queue", "x", by="m\x00e", why="\udfff", now=NOW))
    assert {(event.by, event.why) for event in store.run(ops.events())} == {("m\\u0000e", "\\udfff")}


# Keys


@pytest.mark.parametrize(("end", "kept"), [("succeeded", 1), ("partial", 1), ("dead", 0), ("cancelled", 0)])
def test_k02_success_keeps_the_key_with_result_and_expiry_and_other_ends_free_it(
    store: Store, end: str, kept: int
) -> None:
    job_id = store.enqueue_key("k", key_ttl_ms=5000).id
    other = store.enqueue_key("other", due_at=NOW + DAY_MS).id
    [job] = store.claim(1)
    store.now += 10
    store.finish(job, Change(State(end), result='"r"' if kept else None))
    rows = store.query("select key, job_id, state, result, expires_at from duly_key order by key")
    expected = [("k", job_id, "succeeded", '"r"', NOW + 5010)] * kept
    assert rows == [*expected, ("other", other, "live", None, None)]


# Batches


ENDS = [State.SUCCEEDED, State.PARTIAL, State.DEAD, State.CANCELLED]


@pytest.mark.parametrize("at_once", [True, False])
def test_b02_each_end_is_counted_by_the_operation_that_ends_the_job(store: Store, at_once: bool) -> None:
    batch, other = Batch(store, open=6), Batch(store, open=1)
    store.enqueue(6, batch_id=batch.id)
    store.enqueue(1, batch_id=other.id)
    jobs = store.claim(10)
    changes = [Change(end) for end in (*ENDS, State.SUCCEEDED)]
    changes += [Change(State.SCHEDULED, after_ms=5, error=FAILURE)]
    finishes = [Finish(job, change) for job, change in zip(jobs, changes, strict=False)]
    for group in [finishes] if at_once else [[finish] for finish in finishes]:
        store.run(ops.finish(group, now=store.now))
    assert batch.counts() == (1, 2, 1, 1, 1)
    assert other.counts() == (1, 0, 0, 0, 0)
    assert batch.fired() == ["first dead"]
    assert other.fired() == []


def test_b03_a_batch_that_went_well_calls_back_complete_and_success_once(store: Store) -> None:
    batch = Batch(store, open=3)
    store.enqueue(3, batch_id=batch.id)
    first, second, third = store.claim(3)
    store.now += 5
    for job in (first, second):
        store.succeed(job)
        assert batch.fired() == []
        assert batch.times() == (None, None)
    store.succeed(third)
    assert batch.fired() == ["complete", "success"]
    assert batch.times() == (store.now, None)
    before = store.snapshot()
    store.succeed(third)
    assert store.snapshot() == before


@pytest.mark.parametrize("end", [State.PARTIAL, State.DEAD, State.CANCELLED])
def test_b03_a_batch_in_which_something_did_not_succeed_is_complete_but_no_success(store: Store, end: State) -> None:
    batch = Batch(store, open=2)
    store.enqueue(2, batch_id=batch.id)
    first, second = store.claim(2)
    store.finish(first, Change(end))
    store.succeed(second)
    assert batch.fired() == (["complete", "first dead"] if end is State.DEAD else ["complete"])


def test_b03_only_the_first_death_calls_back(store: Store) -> None:
    batch = Batch(store, open=4)
    store.enqueue(4, batch_id=batch.id)
    one, two, three, four = store.claim(4)
    store.kill(one)
    assert batch.fired() == ["first dead"]
    assert batch.times() == (None, store.now)
    store.now += 1
    for job in (two, three, four):
        store.kill(job)
    assert batch.fired() == ["complete", "first dead"]
    assert batch.times() == (NOW + 1, NOW)
    assert batch.counts() == (0, 0, 0, 4, 0)


def test_b03_a_batch_that_is_not_sealed_is_not_complete(store: Store) -> None:
    batch = Batch(store, open=1, sealed=False)
    store.enqueue(batch_id=batch.id)
    store.succeed(store.claim(1)[0])
    assert batch.counts() == (0, 1, 0, 0, 0)
    assert batch.fired() == []
    assert batch.times() == (None, None)


def test_b03_a_callback_is_the_job_that_was_made_with_the_batch(store: Store) -> None:
    batch = Batch(store, open=1)
    store.enqueue(batch_id=batch.id)
    store.succeed(store.claim(1)[0])
    jobs = {job.id: job for job in store.claim(5, queue="hooks")}
    job = jobs[batch.complete]
    assert (job.task, job.queue, job.priority, job.payload) == ("on_complete", "hooks", 3, '{"from":"batch"}')
    assert (job.max_attempts, job.lease_ms, job.keep_ms, job.created_at) == (4, 5000, 1000, NOW)


@pytest.mark.parametrize("how", ["cancelled", "expired", "rescued"])
def test_b03_every_way_to_end_counts_and_calls_back(store: Store, how: str) -> None:
    batch = Batch(store, open=1)
    [job_id] = store.enqueue(batch_id=batch.id, expires_ms=5, max_attempts=1)
    match how:
        case "cancelled":
            store.run(ops.cancel([job_id], by="me", why="no", now=NOW))
        case "expired":
            store.run(ops.expire([job_id], now=NOW + 5))
        case "rescued":
            store.claim(1)
            store.now += 30_000
            store.run(ops.rescue(store.run(ops.expired_leases(now=store.now)), now=store.now))
    assert batch.counts() == ((0, 0, 0, 1, 0) if how == "rescued" else (0, 0, 0, 0, 1))
    assert batch.fired() == (["complete", "first dead"] if how == "rescued" else ["complete"])


def test_b03_the_last_two_jobs_that_end_at_the_same_moment_call_back_once(postgres_url: str) -> None:
    """50 rounds, each the last two jobs of a batch, finished by two workers at once."""
    store, other = PostgresStore(postgres_url), PostgresStore(postgres_url)
    rounds = []
    for _ in range(50):
        batch = Batch(store, open=2)
        store.enqueue(2, batch_id=batch.id)
        rounds.append((batch, *store.claim(2)))
    barrier = threading.Barrier(2)

    def finish(mine: Store, which: int) -> None:
        for one in rounds:
            barrier.wait(30)
            mine.succeed(one[which])

    threads = [threading.Thread(target=finish, args=args) for args in ((store, 1), (other, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [batch.counts() for batch, *_ in rounds] == [(0, 2, 0, 0, 0)] * 50
    assert [batch.fired() for batch, *_ in rounds] == [["complete", "success"]] * 50
    store.close()
    other.close()


def test_b03_two_workers_that_end_jobs_of_the_same_batches_do_not_lock_each_other_out(postgres_url: str) -> None:
    """Each finish touches both batches, named in opposite order; not even one is rolled back."""
    stores = [PostgresStore(postgres_url), PostgresStore(postgres_url)]
    batches = [Batch(stores[0], open=80) for _ in range(2)]
    for batch in batches:
        stores[0].enqueue(80, batch_id=batch.id)
    by_batch: dict[str | None, list[Claimed]] = {}
    for job in stores[0].claim(160):
        by_batch.setdefault(job.batch_id, []).append(job)
    one, two = (by_batch[batch.id] for batch in batches)
    pairs = [[(one[n], two[n]) for n in range(40)], [(two[n], one[n]) for n in range(40, 80)]]
    barrier = threading.Barrier(2)
    executed = [0, 0]

    def finish(which: int) -> None:
        driver = stores[which].driver
        execute = driver._execute

        def counting(op: Any) -> Any:
            executed[which] += 1
            return execute(op)

        driver._execute = counting
        for pair in pairs[which]:
            barrier.wait(30)
            stores[which].run(ops.finish([Finish(job, Change(State.SUCCEEDED)) for job in pair], now=NOW))

    threads = [threading.Thread(target=finish, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [batch.counts() for batch in batches] == [(0, 80, 0, 0, 0)] * 2
    assert executed == [40, 40]
    for store in stores:
        store.close()


# on_dead


@pytest.mark.parametrize("how", ["finish", "rescue"])
def test_r08_the_operation_that_ends_a_job_dead_inserts_its_on_dead_job(store: Store, how: str) -> None:
    _, on_dead = callback("tell", payload="ignored")
    [job_id] = store.enqueue(on_dead=on_dead, max_attempts=1)
    [job] = store.claim(1)
    if how == "finish":
        store.kill(job)
    else:
        store.now += 30_000
        store.run(ops.rescue(store.run(ops.expired_leases(now=store.now)), now=store.now))
    assert store.state(job_id) == "dead"
    [told] = store.claim(5, queue="hooks")
    assert told.task == "tell"
    assert json.loads(told.payload) == {"job_id": job_id}
    assert (told.envelope.causation_id, told.envelope.correlation_id) == (job_id, job_id)
    assert (told.max_attempts, told.lease_ms, told.priority, told.keep_ms) == (4, 5000, 3, 1000)
    assert UUID7.fullmatch(told.id)
    assert int(told.id.replace("-", "")[:12], 16) == store.now


def test_r08_only_dead_jobs_raise_an_event(store: Store) -> None:
    _, on_dead = callback("tell")
    store.enqueue(4, on_dead=on_dead)
    one, two, three, four = store.claim(4)
    store.succeed(one)
    store.retry(two)
    store.finish(three, Change(State.CANCELLED))
    store.finish(four, Change(State.PARTIAL))
    assert store.claim(5, queue="hooks") == []


def test_r08_each_death_of_one_operation_has_its_own_event_and_correlation(store: Store) -> None:
    _, on_dead = callback("tell")
    ids = store.enqueue(3, on_dead=on_dead)
    store.query("update duly_job set envelope = ?", '{"correlation_id":"order-42"}')
    jobs = store.claim(3)
    store.run(ops.finish([Finish(job, Change(State.DEAD)) for job in jobs], now=store.now))
    told = store.claim(10, queue="hooks")
    assert sorted(json.loads(job.payload)["job_id"] for job in told) == sorted(ids)
    assert {job.envelope.correlation_id for job in told} == {"order-42"}


# J17


@pytest.mark.parametrize("how", ["ready", "scheduled", "waiting"])
def test_j17_a_job_that_does_not_run_is_cancelled_at_once(store: Store, how: str) -> None:
    [job_id] = store.enqueue(delay_ms=1000 if how == "scheduled" else 0)
    if how == "waiting":
        store.finish(store.claim(1)[0], Change(State.WAITING, reason="event", give_back_attempt=True))
    assert store.state(job_id) == how
    assert store.run(ops.cancel([job_id], by="ann", why="a mistake", now=NOW + 5)) == {job_id: State.CANCELLED}
    job = store.get(job_id)
    assert (job.state, job.reason, job.finished_at) == (State.CANCELLED, "a mistake", NOW + 5)
    assert job.cancel_requested_at == NOW + 5
    [event] = store.run(ops.events(job_id=job_id))
    assert (event.name, event.by, event.why, event.at) == ("job.cancelled", "ann", "a mistake", NOW + 5)
    store.now += 10_000
    assert store.claim(5) == []


def test_j17_a_running_job_gets_only_a_cancel_request(store: Store) -> None:
    [job_id] = store.enqueue()
    [job] = store.claim(1)
    assert store.run(ops.cancel([job_id], by="ann", why="a mistake", now=NOW + 5)) == {job_id: State.RUNNING}
    store.run(ops.cancel([job_id], by="bob", why="again", now=NOW + 9))
    record = store.get(job_id)
    assert (record.state, record.cancel_requested_at) == (State.RUNNING, NOW + 5)
    told = [(event.name, event.by, event.why) for event in store.run(ops.events(job_id=job_id))]
    assert told == [("job.cancel_requested", "ann", "a mistake")]
    assert store.run(ops.extend([Held(job.id, job.token)], now=NOW + 9)) == {job_id: NOW + 5}


@pytest.mark.parametrize("end", [State.SUCCEEDED, State.PARTIAL, State.DEAD])
@pytest.mark.parametrize("key", [None, "k"])
def test_j17_a_job_that_ends_after_a_cancel_request_keeps_its_own_end(
    store: Store, end: State, key: str | None
) -> None:
    new = NewJob(new_id(), "1", key=key)
    store.run(ops.enqueue(Terms("work"), [new], now=NOW))
    [job] = store.claim(1)
    store.run(ops.cancel([job.id], by="ann", why="a mistake", now=NOW + 5))
    assert written(store, store.finish(job, Change(end, result='"r"' if end is not State.DEAD else None)))
    record = store.get(job.id)
    assert (record.state, record.cancel_requested_at) == (end, NOW + 5)
    if end is not State.DEAD:
        assert record.result == "r"


@pytest.mark.parametrize("how", ["retry", "release", "snooze", "wait", "crash", "rescue"])
def test_j17_a_job_with_a_cancel_request_is_not_retried(store: Store, how: str) -> None:
    batch = Batch(store, open=1)
    [job_id] = store.enqueue(batch_id=batch.id)
    [job] = store.claim(1)
    store.run(ops.cancel([job_id], by="ann", why="a mistake", now=NOW + 5))
    match how:
        case "retry":
            store.retry(job)
        case "release":
            store.run(ops.release([job], now=store.now))
        case "snooze":
            store.run(snooze(job, 5, now=store.now))
        case "wait":
            store.finish(job, Change(State.WAITING, reason="event", give_back_attempt=True))
        case "crash":
            store.finish(job, Change(State.READY, error=FAILURE, crashed=True))
        case "rescue":
            store.now += 30_000
            store.run(ops.rescue(store.run(ops.expired_leases(now=store.now)), now=store.now))
    record = store.get(job_id)
    assert (record.state, record.reason, record.finished_at) == (
        State.CANCELLED,
        "cancelled on request",
        store.now,
    )
    assert batch.counts() == (0, 0, 0, 0, 1)
    assert [event.name for event in store.run(ops.events())] == ["job.cancel_requested", "job.cancelled"]
    store.now += DAY_MS
    assert store.claim(5) + store.claim(5, alone=True) == []


def test_j17_cancelling_an_ended_or_unknown_job_changes_nothing(store: Store) -> None:
    with no_loss(store):
        [dead] = store.dead()
        [done] = store.enqueue()
        store.succeed(store.claim(1)[0])
        before = store.snapshot()
        assert store.run(ops.cancel([dead, done, new_id()], by="ann", why="no", now=NOW + 5)) == {}
        assert store.snapshot() == before


# J20


def test_j20_a_result_is_hidden_when_its_time_is_over_and_removed_later(store: Store) -> None:
    [job_id] = store.enqueue(result_ttl_ms=1000)
    store.succeed(store.claim(1)[0], '"r"')
    store.now += 999
    assert store.get(job_id).result == "r"
    store.now += 1
    record = store.get(job_id)
    assert (record.state, record.result, record.result_until) == (State.SUCCEEDED, None, NOW + 1000)
    assert store.query("select result from duly_done") == [('"r"',)]
    store.run(ops.prune("results", now=store.now))
    assert store.query("select result, prune_at from duly_done") == [(None, NOW + 7 * DAY_MS)]


def test_j20_results_are_kept_24_hours_by_default(store: Store) -> None:
    [job_id] = store.enqueue()
    store.succeed(store.claim(1)[0], '"r"')
    assert store.get(job_id).result_until == NOW + DAY_MS


def test_j20_results_are_removed_in_chunks_oldest_first(store: Store) -> None:
    for _ in range(5):
        store.enqueue(result_ttl_ms=1000)
        store.succeed(store.claim(1)[0], '"r"')
        store.now += 1
    with no_loss(store):
        before = store.run(ops.prune("results", 2, now=NOW + 999))
        counts = [store.run(ops.prune("results", 2, now=NOW + 5000)) for _ in range(4)]
    assert before == 0
    assert counts == [2, 2, 1, 0]
    assert store.query("select count(*), count(result) from duly_done") == [(5, 0)]


def test_j20_a_keyed_result_is_kept_as_long_as_its_key(store: Store) -> None:
    first = store.enqueue_key("k", result_ttl_ms=1000, key_ttl_ms=60_000)
    store.succeed(store.claim(1)[0], '"r"')
    store.now += 59_999
    store.run(ops.prune("results", now=store.now))
    assert store.get(first.id).result == "r"
    assert store.enqueue_key("k").result == '"r"'
    store.now += 1
    assert store.get(first.id).result is None
    assert store.enqueue_key("k").id != first.id


def test_j20_the_result_is_deleted_with_a_row_that_expires_first(store: Store) -> None:
    [job_id] = store.enqueue(keep_ms=500, result_ttl_ms=1000)
    store.succeed(store.claim(1)[0], '"r"')
    store.now += 499
    store.run(ops.prune("done", now=store.now))
    assert store.get(job_id).result == "r"
    store.now += 1
    store.run(ops.prune("results", now=store.now))
    store.run(ops.prune("done", now=store.now))
    assert store.get(job_id) is None
