"""One bounded pass over the queue, for hosts where something else keeps the time: cron, a timer, a heartbeat.

A tick is a worker that runs at most so many jobs and begins none after so many seconds. It does the upkeep of the queue
once: promote, rescue, fire, run, prune. Any number of ticks may overlap, with each other and with workers.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

from duly.app.define import span
from duly.app.events import Events
from duly.app.lease import Lease
from duly.errors import StoreUnavailable
from duly.model import State
from duly.rules import codec, keys
from duly.rules.checks import count
from duly.rules.durations import Duration
from duly.store import ops
from duly.worker.claiming import Claiming
from duly.worker.finishing import Ended, Finishing
from duly.worker.queue_limits import QueueLimits
from duly.worker.turns import Turns
from duly.worker.worker import Worker

if TYPE_CHECKING:
    from duly.app.app import App

KNOWN_MS = 600_000  # for so long the tasks and schedules of a tick count as those of a living worker
# How attempts end, as events name it.
ENDS = ("succeeded", "failed", "crashed", "dead", "cancelled", "partial", "snoozed", "waiting")


class Ticked(Struct, frozen=True):
    """The result of a tick. `more`: it stopped at a bound. `late`: expired leases it had no time to check twice."""

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


class _Bounds:
    """The bounds of a tick, and the counts of its upkeep."""

    def __init__(self, limit: int, max_seconds: float) -> None:
        self.limit = limit
        self.left = limit  # jobs that may still be claimed
        self.max_seconds = max_seconds
        self.ends_at = 0.0
        self.fired = self.promoted = self.pruned = self.late = 0
        self.late_s = 0.0


class Ticker(Worker):
    """A worker for one tick."""

    upkeep_beside = False

    def __init__(
        self,
        app: App,
        *,
        limit: int = 100,
        max_seconds: Duration = 50,
        queues: Iterable[str] | Mapping[str, int | None] | None = None,
        concurrency: int = 10,
        grace: Duration | None = None,
        signals: bool = True,
    ) -> None:
        self._bounds = _Bounds(count(limit, "limit="), span(max_seconds, "max_seconds=") / 1000)
        spec, app = app.spec, copy.copy(app)
        app.events, app._spec = Events(app.events._listeners), spec  # other workers of this process count apart
        super().__init__(app, queues=queues, concurrency=concurrency, grace=grace, drain=True, signals=signals)

    async def tick(self) -> Ticked:
        """Do the pass. Raises if the database is not there, or does not answer within the bounds."""
        clock, bounds = self.shared.clock, self._bounds
        began = clock()
        bounds.ends_at = began + bounds.max_seconds
        timer = asyncio.get_running_loop().call_later(bounds.max_seconds, self.stop)
        try:
            await self.run()
        finally:
            timer.cancel()
        if self.cut_off:
            raise StoreUnavailable(
                "the database did not answer the tick in time: jobs in flight stay running until their leases end; "
                "see duly doctor"
            )
        counts = {name: self.app.events.counts[f"job.{name}"] for name in ("rescued", *ENDS)}
        return Ticked(
            fired=bounds.fired,
            promoted=bounds.promoted,
            ran=sum(counts[name] for name in ENDS),
            rescued=counts["rescued"],
            succeeded=counts["succeeded"],
            failed=counts["failed"] + counts["crashed"],
            dead=counts["dead"],
            pruned=bounds.pruned,
            more=bounds.left <= 0 or clock() >= bounds.ends_at,
            late=bounds.late,
            late_s=bounds.late_s,
            seconds=round(clock() - began, 3),
        )

    async def _begin(self) -> None:
        """Raise at once if the database is not there: the next tick comes soon."""
        await self.shared.driver.arun(ops.clock())
        await super()._begin()

    def _make_finishing(self) -> Finishing:
        return _Finishing(self.shared, self.held, self.wakeups, self.prefetch, self._bounds)

    def _make_claiming(self) -> Claiming:
        return self._claiming_of(_Claiming, self._bounds)

    def _make_turns(self) -> Turns:
        return self._turns_of(_Turns, self.limits, self._bounds)


@dataclass(eq=False, repr=False)
class _Claiming(Claiming):
    """Claims no more jobs than the tick may run."""

    _bounds: _Bounds

    async def claim(self, queue: str, limit: int, tasks: Iterable[str], **options: bool) -> list[Lease]:
        limit = min(limit, self._bounds.left)
        if limit <= 0:
            return []
        leases = await super().claim(queue, limit, tasks, **options)
        self._bounds.left -= len(leases)
        return leases


@dataclass(eq=False, repr=False)
class _Finishing(Finishing):
    """Counts jobs that were released: they did not run, and may be claimed again."""

    _bounds: _Bounds

    async def record(self, ended: Sequence[Ended], *, patient: bool = True) -> None:
        await super().record(ended, patient=patient)
        self._bounds.left += sum(change.state is State.READY and change.give_back_attempt for _, change in ended)


@dataclass(eq=False, repr=False)
class _Turns(Turns):
    """Does the upkeep around the turns, within the bounds."""

    _limits: QueueLimits
    _bounds: _Bounds

    async def begin(self) -> None:
        """Register this tick as a living worker until long after it, so that no other worker parks its jobs."""
        shared, app = self._shared, self._shared.app
        known = keys.fingerprint(
            codec.encode([shared.host, sorted(shared.queues), sorted(app.tasks), app.schedules.in_code])
        )
        op = ops.register(
            f"tick-{known[:12]}",
            host=shared.host,
            pid=shared.pid,
            queues=shared.queues,
            tasks=app.tasks,
            schedules=app.schedules.in_code,
            beat_ms=KNOWN_MS // 3,
            slots=0,
        )
        await shared.driver.arun(op)
        await super().begin()

    async def _look_first(self) -> None:
        bounds = self._bounds
        for queue in self._shared.queues:
            retries = self._limits.promotes_retries(queue)
            bounds.promoted += await self._shared.driver.arun(ops.promote(queue, bounds.limit, retries=retries))
        await self._upkeep.rescue.look()
        bounds.fired += await self._upkeep.fire.all_due(bounds.limit, most_runs=bounds.limit)

    async def run(self) -> None:
        await super().run()
        while not self._shared.stopping and self._bounds.left > 0 and await self._rescued_more():
            await super().run()
        if not self._shared.stopping:
            await self._prune()

    async def _rescued_more(self) -> bool:
        """Wait until expired leases may be taken, and take their jobs. Returns False if none is left, or no time."""
        bounds, rescue = self._bounds, self._upkeep.rescue
        bounds.late, bounds.late_s = rescue.waiting()
        if not bounds.late or self._shared.clock() + bounds.late_s >= bounds.ends_at:
            return False
        self._wakeups.begin_turn()
        await self._wakeups.sleep(bounds.late_s)
        await rescue.look()
        return True

    async def _prune(self) -> None:
        keep_ms = self._shared.app.settings.keep_ms
        for what in ops.PRUNABLE:
            op = ops.prune(what, self._bounds.limit, keep_ms=keep_ms)
            self._bounds.pruned += await self._shared.driver.arun(op)
        await self._upkeep.mend_schedules()
