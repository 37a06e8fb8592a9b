"""Runs one handler and returns an `Outcome`, whether the handler returns or raises.

`lifecycle.decide` alone decides what is written. The same code runs on the event loop, in a thread and in a child
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
from collections.abc import Coroutine, Generator
from typing import Any, Protocol

from duly.app.lease import CANCELLED_ON_REQUEST, Asked, Lease, current, timed_out
from duly.errors import LeaseLost, PayloadError, StoreError
from duly.model import (
    PARKED,
    Cancelled,
    Change,
    Failed,
    Failure,
    Outcome,
    Released,
    Snoozed,
    Succeeded,
    Verdict,
    Waiting,
)
from duly.rules import codec
from duly.rules.control import Cancel, Retry, Signal, Snooze, Stopping
from duly.rules.failure import describe
from duly.rules.lifecycle import decide
from duly.store import caller, ops

log = logging.getLogger("duly.worker")

DOES_NOT_FIT = "does not fit"
NOT_COMMITTED = "its transaction was not committed"
MAX_RESULT = codec.LARGEST
DONE = Succeeded()


class Runner(Protocol):
    """Runs the attempts of a worker: this module, or an object that sends them elsewhere."""

    def run(self, lease: Lease, /) -> Outcome:
        """Run a sync handler in this thread."""

    async def arun(self, lease: Lease, aio: asyncio.Task[Any] | None = None, /) -> Outcome:
        """Run an async handler on this event loop, in the task `aio`."""


def change_of(lease: Lease, outcome: Outcome, chance: float) -> Change:
    """Return the change that the judge decides on."""
    job = lease.job
    policy = lease.definition.policy
    return decide(job.attempt, job.max_attempts, outcome, policy=policy, chance=chance, crashes=job.crashes)


async def arun(lease: Lease, aio: asyncio.Task[Any] | None = None) -> Outcome:
    """Run an async handler in a context of its own. `aio` is the current task, if the caller knows it."""
    aio = aio or asyncio.current_task()
    try:
        args, kwargs = _arguments(lease)
        lease.aio = aio
        try:
            returned = _first_step(lease, args, kwargs)
            outcome = _returned(lease, await returned if type(returned) is _Rest else returned)
        except BaseException as error:
            outcome = _raised(lease, error)
        lease.aio = None
        if aio is not None and aio.cancelling():
            await _no_longer_cancelled(aio)
        if lease.in_flight or lease.beside:
            await _landed(lease)
        return outcome if lease.conn is None else await _asettled(lease, outcome)
    except _CannotRun as reason:
        return reason.outcome
    except Exception as error:  # whatever it is, the job must come to an end
        return unforeseen(lease, error)
    finally:
        lease.over = True


def run(lease: Lease) -> Outcome:
    """Run a handler in this thread; an async one on an event loop of its own."""
    try:
        return _run(lease)
    except Exception as error:
        return unforeseen(lease, error)
    finally:
        lease.over = True


def unforeseen(lease: Lease, error: BaseException) -> Outcome:
    """Return the outcome of an error that comes from neither the handler nor the database: the job must still end."""
    log.error("handler.unforeseen", exc_info=error, extra={"task": lease.job.task, "job_id": lease.job.id})
    return Failed(describe(error))


def _run(lease: Lease) -> Outcome:
    try:
        args, kwargs = _arguments(lease)
    except _CannotRun as reason:
        return reason.outcome
    context = contextvars.copy_context()
    context.run(current.set, lease)
    definition = lease.definition
    try:
        if definition.is_async:
            returned = context.run(asyncio.run, definition.handler(*args, **kwargs))
        else:
            returned = context.run(definition.handler, *args, **kwargs)
        outcome = _returned(lease, returned)
    except BaseException as error:
        outcome = _raised(lease, error)
    return outcome if lease.conn is None else _settled(lease, outcome)


class _CannotRun(Exception):
    """The handler is not called, for the reason in `outcome`."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


def _arguments(lease: Lease) -> tuple[list[Any], dict[str, Any]]:
    """Decode the handler's arguments, after the context if it takes one."""
    if lease.asked is not None:  # to stop, before the handler began
        raise _CannotRun(_raised(lease, Stopping()))
    job, definition = lease.job, lease.definition
    version = job.envelope.schema_version
    if version > definition.schema_version:
        raise _CannotRun(Waiting(f"{PARKED}needs schema version {version} of task {job.task!r}"))
    try:
        args, kwargs = definition.codec.decode_call(job.payload)
    except Exception as error:
        # A newer version of the code may accept them: retry by backoff, whatever the task retries.
        raise _CannotRun(Failed(describe(error), reason=DOES_NOT_FIT)) from None
    if definition.context is not None:
        args = [definition.context(lease), *args]
    return args, kwargs


