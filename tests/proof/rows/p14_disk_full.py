"""P14: the disk is full, and writes fail: nothing acknowledged is lost, nobody dies, work goes on by itself."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from duly.errors import DulyError
from duly.store.sqlite.writer import Writer
from tests.proof import breaks, tasks
from tests.proof.fleet import Fleet, fleet, producer
from tests.proof.ledger import records
from tests.proof.rows.p13_hammer import integrity, play
from tests.proof.table import Figure, NotRun, Row, Setting

MEGABYTES = 96  # more than both logs and files need, so that only ballast fills it
WORKERS = 2
RESUMED_SECONDS = 10.0


def run(setting: Setting) -> Figure:
    """Fill the disk again and again, then have single writes fail."""
    disk = setting.folder / "disk"
    disk.mkdir()
    with small_disk(disk):
        full, failing = _full(setting, disk), _failing(setting, disk)
    text = f"disk full: {full.text}; failing writes: {failing.text}"
    return Figure(text, full.good and failing.good, {"full": full.numbers, "failing": failing.numbers})


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a disk in memory that is soon full."""
    words = ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", str(folder)]
    try:
        subprocess.run(words, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = str(getattr(error, "stderr", "") or error).strip()
        raise NotRun(f"a disk of its own needs the right to mount one: {why}") from error
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _full(setting: Setting, disk: Path) -> Figure:
    """Fill the disk while workers and a producer are at work, make room, and see how long they need to go on."""
    chance = random.Random(setting.seed)
    folder = setting.folder / "full"
    folder.mkdir()
    path, refused = disk / "full.db", Counter[str]()
    with fleet(str(path), folder) as workers:
        for _ in range(WORKERS):
            workers.start()
        with _producing(workers, refused):
            workers.wait(lambda: workers.finished() > 50, 20)
            resumed = [_fill(workers, disk, chance) for _ in range(setting.pick(2, 15))]
        done = _finished(workers, setting)
        died = sum(worker.poll() is not None for worker in workers.workers)
    text = f"{len(resumed)} times, resumed within {max(resumed):.1f} s, {sum(refused.values())} refused"
    good = max(resumed) <= RESUMED_SECONDS and bool(refused) and not died and done
    text += (f", {died} workers died" if died else "") + ("" if done else ", NOT ALL DONE")
    return _judged(workers, path, text, good, {"resumed_s": resumed, "refused": dict(refused), "died": died})


@contextmanager
def _producing(workers: Fleet, refused: Counter[str]) -> Iterator[None]:
    """Enqueue all the time, and count what is refused."""
    app = producer(workers)
    over = threading.Event()

    def produce() -> None:
        while not over.wait(0.01):
            try:
                workers.ledger.note("acknowledged", id=tasks.carry.enqueue("x" * 2000).id)
            except DulyError as error:
                refused[type(error).__name__] += 1

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        app.close()


def _fill(workers: Fleet, disk: Path, chance: random.Random) -> float:
    """Fill the disk for a while; gives how long it took until jobs were taken and ended again."""
    time.sleep(chance.uniform(0.3, 1.0))
    began = time.monotonic()
    ballast = disk / "ballast"
    _write_all(ballast)
    time.sleep(chance.uniform(0.5, 3.0))
    ballast.unlink()
    room_at = time.monotonic()
    workers.wait(lambda: _goes_on(workers, room_at), RESUMED_SECONDS + 1, every=0.1)
    workers.ledger.note("trouble", at=began, until=time.monotonic())
    return time.monotonic() - room_at


def _write_all(path: Path) -> None:
    try:
        with path.open("wb", buffering=0) as file:
            for size in (2**16, 2**12, 2**9, 1):
                _write_until_full(file, bytes(size))
    except OSError:  # at the close
        pass


def _write_until_full(file: Any, block: bytes) -> None:
    try:
        while file.write(block) == len(block):
            pass
    except OSError:
        return


def _goes_on(workers: Fleet, since: float) -> bool:
    """Whether what was offered since then has been acknowledged and has ended."""
    later = [line for line in records(workers.path) if line["at"] > since]
    offered = {line["id"] for line in later if line["what"] == "offered"}
    return any(line["what"] == "told" and line["id"] in offered for line in later)


def _finished(workers: Fleet, setting: Setting) -> bool:
    """Wait until all that was acknowledged has ended; without the defence, what is lost is not waited for long."""
    acknowledged = workers.history().acknowledged
    return workers.wait(lambda: acknowledged <= set(workers.history().done), 3 if setting.broken else 20)


def _failing(setting: Setting, disk: Path) -> Figure:
    """Have single writes fail at every length of the log, then run all that was acknowledged."""
    folder = setting.folder / "failing"
    folder.mkdir()
    path = disk / "failing.db"
    with fleet(str(path), folder) as workers:
        ended = play(workers, ("failing",), setting.pick(4, 40), setting.seed)
        errors = [line["text"] for line in records(folder / "errors.jsonl")]
        workers.start()
        done = _finished(workers, setting)
    kinds = Counter(text.partition(":")[0] for text in errors)
    text = f"{len(errors)} failed" + ("" if ended else ", ENDED BADLY") + ("" if done else ", NOT ALL DONE")
    return _judged(workers, path, text, ended and done and bool(errors), {"failed": len(errors), "kinds": dict(kinds)})


def _judged(workers: Fleet, path: Path, text: str, good: bool, numbers: dict[str, Any]) -> Figure:
    findings, whole = workers.judged(), integrity(path)
    text = f"{text}, integrity {whole}, {findings}"
    return Figure(text, good and findings.valid and whole == "ok", {**numbers, "acknowledged": findings.acknowledged})


def _whatever_comes(self: Any, op: str) -> None:
    """Commit, and think no more of it."""
    try:
        self._conn.execute("commit")
    except Exception:
        self._roll_back()


breaks.python("disk:commit_is_heard", Writer, "_commit_with_hook", _whatever_comes)

ROW = Row(
    "P14",
    "a full disk, and writes that fail at every length of the log",
    "0 acknowledged lost, workers alive, at work again within 10 s",
    run,
    controls=("disk:commit_is_heard",),
)
