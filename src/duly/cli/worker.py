"""`duly worker module:app`: runs the jobs of an app until it is stopped."""

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
from duly.cli.options import COUNT, worker_options
from duly.cli.shutdown import Ending, leave
from duly.cli.supervisor import RESTART, Supervisor, command_line
from duly.duly import Duly
from duly.errors import ConfigError
from duly.rules.durations import describe, to_ms
from duly.store.driver import About
from duly.worker.worker import Worker

log = logging.getLogger("duly.worker")

OTHER_SQLITE = (
    "it has its own SQLite: two libraries on one file drop each other's locks, so use it for other files only"
)
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
@worker_options
@click.option(
    "--processes",
    type=COUNT,
    default=1,
    show_default=True,
    envvar="DULY_PROCESSES",
    help="How many processes. [$DULY_PROCESSES]",
)
@click.option("--grace", help="How long running jobs may go on after SIGTERM. Default: 30s. [$DULY_GRACE]")
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
    target: str, url: str | None, grace: str | None, processes: int, log_json: bool, lifeline: int | None, **given: Any
) -> None:
    """Run the jobs of an app.

    MODULE:APP is imported with the current folder first on the path; tasks.py or tasks alone will do where there is
    only one app. It waits for a database that is down.

    Examples:
      duly worker tasks:app
      duly worker tasks.py --concurrency 20
      duly worker shop.tasks:app --queues mail:3,default --processes 4
      duly worker tasks:app --url postgresql://user@host/db --log-json

    Signals: SIGTERM or Ctrl-C lets running jobs end within the grace time, then gives the rest back; a second one does
    so at once. Exit codes: 0 stopped, 1 failed, 2 wrong usage.
    """
    logs.configure(given["log_level"], as_json=log_json)
    ending = Ending()
    ending.hear(lifeline)
    folder = Path.cwd()
    app = find_app(target, Duly, url=url)
    grace_ms = app.settings.grace_ms if grace is None else to_ms(grace, what="--grace")
    serving = Serving(app, ending, options_of(given, grace_ms), supervised=lifeline is not None, folder=folder)
    if lifeline is None:
        about = serving.reach(remedy=migration(target, app, url), as_json=log_json)
        print_first_lines(serving.worker, about, processes=processes, as_json=log_json)
        warn_of_mistakes(serving.worker)
    farewell = FAREWELL.format(grace=describe(grace_ms)) if sys.stderr.isatty() and not log_json else None
    if processes > 1:
        app.close()
        words = ["--processes=1", f"--grace={grace_ms}ms", *words_of(given), *(["--log-json"] if log_json else [])]
        sys.exit(Supervisor(command_line("worker", target, *words), processes, farewell=farewell).run())
    if farewell and lifeline is None:
        app.events.listen(lambda name, fields: _print_farewell(name, fields, farewell))
    serving.run(grace_ms / 1000)


def _print_farewell(name: str, fields: Mapping[str, Any], farewell: str) -> None:
    """Print on a terminal why the worker still runs after Ctrl-C."""
    if name == "worker.stopping" and fields["running"]:
        click.echo(farewell, err=True)


class Serving:
    """One worker in this process, from its first connection to the end of the process."""

    def __init__(self, app: Duly, ending: Ending, options: dict[str, Any], *, supervised: bool, folder: Path) -> None:
        self._app = app
        self._ending = ending
        self._supervised = supervised
        self._folder = folder
        self._restart = False
        self.worker: Worker = app.worker(**options, signals=False, on_stuck=self._stuck)

    def reach(self, *, remedy: str, as_json: bool) -> About:
        """Connect to the database; while it is down, print that and wait."""
        return wait_for_database.reach(self._app, self.worker.id, self._ending, remedy=remedy, as_json=as_json)

    def run(self, grace_s: float) -> None:
        """Run until stopped; restart when too many threads are stuck."""
        asyncio.run(self._run(grace_s))
        self._app.close()
        if self._restarts:
            self._restart_process()

    async def _run(self, grace_s: float) -> None:
        loop = asyncio.get_running_loop()
        holds, stop = self.worker.may_hold_jobs, self.worker.stop
        self._ending.asks(lambda: loop.call_soon_threadsafe(stop), grace_s=grace_s, holds=holds)
        try:
            await self.worker.run()
        except BaseException:
            self._ending.over(lambda: leave(1))
            raise
        # The worker is done, but threads of handlers may keep the process from exiting.
        self._ending.over(self._restart_process if self._restarts else lambda: leave(0))

    def _stuck(self) -> None:
        """Handle that half of the threads are stuck: they end only with their process."""
        if not self._restart:
            log.error("worker.restarting", extra={"worker": self.worker.id, "why": STUCK})
        self._restart = True

    @property
    def _restarts(self) -> bool:
        return self._restart and not self._ending.asked

    def _restart_process(self) -> None:
        if self._supervised:
            leave(RESTART)
        sys.stdout.flush()
        sys.stderr.flush()
        os.chdir(self._folder)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


def options_of(given: Mapping[str, Any], grace_ms: int) -> dict[str, Any]:
    """Give the options of a worker."""
    queues = read_queues(given["queues"])
    return {"concurrency": given["concurrency"], "queues": queues, "grace": timedelta(milliseconds=grace_ms)}


def words_of(given: Mapping[str, Any]) -> list[str]:
    """Write options as words, for the command of another process."""
    words = ["--concurrency", str(given["concurrency"]), "--log-level", given["log_level"]]
    return [*words, *(word for queue in given["queues"] for word in ("--queues", queue))]


def read_queues(texts: Iterable[str]) -> dict[str, int | None] | None:
    """Read `mail:3,default`, given once or several times; None if nothing is given."""
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
    """Write the command that creates the tables in this database."""
    words = ["duly", "migrate", "--app", target, *(["--url", str(app.settings.url)] if url is not None else [])]
    return shlex.join(words)


def print_first_lines(worker: Worker, about: About, *, processes: int, as_json: bool) -> None:
    """Print the worker and its database."""
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
        "durability": _durability(about.durability),
        "queues": ", ".join(_queue(name, limit) for name, limit in worker.queues.items()),
        "tasks": ", ".join(tasks) or "none: define some with @app.task",
        "slots": str(worker.concurrency) + (f" in each of {processes} processes" if processes > 1 else ""),
        **({"supervisor": f"pid {os.getpid()}"} if processes > 1 else {"worker": f"{worker.id}, pid {os.getpid()}"}),
    }
    if about.store == "SQLite" and _has_wal_hazard():
        facts["caution"] = "this SQLite has a bug that can damage a file; duly avoids it (more: duly doctor)"
    return facts


def _durability(found: str) -> str:
    disk, _, standbys = found.partition(", ")
    return DURABILITY.get(disk, disk) + (f"; {standbys}" if standbys else "")


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


def warn_of_mistakes(worker: Worker) -> None:
    """Warn of probable mistakes: another SQLite library, no tasks, queues that no task has."""
    for name in _other_libraries(worker.app):
        log.warning("worker.other_sqlite", extra={"library": name, "hint": OTHER_SQLITE})
    if not worker.app.tasks:
        log.warning("worker.no_tasks", extra={"hint": "there is nothing to run: define tasks with @app.task"})
        return
    known = {task.definition.queue for task in worker.app.tasks.values()} | {"default"}
    for name in worker.queues:
        if name not in known:
            close = get_close_matches(name, known, 1) or sorted(known)
            log.warning(
                "worker.unknown_queue",
                extra={"queue": name, "hint": f"no task of this app has it: did you mean {', '.join(close)}?"},
            )
