"""A real PgBouncer in transaction mode, and how a test run has all that duly opens go through it.

`$PROOF_PGBOUNCER` says so to a test run and to the processes it starts. Each server that a fixture puts `behind` one
then has a PgBouncer, and every URL that names the server's port is led there where duly opens it, with the settings
that the documentation asks for: statements are not prepared, and wake-ups have a direct connection. What tests open
for themselves stays direct. `pgbouncer_site/sitecustomize.py` does that in each process.

`python -m tests.servers.pgbouncer` unpacks Debian's package into the virtual environment, without a right to install.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.servers.postgres import (
    PostgresServer,
    ServerFailed,
    free_port,
    open_to_others,
    server_identity,
    temporary_root,
)

VARIABLE = "PROOF_PGBOUNCER"  # "on", then also port:port of each server and its PgBouncer
PREPARED = "PROOF_PGBOUNCER_PREPARED"  # leave prepared statements on, to see that it matters
UNPACKED = Path(sys.prefix) / "pgbouncer"
MISSING = "there is no PgBouncer: where apt-get is, `make .venv/.pgbouncer` fetches it; elsewhere install pgbouncer"
POOL = 4
passed: list[int] = []  # how many transactions went through each that was put before a server
SETTINGS = """
[databases]
* = host=127.0.0.1 port={server}

