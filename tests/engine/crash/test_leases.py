"""Workers that die, hang or are stopped while they hold jobs. Lines J10 and J11."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from tests.engine.crash.workers import Process, Scene, alive, kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SLACK_SECONDS = 1.5  # for a machine that has other things to do


def assert_rescued_in_time(scene: Scene, job: str, since: float, worker: Process) -> None:
    """See that a worker took a job within a beat and a second after its lease had ended, or after its own start."""
    scene.wait(lambda: any(told.job == job for told in scene.told("job.rescued")), "the rescue")
    [rescued] = [told for told in scene.told("job.rescued") if told.job == job]
    print(f"\nJ11 {scene.store.kind}: rescued {rescued.at - since:.2f} s after its lease")
    assert rescued.pid == worker.pid
    assert rescued.at - since < scene.lease_ms / 3000 + 1.0 + SLACK_SECONDS


def test_j11_a_killed_workers_jobs_soon_run_in_a_living_worker(scene: Scene) -> None:
    first = scene.start(concurrency=2)
    jobs = [scene.enqueue(task, payload={"seconds": 20.0})[0] for task in ("nap", "doze")]
    assert {scene.wait_for(job, "begin").pid for job in jobs} == {first.pid}
    second = scene.start(concurrency=2)
    killed_at = kill(first)
    for job in jobs:
        assert_rescued_in_time(scene, job, killed_at + scene.lease_ms / 1000, second)
    scene.wait_ended()
    for job in jobs:
        assert scene.what(job) == [(1, "begin"), (2, "begin"), (2, "end")]
        assert scene.row(job) == ("succeeded", 2, 0)


def test_j11_a_killed_workers_job_soon_runs_in_a_worker_started_later(scene: Scene) -> None:
    first = scene.start(concurrency=2)
    [job] = scene.enqueue("nap", payload={"seconds": 0.5})
    scene.wait_for(job, "begin")
    killed_at = kill(first)
    second = scene.start(concurrency=2)
    [started] = [told for told in scene.told("worker.started") if told.pid == second.pid]
    assert_rescued_in_time(scene, job, max(started.at, killed_at + scene.lease_ms / 1000), second)
    scene.wait_ended()
    assert scene.what(job)[0] == (1, "begin")
    assert scene.row(job) == ("succeeded", 2, 0)


def test_j10_a_job_longer_than_its_lease_runs_once_even_if_the_loop_is_blocked_for_less_than_a_lease(
    scene: Scene,
) -> None:
    terms: dict[str, Any] = {"lease_ms": 2 * scene.lease_ms}  # blocked for less, on a busy machine too
    seconds = 7 * scene.lease_ms / 1000
    long = [scene.enqueue(task, payload={"seconds": seconds}, **terms)[0] for task in ("nap", "doze")]
    first = scene.start(queues=["default", "other"])
    for job in long:
        scene.wait_for(job, "begin")
    scene.start(queues=["default"])
    [blocked] = scene.enqueue("block", payload={"seconds": 1.5 * scene.lease_ms / 1000}, queue="other", **terms)
    scene.wait_ended()
    for job in (*long, blocked):
        assert scene.what(job) == [(1, "begin"), (1, "end")]
        assert {line.pid for line in scene.ledger(job)} == {first.pid}
        assert scene.row(job) == ("succeeded", 1, 0)
    assert scene.told("job.rescued", "job.lease_lost") == []


def test_j10_a_worker_whose_loop_is_blocked_for_longer_loses_its_job_and_changes_nothing(scene: Scene) -> None:
    first = scene.start()
    [job] = scene.enqueue("block_until_taken")
    scene.wait_for(job, "begin")
    second = scene.start()
    scene.wait_ended()
    assert scene.row(job) == ("succeeded", 2, 0)
    scene.wait(
        lambda: any(line.attempt == 1 and line.what != "begin" for line in scene.ledger(job)), "the first to end"
    )
    assert [line.what for line in scene.ledger(job) if line.attempt == 2] == ["begin", "end"]
    assert {line.pid for line in scene.ledger(job) if line.attempt == 1} == {first.pid}
    [_, told] = [line.what for line in scene.ledger(job) if line.attempt == 1]
    assert told in ("LeaseLost", "CancelledError")
    assert any(told.pid == second.pid for told in scene.told("job.rescued"))
    time.sleep(0.5)
    assert scene.row(job) == ("succeeded", 2, 0)
    assert alive(first.pid)
    [after] = scene.enqueue("quick", queue="default")
    scene.wait_for(after, "end")


def test_j10_a_worker_stopped_for_three_leases_changes_nothing_and_its_handlers_get_lease_lost(scene: Scene) -> None:
    first = scene.start(concurrency=4)
    jobs = [
        *scene.enqueue("talk", payload={"seconds": 2.5}),
        *scene.enqueue("block", payload={"seconds": 0.0}),
    ]
    for job in jobs:
        scene.wait_for(job, "begin")
    scene.stop(first)
    scene.start(concurrency=4)
    time.sleep(3 * scene.lease_ms / 1000)
    first.send_signal(signal.SIGCONT)
    scene.wait_ended()
    for job in jobs:
        scene.wait(
            lambda: any(line.attempt == 1 and line.what != "begin" for line in scene.ledger(job)),  # noqa: B023
            "the first handler to be told",
        )
        first_lines = [line.what for line in scene.ledger(job) if line.attempt == 1]
        assert first_lines in (["begin", "LeaseLost"], ["begin", "CancelledError"])
        assert [line.what for line in scene.ledger(job) if line.attempt == 2] == ["begin", "end"]
        assert all(line.pid == first.pid for line in scene.ledger(job) if line.attempt == 1)
        assert scene.row(job) == ("succeeded", 2, 0)
    time.sleep(0.5)
    assert [scene.row(job) for job in jobs] == [("succeeded", 2, 0)] * 2
    assert alive(first.pid)


def test_j25_a_job_that_dies_in_a_rescue_is_logged_as_dead(scene: Scene) -> None:
    first = scene.start()
    [job] = scene.enqueue("nap", payload={"seconds": 20.0}, max_attempts=1)
    scene.wait_for(job, "begin")
    kill(first)
    second = scene.start()
    scene.wait_ended()
    assert scene.row(job)[0] == "dead"
    scene.wait(lambda: scene.told("job.dead"), "its death to be told")
    told = [(one.pid, one.name, one.job) for one in scene.told("job.rescued", "job.dead")]
    assert told == [(second.pid, "job.rescued", job), (second.pid, "job.dead", job)]
