"""PostgreSQL, through psycopg.

No session state and every name qualified, so that it runs behind PgBouncer in transaction mode. An operation of
one statement is one round trip; a list goes as one pipeline in one transaction, which is one round trip too.
Connections are opened in the thread that needs one, so that whoever cannot get in is told at once, and why.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, LiteralString

import psycopg
from psycopg import Connection, IsolationLevel, errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

from duly.errors import AnswerLost, ConfigError, SchemaMismatch, StoreError, StoreRefused, StoreUnavailable
from duly.store import migrate, statements
from duly.store.driver import Driver, Hook, Point
from duly.store.ops import Op, Rows

MOST_CONNECTIONS = 3  # and one for what is urgent
IDLE_SECONDS = 60.0
CONNECT_SECONDS = 2.0
PREPARE_AFTER = 2
LOCK_TIMEOUT = "set local lock_timeout = '5s'"

# The server rolled the transaction back and said so.
ROLLBACK_PAUSES = (0.0, 0.02, 0.05, 0.1)
ROLLED_BACK = (errors.SerializationFailure, errors.DeadlockDetected)
_abandoned: list[object] = []
_drivers: weakref.WeakSet[PostgresDriver] = weakref.WeakSet()


class PostgresDriver(Driver):
    """Runs operations on one PostgreSQL database. Connects to nothing before the first one."""

    def __init__(
        self,
        url: str,
        *,
        schema: str = "duly",
        prepared: bool = True,
        connect_s: float = CONNECT_SECONDS,
        connections: int = MOST_CONNECTIONS,
        hook: Hook | None = None,
    ) -> None:
        super().__init__(hook=hook)
        self.url = url
        self.schema = schema
        self.where = describe(url)
        self._prepared = prepared
        self._connect_s = connect_s
        self._connections = connections
        self._begin_afresh()
        _drivers.add(self)

    def _begin_afresh(self) -> None:
        self._pool = _Pool(self._connect, self._connections)
        # Beats have a connection of their own: a lease must not wait for other work.
        self._urgent = _Pool(self._connect, 1)
        self._threads: dict[bool, ThreadPoolExecutor] = {}
        self._schema_checked = False
        self._read_committed = True

    def execute(self, op: Op[Any]) -> Rows:
        """Run `op` once on a free connection."""
        for pause in ROLLBACK_PAUSES:
            try:
                return self._execute(op)
            except ROLLED_BACK:
                time.sleep(pause * random.random())  # noqa: S311
        try:
            return self._execute(op)
        except ROLLED_BACK as error:
            raise StoreUnavailable(f"{op.name}: {self.where} rolled it back each time ({error})") from error

    async def aexecute(self, op: Op[Any]) -> Rows:
        """Run `op` once on a thread of the driver's own; what is urgent has one that nothing else takes."""
        if op.urgent not in self._threads:
            size = 1 if op.urgent else self._connections
            self._threads[op.urgent] = ThreadPoolExecutor(size, thread_name_prefix="duly-postgres")
        return await asyncio.get_running_loop().run_in_executor(self._threads[op.urgent], self.execute, op)

    def close(self) -> None:
        """Close every connection. The next operation opens one again."""
        while self._threads:
            self._threads.popitem()[1].shutdown()
        self._pool.close()
        self._urgent.close()

    def abandon(self) -> None:
        """Forget every connection without closing it, in a forked child: the parent still talks on it."""
        _abandoned.extend((self._pool, self._urgent, self._threads))
        self._begin_afresh()

    def _execute(self, op: Op[Any]) -> Rows:
        sent = False
        try:
            # Where a lost answer could not be asked for again, the connection is looked at first.
            with (self._urgent if op.urgent else self._pool).connection(checked=op.once) as conn:
                self._look_around(conn)
                sent = True
                return self._run(conn, op)
        except ROLLED_BACK:
            raise
        except psycopg.Error as error:
            raise translate(error, op.name, self.where, sent=sent and op.writes) from error

    def _run(self, conn: Connection[Any], op: Op[Any]) -> Rows:
        work = [
            (section, number, text)
            for section in op.sections
            for number, text in enumerate(statements.spell("postgres", section, "pyformat", self.schema))
        ]
        if self.hook is not None:
            return self._run_with_hook(conn, op, work)
        if len(work) == 1 and self._read_committed:
            return _fetch(conn.execute(_trusted(work[0][2].sql), op.params, binary=True))
        with conn.pipeline(), conn.transaction():
            conn.execute(LOCK_TIMEOUT)
            cursors = [conn.execute(_trusted(text.sql), op.params, binary=True) for _, _, text in work]
        return [row for cursor in cursors for row in _fetch(cursor)]

    def _run_with_hook(
        self, conn: Connection[Any], op: Op[Any], work: list[tuple[str, int, statements.Statement]]
    ) -> Rows:
        """Run statement by statement, so that the hook stands between them."""
        hook = self.hook
        assert hook is not None
        rows: list[Any] = []
        with conn.transaction():
            for section, number, text in work:
                hook(Point("before", op.name, section, number))
                rows += _fetch(conn.execute(_trusted(text.sql), op.params, binary=True))
                hook(Point("after", op.name, section, number))
            hook(Point("before", op.name, "commit", 0))
        hook(Point("after", op.name, "commit", 0))
        return rows

    def _connect(self) -> Connection[Any]:
        conn = psycopg.connect(
            _patient(self.url, self._connect_s),
            autocommit=True,
            # Behind PgBouncer the next statement may run on another connection, which has not prepared it.
            prepare_threshold=PREPARE_AFTER if self._prepared else None,
        )
        # The statements of a list each see what was committed before them, whatever the server's default is.
        conn.isolation_level = IsolationLevel.READ_COMMITTED
        return conn

    def _look_around(self, conn: Connection[Any]) -> None:
        """See once whether the tables are there, and how the server isolates a statement that stands alone."""
        if not self._schema_checked:
            remedy = "duly migrate" if self.schema == "duly" else f"duly migrate --schema {self.schema}"
            migrate.check(
                "postgres", read_meta(conn, self.schema), f"{self.where}, schema {self.schema}", remedy=remedy
            )
            isolation = conn.execute("select current_setting('default_transaction_isolation')").fetchone()
            self._read_committed = isolation == ("read committed",)
            self._schema_checked = True


