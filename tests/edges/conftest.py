"""What all tests of commands share: a folder to run them in, and the rule that a test of a program is marked.

A test that starts a program must be marked `process`: a command that prints and ends runs in this process.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.edges.programs import DULY, Folder

_started: list[str] = []


def _note_start(event: str, args: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and isinstance(args[1], list | tuple):
        words = [str(word) for word in args[1]]
        if words == [DULY, "--version"]:  # how `assert_within` measures the load
            return
        if (DULY in words or sys.executable in words) and not any("/tests/servers/" in word for word in words):
            _started.append(" ".join(words))


sys.addaudithook(_note_start)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that starts a program without the marker."""
    _started.clear()
    done = yield
    if _started and item.get_closest_marker("process") is None:
        pytest.fail(f"mark this test `process`, or run the command in this process: it started {_started[0][:200]}")
    return done


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    """A folder whose programs end before the database that they use is given back."""
    for name in {"url", "postgres_url"} & set(request.fixturenames):
        request.getfixturevalue(name)
    made = Folder(tmp_path)
    yield made
    made.close()
