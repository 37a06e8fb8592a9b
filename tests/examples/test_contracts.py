"""examples/contracts as a user runs it. tests/mutants/examples_contracts.txt plants mistakes in its app.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import duly

ROOT = Path(duly.__file__).parents[2]  # of a mutant: the folder with the copies
LINES = {"sqlite": 21, "postgres": 23}
SPOILED = {  # the line that each planted mistake turns
    "cap": "a cap holds, although a worker is killed",
    "catchup": "missed times run as catchup= asks",
    "hook": "each death calls its hook, which may fail",
    "key": "a key is kept for 15 days",
    "lease": "the job of a killed worker runs again",
    "result": "a result ends with its result_ttl",
}

pytestmark = [pytest.mark.slow, pytest.mark.process]


def in_one_process(store: str) -> pytest.param:
    return pytest.param(store, id=store, marks=pytest.mark.xdist_group(f"contracts-{store}"))


@pytest.fixture(scope="module", params=map(in_one_process, LINES))
def told(request: pytest.FixtureRequest) -> Iterator[tuple[str, int, str]]:
    """Run the example once for each store; give its exit code and what it printed."""
    words = [sys.executable, "-m", "examples.contracts.run"]
    if request.param == "postgres":
        server = request.getfixturevalue("postgres")
        words += ["--url", server.new_database()]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DULY_")}
    run = subprocess.Popen(words, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        printed, _ = run.communicate(timeout=50)
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGINT)  # it ends its processes
        printed, _ = run.communicate(timeout=5)
    yield request.param, run.returncode, printed
    if request.param == "postgres":
        server.drop(words[-1])


def test_x01_contracts_runs_from_a_bare_clone_and_every_line_holds(told):
    store, code, printed = told
    assert code == 0, printed
    assert [line[0] for line in printed.splitlines() if line.startswith(("✔", "✘"))] == ["✔"] * LINES[store]
    assert "Not promised" in printed


@pytest.mark.parametrize("line", SPOILED.values(), ids=SPOILED)
def test_x01_a_planted_mistake_turns_its_line(told, line):
    _, code, printed = told
    if code and f"✘ {line}" not in printed:
        pytest.skip("the run ended at another line")
    assert f"✔ {line}: " in printed
