"""`duly doctor`, `backup`, `restore`, `prune` and `migrate --app`, through the real program."""

from __future__ import annotations

import json
import re
import signal
import socket
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from duly import Duly
from duly.model import Change, Claimed, Failure, NewJob, State, Terms
from duly.rules.keys import Ids
from duly.store import batches, migrate, ops
from duly.store.op import Finish
from tests.databases import fresh
from tests.edges.programs import PATIENCE, Folder, assert_within, complaint, say, wait_until
from tests.edges.stock import asked_and_said_no

TASKS = """
import time
from pathlib import Path
from duly import Duly

app = Duly({url!r})

def ran(name: str) -> str:
    with open("ran.txt", "a") as file:
        file.write(name + "\\n")
    return name

@app.task
def note(name: str) -> str:
    return ran(name)

@app.task
def stay(name: str) -> str:
    Path("began").touch()
    while not Path("go").exists():
        time.sleep(0.02)
    return ran(name)
"""
MINUTE, DAY = 60_000, 86_400_000
new_id = Ids()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request) -> str:
    return fresh(request, request.param, "duly.db")


@pytest.fixture
def here(folder) -> Folder:
    (folder.path / "tasks.py").write_text(TASKS.format(url=str(folder.path / "duly.db")))
    return folder


class Database:
    """A database to prepare: what happened in it, and how long ago."""

    def __init__(self, url: str) -> None:
        self.app = Duly(url)
        self.run = self.app.driver.run
        self.now = self.run(ops.clock())

    def add(self, count: int = 1, *, ago: int = 0, task: str = "note", **terms: Any) -> list[str]:
        jobs = [NewJob(new_id(), '{"name": "x"}') for _ in range(count)]
        self.run(ops.enqueue(Terms(task=task, **terms), jobs, now=self.now - ago))
        return [job.id for job in jobs]

    def claim(self, *, ago: int = 0, limit: int = 1, queue: str = "default") -> list[Claimed]:
        self.token = getattr(self, "token", 0) + 1
        return self.run(ops.claim(queue, limit=limit, token=self.token, worker="w", now=self.now - ago))

    def finish(self, change: Change, *, ago: int = 0, limit: int = 1) -> None:
        jobs = self.claim(ago=ago, limit=limit)
        self.run(ops.finish([Finish(job, change) for job in jobs], now=self.now - ago))

    def live(self, *tasks: str, queues: tuple[str, ...] = ("default",)) -> None:
        self.run(ops.register("w", host="host-1", pid=1, queues=queues, tasks=tasks, beat_ms=60_000))

    def states(self) -> dict[str, State]:
        return {job.id: job.state for job in self.app.list(limit=5000)}


@pytest.fixture
def database(url) -> Iterator[Database]:
    made = Database(url)
    yield made
    made.app.close()


DEAD = Change(State.DEAD, error=Failure("ValueError", "no"), reason="attempts are used up")


# Doctor


class Diagnosis:
    """What `duly doctor --json` answered."""

    def __init__(self, answer: subprocess.CompletedProcess[str]) -> None:
        assert answer.stderr == "", answer
        self.code = answer.returncode
        self.said = json.loads(answer.stdout)
        assert self.said["good"] == (self.code == 0)

    def of(self, name: str) -> list[tuple[str, str, str]]:
        return [(f["level"], f["text"], f["remedy"]) for f in self.said["findings"] if f["name"] == name]

    @property
    def errors(self) -> list[str]:
        return [f["name"] for f in self.said["findings"] if f["level"] == "error"]


def doctor(here: Folder, url: str, *words: str) -> Diagnosis:
    return Diagnosis(here.say("doctor", "--url", url, "--json", *words))


def at_ease(url: str) -> list[str]:
    """The errors of a healthy database: the server of these tests has no fsync."""
    return ["durability"] if "://" in url else []


