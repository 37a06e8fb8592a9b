"""The messages between a worker and its child processes: JSON, each after its length."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec
from msgspec import Struct

from duly.app.lease import Asked
from duly.model import Cancelled, Crashed, Failed, Outcome, PartlyDone, Released, Snoozed, Succeeded, Waiting

LENGTH_BYTES = 4

_BY_NAME: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Succeeded, PartlyDone, Failed, Snoozed, Cancelled, Waiting, Released, Crashed)
}


class Begin(Struct, frozen=True):
    """The app that the child must import, and the worker's module path."""

    spec: str
    path: list[str]
    elsewhere: tuple[str, str | None] | None = None  # another database of the app: its URL and schema


class Started(Struct, frozen=True):
    """The child has imported the app, or failed to."""

    error: str | None = None


class Ask(Struct, frozen=True):
    """A request to stop the handler of this job. Without a reason, only an answer is requested."""

    asked: Asked | None
    job_id: str


class Beat(Struct, frozen=True, tag=True):
    """The handler has called `ctx.heartbeat`."""


class Answer(Struct, frozen=True, tag=True):
    """The child has received a request, and its handler does not block it."""


class Outcomes(Struct, frozen=True, tag=True):
    """The outcome of an attempt: its name and its fields."""

    name: str
    fields: Any
    staged: bool = False

    @classmethod
    def of(cls, outcome: Outcome, *, staged: bool) -> Outcomes:
        """Make a message of an outcome."""
        return cls(type(outcome).__name__, msgspec.to_builtins(outcome), staged)

    @property
    def outcome(self) -> Outcome:
        """The outcome in this message."""
        made: Outcome = msgspec.convert(self.fields, _BY_NAME[self.name])
        return made


def frame(message: Any) -> bytes:
    """Encode a message after its length."""
    data = msgspec.json.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


async def read_frame(reader: asyncio.StreamReader, kind: Any) -> Any:
    """Read the next message of one kind or of several. Raises IncompleteReadError when the other side has closed."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    return msgspec.json.decode(await reader.readexactly(length), type=kind)


def receive(sock: socket.socket, kind: Any) -> Any:
    """Read the next message, from a thread. Raises EOFError when the other side has closed."""
    return msgspec.json.decode(_exactly(sock, int.from_bytes(_exactly(sock, LENGTH_BYTES), "big")), type=kind)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data
