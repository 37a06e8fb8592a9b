"""Importing, making an app, defining tasks and forking open no file, no socket and no thread."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import duly
from duly import Duly
from tests.engine.conftest import HOLDABLE

SRC = Path(duly.__file__).parents[1]

WATCHED = """
import os, sys, threading

def held():
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            pass  # the listing's own
    return sorted(links), [thread.name for thread in threading.enumerate()]

read = []
sys.addaudithook(lambda event, args: read.append((event, str(args[0]))) if event in (
    "open", "socket.connect", "socket.__new__", "sqlite3.connect", "subprocess.Popen") else None)

def opened():
    return [(event, path) for event, path in read if event != "open" or not path.endswith((".py", ".pyc", ".so"))
            and "/proc/self" not in path and "__pycache__" not in path]
"""


def python(script: str, *args: str, cwd: Path) -> str:
    """Run a script in a process of its own; warnings are errors there too."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *args],
        cwd=cwd,
        # Nor does Python itself write what it has compiled, as it would in a new clone.
        env={"PYTHONPATH": str(SRC), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr == ""
    return ran.stdout


@pytest.mark.slow
@HOLDABLE
def test_an_app_and_its_tasks_open_nothing_before_the_first_operation(url: str, tmp_path: Path) -> None:
    script = WATCHED + textwrap.dedent(
        """
        before = held()
        import duly
        imported = held()
        read.clear()
        app = duly.Duly(sys.argv[1])

        @app.task(key=lambda number: number, backoff=[1, 2], timeout="1m", on_dead="mourn")
        def send(number: int) -> int:
            return number

        @app.task
        def mourn(job_id: str) -> None: ...

        call = send.using(delay="5m", priority=3).using(queue="mail")
        assert repr(app.tasks) and send(3) == 3 and app.dead
        assert opened() == [], opened()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if held() == before else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert before == imported == held(), (before, imported, held())
        """
    )
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "duly.toml").write_text("this is not TOML")  # it would be refused if it were read
    python(script, url, cwd=folder)
    assert [path.name for path in folder.iterdir()] == ["duly.toml"]


def test_the_file_of_settings_is_read_with_the_first_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = Duly()
    (tmp_path / "duly.toml").write_text('url = "jobs.db"\nmax_attempts = 9\n')
    monkeypatch.chdir("/")  # where it was made counts, wherever the process goes later

    @app.task
    def send() -> None: ...

    job = send.enqueue()
    record = app.get(job.id)
    assert record is not None
    assert record.max_attempts == 9
    assert (tmp_path / "jobs.db").exists()
    app.close()


FORKS = """
import os, sys, warnings
from duly import Duly

warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
app = Duly(sys.argv[1])

@app.task
def send(number: int) -> None: ...

if sys.argv[2] == "opened":
    send.enqueue(0)
pid = os.fork()
if pid == 0:
    for number in range(1, 20):
        send.enqueue(number)
    app.close()
    os._exit(0)
for number in range(20, 40):
    send.enqueue(number)
assert os.waitpid(pid, 0)[1] == 0
send.enqueue(40)
jobs = app.list(limit=1000)
wanted = list(range(0 if sys.argv[2] == "opened" else 1, 41))
assert sorted(job.payload["number"] for job in jobs) == wanted, jobs
assert len({job.id for job in jobs}) == len(jobs)
app.close()
"""


@pytest.mark.slow
@HOLDABLE
@pytest.mark.parametrize("when", ["fresh", "opened"])
def test_parent_and_child_of_a_fork_both_enqueue(url: str, tmp_path: Path, when: str) -> None:
    python(FORKS, url, when, cwd=tmp_path)


SHOP = """
import sys
from duly import Duly, SyncCtx

app = Duly({url!r})

@app.task
def send(number: int) -> None: ...

def enqueue(number):
    send.enqueue(number)
    app.close()

def through(task, number):
    task.enqueue(number)
    task._tasks.database.close()
"""

SPAWNS = """
import multiprocessing
import shop

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    shop.send.enqueue(0)
    children = [context.Process(target=shop.enqueue, args=(number,)) for number in (1, 2)]
    children.append(context.Process(target=shop.through, args=(shop.send, 3)))  # a task is found where it is defined
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert sorted(job.payload["number"] for job in shop.app.list()) == [0, 1, 2, 3]
    assert shop.app.spec == "shop:app"
    shop.app.close()
"""


@pytest.mark.slow
@HOLDABLE
def test_spawned_processes_enqueue_too(url: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP.format(url=url))
    (tmp_path / "main.py").write_text(SPAWNS)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "main.py"],
        cwd=tmp_path,
        # Nor does Python itself write what it has compiled, as it would in a new clone.
        env={"PYTHONPATH": str(SRC), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_unused_modules_are_not_imported() -> None:
    script = (
        "import sys, duly; print(*sorted({'psycopg', 'asyncpg', 'django', 'sqlalchemy', 'httpx'} & set(sys.modules)))"
    )
    assert python(script, cwd=Path("/")) == "\n"


def test_a_command_that_only_reads_imports_neither_the_worker_nor_what_other_commands_need(tmp_path: Path) -> None:
    script = """
        import sys
        from duly import Duly
        from duly.cli import main

        Duly("jobs.db").migrate()
        main(["jobs", "list", "--url", "jobs.db"], standalone_mode=False)
        others = ("duly.worker", "duly.testing", "duly.bench", "duly.cli.demo", "duly.store.postgres", "getpass")
        print([name for name in sys.modules if name.startswith(others)])
    """
    assert python(script, cwd=tmp_path).splitlines()[-1] == "[]"
