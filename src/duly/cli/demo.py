"""`duly demo`: real workers on a SQLite file of its own, one of them killed on the way.

Two `duly worker` processes run a few hundred jobs; the one that holds a long job is killed with SIGKILL, and the other
rescues what it held. The summary is read from the database: what was enqueued against what became of it, and its
numbers must add up.
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from duly.cli import output
from duly.cli.demo_picture import BOLD, RED, Lines, Scene, teller
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
PATIENCE_S = 50
# The long job is killed when this much of it is done.
KILL_AT = 30.0
CRASHED = "crashed"


@click.command()
@click.option(
    "--keep",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="DULY_DEMO_KEEP",
    help="Put the database into this new or empty folder. Default: a temporary one, named in the end.",
)
@click.option("--json", "as_json", is_flag=True, help="Tell no story, and answer with the figures in JSON.")
def command(keep: Path | None, as_json: bool) -> None:
    """See jobs run, fail, retry, die and be rescued, on a database of its own.

    Needs no server and no configuration, takes about ten seconds and ends by itself.

    Examples:
      duly demo
      duly demo --keep demo-folder
      duly demo --json
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ended_by_signal)
    program = own_name()
    try:
        with own_folder(keep) as folder, own_app(folder) as app:
            good = Demo(app, folder, program, as_json=as_json).run()
    except KeyboardInterrupt:
        click.echo(f"Stopped, and the workers too.{'' if keep else ' The database is removed.'}", err=True)
        sys.exit(128 + signal.SIGINT)
    sys.exit(0 if good else 1)


