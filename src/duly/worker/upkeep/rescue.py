"""Takes jobs from workers that stopped their heartbeats.

An expired lease is not enough: its worker may have lost the database for a while and reconnect at any moment. A job is
taken when the same token and expiry were seen twice, one heartbeat and half a second apart. The time is measured by
this process's monotonic clock, and the database must not have failed in between.
"""

from __future__ import annotations

import logging

from duly.model import Sighting, State
from duly.store import ops
from duly.worker.children import Children
from duly.worker.held import Held
from duly.worker.shared import Shared
from duly.worker.suspects import Suspects

MARGIN_SECONDS = 0.5
# While vacuum cannot remove dead rows, a look scans all of them: it takes a twentieth of the time, unless that were
# less than one look a second.
SHARE = 20
LONGEST_SECONDS = 1.0


class Rescue:
    """Remembers which leases have expired, and when that was first seen."""

    def __init__(self, shared: Shared, held: Held, children: Children, suspects: Suspects) -> None:
        self._shared = shared
        self._held = held
        self._children = children
        self._suspects = suspects
        self._seen: dict[Sighting, float] = {}
        self._failures = 0
        self._took = 0.0

    async def look(self) -> None:
        """Look for expired leases, and take the jobs of those that were seen long enough ago."""
        driver, clock = self._shared.driver, self._shared.clock
        failures, began = driver.failures, clock()
        found = await driver.arun(ops.expired_leases())
        now = clock()
        self._took = now - began
        if driver.failures != self._failures or failures != self._failures:
            self._failures = driver.failures
            self._seen.clear()
        own = {lease.job.token for lease in self._held.leases()}
        self._seen = {one: self._seen.get(one, now) for one in found if one.token not in own}
        if self._seen:
            self._children.warm_up()
        if due := [one for one, since in self._seen.items() if now - since >= _patience(one)]:
            await self._take(due)

    async def _take(self, due: list[Sighting]) -> None:
        taken = await self._shared.driver.arun(ops.rescue(due))
        for one in due:
            self._seen.pop(one, None)
            if one.id in taken:
                self._tell(one, taken[one.id])
        self._suspects.hint()

    def _tell(self, one: Sighting, state: State) -> None:
        tell = self._shared.app.events.tell
        tell("job.rescued", logging.WARNING, job_id=one.id, from_worker=one.worker, state=state.value)
        if state is State.DEAD:  # listeners to `job.dead` get every death
            tell("job.dead", logging.ERROR, job_id=one.id, outcome=state.value, reason="its worker was lost")

    def waiting(self) -> tuple[int, float]:
        """Return how many expired leases are being watched, and in how many seconds the first job may be taken."""
        now = self._shared.clock()
        return len(self._seen), max(
            0.0, min((since + _patience(one) - now for one, since in self._seen.items()), default=0)
        )

    def pause(self, longest: float) -> float:
        """Return the time until the next look: at most until the next job may be taken."""
        now = self._shared.clock()
        longest = max(longest, min(SHARE * self._took, LONGEST_SECONDS))
        return max(0.01, min([longest, *(since + _patience(one) - now for one, since in self._seen.items())]))


def _patience(one: Sighting) -> float:
    return one.lease_ms / 3000 + MARGIN_SECONDS
