"""Jobs that have run when their enqueue returns.

Each enqueue runs a worker of its own until nothing is due. Where several enqueue at once, one's worker may take
another's job: so each also waits until the jobs that it made are out of every such worker's hands. Nobody waits in a
circle, because a handler only ever waits for jobs that were claimed after its own.
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
from duly.testing.drain_worker import Drainer, Noted, work
from duly.worker.claiming import Claiming

if TYPE_CHECKING:
    from duly.app.app import App

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
                f"inline: {DEEPEST} jobs run inside one another, the last of {request.definition.name}: "
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


def _own(answers: Answers) -> list[str]:
    """Return the ids of the jobs that were added. The others were there before, perhaps as the one that enqueues."""
    return [answer.id for answer in answers if not answer.deduplicated]


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
