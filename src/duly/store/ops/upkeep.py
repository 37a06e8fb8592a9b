"""Operations that keep the tables in order: rescue, promote, park, wake, expire, prune."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from duly.errors import ConfigError
from duly.model import KEEP_MS, MANY, PARKED, Sighting, State
from duly.store.op import TAIL, Op, distinct, ending, json_text, repeatable, states, uuid_texts


def expired_leases(limit: int = 1000, *, now: int | None = None) -> Op[list[Sighting]]:
    """Read which leases have expired. Only a lease that is seen twice is rescued."""
    return Op(
        "expired_leases",
        ("expired_leases",),
        {"limit": limit, "now": now},
        lambda rows: [Sighting(*row) for row in rows],
        writes=False,
    )


def rescue(seen: Sequence[Sighting], *, now: int | None = None) -> Op[dict[str, State]]:
    """Take jobs from workers that stopped sending heartbeats: back to ready, or dead if no attempts are left."""
    seen = list(dict.fromkeys(seen))
    records = [{"id": s.id, "token": s.token, "lease_until": s.lease_until} for s in seen]
    params = {"seen": json_text(records), "now": now, **ending([s.id for s in seen])}
    sections = ("rescue", "crashed_attempts", *TAIL)
    return repeatable("rescue", sections, params, states, look="rescued", wakes=True)


def promote(queue: str, limit: int = 1000, *, retries: bool = True, now: int | None = None) -> Op[int]:
    """Make due jobs ready, so that a backlog is in the order of claims. Return how many.

    If `retries` have a budget, the claims take them.
    """
    return Op("promote", ("promote",), {"queue": queue, "limit": limit, "retries": retries, "now": now}, len)


def park(queue: str, limit: int = 1000, *, now: int | None = None) -> Op[int]:
    """Park jobs at the head of a queue whose task no living worker of the queue knows. Return how many.

    It reads the first `limit` rows only: repeat it until it returns 0.
    """
    params = {"queue": queue, "limit": limit, "reason": f"{PARKED}no worker knows this task", "now": now}
    return Op("park", ("park",), params, len)


def wake(versions: Mapping[str, int], queues: Iterable[str], limit: int = 1000) -> Op[int]:
    """Make parked jobs of these queues ready that a worker can run. Return how many.

    `versions` are the tasks it knows, each with the newest schema version it understands. A worker repeats this at
    every heartbeat: jobs may be parked while it registers.
    """
    params = {"versions": json_text(dict(versions)), "queues": json_text(sorted(queues)), "limit": limit}
    return Op("wake", ("wake",), params, len, wakes=True)


def next_due(queue: str, *, now: int | None = None) -> Op[int | None]:
    """Read in how many milliseconds the next scheduled job of a queue is due; None: no job is scheduled."""
    return Op("next_due", ("next_due",), {"queue": queue, "now": now}, lambda rows: rows[0][0], writes=False)


def expirable(limit: int = 1000, *, now: int | None = None) -> Op[list[str]]:
    """Find jobs that did not start in time."""
    return Op("expirable", ("expirable",), {"limit": limit, "now": now}, distinct, writes=False)


def expire(ids: Sequence[str], *, now: int | None = None) -> Op[list[str]]:
    """End jobs that did not start in time as cancelled, reason `expired`."""
    return repeatable("expire", ("expire", *TAIL), {"now": now, **ending(uuid_texts(ids))}, distinct, look="cancelled")


PRUNABLE = ("results", "done", "keys", "events", "fires", "batches", "workers", "lanes")


def prune(what: str, limit: int = 1000, *, keep_ms: int = KEEP_MS, now: int | None = None) -> Op[int]:
    """Delete one chunk of rows that are older than they are kept. Return how many."""
    if what not in PRUNABLE:
        raise ConfigError(f"cannot prune {what!r}; what can be pruned: {', '.join(PRUNABLE)}")
    params = {"limit": limit, "keep_ms": keep_ms, "now": now}
    return Op("prune", (f"prune_{what}",), params, len)


def prunable(*, keep_ms: int = KEEP_MS, now: int | None = None) -> Op[dict[str, int]]:
    """Count the rows that `prune` would delete now, by name. Counts stop at `MANY` + 1.

    Results and finished jobs are counted among the first 20,002 rows that have either. If one of the two counts stops,
    so does the other.
    """
    params = {"keep_ms": keep_ms, "enough": MANY + 1, "now": now}
    return Op(
        "prunable",
        ("uncompiled", "prunable"),
        params,
        lambda rows: dict(zip(PRUNABLE, rows[0], strict=True)),
        writes=False,
    )
