"""Dead letters through the public names: what a death adds, and what a person does about it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from duly import Duly, SyncCtx
from duly.errors import BadArguments, ConfigError, JobNotFound, KeyConflict, NotReplayable, PayloadError
from duly.model import State
from duly.rules import backoff
from duly.store import ops
from tests.engine.conftest import Outside, found, work, work_until

UNKNOWN = "01890000-0000-7000-8000-000000000000"


@pytest.fixture
def fail(app: Duly) -> Any:
    """A task that dies at its first attempt, unless it is told that all is well."""

    @app.task(max_attempts=1)
    def fail(number: int, well: bool = False) -> int:
        if well:
            return number
        raise ValueError(f"no {number}")

    return fail


def dead(app: Duly, fail: Any, *numbers: int) -> list[str]:
    ids = [fail.enqueue(number).id for number in numbers]
    work(app)
    assert [found(app, job_id).state for job_id in ids] == [State.DEAD] * len(ids)
    return ids


# R08: what a death adds


@pytest.mark.parametrize("by_name", [False, True])
def test_r08_on_dead_is_a_job_with_the_id_of_the_dead_one(app: Duly, by_name: bool) -> None:
    told: list[str] = []

    @app.task(queue="mail", priority=4, max_attempts=2)
    def mourn(ctx: SyncCtx, job_id: str) -> str:
        told.append(job_id)
        return ctx.correlation_id

    @app.task(max_attempts=2, backoff=[0], on_dead="mourn" if by_name else mourn)
    def fail() -> None:
        raise ValueError

    job = fail.using(correlation_id="c").enqueue()
    work_until(app, lambda: told)
    work(app)
    assert told == [job.id]
    [record] = app.list(task="mourn")
    assert (record.queue, record.priority, record.max_attempts) == ("mail", 4, 2)
    assert (record.causation_id, record.correlation_id, record.result) == (job.id, "c", "c")


def test_r08_on_dead_is_enqueued_in_the_transaction_of_the_death(app: Duly) -> None:
    @app.task
    def mourn(job_id: str) -> None: ...

    @app.task(max_attempts=1, on_dead=mourn, queue="other")
    def fail() -> None:
        raise ValueError

    job = fail.enqueue()
    work(app, queues=["other"])  # nobody but the ending itself could have added it
    assert found(app, job.id).state is State.DEAD
    assert [record.payload for record in app.list(task="mourn")] == [{"job_id": job.id}]


def test_r08_no_success_retry_or_cancel_adds_it(app: Duly) -> None:
    @app.task
    def mourn(job_id: str) -> None: ...

    @app.task(on_dead=mourn, backoff=backoff.fixed("1h"))
    def work_(well: bool) -> None:
        if not well:
            raise ValueError

    jobs = [work_.enqueue(True), work_.enqueue(False), work_.using(delay="1h").enqueue(True)]
    app.cancel(jobs[2].id)
    work(app)
    assert [found(app, job.id).state.value for job in jobs] == ["succeeded", "scheduled", "cancelled"]
    assert app.list(task="mourn") == []


def test_r08_the_failure_of_on_dead_changes_nothing(app: Duly, outside: Outside) -> None:
    @app.task(max_attempts=1)
    def mourn(job_id: str) -> None:
        raise RuntimeError("cannot mourn")

    @app.task(max_attempts=1, on_dead=mourn)
    def fail() -> None:
        raise ValueError

    job = fail.enqueue()
    work(app, queues=["default"])
    work(app)
    assert (found(app, job.id).state, found(app, job.id).error) == (State.DEAD, "ValueError: ")
    assert [record.state for record in app.list(task="mourn")] == [State.DEAD]
    assert outside.query("select count(*) from duly_job") == [(0,)]


# What a person does


def test_the_dead_are_listed_oldest_first_and_by_filters(app: Duly, fail: Any) -> None:
    @app.task(queue="mail", max_attempts=1)
    def mail() -> None:
        raise KeyError("address")

    ids = dead(app, fail, 1, 2, 3)
    other = [mail.enqueue().id]
    work(app)
    assert [job.id for job in app.dead.list()] == [*ids, *other]
    assert [job.id for job in app.dead.list(limit=2)] == ids[:2]
    assert [job.id for job in app.dead.list(after=ids[1])] == [ids[2], *other]
    assert [job.id for job in app.dead.list(task="mail")] == other
    assert [job.id for job in app.dead.list(queue="default", error="no 2")] == [ids[1]]
    assert app.dead.list(since=datetime(2100, 1, 1, tzinfo=UTC)) == []
    assert len(app.dead.list(until=datetime(2100, 1, 1, tzinfo=UTC))) == 4
    assert [job.id for job in asyncio.run(app.dead.alist(queue="mail"))] == other
    listing: Any = app.dead.list
    with pytest.raises(ConfigError, match="there is no filter tusk=: the filters are task, queue"):
        listing(tusk="x")


def test_r05_a_replay_runs_under_a_new_id_and_a_second_one_is_the_first(app: Duly, fail: Any) -> None:
    [job_id] = dead(app, fail, 1)
    again = app.dead.replay(job_id, by="me", why="mended")
    assert again != job_id
    assert app.dead.replay(job_id, by="you", why="too") == again
    assert asyncio.run(app.dead.areplay(job_id)) == again
    record = found(app, again)
    assert (record.state, record.attempt, record.origin, record.replay_count) == (State.READY, 0, job_id, 1)
    assert app.dead.list() == []
    assert [job.id for job in app.dead.list(all=True)] == [job_id]
    [event] = [one for one in app.driver.run(ops.events(job_id=job_id)) if one.name == "job.replayed"]
    assert (event.by, event.why) == ("me", "mended")


def test_r05_an_edited_payload_is_run(app: Duly, fail: Any) -> None:
    first, second = dead(app, fail, 1, 2)
    again = app.dead.replay(first, payload={"number": 5, "well": True}, by="me", why="wrong number")
    more = asyncio.run(app.dead.areplay(second, payload={"number": 6, "well": True}))
    work(app)
    assert [found(app, job_id).result for job_id in (again, more)] == [5, 6]


def test_j25_a_payload_is_read_as_it_was_given_and_replayed_as_it_was_read(app: Duly) -> None:
    odd = {"\x00\udc80": ["␛", "␛0041", "\ud83d"], "more": {"␛241b": "\x00"}}

    @app.task(max_attempts=1)
    def give(data: dict[str, Any], well: bool = False) -> dict[str, Any]:
        if not well:
            raise ValueError(data)
        return data

    ids = [give.enqueue(odd).id for _ in range(2)]
    app.schedules.create("odd", give.call(odd), "1h")
    work(app)
    for record in (*app.list(task="give"), *app.dead.list(), found(app, ids[0]), app.schedules.get("odd")):
        assert record is not None
        assert record.payload == {"data": odd}
    app.dead.replay(ids[0], payload={**found(app, ids[0]).payload, "well": True})
    rekeyed = app.dead.replay(ids[1], key="␛0041")
    edited, moved = (json.loads(app.driver.run(ops.events(job_id=job_id))[-1].data or "") for job_id in ids)
    assert (edited["old"], edited["new"]) == ({"data": odd}, {"data": odd, "well": True})
    assert (moved["new"], moved["new_key"]) == (None, "␛0041")
    job = give.enqueue(odd, well=True)
    work(app)
    assert found(app, rekeyed).payload == {"data": odd}
    assert [record.result for record in app.list(state=State.SUCCEEDED)] == [odd, odd]
    assert job.result(timeout=0) == odd


def test_r05_a_second_replay_with_other_arguments_is_refused_because_they_would_not_be_used(
    app: Duly, fail: Any
) -> None:
    dead = fail.enqueue(5).id
    work(app)
    again = app.dead.replay(dead)
    for edited in ({"payload": {"number": 6, "well": True}}, {"key": "another"}):
        with pytest.raises(NotReplayable, match=f"replayed before, as {again}: the new key or payload was not"):
            app.dead.replay(dead, **edited)
        with pytest.raises(NotReplayable, match="was not used"):
            asyncio.run(app.dead.areplay(dead, **edited))
    assert app.dead.replay(dead) == again


def test_r05_an_edited_payload_that_does_not_fit_is_refused_without_a_write(
    app: Duly, fail: Any, outside: Outside
) -> None:
    [job_id] = dead(app, fail, 1)
    before = outside.snapshot()
    with pytest.raises(BadArguments, match="fail: argument `number`: expected `int`, got `str`"):
        app.dead.replay(job_id, payload={"number": "one"})
    with pytest.raises(BadArguments, match="there is no argument `numbr`"):
        asyncio.run(app.dead.areplay(job_id, payload={"number": 1, "numbr": 1}))
    assert outside.snapshot() == before


def test_r05_another_key_is_taken_also_by_a_job_that_had_none(app: Duly, fail: Any) -> None:
    first, second = dead(app, fail, 1, 2)
    again = app.dead.replay(first, key="k")
    assert found(app, again).key == "k"
    assert fail.using(key="k").enqueue(1).id == again  # the same work, as its arguments are the same
    with pytest.raises(KeyConflict, match=f"job {second} is not replayed: its key is taken by job {again}; give key="):
        app.dead.replay(second, key="k")


def test_r05_another_key_never_replaces_a_payload_that_cannot_be_read(app: Duly, fail: Any, outside: Outside) -> None:
    [job_id] = dead(app, fail, 1)
    deep = '{"number":' + "[" * 990 + "]" * 990 + "}"  # of an earlier version
    outside.query(f"update duly_done set payload = '{deep}'")
    with pytest.raises(PayloadError, match=f"payload of job {job_id} cannot be read: give payload= beside key="):
        app.dead.replay(job_id, key="other")
    work(app)
    again = app.dead.replay(job_id, key="other", payload={"number": 5, "well": True})
    work(app)
    assert found(app, again).result == 5


def test_r05_a_key_taken_meanwhile_refuses(app: Duly, fail: Any) -> None:
    keyed = fail.using(key="k")
    [job_id] = dead(app, keyed, 1)
    holder = keyed.enqueue(1)
    with pytest.raises(KeyConflict) as raised:
        app.dead.replay(job_id)
    assert raised.value.existing_id == holder.id


def test_r06_a_success_is_replayed_by_force_only(app: Duly, fail: Any) -> None:
    job = fail.enqueue(1, True)
    work(app)
    with pytest.raises(NotReplayable, match=f"job {job.id} is succeeded, which is not replayed; force=True replays it"):
        app.dead.replay(job.id)
    again = app.dead.replay(job.id, force=True, by="me", why="once more")
    work(app)
    assert found(app, again).result == 1


def test_unknown_jobs_are_not_replayed_or_resolved(app: Duly, fail: Any) -> None:
    live = fail.using(delay="1h").enqueue(1)
    asks: list[Callable[[], Any]] = [
        lambda: app.dead.replay(UNKNOWN),
        lambda: app.dead.replay(live.id),
        lambda: app.dead.replay(UNKNOWN, key="k"),
        lambda: app.dead.replay(UNKNOWN, payload={}),
        lambda: asyncio.run(app.dead.areplay(UNKNOWN)),
        lambda: app.dead.resolve(UNKNOWN, by="me", why="x"),
        lambda: asyncio.run(app.dead.aresolve(live.id, by="me", why="x")),
    ]
    for ask in asks:
        with pytest.raises(JobNotFound):
            ask()


def test_r07_replay_all_is_bounded_oldest_first_and_filtered(app: Duly, fail: Any) -> None:
    ids = dead(app, fail, 1, 2, 3, 4)
    assert [one.id for one in app.dead.replay_all(limit=2, by="me", why="all well")] == ids[:2]
    assert [one.id for one in asyncio.run(app.dead.areplay_all(error="no 4"))] == ids[3:]
    assert app.dead.replay_all(task="nobody") == []
    assert [job.id for job in app.dead.list()] == [ids[2]]
    every: Any = app.dead.replay_all
    with pytest.raises(ConfigError, match="no filter tusk="):
        every(tusk="x")
    with pytest.raises(ConfigError, match="limit= is 0"):
        every(limit=0)


def test_without_logging_an_event_is_printed_with_its_task_job_and_error(
    app: Duly, fail: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger("duly.worker"), "propagate", False)  # to the handlers of pytest
    lost = dead(app, fail, 1)
    assert capsys.readouterr().err == f"job.dead fail {lost[0]} no 1\n"


def test_r09_a_resolved_job_is_not_replayed_or_resolved_again(app: Duly, fail: Any) -> None:
    first, second = dead(app, fail, 1, 2)
    app.dead.resolve(first, by="me", why="paid by hand")
    asyncio.run(app.dead.aresolve(second, by="me", why="too"))
    assert app.dead.list() == []
    record = found(app, first)
    assert (record.resolved_by, record.resolved_why) == ("me", "paid by hand")
    with pytest.raises(JobNotFound, match="not resolved yet"):
        app.dead.resolve(first, by="you", why="again")
    with pytest.raises(NotReplayable):
        app.dead.replay(first)


def test_r09_metrics_count_by_task_and_reason(app: Duly, fail: Any) -> None:
    ids = dead(app, fail, 1, 2, 3)
    [figure] = app.dead.metrics()
    assert (figure.task, figure.reason, figure.count) == ("fail", "attempts used up", 3)
    assert 0 <= figure.oldest_ms < 60_000
    app.dead.resolve(ids[0], by="me", why="x")
    assert [one.count for one in asyncio.run(app.dead.ametrics())] == [2]
    assert [one.count for one in app.dead.metrics(all=True)] == [3]


def test_purge_deletes_dead_jobs_and_returns_their_number(app: Duly, fail: Any) -> None:
    ids = dead(app, fail, 1, 2, 3)
    assert app.dead.purge([ids[0], UNKNOWN], by="me", why="old") == 1
    assert asyncio.run(app.dead.apurge(ids)) == 2
    assert [app.get(job_id) for job_id in ids] == [None] * 3
    assert app.dead.purge([]) == 0


def test_purge_takes_one_id_too(app: Duly, fail: Any) -> None:
    [job_id] = dead(app, fail, 1)
    assert app.dead.purge(job_id) == 1
