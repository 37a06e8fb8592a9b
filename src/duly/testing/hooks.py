"""Gates: test helpers that every operation of an app passes on its way to the database.

A frozen clock and a planned crash each add a gate. While an app has gates, `app.tasks.database` is a `GatedDatabase`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

from duly.app.app import App
from duly.app.database import Database
from duly.app.lease import current
from duly.errors import ConfigError
from duly.store.driver import About, Driver, Hook, Watch
from duly.store.op import Op, Rows

T = TypeVar("T")

Send: TypeAlias = Callable[[Op[Any]], Rows]
Asend: TypeAlias = Callable[[Op[Any]], Awaitable[Rows]]


class Crashed(BaseException):
    """The simulated end of the process: raised where the process would die, and by everything it tries afterwards.

    It is no Exception, so a handler that catches every Exception does not survive it.
    """


class Gate:
    """Stands between an app and its database. This one passes every operation on unchanged."""

    dead = False

    def execute(self, op: Op[Any], send: Send) -> Rows:
        """Pass an operation on to the driver."""
        return send(op)

    async def aexecute(self, op: Op[Any], send: Send, asend: Asend) -> Rows:
        """Pass an operation on to the driver, from a coroutine."""
        return await asend(op)

    def stage(self, op: Op[Any]) -> Op[Any]:
        """Return the operation to run on a caller's own connection instead of `op`."""
        return op

    def staged(self, op: str) -> None:
        """Called when an operation has run on a caller's own connection and waits for its commit."""

    def stand(self, driver: Driver) -> None:
        """Called with the app's driver when the gate is added, and when the database is replaced."""


class Mortal(Gate):
    """A gate at which the app may die."""

    def __init__(self) -> None:
        self.dead = False
        self.mourners: list[Callable[[], None]] = []

    def die(self) -> None:
        """Stop every later operation, and notify those that would wait forever."""
        self.dead = True
        for mourner in list(self.mourners):
            mourner()


class GatedDriver(Driver):
    """Runs the operations of another driver after they have passed the gates. Everything else is the other's."""

    def __init__(self, driver: Driver, gates: list[Gate]) -> None:
        self._driver = driver
        self._gates = gates

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    @property
    def hook(self) -> Hook | None:
        """As the other driver."""
        return self._driver.hook

    @hook.setter
    def hook(self, hook: Hook | None) -> None:
        self._driver.hook = hook

    @property
    def one_writer(self) -> bool:  # type: ignore[override]
        """As the other driver."""
        return self._driver.one_writer

    @property
    def far(self) -> bool:  # type: ignore[override]
        """As the other driver."""
        return self._driver.far

    def execute(self, op: Op[Any]) -> Rows:
        """Run an operation past the gates, the last of them first."""
        return self._execute(self._gates, op)

    def _execute(self, gates: list[Gate], op: Op[Any]) -> Rows:
        if not gates:
            return self._driver.execute(op)
        *others, gate = gates
        return gate.execute(op, lambda op: self._execute(others, op))

    async def aexecute(self, op: Op[Any]) -> Rows:
        """Run an operation past the gates, from a coroutine."""
        return await self._aexecute(self._gates, op)

    async def _aexecute(self, gates: list[Gate], op: Op[Any]) -> Rows:
        if not gates:
            return await self._driver.aexecute(op)
        *others, gate = gates
        return await gate.aexecute(op, lambda op: self._execute(others, op), lambda op: self._aexecute(others, op))

    def watch(self, on_change: Callable[[], None]) -> Watch:
        """As the other driver."""
        return self._driver.watch(on_change)

    def mind_wal(self) -> None:
        """As the other driver."""
        self._driver.mind_wal()

    def about(self) -> About:
        """As the other driver."""
        return self._driver.about()

    def examine(self, *, deep: bool = False) -> list[Any]:
        """As the other driver."""
        return self._driver.examine(deep=deep)

    def close(self) -> None:
        """As the other driver."""
        self._driver.close()


class GatedDatabase(Database):
    """The database of an app behind its gates."""

    def __init__(self, inner: Database, gates: list[Gate]) -> None:
        self.inner, self.gates = inner, gates
        self.new_id, self.depths = inner.new_id, inner.depths
        self.settings, self.driver = inner.settings, GatedDriver(inner.driver, gates)

    def add(self, op: Op[T], conn: Any) -> T:
        """Run an operation past the gates, in the caller's transaction if there is a `conn`."""
        if conn is None or not op.writes:
            return super().add(op, conn)
        answer = super().add(self._stage(op), conn)
        self._staged(op)
        return answer

    async def aadd(self, op: Op[T], conn: Any) -> T:
        """Run an operation past the gates, from a coroutine."""
        if conn is None or not op.writes:
            return await super().aadd(op, conn)
        answer = await super().aadd(self._stage(op), conn)
        self._staged(op)
        return answer

    def _stage(self, op: Op[T]) -> Op[T]:
        for gate in reversed(self.gates):
            op = gate.stage(op)
        return op

    def _staged(self, op: Op[Any]) -> None:
        for gate in reversed(self.gates):
            gate.staged(op.name)


def gates(app: App) -> list[Gate]:
    """Return the gates of an app, the outermost last."""
    database = app.tasks.database
    return database.gates if isinstance(database, GatedDatabase) else []


@contextmanager
def standing(app: App, gate: Gate) -> Iterator[None]:
    """Add a gate to an app."""
    database = app.tasks.database
    if not isinstance(database, GatedDatabase):
        database = app.tasks.database = GatedDatabase(database, [])
    database.gates.append(gate)
    gate.stand(database.inner.driver)
    try:
        yield
    finally:
        database.gates.remove(gate)
        if not database.gates and app.tasks.database is database:
            app.tasks.database = database.inner


@contextmanager
def replaced(app: App, database: Database) -> Iterator[None]:
    """Give an app another database, behind the gates that it has."""
    before = app.tasks.database
    if isinstance(before, GatedDatabase):
        for gate in before.gates:
            gate.stand(database.driver)
        database = GatedDatabase(database, before.gates)
    app.tasks.database = database
    try:
        yield
    finally:
        database.close()
        app.tasks.database = before


def refuse_in_handler(what: str) -> None:
    """Raise inside a handler, where `what` would wait for itself."""
    lease = current.get()
    if lease is not None and not lease.over:
        raise ConfigError(
            f"{what} was called by the handler of {lease.job.task}, which runs in a worker already: "
            "call it from the test, when the handler has ended"
        )
