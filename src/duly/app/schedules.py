"""Schedules: work that recurs, defined in code or by a person, and what people do with it.

What a schedule is lies in the database, so that any worker can fire it. `@app.every` defines one in code: workers bring
the database in line with their code when they start. What reads first and then decides is written once here, as a
generator of operations, and run both plainly and from a coroutine.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypedDict, TypeVar, Unpack, overload
from zoneinfo import ZoneInfo

from msgspec.structs import replace

from duly.app.context import Ctx, SyncCtx
from duly.app.tasks import Call, Task
from duly.errors import BadArguments, ConfigError, ScheduleExists, ScheduleNotFound, TransitionRefused
from duly.model import DAY_MS, QUEUED, Catchup, Envelope, FireRecord, Overlap, ScheduleRecord
from duly.rules import codec, failure
from duly.rules import envelope as envelopes
from duly.rules.checks import moment, whole
from duly.rules.durations import Duration, describe, to_ms
from duly.rules.firing import Due, Firing, Run, Skip, Told, joined, most_counted, unfired
from duly.rules.timing import Mode, Timing, due_between, next_after, occurrences, timing, zone
from duly.store import schedules as store
from duly.store import sequence
from duly.store.op import Op
from duly.store.schedules import Definition, Listed
from duly.store.sequence import Steps

if TYPE_CHECKING:
    from duly.app.app import App

P = ParamSpec("P")
C = TypeVar("C")
R = TypeVar("R")
T = TypeVar("T")

# In the class below `list` is a method.
Records: TypeAlias = list[ScheduleRecord]
Fires: TypeAlias = list[FireRecord]
Moments: TypeAlias = list[datetime]
Ids: TypeAlias = list[str]

When: TypeAlias = str | float | timedelta
Zone: TypeAlias = str | ZoneInfo

SHORTEST_GRACE_MS = 1000
PAUSED = "paused"
CHUNK = 1000
LAST_MS = 253_370_764_800_000  # the year 9999, beyond which no datetime goes
TRIES = 100  # against others who write the same schedule at the same moment


@dataclass(frozen=True, slots=True)
class Terms:
    """When a schedule is due and what becomes of due times that cannot be fired as they come."""

    timing: Timing
    catchup: Catchup
    grace_ms: int | None
    overlap: Overlap
    jitter_ms: int
    pause_after: int | None


class Options(TypedDict, total=False):
    """What can be said of a schedule beside when it is due."""

    rrule: str | None
    tz: Zone
    mode: str | None
    catchup: str
    grace: Duration | None
    overlap: str
    jitter: Duration | None
    pause_after: int | None


def terms(when: When | None, name: str, options: Options) -> Terms:
    """Read the options of a schedule, refusing what cannot work."""
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
        raise ConfigError('app.every needs to know when: write @app.every("10m"), or a cron text')
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
        raise ConfigError(f"{name}: grace= is {describe(ms)}: give at least 1s, for no run begins at its very instant")
    return ms


E_ = TypeVar("E_", Catchup, Overlap)


def _one_of(words: type[E_], said: str, what: str) -> E_:
    try:
        return words(said)
    except ValueError:
        close = get_close_matches(str(said), list(words), 1)
        meant = f"did you mean {str(close[0])!r}?" if close else f"give one of {', '.join(words)}"
        raise ConfigError(f"{what} is {said!r}: {meant}") from None


class Every:
    """The decorator `app.every(…)`: has a task run by a schedule, which workers define when they start."""

    def __init__(self, app: App, when: When | None, name: str | None, options: Options) -> None:
        self._app = app
        self._when = when
        self._name = name
        self._options = options
        terms(when, name or "every", options)  # what is wrong is told where it is written

    @overload
    def __call__(self, handler: Task[P, C, R], /) -> Task[P, C, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, handler: Callable[[Ctx], Coroutine[Any, Any, R]], /) -> Task[[], Coroutine[Any, Any, R], R]: ...
    @overload
    def __call__(self, handler: Callable[[], Coroutine[Any, Any, R]], /) -> Task[[], Coroutine[Any, Any, R], R]: ...
    @overload
    def __call__(self, handler: Callable[[SyncCtx], R], /) -> Task[[], R, R]: ...
    @overload
    def __call__(self, handler: Callable[[], R], /) -> Task[[], R, R]: ...

    def __call__(self, handler: Any, /) -> Any:
        """Define the schedule, and the task where it is given a plain function."""
        if isinstance(handler, Task):
            self._schedule(handler)
            return handler
        known = dict(self._app.tasks)
        task = self._app._define(handler, {} if self._name is None else {"name": self._name})
        try:
            self._schedule(task)
        except ConfigError:  # nothing is left of what was refused
            self._app.tasks = known
            raise
        return task

    def _schedule(self, task: Task[..., Any, Any]) -> None:
        name = self._name or task.name
        self._app.schedules._add(name, task, terms(self._when, name, self._options))


@dataclass(frozen=True, slots=True)
class Defined:
    """A schedule as code or a person wants it."""

    name: str
    task: Task[..., Any, Any]
    payload: str
    terms: Terms
    in_code: bool
    lane: str | None = None

    def definition(self, *, revision: int, now: int) -> Definition:
        """Write it down, as due for the first time after `now`."""
        anchored = _anchored(self.terms.timing, now)
        return Definition(
            name=self.name,
            task=self.task.name,
            timing=anchored,
            catchup=self.terms.catchup,
            grace_ms=self.terms.grace_ms,
            overlap=self.terms.overlap,
            jitter_ms=self.terms.jitter_ms,
            pause_after=self.terms.pause_after,
            terms=self._job_terms(),
            payload=self.payload,
            envelope=self._envelope(),
            in_code=self.in_code,
            revision=revision,
            next_at=next_after(anchored, now),
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


class Schedules:
    """The schedules of an app: what recurs, when it is due next and what came of it."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._in_code: dict[str, Defined] = {}
        self.present: Callable[[], int] = _now  # where no database is asked

    @property
    def in_code(self) -> tuple[str, ...]:
        """The names of the schedules that are defined in code."""
        return tuple(self._in_code)

    # Looking

    def list(self) -> Records:
        """List all schedules by name."""
        return self._run(_all())

    async def alist(self) -> Records:
        """List all schedules, from a coroutine."""
        return await self._arun(_all())

    def get(self, name: str) -> ScheduleRecord | None:
        """Read one schedule, or None where there is none of that name."""
        return _first(self._app.driver.run(store.listing(names=[name], limit=1)))

    async def aget(self, name: str) -> ScheduleRecord | None:
        """Read one schedule, from a coroutine."""
        return _first(await self._app.driver.arun(store.listing(names=[name], limit=1)))

    def next(self, name: str, n: int = 5, after: datetime | None = None) -> Moments:
        """Say when a schedule is due next, in its own zone; one that is defined in code needs no database."""
        if name in self._in_code:
            begin = self.present() if after is None else _at(after)
            when = _anchored(self._in_code[name].terms.timing, begin)
            return _preview(when, n, occurrences(when, begin))
        return self._run(_stored_preview(name, n, after))

    async def anext(self, name: str, n: int = 5, after: datetime | None = None) -> Moments:
        """Say when a schedule is due next, from a coroutine."""
        if name in self._in_code:
            return self.next(name, n, after)
        return await self._arun(_stored_preview(name, n, after))

    def fires(self, name: str, *, limit: int = 100, before: datetime | int | None = None) -> Fires:
        """Read what came of a schedule, newest first: runs, and runs of misses with their reason."""
        return self._app.driver.run(_fires(name, limit, before))

    async def afires(self, name: str, *, limit: int = 100, before: datetime | int | None = None) -> Fires:
        """Read what came of a schedule, from a coroutine."""
        return await self._app.driver.arun(_fires(name, limit, before))

    # Changing

    def create(
        self,
        name: str,
        task: Task[..., Any, Any] | Call[Any],
        when: When | None = None,
        *,
        replace: bool = False,
        **options: Unpack[Options],
    ) -> ScheduleRecord:
        """Have a task run by a schedule; `task.call(…)` gives it arguments. The options are those of `app.every`.

        One of this name that is there already must be the same, or `replace` says that it may be changed.
        """
        return self._run(_create(self._defined(name, task, terms(when, name, options)), may_change=replace))

    async def acreate(
        self,
        name: str,
        task: Task[..., Any, Any] | Call[Any],
        when: When | None = None,
        *,
        replace: bool = False,
        **options: Unpack[Options],
    ) -> ScheduleRecord:
        """Have a task run by a schedule, from a coroutine."""
        return await self._arun(_create(self._defined(name, task, terms(when, name, options)), may_change=replace))

    def pause(self, name: str, *, by: str | None = None, why: str = "") -> None:
        """Stop firing a schedule until it is resumed; what it has fired runs on."""
        _there(self._app.driver.run(store.pause(name, by=_by(by), why=why)), name)

    async def apause(self, name: str, *, by: str | None = None, why: str = "") -> None:
        """Stop firing a schedule, from a coroutine."""
        _there(await self._app.driver.arun(store.pause(name, by=_by(by), why=why)), name)

    def resume(self, name: str, *, by: str | None = None, why: str = "") -> bool:
        """Let a paused schedule go on with the next due time; what fell into the pause is recorded as skipped.

        False: it was not paused.
        """
        return self._run(_resume(name, _by(by), failure.escape_text(why)))

    async def aresume(self, name: str, *, by: str | None = None, why: str = "") -> bool:
        """Let a paused schedule go on, from a coroutine."""
        return await self._arun(_resume(name, _by(by), failure.escape_text(why)))

    def trigger(self, name: str, *, by: str | None = None) -> str:
        """Run a schedule now, whatever its rule says, and return the job's id; its next due time stays."""
        return self._run(self._trigger(name, _by(by)))

    async def atrigger(self, name: str, *, by: str | None = None) -> str:
        """Run a schedule now, from a coroutine."""
        return await self._arun(self._trigger(name, _by(by)))

    def backfill(
        self, name: str, since: datetime, until: datetime, *, by: str | None = None, force: bool = False
    ) -> Ids:
        """Fire the due times of a past window that were not fired, both ends included; returns the jobs' ids.

        Where runs may not overlap they run one after the other. What was fired is known as long as the app keeps
        things; `force` fires what is due before that, whether or not it has run.
        """
        return self._run(self._backfill(name, *_window(since, until), _by(by), force))

    async def abackfill(
        self, name: str, since: datetime, until: datetime, *, by: str | None = None, force: bool = False
    ) -> Ids:
        """Fire the due times of a past window, from a coroutine."""
        return await self._arun(self._backfill(name, *_window(since, until), _by(by), force))

    def delete(self, name: str, *, by: str | None = None, why: str = "") -> None:
        """Delete a schedule; its jobs and the record of its fires stay. One in code comes back with the next start."""
        _there(self._app.driver.run(store.delete(name, by=_by(by), why=why)), name)

    async def adelete(self, name: str, *, by: str | None = None, why: str = "") -> None:
        """Delete a schedule, from a coroutine."""
        _there(await self._app.driver.arun(store.delete(name, by=_by(by), why=why)), name)

    def reconcile(self) -> Mapping[str, Ids]:
        """Bring the database in line with the code: what was created, changed, taken up again, abandoned."""
        return self._run(_reconcile(tuple(self._in_code.values())))

    async def areconcile(self) -> Mapping[str, Ids]:
        """Bring the database in line with the code, from a coroutine."""
        return await self._arun(_reconcile(tuple(self._in_code.values())))

    # Inside

    def _add(self, name: str, task: Task[..., Any, Any], said: Terms) -> None:
        if name in self._in_code:
            raise ConfigError(f"a schedule named {name!r} is there already: give one of them another name=")
        self._in_code[name] = self._defined(name, task, said, in_code=True)

    def _defined(
        self, name: str, task: Task[..., Any, Any] | Call[Any], said: Terms, *, in_code: bool = False
    ) -> Defined:
        _check_name(name)
        call = task if isinstance(task, Call) else _call(name, task)
        _refuse_terms(name, call.task)
        return Defined(name, call.task, call.payload, said, in_code, call.task._lane(call.args, call.kwargs))

    def _trigger(self, name: str, by: str) -> Steps[str]:
        for _ in range(TRIES):
            due = the_one((yield store.one(name)), name)
            at = due.now
            while (yield store.fired_between(name, at, at)):  # one a millisecond: the record knows them by it
                at += 1
            run = Run(
                id=self._app._new_id(),
                due_at=at,
                after_ms=0,
                envelope=replace(due.envelope, due_at=at),
                because=f"triggered by {by}",
            )
            told = Told("schedule.triggered", by=by)
            firing = Firing(name, due.revision, due.next_at, runs=(run,), told=(told,))
            if (yield store.fire([firing])):
                return run.id
        raise _crowded(name)

    def _backfill(self, name: str, since: int, until: int, by: str, force: bool) -> Steps[Ids]:
        ids: Ids = []
        tries = 0
        while since <= until:
            due = the_one((yield store.one(name)), name)
            refuse_window(due, until)
            if not force:
                refuse_forgotten(due, since, until, self._app.settings.keep_ms)
            dues = list(islice(takewhile(lambda at: at <= until, dues_from(due, since)), CHUNK))
            if not dues:
                break
            fired = set((yield store.fired_between(name, dues[0], dues[-1])))
            skips, foreign = _by_this_rule(due, (yield store.skipped_between(name, dues[0], dues[-1])))
            runs = self._runs(due, [at for at in dues if at not in fired | foreign], f"backfilled by {by}")
            told = Told("schedule.backfilled", by=by, data=f'{{"count": {len(runs)}}}')
            firing = Firing(
                name,
                due.revision,
                due.next_at,
                runs=runs,
                skips=tuple(part for skip in skips for part in _left_of(due, skip, dues)),
                forget=tuple(skip.due_at for skip in skips),
                told=(told,),
            )
            tries += 1
            if runs and not (yield store.fire([firing])):
                if tries > TRIES:
                    raise _crowded(name)
                continue
            ids += [run.id for run in runs]
            since, tries = dues[-1] + 1, 0
        return ids

    def _runs(self, due: Due, dues: Iterable[int], because: str) -> tuple[Run, ...]:
        queued = due.overlap is not Overlap.ALLOW
        return tuple(
            Run(
                id=self._app._new_id(),
                due_at=at,
                after_ms=0,
                envelope=replace(due.envelope, due_at=at),
                reason=QUEUED if queued and (due.live or place) else None,
                because=because,
            )
            for place, at in enumerate(dues)
        )

    def _run(self, asked: Steps[T]) -> T:
        return sequence.run(asked, self._app.driver.run)

    async def _arun(self, asked: Steps[T]) -> T:
        return await sequence.arun(asked, self._app.driver.arun)


