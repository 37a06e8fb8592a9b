"""P3: a worker stands still for three leases in the middle of its jobs, and goes on as if nothing had happened."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from duly import Duly
from duly.store.postgres.schema import bring_up_to_date
from tests.proof import breaks
from tests.proof.checker import judge
from tests.proof.fleet import Fleet, fleet, producer
from tests.proof.ledger import records
from tests.proof.load import numbers, untold
from tests.proof.table import ALL, Figure, Row, Setting
from tests.servers.postgres import PostgresServer

LEASE = 1.0
BEAT = LEASE / 3
STILL = 3 * LEASE
LONG, SHORT = 6.0, 1.0  # still running when its worker wakes up; over by then
AGAIN, AGAIN_LONG = 0.3, 1.5  # elsewhere; some of the long ones run there when the worker wakes up

TOKEN = "and duly_job.token is not distinct from"
breaks.sql(
    "p3:no_fence",
    ("finish", f"{TOKEN} change.token", ""),
    ("finish_plain", f"{TOKEN} input.token", ""),
    dialects=("postgres",),
)
breaks.sql(
    "p3:extend_unfenced",
    ("extend", f"{TOKEN} held.token\n     where", "\n     where"),
    ("extend", f"{TOKEN} held.token\n where", "\n where"),
    dialects=("postgres",),
)


@dataclass
class Seen:
    """What was seen of the workers that stood still."""

    rounds: int = 0
    told_after: list[float] = field(default_factory=list)  # how long after waking up handlers were told
    untold: int = 0  # handlers that were not
    refused: int = 0  # stale writes
    accepted: int = 0


def run(setting: Setting) -> Figure:
    """Have one worker after the other stand still, and judge what it writes when it goes on."""
    chance = random.Random(setting.seed)
    seen = Seen()
    with PostgresServer() as server:
        url = server.new_database()
        bring_up_to_date(url)
        with fleet(url, setting.folder, lease=f"{LEASE}s") as workers:
            for _ in range(3):
                workers.start()
            if not workers.started(3):
                return Figure(f"workers did not start: {workers.logs()}", False)
            app = producer(workers)
            drained = all(_round(workers, app, chance, seen) for _ in range(setting.pick(2, 12)))
            app.close()
        return _figure(workers, seen, drained)


def _round(workers: Fleet, app: Duly, chance: random.Random, seen: Seen) -> bool:
    """Stop a worker in the middle of long and short jobs; False: not all of them were done in the end."""
    kinds = [("lingering", LONG)] * 9 + [("attentive", LONG)] * 6 + [("lingering", SHORT)] * 10
    chance.shuffle(kinds)  # so that every worker has some of each
    jobs = [(_enqueued(workers, app, name, seconds), name, seconds) for name, seconds in kinds]
    ids, long = {job for job, _, _ in jobs}, {job for job, _, seconds in jobs if seconds == LONG}
    workers.wait(lambda: ids <= set(workers.history().runs), 5, every=0.05)
    runs = workers.history().runs
    at_work = {run.pid for job, name, _ in jobs if job in long and name == "lingering" for run in runs.get(job, ())}
    victim = chance.choice([worker for worker in workers.workers if worker.pid in at_work])
    time.sleep(chance.uniform(0.0, 0.4))
    woke = workers.stop_for(victim, STILL)
    time.sleep(2 * BEAT + 0.5)
    _look(workers, victim.pid, long, woke, seen)
    return workers.wait(lambda: ids <= set(workers.history().done), 10)


def _enqueued(workers: Fleet, app: Duly, name: str, seconds: float) -> str:
    first = name == "lingering" and seconds == LONG  # to be rescued
    task = app.tasks[name].using(priority=10 if first else 0)
    job = task.enqueue(seconds, AGAIN_LONG if first else AGAIN)
    workers.ledger.note("acknowledged", id=job.id)
    return job.id


def _look(workers: Fleet, pid: int, long: set[str], woke: float, seen: Seen) -> None:
    """Note which handlers of a worker that woke up were told that their lease is lost, and how soon."""
    seen.rounds += 1
    for job, runs in workers.history().runs.items():
        for run in runs:
            if job not in long or run.pid != pid or (run.ended is not None and run.ended < woke):
                continue
            if run.how == "released" and run.ended is not None:
                seen.told_after.append(run.ended - woke)
            else:
                seen.untold += 1


def _stale(workers: Fleet) -> tuple[int, int]:
    """Count the ends that were refused, and those accepted of an attempt that another had followed already."""
    begun: dict[str, list[tuple[int, float]]] = {}
    for one in records(workers.path):
        if one["what"] == "begun":
            begun.setdefault(one["id"], []).append((one["attempt"], one["at"]))
    told = [(one["id"], one["token"], one["at"]) for one in records(workers.path) if one["what"] == "told"]
    told += [(one["id"], one["attempt"], one["at"]) for one in workers.asides("job.released", "job.failed")]
    accepted = sum(any(n > attempt and at < when for n, at in begun.get(job, ())) for job, attempt, when in told)
    return len(workers.asides("job.lost")), accepted


def _figure(workers: Fleet, seen: Seen, drained: bool) -> Figure:
    history = workers.history()
    found, slowest, open_ends = judge(history), max(seen.told_after, default=0.0), len(untold(history))
    seen.refused, seen.accepted = _stale(workers)
    right = (
        found.valid and drained and not open_ends and not seen.accepted and not seen.untold
        and seen.refused > 0 and bool(seen.told_after)
    )  # fmt: skip
    text = (
        f"{seen.rounds} stops of {STILL:.0f} s, {found}; {seen.accepted} stale writes accepted, "
        f"{seen.refused} refused; "
        f"{len(seen.told_after)} handlers told after {slowest * 1000:.0f} ms at most, {seen.untold} not"
    )
    more = {"accepted": seen.accepted, "refused": seen.refused, "told_ms": slowest * 1000, "not_told": seen.untold}
    numbered = numbers(found, stops=seen.rounds, untold=open_ends, **more)
    return Figure(text, right and slowest <= BEAT, numbered, only_slow=right)


ROW = Row(
    "P3",
    "zombie: a worker stands still for 3 leases in the middle of its jobs",
    "0 stale writes accepted; handlers are told within one beat",
    run,
    controls=("p3:no_fence",),
    in_full=("p3:extend_unfenced",),
    takes=ALL,
)
