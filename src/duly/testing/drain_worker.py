"""The worker of tests: the real worker with one slot, and with upkeep at fixed moments instead of in the background.

So each run does the same. Jobs that need a process of their own run in this process, where the test's memory is. The
restrictions of the real worker apply.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from duly.app.definition import Definition, Kind
from duly.app.lease import Lease
from duly.errors import JobError
from duly.model import Change, Claimed, Failed, Outcome
from duly.testing import hooks
from duly.testing.hooks import Crashed
from duly.worker.children import Children
from duly.worker.deadlines import Overtime
from duly.worker.runner import DOES_NOT_FIT, NOT_COMMITTED
from duly.worker.threads import start_thread
from duly.worker.upkeep import Upkeep
from duly.worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from duly.app.app import App

Noted = Callable[[Lease, BaseException], None]

MOST_ATTEMPTS = 10_000


async def work(drainer: Drainer) -> None:
    """Run due jobs until none is due."""
    running = asyncio.create_task(drainer.run(), name="duly-drain")
    with _ended_by_crash(drainer.app, running):
        await running


@contextmanager
def _ended_by_crash(app: App, running: asyncio.Task[None]) -> Iterator[None]:
    """Cancel the worker when its app crashes, because its handlers cannot report their end."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(running.cancel)

    gates = [gate for gate in hooks.gates(app) if isinstance(gate, hooks.Mortal)]
    for gate in gates:
        gate.mourners.append(end)
    try:
        yield
    except asyncio.CancelledError:
        if any(gate.dead for gate in gates):
            raise Crashed from None
        raise
    finally:
        for gate in gates:
            gate.mourners.remove(end)


class Drainer(Worker):
    """A worker for tests: it drains and returns. `noted` is called with the exceptions of handlers."""

    overlaps = False  # so that jobs run in the same order each time

    def __init__(self, app: App, queues: Iterable[str] | None, noted: Noted) -> None:
        self._leap = Leap()
        super().__init__(
            app, queues=queues, concurrency=1, drain=True, signals=False, spawn=_start_thread, clock=self._leap
        )
        self.children = _NoChildren(app, 1, clock=self._leap)
        self._noted = noted
        self._ran: set[str] = set()
        self._brought_about = 0

    def _beside(self) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        yield "overtime", Overtime(self).run()
        yield "suspects", self._suspects.run()

    async def _reconcile(self) -> None:
        """Define the schedules in code; schedules of other apps do not matter to a test."""
        if self.app.schedules.in_code:
            await super()._reconcile()

    async def _turns(self) -> None:
        await self._look_after()
        await super()._turns()

    async def _send_ended(self) -> None:
        """Record before anything else is claimed, so that jobs run in the same order each time."""
        await super()._send_ended()
        for sent in self._recording:
            await sent

    async def _look_after(self) -> None:
        """Run upkeep once, and check expired leases a second time without the wait in between."""
        upkeep = Upkeep(self)
        await upkeep.round()
        await upkeep.fire.to_the_end()
        wait = upkeep.rescue.pause(math.inf)
        if wait < math.inf:
            self._leap.over(wait)
            await upkeep.rescue.look()

    def _arm(self) -> None:
        """Do not watch for jobs of other processes: a drain does not wait for new jobs."""
        self._armed = True

    async def claim(self, *args: Any, **options: Any) -> list[Lease]:
        """Claim jobs, and observe the exceptions of their handlers."""
        leases = await super().claim(*args, **options)
        for lease in leases:
            lease.definition = self._observed(lease)
            self._refuse_endless(lease.job)
        return leases

    def _refuse_endless(self, job: Claimed) -> None:
        """Count the attempts that earlier attempts caused: jobs enqueued by jobs, and retries."""
        self._brought_about += job.id in self._ran or job.envelope.causation_id in self._ran
        self._ran.add(job.id)
        if self._brought_about > MOST_ATTEMPTS:
            raise AssertionError(
                f"drain: {MOST_ATTEMPTS:,} attempts were caused by others in one drain. The next is of {job.task}. "
                "If it enqueues itself endlessly, give it an end or a delay; otherwise drain again"
            )

    def _observed(self, lease: Lease) -> Definition:
        definition = lease.definition

        def retries(error: BaseException) -> bool:
            self._noted(lease, error)
            return definition.retries(error)

        kind = Kind.THREAD if definition.kind is Kind.PROCESS else definition.kind
        return replace(definition, kind=kind, retries=retries)

    def judged(self, lease: Lease, outcome: Outcome) -> Change:
        """Decide on an outcome, and note failures without an exception of the handler."""
        if isinstance(outcome, Failed) and (not outcome.retry or outcome.reason in (DOES_NOT_FIT, NOT_COMMITTED)):
            error = outcome.error
            self._noted(lease, JobError(f"{lease.job.task}: {error.kind}: {error.message}", lease.job.id))
        return super().judged(lease, outcome)

    async def _stop_at_once(self, turns: asyncio.Task[None]) -> None:
        if any(gate.dead for gate in hooks.gates(self.app)):
            turns.cancel()  # the dead record nothing
            return
        await super()._stop_at_once(turns)


class Leap:
    """A monotonic clock that can be moved forward."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        """Read the clock."""
        return time.monotonic() + self._ahead

    def over(self, seconds: float) -> None:
        """Move the clock forward."""
        self._ahead += seconds


class _NoChildren(Children):
    """No processes: suspects run alone in this process."""

    @property
    def can_run(self) -> bool:
        return False


def _start_thread(work: Callable[[], None], name: str) -> threading.Thread:
    def quietly() -> None:
        with suppress(Crashed):
            work()

    # In the context of the worker, so that an enqueue in the thread sees the context variables around the drain.
    return start_thread(partial(contextvars.copy_context().run, quietly), name)