@pytest.mark.process
def test_a_healthy_database_with_a_worker_has_no_errors(here, url):
    worker = here.start("worker", "tasks:app", "--url", url)
    worker.line("worker.started")
    found = doctor(here, url, "--app", "tasks:app")
    assert found.errors == at_ease(url)
    assert found.of("workers")[0][:2] == ("ok", f"1 worker alive on {socket.gethostname()}")
    for name in ("schema", "tasks", "pauses", "leases", "queues", "schedules", "dead"):
        assert [level for level, _, _ in found.of(name)] == ["ok"], name
    assert found.of("content") == []


def test_each_finding_has_a_line_and_what_is_wrong_has_a_remedy_below(here, url, database):
    database.add()
    answer = here.say("doctor", "--url", url, "--verbose")
    assert answer.returncode == 1
    lines = answer.stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if re.match(r"error +workers", line))
    assert lines[at].endswith("no worker is alive, and jobs are due in default")
    assert lines[at + 1].strip() == "to do: start one: duly worker module:app"
    assert re.search(r"^ok +pauses +nothing is paused$", answer.stdout, re.MULTILINE)
    assert re.search(r"^lease +30s +default$", answer.stdout, re.MULTILINE)
    assert re.search(r"^url .* argument$", answer.stdout, re.MULTILINE)


def test_no_worker_is_an_error_only_while_something_is_due(here, url, database):
    assert doctor(here, url).of("workers")[0][0] == "warning"
    database.add(delay_ms=DAY)
    assert doctor(here, url).errors == at_ease(url)
    database.add()
    assert "workers" in doctor(here, url).errors
    database.app.pause(queue="default", by="anna", why="it rains")
    found = doctor(here, url)
    assert "workers" not in found.errors
    level, text, remedy = found.of("pauses")[0]
    assert level == "warning"
    assert re.search(r"queue 'default' is paused by anna since .*: it rains", text)
    assert remedy.endswith("duly queues resume default")
    assert found.of("workers")[0][:2] == ("warning", "no worker is alive; what is due is paused, in default")


def test_silent_workers_may_run_and_wait_for_the_database(here, url, database):
    database.app.driver.run(ops.register("w", host="h", pid=1, queues=["default"], tasks=[], beat_ms=1, now=1_000))
    level, text, remedy = doctor(here, url).of("workers")[0]
    assert (level, text) == ("warning", "no heartbeat of 1 worker was recorded lately; nothing is due")
    assert remedy.startswith("see whether they run (duly check); if not, start one")


def test_what_is_due_in_a_paused_queue_is_a_warning(here, url, database):
    database.live("note")
    database.add(ago=5 * MINUTE, queue="two words")
    database.app.pause(queue="two words", by="anna", why="it rains")
    [(level, text, remedy)] = doctor(here, url).of("queues")
    assert level == "warning"
    assert re.fullmatch(r"queue 'two words': jobs are due for 5m.*, but it is paused by anna \(1 ready\)", text)
    assert remedy == "resume it: duly queues resume 'two words'"


def test_a_queue_that_no_living_worker_serves_is_an_error_while_jobs_are_due(here, url, database):
    database.live("note")
    database.add(queue="mail")
    assert [text for level, text, _ in doctor(here, url).of("workers") if level == "error"] == [
        "jobs are due in mail, which no living worker serves"
    ]


def test_tasks_that_nobody_knows_are_named(here, url, database):
    database.live("other", "note")
    assert [level for level, _, _ in doctor(here, url).of("tasks")] == ["ok"]
    database.add(2, task="lost")
    assert database.run(ops.park("default")) == 2
    said = [text for _, text, _ in doctor(here, url, "--app", "tasks:app").of("tasks")]
    assert said == [
        "2 jobs of task 'lost' in queue 'default' wait for a worker that knows the task",
        "no living worker knows stay of this app",
    ]