# What is read first and then decided


def _all() -> Steps[Records]:
    found: list[ScheduleRecord] = []
    while True:
        page: list[Listed] = yield store.listing(after=found[-1].name if found else "", limit=CHUNK)
        found += [one.record for one in page]
        if len(page) < CHUNK:
            return found


def _stored_preview(name: str, n: int, after: datetime | None) -> Steps[Moments]:
    due = the_one((yield store.one(name)), name)
    if due.next_at is None:  # it waits for the end of a run, or there is nothing more to come
        return []
    begin = due.next_at if after is None else _at(after) + 1
    return _preview(due.timing, n, dues_from(due, max(begin, due.now) if due.paused else begin))


def _create(wanted: Defined, *, may_change: bool) -> Steps[ScheduleRecord]:
    for _ in range(TRIES):
        found: list[Listed] = yield store.listing(names=[wanted.name], limit=1)
        if found and _same(found[0].definition, wanted.definition(revision=1, now=found[0].now)):
            return found[0].record
        if found and found[0].record.in_code:
            raise ScheduleExists(
                f"a schedule named {wanted.name!r} stands in code: change it there, or take another name"
            )
        if found and not may_change:
            raise ScheduleExists(
                f"a schedule named {wanted.name!r} is there already and is another one: give replace=True to change it"
            )
        now = found[0].now if found else (yield store.next_fire())[1]
        revision = found[0].definition.revision + 1 if found else 1
        if (yield store.define([wanted.definition(revision=revision, now=now)])):
            return (yield store.listing(names=[wanted.name], limit=1))[0].record  # type: ignore[no-any-return]
    raise _crowded(wanted.name)


