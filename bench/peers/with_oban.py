"""Oban for Python on PostgreSQL. Runs in an environment of its own, which needs Python 3.12.

Commands as in `with_duly.py`. Settings: LIMIT, how many jobs may run at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import uvloop
from caller import StartLog, aenqueue_in_bulk, atrickle, enqueue_in_tasks, main
from oban import Oban, worker
from oban.schema import install
from tally import Tally

QUEUE = "bench"
DONE = (
    "select count(*), extract(epoch from max(completed_at at time zone 'utc'))::float8"
    " from oban_jobs where state = 'completed'"
)
WAITING = "select count(*) from oban_jobs where state <> 'completed'"


@asynccontextmanager
async def opened(url: str, *, limit: int = 0, connections: int = 10) -> AsyncIterator[Oban]:
    """Open an instance: with a limit it works, without one it only enqueues."""
    logging.disable(logging.WARNING)
    pool = await Oban.create_pool(url, min_size=connections, max_size=connections)
    try:
        async with Oban(pool=pool, queues={QUEUE: limit} if limit else {}) as oban:
            yield oban
    finally:
        await pool.close()


def declare(note: Any) -> Any:
    @worker(queue=QUEUE)
    class NoOp:
        async def process(self, job: Any) -> None:
            note(job.args["n"])

    return NoOp


async def fill(url: str, jobs: str, *settings: str) -> None:
    no_op = declare(print)
    pool = await Oban.create_pool(url)
    await install(pool)
    await pool.close()
    async with opened(url) as oban:
        for first in range(0, int(jobs), 1_000):
            await oban.enqueue_many([no_op.new({"n": n}) for n in range(first, min(first + 1_000, int(jobs)))])


async def work(url: str, tally_path: str, limit: str) -> None:
    tally = Tally(tally_path)
    declare(tally.note)
    tally.wait_for_start()
    async with opened(url, limit=int(limit)):
        while not tally.complete():
            await asyncio.sleep(0.01)
    tally.tell()


async def recorded(url: str, *settings: str) -> None:
    """Tell how many jobs are recorded as done, how many still wait, and when the last was written down."""
    with psycopg.connect(url) as connection:
        done, last_at = connection.execute(DONE).fetchone() or (0, None)
        [waiting] = connection.execute(WAITING).fetchone() or (0,)
    print(json.dumps({"done": done, "waiting": waiting, "recorded_at": last_at}))


async def enqueue(url: str, calls: str, callers: str, *settings: str) -> None:
    no_op = declare(print)
    async with opened(url, connections=max(int(callers), 2)) as oban:
        await enqueue_in_tasks(lambda number: oban.enqueue(no_op.new({"n": number})), int(calls), int(callers))


async def bulk(url: str, rows: str, *settings: str) -> None:
    no_op = declare(print)
    async with opened(url) as oban:
        await aenqueue_in_bulk(lambda numbers: oban.enqueue_many([no_op.new({"n": n}) for n in numbers]), int(rows))


async def serve(url: str, log_path: str, limit: str) -> None:
    declare(StartLog(log_path).note)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with opened(url, limit=int(limit)):
        await ended.wait()


async def trickle(url: str, first: str, count: str, gap: str, *settings: str) -> None:
    no_op = declare(print)
    async with opened(url) as oban:
        await atrickle(lambda number: oban.enqueue(no_op.new({"n": number})), first, count, gap)


if __name__ == "__main__":
    main(fill, work, recorded, enqueue, bulk, serve, trickle, run=uvloop.run)
