"""Concurrent writes of one process share one commit.

A caller that finds no commit in flight becomes the leader. It commits its own operation together with those that
wait, answers their callers and hands on. So a lone caller commits at once in its own thread, and the next batch
gathers during each commit. A leader commits only one batch. For coroutines, a thread of the driver leads.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeAlias

from duly.errors import DulyError
from duly.model import Terms
from duly.store.op import Op, Rows
from duly.store.ops import listed

MOST_OPS = 256
MOST_CHARS = 4_000_000


class Word(Enum):
    """The outcome of an operation that was not committed with the batch."""

    LEAD = "lead"  # the caller is the next leader
    ALONE = "alone"  # the batch failed and nothing was written: the caller runs it alone


Outcome: TypeAlias = Rows | BaseException | Word


class Answer:
    """The future of a thread. It has one lock; a future of Python has two, and a queue of waiters."""

    __slots__ = ("_lock", "_outcome")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._outcome: Outcome = ()

    def result(self) -> Outcome:
        """Wait for the answer and return it."""
        with self._lock:
            return self._outcome

    def set_result(self, outcome: Outcome) -> None:
        """Answer, once."""
        self._outcome = outcome
        self._lock.release()

    def done(self) -> bool:
        """Return whether the answer is set."""
        return not self._lock.locked()

    def cancelled(self) -> bool:
        """Return False: a thread waits until it is answered. An interrupted thread removes its operation itself."""
        return False


@dataclass(eq=False, slots=True)
class Waiting:
    """An operation whose caller waits."""

    op: Op[Any]
    # A coroutine waits on its loop, a thread by itself.
    future: asyncio.Future[Outcome] | Answer
    loop: asyncio.AbstractEventLoop | None = None


class Gathering:
    """Operations that wait while a commit is in flight."""

    def __init__(
        self,
        commit: Callable[[Sequence[Op[Any]]], Sequence[Outcome]],
        *,
        lost: Callable[[Op[Any], BaseException], Exception],
        start: Callable[[Callable[[], None]], object],
    ) -> None:
        self._commit = commit
        self._lost = lost  # makes the error of callers whose leader was interrupted
        self._start = start  # runs a function in a thread of the driver
        self._lock = threading.Lock()
        self._waiting: deque[Waiting] = deque()
        self._led = False

    @property
    def led(self) -> bool:
        """Whether a commit is in flight."""
        return self._led

    @property
    def waiting(self) -> bool:
        """Whether operations wait for the commit in flight."""
        return bool(self._waiting)

    def run(self, op: Op[Any]) -> Outcome:
        """Commit `op`, alone or with others. The outcome is never LEAD."""
        with self._lock:
            future = Answer() if self._led else None
            self._led = True
            if future is not None:
                self._waiting.append(Waiting(op, future))
        outcome: Outcome = Word.LEAD
        if future is not None:
            try:
                outcome = future.result()
            except BaseException:  # interrupted
                self._leave(future)
                raise
        return self._lead(op) if outcome is Word.LEAD else outcome

    async def arun(self, op: Op[Any]) -> Outcome:
        """Commit `op` like `run`. If the caller is cancelled before its batch begins, `op` is left out."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        with self._lock:
            if not self._led:
                self._start(self._serve_all)
                self._led = True
            self._waiting.append(Waiting(op, future, loop))
        return await future

    def _lead(self, op: Op[Any]) -> Outcome:
        with self._lock:
            others = self._take(1, size_of(op))
        try:
            return self._serve(op, others)
        finally:
            self._hand_on()

    def _serve_all(self) -> None:
        """Lead for coroutines until no operation waits."""
        while True:
            with self._lock:
                batch = self._take(0, 0)
                if not batch:
                    self._led = False
                    return
            with suppress(BaseException):  # their callers got the error; the next ones need a leader
                self._serve(None, batch)

    def _serve(self, own: Op[Any] | None, others: list[Waiting]) -> Outcome:
        if own is not None and not others:
            return self._commit([own])[0]
        mine = [] if own is None else [own]
        try:
            outcomes = self._commit([*mine, *(waiting.op for waiting in others)])
        except BaseException as error:  # no caller may wait for ever
            answer(others, [self._lost(waiting.op, error) for waiting in others])
            raise
        answer(others, outcomes[len(mine) :])
        return outcomes[0]

    def _take(self, count: int, size: int) -> list[Waiting]:
        """Take the operations that still fit into a batch."""
        taken: list[Waiting] = []
        while self._waiting and count < MOST_OPS:
            waiting = self._waiting[0]
            if waiting.future.cancelled():
                self._waiting.popleft()
                continue
            size += size_of(waiting.op)
            if count and size > MOST_CHARS:
                break
            taken.append(self._waiting.popleft())
            count += 1
        return taken

    def _hand_on(self) -> None:
        """Make the first waiting thread the leader, or a thread of the driver if only coroutines wait."""
        with self._lock:
            for waiting in self._waiting:
                if waiting.loop is None:
                    self._waiting.remove(waiting)
                    waiting.future.set_result(Word.LEAD)
                    return
            self._led = False
            if self._waiting:
                with suppress(RuntimeError):  # no thread can be started: the next caller leads
                    self._start(self._serve_all)
                    self._led = True

    def _leave(self, future: Answer) -> None:
        with self._lock:
            for waiting in self._waiting:
                if waiting.future is future:
                    self._waiting.remove(waiting)
                    return
            leads = future.done() and future.result() is Word.LEAD
        if leads:
            self._hand_on()


