"""Celery on Redis, late acknowledgement, no results. Runs in an environment of its own.

Commands as in `with_duly.py`, without `bulk`. Settings: POOL is `solo`, `threads` or `prefork`, and its SIZE.
"""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import redis
from caller import StartLog, enqueue_in_threads, main
from caller import trickle as trickle_calls
from celery import Celery
from celery.apps.worker import Worker
from tally import Tally

QUEUE = "bench"


def new_app(url: str) -> Celery:
    """Configure what its documentation advises for short tasks: no results, a long prefetch, no events."""
    logging.disable(logging.WARNING)
    app = Celery("bench", broker=url)
    app.conf.update(
        task_default_queue=QUEUE,
        task_ignore_result=True,
        task_acks_late=True,
        worker_prefetch_multiplier=64,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        broker_pool_limit=16,
        broker_connection_retry_on_startup=True,
    )
    return app


def declare(app: Celery, note: Any) -> Any:
    @app.task(name="no_op")
    def no_op(n: int) -> None:
        note(n)

    return no_op


def fill(url: str, jobs: str, *settings: str) -> None:
    no_op = declare(new_app(url), print)
    for number in range(int(jobs)):
        no_op.delay(n=number)


def work(url: str, tally_path: str, pool: str, size: str) -> None:
    tally = Tally(tally_path)
    app = new_app(url)
    declare(app, tally.note)
    worker = new_worker(app, pool, size)
    tally.wait_for_start()
    threading.Thread(target=tally.stop_when_complete, args=(worker.stop,), daemon=True).start()
    worker.start()
    tally.tell()


def new_worker(app: Celery, pool: str, size: str) -> Worker:
    worker: Worker = app.Worker(
        pool=pool,
        concurrency=int(size),
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        task_events=False,
        quiet=True,
    )
    return worker


def recorded(url: str, *settings: str) -> None:
    """Tell what still waits or is not acknowledged. Celery keeps nothing of a job whose result is ignored."""
    client = redis.Redis.from_url(url)
    waiting = client.llen(QUEUE) + client.hlen("unacked")
    print(json.dumps({"done": None, "waiting": waiting, "recorded_at": None}))


def enqueue(url: str, calls: str, callers: str, *settings: str) -> None:
    no_op = declare(new_app(url), print)
    enqueue_in_threads(lambda number: no_op.delay(n=number), int(calls), int(callers))


def serve(url: str, log_path: str, pool: str, size: str) -> None:
    app = new_app(url)
    declare(app, StartLog(log_path).note)
    new_worker(app, pool, size).start()


def trickle(url: str, first: str, count: str, gap: str, *settings: str) -> None:
    no_op = declare(new_app(url), print)
    trickle_calls(lambda number: no_op.delay(n=number), first, count, gap)


if __name__ == "__main__":
    main(fill, work, recorded, enqueue, serve, trickle)
