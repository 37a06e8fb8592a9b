"""How long to wait between two looks at something that is to happen."""

from __future__ import annotations

import time
from collections.abc import Iterable


def pauses(timeout: float | None) -> Iterable[float]:
    """Say how long to wait before each further look: short at first, so that what is quick is seen at once."""
    give_up_at = None if timeout is None else time.monotonic() + timeout
    pause = 0.002
    while True:
        left = pause if give_up_at is None else give_up_at - time.monotonic()
        yield max(0.0, min(pause, left))
        if left <= 0:
            return
        pause = min(pause * 1.5, 0.25)
