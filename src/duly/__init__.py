"""Run work when it is due and make its effects happen once."""

import importlib
import typing

if typing.TYPE_CHECKING:
    from duly import backoff
    from duly.app import Duly
    from duly.context import Ctx, SyncCtx
    from duly.signals import Cancel, Retry, Snooze

__all__ = ["Cancel", "Ctx", "Duly", "Retry", "Snooze", "SyncCtx", "backoff"]
__version__ = "0.1.0"

# Imported when first used: `duly --version`, and pytest with our plugin, need none of it.
_HOMES = {
    "Cancel": "duly.signals",
    "Ctx": "duly.context",
    "Duly": "duly.app",
    "Retry": "duly.signals",
    "Snooze": "duly.signals",
    "SyncCtx": "duly.context",
}


def __getattr__(name: str) -> typing.Any:
    """Import a public name."""
    if name == "backoff":
        return importlib.import_module("duly.backoff")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    """List the public names, also those that are not imported yet."""
    return sorted({*globals(), *__all__})
