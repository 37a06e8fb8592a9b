"""A task: a function, its definition, and the calls that enqueue it. It can still be called as a function."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import msgspec

from duly.app.database import Database, OtherDatabase
from duly.app.definition import Definition
from duly.app.enqueue import CHUNK, Adds, Chunk, Enqueuing, Request, filled_here
from duly.app.job import Job
from duly.app.lease import current, heed
from duly.app.using import Using, refuse_keyless
from duly.errors import ConfigError
from duly.model import Envelope, NewJob, Terms
from duly.rules import codec, envelope, keys
from duly.rules.durations import Duration
from duly.rules.rate import lane_of
from duly.store import ops

P = ParamSpec("P")
C = TypeVar("C")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Registry(Protocol):
    """The tasks of an app, as one of them uses them."""

    database: Database
    enqueuing: Enqueuing

    def knows(self, definition: Definition) -> bool:
        """Return whether a task is one of this app, on whichever of its databases."""

    def dead_letter(self, definition: Definition) -> str | None:
        """Return the job to add when a job of this task dies."""


class HasTasks(Protocol):
    """An app, as `using(app=…)` takes it."""

    @property
    def tasks(self) -> Registry:
        """Its tasks."""


NO_APP: Any = msgspec.UNSET
_LEFT_OUT = {"app": NO_APP}  # None as app= is a lookup that found nothing, which must not enqueue into another database


class Call(msgspec.Struct, Generic[R_co], eq=False, frozen=True):
    """One call of a task, with checked arguments, to be enqueued with others."""

    task: Task[..., Any, Any]
    payload: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"<call of {self.task.name}>"  # arguments may be secret

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("task", self.task.name)]


class Task(Generic[P, C, R]):
    """A function that can be enqueued."""

    def __init__(self, tasks: Registry, definition: Definition, using: Using | None = None) -> None:
        self._tasks = tasks
        self.definition = definition
        self._using = using or Using()
        self._shared: ops.Accepted | None = None
        functools.update_wrapper(self, definition.handler)

    @property
    def name(self) -> str:
        """The name under which jobs of this task are stored."""
        return self.definition.name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C:
        """Call the function directly, without a job. A context that it takes belongs to no job."""
        if self.definition.context is not None:
            args = (self.definition.context(None), *args)  # type: ignore[assignment]
        called: C = self.definition.handler(*args, **kwargs)
        return called

    def __repr__(self) -> str:
        return f"<task {self.name}>"

    def __reduce__(self) -> str:
        return self.definition.handler.__qualname__  # a spawned process imports it from its module

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Add a job. Returns when it is durable, or part of your transaction with `using(conn=…)`."""
        job, request = self._new_job(args, kwargs), self._request()
        return Job(request, self._target.enqueuing.one(request, job))

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Add a job, from a coroutine."""
        job, request = self._new_job(args, kwargs), self._request()
        return Job(request, await self._target.enqueuing.aone(request, job))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Check the arguments of one job, to be enqueued with others by `enqueue_many`."""
        return Call(self, self._payload(args, kwargs), args, kwargs or _NO_KWARGS)

    def enqueue_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """Add many jobs, a thousand in one commit. A full thousand is committed when the next call is read.

        Raises KeyConflict for a key that is taken, after all other jobs were enqueued.
        """
        request = self._request()
        return [Job(request, answer) for answer in self._target.enqueuing.many(request, self._chunks(calls))]

    async def aenqueue_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """Add many jobs, a thousand in one commit, from a coroutine."""
        request = self._request()
        return [Job(request, answer) for answer in await self._target.enqueuing.amany(request, self._chunks(calls))]

    def using(
        self,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        expires: Duration | datetime | None = None,
        key: keys.Key | None = None,
        debounce: Duration | None = None,
        unique_for: Duration | None = None,
        priority: int | None = None,
        queue: str | None = None,
        max_attempts: int | None = None,
        keep: Duration | None = None,
        result_ttl: Duration | None = None,
        subject: str | None = None,
        correlation_id: str | None = None,
        conn: Any = None,
        batch: Adds | None = None,
        app: HasTasks = NO_APP,
    ) -> Task[P, C, R]:
        """Return the task with other options for the jobs enqueued through it. The task itself does not change.

        `debounce` runs the last call under a key, once no other call has come for this long. `unique_for` keeps the
        key for this long from the enqueue on. `app` is the app on another database, as `app.at` returns it.
        """
        given = {
            option: value
            for option, value in locals().items()
            if option != "self" and value is not _LEFT_OUT.get(option)
        }
        using = self._using.changed(self.definition, given)
        if app is not NO_APP and not app.tasks.knows(self.definition):
            raise ConfigError(f"{self.name}: app= does not know this task: give its own app, or that app's app.at(url)")
        return Task(self._tasks if app is NO_APP else app.tasks, self.definition, using)

    # Inside

    def _request(self) -> Request:
        """Return the part that all jobs of one enqueue share."""
        accepted, using, batch = self._accepted(), self._using, self._using.batch
        database = self._target.database
        if batch is None and (here := filled_here()) is not None and here._takes(self.definition, database):
            batch = here
        return Request(database, self.definition, accepted, using.conn, batch)

    @property
    def _target(self) -> Registry:
        """The app whose database takes the jobs: in a handler that of its job, unless another is named."""
        lease = current.get()
        if lease is None or self._using.app is not None or isinstance(self._tasks.database, OtherDatabase):
            return self._tasks
        tasks: Registry | None = lease.tasks
        return tasks if tasks is not None and tasks.knows(self.definition) else self._tasks

    def _terms(self) -> Terms:
        return self._accepted().terms

    def _accepted(self) -> ops.Accepted:
        """Return the terms of the jobs enqueued through this task, made and checked once."""
        if self._shared is None:
            definition, settings = self.definition, self._tasks.database.settings
            defaults = {
                "queue": definition.queue,
                "priority": definition.priority,
                "max_attempts": _first(definition.max_attempts, settings.max_attempts),
                "lease_ms": _first(definition.lease_ms, settings.lease_ms),
                "keep_ms": _first(definition.keep_ms, settings.keep_ms),
                "result_ttl_ms": _first(definition.result_ttl_ms, settings.result_ttl_ms),
                "key_ttl_ms": settings.key_ttl_ms,
                "on_dead": self._tasks.dead_letter(definition),
                "ordering_dead": None if definition.ordering_key is None else definition.ordering_dead,
            }
            refuse_keyless(definition, self._using)
            self._shared = ops.accept(Terms(task=definition.name, **{**defaults, **self._using.terms}))
        return self._shared

    def _new_job(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NewJob:
        payload = self._payload(args, kwargs)
        if self._is_plain:
            return NewJob(self._tasks.database.new_id(), payload, None, None, self._envelope())
        return self._new_jobs([Call(self, payload, args, kwargs)])[0]

    def _new_jobs(self, calls: Sequence[Call[Any]]) -> list[NewJob]:
        """Make jobs of calls, in their order."""
        ids, envelope = self._tasks.database.new_id.many(len(calls)), self._envelope()
        if self._is_plain:
            return [NewJob(id_, call.payload, None, None, envelope) for id_, call in zip(ids, calls, strict=True)]
        key = self.definition.key if self._using.key is None else self._using.key
        return [
            NewJob(
                id_,
                call.payload,
                key=None if key is None else self._key(key, call.args, call.kwargs),
                envelope=envelope,
                lane=self._lane(call.args, call.kwargs),
            )
            for id_, call in zip(ids, calls, strict=True)
        ]

    @property
    def _is_plain(self) -> bool:
        """Whether its jobs have neither a key nor a lane, which depend on the arguments."""
        return self._using.key is None and self.definition.key is None and not self.definition.is_laned

    def _payload(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        payload = self.definition.codec.encode_call(args, kwargs)
        codec.check_size(payload, self.name, limit=self._most_bytes)
        return payload

    @functools.cached_property
    def _most_bytes(self) -> int:
        return min(self._tasks.database.settings.max_payload, codec.MAX_PAYLOAD)

    def _key(self, key: keys.Key, args: tuple[Any, ...], kwargs: Mapping[str, Any], what: str = "key=") -> str:
        try:
            return keys.key_of(key, self.definition.codec.arguments(args, kwargs), what)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from error

    def _lane(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """Return the lane of a job: its task, or its task and a key of its arguments."""
        definition = self.definition
        if not definition.is_laned:
            return None
        if definition.lane_key is None:
            return lane_of(self.name)
        what = "cap_key=" if definition.ordering_key is None else "ordering_key="
        return lane_of(self.name, self._key(definition.lane_key, args, kwargs, what))

    def _envelope(self) -> Envelope:
        """Make the metadata of a job. A job enqueued by a handler inherits from the handler's job."""
        using, version = self._using, self.definition.schema_version
        lease = current.get()
        if lease is None:
            if version == 1 and using.subject is None and using.correlation_id is None:
                return _PLAIN
            return Envelope(schema_version=version, correlation_id=using.correlation_id, subject=using.subject)
        heed()
        named = {"correlation_id": using.correlation_id, "subject": using.subject}
        given = {name: value for name, value in named.items() if value is not None}
        return envelope.child_of(lease.job.envelope, lease.job.id, schema_version=version, **given)

    def _chunks(self, calls: Iterable[Call[R]]) -> Iterator[Chunk]:
        """Cut calls into chunks. A full chunk is yielded when the next call, or the end, has been read."""
        if self._terms().debounce_ms is not None:  # one after the other
            for call in self._checked(calls):
                yield Chunk(self._new_jobs([call]))
            return
        chunk: list[Call[R]] = []
        try:
            for call in self._checked(calls):
                if len(chunk) == CHUNK:
                    full, chunk = chunk, []  # an error from here on must not yield it a second time
                    yield Chunk(self._new_jobs(full), is_followed=True)
                chunk.append(call)
        except Exception:
            if len(chunk) == CHUNK:  # it was full before the next call failed
                yield Chunk(self._new_jobs(chunk))
            raise
        if chunk:
            yield Chunk(self._new_jobs(chunk))

    def _checked(self, calls: Iterable[Call[R]]) -> Iterator[Call[R]]:
        in_handler = current.get() is not None
        for call in calls:
            if type(call) is not Call or call.task is not self:
                self._refuse_foreign(call)
            if in_handler:
                heed()
            yield call

    def _refuse_foreign(self, call: Call[R]) -> None:
        """Raise for anything but a call, for a call of another task, and for one whose own options would be lost."""
        if not isinstance(call, Call):
            raise ConfigError(
                f"{self.name}.enqueue_many got {call!r:.60}, which is no call: "
                f"write {self.name}.enqueue_many({self.name}.call(…) for …)"
            )
        if call.task.definition is not self.definition:
            raise ConfigError(f"{self.name}.enqueue_many got a call of {call.task.name}: enqueue each task's own")
        if call.task._using is not self._using and call.task._using != Using():
            raise ConfigError(
                f"{self.name}.enqueue_many got a call made through using(…), whose terms would be lost: "
                f"write {self.name}.using(…).enqueue_many({self.name}.call(…) …)"
            )


_PLAIN = Envelope()
_NO_KWARGS: Mapping[str, Any] = {}  # shared by all calls without keyword arguments, which are most


def _first(value: int | None, default: int) -> int:
    return default if value is None else value
