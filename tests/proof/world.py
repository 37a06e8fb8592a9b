"""A world without time, threads or chance: real workers on a virtual clock over one database in memory.

The event loop's time is a number that jumps to the next timer. The database is SQLite in memory, asked through the
real operations and their SQL. Between a worker and the database lies a gate: there an answer is late, lost, or does
not come at all, a worker is paused or killed, the database is away. Everything random comes from one seed, so a run
that fails can be repeated, and made shorter.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import sqlite3
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from duly import heart, keys
from duly import worker as workers
from duly.app import Duly
from duly.errors import AnswerLost, StoreUnavailable
from duly.store import migrate, sqlite, statements
from duly.store.driver import Driver
from duly.store.ops import Op, Rows

BEGINNING_MS = 1_800_000_000_000


class Stuck(Exception):
    """Nothing will ever happen again."""


class _Nothing(selectors.BaseSelector):
    """Waits for no file; instead of waiting for time, has it pass."""

    def __init__(self) -> None:
        self.passes: Callable[[float], None] = lambda seconds: None

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def get_map(self) -> Any:
        return {}

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("nothing is left that could happen")
        self.passes(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when nothing else is to do."""

    def __init__(self) -> None:
        selector = _Nothing()
        super().__init__(selector)
        self.now = 0.0
        selector.passes = self._pass

    def _pass(self, seconds: float) -> None:
        self.now += seconds

    def time(self) -> float:
        return self.now

    def _make_self_pipe(self) -> None:
        self._ssock = self._csock = SimpleNamespace(close=lambda: None, fileno=lambda: -1)
        self._internal_fds += 1

    def _close_self_pipe(self) -> None:
        self._internal_fds -= 1

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)


def empty_database() -> bytes:
    """Make the bytes of a database with our tables."""
    conn = sqlite3.connect(":memory:")
    for step in migrate.pending("sqlite", {}):
        for statement in step.statements:
            conn.execute(statement)
    conn.commit()
    image = conn.serialize()
    conn.close()
    return image


_EMPTY: list[bytes] = []


class Database:
    """The one database of a world, its clock and its troubles."""

    def __init__(self, loop: VirtualLoop, chance: random.Random) -> None:
        if not _EMPTY:
            _EMPTY.append(empty_database())
        self.loop = loop
        self.chance = chance
        self.conn = sqlite3.connect(":memory:", isolation_level=None, cached_statements=512)
        self.conn.deserialize(_EMPTY[0])
        self.conn.execute("pragma journal_mode = memory")
        self.clock_offset_ms = 0
        self.away_until = 0.0
        self.trouble = 0.0  # how likely an operation meets a fault
        self.after: Callable[[Op[Any]], None] = lambda op: None

    @property
    def now(self) -> int:
        """The database's clock."""
        return BEGINNING_MS + round(self.loop.now * 1000) + self.clock_offset_ms

    def execute(self, op: Op[Any]) -> Rows:
        """Run an operation and commit it as one, or fail in one of the ways in which that fails."""
        if self.loop.now < self.away_until:
            raise StoreUnavailable("the database is away")
        fault = self.chance.random() if self.trouble else 1.0
        rows = self._run(op, breaks=fault < self.trouble / 2)
        if self.trouble / 2 <= fault < self.trouble:
            raise AnswerLost("committed, and nobody heard of it")
        return rows

    def _run(self, op: Op[Any], *, breaks: bool) -> Rows:
        params = {**op.params, "now": op.params.get("now") or self.now}
        work = [one for section in op.sections for one in statements.spell("sqlite", section, "named")]
        last = self.chance.randrange(len(work) + 1) if breaks else None
        rows: list[Any] = []
        self.conn.execute("begin")
        try:
            for number, statement in enumerate(work):
                if number == last:
                    raise StoreUnavailable(f"the connection broke before statement {number}")
                rows += self.conn.execute(statement.sql, params).fetchall()
            if last is not None:
                raise AnswerLost("the connection broke at the commit, which did not happen")
        except sqlite3.Error as error:
            self._roll_back()
            raise sqlite.translate(error, op.name, "the database") from error
        except BaseException:
            self._roll_back()
            raise
        self.conn.execute("commit")
        self.after(op)
        return rows

    def _roll_back(self) -> None:
        if self.conn.in_transaction:
            self.conn.execute("rollback")


