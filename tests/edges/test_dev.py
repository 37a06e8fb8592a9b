"""`duly dev`, through the real program: what it says, and that it reloads, waits and ends as it should."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Literal
from uuid import UUID

import pytest

from duly import Duly
from duly.cli import example_call, reload
from duly.model import State
from tests.edges.programs import Folder, Forwarder, Program, assert_within, is_gone, wait_until

pytestmark = pytest.mark.process

APP = """
import time
from pathlib import Path
from duly import Duly

app = Duly("jobs.db")

@app.task(queue="mail", max_attempts=2, backoff=["10ms"])
def send_receipt(order: int, email: str, note: str = "secret") -> str:
    if order < 0:
        raise ValueError(f"no order {order}\\nat all")
    return email

@app.task
async def call_sync() -> None:
    send_receipt.enqueue(1, "a@b.c")
    send_receipt.enqueue(2, "a@b.c")

@app.task
def nap(seconds: float) -> None:
    Path("napping").touch()
    time.sleep(seconds)
"""


@pytest.fixture
def here(folder) -> Folder:
    return folder


def write(here: Folder, text: str = APP, name: str = "tasks.py") -> Path:
    file = here.path / name
    file.write_text(text)
    return file


def enqueue(here: Folder, task: str, *args: object) -> str:
    """Enqueue from outside, as another program of the person's would."""
    app = Duly(here.path / "jobs.db")
    try:
        definition = {"send_receipt": send_receipt, "call_sync": call_sync, "nap": nap, "add": add}[task]
        made = app.task(name=task, queue="mail" if task == "send_receipt" else "default", max_attempts=2)(definition)
        return made.enqueue(*args).id
    finally:
        app.close()


def send_receipt(order: int, email: str) -> None: ...
def call_sync() -> None: ...
def nap(seconds: float) -> None: ...
def add(a: int, b: int) -> None: ...


def stop(dev: Program) -> None:
    dev.signal(signal.SIGINT)
    assert dev.wait() == 0


READY = "Edit a file and it reloads, Ctrl-C ends."


# First lines and the lines of jobs


def test_the_first_lines_say_what_runs_and_how_to_try_it(here):
    write(here)
    dev = here.start("dev", "tasks.py")
    dev.line(READY)
    lines = dev.lines[: dev.lines.index(READY)]
    assert re.fullmatch(r"duly \S+: a worker for tasks.py", lines[0])
    assert lines[1].startswith(f"database   {here.path / 'jobs.db'}  (SQLite 3.")
    assert lines[2:5] == [
        "tasks      send_receipt(order: int, email: str, note: str = …)  queue mail",
        "           call_sync()  queue default",
        "           nap(seconds: float)  queue default",
    ]
    assert lines[5:] == ["""try        duly enqueue tasks.py send_receipt '{"order": 1, "email": "ada@example.com"}'"""]
    stop(dev)


def test_a_job_that_waits_is_done_within_two_seconds_of_the_start(here):
    write(here)
    job = enqueue(here, "send_receipt", 1, "a@b.c")
    began = time.monotonic()
    dev = here.start("dev", "tasks.py")
    line = dev.line("succeeded")
    assert_within(2, began)
    assert re.fullmatch(rf"\d\d:\d\d:\d\d succeeded send_receipt {job} in \d+ ms", line)
    stop(dev)


def test_a_failed_attempt_shows_where_in_your_code_and_the_traceback_below(here):
    write(here)
    job = enqueue(here, "send_receipt", -1, "a@b.c")
    dev = here.start("dev", "tasks.py")
    failed, dead = dev.line(" failed "), dev.line(" dead ")
    where = r"ValueError: no order -1 \(tasks.py, line 11\)"
    assert re.search(rf"send_receipt {job} in \d+ ms, attempt 1 of 2, again in \d+ ms: {where}$", failed)
    assert re.search(rf"send_receipt {job} in \d+ ms, attempt 2 of 2: {where}$", dead)
    dev.found("    at all", count=2)
    first = dev.lines.index(failed)
    assert dev.lines[first + 1 : first + 6] == [
        "    Traceback (most recent call last):",
        f'      File "{here.path / "tasks.py"}", line 11, in send_receipt',
        '        raise ValueError(f"no order {order}\\nat all")',
        "    ValueError: no order -1",
        "    at all",
    ]
    stop(dev)


