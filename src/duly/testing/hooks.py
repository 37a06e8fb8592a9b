"""Where the helpers reach into an app: gates that every operation passes on its way to the database.

An app has one gate for each clock that stands still and for each crash that is planned. They stand in front of its
driver, whichever that is at the time, and in front of connections that a caller brings along.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

from duly.app.lease import current
from duly.errors import ConfigError
from duly.store.op import Op, Rows

if TYPE_CHECKING:
    from duly.app.app import App
    from duly.store.driver import Driver

Send: TypeAlias = Callable[[Op[Any]], Rows]
Asend: TypeAlias = Callable[[Op[Any]], Awaitable[Rows]]


class Crashed(BaseException):
    """The process is as good as dead: raised where it would have been killed, and by all that it tries afterwards.

    No Exception, so that handlers which survive every error do not survive this one either.
    """


class Gate:
    """Stands between an app and its database. This one lets everything pass as it is."""

    dead = False

    def execute(self, op: Op[Any], send: Send) -> Rows:
        """Pass an operation on to the driver."""
        return send(op)

    async def aexecute(self, op: Op[Any], send: Send, asend: Asend) -> Rows:
        """Pass an operation on to the driver, from a coroutine."""
        return await asend(op)

    def stage(self, op: Op[Any]) -> Op[Any]:
        """Say what is run on a caller's own connection instead of `op`."""
        return op

    def staged(self, op: str) -> None:
        """Hear that an operation was run there, and waits for the caller's commit."""

    def stand(self, driver: Driver) -> None:
        """Hear which driver the app has now."""


class Mortal(Gate):
    """A gate at which the app may die."""

    def __init__(self) -> None:
        self.dead = False
        self.mourners: list[Callable[[], None]] = []

    def die(self) -> None:
        """Let nothing pass any more, and tell those who would wait for ever."""
        self.dead = True
        for mourner in list(self.mourners):
            mourner()


_gates: WeakKeyDictionary[App, list[Gate]] = WeakKeyDictionary()


def gates(app: App) -> list[Gate]:
    """Give the gates of an app, the outermost last."""
    return _gates.setdefault(app, [])


@contextmanager
def standing(app: App, gate: Gate) -> Iterator[None]:
    """Have everything that the app asks of its database pass a gate."""
    gates(app).append(gate)
    attach(app)
    try:
        yield
    finally:
        gates(app).remove(gate)
        if not gates(app):
            _detach(app)


def attach(app: App) -> None:
    """Put the gates of an app, if it has any, in front of the driver that it has now."""
    if not gates(app):
        return
    driver = app.driver
    for gate in gates(app):
        gate.stand(driver)
    if "execute" not in driver.__dict__:
        execute, aexecute = driver.execute, driver.aexecute
        driver.__dict__["execute"] = lambda op: _execute(gates(app), op, execute)
        driver.__dict__["aexecute"] = lambda op: _aexecute(gates(app), op, execute, aexecute)
    if "_add" not in app.__dict__:
        app.__dict__["_add"] = partial(_add, app, app._add)
        app.__dict__["_aadd"] = partial(_aadd, app, app._aadd)


def _detach(app: App) -> None:
    for name in ("execute", "aexecute"):
        app.driver.__dict__.pop(name, None)
    for name in ("_add", "_aadd"):
        app.__dict__.pop(name, None)


def _execute(gates: list[Gate], op: Op[Any], send: Send) -> Rows:
    if not gates:
        return send(op)
    *others, gate = gates
    return gate.execute(op, lambda op: _execute(others, op, send))


async def _aexecute(gates: list[Gate], op: Op[Any], send: Send, asend: Asend) -> Rows:
    if not gates:
        return await asend(op)
    *others, gate = gates
    return await gate.aexecute(op, lambda op: _execute(others, op, send), lambda op: _aexecute(others, op, send, asend))


def _add(app: App, add: Callable[..., Any], op: Op[Any], conn: Any) -> Any:
    if conn is None or not op.writes:
        return add(op, conn)
    answer = add(stage(app, op), conn)
    staged(app, op.name)
    return answer


async def _aadd(app: App, aadd: Callable[..., Awaitable[Any]], op: Op[Any], conn: Any) -> Any:
    if conn is None or not op.writes:
        return await aadd(op, conn)
    answer = await aadd(stage(app, op), conn)
    staged(app, op.name)
    return answer


def stage(app: App, op: Op[Any]) -> Op[Any]:
    """Lead an operation for a caller's own connection past the gates."""
    for gate in reversed(gates(app)):
        op = gate.stage(op)
    return op


def staged(app: App, op: str) -> None:
    """Tell the gates which operation was run there."""
    for gate in reversed(gates(app)):
        gate.staged(op)


def refuse_in_handler(what: str) -> None:
    """Refuse what a handler must not do: it would wait for itself."""
    lease = current.get()
    if lease is not None and not lease.over:
        raise ConfigError(
            f"{what} was called by the handler of {lease.job.task}, which runs in a worker already: "
            "call it from the test, when the handler has ended"
        )
