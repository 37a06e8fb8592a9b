"""Provides tables for a bench that nothing else uses: a SQLite file or a PostgreSQL schema, removed afterwards."""

from __future__ import annotations

import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duly.duly import Duly
from duly.errors import ConfigError, StoreError
from duly.rules.settings import Settings
from duly.store import ops
from duly.store.sqlite.health import check_host, file_system

if TYPE_CHECKING:
    import psycopg

MARK = "made by duly bench, which removes it"
PREFIX = "duly-bench-"
SCHEMA = "duly_bench"
IN_MEMORY = frozenset({"tmpfs", "ramfs"})
LOCK = "select pg_try_advisory_lock(hashtext('duly bench'))"


class BenchFailed(Exception):
    """The bench cannot continue; the message gives the reason."""


class Place(ABC):
    """Tables to measure on. `arguments` open an app on them, in this process or in another."""

    store: str
    arguments: dict[str, Any]

    def app(self) -> Duly:
        """Open an app that ignores environment variables and `duly.toml`."""
        return Duly(**self.arguments)

    @abstractmethod
    def empty(self) -> None:
        """Remove the tables and everything in them."""

    def fresh(self) -> None:
        """Replace the tables with empty ones."""
        self.empty()
        with closing(self.app()) as app:
            app.migrate()

    def describe(self) -> dict[str, str]:
        """Return the version, the durability, and a warning if a commit may be lost or costs nothing."""
        self.fresh()
        with closing(self.app()) as app:
            about = app.driver.about()
        found = {"store": f"{about.engine}, durability {about.durability}"}
        if not about.durability.startswith("full"):
            found["warning"] = f"the server does not wait for its disk ({about.durability}): a crash may lose commits"
        return found


class SQLitePlace(Place):
    """A file with `synchronous=FULL`, a new one for every measurement."""

    store = "sqlite"

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._folder = folder
        self._made = 0
        self.arguments = app_arguments(settings)

    def empty(self) -> None:
        """Remove the file, and use another name from now on."""
        for file in self._folder.iterdir():
            file.unlink(missing_ok=True)
        self._made += 1
        self.arguments |= {"url": str(self._folder / f"{self._made}.db")}

    def describe(self) -> dict[str, str]:
        """Add the file system."""
        kind, folder = file_system(self._folder), self._folder.parent
        found = super().describe() | {"files": f"{folder} ({kind or 'file system unknown'})"}
        if kind in IN_MEMORY:
            found["warning"] = f"{folder} is in memory ({kind}): a sync costs nothing there"
        return found


class PostgresPlace(Place):
    """A schema, made anew for every measurement."""

    store = "postgres"

    def __init__(self, conn: psycopg.Connection[Any], url: str, settings: Settings) -> None:
        self._conn = conn
        listen_url = None if settings.listen_url is None else settings.listen_url.dsn
        self.arguments = {**app_arguments(settings), "url": url, "schema": SCHEMA, "listen_url": listen_url}

    def empty(self) -> None:
        """Replace the schema by an empty one."""
        make_schema(self._conn)


@contextmanager
def place(settings: Settings) -> Iterator[Place]:
    """Make the place of a bench on the database of the settings, and remove it at the end."""
    url = settings.url
    match url.store:
        case "sqlite":
            with own_folder(folder_of(settings)) as folder:
                yield SQLitePlace(folder, settings)
        case "postgresql":
            with own_schema(url.dsn, settings) as conn:
                yield PostgresPlace(conn, url.dsn, settings)
        case _:
            raise ConfigError(f"duly bench measures SQLite and PostgreSQL; {url} is neither")


def folder_of(settings: Settings) -> Path:
    """Return the folder of the database, or the current one if it has none."""
    path = settings.url.path
    return Path.cwd() if path is None else Path(path).absolute().parent


@contextmanager
def own_folder(folder: Path) -> Iterator[Path]:
    """Make a folder inside `folder`, and remove it at the end."""
    check_host(folder / "bench.db", network_ok=False)
    try:
        made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
    except OSError as error:
        raise ConfigError(
            f"cannot create a file in {folder}, the folder of the database ({error.strerror}). "
            "Use another one with --url"
        ) from error
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def own_schema(url: str, settings: Settings) -> Iterator[psycopg.Connection[Any]]:
    """Connect, make the schema `duly_bench`, and drop it at the end."""
    try:
        import psycopg

        from duly.store.postgres.translate import describe, translate
    except ImportError as error:
        raise ConfigError(f"{settings.url} needs psycopg: pip install 'duly[postgres]'") from error
    try:
        patience = max(2, settings.connect_timeout_ms // 1000)
        with psycopg.connect(url, autocommit=True, connect_timeout=patience, prepare_threshold=None) as conn:
            # Behind PgBouncer the lock would stay on a connection that another client gets next.
            if settings.prepared and conn.execute(LOCK).fetchone() == (False,):
                raise BenchFailed(f"another duly bench is running in {describe(url)}. Wait until it has ended")
            _refuse_foreign_schema(conn, describe(url))
            try:
                make_schema(conn)
                yield conn
            finally:
                _drop_schema(url)
    except psycopg.errors.InsufficientPrivilege as error:
        raise StoreError(
            f"bench: this role cannot create a schema in {describe(url)} ({error.diag.message_primary}). "
            "Run it as the owner of the database, or use another database with --url"
        ) from error
    except psycopg.Error as error:
        raise translate(error, "bench", describe(url), sent=False) from error


def _refuse_foreign_schema(conn: psycopg.Connection[Any], where: str) -> None:
    """Raise if there is a schema of that name that no earlier bench made."""
    query = "select obj_description(oid, 'pg_namespace') from pg_namespace where nspname = %s"
    found = conn.execute(query, [SCHEMA]).fetchone()
    if found is not None and found[0] != MARK:
        raise ConfigError(
            f"{where} has a schema {SCHEMA} that duly bench did not make. Rename it, or use another database with --url"
        )


def make_schema(conn: psycopg.Connection[Any]) -> None:
    """Make the schema, in place of one that an earlier bench or measurement left."""
    with conn.transaction():
        conn.execute(f"drop schema if exists {SCHEMA} cascade".encode())
        conn.execute(f"create schema {SCHEMA}".encode())
        conn.execute(f"comment on schema {SCHEMA} is '{MARK}'".encode())


def _drop_schema(url: str) -> None:
    """Drop the schema on a new connection: a signal may have interrupted the other one in the middle of a message."""
    import psycopg

    with suppress(psycopg.Error), psycopg.connect(url, autocommit=True, connect_timeout=5) as conn:
        conn.execute("set lock_timeout = '10s'")  # a killed worker keeps its locks until the server notices
        conn.execute(f"drop schema if exists {SCHEMA} cascade".encode())


def app_arguments(settings: Settings) -> dict[str, Any]:
    """Return every setting of an app but the URL, so that those of your own app do not change the result."""
    return {
        "durability": "full",
        "prepared": settings.prepared,
        "max_attempts": 5,
        "max_payload": 96_000,
        "lease": "30s",
        "keep": "7d",
        "result_ttl": "1d",
        "key_ttl": "15d",
        "poll": settings.poll_ms / 1000,
        "busy_timeout": "30s",
        "connect_timeout": "30s",  # a busy server must not end a long run
        "grace": "10s",
    }


def clock_ahead_s(app: Duly) -> float:
    """Return by how much the clock of the database is ahead of this machine's."""
    asked = time.time()
    return app.driver.run(ops.clock()) / 1000 - (asked + time.time()) / 2