def _reconcile(wanted: tuple[Defined, ...]) -> Steps[Mapping[str, Ids]]:
    said: dict[str, Ids] = {"created": [], "changed": [], "readopted": [], "abandoned": []}
    names = [one.name for one in wanted]
    there: dict[str, Listed] = {}
    for _ in range(TRIES if wanted else 0):
        there = {one.record.name: one for one in (yield store.listing(names=names, limit=len(names)))}
        now = (yield store.next_fire())[1]
        fresh = [one.definition(revision=_revision(there.get(one.name)) + 1, now=now) for one in wanted]
        differing = [one for one in fresh if one.name not in there or not _same(there[one.name].definition, one)]
        if not differing:
            break
        for name in (yield store.define(differing)):
            said["changed" if name in there else "created"].append(name)
    if stopped := [name for name, one in there.items() if one.record.paused_why == store.GONE]:
        yield store.readopt(stopped)
        said["readopted"] = stopped
    said["abandoned"] = yield store.abandon(names)
    return said


def _revision(found: Listed | None) -> int:
    return 0 if found is None else found.definition.revision


def _same(there: Definition, wanted: Definition) -> bool:
    """Compare all that a person can say; the rest follows from when it was said."""
    plain = {"revision": 0, "next_at": None}
    return replace(there, timing=replace(there.timing, anchor_at=None), **plain) == replace(
        wanted, timing=replace(wanted.timing, anchor_at=None), **plain
    )


