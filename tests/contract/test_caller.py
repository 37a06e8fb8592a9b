"""Enqueue on the caller's own connection: it commits and rolls back with the caller. Line J02, for every kind."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import aiosqlite
import asyncpg
import django
import psycopg
import pytest
import sqlalchemy
from django.conf import settings
from django.db import connections, transaction
from django.db import utils as django_errors
from psycopg.rows import class_row, dict_row, namedtuple_row
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from duly.app.context import SyncCtx
from duly.app.lease import Lease
from duly.errors import ConfigError, LeaseLost
from duly.model import Enqueued, NewJob, Terms
from duly.store import caller, ops
from duly.store.op import Op
from tests.contract.stores import NOW, PostgresStore, SQLiteStore, Store, database_of, new_id, spoiled
from tests.servers.postgres import PostgresServer


class Caller(NamedTuple):
    """A caller's connection: what runs our operation on it, and the caller's own verbs."""

    conn: Any
    enqueue: Callable[[Op[Any]], Any]
    execute: Callable[[str], Any]
    commit: Callable[[], Any]
    rollback: Callable[[], Any]


def plainly(conn: Any) -> Callable[[Op[Any]], Any]:
    return lambda op: caller.run(conn, op)


def awaited(runner: asyncio.Runner, conn: Any) -> Callable[[Op[Any]], Any]:
    return lambda op: runner.run(caller.arun(conn, op))


# SQLite


@contextmanager
def sqlite3_legacy(path: str) -> Iterator[Caller]:
    conn = sqlite3.connect(path)
    yield Caller(conn, plainly(conn), conn.execute, conn.commit, conn.rollback)
    conn.close()


@contextmanager
def sqlite3_begin(path: str) -> Iterator[Caller]:
    conn = sqlite3.connect(path, isolation_level=None)
    conn.execute("begin")
    verbs = (lambda: conn.execute("commit")), (lambda: conn.execute("rollback"))
    yield Caller(conn, plainly(conn), conn.execute, *verbs)
    conn.close()


@contextmanager
def aiosqlite_legacy(path: str) -> Iterator[Caller]:
    with asyncio.Runner() as runner:
        conn = runner.run(opened(aiosqlite.connect(path)))
        yield Caller(
            conn,
            awaited(runner, conn),
            lambda sql: runner.run(opened(conn.execute_fetchall(sql))),
            lambda: runner.run(conn.commit()),
            lambda: runner.run(conn.rollback()),
        )
        runner.run(conn.close())


async def opened(waiting: Any) -> Any:
    return await waiting


@contextmanager
def aiosqlite_begin(path: str) -> Iterator[Caller]:
    with asyncio.Runner() as runner:
        conn = runner.run(opened(aiosqlite.connect(path, isolation_level=None)))

        def execute(sql: str) -> Any:
            return runner.run(opened(conn.execute_fetchall(sql)))

        execute("begin")
        yield Caller(conn, awaited(runner, conn), execute, lambda: execute("commit"), lambda: execute("rollback"))
        runner.run(conn.close())


# PostgreSQL


@contextmanager
def psycopg_plain(url: str) -> Iterator[Caller]:
    with psycopg.connect(url) as conn:
        yield Caller(conn, plainly(conn), conn.execute, conn.commit, conn.rollback)


@contextmanager
def psycopg_autocommit_begin(url: str) -> Iterator[Caller]:
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("begin")
        verbs = (lambda: conn.execute("commit")), (lambda: conn.execute("rollback"))
        yield Caller(conn, plainly(conn), conn.execute, *verbs)


@contextmanager
def psycopg_async(url: str) -> Iterator[Caller]:
    with asyncio.Runner() as runner:
        conn = runner.run(psycopg.AsyncConnection.connect(url))
        yield Caller(
            conn,
            awaited(runner, conn),
            lambda sql: runner.run(conn.execute(sql)),
            lambda: runner.run(conn.commit()),
            lambda: runner.run(conn.rollback()),
        )
        runner.run(conn.close())


@contextmanager
def psycopg_async_autocommit_begin(url: str) -> Iterator[Caller]:
    with asyncio.Runner() as runner:
        conn = runner.run(psycopg.AsyncConnection.connect(url, autocommit=True))

        def execute(sql: str) -> Any:
            return runner.run(conn.execute(sql))

        execute("begin")
        yield Caller(conn, awaited(runner, conn), execute, lambda: execute("commit"), lambda: execute("rollback"))
        runner.run(conn.close())


@contextmanager
def asyncpg_transaction(url: str) -> Iterator[Caller]:
    with asyncio.Runner() as runner:
        conn = runner.run(asyncpg.connect(url))
        begun = conn.transaction()
        runner.run(begun.start())
        yield Caller(
            conn,
            awaited(runner, conn),
            lambda sql: runner.run(conn.execute(sql)),
            lambda: runner.run(begun.commit()),
            lambda: runner.run(begun.rollback()),
        )
        runner.run(conn.close())


@contextmanager
def asyncpg_pool(url: str) -> Iterator[Caller]:
    with asyncio.Runner() as runner:
        pool = runner.run(opened(asyncpg.create_pool(url, min_size=1, max_size=1)))
        conn = runner.run(opened(pool.acquire()))
        begun = conn.transaction()
        runner.run(begun.start())
        yield Caller(
            conn,
            awaited(runner, conn),
            lambda sql: runner.run(conn.execute(sql)),
            lambda: runner.run(begun.commit()),
            lambda: runner.run(begun.rollback()),
        )
        runner.run(opened(pool.release(conn)))
        runner.run(pool.close())


# SQLAlchemy


def alchemy_url(target: str, driver: str) -> str:
    if target.startswith("postgresql://"):
        return target.replace("postgresql://", f"postgresql+{driver}://")
    return f"sqlite+{driver}:///{target}"


class Work(Session):
    """A session of the caller's own making."""


