"""A database to measure on: made fresh, filled fast, and asked for what it wrote."""

from __future__ import annotations

import sqlite3
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg

from bench.contestant import Contestant, Duly
from bench.filling import Filling
from bench.limit import (
    POSTGRES_BARE,
    POSTGRES_SAME,
    SQLITE_BARE,
    SQLITE_SAME,
    PostgresLimit,
    SQLiteLimit,
)
from bench.parts import postgres as bare_postgres
from bench.parts import sqlite as bare_sqlite
from duly.bench.place import IN_MEMORY
from duly.store import ops
from duly.store.driver import Hook
from duly.store.postgres import driver as postgres_store
from duly.store.postgres import schema as postgres_schema
from duly.store.sqlite import checkpoint as wal
from duly.store.sqlite import driver as sqlite_store
from duly.store.sqlite import health as sqlite_health
from tests.servers.postgres import PostgresServer


class Database(ABC):
    """One database with duly's tables and the bare one, and the contestants that work on it."""

    store: str
    schema = ""
    table = "duly_job"
    limits: Sequence[SQLiteLimit | PostgresLimit]

    def __init__(self) -> None:
        self._made = 0
        self.duly = Duly(self.driver(), self.table)

    @property
    def contestants(self) -> tuple[Contestant, ...]:
        return (self.duly, *self.limits)

    def named(self, name: str) -> Contestant:
        return next(one for one in self.contestants if one.name == name)

    @abstractmethod
    def driver(self, *, hook: Hook | None = None) -> Any:
        """Open duly's driver on this database."""

    def refill(self, contestant: Contestant, rows: int, *, keep: bool) -> None:
        """Empty every table, then put `rows` ready jobs where this contestant finds them."""
        self.empty()
        self.fill(contestant.table, rows, keep=keep)
        self.settle()

    def fill(self, table: str, rows: int, *, keep: bool) -> None:
        """Add ready jobs by SQL alone, each due after the one before."""
        first, self._made = self._made, self._made + rows
        filling = Filling(self.store, self.schema, keep=keep)
        self.run(filling.bare(first, rows) if table == "bare" else filling.ready(first, rows))

    def fill_done(self, rows: int) -> None:
        """Add finished jobs by SQL alone."""
        first, self._made = self._made, self._made + rows
        self.run(Filling(self.store, self.schema).done(first, rows))

    @abstractmethod
    def run(self, sql: str, params: dict[str, Any] | None = None) -> list[Any]:
        """Run one statement and commit it."""

    def live(self, contestant: Contestant) -> int:
        """Count the jobs that this contestant has not finished."""
        [[count]] = self.run(f"select count(*) from {contestant.table}")
        return int(count)

    @abstractmethod
    def empty(self) -> None:
        """Remove every job, live, finished and bare."""

    @abstractmethod
    def settle(self) -> None:
        """Leave no work behind that the next measurement would pay for."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[list[int]]:
        """Count the WAL bytes written inside a `with`; the list it gives has one entry afterwards."""

    def close(self) -> None:
        for contestant in self.contestants:
            contestant.close()


class SQLiteDatabase(Database):
    """A file in WAL mode with `synchronous=FULL`."""

    store = "sqlite"
    limits: tuple[SQLiteLimit, ...]

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        super().__init__()
        self.duly.driver.run(ops.clock())  # opening makes the tables
        self._conn = sqlite3.connect(self.path, isolation_level=None, timeout=60)
        self._conn.execute("pragma wal_autocheckpoint = 0")
        for statement in bare_sqlite.TABLE:
            self._conn.execute(statement)
        self.limits = tuple(SQLiteLimit(self.path, limit) for limit in (SQLITE_BARE, SQLITE_SAME))

    def driver(self, *, hook: Hook | None = None) -> sqlite_store.SQLiteDriver:
        return sqlite_store.SQLiteDriver(self.path, hook=hook)

    def run(self, sql: str, params: dict[str, Any] | None = None) -> list[Any]:
        return self._conn.execute(sql, params or {}).fetchall()

    def empty(self) -> None:
        for table in ("duly_job", "duly_done", "bare"):
            self.run(f"delete from {table}")

    def settle(self) -> None:
        """Empty the WAL. While duly's own checkpointer is at it, ours is told that it is busy."""
        while self.run("pragma wal_checkpoint(truncate)")[0][0]:
            time.sleep(0.01)

    @contextmanager
    def writing(self) -> Iterator[list[int]]:
        """Differs from PostgreSQL: the log is a file that only grows while nobody checkpoints."""
        written: list[int] = []
        self.settle()
        with mock.patch.object(wal, "CHECKPOINT_BYTES", 1 << 60):
            for limit in self.limits:
                limit.checkpoint_after(pages=0)
            yield written
            written.append(wal.length(f"{self.path}-wal"))
            for limit in self.limits:
                limit.checkpoint_after(pages=1000)

    def close(self) -> None:
        super().close()
        self._conn.close()


