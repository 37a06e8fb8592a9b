"""Operations of a worker on the jobs that it takes and holds."""

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
    """A place in the order in which a queue is claimed, within one priority."""

    priority: int
    due_at: int
    id: str


class Head(NamedTuple):
    """Where the first job stands that a claim would take, and how long the database took to come to it.

    None: the database has no long ways to go.
    """

    mark: Mark | None
    took_ms: float | None


# What a worker's name ends in where a job runs in a child process of it: the child's death is seen by its worker, so a
# worker that stops beating says nothing against that job.
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
    """Lease up to `limit` due jobs of `queue`, best first; `again` gives the same jobs by the same token.

    `tasks` are those the worker knows. `alone` takes suspects, which nothing else does. `marks` spare the database the
    way over what is gone: in the priority of each, nothing that stands before it is looked for, and no suspects.
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
    """Cut the order of a queue, best first: from each mark to the end of its priority, and all that lies between."""
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
    """See what a claim of `queue` would take first, and how long the way to it is."""
    params = {"queue": queue, "tasks": None if tasks is None else json_text(sorted(tasks)), "now": now}
    return Op("head", ("head",), params, _head, writes=False)


def _head(rows: Rows) -> Head:
    for priority, due_at, id_, took_ms in rows:
        return Head(None if id_ is None else Mark(priority, due_at, id_), took_ms)
    return Head(None, None)


def recall(token: int) -> Op[list[Claimed]]:
    """Read what a token still holds, and take nothing new; a claim that is still on its way is waited for."""
    return Op("claim", ("await_claim", "recall"), {"token": token}, claimed)


def _best_first(rows: Rows) -> list[Claimed]:
    """Read a claim. Asked for again, it may tell both what it took just now and what it holds."""
    jobs = list({job.id: job for job in claimed(rows)}.values())
    # By one value after the other, which takes half as long: most come nearly in this order.
    jobs.sort(key=_by_id)
    jobs.sort(key=_by_due_at)
    jobs.sort(key=_by_priority, reverse=True)
    return jobs


_by_id, _by_due_at, _by_priority = map(attrgetter, ("id", "due_at", "priority"))


def claimed(rows: Rows) -> list[Claimed]:
    """Read jobs on lease, each a row of its values or of all of them as one text, which has the envelope last."""
    if rows and len(rows[0]) == 1:
        return [_from_text(row[0]) for row in rows]
    return [
        Claimed(*row[:6], *row[7:11], bool(row[11]), *row[12:], envelopes.unpack(row[6]))  # type: ignore[call-arg]
        for row in rows
    ]


_read_text = msgspec.json.Decoder(Claimed, strict=False).decode  # not strictly: SQLite has 0 and 1 for false and true
_WITHOUT = ",null]"  # how a text ends whose job has no envelope, as most have none


def _from_text(text: str) -> Claimed:
    """Read a job at once: to read a list of values and make a job of them takes twice as long."""
    if text.endswith(_WITHOUT):
        return _read_text(f"{text[: -len(_WITHOUT)]}]")
    *values, envelope = msgspec.json.decode(text)
    return replace_fields(msgspec.convert(values, Claimed, strict=False), envelope=envelopes.unpack(envelope))


def extend(held: Iterable[Held], *, now: int | None = None) -> Op[dict[str, int | None]]:
    """Renew leases; answers who is still held, and since when it is asked to cancel. The rest are lost."""
    return Op("extend", ("extend",), {"held": held_text(held), "now": now}, _extended, urgent=True)


def _extended(rows: Rows) -> dict[str, int | None]:
    return dict(rows)  # type: ignore[arg-type]


def progress(held: Held, percent: float, message: str | None = None) -> Op[bool]:
    """Note how far a running job is, clamped to 0 to 100. False: the lease is lost."""
    percent = min(max(percent, 0.0), 100.0) if percent == percent else 0.0  # a NaN is no progress
    params = {"id": held.id, "token": held.token, "progress": percent, "message": clean(message)}
    return Op("progress", ("progress",), params, bool)


def heartbeat(held: Held, *, now: int | None = None) -> Op[bool]:
    """Note that the handler itself is alive; the lease is another matter. False: the lease is lost."""
    return Op("heartbeat", ("heartbeat",), {"id": held.id, "token": held.token, "now": now}, bool)
