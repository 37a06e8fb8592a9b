"""The tasks of an app by name, and the jobs that the end of another job adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from duly.app.database import Database
from duly.app.define import define
from duly.app.definition import Definition
from duly.app.enqueue import Enqueuing
from duly.app.task import Task
from duly.errors import BadArguments, ConfigError
from duly.rules.rate import lane_of


class Tasks(Mapping[str, Task[..., Any, Any]]):
    """The tasks of an app, by their names and aliases, and the database that keeps their jobs."""

    def __init__(self, database: Database, definitions: dict[str, Definition] | None = None) -> None:
        self.database = database
        self.enqueuing = Enqueuing()
        self.definitions = {} if definitions is None else definitions  # of an app on all its databases
        self._known: dict[str, Task[..., Any, Any]] = {}

    def __getitem__(self, name: str) -> Task[..., Any, Any]:
        task = self._known.get(name)
        if task is None:
            definition = self.definitions[name]
            task = Task(self, definition) if name == definition.name else self[definition.name]
            task = self._known.setdefault(name, task)
        return task

    def __iter__(self) -> Iterator[str]:
        return iter(self.definitions)

    def __len__(self) -> int:
        return len(self.definitions)

    def __repr__(self) -> str:
        return f"<tasks {', '.join(self)}>"

    def knows(self, definition: Definition) -> bool:
        """Return whether a task is one of this app, on whichever of its databases."""
        return self.definitions.get(definition.name) is definition

    def define(self, handler: Callable[..., Any], options: Mapping[str, Any]) -> Task[..., Any, Any]:
        """Make a task of a function, and add it."""
        if isinstance(handler, Task):
            name = options.get("name") or handler.name
            raise ConfigError(f"{name} is a task already: decorate the function once, and give all options there")
        definition = define(handler, options)
        on_dead = definition.on_dead
        if on_dead is not None and not isinstance(on_dead, Task | str):
            raise ConfigError(
                f"{definition.name}: on_dead= is of type {type(on_dead).__name__}: give a task, or the name of one"
            )
        return self.add(definition)

    def add(self, definition: Definition) -> Task[..., Any, Any]:
        """Add a task by its definition; raise if one of its names is taken."""
        names = (definition.name, *definition.aliases)
        for name in names:
            if name in self.definitions:
                other = self.definitions[name].handler
                raise ConfigError(
                    f"a task named {name!r} is there already ({other.__module__}.{other.__qualname__}): "
                    "give one of them another name="
                )
        self.definitions.update(dict.fromkeys(names, definition))
        return self[definition.name]

    def remove(self, task: Task[..., Any, Any]) -> None:
        """Remove a task that was just added."""
        for name in (task.name, *task.definition.aliases):
            del self.definitions[name]
            self._known.pop(name, None)

    def dead_letter(self, definition: Definition) -> str | None:
        """Return the job to add when a job of this task dies, as JSON."""
        on_dead = definition.on_dead
        if on_dead is None:
            return None
        task = self.get(on_dead) if isinstance(on_dead, str) else on_dead
        if task is None:
            raise ConfigError(f"{definition.name}: on_dead={on_dead!r} names no task of this app")
        try:
            task.definition.codec.decode_call('{"job_id": ""}')
        except BadArguments as error:
            raise ConfigError(
                f"{definition.name}: on_dead= is called with job_id, which does not fit: {error}"
            ) from error
        return callback(task, f"{definition.name}: on_dead=")


def callback(task: Task[..., Any, Any], what: str, **more: str | None) -> str:
    """Return the job that the end of another job adds, as JSON. It is stored with that job, so no crash loses it."""
    if (key := task.definition.lane_key) is not None:
        option = "cap_key" if key is task.definition.cap_key else "ordering_key"
        raise ConfigError(f"{what} {task.name} has {option}=, which is made of arguments that a callback has not")
    terms = task._terms()
    names = ("task", "queue", "priority", "max_attempts", "lease_ms", "keep_ms", "result_ttl_ms")
    lane = lane_of(task.name) if task.definition.is_laned else None
    return msgspec.json.encode({name: getattr(terms, name) for name in names} | {"lane": lane} | more).decode()
