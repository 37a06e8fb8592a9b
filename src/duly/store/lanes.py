"""Operations on lanes.

A lane holds the jobs of a task, or of one key of it, that cannot all run as soon as they are due. A cap limits how many
run at once, a rate how many start in any window, and an order runs them one by one. Lanes have their own claim, so
other jobs cost no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from duly.model import Claimed, TaskLimits
from duly.store import ops
from duly.store.op import Op, Rows, json_text


class Walk(NamedTuple):
    """A task whose lanes are visited in turn, the lane after which to begin, and whether its lanes keep an order."""

    task: str
    after: str = ""
    ordered: bool = False


class Taken(NamedTuple):
    """The jobs that a claim took from lanes. `cut` has the last lane visited of each task that has more lanes.

    `passed_by`: other claims held some of the lanes. After a lost answer, `cut` and `passed_by` are not `known`.
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

    If not all tasks get a job, those after `turn` do, the task that was served last. After a lost answer, the
    repetition reads by the token and takes nothing new. `alone` takes suspects, and only suspects. Lanes that another
    claim holds are skipped, or waited for if `wait`.
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
    passed = [bool(row[0]) for row in rows if len(row) == len(("passed_by",)) and not isinstance(row[0], str)]
    recalled = [row for row in rows if len(row) == len(("job",)) and isinstance(row[0], str)]
    jobs = ops.claimed(recalled or [row for row in rows if len(row) > len(("task", "lane"))])
    return Taken(jobs, cut, passed_by=any(passed), known=bool(passed))


def tasks(queue: str) -> Op[list[str]]:
    """List the tasks that have jobs in lanes of a queue, ready or soon to be."""
    return Op(
        "laned_tasks",
        ("uncompiled", "laned_tasks"),
        {"queue": queue},
        lambda rows: [row[0] for row in rows],
        writes=False,
    )


def next_permit(queue: str, tasks: Iterable[str], *, now: int | None = None) -> Op[int | None]:
    """Read in how many milliseconds a lane of these tasks that only its rate holds up may continue."""
    params = {"queue": queue, "tasks": json_text(sorted(tasks)), "now": now}
    return Op("next_permit", ("uncompiled", "next_permit"), params, lambda rows: rows[0][0], writes=False)


def declare(limits: Mapping[str, TaskLimits]) -> Op[None]:
    """Write the limits that tasks have in the code, also that they have none."""
    records = [
        {"task": task, "cap": own.cap, "rate_count": own.rate_count, "rate_ms": own.rate_ms}
        for task, own in sorted(limits.items())
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
    """Set the limits of a task at run time (0: no limit; None: unchanged), or reset them to those in the code."""
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
    """List the limits of tasks: those in the code, and those set at run time."""
    return Op("task_limits", ("task_limits",), {}, lambda rows: [TaskLimits(*row) for row in rows], writes=False)
