"""Races of claims, leases, endings, and what operators do to jobs."""

from __future__ import annotations

# fmt: off
from typing import Any

from duly.model import Verdict
from duly.store import ops
from duly.store.op import Op
from tests.contract.stores import NOW

from tests.proof.rows.p17_interleavings_race import (  # isort: skip
    AGAIN, DEAD, FIRST, KEY, LATE, LEASE, RETRY, SUCCESS, Scene, cancel, cancel_or_claim, claim, claimed_once, dead,
    enqueue, extend, finish, held, hold, race, recorded, repeats, replay, requested, rescue, retry, then,
)

# Claim

race("claim, 2 sessions", [enqueue("abc")], [claim(2)] * 2, claimed_once(2, 2))
race("claim, 3 sessions", [enqueue("abcd")], [claim(2)] * 3, claimed_once(2, 3))
race("claim, 4 sessions", [enqueue("abcd")], [claim(1)] * 4, claimed_once(1, 4))
race("claim against its repetition", [enqueue("abc"), repeats(claim(2))], [FIRST, AGAIN], lambda after: {
    "the token holds as many jobs as its limit": after.count("job", token=1001) == 2,
    "the repetition answers what the token holds": {*after.got(1)} == {*after.jobs(token=1001)},
})
race("claim against cancel", [enqueue("ab")], [claim(2), cancel("ba")],
     cancel_or_claim("ab"), requested("ab"), lambda after: {
    "a running job is asked to cancel":
        all(after.live(name)["cancel_requested_at"] for name in "ab" if after.state(name) == "running"),
})
race("claim against promote", [enqueue("abc", delay_ms=1000)],
     [claim(2, now=LATE), lambda scene: ops.promote("default", 2, now=LATE)], claimed_once(2))
race("claim against expire", [enqueue("a", expires_ms=1000)],
     [claim(1), lambda scene: ops.expire(scene.all("a"), now=LATE)], lambda after: {
    "a job is claimed or expires": bool(after.got(0)) != ("a" in after.got(1)),
    "its state agrees": after.state("a") == ("running" if after.got(0) else "cancelled"),
})

# Extend, rescue and finish

race("rescue against extend", [held("a")], [rescue("a"), extend("a")], lambda after: {
    "a lease that was extended is not taken": not (after.got(0) and after.before(1, 0)),
    "a lease that was taken is not extended": not (after.before(0, 1) and after.got(1)),
    "a job is rescued, or its lease is extended":
        after.values("a", "state", "last_token", "lease_until") == ("ready", -after.scene.jobs["a"].token, None)
        if after.got(0) else
        after.values("a", "token", "lease_until") == (after.scene.jobs["a"].token, LATE + LEASE),
})
race("extend against finish", [held("ab")], [finish("a", RETRY), extend("ab")], recorded("a"), lambda after: {
    "the neighbour of a job that ends is extended":
        "b" in after.got(1) and after.values("b", "lease_until") == (LATE + LEASE,),
    "a job that was finished is not extended": not (after.before(0, 1) and "a" in after.got(1)),
})
for _how, _change, _terms in (
    ("success", SUCCESS, {}), ("success with a key", SUCCESS, KEY), ("retry", RETRY, {}), ("dead", DEAD, KEY),
):
    race(f"finish said twice, {_how}", [held("a", **_terms)],
         [finish("a", _change)] * 2, lambda after, change=_change: {
        "one is recorded": sorted(after.answer_for(n, "a") for n in (0, 1)) == [Verdict.ALREADY, Verdict.RECORDED],
        "the job is in its new state": after.state("a") == change.state,
        "an error makes one attempt": after.count("attempt") == (change.error is not None),
    })
    race(f"rescue and claim against finish, {_how}", [held("a", **_terms)],
         [finish("a", _change), (rescue("a"), then(claim(1, now=LATE, alone=True)))], lambda after, change=_change: {
        "the old token has lost the job when it was rescued":
            [*after.answer(0).values()] == [Verdict.LOST if after.answers[1][0] else Verdict.RECORDED],
        "the job is in the state of what came last": after.state("a") == (
            change.state if not after.answers[1][0] else "running" if after.answer(1) else "ready"),
    })
race("rescue against rescue", [held("a"), held("b", max_attempts=1)], [rescue("ab"), rescue("ba")], lambda after: {
    "each job is rescued once": sorted(after.got(0, 1)) == ["a", "b"],
    "one is ready, and the one without attempts left is dead": after.states("ab") == ["ready", "dead"],
    "each attempt is written once": after.count("attempt") == 2,
    "the death is one event": after.count("event") == 1,
})

# Cancel

for _how, _change, _state, _terms in (
    ("success", SUCCESS, "succeeded", {}), ("success with a key", SUCCESS, "succeeded", KEY),
    ("retry", RETRY, "cancelled", KEY), ("dead", DEAD, "dead", KEY),
):
    race(f"cancel against finish, {_how}", [held("a", **_terms)], [finish("a", _change), cancel("a", now=LATE)],
         recorded("a"), requested("a"), lambda after, state=_state, keyed=bool(_terms): {
        "the job ends as it must": after.state("a") == state,
        "only success keeps the key": after.count("key") == (keyed and state == "succeeded"),
    })
