"""Watches over handlers that should have ended, or should have been heard of: timeouts and stalls.

One look over all that is held, every few milliseconds, and only while something has a limit: cheaper than a timer per
job, and the same for coroutines, threads and processes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from duly.app.definition import Kind
from duly.app.events import about
from duly.app.lease import Asked, Lease, timed_out
from duly.model import Failed
from duly.rules.failure import describe

if TYPE_CHECKING:
    from duly.worker.worker import Worker

LOOK_SECONDS = 0.05
IDLE_SECONDS = 0.5
# After a handler was asked to stop: when it is interrupted, and when it is given up on.
INTERRUPT_SECONDS = 0.5
GIVE_UP_SECONDS = 1.5


class Overtime:
    """Watches over the handlers of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        definitions = [task.definition for task in worker.app.tasks.values()]
        self._limited = any(one.timeout_ms or one.stall_after_ms for one in definitions)

    async def run(self) -> None:
        """Look now and then, for ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS if self._limited and self._worker.leases() else IDLE_SECONDS)
            self.look()

    def look(self) -> None:
        """Look at every handler that runs; the end of one that has ended may still wait to be recorded."""
        now = self._worker.clock()
        for lease in self._worker.leases():
            if lease.begun_at is not None and not (lease.ended_at or lease.closed or lease.sent):
                self._look(lease, now, lease.begun_at)

    def _look(self, lease: Lease, now: float, begun_at: float) -> None:
        definition = lease.definition
        if definition.stall_after_ms is not None:
            self._look_for_stall(lease, now, begun_at, definition.stall_after_ms)
        if definition.timeout_ms is None:
            return
        if lease.asked is not Asked.TIMEOUT:
            if now - begun_at > definition.timeout_ms / 1000:
                self._worker.ask(lease, Asked.TIMEOUT)
            return
        waited = now - lease.asked_at
        if self._worker.children.hurry(lease, waited) or definition.kind is Kind.PROCESS:
            return
        if waited > GIVE_UP_SECONDS:
            self._worker.give_up_on(lease, Failed(describe(timed_out(lease))))
        elif waited > INTERRUPT_SECONDS:
            self._worker.interrupt(lease)

    def _look_for_stall(self, lease: Lease, now: float, begun_at: float, limit_ms: int) -> None:
        heard_at = lease.beat_at or begun_at
        if now - heard_at > limit_ms / 1000 and not lease.stalled:
            lease.stalled = True
            silent = round(now - heard_at, 3)
            self._worker.app.events.tell("job.stalled", logging.WARNING, **about(lease), silent_s=silent)
