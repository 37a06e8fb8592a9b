"""taskiq on Redis streams, which acknowledge. Runs in an environment of its own.

Commands as in `with_duly.py`, without `bulk`. Settings: TASKS that may run at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from contextlib import suppress
from typing import Any

import redis
import uvloop
from caller import StartLog, atrickle, enqueue_in_tasks, main
from tally import Tally
from taskiq.api import run_receiver_task
from taskiq_redis import RedisStreamBroker

STREAM = "bench"
GROUP = "bench"


def new_broker(url: str) -> RedisStreamBroker:
    """Read the stream from its beginning: jobs may be older than the worker."""
    logging.disable(logging.WARNING)
    return RedisStreamBroker(url, queue_name=STREAM, consumer_group_name=GROUP, consumer_id="0")


def declare(broker: RedisStreamBroker, note: Any) -> Any:
    @broker.task(task_name="no_op")
    async def no_op(n: int) -> None:
        note(n)

    return no_op


async def fill(url: str, jobs: str, *settings: str) -> None:
    broker = new_broker(url)
    no_op = declare(broker, print)
    await broker.startup()
    for number in range(int(jobs)):
        await no_op.kiq(n=number)
    await broker.shutdown()


async def work(url: str, tally_path: str, tasks: str) -> None:
    tally = Tally(tally_path)
    broker = new_broker(url)
    declare(broker, tally.note)
    await broker.startup()
    tally.wait_for_start()
    receiver = asyncio.create_task(receive(broker, tasks))
    while not tally.complete():
        await asyncio.sleep(0.01)
    await end(broker, receiver)
    tally.tell()


async def receive(broker: RedisStreamBroker, tasks: str) -> None:
    await run_receiver_task(broker, max_async_tasks=int(tasks), max_prefetch=int(tasks))


async def end(broker: RedisStreamBroker, receiver: asyncio.Task[None]) -> None:
    """Let the last acknowledgements go out before the receiver is cancelled, which is how it is stopped."""
    await asyncio.sleep(0.2)
    receiver.cancel()
    with suppress(asyncio.CancelledError):
        await receiver
    await broker.shutdown()


def recorded(url: str, *settings: str) -> None:
    """Tell what is not delivered or not acknowledged. A stream keeps its entries; nothing says when they were done."""
    [group] = redis.Redis.from_url(url).xinfo_groups(STREAM)
    print(json.dumps({"done": None, "waiting": group["pending"] + (group["lag"] or 0), "recorded_at": None}))


async def enqueue(url: str, calls: str, callers: str, *settings: str) -> None:
    broker = new_broker(url)
    no_op = declare(broker, print)
    await broker.startup()
    await enqueue_in_tasks(lambda number: no_op.kiq(n=number), int(calls), int(callers))
    await broker.shutdown()


async def serve(url: str, log_path: str, tasks: str) -> None:
    broker = new_broker(url)
    declare(broker, StartLog(log_path).note)
    await broker.startup()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    receiver = asyncio.create_task(receive(broker, tasks))
    await ended.wait()
    await end(broker, receiver)


async def trickle(url: str, first: str, count: str, gap: str, *settings: str) -> None:
    broker = new_broker(url)
    no_op = declare(broker, print)
    await broker.startup()
    await atrickle(lambda number: no_op.kiq(n=number), first, count, gap)
    await broker.shutdown()


if __name__ == "__main__":
    main(fill, work, recorded, enqueue, serve, trickle, run=uvloop.run)
