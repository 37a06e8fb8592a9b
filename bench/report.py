"""Prints what was measured, ratios first, and writes it down as JSON and as a picture."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg

from bench import plot
from bench.figures import Figure, number_text, ratio_text, spread_text
from bench.parts.report import EXPLAINED, HEADINGS, TARGET_HEADINGS, named, rows, summary, target_rows
from duly.bench import report

__all__ = ["machine", "number_text", "progress", "ratio_text", "show", "spread_text", "write"]

BUSY = "the machine was busy: ratios drift towards 1 then, and flatter duly. Repeat this on a quiet one."
OPERATIONS = """\
Without a letter are the operations of the store, claimed and finished in batches, beside two limits:
  bare       the least a queue can do: 7 columns, 2 indexes, claim = one update, finish = one delete, no history
  same rows  the least statements that write the rows duly writes, without its checks (pause, tasks, expiry, token …)
Both commit as often, sync as hard and use the same client library as duly. Beside `kept`, bare still keeps nothing.
"""


def machine(folder: Path) -> dict[str, Any]:
    """Say what this was measured on and with."""
    return {
        **report.machine(folder),
        "sqlite": sqlite3.sqlite_version,
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
    }


def write(path: Path, about: dict[str, Any], figures: Sequence[Figure]) -> dict[str, Any]:
    """Write the run as JSON, draw its rates beside it, and return what was written."""
    document = {**about, "figures": [figure.plain() for figure in figures], "summary": summary(figures)}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    draw(path.with_suffix(".svg"), about, figures)
    return document


def draw(path: Path, about: dict[str, Any], figures: Sequence[Figure]) -> None:
    """Draw duly beside its limits."""
    groups = [
        plot.Group(
            f"{figure.store}: {named(figure)}{f', {figure.keep}' if figure.keep else ''} ({figure.unit})",
            [
                plot.Bar("duly", figure.duly.median, number_text(figure.duly.median), ours=True),
                *(plot.Bar(name, one.median, number_text(one.median)) for name, one in figure.limits.items()),
            ],
        )
        for figure in figures
        if figure.limits and figure.short
    ]
    path.write_text(plot.draw(f"duly beside what its databases can do, {about['begun'][:10]}", groups))


def show(about: dict[str, Any], figures: Sequence[Figure]) -> None:
    """Print the tables for a person."""
    for store in dict.fromkeys(figure.store for figure in figures):
        mine = [figure for figure in figures if figure.store == store]
        print_table(f"{store}:", HEADINGS, list(rows([figure for figure in mine if figure.part])))
        print_table(f"{store}, operations:", HEADINGS, list(rows([figure for figure in mine if not figure.part])))
    print(f"{EXPLAINED}\n{OPERATIONS}")
    for title, having in (("targets:", True), ("targets of the operations:", False)):
        mine = [figure for figure in figures if bool(figure.part) is having]
        print_table(title, TARGET_HEADINGS, list(target_rows(mine)))
    for name, value in about.items():
        print(f"{name + ':':15} {'; '.join(value) if isinstance(value, list) else value}")
    if report.is_busy(about):
        print(f"\nwarning: {BUSY}")
    print(f"\n{summary(figures)}")


def print_table(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    if not lines:
        return
    table = [headings, *lines]
    widths = [max(len(line[column]) for line in table) for column in range(len(headings))]
    table.insert(1, ["-" * width for width in widths])
    print(title)
    for line in table:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    print()


def progress(text: str) -> None:
    """Say what is going on, to a person who watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
