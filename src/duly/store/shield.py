"""Keeps operations whole: while a thread is inside of one, nothing is raised into it.

A sync handler whose time is over has an exception raised into its thread, wherever that stands. In the middle of an
operation it might come between a commit and its answer, or while the thread commits for others, who would then wait for
ever.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Shield:
    """Knows which threads of this process are inside of an operation."""

    def __init__(self) -> None:
        self._begin_afresh()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_afresh)

    def _begin_afresh(self) -> None:
        """Forget, in a forked child, threads that it does not have, and a lock that nobody frees."""
        self._entering = threading.Lock()
        self._inside: set[int] = set()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Let nothing be raised into this thread by `unless_inside` until the end."""
        thread = threading.get_ident()
        if thread in self._inside:
            yield
            return
        try:
            with self._entering:
                self._inside.add(thread)
            self._hear()
            yield
        finally:
            self._inside.discard(thread)

    def _hear(self) -> None:
        """Raise here what was to be raised before: a thread hears of it when it next calls something."""

    def unless_inside(self, thread: int, interrupt: Callable[[], None]) -> None:
        """Interrupt a thread, unless it is inside of an operation: then whoever wants it has to come again."""
        with self._entering:
            if thread not in self._inside:
                interrupt()


shield = Shield()
