"""The app of P22: tasks with a cap, a rate or an order. Apart, so that workers of other rows know of no lanes."""

from __future__ import annotations

import asyncio
import os
import time

from duly import Ctx, Duly
from duly.app.lease import current
from duly.rules import backoff
from tests.proof.tasks import ledger, told, written_down

app = Duly(os.environ.get("PROOF_URL", "proof.db"), lease=os.environ.get("PROOF_LEASE", "2s"))
app.events.listen(told)

CAPS = {"few": 3, "few_each": 2, "line": 1}
RATES = {"paced": 10, "paced_each": 5}  # in a second


def by_key(key: str, n: int) -> str:
    """Tell the lanes of a task apart."""
    return key


async def _run(ctx: Ctx, task: str, key: str, n: int) -> None:
    """Take some time, and fail at first now and then."""
    lease = current.get()
    assert lease is not None
    ledger()  # opened by now, so that nothing comes between this time and the one that it notes
    late_ms = round(time.time() * 1000) - (lease.job.lease_until - lease.job.lease_ms)
    with written_down(ctx, task=task, key=key, n=n, late_ms=late_ms):
        await asyncio.sleep(0.5 if n % 10 == 3 else (n * 7 % 4) * 0.02)
        if n % 5 == 2 and ctx.attempt == 1:
            raise ValueError("at first")


@app.task(max_attempts=20, backoff=backoff.fixed("100ms"), cap=CAPS["few"])
async def few(ctx: Ctx, key: str, n: int) -> None:
    """Be one of a few, over the whole fleet."""
    await _run(ctx, "few", "", n)


@app.task(max_attempts=20, backoff=backoff.fixed("100ms"), cap=CAPS["few_each"], cap_key=by_key)
async def few_each(ctx: Ctx, key: str, n: int) -> None:
    """Be one of a few of the same key."""
    await _run(ctx, "few_each", key, n)


@app.task(max_attempts=20, backoff=backoff.fixed("100ms"), rate=f"{RATES['paced']}/s")
async def paced(ctx: Ctx, key: str, n: int) -> None:
    """Begin not too soon after others."""
    await _run(ctx, "paced", "", n)


@app.task(max_attempts=20, backoff=backoff.fixed("100ms"), rate=f"{RATES['paced_each']}/s", cap_key=by_key)
async def paced_each(ctx: Ctx, key: str, n: int) -> None:
    """Begin not too soon after others of the same key."""
    await _run(ctx, "paced_each", key, n)


@app.task(max_attempts=20, backoff=backoff.fixed("100ms"), ordering_key=by_key)
async def line(ctx: Ctx, key: str, n: int) -> None:
    """Wait for those of the same key that came before."""
    await _run(ctx, "line", key, n)
