"""Shortens the interval at which threads switch while a worker runs or many jobs are enqueued."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

# Python's 5 ms are as long as a whole batch takes: the database would be idle while a thread waits for its turn.
SWITCH_SECONDS = 0.0005
# With async handlers only the event loop computes. Several threads that compute would lose a tenth at this interval.
LOOP_ALONE_SECONDS = 0.0002

_lock = threading.RLock()  # a signal handler may enqueue or fork while its own thread holds it
_wanted: dict[object, float] = {}
_interval = SimpleNamespace(found=0.0, ours=0.0)  # before the first caller, and as set here


@contextmanager
def threads_switched_often(seconds: float = SWITCH_SECONDS) -> Iterator[None]:
    """Shorten the interval until the last caller ends. An interval that the program sets meanwhile stays."""
    caller = object()
    try:  # an exception can be raised into this thread at any line
        _want(caller, seconds)
        yield
    finally:
        _want(caller, None)


def _want(caller: object, seconds: float | None) -> None:
    with _lock:
        if seconds is not None:
            if not _wanted:
                _interval.found = _interval.ours = sys.getswitchinterval()
            _wanted[caller] = seconds
        else:
            _wanted.pop(caller, None)
        if sys.getswitchinterval() == _interval.ours:
            sys.setswitchinterval(min([_interval.found, *_wanted.values()]))
            _interval.ours = sys.getswitchinterval()


def _reset_after_fork() -> None:
    """Forget the callers, whose threads a forked child does not have."""
    global _lock  # noqa: PLW0603 (another thread of the parent may hold it)
    _lock = threading.RLock()
    _wanted.clear()
    _want(None, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
