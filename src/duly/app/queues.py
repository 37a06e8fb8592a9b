"""Pauses and limits of queues and tasks: reads the arguments of `app.pause` and `app.limit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from duly.app.filters import user
from duly.errors import ConfigError
from duly.rules import checks
from duly.rules.durations import Duration, to_ms
from duly.rules.messages import brief
from duly.rules.rate import Rate, rate_of
from duly.store import lanes, ops
from duly.store.op import Op
from duly.store.queues import OFF, limit_queue

MOST_DEPTH = 1_000_000_000

OF_QUEUES, OF_TASKS = ("depth", "ageing", "retry_share"), ("cap", "rate", "reset")


class LimitOptions(TypedDict, total=False):
    """The limits of a queue (the first three) or a task (the next three), who sets them and why."""

    depth: int | str | None
    ageing: Duration | None
    retry_share: float | str | None
    cap: int | str | None
    rate: str | None
    reset: bool
    by: str | None
    why: str


def pause(queue: str | None, task: str | None, by: str | None, why: str, duration: Duration | None) -> Op[None]:
    """Pause a queue or a task."""
    until_ms = None if duration is None else to_ms(duration, what="duration=")
    return ops.pause(*_named(queue, task), by=by or user(), why=why, until_ms=until_ms)


def resume(queue: str | None, task: str | None, by: str | None, why: str) -> Op[bool]:
    """Resume a queue or a task."""
    return ops.resume(*_named(queue, task), by=by or user(), why=why)


def _named(queue: str | None, task: str | None) -> tuple[str, str]:
    if (queue is None) == (task is None):
        raise ConfigError("give queue= or task=, and not both")
    return ("queue", queue) if queue is not None else ("task", str(task))


def limit(queue: str | None, task: str | None, options: LimitOptions) -> Op[None]:
    """Set the limits of a queue or a task."""
    kind, name = _named(queue, task)
    given = _given(kind, name, options)
    by, why = given.get("by") or user(), given.get("why") or ""
    if kind == "task":
        return _limit_task(name, given, by, why)
    return limit_queue(
        name,
        max_depth=_depth(given.get("depth")),
        ageing_ms=_ageing_ms(given.get("ageing")),
        retry_share=_share(given.get("retry_share")),
        by=by,
        why=why,
    )


def _given(kind: str, name: str, options: LimitOptions) -> dict[str, Any]:
    """Return the options that were given; raise for one that does not exist, or if none sets a limit."""
    mine, other = (OF_QUEUES, OF_TASKS) if kind == "queue" else (OF_TASKS, OF_QUEUES)
    given: dict[str, Any] = {option: value for option, value in options.items() if value is not None}
    if foreign := sorted(given.keys() & other):
        raise ConfigError(f"{kind} {name!r}: {foreign[0]}= is not for a {kind}, which has {'=, '.join(mine)}=")
    if unknown := sorted(given.keys() - {*mine, "by", "why"}):
        raise ConfigError(f"{kind} {name!r}: there is no limit {unknown[0]!r}: give {'=, '.join(mine)}=")
    if not any(given.get(option) for option in mine) and not (given.keys() & set(mine) - {"reset"}):
        raise ConfigError(f"{kind} {name!r}: give at least one of {'=, '.join(mine)}=")
    return given


def _limit_task(name: str, given: Mapping[str, Any], by: str, why: str) -> Op[None]:
    cap, rate, reset = given.get("cap"), given.get("rate"), bool(given.get("reset"))
    if reset and (cap is not None or rate is not None):
        raise ConfigError(f"task {name!r}: reset= restores the limits of its code: leave out cap= and rate=")
    if cap is not None and cap != "off":
        checks.whole(cap, f"task {name!r}: cap=", least=1)
    count, per_ms = None, None
    if rate is not None:
        read = Rate(0, 0) if rate == "off" else rate_of(rate, f"task {name!r}: rate=")
        count, per_ms = read.count, read.per_ms
    return lanes.limit(
        name,
        cap=0 if cap == "off" else cap,
        rate_count=count,
        rate_ms=per_ms,
        reset=reset,
        by=by,
        why=why,
    )


def _depth(depth: Any) -> int | None:
    if depth is None or depth == "off":
        return None if depth is None else OFF
    if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= MOST_DEPTH:
        raise ConfigError(f"depth= is {brief(depth)}: give how many jobs may wait, from 1 to {MOST_DEPTH:,}, or 'off'")
    return depth


def _ageing_ms(ageing: Duration | None) -> int | None:
    if ageing is None:
        return None
    return (0 if ageing == "off" else to_ms(ageing, what="ageing=")) or OFF


def _share(share: Any) -> float | None:
    if share is None or share == "off":
        return None if share is None else OFF
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(f"retry_share= is {brief(share)}: give a share from 0 to 1, as in 0.2, or 'off'")
    return share
