"""P11: clocks that step, flap, differ and stand still: nothing lost, nothing robbed, nothing stuck."""

from __future__ import annotations

import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from duly.worker.upkeep import rescue
from tests.proof import breaks, tasks
from tests.proof.clocks import Clock, followed
from tests.proof.fires import FIRES, Fired, ask, at_rate, unexplained
from tests.proof.fleet import Fleet, fleet, producer
from tests.proof.ledger import records
from tests.proof.table import Figure, Row, Setting
from tests.servers.pair import children_of

LEASE_SECONDS = 2.0
STUCK_SECONDS = LEASE_SECONDS + 3 * LEASE_SECONDS / 3 + 2
HOUR_MS, TEN_MINUTES_MS = 3_600_000, 600_000
WORKERS = 3
EVERY_MS = 500
CLAMP = " or lease_until > :now + lease_ms + 2 * (lease_ms / 3)"


class Machine:
    """Workers, each with a clock of its own, and the producer's."""

    def __init__(self, workers: Fleet, own: Clock) -> None:
        self.fleet = workers
        self.own = own
        self.clocks: dict[int, Clock] = {}
        self._number = 0

    def start(self) -> None:
        """Start a worker whose clock is right, as far as this machine knows."""
        self._number += 1
        path = self.fleet.folder / f"clock-{self._number}"
        clock = Clock(path)
        clock.wrong_ms = self.own.wrong_ms
        worker = self.fleet.start(environ={"PROOF_CLOCK": str(path)})
        self.clocks[worker.pid] = clock

    def replace(self, worker: subprocess.Popen[bytes]) -> None:
        """Kill a worker and start another."""
        self.fleet.kill(worker)
        del self.clocks[worker.pid]
        self.start()

    def step(self, wrong_ms: int) -> None:
        """Set all clocks."""
        for clock in (self.own, *self.clocks.values()):
            clock.wrong_ms = wrong_ms

    def suspend(self, seconds: float) -> None:
        """Have the whole machine sleep: no process runs, the clock goes on, the monotonic one does not."""
        at = time.monotonic()
        for worker in self.fleet.workers:
            worker.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.step(self.own.wrong_ms + HOUR_MS)
        for worker in self.fleet.workers:
            worker.send_signal(signal.SIGCONT)
            for pid in (worker.pid, *children_of(worker.pid)):
                self.fleet.ledger.note("stopped", pid=pid, at=at, until=time.monotonic())


def run(setting: Setting) -> Figure:
    """Have all go wrong with the clocks that can, while jobs are at work."""
    chance = random.Random(setting.seed)
    with (
        followed(setting.folder / "clock") as own,
        fleet(str(setting.folder / "jobs.db"), setting.folder, lease=f"{LEASE_SECONDS:g}s") as workers,
    ):
        machine = Machine(workers, own)
        first = _schedule(workers)
        for _ in range(WORKERS):
            machine.start()
        with _producing(workers, chance):
            workers.wait(lambda: workers.finished() > 20, 20)
            for _ in range(setting.pick(1, 8)):
                for trouble in chance.sample(TROUBLES, len(TROUBLES)):
                    trouble(machine, chance)
        _stop(workers)
        acknowledged = workers.history().acknowledged
        workers.wait(lambda: acknowledged <= set(workers.history().done), STUCK_SECONDS + 2)
    return _figure(workers, first)


def _schedule(workers: Fleet) -> int:
    """Have a task run by a schedule; says when it is due first."""
    with closing(producer(workers)) as app:
        made = app.schedules.create("often", tasks.tick, EVERY_MS / 1000)
    assert made.next_at is not None
    return made.next_at


def _stop(workers: Fleet) -> None:
    """Fire no more, and write down what is on record as fired, as if its producer had."""
    with closing(producer(workers)) as app:
        app.schedules.pause("often", by="the row", why="enough")
    for fire in _record(workers):
        if fire.job is not None:
            workers.ledger.note("acknowledged", id=fire.job)


def _record(workers: Fleet) -> list[Fired]:
    return [Fired(*row) for row in ask(workers.url, f"{FIRES} order by due_at", "often")]


