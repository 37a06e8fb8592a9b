"""The upkeep of the queue. Every worker does it, any number at once: each step is guarded by what it read.

Fire adds what schedules have due, rescue takes jobs from workers that stopped beating, promote makes a backlog of due
jobs ready, measure counts what waits in queues that take no more than so many, park sets aside what nobody knows,
expire ends what did not start in time, prune removes what has had its time.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING

from duly.errors import DulyError
from duly.store import ops, queues, schedules
from duly.store.op import Op
from duly.worker.upkeep.count import Measure
from duly.worker.upkeep.fire import Fire
from duly.worker.upkeep.rescue import SHARE, Rescue

if TYPE_CHECKING:
    from duly.worker.worker import Worker

log = logging.getLogger("duly.worker")

LOOK_SECONDS = 0.4
TIDY_SECONDS = 1.0
IDLE_TIDY_SECONDS = 3.0  # claims take what is due by themselves, as long as they find the time
PARK_SECONDS = 10.0  # at most, however long the walk for what nobody knows
PRUNE_SECONDS = 60.0
CHUNK = 1000
PEEK = 100


class Upkeep:
    """Does the upkeep beside one worker's turns."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.rescue = Rescue(worker)
        self.fire = Fire(worker)
        self._measure = Measure(worker)
        self._promote_at: dict[str, float] = {}
        self._tidied_at = -math.inf
        self._park_at = -math.inf
        self._wake_at = 0.0
        self._prune_at = worker.clock() + PRUNE_SECONDS / 2

    async def run(self) -> None:
        """Look after the queue, for ever; what fails is told once and tried again next time."""
        failing = False
        while True:
            try:
                await self.round()
                failing = False
            except DulyError as error:
                if not failing:
                    log.warning("upkeep.failed", extra={"error": str(error)})
                failing = True
            await asyncio.sleep(self.fire.pause(self.rescue.pause(LOOK_SECONDS)))

    async def round(self) -> None:
        """Do what it is time for."""
        await self.rescue.look()
        await self.fire.look()
        now = self._worker.clock()
        # Judged anew at each look: a worker that was idle a moment ago may stand before a backlog now.
        if now >= self._tidied_at + (TIDY_SECONDS if self._worker.busy else IDLE_TIDY_SECONDS):
            self._tidied_at = now
            await self._tidy()
        if now >= self._wake_at:
            self._wake_at = now + self._worker.shortest_lease_ms() / 3000
            await self._wake_parked()
        if now >= self._prune_at:
            self._prune_at = now + PRUNE_SECONDS
            await self._prune()

    async def _tidy(self) -> None:
        driver = self._worker.driver
        await self._worker.lanes.look()
        limits = await driver.arun(queues.limits())
        self._worker.shaping.learn(limits)
        for queue in self._worker.queues:
            await self._promote(queue)
        await self._measure.look(limits)
        if (began := self._worker.clock()) >= self._park_at:
            await self._park()
            # It walks from the head of each queue, over all that is gone and may not be cleared away.
            self._park_at = began + min(SHARE * (self._worker.clock() - began), PARK_SECONDS)
        while ids := await driver.arun(ops.expirable(CHUNK)):
            await driver.arun(ops.expire(ids))
            if len(ids) < CHUNK:
                break

    async def _promote(self, queue: str) -> None:
        """Make what is due ready."""
        began, retries = self._worker.clock(), self._worker.shaping.promotes_retries(queue)
        if retries or began >= self._promote_at.get(queue, -math.inf):
            await self._to_the_end(ops.promote(queue, CHUNK, retries=retries), CHUNK)
            # It walks over all retries that are due and stay where they are.
            self._promote_at[queue] = began + min(SHARE * (self._worker.clock() - began), PARK_SECONDS)

    async def _park(self) -> None:
        """Set aside what nobody knows."""
        for queue in self._worker.queues:
            if await self._worker.driver.arun(ops.park(queue, PEEK)):
                await self._to_the_end(ops.park(queue, CHUNK), 1)

    async def _wake_parked(self) -> None:
        """Wake the jobs that waited for a worker that knows their task, as we do."""
        versions = {name: task.definition.schema_version for name, task in self._worker.app.tasks.items()}
        await self._to_the_end(ops.wake(versions, self._worker.queues, CHUNK), CHUNK)

    async def _prune(self) -> None:
        keep_ms = self._worker.app.settings.keep_ms
        for what in ops.PRUNABLE:
            await self._to_the_end(ops.prune(what, CHUNK, keep_ms=keep_ms), CHUNK)
        await self.mend_schedules()
        self._tell_counts()

    async def mend_schedules(self) -> None:
        """Take up what is ours, pause what no code has any more, and let runs begin that wait for nobody."""
        own = self._worker.app.schedules.in_code
        if own and (names := await self._worker.driver.arun(schedules.readopt(own))):
            self._worker.app.events.tell("schedules.readopted", schedules=names)
        if names := await self._worker.driver.arun(schedules.abandon(own)):
            self._worker.app.events.tell("schedules.abandoned", logging.WARNING, schedules=names)
        if await self._worker.driver.arun(schedules.unqueue()):
            self._worker.poke()

    async def _to_the_end(self, op: Op[int], full: int) -> None:
        """Do a chunk after the other until one is not full, with room for others in between."""
        while await self._worker.driver.arun(op) >= full:  # noqa: ASYNC110 (a pause, not a wait)
            await asyncio.sleep(0.01)

    def _tell_counts(self) -> None:
        """Sum up what happened since the last time."""
        counts, self._worker.app.events.counts = self._worker.app.events.counts, type(self._worker.app.events.counts)()
        jobs = {name.removeprefix("job."): count for name, count in counts.items() if name.startswith("job.")}
        if jobs:
            log.info("worker.summary", extra={"worker": self._worker.id, **jobs})
