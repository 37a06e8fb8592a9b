"""Figures: how full queues are, what is parked, what could be pruned, what workers do; and ids that people shorten."""

from __future__ import annotations

from typing import Any

import pytest

from duly.model import DAY_MS, MANY, PARKED, Change, ParkedFigure, QueueFigure, State
from duly.store import ops
from tests.contract.stores import NOW, D1Store, Store, new_id, new_token


def queues(store: Store) -> dict[str, QueueFigure]:
    found = store.run(ops.queues(now=store.now))
    assert [figure.name for figure in found] == sorted(figure.name for figure in found)
    return {figure.name: figure for figure in found}


def figure(store: Store, name: str = "default") -> QueueFigure:
    return queues(store)[name]


def alive(store: Store, worker: str = "w1", queues: tuple[str, ...] = ("default",), **more: Any) -> None:
    known = {"host": "h", "pid": 1, "queues": queues, "tasks": ["work"], "beat_ms": 10_000, "now": store.now}
    store.run(ops.register(worker, **{**known, **more}))


def fill(store: Store, count: int, **columns: Any) -> None:
    """Put many jobs into the table at once."""
    said = {
        "task": "work", "queue": "default", "priority": 0, "state": "ready", "max_attempts": 5, "created_at": NOW,
        "due_at": NOW, "lease_ms": 1, "keep_ms": 1, "result_ttl_ms": 1, "payload": "{}", **columns,
    }  # fmt: skip
    names, values = ", ".join(said), ", ".join("null" if v is None else repr(v) for v in said.values())
    if store.kind == "postgres":
        source = f"select gen_random_uuid(), {values} from generate_series(1, {count})"
    else:
        numbers = f"with recursive n (n) as (select 1 union all select n + 1 from n where n < {count})"
        source = f"{numbers} select lower(hex(randomblob(16))), {values} from n"
    store.query(f"insert into duly_job (id, {names}) {source}")


# Queues


def test_each_queue_is_counted_by_state(store: Store) -> None:
    store.enqueue(6)
    waiting, parked, *_ = store.claim(3)
    store.finish(waiting, Change(State.WAITING, reason="event", give_back_attempt=True))
    store.finish(parked, Change(State.WAITING, reason=f"{PARKED}so", give_back_attempt=True))
    store.enqueue(4, delay_ms=500)
    store.enqueue(2, queue="mail")
    assert queues(store) == {
        "default": QueueFigure("default", ready=3, scheduled=4, running=1, waiting=2, oldest_ms=0),
        "mail": QueueFigure("mail", ready=2, scheduled=0, running=0, waiting=0, oldest_ms=0),
    }


@pytest.mark.parametrize("state", ["ready", "scheduled", "running", "waiting", "parked"])
def test_a_queue_is_found_by_jobs_of_any_state_alone(store: Store, state: str) -> None:
    names = [f"{letter} {state}" for letter in "cab"]
    for name in names:
        store.enqueue(queue=name, delay_ms=5 if state == "scheduled" else 0)
        if state in ("running", "waiting", "parked"):
            (job,) = store.claim(queue=name)
            reason = f"{PARKED}so" if state == "parked" else "event"
            if state != "running":
                store.finish(job, Change(State.WAITING, reason=reason, give_back_attempt=True))
    found = queues(store)
    assert sorted(found) == sorted(names)
    for one in found.values():
        assert (one.ready, one.scheduled, one.running, one.waiting) == tuple(
            int(state in kind) for kind in (["ready"], ["scheduled"], ["running"], ["waiting", "parked"])
        )


def test_a_queue_with_nothing_but_a_pause_or_a_living_worker_is_shown(store: Store) -> None:
    store.run(ops.pause("queue", "paused", by="ann", why="x", now=store.now))
    store.run(ops.pause("queue", "paused for a time", by="ann", why="x", until_ms=10, now=store.now))
    store.run(ops.pause("task", "a task", by="ann", why="x", now=store.now))
    alive(store, "w1", ("served", "default"), beat_ms=100)
    alive(store, "w2", ("default",), beat_ms=100)
    assert sorted(queues(store)) == ["default", "paused", "paused for a time", "served"]
    assert figure(store) == QueueFigure("default", 0, 0, 0, 0, None)
    store.now += 10
    assert sorted(queues(store)) == ["default", "paused", "served"]
    store.now += 290
    assert sorted(queues(store)) == ["paused"]


def test_finished_jobs_make_no_queue(store: Store) -> None:
    store.dead(2)
    assert queues(store) == {}


