"""Finds a batch by its id, and writes its state for people."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from duly.app.batches import Batch
from duly.cli.database import AN_ID, complete_id, is_id
from duly.duly import Duly
from duly.errors import BatchNotFound
from duly.model import BatchRecord

COUNTS = ("total", "pending", "running", "succeeded", "partial", "dead", "cancelled")
ENDED = COUNTS[3:]


def whole_batch_id(app: Duly, given: str) -> str:
    """Complete the id of a batch of which the first digits were given."""
    if not is_id(given):
        raise BatchNotFound(f"{given!r} is not the id of a batch: {AN_ID}{_newest(app, given)}")
    if found := complete_id(given, lambda text: app.batches.list(prefix=text, limit=4), "batches"):
        return found
    raise BatchNotFound(f"no batch has an id that begins with {given}")


def _newest(app: Duly, name: str) -> str:
    """Name the newest batch of this name, where a name was given instead of an id."""
    found = app.batches.list(name=name, limit=1) if name.isprintable() else []  # else it may not be valid text
    return f"; the newest batch of that name is {found[0].id}" if found else ""


def find_batch(app: Duly, given: str) -> Batch:
    """Find a batch; the error tells if the id is that of a job."""
    batch_id = whole_batch_id(app, given)
    try:
        return app.batches.get(batch_id)
    except BatchNotFound as error:
        job = app.get(batch_id)
        if job is None:
            raise
        whose = "it is that of a job" if job.batch_id is None else f"it is that of a job of batch {job.batch_id}"
        raise BatchNotFound(f"{error}: {whose}") from None


def plain(record: BatchRecord) -> dict[str, Any]:
    """Give the fields of a batch for JSON, with its state and its success."""
    return {**msgspec.to_builtins(record), "state": state(record), "success": record.success}


def state(record: BatchRecord) -> str:
    """Name the state of a batch."""
    if record.complete:
        return "complete"
    return "unsealed" if record.sealed_at is None else "open"


def ended(record: BatchRecord) -> int:
    """Count the jobs of a batch that have ended."""
    return sum(getattr(record, name) for name in ENDED)


def percent(record: BatchRecord) -> str:
    """Write which share of a batch has ended, rounded down: 100% means all of it."""
    if not record.total and not record.complete:
        return "-"
    return f"{math.floor(record.percent * 10) / 10:g}%"
