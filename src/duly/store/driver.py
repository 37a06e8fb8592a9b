"""What every store does the same way: ask, and ask again after a lost answer.

A driver runs an `Op` and commits it as one. Whatever the database or its client raises becomes one of duly's
errors in the driver's `translate`, and nowhere else. An answer that was lost is asked for again here, because
every operation may be repeated without harm.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

from duly.errors import AnswerLost, EnqueueUnknown, StoreRefused
from duly.store.ops import Op, Rows

T = TypeVar("T")

# How long to wait before a lost answer is asked for again, in seconds; after the last the caller decides.
PAUSES = (0.02, 0.1, 0.4)


class Point(NamedTuple):
    """A place between two statements: where tests crash, break and watch."""

    moment: str  # "before" or "after"
    op: str
    section: str  # "commit" for the commit itself
    statement: int


Hook: TypeAlias = Callable[[Point], None]


class Driver(ABC):
    """Runs operations on one database, sync and async."""

    def __init__(self, *, hook: Hook | None = None, pauses: tuple[float, ...] = PAUSES) -> None:
        self.hook = hook
        self._pauses = pauses

    def run(self, op: Op[T]) -> T:
        """Run an operation and read its answer."""
        try:
            answer = op.read(self._rows(op))
        except StoreRefused:
            if op.bare is None:
                raise
            return self.run(op.bare())
        further = op.follow(answer) if op.follow else None
        return self.run(further) if further else answer

    async def arun(self, op: Op[T]) -> T:
        """Run an operation and read its answer, from a coroutine."""
        try:
            answer = op.read(await self._arows(op))
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

    def _rows(self, op: Op[Any]) -> Rows:
        for pause in self._pauses:
            try:
                return self.execute(op)
            except AnswerLost as lost:
                op = repeated(op, lost)
                time.sleep(pause * (0.5 + random.random()))  # noqa: S311
        try:
            return self.execute(op)
        except AnswerLost as lost:
            lost.again = repeated(op, lost)
            raise

    async def _arows(self, op: Op[Any]) -> Rows:
        for pause in self._pauses:
            try:
                return await self.aexecute(op)
            except AnswerLost as lost:
                op = repeated(op, lost)
                await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311
        try:
            return await self.aexecute(op)
        except AnswerLost as lost:
            lost.again = repeated(op, lost)
            raise


def repeated(op: Op[T], lost: AnswerLost) -> Op[T]:
    """Say how `op` is asked again after its answer was lost."""
    if op.once:
        raise EnqueueUnknown(
            f"{op.name}: the answer was lost, and a job with keep=0 and no key leaves no trace to look for; "
            "it may or may not have been enqueued. Give such jobs a key to make this safe"
        ) from lost
    return op.again or op
