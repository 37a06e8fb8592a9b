"""Parking: what no living worker can run is set aside, costs the others nothing, and comes back by itself. Line J19."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from duly.model import PARKED, Change, Claimed, Envelope, NewJob, State, Terms
from duly.store import ops
from tests.contract.stores import D1Store, PostgresStore, Store, new_id, snooze

BEAT = 10_000
UNKNOWN = "parked: no worker knows this task"


@pytest.fixture
def calm(store: Store) -> Store:
    """A store on which every answer arrives: asked again, both operations answer that nothing was left."""
    if isinstance(store, D1Store):
        store.lose(None)
    return store


@pytest.fixture
def impatient(postgres_url: str) -> Iterator[PostgresStore]:
    """A store whose statements fail when they would wait for a lock."""
    made = PostgresStore(postgres_url + "?options=-c%20lock_timeout%3D2s")
    yield made
    made.close()


def alive(store: Store, *tasks: str, worker: str = "w1", queues: tuple[str, ...] = ("default",)) -> None:
    store.run(ops.register(worker, host="h", pid=1, queues=queues, tasks=tasks, beat_ms=BEAT, now=store.now))


def park(store: Store, limit: int = 1000, queue: str = "default") -> int:
    return store.run(ops.park(queue, limit, now=store.now))


def wake(store: Store, *queues: str, limit: int = 1000, **versions: int) -> int:
    return store.run(ops.wake(versions or {"work": 1}, queues or ("default",), limit))


def parked(store: Store) -> set[str]:
    return {row[0] for row in store.query("select id from duly_job where parked_version is not null")}


def enqueue_version(store: Store, version: int, **terms: Any) -> str:
    job = NewJob(new_id(), "{}", envelope=Envelope(schema_version=version))
    store.run(ops.enqueue(Terms(**{"task": "work", **terms}), [job], now=store.now))
    return job.id


def give_back(store: Store, job: Claimed) -> None:
    """Do as a worker does that claimed a job of a newer schema version than it knows."""
    store.finish(job, Change(State.WAITING, reason=f"{PARKED}needs more", give_back_attempt=True))


# What is parked


def test_j19_a_task_that_no_living_worker_knows_is_parked_and_not_failed(calm: Store) -> None:
    store = calm
    (job_id,) = store.enqueue()
    (known,) = store.enqueue(task="known")
    alive(store, "known")
    assert park(store) == 1
    job = store.get(job_id)
    assert job is not None
    assert (job.state, job.reason, job.attempt, job.error) == (State.WAITING, UNKNOWN, 0, None)
    assert store.state(known) == "ready"
    assert park(store) == 0


def test_j19_a_task_that_a_living_worker_knows_is_not_parked(store: Store) -> None:
    (job_id,) = store.enqueue()
    alive(store, "a", "b")
    alive(store, "work", "b", worker="w2")
    park(store)
    assert store.state(job_id) == "ready"


def test_j19_a_worker_counts_while_it_has_been_heard_of_within_three_beats(store: Store) -> None:
    (job_id,) = store.enqueue()
    alive(store, "work")
    store.now += 3 * BEAT - 1
    alive(store, "other", worker="w2")
    park(store)
    assert store.state(job_id) == "ready"
    store.now += 1
    park(store)
    assert store.state(job_id) == "waiting"


def test_j19_a_worker_that_left_counts_no_more(store: Store) -> None:
    (job_id,) = store.enqueue()
    alive(store, "work")
    alive(store, "other", worker="w2")
    store.run(ops.leave("w1"))
    park(store)
    assert store.state(job_id) == "waiting"


def test_j19_only_workers_that_serve_the_queue_count(store: Store) -> None:
    (job_id,) = store.enqueue()
    alive(store, "work", queues=("mail", "default too"))
    alive(store, "other", worker="w2")
    park(store)
    assert store.state(job_id) == "waiting"


def test_j19_without_a_worker_for_the_queue_no_job_is_parked(store: Store) -> None:
    """There is nobody to spare, and one that comes without registering finds its jobs."""
    (job_id,) = store.enqueue()
    park(store)
    alive(store, "work", queues=("mail",))
    park(store)
    assert store.state(job_id) == "ready"


def test_j19_a_queue_is_parked_apart_from_others(store: Store) -> None:
    (here,) = store.enqueue()
    (there,) = store.enqueue(queue="mail")
    alive(store, "other", queues=("default", "mail"))
    park(store)
    assert (store.state(here), store.state(there)) == ("waiting", "ready")


def test_j19_due_scheduled_jobs_are_parked_and_future_ones_are_not(store: Store) -> None:
    (due,) = store.enqueue(delay_ms=5)
    (later,) = store.enqueue(delay_ms=6)
    alive(store, "other")
    store.now += 5
    park(store)
    assert (store.state(due), store.state(later)) == ("waiting", "scheduled")


def test_j19_running_jobs_are_never_parked(store: Store) -> None:
    (job_id,) = store.enqueue()
    store.claim()
    alive(store, "other")
    park(store)
    assert store.state(job_id) == "running"


def test_j19_parking_reads_only_the_head_in_claim_order(calm: Store) -> None:
    store = calm
    store.enqueue(2, task="known")
    last, first = store.enqueue(priority=-1)[0], store.enqueue(priority=1)[0]
    alive(store, "known")
    assert park(store, limit=3) == 1
    assert parked(store) == {first}
    assert park(store, limit=2) == 0
    assert park(store, limit=3) == 1
    assert parked(store) == {first, last}


def test_j19_many_unknown_jobs_at_the_head_are_out_of_the_way_of_claims(calm: Store) -> None:
    store = calm
    store.enqueue(250, priority=9)
    store.enqueue(50, priority=9, delay_ms=1)
    store.now += 1
    known = store.enqueue(3, task="known")
    alive(store, "known")
    chunks = []
    while taken := park(store, limit=100):
        chunks.append(taken)
    assert chunks == [150, 100, 50]
    assert store.query("select task, count(*) from duly_job where state = 'ready' group by task") == [("known", 3)]
    assert [job.id for job in store.claim(10, tasks=["known"])] == known


def test_j19_a_parked_job_is_not_claimed(store: Store) -> None:
    store.enqueue()
    alive(store, "other")
    park(store)
    assert store.claim() == []


def test_j19_a_suspect_of_an_unknown_task_is_parked_and_woken_as_a_suspect(store: Store) -> None:
    (job_id,) = store.enqueue()
    store.claim()
    store.now += 30_000
    store.run(ops.rescue(store.run(ops.expired_leases(now=store.now)), now=store.now))
    alive(store, "other")
    park(store)
    assert store.state(job_id) == "waiting"
    wake(store)
    assert store.claim() == []
    assert [job.id for job in store.claim(alone=True)] == [job_id]


def test_j19_parking_skips_rows_of_other_sessions_and_keeps_no_lock(impatient: PostgresStore) -> None:
    jobs = impatient.enqueue(2)
    (known,) = impatient.enqueue(task="known")
    alive(impatient, "known")
    with psycopg.connect(impatient.url) as other:
        other.execute("select 1 from duly.duly_job where id = any (%s::uuid[]) for update", [[jobs[0], known]])
        assert park(impatient) == 1
    assert parked(impatient) == {jobs[1]}
    assert park(impatient) == 1


@pytest.mark.parametrize("change", ["claimed", "put off"])
def test_j19_a_job_changed_while_being_parked_is_judged_by_its_new_state(impatient: PostgresStore, change: str) -> None:
    """The head is read in one step and locked in a later one; the table of workers is made to wait in between."""
    (job_id,) = impatient.enqueue()
    alive(impatient, "other")
    url, now, answers = impatient.url, impatient.now, []
    with psycopg.connect(url, autocommit=True) as other:
        for statement in SLOW_WORKERS:
            other.execute(statement)
        parking = threading.Thread(target=lambda: answers.append(park(impatient)))
        parking.start()
        waits = "select count(*) from pg_locks where locktype = 'advisory' and not granted"
        while other.execute(waits).fetchone() == (0,):
            assert parking.is_alive()
        third = PostgresStore(url)
        (job,) = third.run(ops.claim("default", limit=1, token=7, worker="w3", now=now))
        if change == "put off":
            third.run(snooze(job, 5, now=now))
        other.execute(f"select pg_advisory_unlock({GATE})")
        parking.join()
        assert answers == [0]
        assert third.state(job_id) == ("running" if change == "claimed" else "scheduled")
        third.close()


GATE = 2**60
SLOW_WORKERS = (
    "alter table duly.duly_worker rename to duly_worker_table",
    f"""create function duly.wait() returns text language plpgsql as
        $$ begin perform pg_advisory_xact_lock_shared({GATE}); return ''; end $$""",
    """create view duly.duly_worker as
       select id, queues, tasks || duly.wait() as tasks, beat_ms, seen_at from duly.duly_worker_table""",
    f"select pg_advisory_lock({GATE})",
)


# What wakes it


def test_j19_a_worker_that_knows_the_task_wakes_its_jobs(calm: Store) -> None:
    store = calm
    (job_id,) = store.enqueue()
    alive(store, "other")
    park(store)
    alive(store, "work")
    assert wake(store) == 1
    job = store.get(job_id)
    assert job is not None
    assert (job.state, job.reason, job.due_at, job.attempt) == (State.READY, None, job.created_at, 0)
    assert parked(store) == set()
    assert wake(store) == 0
    assert park(store) == 0


def test_j19_waking_leaves_other_tasks_other_queues_and_other_waits_alone(store: Store) -> None:
    (other_queue,) = store.enqueue(queue="mail")
    (other_task,) = store.enqueue(task="rare")
    (waits,) = store.enqueue(queue="events")
    (job,) = store.claim(queue="events")
    store.finish(job, Change(State.WAITING, reason="event", give_back_attempt=True))
    for queue in ("default", "mail", "events"):
        alive(store, "other", queues=(queue,))
        park(store, queue=queue)
    wake(store, "default", "events")
    assert [store.state(job_id) for job_id in (other_queue, other_task, waits)] == ["waiting"] * 3
    assert parked(store) == {other_queue, other_task}
    wake(store, "default", "mail", rare=1, work=1)
    assert [store.state(job_id) for job_id in (other_queue, other_task, waits)] == ["ready", "ready", "waiting"]


def test_j19_waking_is_bounded_over_all_tasks_and_queues(calm: Store) -> None:
    store = calm
    for task, queue in (("a", "default"), ("a", "mail"), ("b", "default")):
        store.enqueue(2, task=task, queue=queue)
        alive(store, "other", queues=("default", "mail"))
        park(store, queue=queue)
    assert [wake(store, "default", "mail", limit=4, a=1, b=1) for _ in range(3)] == [4, 2, 0]


def test_j19_woken_jobs_keep_their_order(store: Store) -> None:
    made = []
    for priority, delay_ms in ((0, 0), (5, 3), (5, 1), (0, 2), (-1, 0), (5, 1)):
        made += [(-priority, delay_ms, job_id) for job_id in store.enqueue(priority=priority, delay_ms=delay_ms)]
    alive(store, "other")
    store.now += 3
    store.run(ops.promote("default", now=store.now))
    park(store)
    store.now += 50
    (newer,) = store.enqueue(priority=5)
    wake(store)
    expected = [job_id for *_, job_id in sorted(made)]
    assert [job.id for job in store.claim(10)] == [*expected[:3], newer, *expected[3:]]


def test_j19_a_parked_job_does_not_time_out(store: Store) -> None:
    (job_id,) = store.enqueue()
    alive(store, "other")
    park(store)
    store.now += 1_000_000
    store.run(ops.promote("default", now=store.now))
    assert store.state(job_id) == "waiting"


def test_j19_a_parked_job_that_was_to_start_in_time_expires(store: Store) -> None:
    (job_id,) = store.enqueue(expires_ms=100)
    alive(store, "other")
    park(store)
    store.now += 100
    assert store.run(ops.expirable(now=store.now)) == [job_id]
    store.run(ops.expire([job_id], now=store.now))
    job = store.get(job_id)
    assert job is not None
    assert (job.state, job.reason) == (State.CANCELLED, "expired")


def test_j19_a_parked_job_is_cancelled_at_once(store: Store) -> None:
    (job_id,) = store.enqueue()
    alive(store, "other")
    park(store)
    assert store.run(ops.cancel([job_id], by="ann", why="enough", now=store.now)) == {job_id: "cancelled"}
    assert store.state(job_id) == "cancelled"
    wake(store)
    assert store.query("select count(*) from duly_job") == [(0,)]


def test_j19_a_worker_that_registers_while_another_parks_gets_the_jobs_at_its_next_beat(calm: Store) -> None:
    store = calm
    (job_id,) = store.enqueue()
    alive(store, "other")
    assert wake(store) == 0  # the newcomer's first look, before the other's parking is written
    park(store)
    alive(store, "work", worker="w2")
    assert wake(store) == 1
    park(store)
    assert store.state(job_id) == "ready"


def test_j19_waking_skips_rows_of_other_sessions(impatient: PostgresStore) -> None:
    jobs = impatient.enqueue(2)
    alive(impatient, "other")
    park(impatient)
    with psycopg.connect(impatient.url) as other:
        other.execute("select 1 from duly.duly_job where id = %s for update", [jobs[0]])
        assert wake(impatient) == 1
    assert parked(impatient) == {jobs[0]}


# Schema versions


def test_j19_a_newer_schema_version_is_woken_by_a_worker_that_knows_it_only(calm: Store) -> None:
    store = calm
    newer = enqueue_version(store, 2)
    (plain,) = store.enqueue()
    alive(store, "other")
    park(store)
    assert wake(store, work=1) == 1
    assert (store.state(newer), store.state(plain)) == ("waiting", "ready")
    assert wake(store, work=3) == 1
    assert store.state(newer) == "ready"


def test_j19_a_worker_releases_jobs_of_a_newer_version_without_loss(store: Store) -> None:
    newer = enqueue_version(store, 2, priority=3, expires_ms=100)
    store.now += 7
    later = enqueue_version(store, 2, priority=3)
    (first,) = store.claim()
    give_back(store, first)
    job = store.get(newer)
    assert job is not None
    assert (job.state, job.reason, job.attempt) == (State.WAITING, "parked: needs more", 0)
    assert (job.due_at, job.expires_at) == (first.due_at, first.created_at + 100)  # it has not started
    store.now += 50
    store.run(ops.promote("default", now=store.now))
    wake(store, work=1)
    assert store.state(newer) == "waiting"
    wake(store, work=2)
    assert [again.id for again in store.claim(2)] == [newer, later]


def test_j19_a_suspect_that_is_given_back_stays_one(store: Store) -> None:
    job_id = enqueue_version(store, 2)
    store.claim()
    store.now += 30_000
    store.run(ops.rescue(store.run(ops.expired_leases(now=store.now)), now=store.now))
    give_back(store, *store.claim(alone=True))
    wake(store, work=2)
    assert store.claim() == []
    assert [job.id for job in store.claim(alone=True)] == [job_id]


def test_j19_a_waiting_job_of_any_version_is_not_parked(store: Store) -> None:
    job_id = enqueue_version(store, 2)
    (job,) = store.claim()
    store.finish(job, Change(State.WAITING, reason="event", give_back_attempt=True))
    assert parked(store) == set()
    wake(store, work=2)
    assert store.state(job_id) == "waiting"


def test_j19_a_job_with_a_cancel_request_is_cancelled_instead_of_parked(store: Store) -> None:
    job_id = enqueue_version(store, 2)
    (job,) = store.claim()
    store.run(ops.cancel([job_id], now=store.now))
    give_back(store, job)
    assert store.state(job_id) == "cancelled"
    assert store.query("select count(*) from duly_job") == [(0,)]


@pytest.mark.parametrize("state", ["ready", "scheduled", "running"])
def test_j26_only_waiting_jobs_can_be_parked(store: Store, state: str) -> None:
    store.enqueue(delay_ms=5 if state == "scheduled" else 0)
    if state == "running":
        store.claim()
    with pytest.raises(Exception, match="what_is_parked_waits"):
        store.query("update duly_job set parked_version = 1")
