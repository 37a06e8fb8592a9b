"""Places where a queue like this one has been seen to break, each with its defence."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock

import psycopg
import pytest
import sqlalchemy

from duly.errors import (
    AnswerLost,
    ConfigError,
    PayloadError,
    PayloadTooLarge,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from duly.model import Change, Failure, NewJob, State, Terms
from duly.store import caller, ops
from duly.store.driver import Point
from duly.store.op import Finish, Op
from duly.store.ops import Replay
from duly.store.postgres import driver as postgres
from duly.store.postgres.driver import PostgresDriver
from duly.store.sqlite import checkpoint
from duly.store.sqlite import connection as sqlite_connection
from duly.store.sqlite import driver as sqlite
from duly.store.sqlite import writer as sqlite_writer
from duly.store.statements import spell
from tests.contract.stores import D1Store, PostgresStore, SQLiteStore, Store, held, new_id, new_token, spoiled

DEAD = Change(State.DEAD, error=Failure("ValueError", "no"))
DONE = Change(State.SUCCEEDED)


@pytest.fixture
def fleet(postgres_url: str):
    store = PostgresStore(postgres_url)
    yield store
    store.close()


@pytest.fixture
def file(tmp_path: Path):
    store = SQLiteStore(tmp_path / "duly.db")
    yield store
    store.close()


@pytest.fixture
def emptied(monkeypatch):
    """A queue that gets an item whenever a log has been emptied."""
    ended: SimpleQueue[None] = SimpleQueue()
    empty = sqlite_writer.Writer._empty_log

    def and_tell(writer, conn):
        empty(writer, conn)
        ended.put(None)

    monkeypatch.setattr(sqlite_writer.Writer, "_empty_log", and_tell)
    return ended


def run_section(conn: psycopg.Connection[Any], op: Op[Any]) -> list[Any]:
    """Run an operation in a session of the test's own, and leave its transaction open."""
    rows: list[Any] = []
    for section in op.sections:
        for statement in spell("postgres", section, "pyformat"):
            cursor = conn.execute(statement.sql, op.params)  # type: ignore[arg-type]
            rows += cursor.fetchall() if cursor.description else []
    return rows


# Beats


def test_j10_a_job_that_a_caller_has_locked_does_not_hold_up_the_beats_of_its_neighbours(fleet):
    ids = fleet.enqueue(3, lease_ms=10_000)
    jobs = fleet.claim(3)
    with psycopg.connect(fleet.url) as theirs:
        run_section(theirs, ops.finish([Finish(jobs[0], DEAD)], now=fleet.now))
        fleet.now += 9_000
        assert set(fleet.run(ops.extend(map(held, jobs), now=fleet.now))) == set(ids)
        theirs.rollback()
    fleet.now += 2_000
    assert [seen.id for seen in fleet.run(ops.expired_leases(now=fleet.now))] == [ids[0]]


def test_j10_beats_do_not_wait_for_other_work_of_the_process(fleet):
    fleet.enqueue()
    [job] = fleet.claim()
    blocked = threading.Event()

    def hook(point: Point) -> None:
        if point.op == "promote":
            blocked.wait(20)

    async def main() -> Any:
        fleet.driver.hook = hook
        others = [asyncio.create_task(fleet.driver.arun(ops.promote("default"))) for _ in range(8)]
        await asyncio.sleep(0)
        beaten = await asyncio.wait_for(fleet.driver.arun(ops.extend([held(job)])), 10)
        blocked.set()
        await asyncio.gather(*others)
        return beaten

    assert asyncio.run(main()) == {job.id: None}


def test_j09_a_turn_of_mixed_endings_never_meets_a_beat_or_a_cancel_in_a_circle(fleet):
    for _ in range(15):
        fleet.enqueue(40)
        jobs = fleet.claim(40)
        turn = [Finish(job, DONE if place % 2 else DEAD) for place, job in enumerate(reversed(jobs))]
        with ThreadPoolExecutor(3) as threads:
            work = [
                threads.submit(fleet.run, ops.finish(turn, now=fleet.now)),
                threads.submit(fleet.run, ops.extend(map(held, jobs), now=fleet.now)),
                threads.submit(fleet.run, ops.cancel([job.id for job in jobs], now=fleet.now)),
            ]
        assert set(work[0].result().values()) == {"recorded"}
    fleet.driver.close()
    [[deadlocks]] = fleet.query("select deadlocks from pg_stat_database where datname = current_database()")
    assert deadlocks == 0


# Claims


def test_j08_a_repeated_claim_waits_for_its_first_try_in_flight(fleet):
    fleet.enqueue(4, max_attempts=1)
    claim = ops.claim("default", limit=2, token=new_token(), worker="w1", now=fleet.now)
    with psycopg.connect(fleet.url) as lost, ThreadPoolExecutor(1) as threads:
        first = run_section(lost, claim)
        again = threads.submit(fleet.run, claim.again)
        while not fleet.query("select 1 from pg_locks where locktype = 'advisory' and not granted"):
            assert not again.done()
        lost.commit()
        assert [job.id for job in again.result(10)] == [row[0] for row in first]
    assert fleet.query("select count(*) from duly_job where state = 'running'") == [(2,)]


