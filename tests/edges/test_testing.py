"""The helpers for users' tests: isolated, drain, inline, frozen, and what was enqueued."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from duly import Cancel, Ctx, Duly, Retry, Snooze, SyncCtx, testing
from duly.app.database import Database
from duly.app.enqueue import Enqueuing
from duly.errors import ConfigError, JobError, KeyConflict
from duly.model import State
from duly.rules.settings import Settings
from duly.store.op import Op, Rows
from duly.testing import hooks
from tests.engine.conftest import found

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def app(tmp_path: Path) -> Duly:
    return Duly(tmp_path / "own.db")


@pytest.fixture(params=["sqlite", "postgres"])
def isolated(request: pytest.FixtureRequest, app: Duly) -> Iterator[Duly]:
    """The app on a database of its own, of either kind."""
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else None
    with testing.isolated(app, url):
        yield app


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]
    assert [thread.name for thread in left if thread.name.startswith("duly")] == []


# The database


def test_an_isolated_app_works_on_another_file_and_then_on_its_own_again(app: Duly, tmp_path: Path) -> None:
    @app.task
    def hello() -> None: ...

    mine = hello.enqueue().id
    with testing.isolated(app) as same:
        assert same is app
        other = hello.enqueue().id
        assert app.get(mine) is None
        place = Path(str(app.settings.url))
        assert place.exists()
    assert app.get(other) is None
    assert found(app, mine).state is State.READY
    assert app.settings.url.path == str(tmp_path / "own.db")
    assert not place.parent.exists()
    app.close()


def test_an_app_gets_its_own_database_back_after_an_error(app: Duly, tmp_path: Path) -> None:
    def fail() -> None:
        with testing.isolated(app):
            app.paused()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert app.settings.url.path == str(tmp_path / "own.db")
    assert "driver" not in vars(app.database)


def test_isolated_inside_isolated_is_a_third_database(app: Duly) -> None:
    @app.task
    def hello() -> None: ...

    with testing.isolated(app):
        outer = hello.enqueue().id
        with testing.isolated(app):
            assert app.get(outer) is None
            testing.refute_enqueued(hello)
        testing.assert_enqueued(hello, count=1)


def test_isolated_keeps_every_other_setting(tmp_path: Path) -> None:
    app = Duly(tmp_path / "own.db", max_attempts=7, lease="9s")
    with testing.isolated(app):
        assert (app.settings.max_attempts, app.settings.lease_ms) == (7, 9000)
    assert app.settings.durability == Settings().durability


def test_isolated_takes_a_url_and_migrates_it(app: Duly, postgres: Any) -> None:
    url = postgres.new_database()
    try:
        with testing.isolated(app, url):
            assert app.paused() == []
    finally:
        postgres.drop(url)


def test_a_clock_that_stands_also_stands_for_a_database_that_comes_later(app: Duly) -> None:
    @app.task
    def hello() -> None: ...

    with testing.isolated(app), testing.frozen(app, NOON):
        with testing.isolated(app):
            assert found(app, hello.enqueue().id).created_at == NOON.timestamp() * 1000
        assert found(app, hello.enqueue().id).created_at == NOON.timestamp() * 1000


# Drain


def test_a_drain_runs_what_is_due_and_what_that_enqueues(isolated: Duly) -> None:
    ran: list[int] = []

    @isolated.task
    def count_down(n: int) -> int:
        ran.append(n)
        if n:
            count_down.enqueue(n - 1)
        return n

    job = count_down.enqueue(3)
    drained = testing.drain(isolated)
    assert ran == [3, 2, 1, 0]
    assert (drained.succeeded, len(drained.jobs), drained.jobs[0]) == (4, 4, job.id)
    assert job.result() == 3
    assert testing.drain(isolated) == testing.Drained()


def test_an_async_drain_runs_async_handlers_on_the_loop_of_the_test(isolated: Duly) -> None:
    loops: list[Any] = []

    @isolated.task
    async def look(n: int) -> int:
        loops.append(asyncio.get_running_loop())
        return n

    async def test() -> None:
        job = await look.aenqueue(4)
        drained = await testing.adrain(isolated)
        assert drained.succeeded == 1
        assert await job.aresult() == 4
        assert loops == [asyncio.get_running_loop()]

    asyncio.run(test())


def test_a_drain_says_how_attempts_ended(isolated: Duly) -> None:
    @isolated.task(max_attempts=2)
    def end(how: str) -> None:
        match how:
            case "fails":
                raise ValueError
            case "snoozes":
                raise Snooze("1h")
            case "cancels":
                raise Cancel("no need")
            case "retries":
                raise Retry("1h")

    @isolated.task(max_attempts=1)
    def die() -> None:
        raise ValueError

    for how in ("fails", "snoozes", "cancels", "retries", "does it"):
        end.enqueue(how)
    die.enqueue()
    drained = testing.drain(isolated)
    counts = (drained.failed, drained.snoozed, drained.cancelled, drained.succeeded, drained.dead)
    assert counts == (2, 1, 1, 1, 1)
    assert len(drained.jobs) == 6


def test_jobs_run_one_by_one_in_their_order(isolated: Duly) -> None:
    ran: list[str] = []

    @isolated.task
    def note(n: int) -> None:
        ran.extend([f"begin {n}", f"end {n}"])

    note.enqueue_many(note.call(n) for n in range(20))
    testing.drain(isolated)
    assert ran == [f"{what} {n}" for n in range(20) for what in ("begin", "end")]


def test_a_drain_of_some_queues_leaves_the_others(isolated: Duly) -> None:
    @isolated.task(queue="mail")
    def mail() -> None: ...

    @isolated.task
    def other() -> None: ...

    mail.enqueue()
    other.enqueue()
    assert testing.drain(isolated, queues=["mail"]).succeeded == 1
    testing.assert_enqueued(other, state="ready")


def test_a_drain_notes_the_error_of_a_job_that_comes_behind_many_quick_ones(isolated: Duly) -> None:
    @isolated.task
    async def check(number: int) -> None:
        assert number < 150, "too many"

    check.enqueue_many(check.call(number) for number in range(200))
    with pytest.raises(AssertionError, match="too many"):
        testing.drain(isolated, raises=True)


def test_a_drain_raises_the_first_error_if_asked_to_and_only_then(isolated: Duly) -> None:
    errors = [ValueError("first"), TypeError("second")]

    @isolated.task
    def fail(n: int) -> None:
        raise errors[n]

    fail.enqueue(0)
    fail.enqueue(1)
    assert testing.drain(isolated).failed == 2
    fail.enqueue(0)
    fail.enqueue(1)
    with pytest.raises(ValueError, match="first") as raised:
        testing.drain(isolated, raises=True)
    assert raised.value is errors[0]
    assert len(testing.enqueued(fail, state="scheduled")) == 4


def test_a_task_that_wants_a_process_of_its_own_runs_here(isolated: Duly) -> None:
    ran: list[str] = []
    isolated.spec = "shop.tasks:app"

    @isolated.task(isolation="process")
    def alone() -> None:
        ran.append(threading.current_thread().name)

    @isolated.task(isolation="process")
    async def aalone() -> None:
        ran.append(threading.current_thread().name)

    alone.enqueue()
    aalone.enqueue()
    assert testing.drain(isolated).succeeded == 2
    assert len(ran) == 2
    assert "MainThread" not in ran


def test_a_task_that_no_process_could_run_is_refused_as_a_worker_would(app: Duly) -> None:
    @app.task(isolation="process")
    def alone() -> None: ...

    with testing.isolated(app):
        alone.enqueue()
        with pytest.raises(ConfigError, match=r"task alone has isolation='process', but .* cannot import its app"):
            testing.drain(app)
        with testing.inline(app), pytest.raises(ConfigError, match="task alone has isolation='process'"):
            alone.enqueue()
        testing.assert_enqueued(alone, state="ready", count=2)


def test_a_job_that_enqueues_itself_for_ever_does_not_hang_the_drain(
    app: Duly, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duly.testing.drain_worker.MOST_ATTEMPTS", 5)

    @app.task
    def again() -> None:
        again.enqueue()

    with testing.isolated(app):
        again.enqueue()
        with pytest.raises(AssertionError, match=r"drain: 5 attempts were caused by others .* The next is of again\. "):
            testing.drain(app)
        assert len(testing.enqueued(again, state="succeeded")) == 6
        testing.assert_enqueued(again, state="ready", count=1)  # it was given back


def test_a_drain_runs_however_many_jobs_were_there_before(app: Duly, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duly.testing.drain_worker.MOST_ATTEMPTS", 5)

    @app.task
    def child() -> None: ...

    @app.task
    def parent(n: int) -> None:
        if n < 5:
            child.enqueue()

    with testing.isolated(app):
        parent.enqueue_many(parent.call(n) for n in range(20))
        assert testing.drain(app).succeeded == 25


def test_a_drain_leaves_jobs_that_nobody_knows_as_a_worker_would(isolated: Duly, request: Any) -> None:
    other = Duly(isolated.settings.url.dsn or isolated.settings.url.path)
    request.addfinalizer(other.close)

    @other.task
    def unknown() -> None: ...

    unknown.enqueue()
    testing.drain(isolated)
    testing.assert_enqueued(unknown, state="waiting")
    assert testing.drain(other).succeeded == 1


def test_a_job_that_did_not_start_in_time_is_not_run(isolated: Duly) -> None:
    @isolated.task
    def late() -> None: ...

    with testing.frozen(isolated) as clock:
        job = late.using(expires="1m").enqueue()
        clock.advance("2m")
        assert testing.drain(isolated).succeeded == 0
        assert found(isolated, job.id).reason == "expired"


# The clock


def test_an_hour_passes_when_the_clock_is_moved_by_an_hour(isolated: Duly) -> None:
    due: list[datetime] = []

    @isolated.task
    def remind(ctx: SyncCtx) -> None:
        due.append(ctx.due_at)

    with testing.frozen(isolated, NOON) as clock:
        remind.using(delay="1h").enqueue()
        assert testing.drain(isolated).succeeded == 0
        clock.advance("59m")
        assert testing.drain(isolated).succeeded == 0
        assert clock.advance(60) == clock.now == NOON + timedelta(hours=1)
        assert testing.drain(isolated).succeeded == 1
    assert due == [NOON + timedelta(hours=1)]


def test_everything_is_dated_by_the_clock_that_stands(isolated: Duly) -> None:
    @isolated.task(key=lambda n: f"n{n}")
    def once(n: int) -> int:
        return n

    noon = NOON.timestamp() * 1000
    with testing.frozen(isolated, NOON) as clock:
        job = once.enqueue(1)
        clock.set(NOON + timedelta(minutes=1))
        testing.drain(isolated)
        record = found(isolated, job.id)
        assert (record.created_at, record.finished_at) == (noon, noon + 60_000)
        assert once.enqueue(1).deduplicated
        clock.advance("16d")  # longer than a key is remembered
        assert not once.enqueue(1).deduplicated
        isolated.pause(queue="default", why="test")
        [pause] = isolated.paused()
        assert pause.paused_at == clock.now.timestamp() * 1000


def test_what_is_enqueued_and_finished_on_a_callers_connection_is_dated_too(app: Duly) -> None:
    @app.task
    def charge(ctx: SyncCtx) -> str:
        conn = sqlite3.connect(app.settings.url.path or "", isolation_level=None)
        conn.execute("begin immediate")
        ctx.commit(conn, result="paid")
        conn.commit()
        conn.close()
        return "paid"

    @app.task
    async def acharge(ctx: Ctx) -> str:
        conn = sqlite3.connect(app.settings.url.path or "", isolation_level=None)
        conn.execute("begin immediate")
        await ctx.commit(conn, result="paid")
        conn.commit()
        conn.close()
        return "paid"

    with testing.isolated(app), testing.frozen(app, NOON):
        app.migrate()
        conn = sqlite3.connect(app.settings.url.path or "")
        job = charge.using(conn=conn).enqueue()
        ajob = asyncio.run(acharge.using(conn=conn).aenqueue())
        conn.commit()
        conn.close()
        assert testing.drain(app).succeeded == 2
        for record in (found(app, job.id), found(app, ajob.id)):
            assert record.created_at == record.finished_at == NOON.timestamp() * 1000
            assert record.result == "paid"


def test_a_frozen_clock_also_holds_for_enqueues_that_share_a_commit(isolated: Duly) -> None:
    @isolated.task
    async def work(n: int) -> None: ...

    async def many() -> None:
        await asyncio.gather(*(work.aenqueue(number) for number in range(30)))

    work.enqueue(0)  # the file is open
    with testing.frozen(isolated, NOON):
        asyncio.run(many())
        made = [job.created_at for job in isolated.list(limit=100)]
    assert made.count(int(NOON.timestamp() * 1000)) == 30


def test_what_is_due_next_counts_from_the_frozen_clock_without_a_database_too(app: Duly) -> None:
    @app.every("0 12 * * *")
    def daily() -> None: ...

    day = timedelta(days=1)
    with testing.isolated(app):
        with testing.frozen(app, NOON) as clock:
            assert app.schedules.next("daily", 1) == [NOON + day]
            clock.advance("25h")
            assert app.schedules.next("daily", 1) == [NOON + 2 * day]
            with testing.frozen(app, NOON + 9 * day):
                assert asyncio.run(app.schedules.anext("daily", 1)) == [NOON + 10 * day]
            assert app.schedules.next("daily", 1) == [NOON + 2 * day]
        assert abs(app.schedules.next("daily", 1)[0] - datetime.now(UTC)) < day + timedelta(minutes=1)


def test_the_clock_goes_on_when_the_with_ends(isolated: Duly) -> None:
    @isolated.task
    def hello() -> None: ...

    with testing.frozen(isolated, NOON):
        with testing.frozen(isolated, NOON + timedelta(days=1)) as inner:
            assert found(isolated, hello.enqueue().id).created_at == inner.now.timestamp() * 1000
        assert found(isolated, hello.enqueue().id).created_at == NOON.timestamp() * 1000
    created = found(isolated, hello.enqueue().id).created_at
    assert abs(created / 1000 - datetime.now(UTC).timestamp()) < 60
    assert type(isolated.database) is Database


def test_a_clock_without_a_moment_stands_at_the_present(isolated: Duly) -> None:
    with testing.frozen(isolated) as clock:
        assert abs(clock.now - datetime.now(UTC)) < timedelta(minutes=1)
        assert clock.now.tzinfo is UTC
        assert repr(clock) == f"<clock at {clock.now.isoformat()}>"


@pytest.mark.parametrize(
    ("move", "hint"),
    [
        (lambda clock: clock.advance("-5m"), "negative"),
        (lambda clock: clock.advance(timedelta(seconds=-1)), "negative"),
        (lambda clock: clock.advance("5 apples"), "the units are"),
        (lambda clock: clock.set(NOON - timedelta(seconds=1)), "does not go back"),
        (lambda clock: clock.set(datetime(2031, 1, 1)), "no time zone"),
    ],
)
def test_a_wrong_move_of_the_clock_is_refused(app: Duly, move: Callable[[Any], Any], hint: str) -> None:
    with testing.isolated(app), testing.frozen(app, NOON) as clock:
        with pytest.raises(ConfigError, match=hint):
            move(clock)
        assert clock.now == NOON


def test_retries_run_to_their_end_without_waiting(isolated: Duly) -> None:
    attempts: list[int] = []

    @isolated.task(max_attempts=4, backoff=["1m", "10m", "1h"])
    def flaky(ctx: SyncCtx) -> None:
        attempts.append(ctx.attempt)
        raise ConnectionError("down")

    with testing.frozen(isolated, NOON) as clock:
        flaky.enqueue()
        drained = testing.drain(isolated, scheduled=True)
        assert clock.now - NOON == timedelta(minutes=71)
    assert attempts == [1, 2, 3, 4]
    assert (drained.failed, drained.dead) == (3, 1)


def test_draining_what_is_scheduled_needs_a_frozen_clock(app: Duly) -> None:
    with testing.isolated(app), pytest.raises(ConfigError, match=r"with testing\.frozen\(app\)"):
        testing.drain(app, scheduled=True)


def test_draining_what_is_scheduled_leaves_what_is_paused(app: Duly) -> None:
    @app.task
    def later() -> None: ...

    with testing.isolated(app), testing.frozen(app):
        later.using(delay="1h").enqueue()
        app.pause(queue="default", why="test")
        assert testing.drain(app, scheduled=True).succeeded == 0
        app.resume(queue="default")
        assert testing.drain(app, scheduled=True).succeeded == 1


def test_a_job_that_snoozes_for_ever_does_not_hang_the_drain(app: Duly, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duly.testing.draining.MOST_ROUNDS", 5)

    @app.task
    def again() -> None:
        raise Snooze("1h")

    with testing.isolated(app), testing.frozen(app):
        again.enqueue()
        with pytest.raises(AssertionError, match="after 5 moves of the clock"):
            testing.drain(app, scheduled=True)


def test_draining_what_is_scheduled_in_some_queues_leaves_the_others_and_their_time(app: Duly) -> None:
    @app.task
    def later() -> None: ...

    with testing.isolated(app), testing.frozen(app, NOON) as clock:
        later.using(delay="1h", queue="elsewhere").enqueue()
        later.using(delay="1m").enqueue()
        assert testing.drain(app, queues=["default"], scheduled=True).succeeded == 1
        assert clock.now == NOON + timedelta(minutes=1)
        assert testing.drain(app, scheduled=True).succeeded == 0  # a queue of no task
        assert clock.now == NOON + timedelta(minutes=1)
        assert testing.drain(app, queues=["elsewhere"], scheduled=True).succeeded == 1
        assert clock.now == NOON + timedelta(hours=1)


def test_the_clock_moves_to_what_is_due_first_however_many_are_due_later(
    isolated: Duly, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duly.testing.draining.MANY", 5)
    ran: list[int] = []

    @isolated.task
    def later(n: int) -> None:
        ran.append(n)

    with testing.frozen(isolated, NOON):
        later.using(delay="1h").enqueue(0)
        later.using(delay="2h").enqueue_many(later.call(n) for n in range(1, 9))
        testing.drain(isolated, scheduled=True)
    assert ran == list(range(9))


def test_what_is_due_and_was_left_does_not_hide_what_is_due_later(isolated: Duly) -> None:
    @isolated.task
    def later() -> None: ...

    with testing.frozen(isolated, NOON) as clock:
        left = later.using(delay="1h").enqueue()
        later.using(delay="2h").enqueue()

        def advance(name: str, fields: Mapping[str, Any]) -> None:
            """Have the first become due when the worker has looked for the last time."""
            if name == "worker.stopped" and clock.now == NOON:
                clock.advance("1h")

        isolated.events.listen(advance)
        assert testing.drain(isolated, scheduled=True).succeeded == 2
        assert clock.now == NOON + timedelta(hours=2)
        assert found(isolated, left.id).state is State.SUCCEEDED


def test_moving_the_clock_wakes_workers_that_sleep(isolated: Duly) -> None:
    called: list[str] = []
    with testing.frozen(isolated) as clock:
        watch = isolated.driver.watch(lambda: called.append("woken"))
        clock.advance("1h")
        assert called == ["woken"]
        watch.close()


# Inline


def test_an_inline_enqueue_returns_when_the_job_and_its_children_have_run(isolated: Duly) -> None:
    ran: list[str] = []

    @isolated.task
    def child(name: str) -> None:
        ran.append(name)

    @isolated.task
    async def achild(name: str) -> None:
        ran.append(name)

    @isolated.task
    def parent() -> str:
        child.enqueue("sync in sync")
        achild.enqueue("async in sync")
        ran.append("parent")
        return "done"

    @isolated.task
    async def aparent() -> str:
        await achild.aenqueue("async in async")
        child.enqueue("sync in async")
        ran.append("aparent")
        return "done"

    with testing.inline(isolated):
        assert parent.enqueue().result() == "done"
        assert aparent.enqueue().result() == "done"
    assert ran == ["sync in sync", "async in sync", "parent", "async in async", "sync in async", "aparent"]
    testing.assert_enqueued(child, state="succeeded", count=2)


def test_inline_works_inside_a_running_loop(isolated: Duly) -> None:
    @isolated.task
    def add(a: int) -> int:
        return a + 1

    @isolated.task
    async def aadd(a: int) -> int:
        return a + 1

    async def test() -> list[int]:
        with testing.inline(isolated):
            jobs = [add.enqueue(1), aadd.enqueue(2), await add.aenqueue(3), await aadd.aenqueue(4)]
            return [job.result(timeout=0) for job in jobs]

    assert asyncio.run(test()) == [2, 3, 4, 5]


def test_inline_runs_many_before_it_returns(isolated: Duly) -> None:
    ran: list[int] = []

    @isolated.task
    def note(n: int) -> None:
        ran.append(n)

    with testing.inline(isolated):
        note.enqueue_many(note.call(n) for n in range(5))
        assert ran == [0, 1, 2, 3, 4]
        asyncio.run(note.aenqueue_many(note.call(n) for n in range(5, 7)))
    assert ran == [0, 1, 2, 3, 4, 5, 6]
    note.enqueue(8)
    assert ran[-1] == 6


def test_what_an_inline_handler_raises_is_raised_to_whoever_enqueued(isolated: Duly) -> None:
    error = ValueError("no such order")

    @isolated.task
    def fail() -> None:
        raise error

    @isolated.task
    def parent() -> None:
        fail.enqueue()

    with testing.inline(isolated):
        with pytest.raises(ValueError, match="no such order") as raised:
            fail.enqueue()
        assert raised.value is error
        with pytest.raises(ValueError, match="no such order"):
            asyncio.run(fail.aenqueue())
        with pytest.raises(ValueError, match="no such order") as raised:
            parent.enqueue()
        assert raised.value is error
    assert {job.state for job in testing.enqueued(fail)} == {State.SCHEDULED}


def test_an_inline_failure_without_an_exception_is_told_too(isolated: Duly) -> None:
    @isolated.task
    def returns_what_is_no_json() -> Any:
        return object()

    with testing.inline(isolated), pytest.raises(JobError, match="object"):
        returns_what_is_no_json.enqueue()


def test_an_inline_job_that_snoozes_cancels_or_retries_raises_nothing(isolated: Duly) -> None:
    @isolated.task
    def end(how: str) -> None:
        raise {"snooze": Snooze("1h"), "cancel": Cancel("no"), "retry": Retry("1h")}[how]

    with testing.inline(isolated):
        jobs = [end.enqueue(how) for how in ("snooze", "cancel", "retry")]
    assert [found(isolated, job.id).state for job in jobs] == ["scheduled", "cancelled", "scheduled"]


def test_an_inline_job_that_is_delayed_or_on_your_connection_waits(app: Duly) -> None:
    ran: list[str] = []

    @app.task
    def note(what: str) -> None:
        ran.append(what)

    with testing.isolated(app), testing.inline(app):
        app.migrate()
        conn = sqlite3.connect(app.settings.url.path or "")
        note.using(delay="1h").enqueue("delayed")
        note.using(conn=conn).enqueue("staged")
        assert ran == []
        conn.commit()
        conn.close()
        testing.drain(app)
        assert ran == ["staged"]


def test_an_inline_job_runs_where_a_worker_of_the_app_would_look_for_it(isolated: Duly) -> None:
    @isolated.task(queue="mail")
    def mail() -> None: ...

    @isolated.task
    def hello() -> str:
        return "hello"

    with testing.inline(isolated):
        assert hello.using(queue="mail").enqueue().result(timeout=0) == "hello"
        hello.using(queue="nobody").enqueue()
    testing.assert_enqueued(hello, queue="nobody", state="ready")
    assert testing.drain(isolated).succeeded == 0
    assert testing.drain(isolated, queues=["nobody"]).succeeded == 1


def test_inline_keeps_keys(isolated: Duly) -> None:
    @isolated.task(key="one")
    def once(n: int) -> int:
        return n

    with testing.inline(isolated):
        assert once.enqueue(1).result() == once.enqueue(1).result() == 1
        assert once.enqueue(1).deduplicated
        with pytest.raises(KeyConflict):
            once.enqueue(2)


def test_inline_inside_inline_is_refused(app: Duly) -> None:
    with testing.inline(app), pytest.raises(ConfigError, match="is active already"), testing.inline(app):
        pass
    assert type(app.tasks.enqueuing) is Enqueuing


def test_a_job_that_enqueues_itself_for_ever_is_refused_inline(app: Duly, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duly.testing.inlining.DEEPEST", 5)

    @app.task
    def again() -> None:
        again.enqueue()

    with testing.isolated(app), testing.inline(app), pytest.raises(ConfigError, match=r"5 jobs run inside one another"):
        again.enqueue()


def test_an_inline_enqueue_waits_for_its_job_where_another_thread_runs_it(isolated: Duly) -> None:
    added, taken, returned = threading.Event(), threading.Event(), threading.Event()

    @isolated.task
    def first() -> None:
        assert added.wait(10)

    @isolated.task
    def second() -> None:
        taken.set()
        assert not returned.wait(0.3)
        raise ValueError("of the second")

    def hold_back(name: str, fields: Mapping[str, Any]) -> None:
        """Have the second job taken by the thread of the first."""
        if name == "worker.started" and threading.current_thread() is other:
            added.set()
            assert taken.wait(10)

    def enqueue_second() -> None:
        try:
            second.enqueue()
        except ValueError as error:
            raised.append(error)
        returned.set()

    raised: list[ValueError] = []
    other = threading.Thread(target=enqueue_second)
    isolated.events.listen(hold_back)
    with testing.inline(isolated):
        other.start()
        first.enqueue()
        other.join(10)
    assert [str(error) for error in raised] == ["of the second"]
    testing.assert_enqueued(second, state="scheduled", count=1)


def test_inline_enqueues_on_one_loop_each_return_when_their_job_has_run(isolated: Duly) -> None:
    ran: list[int] = []

    @isolated.task
    async def note(n: int) -> int:
        await asyncio.sleep(0.004 * (n % 4))
        ran.append(n)
        if n % 2:
            raise ValueError(n)
        return n

    async def one(n: int) -> int:
        await asyncio.sleep(0.003 * (n % 7))
        try:
            job = await note.aenqueue(n)
        except ValueError as error:
            return -int(error.args[0])
        assert n in ran
        return await job.aresult(timeout=0)

    async def test() -> None:
        answers = await asyncio.gather(*(one(n) for n in range(30)))
        assert answers == [-n if n % 2 else n for n in range(30)]

    with testing.inline(isolated):
        asyncio.run(test())


@pytest.mark.slow
def test_how_deep_inline_jobs_run_is_counted_for_each_chain(app: Duly, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duly.testing.inlining.DEEPEST", 4)

    @app.task
    def step(n: int) -> int:
        if n:
            step.enqueue(n - 1)
        return n

    @app.task
    async def astep(n: int) -> int:
        await asyncio.sleep(0.001)
        if n:
            await astep.aenqueue(n - 1)
        return n

    async def test() -> None:
        await asyncio.gather(*(astep.aenqueue(3) for _ in range(12)))
        with pytest.raises(ConfigError, match="4 jobs run inside one another, the last of astep"):
            await astep.aenqueue(4)

    with testing.isolated(app), testing.inline(app):
        asyncio.run(test())
        with ThreadPoolExecutor(12) as threads:
            list(threads.map(step.enqueue, [3] * 12))
        with pytest.raises(ConfigError, match="4 jobs run inside one another, the last of step"):
            step.enqueue(4)


def test_inline_handlers_that_enqueue_at_once_do_not_wait_for_one_another(isolated: Duly) -> None:
    ran: list[str] = []

    @isolated.task
    def child(name: str) -> None:
        ran.append(name)

    @isolated.task
    def threads() -> None:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(child.enqueue, ["thread"] * 3))

    @isolated.task
    async def gathers() -> None:
        await asyncio.gather(*(child.aenqueue("gather") for _ in range(3)))

    @isolated.task(key="mine")
    def itself() -> None:
        assert itself.enqueue().deduplicated
        ran.append("itself")

    def test() -> None:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda task: task.enqueue(), [threads, gathers, itself]))

    with testing.inline(isolated):
        running = threading.Thread(target=test, daemon=True)
        running.start()
        running.join(30)
        assert not running.is_alive()
    assert sorted(ran) == ["gather"] * 3 + ["itself"] + ["thread"] * 3


@pytest.mark.parametrize("attempts", [1, 3])
def test_many_inline_jobs_run_one_after_the_other_and_not_inside_one_another(app: Duly, attempts: int) -> None:
    order: list[str] = []
    threads: list[int] = []

    @app.task
    def child(n: int) -> None:
        order.append(f"child {n}")
        threads.append(threading.active_count())

    @app.task(max_attempts=attempts)
    def parent(n: int) -> None:
        child.enqueue(n)
        order.append(f"parent {n}")

    with testing.isolated(app), testing.inline(app):
        parent.enqueue_many(parent.call(n) for n in range(30))
    assert order == [f"{who} {n}" for n in range(30) for who in ("child", "parent")]
    assert max(threads) - min(threads) < 10  # inside one another they would be thirty more in the end


def test_inline_jobs_that_wait_for_others_for_long_keep_their_order(app: Duly) -> None:
    never = threading.Event()
    heard: list[str] = []

    @app.task
    def slow(n: int) -> None:
        never.wait(0.1)
        heard.append(f"ran {n}")

    with testing.isolated(app), testing.inline(app):
        app.events.listen(lambda name, fields: heard.append(name) if name == "job.released" else None)
        slow.enqueue_many(slow.call(n) for n in range(6))
    assert heard == [f"ran {n}" for n in range(6)]


class TakenByTheLoop(hooks.Gate):
    """Has a claim that a loop has begun take what a sync enqueue on the same loop then adds."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self._added = threading.Event()
        self._claimed: Future[Rows] | None = None
        self._threads = ThreadPoolExecutor(1)

    async def aexecute(self, op: Op[Any], send: hooks.Send, asend: hooks.Asend) -> Rows:
        if op.name != "claim" or op.params["alone"] or self._claimed is not None:
            return await asend(op)
        self._claimed = self._threads.submit(self._claim_what_is_added, op, send)
        self.begun.set()
        return await asyncio.wrap_future(self._claimed)

    def _claim_what_is_added(self, op: Op[Any], send: hooks.Send) -> Rows:
        assert self._added.wait(10)
        return send(op)

    def execute(self, op: Op[Any], send: hooks.Send) -> Rows:
        rows = send(op)
        if op.name == "enqueue" and self._claimed is not None:
            self._added.set()
            self._claimed.result(10)
        return rows

    def close(self) -> None:
        self._threads.shutdown()


