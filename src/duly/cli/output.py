"""Prints answers: tables and sentences for people, JSON for programs, a progress bar for long changes."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

import click
import msgspec

from duly.errors import StoreError
from duly.model import MANY
from duly.rules import durations

GAP = "  "


class Row(Protocol):
    """A row of a listing."""

    @property
    def id(self) -> str:
        """The id that the next page begins after."""


R = TypeVar("R", bound=Row)


def remark(text: str) -> None:
    """Print a sentence beside the answer, on stderr."""
    click.echo(f"duly: {plain(text)}", err=True)


def answer_json(value: Any) -> None:
    """Print one JSON text."""
    click.echo(json.dumps(msgspec.to_builtins(value)))  # ASCII, which every stream can take


def shown_json(value: Any) -> str:
    """Write a value as JSON for people, in which every character that `plain` would replace is an escape."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def answer(value: Any, text: str, *, as_json: bool) -> None:
    """Print a value for programs, or a sentence for people."""
    if as_json:
        answer_json(value)
    else:
        click.echo(plain(text))


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns; on a terminal the last column is cut where the line ends."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for number, line in enumerate(columns(headings, rows, width=width)):
        click.echo(style(line, bold=True) if number == 0 else line)


def style(text: str, **how: Any) -> str:
    """Give a text colour or weight, unless $NO_COLOR is set."""
    return text if os.environ.get("NO_COLOR") else click.style(text, **how)


def page(
    found: Sequence[R],
    limit: int,
    *,
    flag: str,
    show: Callable[[Sequence[R]], None],
    empty: str,
    as_json: bool,
    plain_of: Callable[[R], Any] = msgspec.to_builtins,
) -> None:
    """Print the first `limit` rows of a listing that was read one row further, and the option for the next page."""
    shown = found[:limit]
    if as_json:
        answer_json([plain_of(row) for row in shown])
        return
    show(shown)
    if not found:
        click.echo(plain(empty))
    elif len(found) > limit:
        click.echo(f"there are more: {flag} {shown[-1].id}", err=True)


def columns(headings: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None = None) -> list[str]:
    """Write rows in columns, cut at a width; the headings come first, unless there are no rows."""
    if not rows:
        return []
    lines = [list(headings), *([_one_line(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings) - 1)]
    return [
        cut(GAP.join([*(cell.ljust(size) for cell, size in zip(line, widths, strict=False)), line[-1]]).rstrip(), width)
        for line in lines
    ]


def cut(text: str, width: int | None) -> str:
    """Cut a text that is longer than a line."""
    return text if width is None or len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def facts(rows: Sequence[tuple[str, str]]) -> None:
    """Print names with their values, one a line."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        click.echo(f"{name:<{width}}{GAP}{plain(value)}")


def moment(at: int | None) -> str:
    """Write a time of the database."""
    return "-" if at is None else datetime.fromtimestamp(at / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def age(ms: int | None, *, units: int = 2) -> str:
    """Write a duration roughly: its largest units."""
    if ms is None:
        return "-"
    ms = max(ms, 0)
    return " ".join(durations.describe(ms - ms % 1000 if ms >= 1000 else ms).split()[:units])


def count(number: int) -> str:
    """Write a count that stops at 10,001."""
    return f"{number:,}" if number <= MANY else f"more than {MANY:,}"


def figure(number: int) -> str:
    """Write a count that stops at 10,001, for a column."""
    return f"{number:,}" if number <= MANY else f"{MANY:,}+"


def ago(at: int | None, now: int, *, units: int = 2) -> str:
    """Write a time as its distance from now: "3m ago", "in 5m"."""
    if at is None:
        return "-"
    return f"in {age(at - now, units=units)}" if at > now else f"{age(now - at, units=units)} ago"


def plural(number: int, noun: str) -> str:
    """Write how many of something."""
    return f"{count(number)} {noun if number == 1 else noun + 's'}"


def confirmed(question: str, *, yes: bool) -> bool:
    """Ask before a change; without a terminal --yes is required."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise click.UsageError(
            f"{question} stdin is not a terminal: give --yes, or --dry-run to see what would be done."
        )
    return click.confirm(question, err=True)


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal; call the given function with the number of each chunk.

    Without a total it counts upwards.
    """
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    endless = itertools.count() if total is None else None
    with click.progressbar(endless, length=total, label=label, file=sys.stderr, show_pos=True) as bar:
        yield bar.update


def reason(error: Exception) -> str:
    """Write an error for people: without the name of the operation, and without what libpq repeats."""
    if not isinstance(error, StoreError):
        return str(error)
    message = re.sub(r"^[a-z_]+: ", "", str(error))
    return re.sub(r"\(connection failed: .* failed: (.*?)( Is the server running [^)]*)?\)(?=$|: )", r"(\1)", message)


def plain(text: str) -> str:
    """Replace control characters, which a terminal would interpret: error texts come from anywhere."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _one_line(cell: str) -> str:
    return plain(" ".join(cell.split()))
