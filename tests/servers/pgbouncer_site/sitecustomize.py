"""Lead what duly opens in this process through PgBouncer, as soon as a module that opens connections is loaded."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

LEADERS = {"duly.store.postgres.driver": "lead_driver", "duly.store.postgres.schema": "lead_schema"}


class Finder:
    """Finds a module that opens connections, and changes it once it is there."""

    def __init__(self) -> None:
        self._leaders = dict(LEADERS)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        leader = self._leaders.pop(name, None)
        if leader is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def loaded(module: ModuleType) -> None:
            execute(module)
            from tests.servers import pgbouncer

            getattr(pgbouncer, leader)(module)

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
