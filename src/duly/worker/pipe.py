"""What a worker and the process of a handler say to each other: JSON, each message with its length before it."""

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
    """Which app the child is to import, and where the worker looks for modules."""

    spec: str
    path: list[str]


class Started(Struct, frozen=True):
    """The child has imported the app, or has not."""

    error: str | None = None


class Ask(Struct, frozen=True):
    """The handler of this job is to stop; or, with nothing asked of it, only an answer is wanted."""

    asked: Asked | None
    job_id: str


class Beat(Struct, frozen=True, tag=True):
    """The handler has called `ctx.heartbeat`."""


class Answer(Struct, frozen=True, tag=True):
    """The child was asked something, and its handler lets it answer."""


class Outcomes(Struct, frozen=True, tag=True):
    """How the attempt ended: the name of the outcome and its fields."""

    name: str
    fields: Any
    staged: bool = False

    @classmethod
    def of(cls, outcome: Outcome, *, staged: bool) -> Outcomes:
        """Put an outcome into a message."""
        return cls(type(outcome).__name__, msgspec.to_builtins(outcome), staged)

    @property
    def outcome(self) -> Outcome:
        """Take the outcome out again."""
        made: Outcome = msgspec.convert(self.fields, _BY_NAME[self.name])
        return made


def frame(message: Any) -> bytes:
    """Write a message with its length before it."""
    data = msgspec.json.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


async def read_frame(reader: asyncio.StreamReader, kind: Any) -> Any:
    """Read the next message, of one kind or of several. Raises IncompleteReadError at the end of the other side."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    return msgspec.json.decode(await reader.readexactly(length), type=kind)


def receive(sock: socket.socket, kind: Any) -> Any:
    """Read the next message, from a thread. Raises EOFError at the end of the other side."""
    return msgspec.json.decode(_exactly(sock, int.from_bytes(_exactly(sock, LENGTH_BYTES), "big")), type=kind)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data
