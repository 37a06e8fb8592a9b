"""The pytest plugin: fixtures for apps on databases of their own.

pytest loads it in every run on a machine that has duly, so it imports the rest on first use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeAlias

import pytest

if TYPE_CHECKING:
    from duly.duly import Duly
    from duly.testing.clock import Clock

Isolate: TypeAlias = "Callable[..., Duly]"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting that names the app."""
    parser.addini("duly_app", "the app of the fixture duly_app, as module:app", default="")


@pytest.fixture
def isolated_duly() -> Iterator[Isolate]:
    """Return a function that gives an app its own database until the test ends: `isolated_duly(app, url=None)`."""
    from duly.testing.database import isolated

    with ExitStack() as stack:

        def isolate(app: Duly, url: str | os.PathLike[str] | None = None) -> Duly:
            return stack.enter_context(isolated(app, url))

        yield isolate


@pytest.fixture
def duly_app(request: pytest.FixtureRequest, isolated_duly: Isolate) -> Duly:
    """Return the app that the setting `duly_app` names, on a database of its own."""
    from duly.app.locate import find_app
    from duly.duly import Duly
    from duly.errors import ConfigError

    spec = str(request.config.getini("duly_app"))
    if not spec:
        where = "[tool.pytest.ini_options]"
        pytest.fail(f'duly_app is not set: write duly_app = "module:app" under {where}', pytrace=False)
    root = str(request.config.rootpath)
    if root not in sys.path:
        sys.path.insert(0, root)
    try:
        return isolated_duly(find_app(spec, Duly))
    except ConfigError as error:
        pytest.fail(f"duly_app = {error}", pytrace=False)


@pytest.fixture
def duly_clock(duly_app: Duly) -> Iterator[Clock]:
    """Freeze the clock of `duly_app`, and return it."""
    from duly.testing.clock import frozen

    with frozen(duly_app) as clock:
        yield clock
