"""The app: where tasks are defined and jobs are enqueued, looked at, cancelled, replayed.

Making one does no I/O: the database is opened by the first operation. Sync calls are plain, async ones have the prefix
`a`; both are two lines over the same operation.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from datetime import datetime
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeAlias, TypedDict, TypeVar, Unpack, cast

from duly import store
from duly.app import tasks
from duly.app.batches import Batch, Batches, batch_of
from duly.app.dead import Dead
from duly.app.decorator import TaskDecorator
from duly.app.definition import Definition
from duly.app.events import Events
from duly.app.filters import checked
from duly.app.gil import threads_switched_often
from duly.app.lease import current, in_flight, parent
from duly.app.queue_depth import Depths
from duly.app.schedules import Every, Options, Schedules, When
from duly.app.tasks import Chunk, Task
from duly.app.waits import pauses
from duly.errors import (
    AnswerLost,
    BadArguments,
    ConfigError,
    JobCancelled,
    JobDead,
    JobError,
    JobNotFound,
    KeyConflict,
    NotReplayable,
    ResultExpired,
    TransitionRefused,
)
from duly.model import Enqueued, JobRecord, Limit, NewJob, Pause, QueueFigure, State, TaskLimits, Terms, WorkerRecord
from duly.rules import checks, codec, keys, settings
from duly.rules.durations import Duration, to_ms
from duly.rules.rate import Rate, rate_of
from duly.rules.why import Why
from duly.store import caller, lanes, ops, sequence
from duly.store.driver import Driver
from duly.store.op import Op
from duly.store.queues import OFF, limit_queue
from duly.store.queues import limits as queue_limits

T = TypeVar("T")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

# In the class below `list` is a method.
Jobs: TypeAlias = list[JobRecord]
Pauses: TypeAlias = list[Pause]
Limits: TypeAlias = list[Limit]
LimitsOfTasks: TypeAlias = list[TaskLimits]
Queues: TypeAlias = list[QueueFigure]
Workers: TypeAlias = list[WorkerRecord]
Answers: TypeAlias = list[Enqueued]
Handles: TypeAlias = "list[Job[R]]"

MOST_DEPTH = 1_000_000_000


class LimitOptions(TypedDict, total=False):
    """What a queue (the first three) or a task (the next three) is told, by whom and why."""

    depth: int | str | None
    ageing: Duration | None
    retry_share: float | str | None
    cap: int | str | None
    rate: str | None
    reset: bool
    by: str | None
    why: str


OF_QUEUES, OF_TASKS = ("depth", "ageing", "retry_share"), ("cap", "rate", "reset")


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


class _Enqueue(NamedTuple):
    """What all jobs have in common that were enqueued by one call."""

    app: App
    task: Task[..., Any, Any]
    keep_ms: int
    staged: bool


class Job(Generic[R_co]):
    """A job that was enqueued, or found to be there already."""

    __slots__ = ("_behind", "_by", "_enqueued")

    def __init__(self, by: _Enqueue, enqueued: Enqueued) -> None:
        self._by = by
        self._enqueued = enqueued
        self._behind = enqueued.behind

    @property
    def id(self) -> str:
        """The id by which the job is found."""
        return self._enqueued.id

    @property
    def deduplicated(self) -> bool:
        """Whether a job with the same key was there before, which this is then."""
        return self._enqueued.deduplicated

    def __repr__(self) -> str:
        return f"<job {self.id} of {self._by.task.name}>"

    def result(self, timeout: float | None = None) -> R_co:
        """Wait until the job has ended and give its result; `timeout` in seconds, else as long as it takes.

        Raises JobDead, JobCancelled or ResultExpired by the way it ended, TimeoutError when it has not.
        """
        self._refuse_waiting()
        for pause in pauses(timeout):
            found, result = self._judge(self._by.app.get(self.id))
            if found:
                return cast("R_co", result)
            time.sleep(pause)
        raise TimeoutError(self._late(timeout))

    async def aresult(self, timeout: float | None = None) -> R_co:  # noqa: ASYNC109 (as in `result`)
        """Wait until the job has ended and give its result, from a coroutine."""
        self._refuse_waiting()
        for pause in pauses(timeout):
            found, result = self._judge(await self._by.app.aget(self.id))
            if found:
                return cast("R_co", result)
            await asyncio.sleep(pause)
        raise TimeoutError(self._late(timeout))

    def _refuse_waiting(self) -> None:
        if current.get() is not None:
            raise ConfigError(f"{self!r}: a handler that waits for another job holds a slot that job may need")
        if self._by.keep_ms == 0 and not self._enqueued.succeeded:
            raise ConfigError(f"{self!r}: its task has keep=0, so success leaves no result to wait for")

    def _judge(self, job: JobRecord | None) -> tuple[bool, Any]:
        """Say whether the job has ended, and with what result."""
        if job is None and self._behind:
            return False, None  # it is added when another has ended
        self._behind = False
        if job is None:
            return True, self._remembered()
        match job.state:
            case State.SUCCEEDED | State.PARTIAL:
                if job.result is None and job.result_until is not None:
                    return True, self._remembered()
                return True, self._read(job.result)
            case State.DEAD:
                raise JobDead(f"{self!r} is dead: {job.reason}; {job.error}", self.id)
            case State.CANCELLED:
                raise JobCancelled(f"{self!r} was cancelled: {job.reason}", self.id)
        return False, None

    def _remembered(self) -> Any:
        """Give the result that the key has kept, where the job's own row has none any more."""
        known = self._enqueued
        if known.succeeded and not known.result_dropped:
            return None if known.result is None else codec.decode(known.result, self._by.task.definition.result_type)
        if self._by.staged and not known.succeeded:
            raise JobNotFound(
                f"{self!r} is not there yet: it was enqueued on your own connection; commit first", self.id
            )
        raise ResultExpired(f"{self!r} has no result any more: it is kept for result_ttl, and not with keep=0", self.id)

    def _read(self, result: Any) -> Any:
        if result is None:
            return None
        try:
            return codec.reread(result, self._by.task.definition.result_type)
        except BadArguments as error:
            raise JobError(f"the result of {self!r} is not what its task returns: {error}", self.id) from error

    def _late(self, timeout: float | None) -> str:
        return f"{self!r} has not ended within {timeout:g} s" if timeout is not None else ""


