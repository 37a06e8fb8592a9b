"""The parts of `make bench`: each runs at a small size, checks its jobs, and gives ratios within a repetition."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from bench.figures import Figure, Spread, Target, compared
from bench.parts import postgres, sqlite
from bench.parts.draining import Way, check
from bench.parts.measure import measured
from bench.parts.part import Plan
from bench.parts.place import BenchFailed, Recorded
from bench.parts.report import rows, summary, target_rows
from duly.rules.settings import Settings

SMALL = Plan(repeat=1, jobs=500, singles=60, rows=2_000, pick_ups=5, idle_s=0.1, counted=200, mixed=50)


def place(store: str, request: pytest.FixtureRequest, folder: Path):
    if store == "sqlite":
        return sqlite.place(folder, Settings())
    return postgres.place(request.getfixturevalue("postgres_url"), Settings())


@pytest.mark.slow
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_every_part_is_measured(store, request, tmp_path):
    with place(store, request, tmp_path) as made:
        figures = list(measured(made, SMALL))
    assert {figure.part for figure in figures} == set("abcdefgi")
    ratios = {name for figure in figures for name in figure.ratios}
    assert {"bare insert", "1 caller", "bare bulk insert", "limit by 100", "limit by 1,000", "async"} <= ratios
    assert summary(figures).startswith(f"summary: {store}: enqueue ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("runs", "recorded"),
    [
        (b"\1\0\1", Recorded(3, 0, 0.0)),
        (b"\1\2\1", Recorded(3, 0, 0.0)),
        (b"\1\1\1", Recorded(2, 0, 0.0)),
        (b"\1\1\1", Recorded(3, 1, 0.0)),
    ],
)
def test_skipped_or_repeated_work_fails_the_run(runs, recorded):
    check(Way("async"), b"\1\1\1", Recorded(3, 0, 0.0))
    with pytest.raises(BenchFailed, match="of 3 async jobs"):
        check(Way("async"), runs, recorded)


def test_the_limit_of_sqlite_walks_an_index(tmp_path):
    with sqlite.place(tmp_path, Settings()) as made:
        made.fresh()
        with closing(sqlite3.connect(made.path)) as conn:
            plan = conn.execute(f"explain query plan {sqlite.CLAIM}", {"batch": 1, "now": 1}).fetchall()
            deletes = conn.execute(f"explain query plan {sqlite.DELETE}", {"ids": "[]"}).fetchall()
    assert "SEARCH bare USING PRIMARY KEY" in str(deletes)
    assert "SCAN bare" not in str(plan).replace("SCAN bare USING", "")
    assert "TEMP B-TREE" not in str(plan)
    assert "bare_ready" in str(plan)


@pytest.mark.parametrize("kept", ["", postgres.KEPT.format(bare="duly_bench.bare")], ids=["gone", "kept"])
def test_the_limit_of_postgresql_walks_an_index(postgres_url, kept):
    with postgres.place(postgres_url, Settings()) as made:
        made.run(
            "insert into duly_bench.bare select gen_random_uuid(), 'default', 'ready', '', n, null, null "
            "from generate_series(1, 5000) as n"
        )
        made.settle()
        statement = postgres.TAKE.format(bare="duly_bench.bare", batch=100, kept=kept)
        plan = str(made.run("explain " + statement.replace("%(ids)s", "'{}'").replace("%(now)s", "1")))
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


def test_a_missed_target_has_its_distance():
    slow = Figure("postgres", "pick-up", "ms", Spread((4.5,)), target=Target(at_most=3), judged="value", part="e")
    [row] = target_rows([slow])
    assert row[:3] == ("≤ 3 ms", "4.5", "missed by 50%")
    assert summary([slow]).endswith("targets met: 0 of 1")
