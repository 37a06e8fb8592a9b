"""Checks values that many calls take: whole numbers, names, moments."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from duly.errors import ConfigError
from duly.rules import failure

_HIGHEST = 2**31 - 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def whole(value: Any, what: str, *, least: int = -_HIGHEST - 1, most: int = _HIGHEST) -> int:
    """Raise unless it is a whole number that every store can keep."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{what} is {value!r}: give a whole number from {least} to {most}")
    return value


def named(value: Any, what: str) -> str:
    """Raise unless every store can keep it as a name."""
    if not isinstance(value, str) or not value or value != failure.escape_text(value):
        raise ConfigError(f"{what} is {value!r}: a name is a text, not empty, without NUL and lone surrogates")
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
