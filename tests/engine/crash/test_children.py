"""Handlers with `isolation="process"`: what they can do, and how they end. Lines J12, J16 and J17."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from duly.model import JobRecord
from duly.store import ops
from tests.databases import fresh
from tests.engine.crash.workers import TASKS, Scene, alive, kill, scene_on, stop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CHILDREN = (
    TASKS
    + '''
import contextlib
import psycopg

PARENT = os.environ["DULY_URL"]


@app.task
def small(n: int) -> int:
    return n


@app.task(isolation="process")
def burn(ctx: SyncCtx, seconds: float) -> int:
    note(ctx, "begin")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    note(ctx, "end")
    return os.getpid()


@app.task(isolation="process")
def burn_together(ctx: SyncCtx) -> None:
    """Compute until two of them do."""
    note(ctx, "begin")
    note(ctx, "burns")
    while open(os.environ["LEDGER"]).read().count('"burns"') < 2:
        pass
    note(ctx, "end")


@app.task(isolation="process")
async def aburn(ctx: Ctx, n: int) -> dict:
    note(ctx, "begin")
    await ctx.progress(30, "a third")
    child = await small.aenqueue(n)
    await ctx.heartbeat()
    note(ctx, "end")
    return {"pid": os.getpid(), "child": child.id}


@app.task(isolation="process")
def speak(ctx: SyncCtx, n: int) -> dict:
    note(ctx, "begin")
    ctx.progress(60, "more")
    child = small.enqueue(n)
    note(ctx, "end")
    return {"pid": os.getpid(), "child": child.id}


@app.task(isolation="process")
def commits(ctx: SyncCtx, n: int, commit: bool) -> None:
    note(ctx, "begin")
    if PARENT.startswith("postgresql://"):
        with psycopg.connect(PARENT) as conn:
            ctx.commit(conn, result=n)
            if not commit:
                conn.rollback()
    else:
        with contextlib.closing(sqlite3.connect(PARENT, isolation_level=None, timeout=10)) as conn:
            conn.execute("begin immediate")
            ctx.commit(conn, result=n)
            conn.execute("commit" if commit else "rollback")
    note(ctx, "end")


@app.task(isolation="process")
def fails(ctx: SyncCtx) -> None:
    note(ctx, "begin")
    raise ValueError("in a process of its own")


@app.task(isolation="process")
async def afails(ctx: Ctx) -> None:
    note(ctx, "begin")
    await asyncio.sleep(0)
    raise ValueError("in a process of its own")


@app.task(isolation="process", timeout="2s")
def endless(ctx: SyncCtx) -> None:
    note(ctx, "begin")
    while True:
        pass


@app.task(isolation="process", timeout="2s")
async def aendless(ctx: Ctx) -> None:
    note(ctx, "begin")
    time.sleep(30)


@app.task(isolation="process")
async def awaits(ctx: Ctx) -> None:
    note(ctx, "begin")
    try:
        await asyncio.sleep(30)
    except BaseException as error:
        note(ctx, type(error).__name__)
        raise


@app.task(isolation="process")
def asks(ctx: SyncCtx) -> None:
    note(ctx, "begin")
    try:
        for _ in range(600):
            time.sleep(0.05)
            ctx.heartbeat()
    except BaseException as error:
        note(ctx, type(error).__name__)
        raise


@app.task(isolation="process", stall_after="1200ms")
async def beats(ctx: Ctx, stall: bool) -> None:
    note(ctx, "begin")
    for _ in range(25):
        await asyncio.sleep(0.1)
        if not stall:
            await ctx.heartbeat()
    note(ctx, "end")


@app.task(isolation="process")
def crash(ctx: SyncCtx, how: str) -> None:
    note(ctx, "begin")
    die(how)


@app.task(isolation="process")
def leaves_a_fork(ctx: SyncCtx) -> None:
    """Die while a process that it forked holds everything it had open."""
    note(ctx, "begin")
    if os.fork() == 0:
        time.sleep(8)
        os._exit(0)
    os._exit(1)
'''
)


@pytest.fixture(params=["sqlite", "postgres"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    with scene_on(request.param, fresh(request, request.param), tmp_path, tasks=CHILDREN) as made:
        yield made


def record(scene: Scene, job: str) -> JobRecord:
    found: JobRecord | None = scene.store.run(ops.get(job))
    assert found is not None
    return found


def test_j12_handlers_in_processes_of_their_own_run_at_once_and_their_context_works(scene: Scene) -> None:
    worker = scene.start(concurrency=8)
    burning = scene.enqueue("burn_together", 2)
    spoken = [*scene.enqueue("aburn", payload={"n": 1}), *scene.enqueue("speak", payload={"n": 2})]
    done, undone = (scene.enqueue("commits", payload={"n": 7, "commit": said})[0] for said in (True, False))
    beating, stalling = (scene.enqueue("beats", payload={"stall": said})[0] for said in (False, True))
    failing = [*scene.enqueue("fails", max_attempts=1), *scene.enqueue("afails", max_attempts=1)]
    scene.wait(lambda: scene.count("duly_done") >= 11, "those to end, and two children")
    first, second = (scene.ledger(job) for job in burning)
    assert first[0].at < second[-1].at, "they burn at the same time"
    assert second[0].at < first[-1].at, "they burn at the same time"
    assert len({worker.pid, *(line.pid for line in (*first, *second))}) == 3
    for job, progress in zip(spoken, (30, 60), strict=True):
        found = record(scene, job)
        assert found.state == "succeeded"
        assert found.result["pid"] != worker.pid
        assert found.progress == progress
        child = found.result["child"]
        assert scene.row(child)[0] == "succeeded"
        assert scene.store.query("select causation_id from duly_jobs where id = ?", child) == [(job,)]
    assert (record(scene, done).state, record(scene, done).result, scene.what(done)) == (
        "succeeded", 7, [(1, "begin"), (1, "end")],
    )  # fmt: skip
    assert record(scene, undone).state == "scheduled"
    assert "not committed" in (record(scene, undone).error or "")
    assert {told.job for told in scene.told("job.stalled")} == {stalling}
    assert scene.row(beating) == ("succeeded", 1, 0)
    for job in failing:
        assert record(scene, job).state == "dead"
        [(error, traceback)] = scene.store.query("select error, traceback from duly_attempt where job_id = ?", job)
        assert error == "ValueError: in a process of its own"
        assert "scene_tasks.py" in traceback


def test_j16_j17_a_timeout_kills_a_process_and_a_cancel_reaches_it(scene: Scene) -> None:
    scene.start(concurrency=8)
    endless = [*scene.enqueue("endless", max_attempts=1), *scene.enqueue("aendless", max_attempts=1)]
    asked = [*scene.enqueue("awaits"), *scene.enqueue("asks")]
    for job in asked:
        scene.wait_for(job, "begin")
    scene.store.run(ops.cancel(asked, by="me", why="enough"))
    cancelled_at = time.monotonic()
    scene.wait_ended(20)
    for job in endless:
        [begun] = scene.ledger(job)
        assert not alive(begun.pid)
        found = record(scene, job)
        assert found.state == "dead"
        assert "JobTimeout" in (found.error or "")
        assert scene.count("duly_attempt", f"job_id = '{job}' and outcome = 'failed'") == 1
    for job, word in zip(asked, ("CancelledError", "Cancel"), strict=True):
        assert record(scene, job).state == "cancelled"
        begun, told = scene.ledger(job)
        assert told.what == word
        assert told.at - cancelled_at < scene.lease_ms / 3000 + 5.0


def test_j12_a_crash_of_a_process_counts_and_affects_no_other_job(scene: Scene) -> None:
    scene.start(concurrency=10)
    others = [*scene.enqueue("burn", payload={"seconds": 0.5}), *scene.enqueue("nap", payload={"seconds": 2.0})]
    crashing = [scene.enqueue("crash", payload={"how": how})[0] for how in ("exit", "segfault", "kill", "memory")]
    crashing += scene.enqueue("leaves_a_fork")
    scene.wait_ended(80)
    for job in crashing:
        assert record(scene, job).reason == "killed its worker"
        assert scene.row(job) == ("dead", 3, 3)
    for job in others:
        assert scene.row(job) == ("succeeded", 1, 0)
        assert scene.what(job) == [(1, "begin"), (1, "end")]


def test_j12_a_process_ends_with_its_worker_killed_or_stopped(scene: Scene) -> None:
    worker = scene.start(concurrency=2, grace="300ms")
    [job] = scene.enqueue("burn", payload={"seconds": 30.0})
    child = scene.wait_for(job, "begin").pid
    for number in (signal.SIGTERM, signal.SIGINT):  # who stops a service or presses Ctrl-C tells every process
        os.kill(child, number)
    time.sleep(0.3)
    assert alive(child)
    took = stop(worker)
    print(f"\nJ18 {scene.store.kind}: with a process, exit after {took:.2f} s (grace 0.3 s)")
    assert took < 1.3 + 5.0
    assert not alive(child)
    assert scene.row(job) == ("ready", 0, 0)
    worker = scene.start(concurrency=2)
    scene.wait(lambda: len(scene.ledger(job)) == 2, "it to begin again")
    child = scene.ledger(job)[1].pid
    kill(worker)
    scene.wait(lambda: not alive(child), "the process to go", 2)
