"""One bounded pass over the queue, for hosts where something else keeps the time: cron, a timer, a heartbeat.

A tick is a worker that takes at most so many jobs, begins none after so many seconds, and does the upkeep of the queue
once around it: promote, rescue, fire, run, prune. Any number of ticks may overlap, with each other and with workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from duly.app.lease import Lease
from duly.errors import ConfigError
from duly.model import State
from duly.rules import codec, keys
from duly.rules.durations import Duration
from duly.store import ops
from duly.worker.deadlines import Overtime
from duly.worker.worker import Ended, Worker

if TYPE_CHECKING:
    from duly.app.app import App

KNOWN_MS = 600_000  # for which what a tick knows is counted as known to a living worker
# How attempts end, as events name it.
ENDS = ("succeeded", "failed", "crashed", "dead", "cancelled", "partial", "snoozed", "waiting")


class Ticked(Struct, frozen=True):
    """What a tick came to. `more`: it stopped at a bound. `late`: ended leases it had no time to make sure of."""

    fired: int = 0
    promoted: int = 0
    rescued: int = 0
    ran: int = 0
    succeeded: int = 0
    failed: int = 0
    dead: int = 0
    pruned: int = 0
    more: bool = False
    late: int = 0
    late_s: float = 0.0
    seconds: float = 0.0


class Ticker(Worker):
    """A worker for one tick."""

    overlaps = False  # each claim is counted before the next

    def __init__(
        self,
        app: App,
        *,
        limit: int = 100,
        max_seconds: float = 50.0,
        queues: Iterable[str] | Mapping[str, int | None] | None = None,
        concurrency: int = 10,
        grace: Duration | None = None,
        signals: bool = True,
    ) -> None:
        if limit < 1:
            raise ConfigError(f"limit is {limit}: a tick runs at least one job")
        if max_seconds <= 0:
            raise ConfigError(f"max_seconds is {max_seconds:g}: a tick takes some time")
        super().__init__(app, queues=queues, concurrency=concurrency, grace=grace, drain=True, signals=signals)
        self._limit = limit
        self._max_seconds = max_seconds
        self._left = limit
        self._fired = self._promoted = self._pruned = self._late = 0
        self._late_s = 0.0
        self._began = self._ends_at = self.clock()

    async def tick(self) -> Ticked:
        """Do the pass, and say what it came to."""
        self._began = self.clock()
        self._ends_at = self._began + self._max_seconds
        before = self.app.events.counts.copy()
        timer = asyncio.get_running_loop().call_later(self._max_seconds, self.stop)
        try:
            await self.run()
        finally:
            timer.cancel()
        said = self.app.events.counts
        counts = {name: said[f"job.{name}"] - before[f"job.{name}"] for name in ("rescued", *ENDS)}
        ran = sum(counts[name] for name in ENDS)
        return Ticked(
            fired=self._fired,
            promoted=self._promoted,
            ran=ran,
            rescued=counts["rescued"],
            succeeded=counts["succeeded"],
            failed=counts["failed"] + counts["crashed"],
            dead=counts["dead"],
            pruned=self._pruned,
            more=self._left <= 0 or self.clock() >= self._ends_at,
            late=self._late,
            late_s=self._late_s,
            seconds=round(self.clock() - self._began, 3),
        )

    def _beside(self) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        yield "overtime", Overtime(self).run()
        yield "suspects", self._suspects.run()

    async def _reconcile(self) -> None:
        """Be known between two ticks too, so that nobody parks the jobs of our tasks or pauses our schedules."""
        known = keys.fingerprint(
            codec.encode([self._host, sorted(self.queues), sorted(self.app.tasks), self.app.schedules.in_code])
        )
        op = ops.register(
            f"tick-{known[:12]}",
            host=self._host,
            pid=self._pid,
            queues=self.queues,
            tasks=self.app.tasks,
            schedules=self.app.schedules.in_code,
            beat_ms=KNOWN_MS // 3,
            slots=0,
        )
        await self.driver.arun(op)
        await super()._reconcile()

    async def _look_first(self) -> None:
        for queue in self.queues:
            retries = self.shaping.promotes_retries(queue)
            self._promoted += await self.driver.arun(ops.promote(queue, self._limit, retries=retries))
        await self.upkeep.rescue.look()
        self._fired += await self.upkeep.fire.all_due(self._limit, most_runs=self._limit)

    async def _turns(self) -> None:
        await super()._turns()
        while not self.stopping and self._left > 0 and await self._rescued_more():
            await super()._turns()
        if not self.stopping:
            await self._prune()

    async def _rescued_more(self) -> bool:
        """Take jobs from workers that have gone, once it is sure that they have. False: there are none, or no time."""
        rescue = self.upkeep.rescue
        self._late, self._late_s = rescue.waiting()
        if not self._late or self.clock() + self._late_s >= self._ends_at:
            return False
        self._wake.clear()
        await self._sleep(self._late_s)
        await rescue.look()
        return True

    async def _prune(self) -> None:
        for what in ops.PRUNABLE:
            keep_ms = self.app.settings.keep_ms
            self._pruned += await self.driver.arun(ops.prune(what, self._limit, keep_ms=keep_ms))
        await self.upkeep.mend_schedules()

    async def claim(self, queue: str, limit: int, tasks: Iterable[str], **options: bool) -> list[Lease]:
        """Take jobs on lease, as many as the tick may still run."""
        limit = min(limit, self._left)
        if limit <= 0:
            return []
        leases = await super().claim(queue, limit, tasks, **options)
        self._left -= len(leases)
        return leases

    async def record(self, ended: Sequence[Ended], *, patient: bool = True) -> None:
        """Write how attempts ended; what is given back was not run, and may be."""
        await super().record(ended, patient=patient)
        self._left += sum(change.state is State.READY and change.give_back_attempt for _, change in ended)
