"""Operations on a connection that belongs to the caller, inside the caller's own transaction.

The operation commits and rolls back with the caller. On a connection in autocommit mode without an open transaction,
the operation is a transaction of its own, so it is never half-written.

The library of a connection is recognized by the module of its class; none of the libraries is imported.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

from duly.errors import ConfigError
from duly.store.op import Op
from duly.store.statements import Dialect, Statement, Style, spell

T = TypeVar("T")
# Below SQLite 3.51.3 an automatic checkpoint that races a commit can corrupt the file: see store/sqlite/connection.py.
NO_CHECKPOINTS = "pragma wal_autocheckpoint = 0"
KINDS = (
    "sqlite3, aiosqlite, psycopg (sync and async), asyncpg, "
    "SQLAlchemy (sessions and connections, sync and async) and Django"
)


class Borrowed(NamedTuple):
    """A caller's connection behind one interface."""

    dialect: Dialect
    style: Style
    execute: Callable[[Statement, Mapping[str, Any]], Any]
    whole: Callable[[], Any]  # the context in which a list of statements is all or nothing
    waits: bool = False  # `execute` is to be awaited and `whole` to be entered with `async with`


def run(conn: Any, op: Op[T], *, schema: str = "duly") -> T:
    """Run an operation in the transaction of a sync connection."""
    if is_async(conn):
        raise ConfigError(
            f"`conn=` is {_kind(conn)}, an async connection: use the async twin of this call, with `a` in front"
        )
    borrowed = borrow(conn)
    rows: list[Any] = []
    assert "ends_written" not in op.sections, "a caller's connection may have run another statement since"
    with _explained(), borrowed.whole() if op.writes else nullcontext():
        for section in op.sections:
            for statement in spell(borrowed.dialect, section, borrowed.style, schema):
                rows += borrowed.execute(statement, op.params)
        for statement in _hint(op, borrowed, schema):
            borrowed.execute(statement, {})
    answer = op.read(rows)
    further = op.follow(answer) if op.follow else None
    return run(conn, further, schema=schema) if further else answer


async def arun(conn: Any, op: Op[T], *, schema: str = "duly") -> T:
    """Run an operation in the transaction of an async connection. A sync one will do too, and blocks the loop."""
    if not is_async(conn):
        return run(conn, op, schema=schema)
    if _is_session(conn):
        conn = await conn.connection()
    borrowed = borrow(conn)
    rows: list[Any] = []
    assert "ends_written" not in op.sections, "a caller's connection may have run another statement since"
    with _explained():
        async with borrowed.whole() if op.writes else nullcontext():
            for section in op.sections:
                for statement in spell(borrowed.dialect, section, borrowed.style, schema):
                    rows += await borrowed.execute(statement, op.params)
            for statement in _hint(op, borrowed, schema):
                await borrowed.execute(statement, {})
    answer = op.read(rows)
    further = op.follow(answer) if op.follow else None
    return await arun(conn, further, schema=schema) if further else answer


@contextmanager
def _explained() -> Iterator[None]:
    """Let errors of the caller's library pass. If tables are missing, add a note with the remedy."""
    try:
        yield
    except Exception as error:
        text = str(error)
        if "duly_" in text and ("no such table" in text or "does not exist" in text):
            error.add_note(
                "duly's tables are not in this connection's database: run `duly migrate` or app.migrate() first"
            )
        raise


def _hint(op: Op[Any], borrowed: Borrowed, schema: str) -> tuple[Statement, ...]:
    """Return the statements that wake workers when the caller commits, which the driver does not notice."""
    return spell(borrowed.dialect, "notify", borrowed.style, schema) if op.wakes else ()


def free(conn: Any) -> None:
    """Roll back a SQLite transaction that was left open: until it is garbage collected, it would block all writers."""
    if _library(conn) == "sqlite3":
        with suppress(Exception):  # it is closed, or belongs to another thread
            if conn.in_transaction:
                conn.rollback()


def is_async(conn: Any) -> bool:
    """Return whether statements on this connection are awaited."""
    library = _library(conn)
    return library in ("aiosqlite", "asyncpg") or (
        library in ("psycopg", "sqlalchemy") and any(name.startswith("async") for name in _names(conn, library))
    )


