"""Exceptions that a handler raises to end its attempt. None of them is an error."""

from __future__ import annotations

from duly.rules.durations import Duration, to_ms


class Signal(Exception):
    """Base of the exceptions that a handler raises to end its attempt."""


class Snooze(Signal):
    """Call the handler again after this time; this attempt does not count."""

    after_ms = 0

    def __init__(self, after: Duration) -> None:
        super().__init__(f"snoozed for {after}")
        self.after_ms = to_ms(after, what="Snooze")


class Cancel(Signal):
    """End the job as cancelled."""

    reason = "cancelled by its handler"

    def __init__(self, reason: str = "cancelled by its handler") -> None:
        super().__init__(reason)
        self.reason = str(reason)


class Retry(Signal):
    """The attempt failed: try again, after this time instead of the backoff's."""

    reason = "retry asked for by its handler"
    after_ms: int | None = None

    def __init__(self, reason: str = "retry asked for by its handler", *, after: Duration | None = None) -> None:
        super().__init__(reason)
        self.reason = str(reason)
        self.after_ms = None if after is None else to_ms(after, what="Retry(after=)")


class Stopping(BaseException):
    """Raised by a call of the context when the worker must stop: the job is released."""
