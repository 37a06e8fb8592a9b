"""P6: many worlds, each from one seed, judged from outside.

A scenario is a list of jobs and a list of faults. Handlers write into a ledger what they do; what workers tell and
what the ledger says is compared with what the database says in the end. A scenario that fails is made shorter by
leaving out jobs and faults for as long as it still fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import logging
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from duly import Cancel, Ctx, Duly, Retry, Snooze
from duly.app.task import Call
from duly.errors import BatchSealed, DulyError
from duly.model import QUEUED
from duly.rules import backoff
from duly.rules.keys import Ids
from duly.store import batches, lanes, ops, schedules
from duly.store.batches import Added
from duly.store.op import Op, Rows
from duly.store.ops import Replay
from tests.proof import crowds
from tests.proof.breaks import broken
from tests.proof.crowds import Crowd, Crowds
from tests.proof.enqueues import jobs_of
from tests.proof.fillings import CALLBACKS, Filling, Fillings, made_up
from tests.proof.fires import FIRES, Fired, at_rate, unexplained
from tests.proof.world import BEGINNING_MS, OFTEN, Database, Gate, Process, Stuck, VirtualLoop, copied, without_chance

ENQUEUED_S = 2.0
FAULTY_S = 4.0
HEALED_S = 40.0
LEASE_S = 1.5
# A rescuer waits this long between two sightings of one lease; who was extended since is not taken.
PATIENCE_S = LEASE_S / 3 + 0.5
# A lease that ends further ahead than a whole one and this may be taken: the clock has stepped back since.
MARGIN_MS = 1000
ATTEMPTS = 5
SCHEDULED = 0.3  # how many of the worlds have schedules
SCHEDULED_S = 3.0  # for how long they run at least
FIRED_S = 10.0  # how long after all is well again a due time may lie behind
MOST_ASKED = 100  # operations of one process in one second, on the average of a world


@dataclass(frozen=True)
class Plan:
    """One job: what its handler does, and when and how it is enqueued."""

    name: int
    kind: str
    at: float
    takes: float
    key: str | None = None
    delay: float = 0.0
    expires: float | None = None
    batch: bool = False
    cancel_at: float | None = None
    retry_at: float | None = None
    lost: bool = False  # its enqueue is not answered at first, and asked again a second later


@dataclass(frozen=True)
class Recurring:
    """One schedule: what makes it due, what becomes of what is late or in the way, and what its runs do."""

    name: str
    mode: str
    every: float
    takes: float
    overlap: str
    catchup: str
    grace: float | None = None
    rest_at: float | None = None  # when a person pauses it for a second


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    kind: str
    at: float
    target: int
    value: float


@dataclass(frozen=True)
class Scenario:
    """A world to run: everything else follows from the seed."""

    seed: int
    workers: int
    plans: tuple[Plan, ...]
    faults: tuple[Fault, ...]
    schedules: tuple[Recurring, ...] = ()
    batches: tuple[Filling, ...] = ()
    seal_at: float | None = None  # when the batch is sealed that jobs of the plans go to; None: after the last of them
    crowds: tuple[Crowd, ...] = ()


@dataclass(frozen=True)
class Mood:
    """What a world has more of than others: what needs two troubles at once is rare where all are equally likely."""

    kinds: tuple[str, ...]
    faults: tuple[str, ...]
    least: int = 0
    most: int = 7
    people: float = 0.1  # how likely somebody interferes with a job
    poisoned: float = 0.1


KINDS = (*["plain"] * 4, "flaky", "snoozing", "failing", "keyed", "keyed", "long", "retrying", "parent")
FAULTS = (*["kill"] * 4, *["pause"] * 4, *["step"] * 3, "away", "trouble", "trouble", "stop", "hold")
MOODS = (
    Mood(KINDS, FAULTS),
    Mood(KINDS, FAULTS),
    Mood((*KINDS, *["long"] * 6), ("kill", "kill", "kill", "pause", "stop"), least=4, most=9, poisoned=0.4),
    Mood((*KINDS, *["parent"] * 4, *["long"] * 4), ("pause", "pause", "pause", "kill"), least=3, most=7),
    Mood((*KINDS, *["long"] * 6), ("step", "nudge", "nudge", "pause", "kill", "kill", "kill"), least=4, most=9),
    Mood((*["keyed"] * 4, "plain", "long", "parent"), ("pause", "hold", "kill", "trouble"), people=0.5),
    Mood(KINDS, ("trouble", "trouble", "away", "pause", "kill"), least=2),
)
VALUES = {
    "kill": (0.0, 0.5, 3.0),  # back after so many seconds
    "stop": (0.0, 0.5, 3.0),
    "pause": (0.5, 1.8, 3.0, 4.0),
    "step": (-3600.0, -3600.0, 3600.0, -5.0, 5.0),
    "nudge": (-1.9, -1.9, -0.4, 0.4),
    "away": (0.5, 3.0),
    "trouble": (1.0, 4.0),
    "hold": (0.5, 2.0),
}


def scenario(seed: int) -> Scenario:
    """Make up the scenario of a seed."""
    chance = random.Random(f"scenario {seed}")
    mood = chance.choice(MOODS)
    plans = [_plan(chance, name, mood) for name in range(chance.randrange(4, 11))]
    if chance.random() < mood.poisoned:
        plans.append(Plan(len(plans), "poison", at=chance.uniform(0, ENQUEUED_S), takes=0.1))
    workers = chance.choice((4, 4, 4, 5, 6, 8))
    faults: list[Fault] = []
    for _ in range(chance.randrange(mood.least, mood.most)):
        faults.append(_fault(chance, chance.choice(mood.faults), workers, faults))
    ordered = tuple(sorted(faults, key=lambda fault: fault.at))
    several = random.Random(f"batches {seed}")
    # Too early for some of the plans, or so late that a handler which was paused for long may still add.
    early, late = several.uniform(0.5, ENQUEUED_S), several.uniform(ENQUEUED_S, 3 * ENQUEUED_S)
    seal_at = several.choice((None, early, late, late))
    recurring, filled = _schedules(seed, ordered), made_up(several)
    if crowd := crowds.made_up(seed):  # which takes the time of two worlds by itself
        return Scenario(seed, workers, tuple(plans), ordered, seal_at=seal_at, crowds=crowd)
    return Scenario(seed, workers, tuple(plans), ordered, recurring, filled, seal_at)


def _schedules(seed: int, faults: Sequence[Fault]) -> tuple[Recurring, ...]:
    """Make up the schedules of a world: most have none, so that there is time for more of them."""
    chance = random.Random(f"schedules {seed}")
    if chance.random() >= SCHEDULED:
        return ()
    # An hour of due times, each of which is to be caught up with, would take longer than all else in the world.
    far = any(fault.kind == "step" for fault in faults)
    return tuple(_recurring(chance, name, far=far) for name in "xyz"[: chance.choice((1, 1, 2, 3))])


def _recurring(chance: random.Random, name: str, *, far: bool) -> Recurring:
    mode, catchup = chance.choice(("rate", "rate", "delay")), chance.choice(("skip", "all"))
    return Recurring(
        name,
        mode,
        every=chance.choice((0.4, 0.7, 1.3)),
        takes=chance.choice((0.0, 0.1, 0.6, 1.0)),
        overlap="allow" if mode == "delay" else chance.choice(("allow", "skip", "queue", "queue")),
        catchup=catchup,
        grace=2.0 if catchup == "all" and (far or chance.random() < 0.5) else None,
        rest_at=chance.uniform(0.5, 2.5) if chance.random() < 0.2 else None,
    )


def _plan(chance: random.Random, name: int, mood: Mood) -> Plan:
    kind = chance.choice(mood.kinds)
    keyed, somebody = kind == "keyed", chance.random() < mood.people
    return Plan(
        name,
        kind,
        # Those who want the same key come at the same moment, or soon after each other.
        at=(at := float(chance.randrange(2)) if keyed else chance.uniform(0, ENQUEUED_S)),
        takes=chance.choice((0.0, 0.1, 1.0)) if kind != "long" else chance.uniform(1.0, 4.0),
        key=chance.choice(("a", "b")) if keyed else None,
        delay=chance.choice((0.0, 0.0, 0.0, 1.0)),
        expires=chance.choice((0.3, 1.5)) if chance.random() < 0.1 else None,
        batch=chance.random() < (0.7 if kind == "parent" else 0.3),
        cancel_at=at + chance.uniform(0, 2) if somebody else None,
        retry_at=at + chance.uniform(0, 2) if somebody and chance.random() < 0.3 else None,
        lost=chance.random() < 0.1,
    )


def _fault(chance: random.Random, kind: str, workers: int, before: Sequence[Fault]) -> Fault:
    """Make up a fault; troubles like to come together."""
    soon = before and chance.random() < 0.4
    at = before[-1].at + chance.uniform(0, 0.6) if soon else chance.uniform(0.2, FAULTY_S)
    return Fault(kind, at, chance.randrange(workers), chance.choice(VALUES[kind]))


@dataclass
class Run:
    """One beginning of a handler, as it saw itself."""

    job: str
    token: int
    attempt: int
    process: str
    begun: float
    alone: bool = False
    ended: float | None = None
    how: str | None = None


@dataclass
class Ledger:
    """What was offered, acknowledged, done and told: all that the judge goes by, beside the rows in the end."""

    offered: dict[str, Plan] = field(default_factory=dict)
    acknowledged: dict[str, Plan] = field(default_factory=dict)
    children: set[str] = field(default_factory=set)  # acknowledged to the handlers that enqueued them
    added: set[str] = field(default_factory=set)  # by handlers
    born: Counter[str] = field(default_factory=Counter)
    conflicts: int = 0
    runs: list[Run] = field(default_factory=list)
    told: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    # When a lease was given or extended last, by job and token: our time, the database's.
    extended: dict[tuple[str, int], tuple[float, int]] = field(default_factory=dict)
    claims: dict[int, float] = field(default_factory=dict)  # when they were committed, by token
    unjust: list[str] = field(default_factory=list)
    gone_at: dict[str, float] = field(default_factory=dict)
    mourned: Counter[str] = field(default_factory=Counter)
    first: dict[str, int] = field(default_factory=dict)  # when schedules are due for the first time
    written: list[tuple[str, int]] = field(default_factory=list)  # what came of which due time, in this order
    ticks: dict[str, set[tuple[str | None, int]]] = field(default_factory=lambda: defaultdict(set))  # as runs saw it
    refused: set[str] = field(default_factory=set)  # jobs for a batch that took no more


@functools.cache
def template(crowded: tuple[str, ...] = ()) -> Duly:
    """Define the tasks, once for all worlds: their handlers find their world by the way they go to the database.

    Those with lanes are for worlds with jobs of them: who knows such a task looks for its lanes in every turn.
    """
    app = Duly("in-memory.db", lease=LEASE_S, poll="1s", grace="2s")
    app._made_in = "__main__"  # no other process can import it: suspects run in the emptied worker

    @app.task(max_attempts=ATTEMPTS, backoff=backoff.fixed("200ms"), on_dead="mourn")
    async def work(ctx: Ctx, name: int) -> str:
        return await _world(ctx).handle(ctx, name, _process(ctx))

    @app.task(max_attempts=50)
    async def mourn(ctx: Ctx, job_id: str) -> None:
        await _process(ctx).gate.passing()
        _world(ctx).ledger.mourned[job_id] += 1

    @app.task(max_attempts=50)
    async def child(ctx: Ctx) -> None:
        await _process(ctx).gate.passing()
        _world(ctx).ledger.born[ctx.job_id] += 1

    @app.task(max_attempts=ATTEMPTS, backoff=backoff.fixed("200ms"))
    async def tick(ctx: Ctx, takes: float) -> None:
        await _world(ctx).tick(ctx, takes, _process(ctx))

    @app.task(max_attempts=3, backoff=backoff.fixed("200ms"))
    async def part(ctx: Ctx, place: int, how: str) -> None:
        await _world(ctx).part(ctx, how, _process(ctx))

    for callback in CALLBACKS.values():
        app.task(name=callback, max_attempts=50)(_callback(callback))
    for name in crowded:
        terms = {"max_attempts": crowds.ATTEMPTS, "backoff": backoff.fixed(crowds.BACKOFF)}
        app.task(name=name, **terms, **crowds.KINDS[name].options)(_one_of_a_crowd)

    assert app.settings.lease_ms == LEASE_S * 1000  # read here, and not by every copy
    return app


def _callback(which: str) -> Callable[[Ctx], Coroutine[Any, Any, None]]:
    async def called(ctx: Ctx) -> None:
        await _process(ctx).gate.passing()
        _world(ctx).fillings.called[ctx.batch, which].add(ctx.job_id)

    return called


async def _one_of_a_crowd(ctx: Ctx, crowd: int, place: int, key: str) -> None:
    await _world(ctx).attend(ctx, crowd, place, _process(ctx))


def _process(ctx: Ctx) -> Process:
    process: Process = ctx._lease.database.driver.process  # type: ignore[union-attr]
    return process


def _world(ctx: Ctx) -> Simulation:
    world: Simulation = _process(ctx).world
    return world


# What could happen now. A run that is queued behind one that was put off waits as long as that, and so does whoever
# stands in a line behind one.
LEFT = """
select 1
  from duly_job
 where (due_at <= ?
    or state in ('ready', 'running')
    or (state = 'waiting' and coalesce(schedule, '') not in (
        select schedule from duly_job where state = 'scheduled' and schedule is not null)))
   and not (state = 'ready' and ordering_dead is not null and lane in (
        select lane from duly_job where state = 'scheduled' and ordering_dead is not null))
