"""Who is measured: something that enqueues, claims and finishes jobs in batches.

There are three on each store: duly through its operations and driver, and the two limits of `limit.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from duly.model import KEEP_MS, Change, Claimed, NewJob, State, Terms
from duly.store import ops
from duly.store.driver import Driver
from duly.store.op import Finish, Held, Op

PAYLOAD = '{"order":4711,"mail":"somebody@example.org"}'
QUEUE, TASK, WORKER = "default", "send_receipt", "host-1:4242:a1b2c3"
SUCCESS = Change(State.SUCCEEDED)


class WrongCount(AssertionError):
    """A contestant did not do the work it was measured for."""


class Contestant(ABC):
    """Works on jobs in batches; every batch it claims is checked to be whole."""

    name: str
    table: str

    @abstractmethod
    def enqueue(self, ids: Sequence[str], *, keep: bool) -> None:
        """Add these jobs and commit."""

    @abstractmethod
    def claim(self, batch: int) -> Sequence[Any]:
        """Lease `batch` jobs and commit."""

    @abstractmethod
    def finish(self, jobs: Sequence[Any], *, keep: bool) -> None:
        """Record the success of these jobs and commit."""

    @abstractmethod
    def together(self, turns: int, batch: int, *, keep: bool) -> None:
        """Work in turns that finish the last batch and claim the next at once."""

    def apart(self, turns: int, batch: int, *, keep: bool) -> None:
        """Claim, wait, finish, wait: two commits a turn."""
        for _ in range(turns):
            self.finish(whole(self.claim(batch), batch), keep=keep)

    @abstractmethod
    def close(self) -> None:
        """Let go of the database."""


class Duly(Contestant):
    """The product: operations through its driver."""

    name = "duly"

    def __init__(self, driver: Driver, table: str) -> None:
        self.driver = driver
        self.table = table
        self._tokens = itertools.count(1)

    def enqueue(self, ids: Sequence[str], *, keep: bool) -> None:
        terms = Terms(TASK, keep_ms=KEEP_MS if keep else 0)
        self.driver.run(ops.enqueue(terms, [NewJob(job_id, PAYLOAD) for job_id in ids]))

    def claim(self, batch: int) -> list[Claimed]:
        return self.driver.run(self._claim(batch))

    def finish(self, jobs: Sequence[Claimed], *, keep: bool) -> None:
        whole(self.driver.run(self._finish(jobs)), len(jobs))

    def together(self, turns: int, batch: int, *, keep: bool) -> None:
        asyncio.run(self._together(turns, batch))

    async def _together(self, turns: int, batch: int) -> None:
        run = self.driver.arun
        jobs = whole(await run(self._claim(batch)), batch)
        for _ in range(turns - 1):
            verdicts, claimed = await asyncio.gather(run(self._finish(jobs)), run(self._claim(batch)))
            whole(verdicts, batch)
            jobs = whole(claimed, batch)
        await run(self._finish(jobs))

    def _claim(self, batch: int) -> Op[list[Claimed]]:
        return ops.claim(QUEUE, limit=batch, token=next(self._tokens), worker=WORKER, tasks=[TASK])

    def _finish(self, jobs: Sequence[Claimed]) -> Op[dict[str, Any]]:
        return ops.finish([Finish(job, SUCCESS) for job in jobs])

    def extend(self, jobs: Sequence[Claimed]) -> None:
        whole(self.driver.run(ops.extend([Held(job.id, job.token) for job in jobs])), len(jobs))

    def close(self) -> None:
        self.driver.close()


def whole(answer: Any, expected: int) -> Any:
    """Pass an answer on if it is as long as it must be."""
    if len(answer) != expected:
        raise WrongCount(f"{len(answer)} jobs where there should be {expected}")
    return answer
