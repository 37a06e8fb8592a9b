"""Helpers for your own tests: a separate database, jobs run at once, a frozen clock, simulated crashes.

They are not mocks: jobs are stored in the real tables and run by the real worker, see `docs/guides/testing.md`. The
names are loaded on first use, because pytest loads this package in every run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duly.testing.assertions import assert_enqueued, enqueued, refute_enqueued
    from duly.testing.clock import Clock, frozen
    from duly.testing.crashing import CrashPoint, crash, crash_points
    from duly.testing.database import isolated
    from duly.testing.draining import Drained, adrain, drain
    from duly.testing.hooks import Crashed
    from duly.testing.inlining import inline

__all__ = [
    "Clock",
    "CrashPoint",
    "Crashed",
    "Drained",
    "adrain",
    "assert_enqueued",
    "crash",
    "crash_points",
    "drain",
    "enqueued",
    "frozen",
    "inline",
    "isolated",
    "refute_enqueued",
]

_MODULES = {
    "clock": ("Clock", "frozen"),
    "crashing": ("CrashPoint", "crash", "crash_points"),
    "database": ("isolated",),
    "draining": ("Drained", "adrain", "drain"),
    "assertions": ("assert_enqueued", "enqueued", "refute_enqueued"),
    "inlining": ("inline",),
    "hooks": ("Crashed",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"duly.testing.{module}"), name)
    raise AttributeError(f"duly.testing has no {name!r}: it has {', '.join(__all__)}")
