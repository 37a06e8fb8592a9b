"""What PostgreSQL is asked all day is planned once, on tables that may be empty then and full later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from duly.model import Change, NewJob, State, Terms
from duly.store import batches, ops
from duly.store.op import Finish
from duly.store.postgres.connection import PooledConnection
from duly.store.postgres.driver import PostgresDriver
from duly.store.postgres.plans import STEADY
from duly.store.postgres.schema import bring_up_to_date
from tests.contract.stores import new_id
from tests.contract.test_plans import ASKED, BY_KEY, nodes, of_big_tables, plans, walked
from tests.contract.test_statements import every_op
from tests.servers.postgres import PostgresServer

pytestmark = pytest.mark.xdist_group("plans")


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    url = postgres.new_database()
    bring_up_to_date(url)
    yield url
    postgres.drop(url)


@pytest.fixture
def driver(url: str) -> Iterator[PostgresDriver]:
    driver = PostgresDriver(url, connections=1)
    yield driver
    driver.close()


def run_a_job(driver: PostgresDriver, terms: Terms, **more: Any) -> None:
    driver.run(ops.enqueue(terms, [NewJob(new_id(), "{}", **more)]))
    token = 7 + driver.failures
    [job] = driver.run(ops.claim("default", limit=5, token=token, worker="w", tasks=["work", "keyed"]))
    driver.run(ops.finish([Finish(job, Change(State.SUCCEEDED))]))


def planned(driver: PostgresDriver) -> dict[str, tuple[int, int]]:
    """How often what was prepared ran by the one plan, and by one of its own."""
    with driver._pool.connection() as conn:
        found = conn.execute("select statement, generic_plans, custom_plans from pg_prepared_statements")
        return {statement: (generic, custom) for statement, generic, custom in found.fetchall()}


def test_frequent_statements_are_planned_once(driver: PostgresDriver) -> None:
    for _ in range(6):
        run_a_job(driver, Terms("work"))
    found = {statement: counts for statement, counts in planned(driver).items() if "duly_job" in statement}
    assert len(found) == 3
    assert all(generic > 0 and custom == 0 for generic, custom in found.values()), found


def test_a_section_keeps_its_plan_mode_beside_any_other(driver: PostgresDriver) -> None:
    """The server keeps the plan it made first, also where another list than this one has the same text."""
    with driver._pool.connection() as conn:
        for table in ("duly_job", "duly_batch"):
            conn.execute(f"analyze duly.{table}")  # small: the server would read all of them
    batch = new_id()
    driver.run(batches.open_batch(batch, "import"))
    for _ in range(8):
        driver.run(batches.add(Terms("work", batch_id=batch), [NewJob(new_id(), "{}")]))
    with driver._pool.connection() as conn:
        found = dict(conn.execute("select statement, name from pg_prepared_statements").fetchall())
        [name] = [name for statement, name in found.items() if "insert into" in statement and "duly_job" in statement]
        plan = conn.execute(f"explain execute {name} ({', '.join(['null'] * 20)})")
        assert "Seq Scan" not in "\n".join(line for (line,) in plan.fetchall())


def test_statements_of_people_are_planned_by_the_server(driver: PostgresDriver) -> None:
    for _ in range(5):
        driver.run(ops.listing(queue="mail"))
    [(generic, custom)] = [counts for statement, counts in planned(driver).items() if "duly_job" in statement]
    assert (generic, custom) == (0, 3)  # two went before it was prepared
    with driver._pool.connection() as conn:
        found = [conn.execute(f"show {name}").fetchone() for name in ("plan_cache_mode", "enable_seqscan", "jit")]
    assert found == [("force_generic_plan",), ("off",), ("off",)]  # and what comes next is steady again


def test_behind_pgbouncer_no_session_setting_is_changed(url: str) -> None:
    driver = PostgresDriver(url, connections=1, prepared=False)
    run_a_job(driver, Terms("work"))
    with driver._pool.connection() as conn:
        assert conn.execute("show plan_cache_mode").fetchone() == ("auto",)
        assert conn.execute("show enable_seqscan").fetchone() == ("on",)
    driver.close()


def test_no_plan_from_before_the_first_job_reads_a_whole_table(url: str) -> None:
    walks = {section: set(found) for asked in ASKED.values() for section, found in asked.walks.items()}
    seen: set[str] = set()
    with PooledConnection.connect(url, autocommit=True, prepare_threshold=None) as conn:
        conn.keep_plans()
        for op in (op for made in every_op().values() for one in made for op in (one, one.again) if op is not None):
            for section in STEADY.intersection(op.sections) - seen:
                seen.add(section)
                for plan in plans(conn, section, op, generic=True):
                    assert not of_big_tables(walked(plan)) - walks.get(section, BY_KEY), section
                    for node in nodes(plan):
                        assert is_looked_up(node), (section, node)
    assert seen == STEADY


def is_looked_up(node: dict[str, Any]) -> bool:
    """Say whether rows are looked up one by one along an index, which is not read from end to end."""
    if "Bitmap" in node["Node Type"]:
        return False
    if node.get("Index Name") == "duly_key_pkey":
        return "key =" in node["Index Cond"] and "task =" in node["Index Cond"]
    if node.get("Index Name") == "duly_schedule_due":  # of which the first is asked
        return "Index Only Scan" in node["Node Type"]
    return "Index Name" not in node or "Index Cond" in node
