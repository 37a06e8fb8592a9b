"""A small pool of connections, opened when needed, first come first served.

A connection is opened in the thread that needs it, so the caller gets the error at once, with its reason.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import psycopg
from psycopg import Connection, errors

from duly.store.postgres.connection import PooledConnection
from duly.store.postgres.translate import is_read_only

IDLE_SECONDS = 60.0
LEND_SECONDS = 1.0


class Pool:
    """A few connections, opened when needed and used by one caller at a time."""

    def __init__(self, connect: Callable[[], PooledConnection], size: int, on_closed: Callable[[], None]) -> None:
        self._connect = connect
        self._on_closed = on_closed
        self._size = size
        self._taken = 0
        self._freed = threading.Condition()
        self._line: deque[object] = deque()  # first come, first served, also after leaving a place
        self._idle: deque[tuple[float, PooledConnection]] = deque()

    def connection(self, *, checked: bool = False) -> Loan:
        """Return a context that has a connection; `checked` tests it first."""
        return Loan(self, checked)

    def take(self, *, checked: bool) -> PooledConnection:
        """Take a connection when a place is free."""
        self._take_place()
        try:
            return self._take(checked)
        except BaseException:
            self._leave_place()
            raise

    def give_back(self, conn: PooledConnection, error: BaseException | None) -> None:
        """Return a connection and its place to the pool."""
        try:
            useless = is_read_only(error) or isinstance(error, errors.InvalidSqlStatementName)
            if useless or isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
                self.close()  # the others are to the same server
            if conn.reusable and self._taken <= self._size and not useless:
                self._idle.append((time.monotonic(), conn))
            else:
                conn.close()
        finally:
            self._leave_place()

    def _take_place(self) -> None:
        with self._freed:
            if self._line or self._taken >= self._size:
                self._stand_in_line()
            self._taken += 1

    def _stand_in_line(self) -> None:
        ticket = object()
        self._line.append(ticket)
        try:
            self._freed.wait_for(lambda: self._line[0] is ticket and self._taken < self._size)
        finally:
            self._line.remove(ticket)
            self._freed.notify_all()

    def _leave_place(self) -> None:
        with self._freed:
            self._taken -= 1
            self._freed.notify_all()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Reserve a place for a connection of another kind. The last place is never reserved."""
        with self._freed:
            lent = self._size > 1
            self._size -= lent
            # All may be in use.
            self._freed.wait_for(lambda: self._taken <= self._size, LEND_SECONDS)
        while len(self._idle) + self._taken > self._size:
            for _, conn in self._drained():
                conn.close()
                break
            else:
                break
        try:
            yield
        finally:
            with self._freed:
                self._size += lent
                self._freed.notify_all()

    def _take(self, checked: bool) -> PooledConnection:
        for since, conn in self._drained():
            fresh = conn.finish_hint() and not checked and time.monotonic() - since < IDLE_SECONDS
            if fresh or _alive(conn):
                return conn
            conn.close()
            self._on_closed()
        return self._connect()

    def close(self) -> None:
        """Close the idle connections."""
        for _, conn in self._drained():
            conn.close()

    def _drained(self) -> Iterator[tuple[float, PooledConnection]]:
        """Take idle connections out one by one; other threads may be taking them too."""
        while True:
            try:
                yield self._idle.pop()
            except IndexError:
                return


class Loan:
    """The context in which a caller has a connection. A class, because every operation makes one."""

    __slots__ = ("_checked", "_conn", "_pool")

    def __init__(self, pool: Pool, checked: bool) -> None:
        self._pool = pool
        self._checked = checked

    def __enter__(self) -> PooledConnection:
        self._conn = self._pool.take(checked=self._checked)
        return self._conn

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.give_back(self._conn, error)


def _alive(conn: Connection[Any]) -> bool:
    try:
        conn.execute("select 1")
    except psycopg.Error:
        return False
    return True
