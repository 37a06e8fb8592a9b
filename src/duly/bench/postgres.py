"""PostgreSQL: a schema of its own in the database, marked as ours, and the limit in it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import errors

from duly.bench.place import MARK, BenchFailed, Limit, Place, app_arguments, now_ms
from duly.errors import ConfigError, StoreError
from duly.rules.settings import Settings
from duly.store.postgres.schema import bring_up_to_date
from duly.store.postgres.translate import describe, translate

SCHEMA = "duly_bench"
TABLES = (
    "duly_job", "duly_done", "duly_key", "duly_attempt", "duly_worker", "duly_event", "duly_schedule", "duly_fire",
    "duly_lane", "bare", "bare_done",
)  # fmt: skip
SHOWN = ("fsync", "synchronous_commit", "full_page_writes", "shared_buffers", "autovacuum")
LOCK = "select pg_try_advisory_lock(hashtext('duly bench'))"

TABLE = (
    """create table {bare} (
        id uuid not null primary key, queue text not null, state text not null, payload text not null,
        due_at bigint not null, token bigint, lease_until bigint)""",
    "create index bare_ready on {bare} (queue, due_at) where state = 'ready'",
    """create table {bare}_done (
        id uuid not null primary key, queue text not null, payload text not null, due_at bigint not null,
        finished_at bigint not null)""",
)
INSERT = "insert into {bare} values (%(id)s::uuid, 'default', 'ready', %(payload)s, %(now)s::bigint, null, null)"
INSERT_MANY = """
    insert into {bare}
    select id, 'default', 'ready', payload, %(now)s::bigint, null, null
      from unnest(%(ids)s::uuid[], %(payloads)s::text[]) as job (id, payload)"""
# The batch stands in the statement: as a parameter it would have the server plan anew for each claim.
TAKE = """
    with gone as (delete from {bare} where id = any (%(ids)s::uuid[]){kept})
    update {bare} set state = 'running', token = 1, lease_until = %(now)s::bigint + 30000
     where id = any (array(select id from {bare} where queue = 'default' and state = 'ready'
                            order by due_at limit {batch} for update skip locked))
    returning id::text, payload"""
KEPT = """ returning id, queue, payload, due_at),
    kept as (insert into {bare}_done select id, queue, payload, due_at, %(now)s::bigint from gone"""


@contextmanager
def place(url: str, settings: Settings) -> Iterator[PostgresPlace]:
    """Make the schema, and drop it in the end whatever happens."""
    try:
        conn = psycopg.connect(url, autocommit=True, connect_timeout=max(2, settings.connect_timeout_ms // 1000))
    except psycopg.Error as error:
        raise translate(error, "bench", describe(url), sent=False) from error
    with conn:
        conn.prepare_threshold = None
        _begin(conn, url, locked=settings.prepared)
        try:
            yield PostgresPlace(conn, url, settings)
        except psycopg.Error as error:
            raise translate(error, "bench", describe(url), sent=False) from error
        finally:
            _end(url)


def _begin(conn: psycopg.Connection[Any], url: str, *, locked: bool) -> None:
    """Make the schema with its tables; what an earlier bench left is dropped, what is somebody else's is not."""
    try:
        # Behind PgBouncer the lock would stay on a connection that is somebody else's next.
        if locked and conn.execute(LOCK).fetchone() == (False,):
            raise BenchFailed(f"another duly bench is at work in {describe(url)}: wait until it has ended")
        found = conn.execute(
            "select obj_description(oid, 'pg_namespace') from pg_namespace where nspname = %s", [SCHEMA]
        ).fetchone()
        if found is not None and found[0] != MARK:
            raise ConfigError(
                f"{describe(url)} has a schema {SCHEMA} that no earlier bench left there: "
                "rename it, or name another database with --url"
            )
        with conn.transaction():
            conn.execute(f"drop schema if exists {SCHEMA} cascade".encode())
            conn.execute(f"create schema {SCHEMA}".encode())
            conn.execute(f"comment on schema {SCHEMA} is '{MARK}'".encode())
    except errors.InsufficientPrivilege as error:
        raise StoreError(
            f"bench: this role may not make a schema in {describe(url)} ({error.diag.message_primary}): "
            "run it as the owner of the database, or on another one with --url"
        ) from error
    except psycopg.Error as error:
        raise translate(error, "bench", describe(url), sent=False) from error


def _end(url: str) -> None:
    """Drop the schema, on a connection of its own: the other one may have been interrupted in the middle of a word."""
    with suppress(psycopg.Error), psycopg.connect(url, autocommit=True, connect_timeout=5) as conn:
        # Who still works on it is a child that has been killed and not noticed yet.
        conn.execute("set lock_timeout = '10s'")
        conn.execute(f"drop schema if exists {SCHEMA} cascade".encode())


class PostgresPlace(Place):
    """The tables of one schema, emptied for every measurement."""

    store = "postgres"
    schema = f"{SCHEMA}."

    def __init__(self, conn: psycopg.Connection[Any], url: str, settings: Settings) -> None:
        self._conn = conn
        self._url = url
        self._prepared = settings.prepared
        self.arguments = {
            **app_arguments(settings),
            "url": url,
            "schema": SCHEMA,
            "listen_url": None if settings.listen_url is None else settings.listen_url.dsn,
        }
        bring_up_to_date(url, schema=SCHEMA)
        for statement in TABLE:
            self.run(statement.format(bare=f"{SCHEMA}.bare"))

    def run(self, sql: str) -> list[Any]:
        """Run one statement and commit it."""
        cursor = self._conn.execute(sql.encode())
        return cursor.fetchall() if cursor.description else []

    def fresh(self) -> None:
        """Empty the tables that were written to: each one costs the server a few files."""
        written = [table for table in TABLES if self.run(f"select pg_relation_size('{self.schema}{table}')") != [(0,)]]
        if written:
            self.run(f"truncate {', '.join(self.schema + table for table in written)} cascade")

    def settle(self) -> None:
        """Vacuum and analyse what was filled."""
        for table in ("duly_job", "duly_done", "duly_key", "bare"):
            self.run(f"vacuum (analyze) {self.schema}{table}")

    def limit(self) -> Limit:
        """Open the limit in this schema."""
        return PostgresLimit(self._url, prepared=self._prepared)

    def wal_bytes(self) -> int:
        """Read how far the server's log is; others who write to this server count as well."""
        [[position]] = self.run("select (pg_current_wal_insert_lsn() - '0/0')::bigint")
        return int(position)

    def clock_ahead_s(self) -> float:
        """Ask for the time, and take it for that of the middle between question and answer."""
        asked = time.time()
        [[theirs]] = self.run("select extract(epoch from clock_timestamp())::float8")
        return float(theirs) - (asked + time.time()) / 2

    def describe(self) -> dict[str, Any]:
        """Say which server and library, and how the server is set."""
        version = self._conn.info.server_version
        [shown] = self.run(f"select {', '.join(f'current_setting({name!r})' for name in SHOWN)}")
        said = ", ".join(f"{name}={value}" for name, value in zip(SHOWN, shown, strict=True))
        found = {
            "store": f"PostgreSQL {version // 10000}.{version % 10000}, {said}",
            "driver": f"psycopg {psycopg.__version__} ({psycopg.pq.__impl__})",
        }
        if "off" in shown[:2]:
            found["warning"] = "the server does not wait for its disk: after a crash, commits may be missing"
        return found


class PostgresLimit(Limit):
    """One connection, with prepared statements where duly has them."""

    def __init__(self, url: str, *, prepared: bool) -> None:
        self._conn = psycopg.connect(url, autocommit=True, prepare_threshold=0 if prepared else None)
        self._bare = f"{SCHEMA}.bare"
        self._held: list[str] = []

    def insert(self, job_id: str, payload: str) -> None:
        """Add one job and commit."""
        params = {"id": job_id, "payload": payload, "now": now_ms()}
        self._conn.execute(INSERT.format(bare=self._bare).encode(), params)

    def insert_many(self, ids: Sequence[str], payloads: Sequence[str]) -> None:
        """Add jobs by one statement and commit."""
        params = {"ids": array(ids), "payloads": array(map(quoted, payloads)), "now": now_ms()}
        self._conn.execute(INSERT_MANY.format(bare=self._bare).encode(), params)

    def take(self, batch: int, *, keep: bool = False) -> int:
        """Claim the oldest jobs and delete or move those claimed before, in one round trip."""
        kept = KEPT.format(bare=self._bare) if keep else ""
        statement = TAKE.format(bare=self._bare, batch=batch, kept=kept)
        params = {"ids": array(self._held), "now": now_ms()}
        claimed = self._conn.execute(statement.encode(), params, binary=True).fetchall()
        self._held = [job_id for job_id, _ in claimed]
        return len(claimed)

    def close(self) -> None:
        """Let go of the connection."""
        self._conn.close()


def array(texts: Iterable[str]) -> str:
    """Write an array as text: psycopg adapting each element takes twice as long, COPY as long as this."""
    return "{" + ",".join(texts) + "}"


def quoted(text: str) -> str:
    """Quote an element of an array."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
