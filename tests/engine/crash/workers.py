"""Real worker processes to kill, stop and starve, and a ledger outside the database that says what they ran.

A handler writes one line when it begins and one when it ends, each with a single write to a file opened for
appending, so that no crash tears one. Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import duly
from duly.model import NewJob, Terms
from duly.store import ops
from tests.contract.stores import PostgresStore, SQLiteStore, Store, new_id

LEASE_MS = 500  # a worker beats every third of it

TASKS = '''
import asyncio, ctypes, json, os, resource, signal, sqlite3, threading, time

from duly import Ctx, Duly, SyncCtx; from duly.rules import backoff

app = Duly()
LEDGER = os.open(os.environ["LEDGER"], os.O_APPEND | os.O_CREAT | os.O_WRONLY)


def note(ctx, what):
    line = [ctx.job_id, ctx.attempt, os.getpid(), what, time.monotonic()]
    os.write(LEDGER, json.dumps(line).encode() + b"\\n")


@app.task
async def nap(ctx: Ctx, seconds: float) -> None:
    """Sleep, in later attempts but a little."""
    note(ctx, "begin")
    await asyncio.sleep(seconds if ctx.attempt == 1 else 0.02)
    note(ctx, "end")


@app.task
def doze(ctx: SyncCtx, seconds: float) -> None:
    """Sleep in a thread, in later attempts but a little."""
    note(ctx, "begin")
    time.sleep(seconds if ctx.attempt == 1 else 0.02)
    note(ctx, "end")


@app.task
async def quick(ctx: Ctx) -> None:
    note(ctx, "end")


@app.task
async def block(ctx: Ctx, seconds: float) -> None:
    """Block the event loop in the first attempt, then talk to the context."""
    note(ctx, "begin")
    if ctx.attempt == 1:
        time.sleep(seconds)
    try:
        for _ in range(30):
            await ctx.progress(50)
            await asyncio.sleep(0.05)
    except BaseException as error:
        note(ctx, type(error).__name__)
        raise
    note(ctx, "end")


@app.task
async def block_until_taken(ctx: Ctx) -> None:
    """Block the event loop until another worker runs the job, then talk to the context."""
    note(ctx, "begin")
    while ctx.attempt == 1 and f'["{ctx.job_id}", 2, ' not in open(os.environ["LEDGER"]).read():
        time.sleep(0.02)
    try:
        for _ in range(10):
            await ctx.progress(50)
            await asyncio.sleep(0.05)
    except BaseException as error:
        note(ctx, type(error).__name__)
        raise
    note(ctx, "end")


@app.task
def talk(ctx: SyncCtx, seconds: float) -> None:
    """Talk to the context for some time, as a handler in a thread."""
    note(ctx, "begin")
    try:
        for _ in range(int(seconds / 0.05)):
            ctx.progress(50)
            time.sleep(0.05)
    except BaseException as error:
        note(ctx, type(error).__name__)
        raise
    note(ctx, "end")


@app.task
async def stubborn(ctx: Ctx, seconds: float) -> None:
    """Does not stop when it is told to for the first time."""
    note(ctx, "begin")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        await asyncio.sleep(seconds)
    note(ctx, "end")


@app.task
async def hang(ctx: Ctx) -> None:
    """Let nobody else on the event loop, for ever."""
    note(ctx, "begin")
    while True:
        time.sleep(0.1)


@app.task(timeout="200ms", backoff=backoff.fixed("50ms"))
async def hang_over_time(ctx: Ctx) -> None:
    """Let nobody else on the event loop, for ever, though its time is up."""
    note(ctx, "begin")
    while True:
        time.sleep(0.1)


@app.task(timeout="1s", backoff=backoff.fixed("50ms"))
async def nap_over_time(ctx: Ctx) -> None:
    """Sleep for longer than it may."""
    note(ctx, "begin")
    await asyncio.sleep(30)


@app.task(timeout="1s", backoff=backoff.fixed("50ms"))
def doze_over_time(ctx: SyncCtx) -> None:
    """Sleep in a thread for longer than it may."""
    note(ctx, "begin")
    time.sleep(30)


def die(how):
    match how:
        case "exit":
            os._exit(1)
        case "segfault":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "memory":
            # What the kernel does to who takes too much, without taking it from the tests beside us.
            resource.setrlimit(resource.RLIMIT_DATA, (2**28, 2**28))
            try:
                b"x" * 2**30
            except MemoryError:
                os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


@app.task
async def pill(ctx: Ctx, how: str) -> None:
    note(ctx, "begin")
    die(how)


@app.task
def sync_pill(ctx: SyncCtx, how: str) -> None:
    note(ctx, "begin")
    die(how)
'''

# What a worker process does after it has its app.
RUN = """
import json, os, sys, time
EVENTS = os.open(os.environ["EVENTS"], os.O_APPEND | os.O_CREAT | os.O_WRONLY)

