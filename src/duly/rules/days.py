"""Turns the local seconds that are due into instants, day by day.

A cron expression and an RRULE both define which seconds of which local days are due. So both become a `Pattern`, and
one walk over the days of UTC turns the local seconds of a pattern into instants. Only this walk handles daylight
saving. A pattern of fixed times runs once a day: at the first instant after a gap, and at the first of two equal
times. Any other pattern runs by elapsed time: both times where the clock repeats, and never in the gap.

A day costs a few microseconds and a search ends after 50 years, so that no text can make a call run for long.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left, bisect_right
from calendar import monthrange
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, date, datetime, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo, available_timezones

from duly.errors import ConfigError

DAY = 86_400
EPOCH = date(1970, 1, 1).toordinal()
# A margin of two days, so that no zone can push a time out of what a datetime holds.
FIRST_DAY, LAST_DAY = date(1, 1, 3).toordinal() - EPOCH, date(9999, 12, 29).toordinal() - EPOCH
# The 29th of February falls on a given weekday at least every 40 years; a longer wait has no end.
HORIZON_DAYS = 50 * 366
LONGEST_LOOK = 400


def walk(almanac: Almanac, at: int) -> Iterator[Sequence[int]]:
    """Give the due times day by day from the day of `at`, until nothing is due for 50 years."""
    day, quiet = max(at // (DAY * 1_000), almanac.first_day), 0
    while day <= almanac.last_day and quiet < HORIZON_DAYS:
        dues = almanac.on(day)
        if dues:
            yield dues
        step = 1 if dues else almanac.rest(day)
        quiet = 0 if dues else quiet + step
        day += step


class Almanac:
    """The due times of a schedule, a day of UTC at a time."""

    def __init__(self, patterns: Sequence[Pattern], added: Iterable[int] = (), removed: Iterable[int] = ()) -> None:
        self.patterns = patterns
        self.added = sorted(added)
        self.removed = frozenset(removed)
        starts = [pattern.start_at for pattern in patterns] + self.added[:1]
        ends = [pattern.end_at for pattern in patterns] + self.added[-1:]
        self.first_day = max(FIRST_DAY, min(starts) // (DAY * 1_000))
        self.last_day = min(LAST_DAY, max(ends) // (DAY * 1_000))
        self._latest: tuple[int, Sequence[int]] = (FIRST_DAY - 1, ())

    def on(self, day: int) -> Sequence[int]:
        """Give the due times of one day of UTC, in order."""
        held, dues = self._latest
        if held != day:
            dues = self._merged(day)
            if len(dues) <= 1_440:  # those of a rule of seconds would take megabytes
                self._latest = (day, dues)
        return dues

    def rest(self, day: int) -> int:
        """Return how many days to skip after a day without a due time."""
        return 1 if self.added else min(pattern.rest(day) for pattern in self.patterns)

    def _merged(self, day: int) -> Sequence[int]:
        """Combine the patterns of a day with the added times, and leave out the removed ones."""
        each = [_dues(pattern, day) for pattern in self.patterns]
        if len(each) == 1 and not self.added and not self.removed:
            return each[0]
        begin, end = (bisect_left(self.added, midnight * DAY * 1_000) for midnight in (day, day + 1))
        return sorted(set(self.added[begin:end]).union(*each) - self.removed)


class Pattern:
    """Which seconds of which local days are due."""

    fixed: bool
    start_at = FIRST_DAY * DAY * 1_000
    end_at = LAST_DAY * DAY * 1_000

    def __init__(self, zone: tzinfo) -> None:
        self.zone = zone
        # Each local day is requested for the three days of UTC that it may overlap.
        self.on: Callable[[int], Sequence[int]] = lru_cache(maxsize=8)(self.seconds)

    def seconds(self, day: int) -> Sequence[int]:
        """Return the seconds that are due on local day number `day`, counted from 1970, in order."""
        raise NotImplementedError

    def is_out(self, year: int, month: int) -> bool:
        """Return whether a month has no due time."""
        raise NotImplementedError

    def rest(self, day: int) -> int:
        """Return how many days of UTC to skip after a day without a due time."""
        ahead = day
        while ahead - day < LONGEST_LOOK and not self.seconds(ahead):
            local = date.fromordinal(EPOCH + ahead)
            ahead += month_length(local) - local.day + 1 if self.is_out(local.year, local.month) else 1
        # A local day begins on the previous day of UTC where the clock is ahead.
        return max(1, ahead - 1 - day)


def _dues(pattern: Pattern, day: int) -> Sequence[int]:
    """Give the due times of `pattern` on one day of UTC, in order."""
    if not (pattern.on(day) or pattern.on(day - 1) or pattern.on(day + 1)):
        return ()
    stretches = _stretches(pattern.zone, day * DAY)
    found: list[int] = []
    for begin, end, before, offset in stretches:
        if pattern.fixed and offset > before and _local(pattern, begin + before, begin + offset):
            found.append(begin)
        found += [second - offset for second in _local(pattern, begin + offset, end + offset)]
    if pattern.fixed and (len(stretches) > 1 or moment(pattern.zone, day * DAY).fold):
        # No instant twice: neither where the clock repeats, nor for the gap and the instant after it.
        found = sorted({second for second in found if not moment(pattern.zone, second).fold})
    dues = [second * 1_000 for second in found]
    return dues[bisect_left(dues, pattern.start_at) : bisect_right(dues, pattern.end_at)]


def _stretches(zone: tzinfo, begin: int) -> list[tuple[int, int, int, int]]:
    """Split a day of UTC where the clock changes: begin, end, the offset before and the offset in it."""
    before, after = _offset(zone, begin - 1), _offset(zone, begin + DAY - 1)
    if before == after:
        return [(begin, begin + DAY, after, after)]
    change = _change(zone, begin, begin + DAY - 1)
    return [(begin, change, before, before), (change, begin + DAY, before, after)]


def _change(zone: tzinfo, begin: int, end: int) -> int:
    """Find the first second that has the offset of `end`; no zone has changed its clock twice in a day."""
    after = _offset(zone, end)
    return begin + bisect_left(range(end - begin), True, key=lambda second: _offset(zone, begin + second) == after)


def _local(pattern: Pattern, begin: int, end: int) -> list[int]:
    """Return the due local seconds from `begin` until before `end`."""
    found: list[int] = []
    for day in range(begin // DAY, (end - 1) // DAY + 1):
        midnight, seconds = day * DAY, pattern.on(day)
        kept = seconds[bisect_left(seconds, begin - midnight) : bisect_left(seconds, end - midnight)]
        found += [midnight + second for second in kept]
    return found


def _offset(zone: tzinfo, second: int) -> int:
    """Return the seconds by which `zone` is ahead of UTC."""
    ahead = moment(zone, second).utcoffset()
    assert ahead is not None
    return ahead.days * DAY + ahead.seconds


def moment(zone: tzinfo, second: int) -> datetime:
    """Return the local time of an instant in `zone`."""
    return datetime.fromtimestamp(second, zone)


def instant(local: datetime, zone: tzinfo) -> int:
    """Return the instant of a local time: the first of two, or the first after a gap."""
    second = int(local.replace(tzinfo=zone).timestamp())
    if moment(zone, second).replace(tzinfo=None) != local:
        # In a gap, the two readings of a time are before and after the change.
        second = _change(zone, int(local.replace(tzinfo=zone, fold=1).timestamp()), second)
    return second * 1_000


def month_length(day: date) -> int:
    """Return the days of a day's month."""
    return monthrange(day.year, day.month)[1]


