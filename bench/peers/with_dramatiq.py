"""Dramatiq on Redis. Runs in an environment of its own.

Commands as in `with_duly.py`, without `bulk`. Settings: THREADS of the worker.
"""

from __future__ import annotations

import json
import logging
import signal
from typing import Any

import dramatiq
import redis
from caller import StartLog, enqueue_in_threads, main
from caller import trickle as trickle_calls
from dramatiq.brokers.redis import RedisBroker
from tally import Tally

# Its other defaults (age limit, time limit, shutdown, callbacks, pipelines, retries) stay; this one runs per message.
UNUSED = "Prometheus"
# An idle worker looks for messages this often; by default it waits up to a second.
IDLE_MS = 10


def new_broker(url: str) -> RedisBroker:
    logging.disable(logging.WARNING)
    broker = RedisBroker(url=url)
    broker.middleware[:] = [one for one in broker.middleware if type(one).__name__ != UNUSED]
    dramatiq.set_broker(broker)
    return broker


def declare(note: Any) -> Any:
    @dramatiq.actor(actor_name="no_op", queue_name="bench")
    def no_op(n: int) -> None:
        note(n)

    return no_op


def fill(url: str, jobs: str, *settings: str) -> None:
    new_broker(url)
    no_op = declare(print)
    for number in range(int(jobs)):
        no_op.send(n=number)


def work(url: str, tally_path: str, threads: str) -> None:
    tally = Tally(tally_path)
    broker = new_broker(url)
    declare(tally.note)
    worker = dramatiq.Worker(broker, worker_threads=int(threads))
    tally.wait_for_start()
    worker.start()
    tally.wait_until_complete()
    worker.stop()
    tally.tell()


def recorded(url: str, *settings: str) -> None:
    """Tell what still waits or is not acknowledged. Dramatiq keeps nothing of a job that is done."""
    client = redis.Redis.from_url(url)
    unacknowledged = sum(client.scard(key) for key in client.scan_iter("dramatiq:__acks__.*.bench"))
    waiting = client.llen("dramatiq:bench") + unacknowledged
    print(json.dumps({"done": None, "waiting": waiting, "recorded_at": None}))


def enqueue(url: str, calls: str, callers: str, *settings: str) -> None:
    new_broker(url)
    no_op = declare(print)
    enqueue_in_threads(lambda number: no_op.send(n=number), int(calls), int(callers))


def serve(url: str, log_path: str, threads: str) -> None:
    broker = new_broker(url)
    declare(StartLog(log_path).note)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    worker = dramatiq.Worker(broker, worker_threads=int(threads), worker_timeout=IDLE_MS)
    worker.start()
    signal.sigwait({signal.SIGTERM})
    worker.stop(timeout=2_000)


def trickle(url: str, first: str, count: str, gap: str, *settings: str) -> None:
    new_broker(url)
    no_op = declare(print)
    trickle_calls(lambda number: no_op.send(n=number), first, count, gap)


if __name__ == "__main__":
    main(fill, work, recorded, enqueue, serve, trickle)
