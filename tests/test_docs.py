"""Every example of the README and the docs runs, and says what the page says it does.

- ```python runs alone in an empty folder; `print(…)  # expected` is compared. If its first line is `# tasks.py`, it is
  also written to that file in the folder of the page.
- ```console runs line by line in the folder of its page, through the installed programs. `$ ` begins a command,
  `# exits 1` at its end says how it ends, what follows is its output: compared without ids, times and figures; `…` is
  anything.
- ```toml and ```ini are read, ```sql runs on a migrated SQLite file, ```sql postgresql on a server.
- ``` … no-run: a reason``` is left alone, counted and printed.
"""

from __future__ import annotations

import configparser
import os
import re
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

from duly.rules import settings
from duly.store.migrate import migrations

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^ *print\(.*\)\s+# (.+)$", re.MULTILINE)
NAMED = re.compile(r"# ([\w/]+\.(?:py|toml))\n")
EXITS = re.compile(r"# exits (\d+)$")
OWNER = "postgresql://owner@host/db"
APP = "postgresql://app@host/db"
NO_RUN = re.compile(r"no-run: (.+)")


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    number: int
    language: str
    words: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}-{self.language}-{self.number}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        for number, (_, language, words, text) in enumerate(BLOCK.findall(page.read_text("utf-8")), 1):
            yield Block(page, number, language, words.strip(), text)


def running(language: str, words: str = "") -> list[Block]:
    return [block for block in blocks() if (block.language, block.words) == (language, words)]


def each(found: list[Block]) -> list[pytest.param]:
    return [pytest.param(block, id=block.name) for block in found]


@pytest.mark.slow
@pytest.mark.parametrize("block", each(running("python")))
def test_an_example_runs_and_prints_its_comments(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, "example", "exec"), {"__name__": "__example__"})
    assert capsys.readouterr().out.splitlines() == PRINTED.findall(block.text)


def pages_with_commands() -> list[pytest.param]:
    pages = dict.fromkeys(block.page for block in running("console"))
    return [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in pages]


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with_commands())
def test_the_commands_of_a_page_print_its_transcripts(page, tmp_path, request):
    folder = tmp_path / "shop"
    folder.mkdir()
    write_files(page, folder)
    servers = {}
    if any(OWNER in block.text or APP in block.text for block in running("console") if block.page == page):
        servers = with_roles(request.getfixturevalue("postgres"))
    for block in running("console"):
        if block.page == page:
            for command, code, expected in commands(block.text):
                for shown, real in servers.items():
                    command = command.replace(shown, real)
                answer = run(command, folder)
                assert answer.returncode == code, f"{block.name}: $ {command}\n{answer.stdout}"
                if expected:
                    told = f"{block.name}: $ {command}\nsays\n{answer.stdout}\nthe page says\n{expected}"
                    assert matches(expected, answer.stdout), told


def write_files(page: Path, folder: Path) -> None:
    """Write the files that the page shows."""
    for block in blocks():
        if block.page == page and block.language in ("python", "toml") and (named := NAMED.match(block.text)):
            file = folder / named[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)


def with_roles(server) -> dict[str, str]:
    """Make a database and the role that the pages grant it to, and say which URLs stand for them."""
    url = server.new_database()
    with psycopg.connect(url, autocommit=True) as conn:
        if conn.execute("select 1 from pg_roles where rolname = 'app'").fetchone() is None:
            conn.execute("create role app login")
    name = url.rpartition("/")[2]
    return {OWNER: url, APP: re.sub(r"//[^@/]*@", "//app@", server.url_of(name))}


