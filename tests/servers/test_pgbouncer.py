"""PgBouncer, where there is one: it stands before a server, in transaction mode, and leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psycopg
import pytest

from duly.store import ops
from duly.store.postgres import driver as postgres_driver
from tests.servers import pgbouncer
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgres import PostgresServer

pytestmark = pytest.mark.skipif(pgbouncer.find_binary() is None, reason=pgbouncer.MISSING)


@pytest.fixture
def bouncer(postgres: PostgresServer) -> Iterator[PgBouncer]:
    with PgBouncer(postgres) as started:
        yield started


def test_a_session_is_anybodys_after_a_transaction(postgres: PostgresServer, bouncer: PgBouncer) -> None:
    url = postgres.new_database().replace(str(postgres.port), str(bouncer.port))
    with psycopg.connect(url, autocommit=True) as one, psycopg.connect(url, autocommit=True) as other:
        asked = "select pg_backend_pid()"
        assert one.execute(asked).fetchone() == other.execute(asked).fetchone()
        assert one.info.backend_pid != other.info.backend_pid  # as PgBouncer numbers them
    assert bouncer.transactions() == 2


def test_connections_of_the_driver_go_through_the_pooler_and_others_do_not(
    postgres: PostgresServer, postgres_url: str, bouncer: PgBouncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_driver, "led", None, raising=False)
    monkeypatch.delattr(postgres_driver, "led")
    driver_class = postgres_driver.PostgresDriver
    monkeypatch.setattr(driver_class, "__init__", driver_class.__init__)
    monkeypatch.setenv(pgbouncer.VARIABLE, f"on,{postgres.port}:{bouncer.port}")
    pgbouncer.lead_driver(postgres_driver)
    driver = driver_class(f"{postgres_url}?options=-c%20lock_timeout%3D2s")
    driver.run(ops.clock())
    assert bouncer.transactions() > 0
    with psycopg.connect(postgres_url) as conn:
        assert conn.execute("show lock_timeout").fetchone() == ("2s",)
        assert conn.info.port == postgres.port
    driver.close()


def test_prepared_behind_the_pooler_by_mistake_leaves_no_session_setting(
    postgres: PostgresServer, postgres_url: str, bouncer: PgBouncer
) -> None:
    url = postgres_url.replace(str(postgres.port), str(bouncer.port))
    driver = postgres_driver.PostgresDriver(url, connections=1)
    driver.run(ops.clock())
    with psycopg.connect(url, autocommit=True) as stranger:
        assert stranger.execute("show plan_cache_mode").fetchone() == ("auto",)
        assert stranger.execute("show enable_seqscan").fetchone() == ("on",)
        assert stranger.execute("show jit").fetchone() == ("on",)
    driver.close()


def test_it_stops_and_leaves_nothing(postgres: PostgresServer) -> None:
    started = PgBouncer(postgres).start()
    home, process = started._home, started._process
    assert home is not None
    assert process is not None
    os.kill(process.pid, 0)
    started.stop()
    assert process.poll() is not None
    assert not home.exists()