class _Pool:
    """A few connections, opened when needed and handed out one by one."""

    def __init__(self, connect: Callable[[], Connection[Any]], size: int) -> None:
        self._connect = connect
        self._free = threading.BoundedSemaphore(size)
        self._idle: deque[tuple[float, Connection[Any]]] = deque()

    @contextmanager
    def connection(self, *, checked: bool = False) -> Iterator[Connection[Any]]:
        with self._free:
            conn = self._take(checked)
            try:
                yield conn
            except (psycopg.OperationalError, psycopg.InterfaceError):
                # A restarted server has closed the others too.
                self.close()
                raise
            finally:
                if conn.info.transaction_status == TransactionStatus.IDLE:
                    self._idle.append((time.monotonic(), conn))
                else:
                    conn.close()

    def _take(self, checked: bool) -> Connection[Any]:
        for since, conn in self._drained():
            if (not checked and time.monotonic() - since < IDLE_SECONDS) or _alive(conn):
                return conn
            conn.close()
        return self._connect()

    def close(self) -> None:
        for _, conn in self._drained():
            conn.close()

    def _drained(self) -> Iterator[tuple[float, Connection[Any]]]:
        """Take idle connections out one by one; other threads may be taking them too."""
        while True:
            try:
                yield self._idle.pop()
            except IndexError:
                return


def _patient(url: str, seconds: float) -> str:
    """Bound the time a connection may take to open, unless the URL says so itself."""
    said = conninfo_to_dict(url)
    ours: dict[str, str | int] = {
        "connect_timeout": max(1, round(seconds)),
        "application_name": "duly",
        # A host that vanished is noticed within seconds, not after the system's two hours.
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": 10_000,
    }
    return make_conninfo(url, **{name: value for name, value in ours.items() if name not in said})


def _alive(conn: Connection[Any]) -> bool:
    try:
        conn.execute("select 1")
    except psycopg.Error:
        return False
    return True


def _fetch(cursor: psycopg.Cursor[Any]) -> Rows:
    return cursor.fetchall() if cursor.description else []


def _trusted(sql: str) -> LiteralString:
    """Say that a statement comes from a file of ours: psycopg takes no other strings."""
    return sql


def describe(url: str) -> str:
    """Name a database for people: host, port and name, never the password."""
    try:
        info = conninfo_to_dict(url)
    except psycopg.ProgrammingError as error:
        raise ConfigError(f"this is not a PostgreSQL URL that can be read: {str(error).strip()}") from None
    host = info.get("host") or info.get("hostaddr") or "localhost"
    return f"PostgreSQL {host}:{info.get('port') or 5432}/{info.get('dbname') or info.get('user') or ''}"


