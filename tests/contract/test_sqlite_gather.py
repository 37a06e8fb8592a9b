"""Concurrent writes of one process share one commit on SQLite, and a lone one is written at once. Line K09."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from duly.errors import StoreRefused
from duly.model import NewJob, Terms
from duly.store import ops
from duly.store.op import Op
from duly.store.sqlite.driver import SQLiteDriver
from tests.contract.stores import new_id, spoiled


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[SQLiteDriver]:
    made = SQLiteDriver(tmp_path / "jobs.db")
    made.run(ops.clock())
    made.run(plain())
    yield made
    made.close()


def plain(**terms: Any) -> Op[Any]:
    return ops.enqueue(Terms(**{"task": "work", **terms}), [NewJob(new_id(), '{"n":1}')])


@contextmanager
def locked(driver: SQLiteDriver) -> Iterator[None]:
    """Let nobody write until the end."""
    theirs = sqlite3.connect(driver.path, isolation_level=None)
    theirs.execute("begin immediate")
    yield
    theirs.execute("rollback")
    theirs.close()


def until(happened: Callable[[], Any]) -> None:
    give_up = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < give_up
        time.sleep(0.002)


def waiting(driver: SQLiteDriver) -> int:
    assert driver._writer is not None
    return len(driver._writer._waiting)


def queues(driver: SQLiteDriver) -> list[tuple[str, int]]:
    with sqlite3.connect(driver.path) as conn:
        return conn.execute("select queue, count(*) from duly_job group by queue order by queue").fetchall()


def test_k09_a_lone_caller_writes_in_its_own_thread(driver: SQLiteDriver) -> None:
    seen = set()
    driver.hook = lambda point: seen.add(threading.get_ident())
    driver.run(plain())
    assert seen == {threading.get_ident()}


@pytest.mark.parametrize("kind", ["threads", "coroutines"])
def test_k09_a_group_with_the_same_terms_is_one_statement_with_separate_answers(
    driver: SQLiteDriver, kind: str
) -> None:
    sent: list[list[str]] = []
    run_all = driver.run_all
    statements: list[str] = []

    def noted(conn: sqlite3.Connection, batch: Any) -> Any:
        sent.append([op.name for op in batch])
        conn.set_trace_callback(lambda text: statements.append(text) if "insert into duly_job" in text else None)
        try:
            return run_all(conn, batch)
        finally:
            conn.set_trace_callback(None)

    driver.run_all = noted  # type: ignore[method-assign]
    wanted = [plain(queue=queue) for queue in ("a", "b") * 5]

    async def coroutines() -> None:
        running = [asyncio.ensure_future(driver.arun(op)) for op in wanted]
        await asyncio.to_thread(until, lambda: waiting(driver) == len(wanted))
        released.set()
        for answered in await asyncio.gather(*running):
            assert len(answered) == 1

    released = threading.Event()
    with ThreadPoolExecutor(12) as threads:
        with locked(driver):
            first = threads.submit(driver.run, plain(queue="first"))
            until(lambda: driver._writer is not None and driver._writer._led)
            if kind == "coroutines":
                rest = [threads.submit(asyncio.run, coroutines())]
                released.wait(60)
            else:
                rest = [threads.submit(driver.run, op) for op in wanted]
                until(lambda: waiting(driver) == len(wanted))
        first.result(60)
        for one in rest:
            one.result(60)
    assert [len(batch) for batch in sent] == [1, 10]
    assert len(statements) == 3  # the first, and one for each queue
    assert queues(driver) == [("a", 5), ("b", 5), ("default", 1), ("first", 1)]


def test_k09_a_refused_write_fails_alone(driver: SQLiteDriver) -> None:
    with ThreadPoolExecutor(4) as threads:
        with locked(driver):
            first = threads.submit(driver.run, plain())
            until(lambda: driver._writer is not None and driver._writer._led)
            good = threads.submit(driver.run, plain(queue="good"))
            bad = threads.submit(driver.run, spoiled(plain(queue="bad")))
            until(lambda: waiting(driver) == 2)
        first.result(60)
        assert len(good.result(60)) == 1
        with pytest.raises(StoreRefused):
            bad.result(60)
    assert queues(driver) == [("default", 2), ("good", 1)]


def test_k09_a_cancelled_coroutine_is_left_out_of_the_group(driver: SQLiteDriver) -> None:
    async def run() -> None:
        with ThreadPoolExecutor(2) as threads:
            with locked(driver):
                first = threads.submit(driver.run, plain())
                await asyncio.to_thread(until, lambda: driver._writer is not None and driver._writer._led)
                gone = asyncio.ensure_future(driver.arun(plain(queue="gone")))
                stays = asyncio.ensure_future(driver.arun(plain(queue="stays")))
                await asyncio.to_thread(until, lambda: waiting(driver) == 2)
                gone.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await gone
            await asyncio.wrap_future(first)
            await asyncio.wait_for(stays, 60)

    asyncio.run(run())
    assert queues(driver) == [("default", 2), ("stays", 1)]
