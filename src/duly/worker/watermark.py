"""How far a queue is claimed, so that a claim need not walk over what is gone.

PostgreSQL keeps rows that were claimed in the index of the ready ones until vacuum may remove them, and while somebody
holds a transaction open it may not. Each claim walks over all of them: after a minute that takes longer than the work.

So a worker remembers where its last claim ended, for each priority, and the next one begins there. What comes to stand
before a mark (a job that was released, promoted or woken, or whose enqueue took long to commit) is found by a look
from the very beginning, which goes beside the turns, once a second or, where the way is very long, less often. The same
look says whether the way is long at all: if not, claims begin where they should, and no mark is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from duly.model import Claimed
from duly.store.ops import Head, Mark

LOOK_SECONDS = 1.0
SHARE = 20  # looks take this part of the time at most
LONG_MS = 1.0
MOST_MARKS = 4  # priorities with one


class Watermark:
    """Knows how far one queue is claimed."""

    def __init__(self) -> None:
        self._reached: dict[int, Mark] = {}
        self._needed = False
        self._look_at = 0.0
        self._looking = False

    def marks(self) -> list[Mark]:
        """Give the places where a claim is to begin; none: at the head."""
        return list(self._reached.values()) if self._needed else []

    def passed(self, jobs: Sequence[Claimed]) -> None:
        """Note what a claim took, in its order: what stood before that was taken with it, or is somebody else's."""
        last = {job.priority: job for job in jobs}
        for priority, job in last.items():
            self._reached.pop(priority, None)  # so that those claimed last come last
            self._reached[priority] = Mark(priority, job.due_at, job.id)
        while len(self._reached) > MOST_MARKS:
            del self._reached[next(iter(self._reached))]

    def begin_look(self, now: float) -> bool:
        """Say whether it is time to look at the head, which then must be done."""
        if self._looking or now < self._look_at:
            return False
        self._looking = True
        return True

    def looked(self, head: Head, now: float) -> bool:
        """Take note of what a look has found. True: something stands before a mark, and the mark is taken back."""
        self._looking = False
        if head.took_ms is None:
            self._look_at = math.inf
            return False
        self._look_at = now + max(LOOK_SECONDS, SHARE * head.took_ms / 1000)
        self._needed = head.took_ms >= LONG_MS
        return head.mark is not None and self._back_to(head.mark)

    def _back_to(self, mark: Mark) -> bool:
        """Begin no later than there. False: that was so."""
        reached = self._reached.get(mark.priority)
        if reached is None or reached <= mark:
            return False
        self._reached[mark.priority] = mark
        return True

    def look_failed(self, now: float) -> None:
        """Do without marks until a look succeeds."""
        self._looking, self._needed, self._look_at = False, False, now + LOOK_SECONDS
