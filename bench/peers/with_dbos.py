"""DBOS on PostgreSQL: a queue of one-function workflows. Runs in an environment of its own.

Commands as in `with_duly.py`, without `bulk`. Settings: CONCURRENCY of the worker.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
from typing import Any

import psycopg
from caller import StartLog, enqueue_in_threads, main
from caller import trickle as trickle_calls
from dbos import DBOS, DBOSClient
from tally import Tally

QUEUE = "bench"
POLL_S = 0.01
DONE = "select count(*), max(updated_at) from dbos.workflow_status where queue_name = %s and status = 'SUCCESS'"
WAITING = "select count(*) from dbos.workflow_status where queue_name = %s and status in ('ENQUEUED', 'PENDING')"


def launch(url: str, note: Any, concurrency: str) -> None:
    """Start DBOS with one workflow and one queue, polled a hundred times as often as by default."""
    logging.disable(logging.WARNING)
    DBOS(config={"name": "bench", "system_database_url": sqlalchemy(url), "sys_db_pool_size": 20})

    @DBOS.workflow(name="no_op")
    def no_op(n: int) -> None:
        note(n)

    DBOS.launch()
    DBOS.register_queue(QUEUE, worker_concurrency=int(concurrency), polling_interval_sec=POLL_S)


def sqlalchemy(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://")


def new_client(url: str, callers: int = 1) -> DBOSClient:
    return DBOSClient(system_database_url=sqlalchemy(url), system_database_pool_size=max(callers, 5))


def send(client: DBOSClient, number: int) -> None:
    client.enqueue({"queue_name": QUEUE, "workflow_name": "no_op"}, n=number)


def fill(url: str, jobs: str, concurrency: str) -> None:
    """Make the tables by launching once, then add the jobs from outside, by several callers as this is not timed."""
    launch(url, print, concurrency)
    DBOS.destroy()
    client = new_client(url, 8)

    def caller(first: int) -> None:
        for number in range(first, int(jobs), 8):
            send(client, number)

    threads = [threading.Thread(target=caller, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.destroy()


def work(url: str, tally_path: str, concurrency: str) -> None:
    tally = Tally(tally_path)
    tally.wait_for_start()
    launch(url, tally.note, concurrency)
    tally.wait_until_complete()
    DBOS.destroy(workflow_completion_timeout_sec=10)
    tally.tell()


def recorded(url: str, *settings: str) -> None:
    """Tell how many jobs are recorded as done, how many still wait, and when the last was written down."""
    with psycopg.connect(url) as connection:
        done, last_at = connection.execute(DONE, [QUEUE]).fetchone() or (0, None)
        [waiting] = connection.execute(WAITING, [QUEUE]).fetchone() or (0,)
    print(json.dumps({"done": done, "waiting": waiting, "recorded_at": (last_at or 0) / 1000}))


def enqueue(url: str, calls: str, callers: str, *settings: str) -> None:
    client = new_client(url, int(callers))
    enqueue_in_threads(lambda number: send(client, number), int(calls), int(callers))
    client.destroy()


def serve(url: str, log_path: str, concurrency: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    launch(url, StartLog(log_path).note, concurrency)
    signal.sigwait({signal.SIGTERM})
    DBOS.destroy()


def trickle(url: str, first: str, count: str, gap: str, *settings: str) -> None:
    client = new_client(url)
    trickle_calls(lambda number: send(client, number), first, count, gap)
    client.destroy()


if __name__ == "__main__":
    main(fill, work, recorded, enqueue, serve, trickle)
