"""`duly batches`: look at batches, watch one live, and cancel the rest of one.

Everything is read from the database, so that no code is needed.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections import deque
from typing import Any
from uuid import UUID

import click
import msgspec

from duly.app.batches import Batch
from duly.cli import INTERRUPTED, Named, output
from duly.cli.database import (
    AN_ID,
    WHOLE_ID,
    audit_options,
    bulk_options,
    database_options,
    id_digits,
    json_option,
    opened,
    the_one,
)
from duly.cli.queues import meant
from duly.cli.wait_for_database import is_away
from duly.duly import Duly
from duly.errors import BatchNotFound, StoreError
from duly.model import BatchRecord
from duly.rules.durations import to_ms
from duly.store import ops, sequence
from duly.store.op import Op

LEAST_MS = 100
RATE_OVER_S = 10.0
LEAST_BAR, LONGEST_BAR, LONGEST_NAME = 8, 40, 20
TIMES = ("created_at", "sealed_at", "completed_at", "first_dead_at")
COUNTS = ("total", "pending", "running", "succeeded", "partial", "dead", "cancelled")
ENDED = COUNTS[3:]


@click.group(
    cls=Named,
    epilog="""\b
Examples:
  duly batches list --active
  duly batches show 01997f3e
  duly batches watch 01997f3e
  duly batches cancel 01997f3e --why "the wrong file" --dry-run
""",
)
def command() -> None:
    """List, show, watch and cancel batches."""


# Looking


@command.command(
    "list",
    epilog="""\b
Examples:
  duly batches list
  duly batches list --active --name import
  duly batches list --before 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55 --json
""",
)
@click.option("--name", help="Only batches of this name.")
@click.option("--active", is_flag=True, help="Only those of which something is still to come.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="How many at most.")
@click.option("--before", metavar="ID", help="Only batches older than this one: the next page.")
@database_options
@json_option
def list_(
    name: str | None,
    active: bool,
    limit: int,
    before: str | None,
    url: str | None,
    schema: str | None,
    target: str | None,
    as_json: bool,
) -> None:
    """List batches and how far they are, newest first.

    The state is unsealed (it is being filled, or its filling broke off), open (some of its jobs have not ended) or
    complete.
    """
    with opened(url, schema, target) as app:
        older = None if before is None else whole_batch_id(app, before)
        found = app.batches.list(name=name, active=active or None, before=older, limit=limit + 1)
        known = set() if found or name is None else {one.name for one in app.batches.list()}
        now = app.driver.run(ops.clock())
    if as_json:
        output.answer_json([_described(one) for one in found[:limit]])
        return
    _tell_batches(found[:limit], now)
    if not found and (name is not None or active or before is not None):
        click.echo(output.plain(f"no batch matches these filters{meant(name or '', known)}"))
    elif not found:
        click.echo("there are no batches yet: with app.batch(…) makes one")
    elif len(found) > limit:
        click.echo(f"there are more: --before {found[limit - 1].id}", err=True)


def whole_batch_id(app: Duly, given: str) -> str:
    """Give the whole id of a batch of which a person gave the beginning."""
    if (text := id_digits(given)) is None:
        raise BatchNotFound(f"{given!r} is not the id of a batch: {AN_ID}{_newest(app, given)}")
    if len(text) == WHOLE_ID:
        return str(UUID(text))
    found = [one.id for one in app.batches.list(prefix=text, limit=4)]
    if not found:
        raise BatchNotFound(f"no batch has an id that begins with {given}")
    return the_one(found, given, "batches")


def _newest(app: Duly, name: str) -> str:
    """Name the batch that was probably meant by its name, which is no id, as others may have it too."""
    found = app.batches.list(name=name, limit=1) if name.isprintable() else []  # else it may be no text at all
    return f"; the newest batch of that name is {found[0].id}" if found else ""


def _described(record: BatchRecord) -> dict[str, Any]:
    """Give the fields of a batch, and what follows from them."""
    return {**msgspec.to_builtins(record), "state": _state(record), "success": record.success}


def _state(record: BatchRecord) -> str:
    if record.complete:
        return "complete"
    return "unsealed" if record.sealed_at is None else "open"


def _tell_batches(found: list[BatchRecord], now: int) -> None:
    """Print a table of batches; what one looks for first has room in 80 columns."""
    output.table(
        ["id", "state", "done", "dead", "name", "jobs", "running", "created", "key"],
        [
            [
                one.id,
                _state(one),
                _percent(one),
                f"{one.dead:,}",
                one.name,
                f"{one.total:,}",
                f"{one.running:,}",
                output.ago(one.created_at, now, units=1),
                one.key or "",
            ]
            for one in found
        ],
    )


def _percent(record: BatchRecord) -> str:
    """Write how much has ended, rounded down: what is not at its end is never told as 100%."""
    if not record.total and not record.complete:
        return "-"
    return f"{math.floor(record.percent * 10) / 10:g}%"


@command.command(
    epilog="""\b
