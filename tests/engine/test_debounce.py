"""Many calls, one job, through the public names. Line B11."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from duly import Duly, SyncCtx, testing
from duly.errors import ConfigError, KeyConflict
from duly.model import State
from duly.store import ops
from tests.engine.conftest import HOLDABLE, Outside, found, work, work_until


@pytest.mark.parametrize("how", ["sync", "async", "many"])
def test_b11_the_last_call_within_the_window_runs_once(app: Duly, how: str) -> None:
    ran: list[int] = []

    @app.task
    def index(version: int) -> int:
        ran.append(version)
        return version

    later = index.using(debounce="300ms", key="doc:1")
    if how == "sync":
        jobs = [later.enqueue(n) for n in range(3)]
    elif how == "async":
        jobs = [asyncio.run(later.aenqueue(n)) for n in range(3)]
    else:
        jobs = later.enqueue_many([index.call(n) for n in range(3)])
    assert len({job.id for job in jobs}) == 1
    assert [job.deduplicated for job in jobs] == [False, True, True]
    work_until(app, lambda: ran)
    assert ran == [2]
    assert jobs[0].result(timeout=5) == 2


def test_b11_a_call_while_the_job_runs_runs_after_it_and_has_its_own_result(app: Duly) -> None:
    ran: list[str] = []
    may_end = threading.Event()

    @app.task(key=lambda text: "k")
    def index(text: str) -> str:
        ran.append(text)
        may_end.wait(10)
        return text

    later = index.using(debounce="50ms")
    first = later.enqueue("a")
    handles: list[Any] = []

    def called() -> bool:
        if ran and not handles:
            handles.extend((later.enqueue("b"), later.enqueue("c")))
            with pytest.raises(TimeoutError):
                handles[0].result(timeout=0.01)  # it is to come
            may_end.set()
        return ran == ["a", "c"]

    work_until(app, called)
    assert first.result(timeout=5) == "a"
    assert handles[0].id == handles[1].id != first.id
    assert [handle.deduplicated for handle in handles] == [False, True]
    assert handles[0].result(timeout=5) == "c"


def test_b11_a_handler_debounces_itself(app: Duly) -> None:
    ran: list[int] = []

    @app.task(key="tidy")
    def tidy(ctx: SyncCtx, n: int) -> None:
        ran.append(n)
        if n < 2:
            tidy.using(debounce="20ms").enqueue(n + 1)

    tidy.using(debounce="20ms").enqueue(0)
    work_until(app, lambda: ran == [0, 1, 2])


def test_b11_debounce_and_unique_for_need_a_key(app: Duly, outside: Outside) -> None:
    @app.task
    def send(n: int) -> None: ...

    before = outside.snapshot()
    for option in ("debounce", "unique_for"):
        task = send.using(**{option: "5m"})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=rf"send: {option}= needs to know which calls are the same: give using"):
            task.enqueue(1)
        with pytest.raises(ConfigError, match=option):
            task.enqueue_many([send.call(1)])
        with pytest.raises(ConfigError, match=option):
            asyncio.run(task.aenqueue(1))
        with pytest.raises(ConfigError, match=f"{option}= is zero"):
            send.using(key="k", **{option: 0})  # type: ignore[arg-type]
        task.using(key="k").call(1)
    assert outside.snapshot() == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"delay": "5m"}, "the debounce is the delay"),
        ({"at": datetime(2030, 1, 1, tzinfo=UTC)}, "the debounce is the delay"),
        ({"unique_for": "1h"}, "unique_for="),
    ],
)
def test_b11_options_that_exclude_debounce_are_refused_at_the_call(
    app: Duly, options: dict[str, Any], said: str
) -> None:
    @app.task
    def send(n: int) -> None: ...

    with pytest.raises(ConfigError, match=said):
        send.using(key="k", debounce="5m", **options)
    with pytest.raises(ConfigError, match=said):
        send.using(key="k", debounce="5m").using(**options)
    with pytest.raises(ConfigError, match=said):
        send.using(key="k", **options).using(debounce="5m")


def test_b11_a_batch_refuses_debounced_jobs(app: Duly, outside: Outside) -> None:
    @app.task
    def send(n: int) -> None: ...

    later = send.using(key="k", debounce="5m")
    with app.batch("import") as batch:
        with pytest.raises(ConfigError, match="batch"):
            later.using(batch=batch)
        with pytest.raises(ConfigError, match="belongs to no batch"):
            later.enqueue(1)
        with pytest.raises(ConfigError, match="belongs to no batch"):
            asyncio.run(later.aenqueue(1))
        send.using(key="k", unique_for="1h").enqueue(1)
    assert outside.query("select count(*) from duly_job") == [(1,)]


def test_b11_callbacks_and_schedules_have_neither(app: Duly) -> None:
    @app.task
    def tidy() -> None: ...

    for option in ("debounce", "unique_for"):
        task = tidy.using(**{option: "5m"})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=option):
            app.batch("b", on_complete=task)
        with pytest.raises(ConfigError, match=option):
            app.every("10m", name=option)(task)


@pytest.fixture
def shared(where: tuple[str, str], app: Duly) -> Iterator[Any]:
    app.driver.run(ops.clock())
    kind, url = where
    conn: Any = psycopg.connect(url) if kind == "postgres" else sqlite3.connect(url, timeout=5)
    yield conn
    conn.close()


@HOLDABLE
def test_b11_a_debounce_is_part_of_the_callers_transaction(app: Duly, outside: Outside, shared: Any) -> None:
    @app.task
    def send(n: int) -> None: ...

    later = send.using(key="k", debounce="1h")
    job = later.enqueue(1)
    later.using(conn=shared).enqueue(2)
    shared.rollback()
    assert found(app, job.id).payload == {"n": 1}
    assert later.using(conn=shared).enqueue(3).id == job.id
    shared.commit()
    assert found(app, job.id).payload == {"n": 3}
    assert outside.query("select count(*) from duly_job") == [(1,)]


def test_b11_unique_for_keeps_the_key_for_its_window(app: Duly) -> None:
    @app.task
    def send(n: int) -> int:
        return n

    once = send.using(key="k", unique_for="400ms")
    first = once.enqueue(1)
    work(app)
    with pytest.raises(KeyConflict):
        once.enqueue(2)
    kept = app.driver.run(ops.get(first.id))
    assert kept is not None
    assert kept.state is State.SUCCEEDED
    seconds: list[Any] = []

    def free() -> bool:
        try:
            seconds.append(once.enqueue(2))
        except KeyConflict:
            return False
        return True

    work_until(app, free)
    assert seconds[0].id != first.id


@pytest.mark.parametrize("drained", [False, True])
def test_b11_drain_and_inline_run_debounced_and_unique_jobs(app: Duly, drained: bool) -> None:
    ran: list[int] = []

    @app.task
    def send(n: int) -> None:
        ran.append(n)

    with testing.frozen(app) as clock:
        later = send.using(key="later", debounce="1h")
        once = send.using(key="once", unique_for="1h")
        if drained:
            for n in range(3):
                later.enqueue(n)
            once.enqueue(9)
            testing.drain(app, scheduled=True)
            assert ran == [9, 2]
            assert later.enqueue(3).deduplicated is False
        else:
            with testing.inline(app):
                later.enqueue(1)
                later.enqueue(2)
                once.enqueue(9)
                assert once.enqueue(9).deduplicated
                assert ran == [9]
            clock.advance("1h")
            testing.drain(app)
            assert ran == [9, 2]
        assert once.enqueue(9).deduplicated is False
