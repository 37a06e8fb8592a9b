"""The worker in this process, on every store: timeouts, cancellation, stalls, parking, stopping, logs."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from duly import Cancel, Ctx, Duly, SyncCtx
from duly.app.lease import Lease
from duly.errors import JobTimeout, LeaseLost
from duly.model import State
from duly.rules.keys import new_token
from duly.store import ops
from duly.worker import runner
from duly.worker.deadlines import Deadlines
from duly.worker.threads import Threads, TimeIsUp
from duly.worker.worker import Worker
from tests.contract.stores import D1OnFile
from tests.servers.d1 import D1Mannered

SECONDS = 20


@pytest.fixture(params=["sqlite", "postgres", "d1"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Duly]:
    if request.param == "postgres":
        made = Duly(request.getfixturevalue("postgres_url"), lease="2s", grace="5s")
    else:
        made = Duly(tmp_path / "jobs.db", lease="2s", grace="5s")
    if request.param == "d1":
        driver = D1OnFile(D1Mannered(tmp_path / "d1.db"))
        driver.migrate()
        driver.database.calls = 0
        driver.database.lose = lambda call: call % 7 == 0
        made.database.driver = driver
    yield made
    made.close()


@asynccontextmanager
async def working(app: Duly, **options: Any) -> Any:
    """A worker that runs beside the test, and stops with it."""
    worker = Worker(app, signals=False, **options)
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(SECONDS):
            yield worker
    finally:
        worker.stop()
        await asyncio.wait_for(running, SECONDS)


async def until(condition: Callable[[], Any]) -> None:
    """Wait for something that another thread or the database brings about."""
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


async def ended(app: Duly, job_id: str) -> Any:
    async with asyncio.timeout(SECONDS):
        while (job := await app.aget(job_id)) is None or not job.state.ended:
            await asyncio.sleep(0.01)
    return job


@contextmanager
def told(app: Duly) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    heard: list[tuple[str, dict[str, Any]]] = []
    app.events.listen(lambda name, fields: heard.append((name, dict(fields))))
    yield heard


def names(heard: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [name for name, _ in heard]


# Timeouts


def test_j16_an_async_handler_that_runs_too_long_is_cancelled(app: Duly) -> None:
    cancelled = []

    @app.task(timeout="200ms", max_attempts=1)
    async def sleepy() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    job = sleepy.enqueue()
    app.run(drain=True, signals=False)
    found = app.get(job.id)
    assert found is not None
    assert (found.state, cancelled) == (State.DEAD, [True])
    assert "JobTimeout" in (found.error or "")


@pytest.mark.slow
def test_j16_a_thread_is_requested_to_stop_and_then_interrupted(app: Duly) -> None:
    seen: list[Any] = []

    @app.task(timeout="200ms", max_attempts=1)
    def busy(ctx: SyncCtx) -> None:
        try:
            while True:
                seen.append(ctx.cancelled)
                time.sleep(0.01)
        except JobTimeout as error:
            seen.append(error)
            raise

    job = busy.enqueue()
    app.run(drain=True, signals=False)
    found = app.get(job.id)
    assert found is not None
    assert found.state is State.DEAD
    assert "JobTimeout" in (found.error or "")
    assert isinstance(seen[-1], JobTimeout)
    assert seen[0] is False
    assert seen[-2] is True


@pytest.mark.slow
def test_j16_a_thread_is_interrupted_after_its_database_call(app: Duly, monkeypatch: Any) -> None:
    """Interrupted in the middle, others whose jobs it commits along would wait for ever."""
    rows, interrupt, asked_again = app.driver._rows, Threads.interrupt, threading.Event()
    tried: list[Any] = []
    seen: list[Any] = []

    def interrupted(threads: Threads, lease: Any) -> None:
        interrupt(threads, lease)
        tried.append(lease)
        if len(tried) == 3:
            asked_again.set()

    def slowly(op: Any) -> Any:
        if op.params.get("task") != "child":
            return rows(op)
        assert asked_again.wait(20)
        found = rows(op)
        seen.append("written")
        return found

    @app.task
    def child() -> None: ...

    @app.task(timeout="200ms", max_attempts=1)
    def parent() -> None:
        try:
            child.enqueue()
            while True:
                time.sleep(0.01)
        except JobTimeout as error:
            seen.append(type(error))
            raise

    job = parent.enqueue()
    monkeypatch.setattr(Threads, "interrupt", interrupted)
    monkeypatch.setattr(app.driver, "_rows", slowly)
    app.run(drain=True, signals=False)
    assert seen == ["written", TimeIsUp]
    found, [added] = app.get(job.id), app.list(task="child")
    assert found is not None
    assert (found.state, added.state) == (State.DEAD, State.SUCCEEDED)


@pytest.mark.parametrize("asks", ["all the time", "once"])
@pytest.mark.slow
def test_j16_a_thread_in_database_calls_is_interrupted_too(app: Duly, asks: str, monkeypatch: Any) -> None:
    """Who asks all the time is hardly ever anywhere else, and would run on for ever."""
    rows, seen, heard = app.driver._rows, [], []

    def slowly(op: Any) -> Any:
        if op.name == "get":
            time.sleep(0.03)
        return rows(op)

    @app.task(timeout="200ms", max_attempts=1)
    def asking() -> None:
        until = time.monotonic() + 20
        try:
            app.get(job.id)
            while time.monotonic() < until:
                app.get(job.id) if asks == "all the time" else time.sleep(0.01)
        except JobTimeout as error:
            seen.append(type(error))
            raise

    monkeypatch.setattr(app.driver, "_rows", slowly)
    app.events.listen(lambda name, fields: heard.append(name))
    job = asking.enqueue()
    app.run(drain=True, signals=False)
    assert seen == [TimeIsUp]
    assert "job.stuck" not in heard


def test_j16_an_exception_sent_to_a_thread_is_withdrawn_when_its_handler_ended(monkeypatch: Any) -> None:
    raised: list[Any] = []
    threads = Threads(1, lambda work, name: threading.Thread(), lambda lease: None, runner)
    lease = SimpleNamespace(thread=None, interrupted=False)

    def in_time(_: Any) -> Any:
        threads.interrupt(lease)  # type: ignore[arg-type]
        return "outcome"

    monkeypatch.setattr("duly.worker.threads._raise_into", lambda thread, error: raised.append(error))
    monkeypatch.setattr(runner, "run", lambda lease: "outcome")
    assert threads.run(lease) == "outcome"  # type: ignore[arg-type, comparison-overlap]
    assert raised == []  # nobody has to wait for anybody where nothing was raised
    monkeypatch.setattr(runner, "run", in_time)
    assert threads.run(lease) == "outcome"  # type: ignore[arg-type, comparison-overlap]
    assert raised == [TimeIsUp, None]
    threads.interrupt(lease)  # type: ignore[arg-type]  # too late
    assert raised == [TimeIsUp, None]


def test_j16_a_timeout_that_meets_the_return_of_its_handler_ends_the_job_and_not_its_thread(monkeypatch: Any) -> None:
    threads = Threads(1, lambda work, name: threading.Thread(), lambda lease: None, runner)
    job = SimpleNamespace(task="work", id="1")
    definition = SimpleNamespace(timeout_ms=5)
    lease: Any = SimpleNamespace(thread=None, interrupted=False, job=job, definition=definition)

    def too_late(_: Any) -> Any:
        threads.interrupt(lease)  # heard by whoever runs next in this thread
        return "outcome"

    monkeypatch.setattr(runner, "run", too_late)
    outcome: Any = threads.run(lease)
    assert outcome == "outcome" or outcome.error.kind == "duly.errors.JobTimeout"
    assert lease.thread is None
    assert sum(range(1000)) == 499_500  # nothing comes after it


@pytest.mark.parametrize("returned", ["too late", None])
def test_j16_a_thread_that_stops_on_request_is_not_interrupted(app: Duly, returned: str | None) -> None:
    seen: list[str] = []

    @app.task(timeout="200ms", max_attempts=1)
    def polite(ctx: SyncCtx) -> str | None:
        while not ctx.cancelled:
            time.sleep(0.01)
        seen.append("stopped by itself")
        return returned

    job = polite.enqueue()
    app.run(drain=True, signals=False)
    found = app.get(job.id)
    assert found is not None
    # A result after the time is up does not count.
    assert (found.state, found.result, seen) == (State.DEAD, None, ["stopped by itself"])


async def stuck_thread(app: Duly) -> tuple[Any, Any]:
    """A handler that nothing reaches, given up on."""
    free = threading.Event()
    began: list[float] = []

    @app.task(timeout="200ms", max_attempts=5, backoff=[0.01, 0.01, 0.01, 0.01])
    def deaf() -> str:
        began.append(time.monotonic())
        while True:
            try:
                free.wait()
                return "late"
            except JobTimeout:
                continue

    @app.task
    def other() -> None: ...

    job = await deaf.aenqueue()
    with told(app) as heard:
        async with working(app, concurrency=3) as worker:
            await until(lambda: "job.stuck" in names(heard))
            await until(lambda: app.get(job.id).state is State.SCHEDULED)  # type: ignore[union-attr]
            given_up = app.get(job.id)
            await until(lambda: not worker.held.leases())
            room = worker.claiming.room("default")
            done = await other.aenqueue()
            await ended(app, done.id)
            free.set()
            await until(lambda: "job.ended_late" in names(heard))
            late = app.get(job.id)
            await app.acancel(job.id)
    return given_up, (room, late, len(began))


@pytest.mark.slow
def test_j16_a_thread_that_cannot_be_reached_keeps_its_slot_and_its_job_waits_for_the_lease(app: Duly) -> None:
    given_up, (room, late, began) = asyncio.run(stuck_thread(app))
    now = app.driver.run(ops.clock())
    assert given_up.due_at > now - 5000  # the lease is 2 s, the backoff was 10 ms
    assert given_up.due_at - given_up.created_at >= 2000
    assert room == 2
    assert late.state is State.SCHEDULED
    assert began == 1


@pytest.mark.slow
def test_j16_a_worker_with_half_its_threads_stuck_requests_a_restart(app: Duly) -> None:
    free = threading.Event()
    asked = []

    @app.task(timeout="100ms", backoff=[60])
    def deaf() -> None:
        while not free.is_set():
            try:
                free.wait()
            except JobTimeout:
                continue

    job = deaf.enqueue()
    try:
        app.run(concurrency=2, signals=False, grace="100ms", on_stuck=lambda: asked.append(True))
    finally:
        free.set()
    found = app.get(job.id)
    assert found is not None
    assert (asked, found.state, found.attempt) == ([True], State.SCHEDULED, 1)


@pytest.mark.slow
def test_j16_an_async_handler_that_holds_on_is_given_up_on(app: Duly) -> None:
    async def scenario() -> Any:
        free = asyncio.Event()

        @app.task(timeout="100ms", max_attempts=1)
        async def stubborn() -> None:
            while not free.is_set():
                try:
                    await free.wait()
                except asyncio.CancelledError:
                    continue

        with told(app) as heard:
            async with working(app):
                job = await stubborn.aenqueue()
                found = await ended(app, job.id)
                assert "job.stuck" in names(heard)
                free.set()
                await until(lambda: "job.ended_late" in names(heard))
        return found

    found = asyncio.run(scenario())
    assert (found.state, "JobTimeout" in found.error) == (State.DEAD, True)


# Cancelling


def test_j17_a_job_that_does_not_run_ends_at_once(app: Duly) -> None:
    @app.task
    def work() -> None: ...

    job = work.enqueue()
    assert app.cancel(job.id) is State.CANCELLED


def test_j17_a_running_async_handler_stops_at_its_next_await(app: Duly) -> None:
    async def scenario() -> Any:
        began = asyncio.Event()

        @app.task
        async def waits() -> None:
            began.set()
            await asyncio.sleep(60)

        async with working(app):
            job = await waits.aenqueue()
            await began.wait()
            assert await app.acancel(job.id, by="me", why="no longer wanted") is State.RUNNING
            return await ended(app, job.id)

    found = asyncio.run(scenario())
    assert (found.state, found.reason) == (State.CANCELLED, "cancelled on request")
    assert found.cancel_requested_at is not None
    assert app.driver.run(ops.attempts(found.id)) == []  # it did not fail


@pytest.mark.slow
def test_j17_a_running_sync_handler_stops_at_its_next_context_call(app: Duly) -> None:
    async def scenario() -> Any:
        began = threading.Event()
        raised: list[BaseException] = []

        @app.task
        def counts(ctx: SyncCtx) -> None:
            began.set()
            try:
                while True:
                    ctx.progress(1)
                    time.sleep(0.02)
            except Cancel as error:
                raised.append(error)
                raise

        async with working(app):
            job = await counts.aenqueue()
            await asyncio.to_thread(began.wait, SECONDS)
            await app.acancel(job.id)
            found = await ended(app, job.id)
        assert len(raised) == 1
        return found

    assert asyncio.run(scenario()).state is State.CANCELLED


def test_j17_a_handler_that_returns_normally_has_succeeded(app: Duly) -> None:
    async def scenario() -> Any:
        began = asyncio.Event()

        @app.task
        async def finishes() -> str:
            began.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return "cleaned up"
            return "never"

        async with working(app):
            job = await finishes.aenqueue()
            await began.wait()
            await app.acancel(job.id)
            return await ended(app, job.id)

    found = asyncio.run(scenario())
    assert (found.state, found.result) == (State.SUCCEEDED, "cleaned up")
    assert found.cancel_requested_at is not None


# Leases


@pytest.mark.slow
def test_j10_a_job_longer_than_its_lease_runs_once(app: Duly) -> None:
    async def scenario() -> Any:
        ran = []

        @app.task(lease="600ms")
        async def long(ctx: Ctx) -> int:
            ran.append(ctx.attempt)
            await asyncio.sleep(2.0)
            return len(ran)

        async with working(app):
            job = await long.aenqueue()
            await until(lambda: ran)
            for _ in range(8):
                await asyncio.sleep(0.2)
                assert await app.driver.arun(ops.expired_leases()) == []
            found = await ended(app, job.id)
        return found, ran

    found, ran = asyncio.run(scenario())
    assert (found.state, found.attempt, found.crashes, ran) == (State.SUCCEEDED, 1, 0, [1])


def steal(app: Duly, job_id: str) -> None:
    """Take a running job from its worker, as a rescue would after its lease has ended."""
    later = app.driver.run(ops.clock()) + 60_000
    seen = app.driver.run(ops.expired_leases(now=later))
    assert [one.id for one in seen] == [job_id]
    app.driver.run(ops.pause("queue", "default", by="test", why="so that nobody takes it again"))
    app.driver.run(ops.rescue(seen, now=later))


def test_j09_a_handler_with_a_lost_lease_gets_lease_lost(app: Duly) -> None:
    async def scenario() -> Any:
        began, told_by = asyncio.Event(), []

        @app.task
        async def unlucky(ctx: Ctx) -> None:
            began.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                try:
                    await ctx.progress(99)
                except LeaseLost as error:
                    told_by.append(error)
                raise

        with told(app) as heard:
            async with working(app):
                job = await unlucky.aenqueue()
                await began.wait()
                await asyncio.to_thread(steal, app, job.id)
                await until(lambda: "job.lost" in names(heard))
                found = await app.aget(job.id)
        return found, told_by

    found, told_by = asyncio.run(scenario())
    assert found.state is State.READY
    assert found.progress is None
    assert len(told_by) == 1


@pytest.mark.slow
def test_j21_a_stalled_handler_is_reported_while_its_lease_is_valid(app: Duly) -> None:
    async def scenario() -> Any:
        free = asyncio.Event()

        @app.task(stall_after="200ms")
        async def quiet(ctx: Ctx) -> None:
            await ctx.heartbeat()
            await free.wait()

        with told(app) as heard:
            async with working(app):
                job = await quiet.aenqueue()
                await until(lambda: "job.stalled" in names(heard))
                found = await app.aget(job.id)
                await asyncio.sleep(0.3)  # some more looks, which say nothing new
                free.set()
                await ended(app, job.id)
        return found, names(heard).count("job.stalled")

    found, count = asyncio.run(scenario())
    assert (found.state, count) == (State.RUNNING, 1)
    assert found.heartbeat_at is not None


# Parking


def test_j19_an_unknown_task_is_parked_and_woken_by_a_worker_that_knows_it(app: Duly, tmp_path: Path) -> None:
    other = Duly()
    other.database.driver = app.driver

    @other.task
    def unknown() -> str:
        return "known at last"

    @app.task
    def known() -> None: ...

    async def scenario() -> Any:
        stranger = await unknown.aenqueue()
        async with working(app):
            await until(lambda: app.get(stranger.id).state is State.WAITING)  # type: ignore[union-attr]
            why = await app.awhy(stranger.id)
            done = await known.aenqueue()
            await ended(app, done.id)
        async with working(other):
            return why, await ended(app, stranger.id)

    why, found = asyncio.run(scenario())
    assert why.gate == "parked"
    assert "unknown" in why.sentence
    assert (found.state, found.result, found.attempt) == (State.SUCCEEDED, "known at last", 1)


def test_j19_a_newer_schema_version_is_parked_and_woken_by_a_worker_that_knows_it(app: Duly) -> None:
    newer = Duly()
    newer.database.driver = app.driver

    @app.task(name="work")
    def old(a: int) -> str:
        return "old"

    @newer.task(name="work", schema_version=2)
    def new(b: int) -> str:
        return "new"

    async def scenario() -> Any:
        job = await new.aenqueue(1)
        async with working(app):
            await until(lambda: app.get(job.id).state is State.WAITING)  # type: ignore[union-attr]
            parked = await app.aget(job.id)
        async with working(newer):
            return parked, await ended(app, job.id)

    parked, found = asyncio.run(scenario())
    assert (parked.attempt, "schema version 2" in parked.reason) == (0, True)
    assert (found.state, found.result, found.attempt) == (State.SUCCEEDED, "new", 1)


# Stopping


def test_j18_a_job_that_exceeds_the_grace_time_is_released_without_losing_an_attempt(app: Duly) -> None:
    async def scenario() -> Any:
        began, told = asyncio.Event(), []

        @app.task
        async def long(ctx: Ctx) -> None:
            began.set()
            try:
                await asyncio.sleep(60)
            finally:
                told.append(ctx.cancelled)

        async with working(app, concurrency=1, grace="100ms"):
            jobs = [await long.aenqueue() for _ in range(3)]
            await began.wait()
        assert told == [True]
        return [await app.aget(job.id) for job in jobs]

    found = asyncio.run(scenario())
    assert [(job.state, job.attempt) for job in found] == [(State.READY, 0)] * 3


def test_j18_a_job_that_ends_within_the_grace_time_is_recorded(app: Duly) -> None:
    async def scenario() -> Any:
        began = asyncio.Event()

        @app.task
        async def short() -> str:
            began.set()
            await asyncio.sleep(0.3)
            return "done"

        async with working(app):
            job = await short.aenqueue()
            await began.wait()
        return await app.aget(job.id)

    found = asyncio.run(scenario())
    assert (found.state, found.result) == (State.SUCCEEDED, "done")


# What a handler leaves behind


def test_j24_an_enqueue_that_nobody_awaits_is_recorded_before_the_handler_ends(
    app: Duly, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[str | None] = []
    arun = app.driver.arun

    async def slowly(op: Any) -> Any:
        if op.name == "enqueue":
            await asyncio.sleep(0.2)
        return await arun(op)

    def look(name: str, fields: Mapping[str, Any]) -> None:
        if name == "job.succeeded" and fields["task"] == "parent":
            there.extend(one.causation_id for one in app.list(task="child"))

    @app.task
    async def child() -> None: ...

    @app.task
    async def parent() -> None:
        asyncio.get_running_loop().create_task(child.using(delay="1h").aenqueue())
        await asyncio.sleep(0)

    job = parent.enqueue()
    monkeypatch.setattr(app.driver, "arun", slowly)
    app.events.listen(look)
    app.run(drain=True, signals=False)
    assert there == [job.id]


def test_j24_pending_tasks_of_a_handler_are_named(app: Duly, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        left = []

        async def forgotten() -> None:
            await asyncio.sleep(60)

        @app.task
        async def careless() -> None:
            left.append(asyncio.get_running_loop().create_task(forgotten()))

        job = await careless.aenqueue()
        async with working(app):
            await ended(app, job.id)
        left[0].cancel()

    with caplog.at_level(logging.WARNING, "duly.worker"):
        asyncio.run(scenario())
    warnings = [record for record in caplog.records if record.message == "handler.left_pending"]
    assert len(warnings) == 1
    assert "forgotten" in str(warnings[0].__dict__["pending"])


# Logs


def test_m04_each_attempt_is_logged_with_its_ids_and_without_its_payload(
    app: Duly, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(max_attempts=2, backoff=[0.01])
    def fails(secret: str) -> None:
        raise ValueError("no")

    job = fails.using(key="k1", subject="order 7", correlation_id="c-1").enqueue("hush")
    with caplog.at_level(logging.DEBUG, "duly.worker"):
        deadline = time.monotonic() + SECONDS
        while not (app.get(job.id).state.ended or time.monotonic() > deadline):  # type: ignore[union-attr]
            app.run(drain=True, signals=False)
    lines = [record for record in caplog.records if record.message in ("job.failed", "job.dead")]
    assert [(line.message, line.__dict__["attempt"], line.levelname) for line in lines] == [
        ("job.failed", 1, "WARNING"),
        ("job.dead", 2, "ERROR"),
    ]
    said = lines[0].__dict__
    assert {name: said[name] for name in ("job_id", "task", "correlation_id", "idempotency_key", "subject")} == {
        "job_id": job.id,
        "task": "fails",
        "correlation_id": "c-1",
        "idempotency_key": "k1",
        "subject": "order 7",
    }
    assert (said["outcome"], said["error_class"]) == ("scheduled", "ValueError")
    assert not [record for record in caplog.records if "hush" in str(record.__dict__)]


def test_m04_a_success_is_logged_at_debug_only(app: Duly, caplog: pytest.LogCaptureFixture) -> None:
    @app.task
    def fine() -> None: ...

    fine.enqueue()
    with caplog.at_level(logging.DEBUG, "duly.worker"):
        app.run(drain=True, signals=False)
    assert [record.levelname for record in caplog.records if record.message == "job.succeeded"] == ["DEBUG"]


# Slots


def test_at_most_concurrency_handlers_of_any_kind_run_at_once(app: Duly) -> None:
    running, most = [0], [0]
    lock = threading.Lock()

    @contextmanager
    def counted() -> Iterator[None]:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        yield
        with lock:
            running[0] -= 1

    @app.task
    async def on_loop(n: int) -> None:
        with counted():
            await asyncio.sleep(0.001)

    @app.task
    def in_thread(n: int) -> None:
        with counted():
            time.sleep(0.001)

    for n in range(0, 200, 10):
        on_loop.enqueue_many(on_loop.call(n) for n in range(n, n + 10))
        in_thread.enqueue_many(in_thread.call(n) for n in range(n, n + 10))
    app.run(drain=True, signals=False, concurrency=3)
    assert most == [3]
    assert {job.state for job in app.list(limit=1000)} == {State.SUCCEEDED}


def test_a_queue_runs_no_more_at_once_than_its_limit(app: Duly) -> None:
    running, most = [0], [0]

    @app.task(queue="few")
    async def few(n: int) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.005)
        running[0] -= 1

    few.enqueue_many(few.call(n) for n in range(60))
    app.run(drain=True, signals=False, queues={"few": 2})
    assert most == [2]


def test_contexts_of_handlers_are_their_own(app: Duly) -> None:
    from contextvars import ContextVar

    mark: ContextVar[int] = ContextVar("mark", default=0)
    seen, kept = [], []

    @app.task
    async def marks(n: int) -> None:
        seen.append(mark.get())
        mark.set(n)
        if n % 2:  # and some wait for nothing
            await asyncio.sleep(0)
        kept.append(mark.get() == n)

    marks.enqueue_many(marks.call(n) for n in range(1, 30))
    app.run(drain=True, signals=False, concurrency=2)
    assert (seen, kept) == ([0] * 29, [True] * 29)


def test_the_workers_constant_for_a_plain_success_is_what_decide_returns(app: Duly) -> None:
    @app.task
    async def work() -> None: ...

    async def scenario() -> None:
        worker = Worker(app, signals=False)
        await work.aenqueue()
        [lease] = await worker.claiming.claim("default", 1, app.tasks)
        assert worker.finishing.judged(lease, runner.DONE) == runner.change_of(lease, runner.DONE, 0.5)
        await app.driver.arun(ops.release([lease.job]))

    asyncio.run(scenario())


def test_j10_a_lease_that_ended_does_not_take_its_successor_along(app: Duly) -> None:
    @app.task
    def work() -> None: ...

    async def scenario() -> None:
        worker = Worker(app, signals=False)
        await work.aenqueue()
        job = (await app.driver.arun(ops.claim("default", limit=1, token=new_token(), worker="w")))[0]
        # Given back and claimed again by one turn, whose answers come in either order.
        old, new = (Lease(job, app.tasks["work"].definition, app.database, 0.0) for _ in range(2))
        worker.held._by_job[job.id] = new
        worker.held.let_go([old])
        assert worker.held.leases() == [new]
        worker.held.let_go([new])
        assert worker.held.leases() == []

    asyncio.run(scenario())


def test_j12_the_time_that_a_heartbeat_waits_is_no_silence_of_the_event_loop(
    app: Duly, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, answered = [0.0], app.driver.run
    worker = Worker(app, clock=lambda: now[0])
    lease_s = worker.shared.shortest_ms / 1000

    def after_a_minute(op: Any) -> Any:
        now[0] += 60
        return answered(op)

    monkeypatch.setattr(app.driver, "run", after_a_minute)
    now[0] = 0.5 * lease_s  # since then the event loop has not answered
    worker.heartbeat.beat()
    worker.heartbeat.beat()
    assert now[0] > 120
    now[0] += 0.75 * lease_s
    worker.heartbeat.beat()
    blocked = [vars(one)["seconds"] for one in caplog.records if one.message == "worker.loop_blocked"]
    assert blocked == [round(1.25 * lease_s, 1)]


def test_a_worker_stops_when_one_of_its_parts_fails(app: Duly, monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaks(self: Deadlines) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(Deadlines, "run", breaks)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        app.run(signals=False)


def test_a_job_whose_backoff_fails_ends_dead_and_frees_its_slot(app: Duly) -> None:
    class Odd:
        def delay_ms(self, attempt: int, chance: float) -> int:
            raise ZeroDivisionError("odd")

    @app.task
    def fails() -> None:
        raise ValueError("no")

    @app.task
    def fine() -> None: ...

    app.tasks["fails"].definition.policy.__init__(Odd())  # type: ignore[misc]
    job, other = fails.enqueue(), fine.enqueue()
    app.run(drain=True, signals=False, concurrency=1)
    found = app.get(job.id)
    assert found is not None
    assert (found.state, found.reason) == (State.DEAD, "its end could not be judged")
    assert app.get(other.id).state is State.SUCCEEDED  # type: ignore[union-attr]


@pytest.mark.slow
def test_j07_a_job_due_beside_a_backlog_is_ready_within_a_second_after_idling(app: Duly) -> None:
    order: list[str] = []

    @app.task
    async def backlog() -> None:
        order.append("backlog")
        await asyncio.sleep(0.02)

    @app.task(priority=10)
    async def urgent() -> None:
        order.append("urgent")

    async def run() -> None:
        worker = app.worker(concurrency=1, signals=False)
        running = asyncio.create_task(worker.run())
        while not app.events.counts["worker.started"] or worker.busy:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # its first look at what is to be tidied is over
        await urgent.using(delay="300ms").aenqueue()
        await backlog.aenqueue_many(backlog.call() for _ in range(200))
        while "urgent" not in order:
            await asyncio.sleep(0.05)
        worker.stop()
        await running

    asyncio.run(asyncio.wait_for(run(), 60))
    assert order.index("urgent") < 110  # of 200, each of which takes 20 ms
