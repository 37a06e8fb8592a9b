"""What the databases do with our statements when many jobs are ready: which index, and how much is read.

Each index is as deep with the 200,000 ready jobs of `make test` as with the million of `make nightly`. Plans are read
before and after the tables were analyzed, for the values at hand and, on PostgreSQL, for any values. Costs are counted
in pages and in steps of SQLite's machine, never in time.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sqlite3
from collections.abc import Iterator
from typing import Any, NamedTuple

import psycopg
import pytest
from msgspec.structs import replace
from psycopg import sql

from duly.model import QUEUED, Change, Claimed, Envelope, Failure, NewJob, Sighting, State, Terms
from duly.rules.firing import Firing, Run, Skip, Told
from duly.store import batches, lanes, ops, queues, schedules
from duly.store.lanes import Walk
from duly.store.op import Finish, Held, Op
from duly.store.ops import Mark, Replay
from duly.store.postgres.schema import bring_up_to_date
from duly.store.sqlite.driver import SQLiteDriver
from duly.store.statements import spell
from tests.contract.stores import JOB_TERMS, NOW, definition
from tests.servers.postgres import PostgresServer

# The databases are filled once: one process runs all tests of the group.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("plans")]

READY = int(os.environ.get("DULY_TEST_READY", "200000"))
SCHEDULED, PARKED, WAITING, DONE, KEYS = 100_000, 100_000, 50_000, 200_000, 100_000
SCHEDULES, RUNS, FIRES = 100_000, 50_000, 300_000
BATCHES, BATCHED = 1000, 50_000
LANED, LANES = 50_000, 100_000
FIRST_PARKED, FIRST_WAITING, FIRST_RUN, FIRST_BATCHED, FIRST_DONE, FIRST_LANED = (
    1_500_000,
    1_700_000,
    1_800_000,
    1_900_000,
    2_000_000,
    5_000_000,
)
BIG = ("duly_job", "duly_done", "duly_key", "duly_schedule", "duly_fire", "duly_lane")

JOBS = f"""
insert into duly_job (id, task, queue, priority, state, max_attempts, created_at, due_at, lease_ms, keep_ms,
                      result_ttl_ms, payload)
{{numbers}}
select {{id}}, 'work', case when n % 10 = 0 then 'mail' else 'default' end, n % 3,
       case when n <= {READY} then 'ready' else 'scheduled' end, 5, {NOW},
       {NOW} + case when n <= {READY} then -(n % 1000) else n end, 30000, 1000, 1000, '{{{{"n":1}}}}'
  from {{source}}
"""
PARKED_JOBS = f"""
insert into duly_job (id, task, queue, priority, state, max_attempts, created_at, due_at, lease_ms, keep_ms,
                      result_ttl_ms, payload, reason, parked_version)
{{numbers}}
select {{id}}, case when n % 2 = 0 then 'work' else 'gone' end, 'default', n % 3, 'waiting', 5, {NOW}, {NOW} - n % 1000,
       30000, 1000, 1000, '{{{{"n":1}}}}', 'parked: so', 2 - n % 2
  from {{source}}
"""
WAITING_JOBS = f"""
insert into duly_job (id, task, queue, priority, state, max_attempts, created_at, due_at, lease_ms, keep_ms,
                      result_ttl_ms, payload)
{{numbers}}
select {{id}}, 'work', 'default', 0, 'waiting', 5, {NOW}, {NOW} + n, 30000, 1000, 1000, '{{{{"n":1}}}}'
  from {{source}}
"""
# One of each schedule in turn, and every other one queued behind it.
RUN_JOBS = f"""
insert into duly_job (id, task, queue, priority, state, max_attempts, created_at, due_at, lease_ms, keep_ms,
                      result_ttl_ms, payload, reason, schedule)
{{numbers}}
select {{id}}, 'work', 'default', 0, case when n % 2 = 0 then 'waiting' else 'ready' end, 5, {NOW},
       case when n % 2 = 1 then {NOW} end, 30000, 1000, 1000, '{{{{"n":1}}}}',
       case when n % 2 = 0 then '{QUEUED}' end, 'schedule ' || ((n - {FIRST_RUN} - 1) / 2)
  from {{source}}
"""
# All of one batch.
BATCHED_JOBS = f"""
insert into duly_job (id, task, queue, priority, state, max_attempts, created_at, due_at, lease_ms, keep_ms,
                      result_ttl_ms, payload, batch_id)
{{numbers}}
select {{id}}, 'work', 'default', 0, 'ready', 5, {NOW}, {NOW}, 30000, 1000, 1000, '{{{{"n":1}}}}',
       '00000000-0000-0000-0000-000000000001'
  from {{source}}
"""
# A thousand lanes of a task that has a cap, and as many of one that keeps an order.
LANED_JOBS = f"""
insert into duly_job (id, task, queue, priority, state, max_attempts, created_at, due_at, lease_ms, keep_ms,
                      result_ttl_ms, payload, lane, seq, ordering_dead)
{{numbers}}
select {{id}}, case when n % 2 = 0 then 'capped' else 'ordered' end, 'default', 0, 'ready', 5, {NOW}, {NOW} - n, 30000,
       1000, 1000, '{{{{"n":1}}}}', case when n % 2 = 0 then 'capped:' else 'ordered:' end || (n / 2 % 1000),
       case when n % 2 = 1 then n end, case when n % 2 = 1 then 'block' end
  from {{source}}
"""
LANES_AT_REST = f"""
insert into duly_lane (name, task, used_at)
{{numbers}}
select 'ordered:' || n, 'ordered', {NOW}
  from {{source}}
"""
BATCHES_THEMSELVES = f"""
insert into duly_batch (id, name, key, created_at, open, filled, sealed_at)
{{numbers}}
select {{id}}, 'import', 'night ' || n, {NOW}, case n when 1 then {BATCHED} else 0 end, 5,
       case when n % 2 = 0 then {NOW} end
  from {{source}}
