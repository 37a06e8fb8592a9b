"""What a worker knows of what its queues were told, and the claims that follow from it.

A queue whose priorities age or whose retries have a budget is claimed in that shape. The budget is a credit: each claim
of n jobs earns its share of n, and retries spend it. So a share of 0.2 lets one claim of five have a retry, where
claims are of one job each. What they take of the room that nothing else needs costs them nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from duly.model import Claimed, Limit
from duly.store import ops, queues
from duly.store.op import Op
from duly.store.ops import Mark


class Shaping:
    """Knows the limits of the queues, as they were read last, and what credit retries have in each."""

    def __init__(self) -> None:
        self._limits: dict[str, Limit] = {}
        self._credit: dict[str, float] = {}

    def learn(self, limits: list[Limit]) -> None:
        """Take note of what the queues were told by now."""
        self._limits = {limit.name: limit for limit in limits}

    def promotes_retries(self, queue: str) -> bool:
        """Say whether retries of a queue stand among its other jobs once they are due."""
        limit = self._limits.get(queue)
        return limit is None or limit.retry_share is None

    def is_plain(self, queue: str) -> bool:
        """Say whether a queue was told nothing that bears on its claims."""
        told = self._limits.get(queue)
        return told is None or (told.ageing_ms is None and told.retry_share is None)

    def claim(
        self,
        queue: str,
        *,
        limit: int,
        token: int,
        worker: str,
        tasks: Iterable[str],
        alone: bool,
        marks: Iterable[Mark],
    ) -> Op[list[Claimed]]:
        """Make the claim of a queue; suspects are claimed as ever."""
        told = self._limits.get(queue)
        if alone or told is None or self.is_plain(queue):
            return ops.claim(queue, limit=limit, token=token, worker=worker, tasks=tasks, alone=alone, marks=marks)
        retries = None if told.retry_share is None else self._earn(queue, told.retry_share, limit)
        return queues.claim(
            queue, ageing_ms=told.ageing_ms, retries=retries, limit=limit, token=token, worker=worker, tasks=tasks
        )

    def _earn(self, queue: str, share: float, limit: int) -> int:
        """Earn what a claim is worth, saving up no more than that, or one; says how many retries it may take."""
        earned = share * limit
        self._credit[queue] = min(self._credit.get(queue, 0.0) + earned, max(earned, 1.0))
        return int(self._credit[queue] + 1e-9)  # five times 0.2 is one

    def took(self, queue: str, jobs: Sequence[Claimed]) -> None:
        """Take note of what a claim took."""
        if (credit := self._credit.get(queue)) is not None:
            self._credit[queue] = max(0.0, credit - sum(job.attempt > 1 for job in jobs))
