"""`duly schedules`: look at what recurs, and pause, resume, trigger, backfill and delete it.

Everything is read from the database, so that no code is needed. Times are told in the schedule's zone and in UTC.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import chain, islice, takewhile
from typing import Any, TypeVar

import click
import msgspec

from duly.app.app import user
from duly.app.schedules import CHUNK, dues_from, refuse_forgotten, refuse_window, the_one
from duly.cli import Named, output
from duly.cli.database import audit_options, bulk_options, database_options, json_option, opened
from duly.cli.queues import meant
from duly.duly import Duly
from duly.errors import ConfigError, ScheduleNotFound
from duly.model import MANY, FireRecord, ScheduleRecord
from duly.rules import durations
from duly.rules.timing import DAY, LAST_DAY, Mode, Timing, explain, occurrences, zone
from duly.store import ops
from duly.store import schedules as store

C = TypeVar("C", bound=Callable[..., Any])

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LAST_AT = LAST_DAY * DAY * 1000  # no datetime holds much more
FIRST_YEAR, LAST_YEAR = 1970, 9998
SHOWN_FIRES = 10
SAMPLE = 5


@click.group(
    cls=Named,
    epilog="""\b
Examples:
  duly schedules list
  duly schedules next nightly_report -n 10
  duly schedules pause nightly_report --why "the warehouse moves"
  duly schedules backfill nightly_report --since 2026-01-01 --until 2026-01-07T12:00 --dry-run
""",
)
def command() -> None:
    """List, preview, pause, resume, trigger, backfill and delete schedules."""


def by_option(command: C) -> C:
    """Add the option that says who does something."""
    return click.option("--by", default=user, show_default="whoever is logged in", help="Who, for the record.")(command)


# Looking


@command.command(
    "list",
    epilog="""\b
Examples:
  duly schedules list
  duly schedules list --paused
  duly schedules list --json --url jobs.db
""",
)
@click.option("--paused", is_flag=True, help="Only those that are paused.")
@database_options
@json_option
def list_(paused: bool, url: str | None, schema: str | None, target: str | None, as_json: bool) -> None:
    """List schedules: when each is due, next and last, in words, and who paused it.

    The state is active, paused, ended (its rule has no due time any more), or running (it counts from the end of its
    run, which has not come yet).
    """
    with opened(url, schema, target) as app:
        found = [one for one in app.schedules.list() if one.paused_at is not None or not paused]
        now = app.driver.run(ops.clock())
    if as_json:
        output.answer_json([_described(one) for one in found])
        return
    output.table(
        ["name", "state", "next", "in UTC", "last", "when", "paused"],
        [[one.name, _state(one), *_next_cells(one), _last(one, now), _when(one), _pause(one, now)] for one in found],
    )
    if not found:
        made = "@app.every or app.schedules.create makes one"
        click.echo("no schedule is paused" if paused else f"there are no schedules yet: {made}")


def _described(schedule: ScheduleRecord) -> dict[str, Any]:
    """Give the fields of a schedule, and what follows from them."""
    return {**msgspec.to_builtins(schedule), "state": _state(schedule), "when": _when(schedule)}


def _state(schedule: ScheduleRecord) -> str:
    if schedule.paused_at is not None:
        return "paused"
    if schedule.next_at is not None:
        return "active"
    return "running" if schedule.mode == Mode.DELAY else "ended"


def _next_cells(schedule: ScheduleRecord) -> tuple[str, str]:
    """Write the next due time in the schedule's zone and in UTC; what is paused has none before it is resumed."""
    if schedule.next_at is None or schedule.paused_at is not None:
        return "-", "-"
    return _told(schedule.next_at, _place(schedule.tz)), _told_utc(schedule.next_at)


def _last(schedule: ScheduleRecord, now: int) -> str:
    return output.ago(schedule.last_at, now, units=1)


def _when(schedule: ScheduleRecord) -> str:
    """Say in words when a schedule is due."""
    try:
        return explain(_timing(schedule))
    except ConfigError:  # of a newer version of duly
        return schedule.spec


def _timing(schedule: ScheduleRecord) -> Timing:
    return Timing(Mode(schedule.mode), schedule.spec, schedule.tz, schedule.interval_ms, schedule.anchor_at)