# Enqueue


def lose_every_answer(store: Store) -> None:
    if isinstance(store, D1Store):
        store.lose(lambda call: True)
        return

    def hook(point: Point) -> None:
        if (point.section, point.moment) == ("commit", "after"):
            raise (sqlite3 if store.kind == "sqlite" else psycopg).OperationalError("the connection broke")

    store.driver.hook = hook


@pytest.mark.parametrize("end", [DONE, DEAD])
@pytest.mark.parametrize("key", [None, "k"])
def test_j01_an_enqueue_without_an_answer_raises_with_the_operation_to_repeat(store, key, end):
    store.driver._pauses = ()
    lose_every_answer(store)
    with pytest.raises(AnswerLost) as lost:
        store.run(ops.enqueue(Terms("work"), [NewJob(new_id(), "{}", key=key)], now=store.now))
    store.driver.hook = None
    if isinstance(store, D1Store):
        store.lose(None)
    store.finish(*store.claim(), end)
    store.run(lost.value.again)
    assert store.query("select (select count(*) from duly_job), (select count(*) from duly_done)") == [(0, 1)]


@pytest.mark.parametrize("key", [None, "k"])
def test_j01_an_enqueue_repeated_while_its_job_is_being_finished_adds_nothing(fleet, key):
    """The repetition waits for the finish, and only its next statement can see what that left in duly_done."""
    op = ops.enqueue(Terms("work"), [NewJob(new_id(), "{}", key=key)], now=fleet.now)
    fleet.run(op)
    [job] = fleet.claim()
    with psycopg.connect(fleet.url) as worker, ThreadPoolExecutor(1) as threads:
        run_section(worker, ops.finish([Finish(job, DEAD)], now=fleet.now))
        again = threads.submit(fleet.run, op.again)
        while not fleet.query("select 1 from pg_locks where not granted"):
            assert not again.done()
        worker.commit()
        assert [answer.id for answer in again.result(10)] == [job.id]
    assert fleet.query("select (select count(*) from duly_job), (select count(*) from duly_key)") == [(0, 0)]


def test_k01_a_key_that_a_database_would_cut_is_refused(store):
    before = store.snapshot()
    for key in ("a\x00b", "\ud800", "", "x" * 513):
        with pytest.raises(ConfigError, match="key= is"):
            store.enqueue_key(key)
    assert store.snapshot() == before


@pytest.mark.parametrize(
    "terms",
    [
        {"priority": 2**31}, {"max_attempts": 0}, {"lease_ms": 0}, {"lease_ms": 2**31}, {"keep_ms": -1},
        {"delay_ms": -1}, {"queue": ""}, {"task": "a\x00"}, {"task": "\ud800"}, {"due_at": 2**53},
    ],
)  # fmt: skip
def test_j05_terms_that_no_store_could_keep_are_refused_before_anything_is_written(store, terms):
    store.enqueue()  # on terms that are right, which are not looked at again
    before = store.snapshot()
    with pytest.raises(ConfigError, match=next(iter(terms))):
        store.enqueue(**terms)
    assert store.snapshot() == before


def test_j25_invalid_json_is_refused_at_every_entry(store):
    store.dead()
    [job] = store.enqueue() and store.claim()
    before = store.snapshot()
    for wrong in ("{not json", "", "sent", "{} {}"):
        with pytest.raises(PayloadError, match="is not JSON"):
            store.enqueue(payload=wrong)
        with pytest.raises(PayloadError, match="is not JSON"):
            store.succeed(job, result=wrong)
        with pytest.raises(PayloadError, match="is not JSON"):
            ops.replay([Replay(new_id(), new_id(), payload=wrong)])
    assert store.snapshot() == before


def test_j25_a_row_broken_by_hand_does_not_hide_the_others(store):
    ids = store.enqueue(2)
    store.query("update duly_job set payload = '{oops' where id = ?", ids[0])
    assert [job.payload for job in store.run(ops.listing(now=store.now))] == [{"n": 1}, "{oops"]


def test_r05_a_replay_takes_no_key_and_no_payload_that_an_enqueue_would_refuse():
    with pytest.raises(ConfigError, match="NUL"):
        ops.replay([Replay(new_id(), new_id(), key="a\x00b")])
    with pytest.raises(PayloadTooLarge):
        ops.replay([Replay(new_id(), new_id(), payload=f'"{"x" * 96_000}"')])


def test_j06_a_negative_claim_and_an_invalid_id_are_refused(store):
    store.enqueue()
    with pytest.raises(ConfigError, match="0 or more"):
        store.claim(-1)
    for wrong in ("my-id", new_id().upper()):
        with pytest.raises(ConfigError, match="a UUID in lower case"):
            store.run(ops.enqueue(Terms("work"), [NewJob(wrong, "{}")]))


