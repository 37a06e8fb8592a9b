"""Wakes up workers across processes on PostgreSQL: LISTEN, and an advisory lock that shows whether a worker is idle.

NOTIFY takes a lock of the whole server at commit, so it is sent only while a worker is idle. An idle worker holds a
shared advisory lock on the connection on which it listens. A process that has made a job ready tries to take the same
lock after its commit, and notifies if it cannot.

A lone enqueue avoids this second message. It tries to take another lock of idle workers while it adds its job, and
holds it until its commit. A worker that becomes idle meanwhile waits for the commit, and then sees the job. If the
lock is taken, because a worker is idle or another job is being added, the enqueue tries the first one after its commit.
"""

from __future__ import annotations

import logging
import random
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

from duly.store.driver import Driver, Pace, Watch

log = logging.getLogger("duly.store.postgres")

PARKED = -(0x64756C79 << 32)  # "duly"; tokens and the locks of migrations are elsewhere
ADDING = PARKED + 1  # another one, so that an enqueue in flight is not taken for an idle worker after a commit
PARK = f"listen duly; select pg_advisory_lock_shared({PARKED})"
# A separate transaction, so that notifications arrive while it waits; short, so that the thread can be stopped.
SETTLE = f"select set_config('lock_timeout', '100ms', true), pg_advisory_lock_shared({ADDING})"
IN_THE_WAY = ("55P03", "57014")  # the codes of a lock timeout and of a statement timeout
UNSETTLE = f"select pg_advisory_unlock_shared({ADDING})"
LEAVE = f"unlisten duly; select pg_advisory_unlock_shared({PARKED})"
# The end of a statement that adds one job and commits at once.
ALL_AWAKE = f"returning pg_try_advisory_xact_lock({ADDING})"
# A separate statement after the commit. It must not wait, neither for the disk nor for other notifications.
HINT = (
    "select set_config('synchronous_commit', 'off', true), set_config('lock_timeout', '100ms', true), "
    f"pg_notify('duly', '') where not pg_try_advisory_xact_lock({PARKED})"
)
ARM_SECONDS = 0.1
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 2.0


class Host(Protocol):
    """The part of the driver that listeners use."""

    where: str

    def listening(self) -> AbstractContextManager[Any]:
        """Open a connection to listen on, which takes one place of the pool."""


class ListenWatch(Watch):
    """Calls back at every notification of another process while armed."""

    def __init__(self, driver: Driver, on_change: Callable[[], None], host: Host) -> None:
        super().__init__(driver, on_change)
        self._host = host
        self._lock = threading.Lock()
        self._listener: _Listener | None = None

    def arm(self, *, fruitful: bool = False) -> None:
        """Start to listen. Return when notifications arrive, or when that is not possible for now."""
        with self._lock:
            if self._closed:
                return
            if self._listener is None:
                self._listener = _Listener(self._host, self.tell)
            listener = self._listener
        listener.park(fruitful=fruitful)

    def rearm(self, *, fruitful: bool = False) -> bool:
        """Return whether it is still armed, so that no notification was missed."""
        with self._lock:
            listener = self._listener
        return listener is not None and listener.is_parked(fruitful=fruitful)

    def disarm(self) -> None:
        """Stop calling back for other processes."""
        with self._lock:
            listener = self._listener
        if listener is not None:
            listener.leave()

    def rest(self, *, wait: bool = True) -> bool:
        """End the thread and close the connection. Without `wait`, both happen later."""
        with self._lock:
            listener, self._listener = self._listener, None
        return listener is not None and listener.stop(wait=wait)

    def abandon(self) -> None:
        """Drop the connection without closing it: the parent listens on it."""
        self._lock = threading.Lock()
        self._listener = None


