"""Servers and stores that tests share: one PostgreSQL a test process, one empty database a test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from duly.store.postgres.schema import bring_up_to_date
from tests.contract.stores import D1Store, PostgresStore, SQLiteStore, Store
from tests.databases import SETTINGS, Files, Pool
from tests.servers.pgbouncer import behind
from tests.servers.postgres import RUNNING, PostgresServer, RunningServer

pytest_plugins = ("tests.timing",)

# A shell without job control starts a program with `&` so that it ignores SIGINT, and all that the program starts
# ignores it too. A handler is not inherited: what the tests start gets the default.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with RunningServer() if RUNNING in os.environ else PostgresServer(settings=SETTINGS) as server, behind(server):
        yield server


@pytest.fixture(scope="session")
def postgres_template(postgres: PostgresServer) -> str:
    """A migrated database to copy: much faster than to migrate each."""
    url = postgres.new_database()
    bring_up_to_date(url)
    return url


@pytest.fixture(scope="session")
def postgres_pool(postgres: PostgresServer, postgres_template: str) -> Pool:
    return Pool(postgres, postgres_template)


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest, postgres_pool: Pool) -> Iterator[str]:
    with postgres_pool.lend(request.node) as url:
        yield url


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("migrated"))


@pytest.fixture(params=["sqlite", "postgres", "d1"])
def store(request: pytest.FixtureRequest, tmp_path) -> Iterator[Store]:
    """Every store in turn: a test that takes this is a contract test."""
    made: Store
    if request.param == "sqlite":
        made = SQLiteStore(request.getfixturevalue("files").fresh("sqlite", tmp_path / "duly.db"))
    elif request.param == "d1":
        made = D1Store(request.getfixturevalue("files").fresh("d1", tmp_path / "d1.db"))
    else:
        made = PostgresStore(request.getfixturevalue("postgres_url"))
    yield made
    made.close()
