"""Run what is due, now and here."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from duly.context import Lease
from duly.errors import ConfigError
from duly.model import State
from duly.testing import seam
from duly.testing.clock import Clock, clock_of
from duly.testing.drainer import work

if TYPE_CHECKING:
    from duly.app import Duly

MOST_ROUNDS = 1000
MANY = 10_000


@dataclass(frozen=True)
class Drained:
    """What a drain came to: how attempts ended, and the ids of the jobs that ran, in their order.

    `failed` are attempts that will be tried again, `rescued` are jobs that were taken from a crashed worker.
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


def drain(app: Duly, *, queues: Iterable[str] | None = None, scheduled: bool = False, raises: bool = False) -> Drained:
    """Run what is due, and what that enqueues, until nothing is due any more.

    With `scheduled` also what is due later: a frozen clock is moved from one due time to the next, so that retries run
    to their end without waiting. With `raises` the first error of a handler is raised when all is done.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(adrain(app, queues=queues, scheduled=scheduled, raises=raises))
    raise ConfigError("drain() starts an event loop, and one runs here already: await testing.adrain(app) instead")


async def adrain(
    app: Duly, *, queues: Iterable[str] | None = None, scheduled: bool = False, raises: bool = False
) -> Drained:
    """Run what is due until nothing is, from a coroutine; async handlers run on this event loop."""
    seam.refuse_in_handler("drain")
    clock = _clock_for(app, scheduled)
    queues = None if queues is None else list(queues)
    errors: list[BaseException] = []

    def note(lease: Lease, error: BaseException) -> None:
        if raises and not errors:
            errors.append(error)

    with _counted(app) as tally:
        for _ in range(MOST_ROUNDS):
            await work(app, queues, note)
            if clock is None or not await _moved_on(app, clock, queues):
                break
        else:
            raise AssertionError(f"drain: after {MOST_ROUNDS} moves of the clock there is still something to come")
    if errors:
        raise errors[0]
    return tally.drained()


def _clock_for(app: Duly, scheduled: bool) -> Clock | None:
    if not scheduled:
        return None
    clock = clock_of(app)
    if clock is None:
        raise ConfigError(
            "drain(scheduled=True) moves a frozen clock, and none is: "
            "with testing.frozen(app): testing.drain(app, scheduled=True)"
        )
    return clock


async def _moved_on(app: Duly, clock: Clock, queues: list[str] | None) -> bool:
    """Move the clock to the next moment at which something is due, or a lease ends. False: there is none."""
    scheduled = await app.alist(state=State.SCHEDULED, limit=MANY)
    running = await app.alist(state=State.RUNNING, limit=MANY)
    moments = [(job.queue, job.due_at or 0) for job in scheduled]
    moments += [(job.queue, (job.lease_until or 0) + 1) for job in running]
    # What is due and was not run is in a queue that nobody drains here.
    later = [at for queue, at in moments if at > clock.ms and (queues is None or queue in queues)]
    if later:
        clock.move(min(later))
    return bool(later)


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
def _counted(app: Duly) -> Iterator[_Tally]:
    tally = _Tally()
    listener = app.events.listen(tally.hear)
    try:
        yield tally
    finally:
        app.events._listeners.remove(listener)
