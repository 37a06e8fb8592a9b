"""What a driver finds out about its database, and how each fact is judged."""

from __future__ import annotations

import os
import sqlite3
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from duly.errors import SchemaMismatch
from duly.model import NewJob, Terms
from duly.store import health, ops
from duly.store.driver import Finding
from duly.store.health import Standbys, Transaction
from duly.store.postgres import health as postgres_health
from duly.store.postgres.driver import PostgresDriver
from duly.store.postgres.schema import bring_up_to_date
from duly.store.sqlite import checkpoint
from duly.store.sqlite import health as file_health
from duly.store.sqlite.driver import SQLiteDriver
from tests.contract.stores import new_id
from tests.servers.postgres import PostgresServer


def by_name(found: list[Finding]) -> dict[str, Finding]:
    assert len({one.name for one in found}) == len(found)
    for one in found:
        assert (one.level == "ok") == (one.remedy == ""), one
        assert "\n" not in one.text + one.remedy
    return {one.name: one for one in found}


def not_well(found: list[Finding]) -> dict[str, str]:
    return {one.name: one.level for one in found if one.level != "ok"}


# SQLite


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SQLiteDriver]:
    driver = SQLiteDriver(tmp_path / "jobs.db")
    driver.run(ops.clock())
    yield driver
    driver.close()


LIBRARY = {} if sqlite3.sqlite_version_info >= file_health.WAL_IS_SAFE else {"library": "warning"}


def test_a_healthy_file_has_no_finding_but_its_library(file: SQLiteDriver) -> None:
    found = by_name(file.examine())
    assert not_well(list(found.values())) == LIBRARY
    assert list(found) == [
        "library", "libraries", "access", "file system", "disk", "log", "durability", "journal", "schema",
    ]  # fmt: skip
    assert sqlite3.sqlite_version in found["library"].text
    assert str(file.path) in found["access"].text


def test_only_a_deep_check_reads_the_whole_file_and_finds_damage(file: SQLiteDriver) -> None:
    jobs = [NewJob(new_id(), '"' + "y" * 500 + '"') for _ in range(500)]
    file.run(ops.enqueue(Terms("work"), jobs))
    assert by_name(file.examine(deep=True))["content"].level == "ok"
    file.close()
    with file.path.open("r+b") as opened:
        for page in range(60, 90):
            opened.seek(page * 4096)
            opened.write(b"\xff" * 200)
    assert "content" not in by_name(file.examine())
    damaged = by_name(file.examine(deep=True))["content"]
    assert damaged.level == "error"
    assert "restore the last backup" in damaged.remedy


def test_less_than_full_durability_is_named(tmp_path: Path) -> None:
    driver = SQLiteDriver(tmp_path / "jobs.db", durability="normal")
    found = by_name(driver.examine())["durability"]
    assert (found.level, "synchronous = normal" in found.text) == ("warning", True)
    driver.close()


