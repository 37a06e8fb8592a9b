"""Many jobs in one call: a thousand in one commit, the next thousand made meanwhile."""

from __future__ import annotations

import asyncio
import copy
import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from duly import Duly, SyncCtx
from duly.app.enqueue import CHUNK
from duly.app.lease import Asked, current
from duly.app.task import Call, Task
from duly.errors import StoreUnavailable
from duly.store.op import Op


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
            if number == CHUNK + 1:  # that there is another was looked at before the thousand went
                made.set()
            yield work.call(number)

    app.driver.run = once_more_is_made  # type: ignore[method-assign]
    jobs = work.enqueue_many(calls())
    app.driver.run = run  # type: ignore[method-assign]
    assert len({job.id for job in jobs}) == CHUNK + 5
    assert [job.id for job in jobs] == sorted(job.id for job in jobs)
    assert len(app.list(limit=2 * CHUNK)) == CHUNK + 5


def test_the_next_thousand_is_made_by_a_coroutine_while_one_is_on_its_way(app: Duly) -> None:
    async def main() -> None:
        work, arun, made = numbered(app), app.driver.arun, asyncio.Event()
        seen, written, before = [], [], sys.getswitchinterval()

        async def once_more_is_made(op: Op[Any]) -> Any:
            if op.name == "enqueue":
                await asyncio.wait_for(made.wait(), 20)
                written.append(sys.getswitchinterval())
            return await arun(op)

        def calls() -> Iterator[Call[Any]]:
            for number in range(CHUNK + 5):
                seen.append(sys.getswitchinterval())
                if number == CHUNK + 1:
                    made.set()
                yield work.call(number)

        app.driver.arun = once_more_is_made  # type: ignore[method-assign]
        jobs = await work.aenqueue_many(calls())
        app.driver.arun = arun  # type: ignore[method-assign]
        assert [job.id for job in jobs] == sorted({job.id for job in jobs})
        assert len(jobs) == len(await app.alist(limit=2 * CHUNK)) == CHUNK + 5
        assert set(seen[: CHUNK + 1]) == {before}
        assert seen[CHUNK + 1] < 0.002
        assert written[1:] == [before]  # nothing is on its way beside the last
        assert sys.getswitchinterval() == before

    asyncio.run(main())


@pytest.mark.parametrize("beyond", [0, 3])
def test_full_chunks_before_a_failing_call_of_a_coroutine_are_enqueued(app: Duly, beyond: int) -> None:
    async def main() -> None:
        work, before = numbered(app), sys.getswitchinterval()

        def calls() -> Iterator[Call[Any]]:
            yield from (work.call(number) for number in range(2 * CHUNK + beyond))
            raise LookupError

        with pytest.raises(LookupError):
            await work.aenqueue_many(calls())
        assert len(await app.alist(limit=3 * CHUNK)) == 2 * CHUNK
        assert sys.getswitchinterval() == before

    asyncio.run(main())


def test_a_coroutine_whose_chunk_fails_raises_and_sends_no_further_chunk(app: Duly) -> None:
    async def main() -> None:
        work, arun, sent = numbered(app), app.driver.arun, []

        async def broken(op: Op[Any]) -> Any:
            if not op.writes:  # how full the queue may be
                return await arun(op)
            sent.append(op.name)
            raise StoreUnavailable("gone")

        app.driver.arun = broken  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable):
            await work.aenqueue_many(work.call(number) for number in range(3 * CHUNK))
        app.driver.arun = arun  # type: ignore[method-assign]
        assert sent == ["enqueue"]
        assert await app.alist() == []

    asyncio.run(main())


@pytest.mark.parametrize("when", ["as it sends", "as it waits"])
def test_a_coroutine_that_is_cancelled_leaves_no_thousand_on_its_way(app: Duly, when: str) -> None:
    async def main() -> None:
        work, arun, begun, ended = numbered(app), app.driver.arun, asyncio.Event(), asyncio.Event()

        async def endless(op: Op[Any]) -> Any:
            if not op.writes:
                return await arun(op)
            if when == "as it sends":
                asked.cancel()
            begun.set()
            try:
                return await asyncio.Event().wait()
            finally:
                ended.set()

        app.driver.arun = endless  # type: ignore[method-assign]
        asked = asyncio.create_task(work.aenqueue_many(work.call(number) for number in range(CHUNK + 5)))
        await begun.wait()
        if when == "as it waits":
            asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asked, 10)
        app.driver.arun = arun  # type: ignore[method-assign]
        assert ended.is_set()

    before = sys.getswitchinterval()
    asyncio.run(main())
    assert sys.getswitchinterval() == before


