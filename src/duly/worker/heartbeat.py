"""Sends heartbeats from a dedicated thread: extends leases and records that the worker is alive.

A worker sends one every third of its shortest lease, and only while its event loop answers: a worker that hangs must
lose its jobs. The heartbeat is also the first to notice that the database is away and the first to reconnect. All other
operations wait for it, so that leases are extended before anything else is sent.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass

from duly.app.lease import Lease
from duly.errors import StoreError
from duly.store import ops
from duly.worker.held import Held
from duly.worker.liveness import Pulse
from duly.worker.shared import Shared
from duly.worker.wakeups import Wakeups

log = logging.getLogger("duly.worker")

RETRY_SECONDS = (0.1, 0.3)
JOIN_SECONDS = 0.5
SIGN_SECONDS = 1.0
LONG_SECONDS = 5.0  # a write that waits longer is logged


@dataclass(eq=False, repr=False)
class Heartbeat:
    """The heartbeats of one worker."""

    _shared: Shared
    _held: Held
    _wakeups: Wakeups
    _: KW_ONLY
    on_lost: Callable[[Lease], None]
    on_cancel: Callable[[Lease], None]

    def __post_init__(self) -> None:
        self._clock = self._shared.clock
        self._stopped = threading.Event()
        self._answered_at = self._beat_at = self._clock()
        self._pulse = Pulse(self._shared.id)
        self._thread: threading.Thread | None = None
        self._blocked = False
        self._written_at: float | None = None  # when the write was sent that has no answer yet
        self._told = False

    def start(self) -> None:
        """Start the thread."""
        self._answered_at = self._clock()
        self._thread = self._shared.spawn(self._run, "duly-heart")

    def stop(self) -> None:
        """Stop the thread, and wait a moment for its last heartbeat."""
        self._stopped.set()
        self._shared.beat_wanted.set()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Touch the liveness file every second, on the event loop: the thread may wait long for the database."""
        self._sign()
        try:
            yield
        finally:
            self._next_sign.cancel()
            self._pulse.end()

    def _sign(self) -> None:
        self._pulse.touch()
        self._tell_of_long_write()
        self._next_sign = asyncio.get_running_loop().call_later(SIGN_SECONDS, self._sign)

    def _tell_of_long_write(self) -> None:
        if self._told or self._written_at is None or time.monotonic() - self._written_at < LONG_SECONDS:
            return
        self._told = True
        error = f"a write has waited {LONG_SECONDS:.0f} s: the database does not answer it; see duly doctor"
        self._shared.app.events.tell("worker.waiting_for_database", logging.WARNING, error=error)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Note a write that shows whether the database answers."""
        self._written_at = time.monotonic()  # a test may move the clock
        try:
            yield
        finally:
            self._written_at = None

    def _run(self) -> None:
        wanted = self._shared.beat_wanted
        while not self._stopped.is_set():
            self._ask_loop()
            wanted.wait(self._pause())
            wanted.clear()
            if not self._stopped.is_set():
                self._beat_whatever_happens()

    def _beat_whatever_happens(self) -> None:
        """Send a heartbeat. If the thread died of an error, the worker would lose all its jobs unnoticed."""
        try:
            self.beat()
        except Exception:
            log.exception("worker.beat_failed")
            self._shared.failing = True

    def _pause(self) -> float:
        if self._blocked:
            return 0.1
        if self._shared.failing:
            return random.uniform(*RETRY_SECONDS)  # noqa: S311
        return max(0.0, min(1.0, self._beat_at + self._shared.shortest_ms / 3000 - self._clock()))

    def _ask_loop(self) -> None:
        """Let the event loop show that it runs."""
        self._shared.call_soon(self._answered)

    def _answered(self) -> None:
        self._answered_at = self._clock()

    def beat(self) -> None:
        """Extend the leases and record that the worker is alive, if it is time to."""
        shared, now = self._shared, self._clock()
        silent = now - self._answered_at
        if silent * 1000 > shared.shortest_ms:
            if not self._blocked:
                log.error("worker.loop_blocked", extra={"seconds": round(silent, 1)})
            self._blocked = True
            return
        self._blocked = False
        if not shared.failing and now < self._beat_at + shared.shortest_ms / 3000 - 0.005:
            return
        self._beat_at = now
        try:
            with self.writing():
                self._extend()
                shared.driver.run(shared.registration())
        except StoreError as error:
            self._failed(error)
        else:
            self._succeeded()
        finally:  # meanwhile nobody asked the event loop
            self._answered_at = min(self._answered_at + self._clock() - now, self._clock())

    def _extend(self) -> None:
        shared = self._shared
        leases = self._held.leases()  # also those whose finish is in flight: it may wait for the database
        if leases:
            answer = shared.driver.run(ops.extend(lease.held for lease in leases))
            shared.call_soon(self._extended, leases, answer)
        shared.shortest_ms = min([shared.shortest_lease_ms(), *(lease.job.lease_ms for lease in leases)])

    def _extended(self, leases: Sequence[Lease], answer: Mapping[str, int | None]) -> None:
        """Stop the handlers whose leases are lost or whose jobs are to be cancelled."""
        for lease in leases:
            if lease.sent or lease.closed or not self._held.has(lease):
                continue
            if lease.job.id not in answer:
                self.on_lost(lease)
            elif answer[lease.job.id] is not None and lease.asked is None:
                self.on_cancel(lease)

    def _failed(self, error: StoreError) -> None:
        if not self._shared.failing:
            log.warning("worker.disconnected", extra={"error": str(error)})
        self._shared.failing = True
        self._shared.call_soon(self._shared.online.clear)

    def _succeeded(self) -> None:
        if self._shared.failing or self._told:
            log.info("worker.reconnected")
        self._shared.failing = self._told = False
        self._shared.call_soon(self._connected)

    def _connected(self) -> None:
        if not self._shared.online.is_set():
            self._shared.online.set()
            self._wakeups.wake()
