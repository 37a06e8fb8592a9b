"""The upkeep of the queue. Every worker does it, all at once: each write is guarded by the rows it was decided on.

Fire adds the jobs of due schedules. Rescue takes jobs from workers that stopped their heartbeats. Promote makes a
backlog of due jobs ready. Count measures queues with a limit. Park sets jobs aside whose task no living worker knows.
Expire ends jobs that did not start in time. Prune deletes old rows.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass

from duly.errors import DulyError
from duly.store import ops, queues, schedules
from duly.store.op import Op
from duly.worker.children import Children
from duly.worker.held import Held
from duly.worker.lanes import Lanes
from duly.worker.queue_limits import QueueLimits
from duly.worker.shared import Shared
from duly.worker.suspects import Suspects
from duly.worker.upkeep.count import Count
from duly.worker.upkeep.fire import Fire
from duly.worker.upkeep.rescue import SHARE, Rescue
from duly.worker.wakeups import Wakeups

log = logging.getLogger("duly.worker")

LOOK_SECONDS = 0.4
FAR_LOOK_SECONDS = 1.0
TIDY_SECONDS = 1.0
IDLE_TIDY_SECONDS = 3.0  # the claims of an idle worker take due jobs without a promotion
FAR_IDLE_TIDY_SECONDS = 10.0
PARK_SECONDS = 10.0  # the longest pause between scans for unknown tasks
PRUNE_SECONDS = 60.0
CHUNK = 1000
PEEK = 100


@dataclass(eq=False, repr=False)
class Upkeep:
    """Does the upkeep beside one worker's turns."""

    _shared: Shared
    _held: Held
    _wakeups: Wakeups
    _lanes: Lanes
    _limits: QueueLimits
    _children: Children
    _suspects: Suspects

    def __post_init__(self) -> None:
        self.rescue = Rescue(self._shared, self._held, self._children, self._suspects)
        self.fire = Fire(self._shared, self._wakeups)
        self._count = Count(self._shared)
        self._promote_at: dict[str, float] = {}
        self._tidied_at = -math.inf
        self._idle_tidy_s = FAR_IDLE_TIDY_SECONDS if self._shared.driver.far else IDLE_TIDY_SECONDS
        self._park_at = -math.inf
        self._wake_at = 0.0
        self._prune_at = self._shared.clock() + PRUNE_SECONDS / 2

    async def run(self) -> None:
        """Do the upkeep again and again until cancelled. Errors are logged once and retried."""
        failing = False
        while True:
            try:
                await self.round()
                failing = False
            except DulyError as error:
                if not failing:
                    log.warning("upkeep.failed", extra={"error": str(error)})
                failing = True
            longest = self._shared.until_look(FAR_LOOK_SECONDS) if self._shared.driver.far else LOOK_SECONDS
            await asyncio.sleep(self.fire.pause(self.rescue.pause(longest)))

    async def round(self) -> None:
        """Do the steps for which it is time."""
        await self._look()
        now = self._shared.clock()
        # Decided at each look: a worker that was idle a moment ago may have a backlog now.
        if now >= self._tidied_at + (TIDY_SECONDS if self._wakeups.busy else self._idle_tidy_s):
            self._tidied_at = now
            await self._tidy()
        if now >= self._wake_at:
            self._wake_at = now + self._shared.shortest_lease_ms() / 3000
            await self._wake_parked()
        if now >= self._prune_at:
            self._prune_at = now + PRUNE_SECONDS
            await self._prune()

    async def _look(self) -> None:
        """Look for expired leases and due schedules: in one request, if the database is far."""
        if not self._shared.driver.far:
            await self.rescue.look()
            await self.fire.look()
            return
        for error in await asyncio.gather(self.rescue.look(), self.fire.look(), return_exceptions=True):
            if error is not None:
                raise error

    async def _tidy(self) -> None:
        driver = self._shared.driver
        await self._lanes.look()
        limits = await driver.arun(queues.limits())
        self._limits.learn(limits)
        for queue in self._shared.queues:
            await self._promote(queue)
        await self._count.look(limits)
        if (began := self._shared.clock()) >= self._park_at:
            await self._park()
            # It scans each queue from the head, with all dead rows that vacuum cannot remove.
            self._park_at = began + min(SHARE * (self._shared.clock() - began), PARK_SECONDS)
        while ids := await driver.arun(ops.expirable(CHUNK)):
            await driver.arun(ops.expire(ids))
            if len(ids) < CHUNK:
                break

    async def _promote(self, queue: str) -> None:
        """Make due jobs ready."""
        began, retries = self._shared.clock(), self._limits.promotes_retries(queue)
        if retries or began >= self._promote_at.get(queue, -math.inf):
            await self._to_the_end(ops.promote(queue, CHUNK, retries=retries), CHUNK)
            # It scans all due retries that stay scheduled.
            self._promote_at[queue] = began + min(SHARE * (self._shared.clock() - began), PARK_SECONDS)

    async def _park(self) -> None:
        """Set jobs aside whose task no living worker knows."""
        for queue in self._shared.queues:
            if await self._shared.driver.arun(ops.park(queue, PEEK)):
                await self._to_the_end(ops.park(queue, CHUNK), 1)

    async def _wake_parked(self) -> None:
        """Wake parked jobs whose task this worker knows."""
        versions = {name: task.definition.schema_version for name, task in self._shared.app.tasks.items()}
        await self._to_the_end(ops.wake(versions, self._shared.queues, CHUNK), CHUNK)

    async def _prune(self) -> None:
        keep_ms = self._shared.app.settings.keep_ms
        for what in ops.PRUNABLE:
            await self._to_the_end(ops.prune(what, CHUNK, keep_ms=keep_ms), CHUNK)
        await self.mend_schedules()
        self._tell_counts()

    async def mend_schedules(self) -> None:
        """Restore schedules of this code, pause those that no code defines, and start runs that wait for no other."""
        own = self._shared.app.schedules.in_code
        if own and (names := await self._shared.driver.arun(schedules.readopt(own))):
            self._shared.app.events.tell("schedules.restored", schedules=names)
        if names := await self._shared.driver.arun(schedules.abandon(own)):
            self._shared.app.events.tell("schedules.abandoned", logging.WARNING, schedules=names)
        if await self._shared.driver.arun(schedules.unqueue()):
            self._wakeups.wake()

    async def _to_the_end(self, op: Op[int], full: int) -> None:
        """Run an operation until a chunk is not full, with a pause in between for other callers."""
        while await self._shared.driver.arun(op) >= full:  # noqa: ASYNC110 (a pause, not a wait)
            await asyncio.sleep(0.01)

    def _tell_counts(self) -> None:
        """Log how many jobs ended since the last time."""
        events = self._shared.app.events
        counts, events.counts = events.counts, type(events.counts)()
        jobs = {name.removeprefix("job."): count for name, count in counts.items() if name.startswith("job.")}
        if jobs:
            log.info("worker.summary", extra={"worker": self._shared.id, **jobs})