def _pause(schedule: ScheduleRecord, now: int) -> str:
    if schedule.paused_at is None:
        return ""
    why = f": {schedule.paused_why}" if schedule.paused_why else ""
    return f"by {schedule.paused_by} {output.ago(schedule.paused_at, now)}{why}"


def _place(tz: str) -> tzinfo:
    """Give the zone to tell times in; where it is not known, they are told in UTC."""
    try:
        return zone(tz)
    except ConfigError:
        return UTC


def _told(at: int, place: tzinfo) -> str:
    """Write a moment of a zone with its distance from UTC."""
    return _written(at, place).isoformat(" ", "milliseconds" if at % 1000 else "seconds")


def _told_utc(at: int) -> str:
    return _told(at, UTC).removesuffix("+00:00")


def _both(at: int, tz: str) -> str:
    """Write a moment in a zone and in UTC."""
    utc = f"{_told_utc(at)} UTC"
    return utc if tz == "UTC" else f"{_told(at, _place(tz))} ({utc})"


def _written(at: int, place: tzinfo) -> datetime:
    return (EPOCH + timedelta(milliseconds=at)).astimezone(place)


@command.command(
    epilog="""\b
Examples:
  duly schedules show nightly_report
  duly schedules show nightly_report --json --url jobs.db
"""
)
@click.argument("name")
@database_options
@json_option
def show(name: str, url: str | None, schema: str | None, target: str | None, as_json: bool) -> None:
    """Show a schedule with the terms and arguments of its jobs, and the last things that came of it.

    Exit code 3: no schedule has this name.
    """
    with opened(url, schema, target) as app:
        schedule = _found(app, name)
        fires = app.schedules.fires(name, limit=SHOWN_FIRES)
        now = app.driver.run(ops.clock())
    if as_json:
        output.answer_json({**_described(schedule), "fires": fires})
        return
    output.facts(_facts(schedule, now))
    click.echo()
    _tell_fires(fires, schedule.tz)


def _found(app: Duly, name: str) -> ScheduleRecord:
    """Read a schedule, or say which was probably meant."""
    schedule = app.schedules.get(name) if name.isprintable() else None  # else it may be no text at all
    if schedule is None:
        known = {one.name for one in app.schedules.list()}
        raise ScheduleNotFound(f"no schedule is named {name!r}{meant(name, known)}")
    return schedule


def _facts(schedule: ScheduleRecord, now: int) -> list[tuple[str, str]]:
    fields = msgspec.structs.asdict(schedule)
    terms = {f"terms.{name}": value for name, value in fields.pop("terms").items()}
    known = {"name": fields.pop("name"), "state": _state(schedule), "when": _when(schedule)}
    return [
        (name, _shown(name, value, schedule.tz, now))
        for name, value in {**known, **fields, **terms}.items()
        if value is not None
    ]


