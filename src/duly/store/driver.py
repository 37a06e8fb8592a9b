"""The base of all drivers: runs operations, and repeats one whose answer was lost.

A driver runs an `Op` and commits it as one. Errors of the database and its client become errors of duly in the
driver's `translate`, and nowhere else. After a lost answer the operation is sent again, because each can be repeated
without harm; if the repetition differs, `again` has it.

An idle worker watches. It is called when jobs may have become ready: at once after operations of this driver, and soon
after commits of other processes. The call is only a hint, so workers also poll.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from duly.errors import AnswerLost, EnqueueUnknown, StoreError, StoreRefused
from duly.store.op import Op, Rows
from duly.store.uninterrupted import shield

T = TypeVar("T")
log = logging.getLogger("duly.store")

# The pauses before each repetition after a lost answer, in seconds. After the last, the error is raised.
PAUSES = (0.02, 0.1, 0.4)


class Point(NamedTuple):
    """A place between two statements, where tests crash, fail and watch."""

    moment: str  # "before" or "after"
    op: str
    section: str  # "commit" for the commit itself
    statement: int


Hook: TypeAlias = Callable[[Point], None]


@dataclass(frozen=True, slots=True)
class About:
    """The facts about its database that a worker logs when it starts."""

    store: str
    where: str
    engine: str
    schema: str
    durability: str


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, and what to do about it."""

    name: str
    level: Literal["ok", "warning", "error"]
    text: str
    remedy: str = ""


class Watch:
    """Calls back when jobs may have become ready. This class notices only operations of its own driver.

    While armed, a watch notices other processes too. A worker arms it, claims once more, and sleeps until it is called
    or polls. After a call it claims, and arms the watch again. Arming twice or disarming twice costs nothing.
    """

    def __init__(self, driver: Driver, on_change: Callable[[], None]) -> None:
        self._driver = driver
        self._on_change = on_change
        self._closed = False

    def arm(self, *, fruitful: bool = False) -> None:
        """Call back for changes by other processes from now on. `fruitful`: the last call led to work."""

    def rearm(self, *, fruitful: bool = False) -> bool:
        """Arm after a call. Return whether no change can have been missed since; if not, arm and claim once more."""
        return True

    def disarm(self) -> None:
        """Stop calling back for other processes."""

    def close(self) -> None:
        """Stop calling back, and release all resources."""
        self._closed = True
        self._driver._forget(self)
        self.rest()

    def rest(self) -> bool:
        """Release all resources until the next arming. Return whether the watch was armed."""
        return False

    def abandon(self) -> None:
        """Drop all resources without closing them, in a forked child."""

    def tell(self) -> None:
        """Call back, from any thread."""
        try:
            self._on_change()
        except Exception:  # an event loop that was closed, say: the operation that called must not fail for it
            log.debug("watch.callback_failed", exc_info=True)


class Pace:
    """Limits how often calls are made: the gap grows while they keep coming, so that an idle worker stays idle."""

    LEAST, MOST, QUIET = 0.001, 0.02, 0.01

    def __init__(self) -> None:
        self._gap = self.LEAST
        self._last = 0.0

    def pause(self) -> float:
        """Return how long to wait before the next call, in seconds."""
        since = time.monotonic() - self._last
        self._gap = min(self._gap * 1.5, self.MOST) if since < self.QUIET else self.LEAST
        return max(0.0, self._gap - since)

    def fruitful(self) -> None:
        """Note that the last call led to work: the next one may come soon."""
        self._gap = self.LEAST
        self._last = 0.0

    def called(self) -> None:
        """Note that a call was made."""
        self._last = time.monotonic()