class AsyncWork(AsyncSession):
    """An async session of the caller's own making."""


class Db(AsyncSession):
    """A session whose name does not say that it is one."""


def alchemy(kind: str, driver: str) -> Callable[[str], AbstractContextManager[Caller]]:
    @contextmanager
    def connected(target: str) -> Iterator[Caller]:
        engine = sqlalchemy.create_engine(alchemy_url(target, driver), poolclass=NullPool)
        conn: Any = {
            "Connection": engine.connect,
            "Session": lambda: Session(engine),
            "scoped_session": lambda: scoped_session(sessionmaker(engine)),
            "own Session": lambda: Work(engine),
        }[kind]()
        execute = conn.exec_driver_sql if kind == "Connection" else lambda sql: conn.execute(sqlalchemy.text(sql))
        yield Caller(conn, plainly(conn), execute, conn.commit, conn.rollback)
        conn.close()
        engine.dispose()

    return connected


def async_alchemy(kind: str, driver: str) -> Callable[[str], AbstractContextManager[Caller]]:
    @contextmanager
    def connected(target: str) -> Iterator[Caller]:
        with asyncio.Runner() as runner:
            engine = create_async_engine(alchemy_url(target, driver), poolclass=NullPool)
            conn: Any = {
                "AsyncConnection": lambda: runner.run(opened(engine.connect())),
                "AsyncSession": lambda: AsyncSession(engine),
                "async_scoped_session": lambda: async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 1),
                "own AsyncSession": lambda: AsyncWork(engine),
                "own Db": lambda: Db(engine),
            }[kind]()
            yield Caller(
                conn,
                awaited(runner, conn),
                lambda sql: runner.run(conn.execute(sqlalchemy.text(sql))),
                lambda: runner.run(conn.commit()),
                lambda: runner.run(conn.rollback()),
            )
            runner.run(conn.close())
            runner.run(engine.dispose())

    return connected


# Django


def django_connection(target: str) -> Any:
    """One process has one set of settings: its two databases are pointed at the test's own."""
    if not settings.configured:
        engines = {"default": "sqlite3", "lite": "sqlite3", "post": "postgresql"}
        settings.configure(
            DATABASES={name: {"ENGINE": f"django.db.backends.{e}", "NAME": ":memory:"} for name, e in engines.items()}
        )
        django.setup()
    if target.startswith("postgresql://"):
        parts = psycopg.conninfo.conninfo_to_dict(target)
        alias, where = "post", {"NAME": parts["dbname"], **{k.upper(): parts[k] for k in ("user", "host", "port")}}
    else:
        alias, where = "lite", {"NAME": target}
    connections.databases[alias].update(where)
    return connections[alias]


