"""A database of its own for an app during a test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from duly import store
from duly.app.database import Database
from duly.rules.settings import Settings, parse_url
from duly.store import ops
from duly.testing import hooks

if TYPE_CHECKING:
    from duly.duly import Duly


@contextmanager
def isolated(app: Duly, url: str | os.PathLike[str] | None = None) -> Iterator[Duly]:
    """Give the app a migrated database for a test: a new SQLite file, or the database at `url`.

    Afterwards the app has its own database again, also after an error, and the new SQLite file is deleted.
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


def _working_on(app: Duly, url: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Give the app a database at `url`, and its own again afterwards."""
    database = Database({})
    database.settings = _on(app.settings, url)
    return hooks.replaced(app, database)


@cache
def _empty() -> bytes:
    """Return a migrated file, made once and then copied, which is much faster than a migration each time."""
    with tempfile.TemporaryDirectory(prefix="duly-test-") as folder:
        file = Path(folder) / "duly.db"
        driver = store.open_driver(_on(Settings(), file))
        driver.run(ops.clock())
        driver.close()
        return file.read_bytes()


def _on(settings: Settings, url: str | os.PathLike[str]) -> Settings:
    """Return the settings for another database. A test need not survive a power cut, so nothing is synced."""
    parsed = parse_url(url)
    if parsed.path is not None:
        parsed = replace(parsed, path=str(Path(parsed.path).absolute()))
    return replace(settings, url=parsed, listen_url=None, durability="off")
