"""Prints the lines of the package by folder, beside their budgets: `make lines`. Fails above the limit of the whole."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "duly"
KINDS = {".py", ".sql", ".html", ".css", ".js", ".mjs"}
LIMIT = 62_000

# The budget of each folder. A part that needs a tenth more says why in docs/internals/decisions.md.
BUDGETS = {
    "(top)": 420,
    "model": 520,
    "rules": 3_050,
    "store": 6_160,  # with D1
    "store/sql": 6_300,
    "app": 3_700,
    "worker": 3_500,
    "cloudflare": 560,  # 150 of them generated
    "cli": 6_100,
    "testing": 1_300,
    "bench": 520,
}


def folder_of(file: Path) -> str:
    """Name the folder whose budget a file counts for."""
    parts = file.relative_to(PACKAGE).parts
    if len(parts) == 1:
        return "(top)"
    return "store/sql" if parts[:2] == ("store", "sql") else parts[0]


def count() -> Counter[str]:
    """Count the lines of each folder."""
    lines: Counter[str] = Counter()
    for file in PACKAGE.rglob("*"):
        if file.suffix in KINDS:
            lines[folder_of(file)] += len(file.read_text("utf-8").splitlines())
    return lines


def main() -> None:
    lines = count()
    print(f"{'folder':<12} {'lines':>7} {'budget':>7}")
    for folder in [*BUDGETS, *sorted(lines.keys() - BUDGETS.keys())]:
        budget = BUDGETS.get(folder, 0)
        over = f"  {lines[folder] - budget:+,}" if lines[folder] > budget * 1.1 else ""
        print(f"{folder:<12} {lines[folder]:>7,} {budget:>7,}{over}")
    print(f"{'whole':<12} {lines.total():>7,} {sum(BUDGETS.values()):>7,}  limit {LIMIT:,}")
    sys.exit(1 if lines.total() > LIMIT else 0)


if __name__ == "__main__":
    main()
