"""`duly schedules`: lists schedules, and pauses, resumes, triggers, backfills and deletes them.

All is read from the database: no code of the app is needed. Times are printed in the zone of the schedule and in UTC.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, tzinfo
from itertools import chain, islice, takewhile
from typing import Any

import click
import msgspec

from duly.app.backfill import CHUNK
from duly.cli import Named, output
from duly.cli.database import with_app
from duly.cli.options import audit_options, bulk_options, by_option
from duly.cli.schedule_backfill import backfill
from duly.cli.schedule_lookup import find_schedule, pause_text, plain, state, timing_of, when
from duly.cli.schedule_times import (
    both_texts,
    cells,
    headings,
    in_zone,
    known_zone,
    local_text,
    place_of,
    read_moment,
    remark_zones,
    utc_text,
)
from duly.duly import Duly
from duly.errors import ConfigError
from duly.model import FireRecord, ScheduleRecord
from duly.rules import durations
from duly.rules.timing import DAY, LAST_DAY, Mode, occurrences
from duly.store import ops
from duly.store import schedules as store

LAST_AT = LAST_DAY * DAY * 1000  # close to the last datetime
SHOWN_FIRES = 10


@click.group(cls=Named)
def command() -> None:
    """List, preview, pause, resume, trigger, backfill and delete schedules.

    Examples:
      duly schedules list
      duly schedules next nightly_report -n 10
      duly schedules pause nightly_report --why "the warehouse moves"
      duly schedules backfill nightly_report --since 2026-01-01 --until 2026-01-07T12:00 --dry-run
    """


command.add_command(backfill)


@command.command("list")
@click.option("--paused", is_flag=True, help="Only paused schedules.")
@with_app
def list_(app: Duly, paused: bool, as_json: bool) -> None:
    """List schedules: their next and last due time, their rule in words, and their pauses.

    The state is active, paused, ended or running. Ended: the rule has no further due time. Running: the next due time
    counts from the end of the present run.

    Examples:
      duly schedules list
      duly schedules list --paused
      duly schedules list --json --url jobs.db
    """
    found = [one for one in app.schedules.list() if one.paused_at is not None or not paused]
    now = app.driver.run(ops.clock())
    if as_json:
        output.answer_json([plain(one) for one in found])
        return
    output.table(
        ["name", "state", "next", "in UTC", "last", "when", "paused"],
        [[one.name, state(one), *_next(one), _last(one, now), when(one), pause_text(one, now)] for one in found],
    )
    if not found:
        made = "@app.every or app.schedules.create makes one"
        click.echo("no schedule is paused" if paused else f"there are no schedules yet: {made}")


def _next(schedule: ScheduleRecord) -> tuple[str, str]:
    """Write the next due time in the zone of the schedule and in UTC; a paused schedule has none."""
    if schedule.next_at is None or schedule.paused_at is not None:
        return "-", "-"
    return local_text(schedule.next_at, place_of(schedule.tz)), utc_text(schedule.next_at)


def _last(schedule: ScheduleRecord, now: int) -> str:
    return output.ago(schedule.last_at, now, units=1)


@command.command()
@click.argument("name")
@with_app
def show(app: Duly, name: str, as_json: bool) -> None:
    """Show a schedule with the terms and arguments of its jobs, and what it fired last.

    Exit code 3: no schedule has this name.

    Examples:
      duly schedules show nightly_report
      duly schedules show nightly_report --json --url jobs.db
    """
    schedule = find_schedule(app, name)
    fires = app.schedules.fires(name, limit=SHOWN_FIRES)
    now = app.driver.run(ops.clock())
    if as_json:
        output.answer_json({**plain(schedule), "fires": fires})
        return
    output.facts(_facts(schedule, now))
    click.echo()
    _print_fires(fires, schedule.tz)


def _facts(schedule: ScheduleRecord, now: int) -> list[tuple[str, str]]:
    fields = msgspec.structs.asdict(schedule)
    terms = {f"terms.{name}": value for name, value in fields.pop("terms").items()}
    known = {"name": fields.pop("name"), "state": state(schedule), "when": when(schedule)}
    return [
        (name, _shown(name, value, schedule.tz, now))
        for name, value in {**known, **fields, **terms}.items()
        if value is not None
    ]


def _shown(name: str, value: Any, tz: str, now: int) -> str:
    if name.endswith("_at"):
        return f"{both_texts(value, tz)}, {output.ago(value, now)}"
    if name.endswith("_ms"):
        return durations.describe(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return output.shown_json(value) if name == "payload" else str(value)


def _print_fires(fires: Sequence[FireRecord], tz: str) -> None:
    output.table(
        [*headings(tz), "outcome", "count", "until", "job", "reason"],
        [
            [
                *cells(one.due_at, tz),
                one.outcome,
                f"{one.count:,}",
                "-" if one.count == 1 or one.until_at is None else cells(one.until_at, tz)[0],
                one.job_id or "-",
                one.reason or "",
            ]
            for one in fires
        ],
    )
    if not fires:
        click.echo("it has not fired yet")


@command.command("next")
@click.argument("name")
@click.option("-n", "--count", type=click.IntRange(1, CHUNK), default=5, show_default=True, help="How many at most.")
@click.option(
    "--after", metavar="DATE", help="After then: 2026-01-31, 2026-01-31T12:00+01:00. Without a zone: the schedule's."
)
@with_app
def next_(app: Duly, name: str, count: int, after: str | None, as_json: bool) -> None:
    """Print the next due times of a schedule, in its zone and in UTC.

    JSON has each in milliseconds UTC and as text. Exit code 3: no schedule has this name.

    Examples:
      duly schedules next nightly_report
      duly schedules next nightly_report -n 20 --after 2026-03-28
      duly schedules next nightly_report --json
    """
    schedule = find_schedule(app, name)
    now = app.driver.run(ops.clock())
    place = known_zone(schedule)
    begin = None if after is None else read_moment(after, "--after", schedule)
    dues = list(islice(_dues(schedule, begin, now), count))
    if after is not None:
        remark_zones(schedule, {"--after": after})
    if as_json:
        output.answer_json([{"due_at": at, "local": _iso(at, place), "utc": _iso(at, UTC)} for at in dues])
    else:
        output.table(headings(schedule.tz), [cells(at, schedule.tz) for at in dues])
    _remark_limits(schedule, few=len(dues) < count)


def _dues(schedule: ScheduleRecord, after: int | None, now: int) -> Iterator[int]:
    """Give the future due times: from the next one, or after a moment."""
    timing, next_at, interval = timing_of(schedule), schedule.next_at, schedule.interval_ms
    if timing.mode is Mode.DELAY:
        return _next_of_delay(schedule, after, now)
    if after is None and next_at is not None and schedule.paused_at is not None and next_at <= now:
        after = now  # due times during the pause are skipped
    dues: Iterator[int] = iter(())
    if after is None and next_at is not None:
        dues = chain([next_at], occurrences(timing, next_at))
    elif after is not None and interval is not None and next_at is not None:
        first = next_at - (next_at - after - 1) // interval * interval
        dues = occurrences(timing, first - interval)
    elif after is not None:
        dues = occurrences(timing, after)
    return takewhile(lambda at: at <= LAST_AT, dues)


def _next_of_delay(schedule: ScheduleRecord, after: int | None, now: int) -> Iterator[int]:
    """Give the next due time of a schedule that counts from the end of its run, if it is known."""
    if after is not None:
        raise ConfigError(
            f"{schedule.name} counts from the end of each run, so only its next due time is known: omit --after"
        )
    if schedule.next_at is not None and (schedule.paused_at is None or schedule.next_at > now):
        yield schedule.next_at


def _iso(at: int, place: tzinfo) -> str:
    return in_zone(at, place).isoformat()


def _remark_limits(schedule: ScheduleRecord, *, few: bool) -> None:
    """Print why there are few due times, and that a paused schedule does not fire."""
    if schedule.paused_at is not None:
        output.remark(f"{schedule.name!r} is paused: nothing is fired before it is resumed")
    if few and schedule.mode == Mode.DELAY:
        output.remark(f"{schedule.name!r} is due {when(schedule)}: later due times are not known yet")
    elif few:
        output.remark(f"{schedule.name!r} has no further due time")


@command.command()
@click.argument("name")
@audit_options
@with_app
def pause(app: Duly, name: str, by: str, why: str | None, as_json: bool) -> None:
    """Pause a schedule: it does not fire until it is resumed. Its jobs continue.

    Exit code 3: no schedule has this name.

    Examples:
      duly schedules pause nightly_report
      duly schedules pause nightly_report --why "the warehouse moves" --by anna
    """
    find_schedule(app, name)
    app.schedules.pause(name, by=by, why=why or "")
    paused = find_schedule(app, name)
    now = app.driver.run(ops.clock())
    output.answer(plain(paused), f"schedule {name!r} is paused {pause_text(paused, now)}", as_json=as_json)


@command.command()
@click.argument("name")
@audit_options
@with_app
def resume(app: Duly, name: str, by: str, why: str | None, as_json: bool) -> None:
    """Resume a paused schedule with its next due time; due times during the pause are recorded as skipped.

    Exit code 1: it was not paused. 3: no schedule has this name.

    Examples:
      duly schedules resume nightly_report
      duly schedules resume nightly_report --why "the warehouse has moved" --json
    """
    before = find_schedule(app, name)
    resumed = app.schedules.resume(name, by=by, why=why or "")
    schedule = find_schedule(app, name)
    if as_json:
        output.answer_json({**plain(schedule), "resumed": resumed})
    elif resumed:
        next_at, due = schedule.next_at, f"; it is {state(schedule)}"
        if next_at is not None:
            due = f", due next at {both_texts(next_at, schedule.tz)}"
        click.echo(output.plain(f"schedule {name!r} is resumed{due}"))
    if not resumed:
        output.remark(f"schedule {name!r} was not paused")
        sys.exit(1)
    if before.in_code and before.paused_why == store.GONE:
        output.remark("no worker has it in its code: the next worker that starts without it pauses it again")


@command.command()
@click.argument("name")
@by_option
@with_app
def trigger(app: Duly, name: str, by: str, as_json: bool) -> None:
    """Run a schedule now, paused or not, and print the id of the job. Its next due time stays.

    Exit code 3: no schedule has this name.

    Examples:
      duly schedules trigger nightly_report
      duly jobs show "$(duly schedules trigger nightly_report)"
    """
    find_schedule(app, name)
    job_id = app.schedules.trigger(name, by=by)
    if as_json:
        output.answer_json({"id": job_id, "schedule": name})
        return
    click.echo(job_id)
    if sys.stderr.isatty():
        output.remark(f"show it with: duly jobs show {job_id}")


@command.command()
@click.argument("name")
@bulk_options
@audit_options
@with_app
def delete(app: Duly, name: str, dry_run: bool, yes: bool, by: str, why: str | None, as_json: bool) -> None:
    """Delete a schedule. Its jobs and the record of its fires stay.

    A schedule in code is created again when a worker starts with that code: pause it instead. Exit code 3: no schedule
    has this name.

    Examples:
      duly schedules delete nightly_report --dry-run
      duly schedules delete nightly_report --yes --why "no reader is left"
    """
    schedule = find_schedule(app, name)
    if not dry_run:
        if not output.confirmed(f"Delete schedule {name!r} ({when(schedule)})?", yes=yes):
            raise click.Abort
        app.schedules.delete(name, by=by, why=why or "")
    would = f"would delete schedule {name!r} ({when(schedule)}); nothing was changed"
    done = would if dry_run else f"schedule {name!r} is deleted"
    output.answer({**plain(schedule), "deleted": not dry_run}, done, as_json=as_json)
    if schedule.in_code:
        output.remark("it is defined in code: a worker that starts with this code creates it again")