[pgbouncer]
pool_mode = transaction
default_pool_size = {pool}
max_client_conn = 500
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {home}/users
auth_user = postgres
auth_query = select usename, coalesce(passwd, '') from pg_catalog.pg_shadow where usename = $1
admin_users = postgres
server_login_retry = 1
pidfile = {home}/data/postmaster.pid
"""


class PgBouncer:
    """Own one PgBouncer in front of a server, from `start` to `stop`, on a free port of the loopback."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.port = 0
        self._home: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Self:
        """Start it, and wait until it answers."""
        binary = find_binary()
        if binary is None:
            raise ServerFailed(MISSING)
        identity = server_identity()
        self._home = home = Path(tempfile.mkdtemp(prefix="duly-pgb-", dir=temporary_root(as_other=bool(identity))))
        (home / "data").mkdir()  # the keeper looks there for what it has to end, as it does for PostgreSQL
        self.port = free_port()
        settings = SETTINGS.format(server=self.server.port, port=self.port, home=home, pool=POOL)
        (home / "pgbouncer.ini").write_text(settings)
        (home / "users").write_text('"postgres" ""\n')
        if identity and not open_to_others(Path(binary).parent):
            shutil.copytree(UNPACKED, home / "copy")
            binary = str(home / "copy" / Path(binary).relative_to(UNPACKED))
        for path in (home, *home.iterdir()) if identity else ():
            os.chown(path, identity["user"], identity["group"])
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper.py")), str(home)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        with (home / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [binary, str(home / "pgbouncer.ini")],
                **identity,
                env={**os.environ, "LD_LIBRARY_PATH": libraries(Path(binary))},
                cwd=home / "data",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait(10)
        return self

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            try:
                self.ask("show version")
                return
            except psycopg.OperationalError:
                if time.monotonic() > until or (self._process and self._process.poll() is not None):
                    said = self.log
                    self.stop()
                    raise ServerFailed(f"PgBouncer did not start.\n{said[-4000:]}") from None
                time.sleep(0.02)

    @property
    def log(self) -> str:
        return (self._home / "log").read_text(errors="replace") if self._home else ""

    def ask(self, command: str) -> list[dict[str, Any]]:
        """Ask the console of PgBouncer, which knows no extended protocol."""
        url = f"postgresql://postgres@127.0.0.1:{self.port}/pgbouncer"
        with psycopg.connect(url, autocommit=True, cursor_factory=psycopg.ClientCursor) as console:
            cursor = console.execute(command)
            names = [column.name for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in (cursor.fetchall() if names else ())]

    def transactions(self) -> int:
        """Say how many transactions have gone through."""
        return sum(int(row["total_xact_count"]) for row in self.ask("show stats") if row["database"] != "pgbouncer")

    def stop(self) -> None:
        """End it and remove everything it wrote."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = None
        if self._keeper is not None:
            self._keeper.communicate()
            self._keeper = None


def find_binary() -> str | None:
    """Return the path of `pgbouncer`; Debian installs it where only root's PATH leads."""
    folders = (os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", str(UNPACKED / "usr/sbin"))
    return shutil.which("pgbouncer", path=os.pathsep.join(folders))


def libraries(binary: Path) -> str:
    """Return the folders of the libraries that were unpacked beside a program."""
    return os.pathsep.join(map(str, binary.parents[1].glob("lib/*-linux-*")))


def fetch() -> None:
    """Unpack Debian's package, and the libraries that are not installed, into the virtual environment."""
    own = ["-o", f"Dir::State::Lists={UNPACKED}/lists", "-o", f"Dir::Cache={UNPACKED}/cache"]
    for folder in ("packages", "lists/partial", "cache/archives/partial"):
        (UNPACKED / folder).mkdir(parents=True, exist_ok=True)
    try:
        _download([])
    except subprocess.CalledProcessError:  # the lists of packages are missing or old, and only root may renew them
        _run("apt-get", "-qq", *own, "update")
        _download(own)
    for package in (UNPACKED / "packages").iterdir():
        _run("dpkg", "-x", str(package), str(UNPACKED))
    for folder in ("packages", "lists", "cache"):
        shutil.rmtree(UNPACKED / folder)


def _download(options: list[str]) -> None:
    needs = re.findall(r" Depends: (lib[\w.+-]+)", _run("apt-cache", *options, "depends", "pgbouncer"))
    missing = [name for name in needs if subprocess.run(["dpkg", "-s", name], capture_output=True).returncode]
    _run("apt-get", "-qq", *options, "download", "pgbouncer", *missing, cwd=UNPACKED / "packages")


def _run(*words: str, cwd: Path | None = None) -> str:
    done = subprocess.run(words, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    return done.stdout


@contextmanager
def behind(server: PostgresServer) -> Iterator[None]:
    """Put a PgBouncer before a server, if this test run is to have that."""
    if VARIABLE not in os.environ:
        yield
        return
    with PgBouncer(server) as bouncer:
        before = os.environ[VARIABLE]
        os.environ[VARIABLE] = f"{before},{server.port}:{bouncer.port}"
        try:
            yield
        finally:
            os.environ[VARIABLE] = before
            passed.append(bouncer.transactions())


def led(url: str) -> str:
    """Give the URL of the PgBouncer before the server that a URL names, where there is one.

    It takes no `options` of a client: as its users have to, we set them for the database.
    """
    pairs = dict(pair.split(":") for pair in os.environ.get(VARIABLE, "").split(",") if ":" in pair)
    info = conninfo_to_dict(url)
    port = str(info.get("port", ""))
    if port not in pairs:
        return url
    options = str(info.pop("options", ""))
    if options:
        _set(make_conninfo("", **info), options.replace("-c ", "").split())
        let_go(make_conninfo("", **info))
    return make_conninfo("", **{**info, "port": pairs[port]})


def _set(url: str, options: list[str]) -> None:
    with psycopg.connect(make_conninfo(url, user="postgres"), autocommit=True) as conn:
        name = sql.Identifier(conn.info.dbname)
        for option in options:
            what, _, value = option.partition("=")
            text = sql.SQL("alter database {} set {} = {}")
            conn.execute(text.format(name, sql.Identifier(what), sql.Literal(value)))


def lead_driver(driver: ModuleType) -> None:
    """Have what the drivers of this process open go through PgBouncer, set as one sets it there."""
    if hasattr(driver, "led"):
        return
    driver.led = True  # type: ignore[attr-defined]
    begin = driver.PostgresDriver.__init__

    @wraps(begin)
    def through(self: Any, url: str, **options: Any) -> None:
        if (way := led(url)) != url:
            direct = url if options.get("prepared", True) else None
            options = {"listen_url": direct, **{k: v for k, v in options.items() if v is not None}}
            options["prepared"] = PREPARED in os.environ
        begin(self, way, **options)

    driver.PostgresDriver.__init__ = through


def lead_schema(schema: ModuleType) -> None:
    """Have what reads and changes the schema in this process go through PgBouncer."""
    if hasattr(schema, "led"):
        return
    schema.led = True  # type: ignore[attr-defined]
    migrate, look = schema.bring_up_to_date, schema.look

    @wraps(migrate)
    def migrated(url: str, **options: Any) -> Any:
        try:
            return migrate(led(url), **options)
        finally:
            let_go(url)

    schema.bring_up_to_date = migrated  # type: ignore[attr-defined]
    schema.look = lambda url, **options: look(led(url), **options)  # type: ignore[attr-defined]


def let_go(url: str) -> None:
    """Have PgBouncer close its connections to a database, which may be a template that nobody may be connected to."""
    if (way := led(url)) == url:
        return
    info = conninfo_to_dict(url)
    name = sql.Identifier(str(info["dbname"]))
    console = make_conninfo(way, dbname="pgbouncer", user="postgres")
    with psycopg.connect(console, autocommit=True, cursor_factory=psycopg.ClientCursor) as conn:
        conn.execute(sql.SQL("reconnect {}").format(name))
    with psycopg.connect(make_conninfo(url, dbname="postgres", user="postgres"), autocommit=True) as conn:
        asked = "select 1 from pg_stat_activity where datname = %s and application_name = 'duly' and state = 'idle'"
        until = time.monotonic() + 2
        while conn.execute(asked, [info["dbname"]]).fetchone() and time.monotonic() < until:
            time.sleep(0.01)


if __name__ == "__main__":
    try:
        if find_binary() is None:
            fetch()
    except (OSError, subprocess.CalledProcessError) as error:
        shutil.rmtree(UNPACKED, ignore_errors=True)
        sys.exit(f"PgBouncer was not fetched, so its tests are skipped: {error}")
