"""PgQueuer as its own benchmark uses it: uvloop, asyncpg, drain mode. Runs in an environment of its own.

Commands as in `with_duly.py`. Settings: BATCH, MANAGERS (in one process), POOLED is `pool` or `single`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import asyncpg
import uvloop
from caller import StartLog, aenqueue_in_bulk, atrickle, enqueue_in_tasks, main
from pgqueuer import AsyncpgDriver, AsyncpgPoolDriver, Job, PgQueuer, Queries
from pgqueuer.types import QueueExecutionMode
from tally import Tally

POOL = 5


async def fill(url: str, jobs: str, *settings: str) -> None:
    queries = Queries(AsyncpgDriver(await asyncpg.connect(url)))
    await queries.install()
    numbers = list(range(int(jobs)))
    if numbers:
        await send_all(queries, numbers)


async def send_all(queries: Queries, numbers: list[int]) -> None:
    await queries.enqueue(["no_op"] * len(numbers), list(map(payload, numbers)), [0] * len(numbers))


def payload(number: int) -> bytes:
    return json.dumps({"n": number}).encode()


async def work(url: str, tally_path: str, batch: str, managers: str, pooled: str) -> None:
    tally = Tally(tally_path)
    workers = [await manager(url, tally.note, pooled=pooled == "pool") for _ in range(int(managers))]
    tally.wait_for_start()
    await asyncio.gather(*(one.run(batch_size=int(batch), mode=QueueExecutionMode.drain) for one in workers))
    tally.tell()


async def manager(url: str, note: Any, *, pooled: bool) -> PgQueuer:
    if pooled:
        worker = PgQueuer(AsyncpgPoolDriver(await asyncpg.create_pool(url, min_size=POOL, max_size=POOL)))
    else:
        worker = PgQueuer(AsyncpgDriver(await asyncpg.connect(url)))

    @worker.entrypoint("no_op")
    async def no_op(job: Job) -> None:
        assert job.payload is not None
        note(json.loads(job.payload)["n"])

    return worker


async def recorded(url: str, *settings: str) -> None:
    """Tell how many jobs are recorded as done, how many still wait, and when the last was written down."""
    connection = await asyncpg.connect(url)
    done, last_at = await connection.fetchrow(
        "select count(*), extract(epoch from max(created))::float from pgqueuer_log where status = 'successful'"
    )
    waiting = await connection.fetchval("select count(*) from pgqueuer")
    print(json.dumps({"done": done, "waiting": waiting, "recorded_at": last_at}))


async def enqueue(url: str, calls: str, callers: str, *settings: str) -> None:
    """Enqueue by a pool as large as there are callers, or by the one connection of the one caller."""
    size = int(callers)
    if size == 1:
        driver: Any = AsyncpgDriver(await asyncpg.connect(url))
    else:
        driver = AsyncpgPoolDriver(await asyncpg.create_pool(url, min_size=size, max_size=size))
    queries = Queries(driver)
    await enqueue_in_tasks(lambda number: queries.enqueue("no_op", payload(number)), int(calls), size)


async def bulk(url: str, rows: str, *settings: str) -> None:
    queries = Queries(AsyncpgDriver(await asyncpg.connect(url)))
    await aenqueue_in_bulk(lambda numbers: send_all(queries, numbers), int(rows))


async def serve(url: str, log_path: str, batch: str, managers: str, pooled: str) -> None:
    worker = await manager(url, StartLog(log_path).note, pooled=False)
    await worker.run(batch_size=int(batch))


async def trickle(url: str, first: str, count: str, gap: str, *settings: str) -> None:
    queries = Queries(AsyncpgDriver(await asyncpg.connect(url)))
    await atrickle(lambda number: queries.enqueue("no_op", payload(number)), first, count, gap)


if __name__ == "__main__":
    main(fill, work, recorded, enqueue, bulk, serve, trickle, run=uvloop.run)
