"""The tasks of `duly demo`."""

from __future__ import annotations

import asyncio
import os
import time

from duly import Ctx, Duly, SyncCtx
from duly.rules import backoff

# A short lease, so that the rescue comes soon; the default is 30 s.
app = Duly(os.environ.get("DULY_DEMO_DB", "demo.db"), lease="2s")


@app.task
async def send_mail(n: int) -> str:
    """Succeed after a tenth of a second."""
    await asyncio.sleep(0.1)
    return f"sent to {n}@example.com"


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
    """Succeed; it is due later."""
    return n


@app.task
def slow_report(ctx: SyncCtx, n: int) -> str:
    """Take longer than a lease."""
    for part in range(1, 11):
        ctx.progress(10 * (part - 1), f"part {part} of 10")
        time.sleep(0.25)
    return "ten parts"


@app.task
async def tick(n: int) -> None:
    """Do nothing."""
