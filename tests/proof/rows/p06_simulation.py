"""P6: the deterministic simulation, and whether it finds the bugs that were planted."""

from __future__ import annotations

import multiprocessing
import time
from functools import partial

from duly.store import ops
from duly.upkeep import rescue
from tests.proof import breaks
from tests.proof.breaks import BREAKS
from tests.proof.simulation import judge, scenario, shortened
from tests.proof.table import Figure, Row, Setting

CLAMP = " or lease_until > :now + lease_ms + 2 * (lease_ms / 3)"
ENOUGH = 2_000


def plant(name: str, *changes: tuple[str, str, str]) -> None:
    """Plant a bug into the SQL that the simulation runs."""
    breaks.sql(f"sim:{name}", *changes, dialects=("sqlite",))


def forget(section: str) -> None:
    """Plant an ending that forgets a part of its tail."""
    breaks.python(f"sim:forgets_{section}", ops, "TAIL", tuple(one for one in ops.TAIL if one != section))


HELD = "where token = cast(held.key as integer) and state = 'running'"
NO_FENCE = "where state = 'running'"
SCHEDULED = "where state = 'scheduled' and queue = :queue"
FREED = "where state in ('dead', 'cancelled'"
TAKEN_BACK = "delete from duly_job\n where "

plant(
    "no_fence",
    ("finish", "token = held_token and duly_job.state = 'running'", "duly_job.state = 'running'"),
    ("finish_plain", f"{HELD} and keep_ms > 0", NO_FENCE),
    ("finish_plain", HELD, NO_FENCE),
)
plant(
    "rescue_unguarded",
    ("rescue", "and token = seen_token and lease_until = seen_until", ""),
    ("rescue", f"and (lease_until <= :now{CLAMP})", ""),
)
plant("attempt_not_counted", ("claim", "attempt = attempt + 1", "attempt = max(attempt, 1)"))
plant("no_clamp", ("expired_leases", CLAMP, ""), ("rescue", CLAMP, ""))
plant("key_taken_twice", ("reserve_keys", "where duly_key.expires_at <= :now", "where true"))
plant("key_forgotten", ("ended_key", f"{FREED})", f"{FREED}, 'succeeded')"))
plant("snooze_burns", ("finish", "attempt = attempt - give_back", "attempt = attempt"))
plant("suspects_among_others", ("claim", "and suspect = :alone", "and (suspect = :alone or not :alone)"))
plant("claimed_early", ("claim", "and not :alone and due_at <= :now", "and not :alone"))
plant("promoted_early", ("promote", f"{SCHEDULED} and due_at <= :now", SCHEDULED))
plant("enqueued_again", ("undo_finished", f"{TAKEN_BACK}id in", f"{TAKEN_BACK}false and id in"))
breaks.python("sim:rescue_on_first_sight", rescue, "_patience", lambda one: 0.0)
for part in ("ended_key", "ended_batch", "ended_callbacks"):
    forget(part)

PLANTED = sorted(name for name in BREAKS if name.startswith("sim:"))


def run(setting: Setting) -> Figure:
    """Run clean worlds, and with each planted bug as many as it takes to find it."""
    began = time.monotonic()
    seeds = setting.pick(ENOUGH, 100_000)
    first = setting.seed * 1_000_000
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        bad = _bad(pool, None, range(first, first + seeds))
        clean_s = time.monotonic() - began
        found = {} if setting.broken else {bug: _found(pool, bug, first) for bug in PLANTED}
    missed = [bug for bug, seed in found.items() if seed is None]
    latest = max((seed - first + 1 for seed in found.values() if seed is not None), default=0)
    text = (
        f"{seeds:,} seeds, {len(bad)} violations, {seeds / clean_s:.0f} seeds/s; "
        f"{len(found) - len(missed)} of {len(found)} planted bugs found, the last after {latest:,} seeds"
        + (f"; MISSED {', '.join(missed)}" if missed else "")
    )
    repeat = f"python -m tests.proof.simulation {bad[0]} {bad[0] + 1} --shorten" if bad else None
    numbers = {"seeds": seeds, "violations": len(bad), "found_after": found, "bad": bad[:10]}
    return Figure(text, not bad and not missed, numbers, repeat)


def _bad(pool: multiprocessing.pool.Pool, bug: str | None, seeds: range) -> list[int]:
    """Say which seeds end badly."""
    return [seed for seed, wrong in pool.imap_unordered(partial(_judged, bug), seeds, chunksize=25) if wrong]


def _found(pool: multiprocessing.pool.Pool, bug: str, first: int) -> int | None:
    """Give the first seed that shows a bug, or None where none of so many does."""
    for start in range(first, first + ENOUGH, 100):
        if bad := _bad(pool, bug, range(start, start + 100)):
            return min(bad)
    return None


def _judged(bug: str | None, seed: int) -> tuple[int, bool]:
    if bug is None:
        return seed, bool(judge(seed))
    with breaks.broken(bug):
        return seed, bool(judge(seed))


def shortest(seed: int) -> str:
    """Describe the shortest scenario that still fails."""
    return str(shortened(scenario(seed)))


ROW = Row(
    "P6",
    "deterministic simulation of workers, rescue, faults and clocks",
    "2,000 seeds (100,000 in full) without violation, every planted bug found within 2,000",
    run,
    controls=("sim:no_fence",),
)
