"""duly's worker alone: what an idle one costs, and how its memory grows over many jobs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.figures import percentile
from bench.peers import process
from bench.peers.measure import WrongRuns, check, started
from bench.peers.place import Place
from bench.peers.roster import duly_on
from bench.peers.tally import blank, go_file, runs
from bench.report import progress

# The first figures of a worker's memory are taken when it has done this many jobs.
WARM = 5_000
UNITS = {"CPU": "% of a core", "resident": "MiB"}


def measure_idle(place: Place, idle_s: float) -> dict[str, float]:
    """Measure what an idle worker of duly costs, and how soon it starts what another process enqueues."""
    settings = duly_on(place.store)[0].settings
    address = place.new()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process.run("duly", "fill", address, 0, *settings)
        worker = process.start("duly", "serve", address, log, *settings)
        try:
            return idle_figures(worker.pid, address, log, settings, idle_s)
        finally:
            worker.stop()
            place.drop(address)


def idle_figures(pid: int, address: str, log: Path, settings: Sequence[str], idle_s: float) -> dict[str, float]:
    progress("waiting for the worker to be idle")
    process.run("duly", "trickle", address, 0, 1, 0, *settings)
    started(log, 1)
    time.sleep(3)
    progress(f"{idle_s:g} s of nothing to do")
    before, begun = process.cpu_seconds(pid), time.monotonic()
    time.sleep(idle_s)
    cpu = (process.cpu_seconds(pid) - before) / (time.monotonic() - begun) * 100
    resident = process.resident_mib(pid)
    progress("200 jobs, one by one")
    times = process.run("duly", "trickle", address, 1, 200, 0.02, *settings)
    starts = started(log, 201)
    waits = [(starts[int(number)] - returned) * 1000 for number, (_, returned) in times.items()]
    picked = {f"enqueue returned → handler started, p{share}": percentile(waits, share / 100) for share in (50, 95, 99)}
    return {**picked, "CPU": cpu, "resident": resident or 0.0}


def unit(name: str) -> str:
    return UNITS.get(name, "ms")


def measure_memory(place: Place, jobs: int) -> dict[str, float]:
    """Watch the memory of one worker while it drains many jobs."""
    settings = duly_on(place.store)[0].settings
    address = place.new()
    try:
        with tempfile.TemporaryDirectory() as folder:
            tally = blank(Path(folder) / "tally", jobs)
            progress(f"{place.store}: filling {jobs:,} jobs")
            process.run("duly", "fill", address, jobs, *settings)
            place.settle(address)
            progress(f"{place.store}: draining {jobs:,} jobs")
            samples = watch(address, tally, settings)
            check(jobs, runs(tally), process.run("duly", "recorded", address, *settings))
    finally:
        place.drop(address)
    return memory_figures(samples)


def watch(address: str, tally: Path, settings: Sequence[str]) -> list[tuple[int, float]]:
    """Run a worker and sample how many jobs it has done and how much it holds."""
    go_file(tally).touch()
    worker = process.start("duly", "work", address, tally, *settings)
    samples = []
    try:
        while worker.running():
            resident = process.resident_mib(worker.pid)
            if resident is not None:
                samples.append((runs(tally)[0], resident))
            time.sleep(0.1)
    finally:
        worker.stop()
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
