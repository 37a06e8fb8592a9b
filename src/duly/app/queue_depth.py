"""The depth of queues that have a limit, as one app knows it.

The limit is soft: workers count the waiting jobs about once a second, and the app adds the jobs that it enqueued since.
It counts again before it refuses a job, so that a queue that was emptied meanwhile takes jobs at once. If no worker has
counted for a while, the app counts. An app whose queues have no limit reads a tiny table, at most once a second and
only while it enqueues.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from duly.errors import QueueFull
from duly.model import Limit
from duly.store import queues
from duly.store.sequence import Steps

LOOK_SECONDS = 1.0
OLD_SECONDS = 5.0
COUNT_SECONDS = 0.1  # between two counts of our own
SHARE = 20  # counts take at most this part of the time


class Depths:
    """Admits jobs to queues, or raises QueueFull."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._look_at = -math.inf
        self._depths: dict[str, Depth] = {}

    def lets_all_in(self, queue: str) -> bool:
        """Return whether a queue is known to have no limit, as most queues. Then `admit` is not needed."""
        return queue not in self._depths and self._clock() < self._look_at

    def admit(self, queue: str, count: int, *, before: int = 0) -> Steps[None]:
        """Raise QueueFull if a queue has no room. `before`: how many jobs the same call has enqueued already."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._learn((yield queues.limits()), now)
        depth = self._depths.get(queue)
        if depth is None:
            return
        if depth.is_old(now) or (not depth.has_room(count) and now >= depth.count_at):
            counted = yield queues.depth(queue, enough=depth.most + 1)
            depth.counted(counted, now, self._clock())
        if not depth.has_room(count):
            raise _full(queue, depth, count, before)
        depth.added(count, now)

    def _learn(self, limits: list[Limit], now: float) -> None:
        known, self._depths = self._depths, {}
        for limit in limits:
            if limit.max_depth is not None:
                depth = known.get(limit.name)
                if depth is None or depth.most != limit.max_depth:
                    depth = Depth(limit.max_depth)
                if limit.depth is not None and limit.depth_age_ms is not None and limit.depth_age_ms >= 0:
                    depth.heard(limit.depth, now - limit.depth_age_ms / 1000)
                self._depths[limit.name] = depth


class Depth:
    """How many jobs wait in a queue: the last count, and the jobs added here since."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.count_at = -math.inf
        self._figure = 0
        self._true_at = -math.inf
        self._added: deque[tuple[float, int]] = deque()

    @property
    def now(self) -> int:
        """The present depth, as far as known."""
        return self._figure + sum(count for _, count in self._added)

    def is_old(self, now: float) -> bool:
        """Return whether the last count is too old."""
        return now - self._true_at > OLD_SECONDS

    def has_room(self, count: int) -> bool:
        """Return whether there is room for so many more jobs."""
        return self.now + count <= self.most

    def heard(self, figure: int, true_at: float) -> None:
        """Take the count of a worker, if it is newer."""
        if true_at > self._true_at:
            self._figure, self._true_at = figure, true_at
            while self._added and self._added[0][0] <= true_at:
                self._added.popleft()

    def counted(self, figure: int, began: float, ended: float) -> None:
        """Take our own count."""
        self.heard(figure, began)
        self.count_at = ended + min(max(COUNT_SECONDS, SHARE * (ended - began)), LOOK_SECONDS)

    def added(self, count: int, now: float) -> None:
        """Add jobs to the depth. Jobs of the same moment share an entry."""
        if self._added and now - self._added[-1][0] < COUNT_SECONDS / 10:
            _, before = self._added.pop()
            count += before
        self._added.append((now, count))


def _full(queue: str, depth: Depth, count: int, before: int) -> QueueFull:
    enqueued = f" {before:,} of these were enqueued before that." if before else ""
    waiting = "1 job waits" if depth.now == 1 else f"{depth.now:,} jobs wait"
    more = "one more" if count == 1 else f"{count:,} more"
    return QueueFull(
        f"queue {queue!r} is full: {waiting} in it, and {more} would exceed its limit of {depth.most:,}."
        f"{enqueued} Retry later, or raise the limit: duly queues limit {queue} --depth …",
        queue,
        enqueued=before,
    )
