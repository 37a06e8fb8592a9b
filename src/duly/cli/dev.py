"""`duly dev tasks.py`: run the jobs of an app while it is being written.

The command itself only watches files (`reload`). The worker is this same command once more, in a process of its own,
with the end of a pipe that tells it when the first one is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from duly import __version__
from duly.cli import logs
from duly.errors import ConfigError, DulyError
from duly.rules.durations import to_ms

if TYPE_CHECKING:
    from duly.cli.shutdown import Ending
    from duly.duly import Duly
    from duly.store.driver import About, Driver
    from duly.store.op import Op

T = TypeVar("T")
log = logging.getLogger("duly.dev")

FIRST_TASK = """\
    @app.task
    def hello(name: str) -> str:
        return f"Hello, {name}"\
"""
MOST_TASKS = 20
# Told in another way, or not worth a line here.
QUIET = ("job.", "worker.started", "worker.stopping", "worker.stopped", "worker.summary")


@click.command()
@click.argument("target", metavar="MODULE:APP", type=click.Path())
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    envvar="DULY_CONCURRENCY",
    help="How many jobs run at once. [$DULY_CONCURRENCY]",
)
@click.option(
    "--queues",
    multiple=True,
    envvar="DULY_QUEUES",
    metavar="NAME[:LIMIT],…",
    help="Queues to serve, each with how many of its jobs run at once. "
    "Default: those of the app's tasks. [$DULY_QUEUES]",
)
@click.option(
    "--grace",
    default="2s",
    show_default=True,
    envvar="DULY_GRACE",
    help="How long running jobs may go on when a file has changed or Ctrl-C was pressed. [$DULY_GRACE]",
)
@click.option("--url", help="The database, instead of the one that the app names. [$DULY_URL, if the app names none]")
@click.option(
    "--log-level",
    type=click.Choice(logs.LEVELS, case_sensitive=False),
    default="info",
    show_default=True,
    envvar="DULY_LOG_LEVEL",
    help="What to log beside the lines of jobs. [$DULY_LOG_LEVEL]",
)
@click.option("--reload/--no-reload", default=True, help="Start again when a file has changed. Default: yes.")
@click.option("--lifeline", type=int, hidden=True)
@click.option("--again", is_flag=True, hidden=True)
def command(
    target: str,
    concurrency: int,
    queues: tuple[str, ...],
    grace: str,
    url: str | None,
    log_level: str,
    reload: bool,
    lifeline: int | None,
    again: bool,
) -> None:
    """Run the jobs of an app while you write it.

    Runs one worker, shows what becomes of each job, and starts again whenever a Python file or duly.toml below this
    folder changes. Needs no configuration and no server. MODULE:APP is imported with the current folder first on the
    path; tasks.py alone will do where there is only one app.

    Examples:
      duly dev tasks.py
      duly dev shop.tasks:app --concurrency 2
      duly dev tasks.py --url postgresql://user@host/db

    Exit codes: 0 stopped, 1 failed, 2 wrong usage.
    """
    grace_ms = to_ms(grace, what="--grace")
    if lifeline is None and reload and os.name != "nt":  # Windows has no process that ends with its parent
        words = ["--concurrency", str(concurrency), "--grace", grace, "--log-level", log_level]
        words += [word for queue in queues for word in ("--queues", queue)]
        words += [] if url is None else ["--url", url]
        sys.exit(_watch(["dev", target, *words], grace_ms))
    from duly.cli.reload import NOT_BEGUN
    from duly.cli.shutdown import Ending
    from duly.cli.worker import read_queues

    logs.configure(log_level, as_json=False, quiet=QUIET)
    ending = Ending()
    ending.idle_code = 0 if lifeline is None else NOT_BEGUN
    ending.hear(lifeline)
    work = Work(target, url, ending, supervised=lifeline is not None, again=again)
    work.run({"concurrency": concurrency, "queues": read_queues(queues)}, grace_ms)


def _watch(words: list[str], grace_ms: int) -> int:
    from duly.cli.reload import Reloader
    from duly.cli.supervisor import command_line

    logs.configure("warning", as_json=False)
    code = Reloader(command_line(*words), Path.cwd(), grace_s=grace_ms / 1000).run()
    if not code:
        click.echo("stopped", err=True)
    return code


class Work:
    """The worker process."""

    def __init__(self, target: str, url: str | None, ending: Ending, *, supervised: bool, again: bool) -> None:
        self._target = target
        self._url = url
        self._ending = ending
        self._supervised = supervised
        self._again = again

    def run(self, options: dict[str, Any], grace_ms: int) -> None:
        """Begin, greet, and work until told to stop."""
        try:
            serving = self._begun(options, grace_ms)
        except DulyError as error:
            if not self._supervised:
                raise
            self._end_by(error)
        else:
            serving.run(grace_ms / 1000)

    def _begun(self, options: dict[str, Any], grace_ms: int) -> Any:
        from datetime import timedelta

        from duly.app.locate import find_app
        from duly.cli.dev_lines import JobLines
        from duly.cli.worker import Serving, migration, warn_of_slips
        from duly.duly import Duly

        folder = Path.cwd()
        app = find_app(self._target, Duly, url=self._url)
        options = {**options, "grace": timedelta(milliseconds=grace_ms)}
        serving = Serving(app, self._ending, options, supervised=self._supervised, folder=folder)
        about = serving.reach(remedy=migration(self._target, app, self._url), as_json=False)
        app.events.listen(JobLines(app.driver.run))
        warn_of_blocking(app.driver)
        self._greet(app, about)
        if app.tasks:
            warn_of_slips(serving.worker)
        return serving

    def _greet(self, app: Duly, about: About) -> None:
        """Say what runs here; after a reload only what may have changed."""
        from duly.cli.example_call import command_of, shape_of

        tasks = list(dict.fromkeys(app.tasks.values()))
        if self._again:
            _say(f"ready: {', '.join(task.name for task in tasks) or 'no tasks'}")
            return
        _say(f"duly {__version__}: a worker for {self._target}")
        _say(f"database   {about.where}  ({about.engine}, durability {about.durability})")
        for number, task in enumerate(tasks[:MOST_TASKS]):
            _say(f"{'' if number else 'tasks':<11}{shape_of(task)}  queue {task.definition.queue}")
        if len(tasks) > MOST_TASKS:
            _say(f"{'':<11}and {len(tasks) - MOST_TASKS} more")
        if tasks:
            more = () if self._url is None else ("--url", str(app.settings.url))
            _say(f"try        {command_of(self._target, tasks[0], *more)}")
        else:
            _say(f"tasks      none yet: write one into {self._target.partition(':')[0]}\n\n{FIRST_TASK}\n")
        _say("Edit a file and it reloads, Ctrl-C ends." if self._supervised else "Ctrl-C ends.")

    def _end_by(self, error: DulyError) -> None:
        """Say what keeps the worker from its work, and whether a change of the code can mend it."""
        from duly.app.locate import CannotImport
        from duly.cli import output
        from duly.cli.reload import MISTAKE, NOT_BEGUN
        from duly.cli.shutdown import leave

        click.echo(f"duly: {output.reason(error)}", err=True)
        code = 2 if isinstance(error, ConfigError) else 1
        leave(NOT_BEGUN if isinstance(error, CannotImport) else MISTAKE + code)


def _say(text: str) -> None:
    click.echo(text, err=True)


ASKED_BEFORE = ("limits", "depth")  # of an enqueue, which comes next and is what the person wrote


def warn_of_blocking(driver: Driver) -> None:
    """Warn once of a sync call inside a running event loop: it works, but the loop stands still meanwhile.

    Here and not in the driver, because only those who write the code need to know.
    """
    run: Callable[[Op[Any]], Any] = driver.run
    warned = False

    def noticing(op: Op[Any]) -> Any:
        nonlocal warned
        if not warned and op.name not in ASKED_BEFORE and _in_loop():
            warned = True
            hint = f"the event loop stands still meanwhile: await the call with the prefix a, as in a{op.name}"
            log.warning("dev.sync_call", extra={"call": op.name, "at": _caller(), "hint": hint})
        return run(op)

    driver.run = noticing  # type: ignore[method-assign]


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _caller() -> str | None:
    """Name the line of the person's own code that made a call."""
    from duly.cli.dev_lines import place_in

    return place_in("".join(traceback.format_stack()))
