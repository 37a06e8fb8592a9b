"""The tasks of `duly demo`: an app as anybody would write it."""

from __future__ import annotations

import os
import time

from duly import Ctx, Duly, SyncCtx, backoff

app = Duly(os.environ.get("DULY_DEMO_DB", "demo.db"), lease="2s")


@app.task
async def send_mail(to: str) -> str:
    """Succeed."""
    return f"sent to {to}"


@app.task
def receipt(order: int) -> str:
    """Succeed; enqueued under a key, so that one order gets one receipt."""
    return f"receipt of order {order}"


@app.task(backoff=backoff.fixed("300ms"))
async def flaky_import(ctx: Ctx, row: int) -> int:
    """Fail at first, then succeed."""
    if ctx.attempt == 1:
        raise ConnectionError("the other side hung up")
    return row


@app.task(max_attempts=2, backoff=backoff.fixed("300ms"))
def poison(n: int) -> None:
    """Fail every time, and end dead."""
    raise ValueError("this one never works")


@app.task
def later(n: int) -> int:
    """Succeed; it is only due in a while."""
    return n


@app.task
def slow_report(ctx: SyncCtx, n: int) -> str:
    """Take longer than a lease."""
    for part in range(10):
        ctx.progress(10 * part, f"part {part + 1} of 10")
        time.sleep(0.25)
    return f"report {n}"