"""
# A tenth is due, a tenth is paused, some have no time; most are due later.
SCHEDULED_ONES = f"""
insert into duly_schedule (name, task, spec, mode, interval_ms, overlap, in_code, next_at, paused_at, paused_why, terms)
{{numbers}}
select 'schedule ' || n, 'work', '10m', 'rate', 600000,
       case n % 3 when 0 then 'allow' when 1 then 'queue' else 'skip' end, {{in_code}},
       case when n % 100 <> 7 then {NOW} + case when n % 10 = 0 then -n else n end end,
       case when n % 10 = 3 then {NOW} end, case when n % 10 = 3 then 'so' end, {{terms}}
  from {{source}}
"""
PAST_FIRES = f"""
insert into duly_fire (schedule, due_at, count, outcome, at)
{{numbers}}
select 'schedule ' || (n % 1000), {NOW} - n, 1, case when n % 5 = 0 then 'skipped' else 'fired' end, {NOW} - n
  from {{source}}
"""
WORKERS = f"""
insert into duly_worker (id, host, pid, queues, tasks, schedules, beat_ms, started_at, seen_at)
{{numbers}}
select 'w' || n, 'h', 1, '["default","mail"]', '["work","other","capped","ordered"]', '["schedule 1","schedule 2"]',
       10000, {NOW}, {NOW}
  from {{source}}
"""
FINISHED = f"""
insert into duly_done (id, task, queue, priority, state, attempt, max_attempts, crashes, created_at, lease_ms,
                       finished_at, keep_ms, result_ttl_ms, prune_at, replay_count, payload, result, result_until)
{{numbers}}
select {{id}}, 'work', 'default', 0,
       case n % 1000 when 0 then 'dead' when 1 then 'partial' else 'succeeded' end, 1, 5, 0, {NOW}, 1, {NOW} - n,
       1000, 1000, case when n % 1000 <> 0 then {NOW} - n + 1000000 end, 0, '{{{{"n":1}}}}', '1', {NOW}
  from {{source}}
"""
HELD_KEYS = f"""
insert into duly_key (task, key, job_id, state, fingerprint, expires_at)
{{numbers}}
select 'work', 'key ' || n, {{id}}, 'succeeded', 'f', {NOW} + n
  from {{source}}
