"""RRULEs of RFC 5545: each rule becomes a pattern of the times of a day that are due.

A text has one to three rules, and may have DTSTART, RDATE and EXDATE lines beside them. A rule is not expanded from its
start: for each day, arithmetic decides whether INTERVAL and every BY part include that day. Only COUNT is walked, once,
when the rule is parsed. A rule has fixed times when its FREQ is DAILY or longer.
"""

from __future__ import annotations

import re
from calendar import isleap
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime, tzinfo
from functools import lru_cache
from itertools import islice
from typing import NoReturn

from duly.errors import ConfigError
from duly.rules.days import DAY, EPOCH, HORIZON_DAYS, Almanac, Pattern, instant, moment, month_length, shown, walk, zone

FREQUENCIES = ("YEARLY", "MONTHLY", "WEEKLY", "DAILY", "HOURLY", "MINUTELY", "SECONDLY")
YEARLY, MONTHLY, WEEKLY, DAILY, HOURLY, MINUTELY, SECONDLY = range(7)
WEEKDAYS = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")
# The least and the most of each list of numbers, and whether a minus counts from the end.
LISTS = {
    "BYMONTH": (1, 12, False),
    "BYMONTHDAY": (1, 31, True),
    "BYYEARDAY": (1, 366, True),
    "BYWEEKNO": (1, 53, True),
    "BYHOUR": (0, 23, False),
    "BYMINUTE": (0, 59, False),
    "BYSECOND": (0, 59, False),
    "BYSETPOS": (1, 366, True),
}
PARTS = ("FREQ", "INTERVAL", "COUNT", "UNTIL", "WKST", "BYDAY", *LISTS)
MOST_RULES = 3
MOST_COUNTED = 10_000
MOST_WEEKS = 53
DATE = re.compile("([0-9]{8})(T[0-9]{6})?(Z)?")


