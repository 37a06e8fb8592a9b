"""`python -m duly.worker.child FD`: a child process that runs handlers for a worker, one at a time."""

from __future__ import annotations

import asyncio
import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import msgspec

from duly.app.app import App
from duly.app.lease import Lease
from duly.app.locate import find_app
from duly.errors import ConfigError
from duly.model import Claimed, Failed, Outcome
from duly.rules.failure import describe
from duly.worker import runner
from duly.worker.pipe import Answer, Ask, Beat, Begin, Outcomes, Started, frame, receive

PARENT_DEATH_SIGNAL = 1  # prctl(PR_SET_PDEATHSIG)


def main(descriptor: int) -> None:
    """Import the app, report that, and run jobs until the worker closes the socket."""
    _die_with_parent()
    # Ctrl-C and service managers signal the whole group. The worker alone decides when this process stops.
    # Not SIG_IGN: processes that a handler starts would inherit it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    os.set_inheritable(descriptor, False)
    sock = socket.socket(fileno=descriptor)
    with suppress(EOFError, OSError):
        begin = receive(sock, Begin)
        sys.path += [place for place in begin.path if place not in sys.path]
        try:
            app = find_app(begin.spec, App)
            if begin.elsewhere is not None:
                app = app.at(begin.elsewhere[0], schema=begin.elsewhere[1])
        except Exception as error:
            sock.sendall(frame(Started(error=f"the child process cannot import {begin.spec}: {error}")))
            return
        sock.sendall(frame(Started()))
        Serving(app, sock).run()


class Serving:
    """Runs one job after the other in the main thread; another thread reads them."""

    def __init__(self, app: App, sock: socket.socket) -> None:
        self._app = app
        self._sock = sock
        self._sending = threading.Lock()  # a handler may send heartbeats from its own threads
        self._jobs: queue.SimpleQueue[Claimed] = queue.SimpleQueue()
        self._lease: Lease | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: Ask | None = None  # the last request to stop; its job may not have begun

    def run(self) -> None:
        """Run jobs until the process is killed."""
        threading.Thread(target=self._listen, name="duly-listen", daemon=True).start()
        while True:
            job = self._jobs.get()
            self._send(self._outcome(job))

    def _send(self, message: Answer | Beat | Outcomes) -> None:
        with self._sending:
            self._sock.sendall(frame(message))

    def _outcome(self, job: Claimed) -> Outcomes:
        if job.task not in self._app.tasks:
            unknown = ConfigError(
                f"the child process does not know task {job.task!r}, but its worker does. Define it at import."
            )
            return Outcomes.of(Failed(describe(unknown)), staged=False)
        now = time.monotonic()
        definition = self._app.tasks[job.task].definition
        lease = Lease(job, definition, self._app.database, now, self._app.tasks, on_beat=lambda: self._send(Beat()))
        lease.begun_at = now
        self._lease = lease
        if self._asked is not None:
            self._ask(self._asked)
        try:
            outcome = asyncio.run(self._arun(lease)) if lease.definition.is_async else runner.run(lease)
        finally:
            self._lease = None
        return Outcomes.of(outcome, staged=lease.staged)

    async def _arun(self, lease: Lease) -> Outcome:
        self._loop = asyncio.get_running_loop()
        if lease.asked is not None:
            self._loop.call_soon(_cancel, lease)
        try:
            return await runner.arun(lease)
        finally:
            self._loop = None

    def _listen(self) -> None:
        """Receive jobs and requests to stop. Exits when the worker has closed the socket."""
        try:
            while True:
                message = receive(self._sock, Any)
                if isinstance(message, dict):
                    self._handle(msgspec.convert(message, Ask))
                else:  # a job is sent as a list of its values
                    self._jobs.put(msgspec.convert(message, Claimed))
        finally:
            os._exit(1)

    def _handle(self, ask: Ask) -> None:
        """Stop the handler if requested, and answer. A handler that blocks its event loop blocks the answer too."""
        loop = self._loop
        if ask.asked is not None:
            self._ask(ask)
        if loop is None:
            self._send(Answer())
        else:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._send, Answer())

    def _ask(self, ask: Ask) -> None:
        self._asked = ask
        lease, loop = self._lease, self._loop
        if lease is None or lease.job.id != ask.job_id:
            return
        lease.asked = ask.asked
        if loop is not None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_cancel, lease)


def _cancel(lease: Lease) -> None:
    """Cancel an async handler, unless it has ended."""
    if lease.aio is not None:
        lease.aio.cancel()


def _die_with_parent() -> None:
    """Let the system kill this process when its worker is killed, even if a handler blocks."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
