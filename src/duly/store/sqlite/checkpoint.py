"""The write-ahead log (WAL) of a SQLite file: its used length, and which process may checkpoint it.

After a checkpoint the log starts over and overwrites its old content. If the log file keeps its length, a commit syncs
only data. If it was truncated and grows again, each commit also syncs a new length, which takes twice as long. So a new
log file grows by many commits at a time, filled with zeros: no frame begins with zeros.
"""

from __future__ import annotations

import os
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager, suppress

if sys.platform != "win32":
    import fcntl

CHECKPOINT_BYTES = 16 * 1024 * 1024
MOST_KEPT_BYTES = 4 * CHECKPOINT_BYTES  # a log that grew longer, because of a long reader, is truncated
# A checkpoint waits for readers while it blocks writers, so it must time out before they do (see decisions). It waits
# for the readers that it finds, and then for those that came meanwhile.
CHECKPOINT_SECONDS = 4.8
LOOK_SECONDS = 0.0005

ROOM_BYTES, LITTLE_ROOM_BYTES = 256 * 1024, 32 * 1024  # the file grows by this, when so little is left

HEADER_BYTES, FRAME_HEADER_BYTES = 32, 24
MAGIC = (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")  # the first bytes of a log


class Log:
    """The log of an open file. One process at a time checkpoints it.

    A lock on the log file decides which; SQLite has no lock on it. SQLite's own waiting would rarely get the lock that
    writers take again and again. The exclusive lock is held during a checkpoint. A process that failed because of a
    reader rests with the shared lock, so that no process checkpoints again soon.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._checkpointer, self._writer = _held(path), _held(path)

    def close(self) -> None:
        """Close the log."""
        for descriptor in (self._checkpointer, self._writer):
            if descriptor is not None:
                os.close(descriptor)

    def renew(self) -> None:
        """Open the present log: the last process to close the file removed the one before."""
        for held in (self._checkpointer, self._writer):
            found = _held(self._path)
            if found is not None:
                if held is not None:
                    os.dup2(found, held, inheritable=False)  # with its old number, which other threads may be using
                os.close(found)

    def is_long(self) -> bool:
        """Return whether the log is long enough for a checkpoint."""
        return is_long(self._path) if self._writer is None else _is_long(self._writer)

    def make_room(self) -> None:
        """Extend the file before the log fills it. The caller must hold SQLite's write lock.

        Then no other process writes to the log, and appending overwrites nothing.
        """
        if self._writer is None:
            return
        size = _file_bytes(self._writer)
        if size < CHECKPOINT_BYTES and (size < ROOM_BYTES or self._has_little_room(size)):
            with suppress(OSError):  # a full disk, say: SQLite raises the error
                _append_zeros(self._path, ROOM_BYTES, onto=os.fstat(self._writer))

    def _has_little_room(self, size: int) -> bool:
        assert self._writer is not None
        header = _read(self._writer, HEADER_BYTES, 0)
        return _is_of_now(self._writer, (size - LITTLE_ROOM_BYTES) // _frame_bytes(header), header)

    def is_worth_keeping(self) -> bool:
        """Return whether the file keeps its length when the log starts over."""
        found = os.stat(self._path) if self._writer is None else os.fstat(self._writer)
        return found.st_size <= MOST_KEPT_BYTES

    @contextmanager
    def mine(self) -> Iterator[bool]:
        """Take the exclusive lock. False: another process checkpoints, or rests."""
        took = _lock(self._checkpointer, whole=True)
        try:
            yield took
        finally:
            _unlock(self._checkpointer)

    def rest(self) -> None:
        """Keep other processes from a checkpoint, but let writers continue."""
        _unlock(self._checkpointer)
        _lock(self._checkpointer, whole=False)

    def is_taken(self) -> bool:
        """Return whether another process checkpoints."""
        free = _lock(self._writer, whole=False)
        _unlock(self._writer)
        return not free

    def stand_back(self) -> None:
        """Wait for a checkpoint of another process, up to its time limit."""
        give_up_at = time.monotonic() + CHECKPOINT_SECONDS
        while not _lock(self._writer, whole=False) and time.monotonic() < give_up_at:
            time.sleep(LOOK_SECONDS)
        _unlock(self._writer)


def is_long(path: str) -> bool:
    """Return whether the log at `path` is long enough for a checkpoint."""
    with _opened(path) as log:
        return log is not None and _is_long(log)


def length(path: str) -> int:
    """Return the bytes of a log written since it started over. Its file may be longer."""
    with _opened(path) as log:
        return 0 if log is None else _length(log)


@contextmanager
def _opened(path: str) -> Iterator[int | None]:
    log = _descriptor(path)
    try:
        yield log
    finally:
        if log is not None:
            os.close(log)


def _is_long(log: int) -> bool:
    header = _read(log, HEADER_BYTES, 0)
    return _is_of_now(log, CHECKPOINT_BYTES // _frame_bytes(header), header)


def _length(log: int) -> int:
    header = _read(log, HEADER_BYTES, 0)
    numbers = range(_file_bytes(log) // _frame_bytes(header))
    frames = bisect_left(numbers, True, key=lambda number: not _is_of_now(log, number, header))
    return frames * _frame_bytes(header)


def _is_of_now(log: int, number: int, header: bytes) -> bool:
    """Return whether a frame was written since the log started over.

    Such frames have the salt of the header, which changes each time. The frames after them are older.
    """
    if header[:4] not in MAGIC:  # zeros: the log has not started
        return False
    frame = _read(log, FRAME_HEADER_BYTES, HEADER_BYTES + number * _frame_bytes(header))
    return bool(frame) and frame[8:16] == header[16:24]


def _file_bytes(log: int) -> int:
    """Return the length of the file, without reading its times.

    After a process reads them, Linux stores the time of the next write exactly, which slows down the sync of a commit.
    """
    return os.lseek(log, 0, os.SEEK_END)


def _frame_bytes(header: bytes) -> int:
    return FRAME_HEADER_BYTES + int.from_bytes(header[8:12], "big")


def _read(descriptor: int, count: int, place: int) -> bytes:
    try:
        if hasattr(os, "pread"):
            return os.pread(descriptor, count, place)
        os.lseek(descriptor, place, os.SEEK_SET)
        return os.read(descriptor, count)
    except OSError:  # closed meanwhile; for a disk that cannot be read, SQLite raises
        return b""


def _append_zeros(path: str, count: int, *, onto: os.stat_result) -> None:
    log = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        if os.path.samestat(os.fstat(log), onto):  # not if the file was replaced
            os.write(log, bytes(count))
    finally:
        os.close(log)


def _held(path: str) -> int | None:
    """Open a log to keep it open. Not on Windows: SQLite could not remove it, and it cannot be locked."""
    return None if sys.platform == "win32" else _descriptor(path)


def _descriptor(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except OSError:  # a file system without shared memory has no WAL: there SQLite's locks suffice
        return None


def _lock(descriptor: int | None, *, whole: bool) -> bool:
    if sys.platform == "win32" or descriptor is None:
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if whole else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(descriptor: int | None) -> None:
    if sys.platform != "win32" and descriptor is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
