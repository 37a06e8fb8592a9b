"""Decides what a due schedule fires: a pure function of the state that was read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from duly.model import QUEUED, Catchup, Envelope, Missed, Overlap
from duly.rules.timing import Mode, Timing, due_between, next_after, occurrences


class Skip(Struct, frozen=True):
    """Due times in a row that were not fired: how many, the first, the last, and why."""

    due_at: int
    until_at: int
    count: int
    reason: str


class Due(Struct, frozen=True):
    """The state of a schedule from which its firing is decided."""

    name: str
    timing: Timing
    catchup: Catchup
    grace_ms: int | None
    overlap: Overlap
    jitter_ms: int
    envelope: Envelope
    revision: int
    next_at: int | None
    live: bool  # a run has not ended; only read if overlap matters
    skipped: Skip | None  # the last entry of its record, if that is a run of misses
    fired: frozenset[int]  # due times that a person has fired
    paused: bool
    created_at: int
    now: int


class Run(Struct, frozen=True):
    """One job to be fired, due at `due_at` by the rule and ready `after_ms` later; with a reason it waits."""

    id: str
    due_at: int
    after_ms: int
    envelope: Envelope
    reason: str | None = None
    because: str | None = None  # who fired it, if it was not the clock


class Told(Struct, frozen=True):
    """An event to be recorded with a firing."""

    event: str
    by: str | None = None
    why: str | None = None
    data: str | None = None


class Firing(Struct, frozen=True):
    """The changes of one schedule, relative to the state that was read."""

    name: str
    revision: int
    next_at: int | None
    last_at: int | None = None
    runs: tuple[Run, ...] = ()
    skips: tuple[Skip, ...] = ()
    forget: tuple[int, ...] = ()  # runs of misses that are rewritten, by their first due time
    told: tuple[Told, ...] = ()
    resume: bool = False


MOST_RUNS = 1000  # of one schedule at a time
MOST_COUNTED = 1_000_000  # if each one is computed; intervals need one division

MISSED = "missed: no worker fired it in time"
LATE = "late: more than its grace allows"
OVERLAP = "overlap: an earlier run had not ended"
WORTH_TELLING_MS = 60_000


class Wanted(NamedTuple):
    """Due times to fire, missed ones, and when the schedule is due next."""

    dues: list[int]
    skips: list[Skip]
    next_at: int | None
    missed: Missed | None = None


def plan(due: Due, *, new_id: Callable[[], str], chance: Callable[[], float], most_runs: int = MOST_RUNS) -> Firing:
    """Return what a due schedule fires."""
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
    if all_due.next_at is not None and all_due.next_at <= due.now:  # more than were counted: the newest is later
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
    """Return how many due times to count at once."""
    return MOST_COUNTED if timing.interval_ms is None else 2**31 - 1


def _each(due: Due, first: int, most_runs: int) -> Wanted:
    """Take each due time that is not too late, up to a limit; the rest is for the next firing."""
    skips = []
    begin: int | None = first
    if due.grace_ms is not None and first < due.now - due.grace_ms:
        late = due_between(due.timing, first, due.now - due.grace_ms - 1, limit=most_counted(due.timing))
        skips = [Skip(first, late.last, late.count, LATE)]
        begin = late.next_at
    if begin is None or begin > due.now:
        return Wanted([], skips, begin)
    if due.timing.mode is Mode.DELAY:  # the next one is counted from the end of this one
        return Wanted([begin], skips, None)
    following = takewhile(lambda at: at <= due.now, occurrences(due.timing, begin))
    dues = [begin, *islice(following, most_runs - 1)]
    return Wanted(dues, skips, next_after(due.timing, dues[-1]))


def unfired(due: Due, skip: Skip) -> Iterator[Skip]:
    """Split a run of misses where a person has fired one of them."""
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
    """Leave out jobs that would run beside an earlier run, if the overlap rule forbids it."""
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
    """Return the record of misses: joined to the previous run if nothing is fired in between, else with an event."""
    if skips and not any(at < skips[0].due_at for at in fired):
        recorded = joined(due.skipped, skips)
        if recorded[0] != skips[0]:
            return recorded, ()
    told = [skip for skip in skips if skip.reason != OVERLAP and skip.due_at <= due.now - WORTH_TELLING_MS]
    return tuple(skips), tuple(Told("schedule.missed", why=skip.reason, data=_data(skip)) for skip in told)


def joined(before: Skip | None, skips: Sequence[Skip]) -> tuple[Skip, ...]:
    """Add the first to the run of misses at the end of the record, if it continues that run."""
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
        return None  # known when the run ends
    return next_after(due.timing, due.now)
