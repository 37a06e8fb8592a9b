"""P2: SQLite after a crash at every point: nothing corrupt, nothing half-done, nothing lost that was acknowledged."""

from __future__ import annotations

import multiprocessing
import sqlite3
import time
from collections import Counter
from functools import cache, partial
from typing import Any

from duly.store.op import Op, Rows
from duly.store.sqlite.driver import SQLiteDriver
from tests.proof import breaks, crashes
from tests.proof.crashes import Tally
from tests.proof.table import Figure, Row, Setting

PROCESSES = 2


def run(setting: Setting) -> Figure:
    """Record workloads one after the other and judge each at every point, until there are enough images."""
    full = setting.full and setting.broken is None
    enough, steps, cuts = (100_000, 90, 4) if full else (4_000, 60, 2) if setting.broken is None else (1_000, 30, 2)
    # A control is red long before.
    began, tallies = time.monotonic(), []
    seeds = range(setting.seed * 1000, setting.seed * 1000 + 1000)
    with crashes.folder_in_memory() as folder, multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        for tally in pool.imap(partial(judged, steps=steps, cuts=cuts, folder=folder), seeds):
            tallies.append(tally)
            if sum(tally.images for tally in tallies) >= enough:
                break
    return _figure(tallies, enough, time.monotonic() - began, f"--steps {steps} --cuts {cuts}", seeds[0])


def judged(seed: int, **options: Any) -> Tally:
    """Record and judge in a process of its own, which has to take away the defences that its parent has."""
    _break_once()
    return crashes.judged(seed, **options)


@cache
def _break_once() -> None:
    breaks.apply_named()


def _figure(tallies: list[Tally], enough: int, seconds: float, options: str, first: int) -> Figure:
    images = sum(tally.images for tally in tallies)
    wrong = [(number, one) for number, tally in enumerate(tallies) for one in tally.wrong]
    by_kind = Counter(one.kind for _, one in wrong)
    kinds: Counter[str] = sum((tally.kinds for tally in tallies), Counter())
    numbers = {
        "images": images,
        "kills": sum(tally.crashes["kill"] for tally in tallies),
        "power_cuts": sum(tally.crashes["power cut"] for tally in tallies),
        "points": sum(tally.events for tally in tallies),
        "commits": sum(tally.commits for tally in tallies),
        "recordings": len(tallies),
        "operations": dict(kinds),
        "recorded_with": tallies[0].library,
        "opened_with": sqlite3.sqlite_version,
        "images_per_second": round(images / seconds),
        **{kind: by_kind[kind] for kind in ("corrupt", "half-done", "lost")},
    }
    text = (
        f"{by_kind['corrupt']} corrupt, {by_kind['half-done']} half-done, {by_kind['lost']} lost in {images:,} images "
        f"({numbers['kills']:,} kills, {numbers['power_cuts']:,} power cuts; {numbers['points']:,} points, "
        f"{numbers['commits']} commits of {len(kinds)} kinds), {numbers['images_per_second']} images/s"
    )
    if not wrong:
        return Figure(text, images >= enough, numbers)
    number, one = wrong[0]
    text += f"; first: {one.crash} at point {one.point}: {one.kind}, {one.text}"
    return Figure(text, False, numbers, f"python -m tests.proof.crashes {first + number} {options}")


def _in_two_commits(self: SQLiteDriver, conn: Any, op: Op[Any]) -> Rows:
    """Run an operation as if what follows an ending were another matter."""
    rows: list[Any] = []
    for section in op.sections:
        rows += _run_on(self, conn, Op(op.name, (section,), op.params, op.read))
        if section in ("finish", "finish_batched", "rescue", "cancel", "fire_jobs", "count_added", "seal_batch"):
            conn.execute("commit")
            conn.execute("begin immediate")
    return rows


_run_on = SQLiteDriver.run_on
_opens = SQLiteDriver.__init__
_defaults: dict[str, Any] = _opens.__kwdefaults__ or {}

breaks.python("sync_full", _opens, "__kwdefaults__", {**_defaults, "durability": "normal"})
breaks.python("sync_at_all", _opens, "__kwdefaults__", {**_defaults, "durability": "off"})
breaks.python("one_commit", SQLiteDriver, "run_on", _in_two_commits)

ROW = Row(
    "P2",
    "SQLite crash points: killed and cut off from power at every write and sync",
    "0 corrupt, 0 half-done, 0 acknowledged lost in at least 4,000 images (100,000 in full)",
    run,
    controls=("sync_full", "sync_at_all", "one_commit"),
    patient=True,
)