def _shown(name: str, value: Any, tz: str, now: int) -> str:
    if name.endswith("_at"):
        return f"{_both(value, tz)}, {output.ago(value, now)}"
    if name.endswith("_ms"):
        return durations.describe(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return json.dumps(value, ensure_ascii=False) if name == "payload" else str(value)


def _tell_fires(fires: Sequence[FireRecord], tz: str) -> None:
    output.table(
        [*_headings(tz), "outcome", "count", "until", "job", "reason"],
        [
            [
                *_cells(one.due_at, tz),
                one.outcome,
                f"{one.count:,}",
                "-" if one.count == 1 or one.until_at is None else _cells(one.until_at, tz)[0],
                one.job_id or "-",
                one.reason or "",
            ]
            for one in fires
        ],
    )
    if not fires:
        click.echo("nothing has come of it yet")


def _headings(tz: str) -> list[str]:
    return ["UTC"] if tz == "UTC" else [tz, "UTC"]


def _cells(at: int, tz: str) -> list[str]:
    """Write a moment in a zone and in UTC, once where that is the same."""
    return [_told_utc(at)] if tz == "UTC" else [_told(at, _place(tz)), _told_utc(at)]


@command.command(
    "next",
    epilog="""\b
Examples:
  duly schedules next nightly_report
  duly schedules next nightly_report -n 20 --after 2026-03-28
  duly schedules next nightly_report --json
""",
)
@click.argument("name")
@click.option("-n", "--count", type=click.IntRange(1, CHUNK), default=5, show_default=True, help="How many at most.")
@click.option(
    "--after", metavar="DATE", help="After then: 2026-01-31, 2026-01-31T12:00+01:00. Without a zone: the schedule's."
)
@database_options
@json_option
def next_(
    name: str, count: int, after: str | None, url: str | None, schema: str | None, target: str | None, as_json: bool
) -> None:
    """Say when a schedule is due next, in its zone and in UTC.

    JSON has each in milliseconds UTC and as text. Exit code 3: no schedule has this name.
    """
    with opened(url, schema, target) as app:
        schedule = _found(app, name)
        now = app.driver.run(ops.clock())
    place = _readable(schedule)
    begin = None if after is None else _moment(after, "--after", schedule)
    dues = list(islice(_dues(schedule, begin, now), count))
    if after is not None:
        _say_zone(schedule, {"--after": after})
    if as_json:
        output.answer_json([{"due_at": at, "local": _iso(at, place), "utc": _iso(at, UTC)} for at in dues])
    else:
        output.table(_headings(schedule.tz), [_cells(at, schedule.tz) for at in dues])
    _tell_limits(schedule, few=len(dues) < count)


def _readable(schedule: ScheduleRecord) -> tzinfo:
    """Give the zone of a schedule, or say why it cannot be read here."""
    try:
        return zone(schedule.tz)
    except ConfigError as error:
        raise ConfigError(f"{schedule.name}: {error}") from None


def _dues(schedule: ScheduleRecord, after: int | None, now: int) -> Iterator[int]:
    """Give the due times to come: from the next one, or after a moment."""
    timing, next_at, interval = _timing(schedule), schedule.next_at, schedule.interval_ms
    if timing.mode is Mode.DELAY:
        return _next_of_delay(schedule, after, now)
    if after is None and next_at is not None and schedule.paused_at is not None and next_at <= now:
        after = now  # what falls into the pause is skipped
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
    """Give the one due time that is known, if it is."""
    if after is not None:
        raise ConfigError(
            f"{schedule.name} counts from the end of each run, so only its next due time is known: leave --after away"
        )
    if schedule.next_at is not None and (schedule.paused_at is None or schedule.next_at > now):
        yield schedule.next_at


def _iso(at: int, place: tzinfo) -> str:
    return _written(at, place).isoformat()


def _tell_limits(schedule: ScheduleRecord, *, few: bool) -> None:
    """Say what the answer does not: why it is short, and that nothing comes of it while it is paused."""
    if schedule.paused_at is not None:
        _say(f"{schedule.name!r} is paused: nothing is fired before it is resumed")
    if few and schedule.mode == Mode.DELAY:
        _say(f"{schedule.name!r} is due {_when(schedule)}: what follows is known then")
    elif few:
        _say(f"{schedule.name!r} has no further due time")


def _say(text: str) -> None:
    click.echo(f"duly: {output.plain(text)}", err=True)


def _moment(text: str, what: str, schedule: ScheduleRecord) -> int:
    """Read a date; one that names no zone is taken in the schedule's."""
    at = _date(text, what)
    return _ms(at if at.tzinfo else at.replace(tzinfo=_readable(schedule)))


def _date(text: str, what: str) -> datetime:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{what} is {text!r}, which is no date: write 2026-01-31, 2026-01-31T12:00 or 2026-01-31T12:00+01:00"
        ) from None
    if not FIRST_YEAR <= at.year <= LAST_YEAR:
        raise ConfigError(f"{what} is {text!r}: give a year from {FIRST_YEAR} to {LAST_YEAR}")
    return at


def _say_zone(schedule: ScheduleRecord, given: Mapping[str, str]) -> None:
    """Say as what dates were taken that name no zone."""
    for what, text in given.items():
        if _date(text, what).tzinfo is None:
            _say(f"{what} names no zone: taken as {_both(_moment(text, what, schedule), schedule.tz)}")


def _ms(at: datetime) -> int:
    return (at - EPOCH) // timedelta(milliseconds=1)


# Changing


