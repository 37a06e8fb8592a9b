"""Durations as people write them ("1h30m", 90, timedelta) turned into whole milliseconds, and back."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import TypeAlias

from duly.errors import ConfigError

Duration: TypeAlias = str | int | float | timedelta

UNITS = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
LONGEST_MS = 36_525 * UNITS["d"]

_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Zµμ]+)\s*")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_FORMS = "write it as '5m', '1h30m', '250ms', seconds or a timedelta"


def to_ms(value: Duration, *, what: str = "duration") -> int:
    """Return `value` in whole milliseconds; anything above zero is at least one."""
    match value:
        case bool():
            raise ConfigError(f"{what} is {value}, which is not a duration: {_FORMS}")
        case int() | float():
            exact = _finite(value, what) * 1_000
        case timedelta():
            exact = value / timedelta(milliseconds=1)
        case str():
            exact = _parse(value, what)
        case _:
            raise ConfigError(f"{what} is of type {type(value).__name__}, which is not a duration: {_FORMS}")
    if exact < 0:
        raise ConfigError(f"{what} is negative: give a duration of zero or more")
    if exact > LONGEST_MS:
        raise ConfigError(f"{what} is longer than 100 years: give a shorter duration")
    return max(1, round(exact)) if exact else 0


def _finite(value: int | float, what: str) -> int | float:
    """Raise for NaN and infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{what} is {value}, which is not a duration: {_FORMS}")
    return value


def _parse(text: str, what: str) -> float:
    """Add up the parts of a text such as "1h 30m"; a bare number counts seconds."""
    bare = text.strip()
    if not bare:
        raise ConfigError(f"{what} is empty: {_FORMS}")
    if bare.startswith("-"):
        raise ConfigError(f"{what} is {_shown(text)}, which is negative: give a duration of zero or more")
    if _NUMBER.fullmatch(bare):
        return float(bare) * UNITS["s"]
    total, end = 0.0, 0
    while part := _PART.match(bare, end):
        total += float(part[1]) * _unit(part[2], text, what)
        end = part.end()
    if end != len(bare):
        raise ConfigError(f"{what} is {_shown(text)}, which is not a duration: {_FORMS}")
    return total


def _unit(unit: str, text: str, what: str) -> int:
    """Return the milliseconds of `unit`; raise with a suggestion if there is no such unit."""
    if unit in UNITS:
        return UNITS[unit]
    hint = _meant(unit.lower())
    advice = f"did you mean '{hint}'? " if hint else ""
    raise ConfigError(
        f"{what} is {_shown(text)}, where '{unit[:20]}' is no unit: {advice}the units are {' '.join(UNITS)}"
    )


def _meant(unit: str) -> str | None:
    """Guess the unit behind "hours", "mins", "Sec" or "S"; months and years have no fixed length."""
    if unit.startswith(("mo", "y")):
        return None
    if unit.startswith(("ms", "milli")):
        return "ms"
    return unit[0] if unit[0] in UNITS else None


def _shown(text: str) -> str:
    """Quote a value, shortened so that a message stays one line."""
    return repr(text if len(text) <= 40 else f"{text[:40]}…")


def describe(ms: int) -> str:
    """Write a duration for people: "1h 30m"."""
    parts = []
    for unit, size in UNITS.items():
        if unit == "w":  # "10d" reads better than "1w 3d"
            continue
        count, ms = divmod(ms, size)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts) or "0s"
