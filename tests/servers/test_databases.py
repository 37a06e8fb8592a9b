"""A database that is used again is as its template: what a test changes and forgets does not reach another test."""

from __future__ import annotations

from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import psycopg
import pytest

from tests import databases
from tests.contract.stores import D1Store, PostgresStore, SQLiteStore
from tests.databases import Files, Pool
from tests.servers.postgres import PostgresServer

DRAW = "select nextval(pg_get_serial_sequence('duly.duly_event', 'id'))"
CHANGES = {
    "a row of duly_meta": "insert into duly.duly_meta (name, value) values ('left', '1')",
    "a grant": "grant select on duly.duly_job to public",
    "a right on the database": "grant create on DATABASE to public",
    "a setting": "alter DATABASE set jit = off",
    "an option": "alter table duly.duly_job set (autovacuum_enabled = false)",
    "a column": "alter table duly.duly_job alter task drop not null",
    "a default": "alter table duly.duly_job alter task set default 'x'",
    "a table": "create table public.left_here (n integer)",
    "a schema": "create schema left_here",
    "an index": "drop index duly.duly_job_ready",
    "a function": "create function public.left_here() returns integer language sql as 'select 1'",
    "statistics": "analyze duly.duly_meta",
    "the knowledge that a table is empty": "analyze duly.duly_job",
    "no schema": "drop schema duly cascade",
}


@pytest.fixture
def pool(postgres: PostgresServer, postgres_template: str, monkeypatch: pytest.MonkeyPatch) -> Pool:
    monkeypatch.setattr(databases, "PATIENCE_S", 0.1)
    return Pool(postgres, postgres_template)


def do(url: str, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url, autocommit=True) as conn:
        cursor = conn.execute(statement.replace("DATABASE", f"database {conn.info.dbname}"))
        return cursor.fetchall() if cursor.description else []


def test_rows_and_sequences_of_a_test_are_removed_before_the_next(pool: Pool) -> None:
    url = pool.take()
    for _ in range(2):
        assert do(url, DRAW) == [(1,)]
        with closing(PostgresStore(url)) as store:
            assert store.claim() == []
            store.dead(2)
        assert pool.give_back(url) == []
        assert pool.take() == url
        assert do(url, "select id from duly.duly_done union select id from duly.duly_job") == []


def test_a_number_that_no_row_has_is_drawn_again(pool: Pool) -> None:
    url = pool.take()
    assert do(url, DRAW) == [(1,)]
    pool.give_back(url)
    assert (pool.take(), do(url, DRAW)) == (url, [(1,)])


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_database_with_another_shape_is_dropped(pool: Pool, change: str) -> None:
    url = pool.take()
    do(url, change)
    pool.give_back(url)
    assert pool.take() != url
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        do(url, "select 1")


@pytest.mark.parametrize("marked", [True, False])
def test_a_test_that_leaves_a_session_fails_unless_it_is_marked(pool: Pool, marked: bool) -> None:
    test = MagicMock(get_closest_marker=lambda name: (name == "leaves_sessions" and marked) or None)
    failing = pytest.raises(pytest.fail.Exception, match=r"left 1 sessions open: .*lock table duly.duly_job")
    with nullcontext() if marked else failing, ExitStack() as stack, pool.lend(test) as url:
        conn = stack.enter_context(closing(psycopg.connect(url)))
        conn.execute("lock table duly.duly_job")
    assert pool.take() == url


@pytest.mark.parametrize(("kind", "store"), [("sqlite", SQLiteStore), ("d1", D1Store)])
def test_a_copied_file_is_as_one_that_was_migrated(files: Files, tmp_path: Path, kind: str, store: type) -> None:
    asked = "select sql from sqlite_master union select journal_mode from pragma_journal_mode order by 1"
    with closing(store(files.fresh(kind, tmp_path / "copied"))) as copied, closing(store(tmp_path / "made")) as made:
        assert copied.query(asked) == made.query(asked)
