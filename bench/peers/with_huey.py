"""Huey on SQLite, WAL with its default sync (`synchronous=FULL`). Runs in an environment of its own.

`fill PATH JOBS`, then `work PATH TALLY THREADS`, then `recorded PATH`.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from importlib.metadata import version

from huey import SqliteHuey
from tally import Tally


def main(command: str, path: str, *rest: str) -> None:
    huey = SqliteHuey("bench", filename=path)
    {"fill": fill, "work": work, "recorded": recorded}[command](huey, *rest)


def fill(huey: SqliteHuey, jobs: str) -> None:
    """Enqueue through the public API, which knows no bulk; syncs are off here, as filling is not timed."""
    huey.storage.conn.execute("pragma synchronous = off")
    no_op = declare(huey, None)
    for number in range(int(jobs)):
        no_op(number)


def work(huey: SqliteHuey, tally_path: str, threads: str) -> None:
    tally = Tally(tally_path)
    declare(huey, tally)
    consumer = huey.create_consumer(workers=int(threads), worker_type="thread", periodic=False)
    consumer.start()
    while not tally.complete():
        time.sleep(0.02)
    consumer.stop(graceful=True)
    tally.tell(versions={"huey": version("huey"), "sqlite": sqlite3.sqlite_version})


def declare(huey: SqliteHuey, tally: Tally | None):  # type: ignore[no-untyped-def]
    @huey.task(name="no_op")
    def no_op(number: int) -> None:
        assert tally is not None
        tally.note(number)

    return no_op


def recorded(huey: SqliteHuey) -> None:
    """Tell what still waits. Huey deletes a job before it runs it and records nothing afterwards."""
    print(json.dumps({"done": None, "waiting": len(huey), "recorded_at": None}))


if __name__ == "__main__":
    main(*sys.argv[1:])
