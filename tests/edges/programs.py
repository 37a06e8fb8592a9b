"""Folders with an app in them, and the commands and programs that run there.

A command that prints and ends runs in this process (`say`). A program of its own is started for signals, terminals,
stdin, crashes and commands that keep running; a test that starts one is marked `process`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pty
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from click.testing import CliRunner

from duly.app.locate import FORCED_URL
from duly.cli import main

DULY = str(Path(sys.executable).parent / "duly")
PATIENCE = 40.0
NOBODY = "01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55"

TASKS = """
import time
from pathlib import Path
from duly import Duly

app = Duly({url!r})

@app.task
def add(a: int, b: int) -> int:
    return a + b

@app.task(queue="mail", max_attempts=1)
async def fail(word: str) -> None:
    raise ValueError("no")

@app.task
def nap(seconds: float) -> None:
    Path("napping").touch()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.02)

@app.task
def hang() -> None:
    Path("hanging").touch()
    time.sleep(600)

@app.task
async def block() -> None:
    Path("blocking").touch()
    time.sleep(600)

@app.task(timeout="200ms", max_attempts=1)
def overrun() -> None:
    time.sleep(600)
"""


def say(folder: Path, *words: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process as if it were started in a folder; what it imports there is forgotten."""
    unset = dict.fromkeys([name for name in os.environ if name.startswith("DULY_")] + [FORCED_URL])
    path, modules, here, writes = list(sys.path), set(sys.modules), Path.cwd(), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    os.chdir(folder)
    try:
        done = CliRunner().invoke(main, words, input=stdin, env={**unset, **environ}, prog_name="duly")
    finally:
        os.chdir(here)
        sys.path[:], sys.dont_write_bytecode = path, writes
        for name in set(sys.modules) - modules:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(folder):
                del sys.modules[name]
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)


def run(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DULY_")}
    return subprocess.run(
        [DULY, *words], cwd=folder, env=inherited | environ, capture_output=True, text=True, timeout=90, check=False
    )


def complaint(answer: subprocess.CompletedProcess[str], code: int, *, lines: int = 2) -> str:
    """A mistake is answered in a line or two on stderr, with the right exit code and no traceback."""
    assert answer.returncode == code, answer
    assert "Traceback" not in answer.stderr
    assert len(answer.stderr.splitlines()) <= lines
    assert answer.stdout == ""
    return answer.stderr


class Folder:
    """A folder with an app in it, and the programs that run there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.programs: list[Program | Terminal] = []
        self.modules: list[ModuleType] = []

    def app(self, url: str | None = None) -> Any:
        """Write tasks.py, and import it here under a name of its own."""
        url = url or str(self.path / "jobs.db")
        file = self.path / "tasks.py"
        file.write_text(TASKS.format(url=url))
        spec = importlib.util.spec_from_file_location(f"tasks_of_{self.path.name}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.modules.append(module)
        return module

    def environ(self, **more: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("DULY_")}
        return inherited | {"DULY_RUN_DIR": str(self.path / "run")} | more

    def start(self, *words: str, **environ: str) -> Program:
        program = Program(words, self.path, self.environ(**environ))
        self.programs.append(program)
        return program

    def start_on_terminal(self, *words: str, **environ: str) -> Terminal:
        terminal = Terminal(words, self.path, self.environ(**environ))
        self.programs.append(terminal)
        return terminal

    def say(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command in this process."""
        return say(self.path, *words, **{"DULY_RUN_DIR": str(self.path / "run"), **environ})

    def run(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a process of its own."""
        return run(self.path, *words, **{"DULY_RUN_DIR": str(self.path / "run"), **environ})

    def wait_for_file(self, name: str) -> None:
        wait_until(lambda: (self.path / name).exists(), name)

    def close(self) -> None:
        for program in self.programs:
            program.end()
        for module in self.modules:
            module.app.close()


class Program:
    """A `duly` that runs, and what it says."""

    def __init__(self, words: tuple[str, ...], cwd: Path, environ: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [DULY, *words], cwd=cwd, env=environ, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self._told = threading.Condition()
        self._threads = [
            threading.Thread(target=self._read, args=(stream,)) for stream in (self.process.stderr, self.process.stdout)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: Any) -> None:
        for line in stream:
            with self._told:
                self.lines.append(line.rstrip("\n"))
                self._told.notify_all()
        with self._told:
            self._told.notify_all()

    def line(self, pattern: str, *, after: int = 0) -> str:
        """Wait for a line."""
        return self.found(pattern, after=after)[0]

    def found(self, pattern: str, *, count: int = 1, after: int = 0) -> list[str]:
        """Wait for so many lines."""
        with self._told:
            done = self._told.wait_for(lambda: len(self._matching(pattern, after)) >= count, PATIENCE)
            assert done, f"{pattern!r} was not said in {self}"
            return self._matching(pattern, after)

    def _matching(self, pattern: str, after: int) -> list[str]:
        return [line for line in self.lines[after:] if re.search(pattern, line)]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        code = self.process.wait(PATIENCE)
        for thread in self._threads:
            thread.join(PATIENCE)
        return code

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for thread in self._threads:
            thread.join(PATIENCE)
        for stream in (self.process.stderr, self.process.stdout):
            assert stream is not None
            stream.close()

    def __str__(self) -> str:
        return "\n".join(self.lines)


class Terminal:
    """A `duly` that runs on a terminal, and everything that it wrote there."""

    def __init__(self, words: tuple[str, ...], cwd: Path, environ: dict[str, str]) -> None:
        self._seen, shown = pty.openpty()
        self.process = subprocess.Popen(
            [DULY, *words], cwd=cwd, env=environ, stdin=shown, stdout=shown, stderr=shown, start_new_session=True
        )
        os.close(shown)
        self.text = ""
        self._told = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with suppress(OSError):  # the other end is closed
            while data := os.read(self._seen, 65536):
                with self._told:
                    self.text += data.decode("utf-8", "replace")
                    self._told.notify_all()

    def until(self, pattern: str) -> None:
        """Wait for a text."""
        with self._told:
            assert self._told.wait_for(lambda: re.search(pattern, self.text), PATIENCE), f"{pattern!r}: {self.text!r}"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        code = self.process.wait(PATIENCE)
        self._thread.join(PATIENCE)
        return code

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join(PATIENCE)
        os.close(self._seen)


class Forwarder:
    """A port that leads to a server, from the moment it is opened."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._to = (parts.hostname or "", parts.port or 0)
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))  # taken, but nobody listens: connections are refused
        self._open: list[socket.socket] = [self._socket]
        self.url = url.replace(str(parts.port), str(self._socket.getsockname()[1]))

    def open(self) -> None:
        self._socket.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self._socket.accept()[0]
                far = socket.create_connection(self._to)
                self._open += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)


def wait_until(done: Callable[[], object], what: str) -> None:
    give_up_at = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < give_up_at, what
        time.sleep(0.02)


QUICK = 0.1  # what the quickest command takes where nothing else runs


def assert_within(seconds: float, began: float) -> None:
    """Hold it to so many seconds; where others keep the machine busy, to as many more as the quickest command takes."""
    took, again = time.monotonic() - began, time.monotonic()
    if took >= seconds:
        subprocess.run([DULY, "--version"], capture_output=True, check=True)
        assert took < seconds * max(1.0, (time.monotonic() - again) / QUICK)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
