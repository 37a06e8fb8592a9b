"""A proxy before a gateway, on which requests get lost, come twice or come late."""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

KINDS = ("unsent", "unanswered", "doubled", "late")


class Mishaps:
    """Forwards each POST to a gateway, but for one in `every` that a seeded chance picks.

    `late` requests are executed up to `late_s` after the caller was cut off.
    """

    def __init__(self, host: str, port: int, *, seed: int, late_s: float, every: int = 8) -> None:
        self.count: Counter[str] = Counter()
        self.refused_late = 0
        self._upstream = host, port
        self._chance = random.Random(seed)
        self._late_s = late_s
        self._every = every
        self._lock = threading.Lock()
        self._delayed: list[threading.Thread] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.on = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def settle(self) -> None:
        """Wait until every late request was executed."""
        while self._delayed:
            self._delayed.pop().join()

    def _next(self) -> tuple[str, float]:
        with self._lock:
            kind = self._chance.choice(KINDS) if self.on and self._chance.randrange(self._every) == 0 else ""
            self.count[kind] += 1
            return kind, self._chance.random()

    def _forward(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        conn = http.client.HTTPConnection(*self._upstream, timeout=30)
        with contextlib.closing(conn):
            conn.request("POST", path, body, headers)
            response = conn.getresponse()
            return response.status, response.read()

    def _forward_late(self, seconds: float, *request: Any) -> None:
        time.sleep(seconds)
        _, text = self._forward(*request)
        self.refused_late += b"malformed JSON" in text

    def _handler(mishaps) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                names = ("authorization", "content-type", "duly-statements")
                request = (
                    self.path,
                    {name: self.headers[name] for name in names},
                    self.rfile.read(int(self.headers["content-length"])),
                )
                kind, share = mishaps._next()
                if kind == "late":
                    args = (share * mishaps._late_s, *request)
                    thread = threading.Thread(target=mishaps._forward_late, args=args)
                    mishaps._delayed.append(thread)
                    thread.start()
                elif kind != "unsent":
                    status, text = mishaps._forward(*request)
                if kind == "doubled":
                    time.sleep(share * 0.05)
                    status, text = mishaps._forward(*request)
                if kind in ("unsent", "unanswered", "late"):
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler
