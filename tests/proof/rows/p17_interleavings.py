"""P17: every race of two to four sessions on PostgreSQL, statement by statement, with the planner forced four ways."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, closing
from importlib import import_module
from typing import Any

from duly.store.op import Op
from duly.store.postgres.schema import bring_up_to_date
from tests.contract.stores import PostgresStore
from tests.proof import breaks
from tests.proof.interleaving import CALM, PLANS, Board, Orders, Outcome, Script, Sessions
from tests.proof.rows.p17_interleavings_race import RACES, Judge
from tests.proof.table import Figure, Row, Setting
from tests.servers.postgres import PostgresServer

for _races in ("jobs", "keys", "batches", "schedules", "lanes"):
    import_module(f"{__name__}_{_races}")

ORDERS_SHORT, ORDERS_FULL = 4, 300  # of each race with each plan
TURNS_BROKEN = 40  # at most: without `end_revision` one order in about 170 breaks a promise
TIDY_EVERY = 500
TOO_LATE = 'violates unique constraint "duly_job_pkey"'


def run(setting: Setting) -> Figure:
    """Run orders of every race, and count the promises that they break."""
    with PostgresServer(settings=CALM) as server:
        url = server.new_database()
        bring_up_to_date(url)
        return asyncio.run(_run(setting, url))


async def _run(setting: Setting, url: str) -> Figure:
    numbers: dict[str, Any] = {}
    faults: list[str] = []
    unconcerned: set[str] = set()  # races that never run the broken section
    async with AsyncExitStack() as stack:
        store, board = stack.enter_context(closing(PostgresStore(url))), stack.enter_context(closing(Board(url)))
        sessions = {plan: await stack.enter_async_context(Sessions(url, plan)) for plan in PLANS}
        for name, turn in _turns(setting):
            if name in unconcerned:
                continue
            board.clear()
            scripts, judge = RACES[name].prepare(store)
            if setting.broken and not _concerns(setting.broken, scripts):
                unconcerned.add(name)
                continue
            board.save()
            numbers[name], found = await _race(setting, name, turn, (scripts, judge), sessions, board)
            faults += found
            if faults and setting.broken:
                break  # it is red, as it must be
    return _figure(setting, numbers, faults)


def _turns(setting: Setting) -> Iterator[tuple[str, int]]:
    """List the races once, or those that a missing defence may concern again and again, in other orders."""
    called = CALLED.get(setting.broken or "", "")
    names = [name for name in RACES if called in name]
    return ((name, turn) for turn in range(TURNS_BROKEN if setting.broken else 1) for name in names)


def _concerns(control: str, scripts: Sequence[Script]) -> bool:
    section = CONTROLS[control][0]
    return control in CALLED or (_runs(scripts, section) and _runs(scripts, BESIDE.get(control, section)))


def _runs(scripts: Sequence[Script], section: str) -> bool:
    known = [op for script in scripts for made in script for op in (made if isinstance(made, tuple) else (made,))]
    return any(isinstance(op, Op) and section in op.sections for op in known)


async def _race(
    setting: Setting,
    name: str,
    turn: int,
    of: tuple[Sequence[Script], Judge],
    sessions: dict[str, Sessions],
    board: Board,
) -> tuple[dict[str, Any], list[str]]:
    scripts, judge = of
    played, whole, deadlocks = 0, 0, 0
    faults: list[str] = []
    for plan, ring in sessions.items():
        orders = Orders(random.Random(f"{setting.seed} {turn} {name} {plan}"))
        for _ in range(ORDERS_SHORT if setting.broken else setting.pick(ORDERS_SHORT, ORDERS_FULL)):
            if orders.exhausted:
                break
            board.restore()
            outcome = await ring.play(scripts, orders)
            outcome.tables = board.look()
            played += 1
            deadlocks += sum(error.startswith("40P01") for error in outcome.errors)
            errors = [one for one in outcome.errors if not (RACES[name].may_be_late and TOO_LATE in one)]
            found = [*errors, *_unsound(outcome), *([] if errors else judge(outcome))]
            faults += [f"{name} ({plan}; order {''.join(map(str, outcome.order))}): {fault}" for fault in found]
            if played % TIDY_EVERY == 0:
                board.tidy()
        whole += orders.exhausted
    return {
        "orders": played,
        "all of them": whole == len(sessions),
        "deadlocks": deadlocks,
        "faults": len(faults),
    }, faults


def _figure(setting: Setting, numbers: dict[str, Any], faults: list[str]) -> Figure:
    orders = sum(one["orders"] for one in numbers.values())
    deadlocks = sum(one["deadlocks"] for one in numbers.values())
    whole = sum(one["all of them"] for one in numbers.values())
    text = (
        f"{orders} orders of {len(numbers)} races (all there are in {whole}), {len(PLANS)} plans: "
        f"{deadlocks} deadlocks, {len(faults)} not as expected"
    )
    if faults:
        text += f"; first: {faults[0]}"
    repeat = f"python -m tests.proof --only P17 --seed {setting.seed}{' --full' if setting.full else ''}"
    return Figure(text, not faults, numbers, repeat)


def _unsound(outcome: Outcome) -> Iterator[str]:
    """Find what no order may leave behind, whatever the race."""
    live = {row["id"]: row for row in outcome.rows("job")}
    holders = {(row["task"], row["key"]): row for row in outcome.rows("key")}
    for row in outcome.rows("done"):
        if row["id"] in live:
            yield f"{row['id']} is live and has ended"
    for row in live.values():
        if row["finished_at"] is not None:
            yield f"{row['id']} has ended and is still among the live jobs"
        if row["key"] is not None and holders.get((row["task"], row["key"]), {}).get("job_id") != row["id"]:
            yield f"{row['id']} is live and does not hold its key"
    for row in holders.values():
        if row["state"] == "live" and row["job_id"] not in live:
            yield f"the key {row['key']} is held by {row['job_id']}, which is not live"
    for batch in outcome.rows("batch"):
        yield from _uncounted(outcome, batch)


def _uncounted(outcome: Outcome, batch: dict[str, Any]) -> Iterator[str]:
    """Find counters of a batch that differ from its rows, and callbacks that are missing, doubled or not due."""
    there = Counter(row["id"] for table in ("job", "done") for row in outcome.rows(table))
    ended = [row for row in outcome.rows("done", batch_id=batch["id"]) if row["replayed_as"] is None]
    states = Counter(row["state"] for row in ended)
    counted = {name: batch[name] for name in ("succeeded", "partial", "dead", "cancelled")}
    live, full = len(outcome.rows("job", batch_id=batch["id"])), batch["sealed_at"] is not None
    complete = batch["completed_at"] is not None
    if batch["open"] != live or counted != {name: states[name] for name in counted}:
        yield f"a batch counts {batch['open']} open and {counted}, its rows are {live} and {dict(states)}"
    again = bool(outcome.rows("event", name="job.replayed"))  # then it may be open again, or better than it was
    if complete != (full and not live) and not (again and full):
        yield f"a batch, sealed: {full}, with {live} open, is complete: {complete}"
    expected = {
        "on_complete": {complete},
        "on_success": {complete and states["succeeded"] == len(ended), *([False] if again else [])},
        "on_first_dead": {batch["first_dead_at"] is not None},
    }
    for name, due in expected.items():
        if batch[name] is not None and there[json.loads(batch[name])["id"]] not in due:
            yield f"{name} was made {there[json.loads(batch[name])['id']]} times, due: {due}"


LOCKED = "order by id\n       for update"
SEEN = (
    "\n     cross join clock\n     where duly_job.id = any (array(select id from seen)) and duly_job.state = 'running'"
)
ENDED = "\n       and (duly_job.lease_until <= now or duly_job.lease_until > now + lease_ms + 2 * (lease_ms / 3))"

# Without each of these defences the row must be red: its name, the section, and the change of its text.
CONTROLS: dict[str, tuple[str, str, str]] = {
    "claim_lock": ("claim", "room from asked)\n       for update skip locked", "room from asked)"),
    "claim_again": ("claim", "or exists (select 1 from duly.duly_job where token = :token::bigint)", ""),
    "rescue_guard": ("rescue", "\n       and duly_job.lease_until = seen.lease_until" + SEEN + ENDED, SEEN),
    "key_guard": ("reserve_keys", " where duly_key.expires_at <= :now", ""),
    "lock_order": ("cancel", LOCKED, "order by id desc\n       for update"),
    "cancel_lock": ("cancel", LOCKED, "order by id"),
    "second_look": ("undo_finished", "where id = any (array(\n", "where false and id = any (array(\n"),
    "replay_lock": ("replay", "order by duly_done.id\n       for update of duly_done", "order by duly_done.id"),
    "hold_lock": ("hold", LOCKED, "order by id"),
    "fire_lock": ("fire_lock", "order by name\n       for update", "order by name"),
    "end_revision": ("ended_schedule", "overlap <> 'allow' then 1", "overlap <> 'allow' then 0"),
    "batch_order": ("ended_batch", "order by id for update", "order by id desc for update"),
    "add_lock": ("lock_batch", " for no key update\n", "\n"),
    "add_again": ("count_added", "where duly_done.id = input.id)", "where false)"),
    "fill_guard": ("enqueue_again", "or filled = :filling::bigint)", "or true)"),
    "take_guard": ("take_key", " duly_key.state = 'succeeded' and", ""),
    "next_guard": ("finish_keyed", "\n       and next is null", ""),
    "begun_guard": ("debounce", "duly_job.state <> 'running' and attempt = 0 and last_token is null and", ""),
    "lane_lock": ("wait_for_lanes", "where not ordered or", "where false and"),
    "lane_order": ("hand_out", "group by lane\n order by lane", "group by lane\n order by min(id::text)"),
    "lane_head": ("claim_lanes", "seq is not null order by seq", "seq is not null and state = 'ready' order by seq"),
    "lane_permit": ("claim_lanes", "select now, spent.n)", "select now, 0)"),
}  # fmt: skip
# What else must change before a defence is gone.
ALONG = {
    # The place of a row protects it, too: a claim that waited for another one finds the row in a new place.
    "claim_lock": (
        ("claim", "ready as materialized (\n    select ctid as", "ready as materialized (\n    select id as"),
        ("claim", "due as materialized (\n    select ctid as", "due as materialized (\n    select id as"),
        ("claim", "where ctid = any", "where id = any"),
    ),
    "fill_guard": (("count_filled", "and filled = :filling::bigint", ""),),
    "lane_lock": (("hold_lanes", "where (select name from duly.duly_lane where name = lane) is null", "where false"),
                  ("hold_lanes", "where name = any (array(\n", "where false and name = any (array(\n"),
                  ("claim_lanes", "join duly.duly_lane on duly_lane.name = walk_lane and held_by = :token::bigint",
                   "left join duly.duly_lane on duly_lane.name = walk_lane"),),
}  # fmt: skip
# More races run these sections than need the defence: try only those that run another section too, or have a name.
BESIDE = {"end_revision": "fire_jobs", "fill_guard": "count_filled"}
CALLED = {
    "batch_order": "two batches",
    "lane_lock": "against one of suspects",
    "lane_order": "two lanes in different orders",
    "lane_head": "in order against finish, retry",
    "lane_permit": "at a rate, 2",
}
for _name, _change in CONTROLS.items():
    breaks.sql(_name, _change, *ALONG.get(_name, ()), dialects=("postgres",))

ROW = Row(
    "P17",
    "interleavings of 2 to 4 PostgreSQL sessions, planner forced four ways",
    "all as expected, 0 deadlocks, no limit, cap or rate exceeded, one holder of each key, each finish recorded once",
    run,
    controls=tuple(CONTROLS),
    takes=1.0,
    control_takes=1.0,
)
