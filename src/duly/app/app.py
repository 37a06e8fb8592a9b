"""The app: where users define tasks, enqueue jobs, inspect, cancel and replay them.

Creating an app does no I/O: the first operation opens the database. Sync calls have plain names, their async twins the
prefix `a`; both run the same operation.
"""

from __future__ import annotations

import asyncio
import copy
import os
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any, Self, TypeAlias, TypedDict, Unpack, cast
from weakref import WeakValueDictionary

from duly.app import queues
from duly.app.batches import Batch, Batches
from duly.app.database import Database, OtherDatabase, Place, refuse_schema
from duly.app.dead import Dead
from duly.app.decorator import TaskDecorator
from duly.app.events import Events
from duly.app.filters import checked
from duly.app.queues import LimitOptions
from duly.app.schedule_options import Options, When
from duly.app.schedules import Every, Schedules
from duly.app.task import Task
from duly.app.tasks import Tasks
from duly.errors import ConfigError, JobNotFound, NotReplayable, TransitionRefused
from duly.model import JobRecord, Limit, Pause, QueueFigure, State, TaskLimits, WorkerRecord
from duly.rules.durations import Duration
from duly.rules.messages import brief
from duly.rules.settings import Settings
from duly.rules.why import Why
from duly.store import lanes, ops
from duly.store.driver import Driver
from duly.store.op import Op
from duly.store.queues import limits as queue_limits

# In the class below `list` is a method.
Jobs: TypeAlias = list[JobRecord]
Pauses: TypeAlias = list[Pause]
Limits: TypeAlias = list[Limit]
LimitsOfTasks: TypeAlias = list[TaskLimits]
Queues: TypeAlias = list[QueueFigure]
Workers: TypeAlias = list[WorkerRecord]


class JobFilters(TypedDict, total=False):
    """Which jobs to list, and how many at most."""

    state: State | str | None
    task: str | None
    queue: str | None
    batch_id: str | None
    error: str | None
    since: datetime | int | None
    prefix: str | None
    before: str | None
    limit: int


