"""Operations on the limits of queues: depth, ageing of priorities, the budget of retries.

A queue without limits is claimed by `ops.claim`; now and then, its worker reads a tiny table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from duly.errors import ConfigError
from duly.model import Claimed, Limit
from duly.rules import failure
from duly.store import ops
from duly.store.op import Op

OFF = -1  # the value that removes a limit


def limit_queue(
    name: str,
    *,
    max_depth: int | None = None,
    ageing_ms: int | None = None,
    retry_share: float | None = None,
    by: str,
    why: str,
    now: int | None = None,
) -> Op[None]:
    """Change the limits of a queue; None leaves a limit unchanged, `OFF` removes it."""
    if not name or name != failure.escape_text(name):
        raise ConfigError(f"queue is {name!r}: a name is not empty and has no NUL and no lone surrogate")
    params = {
        "name": name,
        "max_depth": max_depth,
        "ageing_ms": ageing_ms,
        "retry_share": None if retry_share is None else float(retry_share),
        "by": failure.escape_text(by),
        "why": failure.escape_text(why),
        "now": now,
    }
    return Op("limit_queue", ("limit_queue",), params, lambda rows: None)


def limits(*, now: int | None = None) -> Op[list[Limit]]:
    """List the limits of queues, who set them and why."""
    return Op("limits", ("limits",), {"now": now}, lambda rows: [Limit(*row) for row in rows], writes=False)


def depth(queue: str, *, enough: int) -> Op[int]:
    """Count the jobs that wait in a queue, up to `enough`."""
    return Op("depth", ("depth",), {"queue": queue, "enough": enough}, lambda rows: int(rows[0][0]), writes=False)


def note_depth(queue: str, depth: int, *, max_depth: int, now: int | None = None) -> Op[bool]:
    """Store a count for all processes. False: the limit has changed, or another process stored a newer count."""
    params = {"queue": queue, "depth": depth, "max_depth": max_depth, "now": now}
    return Op("note_depth", ("note_depth",), params, bool)


def claim(
    queue: str,
    *,
    ageing_ms: int | None,
    retries: int | None,
    limit: int,
    token: int,
    worker: str,
    tasks: Iterable[str] | None = None,
    now: int | None = None,
) -> Op[list[Claimed]]:
    """Lease up to `limit` due jobs of `queue` as `ops.claim` does, but no suspects, and within the limits of the queue.

    With `ageing_ms`, a job that is due earlier by that much counts as one priority higher. At most `retries` due
    retries are taken; further ones only fill room that is left.
    """
    plain = ops.claim(queue, limit=limit, token=token, worker=worker, tasks=tasks, now=now)
    params: dict[str, Any] = {**plain.params, "ageing_ms": ageing_ms, "retries": retries}
    del params["alone"]
    sections = ("uncompiled", "claim_shaped")
    again = Op("claim", ("await_claim", *sections), params, ops.claimed)
    return replace(again, sections=sections, repeat=again)