def _resume(name: str, by: str, why: str) -> Steps[bool]:
    for _ in range(TRIES):
        due = the_one((yield store.one(name)), name)
        if not due.paused:
            return False
        skips, next_at = _paused(due)
        counted = next_at is None or next_at > due.now
        told = (Told("schedule.resumed", by=by, why=why),) if counted else ()
        firing = Firing(name, due.revision, next_at, skips=skips, told=told, resume=counted)
        if (yield store.fire([firing])) and counted:
            return True
    raise _crowded(name)


def _paused(due: Due) -> tuple[tuple[Skip, ...], int | None]:
    """Say what fell into a pause, and when the schedule is due after it."""
    if due.next_at is None:
        return (), None
    if due.next_at > due.now:
        return (), _not_far_off(due, due.next_at)
    run = due_between(due.timing, due.next_at, due.now, limit=most_counted(due.timing))
    skips = tuple(unfired(due, Skip(due.next_at, run.last, run.count, PAUSED)))
    return joined(due.skipped, skips), next_after(due.timing, due.now) if due.timing.mode is Mode.DELAY else run.next_at


def _not_far_off(due: Due, next_at: int) -> int:
    """Bring back a due time that lies days beyond what the rule says, because the clock was ahead for a while."""
    usual = next(iter(dues_from(due, due.now + 1)), next_at)
    return usual if next_at - usual > DAY_MS else next_at


