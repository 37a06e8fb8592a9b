"""A world without time, threads or chance: real workers on a virtual clock over one database in memory.

The event loop's time is a number that jumps to the next timer. The database is SQLite in memory, asked through the
real operations and their SQL. Between a worker and the database lies a gate: there an answer is late, lost, or does
not come at all, a worker is paused or killed, the database is away. Everything random comes from one seed, so a run
that fails can be repeated, and made shorter.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import heapq
import math
import random
import selectors
import sqlite3
from collections.abc import Callable, Mapping
from contextvars import Context, copy_context
from types import SimpleNamespace
from typing import Any

from duly.app import database as app_database
from duly.app.events import Events
from duly.app.queue_depth import Depths
from duly.app.schedules import Schedules
from duly.app.tasks import Tasks
from duly.duly import Duly
from duly.errors import AnswerLost, StoreUnavailable
from duly.rules import keys
from duly.rules.keys import Ids
from duly.store import migrate, statements
from duly.store.driver import Driver
from duly.store.op import Op, Rows
from duly.store.sqlite import connection as sqlite_connection
from duly.worker import heartbeat
from duly.worker import worker as workers

BEGINNING_MS = 1_800_000_000_000
# What idle workers ask again and again; the rest is met by trouble more often, because it comes so much less often.
OFTEN = {
    "claim", "expirable", "expired_leases", "laned_tasks", "next_due", "next_fire", "next_permit", "park", "promote",
    "register", "task_limits", "wake",
}  # fmt: skip
FOR_A_PARENT = "for a parent"  # what a handler enqueues
LONGEST_S = 400.0  # more than the longest world may take
MOST_TURNS = 20_000  # at one moment: who takes more has nothing to wait for, and does not end


class Stuck(Exception):
    """Nothing will ever happen again."""


class _Nothing(selectors.BaseSelector):
    """Waits for no file: nothing comes from outside."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def get_map(self) -> Any:
        return {}

    def select(self, timeout: float | None = None) -> list[Any]:
        return []