Examples:
  duly batches show 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55
  duly batches show 01997f3e --json --url jobs.db
"""
)
@click.argument("batch_id", metavar="ID")
@database_options
@json_option
def show(batch_id: str, url: str | None, schema: str | None, target: str | None, as_json: bool) -> None:
    """Show a batch: how far it is, when what happened, and whether it is a success.

    The first digits of the id will do. Exit code 3: no batch has it.
    """
    with opened(url, schema, target) as app:
        record = _found(app, batch_id).progress()
        now = app.driver.run(ops.clock())
    if as_json:
        output.answer_json(_described(record))
        return
    output.facts(_facts(record, now))
    _hint(record)


def _found(app: Duly, given: str) -> Batch:
    """Find a batch, or say what it is that has this id."""
    batch_id = whole_batch_id(app, given)
    try:
        return app.batches.get(batch_id)
    except BatchNotFound as error:
        job = app.get(batch_id)
        if job is None:
            raise
        whose = "it is that of a job" if job.batch_id is None else f"it is that of a job of batch {job.batch_id}"
        raise BatchNotFound(f"{error}: {whose}") from None


def _facts(record: BatchRecord, now: int) -> list[tuple[str, str]]:
    known = {"id": record.id, "name": record.name, "key": record.key, "state": _state(record)}
    known |= {"done": _percent(record), **{name: f"{getattr(record, name):,}" for name in COUNTS}}
    known |= {name: _moment(getattr(record, name), now) for name in TIMES}
    known |= {"cancelled by": record.cancelled_by, "why": record.cancelled_why}
    known |= {"ok_at": f"{record.ok_at:g}", "success": _told_success(record)}
    return [(name, value) for name, value in known.items() if value is not None]


def _moment(at: int | None, now: int) -> str | None:
    return None if at is None else f"{output.moment(at)} ({output.ago(at, now)})"


def _told_success(record: BatchRecord) -> str | None:
    success = record.success
    return None if success is None else "yes" if success else "no"


def _hint(record: BatchRecord) -> None:
    """Say what to do about what is not as it should be."""
    if record.sealed_at is None:
        fill_on = "" if record.key is None else "fill it on under its key, or "
        _say(
            f"it is not sealed: it is being filled, or its filling broke off; then {fill_on}cancel it: "
            f"duly batches cancel {record.id}"
        )
    if record.dead:
        _say(f"look at what died: duly dead list --batch {record.id}")


def _say(text: str) -> None:
    click.echo(f"duly: {output.plain(text)}", err=True)


# Watching


class Look(msgspec.Struct, frozen=True):
    """How far a batch is and how fast: jobs a second, and how long the rest takes at that rate, if that is known."""

    record: BatchRecord
    rate: float | None
    left_ms: int | None


@command.command(
    epilog="""\b
Examples:
  duly batches watch 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55
  duly batches watch 01997f3e --interval 10s > import.log
  duly batches watch 01997f3e --json | jq .percent
