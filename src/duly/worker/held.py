"""The leases that a worker holds, and how many of its slots they leave free."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from duly.app.lease import Asked, Lease
from duly.model import Claimed
from duly.worker.shared import Shared


class Held:
    """The leases of one worker, by job."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._by_job: dict[str, Lease] = {}
        self._aside: set[Lease] = set()  # held but in no slot: suspects
        self._leaving = 0  # slots of jobs whose finish is in flight
        self.waiting: deque[Lease] = deque()  # claimed ahead: held, and waiting for a slot
        self.stuck: set[Lease] = set()  # given up on, but the handler still runs in its slot
        self.emptying = False  # no job is claimed, so that a suspect can run alone in this process
        self.vacated = asyncio.Event()  # a lease was let go

    def __len__(self) -> int:
        return len(self._by_job)

    def leases(self) -> list[Lease]:
        """List the leases."""
        return list(self._by_job.values())

    def has(self, lease: Lease) -> bool:
        """Whether this very lease is held, and not a later one of the same job."""
        return self._by_job.get(lease.job.id) is lease

    def superseded(self, jobs: Iterable[Claimed]) -> list[Lease]:
        """Return older leases of these jobs whose handlers still run: no heartbeat would notice that they are lost."""
        old = (self._by_job.get(job.id) for job in jobs)
        return [lease for lease in old if lease is not None and not (lease.sent or lease.closed)]

    def hold(self, jobs: Sequence[Claimed]) -> list[Lease]:
        """Hold the jobs that a claim returned."""
        shared = self._shared
        now, database, tasks = shared.clock(), shared.app.database, shared.app.tasks
        leases = []
        for job in jobs:
            lease = Lease(job, tasks[job.task].definition, database, now, tasks)
            if job.cancel_requested_at is not None:
                lease.asked = Asked.CANCEL
            self._by_job[job.id] = lease
            leases.append(lease)
        for lease_ms in {job.lease_ms for job in jobs}:
            shared.note_lease(lease_ms)
        return leases

    def let_go(self, leases: Iterable[Lease]) -> None:
        """Hold these leases no more."""
        for lease in leases:
            # A released job may already be claimed again, under another lease.
            if self._by_job.get(lease.job.id) is lease:
                del self._by_job[lease.job.id]
            self._aside.discard(lease)
        self.vacated.set()

    def clear(self) -> None:
        """Hold nothing any more."""
        self._by_job.clear()

    def of_queue(self, queue: str) -> int:
        """Count the jobs that are held of a queue."""
        return sum(lease.job.queue == queue for lease in self._by_job.values())

    # Slots

    @property
    def idle_slots(self) -> int:
        """The number of slots for which no job is held. Negative if more jobs are held than there are slots."""
        return self._shared.concurrency - (self.in_slots - self._leaving) - len(self.stuck)

    @property
    def in_slots(self) -> int:
        """The number of leases that are not set aside. The job of one that is may be held again by another lease."""
        return len(self._by_job) - sum(self._by_job.get(lease.job.id) is lease for lease in self._aside)

    def set_aside(self, lease: Lease) -> None:
        """Count a lease as being in no slot."""
        self._aside.add(lease)

    def leave(self, leases: Sequence[Lease]) -> int:
        """Free the slots of these leases while their finish is in flight. Returns how many to pass to `left`."""
        slots = len(leases) if not self._aside else sum(lease not in self._aside for lease in leases)
        self._leaving += slots
        return slots

    def left(self, slots: int) -> None:
        """Note that a finish is no longer in flight."""
        self._leaving -= slots
