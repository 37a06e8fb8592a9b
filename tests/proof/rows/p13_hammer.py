"""P13: eight processes on one SQLite file, with readers, checkpoints and forks."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from duly.store.sqlite.driver import SQLiteDriver
from duly.store.sqlite.writer import Writer
from tests.proof import breaks
from tests.proof.fleet import Fleet, fleet
from tests.proof.ledger import records
from tests.proof.table import ALL, Figure, Row, Setting

PARTS = ("producer", "producer", "producer", "reader", "forker")
WORKERS = 3
LONGEST_WAL = 64 * 1024 * 1024
LOCKED = re.compile(r"\blocked\b")  # which a loop that is blocked is not


def run(setting: Setting) -> Figure:
    """Let them all at it, then look what came of it."""
    path = setting.folder / "jobs.db"
    seconds = setting.pick(4 if setting.broken else 10, 60)
    with fleet(str(path), setting.folder, lease="5s") as workers, longest(Path(f"{path}-wal")) as wal:
        for _ in range(WORKERS):
            workers.start()
        ended = play(workers, PARTS, seconds, setting.seed)
        acknowledged = workers.history().acknowledged
        done = workers.wait(lambda: acknowledged <= set(workers.history().done), setting.pick(15, 60), every=0.5)
        died = sum(worker.poll() is not None for worker in workers.workers)
    return _figure(setting, workers, path, wal[0], died, ended and done)


def play(workers: Fleet, parts: tuple[str, ...], seconds: float, seed: int) -> bool:
    """Run parts in processes of their own to their end; False: some did not end well."""
    environ = {**workers._environ, "PROOF_ERRORS": str(workers.folder / "errors.jsonl")}
    players = []
    for number, part in enumerate(parts):
        with (workers.folder / f"worker-part-{number}.log").open("wb") as log:
            words = [sys.executable, "-m", "tests.proof.hammer", part, str(seconds), f"{seed} {number}"]
            players.append(subprocess.Popen(words, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
    try:
        codes = [player.wait(seconds + 40) for player in players]
    finally:
        for player in players:
            player.kill()
            player.wait()
    return not any(codes)


@contextmanager
def longest(wal: Path) -> Iterator[list[int]]:
    """Watch how long the log becomes."""
    most = [0]
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            try:
                most[0] = max(most[0], os.stat(wal).st_size)
            except OSError:
                continue

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield most
    finally:
        over.set()
        watcher.join()


def _figure(setting: Setting, workers: Fleet, path: Path, wal: int, died: int, ended: bool) -> Figure:
    errors = [line["text"] for line in records(setting.folder / "errors.jsonl")]
    logs = workers.logs(most=100_000)
    locked = [line for line in (*errors, *logs.splitlines()) if LOCKED.search(line)]
    whole = integrity(path)
    findings = workers.judged()
    # Without a defence it proves nothing that it takes long.
    clean = (findings.valid and ended) or bool(setting.broken and not ended)
    right = clean and not errors and not locked and whole == "ok" and not died
    text = (
        f"{findings}; {len(locked)} locked, {len(errors)} errors, integrity {whole}, log at most {wal / 2**20:.0f} MB"
        + (f"; {(*errors, *locked)[0]}" if errors or locked else "")
        + ("" if ended else "; DID NOT END IN TIME")
        + (f"; {died} workers died" if died else "")
    )
    numbers = {
        "acknowledged": findings.acknowledged,
        "locked": len(locked),
        "errors": errors[:10],
        "longest_wal": wal,
        "integrity": whole,
    }
    # Who cuts the log was late where it grew too long.
    return Figure(text, right and wal <= LONGEST_WAL, numbers, only_slow=right)


def integrity(path: Path) -> str:
    """Have SQLite look at the whole file."""
    conn = sqlite3.connect(path)
    try:
        return str(conn.execute("pragma integrity_check").fetchone()[0])
    finally:
        conn.close()


def _begin_at_once(self: Writer) -> None:
    """Take the lock, or fail."""
    self._conn.execute("begin immediate")


breaks.python("hammer:waits_for_locks", Writer, "_begin", _begin_at_once)
breaks.python("hammer:log_is_cut", Writer, "mind_wal", lambda self: None)
breaks.python("hammer:forgets_handles", SQLiteDriver, "abandon", lambda self: None)

ROW = Row(
    "P13",
    "eight processes on one SQLite file, a reader that stays and forks with an open handle among them",
    "0 `database is locked`, 0 errors, integrity ok, identity clean, log <= 64 MB",
    run,
    controls=("hammer:waits_for_locks",),
    in_full=("hammer:log_is_cut", "hammer:forgets_handles"),
    takes=ALL,
    control_takes=1.5,
)
