"""Worker processes that a row starts, kills, stops and lets go on, and what producers write down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from duly import Duly
from duly.store.postgres.schema import bring_up_to_date
from tests.proof.checker import Findings, History, judge, read
from tests.proof.ledger import Ledger, Offered, records
from tests.servers.pair import children_of
from tests.servers.postgres import PostgresServer

APP = "tests.proof.tasks:app"


class Fleet:
    """Workers on one database, and the ledger that all of them write."""

    def __init__(self, url: str, folder: Path, *, lease: str = "2s", app: str = APP) -> None:
        self.url = url
        self.folder = folder
        self.path = folder / "ledger.jsonl"
        self.ledger = Ledger(self.path)
        self.workers: list[subprocess.Popen[bytes]] = []
        self.app = app
        self._environ = {
            **os.environ,
            "PROOF_URL": url,
            "PROOF_LEDGER": str(self.path),
            "PROOF_LEASE": lease,
            "DULY_RUN_DIR": str(folder / "run"),
        }
        self._number = 0

    def start(
        self,
        *,
        concurrency: int = 10,
        grace: str = "5s",
        more: Iterable[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start one worker."""
        self._number += 1
        words = ["worker", self.app, "--concurrency", str(concurrency), "--grace", grace, *more]
        with (self.folder / f"worker-{self._number}.log").open("wb") as log, uninterrupted():
            worker = subprocess.Popen(
                [sys.executable, "-m", "tests.proof.program", *words],
                env={**self._environ, **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
            self.workers.append(worker)
        return worker

    def kill(self, worker: subprocess.Popen[bytes]) -> None:
        """End a worker as a crash does, and write down that it happened."""
        children = children_of(worker.pid)  # they end with it
        worker.kill()
        worker.wait()
        for pid in (worker.pid, *children):
            self.ledger.note("killed", pid=pid)
        self.workers.remove(worker)

    def stop_for(self, worker: subprocess.Popen[bytes], seconds: float) -> float:
        """Have a worker stand still for a while; says when it went on."""
        at = time.monotonic()
        worker.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        worker.send_signal(signal.SIGCONT)
        until = time.monotonic()
        for pid in (worker.pid, *children_of(worker.pid)):  # nobody keeps the leases of those either
            self.ledger.note("stopped", pid=pid, at=at, until=until)
        return until

    def asides(self, *names: str) -> list[dict[str, Any]]:
        """Give what workers told beside the ledger, such as `job.lost`."""
        return [one for one in records(Path(f"{self.path}.asides")) if one["what"] in names]

    def started(self, count: int, seconds: float = 20) -> bool:
        """Wait until so many workers have begun to work."""
        return self.wait(lambda: len(self.asides("worker.started")) >= count, seconds, every=0.05)

    def at_work(self) -> list[subprocess.Popen[bytes]]:
        """Give the workers that have begun to work."""
        begun = {one["pid"] for one in self.asides("worker.started")}
        return [worker for worker in self.workers if worker.pid in begun]

    def alive(self) -> int:
        """Count the workers that still run."""
        return sum(worker.poll() is None for worker in self.workers)

    def end(self) -> None:
        """End all workers."""
        for worker in self.workers:
            worker.send_signal(signal.SIGCONT)
            worker.terminate()
        for worker in self.workers:
            try:
                worker.wait(15)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self.workers.clear()

    def history(self) -> History:
        """Read what was written down."""
        return read(records(self.path))

    def judged(self) -> Findings:
        """Judge what was written down."""
        return judge(self.history())

    def finished(self) -> int:
        """Count the jobs whose end was acknowledged."""
        return len(self.history().done)

    def wait(self, done: Callable[[], bool], seconds: float, every: float = 0.2) -> bool:
        """Wait until something holds; False: it does not within that time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if done():
                return True
            time.sleep(every)
        return done()

    def logs(self, most: int = 5) -> str:
        """Give the last lines that workers wrote, for a person who looks why."""
        return "\n".join(
            line for path in sorted(self.folder.glob("worker-*.log")) for line in path.read_text().splitlines()[-most:]
        )


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Have an interruption wait for a moment: a worker that was started and not noted would never be ended."""
    if threading.current_thread() is not threading.main_thread():  # no other is interrupted
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda sign, _: came.append(sign))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


@contextmanager
def fleet(url: str, folder: Path, **options: Any) -> Iterator[Fleet]:
    """Have a fleet; whatever happens, its workers are ended."""
    made = Fleet(url, folder, **options)
    try:
        yield made
    finally:
        made.end()


@contextmanager
def four_on_postgres(
    folder: Path, *, lease_s: float, grace: str = "5s", settings: Mapping[str, str] | None = None
) -> Iterator[tuple[PostgresServer, Fleet]]:
    """Have four workers at work on a server of their own."""
    with PostgresServer(settings=settings) as server:
        url = server.new_database()
        bring_up_to_date(url)
        with fleet(url, folder, lease=f"{lease_s}s") as workers:
            for _ in range(4):
                workers.start(grace=grace)
            if not workers.started(4):
                raise AssertionError(f"workers did not start: {workers.logs()}")
            yield server, workers


def producer(fleet: Fleet) -> Duly:
    """Make the app for this process: what it enqueues is written down before as offered."""
    os.environ.update({name: fleet._environ[name] for name in ("PROOF_URL", "PROOF_LEDGER", "PROOF_LEASE")})
    from tests.proof import tasks

    app: Duly = import_module(fleet.app.partition(":")[0]).app
    app.database.change(url=fleet.url, lease=fleet._environ["PROOF_LEASE"])
    tasks._ledger.clear()
    tasks._asides.clear()
    app.database.new_id = Offered(lambda: fleet.ledger)
    return app
