"""Assertions about enqueued jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from difflib import get_close_matches
from inspect import Parameter
from typing import Any

from duly.app.task import Task
from duly.errors import ConfigError, PayloadError
from duly.model import JobRecord, State
from duly.rules import codec
from duly.rules.checks import moment
from duly.rules.durations import Duration, describe, to_ms
from duly.rules.signature import SignatureCodec
from duly.store import ops

SHOWN = 10
PAGE = 1000


def assert_enqueued(
    task: Task[..., Any, Any],
    args: Mapping[str, Any] | None = None,
    *,
    count: int | None = None,
    key: str | None = None,
    queue: str | None = None,
    state: State | str | None = None,
    due: Duration | datetime | None = None,
) -> JobRecord:
    """Assert that a job of a task exists, or exactly `count` jobs, in any state. Returns the latest.

    `args` gives some or all of its arguments. `due` is a moment, or a duration from the enqueue on.
    """
    if count is not None and count < 1:
        raise ConfigError(f"assert_enqueued: count= is {count!r}: give 1 or more, or use refute_enqueued")
    wanted = _Wanted(task, args, key, queue, state, due)
    found, others = wanted.sorted()
    if found and count in (None, len(found)):
        return found[0]
    number = "no job" if not found else f"{len(found)} {'job' if len(found) == 1 else 'jobs'}"
    asked = "" if count is None else f", not {count}"
    raise AssertionError(f"{number} of {wanted}{asked}\n{wanted.shown([*found, *others])}")


def refute_enqueued(
    task: Task[..., Any, Any],
    args: Mapping[str, Any] | None = None,
    *,
    key: str | None = None,
    queue: str | None = None,
    state: State | str | None = None,
    due: Duration | datetime | None = None,
) -> None:
    """Assert that no such job exists."""
    wanted = _Wanted(task, args, key, queue, state, due)
    found, _ = wanted.sorted()
    if found:
        raise AssertionError(f"there is a job of {wanted}\n{wanted.shown(found)}")


def enqueued(
    task: Task[..., Any, Any],
    args: Mapping[str, Any] | None = None,
    *,
    key: str | None = None,
    queue: str | None = None,
    state: State | str | None = None,
    due: Duration | datetime | None = None,
) -> list[JobRecord]:
    """List the jobs of a task, the latest first."""
    return _Wanted(task, args, key, queue, state, due).sorted()[0]


class _Wanted:
    """The jobs that are expected."""

    def __init__(
        self,
        task: Task[..., Any, Any],
        args: Mapping[str, Any] | None,
        key: str | None,
        queue: str | None,
        state: State | str | None,
        due: Duration | datetime | None,
    ) -> None:
        self._task = _checked(task)
        said = {"key": key, "queue": queue, "state": None if state is None else _state(state), "due": _due(due)}
        self._terms = {name: value for name, value in said.items() if value is not None}
        self._args = _plain(task, args or {})
        self._defaults = _defaults(task)

    def sorted(self) -> tuple[list[JobRecord], list[JobRecord]]:
        """Return the jobs of the task that match, and those that do not."""
        jobs = list(_jobs(self._task))
        found = [job for job in jobs if not any(self._differences(job))]
        return found, [job for job in jobs if job not in found]

    def __str__(self) -> str:
        said = [f"{name}={_text(value)}" for name, value in self._args.items()]
        said += [f"{name} {_said(value)}" for name, value in self._terms.items()]
        return f"{self._task.name}" + (f" with {', '.join(said)}" if said else "")

    def shown(self, jobs: list[JobRecord]) -> str:
        """Describe jobs, each with its differences. If the task has no job, describe the jobs of other tasks."""
        if not jobs:
            jobs = self._task._tasks.database.run(ops.listing(limit=SHOWN + 1))
            there = f"there is no job of {self._task.name}" + ("; there is:" if jobs else ", and no other")
        else:
            there = "there is:"
        lines = [f"  {self._line(job)}" for job in jobs[:SHOWN]]
        return "\n".join([there, *lines, *([f"  … and {len(jobs) - SHOWN} more"] if len(jobs) > SHOWN else [])])

    def _line(self, job: JobRecord) -> str:
        line = f"{job.task}({_arguments(job.payload)}) {job.state}"
        if job.task != self._task.name:
            return line
        differs = ", ".join(self._differences(job))
        return f"{line}: {differs}" if differs else line

    def _differences(self, job: JobRecord) -> Iterator[str]:
        payload = self._defaults | (job.payload if isinstance(job.payload, dict) else {})
        for name, value in self._args.items():
            if name not in payload:
                yield f"{name} was not given"
            elif payload[name] != value:
                yield f"{name} is {_text(payload[name])}"
        for name, wanted in self._terms.items():
            if name == "due":
                delay = (job.due_at or 0) - job.created_at
                if wanted not in (_Delay(delay), job.due_at):
                    yield f"due {_said(_Delay(delay))}"
            elif getattr(job, name) != wanted:
                yield f"{name} is {getattr(job, name)}"


class _Delay(int):
    """A delay in milliseconds from the enqueue on. It never equals a moment."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Delay) and int(self) == int(other)

    __hash__ = int.__hash__


