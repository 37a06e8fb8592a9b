"""A few connections, opened when needed and handed out one by one, first come first served.

A connection is opened in the thread that needs one, so that the caller gets the error at once, with its reason.
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
from psycopg import Connection

from duly.store.postgres.connection import PooledConnection

IDLE_SECONDS = 60.0
LEND_SECONDS = 1.0


class Pool:
    """A few connections, opened when needed and handed out one by one."""

    def __init__(self, connect: Callable[[], PooledConnection], size: int, hung_up: Callable[[], None]) -> None:
        self._connect = connect
        self._hung_up = hung_up
        self._size = size
        self._taken = 0
        self._freed = threading.Condition()
        self._line: deque[object] = deque()  # who comes first is served first: nobody takes the place he just left
        self._idle: deque[tuple[float, PooledConnection]] = deque()

    def connection(self, *, checked: bool = False) -> Loan:
        """Hand out a connection for a while; `checked` has it looked at first."""
        return Loan(self, checked)

    def take(self, *, checked: bool) -> PooledConnection:
        """Take a connection, when there is a place for one."""
        self._take_place()
        try:
            return self._take(checked)
        except BaseException:
            self._leave_place()
            raise

    def give_back(self, conn: PooledConnection, error: BaseException | None) -> None:
        """Take a connection back from who had it, and the place that it had."""
        try:
            if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
                self.close()  # a restarted server has closed the others too
            if conn.reusable and self._taken <= self._size:
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
        """Do with one place less while a connection of another kind is open. The last place is never lent."""
        with self._freed:
            lent = self._size > 1
            self._size -= lent
            # They may all be at work.
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
            fresh = conn.hear_out() and not checked and time.monotonic() - since < IDLE_SECONDS
            if fresh or _alive(conn):
                return conn
            conn.close()
            self._hung_up()
        return self._connect()

    def close(self) -> None:
        """Close every connection that nobody has."""
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
    """The time for which somebody has a connection. By hand, because every operation has one."""

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