"""
)
@click.argument("batch_id", metavar="ID")
@click.option("--interval", default="1s", show_default=True, help="How long to wait between two looks.")
@database_options
@json_option
def watch(batch_id: str, interval: str, url: str | None, schema: str | None, target: str | None, as_json: bool) -> None:
    """Watch a batch until it is complete: a live bar with rate, time left and failures.

    Elsewhere than on a terminal, and where $TERM is dumb, it is a line whenever the percent has changed; with --json an
    object whenever anything has. The rate is that of the last ten seconds. A database that goes away is waited for.

    Exit code 0: it is complete and a success, as on_success counts it. 1: it is complete and none, as too many of its
    jobs died, ended partial or were cancelled. 3: no batch has this id. 130: Ctrl-C.
    """
    interval_ms = to_ms(interval, what="--interval")
    if interval_ms < LEAST_MS:
        raise click.UsageError(f"--interval is {interval!r}: give {LEAST_MS}ms or more.")
    with opened(url, schema, target) as app:
        try:
            batch = _found(app, batch_id)
            _warn_of_nobody(app, batch.progress())
            last = _watch(batch, _view(as_json), interval_ms)
        except KeyboardInterrupt:  # the way out; but whoever waits for the batch must not take it for complete
            sys.exit(INTERRUPTED)
    sys.exit(0 if last.success else 1)


def _warn_of_nobody(app: Duly, record: BatchRecord) -> None:
    """Say that what is watched will not move, as nobody is there to run it."""
    if record.open and not any(worker.alive for worker in app.workers()):
        _say("no worker is alive: start one with duly worker module:app")


class Lines:
    """Tells looks as lines: one whenever the percent has changed."""

    def __init__(self) -> None:
        self._last: Any = None

    def look(self, look: Look) -> None:
        """Tell a look, if there is anything new."""
        news = (int(look.record.percent), _state(look.record))
        if not look.record.complete and news != self._last:
            click.echo(f"{_clock()}  {'  '.join(_figures(look))}")
        self._last = news

    def away(self, error: StoreError) -> None:
        """Tell once that the database is away."""
        if error.code != self._last:
            click.echo(f"{_clock()}  {output.plain(output.reason(error))}")
        self._last = error.code

    def end(self, record: BatchRecord) -> None:
        """Tell what became of it."""
        click.echo(output.plain(_summary(record)))
        if record.dead:
            _say(f"look at what died: duly dead list --batch {record.id}")

    def stop(self) -> None:
        """Leave, complete or not."""


class Objects(Lines):
    """Tells looks as JSON: an object whenever anything has changed."""

    def look(self, look: Look) -> None:
        """Tell a look, if there is anything new."""
        if look.record != self._last:
            output.answer_json({**_described(look.record), "rate": look.rate, "left_ms": look.left_ms})
        self._last = look.record

    def away(self, error: StoreError) -> None:
        """Tell once that the database is away."""
        if error.code != self._last:
            output.answer_json({"error": output.reason(error), "code": error.code})
        self._last = error.code

    def end(self, record: BatchRecord) -> None:
        """Leave it at the last object, which says that it is complete."""


class Bar(Lines):
    """Draws a bar, and writes over it at every look."""

    def look(self, look: Look) -> None:
        """Draw a look."""
        self._draw(bar_line(look, shutil.get_terminal_size().columns - 1))

    def away(self, error: StoreError) -> None:
        """Write over the bar that the database is away."""
        reason = output.plain(" ".join(output.reason(error).split()))
        self._draw(output.cut(reason, shutil.get_terminal_size().columns - 1))

    def stop(self) -> None:
        """Leave the bar where it is, and go on below it."""
        if self._last is not None:
            click.echo()

    def _draw(self, line: str) -> None:
        self._last = line  # before it is there: Ctrl-C may come right after
        click.echo(f"\r{line}\x1b[K", nl=False)


def _view(as_json: bool) -> Lines:
    if as_json:
        return Objects()
    return Bar() if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else Lines()


def _watch(batch: Batch, view: Lines, interval_ms: int) -> BatchRecord:
    """Tell every look until the batch is complete, and give the last."""
    pace = Pace()
    try:
        while not (found := _look(batch, view, pace)):
            time.sleep(interval_ms / 1000)
    finally:
        view.stop()
    view.end(found)
    return found


def _look(batch: Batch, view: Lines, pace: Pace) -> BatchRecord | None:
    """Look once, and give what is complete; a database that is away may come back."""
    try:
        record = batch.progress()
    except StoreError as error:
        if not is_away(error):
            raise
        view.away(error)
        return None
    view.look(pace.of(record, time.monotonic()))
    return record if record.complete else None


class Pace:
    """Finds out how fast a batch is, from what has ended within the last seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def of(self, record: BatchRecord, at: float) -> Look:
        """Take note of how far a batch is, and say how fast it is and how long the rest takes."""
        ended = _ended(record)
        if self._seen and ended < self._seen[-1][1]:  # replays have reopened some
            self._seen.clear()
        self._seen.append((at, ended))
        while len(self._seen) > 2 and self._seen[1][0] <= at - RATE_OVER_S:
            self._seen.popleft()
        since, before = self._seen[0]
        rate = (ended - before) / (at - since) if at > since else None
        if not rate or record.sealed_at is None:  # nobody knows how much is to come
            return Look(record, rate, None)
        return Look(record, rate, round(record.open / rate * 1000))