class _Handle:
    """Something to call, with less to carry than asyncio's."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None) -> None:
        self._callback = callback
        self._args = args
        self._context = context if context is not None else copy_context()
        self._cancelled = False

    def cancel(self) -> None:
        """Leave it where it is: nothing happens when its time comes."""
        self._cancelled = True

    def cancelled(self) -> bool:
        return self._cancelled

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call it, unless nobody wants it any more."""
        if self._cancelled:
            return
        try:
            self._context.run(self._callback, *self._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            loop.call_exception_handler({"message": f"in {self._callback}", "exception": error})


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when nothing else is to do.

    Its turns and timers are its own, because asyncio's take half of the time of a world.
    """

    def __init__(self) -> None:
        super().__init__(_Nothing())
        self.now = 0.0
        self._timers: list[tuple[float, int, Any]] = []  # each with something to call, or a sleeper
        self._set = 0  # timers for the same moment go in the order in which they were set
        self.turns = 0

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = _Handle(callback, args, context)
        self._ready.append(handle)
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = _Handle(callback, args, context)
        self._set += 1
        heapq.heappush(self._timers, (when, self._set, handle))
        return handle

    def sleep(self, seconds: float) -> asyncio.Future[None]:
        """Let time pass, at less cost than asyncio does."""
        over: asyncio.Future[None] = asyncio.Future(loop=self)
        self._set += 1
        heapq.heappush(self._timers, (self.now + seconds, self._set, over))
        return over

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not ready:
            if not timers:
                raise Stuck("nothing is left that could happen")
            self.turns = 0 if timers[0][0] > self.now else self.turns
            self.now = max(self.now, timers[0][0])
            if self.now > LONGEST_S:
                raise Stuck("somebody waits for what never comes")
        self.turns += 1
        if self.turns > MOST_TURNS:
            raise Stuck("somebody turns in circles, and no time passes")
        while timers and timers[0][0] <= self.now:
            timer = heapq.heappop(timers)[2]
            if type(timer) is _Handle:
                ready.append(timer)
            elif not timer.done():
                timer.set_result(None)
        for _ in range(len(ready)):
            ready.popleft().run(self)

    def _make_self_pipe(self) -> None:
        self._ssock = self._csock = SimpleNamespace(close=lambda: None, fileno=lambda: -1)
        self._internal_fds += 1

    def _close_self_pipe(self) -> None:
        self._internal_fds -= 1

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)


class _Tables:
    """One database in memory that a world after the other uses, because to prepare its statements takes long."""

    def __init__(self) -> None:
        self.chance = random.Random()
        self.conn = sqlite3.connect(":memory:", isolation_level=None, cached_statements=512)
        # What the database makes up by itself follows from the seed too.
        self.conn.create_function("randomblob", 1, lambda size: self.chance.randbytes(size))
        self.conn.create_function("random", 0, lambda: self.chance.randrange(-(2**62), 2**62))
        for step in migrate.pending("sqlite", {}):
            for statement in step.statements:
                self.conn.execute(statement)
        named = self.conn.execute("select name from sqlite_master where type = 'table' and name <> 'duly_meta'")
        self._names = [name for (name,) in named.fetchall()]

    def emptied(self, chance: random.Random) -> sqlite3.Connection:
        """Give the database with nothing in it."""
        if self.conn.in_transaction:
            self.conn.execute("rollback")
        for name in self._names:
            self.conn.execute(f"delete from {name}")
        self.chance = chance
        return self.conn


_tables = functools.cache(_Tables)


class Database:
    """The one database of a world, its clock and its troubles."""

    def __init__(self, loop: VirtualLoop, chance: random.Random) -> None:
        self.loop = loop
        self.chance = chance
        self.conn = _tables().emptied(chance)
        self.clock_offset_ms = 0
        self.away_until = 0.0
        self.trouble = 0.0  # how likely one of the operations that come often meets a fault
        self.asked = 0
        self.after: Callable[[Op[Any], Rows], None] = lambda op, rows: None
        self._spelled: dict[tuple[str, ...], list[str]] = {}
        self._for_a_parent = False

    @property
    def now(self) -> int:
        """The database's clock."""
        return BEGINNING_MS + round(self.loop.now * 1000) + self.clock_offset_ms

    def execute(self, op: Op[Any]) -> Rows:
        """Run an operation and commit it as one, or fail in one of the ways in which that fails."""
        self.asked += 1
        if self.loop.now < self.away_until:
            raise StoreUnavailable("the database is away")
        fault = self.chance.random() if self.trouble else 1.0
        likely = self.trouble if op.name in OFTEN else 3 * self.trouble
        rows = self._run(op, breaks=fault < likely / 2)
        if likely / 2 <= fault < likely:
            raise AnswerLost("committed, and nobody heard of it")
        return rows

    def _run(self, op: Op[Any], *, breaks: bool) -> Rows:
        params = {**op.params, "now": op.params.get("now") or self.now}
        work = self._spelled.get(op.sections) or self._spell(op.sections)
        self._for_a_parent |= params.get("parent_token") is not None
        last = self.chance.randrange(len(work) + 1) if breaks else None
        whole = len(work) == 1 and not breaks  # a statement alone begins and commits by itself
        rows: list[Any] = []
        try:
            if not whole:
                self.conn.execute("begin")
            for number, statement in enumerate(work):
                if number == last:
                    raise StoreUnavailable(f"the connection broke before statement {number}")
                rows += self.conn.execute(statement, params).fetchall()
            if last is not None:
                raise AnswerLost("the connection broke at the commit, which did not happen")
        except sqlite3.Error as error:
            self._roll_back()
            raise sqlite_connection.translate(error, op.name, "the database") from error
        except BaseException:
            self._roll_back()
            raise
        if not whole:
            self.conn.execute("commit")
        self.after(op, rows)
        return rows

    def _spell(self, sections: tuple[str, ...]) -> list[str]:
        spelled = [one.sql for section in sections for one in statements.spell("sqlite", section, "named")]
        return self._spelled.setdefault(sections, spelled)

    @property
    def sections(self) -> frozenset[str]:
        """The sections of SQL that were run, and whether some were for the holder of a token."""
        ran = {section for sections in self._spelled for section in sections}
        return frozenset(ran | ({FOR_A_PARENT} if self._for_a_parent else set()))

    def _roll_back(self) -> None:
        if self.conn.in_transaction:
            self.conn.execute("rollback")


class Gate(Driver):
    """The way of one process to the database: slow, sometimes shut, and shut for good once the process is killed."""

    def __init__(self, database: Database, chance: random.Random) -> None:
        super().__init__(pauses=(0.0, 0.0, 0.0))
        self._database = database
        self._chance = chance
        self.process: Process | None = None
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
        loop = self._database.loop
        await loop.sleep(self._latency() if seconds is None else seconds)
        while loop.now < self.paused_until and not self.killed:
            await loop.sleep(self.paused_until - loop.now)
        if self.killed:
            raise asyncio.CancelledError("killed")

    def _latency(self) -> float:
        """Say how long a message takes: mostly two milliseconds, now and then long enough for others to overtake."""
        chance = self._chance.random()
        return 0.2 + 90 * chance if chance < 0.02 else -0.002 * math.log(chance)

    def close(self) -> None:
        """There is nothing to close."""

    def about(self) -> Any:
        """Nobody asks."""
        raise NotImplementedError

    def examine(self, *, deep: bool = False) -> Any:
        """Nobody asks."""
        raise NotImplementedError


def copied(template: Duly, gate: Gate, ids: Ids) -> Duly:
    """Make the app of one more process: to define its tasks anew for each would take longer than their jobs do."""
    app = copy.copy(template)
    app.events = Events()
    database = app_database.Database({})
    database.driver, database.new_id, database.depths = gate, ids, Depths(gate._database.loop.time)
    database.settings = template.settings
    app.tasks = Tasks(database)
    for task in dict.fromkeys(template.tasks.values()):
        app.tasks.add(task.definition)
    app.schedules = Schedules(app.tasks)
    return app


class Process:
    """One worker process: an app of its own, a gate, and the real worker."""

    def __init__(
        self,
        name: str,
        database: Database,
        chance: random.Random,
        template: Duly,
        ids: Ids,
        world: Any,
        **options: Any,
    ) -> None:
        self.name = name
        self.world = world
        self.gate = Gate(database, chance)
        self.gate.process = self
        self.loop = database.loop
        self.app = copied(template, self.gate, ids)
        self.app.events.listen(self._hear)
        self.worker = workers.Worker(
            self.app, signals=False, spawn=self._spawn, clock=self.loop.time, chance=chance.random, **options
        )
        self.worker.shared.id = name
        self.task = self.loop.create_task(self._run())

    def _hear(self, name: str, fields: Mapping[str, Any]) -> None:
        if not self.gate.killed:
            self.world.hear(name, fields)

    async def _run(self) -> None:
        try:
            await self.worker.run()
        except Exception as error:
            if not self.gate.killed:
                self.world.broke(f"{self.name} broke: {type(error).__name__}: {error}")

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
        beating = self.worker.heartbeat
        while not self.gate.killed:
            beating._ask_loop()
            await self.gate.passing(beating._pause())
            await self.gate.passing()  # on its way to the database
            beating._beat_whatever_happens()


class _NoPulse:
    """No probe looks at virtual workers."""

    def __init__(self, worker: str) -> None:
        self.begin = self.touch = self.end = lambda: None


def without_chance(seed: int) -> Callable[[], None]:
    """Have everything that is random by itself follow from the seed; gives what undoes it."""
    chance = random.Random(seed)
    random.seed(seed)
    names = [(keys, "new_token", lambda: chance.randrange(1, 2**53)), (heartbeat, "Pulse", _NoPulse)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in names]
    for owner, name, value in names:
        setattr(owner, name, value)

    def undo() -> None:
        for owner, name, value in before:
            setattr(owner, name, value)

    return undo