def test_leases_that_nobody_takes_over_are_an_error(here, url, database):
    database.add(3, ago=10 * MINUTE)
    database.claim(ago=10 * MINUTE)
    database.claim(ago=35_000)  # its lease ended just now, and may yet be taken
    database.claim()
    level, text, remedy = doctor(here, url).of("leases")[0]
    assert level == "error"
    assert text.startswith("1 job is held by dead workers for 9m")
    assert "start a worker" in remedy


def test_a_due_job_that_waits_for_long_and_dead_letters_are_warnings(here, url, database):
    database.live("note")
    database.add(ago=3 * DAY)
    database.finish(DEAD, ago=2 * DAY)
    database.add(ago=5 * MINUTE)
    found = doctor(here, url)
    assert found.errors == at_ease(url)
    level, text, remedy = found.of("queues")[0]
    assert (level, text.partition(" (")[0][:50]) == ("warning", "queue 'default': the oldest due job has waited for")
    assert "duly why" in remedy
    level, text, _ = found.of("dead")[0]
    assert (level, text[:28]) == ("warning", "1 dead letter, the oldest 2d")


def test_batches_that_were_never_sealed_are_named(here, url, database):
    opened = [
        database.run(batches.open_batch(new_id(), name, key=key, now=database.now - ago))
        for name, key, ago in (("import", "k", 3 * 60 * MINUTE), ("being filled", None, MINUTE))
    ]
    [(level, text, remedy)] = doctor(here, url).of("batches")
    assert (level, text) == ("warning", "batch 'import' is unsealed for 3h: the filling was interrupted")
    assert remedy == f"fill it again under its key, or cancel it: duly batches cancel {opened[0].id}"
    database.run(batches.open_batch(new_id(), "other", now=database.now - DAY))
    assert doctor(here, url).of("batches")[0][1].startswith("2 batches are unsealed for 1d:")
    for one in database.app.batches.list():
        database.app.batches.get(one.id).cancel()
    assert doctor(here, url).of("batches") == [("ok", "no batch is unsealed for longer than 1h", "")]


def test_a_database_that_cannot_be_reached_is_a_finding(here):
    began = time.monotonic()
    found = doctor(here, "postgresql://nobody:secret@127.0.0.1:1/db")
    assert_within(2, began)
    assert found.errors == ["database"]
    assert re.search(r"127\.0\.0\.1:1/db cannot be reached.*refused", found.of("database")[0][1])
    assert found.said["settings"]["url"] == {"value": "postgresql://nobody@127.0.0.1:1/db", "origin": "argument"}
    assert "secret" not in json.dumps(found.said)


def test_a_server_that_says_nothing_is_given_up_soon(here):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        found = doctor(here, f"postgresql://nobody@127.0.0.1:{silent.getsockname()[1]}/db")
        assert_within(6, began)
    assert found.errors == ["database"]


def test_missing_tables_and_damage_are_findings(here, postgres):
    url = postgres.new_database()
    assert "duly migrate" in doctor(here, url).of("schema")[0][1]
    postgres.drop(url)
    path = here.path / "duly.db"
    database = Database(str(path))
    database.add(2000)
    database.app.close()
    assert doctor(here, str(path), "--deep").of("content")[0][0] == "ok"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xa5" * 8192)
    assert "content" in doctor(here, str(path), "--deep").errors
    path.write_text("a letter to somebody, and long enough to be one. " * 20)
    assert doctor(here, str(path)).errors == ["database"]


# Backup and restore