def test_k09_an_enqueue_that_waits_for_the_callers_own_transaction_ends_with_the_remedy(fleet, monkeypatch):
    monkeypatch.setattr(postgres, "LOCK_TIMEOUT", "set local lock_timeout = '100ms'")
    op = ops.enqueue(Terms("work"), [NewJob(new_id(), "{}", key="k")], now=fleet.now)
    with psycopg.connect(fleet.url) as theirs:
        caller.run(theirs, op)
        with pytest.raises(StoreUnavailable, match=r"pass it as `conn=`"):
            fleet.enqueue_key("k")
        theirs.rollback()


# The caller's connection


def half(conn: Any) -> None:
    with pytest.raises((sqlite3.IntegrityError, sqlalchemy.exc.IntegrityError)):
        caller.run(conn, spoiled(ops.enqueue(Terms("work"), [NewJob(new_id(), "{}", key="k")])))


def test_j02_a_caller_that_continues_after_a_refused_enqueue_commits_none_of_it(file):
    conn = sqlite3.connect(file.path)
    conn.execute("insert into duly_meta values ('mine', '1')")
    half(conn)
    conn.commit()
    conn.close()
    engine = sqlalchemy.create_engine(f"sqlite:///{file.path}")
    with engine.connect() as theirs:
        half(theirs)
        theirs.exec_driver_sql("insert into duly_meta values ('theirs', '1')")
        theirs.commit()
    engine.dispose()
    assert file.query("select name from duly_meta where name in ('mine', 'theirs')") == [("mine",), ("theirs",)]
    assert file.query("select count(*) from duly_key") == [(0,)]
    assert not file.enqueue_key("k").deduplicated


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_j02_an_sqlalchemy_connection_that_commits_every_statement_is_refused(kind, request, tmp_path):
    if kind == "sqlite":
        url = f"sqlite:///{tmp_path / 'a.db'}"
    else:
        url = request.getfixturevalue("postgres_url").replace("postgresql://", "postgresql+psycopg://")
    engine = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as conn, pytest.raises(ConfigError, match="AUTOCOMMIT"):
        caller.run(conn, ops.clock())
    engine.dispose()


def test_j02_a_psycopg_connection_in_pipeline_mode_is_refused(fleet):
    with psycopg.connect(fleet.url) as conn, conn.pipeline(), pytest.raises(ConfigError, match="pipeline"):
        caller.run(conn, ops.clock())


def test_j02_a_cursor_is_no_connection(file):
    conn = sqlite3.connect(file.path)
    with pytest.raises(ConfigError, match="which duly does not know"):
        caller.run(conn.cursor(), ops.clock())
    conn.close()


def test_j09_a_finish_on_the_callers_connection_returns_lost(file):
    file.enqueue()
    [job] = file.claim()
    stale = Finish(job, DONE)
    file.succeed(job)
    with sqlite3.connect(file.path) as conn:
        assert caller.run(conn, ops.finish([stale], borrowed=True)) == {job.id: "already"}
        with pytest.raises(AssertionError, match="may have run another statement since"):
            caller.run(conn, ops.finish([stale]))  # meant for a connection of our own
    conn.close()


# The same thing twice in one operation


@pytest.mark.parametrize("keys", [None, ["one", "two"]], ids=["plain", "keyed"])
@pytest.mark.parametrize("keep_ms", [0, 1])
def test_j09_a_stale_token_ends_no_job_of_any_keep(store, keep_ms, keys):
    if isinstance(store, D1Store):
        store.lose(None)  # a keyless job that leaves nothing is never enqueued twice by itself
    if keys is None:
        ids = store.enqueue(2, keep_ms=keep_ms)
    else:
        ids = [store.enqueue_key(key, keep_ms=keep_ms).id for key in keys]
    stale, other = store.claim(2)
    store.now += 31_000
    [seen, _] = store.run(ops.expired_leases(now=store.now))
    assert seen.id == stale.id
    store.run(ops.rescue([seen], now=store.now))
    store.claim(alone=True)
    before = store.snapshot()
    assert store.succeed(stale) == "lost"
    assert store.snapshot() == before
    assert store.succeed(other) == "recorded"
    assert (store.get(ids[1]) is None) == (keep_ms == 0)


