"""The driver of a SQLite file: reads run on connections of their own, writes go through the one writer."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from duly.errors import AnswerLost, DulyError, StoreUnavailable
from duly.store import migrate, statements
from duly.store.driver import About, Driver, Finding, Hook, Point
from duly.store.group_commit import Answer, Outcome, Waiting, joined, rows_of
from duly.store.op import Op, Rows
from duly.store.sqlite import checkpoint, health
from duly.store.sqlite.connection import BUSY_SECONDS, data_version, open_connection, translate
from duly.store.sqlite.schema import read_meta
from duly.store.sqlite.watch import FileWatch
from duly.store.sqlite.writer import Writer

READERS = 4
WATCH_BUSY_SECONDS = 0.1

# Connections that a forked child inherited. Using or closing one in the child would drop the locks of the parent.
_abandoned: list[object] = []
_drivers: weakref.WeakSet[SQLiteDriver] = weakref.WeakSet()
_forking: list[SQLiteDriver] = []
_one_fork = threading.Lock()


class SQLiteDriver(Driver):
    """Runs operations on one SQLite file. Opens nothing and starts no thread before the first one."""

    one_writer = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durability: str = "full",
        network_ok: bool = False,
        busy_s: float = BUSY_SECONDS,
        hook: Hook | None = None,
    ) -> None:
        super().__init__(hook=hook)
        self.path = Path(path).absolute()
        self._resting: list[FileWatch] = []
        self._durability = durability
        self._network_ok = network_ok
        self.busy_s = busy_s
        self._reset()
        _drivers.add(self)

    @property
    def wal(self) -> str:
        """The path of the WAL: if the file is a link, SQLite puts it beside the target."""
        return f"{os.path.realpath(self.path)}-wal"

    def _reset(self) -> None:
        self._opening = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._writer: Writer | None = None
        self._readers: deque[sqlite3.Connection] = deque()
        self._reading = 0
        self._read_ended = threading.Condition()

    def execute(self, op: Op[Any]) -> Rows:
        """Run `op` once: a read on a separate connection, a write through the writer."""
        if not op.writes:
            return self._read(op)
        outcome = self._open().lead(op)
        if outcome is None:
            future = Answer()
            self._submit(Waiting(op, future))
            outcome = future.result()
        return rows_of(outcome)

    async def aexecute(self, op: Op[Any]) -> Rows:
        """Run `op` once, without blocking the event loop."""
        if not op.writes or self._writer is None:
            # Separate threads: handlers may occupy all threads of the event loop.
            if self._threads is None:
                self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="duly-sqlite")
            return await asyncio.get_running_loop().run_in_executor(self._threads, self.execute, op)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        self._submit(Waiting(op, future, loop))
        return rows_of(await future)

    def _submit(self, waiting: Waiting) -> None:
        while not self._open().submit(waiting):
            pass  # the file was closed meanwhile, such as for a fork: open it again

    def close(self) -> None:
        """Finish the submitted operations, then close the file. The next operation opens it again."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()
        with self._opening:
            self._close()
        self._resume_watches()

    def about(self) -> About:
        """Open the file, and return which one it is and how it is set."""
        with self._reader() as conn:
            try:
                schema = migrate.version(read_meta(conn))
            except sqlite3.Error as error:
                raise self.failed(error, "about") from error
        return About("SQLite", str(self.path), f"SQLite {sqlite3.sqlite_version}", str(schema), self._durability)

    def examine(self, *, deep: bool = False) -> list[Finding]:
        """Check the library, the file and the disk; `deep` runs SQLite's own check of the whole file."""
        access = health.access(self.path)
        if access.level == "error":
            return [access]
        with self._reader() as conn:
            try:
                return health.examine(conn, self.path, self.wal, deep=deep)
            except sqlite3.Error as error:
                raise self.failed(error, "examine") from error

    def _close(self) -> None:
        self._resting += [watch for watch in self._watches if isinstance(watch, FileWatch) and watch.rest()]
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.stop()
        with self._read_ended:
            readers, self._readers = self._readers, deque()
        for conn in readers:
            conn.close()

    def before_fork(self) -> None:
        """Close the file and keep it closed while this process forks.

        SQLite remembers per process which locks it holds. A child inherits this memory without the locks: the parent
        could then delete the WAL to which the child writes.
        """
        self._opening.acquire()
        self._close()
        with self._read_ended:
            self._read_ended.wait_for(lambda: self._reading == 0)

    def after_fork(self) -> None:
        """Let the file be opened again, in the parent."""
        self._opening.release()
        self._resume_watches()

    def _resume_watches(self) -> None:
        """Call back the watches that were armed, so that they claim and arm again."""
        resting, self._resting = self._resting, []
        for watch in resting:
            watch.tell()

    def mind_wal(self) -> None:
        """Checkpoint the WAL if it has grown, after a commit on a caller's connection."""
        if checkpoint.is_long(self.wal):
            self._open().mind_wal()

    def _watch(self, on_change: Callable[[], None]) -> FileWatch:
        return FileWatch(self, on_change, wal=self.wal, look=self._look, opening=self._opened)

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Keep the file open for the block; ignore errors of a file that cannot be used."""
        with suppress(DulyError):
            self._open()
        with self._opening:
            yield

    def _look(self) -> _Sight | None:
        """Open a connection for a watch. None: the file cannot be used; operations raise the error."""
        if self._writer is None:
            return None
        try:
            return _Sight(self.connect(busy_s=WATCH_BUSY_SECONDS), self.path)
        except (DulyError, OSError):
            return None

    def abandon(self) -> None:
        """Drop every handle without closing it, in a forked child."""
        self._abandon_watches()
        self._resting.clear()
        if self._writer is not None:
            _abandoned.append(self._writer)
        _abandoned.extend(self._readers)
        self._reset()

    def _open(self) -> Writer:
        writer = self._writer
        if writer is not None:
            return writer
        with self._opening:
            if self._writer is None:
                health.check_host(self.path, network_ok=self._network_ok)
                self._writer = Writer(self)
            return self._writer

    def _read(self, op: Op[Any]) -> Rows:
        with self._reader() as conn:
            try:
                return self.run_on(conn, op)
            except Exception as error:
                raise self.failed(error, op.name) from error

    def failed(self, error: Exception, op: str, *, committing: bool = False) -> Exception:
        """Translate an error, and count it if the file cannot be used."""
        failure = translate(error, op, self.path, committing=committing)
        if isinstance(failure, StoreUnavailable | AnswerLost):
            self.failures += 1
        return failure

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        self._open()
        with self._opening, self._read_ended:  # no read begins while the file is being closed
            readers = self._readers
            conn = readers.pop() if readers else None
            self._reading += 1
        try:
            conn = conn or self.connect()
            yield conn
        finally:
            with self._read_ended:
                if conn is not None and readers is self._readers:
                    readers.append(conn)
                elif conn is not None:
                    conn.close()
                self._reading -= 1
                self._read_ended.notify_all()

    def connect(self, *, busy_s: float | None = None) -> sqlite3.Connection:
        """Open a connection with the settings of duly."""
        busy_s = self.busy_s if busy_s is None else busy_s
        try:
            return open_connection(self.path, self._durability, busy_s)
        except sqlite3.Error as error:
            raise self.failed(error, "open") from error

    def run_all(self, conn: sqlite3.Connection, batch: Sequence[Op[Any]]) -> list[Rows]:
        """Run operations one by one; plain enqueues with equal terms as one, which has no rows."""
        if self.hook is not None or len(batch) == 1:
            return [self.run_on(conn, op) for op in batch]
        answers: list[Rows] = [[] for _ in batch]
        others, enqueues = joined(batch)
        for op in enqueues:
            self.run_on(conn, op)
        for place, op in others:
            answers[place] = self.run_on(conn, op)
        return answers

    def run_on(self, conn: sqlite3.Connection, op: Op[Any]) -> Rows:
        """Run the statements of `op` on a connection, in its open transaction if it has one."""
        rows: list[Any] = []
        hook = self.hook
        for section in op.sections:
            for number, statement in enumerate(statements.spell("sqlite", section, "named")):
                if hook is not None:
                    hook(Point("before", op.name, section, number))
                rows += conn.execute(statement.sql, op.params).fetchall()
                if hook is not None:
                    hook(Point("after", op.name, section, number))
        return rows


class _Sight:
    """The view of a watch on the file."""

    def __init__(self, conn: sqlite3.Connection, path: Path) -> None:
        self._conn = conn
        self._path = path
        self._file = self._identity()

    def version(self) -> int | None:
        """Read the counter that every commit of another connection changes. None: it cannot be read."""
        return data_version(self._conn)

    def is_stale(self) -> bool:
        """Return whether the file was replaced by another."""
        return self._file != self._identity()

    def close(self) -> None:
        """Close the connection."""
        self._conn.close()

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino


def _before_fork() -> None:
    _one_fork.acquire()
    _forking.extend(_drivers)
    for driver in _forking:
        driver.before_fork()


def _after_fork_in_parent() -> None:
    while _forking:
        _forking.pop().after_fork()
    _one_fork.release()


def _after_fork_in_child() -> None:
    for driver in list(_drivers):
        driver.abandon()
    _forking.clear()
    _one_fork.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
