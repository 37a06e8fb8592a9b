"""Run work when it is due and make its effects happen once."""

import importlib
import typing

if typing.TYPE_CHECKING:
    from duly.app.app import Duly
    from duly.app.context import Ctx, SyncCtx
    from duly.rules import backoff
    from duly.rules.control import Cancel, Retry, Snooze

__all__ = ["Cancel", "Ctx", "Duly", "Retry", "Snooze", "SyncCtx", "backoff"]
__version__ = "0.1.0"

# Imported when first used: `duly --version`, and pytest with our plugin, need none of it.
_HOMES = {
    "Cancel": "duly.rules.control",
    "Ctx": "duly.app.context",
    "Duly": "duly.app.app",
    "Retry": "duly.rules.control",
    "Snooze": "duly.rules.control",
    "SyncCtx": "duly.app.context",
}


def __getattr__(name: str) -> typing.Any:
    """Import a public name."""
    if name == "backoff":
        return importlib.import_module("duly.rules.backoff")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    """List the public names, also those that are not imported yet."""
    return sorted({*globals(), *__all__})
