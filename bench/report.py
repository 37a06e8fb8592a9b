"""Prints what was measured, ratios first, and writes it down."""

from __future__ import annotations

import json
import os
import platform
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg

from bench.figures import Figure, Spread

EXPLAINED = """\
Ratios are duly / limit: the median of the repetitions (least to most), each of which takes all sides in turn.
  bare       the least a queue can do: 7 columns, 2 indexes, claim = one update, finish = one delete, no history
  same rows  the least statements that write the rows duly writes, without its checks (pause, tasks, expiry, token …)
Both commit as often, sync as hard and use the same client library as duly. Beside `kept`, bare still keeps nothing.
"""
BUSY = "where all wait for the same disk the ratios drift towards 1 and flatter duly. Repeat this on a quiet one."


def machine(folder: Path) -> dict[str, Any]:
    """Say what this was measured on and with."""
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
        "fdatasync_ms": round(sync_ms(folder), 3),
        "load_at_start": round(os.getloadavg()[0], 2),
        "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def sync_ms(folder: Path) -> float:
    """Time what every commit waits for: 4 KiB written to the disk."""
    with tempfile.TemporaryFile(dir=folder) as file:
        taken = []
        for _ in range(50):
            begun = time.perf_counter()
            os.write(file.fileno(), b"x" * 4096)
            os.fdatasync(file.fileno())
            taken.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(taken)


def write(path: Path, about: dict[str, Any], figures: Sequence[Figure]) -> dict[str, Any]:
    """Write the run as JSON and return it."""
    document = {**about, "figures": [figure.plain() for figure in figures], "summary": summary(figures)}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return document


def show(about: dict[str, Any], figures: Sequence[Figure]) -> None:
    """Print the tables for a person."""
    for name, value in about.items():
        print(f"{name + ':':15} {'; '.join(value) if isinstance(value, list) else value}")
    if about["load_at_start"] > about["cores"] / 2:
        print(f"\nThe machine was busy (load {about['load_at_start']}): {BUSY}")
    print(f"\n{EXPLAINED}")
    for store in dict.fromkeys(figure.store for figure in figures):
        mine = [figure for figure in figures if figure.store == store]
        print_table(f"{store}: beside the limit", [figure for figure in mine if "bare" in figure.limits])
        print_table(f"{store}: growth", [figure for figure in mine if "at 1 k" in figure.limits])
        print_table(f"{store}: counts", [figure for figure in mine if not figure.limits])
    print(summary(figures))


def print_table(title: str, figures: Sequence[Figure]) -> None:
    if not figures:
        return
    limits = list(figures[0].limits)
    head = [title, *(f"/ {name}" for name in limits), "target", "", "duly", *limits, "unit"]
    rows = [head, *(row(figure, limits) for figure in figures)]
    widths = [max(len(line[column]) for line in rows) for column in range(len(head))]
    for number, line in enumerate(rows):
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))
    print()


def row(figure: Figure, limits: Sequence[str]) -> list[str]:
    return [
        figure.measure,
        *(spread_text(figure.ratios[name], ratio_text) for name in limits),
        target_text(figure),
        verdict_text(figure),
        spread_text(figure.duly, number_text),
        *(spread_text(figure.limits[name], number_text) for name in limits),
        figure.unit,
    ]


def spread_text(spread: Spread, text: Any) -> str:
    if len(spread.samples) == 1:
        return str(text(spread.median))
    return f"{text(spread.median)} ({text(spread.low)}–{text(spread.high)})"  # noqa: RUF001


def ratio_text(value: float) -> str:
    return f"{value:.2f}"


def number_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def target_text(figure: Figure) -> str:
    if figure.target is None:
        return ""
    if figure.target.at_least is not None:
        return f"≥ {figure.target.at_least:g}"
    return f"≤ {figure.target.at_most:g}"


def verdict_text(figure: Figure) -> str:
    verdicts = figure.verdicts()
    if len(verdicts) == 1 or len(set(verdicts.values())) == 1:
        return "met" if all(verdicts.values()) else "missed"
    return ", ".join(f"{'met' if met else 'missed'} ({name})" for name, met in verdicts.items())


def summary(figures: Sequence[Figure]) -> str:
    """Write the one line that a run ends with."""
    stores = dict.fromkeys(figure.store for figure in figures)
    parts = [
        f"{store}: {', '.join(short_text(figure) for figure in figures if figure.store == store and figure.short)}"
        for store in stores
    ]
    met = [met for figure in figures for met in figure.verdicts().values()]
    return f"summary (duly / bare | same rows) {'; '.join(parts)}; targets met: {sum(met)} of {len(met)}"


def short_text(figure: Figure) -> str:
    if figure.judged == "value":
        return f"{figure.short} {number_text(figure.duly.median)} {figure.unit}"
    return f"{figure.short} {'|'.join(ratio_text(spread.median) for spread in figure.ratios.values())}"


def progress(text: str) -> None:
    """Say what is going on, to a person who watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
