"""awa (a Rust core) on PostgreSQL, on its queue storage. Runs in an environment of its own.

Commands as in `with_duly.py`. Settings: WORKERS, how many jobs may run at once.
"""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import dataclass
from typing import Any

import awa
from caller import StartLog, aenqueue_in_bulk, atrickle, enqueue_in_tasks, main
from tally import Tally

QUEUE = "bench"
CONNECTIONS = 20
# After a second or so awa keeps only how many have ended.
COUNTS = (
    "select count(*) filter (where state = 'completed')"
    " + (select coalesce(sum(pruned_completed_count), 0)::int8 from awa.queue_terminal_rollups) as done,"
    " count(*) filter (where state <> 'completed') as waiting,"
    " extract(epoch from max(finalized_at))::float8 as recorded_at from awa.jobs"
)


@dataclass
class NoOp:
    """What a job is given."""

    n: int


def new_client(url: str) -> awa.AsyncClient:
    return awa.AsyncClient(url, max_connections=CONNECTIONS)


async def fill(url: str, jobs: str, *settings: str) -> None:
    client = new_client(url)
    await client.migrate()
    await client.install_queue_storage(schema="awa")
    for first in range(0, int(jobs), 1_000):
        await send_all(client, list(range(first, min(first + 1_000, int(jobs)))))
    await client.close()


async def send_all(client: awa.AsyncClient, numbers: list[int]) -> None:
    await client.enqueue_many_copy([NoOp(n) for n in numbers], queue=QUEUE)


async def work(url: str, tally_path: str, workers: str) -> None:
    tally = Tally(tally_path)
    client = new_client(url)
    declare(client, tally.note)
    tally.wait_for_start()
    await client.start([(QUEUE, int(workers))])
    while not tally.complete():
        await asyncio.sleep(0.01)
    await client.shutdown(10_000)
    await client.close()
    tally.tell()


def declare(client: awa.AsyncClient, note: Any) -> None:
    @client.task(NoOp, queue=QUEUE)
    async def no_op(job: awa.Job[NoOp]) -> None:
        note(job.args.n)


async def recorded(url: str, *settings: str) -> None:
    """Tell how many jobs are recorded as done, how many still wait, and when the last was written down."""
    client = new_client(url)
    async with await client.transaction() as transaction:
        await transaction.execute("analyze")  # the view joins what it has no statistics of, for minutes
        row = await transaction.fetch_one(COUNTS)
    await client.close()
    print(json.dumps({name: row[name] for name in ("done", "waiting", "recorded_at")}))


async def enqueue(url: str, calls: str, callers: str, *settings: str) -> None:
    client = new_client(url)
    await enqueue_in_tasks(lambda number: client.insert(NoOp(number), queue=QUEUE), int(calls), int(callers))
    await client.close()


async def bulk(url: str, rows: str, *settings: str) -> None:
    client = new_client(url)
    await aenqueue_in_bulk(lambda numbers: send_all(client, numbers), int(rows))
    await client.close()


async def serve(url: str, log_path: str, workers: str) -> None:
    client = new_client(url)
    declare(client, StartLog(log_path).note)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await client.start([(QUEUE, int(workers))])
    await ended.wait()
    await client.shutdown()
    await client.close()


async def trickle(url: str, first: str, count: str, gap: str, *settings: str) -> None:
    client = new_client(url)
    await atrickle(lambda number: client.insert(NoOp(number), queue=QUEUE), first, count, gap)
    await client.close()


if __name__ == "__main__":
    main(fill, work, recorded, enqueue, bulk, serve, trickle)
