"""The decorator `app.task` and its types: `mypy --strict` finds wrong arguments, options and results.

The decorator removes the first parameter if it is the context. Two facts about mypy shape the overloads.

`Callable[Concatenate[Ctx, P], R]` also matches a handler whose first parameter is `object` or `Any`, and would remove
it. So the overloads for those handlers come first: they require that the handler accepts a private class.

If an argument contains `Any` (a `dict[str, Any]` somewhere in the handler) and two overloads match it, mypy returns
`Task[Any, Any, Any]`. So no handler may match two overloads. Each overload excludes handlers by an alternative of its
union that only they match, and that requires other values of P and R. mypy infers nothing from alternatives that
disagree, and so the overload does not match. (Each such alternative is narrower than the first one; otherwise it would
admit handlers.) This also reports `ctx: Ctx` in a sync function.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, final, overload

from duly.app.context import Ctx, SyncCtx
from duly.app.define import Errors, Isolation
from duly.app.definition import OrderingDead
from duly.app.task import Task
from duly.errors import ConfigError
from duly.rules.backoff import Backoff
from duly.rules.durations import Duration
from duly.rules.keys import Key

P = ParamSpec("P")
C = TypeVar("C")
R = TypeVar("R")
C_co = TypeVar("C_co", covariant=True)
X_contra = TypeVar("X_contra", contravariant=True)

Coro: TypeAlias = Coroutine[Any, Any, R]


@final
class _Stranger:
    """Only `object` and `Any` accept this as an argument."""


class _StrangeCoro(Coroutine[Any, Any, object]):  # object, not Never: mypy would simplify the alternative away
    """Only `Any` can be returned as this."""


class _TakesAnything(Protocol[P, C_co]):
    """A handler whose first parameter accepts any value."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C_co: ...
    @overload
    def __call__(self, stranger: _Stranger, /, *args: Any, **kwargs: Any) -> object: ...


class _NamesCtx(Protocol[X_contra, P, C_co]):
    """A handler whose first parameter has the name `ctx`."""

    def __call__(self, ctx: X_contra, *args: P.args, **kwargs: P.kwargs) -> C_co: ...


class TaskOptions(TypedDict, total=False):
    """The options of `app.task` beside a function: those of its last overload."""

    name: str | None
    aliases: Iterable[str]
    queue: str
    priority: int
    max_attempts: int | None
    backoff: Backoff | Sequence[Duration] | None
    retry_on: Errors | None
    give_up_on: Errors | None
    timeout: Duration | None
    lease: Duration | None
    stall_after: Duration | None
    key: Key | None
    keep: Duration | None
    result_ttl: Duration | None
    isolation: Isolation | None
    cap: int | None
    cap_key: Key | None
    rate: str | None
    ordering_key: Key | None
    ordering_dead: OrderingDead | None
    schema_version: int
    on_dead: Task[..., Any, Any] | str | None


class TaskDecorator:
    """Makes tasks of functions, with or without options."""

    def __init__(
        self, define: Callable[[Callable[..., Any], Mapping[str, Any]], Any], options: Mapping[str, Any] | None = None
    ) -> None:
        self._define = define
        self._options = dict(options or {})

    # The first parameter is `object` or `Any`: an ordinary one. (First: it also returns Any.)
    @overload
    def __call__(
        self, handler: _TakesAnything[P, _StrangeCoro], /, **options: Unpack[TaskOptions]
    ) -> Task[P, Any, Any]: ...
    @overload
    def __call__(
        self,
        handler: _TakesAnything[P, Coro[R]] | Callable[Concatenate[_Stranger, P], _StrangeCoro],
        /,
        **options: Unpack[TaskOptions],
    ) -> Task[P, Coro[R], R]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self,
        handler: _TakesAnything[P, R] | Callable[Concatenate[_Stranger, P], _StrangeCoro],
        /,
        **options: Unpack[TaskOptions],
    ) -> Task[P, R, R]: ...

    # The first parameter is the context.
    @overload
    def __call__(
        self,
        handler: (
            Callable[Concatenate[Ctx, P], Coro[R]]
            | _NamesCtx[Ctx, P, Coro[R]]  # the same; a handler with `**kwargs` too matches only this one
            | Callable[Concatenate[Ctx, P], _StrangeCoro]  # not: a plain function that returns Any
            | Callable[Concatenate[Ctx | _Stranger, P], Coro[object]]  # not: takes anything
        ),
        /,
        **options: Unpack[TaskOptions],
    ) -> Task[P, Coro[R], R]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self,
        handler: (
            Callable[Concatenate[SyncCtx, P], R]
            | _NamesCtx[SyncCtx, P, R]
            | Callable[Concatenate[SyncCtx, P], Coro[R]]  # not: async
            | Callable[Concatenate[SyncCtx | _Stranger, P], object]  # not: takes anything
        ),
        /,
        **options: Unpack[TaskOptions],
    ) -> Task[P, R, R]: ...

    # There is no context.
    @overload
    def __call__(
        self,
        handler: (
            Callable[P, Coro[R]]
            | Callable[P, _StrangeCoro]  # not: a plain function that returns Any
            | Callable[Concatenate[Ctx, P], Coro[object]]  # not: these two
            | Callable[Concatenate[SyncCtx, P], Coro[object]]
        ),
        /,
        **options: Unpack[TaskOptions],
    ) -> Task[P, Coro[R], R]: ...
    @overload
    def __call__(
        self,
        handler: (
            Callable[P, R]
            | Callable[P, Coro[R]]  # not: async
            | Callable[Concatenate[Ctx, P], object]  # not: these two
            | Callable[Concatenate[SyncCtx, P], object]
        ),
        /,
        **options: Unpack[TaskOptions],
    ) -> Task[P, R, R]: ...

    @overload
    def __call__(
        self,
        *,
        name: str | None = None,
        aliases: Iterable[str] = (),
        queue: str = "default",
        priority: int = 0,
        max_attempts: int | None = None,
        backoff: Backoff | Sequence[Duration] | None = None,
        retry_on: Errors | None = None,
        give_up_on: Errors | None = None,
        timeout: Duration | None = None,
        lease: Duration | None = None,
        stall_after: Duration | None = None,
        key: Key | None = None,
        keep: Duration | None = None,
        result_ttl: Duration | None = None,
        isolation: Isolation | None = None,
        cap: int | None = None,
        cap_key: Key | None = None,
        rate: str | None = None,
        ordering_key: Key | None = None,
        ordering_dead: OrderingDead | None = None,
        schema_version: int = 1,
        on_dead: Task[..., Any, Any] | str | None = None,
    ) -> TaskDecorator: ...
    # No `/` after handler: mypy and pyright then find that the implementation does not fit the options.
    def __call__(self, handler: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Make a task of a function, or return a decorator with these options."""
        options = {**self._options, **options}
        if handler is None:
            return TaskDecorator(self._define, options)
        if not callable(handler):
            raise ConfigError(f"@app.task takes a function, not a {type(handler).__name__}: name options, as queue=…")
        return self._define(handler, options)
