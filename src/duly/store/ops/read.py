"""Operations that read jobs, queues, events and dead letters."""

from __future__ import annotations

import json
import re
from typing import Any
from uuid import UUID

import msgspec

from duly.model import MANY, Attempt, DeadFigure, Event, JobRecord, ParkedFigure, QueueFigure, State, Step
from duly.rules import codec
from duly.rules import envelope as envelopes
from duly.rules.why import Why, explain, facts_of
from duly.store.op import FIRST_ID, LAST_ID, Op, Row, Rows, columns, record, uuid_text


def queues(*, now: int | None = None) -> Op[list[QueueFigure]]:
    """Count the jobs of each queue that has live jobs, a pause or a living worker, by name."""

    def read(rows: Rows) -> list[QueueFigure]:
        return sorted((QueueFigure(*row) for row in rows), key=lambda figure: figure.name)

    return Op("queues", ("uncompiled", "queues"), {"enough": MANY + 1, "now": now}, read, writes=False)


def parked() -> Op[list[ParkedFigure]]:
    """Count the jobs that wait for a worker that knows their task, by task and queue."""

    def read(rows: Rows) -> list[ParkedFigure]:
        return sorted((ParkedFigure(*row) for row in rows), key=lambda figure: (figure.task, figure.queue))

    return Op("parked", ("uncompiled", "parked"), {"enough": MANY + 1}, read, writes=False)


def get(job_id: str, *, now: int | None = None) -> Op[JobRecord | None]:
    """Read one job, live or finished."""
    page = listing(limit=1, now=now)
    params = {**page.params, "first": uuid_text(job_id), "last": uuid_text(job_id)}
    return Op("get", page.sections, params, lambda rows: _record(rows[0]) if rows else None, writes=False)


def listing(
    *,
    state: State | None = None,
    task: str | None = None,
    queue: str | None = None,
    batch_id: str | None = None,
    since: int | None = None,
    error: str | None = None,
    prefix: str | None = None,
    before: str | None = None,
    limit: int = 100,
    now: int | None = None,
) -> Op[list[JobRecord]]:
    """List jobs, newest first; for the next page give the last id of this one as `before`.

    `prefix` is the beginning of an id, with its dashes or without.
    """
    first, last = id_range(prefix, before)
    params = {
        "state": state and state.value,
        "task": task,
        "queue": queue,
        "batch_id": batch_id and uuid_text(batch_id),
        "since": since,
        "error": error,
        "first": first,
        "last": last,
        "limit": limit,
        "now": now,
    }
    return Op("list", ("list",), params, _records, writes=False)


def id_range(prefix: str | None, before: str | None) -> tuple[str, str]:
    """Return the first and the last id that begin with a prefix and come before another id."""
    first, last = _beginning_with(prefix or "")
    return first, last if before is None else min(last, _preceding(before))


def _beginning_with(prefix: str) -> tuple[str, str]:
    """Return the first and the last id that begin with a prefix. If no id can begin so, the range is empty."""
    digits = prefix.strip().replace("-", "").lower()
    if not _DIGITS.fullmatch(digits):
        return LAST_ID, FIRST_ID
    return uuid_text(digits.ljust(32, "0")), uuid_text(digits.ljust(32, "f"))


_DIGITS = re.compile(r"[0-9a-f]{0,32}")


def _preceding(job_id: str) -> str:
    return str(UUID(int=max(UUID(uuid_text(job_id)).int - 1, 0)))


def dead_list(
    *,
    task: str | None = None,
    queue: str | None = None,
    batch_id: str | None = None,
    error: str | None = None,
    since: int | None = None,
    until: int | None = None,
    partial: bool = False,
    all: bool = False,
    after: str = FIRST_ID,
    limit: int = 100,
    now: int | None = None,
) -> Op[list[JobRecord]]:
    """List dead jobs, oldest first, without those that were replayed or resolved unless `all`."""
    params = {
        "task": task,
        "queue": queue,
        "batch_id": batch_id and uuid_text(batch_id),
        "error": error,
        "since": since,
        "until": until,
        "partial": partial,
        "all": all,
        "after": uuid_text(after),
        "limit": limit,
        "now": now,
    }
    return Op("dead_list", ("dead_list",), params, _records, writes=False)


