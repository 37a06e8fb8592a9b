"""What every contestant's handlers write: which job ran how often, and when the first began and the last ended.

Imported by scripts that run in a peer's own environment, so it needs nothing but Python.
"""

from __future__ import annotations

import json
import mmap
import resource
import time
from pathlib import Path
from typing import Any


class Tally:
    """One byte a job in a file that the parent reads along; the times are told at the end."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._runs = mmap.mmap(file.fileno(), 0)
        self._first = 0.0
        self._last = 0.0

    def note(self, job: int) -> None:
        """Count one run of this job."""
        now = time.time()
        if not self._first:
            self._first = now
        self._last = now
        self._runs[job] += 1

    def complete(self) -> bool:
        """Say whether every job has run."""
        return self._runs.find(b"\0") < 0

    def tell(self, **more: Any) -> None:
        """Print what the parent reads: times, CPU seconds of this process, and versions."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        told = {"first_at": self._first, "last_at": self._last, "cpu_s": used.ru_utime + used.ru_stime, **more}
        print(json.dumps(told), flush=True)


def blank(path: Path, jobs: int) -> Path:
    """Make the file of a tally: no job has run."""
    path.write_bytes(bytes(jobs))
    return path


def runs(path: Path) -> tuple[int, int]:
    """Read how many jobs have run, and how many of them more than once."""
    seen = path.read_bytes()
    ran = len(seen) - seen.count(0)
    return ran, ran - seen.count(1)
