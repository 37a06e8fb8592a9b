"""`duly batches watch`: shows the progress of a batch until it is complete."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from typing import Any

import click
import msgspec

from duly.app.batches import Batch
from duly.cli import INTERRUPTED, output
from duly.cli.batch_lookup import ENDED, ended, find_batch, percent, plain, state
from duly.cli.database import with_app
from duly.cli.options import interval_option
from duly.cli.wait_for_database import is_away
from duly.duly import Duly
from duly.errors import StoreError
from duly.model import BatchRecord

RATE_OVER_S = 10.0
LEAST_BAR, LONGEST_BAR, LONGEST_NAME = 8, 40, 20


class Snapshot(msgspec.Struct, frozen=True):
    """The progress of a batch, its rate in jobs a second, and the time left at that rate, where they are known."""

    record: BatchRecord
    rate: float | None
    left_ms: int | None


@click.command()
@click.argument("batch_id", metavar="ID")
@interval_option
@with_app
def watch(app: Duly, batch_id: str, interval_ms: int, as_json: bool) -> None:
    """Watch a batch until it is complete: a live bar with rate, time left and failures.

    Without a terminal, or where $TERM is dumb, it prints a line at each new percent; with --json an object at each
    change. The rate is that of the last ten seconds. While the database is away, it waits.

    Exit code 0: it is complete and a success, as on_success counts it. 1: it is complete and no success, because too
    many jobs died, ended partial or were cancelled. 3: no batch has this id. 130: Ctrl-C.

    Examples:
      duly batches watch 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55
      duly batches watch 01997f3e --interval 10s > import.log
      duly batches watch 01997f3e --json | jq .percent
    """
    try:
        batch = find_batch(app, batch_id)
        _warn_without_workers(app, batch.progress())
        last = _watch(batch, _view(as_json), interval_ms)
    except KeyboardInterrupt:  # ends the command; 0 would mean that the batch is complete
        sys.exit(INTERRUPTED)
    sys.exit(0 if last.success else 1)


def _warn_without_workers(app: Duly, record: BatchRecord) -> None:
    """Warn that no worker is alive to run the rest of the batch."""
    if record.open and not any(worker.alive for worker in app.workers()):
        output.remark("no worker is alive: start one with duly worker module:app")


class Lines:
    """Shows the progress as lines: one at each new percent."""

    def __init__(self) -> None:
        self._last: Any = None

    def show(self, snapshot: Snapshot) -> None:
        """Print a snapshot, if its percent or state is new."""
        news = (int(snapshot.record.percent), state(snapshot.record))
        if not snapshot.record.complete and news != self._last:
            click.echo(f"{_clock()}  {'  '.join(_figures(snapshot))}")
        self._last = news

    def show_outage(self, error: StoreError) -> None:
        """Print once that the database is away."""
        if error.code != self._last:
            click.echo(f"{_clock()}  {output.plain(output.reason(error))}")
        self._last = error.code

    def end(self, record: BatchRecord) -> None:
        """Print the outcome of the batch."""
        click.echo(output.plain(_summary(record)))
        if record.dead:
            remark_dead(record)

    def close(self) -> None:
        """Leave the terminal as it was, complete or not."""


class Objects(Lines):
    """Shows the progress as JSON: an object at each change."""

    def show(self, snapshot: Snapshot) -> None:
        """Print a snapshot, if it has changed."""
        if snapshot.record != self._last:
            output.answer_json({**plain(snapshot.record), "rate": snapshot.rate, "left_ms": snapshot.left_ms})
        self._last = snapshot.record

    def show_outage(self, error: StoreError) -> None:
        """Print once that the database is away."""
        if error.code != self._last:
            output.answer_json({"error": output.reason(error), "code": error.code})
        self._last = error.code

    def end(self, record: BatchRecord) -> None:
        """Print nothing: the last object shows that the batch is complete."""


class Bar(Lines):
    """Shows the progress as a bar that is overwritten."""

    def show(self, snapshot: Snapshot) -> None:
        """Draw a snapshot."""
        self._draw(bar_line(snapshot, shutil.get_terminal_size().columns - 1))

    def show_outage(self, error: StoreError) -> None:
        """Write over the bar that the database is away."""
        reason = output.plain(" ".join(output.reason(error).split()))
        self._draw(output.cut(reason, shutil.get_terminal_size().columns - 1))

    def close(self) -> None:
        """Leave the bar, and continue below it."""
        if self._last is not None:
            click.echo()

    def _draw(self, line: str) -> None:
        self._last = line  # set before it is drawn: Ctrl-C may come right after
        click.echo(f"\r{line}\x1b[K", nl=False)


def _view(as_json: bool) -> Lines:
    if as_json:
        return Objects()
    return Bar() if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else Lines()


def _watch(batch: Batch, view: Lines, interval_ms: int) -> BatchRecord:
    """Show the progress until the batch is complete, and give its last record."""
    speed = Speed()
    try:
        while not (found := _read(batch, view, speed)):
            time.sleep(interval_ms / 1000)
    finally:
        view.close()
    view.end(found)
    return found


def _read(batch: Batch, view: Lines, speed: Speed) -> BatchRecord | None:
    """Read the batch once and show it; give its record if it is complete."""
    try:
        record = batch.progress()
    except StoreError as error:
        if not is_away(error):
            raise
        view.show_outage(error)
        return None
    view.show(speed.add(record, time.monotonic()))
    return record if record.complete else None


class Speed:
    """Measures the rate of a batch over the last seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, record: BatchRecord, at: float) -> Snapshot:
        """Add a record that was read at this time; give it with the rate and the time left."""
        count = ended(record)
        if self._seen and count < self._seen[-1][1]:  # replays have reopened jobs
            self._seen.clear()
        self._seen.append((at, count))
        while len(self._seen) > 2 and self._seen[1][0] <= at - RATE_OVER_S:
            self._seen.popleft()
        since, before = self._seen[0]
        rate = (count - before) / (at - since) if at > since else None
        if not rate or record.sealed_at is None:  # more jobs may be added
            return Snapshot(record, rate, None)
        return Snapshot(record, rate, round(record.open / rate * 1000))