@pytest.mark.parametrize("way", ["plain", "keyed", "batched"])
def test_j09_of_ends_that_are_counted_only_the_one_that_lost_its_lease_is_lost(store, way):
    if way == "keyed":
        ids = [store.enqueue_key(key).id for key in ("one", "two", "three")]
    elif way == "batched":
        batch_id = new_id()
        store.query("insert into duly_batch (id, name, created_at, open) values (?, 'b', ?, 3)", batch_id, store.now)
        ids = store.enqueue(3, batch_id=batch_id)
    else:
        ids = store.enqueue(3)
    stale, *others = store.claim(3)
    store.now += 31_000
    [seen, *_] = store.run(ops.expired_leases(now=store.now))
    assert seen.id == stale.id == ids[0]
    store.run(ops.rescue([seen], now=store.now))
    verdicts = store.run(ops.finish([Finish(job, DONE) for job in (stale, *others)], now=store.now))
    assert verdicts == {ids[0]: "lost", ids[1]: "already", ids[2]: "already"}
    assert [store.state(job_id) for job_id in ids] == ["ready", "succeeded", "succeeded"]
    if way == "batched":
        assert store.query("select open, succeeded from duly_batch") == [(1, 2)]


def test_j09_one_job_named_twice_is_finished_once(store):
    ids = store.enqueue(3)
    first, second, third = store.claim(3)
    finishes = [Finish(first, DONE), Finish(first, DEAD), Finish(second, DEAD), Finish(second, DEAD)]
    answer = store.run(ops.finish([*finishes, Finish(third, DONE), Finish(third, DONE)], now=store.now))
    assert set(answer) == set(ids)
    assert [store.state(job_id) for job_id in ids] == ["succeeded", "dead", "succeeded"]


def test_j17_one_job_named_twice_is_cancelled_once(store):
    [job_id] = store.enqueue()
    assert store.run(ops.cancel([job_id, job_id], now=store.now)) == {job_id: "cancelled"}


def test_r05_one_dead_job_named_twice_is_replayed_once(store):
    [dead] = store.dead()
    store.run(ops.replay([Replay(dead, new_id()), Replay(dead, new_id())], by="ann", why="twice", now=store.now))
    assert store.query("select count(*) from duly_job") == [(1,)]


def test_r09_a_resolved_job_is_replayed_only_with_force(store):
    [dead] = store.dead()
    store.run(ops.resolve([dead], by="ann", why="paid by hand", now=store.now))
    [refused] = store.run(ops.replay([Replay(dead, new_id())], by="bob", why="again", now=store.now))
    assert (refused.new_id, refused.state) == (None, "dead")
    [forced] = store.run(ops.replay([Replay(dead, new_id(), force=True)], by="bob", why="again", now=store.now))
    assert store.state(forced.new_id) == "ready"


# Odd texts and ids


def test_r04_no_text_of_an_ending_keeps_it_from_being_recorded(store):
    [job_id] = store.enqueue()
    [job] = store.claim()
    odd = "\x00\ud800"
    change = Change(State.DEAD, reason=odd, error=Failure(f"E{odd}", odd, odd))
    assert store.finish(job, change) in ("recorded", "already")
    assert store.get(job_id).reason == "\\u0000\\ud800"


def test_r04_an_ending_that_the_database_refuses_for_its_data_is_sent_once_more_bare(tmp_path):
    store = D1Store(tmp_path / "d1.db")
    store.lose(None)
    [job_id] = store.enqueue()
    [job] = store.claim()
    too_large = "x" * 2_000_001  # more than D1 takes
    change = Change(State.DEAD, error=Failure("ValueError", "no", too_large))
    assert store.finish(job, change) == "recorded"
    assert [attempt.error for attempt in store.run(ops.attempts(job_id))] == ["ValueError"]
    store.close()


def test_an_id_is_found_in_any_spelling_and_an_invalid_one_matches_no_job(store):
    [job_id] = store.enqueue()
    assert store.get(job_id.upper()).id == job_id
    for wrong in ("nope", "", "0" * 40):
        assert store.get(wrong) is None
        assert store.run(ops.cancel([wrong], now=store.now)) == {}
        assert store.run(ops.attempts(wrong)) == []
        assert store.run(ops.why(wrong)) is None
        assert [job.id for job in store.run(ops.dead_list(after=wrong))] == []


# SQLite


def test_j01_a_reader_that_stays_does_not_stop_writers(file, monkeypatch):
    monkeypatch.setattr(checkpoint, "CHECKPOINT_BYTES", 1)
    monkeypatch.setattr(checkpoint, "CHECKPOINT_SECONDS", 0.2)
    reader = sqlite3.connect(file.path, isolation_level=None)
    reader.execute("begin")
    reader.execute("select count(*) from duly_job").fetchall()
    for _ in range(20):
        file.enqueue()  # each would fail after five seconds of a locked file
    reader.execute("rollback")
    reader.close()
    assert file.query("select count(*) from duly_job") == [(20,)]


def test_j01_after_a_failed_checkpoint_all_processes_pause_checkpoints(file, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint, "CHECKPOINT_BYTES", 1)
    monkeypatch.setattr(checkpoint, "CHECKPOINT_SECONDS", 0.05)
    reader = sqlite3.connect(file.path, isolation_level=None)
    reader.execute("begin")
    reader.execute("select count(*) from duly_job").fetchall()
    with caplog.at_level("INFO", "duly.store.sqlite"):
        file.enqueue()
        for _ in range(500):
            if "sqlite.checkpoint_busy" in caplog.messages:
                break
            threading.Event().wait(0.01)
    log = checkpoint.Log(file.driver.wal)
    with log.mine() as mine:
        assert not mine
    file.close()  # which does not wait until it has rested
    with log.mine() as mine:
        assert mine
    log.close()
    reader.close()


