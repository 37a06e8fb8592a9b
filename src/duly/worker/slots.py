"""The slots of a worker: claimed jobs wait for one, and their handlers run there.

Async handlers run on the event loop, sync ones in threads, isolated ones in child processes. When a job ends, the next
one of the same kind runs in the same consumer or thread. It needs no task and no wake-up of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from duly.app.definition import Kind
from duly.app.lease import Lease
from duly.model import Outcome
from duly.worker.children import Children
from duly.worker.held import Held
from duly.worker.prefetch import LATE_SECONDS
from duly.worker.runner import Runner, unforeseen
from duly.worker.shared import Shared
from duly.worker.threads import Threads

# How long handlers may run before the rest of the event loop has its turn.
FAIR_SECONDS = 0.0005


class Slots:
    """Runs claimed jobs in the order of the claim."""

    def __init__(
        self,
        shared: Shared,
        held: Held,
        children: Children,
        runner: Runner,
        *,
        on_end: Callable[[Lease, Outcome], None],
    ) -> None:
        self._shared = shared
        self._clock = shared.clock
        self._children = children
        self._runner = runner
        self._on_end = on_end
        self._waiting = held.waiting
        self._running = 0
        self._lock = threading.Lock()  # guards `_running`, which threads change too
        self._resting: list[asyncio.Future[Lease]] = []
        self._loop_ran_at = 0.0
        self._noting_loop = False
        self.threads = Threads(shared.concurrency, shared.spawn, self._run_in_thread, runner)

    @property
    def free(self) -> int:
        """The number of handlers that could begin now."""
        return self._shared.concurrency - self._running

    @property
    def oldest(self) -> Lease | None:
        """The job that has waited longest for a slot."""
        try:
            return self._waiting[0]
        except IndexError:  # a thread has just taken it
            return None

    def put(self, lease: Lease) -> None:
        """Let a job wait for a slot; `fill` gives it one."""
        self._waiting.append(lease)

    def fill(self) -> None:
        """Start waiting jobs while there are free slots."""
        while True:
            with self._lock:
                if not self._waiting or self._running >= self._shared.concurrency:
                    return
                self._running += 1
            lease = self._take()
            if lease is None:  # a thread took it
                self._give_slot_back()
                return
            self._start(lease)

    def take_back(self, now: float) -> Lease | None:
        """Return the job that has waited longest, if that is too long; it waits no more."""
        if not self._is_late(self.oldest, now):
            return None
        lease = self._take()
        if lease is None or self._is_late(lease, now):
            return lease
        self._waiting.appendleft(lease)  # a thread took the late one
        self.fill()
        return None

    @staticmethod
    def _is_late(lease: Lease | None, now: float) -> bool:
        return lease is not None and lease.claimed_at + LATE_SECONDS <= now

    def _take(self) -> Lease | None:
        """Take the next job. No lock: all threads that end jobs would wait for it."""
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def _start(self, lease: Lease) -> None:
        match lease.definition.kind:
            case Kind.ASYNC:
                self._consumed(lease)
            case Kind.THREAD:
                self.threads.put(lease)
            case Kind.PROCESS:
                self._shared.in_background(self._run_in_child(lease))

    def _consumed(self, lease: Lease) -> None:
        while self._resting:
            consumer = self._resting.pop()
            if not consumer.done():  # it may have been cancelled
                consumer.set_result(lease)
                return
        self._shared.in_background(self._consume(lease))

    async def _consume(self, lease: Lease) -> None:
        """Run async handlers one after the other until the worker stops."""
        consumer = asyncio.current_task()
        begun_at = self._clock()
        while True:
            lease.begun_at = begun_at
            try:
                outcome = await self._runner.arun(lease, consumer)
            except asyncio.CancelledError as error:
                if self._shared.closing:
                    raise
                outcome = unforeseen(lease, error)  # from a task that the handler left running
            self._on_end(lease, outcome)
            if self._shared.closing:
                return
            following, resting = self._following(lease), None
            try:
                if following is None:
                    resting = asyncio.get_running_loop().create_future()
                    self._resting.append(resting)
                    following = await resting
                    begun_at = self._clock()
                elif lease.ended_at - self._loop_ran_at > FAIR_SECONDS:
                    self._yield_soon()
                    await asyncio.sleep(0)
                    begun_at = self._clock()
                else:
                    begun_at = lease.ended_at  # saves a reading of the clock
            except asyncio.CancelledError:
                self._hand_on(following, resting)
                raise
            lease = following

    def _hand_on(self, lease: Lease | None, resting: asyncio.Future[Lease] | None) -> None:
        """Start elsewhere the job that a cancelled consumer was about to run."""
        if resting is not None and resting.done() and not resting.cancelled():
            lease = resting.result()
        if lease is not None and not self._shared.closing:
            self._start(lease)

    def _yield_soon(self) -> None:
        """Note when the event loop begins its next round. All consumers share that time: each would yield too late."""
        if not self._noting_loop:
            self._noting_loop = True
            asyncio.get_running_loop().call_soon(self._note_loop)

    def _note_loop(self) -> None:
        self._noting_loop = False
        self._loop_ran_at = self._clock()

    def _run_in_thread(self, lease: Lease) -> Lease | None:
        """Run a sync handler in this thread. Returns the next job for this thread."""
        lease.begun_at = self._clock()
        self._on_end(lease, self.threads.run(lease))
        return self._following(lease)

    async def _run_in_child(self, lease: Lease) -> None:
        lease.begun_at = self._clock()
        self._on_end(lease, await self._children.run(lease))
        if (following := self._following(lease)) is not None:
            self._start(following)

    def _following(self, ended: Lease) -> Lease | None:
        """Pass a slot on to the next job, or free it. Returns that job if it runs in the same place."""
        following = self._take()
        if following is None:
            self._give_slot_back()
        elif following.definition.kind is ended.definition.kind:
            return following
        else:
            self._shared.call_soon(self._start, following)
        return None

    def _give_slot_back(self) -> None:
        with self._lock:
            self._running -= 1
            waiting = bool(self._waiting)  # a job may have come before the slot was free
        if waiting:
            self._shared.call_soon(self.fill)
