"""Cuts a batch of operations into requests, and writes their statements by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from duly.errors import StoreRefused
from duly.model import Terms
from duly.store.d1.wire import Line
from duly.store.group_commit import join, size_of
from duly.store.op import Op
from duly.store.statements import spell

MOST_JOINED_CHARS = 400_000  # in one parameter: a value has at most 2,000,000 bytes
MOST_BYTES = 2_000_000


@dataclass(slots=True)
class Unit:
    """An operation of a request, or several enqueues joined into one, which has no rows."""

    name: str
    places: list[int]
    lines: list[Line]


def requests(batch: Sequence[Op[Any]], most_statements: int) -> Iterator[list[Unit]]:
    """Yield requests of whole operations, none with more statements unless an operation has more."""
    request: list[Unit] = []
    count = 0
    for unit in _units(batch):
        if request and count + len(unit.lines) > most_statements:
            yield request
            request, count = [], 0
        request.append(unit)
        count += len(unit.lines)
    if request:
        yield request


def unit(op: Op[Any]) -> Unit:
    """Return an operation that is sent alone."""
    return Unit(op.name, [0], _lines(_repeatable(op)))


def _units(batch: Sequence[Op[Any]]) -> Iterator[Unit]:
    alike: dict[tuple[Terms, int | None], list[int]] = {}
    for place, op in enumerate(batch):
        if op.alike is None:
            yield Unit(op.name, [place], _lines(_repeatable(op)))
        else:
            alike.setdefault((op.alike, op.params["now"]), []).append(place)
    for places in alike.values():
        for part in _parts(batch, places):
            yield Unit("enqueue", part, _lines(_joined([batch[place] for place in part])))


def _parts(batch: Sequence[Op[Any]], places: Sequence[int]) -> Iterator[list[int]]:
    """Cut enqueues that can be joined so that their jobs fit into one parameter."""
    part: list[int] = []
    chars = 0
    for place in places:
        size = size_of(batch[place])
        if part and chars + size > MOST_JOINED_CHARS:
            yield part
            part, chars = [], 0
        part.append(place)
        chars += size
    yield part


def _joined(ops: Sequence[Op[Any]]) -> Op[Any]:
    """Join enqueues in the form that can be executed twice."""
    if len(ops) == 1:
        return _repeatable(ops[0])
    forms = [again for op in ops if (again := op.again) is not None]
    ids = f"[{','.join(form.params['ids'][1:-1] for form in forms)}]"
    return replace(forms[0], params={**join(ops).params, "ids": ids})


def _repeatable(op: Op[Any]) -> Op[Any]:
    """Return an enqueue in the form that can be executed twice, as a proxy may send a request twice."""
    again = op.again
    if again is None or "undo_finished" not in again.sections:
        return op
    return replace(again, params={**again.params, **op.params})  # a test may have set the time of `op`


def _lines(op: Op[Any]) -> list[Line]:
    return [
        Line(section, number, tuple(_value(op.params[name], op.name) for name in statement.parameters))
        for section in op.sections
        for number, statement in enumerate(spell("sqlite", section, "numbered"))
    ]


def _value(value: Any, op: str) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str) and 4 * len(value) > MOST_BYTES:
        size = len(value.encode(errors="surrogatepass"))
        if size > MOST_BYTES:
            raise StoreRefused(f"{op}: a value has {size:,} bytes, and D1 takes {MOST_BYTES:,}: send less at once")
    return value