@contextmanager
def django_idle(target: str) -> Iterator[Caller]:
    conn = django_connection(target)

    def execute(sql: str) -> None:
        with conn.cursor() as cursor:
            cursor.execute(sql)

    yield Caller(conn, plainly(conn), execute, lambda: None, lambda: None)
    conn.close()
    del connections[conn.alias]


@contextmanager
def django_atomic(target: str) -> Iterator[Caller]:
    with django_idle(target) as idle:
        block = transaction.atomic(using=idle.conn.alias)
        block.__enter__()

        def rollback() -> None:
            error = ZeroDivisionError()
            block.__exit__(ZeroDivisionError, error, None)

        yield idle._replace(commit=lambda: block.__exit__(None, None, None), rollback=rollback)


ON_SQLITE: dict[str, Callable[[str], AbstractContextManager[Caller]]] = {
    "sqlite3": sqlite3_legacy,
    "sqlite3 after BEGIN": sqlite3_begin,
    "aiosqlite": aiosqlite_legacy,
    "aiosqlite after BEGIN": aiosqlite_begin,
    "SQLAlchemy Session": alchemy("Session", "pysqlite"),
    "SQLAlchemy scoped_session": alchemy("scoped_session", "pysqlite"),
    "SQLAlchemy own Session": alchemy("own Session", "pysqlite"),
    "SQLAlchemy Connection": alchemy("Connection", "pysqlite"),
    "SQLAlchemy AsyncSession": async_alchemy("AsyncSession", "aiosqlite"),
    "SQLAlchemy AsyncConnection": async_alchemy("AsyncConnection", "aiosqlite"),
    "Django": django_atomic,
}
ON_POSTGRES: dict[str, Callable[[str], AbstractContextManager[Caller]]] = {
    "psycopg": psycopg_plain,
    "psycopg autocommit after BEGIN": psycopg_autocommit_begin,
    "psycopg async": psycopg_async,
    "psycopg async autocommit after BEGIN": psycopg_async_autocommit_begin,
    "asyncpg": asyncpg_transaction,
    "asyncpg pool": asyncpg_pool,
    "SQLAlchemy Session psycopg": alchemy("Session", "psycopg"),
    "SQLAlchemy Connection psycopg": alchemy("Connection", "psycopg"),
    "SQLAlchemy AsyncSession psycopg": async_alchemy("AsyncSession", "psycopg"),
    "SQLAlchemy AsyncConnection psycopg": async_alchemy("AsyncConnection", "psycopg"),
    "SQLAlchemy AsyncSession asyncpg": async_alchemy("AsyncSession", "asyncpg"),
    "SQLAlchemy AsyncConnection asyncpg": async_alchemy("AsyncConnection", "asyncpg"),
    "SQLAlchemy async_scoped_session": async_alchemy("async_scoped_session", "asyncpg"),
    "SQLAlchemy own AsyncSession": async_alchemy("own AsyncSession", "asyncpg"),
    "SQLAlchemy own Db": async_alchemy("own Db", "psycopg"),
    "Django": django_atomic,
}
KINDS = [("sqlite", kind) for kind in ON_SQLITE] + [("postgres", kind) for kind in ON_POSTGRES]


@contextmanager
def database(which: str, request: pytest.FixtureRequest) -> Iterator[tuple[Store, str]]:
    store: Store
    if which == "sqlite":
        path: Path = request.getfixturevalue("tmp_path") / "duly.db"
        store, target = SQLiteStore(path), str(path)
        store.query("create table mine (n integer)")
    else:
        target = request.getfixturevalue("postgres_url")
        store = PostgresStore(target)
        store.query("create table public.mine (n integer)")
    yield store, target
    store.close()


@pytest.fixture(params=KINDS, ids=[f"{where}-{kind}" for where, kind in KINDS])
def borrowed(request: pytest.FixtureRequest) -> Iterator[tuple[Store, Caller]]:
    """Every kind of connection, with a transaction open, beside a store on the same database."""
    where, kind = request.param
    with database(where, request) as (store, target):
        kinds = ON_SQLITE if where == "sqlite" else ON_POSTGRES
        with kinds[kind](target) as theirs:
            yield store, theirs


