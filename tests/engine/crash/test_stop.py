"""SIGTERM under load. Line J18."""

from __future__ import annotations

import signal
import time

import pytest

from tests.engine.crash.workers import Scene, alive, kill, stop, times

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SLACK_SECONDS = 5.0  # for a busy machine; the handlers would take 20, and the proof (P15) measures


def test_j18_a_worker_stopped_under_load_loses_no_job_and_no_attempt(scene: Scene) -> None:
    first = scene.start(concurrency=10, grace="1s")
    long = [*scene.enqueue("nap", 2, payload={"seconds": 20.0}), *scene.enqueue("talk", 2, payload={"seconds": 20.0})]
    within = [*scene.enqueue("nap", payload={"seconds": 0.8}), *scene.enqueue("doze", payload={"seconds": 0.8})]
    for job in (*long, *within):
        scene.wait_for(job, "begin")
    short = scene.enqueue("quick", 1000)
    scene.wait(lambda: len(scene.ledger()) > 300, "the load")
    began = time.monotonic()
    first.send_signal(signal.SIGTERM)
    second = scene.start(concurrency=10)
    first.wait(10)
    took = time.monotonic() - began
    assert took < 2.0 + SLACK_SECONDS
    assert first.returncode == 0
    again = [scene.wait_for(job, "begin", attempt=1) for job in long]
    scene.wait(
        lambda: all(times(scene.ledger(*long), "begin")[job] == 2 for job in long), "the long ones to begin again"
    )
    again = [line for line in scene.ledger(*long) if line.what == "begin" and line.pid == second.pid]
    released = {told.job: told.at for told in scene.told("job.released") if told.pid == first.pid}
    late = max(line.at - released[line.job] for line in again)
    print(f"\nJ18 {scene.store.kind}: exit after {took:.2f} s (grace 1 s), picked up {late:.2f} s after the release")
    assert late < 1.0 + SLACK_SECONDS
    assert {line.attempt for line in again} == {1}, "an attempt was burnt"
    scene.wait(lambda: scene.count("duly_done", "task = 'quick'") == len(short), "the short ones to end")
    as_usual = "task = 'quick' and state = 'succeeded' and attempt = 1 and crashes = 0"
    assert scene.count("duly_done", as_usual) == len(short)
    assert set(times(scene.ledger(*short)).values()) == {1}
    for job in within:
        assert scene.what(job) == [(1, "begin"), (1, "end")]
        assert scene.row(job) == ("succeeded", 1, 0)
    assert scene.count("duly_job", "suspect or crashes > 0") == 0
    assert scene.count("duly_attempt") == 0
    # And a second signal forces.
    began = time.monotonic()
    second.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    second.send_signal(signal.SIGTERM)
    second.wait(10)
    assert time.monotonic() - began < 1.3 + SLACK_SECONDS
    assert [scene.row(job) for job in long] == [("ready", 0, 0)] * 4


def test_j18_handlers_that_do_not_stop_keep_no_worker_from_ending(scene: Scene) -> None:
    worker = scene.start(concurrency=4, grace="300ms")
    jobs = [*scene.enqueue("stubborn", payload={"seconds": 25.0}), *scene.enqueue("doze", payload={"seconds": 25.0})]
    for job in jobs:
        scene.wait_for(job, "begin")
    took = stop(worker, 20)
    print(f"\nJ18 {scene.store.kind}: stubborn ones, exit after {took:.2f} s (grace 0.3 s)")
    assert took < 1.3 + SLACK_SECONDS
    assert [scene.row(job) for job in jobs] == [("ready", 0, 0)] * 2
    assert scene.count("duly_attempt") == 0


def test_j18_a_suspect_is_given_back_as_the_suspect_it_was(scene: Scene) -> None:
    first = scene.start()
    [job] = scene.enqueue("talk", payload={"seconds": 25.0})
    scene.wait_for(job, "begin")
    kill(first)
    second = scene.start(grace="300ms")
    child = scene.wait_for(job, "begin", attempt=2).pid
    assert child != second.pid
    assert stop(second) < 1.3 + SLACK_SECONDS
    assert not alive(child)
    assert scene.row(job) == ("ready", 1, 0)
    assert scene.count("duly_job", "suspect") == 1
