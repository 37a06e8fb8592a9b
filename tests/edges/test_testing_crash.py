"""What if the process dies exactly here? `crash` at every point that `crash_points` lists."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from duly import Ctx, Duly, SyncCtx, testing
from duly.app.database import Database
from duly.errors import ConfigError
from duly.model import State
from duly.testing import CrashPoint
from tests.contract.stores import TABLES

pytestmark = pytest.mark.process

Fresh = Callable[[], Any]


@pytest.fixture
def app(tmp_path: Path) -> Duly:
    return Duly(tmp_path / "own.db")


@pytest.fixture(params=["sqlite", "postgres"])
def fresh(request: pytest.FixtureRequest, app: Duly) -> Fresh:
    """Put the app on a new database, with a table of the shop's, of either kind."""

    @contextmanager
    def sqlite() -> Iterator[None]:
        with testing.isolated(app):
            app.migrate()
            with connected(app) as conn:
                conn.execute("create table charge (number integer)")
            yield

    @contextmanager
    def postgres() -> Iterator[None]:
        with testing.isolated(app, request.getfixturevalue("postgres_url")), connected(app) as conn:
            conn.execute("create table if not exists charge (number integer)")
            conn.execute(";".join(f"delete from {table}" for table in ("charge", *(f"duly.{name}" for name in TABLES))))
            conn.commit()
            yield

    return postgres if request.param == "postgres" else sqlite


@contextmanager
def connected(app: Duly) -> Iterator[Any]:
    url = app.settings.url
    conn: Any
    conn = psycopg.connect(url.dsn) if url.path is None else sqlite3.connect(url.path, isolation_level=None)
    try:
        yield conn
    finally:
        conn.close()


def charges(app: Duly) -> int:
    with connected(app) as conn:
        return int(conn.execute("select count(*) from charge").fetchone()[0])


def each_crash(app: Duly, fresh: Fresh, enqueue: Callable[[], object], effects: Callable[[], int]) -> dict[str, int]:
    """Crash an enqueue and its drain at every point, do it again like a new process, and count the effects."""

    def scenario() -> None:
        enqueue()
        testing.drain(app)

    with fresh():
        points = testing.crash_points(app, scenario)
    counted = {}
    for point in points:
        with fresh(), testing.frozen(app) as clock:
            before = effects()
            with testing.crash(app, at=point):
                scenario()
            enqueue()  # whoever was not answered asks again
            clock.advance("1m")
            testing.drain(app)
            counted[str(point)] = effects() - before
            assert app.list(state="running") == []
            assert {job.state for job in app.list()} == {State.SUCCEEDED}
    return counted


def test_a_charge_that_commits_with_its_job_has_its_effect_once_at_every_point(app: Duly, fresh: Fresh) -> None:
    @app.task(key="charge")
    def charge(ctx: SyncCtx) -> None:
        with connected(app) as conn:
            conn.execute("begin")
            conn.execute("insert into charge values (1)")
            ctx.commit(conn)
            conn.commit()

    counted = each_crash(app, fresh, charge.enqueue, lambda: charges(app))
    assert set(counted.values()) == {1}
    assert {"before finish.staged", "after finish.staged", "before settle.settle[0]"} <= counted.keys()


def test_a_naive_handler_has_its_effect_at_least_once_and_at_some_points_twice(app: Duly, fresh: Fresh) -> None:
    sent: list[int] = []

    @app.task(key="mail")
    def send() -> None:
        sent.append(1)

    counted = each_crash(app, fresh, send.enqueue, lambda: len(sent))
    assert set(counted.values()) == {1, 2}
    assert counted["before finish.commit"] == 2  # sent, but not recorded
    assert counted["after finish.commit"] == 1  # recorded, though nobody heard of it
    assert counted["before claim.commit"] == counted["after claim.commit"] == 1
    assert counted["before enqueue.commit"] == counted["after enqueue.commit"] == 1


def test_an_async_handler_crashes_in_its_own_calls_too(app: Duly, fresh: Fresh) -> None:
    sent: list[int] = []

    @app.task(key="mail")
    async def send(ctx: Ctx) -> None:
        await ctx.progress(50)
        sent.append(1)

    counted = each_crash(app, fresh, send.enqueue, lambda: len(sent))
    assert counted["before progress.commit"] == counted["after progress.commit"] == 1
    assert counted["before finish.commit"] == 2


def test_the_points_of_a_scenario_are_the_same_each_time(app: Duly, fresh: Fresh) -> None:
    @app.task
    def child() -> None: ...

    @app.task
    def parent() -> None:
        child.enqueue()

    def scenario() -> None:
        parent.enqueue()
        testing.drain(app)

    found = []
    for _ in range(5):
        with fresh():
            found.append(testing.crash_points(app, scenario))
    assert found.count(found[0]) == 5
    ops = Counter(point.op for point in found[0] if (point.moment, point.section) == ("after", "commit"))
    assert ops == {"enqueue": 2, "claim": 2, "finish": 2}
    assert "after finish.commit #2" in map(str, found[0])


def test_what_is_enqueued_on_your_connection_has_points_too(app: Duly, fresh: Fresh) -> None:
    @app.task
    def hello() -> None: ...

    def scenario() -> None:
        with connected(app) as conn:
            conn.execute("begin")
            hello.using(conn=conn).enqueue()
            conn.commit()

    with fresh():
        assert [str(point) for point in testing.crash_points(app, scenario)] == [
            "before enqueue.staged",
            "after enqueue.staged",
        ]
        with testing.crash(app, at=CrashPoint("after", "enqueue", "staged")):
            scenario()
        testing.refute_enqueued(hello, state="succeeded")
        assert len(testing.enqueued(hello)) == 1  # of the first run alone


