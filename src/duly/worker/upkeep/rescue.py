"""Takes jobs from workers that stopped beating.

A lease that ended is not enough: its worker may only have lost the database for a while and be back any moment. It is
taken when the same token and the same end were seen twice, one beat and a half second apart by our own monotonic
clock, with no failure of the database in between.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from duly.model import Sighting, State
from duly.store import ops

if TYPE_CHECKING:
    from duly.worker.worker import Worker

MARGIN_SECONDS = 0.5
# Where nothing that is gone may be cleared away, a look walks over all of it: it takes a twentieth of the time, as long
# as that leaves one a second.
SHARE = 20
LONGEST_SECONDS = 1.0


class Rescue:
    """Remembers which leases were seen to have ended, and since when."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._seen: dict[Sighting, float] = {}
        self._failures = 0
        self._took = 0.0

    async def look(self) -> None:
        """Look for ended leases, and take those that were seen long enough ago."""
        worker = self._worker
        failures, began = worker.driver.failures, worker.clock()
        found = await worker.driver.arun(ops.expired_leases())
        now = worker.clock()
        self._took = now - began
        if worker.driver.failures != self._failures or failures != self._failures:
            self._failures = worker.driver.failures
            self._seen.clear()
        own = {lease.job.token for lease in worker.leases()}
        self._seen = {one: self._seen.get(one, now) for one in found if one.token not in own}
        if self._seen:
            worker.children.warm_up()
        if due := [one for one, since in self._seen.items() if now - since >= _patience(one)]:
            await self._take(due)

    async def _take(self, due: list[Sighting]) -> None:
        taken = await self._worker.driver.arun(ops.rescue(due))
        for one in due:
            self._seen.pop(one, None)
            if one.id in taken:
                self._tell(one, taken[one.id])
        self._worker.suspects_ready()

    def _tell(self, one: Sighting, state: State) -> None:
        tell = self._worker.app.events.tell
        tell("job.rescued", logging.WARNING, job_id=one.id, from_worker=one.worker, state=state.value)
        if state is State.DEAD:  # who waits for deaths hears of all of them
            tell("job.dead", logging.ERROR, job_id=one.id, outcome=state.value, reason="its worker was lost")

    def waiting(self) -> tuple[int, float]:
        """Say how many ended leases are being watched, and in how many seconds the first of them may be taken."""
        now = self._worker.clock()
        return len(self._seen), max(
            0.0, min((since + _patience(one) - now for one, since in self._seen.items()), default=0)
        )

    def pause(self, longest: float) -> float:
        """Say how long to wait before the next look: exactly until something seen may be taken, if that is sooner."""
        now = self._worker.clock()
        longest = max(longest, min(SHARE * self._took, LONGEST_SECONDS))
        return max(0.01, min([longest, *(since + _patience(one) - now for one, since in self._seen.items())]))


def _patience(one: Sighting) -> float:
    return one.lease_ms / 3000 + MARGIN_SECONDS