def test_an_app_without_tasks_is_told_how_to_define_one_and_waited_for(here):
    file = write(here, "from duly import Duly\napp = Duly('jobs.db')\n")
    dev = here.start("dev", "tasks.py")
    dev.line(r"tasks      none yet: write one into tasks.py")
    dev.line("    @app.task")
    dev.line(READY)
    file.write_text(APP)
    dev.line("ready: send_receipt, call_sync, nap")
    stop(dev)


def test_a_sync_call_in_a_coroutine_is_warned_of_once(here):
    write(here)
    enqueue(here, "call_sync")
    dev = here.start("dev", "tasks.py")
    dev.found("succeeded send_receipt", count=2)
    stop(dev)
    [line] = [line for line in dev.lines if "dev.sync_call" in line]
    assert 'call=enqueue at="tasks.py, line 16"' in line
    assert "aenqueue" in line


def test_a_worker_does_not_warn_of_sync_calls(here):
    write(here)
    enqueue(here, "call_sync")
    worker = here.start("worker", "tasks.py", "--log-level", "debug")
    worker.found("job.succeeded", count=3)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert "sync_call" not in str(worker)


def test_files_that_are_named_as_modules_of_python_do_no_harm(here):
    write(here)
    for name in ("queue.py", "logging.py", "asyncio.py", "duly.py"):
        write(here, "raise RuntimeError('not yours')\n", name)
    dev = here.start("dev", "tasks.py")
    dev.line(READY)
    stop(dev)


# Reloading


@pytest.mark.slow
def test_it_reloads_when_a_file_changes_even_twice_in_a_second_with_the_same_size(here):
    file = write(here)
    dev = here.start("dev", "tasks.py", PYTHONDONTWRITEBYTECODE="")
    dev.line(READY)
    second = int(time.time()) * 1_000_000_000
    for number in range(3):
        said = len(dev.lines)
        fresh = write(here, f"print('version {number}', flush=True)\n{APP}", "fresh")
        os.utime(fresh, ns=(second, second + number))
        fresh.replace(file)
        dev.line(f"version {number}", after=said)
        dev.line("^ready: ", after=said)
    assert len(dev.found("tasks.py changed: restarting", count=3)) == 3
    enqueue(here, "send_receipt", 1, "a@b.c")
    dev.line("succeeded")
    stop(dev)


def test_it_reloads_for_other_modules_and_duly_toml_but_not_for_what_is_not_yours(here):
    write(here)
    for folder in (".hidden", "node_modules", "env", "pkg"):
        (here.path / folder).mkdir()
    (here.path / "env" / "pyvenv.cfg").touch()
    dev = here.start("dev", "tasks.py")
    dev.line(READY)
    for name in (".hidden/a.py", "node_modules/a.py", "env/a.py", "notes.txt"):
        write(here, "", name)
    write(here, "", "pkg/a.py")
    dev.line(r"^pkg/a.py changed")
    dev.line("^ready: ")
    write(here, 'keep = "1d"', "duly.toml")
    dev.line("^duly.toml changed")
    dev.found("^ready: ", count=2)
    assert len(dev.found(" changed: restarting")) == 2
    stop(dev)


def test_many_files_that_change_together_restart_it_once(here):
    write(here)
    dev = here.start("dev", "tasks.py")
    dev.line(READY)
    for number in range(200):
        write(here, "x = 1\n", f"module_{number:03}.py")
    dev.line("and 198 more changed: restarting")
    dev.line("^ready: ")
    stop(dev)
    assert len(dev.found("^ready: ")) == 1


def test_a_change_while_it_starts_is_not_lost(here):
    file = write(here)
    dev = here.start("dev", "tasks.py")
    dev.line(READY)
    said = len(dev.lines)
    file.write_text(f"import time\nprint('slow', flush=True)\ntime.sleep(60)\n{APP}")
    dev.line("^slow", after=said)
    file.write_text(f"{APP}\n@app.task\ndef mended() -> None: ...\n")
    dev.line("^ready: .*mended")
    stop(dev)


