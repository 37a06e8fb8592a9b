"""Checks values that many calls take: whole numbers, names, moments."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from duly.errors import ConfigError
from duly.rules import failure
from duly.rules.messages import brief

_HIGHEST = 2**31 - 1
MOST = 1_000_000_000  # of limits and slots
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def count(value: Any, what: str) -> int:
    """Raise unless it is a whole number, at least 1, that every query can take as a limit."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        raise ConfigError(f"{what} is {brief(value)}: give a whole number from 1 to {MOST:,}")
    return value


def whole(value: Any, what: str, *, least: int = -_HIGHEST - 1, most: int = _HIGHEST) -> int:
    """Raise unless it is a whole number that every store can keep."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{what} is {brief(value)}: give a whole number from {least} to {most}")
    return value


def named(value: Any, what: str) -> str:
    """Raise unless every store can keep it as a name."""
    if not isinstance(value, str) or not value or value != failure.escape_text(value):
        raise ConfigError(f"{what} is {brief(value)}: a name is a text, not empty, without NUL and lone surrogates")
    return value


def moment(at: datetime, what: str, *, down: bool = False) -> int:
    """Return an aware datetime in the milliseconds that the database keeps, rounded up unless `down`."""
    if not isinstance(at, datetime):
        raise ConfigError(f"{what} is of type {type(at).__name__}: give an aware datetime, or a duration as delay=")
    if at.utcoffset() is None:
        raise ConfigError(
            f"{what} is {at}, which has no time zone: give an aware datetime, as datetime.now(UTC) is one"
        )
    ms = timedelta(milliseconds=1)
    return max(0, (at - _EPOCH) // ms if down else -((_EPOCH - at) // ms))  # not by way of a float
