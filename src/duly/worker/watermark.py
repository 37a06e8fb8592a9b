"""How far a queue is claimed, so that a claim does not scan dead index entries.

PostgreSQL keeps claimed rows in the index of ready jobs until vacuum removes them, which it cannot do while any
transaction is open. Each claim scans all of them: after a minute that takes longer than the jobs.

So a worker remembers for each priority where its last claim ended, and begins the next claim there. Jobs can also
become ready before such a mark: they were released, promoted or woken, or their enqueue took long to commit. A look
from the head of the queue finds them. It runs beside the turns, once a second, or less often if the scan is very long.
It also measures whether the scan is long at all: if not, claims begin at the head and use no mark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from duly.model import Claimed
from duly.store.ops import Head, Mark

LOOK_SECONDS = 1.0
SHARE = 20  # looks take at most this part of the time
LONG_MS = 1.0
MOST_MARKS = 4  # one for each priority


class Watermark:
    """The marks of one queue."""

    def __init__(self) -> None:
        self._reached: dict[int, Mark] = {}
        self._needed = False
        self._look_at = 0.0
        self._looking = False

    def marks(self) -> list[Mark]:
        """Return the marks at which a claim begins. If there are no marks it begins at the head."""
        return list(self._reached.values()) if self._needed else []

    def passed(self, jobs: Sequence[Claimed]) -> None:
        """Note the jobs of a claim, in its order. The claim or another worker took all jobs before the last one."""
        last = {job.priority: job for job in jobs}
        for priority, job in last.items():
            self._reached.pop(priority, None)  # so that the priorities claimed last come last
            self._reached[priority] = Mark(priority, job.due_at, job.id)
        while len(self._reached) > MOST_MARKS:
            del self._reached[next(iter(self._reached))]

    def begin_look(self, now: float) -> bool:
        """Whether it is time to look at the head. If so, the caller must look."""
        if self._looking or now < self._look_at:
            return False
        self._looking = True
        return True

    def looked(self, head: Head, now: float) -> bool:
        """Note what a look found. True: a job is ready before a mark, and the mark was moved back."""
        self._looking = False
        if head.took_ms is None:
            self._look_at = math.inf
            return False
        self._look_at = now + max(LOOK_SECONDS, SHARE * head.took_ms / 1000)
        self._needed = head.took_ms >= LONG_MS
        return head.mark is not None and self._back_to(head.mark)

    def _back_to(self, mark: Mark) -> bool:
        """Move the mark of a priority back. False: it was not behind `mark`."""
        reached = self._reached.get(mark.priority)
        if reached is None or reached <= mark:
            return False
        self._reached[mark.priority] = mark
        return True

    def look_failed(self, now: float) -> None:
        """Use no marks until a look succeeds."""
        self._looking, self._needed, self._look_at = False, False, now + LOOK_SECONDS
