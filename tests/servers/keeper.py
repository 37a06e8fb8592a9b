"""Clean up after a test run that was killed: when stdin closes, end the server and remove its folder.

Runs as a process of its own. The test run holds the other end, which closes however that run ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path


def main(home: Path) -> None:
    sys.stdin.buffer.read()
    pid = server_in(home / "data")
    if pid is not None:
        end(pid, home / "data")
    shutil.rmtree(home, ignore_errors=True)


def server_in(data: Path) -> int | None:
    """Find the server that has `data` open; a pid file left by a crash names none."""
    try:
        pid = int((data / "postmaster.pid").read_text().split()[0])
        os.kill(pid, 0)
    except (OSError, ValueError, IndexError):
        return None
    if Path("/proc/self").exists():
        try:
            return pid if Path(f"/proc/{pid}/cwd").resolve() == data.resolve() else None
        except OSError:
            return None
    return pid


def end(pid: int, data: Path) -> None:
    for sign, seconds in ((signal.SIGQUIT, 5.0), (signal.SIGKILL, 2.0)):
        os.kill(pid, sign)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if server_in(data) is None:
                return
            time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
