"""The write-ahead log of a SQLite file: how far it is written, and whose turn it is to write it into the file.

A log that has been written into the file begins anew, over what it held before. A file that keeps its length has only
data to sync at a commit; one that was cut to nothing and grows again has its new length to note each time, which takes
twice as long. So a file that is new grows by many commits at a time, filled with zeros: no frame begins with such.
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
MOST_KEPT_BYTES = 4 * CHECKPOINT_BYTES  # of a log that had to grow longer, for a reader that stayed, the file is cut
# A checkpoint waits for readers while it holds off writers, so it must give up before they do (see decisions). It waits
# for those that it finds, and then for those that came meanwhile.
CHECKPOINT_SECONDS = 4.8
LOOK_SECONDS = 0.0005

ROOM_BYTES, LITTLE_ROOM_BYTES = 256 * 1024, 32 * 1024  # by which the file grows, and with how much left

HEADER_BYTES, FRAME_HEADER_BYTES = 32, 24
MAGIC = (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")  # by which a log begins


class Log:
    """The log of a file that is open. One process at a time checkpoints it, and the others let it.

    That is a lock on the log, on which SQLite has none: SQLite's own waiting would seldom get the lock that writers
    take again and again. Who holds this one whole is at work, who shares it rests after it has held up writers in vain.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._checkpointer, self._writer = _held(path), _held(path)

    def close(self) -> None:
        """Let go of the log."""
        for descriptor in (self._checkpointer, self._writer):
            if descriptor is not None:
                os.close(descriptor)

    def renew(self) -> None:
        """Take hold of the log that is there now: who closed the file as the last one has removed the one before."""
        for held in (self._checkpointer, self._writer):
            found = _held(self._path)
            if found is not None:
                if held is not None:
                    os.dup2(found, held, inheritable=False)  # under its old number, which other threads may be using
                os.close(found)

    def is_long(self) -> bool:
        """Tell whether so much was written since the log began anew that it is to be checkpointed."""
        return is_long(self._path) if self._writer is None else _is_long(self._writer)

    def make_room(self) -> None:
        """Make the file longer if the log will soon be as long. Only for who holds SQLite's lock of writers.

        Nobody else writes to the log then, and behind the end of the file nothing stands that could be lost.
        """
        if self._writer is None:
            return
        size = _file_bytes(self._writer)
        if size < CHECKPOINT_BYTES and (size < ROOM_BYTES or self._has_little_room(size)):
            with suppress(OSError):  # a full disk, say: it is SQLite that has to tell
                _append_zeros(self._path, ROOM_BYTES, onto=os.fstat(self._writer))

    def _has_little_room(self, size: int) -> bool:
        assert self._writer is not None
        header = _read(self._writer, HEADER_BYTES, 0)
        return _is_of_now(self._writer, (size - LITTLE_ROOM_BYTES) // _frame_bytes(header), header)

    def is_worth_keeping(self) -> bool:
        """Tell whether the file is to keep its length when the log begins anew."""
        found = os.stat(self._path) if self._writer is None else os.fstat(self._writer)
        return found.st_size <= MOST_KEPT_BYTES

    @contextmanager
    def mine(self) -> Iterator[bool]:
        """Take the turn to checkpoint. False: another is at it, or rests."""
        took = _lock(self._checkpointer, whole=True)
        try:
            yield took
        finally:
            _unlock(self._checkpointer)

    def rest(self) -> None:
        """Keep the turn, and let writers go on."""
        _unlock(self._checkpointer)
        _lock(self._checkpointer, whole=False)

    def is_taken(self) -> bool:
        """Say whether another process is at work."""
        free = _lock(self._writer, whole=False)
        _unlock(self._writer)
        return not free

    def stand_back(self) -> None:
        """Wait while another checkpoints, as long as that may take."""
        give_up_at = time.monotonic() + CHECKPOINT_SECONDS
        while not _lock(self._writer, whole=False) and time.monotonic() < give_up_at:
            time.sleep(LOOK_SECONDS)
        _unlock(self._writer)


def is_long(path: str) -> bool:
    """Tell of any log whether it is to be checkpointed."""
    with _opened(path) as log:
        return log is not None and _is_long(log)


def length(path: str) -> int:
    """Say how many bytes of a log were written since it began anew. Its file may be longer."""
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
    """Look whether a frame was written since the log began anew.

    All such frames have the salt of the header, which is another one each time. What lies behind them is older.
    """
    if header[:4] not in MAGIC:  # zeros, in which no log has begun
        return False
    frame = _read(log, FRAME_HEADER_BYTES, HEADER_BYTES + number * _frame_bytes(header))
    return bool(frame) and frame[8:16] == header[16:24]


def _file_bytes(log: int) -> int:
    """Say how long the file is, without asking for its times.

    Linux notes the next write after such a question to the nanosecond, which the sync of every commit would pay for.
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
    except OSError:  # closed meanwhile; of a disk that cannot be read SQLite tells
        return b""


def _append_zeros(path: str, count: int, *, onto: os.stat_result) -> None:
    log = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        if os.path.samestat(os.fstat(log), onto):  # not if another file was put in its place
            os.write(log, bytes(count))
    finally:
        os.close(log)


def _held(path: str) -> int | None:
    """Open a log to keep it open. On Windows nobody could remove it then, and there is no lock to take on it."""
    return None if sys.platform == "win32" else _descriptor(path)


def _descriptor(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except OSError:  # a file system without shared memory has no log: there SQLite's own locks must do
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
