"""The two dialects say the same: sections, parameters and columns, and operations that fit them."""

from __future__ import annotations

import inspect
import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

import duly
from duly.errors import SchemaMismatch
from duly.model import (
    QUEUED,
    Catchup,
    Change,
    Claimed,
    Envelope,
    Event,
    Failure,
    NewJob,
    Overlap,
    Sighting,
    State,
    TaskLimits,
    Terms,
)
from duly.rules.firing import Firing, Run, Skip, Told
from duly.store import batches, lanes, ops, queues, schedules, statements
from duly.store.batches import Callbacks
from duly.store.lanes import Walk
from duly.store.op import TAIL, Finish, Held, Op
from duly.store.ops import Mark, Replay
from duly.store.postgres.driver import PostgresDriver
from duly.store.postgres.schema import bring_up_to_date
from duly.store.sqlite.driver import SQLiteDriver
from duly.store.statements import POSTGRES_ONLY, SQLITE_ONLY, sections, spell, split
from tests.contract.stores import JOB_TERMS, NOW, PostgresStore, callback, definition, new_id, snooze

DIALECTS: tuple[statements.Dialect, ...] = ("sqlite", "postgres")
SQL = Path(duly.__file__).parent / "store" / "sql"
FILES = sorted(SQL.rglob("*.sql"))

# Parameters that an operation may carry although a section of it does without them.
SHARED = {"now", "keep_ms", "ids", "by", "why", "batches"}


