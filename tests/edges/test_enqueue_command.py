"""`duly enqueue`, through the real program: what it prints where, what it waits for, what it refuses."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from duly import Duly
from duly.model import JobRecord, State
from duly.store import ops
from tests.databases import fresh
from tests.edges.programs import DULY, PATIENCE, Folder, complaint, say
from tests.edges.stock import shut
from tests.edges.watch import Watch

TASKS = """
import time
from datetime import datetime
from pathlib import Path
from duly import Cancel, Duly, SyncCtx

app = Duly({url!r})

@app.task(queue="sums", priority=3)
def add(a: int, b: int = 2) -> int:
    return a + b

@app.task(key=lambda when: f"day:{{when.date()}}")
def daily(when: datetime) -> str:
    return f"on {{when:%d.%m.}} {{type(when).__name__}} — ü"

@app.task(max_attempts=1)
def fail(word: str) -> None:
    raise ValueError(word)

@app.task
def stop() -> None:
    raise Cancel("no more of it")

@app.task
def part(ctx: SyncCtx) -> str:
    ctx.progress(40, "parsing")
    while not Path("go").exists():
        time.sleep(0.02)
    return "done"

@app.task(keep=0)
def gone() -> None:
    return None
"""
ID = r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request) -> str:
    return fresh(request, request.param)


@pytest.fixture
def here(folder) -> Folder:
    (folder.path / "tasks.py").write_text(TASKS.format(url=str(folder.path / "jobs.db")))
    return folder


def job_of(url: str, job_id: str) -> JobRecord:
    app = Duly(url)
    try:
        found = app.get(job_id)
    finally:
        app.close()
    assert found is not None
    return found


def jobs_in(url: str) -> list[JobRecord]:
    app = Duly(url)
    try:
        return app.list()
    finally:
        app.close()


# Adding


def test_a_queue_that_nobody_has_is_warned_of_and_used_all_the_same(here, url):
    answer = here.say("enqueue", "tasks:app", "add", "[1]", "--queue", "sum", "--url", url)
    assert answer.returncode == 0
    assert answer.stderr.splitlines()[-1] == (
        "duly: no task of this app has the queue 'sum' and no living worker serves it: did you mean 'sums'?"
    )
    assert jobs_in(url)[0].queue == "sum"
    app = Duly(url)
    app.driver.run(ops.register("w", host="h", pid=1, queues=["sum"], tasks=[], beat_ms=60_000))
    app.close()
    assert here.say("enqueue", "tasks:app", "add", "[1]", "--queue", "sum", "--url", url).stderr == ""
    assert here.say("enqueue", "tasks:app", "add", "[1]", "--queue", "sums", "--url", url).stderr == ""


def test_b09_a_full_queue_is_told_with_what_to_do_and_nothing_is_added(here, url):
    assert here.say("enqueue", "tasks:app", "add", "[1]", "--queue", "sums", "--url", url).returncode == 0
    assert here.say("queues", "limit", "sums", "--depth", "1", "--url", url).returncode == 0
    answer = here.say("enqueue", "tasks:app", "add", "[1]", "--queue", "sums", "--url", url)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert "queue 'sums' is full: 1 job waits in it, and one more would exceed its limit of 1." in answer.stderr
    assert len(jobs_in(url)) == 1


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "stdin", "payload"),
    [
        (['{"a": 1, "b": 5}'], "", {"a": 1, "b": 5}),
        (["[1, 5]"], "", {"a": 1, "b": 5}),
        (["[1]"], "", {"a": 1}),
        (["-"], '{"a": 7}', {"a": 7}),
    ],
)
def test_the_id_stands_alone_on_stdout_and_the_arguments_are_in_the_job(here, url, words, stdin, payload):
    answer = subprocess.run(
        [DULY, "enqueue", "tasks:app", "add", *words, "--url", url],
        cwd=here.path,
        env=here.environ(),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert re.fullmatch(f"{ID}\n", answer.stdout)
    job = job_of(url, answer.stdout.strip())
    assert (job.task, job.queue, job.priority, job.payload) == ("add", "sums", 3, payload)


def test_a_task_without_arguments_needs_none(here):
    answer = here.say("enqueue", "tasks.py", "stop")
    assert job_of(str(here.path / "jobs.db"), answer.stdout.strip()).payload == {}


def test_the_first_one_makes_the_file_and_tells_its_whole_path(here):
    first, second = (here.say("enqueue", "tasks:app", "stop") for _ in range(2))
    assert first.stderr == f"duly: created the database {here.path / 'jobs.db'}\n"
    assert second.stderr == ""


def test_every_term_can_be_given_as_a_flag_or_in_the_environment(here, url):
    soon = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=3)
    flags = ["--queue", "other", "--priority", "-9", "--key", "k", "--subject", "a matter", "--at", soon.isoformat()]
    job = job_of(url, here.say("enqueue", "tasks:app", "add", "[1]", *flags, "--url", url).stdout.strip())
    said = (job.queue, job.priority, job.key, job.subject, job.due_at, job.state)
    assert said == ("other", -9, "k", "a matter", int(soon.timestamp() * 1000), State.SCHEDULED)
    words = {"DULY_ENQUEUE_URL": url, "DULY_ENQUEUE_DELAY": "5m", "DULY_ENQUEUE_QUEUE": "e"}
    job = job_of(url, here.say("enqueue", "tasks:app", "add", "[1]", **words).stdout.strip())
    assert job.queue == "e"
    assert job.due_at == job.created_at + 300_000


def test_a_moment_without_a_zone_is_utc(here):
    job_id = here.say("enqueue", "tasks:app", "add", "[1]", "--at", "2100-01-31T12:00").stdout.strip()
    due = datetime(2100, 1, 31, 12, tzinfo=UTC)
    assert job_of(str(here.path / "jobs.db"), job_id).due_at == int(due.timestamp() * 1000)


def test_a_key_that_is_taken_adds_nothing_and_says_so(here, url):
    words = ("enqueue", "tasks:app", "add", "--url", url, "--key", "once")
    first = here.say(*words, "[1]")
    again = here.say(*words, "[1]")
    assert again.stdout == first.stdout
    assert "has this key already: nothing was added" in again.stderr
    assert json.loads(here.say(*words, "[1]", "--json").stdout) == {"id": first.stdout.strip(), "deduplicated": True}
    other = complaint(here.say(*words, "[2]"), 1)
    assert "which has other arguments" in other
    assert len(jobs_in(url)) == 1


def test_a_function_that_makes_the_key_gets_the_arguments_as_the_task_does(here):
    for text in ('{"when": "2030-05-01T08:00:00Z"}', '["2030-05-01T09:00:00Z"]'):
        here.say("enqueue", "tasks:app", "daily", text)
    assert [job.key for job in jobs_in(str(here.path / "jobs.db"))] == ["day:2030-05-01"]


# Waiting


@pytest.mark.process
def test_waiting_prints_the_result_as_json_and_nothing_else(here, url):
    here.start("worker", "tasks:app", "--url", url).line("worker.started")
    answer = here.say("enqueue", "tasks:app", "add", "[1]", "--wait", "--url", url)
    assert (answer.returncode, answer.stdout) == (0, "3\n"), answer
    assert re.fullmatch(f"duly: waiting for job {ID}\n", answer.stderr)
    text = here.say("enqueue", "tasks:app", "daily", '["2030-05-01T08:00:00Z"]', "--wait", "--url", url).stdout
    assert json.loads(text) == "on 01.05. datetime — ü"
    said = json.loads(here.say("enqueue", "tasks:app", "add", "[4]", "--wait", "--json", "--url", url).stdout)
    assert (said["state"], said["result"], said["deduplicated"]) == ("succeeded", 6, False)


@pytest.mark.process
def test_a_job_that_dies_or_is_cancelled_fails_the_command_with_its_error(here, url):
    here.start("worker", "tasks:app", "--url", url).line("worker.started")
    dead = complaint(here.say("enqueue", "tasks:app", "fail", '["too bad"]', "--wait", "--url", url), 1)
    assert "is dead" in dead
    assert "ValueError: too bad" in dead
    cancelled = complaint(here.say("enqueue", "tasks:app", "stop", "--wait", "--url", url), 1)
    assert "was cancelled: no more of it" in cancelled
    answer = here.say("enqueue", "tasks:app", "fail", '["so bad"]', "--wait", "--json", "--url", url)
    assert answer.returncode == 1
    said = json.loads(answer.stdout)
    assert (said["state"], said["error"]) == ("dead", "ValueError: so bad")


def test_who_waits_for_what_nobody_runs_is_told_at_once_and_after_the_time(here, url):
    waiting = here.say("enqueue", "tasks:app", "add", "[1]", "--wait", "--timeout", "200ms", "--url", url)
    answer = complaint(waiting, 1, lines=4)  # that it waits, for whom, and that it waits no more
    assert "no living worker knows task 'add' and serves queue 'sums': start one with duly worker tasks:app" in answer
    assert "has not ended within 200ms, and continues" in answer
    assert jobs_in(url)[0].state is State.READY


def test_who_waits_for_what_is_not_due_or_paused_is_told_so(here):
    words = ("enqueue", "tasks:app", "add", "[1]", "--wait", "--timeout", "100ms")
    assert "it is not due before" in here.say(*words, "--delay", "1h").stderr
    app = Duly(str(here.path / "jobs.db"))
    app.pause(queue="sums", by="anna", why="it rains")
    app.close()
    assert "queue 'sums' is paused by anna: it rains" in here.say(*words).stderr


def test_who_waits_behind_another_in_an_order_is_told_behind_whom(here):
    (here.path / "lines.py").write_text(
        "from duly import Duly\n"
        "app = Duly('jobs.db')\n"
        "@app.task(ordering_key=lambda account: account)\n"
        "def book(account: str) -> None: ...\n"
    )
    first = here.say("enqueue", "lines:app", "book", '["a"]').stdout.strip()
    waiting = here.say("enqueue", "lines:app", "book", '["a"]', "--wait", "--timeout", "100ms")
    assert re.search(rf"it waits behind job {first} \(ready, .*\) in the order of 'book:a'", waiting.stderr)
    assert "start one with duly worker lines:app" in waiting.stderr


@pytest.mark.process
def test_a_database_that_goes_away_is_waited_for_and_the_result_told_all_the_same(here, postgres_url):
    waiting = here.start("enqueue", "tasks:app", "add", "[1]", "--wait", "--url", postgres_url)
    waiting.line("no living worker")
    with shut(postgres_url):
        away = waiting.line("is down")
    assert re.match(
        rf"duly: the database is down, waiting for it; job {ID} continues. (the connection to )?Postgre", away
    )
    here.start("worker", "tasks:app", "--url", postgres_url).line("worker.started")
    assert waiting.wait() == 0
    assert "3" in waiting.lines
    assert str(waiting).count("is down") == 1


@pytest.mark.process
def test_a_database_that_stays_away_is_given_up_after_the_time(here, postgres_url):
    waiting = here.start("enqueue", "tasks:app", "add", "[1]", "--wait", "--timeout", "2s", "--url", postgres_url)
    waiting.line("no living worker")
    with shut(postgres_url):
        waiting.line("is down")
        assert waiting.wait() == 1
    waiting.line("has not ended within 2s, and continues")


@pytest.mark.process
def test_ctrl_c_while_waiting_leaves_the_job_alone_and_says_so(here):
    waiting = here.start("enqueue", "tasks:app", "add", "[1]", "--wait")
    waiting.line("no living worker")
    waiting.signal(signal.SIGINT)
    assert waiting.wait() == 1
    job = jobs_in(str(here.path / "jobs.db"))[0]
    assert waiting.line("stopped waiting") == (
        f"duly: stopped waiting; job {job.id} continues. Show it with: duly jobs show {job.id}"
    )
    assert "Aborted" not in str(waiting)
    assert job.state is State.READY
    assert job.cancel_requested_at is None


@pytest.mark.process
def test_a_terminal_is_shown_how_far_the_job_is(here):
    here.start("worker", "tasks:app").line("worker.started")
    with on_terminal(here, "part", "--wait") as command:
        command.until("running 40 % parsing")
        (here.path / "go").touch()
        command.rest()
        assert command.ended() == ('"done"\n', None)
    assert command.process.returncode == 0


@pytest.mark.process
def test_a_terminal_is_told_how_to_look_at_the_job(here):
    with on_terminal(here, "add", "[1]") as command:
        command.rest()
        job_id = command.ended()[0].strip()
    assert command.process.returncode == 0
    assert f"duly jobs show {job_id}" in command.seen


def on_terminal(here: Folder, *words: str) -> Watch:
    return Watch("enqueue", "tasks:app", *words, terminal=["stderr"], cwd=here.path, **here.environ())


# Mistakes

MISTAKES = [
    (["tasks:app", "ad", "[1]"], 2, r"tasks:app has no task 'ad': did you mean 'add'\? Its tasks are add, daily, fail"),
    (["tasks:app", "xyzzy"], 2, r"has no task 'xyzzy': its tasks are add"),
    (["tasks:ap", "add", "[1]"], 2, r"did you mean 'app'\?"),
    (["task:app", "add", "[1]"], 2, r"there is no module 'task'.*did you mean 'tasks'\?"),
    (["tasks:app", "add", '["one"]'], 2, r"add: argument `a`: expected `int`, got `str`"),
    (["tasks:app", "add", '{"a": 1, "b": [2]}'], 2, r"argument `b`: expected `int`, got `array` \(`b` is int\)"),
    (["tasks:app", "add"], 2, r"add\(a, b\): argument `a` \(int\) is missing"),
    (["tasks:app", "add", '{"a": 1, "bb": 2}'], 2, r"there is no argument `bb`; instead of `bb` did you mean `b`\?"),
    (["tasks:app", "add", "[1, 2, 3]"], 2, r"add\(a, b\): too many positional arguments"),
    (["tasks:app", "add", "{a: 1}"], 2, r"ARGS is not JSON: expecting property name.* at column 2, before 'a: 1}'"),
    (["tasks:app", "add", "[1"], 2, r"ARGS is not JSON: .* at column 3, where it ends"),
    (["tasks:app", "add", "[1,\n2}"], 2, r"at line 2, column 2, before '}'"),
    (["tasks:app", "add", "-"], 2, r"stdin is not JSON: expecting value at column 1, where it ends"),
    (["tasks:app", "add", "5"], 2, r"ARGS is 5, neither an object nor an array"),
    (["tasks:app", "add", "[NaN]"], 2, r"has NaN in it, which is not JSON"),
    (["tasks:app", "add", "[1e999]"], 2, r"a is inf, which JSON cannot hold"),
    (["tasks:app", "add", "[" * 100_000], 2, r"nested too deeply"),
    (["tasks:app", "add", "[" * 600 + "]" * 600], 2, r"add: the value is nested 600 levels deep, the limit is 500"),
    (["tasks:app", "add", f"[{'1' * 4301}]"], 2, r"ARGS has a number of more than 4,300 digits: give it as a text"),
    (["tasks:app", "add", '{"a": 1, "b": {"c": 1, "c": 2}}'], 2, r"ARGS has the name 'c' twice in one object"),
    (["tasks:app", "fail", json.dumps(["x" * 96_000])], 2, r"fail: the payload has 96,\d+ bytes, the limit is 96,000"),
    (["tasks:app", "add", "[1]", "--delay", "-5m"], 2, r"--delay is '-5m', which is negative"),
    (["tasks:app", "add", "[1]", "--delay", "5 parsecs"], 2, r"'parsecs' is no unit.*the units are w d h m s ms"),
    (["tasks:app", "add", "[1]", "--delay", "5m", "--at", "2100-01-01"], 2, r"give --delay or --at, not both"),
    (["tasks:app", "add", "[1]", "--at", "2001-01-31"], 2, r"--at is 2001-01-31, which is \d+d.* in the past"),
    (["tasks:app", "add", "[1]", "--at", "tomorrow"], 2, r"--at is 'tomorrow', which is no date: write 2030-01-31"),
    (["tasks:app", "add", "[1]", "--timeout", "5s"], 2, r"give --wait too"),
    (["tasks:app", "add", "[1]", "--wait", "--timeout", "soon"], 2, r"--timeout is 'soon', which is not a duration"),
    (["tasks:app", "gone", "--wait"], 2, r"gone has keep=0.*omit --wait"),
    (["tasks:app", "add", "[1]", "--queue", ""], 2, r"queue= is ''"),
    (["tasks:app", "add", "[1]", "--priority", "high"], 2, r"'high' is not a valid integer"),
    (["tasks:app", "add", "[1]", "--key", ""], 2, r"key"),
    (["tasks:app", "add", "[1]", "--url", "mysql://host/db"], 2, r"'mysql:' is not a database URL"),
    (["tasks:app", "add", "[1]", "--url", "missing/jobs.db"], 2, r"the folder .*missing does not exist: create it"),
    (["tasks:app", "add", "[1]", "--url", "postgresql://no@127.0.0.1:1/db"], 1, r"127\.0\.0\.1:1/db.*refused"),
]


@pytest.mark.parametrize(("words", "code", "said"), MISTAKES, ids=[row[2][:30] for row in MISTAKES])
def test_a_mistake_is_answered_in_a_line_and_nothing_is_written(here, words, code, said):
    before = listing(here.path)
    began = time.monotonic()
    answer = complaint(say(here.path, "enqueue", *words, PYTHONDONTWRITEBYTECODE="1"), code)
    assert re.search(said, answer, re.DOTALL), answer
    assert listing(here.path) == before
    assert time.monotonic() - began < 5


def listing(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.rglob("*"))


def test_tables_that_are_missing_are_told_with_the_command_that_makes_them(here, postgres):
    url = postgres.new_database()
    answer = complaint(here.say("enqueue", "tasks:app", "add", "[1]", "--url", url), 1)
    assert "has no duly tables yet: run `duly migrate" in answer
    postgres.drop(url)
