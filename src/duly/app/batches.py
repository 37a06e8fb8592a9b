"""Batches: groups of jobs with a common progress, and callbacks when all of them have ended.

A batch labels its jobs and counts their ends; workers claim, retry and rescue them like any others. It is filled in
chunks, so that memory use does not grow with the number of jobs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import Token
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar, Unpack, cast

from msgspec.structs import replace

from duly.app.database import Database
from duly.app.definition import Definition
from duly.app.enqueue import CHUNK, Adds, Answers, Request, filled_here, filling
from duly.app.filters import checked
from duly.app.job import pauses
from duly.app.lease import Lease, current, heed, in_flight, parent
from duly.app.task import Call, Task
from duly.app.tasks import Tasks, callback
from duly.errors import BadArguments, BatchNotFound, BatchSealed, ConfigError, KeyConflict
from duly.model import BatchRecord, Enqueued, Envelope, NewJob
from duly.rules import envelope as envelopes
from duly.rules import keys
from duly.rules.checks import named
from duly.rules.messages import brief
from duly.store import batches as store
from duly.store import ops, sequence
from duly.store.batches import Added, Callbacks, Opened
from duly.store.op import Op
from duly.store.sequence import Steps

if TYPE_CHECKING:
    from types import TracebackType

T = TypeVar("T")

# In the class below `list` is a method.
Records: TypeAlias = list[BatchRecord]


class Batch:
    """A group of jobs: `with app.batch("import") as batch:` fills it."""

    def __init__(self, tasks: Tasks, opening: Op[Opened | None], conn: Any = None) -> None:
        self._tasks = tasks
        self._opening = opening
        self._opened: Opened | None = None
        self._place: int | None = None  # how many jobs were added here, if their order matters
        self._entered: Token[Adds | None] | None = None
        self._lease: Lease | None = None  # of the handler that fills it
        # Where the order matters, one add runs at a time: two adds at one place would take each other for done.
        self._turn, self._aturn = threading.RLock(), asyncio.Lock()
        self._asking = False
        self.conn = conn

    @classmethod
    def new(
        cls,
        tasks: Tasks,
        name: str,
        *,
        key: str | None,
        callbacks: Mapping[str, Task[..., Any, Any] | str | None],
        ok_at: float,
        conn: Any,
    ) -> Batch:
        """Check the options of a batch. It is written when its `with` is entered."""
        named(name, "a batch's name=")
        if key is not None:
            keys.check_key(named(key, f"batch {name!r}: key="), f"batch {name!r}: key= is")
        _check_share(ok_at, f"batch {name!r}: ok_at=")
        batch_id = tasks.database.new_id()
        due = {what: _callback(tasks, task, f"batch {name!r}: {what}=", batch_id) for what, task in callbacks.items()}
        opening = store.open_batch(batch_id, name, key=key, ok_at=float(ok_at), callbacks=Callbacks(**due))
        return cls(tasks, opening, conn)

    @classmethod
    def known(cls, tasks: Tasks, record: BatchRecord) -> Batch:
        """Return a batch of the database, to add to it or to read its progress."""
        batch = cls(tasks, store.open_batch(record.id, record.name, key=record.key))
        batch._opened = Opened(record.id, record.name, record.key, 0)
        return batch

    def __repr__(self) -> str:
        return f"<batch {self.id} {self.name!r}>" if self._opened else f"<batch {self.name!r}, not entered>"

    @property
    def id(self) -> str:
        """The id of the batch."""
        if self._opened is None:
            raise ConfigError(f"batch {self.name!r} does not exist yet: enter it, as in `with app.batch(…) as batch:`")
        return self._opened.id

    @property
    def name(self) -> str:
        """The name: a label, which other batches may have too."""
        return self._opened.name if self._opened else str(self._opening.params["name"])

    @property
    def key(self) -> str | None:
        """The key under which code that runs again finds the batch."""
        key: str | None = self._opening.params["key"]
        return key

    @property
    def _database(self) -> Database:
        return self._tasks.database

    # Filling

    def __enter__(self) -> Batch:
        self._enter(sequence.run(self._opens(), lambda op: self._database.add(op, self.conn)))
        return self

    async def __aenter__(self) -> Batch:
        self._enter(await sequence.arun(self._opens(), lambda op: self._database.aadd(op, self.conn)))
        return self

    def _opens(self) -> Steps[Opened]:
        if self._opened is not None:
            raise ConfigError(f"{self!r} was entered before: make another one, or add to it with using(batch=…)")
        if (outer := filled_here()) is not None:
            raise ConfigError(f"batch {self.name!r} is entered inside {outer!r}: a job belongs to one batch at most")
        while (opened := (yield self._opening)) is None:
            pass  # the batch with this key was pruned meanwhile
        return cast("Opened", opened)

    def _enter(self, opened: Opened) -> None:
        self._opened = opened
        self._place = None if opened.key is None else 0
        self._lease = current.get()
        self._entered = filling.set(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._leave(kind):
            self.seal()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._leave(kind):
            await self.aseal()

    def _leave(self, kind: type[BaseException] | None) -> bool:
        """Return whether to seal the batch. After an error it stays open, to be filled again under its key."""
        assert self._entered is not None
        filling.reset(self._entered)
        self._entered, self._place = None, None
        return kind is None

    def fill(self, calls: Iterable[Call[Any]]) -> int:
        """Add any number of jobs, a thousand in one commit: `batch.fill(f.call(x) for x in xs)`. Returns how many.

        The calls may be of several tasks. Raises KeyConflict for a key that is taken, after all other jobs were added.
        """
        given, taken = 0, None
        for task, chunk in self._chunks(calls):
            answers = self._add(self._request(task), [chunk], before=given)
            given, taken = given + len(chunk), taken or _conflict(answers)
        return self._given(given, taken)

    async def afill(self, calls: Iterable[Call[Any]] | AsyncIterable[Call[Any]]) -> int:
        """Add any number of jobs, from a coroutine; the calls may come from an async iterator."""
        given, taken = 0, None
        async for task, chunk in self._achunks(calls):
            answers = await self._aadd(self._request(task), [chunk], before=given)
            given, taken = given + len(chunk), taken or _conflict(answers)
        return self._given(given, taken)

    async def _achunks(
        self, calls: Iterable[Call[Any]] | AsyncIterable[Call[Any]]
    ) -> AsyncIterator[tuple[Task[..., Any, Any], list[NewJob]]]:
        some: list[Call[Any]] = []
        if isinstance(calls, AsyncIterable):
            async for call in calls:
                some.append(call)
                if len(some) == CHUNK:
                    for cut in self._chunks(some):
                        yield cut
                    some = []
        for cut in self._chunks(some if isinstance(calls, AsyncIterable) else calls):
            yield cut

    def _chunks(self, calls: Iterable[Call[Any]]) -> Iterable[tuple[Task[..., Any, Any], list[NewJob]]]:
        """Cut calls into chunks of one task each."""
        if not isinstance(calls, Iterable):
            raise ConfigError(f"{self!r}: fill got {calls!r:.60}, no calls: write batch.fill(task.call(…) for …)")
        for task, alike in groupby(calls, self._task_of):
            while chunk := list(islice(alike, CHUNK)):
                yield task, task._new_jobs(chunk)

    def _task_of(self, call: Call[Any]) -> Task[..., Any, Any]:
        if not isinstance(call, Call):
            raise ConfigError(
                f"{self!r}: fill got {call!r:.60}, which is no call: write batch.fill(task.call(…) for …)"
            )
        heed()
        return call.task

    def _given(self, given: int, taken: Enqueued | None) -> int:
        if taken is not None:
            raise KeyConflict(
                f"{self!r}: a key is taken by job {taken.id}, which has other arguments; the others were added. "
                "Use one key for one piece of work",
                taken.id,
            )
        return given

    def _request(self, task: Task[..., Any, Any]) -> Request:
        return Request(task._target.database, task.definition, task._accepted(), task._using.conn, self)

    def _add(self, request: Request, chunks: Iterable[Sequence[NewJob]], *, before: int = 0) -> Answers:
        """Add jobs of a task in order, and return their answers. `before`: how many jobs this call added already."""
        self._check(request)
        with nullcontext() if self._place is None else self._turn:
            added = sequence.run(self._adding(request, chunks, before), lambda op: self._database.add(op, self.conn))
        self._staged()
        return added

    async def _aadd(self, request: Request, chunks: Iterable[Sequence[NewJob]], *, before: int = 0) -> Answers:
        self._check(request)
        lease = current.get()
        with nullcontext() if lease is None else in_flight(lease):
            async with nullcontext() if self._place is None else self._aturn:
                adding = self._adding(request, chunks, before)
                added = await sequence.arun(adding, lambda op: self._database.aadd(op, self.conn))
        self._staged()
        return added

    def _staged(self) -> None:
        """Wake up workers after a write on the caller's connection."""
        if self.conn is not None:
            self._database.woke()

    def _takes(self, definition: Definition, database: Database) -> bool:
        """Return whether jobs of a task, in a database, belong here; raise if only the database is another."""
        if database is self._database:
            return True
        if self._tasks.knows(definition):
            raise ConfigError(
                f"{definition.name} would be added to another database than that of {self!r}: "
                f"write {definition.name}.using(app=…) with the app of the batch, or enqueue it outside"
            )
        return False

    def _check(self, request: Request) -> None:
        """Raise for jobs that cannot belong to this batch."""
        name = request.definition.name
        if request.terms.debounce_ms is not None:
            raise ConfigError(
                f"{name}: using(debounce=…) inside {self!r}: a debounced call may run as a later job, "
                "and belongs to no batch. Enqueue it outside"
            )
        if not self._takes(request.definition, request.database):
            raise ConfigError(f"{name} is a task of another app than {self!r}")
        if request.conn is not None and request.conn is not self.conn:
            raise ConfigError(
                f"{name}: using(conn=…) adds to {self!r}, which is not in that transaction and would wait for it. "
                "Write app.batch(…, conn=…), so that both commit together"
            )

    def _adding(self, request: Request, chunks: Iterable[Sequence[NewJob]], before: int) -> Steps[Answers]:
        terms = replace(request.terms, batch_id=self.id)
        answers: Answers = []
        for chunk in chunks:
            while chunk and self._place is not None:
                chunk = yield from self._in_order(terms, chunk, answers, before)
            if chunk:
                yield from self._database.depths.admit(terms.queue, len(chunk), before=before + len(answers))
                answers += self._taken((yield store.add(terms, chunk, parent=parent(self._database)))).jobs
        return answers

    def _in_order(self, terms: Any, chunk: Sequence[NewJob], answers: Answers, before: int) -> Steps[Sequence[NewJob]]:
        """Add the part of a chunk that is not in the batch yet, at its place. Returns the jobs left to add."""
        assert self._place is not None
        assert self._opened is not None
        begin = self._place
        there = min(len(chunk), max(0, self._opened.filled - begin))
        placed = [replace(job, id=keys.id_in(self.id, begin + n)) for n, job in enumerate(chunk)]
        if not there:
            self._refuse_at_unknown_place()
            yield from self._database.depths.admit(terms.queue, len(placed), before=before + len(answers))
            self._asking = True
            answer = yield store.add(terms, placed, filling=begin, parent=parent(self._database))
            self._asking = False
            added = self._taken(answer, begin + len(placed))
            if added.filled == begin:
                self._place += len(placed)
                answers += added.jobs
                return []
            # Another process has filled it further under the same key, or an answer was lost.
            self._opened = replace(self._opened, filled=added.filled)
            there = min(len(chunk), max(0, (added.filled or 0) - begin))
        self._place += there
        keyed = [job for job in placed[:there] if job.key is not None]
        answers += (yield store.added_before(terms, keyed)) if keyed else [Enqueued(job.id) for job in placed[:there]]
        return chunk[there:]

    def _refuse_at_unknown_place(self) -> None:
        """Raise if it is unknown how far the batch is filled: later jobs could be taken for earlier ones."""
        if self._asking:
            raise ConfigError(
                f"{self!r} has a key, so one thread fills it in order. An earlier add failed or is still running. "
                "Let the error leave the `with`, and run it again under its key"
            )

    def _taken(self, added: Added, end: int | None = None) -> Added:
        """Return the answer to an add, or raise if nothing was added."""
        if added.lost and (lease := current.get()) is not None:
            lease.lose()
        if added.filled is None or added.filled < (self._place or 0):
            raise self._gone()
        if added.sealed and (end is None or added.filled < end):
            filled = f" with {added.filled:,} jobs under the key {self.key!r}" if end is not None else ""
            raise BatchSealed(f"{self!r} was sealed{filled}, and takes no more: make another batch")
        return added

    def seal(self) -> None:
        """Close the batch for more jobs, as the end of the `with` does. It is complete when every job has ended."""
        self._found(self._database.add(store.seal(self.id), self.conn))
        self._staged()

    async def aseal(self) -> None:
        """Close the batch for more jobs, from a coroutine."""
        sealed = await self._database.aadd(store.seal(self.id), self.conn)
        self._found(sealed)
        self._staged()

    # Inspecting and changing

    def progress(self) -> BatchRecord:
        """Read the progress: pending, running, succeeded, partial, dead, cancelled, total, percent."""
        return self._found(self._database.run(store.get(self.id)))

    async def aprogress(self) -> BatchRecord:
        """Read the progress, from a coroutine."""
        return self._found(await self._database.arun(store.get(self.id)))

    def wait(self, timeout: float | None = None) -> BatchRecord:
        """Wait until the batch is complete. `timeout` is in seconds; without it there is no limit."""
        self._refuse_waiting()
        for pause in pauses(timeout):
            if (now := self.progress()).complete:
                return now
            time.sleep(pause)
        raise TimeoutError(self._late(timeout))

    async def await_(self, timeout: float | None = None) -> BatchRecord:  # noqa: ASYNC109 (as in `wait`)
        """Wait until the batch is complete, from a coroutine."""
        self._refuse_waiting()
        for pause in pauses(timeout):
            if (now := await self.aprogress()).complete:
                return now
            await asyncio.sleep(pause)
        raise TimeoutError(self._late(timeout))

    def cancel(self, *, by: str | None = None, why: str | None = None) -> int:
        """Cancel the jobs that are not running and ask the others to stop. Returns how many jobs those are.

        The batch takes no more jobs. Unless it was complete before, it is no success.
        """
        return sequence.run(self._cancelling(by, why), self._database.run)

    async def acancel(self, *, by: str | None = None, why: str | None = None) -> int:
        """Cancel the batch, from a coroutine."""
        return await sequence.arun(self._cancelling(by, why), self._database.arun)

    def _cancelling(self, by: str | None, why: str | None) -> Steps[int]:
        self._found((yield store.cancel(self.id, by=by, why=why)))
        cancelled = 0
        while ids := (yield store.rest(self.id)):
            cancelled += len((yield ops.cancel(ids, by=by, why=why or f"batch {self.name!r} was cancelled")))
        return cancelled

    def _found(self, found: T | None) -> T:
        if not found:
            raise self._gone()
        return found

    def _gone(self) -> BatchNotFound:
        hint = ": it was opened on your own connection; commit first" if self.conn is not None else ""
        return BatchNotFound(f"no batch has the id {self.id}{hint}")

    def _refuse_waiting(self) -> None:
        if self._entered is not None:
            raise ConfigError(f"{self!r} is being filled, and cannot be complete inside its `with`: wait after it")
        if current.get() is not None:
            raise ConfigError(
                f"{self!r}: cannot wait for a batch inside a handler, because this can deadlock. Use on_complete="
            )

    def _late(self, timeout: float | None) -> str:
        return f"{self!r} is not complete after {timeout:g} s" if timeout is not None else ""


