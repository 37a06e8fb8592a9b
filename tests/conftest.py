"""Servers and stores that tests share. One PostgreSQL a test process, one fresh database a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from duly.store.postgres.driver import bring_up_to_date
from tests.contract.stores import D1Store, PostgresStore, SQLiteStore, Store
from tests.servers.pgbouncer import behind
from tests.servers.postgres import PostgresServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server, behind(server):
        yield server


@pytest.fixture(scope="session")
def postgres_template(postgres: PostgresServer) -> str:
    """A migrated database to copy: much faster than to migrate each."""
    url = postgres.new_database()
    bring_up_to_date(url)
    return url


@pytest.fixture
def postgres_url(postgres: PostgresServer, postgres_template: str) -> Iterator[str]:
    url = postgres.new_database(postgres_template)
    yield url
    postgres.drop(url)


@pytest.fixture(params=["sqlite", "postgres", "d1"])
def store(request: pytest.FixtureRequest, tmp_path) -> Iterator[Store]:
    """Every store in turn: a test that takes this is a contract test."""
    made: Store
    if request.param == "sqlite":
        made = SQLiteStore(tmp_path / "duly.db")
    elif request.param == "d1":
        made = D1Store(tmp_path / "d1.db")
    else:
        made = PostgresStore(request.getfixturevalue("postgres_url"))
    yield made
    made.close()