def test_j01_a_writer_waits_while_another_process_checkpoints(file):
    file.enqueue()
    log = checkpoint.Log(file.driver.wal)
    with ThreadPoolExecutor(1) as threads, log.mine():
        written = threads.submit(file.enqueue)
        with pytest.raises(TimeoutError):
            written.result(0.2)
        log.rest()  # a reader was in its way
        assert written.result(3)
    log.close()
    assert file.query("select count(*) from duly_job") == [(2,)]


def test_j01_a_writer_with_a_new_connection_waits_for_the_current_wal(file):
    """Its connection was the only one: SQLite removed the log when it was closed, and made another."""
    file.enqueue()
    writer = file.driver._writer
    while file.driver._readers:
        file.driver._readers.pop().close()
    writer._conn.close()
    with pytest.raises(StoreError, match="closed database"):
        file.enqueue()
    file.enqueue()
    log = checkpoint.Log(file.driver.wal)
    with log.mine() as mine:
        assert mine
        assert writer._log.is_taken()
    log.close()


def test_j01_a_wal_is_overwritten_and_its_file_does_not_grow(file, emptied, monkeypatch):
    monkeypatch.setattr(checkpoint, "CHECKPOINT_BYTES", 300_000)
    sizes, salts, ids = [], set(), []
    for _ in range(5):
        ids += enqueued_until_emptied(file, emptied)
        sizes.append(os.stat(file.driver.wal).st_size)
        salts.add(salt_of(file.driver.wal))
        assert not checkpoint.is_long(file.driver.wal)  # though nobody has written since
    assert len(salts) == 5
    assert len(set(sizes)) == 1
    assert 300_000 < sizes[0] < 300_000 + 2 * checkpoint.ROOM_BYTES
    assert file.query("select id from duly_job order by id") == [(job_id,) for job_id in sorted(ids)]
    assert file.query("pragma integrity_check") == [("ok",)]


def test_j01_the_file_of_a_new_log_grows_by_many_commits_at_a_time(file):
    ids, sizes = [], []
    for _ in range(80):
        ids += file.enqueue()
        sizes.append(os.stat(file.driver.wal).st_size)
    grown = sorted(set(sizes))
    assert {after - before for before, after in pairwise(grown)} == {checkpoint.ROOM_BYTES}
    assert 2 <= len(grown) <= 5
    assert checkpoint.length(file.driver.wal) < sizes[-1]
    # Where nobody closed the file, it is read from the log: what lies behind is nothing.
    with sqlite3.connect(f"file:{copied(file)}?mode=rw", uri=True) as conn:
        assert conn.execute("select id from duly_job order by id").fetchall() == [(job_id,) for job_id in sorted(ids)]
        assert conn.execute("pragma integrity_check").fetchall() == [("ok",)]
    conn.close()


def test_j01_a_commit_does_not_stat_the_wal(file, monkeypatch):
    """After such a question Linux dates the next write exactly, which took a fifth of the time of a lone enqueue."""
    file.enqueue()
    asked = []
    for name in ("stat", "lstat", "fstat"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *of, real=real, **how: asked.append(of) or real(*of, **how))
    file.enqueue()
    assert asked == []
    os.stat(file.path)
    assert asked == [(file.path,)]


def test_j01_the_wal_is_extended_only_behind_the_writes_of_others(file, monkeypatch):
    """Two writers in turns, each of whom makes room at every commit."""
    monkeypatch.setattr(checkpoint, "ROOM_BYTES", 5000)
    monkeypatch.setattr(checkpoint.Log, "_has_little_room", lambda log, size: True)
    other = SQLiteStore(file.path)
    ids = [job_id for _ in range(40) for store in (file, other) for job_id in store.enqueue()]
    other.close()
    with sqlite3.connect(f"file:{copied(file)}?mode=rw", uri=True) as conn:
        assert conn.execute("select id from duly_job order by id").fetchall() == [(job_id,) for job_id in sorted(ids)]
        assert conn.execute("pragma integrity_check").fetchall() == [("ok",)]
    conn.close()


def test_j01_the_wal_is_extended_under_the_lock_of_writers(file, monkeypatch):
    """Another may write behind the end of the file until then."""
    locked = []

    def look(path: str, count: int, *, onto: os.stat_result) -> None:
        with closing(sqlite3.connect(file.path, timeout=0, isolation_level=None)) as conn:
            try:
                conn.execute("begin immediate")
            except sqlite3.OperationalError:
                locked.append(path)

    monkeypatch.setattr(checkpoint, "_append_zeros", look)
    monkeypatch.setattr(checkpoint.Log, "_has_little_room", lambda log, size: True)
    file.enqueue()
    assert locked == [file.driver.wal]


