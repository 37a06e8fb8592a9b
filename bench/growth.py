"""(h) growth: claims, drains and pick-ups beside a large table and beside an empty one, by turns."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

from bench.contestant import QUEUE, SUCCESS, WORKER, whole
from bench.figures import Figure, Target, compared, percentile
from bench.filling import START_MS, Filling
from bench.parts.child import Child
from bench.parts.orders import Orders
from bench.parts.part import in_order, tallied
from bench.parts.picking import pick_ups
from bench.parts.place import BenchFailed, Place
from duly.store import ops
from duly.store.driver import Driver
from duly.store.op import Finish

SLOWER = Target(at_most=1.3)
RATE = Target(at_least=1 / 1.3)
TASK = "bench_async"
CHUNK = 250_000
EARLIER_MS = 100_000_000
# What a worker may have claimed ahead when it is told that it is enough.
AHEAD = 5_000
CLAIM = 100
WARM_UP = 6


@dataclass(frozen=True)
class Plan:
    """How large the table gets, and how much is measured there."""

    waiting: int = 1_000_000
    scheduled: int = 1_000_000
    finished: int = 5_000_000
    repeat: int = 3
    jobs: int = 20_000
    claims: int = 60
    pick_ups: int = 60
    say: Callable[[str], None] = lambda text: None


def grown(empty: Place, large: Place, plan: Plan) -> Iterator[Figure]:
    """Fill the large one step by step, and measure at each."""
    for place in (empty, large):
        place.fresh()
    rows = Rows(large)
    steps = [
        ("waiting", plan.waiting, rows.ready),
        ("scheduled", plan.scheduled, rows.scheduled),
        ("finished", plan.finished, rows.done),
    ]
    there: list[str] = []
    for name, count, fill in steps:
        for done in range(0, count, CHUNK):
            plan.say(f"{large.store}: filling, {done:,} of {count:,} {name}")
            fill(min(CHUNK, count - done))
        large.settle()
        there.append(f"{count:,} {name}")
        yield from At(empty, large, ", ".join(there), plan).figures()


class Rows:
    """Adds rows by SQL alone, each due after the one before."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._filling = Filling(place.store, place.schema, task=TASK, numbered=True)
        self._made = 0

    def ready(self, rows: int) -> None:
        self._add(self._filling.ready, rows)

    def scheduled(self, rows: int) -> None:
        self._add(self._filling.scheduled, rows)

    def done(self, rows: int) -> None:
        self._add(self._filling.done, rows)

    def _add(self, insert: Callable[[int, int], str], rows: int) -> None:
        first, self._made = self._made, self._made + rows
        self._place.run(insert(first, rows))


class At:
    """One size of the table."""

    def __init__(self, empty: Place, large: Place, size: str, plan: Plan) -> None:
        self._sides = {"duly": large, "empty table": empty}
        self._size = size
        self._plan = plan
        self._taken: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._batches = dict.fromkeys(self._sides, 0)

    def figures(self) -> Iterator[Figure]:
        for turn in range(self._plan.repeat):
            self._claims(turn)
            for name in in_order(list(self._sides), turn):
                place = self._sides[name]
                self._plan.say(f"{place.store}: {name}, {self._size}, {turn + 1} of {self._plan.repeat}")
                self._taken["drain"][name].append(self._drain(place))
                self._taken["pick-up"][name].append(self._pick_up(place))
        store, size = self._sides["duly"].store, self._size
        yield self._figure(f"claim of {CLAIM} at {size}, p50", "ms", "claim", SLOWER)
        yield self._figure(f"drain of {self._plan.jobs:,} at {size}", "jobs/s", "drain", RATE)
        yield compared(store, f"idle pick-up at {size}, p50", "ms", self._taken["pick-up"], part="h", keep="kept")

    def _figure(self, what: str, unit: str, name: str, target: Target) -> Figure:
        return compared(
            self._sides["duly"].store,
            what,
            unit,
            self._taken[name],
            target,
            part="h",
            keep="kept",
            short=f"{name} at {self._size}",
        )

    def _claims(self, turn: int) -> None:
        """Claim and finish a hundred at a time, on both sides by turns, and note the p50 of a claim in ms."""
        taken: dict[str, list[float]] = {name: [] for name in self._sides}
        with ExitStack() as stack:
            drivers = {}
            for name, place in self._sides.items():
                self._add_earlier(place, (WARM_UP + self._plan.claims) * CLAIM)
                drivers[name] = stack.enter_context(closing(place.app())).driver
            for number in range(WARM_UP + self._plan.claims):
                for name in in_order(list(drivers), turn + number):
                    seconds = claimed(drivers[name], number + 1)
                    if number >= WARM_UP:
                        taken[name].append(seconds * 1e3)
        for name, place in self._sides.items():
            self._remove_earlier(place)
            self._taken["claim"][name].append(percentile(taken[name], 0.5))

    def _drain(self, place: Place) -> float:
        """Let a worker run the oldest jobs of the queue, and stop when it has; answers jobs a second."""
        jobs = self._plan.jobs
        self._add_earlier(place, jobs + AHEAD)
        with tallied(jobs + AHEAD) as tally:
            orders = Orders(place.arguments, tally.path, jobs + AHEAD, "async", "some", enough=jobs)
            with Child(orders) as child:
                child.await_ready()
                child.go()
                child.told()
            starts = tally.starts()[:jobs]
            if set(tally.runs()[:jobs]) != {1}:
                raise BenchFailed(f"of {jobs} jobs at {self._size}, not all ran once")
        self._remove_earlier(place)
        return jobs / (max(starts) - min(starts))

    def _pick_up(self, place: Place) -> float:
        waits, _ = pick_ups(place, self._plan.pick_ups, idle_s=0.0, queue="quick")
        return percentile(waits, 0.5)

    def _add_earlier(self, place: Place, rows: int) -> None:
        """Add jobs that are due before all others, numbered from 0."""
        name = next(name for name, one in self._sides.items() if one is place)
        self._batches[name] += 1
        start_ms = START_MS - EARLIER_MS * (1 + self._batches[name])
        place.run(Filling(place.store, place.schema, TASK, numbered=True, start_ms=start_ms).ready(0, rows))
        place.settle()

    def _remove_earlier(self, place: Place) -> None:
        """Leave the table as large as it was."""
        digits = f"{START_MS:012x}"
        first = f"{digits[:8]}-{digits[8:]}-0000-0000-000000000000"  # ids sort by time
        for table in ("duly_job", "duly_done"):
            place.run(f"delete from {place.schema}{table} where id < '{first}'")
        place.settle()


def claimed(driver: Driver, token: int) -> float:
    """Claim a hundred and finish them; answers the seconds of the claim."""
    begun = time.perf_counter()
    jobs = driver.run(ops.claim(QUEUE, limit=CLAIM, token=token, worker=WORKER, tasks=[TASK]))
    seconds = time.perf_counter() - begun
    whole(jobs, CLAIM)
    driver.run(ops.finish([Finish(job, SUCCESS) for job in jobs]))
    return seconds
