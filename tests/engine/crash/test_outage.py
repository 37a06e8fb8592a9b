"""PostgreSQL restarted, away, or waiting for a standby. Lines J10, J12, J18, J27 and S10."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from duly.store.postgres.schema import bring_up_to_date
from duly.worker import liveness
from tests.engine.crash.workers import Scene, scene_on, stop, times
from tests.servers.pair import ask
from tests.servers.postgres import Mode, PostgresServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.xdist_group("server-restarts")]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server of our own: nobody else's is restarted."""
    with PostgresServer() as made:
        yield made


@pytest.fixture
def scene(server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("DULY_RUN_DIR", str(tmp_path / "run"))
    url = server.new_database()
    bring_up_to_date(url)
    with scene_on("postgres", url, tmp_path) as made:
        yield made


def nobody_was_blamed(scene: Scene) -> bool:
    return (
        scene.count("duly_attempt") == 0
        and scene.count("duly_job", "suspect or crashes > 0") == 0
        and scene.count("duly_done", "crashes > 0 or attempt <> 1") == 0
        and scene.told("job.rescued") == []
    )


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_j10_workers_continue_after_a_restart_and_run_nothing_twice(
    mode: Mode, server: PostgresServer, scene: Scene
) -> None:
    for _ in range(2):
        scene.start(concurrency=10)
    long = scene.enqueue("nap", 4, payload={"seconds": 3.0})
    short = scene.enqueue("quick", 3000)
    scene.wait(lambda: len(scene.ledger()) > 500, "the load")
    for _ in range(2):
        server.halt(mode)
        server.start()
        back_at = time.monotonic()
        scene.store._outside = None  # type: ignore[attr-defined]
        fresh = scene.enqueue("quick", 10, priority=1)
        gone_on_at = scene.wait(lambda: len(scene.ledger(*fresh)) == 10, "the workers to go on", 15)  # noqa: B023
        scene.enqueue("quick", 1000)
        print(f"\nJ27 {mode}: gone on {gone_on_at - back_at:.2f} s after the server was back")
        assert gone_on_at - back_at < 5.0
    scene.wait_ended()
    assert scene.count("duly_done", "state = 'succeeded'") == scene.count("duly_done")
    assert set(times(scene.ledger()).values()) == {1}, "something ran twice"
    assert set(times(scene.ledger())) >= {*long, *short}
    assert nobody_was_blamed(scene)


def test_j10_long_jobs_live_through_an_outage_longer_than_their_lease(server: PostgresServer, scene: Scene) -> None:
    workers = [scene.start(concurrency=10) for _ in range(2)]
    # Some end while the database is away, some after it.
    jobs = [
        *scene.enqueue("nap", 3, payload={"seconds": 1.0}),
        *scene.enqueue("doze", 3, payload={"seconds": 1.0}),
        *scene.enqueue("nap", 3, payload={"seconds": 3.5}),
        *scene.enqueue("doze", 3, payload={"seconds": 3.5}),
    ]
    scene.wait(lambda: len(scene.ledger()) == 12, "all to begin")
    server.halt("fast")
    time.sleep(2.5 * scene.lease_ms / 1000)
    server.start()
    scene.store._outside = None  # type: ignore[attr-defined]
    scene.wait_ended()
    for job in jobs:
        assert scene.what(job) == [(1, "begin"), (1, "end")]
        assert scene.row(job) == ("succeeded", 1, 0)
    assert nobody_was_blamed(scene)
    assert [worker.poll() for worker in workers] == [None, None]


def test_j27_a_worker_that_is_started_while_the_database_is_away_waits_for_it(
    server: PostgresServer, scene: Scene
) -> None:
    [job] = scene.enqueue("quick")
    server.halt("fast")
    worker = scene.start(wait=False)
    time.sleep(0.7)
    assert worker.poll() is None
    server.start()
    back_at = time.monotonic()
    scene.store._outside = None  # type: ignore[attr-defined]
    assert scene.wait_for(job, "end").at - back_at < 5.0


def test_j18_a_worker_ends_in_time_while_the_database_is_away(server: PostgresServer, scene: Scene) -> None:
    worker = scene.start(concurrency=4, grace="500ms")
    [job] = scene.enqueue("nap", payload={"seconds": 20.0})
    scene.wait_for(job, "begin")
    server.halt("fast")
    try:
        time.sleep(0.5)
        began = time.monotonic()
        worker.terminate()
        worker.wait(15)
        took = time.monotonic() - began
    finally:
        server.start()
        scene.store._outside = None  # type: ignore[attr-defined]
    print(f"\nJ18 without a database: exit after {took:.2f} s (grace 0.5 s)")
    assert took < 1.5 + 5.0
    scene.wait(lambda: scene.row(job)[0] == "running", "the row")


@contextmanager
def standby_away(server: PostgresServer) -> Iterator[None]:
    """Have every commit wait for a standby that is not there."""
    _wait_for(server, "b")
    try:
        yield
    finally:
        _wait_for(server, "")


def _wait_for(server: PostgresServer, standby: str) -> None:
    ask(server.url, f"alter system set synchronous_standby_names = '{standby}'")
    ask(server.url, "select pg_reload_conf()")


def hanging(scene: Scene) -> int:
    """Count the commits that wait for the standby."""
    waits = "from pg_stat_activity where wait_event = 'SyncRep' and datname = current_database()"
    [[number]] = scene.store.query(f"select count(*) {waits}")
    return int(number)


def test_j27_a_worker_whose_writes_hang_tells_so_and_shows_that_it_lives_also_one_that_starts_meanwhile(
    server: PostgresServer, scene: Scene
) -> None:
    logged = "import logging; logging.basicConfig(level=logging.INFO); from scene_tasks import app"
    workers = [scene.start(script=logged)]
    with standby_away(server):
        scene.wait(lambda: hanging(scene) > 0, "the heartbeat to wait")
        workers.append(scene.start(wait=False))
        pids = {worker.pid for worker in workers}
        scene.wait(lambda: {one.pid for one in scene.told("worker.waiting_for_database")} == pids, "both to tell of it")
        assert {sign.pid for sign in liveness.signs() if sign.alive(2.5)} == pids
        told = len(scene.told())
        time.sleep(1.5)
    assert len(scene.told()) == told, "once is enough"
    scene.wait(lambda: len(scene.told("worker.started")) == 2, "the second worker to start")
    scene.wait(lambda: "worker.reconnected" in scene.said(), "the first to go on")
    assert "loop_blocked" not in scene.said()


def test_j18_a_worker_that_waits_to_be_registered_ends_at_once(server: PostgresServer, scene: Scene) -> None:
    with standby_away(server):
        worker = scene.start(wait=False)
        scene.wait(lambda: hanging(scene) > 0, "the worker to wait")
        assert stop(worker) < 5.0
        assert worker.returncode == 0


@pytest.mark.parametrize("how", ["bounds", "signal", "in code"])
def test_s10_a_tick_ends_in_time_while_its_writes_hang(server: PostgresServer, scene: Scene, how: str) -> None:
    seconds = 60 if how == "signal" else 0.3
    command = [sys.executable, "-m", "duly", "tick", "scene_tasks:app", "--max-seconds", str(seconds), "--grace", "1s"]
    if how == "in code":
        command = [sys.executable, "-c", f"from scene_tasks import app; app.tick(max_seconds={seconds})"]
    with standby_away(server):
        tick = scene.popen(command, stderr=subprocess.PIPE)
        scene.wait(lambda: hanging(scene) > 0, "the tick to wait")
        if how == "signal":
            tick.terminate()
        said = tick.communicate(timeout=10)[1].decode().splitlines()
        assert tick.returncode == 1
        assert "the database did not answer the tick in time: jobs in flight stay running until their" in said[-1]
        assert len(said) == 1 or how == "in code"
        assert hanging(scene) > 0, "it ended too late to show anything"
