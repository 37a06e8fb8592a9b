"""Writes times in the zone of a schedule and in UTC, and reads the dates that a user gives."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, tzinfo

from duly.cli import output
from duly.errors import ConfigError
from duly.model import ScheduleRecord
from duly.rules.checks import moment
from duly.rules.timing import zone

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FIRST_YEAR, LAST_YEAR = 1970, 9998


def place_of(tz: str) -> tzinfo:
    """Give the zone to write times in: UTC where the zone is unknown."""
    try:
        return zone(tz)
    except ConfigError:
        return UTC


def known_zone(schedule: ScheduleRecord) -> tzinfo:
    """Give the zone of a schedule; raise where it is unknown on this machine."""
    try:
        return zone(schedule.tz)
    except ConfigError as error:
        raise ConfigError(f"{schedule.name}: {error}") from None


def in_zone(at: int, place: tzinfo) -> datetime:
    """Turn milliseconds into a datetime of a zone."""
    return (EPOCH + timedelta(milliseconds=at)).astimezone(place)


def local_text(at: int, place: tzinfo) -> str:
    """Write a time in a zone, with its offset from UTC."""
    return in_zone(at, place).isoformat(" ", "milliseconds" if at % 1000 else "seconds")


def utc_text(at: int) -> str:
    """Write a time in UTC."""
    return local_text(at, UTC).removesuffix("+00:00")


def both_texts(at: int, tz: str) -> str:
    """Write a time in a zone and in UTC."""
    utc = f"{utc_text(at)} UTC"
    return utc if tz == "UTC" else f"{local_text(at, place_of(tz))} ({utc})"


def headings(tz: str) -> list[str]:
    """Give the headings of the columns for a time."""
    return ["UTC"] if tz == "UTC" else [tz, "UTC"]


def cells(at: int, tz: str) -> list[str]:
    """Write a time in a zone and in UTC, once if they are the same."""
    return [utc_text(at)] if tz == "UTC" else [local_text(at, place_of(tz)), utc_text(at)]


def read_moment(text: str, option: str, schedule: ScheduleRecord, *, down: bool = True) -> int:
    """Read a date in milliseconds, rounded down or up; without a zone it is in that of the schedule."""
    at = _read_date(text, option)
    at = at if at.tzinfo else at.replace(tzinfo=known_zone(schedule))
    return moment(at, option, down=down)


def _read_date(text: str, option: str) -> datetime:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{option} is {text!r}, which is no date: write 2026-01-31, 2026-01-31T12:00 or 2026-01-31T12:00+01:00"
        ) from None
    if not FIRST_YEAR <= at.year <= LAST_YEAR:
        raise ConfigError(f"{option} is {text!r}: give a year from {FIRST_YEAR} to {LAST_YEAR}")
    return at


def remark_zones(schedule: ScheduleRecord, given: Mapping[str, str]) -> None:
    """Print how dates without a zone were read."""
    for option, text in given.items():
        if _read_date(text, option).tzinfo is None:
            at = both_texts(read_moment(text, option, schedule), schedule.tz)
            output.remark(f"{option} has no zone: read as {at}")
