"""Procrastinate on PostgreSQL, by its asynchronous connector. Runs in an environment of its own.

Commands as in `with_duly.py`. Settings: CONCURRENCY of the worker.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import psycopg
import uvloop
from caller import StartLog, aenqueue_in_bulk, atrickle, enqueue_in_tasks, main
from procrastinate import App, PsycopgConnector
from tally import Tally

DONE = (
    "select count(*), extract(epoch from max(at))::float from procrastinate_events "
    "join procrastinate_jobs j on j.id = job_id where type = 'succeeded' and j.status = 'succeeded'"
)
WAITING = "select count(*) from procrastinate_jobs where status in ('todo', 'doing')"


def new_app(url: str, connections: int = 5) -> App:
    logging.disable(logging.WARNING)
    return App(connector=PsycopgConnector(conninfo=url, min_size=connections, max_size=connections))


def declare(app: App, note: Any) -> Any:
    @app.task(name="no_op", queue="bench")
    async def no_op(n: int) -> None:
        note(n)

    return no_op


async def fill(url: str, jobs: str, *settings: str) -> None:
    app = new_app(url)
    no_op = declare(app, print)
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        for first in range(0, int(jobs), 1_000):
            await no_op.batch_defer_async(*({"n": n} for n in range(first, min(first + 1_000, int(jobs)))))


async def work(url: str, tally_path: str, concurrency: str) -> None:
    """Run a worker until the queue is empty, with a connection for each job that may run at once and two more."""
    tally = Tally(tally_path)
    app = new_app(url, int(concurrency) + 2)
    declare(app, tally.note)
    async with app.open_async():
        tally.wait_for_start()
        await app.run_worker_async(wait=False, concurrency=int(concurrency), listen_notify=False)
    tally.tell()


async def recorded(url: str, *settings: str) -> None:
    """Tell how many jobs are recorded as done, how many still wait, and when the last was written down."""
    with psycopg.connect(url) as connection:
        done, last_at = connection.execute(DONE).fetchone() or (0, None)
        [waiting] = connection.execute(WAITING).fetchone() or (0,)
    print(json.dumps({"done": done, "waiting": waiting, "recorded_at": last_at}))


async def enqueue(url: str, calls: str, callers: str, *settings: str) -> None:
    app = new_app(url, int(callers))
    no_op = declare(app, print)
    async with app.open_async():
        await enqueue_in_tasks(lambda number: no_op.defer_async(n=number), int(calls), int(callers))


async def bulk(url: str, rows: str, *settings: str) -> None:
    app = new_app(url)
    no_op = declare(app, print)
    async with app.open_async():
        await aenqueue_in_bulk(lambda numbers: no_op.batch_defer_async(*({"n": n} for n in numbers)), int(rows))


async def serve(url: str, log_path: str, concurrency: str) -> None:
    app = new_app(url, int(concurrency) + 2)
    declare(app, StartLog(log_path).note)
    async with app.open_async():
        await app.run_worker_async(concurrency=int(concurrency))


async def trickle(url: str, first: str, count: str, gap: str, *settings: str) -> None:
    app = new_app(url)
    no_op = declare(app, print)
    async with app.open_async():
        await atrickle(lambda number: no_op.defer_async(n=number), first, count, gap)


if __name__ == "__main__":
    main(fill, work, recorded, enqueue, bulk, serve, trickle, run=uvloop.run)
