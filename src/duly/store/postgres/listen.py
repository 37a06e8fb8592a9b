"""Wake-ups across processes on PostgreSQL: LISTEN, and a flag that says that somebody listens.

NOTIFY takes a lock of the whole server when it commits, so it is sent only while somebody sleeps. Who sleeps holds an
advisory lock, shared, on the connection it listens on; who has made a job ready tries to get the same lock after its
commit, and notifies if it cannot.

A lone enqueue spares itself that second message: it tries for another lock of those who sleep while it adds its job,
and has it until its commit. Who falls asleep meanwhile waits for that, and then sees the job. Where it cannot have the
lock, because somebody sleeps or adds a job too, it asks after its commit like everybody else.
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
ADDING = PARKED + 1  # another, so that of those who ask after their commit none takes who adds for one who sleeps
PARK = f"listen duly; select pg_advisory_lock_shared({PARKED})"
# A transaction of its own, so that we listen while we wait for it, and not for long: we may be wanted elsewhere.
SETTLE = f"select set_config('lock_timeout', '100ms', true), pg_advisory_lock_shared({ADDING})"
IN_THE_WAY = ("55P03", "57014")  # what PostgreSQL says when we, or it, have waited long enough
UNSETTLE = f"select pg_advisory_unlock_shared({ADDING})"
LEAVE = f"unlisten duly; select pg_advisory_unlock_shared({PARKED})"
# Behind a statement that adds one job, and only where its commit follows at once.
ALL_AWAKE = f"returning pg_try_advisory_xact_lock({ADDING})"
# A statement of its own, after the commit. It may not wait: neither for the disk nor for others that notify.
HINT = (
    "select set_config('synchronous_commit', 'off', true), set_config('lock_timeout', '100ms', true), "
    f"pg_notify('duly', '') where not pg_try_advisory_xact_lock({PARKED})"
)
ARM_SECONDS = 0.1
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 2.0


class Host(Protocol):
    """What the driver gives its listeners."""

    where: str

    def listening(self) -> AbstractContextManager[Any]:
        """Open a connection to listen on, which takes one place of the pool's."""


class ListenWatch(Watch):
    """Calls back while armed, as often as another process notifies."""

    def __init__(self, driver: Driver, on_change: Callable[[], None], host: Host) -> None:
        super().__init__(driver, on_change)
        self._host = host
        self._lock = threading.Lock()
        self._listener: _Listener | None = None

    def arm(self, *, fruitful: bool = False) -> None:
        """Return when notifications will be heard, or cannot be for now. Armed already, it does nothing."""
        with self._lock:
            if self._closed:
                return
            if self._listener is None:
                self._listener = _Listener(self._host, self.tell)
            listener = self._listener
        listener.park(fruitful=fruitful)

    def rearm(self, *, fruitful: bool = False) -> bool:
        """Say whether it has stayed armed, so that nothing was missed."""
        with self._lock:
            listener = self._listener
        return listener is not None and listener.is_parked(fruitful=fruitful)

    def disarm(self) -> None:
        """Hear no more of other processes."""
        with self._lock:
            listener = self._listener
        if listener is not None:
            listener.leave()

    def rest(self) -> bool:
        """End the thread and close the connection."""
        with self._lock:
            listener, self._listener = self._listener, None
        return listener is not None and listener.stop()

    def abandon(self) -> None:
        """Forget the connection without closing it: the parent listens on it."""
        self._lock = threading.Lock()
        self._listener = None


class _Listener:
    """A connection on a thread of its own, which sleeps until it is notified, or told what is wanted."""

    def __init__(self, host: Host, tell: Callable[[], None]) -> None:
        self._host = host
        self._tell = tell
        self._pace = Pace()
        self._lock = threading.Lock()
        self._wanted = False
        self._settled = threading.Event()  # all is as wanted
        self._lost = False
        self._missed = False  # something may have been, so call
        self._late = False  # it takes long to be as wanted: who wants it so does not wait again
        self._stopping = threading.Event()
        self._bell, self._button = socket.socketpair()
        self._bell.setblocking(False)
        self._button.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="duly-listen", daemon=True)
        self._thread.start()

    def park(self, *, fruitful: bool) -> None:
        """Hold the flag; wait for that only a moment, and not at all while there is no connection."""
        if self.is_parked(fruitful=fruitful):
            return
        self._want(True)
        if not self._lost and (self._late or not self._settled.wait(ARM_SECONDS)):
            self._late = self._missed = True
            self._ring()

    def is_parked(self, *, fruitful: bool) -> bool:
        """Say whether the flag is held, or cannot be for now and a call will follow when it can."""
        if fruitful:
            self._pace.fruitful()
        return self._wanted and (self._lost or self._settled.is_set())

    def leave(self) -> None:
        """Hold the flag no more."""
        if self._wanted:
            self._want(False)

    def stop(self) -> bool:
        """End the thread, unless this is the thread itself, which then ends after this. Tells whether it was wanted."""
        self._stopping.set()
        self._ring()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        return self._wanted

    def _want(self, wanted: bool) -> None:
        with self._lock:
            self._wanted = wanted
            self._settled.clear()
        self._ring()

    def _ring(self) -> None:
        with suppress(OSError):  # it is full and will be heard, or the thread has ended
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
        conn.add_notify_handler(self._hear)
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
        """Hold both locks, when those who are adding a job have committed. False: it is wanted no more."""
        conn.execute(PARK)
        late = False
        while self._wanted and not self._stopping.is_set():
            try:
                conn.execute(SETTLE)
                self._missed = self._missed or late  # what was committed since we looked last
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

    def _hear(self, _: object) -> None:
        self._missed = True

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            self._bell.recv(4096)