@pytest.mark.process
def test_a_backup_taken_while_a_worker_writes_is_whole_and_of_one_moment(here):
    path = here.path / "duly.db"
    database = Database(str(path))
    database.add(600)
    database.app.close()
    worker = here.start("worker", "tasks:app", "--concurrency", "4")
    wait_until(lambda: (here.path / "ran.txt").exists(), "a first job")
    for number in range(3):
        answer = here.say("backup", f"{number}.db")
        assert re.fullmatch(rf"{number}\.db: [0-9.]+ [kM]B in [0-9.]+ s\n", answer.stdout), answer
        with sqlite3.connect(here.path / f"{number}.db") as copy:
            assert copy.execute("pragma integrity_check").fetchone() == ("ok",)
            live, done = (
                copy.execute(f"select count(*) from {name}").fetchone()[0] for name in ("duly_job", "duly_done")
            )
        copy.close()
        assert live + done == 600
    assert live < 600
    wait_until(lambda: len(ran(here)) >= 600, "all jobs")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert len(ran(here)) == 600
    assert sorted(file.name for file in here.path.glob("*.db*")) == ["0.db", "1.db", "2.db", "duly.db"]
    assert list(here.path.glob(".*draft*")) == []


def test_a_backup_is_written_over_only_by_force(here):
    here.say("enqueue", "tasks:app", "note", '["a"]')
    (here.path / "old.db").write_text("something dear")
    assert "exists: name another file, or give --force" in complaint(
        here.say("backup", "old.db", "--app", "tasks:app"), 2
    )
    assert (here.path / "old.db").read_text() == "something dear"
    said = json.loads(here.say("backup", "old.db", "--force", "--json", DULY_APP="tasks:app").stdout)
    assert said["file"] == str(here.path / "old.db")
    assert said["bytes"] == (here.path / "old.db").stat().st_size


@pytest.mark.process
def test_what_is_held_runs_once_when_it_is_let_go_and_not_before(here):
    names = ["running", "ready-1", "ready-2", "mail"]
    worker = here.start("worker", "tasks:app", "--concurrency", "1", "--queues", "default")
    worker.line("worker.started")
    here.say("enqueue", "tasks:app", "stay", '["running"]')
    here.wait_for_file("began")
    here.say("enqueue", "tasks:app", "note", '["ready-1"]')
    here.say("enqueue", "tasks:app", "note", '["ready-2"]')
    here.say("enqueue", "tasks:app", "note", '["mail"]', "--queue", "mail")
    assert here.say("backup", "b.db").returncode == 0
    (here.path / "go").touch()
    wait_until(lambda: len(ran(here)) == 3, "the work after the backup")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    (here.path / "ran.txt").unlink()

    answer = here.say("restore", "b.db", "--hold", "--yes")
    assert answer.returncode == 0, answer
    assert "1 running, 3 ready, 0 scheduled, 0 waiting, 0 dead" in answer.stdout
    assert "held: 1 job that ran, 2 queues, 0 schedules" in answer.stdout
    assert "will run again" not in answer.stderr
    here.start("worker", "tasks:app", "--queues", "default,mail,probe").line("worker.started")
    assert here.say("enqueue", "tasks:app", "note", '["probe"]', "--queue", "probe", "--wait").stdout == '"probe"\n'
    assert ran(here) == ["probe"]

    assert here.say("queues", "resume", "default").returncode == 0
    wait_until(lambda: len(ran(here)) == 3, "the queue that goes on")
    assert sorted(ran(here)) == ["probe", "ready-1", "ready-2"]
    assert here.say("queues", "resume", "mail").returncode == 0
    assert here.say("jobs", "retry", "--error", "held:", "--yes").returncode == 0
    database = Database(str(here.path / "duly.db"))
    wait_until(lambda: set(database.states().values()) == {State.SUCCEEDED}, "everything")
    database.app.close()
    assert sorted(ran(here)) == sorted([*names, "probe"])


def ran(here: Folder) -> list[str]:
    file = here.path / "ran.txt"
    return file.read_text().split() if file.exists() else []


def held_backup(here: Folder) -> Path:
    """Make a backup with a job that ran, one that is ready and one that is scheduled."""
    database = Database(str(here.path / "duly.db"))
    database.add(2)
    database.claim()
    database.add(delay_ms=DAY)
    database.app.close()
    assert here.say("backup", "b.db").returncode == 0
    return here.path / "b.db"


