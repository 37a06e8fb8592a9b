"""`duly top`: shows queues and workers live."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import click
import msgspec

from duly.cli import output
from duly.cli.database import with_app
from duly.cli.jobs import note
from duly.cli.options import interval_option
from duly.cli.queues import QUEUE_COLUMNS, pause_text, queue_cells
from duly.cli.workers import liveness
from duly.duly import Duly
from duly.errors import StoreError
from duly.model import MANY, JobRecord, Pause, QueueFigure, State, WorkerRecord
from duly.rules.durations import describe
from duly.store import ops

RUNNING, DEAD = 100, 5
OPEN, CLOSE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # another screen without a cursor, and back
HOME, REST_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


class Snapshot(msgspec.Struct, frozen=True):
    """The state of the database at one moment. Rates are jobs a second, None until a worker has sent two heartbeats."""

    at: int
    queues: list[QueueFigure]
    workers: list[WorkerRecord]
    paused: list[Pause]
    running: list[JobRecord]
    dead: list[JobRecord]
    dead_count: int
    succeeded_rate: float | None
    failed_rate: float | None


@click.command()
@interval_option
@click.option("--once", is_flag=True, help="Print the state once and exit.")
@with_app
def command(app: Duly, interval_ms: int, once: bool, as_json: bool) -> None:
    """Watch queues, workers, running and dead jobs live, until Ctrl-C.

    On a terminal it fills the screen. Without one, or where $TERM is dumb, it prints a line at each interval; with
    --json an object. Rates are computed from the counts that workers send with each heartbeat. While the database is
    away, it waits.

    Examples:
      duly top
      duly top --interval 5s --url postgresql://user@host/db
      duly top --once
      duly top --json | jq .succeeded_rate
    """
    where = app.driver.about().where
    rates = Rates()
    with suppress(KeyboardInterrupt):  # ends the command
        if once or as_json or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
            _print_repeatedly(app, rates, where, interval_ms, once=once, as_json=as_json)
        else:
            _draw_repeatedly(app, rates, where, interval_ms)


class Rates:
    """Computes the rates of workers from their counts at two heartbeats."""

    def __init__(self) -> None:
        self._seen: dict[str, WorkerRecord] = {}
        self._rates: dict[str, tuple[float, float]] = {}

    def of(self, workers: Sequence[WorkerRecord]) -> tuple[float, float] | tuple[None, None]:
        """Give successes and failures a second of all living workers, as of their last heartbeats."""
        alive = [worker for worker in workers if worker.alive]
        for worker in alive:
            self._note(worker)
        known = [self._rates[worker.id] for worker in alive if worker.id in self._rates]
        if alive and not known:
            return None, None
        return sum(rate for rate, _ in known), sum(rate for _, rate in known)

    def _note(self, worker: WorkerRecord) -> None:
        before = self._seen.get(worker.id, worker)
        if worker.seen_at == before.seen_at:
            self._seen.setdefault(worker.id, worker)
            return
        seconds = (worker.seen_at - before.seen_at) / 1000
        self._seen[worker.id] = worker
        self._rates[worker.id] = (
            max(0, worker.succeeded - before.succeeded) / seconds,
            max(0, worker.failed - before.failed) / seconds,
        )


def read(app: Duly, rates: Rates) -> Snapshot:
    """Read the state of the database, by a few queries that do not get slower with more jobs."""
    run = app.driver.run
    workers, running = run(ops.workers()), run(ops.listing(state=State.RUNNING, limit=RUNNING))
    succeeded_rate, failed_rate = rates.of(workers)
    return Snapshot(
        at=run(ops.clock()),
        queues=run(ops.queues()),
        workers=workers,
        paused=run(ops.paused()),
        running=sorted(running, key=lambda job: job.due_at or 0),
        dead=run(ops.listing(state=State.DEAD, limit=DEAD)),
        dead_count=sum(figure.count for figure in run(ops.dead_metrics())),
        succeeded_rate=succeeded_rate,
        failed_rate=failed_rate,
    )


def _print_repeatedly(app: Duly, rates: Rates, where: str, interval_ms: int, *, once: bool, as_json: bool) -> None:
    while True:
        try:
            found = read(app, rates)
        except StoreError as error:
            if once:
                raise
            _print_error(error, as_json=as_json)
        else:
            _print_snapshot(found, where, full=once, as_json=as_json)
        if once:
            return
        time.sleep(interval_ms / 1000)


def _print_error(error: StoreError, *, as_json: bool) -> None:
    if as_json:
        output.answer_json({"error": output.reason(error), "code": error.code})
    else:
        click.echo(f"{_clock()}  {output.plain(output.reason(error))}")


def _print_snapshot(found: Snapshot, where: str, *, full: bool, as_json: bool) -> None:
    if as_json:
        output.answer_json(found)
    elif full:
        click.echo("\n".join(picture(found, where)))
    else:
        click.echo(f"{_clock(found.at)}  {sums_line(found)}")


def _clock(at: int | None = None) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(None if at is None else at / 1000))


def sums_line(found: Snapshot) -> str:
    """Write the sums of a snapshot in a line."""
    states = ("ready", "scheduled", "waiting")
    counts = [f"{state} {_sum([getattr(one, state) for one in found.queues])}" for state in states]
    return "  ".join([f"running {_busy(found)}", *counts, f"dead {found.dead_count:,}", _speed(found), _alive(found)])


def _sum(numbers: Sequence[int]) -> str:
    uncounted = any(number > MANY for number in numbers)
    return f"{sum(min(number, MANY) for number in numbers):,}" + ("+" if uncounted else "")


def _busy(found: Snapshot) -> str:
    slots = sum(worker.slots for worker in found.workers if worker.alive)
    return f"{_sum([one.running for one in found.queues])}/{slots}"


def _speed(found: Snapshot) -> str:
    if found.succeeded_rate is None or found.failed_rate is None:
        return "done -/s  failed -/s"
    return f"done {found.succeeded_rate:.1f}/s  failed {found.failed_rate:.1f}/s"


def _alive(found: Snapshot) -> str:
    alive = sum(worker.alive for worker in found.workers)
    silent = len(found.workers) - alive
    return f"workers {alive}" + (f" ({silent} silent)" if silent else "")


def _draw_repeatedly(app: Duly, rates: Rates, where: str, interval_ms: int) -> None:
    """Redraw the screen at each interval; while the database is away the last picture stays, with the error above."""
    found, problem = read(app, rates), ""
    with screen():
        while True:
            size = shutil.get_terminal_size()
            head = f"{where}  every {describe(interval_ms)}, Ctrl-C ends"
            lines = picture(found, head, width=size.columns, height=size.lines)
            if problem:
                lines[1] = output.style(output.cut(problem, size.columns), fg="red")
            draw(lines[: size.lines])
            time.sleep(interval_ms / 1000)
            try:
                found, problem = read(app, rates), ""
            except StoreError as error:
                problem = f"{_clock()} {output.plain(' '.join(output.reason(error).split()))}"


@contextmanager
def screen() -> Iterator[None]:
    """Use the alternate screen of the terminal, and restore the main one at the end, after SIGTERM too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.stdout.write(OPEN)
    try:
        yield
    finally:
        sys.stdout.write(CLOSE)
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, before)


