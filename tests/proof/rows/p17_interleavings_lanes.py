"""Races for lanes: caps, rates, and jobs that run in order."""

from __future__ import annotations

# fmt: off
import json
from typing import Any

from duly.model import State, TaskLimits
from duly.store import lanes, ops
from duly.store.lanes import Walk
from duly.store.op import Op
from tests.contract.stores import NOW
from tests.proof.enqueues import jobs_of

from tests.proof.rows.p17_interleavings_race import (  # isort: skip
    AGAIN, DEAD, FIRST, LATE, RETRY, SUCCESS, After, Promise, Scene, Step, cancel, cancel_or_claim, deferred, enqueue,
    finish, race, repeats, replay, rescue,
)

IN_ORDER = {"ordering_dead": "block"}
SKIPPING = {"ordering_dead": "skip"}
HOURS = 10 * 3_600_000


def limits(cap: int | None = None, rate: int | None = None) -> Step:
    """Limit each lane of the task: so many at once, so many in a minute."""
    return lambda scene: lanes.declare({"work": TaskLimits("work", cap, rate, rate and 60_000)})


def in_order(names: str, keys: str, **more: Any) -> Step:
    return enqueue(names, lanes=keys, **IN_ORDER, **more)


@deferred
def go_round(
    scene: Scene, limit: int, *, ordered: bool = False, after: str = "", token: int = 0, **more: Any
) -> Op[lanes.Taken]:
    """Claim from the lanes, beginning after one of them."""
    number = token or next(scene.tokens)
    usual = {"limit": limit, "lanes": 20, "token": number, "worker": f"w{number}", "wait": True, "now": NOW}
    return lanes.claim("default", [Walk("work", after, ordered)], **{**usual, **more})


@deferred
def takes(scene: Scene, name: str, *, ordered: bool) -> None:
    """Claim one job from the lanes, and remember it."""
    [scene.jobs[name]] = scene.store.run(go_round(1, ordered=ordered, token=1000)(scene)).jobs


def at_work(after: After, keys: str) -> list[str]:
    """Return the names of the jobs of these lanes that run."""
    rows = [row for key in keys for row in after.rows("job", lane=f"work:{key}")]
    return [after.name(row["id"]) for row in rows if row["token"] is not None]


def at_most(cap: int, keys: str) -> Promise:
    return lambda after: {f"at most {cap} of a lane run": all(len(at_work(after, key)) <= cap for key in keys)}


def taken(count: int, keys: str) -> Promise:
    """Promise that two claims take so many jobs of these lanes, of which one may run at a time."""
    return lambda after: {
        **at_most(1, keys)(after),
        f"{count} are taken, one for each place": len(after.got(0, 1)) == count,
    }


PASSING = {"wait": False}
for _name, _limit, _claimers in (
    ("2 sessions", 3, [{}, {}]), ("3 sessions", 2, [{}, {}, {}]), ("2 sessions that pass by", 3, [PASSING, PASSING]),
    ("3 sessions, 2 of which pass by", 2, [{}, PASSING, PASSING]),
):
    race(f"lane claim under a cap, {_name}", [limits(cap=3), enqueue(lanes="aaaaa")],
         [go_round(_limit, **more) for more in _claimers], at_most(3, "a"), lambda after: {
        "the claims answer what runs": sorted(after.got(*after.sessions)) == sorted(at_work(after, "a")),
        "three are taken, unless a claim passed by":
            len(after.got(*after.sessions)) == 3 or any(after.answer(n).passed_by for n in after.sessions),
    })
race("lane claim that waits against one that passes by, and a lane that is not made yet",
     [limits(cap=1), enqueue(lanes="aabb"), lambda scene: scene.store.query(
         "insert into duly_lane (name, task, used_at) values ('work:b', 'work', ?)", NOW)],
     [go_round(2), go_round(2, wait=False)], at_most(1, "ab"), lambda after: {
    "one of each lane is taken, unless the claim passed by": len(after.got(0, 1)) == 2 or after.answer(1).passed_by,
})
race("lane claim under a cap against one of suspects",
     [limits(cap=1), enqueue("ab", lanes="aa"), lambda scene: scene.store.query(
         "update duly_job set suspect = true where id = ?", scene.ids["a"])],
     [go_round(1), go_round(1, alone=True)], taken(1, "a"))
