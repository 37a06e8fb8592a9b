"""P5: poison pills among good jobs die alone, each with its reason; no good job dies with them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duly import Duly
from duly.rules.lifecycle import KILLED_ITS_WORKER
from duly.store.postgres.schema import bring_up_to_date
from tests.proof import breaks, tasks
from tests.proof.checker import Findings, judge, read
from tests.proof.fleet import Fleet, fleet, producer
from tests.proof.keeper import Keeper
from tests.proof.ledger import records
from tests.proof.table import ALL, Figure, Row, Setting
from tests.servers.postgres import PostgresServer

LEASE = "2s"
WORKERS = 2
GOOD = 2_000
MEASURED = 400  # good jobs before the first pill and after the last, whose rates are compared
RATE = 300  # jobs a second that all slots together can do: what is lost is lost by pills, not by the processor
LEAST_SHARE = 0.8
DEADLY = ("exit", "segfault", "memory")
ENDED = ("succeeded", "partial", "dead", "cancelled")
HARMFUL = ("sys_exit", "recursion", "result", "huge_error", "bad_text")


@dataclass(frozen=True)
class Scene:
    """What came of good jobs and pills together."""

    slots: int
    findings: Findings
    good_dead: int
    wrong_pills: tuple[str, ...]
    pills: int
    share: float
    deaths: int
    hung: int

    @property
    def good(self) -> bool:
        """Whether all is as promised."""
        return self.right and self.share >= LEAST_SHARE

    @property
    def right(self) -> bool:
        """Whether all is as promised but for the time it took."""
        return not (self.good_dead or self.wrong_pills) and self.findings.valid

    def __str__(self) -> str:
        wrong = f", WRONG: {'; '.join(self.wrong_pills[:3])}" if self.wrong_pills else ""
        return (
            f"{self.slots} leases: {self.pills} pills killed {self.deaths} and hung {self.hung} workers, "
            f"{self.good_dead} good dead, {self.findings}, {self.share:.0%} of throughput{wrong}"
        )


def run(setting: Setting) -> Figure:
    """Mix pills into good jobs, at few leases a process and at many."""
    scenes = []
    for store, slots in _scenes(setting):
        folder = setting.folder / f"{store}-{slots}"
        folder.mkdir()
        with _database(store, folder) as url:
            scenes.append(_scene(url, folder, slots, setting))
    only_slow = all(scene.right for scene in scenes)
    return Figure("; ".join(map(str, scenes)), all(s.good for s in scenes), _numbers(scenes), only_slow=only_slow)


def _scenes(setting: Setting) -> list[tuple[str, int]]:
    if setting.broken is not None or not setting.full:
        return [("sqlite", 100)]
    return [(store, slots) for store in ("sqlite", "postgres") for slots in (20, 100)]


@contextmanager
def _database(store: str, folder: Path) -> Iterator[str]:
    if store == "sqlite":
        yield str(folder / "jobs.db")
        return
    with PostgresServer() as server:
        url = server.new_database()
        bring_up_to_date(url)
        yield url


def _scene(url: str, folder: Path, slots: int, setting: Setting) -> Scene:
    chance = random.Random(f"{setting.seed} {slots}")
    with fleet(url, folder, lease=LEASE) as workers, Keeper(workers, WORKERS, stale_s=3.0, concurrency=slots) as keeper:
        app = producer(workers)
        seconds, patience = slots * WORKERS / RATE, 10 if setting.broken else setting.pick(30, 120)
        before = _enqueue(workers, [seconds] * MEASURED)
        workers.wait(lambda: _ended(workers, before) == len(before), 30)
        pills, among = _mixed(workers, chance, seconds, setting.pick(1, 3))
        workers.wait(lambda: _isolated(workers, pills), 10 if setting.broken else 40)
        after = _enqueue(workers, [seconds] * MEASURED)
        good = [*before, *among, *after]
        workers.wait(lambda: _ended(workers, good) == len(good) and _over(app, pills), patience, every=0.5)
        wrong = (*_wrong(app, pills), *_returned(workers, pills))
        share = _rate(workers, after) / _rate(workers, before)
        dead = _dead(workers, app, good)
        app.close()
    findings = _judged(workers, set(pills))
    return Scene(slots, findings, dead, wrong, len(pills), share, len(keeper.deaths), len(keeper.hung))


def _enqueue(workers: Fleet, seconds: list[float]) -> list[str]:
    made = tasks.good.enqueue_many(tasks.good.call(one) for one in seconds)
    return [_acknowledged(workers, job.id) for job in made]


def _acknowledged(workers: Fleet, job: str) -> str:
    workers.ledger.note("acknowledged", id=job)
    return job


def _mixed(workers: Fleet, chance: random.Random, seconds: float, times: int) -> tuple[dict[str, str], list[str]]:
    """Enqueue pills and good jobs in an order that follows from the seed."""
    hows = [("pill", how) for how in (*DEADLY, *HARMFUL)] + [("pill_in_thread", chance.choice(DEADLY))]
    hows += [("endless", ""), ("blocking", "")]
    places = sorted(chance.sample(range(GOOD - 2 * MEASURED), len(hows) * times))
    chance.shuffle(hows)
    pills: dict[str, str] = {}
    good: list[str] = []
    for place, (task, how) in zip(places, hows * times, strict=True):
        good += _enqueue(workers, [seconds] * (place - len(good)))
        made = getattr(tasks, task).enqueue(*([how] if how else []))
        pills[_acknowledged(workers, made.id)] = how or task
    return pills, good + _enqueue(workers, [seconds] * (GOOD - 2 * MEASURED - len(good)))


def _ended(workers: Fleet, jobs: Iterable[str]) -> int:
    """Count those that came to their end; a worker may be killed between a commit and telling of it."""
    history = workers.history()
    return sum(job in history.done or any(run.how == "ok" for run in history.runs[job]) for job in jobs)


def _dead(workers: Fleet, app: Duly, good: list[str]) -> int:
    """Count the good jobs that are dead; of what dies in a rescue no worker tells, so the database is asked."""
    runs = workers.history().runs
    unended = [job for job in good if not any(run.how == "ok" for run in runs[job])]
    return sum((record := app.get(job)) is not None and record.state == "dead" for job in unended)


def _over(app: Duly, pills: Iterable[str]) -> bool:
    return all((record := app.get(job)) is not None and record.state in ENDED for job in pills)


def _isolated(workers: Fleet, pills: dict[str, str]) -> bool:
    """Whether each pill that takes its process down has died, or has begun in a process of its own."""
    history = workers.history()
    own = {worker.pid for worker in workers.workers} | set(history.died)
    hard = [job for job, how in pills.items() if how in (*DEADLY, "blocking")]
    return all(job in history.done or any(run.pid not in own for run in history.runs[job]) for job in hard)


def _wrong(app: Duly, pills: dict[str, str]) -> Iterator[str]:
    """Say which pills did not end as they must."""
    for job, how in pills.items():
        record = app.get(job)
        if record is None or record.state != "dead":
            yield f"{how} is {record and record.state}"
        elif how in DEADLY and (record.reason, record.crashes) != (KILLED_ITS_WORKER, 3):
            yield f"{how} died after {record.crashes} crashes: {record.reason}"
        elif not record.reason or not record.error:
            yield f"{how} died without a reason"


def _returned(workers: Fleet, pills: dict[str, str]) -> Iterator[str]:
    """Say which pills were among others again after they had taken a process down."""
    history = workers.history()
    own = {worker.pid for worker in workers.workers} | set(history.died)
    for job, how in pills.items():
        runs = sorted(history.runs[job], key=lambda run: run.begun)
        among_others = sum(run.pid in own for run in runs)
        if how in (*DEADLY, "blocking") and among_others > 1:
            yield f"{how} ran among others {among_others} times"


def _rate(workers: Fleet, jobs: list[str]) -> float:
    """Count how many jobs ended a second, without the first and the last tenth."""
    history = workers.history()
    ends = sorted(run.ended for job in jobs for run in history.runs[job] if run.ended is not None)
    tenth = len(ends) // 10
    return (len(ends) - 2 * tenth) / (ends[-tenth - 1] - ends[tenth]) if tenth else 0.0


def _judged(workers: Fleet, pills: set[str]) -> Findings:
    """Judge the good jobs; what ran in a child of a worker that died, died with it."""
    lines = [line for line in records(workers.path) if line.get("id") not in pills]
    died = {line["pid"]: line["at"] for line in lines if line["what"] == "killed"}
    orphans = [
        {"what": "killed", "pid": line["pid"], "at": died[line["parent"]]}
        for line in lines
        if line["what"] == "begun" and line["parent"] in died
    ]
    return judge(read([*lines, *orphans]))


def _numbers(scenes: list[Scene]) -> dict[str, Any]:
    return {
        f"{scene.slots}_leases_{number}": {
            "pills": scene.pills,
            "good_dead": scene.good_dead,
            "share_of_throughput": round(scene.share, 3),
            "workers_killed": scene.deaths,
            "workers_hung": scene.hung,
            "duplicates": scene.findings.duplicates,
        }
        for number, scene in enumerate(scenes)
    }


# A crash counts against everybody who was there, and nobody is run alone for it.
breaks.sql(
    "poison:suspects_run_alone",
    ("rescue", "suspect and worker not like '%/child' as crashed", "1 as crashed"),
    ("rescue", "suspect = 1, token = null", "suspect = 0, token = null"),
    dialects=("sqlite",),
)

ROW = Row(
    "P5",
    "poison pills among 2,000 good jobs, at 20 and at 100 leases a process",
    "pills dead with their reason, the deadly ones after 3 crashes alone; 0 good dead, all done; >= 80 % of throughput",
    run,
    controls=("poison:suspects_run_alone",),
    takes=ALL,
    control_takes=1.0,
)
