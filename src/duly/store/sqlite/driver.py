"""SQLite, through the standard library.

One writer thread per process: callers hand it operations, it runs what it has in one `BEGIN IMMEDIATE` and one
commit, then answers them all. While one commit is on its way to the disk the next batch gathers, so that many
callers share one sync without any of them waiting for a timer.

Below 3.51.3 a passive checkpoint, the automatic kind, can corrupt the file when it races a commit of another
connection. So no connection of ours checkpoints by itself: one thread per process does, with RESTART, which
holds off writers while it works. The commit that could be raced is the one that begins the log anew, so that thread
makes it too, before anybody else may checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shutil
import sqlite3
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from duly.errors import AnswerLost, ConfigError, DulyError, SchemaMismatch, StoreError, StoreRefused, StoreUnavailable
from duly.store import health, migrate, statements
from duly.store.driver import About, Driver, Finding, Hook, Point
from duly.store.group_commit import Answer, Outcome, Waiting, answer, joined, rows_of
from duly.store.op import Op, Rows
from duly.store.sqlite import checkpoint
from duly.store.sqlite.watch import FileWatch

log = logging.getLogger("duly.store.sqlite")

OLDEST = (3, 38, 0)
WAL_IS_SAFE = (3, 51, 3)
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "fuse.sshfs", "ncpfs"})
BUSY_SECONDS = 5.0
HELD_UP_TIMES = 4  # as long, while another process is at a checkpoint
# How often a writer looks whether it can have the lock: at random, so that all who wait have the same chance.
LOCK_LOOK_SECONDS = (0.0005, 0.004)
CHECKPOINT_REST_SECONDS = (5.0, 30.0)  # after the first in vain, each time twice as long, and at most
MOST_AT_ONCE = 256
READERS = 4
WATCH_BUSY_SECONDS = 0.1
# Of duly_meta there always are: with the table there, a connection that is open does not notice who analyzes.
STATISTICS = "select name from sqlite_master where name = 'sqlite_stat1'"
HAS_OURS = "select exists (select 1 from sqlite_stat1 where tbl glob 'duly_*' and tbl <> 'duly_meta')"
FORGET_OURS = "delete from sqlite_stat1 where tbl glob 'duly_*' and tbl <> 'duly_meta'"
# Other SQLite libraries that a program may bring along, by the names of their modules.
OTHER_LIBRARIES = ("apsw", "pysqlite3", "sqlcipher3", "pysqlcipher3", "libsql", "libsql_experimental", "turso")
# Writes a page and changes nothing.
BEGIN_ANEW = "reindex duly_meta"
# What these select is one JSON text a job, without line breaks and in any order.
A_TEXT_A_JOB = frozenset({"claim", "claim_marked"})
LONGEST_TEXT = 4_000_000  # bytes of jobs that are fetched as one: while they are read, nobody else can do anything
SYNCHRONOUS = {0: "off", 1: "normal", 2: "full", 3: "full"}

# Connections that a forked child inherited. They belong to the parent: using or closing one here would drop its locks.
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
        self._begin_afresh()
        _drivers.add(self)

    @property
    def wal(self) -> str:
        """Where the WAL is: SQLite puts it beside the file that a link leads to."""
        return f"{os.path.realpath(self.path)}-wal"

    def _begin_afresh(self) -> None:
        self._opening = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._writer: _Writer | None = None
        self._readers: deque[sqlite3.Connection] = deque()
        self._reading = 0
        self._read_ended = threading.Condition()

    def execute(self, op: Op[Any]) -> Rows:
        """Run `op` once: a read on a connection of its own, a write through the writer."""
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
            # Threads of our own: handlers may have taken all of the event loop's.
            if self._threads is None:
                self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="duly-sqlite")
            return await asyncio.get_running_loop().run_in_executor(self._threads, self.execute, op)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        self._submit(Waiting(op, future, loop))
        return rows_of(await future)

    def _submit(self, waiting: Waiting) -> None:
        while not self._open().submit(waiting):
            pass  # the file was closed meanwhile, for a fork perhaps: open it again

    def close(self) -> None:
        """Finish what was handed in, then close the file. The next operation opens it again."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()
        with self._opening:
            self._close()
        self._go_on_watching()

    def about(self) -> About:
        """Say which file this is and how it is set."""
        with self._reader() as conn:
            try:
                schema = migrate.version(read_meta(conn))
            except sqlite3.Error as error:
                raise self.failed(error, "about") from error
        return About("SQLite", str(self.path), f"SQLite {sqlite3.sqlite_version}", str(schema), self._durability)

    def examine(self, *, deep: bool = False) -> list[Finding]:
        """Look at the library, the file and the disk; `deep` has SQLite read the whole file."""
        access = _access(self.path)
        if access.level == "error":
            return [access]
        with self._reader() as conn:
            try:
                inside = _look_inside(conn, deep)
            except sqlite3.Error as error:
                raise self.failed(error, "examine") from error
        return [*_look_at_libraries(), access, *_look_around(self.path, self.wal), *inside]

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
        """Close the file while this process forks, and let nobody open it.

        SQLite remembers per process which locks it holds. A child would inherit that memory without the locks:
        the parent could then delete the WAL that the child writes to.
        """
        self._opening.acquire()
        self._close()
        with self._read_ended:
            self._read_ended.wait_for(lambda: self._reading == 0)

    def after_fork(self) -> None:
        """Let the file be opened again, in the parent."""
        self._opening.release()
        self._go_on_watching()

    def _go_on_watching(self) -> None:
        """Have those that were armed look for themselves, and arm again."""
        resting, self._resting = self._resting, []
        for watch in resting:
            watch.tell()

    def mind_wal(self) -> None:
        """Have the WAL checkpointed if it has grown, after a commit that was not ours."""
        if checkpoint.is_long(self.wal):
            self._open().mind_wal()

    def _watch(self, on_change: Callable[[], None]) -> FileWatch:
        return FileWatch(self, on_change, wal=self.wal, look=self._look, opening=self._opened)

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Keep the file from being closed; it may be one that cannot be used."""
        with suppress(DulyError):
            self._open()
        with self._opening:
            yield

    def _look(self) -> _Sight | None:
        """Open a connection for a watch; None while the file cannot be used: others tell of that."""
        if self._writer is None:
            return None
        try:
            return _Sight(self.connect(busy_s=WATCH_BUSY_SECONDS), self.path)
        except (DulyError, OSError):
            return None

    def abandon(self) -> None:
        """Forget every handle without closing it, in a forked child."""
        self._abandon_watches()
        self._resting.clear()
        if self._writer is not None:
            _abandoned.append(self._writer)
        _abandoned.extend(self._readers)
        self._begin_afresh()

    def _open(self) -> _Writer:
        writer = self._writer
        if writer is not None:
            return writer
        with self._opening:
            if self._writer is None:
                check_host(self.path, network_ok=self._network_ok)
                self._writer = _Writer(self)
            return self._writer

    def _read(self, op: Op[Any]) -> Rows:
        with self._reader() as conn:
            try:
                return self.run_on(conn, op)
            except Exception as error:
                raise self.failed(error, op.name) from error

    def failed(self, error: Exception, op: str, *, committing: bool = False) -> Exception:
        """Translate what was raised, and count when the file could not be used."""
        failure = translate(error, op, self.path, committing=committing)
        if isinstance(failure, StoreUnavailable | AnswerLost):
            self.failures += 1
        return failure

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        self._open()
        with self._opening, self._read_ended:  # nobody begins to read while the file is being closed
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
        """Open a connection the way all of ours are opened."""
        busy_s = self.busy_s if busy_s is None else busy_s
        try:
            conn = sqlite3.connect(
                self.path,
                timeout=busy_s,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=512,
            )
            with _closed_on_failure(conn):
                _patiently(conn, "pragma journal_mode = wal", busy_s)
                conn.execute(f"pragma synchronous = {self._durability}")
                conn.execute("pragma wal_autocheckpoint = 0")
                conn.execute("pragma cache_size = -16000")
                _forget_statistics(conn)
                conn.execute(f"pragma busy_timeout = {int(busy_s * 1000)}")
        except sqlite3.Error as error:
            raise self.failed(error, "open") from error
        return conn

    def run_all(self, conn: sqlite3.Connection, batch: Sequence[Op[Any]]) -> list[Rows]:
        """Run operations one after the other; plain enqueues on the same terms as one, which have no rows."""
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
        """Run the statements of `op` on a connection, inside whatever transaction it is in."""
        rows: list[Any] = []
        hook = self.hook
        for section in op.sections:
            for number, statement in enumerate(statements.spell("sqlite", section, "named")):
                if hook is not None:
                    hook(Point("before", op.name, section, number))
                rows += _fetched(conn, section, statement.sql, op.params)
                if hook is not None:
                    hook(Point("after", op.name, section, number))
        return rows


def _fetched(conn: sqlite3.Connection, section: str, sql: str, params: Mapping[str, Any]) -> Rows:
    """Run a statement and fetch its rows; the jobs of a claim as one text, unless that would be long.

    For each row, Python lets go of the interpreter and then waits for the event loop to have it back.
    """
    if section in A_TEXT_A_JOB and sql.startswith("select"):
        with suppress(sqlite3.DataError):  # they are longer than SQLite's longest text
            for (texts,) in conn.execute(_as_one_text(sql), params).fetchall():
                return [] if texts is None else [(text,) for text in texts.split("\n")]
    return conn.execute(sql, params).fetchall()


def _as_one_text(sql: str) -> str:
    """Have a statement give one row with a line for each job, or none if that would be long."""
    return (
        f"select texts from (select group_concat(job, char(10)) as texts from ({sql})) "  # noqa: S608 (ours)
        f"where coalesce(length(cast(texts as blob)), 0) <= {LONGEST_TEXT}"
    )


class _Writer:
    """The one connection of this process that writes, its thread, and the one that checkpoints.

    A lone caller writes in its own thread, which spares two switches between threads. Who comes meanwhile hands in, and
    all that has gathered is committed as one.
    """

    def __init__(self, driver: SQLiteDriver) -> None:
        self._driver = driver
        self._conn = self._connected()
        self._waiting: deque[Waiting] = deque()
        self._wake = threading.Condition()
        self._led = False  # somebody writes
        self._stopping = False
        self._broken = False
        self._stopped = threading.Event()
        self._checkpoint = threading.Event()
        self._log = checkpoint.Log(driver.wal)
        self._rest_s = CHECKPOINT_REST_SECONDS[0]
        # SQLite would keep them apart as well, but by polling: a commit would sleep on after the checkpoint's end.
        self._one_at_a_time = threading.Lock()
        self._threads = [
            threading.Thread(target=target, name=f"duly-{name}", daemon=True)
            for name, target in (("writer", self._write), ("checkpoint", self._keep_wal_short))
        ]
        for thread in self._threads:
            thread.start()

    def lead(self, op: Op[Any]) -> Outcome | None:
        """Write in the thread that asks. None: somebody else writes, or waits to."""
        leads = False
        try:  # from the first moment on: who is interrupted must not lead for ever
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
        """Hand in an operation; its answer comes when it is durable. False: this writer is closing.

        Beats go first: a lease must not wait in line.
        """
        with self._wake:
            if self._stopping:
                return False
            if waiting.op.urgent:
                self._waiting.appendleft(waiting)
            else:
                self._waiting.append(waiting)
            if len(self._waiting) == 1:  # who comes later is served with the first
                self._wake.notify()
        return True

    def stop(self) -> None:
        """Write what was handed in, then end both threads and close."""
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
            # Who went away before we began is not served; from here on nobody can take his request back.
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
        except BaseException as error:  # whatever it is, nobody may wait for ever
            self._roll_back()
            return [error] * len(batch)

    def _hand_on(self) -> None:
        with self._wake:
            self._led = False
            if self._waiting or self._stopping:
                self._wake.notify()

    def _commit(self, batch: Sequence[Op[Any]]) -> Sequence[Outcome]:
        """Run a batch in one transaction; if that fails, one by one, so that only the guilty fails."""
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
        with _closed_on_failure(conn):
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
        except sqlite3.Error:  # the connection is of no use any more; the next write opens another
            self._conn.close()
            self._broken = True

    def _keep_wal_short(self) -> None:
        conn: sqlite3.Connection | None = None
        while self._checkpoint.wait():
            self._checkpoint.clear()
            if self._stopping:  # looked at after the clearing, which would wipe out the call to stop
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
        """Write the log into the file and have it begin anew."""
        with self._one_at_a_time:
            busy, pages = self._checkpointed(conn)
        first, longest = CHECKPOINT_REST_SECONDS
        rest, self._rest_s = self._rest_s, min(2 * self._rest_s, longest) if busy else first
        if busy:
            log.info("sqlite.checkpoint_busy", extra={"path": str(self._driver.path), "wal_pages": pages})
            # A reader stays: trying at once again, in this process or in another, would only hold up writers.
            self._log.rest()
            self._stopped.wait(rest)

    def _checkpointed(self, conn: sqlite3.Connection) -> tuple[bool, int]:
        """Checkpoint; tells whether a reader was in the way, and how many pages the log had."""
        # Written over, a log need not grow: a sync that has no new length to note takes half the time.
        how = "restart" if self._log.is_worth_keeping() else "truncate"
        busy, pages, _ = conn.execute(f"pragma wal_checkpoint({how})").fetchone()
        if how == "restart" and not busy:
            _begin_anew(conn)
        return bool(busy), pages


class _Sight:
    """What a watch sees of the file."""

    def __init__(self, conn: sqlite3.Connection, path: Path) -> None:
        self._conn = conn
        self._path = path
        self._file = self._identity()

    def version(self) -> int | None:
        """Read the counter that every commit of another connection changes. None: it cannot be read."""
        return data_version(self._conn)

    def is_stale(self) -> bool:
        """Tell whether the file has been replaced by another."""
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


def _begin_anew(conn: sqlite3.Connection) -> None:
    """Commit something, as after a restart it is only the next commit that begins the log anew."""
    [[patience]] = conn.execute("pragma busy_timeout").fetchall()
    conn.execute("pragma busy_timeout = 50")  # ms: all other writers wait for us
    try:
        conn.execute(BEGIN_ANEW)
    except sqlite3.OperationalError as error:
        if not is_busy(error):  # whoever has the lock commits instead
            raise
    finally:
        conn.execute(f"pragma busy_timeout = {patience}")


def data_version(conn: sqlite3.Connection) -> int | None:
    """Read the counter that every commit of another connection changes. None: it cannot be read."""
    try:
        return int(conn.execute("pragma data_version").fetchone()[0])
    except sqlite3.Error:
        return None


@contextmanager
def _closed_on_failure(conn: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        conn.close()
        raise


def _forget_statistics(conn: sqlite3.Connection) -> None:
    """Plan as if nobody had ever analyzed our tables.

    A queue that was analyzed while it was nearly empty is believed to be so ever after, and every claim would read all
    of it. Whoever has more to do on this file than we know may analyze his own tables as he likes.
    """
    with suppress(sqlite3.Error):  # there are none, or somebody writes and we do not wait: the next one may forget them
        if conn.execute(STATISTICS).fetchone() and conn.execute(HAS_OURS).fetchone()[0]:
            conn.execute("pragma busy_timeout = 0")
            conn.execute(FORGET_OURS)
            conn.execute("analyze sqlite_schema")  # reads them again


def _patiently(conn: sqlite3.Connection, sql: str, seconds: float) -> None:
    """Run what SQLite refuses at once, whatever the busy timeout, while another process opens the file too."""
    give_up_at = time.monotonic() + seconds
    while True:
        try:
            conn.execute(sql)
            return
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() > give_up_at:
                raise
            time.sleep(0.01)


def begin(conn: sqlite3.Connection, busy_s: float, *, is_held_up: Callable[[], bool] = bool) -> None:
    """Take the lock; it is told to be locked only if nobody has committed all the while.

    SQLite does not queue those who wait, and its own waiting sleeps longer and longer: of eight processes one got
    the lock after seconds. While others get it, waiting is only bad luck. While another process checkpoints, nobody
    commits; on a busy machine that takes longer than it should, but not for ever.
    """
    seen, give_up_at = None, 0.0
    held_up_until = time.monotonic() + HELD_UP_TIMES * busy_s
    while True:
        try:
            conn.execute("begin immediate")
            return
        except sqlite3.OperationalError as error:
            if not is_busy(error):
                raise
            now = time.monotonic()
            if now >= give_up_at:
                before, seen = seen, data_version(conn)
                if give_up_at and before == seen and (now >= held_up_until or not is_held_up()):
                    raise
                give_up_at = now + busy_s
        time.sleep(random.uniform(*LOCK_LOOK_SECONDS))  # noqa: S311


def bring_up_to_date(conn: sqlite3.Connection, path: Path, busy_s: float = BUSY_SECONDS) -> None:
    """Create or migrate the tables; any number of processes may do this at once, while others write."""
    try:
        if migrate.pending("sqlite", read_meta(conn)):
            _migrate(conn, busy_s)
        # By now, which may be long after the first look: somebody may have gone further than we know.
        migrate.check("sqlite", read_meta(conn), str(path))
    except sqlite3.Error as error:
        raise translate(error, "migrate", path) from error


def _migrate(conn: sqlite3.Connection, busy_s: float) -> None:
    conn.execute("pragma busy_timeout = 0")  # `begin` waits instead
    begin(conn, busy_s)
    conn.execute(f"pragma busy_timeout = {int(busy_s * 1000)}")  # where there is no log, a commit waits for readers
    try:
        for step in migrate.pending("sqlite", read_meta(conn)):
            for statement in step.statements:
                conn.execute(statement)
        conn.execute("analyze duly_meta")
        conn.execute("commit")
    except sqlite3.Error:
        if conn.in_transaction:
            conn.execute("rollback")
        raise


def look(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read what a file says of its schema, without creating or changing it."""
    place = Path(path).absolute()
    check_path(place)
    if not place.exists():
        return {}
    checkpoint = place.with_name(place.name + "-wal")
    # Immutable, or even a look would leave files beside it; but what is only in the log must be seen.
    how = "mode=ro" if checkpoint.exists() and checkpoint.stat().st_size else "mode=ro&immutable=1"
    try:
        conn = sqlite3.connect(f"{place.as_uri()}?{how}", uri=True)
        try:
            return read_meta(conn)
        finally:
            conn.close()
    except sqlite3.Error as error:
        raise translate(error, "migrate", path) from error


