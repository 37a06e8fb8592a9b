"""Many jobs in one call: a thousand in one commit, the next thousand made meanwhile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from duly import Duly, SyncCtx
from duly.context import Asked, current
from duly.errors import StoreUnavailable
from duly.store.ops import Op
from duly.tasks import CHUNK, Call, Task


def numbered(app: Duly) -> Task[..., Any, Any]:
    @app.task
    async def work(n: int) -> None: ...

    return work


def test_the_next_thousand_is_made_while_one_is_on_its_way(app: Duly) -> None:
    work, run, made = numbered(app), app.driver.run, threading.Event()

    def once_more_is_made(op: Op[Any]) -> Any:
        if op.name == "enqueue":
            assert made.wait(20)
        return run(op)

    def calls() -> Iterator[Call[Any]]:
        for number in range(CHUNK + 5):
            if number == CHUNK:
                made.set()
            yield work.call(number)

    app.driver.run = once_more_is_made  # type: ignore[method-assign]
    jobs = work.enqueue_many(calls())
    app.driver.run = run  # type: ignore[method-assign]
    assert len({job.id for job in jobs}) == CHUNK + 5
    assert [job.id for job in jobs] == sorted(job.id for job in jobs)
    assert len(app.list(limit=2 * CHUNK)) == CHUNK + 5


def test_threads_switch_often_while_the_next_thousand_is_made_and_as_before_afterwards(app: Duly) -> None:
    work, before = numbered(app), sys.getswitchinterval()
    seen = []

    def calls() -> Iterator[Call[Any]]:
        for number in range(CHUNK + 1):
            seen.append(sys.getswitchinterval())
            yield work.call(number)

    work.enqueue_many(calls())
    assert set(seen[:CHUNK]) == {before}
    assert seen[CHUNK] < 0.002
    assert sys.getswitchinterval() == before


def test_what_was_full_when_a_call_fails_is_enqueued_and_nothing_else(app: Duly) -> None:
    work = numbered(app)

    def calls() -> Iterator[Call[Any]]:
        yield from (work.call(number) for number in range(2 * CHUNK + 3))
        raise LookupError

    with pytest.raises(LookupError):
        work.enqueue_many(calls())
    assert len(app.list(limit=3 * CHUNK)) == 2 * CHUNK


def test_a_thousand_that_cannot_be_written_is_told_and_none_is_sent_after_it(app: Duly) -> None:
    work, run, sent = numbered(app), app.driver.run, []

    def broken(op: Op[Any]) -> Any:
        if not op.writes:  # how full the queue may be
            return run(op)
        sent.append(op.name)
        raise StoreUnavailable("gone")

    app.driver.run = broken  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        work.enqueue_many(work.call(number) for number in range(3 * CHUNK))
    app.driver.run = run  # type: ignore[method-assign]
    assert sent == ["enqueue"]
    assert app.list() == []


@pytest.mark.parametrize("way", ["enqueue_many", "fill"])
def test_a_handler_that_enqueues_many_hears_at_the_next_call_that_it_is_asked_to_stop(app: Duly, way: str) -> None:
    work, made = numbered(app), 0

    def calls(lease: Any) -> Iterator[Call[Any]]:
        nonlocal made
        for number in range(CHUNK):
            if number == 3:
                lease.asked = Asked.CANCEL
            made += 1
            yield work.call(number)

    @app.task
    def parent(ctx: SyncCtx) -> None:
        lease = current.get()
        if way == "fill":
            with app.batch("b") as batch:
                batch.fill(calls(lease))
        work.enqueue_many(calls(lease))

    parent.enqueue()
    app.run(drain=True, signals=False)
    assert made == 4
    assert [job.task for job in app.list(limit=10)] == ["parent"]
