"""P6: many worlds, each from one seed, judged from outside.

A scenario is a list of jobs and a list of faults. Handlers write into a ledger what they do; what workers tell and
what the ledger says is compared with what the database says in the end. A scenario that fails is made shorter by
leaving out jobs and faults for as long as it still fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from duly import Ctx, Duly, Retry, Snooze, backoff
from duly.errors import DulyError
from duly.keys import Ids
from duly.store import ops
from duly.store.ops import Op
from tests.proof.world import BEGINNING_MS, Database, Gate, Process, Stuck, VirtualLoop, without_chance

FAULTY_S = 10.0
HEALED_S = 90.0
LEASE_S = 1.5
# A rescuer waits this long between two sightings of one lease; who was extended since is not taken.
PATIENCE_S = LEASE_S / 3 + 0.5
ATTEMPTS = 5


@dataclass(frozen=True)
class Plan:
    """One job: what its handler does, and when and how it is enqueued."""

    name: int
    kind: str
    at: float
    takes: float
    key: str | None = None
    delay: float = 0.0
    batch: bool = False
    cancel_at: float | None = None
    lost: bool = False  # its enqueue is not answered at first, and asked again a second later


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


def scenario(seed: int) -> Scenario:
    """Make up the scenario of a seed."""
    chance = random.Random(f"scenario {seed}")
    kinds = ["plain"] * 4 + ["flaky", "snoozing", "failing", "keyed", "keyed", "long", "retrying", "parent"]
    plans = []
    for name in range(chance.randrange(4, 11)):
        kind = chance.choice(kinds)
        plans.append(
            Plan(
                name,
                kind,
                at=chance.uniform(0, 4),
                takes=chance.choice((0.0, 0.1, 1.0)) if kind != "long" else chance.uniform(1.5, 4.0),
                key=chance.choice(("a", "b")) if kind == "keyed" else None,
                delay=chance.choice((0.0, 0.0, 0.0, 1.0)),
                batch=chance.random() < 0.3,
                cancel_at=chance.uniform(0, 6) if chance.random() < 0.1 else None,
                lost=chance.random() < 0.1,
            )
        )
    if chance.random() < 0.3:
        plans.append(Plan(len(plans), "poison", at=chance.uniform(0, 3), takes=0.1))
    wrong = ["kill"] * 4 + ["pause"] * 4 + ["step"] * 3 + ["away", "trouble", "trouble", "stop"]
    workers = chance.randrange(2, 5)
    faults = [_fault(chance, chance.choice(wrong), workers) for _ in range(chance.randrange(0, 7))]
    return Scenario(seed, workers, tuple(plans), tuple(sorted(faults, key=lambda fault: fault.at)))


def _fault(chance: random.Random, kind: str, workers: int) -> Fault:
    values = {
        "kill": (0.0, 0.5, 3.0),  # back after so many seconds
        "stop": (0.0, 0.5, 3.0),
        "pause": (0.5, 1.8, 4.0),
        "step": (-3600.0, 3600.0, -5.0, 5.0, 0.3),
        "away": (0.5, 3.0),
        "trouble": (1.0, 4.0),
    }
    return Fault(kind, chance.uniform(0.2, FAULTY_S), chance.randrange(workers), chance.choice(values[kind]))


@dataclass
class Run:
    """One beginning of a handler, as it saw itself."""

    job: str
    token: int
    attempt: int
    process: str
    begun: float
    ended: float | None = None
    how: str | None = None


@dataclass
class Ledger:
    """What was offered, acknowledged, done and told: all that the judge goes by, beside the rows in the end."""

    offered: dict[str, Plan] = field(default_factory=dict)
    acknowledged: dict[str, Plan] = field(default_factory=dict)
    conflicts: int = 0
    runs: list[Run] = field(default_factory=list)
    told: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    extended: dict[int, float] = field(default_factory=dict)
    unjust: list[str] = field(default_factory=list)
    gone_at: dict[str, float] = field(default_factory=dict)
    mourned: Counter[str] = field(default_factory=Counter)


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
        self.ids = Ids(clock=self._nanoseconds, randomness=self.chance.randbytes)
        self.processes: dict[int, Process] = {}
        self.started = 0
        self.furthest_ms = 0
        self.latest = 0
        self.batch = self.ids()

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
        self.database.conn.execute(
            "insert into duly_batch (id, name, created_at, sealed_at, open) values (?, 'b', 0, 0, ?)",
            [self.batch, sum(plan.batch for plan in self.scenario.plans)],
        )
        for place in range(self.scenario.workers):
            self._start(place)
        producer = Gate(self.database, self.chance)
        work = [self._enqueue(plan, producer) for plan in self.scenario.plans]
        work += [self._cause(fault) for fault in self.scenario.faults]
        await asyncio.gather(*work)
        await asyncio.sleep(max(0.0, FAULTY_S / 2 - self.loop.now))
        self._heal()
        await self._settled()

    def _start(self, place: int) -> None:
        self.started += 1
        self.processes[place] = Process(
            f"w{place}-{self.started}",
            self.database,
            self.chance,
            self._define,
            self.ledger.unjust.append,
            concurrency=self.chance.choice((1, 3)),
        )

    def _define(self, app: Duly, process: Process) -> None:
        app._new_id = self.ids  # type: ignore[assignment]

        @app.task(max_attempts=ATTEMPTS, backoff=backoff.fixed("200ms"), on_dead="mourn")
        async def work(ctx: Ctx, name: int) -> str:
            return await self._handle(ctx, self._plan(name), process)

        @app.task(max_attempts=50)
        async def mourn(job_id: str) -> None:
            await process.gate.passing()
            self.ledger.mourned[job_id] += 1

        @app.events.listen
        def hear(name: str, fields: Mapping[str, Any]) -> None:
            if name in ("job.succeeded", "job.dead", "job.cancelled") and not process.gate.killed:
                self.ledger.told[fields["job_id"]].append(name)

    def _plan(self, name: int) -> Plan:
        return next(plan for plan in self.scenario.plans if plan.name == name)

    async def _handle(self, ctx: Ctx, plan: Plan, process: Process) -> str:
        run = Run(ctx.job_id, ctx._lease.held.token, ctx.attempt, process.name, self.loop.now)  # type: ignore[union-attr]
        self.ledger.runs.append(run)
        try:
            await process.gate.passing(plan.takes)
            self._behave(ctx, plan, process)
            if process.gate.killed:
                raise asyncio.CancelledError("killed")
            run.how = "returned"
            return f"{run.token}"
        except BaseException as error:
            run.how = run.how or type(error).__name__
            raise
        finally:
            if not process.gate.killed:
                run.ended = self.loop.now

    def _behave(self, ctx: Ctx, plan: Plan, process: Process) -> None:
        match plan.kind:
            case "flaky" if self.chance.random() < 0.5:
                raise ValueError("flaky")
            case "failing":
                raise ValueError("always")
            case "retrying" if ctx.attempt < 3:
                raise Retry("not yet", after="300ms")
            case "snoozing" if self.chance.random() < 0.5:
                raise Snooze("200ms")
            case "poison":
                process.kill()
                self.loop.call_later(0.5, self._replace, process)

    def _replace(self, process: Process) -> None:
        for place, there in list(self.processes.items()):
            if there is process:
                self._start(place)

    # What happens

    async def _enqueue(self, plan: Plan, gate: Gate) -> None:
        await asyncio.sleep(plan.at)
        app = Duly("in-memory.db", lease="1500ms")
        app.__dict__["driver"] = gate
        app._new_id = self.ids  # type: ignore[assignment]
        self._define(app, Process.__new__(Process))
        task = app.tasks["work"]
        terms = replace_terms(task.using(delay=plan.delay)._terms(), batch_id=self.batch if plan.batch else None)
        new = task._new_job((plan.name,), {})
        if plan.key is not None:
            new = _with(new, key=plan.key, payload=json.dumps({"name": self._first_of(plan.key)}))
        op = ops.enqueue(terms, [new])
        self.ledger.offered[new.id] = plan
        if plan.lost:
            await _surely(gate, op)
            await asyncio.sleep(1.0)
            op = op.again or op
        answer = await _surely(gate, op)
        if answer[0].conflict:
            self.ledger.conflicts += 1
        elif not answer[0].deduplicated:
            self.ledger.acknowledged[answer[0].id] = plan
        if answer[0].deduplicated and plan.batch:
            self.database.conn.execute("update duly_batch set open = open - 1")
        if plan.cancel_at is not None:
            await asyncio.sleep(max(0.0, plan.cancel_at - self.loop.now))
            states = await _surely(gate, ops.cancel([answer[0].id], by="a person"))
            if states.get(answer[0].id) == "cancelled":
                self.ledger.gone_at[answer[0].id] = self.loop.now

    def _first_of(self, key: str) -> int:
        return next(plan.name for plan in self.scenario.plans if plan.key == key)

    async def _cause(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at)
        process = self.processes[fault.target]
        match fault.kind:
            case "kill":
                process.kill()
                self.loop.call_later(fault.value, self._replace, process)
            case "stop":
                process.worker.stop()
                self.loop.call_later(fault.value, self._replace, process)
            case "pause":
                process.pause(fault.value)
            case "step":
                self.latest = max(self.latest, self.database.now)
                self.database.clock_offset_ms += round(fault.value * 1000)
                self.furthest_ms = max(self.furthest_ms, self.database.clock_offset_ms)
            case "away":
                self.database.away_until = self.loop.now + fault.value
            case "trouble":
                self.database.trouble = 0.1
                self.loop.call_later(fault.value, setattr, self.database, "trouble", 0.0)

    def _heal(self) -> None:
        self.database.trouble = 0.0
        for place, process in list(self.processes.items()):
            if process.gate.killed or process.task.done() or process.worker.stopping:
                self._start(place)

    async def _settled(self) -> None:
        """Wait until nothing is left that could happen now; then have the time come for what a wrong clock put off."""
        await self._empty("select 1 from duly_job where state <> 'scheduled' or due_at <= ?", HEALED_S)
        self.database.clock_offset_ms = self.furthest_ms
        await self._empty("select 1 from duly_job where ? > 0", HEALED_S)

    async def _empty(self, sql: str, seconds: float) -> None:
        until = self.loop.now + seconds
        while self.loop.now < until and self.database.conn.execute(f"{sql} limit 1", [self.database.now]).fetchone():
            await asyncio.sleep(0.5)
        self.ledger.unjust += [
            f"stuck by the clock: {row}"
            for row in self.database.conn.execute(
                "select id, state, lease_until from duly_job where state in ('running', 'ready', 'waiting')"
            )
        ]

    def _watch(self, op: Op[Any]) -> None:
        """Look at what is committed: a lease that was just extended must not be taken."""
        now = self.loop.now
        if op.name == "extend":
            for held in json.loads(op.params["held"]):
                self.ledger.extended[held["token"]] = now
        elif op.name == "claim":
            # What was due once may be run, whatever the clock says since.
            latest = self.latest = max(self.latest, self.database.now)
            taken = self.database.conn.execute("select id, due_at from duly_job where token = ?", [op.params["token"]])
            self.ledger.unjust += [f"claimed {due - latest} ms early: {job}" for job, due in taken if due > latest]
        elif op.name == "rescue":
            for seen in json.loads(op.params["seen"]):
                taken = self.database.conn.execute(
                    "select 1 from duly_attempt where job_id = ? and outcome = 'crashed' and at = ?",
                    [seen["id"], self.database.now],
                ).fetchone()
                since = now - self.ledger.extended.get(seen["token"], -1e9)
                if taken and since < PATIENCE_S - 0.05:
                    self.ledger.unjust.append(f"{seen['id']} taken {since:.2f} s after its lease was extended")

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
        return wrong + self._judge_keys(done) + self._judge_batch(done)

    def _judge_one(self, job: str, row: Any) -> list[str]:
        _, _, state, _, most, crashes, result, token, reason, _ = row
        plan, runs = self.ledger.offered[job], [run for run in self.ledger.runs if run.job == job]
        wrong = []
        told = Counter(self.ledger.told[job])
        if sum(told.values()) > 1:
            wrong.append(f"ended {dict(told)}: {job} {plan}")
        burnt = [run for run in runs if run.how not in ("Snooze", "CancelledError", "LeaseLost", "Stopping")]
        if len(burnt) > most:
            wrong.append(f"ran {len(burnt)} times of {most}: {job} {plan}")
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
        if (gone := self.ledger.gone_at.get(job)) is not None and any(run.begun > gone + 0.01 for run in runs):
            wrong.append(f"ran after it was cancelled: {job}")
        return wrong

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

    def _judge_batch(self, done: Mapping[str, Any]) -> list[str]:
        row = self.database.conn.execute("select open, succeeded, dead, cancelled from duly_batch").fetchone()
        states = Counter(
            state for (state,) in self.database.conn.execute("select state from duly_done where batch_id is not null")
        )
        expected = (0, states["succeeded"], states["dead"], states["cancelled"])
        return [] if row == expected else [f"batch counts {row}, rows say {expected}"]

    def _end(self) -> None:
        for process in self.processes.values():
            process.gate.killed = True
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=5))
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.loop.close()
        asyncio.set_event_loop(None)
        self.database.conn.close()


async def _surely(gate: Gate, op: Op[Any]) -> Any:
    while True:
        try:
            return await gate.arun(op)
        except DulyError as error:
            op = getattr(error, "again", None) or op
            await asyncio.sleep(0.2)


def replace_terms(terms: Any, **changes: Any) -> Any:
    return type(terms)(**{name: getattr(terms, name) for name in terms.__struct_fields__} | changes)


_with = replace_terms


def judge(seed: int) -> list[str]:
    """Run the world of a seed and say what is wrong in it."""
    return Simulation(scenario(seed)).run()


def shortened(failing: Scenario) -> Scenario:
    """Leave out jobs and faults for as long as it still fails."""
    shorter = True
    while shorter:
        shorter = False
        for part in ("faults", "plans"):
            items = getattr(failing, part)
            for place in range(len(items)):
                without = replace(failing, **{part: items[:place] + items[place + 1 :]})
                if Simulation(without).run():
                    failing, shorter = without, True
                    break
    return failing


def main() -> None:
    """Run the worlds of some seeds: `python -m tests.proof.simulation FIRST LAST [--shorten]`."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.simulation", description=main.__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--shorten", action="store_true", help="leave out what a failing world does not need")
    given = parser.parse_args()
    began, bad = time.perf_counter(), 0
    for seed in range(given.first, given.last):
        if wrong := judge(seed):
            bad += 1
            print(seed, *wrong[:3], sep="\n  ")
            if given.shorten:
                print(shortened(scenario(seed)))
    each_ms = (time.perf_counter() - began) / max(given.last - given.first, 1) * 1000
    print(f"{given.last - given.first} seeds, {bad} bad, {each_ms:.0f} ms a seed")


if __name__ == "__main__":
    main()
