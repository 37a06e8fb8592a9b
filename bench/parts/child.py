"""A worker as the bench sees it: a process that is started, told to go, asked, and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from bench.parts.orders import Orders, Told
from bench.parts.place import BenchFailed

PATIENCE_SECONDS = 300.0
ROOT = str(Path(__file__).parents[2])


class Child:
    """One worker process. Inside a `with` it lives; in the end it does not, whatever happened."""

    def __init__(self, orders: Orders) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "bench.parts.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("DULY_")},
                "PYTHONPATH": ROOT,
            },
            start_new_session=True,  # Ctrl-C is heard once, by the bench
        )
        self._watchdog = threading.Timer(PATIENCE_SECONDS, self._process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()
        # The URL may hold a password, which has no place in a list of processes.
        self._say(msgspec.json.encode(orders))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchdog.cancel()
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._said):
            if stream is not None:
                stream.close()

    def await_ready(self) -> None:
        """Wait until it has imported everything and stands by."""
        self.told()

    def go(self) -> None:
        """Let it begin."""
        self._say(b"go")

    def ask(self) -> Told:
        """Ask what it has used so far."""
        self._say(b"?")
        return self.told()

    def stop(self) -> Told:
        """Have it stop, and hear what it has to tell."""
        self._process.send_signal(signal.SIGTERM)
        return self.told()

    def told(self) -> Told:
        """Wait for what it tells next."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchFailed(f"a worker of the bench ended before it was done: {self._last_words()}")
        return msgspec.json.decode(line, type=Told)

    def _say(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise BenchFailed(f"a worker of the bench could not begin: {self._last_words()}") from None

    def _last_words(self) -> str:
        code = self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}")