class PostgresDatabase(Database):
    """A database of a server with fsync, synchronous_commit and full_page_writes on."""

    store = "postgres"
    schema = "duly."
    table = "duly.duly_job"

    def __init__(self, url: str) -> None:
        self.url = url
        postgres_schema.bring_up_to_date(url)
        super().__init__()
        self._conn = psycopg.connect(url, autocommit=True)
        for statement in bare_postgres.TABLE:
            self.run(statement.format(bare="bare"))
        self.limits = tuple(PostgresLimit(url, limit) for limit in (POSTGRES_BARE, POSTGRES_SAME))

    def driver(self, *, hook: Hook | None = None) -> postgres_store.PostgresDriver:
        return postgres_store.PostgresDriver(self.url, hook=hook)

    def run(self, sql: str, params: dict[str, Any] | None = None) -> list[Any]:
        cursor = self._conn.execute(sql.encode(), params)
        return cursor.fetchall() if cursor.description else []

    def empty(self) -> None:
        self.run("truncate duly.duly_job, duly.duly_done, bare")

    def settle(self) -> None:
        """Vacuum by hand: the server's own vacuum is off, so that neither side meets it by chance."""
        for table in ("duly.duly_job", "duly.duly_done", "bare"):
            self.run(f"vacuum (analyze) {table}")

    def checkpoint(self) -> None:
        """Flush, so that pages filled from here on are logged in part and not whole."""
        self.run("checkpoint")

    @contextmanager
    def writing(self) -> Iterator[list[int]]:
        written: list[int] = []
        [[before]] = self.run("select pg_current_wal_insert_lsn() - '0/0'")
        yield written
        [[after]] = self.run("select pg_current_wal_insert_lsn() - '0/0'")
        written.append(int(after - before))

    def updates(self) -> tuple[int, int]:
        """Read how many updates duly_job has had, and how many of them were HOT."""
        self.duly.close()
        ours = "datname = current_database() and application_name = 'duly'"
        while self.run(f"select 1 from pg_stat_activity where {ours}"):
            time.sleep(0.01)  # a backend reports what it did when it ends
        [row] = self.run(
            "select n_tup_upd, n_tup_hot_upd from pg_stat_all_tables where relid = 'duly.duly_job'::regclass"
        )
        return row[0], row[1]

    def close(self) -> None:
        super().close()
        self._conn.close()


class SQLiteHome:
    """A folder on a real disk for SQLite files."""

    store = "sqlite"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0

    def new_database(self) -> SQLiteDatabase:
        self._count += 1
        return SQLiteDatabase(self.folder / f"{self._count}.db")

    def describe(self) -> str:
        kind = sqlite_health.file_system(self.folder)
        return f"SQLite {sqlite3.sqlite_version}, WAL, synchronous=FULL, in {self.folder} ({kind})"


class PostgresHome:
    """A server of our own."""

    store = "postgres"

    def __init__(self, server: PostgresServer) -> None:
        self._server = server

    def new_database(self) -> PostgresDatabase:
        return PostgresDatabase(self.new_url())

    def new_url(self) -> str:
        return self._server.new_database()

    def describe(self) -> str:
        assert self._server.home is not None
        with psycopg.connect(self._server.url) as conn:
            names = ("fsync", "synchronous_commit", "full_page_writes", "shared_buffers", "autovacuum")
            told = ", ".join(f"{name}={conn.execute(f'show {name}').fetchone()[0]}" for name in names)  # type: ignore[index]
            version = conn.info.server_version
        kind = sqlite_health.file_system(self._server.home)
        return f"PostgreSQL {version // 10000}.{version % 10000}, {told}, in {self._server.home} ({kind})"


@contextmanager
def sqlite_home(folder: Path) -> Iterator[SQLiteHome]:
    """Make a folder for SQLite files inside `folder` and remove it afterwards."""
    refuse_memory(folder)
    with tempfile.TemporaryDirectory(prefix="run-", dir=folder) as made:
        yield SQLiteHome(Path(made))


@contextmanager
def postgres_home() -> Iterator[PostgresHome]:
    """Start a server that syncs. Its checkpoints and vacuums happen when we say so, and not by chance."""
    refuse_memory(Path(tempfile.gettempdir()))
    settings = {"autovacuum": "off", "max_wal_size": "8GB", "checkpoint_timeout": "1h"}
    with PostgresServer(durable=True, settings=settings) as server:
        yield PostgresHome(server)


def refuse_memory(folder: Path) -> None:
    """Refuse a folder that no disk stands behind: a sync costs nothing there, and every ratio would lie."""
    if sqlite_health.file_system(folder) in IN_MEMORY:
        raise SystemExit(f"{folder} is in memory: name a folder on a disk with --dir, or with TMPDIR for PostgreSQL")
