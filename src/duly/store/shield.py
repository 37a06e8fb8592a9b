"""Keeps operations whole: while a thread is inside of one, nothing is raised into it; it is raised at the end.

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
        self._wanted: dict[int, Callable[[], None]] = {}  # interrupts that wait for the end of an operation

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Let nothing be raised into this thread by `interrupt` until the end."""
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
            self._leave(thread)

    def _hear(self) -> None:
        """Raise here what was to be raised before: a thread hears of it when it next calls something."""

    def _leave(self, thread: int) -> None:
        with self._entering:
            self._inside.discard(thread)
            if (interrupt := self._wanted.pop(thread, None)) is not None:
                interrupt()

    def interrupt(self, thread: int, interrupt: Callable[[], None]) -> None:
        """Interrupt a thread, now or at the end of the operation that it is inside of."""
        with self._entering:
            if thread in self._inside:
                self._wanted[thread] = interrupt
            else:
                interrupt()


shield = Shield()