class _Listener:
    """A connection with its own thread, which sleeps until a notification or a request arrives."""

    def __init__(self, host: Host, tell: Callable[[], None]) -> None:
        self._host = host
        self._tell = tell
        self._pace = Pace()
        self._lock = threading.Lock()
        self._wanted = False
        self._settled = threading.Event()  # the locks are as wanted
        self._lost = False
        self._missed = False  # a notification may have been missed, so call back
        self._late = False  # the locks take long: the next caller does not wait for them
        self._stopping = threading.Event()
        self._bell, self._button = socket.socketpair()
        self._bell.setblocking(False)
        self._button.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="duly-listen", daemon=True)
        self._thread.start()

    def park(self, *, fruitful: bool) -> None:
        """Take the locks; wait only briefly, and not at all without a connection."""
        if self.is_parked(fruitful=fruitful):
            return
        self._want(True)
        if not self._lost and (self._late or not self._settled.wait(ARM_SECONDS)):
            self._late = self._missed = True
            self._ring()

    def is_parked(self, *, fruitful: bool) -> bool:
        """Return whether the locks are held. True without a connection too: a call follows once there is one."""
        if fruitful:
            self._pace.fruitful()
        return self._wanted and (self._lost or self._settled.is_set())

    def leave(self) -> None:
        """Release the locks."""
        if self._wanted:
            self._want(False)

    def stop(self, *, wait: bool = True) -> bool:
        """End the thread: later without `wait`, or if called by the thread itself. Return whether it was parked."""
        self._stopping.set()
        self._ring()
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()
        return self._wanted

    def _want(self, wanted: bool) -> None:
        with self._lock:
            self._wanted = wanted
            self._settled.clear()
        self._ring()

    def _ring(self) -> None:
        with suppress(OSError):  # it is full and will be read, or the thread has ended
            self._button.send(b"!")

    def _run(self) -> None:
        pause = FIRST_PAUSE
        try:
            while not self._stopping.is_set():
                try:
                    with self._host.listening() as conn:
                        self._lost, pause = False, FIRST_PAUSE
                        self._listen(conn)
                except Exception as error:
                    self._has_lost(error)
                    self._stopping.wait(pause * (0.5 + random.random()))  # noqa: S311
                    pause = min(pause * 2, LONGEST_PAUSE)
        finally:
            self._bell.close()
            self._button.close()

    def _has_lost(self, error: Exception) -> None:
        if not self._lost:
            log.warning("postgres.listen_lost", extra={"where": self._host.where, "error": str(error)})
        self._lost = self._missed = True
        self._settled.set()

    def _listen(self, conn: Any) -> None:
        conn.add_notify_handler(self._notified)
        parked = False
        with selectors.DefaultSelector() as anything, selectors.DefaultSelector() as bell:
            anything.register(conn.fileno(), selectors.EVENT_READ)
            for selector in (anything, bell):
                selector.register(self._bell, selectors.EVENT_READ)
            while not self._stopping.is_set():
                parked = self._settle(conn, parked)
                if self._missed and parked:
                    if bell.select(self._pace.pause()):
                        self._drain()
                        continue
                    self._missed = False
                    self._pace.called()
                    self._tell()
                anything.select()
                self._drain()
                conn.pgconn.consume_input()
                while conn.pgconn.notifies():
                    self._missed = True

    def _settle(self, conn: Any, parked: bool) -> bool:
        while True:
            with self._lock:
                wanted = self._wanted
                if parked == wanted:
                    self._late = False
                    self._settled.set()
                    return parked
            if wanted and not self._park(conn):
                return False
            if not wanted:
                conn.execute(UNSETTLE)
                conn.execute(LEAVE)
            parked = wanted

    def _park(self, conn: Any) -> bool:
        """Take both locks, after jobs that are being added have committed. False: they are not wanted any more."""
        conn.execute(PARK)
        late = False
        while self._wanted and not self._stopping.is_set():
            try:
                conn.execute(SETTLE)
                self._missed = self._missed or late  # jobs that were committed since the last claim
                return True
            except Exception as error:
                if getattr(error, "sqlstate", None) not in IN_THE_WAY:
                    raise
            late = True
            if self._missed:
                self._missed = False
                self._tell()
        conn.execute(LEAVE)
        return False

    def _notified(self, _: object) -> None:
        self._missed = True

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            self._bell.recv(4096)