def _clock() -> str:
    return time.strftime("%H:%M:%S", time.gmtime())


def bar_line(snapshot: Snapshot, width: int) -> str:
    """Write a snapshot as one line, with a bar if there is room for one."""
    name = output.cut(output.plain(" ".join(snapshot.record.name.split())), LONGEST_NAME)
    figures = "  ".join(_figures(snapshot))
    room = min(LONGEST_BAR, width - len(name) - len(figures) - len("  []  "))
    if room < LEAST_BAR:
        return output.cut(f"{name}  {figures}", width)
    share = snapshot.record.percent / 100 if snapshot.record.total or snapshot.record.complete else 0.0
    drawn = "#" * int(room * share)
    return f"{name}  [{drawn.ljust(room, '-')}]  {figures}"


def _figures(snapshot: Snapshot) -> list[str]:
    """Write progress, rate, time left and failures."""
    record, rate = snapshot.record, snapshot.rate
    figures = [percent(record), f"{ended(record):,}/{record.total:,}"]
    figures.append("-/s" if rate is None else f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.1f}/s")
    if record.sealed_at is None:
        figures.append("not sealed yet")
    elif not record.complete:
        figures.append("? left" if snapshot.left_ms is None else f"{output.age(snapshot.left_ms)} left")
    figures.append(f"dead {record.dead:,}")
    figures += [f"{name} {number:,}" for name in ("partial", "cancelled") if (number := getattr(record, name))]
    return [*figures, f"running {record.running:,}"] if record.running else figures


def _summary(record: BatchRecord) -> str:
    counts = ", ".join(f"{number:,} {name}" for name in ENDED if (number := getattr(record, name)))
    lasted = output.age(None if record.completed_at is None else record.completed_at - record.created_at)
    needed = "it was cancelled" if record.cancelled_at is not None else f"which takes {record.ok_at * 100:g}% of them"
    success = "" if record.success else f"; no success, {needed}"
    return f"batch {record.name!r} is complete after {lasted}: {counts or 'it was empty'}{success}"


def remark_dead(record: BatchRecord) -> None:
    """Print the command that lists the dead jobs of a batch."""
    output.remark(f"list the dead jobs: duly dead list --batch {record.id}")
