"""The app that the rows run: every handler writes down that it began and how it ended."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from duly import Ctx, Duly, SyncCtx
from duly.app.lease import current
from duly.rules import backoff
from tests.proof.ledger import Ledger

app = Duly(os.environ.get("PROOF_URL", "proof.db"), lease=os.environ.get("PROOF_LEASE", "2s"))
_ledger: list[tuple[int, Ledger]] = []
_asides: list[tuple[int, Ledger]] = []


def ledger() -> Ledger:
    """Open the ledger, in each process anew."""
    if not _ledger or _ledger[-1][0] != os.getpid():
        _ledger.append((os.getpid(), Ledger(Path(os.environ["PROOF_LEDGER"]))))
    return _ledger[-1][1]


@contextmanager
def written_down(ctx: Ctx | SyncCtx, **more: Any) -> Iterator[None]:
    """Write down that a handler began, and how it ended if it comes to that."""
    lease = current.get()
    assert lease is not None
    about = {"id": ctx.job_id, "token": lease.job.token}
    ledger().note("begun", attempt=ctx.attempt, parent=os.getppid(), **about, **more)
    try:
        yield
    except BaseException as error:
        how = "failed" if isinstance(error, ValueError) else "released"
        ledger().note("ended", how=how, error=type(error).__name__, **about)
        raise
    ledger().note("ended", how="ok", **about)


def asides() -> Ledger:
    """Open the file beside the ledger, for what the judge does not ask about."""
    if not _asides or _asides[-1][0] != os.getpid():
        _asides.append((os.getpid(), Ledger(Path(os.environ["PROOF_LEDGER"] + ".asides"))))
    return _asides[-1][1]


@app.events.listen
def told(name: str, fields: Mapping[str, Any]) -> None:
    """Write down which ends the database has acknowledged."""
    if name in ("job.succeeded", "job.dead", "job.cancelled"):
        # An attempt has one token, and its number is told.
        ledger().note("told", id=fields["job_id"], token=fields["attempt"], how=name.removeprefix("job."))
    else:
        asides().note(name, id=fields.get("job_id"), attempt=fields.get("attempt"))


@app.task(max_attempts=20, backoff=backoff.fixed("100ms"))
async def quick(ctx: Ctx, number: int) -> int:
    """Take no time."""
    with written_down(ctx):
        return number


@app.task(max_attempts=20, backoff=backoff.fixed("100ms"))
async def sleepy(ctx: Ctx, seconds: float) -> None:
    """Take some time on the event loop."""
    with written_down(ctx):
        await asyncio.sleep(seconds)


@app.task(max_attempts=20, backoff=backoff.fixed("100ms"))
def busy(ctx: SyncCtx, seconds: float) -> None:
    """Take some time in a thread."""
    with written_down(ctx):
        time.sleep(seconds)


@app.task(max_attempts=20, backoff=backoff.fixed("100ms"))
async def flaky(ctx: Ctx, number: int) -> int:
    """Fail at first, then succeed."""
    with written_down(ctx):
        if ctx.attempt == 1:
            raise ValueError("at first")
        return number


@app.task(max_attempts=20, backoff=backoff.fixed("100ms"))
async def lingering(ctx: Ctx, first: float, then: float) -> None:
    """Take long at the first attempt, and less at others."""
    with written_down(ctx):
        await asyncio.sleep(first if ctx.attempt == 1 else then)


@app.task(max_attempts=20, backoff=backoff.fixed("100ms"))
def attentive(ctx: SyncCtx, first: float, then: float) -> None:
    """Do the same in a thread, and ask time and again whether to go on."""
    with written_down(ctx):
        until = time.monotonic() + (first if ctx.attempt == 1 else then)
        while time.monotonic() < until:
            ctx.heartbeat()
            time.sleep(0.05)


@app.task(max_attempts=20, backoff=backoff.fixed("100ms"))
async def good(ctx: Ctx, seconds: float) -> None:
    """Take some time at first, and next to none in a later attempt."""
    with written_down(ctx):
        await asyncio.sleep(seconds if ctx.attempt == 1 else 0.01)


@app.task(max_attempts=20, backoff=backoff.fixed("100ms"), keep="1s")
async def carry(ctx: Ctx, text: str) -> int:
    """Take no time, but room."""
    with written_down(ctx):
        return len(text)


@app.task(max_attempts=20, backoff=backoff.fixed("100ms"), keep=0)
async def tick(ctx: Ctx) -> None:
    """Run by a schedule, and write down which due time it is for."""
    with written_down(ctx, schedule=ctx.schedule, due_at=round(ctx.due_at.timestamp() * 1000)):
        await asyncio.sleep(0)


@app.task(max_attempts=20, backoff=backoff.fixed("100ms"))
async def meet(ctx: Ctx, at: float) -> None:
    """End at a moment of the machine's monotonic clock, at which another job ends too."""
    with written_down(ctx):
        await asyncio.sleep(max(0.0, at - time.monotonic()))


@app.task(max_attempts=1)
async def meet_and_die(ctx: Ctx, at: float) -> None:
    """Fail at that moment, for good."""
    with written_down(ctx):
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        raise ValueError("for good")


def _called(which: str) -> Callable[[Ctx], Coroutine[Any, Any, None]]:
    async def called(ctx: Ctx) -> None:
        with written_down(ctx, batch=ctx.batch, which=which):
            await asyncio.sleep(0)

    return called


for callback in ("batch_complete", "batch_success", "batch_first_dead"):
    app.task(name=callback, max_attempts=20, backoff=backoff.fixed("100ms"))(_called(callback))


@app.task(max_attempts=10, backoff=backoff.fixed("50ms"))
async def pill(ctx: Ctx, how: str) -> str:
    """Do harm on the event loop."""
    with written_down(ctx):
        return harm(how)


@app.task(max_attempts=10, backoff=backoff.fixed("50ms"))
def pill_in_thread(ctx: SyncCtx, how: str) -> str:
    """Do harm in a thread."""
    with written_down(ctx):
        return harm(how)


@app.task(max_attempts=10, backoff=backoff.fixed("50ms"), timeout="200ms")
def endless(ctx: SyncCtx) -> None:
    """Never end, in a thread."""
    with written_down(ctx):
        while True:
            pass


@app.task(max_attempts=10, backoff=backoff.fixed("50ms"), timeout="200ms")
async def blocking(ctx: Ctx) -> None:
    """Never end, and let nobody else on the event loop."""
    with written_down(ctx):
        while True:
            pass


def harm(how: str) -> str:
    """Do what a handler should not do."""
    match how:
        case "exit":
            os._exit(1)
        case "segfault":
            ctypes.string_at(0)
        case "memory":
            _take_all_memory()
        case "sys_exit":
            sys.exit("enough")
        case "recursion":
            return harm(how)
        case "result":
            return "x" * 200_000_000
        case "huge_error":
            raise ValueError("x" * 50_000_000)
        case "bad_text":
            raise ValueError("NUL \x00 and a lone surrogate \ud800")
    raise AssertionError(how)


def _take_all_memory() -> None:
    """Die as of the kernel's out of memory killer, without taking the memory from others on this machine."""
    most = 2**28
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    taken = []
    try:
        while True:
            taken.append(bytes(2**24))
    except MemoryError:
        os.kill(os.getpid(), signal.SIGKILL)
