"""`duly demo`: the store at work on a SQLite file of its own, with a worker killed on the way.

Two worker processes claim, run and finish jobs; one is killed with SIGKILL while it holds leases, and what it held
is rescued. The summary counts what was enqueued against what became of it, and its numbers must add up.
"""

from __future__ import annotations

import collections
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from duly import backoff, failure, lifecycle
from duly.keys import Ids, new_token
from duly.model import Claimed, Failed, NewJob, Outcome, Sighting, State, Succeeded, Terms
from duly.store import ops
from duly.store.driver import Driver
from duly.store.ops import Finish, Held
from duly.store.sqlite import SQLiteDriver, wal_verdict

LEASE_MS = 1_500
BEAT_S = LEASE_MS / 1000 / 3
BAR = 30
PATIENCE_S = 50
new_id = Ids()

# task: how many, attempts, and what a person should expect
WORK = {
    "send_mail": (240, 5, "succeeds"),
    "flaky_import": (30, 5, "fails at first, then succeeds"),
    "poison": (4, 2, "fails every time, ends dead"),
    "slow_report": (2, 5, "takes longer than its lease"),
    "later": (8, 5, "is due in two seconds"),
}
DUPLICATES = 20


@click.command(epilog="\b\nExample:\n  duly demo\n")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to put the database. Default: a new temporary folder.",
)
def command(keep: Path | None) -> None:
    """See jobs run, fail, retry, die and be rescued, on a database of its own.

    Needs no server and no configuration, takes about ten seconds and ends by itself.
    """
    try:
        folder = keep or Path(tempfile.mkdtemp(prefix="duly-demo-"))
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"{error.filename} cannot be made: {error.strerror}") from error
    path = folder / "demo.db"
    driver = SQLiteDriver(path)
    click.echo(f"database   {path}  ({wal_verdict().split(' can ')[0]}, synchronous=full)")
    if driver.run(ops.listing(limit=1)):
        raise click.ClickException(f"{path} has jobs already: name an empty folder")
    started = time.monotonic()
    total = enqueue_all(driver)
    workers = [start_worker(path, name) for name in ("worker-1", "worker-2")]
    try:
        rescued = watch(driver, workers, total)
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait()
    good = summarize(driver, total, rescued, time.monotonic() - started)
    driver.close()
    click.echo(f'\nLook around:  sqlite3 {path} "select task, state, count(*) from duly_jobs group by 1, 2"')  # noqa: S608
    click.echo(f'              sqlite3 {path} "select task, reason, error from duly_dead"')  # noqa: S608
    sys.exit(0 if good else 1)


def enqueue_all(driver: Driver) -> int:
    """Enqueue the work, some of it twice under one key, and return how many jobs that makes."""
    for task, (count, attempts, expectation) in WORK.items():
        terms = Terms(task, max_attempts=attempts, lease_ms=LEASE_MS, delay_ms=2_000 if task == "later" else 0)
        driver.run(ops.enqueue(terms, [NewJob(new_id(), f'{{"n":{n}}}') for n in range(count)]))
        click.echo(f"enqueued   {count:4} {task:<13} {expectation}")
    receipts = [NewJob(new_id(), f'{{"order":{n % (DUPLICATES // 2)}}}', key=f"order-{n % (DUPLICATES // 2)}")
                for n in range(DUPLICATES)]  # fmt: skip
    answers = driver.run(ops.enqueue(Terms("receipt", lease_ms=LEASE_MS), receipts))
    kept = len({answer.id for answer in answers})
    click.echo(f"enqueued   {DUPLICATES:4} receipt       under {kept} keys: {DUPLICATES - kept} were there already\n")
    return sum(count for count, _, _ in WORK.values()) + kept


def start_worker(path: Path, name: str) -> subprocess.Popen[bytes]:
    """Start a worker process."""
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "duly.cli.demo", str(path), name], start_new_session=True
    )


def watch(driver: Driver, workers: list[subprocess.Popen[bytes]], total: int) -> int:
    """Draw what happens until all is done; kill a worker half-way and rescue what it held."""
    rescued, killed = 0, False
    seen: dict[Sighting, float] = {}
    give_up_at = time.monotonic() + PATIENCE_S
    while (done := draw(driver, total)) < total and time.monotonic() < give_up_at:
        if not killed and done > total // 4:
            killed = kill_at_work(driver, workers[0])
        taken = rescue(driver, seen)
        if taken:
            say(f"{taken} jobs of a worker that stopped beating are rescued")
        rescued += taken
        time.sleep(0.1)
    return rescued


