from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.servers import postgres
from tests.servers.postgres import PostgresServer, ServerFailed

ROOT = Path(__file__).parents[2]
ORIGIN = "select system_identifier from pg_control_system()"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as started:
        yield started


def ask(url: str, statement: str) -> object:
    with psycopg.connect(url) as connection:
        row = connection.execute(statement).fetchone()
    assert row is not None
    return row[0]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_until_gone(pid: int, home: Path, seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and (alive(pid) or home.exists()):
        time.sleep(0.02)
    assert not alive(pid)
    assert not home.exists()


def test_it_never_runs_as_root(server: PostgresServer) -> None:
    owner = Path(f"/proc/{server.pid}").stat().st_uid
    assert owner == (os.geteuid() or server._identity["user"]) != 0


@pytest.mark.slow
def test_it_does_not_sync_in_tests_unless_durable(server: PostgresServer) -> None:
    assert ask(server.url, "show fsync") == "off"
    assert ask(server.url, "show max_connections") == "200"
    with PostgresServer(durable=True) as durable:
        assert ask(durable.url, "show fsync") == "on"
        assert ask(durable.url, "show synchronous_commit") == "on"
        assert ask(durable.url, "show full_page_writes") == "on"


def test_databases_are_apart_and_can_be_copied_and_dropped(server: PostgresServer) -> None:
    first, second = server.new_database(), server.new_database()
    with psycopg.connect(first) as connection:
        connection.execute("create table here (n int)")
    assert ask(first, "select to_regclass('here') is not null") is True
    assert ask(second, "select to_regclass('here') is not null") is False
    copy = server.new_database(first)
    assert ask(copy, "select to_regclass('here') is not null") is True
    with psycopg.connect(copy) as session:
        server.drop(copy)
        with pytest.raises(psycopg.OperationalError):
            session.execute("select 1")
    for url in (first, second):
        server.drop(url)
    assert ask(server.url, "select count(*) from pg_database where datname like 't\\_%'") == 0


def test_two_servers_stand_side_by_side(server: PostgresServer) -> None:
    with PostgresServer(settings={"max_connections": "20"}) as other:
        assert other.port != server.port
        assert ask(other.url, "show max_connections") == "20"


@pytest.mark.parametrize("mode", ["fast", "immediate", "kill"])
def test_a_restart_keeps_port_and_committed_data(server: PostgresServer, mode: postgres.Mode) -> None:
    url = server.new_database()
    with psycopg.connect(url) as connection:
        connection.execute("create table kept (n int)")
        connection.commit()
        before = server.pid, server.port
        server.restart(mode)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")
    assert server.pid != before[0]
    assert server.port == before[1]
    assert ask(url, "select count(*) from kept") == 0
    server.drop(url)


def test_an_outage_lasts_from_halt_to_start(server: PostgresServer) -> None:
    server.halt()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(server.url)
    server.start()
    assert ask(server.url, "select 1") == 1


def test_stop_removes_everything() -> None:
    server = PostgresServer().start()
    pid, home = server.pid, server.home
    assert pid is not None
    assert home is not None
    server.stop()
    assert not alive(pid)
    assert not home.exists()
    server.stop()


def test_a_server_that_does_not_start_shows_its_log() -> None:
    with pytest.raises(ServerFailed, match="no_such_setting"):
        PostgresServer(settings={"no_such_setting": "1"}).start()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_test_run_takes_its_server_along(sign: signal.Signals) -> None:
    program = (
        "import time; from tests.servers.postgres import PostgresServer\n"
        "s = PostgresServer().start(); print(s.pid, s.home, flush=True); time.sleep(60)"
    )
    run = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    pid, home = run.stdout.readline().split()
    assert alive(int(pid))
    run.send_signal(sign)
    run.communicate()
    wait_until_gone(int(pid), Path(home))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_an_ordinary_user_can_start_it() -> None:
    program = (
        "import os; from tests.servers.postgres import PostgresServer\n"
        "with PostgresServer() as s: print(os.stat(f'/proc/{s.pid}').st_uid, s.new_database() != s.url)"
    )
    may_read = "+dac_read_search"  # this Python or this checkout may lie where only root can read
    run = subprocess.run(
        [
            *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
            *(f"--inh-caps={may_read}", f"--ambient-caps={may_read}", sys.executable, "-B", "-c", program),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.defpath, "TMPDIR": "/tmp"},
    )
    assert run.stdout.split() == ["65534", "True"], run.stderr


@pytest.mark.parametrize("folder", postgres.wheel_binaries(), ids=lambda folder: folder.parent.name)
def test_the_wheels_servers_work_too(folder: Path) -> None:
    with PostgresServer(bin_dir=folder) as server:
        assert str(ask(server.new_database(), "select version()")).startswith("PostgreSQL 1")


@pytest.mark.slow
def test_binaries_that_only_root_can_reach_are_copied(tmp_path: Path) -> None:
    found = postgres.wheel_binaries()
    if os.geteuid() != 0 or not found:
        pytest.skip("needs root and the wheel")
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    with PostgresServer(bin_dir=postgres.copy_server(found[0], hidden)) as server:
        assert ask(server.url, "select 1") == 1


def test_an_override_without_a_server_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DULY_TEST_PG_BIN", str(tmp_path))
    with pytest.raises(ServerFailed, match="DULY_TEST_PG_BIN"):
        postgres.find_binaries()


@pytest.mark.slow
def test_servers_of_a_run_begin_with_the_same_data_and_leave_nothing() -> None:
    with postgres.initialised():
        data = Path(os.environ[postgres.INITIALISED])
        with PostgresServer() as one, PostgresServer(durable=True) as durable:
            assert ask(one.url, ORIGIN) == ask(durable.url, ORIGIN)
            assert durable._home.parent == postgres.temporary_root(as_other=bool(durable._identity))
            assert one._home != durable._home != data.parent
    assert not data.exists()
    assert postgres.INITIALISED not in os.environ