def joined(batch: Sequence[Op[Any]]) -> tuple[list[tuple[int, Op[Any]]], list[Op[Any]]]:
    """Join plain enqueues with equal terms into one each, which has no rows. Return the others with their places."""
    others: list[tuple[int, Op[Any]]] = []
    alike: dict[tuple[Terms, int | None], list[Op[Any]]] = {}
    for place, op in enumerate(batch):
        if op.alike is None:
            others.append((place, op))
        else:
            alike.setdefault((op.alike, op.params["now"]), []).append(op)
    return others, [join(ops) for ops in alike.values()]


def join(ops: Sequence[Op[Any]]) -> Op[Any]:
    """Join plain enqueues with equal terms into one."""
    if len(ops) == 1:
        return ops[0]
    first, payloads = ops[0], ",".join(filter(None, map(listed, ops)))
    again = first.again
    assert again is not None
    # `again` has the parameters of a list, also for a single job. A test may set the time.
    params = {**again.params, "now": first.params["now"], "payloads": f"{{{payloads}}}"}
    return replace(first, sections=("enqueue",), params=params, repeat=None)  # each caller repeats its own


def size_of(op: Op[Any]) -> int:
    """Return roughly how long the text of an operation is."""
    params = op.params
    if op.alike is not None and "payload" in params:
        return len(params["payload"]) + len(params["envelope"] or "")
    return sum(len(value) for value in params.values() if isinstance(value, str))


def own_error(error: DulyError) -> DulyError:
    """Copy an error, so that each caller of a batch raises its own."""
    own = type(error)(str(error))
    own.__cause__ = error.__cause__
    return own


def rows_of(outcome: Outcome) -> Rows:
    """Return the rows of an operation, or raise its error."""
    if isinstance(outcome, BaseException):
        raise outcome
    assert not isinstance(outcome, Word)
    return outcome


def answer(waiting: Sequence[Waiting], outcomes: Sequence[Outcome]) -> None:
    """Answer threads one by one, and all coroutines of a loop in one call: each call wakes the loop."""
    loops: dict[asyncio.AbstractEventLoop, list[tuple[Any, Outcome]]] = {}
    for one, outcome in zip(waiting, outcomes, strict=True):
        if one.loop is None:
            one.future.set_result(outcome)
        else:
            loops.setdefault(one.loop, []).append((one.future, outcome))
    for loop, answers in loops.items():
        with suppress(RuntimeError):  # the loop was closed, and its coroutines with it
            loop.call_soon_threadsafe(_tell, answers)


def _tell(answers: list[tuple[asyncio.Future[Outcome], Outcome]]) -> None:
    for future, outcome in answers:
        if not future.done():
            future.set_result(outcome)
