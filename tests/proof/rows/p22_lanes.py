"""P22: caps, rates and orders over a fleet whose workers are killed at random, judged by what handlers wrote down.

An attempt counts from its beginning to its end, as its handler wrote them down. One whose worker was killed counts for
as long as nobody can have taken its lease: a whole lease after the last beat that must have come, and the patience of
whoever rescues. A rate is judged by the moments at which handlers begin. The queue promises it for what is claimed, and
250 ms more than the window for the way from there: a handler that began later than that after its claim excuses those
behind it, and is counted.
"""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from duly import Duly
from duly.store.postgres.schema import bring_up_to_date
from tests.proof import breaks
from tests.proof.fleet import Fleet, fleet, producer
from tests.proof.lane_tasks import CAPS, RATES
from tests.proof.ledger import records
from tests.proof.load import Tail
from tests.proof.table import Figure, Row, Setting
from tests.servers.postgres import PostgresServer

APP = "tests.proof.lane_tasks:app"
LEASE = 1.5
BEAT = LEASE / 3
PATIENCE = BEAT + 0.5  # of a rescuer, between two sightings
WINDOW = 1.0
ON_ITS_WAY_MS = 250
CHUNK = 10
SETTLED_S, BROKEN_S = 60.0, 4.0


@dataclass(frozen=True)
class Size:
    """How many jobs of each kind, of how many keys, and how many seconds lie between two kills and two enqueues."""

    jobs: Mapping[str, int]
    keys: int
    every: tuple[float, float]
    kills: int
    pause: float


SHORT = Size({"few": 120, "few_each": 120, "paced": 40, "paced_each": 90, "line": 150}, 6, (0.6, 1.2), 3, 0.08)
FULL = Size(
    {"few": 3000, "few_each": 7000, "paced": 600, "paced_each": 9400, "line": 10_000}, 100, (1.5, 4.0), 10_000, 0.02
)


@dataclass(frozen=True)
class Attempt:
    """One beginning of a handler, and until when it counts."""

    id: str
    task: str
    key: str
    n: int
    begun: float
    until: float
    late_ms: int
    lost_at: float | None = None


@dataclass(frozen=True)
class Part:
    """What was seen on one store."""

    text: str
    wrong: list[str]
    drained: bool
    numbers: dict[str, Any]


def run(setting: Setting) -> Figure:
    """Have lanes served on PostgreSQL and on SQLite; without a defence only where several write at once."""
    size = replace(SHORT, kills=1) if setting.broken else setting.pick(SHORT, FULL)
    with PostgresServer() as server:
        url = server.new_database()
        bring_up_to_date(url)
        parts = [_on(setting, url, "postgres", size, 4 if setting.broken else 8)]
    if not setting.broken:
        parts.append(_on(setting, str(setting.folder / "lanes.db"), "sqlite", size, 4))
    wrong = [each for part in parts for each in part.wrong]
    text = "; ".join(part.text for part in parts) + (f"; first: {wrong[0]}" if wrong else "")
    numbers = {name: number for part in parts for name, number in part.numbers.items()}
    # Without a defence there is no time to wait for the last, and that it takes long proves nothing.
    good = not wrong and (bool(setting.broken) or all(part.drained for part in parts))
    repeat = f"python -m tests.proof --only P22 --seed {setting.seed}{' --full' if setting.full else ''}"
    return Figure(text, good, numbers, repeat, only_slow=not wrong)


def _on(setting: Setting, url: str, kind: str, size: Size, processes: int) -> Part:
    folder = setting.folder / kind
    folder.mkdir()
    chance = random.Random(f"{kind} {setting.seed}")
    with fleet(url, folder, lease=f"{LEASE}s", app=APP) as workers:
        for _ in range(processes):
            workers.start()
        workers.started(processes)
        with closing(producer(workers)) as app:
            producing = threading.Thread(target=_produce, args=(app, workers, size, random.Random(f"p {setting.seed}")))
            producing.start()
            drained = _storm(workers, producing, chance, size, BROKEN_S if setting.broken else SETTLED_S)
    return _judged(workers, kind, drained)