def _conflict(answers: Answers) -> Enqueued | None:
    return next((answer for answer in answers if answer.conflict), None)


def _callback(tasks: Tasks, task: Task[..., Any, Any] | str | None, what: str, batch_id: str) -> str | None:
    """Return the job that the batch adds as a callback; raise if the task cannot be called without arguments."""
    if task is None:
        return None
    if isinstance(task, str):
        if task not in tasks:
            raise ConfigError(f"{what}{task!r} names no task of this app")
        task = tasks[task]
    if not isinstance(task, Task):
        raise ConfigError(f"{what} is of type {type(task).__name__}: give a task, or the name of one")
    if not tasks.knows(task.definition):
        raise ConfigError(f"{what} {task.name} is a task of another app, whose workers would not find the job")
    if dropped := task._using.lost_in_callback:
        raise ConfigError(f"{what} {task.name} has using({dropped}=…), which a callback cannot have")
    try:
        payload = task.definition.codec.encode_call((), {})
    except BadArguments as error:
        raise ConfigError(f"{what} is called without arguments (ctx.batch names the batch): {error}") from error
    envelope = envelopes.pack(Envelope(schema_version=task.definition.schema_version, batch=batch_id))
    return callback(task, what, id=tasks.database.new_id(), payload=payload, envelope=envelope)


