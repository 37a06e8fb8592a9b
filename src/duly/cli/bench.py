"""`duly bench`: measure duly beside the least that this database can do, in tables of its own."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from duly.cli import output, read_settings
from duly.errors import ConfigError
from duly.rules.settings import Settings

if TYPE_CHECKING:
    from duly.bench.place import Place

LETTERS = {
    "a": "single enqueue",
    "b": "bulk enqueue",
    "c": "drain by one worker",
    "d": "by two",
    "e": "idle pick-up",
    "f": "cost of a job",
    "g": "producers and a worker",
    "i": "keyed, typed, retried",
}


@click.command(
    epilog="""\b
Examples:
  duly bench --quick
  duly bench --only c,d --repeat 5
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
    """Measure duly beside the least that your database can do.

    Works in tables of its own, which are gone in the end: in the schema duly_bench of a PostgreSQL database, or in
    files beside a SQLite one, on the same disk. Your own jobs are not touched. Takes about two minutes.
    """
    from duly.bench.machine import load, machine
    from duly.bench.place import BenchFailed

    letters = _letters(only)
    settings = read_settings({"url": url})
    begun = time.monotonic()
    _end_gently()
    try:
        with _place(settings) as place:
            about = machine(_folder(settings)) | place.describe()
            figures = _measure(place, letters, quick=quick, repeat=repeat or (1 if quick else 3))
    except BenchFailed as error:
        raise click.ClickException(str(error)) from error
    about |= {"load_at_end": load(), "seconds": round(time.monotonic() - begun, 1)}
    if as_json:
        from duly.bench.report import summary

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
        raise ConfigError(f"--only names nothing: give some of {','.join(LETTERS)}")
    return given


def _end_gently() -> None:
    """End by a signal as by Ctrl-C, so that what was made is removed."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))


@contextmanager
def _place(settings: Settings) -> Iterator[Place]:
    """Make the tables, and remove them in the end; being told to hurry does not keep us from that."""
    url = settings.url
    match url.store:
        case "sqlite":
            from duly.bench import sqlite

            making: Any = sqlite.place(sqlite.folder_of(settings), settings)
        case "postgresql":
            try:
                from duly.bench import postgres
            except ImportError as error:
                raise ConfigError(
                    f"{url} needs psycopg, which is not installed: pip install 'duly[postgres]'"
                ) from error
            making = postgres.place(url.dsn, settings)
        case _:
            raise ConfigError(f"duly bench measures SQLite and PostgreSQL; {url} is neither")
    with making as place:
        try:
            yield place
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)


def _folder(settings: Settings) -> Path:
    from duly.bench.sqlite import folder_of

    return Path.cwd() if settings.url.path is None else folder_of(settings)


def _measure(place: Place, letters: list[str], *, quick: bool, repeat: int) -> list[Any]:
    from duly.bench.measure import measured
    from duly.bench.part import QUICK, Plan

    with output.progress("measuring", repeat * len(letters)) as advance:
        begun = 0

        def say(text: str) -> None:
            nonlocal begun
            advance(min(begun, 1))  # what was begun before has ended
            begun += 1

        sizes: dict[str, Any] = QUICK if quick else {}
        figures = list(measured(place, Plan(repeat=repeat, say=say, **sizes), letters))
        advance(1)
    return figures


def _show(about: dict[str, Any], figures: list[Any]) -> None:
    from duly.bench import report
    from duly.bench.machine import BUSY, is_busy

    output.table(report.HEADINGS, list(report.rows(figures)))
    click.echo(f"\n{report.EXPLAINED}\n")
    output.table(report.TARGET_HEADINGS, list(report.target_rows(figures)))
    click.echo()
    output.facts([(name.replace("_", " "), str(value)) for name, value in about.items() if name != "warning"])
    for warning in [about.get("warning"), BUSY if is_busy(about) else None]:
        if warning:
            click.echo(f"\nwarning: {warning}")
    click.echo(f"\n{report.summary(figures)}")
