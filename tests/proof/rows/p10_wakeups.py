"""P10: wake-ups cost an enqueue next to nothing, and one that gets lost costs no more than a poll."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import random
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, LiteralString, NamedTuple

from duly import Duly
from duly.model import NewJob, Terms
from duly.rules import keys
from duly.store import ops
from duly.store.op import Op, Rows
from duly.store.postgres.driver import Line, PostgresDriver
from duly.store.postgres.plans import trusted
from duly.store.postgres.schema import bring_up_to_date
from duly.worker.turns import Turns
from tests.proof import breaks
from tests.proof.fleet import Fleet, fleet, producer
from tests.proof.table import ALL, Figure, Row, Setting
from tests.servers.postgres import PostgresServer

CALLERS = (1, 8, 32)
PROCESSES = 4
MOST_COST = 0.05
TURN, TURNS = 0.02, 4  # in seconds, and how many times in a round each way comes twice
POLL, SLACK = 1.0, 0.3
# What the pick-up of an idle worker should take in ms, on a quiet machine; here others may be at work.
PICK_UP = {"PostgreSQL": (3.0, 15.0), "SQLite, across processes": (2.5, None), "SQLite, same process": (1.5, None)}
BUSY = 5
OFF, ON, STOP = 0, 1, -1


def run(setting: Setting) -> Figure:
    """Measure what wake-ups cost, what their loss costs, and what they give."""
    with PostgresServer(durable=True) as server:
        callers = {None: CALLERS, "p10:poll": ()}.get(setting.broken, CALLERS[1:2])
        costs = {count: _cost(_new(server), count, setting) for count in callers}
        lost = [] if setting.broken == "p10:only_for_sleepers" else _lost(_new(server), setting)
        if setting.broken:
            return _figure(costs, lost, {})
        waits = {"PostgreSQL": _across(_new(server), setting.folder / "postgres", setting)}
    waits["SQLite, across processes"] = _across(str(setting.folder / "one.db"), setting.folder / "sqlite", setting)
    waits["SQLite, same process"] = _inside(str(setting.folder / "two.db"), setting.folder / "inside", setting)
    return _figure(costs, lost, waits)


def _new(server: PostgresServer) -> str:
    url = server.new_database()
    bring_up_to_date(url)
    return url


# What they cost


def _cost(url: str, callers: int, setting: Setting) -> Cost:
    """Enqueue from some processes at once, with wake-ups and without in turns, and compare in each round."""
    rounds = setting.pick(12, 60)
    spawn = multiprocessing.get_context("spawn")
    mode, ready, told = spawn.Value("i", OFF, lock=False), spawn.Semaphore(0), spawn.SimpleQueue()
    processes = min(callers, PROCESSES)
    work = [
        spawn.Process(target=_enqueue, args=(url, callers // processes, mode, ready, told)) for _ in range(processes)
    ]
    for process in work:
        process.start()
    for _ in work:
        if not ready.acquire(timeout=30):
            raise AssertionError("a process that enqueues did not start")
    for number in range(rounds):
        for way in (ON, OFF, OFF, ON) * TURNS:
            mode.value = 2 * number + way
            time.sleep(TURN)
    mode.value = STOP
    took: dict[int, list[float]] = {}
    for _ in work:
        for place, some in told.get().items():
            took.setdefault(place, []).extend(some)
    for process in work:
        process.join()
    # On a machine that is busy with other things nobody may have enqueued in a turn.
    whole = [number for number in range(rounds) if all(took.get(2 * number + way) for way in (OFF, ON))]
    medians = [[statistics.median(took[2 * number + way]) for way in (OFF, ON)] for number in whole]
    return Cost(statistics.median(off for off, _ in medians), [on / off - 1 for off, on in medians])


class Cost(NamedTuple):
    """How long an enqueue takes in seconds without wake-ups, and in each round by how much longer with them."""

    without: float
    shares: list[float]

    @property
    def share(self) -> float:
        """By how much longer it takes, in the middle."""
        return statistics.median(self.shares)

    @property
    def doubt(self) -> float:
        """How far off that may be in 19 of 20 cases, as other work on this machine makes the rounds differ."""
        spread = 1.48 * statistics.median(abs(share - self.share) for share in self.shares)
        return 2 * 1.25 * spread / math.sqrt(len(self.shares))


def _enqueue(url: str, callers: int, mode: Any, ready: Any, told: Any) -> None:
    """Be a process whose threads enqueue one job after the other; tell how long each took, by its round and way."""
    breaks.apply_named()
    driver = Switched(url)
    driver.mode = mode
    driver.run(ops.clock())
    took: dict[int, list[float]] = defaultdict(list)
    threads = [threading.Thread(target=_call, args=(driver, mode, took)) for _ in range(callers)]
    for thread in threads:
        thread.start()
    ready.release()
    for thread in threads:
        thread.join()
    driver.close()
    told.put(dict(took))


class Switched(PostgresDriver):
    """A driver that tells nobody of what it made ready while its switch is off."""

    mode: Any

    def _run(self, conn: Any, batch: Sequence[Op[Any]], lock_timeout: LiteralString) -> list[Rows]:
        if self.mode.value % 2 == ON:
            return super()._run(conn, batch, lock_timeout)
        rows = super()._run(conn, [replace(op, wakes=False) for op in batch], lock_timeout)
        return rows + [[] for _ in batch[len(rows) :]]  # enqueues have none


def _call(driver: PostgresDriver, mode: Any, took: dict[int, list[float]]) -> None:
    ids, terms = keys.Ids(), Terms("work")
    while (now := mode.value) != STOP:
        op = ops.enqueue(terms, [NewJob(ids(), "{}")])
        began = time.perf_counter()
        driver.run(op)
        if mode.value == now:  # all of it
            took[now].append(time.perf_counter() - began)


# What their loss costs


def _lost(url: str, setting: Setting) -> list[float]:
    """Enqueue at random moments for an idle worker, and tell it nothing; give how long each job waited."""
    chance = random.Random(setting.seed)
    folder = setting.folder / "lost"
    folder.mkdir()
    # A worker looks for jobs at every beat as well: with a long lease that is seldom.
    with fleet(url, folder, lease="60s") as workers, _producing(workers) as app:
        workers.start()
        if not workers.started(1):
            raise AssertionError(f"the worker did not start: {workers.logs()}")
        time.sleep(0.5)
        driver = app.driver
        driver.run = lambda op: PostgresDriver.run(driver, replace(op, wakes=False))  # type: ignore[method-assign]
        return _waits(app, workers, [chance.uniform(0.01, 0.2) for _ in range(setting.pick(40, 400))])


# What they give


def _across(url: str, folder: Path, setting: Setting) -> list[float]:
    """Have an idle worker of another process begin jobs one by one; give how long each waited."""
    folder.mkdir()
    with fleet(url, folder) as workers, _producing(workers) as app:
        workers.start()
        if not workers.started(1):
            raise AssertionError(f"the worker did not start: {workers.logs()}")
        time.sleep(0.5)
        return _waits(app, workers, _gaps(setting))


def _inside(url: str, folder: Path, setting: Setting) -> list[float]:
    """Have a worker in a thread of this process begin jobs one by one."""
    folder.mkdir()
    with fleet(url, folder) as workers, _producing(workers) as app:
        worker = app.worker(signals=False)
        thread = threading.Thread(target=lambda: asyncio.run(worker.run()))
        thread.start()
        try:
            if not workers.started(1):
                raise AssertionError("the worker did not start")
            time.sleep(0.5)
            return _waits(app, workers, _gaps(setting))
        finally:
            worker.stop()
            thread.join()


def _gaps(setting: Setting) -> list[float]:
    chance = random.Random(setting.seed)
    return [chance.uniform(0.02, 0.04) for _ in range(setting.pick(60, 500))]


@contextmanager
def _producing(workers: Fleet) -> Iterator[Duly]:
    app = producer(workers)
    try:
        yield app
    finally:
        app.close()


def _waits(app: Duly, workers: Fleet, gaps: Sequence[float]) -> list[float]:
    """Enqueue after each gap; say how long it took from each acknowledgement to the handler's begin."""
    acknowledged: dict[str, float] = {}
    for number, gap in enumerate(gaps):
        time.sleep(gap)
        job = app.tasks["quick"].enqueue(number)
        acknowledged[job.id] = time.monotonic()
    if not workers.wait(lambda: len(workers.history().runs) == len(acknowledged), 15):
        raise AssertionError(f"{len(workers.history().runs)} of {len(acknowledged)} jobs began: {workers.logs()}")
    return [max(0.0, runs[0].begun - acknowledged[job]) for job, runs in workers.history().runs.items()]


