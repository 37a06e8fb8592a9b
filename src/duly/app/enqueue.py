"""Adds jobs: one in one statement, many in commits of a thousand, each prepared while the commit before it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

from duly.app.database import Database
from duly.app.definition import Definition
from duly.app.gil import threads_switched_often
from duly.app.lease import Lease, current, in_flight, parent
from duly.errors import KeyConflict
from duly.model import Enqueued, NewJob, Terms
from duly.store import ops

Answers: TypeAlias = list[Enqueued]

CHUNK = 1000  # jobs in one commit


class Chunk(NamedTuple):
    """Jobs that are added in one commit. `is_followed`: the next chunk can be prepared meanwhile."""

    jobs: list[NewJob]
    is_followed: bool = False


class Adds(Protocol):
    """A batch, as an enqueue uses it."""

    conn: Any
    _lease: Lease | None  # of the handler that fills it

    def _takes(self, definition: Definition, database: Database) -> bool: ...

    def _add(self, request: Request, chunks: Iterable[Sequence[NewJob]]) -> Answers: ...

    async def _aadd(self, request: Request, chunks: Iterable[Sequence[NewJob]]) -> Answers: ...


class Request(NamedTuple):
    """The part that all jobs of one enqueue share, and where they are added."""

    database: Database
    definition: Definition
    accepted: ops.Accepted
    conn: Any
    batch: Adds | None

    @property
    def terms(self) -> Terms:
        """The options that the jobs share."""
        return self.accepted.terms

    @property
    def is_staged(self) -> bool:
        """Whether the jobs are added in a transaction of the caller."""
        return self.conn is not None or (self.batch is not None and self.batch.conn is not None)


filling: ContextVar[Adds | None] = ContextVar("duly_batch", default=None)


def filled_here() -> Adds | None:
    """Return the batch whose `with` encloses the caller. A handler that runs inside one does not fill it."""
    here = filling.get()
    return here if here is not None and here._lease is current.get() else None


class Enqueuing:
    """Adds the jobs of a request and returns an answer for each. `testing.inline` replaces it."""

    def one(self, request: Request, job: NewJob) -> Enqueued:
        """Add one job."""
        if request.batch is not None:
            return self.many(request, [Chunk([job])])[0]
        database, _, accepted, conn, _ = request
        op = ops.enqueue(accepted, [job], parent=parent(database), checked=True)
        database.admit(accepted.terms.queue, 1, conn, before=0)
        return _finished(request, _held(database.add(op, conn)))[0]

    def many(self, request: Request, chunks: Iterable[Chunk]) -> Answers:
        """Add chunks of jobs in order. The next chunk is prepared while one is being committed."""
        database, _, accepted, conn, batch = request
        if batch is not None:
            return _finished(request, batch._add(request, (chunk.jobs for chunk in chunks)))
        answers: Answers = []
        with ExitStack() as stack:
            thread: ThreadPoolExecutor | None = None
            sent: Future[Answers] | None = None
            for jobs, is_followed in chunks:
                op = ops.enqueue(accepted, jobs, parent=parent(database), checked=True)
                if sent is not None:
                    answers += _held(sent.result())
                sent = None
                database.admit(accepted.terms.queue, len(jobs), conn, before=len(answers))
                if conn is None and is_followed:
                    if thread is None:
                        thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="duly-enqueue"))
                        stack.enter_context(threads_switched_often())
                    sent = thread.submit(database.run, op)
                else:
                    answers += _held(database.add(op, conn))
            if sent is not None:
                answers += _held(sent.result())
        return _finished(request, answers)

    async def aone(self, request: Request, job: NewJob) -> Enqueued:
        """Add one job, from a coroutine."""
        if request.batch is not None:
            return (await self.amany(request, [Chunk([job])]))[0]
        database, _, accepted, conn, _ = request
        lease = current.get()
        with nullcontext() if lease is None else in_flight(lease):
            op = ops.enqueue(accepted, [job], parent=parent(database), checked=True)
            await database.aadmit(accepted.terms.queue, 1, conn, before=0)
            answers = _held(await database.aadd(op, conn))
        return _finished(request, answers)[0]

    async def amany(self, request: Request, chunks: Iterable[Chunk]) -> Answers:
        """Add chunks of jobs, from a coroutine."""
        database, _, accepted, conn, batch = request
        if batch is not None:
            return _finished(request, await batch._aadd(request, (chunk.jobs for chunk in chunks)))
        answers: Answers = []
        lease = current.get()
        with nullcontext() if lease is None else in_flight(lease):
            async with _Beside() as beside:
                for jobs, is_followed in chunks:
                    op = ops.enqueue(accepted, jobs, parent=parent(database), checked=True)
                    answers += await beside.landed()
                    await database.aadmit(accepted.terms.queue, len(jobs), conn, before=len(answers))
                    # Prepare the next chunk during this commit. A handler has no task beside itself.
                    if conn is None and lease is None and is_followed:
                        await beside.send(database.arun(op))
                    else:
                        answers += _held(await database.aadd(op, conn))
                answers += await beside.landed()
        return _finished(request, answers)


class _Beside:
    """The write that is in flight while a coroutine prepares the next one. It is awaited before the next is sent."""

    def __init__(self) -> None:
        self._sent: asyncio.Task[Answers] | None = None
        self._meanwhile = ExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._sent is not None:
            if isinstance(error, asyncio.CancelledError):
                self._sent.cancel()
            with suppress(Exception):  # there is an error already
                await self.landed()

    async def send(self, write: Coroutine[Any, Any, Answers]) -> None:
        """Start a write."""
        self._meanwhile.enter_context(threads_switched_often())
        self._sent = asyncio.create_task(write)
        await asyncio.sleep(0)  # let it begin

    async def landed(self) -> Answers:
        """Wait for the write in flight, and return its answers."""
        sent, self._sent = self._sent, None
        with self._meanwhile:
            return [] if sent is None else await sent


def _held(answers: Answers) -> Answers:
    """Raise LeaseLost in a handler that lost its lease: no answers mean that nothing was added."""
    lease = current.get()
    if lease is not None and not lease.over and not answers:
        lease.lose()
    return answers


def _finished(request: Request, answers: Answers) -> Answers:
    """Wake up workers if needed, and raise KeyConflict if a key is taken by other arguments."""
    if request.conn is not None:
        request.database.woke()
    conflicts = [answer for answer in answers if answer.conflict]
    if conflicts:
        others = f"; the other {len(answers) - len(conflicts)} were enqueued" if len(answers) > 1 else ""
        raise KeyConflict(
            f"{request.definition.name}: the key is taken by job {conflicts[0].id}, which has other arguments{others}. "
            "Use one key for one piece of work",
            conflicts[0].id,
        )
    return answers
