"""`duly workers`: lists the workers."""

from __future__ import annotations

from collections.abc import Sequence

import click

from duly.cli import output
from duly.cli.database import with_app
from duly.duly import Duly
from duly.model import WorkerRecord
from duly.store import ops


@click.command()
@with_app
def command(app: Duly, as_json: bool) -> None:
    """List the workers, with their state at their last heartbeat.

    A worker sends a heartbeat every third of its shortest lease, with its counts. A worker that misses three is silent:
    it is dead, hangs, or cannot reach the database. For probes on the machine of the worker use `duly check`.

    Examples:
      duly workers
      duly workers --json --url postgresql://user@host/db
    """
    workers, now = app.driver.run(ops.workers()), app.driver.run(ops.clock())
    if as_json:
        output.answer_json(workers)
        return
    print_workers(workers, now)
    if not workers:
        click.echo("there are no workers yet: start one with duly worker module:app")


def print_workers(workers: Sequence[WorkerRecord], now: int) -> None:
    """Print a table of workers, the living first."""
    output.table(
        ["worker", "host", "pid", "state", "busy", "done", "failed", "up", "queues", "tasks"],
        [
            [
                worker.id,
                worker.host,
                str(worker.pid),
                liveness(worker, now),
                f"{worker.running}/{worker.slots}",
                f"{worker.succeeded:,}",
                f"{worker.failed:,}",
                output.age(now - worker.started_at),
                ", ".join(worker.queues),
                ", ".join(worker.tasks),
            ]
            for worker in sorted(workers, key=lambda worker: (not worker.alive, -worker.started_at, worker.id))
        ],
    )


def liveness(worker: WorkerRecord, now: int) -> str:
    """Write whether a worker is alive, and the age of its last heartbeat; its counts are as old."""
    age = output.age(now - worker.seen_at, units=1)
    if worker.id.startswith("tick-") and worker.alive:
        return f"ticked {age} ago"
    return f"alive, beat {age} ago" if worker.alive else f"silent for {age}"
