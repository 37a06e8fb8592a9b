"""Events: log lines and calls of listeners for what happens to jobs and workers.

The message of a log line is the name of the event, its fields are in `extra`; payloads are never included. A success is
logged at DEBUG and counted in a summary, every other outcome has a line at its own level.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from duly.app.lease import Lease
from duly.model import Change, Failure, State, Verdict

log = logging.getLogger("duly.worker")

Listener: TypeAlias = Callable[[str, Mapping[str, Any]], None]

_ENDED = {
    State.SUCCEEDED: ("job.succeeded", logging.DEBUG),
    State.PARTIAL: ("job.partial", logging.WARNING),
    State.DEAD: ("job.dead", logging.ERROR),
    State.CANCELLED: ("job.cancelled", logging.INFO),
    State.WAITING: ("job.waiting", logging.INFO),
    State.READY: ("job.released", logging.INFO),
}


class Events:
    """Sends the events of an app to the log and to its listeners."""

    def __init__(self, listeners: list[Listener] | None = None) -> None:
        self._listeners = [] if listeners is None else listeners
        self.counts: Counter[str] = Counter()

    def listen(self, listener: Listener) -> Listener:
        """Call `listener(name, fields)` for every event. Can be used as a decorator."""
        self._listeners.append(listener)
        return listener

    def tell(self, name: str, level: int = logging.INFO, **fields: Any) -> None:
        """Log an event and call the listeners."""
        self.counts[name] += 1
        if log.isEnabledFor(level):
            log.log(level, name if log.hasHandlers() else _alone(name, fields), extra=fields)
        for listener in self._listeners:
            try:
                listener(name, fields)
            except Exception:
                log.exception("listener.failed", extra={"event": name})

    @property
    def hears_successes(self) -> bool:
        """Whether each success is an event of its own. By default only the summary counts them."""
        return bool(self._listeners) or log.isEnabledFor(logging.DEBUG)

    def attempted(self, lease: Lease, change: Change, verdict: Verdict, ended_at: float) -> None:
        """Report how an attempt ended."""
        if lease.staged and verdict in (Verdict.ALREADY, Verdict.GONE) and change.state is not State.SUCCEEDED:
            # It succeeded when its own transaction committed. A later error is logged, and changes nothing.
            self.tell("job.raised_after_commit", logging.WARNING, **about(lease), error=_clipped(change.error))
            change = Change(State.SUCCEEDED)
        name, level = _named(change, verdict)
        begun_at = lease.begun_at
        self.tell(
            name,
            level,
            **about(lease),
            outcome=change.state.value if verdict is not Verdict.LOST else "lost",
            error_class=change.error.kind if change.error else None,
            error=_clipped(change.error),
            reason=change.reason,
            retry_in_ms=change.after_ms if change.state is State.SCHEDULED else None,
            ran_ms=None if begun_at is None else round(((lease.ended_at or ended_at) - begun_at) * 1000, 3),
        )


def _alone(name: str, fields: Mapping[str, Any]) -> str:
    """Write an event for a program that has set up no logging: Python then prints the message, without the fields."""
    return " ".join([name, *(str(value) for word in ("task", "job_id", "error") if (value := fields.get(word)))])


def about(lease: Lease) -> dict[str, Any]:
    """Return the fields that identify a job and its attempt, without its payload."""
    job = lease.job
    return {
        "job_id": job.id,
        "task": job.task,
        "queue": job.queue,
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "correlation_id": job.envelope.correlation_id or job.id,
        "causation_id": job.envelope.causation_id,
        "idempotency_key": job.key,
        "subject": job.envelope.subject,
    }


def _named(change: Change, verdict: Verdict) -> tuple[str, int]:
    if verdict is Verdict.LOST:
        return "job.lost", logging.WARNING
    if change.state is State.SCHEDULED:
        return ("job.snoozed", logging.INFO) if change.give_back_attempt else ("job.failed", logging.WARNING)
    if change.state is State.READY and change.crashed:
        return "job.crashed", logging.WARNING
    return _ENDED[change.state]


def _clipped(error: Failure | None) -> str | None:
    return None if error is None else error.message[:200]
