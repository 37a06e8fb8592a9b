"""Why a job is not running: the first gate that is shut, as a sentence and as data."""

from __future__ import annotations

from datetime import UTC, datetime

from msgspec import Struct

from duly import durations
from duly.model import HELD, PARKED, State


class Facts(Struct, frozen=True):
    """All that bears on one job, read in one snapshot. The order is that of the columns of the section `why`."""

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
    ageing_ms: int | None = None
    retry_share: float | None = None


class Why(Struct, frozen=True):
    """The answer: which gate, what it means, and what it was judged by."""

    gate: str
    sentence: str
    facts: Facts

    def __str__(self) -> str:
        """Give the sentence."""
        return self.sentence


def explain(facts: Facts) -> Why:
    """Name the first gate that is shut."""
    gate, sentence = _gate(facts)
    return Why(gate, sentence, facts)


def _gate(facts: Facts) -> tuple[str, str]:
    match State(facts.state):
        case State.SUCCEEDED:
            return "ended", f"it has succeeded, on attempt {facts.attempt}"
        case State.PARTIAL | State.DEAD | State.CANCELLED as state:
            return "ended", f"it is {state.value} because: {facts.reason or facts.error or 'no reason was given'}"
        case State.RUNNING:
            return "lease", _lease(facts)
        case State.WAITING if facts.parked_version is not None:
            return "parked", _parked(facts)
        case State.WAITING if (facts.reason or "").startswith(HELD):
            cause = (facts.reason or "").removeprefix(HELD)
            return "held", f"it is held ({cause}): look whether its work was done, then retry or cancel it"
        case State.WAITING:
            timeout = f", until {moment(facts.due_at)} at the latest" if facts.due_at is not None else ""
            return "waiting", f"it waits for: {facts.reason or 'something outside'}{timeout}"
        case _:
            return _before_claim(facts)


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


def _before_claim(facts: Facts) -> tuple[str, str]:
    if facts.attempt == 0 and facts.expires_at is not None and facts.expires_at <= facts.now:
        return "expired", f"it was to start by {moment(facts.expires_at)}: the next upkeep ends it as expired"
    if facts.due_at is not None and facts.due_at > facts.now:
        again = f" (attempt {facts.attempt} failed: {facts.error})" if facts.attempt and facts.error else ""
        return "not_due", f"it is not due before {moment(facts.due_at)}, in {_in(facts)}{again}"
    if facts.queue_paused_at is not None:
        return "paused", _paused(
            f"queue {facts.queue!r}", facts.queue_paused_by, facts.queue_paused_why, facts.queue_paused_until
        )
    if facts.task_paused_at is not None:
        return "paused", _paused(
            f"task {facts.task!r}", facts.task_paused_by, facts.task_paused_why, facts.task_paused_until
        )
    if facts.living_workers == 0:
        return "no_worker", "no worker is alive"
    if facts.knowing_workers == 0:
        return "unknown_task", f"no living worker knows task {facts.task!r} and serves queue {facts.queue!r}"
    if facts.suspect:
        return "suspect", "its last worker stopped beating while it ran, so it waits to run alone"
    if facts.retry_share is not None and facts.attempt and facts.state == State.SCHEDULED:
        return "budget", _budget(facts.retry_share, facts.queue)
    if facts.ageing_ms is not None:  # who is ahead by that could be counted only by reading the whole queue
        return "turn", _ageing(facts.ageing_ms, facts.queue)
    return "turn", f"it is next in queue {facts.queue!r}" if facts.ahead == 0 else _behind(facts)


def _in(facts: Facts) -> str:
    return durations.describe((facts.due_at or 0) - facts.now)


def _paused(what: str, by: str | None, why: str | None, until: int | None) -> str:
    end = f" until {moment(until)}" if until is not None else ""
    return f"{what} is paused by {by}{end}" + (f": {why}" if why else "")


def _budget(share: float, queue: str) -> str:
    return f"it is a retry, and retries may take {100 * share:g} % of queue {queue!r} while other work waits"


def _ageing(ageing_ms: int, queue: str) -> str:
    waited = durations.describe(ageing_ms)
    return f"it waits for its turn in queue {queue!r}, where each priority counts as much as {waited} of waiting"


def _behind(facts: Facts) -> str:
    ahead = f"{facts.ahead:,}" if facts.ahead <= 10_000 else "more than 10,000"
    return f"{ahead} {'job is' if facts.ahead == 1 else 'jobs are'} ahead of it in queue {facts.queue!r}"


def moment(at: int | None) -> str:
    """Write a time of the database for people."""
    if at is None:
        return "an unknown time"
    return datetime.fromtimestamp(at / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
