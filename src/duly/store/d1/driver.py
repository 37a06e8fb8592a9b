"""The driver of a D1 database behind a gateway Worker.

One request is one batch, and one batch is one transaction. Operations of one process share requests.

A request can be lost, doubled, or executed late. So each one begins with a deadline by the database's clock, after
which the batch rolls back. After a lost answer, an operation is repeated at once. A claim is repeated only after the
deadline of the first one, which could take jobs until then.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from duly.errors import AnswerLost, DulyError, SchemaMismatch, StoreError, StoreRefused, StoreUnavailable
from duly.store import health, migrate
from duly.store.d1 import catalogue
from duly.store.d1.requests import Unit, requests, unit
from duly.store.d1.translate import TooLate, translate
from duly.store.d1.wire import Address, Line, Trouble
from duly.store.driver import About, Driver, Finding
from duly.store.group_commit import Gathering, Outcome, Word, own_error, rows_of
from duly.store.op import Op, Row, Rows

T = TypeVar("T")

# The pauses before each repetition, in seconds.
PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8)
TIMEOUT_SECONDS = 10.0
MOST_STATEMENTS = 45  # in one request; D1's free plan allows 50
CLOCK_STEP_SECONDS = 0.005  # the database's clock has whole milliseconds
THREADS = 4
# A request that fails so may succeed as it is. After other errors, each of its operations is run alone.
NOT_ITS_FAULT = (AnswerLost, StoreUnavailable)
_drivers: weakref.WeakSet[D1Driver] = weakref.WeakSet()


class Sender(Protocol):
    """Sends batches for the driver."""

    def send(self, lines: Sequence[Line], seconds: float) -> list[list[Row]]:
        """Run a batch, and return the rows of each statement."""

    def close(self) -> None:
        """Close the connections."""


class D1Driver(Driver):
    """Runs operations on one D1 database. Connects to nothing before the first one."""

    one_writer = True
    far = True
    linger_s = 0.025  # for which a read or a claim waits for others to share its request

    def __init__(
        self,
        address: Address,
        wire: Sender,
        *,
        timeout_s: float = TIMEOUT_SECONDS,
        most_statements: int = MOST_STATEMENTS,
        pauses: tuple[float, ...] = PAUSES,
    ) -> None:
        super().__init__(pauses=pauses)
        self.address = address
        self._wire = wire
        self._timeout_s = timeout_s
        self._most_statements = most_statements
        self._reset()
        _drivers.add(self)

    def _reset(self) -> None:
        self._threads: dict[bool, ThreadPoolExecutor] = {}
        self._one_start = threading.Lock()
        self._gathering = Gathering(self._commit_together, lost=self._lost, start=self._start)
        self._clock: tuple[int, float] | None = None  # what the database's clock showed, and when, by ours
        self._unknown_until = 0.0  # until when a request without an answer could still be executed

    def execute(self, op: Op[Any]) -> Rows:
        """Run `op` once, in a request with others; an urgent one alone."""
        time.sleep(self._first_try_runs(op))
        outcome: Outcome = Word.ALONE if op.urgent else self._gathering.run(op)
        return self._alone(op) if outcome is Word.ALONE else rows_of(outcome)

    async def aexecute(self, op: Op[Any]) -> Rows:
        """Run `op` once like `execute`, without blocking the event loop."""
        is_look = not op.writes or op.name == "claim"
        linger = self.linger_s if is_look and not self._gathering.led else 0.0
        await asyncio.sleep(max(linger, self._first_try_runs(op)))
        outcome: Outcome = Word.ALONE if op.urgent else await self._gathering.arun(op)
        if outcome is Word.ALONE:
            return await asyncio.wrap_future(self._start(lambda: self._alone(op), urgent=op.urgent))
        return rows_of(outcome)

    def _first_try_runs(self, op: Op[Any]) -> float:
        """Return for how long the first try of a claim could still take jobs, in seconds."""
        return max(0.0, self._unknown_until - time.monotonic()) if op.repeated and op.name == "claim" else 0.0

    def _start(self, work: Callable[[], T], *, urgent: bool = False) -> Future[T]:
        with self._one_start:
            if urgent not in self._threads:
                self._threads[urgent] = ThreadPoolExecutor(1 if urgent else THREADS, thread_name_prefix="duly-d1")
            return self._threads[urgent].submit(work)

    def close(self) -> None:
        """Close every connection. The next operation opens one again."""
        with self._one_start:
            threads, self._threads = self._threads, {}
        for executor in threads.values():
            executor.shutdown()
        self._wire.close()

    def abandon(self) -> None:
        """Forget every connection and thread, in a forked child: the parent still uses them."""
        self._abandon_watches()
        self._reset()
        self._wire.close()

    def about(self) -> About:
        """Ask the database for its schema, and return which database this is."""
        number = migrate.version(self.meta())
        return About("D1", str(self.address), f"D1, statements {catalogue.digest()[:12]}", str(number), "full")

    def examine(self, *, deep: bool = False) -> list[Finding]:
        """Check the token, the Worker's version, the schema and the clock. There is no deeper check."""
        number = migrate.version(self._begin())
        assert self._clock is not None
        return [
            health.ok("access", f"the gateway at {self.address.host} takes the token and serves this version"),
            health.schema(number, migrate.newest("sqlite")),
            health.clock(self._clock[0] - time.time() * 1000),
        ]

    # Migrations

    def meta(self) -> Mapping[str, str]:
        """Read `duly_meta`; empty if the database has no tables of duly yet."""
        try:
            return dict(self._request([Line("meta", 0)], "migrate")[0])  # type: ignore[arg-type]
        except SchemaMismatch:
            return {}

    def migrate(self) -> tuple[migrate.Migration, ...]:
        """Apply pending migrations, each in one batch, and return them. Concurrent calls do no harm."""
        applied = []
        while steps := migrate.pending("sqlite", self.meta()):
            step = steps[0]
            try:
                self._request([Line("migration", step.number)], "migrate")
                applied.append(step)
            except StoreError:  # the answer was lost, or another process was faster
                if migrate.version(self.meta()) < step.number:
                    raise
        migrate.check("sqlite", self.meta(), str(self.address))
        return tuple(applied)

    def _begin(self) -> Mapping[str, str]:
        """Read the database's clock, and check its schema."""
        url = f"d1://{self.address}"
        try:
            [(now,)], rows = self._request([Line("deadline", 0, (None,)), Line("meta", 0)], "connect")
        except SchemaMismatch:
            now, rows = 0, []
        meta: dict[str, str] = dict(rows)  # type: ignore[arg-type]
        migrate.check("sqlite", meta, url, remedy=f"duly migrate --url {url}")
        self._clock = (now, time.monotonic())
        return meta

    # Requests

    def _send(self, lines: Sequence[Line], op: str) -> list[list[Row]]:
        """Send a batch, with a new deadline each time that it was too late."""
        for pause in self._pauses:
            try:
                return self._send_once(lines, op)
            except TooLate:
                time.sleep(pause * random.random())  # noqa: S311
        return self._send_once(lines, op)

    def _send_once(self, lines: Sequence[Line], op: str) -> list[list[Row]]:
        if self._clock is None:
            self._begin()
        clock = self._clock
        assert clock is not None
        ends_at = time.monotonic() + self._timeout_s
        # The clock has shown this at some time before its answer came: the deadline may be early, and is never late.
        until = clock[0] + int((ends_at - clock[1]) * 1000)
        try:
            [(now,)], *rows = self._request([Line("deadline", 0, (until,)), *lines], op)
        except AnswerLost:
            self._unknown_until = max(self._unknown_until, ends_at + CLOCK_STEP_SECONDS)
            raise
        except TooLate:
            self._clock = None  # it may have been set
            raise
        self._clock = (now, time.monotonic())
        return rows

    def _request(self, lines: Sequence[Line], op: str) -> list[list[Row]]:
        try:
            return self._wire.send(lines, self._timeout_s)
        except Trouble as trouble:
            error = translate(trouble, op, self.address)
            if isinstance(error, AnswerLost | StoreUnavailable):
                self.failures += 1
            raise error from trouble

    # Operations

    def _alone(self, op: Op[Any]) -> Rows:
        return [row for rows in self._send(unit(op).lines, op.name) for row in rows]

    def _commit_together(self, batch: Sequence[Op[Any]]) -> Sequence[Outcome]:
        """Send operations in as few requests as they fit in."""
        outcomes: list[Outcome] = [()] * len(batch)
        try:
            found = list(requests(batch, self._most_statements - 1))  # without the deadline
        except StoreRefused:
            return [Word.ALONE] * len(batch)
        for request in found:
            self._fill(outcomes, request)
        return outcomes

    def _fill(self, outcomes: list[Outcome], request: Sequence[Unit]) -> None:
        """Send a request and enter its outcomes. If the database refuses it, each operation is run alone."""
        places = [place for one in request for place in one.places]
        try:
            rows = iter(self._send([line for one in request for line in one.lines], request[0].name))
        except DulyError as error:
            alone = len(places) > 1 and isinstance(error, StoreError) and not isinstance(error, NOT_ITS_FAULT)
            for place in places:
                outcomes[place] = Word.ALONE if alone else own_error(error)
            return
        for one in request:
            own = [row for _ in one.lines for row in next(rows)]
            if len(one.places) == 1:
                outcomes[one.places[0]] = own

    def _lost(self, op: Op[Any], error: BaseException) -> Exception:
        what = f"the thread that sent it with others to {self.address} was interrupted"
        return AnswerLost(f"{op.name}: {what} ({error!r})")


def _abandon_all() -> None:
    for driver in list(_drivers):
        driver.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
