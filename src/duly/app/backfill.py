"""Fires a schedule by hand: triggers it, fills in a window of the past, and resumes it after a pause.

Each reads the schedule first and then writes with a guard. If the schedule was modified in between, it starts over.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from itertools import islice, takewhile

from msgspec.structs import replace

from duly.app.database import Database
from duly.errors import ConfigError, ScheduleNotFound, TransitionRefused
from duly.model import DAY_MS, QUEUED, Overlap
from duly.rules.checks import moment
from duly.rules.durations import describe
from duly.rules.firing import Due, Firing, Run, Skip, Told, joined, most_counted, unfired
from duly.rules.timing import Mode, due_between, next_after, occurrences
from duly.store import schedules as store
from duly.store.sequence import Steps

PAUSED = "paused"
CHUNK = 1000
TRIES = 100  # against concurrent modification of the same schedule


def trigger(database: Database, name: str, by: str) -> Steps[str]:
    """Fire a schedule now, and return the id of the job. Its next due time does not change."""
    for _ in range(TRIES):
        due = the_one((yield store.one(name)), name)
        at = due.now
        while (yield store.fired_between(name, at, at)):  # the millisecond identifies a run
            at += 1
        run = Run(
            id=database.new_id(),
            due_at=at,
            after_ms=0,
            envelope=replace(due.envelope, due_at=at),
            because=f"triggered by {by}",
        )
        told = Told("schedule.triggered", by=by)
        firing = Firing(name, due.revision, due.next_at, runs=(run,), told=(told,))
        if (yield store.fire([firing])):
            return run.id
    raise crowded(name)


def backfill(database: Database, name: str, since: int, until: int, by: str, force: bool) -> Steps[list[str]]:
    """Fire the due times of a window that were not fired, and return the ids of the jobs."""
    ids: list[str] = []
    tries = 0
    while since <= until:
        due = the_one((yield store.one(name)), name)
        refuse_window(due, until)
        if not force:
            refuse_forgotten(due, since, until, database.settings.keep_ms)
        dues = list(islice(takewhile(lambda at: at <= until, dues_from(due, since)), CHUNK))
        if not dues:
            break
        fired = set((yield store.fired_between(name, dues[0], dues[-1])))
        skips, foreign = _by_this_rule(due, (yield store.skipped_between(name, dues[0], dues[-1])))
        runs = _runs(database, due, [at for at in dues if at not in fired | foreign], f"backfilled by {by}")
        told = Told("schedule.backfilled", by=by, data=f'{{"count": {len(runs)}}}')
        firing = Firing(
            name,
            due.revision,
            due.next_at,
            runs=runs,
            skips=tuple(part for skip in skips for part in _left_of(due, skip, dues)),
            forget=tuple(skip.due_at for skip in skips),
            told=(told,),
        )
        tries += 1
        if runs and not (yield store.fire([firing])):
            if tries > TRIES:
                raise crowded(name)
            continue
        ids += [run.id for run in runs]
        since, tries = dues[-1] + 1, 0
    return ids


def _runs(database: Database, due: Due, dues: Iterable[int], because: str) -> tuple[Run, ...]:
    queued = due.overlap is not Overlap.ALLOW
    return tuple(
        Run(
            id=database.new_id(),
            due_at=at,
            after_ms=0,
            envelope=replace(due.envelope, due_at=at),
            reason=QUEUED if queued and (due.live or place) else None,
            because=because,
        )
        for place, at in enumerate(dues)
    )


def resume(name: str, by: str, why: str) -> Steps[bool]:
    """Resume a paused schedule. False: it was not paused."""
    for _ in range(TRIES):
        due = the_one((yield store.one(name)), name)
        if not due.paused:
            return False
        skips, next_at = _paused(due)
        counted = next_at is None or next_at > due.now
        told = (Told("schedule.resumed", by=by, why=why),) if counted else ()
        firing = Firing(name, due.revision, next_at, skips=skips, told=told, resume=counted)
        if (yield store.fire([firing])) and counted:
            return True
    raise crowded(name)


def _paused(due: Due) -> tuple[tuple[Skip, ...], int | None]:
    """Return the due times that a pause skipped, and the next due time after it."""
    if due.next_at is None:
        return (), None
    if due.next_at > due.now:
        return (), _not_far_off(due, due.next_at)
    run = due_between(due.timing, due.next_at, due.now, limit=most_counted(due.timing))
    skips = tuple(unfired(due, Skip(due.next_at, run.last, run.count, PAUSED)))
    return joined(due.skipped, skips), next_after(due.timing, due.now) if due.timing.mode is Mode.DELAY else run.next_at


def _not_far_off(due: Due, next_at: int) -> int:
    """Correct a due time that lies days after the rule's, because the clock was ahead for a while."""
    usual = next(iter(dues_from(due, due.now + 1)), next_at)
    return usual if next_at - usual > DAY_MS else next_at


