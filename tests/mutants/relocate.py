"""Moves mutants after code has moved: `python -m tests.mutants --relocate`.

A mutant fits when its text stands exactly once in its file. One that does not fit is given the only file of the
package in which its text does stand once. The others are printed: their text has changed, and a person mends them.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from tests.mutants.catalogue import MUTANTS, Mutant

CATALOGUE = Path(__file__).with_name("catalogue.py")


def relocate(root: Path) -> list[Mutant]:
    """Rewrite the file names in the catalogue; return the mutants that fit nowhere."""
    texts = {
        str(path.relative_to(root)): path.read_text("utf-8")
        for pattern in ("*.py", "*.sql")
        for path in sorted((root / "src").rglob(pattern))
    }
    moved: dict[int, str] = {}
    lost: list[Mutant] = []
    for place, mutant in enumerate(MUTANTS):
        if texts.get(mutant.file, "").count(mutant.old) == 1:
            continue
        homes = [file for file, text in texts.items() if text.count(mutant.old) == 1]
        same_kind = [file for file in homes if Path(file).parent.name == Path(mutant.file).parent.name]
        match homes if len(homes) == 1 else same_kind:
            case [home]:
                moved[place] = home
            case _:
                lost.append(mutant)
    rewrite(moved)
    print(f"{len(moved)} mutants were moved, {len(lost)} fit nowhere")
    return lost


def rewrite(moved: dict[int, str]) -> None:
    """Write the new file names where the old ones stand in the catalogue."""
    text = CATALOGUE.read_text("utf-8")
    lines = text.splitlines(keepends=True)
    calls = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Mutant"
    ]
    calls.sort(key=lambda call: call.lineno)
    for place, home in moved.items():
        name = calls[place].args[0]
        line = lines[name.lineno - 1]
        lines[name.lineno - 1] = f'{line[: name.col_offset]}"{home}"{line[name.end_col_offset :]}'
    CATALOGUE.write_text("".join(lines), "utf-8")


def show(lost: list[Mutant]) -> None:
    """Print what fits nowhere, and end with 1 if there is any."""
    for mutant in lost:
        print(f"{mutant.file}  {mutant.tests}\n    {mutant.old!r}")
    sys.exit(1 if lost else 0)
