"""PostgreSQL: a schema of its own in the database, marked as ours, and the limit in it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

from bench.parts.place import Limit, Place, app_arguments, now_ms
from duly.bench.place import SCHEMA, own_schema
from duly.rules.settings import Settings
from duly.store.postgres.schema import bring_up_to_date

TABLES = (
    "duly_job", "duly_done", "duly_key", "duly_attempt", "duly_worker", "duly_event", "duly_schedule", "duly_fire",
    "duly_lane", "bare", "bare_done",
)  # fmt: skip
SHOWN = ("fsync", "synchronous_commit", "full_page_writes", "shared_buffers", "autovacuum")

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
    """Make the schema, and drop it at the end."""
    with own_schema(url, settings) as conn:
        yield PostgresPlace(conn, url, settings)


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
