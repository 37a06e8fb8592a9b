"""Batches as an app fills them: each job once whatever happens, progress that is exact, callbacks that come once."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psycopg
import pytest

from duly import Cancel, Ctx, Duly, Snooze, SyncCtx
from duly.app import batches
from duly.errors import AnswerLost, BatchNotFound, BatchSealed, ConfigError, KeyConflict, LeaseLost
from duly.model import State
from duly.rules import backoff
from duly.store import ops
from duly.store.op import Op
from duly.testing import adrain, drain, inline
from tests.engine.conftest import HOLDABLE, Outside, found, steal, take, work, work_until

Told = list[tuple[str, str | None]]


class Crash(Exception):
    """The end of a process that fills a batch."""


@pytest.fixture
def ran(app: Duly) -> list[int]:
    """What the task `work` was run with; 13 fails."""
    numbers: list[int] = []

    @app.task(name="work", max_attempts=1)
    def work_on(n: int) -> int:
        numbers.append(n)
        if n == 13:
            raise ValueError(n)
        return n

    return numbers


@pytest.fixture
def told(app: Duly) -> Told:
    """What the callbacks `complete`, `success` and `first_dead` were told."""
    said: Told = []
    for name in ("complete", "success", "first_dead"):

        def note(ctx: SyncCtx, *, name: str = name) -> None:
            said.append((name, ctx.batch))

        app.task(name=name)(note)
    return said


CALLBACKS: dict[str, Any] = {"on_complete": "complete", "on_success": "success", "on_first_dead": "first_dead"}


def calls(app: Duly, *numbers: int) -> Iterator[Any]:
    """Calls of `work`, made as they are asked for."""
    for number in numbers:
        yield app.tasks["work"].call(number)


def ends(app: Duly, batch: batches.Batch) -> tuple[int, ...]:
    progress = batch.progress()
    return progress.open, progress.succeeded, progress.partial, progress.dead, progress.cancelled


# Filling


def test_b01_an_empty_batch_is_complete_when_it_is_left(app: Duly, told: Told) -> None:
    with app.batch("nothing", **CALLBACKS) as batch:
        assert not batch.progress().complete
    progress = batch.progress()
    assert (progress.complete, progress.percent, progress.total, progress.name) == (True, 100.0, 0, "nothing")
    assert batch.wait(0) == progress
    drain(app)
    assert told == [("complete", batch.id), ("success", batch.id)]


def test_b01_a_batch_is_not_complete_before_it_is_left_although_all_have_ended(
    app: Duly, ran: list[int], told: Told
) -> None:
    with app.batch("import", **CALLBACKS) as batch:
        app.tasks["work"].enqueue(1)
        drain(app)
        assert ends(app, batch) == (0, 1, 0, 0, 0)
        assert not batch.progress().complete
        assert told == []
        app.tasks["work"].enqueue(2)
    assert not batch.progress().complete
    drain(app)
    assert batch.progress().complete
    assert told == [("complete", batch.id), ("success", batch.id)]


def test_b01_any_number_of_jobs_is_filled_in_chunks_from_a_generator(
    app: Duly, ran: list[int], outside: Outside
) -> None:
    lag: list[int] = []

    def many() -> Iterator[Any]:
        for number in range(3000):
            if number % 500 == 499:
                [(there,)] = outside.query("select count(*) from duly_job")
                lag.append(number - there)
            yield from calls(app, number)

    with app.batch("import") as batch:
        assert batch.fill(many()) == 3000
    assert max(lag) < 1001  # no more than a chunk is held at a time
    assert outside.query("select count(*) from duly_job where batch_id is not null") == [(3000,)]
    assert (batch.progress().pending, batch.progress().total) == (3000, 3000)


def test_b01_calls_of_several_tasks_fill_one_batch_in_their_order(app: Duly, ran: list[int]) -> None:
    @app.task
    def other(word: str) -> str:
        return word

    mixed = [*calls(app, 1, 2), other.call("a"), *calls(app, 3), other.call("b"), other.call("c")]
    for _ in range(2):
        with app.batch("mixed", key="k") as batch:
            assert batch.fill(mixed) == 6
    assert batch.progress().total == 6
    drain(app)
    assert (sorted(ran), batch.progress().succeeded) == ([1, 2, 3], 6)


@pytest.mark.parametrize("keep", [None, 0])
@pytest.mark.parametrize("crash_at", [0, 1, 3, 4, 9, 10])
def test_b01_with_a_key_a_failed_fill_resumes_without_duplicates(
    app: Duly, ran: list[int], told: Told, monkeypatch: pytest.MonkeyPatch, crash_at: int, keep: int | None
) -> None:
    """Some are added one by one, some in chunks of another size each time, and some have ended meanwhile."""
    task = app.tasks["work"].using(keep=keep)

    def numbers(until: int) -> Iterator[Any]:
        for number in range(2, 10):
            if number >= until:
                raise Crash
            yield task.call(number)

    made = []
    for chunk, until in ((3, crash_at), (2, crash_at + 2), (5, 99), (4, 99)):
        monkeypatch.setattr(batches, "CHUNK", chunk)
        with suppress(Crash), app.batch("import", key="night 5", on_complete="complete") as batch:
            made.append(batch.id)
            if until == 0:
                raise Crash
            handles = [task.enqueue(0), *task.enqueue_many([task.call(1)])]
            batch.fill(numbers(until))
        drain(app)
    assert len(set(made)) == 1
    assert sorted(ran) == list(range(10))
    assert ends(app, batch) == (0, 10, 0, 0, 0)
    assert told == [("complete", batch.id)]
    assert len({job.id for job in handles}) == 2
    if keep is None:
        assert [job.result(0) for job in handles] == [0, 1]


def losing(app: Duly, monkeypatch: pytest.MonkeyPatch, which: int) -> list[str]:
    """Lose the answer of an addition for good, as a process does that dies before it has it; the list fills then."""
    real, lost, seen = app.driver.run, [], []

    def run(op: Op[Any]) -> Any:
        answer = real(op)
        if op.name == "enqueue" and op.writes:
            seen.append(op)
            if len(seen) == which:
                lost.append(op.name)
                raise AnswerLost("the connection broke")
        return answer

    monkeypatch.setattr(app.driver, "run", run)
    return lost


@pytest.mark.parametrize("keep", [None, 0])
@pytest.mark.parametrize("which", [1, 2, 3, 4])
def test_b01_with_a_key_a_lost_answer_at_any_chunk_causes_no_duplicate(
    app: Duly, ran: list[int], monkeypatch: pytest.MonkeyPatch, which: int, keep: int | None
) -> None:
    task = app.tasks["work"].using(keep=keep)
    for chunk, lose in ((3, which), (2, 0)):
        with monkeypatch.context() as then, suppress(AnswerLost):
            then.setattr(batches, "CHUNK", chunk)
            lost = losing(app, then, lose)
            with app.batch("import", key="k") as batch:
                batch.fill(task.call(number) for number in range(10))
        assert len(lost) == bool(lose)
        drain(app)
    assert sorted(ran) == list(range(10))
    assert ends(app, batch) == (0, 10, 0, 0, 0)
    assert batch.progress().complete


def test_b01_adding_after_a_lost_answer_raises_before_a_job_is_lost(
    app: Duly, ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = app.tasks["work"]
    with pytest.raises(ConfigError, match=r"so one thread fills it in order. An earlier add failed"):  # noqa: PT012, SIM117
        with app.batch("import", key="k"):
            with monkeypatch.context() as then:
                losing(app, then, 1)
                with pytest.raises(AnswerLost):
                    task.enqueue(0)
            task.enqueue(1)  # would be taken for the one before
    with app.batch("import", key="k") as batch:
        batch.fill(calls(app, 0, 1))
    drain(app)
    assert (sorted(ran), batch.progress().total) == ([0, 1], 2)


def test_b01_a_batch_that_was_sealed_under_its_key_is_passed_over_and_takes_no_more(
    app: Duly, ran: list[int], told: Told
) -> None:
    for _ in range(2):
        with app.batch("import", key="k", **CALLBACKS) as batch:
            batch.fill(calls(app, 0, 1, 2))
        drain(app)
    with pytest.raises(BatchSealed, match=r"was sealed with 3 jobs under the key 'k', and takes no more"):  # noqa: SIM117
        with app.batch("import", key="k") as batch:
            batch.fill(calls(app, 0, 1, 2, 3))
    with pytest.raises(BatchSealed), app.batch("import", key="k"):  # noqa: PT012
        for number in range(4):
            app.tasks["work"].enqueue(number)
    assert sorted(ran) == [0, 1, 2]
    assert ends(app, batch) == (0, 3, 0, 0, 0)
    assert sorted(told) == [("complete", batch.id), ("success", batch.id)]


def test_b01_a_batch_sealed_by_another_process_meanwhile_is_skipped(app: Duly, ran: list[int]) -> None:
    """What it filled has ended, and left nothing behind."""
    task = app.tasks["work"].using(keep=0)

    def fill(*numbers: int) -> batches.Batch:
        with app.batch("import", key="k") as batch:
            batch.fill(task.call(number) for number in numbers)
        return batch

    with pytest.raises(BatchSealed, match="was sealed with 2 jobs"), app.batch("import", key="k") as batch:  # noqa: PT012
        with ThreadPoolExecutor(1) as other:
            other.submit(fill, 0, 1).result()
        drain(app)
        passed_over = batch.fill([task.call(0), task.call(1)])
        task.enqueue(2)
    assert (passed_over, ran) == (2, [0, 1])
    assert ends(app, batch) == (0, 2, 0, 0, 0)


def test_b01_a_nightly_batch_may_reuse_its_name(app: Duly, ran: list[int]) -> None:
    made = []
    for _ in range(2):
        with app.batch("nightly") as batch:
            app.tasks["work"].enqueue(1)
        made.append(batch)
    assert made[0].id != made[1].id
    assert [batch.progress().total for batch in made] == [1, 1]
    assert [one.id for one in app.batches.list(name="nightly")] == [made[1].id, made[0].id]


def test_b01_without_a_key_a_batch_left_open_by_an_error_can_be_continued(app: Duly, ran: list[int]) -> None:
    with suppress(Crash), app.batch("import") as batch:
        app.tasks["work"].enqueue(1)
        raise Crash
    drain(app)
    assert not batch.progress().complete
    app.tasks["work"].using(batch=batch).enqueue(2)
    batch.seal()
    drain(app)
    assert (batch.wait(0).succeeded, sorted(ran)) == (2, [1, 2])


def test_b01_jobs_with_keys_count_where_they_are_added(app: Duly, ran: list[int]) -> None:
    keyed = app.tasks["work"].using(key=lambda n: f"n{n % 10}")
    elsewhere = keyed.enqueue(1)
    for first in (True, False):
        with app.batch("import", key="k") as batch:
            handles = keyed.enqueue_many(keyed.call(n) for n in (1, 2, 2))
            assert [job.id == elsewhere.id for job in handles] == [True, False, False]
            assert handles[1].id == handles[2].id
            assert found(app, handles[1].id).batch_id == batch.id
            if first:
                assert [job.deduplicated for job in handles] == [True, False, True]
    assert batch.progress().total == 1
    drain(app)
    assert sorted(ran) == [1, 2]
    assert ends(app, batch) == (0, 1, 0, 0, 0)


@pytest.mark.parametrize("how", ["enqueue_many", "fill", "afill", "afill of async calls"])
@pytest.mark.parametrize("key", [None, "k"])
def test_b01_a_key_that_is_taken_raises_each_time_and_the_others_are_added(
    app: Duly, ran: list[int], monkeypatch: pytest.MonkeyPatch, how: str, key: str | None
) -> None:
    monkeypatch.setattr(batches, "CHUNK", 2)
    keyed = app.tasks["work"].using(key=lambda n: f"n{n % 10}")
    holder = keyed.enqueue(11)
    numbers = (1, 2, 3, 4, 5)

    async def asynchronously(batch: batches.Batch) -> None:
        async def later() -> AsyncIterator[Any]:
            for n in numbers:
                yield keyed.call(n)

        await batch.afill([keyed.call(n) for n in numbers] if how == "afill" else later())

    for _ in range(2 if key else 1):
        with pytest.raises(KeyConflict, match=f"taken by job {holder.id}") as raised, app.batch("x", key=key) as batch:  # noqa: PT012
            if how == "enqueue_many":
                keyed.enqueue_many(keyed.call(n) for n in numbers)
            elif how == "fill":
                batch.fill(keyed.call(n) for n in numbers)
            else:
                asyncio.run(asynchronously(batch))
        assert raised.value.existing_id == holder.id
    assert batch.progress().total == 4
    assert batch.progress().sealed_at is None
    drain(app)
    assert sorted(ran) == [2, 3, 4, 5, 11]


def test_b01_a_job_that_died_since_is_no_conflict_when_the_batch_is_filled_again(app: Duly, ran: list[int]) -> None:
    keyed = app.tasks["work"].using(key="one")
    for _ in range(2):
        with suppress(Crash), app.batch("import", key="k") as batch:
            job = keyed.enqueue(13)
            raise Crash
        drain(app)
        if len(ran) == 1:
            keyed.enqueue(1)  # the key was free, and has another holder now
            drain(app)
    assert found(app, job.id).batch_id == batch.id
    assert (ran, batch.progress().dead) == ([13, 1], 1)


def test_b01_a_sealed_batch_leaves_no_key_behind(app: Duly, ran: list[int], outside: Outside) -> None:
    with app.batch("import") as batch:
        pass
    with pytest.raises(BatchSealed, match="takes no more: make another batch"):
        app.tasks["work"].using(batch=batch, key="k").enqueue(1)
    assert outside.query("select key from duly_key") == []
    assert not app.tasks["work"].using(key="k").enqueue(1).deduplicated


def test_b01_coroutines_and_threads_that_fill_one_batch_at_once_take_turns(app: Duly, ran: list[int]) -> None:
    task = app.tasks["work"]

    async def fill() -> batches.Batch:
        async with app.batch("import", key="k") as batch:
            await asyncio.gather(*(task.aenqueue(n) for n in range(8)))
            await asyncio.gather(*(asyncio.to_thread(task.enqueue, n) for n in range(8, 16) if n != 13))
        return batch

    batch = asyncio.run(fill())
    assert batch.progress().total == 15
    drain(app)
    assert sorted(ran) == [n for n in range(16) if n != 13]


def test_b01_jobs_enqueued_by_handlers_inside_the_with_are_not_in_the_batch(app: Duly, ran: list[int]) -> None:
    @app.task
    def parent() -> None:
        app.tasks["work"].enqueue(1)
        with app.batch("of its own"):
            app.tasks["work"].enqueue(2)

    with app.batch("outer") as batch:
        parent.enqueue()
        drain(app)
    assert sorted(ran) == [1, 2]
    assert batch.progress().total == 1
    assert [one.total for one in app.batches.list(name="of its own")] == [1]


def test_b01_a_handler_fills_a_batch_under_its_lease(app: Duly, ran: list[int], told: Told) -> None:
    @app.task
    async def parent(ctx: Ctx) -> str:
        async with app.batch("inner", key=ctx.job_id, on_complete="complete") as batch:
            await app.tasks["work"].aenqueue(1)
            assert await batch.afill(calls(app, 2, 3)) == 2
            if ctx.attempt == 1:
                raise Crash
        return batch.id

    job = parent.using(max_attempts=2).enqueue()
    drain(app)
    app.retry(job.id)
    drain(app)
    assert sorted(ran) == [1, 2, 3]
    assert told == [("complete", found(app, job.id).result)]


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.slow
def test_b01_a_handler_that_lost_its_lease_adds_nothing(app: Duly, ran: list[int], how: str, key: str | None) -> None:
    raised: list[BaseException] = []
    task = app.tasks["work"]

    def zombie(ctx: SyncCtx) -> None:
        if ctx.attempt == 1:
            with app.batch("inner", key=key):
                steal(app, ctx.job_id)
                try:
                    task.enqueue(1)
                except LeaseLost as error:
                    raised.append(error)
                    raise

    async def azombie(ctx: Ctx) -> None:
        if ctx.attempt == 1:
            async with app.batch("inner", key=key):
                steal(app, ctx.job_id)
                try:
                    await task.aenqueue(1)
                except (LeaseLost, asyncio.CancelledError) as error:
                    raised.append(error)
                    raise

    handler: Any = app.task(lease="30s", name="zombie")(zombie if how == "sync" else azombie)
    job = handler.enqueue()
    work_until(app, lambda: found(app, job.id).state.ended)
    assert len(raised) == 1
    [progress] = app.batches.list()
    assert (progress.total, progress.sealed_at) == (0, None)
    with app.batch("inner", key="k") if key else app.batch("another") as batch:
        task.enqueue(2)
    drain(app)
    assert (ran, batch.progress().total) == ([2], 1)


# Progress


def test_b02_progress_is_exact_while_jobs_retry_snooze_die_and_are_cancelled(app: Duly) -> None:
    attempts: Counter[str] = Counter()

    @app.task(max_attempts=2, backoff=backoff.fixed(0))
    def step(how: str) -> None:
        attempts[how] += 1
        if how == "dies" or (how == "retries" and attempts[how] == 1):
            raise ValueError(how)
        if how == "snoozes" and attempts[how] == 1:
            raise Snooze(0)
        if how == "cancels":
            raise Cancel("so")

    with app.batch("import") as batch:
        batch.fill(step.call(how) for how in ("works", "retries", "snoozes", "dies", "cancels"))
        later = step.using(delay="1h").enqueue("works")
    assert ends(app, batch) == (6, 0, 0, 0, 0)
    work(app)
    assert attempts == {"works": 1, "retries": 2, "snoozes": 2, "dies": 2, "cancels": 1}
    assert ends(app, batch) == (1, 3, 0, 1, 1)
    assert round(batch.progress().percent, 1) == 83.3
    app.cancel(later.id)
    assert ends(app, batch) == (0, 3, 0, 1, 2)
    assert batch.progress().complete


def test_b02_running_jobs_are_counted_apart_from_waiting_ones(app: Duly, ran: list[int]) -> None:
    with app.batch("import") as batch:
        batch.fill(calls(app, 1, 2, 3))
    take(app)
    progress = batch.progress()
    assert (progress.pending, progress.running, progress.open) == (2, 1, 3)


def test_b02_a_replay_reopens_the_batch_without_calling_back_again(app: Duly, ran: list[int], told: Told) -> None:
    with app.batch("import", **CALLBACKS) as batch:
        dead = app.tasks["work"].enqueue(13)
        good = app.tasks["work"].enqueue(1)
    drain(app)
    before = list(told)
    assert sorted(before) == [("complete", batch.id), ("first_dead", batch.id)]
    app.dead.replay(dead.id, by="me", why="so", payload={"n": 2})
    assert ends(app, batch) == (1, 1, 0, 0, 0)
    assert not batch.progress().complete
    with pytest.raises(TimeoutError):
        batch.wait(0)
    drain(app)
    app.dead.replay(good.id, by="me", why="so", force=True)
    assert ends(app, batch) == (1, 1, 0, 0, 0)
    drain(app)
    assert ends(app, batch) == (0, 2, 0, 0, 0)
    assert batch.wait(0).complete
    assert told == before


def test_b02_batches_are_found_by_id_and_listed_with_their_progress(app: Duly, ran: list[int]) -> None:
    with app.batch("a", key="k") as first:
        app.tasks["work"].enqueue(1)
    with app.batch("b") as second:
        pass
    assert [one.id for one in app.batches.list()] == [second.id, first.id]
    assert [one.id for one in app.batches.list(name="a")] == [first.id]
    assert [one.id for one in app.batches.list(key="k", active=True)] == [first.id]
    assert [one.id for one in app.batches.list(active=False)] == [second.id]
    assert [one.id for one in app.batches.list(limit=1, before=second.id)] == [first.id]
    assert [one.id for one in app.batches.list(prefix=first.id[:33])][-1] == first.id
    assert app.batches.get(first.id).progress() == app.batches.list(key="k")[0]
    assert app.batches.get(first.id).name == "a"
    for unknown in ("nonsense", "00000000-0000-7000-8000-000000000000"):
        with pytest.raises(BatchNotFound, match=f"no batch has the id {unknown}"):
            app.batches.get(unknown)
    with pytest.raises(ConfigError, match="nmae"):
        app.batches.list(nmae="a")  # type: ignore[call-arg]


# Callbacks


def test_b03_each_callback_runs_once_and_knows_its_batch(app: Duly, ran: list[int], told: Told) -> None:
    with app.batch("import", **CALLBACKS, ok_at=0.5) as batch:
        batch.fill(calls(app, 1, 13, 2, 13, 3))
    drain(app)
    assert sorted(told) == [("complete", batch.id), ("first_dead", batch.id), ("success", batch.id)]
    assert told[0][0] == "first_dead"
    drain(app)
    assert len(told) == 3


@pytest.mark.parametrize(("ok_at", "success"), [(1.0, False), (1, False), (0.8, True), (0.81, False), (0.01, True)])
def test_b03_a_batch_succeeds_from_its_ok_at(
    app: Duly, ran: list[int], told: Told, ok_at: float, success: bool
) -> None:
    with app.batch("import", on_success="success", ok_at=ok_at) as batch:
        batch.fill(calls(app, 1, 2, 3, 4, 13))
    drain(app)
    assert told == [("success", batch.id)] * success
    assert batch.progress().ok_at == ok_at


def test_b03_a_callback_has_the_terms_of_its_task(app: Duly) -> None:
    @app.task(queue="mail", priority=7, max_attempts=2, schema_version=3)
    def tell(ctx: SyncCtx, to: str = "me") -> tuple[str | None, str, str]:
        return ctx.batch, ctx.queue, to

    with app.batch("import", on_complete=tell.using(queue="hooks", max_attempts=9)) as batch:
        pass
    [job] = app.list(queue="hooks")
    assert (job.task, job.priority, job.max_attempts, job.batch_id) == ("tell", 7, 9, None)
    drain(app, queues=["hooks"])
    assert found(app, job.id).result == [batch.id, "hooks", "me"]


def test_b03_a_job_knows_its_batch_and_jobs_of_callbacks_have_none(app: Duly) -> None:
    seen: dict[str, str | None] = {}

    @app.task
    def note(ctx: SyncCtx, name: str) -> None:
        seen[name] = ctx.batch

    @app.task
    def then(ctx: SyncCtx) -> None:
        seen["callback"] = ctx.batch
        note.enqueue("child")

    with app.batch("import", on_complete=then) as batch:
        note.enqueue("inside")
    note.enqueue("outside")
    drain(app)
    assert seen == {"inside": batch.id, "outside": None, "callback": batch.id, "child": None}


# Adding and cancelling


def test_b04_another_process_adds_by_the_id_until_the_batch_is_sealed(
    app: Duly, apps: Callable[..., Duly], ran: list[int], told: Told
) -> None:
    with app.batch("import", on_complete="complete") as batch:
        app.tasks["work"].enqueue(1)
        theirs = apps()
        theirs.task(name="work")(app.tasks["work"].definition.handler)
        known = theirs.batches.get(batch.id)
        theirs.tasks["work"].using(batch=known).enqueue(2)
        assert known.fill(calls(theirs, 3, 4)) == 2
        drain(app)
    assert (known.id, known.name, known.key) == (batch.id, "import", None)
    drain(app)
    assert sorted(ran) == [1, 2, 3, 4]
    assert told == [("complete", batch.id)]
    with pytest.raises(BatchSealed):
        theirs.tasks["work"].using(batch=known).enqueue(5)
    assert known.progress() == batch.progress()


def test_b04_to_a_batch_with_a_key_others_add_beside_its_order(app: Duly, ran: list[int]) -> None:
    for crash in (True, False):
        with suppress(Crash), app.batch("import", key="k") as batch:
            app.tasks["work"].enqueue(0)
            if crash:
                app.tasks["work"].using(batch=app.batches.get(batch.id)).enqueue(100)
                raise Crash
            app.tasks["work"].enqueue(1)
    drain(app)
    assert sorted(ran) == [0, 1, 100]
    assert ends(app, batch) == (0, 3, 0, 0, 0)


def test_b04_cancelling_seals_ends_waiting_jobs_and_requests_running_ones(
    app: Duly, ran: list[int], told: Told
) -> None:
    with suppress(Crash), app.batch("import", on_complete="complete", on_success="success") as batch:
        batch.fill(calls(app, *range(5)))
        app.tasks["work"].using(delay="1h").enqueue(5)
        raise Crash
    running = take(app)
    assert batch.cancel(by="ann", why="enough") == 6
    assert batch.progress().sealed_at is not None
    assert ends(app, batch) == (1, 0, 0, 0, 5)
    assert found(app, running.id).cancel_requested_at is not None
    [event, *_] = [one for one in app.driver.run(ops.events(limit=100)) if one.name == "job.cancelled"]
    assert (event.by, event.why) == ("ann", "enough")
    assert batch.cancel() == 0
    with pytest.raises(BatchSealed):
        app.tasks["work"].using(batch=batch).enqueue(6)
    app.driver.run(ops.release([running]))
    drain(app)
    assert batch.progress().complete
    assert told == [("complete", batch.id)]


def test_b03_a_batch_cancelled_before_completion_is_no_success(app: Duly, ran: list[int], told: Told) -> None:
    """Its filling broke off, and all that came in has succeeded."""
    with suppress(Crash), app.batch("half", key="k", **CALLBACKS) as batch:
        app.tasks["work"].enqueue(1)
        raise Crash
    drain(app)
    assert batch.cancel(by="ann", why="half of it") == 0
    drain(app)
    assert told == [("complete", batch.id)]
    end = batch.progress()
    assert (end.complete, end.success, end.cancelled_by, end.cancelled_why) == (True, False, "ann", "half of it")
    with app.batch("whole", **CALLBACKS) as whole:
        app.tasks["work"].enqueue(2)
    drain(app)
    assert whole.progress().success
    assert whole.cancel() == 0  # it is complete, and stays what it is
    assert whole.progress().success


def test_b02_no_id_is_that_of_no_batch(app: Duly) -> None:
    with app.batch("innocent") as batch:
        pass
    for wrong in (None, "", 5, "innocent"):
        with pytest.raises(BatchNotFound):
            app.batches.get(wrong)  # type: ignore[arg-type]
    assert app.batches.get(batch.id).name == "innocent"


@pytest.mark.parametrize("using", [{"delay": "1h"}, {"key": "k"}, {"expires": "1h"}, {"subject": "s"}])
def test_b03_a_callback_with_impossible_options_is_refused(app: Duly, told: Told, using: dict[str, Any]) -> None:
    callback = app.tasks["complete"]
    with pytest.raises(ConfigError, match=rf"on_complete= complete has using\({next(iter(using))}=…\)"):
        app.batch("b", on_complete=callback.using(**using))
    app.batch("b", on_complete=callback.using(priority=7, queue="mail"))


def test_b03_a_task_of_another_app_is_no_callback(app: Duly, apps: Callable[..., Duly]) -> None:
    @apps().task
    def foreign() -> None: ...

    with pytest.raises(ConfigError, match="on_complete= foreign is a task of another app"):
        app.batch("b", on_complete=foreign)


def test_b04_more_than_a_thousand_are_cancelled(app: Duly, ran: list[int]) -> None:
    with app.batch("import") as batch:
        batch.fill(calls(app, *range(1500)))
    assert batch.cancel() == 1500
    assert ends(app, batch) == (0, 0, 0, 0, 1500)
    assert app.list(batch_id=batch.id, limit=1)[0].reason == "batch 'import' was cancelled"


# Upkeep


def test_b05_old_batches_are_worked_on_and_cleaned_up_although_no_new_one_is_started(
    app: Duly, ran: list[int], outside: Outside
) -> None:
    with app.batch("old") as batch:
        app.tasks["work"].using(max_attempts=2).enqueue(1)
        app.tasks["work"].enqueue(2)
    lost = take(app)
    steal(app, lost.id)
    work_until(app, lambda: batch.progress().complete)
    assert sorted(ran) == [1, 2]
    outside.query("update duly_done set prune_at = 1, finished_at = 1")
    outside.query("update duly_batch set completed_at = 1")
    for what in ("done", "batches"):
        app.driver.run(ops.prune(what))
    assert app.batches.list() == []


# Transactions of the caller


@pytest.fixture
def shared(where: tuple[str, str], app: Duly) -> Iterator[Any]:
    app.driver.run(ops.clock())
    kind, url = where
    conn: Any = psycopg.connect(url) if kind == "postgres" else sqlite3.connect(url, timeout=5)
    yield conn
    conn.close()


@HOLDABLE
@pytest.mark.parametrize("key", [None, "k"])
def test_b01_a_batch_on_the_callers_connection_commits_or_rolls_back_as_one(
    app: Duly, ran: list[int], told: Told, shared: Any, outside: Outside, key: str | None
) -> None:
    before = outside.snapshot()
    for commit in (False, True):
        with app.batch("import", key=key, on_complete="complete", conn=shared) as batch:
            job = app.tasks["work"].enqueue(1)
            assert batch.fill(calls(app, 2, 3)) == 2
            assert not told
        assert outside.snapshot() == before
        with pytest.raises(BatchNotFound, match="it was opened on your own connection; commit first"):
            batch.progress()
        shared.commit() if commit else shared.rollback()
        if not commit:
            assert outside.snapshot() == before
    assert batch.progress().total == 3
    drain(app)
    assert (sorted(ran), found(app, job.id).state) == ([1, 2, 3], State.SUCCEEDED)
    assert told == [("complete", batch.id)]


@HOLDABLE
def test_b01_an_empty_batch_on_the_callers_connection_calls_back_after_the_commit(
    app: Duly, told: Told, shared: Any, outside: Outside
) -> None:
    with app.batch("nothing", on_complete="complete", conn=shared) as batch:
        pass
    assert outside.query("select id from duly_job") == []
    shared.commit()
    drain(app)
    assert told == [("complete", batch.id)]


@HOLDABLE
def test_b01_a_connection_that_is_not_the_batchs_is_refused(app: Duly, ran: list[int], shared: Any) -> None:
    with app.batch("import") as batch, pytest.raises(ConfigError, match=r"Write app\.batch\(…, conn=…\)"):
        app.tasks["work"].using(conn=shared).enqueue(1)
    assert batch.progress().total == 0


# From coroutines


def test_b01_everything_has_its_async_twin(app: Duly, ran: list[int], told: Told) -> None:
    async def later() -> AsyncIterator[Any]:
        for call in calls(app, *range(100, 110)):
            yield call

    async def main() -> None:
        async with app.batch("import", key="k", **CALLBACKS) as batch:
            handle = await app.tasks["work"].aenqueue(1)
            assert len(await app.tasks["work"].aenqueue_many(calls(app, 2, 3))) == 2
            assert await batch.afill(calls(app, 4)) == 1
            assert await batch.afill(later()) == 10
            assert await batch.afill([]) == 0
        assert (await batch.aprogress()).pending == 14
        await adrain(app)
        assert await handle.aresult(0) == 1
        assert (await batch.await_(5)).succeeded == 14
        assert (await app.batches.aget(batch.id)).id == batch.id
        assert [one.id for one in await app.batches.alist(key="k")] == [batch.id]
        with pytest.raises(BatchNotFound):
            await app.batches.aget("nobody")
        with suppress(Crash):
            async with app.batch("other") as other:
                await app.tasks["work"].aenqueue(5)
                raise Crash
        assert (await other.aprogress()).sealed_at is None
        with pytest.raises(TimeoutError, match=r"is not complete after 0\.01 s"):
            await other.await_(0.01)
        assert await other.acancel(why="so") == 1
        async with app.batch("third") as third:
            pass
        await third.aseal()
        assert (await third.aprogress()).complete

    asyncio.run(main())
    assert sorted(ran) == [1, 2, 3, 4, *range(100, 110)]
    assert Counter(name for name, _ in told) == {"complete": 1, "success": 1}


# Waiting


def test_b02_waiting_ends_when_the_batch_is_complete(app: Duly, ran: list[int]) -> None:
    with app.batch("import") as batch:
        batch.fill(calls(app, 1, 2))
        with pytest.raises(ConfigError, match="is being filled, and cannot be complete inside its `with`"):
            batch.wait(1)
    with pytest.raises(TimeoutError, match=r"is not complete after 0\.01 s"):
        batch.wait(0.01)

    async def main() -> None:
        working = asyncio.create_task(app.arun(drain=True, signals=False))
        assert (await batch.await_(10)).succeeded == 2
        await working

    asyncio.run(main())
    assert batch.wait().complete


def test_b02_waiting_in_a_handler_is_refused(app: Duly) -> None:
    with app.batch("import") as batch:
        pass

    @app.task(max_attempts=1)
    def waits() -> None:
        batch.wait()

    job = waits.enqueue()
    drain(app)
    assert "cannot wait for a batch inside a handler" in (found(app, job.id).error or "")


# Wrong use


def needs(x: int) -> None: ...


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": ""}, "a batch's name="),
        ({"name": 5}, "a batch's name="),
        ({"name": "a\x00"}, "a batch's name="),
        ({"key": ""}, "key="),
        ({"key": 5}, "key="),
        ({"key": "k" * 2000}, "key="),
        ({"ok_at": 0}, "ok_at= is 0: give a share above 0 and up to 1"),
        ({"ok_at": 1.5}, "ok_at= is 1.5"),
        ({"ok_at": -1}, "ok_at= is -1"),
        ({"ok_at": True}, "ok_at= is True"),
        ({"ok_at": "half"}, "ok_at= is 'half'"),
        ({"ok_at": float("nan")}, "ok_at= is nan"),
        ({"on_complete": "nobody"}, "on_complete='nobody' names no task of this app"),
        ({"on_success": needs}, "on_success= is of type function: give a task"),
        ({"on_first_dead": "needs"}, r"on_first_dead= is called without arguments \(ctx.batch names the batch\).*'x'"),
    ],
)
def test_b01_wrong_options_of_a_batch_are_refused_before_a_write(
    app: Duly, outside: Outside, options: dict[str, Any], said: str
) -> None:
    app.task(needs)
    given = {"name": "import", **options}
    with pytest.raises(ConfigError, match=said):
        app.batch(given.pop("name"), **given)
    assert outside.query("select id from duly_batch") == []


def test_b01_a_batch_is_entered_once_and_not_inside_another(app: Duly, ran: list[int]) -> None:
    with app.batch("outer") as batch:
        with pytest.raises(ConfigError, match=r"batch 'inner' is entered inside <batch .* 'outer'>"):
            app.batch("inner").__enter__()
        app.tasks["work"].enqueue(1)
    with pytest.raises(ConfigError, match="was entered before: make another one"):
        batch.__enter__()
    assert (batch.progress().total, len(app.batches.list())) == (1, 1)


def test_b01_a_batch_that_was_not_entered_does_not_exist(app: Duly, ran: list[int]) -> None:
    batch = app.batch("import", key="k")
    assert (batch.name, batch.key, repr(batch)) == ("import", "k", "<batch 'import', not entered>")
    for use in (
        batch.progress,
        batch.seal,
        batch.cancel,
        lambda: batch.id,
        lambda: batch.fill(calls(app, 1)),
        lambda: app.tasks["work"].using(batch=batch).enqueue(1),
    ):
        with pytest.raises(ConfigError, match="does not exist yet: enter it"):
            use()
    assert app.batches.list() == []


@pytest.mark.parametrize("what", ["import", 5, object()])
def test_b01_using_takes_a_batch_and_nothing_else(app: Duly, ran: list[int], what: Any) -> None:
    with pytest.raises(ConfigError, match=r"work: batch= is of type (str|int|object): give the batch of `with"):
        app.tasks["work"].using(batch=what)


def test_b01_a_task_of_another_app_is_not_of_the_batch(app: Duly, apps: Callable[..., Duly], ran: list[int]) -> None:
    other = apps()

    @other.task
    def theirs(n: int) -> None: ...

    with app.batch("import") as batch:
        for add in (lambda: theirs.using(batch=batch).enqueue(1), lambda: batch.fill([theirs.call(1)])):
            with pytest.raises(ConfigError, match="theirs is a task of another app"):
                add()
        with pytest.raises(ConfigError, match=r"fill got 5, which is no call: write batch\.fill\(task\.call"):
            batch.fill([5])  # type: ignore[list-item]
        theirs.enqueue(2)
    assert batch.progress().total == 0


# duly.testing


def test_b03_inline_runs_the_jobs_of_a_batch_at_once(app: Duly, ran: list[int], told: Told) -> None:
    with inline(app):
        with app.batch("import", key="k", **CALLBACKS) as batch:
            app.tasks["work"].enqueue(1)
            assert ran == [1]
            assert batch.fill(calls(app, 2)) == 1
        assert batch.progress().sealed_at is not None
    drain(app)
    assert (ran, ends(app, batch)) == ([1, 2], (0, 2, 0, 0, 0))
    assert told == [("complete", batch.id), ("success", batch.id)]
