"""What a handler raises to say how its attempt ends. None of them is an error."""

from __future__ import annotations

from duly.rules.durations import Duration, to_ms


class Signal(Exception):
    """Base of what a handler raises to say how its attempt ends."""


class Snooze(Signal):
    """Call the handler again after this time, as if this attempt had not been."""

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
    """Raised out of a context call when the worker cannot wait any longer: the job is given back."""
