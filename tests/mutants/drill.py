"""Judges mutants: each is put into a copy of the package or of the examples, with which its tests must fail.

Tests run side by side, each beside a PostgreSQL server that was started before and serves one run after another.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue

import psycopg

from tests.databases import SETTINGS
from tests.mutants.catalogue import Mutant
from tests.mutants.fits import without_text
from tests.servers.postgres import RUNNING, PostgresServer, initialised

HANGS_AFTER_S = 60  # one test; it then counts as failed
ENDS_AFTER_S = 900  # all tests of a mutant
LEFT = r"""
select format('drop database %I with (force)', datname) from pg_database where datname like 't\_%'
 union all
select format('drop role %I', rolname) from pg_roles where rolname !~ '^(pg_|postgres$)'
"""


def judged(root: Path, mutants: Sequence[Mutant], at_once: int) -> Iterator[str]:
    """Yield a verdict on each mutant, in order: empty if its tests fail, else what happened."""
    servers: SimpleQueue[PostgresServer] = SimpleQueue()

    def one(mutant: Mutant) -> str:
        server = servers.get()
        try:
            return judge(root, mutant, server)
        finally:
            servers.put(server)

    with initialised(), ExitStack() as stack, ThreadPoolExecutor(at_once) as threads:
        for _ in range(min(at_once, len(mutants))):
            servers.put(stack.enter_context(PostgresServer(settings=SETTINGS)))
        yield from threads.map(one, mutants)


def judge(root: Path, mutant: Mutant, server: PostgresServer) -> str:
    """Run the tests of a mutant with the changed package."""
    if reason := without_text(root, mutant):
        return reason
    with tempfile.TemporaryDirectory(prefix="duly-mutant-", ignore_cleanup_errors=True) as folder:
        change(root, mutant, Path(folder))
        match run(root, mutant, Path(folder), server):
            case 1, _:
                return ""
            case 0, _:
                return "its tests pass"
            case None, _:
                return f"its tests did not end within {ENDS_AFTER_S} s"
            case code, output:
                return f"its tests did not run (exit code {code}): {output[-300:]}"


def change(root: Path, mutant: Mutant, folder: Path) -> None:
    """Copy the package, compiled modules too, and the examples, and change the copy."""
    for part in ("src", "examples"):
        shutil.copytree(root / part, folder / part)
    changed = folder / mutant.file
    changed.write_text(mutant.change(changed.read_text("utf-8")), "utf-8")
    for compiled in changed.parent.glob(f"__pycache__/{changed.stem}.*"):
        compiled.unlink()


def run(root: Path, mutant: Mutant, folder: Path, server: PostgresServer) -> tuple[int | None, str]:
    """Return the exit code of pytest, or None if it did not end, and what it printed."""
    options = ["-x", "-q", "-p", "tests.mutants.plugin", f"--timeout={HANGS_AFTER_S}", "--timeout-method=thread"]
    options += [f"--basetemp={folder / 'tmp'}", "-o", f"cache_dir={folder / 'cache'}"]
    printed = folder / "printed"
    with printed.open("w") as out:  # no pipe, which a process that is left behind would keep open
        tests = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *shlex.split(mutant.tests)],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(folder / "src"), RUNNING: str(server.port)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return tests.wait(timeout=ENDS_AFTER_S), printed.read_text("utf-8", errors="replace")
    except subprocess.TimeoutExpired:
        return None, ""
    finally:  # a test that was ended in the middle leaves processes, databases and roles
        end(tests)
        tidy(server)


def end(tests: subprocess.Popen[bytes]) -> None:
    """Kill the processes that a run has left."""
    with suppress(ProcessLookupError):
        os.killpg(tests.pid, signal.SIGKILL)
    tests.wait()


def tidy(server: PostgresServer) -> None:
    """Drop the databases and roles that a run has left."""
    with psycopg.connect(server.url, autocommit=True) as conn:
        for (statement,) in conn.execute(LEFT).fetchall():
            conn.execute(statement)
