"""Jobs that kill their process, and their innocent neighbours. Line J12."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.engine.crash.workers import TASKS, Scene, kill, times

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

WAYS = ("exit", "segfault", "kill", "memory")


def test_j12_jobs_of_a_killed_worker_run_alone_in_another_process_and_none_dies(scene: Scene) -> None:
    first = scene.start(concurrency=20)
    jobs = [
        *scene.enqueue("nap", 10, payload={"seconds": 20.0}),
        *scene.enqueue("doze", 10, payload={"seconds": 20.0}),
    ]
    scene.wait(lambda: len(times(scene.ledger(), "begin")) == 20, "all to begin")
    kill(first)
    second = scene.start(concurrency=20)
    scene.wait_ended()
    for job in jobs:
        assert scene.what(job) == [(1, "begin"), (2, "begin"), (2, "end")]
        assert scene.row(job) == ("succeeded", 2, 0)
    again = sorted((line.at, line.what) for line in scene.ledger() if line.attempt == 2)
    assert [what for _, what in again] == ["begin", "end"] * 20, "one at a time"
    assert {line.pid for line in scene.ledger() if line.attempt == 2}.isdisjoint({first.pid, second.pid})
    assert scene.count("duly_attempt", "outcome = 'crashed'") == 20


@pytest.mark.parametrize(("count", "jobs"), [(4, 100), pytest.param(16, 2000, marks=pytest.mark.nightly)])
def test_j12_poison_pills_among_good_jobs_die_alone(scene: Scene, count: int, jobs: int) -> None:
    good: list[str] = []
    pills: list[str] = []

    def add(number: int) -> None:
        good.extend(scene.enqueue("quick", jobs // count))
        pills.extend(scene.enqueue(("pill", "sync_pill")[number % 2], payload={"how": WAYS[number * 8 // count % 4]}))

    for number in range(count // 2):
        add(number)
    began = time.monotonic()
    with scene.supervised(2, concurrency=10) as deaths:
        for number in range(count // 2, count):  # these meet workers that have something to lose
            time.sleep(0.5)
            add(number)
        scene.wait_ended(90)
    print(f"\nJ12 {scene.store.kind}: {time.monotonic() - began:.1f} s, {deaths['died']} workers died")
    assert scene.count("duly_done", "task = 'quick' and state = 'succeeded'") == len(good)
    assert scene.count("duly_done", "state = 'dead'") == len(pills)
    assert scene.count("duly_done") == len(good) + len(pills)
    reasons = scene.store.query("select reason, count(*) from duly_done where state = 'dead' group by 1")
    assert {reason for reason, _ in reasons} <= {"killed its worker", "worker lost on the last attempt"}, reasons
    assert dict(reasons).get("killed its worker", 0) >= count * 3 // 4, reasons
    assert deaths["died"] <= count
    assert max(times(scene.ledger(*pills), "begin").values()) <= 5


def test_j12_an_app_that_cannot_be_imported_runs_suspects_alone_in_the_emptied_worker(scene: Scene) -> None:
    first = scene.start(script=TASKS, concurrency=8)
    terms: dict[str, Any] = {"payload": {"seconds": 20.0}}
    jobs = [*scene.enqueue("nap", 3, **terms), *scene.enqueue("doze", 3, **terms)]
    scene.wait(lambda: len(scene.ledger()) == 6, "all to begin")
    pills = [
        *scene.enqueue("pill", payload={"how": "exit"}),
        *scene.enqueue("sync_pill", payload={"how": "kill"}),
    ]
    scene.wait(lambda: first.poll() is not None, "the first to die")
    others: list[str] = []
    with scene.supervised(1, script=TASKS, concurrency=8) as deaths:
        for _ in range(10):
            time.sleep(0.2)
            others += scene.enqueue("quick", 20)
        scene.wait_ended(100)
    for job in jobs:
        assert scene.row(job)[0] == "succeeded"
        assert scene.row(job)[2] == 0, "an innocent was blamed"
    assert [scene.row(job)[0] for job in pills] == ["dead", "dead"]
    assert {scene.row(job)[0] for job in others} == {"succeeded"}
    assert deaths["died"] >= 3
    suspects = [line for line in scene.ledger(*jobs) if line.attempt > 1]
    alone = sorted((line.at, line.what) for line in suspects)
    assert [what for _, what in alone] == ["begin", "end"] * (len(alone) // 2), "one at a time"
    assert_alone(scene, {*jobs, *pills})


def test_j12_where_no_process_can_be_started_suspects_run_alone_in_the_emptied_worker(scene: Scene) -> None:
    tasks = scene.folder / "scene_tasks.py"
    only_here = (
        "import sys\n"
        "if 'duly.worker.child' in str(sys.modules['__main__'].__spec__):\n"
        "    raise RuntimeError('not here')\n"
    )
    tasks.write_text(only_here + tasks.read_text())
    first = scene.start(concurrency=4)
    jobs = [scene.enqueue(task, payload={"seconds": 20.0})[0] for task in ("nap", "doze")]
    for job in jobs:
        scene.wait_for(job, "begin")
    kill(first)
    second = scene.start(concurrency=4)
    others = scene.enqueue("doze", 3, payload={"seconds": 0.3})
    scene.wait_ended()
    for job in jobs:
        assert [line.pid for line in scene.ledger(job)] == [first.pid, second.pid, second.pid]
        assert scene.row(job) == ("succeeded", 2, 0)
    assert [scene.row(job) for job in others] == [("succeeded", 1, 0)] * 3
    assert_alone(scene, set(jobs))


def test_j12_a_slow_job_is_not_blamed_for_the_death_of_its_worker(scene: Scene) -> None:
    """Its worker may die, again and again, of what runs in the worker itself."""
    first = scene.start(concurrency=2)
    [job] = scene.enqueue("talk", payload={"seconds": 1.0}, max_attempts=8)
    scene.wait_for(job, "begin")
    kill(first)
    for attempt in range(2, 5):
        worker = scene.start(concurrency=2)
        scene.wait_for(job, "begin", attempt=attempt)
        kill(worker)
    scene.start(concurrency=2)
    scene.wait_ended()
    assert scene.row(job) == ("succeeded", 5, 0)


@pytest.mark.parametrize("task", ["hang", "hang_over_time"])
def test_j12_a_handler_that_blocks_its_event_loop_hangs_one_worker_and_no_other(scene: Scene, task: str) -> None:
    scene.start(concurrency=2)
    [job] = scene.enqueue(task, max_attempts=10)
    scene.wait_for(job, "begin")
    second = scene.start(concurrency=2)
    scene.wait_ended()
    assert scene.row(job) == ("dead", 4, 3)
    [(reason, error)] = scene.store.query("select reason, error from duly_done")
    assert reason == "killed its worker"
    assert "it did not answer, and its process was killed by SIGKILL" in str(error)
    assert second.pid not in {line.pid for line in scene.ledger(job)}


@pytest.mark.parametrize("task", ["nap_over_time", "doze_over_time"])
def test_j12_a_suspect_that_only_takes_too_long_is_not_to_blame(scene: Scene, task: str) -> None:
    first = scene.start(concurrency=2)
    [job] = scene.enqueue(task, max_attempts=4)
    scene.wait_for(job, "begin")
    kill(first)
    second = scene.start(concurrency=2)
    scene.wait_ended()
    assert scene.row(job) == ("dead", 4, 0)
    pids = [line.pid for line in scene.ledger(job)]
    assert pids[0] == first.pid
    assert pids[1] not in (first.pid, second.pid), "alone"
    assert pids[2:] == [second.pid] * 2, "and then as everybody"


def assert_alone(scene: Scene, suspects: set[str]) -> None:
    """See that nothing was written by a process while it ran a suspect, but by the suspect itself."""
    running: dict[int, str] = {}
    for line in sorted(scene.ledger(), key=lambda line: line.at):
        assert running.get(line.pid) in (None, line.job), f"{line} ran beside a suspect"
        if line.what == "end":
            running.pop(line.pid, None)
        elif line.job in suspects and line.attempt > 1:
            running[line.pid] = line.job