def every_op() -> dict[str, list[Op[Any]]]:
    """One or more operations of every function that makes one, in an order in which each finds something to do."""
    plain, keyed, dead, other, late, fired, queued, left = (new_id() for _ in range(8))
    batch, in_order = new_id(), new_id()

    def job(job_id: str, token: int, **more: Any) -> Claimed:
        known = Claimed(
            id=job_id, token=token, task="t", queue="q", priority=0, payload="{}", envelope=Envelope(), key=None,
            attempt=1, max_attempts=5, crashes=0, suspect=False, lease_ms=1000, lease_until=NOW + 1000, due_at=NOW,
            created_at=NOW, keep_ms=9, batch_id=None, schedule=None, replay_count=0, cancel_requested_at=None,
        )  # fmt: skip
        return replace(known, **more)

    failed = Change(State.DEAD, error=Failure("E", "no", "traceback"))
    sighting = Sighting(other, 3, NOW + 1000, 1000, "w")
    terms = Terms("t", queue="q", lease_ms=1000)
    debounced = Terms("t", queue="later", debounce_ms=9)
    runs = (
        Run(fired, NOW, 5, Envelope(due_at=NOW), because="triggered by a"),
        Run(queued, NOW + 1, 0, Envelope(due_at=NOW + 1), QUEUED),
    )
    job_terms = JOB_TERMS.replace("default", "q")
    skip = Skip(NOW - 9, NOW - 8, 2, "missed: so")
    told = Told("schedule.missed", by="a", why="missed: so", data='{"count":2}')
    of_batch = Terms("t", queue="batched", batch_id=batch)
    places = [NewJob(new_id(), "{}", key=key) for key in ("b1", "b2")]
    return {
        "enqueue": [
            ops.enqueue(terms, [NewJob(plain, "{}"), NewJob(dead, "{}")], now=NOW),
            ops.enqueue(terms, [NewJob(keyed, "{}", key="k")], now=NOW),
            ops.enqueue(Terms("unknown", queue="q"), [NewJob(new_id(), "{}")], now=NOW),
            ops.enqueue(Terms("late", queue="r", delay_ms=9), [NewJob(late, "{}")], now=NOW),
            *(
                ops.enqueue(Terms("t", queue="shaped", priority=n % 2, delay_ms=n), [NewJob(new_id(), "{}")], now=NOW)
                for n in (0, 0, 0, 9)
            ),
            ops.enqueue(Terms("child", queue="q"), [NewJob(new_id(), "{}")], parent=Held(plain, 1), now=NOW),
            ops.enqueue(replace(terms, key_window_ms=9), [NewJob(new_id(), "{}", key="w")], now=NOW),
            ops.enqueue(debounced, [NewJob(new_id(), "{}", key="d")], now=NOW),
            ops.enqueue(debounced, [NewJob(new_id(), "1", key="d")], now=NOW),
            ops.enqueue(debounced, [NewJob(new_id(), "1", key="d")], parent=Held(plain, 1), now=NOW),
        ],
        "register": [ops.register("w", host="h", pid=1, queues=["q", "r"], tasks=["t"], beat_ms=1, slots=9, now=NOW)],
        "workers": [ops.workers(now=NOW)],
        "pause": [ops.pause("task", "t", by="a", why="b", until_ms=1, now=NOW)],
        "paused": [ops.paused(now=NOW)],
        "resume": [ops.resume("task", "t", by="a", why="b", now=NOW)],
        "claim": [
            ops.claim("q", limit=3, token=1, worker="w", tasks=["t"], now=NOW),
            ops.claim("q", limit=3, token=2, worker="w", tasks=["t"], marks=[Mark(0, NOW, plain)], now=NOW),
        ],
        "shape.limit_queue": [
            queues.limit_queue("q", max_depth=5, ageing_ms=60_000, retry_share=0.25, by="a", why="b", now=NOW),
            queues.limit_queue("q", ageing_ms=queues.OFF, by="a", why="c", now=NOW),
        ],
        "shape.depth": [queues.depth("q", enough=9)],
        "shape.note_depth": [queues.note_depth("q", 3, max_depth=5, now=NOW)],
        "shape.limits": [queues.limits(now=NOW + 5)],
        "shape.claim": [
            queues.claim("shaped", ageing_ms=1, retries=0, limit=2, token=4, worker="w", tasks=["t"], now=NOW + 9),
            queues.claim("shaped", ageing_ms=None, retries=None, limit=2, token=6, worker="w", now=NOW + 9),
        ],
        "head": [ops.head("q", tasks=["t"], now=NOW)],
        "lanes.declare": [lanes.declare({"t": TaskLimits("t", 3, 2, 1000), "u": TaskLimits("u")})],
        "lanes.limit": [lanes.limit("t", cap=2, rate_count=5, rate_ms=10, by="a", why="b", now=NOW)],
        "lanes.limits": [lanes.limits()],
        "lanes.tasks": [lanes.tasks("q")],
        "lanes.claim": [
            ops.enqueue(Terms("t", queue="q"), [NewJob(new_id(), "{}", lane="t:a")], now=NOW),
            ops.enqueue(
                Terms("u", queue="q", ordering_dead="block"),
                [NewJob(new_id(), "{}", lane="u:a")],
                now=NOW,
            ),
            ops.enqueue(
                Terms("u", queue="q", ordering_dead="skip"), [NewJob(new_id(), "{}", lane="u:b", key="l")], now=NOW
            ),
            lanes.claim(
                "q", [Walk("t"), Walk("u", ordered=True)], limit=3, lanes=9, token=77, worker="w", now=NOW
            ),
            lanes.claim("q", [Walk("t")], limit=3, lanes=9, token=78, worker="w", wait=True, now=NOW),
        ],
        "lanes.next_permit": [lanes.next_permit("q", ["t"], now=NOW)],
        "recall": [ops.recall(1)],
        "extend": [ops.extend([Held(plain, 1)], now=NOW)],
        "progress": [ops.progress(Held(plain, 1), 50, "half")],
        "heartbeat": [ops.heartbeat(Held(plain, 1), now=NOW)],
        "finish": [
            ops.finish([Finish(job(plain, 1, keep_ms=0), Change(State.SUCCEEDED))], now=NOW),
            ops.finish([Finish(job(plain, 1), Change(State.SUCCEEDED, result="1"))], now=NOW),
            ops.finish([Finish(job(plain, 1), Change(State.SUCCEEDED))], borrowed=True, now=NOW),
            ops.finish([Finish(job(keyed, 1, key="k"), Change(State.SUCCEEDED))], borrowed=True, now=NOW),
            ops.finish([Finish(job(keyed, 1, key="k"), Change(State.SUCCEEDED, result="1"))], now=NOW),
            ops.finish([Finish(job(other, 1, batch_id=batch), Change(State.SUCCEEDED, result="1"))], now=NOW),
            ops.finish([Finish(job(dead, 1), failed), Finish(job(keyed, 1, key="k"), failed)], now=NOW),
            ops.finish(
                [Finish(job(plain, 1), Change(State.SUCCEEDED)), Finish(job(dead, 1), failed)], now=NOW
            ),
            snooze(job(plain, 1), 5, now=NOW),
        ],
        "settle": [ops.settle([Held(dead, 1)])],
        "release": [ops.release([job(plain, 1)], now=NOW)],
        "expired_leases": [ops.expired_leases(now=NOW)],
        "rescue": [ops.rescue([sighting], now=NOW + 1000)],
        "promote": [ops.promote("q", retries=False, now=NOW), ops.promote("q", now=NOW)],
        "park": [ops.park("q", now=NOW)],
        "parked": [ops.parked()],
        "queues": [ops.queues(now=NOW + 5)],
        "wake": [ops.wake({"unknown": 1}, ["q"])],
        "next_due": [ops.next_due("q", now=NOW)],
        "expirable": [ops.expirable(now=NOW)],
        "expire": [ops.expire([plain], now=NOW)],
        "get": [ops.get(plain, now=NOW)],
        "listing": [
            ops.listing(state=State.DEAD, task="t", queue="q", batch_id=other, since=1, error="e", now=NOW),
            ops.listing(prefix=late[:20], now=NOW),
        ],
        "dead_list": [
            ops.dead_list(task="t", queue="q", batch_id=other, error="e", since=1, until=2, partial=True, now=NOW)
        ],
        "dead_metrics": [ops.dead_metrics(now=NOW)],
        "attempts": [ops.attempts(dead)],
        "steps": [ops.steps(dead)],
        "replay": [ops.replay([Replay(dead, new_id(), key="k2", payload="{}", force=True)], by="a", now=NOW)],
        "retry": [ops.retry([late, plain], by="a", why="b", now=NOW)],
        "cancel": [ops.cancel([plain], by="a", why="b", now=NOW)],
        "resolve": [ops.resolve([dead], by="a", why="b", now=NOW)],
        "purge": [ops.purge([dead], by="a", why="b", now=NOW)],
        "schedules.define": [
            schedules.define([
                definition("gone", "delay", terms=job_terms, in_code=True),
                definition("other", "cron", terms=job_terms, pause_after=3, grace_ms=1, jitter_ms=1),
                definition("s", terms=job_terms, overlap=Overlap.QUEUE, in_code=True),
            ], now=NOW),
            schedules.define(
                [definition("s", terms=job_terms, overlap=Overlap.QUEUE, catchup=Catchup.LAST, revision=2)], now=NOW
            ),
        ],
        "schedules.next_fire": [schedules.next_fire(now=NOW)],
        "schedules.fire": [
            schedules.fire([
                Firing("s", 2, NOW + 600_000, NOW, runs, (skip,), (NOW - 10,), (told,)),
                Firing("gone", 1, None, NOW, (Run(left, NOW, NOW, Envelope(due_at=NOW), QUEUED),)),
                Firing("other", 99, None, NOW, (Run(new_id(), NOW, NOW, Envelope()),)),  # was changed meanwhile
            ], now=NOW),
            schedules.fire([Firing("other", 1, NOW - 1, skips=(skip,), resume=True)], now=NOW),
        ],
        "schedules.due": [schedules.due(limit=9, now=NOW), schedules.due(limit=9, beside=["other"], now=NOW)],
        "schedules.one": [schedules.one("s", now=NOW), schedules.one("nobody", now=NOW)],
        "schedules.live_runs": [schedules.live_runs(["s", "gone"])],
        "schedules.unqueue": [schedules.unqueue(now=NOW)],
        "schedules.abandon": [schedules.abandon(["s"], now=NOW)],
        "schedules.readopt": [schedules.readopt(["gone", "s"])],
        "schedules.pause": [schedules.pause("s", by="a", why="b", now=NOW)],
        "schedules.listing": [
            schedules.listing(now=NOW), schedules.listing(names=["s", "x"], now=NOW),
            schedules.listing(after="gone", limit=1, now=NOW),
        ],
        "schedules.fires": [schedules.fires("s"), schedules.fires("s", before=NOW + 1, limit=1)],
        "schedules.skipped_between": [schedules.skipped_between("s", NOW - 8, NOW)],
        "schedules.fired_between": [schedules.fired_between("s", NOW, NOW)],
        "schedules.delete": [schedules.delete("s", by="a", why="b", now=NOW)],
        "batches.open_batch": [
            batches.open_batch(batch, "b", callbacks=Callbacks(*map(callback, ("x", "y", "z"))), now=NOW),
            batches.open_batch(in_order, "b", key="night", ok_at=0.5, now=NOW),
            batches.open_batch(new_id(), "b", key="night", now=NOW),
        ],
        "batches.add": [
            batches.add(of_batch, [NewJob(new_id(), "{}")], now=NOW),
            batches.add(of_batch, [NewJob(new_id(), "{}", key="b0")], now=NOW),
            batches.add(of_batch, [NewJob(new_id(), "{}")], parent=Held(plain, 1), now=NOW),
            batches.add(replace(of_batch, batch_id=in_order), places, filling=0, now=NOW),
            batches.add(replace(of_batch, batch_id=in_order), [NewJob(new_id(), "{}")], filling=2, now=NOW),
            batches.add(replace(of_batch, batch_id=other), [NewJob(new_id(), "{}")], now=NOW),
        ],
        "batches.added_before": [batches.added_before(replace(of_batch, batch_id=in_order), places)],
        "batches.get": [batches.get(batch), batches.get(other)],
        "batches.listing": [
            batches.listing(), batches.listing(name="b", key="night", active=True, prefix=batch[:8], limit=1),
        ],
        "batches.rest": [batches.rest(other)],
        "batches.seal": [batches.seal(batch, now=NOW), batches.seal(other, now=NOW)],
        "batches.cancel": [batches.cancel(batch, by="me", why="so", now=NOW)],
        "events": [ops.events(job_id=dead, after=0), ops.events()],
        "prunable": [ops.prunable(now=NOW + 99 * 86_400_000)],
        "prune": [ops.prune(what, now=NOW) for what in ops.PRUNABLE],
        "hold": [ops.hold(by="a", why="b", now=NOW)],
        "leave": [ops.leave("w")],
        "why": [ops.why(plain, now=NOW)],
        "clock": [ops.clock()],
    }  # fmt: skip


