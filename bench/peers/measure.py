"""What is measured of one contestant: each function gives its figures by name, or raises where a job ran amiss."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figures import percentile
from bench.peers import process
from bench.peers.place import Place
from bench.peers.process import Child, ScriptFailed
from bench.peers.roster import Contestant
from bench.peers.tally import blank, go_file, ready_file, runs


@dataclass(frozen=True)
class Quantity:
    """Something measured: in which table it stands, and whether more of it is better."""

    measure: str
    title: str
    unit: str
    more_is_better: bool = True
    # Whether duly's ratio to each peer is shown, and duly's to the best peer in the last line.
    compared: bool = True


QUANTITIES = {
    "enqueue": Quantity("a", "1 caller", "calls/s"),
    "enqueue p50": Quantity("a", "p50", "ms", False, compared=False),
    "enqueue p99": Quantity("a", "p99", "ms", False, compared=False),
    "enqueue by 16": Quantity("a", "16 callers", "calls/s"),
    "enqueue by 16 p50": Quantity("a", "p50", "ms", False, compared=False),
    "enqueue by 16 p99": Quantity("a", "p99", "ms", False, compared=False),
    "bulk": Quantity("b", "bulk", "rows/s"),
    "drain": Quantity("c", "1 worker", "jobs/s"),
    "drain by 2": Quantity("d", "2 workers", "jobs/s"),
    "call to start p50": Quantity("e", "call → start p50", "ms", False),
    "pick-up p50": Quantity("e", "return → start p50", "ms", False, compared=False),
    "pick-up p95": Quantity("e", "p95", "ms", False, compared=False),
    "pick-up p99": Quantity("e", "p99", "ms", False, compared=False),
    "worker CPU": Quantity("f", "worker CPU", "s / 10,000 jobs", False),
    "server CPU": Quantity("f", "server CPU", "s / 10,000 jobs", False, compared=False),
    "peak memory": Quantity("f", "most memory", "MiB", False, compared=False),
    "WAL": Quantity("f", "WAL", "B/job", False),
}


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    jobs: int = 20_000
    calls: int = 2_000
    rows: int = 20_000
    pick_ups: int = 200
    limit_s: float = 180.0


class WrongRuns(AssertionError):
    """A contestant did not run or record every job once."""


def enqueue(one: Contestant, place: Place, size: Size) -> dict[str, float]:
    """Let one caller and then 16 at once add jobs, and see that all are there."""
    calls = min(size.calls, one.most_calls)
    alone, together = added(one, place, size, ("enqueue", calls, 1), ("enqueue", 2 * calls, 16))
    return {
        "enqueue": alone["calls_per_s"],
        "enqueue p50": alone["p50_ms"],
        "enqueue p99": alone["p99_ms"],
        "enqueue by 16": together["calls_per_s"],
        "enqueue by 16 p50": together["p50_ms"],
        "enqueue by 16 p99": together["p99_ms"],
    }


def bulk(one: Contestant, place: Place, size: Size) -> dict[str, float]:
    """Add jobs a thousand at a time, and see that all are there."""
    [told] = added(one, place, size, ("bulk", min(size.rows, one.most_jobs)))
    return {"bulk": told["rows_per_s"]}


def added(one: Contestant, place: Place, size: Size, *commands: tuple[object, ...]) -> list[Any]:
    """Run commands that only add jobs on a new database."""
    address = place.new()
    try:
        process.run(one.peer, "fill", address, 0, *one.settings, limit_s=size.limit_s)
        told = [
            process.run(one.peer, str(command), address, *words, *one.settings, limit_s=size.limit_s)
            for command, *words in commands
        ]
        waiting = process.run(one.peer, "recorded", address, *one.settings, limit_s=size.limit_s)["waiting"]
    finally:
        place.drop(address)
    enqueued = sum(said["enqueued"] for said in told)
    if waiting != enqueued:
        raise WrongRuns(f"{enqueued} jobs were enqueued, and {waiting} are there")
    return told


def drain_alone(one: Contestant, place: Place, size: Size) -> dict[str, float]:
    """Drain with one worker process, and say what that cost."""
    drained = drain(one, place, size, workers=1)
    per_10_000 = 10_000 / drained.jobs
    costs = {
        "worker CPU": drained.worker_cpu_s * per_10_000,
        "server CPU": None if drained.server_cpu_s is None else drained.server_cpu_s * per_10_000,
        "peak memory": drained.peak_mib,
        "WAL": None if drained.wal_bytes is None else drained.wal_bytes / drained.jobs,
    }
    return {"drain": drained.jobs / drained.seconds, **{name: cost for name, cost in costs.items() if cost is not None}}


def drain_in_pair(one: Contestant, place: Place, size: Size) -> dict[str, float]:
    drained = drain(one, place, size, workers=2)
    return {"drain by 2": drained.jobs / drained.seconds}


@dataclass(frozen=True)
class Drained:
    """What one drain gave."""

    jobs: int
    seconds: float
    worker_cpu_s: float
    server_cpu_s: float | None
    peak_mib: float | None
    wal_bytes: float | None


def drain(one: Contestant, place: Place, size: Size, *, workers: int) -> Drained:
    """Fill a new database, then let the workers drain it: from the first handler's start to the last finish."""
    jobs = min(size.jobs, one.most_jobs)
    address = place.new()
    try:
        process.run(one.peer, "fill", address, jobs, *one.settings, limit_s=size.limit_s)
        place.settle(address)
        with tempfile.TemporaryDirectory() as folder:
            return drained(one, place, address, blank(Path(folder) / "tally", jobs), jobs, workers, size.limit_s)
    finally:
        place.drop(address)


