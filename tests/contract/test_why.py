"""`why`: the gate that keeps a job from running, named from one snapshot (B10's gates that exist by now)."""

from __future__ import annotations

import pytest

from duly.model import PARKED, Change, Envelope, NewJob, State, Terms
from duly.store import ops
from tests.contract.stores import Store, new_id


def why(store: Store, job_id: str):
    return store.run(ops.why(job_id, now=store.now))


def alive(store: Store, tasks=("work",), queues=("default",)) -> None:
    store.run(ops.register("w1", host="h", pid=1, queues=queues, tasks=tasks, beat_ms=10_000, now=store.now))


def test_b10_an_unknown_job_has_no_gate(store):
    assert why(store, new_id()) is None


def test_b10_not_due_names_the_time_and_how_long_it_is(store):
    [job] = store.enqueue(delay_ms=90_000)
    assert why(store, job).gate == "not_due"
    assert "in 1m 30s" in why(store, job).sentence
    store.now += 90_000
    assert why(store, job).gate == "no_worker"


def test_b10_a_retry_names_the_failure_it_waits_after(store):
    [job] = store.enqueue()
    store.retry(*store.claim(), message="the other side hung up")
    answer = why(store, job)
    assert (answer.gate, "the other side hung up" in answer.sentence) == ("not_due", True)


@pytest.mark.parametrize(("kind", "name"), [("queue", "default"), ("task", "work")])
def test_b10_a_pause_names_who_why_and_until_when(store, kind, name):
    alive(store)
    [job] = store.enqueue()
    store.run(ops.pause(kind, name, by="ann", why="the mail server is down", until_ms=60_000, now=store.now))
    answer = why(store, job)
    assert answer.gate == "paused"
    assert answer.sentence == f"{kind} '{name}' is paused by ann until 2027-01-15 08:01:00 UTC: the mail server is down"
    store.now += 60_000
    alive(store)
    assert why(store, job).gate == "turn"


def test_b10_a_task_that_no_living_worker_knows_is_named(store):
    [job] = store.enqueue()
    alive(store, tasks=["other"])
    assert why(store, job).gate == "unknown_task"
    alive(store, queues=["other"])
    assert why(store, job).gate == "unknown_task"
    alive(store)
    assert why(store, job).gate == "turn"
    store.now += 30_000
    assert why(store, job).gate == "no_worker"


def test_b10_a_lease_names_its_holder_and_its_end(store):
    [job] = store.enqueue(lease_ms=30_000)
    store.claim()
    assert why(store, job).sentence == "it runs, attempt 1 of 5, on lease to w1 until 2027-01-15 08:00:30 UTC"
    store.now += 40_000
    assert "whose lease ended 10s ago: no worker is alive to rescue it" in why(store, job).sentence
    alive(store)
    assert "whose lease ended 10s ago: it is rescued when that is seen twice" in why(store, job).sentence
    store.run(ops.cancel([job], now=store.now))
    assert "; it was asked to stop at 20" in why(store, job).sentence


def test_b10_the_jobs_ahead_are_counted(store):
    alive(store)
    first, second = store.enqueue(2)
    [urgent] = store.enqueue(priority=5)
    assert why(store, urgent).sentence == "it is next in queue 'default'"
    assert why(store, first).sentence == "1 job is ahead of it in queue 'default'"
    assert why(store, second).facts.ahead == 2


def test_b10_a_suspect_waits_to_run_alone(store):
    [job] = store.enqueue()
    store.claim()
    store.now += 31_000
    store.run(ops.rescue(store.run(ops.expired_leases(now=store.now)), now=store.now))
    alive(store)
    assert why(store, job).gate == "suspect"


def test_b10_what_has_ended_says_how(store):
    [dead] = store.dead()
    assert why(store, dead).sentence.startswith("it is dead because:")
    [late] = store.enqueue(expires_ms=1000)
    store.now += 1000
    assert why(store, late).gate == "expired"
    store.run(ops.expire([late], now=store.now))
    assert why(store, late).sentence == "it is cancelled because: expired"


def test_b10_waiting_says_for_what(store):
    [job] = store.enqueue()
    store.finish(*store.claim(), Change(State.WAITING, reason="approval", give_back_attempt=True))
    assert why(store, job).sentence == "it waits for: approval"


def test_j19_a_parked_job_says_which_worker_it_needs(store):
    [job] = store.enqueue()
    alive(store, tasks=["other"])
    store.run(ops.park("default", now=store.now))
    answer = why(store, job)
    assert answer.gate == "parked"
    assert answer.sentence == (
        "it is parked (no worker knows this task): start a worker that knows task 'work' "
        "and serves queue 'default', and it is ready at its next beat"
    )
    store.run(ops.wake({"work": 1}, ["default"]))
    alive(store)
    assert why(store, job).gate == "turn"


def test_j19_a_job_parked_for_its_schema_version_names_the_version(store):
    job = NewJob(new_id(), "{}", envelope=Envelope(schema_version=2))
    store.run(ops.enqueue(Terms("work"), [job], now=store.now))
    reason = f"{PARKED}needs schema version 2 of task 'work'"
    store.finish(*store.claim(), Change(State.WAITING, reason=reason, give_back_attempt=True))
    alive(store)
    answer = why(store, job.id)
    assert answer.gate == "parked"
    assert answer.sentence == (
        "it is parked (needs schema version 2 of task 'work'): start a worker that knows task 'work' "
        "in schema version 2 and serves queue 'default', and it is ready at its next beat"
    )
