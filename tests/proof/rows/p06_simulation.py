"""P6: the deterministic simulation, and whether it finds the bugs that were planted."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import NamedTuple

from tests.proof.breaks import TOUCHED, broken
from tests.proof.planted import PLANTED
from tests.proof.simulation import judge, judged
from tests.proof.table import Figure, Row, Setting

ENOUGH = 2_000
PROCESSES = 2
CHUNK = 25
TURN = 10  # worlds of one planted bug in a row


def run(setting: Setting) -> Figure:
    """Run clean worlds, and with each planted bug as many as it takes to find it."""
    first = setting.seed * 1_000_000
    # An executor, because a Pool would start processes for ever that cannot start, and wait for ever for one that died.
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn"), _collect_seldom) as pool:
        if setting.broken is not None:
            return _control(pool, setting.broken, first)
        began = time.monotonic()
        clean = _clean(pool, first, setting.pick(ENOUGH, 100_000))
        clean_s = time.monotonic() - began
        found = _found(pool, {bug: _worth(bug, clean, first) for bug in PLANTED})
    bad = sorted(world.seed for world in clean if world.bad)
    return _figure(len(clean), bad, clean_s, time.monotonic() - began - clean_s, found, first)


def _collect_seldom() -> None:
    """Have the collector leave alone what is there from the beginning, and come less often: a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


class World(NamedTuple):
    """A world without a bug: whether something was wrong in it all the same, and which sections of SQL it ran.

    Those are not kept of worlds in which nobody will look for a bug.
    """

    seed: int
    bad: bool
    sections: frozenset[str]


def _control(pool: ProcessPoolExecutor, bug: str, first: int) -> Figure:
    """Run the worlds as they are with one bug, until one fails as it must."""
    seed = _found(pool, {bug: range(first, first + ENOUGH)})[bug]
    if seed is None:
        return Figure(f"{ENOUGH:,} seeds, 0 violations", True)
    text = f"violation after {seed - first + 1:,} seeds"
    return Figure(text, False, {"found": seed}, f"python -m tests.proof.simulation {seed} --plant {bug} --shorten")


def _clean(pool: ProcessPoolExecutor, first: int, seeds: int) -> list[World]:
    """Run worlds as they are; enough bad ones are enough."""
    chunks = (range(start, min(start + CHUNK, first + seeds)) for start in range(first, first + seeds, CHUNK))
    found: list[World] = []
    for some in _answers(pool, chunks):
        found += (one if one.seed < first + ENOUGH else one._replace(sections=frozenset()) for one in some)
        if sum(world.bad for world in found) >= 10:
            break
    return found


def _answers(pool: ProcessPoolExecutor, chunks: Iterable[range]) -> Iterator[list[World]]:
    """Ask for a few chunks at a time, so that nothing is left to run when nobody asks further."""
    asked: set[Future[list[World]]] = set()
    for chunk in chunks:
        asked.add(pool.submit(_run, chunk))
        if len(asked) > 2 * PROCESSES:
            done, asked = wait(asked, return_when=FIRST_COMPLETED)
            yield from (one.result() for one in done)
    yield from (one.result() for one in asked)


def _run(seeds: range) -> list[World]:
    return [World(seed, bool(wrong), sections) for seed in seeds for wrong, sections in [judged(seed)]]


def _worth(bug: str, clean: Iterable[World], first: int) -> list[int]:
    """Give the seeds that may show a bug.

    One seed gives one world: up to the first section of SQL that the bug changes it is the world without the bug, and
    where none of those is run it is so to its end.
    """
    if bug not in TOUCHED:
        return [*range(first, first + ENOUGH)]
    never = {world.seed for world in clean if world.sections and not world.sections & TOUCHED[bug]}
    return [seed for seed in range(first, first + ENOUGH) if seed not in never]


def _found(pool: ProcessPoolExecutor, worth: Mapping[str, Sequence[int]]) -> dict[str, int | None]:
    """Give the first seed that shows each bug, or None where none does.

    Some worlds of each in turn, so that those bugs are left in the end that take long, and no processor waits.
    """
    found: dict[str, int | None] = dict.fromkeys(worth)
    begun = dict.fromkeys(worth, 0)
    asked: dict[Future[int | None], str] = {}
    while True:
        while len(asked) <= PROCESSES and (bug := _next(worth, begun, found)):
            asked[pool.submit(_shows, bug, worth[bug][begun[bug] : begun[bug] + TURN])] = bug
            begun[bug] += TURN
        if not asked:
            return found
        for done in wait(asked, return_when=FIRST_COMPLETED).done:
            bug, seed = asked.pop(done), done.result()
            if seed is not None:
                found[bug] = min(seed, found[bug] or seed)


def _next(worth: Mapping[str, Sequence[int]], begun: Mapping[str, int], found: Mapping[str, int | None]) -> str | None:
    """Choose the bug to look for: of those that are not found yet the one that was looked for least."""
    left = [bug for bug in worth if found[bug] is None and begun[bug] < len(worth[bug])]
    return min(left, key=lambda bug: begun[bug], default=None)


def _shows(bug: str, seeds: Sequence[int]) -> int | None:
    with broken(bug):
        return next((seed for seed in seeds if judge(seed)), None)


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
    patient=True,
)
