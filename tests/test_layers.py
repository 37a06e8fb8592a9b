"""What the tree of the package may look like. Which folder may import which is the linter's (pyproject.toml)."""

from __future__ import annotations

import ast
from pathlib import Path

from tools import lines

PACKAGE = Path(__file__).parent.parent / "src" / "duly"
LONGEST_FILE, LONGEST_FUNCTION, MOST_AT_THE_TOP = 500, 40, 16

# Names that are longer, and how long they may be. These lists may only shrink.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}


def test_the_top_of_the_package_has_at_most_sixteen_names() -> None:
    fixed = {"__init__.py", "__main__.py", "py.typed", "__pycache__"}
    assert len({path.name for path in PACKAGE.iterdir()} - fixed) <= MOST_AT_THE_TOP


def test_no_file_is_longer_than_500_lines() -> None:
    files = {str(path.relative_to(PACKAGE)): len(path.read_text("utf-8").splitlines()) for path in sources()}
    held({name: length for name, length in files.items() if length > LONGEST_FILE}, LONG_FILES)


def test_no_function_is_longer_than_40_lines() -> None:
    found = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    found[f"{path.relative_to(PACKAGE)}:{node.name}"] = length
    held(found, LONG_FUNCTIONS)


def test_the_package_stays_within_its_limit_of_lines() -> None:
    assert 0 < lines.count().total() <= lines.LIMIT


def test_architecture_names_every_module() -> None:
    page = (PACKAGE.parents[1] / "ARCHITECTURE.md").read_text("utf-8")
    modules = [path for path in sources() if path.parent not in (PACKAGE, PACKAGE / "cli") and path.stem != "__init__"]
    assert [str(path.relative_to(PACKAGE)) for path in modules if f"`{path.stem}`" not in page] == []


def held(found: dict[str, int], excused: dict[str, int]) -> None:
    """Fail for a name that is not excused, has grown, or is short enough to leave the list."""
    grown = {name: length for name, length in found.items() if length > excused.get(name, 0)}
    assert not grown, f"too long: {grown}"
    assert not excused.keys() - found.keys(), f"short enough now, remove: {excused.keys() - found.keys()}"


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))
