"""The driver of a PostgreSQL database, through psycopg.

It needs no session state and qualifies every name, so it works behind PgBouncer in transaction mode. An operation of
one statement takes one round trip; a list is sent as one pipeline in one transaction, also in one round trip.
Concurrent enqueues of one process form such a list and share its commit.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, LiteralString, NamedTuple, TypeVar

import msgspec
import psycopg
from psycopg import Connection, Cursor, IsolationLevel, errors

from duly.errors import AnswerLost, DulyError, StoreError, StoreUnavailable
from duly.store import migrate, statements
from duly.store.driver import About, Driver, Finding, Hook, Point, Watch
from duly.store.group_commit import Gathering, Outcome, Word, joined, own_error, rows_of
from duly.store.op import Op, Rows
from duly.store.postgres import health, lone_enqueue
from duly.store.postgres.connection import CONNECT_SECONDS, LOCK_TIMEOUT, PooledConnection, connect, with_timeouts
from duly.store.postgres.listen import ListenWatch
from duly.store.postgres.plans import only, trusted
from duly.store.postgres.pool import Pool
from duly.store.postgres.schema import read_meta
from duly.store.postgres.translate import ROLLED_BACK, describe, first_error, is_down, translate
from duly.store.threads import DaemonThreads

T = TypeVar("T")

MOST_CONNECTIONS = 3  # with the one that listens; urgent operations have one more
PREPARE_AFTER = 2
HINT_SECONDS = 0.005
BEGIN = "begin isolation level read committed"
# Writes a few bytes. A commit that wrote nothing waits for no standby, and what a repetition finds may be on none yet.
WAIT_FOR_STANDBY = "select pg_logical_emit_message(true, 'duly', '')"
# A shared commit must not wait long for a lock: its operations are then run alone.
SHORT_LOCK_TIMEOUT = "set local lock_timeout = '100ms'"
# The pauses before a transaction that the server rolled back is repeated, in seconds.
ROLLBACK_PAUSES = (0.0, 0.02, 0.05, 0.1)
LONE = ("enqueue_one",)
# Enqueues that can share a commit: plain ones, also by handlers, and those of one key.
GATHERED = (
    ("enqueue",),
    LONE,
    ("hold_parent", "enqueue"),
    ("reserve_keys", "enqueue_keyed", "key_holders"),
)
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
        listen_url: str | None = None,
        hook: Hook | None = None,
    ) -> None:
        super().__init__(hook=hook)
        self.url = url
        self._listen_url = listen_url
        self.schema = schema
        self.where = describe(url)
        self._prepared = prepared
        self._connect_s = connect_s
        self._connections = connections
        self._reset()
        _drivers.add(self)

    def _reset(self) -> None:
        self._pool = Pool(self._connect, self._connections, self._closed_by_server)
        # Heartbeats have a separate connection: a lease must not wait for other work.
        self._urgent = Pool(self._connect, 1, self._closed_by_server)
        self._threads: dict[bool, DaemonThreads] = {}
        self._one_start = threading.Lock()
        self._gathering = Gathering(self._commit_together, lost=self._lost, start=self._start)
        self._hinted_at = 0.0
        self._schema_checked = False
        self._usual = True  # sessions are read committed and show warnings

    def execute(self, op: Op[Any]) -> Rows:
        """Run `op` once: an enqueue in a group commit, anything else alone on a free connection."""
        if self._gathers(op):
            outcome = self._gathering.run(op)
            if outcome is not Word.ALONE:
                return rows_of(outcome)
        return self._execute_patiently(op)

    async def aexecute(self, op: Op[Any]) -> Rows:
        """Run `op` once on a thread of the driver; urgent operations have a separate one."""
        if self._gathers(op):
            outcome = await self._gathering.arun(op)
            if outcome is not Word.ALONE:
                return rows_of(outcome)
        return await asyncio.wrap_future(self._start(lambda: self._execute_patiently(op), urgent=op.urgent))

    def _start(self, work: Callable[[], T], *, urgent: bool = False) -> Future[T]:
        with self._one_start:
            if urgent not in self._threads:
                size = 1 if urgent else self._connections
                self._threads[urgent] = DaemonThreads(size, "duly-postgres")
            return self._threads[urgent].submit(work)

    def close(self) -> None:
        """Close every connection. The next operation opens one again."""
        resting = self._rest()
        with self._one_start:
            threads, self._threads = self._threads, {}
        for executor in threads.values():
            executor.shutdown()
        self._pool.close()
        self._urgent.close()
        for watch in resting:
            watch.tell()

    def _rest(self, *, wait: bool = True) -> list[Watch]:
        return [watch for watch in self._watches if isinstance(watch, ListenWatch) and watch.rest(wait=wait)]

    def abandon(self) -> None:
        """Drop every connection without closing it, in a forked child: the parent still uses it."""
        _abandoned.extend((self._pool, self._urgent, self._threads, self._watches))
        self._abandon_watches()
        self._reset()

    def about(self) -> About:
        """Connect, and return which database this is and how it is set."""
        try:
            with self._pool.connection() as conn:
                self._check_schema(conn)
                number = migrate.version(read_meta(conn, self.schema))
                (version,) = only(conn.execute("select current_setting('server_version')"))
                durability = health.durability(conn)
        except psycopg.Error as error:
            raise self._failed(error, "about", sent=False) from error
        return About(
            store="PostgreSQL",
            where=self.where.removeprefix("PostgreSQL "),
            engine=f"PostgreSQL {version.split()[0]}",
            schema=f"{self.schema} {number}",
            durability=durability,
        )

    def examine(self, *, deep: bool = False) -> list[Finding]:
        """Check the server, the rights on it, and transactions that prevent vacuum. There is no deeper check."""
        try:
            with self._pool.connection() as conn:
                self._check_schema(conn)
                return health.examine(conn, self.schema)
        except psycopg.Error as error:
            raise self._failed(error, "examine", sent=False) from error

    def _watch(self, on_change: Callable[[], None]) -> Watch:
        if self._listen_url is None and not self._prepared:
            # Behind PgBouncer the lock would stay on a connection that other clients get next.
            return Watch(self, on_change)
        return ListenWatch(self, on_change, self)

    @contextmanager
    def listening(self) -> Iterator[Connection[Any]]:
        """Open a connection to listen on, which takes one place of the pool."""
        try:
            url = with_timeouts(self._listen_url or self.url, self._connect_s)
            with self._pool.lent(), psycopg.connect(url, autocommit=True, prepare_threshold=None) as conn:
                yield conn
        except psycopg.Error:
            self.failures += 1
            raise

    def _gathers(self, op: Op[Any]) -> bool:
        """Return whether an operation may share its commit: only if it locks in the common order, jobs before keys."""
        several_keys = "key_ttl_ms" in op.params and "," in op.params["ids"]
        return op.sections in GATHERED and not several_keys and self.hook is None

    def _commit_together(self, batch: Sequence[Op[Any]]) -> Sequence[Outcome]:
        """Commit enqueues as one. If that fails, each is run alone, so that only the one at fault fails or waits."""
        try:
            return self._transact(batch, SHORT_LOCK_TIMEOUT)
        except (DulyError, *ROLLED_BACK) as error:  # after other errors it is unknown what was written
            if isinstance(error, AnswerLost) or (isinstance(error, StoreUnavailable) and is_down(error.__cause__)):
                return [own_error(error) for _ in batch]
            if len(batch) == 1 and not isinstance(error.__cause__ or error, (*ROLLED_BACK, errors.LockNotAvailable)):
                return [error]
            return [Word.ALONE] * len(batch)

    def _lost(self, op: Op[Any], error: BaseException) -> Exception:
        what = f"the thread that committed it with others on {self.where} was interrupted"
        return AnswerLost(f"{op.name}: {what} ({error!r})")

    def _execute_patiently(self, op: Op[Any]) -> Rows:
        for pause in ROLLBACK_PAUSES:
            try:
                return self._execute(op)
            except ROLLED_BACK:
                time.sleep(pause * random.random())  # noqa: S311
        try:
            return self._execute(op)
        except ROLLED_BACK as error:
            raise StoreUnavailable(f"{op.name}: {self.where} rolled it back each time ({error})") from error

    def _execute(self, op: Op[Any]) -> Rows:
        return self._transact([op], LOCK_TIMEOUT)[0]

    def _transact(self, batch: Sequence[Op[Any]], lock_timeout: LiteralString) -> list[Rows]:
        """Commit operations as one, and return the rows of each."""
        sent = False
        first = batch[0]
        try:
            # If the operation cannot be repeated after a lost answer, test the connection first.
            checked = first.once or (len(batch) > 1 and any(op.once for op in batch))
            with (self._urgent if first.urgent else self._pool).connection(checked=checked) as conn:
                self._check_schema(conn)
                sent, conn.wait_cancelled = True, False
                if self.hook is None:
                    rows = self._run(conn, batch, lock_timeout)
                else:
                    rows = [self._run_with_hook(conn, op) for op in batch]
                if conn.wait_cancelled:
                    raise AnswerLost(
                        f"{first.name}: {self.where} has committed it, but its wait for a standby was cancelled: "
                        "a failover may lose it"
                    )
                return rows
        except ROLLED_BACK:
            raise
        except psycopg.Error as error:
            raise self._failed(error, first.name, sent=sent and first.writes) from error

    def _closed_by_server(self) -> None:
        """Count that the server closed a connection."""
        self.failures += 1

    def _failed(self, error: psycopg.Error, op: str, *, sent: bool) -> StoreError:
        if is_down(error):
            self.failures += 1
        if isinstance(error, errors.ReadOnlySqlTransaction):  # wake-ups come from another server now
            for watch in self._rest(wait=False):  # other callers may wait for this thread to commit
                watch.tell()
        return translate(error, op, self.where, sent=sent)

    def _run(self, conn: PooledConnection, batch: Sequence[Op[Any]], lock_timeout: LiteralString) -> list[Rows]:
        repeated = any(op.repeated for op in batch)
        direct = self._usual and not repeated
        if direct and len(batch) == 1 and batch[0].sections == LONE and conn.direct:
            with suppress(errors.InsufficientPrivilege):
                return self._enqueue_alone(conn, batch[0])
            conn.direct = False  # no right to the lock; if none to the tables, the next statement raises
        work = self._work(batch)
        wakes = any(op.wakes for op in batch)
        rows: list[list[Any]] = [[] for _ in batch]
        # An operation that may wait for a lock runs in a transaction, which limits that time.
        alone = len(work) == 1 and conn.plans_right(work[0].section) and batch[0].name != "finish"
        if alone and direct:
            cursors = [conn.execute(work[0].sql, work[0].params, binary=True)]
        else:
            cursors = self._pipelined(conn, work, lock_timeout, repeated=repeated)
        for line, cursor in zip(work, cursors, strict=True):
            rows[line.place] += _fetch(cursor)
        if wakes and self._is_to_hint():
            conn.hint()
        return rows  # type: ignore[return-value]

    def _enqueue_alone(self, conn: PooledConnection, op: Op[Any]) -> list[Rows]:
        [lone] = self._spell(LONE[0], "dollar")
        all_awake = lone_enqueue.enqueue(conn, lone, op.params)
        if not all_awake and op.wakes and self._is_to_hint():
            conn.hint()
        return [[]]

    def _is_to_hint(self) -> bool:
        """Return whether to wake idle workers. If further commits follow, which do so too, only now and then."""
        now = time.monotonic()
        if self._gathering.waiting and now - self._hinted_at <= HINT_SECONDS:
            return False
        self._hinted_at = now
        return True

    def _pipelined(
        self, conn: PooledConnection, work: list[Line], lock_timeout: LiteralString, *, repeated: bool
    ) -> list[Cursor[Any]]:
        cursors: list[Cursor[Any]] = []
        try:
            with conn.pipeline():
                conn.execute(BEGIN)
                conn.execute(lock_timeout)
                if not self._usual:
                    conn.execute("set local client_min_messages = warning")
                steady = True
                for line in work:
                    steady = conn.plan(line.section, steady=steady)
                    cursors.append(conn.execute(line.sql, line.params, binary=True))
                if repeated:
                    conn.execute(WAIT_FOR_STANDBY)
                conn.execute("commit")
        except psycopg.Error as error:
            raise first_error(error) from None
        return cursors

    def _work(self, batch: Sequence[Op[Any]]) -> list[Line]:
        """List the statements of a batch. Plain enqueues with equal terms become one, which has no rows."""
        others, enqueues = joined(batch)
        if len(others) > 1:
            others.sort(key=_keys_in_order)
        return [
            Line(place, section, trusted(text.sql), op.params)
            for place, op in (*others, *((0, op) for op in enqueues))
            for section in op.sections
            for text in self._spell(section)
        ]

    def _run_with_hook(self, conn: PooledConnection, op: Op[Any]) -> Rows:
        """Run statement by statement, with the hook between them."""
        hook = self.hook
        assert hook is not None
        rows: list[Any] = []
        steady = True
        with conn.transaction():
            for section in op.sections:
                steady = conn.plan(section, steady=steady)
                for number, text in enumerate(self._spell(section)):
                    hook(Point("before", op.name, section, number))
                    rows += _fetch(conn.execute(trusted(text.sql), op.params, binary=True))
                    hook(Point("after", op.name, section, number))
            if op.repeated:
                conn.execute(WAIT_FOR_STANDBY)
            hook(Point("before", op.name, "commit", 0))
        hook(Point("after", op.name, "commit", 0))
        if op.wakes:
            conn.hint()
        return rows

    def _spell(self, section: str, style: statements.Style = "pyformat") -> tuple[statements.Statement, ...]:
        return statements.spell("postgres", section, style, self.schema)

    def _open(self, url: str) -> PooledConnection:
        # Behind PgBouncer the next statement may run on another connection, where it is not prepared.
        threshold = PREPARE_AFTER if self._prepared else None
        return PooledConnection.connect(url, autocommit=True, prepare_threshold=threshold)

    def _connect(self) -> PooledConnection:
        conn = connect(self._open, self.url, self._connect_s, to_read=self.to_read)
        # Each statement of a list sees commits before it, whatever the server's default is.
        conn.isolation_level = IsolationLevel.READ_COMMITTED
        conn.add_notice_handler(conn.noticed)
        try:
            if self._prepared:
                conn.prepare_hint()
                conn.keep_plans()
        except psycopg.Error:  # behind PgBouncer, say, with `prepared` left on
            conn.close()
            raise
        return conn

    def _check_schema(self, conn: Connection[Any]) -> None:
        """Check once whether the tables exist, and read how a single statement is isolated and what it shows."""
        if not self._schema_checked:
            remedy = "duly migrate --url URL" + ("" if self.schema == "duly" else f" --schema {self.schema}")
            migrate.check(
                "postgres", read_meta(conn, self.schema), f"{self.where}, schema {self.schema}", remedy=remedy
            )
            isolation, shown = only(
                conn.execute(
                    "select current_setting('default_transaction_isolation'), current_setting('client_min_messages')"
                )
            )
            self._usual = isolation == "read committed" and shown != "error"
            self._schema_checked = True


class Line(NamedTuple):
    """One statement of a batch, and the place of the operation that gets its rows."""

    place: int
    section: str
    sql: LiteralString
    params: Mapping[str, Any]


def _keys_in_order(numbered: tuple[int, Op[Any]]) -> tuple[str, str]:
    """Return what sorts enqueues by the jobs, then by the keys that they lock: one order prevents deadlocks."""
    op = numbered[1]
    if "key_ttl_ms" not in op.params:
        return "", op.params["parent_id"] or ""
    jobs = msgspec.json.decode(op.params["jobs"])
    return op.params["task"], jobs[0]["key"] if jobs else ""


def _fetch(cursor: Cursor[Any]) -> Rows:
    return cursor.fetchall() if cursor.description else []


def _abandon_all() -> None:
    for driver in list(_drivers):
        driver.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
