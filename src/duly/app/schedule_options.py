"""The options of a schedule, read from the arguments of `app.every` and `app.schedules.create`."""

from __future__ import annotations

from datetime import timedelta
from difflib import get_close_matches
from typing import Any, TypeAlias, TypedDict, TypeVar
from zoneinfo import ZoneInfo

from msgspec import Struct
from msgspec.structs import asdict, replace

from duly.app.task import Call, Task
from duly.errors import BadArguments, ConfigError
from duly.model import Catchup, Envelope, Overlap
from duly.rules import codec
from duly.rules import envelope as envelopes
from duly.rules.checks import whole
from duly.rules.durations import Duration, describe, to_ms
from duly.rules.timing import Mode, Timing, next_after, timing
from duly.store.schedules import Definition

When: TypeAlias = str | float | timedelta
Zone: TypeAlias = str | ZoneInfo

SHORTEST_GRACE_MS = 1000


class Terms(Struct, frozen=True):
    """When a schedule is due, and how due times are handled that cannot be fired in time."""

    timing: Timing
    catchup: Catchup
    grace_ms: int | None
    overlap: Overlap
    jitter_ms: int
    pause_after: int | None


class Options(TypedDict, total=False):
    """The options of a schedule, apart from `when`."""

    rrule: str | None
    tz: Zone
    mode: str | None
    catchup: str
    grace: Duration | None
    overlap: str
    jitter: Duration | None
    pause_after: int | None


def terms(when: When | None, name: str, options: Options) -> Terms:
    """Read the options of a schedule; raise for options that cannot work."""
    if unknown := [word for word in options if word not in Options.__annotations__]:
        close = get_close_matches(unknown[0], Options.__annotations__, 1)
        meant = f"did you mean {close[0]}=?" if close else f"the options are {', '.join(Options.__annotations__)}"
        raise ConfigError(f"{name}: a schedule has no option {unknown[0]}=: {meant}")
    return _terms(when, name=name, **options)


def _terms(
    when: When | None,
    *,
    name: str,
    rrule: str | None = None,
    tz: Zone = "UTC",
    mode: str | None = None,
    catchup: str = "skip",
    grace: Duration | None = None,
    overlap: str = "allow",
    jitter: Duration | None = None,
    pause_after: int | None = None,
) -> Terms:
    if pause_after is not None:
        whole(pause_after, f"{name}: pause_after=", least=1)
    if callable(when):
        raise ConfigError('app.every needs a rule: write @app.every("10m"), or a cron text')
    try:
        when_due = timing(when, rrule=rrule, tz=tz.key if isinstance(tz, ZoneInfo) else tz, mode=mode)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    return Terms(
        timing=when_due,
        catchup=_one_of(Catchup, catchup, f"{name}: catchup="),
        grace_ms=None if grace is None else _grace(grace, name),
        overlap=_one_of(Overlap, overlap, f"{name}: overlap="),
        jitter_ms=0 if jitter is None else to_ms(jitter, what=f"{name}: jitter="),
        pause_after=pause_after,
    )


def _grace(grace: Duration, name: str) -> int:
    ms = to_ms(grace, what=f"{name}: grace=")
    if ms < SHORTEST_GRACE_MS:
        raise ConfigError(f"{name}: grace= is {describe(ms)}: give at least 1s, as no run starts exactly on time")
    return ms


E_ = TypeVar("E_", Catchup, Overlap)


def _one_of(words: type[E_], said: str, what: str) -> E_:
    try:
        return words(said)
    except ValueError:
        close = get_close_matches(str(said), list(words), 1)
        meant = f"did you mean {str(close[0])!r}?" if close else f"give one of {', '.join(words)}"
        raise ConfigError(f"{what} is {said!r}: {meant}") from None


class Defined(Struct, frozen=True):
    """A schedule as code or a user defines it."""

    name: str
    task: Task[..., Any, Any]
    payload: str
    terms: Terms
    in_code: bool
    lane: str | None = None

    def definition(self, *, revision: int, now: int) -> Definition:
        """Return the schedule in the form it is stored, first due after `now`."""
        timing = anchored(self.terms.timing, now)
        return Definition(
            name=self.name,
            task=self.task.name,
            **{**asdict(self.terms), "timing": timing},
            terms=self._job_terms(),
            payload=self.payload,
            envelope=self._envelope(),
            in_code=self.in_code,
            revision=revision,
            next_at=next_after(timing, now),
        )

    def _job_terms(self) -> str:
        said = self.task._terms()
        names = ("queue", "priority", "max_attempts", "lease_ms", "keep_ms", "result_ttl_ms", "expires_ms", "on_dead")
        laned = {} if self.lane is None else {"lane": self.lane, "ordering_dead": said.ordering_dead}
        return codec.encode({name: getattr(said, name) for name in names} | laned)

    def _envelope(self) -> str | None:
        using = self.task._using
        version = self.task.definition.schema_version
        return envelopes.pack(
            Envelope(schema_version=version, correlation_id=using.correlation_id, subject=using.subject)
        )


def anchored(when: Timing, now: int) -> Timing:
    """Anchor a rule that has no start at the next full second."""
    return replace(when, anchor_at=(now // 1000 + 1) * 1000) if when.mode is Mode.RRULE else when


def defined(name: str, task: Task[..., Any, Any] | Call[Any], terms: Terms, *, in_code: bool = False) -> Defined:
    """Check the parts of a schedule, and return it."""
    _check_name(name)
    call = task if isinstance(task, Call) else _call(name, task)
    _refuse_terms(name, call.task)
    return Defined(name, call.task, call.payload, terms, in_code, call.task._lane(call.args, call.kwargs))


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name.strip() or len(name) > 200 or not name.isprintable():
        raise ConfigError(f"a schedule's name is {name!r:.80}: give a text of up to 200 characters that can be printed")


def _call(name: str, task: Any) -> Call[Any]:
    if not isinstance(task, Task):
        raise ConfigError(
            f"{name}: {task!r:.60} is no task: decorate the function with @app.task, or give task.call(…)"
        )
    try:
        return task.call()
    except BadArguments as error:
        raise ConfigError(
            f"{name}: {task.name} cannot run by a schedule without arguments ({error}): give them defaults, "
            f"or use app.schedules.create(name, {task.name}.call(…), …)"
        ) from error


def _refuse_terms(name: str, task: Task[..., Any, Any]) -> None:
    using = task._using
    for word, given in (("key=", using.key), ("conn=", using.conn)):
        if given is not None:
            raise ConfigError(f"{name}: using({word}) makes no sense for a schedule: each of its runs is another job")
    if using.app is not None:
        raise ConfigError(f"{name}: using(app=) makes no sense for a schedule: create it with app.at(url).schedules")
    for field, word in (("delay_ms", "delay="), ("due_at", "at="), ("expires_at", "expires= at a fixed time")):
        if field in using.terms:
            raise ConfigError(f"{name}: using({word}) makes no sense for a schedule: its rule decides when")
    for field, word in (("debounce_ms", "debounce="), ("key_window_ms", "unique_for=")):
        if field in using.terms:
            raise ConfigError(f"{name}: using({word}) makes no sense for a schedule: its runs have no key")
