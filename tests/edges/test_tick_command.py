"""`duly tick`, through the real program: one bounded pass, what it says of it, and what it refuses."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from duly import Duly
from duly.worker.tick import Ticked
from tests.databases import fresh
from tests.edges.programs import Folder, complaint
from tests.edges.stock import DOWN, IS_DOWN

pytestmark = pytest.mark.process

TASKS = """
import time

from duly import Duly, SyncCtx

app = Duly({url!r})

def ran(name: str) -> None:
    with open("ran.txt", "a") as file:
        file.write(name + "\\n")

@app.task
def note(name: str) -> None:
    ran(name)

@app.task(max_attempts=1)
def fail() -> None:
    raise ValueError("no")

@app.task
async def block() -> None:
    time.sleep(600)

@app.every("100ms", catchup="last")
def often(ctx: SyncCtx) -> None:
    ran(f"{{ctx.schedule}} {{ctx.due_at.utcoffset()}} {{ctx.missed.count > 0}}")
"""


@pytest.fixture(params=["sqlite", "postgres"])
def url(request) -> str:
    return fresh(request, request.param)


@pytest.fixture
def here(folder, url) -> Folder:
    (folder.path / "tasks.py").write_text(TASKS.format(url=url))
    return folder


def enqueue(url: str, count: int) -> None:
    app = Duly(url)

    @app.task
    def note(name: str) -> None: ...

    note.enqueue_many(note.call(str(number)) for number in range(count))
    app.close()


def ran(here: Folder) -> list[str]:
    return (here.path / "ran.txt").read_text().splitlines()


@pytest.mark.slow
def test_s10_a_tick_runs_what_is_due_fires_what_recurs_and_says_so_in_one_line(here, url):
    first = here.run("tick", "tasks.py").stdout  # which makes the schedule known
    assert re.fullmatch(r"tick: fired [01], ran ([01] \(1 succeeded\)|0), \d+\.\d s\n", first)
    enqueue(url, 2)
    here.say("enqueue", "tasks.py", "fail")
    answer = here.run("tick", "tasks.py")
    assert answer.returncode == 0
    assert re.fullmatch(r"tick: fired 1, ran 4 \(3 succeeded, 1 dead\), \d+\.\d s\n", answer.stdout)
    assert {"0", "1", "often 0:00:00 True"} <= set(ran(here))


def test_s10_in_json_a_tick_has_a_figure_for_each_thing_it_did_and_stops_at_its_limit(here, url):
    enqueue(url, 5)
    said = json.loads(here.run("tick", "tasks.py", "--limit", "3", "--json").stdout)
    assert (said["ran"], said["succeeded"], said["more"]) == (3, 3, True)
    assert set(said) == set(Ticked.__struct_fields__)
    assert here.run("tick", "tasks.py", "--limit", "1", "--max-seconds", "50s").stdout.endswith(
        "stopped at its limit: there may be more\n"
    )


@pytest.mark.slow
def test_s10_ticks_that_overlap_run_every_job_once(here, url):
    enqueue(url, 150)
    ticks = [here.start("tick", "tasks.py") for _ in range(3)]
    assert [tick.wait() for tick in ticks] == [0, 0, 0]
    counts = Counter(name for name in ran(here) if name.isdigit())
    assert counts == {str(number): 1 for number in range(150)}


def test_s10_a_handler_that_blocks_the_event_loop_does_not_keep_a_tick(here):
    here.say("enqueue", "tasks.py", "block")
    answer = here.run("tick", "tasks.py", "--max-seconds", "0.5", "--grace", "100ms")
    assert answer.returncode == 1
    assert answer.stderr == "duly: the tick did not stop in time: its jobs are rescued when their leases expire\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "Missing argument 'MODULE:APP'"),
        (["taks:app"], 2, "there is no module 'taks'"),
        (["tasks:ap"], 2, "did you mean 'app'?"),
        (["tasks.py", "--limit", "0"], 2, "0 is not in the range 1<=x<=1000000000"),
        (["tasks.py", "--concurrency", "9" * 20], 2, "is not in the range 1<=x<=1000000000"),
        (["tasks.py", "--max-seconds", "0"], 2, "--max-seconds is zero: give a duration above zero"),
        (["tasks.py", "--max-seconds", "soon"], 2, "--max-seconds is 'soon', which is not a duration"),
        (["tasks.py", "--queues", "mail:x"], 2, "'mail:x' is not NAME or NAME:LIMIT"),
        (["tasks.py", "--grace", "-1s"], 2, "is '-1s', which is negative"),
        (["tasks.py", "--url", "mysql://host/db"], 2, "'mysql:' is not a database URL"),
        (["tasks.py", "--url", "no/jobs.db"], 2, "/no does not exist: create it"),
        (["tasks.py", "--url", DOWN], 1, IS_DOWN),
    ],
)
def test_a_mistake_is_answered_in_a_line_and_nothing_is_written(tmp_path, words, code, said):
    (tmp_path / "tasks.py").write_text(TASKS.format(url=str(tmp_path / "jobs.db")))
    assert said in complaint(Folder(tmp_path).run("tick", *words), code)
    assert not (tmp_path / "jobs.db").exists()


def test_missing_tables_are_told_with_what_makes_them(tmp_path, postgres):
    url = postgres.new_database()
    (tmp_path / "tasks.py").write_text(TASKS.format(url=url))
    assert "has no duly tables yet: run `duly migrate" in complaint(Folder(tmp_path).run("tick", "tasks.py"), 1)
    postgres.drop(url)
