"""Rates of limits, and the names of lanes."""

from __future__ import annotations

import re

from msgspec import Struct

from duly.errors import ConfigError
from duly.rules.durations import to_ms
from duly.rules.messages import brief

MOST_PERMITS = 1000  # starts that a lane remembers
WORDS = {
    "s": 1,
    "sec": 1,
    "second": 1,
    "m": 60,
    "min": 60,
    "minute": 60,
    "h": 3600,
    "hour": 3600,
    "d": 86400,
    "day": 86400,
}


class Rate(Struct, frozen=True):
    """At most `count` jobs in any `per_ms` milliseconds."""

    count: int
    per_ms: int

    def __str__(self) -> str:
        """Write it for people."""
        for word, seconds in (("day", 86400), ("h", 3600), ("min", 60), ("s", 1)):
            if self.per_ms == seconds * 1000:
                return f"{self.count}/{word}"
        return f"{self.count}/{self.per_ms / 1000:g}s"


def rate_of(text: object, what: str) -> Rate:
    """Read a rate such as `100/min` or `15/10s`.

    A lane remembers a thousand starts. Above that, the same rate is spread more evenly: 6000/min is 1000 in 10 s.
    """
    found = _RATE.fullmatch(text.replace(" ", "")) if isinstance(text, str) else None
    if found is None:
        raise ConfigError(f"{what} is {brief(text)}: give a number and a time, as in '100/min', '15/10s' or '1000/day'")
    count, unit = int(found["count"].replace("_", "")), found["unit"]
    per_ms = WORDS[unit] * 1000 if unit in WORDS else _span(unit, what, text)
    if count < 1 or per_ms < 1:
        raise ConfigError(f"{what} is {brief(text)}: at least one job in some time; to stop a task, pause it")
    if count > MOST_PERMITS:
        count, per_ms = MOST_PERMITS, -(-per_ms * MOST_PERMITS // count)
    return Rate(count, per_ms)


_RATE = re.compile(r"(?P<count>[0-9][0-9_]*)/(?P<unit>[0-9a-z.]+)")


def _span(unit: str, what: str, text: object) -> int:
    try:
        return to_ms(unit, what=what)
    except ConfigError:
        raise ConfigError(
            f"{what} is {brief(text)}: {brief(unit)} is no time; give one as in '100/min', '15/10s' or '1000/day'"
        ) from None


def lane_of(task: str, key: str | None = None) -> str:
    """Name the lane of a task, or of one key of it. Names are unique."""
    name = task.replace("%", "%25").replace(":", "%3A")
    return name if key is None else f"{name}:{key}"
