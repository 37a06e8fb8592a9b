"""Every Python example of the README and the docs runs, and prints what its comments say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^ *print\(.*\)\s+# (.+)$", re.MULTILINE)


def examples() -> list[pytest.param]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        pytest.param(code, id=f"{page.relative_to(ROOT).as_posix()}-{number}")
        for page in pages
        for number, code in enumerate(BLOCK.findall(page.read_text("utf-8")), 1)
    ]


@pytest.mark.parametrize("code", examples())
def test_an_example_runs_and_prints_what_it_says(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example", "exec"), {"__name__": "__example__"})
    assert capsys.readouterr().out.splitlines() == PRINTED.findall(code)


def test_every_link_between_pages_leads_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8"))]
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []
