"""duly, in the same shape as its peers, plus what the idle figures need.

`fill URL JOBS KIND`, then `work URL TALLY KIND`, then `recorded URL`; KIND is `async` or `sync`.
For the idle figures: `serve URL LOG`, and beside it `trickle URL FIRST COUNT GAP`.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import sys
import time
from importlib.metadata import version
from typing import Any

from tally import Tally

from duly import Duly

CONCURRENCY = 10
DONE = "select count(*), max(finished_at) from {}duly_done where state = 'succeeded'"
WAITING = "select count(*) from {}duly_job"


def fill(url: str, jobs: str, kind: str) -> None:
    if is_postgres(url):
        from duly.store.postgres import bring_up_to_date

        bring_up_to_date(url)
    app = Duly(url)
    no_op = declare(app, kind, print)
    no_op.enqueue_many(no_op.call(number) for number in range(int(jobs)))


def work(url: str, tally_path: str, kind: str) -> None:
    tally = Tally(tally_path)
    app = Duly(url)
    declare(app, kind, tally.note)
    app.run(concurrency=CONCURRENCY, drain=True)
    tally.tell(versions={"duly": version("duly"), "psycopg": version("psycopg"), "sqlite": sqlite3.sqlite_version})


def declare(app: Duly, kind: str, note: Any) -> Any:
    """Declare the task under one name, so that whoever fills and whoever works mean the same."""

    async def later(n: int) -> None:
        note(n)

    def at_once(n: int) -> None:
        note(n)

    return app.task(queue="default", name="no_op")(later if kind == "async" else at_once)


def recorded(url: str) -> None:
    """Tell how many jobs are recorded as done, how many still wait, and when the last was written down."""
    schema = "duly." if is_postgres(url) else ""
    connection = connect(url)
    done, last_at = connection.execute(DONE.format(schema)).fetchone()
    [waiting] = connection.execute(WAITING.format(schema)).fetchone()
    connection.close()
    print(json.dumps({"done": done, "waiting": waiting, "recorded_at": last_at / 1000}))


def connect(url: str) -> Any:
    """Open the database by hand. A worker on SQLite must not hold a PostgreSQL driver that it has no use for."""
    if not is_postgres(url):
        return sqlite3.connect(url)
    import psycopg

    return psycopg.connect(url)


def serve(url: str, log_path: str) -> None:
    """Work until told to stop; each job leaves its number and the time it started in the log."""
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(n: int) -> None:
        now = time.time()
        os.write(log, f"{n} {now}\n".encode())

    app = Duly(url)
    declare(app, "async", note)
    app.run(concurrency=CONCURRENCY)


def trickle(url: str, first: str, count: str, gap: str) -> None:
    """Enqueue one job after the other, never in step with anything, and tell when each call returned."""
    app = Duly(url)
    no_op = declare(app, "async", print)
    returned = {}
    for number in range(int(first), int(first) + int(count)):
        no_op.enqueue(number)
        returned[number] = time.time()
        time.sleep(float(gap) * random.uniform(0.5, 1.5))
    print(json.dumps(returned))


def is_postgres(url: str) -> bool:
    return url.startswith("postgresql://")


if __name__ == "__main__":
    commands = {"fill": fill, "work": work, "recorded": recorded, "serve": serve, "trickle": trickle}
    commands[sys.argv[1]](*sys.argv[2:])
