"""Tasks: a function with the terms on which it runs, and the ways to enqueue it.

A task stays callable as the function it was. Its definition is compiled once: the codec of its arguments, the type of
its result, the terms that every job of it shares.
"""

from __future__ import annotations

import functools
import inspect
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar

import msgspec

from duly.app.context import Ctx, SyncCtx
from duly.app.definition import Definition, Kind, OrderingDead
from duly.app.lease import current, heed
from duly.errors import ConfigError
from duly.model import Envelope, NewJob, Terms
from duly.rules import backoff as backoffs
from duly.rules import codec, envelope, keys, signature
from duly.rules.checks import moment, named, whole
from duly.rules.durations import Duration, to_ms
from duly.rules.lifecycle import Policy
from duly.rules.rate import lane_of, rate_of

if TYPE_CHECKING:
    from duly.app.app import App, Job
    from duly.app.batches import Batch

P = ParamSpec("P")
C = TypeVar("C")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Errors: TypeAlias = type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], bool]
Isolation: TypeAlias = Literal["thread", "process"]


@dataclass(frozen=True, slots=True)
class Using:
    """What one enqueue wants otherwise than the task's definition."""

    terms: Mapping[str, Any] = field(default_factory=dict)
    key: keys.Key | None = None
    subject: str | None = None
    correlation_id: str | None = None
    conn: Any = None
    batch: Batch | None = None

    @property
    def lost_in_callback(self) -> str | None:
        """Name an option that a job cannot have which is written down before it is due."""
        terms = {
            "delay_ms": "delay", "due_at": "at", "expires_ms": "expires", "expires_at": "expires",
            "debounce_ms": "debounce", "key_window_ms": "unique_for",
        }  # fmt: skip
        options = ("key", "subject", "correlation_id", "conn", "batch")
        said = [option for term, option in terms.items() if term in self.terms]
        said += [option for option in options if getattr(self, option) is not None]
        return said[0] if said else None


class Call(msgspec.Struct, Generic[R_co], eq=False, frozen=True):
    """One call of a task, checked and ready to be enqueued with others."""

    task: Task[..., Any, Any]
    payload: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"<call of {self.task.name}>"  # what it is called with may be a secret

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("task", self.task.name)]


class Chunk(NamedTuple):
    """Jobs that are added by one commit, and whether there will be more, which can be made meanwhile."""

    jobs: list[NewJob]
    is_followed: bool = False


