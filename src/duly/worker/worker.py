"""A worker: claims jobs, runs their handlers, records how they ended.

It works in turns (`turns`): record everything that ended since the last turn (`finishing`), claim as many jobs as there
is room for (`claiming`). Beside the turns run handlers (`slots`), heartbeats (`heartbeat`), timeouts (`deadlines`),
suspects (`suspects`) and the upkeep of the queue (`upkeep`).

`Worker` makes these parts and hands each the state that it needs. A subclass gives parts of its own.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from duly.app.definition import Kind
from duly.app.gil import LOOP_ALONE_SECONDS, SWITCH_SECONDS, threads_switched_often
from duly.errors import AnswerLost, ConfigError, StoreUnavailable
from duly.rules.durations import Duration, to_ms
from duly.store.queues import limits as queue_limits
from duly.worker import runner
from duly.worker.children import Children
from duly.worker.claiming import Claiming
from duly.worker.deadlines import Deadlines
from duly.worker.event_loop import stopped_by_signals, tasks_of_handlers_noted
from duly.worker.finishing import Finishing
from duly.worker.heartbeat import Heartbeat
from duly.worker.held import Held
from duly.worker.lanes import Lanes
from duly.worker.prefetch import Prefetch
from duly.worker.queue_limits import QueueLimits
from duly.worker.runner import Runner
from duly.worker.shared import Shared
from duly.worker.slots import Slots
from duly.worker.stopping import TOLD_SECONDS, Stopping
from duly.worker.suspects import Suspects
from duly.worker.threads import Spawn, start_thread
from duly.worker.turns import Turns
from duly.worker.upkeep import Upkeep
from duly.worker.wakeups import Wakeups

if TYPE_CHECKING:
    from duly.app.app import App


class Worker:
    """Runs the jobs of one app in one process. `concurrency` handlers run at once."""

    upkeep_beside = True  # the upkeep has a loop of its own

    def __init__(
        self,
        app: App,
        *,
        queues: Iterable[str] | Mapping[str, int | None] | None = None,
        concurrency: int = 10,
        grace: Duration | None = None,
        drain: bool = False,
        signals: bool = True,
        on_stuck: Callable[[], None] | None = None,
        spawn: Spawn = start_thread,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.app = app
        self.shared = Shared(
            app, queues=queues, concurrency=concurrency, draining=drain, spawn=spawn, clock=clock, chance=chance
        )
        self.queues = self.shared.queues
        self.concurrency = concurrency
        self._signals = signals
        self.grace_s = grace_s = (app.settings.grace_ms if grace is None else to_ms(grace, what="grace=")) / 1000
        self.held = Held(self.shared)
        self.wakeups = self._make_wakeups()
        self.prefetch = Prefetch(concurrency, app.tasks, app.settings.max_attempts)
        self.finishing = self._make_finishing()
        self.children = self._make_children()
        self._state = self.shared, self.held, self.wakeups, self.finishing
        self._stopping = Stopping(*self._state, self.children, grace_s=grace_s, on_stuck=on_stuck)
        self.runner = self._make_runner()
        self.slots = Slots(self.shared, self.held, self.children, self.runner, on_end=self.finishing.ended)
        self.lanes = Lanes(self.shared, self.held)
        self.limits = QueueLimits()
        self.claiming = self._make_claiming()
        self._make_loops()

    def _make_loops(self) -> None:
        shared, held, wakeups, finishing = self._state
        stopping, children, threads = self._stopping, self.children, self.slots.threads
        self.heartbeat = Heartbeat(shared, held, wakeups, on_lost=stopping.lost, on_cancel=stopping.cancel)
        self.deadlines = Deadlines(shared, held, finishing, stopping, children, threads)
        self.suspects = Suspects(*self._state, self.claiming, self.lanes, children, threads, self.runner)
        self.cut_off = False  # it ended while the database did not answer, and something may be in flight
        self.upkeep = Upkeep(shared, held, wakeups, self.lanes, self.limits, children, self.suspects)
        self.turns = self._make_turns()

    # The parts that a subclass may replace

    def _make_wakeups(self) -> Wakeups:
        return Wakeups(self.shared)

    def _make_finishing(self) -> Finishing:
        return Finishing(self.shared, self.held, self.wakeups, self.prefetch)

    def _make_children(self) -> Children:
        return Children(self.app, self.concurrency, clock=self.shared.clock)

    def _make_runner(self) -> Runner:
        return runner

    def _make_claiming(self) -> Claiming:
        return self._claiming_of(Claiming)

    def _make_turns(self) -> Turns:
        return self._turns_of(Turns)

    def _claiming_of(self, kind: Callable[..., Claiming], *more: Any) -> Claiming:
        parts = self._stopping, self.slots, self.prefetch, self.lanes, self.limits
        return kind(*self._state, *parts, *more)

    def _turns_of(self, kind: Callable[..., Turns], *more: Any) -> Turns:
        return kind(*self._state, self._stopping, self.slots, self.claiming, self.suspects, self.upkeep, *more)

    # The whole life

    async def run(self) -> None:
        """Work until stopped, or with `drain` until nothing is due any more."""
        self.shared.loop = asyncio.get_running_loop()
        self._refuse_what_cannot_run()
        with (
            stopped_by_signals(self.stop, wanted=self._signals),
            tasks_of_handlers_noted(),
            threads_switched_often(self._switch_seconds()),
            self.heartbeat.shown(),
        ):
            await self._begin_unless_stopped()
            turns = asyncio.create_task(self.turns.run(), name="duly-turns")
            beside = [asyncio.create_task(work, name=f"duly-{name}") for name, work in self._beside()]
            try:
                await self._end_of(turns, beside)
            except asyncio.CancelledError:
                await self.turns.stop_at_once(turns)
                raise
            finally:
                await self._close(turns, beside)

    def stop(self) -> None:
        """Claim no more, and stop when the jobs have ended or the grace time is over. A second call ends that time."""
        self._stopping.stop()

    @property
    def id(self) -> str:
        """The name of the worker: its host, its process and a random part."""
        return self.shared.id

    @property
    def stopping(self) -> bool:
        """Whether the worker claims no more jobs."""
        return self.shared.stopping

    def may_hold_jobs(self) -> bool:
        """Whether it has jobs, or a claim is in flight."""
        return len(self.held) > 0 or self.claiming.filling

    @property
    def busy(self) -> bool:
        """Whether the last claim returned something."""
        return self.wakeups.busy

    def _switch_seconds(self) -> float:
        """Return how often threads switch: sync handlers may compute in many threads."""
        is_threaded = any(task.definition.kind is Kind.THREAD for task in self.app.tasks.values())
        return SWITCH_SECONDS if is_threaded else LOOP_ALONE_SECONDS

    def _refuse_what_cannot_run(self) -> None:
        isolated = [task.name for task in self.app.tasks.values() if task.definition.kind is Kind.PROCESS]
        if isolated and self.app.spec is None:
            raise ConfigError(
                f"task {isolated[0]} has isolation='process', but a new process cannot import its app. "
                "Define the app as a global of a module other than __main__."
            )

    def _beside(self) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        yield "deadlines", self.deadlines.run()
        yield "suspects", self.suspects.run()
        if self.upkeep_beside:
            yield "upkeep", self.upkeep.run()

    async def _begin_unless_stopped(self) -> None:
        """Begin; after `stop` not for long, because nothing is held yet and the database may not answer."""
        begin = asyncio.create_task(self._begin(), name="duly-begin")
        noticed = asyncio.create_task(self._stopping.noticed.wait())
        try:
            await asyncio.wait({begin, noticed}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({begin}, timeout=TOLD_SECONDS)
            self.cut_off = not begin.done()
            if begin.done():
                begin.result()
        finally:
            noticed.cancel()
            begin.cancel()

    async def _begin(self) -> None:
        """Register the worker, and wait for the database as long as that takes."""
        shared, driver, warned = self.shared, self.shared.driver, False
        while not shared.stopping:
            try:
                with self.heartbeat.writing():
                    await driver.arun(shared.registration())
                await self.lanes.declare()
                self.limits.learn(await driver.arun(queue_limits()))
                await self.turns.begin()
                break
            except (StoreUnavailable, AnswerLost) as error:
                if not warned:
                    self.app.events.tell("worker.waiting_for_database", logging.WARNING, error=str(error))
                warned = True
                self.wakeups.begin_turn()
                await self.wakeups.sleep(random.uniform(0.3, 1.0))  # noqa: S311
        self.wakeups.watch()
        shared.online.set()
        self.heartbeat.start()
        self.app.events.tell(
            "worker.started",
            worker=shared.id,
            queues=shared.queues,
            tasks=sorted(self.app.tasks),
            concurrency=shared.concurrency,
        )

    async def _end_of(self, turns: asyncio.Task[None], beside: Sequence[asyncio.Task[None]]) -> None:
        """Wait for the turns to end, after `stop` no longer than the grace time and a moment.

        An error in any loop beside them ends the worker: half a worker would look alive.
        """
        noticed = self._stopping.noticed
        while not turns.done():
            noticed.clear()
            left = self._stopping.time_left()
            if left is not None and left <= 0:
                return
            notice = asyncio.create_task(noticed.wait())
            alive = {work for work in beside if not work.done()}
            try:
                await asyncio.wait({turns, notice, *alive}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                notice.cancel()
            for work in beside:
                if work.done():
                    work.result()
        turns.result()

    async def _close(self, turns: asyncio.Task[None], beside: Sequence[asyncio.Task[None]]) -> None:
        shared = self.shared
        shared.stopping = shared.closing = True
        is_cut = not turns.done()
        work = {turns, *beside, *shared.background}
        for task in work:
            task.cancel()
        await asyncio.wait(work, timeout=TOLD_SECONDS)  # a handler may catch the cancellation
        await self.children.close()
        self.wakeups.close()
        await shared.in_thread(self._join)
        answered = await self._stopping.say_goodbye()
        self.cut_off = self.cut_off or (is_cut and not answered)
        self.app.events.tell("worker.stopped", worker=shared.id, left=len(self.held))

    def _join(self) -> None:
        """Wait for the threads that can end."""
        self.heartbeat.stop()
        self.slots.threads.close()
