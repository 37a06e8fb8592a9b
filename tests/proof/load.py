"""Work for a fleet while things happen to it, and how fast it gets done, read off the ledger alone."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from duly import Duly
from duly.errors import DulyError
from tests.proof.checker import Findings, History
from tests.proof.fleet import Fleet, producer
from tests.proof.ledger import records

Work: TypeAlias = Sequence[tuple[int, str, Sequence[Any]]]  # so many of a task, called with that, in each round


class Tail:
    """Follows a ledger: which jobs were acknowledged, and which are done since when."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._lock = threading.Lock()
        self.acknowledged: set[str] = set()
        self.done: dict[str, float] = {}
        self._ran: dict[str, int] = {}
        self._killed: set[int] = set()

    def look(self) -> None:
        """Read what is new."""
        with self._lock, self._path.open("rb") as ledger:
            ledger.seek(self._read)
            whole, _, _ = ledger.read().rpartition(b"\n")
            self._read += len(whole) + 1 if whole else 0
            for line in whole.splitlines():
                with suppress(json.JSONDecodeError):  # torn, as its process was killed
                    self._take(json.loads(line))

    def _take(self, record: dict[str, Any]) -> None:
        match record["what"]:
            case "acknowledged":
                self.acknowledged.add(record["id"])
            case "told":
                self.done.setdefault(record["id"], record["at"])
            case "ended" if record["how"] == "ok":
                self._ran[record["id"]] = record["pid"]
            case "killed":
                self._killed.add(record["pid"])

    def open(self) -> set[str]:
        """Give the jobs that are not done. One that ran to its end in a process that was killed then may be."""
        return {one for one in self.acknowledged - set(self.done) if self._ran.get(one) not in self._killed}

    def rate(self, since: float, until: float) -> float:
        """Say how many jobs a second were done between two moments."""
        self.look()
        return sum(since <= at < until for at in list(self.done.values())) / (until - since)


class Load:
    """Enqueues from a thread, round after round, whenever less than so much is ahead of the fleet."""

    def __init__(self, fleet: Fleet, work: Work, *, seed: int, ahead: int = 120) -> None:
        self.tail = Tail(fleet.path)
        self.refused = 0  # enqueues that were told to the caller to have failed
        self._fleet = fleet
        self._work = list(work)
        self._chance = random.Random(seed)
        self._ahead = ahead
        self._app: Duly = producer(fleet)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._app.close()

    def stop(self) -> None:
        """Enqueue no more."""
        self._stopping.set()
        self._thread.join(30)

    def measured(self, seconds: float) -> float:
        """Say how many jobs a second are done from now on."""
        since = time.monotonic()
        time.sleep(seconds)
        return self.tail.rate(since, since + seconds)

    def back_after(self, level: float, since: float, within: float, window: float = 1.0) -> float | None:
        """Say how long after a moment the fleet was as fast as `level` for a while; None: not within that time.

        What had piled up before is done in the first half second, and does not count.
        """
        begin = since + 0.5
        while (now := time.monotonic()) < since + within:
            if now >= begin + window and self.tail.rate(now - window, now) >= level:
                return now - since
            time.sleep(0.05)
        return None

    def drained(self, seconds: float) -> bool:
        """Stop, and wait until all that was acknowledged is done; False: it is not within that time."""
        self.stop()
        return self._fleet.wait(self._is_done, seconds, every=0.1)

    def _is_done(self) -> bool:
        self.tail.look()
        return not self.tail.open()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.tail.look()
            if len(self.tail.acknowledged) - len(self.tail.done) < self._ahead:
                self._chance.shuffle(self._work)
                for count, name, args in self._work:
                    self.enqueue(count, name, args)
            else:
                self._stopping.wait(0.01)

    def enqueue(self, count: int, name: str, args: Sequence[Any], *, priority: int = 0) -> None:
        """Enqueue some jobs of one task, and write down those that were acknowledged."""
        task = self._app.tasks[name]
        try:
            jobs = task.using(priority=priority).enqueue_many([task.call(*args) for _ in range(count)])
        except DulyError:
            self.refused += 1
            self._stopping.wait(0.05)
            return
        for job in jobs:
            self._fleet.ledger.note("acknowledged", id=job.id)


def untold(history: History) -> list[str]:
    """Give the jobs whose handler came to its end in a process that lived on, but whose end nobody was told."""
    return [
        job
        for job in history.acknowledged - set(history.done)
        if not any(run.pid in history.died for run in history.runs.get(job, ()))
    ]


def burnt(path: Path) -> int:
    """Count the runs that were not a first attempt, in a row whose jobs never fail."""
    return sum(one["attempt"] > 1 for one in records(path) if one["what"] == "begun")


def numbers(found: Findings, **more: Any) -> dict[str, Any]:
    """Put what was found into figures for programs."""
    parts = ("lost", "unexpected", "doubled", "unjustified", "stuck")
    counts = {part: len(getattr(found, part)) for part in parts}
    return {"acknowledged": found.acknowledged, **counts, "justified": found.duplicates, **more}
