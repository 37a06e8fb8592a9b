"""The states of a job, and `decide`, the only function that judges how an attempt ended.

     scheduled ─due─▶ ready ─claim─▶ running ─▶ succeeded | partial | dead | cancelled
         ▲              ▲               │
         │              └── released, rescued (lease ended)
         ├── retry, snooze, sleep, poll: states with a due time
         │                              └─▶ waiting (event, children, hold, unknown task) ─▶ ready
         └── a replay of a dead job is a new job

Handlers return or raise, the runner turns that into an `Outcome`, and only `decide` chooses what is written.
Rescue, cancel and expire decide in SQL, along the same arrows.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, assert_never

from duly.model import (
    Cancelled,
    Change,
    Crashed,
    Failed,
    Failure,
    Outcome,
    PartlyDone,
    Released,
    Snoozed,
    State,
    Succeeded,
    Waiting,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from duly.rules.backoff import Backoff

# None is a job that does not exist yet. Ended jobs have no arrow: a replay is a new job.
ARROWS: Mapping[State | None, frozenset[State]] = MappingProxyType(
    {
        None: frozenset({State.SCHEDULED, State.READY}),
        State.SCHEDULED: frozenset({State.READY, State.RUNNING, State.WAITING, State.CANCELLED}),
        State.READY: frozenset({State.RUNNING, State.WAITING, State.CANCELLED}),
        State.RUNNING: frozenset(set(State) - {State.RUNNING}),
        State.WAITING: frozenset({State.READY, State.DEAD, State.CANCELLED}),
        State.SUCCEEDED: frozenset(),
        State.PARTIAL: frozenset(),
        State.DEAD: frozenset(),
        State.CANCELLED: frozenset(),
    }
)

ATTEMPTS_USED_UP = "attempts used up"
NOT_RETRIED = "not retried"

# The SQL of rescue has the same texts.
MOST_CRASHES = 3
KILLED_ITS_WORKER = "killed its worker"
LOST_ON_LAST_ATTEMPT = "worker lost on the last attempt"
DONE = Change(State.SUCCEEDED)


def allowed(start: State | None, end: State) -> bool:
    """Return whether an arrow leads from `start` (None for a new job) to `end`."""
    return end in ARROWS[start]


def _always(failure: Failure) -> bool:
    """Retry after any error."""
    return True


@dataclass(frozen=True, slots=True)
class Policy:
    """When and how often a failed attempt is retried."""

    backoff: Backoff
    retries: Callable[[Failure], bool] = _always


def decide(
    attempt: int, max_attempts: int, outcome: Outcome, *, policy: Policy, chance: float, crashes: int = 0
) -> Change:
    """Return the change of a job whose attempt number `attempt` ended in `outcome` after `crashes` crashes."""
    match outcome:
        case Succeeded(result):
            return DONE if result is None else Change(State.SUCCEEDED, result=result)
        case PartlyDone(reason, result):
            return Change(State.PARTIAL, reason=reason, result=result)
        case Cancelled(reason):
            return Change(State.CANCELLED, reason=reason)
        case Snoozed(after_ms):
            return Change(State.SCHEDULED, after_ms=after_ms, give_back_attempt=True)
        case Waiting(reason, timeout_ms):
            # The next claim counts again: otherwise a job that waits five times would use up its attempts.
            return Change(State.WAITING, after_ms=timeout_ms, reason=reason, give_back_attempt=True)
        case Released():
            return Change(State.READY, give_back_attempt=True)
        case Crashed(error):
            return _after_crash(attempt, max_attempts, error, crashes + 1)
        case Failed():
            return _after_failure(attempt, max_attempts, outcome, policy, chance)
        case _:
            assert_never(outcome)


def _after_crash(attempt: int, max_attempts: int, error: Failure, crashes: int) -> Change:
    if crashes >= MOST_CRASHES:
        return Change(State.DEAD, reason=KILLED_ITS_WORKER, error=error, crashed=True)
    if attempt >= max_attempts:
        return Change(State.DEAD, reason=LOST_ON_LAST_ATTEMPT, error=error, crashed=True)
    return Change(State.READY, error=error, crashed=True)


def _after_failure(attempt: int, max_attempts: int, failed: Failed, policy: Policy, chance: float) -> Change:
    error, after_ms = failed.error, failed.after_ms
    if not (failed.retry and policy.retries(error)):
        return Change(State.DEAD, reason=failed.reason or NOT_RETRIED, error=error)
    if attempt >= max_attempts:
        return Change(State.DEAD, reason=failed.reason or ATTEMPTS_USED_UP, error=error)
    wait_ms = policy.backoff.delay_ms(attempt, chance) if after_ms is None else after_ms
    return Change(State.SCHEDULED, after_ms=wait_ms, reason=failed.reason, error=error)


def retry_after(backoff_ms: int, header_ms: int | None) -> int:
    """Return the longer of the backoff's delay and the one of a `Retry-After` header."""
    return max(backoff_ms, header_ms or 0)
