"""Runs the scripts of this folder, each in the environment of its peer, and looks at them from outside."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent / ".peers"
TICKS = os.sysconf("SC_CLK_TCK")
LIMIT_S = 180.0
ASK_VERSIONS = "import json, sys, importlib.metadata as m; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"


@dataclass(frozen=True)
class Environment:
    """What a peer's environment is made of, and what it needs of the machine."""

    packages: tuple[str, ...]
    python: tuple[int, int] = (3, 11)
    glibc: tuple[int, int] | None = None

    @property
    def names(self) -> list[str]:
        """The packages without extras and versions."""
        return [package.partition("[")[0].partition("=")[0].partition("<")[0] for package in self.packages]


# The newest release of each, unless pinned here. A C build of psycopg is what PostgreSQL's peers recommend.
ENVIRONMENTS_OF = {
    "pgqueuer": Environment(("pgqueuer[asyncpg]", "asyncpg", "uvloop")),
    "procrastinate": Environment(("procrastinate", "psycopg[binary]", "uvloop")),
    "awa": Environment(("awa-pg",)),
    "dbos": Environment(("dbos", "psycopg[binary]")),
    "oban": Environment(("oban", "psycopg[binary]", "uvloop"), python=(3, 12)),
    "huey": Environment(("huey",)),
    "taskito": Environment(("taskito",)),
    "honker": Environment(("honker",), glibc=(2, 38)),
    "dramatiq": Environment(("dramatiq[redis]",)),
    "taskiq": Environment(("taskiq", "taskiq-redis", "uvloop")),
    "celery": Environment(("celery[redis]",)),
}


class NotHere(RuntimeError):
    """A peer cannot be installed or run on this machine; the message is the reason."""


class ScriptFailed(RuntimeError):
    """A contestant's script did not end well or in time; the message is the end of what it said."""


def install(peer: str) -> None:
    """Make the peer's environment with its newest release, unless it is there: remove the folder to renew it."""
    wanted = ENVIRONMENTS_OF.get(peer)
    folder = ENVIRONMENTS / peer
    if wanted is None:
        return
    check_glibc(wanted)
    stamp = folder / "installed"
    if stamp.exists() and stamp.read_text() == " ".join(wanted.packages):
        return
    python = find_python(wanted.python)
    folder.mkdir(parents=True, exist_ok=True)
    (ENVIRONMENTS / ".gitignore").write_text("*\n")
    try:
        checked([python, "-m", "venv", "--clear", str(folder)])
        checked([str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--upgrade", *wanted.packages])
    except (ScriptFailed, OSError) as failed:
        raise NotHere(f"could not be installed: {reason_of(failed)}") from failed
    stamp.write_text(" ".join(wanted.packages))


def check_glibc(wanted: Environment) -> None:
    name, version = platform.libc_ver()
    if wanted.glibc is None or name != "glibc":
        return
    have = tuple(int(part) for part in version.split(".")[:2])
    if have < wanted.glibc:
        raise NotHere(f"needs glibc {'.'.join(map(str, wanted.glibc))} or newer, and this machine has {version}")


def find_python(wanted: tuple[int, int]) -> str:
    """Find a Python that is new enough: the one that runs this, one on the path, or one of pyenv's."""
    if sys.version_info[:2] >= wanted:
        return sys.executable
    minors = range(wanted[1], 20)
    on_path = [path for minor in minors if (path := shutil.which(f"python{wanted[0]}.{minor}"))]
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    of_pyenv = [str(path) for minor in minors for path in root.glob(f"{wanted[0]}.{minor}.*/bin/python")]
    question = f"import sys; sys.exit(sys.version_info[:2] < {wanted})"
    for python in (*on_path, *of_pyenv):
        if subprocess.run([python, "-c", question], capture_output=True, check=False).returncode == 0:
            return python
    raise NotHere(f"needs Python {wanted[0]}.{wanted[1]} or newer, and none was found on the path or in pyenv")


def reason_of(failed: Exception) -> str:
    """Take the line of a long message that says why: the last one that names an error, else the last."""
    lines = [line.strip() for line in str(failed).splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() and not line.startswith(("note:", "hint:"))]
    return (telling or lines or ["no reason was given"])[-1][:200]


def versions(peer: str) -> dict[str, str]:
    """Ask the peer's environment what it holds."""
    names = ENVIRONMENTS_OF[peer].names if peer in ENVIRONMENTS_OF else ["duly", "psycopg"]
    told: dict[str, str] = json.loads(checked([python_of(peer), "-c", ASK_VERSIONS, *names]))
    return told


def python_of(peer: str) -> str:
    return str(ENVIRONMENTS / peer / "bin/python") if peer in ENVIRONMENTS_OF else sys.executable


class Child:
    """A script under way, with a process group of its own, so that what it starts can be ended with it."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a pipe nobody reads would stop a talkative child
        self._err = tempfile.TemporaryFile("w+")  # noqa: SIM115
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            text=True,
            env=environment,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def running(self) -> bool:
        return self._process.poll() is None

    def finish(self, limit_s: float = LIMIT_S) -> str:
        """Wait for its end and give what it said."""
        try:
            ended = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.stop(patience_s=0)
            raise ScriptFailed(f"{self._name} did not end within {limit_s:.0f} s\n{read(self._err)[-3000:]}") from None
        except BaseException:
            self.stop(patience_s=1)  # who interrupts the run leaves nothing behind
            raise
        if ended != 0:
            raise ScriptFailed(f"{self._name} ended with {ended}\n{read(self._err)[-3000:]}")
        return read(self._out)

    def stop(self, patience_s: float = 20) -> None:
        """Ask it to end, and end it and all it started if it does not."""
        if self.running():
            self._process.terminate()
        try:
            self._process.wait(max(patience_s, 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    @property
    def _name(self) -> str:
        return " ".join(Path(word).name if "/" in word else word for word in self.words[1:4])


def read(file: Any) -> str:
    file.seek(0)
    return str(file.read())


def start(peer: str, command: str, *words: object) -> Child:
    return Child([python_of(peer), str(HERE / f"with_{peer}.py"), command, *map(str, words)])


def run(peer: str, command: str, *words: object, limit_s: float = LIMIT_S) -> Any:
    """Run one command of a peer's script to its end and read the line it tells, if any."""
    return last_line(start(peer, command, *words).finish(limit_s))


def last_line(said: str) -> Any:
    lines = said.strip().splitlines()
    return json.loads(lines[-1]) if lines else None


def checked(words: list[str], limit_s: float = 600) -> str:
    return Child(words).finish(limit_s)


def cpu_seconds(pid: int, *, ended_children: bool = False) -> float:
    """Read what all threads of a process have used, in user and system mode, perhaps with its ended children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if ended_children else 13])) / TICKS


def children(pid: int) -> list[int]:
    """List the processes that this one started and that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # it has ended since
        if parent == pid:
            found.append(int(path.parent.name))
    return found


def tree_cpu_seconds(pid: int) -> float:
    """Sum what a server's process, its running children and its ended ones have used."""
    total = cpu_seconds(pid, ended_children=True)
    for child in children(pid):
        try:
            total += cpu_seconds(child)
        except OSError:
            continue  # it has ended since, and its parent will count it
    return total


def resident_mib(pid: int) -> float | None:
    """Read how much memory a process holds, or nothing if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), None)