def tell(name, fields):
    line = [os.getpid(), name, fields.get("job_id"), time.monotonic()]
    os.write(EVENTS, json.dumps(line).encode() + b"\\n")

app.events.listen(tell)
app.run(**json.loads(sys.argv[1]))
"""


class Line(NamedTuple):
    """What a handler wrote into the ledger."""

    job: str
    attempt: int
    pid: int
    what: str
    at: float


class Told(NamedTuple):
    """What a worker told its listener."""

    pid: int
    name: str
    job: str | None
    at: float


class Scene:
    """One database with its worker processes, its ledger and what the workers told."""

    def __init__(self, store: Store, url: str, folder: Path, *, lease_ms: int = LEASE_MS, tasks: str = TASKS) -> None:
        self.store = store
        self.lease_ms = lease_ms
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        (folder / "scene_tasks.py").write_text(tasks)
        self._environment = {
            **os.environ,
            "DULY_URL": url,
            "DULY_LEASE": f"{lease_ms}ms",
            "LEDGER": str(folder / "ledger"),
            "EVENTS": str(folder / "events"),
            "PYTHONPATH": str(Path(duly.__file__).parents[1]),  # the package that is under test here
        }

    # Workers

    def start(self, *, script: str = "from scene_tasks import app", wait: bool = True, **options: Any) -> Process:
        """Start a worker process, and wait until it works."""
        with (self.folder / "stderr").open("ab") as errors:
            process = self.popen([sys.executable, "-c", script + RUN, json.dumps(options)], stderr=errors)
        if wait:
            self.wait(lambda: any(told.pid == process.pid for told in self.told("worker.started")), "a worker to start")
        return process

    def popen(self, command: list[str], *, stderr: Any) -> Process:
        """Start a process that is ended with the scene."""
        process = subprocess.Popen(command, cwd=self.folder, env=self._environment, stderr=stderr)
        self._processes.append(process)
        return process

    def stop(self, process: Process) -> None:
        """Have a worker stand still, but not in the middle of a write to a file: nobody else could work on that."""
        for _ in range(100):
            process.send_signal(signal.SIGSTOP)
            if self._can_write():
                return
            process.send_signal(signal.SIGCONT)
            time.sleep(0.01)
        raise AssertionError("the worker writes all the time")

    def _can_write(self) -> bool:
        if not isinstance(self.store, SQLiteStore):
            return True
        with closing(sqlite3.connect(self.store.path, isolation_level=None, timeout=0.2)) as conn:
            conn.execute("pragma wal_autocheckpoint = 0")
            try:
                conn.execute("begin immediate")
            except sqlite3.OperationalError:
                return False
            conn.execute("rollback")
        return True

    @contextmanager
    def supervised(self, count: int, **options: Any) -> Iterator[Counter[str]]:
        """Keep so many workers running, each replaced when it dies; gives the number of the dead."""
        deaths: Counter[str] = Counter()
        over = threading.Event()

        def keep() -> None:
            process = self.start(wait=False, **options)
            while not over.wait(0.02):
                if process.poll() is not None:
                    deaths["died"] += 1
                    process = self.start(wait=False, **options)

        keepers = [threading.Thread(target=keep) for _ in range(count)]
        for keeper in keepers:
            keeper.start()
        try:
            yield deaths
        finally:
            over.set()
            for keeper in keepers:
                keeper.join()

    def close(self) -> None:
        """End every worker, and close the database."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill()
        for process in self._processes:
            process.wait(10)
        self.store.close()

    # Jobs

    def enqueue(self, task: str, count: int = 1, *, payload: dict[str, Any] | None = None, **terms: Any) -> list[str]:
        ids = [new_id() for _ in range(count)]
        text = json.dumps(payload or {})
        made = Terms(**{"task": task, "lease_ms": self.lease_ms, **terms})
        for start in range(0, count, 1000):
            self.store.run(ops.enqueue(made, [NewJob(one, text) for one in ids[start : start + 1000]]))
        return ids

    # Looking

    def ledger(self, *ids: str) -> list[Line]:
        """Read the ledger, or what it says of some jobs."""
        lines = [Line(*line) for line in _lines(self.folder / "ledger")]
        return [line for line in lines if line.job in ids] if ids else lines

    def told(self, *names: str) -> list[Told]:
        told = [Told(*line) for line in _lines(self.folder / "events")]
        return [one for one in told if one.name in names] if names else told

    def what(self, job_id: str) -> list[tuple[int, str]]:
        """Say what a job's handlers wrote: attempt and word, in order."""
        return [(line.attempt, line.what) for line in self.ledger(job_id)]

    def wait(self, until: Callable[[], object], what: str, seconds: float = 30.0) -> float:
        """Wait until something is so; gives the moment. With what everybody said if it does not come."""
        deadline = time.monotonic() + seconds
        while not until():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {seconds:g} s for {what}\n{self.said()}")
            time.sleep(0.02)
        return time.monotonic()

    def wait_for(self, job_id: str, what: str, attempt: int | None = None, seconds: float = 30.0) -> Line:
        """Wait for a line of the ledger."""
        found: list[Line] = []

        def look() -> bool:
            found[:] = [line for line in self.ledger(job_id) if line.what == what and attempt in (None, line.attempt)]
            return bool(found)

        self.wait(look, f"{what!r} of {job_id}", seconds)
        return found[0]

    def wait_ended(self, seconds: float = 60.0) -> None:
        """Wait until every job has ended."""
        self.wait(lambda: self.count("duly_job") == 0, "all jobs to end", seconds)

    def count(self, table: str, where: str = "1 = 1") -> int:
        number: int = self.store.query(f"select count(*) from {table} where {where}")[0][0]
        return number

    def row(self, job_id: str) -> tuple[Any, ...]:
        """Give state, attempt and crashes of a job, wherever its row is."""
        for table in ("duly_done", "duly_job"):
            if rows := self.store.query(f"select state, attempt, crashes from {table} where id = ?", job_id):
                return rows[0]
        raise AssertionError(f"no row of {job_id}")

    def said(self) -> str:
        errors = self.folder / "stderr"
        tables = self.store.query("select state, suspect, count(*) from duly_job group by 1, 2")
        return (
            f"live: {tables}\nledger: {self.ledger()[-20:]}\ntold: {self.told()[-40:]}\n"
            f"exits: {[process.poll() for process in self._processes]}\n"
            f"{errors.read_text()[-4000:] if errors.exists() else ''}"
        )


Process = subprocess.Popen[bytes]


def kill(process: Process) -> float:
    """Kill a worker and say when."""
    process.send_signal(signal.SIGKILL)
    at = time.monotonic()
    process.wait()
    return at


def stop(process: Process, seconds: float = 15.0) -> float:
    """Have a worker end by itself and say how long it took."""
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.wait(seconds)
    return time.monotonic() - began


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def times(lines: Iterable[Line], what: str = "end") -> Counter[str]:
    """Count how often each job wrote a word."""
    return Counter(line.job for line in lines if line.what == what)


def _lines(file: Path) -> list[list[Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


@contextmanager
def scene_on(kind: str, url: str, folder: Path, **options: Any) -> Iterator[Scene]:
    """Open a scene on a database that is there already, and leave nothing running behind."""
    with ExitStack() as stack:
        store: Store = PostgresStore(url) if kind == "postgres" else SQLiteStore(Path(url))
        scene = Scene(store, url, folder, **options)
        stack.callback(scene.close)
        yield scene