class Task(Generic[P, C, R]):
    """A function that can be enqueued."""

    def __init__(self, app: App, definition: Definition, using: Using | None = None) -> None:
        self._app = app
        self.definition = definition
        self._using = using or Using()
        self._shared: Terms | None = None
        functools.update_wrapper(self, definition.handler)

    @property
    def name(self) -> str:
        """The name under which jobs of this task are stored."""
        return self.definition.name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C:
        """Call the function here and now; no job is made of it, and a context it takes belongs to none."""
        if self.definition.context is not None:
            args = (self.definition.context(None), *args)  # type: ignore[assignment]
        called: C = self.definition.handler(*args, **kwargs)
        return called

    def __repr__(self) -> str:
        return f"<task {self.name}>"

    def __reduce__(self) -> str:
        return self.definition.handler.__qualname__  # spawned processes find it where it was defined

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Add a job; returns when it is durable (or part of your transaction, with `using(conn=…)`)."""
        return self._app._enqueue_one(self, self._new_job(args, kwargs))

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Add a job, from a coroutine."""
        return await self._app._aenqueue_one(self, self._new_job(args, kwargs))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Check the arguments of one job, to be enqueued with others by `enqueue_many`."""
        return Call(self, self._payload(args, kwargs), args, kwargs or _NONE_BY_NAME)

    def enqueue_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """Add many jobs, a thousand in one commit, which goes when the next call has come or there is none.

        A key that is taken raises KeyConflict once all the others are enqueued.
        """
        return self._app._enqueue(self, self._chunks(calls))

    async def aenqueue_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """Add many jobs, a thousand in one commit, from a coroutine."""
        return await self._app._aenqueue(self, self._chunks(calls))

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
        batch: Batch | None = None,
    ) -> Task[P, C, R]:
        """Give the task with other terms for what is enqueued through it; the task itself stays as it is.

        `debounce` runs the last of the calls under a key, when no other has come for so long. `unique_for` keeps the
        key for so long from the enqueue on.
        """
        if delay is not None and at is not None:
            raise ConfigError(f"{self.name}: give delay= or at=, not both")
        terms = {
            "delay_ms": _ms(delay, f"{self.name}: delay="),
            "due_at": None if at is None else moment(at, f"{self.name}: at="),
            "priority": None if priority is None else whole(priority, f"{self.name}: priority="),
            "queue": None if queue is None else named(queue, f"{self.name}: queue="),
            "max_attempts": None if max_attempts is None else _attempts(max_attempts, self.name),
            "keep_ms": _ms(keep, f"{self.name}: keep="),
            "result_ttl_ms": _ms(result_ttl, f"{self.name}: result_ttl="),
            "debounce_ms": _span(debounce, f"{self.name}: debounce="),
            "key_window_ms": _span(unique_for, f"{self.name}: unique_for="),
        }
        if isinstance(expires, datetime):
            terms["expires_at"] = moment(expires, f"{self.name}: expires=")
        else:
            terms["expires_ms"] = _ms(expires, f"{self.name}: expires=")
        given = {name: value for name, value in terms.items() if value is not None}
        before = self._using
        for rivals in (("delay_ms", "due_at"), ("expires_ms", "expires_at")):
            if any(name in given for name in rivals):  # the later one said replaces the earlier
                before = replace(before, terms={k: v for k, v in before.terms.items() if k not in rivals})
        if batch is not None and not hasattr(batch, "progress"):
            raise ConfigError(
                f"{self.name}: batch= is of type {type(batch).__name__}: give what `with app.batch(…) as batch` gives, "
                "or app.batches.get(id)"
            )
        for what, text in (("subject", subject), ("correlation_id", correlation_id)):
            if text is not None and not isinstance(text, str):
                raise ConfigError(f"{self.name}: {what}= is of type {type(text).__name__}: give a text")
        using = Using(
            terms={**before.terms, **given},
            key=before.key if key is None else _key(key, self.name),
            subject=before.subject if subject is None else subject,
            correlation_id=before.correlation_id if correlation_id is None else correlation_id,
            conn=before.conn if conn is None else conn,
            batch=before.batch if batch is None else batch,
        )
        _refuse_beside_debounce(self.definition, using)
        return Task(self._app, self.definition, using)

    def _terms(self) -> Terms:
        """Give what all jobs enqueued through this task have in common."""
        if self._shared is None:
            definition, settings = self.definition, self._app.settings
            defaults = {
                "queue": definition.queue,
                "priority": definition.priority,
                "max_attempts": _first(definition.max_attempts, settings.max_attempts),
                "lease_ms": _first(definition.lease_ms, settings.lease_ms),
                "keep_ms": _first(definition.keep_ms, settings.keep_ms),
                "result_ttl_ms": _first(definition.result_ttl_ms, settings.result_ttl_ms),
                "key_ttl_ms": settings.key_ttl_ms,
                "on_dead": self._app._dead_letter(definition),
                "ordering_dead": None if definition.ordering_key is None else definition.ordering_dead,
            }
            _refuse_keyless(definition, self._using)
            self._shared = Terms(task=definition.name, **{**defaults, **self._using.terms})
        return self._shared

    def _new_job(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NewJob:
        payload = self._payload(args, kwargs)
        if self._has_no_key:
            return NewJob(self._app._new_id(), payload, None, None, self._envelope())
        return self._new_jobs([Call(self, payload, args, kwargs)])[0]

    def _new_jobs(self, calls: Sequence[Call[Any]]) -> list[NewJob]:
        """Make the jobs of calls that were checked, in their order."""
        ids, envelope = self._app._new_id.many(len(calls)), self._envelope()
        if self._has_no_key:
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
    def _has_no_key(self) -> bool:
        """Whether nothing of its jobs depends on their arguments: neither a key nor a lane."""
        return self._using.key is None and self.definition.key is None and not self.definition.is_laned

    def _payload(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        payload = self.definition.codec.encode_call(args, kwargs)
        codec.check_size(payload, self.name, limit=self._most_bytes)
        return payload

    @functools.cached_property
    def _most_bytes(self) -> int:
        return min(self._app.settings.max_payload, codec.MAX_PAYLOAD)

    def _key(self, key: keys.Key, args: tuple[Any, ...], kwargs: Mapping[str, Any], what: str = "key=") -> str:
        try:
            return keys.key_of(key, self.definition.codec.arguments(args, kwargs), what)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from error

    def _lane(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """Name the lane of a job, by its task or by its task and a key of its arguments."""
        definition = self.definition
        if not definition.is_laned:
            return None
        if definition.lane_key is None:
            return lane_of(self.name)
        what = "cap_key=" if definition.ordering_key is None else "ordering_key="
        return lane_of(self.name, self._key(definition.lane_key, args, kwargs, what))

    def _envelope(self) -> Envelope:
        """Make what travels with a job: a child's inherits from the job whose handler enqueues it."""
        using, version = self._using, self.definition.schema_version
        lease = current.get()
        if lease is None:
            if version == 1 and using.subject is None and using.correlation_id is None:
                return _PLAIN
            return Envelope(schema_version=version, correlation_id=using.correlation_id, subject=using.subject)
        heed()
        said = {"correlation_id": using.correlation_id, "subject": using.subject}
        given = {name: value for name, value in said.items() if value is not None}
        return envelope.child_of(lease.job.envelope, lease.job.id, schema_version=version, **given)

    def _chunks(self, calls: Iterable[Call[R]]) -> Iterator[Chunk]:
        """Cut calls into chunks. One that is full goes when the next call has come, or there is none."""
        if self._terms().debounce_ms is not None:  # one after the other
            for call in self._checked(calls):
                yield Chunk(self._new_jobs([call]))
            return
        chunk: list[Call[R]] = []
        try:
            for call in self._checked(calls):
                if len(chunk) == CHUNK:
                    full, chunk = chunk, []  # whatever is raised from here on, it goes once at most
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
        """Refuse what is no call, a call of another task, and one whose own terms would be lost here."""
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
_NONE_BY_NAME: Mapping[str, Any] = {}  # of all calls that have none, as most do
CHUNK = 1000  # jobs in one commit of an `enqueue_many`


