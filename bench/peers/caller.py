"""Calls a contestant's enqueue and takes the time: one by one, by many callers at once, in bulk, or now and then.

Imported by scripts that run in a peer's own environment, so it needs nothing but Python. Each function prints one line
of JSON for the parent. `send` takes a job's number; `send_all` takes a list of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

WARM_UP = 32
BULK = 1_000


def enqueue_in_threads(send: Callable[[int], object], calls: int, callers: int) -> None:
    """Let this many threads call `send`, each as soon as its last call returned."""
    taken: list[list[float]] = [[] for _ in range(callers)]
    gate = threading.Barrier(callers + 1)

    def caller(mine: int) -> None:
        for number in range(mine, WARM_UP, callers):
            send(number)  # some have a connection a thread, so that each opens its own here
        gate.wait()
        for number in range(mine, calls, callers):
            begun = time.perf_counter()
            send(number)
            taken[mine].append(time.perf_counter() - begun)

    threads = [threading.Thread(target=caller, args=(mine,)) for mine in range(callers)]
    for thread in threads:
        thread.start()
    gate.wait()
    begun = time.perf_counter()
    for thread in threads:
        thread.join()
    tell_calls(taken, time.perf_counter() - begun, calls)


async def enqueue_in_tasks(send: Callable[[int], Awaitable[object]], calls: int, callers: int) -> None:
    """Let this many coroutines call `send`, each as soon as its last call returned."""
    taken: list[list[float]] = [[] for _ in range(callers)]

    async def caller(mine: int, upto: int, times: list[float]) -> None:
        for number in range(mine, upto, callers):
            begun = time.perf_counter()
            await send(number)
            times.append(time.perf_counter() - begun)

    await asyncio.gather(*(caller(mine, WARM_UP, []) for mine in range(callers)))
    begun = time.perf_counter()
    await asyncio.gather(*(caller(mine, calls, taken[mine]) for mine in range(callers)))
    tell_calls(taken, time.perf_counter() - begun, calls)


def tell_calls(taken: Sequence[Sequence[float]], seconds: float, calls: int) -> None:
    times = sorted(one for mine in taken for one in mine)
    assert len(times) == calls
    told = {
        "calls_per_s": calls / seconds,
        "p50_ms": times[calls // 2] * 1e3,
        "p99_ms": times[min(calls - 1, calls * 99 // 100)] * 1e3,
        "enqueued": calls + WARM_UP,
    }
    print(json.dumps(told), flush=True)


def enqueue_in_bulk(send_all: Callable[[list[int]], object], rows: int) -> None:
    """Send the rows a thousand at a time, once the first, smaller batch has opened what a call needs."""
    send_all(list(range(WARM_UP)))
    begun = time.perf_counter()
    for first in range(0, rows, BULK):
        send_all(list(range(first, min(first + BULK, rows))))
    tell_rows(rows, time.perf_counter() - begun)


async def aenqueue_in_bulk(send_all: Callable[[list[int]], Awaitable[object]], rows: int) -> None:
    """Do the same with a coroutine."""
    await send_all(list(range(WARM_UP)))
    begun = time.perf_counter()
    for first in range(0, rows, BULK):
        await send_all(list(range(first, min(first + BULK, rows))))
    tell_rows(rows, time.perf_counter() - begun)


def tell_rows(rows: int, seconds: float) -> None:
    print(json.dumps({"rows_per_s": rows / seconds, "enqueued": rows + WARM_UP}), flush=True)


def trickle(send: Callable[[int], object], first: str, count: str, gap: str) -> None:
    """Enqueue one job after the other, never in step with anything, and tell when each call began and returned."""
    times = {}
    for number in range(int(first), int(first) + int(count)):
        called = time.time()
        send(number)
        times[number] = (called, time.time())
        time.sleep(float(gap) * random.uniform(0.5, 1.5))
    print(json.dumps(times), flush=True)


async def atrickle(send: Callable[[int], Awaitable[object]], first: str, count: str, gap: str) -> None:
    """Do the same with a coroutine."""
    times = {}
    for number in range(int(first), int(first) + int(count)):
        called = time.time()
        await send(number)
        times[number] = (called, time.time())
        await asyncio.sleep(float(gap) * random.uniform(0.5, 1.5))
    print(json.dumps(times), flush=True)


class StartLog:
    """Where the handlers of `serve` leave each job's number and the time it started."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, job: int) -> None:
        now = time.time()
        os.write(self._file, f"{job} {now}\n".encode())


def main(*commands: Callable[..., Any], run: Callable[[Coroutine[Any, Any, None]], object] = asyncio.run) -> None:
    """Run the command that the parent names; `run` runs those that are coroutines."""
    named = {command.__name__: command for command in commands}
    outcome = named[sys.argv[1]](*sys.argv[2:])
    if asyncio.iscoroutine(outcome):
        run(outcome)
