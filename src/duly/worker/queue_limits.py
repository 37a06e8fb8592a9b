"""The limits of a worker's queues, and the claims that keep them.

A queue whose priorities age or whose retries have a budget has a claim of its own. The budget is a credit: each claim
of n jobs earns its share of n, and retries spend it. With a share of 0.2 and claims of one job, one claim of five may
take a retry. Retries that use room which no other job needs cost no credit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from duly.model import Claimed, Limit
from duly.store import ops, queues
from duly.store.op import Op
from duly.store.ops import Mark


class QueueLimits:
    """The limits of the queues as they were last read, and the credit of retries in each."""

    def __init__(self) -> None:
        self._limits: dict[str, Limit] = {}
        self._credit: dict[str, float] = {}

    def learn(self, limits: list[Limit]) -> None:
        """Use these limits from now on."""
        self._limits = {limit.name: limit for limit in limits}

    def promotes_retries(self, queue: str) -> bool:
        """Whether due retries of a queue become ready like its other jobs."""
        limit = self._limits.get(queue)
        return limit is None or limit.retry_share is None

    def claim(self, queue: str, *, limit: int, alone: bool, marks: Iterable[Mark], **holder: Any) -> Op[list[Claimed]]:
        """Return the claim for a queue. Limits do not change the claims of suspects."""
        limits = self._limits.get(queue)
        if alone or limits is None or (limits.ageing_ms is None and limits.retry_share is None):
            return ops.claim(queue, limit=limit, alone=alone, marks=marks, **holder)
        retries = None if limits.retry_share is None else self._earn(queue, limits.retry_share, limit)
        return queues.claim(queue, ageing_ms=limits.ageing_ms, retries=retries, limit=limit, **holder)

    def _earn(self, queue: str, share: float, limit: int) -> int:
        """Add the share of a claim to the credit, up to that share or one. Returns how many retries it allows."""
        earned = share * limit
        self._credit[queue] = min(self._credit.get(queue, 0.0) + earned, max(earned, 1.0))
        return int(self._credit[queue] + 1e-9)  # five times 0.2 must be one

    def took(self, queue: str, jobs: Sequence[Claimed]) -> None:
        """Take the retries of a claim from the credit."""
        if (credit := self._credit.get(queue)) is not None:
            self._credit[queue] = max(0.0, credit - sum(job.attempt > 1 for job in jobs))
