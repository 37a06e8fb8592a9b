"""`duly worker`, `duly jobs` and `duly check`, through the real program: processes, signals, and what they say."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from urllib.parse import urlsplit

import pytest

from duly.model import JobRecord, State
from duly.store import migrate
from duly.worker import liveness
from tests.databases import fresh
from tests.edges.programs import DULY, PATIENCE, Folder, Forwarder, Program, assert_within, is_gone, wait_until

pytestmark = pytest.mark.process


@pytest.fixture(params=["sqlite", "postgres"])
def url(request) -> str:
    return fresh(request, request.param)


@pytest.fixture
def here(folder) -> Folder:
    return folder


# Starting


def test_the_first_lines_say_what_runs_on_what(here, url):
    here.app(url)
    worker = here.start("worker", "tasks:app", "--concurrency", "3", "--queues", "mail:2", "--queues", "default")
    worker.line("worker.started")
    said = dict(line.split(maxsplit=1) for line in worker.lines if not line[0].isdigit())
    assert said["database"] == (
        url if "://" not in url else urlsplit(url).netloc.partition("@")[2] + urlsplit(url).path
    )
    assert said["engine"].startswith("SQLite 3." if "://" not in url else "PostgreSQL ")
    assert said["schema"].endswith(str(migrate.newest("sqlite")))
    assert said["durability"].startswith("full" if "://" not in url else "fsync is off")
    assert said["queues"] == "mail (at most 2 at once), default"
    assert said["tasks"] == "add, block, fail, hang, nap, overrun"
    assert said["slots"] == "3"
    assert said["worker"].endswith(f", pid {worker.process.pid}")
    assert ("caution" in said) == ("SQLite 3.40" in said["engine"])
    assert max(map(len, (line for line in worker.lines if not line.startswith("database")))) < 120
    assert "tasks=" not in worker.line("worker.started")  # said above
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_every_flag_can_be_given_in_the_environment_and_a_file_names_its_only_app(here, tmp_path):
    here.app()
    worker = here.start(
        "worker",
        "tasks.py",
        DULY_CONCURRENCY="7",
        DULY_QUEUES="mail:2,default:1",
        DULY_GRACE="12s",
        DULY_LOG_LEVEL="debug",
        DULY_LOG_JSON="1",
    )
    about = json.loads(worker.line("worker.about"))
    assert about["slots"] == "7"
    assert about["queues"] == "mail (at most 2 at once), default (at most 1 at once)"
    worker.line("worker.started")
    worker.signal(signal.SIGINT)
    assert worker.wait() == 0
    assert json.loads(worker.line("worker.stopping"))["grace_s"] == 12
    assert (tmp_path / "jobs.db").exists()


def test_a_worker_that_a_shell_starts_with_sigint_ignored_ends_by_sigterm(here):
    here.app()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        worker = here.start("worker", "tasks:app")
    finally:
        signal.signal(signal.SIGINT, before)
    worker.line("worker.started")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_a_url_on_the_command_line_wins_over_the_one_in_the_code(here, tmp_path):
    here.app()
    worker = here.start("worker", "tasks", "--url", "other.db")
    assert worker.line("^database").endswith(str(tmp_path / "other.db"))
    worker.line("worker.started")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert not (tmp_path / "jobs.db").exists()


def test_a_job_enqueued_from_outside_is_done_and_can_be_shown(here, url):
    tasks = here.app(url)
    worker = here.start("worker", "tasks:app")
    worker.line("worker.started")
    job = tasks.add.enqueue(1, 2)
    assert job.result(PATIENCE) == 3
    shown = json.loads(here.say("jobs", "show", job.id, "--json", "--url", url).stdout)
    assert set(shown) >= {*JobRecord.__struct_fields__, "attempts"}
    assert (shown["id"], shown["state"], shown["result"], shown["attempts"]) == (job.id, "succeeded", 3, [])
    assert shown["payload"] == {"a": 1, "b": 2}

    dead = tasks.fail.enqueue("word")
    worker.line("job.dead")
    shown = json.loads(here.say("jobs", "show", dead.id, "--json", DULY_URL=url).stdout)
    assert [(one["attempt"], one["outcome"], one["error"]) for one in shown["attempts"]] == [
        (1, "failed", "ValueError: no")
    ]
    told = here.say("jobs", "show", dead.id, DULY_URL=url).stdout
    assert re.search(r"^state +dead$", told, re.MULTILINE)
    assert re.search(r"^why +it is dead because: ", told, re.MULTILINE)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_a_job_that_is_not_there_is_exit_code_3_and_looking_makes_no_database(here, tmp_path):
    here.say("migrate", "--url", "jobs.db")
    answer = here.say("jobs", "show", "01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55", "--url", "jobs.db")
    assert answer.returncode == 3
    assert answer.stderr == "duly: no job has the id 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55\n"
    answer = here.say("jobs", "show", "no id at all", "--url", "missing.db")
    assert answer.returncode == 2
    assert re.search("there is no database .*missing.db yet: .*name it with --url", answer.stderr)
    assert not (tmp_path / "missing.db").exists()
    answer = here.say("jobs", "shwo", "x")
    assert answer.returncode == 2
    assert "Did you mean 'show'?" in answer.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["taks:app"], 2, r"there is no module 'taks' in .*: did you mean 'tasks'\?"),
        (["tasks:ap"], 2, r"tasks has no 'ap': did you mean 'app'\?"),
        (["tasks:add"], 2, r"add is a Task, not a Duly app: did you mean 'app'\?"),
        (["tasks.app"], 2, r"there is no module 'tasks.app' in .*: did you mean 'tasks:app'\?"),
        (["tasks:the app"], 2, r"tasks has no 'the app': did you mean 'app'\?"),
        (["taks.py"], 2, r"there is no file .*/taks.py: did you mean 'tasks'\?"),
        (["missing/"], 2, r"there is no file .*/missing$"),
        (["a.b.py"], 2, r"with a dot in it: rename it"),
        (["queue.py"], 2, r"Python has a module 'queue' of its own: rename .*/queue.py"),
        (["shop"], 2, r"shop is a package without an app: name the module in it, as in shop.jobs:app"),
        (["shop/__init__.py"], 2, r"is a package without an app: name the module in it, as in shop.jobs:app"),
        (["none"], 2, r"none has no app: make one there"),
        (["two"], 2, r"two has 2 apps \(one, other\): name one, as in two:one"),
        (["broken"], 2, r"broken cannot be imported: .*broken.py, line 3: NameError: name 'missing' is not defined"),
        (["garbled"], 2, r"garbled cannot be imported: .*garbled.py, line 1: SyntaxError"),
        (["needy"], 2, r"needy cannot be imported: .*needy.py, line 1: ModuleNotFoundError: No module named 'nobody'"),
        (["quitter"], 2, r"it ends the program at .*quitter.py, line 2; put that below if __name__"),
        ([":app"], 2, r"names no module: write module:app"),
        (["/elsewhere/tasks.py"], 2, r"is not below this folder"),
        (["tasks", "--url", "mysql://host/db"], 2, r"'mysql:' is not a database URL"),
        (["tasks", "--url", ""], 2, r"the database URL is empty: give a path"),
        (["tasks", "--url", "missing/folder/jobs.db"], 2, r"the folder .*missing/folder does not exist"),
        (["tasks", "--url", "dangling.db"], 1, r"dangling.db cannot be used .*: check the file"),
        (["tasks", "--queues", "mail:many"], 2, r"'mail:many' is not NAME or NAME:LIMIT"),
        (["tasks", "--grace", "soon"], 2, r"--grace is 'soon'"),
        (["tasks", "--concurrency", "0"], 2, r"'--concurrency': 0 is not in the range"),
    ],
)
def test_a_mistake_is_answered_in_one_line_with_what_to_do(here, tmp_path, words, code, said):
    here.app()
    (tmp_path / "none.py").write_text("app = 1\n")
    (tmp_path / "two.py").write_text("from duly import Duly\none = Duly('1.db')\nother = Duly('2.db')\nagain = one\n")
    (tmp_path / "broken.py").write_text("def work():\n    return missing\nwork = missing\n")
    (tmp_path / "garbled.py").write_text("def work(:\n")
    (tmp_path / "needy.py").write_text("import nobody\n")
    (tmp_path / "quitter.py").write_text("import sys\nsys.exit('bye')\n")
    (tmp_path / "shop").mkdir()
    for name in ("a.b.py", "queue.py", "shop/__init__.py", "shop/jobs.py"):
        (tmp_path / name).touch()
    (tmp_path / "dangling.db").symlink_to("/nowhere/jobs.db")
    answer = here.run("worker", *words)
    assert answer.returncode == code, answer
    assert "Traceback" not in answer.stderr
    lines = [line for line in answer.stderr.splitlines() if not line.startswith(("Usage:", "Try "))]
    assert len([line for line in lines if line]) == 1, answer.stderr
    assert re.search(said, answer.stderr)
    assert not (tmp_path / "jobs.db").exists()


@pytest.mark.parametrize("name", ["my-tasks.py", "my tasks.py", "shop/jobs.py", "shop/jobs:app", "./tasks.py"])
def test_an_app_is_found_in_any_file_below_the_folder(here, tmp_path, name):
    here.app()
    file = tmp_path / name.removesuffix(":app")
    file.parent.mkdir(exist_ok=True)
    (tmp_path / "tasks.py").rename(file.with_suffix(".py"))
    worker = here.start("worker", name)
    worker.line("worker.started")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_another_sqlite_library_in_the_process_is_warned_of(here, tmp_path):
    here.app()
    (tmp_path / "apsw.py").write_text("class Connection: ...\n")
    with (tmp_path / "tasks.py").open("a") as file:
        file.write("\nimport apsw\n")
    worker = here.start("worker", "tasks")
    assert "library=apsw" in worker.line("worker.other_sqlite")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_queues_that_no_task_has_and_an_app_without_tasks_are_warned_of(here, tmp_path):
    here.app()
    worker = here.start("worker", "tasks", "--queues", "maill,default")
    assert 'queue=maill hint="no task of this app has it: did you mean mail?"' in worker.line("worker.unknown_queue")
    worker.line("worker.started")
    assert "queue=default" not in str(worker)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    (tmp_path / "bare.py").write_text("from duly import Duly\napp = Duly('jobs.db')\n")
    worker = here.start("worker", "bare")
    assert "define tasks with @app.task" in worker.line("worker.no_tasks")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


# A database that is away, or not the right one


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["tasks.py"], "duly migrate --app tasks.py"),
        (["tasks:app", "--processes", "2"], "duly migrate --app tasks:app"),
        (["tasks:app", "--url", "URL"], "duly migrate --app tasks:app --url URL"),
    ],
)
def test_a_server_without_tables_is_answered_with_the_remedy(here, postgres, words, remedy):
    url = postgres.new_database()
    here.app(url if "URL" not in words else None)
    answer = here.run("worker", *(word.replace("URL", url) for word in words))
    assert answer.returncode == 1
    [line] = answer.stderr.splitlines()
    assert line.startswith("duly: PostgreSQL 127.0.0.1:")
    assert f"has no duly tables yet: run `{remedy.replace('URL', url)}` on it once" in line
    postgres.drop(url)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nobody_made_it", 'database "nobody_made_it" does not exist): look at the URL'),
        ("postgres?sslmode=require", "server does not support SSL, but SSL was required"),
    ],
)
def test_a_server_that_will_never_let_us_in_is_not_waited_for(here, postgres, name, said):
    here.app(postgres.url_of(name))
    answer = here.run("worker", "tasks:app")
    assert answer.returncode == 1
    [line] = answer.stderr.splitlines()
    assert said in line


def test_a_worker_waits_for_a_server_that_is_away_at_its_start_and_is_alive_meanwhile(here, postgres_url):
    tasks = here.app(postgres_url)
    forwarder = Forwarder(postgres_url)
    try:
        began = time.monotonic()
        worker = here.start("worker", "tasks:app", "--url", forwarder.url)
        line = worker.line("waiting_for_database")
        assert_within(2, began)
        place = urlsplit(forwarder.url)
        assert f"{place.hostname}:{place.port}{place.path} cannot be reached (Connection refused)" in line
        wait_until(lambda: here.say("check", "--worker").returncode == 0, "a sign of life")
        pauses = [re.search(r"again_in_s=(\d+)", one)[1] for one in worker.found("waiting_for_database", count=3)]
        assert pauses[:3] == ["1", "2", "4"]
        assert here.say("check", "--worker", "--within", "3s").returncode == 0
        forwarder.open()
        worker.line("worker.found_database")
        worker.line("worker.started")
        assert tasks.add.enqueue(1, 2).result(PATIENCE) == 3
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
    finally:
        forwarder.close()


def test_a_terminal_counts_down_to_the_next_try(here, postgres_url):
    here.app(postgres_url)
    forwarder = Forwarder(postgres_url)
    try:
        worker = here.start_on_terminal("worker", "tasks:app", "--url", forwarder.url)
        worker.until(
            r"waiting for the database: .* cannot be reached \(Connection refused\): see that it runs[^\r]*\r\n"
        )
        worker.until("\r\x1b\\[Ktrying again in 2 s\r\x1b\\[Ktrying again in 1 s\r\x1b\\[Ktrying again now")
        assert worker.text.count("waiting for the database") == 1
        forwarder.open()
        worker.until("\r\x1b\\[Kthe database is up\r\n")
        worker.until("worker.started")
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
    finally:
        forwarder.close()


def test_without_colour_the_countdown_still_writes_over_its_line(here):
    here.app("postgresql://nobody@127.0.0.1:1/db")
    worker = here.start_on_terminal("worker", "tasks:app", NO_COLOR="1")
    worker.until("\r\x1b\\[Ktrying again in 1 s\r\x1b\\[Ktrying again now")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_a_server_that_does_not_answer_is_spoken_of_within_two_seconds(here, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection, and says nothing
        here.app(f"postgresql://nobody@127.0.0.1:{silent.getsockname()[1]}/db")
        began = time.monotonic()
        worker = here.start("worker", "tasks:app")
        assert f"127.0.0.1:{silent.getsockname()[1]}" in worker.line("worker.connecting")
        took, began = time.monotonic() - began, time.monotonic()
        here.run("--version")
        assert took < 2 + 3 * (time.monotonic() - began)  # where other tests are busy, it takes its time to start
        assert here.say("check", "--worker").returncode == 0
        worker.line("waiting_for_database .*cannot be reached")
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0


@pytest.mark.parametrize("on_terminal", [False, True])
def test_a_worker_that_waits_for_a_server_ends_at_once_when_told(here, on_terminal):
    here.app("postgresql://nobody@127.0.0.1:1/db")
    if on_terminal:
        terminal = here.start_on_terminal("worker", "tasks:app")
        terminal.until("trying again in 2 s")
        terminal.signal(signal.SIGTERM)
        assert terminal.wait() == 0
        assert terminal.text.endswith("\r\x1b[K")  # the next prompt stands in an empty line
    else:
        worker = here.start("worker", "tasks:app")
        worker.line("again_in_s=2")
        began = time.monotonic()
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert time.monotonic() - began < 1
    assert list((here.path / "run").iterdir()) == []


# Root may do everything, unless it lets go of that.
UNPRIVILEGED = [] if os.geteuid() else ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]


@pytest.mark.skipif(bool(UNPRIVILEGED) and not shutil.which("setpriv"), reason="root can write everywhere")
@pytest.mark.parametrize(
    "words", [["worker", "tasks.py"], ["worker", "tasks.py", "--processes", "2"], ["dev", "tasks.py"]]
)
@pytest.mark.parametrize(
    ("place", "rights", "code", "said"),
    [
        ("jobs.db", 0o000, 1, r"/jobs\.db cannot be used \(unable to open database file\): check the file"),
        ("jobs.db", 0o444, 1, r"/jobs\.db cannot be written by this user: change its owner or its rights"),
        (
            ".",
            0o555,
            1,
            r"the folder of \S+/jobs\.db cannot be written|readonly database\): check the file, its folder",
        ),
        (".", 0o000, 2, r"/jobs\.db cannot be read \(Permission denied\): check the rights and the owner"),
    ],
)
def test_a_file_that_may_not_be_written_is_told_and_not_waited_for(here, tmp_path, words, place, rights, code, said):
    kept = tmp_path / "kept"
    kept.mkdir()
    here.app(str(kept / "jobs.db")).app.close()
    here.say("migrate", "--app", "tasks.py")
    (kept / place).chmod(rights)
    try:
        asked = [*UNPRIVILEGED, DULY, *words]
        answer = subprocess.run(
            asked, cwd=tmp_path, env=here.environ(), capture_output=True, text=True, timeout=30, check=False
        )
    finally:
        (kept / place).chmod(0o700)
    assert answer.returncode == code
    [line] = answer.stderr.splitlines()
    assert re.search(said, line)
    assert answer.stdout == ""


# Stopping


def test_j18_sigterm_under_load_finishes_or_gives_back_what_runs_and_loses_nothing(here, url):
    tasks = here.app(url)
    quick = tasks.nap.enqueue_many(tasks.nap.call(0.03) for _ in range(300))
    long = tasks.nap.using(priority=5).enqueue_many(tasks.nap.call(120) for _ in range(3))
    worker = here.start("worker", "tasks:app", "--concurrency", "8", "--grace", "1s", "--log-level", "debug")
    worker.found("job.succeeded", count=20)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    jobs = {job.id: job for job in tasks.app.list(limit=1000)}
    assert set(jobs) == {job.id for job in [*quick, *long]}
    states = {(job.state, job.attempt) for job in jobs.values()}
    assert states == {(State.SUCCEEDED, 1), (State.READY, 0)}
    assert {jobs[job.id].state for job in long} == {State.READY}


def test_j18_a_second_signal_forces_and_still_gives_back_what_runs(here, url):
    tasks = here.app(url)
    job = tasks.nap.enqueue(120)
    worker = here.start("worker", "tasks:app", "--grace", "120s")
    here.wait_for_file("napping")
    worker.signal(signal.SIGINT)
    worker.line("worker.stopping")
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert time.monotonic() - began < 10
    assert (tasks.app.get(job.id).state, tasks.app.get(job.id).attempt) == (State.READY, 0)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_ctrl_c_on_a_terminal_says_once_how_long_running_jobs_have(here, processes):
    tasks = here.app()
    worker = here.start_on_terminal("worker", "tasks:app", "--processes", processes)
    worker.until("worker.started")
    tasks.nap.enqueue(600)
    here.wait_for_file("napping")
    worker.signal(signal.SIGINT)
    worker.until("stopping: running jobs have 30s; Ctrl-C again gives them back at once\r\n")
    worker.signal(signal.SIGINT)
    assert worker.wait() in (0, 1)  # 1: a loaded machine could not give them back within the second that is left
    assert worker.text.count("Ctrl-C again") == 1


def test_j18_a_thread_that_hangs_does_not_keep_the_worker(here, url):
    tasks = here.app(url)
    job = tasks.hang.enqueue()
    worker = here.start("worker", "tasks:app", "--grace", "500ms")
    here.wait_for_file("hanging")
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert time.monotonic() - began < 0.5 + 1 + 1.5  # and what a loaded machine takes
    assert (tasks.app.get(job.id).state, tasks.app.get(job.id).attempt) == (State.READY, 0)


def test_j18_an_event_loop_that_hangs_does_not_keep_the_worker_either(here):
    tasks = here.app()
    tasks.block.enqueue()
    worker = here.start("worker", "tasks:app", "--grace", "500ms")
    here.wait_for_file("blocking")
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 1
    assert time.monotonic() - began < 0.5 + 1 + 1.5
    worker.line("did not stop in time")


def test_j16_a_worker_begins_anew_when_half_of_its_threads_are_stuck(here, url):
    tasks = here.app(url)
    worker = here.start("worker", "tasks:app", "--concurrency", "2")
    worker.line("worker.started")
    stuck = tasks.overrun.enqueue()
    worker.line("worker.restarting .*half of its threads are stuck")
    first, second = worker.found("worker.started", count=2)
    assert re.search(r"worker=\S+", first)[0] != re.search(r"worker=\S+", second)[0]
    assert len({line for line in worker.lines if f"pid {worker.process.pid}" in line}) == 2
    assert tasks.app.get(stuck.id).state is State.DEAD
    assert tasks.add.enqueue(1, 2).result(PATIENCE) == 3
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


# Several processes


def test_j16_a_supervisor_starts_a_worker_again_whose_threads_are_stuck(here):
    tasks = here.app()
    supervisor = here.start("worker", "tasks:app", "--concurrency", "1", "--processes", "2")
    supervisor.found("worker.started", count=2)
    tasks.overrun.enqueue()
    supervisor.line("supervisor.worker_died .*half of its threads are stuck")
    supervisor.found("worker.started", count=3)
    supervisor.signal(signal.SIGTERM)
    assert supervisor.wait() == 0


def pids_of(supervisor: Program, *, count: int) -> list[int]:
    lines = supervisor.found("supervisor.started_worker", count=count)
    return [int(re.search(r"worker_pid=(\d+)", line)[1]) for line in lines]


def test_a_supervisor_restarts_a_worker_that_was_killed_and_stops_all_when_told(here, url):
    tasks = here.app(url)
    supervisor = here.start("worker", "tasks:app", "--processes", "2", "--concurrency", "4", "--grace", "5s")
    assert supervisor.line("^slots").split(maxsplit=1)[1] == "4 in each of 2 processes"
    supervisor.found("worker.started", count=2)
    os.kill(pids_of(supervisor, count=2)[0], signal.SIGKILL)
    supervisor.line('supervisor.worker_died .*how="killed by SIGKILL"')
    supervisor.found("worker.started", count=3)
    pids = pids_of(supervisor, count=3)
    assert tasks.add.enqueue(1, 2).result(PATIENCE) == 3
    supervisor.signal(signal.SIGTERM)
    assert supervisor.wait() == 0
    assert all(map(is_gone, pids))
    assert len(supervisor.found("worker.stopped", count=2)) == 2


def test_workers_end_when_their_supervisor_is_killed(here):
    here.app()
    supervisor = here.start("worker", "tasks:app", "--processes", "2", "--grace", "1s")
    supervisor.found("worker.started", count=2)
    pids = pids_of(supervisor, count=2)
    supervisor.signal(signal.SIGKILL)
    wait_until(lambda: all(map(is_gone, pids)), "workers end")
    assert len(supervisor.found("worker.stopped", count=2)) == 2


# Logs


def test_m04_a_line_of_json_has_every_field_of_an_attempt_and_not_its_payload(here, url):
    tasks = here.app(url)
    worker = here.start("worker", "tasks:app", "--log-json", "--log-level", "debug")
    worker.line("worker.started")
    done = tasks.add.using(key="sum", subject="order 5", correlation_id="c-1").enqueue(4711, 2)
    done.result(PATIENCE)
    dead = tasks.fail.enqueue("a secret word")
    told = json.loads(worker.line("job.succeeded"))
    assert (told["event"], told["level"], told["job_id"], told["task"]) == ("job.succeeded", "debug", done.id, "add")
    assert (told["correlation_id"], told["subject"], told["idempotency_key"]) == ("c-1", "order 5", "sum")
    assert (told["attempt"], told["outcome"], told["error_class"]) == (1, "succeeded", None)
    told = json.loads(worker.line("job.dead"))
    assert (told["job_id"], told["correlation_id"], told["attempt"]) == (dead.id, dead.id, 1)
    assert (told["outcome"], told["error_class"], told["idempotency_key"]) == ("dead", "ValueError", None)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert all(isinstance(json.loads(line), dict) for line in worker.lines)
    assert "4711" not in str(worker)
    assert "secret" not in str(worker)


@pytest.mark.parametrize(("wish", "coloured"), [("", True), ("1", False)])
def test_logs_on_a_terminal_have_colour_unless_nobody_wants_it(here, wish, coloured):
    here.app()
    worker = here.start_on_terminal("worker", "tasks:app", NO_COLOR=wish)
    worker.until("worker.started")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert (re.search(r"\x1b\[\d+m", worker.text) is not None) == coloured


def test_logs_for_people_quote_what_needs_it_and_are_plain_where_there_is_no_terminal(here):
    tasks = here.app()
    worker = here.start("worker", "tasks:app")
    tasks.fail.enqueue("word")
    line = worker.line("job.dead")
    assert re.match(r'\d\d:\d\d:\d\d error   job.dead job_id=\S+ task=fail .*reason="attempts used up"', line)
    assert "\x1b" not in str(worker)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


# Signs of life


def test_check_tells_whether_the_workers_here_are_alive(here):
    here.app()
    answer = here.say("check", "--worker")
    assert answer.returncode == 1
    assert "no worker of this user runs here" in answer.stdout
    supervisor = here.start("worker", "tasks:app", "--processes", "2")
    supervisor.found("worker.started", count=2)
    pids = pids_of(supervisor, count=2)
    wait_until(lambda: len(json.loads(here.say("check", "--worker", "--json").stdout)["workers"]) == 2, "both")
    told = json.loads(here.say("check", "--worker", "--json").stdout)
    assert told["alive"]
    assert {one["pid"] for one in told["workers"]} == set(pids)
    answer = here.say("check", "--worker")
    assert answer.returncode == 0
    assert answer.stdout.count(" is alive: last sign of life") == 2

    os.kill(pids[0], signal.SIGSTOP)
    try:
        wait_until(lambda: here.say("check", "--worker", "--within", "3s").returncode == 1, "silence")
        assert f"(pid {pids[0]}) is silent" in here.say("check", "--worker", "--within", "3s").stdout
    finally:
        os.kill(pids[0], signal.SIGKILL)  # and its file stays behind
    supervisor.found("worker.started", count=3)
    wait_until(lambda: here.say("check", "--worker").returncode == 0, "alive again")
    assert f"pid {pids[0]})" not in here.say("check", "--worker").stdout
    supervisor.signal(signal.SIGTERM)
    assert supervisor.wait() == 0
    assert here.say("check", "--worker").returncode == 1
    assert list((here.path / "run").iterdir()) == []


def test_check_finds_an_event_loop_that_hangs(here):
    tasks = here.app()
    worker = here.start("worker", "tasks:app")
    tasks.block.enqueue()
    here.wait_for_file("blocking")
    wait_until(lambda: here.say("check", "--within", "2s").returncode == 1, "silence")
    assert "is silent" in here.say("check", "--within", "2s").stdout
    worker.process.kill()


def test_check_needs_no_flag(here):
    alone, flagged = here.say("check"), here.say("check", "--worker")
    assert (alone.returncode, alone.stdout) == (flagged.returncode, flagged.stdout)
    assert "no worker of this user runs here" in alone.stdout


def test_the_file_of_a_process_whose_number_was_given_to_another_is_cleared_away(tmp_path, monkeypatch):
    monkeypatch.setenv("DULY_RUN_DIR", str(tmp_path / "run"))
    pulse = liveness.Pulse("host-1-abcd")
    pulse.begin()
    [file] = (tmp_path / "run").iterdir()
    assert [(sign.worker, sign.pid) for sign in liveness.signs()] == [("host-1-abcd", os.getpid())]
    said = json.loads(file.read_text())

    file.write_text(json.dumps(said | {"where": "another container"}))
    assert list(liveness.signs()) == []
    assert file.exists()  # not ours to judge
    file.write_text("half a fi")
    assert list(liveness.signs()) == []
    file.write_text(json.dumps(said | {"begun": "long ago"}))
    assert list(liveness.signs()) == []
    assert not file.exists()

    pulse.touch()  # and is there again if its owner lives
    assert file.exists()
    pulse.end()
    assert not file.exists()


def test_a_folder_that_cannot_be_written_to_is_told_of_once(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DULY_RUN_DIR", str(tmp_path / "file" / "run"))
    pulse = liveness.Pulse("host-1-abcd")
    for _ in range(3):
        pulse.touch()
    pulse.end()
    assert [record.message for record in caplog.records] == ["worker.liveness_failed"]
    assert list(liveness.signs()) == []