"""
FILLS = (
    (JOBS, 1, READY + SCHEDULED),
    (PARKED_JOBS, FIRST_PARKED + 1, FIRST_PARKED + PARKED),
    (WAITING_JOBS, FIRST_WAITING + 1, FIRST_WAITING + WAITING),
    (RUN_JOBS, FIRST_RUN + 1, FIRST_RUN + RUNS),
    (BATCHED_JOBS, FIRST_BATCHED + 1, FIRST_BATCHED + BATCHED),
    (LANED_JOBS, FIRST_LANED, FIRST_LANED + LANED - 1),
    (LANES_AT_REST, 0, LANES - 1),
    (BATCHES_THEMSELVES, 1, BATCHES),
    (SCHEDULED_ONES, 0, SCHEDULES - 1),
    (PAST_FIRES, 1, FIRES),
    (FINISHED, FIRST_DONE + 1, FIRST_DONE + DONE),
    (HELD_KEYS, 1, KEYS),
    (WORKERS, 1, 10),
)


def id_of(number: int) -> str:
    text = f"{number:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


@pytest.fixture(scope="session")
def full_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    path = tmp_path_factory.mktemp("plans") / "duly.db"
    driver = SQLiteDriver(path)
    driver.run(ops.clock())
    driver.close()
    conn = sqlite3.connect(path, isolation_level=None)
    for pragma in ("journal_mode = off", "synchronous = off", "cache_size = -300000"):
        conn.execute(f"pragma {pragma}")
    for fill, first, last in FILLS:
        numbers = f"with recursive numbers (n) as (select {first} union all select n + 1 from numbers where n < {last})"
        one = "printf('00000000-0000-0000-%04x-%012x', n / 281474976710656, n)"
        conn.execute(fill.format(numbers=numbers, id=one, source="numbers", in_code="n < 1000", terms=f"'{JOB_TERMS}'"))
    conn.execute("pragma journal_mode = wal")
    conn.execute("pragma wal_autocheckpoint = 0")
    yield conn
    conn.close()


@pytest.fixture(scope="session")
def full_postgres(postgres: PostgresServer) -> Iterator[psycopg.Connection[Any]]:
    url = postgres.new_database()
    bring_up_to_date(url)
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as conn:
        for table in BIG:  # we say when they are analyzed
            conn.execute(f"alter table duly.{table} set (autovacuum_enabled = false)")
        conn.execute("set search_path to duly")
        for fill, first, last in FILLS:
            source = f"generate_series({first}, {last}) as n"
            words = {
                "id": "lpad(to_hex(n), 32, '0')::uuid",
                "source": source,
                "in_code": "n < 1000",
                "terms": f"'{JOB_TERMS}'",
            }
            conn.execute(fill.format(numbers="", **words))
        conn.execute("set search_path to pg_catalog")
        yield conn
    postgres.drop(url)


# What is asked


class Asked(NamedTuple):
    """An operation, and the indexes each of its sections may walk on the big tables."""

    op: Op[Any]
    walks: dict[str, set[str]]


def job(number: int, **more: Any) -> Claimed:
    known = Claimed(
        id=id_of(number), token=5, task="work", queue="default", priority=0, payload="{}", envelope=Envelope(),
        key=None, attempt=1, max_attempts=5, crashes=0, suspect=False, lease_ms=1000, lease_until=NOW, due_at=NOW,
        created_at=NOW, keep_ms=9, batch_id=None, schedule=None, replay_count=0, cancel_requested_at=None,
    )  # fmt: skip
    return replace(known, **more)


BY_ID = {"duly_job_pkey"}
DONE_BY_ID = {"duly_done_pkey"}
EITHER_BY_ID = BY_ID | DONE_BY_ID
# One part for each state that few rows have; those that are not asked for are not run, as the limits below show.
LISTED = EITHER_BY_ID | {"duly_job_running", "duly_done_dead", "duly_done_partial"}
KEY = {"duly_key_pkey"}
BY_NAME = {"duly_schedule_pkey"}
ALL_SCHEDULES = {"all of duly_schedule"}
WAITING_RUNS = {"duly_job_waiting"}
FIRES_OF_ONE = {"duly_fire_pkey"}
RUNS_OF_ONE = {"duly_job_schedule"}
BY_KEY = EITHER_BY_ID | KEY  # what a section may walk that says nothing else
HUNDRED = range(1, 101)
TAIL = {
    "ended_key": BY_ID | KEY,
    "ended_next": BY_ID | KEY,
    **dict.fromkeys(("ended_batch", "ended_callbacks", "ended_event"), BY_ID),
    "ended_schedule": BY_ID | BY_NAME | RUNS_OF_ONE,
    **dict.fromkeys(("ended_done", "ended_delete"), BY_ID),
}
FAILED = Change(State.DEAD, error=Failure("E", "no", "traceback"))
KEYED = [NewJob(id_of(FIRST_DONE + n), "{}", key=f"key {n}") for n in HUNDRED]
OF_BATCH = Terms("work", batch_id=id_of(1))
NEW = [NewJob(id_of(3_000_000 + n), "{}") for n in HUNDRED]
ADD = batches.add(OF_BATCH, NEW, now=NOW)
BY_LANE = {"duly_job_lane_ready", "duly_lane_pkey"}
WHY = EITHER_BY_ID | BY_LANE | {"duly_job_ready", "duly_job_lane_running", "duly_job_seq", "duly_done_blocks"}
CLAIM = {"duly_job_ready", "duly_job_scheduled", "duly_job_running", "duly_job_pkey"}


def of_schedule(number: int) -> str:
    return f"schedule {number}"


def firing(number: int) -> Firing:
    """All that one schedule may have come of it."""
    at = NOW - 10 * number
    run = Run(id_of(FIRST_DONE + number), at, 0, Envelope(due_at=at))
    skip = Skip(at - 9, at - 8, 2, "missed")
    return Firing(of_schedule(number), 1, NOW + 1, at, (run,), (skip,), (at - 9,), (Told("schedule.missed"),))


FIRE = schedules.fire([firing(n) for n in HUNDRED], now=NOW)
DEFINE = schedules.define([definition(of_schedule(n), revision=2) for n in HUNDRED], now=NOW)

ASKED: dict[str, Asked] = {
    "claim": Asked(ops.claim("default", limit=50, token=9, worker="w", tasks=["work"], now=NOW), {"claim": CLAIM}),
    "claim of all tasks": Asked(ops.claim("default", limit=50, token=9, worker="w", now=NOW), {"claim": CLAIM}),
    "claim of suspects": Asked(
        ops.claim("default", limit=1, token=9, worker="w", alone=True, now=NOW), {"claim": CLAIM}
    ),
    "claim from marks on": Asked(
        ops.claim(
            "default", limit=50, token=9, worker="w", tasks=["work"],
            marks=[Mark(2, NOW - 1, id_of(READY - 99_999)), Mark(0, NOW - 500, id_of(1))], now=NOW,
        ),
        {"claim_marked": CLAIM},
    ),
    "claim of lanes": Asked(
        lanes.claim(
            "default",
            [Walk("capped", "capped:5"), Walk("ordered", ordered=True)],
            limit=50,
            lanes=20,
            token=9,
            worker="w",
            wait=True,
            now=NOW,
        ),
        {
            "promote_lanes": BY_ID | {"duly_job_lane_scheduled"},
            **dict.fromkeys(("walk_lanes", "wait_for_lanes", "hold_lanes"), BY_ID | BY_LANE),
            "claim_lanes": BY_ID
            | BY_LANE
            | {"duly_job_lane_running", "duly_job_seq", "duly_job_running", "duly_done_blocks"},
        },
    ),
    "laned tasks": Asked(lanes.tasks("default"), {"laned_tasks": BY_LANE | {"duly_job_lane_scheduled"}}),
    "next permit": Asked(lanes.next_permit("default", ["capped", "ordered"], now=NOW), {"next_permit": BY_LANE}),
    "enqueue in order": Asked(
        ops.enqueue(
            Terms("ordered", ordering_dead="block"),
            [NewJob(id_of(4_000_000 + n), "{}", lane=f"ordered:{n}") for n in HUNDRED],
            now=NOW,
        ),
        {"enqueue": BY_ID, "hand_out": BY_ID | BY_LANE},
    ),
    "claim with ageing": Asked(
        queues.claim(
            "default", ageing_ms=60_000, retries=None, limit=50, token=9, worker="w", tasks=["work"], now=NOW
        ),
        {"claim_shaped": CLAIM},
    ),
    "claim with a budget": Asked(
        queues.claim("default", ageing_ms=None, retries=5, limit=50, token=9, worker="w", tasks=["work"], now=NOW),
        {"claim_shaped": CLAIM},
    ),
    "depth": Asked(
        queues.depth("default", enough=10_001),
        {
            "depth": {
                f"duly_job_{kind}"
                for kind in ("ready", "scheduled", "lane_ready", "lane_scheduled", "waiting", "parked")
            }
        },
    ),
    "promote without retries": Asked(
        ops.promote("default", retries=False, now=NOW),
        {"promote": BY_ID | {"duly_job_scheduled", "duly_job_lane_scheduled", "duly_job_waiting"}},
    ),
    "head": Asked(ops.head("default", tasks=["work"], now=NOW), {"head": {"duly_job_ready"}}),
    "recall": Asked(ops.recall(9), {"recall": {"duly_job_running"}}),
    "extend": Asked(ops.extend([Held(id_of(n), 5) for n in HUNDRED], now=NOW), {"extend": BY_ID}),
    "progress": Asked(ops.progress(Held(id_of(1), 5), 3), {"progress": BY_ID | {"duly_job_running"}}),
    "finish plain": Asked(
        ops.finish([Finish(job(n), Change(State.SUCCEEDED, result="1")) for n in HUNDRED], now=NOW),
        {"finish_plain": BY_ID},
    ),
    "finish keyed": Asked(
        ops.finish([Finish(job(n, key=f"key {n}"), Change(State.SUCCEEDED, result="1")) for n in HUNDRED], now=NOW),
        {"finish_keyed": BY_ID | KEY},
    ),
    "finish plain, nothing kept": Asked(
        ops.finish([Finish(job(n, keep_ms=0), Change(State.SUCCEEDED)) for n in HUNDRED], now=NOW),
        {"finish_plain": BY_ID},
    ),
    "finish": Asked(
        ops.finish([Finish(job(n), FAILED) for n in HUNDRED], now=NOW),
        {"finish": BY_ID, "failed_attempts": BY_ID, **TAIL},
    ),
    "settle": Asked(
        ops.finish([Finish(job(n), FAILED) for n in HUNDRED]).follow({}),  # type: ignore[misc, arg-type]
        {"settle": EITHER_BY_ID},
    ),
    "promote": Asked(
        ops.promote("default", now=NOW),
        {"promote": BY_ID | {"duly_job_scheduled", "duly_job_lane_scheduled", "duly_job_waiting"}},
    ),
    "park": Asked(
        ops.park("default", now=NOW), {"park": BY_ID | {"duly_job_ready", "duly_job_scheduled", "duly_job_lane_ready"}}
    ),
    "wake": Asked(
        ops.wake({"work": 1, "other": 1}, ["default", "mail"]), {"wake": BY_ID | {"duly_job_parked"}}
    ),
    "next_due": Asked(
        ops.next_due("default"), {"next_due": {"duly_job_scheduled", "duly_job_lane_scheduled"}}
    ),
    "expired_leases": Asked(ops.expired_leases(now=NOW), {"expired_leases": {"duly_job_running"}}),
    "rescue": Asked(
        ops.rescue([Sighting(id_of(n), 5, NOW, 1000, "w") for n in HUNDRED], now=NOW),
        {"rescue": BY_ID, "crashed_attempts": BY_ID, **TAIL},
    ),
    "rescued": Asked(
        Op("rescued", ("rescued",), {"seen": json.dumps([{"id": id_of(1), "token": 5}])}, len),
        {"rescued": EITHER_BY_ID},
    ),
    "expirable": Asked(ops.expirable(now=NOW), {"expirable": {"duly_job_expires"}}),
    "expire": Asked(
        ops.expire([id_of(n) for n in HUNDRED], now=NOW), {"expire": BY_ID | {"duly_job_expires"}, **TAIL}
    ),
    "cancel": Asked(ops.cancel([id_of(n) for n in HUNDRED], now=NOW), {"cancel": BY_ID, **TAIL}),
    "retry": Asked(ops.retry([id_of(READY + n) for n in HUNDRED], now=NOW), {"retry": BY_ID}),
    "queues": Asked(
        ops.queues(now=NOW),
        {
            "queues": {
                f"duly_job_{kind}"
                for kind in ("ready", "scheduled", "lane_ready", "lane_scheduled", "waiting", "parked", "running")
            }
        },
    ),
    "parked": Asked(ops.parked(), {"parked": {"duly_job_parked"}}),
    "prunable": Asked(
        ops.prunable(now=NOW + 10**9),
        {
            "prunable": {"duly_done_prune", "duly_done_batch", "duly_key_expires", "duly_fire_at"}
            | {"duly_lane_used", "duly_job_seq", "duly_done_blocks"}
        },
    ),
    "workers": Asked(ops.workers(now=NOW), {"workers": {"duly_job_running"}}),
    "why": Asked(ops.why(id_of(2999), now=NOW), {"why": WHY}),  # which is the next of its queue
    "why of one with many ahead": Asked(ops.why(id_of(7), now=NOW), {"why": WHY}),
    "why in a lane": Asked(ops.why(id_of(FIRST_LANED + 40_000), now=NOW), {"why": WHY}),
    "why in an order": Asked(ops.why(id_of(FIRST_LANED + 40_001), now=NOW), {"why": WHY}),
    "why of one that has ended": Asked(ops.why(id_of(FIRST_DONE + 5), now=NOW), {"why": WHY}),
    "list of a prefix": Asked(ops.listing(prefix=id_of(7)[:35], now=NOW), {"list": LISTED}),
    "get": Asked(ops.get(id_of(7), now=NOW), {"list": LISTED}),
    "list": Asked(ops.listing(now=NOW), {"list": LISTED}),
    "list of the running": Asked(ops.listing(state=State.RUNNING, now=NOW), {"list": LISTED}),
    "list of the dead": Asked(
        ops.listing(state=State.DEAD, now=NOW), {"list": LISTED}
    ),
    "dead_list": Asked(ops.dead_list(now=NOW), {"dead_list": DONE_BY_ID | {"duly_done_dead", "duly_done_partial"}}),
    "dead_list with partial": Asked(
        ops.dead_list(partial=True, now=NOW), {"dead_list": DONE_BY_ID | {"duly_done_dead", "duly_done_partial"}}
    ),
    "dead_metrics": Asked(ops.dead_metrics(now=NOW), {"dead_metrics": {"duly_done_dead"}}),
    "prune results": Asked(ops.prune("results", now=NOW), {"prune_results": DONE_BY_ID | {"duly_done_prune"}}),
    "prune done": Asked(ops.prune("done", now=NOW), {"prune_done": DONE_BY_ID | {"duly_done_prune"}}),
    "prune keys": Asked(ops.prune("keys", now=NOW), {"prune_keys": KEY | {"duly_key_expires"}}),
    "prune batches": Asked(ops.prune("batches", now=NOW), {"prune_batches": {"duly_done_batch"}}),
    "enqueue": Asked(
        ops.enqueue(Terms("work"), KEYED, now=NOW).again,  # type: ignore[arg-type]
        {
            "reserve_keys": BY_ID,
            "enqueue_keyed": KEY,
            "undo_finished": EITHER_BY_ID | KEY,
            "key_holders": KEY,
        },
    ),
    "debounce": Asked(
        ops.enqueue(Terms("work", debounce_ms=5), KEYED[:1], parent=Held(id_of(1), 5), now=NOW).again,  # type: ignore[arg-type]
        dict.fromkeys(("lock_debounced", "hold_parent", "take_key", "debounce", "undo_finished", "debounced"), BY_KEY),
    ),
    "replay": Asked(
        ops.replay([Replay(id_of(FIRST_DONE + 1000 * n), id_of(n)) for n in HUNDRED], now=NOW),
        {"replay": EITHER_BY_ID | KEY, "hand_out": BY_ID | BY_LANE},
    ),
    "purge": Asked(
        ops.purge([id_of(FIRST_DONE + 1000)], now=NOW), {"purge": DONE_BY_ID | {"duly_done_dead"}}
    ),
    "cancel of runs": Asked(
        ops.cancel([id_of(FIRST_RUN + 2 * n - 1) for n in HUNDRED], now=NOW), {"cancel": BY_ID, **TAIL}
    ),
    "next_fire": Asked(schedules.next_fire(now=NOW), {"next_fire": {"duly_schedule_due"}}),
    "due_schedules": Asked(
        schedules.due(limit=100, beside=[of_schedule(10)], now=NOW),
        {"due_schedules": BY_NAME | {"duly_schedule_due"} | RUNS_OF_ONE | FIRES_OF_ONE},
    ),
    "one schedule": Asked(
        schedules.one(of_schedule(7), now=NOW),
        {"due_schedules": BY_NAME | {"duly_schedule_due"} | RUNS_OF_ONE | FIRES_OF_ONE},
    ),
    "live_runs": Asked(schedules.live_runs([of_schedule(n) for n in HUNDRED]), {"live_runs": RUNS_OF_ONE}),
    "fire": Asked(
        FIRE.again,  # type: ignore[arg-type]
        {
            **dict.fromkeys(("fire_lock", "fire_events", "fire_advance"), BY_NAME),
            **dict.fromkeys(("fire_jobs", "fire_forget", "fire_rows"), BY_NAME | FIRES_OF_ONE),
            "hand_out": BY_ID | BY_LANE,
            "fired": FIRES_OF_ONE | BY_NAME,
        },
    ),
    "define": Asked(DEFINE.again, {"define_schedules": BY_NAME | BY_ID | RUNS_OF_ONE, "defined": BY_NAME}),  # type: ignore[arg-type]
    "readopt": Asked(schedules.readopt([of_schedule(n) for n in HUNDRED]), {"readopt_schedules": BY_NAME}),
    "pause of a schedule": Asked(
        schedules.pause(of_schedule(7), by="a", why="b", now=NOW), {"pause_schedule": BY_NAME}
    ),
    "delete of a schedule": Asked(
        schedules.delete(of_schedule(7), by="a", why="b", now=NOW).again,  # type: ignore[arg-type]
        {"delete_schedule": BY_NAME | BY_ID | RUNS_OF_ONE, "deleted_schedule": BY_NAME},
    ),
    "list of schedules": Asked(schedules.listing(limit=100, now=NOW), {"schedules": BY_NAME}),
    "list of schedules by name": Asked(
        schedules.listing(names=[of_schedule(n) for n in HUNDRED], limit=100, now=NOW), {"schedules": BY_NAME}
    ),
    "fires": Asked(schedules.fires(of_schedule(7)), {"fires": FIRES_OF_ONE}),
    "skipped_between": Asked(
        schedules.skipped_between(of_schedule(7), NOW - 10_000, NOW), {"skipped_between": FIRES_OF_ONE}
    ),
    "fired_between": Asked(
        schedules.fired_between(of_schedule(7), NOW - 10_000, NOW), {"fired_between": FIRES_OF_ONE}
    ),
    "add to a batch": Asked(ADD.again, {}),  # type: ignore[arg-type]
    "add keys to a batch": Asked(
        batches.add(OF_BATCH, KEYED, now=NOW).again,  # type: ignore[arg-type]
        {"enqueue_keyed": KEY, "key_holders": KEY},
    ),
    "fill a batch": Asked(batches.add(OF_BATCH, NEW, filling=5, now=NOW), {}),
    "fill a batch with keys": Asked(batches.add(OF_BATCH, KEYED, filling=5, now=NOW), {"enqueue_keyed": KEY}),
    "added_before": Asked(batches.added_before(OF_BATCH, KEYED), {}),
    "seal": Asked(batches.seal(id_of(3), now=NOW), {}),
    "cancel batch": Asked(batches.cancel(id_of(3), by="me", why="so", now=NOW), {}),
    "batch": Asked(batches.get(id_of(1)), {"batches": {"duly_job_running"}}),
    "list of batches": Asked(batches.listing(name="import", active=True), {"batches": {"duly_job_running"}}),
    "rest of a batch": Asked(batches.rest(id_of(1)), {"batch_rest": {"duly_job_batch"}}),
    "finish of a batch": Asked(
        ops.finish(
            [Finish(job(FIRST_BATCHED + n, batch_id=id_of(1)), Change(State.SUCCEEDED)) for n in HUNDRED], now=NOW
        ),
        {},
    ),
    "cancel of a batch": Asked(
        ops.cancel([id_of(FIRST_BATCHED + n) for n in HUNDRED], now=NOW), {"cancel": BY_ID, **TAIL}
    ),
    # They look at every schedule, and at every run that is queued, about once a minute.
    "abandon": Asked(
        schedules.abandon([of_schedule(n) for n in HUNDRED], now=NOW), {"abandon_schedules": BY_NAME | ALL_SCHEDULES}
    ),
    "unqueue": Asked(
        schedules.unqueue(now=NOW),
        dict.fromkeys(("unqueue_lock", "unqueue"), BY_ID | BY_NAME | ALL_SCHEDULES | RUNS_OF_ONE),
    ),
}  # fmt: skip


# PostgreSQL


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def plans(conn: psycopg.Connection[Any], section: str, op: Op[Any], *, generic: bool) -> Iterator[dict[str, Any]]:
    """The plan of each statement of a section, for the values at hand or for any."""
    if not generic:
        for text in spell("postgres", section, "pyformat"):
            yield conn.execute("explain (format json) " + text.sql, op.params).fetchone()[0][0]["Plan"]
        return
    conn.execute("set plan_cache_mode = force_generic_plan")
    for text in spell("postgres", section, "dollar"):
        conn.execute(f"prepare asked as {text.sql}")
        values = sql.SQL(", ").join(sql.Literal(op.params[name]) for name in text.parameters)
        call = sql.SQL("execute asked ({})").format(values) if text.parameters else sql.SQL("execute asked")
        yield conn.execute(sql.SQL("explain (format json) ") + call).fetchone()[0][0]["Plan"]
        conn.execute("deallocate asked")


def walked(plan: dict[str, Any]) -> set[str]:
    """The indexes a plan reads, and `all of <table>` for each big table that it reads whole."""
    found = {node["Index Name"] for node in nodes(plan) if "Index Name" in node}
    scans = [node for node in nodes(plan) if node["Node Type"].endswith("Seq Scan")]
    return found | {f"all of {node['Relation Name']}" for node in scans}


SMALL = (
    "duly_attempt",
    "duly_step",
    "duly_batch",
    "duly_queue",
    "duly_worker",
    "duly_event",
)


def of_big_tables(found: set[str]) -> set[str]:
    return {name for name in found if not name.removeprefix("all of ").startswith(SMALL)}


@pytest.fixture(params=["before analyze", "after analyze"])
def postgres_plans(request: pytest.FixtureRequest, full_postgres: psycopg.Connection[Any]) -> Any:
    analyzed = full_postgres.execute("select count(*) from pg_stats where schemaname = 'duly'").fetchone() != (0,)
    if request.param == "after analyze" and not analyzed:
        for table in BIG:
            full_postgres.execute(f"analyze duly.{table}")
    if request.param == "before analyze" and analyzed:
        full_postgres.execute("delete from pg_statistic where starelid::regclass::text like '%duly_%'")
        full_postgres.execute("update pg_class set reltuples = -1 where relname like 'duly_%'")
        full_postgres.execute("discard plans")
    return full_postgres


@pytest.mark.parametrize("generic", [False, True], ids=["these values", "any values"])
def test_postgres_walks_the_intended_indexes(postgres_plans: psycopg.Connection[Any], generic: bool) -> None:
    wrong = {}
    for name, asked in ASKED.items():
        for section in asked.op.sections:
            for plan in plans(postgres_plans, section, asked.op, generic=generic):
                beside = of_big_tables(walked(plan)) - asked.walks.get(section, BY_KEY)
                if beside:
                    wrong[name, section] = beside
    assert wrong == {}


@pytest.mark.parametrize("generic", [False, True], ids=["these values", "any values"])
def test_postgres_reads_ready_and_due_rows_without_a_sort(
    postgres_plans: psycopg.Connection[Any], generic: bool
) -> None:
    for name in ("claim", "claim of all tasks", "claim of suspects", "claim from marks on"):
        (plan,) = plans(postgres_plans, *ASKED[name].op.sections, ASKED[name].op, generic=generic)
        for walk, index in (("CTE ready", "duly_job_ready"), ("CTE due", "duly_job_scheduled")):
            (part,) = [node for node in nodes(plan) if node.get("Subplan Name") == walk]
            read = walked(part) & {"duly_job_ready", "duly_job_scheduled"}
            if not read and (name, walk) == ("claim of suspects", "CTE due"):
                continue  # none can be there, and the plan knows it
            assert read == {index}
            assert not [node for node in nodes(part) if "Sort" in node["Node Type"]], name
    (plan,) = plans(postgres_plans, "head", ASKED["head"].op, generic=generic)
    assert not [node for node in nodes(plan) if "Sort" in node["Node Type"]]
    (plan,) = plans(postgres_plans, "park", ASKED["park"].op, generic=generic)
    for walk in ("CTE ready", "CTE suspects", "CTE due"):
        (part,) = [node for node in nodes(plan) if node.get("Subplan Name") == walk]
        assert not [node for node in nodes(part) if "Sort" in node["Node Type"]], walk
    *due, _ = plans(postgres_plans, "promote", ASKED["promote"].op, generic=generic)
    for plan in due:
        assert not [node for node in nodes(plan) if "Sort" in node["Node Type"]]


@pytest.mark.parametrize("generic", [False, True], ids=["these values", "any values"])
def test_postgres_begins_a_claim_at_its_mark_without_a_filter(
    postgres_plans: psycopg.Connection[Any], generic: bool
) -> None:
    (plan,) = plans(postgres_plans, "claim_marked", ASKED["claim from marks on"].op, generic=generic)
    (walk,) = [node for node in nodes(plan) if node.get("Index Name") == "duly_job_ready"]
    assert "ROW(due_at, id) >=" in walk["Index Cond"]
    assert "priority <=" in walk["Index Cond"]
    assert "due_at" not in walk["Filter"]


# What these sections must walk, beside what they may.
WALKED = {
    "next_fire": ("next_fire", "duly_schedule_due"),
    "due_schedules": ("due_schedules", "duly_schedule_due"),
    "cancel of runs": ("ended_schedule", "duly_job_schedule"),
}


@pytest.mark.parametrize("generic", [False, True], ids=["these values", "any values"])
def test_postgres_finds_due_schedules_and_queued_runs_by_index(
    postgres_plans: psycopg.Connection[Any], generic: bool
) -> None:
    for name, (section, index) in WALKED.items():
        found = [walked(plan) for plan in plans(postgres_plans, section, ASKED[name].op, generic=generic)]
        assert index in found[-1], (name, found)


COMPILED_FROM = 100_000  # PostgreSQL's own jit_above_cost
WALKS_OVER_QUEUES = (
    "queues",
    "parked",
    "unqueue",
    "prunable",
    "claim of lanes",
    "laned tasks",
    "next permit",
    "claim with ageing",
    "claim with a budget",
)  # recursive: they are expected to cost more than they do


@pytest.mark.parametrize("generic", [False, True], ids=["these values", "any values"])
def test_postgres_estimates_stay_below_the_cost_of_jit(postgres_plans: psycopg.Connection[Any], generic: bool) -> None:
    """That takes a fifth of a second, once a connection and plan: longer than the work."""
    costly = {}
    for name, asked in ASKED.items():
        if name in WALKS_OVER_QUEUES:
            continue
        for section in asked.op.sections:
            for plan in plans(postgres_plans, section, asked.op, generic=generic):
                if plan["Total Cost"] >= COMPILED_FROM:
                    costly[name, section] = plan["Total Cost"]
    assert costly == {}


@pytest.mark.parametrize("name", WALKS_OVER_QUEUES)
def test_postgres_compiles_no_walk_over_queues(postgres_plans: psycopg.Connection[Any], name: str) -> None:
    op = ASKED[name].op
    with postgres_plans.transaction():
        for section in op.sections:
            for text in spell("postgres", section, "pyformat"):
                told = postgres_plans.execute("explain (analyze, format json) " + text.sql, op.params).fetchone()
                assert "JIT" not in told[0][0]
    assert postgres_plans.execute("show jit").fetchone() == ("on",)


def blocks(conn: psycopg.Connection[Any], op: Op[Any]) -> int:
    """Run an operation, undo it, and count the pages it touched."""
    touched = 0
    with conn.transaction(force_rollback=True):
        for section in op.sections:
            for text in spell("postgres", section, "pyformat"):
                told = conn.execute("explain (analyze, buffers, format json) " + text.sql, op.params).fetchone()
                plan = told[0][0]["Plan"]
                touched += plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    return touched


def test_postgres_reads_few_pages_however_many_are_ready(postgres_plans: psycopg.Connection[Any]) -> None:
    assert blocks(postgres_plans, ASKED["claim"].op) < 50 * 30
    for name, most in READS.items():
        assert blocks(postgres_plans, ASKED[name].op) < most, name


@pytest.mark.parametrize("number", [7, FIRST_LANED + 40_000, FIRST_LANED + 40_001])
def test_postgres_reads_the_view_of_a_job_by_index(postgres_plans: psycopg.Connection[Any], number: int) -> None:
    asked = f"select gate, detail from duly.duly_why where id = '{id_of(number)}'"
    with postgres_plans.transaction(force_rollback=True):
        postgres_plans.execute(f"update duly.duly_job set due_at = 1 where id = '{id_of(number)}'")
        told = postgres_plans.execute(f"explain (analyze, buffers, format json) {asked}").fetchone()
    plan = told[0][0]["Plan"]
    assert of_big_tables(walked(plan)) <= WHY
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 100


# What these may read: a few pages or steps for each row they name or return, whatever the tables hold.
READS = {
    "depth": 20_000,
    "promote without retries": 100,
    "claim of suspects": 100,
    "claim from marks on": 50 * 30,
    "head": 20,
    "claim of lanes": 40 * 200,
    "laned tasks": 3000,
    "next permit": 20,
    "enqueue in order": 100 * 60,
    "recall": 100,
    "extend": 100 * 20,
    "finish plain": 100 * 20,
    "settle": 100 * 30,
    "promote": 100,
    "park": 1000 * 5,
    "wake": 100,
    "next_due": 20,
    "expired_leases": 100,
    "expirable": 100,
    "retry": 100 * 60,
    "queues": 60_000,
    "parked": 25_000,
    "prunable": 400_000,
    "workers": 100,
    "why": 50,
    "why of one with many ahead": 25_000,
    "why in a lane": 100,
    "why in an order": 100,
    "why of one that has ended": 50,
    "list of a prefix": 300,
    "get": 100,
    "list": 3000,
    "list of the running": 1000,
    "list of the dead": 3000,
    "dead_list": 1000,
    "prune batches": 100,
    "cancel of runs": 100 * 150,
    "next_fire": 20,
    "due_schedules": 100 * 60,
    "one schedule": 100,
    "live_runs": 100 * 30,
    "fire": 100 * 150,
    "define": 100 * 50,
    "pause of a schedule": 50,
    "list of schedules": 1000,
    "list of schedules by name": 100 * 20,
    "fires": 500,
    "skipped_between": 500,
    "fired_between": 500,
    "add to a batch": 100 * 60,
    "fill a batch": 100 * 60,
    "added_before": 100 * 30,
    "seal": 50,
    "cancel batch": 50,
    "batch": 100,
    "list of batches": 1000,
    "rest of a batch": 2500,
    "finish of a batch": 100 * 60,
    "cancel of a batch": 100 * 150,
    "claim with ageing": 50 * 60,
    "claim with a budget": 50 * 60,
}


# SQLite


@pytest.fixture(params=["before analyze", "after analyze"])
def sqlite_plans(request: pytest.FixtureRequest, full_sqlite: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    if request.param == "before analyze":
        yield full_sqlite
        return
    full_sqlite.execute("pragma analysis_limit = 1000")
    full_sqlite.execute("analyze")
    yield full_sqlite
    full_sqlite.execute("drop table sqlite_stat1")
    full_sqlite.execute("analyze sqlite_schema")


def explained(conn: sqlite3.Connection, section: str, op: Op[Any]) -> list[list[str]]:
    """The plan of each statement of a section, with tables instead of the names they have in it."""
    told = []
    for text in spell("sqlite", section, "named"):
        tables = {name: table for table, name in re.findall(r"\b(duly_\w+) as (\w+)", text.sql)}
        lines = [row[3].split(" ") for row in conn.execute("explain query plan " + text.sql, op.params)]
        told.append([" ".join([verb, *(tables.get(word, word) for word in words)]) for verb, *words in lines])
    return told


def walked_by_sqlite(lines: list[str]) -> set[str]:
    found = set()
    for line in lines:
        words = line.split()
        table = words[1] if len(words) > 1 else ""
        if words[0] not in ("SCAN", "SEARCH") or table not in BIG:
            continue
        named = words[words.index("INDEX") + 1] if "INDEX" in words else None
        if line.endswith("(token=? AND id=?)"):  # looks up one row, as the id alone would
            named = None
        if words[0] == "SCAN" and named != "duly_done_dead":
            found.add(f"all of {table}")
        else:
            found.add(f"{table}_pkey" if named in (None, f"sqlite_autoindex_{table}_1") else named)
    return found


def test_sqlite_walks_the_intended_indexes(sqlite_plans: sqlite3.Connection) -> None:
    wrong = {}
    for name, asked in ASKED.items():
        for section in asked.op.sections:
            for lines in explained(sqlite_plans, section, asked.op):
                beside = walked_by_sqlite(lines) - asked.walks.get(section, BY_KEY)
                if beside:
                    wrong[name, section] = beside
    assert wrong == {}


def test_sqlite_finds_due_schedules_and_queued_runs_by_index(sqlite_plans: sqlite3.Connection) -> None:
    for name, (section, index) in WALKED.items():
        found = [walked_by_sqlite(lines) for lines in explained(sqlite_plans, section, ASKED[name].op)]
        assert index in found[-1], (name, found)


def test_sqlite_reads_ready_and_due_rows_without_a_sort(sqlite_plans: sqlite3.Connection) -> None:
    for name in ("claim", "claim of all tasks", "claim of suspects"):
        take, _ = explained(sqlite_plans, "claim", ASKED[name].op)
        assert not [line for line in take if "TEMP B-TREE" in line], name
        assert {"duly_job_ready", "duly_job_scheduled"} <= walked_by_sqlite(take)
    for name in ("promote", "park"):
        for lines in explained(sqlite_plans, name, ASKED[name].op):
            assert not [line for line in lines if "TEMP B-TREE" in line]


def steps(conn: sqlite3.Connection, op: Op[Any]) -> int:
    """Run an operation, undo it, and count the steps of SQLite's machine, in tens."""
    ticks = itertools.count()
    conn.execute("begin immediate")
    conn.set_progress_handler(lambda: next(ticks) < 0, 10)
    try:
        for section in op.sections:
            for text in spell("sqlite", section, "named"):
                conn.execute(text.sql, op.params).fetchall()
    finally:
        conn.set_progress_handler(None, 0)
        conn.execute("rollback")
    return next(ticks) * 10


