"""The database of an app: its settings, its driver, and where an operation runs."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from duly import store
from duly.app.queue_depth import Depths
from duly.errors import AnswerLost, ConfigError
from duly.rules import keys, settings
from duly.store import caller, ops, sequence
from duly.store.driver import Driver
from duly.store.op import Op

T = TypeVar("T")

Place: TypeAlias = tuple[str, str | None]  # URL and schema


class Database:
    """Runs operations with the app's driver, or on a connection of the caller (`conn`).

    Nothing is read or opened before the first operation.
    """

    def __init__(self, given: Mapping[str, Any], new_id: keys.Ids | None = None) -> None:
        self._given = dict(given)
        self._folder = Path.cwd()
        self.new_id = keys.Ids() if new_id is None else new_id
        self.depths = Depths()
        settings.load(self._given, {})  # raises for a wrong value where it is written

    @property
    def place(self) -> Place:
        """Where it is; a file has no schema. An app may open one place twice."""
        url = self.settings.url
        return (url.dsn, self.settings.schema) if url.path is None else (url.path, None)

    @cached_property
    def settings(self) -> settings.Settings:
        """The settings, read on first use."""
        return settings.read(self._given, os.environ, self._folder)

    @cached_property
    def driver(self) -> Driver:
        """The driver, created on first use."""
        # Threads that come at the same time get the same driver.
        made: Driver = self.__dict__.setdefault("driver", store.open_driver(self.settings))
        return made

    def change(self, **given: Any) -> None:
        """Close the database, and use other settings from now on."""
        self.close()
        self._given.update(given)
        for name in ("driver", "settings"):
            self.__dict__.pop(name, None)

    def run(self, op: Op[T]) -> T:
        """Run an operation."""
        return self.driver.run(op)

    async def arun(self, op: Op[T]) -> T:
        """Run an operation, from a coroutine."""
        return await self.driver.arun(op)

    def add(self, op: Op[T], conn: Any) -> T:
        """Run an operation, in the caller's transaction if there is a `conn`."""
        return self.driver.run(op) if conn is None else caller.run(conn, op, schema=self._schema_of_callers())

    async def aadd(self, op: Op[T], conn: Any) -> T:
        """Run an operation, in the caller's transaction if there is a `conn`, from a coroutine."""
        if conn is None:
            return await self.driver.arun(op)
        return await caller.arun(conn, op, schema=self._schema_of_callers())

    def _schema_of_callers(self) -> str:
        """Return the schema for a caller's connection, which cannot be one to D1."""
        if self.settings.url.store == "d1":
            raise ConfigError(f"`conn=` cannot be a connection to {self.settings.url}: D1 has none. Leave it out")
        return self.settings.schema

    def admit(self, queue: str, count: int, conn: Any, *, before: int) -> None:
        """Raise QueueFull if the queue has no room for `count` jobs. If its depth is unknown, there is room."""
        if self.depths.lets_all_in(queue):
            return
        with suppress(AnswerLost):
            sequence.run(self.depths.admit(queue, count, before=before), lambda op: self.add(op, conn))

    async def aadmit(self, queue: str, count: int, conn: Any, *, before: int) -> None:
        """Raise QueueFull if the queue has no room, from a coroutine."""
        if self.depths.lets_all_in(queue):
            return
        with suppress(AnswerLost):
            await sequence.arun(self.depths.admit(queue, count, before=before), lambda op: self.aadd(op, conn))

    def woke(self) -> None:
        """Wake up workers of this process after a write on the caller's connection."""
        self.driver.mind_wal()
        self.driver.woke()

    def migrate(self) -> None:
        """Create or update the tables."""
        url = self.settings.url
        if url.store == "postgresql":
            from duly.store.postgres import schema

            schema.bring_up_to_date(url.dsn, schema=self.settings.schema)
        elif url.store == "d1":
            from duly.store.d1.driver import D1Driver

            assert isinstance(self.driver, D1Driver)
            self.driver.migrate()
        self.run(ops.clock())

    def close(self) -> None:
        """Close the database; the next operation opens it again."""
        if "driver" in self.__dict__:
            self.driver.close()


def refuse_schema(url: str | os.PathLike[str] | None, schema: str | None) -> None:
    """Raise for a schema that code gives beside a SQLite file, which has none."""
    if url is not None and schema is not None and settings.parse_url(url).path is not None:
        raise ConfigError("schema= is for PostgreSQL: give each tenant a file of its own")


class OtherDatabase(Database):
    """Another database of an app, with its settings. It is closed when nothing uses it any more."""

    def __init__(self, own: Database, url: str, schema: str | None) -> None:
        # Each maker of ids is known to forks for ever.
        super().__init__({**own._given, "url": url, "schema": schema or own._given.get("schema")}, own.new_id)
        self._folder = own._folder

    @cached_property
    def settings(self) -> settings.Settings:
        """The settings, read on first use. `listen_url` is the app's own server, and not this one."""
        return replace(settings.read(self._given, os.environ, self._folder), listen_url=None)

    @cached_property
    def driver(self) -> Driver:
        """The driver, created on first use."""
        made = super().driver
        weakref.finalize(self, _close_aside, made).atexit = False
        return made


def _close_aside(driver: Driver) -> None:
    """Close a driver in a thread of its own: garbage is collected in any thread, perhaps one of the driver's."""
    threading.Thread(target=driver.close, name="duly-close", daemon=True).start()