def test_j01_a_wal_that_cannot_be_extended_is_still_written(file, monkeypatch):
    def full(path: str, count: int, *, onto: os.stat_result) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(checkpoint, "_append_zeros", full)
    [job_id] = file.enqueue()
    assert file.state(job_id) == "ready"


def test_j01_a_replaced_wal_file_is_not_extended(file, tmp_path):
    file.enqueue()
    os.rename(file.driver.wal, tmp_path / "moved-wal")
    Path(file.driver.wal).write_bytes(b"somebody else's")
    log = checkpoint.Log(file.driver.wal)
    try:
        onto = os.stat(tmp_path / "moved-wal")
        checkpoint._append_zeros(file.driver.wal, 1000, onto=onto)
        assert Path(file.driver.wal).read_bytes() == b"somebody else's"
        checkpoint._append_zeros(file.driver.wal, 1000, onto=os.stat(file.driver.wal))
        assert os.stat(file.driver.wal).st_size > 1000
    finally:
        log.close()
        os.replace(tmp_path / "moved-wal", file.driver.wal)


def test_j01_an_empty_wal_does_not_grow_by_writes_without_effect(tmp_path):
    SQLiteStore(tmp_path / "duly.db").close()
    store = SQLiteStore(tmp_path / "duly.db")
    for _ in range(20):
        assert store.claim() == []
    assert os.stat(store.driver.wal).st_size <= checkpoint.ROOM_BYTES + 5000
    store.close()


def copied(store: SQLiteStore) -> Path:
    """Copy a file and its log as they are, as after a crash."""
    target = store.path.with_name("copied.db")
    shutil.copy(store.path, target)
    shutil.copy(store.driver.wal, f"{target}-wal")
    return target


def test_j01_a_wal_that_is_too_long_is_truncated(file, emptied, monkeypatch):
    monkeypatch.setattr(checkpoint, "MOST_KEPT_BYTES", 300_000)
    while os.stat(file.driver.wal).st_size <= 300_000:  # as if a reader had stayed
        file.enqueue(20)
    monkeypatch.setattr(checkpoint, "CHECKPOINT_BYTES", 100_000)
    file.enqueue()
    emptied.get(timeout=10)
    assert os.stat(file.driver.wal).st_size == 0
    assert file.query("pragma integrity_check") == [("ok",)]


def test_j01_after_a_checkpoint_of_one_writer_the_other_restarts_the_wal_too(file, emptied, monkeypatch):
    monkeypatch.setattr(checkpoint, "CHECKPOINT_BYTES", 300_000)
    other = SQLiteStore(file.path)
    ids = []
    for one, another in ((file, other), (other, file), (file, other)):
        ids += enqueued_until_emptied(one, emptied)
        size, begun = os.stat(file.driver.wal).st_size, checkpoint.length(file.driver.wal)
        ids += another.enqueue()
        assert begun < checkpoint.length(file.driver.wal) < 100_000
        assert os.stat(file.driver.wal).st_size == size
    assert emptied.empty()  # nobody emptied what was empty
    other.close()
    assert file.query("select id from duly_job order by id") == [(job_id,) for job_id in sorted(ids)]
    assert file.query("pragma integrity_check") == [("ok",)]


def test_j01_a_wal_locked_by_another_writer_is_restarted_by_that_writer(file):
    with closing(file.driver.connect(busy_s=0)) as conn, closing(file.driver.connect()) as theirs:
        theirs.execute("create table theirs (number)")
        conn.execute("pragma wal_checkpoint(restart)")
        salt = salt_of(file.driver.wal)
        theirs.execute("begin immediate")
        sqlite_writer.begin_anew(conn)
        theirs.execute("insert into theirs values (1)")
        theirs.execute("commit")
        assert salt_of(file.driver.wal) != salt
        theirs.execute("drop table duly_meta")
        with pytest.raises(sqlite3.OperationalError, match="reindex"):
            sqlite_writer.begin_anew(conn)


def enqueued_until_emptied(store, emptied):
    """Enqueue one by one until a log has been emptied, and return the ids."""
    ids = []
    while emptied.empty() and not checkpoint.is_long(store.driver.wal):
        ids += store.enqueue()
        assert len(ids) < 500
    emptied.get(timeout=10)
    return ids


def salt_of(path):
    return Path(path).read_bytes()[16:24]


