"""The worker that tests run: the real one, with one slot, and with its upkeep before the turns instead of beside them.

So it does the same each time. It runs handlers with `isolation="process"` in this process, where a test can observe
them. It refuses the same things as the real worker.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from duly.app.definition import Definition, Kind
from duly.app.lease import Lease
from duly.errors import JobError
from duly.model import Change, Claimed, Failed, Outcome
from duly.testing import hooks
from duly.testing.hooks import Crashed
from duly.worker.children import Children
from duly.worker.claiming import Claiming
from duly.worker.finishing import Finishing
from duly.worker.runner import DOES_NOT_FIT, NOT_COMMITTED
from duly.worker.threads import start_thread
from duly.worker.turns import Turns
from duly.worker.wakeups import Wakeups
from duly.worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from duly.app.app import App

Noted = Callable[[Lease, BaseException], None]

MOST_ATTEMPTS = 10_000


async def work(drainer: Drainer) -> None:
    """Run due jobs until none is left."""
    running = asyncio.create_task(drainer.run(), name="duly-drain")
    with _ended_by_crash(drainer.app, running):
        await running


@contextmanager
def _ended_by_crash(app: App, running: asyncio.Task[None]) -> Iterator[None]:
    """End a worker whose process counts as crashed: it would wait for its handlers."""
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
    """A worker for tests: it runs what is due and ends. `noted` is called with the exceptions of handlers."""

    upkeep_beside = False

    def __init__(self, app: App, queues: Iterable[str] | None, noted: Noted) -> None:
        self._leap = Leap()
        self._noted = noted
        super().__init__(
            app, queues=queues, concurrency=1, drain=True, signals=False, spawn=_start_thread, clock=self._leap
        )

    def _make_wakeups(self) -> Wakeups:
        return _Wakeups(self.shared)

    def _make_children(self) -> Children:
        return _NoChildren(self.app, 1, clock=self._leap)

    def _make_finishing(self) -> Finishing:
        return _Finishing(self.shared, self.held, self.wakeups, self.prefetch, self._noted)

    def _make_claiming(self) -> Claiming:
        return self._claiming_of(Observing, self._noted)

    def _make_turns(self) -> Turns:
        return self._turns_of(_Turns, self._leap)


class _Wakeups(Wakeups):
    """Does not watch other processes: a drain does not wait for new jobs."""

    def arm(self) -> None:
        self.armed = True


@dataclass(eq=False, repr=False)
class Observing(Claiming):
    """Passes the exceptions of handlers to `noted`, and refuses a drain without end."""

    _noted: Noted
    _ran: set[str] = field(default_factory=set, init=False)
    _brought_about: int = field(default=0, init=False)

    async def claim(self, *args: Any, **options: Any) -> list[Lease]:
        """Claim, and observe the handlers."""
        leases = await super().claim(*args, **options)
        for lease in leases:
            lease.definition = self._observed(lease)
            self._refuse_endless(lease.job)
        return leases

    def _refuse_endless(self, job: Claimed) -> None:
        """Count the attempts that follow from others in this drain: jobs of jobs, and jobs that run again."""
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


@dataclass(eq=False, repr=False)
class _Finishing(Finishing):
    """Records each end before the next claim, so that jobs run in the same order each time."""

    _noted: Noted

    async def send(self) -> None:
        await super().send()
        await self.sent()

    def send_beside_claim(self) -> None:
        """Leave the ends to the next turn."""

    def judged(self, lease: Lease, outcome: Outcome) -> Change:
        """Ask the judge, and note failures that are not an exception of the handler."""
        if isinstance(outcome, Failed) and (not outcome.retry or outcome.reason in (DOES_NOT_FIT, NOT_COMMITTED)):
            error = outcome.error
            self._noted(lease, JobError(f"{lease.job.task}: {error.kind}: {error.message}", lease.job.id))
        return super().judged(lease, outcome)


@dataclass(eq=False, repr=False)
class _Turns(Turns):
    """Does the upkeep once, before the turns."""

    _leap: Leap

    async def begin(self) -> None:
        """Define the schedules of the app; those of other apps do not concern a test."""
        if self._shared.app.schedules.in_code:
            await super().begin()
        else:
            await self._look_first()

    async def run(self) -> None:
        upkeep = self._upkeep
        await upkeep.round()
        await upkeep.fire.to_the_end()
        wait = upkeep.rescue.pause(math.inf)
        if wait < math.inf:  # an expired lease must be seen twice: see it again without the wait
            self._leap.over(wait)
            await upkeep.rescue.look()
        await super().run()

    async def stop_at_once(self, turns: asyncio.Task[None]) -> None:
        if any(gate.dead for gate in hooks.gates(self._shared.app)):
            turns.cancel()  # a crashed process records nothing
        else:
            await super().stop_at_once(turns)


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
    """No child processes: suspects run alone in this one."""

    @property
    def can_run(self) -> bool:
        return False


def _start_thread(work: Callable[[], None], name: str) -> threading.Thread:
    def quietly() -> None:
        with suppress(Crashed):
            work()

    # In the context of the worker, so that an enqueue in a handler belongs to the same `inline` block.
    return start_thread(partial(contextvars.copy_context().run, quietly), name)
