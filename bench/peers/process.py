"""Runs the scripts of this folder, each in the environment of its peer, and looks at them from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent / ".peers"
NEEDED = {"pgqueuer": ["pgqueuer[asyncpg]", "uvloop"], "huey": ["huey"]}
TICKS = os.sysconf("SC_CLK_TCK")


class ScriptFailed(RuntimeError):
    """A contestant's script did not end well; the message is the end of what it said."""


def install(peer: str) -> None:
    """Make the peer's environment with its newest release, unless it is there: remove the folder to renew it."""
    folder = ENVIRONMENTS / peer
    if peer not in NEEDED or (folder / "installed").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (ENVIRONMENTS / ".gitignore").write_text("*\n")
    checked([sys.executable, "-m", "venv", "--clear", str(folder)])
    checked([str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--upgrade", *NEEDED[peer]])
    (folder / "installed").touch()


def script(peer: str, command: str, *words: object) -> list[str]:
    python = str(ENVIRONMENTS / peer / "bin/python") if peer in NEEDED else sys.executable
    return [python, str(HERE / f"with_{peer}.py"), command, *map(str, words)]


def run(peer: str, command: str, *words: object) -> Any:
    """Run one command of a peer's script to its end and read the line it tells, if any."""
    told = checked(script(peer, command, *words)).strip().splitlines()
    return json.loads(told[-1]) if told else None


def checked(words: list[str]) -> str:
    ended = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    if ended.returncode != 0:
        raise ScriptFailed(f"{' '.join(words)} ended with {ended.returncode}\n{ended.stderr[-3000:]}")
    return ended.stdout


def start(peer: str, command: str, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(script(peer, command, *words), stdout=subprocess.DEVNULL, text=True)


def stop(process: subprocess.Popen[str]) -> None:
    """Ask it to end, and end it if it does not."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def cpu_seconds(pid: int) -> float:
    """Read what all threads of a process have used, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident_mib(pid: int) -> float | None:
    """Read how much memory a process holds, or nothing if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), None)