def with_follow_ups(op: Op[Any]) -> Iterator[Op[Any]]:
    """An operation, how it is asked again, and what it asks next."""
    yield op
    if op.again is not None:
        yield op.again
    further = op.follow({}) if op.follow else None
    if further is not None:
        yield further


OPS = [one for made in every_op().values() for op in made for one in with_follow_ups(op)]


def tables(sql: str) -> str:
    """Strip comments and texts, so that only code is left."""
    return re.sub(r"'[^']*'", "''", re.sub(r"--.*", "", sql))


# Operations and sections


def test_every_function_that_makes_an_operation_is_tested() -> None:
    makers = {
        f"{before}{name}"
        for before, module in (
            ("", ops),
            ("schedules.", schedules),
            ("batches.", batches),
            ("lanes.", lanes),
            ("shape.", queues),
        )
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__.startswith(module.__name__)
        and not name.startswith("_")
        and name != "while_held"  # which makes one of another
        and str(function.__annotations__.get("return", "")).startswith("Op[")
    }
    assert set(every_op()) == makers


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_section_is_used_and_every_operations_sections_exist(
    dialect: statements.Dialect,
) -> None:
    asked = {section for op in OPS for section in op.sections}
    assert set(sections(dialect)) == asked | {"notify"}  # which `caller` adds to what wakes workers


