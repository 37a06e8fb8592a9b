"""Backups of a SQLite database, and how one is brought back.

A copy is made in one read transaction, to a draft beside its place, and moved there when it is whole and on the disk. A
database that is there is overwritten by SQLite itself, in one transaction of that database: killed at any moment, it is
the old one or the new one.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeAlias

from duly.errors import ConfigError, StoreError, StoreUnavailable
from duly.model import HoldFigure
from duly.store import caller, migrate, ops, statements
from duly.store.sqlite import (
    BUSY_SECONDS,
    SQLiteDriver,
    bring_up_to_date,
    check_host,
    check_path,
    read_meta,
    translate,
)

Progress: TypeAlias = Callable[[int, int], None]

# How much is copied between two calls of a progress.
COPY_PAGES = 2048


def backup(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    replace: bool = False,
    progress: Progress | None = None,
) -> None:
    """Copy a database, in use or not, into one file that is whole or not there."""
    origin, place = Path(source).absolute(), Path(target).absolute()
    check_path(place)
    _refuse_to_overwrite(place, origin, replace=replace)
    with _told("backup", origin), closing(_open_to_copy(origin, "mode=rw")) as conn:
        # One read transaction for all: what others write meanwhile would make the copy begin anew, for ever perhaps.
        conn.execute("begin")
        _check_is_ours(conn, origin)
        with _draft(place, origin) as draft:
            _copy_to_draft(conn, draft, progress)
            _put(draft, place)


def restore(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    hold_by: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> HoldFigure | None:
    """Make a database what it was when `source` was made, at once or, if that fails, not at all.

    With `hold_by` nothing of it runs before a person has looked; answers what is held. Where the target is there,
    it is changed by SQLite itself, in one transaction: whoever has it open sees the old one, then the new one. It is
    refused while workers are alive there, unless `force`.
    """
    origin, place = Path(source).absolute(), Path(target).absolute()
    check_host(place, network_ok=False)
    _refuse_to_disturb(place, origin, force=force)
    fresh = not place.exists()
    with _told("restore", origin), closing(_open_to_copy(origin, _untouched(origin))) as conn:
        _check_can_be_restored(conn, origin)
        with _draft(place, origin) as draft:
            _copy_to_draft(conn, draft, _part(progress, 0, 1 if fresh else 2))
            held = _make_ready(draft, origin, hold_by)
            if fresh:
                _put(draft, place)
            else:
                _copy_into(draft, place, _part(progress, 1, 2))
    return held


def _refuse_to_overwrite(place: Path, origin: Path, *, replace: bool) -> None:
    if place.exists() and origin.exists() and place.samefile(origin):
        raise ConfigError(f"{place} is the database itself: name another file for its backup")
    if place.exists() and not replace:
        raise ConfigError(f"{place} is there already: name another file, or say that it may be replaced")
    _refuse_leftovers(place)


def _refuse_leftovers(place: Path) -> None:
    """Refuse a place with a journal that is not of the file which is to be put there: SQLite would believe it."""
    for journal in _journals(place):
        raise ConfigError(f"{journal} is there: a program uses {place}, or did not close it. Name another file")


def _journals(path: Path) -> list[Path]:
    """Name the journals beside a file in which something stands."""
    journals = [path.with_name(path.name + ending) for ending in ("-wal", "-journal")]
    return [journal for journal in journals if journal.exists() and journal.stat().st_size]


def _refuse_to_disturb(place: Path, origin: Path, *, force: bool) -> None:
    """Refuse to restore over the backup, over what is not ours, and under the feet of workers."""
    if not place.exists():
        _refuse_leftovers(place)
        return
    if origin.exists() and place.samefile(origin):
        raise ConfigError(f"{place} is the backup itself: name the database that it is to be restored to")
    with _told("restore", place), closing(_open_to_copy(place, "mode=rw")) as conn:
        if not conn.execute("select 1 from sqlite_master").fetchone():
            return
        _check_is_ours(conn, place)
        alive = [] if force else _alive(conn)
    if alive:
        raise ConfigError(
            f"workers are alive in {place} ({', '.join(alive[:3])}{'…' if len(alive) > 3 else ''}): stop them first, "
            "or force it: then they lose what they are at"
        )


def _alive(conn: sqlite3.Connection) -> list[str]:
    sql = f"select id from duly_worker where seen_at > {statements.CLOCK['sqlite']} - 3 * beat_ms"  # noqa: S608 (ours)
    return [row[0] for row in conn.execute(sql, {"now": None})]


def _open_to_copy(path: Path, how: str) -> sqlite3.Connection:
    """Open a file that must be there, and leave its journal mode as it is."""
    if not path.is_file():
        raise ConfigError(f"there is no database {path}: look at its name")
    conn = sqlite3.connect(f"{path.as_uri()}?{how}", uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    conn.execute("pragma wal_autocheckpoint = 0")
    return conn


def _untouched(path: Path) -> str:
    """Say how to open a file without a trace. One with a journal beside it needs that to be read."""
    return "mode=ro" if _journals(path) else "mode=ro&immutable=1"


def _check_is_ours(conn: sqlite3.Connection, path: Path) -> dict[str, str]:
    meta = read_meta(conn)
    if not meta:
        raise ConfigError(f"{path} is not a database of duly: it has no tables of ours. Name another file")
    return meta


def _check_can_be_restored(conn: sqlite3.Connection, path: Path) -> None:
    meta = _check_is_ours(conn, path)
    if not migrate.pending("sqlite", meta):
        migrate.check("sqlite", meta, str(path))
    (answer,) = conn.execute("pragma quick_check(1)").fetchone()
    if answer != "ok":
        raise StoreError(f"restore: {path} is damaged ({' '.join(answer.split())}): take another backup")


@contextmanager
def _draft(place: Path, origin: Path) -> Iterator[Path]:
    """Give a file beside `place` that whoever may read `origin` may read, and remove what is left of it at the end."""
    draft = place.with_name(f".{place.name}.{os.getpid()}.{os.urandom(3).hex()}.draft")
    try:
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        os.chmod(draft, origin.stat().st_mode & 0o777)
    except OSError as error:
        raise StoreUnavailable(f"the folder {place.parent} cannot be written ({error.strerror})") from error
    try:
        yield draft
    finally:
        for ending in ("", "-journal", "-wal", "-shm"):
            draft.with_name(draft.name + ending).unlink(missing_ok=True)


def _copy_to_draft(conn: sqlite3.Connection, draft: Path, progress: Progress | None) -> None:
    with closing(sqlite3.connect(draft, isolation_level=None)) as made:
        made.execute("pragma synchronous = off")  # it is synced when it is whole
        _copy(conn, made, progress)
    with closing(sqlite3.connect(draft, isolation_level=None)) as made:
        # A copy of a WAL database says that it is one, and then could not be read where nothing may be written.
        made.execute("pragma journal_mode = delete")


def _copy(source: sqlite3.Connection, target: sqlite3.Connection, progress: Progress | None) -> None:
    give_up_at = time.monotonic() + BUSY_SECONDS

    def tell(status: int, remaining: int, total: int) -> None:
        nonlocal give_up_at
        if status in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            if time.monotonic() > give_up_at:
                raise StoreUnavailable("the file is locked by another connection: end its transaction, and try again")
            return
        give_up_at = time.monotonic() + BUSY_SECONDS
        if progress is not None:
            progress(total - remaining, total)

    source.backup(target, pages=COPY_PAGES, progress=tell, sleep=0.02)


def _part(progress: Progress | None, number: int, parts: int) -> Progress | None:
    """Give the progress of one of several copies of the same length."""
    if progress is None:
        return None
    return lambda done, total: progress(number * total + done, parts * total)


def _make_ready(draft: Path, origin: Path, hold_by: str | None) -> HoldFigure | None:
    with closing(sqlite3.connect(draft, isolation_level=None)) as conn:
        bring_up_to_date(conn, origin)
        if hold_by is None:
            return None
        return caller.run(conn, ops.hold(by=hold_by, why=f"restored from {origin.name}"))


def _put(draft: Path, place: Path) -> None:
    """Move a whole file to its place, so that after a power cut too it is there as a whole or not at all."""
    _sync(draft)
    os.replace(draft, place)
    _sync(place.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _copy_into(draft: Path, place: Path, progress: Progress | None) -> None:
    """Write a database over another in one transaction of that one."""
    with (
        _told("restore", place),
        closing(SQLiteDriver(place).connect()) as target,
        closing(sqlite3.connect(draft, isolation_level=None)) as conn,
    ):
        _copy(conn, target, progress)
        # It stands. What is left in the log is cut later where somebody reads just now.
        target.execute("pragma wal_checkpoint(truncate)")


@contextmanager
def _told(op: str, where: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise translate(error, op, where) from error