def dead_metrics(*, all: bool = False, now: int | None = None) -> Op[list[DeadFigure]]:
    """Count dead jobs by task and reason, with the age of the oldest."""

    def read(rows: Rows) -> list[DeadFigure]:
        return [DeadFigure(task, reason, count, moment - oldest) for task, reason, count, oldest, moment in rows]

    return Op("dead_metrics", ("dead_metrics",), {"all": all, "now": now}, read, writes=False)


def attempts(job_id: str) -> Op[list[Attempt]]:
    """Read the attempts of a job that did not succeed."""
    return Op(
        "attempts", ("attempts",), {"id": uuid_text(job_id)}, lambda rows: [Attempt(*row) for row in rows], writes=False
    )


def steps(job_id: str) -> Op[list[Step]]:
    """Read the ledger of a job."""
    return Op("steps", ("steps",), {"id": uuid_text(job_id)}, lambda rows: [Step(*row) for row in rows], writes=False)


def events(*, job_id: str | None = None, after: int = 0, limit: int = 100) -> Op[list[Event]]:
    """Read the audit log, oldest first."""
    params = {"after": after, "limit": limit} | ({} if job_id is None else {"job_id": uuid_text(job_id)})
    section = "events" if job_id is None else "job_events"
    return Op("events", (section,), params, lambda rows: [_event(row) for row in rows], writes=False)


def why(job_id: str, *, now: int | None = None) -> Op[Why | None]:
    """Explain why a job is not running: the first reason found. None: no job has this id."""

    def read(rows: Rows) -> Why | None:
        return explain(facts_of(rows[0])) if rows else None

    return Op("why", ("why",), {"id": uuid_text(job_id), "now": now}, read, writes=False)


def clock() -> Op[int]:
    """Read the database's clock."""
    return Op("clock", ("clock",), {"now": None}, lambda rows: int(rows[0][0]), writes=False)


def _records(rows: Rows) -> list[JobRecord]:
    return [_record(row) for row in rows]


_columns = columns(
    "id", "task", "queue", "priority", "state", "payload", "envelope", "key", "attempt", "max_attempts", "crashes",
    "created_at", "due_at", "expires_at", "worker", "lease_until", "heartbeat_at", "progress", "progress_message",
    "cancel_requested_at", "finished_at", "result", "result_until", "reason", "error", "batch_id", "schedule", "lane",
    "origin", "replay_of", "replay_count", "replayed_as", "resolved_at", "resolved_by", "resolved_why", "moment",
)  # fmt: skip


def _record(row: Row) -> JobRecord:
    found = _columns(row)
    carried = envelopes.unpack(found["envelope"])
    if found["result_until"] is not None and found["result_until"] <= found["moment"]:
        found["result"] = None
    found |= {name: None if found[name] is None else _decoded(found[name]) for name in ("payload", "result")}
    found["correlation_id"] = carried.correlation_id or found["id"]
    return record(JobRecord, msgspec.structs.asdict(carried) | found)


def _event(row: Row) -> Event:
    event = Event(*row)
    if event.name != "job.replayed" or codec.MARK not in (event.data or ""):
        return event
    data = {
        name: codec.each_text(part, codec.unmark) if name in ("old", "new") else part
        for name, part in msgspec.json.decode(event.data or "").items()
    }
    return msgspec.structs.replace(event, data=json.dumps(data))  # in ASCII, which holds every character


def _decoded(text: str) -> Any:
    try:
        return codec.plain(text)
    except codec.UNREADABLE:  # changed by hand: one such row must not hide the others
        return text