class App:
    """An app: its tasks, and the database that keeps their jobs."""

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        listen_url: str | None = None,
        schema: str | None = None,
        prepared: bool | None = None,
        durability: str | None = None,
        max_attempts: int | None = None,
        max_payload: int | None = None,
        lease: Duration | None = None,
        keep: Duration | None = None,
        result_ttl: Duration | None = None,
        key_ttl: Duration | None = None,
        poll: Duration | None = None,
        busy_timeout: Duration | None = None,
        connect_timeout: Duration | None = None,
        d1_timeout: Duration | None = None,
        d1_statements: int | None = None,
        grace: Duration | None = None,
    ) -> None:
        """Take the settings of the app. Others come from `$DULY_…`, `duly.toml`, or have their default."""
        self._database = Database({name: value for name, value in locals().items() if name != "self"})
        refuse_schema(url, schema)
        self.tasks = Tasks(self._database)
        self.schedules = Schedules(self.tasks)
        self.events = Events()
        self._made_in = str(sys._getframe(1).f_globals.get("__name__"))
        self._spec: str | None = None
        # Of this app and those that `at` returned, which are copies of it.
        self._home: App | None = None
        self._elsewhere: WeakValueDictionary[Place, App] = WeakValueDictionary()
        self._databases: WeakValueDictionary[Place, OtherDatabase] = WeakValueDictionary()

    def __repr__(self) -> str:
        try:
            url = self.settings.url
        except Exception:  # a setting is wrong, which the first operation says
            return f"<{type(self).__name__}>"
        kind = {"postgresql": "PostgreSQL ", "d1": "D1 "}.get(url.store, "")
        shown = kind + url.shown.partition("://")[2].rpartition("@")[2] if kind else url.shown
        return f"<{type(self).__name__} {shown}>"

    # Definition

    @property
    def task(self) -> TaskDecorator:
        """Make a task of a function: `@app.task`, or `@app.task(queue="mail", max_attempts=3)`."""
        return TaskDecorator(self.tasks.define)

    def every(self, when: When | None = None, *, name: str | None = None, **options: Unpack[Options]) -> Every:
        """Run a function or a task by a schedule: `@app.every("0 9 * * mon-fri", tz="Europe/Vienna")`.

        `when` is a cron text, or an interval that counts from the last due time (`mode="delay"`: from the end of the
        last run). `rrule=` replaces it. `name` names the schedule, and the task if this is a plain function.
        """
        return Every(self.schedules, when, name, options)

    def batch(
        self,
        name: str,
        *,
        key: str | None = None,
        on_complete: Task[..., Any, Any] | str | None = None,
        on_success: Task[..., Any, Any] | str | None = None,
        on_first_dead: Task[..., Any, Any] | str | None = None,
        ok_at: float = 1.0,
        conn: Any = None,
    ) -> Batch:
        """Group jobs: every job enqueued inside `with app.batch("import"):` belongs to the batch.

        It is complete when the `with` has ended and so has every job. The callbacks are tasks without required
        arguments; `ctx.batch` is the id of the batch. `on_complete` always runs, `on_success` if at least `ok_at` of
        the jobs succeeded, `on_first_dead` when the first job dies. With a `key`, code that runs again after a crash
        adds the same jobs in the same order only once.
        """
        return Batch.new(
            self.tasks,
            name,
            key=key,
            callbacks={"on_complete": on_complete, "on_success": on_success, "on_first_dead": on_first_dead},
            ok_at=ok_at,
            conn=conn,
        )

    @property
    def batches(self) -> Batches:
        """The batches in the database."""
        return Batches(self.tasks)

    def at(self, url: str | os.PathLike[str], *, schema: str | None = None) -> Self:
        """Return this app on another database, with the same tasks, schedules, listeners and settings.

        It opens nothing, and returns the same object each time as long as it is in use. `using(app=…)` enqueues there.
        """
        if not isinstance(url, str | os.PathLike):
            raise ConfigError("app.at() takes a URL or a path; for a connection of yours use using(conn=)")
        refuse_schema(url, schema)
        place = os.fspath(url), schema
        with _one_at:
            shard = self._elsewhere.get(place)
            if shard is None:
                database = self._databases.get(place) or OtherDatabase(self._database, *place)
                self._databases[place], self._elsewhere[place] = database, (shard := self._on(database))
        return cast("Self", shard)

    def _on(self, database: OtherDatabase) -> Self:
        shard = copy.copy(self)
        shard.tasks = Tasks(database, self.tasks.definitions)
        shard.schedules = Schedules(shard.tasks, self.schedules._in_code)
        shard.events = Events(self.events._listeners)  # with counts of its own
        shard._home, shard._spec = self._home or self, None
        return shard

    @property
    def elsewhere(self) -> Place | None:
        """The URL and schema of an app that `at` returned, for a process that imports the app by its `spec`."""
        return None if self._home is None else self.database.place

    @property
    def spec(self) -> str | None:
        """The name by which another process imports this app, `module:app`. None if it cannot be imported."""
        if self._spec is None and self._home is not None:
            return self._home.spec
        if self._spec is None and self._made_in != "__main__":
            names = vars(sys.modules[self._made_in]) if self._made_in in sys.modules else {}
            self._spec = next((f"{self._made_in}:{name}" for name, value in names.items() if value is self), None)
        return self._spec

    @spec.setter
    def spec(self, spec: str) -> None:
        self._spec = spec

    # The database

    @property
    def database(self) -> Database:
        """The database of the app."""
        return self.tasks.database

    @property
    def settings(self) -> Settings:
        """The settings, read on first use."""
        return self.database.settings

    @property
    def driver(self) -> Driver:
        """The driver that runs operations, created on first use."""
        return self.database.driver

    def migrate(self) -> None:
        """Create or update the tables. SQLite does this with the first operation, PostgreSQL does not."""
        self.database.migrate()

    async def amigrate(self) -> None:
        """Create or update the tables, from a coroutine."""
        await asyncio.to_thread(self.database.migrate)

    def close(self) -> None:
        """Close the database. The next operation opens it again."""
        self.database.close()

    async def aclose(self) -> None:
        """Close the database, from a coroutine."""
        await asyncio.to_thread(self.database.close)

    # Inspecting and changing

    def get(self, job_id: str) -> JobRecord | None:
        """Read one job; None when no job has this id."""
        return self.database.run(ops.get(job_id))

    async def aget(self, job_id: str) -> JobRecord | None:
        """Read one job, from a coroutine."""
        return await self.database.arun(ops.get(job_id))

    def list(self, **filters: Unpack[JobFilters]) -> Jobs:
        """List jobs, newest first. For the next page pass the last id of this page as `before`."""
        return self.database.run(_listing(filters))

    async def alist(self, **filters: Unpack[JobFilters]) -> Jobs:
        """List jobs, from a coroutine."""
        return await self.database.arun(_listing(filters))

    def cancel(self, job_id: str, *, by: str | None = None, why: str | None = None) -> State:
        """Cancel a job that is not running, or ask a running job to stop. Returns its state afterwards."""
        return self._cancelled(job_id, self.database.run(ops.cancel([job_id], by=by, why=why)), self.get)

    async def acancel(self, job_id: str, *, by: str | None = None, why: str | None = None) -> State:
        """Cancel a job, from a coroutine."""
        answer = await self.database.arun(ops.cancel([job_id], by=by, why=why))
        job = None if answer else await self.aget(job_id)
        return self._cancelled(job_id, answer, lambda _: job)

    def _cancelled(self, job_id: str, answer: dict[str, State], get: Callable[[str], JobRecord | None]) -> State:
        """Return the state of a job after a request to cancel it. A job that had ended is not changed."""
        for state in answer.values():
            return state
        job = get(job_id)
        if job is None:
            raise JobNotFound(f"no job has the id {job_id}", job_id)
        return job.state

    def retry(self, job_id: str, *, by: str | None = None, why: str | None = None) -> str:
        """Run a job now and return its id: a scheduled or waiting job becomes due, an ended one is replayed.

        A replay has a new id. Raises for a job that is running or has succeeded.
        """
        if self.database.run(ops.retry([job_id], by=by, why=why)) or _is_ready(self.get(job_id), job_id):
            return job_id
        return self.dead.replay(job_id, by=by, why=why)

    async def aretry(self, job_id: str, *, by: str | None = None, why: str | None = None) -> str:
        """Run a job now, from a coroutine."""
        if await self.database.arun(ops.retry([job_id], by=by, why=why)) or _is_ready(await self.aget(job_id), job_id):
            return job_id
        return await self.dead.areplay(job_id, by=by, why=why)

    def why(self, job_id: str) -> Why:
        """Explain why a job is not running."""
        return _found(self.database.run(ops.why(job_id)), job_id)

    async def awhy(self, job_id: str) -> Why:
        """Explain why a job is not running, from a coroutine."""
        return _found(await self.database.arun(ops.why(job_id)), job_id)

    @property
    def dead(self) -> Dead:
        """The dead letters: list, replay and resolve them."""
        return Dead(self.tasks)

    def pause(
        self,
        *,
        queue: str | None = None,
        task: str | None = None,
        by: str | None = None,
        why: str = "",
        duration: Duration | None = None,
    ) -> None:
        """Stop claims of a queue or a task, for a `duration` or until it is resumed."""
        self.database.run(queues.pause(queue, task, by, why, duration))

    async def apause(
        self,
        *,
        queue: str | None = None,
        task: str | None = None,
        by: str | None = None,
        why: str = "",
        duration: Duration | None = None,
    ) -> None:
        """Stop claims of a queue or a task, from a coroutine."""
        await self.database.arun(queues.pause(queue, task, by, why, duration))

    def resume(
        self, *, queue: str | None = None, task: str | None = None, by: str | None = None, why: str = ""
    ) -> bool:
        """Resume a paused queue or task. False: it was not paused."""
        return self.database.run(queues.resume(queue, task, by, why))

    async def aresume(
        self, *, queue: str | None = None, task: str | None = None, by: str | None = None, why: str = ""
    ) -> bool:
        """Resume a paused queue or task, from a coroutine."""
        return await self.database.arun(queues.resume(queue, task, by, why))

    def paused(self) -> Pauses:
        """List the paused queues and tasks, with the reasons."""
        return self.database.run(ops.paused())

    async def apaused(self) -> Pauses:
        """List the pauses, from a coroutine."""
        return await self.database.arun(ops.paused())

    def limit(self, *, queue: str | None = None, task: str | None = None, **options: Unpack[LimitOptions]) -> None:
        """Set the limits of a queue or a task.

        A queue has `depth`, `ageing` and `retry_share`. A task has `cap` and `rate`, which override its code until
        `reset=True`. A limit that is left out does not change, "off" removes it. `by` and `why` are recorded.
        """
        self.database.run(self._limit(queue, task, options))

    async def alimit(
        self, *, queue: str | None = None, task: str | None = None, **options: Unpack[LimitOptions]
    ) -> None:
        """Set the limits of a queue or a task, from a coroutine."""
        await self.database.arun(self._limit(queue, task, options))

    def _limit(self, queue: str | None, task: str | None, options: LimitOptions) -> Op[None]:
        known = self.tasks.get(task) if task is not None else None
        if known is not None and not known.definition.is_laned:
            raise ConfigError(
                f"task {task!r} has neither cap= nor rate= in its code, so its jobs are not counted. "
                "Give it a cap in code that is never reached, then change that"
            )
        return queues.limit(queue, task, options)

    def limits(self) -> Limits:
        """List the limits of queues, who set them and why."""
        return self.database.run(queue_limits())

    def task_limits(self) -> LimitsOfTasks:
        """List the limits of tasks: those in their code, and those set at run time, by whom and why."""
        return self.database.run(lanes.limits())

    async def atask_limits(self) -> LimitsOfTasks:
        """List the limits of tasks, from a coroutine."""
        return await self.database.arun(lanes.limits())

    async def alimits(self) -> Limits:
        """List the limits of queues, from a coroutine."""
        return await self.database.arun(queue_limits())

    def queues(self) -> Queues:
        """Count the jobs of each queue. Counts stop above 10,000."""
        return self.database.run(ops.queues())

    async def aqueues(self) -> Queues:
        """Count the jobs of each queue, from a coroutine."""
        return await self.database.arun(ops.queues())

    def workers(self) -> Workers:
        """List the workers that have registered, with whether they are alive."""
        return self.database.run(ops.workers())

    async def aworkers(self) -> Workers:
        """List the workers, from a coroutine."""
        return await self.database.arun(ops.workers())


