"""Wakes up workers across processes on one file: the kernel reports a write, the database its commit.

Linux reports writes to the WAL (inotify). The commit is visible a little later, so a short spin on the database's
change counter follows. Without inotify the counter is polled, less and less often. Unarmed watches cost nothing.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Protocol

from duly.store.driver import Driver, Pace, Watch

IN_MODIFY, IN_ONESHOT = 0x2, 0x80000000
# Between the write and the commit is the sync of the disk. After `GIVE_UP` seconds the watch calls back anyway.
SPIN, SPIN_FOR, SLOWEST, GIVE_UP = 0.0002, 0.005, 0.02, 1.0
SELECTABLE = 0.001  # the shortest timeout of epoll in Python
BLIND_FIRST, BLIND_SLOWEST, BLIND_GROWTH = 0.001, 0.05, 1.25


class Sight(Protocol):
    """A connection of the watch, which only reads."""

    def version(self) -> int | None:
        """Read the counter that every commit of another connection changes. None: it cannot be read."""

    def is_stale(self) -> bool:
        """Return whether the file was replaced by another."""

    def close(self) -> None:
        """Close the connection."""


class FileWatch(Watch):
    """Calls back once after each arming, when another connection has committed."""

    def __init__(
        self,
        driver: Driver,
        on_change: Callable[[], None],
        *,
        wal: str,
        look: Callable[[], Sight | None],
        opening: Callable[[], AbstractContextManager[object]],
    ) -> None:
        super().__init__(driver, on_change)
        self._wal = wal
        self._look = look
        self._opening = opening  # holds off a fork while the file is opened
        self._pace = Pace()
        self._lock = threading.Lock()
        self._armed = False
        self._sight: Sight | None = None
        self._seen: int | None = None
        self._quiet = False  # no write has begun since the last call
        self._thread: _Thread | None = None

    def arm(self, *, fruitful: bool = False) -> None:
        """Call back at the next commit of another connection from now on."""
        if fruitful:
            self._pace.fruitful()
        if self._armed or self._closed:
            return
        with self._lock:
            if self._is_open():
                self._arm()
                return
        with self._opening(), self._lock:
            if not self._is_open() and not self._closed:
                self._open()
            self._arm()

    def rearm(self, *, fruitful: bool = False) -> bool:
        """Arm after a call. Return whether no other connection has committed or begun to write since."""
        if fruitful:
            self._pace.fruitful()
        if self._armed or self._closed:
            return True
        if not self._lock.acquire(blocking=False):
            return False
        try:
            called_at, quiet = self._seen, self._quiet
            if not self._is_open():
                return False
            self._arm()
            return quiet and self._seen is not None and self._seen == called_at
        finally:
            self._lock.release()

    def disarm(self) -> None:
        """Stop calling back for other processes; at most one more write wakes the thread."""
        self._armed = self._quiet = False

    def rest(self) -> bool:
        """End the thread and close the connection."""
        with self._lock:
            was_armed, self._armed = self._armed, False
            thread, self._thread = self._thread, None
            self._close()
        if thread is not None:
            thread.stop()
        return was_armed

    def abandon(self) -> None:
        """Replace the lock, which a thread of the parent may hold; everything else was closed before the fork."""
        self._lock = threading.Lock()

    def _is_open(self) -> bool:
        return self._thread is not None and self._sight is not None and not self._sight.is_stale()

    def _open(self) -> None:
        self._close()
        self._sight = self._look()
        if self._sight is not None and self._thread is None:
            self._thread = _Thread(self._await_change)

    def _close(self) -> None:
        if self._sight is not None:
            self._sight.close()
            self._sight = None

    def _arm(self) -> None:
        thread, sight = self._thread, self._sight
        if thread is None or sight is None:
            return  # the worker polls
        reported = thread.watch_once(self._wal)
        self._seen = sight.version()
        self._armed = True
        if not reported:
            thread.ring()

    def _await_change(self, reported: bool, thread: _Thread) -> None:
        """Wait for the commit after a write, or for any commit if writes are not reported; then call back."""
        with self._lock:  # wait for an arming in progress
            if not self._armed:  # the next arming reads the counter after this write
                self._quiet = False
                return
        thread.stopping.wait(self._pace.pause())
        began, pause = time.monotonic(), SPIN if reported else BLIND_FIRST
        while not thread.stopping.is_set():
            # The commit of the write may have been seen at arming; the next write starts the spin again.
            if not (reported and thread.watch_once(self._wal)):
                thread.stopping.wait(pause)
            elif thread.has_write_within(pause):
                began, pause = time.monotonic(), SPIN
            waited = time.monotonic() - began
            with self._lock:
                if not self._armed or thread.stopping.is_set():
                    return
                changed = self._has_changed() or (reported and waited > GIVE_UP)
                if changed:
                    # A present writer holds the lock that the next claim waits for; a later write is reported.
                    self._armed, self._quiet = False, thread.watch_once(self._wal) or not reported
            if changed:
                self._pace.called()
                self.tell()
                return
            if not reported:
                pause = min(pause * BLIND_GROWTH, BLIND_SLOWEST)
            elif waited > SPIN_FOR:
                pause = min(pause * 1.5, SLOWEST)

    def _has_changed(self) -> bool:
        before, self._seen = self._seen, None if self._sight is None else self._sight.version()
        return self._seen is None or self._seen != before


class _Thread:
    """A thread that sleeps until a write to the file is reported, or until `ring` if writes are not reported."""

    def __init__(self, awake: Callable[[bool, _Thread], None]) -> None:
        self._awake = awake
        self.stopping = threading.Event()
        self._rung = False
        self._inotify = Inotify.open()
        self._bell, self._button = socket.socketpair()
        self._bell.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        if self._inotify is not None:
            self._selector.register(self._inotify.fd, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="duly-watch", daemon=True)
        self._thread.start()

    def watch_once(self, path: str) -> bool:
        """Wake at the next write to `path`. False: writes are not reported."""
        return self._inotify is not None and self._inotify.watch_once(path)

    def has_write_within(self, seconds: float) -> bool:
        """Wait for a write, at most so long. Return whether one came."""
        if seconds < SELECTABLE:  # a selector would wait that long
            time.sleep(seconds)
            seconds = 0
        written = any(key.fileobj != self._bell for key, _ in self._selector.select(seconds))
        self._drain()
        return written

    def ring(self) -> None:
        """Wake now."""
        self._rung = True
        self._button.send(b"!")

    def stop(self) -> None:
        """End the thread, unless this is the thread itself, which then ends after this."""
        self.stopping.set()
        with suppress(OSError):  # it has ended already
            self._button.send(b"!")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self.stopping.is_set():
                self._selector.select()
                self._drain()
                rung, self._rung = self._rung, False
                self._awake(not rung, self)
        finally:
            self._selector.close()
            self._bell.close()
            self._button.close()
            if self._inotify is not None:
                self._inotify.close()

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            self._bell.recv(4096)
        if self._inotify is not None:
            self._inotify.drain()


class Inotify:
    """The three system calls of Linux that report changes to a file."""

    def __init__(self, libc: ctypes.CDLL) -> None:
        self._libc = libc
        self.fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1 failed")

    @classmethod
    def open(cls) -> Inotify | None:
        """Open an instance. None: the system has no inotify, or no instance left."""
        if sys.platform != "linux":
            return None
        try:
            return cls(ctypes.CDLL(None, use_errno=True))
        except (OSError, AttributeError):
            return None

    def watch_once(self, path: str) -> bool:
        """Make `fd` readable at the next write to `path`. False: no such file, or no watch left."""
        mask = ctypes.c_uint32(IN_MODIFY | IN_ONESHOT)
        return int(self._libc.inotify_add_watch(self.fd, os.fsencode(path), mask)) >= 0

    def drain(self) -> None:
        """Read all reports."""
        with suppress(BlockingIOError):
            os.read(self.fd, 65536)

    def close(self) -> None:
        """Close the instance."""
        os.close(self.fd)
