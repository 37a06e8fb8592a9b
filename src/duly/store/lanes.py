"""What duly asks of a database about lanes, one function per question, as `ops` does about jobs.

A lane holds jobs that are not free to run as soon as they are due: of a task, or of a key of it, at most so many run at
once (a cap), at most so many begin in any window (a rate), or one after the other (an order). Lanes are claimed apart
from all other jobs, which know nothing of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from duly.model import Claimed, TaskLimits
from duly.store import ops
from duly.store.op import Op, Rows, json_text


class Walk(NamedTuple):
    """A task whose lanes are gone round, the lane behind which to begin, and whether its lanes keep an order."""

    task: str
    after: str = ""
    ordered: bool = False


class Taken(NamedTuple):
    """What a claim took of lanes, and of each task that has more lanes than it looked at the last one it did.

    `passed_by`: of those that it looked at, others had some. Where the answer was lost, none of this is `known`.
    """

    jobs: list[Claimed]
    cut: dict[str, str]
    passed_by: bool = False
    known: bool = True


def claim(
    queue: str,
    walks: Iterable[Walk],
    *,
    limit: int,
    lanes: int,
    token: int,
    worker: str,
    turn: str = "",
    alone: bool = False,
    wait: bool = False,
    now: int | None = None,
) -> Op[Taken]:
    """Lease up to `limit` due jobs of the next `lanes` lanes of each task, within the room that each lane has.

    Where not all tasks get one, those behind `turn` do, which is the one that was served last. A lost answer is asked
    for by the token, and takes nothing new. `alone` takes suspects, which nothing else does. Lanes that another claim
    has in its hands are passed by, or waited for.
    """
    params = {
        "queue": queue,
        "walks": json_text([walk._asdict() for walk in walks]),
        "lanes": lanes,
        "limit": limit,
        "turn": turn,
        "token": token,
        "worker": worker,
        "alone": alone,
        "now": now,
    }
    waiting = ("wait_for_lanes",) if wait else ()
    sections = ("uncompiled", "promote_lanes", "walk_lanes", *waiting, "hold_lanes", "claim_lanes")
    recalled = ops.recall(token)
    again = Op("claim", recalled.sections, recalled.params, _taken)
    return Op("claim", sections, params, _taken, repeat=again)


def _taken(rows: Rows) -> Taken:
    cut = {row[0]: row[1] for row in rows if len(row) == len(("task", "lane"))}
    said = [bool(row[0]) for row in rows if len(row) == len(("passed_by",)) and not isinstance(row[0], str)]
    recalled = [row for row in rows if len(row) == len(("job",)) and isinstance(row[0], str)]
    jobs = ops.claimed(recalled or [row for row in rows if len(row) > len(("task", "lane"))])
    return Taken(jobs, cut, passed_by=any(said), known=bool(said))


def tasks(queue: str) -> Op[list[str]]:
    """Name the tasks that have jobs in lanes of a queue, which are ready or may soon be."""
    return Op(
        "laned_tasks",
        ("uncompiled", "laned_tasks"),
        {"queue": queue},
        lambda rows: [row[0] for row in rows],
        writes=False,
    )


def next_permit(queue: str, tasks: Iterable[str], *, now: int | None = None) -> Op[int | None]:
    """Read in how many milliseconds a lane of these tasks may go on that only its rate holds up."""
    params = {"queue": queue, "tasks": json_text(sorted(tasks)), "now": now}
    return Op("next_permit", ("uncompiled", "next_permit"), params, lambda rows: rows[0][0], writes=False)


def declare(limits: Mapping[str, TaskLimits]) -> Op[None]:
    """Write down what the code says of its tasks, also that it says nothing."""
    records = [
        {"task": task, "cap": said.cap, "rate_count": said.rate_count, "rate_ms": said.rate_ms}
        for task, said in sorted(limits.items())
    ]
    return Op("declare_limits", ("declare_limits",), {"limits": json_text(records)}, lambda rows: None)


def limit(
    task: str,
    *,
    cap: int | None = None,
    rate_count: int | None = None,
    rate_ms: int | None = None,
    reset: bool = False,
    by: str,
    why: str,
    now: int | None = None,
) -> Op[None]:
    """Set the limits of a task at run time (0: none; None: as it is), or go back to what its code says."""
    params = {
        "name": task,
        "cap": cap,
        "rate_count": rate_count,
        "rate_ms": rate_ms,
        "reset": reset,
        "by": by,
        "why": why,
        "now": now,
    }
    return Op("limit_task", ("limit_task",), params, lambda rows: None, wakes=True)


def limits() -> Op[list[TaskLimits]]:
    """List the limits of tasks: what the code says, and what was set at run time."""
    return Op("task_limits", ("task_limits",), {}, lambda rows: [TaskLimits(*row) for row in rows], writes=False)
