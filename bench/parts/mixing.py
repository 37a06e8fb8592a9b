"""(g) an hour in miniature: producers and a worker together, small work, some failures, results kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

from bench.figures import Figure, alone, percentile
from bench.parts import load
from bench.parts.child import Child
from bench.parts.draining import Way, check
from bench.parts.orders import Orders
from bench.parts.part import Part, Plan, tallied, wait_for
from bench.parts.place import Place
from duly.app.task import Task

PRODUCERS = 2
PRODUCING_SECONDS = 3.0


class Mixed(Part):
    """Two producers enqueue one by one while one worker runs handlers of a millisecond; one job in a hundred fails."""

    letter = "g"
    title = "producers and a worker"

    def __init__(self, place: Place, plan: Plan) -> None:
        super().__init__(place, plan)
        self._rates: list[float] = []
        self._waits: list[float] = []

    def run(self, turn: int) -> None:
        """Begin when the worker has run its first job, and wait until all is done."""
        self.place.fresh()
        most = self.plan.mixed
        with (
            tallied(most) as tally,
            closing(self.place.app()) as app,
            Child(Orders(self.place.arguments, tally.path, most, "mixed", "serve")) as child,
        ):
            task = load.declare(app, "mixed", load.unheard)
            child.await_ready()
            child.go()
            task.enqueue(*load.arguments("mixed", 0))
            wait_for(lambda: tally.complete(1), "the worker has not run its first job")
            begun = time.time()
            returned = self._produce(task)
            jobs = 1 + len(returned)
            wait_for(lambda: self.place.recorded().succeeded >= jobs, "jobs of producers have not all succeeded")
            recorded = self.place.recorded()
            child.stop()
            check(Way("mixed"), tally.runs()[:jobs], recorded)
            starts = tally.starts()
        self._rates.append(len(returned) / (recorded.last_at - begun))
        self._waits.append(percentile([(starts[n] - back) * 1e3 for n, back in returned.items()], 0.99))

    def _produce(self, task: Task[..., object, object]) -> dict[int, float]:
        """Enqueue from several threads, for a few seconds at most; answers when the call of each job returned."""
        numbers = iter(range(1, self.plan.mixed))
        returned: dict[int, float] = {}
        failures: list[BaseException] = []
        end_at = time.monotonic() + PRODUCING_SECONDS

        def produce() -> None:
            try:
                while time.monotonic() < end_at and (n := next(numbers, None)) is not None:
                    task.enqueue(*load.arguments("mixed", n))
                    returned[n] = time.time()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=produce, daemon=True) for _ in range(PRODUCERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return returned

    def figures(self) -> Iterator[Figure]:
        """Give jobs a second from the first enqueue to the last recorded finish, and how long jobs waited."""
        store = self.place.store
        what = f"{PRODUCERS} producers and 1 worker, 1 ms handlers, 256 B, 1 % retried"
        yield alone(store, what, "jobs/s", self._rates, part="g", keep="kept", short="mixed")
        yield alone(store, f"{what}, p99 wait", "ms", self._waits, part="g", keep="kept")
