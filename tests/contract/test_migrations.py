"""Migrations: a fresh database is the same as a migrated one, and a schema that does not fit is named as such."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from duly.errors import SchemaMismatch, StoreError, StoreRefused, StoreUnavailable
from duly.store import migrate, ops
from duly.store.driver import Driver
from duly.store.migrate import Migration
from duly.store.postgres import schema as pg
from duly.store.postgres.driver import PostgresDriver
from duly.store.postgres.schema import bring_up_to_date, migration_statements
from duly.store.sqlite import schema as sqlite_schema
from duly.store.sqlite.driver import SQLiteDriver
from duly.store.statements import Dialect
from tests.contract.stores import NOW, TABLES, PostgresStore, SQLiteStore, Store, new_id
from tests.contract.test_statements import every_op
from tests.servers.postgres import PostgresServer

REAL = {dialect: migrate.migrations(dialect) for dialect in ("sqlite", "postgres")}
NEWEST = len(REAL["sqlite"])
NEXT = NEWEST + 1

NEXT_STEP = f"""
-- A step as the next version would bring it; a comment; with a semicolon.
alter table {{}}duly_job add column colour text;
create index duly_job_colour on {{}}duly_job (colour) where colour is not null;
create table {{}}duly_extra (id text not null primary key, at bigint not null);
update {{}}duly_meta set value = '{NEXT}' where name = 'schema';
"""


def invented(dialect: Dialect, text: str = NEXT_STEP, number: int = NEXT) -> Migration:
    return Migration(number, "colour", text.replace("{}", "duly." if dialect == "postgres" else ""))


@pytest.fixture
def next_version(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Become a version of duly that has one more migration, or the text given instead of it."""

    def become(text: str = NEXT_STEP) -> None:
        monkeypatch.setattr(migrate, "migrations", lambda dialect: (*REAL[dialect], invented(dialect, text)))

    return become


@pytest.fixture
def empty(postgres: PostgresServer) -> Iterator[str]:
    url = postgres.new_database()
    yield url
    postgres.drop(url)


# A schema serves every version from `works_with` on: workers of the last one run on beside us.
META = [("schema", str(NEWEST)), ("works_with", "1")]


def open_file(path: Path) -> None:
    """Open a file as duly does, and let go of it."""
    driver = SQLiteDriver(path)
    try:
        driver.run(ops.clock())
    finally:
        driver.close()


def on_file(path: Path, text: str, *params: Any) -> list[tuple[Any, ...]]:
    conn = sqlite3.connect(path, isolation_level=None)
    try:
        conn.execute("pragma wal_autocheckpoint = 0")
        return conn.execute(text, params).fetchall()
    finally:
        conn.close()


