"""`python -m tests.proof.hammer producer|reader|forker|failing SECONDS SEED`: processes that share one SQLite file.

They write down what they offered and what was acknowledged, and apart from that every error that reached them.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from duly.errors import DulyError
from tests.proof import breaks, tasks
from tests.proof.ledger import Ledger, Offered

THREADS = 2
PATIENCE_SECONDS = 10.0


def main() -> None:
    """Play one part for so many seconds."""
    breaks.apply_named()
    part, seconds, seed = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    tasks.app.database.new_id = Offered(tasks.ledger)
    PARTS[part](time.monotonic() + seconds, random.Random(seed))
    tasks.app.close()


def error(where: str, what: object) -> None:
    """Write down what reached a caller."""
    Ledger(Path(os.environ["PROOF_ERRORS"])).note("error", where=where, text=f"{type(what).__name__}: {what}")


def produce(until: float, chance: random.Random) -> None:
    """Enqueue from several threads."""
    seeds = [chance.random() for _ in range(THREADS)]
    threads = [threading.Thread(target=_enqueue_until, args=(until, random.Random(seed))) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _enqueue_until(until: float, chance: random.Random) -> None:
    while time.monotonic() < until:
        _try("enqueue", lambda: _enqueue(chance))
        time.sleep(chance.expovariate(60))


def _enqueue(chance: random.Random) -> None:
    """Enqueue one job, or some at once, small or large."""
    text = "x" * (60_000 if chance.random() < 0.5 else 500)  # most of the log is payload
    if chance.random() < 0.2:
        made = tasks.carry.enqueue_many(tasks.carry.call(text) for _ in range(5))
    else:
        made = [tasks.carry.enqueue(text)]
    for job in made:
        tasks.ledger().note("acknowledged", id=job.id)


def _try(where: str, work: Callable[[], object]) -> bool:
    try:
        work()
    except (DulyError, sqlite3.Error, OSError) as failure:
        error(where, failure)
        return False
    return True


def read(until: float, chance: random.Random) -> None:
    """Ask the app, and read by hand in transactions that last."""
    path = os.environ["PROOF_URL"]
    conn = sqlite3.connect(path, isolation_level=None)
    while time.monotonic() < until:
        _try("queues", tasks.app.queues)
        _try("workers", tasks.app.workers)
        _try("read", lambda: _read_for(conn, chance.uniform(0.05, 2.0)))
    conn.close()


def _read_for(conn: sqlite3.Connection, seconds: float) -> None:
    conn.execute("begin")
    conn.execute("select count(*) from duly_done").fetchone()
    time.sleep(seconds)
    conn.execute("select count(*) from duly_job").fetchone()
    conn.execute("commit")


def fork(until: float, chance: random.Random) -> None:
    """Fork with an open file, while another thread writes to it; both sides go on writing."""
    busy = threading.Thread(target=_enqueue_until, args=(until, random.Random(chance.random())))
    busy.start()
    while time.monotonic() < until:
        _try("before fork", lambda: _enqueue(chance))
        child = os.fork()
        if child == 0:
            done = _try("after fork", lambda: _enqueue(chance))
            tasks.app.close()
            os._exit(0 if done else 1)
        _try("beside fork", lambda: _enqueue(chance))
        _wait_for(child)
    busy.join()


def _wait_for(child: int) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        if os.waitpid(child, os.WNOHANG)[0]:
            return
        time.sleep(0.01)
    error("after fork", TimeoutError("the child hangs"))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def fail(until: float, chance: random.Random) -> None:
    """Have writes fail at every length of the log, by a limit to the size of files; then write again."""
    wal = Path(f"{os.environ['PROOF_URL']}-wal")
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    for _ in range(100):  # or the ledger would be longer than the log, and the limit would hold for it too
        _enqueue(chance)
    tasks.app.driver._pauses = ()  # what is tried again at once would find no more room
    room, longest = 0, wal.stat().st_size + 2**22
    while time.monotonic() < until and wal.stat().st_size < longest:
        room = (room + 509) % 200_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (wal.stat().st_size + room, hard))
        try:
            failed = not _try("full", lambda: _enqueue(chance))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        if failed:
            _enqueue(chance)  # nothing has to be done for it but making room


PARTS = {"producer": produce, "reader": read, "forker": fork, "failing": fail}

if __name__ == "__main__":
    main()
