"""Opens connections to a SQLite file, takes its write lock, and turns what sqlite3 raises into errors of duly.

Before SQLite 3.51.3, a passive checkpoint (the automatic kind) can corrupt the file if it races a commit of another
connection. So duly turns automatic checkpoints off; one thread per process checkpoints (see `writer`).
"""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from duly.errors import AnswerLost, ConfigError, SchemaMismatch, StoreError, StoreRefused, StoreUnavailable

BUSY_SECONDS = 5.0
HELD_UP_TIMES = 4  # times as long during a checkpoint of another process
# How often a writer tries to take the lock: at random intervals, so that all writers have the same chance.
LOCK_LOOK_SECONDS = (0.0005, 0.004)
# duly_meta always has statistics: once the table exists, open connections do not notice when a program analyzes.
STATISTICS = "select name from sqlite_master where name = 'sqlite_stat1'"
HAS_OURS = "select exists (select 1 from sqlite_stat1 where tbl glob 'duly_*' and tbl <> 'duly_meta')"
FORGET_OURS = "delete from sqlite_stat1 where tbl glob 'duly_*' and tbl <> 'duly_meta'"


@contextmanager
def closed_on_failure(conn: sqlite3.Connection) -> Iterator[None]:
    """Close the connection if the block fails."""
    try:
        yield
    except BaseException:
        conn.close()
        raise


def open_connection(path: Path, durability: str, busy_s: float) -> sqlite3.Connection:
    """Open a connection with the settings of duly."""
    conn = sqlite3.connect(
        path,
        timeout=busy_s,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=512,
    )
    with closed_on_failure(conn):
        _patiently(conn, "pragma journal_mode = wal", busy_s)
        conn.execute(f"pragma synchronous = {durability}")
        conn.execute("pragma wal_autocheckpoint = 0")
        conn.execute("pragma cache_size = -16000")
        _forget_statistics(conn)
        conn.execute(f"pragma busy_timeout = {int(busy_s * 1000)}")
    return conn


def _forget_statistics(conn: sqlite3.Connection) -> None:
    """Delete statistics on the tables of duly, so that they do not affect plans.

    If a queue is analyzed while it is nearly empty, every later claim reads all of it. Statistics on tables of the user
    are kept.
    """
    with suppress(sqlite3.Error):  # no statistics, or another process writes: a later one deletes them
        if conn.execute(STATISTICS).fetchone() and conn.execute(HAS_OURS).fetchone()[0]:
            conn.execute("pragma busy_timeout = 0")
            conn.execute(FORGET_OURS)
            conn.execute("analyze sqlite_schema")  # reads them again


def _patiently(conn: sqlite3.Connection, sql: str, seconds: float) -> None:
    """Retry a statement that SQLite refuses, despite the busy timeout, while another process opens the file."""
    give_up_at = time.monotonic() + seconds
    while True:
        try:
            conn.execute(sql)
            return
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() > give_up_at:
                raise
            time.sleep(0.01)


def begin(conn: sqlite3.Connection, busy_s: float, *, is_held_up: Callable[[], bool] = bool) -> None:
    """Take the write lock. Fail only if no other connection has committed for the whole time.

    SQLite has no queue for writers, and its own waiting sleeps longer and longer: of eight processes, one got the lock
    after seconds. While others commit, the file is not stuck. During a checkpoint of another process there are no
    commits; on a busy machine this takes longer.
    """
    seen, give_up_at = None, 0.0
    held_up_until = time.monotonic() + HELD_UP_TIMES * busy_s
    while True:
        try:
            conn.execute("begin immediate")
            return
        except sqlite3.OperationalError as error:
            if not is_busy(error):
                raise
            now = time.monotonic()
            if now >= give_up_at:
                before, seen = seen, data_version(conn)
                if give_up_at and before == seen and (now >= held_up_until or not is_held_up()):
                    raise
                give_up_at = now + busy_s
        time.sleep(random.uniform(*LOCK_LOOK_SECONDS))  # noqa: S311


def data_version(conn: sqlite3.Connection) -> int | None:
    """Read the counter that every commit of another connection changes. None: it cannot be read."""
    try:
        return int(conn.execute("pragma data_version").fetchone()[0])
    except sqlite3.Error:
        return None


def is_busy(error: BaseException) -> bool:
    """Return whether another connection holds the lock."""
    # Errors of the sqlite3 module itself, such as for text that is not UTF-8, have no code.
    return isinstance(error, sqlite3.OperationalError) and getattr(error, "sqlite_errorcode", 0) & 0xFF in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    )


def check_path(path: Path) -> None:
    """Refuse a path that cannot be a database file."""
    if path.name == ":memory:":
        raise ConfigError("a database in memory is refused, as nothing would survive: give a path like 'jobs.db'")
    try:
        is_folder, is_lost = path.is_dir(), not path.parent.is_dir()
    except PermissionError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): check the rights and the owner of its folder"
        ) from error
    if is_folder:
        raise ConfigError(f"{path} is a folder: name a file in it, such as {path / 'duly.db'}")
    if is_lost:
        raise ConfigError(f"the folder {path.parent} does not exist: create it, or name another database file")


def translate(error: Exception, op: str, where: object, *, committing: bool = False) -> Exception:
    """Turn an error of sqlite3 into one of duly, with what happened and what to do."""
    if not isinstance(error, sqlite3.Error):
        return error
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if is_busy(error):
        return StoreUnavailable(
            f"{op}: {where} is locked by another connection. If it is your own open transaction, pass it as `conn=`; "
            "begin write transactions with BEGIN IMMEDIATE and keep them short"
        )
    if "no such table" in str(error) or "no such column" in str(error):
        return SchemaMismatch(
            f"{op}: {where} does not have the tables this version works with ({error}): run `duly migrate`"
        )
    if code == sqlite3.SQLITE_FULL:  # at the commit too: then it is rolled back
        return StoreUnavailable(f"{op}: the disk of {where} is full: make room; nothing was written")
    if committing:
        return AnswerLost(f"{op}: the commit on {where} failed ({error}); it may or may not have been written")
    if code == sqlite3.SQLITE_NOTADB:
        return StoreError(f"{op}: {where} is not a database: name another file")
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PERM):
        return StoreUnavailable(f"{op}: {where} cannot be used ({error}): check the file, its folder and its owner")
    if code in (sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH):
        return StoreRefused(f"{op}: {where} refuses this data ({error})")
    return StoreError(f"{op}: {where}: {error}")
