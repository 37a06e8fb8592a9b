"""Lanes under the hazards of a worker: what drains, what sleeps, who comes first. Lines B06, B07, B08 and J07."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from duly import Duly
from duly.store import lanes as store_lanes
from duly.worker import lanes
from duly.worker.tick import Ticker
from tests.engine.conftest import Outside, work, work_until


def test_b06_a_drain_runs_all_jobs_of_a_capped_lane(app: Duly) -> None:
    ran = []

    @app.task(cap=1)
    async def one(n: int) -> None:
        await asyncio.sleep(0.01)
        ran.append(n)

    for n in range(12):
        one.enqueue(n)
    work(app)
    assert ran == list(range(12))


def test_b08_a_drain_runs_all_jobs_of_an_order(app: Duly) -> None:
    ran = []

    @app.task(ordering_key=lambda n: "k")
    async def one(n: int) -> None:
        await asyncio.sleep(0.01)
        ran.append(n)

    for n in range(12):
        one.enqueue(n)
    work(app)
    assert ran == list(range(12))


def test_b06_a_tick_that_has_run_as_many_as_it_may_ends_at_once(app: Duly) -> None:
    @app.task(cap=1, cap_key=lambda n: n)
    async def one(n: int) -> None: ...

    for n in range(60):
        one.enqueue(n)
    began = time.monotonic()
    ticked = asyncio.run(Ticker(app, limit=5, max_seconds=8, signals=False).tick())
    assert ticked.ran == 5
    assert time.monotonic() - began < 4


@pytest.mark.slow
@pytest.mark.parametrize("cap_a", [{"cap": 50}, {"cap": 50, "rate": "1000/s"}])
def test_j07_the_lanes_of_one_task_do_not_starve_those_of_another(app: Duly, cap_a: dict[str, Any]) -> None:
    ran: list[str] = []

    @app.task(cap=50)
    async def a(n: int) -> None:
        ran.append("a")

    @app.task(**cap_a)
    async def b(n: int) -> None:
        ran.append("b")

    for n in range(40):
        a.enqueue(n)
    for n in range(40):
        b.enqueue(n)
    work(app, concurrency=1)
    assert Counter(ran[:40])["b"] > 10, ran
    assert Counter(ran[:40])["a"] > 10, ran


def test_j07_neither_plain_nor_laned_jobs_come_first_for_ever_in_any_queue() -> None:
    """However claims of two queues, for free slots and ahead of them, follow each other: with one slot first is all."""
    app = Duly("unused.db")
    app.task(cap=1)(_nothing)
    worker = app.worker(queues=["p", "q"])

    async def plain(*_: Any) -> list[Any]:
        return []

    first = {
        (queue, kind, next(worker.lanes.ways(queue, plain, kind)) is plain)
        for _ in range(2)
        for queue in ("p", "q")
        for kind in ((True, False), (False, False))
    }
    assert len(first) == 8


def _nothing() -> None: ...


@pytest.mark.slow
def test_b06_a_worker_goes_idle_before_more_full_lanes_than_it_reads(app: Duly, monkeypatch: Any) -> None:
    monkeypatch.setattr(lanes, "FEWEST", 4)
    monkeypatch.setattr(lanes, "MOST", 8)
    ran, asked = [], []

    @app.task(rate="1/h", cap_key=lambda n: n % 30)
    async def one(n: int) -> None:
        ran.append(n)

    for n in range(90):
        one.enqueue(n)
    work(app)
    claim = store_lanes.claim
    monkeypatch.setattr(store_lanes, "claim", lambda *args, **more: asked.append(1) or claim(*args, **more))
    began = time.monotonic()
    work_until(app, lambda: time.monotonic() - began > 1)
    assert sorted(n % 30 for n in ran) == list(range(30))
    assert len(asked) < 100


def test_b07_a_suspect_runs_alone_on_the_one_permit_that_it_gets(app: Duly, outside: Outside) -> None:
    ran = []

    @app.task(rate="1/h")
    async def one(n: int) -> None:
        ran.append(n)

    one.enqueue(1)
    outside.query("update duly_job set suspect = ?", outside.kind == "postgres" or 1)
    work(app)
    assert ran == [1]
