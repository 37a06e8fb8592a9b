"""Databases for tests: migrated files are copied, and databases of PostgreSQL are emptied and used again."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, LiteralString, cast

import psycopg
import pytest
from psycopg import sql

from duly.store import ops
from duly.store.sqlite.driver import SQLiteDriver
from tests.contract.stores import D1OnFile
from tests.servers.d1 import D1Mannered
from tests.servers.pgbouncer import let_go
from tests.servers.postgres import PostgresServer

# Autovacuum would analyze tables in the middle of a test: these databases live for minutes.
SETTINGS = {"autovacuum": "off"}
PATIENCE_S = 2.0  # a session ends a moment after its client has closed it

OTHERS = """
select concat_ws(' ', application_name, state, left(query, 200)), pid from pg_stat_activity
 where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'
"""
END_OTHERS = f"select pg_terminate_backend(pid, 5000) from ({OTHERS}) as other"

# A table is used if it has pages, or if one of its sequences has given a number.
USED = """
select c.relname from pg_class c
 where c.relkind = 'r' and c.relnamespace = 'duly'::regnamespace and c.relname <> 'duly_meta'
   and (pg_relation_size(c.oid) > 0
        or exists (select 1 from pg_depend d join pg_sequence s on s.seqrelid = d.objid
                    where d.refobjid = c.oid and pg_sequence_last_value(s.seqrelid) is not null))
"""

SHAPE = Path(__file__).with_name("servers").joinpath("shape.sql").read_text("utf-8")


class Pool:
    """Databases of one server, each as its template is when a test takes it."""

    def __init__(self, server: PostgresServer, template: str) -> None:
        self.server, self.template = server, template
        self._idle: list[str] = []
        self._shape = ""

    def take(self) -> str:
        """Return the URL of an idle database, or of a new one."""
        sys.audit("duly.tests.database")
        return self._idle.pop() if self._idle else self.server.new_database(self.template)

    @contextmanager
    def lend(self, node: pytest.Item) -> Iterator[str]:
        """Yield a URL for a test, which fails if it leaves sessions there and is not marked `leaves_sessions`."""
        url = self.take()
        yield url
        left = self.give_back(url)
        if left and node.get_closest_marker("leaves_sessions") is None:
            pytest.fail(f"The test has left {len(left)} sessions open: {left}. Close what it opens.", pytrace=False)

    def give_back(self, url: str) -> list[str]:
        """Empty a database for the next test, or drop it if more than rows has changed; return sessions left in it."""
        left: list[str] = []
        try:
            let_go(url)
            with psycopg.connect(url, autocommit=True) as conn:
                left = _ended(conn)
                _truncate(conn)
                fits = _shape(conn) == self._expected()
        except psycopg.Error:  # a test has changed what is asked for here
            fits = False
        if fits:
            self._idle.append(url)
        else:
            self.server.drop(url)
        return left

    def _expected(self) -> str:
        if not self._shape:
            url = self.server.new_database(self.template)
            with psycopg.connect(url, autocommit=True) as conn:
                self._shape = _shape(conn)
            self.server.drop(url)
        return self._shape


def _ended(conn: psycopg.Connection[Any]) -> list[str]:
    """End all other sessions; return those that did not end by themselves."""
    until = time.monotonic() + PATIENCE_S
    while left := [text for text, _ in conn.execute(OTHERS)]:
        if time.monotonic() > until:
            conn.execute(END_OTHERS)
            break
        time.sleep(0.002)
    return left


def _truncate(conn: psycopg.Connection[Any]) -> None:
    used = [sql.Identifier("duly", name) for (name,) in conn.execute(USED)]
    if used:
        conn.execute(sql.SQL("truncate {} restart identity").format(sql.SQL(", ").join(used)))


def _shape(conn: psycopg.Connection[Any]) -> str:
    [(shape,)] = conn.execute(cast(LiteralString, SHAPE)).fetchall()
    return str(shape)


class Files:
    """Migrated and closed files, one of each kind, to copy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fresh(self, kind: str, target: Path) -> Path:
        """Write a migrated file to `target` and return that path."""
        sys.audit("duly.tests.database")
        made = self.folder / kind
        if not made.exists():
            driver = SQLiteDriver(made) if kind == "sqlite" else D1OnFile(D1Mannered(made))
            driver.run(ops.clock()) if isinstance(driver, SQLiteDriver) else driver.migrate()
            driver.close()
        shutil.copyfile(made, target)
        return target


def fresh(request: pytest.FixtureRequest, kind: str, name: str = "jobs.db") -> str:
    """Return the URL of an empty database of this kind for the test that asks."""
    if kind == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    files: Files = request.getfixturevalue("files")
    return str(files.fresh(kind, request.getfixturevalue("tmp_path") / name))
