"""Workers that die, hang or are stopped while they hold jobs. Lines J10 and J11."""

from __future__ import annotations

import signal
import time

import pytest

from tests.engine.crash.workers import Scene, alive, kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

SLACK_SECONDS = 1.5  # for a machine that has other things to do
START_SECONDS = 0.5  # which a process takes to start on one that has not


def limit(scene: Scene) -> float:
    """Give the time within which a lost job is running again: lease, one beat, one second."""
    return scene.lease_ms / 1000 * 4 / 3 + 1.0


def test_j11_a_killed_workers_jobs_are_running_again_soon_in_a_worker_that_is_there(scene: Scene) -> None:
    first = scene.start(concurrency=2)
    jobs = [scene.enqueue(task, payload={"seconds": 20.0})[0] for task in ("nap", "doze")]
    assert {scene.wait_for(job, "begin").pid for job in jobs} == {first.pid}
    scene.start(concurrency=2)
    time.sleep(0.5)
    killed_at = kill(first)
    for job in jobs:
        again = scene.wait_for(job, "begin", attempt=2)
        print(f"\nJ11 {scene.store.kind}: again after {again.at - killed_at:.2f} s, limit {limit(scene):.2f} s")
        assert again.at - killed_at < limit(scene) + SLACK_SECONDS
    scene.wait_ended()
    for job in jobs:
        assert scene.what(job) == [(1, "begin"), (2, "begin"), (2, "end")]
        assert scene.row(job) == ("succeeded", 2, 0)


def test_j11_a_killed_workers_job_is_running_again_soon_in_a_worker_that_comes_later(scene: Scene) -> None:
    first = scene.start(concurrency=2)
    [job] = scene.enqueue("nap", payload={"seconds": 0.5})
    scene.wait_for(job, "begin")
    killed_at = kill(first)
    second = scene.start(concurrency=2)
    [started] = [told for told in scene.told("worker.started") if told.pid == second.pid]
    again = scene.wait_for(job, "begin", attempt=2)
    print(
        f"\nJ11 {scene.store.kind} later: again after {again.at - killed_at:.2f} s, worker there after "
        f"{started.at - killed_at:.2f} s, limit {limit(scene):.2f} s"
    )
    # It runs alone, in a process of its own, which takes as long to start as the worker did.
    slow = max(0.0, started.at - killed_at - START_SECONDS)
    assert again.at - killed_at < limit(scene) + SLACK_SECONDS + slow
    scene.wait_ended()
    assert scene.what(job)[0] == (1, "begin")
    assert scene.row(job) == ("succeeded", 2, 0)


def test_j10_a_job_longer_than_its_lease_runs_once_even_if_the_loop_is_blocked_for_less_than_a_lease(
    scene: Scene,
) -> None:
    long = [*scene.enqueue("nap", payload={"seconds": 7.0}), *scene.enqueue("doze", payload={"seconds": 7.0})]
    first = scene.start(queues=["default", "other"])
    for job in long:
        scene.wait_for(job, "begin")
    scene.start(queues=["default"])
    [blocked] = scene.enqueue("block", payload={"seconds": 1.5}, queue="other")
    scene.wait_ended()
    for job in (*long, blocked):
        assert scene.what(job) == [(1, "begin"), (1, "end")]
        assert {line.pid for line in scene.ledger(job)} == {first.pid}
        assert scene.row(job) == ("succeeded", 1, 0)
    assert scene.told("job.rescued", "job.lease_lost") == []


def test_j10_a_worker_whose_loop_is_blocked_for_longer_loses_its_job_and_changes_nothing(scene: Scene) -> None:
    first = scene.start()
    [job] = scene.enqueue("block", payload={"seconds": 3 * scene.lease_ms / 1000})
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


def test_j10_a_worker_stopped_for_three_leases_changes_nothing_and_its_handlers_are_told(scene: Scene) -> None:
    first = scene.start(concurrency=4)
    jobs = [
        *scene.enqueue("talk", payload={"seconds": 4.0}),
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


def test_j25_a_job_that_dies_in_a_rescue_is_told_of_as_dead(scene: Scene) -> None:
    first = scene.start()
    [job] = scene.enqueue("nap", payload={"seconds": 20.0}, max_attempts=1, lease_ms=500)
    scene.wait_for(job, "begin")
    kill(first)
    second = scene.start()
    scene.wait_ended()
    assert scene.row(job)[0] == "dead"
    scene.wait(lambda: scene.told("job.dead"), "its death to be told")
    told = [(one.pid, one.name, one.job) for one in scene.told("job.rescued", "job.dead")]
    assert told == [(second.pid, "job.rescued", job), (second.pid, "job.dead", job)]
