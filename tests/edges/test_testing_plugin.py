"""The pytest plugin, as a user's own run of pytest sees it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent.parent

TASKS = """
from duly import Duly

app = Duly("shop.db")

@app.task
def add(a: int, b: int) -> int:
    return a + b
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A project with an app and a setting that names it."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").write_text("")
    (tmp_path / "shop" / "tasks.py").write_text(TASKS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nduly_app = shop.tasks:app\nfilterwarnings = error\n")
    return tmp_path


def run(folder: Path, test: str, *, code: int = 0, where: Path | None = None) -> str:
    """Run a file of tests with pytest, in a process of its own."""
    (folder / "test_it.py").write_text(test)
    installed = any(one.value == "duly.testing.plugin" for one in entry_points(group="pytest11"))
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *([] if installed else ["-p", "duly.testing.plugin"]), str(folder)],
        cwd=where or folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == code, answer.stdout
    return answer.stdout


def test_the_fixture_gives_the_app_that_is_named_on_a_database_of_its_own(shop: Path) -> None:
    test = """
from duly import testing
from shop.tasks import add, app

def test_one(duly_app):
    assert duly_app is app
    assert add.enqueue(1, 2).id
    assert testing.drain(app).succeeded == 1

def test_two(duly_app):
    testing.refute_enqueued(add)

def test_that_nothing_of_ours_is_left():
    import threading
    assert [t.name for t in threading.enumerate() if t.name.startswith("duly")] == []
"""
    assert "3 passed" in run(shop, test)
    assert not (shop / "shop.db").exists()


def test_the_app_is_found_from_a_folder_below_the_project(shop: Path) -> None:
    below = shop / "below"
    below.mkdir()
    assert "1 passed" in run(shop, "def test(duly_app): assert duly_app.list() == []", where=below)


def test_the_clock_fixture_freezes_the_clock_of_the_app(shop: Path) -> None:
    test = """
from duly import testing
from shop.tasks import add

def test(duly_app, duly_clock):
    add.using(delay="1h").enqueue(1, 2)
    assert testing.drain(duly_app).succeeded == 0
    duly_clock.advance("1h")
    assert testing.drain(duly_app).succeeded == 1

def test_real(duly_app):
    assert type(duly_app.database).__name__ == "Database"
"""
    assert "2 passed" in run(shop, test)


def test_several_apps_are_isolated_by_the_factory(shop: Path) -> None:
    test = """
from duly import Duly, testing
from shop.tasks import add, app

other = Duly("other.db")

@other.task
def hello() -> None: ...

def test(isolated_duly, tmp_path):
    assert isolated_duly(app) is app
    isolated_duly(other, tmp_path / "named.db")
    add.enqueue(1, 2)
    hello.enqueue()
    assert (len(app.list()), len(other.list())) == (1, 1)
    assert (tmp_path / "named.db").exists()

def test_after(tmp_path):
    assert app.settings.url.shown == "shop.db"
"""
    (shop / "pytest.ini").write_text("[pytest]\n")
    assert "2 passed" in run(shop, test)
    assert not (shop / "other.db").exists()


def test_without_the_setting_the_fixture_fails_with_one_line(shop: Path) -> None:
    (shop / "pytest.ini").write_text("[pytest]\n")
    said = run(shop, "def test(duly_app): ...", code=1)
    assert 'duly_app is not set: write duly_app = "module:app" under [tool.pytest.ini_options]' in said
    assert "Traceback" not in said
    assert "plugin.py" not in said


def test_a_setting_that_names_no_app_is_told_in_one_line(shop: Path) -> None:
    (shop / "pytest.ini").write_text("[pytest]\nduly_app = shop.tasks:ap\n")
    said = run(shop, "def test(duly_app): ...", code=1)
    assert "duly_app = shop.tasks:ap: shop.tasks has no 'ap': did you mean 'app'?" in said
    assert "plugin.py" not in said


def test_a_failing_test_gives_the_app_back(shop: Path) -> None:
    test = """
from shop.tasks import app

def test_one(duly_app):
    duly_app.list()
    assert False

def test_two():
    assert app.settings.url.shown == "shop.db"
"""
    assert "1 failed, 1 passed" in run(shop, test, code=1)


def test_loading_the_plugin_imports_nothing_of_duly_beside_its_package() -> None:
    code = """
import sys, pytest, duly
before = set(sys.modules)
import duly.testing.plugin
print(sorted(name for name in set(sys.modules) - before if name.startswith(("duly", "sqlite3", "psycopg"))))
"""
    answer = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "['duly.testing', 'duly.testing.plugin']"


def test_the_project_names_the_plugin_to_pytest() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert project["project"]["entry-points"]["pytest11"] == {"duly": "duly.testing.plugin"}


def test_the_fixtures_have_a_line_each_in_the_list_of_pytest(shop: Path) -> None:
    (shop / "pytest.ini").write_text("[pytest]\naddopts = --fixtures\n")
    said = run(shop, "def test(): ...")
    for name in ("duly_app", "duly_clock", "isolated_duly"):
        assert re.search(rf"^{name} -- .*\n    \S", said, re.MULTILINE), said
