"""Cloudflare's own runtime with duly's Worker in it, and a client for the Worker's gateway to D1."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from duly.cloudflare import project
from duly.store.d1 import catalogue
from tests.servers.d1 import Param, Row

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "cloudflare"

OLDEST_NODE = 20


def why_not() -> str | None:
    """Say why the runtime cannot be started here, or None if it can."""
    try:
        told = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "Node is not installed"
    if int(told.lstrip("v").split(".")[0]) < OLDEST_NODE:
        return f"Node {told} is older than {OLDEST_NODE}"
    if not (FOLDER / "node_modules" / "miniflare").is_dir():
        return "the packages of tests/cloudflare are not installed: `make test` installs them"
    return None


class GatewayError(Exception):
    """The gateway said no: `status` of HTTP, `code` and message of the first error."""

    def __init__(self, status: int, code: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Workerd:
    """Own one runtime from `start` to `stop`; it ends by itself when this process does.

    `persist` keeps the databases in a folder over restarts; without it they live in a temporary one. `variables` are
    the Worker's, beside those it needs; they allow SQL by text unless ALLOW_SQL is another. `index` is src/index.mjs.
    """

    def __init__(
        self, *, persist: Path | None = None, database: str = "duly", index: str = "", **variables: str
    ) -> None:
        self.database = database
        self.index = index
        self.token = secrets.token_urlsafe(24)
        self.persist = persist
        self.variables = variables
        self.host, self.port = "", 0
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._gateways: list[D1Gateway] = []

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def d1_url(self) -> str:
        """The URL of the database, as an app has it."""
        return f"d1://{self.token}@{self.host}:{self.port}/{self.database}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="duly-workerd-"))
        worker = self._folder / "project"
        written = project.write(worker)
        if self.index:
            (worker / "src" / "index.mjs").write_text(self.index, "utf-8")
        options = {
            "project": str(worker),
            "modules": sorted((name for name in written if name.endswith(".mjs")), reverse=True),  # src/ is the entry
            "bindings": {"API_TOKEN": self.token, "DB_ID": self.database, "ALLOW_SQL": "1", **self.variables},
            "database": self.database,
            "persist": str(self.persist or self._folder / "state"),
            "folder": str(self._folder),
        }
        with (self._folder / "runtime.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["node", str(FOLDER / "run.mjs"), json.dumps(options)],
                cwd=FOLDER,
                env={**os.environ, "TMPDIR": str(self._folder), "NO_COLOR": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        try:
            ready = json.loads(self._first_line(seconds=60))
        except BaseException:
            self.stop()
            raise
        self.host, self.port = ready["host"], ready["port"]
        return self

    def gateway(self, *, token: str | None = None, database: str | None = None) -> D1Gateway:
        """Make a client of one's own; `stop` closes it if nobody did."""
        made = D1Gateway(
            self.host,
            self.port,
            token=self.token if token is None else token,
            database=database or self.database,
        )
        self._gateways.append(made)
        return made

    def kill(self) -> None:
        """End the runtime without a goodbye, as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(None)

    def _first_line(self, *, seconds: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._folder is not None
        until, line = time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            if not select.select([self._process.stdout], [], [], max(0, until - time.monotonic()))[0]:
                break
            piece = os.read(self._process.stdout.fileno(), 4096)
            if not piece:
                break
            line += piece
        if not line.endswith(b"\n"):
            log = (self._folder / "runtime.log").read_text(errors="replace")
            raise RuntimeError(f"The Cloudflare runtime did not start within {seconds:.0f} s.\n{log[-4000:]}")
        return line

    def _end(self, sign: signal.Signals | None) -> None:
        for gateway in self._gateways:
            gateway.close()
        self._gateways.clear()
        process, self._process = self._process, None
        if process is not None:
            end_group(process, sign)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def end_group(process: subprocess.Popen[bytes], sign: signal.Signals | None) -> None:
    """Close stdin, which asks the runtime to end, or send `sign` to it and its children."""
    if sign is not None:
        signal_group(process.pid, sign)
    try:
        process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        signal_group(process.pid, signal.SIGKILL)
        process.communicate()


def signal_group(group: int, sign: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, sign)


class D1Gateway:
    """Speak to one database behind the gateway, over one connection that is kept open.

    Rows are tuples in the order of the columns; a name that two columns share comes back once.
    Nothing is repeated here: a connection that breaks raises, and the next call opens another.
    """

    def __init__(self, host: str, port: int, *, token: str, database: str) -> None:
        self.path = f"/client/v4/accounts/test/d1/database/{database}"
        self.token = token
        self._connection = http.client.HTTPConnection(host, port, timeout=30)
        self._lock = threading.Lock()

    def query(self, sql: str, params: Sequence[Param] = ()) -> list[Row]:
        """Run one statement, as a transaction of its own."""
        return self.batch([(sql, params)])[0]

    def batch(self, statements: Sequence[tuple[str, Sequence[Param]]]) -> list[list[Row]]:
        """Run statements in order: all of them happen, or none."""
        body = {"batch": [{"sql": sql, "params": list(params)} for sql, params in statements]}
        return [[tuple(row.values()) for row in answer["results"]] for answer in self.post("query", body)]

    def named(self, *entries: Sequence[Param]) -> list[list[Row]]:
        """Run statements of duly by section and number: all of them happen, or none."""
        answers = self.post("query", {"batch": [list(entry) for entry in entries]})
        return [[tuple(row.values()) for row in answer["results"]] for answer in answers]

    def raw(self, sql: str, params: Sequence[Param] = ()) -> tuple[list[str], list[Row]]:
        """Run one statement and get its columns too, also when there are no rows."""
        results = self.post("raw", {"sql": sql, "params": list(params)})[0]["results"]
        return results["columns"], [tuple(row) for row in results["rows"]]

    def post(self, verb: str, body: object) -> list[dict[str, Any]]:
        """Send one request; give the `result` of its answer or raise `GatewayError`."""
        status, answer = self.request("POST", f"{self.path}/{verb}", json.dumps(body).encode())
        if not answer["success"]:
            raise GatewayError(status, answer["errors"][0]["code"], answer["errors"][0]["message"])
        result: list[dict[str, Any]] = answer["result"]
        return result

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        told = {
            "authorization": f"Bearer {self.token}",
            "content-type": "application/json",
            "duly-statements": catalogue.digest(),
            **(headers or {}),
        }
        with self._lock:
            try:
                self._connection.request(method, path, body, told)
                response = self._connection.getresponse()
                answer = json.loads(response.read())
                if response.status >= 400:  # the runtime hangs up on a request whose body it did not read
                    self._connection.close()
                return response.status, answer
            except BaseException:
                self._connection.close()
                raise

    def close(self) -> None:
        with self._lock:
            self._connection.close()
