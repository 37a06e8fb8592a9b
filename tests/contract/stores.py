"""The three stores that every contract test runs on, in one shape.

A test takes `store` and sees operations, rows and a clock that stands still unless moved; which database is
behind it makes no difference. The D1 store loses the answer of every seventh call on purpose.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg

from duly.app.database import Database
from duly.model import (
    BatchRecord,
    Catchup,
    Change,
    Claimed,
    Enqueued,
    Envelope,
    Failure,
    JobRecord,
    NewJob,
    Overlap,
    State,
    Terms,
    Verdict,
)
from duly.rules.firing import Due, Firing, Run
from duly.rules.keys import Ids
from duly.rules.timing import Mode, Timing
from duly.store import batches, ops, schedules
from duly.store.batches import Added, Callbacks
from duly.store.d1 import catalogue
from duly.store.d1.driver import D1Driver
from duly.store.d1.wire import Address, Line, Trouble
from duly.store.driver import Driver
from duly.store.op import Finish, Held, Op, Row
from duly.store.postgres.driver import PostgresDriver
from duly.store.schedules import Definition
from duly.store.sqlite.driver import SQLiteDriver
from tests.servers.d1 import D1Error, D1Lost, D1Mannered

NOW = 1_800_000_000_000  # a moment far from today's, so that a clock of the wrong machine shows
new_id = Ids()
_tokens = itertools.count(1)


def new_token() -> int:
    return next(_tokens)


class D1Wire:
    """Sends batches to the stand-in, which has run a batch when it answers."""

    def __init__(self, database: D1Mannered) -> None:
        self.database = database

    def send(self, lines: Sequence[Line], seconds: float) -> list[list[Row]]:
        try:
            return self.database.batch([statement for line in lines for statement in _statements(line)])  # type: ignore[return-value]
        except D1Lost as error:
            raise Trouble(0, 0, str(error)) from error
        except D1Error as error:
            raise Trouble(400, error.code, str(error)) from error

    def close(self) -> None:
        self.database.close()


def _statements(line: Line) -> list[tuple[str, Sequence[Any]]]:
    if line.section == "migration":
        return [(sql, ()) for sql in catalogue.migrations()[line.number]]
    return [(catalogue.sections()[line.section][line.number], line.values)]


class D1OnFile(D1Driver):
    """The driver of D1 on the stand-in. It waits for nothing: no request is executed after its answer."""

    linger_s = 0.0

    def __init__(self, database: D1Mannered) -> None:
        super().__init__(
            Address("stand-in.test", None, True, "duly", "token"), D1Wire(database), pauses=(0.0, 0.0, 0.0)
        )
        self.database = database
        self.before_again: Callable[[], object] | None = None

    def _first_try_runs(self, op: Op[Any]) -> float:
        if op.repeated and self.before_again is not None:
            meanwhile, self.before_again = self.before_again, None
            meanwhile()
        return 0.0


class Store:
    """What a contract test holds: a driver, a clock of its own, and plain SQL to look from outside."""

    kind: str

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.now = NOW

    def run(self, op: Op[Any]) -> Any:
        return self.driver.run(op)

    def query(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        """Look at the tables from outside; `?` marks a parameter and names are not qualified."""
        raise NotImplementedError

    def close(self) -> None:
        self.driver.close()

    # What tests do most, with the store's own clock.

    def enqueue(self, count: int = 1, *, payload: str = '{"n":1}', **terms: Any) -> list[str]:
        """Enqueue plain jobs and return their ids."""
        jobs = [NewJob(new_id(), payload) for _ in range(count)]
        self.run(ops.enqueue(Terms(**{"task": "work", **terms}), jobs, now=self.now))
        return [job.id for job in jobs]

    def enqueue_key(self, key: str, *, payload: str = '{"n":1}', id: str | None = None, **terms: Any) -> Enqueued:
        """Enqueue one job under a key and return what came of it."""
        job = NewJob(id or new_id(), payload, key=key)
        return self.run(ops.enqueue(Terms(**{"task": "work", **terms}), [job], now=self.now))[0]

    def claim(self, limit: int = 1, *, queue: str = "default", token: int | None = None, **more: Any) -> list[Claimed]:
        token = token or new_token()
        return self.run(ops.claim(queue, limit=limit, token=token, worker="w1", now=self.now, **more))

    def finish(self, job: Claimed, change: Change) -> str:
        return str(self.run(ops.finish([Finish(job, change)], now=self.now))[job.id])

    def succeed(self, job: Claimed, result: str | None = None) -> str:
        return self.finish(job, Change(State.SUCCEEDED, result=result))

    def kill(self, job: Claimed, message: str = "no") -> str:
        """End a job dead, as its last failure would."""
        return self.finish(job, Change(State.DEAD, error=Failure("builtins.ValueError", message, "a traceback")))

    def retry(self, job: Claimed, after_ms: int = 1000, message: str = "no") -> str:
        failure = Failure("builtins.ValueError", message, "a traceback")
        return self.finish(job, Change(State.SCHEDULED, after_ms=after_ms, error=failure))

    def dead(self, count: int = 1, **terms: Any) -> list[str]:
        """Make dead jobs and return their ids."""
        ids = self.enqueue(count, **{"max_attempts": 1, **terms})
        for job in self.claim(count, queue=terms.get("queue", "default")):
            self.kill(job)
        return ids

    def schedule(self, name: str = "s", mode: str = "rate", **more: Any) -> str:
        """Define a schedule and return its name."""
        self.run(schedules.define([definition(name, mode, **more)], now=self.now))
        return name

    def fire(self, name: str = "s", *, next_at: int | None = None, **more: Any) -> str:
        """Fire one run of a schedule, due now, and return its id; `next_at` None awaits the end of it."""
        [due] = self.run(schedules.one(name, now=self.now))
        one = run_of(due, self.now, **more)
        assert self.run(schedules.fire([Firing(name, due.revision, next_at, self.now, (one,))], now=self.now)) == [name]
        return one.id

    def batch(self, name: str = "b", *, key: str | None = None, ok_at: float = 1.0) -> str:
        """Make a batch that tells of itself in the queue `hooks`, or find the one under its key; returns its id."""
        told = Callbacks(*(callback(which) for which in CALLBACKS))
        opening = batches.open_batch(new_id(), name, key=key, ok_at=ok_at, callbacks=told, now=self.now)
        return self.run(opening).id

    def add(self, batch_id: str, count: int = 1, **more: Any) -> list[str]:
        """Add plain jobs to a batch and return their ids."""
        ids = [new_id() for _ in range(count)]
        assert not self.add_as(batch_id, ids, **more).sealed
        return ids

    def add_as(self, batch_id: str, ids: Sequence[str], *, filling: int = batches.ANYWHERE, **terms: Any) -> Added:
        """Add plain jobs with these ids to a batch and say what came of it."""
        jobs = [NewJob(one, '{"n":1}') for one in ids]
        asked = Terms(**{"task": "work", **terms, "batch_id": batch_id})
        return self.run(batches.add(asked, jobs, filling=filling, now=self.now))

    def seal(self, batch_id: str) -> bool:
        return self.run(batches.seal(batch_id, now=self.now))

    def progress(self, batch_id: str) -> BatchRecord:
        return self.run(batches.get(batch_id))

    def told(self) -> list[str]:
        """The callbacks of batches that are there to be run."""
        return sorted(row[0] for row in self.query("select task from duly_job where queue = 'hooks'"))

    def get(self, job_id: str) -> JobRecord | None:
        return self.run(ops.get(job_id, now=self.now))

    def state(self, job_id: str) -> str | None:
        job = self.get(job_id)
        return None if job is None else job.state.value

    def snapshot(self) -> dict[str, list[tuple[Any, ...]]]:
        """Every row of every table, to see whether anything changed."""
        every = self.queries(*(f"select * from {table}" for table in TABLES))
        return {table: sorted(rows, key=repr) for table, rows in zip(TABLES, every, strict=True)}

    def queries(self, *statements: str) -> list[list[tuple[Any, ...]]]:
        """Ask for several things at once."""
        return [self.query(sql) for sql in statements]


TABLES = (
    "duly_job", "duly_done", "duly_key", "duly_attempt", "duly_step", "duly_batch", "duly_schedule", "duly_fire",
    "duly_queue", "duly_worker", "duly_event",
)  # fmt: skip


JOB_TERMS = json.dumps(
    {
        "queue": "default",
        "priority": 0,
        "max_attempts": 1,
        "lease_ms": 30_000,
        "keep_ms": 1000,
        "result_ttl_ms": 1000,
        "expires_ms": None,
        "on_dead": None,
    }
)


# Whether anybody waits for a lock, on PostgreSQL.
WAITING = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"

CALLBACKS = ("on_complete", "on_success", "on_first_dead")


def callback(task: str, **more: Any) -> str:
    """The job that a batch adds, as an app would write it."""
    terms = {"queue": "hooks", "priority": 3, "max_attempts": 4, "lease_ms": 5000, "keep_ms": 1000}
    made = {"id": new_id(), "task": task, **terms, "result_ttl_ms": 1000, "payload": "{}", "envelope": None}
    return json.dumps({**made, **more})


def definition(name: str, mode: str = "rate", **more: Any) -> Definition:
    """A schedule as an app would write it: every ten minutes by default, or at six."""
    interval_ms = 600_000 if mode in ("rate", "delay") else None
    timing = Timing(Mode(mode), "10m" if interval_ms else "0 6 * * *", "UTC", interval_ms, NOW)
    usual: dict[str, Any] = {
        "task": "work", "timing": timing, "catchup": Catchup.SKIP, "grace_ms": None, "overlap": Overlap.ALLOW,
        "jitter_ms": 0, "pause_after": None, "terms": JOB_TERMS, "payload": '{"n":1}', "envelope": None,
        "in_code": False, "next_at": NOW,
    }  # fmt: skip
    return Definition(name=name, **{**usual, **more})


def run_of(due: Due, due_at: int, *, id: str | None = None, **more: Any) -> Run:
    """One run of a schedule that was read."""
    return Run(id or new_id(), due_at, 0, Envelope(due_at=due_at), **more)


class SQLiteStore(Store):
    kind = "sqlite"

    def __init__(self, path: Path) -> None:
        super().__init__(SQLiteDriver(path))
        self.path = path
        self.run(ops.clock())

    def query(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        return _on_file(self.path, (sql, params))[0]

    def queries(self, *statements: str) -> list[list[tuple[Any, ...]]]:
        return _on_file(self.path, *((sql, ()) for sql in statements))


class D1Store(Store):
    kind = "d1"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = D1Mannered(path)
        driver = D1OnFile(self.database)
        if not self.database.query("select name from sqlite_master where name = 'duly_job'"):
            driver.migrate()
        super().__init__(driver)
        self.run(ops.clock())
        self.database.calls = 0  # the calls above must not decide which answers are lost
        self.lose(lambda call: call % 7 == 0)

    def lose(self, when: Callable[[int], bool] | None) -> None:
        """Say which answers are lost from now on."""
        self.database.lose = when

    def query(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        return _on_file(self.path, (sql, params))[0]

    def queries(self, *statements: str) -> list[list[tuple[Any, ...]]]:
        return _on_file(self.path, *((sql, ()) for sql in statements))


def _on_file(path: Path, *asked: tuple[str, Sequence[Any]]) -> list[list[tuple[Any, ...]]]:
    conn = sqlite3.connect(path, isolation_level=None, timeout=5)  # which reads the whole schema
    try:
        conn.execute("pragma wal_autocheckpoint = 0")
        return [conn.execute(sql, params).fetchall() for sql, params in asked]
    finally:
        conn.close()


class PostgresStore(Store):
    kind = "postgres"

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(PostgresDriver(url, **options))
        self.url = url
        self._outside: psycopg.Connection[Any] | None = None

    def query(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        if self._outside is None:
            self._outside = psycopg.connect(self.url, autocommit=True)
            self._outside.execute("set search_path to duly")
        cursor = self._outside.execute(sql.replace("?", "%s"), params)
        rows = cursor.fetchall() if cursor.description else []
        return [tuple(str(value) if type(value).__name__ == "UUID" else value for value in row) for row in rows]

    def close(self) -> None:
        if self._outside is not None:
            self._outside.close()
        super().close()


def spoiled(op: Op[Any]) -> Op[Any]:
    """Make an enqueue that every database refuses: its task has no name."""
    return replace(op, params={**op.params, "task": ""})


def snooze(job: Claimed, after_ms: int, *, now: int | None = None) -> Op[dict[str, Verdict]]:
    """Put a job off, its attempt uncounted, as a handler does that asks for it."""
    return ops.finish([Finish(job, Change(State.SCHEDULED, after_ms=after_ms, give_back_attempt=True))], now=now)


def held(job: Claimed) -> Held:
    return Held(job.id, job.token)


def database_of(store: Store) -> Database:
    """Return the database that an app on this store has."""
    database = Database({})
    database.driver = store.driver
    return database
