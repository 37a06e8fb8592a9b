"""What a driver says of its database and of what befell it."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from duly.errors import AnswerLost, SchemaMismatch, StoreError, StoreRefused, StoreUnavailable
from duly.model import NewJob, Terms
from duly.rules.settings import Settings, parse_url
from duly.store import open_driver, ops
from duly.store.migrate import newest
from duly.store.op import Op, Rows
from duly.store.postgres.driver import PostgresDriver
from duly.store.sqlite import checkpoint
from duly.store.sqlite.driver import SQLiteDriver
from tests.contract.stores import PostgresStore, SQLiteStore, Store, new_id
from tests.servers.postgres import PostgresServer


@pytest.mark.parametrize("durability", ["full", "normal"])
def test_about_names_the_sqlite_file(tmp_path: Path, monkeypatch, durability: str) -> None:
    monkeypatch.chdir(tmp_path)
    driver = SQLiteDriver("duly.db", durability=durability)
    about = driver.about()
    assert (about.store, about.where, about.durability) == ("SQLite", str(tmp_path / "duly.db"), durability)
    assert (about.engine, about.schema) == (f"SQLite {sqlite3.sqlite_version}", str(newest("sqlite")))
    driver.close()


def test_about_names_the_server_and_its_durability(postgres: PostgresServer, postgres_url: str) -> None:
    with_password = postgres_url.replace("postgres@", "postgres:secret@")
    driver = PostgresDriver(with_password)
    about = driver.about()
    assert about.store == "PostgreSQL"
    assert about.where == f"127.0.0.1:{postgres.port}/{postgres_url.rpartition('/')[2]}"
    assert about.engine.startswith("PostgreSQL ")
    assert about.schema == f"duly {newest('postgres')}"
    assert about.durability == "fsync off"  # so that tests are fast
    assert "secret" not in repr(about)
    driver.close()


@pytest.mark.slow
def test_a_server_that_forgets_commits_in_a_crash_is_named() -> None:
    from duly.store.postgres.schema import bring_up_to_date

    with PostgresServer(durable=True) as server:
        url = server.new_database()
        bring_up_to_date(url)
        said = []
        for options in ("", "?options=-c%20synchronous_commit%3Doff", "?options=-c%20synchronous_commit%3Dlocal"):
            driver = PostgresDriver(url + options)
            said.append(driver.about().durability)
            driver.close()
    assert said == ["full, no standby", "synchronous_commit off", "full, no standby"]


def test_about_raises_with_the_reason(postgres: PostgresServer, tmp_path: Path) -> None:
    nowhere = PostgresDriver("postgresql://postgres@127.0.0.1:1/none")
    with pytest.raises(StoreUnavailable):
        nowhere.about()
    assert nowhere.failures == 1
    empty = postgres.new_database()
    bare = PostgresDriver(empty)
    with pytest.raises(SchemaMismatch):
        bare.about()
    assert bare.failures == 0
    for driver in (nowhere, bare):
        driver.close()
    postgres.drop(empty)
    (tmp_path / "duly.db").write_bytes(b"no database " * 100)
    file = SQLiteDriver(tmp_path / "duly.db")
    with pytest.raises(StoreError, match="not a database"):
        file.about()


def test_no_failure_is_reported_without_an_error(store: Store) -> None:
    [job] = store.enqueue() and store.claim()
    store.succeed(job)
    assert store.driver.failures == 0


def test_a_broken_connection_is_counted_and_one_that_only_has_to_wait_is_not(postgres_url: str) -> None:
    store = PostgresStore(postgres_url)
    [job_id] = store.enqueue()
    store.query("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'duly'")
    store.run(ops.promote("default"))
    assert store.driver.failures == 1
    hurried = PostgresDriver(f"{postgres_url}?options=-c%20statement_timeout%3D100")
    with psycopg.connect(postgres_url) as theirs:
        theirs.execute("select id from duly.duly_job for update")
        with pytest.raises(StoreUnavailable):
            hurried.run(ops.cancel([job_id]))
        theirs.rollback()
    assert hurried.failures == 0
    hurried.close()
    store.close()


def test_a_connection_that_the_server_hung_up_on_is_not_used(postgres_url: str) -> None:
    """Whatever was sent on it might have been written. It is counted, for rescue."""
    store = PostgresStore(postgres_url)
    store.enqueue()
    failures = store.driver.failures
    with psycopg.connect(postgres_url, autocommit=True) as theirs:
        theirs.execute("select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = 'duly'")
    store.driver.execute(ops.enqueue(Terms("work"), [NewJob(new_id(), "{}")]))  # once: an answer is not lost
    assert store.driver.failures > failures
    assert store.query("select count(*) from duly_job") == [(2,)]
    store.close()


class _LostThenFails(SQLiteDriver):
    """Writes, loses the answer, and fails when it is asked again."""

    tries = 0
    error: StoreError

    def execute(self, op: Op[Any]) -> Rows:
        self.tries += 1
        if self.tries == 1:
            super().execute(op)
            raise AnswerLost("the answer was lost")
        raise self.error

    async def aexecute(self, op: Op[Any]) -> Rows:
        return self.execute(op)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("error", [StoreUnavailable, StoreError, SchemaMismatch])
def test_j01_a_write_that_may_have_happened_is_not_reported_as_failed(
    tmp_path: Path, error: type[StoreError], asynchronous: bool
) -> None:
    driver = _LostThenFails(tmp_path / "duly.db")
    driver.error = error("a reason")
    op = ops.enqueue(Terms("work"), [NewJob(new_id(), "{}")])
    with pytest.raises(AnswerLost, match=r"^the answer was lost; the repetition failed: a reason$") as lost:
        asyncio.run(driver.arun(op)) if asynchronous else driver.run(op)
    assert driver.tries == 2
    assert op.again is not None
    assert lost.value.again == replace(op.again, repeated=True)
    driver.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_j01_data_that_is_refused_when_sent_again_is_reported_so(tmp_path: Path, asynchronous: bool) -> None:
    driver = _LostThenFails(tmp_path / "duly.db")
    driver.error = StoreRefused("a reason")
    op = ops.enqueue(Terms("work"), [NewJob(new_id(), "{}")])
    with pytest.raises(StoreRefused, match="a reason"):
        asyncio.run(driver.arun(op)) if asynchronous else driver.run(op)
    driver.close()


def test_a_file_that_stays_locked_is_counted(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "duly.db")
    store.close()
    driver = SQLiteDriver(tmp_path / "duly.db", busy_s=0.05)
    driver.run(ops.clock())
    theirs = sqlite3.connect(tmp_path / "duly.db", isolation_level=None)
    theirs.execute("begin immediate")
    with pytest.raises(StoreUnavailable):
        driver.run(ops.promote("default"))
    assert driver.failures == 1
    theirs.execute("rollback")
    theirs.close()
    driver.close()


def test_a_short_wal_is_left_alone_and_a_long_one_is_checkpointed(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "duly.db"
    driver = SQLiteDriver(path)
    driver.mind_wal()
    assert not path.exists()
    store = SQLiteStore(path)
    store.enqueue()
    driver.mind_wal()
    assert driver._writer is None
    monkeypatch.setattr(checkpoint, "CHECKPOINT_BYTES", 1)
    driver.mind_wal()
    assert driver._writer is not None
    for one in (store, driver):
        one.close()


def test_a_wal_that_was_closed_meanwhile_is_no_error_for_the_checkpointer(tmp_path: Path) -> None:
    """Who wrote minds the log after he has let others write, and another thread may close the file in between."""
    driver = SQLiteDriver(tmp_path / "duly.db")
    driver.run(ops.leave("nobody"))
    writer = driver._writer
    assert writer is not None
    driver.close()
    writer.mind_wal()
    assert not writer._log.is_long()


def test_a_checkpointer_stopped_during_its_start_stops(tmp_path: Path) -> None:
    driver = SQLiteDriver(tmp_path / "duly.db")
    driver.run(ops.clock())
    driver.run(ops.leave("nobody"))
    writer = driver._writer
    assert writer is not None
    clear = writer._checkpoint.clear

    def told_meanwhile() -> None:
        writer._stopping = True
        writer._checkpoint.set()
        clear()

    writer._checkpoint.clear = told_meanwhile  # type: ignore[method-assign]
    writer._checkpoint.set()
    [checkpointer] = [thread for thread in writer._threads if "checkpoint" in thread.name]
    checkpointer.join(10)
    assert not checkpointer.is_alive()
    driver.close()


def test_the_checkpointer_does_nothing_without_a_wal(store: Store) -> None:
    store.driver.mind_wal()


def test_the_url_to_listen_on_reaches_the_driver(postgres_url: str) -> None:
    elsewhere = f"{postgres_url}?application_name=listener"
    for listen_url in (None, elsewhere):
        settings = Settings(url=parse_url(postgres_url), listen_url=listen_url and parse_url(listen_url))
        driver = open_driver(settings)
        assert isinstance(driver, PostgresDriver)
        assert (driver._listen_url is None) == (listen_url is None)
        driver.close()


class _LockedThenBroken:
    """Stands for a connection whose file is locked at first, and then cannot be read."""

    def __init__(self) -> None:
        self._codes = [sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR]

    def execute(self, sql: str) -> Any:
        error = sqlite3.OperationalError("no")
        error.sqlite_errorcode = sqlite3.SQLITE_ERROR if sql.startswith("pragma") else self._codes.pop(0)
        raise error


def test_a_wait_for_a_lock_ends_at_once_on_another_error(tmp_path: Path) -> None:
    driver = SQLiteDriver(tmp_path / "duly.db")
    driver.run(ops.leave("nobody"))
    writer = driver._writer
    assert writer is not None
    conn, writer._conn = writer._conn, _LockedThenBroken()  # type: ignore[assignment]
    with pytest.raises(sqlite3.OperationalError) as told:
        writer._begin()
    assert told.value.sqlite_errorcode == sqlite3.SQLITE_IOERR
    writer._conn = conn
    driver.close()