def rules(text: str, tz: str, anchor_at: int | None) -> Almanac:
    """Read the lines of an RRULE."""
    lines = _properties(text)
    # Without a start and an anchor a rule counts from a Monday that is the first of a year: FREQ=WEEKLY is a Monday.
    start = datetime(1900, 1, 1)  # noqa: DTZ001 - local to `tz`
    if "DTSTART" in lines:
        start, tz = _date(text, "DTSTART", *lines["DTSTART"][0], tz)
    elif anchor_at is not None:
        start = moment(zone(tz), anchor_at // 1_000).replace(tzinfo=None)
    return Almanac(
        [Rule(text, value, start, zone(tz)) for _, value in lines["RRULE"]],
        added=_dates(text, "RDATE", lines, tz),
        removed=_dates(text, "EXDATE", lines, tz),
    )


def start_zone(text: str, tz: str) -> str:
    """Return the name of the zone of DTSTART, `tz` by default."""
    start = _properties(text).get("DTSTART")
    return _date(text, "DTSTART", *start[0], tz)[1] if start else tz


def _properties(text: str) -> dict[str, list[tuple[list[str], str]]]:
    """Split "DTSTART;TZID=Europe/Vienna:20260101T090000 RRULE:FREQ=DAILY" into names, parameters and values."""
    found: dict[str, list[tuple[list[str], str]]] = {}
    for line in text.split():
        head, _, value = line.rpartition(":")
        name, *parameters = (head or "RRULE").split(";")
        if name.upper() not in ("RRULE", "DTSTART", "RDATE", "EXDATE"):
            refuse_rule(text, f"has {shown(name)}, which is not understood: write RRULE, DTSTART, RDATE or EXDATE")
        found.setdefault(name.upper(), []).append((parameters, value))
    if not 1 <= len(found.get("RRULE", ())) <= MOST_RULES:
        refuse_rule(text, f"has {len(found.get('RRULE', ()))} rules: give 1 to {MOST_RULES}")
    if len(found.get("DTSTART", ())) > 1:
        refuse_rule(text, "has more than one DTSTART: give one")
    return found


def _dates(text: str, name: str, lines: dict[str, list[tuple[list[str], str]]], tz: str) -> Iterator[int]:
    """Give the instants that the lines called `name` list."""
    for parameters, values in lines.get(name, ()):
        for value in values.split(","):
            local, where = _date(text, name, parameters, value, tz)
            yield instant(local, zone(where))


def _date(text: str, name: str, parameters: Sequence[str], value: str, tz: str) -> tuple[datetime, str]:
    """Read a date or a time with the name of its zone, `tz` by default."""
    for parameter in parameters:
        key, _, given = parameter.partition("=")
        if key.upper() == "TZID":
            zone(tz := given)
        elif parameter.upper() not in ("VALUE=DATE", "VALUE=DATE-TIME"):
            refuse_rule(text, f"is wrong in {name}: {shown(parameter)} is not understood: write TZID=")
    if not (written := DATE.fullmatch(value.upper())):
        refuse_rule(text, f"is wrong in {name}: {shown(value)} is no time: write 20260131T090000 or 20260131T090000Z")
    try:
        local = datetime.strptime(written[1] + (written[2] or "T000000"), "%Y%m%dT%H%M%S")  # noqa: DTZ007 - local to `tz`
    except ValueError:
        refuse_rule(text, f"is wrong in {name}: {shown(value)} is not on the calendar")
    if local.year < 1900:
        refuse_rule(text, f"is wrong in {name}: {shown(value)} is before 1900")
    # People write the year 9999 for "never", which no zone can hold.
    return min(local, datetime(9990, 1, 1)), "UTC" if written[3] else tz  # noqa: DTZ001


class Rule(Pattern):
    """The pattern of one RRULE."""

    def __init__(self, text: str, rule: str, start: datetime, zone: tzinfo) -> None:
        super().__init__(zone)
        self.text = text
        parts = _parts(text, rule)
        self.start = start
        self.start_at = instant(start, zone)
        self.start_day = start.toordinal() - EPOCH
        self.freq = FREQUENCIES.index(parts["FREQ"])
        self.fixed = self.freq <= DAILY
        self.interval = _number(text, parts, "INTERVAL", 100_000) or 1
        self.week_start = WEEKDAYS.index(parts.get("WKST", "MO"))
        self._read_days(parts)
        self._read_times(parts)
        self.positions = _numbers(text, parts, "BYSETPOS")
        if self.positions and not self.fixed:
            refuse_rule(text, f"is wrong in BYSETPOS: it picks from days, so FREQ={parts['FREQ']} cannot have it")
        self._read_end(parts)

    def _read_days(self, parts: dict[str, str]) -> None:
        """Read which days are due; missing parts come from the first day."""
        months, monthdays, yeardays, weeks = (
            _numbers(self.text, parts, name) for name in ("BYMONTH", "BYMONTHDAY", "BYYEARDAY", "BYWEEKNO")
        )
        weekdays = _weekdays(self.text, parts, self.freq)
        if not (monthdays or yeardays or weeks or weekdays):
            if self.freq == YEARLY:
                months = months or {self.start.month}
            if self.freq <= MONTHLY:
                monthdays = {self.start.day}
            elif self.freq == WEEKLY:
                weekdays = {(self.start.weekday(), 0)}
        of_year = self.freq == YEARLY and not months
        self.months = months
        self.judges: list[Callable[[date], bool]] = []
        if monthdays:
            self.judges.append(lambda day: _counted(day.day, month_length(day), monthdays))
        if yeardays:
            self.judges.append(lambda day: _counted(_day_of_year(day), _year_length(day), yeardays))
        if weeks:
            self.judges.append(lambda day: _counted(*_week(day, self.week_start), weeks))
        if weekdays:
            self.judges.append(lambda day: _on_weekday(day, weekdays, of_year))

    def _read_times(self, parts: dict[str, str]) -> None:
        """Read which times of day are due; missing parts come from the first time, or match any below the frequency."""
        hours, minutes, seconds = (_numbers(self.text, parts, name) for name in ("BYHOUR", "BYMINUTE", "BYSECOND"))
        self.unit = {HOURLY: 3_600, MINUTELY: 60, SECONDLY: 1}.get(self.freq, DAY)
        self.hours = hours or ({self.start.hour} if self.freq < HOURLY else set(range(24)))
        self.minutes = minutes or ({self.start.minute} if self.freq < MINUTELY else set(range(60)))
        self.seconds_of_minute = seconds or ({self.start.second} if self.freq < SECONDLY else set(range(60)))
        since_midnight = self.start.hour * 3_600 + self.start.minute * 60 + self.start.second
        self.start_unit = (self.start_day * DAY + since_midnight) // self.unit
        self.times = lru_cache(maxsize=1_024)(self._times)
        self.picked = lru_cache(maxsize=4)(self._picked)

    def _read_end(self, parts: dict[str, str]) -> None:
        """Read UNTIL, or find where COUNT ends, within a limit because each time is walked."""
        if "COUNT" in parts and "UNTIL" in parts:
            refuse_rule(self.text, "has COUNT and UNTIL: give one of them")
        if until := parts.get("UNTIL"):
            local, tz = _date(self.text, "UNTIL", (), until, "")
            self.end_at = instant(local, UTC if tz else self.zone)
        if count := _number(self.text, parts, "COUNT", MOST_COUNTED):
            self.end_at = self.start_at + HORIZON_DAYS * DAY * 1_000
            walked = (due for dues in walk(Almanac([self]), self.start_at) for due in dues)
            ended = next(islice(walked, count - 1, None), None)
            if ended is None:
                refuse_rule(self.text, f"is wrong in COUNT: {count} times are not reached in 50 years: give UNTIL")
            self.end_at = ended

    def seconds(self, day: int) -> Sequence[int]:
        """Return the seconds that are due on a local day."""
        local = date.fromordinal(EPOCH + day)
        if not self._in_turn(day) or not self._judged(local):
            return ()
        if self.positions:
            return self.picked(*self._period(local, day)).get(day, ())
        return self.times((self.start_unit - day * (DAY // self.unit)) % self.interval if self.unit < DAY else 0)

    def is_out(self, year: int, month: int) -> bool:
        """Return whether BYMONTH or INTERVAL excludes a month."""
        if self.months and month not in self.months:
            return True
        if self.freq == YEARLY:
            return (year - self.start.year) % self.interval != 0
        if self.freq == MONTHLY:
            return ((year - self.start.year) * 12 + month - self.start.month) % self.interval != 0
        return False

    def _in_turn(self, day: int) -> bool:
        """Return whether INTERVAL includes the week or the day."""
        if self.freq == WEEKLY:
            return (self._week_begin(day) - self._week_begin(self.start_day)) // 7 % self.interval == 0
        return self.freq != DAILY or (day - self.start_day) % self.interval == 0

    def _week_begin(self, day: int) -> int:
        """Return the first day of a day's week; day 0 was a Thursday."""
        return day - (day + 3 - self.week_start) % 7

    def _judged(self, local: date) -> bool:
        """Return whether every BY part includes a day."""
        return not self.is_out(local.year, local.month) and all(judge(local) for judge in self.judges)

    def _times(self, first: int) -> Sequence[int]:
        """Give the times of a day whose first hour, minute or second in turn is number `first`."""
        if self.unit == DAY:
            return tuple(
                sorted(h * 3_600 + m * 60 + s for h in self.hours for m in self.minutes for s in self.seconds_of_minute)
            )
        within = sorted(
            m * 60 + s
            for m in (self.minutes if self.unit == 3_600 else (0,))
            for s in (self.seconds_of_minute if self.unit > 1 else (0,))
        )
        return tuple(
            begin + second
            for begin in range(first * self.unit, DAY, self.interval * self.unit)
            if begin // 3_600 in self.hours
            and (self.unit == 3_600 or begin // 60 % 60 in self.minutes)
            and (self.unit > 1 or begin % 60 in self.seconds_of_minute)
            for second in within
        )

    def _period(self, local: date, day: int) -> tuple[int, int]:
        """Return the first day and the length of a day's year, month, week or day."""
        if self.freq == YEARLY:
            return day - _day_of_year(local) + 1, _year_length(local)
        if self.freq == MONTHLY:
            return day - local.day + 1, month_length(local)
        return (self._week_begin(day), 7) if self.freq == WEEKLY else (day, 1)

    def _picked(self, begin: int, length: int) -> dict[int, list[int]]:
        """Return the days and times that BYSETPOS picks from a year, month, week or day."""
        days = [day for day in range(begin, begin + length) if self._judged(date.fromordinal(EPOCH + day))]
        times = self.times(0)
        total = len(days) * len(times)
        places = {place - 1 if place > 0 else total + place for place in self.positions}
        picked: dict[int, list[int]] = {}
        for place in sorted(places):
            if 0 <= place < total:
                picked.setdefault(days[place // len(times)], []).append(times[place % len(times)])
        return picked


def _parts(text: str, rule: str) -> dict[str, str]:
    """Split "FREQ=WEEKLY;BYDAY=MO" into its parts."""
    parts: dict[str, str] = {}
    for part in rule.upper().rstrip(";").split(";"):
        name, sign, value = part.partition("=")
        if not sign or not value:
            refuse_rule(text, f"is wrong in {shown(part)}: write NAME=VALUE, such as FREQ=DAILY")
        if name not in PARTS:
            refuse_rule(text, f"has the part {shown(name)}, which is not understood: the parts are {' '.join(PARTS)}")
        if name in parts:
            refuse_rule(text, f"has {name} twice: give it once")
        parts[name] = value
    if parts.get("FREQ") not in FREQUENCIES:
        refuse_rule(text, f"is wrong in FREQ: {shown(parts.get('FREQ', ''))} is none of {' '.join(FREQUENCIES)}")
    if parts.get("WKST", "MO") not in WEEKDAYS:
        refuse_rule(text, f"is wrong in WKST: {shown(parts['WKST'])} is none of {' '.join(WEEKDAYS)}")
    return parts


def _number(text: str, parts: dict[str, str], name: str, most: int) -> int | None:
    """Read a part that is one number from 1 on."""
    value = parts.get(name)
    if value is None:
        return None
    if not re.fullmatch("[0-9]{1,9}", value) or not 1 <= int(value) <= most:
        refuse_rule(text, f"is wrong in {name}: {shown(value)} is not 1-{most:,}")
    return int(value)


def _numbers(text: str, parts: dict[str, str], name: str) -> set[int]:
    """Read a part that is a list of numbers, empty if it is missing."""
    least, most, signed = LISTS[name]
    found = set()
    for value in parts[name].split(",") if name in parts else ():
        plain = re.fullmatch("([+-]?)([0-9]{1,3})", value)
        if not plain or (plain[1] and not signed) or not least <= int(plain[2]) <= most:
            sign = " or with a minus from the end" if signed else ""
            refuse_rule(text, f"is wrong in {name}: {shown(value)} is not {least}-{most}{sign}")
        found.add(int(value))
    return found


def _weekdays(text: str, parts: dict[str, str], freq: int) -> set[tuple[int, int]]:
    """Read BYDAY as weekdays with their number in the month or year, 0 for each."""
    found = set()
    for value in parts["BYDAY"].split(",") if "BYDAY" in parts else ():
        plain = re.fullmatch("([+-]?[1-9][0-9]?)?([A-Z]{2})", value)
        if not plain or plain[2] not in WEEKDAYS or abs(int(plain[1] or 0)) > MOST_WEEKS:
            refuse_rule(
                text, f"is wrong in BYDAY: {shown(value)} is no weekday: write {' '.join(WEEKDAYS)}, 1MO or -1FR"
            )
        if plain[1] and freq > MONTHLY:
            refuse_rule(text, f"is wrong in BYDAY: {shown(value)} counts weekdays: use FREQ=MONTHLY or FREQ=YEARLY")
        found.add((WEEKDAYS.index(plain[2]), int(plain[1] or 0)))
    return found


def refuse_impossible_rule(text: str) -> NoReturn:
    """Raise for an RRULE whose parts are valid, but which no time matches."""
    lines = _properties(text)
    said = [name for name in lines if name != "RRULE"]
    said += [name for _, rule in lines["RRULE"] for name in _parts(text, rule) if name not in ("FREQ", "WKST")]
    refuse_rule(text, f"never fires: no time fits {' and '.join(dict.fromkeys(said))}")


def refuse_rule(text: str, why: str) -> NoReturn:
    """Raise with the RRULE and the reason."""
    raise ConfigError(f"rrule {shown(text)} {why}") from None


def _counted(number: int, length: int, wanted: set[int]) -> bool:
    """Return whether `number` of `length` is included, counted from either end."""
    return number in wanted or number - length - 1 in wanted


def _on_weekday(day: date, wanted: set[tuple[int, int]], of_year: bool) -> bool:
    """Return whether a day is an included weekday, or an included one of its month or year."""
    weekday = day.weekday()
    if (weekday, 0) in wanted:
        return True
    number, length = (_day_of_year(day), _year_length(day)) if of_year else (day.day, month_length(day))
    return (weekday, (number + 6) // 7) in wanted or (weekday, -((length - number) // 7) - 1) in wanted


def _week(day: date, week_start: int) -> tuple[int, int]:
    """Return the number of a day's week and how many weeks that year has; a week is of the year of its fourth day."""
    fourth = _fourth_day(day, week_start)
    last = _fourth_day(date(fourth.year, 12, 28), week_start)
    return (_day_of_year(fourth) + 6) // 7, (_day_of_year(last) + 6) // 7


def _fourth_day(day: date, week_start: int) -> date:
    """Return the fourth day of a day's week."""
    return date.fromordinal(day.toordinal() - (day.weekday() - week_start) % 7 + 3)


def _day_of_year(day: date) -> int:
    """Return the number of a day in its year, from 1."""
    return day.toordinal() - date(day.year, 1, 1).toordinal() + 1


def _year_length(day: date) -> int:
    """Return the days of a day's year."""
    return 366 if isleap(day.year) else 365