def test_another_sqlite_library_in_the_process_is_named(file: SQLiteDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    other = types.ModuleType("apsw")
    other.Connection = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apsw", other)
    found = by_name(file.examine())["libraries"]
    assert (found.level, found.text.startswith("apsw brings another")) == ("warning", True)
    assert file_health.other_libraries() == ["apsw"]


def test_a_library_that_poses_as_sqlite3_is_the_one_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    posing = types.ModuleType("pysqlite3")
    posing.Connection = sqlite3.Connection  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pysqlite3", posing)
    assert file_health.other_libraries() == []


def test_a_long_log_is_named(file: SQLiteDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = sqlite3.connect(file.path, isolation_level=None)
    reading.execute("begin")
    reading.execute("select count(*) from duly_job").fetchone()
    file.run(ops.enqueue(Terms("work"), [NewJob(new_id(), '"' + "y" * 9000 + '"') for _ in range(20)]))
    assert by_name(file.examine())["log"].level == "ok"
    monkeypatch.setattr(checkpoint, "CHECKPOINT_BYTES", 1024)
    found = by_name(file.examine())["log"]
    assert (found.level, "end what reads without end" in found.remedy) == ("warning", True)
    reading.close()


def test_a_restarted_wal_is_not_long_though_its_file_is(file: SQLiteDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(file.connect()) as conn:
        file.run(ops.enqueue(Terms("work"), [NewJob(new_id(), '"' + "y" * 9000 + '"') for _ in range(20)]))
        conn.execute("pragma wal_checkpoint(restart)")
        file.run(ops.enqueue(Terms("work"), [NewJob(new_id(), "{}")]))
        monkeypatch.setattr(checkpoint, "CHECKPOINT_BYTES", 40_000)
        found = by_name(file.examine())["log"]
    assert os.stat(file.wal).st_size > 160_000
    assert found.level == "ok"
    assert found.text == f"the write-ahead log has {health.size_of(checkpoint.length(file.wal))}"


def test_an_unwritable_file_or_folder_is_the_only_finding(file: SQLiteDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The superuser may write anywhere, so the answer of the system stands in for a real refusal."""
    real = os.access
    for shut in (file.path, file.path.parent):
        monkeypatch.setattr(os, "access", lambda path, mode, shut=shut: path != shut and real(path, mode))
        (found,) = file.examine()
        assert (found.name, found.level) == ("access", "error")
        assert ("the folder of" in found.text) == (shut != file.path)


def test_a_network_file_system_is_an_error_though_it_was_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_health, "file_system", lambda folder: "nfs4")
    driver = SQLiteDriver(tmp_path / "jobs.db", network_ok=True)
    found = by_name(driver.examine())["file system"]
    assert (found.level, "nfs4" in found.text) == ("error", True)
    driver.close()


# PostgreSQL


@pytest.fixture
def server(postgres_url: str) -> Iterator[PostgresDriver]:
    driver = PostgresDriver(postgres_url)
    yield driver
    driver.close()


def altered(driver: PostgresDriver, *commands: str) -> dict[str, Finding]:
    """Change the server or the tables, then look again with new connections."""
    with psycopg.connect(driver.url, autocommit=True) as conn:
        (database,) = conn.execute("select current_database()").fetchone() or ("",)
        for command in commands:
            conn.execute(command.replace("DATABASE", f"database {database}"))
    driver.close()
    driver.to_read = True
    return by_name(driver.examine())


@pytest.fixture(scope="module")
def vacuuming() -> Iterator[PostgresServer]:
    """A server with autovacuum, which the shared one has off."""
    with PostgresServer() as started:
        yield started


@pytest.fixture
def vacuumed(vacuuming: PostgresServer) -> Iterator[PostgresDriver]:
    url = vacuuming.new_database()
    bring_up_to_date(url)
    driver = PostgresDriver(url)
    yield driver
    driver.close()


def test_a_healthy_server_has_no_finding(vacuumed: PostgresDriver) -> None:
    found = altered(vacuumed, "alter DATABASE set synchronous_commit = on")
    assert list(found) == [
        "server", "durability", "writes", "replication", "clock", "schema", "rights", "autovacuum", "dead rows",
        "transactions", "connections",
    ]  # fmt: skip
    # The server of the tests has fsync off, for speed.
    assert set(not_well(list(found.values()))) <= {"durability"}


@pytest.mark.slow
def test_each_thing_that_is_wrong_on_a_server_is_named(vacuumed: PostgresDriver) -> None:
    found = altered(
        vacuumed,
        "alter DATABASE set default_transaction_read_only = on",
        "set transaction_read_only = off",
    )
    assert (found["writes"].level, "read-only" in found["writes"].text) == ("error", True)
    found = altered(
        vacuumed,
        "set default_transaction_read_only = off",
        "alter DATABASE reset default_transaction_read_only",
        "alter table duly.duly_job set (autovacuum_enabled = false)",
    )
    assert (found["writes"].level, found["autovacuum"].level) == ("ok", "warning")
    assert "for duly_job" in found["autovacuum"].text


@pytest.mark.parametrize("missing", ["insert", "update", "delete"])
def test_a_role_that_lacks_a_right_is_named_with_the_remedy(server: PostgresDriver, missing: str) -> None:
    given = ", ".join(sorted({"select", "insert", "update", "delete"} - {missing}))
    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute("drop role if exists looker")
        conn.execute("create role looker login")
        conn.execute("grant usage on schema duly to looker")
        conn.execute(f"grant {given} on all tables in schema duly to looker")
    other = PostgresDriver(psycopg.conninfo.make_conninfo(server.url, user="looker"))
    try:
        found = by_name(other.examine())["rights"]
        assert found.level == "error"
        assert "role looker may not work with duly_attempt" in found.text
        assert found.remedy == "run `duly migrate --grant looker` as the owner"
    finally:
        other.close()
        with psycopg.connect(server.url, autocommit=True) as conn:
            conn.execute("drop owned by looker")
            conn.execute("drop role looker")


def test_a_transaction_that_stays_open_is_named_with_its_process(
    server: PostgresDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(server.url, application_name="reports") as conn:
        conn.execute("select 1")
        assert by_name(server.examine())["transactions"].level == "ok"
        monkeypatch.setattr(postgres_health, "OLD_TRANSACTION_SECONDS", 0.0)
        found = by_name(server.examine())["transactions"]
        assert found.level == "warning"
        assert f"process {conn.info.backend_pid} (reports, " in found.text
        assert ", idle)" in found.text
    assert by_name(server.examine())["transactions"].level == "ok"


def test_a_server_with_the_same_clock_has_no_offset(server: PostgresDriver) -> None:
    with psycopg.connect(server.url, autocommit=True) as conn:
        assert abs(postgres_health._clock_offset_ms(conn)) < 500


def test_another_schema_is_examined_by_its_own_name(vacuuming: PostgresServer) -> None:
    url = vacuuming.new_database()
    driver = PostgresDriver(url, schema="other one")
    try:
        with pytest.raises(SchemaMismatch, match="duly migrate"):
            driver.examine()
        bring_up_to_date(url, schema="other one")
        found = by_name(driver.examine())
        assert found["rights"].level == "ok"
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute('alter table "other one".duly_event set (autovacuum_enabled = off)')
        assert "duly_event" in by_name(driver.examine())["autovacuum"].text
    finally:
        driver.close()


# Judgement


MIB = 1024 * 1024
OLD = Transaction(42, "psql", 400.0, idle=True)
JUDGED: list[tuple[Callable[[], Finding], str, str]] = [
    (lambda: health.library("3.51.3", safe=True), "ok", "3.51.3"),
    (lambda: health.library("3.40.1", safe=False), "warning", "3.40.1"),
    (lambda: health.journal("wal"), "ok", "WAL"),
    (lambda: health.journal("delete"), "error", "delete"),
    (lambda: health.schema(1, 1), "ok", "schema 1"),
    (lambda: health.schema(2, 1), "warning", "newer"),
    (lambda: health.room(100 * MIB, 5 * MIB), "ok", "100 MiB are free"),
    (lambda: health.room(100 * MIB - 1, 5 * MIB), "warning", "are free"),
    (lambda: health.room(400 * MIB, 5_000 * MIB), "warning", "400 MiB"),
    (lambda: health.room(500 * MIB, 5_000 * MIB), "ok", "500 MiB"),
    (lambda: health.log_length(99, 100), "ok", "0 KiB"),
    (lambda: health.log_length(64 * MIB, 64 * MIB), "warning", "64 MiB"),
    (lambda: health.content("row 3 missing from index"), "error", "row 3 missing"),
    (lambda: health.server("13.4", 130_004), "ok", "13.4"),
    (lambda: health.server("12.9", 120_009), "error", "too old"),
    (lambda: health.sync(fsync="on", commit="on"), "ok", "survives"),
    (lambda: health.sync(fsync="on", commit="off"), "warning", "synchronous_commit"),
    (lambda: health.sync(fsync="off", commit="on"), "error", "fsync"),
    (lambda: health.writable(standby=True, read_only=True), "error", "standby"),
    (lambda: health.writable(standby=False, read_only=False), "ok", "takes writes"),
    (lambda: health.replication(Standbys(True, ["b", "c"], 1)), "ok", "synchronous standby b, c"),
    (lambda: health.replication(Standbys(True, [], 1)), "error", "every write waits for a standby"),
    (lambda: health.replication(Standbys(False, [], 2)), "ok", "2 asynchronous standbys: a failover may lose"),
    (lambda: health.replication(Standbys(False, [], 0)), "ok", "no standby"),
    (lambda: health.replication(None), "warning", "standbys unknown"),
    (lambda: health.clock(999.0), "ok", "999ms apart"),
    (lambda: health.clock(90_000.0), "warning", "1m 30s ahead of"),
    (lambda: health.clock(-2_000.0), "warning", "2s behind"),
    (lambda: health.vacuum(on=False, off_for=[]), "warning", "autovacuum is off:"),
    (lambda: health.dead_rows(10, 50_000), "ok", "50,000 dead"),
    (lambda: health.dead_rows(10, 50_001), "warning", "50,001 dead"),
    (lambda: health.dead_rows(1_000_000, 2_900_000), "ok", "1,000,000 live"),
    (lambda: health.transactions([OLD] * 5), "warning", "process 42 (psql, 6m 40s, idle)"),
    (lambda: health.transactions([OLD] * 5), "warning", "and 2 more"),
    (lambda: health.transactions([Transaction(1, "", 400.0, idle=False)]), "warning", "(unnamed, 6m 40s)"),
    (lambda: health.connections(79, 100), "ok", "79 of 100"),
    (lambda: health.connections(80, 100), "warning", "80 of 100"),
    (lambda: health.rights(["a", "b", "c", "d"], "app"), "error", "a, b, c…"),
]


@pytest.mark.parametrize(("judge", "level", "text"), JUDGED)
def test_each_fact_is_judged_by_its_bounds(judge: Callable[[], Finding], level: str, text: str) -> None:
    found = judge()
    assert found.level == level, found
    assert text in found.text
    by_name([found])


def test_every_judgement_is_tried() -> None:
    judges = {
        name
        for name, one in vars(health).items()
        if callable(one) and getattr(one, "__module__", "") == health.__name__
    }
    tried = {name for judge, _, _ in JUDGED for name in judge.__code__.co_names}
    kinds = {"Transaction", "Standbys"}
    elsewhere = {"access", "libraries", "durability", "file_system", "ok", "size_of", "failover", *kinds}
    assert judges - elsewhere <= tried


def test_a_size_is_written_for_people() -> None:
    sizes: list[tuple[int, Any]] = [(0, "0 KiB"), (MIB - 1, "1,024 KiB"), (MIB, "1 MiB"), (20_480 * MIB, "20 GiB")]
    assert [health.size_of(size) for size, _ in sizes] == [text for _, text in sizes]
