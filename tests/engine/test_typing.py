"""mypy accepts correct code of duly's users, and refuses each mistake."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SAMPLE = Path(__file__).parent / "typing_sample.py"
SRC = Path(__file__).parents[2] / "src"
FORMS = {"bare.py": "@app.task", "with_options.py": '@app.task(queue="mail", max_attempts=5)'}


@pytest.mark.slow
def test_right_uses_pass_and_keep_their_types(reported: dict[str, set[str]], marked: dict[str, str]) -> None:
    assert {line: codes for line, codes in reported.items() if line not in marked} == {}


@pytest.mark.slow
def test_exactly_the_wrong_uses_are_reported(reported: dict[str, set[str]], marked: dict[str, str]) -> None:
    assert sorted(reported) == sorted(marked)
    stable = {line: {code} for line, code in marked.items() if not code.endswith("?")}
    assert {line: reported[line] for line in stable} == stable


@pytest.fixture(scope="module")
def samples() -> dict[str, list[str]]:
    """Return the sample once for each form of the decorator, as lines."""
    text = "\n".join(_repeated(SAMPLE.read_text()))
    return {name: re.sub(r"^@app\.task\b(?!\()", form, text, flags=re.M).splitlines() for name, form in FORMS.items()}


def _repeated(text: str) -> Iterator[str]:
    """Repeat each function under `# Again for: names` with these names in place of the one it ends in."""
    for part in re.split(r"\n(?=\S)(?<=\n\n)", text):
        yield part
        if again := re.match(r"# Again for: (.*)\n.*_(\w+)\(\)", part):
            yield from (re.sub(rf"(?<![a-z]){again[2]}\b", name, part) for name in again[1].split(", "))


@pytest.fixture(scope="module")
def marked(samples: dict[str, list[str]]) -> dict[str, str]:
    """Return the marks by line: `wrong: arg-type`, or `wrong: arg-type?` where the code may change."""
    lines = ((f"{name}:{number}: {line}", line) for name, lines in samples.items() for number, line in enumerate(lines))
    return {place: mark[1] for place, line in lines if (mark := re.search(r"  # wrong: ([a-z-]+\??)$", line))}


@pytest.fixture(scope="module")
def reported(samples: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return the error codes by line, as a user with `--strict` and no settings sees them; notes only explain them."""
    tmp = tmp_path_factory.mktemp("mypy")
    (tmp / "mypy.ini").write_text(f"[mypy]\nmypy_path = {SRC}\n")
    for name, lines in samples.items():
        (tmp / name).write_text("\n".join(lines) + "\n")
    options = ["--strict", "--config-file", "mypy.ini", "--cache-dir", "cache"]
    # Another test checks the package itself; its mistakes are not those of its users.
    options += ["--follow-imports", "silent", "--no-pretty", "--no-error-summary", "--hide-error-context"]
    command = [sys.executable, "-m", "mypy", *options, *samples]
    run = subprocess.run(command, cwd=tmp, capture_output=True, text=True)
    assert run.returncode in (0, 1), run.stdout + run.stderr

    found: dict[str, set[str]] = {}
    for message in run.stdout.splitlines():
        name, number, kind, text = message.split(":", 3)
        if kind == " error":
            line = f"{name}:{int(number) - 1}: {samples[name][int(number) - 1]}"
            found.setdefault(line, set()).add(re.search(r"\[([a-z-]+)\]$", text)[1])  # type: ignore[index]
    return found
