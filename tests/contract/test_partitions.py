"""The recipe of docs/running/scale.md: the history in partitions, by the time that an id begins with."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest

from duly import Duly

PAGE = Path(__file__).parents[2] / "docs" / "running" / "scale.md"
BLOCK = re.compile(r"```sql no-run: it needs psql;[^\n]*\n(.*?)```", re.DOTALL)
STATEMENT = re.compile(r"(.+?)(;|\\gexec)\n", re.DOTALL)  # psql runs each answer of a query that ends with \gexec
DROP = re.compile(r"```sql no-run: the name is an example;[^\n]*\n(.*?)```", re.DOTALL)
LATER = "select to_char(now() + interval '14 days', '\"duly_done_\"IYYY_IW')"
WHERE = "select tableoid::regclass::text, count(*) from duly.duly_done group by 1 order by 1"


@pytest.mark.slow
def test_the_recipe_for_partitions_keeps_every_row_and_jobs_run_as_before(postgres_url):
    app = Duly(postgres_url)

    @app.task(max_attempts=1)
    def ship(order: int) -> int:
        return 1 // order

    dead, done = ship.enqueue_many([ship.call(0), ship.call(1)])
    app.run(drain=True)
    app.close()  # the workers stop
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        for statement, end in STATEMENT.findall("".join(BLOCK.findall(PAGE.read_text("utf-8")))):
            answers = conn.execute(statement)
            for (answer,) in answers.fetchall() if end == r"\gexec" else ():
                conn.execute(answer)
        replayed, new = app.dead.replay(dead.id), ship.enqueue(2)
        app.run(drain=True)
        assert [app.get(job).state.value for job in (done.id, dead.id, replayed, new.id)] == [
            "succeeded", "dead", "dead", "succeeded",
        ]  # fmt: skip
        assert (done.result(1), [each.id for each in app.dead.list()]) == (1, [replayed])
        assert conn.execute(WHERE).fetchall() == [("duly_done_old", 4)]
        conn.execute("update duly.duly_done set id = duly.duly_week(2) where id = %s", [new.id])  # of a later enqueue
        assert conn.execute(WHERE).fetchall()[0] == (conn.execute(LATER).fetchone()[0], 1)
        for statement in (
            DROP.search(PAGE.read_text("utf-8"))[1].replace("duly_done_2026_48", "duly_done_old").split(";")
        ):
            conn.execute(statement)
        assert conn.execute("select count(*) from duly.duly_attempts").fetchone() == (0,)
        assert conn.execute("select count(*) from duly.duly_jobs").fetchone() == (1,)
    app.close()