@pytest.mark.parametrize("page_bytes", [512, 4096, 65536])
def test_j01_the_length_of_a_wal_counts_from_its_last_restart(tmp_path, monkeypatch, page_bytes):
    monkeypatch.setattr(checkpoint, "CHECKPOINT_BYTES", 1_000_000)
    path = str(tmp_path / "theirs.db-wal")
    conn = sqlite3.connect(tmp_path / "theirs.db", isolation_level=None)
    for pragma in (f"page_size = {page_bytes}", "journal_mode = wal", "wal_autocheckpoint = 0"):
        conn.execute(f"pragma {pragma}")
    conn.execute("create table theirs (data)")
    for _ in range(3):
        while not checkpoint.is_long(path):
            assert checkpoint.length(path) <= 1_000_000
            conn.execute("insert into theirs values (zeroblob(10000))")
        _, frames, _ = conn.execute("pragma wal_checkpoint(restart)").fetchone()
        assert checkpoint.length(path) == frames * (page_bytes + 24) > 1_000_000
        conn.execute("insert into theirs values (zeroblob(10000))")
        assert 10_000 < checkpoint.length(path) < 300_000
        assert os.stat(path).st_size > 1_000_000
        assert not checkpoint.is_long(path)
    conn.close()


@pytest.mark.parametrize("content", [None, b"", b"\x37\x7f\x06\x82", bytes(20), bytes(300_000)])
def test_j01_an_empty_wal_has_no_length(tmp_path, content):
    path = tmp_path / "duly.db-wal"
    if content is not None:
        path.write_bytes(content)
    log = checkpoint.Log(str(path))
    assert not log.is_long()
    assert not checkpoint.is_long(str(path))
    assert checkpoint.length(str(path)) == 0
    log.close()


def test_j01_a_write_is_not_refused_as_locked_while_others_get_the_lock(tmp_path, monkeypatch):
    store = SQLiteStore(tmp_path / "duly.db")
    driver = sqlite.SQLiteDriver(store.path, busy_s=0.2)
    driver.run(ops.leave("nobody"))
    enqueue_while_another_commits_again_and_again(driver, monkeypatch)
    assert store.query("select count(*) from duly_job") == [(1,)]
    store.close()


def test_j01_a_file_is_prepared_while_others_get_the_lock(tmp_path, monkeypatch):
    """Eight processes open a new file at once: the last to find no tables in it waits for all that the others write."""
    driver = sqlite.SQLiteDriver(tmp_path / "duly.db", busy_s=0.2)
    enqueue_while_another_commits_again_and_again(driver, monkeypatch)


@pytest.mark.parametrize("ends", [True, False], ids=["which_ends", "which_does_not_end"])
@pytest.mark.slow
def test_j01_a_write_waits_for_a_checkpoint_of_another_process_that_takes_long(tmp_path, ends):
    driver = sqlite.SQLiteDriver(tmp_path / "duly.db", busy_s=0.2)
    driver.run(ops.leave("nobody"))
    theirs = sqlite3.connect(driver.path, isolation_level=None, check_same_thread=False)
    log = os.open(driver.wal, os.O_RDONLY)
    with ThreadPoolExecutor(1) as threads, mock.patch.object(checkpoint, "CHECKPOINT_SECONDS", 0.1):
        theirs.execute("begin immediate")
        fcntl.flock(log, fcntl.LOCK_EX)
        written = threads.submit(driver.run, ops.enqueue(Terms("work"), [NewJob(new_id(), "{}")]))
        if ends:
            with pytest.raises(TimeoutError):
                written.result(0.6)  # twice as long as a writer waits for anything else
            theirs.execute("commit")
            assert written.result(10)
        else:
            with pytest.raises(StoreUnavailable, match="is locked"):
                written.result(10)
    os.close(log)
    theirs.close()
    driver.close()


def enqueue_while_another_commits_again_and_again(driver, monkeypatch):
    monkeypatch.setattr(sqlite_connection, "LOCK_LOOK_SECONDS", (0.05, 0.05))  # so that it does not come between them
    theirs = sqlite3.connect(driver.path, isolation_level=None, check_same_thread=False)
    theirs.execute("pragma journal_mode = wal")
    theirs.execute("create table theirs (number)")
    theirs.execute("begin immediate")
    with ThreadPoolExecutor(1) as threads:
        written = threads.submit(driver.run, ops.enqueue(Terms("work"), [NewJob(new_id(), "{}")]))
        for number in range(30):  # for three times as long as a writer waits while nobody commits
            threading.Event().wait(0.02)
            theirs.execute("insert into theirs values (?)", (number,))
            theirs.execute("commit")
            theirs.execute("begin immediate")
        theirs.execute("commit")
        assert written.result(10)
    theirs.close()
    driver.close()


def test_j01_a_fork_waits_until_no_read_is_under_way(file):
    reading, go_on, forked = threading.Event(), threading.Event(), threading.Event()

    def read() -> None:
        with file.driver._reader():
            reading.set()
            go_on.wait(10)

    def fork() -> None:
        file.driver.before_fork()
        forked.set()
        file.driver.after_fork()

    with ThreadPoolExecutor(2) as threads:
        threads.submit(read)
        reading.wait(10)
        threads.submit(fork)
        assert not forked.wait(0.1)
        go_on.set()
        assert forked.wait(10)
    assert file.enqueue()


