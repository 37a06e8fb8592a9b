"""Fires schedules that are due. Any number of workers does so at once: whoever writes first has fired.

`plan` is the judge: it says what comes of a schedule that is due, from what was read of it. That is written with a
guard on what was read.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from duly.errors import ConfigError
from duly.model import QUEUED, Catchup, Missed, Overlap
from duly.rules.timing import Mode, Timing, due_between, next_after, occurrences
from duly.store import ops, schedules
from duly.store.schedules import Due, Firing, Run, Skip, Told

if TYPE_CHECKING:
    from duly.worker.worker import Worker

log = logging.getLogger("duly.worker")

POLL_SECONDS = 1.0  # others define schedules too
SOONEST_SECONDS = 0.01
CHUNK = 100
MOST_RUNS = 1000  # of one schedule at a time
MOST_COUNTED = 1_000_000  # where each is looked for; an interval is only divided by
UNREADABLE_SECONDS = 60.0
ENOUGH = 3

MISSED = "missed: nobody fired it in time"
LATE = "late: more than its grace allows"
OVERLAP = "overlap: an earlier run had not ended"
WORTH_TELLING_MS = 60_000


class Fire:
    """Fires schedules beside one worker's turns, and sleeps until the next one is due."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._look_at = -math.inf
        self._beside: dict[str, float] = {}  # what cannot be read here, and until when it is left alone

    async def look(self) -> None:
        """Fire what is due, if it is time to look."""
        if self._worker.clock() < self._look_at:
            return
        next_at, now = await self._worker.driver.arun(schedules.next_fire())
        wait = POLL_SECONDS if next_at is None else (next_at - now) / 1000
        if wait <= 0:  # and again at once, unless all that is due cannot be read here
            wait = SOONEST_SECONDS if await self.all_due() or not self._beside else POLL_SECONDS
        self._look_at = self._worker.clock() + min(max(wait, SOONEST_SECONDS), POLL_SECONDS)

    def pause(self, longest: float) -> float:
        """Say how long to wait before the next look."""
        return max(SOONEST_SECONDS, min(longest, self._look_at - self._worker.clock()))

    async def to_the_end(self) -> None:
        """Fire until nothing is due any more, however much that is."""
        idle = 0
        while idle < ENOUGH:
            next_at, now = await self._worker.driver.arun(schedules.next_fire())
            if next_at is None or next_at > now:
                return
            idle = 0 if await self.all_due() else idle + 1  # what cannot be read here stays due

    async def all_due(self, limit: int = CHUNK * CHUNK, *, most_runs: int = MOST_RUNS) -> int:
        """Fire what is due, at most so many schedules and about so many runs at a time; says how many runs it were."""
        count, left = 0, limit
        while left > 0 and (dues := await self._due(min(CHUNK, left))):
            left -= len(dues)
            count += await self._fire(dues, most_runs)
            if len(dues) < CHUNK:
                break
        return count

    async def _due(self, limit: int) -> list[Due]:
        now = self._worker.clock()
        self._beside = {name: until for name, until in self._beside.items() if until > now}
        return await self._worker.driver.arun(schedules.due(limit=limit, beside=self._beside))

    async def _fire(self, dues: Sequence[Due], most_runs: int = MOST_RUNS) -> int:
        firings, crowded = [], []
        for due in dues:
            firing = self._planned(due, most_runs)
            if firing and firing.runs and due.live and due.overlap is Overlap.CANCEL_RUNNING:
                crowded.append(due.name)
            elif firing:
                firings.append(firing)
            await asyncio.sleep(0)  # to count a year of minutes takes its time
        if crowded:
            firings += await self._make_room(crowded, most_runs)
        firings = _fitting(firings, most_runs)
        if not firings:
            return 0
        written = await self._worker.driver.arun(schedules.fire(firings))
        return sum(self._tell(firing) for firing in firings if firing.name in written)

    async def _make_room(self, crowded: Sequence[str], most_runs: int) -> list[Firing]:
        """Ask the runs that go on to stop, and plan again: that changed what was read."""
        driver = self._worker.driver
        running = await driver.arun(schedules.live_runs(crowded))
        await driver.arun(ops.cancel(running, by="duly", why="its schedule is due again"))
        found = [due for name in crowded for due in await driver.arun(schedules.one(name))]
        still_due = (due for due in found if due.next_at is not None and due.next_at <= due.now and not due.paused)
        planned = (self._planned(due, most_runs) for due in still_due if not due.live)
        return [firing for firing in planned if firing]

    def _planned(self, due: Due, most_runs: int) -> Firing | None:
        app = self._worker.app
        try:
            return plan(due, new_id=app._new_id, chance=self._worker.chance, most_runs=most_runs)
        except ConfigError as error:  # a zone or an extra that is missing here; others may have it
            log.warning("schedule.unreadable", extra={"schedule": due.name, "error": str(error)})
            self._beside[due.name] = self._worker.clock() + UNREADABLE_SECONDS
            return None

    def _tell(self, firing: Firing) -> int:
        tell = self._worker.app.events.tell
        for run in firing.runs:
            tell("schedule.fired", logging.DEBUG, schedule=firing.name, job_id=run.id, due_at=run.due_at)
        for skip in firing.skips:
            level = logging.DEBUG if skip.reason == OVERLAP else logging.INFO
            tell("schedule.skipped", level, schedule=firing.name, in_a_row=skip.count, reason=skip.reason)
        if firing.runs:
            self._worker.poke()
        return len(firing.runs)


