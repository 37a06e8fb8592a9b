"""Counts the jobs of queues that have a limit, so that callers of `enqueue` need not.

One count a second is enough for all workers. A count takes at most a twentieth of the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from duly.model import Limit
from duly.store import queues
from duly.worker.shared import Shared
from duly.worker.upkeep.rescue import SHARE

FRESH_MS = 1000


class Count:
    """Counts the depth of the queues of one worker."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._count_at: dict[str, float] = {}

    async def look(self, limits: Iterable[Limit]) -> None:
        """Count each queue that has a limit and was not counted a moment ago."""
        for limit in limits:
            if limit.max_depth is not None and limit.name in self._shared.queues and not _is_fresh(limit):
                await self._count(limit.name, limit.max_depth)

    async def _count(self, queue: str, max_depth: int) -> None:
        shared, began = self._shared, self._shared.clock()
        if began >= self._count_at.get(queue, -math.inf):
            depth = await shared.driver.arun(queues.depth(queue, enough=max_depth + 1))
            self._count_at[queue] = began + SHARE * (shared.clock() - began)
            await shared.driver.arun(queues.note_depth(queue, depth, max_depth=max_depth))


def _is_fresh(limit: Limit) -> bool:
    """Whether it was counted a moment ago. A count from the future was made before the clock was set back."""
    return limit.depth_age_ms is not None and 0 <= limit.depth_age_ms < FRESH_MS
