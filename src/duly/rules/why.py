"""Why a job is not running: the first closed gate and the other closed ones, as sentences and as data.

The gates in their order: it has ended; it runs; it waits for an event or a person; it has expired; it is not due.
Then: its queue or task is paused; no worker can run it; it must run alone. Then: its place in an order; the cap and the
rate of its lane. If no gate is closed, the job is next, or others are first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct

from duly.model import HELD, PARKED, State
from duly.rules import durations
from duly.rules.rate import Rate


class Holder(Struct, frozen=True):
    """A job that runs in a lane, and its worker."""

    id: str
    worker: str | None = None


class Facts(Struct, frozen=True):
    """All facts about one job, read in one snapshot, in the order of the columns of the section `why`."""

    id: str
    task: str
    queue: str
    state: str
    due_at: int | None
    expires_at: int | None
    attempt: int
    max_attempts: int
    worker: str | None
    lease_until: int | None
    reason: str | None
    error: str | None
    suspect: bool
    parked_version: int | None
    now: int
    queue_paused_by: str | None
    queue_paused_why: str | None
    queue_paused_at: int | None
    queue_paused_until: int | None
    task_paused_by: str | None
    task_paused_why: str | None
    task_paused_at: int | None
    task_paused_until: int | None
    knowing_workers: int
    living_workers: int
    ahead: int
    cancel_requested_at: int | None = None
    lane: str | None = None
    seq: int | None = None
    # The limits of its lane, and who set them, if not its code.
    cap: int | None = None
    cap_set_by: str | None = None
    cap_set_why: str | None = None
    rate_count: int | None = None
    rate_ms: int | None = None
    rate_set_by: str | None = None
    rate_set_why: str | None = None
    # How many run in its lane, and the first few of them.
    running: int = 0
    holders: tuple[Holder, ...] = ()
    # How many starts count against its rate, and when that number falls, if it is used up.
    permits: int = 0
    permit_at: int | None = None
    # The first job in the order of its lane, perhaps this one, and the dead one before it that blocks it.
    head_id: str | None = None
    head_state: str | None = None
    head_due_at: int | None = None
    head_worker: str | None = None
    blocked_by: str | None = None

    # Of its queue: how its priorities age, and the share of retries.
    ageing_ms: int | None = None
    retry_share: float | None = None


class Gate(Struct, frozen=True):
    """A closed gate, and its meaning."""

    gate: str
    sentence: str


class Why(Struct, frozen=True):
    """The answer: the gate, its meaning, the facts, and the other closed gates."""

    gate: str
    sentence: str
    facts: Facts
    others: tuple[Gate, ...] = ()

    def __str__(self) -> str:
        """Return the sentence."""
        return self.sentence


def facts_of(row: Sequence[Any]) -> Facts:
    """Read a row of the section `why`."""
    known = dict(zip(Facts.__struct_fields__, row, strict=True))
    return msgspec.convert({**known, "holders": msgspec.json.decode(known["holders"])}, Facts, strict=False)


def explain(facts: Facts) -> Why:
    """Return the first closed gate and the others."""
    first, *others = _shut(facts) or [_turn(facts)]
    return Why(first.gate, first.sentence, facts, tuple(others))


def _shut(facts: Facts) -> list[Gate]:
    match State(facts.state):
        case State.SUCCEEDED:
            return [Gate("ended", f"it has succeeded, on attempt {facts.attempt}")]
        case State.PARTIAL | State.DEAD | State.CANCELLED as state:
            cause = facts.reason or facts.error or "no reason was given"
            return [Gate("ended", f"it is {state.value} because: {cause}")]
        case State.RUNNING:
            return [Gate("lease", _lease(facts))]
        case State.WAITING:
            return [_waiting(facts), *_before_claim(facts)]
        case _:
            return list(_before_claim(facts))


def _waiting(facts: Facts) -> Gate:
    if facts.parked_version is not None:
        return Gate("parked", _parked(facts))
    reason = facts.reason or ""
    if reason.startswith(HELD):
        cause = reason.removeprefix(HELD)
        return Gate("held", f"it is held ({cause}): look whether its work was done, then retry or cancel it")
    timeout = f", until {moment(facts.due_at)} at the latest" if facts.due_at is not None else ""
    return Gate("waiting", f"it waits for: {reason or 'something outside'}{timeout}")


def _parked(facts: Facts) -> str:
    cause = (facts.reason or "").removeprefix(PARKED)
    version = f" in schema version {facts.parked_version}" if facts.parked_version != 1 else ""
    return (
        f"it is parked ({cause}): start a worker that knows task {facts.task!r}{version} "
        f"and serves queue {facts.queue!r}, and it is ready at its next beat"
    )


def _lease(facts: Facts) -> str:
    left = (facts.lease_until or 0) - facts.now
    held = f"it runs, attempt {facts.attempt} of {facts.max_attempts}, on lease to {facts.worker}"
    asked = f"; it was asked to stop at {moment(facts.cancel_requested_at)}" if facts.cancel_requested_at else ""
    if left >= 0:
        return f"{held} until {moment(facts.lease_until)}{asked}"
    rescue = "it is rescued when that is seen twice" if facts.living_workers else "no worker is alive to rescue it"
    return f"{held}, whose lease ended {durations.describe(-left)} ago: {rescue}{asked}"


def _before_claim(facts: Facts) -> Iterator[Gate]:
    if facts.attempt == 0 and facts.expires_at is not None and facts.expires_at <= facts.now:
        yield Gate("expired", f"it was to start by {moment(facts.expires_at)}: the next upkeep ends it as expired")
    if facts.state != State.WAITING and facts.due_at is not None and facts.due_at > facts.now:
        again = f" (attempt {facts.attempt} failed: {facts.error})" if facts.attempt and facts.error else ""
        yield Gate("not_due", f"it is not due before {_from_now(facts.due_at, facts)}{again}")
    if facts.queue_paused_at is not None:
        said = facts.queue_paused_by, facts.queue_paused_why, facts.queue_paused_until
        yield Gate("paused", _paused(f"queue {facts.queue!r}", *said))
    if facts.task_paused_at is not None:
        said = facts.task_paused_by, facts.task_paused_why, facts.task_paused_until
        yield Gate("paused", _paused(f"task {facts.task!r}", *said))
    if facts.parked_version is None:  # a parked job is covered above
        yield from _nobody(facts)
    if facts.suspect:
        yield Gate("suspect", "its last worker stopped beating while it ran, so it waits to run alone")
    if facts.lane is not None:
        yield from _in_lane(facts)
    if facts.retry_share is not None and facts.attempt and facts.state == State.SCHEDULED and facts.lane is None:
        yield Gate("budget", _budget(facts.retry_share, facts.queue))


def _paused(what: str, by: str | None, why: str | None, until: int | None) -> str:
    end = f" until {moment(until)}" if until is not None else ""
    return f"{what} is paused by {by}{end}" + (f": {why}" if why else "")


def _nobody(facts: Facts) -> Iterator[Gate]:
    if facts.living_workers == 0:
        yield Gate("no_worker", "no worker is alive")
    elif facts.knowing_workers == 0:
        yield Gate("unknown_task", f"no living worker knows task {facts.task!r} and serves queue {facts.queue!r}")


def _in_lane(facts: Facts) -> Iterator[Gate]:
    if facts.blocked_by is not None:
        dead = facts.blocked_by
        yield Gate(
            "order",
            f"job {dead} of its order is dead and blocks it: replay or resolve that one "
            f"(duly dead replay {dead}, or duly dead resolve {dead} --why …)",
        )
    if (first := _first_in_order(facts)) is not None:
        yield Gate("order", f"it waits behind job {first} in the order of {facts.lane!r}")
    if facts.cap is not None and facts.running >= facts.cap:
        yield Gate("cap", _full(facts, facts.cap))
    if facts.rate_count is not None and facts.rate_ms is not None and facts.permits >= facts.rate_count:
        rate = f"its rate of {Rate(facts.rate_count, facts.rate_ms)}{_set_by(facts.rate_set_by, facts.rate_set_why)}"
        yield Gate("rate", f"{rate} is used up until {_from_now(facts.permit_at or facts.now, facts)}")


def _first_in_order(facts: Facts) -> str | None:
    """Return which job must end before it; None if there is no such job, or its lane keeps no order."""
    if facts.head_id is None or facts.head_state is None:
        return None
    if facts.head_id == facts.id:  # a job that was enqueued when the lane kept no order may run beside it
        return f"{facts.holders[0].id} (running on {facts.holders[0].worker})" if facts.holders else None
    match State(facts.head_state):
        case State.RUNNING:
            how = f"running on {facts.head_worker}"
        case State.SCHEDULED | State.READY as state:
            how = f"{state.value}, due {moment(facts.head_due_at)}"
        case state:
            how = state.value
    return f"{facts.head_id} ({how})"


def _full(facts: Facts, cap: int) -> str:
    holders = [f"{one.id} on {one.worker}" for one in facts.holders]
    more = [f"and {facts.running - len(holders):,} more"] if facts.running > len(holders) else []
    return (
        f"{facts.running:,} of {cap:,} {'job' if cap == 1 else 'jobs'} of lane {facts.lane!r} "
        f"{'runs' if facts.running == 1 else 'run'}, the most its cap allows"
        f"{_set_by(facts.cap_set_by, facts.cap_set_why)}: {', '.join([*holders, *more])}"
    )


def _set_by(by: str | None, why: str | None) -> str:
    if by is None:
        return ""
    return f" (set by {by} at run time" + (f": {why})" if why else ")")


def _budget(share: float, queue: str) -> str:
    return f"it is a retry, and retries may take {100 * share:g} % of queue {queue!r} while other work waits"


def _ageing(ageing_ms: int, queue: str) -> str:
    waited = durations.describe(ageing_ms)
    return f"it waits for its turn in queue {queue!r}, where each priority counts as much as {waited} of waiting"


def _turn(facts: Facts) -> Gate:
    if facts.ageing_ms is not None and facts.lane is None:
        # Counting the jobs ahead by that would read the whole queue.
        return Gate("turn", _ageing(facts.ageing_ms, facts.queue))
    where = f"queue {facts.queue!r}" if facts.lane is None else f"lane {facts.lane!r}"
    if facts.ahead == 0:
        return Gate("turn", f"it is next in {where}")
    ahead = f"{facts.ahead:,}" if facts.ahead <= 10_000 else "more than 10,000"
    return Gate("turn", f"{ahead} {'job is' if facts.ahead == 1 else 'jobs are'} ahead of it in {where}")


def _from_now(at: int, facts: Facts) -> str:
    return f"{moment(at)}, in {durations.describe(at - facts.now)}"


def moment(at: int | None) -> str:
    """Write a time of the database for people."""
    if at is None:
        return "an unknown time"
    return datetime.fromtimestamp(at / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
