"""Which instants a cron expression is due at, by brute force: every minute of UTC is asked what the clock says there.

Knows nothing of cronsim nor of duly, so that it can judge both. `minutes()` looks at a zone once, which is what costs;
`due()` asks that table for each expression.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from functools import cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

MINUTE, DAY = 60, 1_440
MONTHS = ("", "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
EPOCH = date(1970, 1, 1).toordinal()


class Minute(NamedTuple):
    at: int  # minutes of UTC since 1970
    local: int  # what the clock shows, in the same measure
    again: bool  # the clock has shown it before
    skipped: range  # what the clock left out directly before


class Fields(NamedTuple):
    fixed: bool
    times: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    both: bool

    def on(self, local: int) -> bool:
        return local % DAY in self.times and self.on_day(local // DAY)

    def on_day(self, local_day: int) -> bool:
        day = date.fromordinal(EPOCH + local_day)
        of_month, of_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return day.month in self.months and ((of_month and of_week) if self.both else (of_month or of_week))


@cache
def fields(expression: str) -> Fields:
    minute, hour, day, month, weekday = expression.lower().split()
    minutes, hours = _values(minute, 0, 59), _values(hour, 0, 23)
    return Fields(
        fixed=minute[0] != "*" and hour[0] != "*",
        times=frozenset(h * MINUTE + m for h in hours for m in minutes),
        days=_values(day, 1, 31),
        months=_values(month, 1, 12, MONTHS),
        weekdays=frozenset(each % 7 for each in _values(weekday, 0, 7, WEEKDAYS)),
        both=day[0] == "*" or weekday[0] == "*",
    )


def _values(field: str, least: int, most: int, names: tuple[str, ...] = ()) -> frozenset[int]:
    found: set[int] = set()
    for part in field.split(","):
        span, _, step = part.partition("/")
        low, _, high = span.partition("-")
        begin = least if low == "*" else _value(low, names)
        end = _value(high, names) if high else most if low == "*" or step else begin
        found |= set(range(begin, end + 1, int(step or 1)))
    return frozenset(found)


def _value(text: str, names: tuple[str, ...]) -> int:
    return names.index(text) if text in names else int(text)


def changes(zone: str, begin: datetime, end: datetime) -> list[int]:
    """The minutes of UTC at which a zone changes its clock."""
    found = []
    # No zone changes its clock twice within six hours, so what differs after six hours holds one change.
    for at in range(_minute(begin), _minute(end), 360):
        if _offset(zone, at) != (after := _offset(zone, at + 360)):
            found.append(next(each for each in range(at, at + 361) if _offset(zone, each) == after))
    return found


def minutes(zone: str, begin: int, end: int) -> list[Minute]:
    """Each minute of UTC from `begin` until before `end`; what was shown in the day before counts as shown."""
    found, before, highest = [], begin - DAY - 1 + _offset(zone, begin - DAY - 1), 0
    for at in range(begin - DAY, end):
        local = at + _offset(zone, at)
        if at >= begin:
            found.append(Minute(at, local, local <= highest, range(before + 1, local)))
        before, highest = local, max(highest, local)
    return found


def due(expression: str, table: list[Minute]) -> list[int]:
    """The due times in ms."""
    wanted = fields(expression)
    if wanted.fixed:
        return [
            minute.at * 60_000
            for minute in table
            if (not minute.again and wanted.on(minute.local)) or any(map(wanted.on, minute.skipped))
        ]
    return [minute.at * 60_000 for minute in table if wanted.on(minute.local)]


_zone = cache(ZoneInfo)


def _offset(zone: str, at: int) -> int:
    ahead = datetime.fromtimestamp(at * 60, _zone(zone)).utcoffset()
    assert ahead is not None
    return (ahead.days * 86_400 + ahead.seconds) // 60


def _minute(at: datetime) -> int:
    return int(at.replace(tzinfo=UTC).timestamp()) // 60
