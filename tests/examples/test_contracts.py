"""examples/contracts as a user runs it. tests/mutants/examples_contracts.txt plants mistakes in its app.py."""

from __future__ import annotations

import os
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
def told(request: pytest.FixtureRequest) -> Iterator[tuple[str, subprocess.CompletedProcess[str]]]:
    """Run the example once for each store."""
    url = []
    if request.param == "postgres":
        server = request.getfixturevalue("postgres")
        url = ["--url", server.new_database()]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DULY_")}
    command = [sys.executable, "-m", "examples.contracts.run", *url]
    yield (
        request.param,
        subprocess.run(command, cwd=ROOT, env=inherited, capture_output=True, text=True, timeout=55, check=False),
    )
    if url:
        server.drop(url[1])


def test_x01_contracts_runs_from_a_bare_clone_and_every_line_holds(told):
    store, run = told
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    assert [line[0] for line in run.stdout.splitlines() if line[0] in "✔✘"] == ["✔"] * LINES[store]
    assert "Not promised" in run.stdout


@pytest.mark.parametrize("line", SPOILED.values(), ids=SPOILED)
def test_x01_a_planted_mistake_turns_its_line(told, line):
    _, run = told
    if run.returncode and f"✘ {line}" not in run.stdout:
        pytest.skip("the run ended at another line")
    assert f"✔ {line}: " in run.stdout
