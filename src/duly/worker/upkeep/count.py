"""Counts what waits in queues that take no more than so many jobs, so that who enqueues need not.

One count a second is enough for all, and whoever comes first does it. A count takes a twentieth of the time at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from duly.model import Limit
from duly.store import queues
from duly.worker.upkeep.rescue import SHARE

if TYPE_CHECKING:
    from duly.worker.worker import Worker

FRESH_MS = 1000


class Measure:
    """Measures the depth of the queues of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._count_at: dict[str, float] = {}

    async def look(self, limits: Iterable[Limit]) -> None:
        """Count each queue of ours that has a limit and was not counted by somebody else a moment ago."""
        for limit in limits:
            if limit.max_depth is not None and limit.name in self._worker.queues and not _is_fresh(limit):
                await self._count(limit.name, limit.max_depth)

    async def _count(self, queue: str, max_depth: int) -> None:
        worker, began = self._worker, self._worker.clock()
        if began >= self._count_at.get(queue, -math.inf):
            depth = await worker.driver.arun(queues.depth(queue, enough=max_depth + 1))
            self._count_at[queue] = began + SHARE * (worker.clock() - began)
            await worker.driver.arun(queues.note_depth(queue, depth, max_depth=max_depth))


def _is_fresh(limit: Limit) -> bool:
    """Say whether it was counted a moment ago; a count from the future was made before the clock stepped back."""
    return limit.depth_age_ms is not None and 0 <= limit.depth_age_ms < FRESH_MS
