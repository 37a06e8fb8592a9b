"""Writes an example of how a task is enqueued, with arguments that it would take."""

from __future__ import annotations

import enum
import inspect
import json
import shlex
import types
import typing
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from duly.app.task import Task
from duly.errors import BadArguments
from duly.rules import codec

# What a text is probably about, by a part of its parameter's name.
TEXTS = {
    "mail": "ada@example.com",
    "url": "https://example.com",
    "path": "data.csv",
    "file": "data.csv",
    "name": "Ada",
    "user": "ada",
    "date": "2030-01-31",
}
VALUES: dict[Any, Any] = {
    int: 1,
    float: 1.5,
    bool: True,
    Decimal: "9.99",
    UUID: "0190a6b2-7c3d-7e4f-8a1b-2c3d4e5f6a7b",
    datetime: "2030-01-31T12:00:00Z",
    date: "2030-01-31",
    time: "12:00:00",
    timedelta: "PT5M",
    type(None): None,
}


def shape_of(task: Task[..., Any, Any]) -> str:
    """Write a task as a call: its name and what it takes. A default is not shown, as it may be a secret."""
    return f"{task.name}({', '.join(map(_shape, _parameters(task)))})"


def command_of(target: str, task: Task[..., Any, Any], *more: str) -> str:
    """Write the command that enqueues a task."""
    payload = payload_of(task)
    shown = "'{…}'" if payload is None else shlex.quote(payload) if payload != "{}" else ""
    words = ["duly enqueue", shlex.quote(target), shlex.quote(task.name), shown, shlex.join(more)]
    return " ".join(filter(None, words))


def payload_of(task: Task[..., Any, Any]) -> str | None:
    """Write arguments that the task takes; None where they cannot be guessed."""
    wanted = [one for one in _parameters(task) if one.default is one.empty and one.kind not in _VARIED]
    compiled = task.definition.codec
    text = json.dumps({one.name: _value(compiled.named[one.name].hint, one.name) for one in wanted}, ensure_ascii=False)
    try:
        compiled.decode_call(text)
    except BadArguments:
        return None
    return text


_VARIED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters(task: Task[..., Any, Any]) -> list[inspect.Parameter]:
    return list(task.definition.codec.signature.parameters.values())


def _shape(parameter: inspect.Parameter) -> str:
    bare = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
    hint = parameter.annotation
    said = "" if hint is parameter.empty else f": {hint if isinstance(hint, str) else codec.name_of(hint)}"
    return f"{bare}{said}{'' if parameter.default is parameter.empty else ' = …'}"


def _value(hint: Any, name: str) -> Any:
    """Think of a value of a type."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in (str, Any):
        return next((text for part, text in TEXTS.items() if part in name.lower()), "text")
    if origin in (typing.Annotated, typing.Union, types.UnionType):
        return _value(inner[0], name)
    if origin is typing.Literal:
        return inner[0]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return next(iter(hint)).value
    kind = origin or hint
    if kind in (list, set, frozenset, tuple) and inner:
        return [_value(one, name) for one in inner if one is not Ellipsis]
    if kind in (list, set, frozenset, tuple):
        return []
    return {} if kind is dict else VALUES.get(kind)
