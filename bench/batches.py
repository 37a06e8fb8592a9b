"""Batches: a large one is filled, watched while two workers drain it, and drained beside jobs that are in none."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from bench.figures import Figure, Target, alone, compared, percentile
from bench.parts import load
from bench.parts.child import Child
from bench.parts.draining import ASYNC, TWO, Way, check, drain
from bench.parts.orders import Orders
from bench.parts.part import tallied
from bench.parts.place import BenchFailed, Place
from bench.schedules import peak_mib
from duly.duly import Duly

LOOK_S = 0.02
LITTLE = Target(at_most=100)
AT_ONCE = Target(at_most=10)


@dataclass(frozen=True)
class Plan:
    """How large the large batch is, and how many jobs are drained in one and in none."""

    jobs: int = 1_000_000
    compared: int = 40_000
    repeat: int = 3
    say: Callable[[str], None] = lambda text: None


def filled(place: Place, plan: Plan) -> Iterator[Figure]:
    """Measure what a large batch takes to be filled and to be asked about, and what being in one costs a job."""
    name = f"a batch of {plan.jobs:,} jobs"
    plan.say(f"{place.store}: {name}")
    place.fresh()
    batch_id, seconds, grew = in_another_process(fill, place.arguments, plan.jobs)
    yield alone(place.store, f"{name}, filled", "jobs/s", [plan.jobs / seconds], short="fill")
    yield alone(place.store, f"{name}, memory to fill it", "MiB", [grew], LITTLE)
    looks, rate = watched(place, batch_id, plan.jobs)
    for share, said in ((0.5, "p50"), (0.99, "p99")):
        yield alone(place.store, f"{name}, progress read meanwhile, {said}", "ms", [percentile(looks, share)], AT_ONCE)
    yield alone(place.store, f"{name}, drained by two workers", "jobs/s", [rate])
    yield beside_none(place, plan)


def in_another_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Do something where nothing else has made the process large."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def fill(arguments: dict[str, Any], jobs: int) -> tuple[str, float, float]:
    """Fill a batch; says which, how long that took, and by how many MiB the process grew."""
    with closing(Duly(**arguments)) as app:
        task = load.declare(app, "async", load.unheard)
        with app.batch("warm-up") as first:
            first.fill(load.calls(task, "async", range(0)))
        before, began = peak_mib(), time.perf_counter()
        with app.batch("large") as batch:
            batch.fill(load.calls(task, "async", range(jobs)))
        return batch.id, time.perf_counter() - began, peak_mib() - before


def watched(place: Place, batch_id: str, jobs: int) -> tuple[list[float], float]:
    """Drain a batch and ask meanwhile how far it is; says how many ms each look took, and the rate."""
    looks: list[float] = []
    with tallied(jobs) as tally, ExitStack() as stack:
        orders = Orders(place.arguments, tally.path, jobs, "async")
        crew = [stack.enter_context(Child(orders)) for _ in range(TWO.workers)]
        app = stack.enter_context(closing(place.app()))
        batch = app.batches.get(batch_id)
        place.settle()
        for child in crew:
            child.await_ready()
        for child in crew:
            child.go()
        with ThreadPoolExecutor(len(crew)) as beside:
            ends = [beside.submit(child.told) for child in crew]
            while not all(end.done() for end in ends):
                began = time.perf_counter()
                batch.progress()
                looks.append((time.perf_counter() - began) * 1000)
                time.sleep(LOOK_S)
        told = [end.result() for end in ends]
        recorded, end = place.recorded(), batch.progress()
        check(TWO, tally.runs(), recorded)
    if not (end.complete and end.succeeded == jobs):
        raise BenchFailed(f"the batch does not add up: {end}")
    return looks, jobs / (recorded.last_at - min(one.first_at for one in told if one.first_at))


def beside_none(place: Place, plan: Plan) -> Figure:
    """Drain jobs in a batch and in none, in turns."""
    rates: dict[str, list[float]] = {"duly": [], "in no batch": []}
    for turn in range(plan.repeat):
        plan.say(f"{place.store}: jobs in a batch beside jobs in none, {turn + 1} of {plan.repeat}")
        rates["in no batch"].append(drain(place, ASYNC, plan.compared).rate)
        rates["duly"].append(drain(place, ASYNC, plan.compared, filler=fill_batch).rate)
    return compared(place.store, "drain jobs of a batch, one worker", "jobs/s", rates)


def fill_batch(place: Place, way: Way, jobs: int) -> None:
    """Enqueue the jobs as one batch."""
    fill(place.arguments, jobs)
