"""`python -m bench.engine`: duly's worker beside its peers, one worker process each. `bench/README.md` explains it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from bench import report
from bench.database import refuse_memory
from bench.figures import Spread, percentile
from bench.peers import process
from bench.peers.tally import blank, runs
from duly.store.sqlite import file_system
from tests.servers.postgres import PostgresServer

RESULTS = Path(__file__).parent / "results"
CALM = {"autovacuum": "off", "max_wal_size": "8GB", "checkpoint_timeout": "1h"}
# The first figures of a worker's memory are taken when it has done this many jobs.
WARM = 5_000


@dataclass(frozen=True)
class Contestant:
    """One way to drain the queue: whose script, and the settings its `fill` and its `work` take."""

    name: str
    peer: str
    store: str
    work: tuple[str, ...]
    fill: tuple[str, ...] = ()


# PgQueuer: per batch size the best of one manager, one with a pool of 5, and 5 managers (its own benchmark has 5).
# Huey: one thread is its fastest; 4 are what people run.
CONTESTANTS = (
    Contestant("duly, async handlers", "duly", "postgres", ("async",), ("async",)),
    Contestant("duly, sync handlers", "duly", "postgres", ("sync",), ("sync",)),
    Contestant("PgQueuer, batch 10, 5 managers", "pgqueuer", "postgres", ("10", "5", "single")),
    Contestant("PgQueuer, batch 100, 5 managers", "pgqueuer", "postgres", ("100", "5", "single")),
    Contestant("PgQueuer, batch 1000, pool of 5", "pgqueuer", "postgres", ("1000", "1", "pool")),
    Contestant("duly, async handlers", "duly", "sqlite", ("async",), ("async",)),
    Contestant("duly, sync handlers", "duly", "sqlite", ("sync",), ("sync",)),
    Contestant("Huey, 1 thread", "huey", "sqlite", ("1",)),
    Contestant("Huey, 4 threads", "huey", "sqlite", ("4",)),
)


@dataclass(frozen=True)
class Drained:
    """What one run gave."""

    jobs: int
    seconds: float
    wall_s: float
    cpu_s: float
    versions: dict[str, str]

    @property
    def rate(self) -> float:
        return self.jobs / self.seconds


class WrongRuns(AssertionError):
    """A contestant did not run every job once, or did not record it."""


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server is removed then, too
    options = parse()
    RESULTS.mkdir(exist_ok=True)
    refuse_memory(RESULTS)
    about = report.machine(RESULTS)
    measure = measure_idle if options.idle else measure_memory if options.memory else measure_drain
    document = {"about": about, **{store: measure(store, options, about) for store in options.stores}}
    about["load_at_end"] = round(os.getloadavg()[0], 2)
    report.progress("")
    name = "idle" if options.idle else "memory" if options.memory else "engine"
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    for key, value in about.items():
        print(f"{key + ':':15} {value}")
    if about["load_at_start"] > about["cores"] / 2:
        print(f"\nThe machine was busy (load {about['load_at_start']}): repeat this on a quiet one.")


def measure_drain(store: str, options: argparse.Namespace, about: dict[str, Any]) -> dict[str, Any]:
    """Let every contestant drain the same number of jobs, as often as asked, there and back in the order above."""
    mine = [one for one in CONTESTANTS if one.store == store and wanted(one, options.only)]
    for peer in {one.peer for one in mine}:
        process.install(peer)
    took: dict[str, list[Drained]] = {one.name: [] for one in mine}
    with place(store, about, CALM) as new_address:
        for turn in range(options.repeat):
            for one in mine if turn % 2 == 0 else reversed(mine):
                report.progress(f"{store}: {one.name}, run {turn + 1} of {options.repeat}")
                took[one.name].append(drain(one, new_address(), options.jobs or 20_000))
    show_drain(store, took)
    return {name: [vars(run) for run in runs] for name, runs in took.items()}


def wanted(contestant: Contestant, only: str | None) -> bool:
    return only is None or (contestant.peer == "duly") == (only == "duly")


def drain(contestant: Contestant, address: str, jobs: int) -> Drained:
    """Fill a new database, then time one worker process from its first handler's start to its last recorded finish."""
    peer = contestant.peer
    process.run(peer, "fill", address, jobs, *contestant.fill)
    settle(address)
    with tempfile.TemporaryDirectory() as folder:
        tally = blank(Path(folder) / "tally", jobs)
        begun = time.monotonic()
        told = process.run(peer, "work", address, tally, *contestant.work)
        wall_s = time.monotonic() - begun
        recorded = process.run(peer, "recorded", address)
        check(contestant.name, jobs, runs(tally), recorded)
    finished_at = max(told["last_at"], recorded["recorded_at"] or 0)
    return Drained(jobs, finished_at - told["first_at"], wall_s, told["cpu_s"], told["versions"])


