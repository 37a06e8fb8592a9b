"""PostgreSQL, through psycopg.

No session state and every name qualified, so that it runs behind PgBouncer in transaction mode. An operation of
one statement is one round trip; a list goes as one pipeline in one transaction, which is one round trip too.
Concurrent enqueues of one process are such a list, and share its commit.
Connections are opened in the thread that needs one, so that whoever cannot get in is told at once, and why.
"""

from __future__ import annotations

import asyncio
import os
import random
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, LiteralString, NamedTuple, TypeVar

import msgspec
import psycopg
from psycopg import Connection, Cursor, IsolationLevel, errors, generators
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult

from duly.errors import AnswerLost, ConfigError, DulyError, SchemaMismatch, StoreError, StoreRefused, StoreUnavailable
from duly.store import health, migrate, statements
from duly.store.driver import About, Driver, Finding, Hook, Point, Watch
from duly.store.group_commit import Gathering, Outcome, Word, joined, rows_of
from duly.store.op import Op, Rows
from duly.store.postgres.listen import ALL_AWAKE, HINT, ListenWatch

T = TypeVar("T")

MOST_CONNECTIONS = 3  # the one to listen on among them, and one more for what is urgent
IDLE_SECONDS = 60.0
LEND_SECONDS = 1.0
CONNECT_SECONDS = 2.0
PREPARE_AFTER = 2
HINT_SECONDS = 0.005
ADD = b"duly_add"  # what the server remembers a lone enqueue by
OLD_TRANSACTION_SECONDS = 300.0
BEGIN = "begin isolation level read committed"
LOCK_TIMEOUT: LiteralString = "set local lock_timeout = '5s'"
# What others wait for may not wait for long: it is run again alone.
SHORT_LOCK_TIMEOUT = "set local lock_timeout = '100ms'"

# The server rolled the transaction back and said so.
ROLLBACK_PAUSES = (0.0, 0.02, 0.05, 0.1)
ROLLED_BACK = (errors.SerializationFailure, errors.DeadlockDetected)
# The server is well, and says that something else is in the way.
IN_THE_WAY = (*ROLLED_BACK, errors.LockNotAvailable, errors.QueryCanceled)
_abandoned: list[object] = []
_drivers: weakref.WeakSet[PostgresDriver] = weakref.WeakSet()


