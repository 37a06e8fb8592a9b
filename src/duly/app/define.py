"""Compiles a function and its options into the definition of a task, and raises for what cannot work."""

from __future__ import annotations

import inspect
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias

from duly.app.context import Ctx, SyncCtx
from duly.app.definition import Definition, Kind
from duly.errors import ConfigError
from duly.rules import backoff as backoffs
from duly.rules import keys, signature
from duly.rules.checks import named, whole
from duly.rules.durations import Duration, to_ms
from duly.rules.lifecycle import Policy
from duly.rules.messages import brief
from duly.rules.rate import rate_of

Errors: TypeAlias = type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], bool]
Isolation: TypeAlias = Literal["thread", "process"]


# The options of `@app.task`, in the order of its signature.
OPTIONS = (
    "name", "aliases", "queue", "priority", "max_attempts", "backoff", "retry_on", "give_up_on", "timeout", "lease",
    "stall_after", "key", "keep", "result_ttl", "isolation", "cap", "cap_key", "rate", "ordering_key", "ordering_dead",
    "schema_version", "on_dead",
)  # fmt: skip


def define(handler: Callable[..., Any], options: Mapping[str, Any]) -> Definition:
    """Compile a function and its options."""
    _refuse_unknown(options)
    name = _task_name(handler, options.get("name"))
    _refuse_handler(handler, name)
    is_async = inspect.iscoroutinefunction(handler)
    context = _context(handler, name, is_async)
    return Definition(
        name=name,
        handler=handler,
        context=context,
        codec=signature.signature_codec(handler, skip_first=context is not None),
        result_type=signature.result_type(handler),
        kind=_kind(name, options.get("isolation"), is_async),
        is_async=is_async,
        retries=_retries(options.get("retry_on"), options.get("give_up_on"), name),
        aliases=_aliases(options.get("aliases", ()), name),
        queue=named(options.get("queue", "default"), f"{name}: queue="),
        priority=whole(options.get("priority", 0), f"{name}: priority="),
        schema_version=whole(options.get("schema_version", 1), f"{name}: schema_version=", least=1),
        on_dead=options.get("on_dead"),
        **_policy(name, options.get("backoff"), options.get("max_attempts")),
        **_times(name, options),
        **_limits(name, options),
    )


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in OPTIONS:
            close = get_close_matches(name, OPTIONS, 1)
            meant = f": did you mean {close[0]}=?" if close else f": the options are {', '.join(OPTIONS)}"
            raise ConfigError(f"a task has no option {name}={meant}")


def _task_name(handler: Callable[..., Any], name: str | None) -> str:
    if name is not None:
        return named(name, "a task's name=")
    found = getattr(handler, "__name__", "")
    if not found or found == "<lambda>":
        raise ConfigError("a task needs a name: define it with def, or give name=")
    return str(found)


def _refuse_handler(handler: Callable[..., Any], name: str) -> None:
    """Raise for callables whose call runs no work."""
    if isinstance(handler, type):
        raise ConfigError(f"{name} is a class: a task is a function")
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise ConfigError(f"{name} yields, so that calling it runs nothing: a task returns its result")


def _context(handler: Callable[..., Any], name: str, is_async: bool) -> type[Ctx] | type[SyncCtx] | None:
    """Return the context class of the handler's first parameter, if any; raise for the wrong one."""
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
    """Raise for a first parameter that expects a context without its annotation, or an object."""
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
    """Return the context class of a parameter's annotation, if it is one."""
    hint = signature.hint_of(handler, parameter.name) if parameter.annotation is not parameter.empty else None
    if hint is Ctx or hint is SyncCtx:
        return hint
    return None


def _kind(name: str, isolation: Isolation | None, is_async: bool) -> Kind:
    if isolation not in (None, "thread", "process"):
        raise ConfigError(f"{name}: isolation= is {brief(isolation)}: give 'process', 'thread' or nothing")
    if isolation == "process":
        return Kind.PROCESS
    if isolation == "thread" and is_async:
        raise ConfigError(f"{name} is async and runs on the event loop: isolation='thread' is for sync handlers")
    return Kind.ASYNC if is_async else Kind.THREAD