def on_server(url: str, text: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as conn:
        cursor = conn.execute(text)
        return cursor.fetchall() if cursor.description else []


def schema_of_file(path: Path) -> list[Any]:
    """Tables with their columns, indexes and views; a column that was added later stands last, as in a fresh file."""
    made = on_file(path, "select type, name, tbl_name from sqlite_master where name like 'duly%' order by name")
    columns = [
        (name, on_file(path, f"select name, type, \"notnull\", dflt_value, pk from pragma_table_info('{name}')"))
        for kind, name, _ in made
        if kind in ("table", "view")
    ]
    texts = on_file(path, "select name, sql from sqlite_master where type in ('index', 'view') order by name")
    return [made, columns, texts, on_file(path, "select name, value from duly_meta order by name")]


def schema_of_server(url: str, schema: str = "duly") -> list[Any]:
    queries = """
    select table_name, column_name, ordinal_position, data_type, is_nullable, column_default, is_identity
      from information_schema.columns where table_schema = '{}' order by 1, 3;
    select tablename, indexname, replace(indexdef, '{}.', '') from pg_indexes where schemaname = '{}' order by 1, 2;
    select conrelid::regclass::text, conname, pg_get_constraintdef(oid) from pg_constraint
     where connamespace = '{}'::regnamespace order by 1, 2;
    select relname, relkind, reloptions from pg_class where relnamespace = '{}'::regnamespace order by 1;
    select viewname, definition from pg_views where schemaname = '{}' order by 1;
    select name, value from {}.duly_meta order by 1"""
    return [on_server(url, query.replace("{}", schema)) for query in queries.split(";")]


# A fresh database and a migrated one are the same


def test_a_fresh_sqlite_file_is_the_same_as_a_migrated_one(tmp_path: Path, next_version: Any) -> None:
    open_file(tmp_path / "old.db")
    next_version()
    open_file(tmp_path / "old.db")
    open_file(tmp_path / "fresh.db")
    assert schema_of_file(tmp_path / "old.db") == schema_of_file(tmp_path / "fresh.db")
    assert on_file(tmp_path / "old.db", "select value from duly_meta where name = 'schema'") == [(str(NEXT),)]
    assert on_file(tmp_path / "old.db", "select count(*) from duly_extra") == [(0,)]


def test_a_fresh_postgres_schema_is_the_same_as_a_migrated_one(
    postgres: PostgresServer, empty: str, next_version: Any
) -> None:
    other = postgres.new_database()
    assert [step.number for step in bring_up_to_date(empty)] == list(range(1, NEXT))
    next_version()
    assert [step.number for step in migrate.pending("postgres", pg.look(empty))] == [NEXT]
    assert [step.number for step in bring_up_to_date(empty)] == [NEXT]
    assert [step.number for step in bring_up_to_date(other)] == list(range(1, NEXT + 1))
    assert schema_of_server(empty) == schema_of_server(other)
    assert migrate.pending("postgres", pg.look(empty)) == bring_up_to_date(empty) == ()
    postgres.drop(other)


def test_jobs_live_through_a_migration(tmp_path: Path, empty: str, next_version: Any) -> None:
    bring_up_to_date(empty)
    stores = [SQLiteStore(tmp_path / "duly.db"), PostgresStore(empty)]
    ids = [store.enqueue(3) for store in stores]
    for store in stores:
        store.driver.close()
    next_version()
    bring_up_to_date(empty)
    for store, made in zip((SQLiteStore(tmp_path / "duly.db"), PostgresStore(empty)), ids, strict=True):
        assert [job.id for job in store.claim(5)] == made
        store.close()
    for store in stores:
        store.close()


# What the first version writes, in its own words


OLD_WORKER = """
insert into duly_worker (id, host, pid, queues, tasks, beat_ms, started_at, seen_at, slots, succeeded, failed)
values ('old', 'h', 1, '["default"]', '["work"]', 10000, 1, 1, 1, 0, 0)"""
OLD_JOB = f"""
insert into duly_job (id, task, queue, priority, state, attempt, max_attempts, created_at, due_at, lease_ms, token,
                      lease_until, key, fingerprint, key_ttl_ms, keep_ms, result_ttl_ms, payload)
values (?, 'work', ?, 0, ?, ?, 1, {NOW}, {NOW} + ?, 30000, ?, ?, ?, ?, ?, 1000, 1000, '1')"""
OLD_DONE = f"""
insert into duly_done (id, task, queue, priority, state, attempt, max_attempts, crashes, created_at, lease_ms,
                       finished_at, keep_ms, result_ttl_ms, replay_count, payload, result, result_until)
values (?, 'work', 'default', 0, ?, 1, 1, 0, {NOW}, 30000, {NOW}, 1000, 1000, 0, '1', ?, {NOW} + 1000)"""
OLD_KEY = "insert into duly_key (task, key, job_id, state, fingerprint) values ('work', 'k', ?, 'live', 'f')"
OLD_PAUSE = "insert into duly_event (at, name, subject, by, why) values (1, 'task.paused', 'other', 'ann', 'so')"
OLD_SCHEDULE = f"""
insert into duly_schedule (name, task, mode, spec, interval_ms, next_at, payload)
values ('old', 'work', 'rate', '10m', 600000, {NOW} + 600000, '1')"""


def made_by_first_version(store: Store) -> dict[str, str]:
    """Fill a database with jobs in every state, and return the ids by state."""
    ids = {state: new_id() for state in ("succeeded", "dead", "running", "ready", "scheduled")}
    store.query(OLD_DONE, ids["succeeded"], "succeeded", "1")
    store.query(OLD_DONE, ids["dead"], "dead", None)
    store.query(OLD_JOB, ids["running"], "default", "running", 1, 0, 2**40, NOW + 30_000, None, None, None)
    store.query(OLD_JOB, ids["ready"], "default", "ready", 0, 0, None, None, None, None, None)
    store.query(OLD_JOB, ids["scheduled"], "default", "scheduled", 0, 1000, None, None, None, None, None)
    keyed = new_id()
    store.query(OLD_JOB, keyed, "keys", "ready", 0, 0, None, None, "k", "f", 1000)
    store.query(OLD_KEY, keyed)
    store.query(OLD_PAUSE)
    store.query(OLD_WORKER)
    store.query(OLD_SCHEDULE)
    return ids


def rows_of(store: Store, tables: dict[str, list[str]]) -> dict[str, list[Any]]:
    return {
        table: sorted(store.query(f"select {', '.join(columns)} from {table}"), key=repr)
        for table, columns in tables.items()
    }


# Migrations of versions to come, so that a database can be older than its code by more than one of them. They do what
# real ones do: add columns, tables and views, and make an index anew.
LATER_STEPS = (
    NEXT_STEP,
    f"""
drop index {{}}duly_job_ready;
create index duly_job_ready on {{}}duly_job (queue, suspect, priority desc, due_at, id, colour)
 where state = 'ready' and lane is null;
alter table {{}}duly_schedule add column shade text not null default 'none';
create view {{}}duly_colours as select id, colour from {{}}duly_job;
update {{}}duly_meta set value = '{NEXT + 1}' where name = 'schema';
""",
)
LAST = NEWEST + len(LATER_STEPS)


def all_steps(dialect: Dialect) -> tuple[Migration, ...]:
    later = enumerate(LATER_STEPS, NEXT)
    return (*REAL[dialect], *(invented(dialect, text, number) for number, text in later))


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("schema", range(1, LAST))
def test_u01_an_older_schema_is_migrated_to_this_version_without_loss(
    tmp_path: Path, empty: str, kind: str, schema: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = {"sqlite": lambda: SQLiteStore(tmp_path / "duly.db"), "postgres": lambda: PostgresStore(empty)}[kind]
    with monkeypatch.context() as then:
        then.setattr(migrate, "migrations", lambda dialect: all_steps(dialect)[:schema])
        if kind == "postgres":
            bring_up_to_date(empty)
        old = opened()
        ids = made_by_first_version(old)
        tables = {table: columns_of(old, table) for table in TABLES}
        before = rows_of(old, tables)
        assert dict(old.query("select name, value from duly_meta")) == {"schema": str(schema), "works_with": "1"}
        old.close()
    monkeypatch.setattr(migrate, "migrations", all_steps)
    if kind == "postgres":
        needs = f"has schema {schema}, this version of duly needs {LAST}: run `duly migrate"
        assert needs in refused(PostgresDriver(empty))
        assert [step.number for step in bring_up_to_date(empty)] == list(range(schema + 1, LAST + 1))
    store = opened()
    assert sorted(store.query("select name, value from duly_meta")) == [("schema", str(LAST)), ("works_with", "1")]
    assert rows_of(store, tables) == before
    assert {state: store.state(job_id) for state, job_id in ids.items()} == {state: state for state in ids}
    assert store.get(ids["succeeded"]).result == 1
    # A worker of the old version goes on beside us, as works_with promises.
    store.query(OLD_WORKER.replace("'old'", "'old too'"))
    assert [worker.id for worker in store.run(ops.workers(now=store.now))] == ["old", "old too"]
    # Schedules, keys and batches can be used, and so can the jobs that were there.
    store.schedule(pause_after=1)
    run_id = store.fire(next_at=NOW + 600_000)
    batch = store.batch(key="k", ok_at=0.5)
    [added] = store.add(batch, queue="batched")
    taken = {job.id: job for job in store.claim(9)}
    assert set(taken) == {ids["ready"], run_id}
    store.succeed(taken[ids["ready"]])
    store.kill(taken[run_id])
    [row] = store.query("select next_at, dead_runs, paused_by from duly_schedule where name = 's'")
    assert row == (NOW + 600_000, 1, "duly")
    store.succeed(store.claim(1, queue="keys")[0])
    assert store.query("select state, expires_at from duly_key") == [("succeeded", NOW + 1000)]
    store.seal(batch)
    store.succeed(store.claim(1, queue="batched")[0])
    assert (store.state(added), store.progress(batch).complete) == ("succeeded", True)
    assert store.told() == ["on_complete", "on_success"]
    store.close()


def columns_of(store: Store, table: str) -> list[str]:
    if store.kind == "sqlite":
        return [row[0] for row in store.query(f"select name from pragma_table_info('{table}')")]
    found = store.query("select column_name from information_schema.columns where table_name = ?", table)
    return sorted(row[0] for row in found)


@pytest.mark.parametrize("dialect", REAL)
def test_migrations_are_numbered_from_one_without_a_gap(dialect: Dialect) -> None:
    assert [step.number for step in REAL[dialect]] == list(range(1, len(REAL[dialect]) + 1))
    assert migrate.newest(dialect) == len(REAL[dialect])


def test_both_dialects_have_the_same_tables_and_columns(tmp_path: Path, postgres_url: str) -> None:
    open_file(tmp_path / "duly.db")
    names = on_file(tmp_path / "duly.db", "select name from sqlite_master where type in ('table', 'view')")
    tables = {row[0] for row in names if row[0].startswith("duly")}
    lite = {
        name: {row[0] for row in on_file(tmp_path / "duly.db", f"select name from pragma_table_info('{name}')")}
        for name in tables
    }
    post: dict[str, set[str]] = {}
    for table, column in on_server(
        postgres_url, "select table_name, column_name from information_schema.columns where table_schema = 'duly'"
    ):
        post.setdefault(table, set()).add(column)
    assert lite == post
    assert migrate.newest("sqlite") == migrate.newest("postgres")


# SQLite opens and migrates by itself


def test_a_file_is_migrated_when_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    open_file(path)
    assert on_file(path, "select name, value from duly_meta order by name") == META


OPEN = """
import sys
from pathlib import Path
from duly.store import ops
from duly.store.sqlite.driver import SQLiteDriver
driver = SQLiteDriver(Path(sys.argv[1]))
print("here", flush=True)
sys.stdin.readline()
driver.run(ops.register(sys.argv[2], host="h", pid=1, queues=[], tasks=[], beat_ms=1))
driver.close()
"""


@pytest.mark.slow
def test_eight_processes_that_open_a_new_file_at_once_all_succeed(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", OPEN, str(path), f"w{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(8)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    ended = [(process.communicate(timeout=60)[1], process.returncode) for process in processes]
    assert ended == [("", 0)] * 8
    assert on_file(path, "select count(*) from duly_worker") == [(8,)]
    assert on_file(path, "pragma integrity_check") == [("ok",)]


# Schemas that do not fit


def test_postgres_without_tables_raises_with_duly_migrate(empty: str) -> None:
    driver = PostgresDriver(empty)
    with pytest.raises(SchemaMismatch, match=r"no duly tables yet: run `duly migrate --url URL`"):
        driver.run(ops.clock())
    bring_up_to_date(empty)
    driver.run(ops.clock())  # the same driver, without a restart
    driver.close()


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A migrated database: how to open it, and how to change what it says of its schema."""
    if request.param == "sqlite":
        path = tmp_path / "duly.db"
        open_file(path)
        return lambda: SQLiteDriver(path), lambda text: on_file(path, text.replace("duly.", ""))
    url = request.getfixturevalue("postgres_url")
    return lambda: PostgresDriver(url), lambda text: on_server(url, text)


def refused(driver: Driver) -> str:
    try:
        with pytest.raises(SchemaMismatch) as raised:
            driver.run(ops.next_due("q"))
        return str(raised.value)
    finally:
        driver.close()


def test_an_older_schema_raises_with_duly_migrate_on_postgres(postgres_url: str, next_version: Any) -> None:
    next_version()
    told = refused(PostgresDriver(postgres_url))
    assert f"has schema {NEWEST}, this version of duly needs {NEXT}: run `duly migrate --url URL`" in told


def test_u01_a_newer_schema_that_lists_this_version_works(database: Any) -> None:
    connect, change = database
    change(f"update duly.duly_meta set value = '{NEXT}' where name = 'schema'")
    driver = connect()
    assert driver.run(ops.next_due("q")) is None
    driver.close()


def test_a_newer_schema_that_needs_a_newer_version_is_refused(database: Any) -> None:
    connect, change = database
    change(f"update duly.duly_meta set value = '{NEXT}' where name in ('schema', 'works_with')")
    told = refused(connect())
    assert f"has schema {NEXT}, which needs a newer duly than this one (schema {NEWEST}): upgrade duly" in told


def test_a_table_that_is_missing_is_named(database: Any) -> None:
    connect, change = database
    change("drop view duly.duly_jobs")
    change("drop view duly.duly_dead")
    change("drop view duly.duly_why")
    change("drop table duly.duly_done")
    driver = connect()
    with pytest.raises(SchemaMismatch, match="duly_done"):
        driver.run(ops.dead_metrics())
    driver.close()


# A migration that fails


BROKEN = "create table {}duly_extra (id text);\nalter table {}duly_nothing add column x text;"


def test_a_migration_that_fails_half_way_leaves_nothing_on_sqlite(tmp_path: Path, next_version: Any) -> None:
    path = tmp_path / "duly.db"
    open_file(path)
    before = schema_of_file(path)
    next_version(BROKEN)
    with pytest.raises(StoreError, match="migrate"):
        open_file(path)
    assert schema_of_file(path) == before
    with pytest.raises(StoreError, match="migrate"):
        open_file(tmp_path / "fresh.db")
    assert on_file(tmp_path / "fresh.db", "select name from sqlite_master") == []
    next_version()
    open_file(path)  # and the file is not the worse for it
    assert on_file(path, "select value from duly_meta where name = 'schema'") == [(str(NEXT),)]


def test_a_migration_that_fails_half_way_leaves_nothing_on_postgres(empty: str, next_version: Any) -> None:
    next_version(BROKEN)
    with pytest.raises(StoreError, match="duly_nothing"):
        bring_up_to_date(empty)
    assert on_server(empty, "select 1 from pg_namespace where nspname = 'duly'") == []
    next_version()
    assert len(bring_up_to_date(empty)) == NEXT


def test_a_migration_that_cannot_lock_a_table_times_out_with_the_reason(
    empty: str, next_version: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others would wait behind it, for as long as a dump takes."""
    bring_up_to_date(empty)
    next_version()
    monkeypatch.setattr(pg, "LOCK_TIMEOUT", "set local lock_timeout = '50ms'")
    with psycopg.connect(empty) as dump:
        dump.execute("lock table duly.duly_job in access share mode")
        with pytest.raises(StoreUnavailable, match="nothing was changed"):
            bring_up_to_date(empty)
        assert [step.number for step in migrate.pending("postgres", pg.look(empty))] == [NEXT]
    assert [step.number for step in bring_up_to_date(empty)] == [NEXT]


def test_postgres_migrations_at_the_same_time_wait_for_each_other(empty: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as threads:
        applied = list(threads.map(lambda _: bring_up_to_date(empty), range(4)))
    assert sorted(len(steps) for steps in applied) == [0, 0, 0, len(REAL["postgres"])]


# Grants


@pytest.fixture
def role(postgres: PostgresServer, empty: str) -> Iterator[str]:
    name = f'wor"ker {os.urandom(3).hex()}'
    quoted = name.replace('"', '""')
    on_server(empty, f'create role "{quoted}" login')
    yield name
    on_server(empty, f'drop owned by "{quoted}"')
    on_server(empty, f'drop role "{quoted}"')


def test_a_role_with_only_the_grants_can_run_every_operation_and_drop_nothing(empty: str, role: str) -> None:
    bring_up_to_date(empty, grant=role)
    url = make_conninfo(empty, user=role)
    driver = PostgresDriver(url)
    for asked in every_op().values():
        for op in asked:
            driver.run(op)
            if op.again is not None:
                driver.run(op.again)
    driver.close()
    with psycopg.connect(url, autocommit=True) as conn:
        for statement in (
            "drop table duly.duly_job",
            "truncate duly.duly_job",
            "alter table duly.duly_job add column x int",
            "create table duly.mine (x int)",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(statement)


def test_a_role_without_grants_gets_the_command_for_them(empty: str, role: str) -> None:
    bring_up_to_date(empty)
    driver = PostgresDriver(make_conninfo(empty, user=role))
    with pytest.raises(StoreError, match=r"duly migrate --grant ROLE") as raised:
        driver.run(ops.next_due("q"))
    assert not isinstance(raised.value, StoreRefused)
    driver.close()


def test_grants_include_tables_of_later_migrations(empty: str, role: str, next_version: Any) -> None:
    bring_up_to_date(empty, grant=role)
    next_version()
    bring_up_to_date(empty, grant=role)
    assert on_server(make_conninfo(empty, user=role), "select count(*) from duly.duly_extra") == [(0,)]


# The script for people who run such things themselves


@pytest.mark.parametrize("schema", ["duly", "other"])
def test_the_script_run_by_psql_gives_the_same_schema(
    postgres: PostgresServer, empty: str, postgres_url: str, schema: str
) -> None:
    script = ";\n".join(migration_statements(schema, migrate.pending("postgres", {}))) + ";"
    psql = postgres.bin_dir / "psql"
    if psql.exists():
        ran = subprocess.run(
            [psql, empty, "-X", "-q", "-v", "ON_ERROR_STOP=1", "--single-transaction", "-f", "-"],
            input=script,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ran.returncode, ran.stderr) == (0, "")
    else:
        on_server(empty, script)
    assert bring_up_to_date(empty, schema=schema) == ()
    ours, theirs = schema_of_server(empty, schema), schema_of_server(postgres_url)
    assert repr(ours).replace(f"{schema}.", "duly.") == repr(theirs)


def test_the_script_can_be_limited_to_what_is_pending_and_holds_the_grants(next_version: Any) -> None:
    next_version()
    pending = migrate.pending("postgres", {"schema": str(NEWEST)})
    script = ";\n".join(migration_statements("duly", pending, grant='o--;d"d'))
    assert "duly_extra" in script
    assert "create table" in script
    assert '"duly".duly_meta (' not in script
    assert 'grant select, insert, update, delete on all tables in schema "duly" to "o--;d""d";' in script


# Settings of the tables


def test_postgres_tables_that_are_rewritten_all_day_have_room_and_are_vacuumed_by_number(postgres_url: str) -> None:
    options = dict(
        on_server(
            postgres_url,
            "select relname, reloptions from pg_class where relnamespace = 'duly'::regnamespace and relkind = 'r'",
        )
    )
    job = dict(option.split("=") for option in options["duly_job"])
    assert 40 <= int(job["fillfactor"]) <= 80
    assert (job["autovacuum_vacuum_scale_factor"], job["autovacuum_analyze_scale_factor"]) == ("0", "0")
    assert int(job["autovacuum_vacuum_threshold"]) <= 10_000
    assert int(job["autovacuum_analyze_threshold"]) <= 10_000
    assert job["autovacuum_vacuum_cost_delay"] == "0"
    for table in ("duly_batch", "duly_worker", "duly_key"):
        assert any(option.startswith("fillfactor=") for option in options[table]), table
    assert any(option.startswith("autovacuum_vacuum_scale_factor=") for option in options["duly_done"])


def test_no_index_of_live_jobs_is_touched_by_a_beat(postgres_url: str) -> None:
    """A beat must stay a HOT update: no index may name what it changes."""
    definitions = [
        row[0] for row in on_server(postgres_url, "select indexdef from pg_indexes where tablename = 'duly_job'")
    ]
    assert len(definitions) > 5
    for definition in definitions:
        for column in ("lease_until", "heartbeat_at", "progress"):
            assert column not in definition


def test_a_file_migrated_to_an_unknown_schema_while_we_wait_for_its_lock_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next_version: Any
) -> None:
    path = tmp_path / "duly.db"
    open_file(path)
    next_version()  # so that we want to migrate
    theirs = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    theirs.execute("begin immediate")

    def waits(conn: sqlite3.Connection, _: float) -> None:
        theirs.execute("update duly_meta set value = '999'")
        theirs.execute("commit")
        conn.execute("begin immediate")

    driver = SQLiteDriver(path)
    monkeypatch.setattr(sqlite_schema, "begin", waits)
    with pytest.raises(SchemaMismatch, match="needs a newer duly"):
        driver.run(ops.clock())
    driver.close()
    theirs.close()
