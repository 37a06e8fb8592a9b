"""Restarts a worker when a file of the user's code changes.

The parent never imports that code: it polls the files, and stops and starts one worker process. The worker prints
mistakes in the code; the parent then waits for the next change.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path
from typing import TypeAlias

import click

from duly.cli.supervisor import Changed, Died, Supervisor, how

# The exit code of a worker that did not start: it was stopped, or the code has a mistake. A higher code means another
# mistake, whose exit code is added.
NOT_BEGUN = MISTAKE = 100
KILL_AFTER_S = 3.0

LOOK_S, SELDOM_LOOK_S, SETTLE_S, SETTLE_FOR_S = 0.25, 2.0, 0.05, 2.0
# Polling takes less than 1 % of a processor, and more only for thousands of files.
REST = 150
MOST_ENTRIES = 20_000
SKIPPED = frozenset({"node_modules", "__pycache__"})

Files: TypeAlias = dict[str, tuple[int, int]]


class Reloader(Supervisor):
    """Runs one worker process, and restarts it after each change."""

    def __init__(self, words: Sequence[str], folder: Path, *, grace_s: float) -> None:
        super().__init__(words, 1)
        self._plain_words = words
        self._grace_s = grace_s
        self._stopping = False
        self._first = True
        self._greeted = False
        self._given_up = False
        self._stale: set[str] = set()
        watch = FolderWatch(folder)  # changes from now on are noticed
        threading.Thread(target=watch.run, args=(self._put,), name="duly-files", daemon=True).start()

    def _put(self, files: Sequence[str]) -> None:
        self._words_in.put(Changed(tuple(files)))

    def _continues(self) -> bool:
        return bool(self._running) or not (self._asked or self._given_up)

    def _start(self, place: int) -> None:
        self._words = [*self._plain_words, *(["--again"] if self._greeted else [])]
        self._drop_compiled()
        super()._start(place)

    def _drop_compiled(self) -> None:
        """Delete compiled files: Python compares size and second only, and could miss a change."""
        for file in self._stale:
            with suppress(OSError, NotImplementedError):
                Path(cache_from_source(file)).unlink(missing_ok=True)
        self._stale.clear()

    def _changed(self, changed: Changed) -> None:
        self._stale.update(changed.files)
        if self._asked or self._stopping:
            return  # the next worker has not read the files yet
        self._first = False
        wiped = "\r\x1b[K" if sys.stderr.isatty() else ""  # the worker may show a countdown there
        click.echo(f"{wiped}{_named(changed.files)} changed: restarting", err=True)
        if not self._running:
            self._due = {0: 0.0}
            return
        self._stopping = True
        process = self._running[0]
        process.send_signal(signal.SIGTERM)
        reaper = threading.Timer(self._grace_s + KILL_AFTER_S, process.kill)
        reaper.daemon = True
        reaper.start()

    def _died(self, died: Died) -> int:
        """Restart the worker, but after a mistake only when a file changes."""
        has_begun = died.code < NOT_BEGUN
        self._greeted = self._greeted or has_begun
        first, self._first = self._first, False
        if self._asked:
            return super()._died(died._replace(code=died.code if has_begun else 0))
        if self._stopping:
            del self._running[died.place]
            self._stopping = False
            self._due = {0: 0.0}
            return 0
        if has_begun:
            return super()._died(died)
        del self._running[died.place]
        if first and died.code > NOT_BEGUN:
            self._given_up = True
            return died.code - MISTAKE
        click.echo("Fix it and save: the worker then restarts. Ctrl-C ends.", err=True)
        return 0

    def _report_death(self, died: Died, pid: int, pause_s: float) -> None:
        click.echo(
            f"the worker (pid {pid}) has died ({how(died.code)}) and restarts; "
            "its jobs run again when their leases expire",
            err=True,
        )


def _named(files: Sequence[str]) -> str:
    """Write the names of the first changed files."""
    shown = [os.path.relpath(file) for file in files[:2]]
    more = len(files) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


class FolderWatch:
    """Notices changes of the Python files below a folder, and of duly.toml."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._seen = look(self._folder)

    def run(self, changed: Callable[[Sequence[str]], None]) -> None:
        """Call `changed` with the changed files, once for files saved together; never return."""
        while True:
            began = time.thread_time()
            now = look(self._folder)
            rest_s = min(max(LOOK_S, REST * (time.thread_time() - began)), SELDOM_LOOK_S)
            if now != self._seen:
                now = self._settled(now)
                files = sorted(name for name, _ in self._seen.items() ^ now.items())
                self._seen = now
                if files:
                    changed(list(dict.fromkeys(files)))
            time.sleep(rest_s)

    def _settled(self, now: Files) -> Files:
        """Poll until the files stop changing: editors save in several steps, a checkout writes many files."""
        give_up_at = time.monotonic() + SETTLE_FOR_S
        while time.monotonic() < give_up_at:
            time.sleep(SETTLE_S)
            before, now = now, look(self._folder)
            if now == before:
                break
        return now


def look(folder: str) -> Files:
    """Read time and size of the files, nearest folders first, up to a limit."""
    found: Files = {}
    folders = deque([folder])
    entries = 0
    while folders and entries < MOST_ENTRIES:
        listed = _listed(folders.popleft(), MOST_ENTRIES - entries)
        entries += len(listed)
        if any(entry.name == "pyvenv.cfg" for entry in listed):
            continue
        for entry in listed:
            if entry.name.endswith(".py") or entry.name == "duly.toml":
                with suppress(OSError):
                    status = entry.stat()
                    found[entry.path] = status.st_mtime_ns, status.st_size
            elif entry.name not in SKIPPED and not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
    return found


def _listed(folder: str, most: int) -> list[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(folder) as entries:
        return [entry for _, entry in zip(range(most), entries, strict=False)]
    return []