def _first_step(lease: Lease, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run an async handler until it ends or waits. Returns its result, or the rest of it to await.

    Many handlers wait for nothing and need no more than this.
    """
    context = contextvars.copy_context()
    context.run(current.set, lease)
    coroutine = lease.definition.handler(*args, **kwargs)
    try:
        awaited = context.run(coroutine.send, None)
    except StopIteration as end:
        return end.value
    return _Rest(context, coroutine, awaited)


class _Rest:
    """The rest of a coroutine, awaited step by step in its own context. A task per job costs seven times as much."""

    __slots__ = ("_awaited", "_context", "_coroutine")

    def __init__(self, context: contextvars.Context, coroutine: Coroutine[Any, Any, Any], awaited: Any) -> None:
        self._context = context
        self._coroutine = coroutine
        self._awaited = awaited

    def __await__(self) -> Generator[Any, Any, Any]:
        run, coroutine, awaited = self._context.run, self._coroutine, self._awaited
        step: Any
        while True:
            try:
                given, step = (yield awaited), coroutine.send
            except BaseException as error:
                given, step = error, coroutine.throw
            try:
                awaited = run(step, given)
            except StopIteration as end:
                return end.value


def _returned(lease: Lease, returned: Any) -> Outcome:
    """Return the outcome for a handler that returned."""
    if returned is None and lease.asked is None:
        return DONE
    if lease.asked is Asked.TIMEOUT:
        return _failed(lease, timed_out(lease))
    if isinstance(returned, Signal):
        return _signalled(returned)
    if returned is None:
        return DONE
    if inspect.iscoroutine(returned) or inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        kind = type(returned).__name__
        if inspect.iscoroutine(returned):
            returned.close()
        error = TypeError(f"the handler returned a {kind}, which was not run: await it, or return a value")
        return Failed(describe(error), retry=False)
    try:
        text = codec.encode(returned)
        codec.check_size(text, f"the result of {lease.job.task}", limit=MAX_RESULT)
    except PayloadError as error:
        # The handler has done its work; a retry would return the same.
        return Failed(describe(error), retry=False, reason="its result cannot be stored")
    return Succeeded(text)


def _raised(lease: Lease, error: BaseException) -> Outcome:
    """Return the outcome for a handler that raised."""
    stopped = isinstance(error, asyncio.CancelledError | Stopping | LeaseLost)
    match lease.asked:
        case Asked.TIMEOUT:
            return _failed(lease, timed_out(lease))
        case Asked.CANCEL if stopped:
            return Cancelled(CANCELLED_ON_REQUEST)
        case Asked.STOPPING | Asked.LOST if stopped:
            return Released()
    if isinstance(error, Signal):
        return _signalled(error)
    return _failed(lease, error)


def _failed(lease: Lease, error: BaseException) -> Failed:
    try:
        retry = lease.definition.retries(error)
    except Exception as failed:
        log.exception("retry_on.failed", extra={"task": lease.job.task, "error": str(failed)})
        retry = True
    return Failed(describe(error, called_by=__file__), retry=retry)


def _signalled(signal: Signal) -> Outcome:
    match signal:
        case Snooze():
            return Snoozed(signal.after_ms)
        case Cancel():
            return Cancelled(signal.reason)
        case Retry():
            cause = describe(signal.__cause__ or signal, called_by=__file__)
            return Failed(cause, after_ms=signal.after_ms, reason=signal.reason)
    return Failed(describe(signal))


async def _no_longer_cancelled(aio: asyncio.Task[Any]) -> None:
    """Take back the requests to cancel the handler: its consumer runs the next job."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)  # a request not delivered yet would cancel the next job
    while aio.cancelling():
        aio.uncancel()


async def _landed(lease: Lease) -> None:
    """Wait for writes that the handler did not await, and log the tasks it left running."""
    if lease.in_flight:
        lease.landed = asyncio.Event()
        await lease.landed.wait()
    left = [_name(task) for task in lease.left if not task.done()]
    if left:
        log.warning("handler.left_pending", extra={"task": lease.job.task, "job_id": lease.job.id, "pending": left})


def _name(task: asyncio.Task[Any]) -> str:
    return str(getattr(task.get_coro(), "__qualname__", task.get_name()))


# After `ctx.commit` only the database knows whether the caller's transaction was committed: ask it by the token.


async def _asettled(lease: Lease, outcome: Outcome) -> Outcome:
    caller.free(lease.conn)
    if not (lease.staged and isinstance(outcome, Succeeded)):
        return outcome
    try:
        return _by_verdict(outcome, (await lease.database.arun(ops.settle([lease.held])))[lease.job.id])
    except StoreError as error:
        return Failed(describe(error), reason=NOT_COMMITTED)


def _settled(lease: Lease, outcome: Outcome) -> Outcome:
    caller.free(lease.conn)
    if not (lease.staged and isinstance(outcome, Succeeded)):
        return outcome
    try:
        return _by_verdict(outcome, lease.database.run(ops.settle([lease.held]))[lease.job.id])
    except StoreError as error:
        return Failed(describe(error), reason=NOT_COMMITTED)


def _by_verdict(outcome: Succeeded, verdict: Verdict) -> Outcome:
    if verdict is not Verdict.LOST:
        return outcome  # recording it once more changes nothing
    message = "the handler called ctx.commit and returned, but the transaction was not committed"
    return Failed(Failure("duly.NotCommitted", message), reason=NOT_COMMITTED)
