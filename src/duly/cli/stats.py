"""`duly stats`: counts jobs by queue and state, dead jobs, and the work of the workers."""

from __future__ import annotations

from collections.abc import Sequence

import click
import msgspec

from duly.cli import output
from duly.cli.database import with_app
from duly.cli.queues import QUEUE_COLUMNS, pause_text, queue_cells
from duly.duly import Duly
from duly.model import MANY, DeadFigure, ParkedFigure, Pause, QueueFigure, WorkerRecord
from duly.store import ops

LIVE = ("ready", "scheduled", "running", "waiting")
MOST_DEAD = 20


class Stats(msgspec.Struct, frozen=True):
    """The counts of the whole database. `beat_at` is the oldest of the workers' last heartbeats."""

    at: int
    states: dict[str, int]
    queues: list[QueueFigure]
    dead: list[DeadFigure]
    parked: list[ParkedFigure]
    workers: dict[str, int]
    beat_at: int | None
    paused: list[Pause]


@click.command()
@with_app
def command(app: Duly, as_json: bool) -> None:
    """Count jobs by queue and state, dead ones by task and reason, workers and their slots.

    It counts jobs that have not ended, and dead ones that were neither replayed nor resolved. Counts of a queue stop at
    10,001. The counts of a worker begin when it starts.

    Examples:
      duly stats
      duly stats --json --url jobs.db
    """
    stats = read(app)
    if as_json:
        output.answer_json(stats)
    else:
        _print(stats)


def read(app: Duly) -> Stats:
    """Read all counts once."""
    run = app.driver.run
    queues, dead, workers = run(ops.queues()), run(ops.dead_metrics()), run(ops.workers())
    states = {state: sum(getattr(one, state) for one in queues) for state in LIVE}
    states["dead"] = sum(figure.count for figure in dead)
    beat_at = min((worker.seen_at for worker in workers if worker.alive), default=None)
    return Stats(run(ops.clock()), states, queues, dead, run(ops.parked()), _sum(workers), beat_at, run(ops.paused()))


def _sum(workers: Sequence[WorkerRecord]) -> dict[str, int]:
    alive = [worker for worker in workers if worker.alive]
    sums = {name: sum(getattr(one, name) for one in alive) for name in ("slots", "running", "succeeded", "failed")}
    return {"alive": len(alive), "silent": len(workers) - len(alive), **sums}


def _print(stats: Stats) -> None:
    by_queue = {state: [getattr(one, state) for one in stats.queues] for state in LIVE}
    rows = [(state, _total(numbers)) for state, numbers in by_queue.items()]
    output.facts([*rows, ("dead", f"{stats.states['dead']:,}"), ("workers", _workers(stats))])
    _print_part(QUEUE_COLUMNS, [queue_cells(one) for one in stats.queues])
    dead = stats.dead[:MOST_DEAD]
    _print_part(
        ["dead", "task", "oldest", "reason"],
        [[f"{one.count:,}", one.task, f"{output.age(one.oldest_ms)} ago", one.reason or "-"] for one in dead],
    )
    if len(stats.dead) > len(dead):
        click.echo(f"… and {len(stats.dead) - len(dead):,} kinds more: --json has all")
    _print_part(["parked", "task", "queue"], [[output.figure(one.count), one.task, one.queue] for one in stats.parked])
    _print_part(
        ["paused", "name", "by"], [[pause.kind, pause.name, pause_text(pause, stats.at)] for pause in stats.paused]
    )


def _total(numbers: Sequence[int]) -> str:
    """Write the sum of counts of which some may have been stopped."""
    if any(number > MANY for number in numbers):
        return f"more than {sum(min(number, MANY) for number in numbers):,}"
    return f"{sum(numbers):,}"


def _workers(stats: Stats) -> str:
    sums = stats.workers
    if not sums["alive"]:
        return "none alive" + (f", {sums['silent']:,} silent" if sums["silent"] else "")
    silent = f", {sums['silent']:,} silent" if sums["silent"] else ""
    return (
        f"{sums['alive']:,} alive{silent}; {sums['running']:,} of {sums['slots']:,} slots busy; "
        f"{sums['succeeded']:,} succeeded and {sums['failed']:,} failed since they started "
        f"(as of the last beat, {output.ago(stats.beat_at, stats.at, units=1)})"
    )


def _print_part(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        click.echo()
        output.table(headings, rows)