def test_the_tail_of_every_ending_is_complete_and_last_but_for_a_read() -> None:
    for op in OPS:
        if "ended_delete" in op.sections:
            begin = op.sections.index("ended_key")
            assert op.sections[begin : begin + len(TAIL)] == TAIL
            assert len(op.sections[begin + len(TAIL) :]) <= 1


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_operation_gives_exactly_the_parameters_of_its_statements(dialect: statements.Dialect) -> None:
    for op in OPS:
        taken = {
            name
            for section in op.sections
            for statement in spell(dialect, section, "named")
            for name in statement.parameters
        }
        assert taken <= set(op.params), op.name
        unread = {"parts", "alone"} if UNMARKED in op.sections else set()
        assert set(op.params) - taken <= SHARED | unread, op.name


# Parity


def test_both_dialects_have_the_same_sections() -> None:
    assert set(sections("sqlite")) == set(sections("postgres"))
    common = [name for name in sections("postgres") if name not in POSTGRES_ONLY | SQLITE_ONLY]
    assert [name for name in sections("sqlite") if name not in POSTGRES_ONLY | SQLITE_ONLY] == common


def test_a_dialect_has_no_statements_where_only_the_other_has_something_to_do() -> None:
    assert {name for name, parts in sections("postgres").items() if not parts} == SQLITE_ONLY == {"ends_written"}
    assert sections("sqlite")["ends_written"]
    assert {name for name, parts in sections("sqlite").items() if not parts} == POSTGRES_ONLY
    assert all(sections("postgres")[name] for name in POSTGRES_ONLY)
    assert {
        "await_claim", "fire_lock", "lock_debounced", "lock_jobs", "notify", "uncompiled", "unqueue_lock",
        "wait_for_lanes",
    } == POSTGRES_ONLY  # fmt: skip


