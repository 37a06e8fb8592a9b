"""What pytest does for a mutant: quick tests come first, and nothing outlives the last of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from typing import Any

import pytest

ended: list[int] = []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


def pytest_sessionfinish(exitstatus: int) -> None:
    ended.append(exitstatus)


@pytest.hookimpl(wrapper=True)
def pytest_unconfigure() -> Generator[None, Any, Any]:
    """Exit at once: a thread that a broken product has left would be waited for."""
    yield
    if ended:
        sys.stdout.flush()
        os._exit(ended[0])