def drained(
    one: Contestant, place: Place, address: str, tally: Path, jobs: int, workers: int, limit_s: float
) -> Drained:
    started = [process.start(one.peer, "work", address, tally, *one.settings) for _ in range(workers)]
    try:
        begin_together(started, tally, limit_s)
        wal_before, cpu_before = place.wal_bytes(), place.server_cpu_s()
        go_file(tally).touch()
        told = [process.last_line(worker.finish(limit_s)) for worker in started]
    finally:
        for worker in started:
            worker.stop(patience_s=1)
    cpu_after, wal_after = place.server_cpu_s(), place.wal_bytes()
    recorded = process.run(one.peer, "recorded", address, *one.settings, limit_s=limit_s)
    check(jobs, runs(tally), recorded)
    worked = [worker for worker in told if worker["first_at"]]
    finishes = [recorded["recorded_at"], *(worker.get("finished_at") for worker in told)]
    finished_at = max([worker["last_at"] for worker in worked] + [at for at in finishes if at])
    return Drained(
        jobs,
        finished_at - min(worker["first_at"] for worker in worked),
        sum(worker["cpu_s"] for worker in told),
        difference(cpu_after, cpu_before),
        max((worker["peak_mib"] for worker in told if worker["peak_mib"]), default=None),
        difference(wal_after, wal_before),
    )


def begin_together(workers: Sequence[Child], tally: Path, limit_s: float) -> None:
    """Wait until each worker has imported what it needs and says that it is ready."""
    until = time.monotonic() + min(limit_s, 60)
    while not all(ready_file(tally, worker.pid).exists() for worker in workers):
        for worker in workers:
            if not worker.running():
                worker.finish()  # it says why
        if time.monotonic() > until:
            raise ScriptFailed("a worker was not ready within 60 s")
        time.sleep(0.01)


def difference(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before


def check(jobs: int, counted: tuple[int, int], recorded: Mapping[str, Any]) -> None:
    """Refuse a run in which a job ran never or twice, still waits, or is not recorded by a peer that records."""
    if counted != (jobs, 0) or recorded["waiting"] != 0 or recorded["done"] not in (jobs, None):
        raise WrongRuns(f"{jobs} jobs, {counted[0]} ran, {counted[1]} more than once; recorded: {dict(recorded)}")


def pick_up(one: Contestant, place: Place, size: Size) -> dict[str, float]:
    """Enqueue now and then from a second process, and see how soon an idle worker starts each job."""
    address = place.new()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process.run(one.peer, "fill", address, 0, *one.settings, limit_s=size.limit_s)
        worker = process.start(one.peer, "serve", address, log, *one.settings)
        try:
            process.run(one.peer, "trickle", address, 0, 1, 0, *one.settings, limit_s=size.limit_s)
            started(log, 1)
            time.sleep(1.5)
            times = process.run(one.peer, "trickle", address, 1, size.pick_ups, 0.02, *one.settings)
            starts = started(log, 1 + size.pick_ups)
        finally:
            worker.stop(patience_s=10)
            place.drop(address)
    waits = [(starts[int(number)] - returned) * 1e3 for number, (_, returned) in times.items()]
    from_call = [(starts[int(number)] - called) * 1e3 for number, (called, _) in times.items()]
    shares = {f"pick-up p{share}": percentile(waits, share / 100) for share in (50, 95, 99)}
    return {"call to start p50": percentile(from_call, 0.5), **shares}


def started(log: Path, jobs: int) -> dict[int, float]:
    """Wait until this many jobs have started, and read when each did."""
    until = time.monotonic() + 30
    lines: list[str] = []
    while time.monotonic() < until:
        lines = log.read_text().splitlines() if log.exists() else []
        if len(lines) >= jobs:
            pairs = [line.split() for line in lines]
            if len({number for number, _ in pairs}) != len(pairs):
                raise WrongRuns(f"{len(pairs)} jobs started, some of them twice")
            return {int(number): float(at) for number, at in pairs}
        time.sleep(0.02)
    raise WrongRuns(f"after 30 s, {len(lines)} of {jobs} jobs have started")


Measuring = Callable[[Contestant, Place, Size], dict[str, float]]
# (f) stands beside (c): the same drain gives both.
MEASURING: dict[str, Measuring] = {
    "a": enqueue,
    "b": bulk,
    "c": drain_alone,
    "d": drain_in_pair,
    "e": pick_up,
}
