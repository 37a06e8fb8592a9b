"""When a schedule is due: pure functions of its text and a time.

A schedule recurs by a cron expression (`cron`), by an RRULE (`rrule`) or by an interval. The first two become an
`Almanac`, which is walked day by day and handles daylight saving (`days`). An interval is elapsed time. It is counted
from the last due time or, in the mode `delay`, from the end of the last run.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from datetime import timedelta
from enum import StrEnum
from functools import lru_cache

import msgspec

from duly.errors import ConfigError
from duly.rules.cron import FIELDS, Cron, explain_cron, refuse_impossible
from duly.rules.days import DAY, LAST_DAY, Almanac, shown, walk, zone
from duly.rules.durations import UNITS, describe, to_ms
from duly.rules.rrule import refuse_impossible_rule, rules, start_zone

__all__ = [
    "DAY",
    "LAST_DAY",
    "Mode",
    "Run",
    "Timing",
    "due_between",
    "explain",
    "next_after",
    "occurrences",
    "timing",
    "zone",
]

USUAL_AT = 1_767_225_600_000  # 2026-01-01
LONGEST_TEXT = 1_000
SHORTEST_MS = 100
LONGEST_MS = 3_653 * UNITS["d"]


class Mode(StrEnum):
    """How a schedule recurs."""

    CRON = "cron"
    RATE = "rate"
    DELAY = "delay"
    RRULE = "rrule"


class Timing(msgspec.Struct, frozen=True):
    """When a schedule recurs."""

    mode: Mode
    spec: str
    tz: str = "UTC"
    interval_ms: int | None = None
    anchor_at: int | None = None


class Run(msgspec.Struct, frozen=True):
    """Due times in a row: how many, the last of them, and the one that follows."""

    count: int
    last: int
    next_at: int | None


def timing(
    when: str | float | timedelta | None = None,
    *,
    rrule: str | None = None,
    tz: str = "UTC",
    mode: str | None = None,
) -> Timing:
    """Parse a schedule; raise if it is wrong, never fires or would be searched without end."""
    zone(tz)
    if mode is not None and mode not in (Mode.RATE, Mode.DELAY):
        raise ConfigError(f"schedule mode is {shown(mode)}: give 'rate' or 'delay', and only with an interval")
    if (when is None) == (rrule is None):
        told = "nothing" if when is None else "both a time and an rrule"
        raise ConfigError(f"schedule is given {told}: give one of a cron text, an interval or rrule=")
    if rrule is not None:
        return _rrule_timing(_text(rrule, "rrule"), tz, mode)
    if isinstance(when, str) and not _reads_as_duration(_text(when, "schedule")):
        return _cron_timing(when.strip(), tz, mode)
    return _interval_timing(when, tz, mode)


def next_after(timing: Timing, at: int) -> int | None:
    """Return the first due time strictly after `at`, or None after the last one."""
    if timing.interval_ms is not None:
        return at + timing.interval_ms
    return next(occurrences(timing, at), None)


def occurrences(timing: Timing, after: int) -> Iterator[int]:
    """Give every due time strictly after `after`, in order."""
    if timing.interval_ms is not None:
        while True:
            after += timing.interval_ms
            yield after
    for dues in walk(_almanac(timing), after):
        yield from dues[bisect_right(dues, after) :]


def due_between(timing: Timing, first: int, until: int, *, limit: int) -> Run:
    """Count the due times from `first`, a due time, to `until`, at most `limit` of them."""
    if until < first or limit < 1:
        return Run(0, first, first)
    if timing.mode is Mode.DELAY:
        # The next due time is known only when the run that begins now has ended.
        return Run(1, first, None)
    if timing.interval_ms is not None:
        count = min((until - first) // timing.interval_ms + 1, limit)
        last = first + (count - 1) * timing.interval_ms
        return Run(count, last, last + timing.interval_ms)
    count, last = 1, first
    for dues in walk(_almanac(timing), first):
        begin = bisect_right(dues, first)
        end = min(bisect_right(dues, until, begin), begin + limit - count)
        if end > begin:
            count, last = count + end - begin, dues[end - 1]
        if end < len(dues):
            return Run(count, last, dues[end])
    return Run(count, last, None)


def explain(timing: Timing) -> str:
    """Describe in English when a schedule is due."""
    if timing.interval_ms is not None:
        said = _in_words(timing.interval_ms)
        if timing.mode is Mode.DELAY:
            return f"{said} after the end of the last run"
        return f"every {re.sub(r'^1 (?=[a-z]+$)', '', said)}"
    if timing.mode is Mode.RRULE:
        return f"by the rule {' '.join(timing.spec.split())}, {timing.tz}"
    return f"{explain_cron(timing.spec)}, {timing.tz}"


def _text(value: object, what: str) -> str:
    """Raise unless it is a text that is neither empty nor far too long."""
    if not isinstance(value, str):
        raise ConfigError(f"{what} is of type {type(value).__name__}: give a text")
    if not value.strip():
        raise ConfigError(f"{what} is empty: give a cron text such as '0 9 * * mon-fri', an interval or rrule=")
    if len(value) > LONGEST_TEXT:
        raise ConfigError(f"{what} is {len(value):,} characters long: give at most {LONGEST_TEXT:,}")
    return value


def _reads_as_duration(text: str) -> bool:
    """Return whether a text is meant as a duration like "10m", not as a cron expression."""
    try:
        to_ms(text)
    except ConfigError:
        # "5 minutes" is better refused as a duration than for its number of fields.
        return len(text.split()) != len(FIELDS) and re.match(r"\s*-?\s*[0-9][0-9.]*\s*[a-zA-Zµμ]", text) is not None
    return True


def _interval_timing(when: object, tz: str, mode: str | None) -> Timing:
    """Read an interval."""
    interval_ms = to_ms(when, what="schedule interval")  # type: ignore[arg-type]
    if interval_ms < SHORTEST_MS:
        raise ConfigError(
            f"schedule interval is {describe(interval_ms)}: give at least {SHORTEST_MS}ms, "
            "because schedules are checked about that often"
        )
    if interval_ms > LONGEST_MS:
        raise ConfigError(f"schedule interval is {describe(interval_ms)}: give at most 10 years")
    spec = when.strip() if isinstance(when, str) else describe(interval_ms)
    return Timing(Mode(mode or Mode.RATE), spec, tz, interval_ms)


def _cron_timing(text: str, tz: str, mode: str | None) -> Timing:
    """Read a cron expression."""
    if mode is not None:
        raise ConfigError(f"schedule {shown(text)} is a cron text, which takes no mode: leave mode= out")
    made = Timing(Mode.CRON, text, tz)
    # From a fixed day, so that the same text is always accepted or always refused.
    if next_after(made, USUAL_AT) is None:
        refuse_impossible(text, tz)
    return made


def _rrule_timing(text: str, tz: str, mode: str | None) -> Timing:
    """Read an RRULE, alone or with DTSTART, RDATE and EXDATE lines."""
    if mode is not None:
        raise ConfigError(f"rrule {shown(text)} takes no mode: leave mode= out")
    made = Timing(Mode.RRULE, text.strip(), start_zone(text, tz))
    almanac = _almanac(made)
    if next(walk(almanac, almanac.first_day * DAY * 1_000), None) is None:
        refuse_impossible_rule(text)
    return made


def _in_words(ms: int) -> str:
    """Write "1 hour 30 minutes"."""
    names = {"d": "day", "h": "hour", "m": "minute", "s": "second", "ms": "millisecond"}
    said = []
    for part in describe(ms).split():
        count = part.rstrip("dhms")
        said.append(f"{count} {names[part[len(count) :]]}{'' if count == '1' else 's'}")
    return " ".join(said)


@lru_cache(maxsize=256)
def _almanac(timing: Timing) -> Almanac:
    """Return the almanac of a schedule, cached because parsing its text costs more than a day of it."""
    if timing.mode is Mode.RRULE:
        return rules(timing.spec, timing.tz, timing.anchor_at)
    return Almanac([Cron(timing.spec, timing.tz)])