def dues_from(due: Due, since: int) -> Iterable[int]:
    """Return the due times from `since` on."""
    interval = due.timing.interval_ms
    if interval is None:
        return occurrences(due.timing, since - 1)
    assert due.next_at is not None  # only a delay can lack a due time, and it has no past
    first = due.next_at - (due.next_at - since) // interval * interval
    return occurrences(due.timing, first - interval)


def _by_this_rule(due: Due, skips: Iterable[Skip]) -> tuple[list[Skip], set[int]]:
    """Return the recorded misses that today's rule counts in the same way, and the first due times of the others.

    The others stay as they are: today's rule cannot split the misses of an earlier rule.
    """
    ours: list[Skip] = []
    foreign: set[int] = set()
    for skip in skips:
        run = due_between(due.timing, skip.due_at, skip.until_at, limit=skip.count + 1)
        if (run.count, run.last) == (skip.count, skip.until_at):
            ours.append(skip)
        else:
            foreign.add(skip.due_at)
    return ours, foreign


def _left_of(due: Due, skip: Skip, dues: list[int]) -> Iterable[Skip]:
    """Return the parts of recorded misses that lie before and after a window that is filled in."""
    before = due_between(due.timing, skip.due_at, dues[0] - 1, limit=most_counted(due.timing))
    if before.count:
        yield Skip(skip.due_at, before.last, before.count, skip.reason)
    within = sum(skip.due_at <= at <= skip.until_at for at in dues)
    after = next_after(due.timing, dues[-1])
    if (count := skip.count - before.count - within) > 0 and after is not None and after <= skip.until_at:
        yield Skip(after, skip.until_at, count, skip.reason)


def window(since: datetime, until: datetime) -> tuple[int, int]:
    """Return both ends of a window in milliseconds."""
    first = moment(since, "since")
    if moment(until, "until") < first:
        raise ConfigError(f"a backfill from {since} until {until} has nothing to fill: until is before since")
    return first, moment(until, "until", down=True)


def refuse_window(due: Due, until: int) -> None:
    """Raise for a window that cannot be filled in."""
    if due.timing.mode is Mode.DELAY:
        raise ConfigError(f"{due.name} counts from the end of each run: it has no past due times to fill in")
    if due.overlap is Overlap.CANCEL_RUNNING:
        raise ConfigError(f"{due.name} stops a run when the next is due (overlap='cancel_running'): trigger it instead")
    if until > due.now:
        raise ConfigError(f"{due.name}: a backfill is for the past, and its window reaches into the future")


def refuse_forgotten(due: Due, since: int, until: int, keep_ms: int) -> None:
    """Raise for a window whose records of fires may be pruned already."""
    if since < due.now - keep_ms and until >= due.created_at:
        raise ConfigError(
            f"{due.name}: fires are recorded for {describe(keep_ms)}, and this window begins before that: "
            "give force=True to fire every due time without a record"
        )


def the_one(found: list[Due], name: str) -> Due:
    """Return the one schedule that was found, or raise ScheduleNotFound."""
    if not found:
        raise ScheduleNotFound(f"no schedule is named {name!r}")
    return found[0]


def crowded(name: str) -> TransitionRefused:
    """Return the error after too many concurrent modifications."""
    return TransitionRefused(f"schedule {name} was modified concurrently {TRIES} times: try again")
