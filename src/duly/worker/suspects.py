"""Suspects: jobs whose worker stopped its heartbeats while they ran.

A suspect runs alone, in a child process, until one attempt ends. So a job that crashes its process does not count
against the innocent jobs beside it. If no child process can be started, the worker is emptied and runs the suspect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field

from duly.app.definition import Kind
from duly.app.lease import Lease
from duly.errors import DulyError
from duly.model import Outcome, Released
from duly.worker.children import ChildFailed, Children
from duly.worker.claiming import Claiming
from duly.worker.finishing import Finishing
from duly.worker.held import Held
from duly.worker.lanes import Lanes
from duly.worker.runner import Runner
from duly.worker.shared import Shared
from duly.worker.threads import Threads
from duly.worker.wakeups import Wakeups

log = logging.getLogger("duly.worker")

LOOK_SECONDS = 0.1
PAUSE_SECONDS = 1.0


@dataclass(eq=False, repr=False)
class Suspects:
    """Runs suspects one at a time, beside the worker's slots."""

    _shared: Shared
    _held: Held
    _wakeups: Wakeups
    _finishing: Finishing
    _claiming: Claiming
    _lanes: Lanes
    _children: Children
    _threads: Threads
    _runner: Runner
    _hinted: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _here: bool = field(default=False, init=False)  # no child could be started: the next one runs in this process
    busy: bool = field(default=True, init=False)  # from the start: a drain must look for suspects too

    def hint(self) -> None:
        """Look for suspects soon."""
        self.busy = True  # until the look
        self._hinted.set()

    async def run(self) -> None:
        """Look for suspects now and then until the worker stops, and run them. Errors are logged once and retried."""
        failing = False
        while not self._shared.stopping:
            self.busy = True
            found = False
            try:
                for queue in self._shared.queues:
                    found = await self._next(queue) or found
                failing = False
            except DulyError as error:
                if not failing:
                    log.warning("suspects.failed", extra={"error": str(error)})
                failing, found = True, False
            if not found:
                self.busy = False
                if self._shared.draining:
                    self._wakeups.wake()
                await self._pause()

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._shared.until_look(PAUSE_SECONDS)):
                await self._hinted.wait()
        self._hinted.clear()

    async def _next(self, queue: str) -> bool:
        """Run the next suspect of a queue. Returns False if it has none."""
        in_child = self._children.can_run and not self._here
        lease = await self._claim(queue, child=in_child)
        if lease is None:
            return False
        if in_child:
            await self._end(lease, await self._in_child(lease))
        elif self._lanes.is_rated(lease.job.task):
            await self._empty_for(queue, lease)  # if released, it would wait for its next permit each time
        else:
            # It waits in the queue until the worker is empty: a crash meanwhile must not count against it.
            await self._end(lease, Released())
            await self._empty_for(queue)
        return True

    async def _claim(self, queue: str, *, child: bool) -> Lease | None:
        if self._shared.stopping:
            return None
        for lease in await self._claiming.claim(queue, 1, self._shared.app.tasks, alone=True, child=child):
            self._held.set_aside(lease)
            return lease
        return None

    async def _end(self, lease: Lease, outcome: Outcome) -> None:
        if lease.closed:
            self._finishing.ended(lease, outcome)
            return
        if lease.staged:
            self._shared.driver.mind_wal()
        lease.sent = True
        await self._finishing.record([(lease, self._finishing.judged(lease, outcome))])

    async def _in_child(self, lease: Lease) -> Outcome:
        watching = asyncio.create_task(self._children.watch(lease))
        try:
            return await self._children.attempt(lease)
        except (ChildFailed, OSError) as error:
            log.warning("suspects.no_process", extra={"error": str(error)})
            self._here = True
            return Released()
        finally:
            watching.cancel()

    async def _empty_for(self, queue: str, lease: Lease | None = None) -> None:
        """Empty the worker, then run a suspect in it: this one, or the next."""
        self._held.emptying = True
        try:
            await self._emptied()
            lease = lease or await self._claim(queue, child=False)
            if lease is not None:
                self._here = False
                outcome = await self._in_emptied(lease)
                if outcome is not None:
                    await self._end(lease, outcome)
        finally:
            self._held.emptying = False
            self._wakeups.wake()

    async def _emptied(self) -> None:
        """Wait until only suspects are held."""
        while self._claiming.filling or self._held.in_slots:
            self._held.vacated.clear()
            self._wakeups.wake()
            await self._held.vacated.wait()

    async def _in_emptied(self, lease: Lease) -> Outcome | None:
        """Run a suspect in this process, which runs nothing else. None: it was given up on, and still runs."""
        shared = self._shared
        lease.begun_at = shared.clock()
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def end(outcome: Outcome) -> None:
            if lease.closed:
                self._finishing.ended(lease, outcome)
            elif not ended.done():
                ended.set_result(outcome)

        if lease.definition.kind is Kind.ASYNC:
            running = asyncio.create_task(self._runner.arun(lease))
            running.add_done_callback(lambda done: None if done.cancelled() else end(done.result()))
        else:
            # In a thread that can be interrupted and does not keep the process from exiting.
            shared.spawn(lambda: shared.call_soon(end, self._threads.run(lease)), "duly-suspect")
        while not (ended.done() or lease.closed):
            await asyncio.wait({ended}, timeout=LOOK_SECONDS)
        return ended.result() if ended.done() else None
