"""What queues can be told, seen by those who enqueue and by workers. Lines B09, J07 and R11."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

from duly import Duly
from duly.app.queue_depth import Depths
from duly.errors import ConfigError, QueueFull
from duly.model import Claimed, Envelope, Limit, NewJob, State, Terms
from duly.store import caller, ops
from duly.store.op import Op
from duly.store.sequence import run
from duly.worker.queue_limits import QueueLimits
from tests.contract.stores import new_id
from tests.engine.conftest import HOLDABLE, Outside, found, work, work_until

LIMIT = Limit("queue", "mail", 10, None, None, None, None, 0, "ann", "so", None)


# Setting them


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"queue": "mail"}, "give at least one of depth=, ageing=, retry_share="),
        ({"depth": 5}, "give queue="),
        ({"task": "send", "depth": 5}, "depth= is not for a task"),
        ({"queue": "", "depth": 5}, "a name is not empty"),
        ({"queue": "mail", "depth": 0}, "depth= is 0: give how many jobs may wait, from 1"),
        ({"queue": "mail", "depth": -3}, "depth= is -3: give how many"),
        ({"queue": "mail", "depth": 1.5}, "depth= is 1.5: give how many"),
        ({"queue": "mail", "depth": True}, "depth= is True: give how many"),
        ({"queue": "mail", "depth": "many"}, "depth= is 'many': give how many"),
        ({"queue": "mail", "ageing": "1x"}, "ageing= is '1x', where 'x' is no unit"),
        ({"queue": "mail", "ageing": -1}, "ageing= is negative"),
        ({"queue": "mail", "retry_share": 1.1}, "retry_share= is 1.1: give a share from 0 to 1"),
        ({"queue": "mail", "retry_share": -0.1}, "retry_share= is -0.1: give a share"),
        ({"queue": "mail", "retry_share": float("nan")}, "retry_share= is nan: give a share"),
    ],
)
def test_b09_a_limit_that_cannot_work_is_refused_and_nothing_is_written(
    app: Duly, outside: Outside, options: dict[str, Any], said: str
) -> None:
    before = outside.snapshot()
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        app.limit(**options)
    assert outside.snapshot() == before


def test_b09_an_app_lists_the_limits_of_its_queues(app: Duly) -> None:
    app.limit(queue="mail", depth=10_000, ageing="1m", retry_share=0.2, by="ann", why="so")
    asyncio.run(app.alimit(queue="mail", ageing=0, retry_share="off", by="bob", why="over"))
    [mail] = app.limits()
    assert (mail.max_depth, mail.ageing_ms, mail.retry_share) == (10_000, None, None)
    assert (mail.set_by, mail.set_why) == ("bob", "over")
    app.limit(queue="mail", depth="off", retry_share=0)
    assert [(one.max_depth, one.retry_share) for one in asyncio.run(app.alimits())] == [(None, 0)]


# Depth, as one app knows it


class Asked:
    """A database as `Depths` sees it: the limits that it has, and what waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.limits: list[Limit] = []
        self.waiting = 0
        self.asked: list[str] = []
        self.depths = Depths(lambda: self.now)

    def answer(self, op: Op[Any]) -> Any:
        self.asked.append(op.name)
        return self.limits if op.name == "limits" else min(self.waiting, op.params["enough"])

    def admit(self, count: int = 1, queue: str = "mail") -> bool:
        try:
            run(self.depths.admit(queue, count), self.answer)
        except QueueFull:
            return False
        return True


def test_b09_without_limits_the_cost_is_one_query_a_second() -> None:
    asked = Asked()
    for tick in range(500):
        asked.now = tick / 100
        assert asked.admit(1000)
    assert asked.asked == ["limits"] * 5


def test_b09_a_recent_depth_is_reused_and_later_enqueues_are_added() -> None:
    asked = Asked()
    asked.limits = [replace(LIMIT, depth=4, depth_age_ms=500)]
    assert [asked.admit(2) for _ in range(3)] == [True] * 3
    assert asked.asked == ["limits"]
    asked.waiting = 10
    assert not asked.admit()
    assert asked.asked == ["limits", "depth"]
    assert asked.admit(50, queue="other")


def test_b09_an_old_or_missing_depth_is_counted_by_the_enqueuer() -> None:
    for limit in (LIMIT, replace(LIMIT, depth=0, depth_age_ms=5001), replace(LIMIT, depth=0, depth_age_ms=-1)):
        asked = Asked()
        asked.limits, asked.waiting = [limit], 9
        assert asked.admit()
        assert asked.asked == ["limits", "depth"]