def _produce(app: Duly, workers: Fleet, size: Size, chance: random.Random) -> None:
    """Enqueue in small chunks, of one task after the other; what is more urgent often comes later."""
    made = dict.fromkeys(size.jobs, 0)
    while left := [task for task, count in size.jobs.items() if made[task] < count]:
        task = app.tasks[chance.choice(left)]
        count = min(CHUNK, size.jobs[task.name] - made[task.name])
        numbers = range(made[task.name], made[task.name] + count)
        calls = [task.call(f"k{n % size.keys}", n) for n in numbers]
        for job in task.using(priority=chance.randrange(10)).enqueue_many(calls):
            workers.ledger.note("acknowledged", id=job.id)
        made[task.name] += count
        time.sleep(size.pause)


def _storm(workers: Fleet, producing: threading.Thread, chance: random.Random, size: Size, seconds: float) -> bool:
    """Kill workers until all is done; False: it is not within so many seconds after the last kill."""
    tail = Tail(workers.path)

    def is_done() -> bool:
        tail.look()
        return not producing.is_alive() and not tail.open()

    for _ in range(size.kills):
        if workers.wait(is_done, chance.uniform(*size.every), every=0.05):
            break
        workers.kill(chance.choice(_busy(workers) or workers.at_work()))
        workers.start()
    producing.join()
    return workers.wait(is_done, seconds, every=0.1)


def _busy(workers: Fleet) -> list[subprocess.Popen[bytes]]:
    """Give the workers that have something to lose."""
    at_work: dict[Any, int] = {}
    for one in records(workers.path):
        if one["what"] == "begun":
            at_work[one["id"], one["token"]] = one["pid"]
        elif one["what"] == "ended":
            at_work.pop((one["id"], one["token"]), None)
    pids = set(at_work.values())
    return [worker for worker in workers.workers if worker.pid in pids]


def _judged(workers: Fleet, kind: str, drained: bool) -> Part:
    attempts, findings = list(_attempts(workers)), workers.judged()
    lanes: dict[tuple[str, str], list[Attempt]] = defaultdict(list)
    for one in sorted(attempts, key=lambda one: one.begun):
        lanes[one.task, one.key].append(one)
    excused = [0]
    wrong = [f"{kind}, {task} {key}: {each}" for (task, key), some in lanes.items() for each in _found(some, excused)]
    if not findings.valid and drained:
        wrong.append(f"{kind}: {findings}")
    killed = sum(one["what"] == "killed" for one in records(workers.path))
    waited = [_again_after(one, lanes[one.task, one.key]) for one in attempts if one.lost_at]
    counts = ", ".join(f"{sum(word in each for each in wrong)} {said}" for word, said in SAID.items())
    text = (
        f"{kind}: {len(attempts)} attempts in {len(lanes)} lanes, {killed} processes killed in {len(waited)} of them: "
        f"{counts}" + ("" if drained else f", {len(findings.lost) + len(findings.stuck)} not done")
    )
    numbers = {
        f"{kind} attempts": len(attempts),
        f"{kind} killed": killed,
        f"{kind} lost": len(waited),
        f"{kind} again after, s": round(max(waited, default=0.0), 1),
        f"{kind} wrong": len(wrong),
        f"{kind} late, excused": excused[0],
        f"{kind} by task": {task: sum(one.task == task for one in attempts) for task in SHORT.jobs},
    }
    return Part(text, wrong, drained, numbers)


