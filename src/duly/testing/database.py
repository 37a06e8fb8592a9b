"""A database of its own for an app, for as long as a test lasts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duly import store
from duly.rules.settings import Settings, parse_url
from duly.store import ops
from duly.testing import hooks

if TYPE_CHECKING:
    from duly.duly import Duly


@contextmanager
def isolated(app: Duly, url: str | os.PathLike[str] | None = None) -> Iterator[Duly]:
    """Have the app work on a database of its own: a new SQLite file, or the one that `url` names, migrated.

    Afterwards it has its own again, also after an error, and a SQLite file made here is gone.
    """
    hooks.refuse_in_handler("isolated")
    if url is not None:
        with _working_on(app, url):
            app.migrate()
            yield app
        return
    folders = tempfile.TemporaryDirectory(prefix="duly-test-", ignore_cleanup_errors=True)
    with folders as folder:
        file = Path(folder) / "duly.db"
        file.write_bytes(_empty())
        with _working_on(app, file):
            yield app


@contextmanager
def _working_on(app: Duly, url: str | os.PathLike[str]) -> Iterator[None]:
    """Give the app other settings and so another driver, and then back those it had."""
    settings = _on(app.settings, url)
    before: dict[str, Any] = {name: app.__dict__.pop(name) for name in ("settings", "driver") if name in app.__dict__}
    app.__dict__["settings"] = settings
    hooks.attach(app)
    try:
        yield
    finally:
        app.close()
        app.__dict__.pop("driver", None)
        app.__dict__.update(before)


@cache
def _empty() -> bytes:
    """Make a migrated database once, to be copied: that is much faster than to migrate each."""
    with tempfile.TemporaryDirectory(prefix="duly-test-") as folder:
        file = Path(folder) / "duly.db"
        driver = store.open_driver(_on(Settings(), file))
        driver.run(ops.clock())
        driver.close()
        return file.read_bytes()


def _on(settings: Settings, url: str | os.PathLike[str]) -> Settings:
    """Set another database; a test has nothing to lose by a power cut, and so waits for no disk."""
    parsed = parse_url(url)
    if parsed.path is not None:
        parsed = replace(parsed, path=str(Path(parsed.path).absolute()))
    return replace(settings, url=parsed, listen_url=None, durability="off")