def test_without_a_hold_it_warns_of_what_will_run_again(here):
    file = held_backup(here)
    before = file.read_bytes()
    for words in (["--dry-run"], ["--yes"]):
        answer = here.say("restore", "b.db", "--url", "new.db", *words)
        assert answer.returncode == 0, answer
        assert re.match(
            r"b\.db: [0-9.]+ kB, last written 20\d\d-\d\d-\d\d .* UTC\n1 running, 1 ready, 1 sch", answer.stdout
        )
        assert "1 job that ran when the backup was made will run again: --hold prevents it" in answer.stderr
        assert (here.path / "new.db").exists() == (words == ["--yes"])
    assert file.read_bytes() == before
    assert sorted(file.name for file in here.path.glob("b.db*")) == ["b.db"]
    database = Database(str(here.path / "new.db"))
    assert sorted(database.states().values()) == ["ready", "running", "scheduled"]
    database.app.close()


def test_a_restore_in_json_tells_what_was_there_and_what_is_held(here):
    held_backup(here)
    said = json.loads(here.say("restore", "b.db", "--hold", "--yes", "--json").stdout)
    assert said["contents"] == {"ready": 1, "scheduled": 1, "running": 1, "waiting": 0, "dead": 0, "due": True}
    assert said["held"] == {"jobs": 1, "queues": 1, "schedules": 0}
    assert said["restored"] is True


@pytest.mark.process
def test_a_file_that_a_worker_uses_is_restored_only_by_force_and_the_worker_goes_on_with_it(here):
    here.say("enqueue", "tasks:app", "note", '["again"]')
    here.say("backup", "b.db")
    here.start("worker", "tasks:app").line("worker.started")
    wait_until(lambda: ran(here) == ["again"], "the job")
    for words in (["--dry-run"], ["--yes"]):
        said = complaint(here.say("restore", "b.db", *words), 2)
        assert re.search(r"workers are alive in .*duly\.db .*: stop them first, or force it \(--force\)", said)
    assert here.say("restore", "b.db", "--dry-run", "--force").returncode == 0
    assert here.say("restore", "b.db", "--yes", "--force").returncode == 0
    wait_until(lambda: ran(here) == ["again", "again"], "the job of the backup")


def test_tables_of_the_application_that_the_backup_lacks_are_named_and_go_only_by_force(here):
    held_backup(here)
    with closing(sqlite3.connect(here.path / "duly.db", isolation_level=None)) as shop:
        shop.execute("create table orders (x)")
        for words in (["--dry-run"], ["--yes"]):
            said = complaint(here.say("restore", "b.db", *words), 2)
            assert re.search(r"duly\.db has tables that the backup lacks, .* \(orders\): .*--force", said)
        answer = here.say("restore", "b.db", "--dry-run", "--force")
        assert answer.returncode == 0
        assert "duly.db that b.db lacks will be dropped: orders\n" in answer.stderr
        assert shop.execute("select count(*) from orders").fetchone() == (0,)
        said = json.loads(here.say("restore", "b.db", "--yes", "--force", "--json").stdout)
        assert said["dropped"] == ["orders"]
        assert shop.execute("select name from sqlite_master where name = 'orders'").fetchall() == []


def test_a_database_is_not_held_while_workers_claim_unless_by_force(here, url, database):
    (job_id,) = database.add()
    database.claim()
    database.live("note")
    words = ("restore", "--hold", "--url", url)
    for more in (["--dry-run"], ["--yes"]):
        said = complaint(here.say(*words, *more), 2)
        assert re.search(r"1 worker alive in .* \(w\): stop them first, or give --force\. .* after 180 s", said)
    assert database.states() == {job_id: State.RUNNING}
    assert here.say(*words, "--dry-run", "--force").returncode == 0
    answer = here.say(*words, "--yes", "--force")
    assert "1 worker alive in" in answer.stderr
    assert database.states() == {job_id: State.WAITING}


