"""Runs several operations in a row, each chosen by the answer before it; written once for sync and async callers.

A sequence is a generator: it yields operations and receives their answers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeAlias, TypeVar

from duly.store.op import Op

T = TypeVar("T")

Steps: TypeAlias = Generator[Op[Any], Any, T]


def run(steps: Steps[T], ask: Callable[[Op[Any]], Any]) -> T:
    """Run a sequence, and return its result."""
    answer: Any = None
    while True:
        try:
            op = steps.send(answer)
        except StopIteration as end:
            value: T = end.value
            return value
        answer = ask(op)


async def arun(steps: Steps[T], ask: Callable[[Op[Any]], Awaitable[Any]]) -> T:
    """Run a sequence from a coroutine, and return its result."""
    answer: Any = None
    while True:
        try:
            op = steps.send(answer)
        except StopIteration as end:
            value: T = end.value
            return value
        answer = await ask(op)