def test_a_sync_enqueue_that_would_wait_for_the_loop_it_stops_is_refused(app: Duly) -> None:
    @app.task
    async def hello(name: str) -> None: ...

    async def test() -> None:
        gate = TakenByTheLoop()
        with hooks.standing(app, gate):
            other = asyncio.create_task(hello.using(delay="1h").aenqueue("other"))
            await gate.begun.wait()
            with pytest.raises(ConfigError, match="await aenqueue instead"):
                hello.enqueue("own")
            await other
            gate.close()

    with testing.isolated(app), testing.inline(app):
        asyncio.run(test())
        testing.assert_enqueued(hello, {"name": "own"}, state="succeeded")


# What was enqueued


@pytest.fixture
def mail(app: Duly) -> Iterator[Any]:
    @app.task(queue="mail")
    def mail(to: str, at: datetime | None = None, tags: set[str] | None = None) -> None: ...

    with testing.isolated(app), testing.frozen(app, NOON):
        yield mail


def test_assert_enqueued_finds_a_job_by_any_of_its_traits(mail: Any) -> None:
    job = mail.using(key="k", delay="5m").enqueue("ann", at=NOON, tags={"b", "a"})
    mail.enqueue("bob")
    for args, terms in (
        ({"to": "ann"}, {}),
        ({"at": NOON, "tags": {"a", "b"}}, {}),
        ({}, {"key": "k"}),
        ({}, {"state": State.SCHEDULED}),
        ({}, {"due": "5m"}),
        ({}, {"due": NOON + timedelta(minutes=5)}),
        ({"to": "ann"}, {"queue": "mail", "count": 1, "state": "scheduled", "due": 300}),
    ):
        assert testing.assert_enqueued(mail, args, **terms).id == job.id
    assert testing.assert_enqueued(mail, count=2).payload["to"] == "bob"  # the latest
    assert [record.payload["to"] for record in testing.enqueued(mail)] == ["bob", "ann"]
    assert testing.enqueued(mail, {"to": "eve"}) == []
    mail.enqueue("\x00␛")
    assert testing.assert_enqueued(mail, {"to": "\x00␛"}).payload["to"] == "\x00␛"