class Gate(Driver):
    """The way of one process to the database: slow, sometimes shut, and shut for good once the process is killed."""

    def __init__(self, database: Database, chance: random.Random) -> None:
        super().__init__(pauses=(0.0, 0.0, 0.0))
        self._database = database
        self._chance = chance
        self.killed = False
        self.paused_until = 0.0

    def execute(self, op: Op[Any]) -> Rows:
        """Run an operation at once: beats do, from a thread that nothing else keeps busy."""
        if self.killed:
            raise StoreUnavailable("killed")
        try:
            return self._database.execute(op)
        except (StoreUnavailable, AnswerLost):
            self.failures += 1
            raise

    async def aexecute(self, op: Op[Any]) -> Rows:
        """Run an operation with time passing on the way there and back."""
        await self.passing()
        try:
            rows = self._database.execute(op)
        except (StoreUnavailable, AnswerLost):
            self.failures += 1
            await self.passing()
            raise
        await self.passing()
        return rows

    async def passing(self, seconds: float | None = None) -> None:
        """Let time pass for this process, longer if it is paused; who is killed goes no further."""
        await asyncio.sleep(self._latency() if seconds is None else seconds)
        while self._database.loop.now < self.paused_until and not self.killed:
            await asyncio.sleep(self.paused_until - self._database.loop.now)
        if self.killed:
            raise asyncio.CancelledError("killed")

    def _latency(self) -> float:
        """Say how long a message takes: mostly two milliseconds, now and then long enough for others to overtake."""
        return self._chance.uniform(0.2, 2.0) if self._chance.random() < 0.01 else self._chance.expovariate(500)

    def close(self) -> None:
        """There is nothing to close."""

    def about(self) -> Any:
        """Nobody asks."""
        raise NotImplementedError

    def examine(self, *, deep: bool = False) -> Any:
        """Nobody asks."""
        raise NotImplementedError


class Process:
    """One worker process: an app of its own, a gate, and the real worker."""

    def __init__(
        self,
        name: str,
        database: Database,
        chance: random.Random,
        define: Callable[[Duly, Process], None],
        on_break: Callable[[str], None],
        **options: Any,
    ) -> None:
        self.name = name
        self.on_break = on_break
        self.gate = Gate(database, chance)
        self.loop = database.loop
        self._chance = chance
        self.app = Duly("in-memory.db", lease="1500ms", poll="1s")
        self.app.__dict__["driver"] = self.gate
        self.app._made_in = "__main__"  # no other process can import it: suspects run in the emptied worker
        define(self.app, self)
        self.worker = workers.Worker(
            self.app, signals=False, spawn=self._spawn, clock=self.loop.time, chance=chance.random, **options
        )
        self.worker.id = name
        self.task = self.loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self.worker.run()
        except Exception as error:
            if not self.gate.killed:
                self.on_break(f"{self.name} broke: {type(error).__name__}: {error}")

    def kill(self) -> None:
        """End the process as SIGKILL does: nothing of it reaches the database any more."""
        self.gate.killed = True
        self.task.cancel()

    def pause(self, seconds: float) -> None:
        """Stop the process for a while, as SIGSTOP does, or a virtual machine that is moved."""
        self.gate.paused_until = self.loop.now + seconds

    def _spawn(self, work: Callable[[], None], name: str) -> Any:
        if name == "duly-heart":
            beats = self.loop.create_task(self._beat())
            return SimpleNamespace(join=lambda seconds: beats.cancel())
        self.loop.call_soon(work)
        return SimpleNamespace(join=lambda seconds: None)

    async def _beat(self) -> None:
        """Do what the heart's thread does."""
        beating = self.worker.heart
        while not self.gate.killed:
            beating._ask_loop()
            await self.gate.passing(beating._pause())
            beating._beat_whatever_happens()


class _NoPulse:
    """No probe looks at virtual workers."""

    def __init__(self, worker: str) -> None:
        self.begin = self.touch = self.end = lambda: None


def without_chance(seed: int) -> Callable[[], None]:
    """Have everything that is random by itself follow from the seed; gives what undoes it."""
    chance = random.Random(seed)
    random.seed(seed)
    names = [(keys, "new_token", lambda: chance.randrange(1, 2**53)), (heart, "Pulse", _NoPulse)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in names]
    for owner, name, value in names:
        setattr(owner, name, value)

    def undo() -> None:
        for owner, name, value in before:
            setattr(owner, name, value)

    return undo
