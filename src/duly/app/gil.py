"""How often the threads of this process take turns, while something is written that another thread goes on making."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# How long a thread that has something for a database waits for one that runs handlers or makes jobs. Python's own 5 ms
# are as long as a whole batch takes, so that the database would have nothing to do meanwhile.
SWITCH_SECONDS = 0.0005
# The same where nobody computes but the event loop: more threads that do would lose a tenth by turns as short as these.
LOOP_ALONE_SECONDS = 0.0002


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
        self._wanted_by: dict[object, float] = {}
        self._switch_as_wanted()

    def want(self, who: object, seconds: float) -> None:
        with self._lock:
            if not self._wanted_by:
                self._found = self._ours = sys.getswitchinterval()
            self._wanted_by[who] = seconds
            self._switch_as_wanted()

    def want_no_more(self, who: object) -> None:
        with self._lock:
            self._wanted_by.pop(who, None)
            self._switch_as_wanted()

    def _switch_as_wanted(self) -> None:
        if sys.getswitchinterval() == self._ours:
            sys.setswitchinterval(min([self._found, *self._wanted_by.values()]))
            self._ours = sys.getswitchinterval()


_switching = _Switching()


@contextmanager
def threads_switched_often(seconds: float = SWITCH_SECONDS) -> Iterator[None]:
    """Let threads take turns often until nobody wants it any more."""
    who = object()
    try:
        _switching.want(who, seconds)
        yield
    finally:
        _switching.want_no_more(who)