def settle(address: str) -> None:
    """Leave no work behind that the worker would pay for."""
    if address.startswith("postgresql://"):
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute("vacuum (analyze)")
            connection.execute("checkpoint")
    os.sync()


def check(name: str, jobs: int, counted: tuple[int, int], recorded: dict[str, Any]) -> None:
    """Refuse a run in which a job ran never or twice, still waits, or is not recorded by a peer that records."""
    if counted != (jobs, 0) or recorded["waiting"] != 0 or recorded["done"] not in (jobs, None):
        raise WrongRuns(f"{name}: {jobs} jobs, {counted[0]} ran, {counted[1]} more than once; recorded: {recorded}")


def show_drain(store: str, took: dict[str, list[Drained]]) -> None:
    """Print one line a contestant: duly's ratios to it, then its own figures."""
    rates = {name: Spread(tuple(run.rate for run in runs)) for name, runs in took.items()}
    ours = [name for name in rates if name.startswith("duly")]
    head = [f"{store}: drain", *(f"{name} /" for name in ours), "jobs/s", "wall s", "CPU s / 10,000"]
    table(head, [drain_row(name, runs, rates, ours) for name, runs in took.items()])
    versions = {name: version for runs in took.values() for name, version in runs[0].versions.items()}
    print("; ".join(f"{name} {version}" for name, version in sorted(versions.items())), end="\n\n")


def drain_row(name: str, runs: Sequence[Drained], rates: dict[str, Spread], ours: Sequence[str]) -> list[str]:
    wall_s = Spread(tuple(run.wall_s for run in runs))
    cpu_s = Spread(tuple(run.cpu_s / run.jobs * 10_000 for run in runs))
    return [
        name,
        *(report.spread_text(rates[our].over(rates[name]), report.ratio_text) for our in ours),
        report.spread_text(rates[name], report.number_text),
        report.number_text(wall_s.median),
        report.number_text(cpu_s.median),
    ]


def measure_idle(store: str, options: argparse.Namespace, about: dict[str, Any]) -> dict[str, float]:
    """Measure what an idle worker of duly costs, and how soon it starts what another process enqueues."""
    with place(store, about) as new_address, tempfile.TemporaryDirectory() as folder:
        address, log = new_address(), Path(folder) / "log"
        process.run("duly", "fill", address, 0, "async")
        worker = process.start("duly", "serve", address, log)
        try:
            figures = idle_figures(worker.pid, address, log, options)
        finally:
            process.stop(worker)
    rows = [[name, report.number_text(value), unit(name)] for name, value in figures.items()]
    table([f"{store}: idle", "", ""], rows)
    return figures


def idle_figures(pid: int, address: str, log: Path, options: argparse.Namespace) -> dict[str, float]:
    report.progress(f"{address}: waiting for the worker to be idle")
    process.run("duly", "trickle", address, 0, 1, 0)
    started(log, 1)
    time.sleep(3)
    report.progress(f"{address}: {options.idle_seconds} s of nothing to do")
    before, begun = process.cpu_seconds(pid), time.monotonic()
    time.sleep(options.idle_seconds)
    cpu = (process.cpu_seconds(pid) - before) / (time.monotonic() - begun) * 100
    resident = process.resident_mib(pid)
    report.progress(f"{address}: 200 jobs, one by one")
    returned = process.run("duly", "trickle", address, 1, 200, 0.02)
    starts = started(log, 201)
    waits = [(starts[int(number)] - at) * 1000 for number, at in returned.items()]
    picked = {f"enqueue returned → handler started, p{share}": percentile(waits, share / 100) for share in (50, 95, 99)}
    return {**picked, "CPU": cpu, "resident": resident or 0.0}


def unit(name: str) -> str:
    return {"CPU": "% of a core", "resident": "MiB"}.get(name, "ms")


