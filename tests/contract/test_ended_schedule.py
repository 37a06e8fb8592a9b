"""What the end of a run does to its schedule, whichever way it ends. Lines S03, S06 and S07."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from duly.model import QUEUED, Change, Claimed, Failure, Overlap, State
from duly.rules.firing import Firing
from duly.store import ops, schedules
from duly.store.op import Finish
from tests.contract.stores import JOB_TERMS, NOW, PostgresStore, Store, new_token, run_of

TEN_MINUTES = 600_000
ENDS = [State.SUCCEEDED, State.PARTIAL, State.DEAD, State.CANCELLED]
MODES = ["rate", "delay", "cron", "rrule"]


def schedule(store: Store, mode: str = "rate", *, dead_runs: int = 0, **more: Any) -> str:
    """A schedule that has lost runs before."""
    name = store.schedule("s", mode, **more)
    store.query("update duly_schedule set dead_runs = ?", dead_runs)
    return name


def row(store: Store, *columns: str, name: str = "s") -> tuple[Any, ...]:
    [found] = store.query(f"select {', '.join(columns)} from duly_schedule where name = ?", name)
    return found


def live(store: Store) -> list[tuple[Any, ...]]:
    """The runs that have not ended."""
    return store.query("select id, state, due_at, reason from duly_job order by id")


def end_all(store: Store, ends: list[State], jobs: list[Claimed]) -> None:
    """End several runs in one operation."""
    changes = [Change(end, error=Failure("E", "no") if end is State.DEAD else None) for end in ends]
    store.run(ops.finish([Finish(*pair) for pair in zip(jobs, changes, strict=True)], now=store.now))


# The ways in which a run that is there may end


def ended_by_finish(store: Store, job_id: str) -> State:
    [job] = store.claim(1)
    assert job.id == job_id
    store.now += 1234
    store.kill(job)
    return State.DEAD


def ended_by_cancel(store: Store, job_id: str) -> State:
    store.now += 1234
    assert store.run(ops.cancel([job_id], by="ann", why="no", now=store.now)) == {job_id: State.CANCELLED}
    return State.CANCELLED


def ended_by_expiry(store: Store, job_id: str) -> State:
    store.now = NOW + 1000  # those behind it have a moment left
    store.run(ops.expire([job_id], now=store.now))
    return State.CANCELLED


def ended_by_rescue(store: Store, job_id: str) -> State:
    """Its only attempt died with its worker."""
    store.claim(1)
    store.now += 60_000
    assert store.run(ops.rescue(store.run(ops.expired_leases(now=store.now)), now=store.now))
    return State.DEAD


WAYS = [ended_by_finish, ended_by_cancel, ended_by_expiry, ended_by_rescue]
EXPIRES = JOB_TERMS.replace('"expires_ms": null', '"expires_ms": 1000')
Way = Callable[[Store, str], State]


def terms_for(way: Way) -> dict[str, Any]:
    return {"terms": EXPIRES} if way is ended_by_expiry else {}


# S03


@pytest.mark.parametrize("end", ENDS)
def test_s03_the_end_of_a_run_sets_the_next_time_in_delay_mode(store: Store, end: State) -> None:
    schedule(store, "delay", dead_runs=2)
    store.fire()
    assert row(store, "next_at") == (None,)  # a firing awaits the end of its run
    [job] = store.claim(1)
    store.now += 1234
    store.finish(job, Change(end))
    dead_runs = {State.DEAD: 3, State.CANCELLED: 2}.get(end, 0)
    assert row(store, "next_at", "dead_runs") == (store.now + TEN_MINUTES, dead_runs)


@pytest.mark.parametrize("way", WAYS)
def test_s03_the_next_time_is_set_by_every_operation_that_ends_the_run(store: Store, way: Way) -> None:
    schedule(store, "delay", **terms_for(way))
    job_id = store.fire()
    end = way(store, job_id)
    assert store.state(job_id) == end
    assert row(store, "next_at", "dead_runs") == (store.now + TEN_MINUTES, int(end is State.DEAD))


@pytest.mark.parametrize("end", ENDS)
def test_s03_an_existing_next_time_is_kept(store: Store, end: State) -> None:
    """As after a run that a person has triggered, or after one of two that the schedule awaited."""
    schedule(store, "delay")
    store.fire(next_at=NOW + 42)
    [job] = store.claim(1)
    store.now += 1234
    store.finish(job, Change(end))
    assert row(store, "next_at") == (NOW + 42,)


@pytest.mark.parametrize("mode", ["rate", "cron", "rrule"])
def test_s03_only_delay_counts_from_the_end_of_a_run(store: Store, mode: str) -> None:
    schedule(store, mode)
    store.fire(next_at=None)  # the last of a rule that has an end
    store.succeed(store.claim(1)[0])
    assert row(store, "next_at") == (None,)


def test_s03_of_runs_that_end_together_the_last_end_counts(store: Store) -> None:
    schedule(store, "delay")
    store.fire(next_at=NOW)
    store.now += 1
    store.fire()
    jobs = store.claim(2)
    store.now += 1234
    end_all(store, [State.SUCCEEDED, State.DEAD], jobs)
    assert row(store, "next_at", "dead_runs") == (store.now + TEN_MINUTES, 0)


def test_s03_a_retry_is_no_end_of_a_run(store: Store) -> None:
    schedule(store, "delay", dead_runs=2, terms=JOB_TERMS.replace('"max_attempts": 1', '"max_attempts": 3'))
    store.fire()
    before = row(store, "next_at", "dead_runs", "revision")
    store.retry(store.claim(1)[0])
    assert row(store, "next_at", "dead_runs", "revision") == before
    assert before[:2] == (None, 2)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    ("mode", "overlap", "matters"),
    [
        ("delay", Overlap.ALLOW, True),
        *((mode, Overlap.SKIP, True) for mode in MODES),
        ("rate", Overlap.QUEUE, True),
        ("cron", Overlap.CANCEL_RUNNING, True),
        *((mode, Overlap.ALLOW, False) for mode in MODES if mode != "delay"),
    ],
)
def test_s03_a_decision_made_before_a_relevant_end_is_not_written_after_it(
    store: Store, mode: str, overlap: Overlap, matters: bool, end: State
) -> None:
    """Whoever counted its run as one that has not ended looks again; where that is all one, nobody is disturbed."""
    schedule(store, mode, overlap=overlap)
    store.fire(next_at=NOW + 1)
    [job] = store.claim(1)
    [read] = store.run(schedules.one("s", now=store.now))
    store.finish(job, Change(end))
    assert row(store, "revision") == (read.revision + matters,)
    decided = Firing("s", read.revision, None, runs=(run_of(read, NOW + 1),))
    assert store.run(schedules.fire([decided], now=store.now)) == ([] if matters else ["s"])
    assert len(live(store)) == (0 if matters else 1)
    assert store.query("select count(*) from duly_fire") == [(1 if matters else 2,)]


def test_s03_the_end_of_a_job_without_a_schedule_changes_no_schedule(store: Store) -> None:
    schedule(store, dead_runs=2)
    before = store.query("select * from duly_schedule")
    store.enqueue()
    store.kill(store.claim(1)[0])
    assert store.query("select * from duly_schedule") == before


def test_s03_the_end_of_a_run_of_a_deleted_schedule_is_recorded(store: Store) -> None:
    schedule(store, "delay", pause_after=1)
    job_id = store.fire()
    [job] = store.claim(1)
    store.run(schedules.delete("s", by="me", why="old", now=store.now))
    store.kill(job)
    assert store.state(job_id) == "dead"
    assert store.query("select count(*) from duly_schedule") == [(0,)]


# S06


def queued(store: Store, count: int, **more: Any) -> tuple[str, list[str]]:
    """A run, and others behind it."""
    schedule(store, overlap=Overlap.QUEUE, **more)
    first = store.fire(next_at=NOW)
    behind = []
    for _ in range(count):
        store.now += 1
        behind.append(store.fire(next_at=NOW, reason=QUEUED))
    return first, behind


@pytest.mark.parametrize("way", WAYS)
def test_s06_the_end_of_a_run_starts_the_next_queued_one(store: Store, way: Way) -> None:
    first, [second, third] = queued(store, 2, **terms_for(way))
    assert [(job_id, state, reason) for job_id, state, _, reason in live(store)] == [
        (first, "ready", None), (second, "waiting", QUEUED), (third, "waiting", QUEUED),
    ]  # fmt: skip
    way(store, first)
    assert live(store) == [(second, "ready", store.now, None), (third, "waiting", None, QUEUED)]
    assert [job.id for job in store.claim(9)] == [second]


def test_s06_runs_begin_in_the_order_in_which_they_were_queued(store: Store) -> None:
    first, behind = queued(store, 3)
    ran = []
    while jobs := store.claim(9):
        [job] = jobs
        ran.append(job.id)
        store.succeed(job)
    assert ran == [first, *behind]


def test_s06_a_retry_starts_no_queued_run(store: Store) -> None:
    first, [second] = queued(store, 1, terms=JOB_TERMS.replace('"max_attempts": 1', '"max_attempts": 2'))
    store.retry(store.claim(1)[0])
    assert store.claim(9) == []
    store.now += 1000
    [again] = store.claim(9)
    assert again.id == first
    store.succeed(again)
    assert [job.id for job in store.claim(9)] == [second]


@pytest.mark.parametrize("reason", ["event", None])
def test_s06_a_run_that_waits_for_something_else_has_not_ended(store: Store, reason: str | None) -> None:
    """Nor does it begin because another one has ended: it was not queued."""
    schedule(store, overlap=Overlap.QUEUE)
    waiting = store.fire(next_at=NOW)
    store.finish(store.claim(1)[0], Change(State.WAITING, reason=reason, give_back_attempt=True))
    store.now += 1
    store.fire(next_at=NOW)
    store.now += 1
    behind = store.fire(next_at=NOW, reason=QUEUED)
    store.succeed(store.claim(1)[0])
    assert store.claim(9) == []
    store.run(ops.cancel([waiting], by="ann", why="no", now=store.now))
    assert [job.id for job in store.claim(9)] == [behind]


def test_s06_no_queued_run_starts_while_one_run_is_left(store: Store) -> None:
    schedule(store, overlap=Overlap.QUEUE)
    for _ in range(2):
        store.fire(next_at=NOW)
        store.now += 1
    behind = store.fire(next_at=NOW, reason=QUEUED)
    one, other = store.claim(2)
    store.succeed(one)
    assert store.claim(9) == []
    store.kill(other)
    assert [job.id for job in store.claim(9)] == [behind]


def test_s06_when_all_runs_end_together_one_begins(store: Store) -> None:
    schedule(store, overlap=Overlap.QUEUE)
    for _ in range(2):
        store.fire(next_at=NOW)
        store.now += 1
    behind = [store.fire(next_at=NOW, reason=QUEUED)]
    store.now += 1
    behind.append(store.fire(next_at=NOW, reason=QUEUED))
    end_all(store, [State.DEAD, State.SUCCEEDED], store.claim(2))
    assert [job.id for job in store.claim(9)] == behind[:1]


def test_s06_a_cancelled_queued_run_starts_no_other(store: Store) -> None:
    first, [second, third] = queued(store, 2)
    store.run(ops.cancel([second], by="ann", why="no", now=store.now))
    [job] = store.claim(9)
    assert job.id == first
    store.succeed(job)
    assert [job.id for job in store.claim(9)] == [third]


def test_s06_another_schedules_runs_are_left_alone(store: Store) -> None:
    queued(store, 1)
    store.schedule("other", overlap=Overlap.QUEUE)
    theirs = store.fire("other", next_at=NOW, reason=QUEUED)
    [job] = store.claim(1)
    before = row(store, "revision", "dead_runs", name="other")
    store.kill(job)
    assert (theirs, "waiting", None, QUEUED) in live(store)
    assert row(store, "revision", "dead_runs", name="other") == before


def test_s06_a_queued_run_begins_also_when_its_schedule_is_paused_or_deleted(store: Store) -> None:
    """A pause stops the firing; what was fired runs."""
    _, [second, third] = queued(store, 2)
    store.run(schedules.pause("s", by="ann", why="so", now=store.now))
    store.succeed(store.claim(1)[0])
    [job] = store.claim(9)
    assert job.id == second
    store.run(schedules.delete("s", by="ann", why="so", now=store.now))
    store.succeed(job)
    assert [job.id for job in store.claim(9)] == [third]


def test_s06_runs_that_end_together_leave_no_queued_run_waiting(postgres_url: str) -> None:
    """Neither of two transactions sees the other's end unless they take turns."""
    store = PostgresStore(postgres_url)
    schedule(store, overlap=Overlap.QUEUE)
    for turn in range(10):
        for _ in range(2):
            store.now += 1
            store.fire(next_at=NOW)
        store.now += 1
        behind = store.fire(next_at=NOW, reason=QUEUED)
        jobs = store.claim(2)
        begin = threading.Barrier(2)

        def end(job: Claimed, begin: threading.Barrier = begin) -> None:
            begin.wait(10)
            store.run(ops.finish([Finish(job, Change(State.SUCCEEDED))], now=store.now))

        threads = [threading.Thread(target=end, args=[job]) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        [job] = store.claim(9, token=new_token())
        assert job.id == behind, turn
        store.succeed(job)
    store.close()


# S07


@pytest.mark.parametrize("mode", MODES)
def test_s07_dead_runs_are_counted_and_success_starts_again_from_zero(store: Store, mode: str) -> None:
    schedule(store, mode)
    for expected in (1, 2, 0, 1):
        store.now += 1
        store.fire(next_at=NOW + 42)
        [job] = store.claim(1)
        store.kill(job) if expected else store.succeed(job)
        assert row(store, "next_at", "dead_runs", "paused_at") == (NOW + 42, expected, None)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([State.DEAD, State.DEAD], 4),
        ([State.DEAD, State.SUCCEEDED], 0),
        ([State.PARTIAL, State.DEAD], 0),
        ([State.CANCELLED, State.DEAD], 3),
        ([State.CANCELLED, State.CANCELLED], 2),
        ([State.CANCELLED, State.SUCCEEDED], 0),
    ],
)
def test_s07_runs_that_end_together_are_counted_together(store: Store, ends: list[State], expected: int) -> None:
    """Any good end says that the schedule works; a cancelled run says nothing of it."""
    schedule(store, dead_runs=2)
    for _ in ends:
        store.now += 1
        store.fire(next_at=NOW)
    end_all(store, ends, store.claim(2))
    assert row(store, "dead_runs") == (expected,)


