"""`duly restore FILE`: bring a backup back, and hold what is in it until a person has looked, if you like."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from duly.app.app import user
from duly.app.locate import find_app
from duly.cli import output
from duly.cli.backup import in_bytes, pages
from duly.cli.database import bulk_options, database_options, json_option, opened
from duly.duly import Duly
from duly.errors import ConfigError
from duly.model import HoldFigure
from duly.store import caller, ops
from duly.store.op import Op

WHY = "restored from a backup"
GO_ON = """\
Look at it:        duly queues list; duly jobs list --state waiting
Run what ran:      duly jobs retry ID, or for all of them: duly jobs retry --error held: --dry-run
Let a queue go on: duly queues resume NAME"""


@click.command(
    epilog="""\b
Examples:
  duly restore monday.db --hold
  duly restore monday.db --url /var/lib/shop/jobs.db --dry-run
  duly restore --hold --url postgresql://user@host/db
"""
)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option(
    "--hold",
    is_flag=True,
    help="Let nothing run before you say so: jobs that ran wait, queues and schedules are paused. Without FILE: hold a "
    "database that was restored by other means, such as pg_restore.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Do it though workers are alive there, which lose what they are at, and drop tables that FILE lacks.",
)
@bulk_options
@database_options
@json_option
def command(
    file: Path | None,
    hold: bool,
    force: bool,
    dry_run: bool,
    yes: bool,
    url: str | None,
    schema: str | None,
    target: str | None,
    as_json: bool,
) -> None:
    """Bring a backup back, held if you like.

    A SQLite database becomes what it was when FILE was made, all of it or, if that fails, nothing; what has happened
    in it since is gone. Jobs that were done after the backup was made are done again, unless --hold keeps them.
    """
    if file is None and not hold:
        raise click.UsageError("Name the backup FILE, or say --hold to hold a database that was restored already.")
    if not (yes or dry_run or sys.stdin.isatty()):
        raise click.UsageError("Nobody can be asked here: say --yes, or --dry-run to see what would be done.")
    if file is None:
        with opened(url, schema, target) as app:
            _hold(app, force=force, dry_run=dry_run, yes=yes, as_json=as_json)
    else:
        app = Duly(url, schema=schema) if target is None else find_app(target, Duly, url=url)
        _restore(file, _place(app), hold=hold, force=force, dry_run=dry_run, yes=yes, as_json=as_json)


class Contents(Struct, frozen=True):
    """What is in a database."""

    ready: int
    scheduled: int
    running: int
    waiting: int
    dead: int
    due: bool


def _hold(app: Duly, *, force: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Hold a database that was restored by other means."""
    _refuse_workers(app, force=force)
    found = _contents(app.driver.run)
    if not as_json:
        click.echo(f"{app.settings.url}: {_listed(found)}")
    held = None
    if not dry_run:
        if not output.confirmed("Hold it?", yes=yes):
            raise click.Abort
        held = app.driver.run(ops.hold(by=user(), why=WHY))
    if as_json:
        output.answer_json({"database": str(app.settings.url), "contents": found, "held": held})
    elif held is not None:
        _tell_held(held)


def _refuse_workers(app: Duly, *, force: bool) -> None:
    """Refuse to hold a database while workers claim: a claim that is on its way would not be held."""
    alive = [worker for worker in app.workers() if worker.alive]
    if not alive:
        return
    there = f"{output.plural(len(alive), 'worker')} alive in {app.settings.url}"
    if not force:
        gone_s = max(3 * worker.beat_ms for worker in alive) // 1000
        raise ConfigError(
            f"{there} ({alive[0].id}{', …' if len(alive) > 1 else ''}): stop them first, or say --force. "
            f"Those that only the backup knows are forgotten after {gone_s} s"
        )
    _warn(f"{there}: what they run is taken from them, and waits; what they claim just now runs on")


def _place(app: Duly) -> Path:
    settings = app.settings
    if settings.url.store == "postgresql":
        raise ConfigError(
            f"duly restore brings SQLite files back; {settings.url} is a server: use pg_restore, then "
            f"duly restore --hold --url {shlex.quote(str(settings.url))}"
        )
    if settings.url.path is None:
        raise ConfigError(f"duly restore brings SQLite files back; {settings.url} is none")
    return Path(settings.url.path)


def _restore(file: Path, place: Path, *, hold: bool, force: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    from duly.store.sqlite import backup as backups

    if not file.exists():
        raise ConfigError(f"there is no file {file}: look at its name")
    going = backups.check_restore(file, place, force=force)
    with backups.opened_to_look(file) as conn:
        found = _contents(lambda op: caller.run(conn, op))
    if not as_json:
        _tell_backup(file, found)
    if not hold:
        _warn_of(found)
    if going:
        _warn(f"tables of {place} that {file} lacks will go: {output.plain(', '.join(going))}")
    held = None
    if not dry_run:
        over = f"{place} is there: all that is in it goes. " if place.exists() else ""
        if not output.confirmed(f"{over}Restore {place} from {file}?", yes=yes):
            raise click.Abort
        with pages("restore") as progress:
            held = backups.restore(file, place, hold_by=user() if hold else None, force=force, progress=progress)
    if as_json:
        said = {"database": str(place), "file": str(file), "contents": found, "dropped": going}
        output.answer_json({**said, "restored": not dry_run, "held": held})
    elif not dry_run:
        click.echo(f"restored {place}")
        if held is not None:
            _tell_held(held)


def _contents(run: Callable[[Op[Any]], Any]) -> Contents:
    queues = run(ops.queues())
    return Contents(
        ready=sum(queue.ready for queue in queues),
        scheduled=sum(queue.scheduled for queue in queues),
        running=sum(queue.running for queue in queues),
        waiting=sum(queue.waiting for queue in queues),
        dead=sum(figure.count for figure in run(ops.dead_metrics())),
        due=any(queue.oldest_ms is not None for queue in queues),
    )


def _tell_backup(file: Path, found: Contents) -> None:
    about = file.stat()
    click.echo(f"{file}: {in_bytes(about.st_size)}, last written {output.moment(int(about.st_mtime * 1000))}")
    click.echo(_listed(found))


def _listed(found: Contents) -> str:
    names = ("running", "ready", "scheduled", "waiting", "dead")
    return ", ".join(f"{output.count(getattr(found, name))} {name}" for name in names)


def _warn_of(found: Contents) -> None:
    """Warn of what runs as soon as a worker comes, though it may have run since."""
    if found.running:
        those = "1 job that ran" if found.running == 1 else f"{output.count(found.running)} jobs that ran"
        _warn(f"{those} when the backup was made will run again: --hold keeps them from it")
    if found.due:
        _warn("jobs that are due will run as soon as a worker comes, though they may have run since: --hold keeps them")


def _warn(text: str) -> None:
    click.echo(f"duly: {text}", err=True)


def _tell_held(held: HoldFigure) -> None:
    jobs, queues = output.plural(held.jobs, "job"), output.plural(held.queues, "queue")
    click.echo(f"held: {jobs} that ran, {queues}, {output.plural(held.schedules, 'schedule')}; none goes on by itself")
    click.echo(GO_ON)
