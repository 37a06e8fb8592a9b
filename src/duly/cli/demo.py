"""`duly demo`: real workers on a SQLite file of its own, one of them killed on the way.

Two `duly worker` processes run a few hundred jobs; the one that holds a long job is killed with SIGKILL, and the other
rescues what it held. The summary counts what was enqueued against what became of it, and its numbers must add up.
"""

from __future__ import annotations

import collections
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from duly.cli.supervisor import command_line
from duly.model import JobRecord, State
from duly.store import ops

if TYPE_CHECKING:
    from duly.app import Duly

BAR = 30
LOOK_S = 0.1
PATIENCE_S = 50
MAILS, RECEIPTS, FLAKY, POISONS, LATER, SLOW = 240, 20, 30, 4, 8, 2


@click.command(epilog="\b\nExamples:\n  duly demo\n  duly demo --keep demo-folder\n")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="DULY_DEMO_KEEP",
    help="Keep the database, in this folder. Default: a temporary one that is removed in the end.",
)
def command(keep: Path | None) -> None:
    """See jobs run, fail, retry, die and be rescued, on a database of its own.

    Needs no server and no configuration, takes about ten seconds and ends by itself.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        try:
            folder = Path(keep or tempfile.mkdtemp(prefix="duly-demo-")).absolute()
            if keep is None:
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise click.ClickException(f"{error.filename} cannot be made: {error.strerror}") from error
        app = stack.enter_context(own_app(folder))
        good = Demo(app, folder).run()
    if keep is not None:
        path = folder / "demo.db"
        click.echo(f'\nLook around:  sqlite3 {path} "select task, state, count(*) from duly_jobs group by 1, 2"')  # noqa: S608
        click.echo(f'              sqlite3 {path} "select task, reason, error from duly_dead"')  # noqa: S608
    sys.exit(0 if good else 1)


@contextlib.contextmanager
def own_app(folder: Path) -> Iterator[Duly]:
    """Import the tasks so that nothing set for other apps counts, here or in the workers."""
    for name in [name for name in os.environ if name.startswith("DULY_")]:
        del os.environ[name]
    os.environ["DULY_DEMO_DB"] = str(folder / "demo.db")
    os.environ["DULY_RUN_DIR"] = str(folder / "run")
    before = Path.cwd()
    os.chdir(folder)
    try:
        from duly.cli.demo_tasks import app

        yield app
        app.close()
    finally:
        os.chdir(before)


class Demo:
    """One run."""

    def __init__(self, app: Duly, folder: Path) -> None:
        self._app = app
        self._folder = folder
        self._workers: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
        self._lifeline, self._held = os.pipe()
        self._lost: set[str] = set()  # what the killed worker held
        self._told: set[str] = set()
        self._told_at = 0.0
        self._began_at = time.monotonic()

    def run(self) -> bool:
        """Enqueue, work, watch, sum up; says whether the numbers add up."""
        about = self._app.driver.about()
        click.echo(f"database   {about.where}  ({about.engine}, durability {about.durability})")
        if self._app.list(limit=1):
            raise click.ClickException(f"{about.where} has jobs already: name an empty folder")
        total = self._enqueue_all()
        try:
            for name in ("worker-1", "worker-2"):
                self._start_worker(name)
            self._watch(total)
        finally:
            self._end_workers()
        return self._sum_up(total)

    def _enqueue_all(self) -> int:
        """Enqueue the work, some of it twice under one key, and return how many jobs that makes."""
        from duly.cli import demo_tasks as tasks

        slow = [tasks.slow_report.call(n) for n in range(SLOW)]
        jobs: list[Any] = [*tasks.slow_report.using(priority=10).enqueue_many(slow)]
        _enqueued(SLOW, "slow_report", "takes longer than its lease, and its worker is killed")
        jobs += tasks.send_mail.enqueue_many(tasks.send_mail.call(f"{n}@example.com") for n in range(MAILS))
        _enqueued(MAILS, "send_mail", "succeeds")
        jobs += tasks.flaky_import.enqueue_many(tasks.flaky_import.call(n) for n in range(FLAKY))
        _enqueued(FLAKY, "flaky_import", "fails at first, then succeeds")
        jobs += tasks.poison.enqueue_many(tasks.poison.call(n) for n in range(POISONS))
        _enqueued(POISONS, "poison", "fails every time, ends dead")
        jobs += tasks.later.using(delay="2s").enqueue_many(tasks.later.call(n) for n in range(LATER))
        _enqueued(LATER, "later", "is due in two seconds")
        orders = [n % (RECEIPTS // 2) for n in range(RECEIPTS)]
        receipts = [tasks.receipt.using(key=f"order-{n}").enqueue(n) for n in orders]
        again = sum(job.deduplicated for job in receipts)
        _enqueued(RECEIPTS, "receipt", f"under {len(set(orders))} keys: {again} were there already")
        click.echo()
        return len({job.id for job in [*jobs, *receipts]})

    def _start_worker(self, name: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(  # noqa: S603
                command_line(
                    "worker", "duly.cli.demo_tasks:app", "--concurrency=4", "--grace=1s", f"--lifeline={self._lifeline}"
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self._lifeline],
                process_group=0,
            )
        self._workers[process.pid] = name, process

    def _end_workers(self) -> None:
        for _, process in self._workers.values():
            process.terminate()
        for _, process in self._workers.values():
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, total: int) -> None:
        """Show what happens until all is done; kill the worker of a long job."""
        while time.monotonic() - self._began_at < PATIENCE_S:
            jobs = self._app.list(limit=1000)
            self._tell_events(jobs)
            if self._draw(jobs, total) == total:
                break
            if not self._lost:
                self._kill_worker_of([job for job in jobs if job.task == "slow_report"])
            time.sleep(LOOK_S)

    def _kill_worker_of(self, reports: list[JobRecord]) -> None:
        """Kill the worker that is in the middle of a long job."""
        pids = {worker.id: worker.pid for worker in self._app.driver.run(ops.workers())}
        for job in reports:
            pid = pids.get(job.worker or "") if job.state is State.RUNNING and job.progress else None
            if pid in self._workers:
                name, process = self._workers[pid]
                process.kill()
                process.wait()
                self._lost = {one.id for one in self._app.list(state="running", limit=1000) if one.worker == job.worker}
                _say(
                    f"{name} is killed with SIGKILL in the middle of slow_report ({job.progress_message}), "
                    f"while it holds {len(self._lost)} {_plural('job', self._lost)}"
                )
                return

    def _tell_events(self, jobs: list[JobRecord]) -> None:
        rescued = [job for job in jobs if job.id in self._lost - self._told and self._crashes(job)]
        dead = [job for job in jobs if job.state is State.DEAD and job.id not in self._told]
        if rescued:
            tasks = ", ".join(sorted({job.task for job in rescued}))
            _say(f"{len(rescued)} {_plural('job', rescued)} of the killed worker rescued ({tasks})")
        for job in dead:
            _say(f"{job.task} is dead after {job.attempt} attempts: {job.error}")
        self._told |= {job.id for job in [*rescued, *dead]}

    def _crashes(self, job: JobRecord) -> int:
        """Count the attempts that ended with their worker."""
        return sum(one.outcome == "crashed" for one in self._app.driver.run(ops.attempts(job.id)))

    def _draw(self, jobs: list[JobRecord], total: int) -> int:
        """Show how many jobs are in which state, and return how many have ended."""
        states = collections.Counter(job.state for job in jobs)
        done = sum(count for state, count in states.items() if state.ended)
        counts = "  ".join(f"{state} {states[state]}" for state in State if states[state])
        line = f"[{'#' * (BAR * done // total):<{BAR}}] {done:3}/{total}  {counts}"
        if sys.stdout.isatty():
            click.echo(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}", nl=False)
        elif done == total or time.monotonic() - self._told_at > 1:
            self._told_at = time.monotonic()
            click.echo(line)
        return done

    def _sum_up(self, total: int) -> bool:
        """Print what became of everything, and say whether it adds up."""
        jobs = self._app.list(limit=1000)
        ended = collections.Counter(job.state for job in jobs)
        attempts = sum(job.attempt for job in jobs)
        failed = FLAKY + POISONS
        rescued = sum(self._crashes(job) for job in jobs if job.id in self._lost)
        click.echo(f"\n\nenqueued   {total}")
        for state in (State.SUCCEEDED, State.DEAD):
            click.echo(f"{state:<10} {ended[state]}")
        click.echo(f"attempts   {attempts} = {total} + {failed} again after a failure + {rescued} after the kill")
        click.echo(f"rescued    {rescued}")
        click.echo(f"time       {time.monotonic() - self._began_at:.1f} s")
        wanted = {"succeeded": total - POISONS, "dead": POISONS, "attempts": total + failed + rescued}
        wanted["rescued"] = max(1, len(self._lost))
        found = {state.value: count for state, count in ended.items()} | {"attempts": attempts, "rescued": rescued}
        if wanted == found:
            click.echo("Every job ended once, as it should.")
            return True
        click.echo(f"This does not add up: {wanted} was to be, {found} is. The workers said:")
        for log in sorted(self._folder.glob("*.log")):
            click.echo("".join(f"  {line}\n" for line in log.read_text().splitlines()[-20:]))
        return False


def _enqueued(count: int, task: str, expectation: str) -> None:
    click.echo(f"enqueued   {count:4} {task:<13} {expectation}")


def _plural(noun: str, things: Sized) -> str:
    return noun if len(things) == 1 else f"{noun}s"


def _say(text: str) -> None:
    """Print an event above the bar."""
    click.echo(("\r\x1b[K" if sys.stdout.isatty() else "") + f"  ! {text}")
