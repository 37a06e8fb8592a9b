"""Counts round trips where they cannot hide: on the wire between a client and its server."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Wire:
    """A relay to one server. Each time the server answers after the client has spoken is one round trip."""

    def __init__(self, host: str, port: int) -> None:
        self.round_trips = 0
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._relay, args=(client, server), daemon=True).start()

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        asked = False
        with client, server, selectors.DefaultSelector() as ready:
            ready.register(client, selectors.EVENT_READ, server)
            ready.register(server, selectors.EVENT_READ, client)
            while True:
                for key, _ in ready.select():
                    source, target = key.fileobj, key.data
                    assert isinstance(source, socket.socket)
                    heard = source.recv(1 << 16)
                    if not heard:
                        return
                    target.sendall(heard)
                    self.round_trips += asked and source is server
                    asked = source is client

    def close(self) -> None:
        self._listener.close()


@contextmanager
def relayed(host: str, port: int) -> Iterator[Wire]:
    """Relay to a server for as long as the `with` lasts."""
    wire = Wire(host, port)
    try:
        yield wire
    finally:
        wire.close()
