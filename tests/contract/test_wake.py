"""Wake-ups are hints, polling is the truth: a worker with nothing to do is called when jobs may have become ready.

Another process is a real one here: it enqueues one job for every line it is sent, and answers with the job's id.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from duly.model import Change, NewJob, State, Terms
from duly.store import ops
from duly.store.driver import Pace, Watch
from duly.store.op import Finish
from duly.store.postgres import connection as postgres_connection
from duly.store.postgres import driver as postgres
from duly.store.postgres import listen, lone_enqueue
from duly.store.postgres.driver import PostgresDriver
from duly.store.sqlite import watch as inotify
from duly.store.sqlite.driver import SQLiteDriver
from tests.contract.stores import PostgresStore, SQLiteStore, Store, held, new_id

PATIENCE = 60
OTHER = """
import sys
from duly.rules.keys import Ids
from duly.model import NewJob, Terms
from duly.rules.settings import Settings, parse_url
from duly.store import open_driver, ops

driver, new_id = open_driver(Settings(url=parse_url(sys.argv[1]))), Ids()
driver.run(ops.clock())
print("here", flush=True)
for _ in sys.stdin:
    [answer] = driver.run(ops.enqueue(Terms("work"), [NewJob(new_id(), "1")]))
    print(answer.id, flush=True)
driver.close()
"""


class Other:
    """Another process."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", OTHER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "here"

    def enqueue(self) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line
        return line

    def close(self) -> None:
        if self._process.returncode is None:
            self._process.communicate(timeout=PATIENCE)
            assert self._process.returncode == 0


@contextmanager
def other(url: str) -> Iterator[Other]:
    process = Other(url)
    try:
        yield process
    finally:
        process.close()


class Called(threading.Event):
    """What a watch calls."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def __call__(self) -> None:
        self.times += 1
        self.set()

    def soon(self) -> bool:
        return self.wait(PATIENCE)

    def armed(self, watch: Watch) -> None:
        """Arm as a worker does: whatever is called from here on counts."""
        self.clear()
        watch.arm()


def until(happened: Callable[[], Any]) -> None:
    give_up = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < give_up
        time.sleep(0.002)


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("duly-watch", "duly-listen")]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    until(lambda: our_threads() == [])


@pytest.fixture
def fleet(postgres_url: str) -> Iterator[PostgresStore]:
    store = PostgresStore(postgres_url)
    store.run(ops.clock())
    yield store
    store.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SQLiteStore]:
    store = SQLiteStore(tmp_path / "duly.db")
    yield store
    store.close()


@pytest.fixture(params=["sqlite", "sqlite without inotify", "postgres"])
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store that tells of other processes."""
    if request.param == "sqlite without inotify":
        monkeypatch.setattr(inotify.Inotify, "open", classmethod(lambda cls: None))
    return request.getfixturevalue("fleet" if request.param == "postgres" else "file")


def address(store: Any) -> str:
    return store.url if store.kind == "postgres" else str(store.path)


# In this process


def test_a_job_made_ready_by_the_driver_calls_at_once(store):
    called = Called()
    watch = store.driver.watch(called)
    store.enqueue()
    assert called.times == 1
    [job] = store.claim()
    store.run(ops.extend([held(job)]))
    assert called.times == 1
    store.run(ops.release([job], now=store.now))
    assert called.times == 2
    store.succeed(*store.claim())
    assert called.times == 2
    asyncio.run(store.driver.arun(ops.enqueue(Terms("work"), [NewJob(new_id(), "1")])))
    assert called.times == 3
    watch.close()
    store.enqueue()
    assert called.times == 3


def test_every_watch_is_called_also_by_enqueues_elsewhere(store):
    first, second = Called(), Called()
    watches = [store.driver.watch(called) for called in (first, second)]
    store.driver.woke()
    assert (first.times, second.times) == (1, 1)
    watches[0].close()
    store.driver.woke()
    assert (first.times, second.times) == (1, 2)
    watches[1].close()


def test_a_watch_of_a_closed_loop_does_not_fail_an_enqueue(store):
    loop = asyncio.new_event_loop()
    loop.close()
    watch = store.driver.watch(lambda: loop.call_soon_threadsafe(print))
    [job_id] = store.enqueue()
    assert store.state(job_id) == "ready"
    watch.close()


