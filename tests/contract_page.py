"""Writes the names of the tests beside each line of docs/contract.md: `python -m tests.contract_page`.

A test compares the page with what this would write, so that neither a promise nor a test is forgotten.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "contract.md"
LINE = re.compile(r"^- \*\*([A-Z]\d\d)\*\* ")
TEST = re.compile(r"^\s*(?:async )?def (test_([a-z]\d\d)_\w+)", re.MULTILINE)
LATER = "  later"


def tests_by_line() -> dict[str, list[str]]:
    """Find the tests of each contract line by their names."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, line in TEST.findall(file.read_text("utf-8")):
            found[line.upper()].add(f"{file.relative_to(ROOT).as_posix()}::{name}")
    return {line: sorted(names) for line, names in found.items()}


def page_with_tests(page: str) -> str:
    """Rewrite the line of tests under each promise."""
    tests = tests_by_line()
    written: list[str] = []
    for text in page.splitlines():
        if text.startswith("  "):
            continue  # what was written here before
        written.append(text)
        if line := LINE.match(text):
            written.append(under(tests.get(line[1], [])))
    return "\n".join(written) + "\n"


def under(names: list[str]) -> str:
    """Write the tests of one promise, grouped by file."""
    if not names:
        return LATER
    files: dict[str, list[str]] = defaultdict(list)
    for name in names:
        file, _, test = name.partition("::")
        files[file.removeprefix("tests/")].append(test)
    return "  " + "; ".join(f"{file}: {', '.join(f'`{test}`' for test in tests)}" for file, tests in files.items())


if __name__ == "__main__":
    PAGE.write_text(page_with_tests(PAGE.read_text("utf-8")), "utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {PAGE.read_text().count(LATER)} lines are for later")
