"""The machine as a tutorial: one idea a test, in the order in which a newcomer meets them.

`store` is any of the three databases; `store.now` is its clock, which moves only when told.
"""

from __future__ import annotations

from duly.model import Failed, NewJob, State, Succeeded, Terms, Verdict
from duly.rules.backoff import exponential
from duly.rules.failure import describe
from duly.rules.lifecycle import Policy, decide
from duly.store import ops
from duly.store.op import Finish, Held
from duly.store.ops import Replay
from tests.contract.stores import new_id

POLICY = Policy(exponential(first=5, jitter=0))


def test_a_job_is_enqueued_claimed_and_finished(store):
    job = NewJob(new_id(), payload='{"order":42}')
    store.run(ops.enqueue(Terms("send_receipt"), [job], now=store.now))

    [claimed] = store.run(ops.claim("default", limit=10, token=1, worker="me", now=store.now))
    assert (claimed.task, claimed.payload, claimed.attempt) == ("send_receipt", '{"order":42}', 1)

    change = decide(claimed.attempt, claimed.max_attempts, Succeeded('"sent"'), policy=POLICY, chance=0)
    assert store.run(ops.finish([Finish(claimed, change)], now=store.now)) == {job.id: Verdict.RECORDED}

    record = store.run(ops.get(job.id, now=store.now))
    assert (record.state, record.result) == (State.SUCCEEDED, "sent")


def test_a_failed_job_is_retried_later_and_finally_dead(store):
    [job_id] = store.enqueue(max_attempts=2)

    def fail(claimed):
        outcome = Failed(describe(ValueError("no")))
        change = decide(claimed.attempt, claimed.max_attempts, outcome, policy=POLICY, chance=0)
        store.run(ops.finish([Finish(claimed, change)], now=store.now))

    fail(*store.claim())
    assert store.state(job_id) == State.SCHEDULED
    assert store.claim() == []  # not before its five seconds are over

    store.now += 5_000
    fail(*store.claim())
    assert store.state(job_id) == State.DEAD
    assert [attempt.error for attempt in store.run(ops.attempts(job_id))] == ["ValueError: no"] * 2


def test_a_dead_worker_loses_its_lease_and_changes_nothing_on_return(store):
    [job_id] = store.enqueue(lease_ms=30_000)
    [zombie] = store.claim()

    store.now += 30_001
    seen = store.run(ops.expired_leases(now=store.now))
    assert store.run(ops.rescue(seen, now=store.now)) == {job_id: State.READY}

    [second] = store.claim(alone=True)  # what was lost once runs alone from now on
    assert store.succeed(zombie) == Verdict.LOST
    assert store.run(ops.extend([Held(zombie.id, zombie.token)], now=store.now)) == {}
    assert store.succeed(second) == Verdict.RECORDED


def test_a_key_makes_the_same_work_happen_once(store):
    first = store.enqueue_key("receipt:42")
    again = store.enqueue_key("receipt:42")
    assert again.id == first.id
    assert again.deduplicated

    store.succeed(*store.claim(), result='"sent"')
    late = store.enqueue_key("receipt:42")
    assert (late.id, late.succeeded, late.result) == (first.id, True, '"sent"')
    assert store.claim() == []


def test_a_dead_job_is_replayed_under_a_new_id_with_its_origin(store):
    [dead] = store.dead()
    [replayed] = store.run(ops.replay([Replay(dead, new_id())], by="ann", why="fixed the bug", now=store.now))
    job = store.get(replayed.new_id)
    assert (job.state, job.attempt, job.origin, job.replay_count) == (State.READY, 0, dead, 1)
    assert store.run(ops.dead_list(now=store.now)) == []
