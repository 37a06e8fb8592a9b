"""The database's clock as one app sees it, standing still until a test moves it."""

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
    """Have the database's clock stand still for this app, at a moment or at the present one.

    Schedules in code count from that moment. An hour's delay then passes with `clock.advance("1h")`. Your own code
    reads its own clock, and this one does not change it; neither does it change `timeout=`, which is about real time.
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
        """The moment at which the clock stands, in UTC."""
        return datetime.fromtimestamp(self.ms / 1000, UTC)

    def advance(self, duration: Duration) -> datetime:
        """Move the clock on, by "5m", seconds or a timedelta, and give the new moment."""
        self.move(self.ms + to_ms(duration, what="advance: the duration"))
        return self.now

    def set(self, at: datetime) -> datetime:
        """Move the clock on to a moment, and give it."""
        at_ms = moment(at, "set: the moment")
        if at_ms < self.ms:
            raise ConfigError(f"set: {at} is before {self.now}: a database's clock does not go back; freeze it earlier")
        self.move(at_ms)
        return self.now

    def move(self, at_ms: int) -> None:
        """Have the clock stand at another moment, and wake workers that sleep until something is due."""
        self.ms = at_ms
        self._app.driver.woke()

    def __repr__(self) -> str:
        return f"<clock at {self.now.isoformat()}>"


def clock_of(app: App) -> Clock | None:
    """Give the clock that was last frozen for an app, if one is."""
    for gate in reversed(hooks.gates(app)):
        if isinstance(gate, _Dating):
            return gate.clock
    return None


class _Dating(Gate):
    """Binds the clock's moment to every operation that would read the database's own."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def execute(self, op: Op[Any], send: Send) -> Rows:
        return send(self.stage(op))

    async def aexecute(self, op: Op[Any], send: Send, asend: Asend) -> Rows:
        return await asend(self.stage(op))

    def stage(self, op: Op[Any]) -> Op[Any]:
        if op.params.get("now", 0) is not None:  # it has a moment of its own, or asks for none
            return op
        return replace(op, params={**op.params, "now": self.clock.ms})