def test_a_job_that_runs_during_a_change_is_given_back_and_runs_again(here):
    file = write(here)
    job = enqueue(here, "nap", 600)
    dev = here.start("dev", "tasks.py", "--grace", "200ms")
    here.wait_for_file("napping")
    file.write_text(APP.replace("time.sleep(seconds)", "pass"))
    dev.line(f"released  nap {job}")
    dev.line(f"succeeded nap {job}")
    stop(dev)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("def work(:\n", r"tasks.py cannot be imported: .*tasks.py, line 1: SyntaxError"),
        ("import nobody\n", r"tasks.py cannot be imported: .*tasks.py, line 1: ModuleNotFoundError"),
        ("app = 1\n", r"tasks.py has no app: make one there"),
        ("from duly import Duly\napp = Duly('missing/jobs.db')\n", r"the folder .*missing does not exist"),
    ],
)
def test_what_is_broken_by_a_change_is_told_in_two_lines_and_can_be_mended(here, broken, said):
    file = write(here)
    dev = here.start("dev", "tasks.py")
    dev.line(READY)
    before = len(dev.lines)
    file.write_text(broken)
    dev.line("^Fix it and save")
    change, mistake, _ = dev.lines[before:]
    assert change == "tasks.py changed: restarting"
    assert re.search(f"^duly: .*{said}", mistake)
    file.write_text(APP)
    dev.line("^ready: send_receipt")
    stop(dev)


def test_code_that_is_broken_at_the_start_can_be_mended_too(here):
    file = write(here, "def work(:\n")
    dev = here.start("dev", "tasks.py")
    dev.line("line 1: SyntaxError")
    dev.line("^Fix it and save")
    file.write_text(APP)
    dev.line("^try  .*duly enqueue tasks.py send_receipt")
    stop(dev)


@pytest.mark.parametrize("words", [[], ["--no-reload"]])
@pytest.mark.parametrize(
    ("target", "more", "code", "said"),
    [
        ("taks.py", [], 2, r"there is no file .*/taks.py: did you mean 'tasks'\?"),
        ("nothing:app", [], 2, r"there is no module 'nothing'"),
        ("tasks:ap", [], 2, r"tasks has no 'ap': did you mean 'app'\?"),
        ("tasks.py", ["--url", "mysql://host/db"], 2, r"'mysql:' is not a database URL"),
        ("tasks.py", ["--url", "missing/jobs.db"], 2, r"the folder .*missing does not exist"),
        ("tasks.py", ["--grace", "soon"], 2, r"--grace is 'soon'"),
    ],
)
def test_a_mistake_of_the_first_start_ends_it_in_one_line(here, target, more, code, said, words):
    write(here)
    answer = here.run("dev", target, *more, *words)
    assert answer.returncode == code, answer
    assert len(answer.stderr.splitlines()) == 1
    assert re.search(said, answer.stderr)
    assert not (here.path / "jobs.db").exists()


def test_a_server_without_tables_ends_it_with_the_remedy(here, postgres):
    url = postgres.new_database()
    write(here)
    answer = here.run("dev", "tasks.py", "--url", url)
    assert answer.returncode == 1
    assert f"run `duly migrate --app tasks.py --url {url}` on it once" in answer.stderr
    postgres.drop(url)


def test_it_waits_for_a_server_with_a_countdown_and_reloads_meanwhile(here, postgres_url):
    file = write(here)
    forwarder = Forwarder(postgres_url)
    try:
        dev = here.start_on_terminal("dev", "tasks.py", "--url", forwarder.url)
        dev.until(r"waiting for the database: .* cannot be reached \(Connection refused\): see that it runs[^\r]*\r\n")
        dev.until("trying again in 2 s")
        file.write_text(APP.replace("call_sync", "renamed"))
        dev.until("trying again in 2 s\r\x1b\\[Ktasks.py changed: restarting\r\n")
        dev.until("(?s)restarting.*waiting for the database: .* refused")
        forwarder.open()
        dev.until("the database is up")
        dev.until("renamed")
        dev.until(READY)
        dev.signal(signal.SIGINT)
        assert dev.wait() == 0
    finally:
        forwarder.close()


# Ending


def worker_of(dev: Program) -> int:
    """Find the process that the command runs."""
    wait_until(lambda: Path(f"/proc/{dev.process.pid}/task/{dev.process.pid}/children").read_text(), "a worker")
    return int(Path(f"/proc/{dev.process.pid}/task/{dev.process.pid}/children").read_text().split()[0])


