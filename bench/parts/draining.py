"""(c) drain no-op jobs by one worker process, (d) by two, (f) at what cost, (i) the path people really use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import NamedTuple

from bench.figures import Figure, Target, alone, compared, kept
from bench.parts import load
from bench.parts.child import Child
from bench.parts.load import Kind
from bench.parts.orders import Orders, Told
from bench.parts.part import Part, Plan, in_order, tallied
from bench.parts.place import BenchFailed, Place, Recorded
from duly.rules.keys import Ids

HALF_OF_LIMIT = Target(at_least=0.5)
SYNC = Target(at_least=0.6)
REAL_PATH = Target(at_least=0.5)
CPU = {True: Target(at_most=0.5), False: Target(at_most=0.4)}
BULK = 1_000


class Way(NamedTuple):
    """One way to drain: which handlers, whether what succeeded is kept, and how many processes."""

    kind: Kind = "async"
    keep: bool = True
    workers: int = 1


class Taken(NamedTuple):
    """One way to drain the limit: how many at once, and whether they are kept."""

    batch: int
    keep: bool = False

    def __str__(self) -> str:
        return f"limit by {self.batch:,}{', kept' if self.keep else ''}"


# What is kept is judged beside a limit that keeps it too, and shown beside those that keep nothing.
LIMIT_KEPT, LIMIT, LIMIT_OF_MANY = Taken(100, keep=True), Taken(100), Taken(1_000)
ASYNC, ASYNC_GONE = Way("async"), Way("async", keep=False)
SYNC_KEPT, SYNC_GONE = Way("sync"), Way("sync", keep=False)
TWO = Way("async", workers=2)
REAL = Way("typed")


@dataclass(frozen=True)
class Drained:
    """What one drain gave."""

    jobs: int
    seconds: float
    told: tuple[Told, ...]
    wal: int

    @property
    def rate(self) -> float:
        """Jobs a second, from the first handler's start to the last recorded finish."""
        return self.jobs / self.seconds

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all workers, for 10,000 jobs."""
        return sum(told.cpu_s for told in self.told) / self.jobs * 10_000


def drain(
    place: Place,
    way: Way,
    jobs: int,
    *,
    counted: bool = False,
    filler: Callable[[Place, Way, int], None] | None = None,
) -> Drained:
    """Fill empty tables while the workers start, let them go together, and see that every job ran as it should."""
    place.fresh()
    with tallied(jobs) as tally, ExitStack() as stack:
        orders = Orders(place.arguments, tally.path, jobs, way.kind, counted=counted)
        crew = [stack.enter_context(Child(orders)) for _ in range(way.workers)]
        (filler or fill)(place, way, jobs)
        place.settle()
        for child in crew:
            child.await_ready()
        wal = place.wal_bytes()
        for child in crew:
            child.go()
        told = tuple(child.told() for child in crew)
        wal = place.wal_bytes() - wal
        recorded = place.recorded()
        check(way, tally.runs(), recorded)
    begun = min(one.first_at for one in told if one.first_at)
    ended = max(recorded.last_at, *(one.last_at for one in told))
    return Drained(jobs, ended - begun, told, wal)


def fill(place: Place, way: Way, jobs: int) -> None:
    """Enqueue the jobs. The last one is always kept: it tells when the end was recorded."""
    with closing(place.app()) as app:
        task = load.declare(app, way.kind, load.unheard)
        first = jobs if way.keep else jobs - 1
        using = task if way.keep else task.using(keep=0)
        using.enqueue_many(load.calls(using, way.kind, range(first)))
        task.enqueue_many(load.calls(task, way.kind, range(first, jobs)))


def check(way: Way, runs: bytes, recorded: Recorded) -> None:
    """Refuse a run in which a job ran too seldom or too often, still waits, or is not recorded."""
    wrong = sum(ran != due for ran, due in zip(runs, load.expected(way.kind, len(runs)), strict=True))
    if wrong or recorded.live or recorded.succeeded != (len(runs) if way.keep else 1):
        raise BenchFailed(
            f"of {len(runs)} {way.kind} jobs, {wrong} ran too seldom or too often, {recorded.live} are still there, "
            f"{recorded.succeeded} are recorded"
        )


def drain_limit(place: Place, batch: int, jobs: int, *, keep: bool = False) -> float:
    """Drain as many bare rows, keeping them as history or not; answers rows a second."""
    place.fresh()
    new_id = Ids()
    with closing(place.limit()) as limit:
        for first in range(0, jobs + batch, BULK):
            numbers = range(first, min(first + BULK, jobs + batch))
            limit.insert_many([new_id() for _ in numbers], [f'{{"n":{n}}}' for n in numbers])
        place.settle()
        limit.take(batch, keep=keep)  # the first one prepares the statement
        begun = time.perf_counter()
        taken = 0
        while found := limit.take(batch, keep=keep):
            taken += found
        seconds = time.perf_counter() - begun
    if taken != jobs:
        raise BenchFailed(f"the limit took {taken} of {jobs} rows")
    return jobs / seconds


class Drains:
    """The drains of all repetitions: parts that need the same one share it."""

    def __init__(self, place: Place, plan: Plan) -> None:
        self._place = place
        self._plan = plan
        self._made: dict[tuple[Way, int], Drained] = {}
        self._limits: dict[tuple[Taken, int], float] = {}

    def make(self, way: Way, turn: int) -> Drained:
        """Drain in this way, unless that was done in this repetition."""
        if (way, turn) not in self._made:
            self._made[way, turn] = drain(self._place, way, self._plan.jobs)
        return self._made[way, turn]

    def make_limit(self, taken: Taken, turn: int) -> float:
        """Drain the limit, unless that was done in this repetition."""
        if (taken, turn) not in self._limits:
            self._limits[taken, turn] = drain_limit(self._place, taken.batch, self._plan.jobs, keep=taken.keep)
        return self._limits[taken, turn]

    def rates(self, way: Way) -> list[float]:
        """Give jobs a second of all repetitions."""
        return [one.rate for one in self.all(way)]

    def all(self, way: Way) -> list[Drained]:
        """Give the drains of all repetitions."""
        return [self._made[way, turn] for turn in range(self._plan.repeat)]

    def limit_rates(self, taken: Taken) -> list[float]:
        """Give rows a second of all repetitions."""
        return [self._limits[taken, turn] for turn in range(self._plan.repeat)]


class _OfDrains(Part):
    """A part that is made of drains."""

    def __init__(self, place: Place, plan: Plan, drains: Drains) -> None:
        super().__init__(place, plan)
        self.drains = drains


class OneWorker(_OfDrains):
    """Async and sync handlers, kept and not, beside the limit by 100 and by 1,000."""

    letter = "c"
    title = "drain"

    def run(self, turn: int) -> None:
        """Drain in every way, and the limit in between."""
        sides: Sequence[Way | Taken] = (
            ASYNC,
            LIMIT_KEPT,
            LIMIT,
            ASYNC_GONE,
            LIMIT_OF_MANY,
            SYNC_KEPT,
            SYNC_GONE,
        )
        for side in in_order(sides, turn):
            if isinstance(side, Taken):
                self.drains.make_limit(side, turn)
            else:
                self.drains.make(side, turn)

    def figures(self) -> Iterator[Figure]:
        """Give jobs a second beside the limits; the sync ones beside the async ones too."""
        store, jobs = self.place.store, f"{self.plan.jobs:,}"
        limits = {str(taken): self.drains.limit_rates(taken) for taken in (LIMIT, LIMIT_OF_MANY)}
        for way, like in ((ASYNC, LIMIT_KEPT), (ASYNC_GONE, LIMIT)):
            samples = {"duly": self.drains.rates(way), str(like): self.drains.limit_rates(like), **limits}
            yield compared(
                store,
                f"drain of {jobs} no-op jobs, async",
                "jobs/s",
                samples,
                HALF_OF_LIMIT,
                judged=str(like),
                part="c",
                keep=kept(way.keep),
                short=f"drain {kept(way.keep)}",
            )
        for way in (SYNC_KEPT, SYNC_GONE):
            asynchronous = self.drains.rates(ASYNC if way.keep else ASYNC_GONE)
            samples = {"duly": self.drains.rates(way), "async": asynchronous, **limits}
            yield compared(
                store,
                f"drain of {jobs} no-op jobs, sync",
                "jobs/s",
                samples,
                SYNC,
                judged="async",
                part="c",
                keep=kept(way.keep),
            )


class TwoWorkers(_OfDrains):
    """Two worker processes on one queue."""

    letter = "d"
    title = "drain by two workers"

    def run(self, turn: int) -> None:
        """Drain by one and by two."""
        for way in in_order((ASYNC, TWO), turn):
            self.drains.make(way, turn)

    def figures(self) -> Iterator[Figure]:
        """Give jobs a second beside one worker."""
        samples = {"duly": self.drains.rates(TWO), "1 worker": self.drains.rates(ASYNC)}
        what = f"drain of {self.plan.jobs:,} no-op jobs, async, 2 workers"
        yield compared(self.place.store, what, "jobs/s", samples, part="d", keep="kept", short="2 workers")


class Cost(_OfDrains):
    """CPU and memory of the drains by one worker; statements and log of others, in which they are counted."""

    letter = "f"
    title = "cost of a job"

    def __init__(self, place: Place, plan: Plan, drains: Drains) -> None:
        super().__init__(place, plan, drains)
        self._counted: dict[Way, list[Drained]] = {ASYNC: [], ASYNC_GONE: []}

    def run(self, turn: int) -> None:
        """Drain plainly, and once more with everything counted."""
        for way in in_order((ASYNC, ASYNC_GONE), turn):
            self.drains.make(way, turn)
            if turn == 0:  # counts do not waver
                self._counted[way].append(drain(self.place, way, self.plan.counted, counted=True))

    def figures(self) -> Iterator[Figure]:
        """Give what ten thousand jobs and one job cost."""
        store = self.place.store
        for way, counted in self._counted.items():
            keep, runs = kept(way.keep), self.drains.all(way)
            cpu_s = [run.cpu_s for run in runs]
            yield alone(
                store,
                "worker CPU, 10,000 no-op jobs",
                "s",
                cpu_s,
                CPU[way.keep],
                part="f",
                keep=keep,
                short=f"CPU {keep}",
            )
            resident = [run.told[0].resident_mib for run in runs]
            yield alone(store, "worker memory at most", "MiB", resident, part="f", keep=keep)
            for what in ("statements", "commits"):
                each = [getattr(run.told[0], what) / run.jobs for run in counted]
                yield alone(store, f"{what} a job", what, each, part="f", keep=keep)
            yield alone(
                store, "WAL of claim and finish", "B/job", [run.wal / run.jobs for run in counted], part="f", keep=keep
            )


class RealPath(_OfDrains):
    """Keyed jobs with typed arguments and results, one in a hundred of which is retried."""

    letter = "i"
    title = "keyed, typed, retried"

    def run(self, turn: int) -> None:
        """Drain them, and plain ones."""
        for way in in_order((ASYNC, REAL), turn):
            self.drains.make(way, turn)

    def figures(self) -> Iterator[Figure]:
        """Give jobs a second beside those of plain no-op jobs."""
        samples = {"duly": self.drains.rates(REAL), "(c) async": self.drains.rates(ASYNC)}
        what = "drain of keyed, typed jobs, 1 % retried, result kept"
        yield compared(self.place.store, what, "jobs/s", samples, REAL_PATH, part="i", keep="kept", short="real path")
