"""Jobs that have run when their enqueue returns."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from duly.context import Lease
from duly.errors import ConfigError
from duly.testing.drainer import work

if TYPE_CHECKING:
    from duly.app import Duly, Job
    from duly.tasks import Task

DEEPEST = 50


@contextmanager
def inline(app: Duly) -> Iterator[Duly]:
    """Have every enqueue run its job, and what that enqueues, before it returns.

    What a handler raises on its first attempt is raised to whoever enqueued. A delayed job is not run, and one that is
    enqueued on your own connection (`conn=`) is not, as it is not committed: `drain` runs them when they are due.
    """
    if "_enqueue" in app.__dict__:
        raise ConfigError("inline(app) holds already, and jobs are run once: take the inner one away")
    session = _Inline(app)
    app.__dict__.update(_enqueue=session.enqueue, _aenqueue=session.aenqueue)
    try:
        yield app
    finally:
        for name in ("_enqueue", "_aenqueue"):
            del app.__dict__[name]


class _Inline:
    """Enqueues, runs, and hands back what handlers raised."""

    def __init__(self, app: Duly) -> None:
        self._app = app
        self._add: Callable[..., list[Job[Any]]] = app._enqueue
        self._aadd: Callable[..., Awaitable[list[Job[Any]]]] = app._aenqueue
        self._raised: dict[str, BaseException] = {}
        self._depth = 0

    def enqueue(self, task: Task[..., Any, Any], chunks: Any) -> list[Job[Any]]:
        with self._deeper(task):
            jobs = self._add(task, chunks)
            if task._using.conn is None:
                _run(lambda: work(self._app, self._queues(task), self._note))
        self._raise(jobs)
        return jobs

    async def aenqueue(self, task: Task[..., Any, Any], chunks: Any) -> list[Job[Any]]:
        with self._deeper(task):
            jobs = await self._aadd(task, chunks)
            if task._using.conn is None:
                await work(self._app, self._queues(task), self._note)
        self._raise(jobs)
        return jobs

    @contextmanager
    def _deeper(self, task: Task[..., Any, Any]) -> Iterator[None]:
        """Count how many jobs run inside one another; who enqueues himself would never come to an end."""
        if self._depth >= DEEPEST:
            raise ConfigError(
                f"inline: {DEEPEST} jobs run inside one another, the last of {task.name}: "
                "jobs that lead to more of themselves are run one after the other by testing.drain(app)"
            )
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _queues(self, task: Task[..., Any, Any]) -> set[str]:
        return {task._terms().queue, *(one.definition.queue for one in self._app.tasks.values())}

    def _note(self, lease: Lease, error: BaseException) -> None:
        if lease.job.attempt == 1:
            self._raised.setdefault(lease.job.id, error)

    def _raise(self, jobs: Sequence[Job[Any]]) -> None:
        raised = [self._raised.pop(job.id) for job in jobs if job.id in self._raised]
        if raised:
            raise raised[0]


def _run(make: Callable[[], Any]) -> None:
    """Run a coroutine to its end; where an event loop runs already, on another one in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(make())
        return
    failed: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(make())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="duly-inline")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
