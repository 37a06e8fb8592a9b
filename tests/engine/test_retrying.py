"""Retry, queues and workers through the public names."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from typing import Any

import pytest

from duly import Duly, Retry
from duly.errors import JobNotFound, NotReplayable, TransitionRefused
from duly.model import QueueFigure, State
from duly.store import ops
from tests.engine.conftest import found, take, work, work_until

UNKNOWN = "01890000-0000-7000-8000-000000000000"


@pytest.fixture(params=["retry", "aretry"])
def retry(request: pytest.FixtureRequest, app: Duly) -> Any:
    """Both ways to ask."""
    if request.param == "retry":
        return app.retry
    return lambda *args, **named: asyncio.run(app.aretry(*args, **named))


@pytest.fixture
def double(app: Duly) -> Any:
    @app.task(max_attempts=1)
    def double(number: int) -> int:
        if number < 0:
            raise ValueError("no")
        return number * 2

    return double


def test_a_job_that_was_put_off_runs_now_under_its_own_id(app: Duly, double: Any, retry: Any) -> None:
    job = double.using(delay="1h").enqueue(4)
    work(app)
    assert found(app, job.id).state is State.SCHEDULED
    assert retry(job.id, by="ann", why="in a hurry") == job.id
    work(app)
    assert job.result(timeout=5) == 8
    (event,) = [event for event in app.driver.run(ops.events(job_id=job.id)) if event.name == "job.retried"]
    assert (event.by, event.why) == ("ann", "in a hurry")


def fail(words: str) -> None:
    raise ValueError(words)


@pytest.mark.parametrize("kind", ["sync", "async", "retry"])
def test_r04_a_traceback_begins_at_the_handler(app: Duly, kind: str) -> None:
    def at_once() -> None:
        fail("oh")

    async def later() -> None:
        fail("oh")

    def again() -> None:
        try:
            fail("oh")
        except ValueError as error:
            raise Retry from error

    handler: Any = {"sync": at_once, "async": later, "retry": again}[kind]
    job = app.task(name="failing", max_attempts=1)(handler).enqueue()
    app.run(drain=True)
    [attempt] = app.driver.run(ops.attempts(job.id))
    assert attempt.traceback is not None
    files = re.findall(r'File "(.*)", line \d+, in (.*)', attempt.traceback)
    assert files == [(__file__, handler.__qualname__.rpartition(".")[2]), (__file__, "fail")]


def test_a_job_that_is_ready_is_left_as_it_is(app: Duly, double: Any, retry: Any) -> None:
    job = double.enqueue(4)
    before = found(app, job.id)
    assert retry(job.id) == job.id
    assert found(app, job.id) == before


def test_a_dead_or_cancelled_job_is_replayed_under_a_new_id(app: Duly, double: Any, retry: Any) -> None:
    dead, cancelled = double.enqueue(-1), double.using(delay="1h").enqueue(4)
    app.cancel(cancelled.id)
    work(app)
    for job in (dead, cancelled):
        new_id = retry(job.id, by="ann", why="again")
        assert new_id != job.id
        assert found(app, new_id).replay_of == job.id
        assert retry(job.id) == new_id  # a second asking gets the first's
    work(app)
    assert found(app, app.retry(cancelled.id)).result == 8


def test_a_job_that_runs_or_has_succeeded_is_refused_and_an_unknown_one_is_not_found(
    app: Duly, double: Any, retry: Any
) -> None:
    job = double.enqueue(4)
    work(app)
    with pytest.raises(NotReplayable, match="has succeeded") as refused:
        retry(job.id)
    assert refused.value.job_id == job.id
    running = double.enqueue(5)
    assert take(app).id == running.id
    with pytest.raises(TransitionRefused, match="runs: wait until it has ended, or cancel it first"):
        retry(running.id)
    for nobody in (UNKNOWN, "no id"):
        with pytest.raises(JobNotFound, match="no job has the id"):
            retry(nobody)


def test_queues_and_workers_are_the_same_from_a_coroutine(app: Duly, double: Any) -> None:
    double.using(delay="1h").enqueue(4)
    assert app.queues() == [QueueFigure("default", ready=0, scheduled=1, running=0, waiting=0, oldest_ms=None)]
    assert asyncio.run(app.aqueues()) == app.queues()
    app.driver.run(ops.register("w", host="h", pid=1, queues=["default"], tasks=["double"], beat_ms=60_000, slots=3))
    (worker,) = app.workers()
    assert (worker.id, worker.alive, worker.slots) == ("w", True, 3)
    assert asyncio.run(app.aworkers()) == app.workers()


def test_jobs_are_listed_by_the_beginning_of_their_ids(app: Duly, double: Any) -> None:
    one, _ = double.using(delay="1h").enqueue(4), double.enqueue(5)
    assert [job.id for job in app.list(prefix=one.id)] == [one.id]
    assert len(app.list(prefix=one.id[:4])) == 2


@pytest.mark.slow
def test_each_heartbeat_records_slots_and_counts_of_attempts(app: Duly) -> None:
    gate = threading.Event()
    tries: list[int] = []

    @app.task(max_attempts=2, backoff=[0])
    def flaky() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError

    @app.task(max_attempts=1)
    def bad() -> None:
        raise ValueError

    @app.task
    def long() -> None:
        gate.wait(20)

    def told() -> bool:
        said = [(one.slots, one.running, one.succeeded, one.failed) for one in app.workers()]
        if said != [(3, 1, 1, 2)]:
            return False
        gate.set()
        return True

    for task in (flaky, bad, long):
        task.enqueue()
    work_until(app, told, concurrency=3)


def test_every_sync_call_of_the_app_has_its_async_twin() -> None:
    for name in ("retry", "queues", "workers"):
        sync, twin = getattr(Duly, name), getattr(Duly, f"a{name}")
        assert inspect.iscoroutinefunction(twin)
        assert inspect.signature(sync).parameters == inspect.signature(twin).parameters
