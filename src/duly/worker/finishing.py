"""How a worker records the ends of attempts: in batches, while it claims and runs other jobs.

No timer fills a batch. While ends are in flight, others gather and make the next batch. While quick jobs wait for a
slot, a few ends wait for more: an operation costs the same whatever it records.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from duly.app.events import about
from duly.app.lease import Lease
from duly.model import Change, Failed, Outcome, Released, State, Verdict
from duly.rules.failure import describe
from duly.rules.lifecycle import DONE
from duly.store import ops
from duly.store.op import Finish
from duly.worker import runner
from duly.worker.held import Held
from duly.worker.prefetch import Prefetch
from duly.worker.shared import Shared
from duly.worker.wakeups import Wakeups

log = logging.getLogger("duly.worker")

Ended: TypeAlias = tuple[Lease, Change]

LETS_OTHERS_RUN = frozenset({State.READY, State.SCHEDULED, State.DEAD})
MANY = 200  # ends that take longer to write than a commit takes


@dataclass(eq=False, repr=False)
class Finishing:
    """Takes the ends of attempts, asks the judge, and records the changes."""

    _shared: Shared
    _held: Held
    _wakeups: Wakeups
    _prefetch: Prefetch
    _in_flight: list[asyncio.Task[None]] = field(default_factory=list, init=False)
    unsent: deque[Ended] = field(default_factory=deque, init=False)
    soon: int = field(default=0, init=False)  # how many more ends are expected in a moment, while jobs wait for a slot

    # What an attempt came to

    def ended(self, lease: Lease, outcome: Outcome) -> None:
        """Take the outcome of an attempt, from any thread; a turn records it."""
        shared = self._shared
        lease.ended_at = shared.clock()
        if lease.staged:
            shared.driver.mind_wal()
        if lease.closed:  # given up on before
            self._held.stuck.discard(lease)
            shared.app.events.tell("job.ended_late", logging.WARNING, **about(lease))
        else:
            self._prefetch.note(lease.job.task, lease.ended_at - (lease.begun_at or 0.0))
            self.unsent.append((lease, self.judged(lease, outcome)))
            if lease.job.lane is not None:  # the next job of its lane waits for this end
                self.soon = 0
        if self._is_worth_sending():
            self._wakeups.wake()

    def judged(self, lease: Lease, outcome: Outcome) -> Change:
        """Return the change that the judge decides on. Never raises."""
        if outcome is runner.DONE:  # the common case, whose change is known
            return DONE
        try:
            return runner.change_of(lease, outcome, self._shared.chance())
        except Exception as error:  # the user's own backoff may raise, and the job must still end
            log.exception("job.not_judged", extra=about(lease))
            return Change(State.DEAD, reason="its end could not be judged", error=describe(error))

    def give_back(self, lease: Lease) -> None:
        """Release a job; the attempt does not count."""
        lease.closed = True
        self.unsent.append((lease, runner.change_of(lease, Released(), 0.0)))
        self.soon = 0  # other workers can claim it

    def give_up_on(self, lease: Lease, outcome: Outcome) -> None:
        """Record the end of an attempt whose handler does not stop. It keeps its slot until it does."""
        change = self.judged(lease, outcome)
        if change.state is State.SCHEDULED:
            # The handler still runs: the retry must not begin before the lease would have expired.
            change = Change(change.state, max(change.after_ms or 0, lease.job.lease_ms), error=change.error)
        lease.closed = True
        self._held.stuck.add(lease)
        self.unsent.append((lease, change))
        self._shared.app.events.tell("job.stuck", logging.ERROR, **about(lease), stuck=len(self._held.stuck))
        self._wakeups.wake()

    # Sending

    def should_send(self) -> bool:
        """Whether there are ends to send now."""
        return bool(self.unsent) and self._is_worth_sending() and not self._is_sending()

    async def send(self) -> None:
        """Send what ended, if it is time to; claims go on meanwhile."""
        if self._is_worth_sending() and not self._is_sending():
            sent = self._send_all()
            if 0 < sent < MANY and self._shared.driver.one_writer:
                await asyncio.sleep(0)  # let the writes start, so that the claim can share their commit

    def send_beside_claim(self) -> None:
        """Record finished jobs while a claim is in flight, unless there are few: then they share the next commit."""
        least = MANY if self._shared.driver.one_writer else 1
        if self._shared.closing or len(self.unsent) < least:
            return
        if self._is_worth_sending() and all(map(_is_well_done, self._in_flight)):
            self._send_all()
            self._wakeups.may_have_missed()  # the claim in flight may have looked before these ends added jobs

    async def sent(self) -> None:
        """Wait until nothing is in flight."""
        for sending in self._in_flight:
            await sending

    def _is_worth_sending(self) -> bool:
        """Whether to send what ended now, and not with more in a moment. Ends wait only while jobs wait for a slot."""
        ended = len(self.unsent)
        # The slot that has just become free takes one of the waiting jobs.
        return ended >= self.soon or ended >= len(self._held.waiting) - 1

    def _is_sending(self) -> bool:
        for sending in self._in_flight:
            if sending.done():
                sending.result()
        self._in_flight = [sending for sending in self._in_flight if not sending.done()]
        return bool(self._in_flight)

    def _send_all(self) -> int:
        """Send what ended. Returns how many."""
        sent = len(self.unsent)
        # One operation for each form of finish: one that fails or takes long does not delay the others.
        forms: defaultdict[ops.Way, list[Ended]] = defaultdict(list)
        while self.unsent:
            one = lease, change = self.unsent.popleft()
            lease.sent = True
            if lease.staged:  # its row may still be locked by the handler's own transaction
                self._shared.in_background(self._record_apart(one))
            else:
                forms[ops.way_of(lease.job, change)].append(one)
        self._in_flight = [
            self._shared.in_background(self._record_turn(alike, self._held.leave([lease for lease, _ in alike])))
            for alike in forms.values()
        ]
        return sent

    # Recording

    async def _record_turn(self, ended: Sequence[Ended], slots: int) -> None:
        try:
            await self.record(ended, patient=False)
        finally:
            self._held.left(slots)
            self._wakeups.wake()

    async def _record_apart(self, one: Ended) -> None:
        await self.record([one])
        self._wakeups.wake()

    async def record(self, ended: Sequence[Ended], *, patient: bool = True) -> None:
        """Write how attempts ended, and retry until the database answers.

        If not patient, ends that are refused or locked out are recorded one by one in the background.
        """
        try:
            op = ops.finish([(lease.job, change) for lease, change in ended])
            verdicts = await self._shared.surely(op, patient=patient)
        except Exception as error:
            if not patient:
                for one in ended:
                    self._shared.in_background(self._record_apart(one))
                return
            verdicts = await self._record_refused(*ended[0], error)
        self._held.let_go([lease for lease, _ in ended])
        self._report(ended, verdicts)
        if _lets_others_run(ended):
            self._wakeups.look_again()

    async def _record_refused(self, lease: Lease, change: Change, error: Exception) -> dict[str, Verdict]:
        """Record an end that the database refuses as a failure, with the refusal as its error."""
        outcome = Failed(describe(error), retry=False, reason="its end could not be recorded")
        try:
            finish = Finish(lease.job, runner.change_of(lease, outcome, 0.0))
            return await self._shared.surely(ops.finish([finish]))
        except Exception:
            log.exception("job.not_recorded", extra=about(lease))
            return {}

    def _report(self, ended: Sequence[Ended], verdicts: Mapping[str, Verdict]) -> None:
        """Count attempts and emit their events; a success that has no listener is only counted."""
        shared, events, now = self._shared, self._shared.app.events, self._shared.clock()
        unheard, in_silence = 0, not events.hears_successes
        # Python 3.11 takes long to look up the member of an enum: do it once.
        lost, recorded, succeeded = Verdict.LOST, Verdict.RECORDED, State.SUCCEEDED
        for lease, change in ended:
            verdict = verdicts.get(lease.job.id, lost)
            if in_silence and verdict is recorded and change.state is succeeded:
                unheard += 1
                continue
            if verdict is not lost:
                shared.succeeded += change.state is State.SUCCEEDED
                shared.failed += change.error is not None
            events.attempted(lease, change, verdict, now)
            if change.state is State.SCHEDULED:
                self._wakeups.due_known = False
        if unheard:
            shared.succeeded += unheard
            events.counts["job.succeeded"] += unheard


def _is_well_done(sending: asyncio.Task[None]) -> bool:
    return sending.done() and not sending.cancelled() and sending.exception() is None


def _lets_others_run(ended: Sequence[Ended]) -> bool:
    """Whether a job may be ready now that was not before.

    The job was released or is retried at once, or it is the next of a lane or of a schedule. Or the end has added it:
    a callback, a dead letter, or the debounced job behind a key.
    """
    for lease, change in ended:
        job = lease.job
        if job.lane is not None or job.batch_id is not None or job.schedule is not None or job.key is not None:
            return True
        if change.state in LETS_OTHERS_RUN:
            return True
    return False