race("lane claim of two lanes from different ends", [limits(cap=1), enqueue(lanes="aabb")],
     [go_round(2), go_round(2, after="work:a")], taken(2, "ab"))
# While the repetition looks, the first try takes nothing: no answer would name it.
race("lane claim against its repetition", [limits(cap=2), enqueue("abc", lanes="aaa"), repeats(go_round(2))],
     [FIRST, AGAIN], lambda after: {
    "the token holds as many as it may, or none": len({*after.jobs(token=1001)}) in (0, 2),
    "the repetition answers what the token holds, or nothing": {*after.got(1)} in ({*after.jobs(token=1001)}, set()),
})
for _name, _terms, _end, _frees in (
    ("lane claim against finish, success", {}, finish("a", SUCCESS), True),
    ("lane claim against finish, retry", {}, finish("a", RETRY), True),
    ("lane claim against rescue", {}, rescue("a"), True),
    ("claim in order against finish, success", IN_ORDER, finish("a", SUCCESS), True),
    ("claim in order against finish, dead, which is skipped", SKIPPING, finish("a", DEAD), True),
    ("claim in order against finish, dead, which blocks", IN_ORDER, finish("a", DEAD), False),
    ("claim in order against finish, retry", IN_ORDER, finish("a", RETRY), False),
    ("claim in order against rescue", IN_ORDER, rescue("a"), False),
):
    race(_name, [limits(cap=None if _terms else 1), enqueue("ab", lanes="aa", **_terms),
                 takes("a", ordered=bool(_terms))],
         [go_round(1, ordered=bool(_terms), now=LATE), _end], at_most(1, "a"), lambda after, frees=_frees: {
        "only the next job is taken, from a free place":
            not after.got(0) or (after.got(0) == ["b"] and frees and bool(after.answer(1))),
        "a free place is taken": not (after.before(1, 0) and frees and after.answer(1)) or after.got(0),
    })
race("lane claim against cancel", [limits(cap=2), enqueue("abc", lanes="aaa")],
     [go_round(2), cancel("ba")], at_most(2, "a"), cancel_or_claim("ab"))
race("lane claim against cancel of the first in order", [limits(), in_order("ab", "aa")],
     [go_round(2, ordered=True), cancel("a")], at_most(1, "a"), lambda after: {
    "the job behind is taken only if the first was cancelled":
        {*after.got(0)} <= {"b" if after.answer_for(1, "a") is State.CANCELLED else "a"},
    "the cancel answers what became of the first": after.answer_for(1, "a") is not None,
})
race("lane claim against promote", [limits(cap=2), enqueue(lanes="aaa", delay_ms=1000)],
     [go_round(3, now=LATE), lambda scene: ops.promote("default", 2, now=LATE)], at_most(2, "a"), lambda after: {
    "the claim answers what runs": sorted(after.got(0)) == sorted(at_work(after, "a")),
})

# Jobs that run in order

# A claim passes by a lane that is locked: the other claim takes its first job.
race("claim in order, 2 sessions", [limits(), in_order("abcd", "abab")],
     [go_round(2, ordered=True), go_round(2, ordered=True, after="work:a")], taken(2, "ab"), lambda after: {
    "only the first job of a lane is taken": {*after.got(0, 1)} <= {"a", "b"},
})