def test_counting_stops_above_ten_thousand(store: Store) -> None:
    if isinstance(store, D1Store):
        store.lose(None)
    fill(store, MANY + 5)
    fill(store, MANY + 7, state="scheduled", due_at=NOW + 9)
    fill(store, MANY - 1, state="waiting", due_at=None)
    fill(store, 7, state="waiting", due_at=None, parked_version=1)
    fill(store, 2, queue="other", state="waiting", due_at=None)
    assert figure(store) == QueueFigure("default", MANY + 1, MANY + 1, 0, MANY + 1, 0)
    assert figure(store, "other").waiting == 2


def test_the_oldest_due_job_is_found_for_any_priority_and_history(store: Store) -> None:
    for number, (priority, age) in enumerate(((5, 10), (-5, 20), (0, 30), (9, 1))):
        fill(store, 1, priority=priority, due_at=NOW - age, task=f"t{number}")
    assert figure(store).oldest_ms == 30
    fill(store, 1, priority=7, due_at=NOW - 40, suspect=1 if store.kind != "postgres" else True)
    assert figure(store).oldest_ms == 40
    store.now += 100
    assert figure(store).oldest_ms == 140


def test_a_scheduled_job_has_an_age_once_due_and_running_or_waiting_ones_have_none(store: Store) -> None:
    store.enqueue(delay_ms=50)
    assert figure(store).oldest_ms is None
    store.now += 50
    assert figure(store).oldest_ms == 0
    store.now += 5
    assert figure(store).oldest_ms == 5
    store.claim()
    assert figure(store).oldest_ms is None
    fill(store, 1, state="waiting", due_at=NOW - 9)
    assert figure(store).oldest_ms is None


def test_an_age_is_never_below_zero(store: Store) -> None:
    """A clock that was set back makes ready jobs due in the future."""
    fill(store, 1, due_at=NOW + 50)
    assert figure(store).oldest_ms == 0


def test_many_queues_are_all_found(store: Store) -> None:
    if isinstance(store, D1Store):
        store.lose(None)
    for number in range(300):
        store.enqueue(queue=f"q{number}", delay_ms=number % 2)
    found = queues(store)
    assert len(found) == 300
    assert {one.ready + one.scheduled for one in found.values()} == {1}


# What is parked


def test_parked_jobs_are_counted_by_task_and_queue(store: Store) -> None:
    for task, queue, count in (("a", "default", 3), ("b", "default", 1), ("a", "mail", 2), ("B", "mail", 1)):
        fill(store, count, task=task, queue=queue, state="waiting", parked_version=1)
    fill(store, 1, task="a", parked_version=3, state="waiting")
    fill(store, 4, task="c", state="waiting")
    store.enqueue(task="d")
    assert store.run(ops.parked()) == [
        ParkedFigure("B", "mail", 1),
        ParkedFigure("a", "default", 4),
        ParkedFigure("a", "mail", 2),
        ParkedFigure("b", "default", 1),
    ]


def test_the_count_of_parked_jobs_stops_above_ten_thousand(store: Store) -> None:
    fill(store, MANY + 9, state="waiting", parked_version=1)
    assert store.run(ops.parked()) == [ParkedFigure("work", "default", MANY + 1)]


# What could be pruned


def test_the_prunable_count_matches_prune(store: Store) -> None:
    if isinstance(store, D1Store):
        store.lose(None)
    store.enqueue(2, task="short", keep_ms=DAY_MS)
    store.enqueue(3, task="long", keep_ms=400 * DAY_MS)
    for job in store.claim(5):
        store.succeed(job, "1")
    store.enqueue_key("k", keep_ms=400 * DAY_MS)
    store.succeed(store.claim()[0])
    store.dead(2)
    alive(store)
    store.query("insert into duly_fire (schedule, due_at, outcome, at) values ('s', 1, 'fired', ?)", NOW)
    store.query("insert into duly_lane (name, task, used_at) values ('t:k', 't', ?)", NOW)
    for number in range(2):
        store.query(
            "insert into duly_batch (id, name, created_at, completed_at) values (?, 'b', 1, ?)",
            *(new_id(), NOW + number * 50 * DAY_MS),
        )
    seen: set[str] = set()
    for later in (0, DAY_MS, 8 * DAY_MS, 40 * DAY_MS, 60 * DAY_MS):
        now = NOW + later
        counted = store.run(ops.prunable(now=now))
        assert list(counted) == list(ops.PRUNABLE)
        # Each takes it, so that the next time less is left.
        assert counted == {what: store.run(ops.prune(what, now=now)) for what in ops.PRUNABLE}, later // DAY_MS
        seen |= {what for what, count in counted.items() if count}
    assert seen == set(ops.PRUNABLE)


