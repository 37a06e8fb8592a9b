"""`duly schedules backfill`: fires the due times of a past window that were not fired."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC
from itertools import islice, takewhile

import click

from duly.app.backfill import CHUNK, dues_from, refuse_forgotten, refuse_window, the_one
from duly.cli import output
from duly.cli.database import with_app
from duly.cli.options import bulk_options, by_option
from duly.cli.schedule_lookup import find_schedule
from duly.cli.schedule_times import both_texts, in_zone, read_moment, remark_zones
from duly.duly import Duly
from duly.errors import ConfigError
from duly.model import MANY, ScheduleRecord
from duly.store import schedules as store

SAMPLE = 5


@click.command()
@click.argument("name")
@click.option(
    "--since",
    metavar="DATE",
    required=True,
    help="The first moment: 2026-01-31, 2026-01-31T12:00. Zone: the schedule's.",
)
@click.option(
    "--until", metavar="DATE", required=True, help="The last moment, not in the future; written like --since."
)
@click.option("--force", is_flag=True, help="Also before the record of fires begins, even if it was fired then.")
@bulk_options
@by_option
@with_app
def backfill(
    app: Duly, name: str, since: str, until: str, force: bool, dry_run: bool, yes: bool, by: str, as_json: bool
) -> None:
    """Fire the due times of a past window that were not fired, both ends included.

    Repeated, it fires only what is still missing. Where runs may not overlap, they run one after the other. Exit code
    3: no schedule has this name.

    Examples:
      duly schedules backfill nightly_report --since 2026-01-01 --until 2026-01-07T12:00 --dry-run
      duly schedules backfill nightly_report --since 2026-01-01T00:00Z --until 2026-02-01T00:00Z --yes
    """
    schedule = find_schedule(app, name)
    window = _window(since, until, schedule)
    count, first = _count(_unfired(app, name, *window, force=force))
    remark_zones(schedule, {"--since": since, "--until": until})
    if dry_run:
        _print_dry_run(schedule, count, first, as_json)
        return
    due_times = output.plural(count, "due time")
    if count and not output.confirmed(f"Fire {due_times} of {name!r}?", yes=yes):
        raise click.Abort
    ids = _backfill(app, name, window, by, count, force=force) if count else []
    done = f"fired {len(ids):,} of {name!r}" if ids else f"nothing to fire: {_nothing(schedule)}"
    output.answer({"count": len(ids), "ids": ids}, done, as_json=as_json)


def _window(since: str, until: str, schedule: ScheduleRecord) -> tuple[int, int]:
    begin, end = read_moment(since, "--since", schedule, down=False), read_moment(until, "--until", schedule)
    if end < begin:
        raise ConfigError(f"--until {until} is before --since {since}: give the earlier one as --since")
    return begin, end


def _unfired(app: Duly, name: str, since: int, until: int, *, force: bool) -> Iterator[list[int]]:
    """Give the due times of a window that were not fired, in chunks."""
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
    """Count due times, up to the greatest count, and give the first few."""
    count, first = 0, list[int]()
    for part in parts:
        count, first = count + len(part), [*first, *part][:SAMPLE]
        if count > MANY:
            return MANY + 1, first
    return count, first


def _print_dry_run(schedule: ScheduleRecord, count: int, first: Sequence[int], as_json: bool) -> None:
    if as_json:
        output.answer_json({"dry_run": True, "count": count, "first": first})
    elif not count:
        click.echo(f"nothing to fire: {_nothing(schedule)}")
    else:
        click.echo(f"would fire {output.plural(count, 'due time')} of {schedule.name!r}; nothing was changed")
        for at in first:
            click.echo(f"  {both_texts(at, schedule.tz)}")
        if count > len(first):
            click.echo("  …")


def _nothing(schedule: ScheduleRecord) -> str:
    return f"{schedule.name!r} has no due time there that was not fired"


def _backfill(app: Duly, name: str, window: tuple[int, int], by: str, count: int, *, force: bool) -> list[str]:
    """Fire the due times chunk by chunk, and show the progress."""
    ids: list[str] = []
    with output.progress("fire", count if count <= MANY else None) as advance:
        for part in _unfired(app, name, *window, force=force):
            since, until = in_zone(part[0], UTC), in_zone(part[-1], UTC)
            ids += app.schedules.backfill(name, since, until, by=by, force=force)
            advance(len(part))
    return ids
