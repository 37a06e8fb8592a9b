"""A tick does one bounded pass and ends; any number of them may overlap."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from duly import Duly, Snooze
from duly.errors import ConfigError, StoreUnavailable
from duly.model import NewJob, State, Terms
from duly.store import ops
from duly.testing import frozen
from duly.worker.suspects import Suspects
from duly.worker.tick import Ticked, Ticker
from tests.contract.stores import new_id
from tests.engine.conftest import found, take


def tick(app: Duly, **options: Any) -> Ticked:
    return asyncio.run(asyncio.wait_for(Ticker(app, **{"signals": False, **options}).tick(), 30))


def test_s10_a_tick_fires_and_runs_due_work_and_ends(app: Duly) -> None:
    ran: list[str] = []

    @app.task
    def note(word: str) -> None:
        ran.append(word)

    with frozen(app) as clock:
        app.schedules.create("hourly", note.call("fired"), "1h", catchup="all")
        note.enqueue("now")
        note.using(delay="30m").enqueue("soon")
        note.using(delay="9h").enqueue("later")
        clock.advance("2h")
        said = tick(app)
    assert sorted(ran) == ["fired", "fired", "now", "soon"]
    assert (said.fired, said.ran, said.succeeded, said.more) == (2, 4, 4, False)


def test_s10_a_tick_runs_no_more_than_its_limit(app: Duly) -> None:
    ran: list[int] = []

    @app.task
    async def note(number: int) -> None:
        ran.append(number)

    note.enqueue_many(note.call(number) for number in range(25))
    assert [(said.ran, said.more) for said in (tick(app, limit=10) for _ in range(3))] == [
        (10, True),
        (10, True),
        (5, False),
    ]
    assert ran == list(range(25))


def test_s10_a_tick_runs_no_more_than_its_limit_of_quick_jobs_that_are_claimed_ahead(app: Duly) -> None:
    @app.task
    async def note(number: int) -> None: ...

    note.enqueue_many(note.call(number) for number in range(3000))
    assert [(said.ran, said.more) for said in (tick(app, limit=100), tick(app, limit=2000))] == [
        (100, True),
        (2000, True),
    ]


def test_s10_a_tick_fires_no_more_schedules_than_its_limit(app: Duly) -> None:
    @app.task
    def note() -> None: ...

    with frozen(app) as clock:
        for number in range(25):
            app.schedules.create(f"s{number:02}", note, "1h")
        clock.advance("1h")
        assert [tick(app, limit=10).fired for _ in range(4)] == [10, 10, 5, 0]


def test_s10_a_tick_starts_no_job_after_its_time(app: Duly) -> None:
    @app.task
    async def nap() -> None:
        await asyncio.sleep(0.2)

    nap.enqueue_many(nap.call() for _ in range(50))
    began = time.monotonic()
    said = tick(app, max_seconds=0.5, concurrency=1)
    assert said.more
    assert 0 < said.succeeded < 10
    assert time.monotonic() - began < 10
    assert {job.state for job in app.list(limit=100)} == {State.READY, State.SUCCEEDED}


@pytest.mark.slow
def test_s10_a_tick_rescues_jobs_of_a_dead_worker(app: Duly) -> None:
    ran: list[int] = []

    @app.task
    def note(number: int) -> None:
        ran.append(number)

    job = note.enqueue(1)
    now = app.driver.run(ops.clock())
    take(app, now=now - 10_000)  # its lease of two seconds has ended
    said = tick(app)
    assert (said.rescued, said.ran, ran) == (1, 1, [1])
    assert found(app, job.id).state is State.SUCCEEDED


@pytest.mark.slow
def test_s10_a_tick_runs_what_it_rescued_also_when_the_look_for_it_comes_late(
    app: Duly, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task
    def note() -> None: ...

    pause = Suspects._pause

    async def late(self: Suspects) -> None:
        await pause(self)
        await asyncio.sleep(0.2)

    monkeypatch.setattr(Suspects, "_pause", late)
    job = note.enqueue()
    take(app, now=app.driver.run(ops.clock()) - 10_000)
    said = tick(app)
    assert (said.rescued, said.ran) == (1, 1)
    assert found(app, job.id).state is State.SUCCEEDED


def test_s10_a_tick_without_enough_time_names_the_time_it_needs(app: Duly) -> None:
    @app.task
    def note() -> None: ...

    job = note.enqueue()
    now = app.driver.run(ops.clock())
    take(app, now=now - 10_000)
    said = tick(app, max_seconds=0.3)
    assert (said.rescued, said.late) == (0, 1)
    assert said.late_s > 0.3
    assert found(app, job.id).state is State.RUNNING


def test_s10_a_tick_prunes(app: Duly, where: tuple[str, str]) -> None:
    @app.task(keep="1h")
    def note() -> None: ...

    with frozen(app) as clock:
        note.enqueue()
        assert tick(app).pruned == 0
        clock.advance(timedelta(hours=2))
        assert tick(app).pruned == 1 or where[0] == "d1"  # whose answer may be lost
    assert app.list() == []


def test_s10_overlapping_ticks_run_each_job_once(apps: Callable[..., Duly]) -> None:
    ran: list[tuple[int, int]] = []
    crowd = [apps() for _ in range(3)]
    for place, app in enumerate(crowd):

        @app.task(name="note")
        async def note(number: int, place: int = place) -> None:
            await asyncio.sleep(0.005)
            ran.append((place, number))

    first = crowd[0]
    first.driver.run(ops.clock())
    jobs = [NewJob(new_id(), f'{{"number": {number}}}') for number in range(60)]
    first.driver.run(ops.enqueue(Terms("note"), jobs))

    async def together() -> list[Ticked]:
        return await asyncio.gather(*(Ticker(app, signals=False, concurrency=5).tick() for app in crowd))

    said = asyncio.run(together())
    assert sorted(number for _, number in ran) == list(range(60))
    assert sum(one.ran for one in said) == 60


def test_s10_apps_that_only_tick_on_one_database_do_not_pause_each_other(apps: Callable[..., Duly]) -> None:
    here, there = apps(), apps()
    here.every("1h", name="mine")(lambda: None)
    there.every("1h", name="yours")(lambda: None)
    for _ in range(2):
        tick(here)
        tick(there)
    assert [(one.name, one.paused_at) for one in here.schedules.list()] == [("mine", None), ("yours", None)]


def test_s10_delayed_jobs_are_left_to_the_next_tick(app: Duly) -> None:
    calls: list[int] = []

    @app.task
    def later() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise Snooze("10m")

    job = later.enqueue()
    with frozen(app) as clock:
        assert tick(app).ran == 1
        assert found(app, job.id).state is State.SCHEDULED
        clock.advance("10m")
        assert tick(app).succeeded == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit": 0}, "limit= is 0: give a whole number from 1 to 1,000,000,000"),
        ({"limit": "5"}, "limit= is '5': give"),
        ({"limit": 1.5}, "limit= is 1.5: give"),
        ({"limit": None}, "limit= is None: give"),
        ({"limit": 10**30}, "limit= is 1000.*: give"),
        ({"concurrency": 10**5000}, "concurrency= is a number of more than 4,300 digits: give"),
        ({"max_seconds": 0}, "max_seconds= is zero: give a duration above zero"),
        ({"max_seconds": math.nan}, "max_seconds= is nan, which is not a duration"),
        ({"max_seconds": "50x"}, "max_seconds= is '50x'"),
    ],
)
def test_s10_bounds_that_are_none_are_refused(app: Duly, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Ticker(app, **options)


# In code


def test_s10_a_tick_in_code_does_one_pass_with_its_bounds(app: Duly) -> None:
    ran: list[int] = []

    @app.task
    def note(number: int) -> None:
        ran.append(number)

    note.enqueue_many(note.call(number) for number in range(4))
    first = app.tick(limit=3, max_seconds="20s", concurrency=1)
    assert (first.ran, first.more, ran) == (3, True, [0, 1, 2])

    async def inside() -> Ticked:
        with pytest.raises(ConfigError, match=r"one runs here already: await app\.atick\(\) instead"):
            app.tick()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, print)
        ticked = await app.atick()
        assert loop.remove_signal_handler(signal.SIGTERM)  # it was there still
        return ticked

    last = asyncio.run(inside())
    assert (last.ran, last.more, ran) == (1, False, [0, 1, 2, 3])
    for wrong in ({"limit": 0}, {"max_seconds": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            app.tick(**wrong)  # type: ignore[arg-type]


def test_s10_passes_that_overlap_in_one_process_count_their_own_jobs(app: Duly) -> None:
    @app.task
    async def meet() -> None:
        if not met.is_set():
            met.set()
            await asyncio.to_thread(work, app)  # a second pass, within the first

    def work(app: Duly) -> None:
        inner.append(app.tick())

    met, inner = threading.Event(), list[Ticked]()
    meet.enqueue_many(meet.call() for _ in range(4))
    outer = app.tick(limit=1)
    assert [(ticked.ran, ticked.succeeded) for ticked in (outer, *inner)] == [(1, 1), (3, 3)]


def test_s10_a_tick_without_a_database_raises_at_once() -> None:
    app = Duly("postgresql://127.0.0.1:1/none")
    with pytest.raises(StoreUnavailable):
        app.tick(max_seconds=5)