def dues_from(due: Due, since: int) -> Iterable[int]:
    """Give the due times from `since` on."""
    interval = due.timing.interval_ms
    if interval is None:
        return occurrences(due.timing, since - 1)
    assert due.next_at is not None  # only a delay has none, and it has no past
    first = due.next_at - (due.next_at - since) // interval * interval
    return occurrences(due.timing, first - interval)


def _by_this_rule(due: Due, skips: Iterable[Skip]) -> tuple[list[Skip], set[int]]:
    """Take the runs of misses that were counted by the rule of today, and the due times that head the others.

    Those stay as they are: what another rule has counted cannot be split by this one.
    """
    ours: list[Skip] = []
    foreign: set[int] = set()
    for skip in skips:
        run = due_between(due.timing, skip.due_at, skip.until_at, limit=skip.count + 1)
        if (run.count, run.last) == (skip.count, skip.until_at):
            ours.append(skip)
        else:
            foreign.add(skip.due_at)
    return ours, foreign


def _left_of(due: Due, skip: Skip, dues: list[int]) -> Iterable[Skip]:
    """Give what is left of a run of misses when a window of it is filled in: before it, and after it."""
    before = due_between(due.timing, skip.due_at, dues[0] - 1, limit=most_counted(due.timing))
    if before.count:
        yield Skip(skip.due_at, before.last, before.count, skip.reason)
    within = sum(skip.due_at <= at <= skip.until_at for at in dues)
    after = next_after(due.timing, dues[-1])
    if (count := skip.count - before.count - within) > 0 and after is not None and after <= skip.until_at:
        yield Skip(after, skip.until_at, count, skip.reason)


