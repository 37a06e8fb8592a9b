"""Operations on schedules.

Every firing is written by `fire`: by a scheduler, a trigger, a backfill, or after a pause. It names the revision of the
schedule on which the decision rests, and writes nothing if the revision has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from duly.model import Catchup, FireRecord, Overlap, ScheduleRecord
from duly.rules import codec, failure
from duly.rules import envelope as envelopes
from duly.rules.firing import Due, Firing, Run, Skip
from duly.rules.timing import Timing
from duly.store.op import Op, Row, columns, distinct, json_text, record, repeatable

# The reason for pausing a schedule that was removed from the code.
GONE = "no worker has it in its code any more"
FAR = 2**53 - 1
MOST = 2**31 - 1
BY = "duly"


class Definition(Struct, frozen=True):
    """A schedule to be written; `revision` is one more than the one that was read, 1 for a new schedule."""

    name: str
    task: str
    timing: Timing
    catchup: Catchup
    grace_ms: int | None
    overlap: Overlap
    jitter_ms: int
    pause_after: int | None
    terms: str
    payload: str
    envelope: str | None
    in_code: bool
    revision: int = 1
    next_at: int | None = None


# Fire


def next_fire(*, now: int | None = None) -> Op[tuple[int | None, int]]:
    """Read when the next schedule is due, and the current time."""
    return Op("next_fire", ("next_fire",), {"now": now}, lambda rows: (rows[0][0], rows[0][1]), writes=False)


def due(*, limit: int, beside: Iterable[str] = (), now: int | None = None) -> Op[list[Due]]:
    """Read the schedules that are due, the longest due first, without those named in `beside`."""
    return _due(None, limit, beside, now)


def one(name: str, *, now: int | None = None) -> Op[list[Due]]:
    """Read one schedule, due or not: a list of one or none."""
    return _due(name, 1, (), now)


def _due(name: str | None, limit: int, beside: Iterable[str], now: int | None) -> Op[list[Due]]:
    params = {
        "name": name and failure.escape_text(name),
        "limit": limit,
        "beside": json_text(sorted(beside)),
        "now": now,
    }
    return Op("due_schedules", ("due_schedules",), params, lambda rows: [_read_due(row) for row in rows], writes=False)


_due_columns = columns(
    "name", "mode", "spec", "tz", "interval_ms", "anchor_at", "catchup", "grace_ms", "overlap", "jitter_ms",
    "envelope", "revision", "next_at", "live", "skipped", "fired", "paused", "created_at", "now",
)  # fmt: skip


def _read_due(row: Row) -> Due:
    found = _due_columns(row)
    found["timing"] = record(Timing, found)
    found["envelope"] = envelopes.unpack(found["envelope"])
    found["live"] = bool(found["live"])
    found["skipped"] = found["skipped"] and _skip(*msgspec.json.decode(found["skipped"]))
    found["fired"] = msgspec.json.decode(found["fired"] or "[]")
    return record(Due, found)


def _skip(due_at: int, until_at: int | None, count: int, reason: str | None) -> Skip:
    return Skip(due_at, due_at if until_at is None else until_at, count, reason or "")


def live_runs(names: Iterable[str]) -> Op[list[str]]:
    """List the runs of schedules that have not ended and were not asked to cancel."""
    params = {"names": json_text(sorted(names))}
    return Op("live_runs", ("live_runs",), params, lambda rows: [row[0] for row in rows], writes=False)


def fire(firings: Sequence[Firing], *, now: int | None = None) -> Op[list[str]]:
    """Write firings. Return the names of the schedules that had not changed since they were read."""
    params = {
        "fires": json_text([_of(one, next_at=one.next_at, last_at=one.last_at, resume=one.resume) for one in firings]),
        "jobs": json_text([_of(one, **_job(run)) for one in firings for run in one.runs]),
        "forget": json_text([_of(one, due_at=due_at) for one in firings for due_at in one.forget]),
        "rows": json_text([_of(one, **row) for one in firings for row in _rows(one)]),
        "events": json_text([_of(one, **msgspec.structs.asdict(told)) for one in firings for told in one.told]),
        "ids": json_text([run.id for one in firings for run in one.runs]),
        "now": now,
    }
    sections = ("fire_lock", "fire_jobs", "hand_out", "fire_forget", "fire_rows", "fire_events", "fire_advance")
    return repeatable("fire", sections, params, distinct, look="fired", wakes=True)


def _of(firing: Firing, **fields: Any) -> dict[str, Any]:
    return {"name": firing.name, "revision": firing.revision, **fields}


def _job(run: Run) -> dict[str, Any]:
    envelope = envelopes.pack(run.envelope)
    return {"id": run.id, "due_at": run.due_at, "after_ms": run.after_ms, "envelope": envelope, "reason": run.reason}


def _rows(firing: Firing) -> list[dict[str, Any]]:
    fired = [
        {
            "due_at": run.due_at,
            "until_at": None,
            "count": 1,
            "outcome": "fired",
            "job_id": run.id,
            "reason": run.because,
        }
        for run in firing.runs
    ]
    skipped = [
        {
            "due_at": skip.due_at,
            "until_at": skip.until_at,
            "count": min(skip.count, MOST),
            "outcome": "skipped",
            "job_id": None,
            "reason": skip.reason,
        }
        for skip in firing.skips
    ]
    return fired + skipped


def unqueue(*, now: int | None = None) -> Op[list[str]]:
    """Start queued runs whose predecessors have all ended, if no ending has done so."""
    return Op("unqueue", ("uncompiled", "unqueue_lock", "unqueue"), {"now": now}, distinct, wakes=True)


# Define


def define(definitions: Sequence[Definition], *, now: int | None = None) -> Op[list[str]]:
    """Write schedules, each only if it is new or unchanged since it was read. Return the names of those written."""
    params = {"schedules": json_text([_defined(one) for one in definitions]), "now": now}
    return repeatable("define", ("define_schedules",), params, distinct, look="defined", wakes=True)


def _defined(one: Definition) -> dict[str, Any]:
    fields = msgspec.structs.asdict(one)
    return {**fields, **msgspec.structs.asdict(fields.pop("timing"))}


def readopt(names: Iterable[str]) -> Op[list[str]]:
    """Resume schedules that were paused because no code had them. Return their names."""
    return Op("readopt", ("readopt_schedules",), {"names": json_text(sorted(names)), "gone": GONE}, distinct)


def abandon(own: Iterable[str], *, now: int | None = None) -> Op[list[str]]:
    """Pause schedules that were defined in code and that no living worker defines any more. Return their names."""
    params = {"own": json_text(sorted(own)), "gone": GONE, "by": BY, "now": now}
    return repeatable("abandon", ("abandon_schedules",), params, distinct, look="abandoned")


def pause(name: str, *, by: str, why: str, now: int | None = None) -> Op[list[str]]:
    """Stop firing a schedule until it is resumed. Return its name, if it exists."""
    params = {**_escaped(name=name, by=by, why=why), "now": now}
    return Op("pause_schedule", ("pause_schedule",), params, distinct)


def delete(name: str, *, by: str, why: str, now: int | None = None) -> Op[list[str]]:
    """Delete a schedule; the jobs it fired stay. Return its name, if it existed."""
    params = {**_escaped(name=name, by=by, why=why), "now": now}
    return repeatable("delete_schedule", ("delete_schedule",), params, distinct, look="deleted_schedule")


# Read


class Listed(Struct, frozen=True):
    """A schedule as it is stored, and the current time."""

    record: ScheduleRecord
    definition: Definition
    now: int


def listing(
    *, names: Iterable[str] | None = None, after: str = "", limit: int = 1000, now: int | None = None
) -> Op[list[Listed]]:
    """List schedules by name, all or those in `names`; for the next page give the last name as `after`."""
    wanted = None if names is None else json_text(sorted(failure.escape_text(name) for name in names))
    params = {"names": wanted, "after": after, "limit": limit, "now": now}
    return Op("schedules", ("schedules",), params, lambda rows: [_listed(row) for row in rows], writes=False)


_listed_columns = columns(
    "name", "task", "mode", "spec", "tz", "interval_ms", "anchor_at", "catchup", "grace_ms", "overlap", "jitter_ms",
    "pause_after", "terms", "payload", "envelope", "in_code", "revision", "created_at", "changed_at", "next_at",
    "last_at", "dead_runs", "paused_at", "paused_by", "paused_why", "now",
)  # fmt: skip


def _listed(row: Row) -> Listed:
    found = _listed_columns(row)
    carried = envelopes.unpack(found["envelope"])
    definition = record(Definition, {**found, "timing": record(Timing, found)})
    found |= {"terms": msgspec.json.decode(found["terms"]), "payload": codec.plain(found["payload"])}
    found |= {"schema_version": carried.schema_version, "subject": carried.subject}
    return Listed(record(ScheduleRecord, found), definition, found["now"])


def fires(name: str, *, before: int = FAR, limit: int = 100) -> Op[list[FireRecord]]:
    """Read the firings of a schedule, newest first; for the next page give the last due time as `before`."""
    params = {"name": failure.escape_text(name), "before": before, "limit": limit}
    return Op("fires", ("fires",), params, lambda rows: [FireRecord(*row) for row in rows], writes=False)


def skipped_between(name: str, since: int, until: int) -> Op[list[Skip]]:
    """Read the runs of misses that overlap a window."""
    params = {"name": failure.escape_text(name), "since": since, "until": until}
    return Op("skipped", ("skipped_between",), params, lambda rows: [_skip(*row) for row in rows], writes=False)


def fired_between(name: str, since: int, until: int) -> Op[list[int]]:
    """Read the due times of a window that were fired."""
    params = {"name": failure.escape_text(name), "since": since, "until": until}
    return Op("fired", ("fired_between",), params, lambda rows: [row[0] for row in rows], writes=False)


def _escaped(**texts: str) -> dict[str, str]:
    """Escape characters that a database refuses."""
    return {name: failure.escape_text(text) for name, text in texts.items()}
