"""Measures enqueue, bulk enqueue, drain and pick-up. A worker is a process that reports every run of every job."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from duly.app.task import Task
from duly.bench.place import BenchFailed, Place, clock_ahead_s
from duly.bench.report import Figure, Spread, percentile
from duly.duly import Duly

CONCURRENCY = 10
BULK = 1_000
WARM_UP = 20
CALM_SECONDS = 0.5
LIMIT_SECONDS = 2.0  # on a slow disk there are fewer calls, and not more time
LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Plan:
    """How much is measured. `ended` is called after each part of a repetition."""

    repeat: int = 3
    singles: int = 600
    callers: int = 16
    rows: int = 20_000
    jobs: int = 20_000
    pick_ups: int = 100
    ended: Callable[[], object] = lambda: None


# Enough to see that it works, not to compare by.
QUICK: dict[str, Any] = {"singles": 100, "rows": 4_000, "jobs": 2_000, "pick_ups": 20}


class Orders(msgspec.Struct):
    """The task of one worker: it drains the queue, or runs until every job has run."""

    arguments: dict[str, Any]
    jobs: int
    drain: bool


@dataclass(frozen=True)
class Measure:
    """One quantity of a part: its name, its unit, and its place in the table."""

    name: str
    unit: str
    keep: str = "kept"
    short: str = ""


Samples = dict[Measure, float]


def measured(place: Place, plan: Plan, only: Collection[str] = "abce") -> Iterator[Figure]:
    """Run the parts in every repetition, forwards and backwards in turn, and give the figures of each."""
    found: dict[tuple[str, Measure], list[float]] = defaultdict(list)
    letters = [letter for letter in PARTS if letter in only]
    for turn in range(plan.repeat):
        for letter in letters if turn % 2 == 0 else letters[::-1]:
            place.fresh()
            for measure, value in PARTS[letter](place, plan).items():
                found[letter, measure].append(value)
            plan.ended()
    for (letter, one), samples in sorted(found.items(), key=lambda item: item[0][0]):
        yield Figure(letter, place.store, one.name, one.unit, Spread(tuple(samples)), one.keep, one.short)


def enqueued(place: Place, plan: Plan) -> Samples:
    """Time calls that return when their job is durable: by one caller, then by many coroutines at once."""
    with opened(place) as (app, task):
        _time_each(task.enqueue, WARM_UP)
        alone = _time_each(task.enqueue, plan.singles)
        many, seconds = asyncio.run(_many_coroutines(task, plan))
        see_all(app, WARM_UP + len(alone) + many, "ready")
    callers = f"{plan.callers} callers"
    return {
        Measure("single enqueue, 1 caller", "calls/s", short="enqueue"): len(alone) / sum(alone),
        Measure("single enqueue, 1 caller, p50", "ms"): percentile(alone, 0.5) * 1e3,
        Measure("single enqueue, 1 caller, p99", "ms"): percentile(alone, 0.99) * 1e3,
        Measure(f"single enqueue, {callers}", "calls/s", short=callers): many / seconds,
    }


def _time_each(call: Callable[[int], object], count: int) -> list[float]:
    taken: list[float] = []
    end_at = time.perf_counter() + LIMIT_SECONDS
    begun = 0.0
    while len(taken) < count and begun < end_at:
        begun = time.perf_counter()
        call(len(taken))
        taken.append(time.perf_counter() - begun)
    return taken


async def _many_coroutines(task: Task[..., Any, Any], plan: Plan) -> tuple[int, float]:
    """Enqueue from many coroutines at once; returns the number of calls and their seconds."""
    begun = time.perf_counter()

    async def caller() -> int:
        for number in range(plan.singles // 2):
            if time.perf_counter() > begun + LIMIT_SECONDS:
                return number
            await task.aenqueue(number)
        return plan.singles // 2

    made = await asyncio.gather(*(caller() for _ in range(plan.callers)))
    return sum(made), time.perf_counter() - begun


def enqueued_in_bulk(place: Place, plan: Plan) -> Samples:
    """Time `enqueue_many`, a thousand jobs a commit."""
    with opened(place) as (app, task):
        task.enqueue_many(task.call(n) for n in range(BULK))
        begun = time.perf_counter()
        task.enqueue_many(task.call(n) for n in range(plan.rows))
        seconds = time.perf_counter() - begun
        see_all(app, BULK + plan.rows, "ready")
    return {Measure("bulk enqueue, 1,000 a commit", "rows/s", short="bulk"): plan.rows / seconds}


def drained(place: Place, plan: Plan) -> Samples:
    """Time one worker, from the first handler's start to the last recorded finish."""
    name = f"drain of {plan.jobs:,} no-op jobs, async"
    found = {}
    for keep in ("kept", "keep=0"):
        place.fresh()
        measure = Measure(name, "jobs/s", keep, f"drain {keep}")
        found[measure] = plan.jobs / drain_seconds(place, plan.jobs, keep=keep == "kept")
    return found


