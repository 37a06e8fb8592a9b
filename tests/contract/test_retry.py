"""Retry makes a job due now that was put off or waits; hold stops a database that came out of a backup."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from duly.model import HELD, PARKED, Change, HoldFigure, Pause, State, Verdict
from duly.store import ops
from duly.store.op import Finish, Held
from tests.contract.stores import NOW, D1Store, PostgresStore, Store, new_id


def retry(store: Store, *ids: str, **more: Any) -> dict[str, State]:
    return store.run(ops.retry(ids, now=store.now, **more))


def events(store: Store, name: str) -> list[Any]:
    return [event for event in store.run(ops.events()) if event.name == name]


def job_of(store: Store, job_id: str) -> Any:
    job = store.get(job_id)
    assert job is not None
    return job


# Retry


def test_a_job_that_was_put_off_is_made_due_now_and_can_be_claimed(store: Store) -> None:
    (job_id,) = store.enqueue(delay_ms=500_000)
    store.now += 7
    assert retry(store, job_id) == {job_id: State.READY}
    job = job_of(store, job_id)
    assert (job.state, job.due_at, job.attempt) == (State.READY, NOW + 7, 0)
    assert [claimed.id for claimed in store.claim()] == [job_id]


def test_a_job_between_two_attempts_is_made_due_and_keeps_its_attempts_and_its_error(store: Store) -> None:
    (job_id,) = store.enqueue()
    store.retry(store.claim()[0], after_ms=500_000)
    assert retry(store, job_id) == {job_id: State.READY}
    job = job_of(store, job_id)
    assert (job.attempt, job.error, job.reason) == (1, "builtins.ValueError: no", None)
    assert store.claim()[0].attempt == 2


def test_a_job_that_waits_for_something_outside_is_made_due(store: Store) -> None:
    (job_id,) = store.enqueue()
    store.finish(store.claim()[0], Change(State.WAITING, reason="approval", give_back_attempt=True))
    assert retry(store, job_id) == {job_id: State.READY}
    assert job_of(store, job_id).reason is None
    assert len(store.claim()) == 1


def test_a_parked_job_is_made_due_and_is_parked_no_more(store: Store) -> None:
    (job_id,) = store.enqueue()
    store.finish(store.claim()[0], Change(State.WAITING, reason=f"{PARKED}so", give_back_attempt=True))
    assert retry(store, job_id) == {job_id: State.READY}
    assert store.query("select parked_version from duly_job") == [(None,)]
    assert store.run(ops.parked()) == []


def test_a_retry_does_not_touch_ready_running_ended_or_unknown_jobs(store: Store) -> None:
    ready, running, cancelled, dead = (*store.enqueue(2), *store.enqueue(2, queue="other"))
    store.run(ops.cancel([cancelled], now=store.now))
    store.kill(store.claim(queue="other")[0])
    (held,) = store.claim()
    assert held.id == ready
    ready, running = running, ready
    before = store.snapshot()
    store.now += 5
    assert retry(store, ready, running, cancelled, dead, new_id(), "no id") == {}
    assert store.snapshot() == before


def test_a_retry_is_recorded_with_author_reason_and_previous_state(store: Store) -> None:
    late, waiting = store.enqueue(2, delay_ms=0)
    jobs = {job.id: job for job in store.claim(2)}
    store.retry(jobs[late])
    store.finish(jobs[waiting], Change(State.WAITING, reason="x", give_back_attempt=True))
    retry(store, late, waiting, by="ann", why="the other side is back")
    told = events(store, "job.retried")
    assert {event.job_id: json.loads(event.data)["from"] for event in told} == {late: "scheduled", waiting: "waiting"}
    assert {(event.by, event.why, event.subject, event.at) for event in told} == {
        ("ann", "the other side is back", "work", NOW)
    }


def test_a_retry_repeated_after_a_lost_answer_names_its_jobs_even_if_they_run(store: Store) -> None:
    if isinstance(store, D1Store):
        store.lose(None)
    (job_id,) = store.enqueue(delay_ms=500)
    op = ops.retry([job_id], by="ann", now=store.now)
    assert store.run(op) == {job_id: State.READY}
    store.claim()
    assert op.again is not None
    before = store.snapshot()
    assert store.run(op.again) == {job_id: State.READY}
    assert store.snapshot() == before
    other = ops.retry([job_id], by="bob", now=store.now).again
    assert other is not None
    assert store.run(other) == {}


def test_a_retry_calls_workers_that_sleep(store: Store) -> None:
    called: list[int] = []
    watch = store.driver.watch(lambda: called.append(1))
    (job_id,) = store.enqueue(delay_ms=500)
    called.clear()
    retry(store, job_id)
    assert called
    watch.close()


def test_a_retry_waits_for_a_locked_row_and_judges_its_new_state(postgres_url: str) -> None:
    """On PostgreSQL a cancel may be under way in another session; nothing of a cancelled job comes back."""
    store = PostgresStore(postgres_url)
    (job_id,) = store.enqueue(delay_ms=500)
    with psycopg.connect(postgres_url) as other:
        other.execute("update duly.duly_job set state = 'running', attempt = 1, token = 9, lease_until = 9")
        blocked = store.driver._start(lambda: retry(store, job_id))  # type: ignore[attr-defined]
        with psycopg.connect(postgres_url, autocommit=True) as third:
            waits = "select count(*) from pg_locks where not granted"
            while not blocked.done() and third.execute(waits).fetchone() == (0,):
                pass
        other.commit()
    assert blocked.result() == {}
    assert events(store, "job.retried") == []
    store.close()


# Hold


def schedules(store: Store) -> list[tuple[Any, ...]]:
    return store.query("select name, paused_at, paused_by, paused_why from duly_schedule order by name")


def add_schedule(store: Store, name: str, paused_at: int | None = None) -> None:
    by = None if paused_at is None else "ann"
    store.query(
        "insert into duly_schedule (name, task, spec, mode, paused_at, paused_by, paused_why) "
        "values (?, 'work', '', 'cron', ?, ?, ?)",
        *(name, paused_at, by, by),
    )


def hold(store: Store) -> HoldFigure:
    return store.run(ops.hold(by="eve", why="restored", now=store.now))


def test_held_jobs_wait_with_their_attempt_given_back_and_never_expire_or_time_out(store: Store) -> None:
    (job_id,) = store.enqueue(expires_ms=1000, max_attempts=1)
    store.claim()
    store.now += 5
    assert hold(store) == HoldFigure(jobs=1, queues=1, schedules=0)
    job = job_of(store, job_id)
    assert (job.state, job.attempt, job.due_at, job.lease_until) == (State.WAITING, 0, None, None)
    assert job.reason == f"{HELD}it ran when the backup was made"
    assert store.run(ops.expirable(now=store.now + 10**9)) == []
    assert store.run(ops.promote("default", now=store.now + 10**9)) == 0
    assert store.run(ops.expired_leases(now=store.now + 10**9)) == []


def test_a_worker_from_before_the_hold_has_lost_its_job(store: Store) -> None:
    store.enqueue(2)
    first, second = store.claim(2)
    hold(store)
    before = store.snapshot()
    done = Change(State.SUCCEEDED)
    failed = Change(State.SCHEDULED, after_ms=5)
    answer = store.run(ops.finish([Finish(first, done), Finish(second, failed)], now=store.now))
    assert set(answer.values()) == {Verdict.LOST}
    assert store.run(ops.extend([Held(first.id, first.token)], now=store.now)) == {}
    assert store.snapshot() == before


def test_a_retry_releases_a_held_job_once_its_queue_is_resumed(store: Store) -> None:
    (job_id,) = store.enqueue()
    store.claim()
    hold(store)
    assert retry(store, job_id) == {job_id: State.READY}
    assert store.claim() == []
    store.run(ops.resume("queue", "default", by="eve", why="looked", now=store.now))
    (job,) = store.claim()
    assert (job.id, job.attempt) == (job_id, 1)


def test_a_hold_pauses_every_queue_that_has_jobs_and_every_schedule(store: Store) -> None:
    for queue in ("a", "b", "c", "d"):
        store.enqueue(queue=queue, delay_ms=5 if queue == "b" else 0)
    store.kill(store.claim(queue="d")[0])
    store.run(ops.pause("queue", "a", by="ann", why="hers", now=NOW))
    store.run(ops.pause("queue", "b", by="ann", why="hers", until_ms=10, now=NOW))
    store.run(ops.pause("task", "work", by="ann", why="hers", now=NOW))
    store.run(ops.resume("queue", "c", by="ann", why="hers", now=NOW))
    store.enqueue(queue="d")
    add_schedule(store, "nightly")
    add_schedule(store, "off", paused_at=3)
    store.now += 5
    assert hold(store) == HoldFigure(jobs=0, queues=3, schedules=1)
    at = store.now
    assert store.run(ops.paused(now=at + 10**9)) == [
        Pause("queue", "a", NOW, "ann", "hers", None),
        *(Pause("queue", name, at, "eve", "restored", None) for name in ("b", "c", "d")),
        Pause("task", "work", NOW, "ann", "hers", None),
    ]
    assert schedules(store) == [("nightly", at, "eve", "restored"), ("off", 3, "ann", "ann")]


def test_a_hold_is_one_event_and_a_second_one_does_nothing(store: Store) -> None:
    if isinstance(store, D1Store):
        store.lose(None)
    store.enqueue(2)
    store.claim()
    add_schedule(store, "nightly")
    assert hold(store) == HoldFigure(1, 1, 1)
    before = store.snapshot()
    store.now += 5
    assert hold(store) == HoldFigure(0, 0, 0)
    assert store.snapshot() == before
    (told,) = events(store, "database.held")
    assert (told.by, told.why, told.at) == ("eve", "restored", NOW)
    assert json.loads(told.data) == {"jobs": 1, "queues": 1, "schedules": 1}


def test_a_hold_of_an_empty_database_returns_zero(store: Store) -> None:
    assert hold(store) == HoldFigure(0, 0, 0)
    assert store.run(ops.events()) == []


def test_a_retried_job_keeps_its_cancel_request(store: Store) -> None:
    (job_id,) = store.enqueue()
    store.claim()
    store.run(ops.cancel([job_id], now=store.now))
    hold(store)
    assert store.state(job_id) == "waiting"
    retry(store, job_id)
    store.run(ops.resume("queue", "default", by="eve", why="", now=store.now))
    assert store.claim()[0].cancel_requested_at == NOW


def test_why_names_the_hold_of_a_held_job(store: Store) -> None:
    (job_id,) = store.enqueue()
    store.claim()
    hold(store)
    why = store.run(ops.why(job_id, now=store.now))
    assert why.gate == "held"
    assert why.sentence == (
        "it is held (it ran when the backup was made): look whether its work was done, then retry or cancel it"
    )


@pytest.mark.parametrize("asked", [State.READY, State.SCHEDULED])
def test_a_job_that_did_not_run_keeps_its_place_through_a_hold(store: Store, asked: State) -> None:
    (job_id,) = store.enqueue(delay_ms=0 if asked is State.READY else 50)
    before = job_of(store, job_id)
    hold(store)
    assert job_of(store, job_id) == before
