"""duly, with the commands every script of this folder has; their last words are the contestant's settings.

`fill URL JOBS`, then `work URL TALLY` once or twice at the same time, then `recorded URL`.
`enqueue URL CALLS CALLERS` and `bulk URL ROWS` tell how fast jobs come in.
`serve URL LOG`, and beside it `trickle URL FIRST COUNT GAP`, tell how soon an idle worker starts a job.

Settings: KIND is `async` or `sync` (handlers, and callers: coroutines or threads), KEEP is `kept` or `gone`.
"""

from __future__ import annotations

import json
import sqlite3
import time
from typing import Any

from caller import StartLog, aenqueue_in_bulk, enqueue_in_bulk, enqueue_in_tasks, enqueue_in_threads, main
from caller import trickle as trickle_calls
from tally import Tally

from duly import Duly

CONCURRENCY = 10
DONE = "select count(*), max(finished_at) from {}duly_done where state = 'succeeded'"
WAITING = "select count(*) from {}duly_job"


def fill(url: str, jobs: str, kind: str, keep: str) -> None:
    if is_postgres(url):
        from duly.store.postgres.schema import bring_up_to_date

        bring_up_to_date(url)
    no_op = declare(Duly(url), kind, keep, print)
    no_op.enqueue_many(no_op.call(number) for number in range(int(jobs)))


def work(url: str, tally_path: str, kind: str, keep: str) -> None:
    tally = Tally(tally_path)
    app = Duly(url)
    declare(app, kind, keep, tally.note)
    tally.wait_for_start()
    app.run(concurrency=CONCURRENCY, drain=True)
    # What leaves nothing behind leaves no time either: then the return of run(), its shutdown included, is the finish.
    finished_at = time.time() if keep == "gone" else None
    tally.tell(finished_at=finished_at)


def declare(app: Duly, kind: str, keep: str, note: Any) -> Any:
    """Declare the task under one name, so that whoever fills and whoever works mean the same."""

    async def later(n: int) -> None:
        note(n)

    def at_once(n: int) -> None:
        note(n)

    options: dict[str, Any] = {"keep": 0} if keep == "gone" else {}
    return app.task(queue="default", name="no_op", **options)(later if kind == "async" else at_once)


def recorded(url: str, kind: str, keep: str) -> None:
    """Tell how many jobs are recorded as done, how many still wait, and when the last was written down."""
    schema = "duly." if is_postgres(url) else ""
    connection = connect(url)
    done, last_at = connection.execute(DONE.format(schema)).fetchone()
    [waiting] = connection.execute(WAITING.format(schema)).fetchone()
    connection.close()
    kept = keep == "kept"
    print(json.dumps({"done": done if kept else None, "waiting": waiting, "recorded_at": (last_at or 0) / 1000}))


def connect(url: str) -> Any:
    """Open the database by hand. A worker on SQLite must not hold a PostgreSQL driver that it has no use for."""
    if not is_postgres(url):
        return sqlite3.connect(url)
    import psycopg

    return psycopg.connect(url)


async def enqueue_async(url: str, calls: str, callers: str, keep: str) -> None:
    await enqueue_in_tasks(declare(Duly(url), "async", keep, print).aenqueue, int(calls), int(callers))


def enqueue(url: str, calls: str, callers: str, kind: str, keep: str) -> Any:
    if kind == "async":
        return enqueue_async(url, calls, callers, keep)
    return enqueue_in_threads(declare(Duly(url), kind, keep, print).enqueue, int(calls), int(callers))


async def bulk_async(url: str, rows: str, keep: str) -> None:
    no_op = declare(Duly(url), "async", keep, print)
    await aenqueue_in_bulk(lambda numbers: no_op.aenqueue_many(map(no_op.call, numbers)), int(rows))


def bulk(url: str, rows: str, kind: str, keep: str) -> Any:
    if kind == "async":
        return bulk_async(url, rows, keep)
    no_op = declare(Duly(url), kind, keep, print)
    return enqueue_in_bulk(lambda numbers: no_op.enqueue_many(map(no_op.call, numbers)), int(rows))


def serve(url: str, log_path: str, kind: str, keep: str) -> None:
    """Work until told to stop; each job leaves its number and the time it started in the log."""
    app = Duly(url)
    declare(app, kind, keep, StartLog(log_path).note)
    app.run(concurrency=CONCURRENCY)


def trickle(url: str, first: str, count: str, gap: str, kind: str, keep: str) -> None:
    trickle_calls(declare(Duly(url), kind, keep, print).enqueue, first, count, gap)


def is_postgres(url: str) -> bool:
    return url.startswith("postgresql://")


if __name__ == "__main__":
    main(fill, work, recorded, enqueue, bulk, serve, trickle)
