"""What mypy says of the code of those who use duly: nothing where it is right, each mistake where it is not."""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

SAMPLE = Path(__file__).parent / "typing_sample"
SRC = Path(__file__).parents[2] / "src"

Codes = dict[int, set[str]]
"""The error codes of each line."""


def test_right_uses_pass_and_keep_their_types(said: dict[str, list[str]]) -> None:
    assert said["right.py"] == []


def test_each_wrong_use_is_reported_and_nothing_else(said: dict[str, list[str]]) -> None:
    reported = codes(said["wrong.py"])
    marks = marked(SAMPLE / "wrong.py")

    assert sorted(reported) == sorted(marks), "\n".join(said["wrong.py"])
    stable = {line: {code} for line, code in marks.items() if not code.endswith("?")}
    assert {line: reported[line] for line in stable} == stable


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The messages of mypy about each file of the sample, as a user with `--strict` and no settings sees them."""
    tmp = tmp_path_factory.mktemp("mypy")
    (tmp / "mypy.ini").write_text(f"[mypy]\nmypy_path = {SRC}\n")
    options = ["--strict", "--config-file", str(tmp / "mypy.ini"), "--cache-dir", str(tmp / "cache")]
    # The package itself is checked elsewhere; a mistake in it is no mistake of its users.
    options += ["--follow-imports", "silent", "--no-pretty", "--no-error-summary", "--hide-error-context"]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "right.py", "wrong.py"], cwd=SAMPLE, capture_output=True, text=True
    )
    assert run.returncode in (0, 1), run.stdout + run.stderr

    said: dict[str, list[str]] = {"right.py": [], "wrong.py": []}
    for message in run.stdout.splitlines():
        said[message.partition(":")[0]].append(message)
    return said


def codes(messages: list[str]) -> Codes:
    """Read the errors; notes only explain them."""
    found: Codes = defaultdict(set)
    for message in messages:
        if error := re.match(r"[^:]+:(\d+): error: .*\[([a-z-]+)\]$", message):
            found[int(error[1])].add(error[2])
    return found


def marked(path: Path) -> dict[int, str]:
    """Read the marks at the ends of lines: `E: arg-type`, or `E: arg-type?` where the code may change."""
    lines = enumerate(path.read_text().splitlines(), start=1)
    return {number: mark[1] for number, line in lines if (mark := re.search(r"  # E: ([a-z-]+\??)$", line))}
