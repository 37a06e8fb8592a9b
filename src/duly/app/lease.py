"""The lease on one job: how its handler is doing, and the request to stop it.

The worker and the handler share it; `current` is the lease of the handler that runs here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from duly.app.database import Database
from duly.app.definition import Definition
from duly.errors import JobTimeout, LeaseLost
from duly.model import Claimed
from duly.rules.control import Cancel, Stopping
from duly.store.op import Held

if TYPE_CHECKING:
    import asyncio


class Asked(StrEnum):
    """Why a handler is asked to stop."""

    CANCEL = "cancel"
    TIMEOUT = "timeout"
    LOST = "lost"
    STOPPING = "stopping"


CANCELLED_ON_REQUEST = "cancelled on request"


class Lease(msgspec.Struct, eq=False):
    """A leased job in this process and the state of its handler."""

    job: Claimed
    definition: Definition
    database: Database
    claimed_at: float
    tasks: Any = None  # of the app whose worker holds it
    begun_at: float | None = None
    ended_at: float = 0.0  # when the handler ended
    beat_at: float | None = None  # the handler's own heartbeat
    on_beat: Callable[[], None] | None = None  # reports heartbeats to the worker from a child process
    stalled: bool = False
    asked: Asked | None = None
    asked_at: float = 0.0
    aio: asyncio.Task[Any] | None = None
    thread: int | None = None
    interrupted: bool = False  # an exception was raised into that thread, or is about to be
    staged: bool = False  # the finish is part of the caller's transaction
    sent: bool = False  # the finish is in flight
    closed: bool = False  # later calls of the handler have no effect
    in_flight: int = 0  # writes of the handler in flight
    landed: asyncio.Event | None = None  # set when none is left in flight
    beside: set[asyncio.Task[Any]] | None = None  # tasks that the handler started, see `left`
    over: bool = False  # the handler has ended; tasks it started may still run
    conn: Any = None  # the connection on which it staged its finish

    def __repr__(self) -> str:
        return f"<lease of job {self.job.id}>"  # arguments may be secret

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("job", self.job.id)]

    @property
    def left(self) -> set[asyncio.Task[Any]]:
        """The tasks that the handler started. The set is made on first use, because few handlers start any."""
        if self.beside is None:
            self.beside = set()
        return self.beside

    @property
    def held(self) -> Held:
        """The job and the token under which it is held."""
        return Held(self.job.id, self.job.token)

    def beat(self) -> None:
        """Record a heartbeat of the handler."""
        self.beat_at, self.stalled = time.monotonic(), False
        if self.on_beat is not None:
            self.on_beat()

    def check(self) -> None:
        """Raise the exception that stops the handler, if it should stop."""
        if self.asked is not None:
            self.stop()

    def stop(self) -> NoReturn:
        """Raise the exception that stops the handler."""
        job = self.job
        match self.asked:
            case Asked.CANCEL:
                raise Cancel(CANCELLED_ON_REQUEST)
            case Asked.TIMEOUT:
                raise timed_out(self)
            case Asked.STOPPING:
                raise Stopping(f"{job.task} {job.id}: its worker stops")
        raise LeaseLost(
            f"{job.task} {job.id}: the lease is lost, another worker may own it; nothing was written", job.id
        )

    def lose(self) -> NoReturn:
        """Record that the database refused the lease, and raise LeaseLost."""
        self.asked = self.asked or Asked.LOST
        self.stop()


def timed_out(lease: Lease) -> JobTimeout:
    """Build the error for a handler that exceeded its timeout."""
    job, limit_ms = lease.job, lease.definition.timeout_ms or 0
    return JobTimeout(f"{job.task} {job.id}: ran longer than its timeout of {limit_ms / 1000:g} s", job.id)


current: ContextVar[Lease | None] = ContextVar("duly_lease", default=None)


def parent(database: Database) -> Held | None:
    """Return the job whose handler enqueues here; None outside of handlers and once its finish is staged.

    Another database does not know the job, and cannot check its lease.
    """
    lease = current.get()
    if lease is None or lease.staged or lease.over:
        return None
    return lease.held if database is lease.database or database.place == lease.database.place else None


def heed() -> None:
    """Raise the exception that stops the current handler, if there is one and it should stop."""
    lease = current.get()
    if lease is not None and not lease.over:
        lease.check()


@contextmanager
def in_flight(lease: Lease) -> Iterator[None]:
    """Count a write of the handler in flight: its attempt ends only after it."""
    lease.in_flight += 1
    try:
        yield
    finally:
        lease.in_flight -= 1
        if lease.landed is not None and not lease.in_flight:
            lease.landed.set()
