"""`duly demo`: two workers run jobs from a SQLite file of its own, one is killed, and the other rescues its jobs.

The summary is read from the database: it compares the jobs that were enqueued with those that ended.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from duly.cli import output
from duly.cli.demo_picture import BOLD, RED, teller
from duly.cli.supervisor import command_line
from duly.model import Attempt, JobRecord, State
from duly.store import ops

if TYPE_CHECKING:
    from duly.app.job import Job
    from duly.duly import Duly

MAILS, MORE_MAILS, RECEIPTS, FLAKY, POISONS, LATER, TICKS = 160, 120, 20, 30, 4, 8, 1000
LATER_S = 4
EVERYTHING = 10_000
LOOK_S = 0.1
TIMEOUT_S = 50
KILL_AT = 30.0  # percent of the long job
CRASHED = "crashed"


@click.command()
@click.option(
    "--keep",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Put the database into this new or empty folder. Default: a temporary folder, printed at the end.",
)
@click.option("--json", "as_json", is_flag=True, help="Print only the figures, as JSON.")
def command(keep: Path | None, as_json: bool) -> None:
    """Show jobs that run, fail, retry, die and are rescued, on a database of its own.

    Needs no server and no configuration, and ends after about ten seconds.

    Examples:
      duly demo
      duly demo --keep demo-folder
      duly demo --json
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit_by_signal)
    program = own_name()
    try:
        with own_folder(keep) as folder, own_app(folder) as app:
            good = Demo(app, folder, program, as_json=as_json).run()
    except KeyboardInterrupt:
        click.echo(f"Stopped, and the workers too.{'' if keep else ' The database is removed.'}", err=True)
        sys.exit(128 + signal.SIGINT)
    sys.exit(0 if good else 1)