def _fitting(firings: list[Firing], most_runs: int) -> list[Firing]:
    """Take as many as make about so many runs, the small ones first: a backlog holds nobody up, and stays due."""
    fitting, room = [], most_runs
    for firing in sorted(firings, key=lambda firing: len(firing.runs)):
        if room > 0:
            fitting.append(firing)
            room -= len(firing.runs)
    return fitting


class Wanted(NamedTuple):
    """Which due times are to be fired, which were missed, and when the schedule is due next."""

    dues: list[int]
    skips: list[Skip]
    next_at: int | None
    missed: Missed | None = None


def plan(due: Due, *, new_id: Callable[[], str], chance: Callable[[], float], most_runs: int = MOST_RUNS) -> Firing:
    """Say what comes of a schedule that is due."""
    assert due.next_at is not None
    wanted = _each(due, due.next_at, most_runs) if due.catchup is Catchup.ALL else _newest(due, due.next_at)
    fired, behind = _without_overlap(due, [at for at in wanted.dues if at not in due.fired])
    runs = tuple(
        Run(
            id=new_id(),
            due_at=at,
            after_ms=int(due.jitter_ms * chance()),
            envelope=replace(due.envelope, due_at=at, missed=wanted.missed),
            reason=QUEUED if due.overlap is Overlap.QUEUE and (due.live or place) else None,
        )
        for place, at in enumerate(fired)
    )
    missed = [part for skip in (*wanted.skips, *behind) for part in unfired(due, skip)]
    skips, told = _recorded(due, missed, fired)
    return Firing(
        name=due.name,
        revision=due.revision,
        next_at=_next(due, wanted.next_at, runs),
        last_at=fired[-1] if fired else None,
        runs=runs,
        skips=skips,
        told=told,
    )


def _newest(due: Due, first: int) -> Wanted:
    """Take the newest due time only."""
    all_due = due_between(due.timing, first, due.now, limit=most_counted(due.timing))
    if all_due.next_at is not None and all_due.next_at <= due.now:  # more than were counted: the newest comes later
        return Wanted([], [Skip(first, all_due.last, all_due.count, MISSED)], all_due.next_at)
    if due.grace_ms is not None and all_due.last < due.now - due.grace_ms:
        return Wanted([], [Skip(first, all_due.last, all_due.count, LATE)], all_due.next_at)
    if all_due.count == 1:
        return Wanted([first], [], all_due.next_at)
    others = due_between(due.timing, first, all_due.last - 1, limit=all_due.count)
    skips = [Skip(first, others.last, others.count, MISSED)]
    missed = Missed(all_due.count, first, all_due.last) if due.catchup is Catchup.LAST else None
    return Wanted([all_due.last], skips, all_due.next_at, missed)


