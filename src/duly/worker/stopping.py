"""How a worker stops: it claims no more, waits for the grace time, asks handlers to stop, releases the rest."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from duly.app.events import about
from duly.app.lease import Asked, Lease
from duly.errors import DulyError
from duly.model import Change, State
from duly.store import ops
from duly.store.op import Finish
from duly.worker.children import Children
from duly.worker.finishing import Finishing
from duly.worker.held import Held
from duly.worker.shared import Shared
from duly.worker.wakeups import Wakeups

# After the grace time: how long handlers have to stop when asked to, and how long recording the rest may take.
TOLD_SECONDS = 0.3
LAST_SECONDS = 0.6
GOODBYE_SECONDS = 5.0  # the longest goodbye of a worker that is in no hurry


@dataclass(eq=False, repr=False)
class Stopping:
    """Stops one worker, and the handlers that must not run any more."""

    _shared: Shared
    _held: Held
    _wakeups: Wakeups
    _finishing: Finishing
    _children: Children
    _: KW_ONLY
    grace_s: float
    on_stuck: Callable[[], None] | None
    noticed: asyncio.Event = field(default_factory=asyncio.Event, init=False)  # `stop` was called
    _stop_at: float = field(default=0.0, init=False)
    _asked_all: bool = field(default=False, init=False)
    _gave_back: bool = field(default=False, init=False)

    def stop(self) -> None:
        """Claim no more, and stop when the jobs have ended or the grace time is over. A second call ends that time."""
        shared, now = self._shared, self._shared.clock()
        self._stop_at = now if shared.stopping else now + self.grace_s
        if not shared.stopping:
            shared.app.events.tell("worker.stopping", worker=shared.id, running=len(self._held), grace_s=self.grace_s)
        shared.stopping = True
        shared.call_soon(self.noticed.set)
        self._wakeups.wake()

    async def stop_at_once(self, turns: asyncio.Task[None]) -> None:
        """Give the turn in flight a moment to end, to record what ended, and to release the rest."""
        self._stop_at, self._shared.stopping = self._shared.clock(), True
        self._wakeups.wake()
        await asyncio.wait({turns}, timeout=TOLD_SECONDS + LAST_SECONDS)

    def stop_if_stuck(self) -> None:
        """Stop for a restart once half of the slots are taken by handlers that do not stop."""
        if self.on_stuck is None or self._shared.stopping:
            return
        if 2 * len(self._held.stuck) >= self._shared.concurrency:
            self.on_stuck()
            self.stop()

    def time_left(self) -> float | None:
        """Return the seconds until the worker must have stopped; None while it has no limit."""
        return self._stop_at + LAST_SECONDS - self._shared.clock() if self._shared.stopping else None

    # Handlers

    def ask(self, lease: Lease, asked: Asked) -> None:
        """Ask a handler to stop: its next context call raises, and an async handler is cancelled where it waits."""
        if lease.asked is asked:
            return
        lease.asked, lease.asked_at = asked, self._shared.clock()
        if not self._children.ask(lease) and lease.aio is not None:
            lease.aio.cancel()

    def lost(self, lease: Lease) -> None:
        """Stop a handler whose lease is lost."""
        self._shared.app.events.tell("job.lease_lost", logging.WARNING, **about(lease))
        self.ask(lease, Asked.LOST)

    def cancel(self, lease: Lease) -> None:
        """Stop a handler whose job is to be cancelled."""
        self.ask(lease, Asked.CANCEL)

    def stop_running(self) -> None:
        """After the grace time ask all handlers to stop; a moment later release their jobs."""
        now = self._shared.clock()
        if not self._shared.stopping or now < self._stop_at:
            return
        ended = {lease for lease, _ in self._finishing.unsent.copy()}
        running = [one for one in self._held.leases() if not (one.sent or one.closed or one in ended)]
        if not self._asked_all:
            self._asked_all = True
            for lease in running:
                self.ask(lease, Asked.STOPPING)
        elif now >= self._stop_at + TOLD_SECONDS:
            self._gave_back = True
            for lease in running:
                self._finishing.give_back(lease)

    def next_step_at(self) -> float | None:
        """Return when `stop_running` has something to do; None if it has not."""
        if not self._shared.stopping or self._gave_back:
            return None
        return self._stop_at + (TOLD_SECONDS if self._asked_all else 0.0)

    # The goodbye

    async def say_goodbye(self) -> bool:
        """Release what is held and remove the worker; return whether that was done.

        A call of `stop` meanwhile shortens the time for it.
        """
        began, leaving = self._shared.clock(), asyncio.create_task(self._leave())
        try:
            while not leaving.done() and (left := self._time_for_goodbye(began)) > 0:
                self.noticed.clear()
                noticed = asyncio.create_task(self.noticed.wait())
                await asyncio.wait({leaving, noticed}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                noticed.cancel()
        finally:
            leaving.cancel()
        with contextlib.suppress(DulyError, asyncio.CancelledError):
            await leaving
            return True
        return False

    def _time_for_goodbye(self, began: float) -> float:
        until = self._stop_at + LAST_SECONDS if self._stop_at else began + GOODBYE_SECONDS
        return min(max(until, began + TOLD_SECONDS), began + GOODBYE_SECONDS) - self._shared.clock()

    async def _leave(self) -> None:
        driver = self._shared.driver
        ended = dict(self._finishing.unsent.copy())  # threads may append meanwhile
        released = Change(State.READY, give_back_attempt=True)
        held = [lease for lease in self._held.leases() if not lease.sent]
        if held:
            await driver.arun(ops.finish([Finish(lease.job, ended.get(lease, released)) for lease in held]))
            self._held.clear()
        await driver.arun(ops.leave(self._shared.id))
