"""What a hostile reading of the engine found, each with the shortest way to show it."""

from __future__ import annotations

import asyncio
import os
import signal as signals
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psycopg
import pytest

from duly import Cancel, Ctx, Duly, Retry, SyncCtx
from duly.model import Change, Failure, State
from duly.rules.control import Signal
from duly.rules.keys import new_token
from duly.store import ops
from duly.store.op import Finish
from duly.worker import slots
from duly.worker.worker import Worker

SECONDS = 20


@dataclass
class Order:
    """Arguments that a deploy made stricter."""

    number: int
    strict: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.strict:
            raise KeyError("a new rule")


@pytest.fixture(params=["sqlite", "postgres"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Duly]:
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else tmp_path / "jobs.db"
    made = Duly(url, lease="2s", grace="1s")
    yield made
    made.close()


@pytest.fixture
def on_postgres(postgres_url: str) -> Iterator[Duly]:
    made = Duly(postgres_url, lease="2s", grace="1s")
    yield made
    made.close()


def state(app: Duly, job_id: str) -> tuple[State, str | None]:
    job = app.get(job_id)
    assert job is not None
    return job.state, job.reason


def drain(app: Duly, **options: Any) -> None:
    app.run(drain=True, signals=False, **options)


@pytest.mark.parametrize("signal", [Retry(ValueError("no")), Cancel(404)])  # type: ignore[arg-type]
def test_j15_a_control_exception_with_a_reason_of_another_type_is_accepted(app: Duly, signal: Exception) -> None:
    @app.task(max_attempts=1)
    def odd() -> None:
        raise signal

    job = odd.enqueue()
    drain(app)
    found, reason = state(app, job.id)
    assert found in (State.DEAD, State.CANCELLED)
    assert reason in ("no", "404")


def test_j15_a_signal_of_the_users_own_kind_is_a_failure_at_worst(app: Duly) -> None:
    class Own(Signal): ...

    @app.task(max_attempts=1)
    async def odd() -> None:
        raise Own

    job = odd.enqueue()
    drain(app)
    assert state(app, job.id)[0] is State.DEAD


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_u01_arguments_whose_type_raises_anything_do_not_fit(
    app: Duly, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Order, "strict", False)
    if kind == "sync":

        @app.task(max_attempts=1)
        def sell(order: Order) -> None: ...

        job = sell.enqueue(Order(1))
    else:

        @app.task(max_attempts=1, name="sell")
        async def asell(order: Order) -> None: ...

        job = asell.enqueue(Order(1))
    monkeypatch.setattr(Order, "strict", True)
    drain(app)
    assert state(app, job.id) == (State.DEAD, "does not fit")


def test_j16_a_handler_that_cancels_its_own_task_affects_no_other_job(app: Duly) -> None:
    @app.task
    async def odd() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return "returned"

    @app.task
    async def fine() -> str:
        await asyncio.sleep(0)
        return "fine"

    # So many that they are claimed ahead: the next job begins at once where the odd one ended.
    jobs = fine.enqueue_many(fine.call() for _ in range(60))
    odd_ones = odd.using(priority=-1).enqueue_many(odd.call() for _ in range(30))
    jobs += fine.using(priority=-2).enqueue_many(fine.call() for _ in range(30))
    drain(app, concurrency=1)
    assert [job.result(0) for job in odd_ones] == ["returned"] * 30
    assert [job.result(0) for job in jobs] == ["fine"] * 90


def drain_in_time(app: Duly) -> None:
    asyncio.run(asyncio.wait_for(Worker(app, drain=True, signals=False, concurrency=1).run(), 30))


def cancel_me_in_a_moment() -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_soon(task.cancel)


def test_j16_a_cancel_between_two_jobs_affects_neither(app: Duly, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "FAIR_SECONDS", -1.0)  # between any two, the event loop has its turn

    @app.task
    async def odd(n: int) -> int:
        if n % 5 == 4:
            cancel_me_in_a_moment()
        return n

    jobs = odd.enqueue_many(odd.call(n) for n in range(90))
    drain_in_time(app)
    assert [job.result(0) for job in jobs] == list(range(90))


def test_j16_a_cancel_during_the_handover_of_a_job_does_not_lose_it(app: Duly, monkeypatch: pytest.MonkeyPatch) -> None:
    given, cancelled = slots.Slots._consumed, []

    def cancelled_then(self: slots.Slots, lease: Any) -> None:
        given(self, lease)
        if resting and not cancelled:
            cancelled.append(resting[0].cancel())

    monkeypatch.setattr(slots.Slots, "_consumed", cancelled_then)
    resting: list[asyncio.Task[Any]] = []

    @app.task
    async def work(n: int) -> int:
        task = asyncio.current_task()
        assert task is not None
        if n == 0:
            await work.aenqueue(1)  # which this one finds when it rests
            resting.append(task)
        return n

    first = work.enqueue(0)
    drain_in_time(app)
    assert first.result(0) == 0
    assert cancelled == [True]
    assert [job.state for job in app.list()] == [State.SUCCEEDED] * 2


def test_j16_a_cancel_while_pending_enqueues_are_written_ends_the_attempt(
    app: Duly, monkeypatch: pytest.MonkeyPatch
) -> None:
    arun = app.driver.arun

    async def slow(op: Any) -> Any:
        if op.name == "enqueue":
            await cancelled[0].wait()
        return await arun(op)

    monkeypatch.setattr(app.driver, "arun", slow)
    cancelled: list[asyncio.Event] = []

    @app.task(max_attempts=1)
    async def odd() -> None:
        cancelled.append(asyncio.Event())
        left.append(asyncio.create_task(fine.aenqueue()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        cancel_me_in_a_moment()
        asyncio.get_running_loop().call_soon(cancelled[0].set)

    @app.task
    async def fine() -> None: ...

    left: list[asyncio.Task[Any]] = []
    job = odd.enqueue()
    drain_in_time(app)
    found = app.get(job.id)
    assert found is not None
    assert (found.state, (found.error or "").partition(":")[0]) == (State.DEAD, "asyncio.exceptions.CancelledError")


def test_j16_a_handlers_own_timeouts_and_task_groups_work(app: Duly) -> None:
    @app.task
    async def impatient() -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            pass
        async with asyncio.TaskGroup() as group:
            one = group.create_task(asyncio.sleep(0, "grouped"))
        return one.result()

    jobs = impatient.enqueue_many(impatient.call() for _ in range(3))
    drain(app, concurrency=1)
    assert [job.result(0) for job in jobs] == ["grouped"] * 3


def test_j12_nothing_waits_for_a_slot_on_its_last_attempt(app: Duly, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task(max_attempts=2)
    async def work(n: int) -> None: ...

    work.enqueue_many(work.call(n) for n in range(30))
    failed = Change(State.SCHEDULED, after_ms=0, error=Failure("ValueError", "no"))
    once = app.driver.run(ops.claim("default", limit=30, token=new_token(), worker="w"))
    app.driver.run(ops.finish([Finish(job, failed) for job in once]))

    async def scenario() -> tuple[int, int]:
        worker = Worker(app, signals=False, concurrency=2)
        monkeypatch.setattr(worker.slots, "fill", lambda: None)
        assert await worker.claiming._take("default", 30, app.tasks) == 30
        return len(worker.held.waiting), len(worker.finishing.unsent)

    assert asyncio.run(scenario()) == (2, 28)


@pytest.mark.slow
def test_j18_a_worker_whose_owner_cancels_it_records_what_has_ended(app: Duly) -> None:
    ran: list[int] = []

    @app.task
    def work(n: int) -> None:
        ran.append(n)

    work.enqueue_many(work.call(n) for n in range(20_000))

    async def scenario() -> None:
        running = asyncio.create_task(app.arun(signals=False))
        while len(ran) < 200:
            await asyncio.sleep(0.001)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    for _ in range(6):
        ran.clear()
        asyncio.run(scenario())
        assert [job.id for job in app.list(state=State.RUNNING)] == []
    drain(app)
    done = app.list(state=State.SUCCEEDED, limit=100_000)
    assert len(done) == 20_000
    assert {job.attempt for job in done} == {1}


def test_j18_handlers_that_take_all_threads_of_the_loop_stop_neither_the_worker_nor_its_end(app: Duly) -> None:
    free = threading.Event()
    quick_ran = threading.Event()

    @app.task
    async def blocks() -> None:
        await asyncio.to_thread(free.wait, SECONDS)

    @app.task
    async def quick() -> None:
        quick_ran.set()

    blocks.enqueue_many(blocks.call() for _ in range(40))

    async def scenario() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
        worker = Worker(app, signals=False, concurrency=60, grace="100ms")
        running = asyncio.create_task(worker.run())
        while len(worker.held.leases()) < 40:
            await asyncio.sleep(0.01)
        job = await quick.aenqueue()
        async with asyncio.timeout(SECONDS):
            while not state(app, job.id)[0].ended:  # asked from here, as the loop's own threads are taken
                await asyncio.sleep(0.02)
            worker.stop()
            await running
        free.set()

    asyncio.run(scenario())
    assert quick_ran.is_set()


@pytest.mark.slow
def test_j27_an_unavailable_database_at_the_start_is_retried_with_pauses(tmp_path: Path) -> None:
    app = Duly("postgresql://nobody@127.0.0.1:1/none")
    tries: list[float] = []

    @app.task
    def work() -> None: ...

    async def scenario() -> None:
        worker = Worker(app, signals=False)
        arun = worker.shared.driver.arun

        async def counted(op: Any) -> Any:
            tries.append(time.monotonic())
            return await arun(op)

        worker.shared.driver.arun = counted  # type: ignore[method-assign]
        running = asyncio.create_task(worker.run())
        while len(tries) < 4:
            await asyncio.sleep(0.01)
        worker.stop()
        await asyncio.wait_for(running, SECONDS)

    asyncio.run(scenario())
    assert tries[3] - tries[1] > 0.5
    app.close()


def test_j24_background_tasks_of_a_handler_do_not_pile_up_and_can_still_enqueue(app: Duly) -> None:
    async def scenario() -> Any:
        enqueued: list[Any] = []
        forever: list[asyncio.Task[None]] = []
        may_go_on = asyncio.Event()

        @app.task
        async def child() -> None: ...

        async def stays() -> None:
            await may_go_on.wait()
            enqueued.append(await child.using(delay="1h").aenqueue())

        @app.task
        async def starts() -> None:
            forever.append(asyncio.get_running_loop().create_task(stays()))
            for _ in range(100):
                await asyncio.get_running_loop().create_task(asyncio.sleep(0))

        job = await starts.aenqueue()
        worker = Worker(app, signals=False)
        running = asyncio.create_task(worker.run())
        while not (await app.aget(job.id)).state.ended:  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        may_go_on.set()
        await forever[0]
        worker.stop()
        await running
        return enqueued

    (job,) = asyncio.run(scenario())
    assert state(app, job.id)[0] is State.SCHEDULED


def test_k08_a_sqlite_transaction_that_is_left_open_is_rolled_back(tmp_path: Path) -> None:
    app = Duly(tmp_path / "jobs.db", busy_timeout="10s")
    app.migrate()
    kept: list[Any] = []

    @app.task(max_attempts=1)
    def forgets(ctx: SyncCtx) -> None:
        conn = sqlite3.connect(tmp_path / "jobs.db", check_same_thread=False)
        kept.append(conn)
        ctx.commit(conn)

    job = forgets.enqueue()
    begun = time.monotonic()
    drain(app)
    assert state(app, job.id) == (State.DEAD, "its transaction was not committed")
    assert time.monotonic() - begun < 8  # nobody waited for the lock
    kept[0].close()
    app.close()


def test_k08_an_exception_after_the_commit_is_logged_and_changes_nothing(tmp_path: Path) -> None:
    app = Duly(tmp_path / "jobs.db")
    app.migrate()
    heard: list[str] = []
    app.events.listen(lambda name, fields: heard.append(name))

    @app.task(max_attempts=1)
    def trips(ctx: SyncCtx) -> None:
        conn = sqlite3.connect(tmp_path / "jobs.db")
        ctx.commit(conn, result="kept")
        conn.commit()
        conn.close()
        raise ValueError("after the commit")

    job = trips.enqueue()
    drain(app)
    assert state(app, job.id)[0] is State.SUCCEEDED
    assert "job.raised_after_commit" in heard
    assert "job.dead" not in heard
    app.close()


def test_j21_progress_does_not_wait_for_the_handlers_own_transaction(on_postgres: Duly, postgres_url: str) -> None:
    @on_postgres.task
    def child() -> None: ...

    @on_postgres.task
    def parent(ctx: SyncCtx) -> str:
        with psycopg.connect(postgres_url) as conn:
            child.using(conn=conn, delay="1h").enqueue()  # holds the row of this job
            ctx.progress(50)
            ctx.heartbeat()
        return "done"

    job = parent.enqueue()
    drain(on_postgres)
    assert job.result(0) == "done"


@pytest.mark.slow
def test_j10_handlers_that_write_all_the_time_starve_neither_claims_nor_beats(on_postgres: Duly) -> None:
    stop = threading.Event()

    @on_postgres.task
    def busy(ctx: SyncCtx) -> None:
        while not stop.is_set():
            ctx.progress(1)

    @on_postgres.task
    async def quick(ctx: Ctx) -> str:
        return "in between"

    async def scenario() -> None:
        worker = Worker(on_postgres, signals=False)
        running = asyncio.create_task(worker.run())
        await busy.aenqueue_many(busy.call() for _ in range(3))
        while len(worker.held.leases()) < 3:
            await asyncio.sleep(0.01)
        jobs = [await quick.aenqueue() for _ in range(3)]
        assert [await job.aresult(SECONDS) for job in jobs] == ["in between"] * 3
        now = on_postgres.driver.run(ops.clock())
        await asyncio.sleep(2.5)  # longer than the lease
        assert on_postgres.driver.run(ops.expired_leases()) == []
        assert on_postgres.driver.run(ops.clock()) > now
        stop.set()
        worker.stop()
        await running

    asyncio.run(asyncio.wait_for(scenario(), 3 * SECONDS))


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True])
def test_j13_a_finish_that_waits_for_a_lock_does_not_hold_up_its_neighbours(
    on_postgres: Duly, postgres_url: str, alone: bool
) -> None:
    @on_postgres.task
    async def work(n: int) -> int:
        if n == 0:
            await blocked.wait()
        return n

    blocked = asyncio.Event()

    async def scenario() -> None:
        jobs = await work.aenqueue_many(work.call(n) for n in range(4))
        worker = Worker(on_postgres, signals=False)
        running = asyncio.create_task(worker.run())
        while len(worker.held.leases()) < 1:
            await asyncio.sleep(0.01)
        with psycopg.connect(postgres_url) as conn:
            conn.execute("select 1 from duly.duly_job where id = %s for update", [jobs[0].id])
            if alone:
                assert [await job.aresult(SECONDS) for job in jobs[1:]] == [1, 2, 3]
            blocked.set()
            late = await work.aenqueue_many(work.call(n) for n in range(10, 13))
            assert [await job.aresult(SECONDS) for job in late] == [10, 11, 12]
        assert await jobs[0].aresult(SECONDS) == 0
        worker.stop()
        await running
        assert {job.attempt for job in on_postgres.list(state=State.SUCCEEDED)} == {1}

    asyncio.run(asyncio.wait_for(scenario(), 3 * SECONDS))


def test_a_row_broken_by_hand_does_not_stop_other_jobs(tmp_path: Path) -> None:
    app = Duly(tmp_path / "jobs.db")

    @app.task
    def work(n: int) -> int:
        return n

    jobs = work.enqueue_many(work.call(n) for n in range(3))
    conn = sqlite3.connect(tmp_path / "jobs.db")
    with conn:
        conn.execute("pragma wal_autocheckpoint = 0")
        conn.execute("update duly_job set envelope = '{bad' where id = ?", [jobs[1].id])
    conn.close()
    drain(app)
    assert [job.result(0) for job in jobs] == [0, 1, 2]
    app.close()


def test_a_worker_without_a_free_slot_does_not_spin_while_a_job_is_due(app: Duly) -> None:
    @app.task
    async def short() -> None: ...

    @app.task
    async def long() -> None:
        await asyncio.sleep(0.6)

    async def run() -> int:
        worker = app.worker(concurrency=1, drain=False, signals=False)
        turns, turn = 0, worker.turns.turn

        async def counted() -> None:
            nonlocal turns
            turns += 1
            await turn()

        worker.turns.turn = counted  # type: ignore[method-assign]
        await short.using(delay="300ms").aenqueue()
        running = asyncio.create_task(worker.run())
        while not worker.wakeups.due_known:  # it sleeps until the delayed job is due
            await asyncio.sleep(0.01)
        await long.aenqueue()
        while len(await app.alist(state="succeeded")) < 2:
            await asyncio.sleep(0.02)
        worker.stop()
        await running
        return turns

    assert asyncio.run(asyncio.wait_for(run(), 30)) < 100


def test_j18_sigterm_reaches_every_worker_of_a_loop(app: Duly) -> None:
    async def main() -> list[bool]:
        before = signals.getsignal(signals.SIGTERM)
        first, second = Worker(app), Worker(app)
        running = [asyncio.create_task(worker.run()) for worker in (first, second)]
        async with asyncio.timeout(SECONDS):
            while len(await app.driver.arun(ops.workers())) < 2:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signals.SIGTERM)
            await asyncio.wait(running)
            # The first to end leaves the signal to the other.
            third, fourth = Worker(app), Worker(app)
            running = [asyncio.create_task(worker.run()) for worker in (third, fourth)]
            while len(await app.driver.arun(ops.workers())) < 2:
                await asyncio.sleep(0.01)
            third.stop()
            await running[0]
            assert signals.getsignal(signals.SIGTERM) != before
            os.kill(os.getpid(), signals.SIGTERM)
            await asyncio.wait(running)
        assert signals.getsignal(signals.SIGTERM) == before
        return [worker.stopping for worker in (first, second, third, fourth)]

    assert asyncio.run(main()) == [True] * 4
