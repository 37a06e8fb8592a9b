"""What the database can do: the least statements that do the job, written by hand, through the same client library.

Two limits, because they answer two questions.

`bare` asks what a queue could reach at best: seven columns, one primary key, one partial index; a claim is one
update, a finish one delete. It keeps no history and looks after nothing. Its table is that of `bench.parts`.

`same rows` asks what duly's statements cost beyond the rows they write: it writes duly's own tables, with a
claim that checks no pause, task, suspect or expiry and a finish that checks no token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import psycopg
from msgspec.json import encode

from bench.contestant import PAYLOAD, QUEUE, TASK, WORKER, Contestant, whole
from bench.parts import postgres, sqlite
from bench.parts.place import now_ms
from bench.parts.postgres import array, quoted
from duly.model import KEEP_MS


class Limit(NamedTuple):
    """The statements of one limit. `finish_*` take the ids, `claim` token, now and batch, `enqueue` now too."""

    name: str
    table: str
    enqueue: str
    claim: str
    finish_kept: tuple[str, ...]
    finish_gone: tuple[str, ...]


# What a finished row has, from the live one; the same list serves the insert and the select.
MOVED = """id, task, queue, priority, payload, envelope, attempt, max_attempts, crashes, created_at, due_at, expires_at,
    lease_ms, token, worker, progress, progress_message, cancel_requested_at, keep_ms, result_ttl_ms, on_dead,
    origin, replay_of, replay_count"""

SQLITE_BARE = Limit(
    "bare",
    "bare",
    enqueue=sqlite.INSERT,
    claim=f"""
        update bare set state = 'running', token = :token, lease_until = :now + 30000
         where id in (select id from bare where queue = '{QUEUE}' and state = 'ready' order by due_at limit :batch)
        returning id, payload""",
    finish_kept=("delete from bare where id in (select value from json_each(:ids))",),
    finish_gone=("delete from bare where id in (select value from json_each(:ids))",),
)

SQLITE_SAME = Limit(
    "same rows",
    "duly_job",
    enqueue=f"""
        insert into duly_job (id, task, queue, priority, state, payload, max_attempts, created_at, due_at, lease_ms,
                              keep_ms, result_ttl_ms)
        values (:id, '{TASK}', '{QUEUE}', 0, 'ready', :payload, 5, :now, :now, 30000, :keep_ms, 86400000)""",
    claim=f"""
        update duly_job
           set state = 'running', attempt = attempt + 1, token = :token, worker = '{WORKER}',
               lease_until = :now + lease_ms
         where id in (select id from duly_job where queue = '{QUEUE}' and suspect = 0 and state = 'ready'
                         and lane is null
                       order by priority desc, due_at, id limit :batch)
        returning id, task, payload, envelope, attempt, max_attempts, lease_until""",
    finish_kept=(
        f"""
        insert into duly_done ({MOVED}, state, finished_at, prune_at)
        select {MOVED}, 'succeeded', :now, :now + keep_ms
          from duly_job where id in (select value from json_each(:ids))""",
        "delete from duly_job where id in (select value from json_each(:ids))",
    ),
    finish_gone=("delete from duly_job where id in (select value from json_each(:ids))",),
)

POSTGRES_BARE = Limit(
    "bare",
    "bare",
    enqueue=postgres.INSERT_MANY.format(bare="bare"),
    claim=f"""
        update bare set state = 'running', token = %(token)s::bigint, lease_until = %(now)s::bigint + 30000
         where id = any (array(select id from bare where queue = '{QUEUE}' and state = 'ready'
                                order by due_at limit {{batch}} for update skip locked))
        returning id::text, payload""",
    finish_kept=("delete from bare where id = any (%(ids)s::uuid[])",),
    finish_gone=("delete from bare where id = any (%(ids)s::uuid[])",),
)

POSTGRES_SAME = Limit(
    "same rows",
    "duly.duly_job",
    enqueue=f"""
        insert into duly.duly_job (id, task, queue, priority, state, payload, max_attempts, created_at, due_at,
                                   lease_ms, keep_ms, result_ttl_ms)
        select id, '{TASK}', '{QUEUE}', 0, 'ready', payload, 5, %(now)s::bigint, %(now)s::bigint, 30000,
               %(keep_ms)s::bigint, 86400000
          from unnest(%(ids)s::uuid[], %(payloads)s::text[]) as job (id, payload)""",
    claim=f"""
        update duly.duly_job
           set state = 'running', attempt = attempt + 1, token = %(token)s::bigint, worker = '{WORKER}',
               lease_until = %(now)s::bigint + lease_ms
         where id = any (array(select id from duly.duly_job where queue = '{QUEUE}' and not suspect and state = 'ready'
                                  and lane is null
                                order by priority desc, due_at, id limit {{batch}} for update skip locked))
        returning id::text, task, payload, envelope, attempt, max_attempts, lease_until""",
    finish_kept=(
        f"""
        with gone as (
            delete from duly.duly_job where id = any (%(ids)s::uuid[]) returning {MOVED}
        )
        insert into duly.duly_done ({MOVED}, state, finished_at, prune_at)
        select {MOVED}, 'succeeded', %(now)s::bigint, %(now)s::bigint + keep_ms from gone""",
    ),
    finish_gone=("delete from duly.duly_job where id = any (%(ids)s::uuid[])",),
)


class SlowLimit(AssertionError):
    """A limit that reads or sorts the whole table is none, and would flatter duly."""


def check_plan(plan: str, name: str) -> None:
    """Refuse a limit whose claim does not walk an index in its order, as after a change of duly's indexes."""
    if any(sign in plan for sign in ("Sort", "Seq Scan", "TEMP B-TREE", "SCAN duly_job", "SCAN bare")):
        raise SlowLimit(f"the claim of the limit {name!r} is to be fitted to the indexes, in bench/limit.py:\n{plan}")