def test_any_store_can_be_armed_and_disarmed(store):
    watch = store.driver.watch(Called())
    for _ in range(2):
        watch.arm()
        watch.arm()
        watch.disarm()
        watch.disarm()
    watch.close()
    watch.close()
    watch.arm()
    assert our_threads() == []


# Across processes


@pytest.mark.slow
def test_a_job_of_another_process_calls_and_can_be_claimed(shared):
    called = Called()
    watch = shared.driver.watch(called)
    with other(address(shared)) as process:
        for _ in range(30):
            called.armed(watch)
            while shared.claim():
                pass
            job_id = process.enqueue()
            seen = []
            while not seen:  # it may be called before the end: then it looks, arms again, and looks again
                assert called.soon()
                called.armed(watch)
                seen = [job.id for job in shared.claim()]
            assert seen == [job_id]
    watch.close()


def test_an_armed_watch_stays_armed_until_an_event(shared):
    called = Called()
    watch = shared.driver.watch(called)
    called.armed(watch)
    called.clear()
    watch.arm()
    watch.arm()
    with other(address(shared)) as process:
        called.clear()
        watch.arm()
        process.enqueue()
        assert called.soon()
    watch.close()


def test_a_disarmed_watch_is_not_called_by_other_processes_until_armed_again(shared):
    called = Called()
    watch = shared.driver.watch(called)
    with other(address(shared)) as process:
        called.armed(watch)
        process.enqueue()
        assert called.soon()
        called.armed(watch)
        watch.disarm()
        process.enqueue()
        if shared.kind == "postgres":  # its thread may be at it still
            until(lambda: not parked(shared))
        times = called.times
        for _ in range(5):
            process.enqueue()
        assert called.times == times
        called.armed(watch)
        process.enqueue()
        assert called.soon()
    watch.close()


def test_another_process_calls_both_watches_of_a_driver(shared):
    watches = {called: shared.driver.watch(called) for called in (Called(), Called())}
    with other(address(shared)) as process:
        for called, watch in watches.items():
            called.armed(watch)
        process.enqueue()
        for called, watch in watches.items():
            assert called.soon()
            watch.close()


def test_a_driver_that_was_closed_is_watched_again_after_the_next_arming(shared):
    called = Called()
    watch = shared.driver.watch(called)
    called.armed(watch)
    called.clear()
    shared.driver.close()
    assert called.soon()  # to look for itself
    assert our_threads() == []
    with other(address(shared)) as process:
        called.armed(watch)
        process.enqueue()
        assert called.soon()
    watch.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from 3.12 on Python warns of fork with threads
def test_a_fork_does_not_affect_the_parents_watch(shared):
    called = Called()
    watch = shared.driver.watch(called)
    called.armed(watch)
    child = os.fork()
    if child == 0:
        try:
            watch.close()
            shared.enqueue()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert called.soon()
    with other(address(shared)) as process:
        called.armed(watch)
        process.enqueue()
        assert called.soon()
    watch.close()


def test_a_callback_may_close_its_own_watch(shared):
    closed = Called()
    watch: Watch

    def on_change() -> None:
        watch.close()
        closed()

    watch = shared.driver.watch(on_change)
    with other(address(shared)) as process:
        watch.arm()
        process.enqueue()
        assert closed.soon()


def test_a_called_watch_is_armed_again_at_once_without_new_commits(shared):
    called = Called()
    watch = shared.driver.watch(called)
    assert not watch.rearm()  # it was never armed, so anything may have come
    with other(address(shared)) as process:
        called.armed(watch)
        assert watch.rearm()  # it is
        for _ in range(5):
            process.enqueue()
            assert called.soon()
            called.clear()
            while not watch.rearm():
                watch.arm()
            process.enqueue()
            assert called.soon()
            called.armed(watch)
    watch.close()


def test_a_paused_watch_must_claim_once_more_when_armed_again(shared):
    called = Called()
    watch = shared.driver.watch(called)
    watch.arm()
    shared.driver.close()
    assert not watch.rearm()
    watch.close()


# SQLite