def check_access(path: str | os.PathLike[str]) -> None:
    """Refuse a file that this user may only read: a worker would wait for ever, as nothing changes that by itself."""
    found = _access(Path(path))
    if found.level == "error":
        raise StoreError(f"{found.text}: {found.remedy}")


def _access(path: Path) -> Finding:
    file = not path.exists() or os.access(path, os.R_OK | os.W_OK)
    return health.access(str(path), file=file, folder=os.access(path.parent, os.W_OK | os.X_OK))


def _look_at_libraries() -> list[Finding]:
    safe = sqlite3.sqlite_version_info >= WAL_IS_SAFE
    return [health.library(sqlite3.sqlite_version, safe=safe), health.libraries(other_libraries())]


def other_libraries() -> list[str]:
    """Name modules of this process that bring another SQLite library along; one that poses as sqlite3 is ours."""
    loaded = {name: sys.modules[name] for name in OTHER_LIBRARIES if name in sys.modules}
    return [name for name, module in loaded.items() if getattr(module, "Connection", None) is not sqlite3.Connection]


def _look_around(path: Path, log_path: str) -> list[Finding]:
    kind = file_system(path.parent)
    free = shutil.disk_usage(path.parent).free
    return [
        health.file_system(kind, network=kind in NETWORK),
        health.room(free, path.stat().st_size),
        # A log begins anew when it has reached its length; four times that means that it cannot.
        health.log_length(checkpoint.length(log_path), 4 * checkpoint.CHECKPOINT_BYTES),
    ]