def test_threads_switch_often_while_the_next_thousand_is_made_and_as_before_afterwards(app: Duly) -> None:
    work, before = numbered(app), sys.getswitchinterval()
    seen = []

    def calls() -> Iterator[Call[Any]]:
        for number in range(CHUNK + 2):
            seen.append(sys.getswitchinterval())
            yield work.call(number)

    work.enqueue_many(calls())
    assert set(seen[: CHUNK + 1]) == {before}
    assert seen[CHUNK + 1] < 0.002
    assert sys.getswitchinterval() == before


def test_a_last_chunk_is_written_in_the_callers_thread(app: Duly) -> None:
    work, run, threads = numbered(app), app.driver.run, []

    def noted(op: Op[Any]) -> Any:
        if op.name == "enqueue":
            threads.append(threading.current_thread())
        return run(op)

    app.driver.run = noted  # type: ignore[method-assign]
    work.enqueue_many(work.call(number) for number in range(CHUNK))
    work.enqueue_many(work.call(number) for number in range(2 * CHUNK))
    app.driver.run = run  # type: ignore[method-assign]
    assert [thread is threading.current_thread() for thread in threads] == [True, False, True]


def test_a_chunk_is_sent_once_for_any_error_while_it_is_sent(app: Duly) -> None:
    work = numbered(app)
    chunks: Any = work._chunks(work.call(number) for number in range(CHUNK + 1))
    assert len(next(chunks).jobs) == CHUNK
    with pytest.raises(TimeoutError):
        chunks.throw(TimeoutError())  # of a signal, say


def test_a_failing_key_function_is_called_once_and_nothing_is_enqueued(app: Duly) -> None:
    asked: list[int] = []

    def fails_once(n: int) -> str:
        asked.append(n)
        if asked == list(range(501)):
            raise LookupError
        return str(n)

    @app.task(key=fails_once)
    def work(n: int) -> None: ...

    with pytest.raises(LookupError):
        work.enqueue_many(work.call(n) for n in range(CHUNK + 1))
    assert len(asked) == 501
    assert app.list() == []


def test_debounced_calls_are_sent_at_once(app: Duly) -> None:
    work, there = numbered(app), []

    def calls() -> Iterator[Call[Any]]:
        for number in range(3):
            yield work.call(number)
            there.append(app.list(limit=1)[0].payload)

    work.using(debounce="1h", key="k").enqueue_many(calls())
    assert there == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_a_call_and_a_handle_in_a_cycle_can_be_garbage_collected(tmp_path: Path) -> None:
    def made() -> list[weakref.ref[Any]]:
        app = Duly(tmp_path / "jobs.db")

        @app.task
        def work(n: int) -> Any:
            return job, calls

        job, calls = work.enqueue(1), [work.call(1)]
        app.close()
        return [weakref.ref(app), weakref.ref(work)]

    seen = made()
    gc.collect()
    assert [each() for each in seen] == [None, None]


def test_a_call_can_be_copied(app: Duly) -> None:
    work = numbered(app)
    for call in (work.call(1), work.call(n=1)):
        twin = copy.deepcopy(call)
        assert (twin.payload, twin.args, twin.kwargs) == (call.payload, call.args, call.kwargs)


@pytest.mark.parametrize("beyond", [0, 3])
def test_full_chunks_before_a_failing_call_are_enqueued(app: Duly, beyond: int) -> None:
    work = numbered(app)

    def calls() -> Iterator[Call[Any]]:
        yield from (work.call(number) for number in range(2 * CHUNK + beyond))
        raise LookupError

    with pytest.raises(LookupError):
        work.enqueue_many(calls())
    assert len(app.list(limit=3 * CHUNK)) == 2 * CHUNK


def test_a_chunk_that_fails_raises_and_no_further_chunk_is_sent(app: Duly) -> None:
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
def test_a_handler_that_enqueues_many_stops_at_the_next_call_after_a_request(app: Duly, way: str) -> None:
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
