"""The mutants that people wrote, in `*.txt`, one file for each folder of the package and of the examples.

    == store/lanes.py
    tests/contract/test_lanes.py -k whose_answer_was_lost
    - jobs = ops.claimed(recalled or [
    + jobs = ops.claimed([

The text after `-` stands once in the module and is replaced by the text after `+`: with it, the tests named above must
fail. Without `+`, the lines in which the text stands are deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
PACKAGE, EXAMPLES = "src/duly/", "examples/"


class Mutant(NamedTuple):
    """One way to break the package."""

    file: str
    old: str
    new: str | None  # None deletes lines
    tests: str
    name: str = ""  # of one that is generated

    def change(self, text: str) -> str:
        """Return the text of a module with this change."""
        if self.new is not None:
            return text.replace(self.old, self.new)
        at = text.index(self.old)
        start, end = text.rfind("\n", 0, at) + 1, text.index("\n", at + len(self.old)) + 1
        return text[:start] + text[end:]


def load() -> list[Mutant]:
    """Read all lists."""
    return [mutant for path in sorted(FOLDER.glob("*.txt")) for mutant in parse(path.read_text("utf-8"))]


def parse(text: str) -> Iterator[Mutant]:
    file = tests = ""
    old: list[str] = []
    new: list[str] = []

    def read() -> Iterator[Mutant]:
        if old:
            yield Mutant(file, "\n".join(old), "\n".join(new) if new else None, tests)
        old.clear()
        new.clear()

    for line in text.splitlines():
        if line.startswith("-"):
            if new:
                yield from read()
            old.append(line[2:])
        elif line.startswith("+"):
            new.append(line[2:])
        else:
            yield from read()
            if line.startswith("== "):
                file = line[3:] if line[3:].startswith(EXAMPLES) else PACKAGE + line[3:]
            else:
                tests = line
    yield from read()


def save(mutants: Iterable[Mutant]) -> None:
    """Write all lists anew, each mutant to the list of its folder."""
    for path in FOLDER.glob("*.txt"):
        path.unlink()
    for folder, group in groupby(sorted(mutants, key=by_folder), by_folder):
        (FOLDER / f"{'_'.join(folder.parts) or 'duly'}.txt").write_text("\n".join(lines(group)) + "\n", "utf-8")


def by_folder(mutant: Mutant) -> Path:
    return Path(mutant.file.removeprefix(PACKAGE)).parent


def lines(mutants: Iterable[Mutant]) -> Iterator[str]:
    """Write the mutants of a folder by module, those with the same tests together."""
    file = tests = ""
    for mutant in sorted(mutants, key=lambda mutant: (mutant.file, mutant.tests)):
        if mutant.file != file:
            yield from [""] * bool(file)
            yield f"== {mutant.file.removeprefix(PACKAGE)}"
            file, tests = mutant.file, ""
        if mutant.tests != tests:
            yield mutant.tests
        yield from (f"- {line}".rstrip() for line in mutant.old.split("\n"))
        yield from (f"+ {line}".rstrip() for line in (mutant.new or "").split("\n") if mutant.new is not None)
        tests = mutant.tests if mutant.new is not None else ""  # a deletion ends at the next line of tests