def test_b09_before_a_refusal_the_depth_is_counted_again_but_not_each_time() -> None:
    asked = Asked()
    asked.limits, asked.waiting = [LIMIT], 10
    assert not asked.admit()
    asked.waiting = 0
    asked.now += 0.05
    assert not asked.admit()
    asked.now += 0.05
    assert asked.admit(10)
    assert not asked.admit()
    assert asked.asked == ["limits", "depth", "depth"]


def test_b09_a_new_depth_includes_earlier_enqueues_only() -> None:
    asked = Asked()
    asked.limits = [replace(LIMIT, depth=0, depth_age_ms=0)]
    assert asked.admit(3)
    asked.now = 0.8
    assert asked.admit(4)
    asked.now = 1.0
    asked.limits, asked.waiting = [replace(LIMIT, depth=3, depth_age_ms=500)], 7
    assert asked.admit(3)  # and 4 that came after the figure
    assert asked.asked == ["limits", "limits"]
    asked.waiting = 10
    assert not asked.admit()


def test_b09_a_limit_that_was_raised_or_taken_away_is_followed_within_a_second() -> None:
    asked = Asked()
    asked.limits, asked.waiting = [LIMIT], 10
    assert not asked.admit()
    asked.limits = [replace(LIMIT, max_depth=12)]
    asked.now += 1
    assert asked.admit(2)
    asked.limits = []
    asked.now += 1
    assert asked.admit(100)


# Depth, on every store


def test_b09_a_full_queue_refuses_with_the_remedy_and_nothing_is_written(app: Duly, outside: Outside) -> None:
    @app.task(queue="mail")
    def send(n: int) -> None: ...

    @app.task
    def other() -> None: ...

    app.limit(queue="mail", depth=3, by="ann", why="so")
    for n in range(3):
        send.enqueue(n)
    before = outside.snapshot()
    with pytest.raises(QueueFull) as told:
        send.enqueue(4)
    with pytest.raises(QueueFull):
        asyncio.run(send.aenqueue(4))
    with pytest.raises(QueueFull):
        send.using(delay="1h", key="k").enqueue(4)
    assert outside.snapshot() == before
    assert (told.value.queue, told.value.enqueued, told.value.code) == ("mail", 0, "queue_full")
    assert str(told.value) == (
        "queue 'mail' is full: 3 jobs wait in it, and one more would exceed its limit of 3. Retry later, "
        "or raise the limit: duly queues limit mail --depth …"
    )
    other.enqueue()
    send.using(queue="default").enqueue(5)


def a_second_passes(app: Duly) -> None:
    """Move the clock by which an app counts."""
    depths = app.database.depths
    before = depths._clock
    depths._clock = lambda: before() + 1.0


def test_b09_a_queue_takes_jobs_again_when_some_have_been_run(app: Duly) -> None:
    @app.task(queue="mail")
    def send(n: int) -> None: ...

    app.limit(queue="mail", depth=2)
    for _ in range(3):
        send.enqueue_many(send.call(n) for n in range(2))
        with pytest.raises(QueueFull):
            send.enqueue(9)
        work(app)
        a_second_passes(app)  # the longest time between two counts


