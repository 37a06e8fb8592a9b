"""duly as its users meet it: one idea a test, on a file of SQLite with nothing to install.

`app.run(drain=True)` does what is due and comes back; in production it is `duly worker module:app`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from duly import Cancel, Ctx, Duly, Retry, Snooze, SyncCtx
from duly.errors import BadArguments, JobDead, KeyConflict
from duly.rules import backoff


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Duly]:
    app = Duly(tmp_path / "jobs.db")
    yield app
    app.close()


def test_a_task_is_a_function_that_can_be_enqueued(app: Duly) -> None:
    @app.task
    def add(a: int, b: int) -> int:
        return a + b

    assert add(1, 2) == 3  # still a plain function

    job = add.enqueue(1, 2)  # durable when this returns
    app.run(drain=True)
    assert job.result(timeout=10) == 3


def test_async_handlers_are_no_different(app: Duly) -> None:
    @app.task
    async def greet(name: str) -> str:
        return f"hello {name}"

    job = greet.enqueue("you")
    app.run(drain=True)
    assert job.result(timeout=10) == "hello you"


def test_wrong_arguments_are_refused_before_anything_is_written(app: Duly) -> None:
    @app.task
    def send(order: int) -> None: ...

    with pytest.raises(BadArguments, match="argument `order`: expected `int`, got `str`"):
        send.enqueue("forty-two")  # type: ignore[arg-type]
    assert app.list() == []


def test_a_failure_is_tried_again(app: Duly) -> None:
    seen: list[int] = []

    @app.task(max_attempts=3, backoff=backoff.fixed(0))
    def flaky(ctx: SyncCtx) -> str:
        seen.append(ctx.attempt)
        if ctx.attempt < 3:
            raise ConnectionError("try again")
        return "at last"

    job = flaky.enqueue()
    while app.list(state="scheduled") or app.list(state="ready"):
        app.run(drain=True)
    assert (job.result(timeout=10), seen) == ("at last", [1, 2, 3])


def test_a_job_that_fails_too_often_is_dead_until_a_person_replays_it(app: Duly) -> None:
    mended = False

    @app.task(max_attempts=1)
    def charge() -> str:
        if not mended:
            raise RuntimeError("card declined")
        return "paid"

    job = charge.enqueue()
    app.run(drain=True)
    with pytest.raises(JobDead, match="card declined"):
        job.result(timeout=10)

    mended = True
    again = app.dead.replay(job.id, by="anna", why="new card")
    app.run(drain=True)
    record = app.get(again)
    assert record is not None
    assert (record.result, record.origin) == ("paid", job.id)


def test_a_key_makes_it_happen_once(app: Duly) -> None:
    charged: list[int] = []

    @app.task(key=lambda order: f"order {order}")
    def charge(order: int, amount: int) -> int:
        charged.append(order)
        return amount

    first = charge.enqueue(42, 10)
    app.run(drain=True)
    second = charge.enqueue(42, 10)
    assert (second.id, second.deduplicated, second.result(timeout=10)) == (first.id, True, 10)
    assert charged == [42]
    with pytest.raises(KeyConflict):
        charge.enqueue(42, 99)  # the same key, but not the same work


def test_one_enqueue_can_have_terms_of_its_own(app: Duly) -> None:
    @app.task
    def remind(name: str) -> None: ...

    job = remind.using(delay="1h", priority=10, subject="anna").enqueue("anna")
    app.run(drain=True)
    record = app.get(job.id)
    assert record is not None
    assert (record.state, record.priority, record.subject) == ("scheduled", 10, "anna")
    assert "due" in str(app.why(job.id))


def test_many_are_enqueued_at_once(app: Duly) -> None:
    @app.task
    def square(n: int) -> int:
        return n * n

    jobs = square.enqueue_many(square.call(n) for n in range(100))
    app.run(drain=True)
    assert [job.result(timeout=10) for job in jobs] == [n * n for n in range(100)]


def test_a_job_can_be_part_of_your_own_transaction(app: Duly, tmp_path: Path) -> None:
    @app.task
    def ship(order: int) -> None: ...

    app.migrate()
    conn = sqlite3.connect(tmp_path / "jobs.db")
    conn.execute("create table orders (id integer)")

    conn.execute("insert into orders values (1)")
    ship.using(conn=conn).enqueue(1)
    conn.rollback()
    assert app.list() == []  # neither the order nor the job

    conn.execute("insert into orders values (2)")
    ship.using(conn=conn).enqueue(2)
    conn.commit()
    assert [job.payload for job in app.list()] == [{"order": 2}]
    conn.close()


def test_a_handler_can_finish_its_job_in_its_own_transaction(app: Duly, tmp_path: Path) -> None:
    @app.task
    def ship(ctx: SyncCtx, order: int) -> str:
        conn = sqlite3.connect(tmp_path / "jobs.db")
        conn.execute("create table if not exists shipped (id integer)")
        conn.execute("insert into shipped values (?)", (order,))
        ctx.commit(conn, result="shipped")  # both are there after the commit, or neither
        conn.commit()
        conn.close()
        return "shipped"

    job = ship.enqueue(1)
    app.run(drain=True)
    assert job.result(timeout=10) == "shipped"


def test_a_handler_records_its_progress(app: Duly) -> None:
    @app.task
    async def parse(ctx: Ctx, path: str) -> float | None:
        await ctx.progress(40, f"parsing {path}")
        record = await app.aget(ctx.job_id)
        return record.progress if record else None

    job = parse.enqueue("a.csv")
    app.run(drain=True)
    assert job.result(timeout=10) == 40


def test_a_handler_decides_how_its_attempt_ends(app: Duly) -> None:
    @app.task
    def poll() -> None:
        raise Snooze("1h")  # look again later; this attempt does not count

    @app.task
    def give_up() -> None:
        raise Cancel("no longer wanted")

    @app.task
    def busy() -> None:
        raise Retry("rate limited", after="10m")  # a failure, but we know how long to wait

    ids = [poll.enqueue().id, give_up.enqueue().id, busy.enqueue().id]
    app.run(drain=True)
    ended = [(job.state.value, job.attempt) for job_id in ids if (job := app.get(job_id))]
    assert ended == [("scheduled", 0), ("cancelled", 1), ("scheduled", 1)]


def test_a_handler_enqueues_children_with_its_id(app: Duly) -> None:
    @app.task
    async def order(ctx: Ctx) -> str:
        return (await ship.aenqueue()).id

    @app.task
    def ship() -> None: ...

    job = order.enqueue()
    app.run(drain=True)
    shipped = app.get(job.result(timeout=10))
    assert shipped is not None
    assert (shipped.causation_id, shipped.correlation_id) == (job.id, job.id)
