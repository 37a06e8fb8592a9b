"""`duly bench`, through the real program: on both stores, interrupted, and used wrongly."""

from __future__ import annotations

import json
import signal
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from duly import Duly
from duly.bench.measure import Child, declare, see_all
from duly.bench.place import MARK, PREFIX, BenchFailed
from tests.edges.programs import is_gone, wait_until

pytestmark = pytest.mark.process

QUICK = ("bench", "--quick")


def schemas(url: str) -> set[str]:
    with psycopg.connect(url) as conn:
        return {name for (name,) in conn.execute("select nspname from pg_namespace").fetchall()}


def left_behind(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir() if file.name.startswith(PREFIX)]


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.slow
def test_every_part_is_measured_on_sqlite_and_nothing_is_left(folder):
    app = folder.app(str(folder.path / "duly.db")).app
    app.tasks["add"].enqueue(1, 2)
    ended = folder.run(*QUICK, "--json")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    told = json.loads(ended.stdout)
    assert {figure["part"] for figure in told["figures"]} == set("abce")
    assert {(figure["part"], figure["keep"]) for figure in told["figures"]} >= {("c", "kept"), ("c", "keep=0")}
    assert all(figure["duly"]["median"] > 0 for figure in told["figures"] if figure["part"] != "e")
    assert told["summary"].startswith("summary: sqlite: enqueue ")
    assert told["store"].startswith("SQLite ")
    assert left_behind(folder.path) == []
    [job] = app.list()
    assert (job.task, job.state) == ("add", "ready")


@pytest.mark.slow
def test_every_part_is_measured_on_postgresql_and_nothing_is_left(folder, postgres_url):
    app = Duly(postgres_url)
    before = schemas(postgres_url)
    ended = folder.run(*QUICK, "--url", postgres_url)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    for letter in "abce":
        assert f"({letter}) " in ended.stdout
    assert "warning: the server does not wait for its disk" in ended.stdout
    assert ended.stdout.splitlines()[-1].startswith("summary: postgres: enqueue ")
    assert schemas(postgres_url) == before
    with closing(app):
        assert app.list() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_file_and_no_process(folder, number):
    program = folder.start("bench", "--only", "c")
    wait_until(lambda: children_of(program.process.pid), "the first worker of the bench")
    assert left_behind(folder.path) != []
    workers = children_of(program.process.pid)
    program.signal(number)
    assert program.wait() == 128 + number, str(program)
    assert left_behind(folder.path) == []
    for worker in workers:  # one that was just being started ends by itself when nobody holds its stdin any more
        wait_until(lambda worker=int(worker): is_gone(worker), "a worker of the bench is left behind")
    assert "Traceback" not in str(program)


def test_a_signal_leaves_no_schema(folder, postgres_url):
    before = schemas(postgres_url)
    program = folder.start("bench", "--only", "c", "--url", postgres_url)
    wait_until(lambda: children_of(program.process.pid), "the first worker of the bench")
    assert schemas(postgres_url) == before | {"duly_bench"}
    program.signal(signal.SIGINT)
    assert program.wait() == 128 + signal.SIGINT
    assert schemas(postgres_url) == before
    assert "Traceback" not in str(program)


def test_a_schema_that_no_bench_left_is_not_touched(folder, postgres_url):
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute("create schema duly_bench")
        conn.execute("create table duly_bench.mine (a int)")
    ended = folder.run(*QUICK, "--only", "b", "--url", postgres_url)
    assert ended.returncode == 2
    assert "has a schema duly_bench that duly bench did not make. Rename it" in ended.stderr
    with psycopg.connect(postgres_url) as conn:
        assert conn.execute("select count(*) from duly_bench.mine").fetchone() == (0,)


def test_a_schema_that_an_earlier_bench_left_is_used_and_dropped(folder, postgres_url):
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute("create schema duly_bench")
        conn.execute(f"comment on schema duly_bench is '{MARK}'".encode())
        conn.execute("create table duly_bench.bare (a int)")
    ended = folder.run(*QUICK, "--only", "b", "--url", postgres_url)
    assert ended.returncode == 0, ended.stderr
    assert "duly_bench" not in schemas(postgres_url)


def test_two_at_once_in_one_database_do_not_meet(folder, postgres_url):
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute("select pg_advisory_lock(hashtext('duly bench'))")
        ended = folder.run(*QUICK, "--only", "b", "--url", postgres_url)
    assert ended.returncode == 1
    assert "another duly bench is running in PostgreSQL 127.0.0.1" in ended.stderr


def test_a_role_that_may_not_make_a_schema_is_told_so(folder, postgres_url):
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute("create role guest_of_bench login")
        try:
            url = postgres_url.replace("postgres@", "guest_of_bench@")
            ended = folder.run(*QUICK, "--only", "b", "--url", url)
        finally:
            conn.execute("drop role guest_of_bench")
    assert ended.returncode == 1
    assert "this role cannot create a schema in PostgreSQL" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--only", "x"), 2, "--only: there is no part 'x'; the parts are a,b,c,e"),
        (("--only", ","), 2, "--only names no part"),
        (("--repeat", "0"), 2, "Invalid value for '--repeat'"),
        (("--url", "no/such/folder/jobs.db"), 2, "does not exist: create it, or name another"),
        (("--url", "d1://token@host/name"), 2, "measures SQLite and PostgreSQL"),
        (("--url", "postgresql://nobody@127.0.0.1:1/none"), 1, "cannot be reached"),
    ],
)
def test_a_wrong_use_is_answered_in_a_line(folder, words, code, message):
    ended = folder.run(*QUICK, *words)
    assert ended.returncode == code, ended.stderr
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    assert left_behind(folder.path) == []


def test_a_bar_is_shown_on_a_terminal_only(folder):
    terminal = folder.start_on_terminal(*QUICK, "--only", "b")
    assert terminal.wait() == 0
    assert "measuring" in terminal.text
    assert "100%" in terminal.text or "1/1" in terminal.text


def test_nothing_set_for_the_app_changes_what_is_measured(folder):
    (folder.path / "duly.toml").write_text('url = "jobs.db"\nkeep = "1s"\ndurability = "normal"\nmax_attempts = 1\n')
    ended = folder.run(*QUICK, "--only", "c", "--json", DULY_LEASE="1s")
    assert ended.returncode == 0, ended.stderr
    assert "durability full" in json.loads(ended.stdout)["store"]
    assert not (folder.path / "jobs.db").exists()


def test_jobs_that_are_missing_or_not_finished_fail_the_run(tmp_path):
    with closing(Duly(str(tmp_path / "jobs.db"))) as app:
        task = declare(app, lambda n: None)
        task.enqueue_many(task.call(n) for n in range(3))
        see_all(app, 3, "ready")
        with pytest.raises(BenchFailed, match="3 jobs are ready: expected 4"):
            see_all(app, 4, "ready")
        with pytest.raises(BenchFailed, match="a job is ready after 0 attempts: expected succeeded"):
            see_all(app, 3, "succeeded")
        app.run(drain=True)
        assert see_all(app, 3, "succeeded") > 0


@pytest.mark.parametrize("runs", ["[[], [1.0]]", "[[1.0], [1.0, 2.0]]"], ids=["never", "twice"])
def test_a_job_that_did_not_run_exactly_once_fails_the_run(monkeypatch, runs):
    child = Child.__new__(Child)
    monkeypatch.setattr(child, "_receive", runs.encode)
    with pytest.raises(BenchFailed, match="1 of 2 jobs did not run exactly once"):
        child.starts()
