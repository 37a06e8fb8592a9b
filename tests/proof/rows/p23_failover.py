"""P23: the primary of PostgreSQL is killed under load, and its synchronous standby is promoted."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from duly.store.postgres.schema import bring_up_to_date
from tests.proof.breaks import BREAKS
from tests.proof.checker import judge
from tests.proof.fleet import Fleet, fleet
from tests.proof.load import Load, burnt, numbers, untold
from tests.proof.table import ALL, Figure, Row, Setting
from tests.servers.pair import Pair

LEASE = 1.0
WITHIN = 5.0
CUT_OFF = 1.0
WORK = ((8, "sleepy", (0.3,)), (2, "quick", (1,)), (1, "quick", (2,)))
LONG = (8, "sleepy", (3.0,))  # begin before the primary goes, end after the promotion


def _asynchronous() -> Callable[[], None]:
    """Change nothing here: the row has commits wait for no standby, and cuts that off a second before the kill."""
    return lambda: None


BREAKS["p23:asynchronous"] = _asynchronous


def run(setting: Setting) -> Figure:
    """Kill primaries under load."""
    with Pair(synchronous=not setting.broken) as pair:
        bring_up_to_date(pair.url)
        with fleet(pair.url, setting.folder, lease=f"{LEASE}s") as workers:
            for _ in range(3):
                workers.start()
            if not workers.started(3):
                raise AssertionError(f"workers did not start: {workers.logs()}")
            return _failovers(setting, pair, workers)


def _failovers(setting: Setting, pair: Pair, workers: Fleet) -> Figure:
    chance = random.Random(setting.seed)
    rounds = 1 if setting.broken else setting.pick(3, 12)
    backs: list[float | None] = []
    with Load(workers, WORK, seed=setting.seed) as load:
        time.sleep(0.5)
        before = load.measured(setting.pick(1, 10))
        for number in range(rounds):
            if number:
                pair.rejoin()
            load.enqueue(*LONG, priority=10)
            time.sleep(chance.uniform(0.4, 0.8))
            if setting.broken:
                pair.cut()
                time.sleep(CUT_OFF)
            pair.kill_primary()
            time.sleep(chance.uniform(0.2, 1.5))
            pair.promote()
            backs.append(load.back_after(0.5 * before, time.monotonic(), WITHIN))
        drained = load.drained(2 if setting.broken else 10)
    alive = workers.alive()
    workers.end()
    history = workers.history()
    found, again, open_ends = judge(history), burnt(workers.path), len(untold(history))
    slowest = max((WITHIN if back is None else back) for back in backs)
    right = found.valid and drained and not again and not open_ends and alive == 3
    text = (
        f"{rounds} primaries killed, {found}, {again} attempts counted, {alive} of 3 workers alive; "
        f"at work again {'NOT ' if None in backs else ''}within {slowest:.1f} s of the promotion"
    )
    more = {"burnt": again, "untold": open_ends, "alive": alive, "before": before, "back_s": backs}
    return Figure(text, right and None not in backs, numbers(found, **more), only_slow=right)


ROW = Row(
    "P23",
    "failover: the primary is killed under load, its synchronous standby promoted",
    "clean, 0 run twice, workers alive, at work again within 5 s",
    run,
    controls=("p23:asynchronous",),
    takes=ALL,
    control_takes=1.0,
)
