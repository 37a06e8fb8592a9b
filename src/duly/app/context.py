"""The context of a handler: its view of the job it runs.

`Ctx` is for async handlers, `SyncCtx` for sync ones. Each call first checks whether the handler should stop, so a
handler that calls regularly stops early.
"""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, final

from duly.app.lease import Lease, in_flight
from duly.errors import AnswerLost, ConfigError, StoreUnavailable
from duly.model import Change, Claimed, Envelope, State, Verdict
from duly.rules import codec
from duly.store import caller, ops
from duly.store.op import Finish, Op

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class Missed:
    """Due times that no worker fired in time: how many, the first and the last."""

    count: int = 0
    since: datetime | None = None
    until: datetime | None = None


class _Context:
    """The properties that both contexts share."""

    def __init__(self, lease: Lease | None) -> None:
        self._lease = lease

    @property
    def _job(self) -> Claimed:
        if self._lease is None:
            raise ConfigError("This handler was called directly and has no job. Enqueue it to give it one.")
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
        """The queue of the job."""
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
        """The idempotency key for calls to other systems: the same in every attempt."""
        return self._job.key or self._job.origin or self._job.id

    @property
    def envelope(self) -> Envelope:
        """The metadata of the job: correlation, causation, subject."""
        return self._job.envelope

    @property
    def correlation_id(self) -> str:
        """The id that the job shares with every job it causes."""
        return self._job.envelope.correlation_id or self._job.id

    @property
    def due_at(self) -> datetime:
        """When the job was due. For a run of a schedule: the due time by its rule, without jitter, delay or retries."""
        due_at = self._job.envelope.due_at
        return _moment(self._job.due_at if due_at is None else due_at)

    @property
    def schedule(self) -> str | None:
        """The name of the schedule that created the job."""
        return self._job.schedule

    @property
    def batch(self) -> str | None:
        """The id of the batch that the job belongs to, or whose callback it is."""
        return self._job.batch_id or self._job.envelope.batch

    @property
    def missed(self) -> Missed:
        """The due times that this run replaces, its own included, if its schedule has catchup="last"."""
        missed = self._job.envelope.missed
        return Missed() if missed is None else Missed(missed.count, _moment(missed.since), _moment(missed.until))

    @property
    def replay_count(self) -> int:
        """How often the job was replayed."""
        return self._job.replay_count

    @property
    def cancelled(self) -> bool:
        """Whether the handler should stop: cancelled, timed out, its lease lost, or its worker stopping."""
        return self._lease is not None and self._lease.asked is not None

    def _progress(self, percent: float, message: str | None) -> Op[bool] | None:
        return self._op(lambda held: ops.progress(held, percent, message))

    def _heartbeat(self) -> Op[bool] | None:
        if self._lease is not None:
            self._lease.beat()
        return self._op(ops.heartbeat)

    def _op(self, make: Any) -> Op[bool] | None:
        """Build a write of a running job. None: the handler was called directly and has no job."""
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
    """The context of an async handler. A handler that needs it takes it as the first parameter."""

    async def progress(self, percent: float, message: str | None = None) -> None:
        """Record how far the job is, from 0 to 100. This does not extend the lease; it is lost without a database."""
        if op := self._progress(percent, message):
            self._answered(await self._run(op))

    async def heartbeat(self) -> None:
        """Report that the handler is alive, for `stall_after`."""
        if op := self._heartbeat():
            self._answered(await self._run(op))

    def commit(self, conn: Any, *, result: Any = None) -> Awaitable[None]:
        """Finish the job inside your own transaction, so your changes and the finish commit together or not at all.

        You commit the transaction. Await the call if the connection is async.
        """
        op = self._staged(result)
        assert self._lease is not None
        if caller.is_async(conn):
            return self._acommit(conn, op)
        self._stage(conn, self._lease.database.add(op, conn))
        return _Done()

    async def _acommit(self, conn: Any, op: Op[dict[str, Verdict]]) -> None:
        assert self._lease is not None
        self._stage(conn, await self._lease.database.aadd(op, conn))

    async def _run(self, op: Op[bool]) -> bool:
        assert self._lease is not None
        with in_flight(self._lease), _reporting() as report:
            report.held = await self._lease.database.arun(op)
        return report.held


@final
class SyncCtx(_Context):
    """The context of a sync handler. A handler that needs it takes it as the first parameter."""

    def progress(self, percent: float, message: str | None = None) -> None:
        """Record how far the job is, from 0 to 100. This does not extend the lease; it is lost without a database."""
        if op := self._progress(percent, message):
            self._answered(self._run(op))

    def heartbeat(self) -> None:
        """Report that the handler is alive, for `stall_after`."""
        if op := self._heartbeat():
            self._answered(self._run(op))

    def commit(self, conn: Any, *, result: Any = None) -> None:
        """Finish the job inside your own transaction, so your changes and the finish commit together or not at all.

        You commit the transaction.
        """
        op = self._staged(result)
        assert self._lease is not None
        self._stage(conn, self._lease.database.add(op, conn))

    def _run(self, op: Op[bool]) -> bool:
        assert self._lease is not None
        with _reporting() as report:
            report.held = self._lease.database.run(op)
        return report.held


class _Report:
    """Whether the job is still held, as far as a report of the handler knows."""

    held = True


def _moment(at: int) -> datetime:
    return datetime.fromtimestamp(at / 1000, UTC)


@contextmanager
def _reporting() -> Iterator[_Report]:
    """Drop a report while the database is unavailable: no handler should fail because of it, and the next follows."""
    with suppress(StoreUnavailable, AnswerLost):
        yield _Report()


class _Done:
    """An awaitable that is done."""

    def __await__(self) -> Generator[Any, Any, None]:
        return
        yield
