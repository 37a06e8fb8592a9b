"""P7: PostgreSQL is restarted, crashes, and is away for longer than the leases of what runs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from duly.store import driver
from duly.worker.upkeep import rescue
from tests.proof.breaks import BREAKS
from tests.proof.checker import judge
from tests.proof.fleet import Fleet, four_on_postgres
from tests.proof.load import Load, burnt, numbers, untold
from tests.proof.table import ALL, Figure, Row, Setting
from tests.servers.postgres import Mode, PostgresServer

LEASE = 1.0
WITHIN = 5.0
WORK = ((8, "sleepy", (0.3,)), (2, "quick", (1,)))
AWAY = 2.5 * LEASE
LONG = (8, "sleepy", (AWAY + 1.5,))  # begin before the server goes, end after it is back


def _hasty() -> Callable[[], None]:
    """Take jobs at first sight of an ended lease, whatever happened to the database meanwhile."""
    patience = rescue._patience
    rescue._patience = lambda one: 0.0
    driver.Driver.failures = property(lambda self: 0, lambda self, value: None)  # type: ignore[assignment]

    def undo() -> None:
        rescue._patience = patience
        del driver.Driver.failures  # type: ignore[misc]

    return undo


BREAKS["p7:rescue_at_first_sight"] = _hasty


def run(setting: Setting) -> Figure:
    """Take the server away in three ways under load."""
    with four_on_postgres(setting.folder, lease_s=LEASE) as (server, workers):
        return _outages(setting, server, workers)


def _outages(setting: Setting, server: PostgresServer, workers: Fleet) -> Figure:
    chance = random.Random(setting.seed)
    ways: list[tuple[Mode, float]] = [("fast", 0.0), ("kill", 0.0), ("immediate", AWAY)]
    if setting.broken:
        ways = ways[2:]  # the one that is longer than a lease
    backs: list[float | None] = []
    with Load(workers, WORK, seed=setting.seed) as load:
        time.sleep(0.5)
        before = load.measured(setting.pick(2, 10))
        for mode, seconds in ways * setting.pick(1, 5):
            if seconds:
                load.enqueue(*LONG, priority=10)
            time.sleep(chance.uniform(0.4, 0.8))
            server.halt(mode)
            time.sleep(seconds)
            server.start()
            backs.append(load.back_after(0.95 * before, time.monotonic(), WITHIN))
        drained = load.drained(10)
    alive = workers.alive()
    workers.end()
    history = workers.history()
    found, again, open_ends = judge(history), burnt(workers.path), len(untold(history))
    slowest = max((WITHIN if back is None else back) for back in backs)
    right = found.valid and drained and not again and not open_ends and alive == 4
    text = (
        f"{len(backs)} outages, {found}, {again} attempts counted, {alive} of 4 workers alive; "
        f"95 % of {before:.0f} jobs/s " + ("NOT " if None in backs else "") + f"within {slowest:.1f} s"
    )
    more = {"burnt": again, "untold": open_ends, "alive": alive, "before": before, "back_s": backs}
    return Figure(text, right and None not in backs, numbers(found, **more), only_slow=right)


ROW = Row(
    "P7",
    "PostgreSQL restarted, crashed, and away for longer than the lease",
    "clean, 0 run twice, 0 counted as crashes, workers alive, 95 % within 5 s of its return",
    run,
    controls=("p7:rescue_at_first_sight",),
    takes=ALL,
    control_takes=1.0,
)