@pytest.mark.slow
def test_j01_reads_in_threads_while_the_file_is_closed_repeatedly_leave_no_reader(file):
    ids = file.enqueue(1)
    stop = threading.Event()

    def read(_: int) -> int:
        return sum(len(file.driver.run(ops.listing())) for _ in range(150))

    def close() -> None:
        while not stop.is_set():
            file.driver.close()

    with ThreadPoolExecutor(7) as threads:
        closing = threads.submit(close)
        counts = list(threads.map(read, range(6)))
        stop.set()
        closing.result(10)
    assert counts == [150] * 6
    file.driver.before_fork()  # would wait for ever for a reader that was miscounted
    file.driver.after_fork()
    assert file.state(ids[0]) == "ready"


def test_j01_after_any_failure_of_the_writer_the_next_write_succeeds(file):
    failures = [KeyboardInterrupt(), SystemExit(1), RuntimeError("a bug")]

    def hook(point: Point) -> None:
        if point.op == "enqueue" and point.moment == "after" and failures:
            raise failures.pop()

    file.driver.hook = hook
    for _ in range(3):
        with pytest.raises((KeyboardInterrupt, SystemExit, RuntimeError)):
            file.enqueue()
    file.enqueue()
    assert file.query("select count(*) from duly_job") == [(1,)]


@pytest.mark.parametrize("name", [":memory:", "."])
def test_j01_a_path_that_is_no_file_is_refused(tmp_path, name):
    driver = sqlite.SQLiteDriver(tmp_path / name)
    with pytest.raises(ConfigError, match=r"jobs\.db|is a folder"):
        driver.run(ops.clock())
    assert list(tmp_path.iterdir()) == []


def test_j22_the_wal_of_a_linked_file_is_kept_short(tmp_path, emptied, monkeypatch):
    monkeypatch.setattr(checkpoint, "CHECKPOINT_BYTES", 50_000)
    (tmp_path / "real").mkdir()
    os.symlink(tmp_path / "real" / "duly.db", tmp_path / "link.db")
    store = SQLiteStore(tmp_path / "link.db")
    store.enqueue()  # behind the tables, which are longer than that
    emptied.get(timeout=10)
    assert not checkpoint.is_long(str(tmp_path / "real" / "duly.db-wal"))
    store.close()


# PostgreSQL


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_j06_a_stricter_isolation_level_changes_nothing(fleet, level):
    fleet.query(f"alter database {fleet.url.rpartition('/')[2]} set default_transaction_isolation = '{level}'")
    ids = fleet.enqueue(200)
    fleet.driver.close()

    def work(_: int) -> list[str]:
        driver = PostgresDriver(fleet.url)
        done: list[str] = []
        while jobs := driver.run(ops.claim("default", limit=5, token=new_token(), worker="w", now=fleet.now)):
            driver.run(ops.finish([Finish(job, DONE) for job in jobs], now=fleet.now))
            done += [job.id for job in jobs]
        driver.close()
        return done

    with ThreadPoolExecutor(4) as threads:
        done = [job_id for share in threads.map(work, range(4)) for job_id in share]
    assert sorted(done) == sorted(ids)


def test_j25_a_refusal_does_not_quote_the_row_and_its_payload(fleet):
    with pytest.raises(StoreRefused) as refused:
        fleet.run(spoiled(ops.enqueue(Terms("work"), [NewJob(new_id(), '"a secret"')])))
    assert "secret" not in str(refused.value)


def test_j27_a_statement_cancelled_by_the_server_is_reported_as_not_written(fleet):
    [job_id] = fleet.enqueue()
    hurried = PostgresDriver(f"{fleet.url}?options=-c%20statement_timeout%3D100")
    with psycopg.connect(fleet.url) as theirs:
        theirs.execute("select id from duly.duly_job for update")
        with pytest.raises(StoreUnavailable, match="nothing was written"):
            hurried.run(ops.cancel([job_id]))
        theirs.rollback()
    hurried.close()
    assert fleet.state(job_id) == "ready"


@pytest.mark.parametrize("when", ["before it is opened", "while it is open"])
def test_j22_a_queue_that_was_analyzed_while_it_was_nearly_empty_is_not_read_whole(file, when):
    [job] = file.enqueue()
    open_before = file.driver.connect()
    theirs = sqlite3.connect(file.path)
    theirs.execute("analyze")
    assert theirs.execute("select count(*) from sqlite_stat1 where tbl = 'duly_job'").fetchone()[0] > 0
    theirs.close()
    conn = open_before if when == "while it is open" else file.driver.connect()
    conn.execute("select count(*) from duly_job").fetchall()  # sees what has become of the schema
    [take, held] = spell("sqlite", "claim", "named")
    op = ops.claim("default", limit=1, token=1, worker="w")
    for statement in (take, held):
        plan = [row[3] for row in conn.execute("explain query plan " + statement.sql, op.params)]
        assert "SCAN duly_job" not in plan, plan
    for one in {conn, open_before}:
        one.close()
    assert [claimed.id for claimed in file.claim(1)] == [job]
