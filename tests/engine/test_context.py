"""What a handler holds of its job: progress, heartbeats, a lease that can be lost, a commit of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from duly import Ctx, Duly, SyncCtx
from duly.app.lease import current
from duly.errors import ConfigError, LeaseLost, StoreUnavailable
from duly.model import State
from duly.rules import backoff
from duly.store import ops
from duly.store.driver import Point
from tests.engine.conftest import HOLDABLE, found, steal, work, work_until

KILLED = 42
# Processes to kill, forked from one that has imported this module: an import takes longer than what they do.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])


def test_a_handler_knows_its_job(app: Duly) -> None:
    seen: list[Any] = []

    @app.task(queue="mail", max_attempts=3)
    def look(ctx: SyncCtx, number: int) -> None:
        seen.append((ctx.job_id, ctx.task, ctx.queue, ctx.attempt, ctx.max_attempts, ctx.replay_count, ctx.cancelled))
        seen.append((ctx.envelope.subject, ctx.correlation_id, ctx.due_at))

    job = look.using(subject="s").enqueue(1)
    work(app)
    due_at = found(app, job.id).due_at
    assert due_at is not None
    assert seen[0] == (job.id, "look", "mail", 1, 3, 0, False)
    assert seen[1][:2] == ("s", job.id)
    assert round(seen[1][2].timestamp() * 1000) == due_at


def test_the_repr_of_a_lease_or_a_call_hides_the_arguments(app: Duly) -> None:
    seen: list[Any] = []

    @app.task
    def look(password: str) -> None:
        seen.append(current.get())

    seen.append(look.call("hunter2"))
    look.enqueue("hunter2")
    work(app)
    assert len(seen) == 2
    for one in seen:
        assert "hunter2" not in f"{one!r} {one.__rich_repr__()}"


# How far it is, and that it lives (J21)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_j21_progress_is_clamped_and_readable_by_anyone(app: Duly, kind: str) -> None:
    seen: list[Any] = []

    def look(job_id: str) -> None:
        record = found(app, job_id)
        seen.append((record.progress, record.progress_message))

    def parse(ctx: SyncCtx) -> None:
        for percent, message in STEPS:
            ctx.progress(percent, message)
            look(ctx.job_id)

    async def aparse(ctx: Ctx) -> None:
        for percent, message in STEPS:
            await ctx.progress(percent, message)
            look(ctx.job_id)

    task: Any = app.task(parse) if kind == "sync" else app.task(aparse)
    job = task.enqueue()
    work(app)
    assert seen == [(40, "parsing"), (0, None), (100, "a\\u0000b"), (0, "odd"), (99.5, "nearly")]
    assert found(app, job.id).progress == 99.5


STEPS = ((40, "parsing"), (-5, None), (250.0, "a\x00b"), (float("nan"), "odd"), (99.5, "nearly"))


def test_j21_progress_does_not_extend_the_lease_and_a_heartbeat_is_apart_from_it(app: Duly) -> None:
    seen: list[Any] = []

    @app.task(lease="30s")
    def parse(ctx: SyncCtx) -> None:
        records = [found(app, ctx.job_id)]
        time.sleep(0.02)
        ctx.progress(10)
        records.append(found(app, ctx.job_id))
        ctx.heartbeat()
        records.append(found(app, ctx.job_id))
        seen.extend((record.lease_until, record.heartbeat_at) for record in records)

    parse.enqueue()
    work(app)
    assert len({lease_until for lease_until, _ in seen}) == 1
    assert [beat is None for _, beat in seen] == [True, True, False]
    assert abs(seen[2][1] - app.driver.run(ops.clock())) < 30_000


@HOLDABLE
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_j21_a_report_that_the_database_cannot_take_now_fails_no_handler(app: Duly, kind: str) -> None:
    def away(point: Point) -> None:
        if point.op in ("progress", "heartbeat"):
            raise StoreUnavailable(f"{point.op}: away")

    def parse(ctx: SyncCtx) -> str:
        ctx.progress(50)
        ctx.heartbeat()
        return "done"

    async def aparse(ctx: Ctx) -> str:
        await ctx.progress(50)
        await ctx.heartbeat()
        return "done"

    task = app.task(max_attempts=1)(parse) if kind == "sync" else app.task(max_attempts=1)(aparse)
    job = task.enqueue()
    app.driver.hook = away
    work(app)
    app.driver.hook = None
    record = found(app, job.id)
    assert (record.state, record.result, record.progress) == (State.SUCCEEDED, "done", None)


def test_j21_an_async_heartbeat_is_written_too(app: Duly) -> None:
    @app.task
    async def parse(ctx: Ctx) -> bool:
        await ctx.heartbeat()
        return found(app, ctx.job_id).heartbeat_at is not None

    job = parse.enqueue()
    work(app)
    assert found(app, job.id).result is True


# J09: a lease that is lost


@pytest.mark.parametrize("call", ["progress", "heartbeat"])
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.slow
def test_j09_a_call_after_the_lease_was_taken_raises_and_writes_nothing(app: Duly, call: str, kind: str) -> None:
    raised: list[BaseException] = []
    written: list[Any] = []

    def note(error: BaseException, ctx: Any) -> None:
        raised.append(error)
        record = found(app, ctx.job_id)
        written.append((record.progress, record.heartbeat_at))  # of whoever has it by now
        assert ctx.cancelled

    def zombie(ctx: SyncCtx) -> str:
        if ctx.attempt == 1:
            steal(app, ctx.job_id)
            try:
                ctx.progress(5) if call == "progress" else ctx.heartbeat()
            except LeaseLost as error:
                note(error, ctx)
                raise
        return f"attempt {ctx.attempt}"

    async def azombie(ctx: Ctx) -> str:
        if ctx.attempt == 1:
            steal(app, ctx.job_id)
            try:
                await (ctx.progress(5) if call == "progress" else ctx.heartbeat())
            except (LeaseLost, asyncio.CancelledError) as error:  # the worker may have told it already
                note(error, ctx)
                raise
        return f"attempt {ctx.attempt}"

    task: Any = app.task(lease="30s")(zombie if kind == "sync" else azombie)
    job = task.enqueue()
    work_until(app, lambda: found(app, job.id).state.ended)
    [error] = raised
    if isinstance(error, LeaseLost):
        assert f"{task.name} {job.id}: the lease is lost" in str(error)
    else:
        assert kind == "async"
    assert written == [(None, None)]
    assert (found(app, job.id).state, found(app, job.id).result) == (State.SUCCEEDED, "attempt 2")


@pytest.mark.slow
def test_j09_the_result_of_a_handler_with_a_lost_lease_is_discarded(app: Duly) -> None:
    @app.task(lease="30s")
    def zombie(ctx: SyncCtx) -> str:
        if ctx.attempt == 1:
            steal(app, ctx.job_id)
        return f"attempt {ctx.attempt}"

    job = zombie.enqueue()
    work_until(app, lambda: found(app, job.id).state.ended)
    assert found(app, job.id).result == "attempt 2"


@pytest.mark.slow
def test_j09_children_are_refused_once_the_lease_is_known_to_be_lost(app: Duly) -> None:
    raised: list[BaseException] = []

    @app.task
    def child() -> None: ...

    @app.task(lease="30s")
    def zombie(ctx: SyncCtx) -> None:
        if ctx.attempt > 1:
            return
        steal(app, ctx.job_id)
        for call in (lambda: ctx.progress(1), child.enqueue, lambda: child.enqueue_many([child.call()])):
            try:
                call()
            except LeaseLost as error:
                raised.append(error)

    job = zombie.enqueue()
    work_until(app, lambda: found(app, job.id).state.ended)
    assert len(raised) == 3
    assert app.list(task="child") == []


# K08: the caller's own transaction


def connect(url: str) -> Any:
    return psycopg.connect(url) if url.startswith("postgresql") else sqlite3.connect(url)


@pytest.fixture
def orders(url: str, app: Duly) -> Iterator[Callable[[], list[str]]]:
    """A table of the business in the same database: reads which jobs have an order."""
    app.driver.run(ops.clock())
    conn = connect(url)
    conn.execute("create table orders (job text)")
    conn.commit()

    def read() -> list[str]:
        rows = conn.execute("select job from orders order by job").fetchall()
        conn.rollback()
        return [row[0] for row in rows]

    yield read
    conn.close()


def insert(conn: Any, job_id: str) -> None:
    mark = "%s" if isinstance(conn, psycopg.Connection) else "?"
    conn.execute(f"insert into orders values ({mark})", (job_id,))


@HOLDABLE
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_k08_the_order_and_the_finish_are_committed_together(app: Duly, url: str, orders: Any, kind: str) -> None:
    seen: list[State] = []

    def sell(ctx: SyncCtx) -> str:
        conn = connect(url)
        insert(conn, ctx.job_id)
        ctx.commit(conn, result={"sold": 1})
        seen.append(found(app, ctx.job_id).state)  # nothing is committed yet
        conn.commit()
        seen.append(found(app, ctx.job_id).state)
        conn.close()
        return "not this"

    async def asell(ctx: Ctx) -> str:
        conn = connect(url)
        insert(conn, ctx.job_id)
        await ctx.commit(conn, result={"sold": 1})
        seen.append(found(app, ctx.job_id).state)
        conn.commit()
        seen.append(found(app, ctx.job_id).state)
        conn.close()
        return "not this"

    task: Any = app.task(sell) if kind == "sync" else app.task(asell)
    job = task.enqueue()
    work(app)
    record = found(app, job.id)
    assert (record.state, record.result, record.attempt) == (State.SUCCEEDED, {"sold": 1}, 1)
    assert orders() == [job.id]
    assert seen == [State.RUNNING, State.SUCCEEDED]


@pytest.mark.parametrize("where", ["postgres"], indirect=True)
def test_k08_an_async_connection_is_awaited(app: Duly, url: str, orders: Any) -> None:
    @app.task(key="k")
    async def sell(ctx: Ctx) -> int:
        async with await psycopg.AsyncConnection.connect(url) as conn:
            await conn.execute("insert into orders values (%s)", (ctx.job_id,))
            await ctx.commit(conn, result=7)
        return 7

    job = sell.enqueue()
    work(app)
    assert (job.result(timeout=5), orders()) == (7, [job.id])
    assert sell.enqueue().result(timeout=0) == 7  # the key knows it too


@HOLDABLE
def test_k08_a_job_staged_and_not_committed_fails_with_the_reason(app: Duly, url: str, orders: Any) -> None:
    @app.task(max_attempts=2, backoff=[0])
    def sell(ctx: SyncCtx) -> None:
        conn = connect(url)
        insert(conn, ctx.job_id)
        ctx.commit(conn)
        if ctx.attempt == 1:
            conn.rollback()
        conn.close()  # on the second attempt: forgotten

    job = sell.enqueue()
    work_until(app, lambda: found(app, job.id).state.ended)
    record = found(app, job.id)
    assert (record.state, record.reason) == (State.DEAD, "its transaction was not committed")
    assert "called ctx.commit and returned, but the transaction was not committed" in (record.error or "")
    assert len(app.driver.run(ops.attempts(job.id))) == 2
    assert orders() == []


@HOLDABLE
def test_k08_a_transaction_left_open_holds_up_its_own_job_only(app: Duly, url: str, orders: Any) -> None:
    left: list[Any] = []
    done: list[str] = []

    @app.task(max_attempts=1)
    def sell(ctx: SyncCtx) -> None:
        conn = psycopg.connect(url) if url.startswith("postgresql") else sqlite3.connect(url, check_same_thread=False)
        insert(conn, ctx.job_id)
        ctx.commit(conn)
        left.append(conn)  # as a pool would: neither committed nor closed

    @app.task
    def other() -> None:
        done.append("other")

    def let_go() -> bool:
        if left and (len(done) == 20 or not url.startswith("postgresql")):
            left.pop().close()  # on SQLite nobody can write meanwhile
        return found(app, job.id).state.ended and len(done) == 20

    job = sell.using(priority=9).enqueue()
    other.enqueue_many(other.call() for _ in range(20))
    try:
        work_until(app, let_go, concurrency=2, seconds=10)
    finally:
        for conn in left:
            conn.close()
    assert (found(app, job.id).state, found(app, job.id).reason) == (State.DEAD, "its transaction was not committed")
    assert orders() == []


@HOLDABLE
def test_k08_a_rollback_with_an_exception_is_an_ordinary_failure(app: Duly, url: str, orders: Any) -> None:
    @app.task(max_attempts=2, backoff=[0])
    def sell(ctx: SyncCtx) -> None:
        conn = connect(url)
        try:
            insert(conn, ctx.job_id)
            ctx.commit(conn)
            if ctx.attempt == 1:
                raise ValueError("out of stock")
            conn.commit()
        finally:
            conn.close()

    job = sell.enqueue()
    work_until(app, lambda: found(app, job.id).state.ended)
    assert (found(app, job.id).state, orders()) == (State.SUCCEEDED, [job.id])
    [attempt] = app.driver.run(ops.attempts(job.id))
    assert attempt.error == "ValueError: out of stock"


@HOLDABLE
def test_k08_a_committed_success_stays_for_any_later_error(app: Duly, url: str, orders: Any) -> None:
    @app.task(max_attempts=1)
    def sell(ctx: SyncCtx) -> None:
        conn = connect(url)
        insert(conn, ctx.job_id)
        ctx.commit(conn, result=1)
        conn.commit()
        conn.close()
        raise ValueError("too late")

    job = sell.enqueue()
    work(app)
    assert (found(app, job.id).state, found(app, job.id).result, orders()) == (State.SUCCEEDED, 1, [job.id])
    assert app.driver.run(ops.attempts(job.id)) == []


@HOLDABLE
@pytest.mark.slow
def test_k08_a_lost_lease_raises_before_the_commit(app: Duly, url: str, orders: Any) -> None:
    raised: list[int] = []

    @app.task(lease="30s")
    def sell(ctx: SyncCtx) -> None:
        if ctx.attempt == 1:
            steal(app, ctx.job_id)
        conn = connect(url)
        try:
            insert(conn, ctx.job_id)
            ctx.commit(conn)
            conn.commit()
        except LeaseLost:
            raised.append(ctx.attempt)
            raise
        finally:
            conn.close()

    job = sell.enqueue()
    work_until(app, lambda: found(app, job.id).state.ended)
    assert (raised, orders(), found(app, job.id).attempt) == ([1], [job.id], 2)


def test_k08_outside_a_job_commit_raises() -> None:
    app = Duly("never-opened.db")

    @app.task
    def sell(ctx: SyncCtx) -> None:
        ctx.commit(None)

    with pytest.raises(ConfigError, match="called directly"):
        sell()


# Killed at every statement: the process below sells one order, and dies before its statement number `kill_at`


class Deadly:
    """Counts what is sent to a database, and ends the process before one of it."""

    def __init__(self, kill_at: int) -> None:
        self._left = kill_at

    def __call__(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            os._exit(KILLED)


class DeadlyConnection(psycopg.Connection[Any]):
    before: Callable[[], None] = staticmethod(lambda: None)

    def commit(self) -> None:
        self.before()
        super().commit()


class DeadlyCursor(psycopg.Cursor[Any]):
    def execute(self, *args: Any, **kwargs: Any) -> Any:
        self.connection.before()  # type: ignore[attr-defined]
        return super().execute(*args, **kwargs)


def deadly(url: str, kill_at: int) -> Any:
    before = Deadly(kill_at)
    if not url.startswith("postgresql"):
        conn = sqlite3.connect(url)
        conn.execute("pragma wal_autocheckpoint = 0")
        conn.set_trace_callback(before)
        return conn
    made = DeadlyConnection.connect(url, cursor_factory=DeadlyCursor)
    made.before = before  # type: ignore[method-assign]
    return made


def shop(app: Duly, url: str, key: str | None, kill_at: int = 0) -> Any:
    @app.task(lease="30s", key=key, backoff=backoff.fixed(0))
    def sell(ctx: SyncCtx) -> None:
        conn = deadly(url, kill_at)
        insert(conn, ctx.job_id)
        ctx.commit(conn, result=ctx.attempt)
        conn.commit()
        if kill_at < 0:
            os._exit(KILLED)
        conn.close()

    return sell


def die(url: str, key: str | None, kill_at: int) -> None:
    app = Duly(url)
    shop(app, url, key, kill_at)
    app.run(drain=True, signals=False)


@pytest.mark.slow
@HOLDABLE
@pytest.mark.parametrize("keyed", [False, True])
def test_k08_both_or_neither_when_killed_before_any_statement_or_after_the_commit(
    app: Duly, url: str, orders: Any, keyed: bool
) -> None:
    sell = shop(app, url, None)
    sold: list[bool] = []
    ids: list[str] = []
    kill_at = -1  # after the commit; then before each statement, until there is none left
    while len(ids) < 60:
        key = f"k{len(ids)}" if keyed else None
        job = sell.using(key=key).enqueue()
        ids.append(job.id)
        ran = FORKS.Process(target=die, args=(url, key, kill_at))
        ran.start()
        ran.join(60)
        assert ran.exitcode in (0, KILLED)
        state = found(app, job.id).state
        sold.append(job.id in orders())
        assert state is (State.SUCCEEDED if sold[-1] else State.RUNNING), f"killed at {kill_at}"
        if ran.exitcode == KILLED:
            kill_at = max(kill_at + 1, 1)
        elif sold[-1]:
            break
        # else a claim that the process before had sent when it was killed took this job: once more
    assert sold == [True, *[False] * (len(sold) - 2), True]
    assert kill_at >= 4

    for job_id in ids[1:-1]:
        steal(app, job_id)
    work_until(app, lambda: all(found(app, job_id).state.ended for job_id in ids), seconds=60)
    assert orders() == sorted(ids)
    assert {found(app, job_id).state for job_id in ids} == {State.SUCCEEDED}


def test_a_task_started_by_a_handler_has_the_handlers_context(app: Duly) -> None:
    @app.task
    async def parent(ctx: Ctx) -> list[str]:
        jobs = await asyncio.gather(*(child.aenqueue(number) for number in range(5)))
        return [job.id for job in jobs]

    @app.task
    def child(number: int) -> None: ...

    job = parent.enqueue()
    work(app)
    causes = {found(app, child_id).causation_id for child_id in found(app, job.id).result}
    assert causes == {job.id}