def drain_seconds(place: Place, jobs: int, *, keep: bool) -> float:
    """Fill the queue while a worker starts, and let it drain. The last job is kept: it has the time of the end."""
    with Child(Orders(place.arguments, jobs, drain=True)) as child, opened(place) as (app, task):
        using = task if keep else task.using(keep=0)
        using.enqueue_many(using.call(n) for n in range(jobs - 1))
        task.enqueue(jobs - 1)
        child.go()
        starts = child.starts()
        ended = see_all(app, jobs if keep else 1, "succeeded")
        return max(ended - clock_ahead_s(app), *starts) - min(starts)


def picked_up(place: Place, plan: Plan) -> Samples:
    """Time from the return of an enqueue to the start of its handler, in an idle worker of another process."""
    jobs = plan.pick_ups + 1
    with Child(Orders(place.arguments, jobs, drain=False)) as child, opened(place) as (_, task):
        child.go()
        returned = []
        for number in range(jobs):
            task.enqueue(number)
            returned.append(time.time())
            # Not in step with any interval of the worker; the first job only warms up.
            time.sleep(CALM_SECONDS if number == 0 else random.uniform(0.01, 0.03))  # noqa: S311
        waits = [(start - back) * 1e3 for start, back in zip(child.starts(), returned, strict=True)][1:]
    return {
        Measure("idle pick-up, across processes, p50", "ms", short="pick-up"): percentile(waits, 0.5),
        Measure("idle pick-up, across processes, p95", "ms"): percentile(waits, 0.95),
        Measure("idle pick-up, across processes, p99", "ms"): percentile(waits, 0.99),
    }


PARTS = {"a": enqueued, "b": enqueued_in_bulk, "c": drained, "e": picked_up}


@contextmanager
def opened(place: Place) -> Iterator[tuple[Duly, Task[..., Any, Any]]]:
    """Open an app with the task that is measured."""
    with closing(place.app()) as app:
        yield app, declare(app, lambda n: None)


def declare(app: Duly, note: Callable[[int], None]) -> Task[..., Any, Any]:
    """Define the task; its handler calls `note` with the number of the job."""

    async def noop(n: int) -> None:
        note(n)

    return app.task(name="bench_noop")(noop)


def see_all(app: Duly, expected: int, state: str) -> float:
    """Raise unless exactly these jobs exist, all in one state; returns the time of the last finish, in seconds."""
    found, last_at, before = 0, 0, None
    while page := app.list(before=before, limit=BULK):
        before = page[-1].id
        found += sum(job.state == state for job in page)
        last_at = max(last_at, *(job.finished_at or 0 for job in page))
        if wrong := [job for job in page if job.state != state or job.attempt != (state == "succeeded")]:
            raise BenchFailed(f"a job is {wrong[0].state} after {wrong[0].attempt} attempts: expected {state}")
    if found != expected:
        raise BenchFailed(f"{found} jobs are {state}: expected {expected}")
    return last_at / 1000


class Child:
    """One worker process. It is killed when the `with` ends."""

    def __init__(self, orders: Orders) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from duly.bench.measure import work; work()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if not name.startswith("DULY_")},
            start_new_session=True,  # the bench ends it after Ctrl-C
        )
        # By stdin, because the URL may hold a password and arguments are visible to every user.
        self._send(msgspec.json.encode(orders))

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *failure: object) -> None:
        self._process.kill()
        with suppress(BrokenPipeError):
            self._process.__exit__(None, None, None)

    def go(self) -> None:
        """Wait until it has imported everything, and let it begin."""
        self._receive()
        self._send(b"go")

    def starts(self) -> list[float]:
        """Wait until it has ended, and return when each job began. Raises unless each ran once."""
        starts = msgspec.json.decode(self._receive(), type=list[list[float]])
        if wrong := sum(len(runs) != 1 for runs in starts):
            raise BenchFailed(f"{wrong} of {len(starts)} jobs did not run exactly once")
        return [runs[0] for runs in starts]

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `_receive` raises
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def _receive(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchFailed(f"a worker of the bench ended with code {self._process.wait()}; its error is above")
        return line


def work() -> None:
    """Run the worker of a bench: reads its orders, waits for the start, and writes when each run of each job began."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # the bench was interrupted
        return
    orders = msgspec.json.decode(line, type=Orders)
    starts: list[list[float]] = [[] for _ in range(orders.jobs)]
    app = Duly(**orders.arguments)
    declare(app, lambda n: starts[n].append(time.time()))
    os.write(1, b"\n")
    if not sys.stdin.buffer.readline():
        return
    threading.Thread(target=_exit_with_the_bench, daemon=True).start()
    asyncio.run(_worked(app, orders, starts))
    sys.stdout.buffer.write(msgspec.json.encode(starts) + b"\n")
    sys.stdout.flush()
    app.close()


def _exit_with_the_bench() -> None:
    """Exit when stdin is closed: then the bench has died."""
    while os.read(0, 1):
        pass
    os._exit(1)


async def _worked(app: Duly, orders: Orders, starts: list[list[float]]) -> None:
    worker = app.worker(concurrency=CONCURRENCY, drain=orders.drain)
    working = asyncio.create_task(worker.run())
    while not working.done() and not (all(starts) and not orders.drain):  # noqa: ASYNC110
        await asyncio.sleep(LOOK_SECONDS)
    worker.stop()
    await working