def started(log: Path, jobs: int) -> dict[int, float]:
    """Wait until this many jobs have started, and read when each did."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        lines = log.read_text().splitlines() if log.exists() else []
        if len(lines) >= jobs:
            pairs = [line.split() for line in lines]
            if len({number for number, _ in pairs}) != len(pairs):
                raise WrongRuns(f"{len(pairs)} jobs started, some of them twice")
            return {int(number): float(at) for number, at in pairs}
        time.sleep(0.02)
    raise WrongRuns(f"after 30 s, {len(lines)} of {jobs} jobs have started")


def measure_memory(store: str, options: argparse.Namespace, about: dict[str, Any]) -> dict[str, float]:
    """Watch the memory of one worker while it drains many jobs."""
    jobs = options.jobs or 200_000
    with place(store, about) as new_address, tempfile.TemporaryDirectory() as folder:
        address, tally = new_address(), blank(Path(folder) / "tally", jobs)
        report.progress(f"{store}: filling {jobs:,} jobs")
        process.run("duly", "fill", address, jobs, "async")
        settle(address)
        report.progress(f"{store}: draining {jobs:,} jobs")
        samples = watch(address, tally)
        check(f"duly, {store}", jobs, runs(tally), process.run("duly", "recorded", address))
    figures = memory_figures(samples)
    table([f"{store}: {jobs:,} jobs", ""], [[name, report.number_text(value)] for name, value in figures.items()])
    return figures


def watch(address: str, tally: Path) -> list[tuple[int, float]]:
    """Run a worker and sample how many jobs it has done and how much it holds."""
    worker = process.start("duly", "work", address, tally, "async")
    samples = []
    try:
        while worker.poll() is None:
            resident = process.resident_mib(worker.pid)
            if resident is not None:
                samples.append((runs(tally)[0], resident))
            time.sleep(0.1)
    finally:
        process.stop(worker)
    return samples


def memory_figures(samples: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Compare the first sample of a warm worker with the most it ever holds later."""
    warm = [(done, resident) for done, resident in samples if done >= WARM]
    if not warm:
        raise WrongRuns(f"the worker ended before {WARM:,} jobs were seen done: ask for more --jobs")
    least, most = warm[0][1], max(resident for _, resident in warm)
    return {
        "first sample after, jobs": warm[0][0],
        "MiB then": least,
        "most MiB later": most,
        "last MiB": warm[-1][1],
        "growth, MiB": most - least,
        "samples": len(warm),
    }


@contextmanager
def place(store: str, about: dict[str, Any], settings: dict[str, str] | None = None) -> Iterator[Callable[[], str]]:
    """Give a function that makes a new database, and note what it is; all are removed at the end."""
    if store == "postgres":
        refuse_memory(Path(tempfile.gettempdir()))
        with PostgresServer(durable=True, settings=settings) as server:
            about["postgres"] = describe(server.url)
            yield server.new_database
        return
    with tempfile.TemporaryDirectory(prefix="run-", dir=RESULTS) as folder:
        about["sqlite files"] = f"{RESULTS} ({file_system(RESULTS)})"
        yield lambda: str(Path(tempfile.mkdtemp(dir=folder)) / "jobs.db")


def describe(url: str) -> str:
    names = ("server_version", "fsync", "synchronous_commit", "full_page_writes", "autovacuum")
    with psycopg.connect(url) as connection:
        return ", ".join(f"{name}={connection.execute(f'show {name}').fetchone()[0]}" for name in names)  # type: ignore[index]


def table(head: list[str], rows: list[list[str]]) -> None:
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    print()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--store", choices=["sqlite", "postgres"], help="measure only this one")
    parser.add_argument("--jobs", type=int, help="how many to drain (default 20,000, with --memory 200,000)")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions (default 3)")
    parser.add_argument("--only", choices=["duly", "peers"], help="leave the others out")
    parser.add_argument(
        "--idle", action="store_true", help="instead: what an idle worker of duly costs, and its pick-up"
    )
    parser.add_argument("--idle-seconds", type=float, default=20, help="how long it has nothing to do (default 20)")
    parser.add_argument("--memory", action="store_true", help="instead: memory of one worker of duly over many jobs")
    options = parser.parse_args()
    options.stores = [options.store] if options.store else ["postgres", "sqlite"]
    return options


if __name__ == "__main__":
    main()
