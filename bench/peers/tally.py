"""What every contestant's handlers write: which job ran how often, and when the first began and the last ended.

Imported by scripts that run in a peer's own environment, so it needs nothing but Python.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Tally:
    """One byte a job in a file that the parent reads along; the times are told at the end."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._runs = mmap.mmap(file.fileno(), 0)
        self._path = Path(path)
        self._first = 0.0
        self._last = 0.0
        self._seen = 0
        self._cpu_before = 0.0

    def wait_for_start(self) -> None:
        """Say that this worker is ready, and wait until the parent lets all of them begin together."""
        ready_file(self._path, os.getpid()).touch()
        go = go_file(self._path)
        while not go.exists():
            time.sleep(0.001)
        self._cpu_before = used_cpu()

    def note(self, job: int) -> None:
        """Count one run of this job."""
        now = time.time()
        if not self._first:
            self._first = now
        self._last = now
        self._runs[job] += 1

    def complete(self) -> bool:
        """Say whether every job has run, here or in another worker; what was seen done is not looked at again."""
        missing = self._runs.find(b"\0", self._seen)
        self._seen = max(self._seen, missing)
        return missing < 0

    def wait_until_complete(self) -> None:
        while not self.complete():
            time.sleep(0.01)

    def stop_when_complete(self, stop: Callable[[], object]) -> None:
        """Call `stop` once every job has run: the body of a thread beside a worker that never ends by itself."""
        self.wait_until_complete()
        stop()

    def tell(self, **more: Any) -> None:
        """Print what the parent reads: times, CPU seconds since the start, the most memory held, and versions."""
        cpu_s = used_cpu()
        told = {
            "first_at": self._first,
            "last_at": self._last,
            "cpu_s": cpu_s - self._cpu_before,
            "cpu_with_start_s": cpu_s,
            "peak_mib": peak_mib(),
            **more,
        }
        print(json.dumps(told), flush=True)


def used_cpu() -> float:
    """Sum what this process and its ended children have used."""
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts)


def peak_mib() -> float | None:
    """Read the most memory this process ever held; `ru_maxrss` would tell that of the parent it was forked from."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), None)


def ready_file(path: Path, pid: int) -> Path:
    return path.with_name(f"{path.name}.ready.{pid}")


def go_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.go")


def blank(path: Path, jobs: int) -> Path:
    """Make the file of a tally: no job has run."""
    path.write_bytes(bytes(jobs))
    return path


def runs(path: Path) -> tuple[int, int]:
    """Read how many jobs have run, and how many of them more than once."""
    seen = path.read_bytes()
    ran = len(seen) - seen.count(0)
    return ran, ran - seen.count(1)
