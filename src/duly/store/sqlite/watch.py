"""Wake-ups across processes on one file: the kernel tells of a write, the database of the commit.

Linux tells when somebody writes to the WAL (inotify), which comes before the commit can be seen: a short spin on the
database's own counter of changes follows. Where the kernel does not tell, the counter is polled, less and less often.
Nothing happens while nobody waits.
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
# From the write to the commit lies the sync of the disk. After `GIVE_UP` the call is made anyhow.
SPIN, SPIN_FOR, SLOWEST, GIVE_UP = 0.0002, 0.005, 0.02, 1.0
SELECTABLE = 0.001  # the shortest time that Python waits for with epoll
BLIND_FIRST, BLIND_SLOWEST, BLIND_GROWTH = 0.001, 0.05, 1.25


class Sight(Protocol):
    """A connection of the watch's own, which only looks."""

    def version(self) -> int | None:
        """Read the counter that every commit of another connection changes. None: it cannot be read."""

    def is_stale(self) -> bool:
        """Tell whether the file has been replaced by another."""

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
        self._opening = opening  # held while the file may be opened: not during a fork
        self._pace = Pace()
        self._lock = threading.Lock()
        self._armed = False
        self._sight: Sight | None = None
        self._seen: int | None = None
        self._quiet = False  # nobody has begun to write since the last call
        self._thread: _Thread | None = None

    def arm(self, *, fruitful: bool = False) -> None:
        """From the return on, have the next commit of another connection call back. Armed already, it does nothing."""
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
        """Arm at once after a call; says whether nobody has committed since that, or begun to write."""
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
        """Hear no more of other processes; at most one more write wakes the thread."""
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
        """Forget a lock that a thread of the parent's may hold; the rest was let go of before the fork."""
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
            return  # polling serves
        told = thread.watch_once(self._wal)
        self._seen = sight.version()
        self._armed = True
        if not told:
            thread.ring()

    def _await_change(self, told: bool, thread: _Thread) -> None:
        """Wait for the commit that follows a write, or for any while nothing tells of writes; then call back."""
        with self._lock:  # who is arming gets to its end
            if not self._armed:  # who arms again has not looked since this write
                self._quiet = False
                return
        thread.stopping.wait(self._pace.pause())
        began, pause = time.monotonic(), SPIN if told else BLIND_FIRST
        while not thread.stopping.is_set():
            # The write may have been one whose commit was seen at arming; the next one begins the spin anew.
            if not (told and thread.watch_once(self._wal)):
                thread.stopping.wait(pause)
            elif thread.hears_within(pause):
                began, pause = time.monotonic(), SPIN
            waited = time.monotonic() - began
            with self._lock:
                if not self._armed or thread.stopping.is_set():
                    return
                changed = self._has_changed() or (told and waited > GIVE_UP)
                if changed:
                    # Who is writing just now has the lock that the next claim waits for; who begins later is heard.
                    self._armed, self._quiet = False, thread.watch_once(self._wal) or not told
            if changed:
                self._pace.called()
                self.tell()
                return
            if not told:
                pause = min(pause * BLIND_GROWTH, BLIND_SLOWEST)
            elif waited > SPIN_FOR:
                pause = min(pause * 1.5, SLOWEST)

    def _has_changed(self) -> bool:
        before, self._seen = self._seen, None if self._sight is None else self._sight.version()
        return self._seen is None or self._seen != before


class _Thread:
    """A thread that sleeps until somebody writes to the file, or rings where nobody would tell of that."""

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
        """Wake at the next write to `path`. False: nothing will tell of it."""
        return self._inotify is not None and self._inotify.watch_once(path)

    def hears_within(self, seconds: float) -> bool:
        """Wait so long, or until somebody writes; tells which."""
        if seconds < SELECTABLE:  # a selector would wait for as long as that
            time.sleep(seconds)
            seconds = 0
        heard = any(key.fileobj != self._bell for key, _ in self._selector.select(seconds))
        self._drain()
        return heard

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
    """The three calls of Linux that tell of changes to a file."""

    def __init__(self, libc: ctypes.CDLL) -> None:
        self._libc = libc
        self.fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1 failed")

    @classmethod
    def open(cls) -> Inotify | None:
        """Open one, or None where the system has none or no more to give."""
        if sys.platform != "linux":
            return None
        try:
            return cls(ctypes.CDLL(None, use_errno=True))
        except (OSError, AttributeError):
            return None

    def watch_once(self, path: str) -> bool:
        """Have the next write to `path` make `fd` readable. False: there is no such file, or no room."""
        mask = ctypes.c_uint32(IN_MODIFY | IN_ONESHOT)
        return int(self._libc.inotify_add_watch(self.fd, os.fsencode(path), mask)) >= 0

    def drain(self) -> None:
        """Read what there is."""
        with suppress(BlockingIOError):
            os.read(self.fd, 65536)

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)
