"""When a worker sleeps, and what wakes it up.

Polling finds every job; a wake-up only makes it sooner. An idle worker arms the watch of its driver, so that the next
commit of another process wakes it up. A busy worker claims anyway and disarms it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from duly.worker.shared import Shared

if TYPE_CHECKING:
    from duly.store.driver import Watch

BUSY_SECONDS = 1.0


class Wakeups:
    """Wakes up the turns of one worker, and knows whether there may be something to claim."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._event = asyncio.Event()
        self._woken = False  # the event loop will set the event
        self._watch: Watch | None = None
        self._fruitful = False  # whether something was claimed since the watch was last armed
        self._busy_since: float | None = None
        self.armed = False
        self.next_due: float | None = None
        self.due_known = False
        self.exhausted: set[str] = set()  # queues that returned less than this turn asked for
        self.came_back = 0  # how often a claim in flight may have missed a job
        self.meanwhile: Callable[[], None] | None = None  # called by each wake-up while a claim is in flight

    # Waking up

    def wake(self) -> None:
        """Wake up the turns, from any thread."""
        if not self._woken:
            self._woken = True
            self._shared.call_soon(self._wake_now)

    def _wake_now(self) -> None:
        self._woken = False
        self._event.set()
        if self.meanwhile is not None:
            self.meanwhile()

    def changed(self) -> None:
        """Wake up because jobs may be ready, from any thread."""
        self.due_known = False
        self.armed = False
        self.wake()

    def begin_turn(self) -> None:
        """Forget the wake-ups so far: this turn does what they ask for."""
        self._event.clear()
        self._woken = False

    async def sleep(self, seconds: float) -> None:
        """Sleep until a wake-up, and no longer than this."""
        timer = asyncio.get_running_loop().call_later(seconds, self._timed_out)
        await self._event.wait()
        timer.cancel()

    def _timed_out(self) -> None:
        self.due_known = False
        self.armed = False  # to be safe; arming a watch that is still armed changes nothing
        self._event.set()

    # The watch

    def watch(self) -> None:
        """Start to watch the database for commits of other processes."""
        self._watch = self._shared.driver.watch(self.changed)

    def close(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.close()

    def rearm(self) -> bool:
        """Arm the watch again after it fired. False: there was a commit since, so claim once more."""
        assert self._watch is not None
        fruitful, self._fruitful = self._fruitful, False
        self.armed = True
        missed_nothing = self._watch.rearm(fruitful=fruitful)
        if not missed_nothing:
            self.armed = False
        return missed_nothing

    def arm(self) -> None:
        """Arm the watch; it may fire once only. Blocks."""
        assert self._watch is not None
        fruitful, self._fruitful = self._fruitful, False
        self.armed = True
        self._watch.arm(fruitful=fruitful)

    # What may be claimed

    @property
    def busy(self) -> bool:
        """Whether the last claim returned something."""
        return self._busy_since is not None

    def note_idle(self) -> None:
        """Note that nothing is left to claim."""
        self._busy_since = None

    def note_busy(self, claimed: int) -> None:
        """Note how many jobs a turn claimed. Disarms the watch of a worker that stays busy."""
        self._fruitful = self._fruitful or claimed > 0
        now = self._shared.clock()
        if not claimed:
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = now
        elif now - self._busy_since > BUSY_SECONDS:
            self.armed = False
            if self._watch is not None:
                self._watch.disarm()

    def note_due(self, due_in_ms: int) -> None:
        """Note when a job is due."""
        due = self._shared.clock() + max(due_in_ms, 1) / 1000
        self.next_due = due if self.next_due is None else min(due, self.next_due)

    def may_have_missed(self) -> None:
        """Note that a job may have come that the claim in flight does not see."""
        self.came_back += 1

    def look_again(self) -> None:
        """Note that jobs may be ready that were not before."""
        self.exhausted.clear()
        self.came_back += 1
