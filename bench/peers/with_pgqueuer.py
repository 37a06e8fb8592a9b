"""PgQueuer as its own benchmark uses it: uvloop, asyncpg, drain mode. Runs in an environment of its own.

`fill URL JOBS`, then `work URL TALLY BATCH MANAGERS POOLED`, then `recorded URL`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version

import asyncpg
import uvloop
from pgqueuer import AsyncpgDriver, AsyncpgPoolDriver, Job, PgQueuer, Queries
from pgqueuer.types import QueueExecutionMode
from tally import Tally

POOL = 5


async def fill(url: str, jobs: str) -> None:
    queries = Queries(AsyncpgDriver(await asyncpg.connect(url)))
    await queries.install()
    numbers = range(int(jobs))
    await queries.enqueue(["no_op"] * len(numbers), [b"%d" % n for n in numbers], [0] * len(numbers))


async def work(url: str, tally_path: str, batch: str, managers: str, pooled: str) -> None:
    tally = Tally(tally_path)
    workers = [await manager(url, tally, pooled=pooled == "pool") for _ in range(int(managers))]
    await asyncio.gather(*(one.run(batch_size=int(batch), mode=QueueExecutionMode.drain) for one in workers))
    tally.tell(versions={name: version(name) for name in ("pgqueuer", "asyncpg", "uvloop")})


async def manager(url: str, tally: Tally, *, pooled: bool) -> PgQueuer:
    if pooled:
        worker = PgQueuer(AsyncpgPoolDriver(await asyncpg.create_pool(url, min_size=POOL, max_size=POOL)))
    else:
        worker = PgQueuer(AsyncpgDriver(await asyncpg.connect(url)))

    @worker.entrypoint("no_op")
    async def no_op(job: Job) -> None:
        assert job.payload is not None
        tally.note(int(job.payload))

    return worker


async def recorded(url: str) -> None:
    """Tell how many jobs are recorded as done, how many still wait, and when the last was written down."""
    connection = await asyncpg.connect(url)
    done, last_at = await connection.fetchrow(
        "select count(*), extract(epoch from max(created))::float from pgqueuer_log where status = 'successful'"
    )
    waiting = await connection.fetchval("select count(*) from pgqueuer")
    print(json.dumps({"done": done, "waiting": waiting, "recorded_at": last_at}))


if __name__ == "__main__":
    uvloop.run({"fill": fill, "work": work, "recorded": recorded}[sys.argv[1]](*sys.argv[2:]))
