"""Cron expressions: cronsim parses the text and matches the days; `days` walks them.

An expression has fixed times when neither its minute nor its hour begins with `*`, as in Debian's cron. A text that
cronsim refuses is checked again field by field, so that the message names the wrong part.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, datetime
from typing import NoReturn

from cronsim import CronSim, CronSimError

from duly.errors import ConfigError
from duly.rules.days import EPOCH, Pattern, shown, zone

ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
FIELDS = {
    "minute": "0-59",
    "hour": "0-23",
    "day of month": "1-31",
    "month": "1-12 or jan-dec",
    "day of week": "0-7 or sun-sat",
}
SPANS = ((0, 60), (0, 24), (1, 32), (1, 13), (0, 7))
SUNDAY_PLACE = 4  # where 0 and 7 are Sunday
NAMES = {
    3: ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"],
    SUNDAY_PLACE: ["sun", "mon", "tue", "wed", "thu", "fri", "sat"],
}
NOWHEN = datetime(2000, 1, 1)  # noqa: DTZ001 - cronsim wants a start, and none of its walk is used


class Cron(Pattern):
    """The pattern of a cron expression."""

    def __init__(self, text: str, tz: str) -> None:
        super().__init__(zone(tz))
        sim = _sim(text)
        minute, hour = _expression(text).split()[:2]
        self.fixed = not minute.startswith("*") and not hour.startswith("*")
        self._due = tuple(hour * 3_600 + minute * 60 for hour in sorted(sim.hours) for minute in sorted(sim.minutes))
        self._months = sim.months
        self._match_day = sim.match_day

    def seconds(self, day: int) -> Sequence[int]:
        """Return the seconds that are due on a local day."""
        local = date.fromordinal(EPOCH + day)
        return () if self.is_out(local.year, local.month) or not self._match_day(local) else self._due

    def is_out(self, year: int, month: int) -> bool:
        """Return whether the expression excludes a month."""
        return month not in self._months


def explain_cron(text: str) -> str:
    """Describe a cron expression in English."""
    said = _sim(text).explain().replace(" through ", " to ")
    return f"{said[0].lower()}{said[1:]}"


def _expression(text: str) -> str:
    """Return the five fields of an alias."""
    if not text.startswith("@"):
        return text
    if text.lower() not in ALIASES:
        refuse_cron(text, f"is no alias: the aliases are {' '.join(ALIASES)}")
    return ALIASES[text.lower()]


def _sim(text: str) -> CronSim:
    """Parse a cron expression; raise with the part and the field that are wrong."""
    expression = _expression(text)
    fields = expression.split()
    if len(fields) == len(FIELDS) + 1:
        refuse_cron(text, 'has 6 fields: seconds are not supported here, write 5 fields or every("10s")')
    if len(fields) != len(FIELDS):
        refuse_cron(text, f"has {len(fields)} field{'s' * (len(fields) != 1)}, not 5: {', '.join(FIELDS)}")
    try:
        sim = CronSim(expression, NOWHEN)
    except CronSimError:
        for place, field in enumerate(fields):
            _check_field(text, place, field)
        refuse_impossible(text)
    for place, field in enumerate(fields):
        _check_steps(text, place, field)
    return sim


def _check_steps(text: str, place: int, field: str) -> None:
    """Raise for a step above the number of values of a field: it never gets further than the first of them."""
    least, end = SPANS[place]
    for part in field.split(","):
        begin, _, step = part.partition("/")
        if int(step.lstrip("0")[:9] or 0) > end - least:
            first = least if begin == "*" else begin.partition("-")[0]
            often = f', or every("{step}{UNITS[place]}")' if place < len(UNITS) and len(step) < 5 else ""
            name = list(FIELDS)[place]
            refuse_cron(
                text,
                f"has a step above {end - least} in field {place + 1}, {name}: "
                f"{shown(part)} is due at {first} only: write {first}{often}",
            )


UNITS = "mhd"  # of minute, hour and day of month, as durations have them


def _check_field(text: str, place: int, field: str) -> None:
    """Raise with the part of a field that cronsim cannot parse."""
    name, allowed = list(FIELDS.items())[place]
    for part in field.split(","):
        try:
            CronSim(" ".join([*["*"] * place, part, *["*"] * (len(FIELDS) - 1 - place)]), NOWHEN)
        except CronSimError:
            why = f"is not {allowed}" if part.isalnum() else f"is no value, range or step of {allowed}"
            advice = ": write * for any" if part == "?" else ""
            if instead := _around_the_end(part, place):
                why, advice = "ends before it begins", f": write {instead}"
            refuse_cron(text, f"is wrong in field {place + 1}, {name}: {shown(part)} {why}{advice}")


def _around_the_end(part: str, place: int) -> str | None:
    """Return what to write for a range that ends before it begins: `22,23,0-2` for `22-2`."""
    numbers = [str(number) for number in range(*SPANS[place])]
    names = NAMES.get(place, numbers)
    known = {text: at for texts in (numbers, names) for at, text in enumerate(texts)}
    if place == SUNDAY_PLACE:
        known["7"] = 0
    match = re.fullmatch(r"(\w+)-(\w+)(?:/0*([1-9][0-9]{0,2}))?", part.lower())
    if match is None or match[1] not in known or match[2] not in known:
        return None
    begin, end, step = known[match[1]], known[match[2]], int(match[3] or 1)
    texts = names if match[1] in names else numbers
    ring = texts[begin:] + texts[: end + 1] if end < begin else texts[begin : end + 1]
    if step > 1:
        return ",".join(ring[::step])
    if len(ring) == len(texts):
        return "*"
    tail = len(texts) - begin
    return ",".join(_span(run) for run in (ring[:tail], ring[tail:]) if run)


def _span(run: Sequence[str]) -> str:
    return f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(run)


def refuse_impossible(text: str, tz: str = "UTC") -> NoReturn:
    """Raise for an expression whose fields are valid, but which no day matches."""
    said = [
        f"field {place}, {name} {shown(field)}"
        for place, (name, field) in enumerate(zip(FIELDS, _expression(text).split(), strict=True), 1)
        if field != "*" and place > (2 if tz == "UTC" else 1)  # elsewhere some days lack an hour
    ]
    refuse_cron(text, f"never fires: no day fits {' and '.join(said)}" + ("" if tz == "UTC" else f" in {tz}"))


def refuse_cron(text: str, why: str) -> NoReturn:
    """Raise with the text and the reason."""
    raise ConfigError(f"schedule {shown(text)} {why}") from None