"""


class Simulation:
    """One world, from its beginning to the verdict."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.chance = random.Random(f"world {scenario.seed}")
        self.database = Database(self.loop, self.chance)
        self.database.after = self._watch
        self.ledger = Ledger()
        self.fillings = Fillings(self.database.conn)
        self.crowds = Crowds(self.database.conn)
        self.template = template(tuple(sorted({one.task for one in scenario.crowds})))
        self.ids = Ids(clock=self._nanoseconds, randomness=self.chance.randbytes)
        self.processes: dict[int, Process] = {}
        self.started = 0
        self.furthest_ms = 0
        self.latest = 0
        self.batch = ""  # the one that jobs of the plans go to

    def _nanoseconds(self) -> int:
        return BEGINNING_MS * 1_000_000 + round(self.loop.now * 1e9)

    def run(self) -> list[str]:
        """Run the world and judge it; what is wrong is listed."""
        undo = without_chance(self.scenario.seed)
        log = logging.getLogger("duly")
        level = log.level
        log.setLevel(logging.CRITICAL + 1)  # faults by the thousand are told in the verdict
        try:
            self.loop.run_until_complete(self._live())
            return self._judge()
        except Stuck as stuck:
            return [f"stuck: {stuck}"]
        finally:
            self._end()
            log.setLevel(level)
            undo()

    async def _live(self) -> None:
        for place in range(self.scenario.workers):
            self._start(place)
        producer = Gate(self.database, self.chance)
        app = copied(self.template, producer, self.ids)
        if any(plan.batch for plan in self.scenario.plans):
            self.batch = (await _surely(producer, app.batch("b", **CALLBACKS)._opening)).id
        faults = [self.loop.create_task(self._cause(fault, producer)) for fault in self.scenario.faults]
        caring = self.loop.create_task(self._make_way(producer)) if self.scenario.crowds else None
        await asyncio.gather(
            *(self._enqueue(plan, app, producer) for plan in self.scenario.plans),
            *(self._schedule(one, app) for one in self.scenario.schedules),
            *(self._fill(one) for one in self.scenario.batches),
            *(self._concern(one, app, producer) for one in self.scenario.batches),
            *([self._seal(producer)] if self.scenario.seal_at else []),
            *(self._arrive(one, app, producer) for one in self.scenario.crowds),
        )
        await self._seal(producer)
        while not all(fault.done() for fault in faults) and self._live_jobs():
            await asyncio.sleep(0.25)  # once nothing is left to do, nothing is left to go wrong
        await self._heal(faults)
        if self.scenario.schedules:
            await self._stop_schedules(producer)
        await self._settled()
        if caring is not None:
            caring.cancel()

    async def _schedule(self, one: Recurring, app: Duly) -> None:
        """Define a schedule, and do with it what a person does."""
        call = app.tasks["tick"].call(one.takes)
        options: dict[str, Any] = {"mode": one.mode, "overlap": one.overlap, "catchup": one.catchup, "grace": one.grace}
        await _insisted(lambda: app.schedules.acreate(one.name, call, one.every, **options))
        if one.rest_at is not None:
            await asyncio.sleep(one.rest_at)
            await _insisted(lambda: app.schedules.apause(one.name, by="a person"))
            await asyncio.sleep(1.0)
            await _insisted(lambda: app.schedules.aresume(one.name, by="a person"))
        await asyncio.sleep(max(0.0, SCHEDULED_S - self.loop.now))

    async def _stop_schedules(self, gate: Gate) -> None:
        """Wait until what is due is fired, and fire no more."""
        until = self.loop.now + FIRED_S
        late = "select name, next_at from duly_schedule where next_at <= ?"
        while self.database.conn.execute(late, [self.database.now - 500]).fetchall():
            if self.loop.now > until:
                self.ledger.unjust.append(f"due for {FIRED_S} s, and nobody fires")
                break
            await asyncio.sleep(0.25)
        for one in self.scenario.schedules:
            await _surely(gate, schedules.pause(one.name, by="a person", why="it is over"))

    async def _seal(self, gate: Gate) -> None:
        await asyncio.sleep(max(0.0, (self.scenario.seal_at or 0.0) - self.loop.now))
        if self.batch:
            await _surely(gate, batches.seal(self.batch))

    async def _fill(self, one: Filling) -> None:
        """Have a batch filled, by one producer after the other, each of which is killed but for the last."""
        await asyncio.sleep(one.at)
        for seconds in (*one.crashes, *([] if one.given_up and one.crashes else [None])):
            producing = self.loop.create_task(self._produce(one))
            await asyncio.wait([producing], timeout=seconds)
            if producing.done():
                producing.result()
                break
            producing.cancel()
            await asyncio.wait([producing])
            if not one.keyed:
                break
            await asyncio.sleep(0.2)

    async def _produce(self, one: Filling) -> None:
        """Fill a batch; under a key, as often as it takes."""
        app = copied(self.template, Gate(self.database, self.chance), self.ids)
        task = app.tasks["part"].using(keep=None if one.keep else 0)
        calls = [task.call(place, how) for place, how in enumerate(one.hows)]
        while True:
            try:
                key = one.name if one.keyed else None
                async with app.batch(one.name, key=key, ok_at=one.ok_at, **CALLBACKS) as batch:
                    self.fillings.given[batch.id] = one
                    for begin in range(0, len(calls), one.chunk):
                        await batch.afill(calls[begin : begin + one.chunk])
                        await asyncio.sleep(one.pace)
                self.fillings.sealed.add(batch.id)
                return
            except BatchSealed:
                return  # somebody has cancelled it
            except DulyError:
                if not one.keyed:
                    return
                await asyncio.sleep(0.2)

    async def _concern(self, one: Filling, app: Duly, gate: Gate) -> None:
        """Do what people do with a batch."""
        if one.cancel_at is not None:
            await asyncio.sleep(one.at + one.cancel_at)
            for batch in self.fillings.made_of(one):
                found = await _insisted(lambda batch=batch: app.batches.aget(batch))  # type: ignore[misc]
                await _insisted(found.acancel)
                self.fillings.cancelled.add(batch)
        if one.replay_at is not None:
            await asyncio.sleep(one.at + one.replay_at)
            for batch in self.fillings.made_of(one):
                dead = await _surely(gate, ops.dead_list(batch_id=batch))
                await _surely(gate, ops.replay([Replay(job.id, self.ids()) for job in dead], by="a person", why="so"))

    async def _arrive(self, one: Crowd, app: Duly, gate: Gate) -> None:
        """Enqueue the jobs of a crowd, and do with the first of them what a person does."""
        await asyncio.sleep(one.at)
        task = app.tasks[one.task].using(delay=one.delay)
        jobs = [task._new_job((one.name, place, key), {}) for place, (key, _) in enumerate(one.jobs)]
        self.crowds.offered |= {job.id: one for job in jobs}
        op = ops.enqueue(task._terms(), jobs)
        if one.lost:
            await _surely(gate, op)
            await asyncio.sleep(1.0)
            op = op.again or op
        self.crowds.acknowledged |= {added.id for added in await _surely(gate, op)}
        if one.cancel_at is not None:
            await asyncio.sleep(max(0.0, one.cancel_at - self.loop.now))
            await _surely(gate, ops.cancel([jobs[0].id], by="a person"))

    async def _make_way(self, gate: Gate) -> None:
        """Do what a person does: replay or resolve the dead that hold up those behind them, and help who starves."""
        while True:
            await asyncio.sleep(1.0)
            for task in sorted(self.crowds.starved(self.loop.now)):
                self.crowds.lifted.add(task)
                await _surely(gate, lanes.limit(task, rate_count=0, by="a person", why="it starves"))
            for job, replays in self.crowds.in_the_way(self.loop.now):
                if replays or self.chance.random() < 0.5:
                    await _surely(gate, ops.resolve([job], by="a person", why="never mind"))
                else:
                    await _surely(gate, ops.replay([Replay(job, self.ids())], by="a person", why="so"))

    def _live_jobs(self) -> bool:
        return self.database.conn.execute("select 1 from duly_job limit 1").fetchone() is not None

    def _start(self, place: int) -> None:
        self.started += 1
        self.processes[place] = Process(
            f"w{place}-{self.started}",
            self.database,
            self.chance,
            self.template,
            self.ids,
            self,
            concurrency=self.chance.choice((1, 3)),
        )

    def hear(self, name: str, fields: Mapping[str, Any]) -> None:
        """Note what a worker tells that was not killed."""
        if name in ("job.succeeded", "job.dead", "job.cancelled"):
            self.ledger.told[fields["job_id"]].append(name)

    def broke(self, how: str) -> None:
        """Note that a worker broke by itself, which none may."""
        self.ledger.unjust.append(how)

    # What handlers do

    async def handle(self, ctx: Ctx, name: int, process: Process) -> str:
        """Do what is planned for a job."""
        plan, job = self._plan(name), ctx._lease.job  # type: ignore[union-attr]
        run = Run(ctx.job_id, job.token, ctx.attempt, process.name, self.loop.now, alone=job.suspect)
        self._see_neighbours(run)
        self.ledger.runs.append(run)
        try:
            await process.gate.passing(plan.takes)
            await self._behave(ctx, plan, process)
            if process.gate.killed:
                raise asyncio.CancelledError("killed")
            run.how = "returned"
            return f"{run.token}"
        except BaseException as error:
            run.how = "killed" if process.gate.killed else type(error).__name__
            raise
        finally:
            run.ended = self.loop.now

    async def tick(self, ctx: Ctx, takes: float, process: Process) -> None:
        """Do what a run of a schedule does, and fail now and then."""
        await process.gate.passing(takes)
        if self.chance.random() < 0.1:
            raise ValueError("now and then")
        self.ledger.ticks[ctx.job_id].add((ctx.schedule, round(ctx.due_at.timestamp() * 1000)))

    async def part(self, ctx: Ctx, how: str, process: Process) -> None:
        """Do what a job of a batch does."""
        await process.gate.passing(1.0 if how in ("slow", "parent") else 0.05)
        match how:
            case "flaky" if self.chance.random() < 0.5:
                raise ValueError("flaky")
            case "bad":
                raise ValueError("always")
            case "gone":
                raise Cancel("not wanted")
            case "snoozing" if self.chance.random() < 0.5:
                raise Snooze("200ms")
            case "parent":
                await self._join(process, str(ctx.batch), process.app.tasks["part"].call(-1, "good"))
        if process.gate.killed:
            raise asyncio.CancelledError("killed")
        self.fillings.parts[ctx.job_id].add(ctx._lease.job.token)  # type: ignore[union-attr]

    async def attend(self, ctx: Ctx, crowd: int, place: int, process: Process) -> None:
        """Do what one of a crowd does."""
        one = next(one for one in self.scenario.crowds if one.name == crowd)
        job, token = ctx.job_id, ctx._lease.job.token  # type: ignore[union-attr]
        self.crowds.began(job, token, self.loop.now)
        try:
            await process.gate.passing(one.takes)
            match one.jobs[place][1]:
                case "flaky" if self.chance.random() < 0.5:
                    raise ValueError("flaky")
                case "bad":
                    raise ValueError("always")
                case "snoozing" if self.chance.random() < 0.5:
                    raise Snooze("300ms")
            self.crowds.returned[job].add(token)
        finally:
            if not process.gate.killed:
                self.crowds.ended(job, token)

    async def _join(self, process: Process, batch_id: str, call: Call[Any]) -> None:
        """Add a job to the batch that the own one belongs to."""
        batch = await process.app.batches.aget(batch_id)
        with contextlib.suppress(BatchSealed):
            [job] = await call.task.using(batch=batch).aenqueue_many([call])
            if not process.gate.killed:
                self.ledger.children.add(job.id)

    def _see_neighbours(self, run: Run) -> None:
        """See that a suspect runs alone in its process."""
        for other in self.ledger.runs:
            if other.process == run.process and other.how is None and (run.alone or other.alone):
                self.ledger.unjust.append(f"a suspect beside another: {run} and {other}")

    def _plan(self, name: int) -> Plan:
        return next(plan for plan in self.scenario.plans if plan.name == name)

    async def _behave(self, ctx: Ctx, plan: Plan, process: Process) -> None:
        match plan.kind:
            case "flaky" if self.chance.random() < 0.5:
                raise ValueError("flaky")
            case "failing":
                raise ValueError("always")
            case "retrying" if ctx.attempt < 3:
                raise Retry("not yet", after="300ms")
            case "snoozing" if self.chance.random() < 0.5:
                raise Snooze("200ms")
            case "long":
                await ctx.progress(50.0)
            case "parent" if plan.batch:
                await self._join(process, self.batch, process.app.tasks["child"].call())
            case "parent":
                job = await process.app.tasks["child"].aenqueue()
                if not process.gate.killed:
                    self.ledger.children.add(job.id)
            case "poison":
                process.kill()
                self.loop.call_later(0.5, self._replace, process)

    def _replace(self, process: Process) -> None:
        for place, there in list(self.processes.items()):
            if there is process:
                self._start(place)

    # What happens

    async def _enqueue(self, plan: Plan, app: Duly, gate: Gate) -> None:
        await asyncio.sleep(plan.at)
        op, new_id = self._offer(plan, app)
        if plan.lost:
            await _surely(gate, op)
            await asyncio.sleep(1.0)
            op = op.again or op
        answer = await _surely(gate, op)
        if isinstance(answer, Added):
            if answer.sealed:
                self.ledger.refused.add(new_id)
                return
            answer = answer.jobs
        if not answer:
            self.ledger.unjust.append(f"nothing was answered: {new_id} {plan}")
        elif answer[0].conflict:
            self.ledger.conflicts += 1
        elif not answer[0].deduplicated:
            self.ledger.acknowledged[new_id] = plan
        if answer:
            await self._interfere(plan, answer[0].id, gate)

    def _offer(self, plan: Plan, app: Duly) -> tuple[Op[Any], str]:
        """Make the operation that enqueues a job, as a task does."""
        task = app.tasks["work"].using(delay=plan.delay, expires=plan.expires)
        new = task._new_job((plan.name,), {})
        if plan.key is not None:
            new = _with(new, key=plan.key, payload=json.dumps({"name": self._first_of(plan.key)}))
        self.ledger.offered[new.id] = plan
        if plan.batch:
            return batches.add(_with(task._terms(), batch_id=self.batch), [new]), new.id
        return ops.enqueue(task._terms(), [new]), new.id

    def _first_of(self, key: str) -> int:
        return next(plan.name for plan in self.scenario.plans if plan.key == key)

    async def _interfere(self, plan: Plan, job: str, gate: Gate) -> None:
        """Do what a person does with a job."""
        if plan.retry_at is not None:
            await asyncio.sleep(max(0.0, plan.retry_at - self.loop.now))
            await _surely(gate, ops.retry([job], by="a person"))
        if plan.cancel_at is not None:
            await asyncio.sleep(max(0.0, plan.cancel_at - self.loop.now))
            states = await _surely(gate, ops.cancel([job], by="a person"))
            if states.get(job) == "cancelled":
                self.ledger.gone_at[job] = self.loop.now

    async def _cause(self, fault: Fault, gate: Gate) -> None:
        await asyncio.sleep(fault.at)
        process = self._target(fault)
        match fault.kind:
            case "kill":
                process.kill()
                self.loop.call_later(fault.value, self._replace, process)
            case "stop":
                process.worker.stop()
                self.loop.call_later(fault.value, self._replace, process)
            case "pause":
                process.pause(fault.value)
            case "step" | "nudge":
                self.latest = max(self.latest, self.database.now)
                self.database.clock_offset_ms += round(fault.value * 1000)
                if fault.value > 0:
                    self.crowds.jumped_at.append(self.loop.now)
                self.furthest_ms = max(self.furthest_ms, self.database.clock_offset_ms)
            case "away":
                self.database.away_until = self.loop.now + fault.value
            case "trouble":
                self.database.trouble = 0.1
                self.loop.call_later(fault.value, setattr, self.database, "trouble", 0.0)
            case "hold":
                await _surely(gate, ops.pause("queue", "default", by="a person", why="to see"))
                await asyncio.sleep(fault.value)
                await _surely(gate, ops.resume("queue", "default", by="a person", why="seen"))

    def _target(self, fault: Fault) -> Process:
        """Choose whom a fault hits: mostly one that has something to lose."""
        there = list(self.processes.values())
        busy = [process for process in there if process.worker.held.leases() and not process.gate.killed]
        hit = busy if busy and fault.target else there
        return hit[fault.target % len(hit)]

    async def _heal(self, faults: list[asyncio.Task[None]]) -> None:
        for fault in faults:
            fault.cancel()
        await asyncio.gather(*faults, return_exceptions=True)
        self.database.conn.execute("update duly_queue set paused_at = null")
        self.database.trouble = 0.0
        for place, process in list(self.processes.items()):
            if process.gate.killed or process.task.done() or process.worker.stopping:
                self._start(place)

    async def _settled(self) -> None:
        """Wait until nothing is left that could happen now; then have the time come for what a wrong clock put off."""
        if await self._empty(LEFT):
            self.crowds.jumped_at.append(self.loop.now)
            self.database.clock_offset_ms = self.furthest_ms
            await self._empty("select 1 from duly_job where ? > 0")

    async def _empty(self, sql: str) -> bool:
        # One after the other in an order, with their retries and replays, jobs of two seconds take their time.
        until = self.loop.now + HEALED_S * (3 if self.scenario.crowds else 1)
        while self.loop.now < until:
            if not self.database.conn.execute(f"{sql} limit 1", [self.database.now]).fetchone():
                return True
            await asyncio.sleep(0.5)
        sql = "select id, state, lease_until from duly_job where state in ('running', 'ready', 'waiting')"
        self.ledger.unjust += [f"stuck by the clock: {row}" for row in self.database.conn.execute(sql)]
        return False

    # What is committed

    def _watch(self, op: Op[Any], rows: Rows) -> None:
        match op.name:
            case "extend":
                for held in json.loads(op.params["held"]):
                    self._extended(held["id"], held["token"])
            case "claim" if rows:
                self._watch_claim(op.params["token"])
            case "rescue":
                for job, _ in rows:
                    self._watch_rescue(job)
            case "enqueue" if op.params.get("parent_token") is not None:
                self._watch_birth(op.params)
            case "enqueue" if self.scenario.crowds and op.params["task"] in crowds.KINDS:
                self.crowds.came(jobs_of(op), op.params["task"])
            case "replay" if self.scenario.crowds:
                self.crowds.came_back(json.loads(op.params["replays"]))
            case "define":
                for made in json.loads(op.params["schedules"]):
                    self.ledger.first.setdefault(made["name"], made["next_at"])
            case "fire":
                self._watch_fire(op, {name for (name,) in rows})
        if self.scenario.schedules and op.name not in OFTEN:
            self._watch_turns()
        if op.writes and op.name not in UNCOUNTED:
            self.ledger.unjust += [wrong for wrong in self.fillings.look() if wrong not in self.ledger.unjust]

    def _extended(self, job: str, token: int) -> None:
        self.ledger.extended[job, token] = self.loop.now, self.database.now

    def _watch_claim(self, token: int) -> None:
        """See that what is taken may be taken."""
        latest = self.latest = max(self.latest, self.database.now)
        if token in self.ledger.claims:
            return  # asked again
        sql = "select id, due_at, expires_at, attempt from duly_job where token = ?"
        taken = self.database.conn.execute(sql, [token]).fetchall()
        if not taken:
            return  # it only looked
        self.ledger.claims[token] = self.loop.now
        if self.database.conn.execute("select 1 from duly_queue where paused_at is not null").fetchone():
            self.ledger.unjust.append(f"claimed while the queue is paused: {taken}")
        self.crowds.taken([job for job, *_ in taken], self.loop.now)
        for job, due, expires, attempt in taken:
            self._extended(job, token)
            if due > latest:  # what was due once may be run, whatever the clock says since
                self.ledger.unjust.append(f"claimed {due - latest} ms early: {job}")
            if expires is not None and expires <= self.database.now and attempt <= 1:
                self.ledger.unjust.append(f"claimed after it has expired: {job}")

    def _watch_rescue(self, job: str) -> None:
        """See that no lease is taken that stands, or was extended a moment ago."""
        sql = "select last_token from duly_job where id = :id union all select token from duly_done where id = :id"
        [token] = self.database.conn.execute(sql, {"id": job}).fetchone()
        self.crowds.rescued(job, -token)
        # The negated token is the lease that was taken; once it is told, a repetition may name it again.
        extended = self.ledger.extended.pop((job, -token), None)
        if extended is None:
            return
        since_s, since_ms = self.loop.now - extended[0], self.database.now - extended[1]
        if since_s < PATIENCE_S - 0.05:
            self.ledger.unjust.append(f"{job} taken {since_s:.2f} s after its lease was extended")
        if -MARGIN_MS <= since_ms < LEASE_S * 1000:
            self.ledger.unjust.append(f"{job} taken {since_ms} ms of the clock after its lease was extended")

    def _watch_fire(self, op: Op[Any], names: set[str]) -> None:
        """See that nothing is fired before it is due."""
        latest = self.latest = max(self.latest, self.database.now)
        self.ledger.written += [
            (row["name"], row["due_at"]) for row in json.loads(op.params["rows"]) if row["name"] in names
        ]
        for job in json.loads(op.params["jobs"]):
            if job["name"] in names and job["due_at"] > latest:
                self.ledger.unjust.append(f"{job['name']} fired {job['due_at'] - latest} ms early")

    def _watch_turns(self) -> None:
        """See that runs which may not overlap do not, and that none waits for nobody."""
        for name, going in self.database.conn.execute(TURNS, {"queued": QUEUED}).fetchall():
            wrong = f"{going} runs of {name} at once" if going else f"the queued runs of {name} wait for nobody"
            if going != 1 and wrong not in self.ledger.unjust:
                self.ledger.unjust.append(wrong)

    def _watch_birth(self, params: Mapping[str, Any]) -> None:
        """See that a handler adds jobs only while it holds its own."""
        holds = "select 1 from duly_job where id = ? and token = ? and state = 'running'"
        held = self.database.conn.execute(holds, [params["parent_id"], params["parent_token"]]).fetchone()
        for job_id in json.loads(params["ids"]):
            if self.database.conn.execute("select 1 from duly_job where id = ?", [job_id]).fetchone():
                if not held and job_id not in self.ledger.added:
                    self.ledger.unjust.append(f"{job_id} was added by a handler that has lost its lease")
                self.ledger.added.add(job_id)

    # The verdict

    def _judge(self) -> list[str]:
        rows = self.database.conn.execute(
            "select id, task, state, attempt, max_attempts, crashes, result, token, reason, key from duly_done"
        ).fetchall()
        done = {row[0]: row for row in rows}
        live = self.database.conn.execute("select id, task, state from duly_job").fetchall()
        known = {*done, *(row[0] for row in live)}
        wrong = [f"not finished: {row}" for row in live]
        wrong += [f"lost: {job} {plan}" for job, plan in self.ledger.acknowledged.items() if job not in known]
        ours = [job for job, row in done.items() if row[1] == "work"]
        wrong += [f"unexpected: {job}" for job in ours if job not in self.ledger.offered]
        wrong += self.ledger.unjust
        for job, row in done.items():
            if row[1] == "work" and job in self.ledger.offered:
                wrong += self._judge_one(job, row)
        wrong += self._judge_children(done)
        if self.database.asked > MOST_ASKED * self.loop.now * self.scenario.workers:
            wrong.append(f"asked the database {self.database.asked} times in {self.loop.now:.0f} s")
        for one in self.scenario.schedules:
            wrong += self._judge_schedule(one)
        wrong += [f"refused, and it is there: {job}" for job in self.ledger.refused if job in known]
        return wrong + self._judge_keys(done) + list(self.fillings.judge()) + list(self.crowds.judge())

    def _judge_one(self, job: str, row: Any) -> list[str]:
        _, _, state, attempt, most, crashes, result, token, reason, _ = row
        plan, runs = self.ledger.offered[job], [run for run in self.ledger.runs if run.job == job]
        wrong = []
        told = Counter(self.ledger.told[job])
        if sum(told.values()) > 1:
            wrong.append(f"ended {dict(told)}: {job} {plan}")
        burnt = [run for run in runs if run.how not in ("Snooze", "Cancel", "CancelledError", "LeaseLost", "Stopping")]
        if len(burnt) > attempt or attempt > most:
            wrong.append(f"ran {len(burnt)} times, of which {attempt} are counted, of {most}: {job} {plan}")
        if state == "succeeded":
            if result is None or json.loads(result) != str(token):
                wrong.append(f"result of another attempt: {job} has {result} under token {token}")
            if not any(run.token == token and run.how == "returned" for run in runs):
                wrong.append(f"succeeded without a run: {job}")
        if state == "dead":
            count = "select count(*) from duly_attempt where job_id = ?"
            [failures] = self.database.conn.execute(count, [job]).fetchone()
            if failures < most and crashes < 3:
                wrong.append(f"dead of {failures} failures: {job} {plan} {reason}")
            kills = sum(fault.kind == "kill" for fault in self.scenario.faults)
            if reason == "killed its worker" and plan.kind != "poison" and kills < 3:
                wrong.append(f"an innocent is said to have killed its worker: {job} {plan}")
        if plan.kind in ("failing", "poison") and state == "succeeded":
            wrong.append(f"cannot have succeeded: {job} {plan}")
        if bool(self.ledger.mourned[job]) != (state == "dead"):  # it may run twice, but for the dead and for them only
            wrong.append(f"mourned {self.ledger.mourned[job]} times, {state}: {job}")
        # One that was claimed before may begin late: its worker has not heard yet that it lost the lease.
        if (gone := self.ledger.gone_at.get(job)) is not None and any(
            self.ledger.claims[run.token] > gone for run in runs
        ):
            wrong.append(f"claimed after it was cancelled: {job}")
        return wrong

    def _judge_children(self, done: Mapping[str, Any]) -> list[str]:
        ledger, there = self.ledger, [job for job, row in done.items() if row[1] == "child"]
        wrong = [f"child lost: {job}" for job in ledger.children if job not in done]
        wrong += [f"unexpected child: {job}" for job in there if job not in ledger.added]
        return wrong + [f"child not run: {job}" for job in there if not ledger.born[job]]

    def _judge_keys(self, done: Mapping[str, Any]) -> list[str]:
        wrong = []
        for key in ("a", "b"):
            won = [job for job, row in done.items() if row[9] == key and row[2] == "succeeded"]
            if len(won) > 1:
                wrong.append(f"key {key} succeeded {len(won)} times")
            held = self.database.conn.execute("select job_id, state from duly_key where key = ?", [key]).fetchone()
            if held is not None and held[1] == "live" and held[0] in done:
                wrong.append(f"key {key} is still held by {held[0]}, which is {done[held[0]][2]}")
            if won and (held is None or held[0] != won[0]):
                wrong.append(f"key {key} forgot that {won[0]} succeeded: {held}")
        return wrong

    def _judge_schedule(self, one: Recurring) -> list[str]:
        """Go through the record of a schedule: each due time stands there once, and each fired one has one job."""
        ask = self.database.conn.execute
        [next_at] = ask("select next_at from duly_schedule where name = ?", [one.name]).fetchone()
        fires = [Fired(*row) for row in ask(FIRES, [one.name])]
        if one.mode == "delay":  # a clock that is set back has it due before what it had fired
            fires.sort(key=lambda fire: self.ledger.written.index((one.name, fire.due)))
        ended = dict(ask("select id, finished_at from duly_done where schedule = ?", [one.name]).fetchall())
        fired = {fire.job: fire.due for fire in fires if fire.job is not None}
        wrong = [f"{one.name}: a run that no fire tells of: {job}" for job in ended if job not in fired]
        wrong += [f"{one.name}: fired, and its job is gone: {job}" for job in fired if job not in ended]
        for job in ended:
            if self.ledger.ticks[job] - {(one.name, fired.get(job, 0))}:
                wrong.append(f"{one.name}: {job} was run as {self.ledger.ticks[job]}")
        last = Fired(next_at, None, 0, None)
        found = unexplained([*fires, last], self.ledger.first[one.name], _following(one, ended))
        return wrong + [f"{one.name}: {each}" for each in found]

    def _end(self) -> None:
        self.loop.turns = 0
        for process in self.processes.values():
            process.gate.killed = True
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            with contextlib.suppress(Stuck):
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=5))
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.loop.close()
        asyncio.set_event_loop(None)