def _ended(record: BatchRecord) -> int:
    return sum(getattr(record, name) for name in ENDED)


def _clock() -> str:
    return time.strftime("%H:%M:%S", time.gmtime())


def bar_line(look: Look, width: int) -> str:
    """Draw a look as one line; where there is no room for a bar there is none."""
    name = output.cut(output.plain(" ".join(look.record.name.split())), LONGEST_NAME)
    figures = "  ".join(_figures(look))
    room = min(LONGEST_BAR, width - len(name) - len(figures) - len("  []  "))
    if room < LEAST_BAR:
        return output.cut(f"{name}  {figures}", width)
    share = look.record.percent / 100 if look.record.total or look.record.complete else 0.0
    drawn = "#" * int(room * share)
    return f"{name}  [{drawn.ljust(room, '-')}]  {figures}"


def _figures(look: Look) -> list[str]:
    """Write how far and how fast, what went wrong, and how long it takes."""
    record = look.record
    figures = [_percent(record), f"{_ended(record):,}/{record.total:,}"]
    figures.append("-/s" if look.rate is None else f"{look.rate:,.0f}/s" if look.rate >= 10 else f"{look.rate:.1f}/s")
    if record.sealed_at is None:
        figures.append("not sealed yet")
    elif not record.complete:
        figures.append("? left" if look.left_ms is None else f"{output.age(look.left_ms)} left")
    figures.append(f"dead {record.dead:,}")
    figures += [f"{name} {number:,}" for name in ("partial", "cancelled") if (number := getattr(record, name))]
    return [*figures, f"running {record.running:,}"] if record.running else figures


def _summary(record: BatchRecord) -> str:
    counts = ", ".join(f"{number:,} {name}" for name in ENDED if (number := getattr(record, name)))
    lasted = output.age(None if record.completed_at is None else record.completed_at - record.created_at)
    needed = "it was cancelled" if record.cancelled_at is not None else f"which takes {record.ok_at * 100:g}% of them"
    success = "" if record.success else f"; no success, {needed}"
    return f"batch {record.name!r} is complete after {lasted}: {counts or 'it was empty'}{success}"


# Changing


@command.command(
    epilog="""\b
Examples:
  duly batches cancel 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55 --dry-run
  duly batches cancel 01997f3e --why "the wrong file" --yes
"""
)
@click.argument("batch_id", metavar="ID")
@bulk_options
@audit_options
@database_options
@json_option
def cancel(
    batch_id: str,
    dry_run: bool,
    yes: bool,
    by: str,
    why: str | None,
    url: str | None,
    schema: str | None,
    target: str | None,
    as_json: bool,
) -> None:
    """Cancel the rest of a batch: seal it, end what does not run, and ask what runs to stop.

    What has ended stays as it is, and the batch is complete when everything has. Exit code 3: no batch has this id.
    """
    with opened(url, schema, target) as app:
        batch = _found(app, batch_id)
        before = after = batch.progress()
        count = before.open
        if not (dry_run or before.complete):
            if not output.confirmed(f"Cancel the rest of batch {before.name!r} ({_rest(before)})?", yes=yes):
                raise click.Abort
            count = _cancel(app, batch, by, why, before.open)
            after = batch.progress()
    if as_json:
        output.answer_json({**_described(after), "dry_run": dry_run, "count": count})
    elif before.complete:
        click.echo(output.plain(f"nothing to cancel: batch {before.name!r} is complete"))
    elif dry_run:
        click.echo(
            output.plain(f"would cancel the rest of batch {before.name!r}: {_rest(before)}; nothing was changed")
        )
    else:
        stopping = f"; {after.running:,} still running, asked to stop" if after.running else ""
        click.echo(output.plain(f"cancelled the rest of batch {before.name!r}: {_jobs(count)}{stopping}"))


def _rest(record: BatchRecord) -> str:
    return f"{_jobs(record.open)}, {record.running:,} running" if record.running else _jobs(record.open)


def _jobs(number: int) -> str:
    return f"{number:,} {'job' if number == 1 else 'jobs'}"


def _cancel(app: Duly, batch: Batch, by: str, why: str | None, total: int) -> int:
    """Cancel a chunk after the other, and show how far it is."""
    with output.progress("cancel", total) as advance:

        def ask(op: Op[Any]) -> Any:
            answer = app.driver.run(op)
            if op.name == "cancel":
                advance(len(answer))
            return answer

        return sequence.run(batch._cancelling(by, why), ask)
