"""Keeps operations whole: while a thread is inside of one, nothing is raised into it; it is raised at the end.

A sync handler whose time is over has an exception raised into its thread, wherever that stands. In the middle of an
operation it might come between a commit and its answer, or while the thread commits for others, who would then wait for
ever.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


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

    def whole(self) -> _Whole:
        """Let nothing be raised into this thread by `interrupt` until the end."""
        return _Whole(self)

    def holds(self, thread: int) -> bool:
        """Say whether a thread is inside of an operation already."""
        return thread in self._inside

    def enter(self, thread: int) -> None:
        """Begin to shield a thread."""
        try:
            with self._entering:
                self._inside.add(thread)
            self._hear()
        except BaseException:
            self.leave(thread)
            raise

    def _hear(self) -> None:
        """Raise here what was to be raised before: a thread hears of it when it next calls something."""

    def leave(self, thread: int) -> None:
        """Shield a thread no more, and raise into it what was to be raised meanwhile."""
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


class _Whole:
    """The time of one operation in one thread. By hand, because each call of a client makes one."""

    __slots__ = ("_shield", "_thread")

    def __init__(self, shield: Shield) -> None:
        self._shield = shield
        self._thread: int | None = None

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if not self._shield.holds(thread):
            self._thread = thread
            self._shield.enter(thread)

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._shield.leave(self._thread)


shield = Shield()
