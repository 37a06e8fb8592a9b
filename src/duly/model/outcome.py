"""How an attempt ends, the change that is written then, and the result of that write."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from msgspec import Struct

from duly.model.job import State


class Succeeded(Struct, frozen=True):
    """The handler returned. `result` is JSON text, or None if it returned nothing."""

    result: str | None = None


class PartlyDone(Struct, frozen=True):
    """Some channels of the job were delivered, and none is left to try."""

    reason: str
    result: str | None = None


class Failed(Struct, frozen=True):
    """The handler raised, or exceeded its timeout."""

    error: Failure
    retry: bool = True
    after_ms: int | None = None
    reason: str | None = None


class Crashed(Struct, frozen=True):
    """The child process that ran the job alone died; the worker survived."""

    error: Failure


class Snoozed(Struct, frozen=True):
    """The handler asked to run again later. The attempt does not count."""

    after_ms: int


class Cancelled(Struct, frozen=True):
    """The handler cancelled the job, or a user asked it to."""

    reason: str


class Waiting(Struct, frozen=True):
    """The job waits for something other than a time, at most `timeout_ms`. The attempt does not count."""

    reason: str
    timeout_ms: int | None = None


class Released(Struct, frozen=True):
    """The worker returns the job unfinished. The attempt does not count."""


Outcome: TypeAlias = Succeeded | PartlyDone | Failed | Crashed | Snoozed | Cancelled | Waiting | Released


class Failure(Struct, frozen=True):
    """Why an attempt did not succeed: the error class, its message, and the traceback."""

    kind: str
    message: str
    traceback: str | None = None


class Change(Struct, frozen=True):
    """The change to write when an attempt ends, as `lifecycle.decide` makes it from an outcome.

    A waiting job whose reason starts with `PARKED` is parked: `ops.wake` makes it ready again.
    """

    state: State
    after_ms: int | None = None
    give_back_attempt: bool = False
    result: str | None = None
    reason: str | None = None
    error: Failure | None = None
    crashed: bool = False


class Verdict(StrEnum):
    """The result of a write that named a token.

    If only part of a list was recorded, ALREADY and GONE may also stand for a write that was recorded.
    """

    RECORDED = "recorded"
    ALREADY = "already"
    GONE = "gone"
    LOST = "lost"
