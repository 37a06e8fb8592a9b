"""Rescue: how jobs are taken from workers that stopped beating, and which never are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

from duly.model import Change, Claimed, Crashed, Failure, Sighting, State
from duly.rules import backoff
from duly.rules.lifecycle import Policy, decide
from duly.store import ops
from duly.store.op import Finish
from tests.contract.stores import PostgresStore, Store, held, new_id, new_token, snooze

LEASE = 30_000
BEAT = LEASE // 3


def seen(store: Store, limit: int = 1000) -> list[Sighting]:
    return store.run(ops.expired_leases(limit, now=store.now))


def rescue(store: Store, sightings: list[Sighting]) -> dict[str, State]:
    return store.run(ops.rescue(sightings, now=store.now))


def lose(store: Store) -> list[Sighting]:
    """Let every lease run out."""
    store.now += LEASE
    return seen(store)


def crash(store: Store, *, alone: bool = True) -> str:
    """Claim one job, lose its worker, rescue the job; answer what became of it."""
    (job,) = store.claim(alone=alone)
    return rescue(store, lose(store))[job.id]


def crashes(store: Store, job_id: str) -> int:
    job = store.get(job_id)
    assert job is not None
    return job.crashes


@pytest.fixture
def impatient(postgres_url: str) -> Iterator[PostgresStore]:
    """A store whose statements fail when they would wait for a lock."""
    made = PostgresStore(postgres_url + "?options=-c%20lock_timeout%3D2s")
    yield made
    made.close()


def died(store: Store, job: Claimed) -> Change:
    """Record that the process died in which the job ran alone, as its worker does."""
    outcome = Crashed(Failure("duly.ProcessDied", "exit code -9", "what it said last"))
    policy = Policy(backoff.exponential())
    change = decide(job.attempt, job.max_attempts, outcome, policy=policy, chance=0, crashes=job.crashes)
    store.finish(job, change)
    return change


# J11: what rescuers see


def test_j11_a_lease_is_seen_from_the_moment_it_ends(store: Store) -> None:
    store.enqueue()
    (job,) = store.claim()
    store.now += LEASE - 1
    assert seen(store) == []
    store.now += 1
    assert seen(store) == [Sighting(job.id, job.token, job.lease_until, LEASE, "w1")]


def test_j11_a_rescued_job_is_ready_again_and_its_attempt_counts(store: Store) -> None:
    (job_id,) = store.enqueue()
    (first,) = store.claim()
    assert rescue(store, lose(store)) == {job_id: "ready"}
    job = store.get(job_id)
    assert job is not None
    assert (job.state, job.attempt, job.lease_until, job.due_at) == (State.READY, 1, None, first.due_at)
    (second,) = store.claim(alone=True)
    assert (second.id, second.attempt) == (job_id, 2)
    assert second.token != first.token


def test_j11_a_rescue_pass_is_bounded_and_takes_the_oldest_leases_first(store: Store) -> None:
    store.enqueue(3)
    jobs = []
    for _ in range(3):
        jobs += store.claim()
        store.now += 1
    store.run(ops.extend([held(jobs[0])], now=store.now))
    store.now += 2 * LEASE
    assert [one.id for one in seen(store, limit=2)] == [jobs[1].id, jobs[2].id]


def test_j11_only_running_jobs_are_ever_seen(store: Store) -> None:
    store.enqueue(4)
    a, b, c = store.claim(3)
    store.succeed(a)
    store.retry(b)
    store.run(ops.release([c], now=store.now))
    store.now += 100 * LEASE
    assert seen(store) == []


def test_j11_each_job_is_rescued_by_its_own_lease(store: Store) -> None:
    (short,) = store.enqueue(lease_ms=1_000)
    (long,) = store.enqueue(lease_ms=60_000)
    store.claim(2)
    store.now += 1_000
    assert rescue(store, seen(store)) == {short: "ready"}
    assert store.state(long) == "running"


# J13: which leases are taken


ENDINGS: dict[str, Callable[[Store, Claimed], Any]] = {
    "succeeded": lambda store, job: store.succeed(job, "1"),
    "dead": lambda store, job: store.kill(job),
    "cancelled": lambda store, job: store.finish(job, Change(State.CANCELLED, reason="enough")),
    "retried": lambda store, job: store.retry(job),
    "snoozed": lambda store, job: store.run(snooze(job, 1, now=store.now)),
    "released": lambda store, job: store.run(ops.release([job], now=store.now)),
    "extended": lambda store, job: store.run(ops.extend([held(job)], now=store.now)),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_j13_a_job_that_ended_or_was_extended_after_the_sighting_is_not_touched(store: Store, ending: str) -> None:
    store.enqueue()
    (job,) = store.claim()
    sightings = lose(store)
    ENDINGS[ending](store, job)
    before = store.snapshot()
    assert rescue(store, sightings) == {}
    assert store.snapshot() == before


def test_j13_a_job_claimed_again_after_the_sighting_is_not_touched(store: Store) -> None:
    store.enqueue()
    store.claim()
    sightings = lose(store)
    rescue(store, sightings)
    store.claim(alone=True)
    store.now += LEASE  # the second lease has ended too, but nobody has seen that
    before = store.snapshot()
    rescue(store, sightings)
    assert store.snapshot() == before


@pytest.mark.parametrize("wrong", ["token", "lease_until"])
def test_j13_a_sighting_that_does_not_match_rescues_nothing(store: Store, wrong: str) -> None:
    store.enqueue()
    store.claim()
    (one,) = lose(store)
    before = store.snapshot()
    assert rescue(store, [replace(one, **{wrong: getattr(one, wrong) - 1})]) == {}
    assert store.snapshot() == before


def test_j13_a_lease_is_judged_again_by_the_clock_of_the_taking(store: Store) -> None:
    store.enqueue()
    store.claim()
    sightings = lose(store)
    store.now -= 1  # the same token and lease end, no longer expired
    before = store.snapshot()
    assert rescue(store, sightings) == {}
    assert store.snapshot() == before


def test_j13_a_worker_that_returns_does_not_protect_other_jobs(store: Store) -> None:
    store.enqueue(3)
    done, extended, lost = store.claim(3)
    sightings = lose(store)
    store.succeed(done)
    store.run(ops.extend([held(extended)], now=store.now))
    assert rescue(store, sightings) == {lost.id: "ready"}
    assert [store.state(job.id) for job in (done, extended, lost)] == ["succeeded", "running", "ready"]


def test_j13_a_finished_job_never_comes_back(store: Store) -> None:
    (job_id,) = store.enqueue()
    store.claim()
    sightings = lose(store)
    rescue(store, sightings)
    (again,) = store.claim(alone=True)
    later = lose(store)
    store.succeed(again, "7")
    for _ in range(3):
        store.now += LEASE
        assert rescue(store, [*sightings, *later]) == {}
        assert seen(store) == []
    assert store.state(job_id) == "succeeded"
    assert store.query("select count(*) from duly_job") == [(0,)]


def test_j13_a_worker_given_up_as_dead_changes_nothing_on_return(store: Store) -> None:
    store.enqueue()
    (late,) = store.claim()
    rescue(store, lose(store))
    (current,) = store.claim(alone=True)
    before = store.snapshot()
    assert store.succeed(late) == "lost"
    assert store.kill(late) == "lost"
    assert store.run(ops.extend([held(late)], now=store.now)) == {}
    assert store.run(ops.progress(held(late), 50)) is False
    assert store.snapshot() == before
    store.succeed(current)
    assert store.state(current.id) == "succeeded"


def test_j13_a_rescue_repeated_after_a_lost_answer_returns_the_same(store: Store) -> None:
    (ready,) = store.enqueue()
    (dead,) = store.enqueue(max_attempts=1)
    store.claim(2)
    sightings = lose(store)
    op = ops.rescue(sightings, now=store.now)
    assert store.run(op) == {ready: "ready", dead: "dead"}
    before = store.snapshot()
    assert op.again is not None
    assert store.run(op.again) == {ready: "ready", dead: "dead"}
    assert store.snapshot() == before


def test_j13_a_repeated_rescue_omits_jobs_that_their_worker_finished(store: Store) -> None:
    store.enqueue(3)
    done, dead, lost = store.claim(3)
    sightings = lose(store)
    store.succeed(done)
    store.kill(dead)
    again = ops.rescue(sightings, now=store.now).again
    assert again is not None
    assert store.run(again) == {lost.id: "ready"}


def test_j13_a_row_that_another_session_has_locked_is_skipped_and_not_waited_for(impatient: PostgresStore) -> None:
    impatient.enqueue(3)
    jobs = impatient.claim(3)
    sightings = lose(impatient)
    with psycopg.connect(impatient.url) as other:
        other.execute("select 1 from duly.duly_job where id = %s for update", [jobs[1].id])
        assert set(rescue(impatient, sightings)) == {jobs[0].id, jobs[2].id}
        other.rollback()
    assert impatient.state(jobs[1].id) == "running"
    assert set(rescue(impatient, sightings)) == {jobs[1].id}


# J14: when the clock steps


def test_j14_a_lease_that_ends_too_far_ahead_counts_as_ended(store: Store) -> None:
    (job_id,) = store.enqueue()
    store.claim()
    store.now -= 2 * BEAT + 1
    (one,) = seen(store)
    assert rescue(store, [one]) == {job_id: "ready"}


def test_j14_a_healthy_lease_is_never_seen_however_the_clock_steps_within_two_beats(store: Store) -> None:
    store.enqueue()
    (job,) = store.claim()
    healthy = [Sighting(job.id, job.token, job.lease_until, LEASE, "w1")]
    for step in (-2 * BEAT, -BEAT, -1, 0, 1, BEAT, LEASE - 1):
        store.now = job.lease_until - LEASE + step
        assert seen(store) == []
        assert rescue(store, healthy) == {}
    assert store.state(job.id) == "running"


def test_j14_two_beats_are_those_of_the_jobs_own_lease(store: Store) -> None:
    store.enqueue(lease_ms=3_000)
    store.enqueue(lease_ms=300_000)
    short, _ = store.claim(2)
    store.now -= 2_001
    assert [one.id for one in seen(store)] == [short.id]


# J12: who becomes a suspect, and what it costs


def test_j12_the_first_loss_makes_a_suspect_and_costs_no_crash(store: Store) -> None:
    (job_id,) = store.enqueue()
    assert crash(store, alone=False) == "ready"
    assert crashes(store, job_id) == 0
    (job,) = store.claim(alone=True)
    assert job.suspect
    assert job.crashes == 0


def test_j12_a_claim_for_suspects_takes_only_suspects(store: Store) -> None:
    (suspect,) = store.enqueue()
    crash(store, alone=False)
    (fresh,) = store.enqueue()
    (scheduled,) = store.enqueue(delay_ms=1)
    store.now += 1
    assert [job.id for job in store.claim(10)] == [fresh, scheduled]
    assert [job.id for job in store.claim(10, alone=True)] == [suspect]


def test_j12_three_crashes_while_alone_end_the_job_dead(store: Store) -> None:
    (job_id,) = store.enqueue(max_attempts=20)
    assert crash(store, alone=False) == "ready"
    assert [(crash(store), crashes(store, job_id)) for _ in range(3)] == [("ready", 1), ("ready", 2), ("dead", 3)]
    job = store.get(job_id)
    assert job is not None
    assert (job.state, job.reason, job.attempt) == (State.DEAD, "killed its worker", 4)
    assert job.finished_at == store.now


def test_j12_the_death_of_a_worker_does_not_count_against_a_job_in_a_child(store: Store) -> None:
    (job_id,) = store.enqueue(max_attempts=10)
    crash(store, alone=False)
    for _ in range(4):
        store.run(ops.claim("default", limit=1, token=new_token(), worker=f"w1{ops.CHILD}", alone=True, now=store.now))
        store.run(ops.rescue(lose(store), now=store.now))
    assert (store.state(job_id), crashes(store, job_id)) == ("ready", 0)


def test_j12_the_third_crash_on_the_last_attempt_is_recorded_as_a_crash(store: Store) -> None:
    (job_id,) = store.enqueue(max_attempts=4)
    crash(store, alone=False)
    assert [crash(store) for _ in range(3)] == ["ready", "ready", "dead"]
    assert store.get(job_id).reason == "killed its worker"


@pytest.mark.parametrize("ending", ["retried", "snoozed"])
def test_j12_an_attempt_that_ends_clears_the_suspicion(store: Store, ending: str) -> None:
    (job_id,) = store.enqueue(max_attempts=20)
    crash(store, alone=False)
    crash(store)
    (job,) = store.claim(alone=True)
    ENDINGS[ending](store, job)
    store.now += 1_000
    assert store.claim(alone=True) == []
    assert crash(store, alone=False) == "ready"  # among others again: not its crash
    assert crashes(store, job_id) == 1


def test_j12_a_release_ends_no_attempt_and_clears_nothing(store: Store) -> None:
    store.enqueue()
    crash(store, alone=False)
    (job,) = store.claim(alone=True)
    store.run(ops.release([job], now=store.now))
    assert store.claim() == []
    assert [again.id for again in store.claim(alone=True)] == [job.id]


def test_j12_a_neighbour_with_attempts_left_never_dies(store: Store) -> None:
    (poison,) = store.enqueue(max_attempts=6)
    innocent = store.enqueue(4, max_attempts=2)
    store.claim(5)
    assert set(rescue(store, lose(store)).values()) == {"ready"}
    while suspects := store.claim(alone=True):
        (job,) = suspects
        if job.id == poison:
            rescue(store, lose(store))
        else:
            store.succeed(job)
    assert [store.state(job_id) for job_id in innocent] == ["succeeded"] * 4
    assert [crashes(store, job_id) for job_id in innocent] == [0] * 4
    assert store.get(poison).reason == "killed its worker"


def test_j12_a_loss_on_the_last_attempt_ends_the_job_dead_with_its_reason(store: Store) -> None:
    (job_id,) = store.enqueue(max_attempts=1)
    assert crash(store, alone=False) == "dead"
    job = store.get(job_id)
    assert job is not None
    assert (job.state, job.attempt, job.crashes) == (State.DEAD, 1, 0)
    assert job.reason == "worker lost on the last attempt"


def test_j12_every_loss_leaves_an_attempt_that_names_the_worker(store: Store) -> None:
    (job_id,) = store.enqueue(max_attempts=3)
    crash(store, alone=False)
    first = store.now
    crash(store)
    (job,) = store.claim(alone=True)
    store.kill(job)
    told = [(a.attempt, a.outcome, a.worker, a.at) for a in store.run(ops.attempts(job_id))]
    assert told == [
        (1, "crashed", "w1", first),
        (2, "crashed", "w1", first + LEASE),
        (3, "failed", "w1", first + LEASE),
    ]
    assert store.run(ops.attempts(job_id))[0].error == "worker w1 stopped beating"


def test_j12_a_death_by_rescue_writes_everything_an_ending_writes(store: Store) -> None:
    batch, callback = new_id(), new_id()
    spec = {
        "id": callback, "task": "tell", "queue": "mail", "priority": 0, "max_attempts": 5, "lease_ms": LEASE,
        "keep_ms": 1, "result_ttl_ms": 1, "payload": "{}",
    }  # fmt: skip
    store.query(
        "insert into duly_batch (id, name, created_at, sealed_at, open, on_complete) values (?, 'b', 1, 1, 1, ?)",
        batch,
        json.dumps(spec),
    )
    on_dead = json.dumps({**spec, "id": None, "task": "mourn"})
    job_id = store.enqueue_key("k", max_attempts=1, batch_id=batch, on_dead=on_dead).id
    crash(store, alone=False)
    assert store.query("select count(*) from duly_key") == [(0,)]
    assert store.query("select open, dead, completed_at from duly_batch") == [(0, 1, store.now)]
    assert {(job.task, job.attempt) for job in store.claim(10, queue="mail")} == {("tell", 1), ("mourn", 1)}
    (event,) = store.run(ops.events(job_id=job_id))
    assert (event.name, event.why, event.at) == ("job.dead", "worker lost on the last attempt", store.now)
    assert store.query("select count(*) from duly_job where id = ?", job_id) == [(0,)]
    assert not store.enqueue_key("k").deduplicated


def test_j12_a_job_with_a_cancel_request_is_cancelled_by_its_rescue(store: Store) -> None:
    job_id = store.enqueue_key("k").id
    store.claim()
    store.run(ops.cancel([job_id], by="ann", why="wrong file", now=store.now))
    asked_at = store.now
    assert rescue(store, lose(store)) == {job_id: "cancelled"}
    job = store.get(job_id)
    assert job is not None
    assert (job.state, job.reason, job.crashes) == (State.CANCELLED, "cancelled on request", 0)
    assert (job.cancel_requested_at, job.finished_at) == (asked_at, store.now)
    assert [event.name for event in store.run(ops.events(job_id=job_id))] == ["job.cancel_requested", "job.cancelled"]
    assert not store.enqueue_key("k").deduplicated


def test_j12_a_rescue_of_many_gives_each_its_own_verdict(store: Store) -> None:
    (ready,) = store.enqueue()
    (dead,) = store.enqueue(max_attempts=1)
    (cancelled,) = store.enqueue()
    jobs = store.claim(3)
    store.run(ops.cancel([cancelled], now=store.now))
    assert rescue(store, lose(store)) == {ready: "ready", dead: "dead", cancelled: "cancelled"}
    late = store.run(ops.finish([Finish(job, Change(State.SUCCEEDED)) for job in jobs], now=store.now))
    assert late == dict.fromkeys((ready, dead, cancelled), "lost")
    assert [store.state(job_id) for job_id in (ready, dead, cancelled)] == ["ready", "dead", "cancelled"]


# J12: a worker that lives tells of the process that died


def test_j12_a_process_that_died_makes_a_suspect_with_one_crash_and_its_error(store: Store) -> None:
    (job_id,) = store.enqueue()
    store.now += 5
    (first,) = store.claim()
    died(store, first)
    job = store.get(job_id)
    assert job is not None
    assert (job.state, job.attempt, job.crashes, job.due_at) == (State.READY, 1, 1, first.due_at)
    assert job.error == "duly.ProcessDied: exit code -9"
    assert store.claim() == []
    (again,) = store.claim(alone=True)
    assert (again.id, again.suspect, again.crashes, again.attempt) == (job_id, True, 1, 2)


def test_j12_a_process_that_died_leaves_an_attempt_that_crashed(store: Store) -> None:
    (job_id,) = store.enqueue()
    died(store, *store.claim())
    store.kill(*store.claim(alone=True))
    told = [(a.attempt, a.outcome, a.error, a.traceback) for a in store.run(ops.attempts(job_id))]
    assert told == [
        (1, "crashed", "duly.ProcessDied: exit code -9", "what it said last"),
        (2, "failed", "builtins.ValueError: no", "a traceback"),
    ]


def test_j12_three_processes_that_died_end_the_job_dead(store: Store) -> None:
    (job_id,) = store.enqueue(max_attempts=20)
    states = [died(store, *store.claim(alone=alone)).state for alone in (False, True, True)]
    assert states == ["ready", "ready", "dead"]
    job = store.get(job_id)
    assert job is not None
    assert (job.state, job.reason, job.crashes, job.attempt) == (State.DEAD, "killed its worker", 3, 3)
    assert [attempt.outcome for attempt in store.run(ops.attempts(job_id))] == ["crashed"] * 3


def test_j12_crashes_add_up_from_every_reporter(store: Store) -> None:
    (job_id,) = store.enqueue(max_attempts=20)
    died(store, *store.claim())
    assert crash(store) == "ready"
    assert died(store, *store.claim(alone=True)).state == "dead"
    assert crashes(store, job_id) == 3


@pytest.mark.parametrize("ending", ["retried", "snoozed"])
def test_j12_an_attempt_that_ends_after_a_crash_clears_the_suspicion_and_not_the_count(
    store: Store, ending: str
) -> None:
    (job_id,) = store.enqueue(max_attempts=20)
    died(store, *store.claim())
    ENDINGS[ending](store, *store.claim(alone=True))
    store.now += 1_000
    (job,) = store.claim()
    assert (job.id, job.suspect, job.crashes) == (job_id, False, 1)


def test_j12_decide_and_rescue_agree_on_a_crash_while_alone(store: Store) -> None:
    grid = [(attempt, most, before) for attempt in (1, 2) for most in (2, 3) for before in (0, 1, 2, 3)]
    for attempt, most, before in grid:
        told = []
        for way in (lambda job: died(store, job), lambda job: rescue(store, lose(store))):
            (job_id,) = store.enqueue(max_attempts=most)
            store.query(
                "update duly_job set crashes = ?, attempt = ?, suspect = (1 = 1) where id = ?",
                before, attempt - 1, job_id,
            )  # fmt: skip
            (job,) = store.claim(alone=True)
            way(job)
            after = store.get(job_id)
            (*_, last) = store.run(ops.attempts(job_id))
            assert after is not None
            reason = after.reason if after.state is State.DEAD else None
            told.append((after.state, reason, after.crashes, after.attempt, last.outcome))
            store.run(ops.cancel([job_id], now=store.now))
        assert told[0] == told[1], (attempt, most, before)