def _ended_by_signal(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


@contextlib.contextmanager
def own_folder(keep: Path | None) -> Iterator[Path]:
    """Make the folder; one of our own is only left behind by a demo that came to its end."""
    try:
        if keep is None:
            folder = Path(tempfile.mkdtemp(prefix="duly-demo-"))
        else:
            folder = keep.absolute()
            folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise click.UsageError(f"--keep: {folder} is not empty: name a new or an empty folder")
    except OSError as error:
        raise click.ClickException(f"no folder for the database: {error}. Name one with --keep FOLDER") from error
    try:
        yield folder
    except BaseException:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def own_app(folder: Path) -> Iterator[Duly]:
    """Import the tasks so that nothing set for other apps counts, here or in the workers."""
    for name in [name for name in os.environ if name.startswith("DULY_")]:
        del os.environ[name]
    os.environ["DULY_DEMO_DB"] = str(folder / "demo.db")
    os.environ["DULY_RUN_DIR"] = str(folder / "run")
    os.chdir(folder)  # away from a duly.toml that is meant for others
    from duly.cli.demo_tasks import app

    try:
        yield app
    finally:
        app.close()


class Stuck(Exception):
    """The demo does not come to its end."""


class Figures(NamedTuple):
    """What the database says in the end."""

    enqueued: int
    succeeded: int
    dead: int
    attempts: int
    failed: int
    crashed: int


class Demo:
    """One run."""

    def __init__(self, app: Duly, folder: Path, program: str, *, as_json: bool = False) -> None:
        self._app = app
        self._folder = folder
        self._program = program
        self._as_json = as_json
        self._teller: Lines = teller(as_json=as_json)
        self._jobs: list[JobRecord] = []
        self._enqueued: set[str] = set()
        self._repeated = 0
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._names: dict[str, str] = {}  # of workers, by their ids
        self._killed: str | None = None
        self._lost: list[JobRecord] = []  # what the killed worker held
        self._news: list[tuple[Callable[[], bool], str]] = []
        self._ticks_per_s = 0.0
        self._lifeline, self._held = os.pipe()

    def run(self) -> bool:
        """Tell the story and sum up; says whether the numbers add up."""
        try:
            with self._teller:
                self._introduce()
                self._enqueue()
                self._work()
                self._kill()
                self._hurry()
        except Stuck as error:
            return self._fail(str(error))
        finally:
            self._end_workers()
        return self._sum_up()

    def _introduce(self) -> None:
        about = self._app.driver.about()
        self._teller.line("A job queue in one file, two worker processes, no server.", BOLD)
        self._teller.line(f"{about.where} ({about.engine}, durability {about.durability})")

    def _enqueue(self) -> None:
        """Enqueue the work, some of it twice under one key."""
        from duly.cli import demo_tasks as tasks

        self._teller.act("1. Work is enqueued: each call is a row on disk before anything runs.")
        flaky = tasks.flaky_import.enqueue_many(tasks.flaky_import.call(n) for n in range(FLAKY))
        self._made(flaky, "flaky_import", "fail once, then succeed")
        poisons = tasks.poison.enqueue_many(tasks.poison.call(n) for n in range(POISONS))
        self._made(poisons, "poison", "fail every time")
        orders = [n % (RECEIPTS // 2) for n in range(RECEIPTS)]
        receipts = [tasks.receipt.using(key=f"order-{n}").enqueue(n) for n in orders]
        self._repeated = sum(job.deduplicated for job in receipts)
        self._made(receipts, "receipt", f"{RECEIPTS} calls: {self._repeated} repeat a key and add nothing")
        self._enqueue_mails(MAILS)
        delayed = tasks.later.using(delay=LATER_S).enqueue_many(tasks.later.call(n) for n in range(LATER))
        self._made(delayed, "later", f"are due in {LATER_S} s")

    def _enqueue_mails(self, count: int) -> None:
        from duly.cli.demo_tasks import send_mail

        mails = send_mail.enqueue_many(send_mail.call(f"{n}@example.com") for n in range(count))
        self._made(mails, "send_mail", "take 0.1 s each")

    def _made(self, jobs: Iterable[Job[Any]], task: str, what: str) -> None:
        ids = {job.id for job in jobs}
        self._enqueued |= ids
        self._teller.event(f"{len(ids):5,} {task:<13} {what}")

    def _work(self) -> None:
        """Let two workers share the queue until all is done that is due."""
        self._teller.act("2. Two workers share it. What fails is tried again; what never works ends dead.")
        self._news = [
            (lambda: len(self._names) == 2, "worker-1 and worker-2 are here, 4 jobs at once each"),
            (
                lambda: any(job.attempt and job.state is State.SCHEDULED for job in self._of("flaky_import")),
                "flaky_import failed (ConnectionError): each is tried again after 0.3 s",
            ),
            (
                lambda: self._all("flaky_import", State.SUCCEEDED),
                f"flaky_import: all {FLAKY} succeeded at the second attempt",
            ),
            (lambda: self._all("poison", State.DEAD), f"poison: all {POISONS} are dead after 2 attempts, and kept"),
            (
                lambda: all(job.state is not State.SCHEDULED for job in self._of("later")),
                f"later: the {LATER} delayed jobs are due now",
            ),
        ]
        for name in ("worker-1", "worker-2"):
            self._start_worker(name)
        self._until(lambda: all(job.state.ended for job in self._jobs if job.task != "later"))

    def _kill(self) -> None:
        """Kill the worker that is in the middle of a long job, and watch until all that it held is done."""
        from duly.cli import demo_tasks as tasks

        self._teller.act("3. A long job among others: the worker that runs it is killed, as in a crash.")
        self._enqueue_mails(MORE_MAILS)
        self._made([tasks.slow_report.using(priority=10).enqueue()], "slow_report", "takes 2.5 s, and goes first")
        self._until(lambda: any(job.worker in self._names and (job.progress or 0) >= KILL_AT for job in self._slow()))
        report = self._slow()[0]
        self._killed = self._names[report.worker or ""]
        self._processes[self._killed].kill()
        self._processes[self._killed].wait()
        self._lost = [job for job in self._list() if job.state is State.RUNNING and job.worker == report.worker]
        self._teller.event(
            f"{self._killed} is killed (SIGKILL) in {report.progress_message} of slow_report; it held "
            f"{_jobs(self._lost)}; the last lease ends in {max(self._lease_left_s(), 0):.1f} s",
            RED,
        )
        other = next(name for name in self._processes if name != self._killed)
        self._news += [
            (lambda: self._lease_left_s() < 0, f"the leases have ended: {other} makes sure that nobody renews them"),
            (
                lambda: self._rescued() == {job.id for job in self._lost},
                f"{other} has rescued {_jobs(self._lost)}: {_by_task(self._lost)}",
            ),
            (lambda: self._all("slow_report", State.SUCCEEDED), f"slow_report succeeded after all, on {other}"),
        ]
        self._until(self._done)

    def _hurry(self) -> None:
        """Run many jobs that do nothing, to see how fast that is."""
        from duly.cli import demo_tasks as tasks

        self._teller.act(f"4. And how fast is it? {TICKS:,} jobs that do nothing, for the worker that is left.")
        self._made(tasks.tick.enqueue_many(tasks.tick.call(n) for n in range(TICKS)), "tick", "do nothing")
        self._until(self._done)
        ticks = self._of("tick")
        took_ms = max(job.finished_at or 0 for job in ticks) - min(job.created_at for job in ticks)
        self._ticks_per_s = TICKS * 1000 / max(took_ms, 1)
        self._teller.event(f"done in {took_ms / 1000:.2f} s")

    # Watching

    def _until(self, reached: Callable[[], bool]) -> None:
        """Watch until something is so; there are limits to patience."""
        while True:
            self._look()
            if reached():
                return
            if self._teller.seconds > PATIENCE_S:
                raise Stuck(f"after {PATIENCE_S} s it is not at its end yet")
            for name, process in self._processes.items():
                if name != self._killed and process.poll() is not None:
                    raise Stuck(f"{name} ended by itself with {process.returncode}")
            time.sleep(LOOK_S)

    def _look(self) -> None:
        """Look at the database, tell what is new and show the rest."""
        self._jobs = self._list()
        names = {process.pid: name for name, process in self._processes.items()}
        workers = self._app.driver.run(ops.workers())
        self._names |= {worker.id: names[worker.pid] for worker in workers if worker.pid in names}
        for one in [one for one in self._news if one[0]()]:
            self._news.remove(one)
            self._teller.event(one[1])
        states = Counter(job.state for job in self._jobs)
        self._teller.show(Scene(states, {name: self._doing(name) for name in self._processes}))

    def _doing(self, name: str) -> str:
        """Say what a worker does."""
        if name == self._killed:
            return self._left_behind()
        held = [job for job in self._jobs if job.state is State.RUNNING and self._name(job) == name]
        if held:
            alone = all((job.worker or "").endswith(ops.CHILD) for job in held)
            return f"runs {_by_task(held)}{' alone, in a process of its own' if alone else ''}"
        return "waits for work" if name in self._names.values() else "starts"

    def _name(self, job: JobRecord) -> str | None:
        """Name the worker of a job, also where it runs in a child process of it."""
        return self._names.get((job.worker or "").removesuffix(ops.CHILD))

    def _left_behind(self) -> str:
        missing = {job.id for job in self._lost} - self._rescued()
        if not missing:
            return "killed; all that it held is rescued"
        left_s = self._lease_left_s()
        return f"killed; held {_jobs(self._lost)}, " + (
            f"leases end in {left_s:.1f} s" if left_s > 0 else "leases ended: rescue is near"
        )

    def _lease_left_s(self) -> float:
        """Say how long the last lease of the killed worker still lasts."""
        return max(job.lease_until or 0 for job in self._lost) / 1000 - time.time()

    def _rescued(self) -> set[str]:
        """Give the ids of those jobs of the killed worker whose attempt with it is over."""
        return {job.id for job in self._lost if any(one.outcome == CRASHED for one in self._attempts(job))}

    def _done(self) -> bool:
        return all(job.state.ended for job in self._jobs)

    def _slow(self) -> list[JobRecord]:
        return self._of("slow_report")

    def _of(self, task: str) -> list[JobRecord]:
        return [job for job in self._jobs if job.task == task]

    def _all(self, task: str, state: State) -> bool:
        return all(job.state is state for job in self._of(task))

    def _list(self) -> list[JobRecord]:
        return self._app.list(limit=EVERYTHING)

    # The workers

    def _start_worker(self, name: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(  # noqa: S603
                command_line(
                    "worker", "duly.cli.demo_tasks:app", "--concurrency=4", "--grace=1s", f"--lifeline={self._lifeline}"
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self._lifeline],
                process_group=0,
            )

    def _end_workers(self) -> None:
        """End the workers; whoever is impatient and asks again must not leave one behind."""
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

    # The sum

    def _sum_up(self) -> bool:
        """Print what became of everything, and say whether it adds up."""
        self._jobs = self._list()
        figures = self._figures()
        wrong = self._wrong(figures)
        if self._as_json:
            output.answer_json({**self._summary(figures), "wrong": wrong})
            return not wrong
        self._tell(figures)
        if wrong:
            return self._fail(f"this does not add up: {', '.join(wrong)}")
        click.echo(f"\nIt adds up: {len(self._enqueued):,} jobs, each ended once.")
        self._tell_next()
        return True

    def _figures(self) -> Figures:
        states = Counter(job.state for job in self._jobs)
        outcomes = Counter(one.outcome for one in self._failed_attempts())
        return Figures(
            enqueued=len(self._enqueued),
            succeeded=states[State.SUCCEEDED],
            dead=states[State.DEAD],
            attempts=sum(job.attempt for job in self._jobs),
            failed=outcomes["failed"],
            crashed=outcomes[CRASHED],
        )

    def _summary(self, of: Figures) -> dict[str, Any]:
        return {
            **of._asdict(),
            "repeated": self._repeated,
            "rescued": len(self._rescued()),
            "per_second": round(self._ticks_per_s),
            "seconds": round(self._teller.seconds, 1),
            "database": str(self._folder / "demo.db"),
        }

    def _tell(self, of: Figures) -> None:
        calls = f"by {of.enqueued + self._repeated:,} calls: {self._repeated} repeated a key"
        attempts = f"= {of.succeeded:,} successes + {of.failed} failures + {of.crashed} cut off by the kill"
        click.echo()
        for name, value, remark in (
            ("enqueued", f"{of.enqueued:,}", calls),
            ("succeeded", f"{of.succeeded:,}", ""),
            ("dead", f"{of.dead:,}", "poison, kept with error and traceback"),
            ("attempts", f"{of.attempts:,}", attempts),
            ("rescued", f"{of.crashed:,}", f"all that {self._killed} held: {_by_task(self._lost)}"),
            ("per second", f"{self._ticks_per_s:,.0f}", "jobs that do nothing, one worker, every commit on disk"),
            ("time", f"{self._teller.seconds:.1f} s", ""),
        ):
            click.echo(f"{name:<10} {value:>7}  {remark}".rstrip())

    def _wrong(self, of: Figures) -> list[str]:
        """Name what is not as it should be."""
        checks = {
            "jobs enqueued and jobs found": {job.id for job in self._jobs} == self._enqueued,
            "calls that repeated a key": self._repeated == RECEIPTS // 2,
            "dead jobs": of.dead == POISONS and self._all("poison", State.DEAD),
            "succeeded jobs": of.succeeded == of.enqueued - POISONS,
            "attempts": of.attempts == of.succeeded + of.failed + of.crashed,
            "rescued jobs": self._lost and self._rescued() == {job.id for job in self._lost},
        }
        return [name for name, good in checks.items() if not good]

    def _failed_attempts(self) -> list[Attempt]:
        tried = [job for job in self._jobs if job.attempt > 1 or job.state is State.DEAD]
        return [one for job in tried for one in self._attempts(job)]

    def _attempts(self, job: JobRecord) -> list[Attempt]:
        return self._app.driver.run(ops.attempts(job.id))

    def _tell_next(self) -> None:
        """Name commands that work on the database as it is now."""
        url = shlex.quote(str(self._folder / "demo.db"))
        click.echo("\nThe database is kept. Try next:")
        for what, words in (
            ("what died, and of what", "dead list"),
            ("the long job: one attempt cut off, one that succeeded", f"jobs show {self._slow()[0].id}"),
            ("how the queue is now: the dead, and a worker that fell silent", "stats"),
        ):
            click.echo(f"  {what}\n    {self._program} {words} --url {url}")
        click.echo(f"  or remove it\n    rm -r {shlex.quote(str(self._folder))}")

    def _fail(self, text: str) -> bool:
        click.echo(f"\nduly demo: {text}. {self._folder} is kept. The workers said:", err=True)
        for log in sorted(self._folder.glob("*.log")):
            click.echo(f"{log.stem}:", err=True)
            click.echo("".join(f"  {line}\n" for line in log.read_text().splitlines()[-10:]), err=True)
        return False


def own_name() -> str:
    """Give the words that start this program again, as short as they can be."""
    started = Path(sys.argv[0])
    if started.name != "duly":
        return f"{shlex.quote(sys.executable)} -m duly"
    found = shutil.which("duly")
    return "duly" if found and Path(found).resolve() == started.resolve() else shlex.quote(str(started))


def _jobs(jobs: list[JobRecord]) -> str:
    return f"{len(jobs)} job{'' if len(jobs) == 1 else 's'}"


def _by_task(jobs: list[JobRecord]) -> str:
    """Count jobs by task, and tell how far a long one is."""
    counts = Counter(job.task + (f" ({job.progress:.0f} %)" if job.progress else "") for job in jobs)
    return ", ".join(f"{count} {task}" if count > 1 else task for task, count in sorted(counts.items()))