def _exit_by_signal(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


@contextlib.contextmanager
def own_folder(keep: Path | None) -> Iterator[Path]:
    """Make the folder; a temporary one is removed unless the demo ends normally."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="duly-demo-")) if keep is None else keep.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise click.UsageError(f"--keep: {folder} is not empty: name a new or an empty folder")
    except OSError as error:
        raise click.ClickException(f"cannot make a folder for the database: {error}. Name one with --keep") from error
    try:
        yield folder
    except BaseException:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def own_app(folder: Path) -> Iterator[Duly]:
    """Import the tasks without the settings of other apps, here and in the workers."""
    for name in [name for name in os.environ if name.startswith("DULY_")]:
        del os.environ[name]
    os.environ["DULY_DEMO_DB"] = str(folder / "demo.db")
    os.environ["DULY_RUN_DIR"] = str(folder / "run")
    os.chdir(folder)  # away from a duly.toml of another app
    from duly.cli.demo_tasks import app

    try:
        yield app
    finally:
        app.close()


class Stuck(Exception):
    """The demo cannot continue."""


class Demo:
    """One run."""

    def __init__(self, app: Duly, folder: Path, program: str, *, as_json: bool = False) -> None:
        self._app, self._folder, self._program, self._as_json = app, folder, program, as_json
        self._teller = teller(as_json=as_json)
        self._jobs: list[JobRecord] = []
        self._enqueued: set[str] = set()
        self._repeated = 0
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._names: dict[str, str] = {}  # of workers, by their ids
        self._killed: str | None = None
        self._lost: list[JobRecord] = []  # the jobs that the killed worker held
        self._news: list[tuple[Callable[[], bool], str]] = []
        self._ticks_per_s = 0.0
        self._lifeline, self._held = os.pipe()

    def run(self) -> bool:
        """Run all parts, print the summary, and return whether the figures add up."""
        try:
            with self._teller:
                about = self._app.driver.about()
                self._teller.line("A job queue in one file, two worker processes, no server.", BOLD)
                self._teller.line(f"{about.where} ({about.engine}, durability {about.durability})")
                self._enqueue()
                self._work()
                self._kill()
                self._hurry()
        except Stuck as error:
            return self._fail(str(error))
        finally:
            self._stop_workers()
        return self._sum_up()

    def _enqueue(self) -> None:
        """Enqueue jobs, some of them twice under one key."""
        tasks = self._app.tasks
        self._teller.act("1. Jobs are enqueued: each call writes a row to disk before anything runs.")
        self._add("flaky_import", FLAKY, "fail once, then succeed")
        self._add("poison", POISONS, "fail every time")
        receipts = [tasks["receipt"].using(key=f"order-{n // 2}").enqueue(n // 2) for n in range(RECEIPTS)]
        self._repeated = sum(job.deduplicated for job in receipts)
        self._note("receipt", receipts, f"{RECEIPTS} calls: {self._repeated} repeat a key and add nothing")
        self._add("send_mail", MAILS, "take 0.1 s each")
        self._add("later", LATER, f"are due in {LATER_S} s", delay=LATER_S)

    def _add(self, name: str, count: int, what: str, **terms: Any) -> None:
        task = self._app.tasks[name].using(**terms)
        self._note(name, task.enqueue_many(task.call(n) for n in range(count)), what)

    def _note(self, task: str, jobs: Sequence[Job[Any]], what: str) -> None:
        ids = {job.id for job in jobs}
        self._enqueued |= ids
        self._teller.event(f"{len(ids):5,} {task:<13} {what}")

    def _work(self) -> None:
        """Let two workers run everything that is due."""
        self._teller.act("2. Two workers run them: failed jobs are retried, and dead at the last attempt.")
        flaky = "flaky_import failed (ConnectionError): each is retried after 0.3 s"
        self._news = [
            (lambda: len(self._names) == 2, "worker-1 and worker-2 are here, 4 jobs at once each"),
            (lambda: any(job.attempt and not job.state.ended for job in self._of("flaky_import")), flaky),
            (lambda: self._are("flaky_import", State.SUCCEEDED), f"flaky_import: all {FLAKY} succeeded at attempt 2"),
            (lambda: self._are("poison", State.DEAD), f"poison: all {POISONS} are dead after 2 attempts, and kept"),
            (lambda: self._are("later", State.SUCCEEDED), f"later: the {LATER} delayed jobs were due and have run"),
        ]
        for name in ("worker-1", "worker-2"):
            self._start_worker(name)
        self._until(lambda: all(job.state.ended for job in self._jobs if job.task != "later"))

    def _kill(self) -> None:
        """Kill the worker of a long job, and wait until all jobs that it held have ended."""
        self._teller.act("3. A worker is killed in the middle of a long job, as in a crash.")
        self._add("send_mail", MORE_MAILS, "take 0.1 s each")
        self._add("slow_report", 1, "takes 2.5 s, and runs first", priority=10)
        self._until(lambda: any((job.progress or 0) >= KILL_AT for job in self._of("slow_report")))
        [report] = self._of("slow_report")
        self._killed = self._names[report.worker or ""]
        self._processes[self._killed].kill()
        self._processes[self._killed].wait()
        self._lost = [job for job in self._list() if job.state is State.RUNNING and job.worker == report.worker]
        lost = output.plural(len(self._lost), "job")
        where = f"{report.progress_message} of slow_report"
        leases = f"the last lease expires in {max(self._lease_left_s(), 0):.1f} s"
        self._teller.event(f"{self._killed} is killed (SIGKILL) in {where}; it held {lost}; {leases}", RED)
        other = next(name for name in self._processes if name != self._killed)
        self._news += [
            (lambda: self._lease_left_s() < 0, f"the leases have expired: {other} checks that no worker renews them"),
            (self._all_rescued, f"{other} has rescued {lost}: {_by_task(self._lost)}"),
            (lambda: self._are("slow_report", State.SUCCEEDED), f"slow_report succeeded after all, on {other}"),
        ]
        self._until(self._done)

    def _hurry(self) -> None:
        """Run many jobs that do nothing, to measure the speed."""
        self._teller.act(f"4. How fast is it? {TICKS:,} jobs that do nothing, for the worker that is left.")
        self._add("tick", TICKS, "do nothing")
        self._until(self._done)
        ticks = self._of("tick")
        took_ms = max(job.finished_at or 0 for job in ticks) - min(job.created_at for job in ticks)
        self._ticks_per_s = TICKS * 1000 / max(took_ms, 1)
        self._teller.event(f"done in {took_ms / 1000:.2f} s")

    # Watching

    def _until(self, reached: Callable[[], bool]) -> None:
        """Show the progress until a state is reached."""
        while True:
            self._look()
            if reached():
                return
            if self._teller.seconds > TIMEOUT_S:
                raise Stuck(f"it has not ended after {TIMEOUT_S} s")
            for name, process in self._processes.items():
                if name != self._killed and process.poll() is not None:
                    raise Stuck(f"{name} exited with {process.returncode}")
            time.sleep(LOOK_S)

    def _look(self) -> None:
        """Read the database, print what is new, and show the rest."""
        self._jobs = self._list()
        names = {process.pid: name for name, process in self._processes.items()}
        self._names |= {worker.id: names[worker.pid] for worker in self._app.workers() if worker.pid in names}
        for one in [one for one in self._news if one[0]()]:
            self._news.remove(one)
            self._teller.event(one[1])
        states = Counter(job.state for job in self._jobs)
        self._teller.show(states, {name: self._activity(name) for name in self._processes})

    def _activity(self, name: str) -> str:
        """Write what a worker does."""
        if name == self._killed:
            if self._all_rescued():
                return "killed; all its jobs are rescued"
            left_s = self._lease_left_s()
            leases = f"expire in {left_s:.1f} s" if left_s > 0 else "have expired: rescue is near"
            return f"killed; held {output.plural(len(self._lost), 'job')}, leases {leases}"
        running = [job for job in self._jobs if job.state is State.RUNNING]
        held = [job for job in running if self._names.get((job.worker or "").removesuffix(ops.CHILD)) == name]
        return f"runs {_by_task(held)}" if held else "is idle" if name in self._names.values() else "starts"

    def _lease_left_s(self) -> float:
        """Compute when the last lease of the killed worker expires."""
        return max(job.lease_until or 0 for job in self._lost) / 1000 - time.time()

    def _all_rescued(self) -> bool:
        return all(any(one.outcome == CRASHED for one in self._attempts(job)) for job in self._lost)

    def _done(self) -> bool:
        return all(job.state.ended for job in self._jobs)

    def _of(self, task: str) -> list[JobRecord]:
        return [job for job in self._jobs if job.task == task]

    def _are(self, task: str, state: State) -> bool:
        return all(job.state is state for job in self._of(task))

    def _list(self) -> list[JobRecord]:
        return self._app.list(limit=EVERYTHING)

    def _attempts(self, job: JobRecord) -> list[Attempt]:
        return self._app.driver.run(ops.attempts(job.id))

    # The workers

    def _start_worker(self, name: str) -> None:
        words = ("duly.cli.demo_tasks:app", "--concurrency=4", "--grace=1s", f"--lifeline={self._lifeline}")
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(  # noqa: S603
                command_line("worker", *words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self._lifeline],
                process_group=0,
            )

    def _stop_workers(self) -> None:
        """Stop the workers; another signal meanwhile must not leave one behind."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    # The summary

    def _sum_up(self) -> bool:
        """Print the figures, and return whether they add up."""
        self._jobs = self._list()
        figures = self._figures()
        wrong = self._wrong(figures)
        if self._as_json:
            output.answer_json({**figures, "database": str(self._folder / "demo.db"), "wrong": wrong})
            return not wrong
        self._print(figures)
        if wrong:
            return self._fail(f"this does not add up: {', '.join(wrong)}")
        click.echo(f"\nIt adds up: {len(self._enqueued):,} jobs, each ended once.")
        self._print_next()
        return True

    def _figures(self) -> dict[str, float]:
        states = Counter(job.state for job in self._jobs)
        retried = [job for job in self._jobs if job.attempt > 1 or job.state is State.DEAD]
        outcomes = Counter(one.outcome for job in retried for one in self._attempts(job))
        return {
            "enqueued": len(self._enqueued),
            "succeeded": states[State.SUCCEEDED],
            "dead": states[State.DEAD],
            "attempts": sum(job.attempt for job in self._jobs),
            "failed": outcomes["failed"],
            "crashed": outcomes[CRASHED],
            "repeated": self._repeated,
            "rescued": len(self._lost) if self._all_rescued() else 0,
            "per_second": round(self._ticks_per_s),
            "seconds": round(self._teller.seconds, 1),
        }

    def _print(self, of: dict[str, float]) -> None:
        ends = f"{of['succeeded']:,} successes + {of['failed']} failures + {of['crashed']} cut off by the kill"
        remarks = {
            "enqueued": f"by {of['enqueued'] + self._repeated:,} calls: {self._repeated} repeated a key",
            "dead": "poison, kept with error and traceback",
            "attempts": f"= {ends}",
            "rescued": f"all that {self._killed} held: {_by_task(self._lost)}",
            "per_second": "jobs that do nothing, one worker, every commit on disk",
        }
        click.echo()
        for name in ("enqueued", "succeeded", "dead", "attempts", "rescued", "per_second", "seconds"):
            click.echo(f"{name.replace('_', ' '):<10} {of[name]:>7,}  {remarks.get(name, '')}".rstrip())

    def _wrong(self, of: dict[str, float]) -> list[str]:
        """Name the figures that do not add up."""
        checks = {
            "jobs enqueued and jobs found": {job.id for job in self._jobs} == self._enqueued,
            "calls that repeated a key": self._repeated == RECEIPTS // 2,
            "dead jobs": of["dead"] == POISONS and self._are("poison", State.DEAD),
            "succeeded jobs": of["succeeded"] == of["enqueued"] - POISONS,
            "attempts": of["attempts"] == of["succeeded"] + of["failed"] + of["crashed"],
            "rescued jobs": self._lost and self._all_rescued(),
        }
        return [name for name, good in checks.items() if not good]

    def _print_next(self) -> None:
        """Print commands that work on the database of the demo."""
        url = shlex.quote(str(self._folder / "demo.db"))
        click.echo("\nThe database is kept. Try next:")
        for what, words in (
            ("the dead jobs and their errors", "dead list"),
            ("the long job: one attempt crashed, one succeeded", f"jobs show {self._of('slow_report')[0].id}"),
            ("the queue now: dead jobs, and a silent worker", "stats"),
        ):
            click.echo(f"  {what}\n    {self._program} {words} --url {url}")
        click.echo(f"  or remove it\n    rm -r {shlex.quote(str(self._folder))}")

    def _fail(self, text: str) -> bool:
        click.echo(f"\nduly demo: {text}. {self._folder} is kept. The logs of the workers end with:", err=True)
        for log in sorted(self._folder.glob("*.log")):
            click.echo(f"{log.stem}:", err=True)
            click.echo("".join(f"  {line}\n" for line in log.read_text().splitlines()[-10:]), err=True)
        return False


def own_name() -> str:
    """Write the command that starts this program again."""
    if Path(sys.argv[0]).name != "duly":
        return f"{shlex.quote(sys.executable)} -m duly"
    return "duly" if shutil.which("duly") == sys.argv[0] else shlex.quote(sys.argv[0])


def _by_task(jobs: list[JobRecord]) -> str:
    """Count jobs by task, with the progress of a long one."""
    counts = Counter(job.task + (f" ({job.progress:.0f} %)" if job.progress else "") for job in jobs)
    return ", ".join(f"{count} {task}" if count > 1 else task for task, count in sorted(counts.items()))