# What runs all day is planned once for a connection, whatever the tables hold, and so that it finds its rows by an
# index: a plan that was made for an empty table would read the whole of a full one. The rest is planned as the server
# would.
STEADY_PLANS = {"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "enable_bitmapscan": "off"}
STEADY = frozenset({
    "await_claim", "claim", "claim_marked", "enqueue", "enqueue_one", "expirable", "expired_leases", "extend",
    "finish_batched", "finish_gone", "finish_keyed", "finish_plain", "head", "heartbeat", "hold_parent", "next_due",
    "next_fire", "progress", "recall",
})  # fmt: skip
LONE = ("enqueue_one",)
# Enqueues that can share a commit: plain ones, also by handlers, and those of one key.
GATHERED = (
    ("enqueue",),
    LONE,
    ("hold_parent", "enqueue"),
    ("reserve_keys", "enqueue_keyed", "key_holders"),
)
# What a server says to a name, a password or a host that it will not take tomorrow either.
REFUSALS = (
    "does not exist",
    "authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "not permitted to log in",
    "does not support SSL",
)


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
        self._begin_afresh()
        _drivers.add(self)

    def _begin_afresh(self) -> None:
        self._pool = _Pool(self._connect, self._connections, self._hung_up)
        # Beats have a connection of their own: a lease must not wait for other work.
        self._urgent = _Pool(self._connect, 1, self._hung_up)
        self._threads: dict[bool, ThreadPoolExecutor] = {}
        self._one_start = threading.Lock()
        self._gathering = Gathering(self._commit_together, lost=self._lost, start=self._start)
        self._hinted_at = 0.0
        self._schema_checked = False
        self._read_committed = True

    def execute(self, op: Op[Any]) -> Rows:
        """Run `op` once: an enqueue together with others, what is not alone on a free connection."""
        if self._gathers(op):
            outcome = self._gathering.run(op)
            if outcome is not Word.ALONE:
                return rows_of(outcome)
        return self._execute_patiently(op)

    async def aexecute(self, op: Op[Any]) -> Rows:
        """Run `op` once on a thread of the driver's own; what is urgent has one that nothing else takes."""
        if self._gathers(op):
            outcome = await self._gathering.arun(op)
            if outcome is not Word.ALONE:
                return rows_of(outcome)
        return await asyncio.wrap_future(self._start(lambda: self._execute_patiently(op), urgent=op.urgent))

    def _start(self, work: Callable[[], T], *, urgent: bool = False) -> Future[T]:
        with self._one_start:
            if urgent not in self._threads:
                size = 1 if urgent else self._connections
                self._threads[urgent] = ThreadPoolExecutor(size, thread_name_prefix="duly-postgres")
            return self._threads[urgent].submit(work)

    def close(self) -> None:
        """Close every connection. The next operation opens one again."""
        resting = [watch for watch in self._watches if watch.rest()]
        with self._one_start:
            threads, self._threads = self._threads, {}
        for executor in threads.values():
            executor.shutdown()
        self._pool.close()
        self._urgent.close()
        for watch in resting:  # look for yourself, and arm again
            watch.tell()

    def abandon(self) -> None:
        """Forget every connection without closing it, in a forked child: the parent still talks on it."""
        _abandoned.extend((self._pool, self._urgent, self._threads, self._watches))
        self._abandon_watches()
        self._begin_afresh()

    def about(self) -> About:
        """Say which database this is and how it is set."""
        try:
            with self._pool.connection() as conn:
                self._look_around(conn)
                number = migrate.version(read_meta(conn, self.schema))
                version, commit, fsync = _only(
                    conn.execute(
                        "select current_setting('server_version'), current_setting('synchronous_commit'), "
                        "current_setting('fsync')"
                    )
                )
        except psycopg.Error as error:
            raise self._failed(error, "about", sent=False) from error
        return About(
            store="PostgreSQL",
            where=self.where.removeprefix("PostgreSQL "),
            engine=f"PostgreSQL {version.split()[0]}",
            schema=f"{self.schema} {number}",
            durability="fsync off" if fsync == "off" else "synchronous_commit off" if commit == "off" else "full",
        )

    def examine(self, *, deep: bool = False) -> list[Finding]:
        """Look at the server, the rights on it, and what keeps it from clearing up. There is no deeper look."""
        try:
            with self._pool.connection() as conn:
                self._look_around(conn)
                number = migrate.version(read_meta(conn, self.schema))
                return [
                    *_look_at_server(conn),
                    health.schema(number, migrate.newest("postgres")),
                    *_look_at_tables(conn, self.schema),
                    *_look_at_activity(conn),
                ]
        except psycopg.Error as error:
            raise self._failed(error, "examine", sent=False) from error

    def _watch(self, on_change: Callable[[], None]) -> Watch:
        if self._listen_url is None and not self._prepared:
            # Behind PgBouncer the flag would stay on a connection that is somebody else's next.
            return Watch(self, on_change)
        return ListenWatch(self, on_change, self)

    @contextmanager
    def listening(self) -> Iterator[Connection[Any]]:
        """Open a connection to listen on, which takes one place of the pool's."""
        try:
            with (
                self._pool.lent(),
                psycopg.connect(
                    _patient(self._listen_url or self.url, self._connect_s), autocommit=True, prepare_threshold=None
                ) as conn,
            ):
                yield conn
        except psycopg.Error:
            self.failures += 1
            raise

    def _gathers(self, op: Op[Any]) -> bool:
        """Say whether an operation may share its commit: only where locks are taken in one order, jobs before keys."""
        several_keys = "key_ttl_ms" in op.params and "," in op.params["ids"]
        return op.sections in GATHERED and not several_keys and self.hook is None

    def _commit_together(self, batch: Sequence[Op[Any]]) -> Sequence[Outcome]:
        """Commit enqueues as one. If they cannot be, each is run alone, so that only the guilty fails or waits."""
        try:
            return self._transact(batch, SHORT_LOCK_TIMEOUT)
        except (DulyError, *ROLLED_BACK) as error:  # of anything else nobody knows what was written
            if isinstance(error, AnswerLost | StoreUnavailable) and _is_down(error.__cause__):
                return [_own(error) for _ in batch]
            if len(batch) == 1 and not isinstance(error.__cause__ or error, (*ROLLED_BACK, errors.LockNotAvailable)):
                return [error]
            return [Word.ALONE] * len(batch)

    def _lost(self, op: Op[Any], error: BaseException) -> Exception:
        return AnswerLost(f"{op.name}: who sent it to {self.where} together with others was interrupted ({error!r})")

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
            # Where a lost answer could not be asked for again, the connection is looked at first.
            checked = first.once or (len(batch) > 1 and any(op.once for op in batch))
            with (self._urgent if first.urgent else self._pool).connection(checked=checked) as conn:
                self._look_around(conn)
                sent = True
                if self.hook is not None:
                    return [self._run_with_hook(conn, op) for op in batch]
                return self._run(conn, batch, lock_timeout)
        except ROLLED_BACK:
            raise
        except psycopg.Error as error:
            raise self._failed(error, first.name, sent=sent and first.writes) from error

    def _hung_up(self) -> None:
        """Count that the server ended a connection: whoever trusted it has to begin anew."""
        self.failures += 1

    def _failed(self, error: psycopg.Error, op: str, *, sent: bool) -> StoreError:
        if _is_down(error):
            self.failures += 1
        return translate(error, op, self.where, sent=sent)

    def _run(self, conn: _Connection, batch: Sequence[Op[Any]], lock_timeout: LiteralString) -> list[Rows]:
        if len(batch) == 1 and batch[0].sections == LONE and self._read_committed and conn.direct:
            with suppress(errors.InsufficientPrivilege):
                self._add(conn, batch[0])
                return [[]]
            conn.direct = False  # it may not ask who sleeps, or nothing at all, which is then told
        work = self._work(batch)
        wakes = any(op.wakes for op in batch)
        rows: list[list[Any]] = [[] for _ in batch]
        # What may have to wait for a lock does so in a transaction, where the time for that is limited.
        alone = len(work) == 1 and conn.plans_right(work[0].section) and batch[0].name != "finish"
        if alone and self._read_committed:
            cursors = [conn.execute(work[0].sql, work[0].params, binary=True)]
        else:
            cursors = self._pipelined(conn, work, lock_timeout)
        for line, cursor in zip(work, cursors, strict=True):
            rows[line.place] += _fetch(cursor)
        if wakes and self._is_to_hint():
            conn.hint()
        return rows  # type: ignore[return-value]

    def _add(self, conn: _Connection, op: Op[Any]) -> None:
        [lone] = self._spell(LONE[0], "dollar")
        if not conn.add(lone, op.params) and op.wakes and self._is_to_hint():
            conn.hint()

    def _is_to_hint(self) -> bool:
        """Say whether to wake who sleeps: while others wait for their commit, which does it too, only now and then."""
        now = time.monotonic()
        if self._gathering.waiting and now - self._hinted_at <= HINT_SECONDS:
            return False
        self._hinted_at = now
        return True

    def _pipelined(self, conn: _Connection, work: list[_Line], lock_timeout: LiteralString) -> list[Cursor[Any]]:
        cursors: list[Cursor[Any]] = []
        try:
            with conn.pipeline():
                conn.execute(BEGIN)
                conn.execute(lock_timeout)
                steady = True
                for line in work:
                    steady = conn.plan(line.section, steady=steady)
                    cursors.append(conn.execute(line.sql, line.params, binary=True))
                conn.execute("commit")
        except psycopg.Error as error:
            raise _first(error) from None
        return cursors

    def _work(self, batch: Sequence[Op[Any]]) -> list[_Line]:
        """List the statements of a batch. Plain enqueues with the same terms become one, which has no rows."""
        others, enqueues = joined(batch)
        if len(others) > 1:
            others.sort(key=_keys_in_order)
        return [
            _Line(place, section, _trusted(text.sql), op.params)
            for place, op in (*others, *((0, op) for op in enqueues))
            for section in op.sections
            for text in self._spell(section)
        ]

    def _run_with_hook(self, conn: _Connection, op: Op[Any]) -> Rows:
        """Run statement by statement, so that the hook stands between them."""
        hook = self.hook
        assert hook is not None
        rows: list[Any] = []
        steady = True
        with conn.transaction():
            for section in op.sections:
                steady = conn.plan(section, steady=steady)
                for number, text in enumerate(self._spell(section)):
                    hook(Point("before", op.name, section, number))
                    rows += _fetch(conn.execute(_trusted(text.sql), op.params, binary=True))
                    hook(Point("after", op.name, section, number))
            hook(Point("before", op.name, "commit", 0))
        hook(Point("after", op.name, "commit", 0))
        if op.wakes:
            conn.hint()
        return rows

    def _spell(self, section: str, style: statements.Style = "pyformat") -> tuple[statements.Statement, ...]:
        return statements.spell("postgres", section, style, self.schema)

    def _connect(self) -> _Connection:
        conn = _Connection.connect(
            _patient(self.url, self._connect_s),
            autocommit=True,
            # Behind PgBouncer the next statement may run on another connection, which has not prepared it.
            prepare_threshold=PREPARE_AFTER if self._prepared else None,
        )
        # The statements of a list each see what was committed before them, whatever the server's default is.
        conn.isolation_level = IsolationLevel.READ_COMMITTED
        try:
            if self._prepared:
                conn.prepare_hint()
                conn.keep_plans()
        except psycopg.Error:  # behind PgBouncer, say, with `prepared` left on
            conn.close()
            raise
        return conn

    def _look_around(self, conn: Connection[Any]) -> None:
        """See once whether the tables are there, and how the server isolates a statement that stands alone."""
        if not self._schema_checked:
            remedy = "duly migrate --url URL" + ("" if self.schema == "duly" else f" --schema {self.schema}")
            migrate.check(
                "postgres", read_meta(conn, self.schema), f"{self.where}, schema {self.schema}", remedy=remedy
            )
            isolation = conn.execute("select current_setting('default_transaction_isolation')").fetchone()
            self._read_committed = isolation == ("read committed",)
            self._schema_checked = True


def _for_now(settings: Mapping[str, str]) -> LiteralString:
    """Write what sets something until the end of the transaction, as one statement."""
    return _trusted("select " + ", ".join(f"set_config('{name}', '{value}', true)" for name, value in settings.items()))


class _Line(NamedTuple):
    """One statement of a batch, and whose answer its rows are."""

    place: int
    section: str
    sql: LiteralString
    params: Mapping[str, Any]


def _keys_in_order(numbered: tuple[int, Op[Any]]) -> tuple[str, str]:
    """Sort enqueues by the jobs, then by the keys that they lock, so that nobody waits for each other in a circle."""
    op = numbered[1]
    if "key_ttl_ms" not in op.params:
        return "", op.params["parent_id"] or ""
    jobs = msgspec.json.decode(op.params["jobs"])
    return op.params["task"], jobs[0]["key"] if jobs else ""


class _Connection(Connection[Any]):
    """One of ours, on which a hint may be on its way."""

    _hint = b""
    _hinting = False
    _adds = False
    direct = False  # what was prepared on it stays, so that statements can be sent past psycopg
    _encoding = "utf-8"
    _as_the_server: LiteralString = ""  # what has the rest of a transaction planned so; empty: everything is anyway

    def hint(self) -> None:
        """Wake who sleeps, after a commit, and do not wait for it: whoever takes the connection next hears it out."""
        with suppress(psycopg.Error):  # he will also find out what is wrong
            self.pgconn.send_query(self._hint or HINT.encode())
            self._hinting = True
            self.pgconn.flush()

    def prepare_hint(self) -> None:
        """Have the server remember the hint, where the next one runs on the same connection."""
        self.execute(f"prepare duly_hint as {HINT}")
        self._hint = b"execute duly_hint"

    def add(self, statement: statements.Statement, params: Mapping[str, Any]) -> bool:
        """Commit one statement that adds a job, past psycopg, which takes half as long for it as the server does.

        Says whether all were awake: then nobody has to be woken.
        """
        values = [_text(params[name], self._encoding) for name in statement.parameters]
        if self._adds:
            with suppress(errors.InvalidSqlStatementName):  # somebody had the server forget what it remembered
                return self._add(values)
        self._prepare_to_add(statement)
        return self._add(values)

    def _prepare_to_add(self, statement: statements.Statement) -> None:
        self.pgconn.send_prepare(ADD, f"{statement.sql}\n{ALL_AWAKE}".encode(self._encoding))
        self._adds = True  # so who is interrupted from here on leaves no connection that does not know it
        try:
            self._answer()
        except psycopg.Error:
            self._adds = False
            raise

    def _add(self, values: Sequence[bytes | None]) -> bool:
        self.pgconn.send_query_prepared(ADD, values)
        return self._answer().get_value(0, 0) == b"t"

    def _answer(self) -> PGresult:
        """Wait for the answer to what was sent, and raise what it says if that is an error."""
        answer: PGresult | None = None
        while (result := self._next_result()) is not None:
            answer = result
        if answer is None:
            raise psycopg.OperationalError("the server has hung up")
        if answer.status == ExecStatus.FATAL_ERROR:
            raise errors.error_from_result(answer, encoding=self._encoding)
        return answer

    def _next_result(self) -> PGresult | None:
        pgconn = self.pgconn
        while pgconn.is_busy():
            wait = select.poll()
            wait.register(pgconn.socket, select.POLLIN | (select.POLLOUT if pgconn.flush() else 0))
            wait.poll()
            pgconn.consume_input()
        return pgconn.get_result()

    def keep_plans(self) -> None:
        """Have what runs all day planned once, unless the connection is lent by a pooler: others get it next."""
        names = list(STEADY_PLANS)
        asked = ", ".join(f"current_setting('{name}')" for name in names)
        pid, *values = _only(self.execute(_trusted(f"select pg_backend_pid(), {asked}")))
        if pid == self.info.backend_pid:
            # Compiling is off for good: a table that must be read whole counts as expensive, however small it is.
            self.execute(_trusted("; ".join(f"set {name} = {value}" for name, value in STEADY_PLANS.items())))
            self.execute("set jit = off")
            self._encoding = self.info.encoding
            self.direct = hasattr(select, "poll")
            self._as_the_server = _for_now(dict(zip(names, values, strict=True)))

    def plans_right(self, section: str) -> bool:
        """Whether a section is planned as it should without anything being set."""
        return section in STEADY or not self._as_the_server

    def plan(self, section: str, *, steady: bool) -> bool:
        """Set how a section of a transaction is planned, if that was not set for the one before it; says how.

        Each has to be planned in one way, wherever it comes: the server keeps the first plan that it made of a text.
        """
        if not self._as_the_server or steady == (section in STEADY):
            return steady
        self.execute(self._as_the_server if steady else _for_now(STEADY_PLANS))
        return not steady

    def hear_out(self) -> bool:
        """Wait for the end of a hint; whether it failed is nobody's concern. False: the server has hung up."""
        try:
            if self._hinting:
                self._hinting = False
                self.wait(generators.fetch_many(self.pgconn))
            for _ in range(2):  # the first may bring only the server's last word
                self.pgconn.consume_input()
        except psycopg.Error:
            return False
        return self.pgconn.transaction_status == TransactionStatus.IDLE

    @property
    def reusable(self) -> bool:
        """Whether somebody else may have it."""
        return self._hinting or self.pgconn.transaction_status == TransactionStatus.IDLE


class _Pool:
    """A few connections, opened when needed and handed out one by one."""

    def __init__(self, connect: Callable[[], _Connection], size: int, hung_up: Callable[[], None]) -> None:
        self._connect = connect
        self._hung_up = hung_up
        self._size = size
        self._taken = 0
        self._freed = threading.Condition()
        self._line: deque[object] = deque()  # who comes first is served first: nobody takes the place he just left
        self._idle: deque[tuple[float, _Connection]] = deque()

    def connection(self, *, checked: bool = False) -> _Loan:
        """Hand out a connection for a while; `checked` has it looked at first."""
        return _Loan(self, checked)

    def take(self, *, checked: bool) -> _Connection:
        """Take a connection, when there is a place for one."""
        self._take_place()
        try:
            return self._take(checked)
        except BaseException:
            self._leave_place()
            raise

    def give_back(self, conn: _Connection, error: BaseException | None) -> None:
        """Take a connection back from who had it, and the place that it had."""
        try:
            if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
                self.close()  # a restarted server has closed the others too
            if conn.reusable and self._taken <= self._size:
                self._idle.append((time.monotonic(), conn))
            else:
                conn.close()
        finally:
            self._leave_place()

    def _take_place(self) -> None:
        with self._freed:
            if self._line or self._taken >= self._size:
                self._stand_in_line()
            self._taken += 1

    def _stand_in_line(self) -> None:
        ticket = object()
        self._line.append(ticket)
        try:
            self._freed.wait_for(lambda: self._line[0] is ticket and self._taken < self._size)
        finally:
            self._line.remove(ticket)
            self._freed.notify_all()

    def _leave_place(self) -> None:
        with self._freed:
            self._taken -= 1
            self._freed.notify_all()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Do with one place less while a connection of another kind is open. The last place is never lent."""
        with self._freed:
            lent = self._size > 1
            self._size -= lent
            # They may all be at work.
            self._freed.wait_for(lambda: self._taken <= self._size, LEND_SECONDS)
        while len(self._idle) + self._taken > self._size:
            for _, conn in self._drained():
                conn.close()
                break
            else:
                break
        try:
            yield
        finally:
            with self._freed:
                self._size += lent
                self._freed.notify_all()

    def _take(self, checked: bool) -> _Connection:
        for since, conn in self._drained():
            fresh = conn.hear_out() and not checked and time.monotonic() - since < IDLE_SECONDS
            if fresh or _alive(conn):
                return conn
            conn.close()
            self._hung_up()
        return self._connect()

    def close(self) -> None:
        for _, conn in self._drained():
            conn.close()

    def _drained(self) -> Iterator[tuple[float, _Connection]]:
        """Take idle connections out one by one; other threads may be taking them too."""
        while True:
            try:
                yield self._idle.pop()
            except IndexError:
                return


class _Loan:
    """The time for which somebody has a connection. By hand, because every operation has one."""

    __slots__ = ("_checked", "_conn", "_pool")

    def __init__(self, pool: _Pool, checked: bool) -> None:
        self._pool = pool
        self._checked = checked

    def __enter__(self) -> _Connection:
        self._conn = self._pool.take(checked=self._checked)
        return self._conn

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.give_back(self._conn, error)


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


def _text(value: str | int | None, encoding: str) -> bytes | None:
    """Write a parameter as the server reads it."""
    if value is None:
        return None
    if isinstance(value, int):
        return b"%d" % value
    text = str.encode(value, encoding)  # as it is: a member of an enum has another `str`
    if b"\0" in text:  # where libpq would take it to end
        raise psycopg.DataError("PostgreSQL keeps no text with a NUL in it")
    return text


def _fetch(cursor: Cursor[Any]) -> Rows:
    return cursor.fetchall() if cursor.description else []


def _only(cursor: Cursor[Any]) -> Any:
    return cursor.fetchall()[0]


def _own(error: StoreError) -> StoreError:
    """Give everybody of a batch an error of its own to raise."""
    own = type(error)(str(error))
    own.__cause__ = error.__cause__
    return own


def _first(error: psycopg.Error) -> psycopg.Error:
    """Give the error that aborted a pipeline; those of the statements after it can hide it."""
    hidden = error.__context__
    return hidden if isinstance(error, errors.PipelineAborted) and isinstance(hidden, psycopg.Error) else error


def _is_down(error: BaseException | None) -> bool:
    """Tell whether the server cannot be reached, or cannot be written to."""
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) and not isinstance(error, IN_THE_WAY)


def _trusted(sql: str) -> LiteralString:
    """Say that a statement comes from a file of ours: psycopg takes no other strings."""
    return sql


def describe(url: str) -> str:
    """Name a database for people: host, port and name, never the password."""
    try:
        info = conninfo_to_dict(url)
    except psycopg.ProgrammingError:  # whose message may quote a password
        raise ConfigError("libpq cannot read this PostgreSQL URL: look at its options") from None
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
            locked = StoreUnavailable(
                f"{op}: what it needs is locked in {where} by another transaction; nothing was written. "
                "If that is your own, pass it as `conn=`"
            )
            locked.locked = True
            return locked
        case errors.QueryCanceled():
            return StoreUnavailable(f"{op}: {where} cancelled it ({detail}); nothing was written")
        case errors.ReadOnlySqlTransaction() | errors.DiskFull() | errors.TooManyConnections() | errors.OutOfMemory():
            return StoreUnavailable(f"{op}: {where} cannot write now ({detail}); nothing was written")
        case psycopg.OperationalError() | psycopg.InterfaceError() if sent:
            return AnswerLost(f"{op}: the connection to {where} broke before the answer came ({detail})")
        case psycopg.OperationalError() if _is_misnamed(detail):
            return StoreError(f"{op}: {where} refuses the connection ({detail}): look at the URL")
        case psycopg.OperationalError() | psycopg.InterfaceError():
            return StoreUnavailable(f"{op}: {where} {_unreachable(detail)}")
    return StoreError(f"{op}: {where}: {detail}")


def _unreachable(detail: str) -> str:
    if "FATAL" in detail:
        return f"refuses the connection ({detail})"
    return f"cannot be reached ({detail}): see that it runs, look at the URL"


def _is_misnamed(detail: str) -> bool:
    """Say whether the server does not know or want who asks: waiting would not help."""
    return any(words in detail for words in REFUSALS)


def read_meta(conn: Connection[Any], schema: str) -> Mapping[str, str]:
    """Read what a database says of its schema; empty when it has no tables of ours yet."""
    table = statements.qualified("duly.duly_meta", schema)
    if conn.execute("select to_regclass(%s)", [table]).fetchone() == (None,):
        return {}
    return dict(conn.execute(_trusted(f"select name, value from {table}")).fetchall())  # noqa: S608 (quoted)


def _look_at_server(conn: Connection[Any]) -> list[Finding]:
    version, number, fsync, commit, standby, read_only = _only(
        conn.execute(
            "select current_setting('server_version'), current_setting('server_version_num')::int, "
            "current_setting('fsync'), current_setting('synchronous_commit'), pg_is_in_recovery(), "
            "current_setting('default_transaction_read_only') = 'on'"
        )
    )
    return [
        health.server(version.split()[0], number),
        health.sync(fsync=fsync, commit=commit),
        health.writable(standby=standby, read_only=read_only),
        health.clock(_clock_offset_ms(conn)),
    ]


def _clock_offset_ms(conn: Connection[Any]) -> float:
    """Measure how far the server's clock is ahead of ours, by the quickest of a few answers."""
    asked: list[tuple[float, float]] = []
    for _ in range(3):
        before = time.time()
        (theirs,) = _only(conn.execute("select extract(epoch from clock_timestamp())::float8"))
        after = time.time()
        asked.append((after - before, theirs - (before + after) / 2))
    return min(asked)[1] * 1000


def _look_at_tables(conn: Connection[Any], schema: str) -> list[Finding]:
    (role,) = _only(conn.execute("select current_user"))
    tables = conn.execute(
        "select relname, relname = 'duly_meta' or (has_table_privilege(c.oid, 'select') "
        "       and has_table_privilege(c.oid, 'insert') and has_table_privilege(c.oid, 'update') "
        "       and has_table_privilege(c.oid, 'delete')), "
        "       exists (select 1 from unnest(reloptions) as o where o in ('autovacuum_enabled=false', "
        "               'autovacuum_enabled=off', 'autovacuum_enabled=0', 'autovacuum_enabled=no')) "
        "  from pg_class as c join pg_namespace as n on n.oid = relnamespace "
        " where nspname = %s and relkind = 'r' and starts_with(relname, 'duly_') order by relname",
        [schema],
    ).fetchall()
    rows = conn.execute(
        "select n_live_tup, n_dead_tup from pg_stat_user_tables where schemaname = %s and relname = 'duly_job'",
        [schema],
    ).fetchone()
    (on,) = _only(conn.execute("select current_setting('autovacuum') = 'on'"))
    return [
        health.rights([name for name, allowed, _ in tables if not allowed], role),
        health.vacuum(on=on, off_for=[name for name, _, off in tables if off]),
        health.dead_rows(*(rows or (0, 0))),
    ]


def _look_at_activity(conn: Connection[Any]) -> list[Finding]:
    # Of the sessions of other roles only their number may be seen, which is then all that is judged.
    old = conn.execute(
        "select pid, coalesce(application_name, ''), extract(epoch from clock_timestamp() - xact_start)::float8, "
        "       starts_with(state, 'idle in transaction') "
        "  from pg_stat_activity "
        " where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend' "
        "   and xact_start < clock_timestamp() - make_interval(secs => %s) "
        " order by xact_start",
        [OLD_TRANSACTION_SECONDS],
    ).fetchall()
    used, most = _only(
        conn.execute(
            "select (select count(*) from pg_stat_activity where backend_type = 'client backend'), "
            "current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int"
        )
    )
    return [
        health.transactions([health.Transaction(*one) for one in old]),
        health.connections(used, most),
    ]


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
            conn.execute(LOCK_TIMEOUT)  # whoever comes after a migration that waits for a table waits for it too
            steps = migrate.pending("postgres", read_meta(conn, schema))
            for statement in migration_statements(schema, steps, grant=grant):
                conn.execute(_trusted(statement))
    except errors.InsufficientPrivilege as error:
        raise StoreError(
            f"migrate: this role may not change {describe(url)} ({error.diag.message_primary}): run it as the owner"
        ) from error
    except errors.LockNotAvailable as error:
        raise StoreUnavailable(
            f"migrate: another transaction has held the tables of {describe(url)} all the while (a dump, say); nothing "
            "was changed. Run it again when that has ended: `duly doctor` names long transactions"
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
