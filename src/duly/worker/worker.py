"""A worker: takes jobs on lease, runs their handlers, records how they ended.

It works in turns: send off everything that has ended since the last turn, claim what there is room for (`claiming`).
There are no timers to fill a batch: while ends are on their way to the database, others pile up and make the next
batch, and claims go on meanwhile. While quick jobs wait for a slot, a few ends are not sent before more have come.
Async handlers run in long-lived consumers on the event loop, sync ones in long-lived threads (`slots`). A slot is free
again when the end of its job is on its way.

Beside the turns run the beats (`heart`), the upkeep of the queue (`upkeep`), the suspects (`isolation`) and a watch
over handlers that should have ended. Polling is the truth; a wake-up only spares the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from duly.app.definition import Kind
from duly.app.events import about
from duly.app.gil import LOOP_ALONE_SECONDS, SWITCH_SECONDS, threads_switched_often
from duly.app.lease import Asked, Lease
from duly.errors import AnswerLost, ConfigError, DulyError, StoreUnavailable
from duly.model import Change, Claimed, Failed, Outcome, Released, State, Verdict
from duly.rules.durations import Duration, to_ms
from duly.rules.failure import describe
from duly.rules.lifecycle import DONE
from duly.store import ops
from duly.store.op import Finish, Op
from duly.store.queues import limits as queue_limits
from duly.worker import runner
from duly.worker.children import Children, Suspects
from duly.worker.claiming import Claiming
from duly.worker.deadlines import Overtime
from duly.worker.event_loop import stopped_by_signals, tasks_of_handlers_noted
from duly.worker.heartbeat import Heart, identity
from duly.worker.lanes import Lanes
from duly.worker.prefetch import LATE_SECONDS, Pace
from duly.worker.queue_limits import Shaping
from duly.worker.slots import Slots
from duly.worker.threads import Spawn, Threads, start_thread
from duly.worker.upkeep import Upkeep

if TYPE_CHECKING:
    from duly.app.app import App
    from duly.store.driver import Driver

log = logging.getLogger("duly.worker")

T = TypeVar("T")
Ended = tuple[Lease, Change]

BUSY_SECONDS = 1.0
LETS_OTHERS_RUN = frozenset({State.READY, State.SCHEDULED, State.DEAD})
MANY = 200  # ends, that take longer to write than a commit: they go by themselves, while we see to what a claim brought
# After the grace time: how long a handler that was told to stop gets, and what recording that may take.
TOLD_SECONDS = 0.3
LAST_SECONDS = 0.6
GOODBYE_SECONDS = 5.0  # at most, where nobody waits for us to go


class Worker:
    """Runs the jobs of one app in one process. `concurrency` handlers run at once."""

    overlaps = True  # ends may be sent off while a claim is on its way

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
        if concurrency < 1:
            raise ConfigError(f"concurrency is {concurrency}: at least one job must run")
        self.app = app
        self.driver: Driver = app.driver
        self.queues = _limits(app, queues)
        self.concurrency = concurrency
        self.id, self._host, self._pid = identity()
        self.spawn = spawn
        self.clock = clock
        self.chance = chance
        self._grace_s = (app.settings.grace_ms if grace is None else to_ms(grace, what="grace=")) / 1000
        self.draining = drain
        self._signals = signals
        self._on_stuck = on_stuck
        self.lanes = Lanes(self)
        self.shaping = Shaping()
        self._held: dict[str, Lease] = {}
        self._aside: set[Lease] = set()  # held, but in no slot: suspects
        self._stuck: set[Lease] = set()
        self._ended: deque[Ended] = deque()
        self.soon = 0  # how many end in a moment while others wait for a slot
        self._pace = Pace(concurrency, app.tasks, app.settings.max_attempts)
        self._slots = Slots(self)
        self._claiming = Claiming(self, slots=self._slots, pace=self._pace)
        self.children = Children(app, concurrency, clock=clock)
        self.heart = Heart(self, clock=clock)
        self._stopping = False
        self._stop_at = 0.0
        self._told = False
        self._gave_back = False
        self._recording: list[asyncio.Task[None]] = []  # ends that are on their way
        self._being_recorded = 0  # how many slots they free
        self.emptying = False  # claims nothing, so that a suspect can run alone in this process
        self._poked = False
        self._armed = False
        self._fruitful = False  # what was claimed since the last arming
        self._busy_since: float | None = None
        self._next_due: float | None = None
        self._due_known = False
        self._succeeded = 0
        self._failed = 0

    # The whole life

    async def run(self) -> None:
        """Work until stopped, or with `drain` until nothing is due any more."""
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._online = asyncio.Event()
        self._stop_told = asyncio.Event()
        self._vacant = asyncio.Event()  # something held was recorded
        self._suspects = Suspects(self)
        self.upkeep = Upkeep(self)
        self._refuse_what_cannot_run()
        with (
            stopped_by_signals(self.stop, wanted=self._signals),
            tasks_of_handlers_noted(),
            threads_switched_often(self._turn_of_threads_s()),
        ):
            await self._begin()
            turns = asyncio.create_task(self._turns(), name="duly-turns")
            beside = [asyncio.create_task(work, name=f"duly-{name}") for name, work in self._beside()]
            try:
                await self._end_of(turns, beside)
            except asyncio.CancelledError:
                await self._stop_at_once(turns)
                raise
            finally:
                await self._close(turns, beside)

    def _turn_of_threads_s(self) -> float:
        """Say how often threads take turns: sync handlers may compute in many of them."""
        is_threaded = any(task.definition.kind is Kind.THREAD for task in self.app.tasks.values())
        return SWITCH_SECONDS if is_threaded else LOOP_ALONE_SECONDS

    async def _stop_at_once(self, turns: asyncio.Task[None]) -> None:
        """Let the turn that is on its way come to its end, record what has ended, give back the rest."""
        self._stop_at, self._stopping = self.clock(), True
        self.poke()
        await asyncio.wait({turns}, timeout=TOLD_SECONDS + LAST_SECONDS)

    def stop(self) -> None:
        """Claim no more, let what runs end within the grace time, then go. Asked twice, go at once."""
        now = self.clock()
        self._stop_at = now if self._stopping else now + self._grace_s
        if not self._stopping:
            self.app.events.tell("worker.stopping", worker=self.id, running=len(self._held), grace_s=self._grace_s)
        self._stopping = True
        self.call_soon(self._stop_told.set)
        self.poke()

    @property
    def stopping(self) -> bool:
        """Whether the worker takes no more jobs."""
        return self._stopping

    @property
    def busy(self) -> bool:
        """Whether the last look at the queues found something."""
        return self._busy_since is not None

    def _beside(self) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        yield "overtime", Overtime(self).run()
        yield "upkeep", self.upkeep.run()
        yield "suspects", self._suspects.run()

    async def _begin(self) -> None:
        """Reach the database and say that we are there; wait for it as long as it takes."""
        warned = False
        while not self._stopping:
            try:
                await self.driver.arun(self.registration())
                await self.lanes.declare()
                await self._reconcile()
                self.shaping.learn(await self.driver.arun(queue_limits()))
                if self.draining:
                    await self._look_first()
                break
            except (StoreUnavailable, AnswerLost) as error:
                if not warned:
                    self.app.events.tell("worker.waiting_for_database", logging.WARNING, error=str(error))
                warned = True
                self.heart.sign()
                self._wake.clear()
                self._poked = False
                await self._sleep(random.uniform(0.3, 1.0))  # noqa: S311
        self._watch = self.driver.watch(self._changed)
        self._online.set()
        self.heart.start()
        self.app.events.tell(
            "worker.started",
            worker=self.id,
            queues=self.queues,
            tasks=sorted(self.app.tasks),
            concurrency=self.concurrency,
        )

    async def _reconcile(self) -> None:
        """Bring the schedules in line with the code."""
        for what, names in (await self.app.schedules.areconcile()).items():
            if names:
                level = logging.WARNING if what == "abandoned" else logging.INFO
                self.app.events.tell(f"schedules.{what}", level, schedules=names)

    async def _look_first(self) -> None:
        """Fire what is due before a drain finds nothing to do."""
        await self.upkeep.fire.to_the_end()

    async def _end_of(self, turns: asyncio.Task[None], beside: Sequence[asyncio.Task[None]]) -> None:
        """Wait for the turns to end; once we are to stop, no longer than the grace time and a second.

        If anything beside them breaks, we break: half a worker would look alive.
        """
        while not turns.done():
            self._stop_told.clear()
            left = self._stop_at + LAST_SECONDS - self.clock() if self._stopping else None
            if left is not None and left <= 0:
                return
            told = asyncio.create_task(self._stop_told.wait())
            alive = {work for work in beside if not work.done()}
            try:
                await asyncio.wait({turns, told, *alive}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                told.cancel()
            for work in beside:
                if work.done():
                    work.result()
        turns.result()

    async def _close(self, turns: asyncio.Task[None], beside: Sequence[asyncio.Task[None]]) -> None:
        self._stopping = True
        work = {turns, *beside, *self._slots.closing()}
        for task in work:
            task.cancel()
        await asyncio.wait(work, timeout=TOLD_SECONDS)  # a handler may hold on for ever
        await self.children.close()
        self._watch.close()
        await self._in_thread(self._join)
        await self._say_goodbye()
        self.app.events.tell("worker.stopped", worker=self.id, left=len(self._held))

    async def _say_goodbye(self) -> None:
        """Leave, for as long as the database may take to hear it; that may become less meanwhile."""
        began, leaving = self.clock(), asyncio.create_task(self._leave())
        try:
            while not leaving.done() and (left := self._time_for_a_goodbye(began)) > 0:
                self._stop_told.clear()
                told = asyncio.create_task(self._stop_told.wait())
                await asyncio.wait({leaving, told}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                told.cancel()
        finally:
            leaving.cancel()
        with contextlib.suppress(DulyError, asyncio.CancelledError):
            await leaving

    def _time_for_a_goodbye(self, began: float) -> float:
        """Say how many seconds are left: who is in no hurry can wait until the database has time."""
        until = self._stop_at + LAST_SECONDS if self._stop_at else began + GOODBYE_SECONDS
        return min(max(until, began + TOLD_SECONDS), began + GOODBYE_SECONDS) - self.clock()

    def _join(self) -> None:
        """Wait for the threads that can end."""
        self.heart.stop()
        self._slots.threads.close()

    async def _leave(self) -> None:
        """Give back what could not end, and say that we have gone."""
        ended = dict(self._ended.copy())  # threads may append meanwhile
        released = Change(State.READY, give_back_attempt=True)
        left = [Finish(lease.job, ended.get(lease, released)) for lease in self._held.values() if not lease.sent]
        if left:
            await self.driver.arun(ops.finish(left))
            self._held.clear()
        await self.driver.arun(ops.leave(self.id))

    def _refuse_what_cannot_run(self) -> None:
        isolated = [task.name for task in self.app.tasks.values() if task.definition.kind is Kind.PROCESS]
        if isolated and self.app.spec is None:
            raise ConfigError(
                f"task {isolated[0]} has isolation='process', but a new process cannot import its app: "
                "define it in a module, not in __main__, as a global of that module"
            )

    # Turns

    async def _turns(self) -> None:
        while not self._done():
            self._wake.clear()
            self._poked = False
            await self._turn()
            await self._rest()
        for sent in self._recording:
            await sent

    def _done(self) -> bool:
        if self._held or self._ended:
            return False
        empty = self._claiming.exhausted and not self._suspects.busy
        return self._stopping or (self.draining and empty)

    async def _turn(self) -> None:
        """Send off what has ended, claim what there is room for: both are on their way at the same time."""
        self._claiming.give_back_late()
        if self._stopping:
            self._stop_running()
        if self._is_worth_recording() and not self._is_recording():
            await self._send_ended()
        await self._claiming.fill()

    def _is_worth_recording(self) -> bool:
        """Say whether to send off what has ended now, or with more that will have ended in a moment.

        An operation costs the same whatever it records. While no job waits for a slot, no end waits either.
        """
        ended = len(self._ended)
        # The slot that has just become free takes one of those that wait.
        return ended >= self.soon or ended >= self._slots.waiting - 1

    def _is_recording(self) -> bool:
        """Say whether ends are on their way to the database."""
        for sent in self._recording:
            if sent.done():
                sent.result()
        self._recording = [sent for sent in self._recording if not sent.done()]
        return bool(self._recording)

    async def _send_ended(self) -> None:
        """Send off what has ended since the last time; the claims go on meanwhile."""
        sent = self._send_off()
        if 0 < sent < MANY and self.driver.one_writer:
            await asyncio.sleep(0)  # they begin, so that the claim can share their commit

    def _send_off(self) -> int:
        """Send off what has ended, and say how much."""
        sent = len(self._ended)
        # Each way by itself: one that fails or takes long would hold up the others.
        ways: defaultdict[ops.Way, list[Ended]] = defaultdict(list)
        while self._ended:
            one = lease, change = self._ended.popleft()
            lease.sent = True
            if lease.staged:  # its row may still be locked by the handler's own transaction
                self._slots.in_background(self._record_apart(one))
            else:
                ways[ops.way_of(lease.job, change)].append(one)
        self._recording = [
            self._slots.in_background(self._record_turn(alike, self._free(alike))) for alike in ways.values()
        ]
        return sent

    def _send_beside_claim(self) -> None:
        """Send off what has ended while a claim is on its way, unless it is little and can share a commit later."""
        least = MANY if self.driver.one_writer else 1
        if not self.overlaps or self._slots.is_closing or len(self._ended) < least:
            return
        if self._is_worth_recording() and all(map(_is_well_done, self._recording)):
            self._send_off()
            self._claiming.may_have_missed()  # what they have enqueued may have come after that claim has looked

    def _free(self, ended: Sequence[Ended]) -> int:
        """Let others have the slots of what has ended, while that is on its way; says how many."""
        slots = len(ended) if not self._aside else sum(lease not in self._aside for lease, _ in ended)
        self._being_recorded += slots
        return slots

    async def _record_turn(self, ended: Sequence[Ended], slots: int) -> None:
        try:
            await self.record(ended, patient=False)
        finally:
            self._being_recorded -= slots
            self.poke()

    async def record(self, ended: Sequence[Ended], *, patient: bool = True) -> None:
        """Write how attempts ended; whatever happens to the database meanwhile, until it is answered.

        A turn is not patient: what cannot be recorded with it, now or ever, is left to itself.
        """
        try:
            op = ops.finish([(lease.job, change) for lease, change in ended])
            verdicts = await self.surely(op, patient=patient)
        except Exception as error:
            if not patient:
                for one in ended:
                    self._slots.in_background(self._record_apart(one))
                return
            verdicts = await self._record_bare(*ended[0], error)
        self._let_go(ended)
        self._tell(ended, verdicts)
        if _lets_others_run(ended):
            self._claiming.look_again()
        self._vacant.set()

    def _tell(self, ended: Sequence[Ended], verdicts: Mapping[str, Verdict]) -> None:
        """Count attempts and tell how they ended; successes of which nobody wants to hear are only counted."""
        events, now = self.app.events, self.clock()
        unheard, in_silence = 0, not events.hears_successes
        # Python 3.11 looks long for the member of an enum: once for all, not for each.
        lost, recorded, succeeded = Verdict.LOST, Verdict.RECORDED, State.SUCCEEDED
        for lease, change in ended:
            verdict = verdicts.get(lease.job.id, lost)
            if in_silence and verdict is recorded and change.state is succeeded:
                unheard += 1
                continue
            if verdict is not lost:
                self._succeeded += change.state is State.SUCCEEDED
                self._failed += change.error is not None
            events.attempted(lease, change, verdict, now)
            if change.state is State.SCHEDULED:
                self._due_known = False
        if unheard:
            self._succeeded += unheard
            events.counts["job.succeeded"] += unheard

    def _let_go(self, ended: Sequence[Ended]) -> None:
        held = self._held
        for lease, _ in ended:
            # A job that was given back may have been claimed again, by this very turn: that is another lease.
            if held.get(lease.job.id) is lease:
                del held[lease.job.id]
            self._aside.discard(lease)

    async def _record_apart(self, one: Ended) -> None:
        await self.record([one])
        self.poke()

    async def _record_bare(self, lease: Lease, change: Change, error: Exception) -> dict[str, Verdict]:
        """Record an end that the database refuses to take as it is, with the refusal as its error."""
        outcome = Failed(describe(error), retry=False, reason="its end could not be recorded")
        try:
            return await self.surely(ops.finish([Finish(lease.job, runner.change_of(lease, outcome, 0.0))]))
        except Exception:
            log.exception("job.not_recorded", extra=about(lease))
            return {}

    # What is held

    async def claim(
        self, queue: str, limit: int, tasks: Iterable[str], *, alone: bool = False, child: bool = False
    ) -> list[Lease]:
        """Take jobs on lease; for a child's, its death is seen here, and ours is not its fault."""
        return await self._claiming.claim(queue, limit, tasks, alone=alone, child=child)

    def hold(self, jobs: Sequence[Claimed]) -> list[Lease]:
        """Note what was claimed as held."""
        now, database = self.clock(), self.app.database
        leases = []
        for job in jobs:
            lease = Lease(job, self.app.tasks[job.task].definition, database, now)
            if job.cancel_requested_at is not None:
                lease.asked = Asked.CANCEL
            if job.id in self._held:
                self._superseded(job.id)
            self._held[job.id] = lease
            leases.append(lease)
        for lease_ms in {job.lease_ms for job in jobs}:
            self.heart.mind(lease_ms)
        return leases

    def _superseded(self, job_id: str) -> None:
        """Tell the handler of an older lease of ours that it is lost: no beat would find it any more."""
        old = self._held[job_id]
        if not (old.sent or old.closed):
            self.app.events.tell("job.lease_lost", logging.WARNING, **about(old))
            self.ask(old, Asked.LOST)

    def held_of(self, queue: str) -> int:
        """Count what is held of a queue."""
        return sum(lease.job.queue == queue for lease in self._held.values())

    @property
    def idle_slots(self) -> int:
        """How many slots nothing waits for that is held; less than none where more is held than there are slots."""
        return self.concurrency - (self._in_slots() - self._being_recorded) - len(self._stuck)

    def _in_slots(self) -> int:
        """Count what is held and not set aside; one that was may be held anew, as another lease."""
        return len(self._held) - sum(self._held.get(lease.job.id) is lease for lease in self._aside)

    # Rest

    async def _rest(self) -> None:
        """Sleep until something may have changed: a job ended, one was enqueued, one is due."""
        sends = self._ended and self._is_worth_recording() and not self._is_recording()
        if sends or self._done() or self._claiming.may_claim_more():
            return
        idle = self._claiming.has_room()
        if idle and not (self._armed and self._due_known):
            await asyncio.sleep(0)  # what was claimed begins before we start a thread
        if idle and not (self._armed or self._rearm()):
            await self._in_thread(self._arm)
            return  # and look once more, now that a change would be told
        if idle and not self._due_known:
            await self._look_ahead()
        if idle:
            self._busy_since = None
        await self._sleep(self._how_long())

    def _rearm(self) -> bool:
        """Have the next change told, after one was and we have looked; says whether nothing came in between."""
        fruitful, self._fruitful = self._fruitful, False
        self._armed = True
        missed_nothing = self._watch.rearm(fruitful=fruitful)
        if not missed_nothing:
            self._armed = False
        return missed_nothing

    def _arm(self) -> None:
        """Have the next change told; some are told only once."""
        fruitful, self._fruitful = self._fruitful, False
        self._armed = True
        self._watch.arm(fruitful=fruitful)

    async def _sleep(self, seconds: float) -> None:
        timer = self._loop.call_later(seconds, self._time_has_passed)
        await self._wake.wait()
        timer.cancel()

    def _time_has_passed(self) -> None:
        self._due_known = False
        self._armed = False  # for all we know; a watch that is says so
        self._wake.set()

    def _how_long(self) -> float:
        now = self.clock()
        until = [now + self.app.settings.poll_ms / 1000]
        if self._due_known and self._next_due is not None:  # with no slot free nobody looks, and it may have passed
            until.append(self._next_due)
        if (oldest := self._slots.oldest) is not None:
            until.append(oldest.claimed_at + LATE_SECONDS)
        if self._stopping and not self._gave_back:
            until.append(self._stop_at + (TOLD_SECONDS if self._told else 0.0))
        return max(0.0, min(until) - now)

    async def _look_ahead(self) -> None:
        """Ask when the next job is due, so that we sleep exactly until then."""
        self._next_due, self._due_known = None, True  # unless something comes while we ask
        for queue in self.queues:
            for due_in_ms in (await self.surely(ops.next_due(queue)), await self.lanes.next_permit(queue)):
                if due_in_ms is not None:
                    due = self.clock() + max(due_in_ms, 1) / 1000
                    self._next_due = due if self._next_due is None else min(due, self._next_due)

    def note_busy(self, claimed: int) -> None:
        """Stop listening for wake-ups once the work does not stop, and look for the next due time anew."""
        self._fruitful = self._fruitful or claimed > 0
        if not claimed:
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = self.clock()
        elif self.clock() - self._busy_since > BUSY_SECONDS:
            self._armed = False
            self._watch.disarm()

    def _changed(self) -> None:
        """Hear, from any thread, that jobs may be ready."""
        self._due_known = False
        self._armed = False
        self.poke()

    def poke(self) -> None:
        """Wake the turns, from any thread."""
        if not self._poked:
            self._poked = True
            self.call_soon(self._woken)

    def _woken(self) -> None:
        self._poked = False
        self._wake.set()
        if self._claiming.filling:
            self._send_beside_claim()

    async def _in_thread(self, work: Callable[[], None]) -> None:
        """Do what would block the event loop in a thread of our own: handlers may have taken all others."""
        done = asyncio.Event()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:
                failed.append(error)
            self.call_soon(done.set)

        self.spawn(run, "duly-aside")
        await done.wait()
        if failed:
            raise failed[0]

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Have the event loop call a function, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(function, *args)

    # What becomes of an attempt

    def ended(self, lease: Lease, outcome: Outcome) -> None:
        """Take note of how an attempt ended; the next turn records it. May be called from any thread."""
        lease.ended_at = self.clock()
        if lease.staged:
            self.driver.mind_wal()
        if lease.closed:  # given up on long ago
            self._stuck.discard(lease)
            self.app.events.tell("job.ended_late", logging.WARNING, **about(lease))
        else:
            self._pace.note(lease.job.task, lease.ended_at - (lease.begun_at or 0.0))
            self._ended.append((lease, self.judged(lease, outcome)))
            if lease.job.lane is not None:  # the next of its lane cannot begin before
                self.soon = 0
        if self._is_worth_recording():
            self.poke()

    def judged(self, lease: Lease, outcome: Outcome) -> Change:
        """Ask the judge what becomes of a job; that cannot fail."""
        if outcome is runner.DONE:  # as most do, and what the judge says of it is known
            return DONE
        try:
            return runner.change_of(lease, outcome, self.chance())
        except Exception as error:  # a backoff of the user's own, say; whatever it is, the job must not hang
            log.exception("job.not_judged", extra=about(lease))
            return Change(State.DEAD, reason="its end could not be judged", error=describe(error))

    def give_back(self, lease: Lease) -> None:
        """Release a job, its attempt uncounted."""
        lease.closed = True
        self._ended.append((lease, runner.change_of(lease, Released(), 0.0)))
        self.soon = 0  # others may have it

    def give_up_on(self, lease: Lease, outcome: Outcome) -> None:
        """Record the end of an attempt whose handler does not end; its slot stays taken until it does."""
        change = self.judged(lease, outcome)
        if change.state is State.SCHEDULED:
            # It still runs: nobody else may begin before its lease would have ended.
            change = Change(change.state, max(change.after_ms or 0, lease.job.lease_ms), error=change.error)
        lease.closed = True
        self._stuck.add(lease)
        self._ended.append((lease, change))
        self.app.events.tell("job.stuck", logging.ERROR, **about(lease), stuck=len(self._stuck))
        self.poke()
        if self._on_stuck is not None and 2 * len(self._stuck) >= self.concurrency and not self._stopping:
            self._on_stuck()
            self.stop()

    # Stopping

    def _stop_running(self) -> None:
        """Once the grace time is over, tell handlers to stop; a moment later give back what they hold."""
        now = self.clock()
        if now < self._stop_at:
            return
        ended = {lease for lease, _ in self._ended.copy()}  # and waits until what is on its way is recorded
        running = [lease for lease in self._held.values() if not (lease.sent or lease.closed or lease in ended)]
        if not self._told:
            self._told = True
            for lease in running:
                self.ask(lease, Asked.STOPPING)
        elif now >= self._stop_at + TOLD_SECONDS:
            self._gave_back = True
            for lease in running:
                self.give_back(lease)

    def ask(self, lease: Lease, asked: Asked) -> None:
        """Ask a handler to stop: its next context call raises, and so does what an async one awaits."""
        if lease.asked is asked:
            return
        lease.asked, lease.asked_at = asked, self.clock()
        if not self.children.ask(lease) and lease.aio is not None:
            lease.aio.cancel()

    def interrupt(self, lease: Lease) -> None:
        """Raise into a handler that did not stop when asked."""
        if lease.aio is not None:
            lease.aio.cancel()
        else:
            self._slots.threads.interrupt(lease)

    @property
    def threads(self) -> Threads:
        """The threads in which sync handlers run."""
        return self._slots.threads

    # What the heart hears

    def leases(self) -> list[Lease]:
        """List what is held."""
        return list(self._held.values())

    def extended(self, leases: Sequence[Lease], answer: Mapping[str, int | None]) -> None:
        """Hear which leases stand, and which jobs are asked to cancel."""
        for lease in leases:
            if lease.sent or lease.closed or self._held.get(lease.job.id) is not lease:
                continue
            if lease.job.id not in answer:
                self.app.events.tell("job.lease_lost", logging.WARNING, **about(lease))
                self.ask(lease, Asked.LOST)
            elif answer[lease.job.id] is not None and lease.asked is None:
                self.ask(lease, Asked.CANCEL)

    def disconnected(self) -> None:
        """Hear that the database cannot be reached."""
        self._online.clear()

    def connected(self) -> None:
        """Hear that the leases are extended."""
        if not self._online.is_set():
            self._online.set()
            self.poke()

    async def surely(self, op: Op[T], *, patient: bool = True) -> T:
        """Run an operation until it is answered, however long the database is away.

        Who is not patient is told when what it needs is locked by somebody else.
        """
        while True:
            try:
                return await self.driver.arun(op)
            except AnswerLost as lost:
                op = lost.again or op  # type: ignore[assignment]
            except StoreUnavailable as error:
                if error.locked and not patient:
                    raise
            # The heart is the first to be back, and extends the leases before anybody goes on.
            self._online.clear()
            self.heart.hurry()
            await self._online.wait()

    def registration(self) -> Op[None]:
        """Make the operation that says who we are, what we know and what we have done."""
        return ops.register(
            self.id,
            host=self._host,
            pid=self._pid,
            queues=self.queues,
            tasks=self.app.tasks,
            schedules=self.app.schedules.in_code,
            beat_ms=max(self.shortest_lease_ms() // 3, 1000),
            slots=self.concurrency,
            succeeded=self._succeeded,
            failed=self._failed,
        )

    def shortest_lease_ms(self) -> int:
        """Give the shortest lease of the tasks known here."""
        default = self.app.settings.lease_ms
        return min([default, *(task.definition.lease_ms or default for task in self.app.tasks.values())])

    def suspects_ready(self) -> None:
        """Hear that there may be suspects to run alone."""
        self._suspects.hint()

    def set_aside(self, lease: Lease) -> None:
        """Count a held job as being in no slot."""
        self._aside.add(lease)

    def filled(self) -> None:
        """Hear that no claim is on its way any more."""
        self._vacant.set()

    async def emptied(self) -> None:
        """Wait until nothing but what was set aside is held; nothing is claimed while `emptying` is set."""
        while self._claiming.filling or self._in_slots():
            self._vacant.clear()
            self.poke()
            await self._vacant.wait()


def _is_well_done(sent: asyncio.Task[None]) -> bool:
    return sent.done() and not sent.cancelled() and sent.exception() is None


def _lets_others_run(ended: Sequence[Ended]) -> bool:
    """Say whether something may be claimed now that could not be before.

    That is what was given back or put off for no time, what has waited for room in a lane or for the run of a schedule
    before it, and what the end has added: a callback, a dead letter, the job that was debounced behind its key.
    """
    for lease, change in ended:
        job = lease.job
        if job.lane is not None or job.batch_id is not None or job.schedule is not None or job.key is not None:
            return True
        if change.state in LETS_OTHERS_RUN:
            return True
    return False


def _limits(app: App, queues: Iterable[str] | Mapping[str, int | None] | None) -> dict[str, int | None]:
    """Give the queues to serve, each with the number of its jobs that run at once at most."""
    if queues is None:
        return dict.fromkeys(sorted({"default", *(task.definition.queue for task in app.tasks.values())}))
    limits = dict(queues) if isinstance(queues, Mapping) else dict.fromkeys(queues)
    if not limits:
        raise ConfigError("queues= is empty: name at least one, or leave it out to serve those of the app's tasks")
    for queue, limit in limits.items():
        if limit is not None and limit < 1:
            raise ConfigError(f"the limit of queue {queue!r} is {limit}: at least 1, or none")
    return limits