race("lists in different orders, 3 sessions", [held("ab"), held("c", **KEY)],
     [finish("cba", SUCCESS, RETRY, SUCCESS), cancel("cba", now=LATE), cancel("a", now=LATE)],
     recorded("abc"), lambda after: {
    "each job ends as it must": after.states("abc") == ["succeeded", "cancelled", "succeeded"],
})
race("cancel against cancel", [enqueue("ab"), enqueue("c", **KEY)],
     [cancel("abc"), cancel("cba"), cancel("a")], lambda after: {
    "each job is cancelled once": sorted(after.got(0, 1, 2)) == ["a", "b", "c"],
    "each job has ended": all(after.done(name) for name in "abc"),
    "each cancel is one event": after.count("event") == 3,
})

# Replay, resolve, purge

race("replay against replay", [dead("ab", keys="ab"), dead("c")], [replay("abc"), replay("cba")], lambda after: {
    "both answers name the same new jobs":
        {(one.id, one.new_id) for one in after.answer(0)} == {(one.id, one.new_id) for one in after.answer(1)},
    "each dead job is replayed once":
        sorted(one.id for one in after.answer(0) + after.answer(1) if one.first) == sorted(after.scene.all("abc")),
    "each is one new job and one event": after.count("job") == 3 == after.count("event", name="job.replayed"),
})
race("replay against keyed enqueue", [dead("ab", keys="ab")], [enqueue(keys="ba"), replay("ab")], lambda after: {
    "the enqueue answers the holder of each key":
        {job["key"]: answer.id for job, answer in after.enqueued(0)} == after.holders(),
    "each key has one job": after.count("job") == 2,
    "the replay answers the holder of each key":
        dict(zip("ab", (one.new_id or one.key_holder for one in after.answer(1)), strict=True)) == after.holders(),
})
for _what, _end, _both in (("resolve", ops.resolve, False), ("purge", ops.purge, True)):
    race(f"replay against {_what}", [dead("a", max_attempts=1)],
         [replay("a"), lambda scene, end=_end: end(scene.all("a"), by="p", why="so", now=NOW)],
         lambda after, both=_both: {
        "a replay makes one job": [one.new_id is not None for one in after.answer(0)] == [after.count("job") == 1],
        "one of the two has the job": after.answer(0)[0].new_id is not None or "a" in after.got(1),
        "a resolved job is not replayed": both or not (after.answer(0)[0].new_id and "a" in after.got(1)),
    })

# Retry, hold, park and wake

race("retry against claim", [enqueue("ab", delay_ms=1000)], [claim(2, now=LATE), retry("ba", now=LATE)],
     claimed_once(2), lambda after: {
    "each job is due or runs": {*after.states("ab")} <= {"running", "ready"},
})
race("retry against cancel and retry", [enqueue("ab", delay_ms=1000)],
     [retry("ab"), retry("ba"), cancel("ab")], lambda after: {
    "each job is cancelled": after.states("ab") == ["cancelled"] * 2 and {*after.got(2)} == {*"ab"},
    "no job is made due twice":
        all(after.count("event", name="job.retried", job_id=one) <= 1 for one in after.scene.all("ab")),
})
for _how, _change in (("success", SUCCESS), ("retry", RETRY)):
    race(f"hold against finish, {_how}", [held("a", **KEY)],
         [finish("a", _change), hold], lambda after, change=_change: {
        "the finish of a held job is lost": (after.answer_for(0, "a"), after.state("a")) == (
            (Verdict.LOST, "waiting") if after.answer(1).jobs else (Verdict.RECORDED, change.state)),
    })
race("hold against claim and extend", [held("a"), enqueue("b")],
     [claim(1, now=LATE), hold, extend("a")], lambda after: {
    "hold answers how many wait": after.answer(1).jobs == after.count("job", state="waiting"),
    "the running job waits": after.state("a") == "waiting",
    "no job of a held queue is claimed": not (after.before(1, 0) and after.answer(0)),
    "no held job is extended": not (after.before(1, 2) and after.answer(2)),
    "a job that does not wait runs if it was claimed":
        after.state("b") == "waiting" or (after.state("b") == "running") == bool(after.answer(0)),
})
unknown = [
    lambda scene: ops.register("w1", host="h", pid=1, queues=["default"], tasks=["work"], beat_ms=10_000, now=NOW),
    enqueue("ab", task="other"),  # which the only worker does not know
]


def park(scene: Scene) -> Op[Any]:
    return ops.park("default", now=NOW)


def wake(scene: Scene) -> Op[Any]:
    return ops.wake({"other": 1}, ["default"])


race("park against claim", unknown, [claim(1), park], lambda after: {
    "a job runs if it was claimed": all(
        after.state(name) in (("running",) if name in after.got(0) else ("waiting", "ready")) for name in "ab"),
    "park answers how many wait": after.answer(1) == after.count("job", state="waiting"),
})
race("park and wake against cancel", unknown, [park, wake, cancel("ba")], lambda after: {
    "each job is cancelled": after.states("ab") == ["cancelled"] * 2 and len(after.answer(2)) == 2,
})
race("park against wake, 3 sessions", [*unknown, park, enqueue("c", task="other")], [wake, wake, park], lambda after: {
    "what was parked and not woken waits":
        2 + after.answer(2) - after.answer(0) - after.answer(1) == after.count("job", state="waiting"),
    "only parked jobs wait":
        all((row["state"] == "waiting") == (row["parked_version"] is not None) for row in after.rows("job")),
})
race("wake against retry and claim", [*unknown, park], [claim(1), wake, retry("ba")], claimed_once(1), lambda after: {
    "each job is woken or made due, once": after.answer(1) + len(after.answer(2)) == 2,
    "no job waits": not after.rows("job", state="waiting"),
})