def test_b09_enqueue_many_refuses_by_chunk_and_returns_the_number_enqueued(
    app: Duly, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duly.app.task.CHUNK", 10)

    @app.task(queue="mail")
    def send(n: int) -> None: ...

    app.limit(queue="mail", depth=25)
    with pytest.raises(QueueFull, match="20 of these were enqueued before that") as told:
        send.enqueue_many(send.call(n) for n in range(100))
    assert told.value.enqueued == 20
    assert len(app.list(limit=1000)) == 20
    with pytest.raises(QueueFull) as told:
        asyncio.run(send.aenqueue_many([send.call(n) for n in range(6)]))
    assert told.value.enqueued == 0


@pytest.mark.parametrize("key", [None, "night"])
def test_b09_a_batch_is_refused_by_a_full_queue_and_can_be_filled_on(
    app: Duly, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    monkeypatch.setattr("duly.app.batches.CHUNK", 10)

    @app.task(queue="mail")
    def send(n: int) -> None: ...

    app.limit(queue="mail", depth=25)
    with app.batch("import", key=key) as batch:
        with pytest.raises(QueueFull, match="20 of these") as told:
            batch.fill(send.call(n) for n in range(30))
        assert told.value.enqueued == 20
        app.limit(queue="mail", depth=100)
        a_second_passes(app)  # until the limits are read again
        assert batch.fill(send.call(n) for n in range(20, 30)) == 10
    assert batch.progress().total == 30


@pytest.fixture
def shared(where: tuple[str, str], app: Duly) -> Iterator[Any]:
    app.driver.run(ops.clock())
    kind, url = where
    if kind == "postgres":
        with psycopg.connect(url) as conn:
            yield conn
        return
    conn = sqlite3.connect(url)
    yield conn
    conn.close()


@HOLDABLE
def test_b09_a_full_queue_refuses_on_the_callers_connection_and_leaves_its_transaction_alone(
    app: Duly, shared: Any
) -> None:
    @app.task(queue="mail")
    def send(n: int) -> None: ...

    app.limit(queue="mail", depth=2)
    shared.execute("create table orders (id int)")
    shared.commit()
    shared.execute("insert into orders values (1)")
    ours = send.using(conn=shared)
    jobs = [ours.enqueue(1), ours.enqueue(2)]
    with pytest.raises(QueueFull):
        ours.enqueue(3)
    with pytest.raises(QueueFull):
        asyncio.run(ours.aenqueue(3))
    shared.commit()
    assert shared.execute("select id from orders").fetchall() == [(1,)]
    assert [found(app, job.id).state for job in jobs] == [State.READY] * 2


@HOLDABLE
def test_b09_a_refusal_on_the_callers_connection_opens_no_transaction_to_write(app: Duly, shared: Any) -> None:
    @app.task(queue="mail")
    def send(n: int) -> None: ...

    app.driver.run(ops.enqueue(Terms("send", queue="mail"), [NewJob(new_id(), '{"n":1}')]))  # unknown to the app
    app.limit(queue="mail", depth=1)
    with pytest.raises(QueueFull):
        send.using(conn=shared).enqueue(2)
    app.limit(queue="mail", depth=2)  # would wait for a writer
    assert caller.run(shared, ops.clock()) > 0
    shared.rollback()


def test_b09_a_handler_is_refused_too_and_accepted_jobs_are_kept(app: Duly) -> None:
    @app.task(queue="mail", max_attempts=1)
    def send(n: int) -> None:
        if n < 0:
            raise ValueError(n)

    @app.task(max_attempts=1)
    def parent() -> None:
        send.enqueue(1)

    job = send.enqueue(-1)
    work(app, queues=["mail"])
    app.limit(queue="mail", depth=1)
    send.enqueue(1)
    a_second_passes(app)
    refused = parent.enqueue()
    work(app, queues=["default"])
    assert "QueueFull" in str(found(app, refused.id).error)
    replayed = app.dead.replay(job.id)
    assert found(app, replayed).state is State.READY


def test_b09_workers_count_the_depth_for_all_processes(app: Duly) -> None:
    @app.task(queue="mail")
    def send(n: int) -> None: ...

    app.limit(queue="mail", depth=5)
    app.limit(queue="bulk", depth=5)  # of somebody else
    send.using(delay="1h").enqueue_many(send.call(n) for n in range(3))

    def counted() -> bool:
        return {one.name: one.depth for one in app.limits()} == {"bulk": None, "mail": 3}

    work_until(app, counted, seconds=15)


def test_b09_why_names_a_pause_with_its_author_reason_and_end(app: Duly) -> None:
    @app.task(queue="mail")
    def send(n: int) -> None: ...

    job = send.enqueue(1)
    app.pause(task="send", by="ann", why="a leak", duration="1h")
    said = str(app.why(job.id))
    assert said.startswith("task 'send' is paused by ann until ")
    assert said.endswith("UTC: a leak")
    app.resume(task="send")
    app.pause(queue="mail", by="bob", why="server down")
    assert str(app.why(job.id)) == "queue 'mail' is paused by bob: server down"


# Ageing and the budget, as a worker keeps them


def claims(limits: QueueLimits, queue: str = "mail", *, limit: int = 10, **more: Any) -> Op[list[Claimed]]:
    asked = {"token": 1, "worker": "w", "tasks": ["send"], "alone": False, "marks": [], **more}
    return limits.claim(queue, limit=limit, **asked)


def job(attempt: int) -> Claimed:
    return Claimed(
        id="1", token=5, task="send", queue="mail", priority=0, payload="{}", envelope=Envelope(), key=None,
        attempt=attempt, max_attempts=5, crashes=0, suspect=False, lease_ms=1000, lease_until=9, due_at=1, created_at=1,
        keep_ms=9, batch_id=None, schedule=None, replay_count=0, cancel_requested_at=None,
    )  # fmt: skip


def test_j07_only_a_queue_with_limits_uses_the_limited_claim() -> None:
    limits = QueueLimits()
    assert claims(limits).sections == ("claim",)
    limits.learn([LIMIT])
    assert claims(limits).sections == ("claim",)
    limits.learn([replace(LIMIT, ageing_ms=5)])
    assert claims(limits).sections == ("uncompiled", "claim_shaped")
    assert (claims(limits).params["ageing_ms"], claims(limits).params["retries"]) == (5, None)
    assert claims(limits, alone=True).sections == ("claim",)
    assert claims(limits, "other").sections == ("claim",)
    assert limits.promotes_retries("mail")


def budget(limits: QueueLimits, limit: int, takes: Callable[[int], int]) -> int:
    """One claim of a queue where so many retries are taken of what is allowed; says how many were allowed."""
    allowed = claims(limits, limit=limit).params["retries"]
    taken = takes(allowed)
    limits.took("mail", [job(2)] * taken + [job(1)] * (limit - taken))
    return allowed


def test_r11_a_claim_of_n_allows_its_share_of_n_to_retries() -> None:
    limits = QueueLimits()
    limits.learn([replace(LIMIT, retry_share=0.2)])
    assert not limits.promotes_retries("mail")
    assert [budget(limits, 10, lambda allowed: allowed) for _ in range(5)] == [2] * 5


def test_r11_claims_of_one_job_save_up_until_it_is_a_retrys_turn() -> None:
    limits = QueueLimits()
    limits.learn([replace(LIMIT, retry_share=0.2)])
    assert [budget(limits, 1, lambda allowed: allowed) for _ in range(10)] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1]


def test_r11_saved_budget_is_at_most_one_claim_and_free_slots_cost_none() -> None:
    limits = QueueLimits()
    limits.learn([replace(LIMIT, retry_share=0.2)])
    assert [budget(limits, 10, lambda allowed: 0) for _ in range(5)] == [2] * 5
    assert budget(limits, 10, lambda allowed: 10) == 2
    assert budget(limits, 10, lambda allowed: allowed) == 2
    none = QueueLimits()
    none.learn([replace(LIMIT, retry_share=0)])
    assert [budget(none, 10, lambda allowed: 0) for _ in range(5)] == [0] * 5


def test_j07_a_worker_ages_priorities_in_queues_with_that_limit(app: Duly) -> None:
    ran: list[str] = []

    @app.task
    def note(what: str) -> None:
        ran.append(what)

    app.limit(queue="default", ageing="1h")
    note.using(priority=0).enqueue("old")
    note.using(priority=-1).enqueue("low")
    note.using(priority=2).enqueue("high")
    _outside(app, "update duly_job set due_at = due_at - ? where priority = 0", 3 * 3_600_000)
    work(app, concurrency=1)
    assert ran == ["old", "high", "low"]


def _outside(app: Duly, sql: str, *params: Any) -> None:
    url = app.settings.url
    if url.store == "postgresql":
        with psycopg.connect(url.dsn, autocommit=True) as conn:
            conn.execute(sql.replace("duly_job", "duly.duly_job").replace("?", "%s"), params)
        return
    conn = sqlite3.connect(str(url.path), isolation_level=None, timeout=5)
    conn.execute(sql, params)
    conn.close()


def test_r11_a_worker_gives_retries_their_share_while_other_work_waits(app: Duly) -> None:
    ran: list[str] = []

    @app.task(max_attempts=1)  # so that nothing is claimed ahead
    def send(what: str) -> None:
        ran.append(what)

    app.limit(queue="default", retry_share=0.25)
    send.using(delay="1h").enqueue_many(send.call("retry") for _ in range(40))
    _outside(app, "update duly_job set max_attempts = 5, attempt = 1, due_at = due_at - ?", 7_200_000)
    send.enqueue_many(send.call("fresh") for _ in range(60))
    work(app, concurrency=4)
    assert (ran.count("retry"), ran.count("fresh")) == (40, 60)
    assert 5 <= ran[:40].count("retry") <= 15


def test_r11_without_a_budget_retries_are_claimed_when_due(app: Duly) -> None:
    ran: list[str] = []

    @app.task(max_attempts=1)  # so that nothing is claimed ahead
    def send(what: str) -> None:
        ran.append(what)

    send.using(delay="1h").enqueue_many(send.call("retry") for _ in range(40))
    _outside(app, "update duly_job set max_attempts = 5, attempt = 1, due_at = due_at - ?, state = 'ready'", 7_200_000)
    send.enqueue_many(send.call("fresh") for _ in range(60))
    work(app, concurrency=4)
    assert ran[:40].count("retry") > 30
