"""Child processes: they run handlers with `isolation="process"`, and suspects.

A child imports the app by name and runs one job at a time; `child` is its side. Both send frames of JSON over a socket
pair. A child can be killed, and its worker notices its death at once: a handler that crashes its process crashes
nothing else.
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

from duly.app.lease import Asked, Lease, timed_out
from duly.errors import DulyError
from duly.model import Crashed, Failed, Failure, Outcome, Released
from duly.rules.failure import describe
from duly.worker.pipe import Answer, Ask, Beat, Begin, Outcomes, Started, frame, read_frame

if TYPE_CHECKING:
    from duly.app.app import App
    from duly.app.database import Place

log = logging.getLogger("duly.worker")

START_SECONDS = 30.0
# After the timeout of a suspect: how long it has to answer, and then to end.
ANSWERS_SECONDS = 3.0
ENDS_SECONDS = 0.5
# After the end of a process: its last messages may still be in flight.
LAST_WORDS_SECONDS = 0.05
STOPS = frozenset({Asked.TIMEOUT, Asked.LOST, Asked.STOPPING})


class Child:
    """One process that runs one handler at a time."""

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self.answered = True  # the last request
        self._reader = reader
        self._writer = writer
        self._ending = asyncio.create_task(self._wait_for_end())

    @classmethod
    async def spawn(cls, spec: str, elsewhere: Place | None) -> Child:
        """Start a process and wait until it has imported the app."""
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
        writer.write(frame(Begin(spec, sys.path, elsewhere)))
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

    async def _wait_for_end(self) -> None:
        """Close the socket once the process has ended: processes that it forked may keep their end open."""
        await self.process.wait()
        if not self._writer.is_closing():
            await asyncio.sleep(LAST_WORDS_SECONDS)
            self._writer.close()
        self._reader.feed_eof()

    async def gone(self) -> None:
        """Wait until the process has ended."""
        await asyncio.wait({self._ending})

    async def run(self, lease: Lease) -> Outcome:
        """Run one job. Raises IncompleteReadError when the process dies."""
        self.answered = True
        self._writer.write(frame(lease.job))
        if lease.asked is not None:
            self.ask(lease)
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()
        while not isinstance(message := await read_frame(self._reader, Answer | Beat | Outcomes), Outcomes):
            if isinstance(message, Answer):
                self.answered = True
            else:
                lease.beat()
        lease.staged = message.staged
        return message.outcome

    def ask(self, lease: Lease) -> None:
        """Send the request to stop, if there is one, and ask the process for an answer."""
        self.answered = False
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._writer.write(frame(Ask(lease.asked, lease.job.id)))

    def kill(self) -> None:
        """End the process at once."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self._writer.close()

    async def death(self) -> str:
        """Wait for the end of the process, and return how it ended."""
        code = await self.process.wait()
        if code >= 0:
            return f"its process ended with exit code {code}"
        with contextlib.suppress(ValueError):
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process was killed by signal {-code}"


class ChildFailed(DulyError):
    """A child process could not be started."""

    code = "child_failed"


class Children:
    """The child processes of one worker. Each runs one job after the other."""

    def __init__(self, app: App, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._most = most
        self._clock = clock
        self._idle: list[Child] = []
        self._at_work: dict[Lease, Child] = {}
        self._warming: asyncio.Task[None] | None = None

    @property
    def can_run(self) -> bool:
        """Whether a child process could import the app."""
        return self._app.spec is not None

    async def run(self, lease: Lease) -> Outcome:
        """Run a job in a child process. If none can be started, the attempt fails."""
        try:
            return await self.attempt(lease)
        except (ChildFailed, OSError) as error:
            return Failed(describe(error))

    async def attempt(self, lease: Lease) -> Outcome:
        """Run a job in a child process. Raises ChildFailed or OSError if none can be started."""
        lease.begun_at = None  # the start of a process does not count against the timeout
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
        """Ask a handler to stop, or kill its process unless the job is only to be cancelled. False: no child runs it.

        A suspect that exceeds its timeout is killed a moment later. If it did not answer until then, it counts as
        crashed.
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
        """Kill the process of a handler that was asked to stop and did not. False: no child runs it.

        A suspect has more time to answer, because its machine may be busy and the crash counts.
        """
        child = self._at_work.get(lease)
        if child is None:
            return False
        if waited > (ENDS_SECONDS if child.answered else max(ANSWERS_SECONDS, lease.job.lease_ms / 3000)):
            child.kill()
        return True

    async def watch(self, lease: Lease) -> None:
        """Kill the process of a suspect that does not answer for one lease: it would block a worker's heartbeats."""
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
        """Start a process that will be needed soon."""
        if self.can_run and not self._idle and not self._at_work and self._warming is None:
            self._warming = asyncio.create_task(self._warm())

    async def _warm(self) -> None:
        try:
            with contextlib.suppress(ChildFailed, OSError):
                self._idle.append(await self._spawn())
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
        return await self._spawn()

    async def _spawn(self) -> Child:
        assert self._app.spec is not None
        return await Child.spawn(self._app.spec, self._app.elsewhere)

    async def close(self) -> None:
        """Kill all processes."""
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.wait({self._warming})
        children = [*self._idle, *self._at_work.values()]
        for child in children:
            child.kill()
        for child in children:
            await child.gone()
        self._idle.clear()
