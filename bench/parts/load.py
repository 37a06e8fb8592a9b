"""The jobs that are measured. Whoever enqueues and whoever works declares the same task under the same name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import msgspec

from duly.app.task import Call, Task
from duly.duly import Duly
from duly.rules import backoff

Kind: TypeAlias = Literal["async", "sync", "mixed", "typed", "capped"]
Note: TypeAlias = Callable[[int], int]

CONCURRENCY = 10
# One of these fails at its first attempt, by plan, in the kinds that do.
FAILING = 100
TENANTS, CAP = 1_000, 5  # of the kind that has a cap for each
SPARE = "x" * 230  # with what surrounds it, the arguments are 256 bytes of JSON


class Line(msgspec.Struct):
    """One line of an order."""

    article: str
    count: int
    price: float


class Order(msgspec.Struct):
    """What a typed job is called with."""

    number: int
    mail: str
    lines: list[Line]


class Receipt(msgspec.Struct):
    """What a typed job returns."""

    number: int
    total: float


class FailedByPlan(Exception):
    """The first attempt of one job in a hundred."""


def declare(app: Duly, kind: Kind, note: Note, *, queue: str = "default") -> Task[..., Any, Any]:
    """Declare the task of a kind; its handler notes each run."""

    async def later(n: int) -> None:
        note(n)

    def at_once(n: int) -> None:
        note(n)

    async def mixed(n: int, spare: str) -> int:
        _fail_once(n, note(n))
        await asyncio.sleep(0.001)
        return n

    async def typed(order: Order) -> Receipt:
        _fail_once(order.number, note(order.number))
        return Receipt(order.number, sum(line.count * line.price for line in order.lines))

    match kind:
        case "async":
            return app.task(queue=queue, name="bench_async")(later)
        case "sync":
            return app.task(queue=queue, name="bench_sync")(at_once)
        case "mixed":
            return app.task(queue=queue, name="bench_mixed", backoff=backoff.fixed(0))(mixed)
        case "typed":
            options: dict[str, Any] = {"key": _key, "backoff": backoff.fixed(0)}
            return app.task(queue=queue, name="bench_typed", **options)(typed)
        case "capped":
            return app.task(queue=queue, name="bench_capped", cap=CAP, cap_key=lambda n: str(n % TENANTS))(later)


def _fail_once(n: int, times: int) -> None:
    if times == 1 and n % FAILING == 0:
        raise FailedByPlan(f"job {n}")


def _key(order: Order) -> str:
    return f"order-{order.number}"


def arguments(kind: Kind, n: int) -> tuple[Any, ...]:
    """Give what the job of this number is called with."""
    match kind:
        case "mixed":
            return n, SPARE
        case "typed":
            return (Order(n, "somebody@example.org", [Line("pencil", 2, 1.5), Line("paper", 1, 4.0)]),)
    return (n,)


def calls(task: Task[..., Any, Any], kind: Kind, numbers: range) -> Iterator[Call[Any]]:
    """Give the calls of jobs by their numbers."""
    return (task.call(*arguments(kind, n)) for n in numbers)


def expected(kind: Kind, jobs: int) -> bytes:
    """Say how often each job must have run in the end."""
    fails = kind in ("mixed", "typed")
    return bytes(2 if fails and n % FAILING == 0 else 1 for n in range(jobs))


def unheard(n: int) -> int:
    """Stand for the tally where jobs are only enqueued."""
    return n
