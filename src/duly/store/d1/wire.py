"""Sends batches of statements to D1 over HTTP, and reads the answers.

A gateway Worker gets each statement by its name and number. A connection that was idle for long is not used again:
the server closes it, and the next write would meet a broken pipe.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import select
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

from duly.errors import ConfigError
from duly.store.d1 import catalogue
from duly.store.op import Row

Value: TypeAlias = str | int | float | None

IDLE_SECONDS = 3.0


class Line(NamedTuple):
    """One statement of a batch: a section, the number of the statement in it, and the parameters."""

    section: str
    number: int
    values: tuple[Value, ...] = ()


class Trouble(Exception):
    """A batch has failed. `status` is of HTTP, 0 without an answer; `sent`: the batch may have been executed."""

    def __init__(self, status: int, code: int, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.sent = sent


@dataclass(frozen=True, slots=True)
class Address:
    """The place of a database: the host of its gateway, its name there, and the token."""

    host: str
    port: int | None
    secure: bool
    database: str
    token: str = field(repr=False)

    def __str__(self) -> str:
        """Return the place without the token."""
        return f"{self.host}{'' if self.port is None else f':{self.port}'}/{self.database}"


def read_address(url: str, environ: Mapping[str, str]) -> Address:
    """Read `d1://TOKEN@host/database`; the token `env:NAME` is the value of a variable. Only loopback has no TLS."""
    parts = urlsplit(url)
    host, database = parts.hostname or "", unquote(parts.path.strip("/"))
    token = unquote(parts.netloc.rpartition("@")[0])
    if token.startswith("env:"):
        name = token.removeprefix("env:")
        token = environ.get(name, "")
        if not token:
            raise ConfigError(f"d1://{host}: the variable {name} holds the token, and it is not set")
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"d1://{host}: the URL has no valid token: write d1://TOKEN@host/database, or d1://env:NAME@…"
        )
    if not database or "/" in database:
        raise ConfigError(f"d1://{host}: the URL names no database: write d1://TOKEN@host/database")
    try:
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"d1://{host}: the port of the URL is not valid ({error})") from None
    return Address(host, port, not _is_loopback(host), database, token)


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class Wire:
    """Connections to one gateway. Connects to nothing before the first batch."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._path = f"/client/v4/accounts/duly/d1/database/{address.database}/query"
        self._headers = {
            "authorization": f"Bearer {address.token}",
            "content-type": "application/json",
            "duly-statements": catalogue.digest(),
        }
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []
        self._lock = threading.Lock()

    def send(self, lines: Sequence[Line], seconds: float) -> list[list[Row]]:
        """Run a batch, and return the rows of each statement. Waits at most `seconds` for each packet."""
        body = json.dumps({"batch": [[line.section, line.number, *line.values] for line in lines]}).encode()
        conn = self._take(seconds)
        try:
            conn.request("POST", self._path, body, self._headers)
            response = conn.getresponse()
            status, text = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            conn.close()
            raise Trouble(0, 0, f"{type(error).__name__}: {error}") from error
        except BaseException:
            conn.close()
            raise
        self._give_back(conn, closing=response.will_close or status >= 400)
        return _rows(status, text)

    def close(self) -> None:
        """Close the connections that no batch uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, conn in idle:
            conn.close()

    def _take(self, seconds: float) -> http.client.HTTPConnection:
        with self._lock:
            idle, self._idle = self._idle, []
            usable = [(at, conn) for at, conn in idle if time.monotonic() - at < IDLE_SECONDS and _is_open(conn)]
            found = usable.pop()[1] if usable else None
            self._idle = usable
        for _, conn in idle:
            if conn is not found and all(conn is not kept for _, kept in usable):
                conn.close()
        if found is not None:
            found.sock.settimeout(seconds)
            return found
        kind = http.client.HTTPSConnection if self._address.secure else http.client.HTTPConnection
        conn = kind(self._address.host, self._address.port, timeout=seconds)
        try:
            conn.connect()
        except OSError as error:
            conn.close()
            raise Trouble(0, 0, f"{type(error).__name__}: {error}", sent=False) from error
        return conn

    def _give_back(self, conn: http.client.HTTPConnection, *, closing: bool) -> None:
        if closing:
            conn.close()
            return
        with self._lock:
            self._idle.append((time.monotonic(), conn))


def _is_open(conn: http.client.HTTPConnection) -> bool:
    """Return whether nothing can be read: on an idle connection that would be its end."""
    try:
        return not select.select([conn.sock], [], [], 0)[0]
    except (OSError, ValueError):
        return False


def _rows(status: int, text: bytes) -> list[list[Row]]:
    answer: Any = None
    with suppress(ValueError):
        answer = json.loads(text)
    if not isinstance(answer, dict) or "success" not in answer:
        raise Trouble(status, 0, f"HTTP {status} with an answer that is none of a gateway")
    if not answer["success"]:
        first = (answer.get("errors") or [{}])[0]
        raise Trouble(status, first.get("code", 0), str(first.get("message", f"HTTP {status}")))
    return [[tuple(row.values()) for row in each["results"]] for each in answer["result"]]
