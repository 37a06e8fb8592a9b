"""The tasks of `duly demo`: an app as anybody would write it."""

from __future__ import annotations

import asyncio
import os
import time

from duly import Ctx, Duly, SyncCtx
from duly.rules import backoff

# Two seconds, so that nobody has to wait long for the rescue; the default is 30.
app = Duly(os.environ.get("DULY_DEMO_DB", "demo.db"), lease="2s")


@app.task
async def send_mail(to: str) -> str:
    """Take a tenth of a second, and succeed."""
    await asyncio.sleep(0.1)
    return f"sent to {to}"


@app.task
def receipt(order: int) -> str:
    """Succeed; enqueued under a key, so that one order gets one receipt."""
    return f"receipt of order {order}"


@app.task(priority=5, backoff=backoff.fixed("300ms"))
async def flaky_import(ctx: Ctx, row: int) -> int:
    """Fail at first, then succeed."""
    if ctx.attempt == 1:
        raise ConnectionError("the other side hung up")
    return row


@app.task(priority=5, max_attempts=2, backoff=backoff.fixed("300ms"))
def poison(n: int) -> None:
    """Fail every time, and end dead."""
    raise ValueError("this one never works")


@app.task
def later(n: int) -> int:
    """Succeed; it is only due in a while."""
    return n


@app.task
def slow_report(ctx: SyncCtx) -> str:
    """Take longer than a lease."""
    for part in range(1, 11):
        ctx.progress(10 * (part - 1), f"part {part} of 10")
        time.sleep(0.25)
    return "ten parts"


@app.task
async def tick(n: int) -> None:
    """Do nothing, to see how fast that is."""
