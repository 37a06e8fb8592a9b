"""Runs several worker processes: starts them, stops them, and restarts those that die.

It holds one end of a pipe and they hold the other: if it is killed, they read the end of the pipe and stop. Each is in
its own process group, so that Ctrl-C reaches only the supervisor, which stops them.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import NamedTuple, TypeAlias

log = logging.getLogger("duly.supervisor")

# The exit code of a worker that must be restarted (EX_TEMPFAIL).
RESTART = 75
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
# A process that ran this long did not fail at its start.
SETTLED_S = 10.0


class Died(NamedTuple):
    """A worker has ended."""

    place: int
    code: int


class Changed(NamedTuple):
    """Files have changed."""

    files: tuple[str, ...]


# A number is a signal.
Word: TypeAlias = Died | Changed | int


class Supervisor:
    """Runs `count` processes of one command."""

    def __init__(self, words: Sequence[str], count: int, *, farewell: str | None = None) -> None:
        self._words = words
        self._count = count
        self._farewell = farewell
        self._words_in: queue.SimpleQueue[Word] = queue.SimpleQueue()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._started_at: dict[int, float] = {}
        self._pause_s = dict.fromkeys(range(count), FIRST_PAUSE_S)
        self._due: dict[int, float] = {}
        self._asked = 0
        self._lifeline, self._held = os.pipe()

    def run(self) -> int:
        """Run until all have ended; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        self._due = dict.fromkeys(range(self._count), 0.0)
        worst = 0
        while self._continues():
            self._start_due()
            with suppress(queue.Empty):
                worst = max(worst, self._handle(self._words_in.get(timeout=self._how_long())))
        log.info("supervisor.stopped")
        return worst

    def _continues(self) -> bool:
        return bool(self._running or self._due)

    def _handle(self, word: Word) -> int:
        match word:
            case Died():
                return self._died(word)
            case Changed():
                self._changed(word)
            case asked:
                self._stop(asked)
        return 0

    def _changed(self, changed: Changed) -> None:
        """Handle changed files: in production they are ignored."""

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._words_in.put(number)

    def _how_long(self) -> float | None:
        return max(0.0, min(self._due.values()) - time.monotonic()) if self._due else None

    def _start_due(self) -> None:
        now = time.monotonic()
        for place in [place for place, at in self._due.items() if at <= now]:
            try:
                self._start(place)
                del self._due[place]
            except OSError as error:  # no process or memory is available
                log.warning("supervisor.cannot_start", extra={"place": place, "error": str(error)})
                self._due[place] = now + LONGEST_PAUSE_S

    def _start(self, place: int) -> None:
        process = subprocess.Popen(  # noqa: S603
            [*self._words, "--lifeline", str(self._lifeline)],
            stdin=subprocess.DEVNULL,
            pass_fds=[self._lifeline],
            process_group=0,
        )
        self._running[place] = process
        self._started_at[place] = time.monotonic()
        log.info("supervisor.started_worker", extra={"place": place, "worker_pid": process.pid})
        threading.Thread(target=self._wait, args=(place, process), daemon=True).start()

    def _wait(self, place: int, process: subprocess.Popen[bytes]) -> None:
        self._words_in.put(Died(place, process.wait()))

    def _died(self, died: Died) -> int:
        """Restart a worker that died; return the exit code of one that was stopped."""
        process = self._running.pop(died.place)
        if self._asked:
            return 1 if died.code else 0
        if time.monotonic() - self._started_at[died.place] > SETTLED_S:
            self._pause_s[died.place] = FIRST_PAUSE_S
        pause = self._pause_s[died.place]
        self._pause_s[died.place] = min(pause * 2, LONGEST_PAUSE_S)
        self._due[died.place] = time.monotonic() + pause
        self._report_death(died, process.pid, pause)
        return 0

    def _report_death(self, died: Died, pid: int, pause_s: float) -> None:
        extra = {"place": died.place, "worker_pid": pid, "how": how(died.code), "again_in_s": pause_s}
        log.warning("supervisor.worker_died", extra=extra)

    def _stop(self, number: int) -> None:
        """Stop all workers; the second time they stop at once, and the third time they are killed."""
        if not self._asked:
            log.info("supervisor.stopping", extra={"signal": signal.Signals(number).name})
            if self._farewell:
                print(self._farewell, file=sys.stderr)
        self._asked += 1
        self._due.clear()
        for process in self._running.values():
            process.send_signal(signal.SIGTERM if self._asked < 3 else signal.SIGKILL)


def how(code: int) -> str:
    """Write how a process ended."""
    if code == RESTART:
        return "half of its threads are stuck"
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def command_line(*words: str) -> list[str]:
    """Give the command that starts `duly` with this Python.

    -P keeps the current folder off the path until the app is imported: a `queue.py` there must not hide Python's.
    """
    return [sys.executable, "-P", "-m", "duly", *words]
