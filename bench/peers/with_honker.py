"""honker on SQLite, by its batch calls. Runs in an environment of its own, which needs glibc 2.38.

Commands as in `with_duly.py`. Settings: BATCH that is claimed and acknowledged at once.
"""

from __future__ import annotations

import json
import os
from typing import Any

import honker
from caller import StartLog, enqueue_in_bulk, enqueue_in_threads, main
from caller import trickle as trickle_calls
from tally import Tally

QUEUE = "bench"
WAITING = "select count(*) as n from _honker_jobs where queue = 'bench'"


def opened(path: str) -> tuple[Any, Any]:
    database = honker.open(path)
    return database, database.queue(QUEUE)


def send_all(database: Any, queue: Any, numbers: list[int]) -> None:
    """Enqueue within one transaction, which is its bulk call."""
    with database.transaction() as transaction:
        for number in numbers:
            queue.enqueue({"n": number}, tx=transaction)


def fill(path: str, jobs: str, *settings: str) -> None:
    database, queue = opened(path)
    for first in range(0, int(jobs), 1_000):
        send_all(database, queue, list(range(first, min(first + 1_000, int(jobs)))))


def work(path: str, tally_path: str, batch: str) -> None:
    """Claim, run and acknowledge batches until there is nothing more."""
    tally = Tally(tally_path)
    _, queue = opened(path)
    name = f"worker-{os.getpid()}"
    tally.wait_for_start()
    while jobs := queue.claim_batch(name, int(batch)):
        for job in jobs:
            tally.note(job.payload["n"])
        queue.ack_batch([job.id for job in jobs], name)
    tally.tell()


def recorded(path: str, *settings: str) -> None:
    """Tell what still waits. honker deletes a job that is acknowledged."""
    database, _ = opened(path)
    [row] = database.query(WAITING)
    print(json.dumps({"done": None, "waiting": row["n"], "recorded_at": None}))


def enqueue(path: str, calls: str, callers: str, *settings: str) -> None:
    _, queue = opened(path)
    enqueue_in_threads(lambda number: queue.enqueue({"n": number}), int(calls), int(callers))


def bulk(path: str, rows: str, *settings: str) -> None:
    database, queue = opened(path)
    enqueue_in_bulk(lambda numbers: send_all(database, queue, numbers), int(rows))


async def serve(path: str, log_path: str, *settings: str) -> None:
    _, queue = opened(path)
    log = StartLog(log_path)
    async for job in queue.claim(f"worker-{os.getpid()}"):
        log.note(job.payload["n"])
        job.ack()


def trickle(path: str, first: str, count: str, gap: str, *settings: str) -> None:
    _, queue = opened(path)
    trickle_calls(lambda number: queue.enqueue({"n": number}), first, count, gap)


if __name__ == "__main__":
    main(fill, work, recorded, enqueue, bulk, serve, trickle)