def test_a_database_restored_by_other_means_is_held_where_it_is(here, url, database):
    running, ready = database.add(2)
    database.claim()
    words = ("restore", "--hold", "--url", url)
    assert "1 running, 1 ready" in here.say(*words, "--dry-run").stdout
    assert sorted(database.states().values()) == ["ready", "running"]
    answer = here.say(*words, "--yes", USER="anna")
    assert "held: 1 job that ran, 1 queue, 0 schedules" in answer.stdout
    assert database.states() == {running: State.WAITING, ready: State.READY}
    assert [(pause.name, pause.paused_by) for pause in database.app.paused()] == [("default", "anna")]


# Prune


def prepare_old(database: Database) -> list[str]:
    """Make 2,500 finished jobs that have had their time, one that has not, one dead, and an old worker."""
    database.add(2500, ago=9 * DAY)
    database.finish(Change(State.SUCCEEDED), ago=9 * DAY, limit=2500)
    kept = database.add(1, ago=9 * DAY)
    database.finish(DEAD, ago=9 * DAY)
    kept += database.add(1)
    database.finish(Change(State.SUCCEEDED))
    database.run(ops.register("old", host="h", pid=1, queues=["q"], tasks=[], beat_ms=1000, now=database.now - 9 * DAY))
    return kept


def test_prune_says_what_it_would_remove_and_removes_just_that(here, url, database):
    kept = prepare_old(database)
    words = ("prune", "--url", url)
    plan = here.say(*words, "--dry-run").stdout
    assert plan.startswith("would remove 2,500 finished jobs, ")
    assert plan.endswith("1 worker record\n")
    assert "stdin is not a terminal" in complaint(here.say(*words), 2)
    assert len(database.states()) == 2502
    assert here.say(*words, "--yes").stdout == plan.replace("would remove", "removed")
    assert sorted(database.states()) == sorted(kept)
    assert here.say(*words).stdout == "nothing has expired\n"


def test_prune_takes_only_what_is_named_and_keeps_the_rest_as_long_as_said(here, url, database):
    prepare_old(database)
    said = json.loads(
        here.say("prune", "--url", url, "--yes", "--only", "workers,done", "--json", "--keep", "10d").stdout
    )
    assert said == {"removed": {"done": 2500, "workers": 0}}
    answer = here.say("prune", "--url", url, "--yes", DULY_PRUNE_KEEP="8d", DULY_PRUNE_ONLY="workers")
    assert answer.stdout == "removed 1 worker record\n"


@pytest.mark.process
def test_who_says_no_keeps_everything(here):
    database = Database(str(here.path / "duly.db"))
    prepare_old(database)
    question = asked_and_said_no("prune", "--app", "tasks:app", cwd=here.path, **here.environ())
    assert "Remove 2,500 finished jobs" in question
    assert len(database.states()) == 2502
    database.app.close()


# Migrate


def test_migrate_takes_the_database_and_the_schema_of_an_app(here, postgres):
    url = postgres.new_database()
    (here.path / "theirs.py").write_text(f"from duly import Duly\napp = Duly({url!r}, schema='queue')\n")
    said = json.loads(here.say("migrate", "--app", "theirs:app", "--json").stdout)
    assert said["applied"] == [f"{step.number:04}_{step.name}" for step in migrate.migrations("postgres")]
    assert "--schema is for" in complaint(here.say("migrate", "--app", "theirs:app", "--schema", "x"), 2)
    app = Duly(url, schema="queue")
    assert app.list() == []
    app.close()
    postgres.drop(url)


# Mistakes

