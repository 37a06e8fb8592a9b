"""Operations that keep the tables in order: rescue, promote, park, wake, expire, prune."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from duly.errors import ConfigError
from duly.model import KEEP_MS, MANY, PARKED, Sighting, State
from duly.store.op import TAIL, Op, distinct, ending, json_text, repeatable, states, uuid_texts


def expired_leases(limit: int = 1000, *, now: int | None = None) -> Op[list[Sighting]]:
    """See which leases have ended. Only one that is seen twice is taken."""
    return Op(
        "expired_leases",
        ("expired_leases",),
        {"limit": limit, "now": now},
        lambda rows: [Sighting(*row) for row in rows],
        writes=False,
    )


def rescue(seen: Sequence[Sighting], *, now: int | None = None) -> Op[dict[str, State]]:
    """Take jobs from workers that stopped beating: back to ready, or dead where they have had their chances."""
    seen = list(dict.fromkeys(seen))
    records = [{"id": s.id, "token": s.token, "lease_until": s.lease_until} for s in seen]
    params = {"seen": json_text(records), "now": now, **ending([s.id for s in seen])}
    sections = ("rescue", "crashed_attempts", *TAIL)
    return repeatable("rescue", sections, params, states, look="rescued", wakes=True)


def promote(queue: str, limit: int = 1000, *, retries: bool = True, now: int | None = None) -> Op[int]:
    """Make what is due ready, so that a backlog stands in its order; answers how many.

    Where `retries` have a budget, they are left to the claims.
    """
    return Op("promote", ("promote",), {"queue": queue, "limit": limit, "retries": retries, "now": now}, len)


def park(queue: str, limit: int = 1000, *, now: int | None = None) -> Op[int]:
    """Set aside what stands at the head of a queue and no living worker that serves it knows; answers how many.

    It looks at the first `limit` rows only, so it is asked again until it answers 0.
    """
    params = {"queue": queue, "limit": limit, "reason": f"{PARKED}no worker knows this task", "now": now}
    return Op("park", ("park",), params, len)


def wake(versions: Mapping[str, int], queues: Iterable[str], limit: int = 1000) -> Op[int]:
    """Make parked jobs of these queues ready that a worker can run; answers how many.

    `versions` are the tasks it knows, each with the newest schema version it understands. Said at every beat: a worker
    that registers while another parks would otherwise not find what was parked at that moment.
    """
    params = {"versions": json_text(dict(versions)), "queues": json_text(sorted(queues)), "limit": limit}
    return Op("wake", ("wake",), params, len, wakes=True)


def next_due(queue: str, *, now: int | None = None) -> Op[int | None]:
    """Read in how many milliseconds the next scheduled job of a queue is due; None: there is none."""
    return Op("next_due", ("next_due",), {"queue": queue, "now": now}, lambda rows: rows[0][0], writes=False)


def expirable(limit: int = 1000, *, now: int | None = None) -> Op[list[str]]:
    """Find jobs that were to start by now and have not."""
    return Op("expirable", ("expirable",), {"limit": limit, "now": now}, distinct, writes=False)


def expire(ids: Sequence[str], *, now: int | None = None) -> Op[list[str]]:
    """End jobs that did not start in time as cancelled, reason `expired`."""
    return repeatable("expire", ("expire", *TAIL), {"now": now, **ending(uuid_texts(ids))}, distinct, look="cancelled")


PRUNABLE = ("results", "done", "keys", "events", "fires", "batches", "workers", "lanes")


def prune(what: str, limit: int = 1000, *, keep_ms: int = KEEP_MS, now: int | None = None) -> Op[int]:
    """Remove one chunk of what has had its time; answers how much that was."""
    if what not in PRUNABLE:
        raise ConfigError(f"cannot prune {what!r}; what can be pruned: {', '.join(PRUNABLE)}")
    params = {"limit": limit, "keep_ms": keep_ms, "now": now}
    return Op("prune", (f"prune_{what}",), params, len)


def prunable(*, keep_ms: int = KEEP_MS, now: int | None = None) -> Op[dict[str, int]]:
    """Count what `prune` would take now, by its names; no count goes beyond `MANY` + 1.

    Results and finished jobs are counted among the first 20,002 that have either: where one of the two counts has
    stopped, the other is what was seen until then.
    """
    params = {"keep_ms": keep_ms, "enough": MANY + 1, "now": now}
    return Op(
        "prunable",
        ("uncompiled", "prunable"),
        params,
        lambda rows: dict(zip(PRUNABLE, rows[0], strict=True)),
        writes=False,
    )
