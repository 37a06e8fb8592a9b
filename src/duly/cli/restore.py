"""`duly restore FILE`: restores a backup; with --hold its jobs wait until a person resumes them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from duly.app.filters import user
from duly.cli import output
from duly.cli.backup import in_bytes, pages
from duly.cli.database import Choice, database_options
from duly.cli.options import bulk_options, json_option
from duly.duly import Duly
from duly.errors import ConfigError
from duly.model import HoldFigure
from duly.store import caller, ops
from duly.store.op import Op

WHY = "restored from a backup"
NEXT_STEPS = """\
List held jobs:       duly queues list; duly jobs list --state waiting.
Run interrupted jobs: duly jobs retry ID, or all: duly jobs retry --error held: --dry-run.
Resume a queue:       duly queues resume NAME."""


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option(
    "--hold",
    is_flag=True,
    help="Let no job run until you resume: interrupted jobs wait, queues and schedules are paused. Without FILE: hold "
    "a database that was restored by other means, such as pg_restore.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Restore although workers are alive there, which lose their running jobs, and drop tables that FILE lacks.",
)
@bulk_options
@database_options
@json_option
def command(choice: Choice, file: Path | None, hold: bool, force: bool, **how: bool) -> None:
    """Restore a backup; with --hold, no job runs until you resume.

    A SQLite database becomes as it was when FILE was made, completely or, after an error, not at all. Later changes are
    lost. Jobs that ended after the backup run again, unless --hold stops them.

    Examples:
      duly restore monday.db --hold
      duly restore monday.db --url /var/lib/shop/jobs.db --dry-run
      duly restore --hold --url postgresql://user@host/db
    """
    if file is None and not hold:
        raise click.UsageError("Name the backup FILE, or give --hold to hold a database that was restored already.")
    if not (how["yes"] or how["dry_run"] or sys.stdin.isatty()):
        raise click.UsageError("stdin is not a terminal: give --yes, or --dry-run to see what would be done.")
    if file is None:
        with choice.opened() as app:
            _hold(app, force=force, **how)
    else:
        _restore(file, _place(choice.app()), hold=hold, force=force, **how)


class Contents(Struct, frozen=True):
    """Counts of the jobs in a database."""

    ready: int
    scheduled: int
    running: int
    waiting: int
    dead: int
    due: bool


def _hold(app: Duly, *, force: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Hold a database that was restored by another program."""
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
        _print_held(held)


def _refuse_workers(app: Duly, *, force: bool) -> None:
    """Refuse to hold a database while workers are alive: a claim in flight would not be held."""
    alive = [worker for worker in app.workers() if worker.alive]
    if not alive:
        return
    there = f"{output.plural(len(alive), 'worker')} alive in {app.settings.url}"
    if not force:
        gone_s = max(3 * worker.beat_ms for worker in alive) // 1000
        raise ConfigError(
            f"{there} ({alive[0].id}{', …' if len(alive) > 1 else ''}): stop them first, or give --force. "
            f"Workers that are only in the backup are forgotten after {gone_s} s"
        )
    output.remark(f"{there}: their running jobs are taken from them and wait; jobs they claim now continue")


def _place(app: Duly) -> Path:
    settings = app.settings
    if settings.url.store == "postgresql":
        raise ConfigError(
            f"duly restore restores SQLite files; {settings.url} is a server: use pg_restore, then "
            f"duly restore --hold --url {shlex.quote(str(settings.url))}"
        )
    if settings.url.store == "d1":
        raise ConfigError(
            f"duly restore restores SQLite files; {settings.url} is on Cloudflare: use "
            f"wrangler d1 time-travel restore, then duly restore --hold --url {shlex.quote(str(settings.url))}"
        )
    if settings.url.path is None:
        raise ConfigError(f"duly restore restores SQLite files; {settings.url} is not one")
    return Path(settings.url.path)


def _restore(file: Path, place: Path, *, hold: bool, force: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    from duly.store.sqlite import backup as backups

    if not file.exists():
        raise ConfigError(f"there is no file {file}: check the name")
    dropped = backups.check_restore(file, place, force=force)
    with backups.opened_to_look(file) as conn:
        found = _contents(lambda op: caller.run(conn, op))
    if not as_json:
        _print_backup(file, found)
    if not hold:
        _warn_of(found)
    if dropped:
        output.remark(f"tables of {place} that {file} lacks will be dropped: {', '.join(dropped)}")
    held = None
    if not dry_run:
        over = f"{place} exists: all its data will be lost. " if place.exists() else ""
        if not output.confirmed(f"{over}Restore {place} from {file}?", yes=yes):
            raise click.Abort
        with pages("restore") as progress:
            held = backups.restore(file, place, hold_by=user() if hold else None, force=force, progress=progress)
    if as_json:
        answer = {"database": str(place), "file": str(file), "contents": found, "dropped": dropped}
        output.answer_json({**answer, "restored": not dry_run, "held": held})
    elif not dry_run:
        click.echo(f"restored {place}")
        if held is not None:
            _print_held(held)


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


def _print_backup(file: Path, found: Contents) -> None:
    about = file.stat()
    click.echo(f"{file}: {in_bytes(about.st_size)}, last written {output.moment(int(about.st_mtime * 1000))}")
    click.echo(_listed(found))


def _listed(found: Contents) -> str:
    names = ("running", "ready", "scheduled", "waiting", "dead")
    return ", ".join(f"{output.count(getattr(found, name))} {name}" for name in names)


def _warn_of(found: Contents) -> None:
    """Warn of jobs that a worker will run soon, although they may have run since the backup."""
    if found.running:
        jobs = "1 job that ran" if found.running == 1 else f"{output.count(found.running)} jobs that ran"
        output.remark(f"{jobs} when the backup was made will run again: --hold prevents it")
    if found.due:
        output.remark("due jobs will run when a worker starts, although they may have run before: --hold prevents it")


def _print_held(held: HoldFigure) -> None:
    jobs, queues = output.plural(held.jobs, "job"), output.plural(held.queues, "queue")
    click.echo(f"held: {jobs} that ran, {queues}, {output.plural(held.schedules, 'schedule')}; resume them by hand")
    click.echo(NEXT_STEPS)
