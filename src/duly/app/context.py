"""What a handler holds of its job: the lease as the worker sees it, and the context as the handler does.

`Ctx` is for async handlers, `SyncCtx` for sync ones. Every call of theirs first looks whether the handler should
stop, so that one which calls now and then is never the last to hear of it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NoReturn, final

import msgspec

from duly.errors import AnswerLost, ConfigError, JobTimeout, LeaseLost, StoreUnavailable
from duly.model import Change, Claimed, Envelope, State, Verdict
from duly.rules import codec
from duly.rules.control import Cancel, Stopping
from duly.store import caller, ops
from duly.store.op import Finish, Held, Op

if TYPE_CHECKING:
    import asyncio

    from duly.app.tasks import Task
    from duly.store.driver import Driver


class Asked(StrEnum):
    """Why a handler is asked to stop."""

    CANCEL = "cancel"
    TIMEOUT = "timeout"
    LOST = "lost"
    STOPPING = "stopping"


CANCELLED_ON_REQUEST = "cancelled on request"


class Lease(msgspec.Struct, eq=False):
    """One job on lease in this process, and what the worker knows of its handler."""

    job: Claimed
    task: Task[..., Any, Any]
    driver: Driver
    schema: str
    claimed_at: float
    begun_at: float | None = None
    ended_at: float = 0.0  # when the handler has ended
    beat_at: float | None = None  # the handler's own heartbeat
    on_beat: Callable[[], None] | None = None  # who is told of it: the worker watches for stalls, from another process
    stalled: bool = False
    asked: Asked | None = None
    asked_at: float = 0.0
    aio: asyncio.Task[Any] | None = None
    thread: int | None = None
    interrupted: bool = False  # something was raised into that thread, or is about to be
    staged: bool = False  # the finish is part of the caller's transaction
    sent: bool = False  # the finish is on its way
    closed: bool = False  # nothing that the handler still does counts
    in_flight: int = 0  # writes of the handler that are on their way
    landed: asyncio.Event | None = None  # set when they have arrived
    beside: set[asyncio.Task[Any]] | None = None  # what the handler started, if it did: see `left`
    over: bool = False  # the handler has ended; what it left behind may still run
    conn: Any = None  # the connection on which it staged its finish

    def __repr__(self) -> str:
        return f"<lease of job {self.job.id}>"  # what the job is called with may be a secret

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("job", self.job.id)]

    @property
    def left(self) -> set[asyncio.Task[Any]]:
        """What the handler started beside itself: a set that is made when it first does, because few do."""
        if self.beside is None:
            self.beside = set()
        return self.beside

    @property
    def held(self) -> Held:
        """The job and the token under which it is held."""
        return Held(self.job.id, self.job.token)

    def beat(self) -> None:
        """Note that the handler is alive."""
        self.beat_at, self.stalled = time.monotonic(), False
        if self.on_beat is not None:
            self.on_beat()

    def check(self) -> None:
        """Raise what tells the handler to stop, if it should."""
        if self.asked is not None:
            self.stop()

    def stop(self) -> NoReturn:
        """Tell the handler why it should stop."""
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
        """Note that the database says that the lease is lost, and tell the handler."""
        self.asked = self.asked or Asked.LOST
        self.stop()


def timed_out(lease: Lease) -> JobTimeout:
    """Make the error of a handler that ran too long."""
    job, limit_ms = lease.job, lease.task.definition.timeout_ms or 0
    return JobTimeout(f"{job.task} {job.id}: ran longer than its timeout of {limit_ms / 1000:g} s", job.id)


current: ContextVar[Lease | None] = ContextVar("duly_lease", default=None)


def parent() -> Held | None:
    """Give the job whose handler enqueues, under whose lease it does so; none once its finish is staged."""
    lease = current.get()
    return None if lease is None or lease.staged or lease.over else lease.held


def heed() -> None:
    """Raise what tells the handler that enqueues to stop, if it should."""
    lease = current.get()
    if lease is not None and not lease.over:
        lease.check()


@dataclass(frozen=True, slots=True)
class Missed:
    """Due times that nobody fired in time: how many, the first and the last."""

    count: int = 0
    since: datetime | None = None
    until: datetime | None = None


class _Context:
    """What both contexts say of the job."""

    def __init__(self, lease: Lease | None) -> None:
        self._lease = lease

    @property
    def _job(self) -> Claimed:
        if self._lease is None:
            raise ConfigError("this handler was called directly, so that there is no job to ask about: enqueue it")
        return self._lease.job

    @property
    def job_id(self) -> str:
        """The id of the job."""
        return self._job.id

    @property
    def task(self) -> str:
        """The name of the task."""
        return self._job.task

    @property
    def queue(self) -> str:
        """The queue that the job came from."""
        return self._job.queue

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self._job.attempt

    @property
    def max_attempts(self) -> int:
        """How often the job runs at most."""
        return self._job.max_attempts

    @property
    def key(self) -> str:
        """The key to give to outside systems, so that they take the effect once: the same for every attempt."""
        return self._job.key or self._job.origin or self._job.id

    @property
    def envelope(self) -> Envelope:
        """What travels with the job: correlation, causation, subject."""
        return self._job.envelope

    @property
    def correlation_id(self) -> str:
        """What the job and all that it causes have in common."""
        return self._job.envelope.correlation_id or self._job.id

    @property
    def due_at(self) -> datetime:
        """When the job was due; a run of a schedule is due by its rule, whatever its jitter, delay or retries."""
        due_at = self._job.envelope.due_at
        return _moment(self._job.due_at if due_at is None else due_at)

    @property
    def schedule(self) -> str | None:
        """The name of the schedule that the job is a run of."""
        return self._job.schedule

    @property
    def batch(self) -> str | None:
        """The id of the batch that the job belongs to, or that it is a callback of."""
        return self._job.batch_id or self._job.envelope.batch

    @property
    def missed(self) -> Missed:
        """The due times that this run stands for, its own included, where its schedule has catchup="last"."""
        missed = self._job.envelope.missed
        return Missed() if missed is None else Missed(missed.count, _moment(missed.since), _moment(missed.until))

    @property
    def replay_count(self) -> int:
        """How often the job was replayed."""
        return self._job.replay_count

    @property
    def cancelled(self) -> bool:
        """Whether the handler should stop: cancelled, out of time, its lease lost or its worker stopping."""
        return self._lease is not None and self._lease.asked is not None

    def _progress(self, percent: float, message: str | None) -> Op[bool] | None:
        return self._op(lambda held: ops.progress(held, percent, message))

    def _heartbeat(self) -> Op[bool] | None:
        if self._lease is not None:
            self._lease.beat()
        return self._op(ops.heartbeat)

    def _op(self, make: Any) -> Op[bool] | None:
        """Make a write of a running job. None: the handler was called directly, and there is nothing to write."""
        if self._lease is None:
            return None
        self._lease.check()
        op: Op[bool] = make(self._lease.held)
        return op

    def _answered(self, held: bool) -> None:
        if not held and self._lease is not None:
            self._lease.lose()

    def _staged(self, result: Any) -> Op[dict[str, Verdict]]:
        job = self._job
        assert self._lease is not None
        self._lease.check()
        text = None if result is None else codec.encode(result)
        return ops.finish([Finish(job, Change(State.SUCCEEDED, result=text))], borrowed=True)

    def _stage(self, conn: Any, verdicts: dict[str, Verdict]) -> None:
        assert self._lease is not None
        if verdicts[self._job.id] in (Verdict.LOST, Verdict.GONE):
            self._lease.lose()
        self._lease.staged = True
        self._lease.conn = conn


@final
class Ctx(_Context):
    """What an async handler holds of its job. It is the first parameter of those that want it."""

    async def progress(self, percent: float, message: str | None = None) -> None:
        """Note how far the job is, 0 to 100. It does not extend the lease, and is lost while the database is away."""
        if op := self._progress(percent, message):
            self._answered(await self._run(op))

    async def heartbeat(self) -> None:
        """Say that the handler itself is alive, for `stall_after`."""
        if op := self._heartbeat():
            self._answered(await self._run(op))

    def commit(self, conn: Any, *, result: Any = None) -> Awaitable[None]:
        """Finish the job inside your own transaction: what you commit and the finish are both there, or neither.

        Nothing is committed here. To be awaited where the connection is async.
        """
        op = self._staged(result)
        assert self._lease is not None
        if caller.is_async(conn):
            return self._acommit(conn, op)
        self._stage(conn, caller.run(conn, op, schema=self._lease.schema))
        return _Done()

    async def _acommit(self, conn: Any, op: Op[dict[str, Verdict]]) -> None:
        assert self._lease is not None
        self._stage(conn, await caller.arun(conn, op, schema=self._lease.schema))

    async def _run(self, op: Op[bool]) -> bool:
        assert self._lease is not None
        with in_flight(self._lease), _reporting() as report:
            report.held = await self._lease.driver.arun(op)
        return report.held


@final
class SyncCtx(_Context):
    """What a sync handler holds of its job. It is the first parameter of those that want it."""

    def progress(self, percent: float, message: str | None = None) -> None:
        """Note how far the job is, 0 to 100. It does not extend the lease, and is lost while the database is away."""
        if op := self._progress(percent, message):
            self._answered(self._run(op))

    def heartbeat(self) -> None:
        """Say that the handler itself is alive, for `stall_after`."""
        if op := self._heartbeat():
            self._answered(self._run(op))

    def commit(self, conn: Any, *, result: Any = None) -> None:
        """Finish the job inside your own transaction: what you commit and the finish are both there, or neither.

        Nothing is committed here.
        """
        op = self._staged(result)
        assert self._lease is not None
        self._stage(conn, caller.run(conn, op, schema=self._lease.schema))

    def _run(self, op: Op[bool]) -> bool:
        assert self._lease is not None
        with _reporting() as report:
            report.held = self._lease.driver.run(op)
        return report.held


class _Report:
    """Whether the lease stands, as far as a report of the handler has found out."""

    held = True


def _moment(at: int) -> datetime:
    return datetime.fromtimestamp(at / 1000, UTC)


@contextmanager
def _reporting() -> Iterator[_Report]:
    """Let a report be lost while the database is away: no handler should fail of it, and the next one says more."""
    with suppress(StoreUnavailable, AnswerLost):
        yield _Report()


class _Done:
    """Something to await that is there already."""

    def __await__(self) -> Generator[Any, Any, None]:
        return
        yield


@contextmanager
def in_flight(lease: Lease) -> Iterator[None]:
    """Count a write of a handler that is on its way, so that its attempt does not end before."""
    lease.in_flight += 1
    try:
        yield
    finally:
        lease.in_flight -= 1
        if lease.landed is not None and not lease.in_flight:
            lease.landed.set()
