"""What happens, written down by those it happens to: one line of JSON each, in a file that only grows.

A line is written in one call, and is there when its process is killed the next moment. The monotonic clock is the
machine's, so that times of different processes can be compared.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from duly.rules.keys import Ids


class Ledger:
    """A file to which many processes append."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._pid = os.getpid()

    def note(self, what: str, **more: Any) -> None:
        """Write one line."""
        record = {"what": what, "at": time.monotonic(), "pid": os.getpid(), **more}
        os.write(self._handle, (json.dumps(record) + "\n").encode())


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Read all lines; the last one of a killed process may be torn."""
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


class Offered(Ids):
    """Makes ids, and writes down each before anybody gets it."""

    def __init__(self, ledger: Callable[[], Ledger]) -> None:
        super().__init__()
        self._ledger = ledger

    def __call__(self) -> str:
        return self.many(1)[0]

    def many(self, count: int) -> list[str]:
        made = super().many(count)
        for new in made:
            self._ledger().note("offered", id=new)
        return made