def test_a_watch_armed_after_another_commit_must_claim_once_more(file):
    called = Called()
    watch = file.driver.watch(called)
    with other(address(file)) as process:
        called.armed(watch)
        process.enqueue()
        assert called.soon()
        process.enqueue()
        called.clear()
        assert not watch.rearm()
        watch.arm()
        process.enqueue()
        assert called.soon()
    watch.close()


def test_a_watch_armed_during_a_write_must_claim_once_more(file):
    """The kernel told of it before, and may have nothing more to tell when it is committed."""
    called = Called()
    watch = file.driver.watch(called)
    called.armed(watch)
    conn = sqlite3.connect(file.path, isolation_level=None)
    for pragma in ("wal_autocheckpoint = 0", "cache_size = 1", "cache_spill = 1"):
        conn.execute(f"pragma {pragma}")
    conn.execute("create table notes (text)")
    assert called.soon()
    until(lambda: watch._quiet)
    conn.execute("begin immediate")
    conn.executemany("insert into notes values (?)", [["x" * 4000]] * 100)  # more than stays in memory
    until(lambda: not watch._quiet)
    called.clear()
    assert not watch.rearm()
    conn.execute("commit")
    assert called.soon()
    conn.close()
    watch.close()


def test_a_watch_disarmed_during_a_write_is_not_called_at_its_commit(file, monkeypatch):
    called, looks = Called(), []
    watch = file.driver.watch(called)
    conn = sqlite3.connect(file.path, isolation_level=None)
    for pragma in ("wal_autocheckpoint = 0", "cache_size = 1", "cache_spill = 1"):
        conn.execute(f"pragma {pragma}")
    conn.execute("create table notes (text)")
    called.armed(watch)
    look = type(watch._sight).version
    monkeypatch.setattr(type(watch._sight), "version", lambda sight: looks.append(1) or look(sight))
    conn.execute("begin immediate")
    conn.executemany("insert into notes values (?)", [["x" * 4000]] * 100)  # more than stays in memory
    until(lambda: len(looks) > 2)  # it waits for the commit
    watch.disarm()
    conn.execute("commit")
    before = len(looks)
    time.sleep(0.1)  # it reads every few milliseconds while it waits
    assert (called.times, len(looks) - before <= 1) == (0, True)
    conn.close()
    watch.close()


def test_a_commit_during_arming_is_not_missed(file, monkeypatch):
    called = Called()
    watch = file.driver.watch(called)
    with other(address(file)) as process:
        called.armed(watch)
        process.enqueue()  # it is open and has been told of writes
        assert called.soon()
        look, pending = type(watch._sight).version, [process.enqueue]

        def look_before_another_commits(sight: Any) -> Any:
            seen = look(sight)
            while pending:
                pending.pop()()
            return seen

        monkeypatch.setattr(type(watch._sight), "version", look_before_another_commits)
        called.armed(watch)
        assert called.soon()
    watch.close()


def test_a_file_that_was_replaced_is_watched_in_its_new_form(file):
    called = Called()
    watch = file.driver.watch(called)
    called.armed(watch)
    file.driver.close()
    for path in file.path.parent.iterdir():
        path.unlink()
    with other(str(file.path)) as process:
        called.armed(watch)
        process.enqueue()
        assert called.soon()
        watch.disarm()
        # Now behind the back of an open connection.
        sight = watch._sight
        for path in list(file.path.parent.iterdir()):
            path.rename(path.with_name(f"moved-{path.name}"))
    with other(str(file.path)) as process:
        called.armed(watch)
        assert watch._sight is not sight
        process.enqueue()
        assert called.soon()
    watch.close()


def test_a_wal_that_is_cut_short_is_still_watched(file):
    called = Called()
    watch = file.driver.watch(called)
    with other(str(file.path)) as process:
        for _ in range(3):
            called.armed(watch)
            process.enqueue()
            assert called.soon()
            assert file.query("pragma wal_checkpoint(truncate)")[0][0] in (0, 1)
    watch.close()


def test_a_missing_wal_is_polled_for(file, monkeypatch):
    called = Called()
    watch = file.driver.watch(called)
    watch._wal = str(file.path.with_name("missing"))
    with other(str(file.path)) as process:
        called.armed(watch)
        process.enqueue()
        assert called.soon()
    watch.close()


