"""P8: every connection is ended twice a second, and then no new one is to be had."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg

from duly.errors import AnswerLost
from duly.store.driver import Driver
from duly.store.op import Op, Rows
from tests.proof import breaks
from tests.proof.checker import judge
from tests.proof.fleet import Fleet, four_on_postgres
from tests.proof.load import Load, burnt, numbers, untold
from tests.proof.table import ALL, Figure, Row, Setting
from tests.servers.postgres import PostgresServer

LEASE = 1.0
WITHIN = 5.0
MOST_CONNECTIONS = 40
FEW = {"max_connections": str(MOST_CONNECTIONS)}
MOST_PROCESSOR = 0.25  # of one, for each worker that can do nothing
WORK = ((8, "sleepy", (0.3,)), (2, "quick", (1,)))
END_ALL = (
    "select count(pg_terminate_backend(pid)) from pg_stat_activity "
    "where backend_type = 'client backend' and pid <> pg_backend_pid() and application_name <> 'proof'"
)


async def _taken_for_no(self: Driver, op: Op[Any]) -> Rows:
    """Take a lost answer for one that says that nothing happened."""
    try:
        return await self.aexecute(op)
    except AnswerLost:
        return []


breaks.python("p8:not_asked_again", Driver, "_arows", _taken_for_no)


def run(setting: Setting) -> Figure:
    """End connections under load, then take all of them, then let go."""
    with four_on_postgres(setting.folder, lease_s=LEASE, settings=FEW) as (server, workers):
        return _storm(setting, server, workers)


def _storm(setting: Setting, server: PostgresServer, workers: Fleet) -> Figure:
    chance = random.Random(setting.seed)
    ended = 0
    with Load(workers, WORK, seed=setting.seed) as load:
        time.sleep(0.5)
        before = load.measured(setting.pick(2, 10))
        with psycopg.connect(server.url, autocommit=True, application_name="proof") as own:
            until = time.monotonic() + setting.pick(5, 60)
            while time.monotonic() < until:
                ended += _number(own.execute(END_ALL))
                time.sleep(chance.uniform(0.4, 0.6))
        after_storm = load.back_after(0.95 * before, time.monotonic(), WITHIN)
        with _no_connections_left(server):
            used = _used(workers, setting.pick(2, 10))
        after_dearth = load.back_after(0.95 * before, time.monotonic(), WITHIN)
        drained = load.drained(3 if setting.broken else 10)
    alive = workers.alive()
    workers.end()
    history = workers.history()
    found, again, open_ends = judge(history), burnt(workers.path), len(untold(history))
    backs = [after_storm, after_dearth]
    right = found.valid and drained and not again and not open_ends and alive == 4 and ended > 0
    good = right and None not in backs and used <= MOST_PROCESSOR
    slowest = max((WITHIN if back is None else back) for back in backs)
    text = (
        f"{ended} connections ended, {found}, {again} attempts counted, {alive} of 4 workers alive; "
        f"95 % of {before:.0f} jobs/s " + ("NOT " if None in backs else "") + f"within {slowest:.1f} s; "
        f"a worker without connection uses {used:.1%} of a processor"
    )
    more = {"ended": ended, "burnt": again, "untold": open_ends, "before": before, "back_s": backs, "processor": used}
    return Figure(text, good, numbers(found, alive=alive, **more), only_slow=right)


def _number(cursor: psycopg.Cursor[Any]) -> int:
    row = cursor.fetchone()
    return int(row[0]) if row else 0


@contextmanager
def _no_connections_left(server: PostgresServer) -> Iterator[None]:
    """Take every connection that the server has to give, those of the workers too."""
    with ExitStack() as taken:
        own = taken.enter_context(psycopg.connect(server.url, autocommit=True, application_name="proof"))
        held, until = 1, time.monotonic() + 10
        while held < MOST_CONNECTIONS and time.monotonic() < until:
            own.execute(END_ALL)
            try:
                while True:
                    taken.enter_context(psycopg.connect(server.url, autocommit=True, application_name="proof"))
                    held += 1
            except psycopg.OperationalError:
                pass
        if held < MOST_CONNECTIONS:
            raise AssertionError(f"only {held} of {MOST_CONNECTIONS} connections could be taken")
        yield


def _used(workers: Fleet, seconds: float) -> float:
    """Say how much of a processor the busiest worker uses from now on."""
    before = {worker.pid: _processor_seconds(worker.pid) for worker in workers.workers}
    time.sleep(seconds)
    return max((_processor_seconds(pid) - at) / seconds for pid, at in before.items())


def _processor_seconds(pid: int) -> float:
    _, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    fields = after.split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


ROW = Row(
    "P8",
    "all connections ended twice a second, then none to be had",
    "clean, 0 run twice, 95 % after, no busy loop",
    run,
    controls=("p8:not_asked_again",),
    takes=ALL,
    control_takes=1.0,
)
