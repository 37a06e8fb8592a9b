"""The judge of `duly doctor`: each function judges one fact that a driver has read from a database.

Nothing here reads a database, so tests can check every verdict without breaking one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from duly.rules import durations
from duly.store.driver import Finding

MIB = 1024 * 1024
LEAST_FREE_BYTES = 100 * MIB
MOST_OFFSET_MS = 1000
MOST_DEAD_ROWS = 50_000
OLDEST_POSTGRES = 130_000
SHOWN = 3


def ok(name: str, text: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(name, "ok", text)


# SQLite


def access(path: str, *, file: bool, folder: bool) -> Finding:
    """Judge whether a file can be written, and the folder in which its log is kept."""
    if file and folder:
        return ok("access", f"{path} and its folder can be written")
    what = "the folder of " if file else ""
    return Finding("access", "error", f"{what}{path} cannot be written by this user", "change its owner or its rights")


def library(version: str, *, safe: bool) -> Finding:
    """Judge the SQLite that this process runs."""
    if safe:
        return ok("library", f"SQLite {version}")
    return Finding(
        "library",
        "warning",
        f"SQLite {version} can corrupt a file when an automatic checkpoint races a commit; duly never checkpoints so",
        "have other programs that write to the file set wal_autocheckpoint to 0, or use SQLite 3.51.3 or newer",
    )


def libraries(others: Sequence[str]) -> Finding:
    """Judge whether another SQLite library is loaded beside ours."""
    if not others:
        return ok("libraries", "one SQLite library is loaded in this process")
    return Finding(
        "libraries",
        "warning",
        f"{' and '.join(others)} brings another SQLite library into this process: two of them drop each other's locks",
        "open the file with the standard library's sqlite3 only, or in another process",
    )


def durability(mode: str) -> Finding:
    """Judge SQLite's `synchronous`."""
    if mode == "full":
        return ok("durability", "what was acknowledged survives a power cut (synchronous = full)")
    return Finding(
        "durability",
        "warning",
        f"a power cut may lose the last moments (synchronous = {mode})",
        "set durability to full, unless you chose this",
    )


def journal(mode: str) -> Finding:
    """Judge SQLite's journal mode."""
    if mode == "wal":
        return ok("journal", "the journal is a write-ahead log (WAL)")
    return Finding(
        "journal",
        "error",
        f"the journal mode is {mode}, so readers and writers wait for each other",
        "have no other program set journal_mode; duly sets WAL when it opens the file",
    )


def schema(number: int, newest: int) -> Finding:
    """Judge the number of a schema that can be worked with."""
    if number == newest:
        return ok("schema", f"schema {number} is the newest that this version knows")
    return Finding("schema", "warning", f"schema {number} is newer than this version's {newest}", "upgrade duly here")


def file_system(kind: str | None, *, network: bool) -> Finding:
    """Judge the file system of the file."""
    if not network:
        return ok("file system", f"the file lies on a local disk ({kind})" if kind else "the file system is not known")
    return Finding(
        "file system",
        "error",
        f"the file lies on a network file system ({kind}), where SQLite's locks cannot be trusted",
        "move it to a local disk, or use PostgreSQL for several hosts",
    )