def _check_share(share: Any, what: str) -> None:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ConfigError(f"{what} is {brief(share)}: give a share above 0 and up to 1, as in 0.95")


class BatchFilters(TypedDict, total=False):
    """Which batches to list, and how many at most. `active`: those that are not complete."""

    name: str | None
    key: str | None
    active: bool | None
    prefix: str | None
    before: str | None
    limit: int


class Batches:
    """The batches of an app."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks

    def get(self, batch_id: str) -> Batch:
        """Find a batch by its id."""
        return self._known(self._tasks.database.run(store.get(batch_id)), batch_id)

    async def aget(self, batch_id: str) -> Batch:
        """Find a batch, from a coroutine."""
        return self._known(await self._tasks.database.arun(store.get(batch_id)), batch_id)

    def list(self, **filters: Unpack[BatchFilters]) -> Records:
        """List batches and their progress, newest first. For the next page pass the last id as `before`."""
        return self._tasks.database.run(store.listing(**checked(filters, BatchFilters)))

    async def alist(self, **filters: Unpack[BatchFilters]) -> Records:
        """List batches, from a coroutine."""
        return await self._tasks.database.arun(store.listing(**checked(filters, BatchFilters)))

    def _known(self, record: BatchRecord | None, batch_id: str) -> Batch:
        if record is None:
            raise BatchNotFound(f"no batch has the id {batch_id}")
        return Batch.known(self._tasks, record)
