"""Liveness for probes without a web server: one small file per worker, touched while its event loop answers.

It does not depend on the database: a worker whose database is away is alive and must not be restarted.

A file names the process that wrote it by number and start time, because numbers are reused. It also names the
container, because two containers may share a folder: each container's probe reads only its own workers.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("duly.worker")

STALE_SECONDS = 30.0
# Files of other containers cannot be checked from here. They are deleted when they are this old.
LITTER_SECONDS = 86_400.0


class Sign(NamedTuple):
    """The content of a worker's file."""

    worker: str
    pid: int
    age_s: float

    def alive(self, within_s: float = STALE_SECONDS) -> bool:
        """Whether the file was touched lately."""
        return self.age_s <= within_s


class Pulse:
    """The file of one worker."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._file: Path | None = None
        self._warned = False

    def begin(self) -> None:
        """Write the file. If that fails the worker runs on; the error is logged once."""
        try:
            file = _own_folder() / f"worker-{os.getpid()}-{self._worker[-4:]}.json"
            fresh = file.with_suffix(".new")
            fresh.write_text(json.dumps({"worker": self._worker, "pid": os.getpid(), **_place(os.getpid())}))
            fresh.replace(file)
            self._file = file
        except OSError as error:
            if not self._warned:
                log.warning("worker.liveness_failed", extra={"folder": str(folder()), "error": str(error)})
            self._warned = True

    def touch(self) -> None:
        """Touch the file."""
        if self._file is None:
            self.begin()
            return
        try:
            os.utime(self._file)
        except OSError:  # the file was deleted
            self.begin()

    def end(self) -> None:
        """Delete the file."""
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink(missing_ok=True)
            self._file = None


def folder() -> Path:
    """Return the folder of the files of this user on this machine."""
    return Path(os.environ.get("DULY_RUN_DIR") or Path(tempfile.gettempdir()) / f"duly-{_user()}")


def signs() -> Iterator[Sign]:
    """Read the files of this user's workers on this machine. Deletes those of ended processes."""
    for file in sorted(folder().glob("worker-*.json")):
        try:
            said = json.loads(file.read_text())
            sign = Sign(str(said["worker"]), int(said["pid"]), time.time() - file.stat().st_mtime)
            here = said["where"] == _where()
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if here and _exists(sign.pid, said.get("begun")):
            yield sign
        elif here or sign.age_s > LITTER_SECONDS:
            with suppress(OSError):
                file.unlink(missing_ok=True)  # the process was killed


def _own_folder() -> Path:
    """Make the folder. Raises if it belongs to another user."""
    made = folder()
    made.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid") and made.stat().st_uid != os.getuid() and "DULY_RUN_DIR" not in os.environ:
        raise PermissionError(f"{made} belongs to another user. Set DULY_RUN_DIR to a folder of your own.")
    return made


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()


def _place(pid: int) -> dict[str, str | None]:
    return {"where": _where(), "begun": _begun(pid)}


@cache
def _where() -> str:
    """Name this machine or container, in which process numbers are unique."""
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _begun(pid: int) -> str | None:
    """Return the start time of a process as the system gives it, or None."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The name of the program, in brackets, may contain anything. The start time is field 22.
        return f"{boot} {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return None


def _exists(pid: int, begun: str | None) -> bool:
    """Whether this process exists, and not a later one with the same number."""
    if os.name == "nt":  # os.kill ends a process there, whatever the signal: judge by the age of the file
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return begun is None or _begun(pid) in (begun, None)