DOWN = "postgresql://nobody@127.0.0.1:1/db"
MISTAKES = [
    (["doctor", "--url", "mysql://host/db"], 2, r"'mysql:' is not a database URL"),
    (["doctor", "--url", "none.db"], 2, r"there is no database .*none\.db yet"),
    (["doctor", "--app", "task:app"], 2, r"no module 'task'.*did you mean 'tasks'\?"),
    (
        ["backup", "b.db", "--url", DOWN],
        2,
        r"pg_dump --format=custom --schema=duly --file=b\.db postgresql://nobody@127",
    ),
    (["backup", "b.db", "--url", DOWN, "--schema", "queue"], 2, r"--schema=queue"),
    (["backup", "."], 2, r"is a folder"),
    (["backup", "missing/b.db"], 2, r"the folder .*missing does not exist: create it"),
    (["backup", "duly.db", "--force"], 2, r"duly\.db is the database itself"),
    (["backup", "b.db", "--url", "letter.txt"], 1, r"letter\.txt is not a database"),
    (["backup", "b.db", "--url", "none.db"], 2, r"there is no database .*none\.db yet"),
    (["backup", "/dev/null", "--force"], 2, r"/dev/null is no regular file: name another one"),
    (["restore"], 2, r"Name the backup FILE, or give --hold"),
    (["restore", "duly.db", "--url", "new.db"], 2, r"stdin is not a terminal: give --yes, or --dry-run"),
    (["restore", "none.db", "--yes"], 2, r"there is no file none\.db"),
    (["restore", "letter.txt", "--yes"], 1, r"letter\.txt is not a database"),
    (["restore", "theirs.db", "--yes"], 2, r"theirs\.db is not a database of duly"),
    (["restore", "newer.db", "--yes"], 1, r"newer\.db has schema 9, which needs a newer duly"),
    (["restore", "duly.db", "--yes", "--url", "missing/jobs.db"], 2, r"the folder .*missing does not exist"),
    (["restore", "duly.db", "--yes", "--force", "--url", "letter.txt"], 1, r"move it away .* \(\S+/letter\.txt\)"),
    (["restore", "duly.db", "--dry-run", "--url", "letter.txt"], 1, r"letter\.txt is damaged, or is no database"),
    (["restore", "duly.db", "--yes", "--url", DOWN], 2, r"use pg_restore, then duly restore --hold --url"),
    (["restore", "--hold", "--yes", "--url", DOWN], 1, r"127\.0\.0\.1:1/db cannot be reached.*refused"),
    (["restore", "--hold", "--yes", "--url", "none.db"], 2, r"there is no database"),
    (["prune", "--keep", "-1d"], 2, r"--keep is '-1d', which is negative"),
    (["prune", "--keep", "long"], 2, r"--keep is 'long', which is not a duration"),
    (["prune", "--only", "jobs"], 2, r"cannot prune 'jobs'; what can be pruned: results, done, keys"),
    (["prune", "--only", ","], 2, r"--only names nothing"),
    (["prune", "--url", DOWN], 1, r"127\.0\.0\.1:1/db cannot be reached.*refused"),
    (["migrate", "--app", "tasks:ap"], 2, r"did you mean 'app'\?"),
]


@pytest.mark.parametrize(("words", "code", "said"), MISTAKES, ids=[" ".join(row[0])[:40] for row in MISTAKES])
def test_a_mistake_is_answered_with_what_to_do_and_nothing_is_written(here, words, code, said):
    folder = here.path
    (folder / "letter.txt").write_text("a letter to somebody, and long enough to be one. " * 20)
    for name in ("duly.db", "newer.db"):
        Database(str(folder / name)).app.close()
    with sqlite3.connect(folder / "newer.db") as newer, sqlite3.connect(folder / "theirs.db") as theirs:
        newer.execute("update duly_meta set value = '9'")
        theirs.execute("create table mine (x)")
    newer.close()
    theirs.close()
    before = {file: file.read_bytes() for file in folder.rglob("*")}
    began = time.monotonic()
    answer = complaint(say(folder, *words, PYTHONDONTWRITEBYTECODE="1"), code)
    assert_within(2 if DOWN in words else PATIENCE, began)
    assert re.search(said, answer, re.DOTALL), answer
    assert {file: file.read_bytes() for file in folder.rglob("*")} == before