def _figure(costs: dict[int, Cost], lost: list[float], waits: dict[str, list[float]]) -> Figure:
    worst = max(lost, default=0.0)
    good = all(cost.share - cost.doubt <= MOST_COST for cost in costs.values()) and worst <= POLL + SLACK
    shares = (f"{cost.share:+.1%} (± {cost.doubt:.1%}) at {callers}" for callers, cost in costs.items())
    parts = [f"wake-ups cost {', '.join(shares)} callers", f"of {len(lost)} lost ones the worst cost {worst:.2f} s"]
    numbers: dict[str, Any] = {
        "cost": {callers: [round(cost.share, 4), round(cost.doubt, 4)] for callers, cost in costs.items()},
        "enqueue_ms": {callers: round(cost.without * 1000, 3) for callers, cost in costs.items()},
        "lost_most_s": round(worst, 3),
    }
    for name, values in waits.items():
        most50, most99 = PICK_UP[name]
        p50, p99 = (_percentile(values, share) * 1000 for share in (0.5, 0.99))
        good = good and p50 <= BUSY * most50 and (most99 is None or p99 <= BUSY * most99)
        parts.append(f"{name} pick-up p50 {p50:.1f} ms, p99 {p99:.1f} ms")
        numbers[f"{name}, pick-up"] = {"p50_ms": round(p50, 2), "p99_ms": round(p99, 2)}
    return Figure("; ".join(parts), good, numbers, only_slow=True)


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