def _look_inside(conn: sqlite3.Connection, deep: bool) -> list[Finding]:
    def ask(pragma: str) -> Any:
        return conn.execute(f"pragma {pragma}").fetchone()[0]

    found = [
        health.durability(SYNCHRONOUS.get(ask("synchronous"), "off")),
        health.journal(ask("journal_mode")),
        health.schema(migrate.version(read_meta(conn)), migrate.newest("sqlite")),
    ]
    return [*found, health.content(ask("quick_check(1)"))] if deep else found


def read_meta(conn: sqlite3.Connection) -> dict[str, str]:
    """Read what the file says of its schema; empty when it has no tables of ours yet."""
    if not conn.execute("select 1 from sqlite_master where name = 'duly_meta'").fetchone():
        return {}
    return dict(conn.execute("select name, value from duly_meta"))


def check_host(path: Path, *, network_ok: bool) -> None:
    """Refuse what would lose data later: an old library, a missing folder, a network file system."""
    if sqlite3.sqlite_version_info < OLDEST:
        raise ConfigError(f"SQLite {sqlite3.sqlite_version} is too old: duly needs 3.38 or newer")
    check_path(path)
    kind = file_system(path.parent)
    if kind in NETWORK and not network_ok:
        raise ConfigError(
            f"{path} lies on a network file system ({kind}), where SQLite's locks cannot be trusted: "
            "use a local disk, or PostgreSQL for several hosts"
        )


