"""Operations on batches.

A batch is a label with counters. Adding jobs raises `open`, every ending lowers it. So the last ending knows that it is
the last. Counting rows instead would fail: two endings at once could each see a row of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import Struct

from duly.model import BatchRecord, Enqueued, NewJob, Terms
from duly.store import ops
from duly.store.op import Held, Op, Row, Rows, columns, ending, json_text, record, uuid_text

# The value of `filling` for a batch without a key: any caller adds jobs at any time.
ANYWHERE = -1


class Opened(Struct, frozen=True):
    """A batch that was made, or found under its key; `filled` is how many jobs were added."""

    id: str
    name: str
    key: str | None
    filled: int


class Added(Struct, frozen=True):
    """The result of adding jobs to a batch: how many it had before, and the jobs added unless it is sealed.

    `filled` is None if no batch has this id. `lost`: the handler that adds jobs has lost its lease.
    """

    filled: int | None
    sealed: bool
    jobs: list[Enqueued]
    lost: bool = False


class Callbacks(Struct, frozen=True):
    """The jobs that a batch adds when it completes, when it succeeds, and at its first dead job, as JSON."""

    on_complete: str | None = None
    on_success: str | None = None
    on_first_dead: str | None = None


def open_batch(
    batch_id: str,
    name: str,
    *,
    key: str | None = None,
    ok_at: float = 1.0,
    callbacks: Callbacks | None = None,
    now: int | None = None,
) -> Op[Opened | None]:
    """Make a batch, or find the one that has its key. None: that one was pruned at this moment."""
    due = callbacks or Callbacks()
    params = {
        "id": batch_id,
        "name": name,
        "key": key,
        "ok_at": ok_at,
        "on_complete": due.on_complete,
        "on_success": due.on_success,
        "on_first_dead": due.on_first_dead,
        "now": now,
    }
    return Op("open_batch", ("open_batch",), params, lambda rows: Opened(*rows[-1]) if rows else None)


def add(
    terms: Terms,
    jobs: Sequence[NewJob],
    *,
    filling: int = ANYWHERE,
    parent: Held | None = None,
    now: int | None = None,
) -> Op[Added]:
    """Add jobs to the batch that `terms` name, and count them.

    A batch with a key is filled in order: `filling` is how many jobs it had before. If it has more now, these jobs were
    added before.
    """
    op = ops.enqueue(terms, jobs, now=now)
    keyed = "reserve_keys" in op.sections
    before = ("reserve_keys",) if keyed else ()
    insert = "enqueue_keyed" if keyed else "enqueue"
    after = (*(("drop_keys",) if keyed else ()), *ops.in_order(terms), *(("key_holders",) if keyed else ()))
    # Lock keys before the batch, as every ending does: different orders deadlock.
    first = (*before, "lock_batch", "count_added", insert, *after)
    again = ("lock_jobs", *before, "lock_batch", "count_added", f"{insert}_again", "undo_finished", *after)
    if filling != ANYWHERE:
        first = again = (*before, "lock_batch", f"{insert}_again", "count_filled", *after)

    def read(rows: Rows) -> Added:
        states = [row for row in rows if len(row) == len(("filled", "sealed"))]
        if not states:
            return Added(None, False, [])
        [(filled, sealed)] = states
        return Added(filled, bool(sealed), op.read([row for row in rows if row not in states]))

    params = {**op.params, "filling": filling}
    if not keyed and "count_added" in first:  # which reads the keys of jobs
        params["jobs"] = json_text([{"id": job.id} for job in jobs])
    repeated: Op[Added] = Op("enqueue", again, params, read, wakes=True)
    adding = replace(repeated, sections=first, once=op.once and filling == ANYWHERE, repeat=repeated)
    return adding if parent is None else ops.while_held(adding, parent, Added(None, False, [], lost=True))


def added_before(terms: Terms, jobs: Sequence[NewJob]) -> Op[list[Enqueued]]:
    """Read the answers for jobs with keys whose places in a batch were filled before."""
    op = ops.enqueue(terms, jobs)
    params = {name: op.params[name] for name in ("task", "jobs")}
    return Op("enqueue", ("added_before",), params, op.read, writes=False)


def seal(batch_id: str, *, now: int | None = None) -> Op[bool]:
    """Close a batch to further jobs; it completes if all its jobs have ended. False: no such batch."""
    own = uuid_text(batch_id)
    params = {**ending([], batches=[own]), "batch_id": own, "now": now}
    return Op("seal_batch", ("seal_batch", "ended_callbacks", "sealed"), params, bool, wakes=True)


def cancel(batch_id: str, *, by: str | None, why: str | None, now: int | None = None) -> Op[bool]:
    """Close a batch to further jobs and mark it cancelled; its jobs are not changed. False: no such batch."""
    own = uuid_text(batch_id)
    params = {**ending([], by, why, batches=[own]), "batch_id": own, "now": now}
    return Op("cancel_batch", ("cancel_batch", "ended_callbacks", "sealed"), params, bool, wakes=True)


def listing(
    *,
    name: str | None = None,
    key: str | None = None,
    active: bool | None = None,
    prefix: str | None = None,
    before: str | None = None,
    limit: int = 100,
) -> Op[list[BatchRecord]]:
    """List batches, newest first; for the next page give the last id of this one as `before`.

    `active`: only batches that are not complete.
    """
    first, last = ops.id_range(prefix, before)
    params = {"first": first, "last": last, "name": name, "key": key, "active": active, "limit": limit}
    return Op("batches", ("batches",), params, lambda rows: [_record(row) for row in rows], writes=False)


def get(batch_id: str) -> Op[BatchRecord | None]:
    """Read one batch and its progress."""
    one = uuid_text(batch_id)
    params = {**listing(limit=1).params, "first": one, "last": one}
    return Op("batches", ("batches",), params, lambda rows: _record(rows[0]) if rows else None, writes=False)


_columns = columns(
    "id", "name", "key", "created_at", "sealed_at", "completed_at", "cancelled_at", "cancelled_by", "cancelled_why",
    "first_dead_at", "ok_at", "open", "running", "succeeded", "partial", "dead", "cancelled",
)  # fmt: skip


def _record(row: Row) -> BatchRecord:
    found = _columns(row)
    ended = sum(found[name] for name in ("succeeded", "partial", "dead", "cancelled"))
    found["total"] = total = found["open"] + ended
    # Both are read at one moment, but not under one lock: a running job may have been added and not counted yet.
    found["pending"] = max(0, found["open"] - found["running"])
    found["percent"] = 100.0 * ended / total if total else 100.0
    return record(BatchRecord, found)


def rest(batch_id: str, limit: int = 1000) -> Op[list[str]]:
    """List jobs of a batch that have not ended and were not asked to cancel."""
    params = {"batch_id": uuid_text(batch_id), "limit": limit}
    return Op("batch_rest", ("batch_rest",), params, lambda rows: [row[0] for row in rows], writes=False)
