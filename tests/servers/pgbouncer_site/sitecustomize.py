"""Lead what duly opens in this process through PgBouncer, as soon as the driver for PostgreSQL is loaded."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

DRIVER = "duly.store.postgres.driver"


class Finder:
    """Finds one module, and changes it once it is there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != DRIVER:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def loaded(module: ModuleType) -> None:
            execute(module)
            from tests.servers.pgbouncer import lead

            lead(module)

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
