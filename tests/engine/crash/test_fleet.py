"""Many workers on one database. Line J06."""

from __future__ import annotations

import time

import pytest

from tests.engine.crash.workers import Scene, times

pytestmark = [pytest.mark.slow, pytest.mark.timeout(110)]

WORKERS = 8


@pytest.mark.parametrize("count", [2_000, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_j06_eight_workers_run_thousands_of_jobs_each_once(scene: Scene, count: int) -> None:
    jobs = scene.enqueue("quick", count, lease_ms=60_000)
    workers = [scene.start(wait=False, concurrency=10, drain=True) for _ in range(WORKERS)]
    began = time.monotonic()
    for worker in workers:
        assert worker.wait(90) == 0, scene.said()
    print(f"\nJ06 {scene.store.kind}: {count} jobs by {WORKERS} workers in {time.monotonic() - began:.1f} s")
    assert set(times(scene.ledger(), "end").items()) == {(job, 1) for job in jobs}
    assert scene.count("duly_done", "state = 'succeeded' and attempt = 1 and crashes = 0") == count
    assert scene.count("duly_job") == 0
    assert scene.count("duly_attempt") == 0
    assert scene.count("duly_worker") == 0