def borrow(conn: Any) -> Borrowed:
    """Adapt a caller's connection to the interface on which operations run."""
    adapt = _ADAPTERS.get(_library(conn))
    if adapt is None or (adapt in (_sqlite3, _psycopg) and not hasattr(conn, "commit")):  # a cursor, say
        raise ConfigError(f"`conn=` is {_kind(conn)}, which duly does not know. It takes {KINDS}")
    return adapt(conn)


def _library(conn: Any) -> str:
    for kind in type(conn).__mro__:
        name = kind.__module__.partition(".")[0]
        if name in _ADAPTERS:
            return name
    return ""


def _names(conn: Any, library: str) -> list[str]:
    """Return the names of the library's classes among the bases: the caller may have derived a class from them."""
    kinds = type(conn).__mro__
    return [kind.__name__.lower() for kind in kinds if kind.__module__.partition(".")[0] == library]


def _is_session(conn: Any) -> bool:
    return any("session" in name for name in _names(conn, "sqlalchemy"))


def _kind(conn: Any) -> str:
    return f"a {type(conn).__module__}.{type(conn).__qualname__}"


class Brackets(NamedTuple):
    """The statements around a list on SQLite: if it fails and the caller continues, nothing is half-written."""

    begin: tuple[str, ...]
    end: tuple[str, ...]
    undo: tuple[str, ...]


def _brackets(in_transaction: bool, autocommits: bool) -> Brackets:
    if not in_transaction and autocommits:
        return Brackets((NO_CHECKPOINTS, "begin immediate"), ("commit",), ("rollback",))
    # sqlite3 begins a transaction only before some statements, and only a deferred one.
    begin = () if in_transaction else ("begin immediate",)
    return Brackets((NO_CHECKPOINTS, *begin, "savepoint duly"), ("release duly",), ("rollback to duly", "release duly"))


@contextmanager
def _between(brackets: Brackets, execute: Callable[[str], Any]) -> Iterator[None]:
    for sql in brackets.begin:
        execute(sql)
    try:
        yield
    except BaseException:
        for sql in brackets.undo:
            execute(sql)
        raise
    for sql in brackets.end:
        execute(sql)


@asynccontextmanager
async def _abetween(brackets: Brackets, execute: Callable[[str], Any]) -> AsyncIterator[None]:
    for sql in brackets.begin:
        await execute(sql)
    try:
        yield
    except BaseException:
        for sql in brackets.undo:
            await execute(sql)
        raise
    for sql in brackets.end:
        await execute(sql)


def _autocommits(conn: Any) -> bool:
    return conn.isolation_level is None or getattr(conn, "autocommit", None) is True


def _sqlite3(conn: Any) -> Borrowed:
    def execute(statement: Statement, params: Mapping[str, Any]) -> Any:
        cursor = conn.cursor()
        cursor.row_factory = None  # tuples, whatever row factory the caller's connection has
        return cursor.execute(statement.sql, params).fetchall()

    def whole() -> Any:
        return _between(_brackets(conn.in_transaction, _autocommits(conn)), conn.execute)

    return Borrowed("sqlite", "named", execute, whole)


def _aiosqlite(conn: Any) -> Borrowed:
    async def execute(statement: Statement, params: Mapping[str, Any]) -> Any:
        async with conn.cursor() as cursor:
            cursor.row_factory = None
            await cursor.execute(statement.sql, params)
            return await cursor.fetchall()

    def whole() -> Any:
        return _abetween(_brackets(conn.in_transaction, _autocommits(conn)), conn.execute)

    return Borrowed("sqlite", "named", execute, whole, waits=True)


def _psycopg(conn: Any) -> Borrowed:
    def execute(statement: Statement, params: Mapping[str, Any]) -> Any:
        cursor = conn.cursor(row_factory=_tuples).execute(statement.sql, params)
        return cursor.fetchall() if cursor.description else []

    async def aexecute(statement: Statement, params: Mapping[str, Any]) -> Any:
        cursor = await conn.cursor(row_factory=_tuples).execute(statement.sql, params)
        return await cursor.fetchall() if cursor.description else []

    if conn.pgconn.pipeline_status:
        raise ConfigError("`conn=` is in pipeline mode, where answers arrive later: leave the pipeline first")
    idle = conn.info.transaction_status == 0
    whole = conn.transaction if conn.autocommit and idle else nullcontext
    if is_async(conn):
        return Borrowed("postgres", "pyformat", aexecute, whole, waits=True)
    return Borrowed("postgres", "pyformat", execute, whole)