@pytest.mark.parametrize("way", [ended_by_finish, ended_by_rescue])
def test_s07_too_many_dead_runs_in_a_row_pause_the_schedule(store: Store, way: Way) -> None:
    schedule(store, dead_runs=1, pause_after=3)
    for dead_runs in (2, 3):
        assert row(store, "paused_at") == (None,)
        store.now += 1
        way(store, store.fire(next_at=NOW + 42))
        assert row(store, "dead_runs") == (dead_runs,)
    paused = ("duly", "3 dead runs in a row", store.now)
    assert row(store, "paused_by", "paused_why", "paused_at") == paused
    [told] = [event for event in store.run(ops.events()) if event.name == "schedule.paused"]
    assert (told.subject, told.by, told.why, told.at) == ("s", "duly", "3 dead runs in a row", store.now)
    assert store.run(schedules.due(limit=9, now=NOW + 100_000)) == []
    assert store.run(schedules.next_fire(now=NOW))[0] is None


def test_s07_runs_that_die_together_pause_it_once(store: Store) -> None:
    schedule(store, dead_runs=1, pause_after=2)
    for _ in range(3):
        store.now += 1
        store.fire(next_at=NOW)
    end_all(store, [State.DEAD] * 3, store.claim(3))
    assert row(store, "dead_runs", "paused_why") == (4, "4 dead runs in a row")
    assert [event.name for event in store.run(ops.events()) if event.subject == "s"] == ["schedule.paused"]


