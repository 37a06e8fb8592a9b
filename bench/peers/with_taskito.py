"""taskito on SQLite, WAL with the sync it sets itself (`synchronous=NORMAL`). Runs in an environment of its own.

Commands as in `with_duly.py`. Settings: BATCH that its scheduler claims, POLL in ms, THREADS.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sqlite3
import threading
from typing import Any

from caller import StartLog, enqueue_in_bulk, enqueue_in_threads, main
from caller import trickle as trickle_calls
from tally import Tally
from taskito import Queue

COMPLETE = 2
DONE = f"select count(*), max(completed_at) from archived_jobs where status = {COMPLETE}"
WAITING = "select count(*) from jobs"


def new_queue(path: str, batch: str, poll: str, threads: str) -> Queue:
    logging.disable(logging.INFO)
    return Queue(
        db_path=path,
        workers=int(threads),
        scheduler_batch_size=int(batch),
        scheduler_poll_interval_ms=int(poll),
        push_dispatch=True,
    )


def declare(queue: Queue, note: Any) -> Any:
    @queue.task(name="no_op")
    async def no_op(n: int) -> None:
        note(n)

    return no_op


def send_all(queue: Queue, numbers: list[int]) -> None:
    queue.enqueue_many("no_op", [()] * len(numbers), kwargs_list=[{"n": n} for n in numbers])


def fill(path: str, jobs: str, *settings: str) -> None:
    queue = new_queue(path, *settings)
    declare(queue, print)
    for first in range(0, int(jobs), 1_000):
        send_all(queue, list(range(first, min(first + 1_000, int(jobs)))))


def work(path: str, tally_path: str, *settings: str) -> None:
    tally = Tally(tally_path)
    queue = new_queue(path, *settings)
    declare(queue, tally.note)
    tally.wait_for_start()
    threading.Thread(target=tally.stop_when_complete, args=(stop,), daemon=True).start()
    queue.run_worker()
    tally.tell()


def stop() -> None:
    """Ask for the orderly end of `run_worker`, which finishes what runs."""
    os.kill(os.getpid(), signal.SIGTERM)


def recorded(path: str, *settings: str) -> None:
    """Tell how many jobs are recorded as done, how many still wait, and when the last was written down."""
    connection = sqlite3.connect(path)
    done, last_at = connection.execute(DONE).fetchone()
    [waiting] = connection.execute(WAITING).fetchone()
    print(json.dumps({"done": done, "waiting": waiting, "recorded_at": (last_at or 0) / 1000}))


def enqueue(path: str, calls: str, callers: str, *settings: str) -> None:
    no_op = declare(new_queue(path, *settings), print)
    enqueue_in_threads(lambda number: no_op.delay(n=number), int(calls), int(callers))


def bulk(path: str, rows: str, *settings: str) -> None:
    queue = new_queue(path, *settings)
    declare(queue, print)
    enqueue_in_bulk(lambda numbers: send_all(queue, numbers), int(rows))


def serve(path: str, log_path: str, *settings: str) -> None:
    queue = new_queue(path, *settings)
    declare(queue, StartLog(log_path).note)
    queue.run_worker()


def trickle(path: str, first: str, count: str, gap: str, *settings: str) -> None:
    no_op = declare(new_queue(path, *settings), print)
    trickle_calls(lambda number: no_op.delay(n=number), first, count, gap)


if __name__ == "__main__":
    main(fill, work, recorded, enqueue, bulk, serve, trickle)
