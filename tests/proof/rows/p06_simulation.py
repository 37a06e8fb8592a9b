"""P6: the deterministic simulation, and whether it finds the bugs that were planted."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import TypeVar

from tests.proof.breaks import broken
from tests.proof.planted import PLANTED
from tests.proof.simulation import judge
from tests.proof.table import ALL, Figure, Row, Setting

T = TypeVar("T")

ENOUGH = 2_000
PROCESSES = 2
CHUNK = 25


def run(setting: Setting) -> Figure:
    """Run clean worlds, and with each planted bug as many as it takes to find it."""
    first = setting.seed * 1_000_000
    # An executor, because a Pool would start processes for ever that cannot start, and wait for ever for one that died.
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        if setting.broken is not None:
            return _control(pool, setting.broken, first)
        began = time.monotonic()
        seeds, bad = _bad(pool, first, setting.pick(ENOUGH, 100_000))
        clean_s = time.monotonic() - began
        found = dict(pool.map(_found, PLANTED, [first] * len(PLANTED)))
    return _figure(seeds, bad, clean_s, time.monotonic() - began - clean_s, found, first)


def _control(pool: ProcessPoolExecutor, bug: str, first: int) -> Figure:
    """Run the worlds as they are with one bug, until one fails as it must."""
    _, seed = pool.submit(_found, bug, first).result()
    if seed is None:
        return Figure(f"{ENOUGH:,} seeds, 0 violations", True)
    text = f"violation after {seed - first + 1:,} seeds"
    return Figure(text, False, {"found": seed}, f"python -m tests.proof.simulation {seed} --plant {bug} --shorten")


def _bad(pool: ProcessPoolExecutor, first: int, seeds: int) -> tuple[int, list[int]]:
    """Say how many seeds were run and which end badly; enough of those are enough."""
    chunks = (range(start, min(start + CHUNK, first + seeds)) for start in range(first, first + seeds, CHUNK))
    run, bad = 0, list[int]()
    for count, some in _answers(pool, chunks):
        run += count
        bad += some
        if len(bad) >= 10:
            break
    return run, sorted(bad)


def _answers(pool: ProcessPoolExecutor, chunks: Iterable[range]) -> Iterator[tuple[int, list[int]]]:
    """Ask for a few chunks at a time, so that nothing is left to run when nobody asks further."""
    asked: set[Future[tuple[int, list[int]]]] = set()
    for chunk in chunks:
        asked.add(pool.submit(_judged, chunk))
        if len(asked) > 2 * PROCESSES:
            done, asked = wait(asked, return_when=FIRST_COMPLETED)
            yield from (one.result() for one in done)
    yield from (one.result() for one in asked)


def _judged(seeds: range) -> tuple[int, list[int]]:
    return len(seeds), [seed for seed in seeds if judge(seed)]


def _found(bug: str, first: int) -> tuple[str, int | None]:
    """Give the first seed that shows a bug, or None where none of so many does."""
    with broken(bug):
        return bug, next((seed for seed in range(first, first + ENOUGH) if judge(seed)), None)


def _figure(
    seeds: int, bad: list[int], clean_s: float, found_s: float, found: dict[str, int | None], first: int
) -> Figure:
    missed = [bug for bug, seed in found.items() if seed is None]
    after = {bug: seed - first + 1 for bug, seed in found.items() if seed is not None}
    slowest = max(after, key=lambda bug: after[bug], default="")
    text = (
        f"{seeds:,} seeds, {len(bad)} violations, {seeds / clean_s:.0f} seeds/s; "
        f"{len(after)} of {len(found)} planted bugs found in {found_s:.0f} s, "
        f"the last ({slowest}) after {after.get(slowest, 0):,} seeds"
        + (f"; MISSED {', '.join(missed)}" if missed else "")
    )
    repeat = f"python -m tests.proof.simulation {bad[0]} --shorten" if bad else None
    if missed and not bad:
        repeat = f"python -m tests.proof.simulation {first} {first + ENOUGH} --plant {missed[0]}"
    numbers: dict[str, object] = {
        "seeds": seeds,
        "violations": len(bad),
        "clean_s": round(clean_s, 1),
        "found_s": round(found_s, 1),
    }
    numbers |= {"found_after": after, "bad": bad}
    return Figure(text, not bad and not missed, numbers, repeat)


ROW = Row(
    "P6",
    "deterministic simulation of workers, rescue, faults and clocks",
    "2,000 seeds (100,000 in full) without violation, every planted bug found within 2,000",
    run,
    controls=("sim:no_fence",),
    takes=ALL,
)
