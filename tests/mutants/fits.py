"""Lists the mutants that cannot be judged, without a run of any: `python -m tests.mutants --fits`.

The text of a mutant stands exactly once in its file, and its tests exist.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression

from tests.mutants.catalogue import Mutant

WORD = re.compile(r"\w+")
PRIVATE = re.compile(r"\b_[a-z]\w+|(?<=\bself\.)\w+")  # a name that has changed would make any test fail


def misfits(root: Path, mutants: Sequence[Mutant]) -> dict[Mutant, str]:
    """Return the mutants that cannot be judged, with the reason."""
    collected = collect(sorted({path for mutant in mutants for path in split(mutant)[0] if (root / path).exists()}))
    reasons = {mutant: without_text(root, mutant) or without_tests(mutant, collected) for mutant in mutants}
    return {mutant: reason for mutant, reason in reasons.items() if reason}


def without_text(root: Path, mutant: Mutant) -> str | None:
    """Return why the text of a mutant cannot be replaced, or nothing."""
    file = root / mutant.file
    if not file.is_file():
        return "the file does not exist"
    text = file.read_text("utf-8")
    if text.count(mutant.old) != 1:
        return f"the text stands {text.count(mutant.old)} times in the file, not once"
    unknown = set(PRIVATE.findall(mutant.new or "")) - set(WORD.findall(text))
    return f"the file has no {' or '.join(sorted(unknown))}" if unknown and file.suffix == ".py" else None


def without_tests(mutant: Mutant, collected: Collected) -> str | None:
    """Return why pytest finds none of the tests of a mutant, or nothing."""
    paths, words = split(mutant)
    expression = Expression.compile(words) if words else None
    for path in paths:
        names = [each for file, names in collected.names.items() if f"{file}/".startswith(f"{path}/") for each in names]
        if not (any(map(expression.evaluate, names)) if expression else names):
            return f"{path} has no such test"
    return None


def split(mutant: Mutant) -> tuple[list[str], str]:
    """Return the files and folders in which the tests of a mutant are, and what follows `-k`."""
    words = shlex.split(mutant.tests)
    return (words[:-2], words[-1]) if "-k" in words else (words, "")


def collect(tests: Sequence[str]) -> Collected:
    """Find all tests of these files."""
    collected = Collected()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = pytest.main(
            ["--collect-only", "-q", "-W", "ignore::pytest.PytestAssertRewriteWarning", *tests], plugins=[collected]
        )
    if code:
        raise SystemExit(f"pytest could not collect the tests (exit code {code}):\n{output.getvalue()[-2000:]}")
    return collected


class Collected:
    """A plugin of pytest that keeps the names of the tests, by file, as `-k` sees them."""

    def __init__(self) -> None:
        self.names: dict[str, list[KeywordMatcher]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.names.setdefault(item.location[0], []).append(KeywordMatcher.from_item(item))
