"""The class that people import: an app, and what stands above it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypedDict, Unpack

from duly.app.app import App
from duly.errors import ConfigError
from duly.rules.durations import Duration

if TYPE_CHECKING:
    from duly.worker.tick import Ticked
    from duly.worker.worker import Worker


class WorkerOptions(TypedDict, total=False):
    """How a worker works; what is left out has the default of `Worker`."""

    queues: Iterable[str] | Mapping[str, int | None] | None
    concurrency: int
    grace: Duration | None
    drain: bool
    signals: bool
    on_stuck: Callable[[], None] | None


class Duly(App):
    """An app: its tasks, the database that keeps its jobs, and workers that run them."""

    # `App.__init__` finds the module that made the app by its caller, so there is no __init__ here.

    def worker(self, **options: Unpack[WorkerOptions]) -> Worker:
        """Make a worker for this app: `queues concurrency grace drain`."""
        from duly.worker.worker import Worker

        return Worker(self, **options)

    def run(self, **options: Unpack[WorkerOptions]) -> None:
        """Work in this process until SIGTERM or Ctrl-C, or with `drain=True` until nothing is due any more."""
        if asyncio._get_running_loop() is not None:
            raise ConfigError("app.run() starts an event loop, and one runs here already: await app.arun() instead")
        asyncio.run(self.worker(**options).run())

    async def arun(self, **options: Unpack[WorkerOptions]) -> None:
        """Work in this event loop until cancelled, or with `drain=True` until nothing is due any more."""
        await self.worker(**options).run()

    def tick(self, *, limit: int = 100, max_seconds: Duration = 50, concurrency: int = 10) -> Ticked:
        """Do one bounded pass over the queue, as `duly tick` does. `limit` is how many jobs it runs at most."""
        from duly.worker.tick import Ticker

        if asyncio._get_running_loop() is not None:
            raise ConfigError("app.tick() starts an event loop, and one runs here already: await app.atick() instead")
        return asyncio.run(Ticker(self, limit=limit, max_seconds=max_seconds, concurrency=concurrency).tick())

    async def atick(self, *, limit: int = 100, max_seconds: Duration = 50, concurrency: int = 10) -> Ticked:
        """Do one bounded pass over the queue in this event loop, whose signal handlers it leaves alone."""
        from duly.worker.tick import Ticker

        return await Ticker(self, limit=limit, max_seconds=max_seconds, concurrency=concurrency, signals=False).tick()
