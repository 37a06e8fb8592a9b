"""Operations by which a worker records that it is alive."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from duly.model import WorkerRecord
from duly.store.op import Op, Row, columns, json_text, record


def register(
    worker: str,
    *,
    host: str,
    pid: int,
    queues: Iterable[str],
    tasks: Iterable[str],
    schedules: Iterable[str] = (),
    beat_ms: int,
    slots: int = 1,
    succeeded: int = 0,
    failed: int = 0,
    now: int | None = None,
) -> Op[None]:
    """Record that a worker is alive, the tasks it knows and its counts; repeated at every heartbeat."""
    params = {
        "id": worker,
        "host": host,
        "pid": pid,
        "queues": json_text(sorted(queues)),
        "tasks": json_text(sorted(tasks)),
        "schedules": json_text(sorted(schedules)),
        "beat_ms": beat_ms,
        "slots": slots,
        "succeeded": succeeded,
        "failed": failed,
        "now": now,
    }
    return Op("register", ("register",), params, lambda rows: None, urgent=True)


def leave(worker: str) -> Op[None]:
    """Record that a worker has stopped."""
    return Op("leave", ("leave",), {"id": worker}, lambda rows: None)


def workers(*, now: int | None = None) -> Op[list[WorkerRecord]]:
    """List the workers that have registered."""
    return Op("workers", ("workers",), {"now": now}, lambda rows: [_worker(row) for row in rows], writes=False)


_columns = columns(
    "id", "host", "pid", "queues", "tasks", "beat_ms", "started_at", "seen_at", "slots", "running", "succeeded",
    "failed", "now",
)  # fmt: skip


def _worker(row: Row) -> WorkerRecord:
    found = _columns(row)
    found |= {name: msgspec.json.decode(found[name]) for name in ("queues", "tasks")}
    found["alive"] = found["seen_at"] > found["now"] - 3 * found["beat_ms"]
    return record(WorkerRecord, found)
