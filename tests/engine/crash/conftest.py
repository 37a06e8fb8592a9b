"""A scene of worker processes on each store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.crash.workers import Scene, scene_on


@pytest.fixture(params=["sqlite", "postgres"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else str(tmp_path / "duly.db")
    with scene_on(request.param, url, tmp_path) as made:
        yield made