class App:
    """An app: its tasks and the database that its jobs are kept in."""

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
        grace: Duration | None = None,
    ) -> None:
        """Take the settings of the app; what is not given comes from `$DULY_…`, `duly.toml`, or is the default."""
        self._given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self._folder = Path.cwd()
        settings.load(self._given, {})  # refuses what cannot work where it was written
        self.tasks: dict[str, Task[..., Any, Any]] = {}
        self.schedules = Schedules(self)
        self.events = Events()
        self._new_id = keys.Ids()
        self._depths = Depths()
        self._made_in = str(sys._getframe(1).f_globals.get("__name__"))
        self._spec: str | None = None

    # Definition

    @property
    def task(self) -> TaskDecorator:
        """Make a task of a function: `@app.task`, or `@app.task(queue="mail", max_attempts=3)`."""
        return TaskDecorator(self._define)

    def every(self, when: When | None = None, *, name: str | None = None, **options: Unpack[Options]) -> Every:
        """Have a function or a task run by a schedule: `@app.every("0 9 * * mon-fri", tz="Europe/Vienna")`.

        `when` is a cron text, or an interval that counts from the last due time (`mode="delay"`: from the end of the
        last run); `rrule=` takes its place. `name` names the schedule and, given a plain function, its task.
        """
        return Every(self, when, name, options)

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
        """Make many jobs one piece of work: what is enqueued inside `with app.batch("import"):` belongs to it.

        It is complete when the `with` is left and everything has ended. The callbacks are tasks without required
        arguments, whose `ctx.batch` names it: `on_complete` however it went, `on_success` if at least `ok_at` of its
        jobs succeeded, `on_first_dead` at the first death. With a `key` that is run again after a crash, the same jobs
        in the same order are added once.
        """
        return Batch.new(
            self,
            name,
            key=key,
            callbacks={"on_complete": on_complete, "on_success": on_success, "on_first_dead": on_first_dead},
            ok_at=ok_at,
            conn=conn,
        )

    @property
    def batches(self) -> Batches:
        """The batches that there are."""
        return Batches(self)

    def _define(self, handler: Callable[..., Any], options: Mapping[str, Any]) -> Task[..., Any, Any]:
        """Make a task of a function and remember it under its name and its aliases."""
        for name in options:
            if name not in tasks.OPTIONS:
                close = get_close_matches(name, tasks.OPTIONS, 1)
                meant = f": did you mean {close[0]}=?" if close else f": the options are {', '.join(tasks.OPTIONS)}"
                raise ConfigError(f"a task has no option {name}={meant}")
        definition = tasks.define(handler, **options)
        for name in (definition.name, *definition.aliases):
            if name in self.tasks:
                other = self.tasks[name].definition.handler
                raise ConfigError(
                    f"a task named {name!r} is there already ({other.__module__}.{other.__qualname__}): "
                    "give one of them another name="
                )
        task: Task[..., Any, Any] = Task(self, definition)
        for name in (definition.name, *definition.aliases):
            self.tasks[name] = task
        return task

    def _dead_letter(self, definition: Definition) -> str | None:
        """Write the job that is added when one of this task dies."""
        on_dead = definition.on_dead
        if on_dead is None:
            return None
        task = self.tasks.get(on_dead) if isinstance(on_dead, str) else on_dead
        if task is None:
            raise ConfigError(f"{definition.name}: on_dead={on_dead!r} names no task of this app")
        try:
            task.definition.codec.decode_call('{"job_id": ""}')
        except BadArguments as error:
            raise ConfigError(
                f"{definition.name}: on_dead= is called with job_id, which does not fit: {error}"
            ) from error
        return tasks.callback(task, f"{definition.name}: on_dead=")

    @property
    def spec(self) -> str | None:
        """The name by which another process imports this app, `module:app`; None where none can."""
        if self._spec is None and self._made_in != "__main__":
            names = vars(sys.modules[self._made_in]) if self._made_in in sys.modules else {}
            self._spec = next((f"{self._made_in}:{name}" for name, value in names.items() if value is self), None)
        return self._spec

    @spec.setter
    def spec(self, spec: str) -> None:
        self._spec = spec

    # The database

    @cached_property
    def settings(self) -> settings.Settings:
        """The settings, read when they are first needed."""
        return settings.read(self._given, os.environ, self._folder)

    @cached_property
    def driver(self) -> Driver:
        """What runs operations. Nothing is opened before the first."""
        # Threads that come first at the same time get one and the same.
        made: Driver = self.__dict__.setdefault("driver", store.open_driver(self.settings))
        return made

    def migrate(self) -> None:
        """Create or update the tables. SQLite does it by itself with the first operation, PostgreSQL does not."""
        url = self.settings.url
        if url.store == "postgresql":
            from duly.store.postgres.schema import bring_up_to_date

            bring_up_to_date(url.dsn, schema=self.settings.schema)
        self.driver.run(ops.clock())

    def close(self) -> None:
        """Let go of the database; the next operation opens it again."""
        if "driver" in self.__dict__:
            self.driver.close()

    # Enqueue

    def _enqueue_one(self, task: Task[..., Any, R], job: NewJob) -> Job[R]:
        if batch_of(task) is not None:
            return self._enqueue(task, [Chunk([job])])[0]
        terms, conn = task._terms(), task._using.conn
        op = ops.enqueue(terms, [job], parent=parent(), checked=True)
        self._admit(terms.queue, 1, conn, before=0)
        return self._enqueued(task, terms, _held(self._add(op, conn)))[0]

    def _enqueue(self, task: Task[..., Any, R], chunks: Iterable[Chunk]) -> Handles[R]:
        terms, conn = task._terms(), task._using.conn
        if (batch := batch_of(task)) is not None:
            return self._enqueued(task, terms, batch._add(task, (chunk.jobs for chunk in chunks)))
        answers: list[Enqueued] = []
        with ExitStack() as stack:
            beside: ThreadPoolExecutor | None = None
            sent: Future[Answers] | None = None
            for jobs, is_followed in chunks:
                op = ops.enqueue(terms, jobs, parent=parent(), checked=True)
                if sent is not None:
                    answers += _held(sent.result())
                sent = None
                self._admit(terms.queue, len(jobs), conn, before=len(answers))
                if conn is None and is_followed:  # by what is made while this is on its way
                    if beside is None:
                        beside = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="duly-enqueue"))
                        stack.enter_context(threads_switched_often())
                    sent = beside.submit(self.driver.run, op)
                else:
                    answers += _held(self._add(op, conn))
            if sent is not None:
                answers += _held(sent.result())
        return self._enqueued(task, terms, answers)

    def _admit(self, queue: str, count: int, conn: Any, *, before: int) -> None:
        """Refuse jobs that their queue has no room for. Where that cannot be told, they are let in."""
        if self._depths.lets_all_in(queue):
            return
        with suppress(AnswerLost):
            sequence.run(self._depths.admit(queue, count, before=before), lambda op: self._add(op, conn))

    def _add(self, op: Op[T], conn: Any) -> T:
        return self.driver.run(op) if conn is None else caller.run(conn, op, schema=self.settings.schema)

    async def _aenqueue_one(self, task: Task[..., Any, R], job: NewJob) -> Job[R]:
        if batch_of(task) is not None:
            return (await self._aenqueue(task, [Chunk([job])]))[0]
        terms, conn = task._terms(), task._using.conn
        lease = current.get()
        with nullcontext() if lease is None else in_flight(lease):
            op = ops.enqueue(terms, [job], parent=parent(), checked=True)
            await self._aadmit(terms.queue, 1, conn, before=0)
            answers = _held(await self._aadd(op, conn))
        return self._enqueued(task, terms, answers)[0]

    async def _aenqueue(self, task: Task[..., Any, R], chunks: Iterable[Chunk]) -> Handles[R]:
        terms, conn = task._terms(), task._using.conn
        if (batch := batch_of(task)) is not None:
            return self._enqueued(task, terms, await batch._aadd(task, (chunk.jobs for chunk in chunks)))
        answers: list[Enqueued] = []
        lease = current.get()
        with nullcontext() if lease is None else in_flight(lease):
            async with _Beside() as beside:
                for jobs, is_followed in chunks:
                    op = ops.enqueue(terms, jobs, parent=parent(), checked=True)
                    answers += await beside.landed()
                    await self._aadmit(terms.queue, len(jobs), conn, before=len(answers))
                    # What follows is made while this is on its way. A handler has nothing beside itself.
                    if conn is None and lease is None and is_followed:
                        await beside.send(self.driver.arun(op))
                    else:
                        answers += _held(await self._aadd(op, conn))
                answers += await beside.landed()
        return self._enqueued(task, terms, answers)

    async def _aadmit(self, queue: str, count: int, conn: Any, *, before: int) -> None:
        if self._depths.lets_all_in(queue):
            return
        with suppress(AnswerLost):
            await sequence.arun(self._depths.admit(queue, count, before=before), lambda op: self._aadd(op, conn))

    async def _aadd(self, op: Op[T], conn: Any) -> T:
        if conn is None:
            return await self.driver.arun(op)
        return await caller.arun(conn, op, schema=self.settings.schema)

    def _enqueued(self, task: Task[..., Any, R], terms: Terms, answers: Sequence[Enqueued]) -> Handles[R]:
        batch = batch_of(task)
        if task._using.conn is not None:
            self.driver.mind_wal()
            self.driver.woke()
        conflicts = [answer for answer in answers if answer.conflict]
        if conflicts:
            others = f"; the other {len(answers) - len(conflicts)} were enqueued" if len(answers) > 1 else ""
            raise KeyConflict(
                f"{task.name}: the key is taken by job {conflicts[0].id}, whose arguments are others{others}. "
                "One key stands for one piece of work",
                conflicts[0].id,
            )
        staged = task._using.conn is not None or (batch is not None and batch.conn is not None)
        by = _Enqueue(self, task, terms.keep_ms, staged)
        return [Job(by, answer) for answer in answers]

    # Looking and changing

    def get(self, job_id: str) -> JobRecord | None:
        """Read one job; None when no job has this id."""
        return self.driver.run(ops.get(job_id))

    async def aget(self, job_id: str) -> JobRecord | None:
        """Read one job, from a coroutine."""
        return await self.driver.arun(ops.get(job_id))

    def list(self, **filters: Unpack[JobFilters]) -> Jobs:
        """List jobs, newest first; for the next page give the last id of this one as `before`."""
        return self.driver.run(_listing(filters))

    async def alist(self, **filters: Unpack[JobFilters]) -> Jobs:
        """List jobs, from a coroutine."""
        return await self.driver.arun(_listing(filters))

    def cancel(self, job_id: str, *, by: str | None = None, why: str | None = None) -> State:
        """End a job that does not run, or ask a running one to stop; answers its state then."""
        return self._cancelled(job_id, self.driver.run(ops.cancel([job_id], by=by, why=why)), self.get)

    async def acancel(self, job_id: str, *, by: str | None = None, why: str | None = None) -> State:
        """End or ask a job, from a coroutine."""
        answer = await self.driver.arun(ops.cancel([job_id], by=by, why=why))
        job = None if answer else await self.aget(job_id)
        return self._cancelled(job_id, answer, lambda _: job)

    def _cancelled(self, job_id: str, answer: dict[str, State], get: Callable[[str], JobRecord | None]) -> State:
        """Give the state of a job that somebody wanted cancelled; what had ended before stays as it ended."""
        for state in answer.values():
            return state
        job = get(job_id)
        if job is None:
            raise JobNotFound(f"no job has the id {job_id}", job_id)
        return job.state

    def retry(self, job_id: str, *, by: str | None = None, why: str | None = None) -> str:
        """Run a job now, and return the id to look for: one that was put off or waits is made due, a dead one replayed.

        What is partial or cancelled is replayed too. A job that runs is refused, and so is one that has succeeded.
        """
        if self.driver.run(ops.retry([job_id], by=by, why=why)) or _runs_by_itself(self.get(job_id), job_id):
            return job_id
        return self.dead.replay(job_id, by=by, why=why)

    async def aretry(self, job_id: str, *, by: str | None = None, why: str | None = None) -> str:
        """Run a job now, from a coroutine."""
        if await self.driver.arun(ops.retry([job_id], by=by, why=why)) or _runs_by_itself(
            await self.aget(job_id), job_id
        ):
            return job_id
        return await self.dead.areplay(job_id, by=by, why=why)

    def why(self, job_id: str) -> Why:
        """Say why a job is not running."""
        return _found(self.driver.run(ops.why(job_id)), job_id)

    async def awhy(self, job_id: str) -> Why:
        """Say why a job is not running, from a coroutine."""
        return _found(await self.driver.arun(ops.why(job_id)), job_id)

    @property
    def dead(self) -> Dead:
        """The dead letters: look at them, run them again, settle them."""
        return Dead(self)

    def pause(
        self,
        *,
        queue: str | None = None,
        task: str | None = None,
        by: str | None = None,
        why: str = "",
        duration: Duration | None = None,
    ) -> None:
        """Stop claims of a queue or a task, for a time or until it is resumed."""
        self.driver.run(_pause(queue, task, by, why, duration))

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
        await self.driver.arun(_pause(queue, task, by, why, duration))

    def resume(
        self, *, queue: str | None = None, task: str | None = None, by: str | None = None, why: str = ""
    ) -> bool:
        """Let a paused queue or task go on. False: it was not paused."""
        return self.driver.run(ops.resume(*_paused(queue, task), by=by or user(), why=why))

    async def aresume(
        self, *, queue: str | None = None, task: str | None = None, by: str | None = None, why: str = ""
    ) -> bool:
        """Let a paused queue or task go on, from a coroutine."""
        return await self.driver.arun(ops.resume(*_paused(queue, task), by=by or user(), why=why))

    def paused(self) -> Pauses:
        """List what is paused, by whom and why."""
        return self.driver.run(ops.paused())

    async def apaused(self) -> Pauses:
        """List what is paused, from a coroutine."""
        return await self.driver.arun(ops.paused())

    def limit(self, *, queue: str | None = None, task: str | None = None, **options: Unpack[LimitOptions]) -> None:
        """Tell a queue how many jobs it takes, how its priorities age, what share retries have; or a task its limits.

        Of a queue: `depth`, `ageing`, `retry_share`. Of a task: `cap` and `rate`, which go before what its code says,
        until `reset=True`. What is left out stays as it is, "off" takes a limit away; `by` and `why` are recorded.
        """
        self.driver.run(self._limit(queue, task, options))

    async def alimit(
        self, *, queue: str | None = None, task: str | None = None, **options: Unpack[LimitOptions]
    ) -> None:
        """Tell a queue or a task its limits, from a coroutine."""
        await self.driver.arun(self._limit(queue, task, options))

    def _limit(self, queue: str | None, task: str | None, options: LimitOptions) -> Op[None]:
        known = self.tasks.get(task) if task is not None else None
        if known is not None and not known.definition.is_laned:
            raise ConfigError(
                f"task {task!r} has neither cap= nor rate= in its code, so its jobs have no lane to be counted in: "
                "give it a cap that never bites, and change that"
            )
        return _limit(queue, task, options)

    def limits(self) -> Limits:
        """List the limits of queues, by whom they were set and why."""
        return self.driver.run(queue_limits())

    def task_limits(self) -> LimitsOfTasks:
        """List the limits of tasks: what their code says, and what was set at run time, by whom and why."""
        return self.driver.run(lanes.limits())

    async def atask_limits(self) -> LimitsOfTasks:
        """List the limits of tasks, from a coroutine."""
        return await self.driver.arun(lanes.limits())

    async def alimits(self) -> Limits:
        """List the limits of queues, from a coroutine."""
        return await self.driver.arun(queue_limits())

    def queues(self) -> Queues:
        """Say how full each queue is; counting stops above 10,000."""
        return self.driver.run(ops.queues())

    async def aqueues(self) -> Queues:
        """Say how full each queue is, from a coroutine."""
        return await self.driver.arun(ops.queues())

    def workers(self) -> Workers:
        """List the workers that have been heard of, and who of them is alive."""
        return self.driver.run(ops.workers())

    async def aworkers(self) -> Workers:
        """List the workers, from a coroutine."""
        return await self.driver.arun(ops.workers())