@command.command(
    epilog="""\b
Examples:
  duly schedules pause nightly_report
  duly schedules pause nightly_report --why "the warehouse moves" --by anna
"""
)
@click.argument("name")
@audit_options
@database_options
@json_option
def pause(
    name: str, by: str, why: str | None, url: str | None, schema: str | None, target: str | None, as_json: bool
) -> None:
    """Fire a schedule no more until it is resumed. What it has fired runs on.

    Exit code 3: no schedule has this name.
    """
    with opened(url, schema, target) as app:
        _found(app, name)
        app.schedules.pause(name, by=by, why=why or "")
        paused = _found(app, name)
        now = app.driver.run(ops.clock())
    if as_json:
        output.answer_json(_described(paused))
    else:
        click.echo(output.plain(f"schedule {name!r} is paused {_pause(paused, now)}"))


@command.command(
    epilog="""\b
Examples:
  duly schedules resume nightly_report
  duly schedules resume nightly_report --why "the warehouse has moved" --json
"""
)
@click.argument("name")
@audit_options
@database_options
@json_option
def resume(
    name: str, by: str, why: str | None, url: str | None, schema: str | None, target: str | None, as_json: bool
) -> None:
    """Let a paused schedule go on with its next due time; what fell into the pause is recorded as skipped.

    Exit code 1: it was not paused. 3: no schedule has this name.
    """
    with opened(url, schema, target) as app:
        before = _found(app, name)
        resumed = app.schedules.resume(name, by=by, why=why or "")
        schedule = _found(app, name)
    if as_json:
        output.answer_json({**_described(schedule), "resumed": resumed})
    elif resumed:
        next_at = schedule.next_at
        due = f", due next at {_both(next_at, schedule.tz)}" if next_at is not None else f"; it is {_state(schedule)}"
        click.echo(output.plain(f"schedule {name!r} goes on{due}"))
    if not resumed:
        _say(f"schedule {name!r} was not paused")
        sys.exit(1)
    if before.in_code and before.paused_why == store.GONE:
        _say("no worker has it in its code: the next one that starts without it pauses it again")


@command.command(
    epilog="""\b
Examples:
  duly schedules trigger nightly_report
  duly jobs show "$(duly schedules trigger nightly_report)"
"""
)
@click.argument("name")
@by_option
@database_options
@json_option
def trigger(name: str, by: str, url: str | None, schema: str | None, target: str | None, as_json: bool) -> None:
    """Run a schedule now, paused or not, and print the id of the job. Its next due time stays.

    Exit code 3: no schedule has this name.
    """
    with opened(url, schema, target) as app:
        _found(app, name)
        job_id = app.schedules.trigger(name, by=by)
    if as_json:
        output.answer_json({"id": job_id, "schedule": name})
        return
    click.echo(job_id)
    if sys.stderr.isatty():
        _say(f"look at it with: duly jobs show {job_id}")


@command.command(
    epilog="""\b
Examples:
  duly schedules backfill nightly_report --since 2026-01-01 --until 2026-01-07T12:00 --dry-run
  duly schedules backfill nightly_report --since 2026-01-01T00:00Z --until 2026-02-01T00:00Z --yes
"""
)
@click.argument("name")
@click.option(
    "--since", metavar="DATE", required=True, help="From then on: 2026-01-31, 2026-01-31T12:00. Zone: the schedule's."
)
@click.option("--until", metavar="DATE", required=True, help="Until then, and not in the future; written like --since.")
@click.option("--force", is_flag=True, help="Also from before the record of fires begins, whether or not it has run.")
@bulk_options
@by_option
@database_options
@json_option
def backfill(
    name: str,
    since: str,
    until: str,
    force: bool,
    dry_run: bool,
    yes: bool,
    by: str,
    url: str | None,
    schema: str | None,
    target: str | None,
    as_json: bool,
) -> None:
    """Fire the due times of a past window that were not fired, both ends included.

    Asked again it fires only what is still missing. Where runs may not overlap, they run one after the other. Exit code
    3: no schedule has this name.
    """
    with opened(url, schema, target) as app:
        schedule = _found(app, name)
        window = _window(since, until, schedule)
        count, first = _count(_unfired(app, name, *window, force=force))
        _say_zone(schedule, {"--since": since, "--until": until})
        if dry_run:
            _tell_dry(schedule, count, first, as_json)
            return
        due_times = output.plural(count, "due time")
        if count and not output.confirmed(f"Fire {due_times} of {name!r}?", yes=yes):
            raise click.Abort
        ids = _backfill(app, name, window, by, count, force=force) if count else []
    if as_json:
        output.answer_json({"count": len(ids), "ids": ids})
    else:
        click.echo(f"fired {len(ids):,} of {name!r}" if ids else f"nothing to fire: {_nothing(schedule)}")


