"""How a worker process ends: asked by a signal, or because its supervisor is gone, and in time whatever hangs in it.

A signal only puts a word into a queue. A thread of its own reads it, tells the worker to stop, and watches the clock:
when the grace time and a second are over, or a second after the second signal, the process ends, even if the event
loop, a handler's thread or something at exit hangs.
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
    """Sees to it that this process ends when it should."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stop: Callable[[], object] | None = None
        self._grace_s = 0.0
        self._leave: Callable[[], object] = _stuck
        self.asked = 0
        self.idle_code = 0  # how the process ends when told to before there was anything to stop

    def hear(self, lifeline: int | None = None) -> None:
        """Hear signals from now on, and the end of whoever holds the other end of the pipe `lifeline`."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        threading.Thread(target=self._watch, name="duly-ending", daemon=True).start()
        if lifeline is not None:
            os.set_inheritable(lifeline, False)
            threading.Thread(target=self._hold, args=(lifeline,), name="duly-lifeline", daemon=True).start()

    def asks(self, stop: Callable[[], object], *, grace_s: float) -> None:
        """Call `stop` when asked to end. Before this there is nothing to stop, and the process just ends."""
        self._grace_s = grace_s
        self._stop = stop

    def over(self, leave: Callable[[], object]) -> None:
        """Take note that all is done: if the process does not end by itself now, `leave` ends it."""
        self._leave = leave
        self._told.put("over")

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._told.put("stop")

    def _hold(self, lifeline: int) -> None:
        with suppress(OSError):
            while os.read(lifeline, 1):
                pass
        self._told.put("stop")

    def _watch(self) -> None:
        until: float | None = None
        while True:
            try:
                word = self._told.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except queue.Empty:
                self._leave()
                return
            if word == "stop":
                until = self._ask()
            elif until is None:
                until = time.monotonic() + LAST_SECONDS

    def _ask(self) -> float:
        """Tell the worker to stop, and say when the process is to end at the latest."""
        self.asked += 1
        if self._stop is None or self.asked > 2:
            leave(self.idle_code if self._stop is None else 1)
        else:
            self._stop()
        return time.monotonic() + (self._grace_s if self.asked == 1 else 0.0) + LAST_SECONDS


def leave(code: int) -> None:
    """End this process at once, whatever its threads do."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _stuck() -> None:
    os.write(2, b"duly: the worker did not stop in time: what it held is rescued when its leases have ended\n")
    os._exit(1)
