"""Schedules: recurring work, defined in code or at run time, and the calls that inspect and change it.

The database stores every schedule, so that any worker can fire it. `@app.every` defines one in code: a worker
reconciles the database with its code when it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from datetime import UTC, datetime
from itertools import islice, takewhile
from typing import Any, ParamSpec, TypeAlias, TypeVar, Unpack, overload

from msgspec.structs import replace

from duly.app import backfill
from duly.app.backfill import CHUNK, TRIES, crowded, dues_from, the_one
from duly.app.context import Ctx, SyncCtx
from duly.app.filters import user
from duly.app.schedule_options import Defined, Options, Terms, When, anchored, defined, terms
from duly.app.task import Call, Task
from duly.app.tasks import Tasks
from duly.errors import ConfigError, ScheduleExists, ScheduleNotFound
from duly.model import FireRecord, ScheduleRecord
from duly.rules import failure
from duly.rules.checks import moment, whole
from duly.rules.timing import Timing, occurrences, zone
from duly.store import schedules as store
from duly.store import sequence
from duly.store.op import Op
from duly.store.schedules import Definition, Listed
from duly.store.sequence import Steps

P = ParamSpec("P")
C = TypeVar("C")
R = TypeVar("R")
T = TypeVar("T")

# In the class below `list` is a method.
Records: TypeAlias = list[ScheduleRecord]
Fires: TypeAlias = list[FireRecord]
Moments: TypeAlias = list[datetime]
Ids: TypeAlias = list[str]

LAST_MS = 253_370_764_800_000  # the year 9999, the last that datetime supports


class Schedules:
    """The schedules of an app: recurring work, its due times, and its runs."""

    def __init__(self, tasks: Tasks, in_code: dict[str, Defined] | None = None) -> None:
        self._tasks = tasks
        self._in_code = {} if in_code is None else in_code
        self.present: Callable[[], int] = _now  # the clock, if no database is asked

    @property
    def in_code(self) -> tuple[str, ...]:
        """The names of the schedules that are defined in code."""
        return tuple(self._in_code)

    # Inspecting

    def list(self) -> Records:
        """List all schedules by name."""
        return self._run(_all())

    async def alist(self) -> Records:
        """List all schedules, from a coroutine."""
        return await self._arun(_all())

    def get(self, name: str) -> ScheduleRecord | None:
        """Read one schedule. None: no schedule has this name."""
        return _first(self._tasks.database.run(store.listing(names=[name], limit=1)))

    async def aget(self, name: str) -> ScheduleRecord | None:
        """Read one schedule, from a coroutine."""
        return _first(await self._tasks.database.arun(store.listing(names=[name], limit=1)))

    def next(self, name: str, n: int = 5, after: datetime | None = None) -> Moments:
        """Return the next due times of a schedule, in its time zone. One that is defined in code needs no database."""
        if name in self._in_code:
            begin = self.present() if after is None else moment(after, "after=", down=True)
            when = anchored(self._in_code[name].terms.timing, begin)
            return _preview(when, n, occurrences(when, begin))
        return self._run(_stored_preview(name, n, after))

    async def anext(self, name: str, n: int = 5, after: datetime | None = None) -> Moments:
        """Return the next due times of a schedule, from a coroutine."""
        if name in self._in_code:
            return self.next(name, n, after)
        return await self._arun(_stored_preview(name, n, after))

    def fires(self, name: str, *, limit: int = 100, before: datetime | int | None = None) -> Fires:
        """Read the records of a schedule, newest first: runs, and consecutive misses with their reason."""
        return self._tasks.database.run(_fires(name, limit, before))

    async def afires(self, name: str, *, limit: int = 100, before: datetime | int | None = None) -> Fires:
        """Read the records of a schedule, from a coroutine."""
        return await self._tasks.database.arun(_fires(name, limit, before))

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
        """Run a task by a schedule; `task.call(…)` gives it arguments. The options are those of `app.every`.

        Raises ScheduleExists if another schedule has this name, unless `replace` allows to change it.
        """
        return self._run(_create(defined(name, task, terms(when, name, options)), may_change=replace))

    async def acreate(
        self,
        name: str,
        task: Task[..., Any, Any] | Call[Any],
        when: When | None = None,
        *,
        replace: bool = False,
        **options: Unpack[Options],
    ) -> ScheduleRecord:
        """Run a task by a schedule, from a coroutine."""
        return await self._arun(_create(defined(name, task, terms(when, name, options)), may_change=replace))

    def pause(self, name: str, *, by: str | None = None, why: str = "") -> None:
        """Stop firing a schedule until it is resumed. Its earlier runs continue."""
        _there(self._tasks.database.run(store.pause(name, by=_by(by), why=why)), name)

    async def apause(self, name: str, *, by: str | None = None, why: str = "") -> None:
        """Stop firing a schedule, from a coroutine."""
        _there(await self._tasks.database.arun(store.pause(name, by=_by(by), why=why)), name)

    def resume(self, name: str, *, by: str | None = None, why: str = "") -> bool:
        """Resume a paused schedule with its next due time. Due times during the pause are recorded as skipped.

        False: it was not paused.
        """
        return self._run(backfill.resume(name, _by(by), failure.escape_text(why)))

    async def aresume(self, name: str, *, by: str | None = None, why: str = "") -> bool:
        """Resume a paused schedule, from a coroutine."""
        return await self._arun(backfill.resume(name, _by(by), failure.escape_text(why)))

    def trigger(self, name: str, *, by: str | None = None) -> str:
        """Run a schedule now, and return the id of the job. Its next due time does not change."""
        return self._run(backfill.trigger(self._tasks.database, name, _by(by)))

    async def atrigger(self, name: str, *, by: str | None = None) -> str:
        """Run a schedule now, from a coroutine."""
        return await self._arun(backfill.trigger(self._tasks.database, name, _by(by)))

    def backfill(
        self, name: str, since: datetime, until: datetime, *, by: str | None = None, force: bool = False
    ) -> Ids:
        """Fire the due times of a past window that were not fired, both ends included. Returns the ids of the jobs.

        If runs must not overlap, they run one after the other. Fires are recorded as long as the app keeps jobs;
        `force` fires earlier due times too, whether or not they have run.
        """
        return self._run(self._backfilling(name, since, until, by, force))

    async def abackfill(
        self, name: str, since: datetime, until: datetime, *, by: str | None = None, force: bool = False
    ) -> Ids:
        """Fire the due times of a past window, from a coroutine."""
        return await self._arun(self._backfilling(name, since, until, by, force))

    def delete(self, name: str, *, by: str | None = None, why: str = "") -> None:
        """Delete a schedule but not its jobs and records. The next worker start restores one that is in code."""
        _there(self._tasks.database.run(store.delete(name, by=_by(by), why=why)), name)

    async def adelete(self, name: str, *, by: str | None = None, why: str = "") -> None:
        """Delete a schedule, from a coroutine."""
        _there(await self._tasks.database.arun(store.delete(name, by=_by(by), why=why)), name)

    def reconcile(self) -> Mapping[str, Ids]:
        """Update the database to the code. Returns the created, changed, restored and abandoned schedules."""
        return self._run(_reconcile(tuple(self._in_code.values())))

    async def areconcile(self) -> Mapping[str, Ids]:
        """Update the database to the code, from a coroutine."""
        return await self._arun(_reconcile(tuple(self._in_code.values())))

    # Inside

    def _add(self, name: str, task: Task[..., Any, Any], terms: Terms) -> None:
        if name in self._in_code:
            raise ConfigError(f"a schedule named {name!r} is there already: give one of them another name=")
        self._in_code[name] = defined(name, task, terms, in_code=True)

    def _backfilling(self, name: str, since: datetime, until: datetime, by: str | None, force: bool) -> Steps[Ids]:
        return backfill.backfill(self._tasks.database, name, *backfill.window(since, until), _by(by), force)

    def _run(self, asked: Steps[T]) -> T:
        return sequence.run(asked, self._tasks.database.run)

    async def _arun(self, asked: Steps[T]) -> T:
        return await sequence.arun(asked, self._tasks.database.arun)


class Every:
    """The decorator `app.every(…)`: defines a schedule in code for a task or a function."""

    def __init__(self, schedules: Schedules, when: When | None, name: str | None, options: Options) -> None:
        self._schedules = schedules
        self._when = when
        self._name = name
        self._options = options
        terms(when, name or "every", options)  # raises where it is written

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
        """Define the schedule, and a task if this is a plain function."""
        if isinstance(handler, Task):
            self._schedule(handler)
            return handler
        tasks = self._schedules._tasks
        task = tasks.define(handler, {} if self._name is None else {"name": self._name})
        try:
            self._schedule(task)
        except ConfigError:
            tasks.remove(task)
            raise
        return task

    def _schedule(self, task: Task[..., Any, Any]) -> None:
        name = self._name or task.name
        self._schedules._add(name, task, terms(self._when, name, self._options))


# Several operations in a row, run plainly or from a coroutine


def _all() -> Steps[Records]:
    found: list[ScheduleRecord] = []
    while True:
        page: list[Listed] = yield store.listing(after=found[-1].name if found else "", limit=CHUNK)
        found += [one.record for one in page]
        if len(page) < CHUNK:
            return found


def _stored_preview(name: str, n: int, after: datetime | None) -> Steps[Moments]:
    due = the_one((yield store.one(name)), name)
    if due.next_at is None:  # it waits for the end of a run, or its rule has ended
        return []
    begin = due.next_at if after is None else moment(after, "after=", down=True) + 1
    return _preview(due.timing, n, dues_from(due, max(begin, due.now) if due.paused else begin))


def _create(wanted: Defined, *, may_change: bool) -> Steps[ScheduleRecord]:
    for _ in range(TRIES):
        found: list[Listed] = yield store.listing(names=[wanted.name], limit=1)
        if found and _same(found[0].definition, wanted.definition(revision=1, now=found[0].now)):
            return found[0].record
        if found and found[0].record.in_code:
            raise ScheduleExists(
                f"a schedule named {wanted.name!r} is defined in code: change it there, or use another name"
            )
        if found and not may_change:
            raise ScheduleExists(
                f"a schedule named {wanted.name!r} exists already with other options: give replace=True to change it"
            )
        now = found[0].now if found else (yield store.next_fire())[1]
        revision = found[0].definition.revision + 1 if found else 1
        if (yield store.define([wanted.definition(revision=revision, now=now)])):
            return (yield store.listing(names=[wanted.name], limit=1))[0].record  # type: ignore[no-any-return]
    raise crowded(wanted.name)


def _reconcile(wanted: tuple[Defined, ...]) -> Steps[Mapping[str, Ids]]:
    said: dict[str, Ids] = {"created": [], "changed": [], "restored": [], "abandoned": []}
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
        said["restored"] = stopped
    said["abandoned"] = yield store.abandon(names)
    return said


def _revision(found: Listed | None) -> int:
    return 0 if found is None else found.definition.revision


def _same(there: Definition, wanted: Definition) -> bool:
    """Compare what users can set. The other fields depend on the moment of the definition."""
    plain = {"revision": 0, "next_at": None}
    return replace(there, timing=replace(there.timing, anchor_at=None), **plain) == replace(
        wanted, timing=replace(wanted.timing, anchor_at=None), **plain
    )


def _preview(when: Timing, n: int, dues: Iterable[int]) -> Moments:
    whole(n, "n=", least=0, most=CHUNK)
    moments = islice(takewhile(lambda at: at < LAST_MS, dues), n)
    place = zone(when.tz)
    return [datetime.fromtimestamp(at / 1000, UTC).astimezone(place) for at in moments]


def _fires(name: str, limit: int, before: datetime | int | None) -> Op[Fires]:
    whole(limit, "limit=", least=1)
    at = store.FAR if before is None else moment(before, "before=") if isinstance(before, datetime) else before
    return store.fires(name, before=at, limit=limit)


def _there(answer: list[str], name: str) -> None:
    if not answer:
        raise ScheduleNotFound(f"no schedule is named {name!r}")


def _first(found: list[Listed]) -> ScheduleRecord | None:
    return found[0].record if found else None


def _now() -> int:
    return int(datetime.now(UTC).timestamp() * 1000)


def _by(by: str | None) -> str:
    return failure.escape_text(by or user())
