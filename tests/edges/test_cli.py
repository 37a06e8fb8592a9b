"""The command line, through the real program: what a stranger types, and what it answers to mistakes."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
import psycopg
import pytest
from click.testing import CliRunner

import duly
from duly.cli import COMMANDS, main, output
from duly.errors import ConfigError, StoreError
from duly.store import migrate
from tests.edges.programs import DULY, NOBODY, complaint, run, say, wait_until

NEWEST = migrate.newest("sqlite")
STEPS = [f"{step.number:04}_{step.name}" for step in migrate.migrations("sqlite")]


@pytest.mark.process
def test_it_tells_its_version(tmp_path):
    assert run(tmp_path, "--version").stdout == f"duly {duly.__version__}\n"


def test_help_lists_every_command_and_each_has_an_example(tmp_path):
    listed = re.findall(r"^  ([a-z]+) ", say(tmp_path, "--help").stdout.partition("Commands:")[2], re.MULTILINE)
    assert listed == sorted(COMMANDS)
    for words in [[name] for name in listed] + list(subcommands()):
        assert re.search(rf"Examples?:\n +duly {' '.join(words)}", say(tmp_path, *words, "--help").stdout)


def subcommands() -> Iterator[list[str]]:
    for name in COMMANDS:
        group = import_module(f"duly.cli.{name}").command
        yield from ([name, child] for child in getattr(group, "commands", {}))


def test_every_command_answers_programs_in_json_but_those_for_whoever_writes_code():
    groups = [name for name in COMMANDS if hasattr(command_of([name]), "commands")]
    words = [[name] for name in COMMANDS if name not in groups] + list(subcommands())
    without = [one for one in words if not any("--json" in param.opts for param in command_of(one).params)]
    assert without == [["dev"], ["cloudflare", "init"], ["cloudflare", "deploy"]]


def command_of(words: list[str]) -> click.Command:
    found = import_module(f"duly.cli.{words[0]}").command
    return found.commands[words[1]] if len(words) > 1 else found


def test_every_flag_has_a_variable_named_after_its_command(tmp_path):
    assert json.loads(say(tmp_path, "migrate", DULY_MIGRATE_JSON="1").stdout)["schema_version"] == NEWEST
    assert json.loads(say(tmp_path, "jobs", "list", DULY_JOBS_LIST_JSON="1").stdout) == []
    told = complaint(say(tmp_path, "jobs", "list", DULY_JOBS_LIST_STATE="sleeping"), 2)
    assert "sleeping" in told


@pytest.mark.process
def test_bash_completes_commands_and_their_choices(tmp_path):
    script = run(tmp_path, _DULY_COMPLETE="bash_source").stdout
    assert "complete -o nosort -F _duly_completion duly" in script
    asked = {"_DULY_COMPLETE": "bash_complete"}
    assert "plain,doctor" in say(tmp_path, COMP_WORDS="duly doc", COMP_CWORD="1", **asked).stdout
    states = say(tmp_path, COMP_WORDS="duly jobs list --state s", COMP_CWORD="4", **asked).stdout
    assert states.split() == ["plain,scheduled", "plain,succeeded"]


@pytest.mark.process
def test_the_version_is_told_without_loading_the_rest(tmp_path):
    """It comes within a blink of what click alone takes, because nothing else is imported."""
    asked = [sys.executable, "-X", "importtime", "-m", "duly", "--version"]
    told = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=True)
    assert told.stdout == f"duly {duly.__version__}\n"
    loaded = {line.rpartition("|")[2].strip() for line in told.stderr.splitlines()}
    assert "click" in loaded
    assert loaded.isdisjoint({"duly.app", "duly.store", "asyncio", "sqlite3", "msgspec", "rich"})


def test_a_network_file_system_is_refused_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("duly.store.sqlite.health.file_system", lambda folder: "nfs4")  # none can be mounted here
    answer = CliRunner().invoke(main, ["migrate", "--url", "jobs.db"])
    assert answer.exit_code == 2
    assert "lies on a network file system (nfs4)" in answer.output
    assert "use a local disk, or PostgreSQL" in answer.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["jobs", "list"], ["stats"], ["doctor"], ["queues", "list"], ["top", "--once"]])
def test_a_look_at_a_strangers_file_says_so_and_changes_nothing(tmp_path, words):
    conn = sqlite3.connect(tmp_path / "shop.db")
    conn.execute("create table users (id integer primary key)")
    conn.commit()
    conn.close()
    before = (tmp_path / "shop.db").read_bytes()
    answer = say(tmp_path, *words, "--url", "shop.db")
    assert answer.returncode == 1
    assert "has no tables of duly" in answer.stdout + answer.stderr
    assert (tmp_path / "shop.db").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["shop.db"]


def test_a_misspelt_command_gets_the_right_one_named(tmp_path):
    assert "Did you mean 'migrate'?" in complaint(say(tmp_path, "migrte"), 2)


def test_migrate_makes_a_file_here_when_nothing_is_set_and_says_so(tmp_path):
    assert say(tmp_path, "migrate", "--plan").stdout == f"duly.db: would apply {', '.join(STEPS)}\n"
    assert not (tmp_path / "duly.db").exists()
    assert say(tmp_path, "migrate").stdout == f"duly.db: applied {', '.join(STEPS)}\n"
    assert say(tmp_path, "migrate").stdout == f"duly.db: up to date (schema version {NEWEST})\n"


def test_migrate_reads_the_url_from_argument_then_environment_then_file(tmp_path):
    (tmp_path / "duly.toml").write_text('url = "file.db"\n')
    assert say(tmp_path, "migrate").stdout.startswith("file.db:")
    assert say(tmp_path, "migrate", DULY_URL="environment.db").stdout.startswith("environment.db:")
    answer = say(tmp_path, "migrate", "--url", "argument.db", DULY_URL="environment.db")
    assert answer.stdout.startswith("argument.db:")


def test_migrate_prints_the_sql_instead_of_running_it(tmp_path):
    script = say(tmp_path, "migrate", "--sql").stdout
    assert not (tmp_path / "duly.db").exists()
    conn = sqlite3.connect(tmp_path / "by-hand.db")
    conn.executescript(script)
    assert conn.execute("select value from duly_meta where name = 'schema'").fetchone() == (str(NEWEST),)
    conn.close()


def test_migrate_on_postgresql_plans_applies_grants_and_answers_in_json(tmp_path, postgres):
    url = postgres.new_database()
    plan = json.loads(say(tmp_path, "migrate", "--url", url, "--plan", "--json").stdout)
    assert plan["pending"] == STEPS
    with psycopg.connect(url) as conn:
        conn.execute("create role app_of_cli")
    done = json.loads(say(tmp_path, "migrate", "--url", url, "--grant", "app_of_cli", "--json").stdout)
    assert done["applied"] == STEPS
    with psycopg.connect(url) as conn:
        conn.execute("set role app_of_cli")
        assert conn.execute("select count(*) from duly.duly_job").fetchone() == (0,)
        conn.execute("reset role")
        conn.execute("drop owned by app_of_cli")
        conn.execute("drop role app_of_cli")
    postgres.drop(url)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--url", "mysql://host/db"], 2, r"'mysql:' is not a database URL"),
        (["--url", "missing/folder/jobs.db"], 2, r"the folder .*missing/folder does not exist: create it"),
        (["--url", "not-a-database.txt"], 1, r"not a database"),
        (["--url", "postgresql://nobody@127.0.0.1:1/db"], 1, r"127\.0\.0\.1:1/db cannot be reached.*refused"),
        (["--url", ":memory:"], 2, r"in memory is refused.*give a path"),
        (["--url", "."], 2, r"is a folder: name a file in it"),
        (["--url", "d1://127.0.0.1:1/db"], 2, r"no valid token: write d1://TOKEN@host/database"),
        (["--url", "d1://token@127.0.0.1:1/db"], 1, r"127\.0\.0\.1:1/db cannot be reached"),
        (["--grant", "app"], 2, r"--grant is for PostgreSQL"),
        (["--grnt", "app"], 2, r"No such option.*--grant"),
    ],
)
def test_a_mistake_with_migrate_is_answered_with_what_to_do_and_nothing_is_written(tmp_path, words, code, said):
    (tmp_path / "not-a-database.txt").write_text("a letter to somebody, and long enough to be one. " * 20)
    before = sorted(tmp_path.iterdir())
    answer = complaint(say(tmp_path, "migrate", *words), code)
    assert re.search(said, answer, re.DOTALL)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("words", [[], ["--plan"]])
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_newer_schema_is_not_touched(tmp_path, request, kind, words):
    url = "duly.db" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    say(tmp_path, "migrate", "--url", url)
    on_database(tmp_path, url, "update duly_meta set value = '9'")
    assert "upgrade duly" in complaint(say(tmp_path, "migrate", "--url", url, *words), 1)
    on_database(tmp_path, url, "update duly_meta set value = '1' where name = 'works_with'")
    assert "up to date (schema version 9)" in say(tmp_path, "migrate", "--url", url, *words).stdout
    on_database(tmp_path, url, "update duly_meta set value = 'nine' where name = 'schema'")
    assert "'nine', which is no number" in complaint(say(tmp_path, "migrate", "--url", url, *words), 1)


def on_database(folder: Path, url: str, sql: str) -> None:
    if url.startswith("postgresql:"):
        with psycopg.connect(url) as server:
            server.execute("set search_path to duly")
            server.execute(sql)
    else:
        with sqlite3.connect(folder / url) as file:
            file.execute(sql)
        file.close()


def test_a_role_that_was_granted_the_tables_may_use_them_and_is_told_who_may_change_them(tmp_path, postgres):
    url = postgres.new_database()
    with psycopg.connect(url) as conn:
        conn.execute("create role worker_of_cli login")
    assert "granted to worker_of_cli" in say(tmp_path, "migrate", "--url", url, "--grant", "worker_of_cli").stdout
    theirs = re.sub(r"//[^@/]*@", "//worker_of_cli@", url)
    assert "up to date" in say(tmp_path, "migrate", "--url", theirs).stdout
    with psycopg.connect(url) as conn:
        conn.execute("drop schema duly cascade")
    assert "run it as the owner" in complaint(say(tmp_path, "migrate", "--url", theirs), 1)
    with psycopg.connect(url) as conn:
        conn.execute("drop owned by worker_of_cli")
        conn.execute("drop role worker_of_cli")
    postgres.drop(url)


def test_a_settings_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "duly.toml").write_bytes(b'url = "\xff"')
    assert "duly.toml cannot be read" in complaint(say(tmp_path, "migrate"), 2)


ONCE = (
    "backup b.db --force", "batches list", "bench --only x", "check", "cloudflare deploy", "dead list", "demo --help",
    "dev --help", "doctor --json", "enqueue tasks.py add", "jobs list", "migrate --json", "prune", "queues list",
    "restore b.db", "schedules list", "stats", "tick none.py", "top --once --json", f"why {NOBODY}", "worker none.py",
    "workers",
)  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("words", ONCE)
def test_the_installed_program_answers_as_a_command_in_this_process_does(tmp_path, words):
    """Other tests run commands in this process: here the program shows that it misses nothing at import."""
    say(tmp_path, "migrate")
    (tmp_path / "tasks.py").write_text("from duly import Duly\napp = Duly('duly.db')\n")
    real, here = (answer(tmp_path, *words.split(), DULY_RUN_DIR=str(tmp_path / "run")) for answer in (run, say))
    assert (real.returncode, steady(real.stdout), real.stderr) == (here.returncode, steady(here.stdout), here.stderr)
    assert "Traceback" not in real.stderr


def test_every_command_is_asked_once_of_the_installed_program():
    assert [words.split()[0] for words in ONCE] == sorted(COMMANDS)


def steady(text: str) -> str:
    """Leave out numbers, which differ from moment to moment, and where lines end, which the runner of tests decides."""
    return " ".join(re.sub(r"\d+(\.\d+)?", "0", text).split())


@pytest.mark.process
def test_python_m_duly_is_the_same_command(tmp_path):
    words = [sys.executable, "-m", "duly", "--version"]
    assert subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.startswith("duly ")


# What keeps an answer from being told


@pytest.mark.process
@pytest.mark.parametrize("words", [["jobs", "list"], ["jobs", "list", "--json"], ["--version"], ["stats"]])
def test_a_stdout_that_cannot_be_written_is_told_in_a_line(tmp_path, words):
    say(tmp_path, "migrate")
    for shell, why in (("> /dev/full", "No space left on device"), (">&-", "Bad file descriptor")):
        told = in_shell(tmp_path, f'"$0" "$@" {shell}', *words)
        assert (told.returncode, told.stderr) == (1, f"duly: stdout cannot be written ({why})\n")


@pytest.mark.process
def test_what_an_app_prints_is_written_before_the_command_ends(tmp_path):
    (tmp_path / "tasks.py").write_text("from duly import Duly\napp = Duly('duly.db')\nprint('hello')\n")
    say(tmp_path, "migrate")
    told = in_shell(tmp_path, '"$0" "$@" > /dev/full', "queues", "resume", "mail", "--app", "tasks.py")
    assert told.returncode == 1
    assert told.stderr.splitlines()[-1] == "duly: stdout cannot be written (No space left on device)"


@pytest.mark.process
def test_closed_streams_do_not_matter_where_nothing_is_said_or_asked(tmp_path):
    told = in_shell(tmp_path, '"$0" "$@" <&- >&- 2>&-', "migrte")
    assert told.returncode == 2
    say(tmp_path, "migrate")
    told = in_shell(tmp_path, '"$0" "$@" <&-', "jobs", "cancel", "--all")
    assert (told.returncode, told.stdout) == (0, "nothing to cancel: no job matches\n")


@pytest.mark.process
@pytest.mark.parametrize("words", [["jobs", "list"], ["worker", "tasks:app"], ["dev", "tasks.py"], ["migrate"]])
def test_a_folder_that_is_gone_is_told_in_a_line(tmp_path, words):
    told = in_shell(tmp_path, 'mkdir gone; cd gone; rmdir ../gone; "$0" "$@"', *words)
    assert (told.returncode, told.stderr) == (1, "duly: the current folder was deleted: cd to another one\n")


def in_shell(folder: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DULY_", "PYTHON"))}
    asked = ["/bin/sh", "-c", script, DULY, *words]
    return subprocess.run(asked, cwd=folder, env=inherited, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.process
def test_an_interrupt_is_told_in_a_line(tmp_path):
    (tmp_path / "tasks.py").write_text("import time\nopen('here', 'w').close()\ntime.sleep(60)\n")
    asked = [DULY, "enqueue", "tasks:app", "add"]
    with subprocess.Popen(asked, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        wait_until((tmp_path / "here").exists, "the import")
        command.send_signal(signal.SIGINT)
        assert command.communicate(timeout=20) == ("", "duly: interrupted\n")
    assert command.returncode == 130


def test_a_wrong_value_is_blamed_on_the_variable_that_it_came_from(tmp_path):
    told = complaint(say(tmp_path, "worker", "tasks:app", DULY_CONCURRENCY="abc"), 2)
    assert "Invalid value for $DULY_CONCURRENCY: 'abc' is not a valid integer" in told
    told = complaint(say(tmp_path, "worker", "tasks:app", "--concurrency", "abc", DULY_CONCURRENCY="1"), 2)
    assert "Invalid value for '--concurrency'" in told


@pytest.mark.parametrize("words", ["worker t", "dev t", "enqueue t", "jobs list --app t", "backup t", "restore t"])
def test_bash_completes_files_where_a_file_is_meant(tmp_path, words):
    asked = {"_DULY_COMPLETE": "bash_complete", "COMP_WORDS": f"duly {words}"}
    assert say(tmp_path, COMP_CWORD=str(len(words.split())), **asked).stdout == "file,t\n"


def test_a_message_of_the_store_is_told_without_the_names_that_mean_nothing_to_people():
    inner = 'connection failed: connection to server at "127.0.0.1", port 1 failed: FATAL: no role "x"'
    refused = StoreError(f"list: PostgreSQL 127.0.0.1:1/db refuses the connection ({inner}): look at the URL")
    assert (
        output.reason(refused)
        == 'PostgreSQL 127.0.0.1:1/db refuses the connection (FATAL: no role "x"): look at the URL'
    )
    assert output.reason(ConfigError("list: is kept")) == "list: is kept"


@pytest.mark.parametrize(
    ("words", "remedy"), [(("backup", "a.db"), "d1 export"), (("restore", "b.db", "--yes"), "time-travel")]
)
def test_c01_backup_and_restore_name_the_commands_of_d1(tmp_path, words, remedy):
    (tmp_path / "b.db").touch()
    assert remedy in complaint(say(tmp_path, *words, "--url", "d1://token@gate.test/duly"), 2)