def new_op(key: str | None, task: str = "work") -> tuple[str, Op[Any]]:
    job = NewJob(new_id(), '{"n":1}', key=key)
    return job.id, ops.enqueue(Terms(task, delay_ms=5), [job], now=NOW)


def mine(store: Store) -> int:
    return store.query(f"select count(*) from {'mine' if store.kind == 'sqlite' else 'public.mine'}")[0][0]


@pytest.mark.parametrize("key", [None, "k"])
def test_j02_an_enqueue_commits_with_the_caller(borrowed: tuple[Store, Caller], key: str | None) -> None:
    store, theirs = borrowed
    before = store.snapshot()
    job_id, op = new_op(key)
    theirs.execute("insert into mine values (1)")
    assert theirs.enqueue(op) == [Enqueued(job_id)]
    assert store.snapshot() == before
    assert mine(store) == 0
    theirs.commit()
    assert mine(store) == 1
    job = store.get(job_id)
    assert (job.payload, job.key, job.due_at) == ({"n": 1}, key, NOW + 5)
    if key:
        assert store.enqueue_key("k").id == job_id
    store.now += 5
    assert [claimed.id for claimed in store.claim(5)] == [job_id]


@pytest.mark.parametrize("key", [None, "k"])
def test_j02_an_enqueue_rolls_back_with_the_caller(borrowed: tuple[Store, Caller], key: str | None) -> None:
    store, theirs = borrowed
    before = store.snapshot()
    _, op = new_op(key)
    theirs.enqueue(op)
    theirs.execute("insert into mine values (1)")
    theirs.rollback()
    assert store.snapshot() == before
    assert mine(store) == 0
    if key:
        assert not store.enqueue_key("k").deduplicated


def test_j02_an_enqueue_that_comes_first_begins_the_callers_transaction(borrowed: tuple[Store, Caller]) -> None:
    store, theirs = borrowed
    job_id, op = new_op("k")
    theirs.enqueue(op)
    assert store.get(job_id) is None
    theirs.commit()
    assert store.state(job_id) == "scheduled"


@pytest.mark.parametrize("where", ["sqlite", "postgres"])
def test_j02_the_callers_transaction_sees_the_job_that_holds_a_key(where: str, request: pytest.FixtureRequest) -> None:
    kinds = ON_SQLITE if where == "sqlite" else ON_POSTGRES
    with database(where, request) as (store, target):
        first = store.enqueue_key("k")
        for kind in kinds.values():
            with kind(target) as theirs:
                assert theirs.enqueue(new_op("k")[1]) == [Enqueued(first.id, deduplicated=True)]
                theirs.rollback()


# Where there is no transaction to join