def zone(name: str) -> tzinfo:
    """Return the zone of this name; raise with a suggestion for any other."""
    if not isinstance(name, str):
        raise ConfigError(f"schedule tz is of type {type(name).__name__}: give a zone's name such as 'Europe/Vienna'")
    if name == "UTC":
        return UTC  # works where no zone data is installed
    try:
        # `localtime` differs from machine to machine, and `right/` counts leap seconds.
        if name == "localtime" or name.startswith("right/"):
            raise ValueError(name)
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        raise ConfigError(f"schedule tz is {shown(name)}, {_zone_advice(name)}") from None


def _zone_advice(name: str) -> str:
    """Return what to do about an unknown zone."""
    known = sorted(available_timezones())
    if not known:
        return "but there is no zone data here: pip install tzdata"
    lowered = {each.lower(): each for each in known}
    ends = {each.rsplit("/", 1)[-1].lower(): each for each in known}
    wanted = name[:60].lower().replace(" ", "_")
    close = difflib.get_close_matches(wanted, lowered, 1, 0.7)
    if close:
        return f"which is no zone: did you mean '{lowered[close[0]]}'?"
    if close := difflib.get_close_matches(wanted, ends, 1, 0.7):
        return f"which is no zone: did you mean '{ends[close[0]]}'?"
    return "which is no zone: give an IANA name such as 'Europe/Vienna'"


def shown(text: object) -> str:
    """Quote a value, shortened so that a message stays one line."""
    said = str(text)
    return repr(said if len(said) <= 60 else f"{said[:60]}…")
