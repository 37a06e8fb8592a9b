"""The turns of a worker.

Polling finds every job; a wake-up only makes it sooner (`wakeups`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from duly.worker.claiming import Claiming
from duly.worker.finishing import Finishing
from duly.worker.held import Held
from duly.worker.prefetch import LATE_SECONDS
from duly.worker.shared import Shared
from duly.worker.slots import Slots
from duly.worker.stopping import Stopping
from duly.worker.suspects import Suspects
from duly.worker.upkeep import Upkeep
from duly.worker.wakeups import Wakeups


@dataclass(eq=False, repr=False)
class Turns:
    """The turns of one worker: record what ended, claim, rest; until nothing is left to do."""

    _shared: Shared
    _held: Held
    _wakeups: Wakeups
    _finishing: Finishing
    _stopping: Stopping
    _slots: Slots
    _claiming: Claiming
    _suspects: Suspects
    _upkeep: Upkeep

    async def begin(self) -> None:
        """Bring the schedules in line with the code. For a drain, fire what is due before it finds nothing to do."""
        app = self._shared.app
        for what, names in (await app.schedules.areconcile()).items():
            if names:
                level = logging.WARNING if what == "abandoned" else logging.INFO
                app.events.tell(f"schedules.{what}", level, schedules=names)
        if self._shared.draining:
            await self._look_first()

    async def _look_first(self) -> None:
        await self._upkeep.fire.to_the_end()

    async def run(self) -> None:
        """Take turns until nothing is left to do."""
        while not self._done():
            self._wakeups.begin_turn()
            await self.turn()
            await self._rest()
        await self._finishing.sent()

    def _done(self) -> bool:
        if len(self._held) or self._finishing.unsent:
            return False
        empty = self._claiming.exhausted and not self._suspects.busy
        return self._shared.stopping or (self._shared.draining and empty)

    async def turn(self) -> None:
        """Send what ended and claim for the free slots: both are in flight at the same time."""
        self._claiming.give_back_late()
        self._stopping.stop_running()
        await self._finishing.send()
        await self._claiming.fill()

    async def _rest(self) -> None:
        """Sleep until something may have changed: a job ended, was enqueued or is due."""
        wakeups = self._wakeups
        if self._finishing.should_send() or self._done() or self._claiming.may_claim_more():
            return
        idle = self._claiming.has_room()
        if idle and not (wakeups.armed and wakeups.due_known):
            await asyncio.sleep(0)  # let the claimed jobs begin before a thread is started
        if idle and not (wakeups.armed or wakeups.rearm()):
            await self._shared.in_thread(wakeups.arm)
            return  # and claim once more, now that the next commit wakes this worker up
        if idle and not wakeups.due_known and not self._shared.driver.far:
            await self._claiming.look_ahead()
        if idle:
            wakeups.note_idle()
        await wakeups.sleep(self._pause())

    def _pause(self) -> float:
        """Return how long to sleep if nothing wakes the worker up."""
        now, wakeups = self._shared.clock(), self._wakeups
        until = [now + self._shared.until_look(self._shared.app.settings.poll_ms / 1000)]
        if wakeups.due_known and wakeups.next_due is not None:  # without a free slot it may be unknown or in the past
            until.append(wakeups.next_due)
        if (oldest := self._slots.oldest) is not None:
            until.append(oldest.claimed_at + LATE_SECONDS)
        if (step_at := self._stopping.next_step_at()) is not None:
            until.append(step_at)
        return max(0.0, min(until) - now)

    async def stop_at_once(self, turns: asyncio.Task[None]) -> None:
        """Let the turn in flight end, record what ended, and release the rest."""
        await self._stopping.stop_at_once(turns)