def check_path(path: Path) -> None:
    """Refuse a path that cannot be a database file."""
    if path.name == ":memory:":
        raise ConfigError("a database in memory is refused, as nothing would survive: give a path like 'jobs.db'")
    try:
        is_folder, is_lost = path.is_dir(), not path.parent.is_dir()
    except PermissionError as error:
        raise ConfigError(
            f"{path} cannot be looked at ({error.strerror}): look at the rights and the owner of its folder"
        ) from error
    if is_folder:
        raise ConfigError(f"{path} is a folder: name a file in it, such as {path / 'duly.db'}")
    if is_lost:
        raise ConfigError(f"the folder {path.parent} does not exist: create it, or name another database file")


def file_system(folder: Path) -> str | None:
    """Return the type of the file system that holds `folder`, where the system tells."""
    try:
        mounts = Path("/proc/self/mounts").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    real = os.path.realpath(folder)
    found = [fields for fields in map(str.split, mounts) if _holds(fields[1], real)]
    return max(found, key=lambda fields: len(fields[1]))[2] if found else None


def _holds(mount: str, path: str) -> bool:
    return mount == "/" or path == mount or path.startswith(mount + "/")


def is_busy(error: BaseException) -> bool:
    """Tell whether another connection holds the lock."""
    # The module's own errors, such as for text that is not UTF-8, have no code.
    return isinstance(error, sqlite3.OperationalError) and getattr(error, "sqlite_errorcode", 0) & 0xFF in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    )