def _tuples(cursor: Any) -> Callable[[Any], Any]:
    """Make rows tuples, whatever row factory the caller's connection has."""
    return tuple


def _asyncpg(conn: Any) -> Borrowed:
    async def execute(statement: Statement, params: Mapping[str, Any]) -> Any:
        rows = await conn.fetch(statement.sql, *(params[name] for name in statement.parameters))
        return [tuple(row) for row in rows]

    whole = nullcontext if conn.is_in_transaction() else conn.transaction
    return Borrowed("postgres", "dollar", execute, whole, waits=True)


def _sqlalchemy(conn: Any) -> Borrowed:
    if _is_session(conn):
        conn = conn.connection()

    def arguments(statement: Statement, params: Mapping[str, Any]) -> Any:
        if style == "dollar":
            return tuple(params[name] for name in statement.parameters)
        return {name: params[name] for name in statement.parameters}

    # Its own cursor would bypass the transaction that SQLAlchemy begins with the first statement it sees.
    def execute(statement: Statement, params: Mapping[str, Any]) -> Any:
        return _rows(conn.exec_driver_sql(statement.sql, arguments(statement, params)))

    async def aexecute(statement: Statement, params: Mapping[str, Any]) -> Any:
        return _rows(await conn.exec_driver_sql(statement.sql, arguments(statement, params)))

    dialect: Dialect = "sqlite" if conn.dialect.name == "sqlite" else "postgres"
    style: Style = (
        "named" if dialect == "sqlite" else "dollar" if conn.dialect.paramstyle.startswith("numeric") else "pyformat"
    )
    _refuse_autocommit(conn)
    if is_async(conn):
        return Borrowed(
            dialect, style, aexecute, _alchemy_awhole(conn) if dialect == "sqlite" else nullcontext, waits=True
        )
    return Borrowed(dialect, style, execute, _alchemy_whole(conn) if dialect == "sqlite" else nullcontext)


def _refuse_autocommit(conn: Any) -> None:
    plain = getattr(conn, "sync_connection", conn)
    if getattr(plain, "_is_autocommit_isolation", bool)():
        raise ConfigError(
            "`conn=` has the isolation level AUTOCOMMIT, so there is no transaction to join: "
            "leave `conn=` out, or give a connection without it"
        )


def _alchemy_whole(conn: Any) -> Callable[[], Any]:
    def execute(sql: str) -> None:
        conn.exec_driver_sql(sql).close()

    return lambda: _between(_brackets(conn.connection.driver_connection.in_transaction, False), execute)


def _alchemy_awhole(conn: Any) -> Callable[[], Any]:
    async def execute(sql: str) -> None:
        (await conn.exec_driver_sql(sql)).close()

    @asynccontextmanager
    async def whole() -> AsyncIterator[None]:
        raw = (await conn.get_raw_connection()).driver_connection
        async with _abetween(_brackets(raw.in_transaction, False), execute):
            yield

    return whole


def _rows(result: Any) -> Any:
    return [tuple(row) for row in result.fetchall()] if result.returns_rows else []


def _django(conn: Any) -> Borrowed:
    def execute(statement: Statement, params: Mapping[str, Any]) -> Any:
        with conn.cursor() as cursor:
            cursor.execute(statement.sql, {name: params[name] for name in statement.parameters})
            return cursor.fetchall() if cursor.description else []

    def atomic() -> Any:
        if dialect == "sqlite":
            with conn.cursor() as cursor:
                cursor.execute(NO_CHECKPOINTS)
        return sys.modules["django.db.transaction"].atomic(using=conn.alias)

    dialect: Dialect = "sqlite" if conn.vendor == "sqlite" else "postgres"
    return Borrowed(dialect, "pyformat", execute, atomic)


_ADAPTERS: dict[str, Callable[[Any], Borrowed]] = {
    "sqlite3": _sqlite3,
    "aiosqlite": _aiosqlite,
    "psycopg": _psycopg,
    "asyncpg": _asyncpg,
    "sqlalchemy": _sqlalchemy,
    "django": _django,
}
