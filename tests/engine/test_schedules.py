"""Every occurrence of a schedule runs once, or its skip is recorded with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from duly import Cancel, Ctx, Duly, Snooze, SyncCtx
from duly.app.context import Missed
from duly.errors import ConfigError, ScheduleExists, ScheduleNotFound
from duly.model import QUEUED, Change, State
from duly.rules import firing
from duly.rules.firing import LATE, MISSED, MOST_RUNS, OVERLAP
from duly.store import ops, schedules
from duly.store.op import Finish
from duly.testing import Clock, drain, frozen
from duly.testing.hooks import GatedDriver
from duly.worker.upkeep.fire import Fire
from tests.contract.stores import D1OnFile
from tests.engine.conftest import found, work, work_until

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
A_FEW_AT_A_TIME = pytest.mark.parametrize("most", [20, pytest.param(MOST_RUNS, marks=pytest.mark.nightly)])


@pytest.fixture
def clock(app: Duly) -> Iterator[Clock]:
    with frozen(app, NOON) as clock:
        yield clock


def ms(at: datetime) -> int:
    return int(at.timestamp() * 1000)


def fires(app: Duly, name: str) -> list[tuple[str, datetime, datetime | None, int, str | None]]:
    """What came of a schedule, oldest first: outcome, from, until, how many, why."""
    return [
        (
            one.outcome,
            datetime.fromtimestamp(one.due_at / 1000, UTC),
            None if one.until_at is None else datetime.fromtimestamp(one.until_at / 1000, UTC),
            one.count,
            one.reason,
        )
        for one in reversed(app.schedules.fires(name, limit=1000))
    ]


def next_at(app: Duly, name: str) -> datetime | None:
    schedule = app.schedules.get(name)
    assert schedule is not None
    return None if schedule.next_at is None else datetime.fromtimestamp(schedule.next_at / 1000, UTC)


def events(app: Duly) -> list[tuple[str, str | None, str | None]]:
    return [(event.name, event.subject, event.why) for event in app.driver.run(ops.events(limit=1000))]


@pytest.fixture
def ran(app: Duly) -> list[datetime]:
    """The due times that the task `note` was run for."""
    dues: list[datetime] = []

    @app.task(max_attempts=1)
    def note(ctx: SyncCtx) -> None:
        dues.append(ctx.due_at)

    return dues


def hourly(app: Duly, **options: Any) -> None:
    app.schedules.create("hourly", app.tasks["note"], "0 * * * *", **options)


# S01, S03, when


@pytest.mark.slow
def test_s01_a_cron_in_its_zone_fires_at_its_local_time(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    app.schedules.create("nine", app.tasks["note"], "0 9 * * mon-fri", tz="Europe/Vienna")
    for _ in range(24 * 7):
        clock.advance("1h")
        drain(app)
    assert [due.astimezone(ZoneInfo("Europe/Vienna")).hour for due in ran] == [9] * 5
    assert [due.day for due in ran] == [17, 18, 19, 20, 23]


def test_s03_a_rate_counts_from_the_previous_due_time_and_never_drifts(
    app: Duly, clock: Clock, ran: list[datetime]
) -> None:
    app.schedules.create("often", app.tasks["note"], "10m")
    for late in (0, 59, 1, 599, 3):
        clock.advance(timedelta(minutes=10) - timedelta(seconds=(clock.now - NOON).seconds % 600))
        clock.advance(timedelta(seconds=late))
        drain(app)
    assert all((due - NOON).seconds % 600 == 0 for due in ran)
    assert len(ran) == len(set(ran)) == 5


def test_s03_a_delay_counts_from_the_end_of_the_run(app: Duly, clock: Clock) -> None:
    ends: list[datetime] = []

    @app.every("10m", mode="delay")
    def slow() -> None:
        clock.advance("7m")
        ends.append(clock.now)

    app.schedules.reconcile()
    clock.advance("10m")
    drain(app)
    assert next_at(app, "slow") == ends[0] + timedelta(minutes=10)
    clock.advance("9m")
    drain(app)
    assert len(ends) == 1
    clock.advance("1m")
    drain(app)
    assert len(ends) == 2


def lose_nothing(app: Duly) -> None:
    """Get every answer from now on, also on D1."""
    if isinstance(app.driver, GatedDriver) and isinstance(app.driver._driver, D1OnFile):
        app.driver._driver.database.lose = None


@pytest.mark.parametrize("end", ["dead", "cancelled", "rescued"])
def test_s03_a_delay_continues_after_any_end_of_a_run(app: Duly, clock: Clock, end: str) -> None:
    runs: list[int] = []

    @app.task(max_attempts=2 if end == "rescued" else 1)
    def slow(ctx: SyncCtx) -> None:
        runs.append(ctx.attempt)
        if end == "dead":
            raise ValueError("no")
        if end == "cancelled":
            raise Cancel("enough")

    app.schedules.create("slow", slow, "10m", mode="delay")
    clock.advance("10m")
    if end == "rescued":
        lose_nothing(app)  # after a lost answer, a rescue sees each lease twice anew
        assert fire(app) == 1
        claim = ops.claim("default", limit=1, token=77, worker="gone", now=clock.ms)
        [job] = app.driver.run(claim)
        assert next_at(app, "slow") is None
        clock.advance("1m")  # its worker is gone, its lease ends
        drain(app)
        assert runs == [2]
        assert found(app, job.id).state is State.SUCCEEDED
    else:
        drain(app)
        assert runs == [1]
    assert next_at(app, "slow") == clock.now + timedelta(minutes=10)


def scheduler(app: Duly) -> Fire:
    """Make what fires beside a worker, without the worker."""
    worker = app.worker()
    return Fire(worker.shared, worker.wakeups)


def fire(app: Duly, most_runs: int = MOST_RUNS) -> int:
    """Fire what is due, without running it."""

    async def one_round() -> int:
        return await scheduler(app).all_due(most_runs=most_runs)

    return asyncio.run(one_round())


# S04, once, or skipped with a reason


def test_s04_any_number_of_schedulers_fire_an_occurrence_once(apps: Callable[..., Duly]) -> None:
    crowd = [apps() for _ in range(4)]
    for app in crowd:

        @app.task
        def note() -> None: ...

    first = crowd[0]
    with frozen(first, NOON) as clock:
        for number in range(20):
            first.schedules.create(f"s{number}", first.tasks["note"], "1m")
        clock.advance("5m")
        now = clock.ms

    async def one(app: Duly) -> int:
        fire = scheduler(app)
        dues = await app.driver.arun(schedules.due(limit=100, now=now))
        await together.wait()
        return await fire._fire(dues)

    together: asyncio.Barrier

    async def race() -> list[int]:
        nonlocal together
        together = asyncio.Barrier(len(crowd))
        return await asyncio.gather(*(one(app) for app in crowd))

    assert sum(asyncio.run(race())) == 20
    for number in range(20):
        outcomes = [(one.outcome, one.count) for one in first.schedules.fires(f"s{number}")]
        assert outcomes == [("fired", 1), ("skipped", 4)]
    assert len(first.list(limit=100)) == 20


def test_s04_a_decision_on_outdated_state_changes_nothing(
    app: Duly, clock: Clock, ran: list[datetime], outside: Any
) -> None:
    hourly(app)
    clock.advance("1h")
    [due] = app.driver.run(schedules.due(limit=10, now=clock.ms))
    app.schedules.pause("hourly", by="ada", why="rest")
    before = outside.snapshot()
    run = firing.Run(app.database.new_id(), clock.ms, 0, due.envelope)
    stale = firing.Firing("hourly", due.revision, clock.ms + 1, runs=(run,))
    assert app.driver.run(schedules.fire([stale], now=clock.ms)) == []
    assert outside.snapshot() == before


def test_s04_a_fired_due_time_is_not_fired_again_by_any_decision(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    hourly(app)
    clock.advance("1h")
    drain(app)
    [due] = app.driver.run(schedules.one("hourly", now=clock.ms))
    again = firing.Run(app.database.new_id(), clock.ms, 0, due.envelope)
    app.driver.run(schedules.fire([firing.Firing("hourly", due.revision, due.next_at, runs=(again,))], now=clock.ms))
    drain(app)
    assert ran == [NOON + HOUR]


def test_s04_a_month_without_a_worker_is_one_row(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    app.schedules.create("often", app.tasks["note"], "1s")
    clock.advance("30d")
    drain(app)
    last = clock.now
    month = 30 * 86_400
    assert fires(app, "often") == [
        ("skipped", NOON + timedelta(seconds=1), last - timedelta(seconds=1), month - 1, MISSED),
        ("fired", last, None, 1, None),
    ]
    assert ("schedule.missed", "often", MISSED) in events(app)


def test_s04_a_run_of_misses_continues_in_its_row(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    hourly(app, grace="1m")
    for _ in range(3):
        clock.advance("2h5m")
        fire(app)
    assert ran == []
    assert fires(app, "hourly") == [("skipped", NOON + HOUR, NOON + 6 * HOUR, 6, LATE)]
    assert [name for name, _, _ in events(app)].count("schedule.missed") == 1


def test_s04_due_times_of_a_changed_rule_stay_due(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    hourly(app)
    clock.advance("3h5m")
    app.schedules.create("hourly", app.tasks["note"], "30 * * * *", replace=True)
    drain(app)
    assert fires(app, "hourly") == [
        ("skipped", NOON + HOUR, NOON + timedelta(hours=1, minutes=30), 2, MISSED),
        ("fired", NOON + timedelta(hours=2, minutes=30), None, 1, None),
    ]
    assert next_at(app, "hourly") == NOON + timedelta(hours=3, minutes=30)


def test_s04_a_changed_schedule_in_code_continues_from_its_due_times(apps: Callable[..., Duly]) -> None:
    old, new = scheduled(apps, report=("1h", {})), scheduled(apps, report=("2h", {}))
    with frozen(old, NOON):
        pass
    with frozen(new, NOON + 3 * HOUR):
        drain(new)
        assert fires(new, "report") == [
            ("skipped", NOON + HOUR, NOON + HOUR, 1, MISSED),
            ("fired", NOON + 3 * HOUR, None, 1, None),
        ]
        assert next_at(new, "report") == NOON + 5 * HOUR


def test_s08_two_triggers_at_the_same_moment_are_two_runs(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    hourly(app)
    clock.advance("1h")
    drain(app)  # fired at this very moment
    ids = {app.schedules.trigger("hourly"), app.schedules.trigger("hourly")}
    assert drain(app).succeeded == len(ids) == 2
    assert len(fires(app, "hourly")) == 3


def test_s03_a_delay_whose_run_was_deleted_by_hand_continues(app: Duly, clock: Clock, outside: Any) -> None:
    @app.task
    def slow() -> None: ...

    app.schedules.create("slow", slow, "10m", mode="delay")
    clock.advance("10m")
    fire(app)
    app.driver.run(schedules.unqueue(now=clock.ms))
    assert next_at(app, "slow") is None
    outside.query("delete from duly_job")
    app.driver.run(schedules.unqueue(now=clock.ms))
    assert next_at(app, "slow") == clock.now + timedelta(minutes=10)


@pytest.mark.parametrize("way", ["the scheduler", "a resume"])
@pytest.mark.parametrize("hours", [(1,), (2,), (5,), (1, 3), (1, 2, 3, 4, 5)])
@pytest.mark.parametrize("when", ["0 * * * *", "1h"])
def test_s04_a_due_time_fired_by_a_person_splits_the_run_of_misses(
    app: Duly, clock: Clock, ran: list[datetime], way: str, hours: tuple[int, ...], when: str
) -> None:
    app.schedules.create("hourly", app.tasks["note"], when)
    if way == "a resume":
        app.schedules.pause("hourly")
    clock.advance("5h5m")
    for hour in hours:
        assert len(app.schedules.backfill("hourly", NOON + hour * HOUR, NOON + hour * HOUR)) == 1
    if way == "a resume":
        assert app.schedules.resume("hourly")
    drain(app)
    record = fires(app, "hourly")
    fired = {due for outcome, due, *_ in record if outcome == "fired"}
    newest = {NOON + 5 * HOUR} if way == "the scheduler" else set()
    assert fired == {NOON + hour * HOUR for hour in hours} | newest
    assert sum(count for *_, count, _ in record) == 5
    assert sorted(ran) == sorted(fired)
    covered = [due + step * HOUR for _, due, _, count, _ in record for step in range(count)]
    assert [until for _, _, until, *_ in record if until] == [
        due + (count - 1) * HOUR for outcome, due, _, count, _ in record if outcome == "skipped"
    ]
    assert covered == [NOON + (number + 1) * HOUR for number in range(5)]


# S05, catch-up


DOWN = [(0, 0), (1, 1), (5, 5), (48, 48)]


@pytest.mark.parametrize(("hours", "due"), DOWN)
def test_s05_skip_runs_the_newest_only(app: Duly, clock: Clock, ran: list[datetime], hours: int, due: int) -> None:
    hourly(app)
    clock.advance(timedelta(hours=hours, minutes=5))
    drain(app)
    newest = NOON + hours * HOUR
    assert ran == ([newest] if due else [])
    skipped = [("skipped", NOON + HOUR, newest - HOUR, due - 1, MISSED)] if due > 1 else []
    assert fires(app, "hourly") == skipped + ([("fired", newest, None, 1, None)] if due else [])
    assert next_at(app, "hourly") == newest + HOUR


@pytest.mark.parametrize(("hours", "due"), DOWN)
def test_s05_last_runs_once_with_the_number_of_missed_times(app: Duly, clock: Clock, hours: int, due: int) -> None:
    told: list[tuple[datetime, Missed, str | None]] = []

    @app.every("0 * * * *", catchup="last")
    async def note(ctx: Ctx) -> None:
        told.append((ctx.due_at, ctx.missed, ctx.schedule))

    app.schedules.reconcile()
    clock.advance(timedelta(hours=hours, minutes=5))
    drain(app)
    newest = NOON + hours * HOUR
    missed = Missed(due, NOON + HOUR, newest) if due > 1 else Missed()
    assert told == ([(newest, missed, "note")] if due else [])


@pytest.mark.parametrize(("hours", "due"), DOWN)
def test_s05_all_runs_each_with_its_own_due_time(
    app: Duly, clock: Clock, ran: list[datetime], hours: int, due: int
) -> None:
    hourly(app, catchup="all")
    clock.advance(timedelta(hours=hours, minutes=5))
    drain(app)
    assert ran == [NOON + (number + 1) * HOUR for number in range(due)]
    assert {outcome for outcome, *_ in fires(app, "hourly")} <= {"fired"}


@A_FEW_AT_A_TIME
def test_s05_all_fires_so_many_at_a_time_and_the_rest_next_time(
    app: Duly, clock: Clock, ran: list[datetime], most: int
) -> None:
    app.schedules.create("often", app.tasks["note"].using(keep=0), "1m", catchup="all")
    clock.advance(timedelta(minutes=most * 5 // 2))
    assert [fire(app, most) for _ in range(4)] == [most, most, most // 2, 0]
    dues = [due for _, due, _, _, _ in fires(app, "often")][-most:]
    assert dues == [NOON + timedelta(minutes=number + 1) for number in range(most * 3 // 2, most * 5 // 2)]


@pytest.mark.parametrize("catchup", ["skip", "last", "all"])
def test_s05_grace_bounds_how_late_a_run_may_be(app: Duly, clock: Clock, ran: list[datetime], catchup: str) -> None:
    hourly(app, catchup=catchup, grace="90m")
    clock.advance("5h59m")
    drain(app)
    assert ran == {"skip": [NOON + 5 * HOUR], "last": [NOON + 5 * HOUR], "all": [NOON + 5 * HOUR]}[catchup]
    late = [one for one in fires(app, "hourly") if one[0] == "skipped"]
    assert late == [("skipped", NOON + HOUR, NOON + 4 * HOUR, 4, LATE if catchup == "all" else MISSED)]
    clock.advance("2h40m")  # 7 and 8 are due, 8 is 39 minutes late; then nothing until it is later than the grace
    drain(app)
    assert ran[-1] == NOON + 8 * HOUR


# S06, overlap


@pytest.fixture
def runs(app: Duly) -> list[tuple[str, datetime]]:
    """How the runs of the task `long` began and ended; it is put off until the third call."""
    seen: list[tuple[str, datetime]] = []

    @app.task
    def long(ctx: SyncCtx) -> None:
        seen.append(("ran", ctx.due_at))
        if len(seen) < 3:
            raise Snooze("90m")

    return seen


def test_s06_allow_fires_beside_a_run_that_has_not_ended(
    app: Duly, clock: Clock, runs: list[tuple[str, datetime]]
) -> None:
    app.schedules.create("hourly", app.tasks["long"], "0 * * * *", overlap="allow")
    clock.advance("1h")
    drain(app)
    clock.advance("1h")
    drain(app)
    assert [outcome for outcome, *_ in fires(app, "hourly")] == ["fired", "fired"]


def test_s06_skip_records_due_times_during_a_run(app: Duly, clock: Clock, runs: list[tuple[str, datetime]]) -> None:
    app.schedules.create("hourly", app.tasks["long"], "0 * * * *", overlap="skip")
    for _ in range(6):
        clock.advance("1h")
        drain(app)
    first = NOON + HOUR
    assert runs == [("ran", first), ("ran", first), ("ran", first), ("ran", NOON + 6 * HOUR)]
    assert fires(app, "hourly") == [
        ("fired", first, None, 1, None),
        ("skipped", NOON + 2 * HOUR, NOON + 5 * HOUR, 4, OVERLAP),
        ("fired", NOON + 6 * HOUR, None, 1, None),
    ]


def test_s06_skip_with_a_backlog_runs_one_and_records_the_others(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    hourly(app, overlap="skip", catchup="all")
    clock.advance("5h")
    drain(app)
    assert ran == [NOON + HOUR]
    assert fires(app, "hourly")[1:] == [("skipped", NOON + 2 * HOUR, NOON + 5 * HOUR, 4, OVERLAP)]


def test_s06_queue_runs_one_after_the_other_in_their_order(app: Duly, clock: Clock) -> None:
    seen: list[tuple[datetime, int]] = []

    @app.every("0 * * * *", overlap="queue", catchup="all")
    def work(ctx: SyncCtx) -> None:
        waiting = [job for job in app.list(limit=100) if job.state in (State.READY, State.RUNNING)]
        seen.append((ctx.due_at, len(waiting)))

    app.schedules.reconcile()
    clock.advance("4h")
    assert fire(app) == 4
    assert sorted(job.reason or "" for job in app.list(limit=100)) == ["", QUEUED, QUEUED, QUEUED]
    drain(app)
    assert seen == [(NOON + (number + 1) * HOUR, 1) for number in range(4)]


@pytest.mark.parametrize("end", ["dead", "cancelled by a person", "of one that waits"])
def test_s06_the_next_in_the_queue_begins_however_a_run_ends(app: Duly, clock: Clock, end: str) -> None:
    @app.task(max_attempts=1)
    def work() -> None:
        if end == "dead":
            raise ValueError("no")

    app.schedules.create("hourly", work, "0 * * * *", overlap="queue", catchup="all")
    clock.advance("3h")
    fire(app)
    jobs = sorted(app.list(limit=100), key=lambda job: job.id)
    if end == "cancelled by a person":
        app.cancel(jobs[0].id)
        assert [found(app, job.id).state for job in jobs] == [State.CANCELLED, State.READY, State.WAITING]
    if end == "of one that waits":
        app.cancel(jobs[1].id)
        assert [found(app, job.id).state for job in jobs] == [State.READY, State.CANCELLED, State.WAITING]
    drain(app)
    assert all(found(app, job.id).state.ended for job in jobs)


def test_s06_a_queued_run_without_a_predecessor_is_woken_by_the_upkeep(app: Duly, clock: Clock, outside: Any) -> None:
    @app.task
    def work() -> None: ...

    app.schedules.create("hourly", work, "0 * * * *", overlap="queue", catchup="all")
    clock.advance("3h")
    fire(app)
    outside.query("delete from duly_job where state = 'ready'")
    app.driver.run(schedules.unqueue(now=clock.ms))
    assert len(app.list(state="ready")) == 1
    assert app.driver.run(schedules.unqueue(now=clock.ms)) == []
    drain(app)
    assert {job.state for job in app.list(limit=100)} == {State.SUCCEEDED}


@pytest.mark.slow
def test_s06_cancel_running_ends_waiting_runs_and_requests_running_ones(app: Duly) -> None:
    began: list[datetime] = []
    asked: list[datetime] = []

    @app.task(max_attempts=1)
    async def long(ctx: Ctx) -> None:
        began.append(ctx.due_at)
        if len(began) == 1:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                asked.append(ctx.due_at)
                raise

    app.schedules.create("often", long, "500ms", overlap="cancel_running")
    work_until(app, lambda: len(began) >= 2 and asked, concurrency=2)
    first, second = began[0], next(due for due in began if due != began[0])
    assert asked == [first]
    assert second > first
    assert app.list(state="cancelled")[0].reason


# S07, dead runs


def test_s07_a_dead_run_never_stops_its_schedule(app: Duly, clock: Clock) -> None:
    runs: list[int] = []

    @app.every("0 * * * *")
    @app.task(max_attempts=1)
    def bad() -> None:
        runs.append(1)
        raise ValueError("no")

    app.schedules.reconcile()
    for _ in range(5):
        clock.advance("1h")
        drain(app)
    assert len(runs) == len(app.dead.list()) == 5
    schedule = app.schedules.get("bad")
    assert schedule is not None
    assert (schedule.dead_runs, schedule.paused_at) == (5, None)


def test_s07_after_so_many_dead_runs_in_a_row_it_is_paused_and_logged(app: Duly, clock: Clock) -> None:
    runs: list[int] = []

    @app.every("0 * * * *", pause_after=3)
    @app.task(max_attempts=1)
    def bad() -> None:
        runs.append(1)
        if len(runs) != 2:
            raise ValueError("no")

    app.schedules.reconcile()
    for _ in range(8):
        clock.advance("1h")
        drain(app)
    assert len(runs) == 5  # the second was good
    schedule = app.schedules.get("bad")
    assert schedule is not None
    assert (schedule.paused_by, schedule.paused_why) == ("duly", "3 dead runs in a row")
    assert ("schedule.paused", "bad", "3 dead runs in a row") in events(app)
    assert app.schedules.resume("bad", by="ada")
    clock.advance("1h")
    drain(app)
    assert len(runs) == 6
    assert app.schedules.get("bad").dead_runs == 1  # type: ignore[union-attr]


# S08, what people do


def test_s08_next_needs_no_database_for_schedules_in_code() -> None:
    app = Duly("/nowhere/at/all.db")

    @app.every("0 9 * * mon-fri", tz="Europe/Vienna")
    def report() -> None: ...

    assert app.schedules.next("report", 2, after=NOON) == [
        datetime(2026, 11, 17, 9, tzinfo=ZoneInfo("Europe/Vienna")),
        datetime(2026, 11, 18, 9, tzinfo=ZoneInfo("Europe/Vienna")),
    ]
    assert app.schedules.next("report", 1, after=NOON)[0].utcoffset() == HOUR


def test_s08_next_of_a_created_schedule_begins_with_its_due_times(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    app.schedules.create("often", app.tasks["note"], "10m")
    clock.advance("4m")
    expected = [NOON + timedelta(minutes=minutes) for minutes in (10, 20, 30)]
    assert app.schedules.next("often", 3) == expected
    assert asyncio.run(app.schedules.anext("often", 3)) == expected
    with pytest.raises(ScheduleNotFound, match="nobody"):
        app.schedules.next("nobody")


def test_s08_a_moment_within_a_millisecond_skips_no_due_time_and_adds_none(
    app: Duly, clock: Clock, ran: list[datetime]
) -> None:
    bit = timedelta(microseconds=500)
    app.every("0 * * * *", name="in_code")(app.tasks["note"])
    app.schedules.create("stored", app.tasks["note"], "0 * * * *")
    for name in ("in_code", "stored"):
        assert app.schedules.next(name, 1, after=NOON + HOUR - bit) == [NOON + HOUR]
        assert app.schedules.next(name, 1, after=NOON + HOUR + bit) == [NOON + 2 * HOUR]
    clock.advance("2h")
    assert app.schedules.backfill("stored", NOON + bit, NOON + HOUR - bit) == []
    assert app.schedules.backfill("stored", NOON + HOUR + bit, NOON + 2 * HOUR - bit) == []
    assert len(app.schedules.backfill("stored", NOON + HOUR - bit, NOON + HOUR + bit)) == 1


def test_s08_create_is_the_same_twice_and_refuses_another(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    hourly(app)
    made = app.schedules.get("hourly")
    hourly(app)
    assert app.schedules.get("hourly") == made
    with pytest.raises(ScheduleExists, match="replace=True"):
        app.schedules.create("hourly", app.tasks["note"], "30 * * * *")
    app.schedules.create("hourly", app.tasks["note"], "30 * * * *", replace=True)
    assert next_at(app, "hourly") == NOON + timedelta(minutes=30)


def test_s08_a_created_one_runs_with_its_arguments_and_on_the_terms_of_its_task(app: Duly, clock: Clock) -> None:
    seen: list[tuple[int, str]] = []

    @app.task(queue="mail", priority=3, max_attempts=7, schema_version=4)
    def send(number: int, word: str = "hello") -> None:
        seen.append((number, word))

    record = app.schedules.create("send-7", send.using(subject="seven").call(7, word="hi"), "1h", jitter=0)
    assert (record.task, record.payload, record.terms["queue"]) == ("send", {"number": 7, "word": "hi"}, "mail")
    clock.advance("1h")
    assert fire(app) == 1
    [job] = app.list()
    assert (job.queue, job.priority, job.max_attempts, job.schedule) == ("mail", 3, 7, "send-7")
    assert (job.schema_version, job.subject) == (4, "seven")
    drain(app)
    assert seen == [(7, "hi")]


def test_s08_pause_and_resume_record_due_times_during_the_pause(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    hourly(app, catchup="all")
    app.schedules.pause("hourly", by="ada", why="rest")
    clock.advance("5h30m")
    drain(app)
    assert ran == []
    assert app.schedules.resume("hourly", by="eve", why="enough")
    assert not app.schedules.resume("hourly")
    drain(app)
    assert ran == []
    assert fires(app, "hourly") == [("skipped", NOON + HOUR, NOON + 5 * HOUR, 5, "paused")]
    clock.advance("30m")
    drain(app)
    assert ran == [NOON + 6 * HOUR]
    assert ("schedule.paused", "hourly", "rest") in events(app)
    assert ("schedule.resumed", "hourly", "enough") in events(app)


def test_s08_trigger_runs_now_and_leaves_the_next_due_time(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    hourly(app)
    clock.advance("20m")
    job_id = app.schedules.trigger("hourly", by="ada")
    drain(app)
    assert found(app, job_id).state is State.SUCCEEDED
    assert ran == [NOON + timedelta(minutes=20)]
    assert next_at(app, "hourly") == NOON + HOUR
    assert fires(app, "hourly") == [("fired", ran[0], None, 1, "triggered by ada")]
    app.schedules.pause("hourly", by="ada")
    app.schedules.trigger("hourly")  # a person may, whatever is paused
    with pytest.raises(ScheduleNotFound):
        app.schedules.trigger("nobody")


def test_s08_backfill_fires_missed_times_and_the_record_has_the_rest(
    app: Duly, clock: Clock, ran: list[datetime]
) -> None:
    hourly(app)
    clock.advance("10h5m")
    drain(app)
    assert ran == [NOON + 10 * HOUR]
    ids = app.schedules.backfill("hourly", NOON + 4 * HOUR, NOON + 6 * HOUR, by="ada")
    assert len(ids) == 3
    drain(app)
    assert ran[1:] == [NOON + 4 * HOUR, NOON + 5 * HOUR, NOON + 6 * HOUR]
    assert fires(app, "hourly") == [
        ("skipped", NOON + HOUR, NOON + 3 * HOUR, 3, MISSED),
        *(("fired", NOON + hours * HOUR, None, 1, "backfilled by ada") for hours in (4, 5, 6)),
        ("skipped", NOON + 7 * HOUR, NOON + 9 * HOUR, 3, MISSED),
        ("fired", NOON + 10 * HOUR, None, 1, None),
    ]
    assert app.schedules.backfill("hourly", NOON + 4 * HOUR, NOON + 6 * HOUR) == []
    assert len(app.schedules.backfill("hourly", NOON + HOUR, NOON + 10 * HOUR)) == 6
    assert {outcome for outcome, *_ in fires(app, "hourly")} == {"fired"}
    assert next_at(app, "hourly") == NOON + 11 * HOUR


def test_s08_backfill_of_a_rate_keeps_its_beat_and_of_one_that_may_not_overlap_its_turn(
    app: Duly, clock: Clock, ran: list[datetime]
) -> None:
    app.schedules.create("often", app.tasks["note"], "10m", overlap="skip")
    clock.advance("1h")
    drain(app)
    ids = app.schedules.backfill("often", NOON + timedelta(minutes=5), NOON + timedelta(minutes=40))
    assert len(ids) == 4
    assert [found(app, job_id).state for job_id in ids] == [State.READY, *[State.WAITING] * 3]
    drain(app)
    assert ran[1:] == [NOON + timedelta(minutes=minutes) for minutes in (10, 20, 30, 40)]


def test_s08_backfill_of_many_runs_in_parts(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    app.schedules.create("often", app.tasks["note"], "1m")
    clock.advance(timedelta(minutes=2500))
    fire(app)
    assert len(app.schedules.backfill("often", NOON + timedelta(minutes=1), clock.now)) == 2499
    assert sum(one.count for one in app.schedules.fires("often", limit=5000)) == 2500


def test_s08_delete_leaves_the_jobs_and_the_record(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    hourly(app)
    clock.advance("1h")
    fire(app)
    app.schedules.delete("hourly", by="ada", why="old")
    assert app.schedules.get("hourly") is None
    assert app.schedules.list() == []
    drain(app)
    assert ran == [NOON + HOUR]
    assert len(fires(app, "hourly")) == 1
    lose_nothing(app)  # asked again, a deletion does not know that there was nothing
    with pytest.raises(ScheduleNotFound):
        app.schedules.delete("hourly")


def test_s08_every_way_has_its_async_twin(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    async def through() -> None:
        here = app.schedules
        await here.acreate("a", app.tasks["note"], "1h")
        assert [one.name for one in await here.alist()] == ["a"]
        await here.apause("a", by="ada")
        assert await here.aresume("a")
        job_id = await here.atrigger("a")
        assert (await app.aget(job_id)) is not None
        clock.advance("3h")
        assert len(await here.abackfill("a", NOON + HOUR, clock.now)) == 3
        assert len(await here.afires("a")) == 4
        await here.adelete("a")
        assert await here.aget("a") is None
        assert set(await here.areconcile()) == {"created", "changed", "restored", "abandoned"}

    asyncio.run(through())


def test_s08_next_of_a_rate_keeps_its_beat_and_of_a_paused_one_is_in_the_future(
    app: Duly, clock: Clock, ran: list[datetime]
) -> None:
    app.schedules.create("often", app.tasks["note"], "10m")
    assert app.schedules.next("often", 2, after=NOON + timedelta(minutes=13)) == [
        NOON + timedelta(minutes=20),
        NOON + timedelta(minutes=30),
    ]
    app.schedules.pause("often")
    clock.advance("35m")
    assert app.schedules.next("often", 1) == [NOON + timedelta(minutes=40)]


def test_s08_next_ends_where_datetimes_do(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    app.schedules.create("rare", app.tasks["note"], "3650d")
    assert 700 < len(app.schedules.next("rare", 1000)) < 1000


def test_s09_a_rule_with_a_count_runs_so_often(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    app.schedules.create("twice", app.tasks["note"], rrule="FREQ=DAILY;COUNT=2")
    for _ in range(10):
        clock.advance("12h")
        drain(app)
    first = NOON + timedelta(seconds=1)
    assert ran == [first, first + timedelta(days=1)]
    assert next_at(app, "twice") is None


def test_s08_words_that_no_database_takes_are_written_out(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    hourly(app)
    app.schedules.trigger("hourly", by="a\udcffb")
    app.schedules.pause("hourly", by="a\udcff", why="\x00")
    app.schedules.resume("hourly", by="\udcff", why="\udcff")
    assert app.schedules.get("\udcff") is None
    with pytest.raises(ScheduleNotFound):
        app.schedules.trigger("\udcff")


# S08, code and database


def scheduled(apps: Callable[..., Duly], **every: tuple[str, dict[str, Any]]) -> Duly:
    """Make an app with these schedules in its code, on the same database."""
    app = apps()
    for name, (when, options) in every.items():

        def work() -> None: ...

        app.every(when, name=name, **options)(work)
    return app


def test_s08_schedules_in_code_exist_when_a_worker_has_started(apps: Callable[..., Duly]) -> None:
    app = scheduled(apps, report=("0 9 * * *", {"tz": "Europe/Vienna", "catchup": "last", "overlap": "skip"}))
    work(app)
    [record] = app.schedules.list()
    assert (record.name, record.task, record.tz, record.catchup, record.overlap, record.in_code) == (
        "report", "report", "Europe/Vienna", "last", "skip", True,
    )  # fmt: skip


def test_s08_a_changed_schedule_keeps_its_history_and_restarts_only_if_its_time_changed(
    apps: Callable[..., Duly],
) -> None:
    app = scheduled(apps, report=("10m", {}))
    with frozen(app, NOON) as clock:
        clock.advance("10m")
        drain(app)
        before = next_at(app, "report")
        clock.advance("3m")
        other = scheduled(apps, report=("10m", {"overlap": "skip"}))
        with frozen(other, clock.now):
            assert other.schedules.get("report").overlap == "skip"  # type: ignore[union-attr]
            assert next_at(other, "report") == before
        third = scheduled(apps, report=("0 * * * *", {"overlap": "skip"}))
        with frozen(third, clock.now):
            assert next_at(third, "report") == NOON + HOUR
            assert len(fires(third, "report")) == 1
            assert third.schedules.reconcile()["changed"] == []


@pytest.mark.slow
def test_s08_a_schedule_removed_from_code_is_paused_and_restored_with_its_misses(
    apps: Callable[..., Duly],
) -> None:
    old = scheduled(apps, report=("1h", {"catchup": "all"}), other=("1h", {}))
    with frozen(old, NOON) as clock:
        drain(old)
        new = scheduled(apps, other=("1h", {}))
        with frozen(new, clock.now) as later:
            gone = new.schedules.get("report")
            assert gone is not None
            assert (gone.paused_by, gone.paused_why) == ("duly", schedules.GONE)
            later.advance("3h")
            drain(new)
        assert fires(old, "report") == []
        clock.advance("3h5m")
        assert old.schedules.reconcile()["restored"] == ["report"]
        drain(old)
        assert [outcome for outcome, *_ in fires(old, "report")] == ["fired"] * 3


def test_s08_one_that_another_living_worker_has_in_its_code_is_left_alone(apps: Callable[..., Duly]) -> None:
    old, new = scheduled(apps, report=("1h", {})), scheduled(apps, other=("1h", {}))
    found_out: list[Any] = []

    def both() -> bool:
        if not old.schedules.list():
            return False
        found_out.append(new.schedules.reconcile()["abandoned"])
        return True

    work_until(old, both)
    assert found_out == [[]]


def test_s08_one_that_a_person_made_is_never_abandoned(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    hourly(app)
    assert app.schedules.reconcile()["abandoned"] == []
    assert app.schedules.get("hourly").paused_at is None  # type: ignore[union-attr]


# S11, jitter


@pytest.mark.slow
def test_s11_jitter_spreads_runs_and_the_record_keeps_the_time_without_it(app: Duly, clock: Clock) -> None:
    dues: list[datetime] = []

    @app.task
    def note(ctx: SyncCtx) -> None:
        dues.append(ctx.due_at)

    for number in range(40):
        app.schedules.create(f"s{number}", note, "0 * * * *", jitter="10m")
    clock.advance("1h")
    assert fire(app) == 40
    due = [job.due_at for job in app.list(limit=100)]
    assert len(set(due)) > 10
    assert all(job_due is not None and ms(clock.now) <= job_due <= ms(clock.now) + 600_000 for job_due in due)
    assert all(fires(app, f"s{number}") == [("fired", clock.now, None, 1, None)] for number in range(40))
    clock.advance("10m")
    drain(app)
    assert dues == [NOON + HOUR] * 40


# Wrong use


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"when": "61 * * * *"}, "minute"),
        ({"when": "0 9 * *"}, "fields"),
        ({"when": "0 0 30 2 *"}, "never"),
        ({"when": "1h", "tz": "Europe/Viena"}, "Europe/Vienna"),
        ({"when": "0s"}, "0"),
        ({"when": "1h", "mode": "often"}, "rate"),
        ({"when": "0 9 * * *", "mode": "delay"}, "mode="),
        ({"when": "1h", "catchup": "lst"}, "mean 'last'"),
        ({"when": "1h", "overlap": "never"}, "cancel_running"),
        ({"when": "1h", "grace": "-1s"}, "grace="),
        ({"when": "1h", "grace": 0}, "at least 1s"),
        ({"when": "1h", "overlop": "skip"}, "did you mean overlap="),
        ({"when": print}, "needs a rule"),
        ({"when": "1h", "jitter": "soon"}, "jitter="),
        ({"when": "1h", "pause_after": 0}, "pause_after="),
        ({}, "nothing"),
        ({"when": "1h", "rrule": "FREQ=DAILY"}, "both"),
        ({"rrule": "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30"}, "never"),
    ],
)
def test_s01_a_wrong_schedule_is_refused_at_definition(options: dict[str, Any], words: str) -> None:
    app = Duly("unused.db")
    with pytest.raises(ConfigError, match=words):
        app.every(**options)


def test_s08_a_task_that_cannot_be_scheduled_is_refused_and_nothing_is_written(app: Duly) -> None:
    @app.task
    def send(number: int) -> None: ...

    with pytest.raises(ConfigError, match=r"send\.call"):
        app.every("1h")(send)
    with pytest.raises(ConfigError, match="key="):
        app.schedules.create("a", send.using(key="k").call(1), "1h")
    with pytest.raises(ConfigError, match="delay="):
        app.schedules.create("a", send.using(delay="1m").call(1), "1h")
    with pytest.raises(ConfigError, match="no task"):
        app.schedules.create("a", print, "1h")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="name"):
        app.schedules.create("", send.call(1), "1h")

    @app.every("1h")
    def twice() -> None: ...

    with pytest.raises(ConfigError, match="twice"):
        app.every("2h", name="twice")(send.using())
    assert app.schedules.list() == []


def test_s08_a_backfill_of_the_future_and_of_a_delay_is_refused(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    hourly(app)
    app.schedules.create("slow", app.tasks["note"], "1h", mode="delay")
    with pytest.raises(ConfigError, match="future"):
        app.schedules.backfill("hourly", NOON, NOON + HOUR)
    with pytest.raises(ConfigError, match="end of each run"):
        app.schedules.backfill("slow", NOON - HOUR, NOON)


def test_s04_one_that_cannot_be_read_here_does_not_stop_the_others(
    app: Duly, clock: Clock, ran: list[datetime], outside: Any
) -> None:
    hourly(app)
    app.schedules.create("strange", app.tasks["note"], "0 * * * *")
    outside.query("update duly_schedule set tz = 'Nowhere/Land' where name = 'strange'")
    clock.advance("1h")
    drain(app)
    assert ran == [NOON + HOUR]
    assert fires(app, "strange") == []


@pytest.mark.slow
def test_s04_a_real_worker_fires_on_time_without_a_wake_up(app: Duly) -> None:
    seen: list[float] = []

    @app.every("300ms")
    def often(ctx: SyncCtx) -> None:
        seen.append((datetime.now(UTC) - ctx.due_at).total_seconds())

    work_until(app, lambda: len(seen) >= 5)
    record = app.schedules.fires("often")
    assert sum(one.count for one in record) >= 5
    assert sorted({one.due_at % 300 for one in record}) == [record[0].due_at % 300]


# What two people, two versions or a strange clock do


def test_s08_a_living_worker_restores_schedules_that_others_paused(apps: Callable[..., Duly]) -> None:
    app = scheduled(apps, report=("1h", {}))
    with frozen(app, NOON):
        app.driver.run(schedules.abandon([]))
        assert app.schedules.get("report").paused_why == schedules.GONE  # type: ignore[union-attr]

        async def upkeep() -> None:
            await app.worker().upkeep.mend_schedules()

        asyncio.run(upkeep())
        assert app.schedules.get("report").paused_at is None  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("rules", [("10m", "20m"), ("*/10 * * * *", "5-55/10 * * * *")])
def test_s08_two_versions_of_the_code_that_take_turns_do_not_put_it_off_for_ever(
    apps: Callable[..., Duly], rules: tuple[str, str]
) -> None:
    old, new = (scheduled(apps, report=(rule, {})) for rule in rules)
    now = NOON
    for _ in range(30):
        for app in (old, new):
            now += timedelta(minutes=1)
            with frozen(app, now):
                drain(app)
    assert sum(count for outcome, *_, count, _ in fires(old, "report") if outcome == "fired") >= 3


def test_s06_cancel_running_fires_in_the_pass_that_frees_the_slot(app: Duly, clock: Clock) -> None:
    @app.task
    def long() -> None:
        raise Snooze("10h")

    app.schedules.create("hourly", long, "0 * * * *", overlap="cancel_running")
    for _ in range(4):
        clock.advance("1h")
        assert fire(app) == 1
    assert [outcome for outcome, *_ in fires(app, "hourly")] == ["fired"] * 4
    assert [job.state for job in app.list(state="cancelled")] == [State.CANCELLED] * 3


def test_s06_cancel_running_stops_nothing_for_a_due_time_that_is_too_late(app: Duly, clock: Clock) -> None:
    @app.task
    def long() -> None: ...

    app.schedules.create("hourly", long, "0 * * * *", overlap="cancel_running", grace="1m")
    clock.advance("1h")
    fire(app)
    clock.advance("1h30m")
    assert fire(app) == 0
    assert [job.state for job in app.list()] == [State.READY]


def test_s06_a_backfill_with_cancel_running_is_refused(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    hourly(app, overlap="cancel_running")
    clock.advance("5h5m")
    with pytest.raises(ConfigError, match="cancel_running"):
        app.schedules.backfill("hourly", NOON + HOUR, NOON + 3 * HOUR)


def test_s08_a_backfill_does_not_split_misses_of_another_rule(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    app.schedules.create("often", app.tasks["note"], "* * * * *")
    clock.advance("3h")
    fire(app)
    before = fires(app, "often")
    app.schedules.create("often", app.tasks["note"], "30 * * * *", replace=True)
    assert len(app.schedules.backfill("often", NOON, NOON + 3 * HOUR)) == 3
    assert [one for one in fires(app, "often") if one[0] == "skipped"] == [one for one in before if one[0] == "skipped"]


def test_s08_a_backfill_of_times_no_longer_recorded_needs_force(app: Duly, clock: Clock, ran: list[datetime]) -> None:
    hourly(app)
    before = NOON - timedelta(days=30)
    assert len(app.schedules.backfill("hourly", before, before + 2 * HOUR)) == 3  # it was not there then
    clock.advance("8d")
    with pytest.raises(ConfigError, match="force=True"):
        app.schedules.backfill("hourly", NOON, NOON + 2 * HOUR)
    assert len(app.schedules.backfill("hourly", NOON, NOON + 2 * HOUR, force=True)) == 3
    with pytest.raises(ConfigError, match="before since"):
        app.schedules.backfill("hourly", NOON, NOON - HOUR)


def test_s08_a_schedule_in_code_is_not_overwritten(apps: Callable[..., Duly]) -> None:
    app = scheduled(apps, report=("1h", {}))
    with frozen(app, NOON), pytest.raises(ScheduleExists, match="is defined in code"):
        app.schedules.create("report", app.tasks["report"], "2h", replace=True)


def test_s08_a_refused_schedule_defines_no_task(app: Duly) -> None:
    with pytest.raises(ConfigError):
        app.every("1h")(lambda number: None)  # type: ignore[misc]

    def send(number: int) -> None: ...

    with pytest.raises(ConfigError, match=r"send\.call"):
        app.every("1h")(send)  # type: ignore[call-overload]
    assert app.tasks == {}
    app.task(send)


@pytest.mark.parametrize("how", ["deleted", "allowed to overlap"])
def test_s06_queued_runs_start_when_the_queueing_ends(app: Duly, clock: Clock, ran: list[datetime], how: str) -> None:
    hourly(app, overlap="queue", catchup="all")
    clock.advance("3h")
    fire(app)
    if how == "deleted":
        app.schedules.delete("hourly")
    else:
        hourly(app, overlap="allow", catchup="all", replace=True)
    assert {job.state for job in app.list()} == {State.READY}


def test_s08_a_schedule_that_a_clock_ahead_of_time_put_off_is_resumed_at_its_next_time(
    app: Duly, clock: Clock, ran: list[datetime], outside: Any
) -> None:
    hourly(app)
    outside.query("update duly_schedule set next_at = ?", ms(NOON + timedelta(days=3650)))
    app.schedules.pause("hourly")
    app.schedules.resume("hourly")
    assert next_at(app, "hourly") == NOON + HOUR


def test_s11_expiry_counts_from_the_time_after_jitter(app: Duly, clock: Clock) -> None:
    @app.task
    def note() -> None: ...

    for number in range(20):
        app.schedules.create(f"s{number}", note.using(expires="5m"), "0 * * * *", jitter="30m")
    clock.advance("1h")
    fire(app)
    assert all(job.expires_at == (job.due_at or 0) + 300_000 for job in app.list(limit=100))


@A_FEW_AT_A_TIME
def test_s05_a_backlog_of_one_holds_up_no_other(app: Duly, clock: Clock, ran: list[datetime], most: int) -> None:
    app.schedules.create("backlog", app.tasks["note"], "10s", catchup="all")
    app.schedules.create("nightly", app.tasks["note"], "0 2 * * *")
    clock.advance("1d")
    assert fire(app, most) == most + 1
    assert len(fires(app, "nightly")) == 1


@A_FEW_AT_A_TIME
def test_s05_a_drain_fires_all_of_a_backlog(
    app: Duly, clock: Clock, ran: list[datetime], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(Fire.all_due.__kwdefaults__, "most_runs", most)
    app.schedules.create("backlog", app.tasks["note"].using(keep=0), "1m", catchup="all")
    clock.advance(timedelta(minutes=most * 5 // 2 + 3))
    assert drain(app).succeeded == most * 5 // 2 + 3


def test_s04_a_miss_after_a_run_begins_a_row_of_its_own(app: Duly, clock: Clock) -> None:
    ended: list[int] = []

    @app.task
    def long() -> None:
        if not ended:
            raise Snooze("1s")

    app.schedules.create("often", long, "10m", overlap="skip", catchup="all")
    clock.advance("10m")
    drain(app)
    clock.advance("10m")
    fire(app)  # skipped: it has not ended
    ended.append(1)
    drain(app)
    clock.advance("30m")
    drain(app)
    minutes = [(outcome, (due - NOON).seconds // 60, count) for outcome, due, _, count, _ in fires(app, "often")]
    assert minutes == [("fired", 10, 1), ("skipped", 20, 1), ("fired", 30, 1), ("skipped", 40, 2)]


def test_s03_a_delay_waits_for_the_last_of_its_runs(app: Duly, clock: Clock) -> None:
    @app.task
    def slow() -> None: ...

    app.schedules.create("slow", slow, "10m", mode="delay")
    clock.advance("10m")
    fire(app)
    app.schedules.trigger("slow")
    claim = ops.claim("default", limit=2, token=5, worker="w", now=clock.ms)
    first, second = app.driver.run(claim)
    for job, expected in ((first, None), (second, clock.now + timedelta(minutes=10))):
        app.driver.run(ops.finish([Finish(job, Change(State.SUCCEEDED))], now=clock.ms))
        assert next_at(app, "slow") == expected
