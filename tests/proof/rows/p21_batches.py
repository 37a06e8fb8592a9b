"""P21: the last two jobs of a batch end at the same moment in two processes, one of which is killed.

Each batch has a job for either of two workers, who serve a queue each. Both handlers hold their jobs until the same
moment and end then; around that moment one of the workers is killed. The callbacks write down that they ran, in a file:
each comes once.
"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from duly import Duly
from duly.store.postgres.schema import bring_up_to_date
from tests.proof import breaks
from tests.proof.fleet import Fleet, fleet, producer
from tests.proof.ledger import records
from tests.proof.table import Figure, Row, Setting
from tests.servers.postgres import PostgresServer

QUEUES = ("left", "right")
LEASE = "1s"
AT_ONCE = 20  # batches that end within one wave, one shortly after the other
APART_S = 0.004
KILLED_WITHIN_S = AT_ONCE * APART_S + 0.03
SETTLED_S = 30.0
CALM_S = 4.0  # in which a lease ends and its job is rescued, so that what has not come by then does not come
CALLBACKS: dict[str, Any] = {
    "on_complete": "batch_complete",
    "on_success": "batch_success",
    "on_first_dead": "batch_first_dead",
}


@dataclass(frozen=True)
class Trial:
    """A batch, and how many of its two jobs must die."""

    batch: str
    dying: int

    @property
    def expected(self) -> dict[str, int]:
        """How often each callback is due."""
        return {"batch_complete": 1, "batch_success": int(not self.dying), "batch_first_dead": int(self.dying > 0)}


@dataclass(frozen=True)
class Part:
    """What the trials on one store came to."""

    text: str
    wrong: list[str]
    numbers: dict[str, Any]


def run(setting: Setting) -> Figure:
    """Have waves of batches end, on PostgreSQL and on SQLite; without the defence only where two write at once."""
    waves = setting.pick(1, 25)
    with PostgresServer() as server:
        url = server.new_database()
        bring_up_to_date(url)
        parts = [_on(setting, url, "postgres", waves)]
    if not setting.broken:
        parts.append(_on(setting, str(setting.folder / "batches.db"), "sqlite", waves))
    wrong = [each for part in parts for each in part.wrong]
    text = "; ".join(part.text for part in parts) + (f"; first: {wrong[0]}" if wrong else "")
    numbers = {name: number for part in parts for name, number in part.numbers.items()}
    return Figure(text, not wrong, numbers, f"python -m tests.proof --only P21 --seed {setting.seed}")


def _on(setting: Setting, url: str, kind: str, waves: int) -> Part:
    folder = setting.folder / kind
    folder.mkdir()
    chance = random.Random(f"{kind} {setting.seed}")
    trials: list[Trial] = []
    with fleet(url, folder, lease=LEASE) as workers:
        for queue in QUEUES:
            _start(workers, queue)
        workers.started(len(QUEUES))
        with closing(producer(workers)) as app:
            for _ in range(waves):
                trials += _wave(app, workers, chance, missed=bool(setting.broken))
    return _judged(workers, kind, trials)


def _start(workers: Fleet, queue: str) -> None:
    workers.start(concurrency=AT_ONCE + 5, more=("--queues", f"{queue},default"))


def _wave(app: Duly, workers: Fleet, chance: random.Random, *, missed: bool) -> list[Trial]:
    """Make batches whose jobs end at the same moment, and kill one of their workers about then.

    Where callbacks are missed there is no need to wait for them longer than anything happens at all.
    """
    there = len(workers.asides("worker.started"))
    meet_at = time.monotonic() + 1.5
    trials = [_trial(app, workers, chance, meet_at + number * APART_S) for number in range(AT_ONCE)]
    place = chance.randrange(len(QUEUES))
    time.sleep(max(0.0, meet_at + chance.uniform(-0.01, KILLED_WITHIN_S) - time.monotonic()))
    workers.kill(workers.workers[place])
    _start(workers, QUEUES[place])
    # The one that takes the place of another stands last: the first of them is the other one.
    workers.workers.insert(place, workers.workers.pop())
    workers.started(there + 1)
    workers.wait(lambda: not _left(workers, trials) or (missed and _is_calm(workers)), SETTLED_S)
    return trials


def _is_calm(workers: Fleet) -> bool:
    last = max(one["at"] for one in records(workers.path))
    return time.monotonic() - last > CALM_S


def _trial(app: Duly, workers: Fleet, chance: random.Random, at: float) -> Trial:
    dying = chance.choice((0, 0, 1, 2))
    with app.batch("two", **CALLBACKS) as batch:
        for number, queue in enumerate(QUEUES):
            job = app.tasks["meet_and_die" if number < dying else "meet"].using(queue=queue).enqueue(at)
            if number >= dying:  # one that dies may do so with its worker, and nobody writes it down
                workers.ledger.note("acknowledged", id=job.id)
    return Trial(batch.id, dying)


def _calls(workers: Fleet) -> dict[str, dict[str, Counter[str]]]:
    """Count by batch and callback how often each job of it was run to its end."""
    begun = {one["id"]: one for one in records(workers.path) if one["what"] == "begun" and one.get("batch")}
    calls: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for one in records(workers.path):
        if one["what"] == "ended" and one["how"] == "ok" and one["id"] in begun:
            about = begun[one["id"]]
            calls[about["batch"]][about["which"]][one["id"]] += 1
    return calls


def _left(workers: Fleet, trials: Iterable[Trial]) -> list[Trial]:
    """Give the trials of which a callback is still due."""
    calls = _calls(workers)
    return [one for one in trials if any(not calls[one.batch][name] for name, due in one.expected.items() if due)]


def _judged(workers: Fleet, kind: str, trials: Sequence[Trial]) -> Part:
    wrong = [f"{kind}: {each}" for each in _unexpected(workers, trials)]
    missing = sum(each.endswith("was not called") for each in wrong)
    findings = workers.judged()
    if not findings.valid:
        wrong.append(f"{kind}: {findings}")
    killed = {one["pid"] for one in records(workers.path) if one["what"] == "killed"}
    text = (
        f"{kind}: {len(trials)} batches ended by two at once, {len(killed)} kills, {missing} callbacks missed, "
        f"{len(wrong) - missing} otherwise wrong"
    )
    numbers = {f"{kind} trials": len(trials), f"{kind} kills": len(killed), f"{kind} wrong": len(wrong)}
    return Part(text, wrong, numbers)


def _unexpected(workers: Fleet, trials: Iterable[Trial]) -> Iterator[str]:
    """Hold the calls against what is due. One job that is run again, as its worker was killed, is one call."""
    calls = _calls(workers)
    for one in trials:
        for name, due in one.expected.items():
            made = calls[one.batch][name]
            if due and not made:
                yield f"{name} of {one.batch}, of whose two jobs {one.dying} died, was not called"
            if len(made) > due:
                yield f"{name} of {one.batch} is {len(made)} jobs, of whose two jobs {one.dying} died"


ROWS_LEFT = "not exists (select 1 from duly.duly_job where batch_id = duly_batch.id and finished_at is null)"
breaks.sql(
    "p21:counter",
    ("ended_batch", "order by id for update", "order by id"),
    ("ended_batch", "where duly_batch.id = any (array(select id from locked)) and", "where false and"),
    ("finish_batched", "order by id for update", "order by id"),
    ("finish_batched", "where duly_batch.id = any (array(select id from locked)) and", "where false and"),
    ("ended_callbacks", "(on_complete, open = 0 and", f"(on_complete, {ROWS_LEFT} and"),
    ("ended_callbacks", "(on_success, open = 0 and", f"(on_success, {ROWS_LEFT} and"),
    dialects=("postgres",),
)

ROW = Row(
    "P21",
    "batches: the last two jobs end at the same moment in two processes, one of which is killed",
    "each callback once, in 40 trials (1,000 in full) on PostgreSQL and SQLite",
    run,
    controls=("p21:counter",),
    takes=1.0,
)
