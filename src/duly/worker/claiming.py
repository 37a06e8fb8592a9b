"""How a worker claims: as many jobs as it has room for, queue after queue in turns, and of quick ones more than that.

A job that is claimed has a slot or waits for one, so a claim asks for as many as there are free slots. Where all tasks
are quick (`prefetch`) it asks for those too that will begin in a moment, part after part. Jobs in lanes are claimed in
another way (`lanes`), and so are those of a queue that was told to (`queue_limits`).

A queue that had less than was asked for is exhausted until the next turn, unless something may have come to it that the
claim could not see.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from duly.app.lease import Lease
from duly.errors import DulyError
from duly.model import Claimed
from duly.rules import keys
from duly.store import ops
from duly.store.op import Op
from duly.worker.prefetch import Pace
from duly.worker.slots import Slots
from duly.worker.watermark import Watermark

if TYPE_CHECKING:
    from duly.worker.worker import Worker

PARTS = 3  # in which quick jobs are claimed ahead: one is on its way while the others run


class Claiming:
    """Claims for one worker, and knows how far each of its queues is claimed."""

    def __init__(self, worker: Worker, *, slots: Slots, pace: Pace) -> None:
        self._worker = worker
        self._slots = slots
        self._pace = pace
        self._lanes = worker.lanes
        self._shaping = worker.shaping
        self._clock = worker.clock
        self._queues = worker.queues
        self._tasks = worker.app.tasks
        self._order = deque(worker.queues)
        self._watermarks = {queue: Watermark() for queue in worker.queues}
        self._exhausted: set[str] = set()  # queues that had less than this turn asked for
        self._came_back = 0  # how often jobs of ours became claimable again: a claim may have looked before that
        self.filling = False  # a claim may be on its way

    @property
    def exhausted(self) -> bool:
        """Whether every queue had less than this turn asked for."""
        return self._exhausted.issuperset(self._queues)

    def may_have_missed(self) -> None:
        """Hear that something may have come which the claim that is on its way did not see."""
        self._came_back += 1

    def look_again(self) -> None:
        """Hear that something may be claimed now that could not be before."""
        self._exhausted.clear()
        self._came_back += 1

    def has_room(self) -> bool:
        """Say whether a slot is free for a job of some queue."""
        return self._takes_jobs() and any(self.room(queue) > 0 for queue in self._queues)

    def may_claim_more(self) -> bool:
        """Say whether there is room, perhaps only since this turn's finishes, for a queue that may have jobs."""
        if not self._takes_jobs():
            return False
        ahead, quick = self._pace.ahead(self._clock())
        if not quick.issuperset(self._tasks):
            ahead = 0
        return any(
            queue not in self._exhausted and self.room(queue) + self._further(queue, ahead) > 0
            for queue in self._queues
        )

    async def fill(self) -> None:
        """Claim as many jobs as there is room for, queue after queue in turns, and start them."""
        self._exhausted.clear()
        if not self._takes_jobs():
            return
        self.filling = True
        try:
            await self._fill_from_queues()
        finally:
            self.filling = False
            self._worker.filled()

    def _takes_jobs(self) -> bool:
        return not (self._worker.stopping or self._worker.emptying)

    async def _fill_from_queues(self) -> None:
        self._order.rotate(-1)
        ahead, quick = self._pace.ahead(self._clock())
        self._worker.soon = self._pace.soon(ahead)
        claimed, looked = 0, False
        for queue in list(self._order):
            room, further = self.room(queue), self._further(queue, ahead)
            looked = looked or room > 0 or (room + further > 0 and quick.issuperset(self._tasks))
            claimed += await self._take_from(queue, room, further, quick)
        if looked:  # who has no room found nothing because it did not look
            self._worker.note_busy(claimed)

    def room(self, queue: str) -> int:
        """Say how many jobs of a queue may be claimed beside those held."""
        room = self._worker.idle_slots
        limit = self._queues[queue]
        if limit is not None:
            room = min(room, limit - self._worker.held_of(queue))
        return room

    def _further(self, queue: str, ahead: int) -> int:
        """Say how many jobs beyond the free slots to claim of a queue: none until a part of them has begun.

        Of a queue with a limit as many as that leaves, or it would have no turn behind those that are claimed ahead.
        """
        limit = self._queues[queue]
        if limit is not None and ahead:
            held = self._worker.held_of(queue)
            return max(0, min(limit, self._worker.concurrency) - held - self.room(queue))
        return 0 if self._slots.waiting > ahead - ahead // PARTS else ahead

    async def _take_from(self, queue: str, room: int, ahead: int, quick: frozenset[str]) -> int:
        """Claim for the free slots, and of quick tasks beyond them."""
        if quick.issuperset(self._tasks):
            return await self._take(queue, self._part(queue), self._tasks)
        taken = await self._take(queue, room, self._tasks)
        # Not before a slot is free again: quick jobs on top of quick jobs would never leave one to the others.
        if ahead and taken >= room > 0:
            taken += await self._take(queue, min(ahead, self.room(queue) + ahead), quick)
        return taken

    def give_back_late(self) -> None:
        """Release what was claimed ahead and has not begun in time, or will not because we stop."""
        now, late = self._clock(), False
        while lease := self._slots.take_back(math.inf if self._worker.stopping else now):
            late = True
            self._worker.give_back(lease)
        if late:
            self._pace.too_far(now)

    def _part(self, queue: str) -> int:
        """Say how many quick jobs to claim at once."""
        ahead, quick = self._pace.ahead(self._clock())
        if not quick.issuperset(self._tasks):
            return 0
        return min(self.room(queue) + self._further(queue, ahead), self._worker.concurrency + ahead // PARTS)

    async def _take(self, queue: str, limit: int, tasks: Iterable[str]) -> int:
        if limit <= 0:
            return 0
        came_back, self._lanes.unseen = self._came_back, False
        leases = await self._worker.claim(queue, limit, tasks)  # which some workers do in a way of their own
        if tasks is self._tasks:
            self._note_taken(queue, leases, limit, came_back)
        self._begin_all(leases)
        return len(leases)

    def _note_taken(self, queue: str, leases: Sequence[Lease], limit: int, came_back: int) -> None:
        """Note how far a queue is claimed, and whether it had less than was asked for."""
        self._note_reached(queue, leases)
        if len(leases) < limit and came_back == self._came_back and not self._lanes.unseen:
            self._exhausted.add(queue)

    def _note_reached(self, queue: str, leases: Sequence[Lease]) -> None:
        """Note how far a queue is claimed, and look once in a while for what stands before that.

        Who drains goes when there is nothing more, and begins each claim at the head to know it.
        """
        if self._worker.draining:
            return
        watermark = self._watermarks[queue]
        watermark.passed([lease.job for lease in leases if lease.job.lane is None])
        # Of a queue that rests and has no mark, a look could change nothing.
        if (leases or watermark.marks()) and watermark.begin_look(self._clock()):
            self._slots.in_background(self._look_at_head(queue))

    async def _look_at_head(self, queue: str) -> None:
        watermark = self._watermarks[queue]
        try:
            head = await self._worker.driver.arun(ops.head(queue, tasks=self._tasks))
        except DulyError:  # whatever is wrong, the next claim meets it too
            watermark.look_failed(self._clock())
            return
        if watermark.looked(head, self._clock()):
            self._exhausted.discard(queue)
            self._worker.poke()

    def _begin_all(self, leases: Sequence[Lease]) -> None:
        """Give slots to what was claimed, and have the rest wait for one."""
        self._pace.note_claim(len(leases), sum(len(lease.job.payload) for lease in leases))
        free = self._slots.free
        for place, lease in enumerate(leases):
            # Nothing waits here on its last attempt: if we died, it would have had its chance.
            if place >= free and lease.job.attempt >= lease.job.max_attempts:
                self._pace.late(self._clock())
                self._worker.give_back(lease)
            else:
                self._slots.put(lease)
        self._slots.fill()

    async def claim(self, queue: str, limit: int, tasks: Iterable[str], *, alone: bool, child: bool) -> list[Lease]:
        """Take jobs on lease, with and without a lane."""
        holder = f"{self._worker.id}{ops.CHILD}" if child else self._worker.id
        leases: list[Lease] = []
        for way in self._lanes.ways(queue, self._claim_plain, (tasks is self._tasks, alone)):
            if len(leases) < limit:
                leases += self._worker.hold(await way(queue, limit - len(leases), list(tasks), holder, alone))
        return leases

    async def _claim_plain(
        self, queue: str, limit: int, tasks: Collection[str], holder: str, alone: bool
    ) -> list[Claimed]:
        jobs = await self._worker.surely(self._plain_claim(queue, limit, tasks, holder, alone))
        self._shaping.took(queue, jobs)
        return jobs

    def _plain_claim(
        self, queue: str, limit: int, tasks: Collection[str], holder: str, alone: bool
    ) -> Op[list[Claimed]]:
        marks = [] if alone else self._watermarks[queue].marks()
        return self._shaping.claim(
            queue, limit=limit, token=keys.new_token(), worker=holder, tasks=tasks, alone=alone, marks=marks
        )