def _listing(filters: JobFilters) -> Op[list[JobRecord]]:
    said: dict[str, Any] = checked(filters, JobFilters)
    if (state := said.get("state")) is not None:
        try:
            said["state"] = State(state)
        except ValueError:
            raise ConfigError(f"state={state!r} is none: {', '.join(State)}") from None
    return ops.listing(**said)


def _runs_by_itself(job: JobRecord | None, job_id: str) -> bool:
    """Say of a job that could not be made due whether it is ready anyway. False: it has ended, and can be replayed."""
    if job is None:
        raise JobNotFound(f"no job has the id {job_id}", job_id)
    match job.state:
        case State.READY:
            return True
        case State.DEAD | State.PARTIAL | State.CANCELLED:
            return False
        case State.SUCCEEDED:
            raise NotReplayable(
                f"job {job_id} has succeeded; app.dead.replay(id, force=True) runs it again, and is recorded", job_id
            )
        case State.RUNNING:
            raise TransitionRefused(f"job {job_id} runs: wait until it has ended, or cancel it first", job_id)
        case State.SCHEDULED | State.WAITING:
            raise TransitionRefused(f"job {job_id} was put off at this very moment: ask again", job_id)


def _found(why: Why | None, job_id: str) -> Why:
    if why is None:
        raise JobNotFound(f"no job has the id {job_id}", job_id)
    return why