# On PostgreSQL, by the section before them.
HANDED_ON = {"hold_lanes": {"walks", "lanes", "queue", "alone"}, "claim_lanes": {"walks", "lanes"}}
# On SQLite the section is `claim`, which has no use for marks.
UNMARKED = "claim_marked"
# On SQLite, by `ends_written`.
COUNTED_APART = {"finish_plain", "finish_keyed", "finish_batched"}


def test_both_dialects_take_the_same_parameters_in_each_section() -> None:
    assert sections("sqlite")[UNMARKED] == sections("sqlite")["claim"]
    for section in sections("sqlite").keys() - SQLITE_ONLY - POSTGRES_ONLY - {UNMARKED}:
        taken = [
            {name for statement in spell(dialect, section, "named") for name in statement.parameters} - {"now"}
            for dialect in DIALECTS
        ]
        assert taken[0] == taken[1] | HANDED_ON.get(section, set()), section


AS_ONE_VALUE = {"claim", "claim_marked", "recall"}  # on SQLite each job comes as one JSON


def test_both_databases_answer_with_the_same_columns_each_named_once(tmp_path: Path, postgres_url: str) -> None:
    """D1 answers with objects: of two columns that share a name, one would be lost."""
    driver = SQLiteDriver(tmp_path / "duly.db")
    driver.run(ops.clock())
    lite = driver.connect()
    post = psycopg.connect(postgres_url)  # in one transaction, because some sections hand something on
    asked = {section: op.params for op in OPS for section in op.sections}
    answering = 0
    try:
        for section, params in asked.items():
            columns: dict[str, list[list[str]]] = {}
            for dialect, conn, style in (("sqlite", lite, "named"), ("postgres", post, "pyformat")):
                cursors = [conn.execute(text.sql, params) for text in spell(dialect, section, style)]
                columns[dialect] = [[column[0] for column in c.description] for c in cursors if c.description]
                if section in POSTGRES_ONLY:  # the operation reads the rows of both databases in the same way
                    assert not [row for c in cursors if c.description for row in c.fetchall()], section
                for cursor in cursors:
                    cursor.close()
            if section in SQLITE_ONLY | COUNTED_APART:
                assert columns["sqlite" if section in SQLITE_ONLY else "postgres"] == [["recorded"]], section
                assert columns["postgres" if section in SQLITE_ONLY else "sqlite"] == [], section
            elif section not in AS_ONE_VALUE | POSTGRES_ONLY:
                assert columns["sqlite"] == columns["postgres"], section
            for names in columns["sqlite"]:
                assert len(set(names)) == len(names), section
                answering += 1
    finally:
        lite.close()
        post.close()
        driver.close()
    assert answering > 25


