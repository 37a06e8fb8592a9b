"""Huey on SQLite, WAL with its default sync (`synchronous=FULL`). Runs in an environment of its own.

Commands as in `with_duly.py`, without `bulk`. Settings: THREADS of the consumer.
"""

from __future__ import annotations

import json
import signal
from typing import Any

from caller import StartLog, enqueue_in_threads, main
from caller import trickle as trickle_calls
from huey import SqliteHuey
from tally import Tally


def fill(path: str, jobs: str, *settings: str) -> None:
    """Enqueue through the public API, which knows no bulk; syncs are off here, as filling is not timed."""
    huey = SqliteHuey("bench", filename=path)
    huey.storage.conn.execute("pragma synchronous = off")
    no_op = declare(huey, print)
    for number in range(int(jobs)):
        no_op(n=number)


def work(path: str, tally_path: str, threads: str) -> None:
    tally = Tally(tally_path)
    huey = SqliteHuey("bench", filename=path)
    declare(huey, tally.note)
    consumer = huey.create_consumer(workers=int(threads), worker_type="thread", periodic=False)
    tally.wait_for_start()
    consumer.start()
    tally.wait_until_complete()
    consumer.stop(graceful=True)
    tally.tell()


def declare(huey: SqliteHuey, note: Any) -> Any:
    @huey.task(name="no_op")
    def no_op(n: int) -> None:
        note(n)

    return no_op


def recorded(path: str, *settings: str) -> None:
    """Tell what still waits. Huey deletes a job before it runs it and records nothing afterwards."""
    print(json.dumps({"done": None, "waiting": len(SqliteHuey("bench", filename=path)), "recorded_at": None}))


def enqueue(path: str, calls: str, callers: str, *settings: str) -> None:
    no_op = declare(SqliteHuey("bench", filename=path), print)
    enqueue_in_threads(lambda number: no_op(n=number), int(calls), int(callers))


def serve(path: str, log_path: str, threads: str) -> None:
    """Poll as often as Huey can be told to: its own wait grows from 0.1 s to 10 s."""
    huey = SqliteHuey("bench", filename=path)
    declare(huey, StartLog(log_path).note)
    consumer = huey.create_consumer(
        workers=int(threads), worker_type="thread", periodic=False, initial_delay=0.1, max_delay=0.1
    )
    consumer.start()
    signal.sigwait({signal.SIGTERM})
    consumer.stop(graceful=False)


def trickle(path: str, first: str, count: str, gap: str, *settings: str) -> None:
    no_op = declare(SqliteHuey("bench", filename=path), print)
    trickle_calls(lambda number: no_op(n=number), first, count, gap)


if __name__ == "__main__":
    main(fill, work, recorded, enqueue, serve, trickle)
