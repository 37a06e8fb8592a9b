"""Operations by which a worker records that it is alive."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from duly.model import WorkerRecord
from duly.store.op import Op, Rows, json_text


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
    """Say that a worker is alive, what it knows and what it has done so far; said again at every beat."""
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
    """Say that a worker has gone."""
    return Op("leave", ("leave",), {"id": worker}, lambda rows: None)


def workers(*, now: int | None = None) -> Op[list[WorkerRecord]]:
    """List the workers that have been heard of."""

    def read(rows: Rows) -> list[WorkerRecord]:
        return [
            WorkerRecord(
                id=worker,
                host=host,
                pid=pid,
                queues=_list(queues),
                tasks=_list(tasks),
                beat_ms=beat_ms,
                started_at=started_at,
                seen_at=seen_at,
                alive=seen_at > at - 3 * beat_ms,
                slots=slots,
                running=running,
                succeeded=succeeded,
                failed=failed,
            )
            for (
                worker, host, pid, queues, tasks, beat_ms, started_at, seen_at, slots, running, succeeded, failed, at
            ) in rows
        ]  # fmt: skip

    return Op("workers", ("workers",), {"now": now}, read, writes=False)


def _list(text: str) -> tuple[str, ...]:
    return tuple(msgspec.json.decode(text))
