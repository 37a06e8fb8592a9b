"""How often each job ran and when it first began, in a file that the worker maps and the bench reads along."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

_TIME = 8


class Tally:
    """Eight bytes a job for the time at which it first began, then one for how often it ran."""

    def __init__(self, path: str | Path, jobs: int) -> None:
        self.path, self.jobs = str(path), jobs
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        whole = memoryview(self._map)
        self._starts = whole[: _TIME * jobs].cast("d")
        self._runs = whole[_TIME * jobs :]
        self.first_at = 0.0
        self.last_at = 0.0

    @classmethod
    def blank(cls, path: Path, jobs: int) -> Tally:
        """Make a tally of jobs that have not run."""
        path.write_bytes(bytes((_TIME + 1) * jobs))
        return cls(path, jobs)

    def note(self, job: int) -> int:
        """Count one run of a job; answers how many it has had."""
        now = time.time()
        if not self.first_at:
            self.first_at = now
        self.last_at = now
        times = self._runs[job] + 1
        self._runs[job] = times
        if times == 1:
            self._starts[job] = now
        return times

    def complete(self, jobs: int | None = None) -> bool:
        """Say whether the first so many jobs have run, all of them unless told."""
        end = _TIME * self.jobs + (self.jobs if jobs is None else jobs)
        return self._map.find(b"\0", _TIME * self.jobs, end) < 0

    def runs(self) -> bytes:
        """Give how often each job ran."""
        return bytes(self._runs)

    def starts(self) -> list[float]:
        """Give when each job first began."""
        return list(self._starts)

    def close(self) -> None:
        """Let go of the file."""
        self._starts.release()
        self._runs.release()
        self._map.close()