def define(
    handler: Callable[..., Any],
    *,
    name: str | None = None,
    aliases: Iterable[str] = (),
    queue: str = "default",
    priority: int = 0,
    max_attempts: int | None = None,
    backoff: backoffs.Backoff | Iterable[Duration] | None = None,
    retry_on: Errors | None = None,
    give_up_on: Errors | None = None,
    timeout: Duration | None = None,
    lease: Duration | None = None,
    stall_after: Duration | None = None,
    key: keys.Key | None = None,
    keep: Duration | None = None,
    result_ttl: Duration | None = None,
    isolation: Isolation | None = None,
    cap: int | None = None,
    cap_key: keys.Key | None = None,
    rate: str | None = None,
    ordering_key: keys.Key | None = None,
    ordering_dead: OrderingDead | None = None,
    schema_version: int = 1,
    on_dead: Task[..., Any, Any] | str | None = None,
) -> Definition:
    """Compile a function and its options into a task's definition, refusing what cannot work."""
    name = _task_name(handler, name)
    _refuse_handler(handler, name)
    is_async = inspect.iscoroutinefunction(handler)
    context = _context(handler, name, is_async)
    if max_attempts is not None:
        _attempts(max_attempts, name)
    policy = _policy(name, backoff, max_attempts)
    if max_attempts is None and backoff is not None:
        max_attempts = backoffs.attempts_for(policy.backoff)
    return Definition(
        name=name,
        handler=handler,
        context=context,
        codec=signature.signature_codec(handler, skip_first=context is not None),
        result_type=signature.result_type(handler),
        kind=_kind(name, isolation, is_async),
        is_async=is_async,
        policy=policy,
        retries=_retries(retry_on, give_up_on, name),
        aliases=_aliases(aliases, name),
        queue=named(queue, f"{name}: queue="),
        priority=whole(priority, f"{name}: priority="),
        max_attempts=max_attempts,
        timeout_ms=_span(timeout, f"{name}: timeout="),
        lease_ms=_span(lease, f"{name}: lease="),
        stall_after_ms=_span(stall_after, f"{name}: stall_after="),
        key=None if key is None else _key(key, name),
        keep_ms=_ms(keep, f"{name}: keep="),
        result_ttl_ms=_ms(result_ttl, f"{name}: result_ttl="),
        schema_version=whole(schema_version, f"{name}: schema_version=", least=1),
        on_dead=_on_dead(on_dead, name),
        **_limits(name, cap, cap_key, rate, ordering_key, ordering_dead),
    )


OPTIONS = tuple(name for name in inspect.signature(define).parameters if name != "handler")


def _task_name(handler: Callable[..., Any], name: str | None) -> str:
    if name is not None:
        return named(name, "a task's name=")
    found = getattr(handler, "__name__", "")
    if not found or found == "<lambda>":
        raise ConfigError("a task needs a name: define it with def, or give name=")
    return str(found)


def _refuse_handler(handler: Callable[..., Any], name: str) -> None:
    """Refuse what can be called but does no work when it is."""
    if isinstance(handler, Task):
        raise ConfigError(f"{name} is a task already: decorate the function once, and give all options there")
    if isinstance(handler, type):
        raise ConfigError(f"{name} is a class: a task is a function")
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise ConfigError(f"{name} yields, so that calling it runs nothing: a task returns its result")


