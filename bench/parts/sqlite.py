"""SQLite: files in a folder of their own beside the database, on the same disk, and the limit on them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from bench.parts.place import Limit, Place, app_arguments, now_ms
from duly.bench.place import IN_MEMORY, own_folder
from duly.rules.settings import Settings
from duly.store.sqlite import checkpoint
from duly.store.sqlite.health import file_system

TABLE = (
    """create table bare (
        id text not null primary key, queue text not null, state text not null, payload text not null,
        due_at bigint not null, token bigint, lease_until bigint) without rowid""",
    "create index bare_ready on bare (queue, due_at) where state = 'ready'",
    """create table bare_done (
        id text not null primary key, queue text not null, payload text not null, due_at bigint not null,
        finished_at bigint not null) without rowid""",
)
INSERT = "insert into bare values (:id, 'default', 'ready', :payload, :now, null, null)"
CLAIM = """
    update bare set state = 'running', token = 1, lease_until = :now + 30000
     where id in (select id from bare where queue = 'default' and state = 'ready' order by due_at limit :batch)
    returning id, payload"""
KEEP = """
    insert into bare_done
    select id, queue, payload, due_at, :now from bare where id in (select value from json_each(:ids))"""
DELETE = "delete from bare where id in (select value from json_each(:ids))"


@contextmanager
def place(folder: Path, settings: Settings) -> Iterator[SQLitePlace]:
    """Make a folder inside this one, and remove it at the end."""
    with own_folder(folder) as made, closing(SQLitePlace(made, settings)) as found:
        yield found


class SQLitePlace(Place):
    """A file in WAL mode with `synchronous=FULL`, a new one for every measurement."""

    store = "sqlite"

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._folder = folder
        self._count = 0
        self._conn: sqlite3.Connection | None = None
        self.arguments = app_arguments(settings)

    @property
    def path(self) -> str:
        """The file that is measured on now."""
        return str(self._folder / f"{self._count}.db")

    def fresh(self) -> None:
        """Begin with another file."""
        self.close()
        for suffix in ("", "-wal", "-shm"):
            Path(self.path + suffix).unlink(missing_ok=True)
        self._count += 1
        self.arguments = {**self.arguments, "url": self.path}
        app = self.app()
        app.migrate()
        # Open before the app is closed: who closes a file as the last one removes its log.
        self._conn = sqlite3.connect(self.path, isolation_level=None, timeout=60)
        self._conn.execute("pragma wal_autocheckpoint = 0")
        for statement in TABLE:
            self._conn.execute(statement)
        app.close()

    def run(self, sql: str) -> list[Any]:
        """Run one statement and commit it."""
        assert self._conn is not None
        return self._conn.execute(sql).fetchall()

    def settle(self) -> None:
        """Empty the WAL. While the checkpointer of an app is at it, ours is told that it is busy."""
        while self.run("pragma wal_checkpoint(truncate)")[0][0]:
            time.sleep(0.01)

    def limit(self) -> Limit:
        """Open the limit on this file."""
        return SQLiteLimit(self.path)

    def wal_bytes(self) -> int:
        """Say how long the log is: it only grows while nobody checkpoints."""
        return checkpoint.length(f"{self.path}-wal")

    def describe(self) -> dict[str, Any]:
        """Say which library, how it syncs, and on what kind of file system."""
        kind = file_system(self._folder)
        found = {
            "store": f"SQLite {sqlite3.sqlite_version}, WAL, synchronous=FULL",
            "files": f"{self._folder.parent} ({kind or 'file system unknown'})",
        }
        if kind in IN_MEMORY:
            found["warning"] = f"{self._folder.parent} is in memory ({kind}): a sync costs nothing there"
        return found

    def close(self) -> None:
        """Let go of the file."""
        if self._conn is not None:
            self._conn.close()
            self._conn = None


class SQLiteLimit(Limit):
    """One connection of our own. It checkpoints by itself, every 4 MB, inside its commits."""

    def __init__(self, path: str) -> None:
        self._conn = connect(path)
        self._held: list[str] = []

    def insert(self, job_id: str, payload: str) -> None:
        """Add one job and commit."""
        self._conn.execute("begin immediate")
        self._conn.execute(INSERT, {"id": job_id, "payload": payload, "now": now_ms()})
        self._conn.execute("commit")

    def insert_many(self, ids: Sequence[str], payloads: Sequence[str]) -> None:
        """Add jobs and commit."""
        now = now_ms()
        rows = [{"id": job_id, "payload": text, "now": now} for job_id, text in zip(ids, payloads, strict=True)]
        self._conn.execute("begin immediate")
        self._conn.executemany(INSERT, rows)
        self._conn.execute("commit")

    def take(self, batch: int, *, keep: bool = False) -> int:
        """Claim the oldest jobs and delete or move those claimed before; there is no round trip here."""
        held = msgspec.json.encode(self._held).decode()
        self._conn.execute("begin immediate")
        if keep:
            self._conn.execute(KEEP, {"ids": held, "now": now_ms()})
        self._conn.execute(DELETE, {"ids": held})
        claimed = self._conn.execute(CLAIM, {"batch": batch, "now": now_ms()}).fetchall()
        self._conn.execute("commit")
        self._held = [job_id for job_id, _ in claimed]
        return len(claimed)

    def close(self) -> None:
        """Let go of the file."""
        self._conn.close()


def connect(path: str) -> sqlite3.Connection:
    """Open a connection of a limit: it syncs as hard as duly does, and caches as much."""
    conn = sqlite3.connect(path, isolation_level=None, timeout=60)
    for pragma in ("journal_mode = wal", "synchronous = full", "cache_size = -16000"):
        conn.execute(f"pragma {pragma}")
    return conn
