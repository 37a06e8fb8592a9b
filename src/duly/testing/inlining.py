"""Inline jobs: an enqueue returns when its jobs have run.

Each enqueue runs a worker of its own until no job is due. The worker of a concurrent enqueue may claim
its job, so it also waits until no such worker runs one of its jobs. This cannot deadlock, because a
handler only waits for jobs that were claimed after its own.
"""

from __future__ import annotations

import asyncio
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any

from duly.app.enqueue import Answers, Chunk, Enqueuing, Request
from duly.app.lease import Lease, current
from duly.errors import ConfigError
from duly.model import Enqueued, NewJob, State
from duly.testing.drain_worker import Drainer, Observing, work
from duly.worker.claiming import Claiming

if TYPE_CHECKING:
    from duly.app.app import App

DEEPEST = 50
MANY = 10_000
CLAIMED = 1000  # at once
LOOK_SECONDS = 0.005


@contextmanager
def inline(app: App) -> Iterator[App]:
    """Make every enqueue run its job, and the jobs that it enqueues, before it returns.

    The enqueue raises the error of a handler's first attempt. Delayed jobs do not run inline, nor do jobs on your own
    connection (`conn=`), nor jobs in a queue of no task of the app. `drain` runs them when they are due and committed,
    and those of another queue if you name it.
    """
    before = app.tasks.enqueuing
    if isinstance(before, _Inline):
        raise ConfigError("inline(app) is active already, and a job runs once: remove the inner one")
    app.tasks.enqueuing = _Inline(app)
    try:
        yield app
    finally:
        app.tasks.enqueuing = before


# The event loops that a sync enqueue blocks, around the code that runs here.
_blocked: ContextVar[tuple[AbstractEventLoop, ...]] = ContextVar("duly_inline_blocked", default=())


class _Inline(Enqueuing):
    """Adds jobs, runs them, and raises what their handlers raised."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._raised: dict[str, BaseException] = {}
        self._depths: dict[str | None, int] = {}
        self._at_work: dict[Drainer, AbstractEventLoop] = {}

    def many(self, request: Request, chunks: Iterable[Chunk]) -> Answers:
        self._refuse_too_deep(request)
        answers = super().many(request, chunks)
        if request.conn is None:
            own = _own(answers)
            _run(lambda: self._work(own))
            self._raise(own)
        return answers

    async def amany(self, request: Request, chunks: Iterable[Chunk]) -> Answers:
        self._refuse_too_deep(request)
        answers = await super().amany(request, chunks)
        if request.conn is None:
            own = _own(answers)
            await self._work(own)
            self._raise(own)
        return answers

    def one(self, request: Request, job: NewJob) -> Enqueued:
        return self.many(request, [Chunk([job])])[0]

    async def aone(self, request: Request, job: NewJob) -> Enqueued:
        return (await self.amany(request, [Chunk([job])]))[0]

    def _refuse_too_deep(self, request: Request) -> None:
        """Count the jobs that led to this enqueue; raise for too many, as in a job that enqueues itself."""
        lease = current.get()
        if lease is None:
            return
        depth = self._depths.get(lease.job.envelope.causation_id, 0) + 1
        self._depths[lease.job.id] = depth
        if depth >= DEEPEST:
            raise ConfigError(
                f"inline: {DEEPEST} jobs run inside one another, the last of {request.definition.name}. "
                "Use testing.drain(app) for jobs that enqueue themselves"
            )

    async def _work(self, own: Sequence[str]) -> None:
        """Run due jobs until our own jobs have run, here or in another worker, which may also release one."""
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
        """Wait until no other worker runs one of our jobs. False: none did."""
        waited = False
        while loops := await self._elsewhere(own):
            if loops.intersection(_blocked.get()):
                raise ConfigError(
                    "inline: a sync enqueue blocks this event loop, on which another enqueue is running the job: "
                    "await aenqueue instead"
                )
            await asyncio.sleep(LOOK_SECONDS)
            waited = True
        return waited

    async def _elsewhere(self, own: Sequence[str]) -> set[AbstractEventLoop]:
        """Return the event loops of the workers that run our jobs."""
        if not self._at_work:
            return set()
        running = await self._app.alist(state=State.RUNNING, limit=MANY)
        loops = {drainer.shared.id: loop for drainer, loop in list(self._at_work.items())}
        return {loops[job.worker] for job in running if job.worker in loops and job.id in own}

    def _note(self, lease: Lease, error: BaseException) -> None:
        if lease.job.attempt == 1:
            self._raised.setdefault(lease.job.id, error)

    def _raise(self, own: Sequence[str]) -> None:
        raised = [self._raised.pop(job_id) for job_id in own if job_id in self._raised]
        if raised:
            raise raised[0]


def _own(answers: Answers) -> list[str]:
    """Return the ids of the jobs that were added. The others were there before, perhaps as the one that enqueues."""
    return [answer.id for answer in answers if not answer.deduplicated]


def _run(make: Callable[[], Any]) -> None:
    """Run a coroutine to its end, in a new thread if an event loop runs in this one."""
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
    """Claims all due jobs before it runs the first, and claims again after it has run the last.

    Else the jobs that a handler enqueues would come after the others of its queue, and all of them would run inside it.
    """

    def _make_claiming(self) -> Claiming:
        return self._claiming_of(_AllDue, self._noted)


class _AllDue(Observing):
    """Claims for one slot all jobs that will wait for it, however long."""

    def _further(self, queue: str, ahead: int) -> int:
        return 0

    async def _take_from(self, queue: str, room: int, ahead: int, quick: frozenset[str]) -> int:
        return await self._take(queue, CLAIMED if room > 0 else 0, self._tasks)

    def _may_wait(self, lease: Lease) -> bool:
        return True

    def give_back_late(self) -> None:
        if self._shared.stopping:
            super().give_back_late()
