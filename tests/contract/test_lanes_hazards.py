"""Lanes under the hazards of a database: lost answers, other code, clocks, pauses. Lines B06, B07, B08 and J07."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from duly.model import NewJob, TaskLimits, Terms
from duly.store import lanes, ops
from duly.store.lanes import Taken, Walk
from duly.store.statements import spell
from tests.contract.stores import NOW, PostgresStore, Store, new_id, new_token


def enqueue(store: Store, *names: str, task: str = "t", **terms: Any) -> list[str]:
    """Enqueue one job to each of these lanes."""
    jobs = [NewJob(new_id(), "{}", lane=name) for name in names]
    store.run(ops.enqueue(Terms(**{"task": task, **terms}), jobs, now=store.now))
    return [job.id for job in jobs]


def take(store: Store, *walks: Walk, limit: int = 100, count: int = 100, **more: Any) -> Taken:
    asked = {"queue": "default", "token": new_token(), **more}
    return store.run(
        lanes.claim(walks=walks or [Walk("t")], limit=limit, lanes=count, worker="w1", now=store.now, **asked)
    )


def taken(store: Store, *walks: Walk, **more: Any) -> list[str]:
    return [job.id for job in take(store, *walks, **more).jobs]


def declare(store: Store, task: str = "t", **limits: Any) -> None:
    store.run(lanes.declare({task: TaskLimits(task, **limits)}))


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
@pytest.mark.parametrize("jobs", [0, 1, 30])
@pytest.mark.parametrize("analyzed", [False, True])
def test_b06_the_first_statement_of_a_claim_holds_its_token(store: PostgresStore, jobs: int, analyzed: bool) -> None:
    """So a repetition waits for it, however few rows there are: a plan for few need not come to the lock."""
    enqueue(store, *["t:a"] * jobs)
    if analyzed:
        store.query("vacuum analyze duly_job")
    op = lanes.claim("default", [Walk("t")], limit=3, lanes=9, token=4711, worker="w", now=NOW)
    with psycopg.connect(store.url) as first:
        first.execute("set search_path to duly")
        for section in op.sections[:2]:
            for statement in spell("postgres", section, "pyformat"):
                first.execute(statement.sql, {name: op.params[name] for name in statement.parameters})
        held = store.query("select count(*) from pg_locks where locktype = 'advisory' and objid = 4711 and granted")
    assert held == [(1,)]


def test_b08_jobs_of_a_lane_that_keeps_an_order_only_now_are_taken(store: Store) -> None:
    """The code had a cap_key when they were enqueued and has an ordering_key since: nothing has made their lane yet."""
    [old] = enqueue(store, "t:a")
    assert taken(store, Walk("t", ordered=True)) == [old]


def test_b06_room_is_used_by_the_only_long_lane(store: Store) -> None:
    enqueue(store, *["t:a"] * 200, *(f"t:{n:02}" for n in range(9)))
    assert len(taken(store, limit=100)) == 100


def test_b09_a_paused_task_is_not_walked(store: Store) -> None:
    enqueue(store, *(f"t:{n:03}" for n in range(200)))
    declare(store, rate_count=1, rate_ms=1000)
    store.run(ops.pause("task", "t", by="me", why="so", now=store.now))
    got = take(store, count=20)
    assert got == Taken([], {})
    assert store.query("select count(*) from duly_lane") == [(0,)]


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
@pytest.mark.parametrize("analyzed", [False, True])
def test_b06_a_claim_does_not_read_all_lanes(store: PostgresStore, analyzed: bool) -> None:
    store.query(
        "insert into duly_lane (name, task, used_at) select 'x:' || n, 'x', 1 from generate_series(1, 20000) as n"
    )
    enqueue(store, *(f"t:{n:02}" for n in range(50)))
    declare(store, cap=1, rate_count=5, rate_ms=1000)
    if analyzed:
        store.query("vacuum analyze")
    claim = lanes.claim("default", [Walk("t")], limit=3, lanes=20, token=4711, worker="w", now=NOW)
    for op in (claim, lanes.next_permit("default", ["t"], now=NOW)):
        with psycopg.connect(store.url) as conn:
            for section in op.sections:
                for statement in spell("postgres", section, "pyformat"):
                    asked = {name: op.params[name] for name in statement.parameters}
                    plan = "\n".join(row[0] for row in conn.execute(f"explain {statement.sql}", asked))  # type: ignore[arg-type]
                    assert "Seq Scan on duly_lane" not in plan, plan
                    conn.execute(statement.sql, asked)  # type: ignore[arg-type]
