"""A frozen clock: one app's view of the database's clock, which only a test moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from duly.errors import ConfigError
from duly.rules.checks import moment
from duly.rules.durations import Duration, to_ms
from duly.store import ops
from duly.store.op import Op, Rows
from duly.testing import hooks
from duly.testing.hooks import Asend, Gate, Send

if TYPE_CHECKING:
    from duly.app.app import App


@contextmanager
def frozen(app: App, at: datetime | None = None) -> Iterator[Clock]:
    """Freeze the database's clock for this app, at a moment or at the present.

    Schedules in code count from that moment. A delay of an hour passes with `clock.advance("1h")`. The clock that your
    own code reads does not change, nor does `timeout=`, which counts real time.
    """
    at_ms = app.driver.run(ops.clock()) if at is None else moment(at, "frozen: at=")
    clock, before = Clock(app, at_ms), app.schedules.present
    app.schedules.present = lambda: clock.ms
    try:
        with hooks.standing(app, clock.gate):
            if app.schedules.in_code:  # they count from here, not from the first drain
                app.schedules.reconcile()
            yield clock
    finally:
        app.schedules.present = before


class Clock:
    """A clock that a test moves."""

    def __init__(self, app: App, at_ms: int) -> None:
        self._app = app
        self.ms = at_ms
        self.gate = _Dating(self)

    @property
    def now(self) -> datetime:
        """The moment of the clock, in UTC."""
        return datetime.fromtimestamp(self.ms / 1000, UTC)

    def advance(self, duration: Duration) -> datetime:
        """Move the clock forward by "5m", seconds or a timedelta. Returns the new moment."""
        self.move(self.ms + to_ms(duration, what="advance: the duration"))
        return self.now

    def set(self, at: datetime) -> datetime:
        """Move the clock forward to a moment, and return it."""
        at_ms = moment(at, "set: the moment")
        if at_ms < self.ms:
            raise ConfigError(f"set: {at} is before {self.now}, and the clock does not go back. Freeze it earlier")
        self.move(at_ms)
        return self.now

    def move(self, at_ms: int) -> None:
        """Set the moment of the clock, and wake up workers that sleep until a job is due."""
        self.ms = at_ms
        self._app.driver.woke()

    def __repr__(self) -> str:
        return f"<clock at {self.now.isoformat()}>"


def clock_of(app: App) -> Clock | None:
    """Return the clock that was last frozen for an app, if any."""
    for gate in reversed(hooks.gates(app)):
        if isinstance(gate, _Dating):
            return gate.clock
    return None


class _Dating(Gate):
    """Passes the moment of the clock to every operation that would read the database's clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def execute(self, op: Op[Any], send: Send) -> Rows:
        return send(self.stage(op))

    async def aexecute(self, op: Op[Any], send: Send, asend: Asend) -> Rows:
        return await asend(self.stage(op))

    def stage(self, op: Op[Any]) -> Op[Any]:
        if op.params.get("now", 0) is not None:  # it has its own moment, or needs none
            return op
        return replace(op, params={**op.params, "now": self.clock.ms})