def translate(error: psycopg.Error, op: str, where: str, *, sent: bool) -> StoreError:
    """Turn what psycopg raised into an error that says what happened and what to do."""
    # A server's own words in one line; their DETAIL would quote the whole row, payload included.
    detail = error.diag.message_primary or " ".join(str(error).split())
    match error:
        case errors.UndefinedTable() | errors.InvalidSchemaName() | errors.UndefinedColumn():
            return SchemaMismatch(
                f"{op}: {where} does not have the tables this version works with: run `duly migrate` ({detail})"
            )
        case errors.InsufficientPrivilege():
            return StoreError(
                f"{op}: this role may not use the tables of {where}: `duly migrate --grant ROLE` ({detail})"
            )
        case psycopg.DataError() | psycopg.IntegrityError() | errors.ProgramLimitExceeded():
            return StoreRefused(f"{op}: {where} refuses this data ({detail})")
        case errors.LockNotAvailable():
            return StoreUnavailable(
                f"{op}: what it needs is locked in {where} by another transaction; nothing was written. "
                "If that is your own, pass it as `conn=`"
            )
        case errors.QueryCanceled():
            return StoreUnavailable(f"{op}: {where} cancelled it ({detail}); nothing was written")
        case errors.ReadOnlySqlTransaction() | errors.DiskFull() | errors.TooManyConnections() | errors.OutOfMemory():
            return StoreUnavailable(f"{op}: {where} cannot write now ({detail}); nothing was written")
        case psycopg.OperationalError() | psycopg.InterfaceError() if sent:
            return AnswerLost(f"{op}: the connection to {where} broke before the answer came ({detail})")
        case psycopg.OperationalError() | psycopg.InterfaceError():
            answered = "refuses the connection" if "FATAL" in detail else "cannot be reached"
            return StoreUnavailable(f"{op}: {where} {answered} ({detail})")
    return StoreError(f"{op}: {where}: {detail}")


def read_meta(conn: Connection[Any], schema: str) -> Mapping[str, str]:
    """Read what a database says of its schema; empty when it has no tables of ours yet."""
    table = statements.qualified("duly.duly_meta", schema)
    if conn.execute("select to_regclass(%s)", [table]).fetchone() == (None,):
        return {}
    return dict(conn.execute(_trusted(f"select name, value from {table}")).fetchall())  # noqa: S608 (quoted)


def migration_statements(schema: str, steps: tuple[migrate.Migration, ...], *, grant: str | None = None) -> list[str]:
    """Give the statements of migrations, and those that let a role work with the tables but not change them."""
    quoted = statements.quoted(schema)
    texts = [f"create schema if not exists {quoted}"] if steps and steps[0].number == 1 else []
    texts += [statements.qualified(statement, schema) for step in steps for statement in step.statements]
    if grant is not None:
        role = statements.quoted(grant)
        texts += [
            f"grant usage on schema {quoted} to {role}",
            f"grant select, insert, update, delete on all tables in schema {quoted} to {role}",
            f"revoke insert, update, delete on {quoted}.duly_meta from {role}",
            f"grant usage on all sequences in schema {quoted} to {role}",
        ]
    return texts


def bring_up_to_date(url: str, *, schema: str = "duly", grant: str | None = None) -> tuple[migrate.Migration, ...]:
    """Apply what is pending and return it. Several at once wait for each other; a failure leaves nothing behind."""
    try:
        with psycopg.connect(_patient(url, CONNECT_SECONDS)) as conn:
            conn.execute("select pg_advisory_xact_lock(hashtext(%s))", [f"duly migrate {schema}"])
            steps = migrate.pending("postgres", read_meta(conn, schema))
            for statement in migration_statements(schema, steps, grant=grant):
                conn.execute(_trusted(statement))
    except errors.InsufficientPrivilege as error:
        raise StoreError(
            f"migrate: this role may not change {describe(url)} ({error.diag.message_primary}): run it as the owner"
        ) from error
    except psycopg.Error as error:
        raise translate(error, "migrate", describe(url), sent=False) from error
    return steps


def look(url: str, *, schema: str = "duly") -> Mapping[str, str]:
    """Read what a database says of its schema, without changing it."""
    try:
        with psycopg.connect(_patient(url, CONNECT_SECONDS)) as conn:
            return read_meta(conn, schema)
    except psycopg.Error as error:
        raise translate(error, "migrate", describe(url), sent=False) from error


def _abandon_all() -> None:
    for driver in list(_drivers):
        driver.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