def _pause(queue: str | None, task: str | None, by: str | None, why: str, duration: Duration | None) -> Op[None]:
    until_ms = None if duration is None else to_ms(duration, what="duration=")
    return ops.pause(*_paused(queue, task), by=by or user(), why=why, until_ms=until_ms)


def _paused(queue: str | None, task: str | None) -> tuple[str, str]:
    if (queue is None) == (task is None):
        raise ConfigError("give queue= or task=, and not both")
    return ("queue", queue) if queue is not None else ("task", str(task))


def _limit(queue: str | None, task: str | None, options: LimitOptions) -> Op[None]:
    kind, name = _paused(queue, task)
    mine, other = (OF_QUEUES, OF_TASKS) if kind == "queue" else (OF_TASKS, OF_QUEUES)
    said: dict[str, Any] = {option: value for option, value in options.items() if value is not None}
    if foreign := sorted(said.keys() & other):
        raise ConfigError(f"{kind} {name!r}: {foreign[0]}= is not for a {kind}, which has {'=, '.join(mine)}=")
    if unknown := sorted(said.keys() - {*mine, "by", "why"}):
        raise ConfigError(f"{kind} {name!r}: there is no limit {unknown[0]!r}: give {'=, '.join(mine)}=")
    if not any(said.get(option) for option in mine) and not (said.keys() & set(mine) - {"reset"}):
        raise ConfigError(f"{kind} {name!r}: say what to limit: {'=, '.join(mine)}=")
    by, why = said.get("by") or user(), said.get("why") or ""
    if kind == "task":
        return _limit_task(name, said, by, why)
    return limit_queue(
        name,
        max_depth=_depth(said.get("depth")),
        ageing_ms=_ageing_ms(said.get("ageing")),
        retry_share=_share(said.get("retry_share")),
        by=by,
        why=why,
    )


