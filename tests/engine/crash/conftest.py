"""A scene of worker processes on each store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.databases import fresh
from tests.engine.crash.workers import Scene, scene_on


@pytest.fixture(params=["sqlite", "postgres"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    with scene_on(request.param, fresh(request, request.param), tmp_path) as made:
        yield made
