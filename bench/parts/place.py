"""Where a bench happens: tables of its own that nobody else uses, and that are gone in the end."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from duly.bench.place import BenchFailed, app_arguments
from duly.duly import Duly

__all__ = ["BenchFailed", "Limit", "Place", "Recorded", "app_arguments", "now_ms"]


class Recorded(NamedTuple):
    """What the tables say: jobs that succeeded and are kept, jobs that are live, and when the last one finished."""

    succeeded: int
    live: int
    last_at: float


class Limit(ABC):
    """The least statements that do the work, on one connection, through the client library that duly uses."""

    @abstractmethod
    def insert(self, job_id: str, payload: str) -> None:
        """Add one job and commit."""

    @abstractmethod
    def insert_many(self, ids: Sequence[str], payloads: Sequence[str]) -> None:
        """Add jobs by one statement and commit."""

    @abstractmethod
    def take(self, batch: int, *, keep: bool = False) -> int:
        """Claim the oldest jobs and delete those claimed before, in one round trip and one commit.

        With `keep` they are moved to a table of what has ended, which has an id, a payload and two times. Answers how
        many were claimed. Until the next call they are on lease, as jobs are while they run.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the database."""


class Place(ABC):
    """Tables to measure on. `arguments` open an app on them, in this process or in another."""

    store: str
    schema = ""  # with a dot, where tables have one
    arguments: dict[str, Any]

    def app(self) -> Duly:
        """Open an app here that no variable and no file has a say in."""
        return Duly(**self.arguments)

    @abstractmethod
    def fresh(self) -> None:
        """Begin with empty tables."""

    @abstractmethod
    def settle(self) -> None:
        """Leave no work behind that the next measurement would pay for."""

    @abstractmethod
    def run(self, sql: str) -> list[Any]:
        """Run one statement and commit it."""

    @abstractmethod
    def limit(self) -> Limit:
        """Open the limit on these tables."""

    @abstractmethod
    def wal_bytes(self) -> int:
        """Say how much has been logged so far; only differences mean anything."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Say what this was measured on."""

    def recorded(self) -> Recorded:
        """Read what has become of the jobs, with times by the clock of this machine."""
        done = f"select count(*), max(finished_at) from {self.schema}duly_done where state = 'succeeded'"
        [[succeeded, last_at]] = self.run(done)
        [[live]] = self.run(f"select count(*) from {self.schema}duly_job")
        return Recorded(succeeded, live, (last_at or 0) / 1000 - self.clock_ahead_s())

    def clock_ahead_s(self) -> float:
        """Say by how much the clock of the database is ahead of this machine's."""
        return 0.0


def now_ms() -> int:
    """Read this machine's clock, as the limits do."""
    return time.time_ns() // 1_000_000
