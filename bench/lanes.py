"""Lanes: tenants with a cap beside jobs without one, a small tenant behind a large one, and lanes that rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

from bench.figures import Figure, Target, alone, compared
from bench.parts.draining import ASYNC, TWO, Way, drain, fill
from bench.parts.load import CAP, TENANTS
from bench.parts.place import Place
from bench.schedules import worked
from duly.app.task import Task
from duly.duly import Duly

CAPPED, CAPPED_TWO = Way("capped"), Way("capped", workers=2)
HALF = Target(at_least=0.5)
SOON = Target(at_most=2)
FEW = 10
HANDLER_S = 0.02


@dataclass(frozen=True)
class Plan:
    """How many jobs are drained, how many lanes rest beside them, and how many jobs the large tenant has."""

    jobs: int = 20_000
    resting: int = 100_000
    waiting: int = 100_000
    repeat: int = 3
    say: Callable[[str], None] = lambda text: None


def claimed(place: Place, plan: Plan) -> Iterator[Figure]:
    """Measure what a cap per tenant costs, whether lanes at rest cost more, and how long the small tenant waits."""
    name = f"drain of {plan.jobs:,} jobs of {TENANTS:,} capped tenants"
    for way, beside, workers in ((CAPPED, ASYNC, "one worker"), (CAPPED_TWO, TWO, "two workers")):
        yield compared(place.store, f"{name}, {workers}", "jobs/s", in_turns(place, plan, way, beside), HALF)
    rates = [drain(place, CAPPED, plan.jobs, filler=beside_resting(plan.resting)).rate for _ in range(plan.repeat)]
    yield alone(place.store, f"{name}, {plan.resting:,} lanes at rest", "jobs/s", rates)
    waits = [small_tenant(place, plan, turn) for turn in range(plan.repeat)]
    what = f"{FEW} jobs behind {plan.waiting:,} of another tenant, cap {CAP} each, done after"
    yield alone(place.store, what, "s", waits, SOON)


def in_turns(place: Place, plan: Plan, way: Way, beside: Way) -> dict[str, list[float]]:
    """Drain jobs with and without a cap, one after the other."""
    rates: dict[str, list[float]] = {"duly": [], "no cap": []}
    for turn in range(plan.repeat):
        plan.say(f"{place.store}: capped tenants by {way.workers} workers, {turn + 1} of {plan.repeat}")
        rates["no cap"].append(drain(place, beside, plan.jobs).rate)
        rates["duly"].append(drain(place, way, plan.jobs).rate)
    return rates


def beside_resting(lanes: int) -> Callable[[Place, Way, int], None]:
    """Give a filler that adds so many lanes in which nobody waits."""

    def filler(place: Place, way: Way, jobs: int) -> None:
        numbers = f"with recursive n (n) as (select 1 union all select n + 1 from n where n < {lanes})"
        row = f"select 'resting:' || n, 'resting', {round(time.time() * 1000)} from n"
        place.run(f"insert into {place.schema}duly_lane (name, task, used_at) {numbers} {row}")
        fill(place, way, jobs)

    return filler


def small_tenant(place: Place, plan: Plan, turn: int) -> float:
    """Let a worker work at the jobs of a large tenant, then enqueue a few of another; says when the last was done."""
    plan.say(f"{place.store}: a small tenant behind a large one, {turn + 1} of {plan.repeat}")
    place.fresh()
    with closing(place.app()) as app:
        done: list[float] = []
        work = tenants(app, done)
        work.enqueue_many(work.call("large") for _ in range(plan.waiting))
        place.settle()
        return asyncio.run(waited(app, work, done))


def tenants(app: Duly, done: list[float]) -> Task[[str], None, None]:
    """Define the task of both tenants, which notes when a job of the small one is done."""

    @app.task(cap=CAP, cap_key=lambda tenant: tenant, keep=0)
    async def work(tenant: str) -> None:
        await asyncio.sleep(HANDLER_S)
        if tenant == "small":
            done.append(time.perf_counter())

    return work


async def waited(app: Duly, work: Task[[str], None, None], done: list[float]) -> float:
    """Enqueue a few jobs beside many that wait and some that run; says how long the last of them took."""
    running = asyncio.create_task(worked(app, lambda: len(done) >= FEW))
    await asyncio.sleep(20 * HANDLER_S)  # by then the large tenant has all its cap allows
    began = time.perf_counter()
    await work.aenqueue_many(work.call("small") for _ in range(FEW))
    await running
    return max(done) - began
