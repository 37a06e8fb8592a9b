"""Real processes on one database, with the real clock. Lines J06, J09 and the rules of fork."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from duly.errors import StoreUnavailable
from duly.model import Change, NewJob, State, Terms
from duly.store import ops
from duly.store.driver import Driver, Point
from duly.store.op import Finish
from duly.store.postgres.driver import PostgresDriver
from duly.store.sqlite.driver import SQLiteDriver
from tests.contract.stores import new_id

pytestmark = [pytest.mark.slow, pytest.mark.timeout(110)]

ROOT = Path(__file__).parents[2]
PROCESSES, AT_ONCE = 8, 50


def driver_on(target: str) -> Driver:
    return PostgresDriver(target) if target.startswith("postgresql://") else SQLiteDriver(target)


def work(target: str, number: int, record: str) -> None:
    """Claim and finish until nothing is left; write down what was run and how each finish was answered.

    Runs in a process of its own, which waits on its standard input until all have started.
    """
    driver = driver_on(target)
    driver.run(ops.clock())
    print("ready", flush=True)
    sys.stdin.readline()
    ran: list[str] = []
    verdicts: Counter[str] = Counter()
    token = number * 1_000_000
    while True:
        token += 1
        jobs = driver.run(ops.claim("default", limit=AT_ONCE, token=token, worker=f"w{number}"))
        if not jobs:
            break
        ran += [job.id for job in jobs]
        change = Change(State.SUCCEEDED, result="1")
        verdicts.update(driver.run(ops.finish([Finish(job, change) for job in jobs])).values())
    driver.close()
    Path(record).write_text(json.dumps({"ran": ran, "verdicts": verdicts}))


@pytest.mark.parametrize("count", [4_000, pytest.param(40_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_j06_eight_processes_run_thousands_of_jobs_each_exactly_once(
    kind: str, count: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    target = request.getfixturevalue("postgres_url") if kind == "postgres" else str(tmp_path / "duly.db")
    driver = driver_on(target)
    ids = [new_id() for _ in range(count)]
    for start in range(0, len(ids), 2000):
        jobs = [NewJob(job_id, "{}") for job_id in ids[start : start + 2000]]
        driver.run(ops.enqueue(Terms("work", lease_ms=600_000), jobs))
    records = [tmp_path / f"{number}.json" for number in range(1, PROCESSES + 1)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.contract.test_processes", target, str(number), str(record)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number, record in enumerate(records, start=1)
    ]  # fmt: skip
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    errors = [worker.communicate()[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * PROCESSES, errors
    # A checkpoint that found another at work says so in the log; nothing else may be said.
    said = {line for error in errors for line in error.splitlines()} - {"sqlite.checkpoint_busy"}
    assert said == set()
    found: list[dict[str, Any]] = [json.loads(record.read_text()) for record in records]
    ran = [job_id for one in found for job_id in one["ran"]]
    assert len(ran) == len(ids)
    assert set(ran) == set(ids)
    assert sum((Counter(one["verdicts"]) for one in found), Counter()) == {"recorded": len(ids)}
    # SQLite does not share its lock out evenly: a process that begins late may find that all is done. Most take part.
    assert sum(bool(one["ran"]) for one in found) >= PROCESSES // 2
    done = count_done(target)
    driver.close()
    assert done == (len(ids), 1, 1)


def count_done(target: str) -> tuple[int, int, int]:
    """How many have succeeded, and the least and the most attempts that one took; nothing else is left."""
    import sqlite3

    import psycopg

    schema = "duly." if target.startswith("postgresql://") else ""
    conn: Any = psycopg.connect(target) if schema else sqlite3.connect(target)
    try:
        assert conn.execute(f"select count(*) from {schema}duly_job").fetchone() == (0,)
        [row] = conn.execute(
            f"select count(*), min(attempt), max(attempt) from {schema}duly_done where state = 'succeeded'"
        ).fetchall()
        return tuple(row)
    finally:
        conn.close()


# fork


def in_child(what: Any) -> int:
    """Run a function in a forked child and return the child's pid; the child never comes back to pytest."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            what()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def enqueue_one(driver: Driver) -> str:
    job_id = new_id()
    driver.run(ops.enqueue(Terms("work"), [NewJob(job_id, "1")]))
    return job_id


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from 3.12 on Python warns of fork with threads
def test_j06_a_forked_child_works_with_the_driver_it_inherited_and_so_does_its_parent(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    target = request.getfixturevalue("postgres_url") if kind == "postgres" else str(tmp_path / "duly.db")
    driver = driver_on(target)
    first = enqueue_one(driver)
    driver.run(ops.get(first))

    def child() -> None:
        for _ in range(20):
            job_id = enqueue_one(driver)
            assert driver.run(ops.get(job_id)) is not None
        driver.close()

    children = [in_child(child) for _ in range(3)]
    mine = [enqueue_one(driver) for _ in range(20)]
    assert [ended(pid) for pid in children] == [0, 0, 0]
    assert all(driver.run(ops.get(job_id)) for job_id in mine)
    jobs = driver.run(ops.claim("default", limit=1000, token=1, worker="w"))
    assert len({job.id for job in jobs}) == 81
    driver.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_j06_the_parents_lock_on_a_sqlite_file_survives_its_child(tmp_path: Path) -> None:
    """While the parent is inside a write the child waits its turn, whatever it opens and closes."""
    driver = SQLiteDriver(tmp_path / "duly.db", busy_s=0.2)
    enqueue_one(driver)
    writing, go_on = threading.Event(), threading.Event()
    (told, tell), (heard, answer) = os.pipe(), os.pipe()

    def child() -> None:
        os.read(heard, 1)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="locked"):
                enqueue_one(driver)
            driver.close()
        os.write(tell, b"1")
        os.read(heard, 1)
        enqueue_one(driver)
        driver.close()

    pid = in_child(child)

    def hook(point: Point) -> None:
        if point.section == "commit" and point.moment == "before":
            writing.set()
            go_on.wait(30)

    driver.hook = hook
    parent = threading.Thread(target=enqueue_one, args=(driver,))
    parent.start()
    assert writing.wait(10)
    os.write(answer, b"1")
    assert os.read(told, 1) == b"1"
    go_on.set()
    parent.join()
    os.write(answer, b"1")
    assert ended(pid) == 0
    for pipe in (told, tell, heard, answer):
        os.close(pipe)
    driver.hook = None
    assert len(driver.run(ops.claim("default", limit=10, token=1, worker="w"))) == 3
    driver.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_j01_jobs_of_a_forked_child_are_kept_when_its_parent_closes_the_file(tmp_path: Path) -> None:
    """Whoever closes a WAL last deletes it: the parent must know that the child still writes to it."""
    driver = SQLiteDriver(tmp_path / "duly.db")
    enqueue_one(driver)
    driver.run(ops.clock())
    (told, tell), (heard, answer) = os.pipe(), os.pipe()

    def child() -> None:
        enqueue_one(driver)
        os.write(tell, b"1")
        os.read(heard, 1)
        enqueue_one(driver)

    pid = in_child(child)
    assert os.read(told, 1) == b"1"
    enqueue_one(driver)
    driver.close()
    os.write(answer, b"1")
    assert ended(pid) == 0
    for pipe in (told, tell, heard, answer):
        os.close(pipe)
    assert len(driver.run(ops.claim("default", limit=10, token=1, worker="w"))) == 4
    driver.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_j06_a_fork_lets_the_write_that_is_on_its_way_end_first(tmp_path: Path) -> None:
    """A child forked in the middle of it would believe for ever that somebody in its own process writes."""
    driver = SQLiteDriver(tmp_path / "duly.db")
    enqueue_one(driver)
    writing = threading.Event()

    def hook(point: Point) -> None:
        if point.section == "commit" and point.moment == "before" and not writing.is_set():
            writing.set()
            threading.Event().wait(0.3)

    driver.hook = hook
    parent = threading.Thread(target=enqueue_one, args=(driver,))
    parent.start()
    assert writing.wait(10)
    pid = in_child(lambda: enqueue_one(driver))
    parent.join()
    assert ended(pid) == 0
    assert len(driver.run(ops.claim("default", limit=10, token=1, worker="w"))) == 3
    driver.close()


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), sys.argv[3])
