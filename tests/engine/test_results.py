"""Waiting for a job's result: what comes back, and what is raised when nothing does."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

import psycopg
import pytest

from duly import Ctx, Duly, SyncCtx
from duly.errors import BadArguments, ConfigError, JobCancelled, JobDead, JobError, JobNotFound, ResultExpired
from duly.model import State
from duly.store import ops
from tests.engine.conftest import HOLDABLE, Outside, awork, found, work


@dataclass
class Receipt:
    number: int
    paid_at: datetime


def test_a_result_comes_back_as_the_type_its_task_names(app: Duly) -> None:
    @app.task
    def pay(number: int) -> Receipt:
        return Receipt(number, datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC))

    @app.task
    async def days() -> dict[str, list[date]]:
        return {"free": [date(2030, 1, 1)]}

    @app.task
    def untyped():  # type: ignore[no-untyped-def]
        return {"a": [1, None]}

    @app.task
    def nothing() -> None: ...

    jobs: list[Any] = [pay.enqueue(7), days.enqueue(), untyped.enqueue(), nothing.enqueue()]  # type: ignore[no-untyped-call]
    work(app)
    assert [job.result(timeout=5) for job in jobs] == [
        Receipt(7, datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)),
        {"free": [date(2030, 1, 1)]},
        {"a": [1, None]},
        None,
    ]
    assert asyncio.run(jobs[0].aresult(timeout=5)).number == 7


def test_a_result_is_waited_for(app: Duly) -> None:
    @app.task
    async def slow() -> str:
        await asyncio.sleep(0.3)
        return "done"

    async def main() -> str:
        job = await slow.aenqueue()
        working = asyncio.create_task(awork(app))
        result = await job.aresult()
        await working
        return result

    assert asyncio.run(main()) == "done"


def test_a_wait_that_is_too_long_raises(app: Duly) -> None:
    @app.task
    def never() -> None: ...

    job = never.enqueue()
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=f"<job {job.id} of never> has not ended within 0.2 s"):
        job.result(timeout=0.2)
    assert 0.2 <= time.monotonic() - begun < 1.5
    with pytest.raises(TimeoutError):
        asyncio.run(job.aresult(timeout=0))


def test_the_result_of_a_dead_job_is_its_error(app: Duly) -> None:
    @app.task(max_attempts=1)
    def fail() -> None:
        raise ValueError("no such order")

    job = fail.enqueue()
    work(app)
    with pytest.raises(JobDead, match="is dead: attempts used up; ValueError: no such order") as raised:
        job.result(timeout=5)
    assert raised.value.job_id == job.id
    with pytest.raises(JobDead):
        asyncio.run(job.aresult(timeout=5))


def test_the_result_of_a_cancelled_job_is_its_reason(app: Duly) -> None:
    @app.task
    def send() -> None: ...

    job = send.enqueue()
    app.cancel(job.id, by="me", why="not wanted")
    with pytest.raises(JobCancelled, match=f"{job.id} of send> was cancelled"):
        job.result(timeout=5)


def deep(levels: int) -> list[Any]:
    value: list[Any] = ["\x00"]
    for _ in range(levels - 1):
        value = [value]
    return value


def test_j25_a_result_that_is_stored_can_be_read_and_any_other_ends_its_job(app: Duly, outside: Outside) -> None:
    twice: Any = {1: "a", "1": "b"}

    @app.task
    def nest(levels: int, more: Any = None) -> list[Any]:
        return deep(levels) if levels else [twice]

    fits, over, lossy = nest.enqueue(500), nest.enqueue(501), nest.enqueue(0)
    work(app)
    assert fits.result(timeout=5) == found(app, fits.id).result == deep(500)
    for job, said in (
        (over, "is nested 501 levels deep, the limit is 500"),
        (lossy, "[0] has two keys that become '1'"),
    ):
        record = found(app, job.id)
        assert (record.state, record.attempt, record.reason) == (State.DEAD, 1, "its result cannot be stored")
        assert said in str(record.error)
    before = outside.snapshot()
    with pytest.raises(BadArguments, match="nest: the value is nested 501 levels deep"):
        nest.enqueue(1, deep(500))
    with pytest.raises(BadArguments, match=r"nest: more\.a has two keys that become '1' in JSON"):
        nest.enqueue(1, {"a": twice})
    assert outside.snapshot() == before


def test_j20_an_expired_result_raises(app: Duly) -> None:
    @app.task(result_ttl="1ms")
    def count() -> int:
        return 1

    @app.task(result_ttl="1ms")
    def nothing() -> None: ...

    job, other = count.enqueue(), nothing.enqueue()
    work(app)
    time.sleep(0.01)
    with pytest.raises(ResultExpired, match="kept for result_ttl"):
        job.result(timeout=5)
    assert other.result(timeout=5) is None
    later = app.driver.run(ops.clock()) + 8 * 86_400_000
    app.driver.run(ops.prune("done", now=later))
    with pytest.raises(ResultExpired):
        other.result(timeout=5)


def test_a_result_of_another_type_raises(app: Duly) -> None:
    @app.task
    def odd() -> int:
        return "seven"  # type: ignore[return-value]

    job = odd.enqueue()
    work(app)
    with pytest.raises(JobError, match=r"the result of <job .* of odd> does not fit .*its task: .*int"):
        job.result(timeout=5)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_waiting_in_a_handler_is_refused_with_the_reason(app: Duly, kind: str) -> None:
    @app.task
    def other() -> None: ...

    def wait() -> None:
        other.enqueue().result(timeout=1)

    async def await_() -> None:
        await (await other.aenqueue()).aresult(timeout=1)

    task: Any = app.task(max_attempts=1)(wait if kind == "sync" else await_)
    job = task.enqueue()
    work(app)
    with pytest.raises(JobDead, match="cannot wait for a job inside a handler"):
        job.result(timeout=5)


def test_waiting_for_a_job_of_keep_0_is_refused_with_the_reason(app: Duly) -> None:
    @app.task(keep=0)
    def quick() -> int:
        return 1

    with pytest.raises(ConfigError, match="its task has keep=0, so success leaves no result"):
        quick.enqueue().result(timeout=1)
    job = quick.using(keep="1h").enqueue()
    work(app)
    assert job.result(timeout=5) == 1


@HOLDABLE
def test_waiting_before_the_commit_is_refused_and_works_after_it(app: Duly, where: tuple[str, str]) -> None:
    @app.task
    def send() -> int:
        return 3

    app.driver.run(ops.clock())
    kind, url = where
    conn: Any = psycopg.connect(url) if kind == "postgres" else sqlite3.connect(url)
    job = send.using(conn=conn).enqueue()
    with pytest.raises(JobNotFound, match=r"own connection; commit first\. On another .*ann\.tasks"):
        job.result(timeout=1)
    conn.commit()
    conn.close()
    work(app)
    assert job.result(timeout=5) == 3


# Looking and changing


def test_an_unknown_job_is_none(app: Duly) -> None:
    assert app.get("01890000-0000-7000-8000-000000000000") is None
    assert app.get("no id at all") is None
    assert asyncio.run(app.aget("no id at all")) is None


def test_jobs_are_listed_newest_first_and_by_filters(app: Duly) -> None:
    @app.task
    def a(number: int) -> None: ...

    @app.task(queue="mail", max_attempts=1)
    def b() -> None:
        raise ValueError("odd thing")

    ids = [a.enqueue(number).id for number in range(3)]
    later = a.using(delay="1h").enqueue(9).id
    failed = b.enqueue().id
    work(app)
    assert [job.id for job in app.list()] == [failed, later, *reversed(ids)]
    assert [job.id for job in app.list(limit=2)] == [failed, later]
    assert [job.id for job in app.list(limit=2, before=later)] == [ids[2], ids[1]]
    assert [job.id for job in app.list(state="dead")] == [failed]
    assert [job.id for job in app.list(state=State.SCHEDULED, task="a")] == [later]
    assert [job.id for job in app.list(queue="mail")] == [failed]
    assert [job.id for job in app.list(error="odd")] == [failed]
    assert app.list(since=datetime(2100, 1, 1, tzinfo=UTC)) == []
    assert len(app.list(since=found(app, ids[0]).created_at)) == 5
    assert [job.id for job in asyncio.run(app.alist(task="b"))] == [failed]


def test_a_filter_that_cannot_be_is_refused(app: Duly) -> None:
    listing: Any = app.list
    with pytest.raises(ConfigError, match=r"state='done' is no state: give one of scheduled, ready, running"):
        listing(state="done")
    with pytest.raises(ConfigError, match=r"there is no filter tusk=: the filters are state, task"):
        listing(tusk="a")
    for limit in (0, 10**9 + 1):
        with pytest.raises(ConfigError, match=rf"limit= is {limit}: give a whole number from 1 to 1,000,000,000"):
            listing(limit=limit)
    assert listing(limit=10**9) == []
    with pytest.raises(ConfigError, match=r"since= is .* has no time zone"):
        listing(since=datetime(2030, 1, 1))


def test_j17_a_job_that_does_not_run_is_cancelled_at_once(app: Duly) -> None:
    @app.task
    def send() -> None: ...

    ready, later = send.enqueue(), send.using(delay="1h").enqueue()
    assert app.cancel(ready.id, by="me", why="wrong") is State.CANCELLED
    assert asyncio.run(app.acancel(later.id)) is State.CANCELLED
    assert app.cancel(ready.id) is State.CANCELLED  # asked again, it is still so
    work(app)
    assert [found(app, job.id).state for job in (ready, later)] == [State.CANCELLED] * 2
    [event] = app.driver.run(ops.events(job_id=ready.id))
    assert (event.name, event.by, event.why) == ("job.cancelled", "me", "wrong")


def test_j17_cancel_of_an_ended_job_returns_its_state(app: Duly) -> None:
    @app.task
    def send() -> None: ...

    job = send.enqueue()
    work(app)
    assert app.cancel(job.id) is State.SUCCEEDED
    assert asyncio.run(app.acancel(job.id)) is State.SUCCEEDED


def test_j17_a_running_job_gets_the_request_and_stops_at_its_next_call(app: Duly) -> None:
    said: list[State] = []

    @app.task(lease="300ms")
    def busy(ctx: SyncCtx) -> None:
        if not said:
            said.append(app.cancel(ctx.job_id))
        for _ in range(500):
            ctx.progress(1)
            time.sleep(0.01)

    @app.task(lease="300ms")
    async def idle(ctx: Ctx) -> None:
        await app.acancel(ctx.job_id)
        await asyncio.sleep(30)

    jobs = [busy.enqueue(), idle.enqueue()]
    work(app)
    records = [found(app, job.id) for job in jobs]
    assert said == [State.RUNNING]
    assert [(record.state, record.reason) for record in records] == [(State.CANCELLED, "cancelled on request")] * 2


def test_cancel_and_why_of_an_unknown_job_raise(app: Duly) -> None:
    unknown = "01890000-0000-7000-8000-000000000000"
    for ask in (
        lambda: app.cancel(unknown),
        lambda: asyncio.run(app.acancel(unknown)),
        lambda: app.why(unknown),
        lambda: asyncio.run(app.awhy(unknown)),
    ):
        with pytest.raises(JobNotFound, match=f"no job has the id {unknown}") as raised:
            ask()
        assert raised.value.job_id == unknown


def test_b10_why_names_the_gate_of_a_job(app: Duly) -> None:
    @app.task
    def send() -> None: ...

    job = send.using(delay="1h").enqueue()
    assert "due" in str(app.why(job.id))
    assert str(asyncio.run(app.awhy(job.id)))
    ready = send.enqueue()
    app.pause(task="send", by="me", why="repairs")
    assert "me" in str(app.why(ready.id))
    assert "repairs" in str(app.why(ready.id))


def test_b09_a_paused_queue_or_task_is_not_worked_on_until_it_is_resumed(app: Duly) -> None:
    @app.task
    def send() -> None: ...

    @app.task(queue="mail")
    def mail() -> None: ...

    jobs = [send.enqueue(), mail.enqueue()]
    app.pause(task="send", by="me", why="repairs")
    asyncio.run(app.apause(queue="mail", why="too", duration="1h"))
    work(app)
    assert [found(app, job.id).state for job in jobs] == [State.READY] * 2
    assert {(one.kind, one.name, one.paused_why) for one in app.paused()} == {
        ("task", "send", "repairs"),
        ("queue", "mail", "too"),
    }
    assert len(asyncio.run(app.apaused())) == 2
    assert app.resume(task="send") is True
    assert app.resume(task="never paused") is False
    assert asyncio.run(app.aresume(queue="mail", by="me")) is True
    work(app)
    assert [found(app, job.id).state for job in jobs] == [State.SUCCEEDED] * 2


def test_a_pause_names_a_queue_or_a_task(app: Duly) -> None:
    with pytest.raises(ConfigError, match="give queue= or task=, and not both"):
        app.pause(by="me")
    with pytest.raises(ConfigError, match="give queue= or task=, and not both"):
        app.resume(queue="a", task="b")


def test_run_inside_a_running_loop_raises_with_await(app: Duly) -> None:
    async def main() -> None:
        app.run(drain=True)

    with pytest.raises(ConfigError, match=r"await app\.arun\(\) instead"):
        asyncio.run(main())
