"""Figures and their table, and the machine they come from. Prints nothing."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

HEADINGS = ("measure", "keep", "duly", "unit")
EXPLAINED = """\
Each figure is the median of the repetitions, with the least and the greatest.
keep: successful jobs are kept as history, or deleted (keep=0)."""
BUSY = "the machine was busy, so these figures are too low. Repeat this on a quiet one."


@dataclass(frozen=True)
class Spread:
    """The repetitions of one measurement."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return median(self.samples)

    @property
    def low(self) -> float:
        """The least."""
        return min(self.samples)

    @property
    def high(self) -> float:
        """The greatest."""
        return max(self.samples)

    def plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"median": self.median, "min": self.low, "max": self.high, "samples": list(self.samples)}


@dataclass(frozen=True)
class Figure:
    """One measured quantity. `short` is its name in the last line of a run, if it has a place there."""

    part: str
    store: str
    measure: str
    unit: str
    duly: Spread
    keep: str = ""
    short: str = ""

    def plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        named = {"part": self.part, "store": self.store, "measure": self.measure, "keep": self.keep, "unit": self.unit}
        return {**named, "duly": self.duly.plain()}


def rows(figures: Sequence[Figure]) -> Iterator[tuple[str, ...]]:
    """Give the lines of the table."""
    for one in figures:
        yield f"({one.part}) {one.measure}", one.keep, spread_text(one.duly, number_text), one.unit


def summary(figures: Sequence[Figure]) -> str:
    """Return the last line of a run."""
    store = figures[0].store
    parts = [f"{one.short} {number_text(one.duly.median)} {one.unit}" for one in figures if one.short]
    return f"summary: {store}: {', '.join(parts)}"


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the sample that `share` of all do not exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread_text(spread: Spread, text: Callable[[float], str]) -> str:
    """Write the median, and the least and the greatest if there are several."""
    if len(spread.samples) == 1:
        return text(spread.median)
    return f"{text(spread.median)} ({text(spread.low)}–{text(spread.high)})"  # noqa: RUF001


def number_text(value: float) -> str:
    """Write a number with three digits, or without a fraction from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def machine(folder: Path) -> dict[str, Any]:
    """Return the versions, the processor, its load, and how long a sync takes in `folder`."""
    return {
        "duly": version("duly"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "fdatasync_ms": round(_sync_ms(folder), 3),
        "load_at_start": load(),
        "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _sync_ms(folder: Path) -> float:
    """Time what every commit waits for: 4 KiB written to the disk."""
    sync = getattr(os, "fdatasync", os.fsync)
    taken = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(50):
            begun = time.perf_counter()
            os.write(file.fileno(), b"x" * 4096)
            sync(file.fileno())
            taken.append((time.perf_counter() - begun) * 1e3)
    return median(taken)


def load() -> float:
    """Return the average number of running processes in the last minute."""
    return round(os.getloadavg()[0], 2)


def is_busy(about: dict[str, Any]) -> bool:
    """Return whether other programs used the machine when the bench began."""
    return bool(about["load_at_start"] > (about["cores"] or 1) / 2)