def draw(lines: Sequence[str]) -> None:
    """Overwrite the screen without clearing it first, which would flicker."""
    sys.stdout.write(HOME + "\n".join(line + REST_OF_LINE for line in lines) + REST_OF_SCREEN)
    sys.stdout.flush()


def picture(found: Snapshot, head: str, *, width: int | None = None, height: int = 10_000) -> list[str]:
    """Write a snapshot as lines, cut to the size of the screen."""
    lines = [
        output.cut(f"duly top  {output.moment(found.at)}  {head}", width),
        output.cut(sums_line(found), width),
    ]
    parts = [_queues(found, width), _workers(found, width), _dead(found, width)]
    left = height - len(lines) - sum(len(part) + 1 for part in parts if part)
    running = _running(found, width)
    parts.insert(2, running[: max(left - 1, 4)])
    for part in parts:
        if part:
            lines += ["", part[0].upper(), *part[1:]]
    return lines


def _queues(found: Snapshot, width: int | None) -> list[str]:
    pauses = {pause.name: pause for pause in found.paused if pause.kind == "queue"}
    rows = [[*queue_cells(one), pause_text(pauses.get(one.name), found.at)] for one in found.queues]
    return output.columns([*QUEUE_COLUMNS, "paused"], rows, width=width)


def _workers(found: Snapshot, width: int | None) -> list[str]:
    rows = [
        [
            worker.id,
            worker.host,
            liveness(worker, found.at),
            f"{worker.running}/{worker.slots}",
            f"{worker.succeeded:,}",
            f"{worker.failed:,}",
            ", ".join(worker.queues),
        ]
        for worker in sorted(found.workers, key=lambda worker: (not worker.alive, worker.id))
    ]
    return output.columns(["worker", "host", "state", "busy", "done", "failed", "queues"], rows, width=width)


def _running(found: Snapshot, width: int | None) -> list[str]:
    rows = [
        [job.id, job.task, job.queue, f"{job.attempt}/{job.max_attempts}", output.ago(job.due_at, found.at), note(job)]
        for job in found.running
    ]
    return output.columns(["running", "task", "queue", "attempt", "due", "progress"], rows, width=width)


def _dead(found: Snapshot, width: int | None) -> list[str]:
    rows = [[job.id, job.task, job.queue, output.ago(job.finished_at, found.at), note(job)] for job in found.dead]
    return output.columns(["last dead", "task", "queue", "died", "error"], rows, width=width)
