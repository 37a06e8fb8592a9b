"""How a worker claims from lanes: it goes round them, so that nobody waits for the million jobs of another.

Of each task that has lanes the worker remembers which one it served last and begins behind it. A claim looks at a few
lanes only; where they have no room it looks at more, until it has gone all the way round or very far. Lanes that
another worker claims from just now are passed by, and waited for only where there is nothing else. Tasks take turns in
coming first, and so do jobs with and without a lane. What is limited by a rate is claimed only for slots that are free:
what waited here would begin later than its permit says.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from duly.model import Claimed, TaskLimits
from duly.rules import keys
from duly.store import lanes as store
from duly.store.lanes import Walk

if TYPE_CHECKING:
    from duly.worker.worker import Worker

FEWEST = 20  # lanes that a claim looks at
FURTHER = 4  # times as many, where those had no room
MOST = 10_000
JOBS_A_LANE = 4  # which a claim of many jobs may take of each
SHARE = 10  # times as long as a long way took that was for nothing, there is none

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
        self._turn: dict[str, str] = {}  # the task of each queue that was served last
        self._first: dict[object, bool] = {}
        self._far_at: dict[tuple[str, bool], float] = {}
        self.unseen = False  # whether a claim left lanes that it has not looked at

    async def declare(self) -> None:
        """Write down what the code says of its tasks, unless it stands there."""
        said = {limit.task: limit for limit in await self._worker.driver.arun(store.limits())}
        if any(_terms(said.get(name, TaskLimits(name))) != _terms(one) for name, one in self._declared.items()):
            await self._worker.driver.arun(store.declare(self._declared))
        await self.look()

    async def look(self) -> None:
        """See which tasks have jobs in lanes that our code does not speak of, and which limits were set."""
        for queue in self._worker.queues:
            found = await self._worker.driver.arun(store.tasks(queue))
            self._found[queue] = frozenset(found).intersection(self._worker.app.tasks)
        limits = await self._worker.driver.arun(store.limits())
        self._rated = frozenset(limit.task for limit in limits if limit.is_rated).intersection(self._worker.app.tasks)

    def is_rated(self, task: str) -> bool:
        """Whether a rate holds for a task, so that to claim one of its jobs costs a permit."""
        return task in self._rated

    def has(self, queue: str) -> bool:
        """Whether jobs of a queue may be in lanes."""
        return bool(self._of(queue))

    async def next_permit(self, queue: str) -> int | None:
        """Read in how many milliseconds something may begin that only a rate holds up."""
        if not self._rated.intersection(self._of(queue)):
            return None
        return await self._worker.surely(store.next_permit(queue, self._rated))

    def ways(self, queue: str, plain: Way, kind: tuple[bool, bool]) -> Iterator[Way]:
        """Give the ways to claim from a queue, each first in its turn. Each kind of claim has turns of its own."""
        if not self.has(queue):
            return iter((plain,))
        return iter((self._claim, plain) if self._is_first(queue, kind) else (plain, self._claim))

    def _is_first(self, *who: object) -> bool:
        """Say every other time it is asked that it is their turn."""
        self._first[who] = not self._first.get(who, False)
        return self._first[who]

    def _of(self, queue: str) -> frozenset[str]:
        return self._in_code | self._found.get(queue, frozenset())

    async def _claim(self, queue: str, limit: int, tasks: Collection[str], holder: str, alone: bool) -> list[Claimed]:
        """Take jobs on lease from lanes, those with a rate only for slots that are free."""
        laned = self._of(queue).intersection(tasks)
        free = limit if alone else min(limit, self._worker.idle_slots)
        groups = [(laned - self._rated, limit), (laned & self._rated, free)]
        if self._is_first(queue, alone, "rated"):
            groups.reverse()
        jobs: list[Claimed] = []
        for those, most in groups:
            jobs += await self._go_round(queue, those, most - len(jobs), holder, alone)
        return jobs

    async def _go_round(
        self, queue: str, tasks: Collection[str], limit: int, holder: str, alone: bool
    ) -> list[Claimed]:
        if not tasks or limit <= 0:
            return []
        jobs: list[Claimed] = []
        count = fewest = max(FEWEST, limit // JOBS_A_LANE)
        most, began, wait, unseen = self._furthest(queue, alone), self._worker.clock(), False, False
        while True:
            walks = [Walk(task, self._after.get((queue, task), ""), task in self._ordered) for task in sorted(tasks)]
            op = store.claim(
                queue,
                walks,
                turn=self._turn.get(queue, ""),
                limit=limit - len(jobs),
                lanes=count,
                token=keys.new_token(),
                worker=holder,
                alone=alone,
                wait=wait,
            )
            taken = await self._worker.surely(op)
            self._served(queue, taken.jobs)
            jobs += taken.jobs
            if taken.passed_by and not jobs and not wait:
                wait = True
                continue
            unseen = unseen or taken.passed_by or not taken.known
            tasks, wait = taken.cut, False
            if not tasks or len(jobs) >= limit:
                break
            if not taken.jobs:
                if count >= most:  # the next look begins behind them
                    self._after |= {(queue, task): lane for task, lane in taken.cut.items()}
                    tasks = {}
                    break
                count = int(min(count * FURTHER, most))
        if not jobs and count > fewest:  # a long way, for nothing
            now = self._worker.clock()
            self._far_at[queue, alone] = now + SHARE * (now - began)
        self.unseen = self.unseen or ((unseen or bool(tasks)) and not alone)
        return jobs

    def _furthest(self, queue: str, alone: bool) -> float:
        """Say how many lanes to look at: few for a while where a long way was for nothing, which others wait for."""
        if self._worker.draining:  # and goes when there is nothing more
            return math.inf
        return MOST if self._worker.clock() >= self._far_at.get((queue, alone), 0.0) else 0

    def _served(self, queue: str, jobs: Sequence[Claimed]) -> None:
        """Note which task, and which lane of each, comes last on the way round, of those that were served."""
        tasks = {job.task for job in jobs}
        for task in tasks:
            lanes = [job.lane or "" for job in jobs if job.task == task]
            self._after[queue, task] = _last(lanes, self._after.get((queue, task), ""))
        if tasks:
            self._turn[queue] = _last(tasks, self._turn.get(queue, ""))


def _terms(limits: TaskLimits) -> tuple[int | None, int | None, int | None]:
    return limits.cap, limits.rate_count, limits.rate_ms


def _last(names: Iterable[str], after: str) -> str:
    """Give the name that comes last on a way round that begins behind `after`."""
    return max(names, key=lambda name: (name <= after, name))