def _limit_task(name: str, said: Mapping[str, Any], by: str, why: str) -> Op[None]:
    cap, rate, reset = said.get("cap"), said.get("rate"), bool(said.get("reset"))
    if reset and (cap is not None or rate is not None):
        raise ConfigError(f"task {name!r}: reset= goes back to what its code says: leave cap= and rate= out")
    if cap is not None and cap != "off":
        checks.whole(cap, f"task {name!r}: cap=", least=1)
    count, per_ms = None, None
    if rate is not None:
        read = Rate(0, 0) if rate == "off" else rate_of(rate, f"task {name!r}: rate=")
        count, per_ms = read.count, read.per_ms
    return lanes.limit(
        name,
        cap=0 if cap == "off" else cap,
        rate_count=count,
        rate_ms=per_ms,
        reset=reset,
        by=by,
        why=why,
    )


def _depth(depth: Any) -> int | None:
    if depth is None or depth == "off":
        return None if depth is None else OFF
    if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= MOST_DEPTH:
        raise ConfigError(f"depth= is {depth!r}: give how many jobs may wait, from 1 to {MOST_DEPTH:,}, or 'off'")
    return depth


def _ageing_ms(ageing: Duration | None) -> int | None:
    if ageing is None:
        return None
    return (0 if ageing == "off" else to_ms(ageing, what="ageing=")) or OFF