def _attempts(workers: Fleet) -> Iterator[Attempt]:
    """Read the attempts, each with the moment until which it counts."""
    begun, ended, died, told = [], dict[Any, float](), dict[int, float](), set[tuple[str, int]]()
    for one in records(workers.path):
        match one["what"]:
            case "begun":
                begun.append(one)
            case "ended":
                ended[one["id"], one["token"], one["pid"]] = one["at"]
            case "killed":
                died[one["pid"]] = one["at"]
    for one in workers.asides("job.lease_lost"):
        told.add((one["id"], one["attempt"]))
    for one in begun:
        end, lost_at = ended.get((one["id"], one["token"], one["pid"])), None
        if end is None:  # two beats may have been late, on a machine that has much to do
            lost_at = died.get(one["pid"], one["at"])
            end = max(one["at"], lost_at - 2 * BEAT) + LEASE + PATIENCE - 0.1
        elif (one["id"], one["attempt"]) in told:  # its worker came to no beat for a lease: that long it held
            end = min(end, one["at"] + LEASE)
        yield Attempt(one["id"], one["task"], one["key"], one["n"], one["at"], end, one["late_ms"], lost_at)


def _again_after(lost: Attempt, attempts: Iterable[Attempt]) -> float:
    """Say how many seconds after its worker was killed a job began again."""
    assert lost.lost_at is not None
    return min(
        (one.begun - lost.lost_at for one in attempts if one.id == lost.id and one.begun > lost.begun), default=0.0
    )


def _found(attempts: Sequence[Attempt], excused: list[int]) -> Iterator[str]:
    """Say what is wrong with the attempts of one lane, which come in the order of their beginnings."""
    task = attempts[0].task
    if task in CAPS:
        yield from _crowded(attempts, CAPS[task])
    if task in RATES:
        yield from _too_fast(attempts, RATES[task], excused)
    if task == "line":
        yield from _out_of_order(attempts)


def _crowded(attempts: Sequence[Attempt], most: int) -> Iterator[str]:
    at_work: list[Attempt] = []
    for one in attempts:
        # One that runs again has lost its lease before.
        at_work = [other for other in at_work if other.until > one.begun and other.id != one.id]
        at_work.append(one)
        if len(at_work) > most:
            yield f"{len(at_work)} at once, at most {most}: {[other.n for other in at_work]}"


def _too_fast(attempts: Sequence[Attempt], count: int, excused: list[int]) -> Iterator[str]:
    for first, last in zip(attempts, attempts[count:], strict=False):
        within = last.begun - first.begun
        if within >= WINDOW:
            continue
        if first.late_ms > ON_ITS_WAY_MS:
            excused[0] += 1
        else:
            yield f"{count + 1} began within {within:.3f} s, {count} may: {first.n} to {last.n}"


def _out_of_order(attempts: Iterable[Attempt]) -> Iterator[str]:
    furthest = -1
    for one in attempts:
        if one.n < furthest:
            yield f"{one.n} began after {furthest}"
        furthest = max(furthest, one.n)


SAID = {"at once": "above a cap", "began within": "above a rate", "began after": "out of order"}

COUNTED = "(select count(*) from duly.duly_job where lane = walk_lane and token is not null)"
COUNTED_FIRST = COUNTED.replace("walk_lane", "duly_lane.name")
# What runs is counted by the statement that locks the lane, and so before it waits for the lock.
breaks.sql(
    "p22:count",
    ("hold_lanes", "for update skip locked", "for update"),
    ("hold_lanes", "set held_by = :token::bigint", f"set held_by = {COUNTED_FIRST}"),
    ("claim_lanes", "on duly_lane.name = walk_lane and held_by = :token::bigint", "on duly_lane.name = walk_lane"),
    ("claim_lanes", f"{COUNTED} as running", "coalesce(held_by, 0) as running"),
    dialects=("postgres",),
)
breaks.sql("p22:permit", ("claim_lanes", "select now, spent.n)", "select now, 0)"), dialects=("postgres",))
breaks.sql(
    "p22:head",
    ("claim_lanes", "seq is not null order by seq", "seq is not null and state = 'ready' order by seq"),
    dialects=("postgres",),
)

ROW = Row(
    "P22",
    "lanes: caps, rates and orders over 8 processes (PostgreSQL) and 4 (SQLite), workers killed at random",
    "no cap or rate exceeded, no order broken, all done; 10,000 jobs of each in full",
    run,
    controls=("p22:count", "p22:permit", "p22:head"),
    takes=1.5,
    control_takes=1.0,
)
