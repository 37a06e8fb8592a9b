"""Runs due jobs in the test's process."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from duly.app.lease import Lease
from duly.errors import ConfigError
from duly.model import State
from duly.store import ops
from duly.testing import hooks
from duly.testing.clock import Clock, clock_of
from duly.testing.drain_worker import Drainer, work

if TYPE_CHECKING:
    from duly.app.app import App

MOST_ROUNDS = 1000
MANY = 10_000
# `ops.next_due` also returns jobs that became due this short time ago.
JUST_DUE_MS = 50


@dataclass(frozen=True)
class Drained:
    """The result of a drain: how attempts ended, and the ids of the jobs that ran, in order.

    `failed` counts attempts that will be retried, `rescued` counts jobs taken from a crashed worker.
    """

    succeeded: int = 0
    failed: int = 0
    dead: int = 0
    cancelled: int = 0
    snoozed: int = 0
    waiting: int = 0
    partial: int = 0
    released: int = 0
    rescued: int = 0
    lost: int = 0
    jobs: tuple[str, ...] = ()


def drain(app: App, *, queues: Iterable[str] | None = None, scheduled: bool = False, raises: bool = False) -> Drained:
    """Run due jobs, and the jobs they enqueue, until none is due.

    `scheduled` also runs jobs that are due later: it moves a frozen clock from one due time to the next, so retries run
    without waiting. `raises` raises the first error of a handler at the end.
    """
    if asyncio._get_running_loop() is not None:
        raise ConfigError("drain() starts an event loop, and one runs here already: await testing.adrain(app) instead")
    return asyncio.run(adrain(app, queues=queues, scheduled=scheduled, raises=raises))


async def adrain(
    app: App, *, queues: Iterable[str] | None = None, scheduled: bool = False, raises: bool = False
) -> Drained:
    """Run due jobs until none is due, from a coroutine. Async handlers run on this event loop."""
    hooks.refuse_in_handler("drain")
    clock = _clock_for(app, scheduled)
    queues = None if queues is None else list(queues)
    errors: list[BaseException] = []

    def note(lease: Lease, error: BaseException) -> None:
        if raises and not errors:
            errors.append(error)

    with _counted(app) as tally:
        for _ in range(MOST_ROUNDS):
            drainer = Drainer(app, queues, note)
            await work(drainer)
            if clock is None or not await _moved_on(drainer, clock):
                break
        else:
            raise AssertionError(f"drain: after {MOST_ROUNDS} moves of the clock more jobs will become due")
    if errors:
        raise errors[0]
    return tally.drained()


def _clock_for(app: App, scheduled: bool) -> Clock | None:
    if not scheduled:
        return None
    clock = clock_of(app)
    if clock is None:
        raise ConfigError(
            "drain(scheduled=True) moves a frozen clock, and none is: "
            "with testing.frozen(app): testing.drain(app, scheduled=True)"
        )
    return clock


async def _moved_on(drainer: Drainer, clock: Clock) -> bool:
    """Move the clock to the next due time or end of a lease. False: no such moment is left."""
    moments = [at async for at in _moments(drainer, clock.ms)]
    # Do not wait for a lease that has expired and was not rescued.
    later = [at for at in moments if at > clock.ms]
    if later:
        clock.move(min(later))
    return bool(later)


async def _moments(drainer: Drainer, now: int) -> AsyncIterator[int]:
    """Return the next due time of each queue, and the ends of leases."""
    since = now + JUST_DUE_MS
    for queue in drainer.queues:
        due_in_ms = await drainer.shared.driver.arun(ops.next_due(queue, now=since))
        if due_in_ms is not None:
            yield since + due_in_ms
    for job in await drainer.app.alist(state=State.RUNNING, limit=MANY):
        if job.queue in drainer.queues:
            yield (job.lease_until or 0) + 1


class _Tally:
    """Counts how attempts end."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._jobs: dict[str, None] = {}

    def hear(self, name: str, fields: Mapping[str, Any]) -> None:
        what = name.removeprefix("job.")
        if what not in Drained.__dataclass_fields__ or name == what:
            return
        self._counts[what] += 1
        self._jobs[fields["job_id"]] = None

    def drained(self) -> Drained:
        return Drained(**self._counts, jobs=tuple(self._jobs))


@contextmanager
def _counted(app: App) -> Iterator[_Tally]:
    tally = _Tally()
    listener = app.events.listen(tally.hear)
    try:
        yield tally
    finally:
        app.events._listeners.remove(listener)
