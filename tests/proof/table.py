"""The rows of the proof, how one is run with and without its defence, and the table that says how it went."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.proof.breaks import broken


@dataclass(frozen=True)
class Setting:
    """What a row is run with."""

    seed: int
    full: bool
    folder: Path
    broken: str | None = None

    def pick(self, short: Any, full: Any) -> Any:
        """Choose by how long the run may take."""
        return full if self.full else short


@dataclass(frozen=True)
class Figure:
    """What a row has measured, and whether that is what was promised."""

    text: str
    good: bool
    numbers: dict[str, Any] = field(default_factory=dict)
    repeat: str | None = None  # one command that repeats what failed
    only_slow: bool = False  # nothing went wrong, it took too long: other work on the machine may be to blame


class NotRun(Exception):
    """What a row needs is not there; says what, and how to get it."""


ALL = math.inf  # processors: what takes them runs alone, and so does what compares speeds


@dataclass(frozen=True)
class Row:
    """One claim: how it is shown, and without which defences it must fail."""

    id: str
    title: str
    target: str
    run: Callable[[Setting], Figure]
    controls: tuple[str, ...]
    in_full: tuple[str, ...] = ()  # further controls; the short form runs one of `controls`, chosen by the seed
    of_speed: bool = False  # all that it measures is speed
    full_only: bool = False  # the short form leaves it out, unless it is named
    takes: float = 0.5  # processors that it keeps busy, about: as many runs go side by side as there are
    control_takes: float = 0.5  # and without a defence
    patient: bool = False  # no clock has a part in it: it takes what the others leave free, and all of that


@dataclass(frozen=True)
class Line:
    """One run of a row."""

    row: str
    title: str
    control: str | None
    figure: str
    target: str
    verdict: str
    seed: int
    seconds: float
    numbers: dict[str, Any]
    repeat: str | None = None
    only_slow: bool = False


ROWS = (
    "p01_kill_storm", "p02_crash_points", "p03_zombie", "p04_stale_tokens", "p05_poison", "p06_simulation",
    "p07_outage", "p08_terminated", "p09_horizon", "p10_wakeups", "p11_clock", "p12_schedules", "p13_hammer",
    "p14_disk_full", "p15_rolling_stop", "p16_depth", "p17_interleavings", "p18_pgbouncer", "p21_batches",
    "p22_lanes", "p23_failover",
)  # fmt: skip


RUN_AGAIN = 2
NAME = 39  # the longest name of a line
NOT_RUN = "NOT RUN"
TOO_SLOW = "TOO SLOW"  # beside others, which says nothing
STAYS_GREEN = "STAYS GREEN"


def rows(only: Sequence[str]) -> list[Row]:
    """Load the rows, or those that were asked for."""
    wanted = {name.upper() for name in only}
    return [import_module(f"tests.proof.rows.{name}").ROW for name in ROWS if not wanted or _id(name) in wanted]


def names() -> list[str]:
    """Name the rows there are."""
    return [_id(name) for name in ROWS]


def _id(name: str) -> str:
    return f"P{int(name[1:3])}"


def run(row: Row, *, seed: int, full: bool, control: str | None = None, beside: bool = False) -> Line:
    """Run a row, whole or with a defence taken away; again where chance had its hand in it, and the line says so.

    What goes wrong beside other runs only by being slow is not judged: neither is a row red by that, nor a control.
    """
    began = time.monotonic()
    figure, verdict = _run(row, seed, full, control)
    for further in range(1, RUN_AGAIN + 1):
        if (beside and _only_slow(figure)) or not (reason := _by_chance(figure, verdict)):
            break
        before = figure.text
        figure, verdict = _run(row, seed + further, full, control)  # by another chance
        figure = replace(figure, text=f"{figure.text} [run again, as it {reason}: {before}]")
    return Line(
        row.id, row.title, control, figure.text, row.target,
        TOO_SLOW if beside and _only_slow(figure) else verdict, seed,
        round(time.monotonic() - began, 1), figure.numbers, figure.repeat,
        only_slow=figure.only_slow and (row.of_speed or control is None),
    )  # fmt: skip


def _run(row: Row, seed: int, full: bool, control: str | None) -> tuple[Figure, str]:
    # A defence that cannot be taken away is an error here, and not a row that has turned red.
    with (
        tempfile.TemporaryDirectory(prefix=f"proof-{row.id}-") as folder,
        broken(*([control] if control else []), row=row.id),
    ):
        try:
            figure = row.run(Setting(seed, full, Path(folder), control))
            return figure, _verdict(figure.good, control)
        except NotRun as reason:
            return Figure(str(reason), False), NOT_RUN
        except Exception as error:  # a control must turn red by what the row measures, not by a fault of the row
            sys.stderr.write(traceback.format_exc())  # in one go, as others may write beside it
            return Figure(f"{type(error).__name__}: {error}", False), "FAILED"


def _only_slow(figure: Figure) -> bool:
    return figure.only_slow and not figure.good


def _by_chance(figure: Figure, verdict: str) -> str | None:
    # What was lost, doubled or stuck is never run again: once is enough.
    if verdict == "RED" and figure.only_slow:
        return "was too slow"
    if verdict == STAYS_GREEN:  # real processes need not meet in the moment that the defence is there for
        return "stayed green"
    return None


def _verdict(good: bool, control: str | None) -> str:
    if control is None:
        return "green" if good else "RED"
    return STAYS_GREEN if good else "red, as it must"


def holds(line: Line, *, tolerant: bool = False) -> bool:
    """Say whether a line is as it must be: rows green, controls red. What the machine decides may be tolerated."""
    return line.verdict in ("green", "red, as it must") or (tolerant and (line.only_slow or line.verdict == NOT_RUN))


def show(line: Line) -> None:
    """Print a line of the table."""
    name = line.row if line.control is None else f"{line.row:<4} without {line.control}"
    print(f"{name:<{NAME}} {line.verdict:<16} {line.seconds:6.1f} s  seed {line.seed}  {line.figure}", flush=True)
    if line.control is None:
        print(f"{'':<{NAME}} target: {line.target}", flush=True)
    if line.repeat and not holds(line):
        print(f"{'':<{NAME}} repeat it: {line.repeat}", flush=True)


def write(lines: Sequence[Line], path: Path) -> None:
    """Write the table for programs."""
    machine = {"python": sys.version.split()[0], "machine": platform.platform(), "processors": processors()}
    path.write_text(json.dumps({"machine": machine, "rows": [asdict(line) for line in lines]}, indent=1) + "\n")


def processors() -> int:
    """Count the processors that are there for us."""
    return len(os.sched_getaffinity(0))
