"""Bugs planted into the product, each of which the simulation must find: a judge that finds nothing proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import msgspec

from duly.model import Enqueued, NewJob, Verdict
from duly.rules import firing
from duly.rules.firing import Due, Firing, Run
from duly.rules.timing import Mode, next_after
from duly.store import batches, lanes, schedules
from duly.store.op import TAIL, Finish, Op, ending
from duly.worker.prefetch import LATE_SECONDS
from duly.worker.turns import Turns
from duly.worker.upkeep import rescue
from tests.proof import breaks
from tests.proof.breaks import BREAKS, TOUCHED
from tests.proof.world import FOR_A_PARENT

CLAMP = " or lease_until > :now + lease_ms + 2 * (lease_ms / 3)"
HELD = "where token = cast(held.key as integer) and state = 'running'"
NO_FENCE = "where state = 'running'"
SCHEDULED = "where state = 'scheduled' and lane is null and queue = :queue"
ENDED_BADLY = "where state in ('dead', 'cancelled')"
TAKEN_BACK = "delete from duly_job\n where "
FREE = "where duly_key.expires_at <= :now"
UNTIL = "and (expires_at is null or expires_at > :now or attempt > 0)"
PARENT = "where (:parent_token is null"


# Imported by name: the package has functions that are called like its modules.
ENQUEUE, FINISH = import_module("duly.store.ops.enqueue"), import_module("duly.store.ops.finish")
ENDING = ("finish", "upkeep", "people")  # the modules whose operations end with TAIL


def plant(name: str, *changes: tuple[str, str, str]) -> None:
    """Plant a bug into the SQL that the simulation runs."""
    breaks.sql(f"sim:{name}", *changes, dialects=("sqlite",))


def forget(section: str) -> None:
    """Plant an ending that forgets a part of its tail."""
    rest = tuple(one for one in TAIL if one != section)
    parts = {f"forgets_{section}_in_{name}": import_module(f"duly.store.ops.{name}") for name in ENDING}
    for part, module in parts.items():
        breaks.python(f"sim:{part}", module, "TAIL", rest, touches=section)
    both(f"forgets_{section}", *parts)


def both(name: str, *others: str) -> None:
    """Plant a bug that takes more than one change; they stand for nothing by themselves."""
    changes = [BREAKS.pop(f"sim:{other}") for other in others]
    TOUCHED[f"sim:{name}"] = frozenset[str]().union(*(TOUCHED.pop(f"sim:{other}") for other in others))

    def apply() -> Callable[[], None]:
        undo = [change() for change in changes]
        return lambda: [one() for one in reversed(undo)].clear()

    BREAKS[f"sim:{name}"] = apply


# Leases

plant(
    "no_fence",
    ("finish", "token = held_token and duly_job.state = 'running'", "duly_job.state = 'running'"),
    ("finish_plain", f"{HELD} and keep_ms > 0", NO_FENCE),
    ("finish_plain", f"{HELD}\n          and", f"{NO_FENCE}\n          and"),
)
plant(
    "rescue_unguarded",
    ("rescue", "and token = seen_token and lease_until = seen_until", ""),
    ("rescue", f"and (lease_until <= :now{CLAMP})", ""),
)
plant("no_clamp", ("expired_leases", CLAMP, ""), ("rescue", CLAMP, ""))
plant(
    "clamp_without_margin",
    ("expired_leases", CLAMP, " or lease_until > :now + lease_ms"),
    ("rescue", CLAMP, " or lease_until > :now + lease_ms"),
)
breaks.python("sim:rescue_on_first_sight", rescue, "_patience", lambda one: 0.0)
plant("suspects_among_others", ("claim", "and suspect = :alone", "and (suspect = :alone or not :alone)"))
plant("parent_not_held", ("enqueue", PARENT, "where (true"))
TOUCHED["sim:parent_not_held"] = frozenset([FOR_A_PARENT])  # nobody else has one

# Attempts

plant("attempt_not_counted", ("claim", "attempt = attempt + 1", "attempt = max(attempt, 1)"))
# Counted when it ends: who is killed has not tried.
plant("attempt_counted_after", ("rescue", "suspect = 1, token", "suspect = 1, attempt = attempt - 1, token"))
plant("snooze_burns", ("finish", "attempt = attempt - give_back", "attempt = attempt"))

# Times

plant("claimed_early", ("claim", "and not :alone and due_at <= :now", "and not :alone"))
plant("promoted_early", ("promote", f"{SCHEDULED} and due_at <= :now", SCHEDULED))


def _pause(self: Any) -> float:
    """Wait as a worker did that looked at a due time which nobody had read again."""
    now: float = self._shared.clock()
    until: list[float] = [now + self._shared.app.settings.poll_ms / 1000]
    if self._wakeups.next_due is not None:
        until.append(self._wakeups.next_due)
    if (oldest := self._slots.oldest) is not None:
        until.append(oldest.claimed_at + LATE_SECONDS)
    return max(0.0, min(until) - now)


breaks.python("sim:spins_without_a_slot", Turns, "_pause", _pause)

# Keys, repetitions and people

plant("key_taken_twice", ("reserve_keys", FREE, "where true"))


def _check_then_run(accepted: Any, jobs: Sequence[NewJob], now: int | None) -> Op[list[Enqueued]]:
    """Look whether the key is free, and take it a moment later."""
    run = _enqueue_keyed(accepted, jobs, now)
    if accepted.terms.batch_id is not None:  # which is counted with the job, in one operation
        return run
    params: Mapping[str, Any] = run.params
    look = Op("enqueue", ("key_holders",), params, run.read, writes=False)
    return replace(look, follow=lambda answer: run if answer[0].id == jobs[0].id else None)


_enqueue_keyed = ENQUEUE._enqueue_keyed
plant("key_not_guarded", ("reserve_keys", FREE, "where true"))
breaks.python("sim:key_only_looked_at", ENQUEUE, "_enqueue_keyed", _check_then_run, touches="reserve_keys")
both("check_then_run_key", "key_not_guarded", "key_only_looked_at")

plant("key_forgotten", ("ended_key", ENDED_BADLY, "where state in ('dead', 'cancelled', 'succeeded')"))
plant(
    "cancel_frees_key_of_a_late_success",
    ("ended_key", ENDED_BADLY, "where (state in ('dead', 'cancelled') or cancel_requested_at is not null)"),
)
plant("enqueued_again", ("undo_finished", f"{TAKEN_BACK}id in", f"{TAKEN_BACK}false and id in"))
plant("pause_ignored", ("claim", "and paused_at is not null\n   and", "and false and"))
for part in ("ended_key", "ended_batch", "ended_callbacks"):
    forget(part)

# Schedules

REVISION = "and revision = {}.value ->> 'revision'"
plant(
    "fire_without_guard",
    ("fire_jobs", REVISION.format("run"), ""),
    ("fire_jobs", "where not exists (", "where true or not exists ("),
    ("fire_rows", REVISION.format("row"), ""),
    ("fire_advance", REVISION.format("fire"), ""),
)


def _advance_first(firings: Sequence[Firing], *, now: int | None = None) -> Op[list[str]]:
    """Move on to the next due time, and a moment later fire what was due."""
    whole = _fire(firings, now=now)
    read = [msgspec.structs.replace(firing, revision=firing.revision + 1) for firing in firings]
    rest = _fire(read, now=now)
    insert = replace(rest, sections=("fire_jobs", "fire_forget", "fire_rows", "fire_events"), repeat=None)
    first = replace(whole, sections=("fire_advance",), repeat=None)
    return replace(first, follow=lambda names: replace(insert, read=lambda rows: names) if names else None)


_fire = schedules.fire
breaks.python("sim:advance_before_insert", schedules, "fire", _advance_first, touches="fire_advance")


def _from_the_start(due: Due, next_at: int | None, runs: Sequence[Run]) -> int | None:
    """Count from the beginning of a run."""
    return next_after(due.timing, due.now) if due.timing.mode is Mode.DELAY else next_at


def _from_now(due: Due, next_at: int | None, runs: Sequence[Run]) -> int | None:
    """Count from the moment at which somebody came to fire."""
    return _next(due, next_at if due.timing.interval_ms is None else due.now + due.timing.interval_ms, runs)


_next = firing._next
breaks.python("sim:delay_from_the_start", firing, "_next", _from_the_start, touches="fire_advance")
breaks.python("sim:rate_drifts", firing, "_next", _from_now, touches="fire_advance")
breaks.python("sim:overlap_allowed", firing, "_without_overlap", lambda due, dues: (dues, []), touches="fire_advance")
plant(
    "queued_run_not_woken", ("ended_schedule", "reason = null\n where id in", "reason = null\n where false and id in")
)
plant("misses_not_recorded", ("fire_rows", "where true", "where row.value ->> 'outcome' = 'fired'"))
forget("ended_schedule")

# Batches

plant(
    "added_again_counted_again",
    ("count_added", "where not exists (select 1 from duly_job where duly_job.id = value ->> 'id')", "where true"),
    ("count_added", "and not exists (select 1 from duly_done where duly_done.id = value ->> 'id')", ""),
)
# One world in a thousand shows it: a scenario of its own does.
breaks.sql(
    "counted_without_its_parent", ("count_added", "and (:parent_token is null", "and (true"), dialects=("sqlite",)
)
plant(
    "filled_in_again",
    ("enqueue_again", "(:filling < 0 or filled = :filling)", "true"),
    ("count_filled", "and filled = :filling", ""),
)
plant("added_when_sealed", ("enqueue", "and sealed_at is null and (:filling", "and (:filling"))
plant("replay_not_reopened", ("replay", "set open = open + n, succeeded", "set succeeded"))


def _seal_only(batch_id: str, *, now: int | None = None) -> Op[bool]:
    """Say that nothing more is added, and leave what is due with that to the ending that comes next."""
    return replace(_seal(batch_id, now=now), sections=("seal_batch", "sealed"))


_seal = batches.seal
breaks.python("sim:seal_fires_nothing", batches, "seal", _seal_only, touches="seal_batch")


def _callbacks_later(short: Any, rest: Any, finishes: Sequence[Finish], now: int | None) -> Op[dict[str, Verdict]]:
    """Record what has ended, and a moment later look whether nothing is left of its batch."""
    whole = _finish(short, rest, finishes, now)
    own = {finish.job.batch_id for finish in finishes if finish.job.batch_id is not None}
    if rest or not own:
        return whole
    first = replace(whole, sections=tuple(one for one in whole.sections if one != "ended_callbacks"))
    params = {**ending([], batches=own), "now": now}

    def later(answer: dict[str, Verdict]) -> Op[dict[str, Verdict]]:
        return Op("finish", ("ended_callbacks",), params, lambda rows: answer, follow=whole.follow)

    return replace(first, follow=later)


_finish = FINISH._finish
NOBODY = "not exists (select 1 from duly_job where batch_id = duly_batch.id and finished_at is null)"
plant(
    "nobody_left",
    ("ended_callbacks", "when 1 then open = 0", f"when 1 then {NOBODY}"),
    ("ended_callbacks", "when 2 then open = 0", f"when 2 then {NOBODY}"),
)
breaks.python("sim:callbacks_later", FINISH, "_finish", _callbacks_later, touches="open_batch")
both("callback_from_rows", "nobody_left", "callbacks_later")

# Lanes

RUNNING = "where lane = walk_lane and token is not null) as running"
LATER_HOUR = " where exists (select 1 from json_each(duly_lane.permits) where value ->> 0 > :now)"
# What has lost its worker is counted no more before it is rescued, and its handler may still be at work.
plant("cap_counts_leases", ("claim_lanes", RUNNING, RUNNING.replace("not null)", "not null and lease_until > :now)")))
# A crash takes its place with it, as it does where places are counted up and down.
plant(
    "cap_leaks_on_a_crash", ("claim_lanes", RUNNING, RUNNING.replace("token is not null", "(token or last_token < 0)"))
)


def _count_first(*args: Any, **more: Any) -> Op[lanes.Taken]:
    """Count what runs, and a moment later claim into the room that there was."""
    whole = _claim_lanes(*args, **more)
    *count, claim = whole.sections
    rest = replace(whole, sections=("uncompiled", claim))
    nothing = lanes.Taken([], {})
    return replace(whole, sections=tuple(count), read=lambda rows: nothing, repeat=None, follow=lambda answer: rest)


_claim_lanes = lanes.claim
COUNTED = "(select count(*) from duly_job where lane = walk_lane and token is not null)"
plant(
    "counted_beforehand",
    ("hold_lanes", "where coalesce(set_rate_count, rate_count) > 0", "where true"),
    ("hold_lanes", "select walk_lane, walk_task, :token, :now", f"select walk_lane, walk_task, {COUNTED}, :now"),
    ("hold_lanes", "set permits =", "set held_by = excluded.held_by, permits ="),
    ("hold_lanes", LATER_HOUR, ""),
    (
        "claim_lanes",
        f"{COUNTED} as running",
        f"coalesce((select held_by from duly_lane where name = walk_lane), {COUNTED}) as running",
    ),
)
breaks.python("sim:claimed_a_moment_later", lanes, "claim", _count_first, touches="claim_lanes")
both("cap_counted_before_the_claim", "counted_beforehand", "claimed_a_moment_later")

plant(
    "retrying_head_overtaken",
    (
        "claim_lanes",
        "and seq is not null order by seq limit 1) as head",
        "and seq is not null and state = 'ready'\n             order by seq limit 1) as head",
    ),
)
plant("dead_head_ignored", ("claim_lanes", "and duly_done.ordering_dead = 'block'", "and false"))
plant(
    "place_handed_out_twice", ("hand_out", "set last_seq = last_seq + excluded.last_seq,", "set last_seq = last_seq,")
)
plant(
    "asked_again_goes_to_the_end",
    ("hand_out", "where seq is null and ordering_dead is not null\n group", "where ordering_dead is not null\n group"),
    ("hand_out", "where seq is null and ordering_dead is not null) as", "where ordering_dead is not null) as"),
)
plant("permit_not_written", ("claim_lanes", "union all\n                   select :now, taken.n", ""))
plant(
    "permit_taken_for_a_look",
    (
        "hold_lanes",
        "value ->> 1)) from json_each(duly_lane.permits))\n" + LATER_HOUR,
        "value ->> 1))\n from (select value from json_each(duly_lane.permits) union all select json_array(:now, 1)))",
    ),
)
plant("permits_of_a_later_hour", ("hold_lanes", LATER_HOUR, " where false"))

PLANTED = sorted(name for name in BREAKS if name.startswith("sim:"))
