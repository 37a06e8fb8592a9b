"""Fires schedules that are due. All workers do so at once: the first write wins.

`plan` decides what to do with a due schedule from the row that was read. The write is guarded by that row.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence

from duly.errors import ConfigError
from duly.model import Overlap
from duly.rules.firing import MOST_RUNS, OVERLAP, Due, Firing, plan
from duly.store import ops, schedules
from duly.worker.shared import Shared
from duly.worker.wakeups import Wakeups

log = logging.getLogger("duly.worker")

POLL_SECONDS = 1.0  # other processes define schedules too
SOONEST_SECONDS = 0.01
CHUNK = 100
UNREADABLE_SECONDS = 60.0
ENOUGH = 3


class Fire:
    """Fires schedules beside one worker's turns, and waits until the next one is due."""

    def __init__(self, shared: Shared, wakeups: Wakeups) -> None:
        self._shared = shared
        self._wakeups = wakeups
        self._look_at = -math.inf
        self._unreadable: dict[str, float] = {}  # schedules to leave out, and until when

    async def look(self) -> None:
        """Fire due schedules, if it is time to look."""
        if self._shared.clock() < self._look_at:
            return
        next_at, now = await self._shared.driver.arun(schedules.next_fire())
        wait = POLL_SECONDS if next_at is None else (next_at - now) / 1000
        if wait <= 0:  # look again at once, unless none of those that are due can be read here
            wait = SOONEST_SECONDS if await self.all_due() or not self._unreadable else POLL_SECONDS
        longest = self._shared.until_look(POLL_SECONDS)
        self._look_at = self._shared.clock() + min(max(wait, SOONEST_SECONDS), longest)

    def pause(self, longest: float) -> float:
        """Return the time until the next look."""
        return max(SOONEST_SECONDS, min(longest, self._look_at - self._shared.clock()))

    async def to_the_end(self) -> None:
        """Fire until no schedule is due."""
        idle = 0
        while idle < ENOUGH:
            next_at, now = await self._shared.driver.arun(schedules.next_fire())
            if next_at is None or next_at > now:
                return
            idle = 0 if await self.all_due() else idle + 1  # schedules that cannot be read here stay due

    async def all_due(self, limit: int = CHUNK * CHUNK, *, most_runs: int = MOST_RUNS) -> int:
        """Fire due schedules: at most `limit`, about `most_runs` runs at a time. Returns the number of runs."""
        count, left = 0, limit
        while left > 0 and (dues := await self._due(min(CHUNK, left))):
            left -= len(dues)
            count += await self._fire(dues, most_runs)
            if len(dues) < CHUNK:
                break
        return count

    async def _due(self, limit: int) -> list[Due]:
        now = self._shared.clock()
        self._unreadable = {name: until for name, until in self._unreadable.items() if until > now}
        return await self._shared.driver.arun(schedules.due(limit=limit, beside=self._unreadable))

    async def _fire(self, dues: Sequence[Due], most_runs: int = MOST_RUNS) -> int:
        firings, crowded = [], []
        for due in dues:
            firing = self._planned(due, most_runs)
            if firing and firing.runs and due.live and due.overlap is Overlap.CANCEL_RUNNING:
                crowded.append(due.name)
            elif firing:
                firings.append(firing)
            await asyncio.sleep(0)  # counting a year of minutes takes long
        if crowded:
            firings += await self._make_room(crowded, most_runs)
        firings = _fitting(firings, most_runs)
        if not firings:
            return 0
        written = await self._shared.driver.arun(schedules.fire(firings))
        return sum(self._tell(firing) for firing in firings if firing.name in written)

    async def _make_room(self, crowded: Sequence[str], most_runs: int) -> list[Firing]:
        """Cancel the running jobs of these schedules, and plan again from the rows that this changed."""
        driver = self._shared.driver
        running = await driver.arun(schedules.live_runs(crowded))
        await driver.arun(ops.cancel(running, by="duly", why="its schedule is due again"))
        found = [due for name in crowded for due in await driver.arun(schedules.one(name))]
        still_due = (due for due in found if due.next_at is not None and due.next_at <= due.now and not due.paused)
        planned = (self._planned(due, most_runs) for due in still_due if not due.live)
        return [firing for firing in planned if firing]

    def _planned(self, due: Due, most_runs: int) -> Firing | None:
        app = self._shared.app
        try:
            return plan(due, new_id=app.database.new_id, chance=self._shared.chance, most_runs=most_runs)
        except ConfigError as error:  # a time zone or an extra that is missing here; other workers may have it
            log.warning("schedule.unreadable", extra={"schedule": due.name, "error": str(error)})
            self._unreadable[due.name] = self._shared.clock() + UNREADABLE_SECONDS
            return None

    def _tell(self, firing: Firing) -> int:
        tell = self._shared.app.events.tell
        for run in firing.runs:
            tell("schedule.fired", logging.DEBUG, schedule=firing.name, job_id=run.id, due_at=run.due_at)
        for skip in firing.skips:
            level = logging.DEBUG if skip.reason == OVERLAP else logging.INFO
            tell("schedule.skipped", level, schedule=firing.name, in_a_row=skip.count, reason=skip.reason)
        if firing.runs:
            self._wakeups.wake()
        return len(firing.runs)


def _fitting(firings: list[Firing], most_runs: int) -> list[Firing]:
    """Choose firings with about `most_runs` runs, small ones first. A backlog stays due and delays no other."""
    fitting, room = [], most_runs
    for firing in sorted(firings, key=lambda firing: len(firing.runs)):
        if room > 0:
            fitting.append(firing)
            room -= len(firing.runs)
    return fitting
