"""How a worker keeps the database busy: claims go on while ends are on their way, and nobody else waits for long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from duly import Duly
from duly.app import gil
from duly.app.gil import LOOP_ALONE_SECONDS, SWITCH_SECONDS, threads_switched_often
from duly.app.lease import Asked, Lease, current
from duly.model import Failed, Failure, State, Succeeded
from duly.store import ops
from duly.store.op import Op
from duly.store.sqlite.driver import SQLiteDriver
from duly.store.uninterrupted import shield
from duly.worker.deadlines import Deadlines
from duly.worker.prefetch import MOST_AHEAD
from duly.worker.worker import Worker

SECONDS = 20
MORE_THAN_AT_THE_START = 10  # looks, when the upkeep has it look once more here and there


def slowed(app: Duly, name: str, until: Callable[[Op[Any]], Awaitable[None]]) -> list[str]:
    """Hold up the operations of this name; gives the list of all that were sent."""
    sent: list[str] = []
    send = app.driver.arun

    async def arun(op: Op[Any]) -> Any:
        sent.append(op.name)
        if op.name == name:
            await until(op)
        return await send(op)

    app.driver.arun = arun  # type: ignore[method-assign]
    return sent


async def drained(app: Duly, **options: Any) -> None:
    await asyncio.wait_for(Worker(app, signals=False, drain=True, **options).run(), SECONDS)


def test_a_busy_worker_is_not_called_by_others_even_if_it_is_not_armed(app: Duly) -> None:
    now, disarmed = [0.0], []
    worker = Worker(app, clock=lambda: now[0])
    worker.wakeups._watch = SimpleNamespace(disarm=lambda: disarmed.append(now[0]))  # type: ignore[assignment]
    for now[0] in (0.0, 0.9, 1.1):
        worker.wakeups.note_busy(1)
    assert disarmed == [1.1]
    worker.wakeups.note_busy(0)
    for now[0] in (5.0, 5.9):
        worker.wakeups.note_busy(1)
    assert disarmed == [1.1]


def test_a_worker_whose_watch_could_not_read_the_file_retries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = Duly(str(tmp_path / "duly.db"), poll="20ms")
    look, looks = SQLiteDriver._look, 0

    def look_in_vain_at_first(driver: SQLiteDriver) -> Any:
        nonlocal looks
        looks += 1
        return None if looks < MORE_THAN_AT_THE_START else look(driver)

    async def work() -> None:
        worker = asyncio.create_task(app.arun())
        async with asyncio.timeout(SECONDS):
            while looks < MORE_THAN_AT_THE_START:
                await asyncio.sleep(0.01)
        worker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await worker

    monkeypatch.setattr(SQLiteDriver, "_look", look_in_vain_at_first)
    asyncio.run(work())
    app.close()
    assert looks == MORE_THAN_AT_THE_START  # once it can, it stays


def test_a_commit_while_a_worker_reads_the_next_due_time_makes_it_read_again(app: Duly) -> None:
    worker = Worker(app)
    asked = 0

    async def surely(op: Op[Any], **_: Any) -> int:
        nonlocal asked
        asked += 1
        worker.wakeups.due_known = asked > 1  # as if another process had put a job off meanwhile
        return 60_000

    worker.shared.surely = surely  # type: ignore[method-assign, assignment]
    asyncio.run(worker.claiming.look_ahead())
    assert (asked, worker.wakeups.due_known) == (1, False)
    asyncio.run(worker.claiming.look_ahead())
    assert worker.wakeups.due_known


def test_the_next_job_is_claimed_while_an_end_is_on_its_way(app: Duly) -> None:
    began = asyncio.Event()

    @app.task
    async def one(number: int) -> None:
        if number == 2:
            began.set()

    one.enqueue(1)
    one.enqueue(2)
    held: list[str] = []

    async def until_the_second_began(op: Op[Any]) -> None:
        if not held:
            held.append(op.name)
            await asyncio.wait_for(began.wait(), SECONDS)

    slowed(app, "finish", until_the_second_began)
    asyncio.run(drained(app, concurrency=1))
    assert held == ["finish"]
    assert [job.state for job in app.list()] == [State.SUCCEEDED, State.SUCCEEDED]


def test_finished_jobs_are_recorded_while_a_claim_is_in_flight(app: Duly) -> None:
    recorded = asyncio.Event()
    waited: list[int] = []

    @app.task
    async def quick(number: int) -> None: ...

    count = 5000
    quick.enqueue_many(quick.call(number) for number in range(count))
    send = app.driver.arun
    ended = 0

    async def arun(op: Op[Any]) -> Any:
        nonlocal ended
        if op.name == "claim" and op.params["limit"] > 1000 and ended < count - 2000:
            recorded.clear()
            await asyncio.wait_for(recorded.wait(), SECONDS)  # for ever, if nothing else is sent meanwhile
            waited.append(ended)
        answer = await send(op)
        if op.name == "finish":
            ended += len(answer)
            recorded.set()
        return answer

    app.driver.arun = arun  # type: ignore[method-assign]
    asyncio.run(drained(app))
    assert waited
    assert ended == count


@pytest.mark.parametrize("queues", [["default"], ["default", "other"]])
def test_a_drain_runs_jobs_enqueued_while_an_empty_claim_was_in_flight(app: Duly, queues: list[str]) -> None:
    """The end of who enqueued it may be recorded before that claim is answered, and then nothing is held."""
    may_end, recorded = asyncio.Event(), asyncio.Event()
    ran: list[str] = []

    @app.task
    async def child() -> None:
        ran.append("child")

    @app.task
    async def parent() -> None:
        await may_end.wait()
        await child.aenqueue()
        ran.append("parent")

    parent.enqueue()
    send = app.driver.arun

    async def arun(op: Op[Any]) -> Any:
        answer = await send(op)
        empty = op.name == "claim" and not op.params.get("alone") and not answer
        # The last of the queues, while the job runs, after the others had nothing.
        exhausted = worker.wakeups.exhausted
        if empty and len(worker.held) and exhausted.issuperset({*queues} - {op.params["queue"]}):
            may_end.set()
            with contextlib.suppress(TimeoutError):  # few ends wait for the claim where they could share a commit
                await asyncio.wait_for(recorded.wait(), 0.5)
        if op.name == "finish":
            recorded.set()
        return answer

    app.driver.arun = arun  # type: ignore[method-assign]
    worker = Worker(app, signals=False, drain=True, queues=queues)
    asyncio.run(asyncio.wait_for(worker.run(), SECONDS))
    assert ran == ["parent", "child"]


@pytest.mark.slow
def test_b06_jobs_in_lanes_of_other_code_have_their_turn_beside_a_backlog_of_quick_ones(app: Duly) -> None:
    """A queue in which lanes are found is claimed in turns again, also in the middle of a backlog."""

    @app.task
    async def quick(number: int) -> None: ...

    quick.enqueue_many(quick.call(number) for number in range(12_000))
    claims: list[bool] = []  # for each claim after lanes were found: whether it looked at them

    async def run() -> None:
        worker = Worker(app, signals=False, drain=True)

        async def found(op: Op[Any]) -> None:
            if op.params["alone"]:
                return
            if worker.lanes._found.get("default"):
                claims.append("walks" in op.params)
            elif op.params["limit"] > 1000:
                worker.lanes._found = {"default": frozenset({"quick"})}

        slowed(app, "claim", found)
        await asyncio.wait_for(worker.run(), SECONDS)

    asyncio.run(run())
    assert True in claims[:2]  # as soon as the claim that was on its way has come
    assert {job.state for job in app.list(limit=100)} == {State.SUCCEEDED}


def test_remains_of_deleted_lanes_do_not_keep_a_worker_awake(app: Duly) -> None:
    @app.task
    async def quick(number: int) -> None: ...

    quick.enqueue_many(quick.call(number) for number in range(100))

    async def run() -> None:
        worker = Worker(app, signals=False, drain=True)
        take = worker.claiming._take

        async def after_lanes(*args: Any) -> int:
            worker.lanes.unseen = True  # by a claim of lanes that are not there any more
            return await take(*args)

        worker.claiming._take = after_lanes  # type: ignore[method-assign]
        await asyncio.wait_for(worker.run(), SECONDS)

    asyncio.run(run())
    assert {job.state for job in app.list(limit=100)} == {State.SUCCEEDED}


def test_j18_claimed_jobs_are_released_even_if_the_worker_fails_then(app: Duly) -> None:
    @app.task
    async def quick(number: int) -> None: ...

    quick.enqueue_many(quick.call(number) for number in range(6000))
    brought: list[int] = []
    send = app.driver.arun

    async def arun(op: Op[Any]) -> Any:
        if op.name == "claim" and brought:
            await asyncio.sleep(0)  # where the turns end, before another claim is sent
        answer = await send(op)
        if op.name == "claim" and len(answer) > 1000 and not brought:
            brought.append(len(answer))
            turns = asyncio.current_task()
            assert turns is not None
            turns.cancel()  # while the rows are there and not held
        return answer

    app.driver.arun = arun  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(asyncio.wait_for(Worker(app, signals=False).run(), SECONDS))
    assert brought
    assert app.list(state="running", limit=1) == []


def test_a_worker_with_a_finish_in_flight_does_not_spin(app: Duly) -> None:
    turns, may_end = 0, asyncio.Event()

    @app.task
    async def one(number: int) -> None:
        if number == 2:
            await may_end.wait()

    one.enqueue(1)
    one.enqueue(2)

    async def run() -> None:
        worker = Worker(app, signals=False, drain=True, concurrency=2)
        turn = worker.turns.turn

        async def counted() -> None:
            nonlocal turns
            turns += 1
            await turn()
            await asyncio.sleep(0)

        async def for_a_while(op: Op[Any]) -> None:
            may_end.set()  # the other ends while this one is on its way
            await asyncio.sleep(0.3)

        worker.turns.turn = counted  # type: ignore[method-assign]
        slowed(app, "finish", for_a_while)
        await asyncio.wait_for(worker.run(), SECONDS)

    asyncio.run(run())
    assert turns < 60


def test_an_error_after_a_recorded_finish_stops_the_worker(app: Duly) -> None:
    @app.task
    async def one() -> None:
        raise ValueError("which is told, as a success would not be")

    one.enqueue()

    class Broken(Exception):
        pass

    def broken(*_: object) -> None:
        raise Broken

    app.events.attempted = broken  # type: ignore[method-assign]
    with pytest.raises(Broken):
        asyncio.run(asyncio.wait_for(Worker(app, signals=False).run(), SECONDS))


def test_the_event_loop_has_its_turn_between_quick_handlers(app: Duly) -> None:
    """Ten consumers share one measure of time: each having its own, the loop would wait ten times as long."""
    ran = since = most = 0

    @app.task
    async def busy() -> None:
        nonlocal ran, since, most
        ran, since = ran + 1, since + 1
        most = max(most, since)
        until = time.perf_counter() + 0.0002
        while time.perf_counter() < until:
            pass

    busy.enqueue_many(busy.call() for _ in range(400))

    async def ticking() -> None:
        nonlocal since
        while True:
            since = 0
            await asyncio.sleep(0)

    async def run() -> None:
        ticks = asyncio.create_task(ticking())
        await drained(app, concurrency=10)
        ticks.cancel()

    asyncio.run(run())
    assert ran == 400
    assert most <= 20


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_ends_are_recorded_together_while_more_will_come_in_a_moment(app: Duly, kind: str) -> None:
    """Of forty that wait for a slot, four are worth waiting for."""
    finished: list[int] = []
    worker = Worker(app, signals=False, drain=True, concurrency=1)
    worker.prefetch.ahead = lambda now: (40, frozenset(app.tasks))  # type: ignore[method-assign]

    async def later(number: int) -> None:
        await asyncio.sleep(0.002)

    def at_once(number: int) -> None:
        time.sleep(0.002)

    quick = app.task(name="quick")(later if kind == "async" else at_once)
    quick.enqueue_many(quick.call(number) for number in range(40))
    send = app.driver.arun

    async def arun(op: Op[Any]) -> Any:
        answer = await send(op)
        if op.name == "finish":
            finished.append(len(answer))
        return answer

    app.driver.arun = arun  # type: ignore[method-assign]
    asyncio.run(asyncio.wait_for(worker.run(), SECONDS))
    assert sum(finished) == 40
    assert len(finished) <= 15


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_no_end_waits_for_a_job_that_turns_out_to_be_slow(app: Duly, kind: str) -> None:
    """The last of those that waited for a slot hangs until the ends before it are recorded."""
    recorded = threading.Event()
    worker = Worker(app, signals=False, drain=True, concurrency=1)
    worker.prefetch.ahead = lambda now: (200, frozenset(app.tasks))  # type: ignore[method-assign]

    async def later(number: int) -> None:
        if number == 6:
            assert await asyncio.to_thread(recorded.wait, SECONDS / 4)

    def at_once(number: int) -> None:
        if number == 6:
            assert recorded.wait(SECONDS / 4)

    quick = app.task(name="quick", max_attempts=2)(later if kind == "async" else at_once)
    quick.enqueue_many(quick.call(number) for number in range(7))
    send, finished = app.driver.arun, 0

    async def arun(op: Op[Any]) -> Any:
        nonlocal finished
        answer = await send(op)
        if op.name == "finish":
            finished += len(answer)
            if finished >= 6:
                recorded.set()
        return answer

    app.driver.arun = arun  # type: ignore[method-assign]
    worker.turns._pause = lambda: SECONDS  # type: ignore[method-assign]
    asyncio.run(asyncio.wait_for(worker.run(), SECONDS))
    assert [job.attempt for job in app.list(state="succeeded")] == [1] * 7


def test_a_finished_job_waiting_to_be_recorded_does_not_time_out(app: Duly) -> None:
    asked: list[Any] = []

    @app.task(timeout="1s")
    async def done() -> None: ...

    def lease(**more: Any) -> SimpleNamespace:
        usual = {
            "begun_at": 0.0,
            "ended_at": 0.0,
            "closed": False,
            "sent": False,
            "asked": None,
            "definition": done.definition,
        }
        return SimpleNamespace(**{**usual, **more})

    runs, has_ended = lease(), lease(ended_at=0.5)
    shared: Any = SimpleNamespace(app=app, clock=lambda: 100.0)
    held: Any = SimpleNamespace(leases=lambda: [runs, has_ended])
    stopping: Any = SimpleNamespace(ask=lambda *said: asked.append(said))
    nothing: Any = None
    Deadlines(shared, held, nothing, stopping, nothing, nothing).look()
    assert asked == [(runs, Asked.TIMEOUT)]


def test_an_end_is_not_held_back_which_others_can_have_something_of(app: Duly) -> None:
    """The next of a lane, or whoever claims what was given back."""
    worker = Worker(app, signals=False)
    worker.wakeups.wake = lambda: None  # type: ignore[method-assign]
    for number in range(9):
        worker.slots.put(number)  # type: ignore[arg-type]
    definition: Any = SimpleNamespace(policy=None)
    for lane, worth in ((None, False), ("work:x", True)):
        worker.finishing.soon = 5
        job: Any = SimpleNamespace(id="j", task="t", lane=lane, attempt=1, max_attempts=5, crashes=0)
        worker.finishing.ended(Lease(job, definition, app.database, 0.0), Succeeded())
        assert worker.finishing._is_worth_sending() is worth
    worker.finishing.unsent.clear()
    worker.finishing.soon = 5
    worker.finishing.give_back(Lease(job, definition, app.database, 0.0))
    assert worker.finishing._is_worth_sending()


def test_the_logged_duration_excludes_the_recording(app: Duly) -> None:
    ran: list[float] = []

    @app.task
    async def quick() -> None: ...

    @app.events.listen
    def hear(name: str, fields: Any) -> None:
        if name == "job.succeeded":
            ran.append(fields["ran_ms"])

    async def for_a_while(op: Op[Any]) -> None:
        await asyncio.sleep(0.3)

    quick.enqueue()
    slowed(app, "finish", for_a_while)
    asyncio.run(drained(app))
    assert len(ran) == 1
    assert ran[0] < 300


def test_a_queue_with_a_limit_has_its_turn_beside_one_that_is_claimed_ahead(app: Duly) -> None:
    ran: list[str] = []

    @app.task
    async def many(n: int) -> None:
        ran.append("many")

    @app.task(queue="few")
    async def few(n: int) -> None:
        ran.append("few")

    many.enqueue_many(many.call(n) for n in range(600))
    few.enqueue_many(few.call(n) for n in range(12))
    worker = Worker(app, signals=False, drain=True, concurrency=2, queues={"default": None, "few": 1})
    worker.prefetch.ahead = lambda now: (60, frozenset(app.tasks))  # type: ignore[method-assign]
    most, hold = 0, worker.held.hold

    def watched(jobs: Any) -> Any:
        nonlocal most
        leases = hold(jobs)
        most = max(most, worker.held.of_queue("few"))
        return leases

    worker.held.hold = watched  # type: ignore[method-assign]
    asyncio.run(asyncio.wait_for(worker.run(), SECONDS))
    assert (ran.count("many"), ran.count("few"), most) == (600, 12, 1)
    assert ran[:500].count("few") >= 5


def test_jobs_that_started_too_late_halve_the_prefetch(app: Duly) -> None:
    now, given_back = 1000.0, []
    worker = Worker(app, signals=False, clock=lambda: now)
    worker.finishing.give_back = given_back.append  # type: ignore[assignment,method-assign]
    for claimed_at in (now, now, now + 0.2):
        worker.slots.put(SimpleNamespace(claimed_at=claimed_at))  # type: ignore[arg-type]
    worker.claiming.give_back_late()
    assert (given_back, worker.prefetch._most) == ([], MOST_AHEAD)
    now += 0.3
    worker.claiming.give_back_late()
    assert (len(given_back), len(worker.held.waiting), worker.prefetch._most) == (2, 1, MOST_AHEAD // 2)


def test_a_handler_begins_when_the_one_before_it_has_ended_also_if_that_was_given_up_on(app: Duly) -> None:
    """Its timeout counts from there."""
    waited: list[float] = []
    worker = Worker(app, signals=False, drain=True, concurrency=1)
    worker.prefetch.ahead = lambda now: (40, frozenset(app.tasks))  # type: ignore[method-assign]

    @app.task
    async def quick(number: int) -> None:
        lease = current.get()
        assert lease is not None
        assert lease.begun_at is not None
        waited.append(time.monotonic() - lease.begun_at)
        if number % 2:
            worker.finishing.give_up_on(lease, Failed(Failure("Error", "it hangs")))

    quick.enqueue_many(quick.call(number) for number in range(40))
    asyncio.run(asyncio.wait_for(worker.run(), SECONDS))
    assert len(waited) == 40
    assert max(waited) < 1


@pytest.mark.slow
def test_j18_finished_jobs_are_recorded_even_if_the_worker_stops_before_the_send(app: Duly) -> None:
    async def run() -> None:
        on_its_way = asyncio.Event()
        over = asyncio.Event()

        @app.task
        async def one(number: int) -> str:
            if number == 2:
                await asyncio.wait_for(on_its_way.wait(), SECONDS)
                over.set()
            return "done"

        async def for_ever(op: Op[Any]) -> None:
            if not on_its_way.is_set():
                on_its_way.set()
                await asyncio.Event().wait()

        slowed(app, "finish", for_ever)
        await one.aenqueue(1)
        second = await one.aenqueue(2)
        worker = Worker(app, signals=False, concurrency=2, grace="100ms")
        running = asyncio.create_task(worker.run())
        await asyncio.wait_for(over.wait(), SECONDS)
        worker.stop()
        await asyncio.wait_for(running, SECONDS)
        job = await app.aget(second.id)
        assert job is not None
        assert (job.state, job.attempt, job.result) == (State.SUCCEEDED, 1, "done")

    asyncio.run(run())


def test_few_ends_are_sent_before_the_claim_where_both_can_be_one_commit(app: Duly) -> None:
    """Beside a server they travel side by side, and the claim need not wait until they are written down."""

    @app.task
    async def one(number: int) -> None: ...

    sent: list[str] = []
    send = app.driver.arun

    async def arun(op: Op[Any]) -> Any:
        if op.name == "finish" or (op.name == "claim" and not op.params["alone"]):
            sent.append(op.name)
        return await send(op)

    for number in range(3):
        one.enqueue(number)
    app.driver.arun = arun  # type: ignore[method-assign]
    asyncio.run(drained(app, concurrency=1))
    assert sent[:3] == (["claim", "finish", "claim"] if app.driver.one_writer else ["claim", "claim", "finish"])


@pytest.mark.parametrize("waits_for", ["the run before it", "the key"])
def test_a_drain_runs_jobs_released_by_the_last_finish(app: Duly, waits_for: str) -> None:
    """Also if a claim has looked, and found nothing, before that end was written down."""
    ran: list[int] = []
    looked: list[asyncio.Event] = []  # one for each end on its way
    send = app.driver.arun

    @app.task
    async def one(number: int = 1) -> None:
        ran.append(number)
        if waits_for == "the key" and number == 1:
            await one.using(key="k", debounce="1ms").aenqueue(2)
            await asyncio.sleep(0.01)

    async def arun(op: Op[Any]) -> Any:
        if op.name == "finish":
            looked.append(asyncio.Event())
            await asyncio.wait_for(looked[-1].wait(), SECONDS)
        answer = await send(op)
        if op.name == "claim" and not op.params["alone"]:
            for event in looked:
                event.set()
        return answer

    if waits_for == "the key":
        one.using(key="k").enqueue(1)
    else:
        app.schedules.create("yearly", one, "@yearly", overlap="queue")
        years = [datetime(year, 1, 1, tzinfo=UTC) for year in (2024, 2025)]
        assert len(app.schedules.backfill("yearly", *years, force=True)) == 2
    app.driver.arun = arun  # type: ignore[method-assign]
    asyncio.run(drained(app, concurrency=2))
    assert ran == ([1, 2] if waits_for == "the key" else [1, 1])


def test_threads_switch_often_while_a_worker_runs_and_as_before_afterwards(app: Duly) -> None:
    seen = []

    @app.task
    async def look() -> None:
        seen.append(sys.getswitchinterval())

    before = sys.getswitchinterval()
    look.enqueue()
    asyncio.run(drained(app))
    assert seen[0] < 0.002
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize(("sync", "seconds"), [(False, LOOP_ALONE_SECONDS), (True, SWITCH_SECONDS)])
def test_threads_switch_less_often_where_sync_handlers_may_compute(app: Duly, sync: bool, seconds: float) -> None:
    seen: list[float] = []

    def look() -> None:
        seen.append(sys.getswitchinterval())

    async def alook() -> None:
        look()

    app.task(name="look")(look if sync else alook).enqueue()
    asyncio.run(drained(app))
    assert seen == [pytest.approx(seconds)]


def test_threads_switch_as_before_when_the_last_of_several_workers_has_ended() -> None:
    before = sys.getswitchinterval()
    first, second = threads_switched_often(), threads_switched_often()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() < 0.002
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == before


def test_a_switch_interval_set_by_the_user_meanwhile_is_kept() -> None:
    before = sys.getswitchinterval()
    try:
        with threads_switched_often():
            sys.setswitchinterval(0.02)
            with threads_switched_often():
                assert sys.getswitchinterval() == pytest.approx(0.02)
        assert sys.getswitchinterval() == pytest.approx(0.02)
    finally:
        sys.setswitchinterval(before)


def test_a_forked_child_switches_its_threads_as_python_does() -> None:
    before = sys.getswitchinterval()
    with threads_switched_often():
        child = os.fork()
        if child == 0:
            with threads_switched_often():
                pass
            os._exit(sys.getswitchinterval() != before)
    assert os.waitpid(child, 0)[1] == 0
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize(
    ("owner", "lock", "enter"),
    [(gil, "_lock", threads_switched_often), (shield, "_entering", shield.whole)],
    ids=["switch interval", "operations"],
)
def test_a_fork_at_any_moment_blocks_neither_parent_nor_child(owner: Any, lock: str, enter: Callable[[], Any]) -> None:
    """Another thread may hold the lock, or this thread, which a signal handler has interrupted."""
    held = getattr(owner, lock)
    with ThreadPoolExecutor(1) as other:
        for run in (lambda step: other.submit(step).result(), lambda step: step()):
            run(held.acquire)
            child = os.fork()
            if child == 0:
                with enter():
                    os._exit(0)
            kill = threading.Timer(5, os.kill, (child, signal.SIGKILL))
            kill.start()
            status = os.waitpid(child, 0)[1]
            kill.cancel()
            run(held.release)
            assert status == 0


def test_j12_a_job_set_aside_and_held_again_takes_a_slot(app: Duly) -> None:
    """Else a suspect would find this process empty, and run beside it."""

    @app.task
    async def one() -> None: ...

    one.enqueue()

    async def run() -> list[int]:
        worker = Worker(app, signals=False, concurrency=3)
        [first] = await worker.claiming.claim("default", 1, app.tasks)
        worker.held.set_aside(first)
        seen = [worker.claiming.room("default")]
        await app.driver.arun(ops.release([first.job]))
        [_] = await worker.claiming.claim("default", 1, app.tasks)
        seen.append(worker.claiming.room("default"))
        worker.held.let_go([first])
        return [*seen, worker.claiming.room("default")]

    assert asyncio.run(run()) == [3, 2, 2]


def test_a_drain_continues_while_a_recorded_job_is_due_again(app: Duly) -> None:
    """A claim that looked before a retry was written down has not seen that it is due."""
    looked = 0

    @app.task(max_attempts=3, backoff=[0, 0])
    async def fails() -> None:
        raise ValueError

    @app.task(key="one", max_attempts=2, backoff=[0])
    async def keyed() -> None:
        raise ValueError

    async def after_a_look(op: Op[Any]) -> None:
        nonlocal looked
        looked += 1
        await asyncio.sleep(0.05)  # claims go on meanwhile, and find nothing

    jobs = [fails.enqueue(), keyed.enqueue()]
    slowed(app, "finish", after_a_look)
    asyncio.run(drained(app))
    assert looked > 2
    assert [(job.state, job.attempt) for job in map(app.get, (job.id for job in jobs)) if job] == [
        (State.DEAD, 3),
        (State.DEAD, 2),
    ]


def test_a_claim_whose_empty_answer_comes_after_a_retry_was_recorded_does_not_end_a_drain(app: Duly) -> None:
    send, late = app.driver.arun, []

    @app.task(max_attempts=2, backoff=[0])
    async def fails() -> None:
        raise ValueError

    async def run() -> None:
        recorded = asyncio.Event()
        looked = asyncio.Event()

        async def arun(op: Op[Any]) -> Any:
            if op.name == "finish" and not recorded.is_set():
                await asyncio.wait_for(looked.wait(), SECONDS)
            answer = await send(op)
            if op.name == "finish":
                recorded.set()
            elif op.name == "claim" and fails_ran and not answer and not recorded.is_set():
                looked.set()
                await recorded.wait()
                await asyncio.sleep(0.05)  # the turn hears of the recording first
                late.append(op)
            return answer

        app.driver.arun = arun  # type: ignore[method-assign]
        await drained(app, concurrency=2)

    fails_ran: list[int] = []
    job = fails.enqueue()

    @app.task(name="marker")
    async def marker() -> None:
        fails_ran.append(1)

    marker.enqueue()
    asyncio.run(run())
    app.driver.arun = send  # type: ignore[method-assign]
    found = app.get(job.id)
    assert late
    assert found is not None
    assert (found.state, found.attempt) == (State.DEAD, 2)


def test_a_drain_waits_for_a_slow_database_to_record_its_exit(app: Duly, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duly.worker.stopping.TOLD_SECONDS", 0.0)

    @app.task
    async def one() -> None: ...

    one.enqueue()
    slowed(app, "leave", lambda op: asyncio.sleep(0.05))
    asyncio.run(drained(app))
    assert app.workers() == []


def test_j18_a_hanging_deregistration_is_cancelled_by_the_second_signal(
    app: Duly, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duly.worker.stopping.GOODBYE_SECONDS", 3600.0)

    async def twice_told() -> None:
        started, leaving = asyncio.Event(), asyncio.Event()

        async def for_ever(op: Op[Any]) -> None:
            leaving.set()
            await asyncio.Event().wait()

        slowed(app, "leave", for_ever)
        worker = Worker(app, signals=False, grace="30m")
        app.events.listen(lambda name, fields: started.set() if name == "worker.started" else None)
        running = asyncio.create_task(worker.run())
        await asyncio.wait_for(started.wait(), SECONDS)
        worker.stop()
        await asyncio.wait_for(leaving.wait(), SECONDS)
        assert not running.done()
        worker.stop()
        await asyncio.wait_for(running, SECONDS)

    asyncio.run(twice_told())