class SQLiteLimit(Contestant):
    """A limit on one SQLite connection, in the thread that asks. It checkpoints by itself, every 4 MB as duly does."""

    def __init__(self, path: str, limit: Limit) -> None:
        self.name, self.table, self._limit = limit.name, limit.table, limit
        self._tokens = itertools.count(1)
        self._conn = sqlite.connect(path)

    def plan(self) -> str:
        params = {"token": 0, "now": 0, "batch": 100}
        return "\n".join(row[3] for row in self._conn.execute(f"explain query plan {self._limit.claim}", params))

    def checkpoint_after(self, *, pages: int) -> None:
        self._conn.execute(f"pragma wal_autocheckpoint = {pages}")

    def enqueue(self, ids: Sequence[str], *, keep: bool) -> None:
        now, keep_ms = now_ms(), KEEP_MS if keep else 0
        self._begin()
        self._conn.executemany(
            self._limit.enqueue,
            [{"id": job_id, "payload": PAYLOAD, "now": now, "keep_ms": keep_ms} for job_id in ids],
        )
        self._commit()

    def claim(self, batch: int) -> list[Any]:
        self._begin()
        jobs = self._claim(batch)
        self._commit()
        return jobs

    def finish(self, jobs: Sequence[Any], *, keep: bool) -> None:
        self._begin()
        self._finish(jobs, keep)
        self._commit()

    def together(self, turns: int, batch: int, *, keep: bool) -> None:
        jobs = whole(self.claim(batch), batch)
        for _ in range(turns - 1):
            self._begin()
            self._finish(jobs, keep)
            jobs = whole(self._claim(batch), batch)
            self._commit()
        self.finish(jobs, keep=keep)

    def _claim(self, batch: int) -> list[Any]:
        params = {"token": next(self._tokens), "now": now_ms(), "batch": batch}
        return self._conn.execute(self._limit.claim, params).fetchall()

    def _finish(self, jobs: Sequence[Any], keep: bool) -> None:
        params = {"ids": encode([job[0] for job in jobs]).decode(), "now": now_ms()}
        for statement in self._limit.finish_kept if keep else self._limit.finish_gone:
            whole(range(self._conn.execute(statement, params).rowcount), len(jobs))

    def _begin(self) -> None:
        self._conn.execute("begin immediate")

    def _commit(self) -> None:
        self._conn.execute("commit")

    def close(self) -> None:
        self._conn.close()


class PostgresLimit(Contestant):
    """A limit on one PostgreSQL connection, and on two where finish and claim go together."""

    def __init__(self, url: str, limit: Limit) -> None:
        self.name, self.table, self._limit = limit.name, limit.table, limit
        self._tokens = itertools.count(1)
        self._claiming, self._finishing = (psycopg.connect(url, autocommit=True, prepare_threshold=0) for _ in range(2))
        self._thread = ThreadPoolExecutor(1)

    def enqueue(self, ids: Sequence[str], *, keep: bool) -> None:
        payloads = array(quoted(PAYLOAD) for _ in ids)
        params = {"ids": array(ids), "payloads": payloads, "now": now_ms(), "keep_ms": KEEP_MS if keep else 0}
        self._claiming.execute(_trusted(self._limit.enqueue), params)

    def claim(self, batch: int) -> list[Any]:
        # The batch stands in the statement: as a parameter it would have the server plan anew for each claim.
        statement = self._limit.claim.format(batch=batch)
        params = {"token": next(self._tokens), "now": now_ms()}
        return self._claiming.execute(_trusted(statement), params, binary=True).fetchall()

    def plan(self) -> str:
        statement = "explain " + self._limit.claim.format(batch=100)
        return "\n".join(row[0] for row in self._claiming.execute(_trusted(statement), {"token": 0, "now": 0}))

    def finish(self, jobs: Sequence[Any], *, keep: bool) -> None:
        self._finish(self._claiming, jobs, keep)

    def together(self, turns: int, batch: int, *, keep: bool) -> None:
        jobs = whole(self.claim(batch), batch)
        for _ in range(turns - 1):
            finishing = self._thread.submit(self._finish, self._finishing, jobs, keep)
            jobs = whole(self.claim(batch), batch)
            finishing.result()
        self.finish(jobs, keep=keep)

    def _finish(self, conn: psycopg.Connection[Any], jobs: Sequence[Any], keep: bool) -> None:
        params = {"ids": array([job[0] for job in jobs]), "now": now_ms()}
        for statement in self._limit.finish_kept if keep else self._limit.finish_gone:
            whole(range(conn.execute(_trusted(statement), params).rowcount), len(jobs))

    def close(self) -> None:
        self._thread.shutdown()
        self._claiming.close()
        self._finishing.close()


def _trusted(sql: str) -> bytes:
    """Psycopg's type for a statement is a literal or bytes."""
    return sql.encode()
