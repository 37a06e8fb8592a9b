"""P1: workers on PostgreSQL are killed one after the other, while jobs keep coming."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

from duly.worker.upkeep import rescue
from tests.proof import breaks
from tests.proof.breaks import BREAKS
from tests.proof.checker import History, judge
from tests.proof.fleet import Fleet, four_on_postgres
from tests.proof.load import Load, numbers, untold
from tests.proof.table import ALL, Figure, Row, Setting

EVERY = 2.0
LEASE = 1.0
BEAT = LEASE / 3
WITHIN = LEASE + BEAT + 2  # how soon the fleet, with its four workers there again, is to be as fast as before
WORK = ((7, "sleepy", (0.3,)), (2, "quick", (1,)), (1, "flaky", (1,)))

breaks.sql(
    "p1:ended_or_not",
    ("expired_leases", "(lease_until <= now or", "(true or"),
    ("rescue", "(duly_job.lease_until <= now or", "(true or"),
    dialects=("postgres",),
)
breaks.python("p1:at_first_sight", rescue, "_patience", lambda one: 0.0)


def _both() -> Callable[[], None]:
    first, second = BREAKS["p1:ended_or_not"](), BREAKS["p1:at_first_sight"]()

    def undo() -> None:
        second()
        first()

    return undo


BREAKS["p1:rescue_unguarded"] = _both


def run(setting: Setting) -> Figure:
    """Kill workers at random, and judge what became of every job."""
    with four_on_postgres(setting.folder, lease_s=LEASE) as (_, workers):
        return _storm(setting, workers)


def _storm(setting: Setting, workers: Fleet) -> Figure:
    chance = random.Random(setting.seed)
    kills = 1 if setting.broken else setting.pick(3, 30)
    with Load(workers, WORK, seed=setting.seed) as load:
        time.sleep(0.5)
        before = load.measured(setting.pick(1.5, 5))
        for number in range(kills):
            time.sleep(EVERY if number else 0.0)
            workers.kill(chance.choice(workers.at_work()))
            workers.start()
        workers.started(4 + kills)
        back = load.back_after(0.9 * before, time.monotonic(), WITHIN)
        drained = load.drained(3 if setting.broken else 10)
    workers.end()
    return _figure(kills, before, back, drained, workers.history())


def _figure(kills: int, before: float, back: float | None, drained: bool, history: History) -> Figure:
    found, early, open_ends = judge(history), _early(history), len(untold(history))
    right = found.valid and found.acknowledged > 0 and drained and not early and not open_ends
    again = f"90 % of {before:.0f} jobs/s " + (f"after {back:.1f} s" if back else f"not within {WITHIN:.1f} s")
    text = f"{kills} kills, {found}, {early} of them before the lease had ended; {again}"
    more = {"kills": kills, "early": early, "untold": open_ends, "before": before, "back_s": back}
    return Figure(text, right and back is not None, numbers(found, **more), only_slow=right)


def _early(history: History) -> int:
    """Count the runs that began again so soon after a kill that the lease of the first cannot have ended.

    It was extended a beat before the kill at the latest.
    """
    count = 0
    for runs in history.runs.values():
        for first, again in itertools.pairwise(sorted(runs, key=lambda run: run.begun)):
            died = history.died.get(first.pid)
            if died is not None and first.how not in ("failed", "released"):
                count += again.begun < max(first.begun, died - BEAT) + LEASE - 0.1
    return count


ROW = Row(
    "P1",
    "kill storm on PostgreSQL: 4 workers, a random one killed time and again",
    "0 lost, unexpected, doubled, stuck; duplicates only of ended leases; 90 % within lease + beat + 2 s",
    run,
    controls=("p1:rescue_unguarded",),
    takes=ALL,
    control_takes=1.0,
)
