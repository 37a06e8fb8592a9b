"""Jobs that have run when their enqueue returns.

Each enqueue runs a worker of its own until nothing is due. Where several enqueue at once, one's worker may take
another's job: so each also waits until the jobs that it made are out of every such worker's hands. Nobody waits in a
circle, because a handler only ever waits for jobs that were claimed after its own.
"""

from __future__ import annotations

import asyncio
import threading
from asyncio import AbstractEventLoop
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any

from duly.app.lease import Lease, current
from duly.app.tasks import Chunk
from duly.errors import ConfigError
from duly.model import NewJob, State
from duly.testing.drain_worker import Drainer, Noted, work
from duly.worker.claiming import Claiming

if TYPE_CHECKING:
    from duly.app.app import App, Job
    from duly.app.tasks import Task

DEEPEST = 50
MANY = 10_000
CLAIMED = 1000  # at once
LOOK_SECONDS = 0.005


@contextmanager
def inline(app: App) -> Iterator[App]:
    """Have every enqueue run its job, and what that enqueues, before it returns.

    What a handler raises on its first attempt is raised to whoever enqueued. Not run are a delayed job, one that is
    enqueued on your own connection (`conn=`), as it is not committed, and one in a queue that is no task's of the app,
    as no worker of it looks there: `drain` runs them when they are due, the last if you name the queue.
    """
    if "_enqueue" in app.__dict__:
        raise ConfigError("inline(app) holds already, and jobs are run once: take the inner one away")
    session = _Inline(app)
    ours = {
        "_enqueue": session.enqueue,
        "_aenqueue": session.aenqueue,
        "_enqueue_one": session.enqueue_one,
        "_aenqueue_one": session.aenqueue_one,
    }
    app.__dict__.update(ours)
    try:
        yield app
    finally:
        for name in ours:
            del app.__dict__[name]


# The event loops that stand still because a sync enqueue was called on them, and we are inside of it.
_blocked: ContextVar[tuple[AbstractEventLoop, ...]] = ContextVar("duly_inline_blocked", default=())


class _Inline:
    """Enqueues, runs, and hands back what handlers raised."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._add: Callable[..., list[Job[Any]]] = app._enqueue
        self._aadd: Callable[..., Awaitable[list[Job[Any]]]] = app._aenqueue
        self._raised: dict[str, BaseException] = {}
        self._depths: dict[str | None, int] = {}
        self._at_work: dict[Drainer, AbstractEventLoop] = {}

    def enqueue(self, task: Task[..., Any, Any], chunks: Any) -> list[Job[Any]]:
        self._refuse_too_deep(task)
        jobs = self._add(task, chunks)
        if task._using.conn is None:
            own = _own(jobs)
            _run(lambda: self._work(own))
            self._raise(own)
        return jobs

    async def aenqueue(self, task: Task[..., Any, Any], chunks: Any) -> list[Job[Any]]:
        self._refuse_too_deep(task)
        jobs = await self._aadd(task, chunks)
        if task._using.conn is None:
            own = _own(jobs)
            await self._work(own)
            self._raise(own)
        return jobs

    def enqueue_one(self, task: Task[..., Any, Any], job: NewJob) -> Job[Any]:
        return self.enqueue(task, [Chunk([job])])[0]

    async def aenqueue_one(self, task: Task[..., Any, Any], job: NewJob) -> Job[Any]:
        return (await self.aenqueue(task, [Chunk([job])]))[0]

    def _refuse_too_deep(self, task: Task[..., Any, Any]) -> None:
        """Count how many jobs led to this enqueue, one to the other; who enqueues himself would never end."""
        lease = current.get()
        if lease is None:
            return
        depth = self._depths.get(lease.job.envelope.causation_id, 0) + 1
        self._depths[lease.job.id] = depth
        if depth >= DEEPEST:
            raise ConfigError(
                f"inline: {DEEPEST} jobs run inside one another, the last of {task.name}: "
                "jobs that lead to more of themselves are run one after the other by testing.drain(app)"
            )

    async def _work(self, own: Sequence[str]) -> None:
        """Run what is due until our own jobs have been run, here or by others; those may also give one back."""
        waited = True
        while waited:
            await self._drain()
            waited = await self._wait(own)

    async def _drain(self) -> None:
        drainer = _AtOnce(self._app, None, self._note)
        self._at_work[drainer] = asyncio.get_running_loop()
        try:
            await work(drainer)
        finally:
            del self._at_work[drainer]

    async def _wait(self, own: Sequence[str]) -> bool:
        """Wait until others run none of our own jobs. False: they did not."""
        waited = False
        while loops := await self._elsewhere(own):
            if loops.intersection(_blocked.get()):
                raise ConfigError(
                    "inline: a sync enqueue makes this event loop stand still, on which another enqueue has begun "
                    "to run the job: await aenqueue instead"
                )
            await asyncio.sleep(LOOK_SECONDS)
            waited = True
        return waited

    async def _elsewhere(self, own: Sequence[str]) -> set[AbstractEventLoop]:
        """Give the event loops of those who run some of our own jobs."""
        if not self._at_work:
            return set()
        running = await self._app.alist(state=State.RUNNING, limit=MANY)
        loops = {drainer.id: loop for drainer, loop in list(self._at_work.items())}
        return {loops[job.worker] for job in running if job.worker in loops and job.id in own}

    def _note(self, lease: Lease, error: BaseException) -> None:
        if lease.job.attempt == 1:
            self._raised.setdefault(lease.job.id, error)

    def _raise(self, own: Sequence[str]) -> None:
        raised = [self._raised.pop(job_id) for job_id in own if job_id in self._raised]
        if raised:
            raise raised[0]


def _own(jobs: Sequence[Job[Any]]) -> list[str]:
    """Give the ids of the jobs that were not there before: those are somebody else's, perhaps of who enqueues."""
    return [job.id for job in jobs if not job.deduplicated]


def _run(make: Callable[[], Any]) -> None:
    """Run a coroutine to its end; where an event loop runs already, on another one in a thread of its own."""
    loop = asyncio._get_running_loop()
    if loop is None:
        asyncio.run(make())
        return
    failed: list[BaseException] = []

    def run() -> None:
        _blocked.set((*_blocked.get(), loop))
        try:
            asyncio.run(make())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=copy_context().run, args=(run,), name="duly-inline")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


class _AtOnce(Drainer):
    """Claims all that is due before it runs the first, and nothing before it has run the last.

    Else what a handler enqueues would come after the others of its queue, and they would all run inside of it.
    """

    def __init__(self, app: App, queues: Iterable[str] | None, noted: Noted) -> None:
        super().__init__(app, queues, noted)
        self._claiming = _AllThatIsDue(self, slots=self._slots, pace=self._pace)

    def give_back(self, lease: Lease) -> None:
        if self.stopping:
            super().give_back(lease)
        else:  # its last attempt, with others before it: it waits for them here too
            self._slots.put(lease)


class _AllThatIsDue(Claiming):
    """Claims for one slot what will wait for it, however long."""

    def _further(self, queue: str, ahead: int) -> int:
        return 0

    async def _take_from(self, queue: str, room: int, ahead: int, quick: frozenset[str]) -> int:
        return await self._take(queue, CLAIMED if room > 0 else 0, self._tasks)

    def give_back_late(self) -> None:
        if self._worker.stopping:
            super().give_back_late()