def test_sqlite_takes_few_steps_however_many_are_ready(sqlite_plans: sqlite3.Connection) -> None:
    assert steps(sqlite_plans, ASKED["claim"].op) < 50 * 400
    for name, most in STEPS.items():
        assert steps(sqlite_plans, ASKED[name].op) < most, name


@pytest.mark.parametrize("number", [7, FIRST_LANED + 40_000, FIRST_LANED + 40_001])
def test_sqlite_reads_the_view_of_a_job_by_index(sqlite_plans: sqlite3.Connection, number: int) -> None:
    ticks = itertools.count()
    sqlite_plans.execute("begin immediate")
    sqlite_plans.execute("update duly_job set due_at = 1 where id = ?", [id_of(number)])
    sqlite_plans.set_progress_handler(lambda: next(ticks) < 0, 10)
    try:
        asked = sqlite_plans.execute("select gate, detail from duly_why where id = ?", [id_of(number)])
        assert len(asked.fetchall()) == 1
    finally:
        sqlite_plans.set_progress_handler(None, 0)
        sqlite_plans.execute("rollback")
    assert next(ticks) * 10 < 5000


STEPS = {
    "claim with ageing": 50 * 800,
    "claim with a budget": 50 * 800,
    "depth": 500_000,
    "promote without retries": 1000,
    "claim of suspects": 2000,
    "head": 200,
    "recall": 1000,
    "extend": 100 * 100,
    "finish plain": 100 * 200,
    "finish plain, nothing kept": 100 * 200,
    "finish": 100 * 500,
    "settle": 100 * 200,
    "promote": 500,
    "park": 1000 * 50,
    "wake": 1000,
    "next_due": 200,
    "expired_leases": 500,
    "expirable": 500,
    "retry": 100 * 300,
    "queues": 10_000 * 100,
    "parked": 10_000 * 30,
    "prunable": 10_000 * 130,
    "workers": 3000,
    "why": 10_000,
    "why of one with many ahead": 10_000 * 30,
    "why in a lane": 10_000,
    "why in an order": 10_000,
    "why of one that has ended": 10_000,
    "list of a prefix": 5000,
    "get": 1000,
    "list": 100 * 200,
    "list of the running": 100 * 200,
    "list of the dead": 100 * 200,
    "dead_list": 100 * 200,
    "dead_list with partial": 100 * 300,
    "prune batches": 500,
    "enqueue": 100 * 500,
    "cancel of runs": 100 * 1500,
    "next_fire": 100,
    "due_schedules": 100 * 200,
    "one schedule": 500,
    "live_runs": 100 * 100,
    "fire": 100 * 1000,
    "define": 100 * 600,
    "pause of a schedule": 500,
    "list of schedules": 100 * 100,
    "list of schedules by name": 100 * 200,
    "fires": 100 * 100,
    "skipped_between": 100 * 100,
    "fired_between": 1000,
    "add to a batch": 100 * 800,
    "fill a batch": 100 * 600,
    "added_before": 100 * 200,
    "seal": 1000,
    "cancel batch": 1000,
    "batch": 500,
    "list of batches": 100 * 300,
    "rest of a batch": 1000 * 30,
    "finish of a batch": 100 * 400,
    "cancel of a batch": 100 * 1500,
}
