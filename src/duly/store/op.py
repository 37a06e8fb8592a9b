"""One operation on the database, as a value: sections of SQL, their parameters, and the reader of their rows.

A driver executes an operation and commits it as one. The modules that make operations do no I/O. So the sync client,
the async worker, a caller's own transaction and Cloudflare D1 share them.

A list travels as one JSON text. That is the fastest way into PostgreSQL, and the only one on D1, where each number
would become a float.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar
from uuid import UUID

import msgspec

from duly.model import Change, Claimed, State, Terms
from duly.rules import failure

T = TypeVar("T")
Row: TypeAlias = Sequence[Any]
Rows: TypeAlias = Sequence[Row]

_json = msgspec.json.Encoder().encode

FIRST_ID, LAST_ID = "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"
LOWEST_PRIORITY, HIGHEST_PRIORITY = -(2**31), 2**31 - 1

# All endings share this tail. `ended_delete` comes last: until then the sections find the row in duly_job.
TAIL = (
    "ended_key",
    "ended_next",
    "ended_batch",
    "ended_callbacks",
    "ended_schedule",
    "ended_event",
    "ended_done",
    "ended_delete",
)


# No code changes one. But a frozen one takes 2 µs longer to make, and every enqueue makes two.
@dataclass(slots=True)
class Op(Generic[T]):
    """One operation: sections of SQL that commit as one, their parameters, and the reader of their rows.

    - `read` gets the rows of all statements in order.
    - `repeat` replaces the operation after a lost answer, where the repetition must first look for what was written.
      It is an operation, or makes one.
    - `once` forbids the repetition: it could not find out whether the first try was written.
    - `bare` makes what is sent instead when the database refuses the data.
    - `follow` makes a second operation when the answer leaves a question open.
    - `wakes` means that jobs may be ready afterwards, so idle workers wake up.
    - `alike`: plain enqueues with equal terms here can be sent as one.
    - `repeated`: an answer to it was lost. The next answer must be as durable, even if nothing is left to write.
    """

    name: str
    sections: tuple[str, ...]
    params: Mapping[str, Any]
    read: Callable[[Rows], T]
    writes: bool = True
    urgent: bool = False
    wakes: bool = False
    once: bool = False
    repeat: Op[T] | Callable[[], Op[T]] | None = None
    bare: Callable[[], Op[T]] | None = None
    follow: Callable[[T], Op[T] | None] | None = field(default=None)
    alike: Terms | None = None
    repeated: bool = False

    @property
    def again(self) -> Op[T] | None:
        """The operation to send after a lost answer; None: the same one."""
        return self.repeat() if callable(self.repeat) else self.repeat


class Held(NamedTuple):
    """A job and the token of its lease: a write that names them changes nothing once the token is another."""

    id: str
    token: int


class Finish(NamedTuple):
    """A leased job and the change to record."""

    job: Claimed
    change: Change


def repeatable(
    name: str,
    sections: tuple[str, ...],
    params: Mapping[str, Any],
    read: Callable[[Rows], T],
    *,
    look: str,
    wakes: bool = False,
) -> Op[T]:
    """Make an operation whose repetition changes nothing, and reads by the section `look` what the first try did."""
    again = Op(name, (*sections, look), params, read, wakes=wakes)
    return replace(again, sections=sections, repeat=again)


def ending(
    ids: Sequence[str], by: str | None = None, why: str | None = None, *, batches: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the parameters of `TAIL`."""
    return {
        "ids": json_text(list(dict.fromkeys(ids))),
        "by": clean(by),
        "why": clean(why),
        "batches": json_text(sorted(batches)),
    }


def columns(*names: str) -> Callable[[Row], dict[str, Any]]:
    """Return a function that makes a row a dict by the names of its columns."""
    return lambda row: dict(zip(names, row, strict=True))


def record(kind: type[T], values: Mapping[str, Any]) -> T:
    """Make a record of the values that have the names of its fields."""
    return msgspec.convert(values, kind, strict=False)  # not strict: SQLite has 0 and 1 for false and true


def json_text(records: Any) -> str:
    """Write a list or an object as one parameter."""
    return _json(records).decode()


def held_text(held: Iterable[Held]) -> str:
    """Write jobs with their tokens as one parameter."""
    return json_text([{"id": one.id, "token": one.token} for one in held])


def clean(text: str | None) -> str | None:
    """Escape the characters that a database refuses in a text."""
    return text and failure.escape_text(text)


def uuid_text(job_id: str) -> str:
    """Return an id as it is stored; for a text that is no id, the id that no job has."""
    try:
        return str(UUID(job_id))
    except (ValueError, AttributeError, TypeError):
        return FIRST_ID


def uuid_texts(ids: Iterable[str]) -> list[str]:
    """Return ids as they are stored."""
    return [uuid_text(job_id) for job_id in ids]


def distinct(rows: Rows) -> list[str]:
    """Return the first column, each value once."""
    return list(dict.fromkeys(row[0] for row in rows))


def states(rows: Rows) -> dict[str, State]:
    """Read rows of an id and a state."""
    return {job_id: State(state) for job_id, state in rows}