_work = PostgresDriver._work
_pause = Turns._pause


def _notifying(self: PostgresDriver, batch: Sequence[Op[Any]]) -> list[Line]:
    """Notify in every transaction, whether anybody sleeps or not."""
    wakes = any(op.wakes for op in batch)
    return _work(self, batch) + [Line(0, "notify", trusted(text.sql), {}) for text in self._spell("notify") if wakes]


def _seldom(self: Turns) -> float:
    """Look for jobs every 5 s."""
    app = self._shared.app
    app.database.settings = replace(app.settings, poll_ms=5000)
    return _pause(self)


breaks.python("p10:only_for_sleepers", PostgresDriver, "_work", _notifying)
breaks.python("p10:poll", Turns, "_pause", _seldom)

ROW = Row(
    "P10",
    "what wake-ups cost and give",
    "wake-ups cost <= 5 % of an enqueue by 1, 8, 32 callers on PostgreSQL, as far as the rounds agree; a lost one "
    "costs <= the 1 s poll + 0.3 s; pick-up p50 <= 3 ms (PostgreSQL; p99 <= 15 ms), 2.5 ms (SQLite across processes), "
    f"1.5 ms (same process), each judged at {BUSY} x, as other work on the machine adds to it",
    run,
    controls=("p10:only_for_sleepers", "p10:poll"),
    of_speed=True,
    full_only=True,
    takes=ALL,
    control_takes=ALL,
)
