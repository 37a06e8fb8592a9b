"""How a worker claims: as many jobs as it has room for, queue after queue in turns, and quick jobs ahead.

A claim asks for as many jobs as there are free slots. If all tasks are quick (`prefetch`) it also asks for jobs that
will begin in a moment, in parts. Lanes have claims of their own (`lanes`), and so have queues with limits
(`queue_limits`).

A queue that returns less than a claim asked for is exhausted until the next turn, unless the claim may have missed a
job.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from duly.app.lease import Lease
from duly.errors import DulyError
from duly.model import Claimed
from duly.rules import keys
from duly.store import ops
from duly.worker.finishing import Finishing
from duly.worker.held import Held
from duly.worker.lanes import Lanes
from duly.worker.prefetch import Prefetch
from duly.worker.queue_limits import QueueLimits
from duly.worker.shared import Shared
from duly.worker.slots import Slots
from duly.worker.stopping import Stopping
from duly.worker.wakeups import Wakeups
from duly.worker.watermark import Watermark

PARTS = 3  # in which quick jobs are claimed ahead: one part is in flight while the others run


@dataclass(eq=False, repr=False)
class Claiming:
    """Claims for one worker, and knows how far each of its queues is claimed."""

    _shared: Shared
    _held: Held
    _wakeups: Wakeups
    _finishing: Finishing
    _stopping: Stopping
    _slots: Slots
    _prefetch: Prefetch
    _lanes: Lanes
    _limits: QueueLimits
    filling: bool = field(default=False, init=False)  # a claim may be in flight

    def __post_init__(self) -> None:
        self._clock = self._shared.clock
        self._queues = self._shared.queues
        self._tasks = self._shared.app.tasks
        self._order = deque(self._queues)
        self._watermarks = {queue: Watermark() for queue in self._queues}

    @property
    def exhausted(self) -> bool:
        """Whether every queue returned less than this turn asked for."""
        return self._wakeups.exhausted.issuperset(self._queues)

    def has_room(self) -> bool:
        """Whether a slot is free for a job of some queue."""
        return self._claims() and any(self.room(queue) > 0 for queue in self._queues)

    def may_claim_more(self) -> bool:
        """Whether there is room, perhaps since a finish in this turn, for a queue that may have jobs."""
        if not self._claims():
            return False
        ahead, quick = self._prefetch.ahead(self._clock())
        if not quick.issuperset(self._tasks):
            ahead = 0
        return any(
            queue not in self._wakeups.exhausted and self.room(queue) + self._further(queue, ahead) > 0
            for queue in self._queues
        )

    async def fill(self) -> None:
        """Claim as many jobs as there is room for, queue after queue, and start them."""
        self._wakeups.exhausted.clear()
        if not self._claims():
            return
        self.filling, self._wakeups.meanwhile = True, self._finishing.send_beside_claim
        try:
            await self._fill_from_queues()
        finally:
            self.filling, self._wakeups.meanwhile = False, None
            self._held.vacated.set()

    def _claims(self) -> bool:
        return not (self._shared.stopping or self._held.emptying)

    async def _fill_from_queues(self) -> None:
        self._order.rotate(-1)
        ahead, quick = self._prefetch.ahead(self._clock())
        self._finishing.soon = self._prefetch.soon(ahead)
        claimed, looked = 0, False
        for queue in list(self._order):
            room, further = self.room(queue), self._further(queue, ahead)
            looked = looked or room > 0 or (room + further > 0 and quick.issuperset(self._tasks))
            claimed += await self._take_from(queue, room, further, quick)
        if looked:  # without room for any queue, no claim was sent
            self._wakeups.note_busy(claimed)

    def room(self, queue: str) -> int:
        """Return how many jobs of a queue may be claimed for the free slots."""
        room = self._held.idle_slots
        limit = self._queues[queue]
        if limit is not None:
            room = min(room, limit - self._held.of_queue(queue))
        return room

    def _further(self, queue: str, ahead: int) -> int:
        """Return how many jobs of a queue to claim beyond the free slots: none until one part of them has begun.

        A queue with a limit may fill it, or it would have no turn behind the jobs that are claimed ahead.
        """
        limit = self._queues[queue]
        if limit is not None and ahead:
            return max(0, min(limit, self._shared.concurrency) - self._held.of_queue(queue) - self.room(queue))
        return 0 if len(self._held.waiting) > ahead - ahead // PARTS else ahead

    async def _take_from(self, queue: str, room: int, ahead: int, quick: frozenset[str]) -> int:
        """Claim for the free slots, and quick tasks beyond them."""
        if quick.issuperset(self._tasks):
            return await self._take(queue, self._part(queue), self._tasks)
        taken = await self._take(queue, room, self._tasks)
        # Only when a slot was free: quick jobs on top of quick jobs would leave no slot for the others.
        if ahead and taken >= room > 0:
            taken += await self._take(queue, min(ahead, self.room(queue) + ahead), quick)
        return taken

    def _part(self, queue: str) -> int:
        """Return how many quick jobs to claim at once."""
        ahead, quick = self._prefetch.ahead(self._clock())
        if not quick.issuperset(self._tasks):
            return 0
        return min(self.room(queue) + self._further(queue, ahead), self._shared.concurrency + ahead // PARTS)

    async def _take(self, queue: str, limit: int, tasks: Iterable[str]) -> int:
        """Claim jobs and start them. Returns how many."""
        if limit <= 0:
            return 0
        came_back, self._lanes.unseen = self._wakeups.came_back, False
        leases = await self.claim(queue, limit, tasks)
        if tasks is self._tasks:
            self._note_reached(queue, leases)
            if len(leases) < limit and came_back == self._wakeups.came_back and not self._lanes.unseen:
                self._wakeups.exhausted.add(queue)
        self._begin_all(leases)
        return len(leases)

    def _begin_all(self, leases: Sequence[Lease]) -> None:
        """Start the jobs of a claim for which slots are free; the others wait for one."""
        self._prefetch.note_claim(len(leases), sum(len(lease.job.payload) for lease in leases))
        free = self._slots.free
        for place, lease in enumerate(leases):
            if place < free or self._may_wait(lease):
                self._slots.put(lease)
            else:
                self._prefetch.late(self._clock())
                self._finishing.give_back(lease)
        self._slots.fill()

    def _may_wait(self, lease: Lease) -> bool:
        """Whether a job may wait for a slot. One on its last attempt would lose it if this process crashed."""
        return lease.job.attempt < lease.job.max_attempts

    def give_back_late(self) -> None:
        """Release jobs that were claimed ahead and have not begun in time, or will not because the worker stops."""
        now, late = self._clock(), False
        while lease := self._slots.take_back(math.inf if self._shared.stopping else now):
            late = True
            self._finishing.give_back(lease)
        if late:
            self._prefetch.too_far(now)

    async def look_ahead(self) -> None:
        """Read when the next job is due, so that the worker sleeps exactly until then."""
        self._wakeups.next_due, self._wakeups.due_known = None, True  # a wake-up meanwhile sets it back
        for queue in self._queues:
            for due_in_ms in (await self._shared.surely(ops.next_due(queue)), await self._lanes.next_permit(queue)):
                if due_in_ms is not None:
                    self._wakeups.note_due(due_in_ms)

    # The claim

    async def claim(
        self, queue: str, limit: int, tasks: Iterable[str], *, alone: bool = False, child: bool = False
    ) -> list[Lease]:
        """Claim jobs with and without a lane. `child`: for a child process, so that its crash is not this worker's."""
        holder = f"{self._shared.id}{ops.CHILD}" if child else self._shared.id
        leases: list[Lease] = []
        for way in self._lanes.ways(queue, self._claim_plain, (tasks is self._tasks, alone)):
            if len(leases) < limit:
                jobs = await way(queue, limit - len(leases), list(tasks), holder, alone)
                for old in self._held.superseded(jobs):
                    self._stopping.lost(old)
                leases += self._held.hold(jobs)
        return leases

    async def _claim_plain(
        self, queue: str, limit: int, tasks: Collection[str], holder: str, alone: bool
    ) -> list[Claimed]:
        marks = [] if alone else self._watermarks[queue].marks()
        op = self._limits.claim(
            queue, limit=limit, token=keys.new_token(), worker=holder, tasks=tasks, alone=alone, marks=marks
        )
        jobs = await self._shared.surely(op)
        self._limits.took(queue, jobs)
        return jobs

    # How far a queue is claimed

    def _note_reached(self, queue: str, leases: Sequence[Lease]) -> None:
        """Note how far a queue is claimed, and look now and then for jobs before that.

        A worker that drains begins each claim at the head: it must not stop while any job is ready.
        """
        if self._shared.draining:
            return
        watermark = self._watermarks[queue]
        watermark.passed([lease.job for lease in leases if lease.job.lane is None])
        # For an idle queue without marks a look could change nothing.
        if (leases or watermark.marks()) and watermark.begin_look(self._clock()):
            self._shared.in_background(self._look_at_head(queue))

    async def _look_at_head(self, queue: str) -> None:
        watermark = self._watermarks[queue]
        try:
            head = await self._shared.driver.arun(ops.head(queue, tasks=self._tasks))
        except DulyError:  # the next claim meets the same error
            watermark.look_failed(self._clock())
            return
        if watermark.looked(head, self._clock()):
            self._wakeups.exhausted.discard(queue)
            self._wakeups.wake()