def test_what_is_not_there_is_refuted_and_what_is_there_is_not(mail: Any) -> None:
    testing.refute_enqueued(mail)
    mail.enqueue("ann")
    testing.refute_enqueued(mail, {"to": "bob"})
    testing.refute_enqueued(mail, due="5m")
    testing.refute_enqueued(mail, due=int(NOON.timestamp()) % 1000)
    with pytest.raises(AssertionError) as raised:
        testing.refute_enqueued(mail, {"to": "ann"}, state="ready")
    assert str(raised.value) == "there is a job of mail with to='ann', state ready\nthere is:\n  mail(to='ann') ready"


def test_a_failing_assertion_says_what_is_there_and_what_differs(mail: Any) -> None:
    mail.using(delay="1h").enqueue("bob")
    with pytest.raises(AssertionError) as raised:
        testing.assert_enqueued(mail, {"to": "ann", "at": NOON}, due="5m", queue="fast", key="k")
    assert str(raised.value) == (
        "no job of mail with to='ann', at='2030-01-01T12:00:00Z', key k, queue fast, due 5m after its enqueue\n"
        "there is:\n"
        "  mail(to='bob') scheduled: to is 'bob', at is None, key is None, queue is mail, "
        "due 1h after its enqueue"
    )


def test_arguments_that_were_not_given_have_their_defaults(app: Duly) -> None:
    odd: Any = object()

    @app.task
    def total(first: int, *more: int, discount: int = 0, at: datetime = NOON, odd: Any = odd) -> None: ...

    with testing.isolated(app):
        total.enqueue(1)
        testing.assert_enqueued(total, {"first": 1, "discount": 0, "at": NOON, "more": []})
        testing.refute_enqueued(total, {"discount": 5})
        with pytest.raises(AssertionError, match="there is a job of total with discount=0"):
            testing.refute_enqueued(total, {"discount": 0})
        with pytest.raises(AssertionError, match="discount is 0, odd was not given"):
            testing.assert_enqueued(total, {"discount": 5, "odd": 1})
        total.enqueue(1, discount=5)
        testing.assert_enqueued(total, {"discount": 0}, count=1)


