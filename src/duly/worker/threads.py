"""Long-lived threads for sync handlers, and how a handler that exceeds its timeout is interrupted."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from duly.app.lease import Lease, timed_out
from duly.errors import JobTimeout
from duly.model import Failed, Outcome
from duly.rules.failure import describe
from duly.store.uninterrupted import shield
from duly.worker.runner import Runner


def start_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Run a function in a daemon thread of its own."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


Spawn: TypeAlias = Callable[[Callable[[], None], str], threading.Thread]
JOIN_SECONDS = 0.2


class TimeIsUp(JobTimeout):
    """Raised into the thread of a handler that runs longer than its timeout."""

    def __init__(self) -> None:
        super().__init__("the handler ran longer than its timeout")


class Threads:
    """Threads that run one job after the other. Each is started when it is first needed."""

    def __init__(self, most: int, spawn: Spawn, work: Callable[[Lease], Lease | None], runner: Runner) -> None:
        self._most = most
        self._spawn = spawn
        self._work = work
        self._runner = runner
        self._started: list[threading.Thread] = []
        self._waiting: queue.SimpleQueue[Lease | None] = queue.SimpleQueue()
        self._raising = threading.Lock()

    def put(self, lease: Lease) -> None:
        """Hand a job to a free thread."""
        if len(self._started) < self._most:
            self._started.append(self._spawn(self._run, f"duly-handler-{len(self._started) + 1}"))
        self._waiting.put(lease)

    def close(self) -> None:
        """Let the threads end when they are free. Does not wait for threads that hang."""
        for _ in self._started:
            self._waiting.put(None)
        give_up_at = time.monotonic() + JOIN_SECONDS
        for thread in self._started:
            thread.join(max(0.0, give_up_at - time.monotonic()))

    def _run(self) -> None:
        lease = self._waiting.get()
        while lease is not None:
            lease = self._work(lease) or self._waiting.get()

    def run(self, lease: Lease) -> Outcome:
        """Run a handler in this thread, where `interrupt` may reach it until it has ended."""
        lease.thread = threading.get_ident()
        outcome: Outcome | None = None
        try:
            try:
                outcome = self._runner.run(lease)
            finally:
                self._out_of_reach(lease)
        except TimeIsUp:  # a moment too late for the handler itself
            self._out_of_reach(lease)
        return outcome or Failed(describe(timed_out(lease)))

    def interrupt(self, lease: Lease) -> None:
        """Raise into the thread that runs this handler, when the thread next runs Python code.

        An operation that the handler has in flight ends first.
        """
        with self._raising:
            lease.interrupted = True  # before the thread is read: see `_out_of_reach`
            thread = lease.thread
            if thread is not None:
                shield.interrupt(thread, lambda: _raise_into(thread, TimeIsUp))

    def _out_of_reach(self, lease: Lease) -> None:
        """Let nothing be raised into this thread for that handler any more.

        Few handlers are interrupted, and all of them end here, so it takes no lock. Either `interrupt` finds no thread,
        or this thread finds that it was interrupted before.
        """
        while True:
            try:
                lease.thread = None
                if lease.interrupted:
                    with self._raising:
                        _raise_into(threading.get_ident(), None)
                return
            except TimeIsUp:
                continue


def _raise_into(thread: int, error: type[BaseException] | None) -> None:
    """Set the exception that a thread raises next, or take it back."""
    raised = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