def _context(handler: Callable[..., Any], name: str, is_async: bool) -> type[Ctx] | type[SyncCtx] | None:
    """Say which context the handler's first parameter takes, refusing the wrong one."""
    parameters = list(inspect.signature(handler).parameters.values())
    hints: dict[str, type[Ctx] | type[SyncCtx] | None] = {
        parameter.name: _context_hint(handler, parameter) for parameter in parameters
    }
    wanted: type[Ctx] | type[SyncCtx] = Ctx if is_async else SyncCtx
    if not any(hints.values()):
        _refuse_bare(parameters, name, wanted)
        return None
    first, *others = parameters
    if any(hints[parameter.name] for parameter in others):
        raise ConfigError(f"{name}: the context is the first parameter, and there is one at most")
    said = hints[first.name]
    if said is not None and said is not wanted:
        kind = "async" if is_async else "sync"
        raise ConfigError(f"{name} is {kind}: annotate `{first.name}` as {wanted.__name__}, not {said.__name__}")
    return wanted


def _refuse_bare(parameters: list[inspect.Parameter], name: str, wanted: type[Ctx] | type[SyncCtx]) -> None:
    """Refuse a first parameter that is meant for what only its annotation, or nobody, would give."""
    first = parameters[0] if parameters else None
    if first is None or first.annotation is not first.empty:
        return
    if first.name in ("self", "cls"):
        raise ConfigError(f"{name} has the parameter `{first.name}`: a task is a function of a module, not a method")
    if first.name in ("ctx", "context"):
        raise ConfigError(
            f"{name}: annotate `{first.name}` as {wanted.__name__} to be given the context, or name it otherwise"
        )


def _context_hint(handler: Callable[..., Any], parameter: inspect.Parameter) -> type[Ctx] | type[SyncCtx] | None:
    """Give the context class a parameter is annotated with, if it is one."""
    hint = signature.hint_of(handler, parameter.name) if parameter.annotation is not parameter.empty else None
    if hint is Ctx or hint is SyncCtx:
        return hint
    return None


def _kind(name: str, isolation: Isolation | None, is_async: bool) -> Kind:
    if isolation not in (None, "thread", "process"):
        raise ConfigError(f"{name}: isolation= is {isolation!r}: give 'process', 'thread' or nothing")
    if isolation == "process":
        return Kind.PROCESS
    if isolation == "thread" and is_async:
        raise ConfigError(f"{name} is async and runs on the event loop: isolation='thread' is for sync handlers")
    return Kind.ASYNC if is_async else Kind.THREAD


def _policy(name: str, backoff: Any, max_attempts: int | None) -> Policy:
    made = backoffs.exponential() if backoff is None else backoffs.of(backoff)
    if max_attempts is not None and (unused := backoffs.unused_delays(made, max_attempts)):
        warnings.warn(
            f"{name}: with max_attempts={max_attempts} the delays {list(unused)} are never used",
            stacklevel=5,
        )
    return Policy(made)


def _retries(retry_on: Errors | None, give_up_on: Errors | None, name: str) -> Callable[[BaseException], bool]:
    """Make the judge of which errors are worth another attempt."""
    wanted = _matcher(retry_on, f"{name}: retry_on=") if retry_on is not None else None
    unwanted = _matcher(give_up_on, f"{name}: give_up_on=") if give_up_on is not None else None
    if wanted is None and unwanted is None:
        return _always

    def retries(error: BaseException) -> bool:
        return (wanted is None or wanted(error)) and not (unwanted is not None and unwanted(error))

    return retries


def _always(error: BaseException) -> bool:
    return True


def _matcher(errors: Errors, what: str) -> Callable[[BaseException], bool]:
    classes = errors if isinstance(errors, tuple | list) else (errors,)
    if all(isinstance(one, type) and issubclass(one, BaseException) for one in classes):
        kinds = typing.cast("tuple[type[BaseException], ...]", tuple(classes))
        return lambda error: isinstance(error, kinds)
    if callable(errors) and not isinstance(errors, type):
        return lambda error: bool(errors(error))
    raise ConfigError(f"{what} takes an exception, a tuple of them, or a function of the error")


def _attempts(value: Any, name: str) -> int:
    return whole(value, f"{name}: max_attempts=", least=1)


