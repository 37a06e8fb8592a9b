"""examples/contracts as a user runs it. tests/mutants/examples_contracts.txt plants mistakes in its app.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import duly

ROOT = Path(duly.__file__).parents[2]  # of a mutant: the folder with the copies
SPOILED = {  # the line that each planted mistake turns
    "cap": "a cap holds, although a worker is killed",
    "catchup": "missed times run as catchup= asks",
    "hook": "each death calls its hook, which may fail",
    "key": "a key is kept for 15 days",
    "lease": "the job of a killed worker runs again",
    "result": "a result ends with its result_ttl",
}

pytestmark = [pytest.mark.slow, pytest.mark.process]


@pytest.mark.parametrize(("store", "lines"), [("sqlite", 21), ("postgres", 23)])
def test_x01_contracts_runs_with_one_command_and_every_line_holds(store, lines, request):
    options = []
    if store == "postgres":
        server = request.getfixturevalue("postgres")
        options = ["--url", server.new_database()]
    code, printed = run(*options)
    assert code == 0, printed
    assert [line[0] for line in printed.splitlines() if line.startswith(("✔", "✘"))] == ["✔"] * lines
    assert "Not promised" in printed
    if store == "postgres":
        server.drop(options[1])


@pytest.mark.nightly  # the run above has these lines; with a mutant, each fails if its line does
@pytest.mark.parametrize("line", SPOILED.values(), ids=SPOILED)
def test_x01_a_planted_mistake_turns_its_line(line):
    code, printed = once()
    if code and f"✘ {line}" not in printed:
        pytest.skip("the run ended at another line")
    assert f"✔ {line}: " in printed


@pytest.mark.parametrize("url", ["postgresql://me:geheim@127.0.0.1:1/test", "nonsense://x", "/nope/x.db"])
def test_x01_a_database_that_cannot_be_used_is_told_in_a_line(url):
    code, printed = run("--url", url)
    assert (code, printed.count("\n"), "geheim" in printed) == (2, 1, False), printed


@cache
def once() -> tuple[int, str]:
    return run()


def run(*options: str) -> tuple[int, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DULY_")}
    command = [sys.executable, "-m", "examples.contracts.run", *options]
    run = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        printed, _ = run.communicate(timeout=50)
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGINT)  # it ends its processes
        printed, _ = run.communicate(timeout=5)
    return run.returncode, printed
