"""Run work when it is due and make its effects happen once."""

from duly import backoff
from duly.app import Duly
from duly.context import Ctx, SyncCtx
from duly.signals import Cancel, Retry, Snooze

__all__ = ["Cancel", "Ctx", "Duly", "Retry", "Snooze", "SyncCtx", "backoff"]
__version__ = "0.1.0"
