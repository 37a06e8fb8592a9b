"""Reads what `duly doctor` judges of a SQLite file: its library, disk, rights, settings and content."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from pathlib import Path
from typing import Any

from duly.errors import ConfigError, StoreError
from duly.store import health, migrate
from duly.store.driver import Finding
from duly.store.sqlite import checkpoint
from duly.store.sqlite.connection import check_path
from duly.store.sqlite.schema import read_meta

OLDEST = (3, 38, 0)
WAL_IS_SAFE = (3, 51, 3)
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "fuse.sshfs", "ncpfs"})
# Modules that bring another SQLite library.
OTHER_LIBRARIES = ("apsw", "pysqlite3", "sqlcipher3", "pysqlcipher3", "libsql", "libsql_experimental", "turso")
SYNCHRONOUS = {0: "off", 1: "normal", 2: "full", 3: "full"}


def examine(conn: sqlite3.Connection, path: Path, log_path: str, *, deep: bool) -> list[Finding]:
    """Check a file by a connection to it; `deep` runs SQLite's own check of the whole file."""
    inside = _look_inside(conn, deep)
    return [*_look_at_libraries(), access(path), *_look_around(path, log_path), *inside]


def check_access(path: str | os.PathLike[str]) -> None:
    """Refuse a file that this user may only read: a worker would wait for ever."""
    found = access(Path(path))
    if found.level == "error":
        raise StoreError(f"{found.text}: {found.remedy}")


def access(path: Path) -> Finding:
    """Judge whether this user may write to the file and to its folder."""
    file = not path.exists() or os.access(path, os.R_OK | os.W_OK)
    return health.access(str(path), file=file, folder=os.access(path.parent, os.W_OK | os.X_OK))


def _look_at_libraries() -> list[Finding]:
    safe = sqlite3.sqlite_version_info >= WAL_IS_SAFE
    return [health.library(sqlite3.sqlite_version, safe=safe), health.libraries(other_libraries())]


def other_libraries() -> list[str]:
    """List loaded modules with another SQLite library; one that replaces sqlite3 is the same library."""
    loaded = {name: sys.modules[name] for name in OTHER_LIBRARIES if name in sys.modules}
    return [name for name, module in loaded.items() if getattr(module, "Connection", None) is not sqlite3.Connection]


def wal_verdict() -> str:
    """Return in one sentence whether this SQLite is safe from the WAL checkpoint race."""
    if sqlite3.sqlite_version_info >= WAL_IS_SAFE:
        return f"SQLite {sqlite3.sqlite_version}: safe"
    return (
        f"SQLite {sqlite3.sqlite_version} can corrupt a WAL file if an automatic checkpoint races a commit. duly makes "
        "no automatic checkpoints; other programs that write to the file must set wal_autocheckpoint to 0"
    )


def _look_around(path: Path, log_path: str) -> list[Finding]:
    kind = file_system(path.parent)
    free = shutil.disk_usage(path.parent).free
    return [
        health.file_system(kind, network=kind in NETWORK),
        health.room(free, path.stat().st_size),
        # A WAL starts over at its limit; four times that means that it cannot.
        health.log_length(checkpoint.length(log_path), 4 * checkpoint.CHECKPOINT_BYTES),
    ]


def _look_inside(conn: sqlite3.Connection, deep: bool) -> list[Finding]:
    def ask(pragma: str) -> Any:
        return conn.execute(f"pragma {pragma}").fetchone()[0]

    found = [
        health.durability(SYNCHRONOUS.get(ask("synchronous"), "off")),
        health.journal(ask("journal_mode")),
        health.schema(migrate.version(read_meta(conn)), migrate.newest("sqlite")),
    ]
    return [*found, health.content(ask("quick_check(1)"))] if deep else found


def check_host(path: Path, *, network_ok: bool) -> None:
    """Refuse a host that would lose data: an old library, a missing folder, a network file system."""
    if sqlite3.sqlite_version_info < OLDEST:
        raise ConfigError(f"SQLite {sqlite3.sqlite_version} is too old: duly needs 3.38 or newer")
    check_path(path)
    kind = file_system(path.parent)
    if kind in NETWORK and not network_ok:
        raise ConfigError(
            f"{path} lies on a network file system ({kind}), where SQLite's locks cannot be trusted: "
            "use a local disk, or PostgreSQL for several hosts"
        )


def file_system(folder: Path) -> str | None:
    """Return the type of the file system that holds `folder`, if known."""
    try:
        mounts = Path("/proc/self/mounts").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    real = os.path.realpath(folder)
    found = [fields for fields in map(str.split, mounts) if _holds(fields[1], real)]
    return max(found, key=lambda fields: len(fields[1]))[2] if found else None


def _holds(mount: str, path: str) -> bool:
    return mount == "/" or path == mount or path.startswith(mount + "/")