def test_counting_prunable_rows_changes_nothing(store: Store) -> None:
    store.enqueue(3, keep_ms=DAY_MS)
    for job in store.claim(3):
        store.succeed(job, "1")
    before = store.snapshot()
    assert store.run(ops.prunable(now=NOW + 9 * DAY_MS))["done"] == 3
    assert store.run(ops.prunable(now=NOW + DAY_MS - 1)) == dict.fromkeys(ops.PRUNABLE, 0)
    assert store.snapshot() == before


def test_a_row_with_its_own_keep_is_counted_by_it(store: Store) -> None:
    store.dead(2)
    assert store.run(ops.prunable(now=NOW + DAY_MS))["events"] == 0
    assert store.run(ops.prunable(keep_ms=DAY_MS, now=NOW + DAY_MS))["events"] == 2


def test_counting_prunable_rows_stops_above_ten_thousand(store: Store) -> None:
    numbers = f"with recursive n (n) as (select 1 union all select n + 1 from n where n < {MANY + 50})"
    store.query(f"insert into duly_event (at, name) {numbers} select n, 'x' from n")
    assert store.run(ops.prunable(now=NOW))["events"] == MANY + 1


# Workers


def test_workers_have_their_slots_and_counts_of_attempts(store: Store) -> None:
    alive(store, slots=4)
    alive(store, "idle", slots=2)
    alive(store, slots=5, succeeded=70, failed=3)
    store.enqueue(4, lease_ms=1000)
    for worker in ("w1", "w1", f"w1{ops.CHILD}", "gone"):
        store.run(ops.claim("default", limit=1, token=new_token(), worker=worker, now=store.now))
    said = {worker.id: worker for worker in store.run(ops.workers(now=store.now))}
    w1, idle = said["w1"], said["idle"]
    assert (w1.slots, w1.running, w1.succeeded, w1.failed) == (5, 3, 70, 3)
    assert (idle.slots, idle.running, idle.succeeded, idle.failed) == (2, 0, 0, 0)
    assert set(said) == {"w1", "idle"}


# Ids that people shorten


def prefixed(store: Store, prefix: str, **more: Any) -> list[str]:
    return [job.id for job in store.run(ops.listing(prefix=prefix, now=store.now, **more))]


def test_a_job_is_found_by_the_beginning_of_its_id_live_or_finished(store: Store) -> None:
    one, two = "aaaaaaaa-aaaa-7aaa-8aaa-aaaaaaaaaaaa", "aaaaaaaa-aabb-7aaa-8aaa-aaaaaaaaaaaa"
    for job_id in (one, two, "bbbbbbbb-aaaa-7aaa-8aaa-aaaaaaaaaaaa"):
        store.enqueue_key(job_id, id=job_id)
    store.run(ops.cancel([two], now=store.now))
    assert prefixed(store, "aaaa") == [two, one]
    assert prefixed(store, "aaaaaaaa-aa") == [two, one]
    assert prefixed(store, "aaaaaaaaaab") == [two]
    assert prefixed(store, " AAAAAAAA-AAAA-7") == [one]
    assert prefixed(store, one) == [one]
    assert prefixed(store, one.replace("-", "")) == [one]
    assert prefixed(store, "aaaa", state=State.CANCELLED) == [two]
    assert prefixed(store, "aaaa", before=two) == [one]
    assert prefixed(store, "aaaa", before=one) == []
    assert prefixed(store, "aaaaaaaa-aaaa", before=two) == [one]
    assert prefixed(store, "aaaaaaaa-aaaa", before="bbbbbbbb-aaaa-7aaa-8aaa-aaaaaaaaaaaa") == [one]
    assert len(prefixed(store, "")) == 3


@pytest.mark.parametrize("prefix", ["c", "xyz", "%", "aaaa%", "a" * 33, "0x1", "\u0661"])
def test_a_prefix_of_no_id_finds_nothing(store: Store, prefix: str) -> None:
    for job_id in ("aaaaaaaa-aaaa-7aaa-8aaa-aaaaaaaaaaaa", "00000000-aaaa-7aaa-8aaa-aaaaaaaaaaaa"):
        store.enqueue_key(job_id, id=job_id)
    assert prefixed(store, prefix) == []
