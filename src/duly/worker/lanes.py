"""How a worker claims from lanes: in turns, so that no lane waits for the million jobs of another.

For each task with lanes the worker remembers the lane it served last and begins behind it. A claim reads a few lanes
only. If they have no room it reads more, until it has read all of them or very many. It skips lanes from which another
worker claims at this moment, and waits for them only if there is nothing else. Tasks take turns, and so do jobs with
and without a lane. Jobs with a rate are claimed only for free slots: if they waited here, they would begin later than
their permit allows.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from duly.model import Claimed, TaskLimits
from duly.rules import keys
from duly.store import lanes
from duly.store.lanes import Walk
from duly.store.op import Op
from duly.worker.held import Held
from duly.worker.shared import Shared

FEWEST = 20  # lanes that a claim reads at first
FURTHER = 4  # times as many, if those had no room
MOST = 10_000
JOBS_A_LANE = 4  # that a claim of many jobs takes of each
SHARE = 10  # after a long way for nothing: no other for so many times its duration

Way: TypeAlias = Callable[[str, int, Collection[str], str, bool], Awaitable[list[Claimed]]]


@dataclass(slots=True)
class _Trip:
    """One claim from the lanes of a queue: the tasks left to read, and how many lanes of each to read next."""

    queue: str
    tasks: Collection[str]
    limit: int
    holder: str
    alone: bool
    lanes: int


class Lanes:
    """The lanes of the tasks of one worker, and which of them it served last."""

    def __init__(self, shared: Shared, held: Held) -> None:
        self._shared = shared
        self._held = held
        definitions = {name: task.definition for name, task in shared.app.tasks.items()}
        self._ordered = frozenset(name for name, one in definitions.items() if one.ordering_key is not None)
        self._in_code = frozenset(name for name, one in definitions.items() if one.is_laned)
        self._found: dict[
            str, frozenset[str]
        ] = {}  # also, by their jobs in the queues: defined by older code, for example
        self._declared = {
            name: TaskLimits(name, one.cap, *((one.rate.count, one.rate.per_ms) if one.rate else ()))
            for name, one in definitions.items()
        }
        self._rated = frozenset(name for name, one in definitions.items() if one.rate is not None)
        self._after: dict[tuple[str, str], str] = {}
        self._turn: dict[str, str] = {}  # the task that was served last, by queue
        self._first: dict[object, bool] = {}
        self._far_at: dict[tuple[str, bool], float] = {}
        self.unseen = False  # whether a claim left lanes unread

    async def declare(self) -> None:
        """Write the limits that are set in code, unless they are written already."""
        driver = self._shared.driver
        written = {limit.task: limit for limit in await driver.arun(lanes.limits())}
        if any(_terms(written.get(name, TaskLimits(name))) != _terms(one) for name, one in self._declared.items()):
            await driver.arun(lanes.declare(self._declared))
        await self.look()

    async def look(self) -> None:
        """Read which tasks have jobs in lanes that the code does not define, and which limits were set."""
        driver, tasks = self._shared.driver, self._shared.app.tasks
        for queue in self._shared.queues:
            found = await driver.arun(lanes.tasks(queue))
            self._found[queue] = frozenset(found).intersection(tasks)
        limits = await driver.arun(lanes.limits())
        self._rated = frozenset(limit.task for limit in limits if limit.is_rated).intersection(tasks)

    def is_rated(self, task: str) -> bool:
        """Whether a task has a rate, so that claiming one of its jobs takes a permit."""
        return task in self._rated

    def has(self, queue: str) -> bool:
        """Whether jobs of a queue may be in lanes."""
        return bool(self._of(queue))

    async def next_permit(self, queue: str) -> int | None:
        """Read in how many milliseconds a job may begin that waits only for a permit."""
        if not self._rated.intersection(self._of(queue)):
            return None
        return await self._shared.surely(lanes.next_permit(queue, self._rated))

    def ways(self, queue: str, plain: Way, kind: tuple[bool, bool]) -> Iterator[Way]:
        """Return the ways to claim from a queue; they take turns in coming first, for each kind of claim apart."""
        if not self.has(queue):
            return iter((plain,))
        return iter((self._claim, plain) if self._is_first(queue, kind) else (plain, self._claim))

    def _is_first(self, *kind: object) -> bool:
        """Return True every other time, for each combination of arguments."""
        self._first[kind] = not self._first.get(kind, False)
        return self._first[kind]

    def _of(self, queue: str) -> frozenset[str]:
        return self._in_code | self._found.get(queue, frozenset())

    async def _claim(self, queue: str, limit: int, tasks: Collection[str], holder: str, alone: bool) -> list[Claimed]:
        """Claim from lanes; jobs with a rate only for free slots."""
        laned = self._of(queue).intersection(tasks)
        free = limit if alone else min(limit, self._held.idle_slots)
        groups = [(laned - self._rated, limit), (laned & self._rated, free)]
        if self._is_first(queue, alone, "rated"):
            groups.reverse()
        jobs: list[Claimed] = []
        for those, most in groups:
            left = most - len(jobs)
            jobs += await self._go_round(_Trip(queue, those, left, holder, alone, max(FEWEST, left // JOBS_A_LANE)))
        return jobs

    async def _go_round(self, trip: _Trip) -> list[Claimed]:
        """Claim from lane after lane until there are enough jobs, all lanes were read, or the way is too long."""
        if not trip.tasks or trip.limit <= 0:
            return []
        jobs: list[Claimed] = []
        fewest = trip.lanes
        most, began, wait, unseen = self._furthest(trip), self._shared.clock(), False, False
        while True:
            taken = await self._shared.surely(self._op(trip, trip.limit - len(jobs), wait=wait))
            self._served(trip.queue, taken.jobs)
            jobs += taken.jobs
            if taken.passed_by and not jobs and not wait:
                wait = True
                continue
            unseen = unseen or taken.passed_by or not taken.known
            trip.tasks, wait = taken.cut, False
            if not trip.tasks or len(jobs) >= trip.limit:
                break
            if not taken.jobs:
                if trip.lanes >= most:  # the next claim begins behind these lanes
                    self._after |= {(trip.queue, task): lane for task, lane in taken.cut.items()}
                    trip.tasks = {}
                    break
                trip.lanes = int(min(trip.lanes * FURTHER, most))
        if not jobs and trip.lanes > fewest:  # a long way, and nothing found
            now = self._shared.clock()
            self._far_at[trip.queue, trip.alone] = now + SHARE * (now - began)
        self.unseen = self.unseen or ((unseen or bool(trip.tasks)) and not trip.alone)
        return jobs

    def _op(self, trip: _Trip, limit: int, *, wait: bool) -> Op[lanes.Taken]:
        after, queue = self._after, trip.queue
        return lanes.claim(
            queue,
            [Walk(task, after.get((queue, task), ""), task in self._ordered) for task in sorted(trip.tasks)],
            turn=self._turn.get(queue, ""),
            limit=limit,
            lanes=trip.lanes,
            token=keys.new_token(),
            worker=trip.holder,
            alone=trip.alone,
            wait=wait,
        )

    def _furthest(self, trip: _Trip) -> float:
        """Return how many lanes to read at most: few for a while after a long way for nothing."""
        if self._shared.draining:  # it must not stop before it has read all lanes
            return math.inf
        return MOST if self._shared.clock() >= self._far_at.get((trip.queue, trip.alone), 0.0) else 0

    def _served(self, queue: str, jobs: Sequence[Claimed]) -> None:
        """Note which task, and which lane of each task, was served last."""
        tasks = {job.task for job in jobs}
        for task in tasks:
            lanes = [job.lane or "" for job in jobs if job.task == task]
            self._after[queue, task] = _last(lanes, self._after.get((queue, task), ""))
        if tasks:
            self._turn[queue] = _last(tasks, self._turn.get(queue, ""))


def _terms(limits: TaskLimits) -> tuple[int | None, int | None, int | None]:
    return limits.cap, limits.rate_count, limits.rate_ms


def _last(names: Iterable[str], after: str) -> str:
    """Return the last of the names in an order that begins behind `after`."""
    return max(names, key=lambda name: (name <= after, name))
