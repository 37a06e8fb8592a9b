"""(e) how soon an idle worker starts what is enqueued, in its own process and in another, and what idling costs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing

from bench.figures import Figure, Target, alone, percentile
from bench.parts import load
from bench.parts.child import Child
from bench.parts.orders import Orders
from bench.parts.part import Part, Plan, in_order, tallied, wait_for
from bench.parts.place import BenchFailed, Place
from bench.parts.worker import CALM_SECONDS, pause_s

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
TARGETS = {
    ("sqlite", "same process", "p50"): Target(at_most=1.5),
    ("sqlite", "across processes", "p50"): Target(at_most=2.5),
    ("postgres", "same process", "p50"): Target(at_most=3),
    ("postgres", "same process", "p99"): Target(at_most=15),
    ("postgres", "across processes", "p50"): Target(at_most=3),
    ("postgres", "across processes", "p99"): Target(at_most=15),
}
IDLE = Target(at_most=1)


class PickUp(Part):
    """The time from the return of an enqueue to the start of its handler; below zero where that was faster."""

    letter = "e"
    title = "idle pick-up"

    def __init__(self, place: Place, plan: Plan) -> None:
        super().__init__(place, plan)
        self._taken: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._idle: list[float] = []

    def run(self, turn: int) -> None:
        """Measure both ways."""
        for where in in_order(("same process", "across processes"), turn):
            waits = self._same_process() if where == "same process" else self._across_processes()
            for name, share in SHARES.items():
                self._taken[where, name].append(percentile(waits, share))

    def _same_process(self) -> list[float]:
        self.place.fresh()
        jobs = self.plan.pick_ups + 1
        with (
            tallied(jobs) as tally,
            Child(Orders(self.place.arguments, tally.path, jobs, "async", "pick up")) as child,
        ):
            child.await_ready()
            child.go()
            returned = child.told().returned
            return waited(tally.runs(), tally.starts(), returned)

    def _across_processes(self) -> list[float]:
        self.place.fresh()
        waits, idle = pick_ups(self.place, self.plan.pick_ups, idle_s=self.plan.idle_s)
        self._idle.append(idle)
        return waits

    def figures(self) -> Iterator[Figure]:
        """Give the waits, and what an idle worker uses."""
        store = self.place.store
        for (where, name), samples in sorted(self._taken.items(), key=lambda item: (item[0][0] != "same process",)):
            target = TARGETS.get((store, where, name))
            short = f"pick-up {where.split()[0]}" if name == "p50" else ""
            yield alone(
                store, f"idle pick-up, {where}, {name}", "ms", samples, target, part="e", keep="kept", short=short
            )
        yield alone(store, "CPU of an idle worker", "% of a core", self._idle, IDLE, part="e", short="idle CPU")


def pick_ups(place: Place, count: int, *, idle_s: float, queue: str = "default") -> tuple[list[float], float]:
    """Start a worker, let it idle, then enqueue one by one; answers the waits in ms, and CPU in percent while idle."""
    jobs = count + 1
    with (
        tallied(jobs) as tally,
        closing(place.app()) as app,
        Child(Orders(place.arguments, tally.path, jobs, "async", "serve", queue=queue)) as child,
    ):
        task = load.declare(app, "async", load.unheard, queue=queue)
        child.await_ready()
        child.go()
        task.enqueue(0)
        wait_for(lambda: tally.complete(1), "the worker has not run its first job")
        time.sleep(CALM_SECONDS)
        before, begun = child.ask().cpu_s, time.monotonic()
        time.sleep(idle_s)
        idle = (child.ask().cpu_s - before) / (time.monotonic() - begun) * 100
        returned = [time.time()]
        for number in range(1, jobs):
            task.enqueue(number)
            returned.append(time.time())
            time.sleep(pause_s())
        wait_for(tally.complete, "jobs that were enqueued one by one have not all run")
        child.stop()
        return waited(tally.runs(), tally.starts(), returned), idle


def waited(runs: bytes, starts: Sequence[float], returned: Sequence[float]) -> list[float]:
    """Give how long each job waited, in ms, without the first, which warmed up."""
    if set(runs) != {1}:
        raise BenchFailed(f"of {len(runs)} jobs, {len(runs) - runs.count(1)} did not run once")
    return [(start - back) * 1e3 for start, back in zip(starts[1:], returned[1:], strict=True)]