def commands(text: str) -> Iterator[tuple[str, int, str]]:
    """Take a transcript apart: commands, how each ends, and what it says."""
    for part in re.split(r"^ *\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        command = [lines.pop(0)]
        while command[-1].endswith("\\") and lines:
            command.append(lines.pop(0))
        exits = EXITS.search(command[-1])
        yield "\n".join(command), int(exits[1]) if exits else 0, "\n".join(lines).strip("\n")


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DULY_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=inherited | {"PATH": path, "USER": "ann", "HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )


def matches(expected: str, said: str) -> bool:
    """Compare a transcript with what was said, where ids, times and figures may be others."""
    pattern = re.escape(masked(expected)).replace("…", ".*")
    return re.fullmatch(pattern, masked(said), re.DOTALL) is not None


# What is another one each time: ids, moments, folders, figures. Columns are as wide as what stands in them.
UNIT = "(ms|s|m|h|d|w|kB|MB|GB|KiB|MiB|GiB|bytes)"
MASKS = (
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "ID"),
    (r"\b[0-9a-f]{8}-[0-9a-f]{2,4}…?(?= )", "ID"),
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d+)?)?( ?UTC|Z)?", "TIME"),
    (r"\d\d:\d\d:\d\d(\.\d+)?", "TIME"),
    (r"(?:/[\w.\-]+)+/([\w\-]+\.\w+)", r"\1"),
    (r"\b[\w.\-]+-\d+-[0-9a-f]{4}\b", "WORKER"),
    (rf"\b\d[\d,.]*( ?{UNIT})?\b( \d+{UNIT}\b)*", "N"),
    (r"[ \t]+", " "),
    (r" *\n *", "\n"),
)


def masked(text: str) -> str:
    for pattern, mask in MASKS:
        text = re.sub(pattern, mask, text)
    return text.strip()


@pytest.mark.parametrize(
    ("expected", "said", "same"),
    [
        ("job 0199aaaa-0000-7000-8000-000000000001", "job 0199bbbb-1111-7222-8333-444444444444", True),
        ("done in 12 ms", "done in 3.5 s", True),
        ("a\n…\nz", "a\nb\nc\nz", True),
        ("2 succeeded", "2 dead", False),
        ("a", "a\nb", False),
        ("/home/ann/shop/duly.db", "/tmp/x-1/y/duly.db", True),
    ],
)
def test_transcripts_are_compared_without_changing_values(expected, said, same):
    assert matches(expected, said) is same


@pytest.mark.parametrize("block", each(running("toml")))
def test_a_file_of_settings_can_be_read(block):
    table = tomllib.loads(block.text)
    if block.text.startswith("# duly.toml"):
        settings.load({}, {}, block.text)
    elif "duly" in table.get("tool", {}):
        settings.load({}, {}, block.text, "pyproject.toml")


@pytest.mark.parametrize("block", each(running("ini")))
def test_a_unit_file_can_be_read(block):
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read_string(block.text)
    assert parser.sections()


@pytest.mark.parametrize("block", each(running("sql")))
def test_sql_runs_on_a_migrated_file(block):
    conn = sqlite3.connect(":memory:")
    for migration in migrations("sqlite"):
        conn.executescript(migration.text)
    for statement in block.text.split(";"):
        if statement.strip():
            conn.execute(statement).fetchall()
    conn.close()


@pytest.mark.parametrize("block", each(running("sql", "postgresql")))
def test_sql_for_postgresql_runs_on_a_migrated_database(block, postgres_url):
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute("set search_path = duly, public")
        for statement in block.text.split(";"):
            if statement.strip():
                conn.execute(statement)


def test_a_block_that_is_not_run_has_a_reason():
    left = [block for block in blocks() if "no-run" in block.words]
    print(f"{len(left)} blocks are not run:")
    for block in left:
        reason = NO_RUN.fullmatch(block.words)
        assert reason, f"{block.name}: write ```{block.language} no-run: and the reason"
        print(f"  {block.name}: {reason[1]}")
    known = {"python", "console", "toml", "ini", "sql", "text", "yaml", "dockerfile"}
    assert {block.language for block in blocks()} <= known
    assert [block.name for block in blocks() if block.words not in ("", "postgresql") and block not in left] == []


def test_every_link_between_pages_leads_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    links = [
        (page, link, anchor)
        for page in pages
        for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text("utf-8"))
    ]
    assert [(page.name, link) for page, link, _ in links if not (page.parent / link).exists()] == []
    wrong = [
        (page.name, link, anchor)
        for page, link, anchor in links
        if anchor and anchor not in anchors(page.parent / link if link else page)
    ]
    assert wrong == []


def anchors(page: Path) -> set[str]:
    """Give the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_index():
    folder = ROOT / "docs"
    linked = {
        (folder / link).resolve() for link in re.findall(r"\]\(([^)#:]+)\)", (folder / "index.md").read_text("utf-8"))
    }
    pages = [page for page in sorted(folder.rglob("*.md")) if page.name != "index.md"]
    assert [page.relative_to(folder).as_posix() for page in pages if page.resolve() not in linked] == []
