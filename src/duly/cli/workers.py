"""`duly workers`: the workers that have been heard of."""

from __future__ import annotations

from collections.abc import Sequence

import click

from duly.cli import output
from duly.cli.database import database_options, json_option, opened
from duly.model import WorkerRecord
from duly.store import ops


@click.command(
    epilog="""\b
Examples:
  duly workers
  duly workers --json --url postgresql://user@host/db
"""
)
@database_options
@json_option
def command(url: str | None, schema: str | None, target: str | None, as_json: bool) -> None:
    """List the workers that have been heard of.

    A worker tells of itself at every beat, each third of its shortest lease: what it did is as of then. One that
    missed three is silent: it is dead, hangs, or cannot reach the database. For probes on the worker's own machine see
    `duly check`.
    """
    with opened(url, schema, target) as app:
        workers, now = app.driver.run(ops.workers()), app.driver.run(ops.clock())
    if as_json:
        output.answer_json(workers)
        return
    tell_workers(workers, now)
    if not workers:
        click.echo("no worker has been heard of: start one with duly worker module:app")


def tell_workers(workers: Sequence[WorkerRecord], now: int) -> None:
    """Print a table of workers, the living first."""
    output.table(
        ["worker", "host", "pid", "state", "busy", "done", "failed", "up", "queues", "tasks"],
        [
            [
                worker.id,
                worker.host,
                str(worker.pid),
                sign(worker, now),
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


def sign(worker: WorkerRecord, now: int) -> str:
    """Say whether a worker is alive, and how old is what it told last: its counts too are as of that beat."""
    age = output.age(now - worker.seen_at, units=1)
    if worker.id.startswith("tick-") and worker.alive:
        return f"ticked {age} ago"
    return f"alive, beat {age} ago" if worker.alive else f"silent for {age}"