def most_counted(timing: Timing) -> int:
    """Say how many due times to count at once."""
    return MOST_COUNTED if timing.interval_ms is None else 2**31 - 1


def _each(due: Due, first: int, most_runs: int) -> Wanted:
    """Take each due time, but for those that are too late; so many at once, the rest next time."""
    skips = []
    begin: int | None = first
    if due.grace_ms is not None and first < due.now - due.grace_ms:
        late = due_between(due.timing, first, due.now - due.grace_ms - 1, limit=most_counted(due.timing))
        skips = [Skip(first, late.last, late.count, LATE)]
        begin = late.next_at
    if begin is None or begin > due.now:
        return Wanted([], skips, begin)
    if due.timing.mode is Mode.DELAY:  # what follows is counted from the end of this one
        return Wanted([begin], skips, None)
    following = takewhile(lambda at: at <= due.now, occurrences(due.timing, begin))
    dues = [begin, *islice(following, most_runs - 1)]
    return Wanted(dues, skips, next_after(due.timing, dues[-1]))


def unfired(due: Due, skip: Skip) -> Iterator[Skip]:
    """Cut a run of misses where a person has fired one of them."""
    if not any(skip.due_at <= at <= skip.until_at for at in due.fired):
        yield skip
        return
    count, first, last = 0, 0, 0
    for at in chain([skip.due_at], occurrences(due.timing, skip.due_at)):
        if count and (at in due.fired or at > skip.until_at):
            yield Skip(first, last, count, skip.reason)
            count = 0
        if at > skip.until_at:
            return
        if at not in due.fired:
            count, first, last = count + 1, first if count else at, at
    if count:
        yield Skip(first, last, count, skip.reason)


def _without_overlap(due: Due, dues: Sequence[int]) -> tuple[Sequence[int], list[Skip]]:
    """Leave out what would run beside an earlier run, where that is not wanted."""
    match due.overlap:
        case Overlap.SKIP:
            kept = 0 if due.live else 1
            return dues[:kept], _skipped(dues[kept:])
        case Overlap.CANCEL_RUNNING:
            return dues[-1:], _skipped(dues[:-1])
    return dues, []


def _skipped(dues: Sequence[int]) -> list[Skip]:
    return [Skip(dues[0], dues[-1], len(dues), OVERLAP)] if dues else []


def _recorded(due: Due, skips: Sequence[Skip], fired: Sequence[int]) -> tuple[tuple[Skip, ...], tuple[Told, ...]]:
    """Say what is recorded of misses: joined to the run before if nothing is fired in between, else told of too."""
    if skips and not any(at < skips[0].due_at for at in fired):
        recorded = joined(due.skipped, skips)
        if recorded[0] != skips[0]:
            return recorded, ()
    told = [skip for skip in skips if skip.reason != OVERLAP and skip.due_at <= due.now - WORTH_TELLING_MS]
    return tuple(skips), tuple(Told("schedule.missed", why=skip.reason, data=_data(skip)) for skip in told)


def joined(before: Skip | None, skips: Sequence[Skip]) -> tuple[Skip, ...]:
    """Add the first to the run of misses that the record ends in, if it goes on with it."""
    if before is None or not skips or before.reason != skips[0].reason:
        return tuple(skips)
    first = Skip(before.due_at, skips[0].until_at, before.count + skips[0].count, before.reason)
    return (first, *skips[1:])


def _data(skip: Skip) -> str:
    return f'{{"count": {skip.count}, "since": {skip.due_at}, "until": {skip.until_at}}}'


def _next(due: Due, next_at: int | None, runs: Sequence[Run]) -> int | None:
    if due.timing.mode is not Mode.DELAY:
        return next_at
    if runs or due.live:
        return None  # the end of the run says
    return next_after(due.timing, due.now)