TURNS = """
select schedule, count(*) filter (where duly_job.reason is not :queued) as going
  from duly_job join duly_schedule on duly_schedule.name = duly_job.schedule and overlap in ('skip', 'queue')
 group by schedule having going <> 1
"""


# What neither adds nor ends anything.
UNCOUNTED = OFTEN | {"extend", "progress", "pause", "resume", "define", "leave", "prune", "declare_limits"}


def _following(one: Recurring, ended: Mapping[str, int]) -> Callable[[Fired], int | None]:
    """Say which due time comes after a line of the record; None: that depends on when it was written."""
    every_ms = round(one.every * 1000)
    if one.mode == "rate":
        return at_rate(every_ms)
    after = {job: at + every_ms for job, at in ended.items()}
    return lambda fire: after.get(fire.job or "")


async def _insisted(ask: Callable[[], Awaitable[Any]]) -> Any:
    while True:
        try:
            return await ask()
        except DulyError:
            await asyncio.sleep(0.2)


async def _surely(gate: Gate, op: Op[Any]) -> Any:
    while True:
        try:
            return await gate.arun(op)
        except DulyError as error:
            op = getattr(error, "again", None) or op
            await asyncio.sleep(0.2)


def _with(struct: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(struct, **changes)


def judge(seed: int) -> list[str]:
    """Run the world of a seed and say what is wrong in it."""
    return Simulation(scenario(seed)).run()


def judged(seed: int) -> tuple[list[str], frozenset[str]]:
    """Do the same, and say which sections of SQL were run in it."""
    world = Simulation(scenario(seed))
    return world.run(), world.database.sections


def shortened(failing: Scenario) -> Scenario:
    """Leave out jobs, faults and workers for as long as it still fails."""
    before = None
    while failing != before:
        before = failing
        for part in ("faults", "plans", "schedules", "batches", "crowds"):
            for item in getattr(failing, part):
                left = tuple(one for one in getattr(failing, part) if one is not item)
                failing = _if_it_fails(replace(failing, **{part: left}), failing)
        if failing.workers > 1:
            failing = _if_it_fails(replace(failing, workers=failing.workers - 1), failing)
    return failing


def _if_it_fails(tried: Scenario, otherwise: Scenario) -> Scenario:
    return tried if Simulation(tried).run() else otherwise


def main() -> int:
    """Run the worlds of some seeds: `python -m tests.proof.simulation FIRST [LAST] [--shorten] [--plant BUG]`."""
    from tests.proof.planted import PLANTED

    parser = argparse.ArgumentParser(prog="python -m tests.proof.simulation", description=main.__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, nargs="?", help="not run any more; default: only the first")
    parser.add_argument("--shorten", action="store_true", help="leave out what a failing world does not need")
    parser.add_argument("--plant", action="append", default=[], choices=PLANTED, metavar="BUG", help="a known bug")
    given = parser.parse_args()
    seeds = range(given.first, given.first + 1 if given.last is None else given.last)
    began = time.perf_counter()
    with broken(*given.plant):
        bad = sum(_tell(seed, shorten=given.shorten) for seed in seeds)
    each_ms = (time.perf_counter() - began) / max(len(seeds), 1) * 1000
    print(f"{len(seeds)} seeds, {bad} bad, {each_ms:.0f} ms a seed")
    return 1 if bad else 0


def _tell(seed: int, *, shorten: bool) -> bool:
    """Say what is wrong in the world of a seed, and in which shorter one it still is."""
    wrong = judge(seed)
    if wrong:
        print(seed, *wrong[:5], sep="\n  ")
    if wrong and shorten:
        shorter = shortened(scenario(seed))
        parts = [*shorter.plans, *shorter.schedules, *shorter.batches, *shorter.crowds, *shorter.faults]
        parts += Simulation(shorter).run()[:5]
        print(f"  shorter, with {shorter.workers} workers:", *parts, sep="\n    ", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