def _share(share: Any) -> float | None:
    if share is None or share == "off":
        return None if share is None else OFF
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(f"retry_share= is {share!r}: give a share from 0 to 1, as in 0.2, or 'off'")
    return share


class _Beside:
    """What a coroutine has on its way while it goes on. It hears of that before it sends more, and before it ends."""

    def __init__(self) -> None:
        self._sent: asyncio.Task[Answers] | None = None
        self._meanwhile = ExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._sent is not None:
            if isinstance(error, asyncio.CancelledError):
                self._sent.cancel()
            with suppress(Exception):  # there is an error already
                await self.landed()

    async def send(self, write: Coroutine[Any, Any, Answers]) -> None:
        self._meanwhile.enter_context(threads_switched_often())
        self._sent = asyncio.create_task(write)
        await asyncio.sleep(0)  # it begins

    async def landed(self) -> Answers:
        """Give the answer to what was sent; nothing if nothing was."""
        sent, self._sent = self._sent, None
        with self._meanwhile:
            return [] if sent is None else await sent


def _held(answers: Answers) -> Answers:
    """Tell a handler that it lost its lease, where it did: then nothing was added."""
    lease = current.get()
    if lease is not None and not lease.over and not answers:
        lease.lose()
    return answers


def user() -> str:
    """Name whoever runs this, for the record."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container may have no name for its user, Windows has none of this
        return "unknown"