def test_both_databases_answer_every_operation_alike(tmp_path: Path, postgres_url: str) -> None:
    answers = []
    made = every_op()
    for driver in (SQLiteDriver(tmp_path / "duly.db"), PostgresDriver(postgres_url)):
        answers.append({name: [driver.run(op) for op in asked] for name, asked in made.items() if name != "clock"})
        driver.close()
    for name, answer in answers[0].items():
        assert [same(one) for one in answer] == [same(one) for one in answers[1][name]], name


def same(answer: Any) -> Any:
    """An answer without the blanks that each database puts into JSON text in its own way, and without what it took."""
    if isinstance(answer, ops.Head):
        return answer.mark
    if isinstance(answer, list) and answer and isinstance(answer[0], Event):
        return [replace(event, data=event.data and json.loads(event.data)) for event in answer]
    return answer


# How the SQL is written


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SQL)))
def test_no_select_list_has_a_star(file: Path) -> None:
    """A cached plan breaks on the next migration."""
    code = tables(file.read_text("utf-8"))
    stars = re.findall(r"(?:\b(?:select|returning|distinct|all)\s+|,\s*|\.)\*", code)
    assert stars == []
    assert re.search(r"(?:\b(?:select|returning)\s+|,\s*|\.)\*", "select a.* from a")  # the pattern can find one


@pytest.mark.parametrize("file", [file for file in FILES if "postgres" in file.parts], ids=lambda file: file.name)
def test_every_table_on_postgres_is_written_with_its_schema(file: Path) -> None:
    code = tables(file.read_text("utf-8"))
    code = re.sub(r"create (unique )?index \w+", "create index x", code)
    code = re.sub(r"\b(drop|add) constraint duly_\w+", "constraint x", code)  # which lies in its table
    code = re.sub(r"\bfor update of duly_\w+", "for update of x", code)  # there it is the name within the query
    bare = re.findall(r"(?<![.\w])duly_\w+(?![\w.])", code)
    assert bare == []
    assert "duly.duly_" in code


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SQL)))
def test_no_text_in_the_sql_contains_a_separator_of_split(file: Path) -> None:
    code = re.sub(r"--.*", "", file.read_text("utf-8"))
    texts = re.findall(r"'[^']*'", code)
    assert code.count("'") == 2 * len(texts)
    assert not [text for text in texts if ";" in text or "--" in text]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_split_keeps_every_statement_whole(dialect: statements.Dialect) -> None:
    for section, parts in sections(dialect).items():
        assert parts or section in (SQLITE_ONLY if dialect == "postgres" else POSTGRES_ONLY), section
        for part in parts:
            assert re.match(r"(?:with|select|insert|update|delete)\b", part), section
            assert part.count("(") == part.count(")"), section
            assert "--" not in part
            assert ";" not in part


def test_split_drops_comments_and_empty_statements() -> None:
    text = "-- a; comment\nselect 1 -- with; more\n  from t;\n\n\n;\n  update t\n\n   set a = 1;\n-- the end"
    assert split(text) == ("select 1 \n  from t", "update t\n   set a = 1")


