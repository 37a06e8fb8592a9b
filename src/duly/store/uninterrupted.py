"""Keeps operations uninterrupted: an exception that is raised into a thread during one is raised at its end.

When a sync handler times out, an exception is raised into its thread. During an operation it could come between a
commit and its answer. Or the thread could be committing for other callers, which would then wait for ever.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class Shield:
    """Knows which threads of this process run an operation."""

    def __init__(self) -> None:
        self._begin_afresh()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_afresh)

    def _begin_afresh(self) -> None:
        """Start empty in a forked child, which has none of the threads and could never take a held lock."""
        self._entering = threading.Lock()
        self._inside: set[int] = set()
        self._wanted: dict[int, Callable[[], None]] = {}  # interrupts that wait for the end of an operation

    def whole(self) -> _Whole:
        """Return a context in which `interrupt` raises nothing into this thread."""
        return _Whole(self)

    def holds(self, thread: int) -> bool:
        """Return whether a thread runs an operation."""
        return thread in self._inside

    def enter(self, thread: int) -> None:
        """Begin to shield a thread."""
        try:
            with self._entering:
                self._inside.add(thread)
            self._raise_pending()
        except BaseException:
            self.leave(thread)
            raise

    def _raise_pending(self) -> None:
        """Let Python raise an exception that is pending: it does so at the next call."""

    def leave(self, thread: int) -> None:
        """Stop shielding a thread, and raise the exception that waited."""
        with self._entering:
            self._inside.discard(thread)
            if (interrupt := self._wanted.pop(thread, None)) is not None:
                interrupt()

    def interrupt(self, thread: int, interrupt: Callable[[], None]) -> None:
        """Interrupt a thread, now or at the end of its operation."""
        with self._entering:
            if thread in self._inside:
                self._wanted[thread] = interrupt
            else:
                interrupt()


class _Whole:
    """The context of one operation in one thread. A class: every call makes one, and a generator is slower."""

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
