"""Corrects the lists after code or tests have moved: `python -m tests.mutants --relocate`.

A mutant whose text does not stand once in its module gets the only module in which it does. A test file that does not
exist is replaced by the only one of that name. A person corrects the others, whose text has changed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from tests.mutants.catalogue import Mutant


def relocate(root: Path, mutants: Iterable[Mutant]) -> list[Mutant]:
    """Return the mutants with the modules and test files in which they are now."""
    texts = {
        str(path.relative_to(root)): path.read_text("utf-8")
        for pattern in ("*.py", "*.sql")
        for path in sorted((root / "src").rglob(pattern))
    }
    return [mutant._replace(file=module(texts, mutant), tests=tests(root, mutant)) for mutant in mutants]


def module(texts: dict[str, str], mutant: Mutant) -> str:
    if texts.get(mutant.file, "").count(mutant.old) == 1:
        return mutant.file
    homes = [file for file, text in texts.items() if text.count(mutant.old) == 1]
    if len(homes) > 1:  # the same dialect of SQL
        homes = [file for file in homes if Path(file).parent.name == Path(mutant.file).parent.name]
    return homes[0] if len(homes) == 1 else mutant.file


def tests(root: Path, mutant: Mutant) -> str:
    words = mutant.tests
    for path in shlex.split(mutant.tests):
        if path.endswith(".py") and not (root / path).exists():
            homes = sorted((root / "tests").rglob(Path(path).name))
            if len(homes) == 1:
                words = words.replace(path, str(homes[0].relative_to(root)))
    return words