def _checked(task: Any) -> Task[..., Any, Any]:
    if isinstance(task, Task):
        return task
    name = getattr(task, "__name__", repr(task))
    if callable(task) and not isinstance(task, type):
        raise ConfigError(f"{name} is a function, not a task: give the result of @app.task")
    raise ConfigError(f"{name} is of type {type(task).__name__}: give a task, the result of @app.task")


def _state(state: State | str) -> State:
    try:
        return State(state)
    except ValueError:
        raise ConfigError(f"state={state!r} is no state: give one of {', '.join(State)}") from None


def _due(due: Duration | datetime | None) -> int | None:
    if due is None:
        return None
    return moment(due, "due=") if isinstance(due, datetime) else _Delay(to_ms(due, what="due="))


def _plain(task: Task[..., Any, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments in their stored form; raise for names that the handler does not take."""
    if not isinstance(args, Mapping):
        raise ConfigError(f"args is of type {type(args).__name__}: give a mapping, as in {{'order': 42}}")
    signature = task.definition.codec
    known = [*signature.named, *([signature.star.name] if signature.star else [])]
    for name in args:
        if name not in known and signature.stars is None:
            close = get_close_matches(str(name), known, 1)
            meant = f": did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{task.name}{signature.shape} has no parameter {name!r}{meant}")
    return {name: _stored(signature, value) for name, value in args.items()}


def _defaults(task: Task[..., Any, Any]) -> dict[str, Any]:
    """Return the default arguments of a handler in their stored form."""
    signature = task.definition.codec
    defaults: dict[str, Any] = {signature.star.name: []} if signature.star else {}
    for name, parameter in signature.named.items():
        with suppress(PayloadError):  # a default may be a value that cannot be stored
            if parameter.default is not Parameter.empty:
                defaults[name] = _stored(signature, parameter.default)
    return defaults


def _stored(signature: SignatureCodec, value: Any) -> Any:
    return codec.plain(codec.encode(value, sets=signature.sets))


def _jobs(task: Task[..., Any, Any]) -> Iterator[JobRecord]:
    """Read all jobs of a task, the latest first."""
    before: str | None = None
    while page := task._tasks.database.run(ops.listing(task=task.name, before=before, limit=PAGE)):
        yield from page
        before = page[-1].id


def _arguments(payload: Any) -> str:
    if not isinstance(payload, dict):
        return _text(payload)
    return ", ".join(f"{name}={_text(value)}" for name, value in payload.items())


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _said(value: Any) -> str:
    if isinstance(value, _Delay):
        return f"{describe(value)} after its enqueue" if value > 0 else "at once"
    return str(value)
