"""Finds a schedule by its name, and writes its state for people."""

from __future__ import annotations

from typing import Any

import msgspec

from duly.cli import output
from duly.cli.queues import did_you_mean
from duly.duly import Duly
from duly.errors import ConfigError, ScheduleNotFound
from duly.model import ScheduleRecord
from duly.rules.timing import Mode, Timing, explain


def find_schedule(app: Duly, name: str) -> ScheduleRecord:
    """Read a schedule; the error names the one with the most similar name."""
    schedule = app.schedules.get(name) if name.isprintable() else None  # else it may not be valid text
    if schedule is None:
        known = {one.name for one in app.schedules.list()}
        raise ScheduleNotFound(f"no schedule is named {name!r}{did_you_mean(name, known)}")
    return schedule


def plain(schedule: ScheduleRecord) -> dict[str, Any]:
    """Give the fields of a schedule for JSON, with its state and its rule in words."""
    return {**msgspec.to_builtins(schedule), "state": state(schedule), "when": when(schedule)}


def state(schedule: ScheduleRecord) -> str:
    """Name the state of a schedule."""
    if schedule.paused_at is not None:
        return "paused"
    if schedule.next_at is not None:
        return "active"
    return "running" if schedule.mode == Mode.DELAY else "ended"


def when(schedule: ScheduleRecord) -> str:
    """Write the rule of a schedule in words."""
    try:
        return explain(timing_of(schedule))
    except ConfigError:  # of a newer version of duly
        return schedule.spec


def timing_of(schedule: ScheduleRecord) -> Timing:
    """Give the rule of a schedule."""
    return Timing(Mode(schedule.mode), schedule.spec, schedule.tz, schedule.interval_ms, schedule.anchor_at)


def pause_text(schedule: ScheduleRecord, now: int) -> str:
    """Write who paused a schedule, when and why."""
    if schedule.paused_at is None:
        return ""
    why = f": {schedule.paused_why}" if schedule.paused_why else ""
    return f"by {schedule.paused_by} {output.ago(schedule.paused_at, now)}{why}"
