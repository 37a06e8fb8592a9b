"""`duly dev tasks.py`: runs the jobs of an app during development.

The command itself only watches files (`reload`). The worker is the same command in a second process. It holds one end
of a pipe, and stops when the first process closes the other.
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
from duly.cli.options import worker_options
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
# Printed in another way, or not at all.
QUIET = ("job.", "worker.started", "worker.stopping", "worker.stopped", "worker.summary")


@click.command()
@click.argument("target", metavar="MODULE:APP", type=click.Path())
@worker_options
@click.option(
    "--grace",
    default="2s",
    show_default=True,
    envvar="DULY_GRACE",
    help="How long running jobs may continue after a file changes or Ctrl-C is pressed. [$DULY_GRACE]",
)
@click.option("--reload/--no-reload", default=True, help="Restart when a file changes. Default: yes.")
@click.option("--lifeline", type=int, hidden=True)
@click.option("--again", is_flag=True, hidden=True)
def command(
    target: str, grace: str, url: str | None, reload: bool, lifeline: int | None, again: bool, **given: Any
) -> None:
    """Run the jobs of an app while you write it.

    Runs one worker, prints the outcome of each job, and restarts when a Python file or duly.toml below this folder
    changes. Needs no configuration and no server. MODULE:APP is imported with the current folder first on the path;
    tasks.py is enough if it has only one app.

    Examples:
      duly dev tasks.py
      duly dev shop.tasks:app --concurrency 2
      duly dev tasks.py --url postgresql://user@host/db

    Exit codes: 0 stopped, 1 failed, 2 wrong usage.
    """
    grace_ms = to_ms(grace, what="--grace")
    if lifeline is None and reload and os.name != "nt":  # on Windows no process ends with its parent
        from duly.cli.worker import words_of

        words = ["dev", target, "--grace", grace, *words_of(given), *([] if url is None else ["--url", url])]
        sys.exit(_watch(words, grace_ms))
    from duly.cli.reload import NOT_BEGUN
    from duly.cli.shutdown import Ending
    from duly.cli.worker import options_of

    logs.configure(given["log_level"], as_json=False, quiet=QUIET)
    ending = Ending()
    ending.idle_code = 0 if lifeline is None else NOT_BEGUN
    ending.hear(lifeline)
    work = Work(target, url, ending, supervised=lifeline is not None, again=again)
    work.run(options_of(given, grace_ms), grace_ms)


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
        """Start, print the first lines, and run until stopped."""
        try:
            serving = self._started(options)
        except DulyError as error:
            if not self._supervised:
                raise
            self._exit_with(error)
        else:
            serving.run(grace_ms / 1000)

    def _started(self, options: dict[str, Any]) -> Any:
        from duly.app.locate import find_app
        from duly.cli.dev_lines import JobLines
        from duly.cli.worker import Serving, migration, warn_of_mistakes
        from duly.duly import Duly

        folder = Path.cwd()
        app = find_app(self._target, Duly, url=self._url)
        serving = Serving(app, self._ending, options, supervised=self._supervised, folder=folder)
        about = serving.reach(remedy=migration(self._target, app, self._url), as_json=False)
        app.events.listen(JobLines(app.driver.run))
        warn_of_blocking(app.driver)
        self._print_first_lines(app, about)
        if app.tasks:
            warn_of_mistakes(serving.worker)
        return serving

    def _print_first_lines(self, app: Duly, about: About) -> None:
        """Print the app and its tasks; after a reload only the tasks."""
        from duly.cli.example_call import command_of, shape_of

        tasks = list(dict.fromkeys(app.tasks.values()))
        if self._again:
            _echo(f"ready: {', '.join(task.name for task in tasks) or 'no tasks'}")
            return
        _echo(f"duly {__version__}: a worker for {self._target}")
        _echo(f"database   {about.where}  ({about.engine}, durability {about.durability})")
        for number, task in enumerate(tasks[:MOST_TASKS]):
            _echo(f"{'' if number else 'tasks':<11}{shape_of(task)}  queue {task.definition.queue}")
        if len(tasks) > MOST_TASKS:
            _echo(f"{'':<11}and {len(tasks) - MOST_TASKS} more")
        if tasks:
            more = () if self._url is None else ("--url", str(app.settings.url))
            _echo(f"try        {command_of(self._target, tasks[0], *more)}")
        else:
            _echo(f"tasks      none yet: write one into {self._target.partition(':')[0]}\n\n{FIRST_TASK}\n")
        _echo("Edit a file and it reloads, Ctrl-C ends." if self._supervised else "Ctrl-C ends.")

    def _exit_with(self, error: DulyError) -> None:
        """Print why the worker cannot start, and exit with a code that tells whether a change of the code can help."""
        from duly.app.locate import CannotImport
        from duly.cli import output
        from duly.cli.reload import MISTAKE, NOT_BEGUN
        from duly.cli.shutdown import leave

        click.echo(f"duly: {output.reason(error)}", err=True)
        code = 2 if isinstance(error, ConfigError) else 1
        leave(NOT_BEGUN if isinstance(error, CannotImport) else MISTAKE + code)


def _echo(text: str) -> None:
    click.echo(text, err=True)


ASKED_BEFORE = ("limits", "depth")  # of an enqueue, which is the call that the user wrote


def warn_of_blocking(driver: Driver) -> None:
    """Warn once of a sync call inside a running event loop: it works, but blocks the loop.

    Only during development: in production the warning would not help.
    """
    run: Callable[[Op[Any]], Any] = driver.run
    warned = False

    def noticing(op: Op[Any]) -> Any:
        nonlocal warned
        if not warned and op.name not in ASKED_BEFORE and _in_loop():
            warned = True
            hint = f"this blocks the event loop: await the call with the prefix a, as in a{op.name}"
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
    """Name the line of the user's code that made a call."""
    from duly.cli.dev_lines import place_in

    return place_in("".join(traceback.format_stack()))