@pytest.mark.slow
def test_a_write_with_an_unseen_commit_calls_in_the_end(file, monkeypatch):
    called = Called()
    watch = file.driver.watch(called)
    watch.arm()
    watch.disarm()
    monkeypatch.setattr(watch._sight, "version", lambda: 1)
    called.armed(watch)
    file.enqueue()
    called.clear()  # by the driver itself
    assert called.soon()
    watch.close()


def test_an_unusable_file_is_not_watched_and_arming_is_silent(tmp_path):
    (tmp_path / "duly.db").write_text("this is no database at all, but long enough to be told from one" * 20)
    driver = SQLiteDriver(tmp_path / "duly.db")
    watch = driver.watch(Called())
    watch.arm()
    watch.disarm()
    watch.close()
    driver.close()


def test_calls_that_keep_coming_are_kept_apart(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = Pace()
    pauses = []
    for _ in range(20):
        pause = pace.pause()
        pauses.append(pause)
        now += pause
        pace.called()
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.0, Pace.MOST)
    now += 1
    assert pace.pause() == 0.0


# PostgreSQL


def parked(fleet: PostgresStore) -> int:
    """How many hold the flag that somebody sleeps."""
    [[count]] = fleet.query(
        "select count(*) from pg_locks where locktype = 'advisory' and mode = 'ShareLock' and objid = ?",
        listen.PARKED % 2**32,
    )
    return count


def connections(fleet: PostgresStore) -> int:
    [[count]] = fleet.query(
        "select count(*) from pg_stat_activity where application_name = 'duly' and datname = current_database()"
    )
    return count


def test_only_idle_workers_are_notified(fleet):
    with psycopg.connect(fleet.url, autocommit=True) as sleeper:
        sleeper.execute("listen duly")
        fleet.enqueue()
        fleet.enqueue_key("a")
        assert list(sleeper.notifies(timeout=0.2)) == []
        sleeper.execute(listen.PARK)
        sleeper.execute(listen.SETTLE)
        [job] = fleet.claim(1)
        assert list(sleeper.notifies(timeout=0.2)) == []
        for work in (
            lambda: fleet.enqueue(),
            lambda: fleet.enqueue_key("b"),
            lambda: fleet.run(ops.release([job], now=fleet.now)),
        ):
            work()
            assert len(list(sleeper.notifies(timeout=PATIENCE, stop_after=1))) == 1


def test_the_flag_is_up_exactly_while_armed(fleet):
    watch = fleet.driver.watch(Called())
    assert parked(fleet) == 0
    watch.arm()
    until(lambda: parked(fleet) == 1)
    for _ in range(20):
        watch.disarm()
        watch.arm()
    watch.disarm()
    until(lambda: parked(fleet) == 0)
    watch.arm()
    until(lambda: parked(fleet) == 1)
    watch.close()
    until(lambda: parked(fleet) == 0)


def test_arming_returns_with_the_flag_up(fleet, monkeypatch):
    monkeypatch.setattr(listen, "ARM_SECONDS", PATIENCE)
    monkeypatch.setattr(listen, "PARK", f"select pg_sleep(0.1); {listen.PARK}")  # longer than we take to look
    watch = fleet.driver.watch(Called())
    for _ in range(5):
        watch.arm()
        assert parked(fleet) == 1
        watch.disarm()
    watch.close()


@pytest.mark.parametrize("hook", [None, lambda point: None])
def test_a_hint_that_fails_does_not_fail_the_enqueue(fleet, monkeypatch, hook):
    fleet.driver.hook = hook
    monkeypatch.setattr(postgres_connection, "HINT", "select 1 / 0")
    fleet.driver.close()  # a connection knows its hint from its beginning
    fleet.enqueue()
    fleet.enqueue_key("a")
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: fleet.enqueue(), range(8)))
    monkeypatch.setattr(postgres_connection, "HINT", "select pg_terminate_backend(pg_backend_pid())")
    fleet.driver.close()
    fleet.enqueue()
    fleet.enqueue_key("b")
    fleet.driver.hook = None
    assert fleet.query("select count(*) from duly_job") == [(12,)]


