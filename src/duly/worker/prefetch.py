"""How far ahead a worker claims: quick jobs only, and as many as it can begin in a moment.

Claiming one by one costs a round trip a job. So jobs of tasks that are quick are claimed before a slot is free. A job
that has not begun a quarter of a second after its claim is released, so that another worker can run it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from duly.app.definition import Kind
from duly.app.task import Task

QUICK_SECONDS = 0.05
AHEAD_SECONDS = 0.1
LATE_SECONDS = 0.25
MOST_AHEAD = 4000
SOON_SHARE = 0.1  # of the jobs claimed ahead: so many end within a hundredth of a second
CAREFUL_SECONDS = 60.0  # before claiming further ahead again
MOST_BYTES = 8 * 1024 * 1024
ENOUGH = 20  # attempts before a task counts as quick


class Prefetch:
    """Measures the last attempts of each task."""

    def __init__(self, concurrency: int, tasks: Mapping[str, Task[..., Any, Any]], max_attempts: int) -> None:
        self._concurrency = concurrency
        self._took: dict[str, deque[float]] = {
            name: deque(maxlen=100)
            for name, task in tasks.items()
            if task.definition.kind is not Kind.PROCESS and (task.definition.max_attempts or max_attempts) > 1
        }
        self._payload_bytes = 0.0
        self._not_before = 0.0
        self._most = MOST_AHEAD
        self._careful_until = 0.0

    def note(self, task: str, seconds: float) -> None:
        """Note how long an attempt took."""
        took = self._took.get(task)
        if took is not None:
            took.append(seconds)

    def note_claim(self, count: int, payload_bytes: int) -> None:
        """Note how large the payloads are, because jobs that are claimed ahead stay in memory."""
        if count:
            self._payload_bytes += (payload_bytes / count - self._payload_bytes) / 8

    def late(self, now: float) -> None:
        """Claim nothing ahead for a while, because a job that was cannot wait."""
        self._not_before = now + 1.0

    def too_far(self, now: float) -> None:
        """Claim half as far ahead from now on, because a job did not begin in time.

        The durations do not show how many handlers run at once: handlers that compute run one after the other.
        """
        if now >= self._not_before:  # once for all jobs that waited too long together
            self._most = max(self._most // 2, self._concurrency)
        self.late(now)
        self._careful_until = now + CAREFUL_SECONDS

    def soon(self, ahead: int) -> int:
        """Return how many ends to expect in a moment if this many jobs are claimed ahead."""
        return int(ahead * SOON_SHARE)

    def ahead(self, now: float) -> tuple[int, frozenset[str]]:
        """Return how many jobs to claim beyond the free slots, and of which tasks."""
        if now < self._not_before:
            return 0, frozenset()
        quick = {name: _p95(took) for name, took in self._took.items() if len(took) >= ENOUGH}
        quick = {name: seconds for name, seconds in quick.items() if seconds < QUICK_SECONDS}
        if not quick:
            return 0, frozenset()
        if now >= self._careful_until and self._most < MOST_AHEAD:
            self._most, self._careful_until = min(2 * self._most, MOST_AHEAD), now + CAREFUL_SECONDS
        in_time = self._concurrency * AHEAD_SECONDS / max(*quick.values(), 0.0001)
        in_memory = MOST_BYTES / max(self._payload_bytes, 1.0)
        return int(min(in_time, in_memory, self._most)), frozenset(quick)


def _p95(took: deque[float]) -> float:
    ordered = sorted(took)  # threads may add to it meanwhile
    return ordered[int(len(ordered) * 0.95)]
