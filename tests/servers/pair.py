"""A primary and a standby of PostgreSQL that fail over as asked, and a forwarder that leads to one of them."""

from __future__ import annotations

import os
import signal
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import psycopg

from tests.servers.postgres import PostgresServer, ServerFailed, name_of

# A standby comes back at once, and finds what was written while it was away.
SETTINGS = {"wal_keep_size": "256MB", "wal_retrieve_retry_interval": "100ms", "autovacuum": "off"}
PATIENCE_S = 20.0
RECEIVERS = "select state, sync_state from pg_stat_replication where application_name = 'b'"


class Standby(PostgresServer):
    """A server that begins with a copy of another and receives all that is written there."""

    def __init__(self, primary: PostgresServer, *, port: int = 0) -> None:
        super().__init__(settings=SETTINGS, bin_dir=primary.bin_dir)
        self._primary = primary
        self.port = port

    def _initialise(self) -> None:
        copy = [
            *(self.bin_dir / "pg_basebackup", "-D", self._home / "data", "-R", "-X", "stream", "-c", "fast"),
            *("--no-sync", "--no-manifest", "-d", f"{self._primary.url}?application_name=b"),
        ]
        made = subprocess.run(copy, **self._surroundings(), capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise ServerFailed(f"pg_basebackup of {self.bin_dir} failed.\n{made.stdout}{made.stderr}")


class Pair:
    """Own a primary and its standby, with one database in both."""

    def __init__(self, *, synchronous: bool = True) -> None:
        self.synchronous = synchronous
        self.primary = PostgresServer(settings=SETTINGS)
        self.standby = Standby(self.primary)
        self.database = self._conninfo = ""

    def __enter__(self) -> Self:
        self.primary.start()
        self.database = name_of(self.primary.new_database())
        try:
            self._join()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.standby.stop()
        self.primary.stop()

    @property
    def url(self) -> str:
        ports = sorted((self.primary.port, self.standby.port))
        return f"postgresql://postgres@127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}/{self.database}"

    def url_of(self, server: PostgresServer) -> str:
        return server.url_of(self.database)

    def on_primary(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        return ask(self.url_of(self.primary), sql, *params)

    def on_standby(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        return ask(self.url_of(self.standby), sql, *params)

    def cut(self) -> None:
        """Have the standby receive nothing: with a synchronous one, every commit waits from now on."""
        [[conninfo]] = self.on_standby("show primary_conninfo")
        self._conninfo = str(conninfo)
        self._receive_from("")
        wait_until(lambda: self.on_primary(RECEIVERS) == [], "the standby to be cut off")

    @contextmanager
    def standby_away(self) -> Iterator[None]:
        """Have the standby receive nothing meanwhile."""
        self.cut()
        try:
            yield
        finally:
            self._receive_from(self._conninfo)
            self._wait_for_standby()

    def wait_for_commits(self, on_standby: bool) -> None:
        """Have commits of the primary wait for the standby or not, from now on."""
        self.synchronous = on_standby
        self.on_primary(f"alter system set synchronous_standby_names = '{'b' if on_standby else ''}'")
        self.on_primary("select pg_reload_conf()")
        self._wait_for_standby()

    def kill_primary(self) -> None:
        """Kill every process of the primary at once, as if its machine were gone."""
        assert self.primary.pid is not None
        for pid in (self.primary.pid, *children_of(self.primary.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.primary.halt("kill")

    def promote(self) -> None:
        """Have the standby take writes; it is the primary from now on."""
        assert self.on_standby("select pg_promote(true, 60)") == [(True,)], self.standby.log[-2000:]
        self.primary, self.standby = self.standby, self.primary

    def rejoin(self) -> None:
        """Make a new standby of the primary, where the killed one was."""
        port = self.standby.port
        self.standby.stop()
        self.standby = Standby(self.primary, port=port)
        self._join()

    def _join(self) -> None:
        self.standby.start()
        self.wait_for_commits(self.synchronous)

    def _wait_for_standby(self) -> None:
        how = "sync" if self.synchronous else "async"
        wait_until(lambda: self.on_primary(RECEIVERS) == [("streaming", how)], "the standby to receive")

    def _receive_from(self, conninfo: str) -> None:
        quoted = conninfo.replace("'", "''")
        self.on_standby(f"alter system set primary_conninfo = '{quoted}'")
        self.on_standby("select pg_reload_conf()")


class Forwarder(socketserver.ThreadingTCPServer):
    """A port on the loopback that leads to a server, as a name or a proxy does, and from some moment to another."""

    daemon_threads = True

    def __init__(self, to: PostgresServer) -> None:
        self.to = to  # where new connections are led
        super().__init__(("127.0.0.1", 0), _Led)
        self.port = int(self.server_address[1])

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()


class _Led(socketserver.BaseRequestHandler):
    server: Forwarder

    def handle(self) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.server.to.port)) as there:
            back = threading.Thread(target=_pump, args=(there, self.request), daemon=True)
            back.start()
            _pump(self.request, there)
            back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def ask(url: str, sql: str, *params: Any) -> list[tuple[Any, ...]]:
    """Run one statement outside of a transaction."""
    with psycopg.connect(url, autocommit=True) as conn:
        cursor = conn.execute(sql, params or None)  # type: ignore[call-overload]
        return cursor.fetchall() if cursor.description else []


def children_of(pid: int) -> list[int]:
    """List the processes that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, after = path.read_text().rpartition(")")  # a program's name may hold anything
        except OSError:
            continue
        if int(after.split()[1]) == pid:
            found.append(int(path.parent.name))
    return found


def wait_until(done: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < until, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.02)
