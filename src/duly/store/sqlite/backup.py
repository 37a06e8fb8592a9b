"""Makes backups of a SQLite database, and restores them.

A copy is made in one read transaction, to a draft beside its target, and moved there when it is complete and on the
disk. SQLite overwrites an existing database in one transaction: if the process is killed, it is the old one or the new
one. If a killed process left a draft, the next copy to the same target deletes it.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

from duly.errors import ConfigError, StoreError, StoreUnavailable
from duly.model import HoldFigure
from duly.store import caller, migrate, ops, statements
from duly.store.sqlite.connection import BUSY_SECONDS, check_path, translate
from duly.store.sqlite.driver import SQLiteDriver
from duly.store.sqlite.health import check_host
from duly.store.sqlite.schema import bring_up_to_date, read_meta

Progress: TypeAlias = Callable[[int, int], None]

# How much is copied between two calls of a progress.
COPY_PAGES = 2048
# What belongs to a database file and lies beside it.
BESIDE = ("-journal", "-wal", "-shm")
SHOWN = 3
# What a file system answers that has no hard links, such as FAT.
NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})

# The drafts that this process is making. One with our pid that is not among them is of a process that had it before.
_drafts: set[Path] = set()


def backup(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    replace: bool = False,
    progress: Progress | None = None,
) -> None:
    """Copy a database, in use or not, into one file that is whole or not there."""
    origin, place = _resolved(source), _resolved(target)
    check_path(place)
    _refuse_to_overwrite(place, origin, replace=replace)
    with _translated("backup", origin), closing(_open_to_copy(origin, "mode=rw")) as conn:
        # One read transaction for all: what others write meanwhile would make the copy begin anew, for ever perhaps.
        conn.execute("begin")
        _check_is_ours(conn, origin)
        with _draft(place, origin) as draft, _translated("backup", origin, written=place):
            _copy_to_draft(conn, draft, progress)
            if not _put(draft, place, replace=replace):
                raise _exists(place)


def restore(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    hold_by: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> HoldFigure | None:
    """Make a database what it was when `source` was made, at once or, if that fails, not at all.

    With `hold_by`, none of its jobs run before an operator has checked them; returns the counts. SQLite changes an
    existing target in one transaction, so programs that have it open see the old one, then the new one. The target is
    refused while workers are alive there, and if it has tables that the backup lacks, unless `force`.
    """
    origin, place = _resolved(source), _resolved(target)
    with _opened_to_restore(origin, place, force=force) as (conn, _), _draft(place, origin) as draft:
        parts = 2 if place.exists() else 1
        with _translated("restore", origin, written=place):
            _copy_to_draft(conn, draft, _part(progress, 0, parts))
            held = _make_ready(draft, origin, hold_by)
        if place.exists() or not _put(draft, place):
            _refuse_to_disturb(place, origin, _shape(conn), force=force)  # much may have happened meanwhile
            _copy_into(draft, place, _part(progress, 1, 2))
    return held


def check_restore(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, force: bool = False
) -> tuple[str, ...]:
    """Refuse what `restore` would refuse; answer which tables of the target would go, as the backup lacks them."""
    origin, place = _resolved(source), _resolved(target)
    with _opened_to_restore(origin, place, force=force) as (_, going), _draft(place, origin):
        return going


@contextmanager
def opened_to_look(source: str | os.PathLike[str]) -> Iterator[sqlite3.Connection]:
    """Open a backup for the operations of this version, without changing it."""
    origin = _resolved(source)
    with _translated("restore", origin), closing(_open_to_copy(origin, _untouched(origin))) as conn:
        if not migrate.pending("sqlite", _check_is_ours(conn, origin)):
            conn.execute("begin")
            yield conn
            return
        # A database without a name: a file that is gone when it is closed, or when we are killed.
        with closing(sqlite3.connect("", isolation_level=None)) as copy:
            _copy(conn, copy, None)
            bring_up_to_date(copy, origin)
            yield copy


class _Shape(NamedTuple):
    """The properties that decide whether a database can be written over another."""

    page_bytes: int
    tables: frozenset[str]


def _resolved(path: str | os.PathLike[str]) -> Path:
    """Follow links, as SQLite does: what is written, and the logs beside it, are where they lead."""
    return Path(os.path.realpath(path))


def _refuse_to_overwrite(place: Path, origin: Path, *, replace: bool) -> None:
    if place.exists() and origin.exists() and place.samefile(origin):
        raise ConfigError(f"{place} is the database itself: name another file for its backup")
    _refuse_no_file(place)
    if place.exists() and not replace:
        raise _exists(place)
    _refuse_leftovers(place)


def _exists(place: Path) -> ConfigError:
    return ConfigError(f"{place} exists already: name another file, or allow that it is replaced")


def _refuse_no_file(place: Path) -> None:
    if place.exists() and not place.is_file():
        raise ConfigError(f"{place} is no regular file: name another one")


def _refuse_leftovers(place: Path) -> None:
    """Refuse a place with a journal that is not of the file which is to be put there: SQLite would believe it."""
    for journal in _journals(place):
        raise ConfigError(f"{journal} is there: a program uses {place}, or did not close it. Name another file")


def _journals(path: Path) -> list[Path]:
    """Name the journals beside a file in which something stands."""
    journals = [path.with_name(path.name + ending) for ending in ("-wal", "-journal")]
    return [journal for journal in journals if journal.exists() and journal.stat().st_size]


@contextmanager
def _opened_to_restore(
    origin: Path, place: Path, *, force: bool
) -> Iterator[tuple[sqlite3.Connection, tuple[str, ...]]]:
    """Open a backup that can be restored to a place, and name the tables that would go there."""
    check_host(place, network_ok=False)
    with _translated("restore", origin), closing(_open_to_copy(origin, _untouched(origin))) as conn:
        _check_schema(conn, origin)
        going = _refuse_to_disturb(place, origin, _shape(conn), force=force)
        _check_is_whole(conn, origin)
        yield conn, going


def _shape(conn: sqlite3.Connection) -> _Shape:
    (page_bytes,) = conn.execute("pragma page_size").fetchone()
    names = [row[0] for row in conn.execute("select name from sqlite_master where type in ('table', 'view')")]
    return _Shape(page_bytes, frozenset(name for name in names if not name.startswith("sqlite_")))


def _refuse_to_disturb(place: Path, origin: Path, backup: _Shape, *, force: bool) -> tuple[str, ...]:
    """Refuse a target that is the backup, is not of duly or has living workers. Return what is deleted."""
    _refuse_no_file(place)
    if not place.exists():
        _refuse_leftovers(place)
        return ()
    if origin.exists() and place.samefile(origin):
        raise ConfigError(f"{place} is the backup itself: name the database that it is to be restored to")
    with _told_of_target(place), closing(_open_to_copy(place, "mode=rw")) as conn:
        found = _shape(conn)
        if found.tables:
            _check_is_ours(conn, place)
        alive = _alive(conn) if found.tables else []
    _refuse_other_pages(place, found, backup)
    if alive and not force:
        raise ConfigError(
            f"workers are alive in {place} ({_some(alive)}): stop them first, or force it (--force): then they lose "
            "what they are at"
        )
    return _refuse_to_drop(place, found, backup, force=force)


def _refuse_other_pages(place: Path, found: _Shape, backup: _Shape) -> None:
    """Refuse what SQLite cannot do: to change the size of the pages of a database that has a write-ahead log."""
    if found.page_bytes != backup.page_bytes:
        raise StoreError(
            f"restore: the pages of {place} have {found.page_bytes} bytes, those of the backup {backup.page_bytes}: "
            f"{_move_away(place)}"
        )


def _refuse_to_drop(place: Path, found: _Shape, backup: _Shape, *, force: bool) -> tuple[str, ...]:
    """Refuse to lose tables of the application; those of duly the backup gets when it is brought up to date."""
    going = tuple(sorted(name for name in found.tables - backup.tables if not name.startswith("duly_")))
    if going and not force:
        raise ConfigError(
            f"{place} has tables that the backup lacks, and they would go ({_some(going)}): restore to another file, "
            "or force it (--force)"
        )
    return going


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def _move_away(place: Path) -> str:
    """Return the remedy for a target that cannot be overwritten."""
    files = [place, *(place.with_name(place.name + ending) for ending in BESIDE)]
    named = ", ".join(str(file) for file in files if file.exists())
    return f"stop what uses it, move it away with all that belongs to it ({named}), and try again"


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
    """Return how to open a file without leaving files beside it. One with a journal beside it needs that to be read."""
    return "mode=ro" if _journals(path) else "mode=ro&immutable=1"


def _check_is_ours(conn: sqlite3.Connection, path: Path) -> dict[str, str]:
    meta = read_meta(conn)
    if not meta:
        raise ConfigError(f"{path} is not a database of duly: it has no tables of ours. Name another file")
    return meta


def _check_schema(conn: sqlite3.Connection, path: Path) -> None:
    meta = _check_is_ours(conn, path)
    if not migrate.pending("sqlite", meta):
        migrate.check("sqlite", meta, str(path))


def _check_is_whole(conn: sqlite3.Connection, path: Path) -> None:
    (answer,) = conn.execute("pragma quick_check(1)").fetchone()
    if answer != "ok":
        raise StoreError(f"restore: {path} is damaged ({' '.join(answer.split())}): take another backup")


@contextmanager
def _draft(place: Path, origin: Path) -> Iterator[Path]:
    """Make a file beside `place` with the rights of `origin`, and delete it at the end if it is still there."""
    _remove_drafts_of_the_dead(place)
    draft = place.with_name(f".{place.name}.{os.getpid()}.{os.urandom(3).hex()}.draft")
    _drafts.add(draft)
    _create(draft, origin.stat().st_mode & 0o777 | 0o600)  # a backup may be read-only, its draft is written
    try:
        yield draft
    finally:
        for ending in ("", *BESIDE):
            draft.with_name(draft.name + ending).unlink(missing_ok=True)
        _drafts.discard(draft)


def _remove_drafts_of_the_dead(place: Path) -> None:
    """Remove what killed processes of this host have left beside a place."""
    pattern = re.compile(rf"(\.{re.escape(place.name)}\.(\d+)\.[0-9a-f]{{6}}\.draft)(?:{'|'.join(BESIDE)})?")
    with suppress(OSError):  # they are another user's, or the folder cannot be read: then they stay
        for match in filter(None, map(pattern.fullmatch, os.listdir(place.parent))):
            if not _is_made(place.with_name(match[1]), int(match[2])):
                place.with_name(match[0]).unlink(missing_ok=True)


def _is_made(draft: Path, pid: int) -> bool:
    if pid == os.getpid():
        return draft in _drafts
    if os.name == "nt":  # there os.kill ends a process, whatever the signal
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _create(draft: Path, mode: int) -> None:
    try:
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        os.chmod(draft, mode)
    except OSError as error:
        raise StoreUnavailable(f"the folder {draft.parent} cannot be written ({error.strerror})") from error


def _copy_to_draft(conn: sqlite3.Connection, draft: Path, progress: Progress | None) -> None:
    with closing(_open_draft(draft)) as made:
        made.execute("pragma synchronous = off")  # it is synced when it is whole
        _copy(conn, made, progress)
    with closing(_open_draft(draft)) as made:
        # A copy of a WAL database says that it is one, and then could not be read where nothing may be written.
        made.execute("pragma journal_mode = delete")


def _open_draft(draft: Path) -> sqlite3.Connection:
    """Open a draft that must exist: if it was deleted, an empty one must not take its place."""
    return sqlite3.connect(f"{draft.as_uri()}?mode=rw", uri=True, isolation_level=None)


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
    with closing(_open_draft(draft)) as conn:
        bring_up_to_date(conn, origin)
        conn.execute("delete from duly_worker")  # they are of then; who lives says so at its next beat
        if hold_by is None:
            return None
        return caller.run(conn, ops.hold(by=hold_by, why=f"restored from {origin.name}"))


def _put(draft: Path, place: Path, *, replace: bool = False) -> bool:
    """Move a whole file to its place; False: another has come there, and is not to be replaced.

    After a power cut too it is there as a whole or not at all.
    """
    _refuse_leftovers(place)
    try:
        _sync(draft)
        if replace:
            os.replace(draft, place)
        else:
            _link(draft, place)
        _sync(place.parent)
    except FileExistsError:
        return False
    except OSError as error:
        raise StoreUnavailable(f"{place} cannot be written ({error.strerror}): look at its disk and folder") from error
    return True


def _link(draft: Path, place: Path) -> None:
    """Give a file its name only if nothing has it: SQLite would read the log of what was there into ours."""
    try:
        os.link(draft, place)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        # The next best: between the two somebody may open a file in which nothing stands yet.
        os.close(os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        os.replace(draft, place)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _copy_into(draft: Path, place: Path, progress: Progress | None) -> None:
    """Write a database over another in one transaction of that one."""
    with (
        _told_of_target(place),
        closing(SQLiteDriver(place).connect()) as target,
        closing(_open_draft(draft)) as conn,
    ):
        _copy(conn, target, progress)
        # It stands. What is left in the log is cut later where somebody reads just now.
        target.execute("pragma wal_checkpoint(truncate)")


@contextmanager
def _translated(op: str, read: Path, *, written: Path | None = None) -> Iterator[None]:
    """Translate errors and name their file: `written` for an error that only writing can have."""
    try:
        yield
    except sqlite3.Error as error:
        raise translate(error, op, written if written and _is_of_writing(error) else read) from error


def _is_of_writing(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    writing = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR_WRITE)
    return code in writing or code & 0xFF in writing


@contextmanager
def _told_of_target(place: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise StoreError(
                f"restore: {place} is damaged, or is no database ({error}): {_move_away(place)}"
            ) from error
        raise translate(error, "restore", place) from error
