"""How often the threads of this process take turns, while something is written that another thread goes on making."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# How long a thread that has something for a database waits for one that runs handlers or makes jobs. Python's own 5 ms
# are as long as a whole batch takes, so that the database would have nothing to do meanwhile.
SWITCH_SECONDS = 0.0002


class _Switching:
    """Who wants the threads of this process to take turns more often than Python would.

    A program that sets the interval itself meanwhile has the last word.
    """

    def __init__(self) -> None:
        self._found = self._ours = 0.0  # what was set when the first came, and what we set
        self._begin_afresh()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_afresh)

    def _begin_afresh(self) -> None:
        """Forget, in a forked child, those whose threads it does not have, and a lock that nobody frees."""
        self._lock = threading.Lock()
        self._wanted_by: set[object] = set()
        self._switch_as_before()

    def want(self, who: object) -> None:
        with self._lock:
            if not self._wanted_by:
                self._found = sys.getswitchinterval()
                self._ours = min(self._found, SWITCH_SECONDS)
                sys.setswitchinterval(self._ours)
            self._wanted_by.add(who)

    def want_no_more(self, who: object) -> None:
        with self._lock:
            self._wanted_by.discard(who)
            self._switch_as_before()

    def _switch_as_before(self) -> None:
        if not self._wanted_by and sys.getswitchinterval() == self._ours:
            sys.setswitchinterval(self._found)


_switching = _Switching()


@contextmanager
def threads_switched_often() -> Iterator[None]:
    """Let threads take turns often until nobody wants it any more."""
    who = object()
    try:
        _switching.want(who)
        yield
    finally:
        _switching.want_no_more(who)
