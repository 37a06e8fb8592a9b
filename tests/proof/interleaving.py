"""Operations interleaved statement by statement in PostgreSQL sessions, in every order that their locks allow.

Each session runs its operations in its own transactions. A step is one statement or one commit. While a statement waits
for a lock, the other sessions go on. A tree of the orders that have run chooses the next session: at random, never the
same order twice, and all orders if there are few enough.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import psycopg

from duly.store.op import Op
from duly.store.postgres.driver import PostgresDriver
from tests.contract import stores

TABLES = tuple(dict.fromkeys((*stores.TABLES, "duly_lane")))

# Settings of the server: it takes no locks of its own, and detects deadlocks early.
CALM = {"autovacuum": "off", "deadlock_timeout": "20ms", "synchronous_commit": "off", "jit": "off"}

_READS, _JOINS = ("seqscan", "indexscan", "indexonlyscan", "bitmapscan"), ("nestloop", "hashjoin", "mergejoin")


def _only(*allowed: str, also_off: Iterable[str] = ()) -> str:
    """Return the options of a session whose planner may only use these methods."""
    off = [*(way for way in (*_READS, *_JOINS) if way not in allowed), *also_off]
    return " ".join(("-c plan_cache_mode=force_generic_plan", *(f"-c enable_{way}=off" for way in off)))


PLANS = {
    "index, nested loop": _only("indexscan", "indexonlyscan", "nestloop", also_off=("material", "memoize")),
    "whole table, nested loop": _only("seqscan", "nestloop", also_off=("material", "memoize")),
    "whole table, hash": _only("seqscan", "hashjoin"),
    "bitmap, merge": _only("bitmapscan", "mergejoin"),
}

# The operations of one session: one each commit, or several as a tuple. A callable makes one from the answers so far.
Batch: TypeAlias = "Op[Any] | tuple[Op[Any], ...]"
Script: TypeAlias = Sequence["Batch | Callable[[list[Any]], Op[Any] | None]"]
LOCK_SECONDS = 0.002  # a statement that takes longer may be waiting for a lock
STUCK_SECONDS = 10.0


@dataclass
class Outcome:
    """The result of one order of steps."""

    order: list[int]
    answers: list[list[Any]]  # of each session, one of each operation
    errors: list[str]
    begun: list[int | None]  # the place in the order of each session's first step
    ended: list[int | None]  # and of its last commit
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def before(self, one: int, other: int) -> bool:
        """Whether one session had committed everything before the other's first step."""
        ended, begun = self.ended[one], self.begun[other]
        return ended is not None and begun is not None and ended < begun

    def rows(self, table: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the rows of a table with these values; its name has no prefix here."""
        return [row for row in self.tables[table] if all(row[name] == value for name, value in fields.items())]


class Orders:
    """The known orders of steps, and which of them have run."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._root = self._at = _Node()
        self._path = [self._root]

    @property
    def exhausted(self) -> bool:
        """Whether every order has run."""
        return self._root.finished

    def choose(self, ready: Sequence[int]) -> int:
        """Choose the session of the next step, so that the order is a new one."""
        for one in ready:
            self._at.next.setdefault(one, _Node())
        chosen = self._chance.choice([one for one in ready if not self._at.next[one].finished] or list(ready))
        self._at = self._at.next[chosen]
        self._path.append(self._at)
        return chosen

    def end(self) -> None:
        """Mark the order as run, and begin at the root again."""
        self._at.finished = True
        for node in reversed(self._path[:-1]):
            node.finished = all(one.finished for one in node.next.values())
        self._at = self._root
        self._path = [self._root]


class _Node:
    def __init__(self) -> None:
        self.next: dict[int, _Node] = {}
        self.finished = False


class Session:
    """One connection, and the operations that are left to run on it."""

    def __init__(self, conn: psycopg.AsyncConnection[Any], driver: PostgresDriver) -> None:
        self.conn = conn
        self._driver = driver
        self.pid = conn.info.backend_pid
        self.take(())

    def take(self, script: Script) -> None:
        """Start a script."""
        self._todo = list(script)
        self._batch: Batch | None = None
        self._lines: list[Any] = []
        self._rows: dict[int, list[Any]] = {}
        self.answers: list[Any] = []
        self.error: str | None = None
        self.task: asyncio.Task[None] | None = None
        self.frees = False  # its last step ended a transaction
        self._prepare()

    @property
    def ended(self) -> bool:
        return self._batch is None

    @property
    def waits(self) -> bool:
        """Whether its statement is still in flight."""
        if self.task is not None and self.task.done():
            self.task.result()  # raises any error but the server's, which `_step` keeps
        return self.task is not None and not self.task.done()

    def step(self) -> None:
        """Send the next statement, or the commit after the last."""
        self.task = asyncio.create_task(self._step())

    async def _step(self) -> None:
        self.frees = not self._lines
        try:
            if self._lines:
                if self.conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
                    await self.conn.execute("begin isolation level read committed")
                line = self._lines.pop(0)
                cursor = await self.conn.execute(line.sql, line.params, binary=True)
                self._rows.setdefault(line.place, []).extend(await cursor.fetchall() if cursor.description else [])
            else:
                await self.conn.execute("commit")
                self._answered()
        except psycopg.Error as error:
            self.error = f"{error.sqlstate}: {str(error).splitlines()[0]}"
            self._batch, self.frees = None, True
            await self.conn.rollback()

    def _answered(self) -> None:
        batch = self._batch
        assert batch is not None
        if isinstance(batch, tuple):
            self.answers.append([op.read(self._rows.get(place, [])) for place, op in enumerate(batch)])
        else:
            answer = batch.read(self._rows.get(0, []))
            further = batch.follow(answer) if batch.follow else None
            if further is None:
                self.answers.append(answer)
            else:
                self._todo.insert(0, further)
        self._prepare()

    def _prepare(self) -> None:
        self._batch, self._rows = None, {}
        while self._todo and self._batch is None:
            made = self._todo.pop(0)
            self._batch = made if isinstance(made, Op | tuple) else made(self.answers)
        if self._batch is not None:
            batch = self._batch if isinstance(self._batch, tuple) else (self._batch,)
            self._lines = list(self._driver._work(batch))  # as the product would send them, in its order


class Sessions:
    """Sessions whose planner is forced one way, and a connection that reads which of them wait for a lock."""

    def __init__(self, url: str, plan: str) -> None:
        self._url = url
        self._options = PLANS[plan]
        self._sessions: list[Session] = []

    async def __aenter__(self) -> Self:
        driver = PostgresDriver(self._url)
        self._watch = await psycopg.AsyncConnection.connect(self._url, autocommit=True)
        for _ in range(4):
            conn = await psycopg.AsyncConnection.connect(
                self._url, autocommit=True, options=self._options, prepare_threshold=0
            )
            self._sessions.append(Session(conn, driver))
        return self

    async def __aexit__(self, *error: object) -> None:
        for conn in (self._watch, *(session.conn for session in self._sessions)):
            await conn.close()

    async def play(self, scripts: Sequence[Script], orders: Orders) -> Outcome:
        """Run the scripts once, each in its own session, in a new order."""
        sessions = self._sessions[: len(scripts)]
        for session, script in zip(sessions, scripts, strict=True):
            session.take(script)
        outcome = Outcome([], [], [], [None] * len(sessions), [None] * len(sessions))
        while not all(session.ended for session in sessions):
            ready = [number for number, session in enumerate(sessions) if not (session.ended or session.waits)]
            if not ready:  # a deadlock: the server is about to end one of them
                await self._broken_up(sessions)
                continue
            chosen = orders.choose(ready)
            await self._stepped(sessions, chosen, outcome)
        orders.end()
        outcome.answers = [session.answers for session in sessions]
        outcome.errors = [session.error for session in sessions if session.error]
        return outcome

    async def _stepped(self, sessions: Sequence[Session], chosen: int, outcome: Outcome) -> None:
        place = len(outcome.order)
        outcome.order.append(chosen)
        if outcome.begun[chosen] is None:
            outcome.begun[chosen] = place
        sessions[chosen].step()
        await self._quiet([sessions[chosen]])
        if sessions[chosen].frees and not sessions[chosen].waits:
            await self._quiet(sessions)
        for number, session in enumerate(sessions):
            if session.ended and outcome.ended[number] is None:
                outcome.ended[number] = place

    async def _quiet(self, sessions: Sequence[Session]) -> None:
        """Wait until every statement in flight has answered or waits for a lock.

        The lock table changes before a commit answers. The state in pg_stat_activity lags behind.
        """
        while moving := [session for session in sessions if session.waits]:
            await asyncio.wait([session.task for session in moving if session.task], timeout=LOCK_SECONDS)
            moving = [session for session in moving if session.waits]
            if not moving:
                return
            cursor = await self._watch.execute(
                "select pid from unnest(%s::int[]) as pid where cardinality(pg_blocking_pids(pid)) > 0",
                [[session.pid for session in moving]],
            )
            if len(await cursor.fetchall()) == len(moving):
                return

    async def _broken_up(self, sessions: Sequence[Session]) -> None:
        tasks = [session.task for session in sessions if session.task and session.waits]
        done, _ = await asyncio.wait(tasks, timeout=STUCK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            pids = [session.pid for session in sessions]
            raise TimeoutError(f"the sessions {pids} wait for each other, and the server ends none of them")
        await self._quiet(sessions)


class Board:
    """The tables: set up once for each race, restored before each order, and read after it."""

    def __init__(self, url: str) -> None:
        self._conn = psycopg.connect(url, autocommit=True)
        self._conn.execute("create schema if not exists saved")
        self._back = ""

    def clear(self) -> None:
        """Empty all tables."""
        self._run("".join(f"delete from duly.{table};" for table in TABLES))

    def save(self) -> None:
        """Copy all rows."""
        parts = []
        for table in TABLES:
            self._run(f"drop table if exists saved.{table}; create table saved.{table} as table duly.{table}")
            parts.append(f"delete from duly.{table};")
            if self._conn.execute(f"select 1 from saved.{table}").fetchone():
                parts.append(f"insert into duly.{table} overriding system value select * from saved.{table};")
        self._back = "".join(parts)

    def restore(self) -> None:
        """Restore the rows of the copy."""
        self._run(self._back)

    def tidy(self) -> None:
        """Remove dead rows, so that the next orders are as fast."""
        self._run("vacuum")

    def look(self) -> dict[str, list[dict[str, Any]]]:
        """Read all rows."""
        found: dict[str, list[dict[str, Any]]] = {table.removeprefix("duly_"): [] for table in TABLES}
        parts = " union all ".join(
            f"select '{table}', row_to_json(one)::text from duly.duly_{table} as one" for table in found
        )
        for table, row in self._conn.execute(parts):
            found[table].append(json.loads(row))
        return found

    def _run(self, sql: str) -> None:
        self._conn.execute(sql)

    def close(self) -> None:
        self._conn.close()
