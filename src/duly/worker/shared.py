"""The state that all parts of a worker share: options, clock, event loop, connection."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from duly.errors import AnswerLost, ConfigError, StoreUnavailable
from duly.rules.checks import count
from duly.store import ops
from duly.store.op import Op
from duly.worker.threads import Spawn

if TYPE_CHECKING:
    from duly.app.app import App

T = TypeVar("T")


class Shared:
    """The state of one worker that no part owns alone."""

    def __init__(
        self,
        app: App,
        *,
        queues: Iterable[str] | Mapping[str, int | None] | None,
        concurrency: int,
        draining: bool,
        spawn: Spawn,
        clock: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        count(concurrency, "concurrency=")
        self.app = app
        self.driver = app.driver
        self.queues = _limits(app, queues)
        self.concurrency = concurrency
        self.draining = draining
        self.spawn = spawn
        self.clock = clock
        self.chance = chance
        self.host, self.pid = socket.gethostname(), os.getpid()
        self.id = f"{self.host}-{self.pid}-{os.urandom(4).hex()}"
        self.loop: asyncio.AbstractEventLoop | None = None
        self.background: set[asyncio.Task[Any]] = set()
        self.stopping = False  # no job is claimed any more
        self.closing = False  # no handler is started any more
        self.online = asyncio.Event()  # set by the heartbeat; operations that failed wait for it
        self.failing = False  # the database was not reached last time
        self.beat_wanted = threading.Event()
        self.shortest_ms = self.shortest_lease_ms()  # of the tasks and of the jobs that are held
        self.succeeded = self.failed = 0  # attempts

    # The event loop

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the event loop, from any thread."""
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(function, *args)

    def in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that runs until it ends or the worker does."""
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return task

    async def in_thread(self, work: Callable[[], None]) -> None:
        """Run a blocking function in a thread of its own: handlers may use all threads of the default executor."""
        done = asyncio.Event()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:
                failed.append(error)
            self.call_soon(done.set)

        self.spawn(run, "duly-aside")
        await done.wait()
        if failed:
            raise failed[0]

    # The database

    async def surely(self, op: Op[T], *, patient: bool = True) -> T:
        """Run an operation, and retry it until the database answers. If not patient, raise when a row is locked."""
        while True:
            try:
                return await self.driver.arun(op)
            except AnswerLost as lost:
                op = lost.again or op  # type: ignore[assignment]
            except StoreUnavailable as error:
                if error.locked and not patient:
                    raise
            # The heartbeat reconnects first and extends the leases before any other operation is sent.
            self.online.clear()
            self.beat_now()
            await self.online.wait()

    def until_look(self, seconds: float) -> float:
        """Return how long to sleep before a look. On a far database, all of them begin at full seconds."""
        if not self.driver.far or seconds < 1:
            return seconds
        now = self.clock()
        return math.floor(now + seconds) - now

    def beat_now(self) -> None:
        """Ask for a heartbeat at once, because the database was not reached."""
        self.failing = True
        self.beat_wanted.set()

    def note_lease(self, lease_ms: int) -> None:
        """Send heartbeats more often if this lease is shorter than all others."""
        if lease_ms < self.shortest_ms:
            self.shortest_ms = lease_ms
            self.beat_wanted.set()

    def registration(self) -> Op[None]:
        """Return the operation that records this worker: its tasks, its queues and its counts."""
        return ops.register(
            self.id,
            host=self.host,
            pid=self.pid,
            queues=self.queues,
            tasks=self.app.tasks,
            schedules=self.app.schedules.in_code,
            beat_ms=max(self.shortest_lease_ms() // 3, 1000),
            slots=self.concurrency,
            succeeded=self.succeeded,
            failed=self.failed,
        )

    def shortest_lease_ms(self) -> int:
        """Return the shortest lease of the tasks of this app."""
        default = self.app.settings.lease_ms
        return min([default, *(task.definition.lease_ms or default for task in self.app.tasks.values())])


def _limits(app: App, queues: Iterable[str] | Mapping[str, int | None] | None) -> dict[str, int | None]:
    """Return the queues to serve, each with the most jobs of it that run at once."""
    if queues is None:
        return dict.fromkeys(sorted({"default", *(task.definition.queue for task in app.tasks.values())}))
    limits = dict(queues) if isinstance(queues, Mapping) else dict.fromkeys(queues)
    if not limits:
        raise ConfigError(
            "queues= is empty. Name at least one queue, or leave it out to serve the queues of the app's tasks."
        )
    for queue, limit in limits.items():
        if limit is not None:
            count(limit, f"queues=, the limit of {queue!r},")
    return limits
