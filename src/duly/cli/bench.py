"""`duly bench`: measures duly on your own database, in tables of its own."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from duly.cli import output, read_settings
from duly.errors import ConfigError
from duly.rules.settings import Settings

if TYPE_CHECKING:
    from duly.bench.place import Place
    from duly.bench.report import Figure

LETTERS = {"a": "single enqueue", "b": "bulk enqueue", "c": "drain by one worker", "e": "idle pick-up"}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command(
    epilog="""\b
Examples:
  duly bench --quick
  duly bench --only b,c --repeat 5
  duly bench --url postgresql://user@host/db --json
\b
Parts: """
    + "; ".join(f"{letter} {what}" for letter, what in LETTERS.items())
    + "."
)
@click.option("--url", help="The database. Default: $DULY_URL, then duly.toml, then duly.db in this folder.")
@click.option("--quick", is_flag=True, help="Far fewer jobs, one repetition: to see that it works, not to compare by.")
@click.option("--only", metavar="LETTERS", help="Only these parts, by comma: a,c.")
@click.option("--repeat", type=click.IntRange(1, 99), metavar="N", help="Repetitions. Default: 3, with --quick 1.")
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
def command(url: str | None, quick: bool, only: str | None, repeat: int | None, as_json: bool) -> None:
    """Measure duly on your database.

    Creates tables of its own and removes them at the end. In PostgreSQL they are in the schema duly_bench. For SQLite
    they are in a folder beside your file, on the same disk. Does not touch your jobs. Takes less than a minute.
    """
    from duly.bench.place import BenchFailed, folder_of
    from duly.bench.report import load, machine, summary

    letters = _letters(only)
    settings = read_settings({"url": url})
    begun = time.monotonic()
    _exit_by_signal()
    try:
        with _place(settings) as place:
            about = machine(folder_of(settings)) | place.describe()
            figures = _measure(place, letters, quick=quick, repeat=repeat or (1 if quick else 3))
    except BenchFailed as error:
        raise click.ClickException(str(error)) from error
    about |= {"load_at_end": load(), "seconds": round(time.monotonic() - begun, 1)}
    if as_json:
        output.answer_json({**about, "figures": [figure.plain() for figure in figures], "summary": summary(figures)})
    else:
        _show(about, figures)


def _letters(only: str | None) -> list[str]:
    if only is None:
        return list(LETTERS)
    given = [name.strip().lower() for name in only.split(",") if name.strip()]
    if unknown := [name for name in given if name not in LETTERS]:
        raise ConfigError(f"--only: there is no part {unknown[0]!r}; the parts are {','.join(LETTERS)}")
    if not given:
        raise ConfigError(f"--only names no part: give some of {','.join(LETTERS)}")
    return given


def _exit_by_signal() -> None:
    """Treat SIGTERM and SIGHUP as Ctrl-C, so that the tables are removed."""
    received: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        # Python drops an exception raised in a callback of a weakref, and prints it: raise another one, print none.
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        sys.unraisablehook = lambda dropped: None
        if received[0] == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + received[0])

    for number in (*SIGNALS, signal.SIGALRM):
        signal.signal(number, interrupt)


@contextmanager
def _place(settings: Settings) -> Iterator[Place]:
    """Make the tables, and remove them at the end; a second signal does not interrupt the removal."""
    from duly.bench.place import place

    with place(settings) as made:
        try:
            yield made
        finally:
            for number in (*SIGNALS, signal.SIGALRM):
                signal.signal(number, signal.SIG_IGN)


def _measure(place: Place, letters: list[str], *, quick: bool, repeat: int) -> list[Figure]:
    from duly.bench.measure import QUICK, Plan, measured

    with output.progress("measuring", repeat * len(letters)) as advance:
        plan = Plan(repeat=repeat, ended=lambda: advance(1), **(QUICK if quick else {}))
        return list(measured(place, plan, letters))


def _show(about: dict[str, Any], figures: list[Figure]) -> None:
    from duly.bench import report

    output.table(report.HEADINGS, list(report.rows(figures)))
    click.echo(f"\n{report.EXPLAINED}\n")
    output.facts([(name.replace("_", " "), str(value)) for name, value in about.items() if name != "warning"])
    for warning in [about.get("warning"), report.BUSY if report.is_busy(about) else None]:
        if warning:
            click.echo(f"\nwarning: {warning}")
    click.echo(f"\n{report.summary(figures)}")
