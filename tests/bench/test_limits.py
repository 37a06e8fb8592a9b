"""The limits that duly is measured against: they are fitted to its indexes, and a change of those shows here."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from bench.database import Database, PostgresDatabase, SQLiteHome
from bench.limit import SlowLimit, check_plan
from bench.measure import check_limits


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path):
    kind = request.param
    made = SQLiteHome(tmp_path).new_database() if kind == "sqlite" else None
    with closing(made or PostgresDatabase(request.getfixturevalue("postgres_url"))) as database:
        yield database


def test_the_limits_walk_an_index_in_its_order(database: Database):
    assert [limit.name for limit in database.limits] == ["bare", "same rows"]
    check_limits(database)


def test_a_limit_that_sorts_is_refused():
    with pytest.raises(SlowLimit, match="'same rows' is to be fitted to the indexes"):
        check_plan("SCAN duly_job\nUSE TEMP B-TREE FOR ORDER BY", "same rows")
