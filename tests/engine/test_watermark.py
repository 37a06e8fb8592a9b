"""How far a queue is claimed: nothing that stands before a mark waits for long. Line J07."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from duly import Duly
from duly.model import Claimed, Envelope
from duly.store.ops import Head, Mark
from duly.worker.watermark import Watermark
from duly.worker.worker import Worker
from tests.engine.conftest import work

LONG, SHORT = 5.0, 0.1


def job(due_at: int, priority: int = 0) -> Claimed:
    return Claimed(
        id=f"id {due_at}", token=5, task="work", queue="default", priority=priority, payload="{}",
        envelope=Envelope(), key=None, attempt=1, max_attempts=5, crashes=0, suspect=False, lease_ms=1000,
        lease_until=9, due_at=due_at, created_at=1, keep_ms=9, batch_id=None, schedule=None, replay_count=0,
        cancel_requested_at=None,
    )  # fmt: skip


def mark(due_at: int, priority: int = 0) -> Mark:
    return Mark(priority, due_at, f"id {due_at}")


def in_use(*jobs: Claimed) -> Watermark:
    """A watermark that has seen a long way, and a claim."""
    watermark = Watermark()
    assert watermark.begin_look(0.0)
    watermark.looked(Head(None, LONG), 0.0)
    watermark.passed(jobs)
    return watermark


def test_j07_claims_begin_at_the_head_unless_the_way_to_it_is_long() -> None:
    watermark = Watermark()
    watermark.passed([job(3)])
    assert watermark.marks() == []
    watermark.looked(Head(None, LONG), 0.0)
    assert watermark.marks() == [mark(3)]
    watermark.looked(Head(None, SHORT), 0.0)
    assert watermark.marks() == []


def test_j07_a_mark_is_where_the_last_claim_of_its_priority_ended() -> None:
    watermark = in_use(job(5, 1), job(3), job(4))
    assert watermark.marks() == [mark(5, 1), mark(4)]
    watermark.passed([job(6), job(7)])
    assert watermark.marks() == [mark(5, 1), mark(7)]
    watermark.passed([])
    assert watermark.marks() == [mark(5, 1), mark(7)]


def test_j07_only_the_priorities_that_were_claimed_last_have_a_mark() -> None:
    watermark = in_use(*(job(1, priority) for priority in (9, 8, 7, 6)))
    watermark.passed([job(2, 9)])
    watermark.passed([job(3, 5)])
    assert watermark.marks() == [mark(1, 7), mark(1, 6), mark(2, 9), mark(3, 5)]


def test_j07_a_job_found_before_a_mark_moves_it_back() -> None:
    watermark = in_use(job(5, 1), job(9))
    assert watermark.looked(Head(mark(4), LONG), 0.0)
    assert watermark.marks() == [mark(5, 1), mark(4)]
    for further in (mark(4), mark(8), mark(1, 7)):
        assert not watermark.looked(Head(further, LONG), 0.0)
    assert watermark.marks() == [mark(5, 1), mark(4)]


def test_j07_a_check_runs_every_second_or_for_a_twentieth_of_the_time() -> None:
    watermark = Watermark()
    assert watermark.begin_look(10.0)
    assert not watermark.begin_look(99.0)  # one at a time
    watermark.looked(Head(None, 50.0), 100.0)
    assert not watermark.begin_look(100.9)
    assert watermark.begin_look(101.0)
    watermark.looked(Head(None, 200.0), 102.0)
    assert not watermark.begin_look(105.9)
    assert watermark.begin_look(106.0)


def test_j07_without_a_check_no_mark_is_used() -> None:
    watermark = in_use(job(9))
    assert watermark.begin_look(5.0)
    watermark.look_failed(5.0)
    assert watermark.marks() == []
    assert not watermark.begin_look(5.9)
    assert watermark.begin_look(6.0)


def test_j07_with_a_short_distance_no_second_check_runs() -> None:
    watermark = Watermark()
    assert watermark.begin_look(0.0)
    watermark.looked(Head(mark(1), None), 0.0)
    watermark.passed([job(3)])
    assert watermark.marks() == []
    assert not watermark.begin_look(10.0**9)


# With a worker


@contextmanager
def held(url: str) -> Iterator[None]:
    """Keep the database from clearing anything away."""
    with psycopg.connect(url) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        conn.execute("select pg_current_xact_id()")
        yield


@pytest.fixture
def on_postgres(postgres_url: str) -> Iterator[Duly]:
    app = Duly(postgres_url, poll="100ms")
    yield app
    app.close()


@pytest.mark.slow
@pytest.mark.parametrize("priority", [0, 5, -5])
def test_j07_a_job_before_the_mark_runs_within_a_second(on_postgres: Duly, postgres_url: str, priority: int) -> None:
    @on_postgres.task
    async def quick(number: int) -> int:
        return number

    async def scenario() -> None:
        worker = Worker(on_postgres, signals=False)
        running = asyncio.create_task(worker.run())
        while not worker.claiming._watermarks["default"].marks():
            await quick.aenqueue_many(quick.call(number) for number in range(2000))
            await asyncio.sleep(0.2)
        while worker.held.leases() or worker.busy:
            await asyncio.sleep(0.05)
        an_hour_ago = datetime.now(UTC) - timedelta(hours=1)
        began = time.monotonic()
        early = await quick.using(at=an_hour_ago, priority=priority).aenqueue(7)
        assert await early.aresult(10) == 7
        assert time.monotonic() - began < 2.0
        worker.stop()
        await running

    with held(postgres_url):
        asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.slow
def test_j07_a_drain_leaves_no_job_before_a_mark(
    on_postgres: Duly, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duly.worker.watermark.LONG_MS", 0.1)  # the scan of 6,000 jobs is long
    ran: list[int] = []

    @on_postgres.task
    async def quick(number: int) -> None:
        ran.append(number)

    @on_postgres.task
    async def last() -> None:
        # A worker that lives on has looked by now, and would begin at its mark.
        await asyncio.sleep(1.5)
        await quick.aenqueue_many(quick.call(number) for number in range(100))
        await asyncio.sleep(0.5)
        await quick.using(at=datetime.now(UTC) - timedelta(hours=1)).aenqueue(-1)

    with held(postgres_url):
        quick.enqueue_many(quick.call(number) for number in range(6000))
        last.using(priority=-1).enqueue()
        work(on_postgres)
    assert len(ran) == 6101


def test_j07_an_idle_queue_is_checked_after_a_claim(on_postgres: Duly, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    aexecute = on_postgres.driver.aexecute

    async def noted(op: Any) -> Any:
        asked.append(op.name)
        return await aexecute(op)

    monkeypatch.setattr(on_postgres.driver, "aexecute", noted)

    @on_postgres.task
    async def quick(number: int) -> int:
        return number

    async def scenario() -> None:
        worker = Worker(on_postgres, signals=False)
        running = asyncio.create_task(worker.run())
        while asked.count("claim") < 6:
            await asyncio.sleep(0.01)
        assert "head" not in asked
        await quick.aenqueue(1)
        while "head" not in asked:
            await asyncio.sleep(0.01)
        worker.stop()
        await running

    asyncio.run(asyncio.wait_for(scenario(), 60))
