"""A command in a process of its own that is watched while it runs: in pipes, or with some streams on a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tests.edges.programs import DULY, PATIENCE

TERMINAL = ("stdin", "stdout", "stderr")


class Watch:
    """A `duly` that runs; the streams in `terminal` are on a small terminal, the others in pipes."""

    def __init__(
        self,
        *words: str,
        url: str = "",
        terminal: Collection[str] = (),
        columns: int = 60,
        cwd: Path | None = None,
        **environ: str,
    ) -> None:
        self._ours, theirs = pty.openpty()
        known = {"TERM": "xterm", "COLUMNS": str(columns), "LINES": "12", **({"DULY_URL": url} if url else {})}
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        streams |= dict.fromkeys(terminal, theirs)
        self.process = subprocess.Popen([DULY, *words], cwd=cwd, env=os.environ | known | environ, text=True, **streams)
        os.close(theirs)
        self.seen = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._ours)

    def line(self) -> str:
        """Wait for a line on stdout."""
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return line

    def until(self, text: str) -> str:
        """Read the terminal until it shows a text; give what was read."""
        part = ""
        while text not in part:
            part += self._read(text)
        return part

    def rest(self) -> str:
        """Read the terminal until the command has ended."""
        with suppress(OSError):  # the other side is closed
            while self._read("the end"):
                pass
        return self.seen

    def answer(self, text: str) -> None:
        """Type a text."""
        os.write(self._ours, text.encode())

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def ended(self) -> tuple[str, str]:
        """Wait for the end; give what is left on stdout and stderr."""
        return self.process.communicate(timeout=PATIENCE)

    def _read(self, text: str) -> str:
        assert select.select([self._ours], [], [], PATIENCE)[0], f"{text!r} did not come: {self.seen!r}"
        part = os.read(self._ours, 65536).decode()
        self.seen += part
        return part