@pytest.mark.parametrize("pause_after", [None, 3])
def test_s07_a_dead_run_never_stops_a_schedule_before_that(store: Store, pause_after: int | None) -> None:
    schedule(store, dead_runs=1, pause_after=pause_after)
    store.fire(next_at=NOW)
    store.kill(store.claim(1)[0])
    assert row(store, "dead_runs", "paused_at") == (2, None)
    assert [due.name for due in store.run(schedules.due(limit=9, now=NOW))] == ["s"]


def test_s07_a_pause_by_a_person_keeps_the_name_and_the_reason(store: Store) -> None:
    schedule(store, pause_after=1)
    store.fire(next_at=NOW)
    [job] = store.claim(1)
    store.run(schedules.pause("s", by="ann", why="a leak", now=NOW))
    store.now += 5
    store.kill(job)
    assert row(store, "dead_runs", "paused_at", "paused_by", "paused_why") == (1, NOW, "ann", "a leak")
    assert [event.by for event in store.run(ops.events()) if event.subject == "s"] == ["ann"]


@pytest.mark.parametrize("end", [State.SUCCEEDED, State.CANCELLED])
def test_s07_no_other_end_pauses(store: Store, end: State) -> None:
    """Not even a cancelled run after dead ones that the schedule was resumed after."""
    schedule(store, dead_runs=0, pause_after=1)
    store.fire(next_at=NOW)
    store.finish(store.claim(1)[0], Change(end))
    assert row(store, "dead_runs", "paused_at") == (0, None)
