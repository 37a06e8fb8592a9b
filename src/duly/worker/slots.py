"""The slots of a worker: where claimed jobs wait for one, and where their handlers run.

Async handlers run on the event loop, sync ones in threads, isolated ones in child processes; together no more than
there are slots. Consumers and threads live long: whoever ends a job takes the next one that runs in the same place, so
that a job costs neither a task nor a wake-up of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from duly.app.definition import Kind
from duly.app.lease import Lease
from duly.worker import runner
from duly.worker.prefetch import LATE_SECONDS
from duly.worker.threads import Threads

if TYPE_CHECKING:
    from duly.worker.worker import Worker

T = TypeVar("T")

# How long handlers run on without a look at the rest of the event loop.
FAIR_SECONDS = 0.0005


class Slots:
    """Runs what was claimed, in the order of the claim."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._clock = worker.clock
        self._waiting: deque[Lease] = deque()
        self._running = 0
        self._lock = threading.Lock()  # of the number above, which threads change too
        self._resting: list[asyncio.Future[Lease]] = []
        self._background: set[asyncio.Task[Any]] = set()
        self._looked_up_at = 0.0  # when the event loop last had its turn
        self._looking_up = False
        self._closing = False
        self.threads = Threads(worker.concurrency, worker.spawn, self._run_in_thread)

    @property
    def free(self) -> int:
        """How many handlers could begin now."""
        return self._worker.concurrency - self._running

    @property
    def is_closing(self) -> bool:
        """Whether nothing more is taken on."""
        return self._closing

    @property
    def waiting(self) -> int:
        """How many jobs wait for a slot."""
        return len(self._waiting)

    @property
    def oldest(self) -> Lease | None:
        """The job that has waited longest for a slot."""
        try:
            return self._waiting[0]
        except IndexError:  # a thread may have taken it just now
            return None

    def put(self, lease: Lease) -> None:
        """Have a job wait for a slot; `fill` gives it one."""
        self._waiting.append(lease)

    def fill(self) -> None:
        """Start what waits, as far as there are slots."""
        while True:
            with self._lock:
                if not self._waiting or self._running >= self._worker.concurrency:
                    return
                self._running += 1
            lease = self._take()
            if lease is None:  # a thread was first
                self._give_slot_back()
                return
            self._start(lease)

    def take_back(self, now: float) -> Lease | None:
        """Give up the job that has waited longest, if that is too long."""
        if not self._is_late(self.oldest, now):
            return None
        lease = self._take()
        if lease is None or self._is_late(lease, now):
            return lease
        self._waiting.appendleft(lease)  # a thread was first and took the late one
        self.fill()
        return None

    @staticmethod
    def _is_late(lease: Lease | None, now: float) -> bool:
        return lease is not None and lease.claimed_at + LATE_SECONDS <= now

    def _take(self) -> Lease | None:
        """Take the next job, without a lock: threads that all end jobs must not wait for each other here."""
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something beside the turns, until it ends or the worker does."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def closing(self) -> set[asyncio.Task[Any]]:
        """Take on nothing more, and give the tasks that are still there."""
        self._closing = True
        return set(self._background)

    def _start(self, lease: Lease) -> None:
        match lease.definition.kind:
            case Kind.ASYNC:
                self._consumed(lease)
            case Kind.THREAD:
                self.threads.put(lease)
            case Kind.PROCESS:
                self.in_background(self._run_in_child(lease))

    def _consumed(self, lease: Lease) -> None:
        while self._resting:
            consumer = self._resting.pop()
            if not consumer.done():  # else somebody cancelled it
                consumer.set_result(lease)
                return
        self.in_background(self._consume(lease))

    async def _consume(self, lease: Lease) -> None:
        """Run async handlers, one after the other, for as long as the worker lives."""
        consumer = asyncio.current_task()
        begun_at = self._clock()
        while True:
            lease.begun_at = begun_at
            try:
                outcome = await runner.arun(lease, consumer)
            except asyncio.CancelledError as error:
                if self._closing:
                    raise
                outcome = runner.unforeseen(lease, error)  # by what it left behind, after it had ended
            self._worker.ended(lease, outcome)
            if self._closing:
                return
            following, resting = self._following(lease), None
            try:
                if following is None:
                    resting = asyncio.get_running_loop().create_future()
                    self._resting.append(resting)
                    following = await resting
                    begun_at = self._clock()
                elif lease.ended_at - self._looked_up_at > FAIR_SECONDS:
                    self._look_up()
                    await asyncio.sleep(0)
                    begun_at = self._clock()
                else:
                    begun_at = lease.ended_at  # no need to read the clock once more
            except asyncio.CancelledError:
                self._hand_on(following, resting)
                raise
            lease = following

    def _hand_on(self, lease: Lease | None, resting: asyncio.Future[Lease] | None) -> None:
        """Start elsewhere what a consumer was about to run when somebody else cancelled it."""
        if resting is not None and resting.done() and not resting.cancelled():
            lease = resting.result()
        if lease is not None and not self._closing:
            self._start(lease)

    def _look_up(self) -> None:
        """Have the time noted when the event loop begins its next round, which all consumers then share."""
        if not self._looking_up:
            self._looking_up = True
            asyncio.get_running_loop().call_soon(self._looked_up)

    def _looked_up(self) -> None:
        self._looking_up = False
        self._looked_up_at = self._clock()

    def _run_in_thread(self, lease: Lease) -> Lease | None:
        """Run a sync handler in this thread, and give the next one for it."""
        lease.begun_at = self._clock()
        self._worker.ended(lease, self.threads.run(lease))
        return self._following(lease)

    async def _run_in_child(self, lease: Lease) -> None:
        lease.begun_at = self._clock()
        self._worker.ended(lease, await self._worker.children.run(lease))
        if (following := self._following(lease)) is not None:
            self._start(following)

    def _following(self, ended: Lease) -> Lease | None:
        """Hand a slot on, or back, when its job has ended; gives the next one for it if that runs in the same place."""
        following = self._take()
        if following is None:
            self._give_slot_back()
        elif following.definition.kind is ended.definition.kind:
            return following
        else:
            self._worker.call_soon(self._start, following)
        return None

    def _give_slot_back(self) -> None:
        with self._lock:
            self._running -= 1
            waiting = bool(self._waiting)  # put there before the slot was free
        if waiting:
            self._worker.call_soon(self.fill)
