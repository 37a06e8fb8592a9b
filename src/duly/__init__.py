"""Run work when it is due and make its effects happen once."""

import importlib
import typing

if typing.TYPE_CHECKING:
    from duly.app.batches import Batch
    from duly.app.context import Ctx, SyncCtx
    from duly.app.job import Job
    from duly.app.task import Call, Task
    from duly.duly import Duly
    from duly.rules import backoff
    from duly.rules.control import Cancel, Retry, Snooze

__all__ = ["Batch", "Call", "Cancel", "Ctx", "Duly", "Job", "Retry", "Snooze", "SyncCtx", "Task", "backoff"]
__version__ = "0.1.0"

# Imported when first used: `duly --version`, and pytest with our plugin, need none of it.
_HOMES = {
    "Batch": "duly.app.batches",
    "Call": "duly.app.task",
    "Cancel": "duly.rules.control",
    "Ctx": "duly.app.context",
    "Duly": "duly.duly",
    "Job": "duly.app.job",
    "Retry": "duly.rules.control",
    "Snooze": "duly.rules.control",
    "SyncCtx": "duly.app.context",
    "Task": "duly.app.task",
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
