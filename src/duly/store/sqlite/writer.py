"""The writer of a SQLite file: one connection and thread per process that commits, and one thread that checkpoints.

The writer runs the submitted operations in one transaction and one commit, then answers their callers. During a commit
the next batch gathers. So many callers share one sync, and none of them waits for a timer.

Checkpoints use RESTART, which blocks writers. The first commit after it starts the WAL over, and a checkpoint of
another program could race it. So the same thread makes this commit, before any other checkpoint can begin.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from duly.errors import DulyError
from duly.store.driver import Hook, Point
from duly.store.group_commit import Outcome, Waiting, answer
from duly.store.op import Op, Rows
from duly.store.sqlite import checkpoint
from duly.store.sqlite.connection import begin, closed_on_failure, is_busy
from duly.store.sqlite.schema import bring_up_to_date

log = logging.getLogger("duly.store.sqlite")

CHECKPOINT_REST_SECONDS = (5.0, 30.0)  # after a checkpoint that failed; doubled up to the second
MOST_AT_ONCE = 256
# Writes a page and changes nothing.
BEGIN_ANEW = "reindex duly_meta"


class File(Protocol):
    """The part of the driver that the writer uses."""

    path: Path
    busy_s: float
    hook: Hook | None

    @property
    def wal(self) -> str:
        """The path of the WAL."""

    def connect(self) -> sqlite3.Connection:
        """Open a connection with the settings of duly."""

    def run_all(self, conn: sqlite3.Connection, batch: Sequence[Op[Any]]) -> list[Rows]:
        """Run operations one by one."""

    def failed(self, error: Exception, op: str, *, committing: bool = False) -> Exception:
        """Translate an error, and count it if the file cannot be used."""


class Writer:
    """The connection of this process that writes, its thread, and the thread that checkpoints.

    A lone caller writes in its own thread, which saves two thread switches. Operations of other callers gather
    meanwhile and share the next commit.
    """

    def __init__(self, driver: File) -> None:
        self._driver = driver
        self._conn = self._connected()
        self._waiting: deque[Waiting] = deque()
        self._wake = threading.Condition()
        self._led = False  # a thread writes
        self._stopping = False
        self._broken = False
        self._stopped = threading.Event()
        self._checkpoint = threading.Event()
        self._log = checkpoint.Log(driver.wal)
        self._rest_s = CHECKPOINT_REST_SECONDS[0]
        # SQLite would separate them by polling: a commit would sleep on after the checkpoint has ended.
        self._one_at_a_time = threading.Lock()
        self._threads = [
            threading.Thread(target=target, name=f"duly-{name}", daemon=True)
            for name, target in (("writer", self._write), ("checkpoint", self._keep_wal_short))
        ]
        for thread in self._threads:
            thread.start()

    def lead(self, op: Op[Any]) -> Outcome | None:
        """Write in the thread of the caller. None: another thread writes, or waits to."""
        leads = False
        try:  # from the first moment on: an interrupted thread must not lead for ever
            with self._wake:
                if self._led or self._waiting or self._stopping:
                    return None
                self._led = leads = True
            [outcome] = self._serve([op])
        finally:
            if leads:
                self._hand_on()
        self.mind_wal()
        return outcome

    def submit(self, waiting: Waiting) -> bool:
        """Submit an operation; it is answered when it is durable. False: this writer is closing.

        Heartbeats come first: a lease must not wait in the queue.
        """
        with self._wake:
            if self._stopping:
                return False
            if waiting.op.urgent:
                self._waiting.appendleft(waiting)
            else:
                self._waiting.append(waiting)
            if len(self._waiting) == 1:  # later ones are taken with the first
                self._wake.notify()
        return True

    def stop(self) -> None:
        """Write the submitted operations, then end both threads and close."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._stopped.set()
        self._checkpoint.set()
        for thread in self._threads:
            thread.join()
        self._conn.close()
        self._log.close()

    def mind_wal(self) -> None:
        """Wake the checkpointer if the WAL has grown."""
        if self._log.is_long():
            self._checkpoint.set()

    def _write(self) -> None:
        while batch := self._take():
            # Operations that were cancelled before are left out; from here on they cannot be cancelled.
            wanted = [one for one in batch if not one.future.cancelled()]
            outcomes = self._serve([one.op for one in wanted])
            self._hand_on()
            answer(wanted, outcomes)
            self.mind_wal()

    def _take(self) -> list[Waiting]:
        with self._wake:
            self._wake.wait_for(lambda: not self._led and (self._waiting or self._stopping))
            self._led = True
            return [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST_AT_ONCE))]

    def _serve(self, batch: Sequence[Op[Any]]) -> Sequence[Outcome]:
        try:
            self._log.stand_back()
            with self._one_at_a_time:
                return self._commit(batch)
        except BaseException as error:  # whatever it is, no caller may wait for ever
            self._roll_back()
            return [error] * len(batch)

    def _hand_on(self) -> None:
        with self._wake:
            self._led = False
            if self._waiting or self._stopping:
                self._wake.notify()

    def _commit(self, batch: Sequence[Op[Any]]) -> Sequence[Outcome]:
        """Run a batch in one transaction; if that fails, one by one, so that only the one at fault fails."""
        if not batch:
            return []
        committing = False
        try:
            self._mend()
            self._begin()
            self._log.make_room()
            answers = self._driver.run_all(self._conn, batch)
            committing = True
            self._commit_with_hook(batch[0].name)
        except Exception as error:
            self._roll_back()
            if len(batch) > 1 and not committing and not is_busy(error):
                return [outcome for op in batch for outcome in self._commit([op])]
            return [self._failed(error, op, committing) for op in batch]
        return answers

    def _failed(self, error: Exception, op: Op[Any], committing: bool) -> Exception:
        failure = self._driver.failed(error, op.name, committing=committing)
        failure.__cause__ = error if failure is not error else None
        return failure

    def _mend(self) -> None:
        if self._broken:
            self._conn = self._connected()
            self._log.renew()
            self._broken = False

    def _connected(self) -> sqlite3.Connection:
        conn = self._driver.connect()
        with closed_on_failure(conn):
            bring_up_to_date(conn, self._driver.path, self._driver.busy_s)
            conn.execute("pragma busy_timeout = 0")  # `_begin` waits instead
        return conn

    def _begin(self) -> None:
        begin(self._conn, self._driver.busy_s, is_held_up=self._log.is_taken)

    def _commit_with_hook(self, op: str) -> None:
        hook = self._driver.hook
        if hook is not None:
            hook(Point("before", op, "commit", 0))
        self._conn.execute("commit")
        if hook is not None:
            hook(Point("after", op, "commit", 0))

    def _roll_back(self) -> None:
        try:
            if self._conn.in_transaction:
                self._conn.execute("rollback")
        except sqlite3.Error:  # the connection is broken; the next write opens another
            self._conn.close()
            self._broken = True

    def _keep_wal_short(self) -> None:
        conn: sqlite3.Connection | None = None
        while self._checkpoint.wait():
            self._checkpoint.clear()
            if self._stopping:  # read after the clearing, which would drop the request to stop
                break
            try:
                if conn is None:
                    conn = self._driver.connect()
                    conn.execute(f"pragma busy_timeout = {int(checkpoint.CHECKPOINT_SECONDS * 1000)}")
                with self._log.mine() as mine:
                    if mine and self._log.is_long():
                        self._empty_log(conn)
            except (OSError, sqlite3.Error, DulyError) as error:
                log.warning("sqlite.checkpoint_failed", extra={"path": str(self._driver.path), "error": str(error)})
                self._stopped.wait(CHECKPOINT_REST_SECONDS[1])
        if conn is not None:
            conn.close()

    def _empty_log(self, conn: sqlite3.Connection) -> None:
        """Write the WAL into the file and start it over."""
        with self._one_at_a_time:
            busy, pages = self._checkpointed(conn)
        first, longest = CHECKPOINT_REST_SECONDS
        rest, self._rest_s = self._rest_s, min(2 * self._rest_s, longest) if busy else first
        if busy:
            log.info("sqlite.checkpoint_busy", extra={"path": str(self._driver.path), "wal_pages": pages})
            # A reader blocks it: trying again at once, in this or another process, would only block writers.
            self._log.rest()
            self._stopped.wait(rest)

    def _checkpointed(self, conn: sqlite3.Connection) -> tuple[bool, int]:
        """Checkpoint. Return whether a reader was in the way, and how many pages the WAL had."""
        # A WAL that is overwritten does not grow: a sync without a new file length takes half the time.
        how = "restart" if self._log.is_worth_keeping() else "truncate"
        busy, pages, _ = conn.execute(f"pragma wal_checkpoint({how})").fetchone()
        if how == "restart" and not busy:
            begin_anew(conn)
        return bool(busy), pages


def begin_anew(conn: sqlite3.Connection) -> None:
    """Commit a change, because only the next commit after a RESTART starts the WAL over."""
    [[patience]] = conn.execute("pragma busy_timeout").fetchall()
    conn.execute("pragma busy_timeout = 50")  # ms: all other writers wait meanwhile
    try:
        conn.execute(BEGIN_ANEW)
    except sqlite3.OperationalError as error:
        if not is_busy(error):  # the holder of the lock commits instead
            raise
    finally:
        conn.execute(f"pragma busy_timeout = {patience}")
