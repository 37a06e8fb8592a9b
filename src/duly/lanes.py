"""How a worker claims from lanes: it goes round them, so that nobody waits for the million jobs of another.

Of each task that has lanes the worker remembers which one it served last and begins behind it. A claim looks at a few
lanes only; where they have no room it looks at more, until it has gone all the way round. Jobs with and without a lane
take turns in coming first. What is limited by a rate is claimed only for slots that are free: what waited here would
begin later than its permit says.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, TypeAlias

from duly import keys
from duly.model import Claimed, TaskLimits
from duly.store import lanes as store
from duly.store.lanes import Walk

if TYPE_CHECKING:
    from duly.worker import Worker

FEWEST = 20  # lanes that a claim looks at
FURTHER = 4  # times as many, where those had no room
MOST = 10_000
JOBS_A_LANE = 4  # which a claim of many jobs may take of each

Way: TypeAlias = Callable[[str, int, Collection[str], str, bool], Awaitable[list[Claimed]]]


class Lanes:
    """Knows which tasks of a worker have lanes, and where it is on its way round."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        definitions = {name: task.definition for name, task in worker.app.tasks.items()}
        self._ordered = frozenset(name for name, one in definitions.items() if one.ordering_key is not None)
        self._in_code = frozenset(name for name, one in definitions.items() if one.is_laned)
        self._found: dict[str, frozenset[str]] = {}  # beside those, in the queues: of older code, say
        self._declared = {
            name: TaskLimits(name, one.cap, *((one.rate.count, one.rate.per_ms) if one.rate else ()))
            for name, one in definitions.items()
        }
        self._rated = frozenset(name for name, one in definitions.items() if one.rate is not None)
        self._after: dict[tuple[str, str], str] = {}
        self._lanes_first: set[str] = set()
        self.unseen = False  # whether the last claim left lanes that it has not looked at

    async def declare(self) -> None:
        """Write down what the code says of its tasks."""
        await self._worker.driver.arun(store.declare(self._declared))
        await self.look()

    async def look(self) -> None:
        """See which tasks have jobs in lanes that our code does not speak of, and which limits were set."""
        for queue in self._worker.queues:
            found = await self._worker.driver.arun(store.tasks(queue))
            self._found[queue] = frozenset(found).intersection(self._worker.app.tasks)
        limits = await self._worker.driver.arun(store.limits())
        self._rated = frozenset(limit.task for limit in limits if limit.is_rated).intersection(self._worker.app.tasks)

    async def next_permit(self, queue: str) -> int | None:
        """Read in how many milliseconds something may begin that only a rate holds up."""
        if not self._rated.intersection(self._of(queue)):
            return None
        return await self._worker.surely(store.next_permit(queue, self._rated))

    def ways(self, queue: str, plain: Way, *, alone: bool) -> tuple[Way, ...]:
        """Give the ways to claim from a queue, each first in its turn."""
        self.unseen = False
        if not self._of(queue):
            return (plain,)
        if not alone:
            self._lanes_first ^= {queue}
        return (self._claim, plain) if queue in self._lanes_first else (plain, self._claim)

    def _of(self, queue: str) -> frozenset[str]:
        return self._in_code | self._found.get(queue, frozenset())

    async def _claim(self, queue: str, limit: int, tasks: Collection[str], holder: str, alone: bool) -> list[Claimed]:
        """Take jobs on lease from lanes, those with a rate only for slots that are free."""
        laned = self._of(queue).intersection(tasks)
        jobs = await self._go_round(queue, laned - self._rated, limit, holder, alone)
        free = limit if alone else min(limit, self._worker.idle_slots)
        return jobs + await self._go_round(queue, laned & self._rated, free - len(jobs), holder, alone)

    async def _go_round(
        self, queue: str, tasks: Collection[str], limit: int, holder: str, alone: bool
    ) -> list[Claimed]:
        if not tasks or limit <= 0:
            return []
        jobs: list[Claimed] = []
        count = max(FEWEST, limit // JOBS_A_LANE)
        while True:
            walks = [Walk(task, self._after.get((queue, task), ""), task in self._ordered) for task in sorted(tasks)]
            op = store.claim(
                queue, walks, limit=limit - len(jobs), lanes=count, token=keys.new_token(), worker=holder, alone=alone
            )
            taken = await self._worker.surely(op)
            self._served(queue, taken.jobs)
            jobs += taken.jobs
            tasks = taken.cut
            if not tasks or len(jobs) >= limit:
                break
            if not taken.jobs:
                if count >= MOST:
                    self._after |= {(queue, task): lane for task, lane in taken.cut.items()}
                    break
                count = min(count * FURTHER, MOST)
        self.unseen = self.unseen or bool(tasks)
        return jobs

    def _served(self, queue: str, jobs: Sequence[Claimed]) -> None:
        """Note which lane of each task comes last on the way round, of those that were served."""
        for task in {job.task for job in jobs}:
            after = self._after.get((queue, task), "")
            lanes = [job.lane or "" for job in jobs if job.task == task]
            self._after[queue, task] = max(lanes, key=lambda lane: (lane <= after, lane))