class Driver(ABC):
    """Runs operations on one database, sync and async."""

    one_writer = False  # whether writes wait for each other and then share a commit
    far = False  # whether each request has its price, so that an idle worker sends one a second
    to_read = False  # whether a server that takes no writes will do

    def __init__(self, *, hook: Hook | None = None, pauses: tuple[float, ...] = PAUSES) -> None:
        self.hook = hook
        # How often the database could not be used. Other workers may have missed their heartbeats for the same reason.
        self.failures = 0
        self._pauses = pauses
        self._watches: tuple[Watch, ...] = ()
        self._one_watch = threading.Lock()

    def run(self, op: Op[T]) -> T:
        """Run an operation and read its answer."""
        with shield.whole():
            return self._answer(op)

    def _answer(self, op: Op[T]) -> T:
        try:
            rows = self._rows(op)
            if op.wakes:
                self.woke()
            answer = op.read(rows)
        except StoreRefused:
            if op.bare is None:
                raise
            return self._answer(op.bare())
        further = op.follow(answer) if op.follow else None
        return self._answer(further) if further else answer

    async def arun(self, op: Op[T]) -> T:
        """Run an operation and read its answer, from a coroutine."""
        try:
            rows = await self._arows(op)
            if op.wakes:
                self.woke()
            answer = op.read(rows)
        except StoreRefused:
            if op.bare is None:
                raise
            return await self.arun(op.bare())
        further = op.follow(answer) if op.follow else None
        return await self.arun(further) if further else answer

    @abstractmethod
    def execute(self, op: Op[Any]) -> Rows:
        """Run `op` once, commit it, and return the rows of all its statements."""

    @abstractmethod
    async def aexecute(self, op: Op[Any]) -> Rows:
        """Run `op` once like `execute`, without blocking the event loop."""

    @abstractmethod
    def close(self) -> None:
        """Close the database."""

    def about(self) -> About:
        """Connect, and return which database this is and how it is set."""
        raise NotImplementedError

    def examine(self, *, deep: bool = False) -> list[Finding]:
        """Check this database for everything `duly doctor` reports; `deep` reads all of it, if that can find more."""
        raise NotImplementedError

    def watch(self, on_change: Callable[[], None]) -> Watch:
        """Return a watch that calls `on_change`, from any thread, whenever jobs may have become ready."""
        watch = self._watch(on_change)
        with self._one_watch:
            self._watches = (*self._watches, watch)
        return watch

    def woke(self) -> None:
        """Call every watch: jobs may be ready."""
        for watch in self._watches:
            watch.tell()

    def mind_wal(self) -> None:  # noqa: B027 (most stores have none)
        """Keep a write-ahead log short after a commit on a caller's connection."""

    def _watch(self, on_change: Callable[[], None]) -> Watch:
        return Watch(self, on_change)

    def _abandon_watches(self) -> None:
        for watch in self._watches:
            watch.abandon()
        self._watches = ()
        self._one_watch = threading.Lock()

    def _forget(self, watch: Watch) -> None:
        with self._one_watch:
            self._watches = tuple(other for other in self._watches if other is not watch)

    def _rows(self, op: Op[Any]) -> Rows:
        lost: AnswerLost | None = None
        for pause in (*self._pauses, None):
            try:
                return self.execute(op)
            except AnswerLost as error:
                lost, op = error, repeated(op, error)
            except StoreError as error:
                if lost is None or isinstance(error, StoreRefused):
                    raise
                raise _unknown(op, lost, error) from error
            if pause is not None:
                time.sleep(pause * (0.5 + random.random()))  # noqa: S311
        raise _unknown(op, lost)

    async def _arows(self, op: Op[Any]) -> Rows:
        lost: AnswerLost | None = None
        for pause in (*self._pauses, None):
            try:
                return await self.aexecute(op)
            except AnswerLost as error:
                lost, op = error, repeated(op, error)
            except StoreError as error:
                if lost is None or isinstance(error, StoreRefused):
                    raise
                raise _unknown(op, lost, error) from error
            if pause is not None:
                await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311
        raise _unknown(op, lost)


def _unknown(again: Op[Any], lost: AnswerLost | None, error: StoreError | None = None) -> AnswerLost:
    """Return the lost answer, even if the repetition certainly wrote nothing: the first try may have."""
    assert lost is not None
    lost.again = again
    if error is not None:
        lost.args = (f"{lost}; the repetition failed: {error}",)
    return lost


def repeated(op: Op[T], lost: AnswerLost) -> Op[T]:
    """Return the operation to send after the answer to `op` was lost."""
    if op.once:
        raise EnqueueUnknown(
            f"{op.name}: the answer was lost, so the job may or may not have been enqueued. A job with keep=0 and no "
            "key leaves no trace to look for. Give such jobs a key to make this safe"
        ) from lost
    return replace(op.again or op, repeated=True)
