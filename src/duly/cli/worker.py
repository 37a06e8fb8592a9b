"""`duly worker module:app`: run the jobs of an app until told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from duly import __version__
from duly.app.app import App
from duly.app.locate import find_app
from duly.cli import logs, wait_for_database
from duly.cli.shutdown import Ending, leave
from duly.cli.supervisor import RESTART, Supervisor, command_line
from duly.duly import Duly
from duly.errors import ConfigError
from duly.rules.durations import describe, to_ms
from duly.store.driver import About
from duly.worker.worker import Worker

log = logging.getLogger("duly.worker")

OTHER_SQLITE = "it brings an SQLite of its own: two on one file drop each other's locks, so keep it to other files"
FAREWELL = "stopping: running jobs have {grace}; Ctrl-C again gives them back at once"
STUCK = "half of its threads are stuck"
DURABILITY = {
    "full": "full: what is committed survives a power cut",
    "normal": "normal: a power cut may lose the last commits",
    "synchronous_commit off": "synchronous_commit is off: a crash of the server may lose the last commits",
    "fsync off": "fsync is off: a power cut may damage the database",
}


@click.command()
@click.argument("target", metavar="MODULE:APP", type=click.Path())
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    envvar="DULY_CONCURRENCY",
    help="How many jobs run at once in a process. [$DULY_CONCURRENCY]",
)
@click.option(
    "--processes",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    envvar="DULY_PROCESSES",
    help="How many processes. [$DULY_PROCESSES]",
)
@click.option(
    "--queues",
    multiple=True,
    envvar="DULY_QUEUES",
    metavar="NAME[:LIMIT],…",
    help="Queues to serve, each with how many of its jobs run at once in a process. "
    "Default: those of the app's tasks. [$DULY_QUEUES]",
)
@click.option("--grace", help="How long running jobs may go on after SIGTERM. Default: 30s. [$DULY_GRACE]")
@click.option("--url", help="The database, instead of the one that the app names. [$DULY_URL, if the app names none]")
@click.option(
    "--log-level",
    type=click.Choice(logs.LEVELS, case_sensitive=False),
    default="info",
    show_default=True,
    envvar="DULY_LOG_LEVEL",
    help="What to log. Each success is told at debug. [$DULY_LOG_LEVEL]",
)
@click.option(
    "--log-json",
    "--json",
    "log_json",
    is_flag=True,
    envvar="DULY_LOG_JSON",
    help="Log one JSON object a line. [$DULY_LOG_JSON]",
)
@click.option("--lifeline", type=int, hidden=True)
def command(
    target: str,
    concurrency: int,
    processes: int,
    queues: tuple[str, ...],
    grace: str | None,
    url: str | None,
    log_level: str,
    log_json: bool,
    lifeline: int | None,
) -> None:
    """Run the jobs of an app.

    MODULE:APP is imported with the current folder first on the path; tasks.py or tasks alone will do where there is
    only one app. A database that is away is waited for.

    Examples:
      duly worker tasks:app
      duly worker tasks.py --concurrency 20
      duly worker shop.tasks:app --queues mail:3,default --processes 4
      duly worker tasks:app --url postgresql://user@host/db --log-json

    Signals: SIGTERM or Ctrl-C lets running jobs end within the grace time, then gives the rest back; a second one does
    so at once. Exit codes: 0 stopped, 1 failed, 2 wrong usage.
    """
    logs.configure(log_level, as_json=log_json)
    ending = Ending()
    ending.hear(lifeline)
    folder = Path.cwd()
    app = find_app(target, Duly, url=url)
    grace_ms = app.settings.grace_ms if grace is None else to_ms(grace, what="--grace")
    options = {"concurrency": concurrency, "queues": read_queues(queues), "grace": timedelta(milliseconds=grace_ms)}
    serving = Serving(app, ending, options, supervised=lifeline is not None, folder=folder)
    if lifeline is None:
        about = serving.reach(remedy=migration(target, app, url), as_json=log_json)
        tell_first_lines(serving.worker, about, processes=processes, as_json=log_json)
        warn_of_slips(serving.worker)
    farewell = FAREWELL.format(grace=describe(grace_ms)) if sys.stderr.isatty() and not log_json else None
    if processes > 1:
        app.close()
        words = ["--processes", "1", "--concurrency", str(concurrency), "--grace", f"{grace_ms}ms"]
        words += ["--log-level", log_level, *(["--log-json"] if log_json else [])]
        words += [word for queue in queues for word in ("--queues", queue)]
        sys.exit(Supervisor(command_line("worker", target, *words), processes, farewell=farewell).run())
    if farewell and lifeline is None:
        app.events.listen(lambda name, fields: _say_farewell(name, fields, farewell))
    serving.run(grace_ms / 1000)


def _say_farewell(name: str, fields: Mapping[str, Any], farewell: str) -> None:
    """Say on a terminal why the worker is still there after Ctrl-C."""
    if name == "worker.stopping" and fields["running"]:
        click.echo(farewell, err=True)


class Serving:
    """One worker in this process, from its first look at the database to the end of the process."""

    def __init__(self, app: Duly, ending: Ending, options: dict[str, Any], *, supervised: bool, folder: Path) -> None:
        self._app = app
        self._ending = ending
        self._supervised = supervised
        self._folder = folder
        self._restart = False
        self.worker: Worker = app.worker(**options, signals=False, on_stuck=self._stuck)

    def reach(self, *, remedy: str, as_json: bool) -> About:
        """Ask the database about itself; while it is away, say so and wait."""
        return wait_for_database.reach(self._app, self.worker.id, self._ending, remedy=remedy, as_json=as_json)

    def run(self, grace_s: float) -> None:
        """Work until told to stop; begin anew instead when too many threads are stuck."""
        asyncio.run(self._run(grace_s))
        self._app.close()
        if self._begins_anew:
            self._begin_anew()

    async def _run(self, grace_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._ending.asks(lambda: loop.call_soon_threadsafe(self.worker.stop), grace_s=grace_s)
        try:
            await self.worker.run()
        except BaseException:
            self._ending.over(lambda: leave(1))
            raise
        # Nothing of ours is left to do, but threads of handlers may keep the process from ending.
        self._ending.over(self._begin_anew if self._begins_anew else lambda: leave(0))

    def _stuck(self) -> None:
        """Hear that half of the threads are stuck. They cannot be freed, only left behind with their process."""
        if not self._restart:
            log.error("worker.restarting", extra={"worker": self.worker.id, "why": STUCK})
        self._restart = True

    @property
    def _begins_anew(self) -> bool:
        return self._restart and not self._ending.asked

    def _begin_anew(self) -> None:
        if self._supervised:
            leave(RESTART)
        sys.stdout.flush()
        sys.stderr.flush()
        os.chdir(self._folder)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


def read_queues(texts: Iterable[str]) -> dict[str, int | None] | None:
    """Read `mail:3,default`, given once or several times; None where nothing is given."""
    limits: dict[str, int | None] = {}
    for part in ",".join(texts).split(","):
        name, colon, limit = part.strip().partition(":")
        if not name and not colon:
            continue
        if not name or (colon and not (limit.isdecimal() and int(limit) > 0)):
            raise ConfigError(f"--queues: {part.strip()!r} is not NAME or NAME:LIMIT, as in mail:3,default")
        limits[name] = int(limit) if colon else None
    return limits or None


def migration(target: str, app: Duly, url: str | None) -> str:
    """Write the command that makes the tables of the database that these words mean."""
    words = ["duly", "migrate", "--app", target, *(["--url", str(app.settings.url)] if url is not None else [])]
    return shlex.join(words)


def tell_first_lines(worker: Worker, about: About, *, processes: int, as_json: bool) -> None:
    """Say what runs here and on what."""
    if as_json:
        log.info("worker.about", extra=_facts(worker, about, processes))
        return
    for name, value in _facts(worker, about, processes).items():
        click.echo(f"{name:<11}{value}", err=True)


def _facts(worker: Worker, about: About, processes: int) -> dict[str, Any]:
    tasks = sorted({task.name for task in worker.app.tasks.values()})
    facts = {
        "duly": __version__,
        "database": about.where,
        "engine": about.engine,
        "schema": about.schema,
        "durability": DURABILITY.get(about.durability, about.durability),
        "queues": ", ".join(_queue(name, limit) for name, limit in worker.queues.items()),
        "tasks": ", ".join(tasks) or "none: define some with @app.task",
        "slots": str(worker.concurrency) + (f" in each of {processes} processes" if processes > 1 else ""),
        **({"supervisor": f"pid {os.getpid()}"} if processes > 1 else {"worker": f"{worker.id}, pid {os.getpid()}"}),
    }
    if about.store == "SQLite" and _has_wal_hazard():
        facts["caution"] = "this SQLite has a bug that can damage a file; duly steers around it (more: duly doctor)"
    return facts


def _queue(name: str, limit: int | None) -> str:
    return name if limit is None else f"{name} (at most {limit} at once)"


def _has_wal_hazard() -> bool:
    from duly.store.sqlite.health import wal_verdict

    return not wal_verdict().endswith(": safe")


def _other_libraries(app: App) -> list[str]:
    if app.settings.url.path is None:
        return []
    from duly.store.sqlite.health import other_libraries

    return other_libraries()


def warn_of_slips(worker: Worker) -> None:
    """Warn of what is allowed but seldom meant: another SQLite library, no tasks at all, queues that no task has."""
    for name in _other_libraries(worker.app):
        log.warning("worker.other_sqlite", extra={"library": name, "hint": OTHER_SQLITE})
    if not worker.app.tasks:
        log.warning("worker.no_tasks", extra={"hint": "there is nothing it could run: define tasks with @app.task"})
        return
    known = {task.definition.queue for task in worker.app.tasks.values()} | {"default"}
    for name in worker.queues:
        if name not in known:
            close = get_close_matches(name, known, 1) or sorted(known)
            log.warning(
                "worker.unknown_queue",
                extra={"queue": name, "hint": f"no task of this app has it: did you mean {', '.join(close)}?"},
            )
