"""Schedules: a crowd that is due in the same minute, and a hundred thousand that rest."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

from msgspec.structs import replace

from bench.figures import Figure, Target, alone
from bench.parts.picking import pick_ups
from bench.parts.place import BenchFailed, Place
from duly.app.schedule_options import Defined, terms
from duly.duly import Duly
from duly.store import ops, schedules

CHUNK = 1000
HOUR_MS = 3_600_000
PATIENCE_S = 60
SOON = Target(at_most=5)


@dataclass(frozen=True)
class Plan:
    """How many are due at once, how many rest, and how long an idle worker is watched."""

    due: int = 10_000
    resting: int = 100_000
    repeat: int = 3
    idle_s: float = 5.0
    say: Callable[[str], None] = lambda text: None


def fired(place: Place, plan: Plan) -> Iterator[Figure]:
    """Measure how long one worker takes to fire and to run a crowd, and what those cost that rest."""
    runs = [crowd(place, plan, turn) for turn in range(plan.repeat)]
    seconds, grew = zip(*runs, strict=True)
    name = f"{plan.due:,} schedules due at once"
    yield alone(place.store, f"{name}, fired and run", "s", seconds, SOON, short="fires")
    # The first has the interpreter grow for all that comes after.
    yield alone(place.store, f"{name}, memory", "MiB", grew[1:] or grew)
    for count in (0, plan.resting):
        place.fresh()
        fill(place, count, due_in_ms=HOUR_MS)
        plan.say(f"{place.store}: {count:,} schedules at rest")
        idle = [pick_ups(place, 1, idle_s=plan.idle_s)[1] for _ in range(plan.repeat)]
        yield alone(place.store, f"idle worker, {count:,} schedules at rest", "% of a core", idle)


def crowd(place: Place, plan: Plan, turn: int) -> tuple[float, float]:
    """Fire so many at once and run them; says how long that took and by how many MiB the process grew."""
    plan.say(f"{place.store}: {plan.due:,} schedules due at once, {turn + 1} of {plan.repeat}")
    place.fresh()
    fill(place, plan.due, due_in_ms=-1000)
    with closing(place.app()) as app:
        ran = noted(app)
        before = peak_mib()
        began = time.perf_counter()
        asyncio.run(worked(app, lambda: len(ran) >= plan.due))
        return time.perf_counter() - began, peak_mib() - before


async def worked(app: Duly, enough: Callable[[], bool]) -> None:
    """Run a worker until it is enough."""
    worker = app.worker(signals=False)
    running = asyncio.create_task(worker.run())
    give_up_at = time.monotonic() + PATIENCE_S
    while not enough() and not running.done() and time.monotonic() < give_up_at:
        await asyncio.sleep(0.005)
    worker.stop()
    await running
    if not enough():
        raise BenchFailed(f"not all that was due has run within {PATIENCE_S} s")


def noted(app: Duly) -> list[int]:
    """Define the task that is fired."""
    ran: list[int] = []

    @app.task(keep=0)
    async def note() -> None:
        ran.append(1)

    return ran


def fill(place: Place, count: int, *, due_in_ms: int) -> None:
    """Define so many schedules that are due by then."""
    with closing(place.app()) as app:
        noted(app)
        hourly = terms("1h", "s", {})
        note = app.tasks["note"]
        now = app.driver.run(ops.clock())
        one = Defined("s", note, note.call().payload, hourly, in_code=False).definition(revision=1, now=now)
        for first in range(0, count, CHUNK):
            numbers = range(first, min(first + CHUNK, count))
            many = [replace(one, name=f"s{number}", next_at=now + due_in_ms) for number in numbers]
            app.driver.run(schedules.define(many))


def peak_mib() -> float:
    """Say how large this process has been."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
