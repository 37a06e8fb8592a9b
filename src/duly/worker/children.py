"""Handlers in processes of their own: those that ask for it, and suspects.

A child is spawned, imports the app by name and runs one job at a time; `child` is its side. Both speak frames of JSON
over a socket pair. A child can be killed, and its death is seen at once: so a handler that takes its process down
takes nothing else with it.

A suspect is a job whose worker stopped beating while it ran. It runs alone, in a child, until one attempt ends, so
that a job which kills its process is told from its innocent neighbours.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from duly.app.definition import Kind
from duly.app.lease import Asked, Lease, timed_out
from duly.errors import DulyError
from duly.model import Crashed, Failed, Failure, Outcome, Released
from duly.rules.failure import describe
from duly.worker import runner
from duly.worker.pipe import Answer, Ask, Beat, Begin, Outcomes, Started, frame, read_frame

if TYPE_CHECKING:
    from duly.app.app import App
    from duly.worker.worker import Worker

log = logging.getLogger("duly.worker")

START_SECONDS = 30.0
LOOK_SECONDS = 0.1
# After a suspect was told that its time is up: within which it answers, and then ends.
ANSWERS_SECONDS = 3.0
ENDS_SECONDS = 0.5
# Between the end of a process and the end of what it said: its last words may still be on their way.
LAST_WORDS_SECONDS = 0.05
STOPS = frozenset({Asked.TIMEOUT, Asked.LOST, Asked.STOPPING})


class Child:
    """One process that runs one handler at a time."""

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self.answered = True  # what it was asked last
        self._reader = reader
        self._writer = writer
        self._mourning = asyncio.create_task(self._mourn())

    @classmethod
    async def spawn(cls, spec: str) -> Child:
        """Start a process that has imported the app."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    # -P: a queue.py in this folder is not Python's.
                    *(sys.executable, "-P", "-m", "duly.worker.child", str(theirs.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            reader, writer = await asyncio.open_connection(sock=ours, limit=2**24)
            undo.pop_all()
        child = cls(process, reader, writer)
        writer.write(frame(Begin(spec, sys.path)))
        try:
            async with asyncio.timeout(START_SECONDS):
                started: Started = await read_frame(reader, Started)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            child.kill()
            raise ChildFailed(f"the process for {spec} did not start: {await child.death()}") from None
        except BaseException:
            child.kill()
            raise
        if started.error is not None:
            child.kill()
            raise ChildFailed(started.error)
        return child

    async def _mourn(self) -> None:
        """Hear no more once the process has ended: what it forked may hold its end of the socket for ever."""
        await self.process.wait()
        if not self._writer.is_closing():
            await asyncio.sleep(LAST_WORDS_SECONDS)
            self._writer.close()
        self._reader.feed_eof()

    async def gone(self) -> None:
        """Wait until the process has ended."""
        await asyncio.wait({self._mourning})

    async def run(self, lease: Lease) -> Outcome:
        """Run one job to its outcome. Raises IncompleteReadError when the process dies of it."""
        self.answered = True
        self._writer.write(frame(lease.job))
        if lease.asked is not None:
            self.ask(lease)
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()
        while not isinstance(said := await read_frame(self._reader, Answer | Beat | Outcomes), Outcomes):
            if isinstance(said, Answer):
                self.answered = True
            else:
                lease.beat()
        lease.staged = said.staged
        return said.outcome

    def ask(self, lease: Lease) -> None:
        """Tell the handler to stop if it is asked to, and the process to answer."""
        self.answered = False
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._writer.write(frame(Ask(lease.asked, lease.job.id)))

    def kill(self) -> None:
        """End the process at once."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self._writer.close()

    async def death(self) -> str:
        """Say how the process ended."""
        code = await self.process.wait()
        if code >= 0:
            return f"its process ended with exit code {code}"
        with contextlib.suppress(ValueError):
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process was killed by signal {-code}"


class ChildFailed(DulyError):
    """A process of its own could not be started for a handler."""

    code = "child_failed"


class Children:
    """The processes of one worker, kept for the next job when one has ended."""

    def __init__(self, app: App, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._most = most
        self._clock = clock
        self._idle: list[Child] = []
        self._at_work: dict[Lease, Child] = {}
        self._warming: asyncio.Task[None] | None = None

    @property
    def can_run(self) -> bool:
        """Whether a new process could import the app."""
        return self._app.spec is not None

    async def run(self, lease: Lease) -> Outcome:
        """Run a job in a process of its own; that none can be started is a failure like any other."""
        try:
            return await self.attempt(lease)
        except (ChildFailed, OSError) as error:
            return Failed(describe(error))

    async def attempt(self, lease: Lease) -> Outcome:
        """Run a job in a process of its own. Raises ChildFailed or OSError where none can be started."""
        lease.begun_at = None  # the time until its process is there is not the handler's
        child = await self._take()
        if lease.closed or lease.asked in STOPS:
            self._keep(child)
            return Released()
        lease.begun_at = self._clock()
        self._at_work[lease] = child
        reusable = False
        try:
            outcome = await child.run(lease)
            reusable = lease.asked is None
            return outcome
        except (asyncio.IncompleteReadError, ConnectionError):
            return self._died(lease, child, await child.death())
        except msgspec.MsgspecError as error:
            return Failed(describe(error))
        finally:
            del self._at_work[lease]
            if reusable:
                self._keep(child)
            else:
                child.kill()

    def _keep(self, child: Child) -> None:
        if len(self._idle) < self._most:
            self._idle.append(child)
        else:
            child.kill()

    def _died(self, lease: Lease, child: Child, how: str) -> Outcome:
        match lease.asked:
            case Asked.STOPPING | Asked.LOST:
                return Released()
            case Asked.TIMEOUT if child.answered or not lease.job.suspect:
                return Failed(describe(timed_out(lease)))
        return Crashed(Failure("duly.Crashed", how if child.answered else f"it did not answer, and {how}"))

    def ask(self, lease: Lease) -> bool:
        """Tell a handler to stop; unless it is only asked to cancel, its process is killed. False: none runs it.

        A suspect whose time is up may still answer: it is killed a moment later, and is to blame if it did not.
        """
        child = self._at_work.get(lease)
        if child is None:
            return False
        if lease.asked in STOPS and not (lease.asked is Asked.TIMEOUT and lease.job.suspect):
            child.kill()
        else:
            child.ask(lease)
        return True

    def hurry(self, lease: Lease, waited: float) -> bool:
        """Kill the process of a handler that was asked to stop and did not. False: none runs it.

        A suspect that has not answered has more time for it, as its machine may be busy: it will be held against it.
        """
        child = self._at_work.get(lease)
        if child is None:
            return False
        if waited > (ENDS_SECONDS if child.answered else max(ANSWERS_SECONDS, lease.job.lease_ms / 3000)):
            child.kill()
        return True

    async def watch(self, lease: Lease) -> None:
        """Kill the process of a suspect that does not answer for a lease: it would keep a worker from its beats."""
        asked: Child | None = None
        while True:
            await asyncio.sleep(lease.job.lease_ms / 1000)
            child = self._at_work.get(lease)
            if child is None or lease.asked is not None:
                continue
            if child is asked and not child.answered:
                child.kill()
                return
            asked = child
            child.ask(lease)

    def warm_up(self) -> None:
        """Start a process now that will be needed soon."""
        if self.can_run and not self._idle and not self._at_work and self._warming is None:
            self._warming = asyncio.create_task(self._warm())

    async def _warm(self) -> None:
        try:
            with contextlib.suppress(ChildFailed, OSError):
                assert self._app.spec is not None
                self._idle.append(await Child.spawn(self._app.spec))
        finally:
            self._warming = None

    async def _take(self) -> Child:
        if not self._idle and self._warming is not None:
            await asyncio.wait({self._warming})
        while self._idle:
            child = self._idle.pop()
            if child.process.returncode is None:
                return child
            child.kill()
        assert self._app.spec is not None
        return await Child.spawn(self._app.spec)

    async def close(self) -> None:
        """End the processes."""
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.wait({self._warming})
        children = [*self._idle, *self._at_work.values()]
        for child in children:
            child.kill()
        for child in children:
            await child.gone()
        self._idle.clear()


class Suspects:
    """Runs suspects one at a time, beside the worker's slots."""

    def __init__(self, worker: Worker, look_s: float = 1.0) -> None:
        self._worker = worker
        self._look_s = look_s
        self._hinted = asyncio.Event()
        self._here = False  # the next one runs in this process: no other could be started
        self.busy = True  # from the start: who drains the queue has to look for suspects too

    def hint(self) -> None:
        """Say that there may be some."""
        self.busy = True  # until it was looked for them
        self._hinted.set()

    async def run(self) -> None:
        """Look for suspects now and then, for ever, and run them; what fails is told once and tried again."""
        failing = False
        while not self._worker.stopping:
            self.busy = True
            found = False
            try:
                for queue in self._worker.queues:
                    found = await self._next(queue) or found
                failing = False
            except DulyError as error:
                if not failing:
                    log.warning("suspects.failed", extra={"error": str(error)})
                failing, found = True, False
            if not found:
                self.busy = False
                if self._worker.draining:
                    self._worker.poke()
                await self._pause()

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._look_s):
                await self._hinted.wait()
        self._hinted.clear()

    async def _next(self, queue: str) -> bool:
        """Run the next suspect of a queue. False: there is none."""
        in_child = self._worker.children.can_run and not self._here
        lease = await self._claim(queue, child=in_child)
        if lease is None:
            return False
        if in_child:
            await self._end(lease, await self._in_child(lease))
        elif self._worker.lanes.is_rated(lease.job.task):
            await self._empty_for(queue, lease)  # given back, it would wait for its next permit, and again
        else:
            # While it waits here, whatever else kills this process would count against it: it waits in the queue.
            await self._end(lease, Released())
            await self._empty_for(queue)
        return True

    async def _claim(self, queue: str, *, child: bool) -> Lease | None:
        if self._worker.stopping:
            return None
        for lease in await self._worker.claim(queue, 1, self._worker.app.tasks, alone=True, child=child):
            self._worker.set_aside(lease)
            return lease
        return None

    async def _end(self, lease: Lease, outcome: Outcome) -> None:
        worker = self._worker
        if lease.closed:
            worker.ended(lease, outcome)
            return
        if lease.staged:
            worker.driver.mind_wal()
        lease.sent = True
        await worker.record([(lease, worker.judged(lease, outcome))])

    async def _in_child(self, lease: Lease) -> Outcome:
        watching = asyncio.create_task(self._worker.children.watch(lease))
        try:
            return await self._worker.children.attempt(lease)
        except (ChildFailed, OSError) as error:
            log.warning("suspects.no_process", extra={"error": str(error)})
            self._here = True
            return Released()
        finally:
            watching.cancel()

    async def _empty_for(self, queue: str, lease: Lease | None = None) -> None:
        """Have the worker emptied, then run a suspect in it: the one that is held, or the next."""
        worker = self._worker
        worker.emptying = True
        try:
            await worker.emptied()
            lease = lease or await self._claim(queue, child=False)
            if lease is not None:
                self._here = False
                outcome = await self._in_emptied(lease)
                if outcome is not None:
                    await self._end(lease, outcome)
        finally:
            worker.emptying = False
            worker.poke()

    async def _in_emptied(self, lease: Lease) -> Outcome | None:
        """Run a suspect in this process, with nothing else in it. None: it was given up on, and still runs."""
        worker = self._worker
        lease.begun_at = worker.clock()
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def tell(outcome: Outcome) -> None:
            if lease.closed:
                worker.ended(lease, outcome)
            elif not ended.done():
                ended.set_result(outcome)

        if lease.definition.kind is Kind.ASYNC:
            running = asyncio.create_task(runner.arun(lease))
            running.add_done_callback(lambda done: None if done.cancelled() else tell(done.result()))
        else:
            # In a thread that may be interrupted, and that keeps no process from ending.
            worker.spawn(lambda: worker.call_soon(tell, worker.threads.run(lease)), "duly-suspect")
        while not (ended.done() or lease.closed):
            await asyncio.wait({ended}, timeout=LOOK_SECONDS)
        return ended.result() if ended.done() else None