@deferred
def in_their_places(after: After, *sessions: int) -> dict[str, Any]:
    """Promise that what these sessions enqueue has places of its own, after all that was committed before it."""
    order = sorted(sessions, key=lambda number: after.ended[number] or 0)
    came = [job["id"] for number in order for job in jobs_of(after.scripts[number][0])]
    found = []
    for lane in {row["lane"] for row in after.rows("job")}:
        placed = sorted(after.rows("job", lane=lane), key=lambda row: row["seq"] or 0)
        there, places = [row["id"] for row in placed], [row["seq"] for row in placed]
        [kept] = after.rows("lane", name=lane)
        found.append({
            "each comes after what was committed before":
                [job for job in there if job in came] == [job for job in came if job in there],
            "each has a place of its own": len({*places}) == len(places) and None not in places,
            "the lane knows its last place": kept["last_seq"] >= max(place or 0 for place in places),
        })
    return {sentence: all(one[sentence] for one in found) for one in found for sentence in one}


for _name, _before, _chunks in (
    ("enqueue in order against enqueue in order", "", ("aa", "a")),
    ("enqueue in order against enqueue in order, of a lane that is there", "a", ("aa", "a")),
    ("enqueue in order, two lanes in different orders", "", ("ba", "ab")),
    ("enqueue in order, two lanes in different orders, 3 sessions", "ab", ("ba", "ab", "bb")),
):
    race(_name, [limits(), in_order("", _before)],
         [in_order("", keys) for keys in _chunks], in_their_places(*range(len(_chunks))))
race("enqueue in order against its repetition", [repeats(in_order("", "aa"))],
     [FIRST, AGAIN], in_their_places(0), may_be_late=True)
race("claim in order against enqueue in order", [limits(), in_order("a", "a")],
     [in_order("", "ba"), in_order("", "ab"), go_round(2, ordered=True)],
     at_most(1, "ab"), in_their_places(0, 1), lambda after: {
    "only the first job of a lane is taken": {*after.got(2)} <= {
        "a", after.name(min(after.rows("job", lane="work:b"), key=lambda row: row["seq"])["id"])},
    "both are taken if they were there": not (after.before(0, 2) and after.before(1, 2)) or len(after.got(2)) == 2,
})
race("claim in order against replay of what blocks",
     [limits(), in_order("ab", "aa"), takes("a", ordered=True), finish("a", DEAD, now=NOW)],
     [go_round(1, ordered=True), replay("a", new="c")], at_most(1, "a"), lambda after: {
    "only the replayed job is taken": {*after.got(0)} <= {"c"},
    "the replayed job is taken if it was there": not after.before(1, 0) or after.got(0) == ["c"],
})

# Lanes that are pruned, and rates


def prune(scene: Scene) -> Op[Any]:
    return ops.prune("lanes", now=NOW + HOURS)


race("lane claim against prune of lanes", [limits(cap=2, rate=3), enqueue(lanes="aaa"), go_round(1, token=1000)],
     [go_round(2, now=NOW + HOURS), go_round(2, now=NOW + HOURS), prune], at_most(2, "a"), lambda after: {
    "two run, one for each place": len(at_work(after, "a")) == 2,
})
race("enqueue in order against prune of lanes", [limits(), in_order("a", "a"), cancel("a")],
     [in_order("", "a", now=NOW + HOURS), in_order("", "aa", now=NOW + HOURS), prune], in_their_places(0, 1))


def at_the_rate(after: After) -> dict[str, Any]:
    begun = sorted(row["lease_until"] - row["lease_ms"] for row in after.rows("job") if row["token"])
    [lane] = after.rows("lane")
    kept = sorted(at for at, count in json.loads(lane["permits"]) for _ in range(count))
    return {"two begin at a rate of two": len(begun) == 2, "the lane knows when they began": kept == begun}


for _name, _claimers, _now in (("a rate, 2 sessions", 2, NOW), ("a rate, 4 sessions", 4, NOW),
                               ("a rate by the clock, 3 sessions", 3, None)):
    race(f"lane claim at {_name}", [limits(rate=2), enqueue(lanes="aaaaa")],
         [go_round(1, now=_now)] * _claimers, at_the_rate)