def translate(error: Exception, op: str, where: object, *, committing: bool = False) -> Exception:
    """Turn what sqlite3 raised into an error that says what happened and what to do."""
    if not isinstance(error, sqlite3.Error):
        return error
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if is_busy(error):
        return StoreUnavailable(
            f"{op}: {where} is locked by another connection. If it is your own open transaction, pass it as `conn=`; "
            "begin write transactions with BEGIN IMMEDIATE and keep them short"
        )
    if "no such table" in str(error) or "no such column" in str(error):
        return SchemaMismatch(
            f"{op}: {where} does not have the tables this version works with ({error}): run `duly migrate`"
        )
    if code == sqlite3.SQLITE_FULL:  # at the commit too: then it is rolled back
        return StoreUnavailable(f"{op}: the disk of {where} is full: make room; nothing was written")
    if committing:
        return AnswerLost(f"{op}: the commit on {where} failed ({error}); it may or may not have been written")
    if code == sqlite3.SQLITE_NOTADB:
        return StoreError(f"{op}: {where} is not a database: name another file")
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PERM):
        return StoreUnavailable(f"{op}: {where} cannot be used ({error}): look at the file, its folder and its owner")
    if code in (sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH):
        return StoreRefused(f"{op}: {where} refuses this data ({error})")
    return StoreError(f"{op}: {where}: {error}")


def wal_verdict() -> str:
    """Say in one sentence whether this SQLite is safe from the WAL checkpoint race."""
    if sqlite3.sqlite_version_info >= WAL_IS_SAFE:
        return f"SQLite {sqlite3.sqlite_version}: safe"
    return (
        f"SQLite {sqlite3.sqlite_version} can corrupt a WAL file when an automatic checkpoint races a commit; "
        "duly never checkpoints that way, but other programs that write to the file must set wal_autocheckpoint to 0"
    )


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