def room(free: int, size: int) -> Finding:
    """Judge the space that is left beside a file of `size` bytes."""
    text = f"{size_of(free)} are free, the database has {size_of(size)}"
    if free >= max(LEAST_FREE_BYTES, size // 10):
        return ok("disk", text)
    return Finding("disk", "warning", text, "free some space: on a full disk nothing can be written")


def log_length(size: int, most: int) -> Finding:
    """Judge the length of the write-ahead log."""
    if size < most:
        return ok("log", f"the write-ahead log has {size_of(size)}")
    return Finding(
        "log",
        "warning",
        f"the write-ahead log has grown to {size_of(size)}",
        "end what reads without end: while a transaction stays open in any program, the log cannot be cut",
    )


def content(answer: str) -> Finding:
    """Judge the answer of SQLite's own check."""
    if answer == "ok":
        return ok("content", "SQLite's check finds no damage")
    return Finding(
        "content",
        "error",
        f"the file is damaged: {' '.join(answer.split())}",
        "stop all workers, copy the file with its -wal, and restore the last backup",
    )


# PostgreSQL


def server(version: str, number: int) -> Finding:
    """Judge the server's version."""
    if number >= OLDEST_POSTGRES:
        return ok("server", f"PostgreSQL {version}")
    return Finding("server", "error", f"PostgreSQL {version} is too old", "upgrade it to 13 or newer")


def sync(*, fsync: str, commit: str) -> Finding:
    """Judge whether an acknowledged write is on the disk."""
    if fsync == "off":
        return Finding(
            "durability", "error", "fsync is off: a crash may destroy the database", "set fsync = on in postgresql.conf"
        )
    if commit == "off":
        return Finding(
            "durability",
            "warning",
            "synchronous_commit is off: a crash may lose the last moments, jobs that were acknowledged too",
            "set it to on for this role or database",
        )
    return ok("durability", f"what was acknowledged survives a crash (synchronous_commit = {commit})")


class Standbys(NamedTuple):
    """The standbys that are connected to a server."""

    awaited: bool  # whether commits wait for one
    synchronous: Sequence[str]
    asynchronous: int


def failover(standbys: Standbys | None) -> str:
    """Describe what a failover may lose; None: the standbys cannot be read."""
    if standbys is None:
        return "standbys unknown: this role may not read pg_stat_replication"
    if standbys.synchronous:
        return f"synchronous standby {', '.join(standbys.synchronous)}"
    if standbys.awaited:
        return "every write waits for a standby, and none is connected"
    if count := standbys.asynchronous:
        standby = "1 asynchronous standby" if count == 1 else f"{count} asynchronous standbys"
        return f"{standby}: a failover may lose the last commits"
    return "no standby"


def replication(standbys: Standbys | None) -> Finding:
    """Judge the standbys of a server."""
    text = failover(standbys)
    if standbys is None:
        remedy = "grant select on pg_stat_replication, pg_replication_slots to it"
        return Finding("replication", "warning", text, remedy)
    if not standbys.awaited or standbys.synchronous:
        return ok("replication", text)
    return Finding("replication", "error", text, "start it, or take it out of synchronous_standby_names")


def writable(*, standby: bool, read_only: bool) -> Finding:
    """Judge whether this server takes writes."""
    if standby:
        return Finding("writes", "error", "this server is a standby and takes no writes", "name the primary in the URL")
    if read_only:
        return Finding(
            "writes",
            "error",
            "transactions are read-only here (default_transaction_read_only)",
            "turn it off for this role or database",
        )
    return ok("writes", "this server takes writes")


def rights(tables: Sequence[str], role: str, *, function: str | None = None) -> Finding:
    """Judge whether a role may work with the tables; `tables` and `function` are those it may not use."""
    if function and not tables:
        text = f"role {role} may not call {function}: a write whose answer was lost cannot be confirmed"
        return Finding("rights", "error", text, f"run `grant execute on function {function} to {role}` as a superuser")
    if not tables:
        return ok("rights", f"role {role} may work with all tables")
    return Finding(
        "rights",
        "error",
        f"role {role} may not work with {', '.join(tables[:SHOWN])}{'…' if len(tables) > SHOWN else ''}",
        f"run `duly migrate --grant {role}` as the owner",
    )


def clock(offset_ms: float) -> Finding:
    """Judge how far the server's clock is ahead of this machine's."""
    far = durations.describe(abs(round(offset_ms)))
    if abs(offset_ms) <= MOST_OFFSET_MS:
        return ok("clock", f"the server's clock and this machine's are {far} apart")
    ahead = "ahead of" if offset_ms > 0 else "behind"
    return Finding(
        "clock",
        "warning",
        f"the server's clock is {far} {ahead} this machine's; jobs go by the server's",
        "set both by NTP, so that times in logs can be compared",
    )


def vacuum(*, on: bool, off_for: Sequence[str]) -> Finding:
    """Judge whether dead rows are removed; `off_for` are tables for which autovacuum is off."""
    if on and not off_for:
        return ok("autovacuum", "autovacuum is on")
    what = "" if not on else f" for {', '.join(off_for)}"
    return Finding(
        "autovacuum",
        "warning",
        f"autovacuum is off{what}: dead rows pile up, and claims get slower and slower",
        "turn it on: a queue makes dead rows all day",
    )


def dead_rows(live: int, dead: int) -> Finding:
    """Judge the number of dead rows among the live jobs."""
    text = f"duly_job has about {live:,} live and {dead:,} dead rows"
    if dead <= max(MOST_DEAD_ROWS, 3 * live):
        return ok("dead rows", text)
    return Finding(
        "dead rows",
        "warning",
        text,
        "run `vacuum duly_job`; if that does not help, an old transaction holds them",
    )


class Transaction(NamedTuple):
    """A transaction that has been open for a long time."""

    pid: int
    application: str
    age_s: float
    idle: bool


def transactions(old: Sequence[Transaction]) -> Finding:
    """Judge the transactions that have been open for longer than they should."""
    if not old:
        return ok("transactions", "no transaction has been open for more than 5 minutes")
    some = ", ".join(
        f"process {one.pid} ({one.application or 'unnamed'}, {durations.describe(round(one.age_s) * 1000)}"
        f"{', idle' if one.idle else ''})"
        for one in old[:SHOWN]
    )
    more = f" and {len(old) - SHOWN} more" if len(old) > SHOWN else ""
    return Finding(
        "transactions",
        "warning",
        f"transactions are open for long: {some}{more}; meanwhile vacuum removes nothing and claims get slower",
        "end them; select pg_terminate_backend(pid) does, and idle_in_transaction_session_timeout keeps them short",
    )


def connections(used: int, most: int) -> Finding:
    """Judge how many of the server's connections are taken."""
    text = f"{used} of {most} connections are in use"
    if used * 10 < most * 8:
        return ok("connections", text)
    return Finding(
        "connections",
        "warning",
        text,
        "a worker process takes up to 4: raise max_connections, run fewer, or put PgBouncer in between",
    )


def size_of(size: int) -> str:
    """Write a number of bytes for people."""
    if size < MIB:
        return f"{size / 1024:,.0f} KiB"
    return f"{size / MIB:,.0f} MiB" if size < 10_240 * MIB else f"{size / MIB / 1024:,.0f} GiB"
