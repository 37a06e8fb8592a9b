"""Waits for a database that is down when a worker starts, and prints its address and the reason.

On a terminal a line counts down to the next try; elsewhere each try is logged. A second thread writes the sign of life
for probes, and prints that the worker is connecting when the first try takes long. Permanent errors are raised.
"""

from __future__ import annotations

import itertools
import logging
import re
import shutil
import sys
import threading
import time
from types import TracebackType
from typing import Self

import click

from duly.cli import output
from duly.cli.shutdown import Ending, leave
from duly.duly import Duly
from duly.errors import AnswerLost, SchemaMismatch, StoreError, StoreUnavailable
from duly.store.driver import About
from duly.worker.liveness import Pulse

log = logging.getLogger("duly.worker")

TICK_S = 1.0
PAUSES_S = (1, 2, 4, 8, 15)
JOIN_S = 0.2
# Permanent errors: a file that may not be opened or written.
CLOSED_FILES = ("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")


def reach(app: Duly, worker: str, ending: Ending, *, remedy: str, as_json: bool) -> About:
    """Connect and read what database it is; while it is down, print that and retry. `remedy` creates its tables."""
    with Wait(app, worker, ending, live=sys.stderr.isatty() and not as_json) as wait:
        for pause_s in itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1])):
            try:
                about = app.driver.about()
            except SchemaMismatch as error:
                raise SchemaMismatch(re.sub(r"`duly migrate[^`]*`", f"`{remedy}`", output.reason(error))) from error
            except StoreError as error:
                if not is_away(error):
                    raise type(error)(output.reason(error)) from error
                wait.until_next(output.reason(error), pause_s)
            else:
                wait.found()
                _refuse_read_only(app)
                return about
    raise AssertionError("unreachable: the tries are endless")


def _refuse_read_only(app: Duly) -> None:
    """Refuse a database that can be read but not written."""
    if app.settings.url.path is not None:
        from duly.store.sqlite import health

        health.check_access(app.settings.url.path)


class Wait:
    """Output and sign of life from the first try to the one that succeeds."""

    def __init__(self, app: Duly, worker: str, ending: Ending, *, live: bool) -> None:
        self._where = str(getattr(app.driver, "where", app.settings.url))
        self._pulse = Pulse(worker)
        self._ending = ending
        self._live = live
        self._printed: str | None = None
        self._tries = 0
        self._counting = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="duly-waiting", daemon=True)

    def __enter__(self) -> Self:
        self._ending.asks(self._leave, grace_s=0.0)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._wipe()
        self._pulse.end()

    def until_next(self, reason: str, pause_s: int) -> None:
        """Print why the last try failed, and wait for the next."""
        self._tries += 1
        if not self._live:
            log.warning("worker.waiting_for_database", extra={"error": reason, "again_in_s": pause_s})
            time.sleep(pause_s)
            return
        if reason != self._printed:
            self._wipe()
            click.echo(f"waiting for the database: {reason}", err=True)
        self._printed, self._counting = reason, True
        for left in range(pause_s, 0, -1):
            self._show(f"trying again in {left} s")
            time.sleep(1)
        self._show("trying again now")

    def found(self) -> None:
        """Print that the database is up again, if it was down."""
        if self._tries and self._live:
            self._wipe()
            click.echo("the database is up", err=True)
        elif self._tries:
            log.info("worker.found_database", extra={"where": self._where, "tries": self._tries + 1})

    def _keep_alive(self) -> None:
        while not self._over.wait(TICK_S):
            self._pulse.touch()
            if self._printed is None and not self._tries:
                self._printed = ""
                if self._live:
                    click.echo(f"connecting to {self._where} …", err=True)
                else:
                    log.info("worker.connecting", extra={"where": self._where})

    def _show(self, text: str) -> None:
        """Overwrite the line of the countdown."""
        click.echo(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}", nl=False, err=True)

    def _wipe(self) -> None:
        if self._counting:
            click.echo("\r\x1b[K", nl=False, err=True)
        self._counting = False

    def _leave(self) -> None:
        self._wipe()
        self._over.set()
        self._thread.join(JOIN_S)  # else it could write one more sign of life; it may wait for a lock of ours
        self._pulse.end()
        leave(self._ending.idle_code)


def is_away(error: StoreError) -> bool:
    """Return whether the error may pass without a change by the user."""
    if str(getattr(error.__cause__, "sqlite_errorname", "")).startswith(CLOSED_FILES):
        return False
    return isinstance(error, StoreUnavailable | AnswerLost)
