"""The scripts of `bench/peers` share how they call, count and tell; they run as programs, with this folder first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.peers.measure import started
from bench.peers.process import Environment, reason_of
from bench.peers.tally import blank, go_file, runs

SCRIPTS = Path(__file__).parents[2] / "bench" / "peers"


def told_by(program: str, *words: str) -> dict[str, float]:
    """Run a few lines as a script of that folder would be, and read what they tell."""
    lines = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\n{program}"
    ended = subprocess.run(
        [sys.executable, "-c", lines, *words], capture_output=True, text=True, check=True, timeout=60
    )
    told: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return told


def test_threads_make_every_call_once() -> None:
    told = told_by(
        "from caller import enqueue_in_threads, WARM_UP\nmade = []\n"
        "enqueue_in_threads(made.append, 100, 16)\n"
        "assert sorted(made) == sorted([*range(WARM_UP), *range(100)])\n"
    )
    assert told["enqueued"] == 132
    assert told["p50_ms"] <= told["p99_ms"]


def test_coroutines_make_every_call_once() -> None:
    told = told_by(
        "import asyncio\nfrom caller import enqueue_in_tasks, WARM_UP\nmade = []\n"
        "async def send(number): made.append(number)\n"
        "asyncio.run(enqueue_in_tasks(send, 100, 16))\n"
        "assert sorted(made) == sorted([*range(WARM_UP), *range(100)])\n"
    )
    assert told["enqueued"] == 132


def test_bulk_sends_a_thousand_at_a_time_and_the_rest() -> None:
    told = told_by(
        "from caller import enqueue_in_bulk\nsizes = []\n"
        "enqueue_in_bulk(lambda numbers: sizes.append(len(numbers)), 2_500)\n"
        "assert sizes == [32, 1_000, 1_000, 500]\n"
    )
    assert told["enqueued"] == 2_532


def test_two_workers_count_into_one_tally(tmp_path: Path) -> None:
    tally = blank(tmp_path / "tally", 10)
    go_file(tally).touch()
    program = (
        "from tally import Tally\ntally = Tally(sys.argv[1])\ntally.wait_for_start()\n"
        "for job in range(int(sys.argv[2]), int(sys.argv[3])): tally.note(job)\n"
        "assert tally.complete() == (sys.argv[3] == '10')\ntally.tell()\n"
    )
    first = told_by(program, str(tally), "0", "5")
    assert runs(tally) == (5, 0)
    second = told_by(program, str(tally), "5", "10")
    assert runs(tally) == (10, 0)
    assert first["last_at"] <= second["first_at"]


def test_a_job_that_ran_twice_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "tally"
    path.write_bytes(bytes([1, 2, 0]))
    assert runs(path) == (2, 1)


def test_the_log_of_starts_has_the_start_of_each_job(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("0 10.5\n1 11.5\n")
    assert started(log, 2) == {0: 10.5, 1: 11.5}


def test_a_package_version_is_read_by_its_bare_name() -> None:
    assert Environment(("celery[redis]", "huey==3.0", "dbos<4", "awa-pg")).names == ["celery", "huey", "dbos", "awa-pg"]


def test_the_reason_of_a_failure_is_the_line_that_names_the_error() -> None:
    said = "with_x.py work ended with 1\nTraceback (most recent call last):\n  ...\nKeyError: 'bulk'\nhint: see above\n"
    assert reason_of(RuntimeError(said)) == "KeyError: 'bulk'"
