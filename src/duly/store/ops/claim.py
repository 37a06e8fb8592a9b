"""Operations of a worker on the jobs that it claims and holds."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace as replace_fields

from duly.errors import ConfigError
from duly.model import Claimed
from duly.rules import envelope as envelopes
from duly.store.op import FIRST_ID, HIGHEST_PRIORITY, LOWEST_PRIORITY, Held, Op, Rows, clean, held_text, json_text


class Mark(NamedTuple):
    """A position in the order in which a queue is claimed, within one priority."""

    priority: int
    due_at: int
    id: str


class Head(NamedTuple):
    """The position of the first job that a claim would take, and how long the database took to find it.

    None: this database always finds it quickly.
    """

    mark: Mark | None
    took_ms: float | None


# The end of a worker's name for jobs that run in a child process. The worker notices if the child dies, so it proves
# nothing against such a job if the worker stops sending heartbeats.
CHILD = "/child"


def claim(
    queue: str,
    *,
    limit: int,
    token: int,
    worker: str,
    tasks: Iterable[str] | None = None,
    alone: bool = False,
    marks: Iterable[Mark] = (),
    now: int | None = None,
) -> Op[list[Claimed]]:
    """Lease up to `limit` due jobs of `queue`, best first; `again` returns the same jobs by the same token.

    `tasks` are those the worker knows. `alone` takes suspects, and only suspects. `marks` let the database skip deleted
    rows: in the priority of each mark, the claim starts at the mark. Such a claim takes no suspects.
    """
    if not 1 <= token < 2**53:
        raise ConfigError(
            f"the token of a claim is a number from 1 to 2**53 - 1 (keys.new_token makes one), not {token}"
        )
    if limit < 0:
        raise ConfigError(f"a claim takes 0 or more jobs, not {limit}")
    params: dict[str, Any] = {
        "queue": queue,
        "limit": limit,
        "token": token,
        "worker": worker,
        "tasks": None if tasks is None else json_text(sorted(tasks)),
        "alone": alone,
        "now": now,
    }
    section = "claim"
    if parts := _parts(queue, marks):
        section, params = "claim_marked", {**params, "parts": json_text(parts), "alone": False}
    again = Op("claim", ("await_claim", section, "recall"), params, _best_first)
    return Op("claim", (section,), params, _best_first, repeat=again)


def _parts(queue: str, marks: Iterable[Mark]) -> list[dict[str, Any]]:
    """Cut the order of a queue into parts, best first: from each mark to the end of its priority, and all between."""
    parts, top = [], HIGHEST_PRIORITY
    for mark in sorted(marks, reverse=True):
        if top > mark.priority:
            parts.append(_part(queue, top, mark.priority + 1))
        parts.append(_part(queue, mark.priority, mark.priority, mark.due_at, mark.id))
        top = mark.priority - 1
    if parts and top >= LOWEST_PRIORITY:
        parts.append(_part(queue, top, LOWEST_PRIORITY))
    return parts


def _part(queue: str, top: int, bottom: int, due_at: int = 0, id_: str = FIRST_ID) -> dict[str, Any]:
    return {"queue": queue, "top": top, "bottom": bottom, "due_at": due_at, "id": id_}


def head(queue: str, *, tasks: Iterable[str] | None = None, now: int | None = None) -> Op[Head]:
    """Read which job a claim of `queue` would take first, and how long the database takes to find it."""
    params = {"queue": queue, "tasks": None if tasks is None else json_text(sorted(tasks)), "now": now}
    return Op("head", ("head",), params, _head, writes=False)


def _head(rows: Rows) -> Head:
    for priority, due_at, id_, took_ms in rows:
        return Head(None if id_ is None else Mark(priority, due_at, id_), took_ms)
    return Head(None, None)


def recall(token: int) -> Op[list[Claimed]]:
    """Read the jobs that a token holds, without taking new ones; waits for a claim in flight."""
    return Op("claim", ("await_claim", "recall"), {"token": token}, claimed)


def _best_first(rows: Rows) -> list[Claimed]:
    """Read the rows of a claim. A repetition may return a job twice: as taken now and as held."""
    jobs = list({job.id: job for job in claimed(rows)}.values())
    # Sorting by one value after the other takes half as long, because the rows are nearly in this order.
    jobs.sort(key=_by_id)
    jobs.sort(key=_by_due_at)
    jobs.sort(key=_by_priority, reverse=True)
    return jobs


_by_id, _by_due_at, _by_priority = map(attrgetter, ("id", "due_at", "priority"))


def claimed(rows: Rows) -> list[Claimed]:
    """Read leased jobs. Each is a row of values, or one JSON text that has the envelope last."""
    if rows and len(rows[0]) == 1:
        return [_from_text(row[0]) for row in rows]
    return [
        Claimed(*row[:6], *row[7:11], bool(row[11]), *row[12:], envelopes.unpack(row[6]))  # type: ignore[call-arg]
        for row in rows
    ]


_read_text = msgspec.json.Decoder(Claimed, strict=False).decode  # not strict: SQLite has 0 and 1 for false and true
_WITHOUT = ",null]"  # the end of the text of a job without an envelope, as most are


def _from_text(text: str) -> Claimed:
    """Decode a job in one step: decoding a list of values first takes twice as long."""
    if text.endswith(_WITHOUT):
        return _read_text(f"{text[: -len(_WITHOUT)]}]")
    *values, envelope = msgspec.json.decode(text)
    return replace_fields(msgspec.convert(values, Claimed, strict=False), envelope=envelopes.unpack(envelope))


def extend(held: Iterable[Held], *, now: int | None = None) -> Op[dict[str, int | None]]:
    """Renew leases. Return the jobs still held, each with the time it was asked to cancel; the others are lost."""
    return Op("extend", ("extend",), {"held": held_text(held), "now": now}, _extended, urgent=True)


def _extended(rows: Rows) -> dict[str, int | None]:
    return dict(rows)  # type: ignore[arg-type]


def progress(held: Held, percent: float, message: str | None = None) -> Op[bool]:
    """Store the progress of a running job, from 0 to 100. False: the lease is lost."""
    percent = min(max(percent, 0.0), 100.0) if percent == percent else 0.0  # a NaN is no progress
    params = {"id": held.id, "token": held.token, "progress": percent, "message": clean(message)}
    return Op("progress", ("progress",), params, bool)


def heartbeat(held: Held, *, now: int | None = None) -> Op[bool]:
    """Store that the handler is alive; this does not extend the lease. False: the lease is lost."""
    return Op("heartbeat", ("heartbeat",), {"id": held.id, "token": held.token, "now": now}, bool)
