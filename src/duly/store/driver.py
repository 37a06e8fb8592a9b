"""What every store does the same way: ask, and ask again after a lost answer.

A driver runs an `Op` and commits it as one. Whatever the database or its client raises becomes one of duly's
errors in the driver's `translate`, and nowhere else. An answer that was lost is asked for again here, because
every operation may be repeated without harm, by its `again` where that differs.

A worker with nothing to do watches: it is called when jobs may have become ready, at once by what this driver runs,
and soon by what other processes do. That is a hint, polling is the truth.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from duly.errors import AnswerLost, EnqueueUnknown, StoreRefused, StoreUnavailable
from duly.store.op import Op, Rows
from duly.store.uninterrupted import shield

T = TypeVar("T")
log = logging.getLogger("duly.store")

# How long to wait before a lost answer is asked for again, in seconds; after the last the caller decides.
PAUSES = (0.02, 0.1, 0.4)


class Point(NamedTuple):
    """A place between two statements: where tests crash, break and watch."""

    moment: str  # "before" or "after"
    op: str
    section: str  # "commit" for the commit itself
    statement: int


Hook: TypeAlias = Callable[[Point], None]


@dataclass(frozen=True, slots=True)
class About:
    """What a worker says of its database in its first lines."""

    store: str
    where: str
    engine: str
    schema: str
    durability: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at, and what to do where it is not well."""

    name: str
    level: Literal["ok", "warning", "error"]
    text: str
    remedy: str = ""


class Watch:
    """Calls back when jobs may have become ready. This one hears only what its own driver runs.

    Armed, a watch hears of other processes too. A worker arms it, claims once more, and sleeps until it is called or
    has to poll. Called, it claims and arms it again. Neither arming an armed one nor a disarmed one costs anything.
    """

    def __init__(self, driver: Driver, on_change: Callable[[], None]) -> None:
        self._driver = driver
        self._on_change = on_change
        self._closed = False

    def arm(self, *, fruitful: bool = False) -> None:
        """From the return on, have changes by other processes call back. `fruitful`: the last call led to work."""

    def rearm(self, *, fruitful: bool = False) -> bool:
        """Arm at once after a call; says whether nothing can have come since that. If not, arm and claim once more."""
        return True

    def disarm(self) -> None:
        """Hear no more of other processes."""

    def close(self) -> None:
        """Call back no more, and let go of everything."""
        self._closed = True
        self._driver._forget(self)
        self.rest()

    def rest(self) -> bool:
        """Let go of everything until the next arming; tells whether it was armed."""
        return False

    def abandon(self) -> None:
        """Forget everything without closing it, in a forked child."""

    def tell(self) -> None:
        """Call back, from any thread."""
        try:
            self._on_change()
        except Exception:  # a loop that has gone, say: what woke the watch must not fail for it
            log.debug("watch.callback_failed", exc_info=True)


class Pace:
    """Keeps calls apart, the further the longer they keep coming: who has nothing to do must not burn."""

    LEAST, MOST, QUIET = 0.001, 0.02, 0.01

    def __init__(self) -> None:
        self._gap = self.LEAST
        self._last = 0.0

    def pause(self) -> float:
        """Say how long to wait before the next call, in seconds."""
        since = time.monotonic() - self._last
        self._gap = min(self._gap * 1.5, self.MOST) if since < self.QUIET else self.LEAST
        return max(0.0, self._gap - since)

    def fruitful(self) -> None:
        """Note that the last call was worth it: the next one may come soon."""
        self._gap = self.LEAST
        self._last = 0.0

    def called(self) -> None:
        """Note that a call was made."""
        self._last = time.monotonic()


class Driver(ABC):
    """Runs operations on one database, sync and async."""

    one_writer = False  # operations wait for each other, and what waits together is committed together

    def __init__(self, *, hook: Hook | None = None, pauses: tuple[float, ...] = PAUSES) -> None:
        self.hook = hook
        # How often the database could not be reached or used: what others failed to do meanwhile proves nothing.
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
        """Let go of the database."""

    def about(self) -> About:
        """Say which database this is, how it is set, and that it can be used."""
        raise NotImplementedError

    def examine(self, *, deep: bool = False) -> list[Finding]:
        """Look at all that may be wrong with this database; `deep` reads all of it where that is a way to know."""
        raise NotImplementedError

    def watch(self, on_change: Callable[[], None]) -> Watch:
        """Have `on_change` called, from any thread, whenever jobs may have become ready."""
        watch = self._watch(on_change)
        with self._one_watch:
            self._watches = (*self._watches, watch)
        return watch

    def woke(self) -> None:
        """Call every watch: jobs may be ready."""
        for watch in self._watches:
            watch.tell()

    def mind_wal(self) -> None:  # noqa: B027 (most stores have none)
        """Keep a write-ahead log short after a commit that was not ours."""

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
            except StoreUnavailable:
                if lost is None:
                    raise
                break
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
            except StoreUnavailable:
                if lost is None:
                    raise
                break
            if pause is not None:
                await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311
        raise _unknown(op, lost)


def _unknown(again: Op[Any], lost: AnswerLost | None) -> AnswerLost:
    """Say that it may have been written, also where the repetition wrote nothing for sure."""
    assert lost is not None
    lost.again = again
    return lost


def repeated(op: Op[T], lost: AnswerLost) -> Op[T]:
    """Say how `op` is asked again after its answer was lost."""
    if op.once:
        raise EnqueueUnknown(
            f"{op.name}: the answer was lost, and a job with keep=0 and no key leaves no trace to look for; "
            "it may or may not have been enqueued. Give such jobs a key to make this safe"
        ) from lost
    return op.again or op
