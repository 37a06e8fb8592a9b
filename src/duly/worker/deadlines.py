"""Cancels handlers that exceed their timeout, and abandons those that do not stop. Reports handlers that stall.

It checks all held jobs every few milliseconds, and only if a task has such a limit. That is cheaper than a timer per
job, and works alike for coroutines, threads and processes.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from duly.app.definition import Kind
from duly.app.events import about
from duly.app.lease import Asked, Lease, timed_out
from duly.model import Failed
from duly.rules.failure import describe
from duly.worker.children import Children
from duly.worker.finishing import Finishing
from duly.worker.held import Held
from duly.worker.shared import Shared
from duly.worker.stopping import Stopping
from duly.worker.threads import Threads

LOOK_SECONDS = 0.05
IDLE_SECONDS = 0.5
# After a handler was asked to stop: when it is interrupted, and when it is given up on.
INTERRUPT_SECONDS = 0.5
GIVE_UP_SECONDS = 1.5


@dataclass(eq=False, repr=False)
class Deadlines:
    """Watches the handlers of one worker."""

    _shared: Shared
    _held: Held
    _finishing: Finishing
    _stopping: Stopping
    _children: Children
    _threads: Threads

    async def run(self) -> None:
        """Look again and again until cancelled."""
        definitions = [task.definition for task in self._shared.app.tasks.values()]
        limited = any(one.timeout_ms or one.stall_after_ms for one in definitions)
        while True:
            await asyncio.sleep(LOOK_SECONDS if limited and len(self._held) else IDLE_SECONDS)
            self.look()

    def look(self) -> None:
        """Check every handler that runs. The end of one that has ended may not be recorded yet."""
        now = self._shared.clock()
        for lease in self._held.leases():
            if lease.begun_at is not None and not (lease.ended_at or lease.closed or lease.sent):
                self._check(lease, now, lease.begun_at)

    def _check(self, lease: Lease, now: float, begun_at: float) -> None:
        definition = lease.definition
        if definition.stall_after_ms is not None:
            self._check_stall(lease, now, begun_at, definition.stall_after_ms)
        if definition.timeout_ms is None:
            return
        if lease.asked is not Asked.TIMEOUT:
            if now - begun_at > definition.timeout_ms / 1000:
                self._stopping.ask(lease, Asked.TIMEOUT)
            return
        waited = now - lease.asked_at
        if self._children.hurry(lease, waited) or definition.kind is Kind.PROCESS:
            return
        if waited > GIVE_UP_SECONDS:
            self._finishing.give_up_on(lease, Failed(describe(timed_out(lease))))
            self._stopping.stop_if_stuck()
        elif waited > INTERRUPT_SECONDS:
            self._interrupt(lease)

    def _interrupt(self, lease: Lease) -> None:
        """Raise into a handler that did not stop when it was asked to."""
        if lease.aio is not None:
            lease.aio.cancel()
        else:
            self._threads.interrupt(lease)

    def _check_stall(self, lease: Lease, now: float, begun_at: float, limit_ms: int) -> None:
        silent = now - (lease.beat_at or begun_at)
        if silent > limit_ms / 1000 and not lease.stalled:
            lease.stalled = True
            tell = self._shared.app.events.tell
            tell("job.stalled", logging.WARNING, **about(lease), silent_s=round(silent, 3))
