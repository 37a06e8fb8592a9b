"""`duly bench`, through the real program: on both stores, interrupted, and used wrongly."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from duly import Duly
from duly.bench import postgres, sqlite
from duly.bench.draining import Way, check
from duly.bench.figures import Figure, Spread, Target, compared
from duly.bench.place import MARK, BenchFailed, Recorded
from duly.bench.report import rows, summary, target_rows
from duly.rules.settings import Settings
from tests.edges.programs import Folder, is_gone, wait_until

QUICK = ("bench", "--quick")


@pytest.fixture
def folder(tmp_path) -> Iterator[Folder]:
    made = Folder(tmp_path)
    yield made
    made.close()


def schemas(url: str) -> set[str]:
    with psycopg.connect(url) as conn:
        return {name for (name,) in conn.execute("select nspname from pg_namespace").fetchall()}


def left_behind(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir() if file.name.startswith(sqlite.PREFIX)]


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
    assert {figure["part"] for figure in told["figures"]} == set("abcdefgi")
    ratios = {name for figure in told["figures"] for name in figure["ratios"]}
    assert {"bare insert", "1 caller", "bare bulk insert", "limit by 100", "limit by 1,000", "async"} <= ratios
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
    for letter in "abcdefgi":
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
    assert program.wait() == 128 + number
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
    assert "has a schema duly_bench that no earlier bench left there: rename it" in ended.stderr
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
    assert "another duly bench is at work in PostgreSQL 127.0.0.1" in ended.stderr


def test_a_role_that_may_not_make_a_schema_is_told_so(folder, postgres_url):
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute("create role guest_of_bench login")
        try:
            url = postgres_url.replace("postgres@", "guest_of_bench@")
            ended = folder.run(*QUICK, "--only", "b", "--url", url)
        finally:
            conn.execute("drop role guest_of_bench")
    assert ended.returncode == 1
    assert "this role may not make a schema in PostgreSQL" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--only", "x"), 2, "--only: there is no part 'x'; the parts are a,b,c,d,e,f,g,i"),
        (("--only", ","), 2, "--only names nothing"),
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
    ended = folder.run(*QUICK, "--only", "i", "--json", DULY_LEASE="1s")
    assert ended.returncode == 0, ended.stderr
    assert "synchronous=FULL" in json.loads(ended.stdout)["store"]
    assert not (folder.path / "jobs.db").exists()


@pytest.mark.parametrize(
    ("runs", "recorded"),
    [
        (b"\1\0\1", Recorded(3, 0, 0.0)),
        (b"\1\2\1", Recorded(3, 0, 0.0)),
        (b"\1\1\1", Recorded(2, 0, 0.0)),
        (b"\1\1\1", Recorded(3, 1, 0.0)),
    ],
)
def test_whoever_skips_or_repeats_work_fails_the_run(runs, recorded):
    check(Way("async"), b"\1\1\1", Recorded(3, 0, 0.0))
    with pytest.raises(BenchFailed, match="of 3 async jobs"):
        check(Way("async"), runs, recorded)


def test_the_limit_of_sqlite_walks_an_index(tmp_path):
    with sqlite.place(tmp_path, Settings()) as place:
        place.fresh()
        with closing(sqlite3.connect(place.path)) as conn:
            plan = conn.execute(f"explain query plan {sqlite.CLAIM}", {"batch": 1, "now": 1}).fetchall()
            deletes = conn.execute(f"explain query plan {sqlite.DELETE}", {"ids": "[]"}).fetchall()
    assert "SEARCH bare USING PRIMARY KEY" in str(deletes)
    assert "SCAN bare" not in str(plan).replace("SCAN bare USING", "")
    assert "TEMP B-TREE" not in str(plan)
    assert "bare_ready" in str(plan)


@pytest.mark.parametrize("kept", ["", postgres.KEPT.format(bare="duly_bench.bare")], ids=["gone", "kept"])
def test_the_limit_of_postgresql_walks_an_index(postgres_url, kept):
    with postgres.place(postgres_url, Settings()) as place:
        place.run(
            "insert into duly_bench.bare select gen_random_uuid(), 'default', 'ready', '', n, null, null "
            "from generate_series(1, 5000) as n"
        )
        place.settle()
        statement = postgres.TAKE.format(bare="duly_bench.bare", batch=100, kept=kept)
        plan = str(place.run("explain " + statement.replace("%(ids)s", "'{}'").replace("%(now)s", "1")))
    assert "Seq Scan" not in plan
    assert "Sort" not in plan
    assert "bare_ready" in plan


def test_a_ratio_is_taken_within_a_repetition_and_judged_by_its_median():
    figure = compared(
        "sqlite", "drain", "jobs/s", {"duly": [10, 40, 90], "limit": [20, 100, 90]}, Target(at_least=0.5), part="c"
    )
    assert figure.ratios["limit"].samples == (0.5, 0.4, 1.0)
    assert figure.verdicts() == {"limit": True}
    [row] = rows([figure])
    assert row[:3] == ("0.50 (0.40–1.00)", "limit", "(c) drain")  # noqa: RUF001


def test_a_missed_target_says_by_how_much():
    slow = Figure("postgres", "pick-up", "ms", Spread((4.5,)), target=Target(at_most=3), judged="value", part="e")
    [row] = target_rows([slow])
    assert row[:3] == ("≤ 3 ms", "4.5", "missed by 50%")
    assert summary([slow]).endswith("targets met: 0 of 1")
