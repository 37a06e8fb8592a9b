"""Clocks that are wrong: SQLite takes the time of the process that asks, so each process can have its own.

By how much is in a file of eight bytes, which may be changed while the process runs.
"""

from __future__ import annotations

import mmap
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from duly.store import statements
from duly.store.sqlite.driver import SQLiteDriver

_FORM = "<q"


class Clock:
    """One clock, by how many milliseconds it is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(struct.pack(_FORM, 0))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    @property
    def wrong_ms(self) -> int:
        """By how much it is wrong."""
        return int(struct.unpack_from(_FORM, self._memory)[0])

    @wrong_ms.setter
    def wrong_ms(self, value: int) -> None:
        struct.pack_into(_FORM, self._memory, 0, value)


def follow(path: Path) -> Callable[[], None]:
    """Have the connections that this process opens go by a clock; gives what undoes it."""
    clock = Clock(path)
    connect, before = SQLiteDriver.connect, statements.CLOCK["sqlite"]

    def connected(self: SQLiteDriver, *, busy_s: float | None = None) -> sqlite3.Connection:
        conn = connect(self, busy_s=busy_s)
        conn.create_function("proof_wrong_ms", 0, lambda: clock.wrong_ms)
        return conn

    def put(way: Callable[..., sqlite3.Connection], text: str) -> None:
        SQLiteDriver.connect = way  # type: ignore[method-assign]
        statements.CLOCK["sqlite"] = text
        statements.spell.cache_clear()

    put(connected, before.replace("* 86400000.0)", "* 86400000.0) + proof_wrong_ms()"))
    return lambda: put(connect, before)


@contextmanager
def followed(path: Path) -> Iterator[Clock]:
    """Follow a clock here for a while."""
    undo = follow(path)
    try:
        yield Clock(path)
    finally:
        undo()
