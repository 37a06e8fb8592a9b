"""What asks the database several things in a row, written once and run both plainly and from a coroutine.

It is a generator: it yields operations, and is sent their answers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeAlias, TypeVar

from duly.store.op import Op

T = TypeVar("T")

Steps: TypeAlias = Generator[Op[Any], Any, T]


def run(steps: Steps[T], ask: Callable[[Op[Any]], Any]) -> T:
    """Ask one thing after the other, and give what they come to."""
    answer: Any = None
    while True:
        try:
            op = steps.send(answer)
        except StopIteration as end:
            value: T = end.value
            return value
        answer = ask(op)


async def arun(steps: Steps[T], ask: Callable[[Op[Any]], Awaitable[Any]]) -> T:
    """Ask one thing after the other, from a coroutine."""
    answer: Any = None
    while True:
        try:
            op = steps.send(answer)
        except StopIteration as end:
            value: T = end.value
            return value
        answer = await ask(op)