def kill_at_work(driver: Driver, worker: subprocess.Popen[bytes]) -> bool:
    """Kill a worker if it holds jobs at this moment, else let it go on."""
    worker.send_signal(signal.SIGSTOP)
    holds = sum(job.worker == "worker-1" for job in driver.run(ops.listing(state=State.RUNNING)))
    worker.send_signal(signal.SIGKILL if holds else signal.SIGCONT)
    if holds:
        say(f"worker-1 is killed with SIGKILL while it holds {holds} jobs")
    return bool(holds)


def rescue(driver: Driver, seen: dict[Sighting, float]) -> int:
    """Take leases that were seen to have ended twice, a beat apart: a worker that only stalled keeps its jobs."""
    now = time.monotonic()
    current = driver.run(ops.expired_leases())
    for gone in set(seen) - set(current):
        del seen[gone]
    ripe = [sighting for sighting in current if now - seen.setdefault(sighting, now) > BEAT_S + 0.5]
    return len(driver.run(ops.rescue(ripe))) if ripe else 0


def draw(driver: Driver, total: int) -> int:
    """Show how many jobs are in which state, and return how many have ended."""
    states = counted(driver)
    done = sum(count for state, count in states.items() if state.ended)
    bar = "#" * (BAR * done // total)
    line = f"[{bar:<{BAR}}] {done:3}/{total}  " + "  ".join(
        f"{state} {states[state]}" for state in State if states[state]
    )
    if sys.stdout.isatty():
        click.echo(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}", nl=False)
    elif done == total or time.monotonic() - _last_line[0] > 1:
        _last_line[0] = time.monotonic()
        click.echo(line)
    return done


_last_line = [0.0]


def say(text: str) -> None:
    """Print an event above the bar."""
    click.echo(("\r\x1b[K" if sys.stdout.isatty() else "") + f"  ! {text}")


def counted(driver: Driver) -> collections.Counter[State]:
    """Count jobs by state."""
    return collections.Counter(job.state for job in driver.run(ops.listing(limit=10_000)))


def summarize(driver: Driver, total: int, rescued: int, seconds: float) -> bool:
    """Print what became of everything, and say whether it adds up."""
    jobs = driver.run(ops.listing(limit=10_000))
    ended = collections.Counter(job.state for job in jobs)
    attempts = sum(job.attempt for job in jobs)
    click.echo(f"\n\nenqueued   {total}")
    for state in (State.SUCCEEDED, State.DEAD):
        click.echo(f"{state:<10} {ended[state]}")
    click.echo(f"attempts   {attempts}, {attempts - total} of them again after a failure or a lost worker")
    click.echo(f"rescued    {rescued}")
    click.echo(f"time       {seconds:.1f} s")
    wanted = {"succeeded": total - WORK["poison"][0], "dead": WORK["poison"][0], "jobs": total, "rescued": True}
    found = {state.value: count for state, count in ended.items()} | {"jobs": len(jobs), "rescued": rescued > 0}
    good = wanted == found
    click.echo(
        "Every job ended once, as it should." if good else f"This does not add up: {wanted} was to be, {found} is"
    )
    return good


# What follows runs in the worker processes.


def work(driver: Driver, name: str) -> None:
    """Claim, run, finish, in turns; beat for what takes long."""
    chance = random.Random(name)  # noqa: S311
    policy = lifecycle.Policy(backoff.fixed("300ms"))
    while True:
        jobs = claim(driver, name, limit=8) or claim(driver, name, limit=1, alone=True)
        finishes = []
        for job in jobs:
            outcome = attempt(driver, job, jobs)
            change = lifecycle.decide(job.attempt, job.max_attempts, outcome, policy=policy, chance=chance.random())
            finishes.append(Finish(job, change))
        if finishes:
            driver.run(ops.finish(finishes))
        else:
            time.sleep(0.05)


def claim(driver: Driver, name: str, *, limit: int, alone: bool = False) -> list[Claimed]:
    """Lease some jobs; those that a lost worker had held are taken alone, one by one."""
    return driver.run(ops.claim("default", limit=limit, token=new_token(), worker=name, alone=alone))


def attempt(driver: Driver, job: Claimed, held: list[Claimed]) -> Outcome:
    """Play the handler of a job."""
    try:
        match job.task:
            case "poison":
                raise ValueError("this one never works")
            case "flaky_import" if job.attempt < 2:
                raise ConnectionError("the other side hung up")
            case "slow_report":
                for _ in range(8):
                    time.sleep(BEAT_S / 2)
                    driver.run(ops.extend([Held(one.id, one.token) for one in held]))
            case _:
                time.sleep(0.01)
    except Exception as error:
        return Failed(failure.describe(error))
    return Succeeded('"done"')


if __name__ == "__main__":
    work(SQLiteDriver(sys.argv[1]), sys.argv[2])
