"""What SQLite asks of a disk: recorded while duly's own driver runs, and played back to where a crash cut it short.

The driver is the product's, with its pragmas, its writer and its transactions; only `sqlite3.connect` is another: it
opens the file through a library that lets us stand between SQLite and the disk. SQLite's random numbers follow from a
seed, so that a recording can be made again.

Import this in a process of its own: it brings a second SQLite library along.
"""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import apsw

from duly.store.sqlite import checkpoint
from duly.store.sqlite import connection as sqlite
from tests.proof.disk import Event

LIBRARY = apsw.sqlite_lib_version()
BELOW = "unix"  # what really keeps the bytes meanwhile


class Recorder(apsw.VFS):
    """Passes everything on to the real disk and writes down what changes something there."""

    def __init__(self, seed: int) -> None:
        self.name = f"recorder-{os.getpid()}"
        self.log: list[Event] = []
        self._chance = random.Random(seed)
        # SQLite takes its seed from the default one.
        super().__init__(self.name, BELOW, makedefault=True)
        apsw.randomness(0)

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        """Open a file that is written down, unless it has no name and so dies with its process."""
        return apsw.VFSFile(BELOW, name, flags) if name is None else _Recorded(self.log, name, flags)

    def xDelete(self, name: str, sync: bool) -> None:
        """Delete a file. Where SQLite does not wait for the folder, it does not mind if the file comes back."""
        super().xDelete(name, sync)
        self.log.append(Event("delete", os.path.basename(name), int(sync)))

    def xRandomness(self, count: int) -> bytes:
        """Give what SQLite seeds its random numbers with."""
        return self._chance.randbytes(count)

    def connect(self, path: Any, *, timeout: float, cached_statements: int, **_: Any) -> apsw.Connection:
        """Open a connection the way `sqlite3.connect` does."""
        conn = apsw.Connection(os.fspath(path), vfs=self.name, statementcachesize=cached_statements)
        conn.set_busy_timeout(int(timeout * 1000))
        conn.create_scalar_function("randomblob", lambda *count: self._chance.randbytes(*count), 1)
        conn.create_scalar_function("random", lambda *_: self._chance.randrange(-(2**63), 2**63), 0)
        return conn


class _Recorded(apsw.VFSFile):
    """A file whose changes are written down, after they have happened."""

    def __init__(self, log: list[Event], name: Any, flags: list[int]) -> None:
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        self._log = log
        self._name = os.path.basename(path)
        super().__init__(BELOW, name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:
        super().xWrite(data, offset)
        self._log.append(Event("write", self._name, offset, bytes(data)))

    def xTruncate(self, size: int) -> None:
        super().xTruncate(size)
        self._log.append(Event("truncate", self._name, size))

    def xSync(self, flags: int) -> None:
        super().xSync(flags)
        self._log.append(Event("sync", self._name))


class _Library:
    """Stands in for the module `sqlite3` in the driver's eyes."""

    def __init__(self, recorder: Recorder) -> None:
        self.connect = recorder.connect

    def __getattr__(self, name: str) -> Any:
        return getattr(sqlite3, name)


@contextmanager
def recording(seed: int) -> Iterator[list[Event]]:
    """Write down what the driver's connections do to the disk from here on."""
    recorder = Recorder(seed)
    store: Any = sqlite
    store.sqlite3 = _Library(recorder)
    append = checkpoint._append_zeros

    def appended(path: str, count: int, *, onto: os.stat_result) -> None:
        """Write down what is written past SQLite."""
        recorder.log.append(Event("write", os.path.basename(path), os.stat(path).st_size, bytes(count)))
        append(path, count, onto=onto)

    checkpoint._append_zeros = appended
    try:
        yield recorder.log
    finally:
        checkpoint._append_zeros = append
        store.sqlite3 = sqlite3
        recorder.unregister()
