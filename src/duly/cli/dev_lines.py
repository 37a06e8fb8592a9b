"""Prints the outcome of each job for `duly dev`: a line, and the traceback of a failed attempt below it."""

from __future__ import annotations

import os
import re
import site
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from duly.cli import output
from duly.errors import DulyError
from duly.model import Attempt
from duly.rules import durations
from duly.store import ops
from duly.store.op import Op

COLOURS = {"succeeded": "green", "failed": "yellow", "crashed": "red", "dead": "red", "lost": "red"}
FRAME = re.compile(r'^ *(?:\| *)?File "(?P<file>.+)", line (?P<line>\d+)')
OURS = str(Path(__file__).parents[1]) + os.sep
NOT_YOURS = (OURS, "<", *site.getsitepackages(), sysconfig.get_path("stdlib"))

Read = Callable[[Op[list[Attempt]]], list[Attempt]]


class JobLines:
    """Listens to an app, and prints the outcome of its jobs."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def __call__(self, name: str, fields: Mapping[str, Any]) -> None:
        """Print an event of a job."""
        kind, _, word = name.partition(".")
        if kind == "job" and "job_id" in fields:
            trace = self._traceback(fields) if fields.get("error_class") else ""
            click.echo(line_of(word, fields, place_in(trace)), err=True)
            if trace:
                lines = output.plain(without_ours(trace)).splitlines()
                click.echo("".join(f"    {line}\n" for line in lines), nl=False, err=True)

    def _traceback(self, fields: Mapping[str, Any]) -> str:
        """Read the recorded traceback of an attempt."""
        with suppress(DulyError):
            for attempt in self._read(ops.attempts(fields["job_id"])):
                if attempt.attempt == fields["attempt"]:
                    return attempt.traceback or ""
        return ""


def line_of(word: str, fields: Mapping[str, Any], place: str | None) -> str:
    """Write the outcome of a job in one line."""
    moment = datetime.now().astimezone().strftime("%H:%M:%S")
    shown = output.style(f"{word.replace('_', ' '):<9}", fg=COLOURS.get(word))
    parts = [f"{fields['task']} {fields['job_id']}"]
    if fields.get("ran_ms") is not None:
        parts.append(f"in {_duration(fields['ran_ms'])}")
    facts = []
    if fields["attempt"] > 1 or fields.get("error_class"):
        facts.append(f"attempt {fields['attempt']} of {fields['max_attempts']}")
    if fields.get("retry_in_ms") is not None:
        facts.append(f"again in {_duration(fields['retry_in_ms'])}")
    said = f"{' '.join(parts)}{''.join(f', {fact}' for fact in facts)}{_why(fields, place)}"
    return f"{moment} {shown} {output.plain(said)}"


def _why(fields: Mapping[str, Any], place: str | None) -> str:
    if not fields.get("error_class"):
        return f": {fields['reason']}" if fields.get("reason") else ""
    first = (fields.get("error") or "").strip().partition("\n")[0]
    said = f"{fields['error_class']}: {first}" if first else fields["error_class"]
    return f": {said}" + (f" ({place})" if place else "")


def place_in(trace: str) -> str | None:
    """Find the last line of the person's own code in a traceback."""
    frames = [match for line in trace.splitlines() if (match := FRAME.match(line))]
    own = [match for match in frames if not match["file"].startswith(NOT_YOURS)]
    if not own:
        return None
    file = Path(own[-1]["file"])
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"{shown}, line {own[-1]['line']}"


def without_ours(trace: str) -> str:
    """Leave out the frames of duly: they only show how the handler was called."""
    kept, skipping = [], False
    for line in trace.splitlines():
        if match := FRAME.match(line):
            skipping = match["file"].startswith(OURS)
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    return "\n".join(kept)


def _duration(ms: float) -> str:
    if ms < 10_000:
        return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"
    return durations.describe(round(ms / 1000) * 1000)