def test_a_failing_assertion_of_a_task_without_jobs_shows_others(app: Duly, mail: Any) -> None:
    @app.task
    def other(n: int) -> None: ...

    with pytest.raises(AssertionError, match="there is no job of mail, and no other"):
        testing.assert_enqueued(mail)
    other.enqueue(1)
    with pytest.raises(AssertionError, match=r"there is no job of mail; there is:\n  other\(n=1\) ready"):
        testing.assert_enqueued(mail)


def test_a_failing_assertion_lists_ten_at_most(mail: Any) -> None:
    mail.enqueue_many(mail.call(f"n{n}") for n in range(25))
    with pytest.raises(AssertionError) as raised:
        testing.assert_enqueued(mail, count=3)
    lines = str(raised.value).splitlines()
    assert lines[0] == "25 jobs of mail, not 3"
    assert (len(lines), lines[-1]) == (13, "  … and 15 more")


def test_jobs_are_found_however_many_there_are(mail: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duly.testing.assertions.PAGE", 10)
    mail.enqueue_many(mail.call(f"n{n}") for n in range(25))
    testing.assert_enqueued(mail, count=25)
    testing.assert_enqueued(mail, {"to": "n0"})


def test_jobs_that_have_ended_count_too(mail: Any, app: Duly) -> None:
    mail.enqueue("ann")
    testing.drain(app)
    testing.assert_enqueued(mail, {"to": "ann"}, state="succeeded")


def plain_function() -> None: ...


@pytest.mark.parametrize(
    ("args", "options", "hint"),
    [
        ({"too": "ann"}, {}, r"mail\(to, at, tags\) has no parameter 'too': did you mean 'to'\?"),
        (["ann"], {}, "give a mapping"),
        ({}, {"state": "redy"}, "state='redy' is no state: give one of scheduled, ready"),
        ({}, {"due": "5 apples"}, "the units are"),
        ({}, {"count": 0}, "or use refute_enqueued"),
    ],
)
def test_a_wrong_question_is_refused_with_a_hint(mail: Any, args: Any, options: Any, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        testing.assert_enqueued(mail, args, **options)


def test_a_plain_function_is_no_task() -> None:
    with pytest.raises(ConfigError, match=r"plain_function is a function, not a task: give the result of @app\.task"):
        testing.assert_enqueued(plain_function)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is of type str: give a task"):
        testing.refute_enqueued("mail")  # type: ignore[arg-type]


# Mistakes


def test_a_handler_cannot_drain_isolate_or_wait_for_itself(app: Duly) -> None:
    @app.task(max_attempts=1)
    def drains() -> None:
        testing.drain(app)

    @app.task(max_attempts=1)
    async def adrains() -> None:
        await testing.adrain(app)

    @app.task(max_attempts=1)
    def isolates() -> None:
        with testing.isolated(app):
            pass

    with testing.isolated(app), testing.inline(app):
        for task, what in ((drains, "drain"), (adrains, "drain"), (isolates, "isolated")):
            with pytest.raises(ConfigError, match=f"{what} was called by the handler of {task.name}"):
                task.enqueue()


def test_a_sync_drain_inside_a_loop_is_refused_with_its_twin(app: Duly) -> None:
    async def test() -> None:
        testing.drain(app)

    with pytest.raises(ConfigError, match=r"await testing\.adrain\(app\)"):
        asyncio.run(test())


def test_a_name_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match=r"duly\.testing has no 'drained': it has Clock, .* drain,"):
        _ = testing.drained  # type: ignore[attr-defined]
    assert all(getattr(testing, name) for name in testing.__all__)


@pytest.mark.process
def test_nothing_of_the_product_imports_the_test_helpers() -> None:
    code = "import sys, duly.app.app, duly.worker.worker, duly.cli; sys.exit('duly.testing' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
