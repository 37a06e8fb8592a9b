"""The beats of a worker: leases extended, presence told, on a thread that nothing else keeps busy.

A worker beats every third of its shortest lease, and only while its event loop answers: one that hangs must lose
its jobs. It is also the first to notice that the database is gone and the first to be back: everybody else waits for
its next beat, so that leases are extended before anything else is done.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from duly.errors import StoreError
from duly.store import ops
from duly.worker.liveness import Pulse

if TYPE_CHECKING:
    from duly.worker.worker import Worker

log = logging.getLogger("duly.worker")

RETRY_SECONDS = (0.1, 0.3)
JOIN_SECONDS = 0.5


class Heart:
    """Beats for one worker."""

    def __init__(self, worker: Worker, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker = worker
        self._clock = clock
        self._wanted = threading.Event()
        self._stopped = threading.Event()
        self._answered_at = clock()
        self._shortest_ms = worker.shortest_lease_ms()
        self._beat_at = clock()
        self._pulse = Pulse(worker.id)
        self._thread: threading.Thread | None = None
        self.failing = False
        self._blocked = False

    def start(self) -> None:
        """Begin to beat."""
        self._answered_at = self._clock()
        self._thread = self._worker.spawn(self._run, "duly-heart")

    def stop(self) -> None:
        """Beat no more; returns when the last beat is over, or takes too long."""
        self._stopped.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def sign(self) -> None:
        """Give a sign of life before there is anything to beat for."""
        self._pulse.begin()

    def mind(self, lease_ms: int) -> None:
        """Take note of a lease that may be shorter than the others."""
        if lease_ms < self._shortest_ms:
            self._shortest_ms = lease_ms
            self._wanted.set()

    def hurry(self) -> None:
        """Beat at once: the database was not to be reached a moment ago."""
        self.failing = True
        self._wanted.set()

    def _run(self) -> None:
        self._pulse.begin()
        while not self._stopped.is_set():
            self._ask_loop()
            self._wanted.wait(self._pause())
            self._wanted.clear()
            if not self._stopped.is_set():
                self._beat_whatever_happens()
        self._pulse.end()

    def _beat_whatever_happens(self) -> None:
        """Beat; without a heart the worker would lose all its jobs in silence."""
        try:
            self.beat()
        except Exception:
            log.exception("worker.beat_failed")
            self.failing = True

    def _pause(self) -> float:
        if self._blocked:
            return 0.1
        if self.failing:
            return random.uniform(*RETRY_SECONDS)  # noqa: S311
        # The pulse for probes goes every second at least.
        return max(0.0, min(1.0, self._beat_at + self._shortest_ms / 3000 - self._clock()))

    def _ask_loop(self) -> None:
        """Have the event loop say that it is alive."""
        self._worker.call_soon(self._answered)

    def _answered(self) -> None:
        self._answered_at = self._clock()

    def beat(self) -> None:
        """Extend the leases and tell that the worker is alive, if it is time."""
        now = self._clock()
        silent = now - self._answered_at
        if silent * 1000 > self._shortest_ms:
            if not self._blocked:
                log.error("worker.loop_blocked", extra={"seconds": round(silent, 1)})
            self._blocked = True
            return
        self._blocked = False
        self._pulse.touch()
        if not self.failing and now < self._beat_at + self._shortest_ms / 3000 - 0.005:
            return
        self._beat_at = now
        try:
            self._extend()
            self._worker.driver.run(self._worker.registration())
        except StoreError as error:
            self._failed(error)
        else:
            self._succeeded()

    def _extend(self) -> None:
        leases = self._worker.leases()  # those too whose finish is on its way: it may wait for the database
        if leases:
            answer = self._worker.driver.run(ops.extend(lease.held for lease in leases))
            self._worker.call_soon(self._worker.extended, leases, answer)
        self._shortest_ms = min([self._worker.shortest_lease_ms(), *(lease.job.lease_ms for lease in leases)])

    def _failed(self, error: StoreError) -> None:
        if not self.failing:
            log.warning("worker.disconnected", extra={"error": str(error)})
        self.failing = True
        self._worker.call_soon(self._worker.disconnected)

    def _succeeded(self) -> None:
        if self.failing:
            log.info("worker.reconnected")
        self.failing = False
        self._worker.call_soon(self._worker.connected)


def identity() -> tuple[str, str, int]:
    """Give a name for a worker of this process, its host and its process id."""
    host, pid = socket.gethostname(), os.getpid()
    return f"{host}-{pid}-{os.urandom(4).hex()}", host, pid