def test_ctrl_c_ends_both_within_a_second(here):
    write(here)
    dev = here.start("dev", "tasks.py")
    dev.line(READY)
    pid = worker_of(dev)
    began = time.monotonic()
    stop(dev)
    assert time.monotonic() - began < 1
    assert is_gone(pid)
    assert dev.lines[-1] == "stopped"


def test_ctrl_c_ends_it_while_it_waits_for_a_server(here):
    write(here, APP.replace("jobs.db", "postgresql://nobody@127.0.0.1:1/db"))
    dev = here.start("dev", "tasks.py")
    dev.line("waiting_for_database")
    stop(dev)


def test_ctrl_c_ends_it_while_it_waits_for_a_change(here):
    write(here, "def work(:\n")
    dev = here.start("dev", "tasks.py")
    dev.line("^Fix it and save")
    stop(dev)


def test_a_job_that_runs_at_ctrl_c_is_given_back_after_the_grace(here):
    write(here)
    job = enqueue(here, "nap", 600)
    dev = here.start("dev", "tasks.py", "--grace", "300ms")
    here.wait_for_file("napping")
    began = time.monotonic()
    stop(dev)
    assert_within(0.3 + 2, began)
    app = Duly(here.path / "jobs.db")
    found = app.get(job)
    app.close()
    assert (found.state, found.attempt) == (State.READY, 0)


def test_the_worker_ends_when_the_command_is_killed(here):
    write(here)
    dev = here.start("dev", "tasks.py")
    dev.line(READY)
    pid = worker_of(dev)
    dev.signal(signal.SIGKILL)
    wait_until(lambda: is_gone(pid), "the worker ends")


def test_a_worker_that_dies_is_started_again(here):
    write(here)
    dev = here.start("dev", "tasks.py")
    dev.line(READY)
    os.kill(worker_of(dev), signal.SIGKILL)
    said = dev.line("the worker .* has died")
    assert re.fullmatch(
        r"the worker \(pid \d+\) has died \(killed by SIGKILL\) and restarts; "
        "its jobs run again when their leases expire",
        said,
    )
    assert "supervisor.worker_died" not in str(dev)
    dev.line("^ready: ")
    stop(dev)


def test_without_reload_it_is_one_process(here):
    file = write(here)
    dev = here.start("dev", "tasks.py", "--no-reload")
    dev.line("^Ctrl-C ends.")
    file.write_text("def broken(:\n")
    enqueue(here, "send_receipt", 1, "a@b.c")
    dev.line("succeeded send_receipt")
    assert Path(f"/proc/{dev.process.pid}/task/{dev.process.pid}/children").read_text() == ""
    stop(dev)


# What it is made of


def test_a_look_at_a_folder_ends_somewhere_and_sees_the_nearest_first(tmp_path, monkeypatch):
    for number in range(5):
        (tmp_path / f"{number}.py").touch()
        (tmp_path / "far" / f"{number}").mkdir(parents=True)
        (tmp_path / "far" / f"{number}" / "far.py").touch()
    (tmp_path / "loop").symlink_to(tmp_path)
    assert len(reload.look(str(tmp_path))) == 10
    monkeypatch.setattr(reload, "MOST_ENTRIES", 12)
    assert {Path(file).name for file in reload.look(str(tmp_path))} == {f"{number}.py" for number in range(5)}
    assert reload.look(str(tmp_path / "missing")) == {}


def test_an_example_has_arguments_that_the_task_takes():
    app = Duly()

    @app.task
    def many(
        when: datetime,
        id: UUID,
        kind: Literal["a", "b"],
        rows: list[dict[str, int]],
        pair: tuple[int, str],
        maybe: int | None,
        file_name: str,
        more: bool = False,
    ) -> None: ...

    @app.task
    def anything(it, *args, **kwargs) -> None: ...

    @app.task
    def nothing() -> None: ...

    assert example_call.payload_of(many) == (
        '{"when": "2030-01-31T12:00:00Z", "id": "0190a6b2-7c3d-7e4f-8a1b-2c3d4e5f6a7b", "kind": "a", "rows": [{}], '
        '"pair": [1, "text"], "maybe": 1, "file_name": "data.csv"}'
    )
    assert example_call.command_of("tasks.py", anything) == """duly enqueue tasks.py anything '{"it": "text"}'"""
    assert example_call.command_of("my tasks.py", nothing) == "duly enqueue 'my tasks.py' nothing"
