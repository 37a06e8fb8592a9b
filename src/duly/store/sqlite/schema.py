"""The schema of a SQLite file: reads its version, creates the tables, and applies migrations."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from duly.store import migrate
from duly.store.sqlite.connection import BUSY_SECONDS, begin, check_path, translate


def bring_up_to_date(conn: sqlite3.Connection, path: Path, busy_s: float = BUSY_SECONDS) -> None:
    """Create or migrate the tables. Any number of processes may do this at once, while others write."""
    try:
        if migrate.pending("sqlite", read_meta(conn)):
            _migrate(conn, busy_s)
        # Read again: another process may have applied newer migrations meanwhile.
        migrate.check("sqlite", read_meta(conn), str(path))
    except sqlite3.Error as error:
        raise translate(error, "migrate", path) from error


def _migrate(conn: sqlite3.Connection, busy_s: float) -> None:
    conn.execute("pragma busy_timeout = 0")  # `begin` waits instead
    begin(conn, busy_s)
    conn.execute(f"pragma busy_timeout = {int(busy_s * 1000)}")  # without a WAL, a commit waits for readers
    try:
        for step in migrate.pending("sqlite", read_meta(conn)):
            for statement in step.statements:
                conn.execute(statement)
        conn.execute("analyze duly_meta")
        conn.execute("commit")
    except sqlite3.Error:
        if conn.in_transaction:
            conn.execute("rollback")
        raise


def look(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read the `duly_meta` of a file, without creating or changing the file."""
    place = Path(path).absolute()
    check_path(place)
    if not place.exists():
        return {}
    wal = place.with_name(place.name + "-wal")
    # Without `immutable`, reading would leave files beside it; but rows that are only in the WAL must be read.
    how = "mode=ro" if wal.exists() and wal.stat().st_size else "mode=ro&immutable=1"
    try:
        conn = sqlite3.connect(f"{place.as_uri()}?{how}", uri=True)
        try:
            return read_meta(conn)
        finally:
            conn.close()
    except sqlite3.Error as error:
        raise translate(error, "migrate", path) from error


def read_meta(conn: sqlite3.Connection) -> dict[str, str]:
    """Read `duly_meta`; empty if the file has no tables of duly yet."""
    if not conn.execute("select 1 from sqlite_master where name = 'duly_meta'").fetchone():
        return {}
    return dict(conn.execute("select name, value from duly_meta"))
