"""An app on every store, and a worker that does what is due and stops."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest

from duly import Duly
from duly.model import JobRecord
from duly.store import ops
from tests.contract.stores import TABLES, D1OnFile, new_token
from tests.databases import fresh
from tests.servers.d1 import D1Mannered

WORK_SECONDS = 30.0


class Outside:
    """The tables of an app as one sees them with plain SQL; `?` marks a parameter."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self._conn: Any
        if kind == "postgres":
            self._conn = psycopg.connect(url, autocommit=True)
            self._conn.execute("set search_path to duly")
        else:
            self._conn = sqlite3.connect(url, isolation_level=None, timeout=5)
            self._conn.execute("pragma wal_autocheckpoint = 0")

    def query(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        if self.kind != "postgres":
            return list(self._conn.execute(sql, params).fetchall())
        cursor = self._conn.execute(sql.replace("?", "%s"), params)
        rows = cursor.fetchall() if cursor.description else []
        return [tuple(str(value) if isinstance(value, UUID) else value for value in row) for row in rows]

    def snapshot(self) -> dict[str, list[tuple[Any, ...]]]:
        """Every row of every table, to see whether anything changed."""
        return {table: sorted(self.query(f"select * from {table}"), key=repr) for table in TABLES}

    def close(self) -> None:
        self._conn.close()


# D1 has no connection that a caller could hold.
HOLDABLE = pytest.mark.parametrize("where", ["sqlite", "postgres"], indirect=True)


@pytest.fixture(params=["sqlite", "postgres", "d1"])
def where(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Return a store's name and the URL of an empty database of it."""
    return request.param, fresh(request, request.param)


@pytest.fixture
def url(where: tuple[str, str]) -> str:
    return where[1]


@pytest.fixture
def apps(where: tuple[str, str]) -> Iterator[Callable[..., Duly]]:
    """Make apps on one database; on D1, every seventh answer gets lost."""
    kind, url = where
    made: list[Duly] = []

    def make(**options: Any) -> Duly:
        app = Duly(url, **{"lease": "2s", "poll": "100ms", **options})
        if kind == "d1":
            app.database.driver = _d1_driver(url)
        made.append(app)
        return app

    yield make
    for app in made:
        app.close()


def _d1_driver(path: str) -> D1OnFile:
    database = D1Mannered(path)
    driver = D1OnFile(database)
    if not database.query("select name from sqlite_master where name = 'duly_job'"):
        driver.migrate()
    database.calls = 0  # how many migrations there were must not say which answers are lost
    database.lose = lambda call: call % 7 == 0
    return driver


@pytest.fixture
def app(apps: Callable[..., Duly]) -> Duly:
    return apps()


@pytest.fixture
def outside(where: tuple[str, str], app: Duly) -> Iterator[Outside]:
    """Look at the app's tables from outside."""
    app.driver.run(ops.clock())  # on SQLite this makes the tables
    tables = Outside(*where)
    yield tables
    tables.close()


def work(app: Duly, **options: Any) -> None:
    """Do what is due, and come back."""
    asyncio.run(awork(app, **options))


async def awork(app: Duly, *, seconds: float = WORK_SECONDS, **options: Any) -> None:
    await asyncio.wait_for(app.arun(**{"drain": True, "signals": False, **options}), seconds)


def work_until(app: Duly, true: Callable[[], Any], *, seconds: float = WORK_SECONDS, **options: Any) -> None:
    """Run a worker until something holds."""
    asyncio.run(awork_until(app, true, seconds=seconds, **options))


async def awork_until(app: Duly, true: Callable[[], Any], *, seconds: float = WORK_SECONDS, **options: Any) -> None:
    worker = app.worker(**{"signals": False, "grace": "1s", **options})
    running = asyncio.create_task(worker.run())
    until = time.monotonic() + seconds
    try:
        while not await asyncio.to_thread(true):
            assert not running.done(), "the worker has stopped"
            assert time.monotonic() < until, f"not within {seconds:g} s"
            await asyncio.sleep(0.02)
    finally:
        worker.stop()
        await asyncio.wait_for(running, 10)


def found(app: Duly, job_id: str) -> JobRecord:
    job = app.get(job_id)
    assert job is not None
    return job


def steal(app: Duly, job_id: str) -> None:
    """Take a running job from its worker, as a rescue would."""
    moment = found(app, job_id).lease_until
    assert moment is not None
    later = moment + 60_000
    seen = [one for one in app.driver.run(ops.expired_leases(now=later)) if one.id == job_id]
    assert app.driver.run(ops.rescue(seen, now=later)).keys() == {job_id}


def take(app: Duly, **options: Any) -> Any:
    """Claim one job as some other worker would."""
    claim = ops.claim("default", limit=1, token=new_token(), worker="another", **options)
    return app.driver.run(claim)[0]
