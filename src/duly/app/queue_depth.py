"""How full queues are that take no more than so many jobs, as one app knows it.

The limit is soft: workers count what waits about once a second, and who enqueues adds what it has added itself since.
Before anything is refused, it is counted anew, so that a queue that was emptied meanwhile takes jobs at once. Where no
worker has counted for a while, the app counts by itself. An app whose queues have no limit reads a tiny table, once a
second at most and only while it enqueues.
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
COUNT_SECONDS = 0.1  # between two counts of our own before something is refused
SHARE = 20  # counts take this part of the time at most


class Depths:
    """Lets jobs into queues, or refuses them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._look_at = -math.inf
        self._depths: dict[str, Depth] = {}

    def lets_all_in(self, queue: str) -> bool:
        """Say whether a queue is known to have no limit, as most have none: then `admit` need not be asked."""
        return queue not in self._depths and self._clock() < self._look_at

    def admit(self, queue: str, count: int, *, before: int = 0) -> Steps[None]:
        """Refuse jobs that a queue has no room for. `before`: how many of the same call were enqueued already."""
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
    """How many jobs wait in a queue: a figure, and what was added here since it was true."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.count_at = -math.inf
        self._figure = 0
        self._true_at = -math.inf
        self._added: deque[tuple[float, int]] = deque()

    @property
    def now(self) -> int:
        """How many there are, as far as we know."""
        return self._figure + sum(count for _, count in self._added)

    def is_old(self, now: float) -> bool:
        """Say whether nobody has counted for so long that we must."""
        return now - self._true_at > OLD_SECONDS

    def has_room(self, count: int) -> bool:
        """Say whether so many more may come."""
        return self.now + count <= self.most

    def heard(self, figure: int, true_at: float) -> None:
        """Take note of what somebody else has counted, if that is news."""
        if true_at > self._true_at:
            self._figure, self._true_at = figure, true_at
            while self._added and self._added[0][0] <= true_at:
                self._added.popleft()

    def counted(self, figure: int, began: float, ended: float) -> None:
        """Take note of what we have counted ourselves."""
        self.heard(figure, began)
        self.count_at = ended + min(max(COUNT_SECONDS, SHARE * (ended - began)), LOOK_SECONDS)

    def added(self, count: int, now: float) -> None:
        """Take note of what we are about to add; what comes in the same moment is kept as one."""
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
        f"{enqueued} Enqueue again when its workers have caught up, or raise the limit: "
        f"duly queues limit {queue} --depth …",
        queue,
        enqueued=before,
    )