# A fork waits until no thread holds it.
_one_at = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_one_at.acquire, after_in_parent=_one_at.release, after_in_child=_one_at.release)


def _listing(filters: JobFilters) -> Op[list[JobRecord]]:
    read: dict[str, Any] = checked(filters, JobFilters)
    if (state := read.get("state")) is not None:
        try:
            read["state"] = State(state)
        except ValueError:
            raise ConfigError(f"state={brief(state)} is no state: give one of {', '.join(State)}") from None
    return ops.listing(**read)


def _is_ready(job: JobRecord | None, job_id: str) -> bool:
    """Return whether a job that could not be made due is ready. False: it has ended, and can be replayed."""
    if job is None:
        raise JobNotFound(f"no job has the id {job_id}", job_id)
    match job.state:
        case State.READY:
            return True
        case State.DEAD | State.PARTIAL | State.CANCELLED:
            return False
        case State.SUCCEEDED:
            raise NotReplayable(
                f"job {job_id} has succeeded. To run it again, call app.dead.replay(id, force=True), which is recorded",
                job_id,
            )
        case State.RUNNING:
            raise TransitionRefused(f"job {job_id} runs: wait until it has ended, or cancel it first", job_id)
        case State.SCHEDULED | State.WAITING:
            raise TransitionRefused(f"job {job_id} was scheduled again concurrently: try again", job_id)


def _found(why: Why | None, job_id: str) -> Why:
    if why is None:
        raise JobNotFound(f"no job has the id {job_id}", job_id)
    return why