@pytest.mark.parametrize("keep_ms", [0, 60_000])
def test_j09_other_writes_of_the_callers_connection_do_not_count_as_a_finish(tmp_path: Path, keep_ms: int) -> None:
    """Somebody who writes down what is done on a connection writes between two statements of ours."""
    store = SQLiteStore(tmp_path / "duly.db")
    store.enqueue(keep_ms=keep_ms)
    [job] = store.claim(1)
    engine = sqlalchemy.create_engine(f"sqlite:///{store.path}", poolclass=NullPool)
    noted = []

    @sqlalchemy.event.listens_for(engine, "after_cursor_execute")
    def note(conn: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "duly_job" in statement:
            noted.append(conn.connection.driver_connection.execute("insert into notes values (1)").rowcount)

    with engine.begin() as conn:
        conn.exec_driver_sql("create table notes (n)")
        conn.exec_driver_sql("update duly_job set token = token + 1")  # another worker has it by now
        with pytest.raises(LeaseLost):
            SyncCtx(Lease(job, cast("Any", None), database_of(store), 0.0)).commit(conn)
    assert len(noted) > 2
    engine.dispose()
    store.close()


@pytest.mark.parametrize("keyed", [False, True])
def test_k08_an_empty_transaction_can_finish_a_job_beside_a_writer(tmp_path: Path, keyed: bool) -> None:
    """One that has read cannot write any more once somebody else has, however long it would wait."""
    store = SQLiteStore(tmp_path / "duly.db")
    job_id = store.enqueue_key("one").id if keyed else store.enqueue()[0]
    [job] = store.claim(1)
    engine = sqlalchemy.create_engine(f"sqlite:///{store.path}", poolclass=NullPool)
    somebody = sqlite3.connect(store.path, isolation_level=None, timeout=0)
    somebody.execute("create table notes (n)")
    refused = []

    @sqlalchemy.event.listens_for(engine, "after_cursor_execute")
    def write(*_: Any) -> None:
        try:
            somebody.execute("insert into notes values (1)")
        except sqlite3.OperationalError as error:
            refused.append(str(error))

    with engine.begin() as conn:
        conn.connection.driver_connection.execute("begin")
        SyncCtx(Lease(job, cast("Any", None), database_of(store), 0.0)).commit(conn)
    assert store.query("select id, state from duly_done") == [(job_id, "succeeded")]
    assert set(refused) == {"database is locked"}
    somebody.close()
    engine.dispose()
    store.close()


@pytest.mark.parametrize("kind", ["keyed", "batched"])
def test_k08_a_job_with_a_key_or_in_a_batch_is_finished_on_a_callers_connection(tmp_path: Path, kind: str) -> None:
    store = SQLiteStore(tmp_path / "duly.db")
    if kind == "keyed":
        job_id = store.enqueue_key("one").id
    else:
        batch_id = new_id()
        store.query("insert into duly_batch (id, name, created_at, open) values (?, 'b', ?, 1)", batch_id, store.now)
        [job_id] = store.enqueue(batch_id=batch_id)
    [job] = store.claim(1)
    conn = sqlite3.connect(store.path, isolation_level=None)
    conn.execute("begin immediate")
    SyncCtx(Lease(job, cast("Any", None), database_of(store), 0.0)).commit(conn, result=7)
    conn.execute("commit")
    conn.close()
    assert store.query("select id, state, result from duly_done") == [(job_id, "succeeded", "7")]
    if kind == "keyed":
        assert store.query("select state, result from duly_key") == [("succeeded", "7")]
    else:
        assert store.query("select open, succeeded from duly_batch") == [(0, 1)]
    store.close()


@contextmanager
def sqlite3_idle(path: str) -> Iterator[Caller]:
    conn = sqlite3.connect(path, isolation_level=None)
    yield Caller(conn, plainly(conn), conn.execute, lambda: None, lambda: None)
    conn.close()


@contextmanager
def aiosqlite_idle(path: str) -> Iterator[Caller]:
    with asyncio.Runner() as runner:
        conn = runner.run(opened(aiosqlite.connect(path, isolation_level=None)))
        run = lambda sql: runner.run(opened(conn.execute(sql)))  # noqa: E731
        yield Caller(conn, awaited(runner, conn), run, lambda: None, lambda: None)
        runner.run(conn.close())


@contextmanager
def psycopg_idle(url: str) -> Iterator[Caller]:
    with psycopg.connect(url, autocommit=True) as conn:
        yield Caller(conn, plainly(conn), conn.execute, lambda: None, lambda: None)


@contextmanager
def psycopg_async_idle(url: str) -> Iterator[Caller]:
    with asyncio.Runner() as runner:
        conn = runner.run(psycopg.AsyncConnection.connect(url, autocommit=True))
        run = lambda sql: runner.run(conn.execute(sql))  # noqa: E731
        yield Caller(conn, awaited(runner, conn), run, lambda: None, lambda: None)
        runner.run(conn.close())


@contextmanager
def asyncpg_idle(url: str) -> Iterator[Caller]:
    with asyncio.Runner() as runner:
        conn = runner.run(asyncpg.connect(url))
        run = lambda sql: runner.run(conn.execute(sql))  # noqa: E731
        yield Caller(conn, awaited(runner, conn), run, lambda: None, lambda: None)
        runner.run(conn.close())


IDLE = [
    ("sqlite", sqlite3_idle), ("sqlite", aiosqlite_idle), ("sqlite", django_idle), ("postgres", psycopg_idle),
    ("postgres", psycopg_async_idle), ("postgres", asyncpg_idle), ("postgres", django_idle),
]  # fmt: skip


@pytest.fixture(params=IDLE, ids=[f"{where}-{kind.__name__}" for where, kind in IDLE])
def idle(request: pytest.FixtureRequest) -> Iterator[tuple[Store, Caller]]:
    """A connection that commits by itself and has no transaction open."""
    where, kind = request.param
    with database(where, request) as (store, target), kind(target) as theirs:
        yield store, theirs


@pytest.mark.parametrize("key", [None, "k"])
def test_j02_where_the_caller_has_no_transaction_an_enqueue_is_one(idle: tuple[Store, Caller], key: str | None) -> None:
    store, theirs = idle
    job_id, op = new_op(key)
    assert theirs.enqueue(op) == [Enqueued(job_id)]
    assert store.state(job_id) == "scheduled"
    theirs.execute("insert into mine values (1)")  # and none is left open
    assert mine(store) == 1


def test_j02_where_the_caller_has_no_transaction_an_enqueue_is_never_half_written(idle: tuple[Store, Caller]) -> None:
    """The key is reserved before the job is refused: neither stays."""
    store, theirs = idle
    before = store.snapshot()
    op = spoiled(new_op("k")[1])
    with pytest.raises(
        (sqlite3.IntegrityError, psycopg.IntegrityError, asyncpg.IntegrityConstraintViolationError, django_errors.Error)
    ):
        theirs.enqueue(op)
    assert store.snapshot() == before
    job_id, op = new_op("k")
    assert theirs.enqueue(op) == [Enqueued(job_id)]
    assert store.state(job_id) == "scheduled"


# What the caller's connection is set to do


def as_dict(cursor: Any, row: Any) -> dict[str, Any]:
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


@pytest.mark.parametrize("factory", [sqlite3.Row, as_dict, lambda cursor, row: None], ids=["Row", "dict", "none"])
@pytest.mark.parametrize("kind", ["sqlite3", "aiosqlite"])
def test_j02_row_factories_of_a_sqlite_caller_do_not_disturb(
    kind: str, factory: Any, request: pytest.FixtureRequest
) -> None:
    with database("sqlite", request) as (store, target), ON_SQLITE[kind](target) as theirs:
        theirs.conn.row_factory = factory
        job_id, op = new_op("k")
        assert theirs.enqueue(op) == [Enqueued(job_id)]
        _, again = new_op("k")
        assert theirs.enqueue(again) == [Enqueued(job_id, deduplicated=True)]
        assert theirs.conn.row_factory is factory
        theirs.commit()
        assert store.state(job_id) == "scheduled"


@pytest.mark.parametrize("factory", [dict_row, namedtuple_row, class_row(dict)], ids=["dict", "namedtuple", "class"])
@pytest.mark.parametrize("kind", ["psycopg", "psycopg async"])
def test_j02_row_factories_of_a_psycopg_caller_do_not_disturb(
    kind: str, factory: Any, request: pytest.FixtureRequest
) -> None:
    with database("postgres", request) as (_, target), ON_POSTGRES[kind](target) as theirs:
        theirs.conn.row_factory = factory
        job_id, op = new_op("k")
        assert theirs.enqueue(op) == [Enqueued(job_id)]
        _, again = new_op("k")
        assert theirs.enqueue(again) == [Enqueued(job_id, deduplicated=True)]
        theirs.commit()


def test_j02_a_json_codec_of_an_asyncpg_caller_does_not_disturb(request: pytest.FixtureRequest) -> None:
    """Its documentation shows this very codec; it would encode our JSON text a second time."""
    import json

    with database("postgres", request) as (store, target), asyncio.Runner() as runner:
        conn = runner.run(asyncpg.connect(target))
        runner.run(conn.set_type_codec("json", encoder=json.dumps, decoder=json.loads, schema="pg_catalog"))
        job_id, op = new_op("k")
        assert runner.run(caller.arun(conn, op)) == [Enqueued(job_id)]
        runner.run(conn.close())
        assert store.get(job_id).payload == {"n": 1}


@pytest.mark.parametrize("kind", ON_SQLITE)
def test_j02_a_callers_sqlite_connection_no_longer_checkpoints_automatically(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """Below SQLite 3.51.3 an automatic checkpoint that races a commit can corrupt the file."""
    with database("sqlite", request) as (_, target), ON_SQLITE[kind](target) as theirs:
        theirs.enqueue(new_op(None)[1])
        assert autocheckpoint(theirs) == 0
        theirs.commit()


def autocheckpoint(theirs: Caller) -> int:
    pragma = "pragma wal_autocheckpoint"
    conn = theirs.conn
    if "django" in type(conn).__module__:
        with conn.cursor() as cursor:
            return cursor.execute(pragma).fetchone()[0]
    found = theirs.execute(pragma)
    return (found if isinstance(found, list) else found.fetchall())[0][0]


# What is refused


@pytest.mark.parametrize("kind", ["psycopg async", "asyncpg", "SQLAlchemy AsyncSession psycopg", "SQLAlchemy own Db"])
def test_j02_a_sync_call_on_an_async_connection_is_refused_with_the_remedy(
    kind: str, request: pytest.FixtureRequest
) -> None:
    with database("postgres", request) as (store, target), ON_POSTGRES[kind](target) as theirs:
        before = store.snapshot()
        with pytest.raises(ConfigError, match="async connection: use the async twin of this call, with `a` in front"):
            caller.run(theirs.conn, new_op(None)[1])
        theirs.commit()
        assert store.snapshot() == before


def test_j02_a_sync_call_on_an_aiosqlite_connection_is_refused(request: pytest.FixtureRequest) -> None:
    refused = pytest.raises(ConfigError, match=r"aiosqlite.*async twin")
    with database("sqlite", request) as (_, target), ON_SQLITE["aiosqlite"](target) as theirs, refused:
        caller.run(theirs.conn, new_op(None)[1])


@pytest.mark.parametrize("kind", ["sqlite3", "SQLAlchemy Session"])
def test_j02_an_async_call_on_a_sync_connection_works_too(kind: str, request: pytest.FixtureRequest) -> None:
    with database("sqlite", request) as (store, target), ON_SQLITE[kind](target) as theirs:
        job_id, op = new_op("k")
        assert asyncio.run(caller.arun(theirs.conn, op)) == [Enqueued(job_id)]
        theirs.commit()
        assert store.state(job_id) == "scheduled"


@pytest.mark.parametrize("conn", [object(), "postgresql://x", 42, None, {}], ids=lambda conn: type(conn).__name__)
def test_j02_an_unknown_connection_is_refused_with_the_list_of_kinds(conn: object) -> None:
    kinds = "sqlite3, aiosqlite, psycopg .*asyncpg, SQLAlchemy .*Django"
    with pytest.raises(ConfigError, match=kinds) as refusal:
        caller.run(conn, new_op(None)[1])
    assert type(conn).__name__ in str(refusal.value)
    with pytest.raises(ConfigError, match=kinds):
        asyncio.run(caller.arun(conn, new_op(None)[1]))


def test_j02_workers_are_woken_by_a_caller_that_commits_and_not_before(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as worker, psycopg.connect(postgres_url) as conn:
        worker.execute("listen duly")
        caller.run(conn, ops.enqueue(Terms("work"), [NewJob(new_id(), "{}")]))
        assert list(worker.notifies(timeout=0.2, stop_after=1)) == []
        conn.commit()
        assert len(list(worker.notifies(timeout=5, stop_after=1))) == 1


def test_j02_a_connection_to_a_database_without_duly_tables_gets_the_remedy(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    op = ops.enqueue(Terms("mail"), [NewJob(new_id(), "{}")])
    conn = sqlite3.connect(tmp_path / "fresh.db")
    with pytest.raises(sqlite3.OperationalError, match="no such table") as told:
        caller.run(conn, op)
    conn.close()
    assert "run `duly migrate` or app.migrate() first" in told.value.__notes__[0]

    url = postgres.new_database()

    async def enqueue() -> None:
        conn = await asyncpg.connect(url)
        try:
            await caller.arun(conn, op)
        finally:
            await conn.close()

    with pytest.raises(asyncpg.PostgresError, match="does not exist") as also:
        asyncio.run(enqueue())
    postgres.drop(url)
    assert "run `duly migrate`" in also.value.__notes__[0]
