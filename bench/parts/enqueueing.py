"""(a) enqueue one by one, by one caller and by many at once; (b) enqueue many in one call."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing

from bench.figures import Figure, Target, alone, compared, percentile
from bench.parts import load
from bench.parts.part import Part, Plan, in_order
from bench.parts.place import BenchFailed, Place
from duly.rules.keys import Ids

LIKE_BARE = Target(at_least=0.9)
GROUPED = Target(at_least=4)
BULK_ROWS, BULK_SHARE = 80_000, 0.6
SLICES = 6
WARM_UP = 20
# On a slow disk there are fewer calls, and not more time.
SLICE_SECONDS, MANY_SECONDS = 0.5, 2.0
BULK = 1_000


class SingleEnqueue(Part):
    """Calls that return when their job is durable, beside an insert and its commit."""

    letter = "a"
    title = "single enqueue"

    def __init__(self, place: Place, plan: Plan) -> None:
        super().__init__(place, plan)
        self._taken: dict[str, list[float]] = defaultdict(list)

    def run(self, turn: int) -> None:
        """Time both in slices by turns, then many callers of duly at once."""
        self.place.fresh()
        new_id = Ids()
        with closing(self.place.app()) as app, closing(self.place.limit()) as limit:
            task = load.declare(app, "async", load.unheard)
            sides: list[tuple[str, Callable[[int], object]]] = [
                ("duly", task.enqueue),
                ("bare insert", lambda n: limit.insert(new_id(), f'{{"n":{n}}}')),
            ]
            spent: dict[str, list[float]] = {name: [] for name, _ in sides}
            for _, call in sides:
                _time_each(call, WARM_UP, 60)
            for number in range(SLICES):
                for name, call in in_order(sides, turn + number):
                    spent[name] += _time_each(call, self.plan.singles // SLICES)
            threads, threads_seconds = self._many_threads(task.enqueue)
            many, seconds = asyncio.run(self._many_coroutines(task.aenqueue))
        for name, times in spent.items():
            self._taken[name].append(len(times) / sum(times))
        self._taken["p50"].append(percentile(spent["duly"], 0.5) * 1e3)
        self._taken["p99"].append(percentile(spent["duly"], 0.99) * 1e3)
        self._taken["many"].append(many / seconds)
        self._taken["threads"].append(threads / threads_seconds)
        see_all(self.place, WARM_UP + len(spent["duly"]) + many + threads)

    async def _many_coroutines(self, call: Callable[[int], Awaitable[object]]) -> tuple[int, float]:
        """Let many coroutines call at once; answers how many calls there were, and how long they took."""
        made = 0
        begun = time.perf_counter()

        async def caller() -> None:
            nonlocal made
            for number in range(max(self.plan.singles // 2, 1)):
                if time.perf_counter() > begun + MANY_SECONDS:
                    return
                await call(number)
                made += 1

        await asyncio.gather(*(caller() for _ in range(self.plan.callers)))
        return made, time.perf_counter() - begun

    def _many_threads(self, call: Callable[[int], object]) -> tuple[int, float]:
        """Let many threads call at once; answers how many calls there were, and how long they took."""
        callers, each = self.plan.callers, max(self.plan.singles // 2, 1)
        made: list[int] = []
        failures: list[BaseException] = []
        together = threading.Barrier(callers + 1)

        def caller() -> None:
            try:
                together.wait()
                made.append(len(_time_each(call, each, MANY_SECONDS)))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=caller, daemon=True) for _ in range(callers)]
        for thread in threads:
            thread.start()
        together.wait()
        begun = time.perf_counter()
        for thread in threads:
            thread.join()
        taken = time.perf_counter() - begun
        if failures:
            raise failures[0]
        return sum(made), taken

    def figures(self) -> Iterator[Figure]:
        """Give calls a second, how long one takes, and what many at once gain."""
        store, taken = self.place.store, self._taken
        one = {"duly": taken["duly"], "bare insert": taken["bare insert"]}
        yield compared(
            store, "single enqueue, 1 caller", "calls/s", one, LIKE_BARE, part="a", keep="kept", short="enqueue"
        )
        for name in ("p50", "p99"):
            yield alone(store, f"single enqueue, 1 caller, {name}", "ms", taken[name], part="a", keep="kept")
        many = {"duly": taken["many"], "1 caller": taken["duly"]}
        what = f"single enqueue, {self.plan.callers} callers"
        yield compared(store, what, "calls/s", many, GROUPED, part="a", keep="kept", short="16 callers")
        threads = {"duly": taken["threads"], "1 caller": taken["duly"]}
        yield compared(store, f"{what} in threads", "calls/s", threads, part="a", keep="kept")


def _time_each(call: Callable[[int], object], count: int, seconds: float = SLICE_SECONDS) -> list[float]:
    taken: list[float] = []
    end_at = time.perf_counter() + seconds
    begun = 0.0
    while len(taken) < count and begun < end_at:
        begun = time.perf_counter()
        call(len(taken))
        taken.append(time.perf_counter() - begun)
    return taken


def see_all(place: Place, expected: int) -> None:
    """Refuse a run whose jobs are not all there."""
    if (found := place.recorded().live) != expected:
        raise BenchFailed(f"{expected} jobs were enqueued, and {found} are there")


class BulkEnqueue(Part):
    """`enqueue_many`, a thousand a commit, with the encoding of the arguments, beside a bare bulk insert."""

    letter = "b"
    title = "bulk enqueue"

    def __init__(self, place: Place, plan: Plan) -> None:
        super().__init__(place, plan)
        self._taken: dict[str, list[float]] = defaultdict(list)

    def run(self, turn: int) -> None:
        """Time both in slices by turns."""
        self.place.fresh()
        new_id = Ids()
        slices = max(self.plan.rows // BULK // 2, 1)
        with closing(self.place.app()) as app, closing(self.place.limit()) as limit:
            task = load.declare(app, "async", load.unheard)

            def ours() -> None:
                task.enqueue_many(load.calls(task, "async", range(2 * BULK)))

            def bare() -> None:
                for _ in range(2):
                    limit.insert_many([new_id() for _ in range(BULK)], [f'{{"n":{n}}}' for n in range(BULK)])

            sides = [("duly", ours), ("bare bulk insert", bare)]
            spent = dict.fromkeys(("duly", "bare bulk insert"), 0.0)
            for number in range(slices + 1):
                for name, work in in_order(sides, turn + number):
                    begun = time.perf_counter()
                    work()
                    spent[name] += (time.perf_counter() - begun) * (number > 0)  # the first only warms up
        for name, seconds in spent.items():
            self._taken[name].append(2 * BULK * slices / seconds)
        see_all(self.place, 2 * BULK * (slices + 1))

    def figures(self) -> Iterator[Figure]:
        """Give rows a second."""
        store = self.place.store
        bare = sorted(self._taken["bare bulk insert"])[len(self._taken["bare bulk insert"]) // 2]
        # PostgreSQL's target is one beside peers.
        target = Target(at_least=min(BULK_ROWS, BULK_SHARE * bare)) if store == "sqlite" else None
        yield compared(
            store,
            "bulk enqueue, 1,000 a commit",
            "rows/s",
            self._taken,
            target,
            judged="value",
            part="b",
            keep="kept",
            short="bulk",
        )
