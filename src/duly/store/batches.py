"""What duly asks of a database about batches, one function per question, as `ops` does about jobs.

A batch is a label with counters. `open` is raised by whoever adds jobs and lowered by every ending, so that the last
ending knows that it is the last; nothing is derived from rows that two endings could each see as not the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import Struct

from duly.model import BatchRecord, Enqueued, NewJob, Terms
from duly.store import ops
from duly.store.op import Held, Op, Row, Rows, columns, ending, json_text, record, uuid_text

# Of `filling`: to a batch without a key anybody adds at any time.
ANYWHERE = -1


class Opened(Struct, frozen=True):
    """A batch as it was made, or as it was found under its key, filled so far."""

    id: str
    name: str
    key: str | None
    filled: int


class Added(Struct, frozen=True):
    """What came of adding jobs to a batch: how far it was filled before, and what was added, unless it takes no more.

    `filled` is None where no batch has this id. `lost`: the handler that adds has lost its lease.
    """

    filled: int | None
    sealed: bool
    jobs: list[Enqueued]
    lost: bool = False


class Callbacks(Struct, frozen=True):
    """The jobs that a batch adds when it is complete, when it is a success, and at its first death, as JSON."""

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
    """Make a batch, or find the one that is there under its key. None: that was pruned at this very moment."""
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

    Into a batch with a key they go in order: `filling` is how many it was given before. Of a batch that is further by
    now, that part is there already.
    """
    op = ops.enqueue(terms, jobs, now=now)
    keyed = "reserve_keys" in op.sections
    before = ("reserve_keys",) if keyed else ()
    insert = "enqueue_keyed" if keyed else "enqueue"
    after = (*(("drop_keys",) if keyed else ()), *ops.in_order(terms), *(("key_holders",) if keyed else ()))
    # Keys before the batch, as in every ending: two that lock in different orders wait for each other for ever.
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
    if not keyed and "count_added" in first:  # which looks at keys
        params["jobs"] = json_text([{"id": job.id} for job in jobs])
    repeated: Op[Added] = Op("enqueue", again, params, read, wakes=True)
    adding = replace(repeated, sections=first, once=op.once and filling == ANYWHERE, repeat=repeated)
    return adding if parent is None else ops.while_held(adding, parent, Added(None, False, [], lost=True))


def added_before(terms: Terms, jobs: Sequence[NewJob]) -> Op[list[Enqueued]]:
    """Say what came of jobs with keys whose places in a batch were filled before."""
    op = ops.enqueue(terms, jobs)
    params = {name: op.params[name] for name in ("task", "jobs")}
    return Op("enqueue", ("added_before",), params, op.read, writes=False)


def seal(batch_id: str, *, now: int | None = None) -> Op[bool]:
    """Say that nothing more is added; one whose jobs have all ended is complete with that. False: no such batch."""
    own = uuid_text(batch_id)
    params = {**ending([], batches=[own]), "batch_id": own, "now": now}
    return Op("seal_batch", ("seal_batch", "ended_callbacks", "sealed"), params, bool, wakes=True)


def cancel(batch_id: str, *, by: str | None, why: str | None, now: int | None = None) -> Op[bool]:
    """Say that nothing more is added and that it is no success; its jobs are another matter. False: no such batch."""
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

    `active` are those of which something is still to come.
    """
    first, last = ops.id_range(prefix, before)
    params = {"first": first, "last": last, "name": name, "key": key, "active": active, "limit": limit}
    return Op("batches", ("batches",), params, lambda rows: [_record(row) for row in rows], writes=False)


def get(batch_id: str) -> Op[BatchRecord | None]:
    """Read one batch and how far it is."""
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
    """List jobs of a batch that have not ended and were not asked to."""
    params = {"batch_id": uuid_text(batch_id), "limit": limit}
    return Op("batch_rest", ("batch_rest",), params, lambda rows: [row[0] for row in rows], writes=False)
