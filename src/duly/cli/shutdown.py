"""Ends a worker process: after a signal or when its supervisor has exited, and in time even if something hangs.

A signal only puts an item into a queue. A thread reads it, stops the worker, and waits for at most the grace time and
a second, or a second after the second signal. Then it ends the process, even if the event loop or a handler hangs.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

LAST_SECONDS = 1.0


class Ending:
    """Ends this process in time."""

    def __init__(self) -> None:
        self._words: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stop: Callable[[], object] | None = None
        self._grace_s = 0.0
        self._leave: Callable[[], object] = stuck
        self.asked = 0
        self.idle_code = 0  # the exit code when there is nothing to stop yet

    def hear(self, lifeline: int | None = None) -> None:
        """Handle signals, and stop when the process at the other end of the pipe `lifeline` exits."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        threading.Thread(target=self._watch, name="duly-ending", daemon=True).start()
        if lifeline is not None:
            os.set_inheritable(lifeline, False)
            threading.Thread(target=self._hold, args=(lifeline,), name="duly-lifeline", daemon=True).start()

    def asks(self, stop: Callable[[], object], *, grace_s: float, holds: Callable[[], object] = bool) -> None:
        """Call `stop` on a signal. Before this there is nothing to stop, and the process exits.

        `holds`: whether jobs may be left behind.
        """
        self._grace_s = grace_s
        self._leave = lambda: stuck("worker", holds)
        self._stop = stop

    def over(self, leave: Callable[[], object]) -> None:
        """Note that the worker has ended: if the process then does not exit in time, `leave` ends it."""
        self._leave = leave
        self._words.put("over")

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._words.put("stop")

    def _hold(self, lifeline: int) -> None:
        with suppress(OSError):
            while os.read(lifeline, 1):
                pass
        self._words.put("stop")

    def _watch(self) -> None:
        until: float | None = None
        while True:
            try:
                word = self._words.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except queue.Empty:
                self._leave()
                return
            # After "over" the worker holds nothing any more.
            until = self._ask() if word == "stop" else time.monotonic() + LAST_SECONDS

    def _ask(self) -> float:
        """Stop the worker, and return when the process must have ended."""
        self.asked += 1
        if self._stop is None or self.asked > 2:
            leave(self.idle_code if self._stop is None else 1)
        else:
            self._stop()
        return time.monotonic() + (self._grace_s if self.asked == 1 else 0.0) + LAST_SECONDS


def leave(code: int) -> None:
    """End this process at once, without its threads."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def stuck(what: str = "worker", holds: Callable[[], object] = bool) -> None:
    """Print that a worker or a tick did not stop in time, and end this process. `holds`: whether jobs are left."""
    left = ": its jobs are rescued when their leases expire" if holds() else "; it held no jobs"
    os.write(2, f"duly: the {what} did not stop in time{left}\n".encode())
    os._exit(1)
