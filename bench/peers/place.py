"""Where the contestants work: a server or a folder of the run's own, with a new database for every measurement."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from bench.database import refuse_memory
from bench.peers import process
from bench.peers.process import NotHere
from duly.store.sqlite.health import file_system
from tests.servers.postgres import PostgresServer, ServerFailed, free_port

CALM = {"autovacuum": "off", "max_wal_size": "8GB", "checkpoint_timeout": "1h"}
REDIS_OPTIONS = ("--appendonly", "yes", "--appendfsync", "everysec", "--save", "")


class Place(ABC):
    """One store, as all contestants on it find it."""

    store: str

    @abstractmethod
    def describe(self) -> str:
        """Say what it is and how durable."""

    @abstractmethod
    def new(self) -> str:
        """Make an empty database and give its address."""

    def settle(self, address: str) -> None:
        """Leave no work behind that a worker would pay for."""
        os.sync()

    @abstractmethod
    def drop(self, address: str) -> None:
        """Remove a database."""

    def server_cpu_s(self) -> float | None:
        """Tell what the server has used so far, if there is one."""
        return None

    def wal_bytes(self) -> int | None:
        """Tell how much the server has logged so far, if it counts that."""
        return None


class PostgresPlace(Place):
    store = "postgres"

    def __init__(self, server: PostgresServer) -> None:
        self._server = server

    def describe(self) -> str:
        names = ("server_version", "fsync", "synchronous_commit", "full_page_writes", "autovacuum", "shared_buffers")
        with psycopg.connect(self._server.url) as connection:
            rows = [(name, connection.execute(f"show {name}").fetchone()) for name in names]
        return ", ".join(f"{name}={row[0] if row else ''}" for name, row in rows)

    def new(self) -> str:
        """Make a database after a checkpoint: what is filled from here on is not logged whole when first touched."""
        address = self._server.new_database()
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute("checkpoint")
        return address

    def settle(self, address: str) -> None:
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute("vacuum (analyze)")
        super().settle(address)

    def drop(self, address: str) -> None:
        self._server.drop(address)

    def server_cpu_s(self) -> float | None:
        return None if self._server.pid is None else process.tree_cpu_seconds(self._server.pid)

    def wal_bytes(self) -> int | None:
        with psycopg.connect(self._server.url) as connection:
            row = connection.execute("select pg_current_wal_lsn() - '0/0'::pg_lsn").fetchone()
        return int(row[0]) if row else None


class SQLitePlace(Place):
    store = "sqlite"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def describe(self) -> str:
        return f"files on {file_system(self._folder)}"

    def new(self) -> str:
        return str(Path(tempfile.mkdtemp(dir=self._folder)) / "jobs.db")

    def drop(self, address: str) -> None:
        shutil.rmtree(Path(address).parent, ignore_errors=True)


class RedisPlace(Place):
    store = "redis"

    def __init__(self, server: subprocess.Popen[bytes], port: int) -> None:
        self._server = server
        self._port = port

    def describe(self) -> str:
        return f"{redis_version()}, {' '.join(REDIS_OPTIONS[:4])}: the last second may be lost"

    def new(self) -> str:
        self._ask("flushall")
        return f"redis://127.0.0.1:{self._port}/0"

    def drop(self, address: str) -> None:
        self._ask("flushall")

    def server_cpu_s(self) -> float | None:
        return process.cpu_seconds(self._server.pid)

    def _ask(self, *words: str) -> None:
        process.checked(["redis-cli", "-p", str(self._port), *words], 30)


@contextmanager
def place_of(store: str, results: Path) -> Iterator[Place]:
    """Open one store; all it wrote is removed at the end."""
    if store == "sqlite":
        with tempfile.TemporaryDirectory(prefix="run-", dir=results) as folder:
            yield SQLitePlace(Path(folder))
    elif store == "redis":
        with redis_place(results) as redis:
            yield redis
    else:
        refuse_memory(Path(tempfile.gettempdir()))
        with postgres_server() as server:
            yield PostgresPlace(server)


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    try:
        server = PostgresServer(durable=True, settings=CALM).start()
    except ServerFailed as failed:
        raise NotHere(str(failed).splitlines()[0]) from failed
    with server:
        yield server


@contextmanager
def redis_place(results: Path) -> Iterator[RedisPlace]:
    """Start a Redis of the run's own on a free port of the loopback, never the system's."""
    find_redis()
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="run-", dir=results) as folder:
        words = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, *REDIS_OPTIONS]
        server = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            wait_for_redis(port)
            yield RedisPlace(server, port)
        finally:
            server.terminate()
            server.wait(20)


def find_redis() -> None:
    """See that there is a Redis, and install Debian's where this may."""
    if shutil.which("redis-server"):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise NotHere("no redis-server on the path: install it, or run this once as root where apt-get is")
    # RUNLEVEL=1 keeps the package from starting a server of the system's.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    words = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "redis-server"]
    try:
        subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=300, check=True)
    except (subprocess.SubprocessError, OSError) as failed:
        raise NotHere(f"redis-server could not be installed: {failed}") from failed


def wait_for_redis(port: int) -> None:
    until = time.monotonic() + 20
    words = ["redis-cli", "-p", str(port), "ping"]
    while subprocess.run(words, capture_output=True, check=False).stdout.strip() != b"PONG":
        if time.monotonic() > until:
            raise NotHere("redis-server did not answer within 20 s")
        time.sleep(0.05)


def redis_version() -> str:
    said = process.checked(["redis-server", "--version"], 30).split()
    return "Redis " + next((word.removeprefix("v=") for word in said if word.startswith("v=")), "of unknown version")