def _aliases(aliases: Any, name: str) -> tuple[str, ...]:
    if isinstance(aliases, str) or not isinstance(aliases, Iterable):
        raise ConfigError(f"{name}: aliases= is {aliases!r}: give a list of names")
    return tuple(named(alias, f"{name}: one of aliases=") for alias in aliases)


def _key(key: Any, name: str, what: str = "key=") -> keys.Key:
    if callable(key):
        return typing.cast("keys.Key", key)
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise ConfigError(f"{name}: {what} is of type {type(key).__name__}: give a text or a function of the arguments")
    if isinstance(key, str):
        keys.check_key(key, f"{name}: {what} is")
    return key


def _limits(name: str, cap: Any, cap_key: Any, rate: Any, ordering_key: Any, ordering_dead: Any) -> dict[str, Any]:
    """Read what keeps jobs of a task from running as soon as they are due, refusing what contradicts itself."""
    if ordering_key is not None and (cap is not None or cap_key is not None):
        raise ConfigError(f"{name}: ordering_key= runs one job of a key after the other: leave cap= and cap_key= out")
    if cap_key is not None and cap is None and rate is None:
        raise ConfigError(f"{name}: cap_key= says of what cap= or rate= holds: give one of them too")
    if ordering_dead is not None and ordering_key is None:
        raise ConfigError(f"{name}: ordering_dead= is for a task with an ordering_key=")
    if ordering_dead not in (None, "block", "skip"):
        raise ConfigError(f"{name}: ordering_dead= is {ordering_dead!r}: give 'block' or 'skip'")
    return {
        "cap": None if cap is None else _cap(cap, name),
        "cap_key": None if cap_key is None else _key(cap_key, name, "cap_key="),
        "rate": None if rate is None else rate_of(rate, f"{name}: rate="),
        "ordering_key": None if ordering_key is None else _key(ordering_key, name, "ordering_key="),
        "ordering_dead": ordering_dead or "block",
    }


def _cap(cap: Any, name: str) -> int:
    if cap == 0 and not isinstance(cap, bool):
        raise ConfigError(f"{name}: cap= is 0, and no job would ever run: to stop a task, pause it")
    return whole(cap, f"{name}: cap=", least=1)


def _on_dead(on_dead: Any, name: str) -> Task[..., Any, Any] | str | None:
    if on_dead is not None and not isinstance(on_dead, Task | str):
        raise ConfigError(f"{name}: on_dead= is of type {type(on_dead).__name__}: give a task, or the name of one")
    return on_dead


def callback(task: Task[..., Any, Any], what: str, **more: str | None) -> str:
    """Write a job that the ending of another adds, so that no crash can lose it."""
    if (key := task.definition.lane_key) is not None:
        option = "cap_key" if key is task.definition.cap_key else "ordering_key"
        raise ConfigError(f"{what} {task.name} has {option}=, which is made of arguments that a callback has not")
    terms = task._terms()
    names = ("task", "queue", "priority", "max_attempts", "lease_ms", "keep_ms", "result_ttl_ms")
    lane = lane_of(task.name) if task.definition.is_laned else None
    return msgspec.json.encode({name: getattr(terms, name) for name in names} | {"lane": lane} | more).decode()


def _refuse_beside_debounce(definition: Definition, using: Using) -> None:
    """Refuse what cannot be kept where calls under a key come to one job, which runs when they pause."""
    if "debounce_ms" not in using.terms:
        return
    beside = {
        "delay= or at=, as the debounce is the delay": {"delay_ms", "due_at"} & using.terms.keys(),
        "unique_for=, which keeps later calls from counting": "key_window_ms" in using.terms,
        "batch=, as what is debounced may run as a later job": using.batch is not None,
        "ordering_key=, as the last call takes the place of the first": definition.ordering_key is not None,
    }
    for what, is_there in beside.items():
        if is_there:
            raise ConfigError(f"{definition.name}: debounce= does not go with {what}: leave one of them out")


def _refuse_keyless(definition: Definition, using: Using) -> None:
    if definition.key is not None or using.key is not None:
        return
    for term, option in (("debounce_ms", "debounce"), ("key_window_ms", "unique_for")):
        if term in using.terms:
            raise ConfigError(
                f"{definition.name}: {option}= needs to know which calls are the same: "
                f"give using({option}=…, key=…), or the task a key="
            )


def _first(value: int | None, default: int) -> int:
    return default if value is None else value


def _ms(value: Duration | None, what: str) -> int | None:
    return None if value is None else to_ms(value, what=what)


def _span(value: Duration | None, what: str) -> int | None:
    span = _ms(value, what)
    if span == 0:
        raise ConfigError(f"{what} is zero: give a duration above zero, or leave it out")
    return span