def test_after_the_point_nothing_of_the_app_reaches_the_database(app: Duly, fresh: Fresh) -> None:
    done: list[str] = []

    @app.task
    def hello() -> None: ...

    with fresh():
        with testing.crash(app, at=CrashPoint("after", "enqueue")):
            try:
                hello.enqueue()
            except Exception:
                done.append("survived")
            finally:
                with pytest.raises(testing.Crashed):
                    hello.enqueue()
                with pytest.raises(testing.Crashed):
                    app.list()
        assert done == []  # a crash is no Exception
        testing.assert_enqueued(hello, count=1)
        assert app.driver.hook is None
        assert type(app.database) is Database


def test_a_crash_of_a_coroutine_is_swallowed_too(app: Duly, fresh: Fresh) -> None:
    ran: list[int] = []

    @app.task
    async def hello() -> None:
        ran.append(1)

    async def test() -> None:
        with fresh(), testing.frozen(app) as clock:
            with testing.crash(app, at=CrashPoint("before", "finish")):
                await hello.aenqueue()
                await testing.adrain(app)
            clock.advance("1m")
            drained = await testing.adrain(app)
            assert (drained.rescued, drained.succeeded, len(ran)) == (1, 1, 2)

    asyncio.run(test())


def test_a_crashed_job_stays_with_its_lease_until_that_has_ended(app: Duly, fresh: Fresh) -> None:
    @app.task(lease="20s")
    def hello() -> None: ...

    with fresh(), testing.frozen(app) as clock:
        with testing.crash(app, at=CrashPoint("after", "claim")):
            hello.enqueue()
            testing.drain(app)
        clock.advance("19s")
        assert testing.drain(app) == testing.Drained()
        testing.assert_enqueued(hello, state="running")
        clock.advance("2s")
        assert testing.drain(app).rescued == 1
        assert testing.assert_enqueued(hello, state="succeeded").crashes == 0


def test_a_drain_of_what_is_scheduled_waits_for_crashed_leases_too(app: Duly, fresh: Fresh) -> None:
    @app.task
    def hello() -> None: ...

    with fresh(), testing.frozen(app):
        with testing.crash(app, at=CrashPoint("before", "finish")):
            hello.enqueue()
            testing.drain(app)
        assert testing.drain(app, scheduled=True).succeeded == 1


def test_a_crash_inside_inline_ends_the_enqueue(app: Duly, fresh: Fresh) -> None:
    @app.task
    def hello() -> None: ...

    with fresh(), testing.inline(app):
        with testing.crash(app, at=CrashPoint("after", "claim")):
            hello.enqueue()
        testing.assert_enqueued(hello, state="running")


def test_a_point_that_is_never_reached_is_named_with_those_that_are(app: Duly) -> None:
    @app.task
    def hello() -> None: ...

    with testing.isolated(app):
        with pytest.raises(AssertionError) as raised, testing.crash(app, at=CrashPoint("after", "finish", time=2)):
            hello.enqueue()
        message = str(raised.value)
        assert message.startswith("crash: the point after finish.commit #2 was never reached; those passed are: ")
        assert message.endswith("before enqueue.commit, after enqueue.commit")
        testing.assert_enqueued(hello)


def test_an_error_of_the_test_inside_a_crash_is_not_swallowed(app: Duly) -> None:
    with testing.isolated(app):
        with pytest.raises(ZeroDivisionError), testing.crash(app, at=CrashPoint("after", "finish")):
            raise ZeroDivisionError
        assert app.list() == []


def test_a_crash_inside_a_task_group_ends_with_the_crash(app: Duly) -> None:
    @app.task
    def hello() -> None: ...

    async def two() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(hello.aenqueue())
            group.create_task(hello.aenqueue())

    with testing.isolated(app):
        with testing.crash(app, at=CrashPoint("before", "enqueue")):
            asyncio.run(two())
        testing.refute_enqueued(hello)
        with pytest.raises(BaseExceptionGroup) as raised, testing.crash(app, at=CrashPoint("before", "enqueue")):
            raise BaseExceptionGroup("both", [ZeroDivisionError(), crashed(hello)])
        assert raised.group_contains(ZeroDivisionError)


def crashed(task: Any) -> testing.Crashed:
    with pytest.raises(testing.Crashed) as raised:
        task.enqueue()
    return raised.value


def test_a_crash_takes_a_point(app: Duly) -> None:
    wrong: Any = "after finish"
    with pytest.raises(ConfigError, match=r"testing\.crash_points\(app, scenario\)"), testing.crash(app, at=wrong):
        pass


def test_a_crash_leaves_no_thread_behind(app: Duly, fresh: Fresh) -> None:
    @app.task
    def hello() -> None: ...

    before = set(threading.enumerate())
    with fresh(), testing.crash(app, at=CrashPoint("before", "finish")):
        hello.enqueue()
        testing.drain(app)
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert [name for name in left if name.startswith("duly")] == []


def test_a_crash_is_not_reported_by_the_event_loop(app: Duly, fresh: Fresh, caplog: pytest.LogCaptureFixture) -> None:
    @app.task
    async def hello(ctx: Ctx) -> None:
        await ctx.progress(50)

    async def test(point: CrashPoint) -> None:
        with fresh(), testing.crash(app, at=point):
            await hello.aenqueue()
            await testing.adrain(app)

    for point in (CrashPoint("before", "progress"), CrashPoint("before", "finish"), CrashPoint("after", "claim")):
        asyncio.run(test(point))
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