def test_an_endless_stream_of_enqueues_wakes_idle_workers(fleet, monkeypatch):
    """While others wait for their commit the hint is left to them, but not for ever."""
    hints = []
    send = lone_enqueue.enqueue
    monkeypatch.setattr(lone_enqueue, "enqueue", lambda *statement: send(*statement) and False)
    monkeypatch.setattr(postgres_connection.PooledConnection, "hint", lambda self: hints.append(self))
    monkeypatch.setattr(type(fleet.driver._gathering), "waiting", True)
    fleet.driver._hinted_at = 0.0
    fleet.enqueue()
    assert len(hints) == 1
    monkeypatch.setattr(postgres, "HINT_SECONDS", 1000.0)
    fleet.enqueue()
    assert len(hints) == 1
    monkeypatch.setattr(type(fleet.driver._gathering), "waiting", False)
    fleet.enqueue()
    assert len(hints) == 2
    fleet.enqueue_key("a")
    assert len(hints) == 3


def test_a_listener_that_lost_its_connection_logs_once_and_reconnects(fleet, caplog):
    called = Called()
    watch = fleet.driver.watch(called)
    watch.arm()
    until(lambda: parked(fleet))
    failures = fleet.driver.failures
    with caplog.at_level(logging.WARNING):
        called.clear()
        fleet.query("select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and mode = 'ShareLock'")
        assert called.soon()  # it may have missed something
    assert [record.message for record in caplog.records] == ["postgres.listen_lost"]
    assert fleet.driver.failures > failures
    until(lambda: parked(fleet))
    called.clear()
    with other(fleet.url) as process:
        process.enqueue()
        assert called.soon()
    watch.close()


def test_arming_works_without_a_server_to_listen_to(fleet, caplog):
    driver = PostgresDriver(fleet.url, listen_url="postgresql://postgres@127.0.0.1:1/none", connect_s=1)
    called = Called()
    watch = driver.watch(called)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            watch.arm()
            watch.disarm()
        watch.arm()
        until(lambda: driver.failures >= 2)
    driver.run(ops.enqueue(Terms("work"), [NewJob(new_id(), "1")]))
    assert called.is_set()
    driver.close()
    assert [record.message for record in caplog.records] == ["postgres.listen_lost"]


def test_a_listen_url_is_used_for_listening(fleet):
    driver = PostgresDriver(fleet.url, prepared=False, listen_url=f"{fleet.url}?application_name=listener")
    watch = driver.watch(Called())
    watch.arm()
    until(lambda: parked(fleet))
    assert fleet.query("select count(*) from pg_stat_activity where application_name = 'listener'") == [(1,)]
    driver.close()


def test_behind_a_pooler_listening_needs_a_listen_url(fleet):
    driver = PostgresDriver(fleet.url, prepared=False)
    watch = driver.watch(Called())
    watch.arm()
    assert our_threads() == []
    driver.close()


def test_a_worker_that_listens_has_no_more_than_four_connections(fleet):
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda _: fleet.run(ops.listing()), range(64)))
        watch = fleet.driver.watch(Called())
        watch.arm()
        until(lambda: parked(fleet))
        work = [threads.submit(fleet.run, ops.listing()) for _ in range(200)]
        work += [threads.submit(fleet.run, ops.extend([])) for _ in range(20)]
        most = 0
        while not all(one.done() for one in work):
            most = max(most, connections(fleet))
        list(threads.map(lambda _: fleet.run(ops.listing()), range(64)))
    assert most <= 4
    assert fleet.driver._pool._size == 2
    watch.close()
    assert fleet.driver._pool._size == 3


def test_a_pool_of_one_is_not_lent(fleet):
    driver = PostgresDriver(fleet.url, connections=1)
    watch = driver.watch(Called())
    watch.arm()
    until(lambda: parked(fleet))
    assert driver.run(ops.clock())
    driver.close()


def test_a_finish_calls_only_if_a_job_becomes_ready(store):
    ids = store.enqueue(2)
    jobs = store.claim(2)
    called = Called()
    watch = store.driver.watch(called)
    store.run(ops.finish([Finish(jobs[0], Change(State.SUCCEEDED))], now=store.now))
    assert not called.is_set()
    store.run(ops.finish([Finish(jobs[1], Change(State.READY))], now=store.now))
    assert called.is_set()
    assert store.state(ids[1]) == "ready"
    watch.close()