# Words


def _anchored(when: Timing, now: int) -> Timing:
    """Have a rule that does not say from when it counts do so from the next full second."""
    return replace(when, anchor_at=(now // 1000 + 1) * 1000) if when.mode is Mode.RRULE else when


def _preview(when: Timing, n: int, dues: Iterable[int]) -> Moments:
    whole(n, "n=", least=0, most=CHUNK)
    moments = islice(takewhile(lambda at: at < LAST_MS, dues), n)
    place = zone(when.tz)
    return [datetime.fromtimestamp(at / 1000, UTC).astimezone(place) for at in moments]


def _fires(name: str, limit: int, before: datetime | int | None) -> Op[Fires]:
    whole(limit, "limit=", least=1)
    at = store.FAR if before is None else _at(before) if isinstance(before, datetime) else before
    return store.fires(name, before=at, limit=limit)


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
    for field, word in (("delay_ms", "delay="), ("due_at", "at="), ("expires_at", "expires= at a fixed time")):
        if field in using.terms:
            raise ConfigError(f"{name}: using({word}) makes no sense for a schedule: its rule says when")
    for field, word in (("debounce_ms", "debounce="), ("key_window_ms", "unique_for=")):
        if field in using.terms:
            raise ConfigError(f"{name}: using({word}) makes no sense for a schedule: its runs have no key")


def _window(since: datetime, until: datetime) -> tuple[int, int]:
    if _at(until) < _at(since):
        raise ConfigError(f"a backfill from {since} until {until} has nothing to fill: until is before since")
    return _at(since), _at(until)


def refuse_window(due: Due, until: int) -> None:
    """Refuse a window that cannot be filled in."""
    if due.timing.mode is Mode.DELAY:
        raise ConfigError(f"{due.name} counts from the end of each run: it has no past due times to fill in")
    if due.overlap is Overlap.CANCEL_RUNNING:
        raise ConfigError(f"{due.name} stops a run when the next is due (overlap='cancel_running'): trigger it instead")
    if until > due.now:
        raise ConfigError(f"{due.name}: a backfill is for the past, and its window reaches into the future")


def refuse_forgotten(due: Due, since: int, until: int, keep_ms: int) -> None:
    """Refuse a window in which the schedule was there, and of which nobody knows any more what was fired."""
    if since < due.now - keep_ms and until >= due.created_at:
        raise ConfigError(
            f"{due.name}: what was fired is known for {describe(keep_ms)}, and this window begins before that: "
            "give force=True to fire all of it that is not known to have run"
        )


def the_one(found: list[Due], name: str) -> Due:
    """Give the schedule that was asked for, or say that there is none."""
    if not found:
        raise ScheduleNotFound(f"no schedule is named {name!r}")
    return found[0]


def _there(answer: list[str], name: str) -> None:
    if not answer:
        raise ScheduleNotFound(f"no schedule is named {name!r}")


def _first(found: list[Listed]) -> ScheduleRecord | None:
    return found[0].record if found else None


def _crowded(name: str) -> TransitionRefused:
    return TransitionRefused(f"the schedule {name} was changed by others {TRIES} times while this was asked: ask again")


def _at(at: datetime) -> int:
    return moment(at, "a moment")


def _now() -> int:
    return int(datetime.now(UTC).timestamp() * 1000)


def _by(by: str | None) -> str:
    from duly.app.app import user

    return failure.escape_text(by or user())
