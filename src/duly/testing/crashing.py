"""Simulated crashes between any two statements.

A crash stops one app, not the interpreter. From that point on, its operations do not reach the database, its open
transaction is rolled back, and its callers get `Crashed`. The memory of the test survives, to count effects.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from duly.errors import ConfigError
from duly.store.driver import Driver, Point
from duly.store.op import Op, Rows
from duly.testing import hooks
from duly.testing.hooks import Asend, Crashed, Mortal, Send

if TYPE_CHECKING:
    from duly.app.app import App

# Operations that workers run in the background, so how often they pass a point depends on timing.
BESIDE = frozenset(
    {"register", "leave", "extend", "promote", "park", "wake", "expired_leases", "expirable", "next_due", "prune"}
)


class CrashPoint(NamedTuple):
    """A point before or after a statement or a commit. `time` counts how often it was passed."""

    moment: str  # "before" or "after"
    op: str
    section: str = "commit"
    statement: int = 0
    time: int = 1

    def __str__(self) -> str:
        what = self.section if self.section in ("commit", STAGED) else f"{self.section}[{self.statement}]"
        return f"{self.moment} {self.op}.{what}" + (f" #{self.time}" if self.time > 1 else "")


# The section of an operation on a caller's own connection, before the caller commits.
STAGED = "staged"


def crash_points(app: App, scenario: Callable[[], object]) -> list[CrashPoint]:
    """Run a scenario, and list the points its jobs pass: before and after each statement and commit."""
    passage = _Passage(app)
    with passage.watched():
        scenario()
    return passage.passed


@contextmanager
def crash(app: App, at: CrashPoint) -> Iterator[None]:
    """Crash the code inside the `with` at a point. Afterwards the app works again, like a new process."""
    if not isinstance(at, CrashPoint):
        raise ConfigError(f"crash: at= is {at!r}: give one of testing.crash_points(app, scenario)")
    passage = _Passage(app, at)
    try:
        with passage.watched():
            yield
    except BaseException as error:
        if not (passage.dead and _is_crash(error)):
            raise
    if not passage.dead:
        passed = ", ".join(map(str, passage.passed)) or "none"
        raise AssertionError(f"crash: the point {at} was never reached; those passed are: {passed}")


def _is_crash(error: BaseException) -> bool:
    """Return whether an error, or every error of a group, is the crash."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(Crashed)[1] is None
    return isinstance(error, Crashed)


class _Passage(Mortal):
    """Runs one operation at a time and records the points it passes."""

    def __init__(self, app: App, at: CrashPoint | None = None) -> None:
        super().__init__()
        self._app = app
        self._at = at
        self.passed: list[CrashPoint] = []
        self._times: Counter[Point] = Counter()
        self._one = threading.Lock()
        self._noting = False
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="duly-crash")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Add this gate to the app, and clean up afterwards."""
        hook = self._app.driver.hook
        with hooks.standing(self._app, self):
            try:
                yield
            finally:
                self._threads.shutdown()
                self._app.driver.hook = hook

    def stand(self, driver: Driver) -> None:
        driver.hook = self._hook

    def execute(self, op: Op[Any], send: Send) -> Rows:
        with self._one:
            self._check()
            passed = len(self.passed)
            self._noting = (op.writes or op.name == "settle") and op.name not in BESIDE and not op.params.get("alone")
            rows = send(op)
            if op.name == "claim" and not rows:
                self._forget(passed)
            return rows

    async def aexecute(self, op: Op[Any], send: Send, asend: Asend) -> Rows:
        # One thread keeps the order of the calls.
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.execute, op, send)

    def stage(self, op: Op[Any]) -> Op[Any]:
        self._pass(Point("before", op.name, STAGED, 0))
        return op

    def staged(self, op: str) -> None:
        self._pass(Point("after", op, STAGED, 0))

    def _hook(self, point: Point) -> None:
        self._check()
        if self._noting:
            self._pass(point)

    def _pass(self, point: Point) -> None:
        self._check()
        self._times[point] += 1
        here = CrashPoint(*point, self._times[point])
        self.passed.append(here)
        if here == self._at:
            self.die()
            raise Crashed(f"crashed {here}")

    def _check(self) -> None:
        if self.dead:
            raise Crashed(f"crashed {self._at}")

    def _forget(self, passed: int) -> None:
        """Remove the points of a claim without jobs: their number depends on timing."""
        for point in self.passed[passed:]:
            self._times[Point(*point[:4])] -= 1
        del self.passed[passed:]