def test_no_cast_is_taken_for_a_parameter() -> None:
    types = {"bigint", "int", "integer", "text", "uuid", "boolean", "json", "jsonb", "real", "regclass", "timestamptz"}
    for section, parts in sections("postgres").items():
        named = spell("postgres", section, "named")
        assert not types & {name for statement in named for name in statement.parameters}, section
        for part, statement in zip(parts, spell("postgres", section, "pyformat"), strict=True):
            assert len(re.findall("::", part)) <= len(re.findall("::", statement.sql)), section
            assert not re.search(r"(?<![:\w]):[a-z]", statement.sql), section


def test_a_parameter_is_spelled_as_each_driver_wants_it() -> None:
    (named,) = spell("sqlite", "progress", "named")
    (numbered,) = spell("sqlite", "progress", "numbered")
    (pyformat,) = spell("postgres", "progress", "pyformat")
    (dollar,) = spell("postgres", "progress", "dollar")
    assert named.parameters == numbered.parameters == ("progress", "message", "id", "token")
    assert pyformat.parameters == dollar.parameters == ("id", "token", "progress", "message")
    assert "progress = :progress, progress_message = :message" in named.sql
    assert "progress = ?1, progress_message = ?2" in numbered.sql
    assert "progress = %(progress)s::real, progress_message = %(message)s::text" in pyformat.sql
    assert "progress = $3::real, progress_message = $4::text" in dollar.sql


def test_a_moment_that_is_bound_replaces_the_databases_clock(tmp_path: Path, postgres_url: str) -> None:
    for driver in (SQLiteDriver(tmp_path / "duly.db"), PostgresDriver(postgres_url)):
        assert driver.run(Op("clock", ("clock",), {"now": 5}, lambda rows: rows[0][0], writes=False)) == 5
        assert abs(driver.run(ops.clock()) - _python_clock()) < 60_000
        driver.close()


def _python_clock() -> int:
    import time

    return time.time_ns() // 1_000_000


# Another schema


@pytest.mark.parametrize("schema", ['we"ird-x', "Per%cent s", "select"])
def test_any_schema_name_works_from_migration_to_operation(postgres: Any, schema: str) -> None:
    url = postgres.new_database()
    store = PostgresStore(url, schema=schema)
    try:
        with pytest.raises(SchemaMismatch, match="duly migrate"):
            store.run(ops.clock())
        bring_up_to_date(url, schema=schema)
        assert bring_up_to_date(url, schema=schema) == ()
        for asked in every_op().values():
            for op in asked:
                store.run(op)
        (job_id,) = store.enqueue()
        store.succeed(store.claim()[0], "1")
        assert store.get(job_id).result == 1
        with psycopg.connect(url) as conn:
            found = conn.execute(
                "select distinct schemaname from pg_tables where tablename like %s", ["duly%"]
            ).fetchall()
        assert found == [(schema,)]
    finally:
        store.close()
        postgres.drop(url)


def test_two_schemas_in_one_database_do_not_see_each_other(postgres_url: str) -> None:
    bring_up_to_date(postgres_url, schema="second")
    one, two = PostgresStore(postgres_url), PostgresStore(postgres_url, schema="second")
    (job_id,) = one.enqueue()
    assert two.claim() == []
    assert two.get(job_id) is None
    assert len(one.claim()) == 1
    one.close()
    two.close()


def test_a_section_that_is_defined_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sqlite").mkdir()
    for name in ("a.sql", "b.sql"):
        (tmp_path / "sqlite" / name).write_text("-- name: claim\nselect 1;\n")
    monkeypatch.setattr(statements, "files", lambda package: tmp_path)
    with pytest.raises(ValueError, match="'claim' is defined twice"):
        sections.__wrapped__("sqlite")


def test_the_sqlite_of_this_machine_is_new_enough() -> None:
    assert sqlite3.sqlite_version_info >= (3, 38)