@contextmanager
def _producing(workers: Fleet, chance: random.Random) -> Iterator[None]:
    """Enqueue all the time."""
    app = producer(workers)
    over = threading.Event()
    chance = random.Random(chance.random())

    def produce() -> None:
        while not over.wait(chance.uniform(0.02, 0.06)):
            workers.ledger.note("acknowledged", id=tasks.good.enqueue(chance.uniform(0.0, 0.6)).id)

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        app.close()


def steps(machine: Machine, chance: random.Random) -> None:
    """Step by an hour forth and back, and kill a worker that leased by the clock before."""
    for wrong_ms in chance.sample((HOUR_MS, -HOUR_MS), 2):
        machine.step(wrong_ms)
        machine.replace(chance.choice(machine.fleet.workers))
        time.sleep(1.0)
    machine.step(0)
    time.sleep(0.5)


def flaps(machine: Machine, chance: random.Random) -> None:
    """Step to and fro, faster than beats come."""
    for _ in range(10):
        machine.step(chance.choice((HOUR_MS, 0, -HOUR_MS)))
        time.sleep(0.2)
    machine.step(0)


def differs(machine: Machine, chance: random.Random) -> None:
    """Have the clock of one worker differ for longer than a lease, then kill it."""
    for wrong_ms in (TEN_MINUTES_MS, -TEN_MINUTES_MS):
        worker = chance.choice(machine.fleet.workers)
        machine.clocks[worker.pid].wrong_ms = machine.own.wrong_ms + wrong_ms
        time.sleep(LEASE_SECONDS + 0.5)
        machine.replace(worker)


def sleeps(machine: Machine, chance: random.Random) -> None:
    """Have the machine sleep for an hour."""
    machine.suspend(0.5)
    time.sleep(1.0)
    machine.step(0)


TROUBLES = (steps, flaps, differs, sleeps)


def _figure(workers: Fleet, first: int) -> Figure:
    findings = workers.judged()
    took = _took(workers.path)
    longest = max(took.values(), default=0.0)
    late = [job for job, seconds in took.items() if seconds > STUCK_SECONDS]
    fires = _record(workers)
    gaps = list(unexplained(fires, first, at_rate(EVERY_MS)))
    fired, due = sum(fire.job is not None for fire in fires), sum(fire.times for fire in fires)
    text = (
        f"{findings}; the longest took {longest:.1f} s (may take {STUCK_SECONDS:g} s); "
        f"{due:,} due by a schedule, {fired} fired, the others on record, {len(gaps)} lost or doubled"
        + (f"; {gaps[0]}" if gaps else "")
    )
    numbers = {"acknowledged": findings.acknowledged, "longest_s": round(longest, 2), "late": len(late)}
    numbers |= {"due": due, "fired": fired, "gaps": len(gaps)}
    right = findings.valid and not gaps and fired > 0
    return Figure(text, right and not late, numbers, only_slow=right)


def _took(path: Path) -> dict[str, float]:
    """Give how long each job took from its acknowledgement to its end."""
    since: dict[str, float] = {}
    took: dict[str, float] = {}
    for line in records(path):
        if line["what"] == "acknowledged":
            since[line["id"]] = line["at"]
        elif line["what"] == "told":
            took[line["id"]] = line["at"] - since.get(line["id"], line["at"])
    return took


breaks.sql("clock:clamp", ("expired_leases", CLAMP, ""), ("rescue", CLAMP, ""), dialects=("sqlite",))
breaks.python("clock:seen_twice", rescue, "_patience", lambda one: 0.0)

ROW = Row(
    "P11",
    "clocks that step by an hour, flap, differ by ten minutes and sleep",
    f"identity clean, nothing robbed, no fire lost or doubled, nothing stuck longer than lease + 3 beats + 2 s = "
    f"{STUCK_SECONDS:g} s",
    run,
    controls=("clock:clamp",),
    in_full=("clock:seen_twice",),
    takes=1.0,
    control_takes=1.0,
)