def _policy(name: str, backoff: Any, max_attempts: Any) -> dict[str, Any]:
    """Read how often and when a job is tried again. A list of delays implies the number of attempts."""
    if max_attempts is not None:
        attempts(max_attempts, f"{name}: max_attempts=")
    made = backoffs.exponential() if backoff is None else backoffs.of(backoff)
    if max_attempts is not None and (unused := backoffs.unused_delays(made, max_attempts)):
        warnings.warn(
            f"{name}: with max_attempts={max_attempts} the delays {list(unused)} are never used",
            stacklevel=5,
        )
    if max_attempts is None and backoff is not None:
        max_attempts = backoffs.attempts_for(made)
    return {"policy": Policy(made), "max_attempts": max_attempts}


def _times(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Read the key and the durations."""
    readers: Readers = {
        "timeout": ("timeout_ms", span),
        "lease": ("lease_ms", span),
        "stall_after": ("stall_after_ms", span),
        "key": ("key", key),
        "keep": ("keep_ms", ms),
        "result_ttl": ("result_ttl_ms", ms),
    }
    return read_terms(name, options, readers)


def _retries(retry_on: Errors | None, give_up_on: Errors | None, name: str) -> Callable[[BaseException], bool]:
    """Return the function that decides whether an error is retried."""
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


def _aliases(aliases: Any, name: str) -> tuple[str, ...]:
    if isinstance(aliases, str) or not isinstance(aliases, Iterable):
        raise ConfigError(f"{name}: aliases= is {brief(aliases)}: give a list of names")
    return tuple(named(alias, f"{name}: one of aliases=") for alias in aliases)


def _limits(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Read the limits and the order that may hold back due jobs; raise for combinations that contradict."""
    names = ("cap", "cap_key", "rate", "ordering_key", "ordering_dead")
    cap, cap_key, rate, ordering_key, ordering_dead = (options.get(option) for option in names)
    if ordering_key is not None and (cap is not None or cap_key is not None):
        raise ConfigError(f"{name}: ordering_key= runs one job of a key after the other: leave cap= and cap_key= out")
    if cap_key is not None and cap is None and rate is None:
        raise ConfigError(f"{name}: cap_key= selects the jobs that share cap= or rate=: give one of them too")
    if ordering_dead is not None and ordering_key is None:
        raise ConfigError(f"{name}: ordering_dead= is for a task with an ordering_key=")
    if ordering_dead not in (None, "block", "skip"):
        raise ConfigError(f"{name}: ordering_dead= is {brief(ordering_dead)}: give 'block' or 'skip'")
    return {
        "cap": None if cap is None else _cap(cap, name),
        "cap_key": None if cap_key is None else key(cap_key, f"{name}: cap_key="),
        "rate": None if rate is None else rate_of(rate, f"{name}: rate="),
        "ordering_key": None if ordering_key is None else key(ordering_key, f"{name}: ordering_key="),
        "ordering_dead": ordering_dead or "block",
    }


def _cap(cap: Any, name: str) -> int:
    if cap == 0 and not isinstance(cap, bool):
        raise ConfigError(f"{name}: cap= is 0, and no job would ever run: to stop a task, pause it")
    return whole(cap, f"{name}: cap=", least=1)


# Options that `using` has too

# By the name of an option: the name of its term, and the function that reads its value.
Readers: TypeAlias = Mapping[str, tuple[str, Callable[[Any, str], Any]]]


def read_terms(name: str, options: Mapping[str, Any], readers: Readers) -> dict[str, Any]:
    """Read the options that were given, by the names of their terms."""
    given = {option: value for option in readers if (value := options.get(option)) is not None}
    return {readers[option][0]: readers[option][1](value, f"{name}: {option}=") for option, value in given.items()}


def attempts(value: Any, what: str) -> int:
    """Check a number of attempts."""
    return whole(value, what, least=1)


def key(value: Any, what: str) -> keys.Key:
    """Check a key: a text, or a function of the arguments."""
    if callable(value):
        return typing.cast("keys.Key", value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConfigError(f"{what} is of type {type(value).__name__}: give a text or a function of the arguments")
    if isinstance(value, str):
        keys.check_key(value, f"{what} is")
    return value


def ms(value: Duration, what: str) -> int:
    """Read a duration."""
    return to_ms(value, what=what)


def span(value: Duration, what: str) -> int:
    """Read a duration above zero."""
    found = ms(value, what)
    if found == 0:
        raise ConfigError(f"{what} is zero: give a duration above zero, or leave it out")
    return found