def _window(since: str, until: str, schedule: ScheduleRecord) -> tuple[int, int]:
    begin, end = _moment(since, "--since", schedule), _moment(until, "--until", schedule)
    if end < begin:
        raise ConfigError(f"--until {until} is before --since {since}: give the earlier one as --since")
    return begin, end


def _unfired(app: Duly, name: str, since: int, until: int, *, force: bool) -> Iterator[list[int]]:
    """Walk the due times of a window in parts, without those that were fired."""
    due = the_one(app.driver.run(store.one(name)), name)
    refuse_window(due, until)
    if not force:
        refuse_forgotten(due, since, until, app.settings.keep_ms)
    dues = takewhile(lambda at: at <= until, dues_from(due, since))
    while part := list(islice(dues, CHUNK)):
        fired = app.driver.run(store.fired_between(name, part[0], part[-1]))
        if missing := sorted(set(part).difference(fired)):
            yield missing


def _count(parts: Iterator[list[int]]) -> tuple[int, list[int]]:
    """Count due times, as far as people count, and give the first few."""
    count, first = 0, list[int]()
    for part in parts:
        count, first = count + len(part), [*first, *part][:SAMPLE]
        if count > MANY:
            return MANY + 1, first
    return count, first


def _tell_dry(schedule: ScheduleRecord, count: int, first: Sequence[int], as_json: bool) -> None:
    if as_json:
        output.answer_json({"dry_run": True, "count": count, "first": first})
    elif not count:
        click.echo(f"nothing to fire: {_nothing(schedule)}")
    else:
        click.echo(f"would fire {output.plural(count, 'due time')} of {schedule.name!r}; nothing was changed")
        for at in first:
            click.echo(f"  {_both(at, schedule.tz)}")
        if count > len(first):
            click.echo("  …")


def _nothing(schedule: ScheduleRecord) -> str:
    return f"{schedule.name!r} has no due time there that was not fired"


def _backfill(app: Duly, name: str, window: tuple[int, int], by: str, count: int, *, force: bool) -> list[str]:
    """Fire a part after the other."""
    ids: list[str] = []
    with output.progress("fire", count if count <= MANY else None) as advance:
        for part in _unfired(app, name, *window, force=force):
            since, until = _written(part[0], UTC), _written(part[-1], UTC)
            ids += app.schedules.backfill(name, since, until, by=by, force=force)
            advance(len(part))
    return ids


@command.command(
    epilog="""\b
Examples:
  duly schedules delete nightly_report --dry-run
  duly schedules delete nightly_report --yes --why "nobody reads it"
"""
)
@click.argument("name")
@bulk_options
@audit_options
@database_options
@json_option
def delete(
    name: str,
    dry_run: bool,
    yes: bool,
    by: str,
    why: str | None,
    url: str | None,
    schema: str | None,
    target: str | None,
    as_json: bool,
) -> None:
    """Delete a schedule. Its jobs and the record of what it fired stay.

    One that is defined in code comes back when a worker starts that has it there: pause it instead. Exit code 3: no
    schedule has this name.
    """
    with opened(url, schema, target) as app:
        schedule = _found(app, name)
        if not dry_run:
            if not output.confirmed(f"Delete schedule {name!r} ({_when(schedule)})?", yes=yes):
                raise click.Abort
            app.schedules.delete(name, by=by, why=why or "")
    if as_json:
        output.answer_json({**_described(schedule), "deleted": not dry_run})
    elif dry_run:
        click.echo(output.plain(f"would delete schedule {name!r} ({_when(schedule)}); nothing was changed"))
    else:
        click.echo(output.plain(f"schedule {name!r} is deleted"))
    if schedule.in_code:
        _say("it is defined in code: it comes back when a worker starts that has it there")
