"""Races for keys: enqueues that share one, debounces, and the endings that free it."""

from __future__ import annotations

# fmt: off
import json
from typing import Any

from duly.model import Verdict
from duly.store import ops
from tests.contract.stores import NOW

from tests.proof.rows.p17_interleavings_race import (  # isort: skip
    AGAIN, CANCELLED, DEAD, FIRST, KEY, LATE, RETRY, SUCCESS, After, Step, cancel, claim, claims,
    deferred, enqueue, finish, finish_claimed, held, race, rescue, repeats, together,
)


def one_holder(after: After) -> dict[str, Any]:
    """Promise that each key has one job, and that every enqueue under it answers that job."""
    answers, holders = after.enqueued(*after.sessions), after.holders()
    firsts = [job["key"] for job, one in answers if not one.deduplicated]
    return {
        "each enqueue answers the holder of its key": all(one.id == holders.get(job["key"]) for job, one in answers),
        "one enqueue of each key is the first": sorted(firsts) == sorted(holders),
        "each key has one job": after.count("job") == len(holders),
    }


for _how, _batches in (
    ("2 sessions", "k k"), ("3 sessions", "k k k"), ("the same key twice in one batch", "aba bab"),
    ("batches in different orders, 3 sessions", "ab ba a"),
):
    race(f"keyed enqueue, {_how}", [], [enqueue(keys=keys) for keys in _batches.split()], one_holder)
race("keyed enqueues that share a commit, 3 sessions", [],
     [together(*(enqueue(keys=key) for key in keys)) for keys in ("ab", "ba", "a")], one_holder)
expired_key = [held("a", **KEY, key_ttl_ms=0), finish("a", SUCCESS, now=NOW)]
race("keyed enqueue when the key has had its time", expired_key, [enqueue(**KEY), enqueue(**KEY)], one_holder)
race("keyed enqueue against its repetition", [repeats(enqueue("ab", keys="ab"))], [FIRST, AGAIN], lambda after: {
    "both answers name the jobs that were added": all(  # the first try may have come too late to be answered
        [job.id for job in answer] == after.scene.all("ab") for answer in (*after.answers[0], after.answer(1))),
    "each job is added once": sorted(after.jobs()) == ["a", "b"],
}, may_be_late=True)
for _name, _change, _keys, _kept in (
    ("repeated enqueue against finish", SUCCESS, None, 0),
    ("repeated keyed enqueue against finish, success", SUCCESS, "k", 1),
    ("repeated keyed enqueue against finish, dead", DEAD, "k", 0),
):
    race(_name, [repeats(enqueue("a", keys=_keys)), FIRST, claims("a")], [AGAIN, finish("a", _change)],
         lambda after, change=_change, kept=_kept: {
        "the finish is recorded": after.answer(1) == {after.scene.ids["a"]: Verdict.RECORDED},
        "the repetition answers the job that was added": after.got(0) == ["a"],
        "the job has ended": not after.live("a") and after.state("a") == change.state,
        "only success keeps the key": after.count("key") == kept,
    })
for _how, _change, _frees in (("success", SUCCESS, False), ("dead", DEAD, True), ("cancelled", CANCELLED, True)):
    race(f"keyed enqueue against finish, {_how}", [enqueue("ab", keys="ab"), claims("ab")],
         [enqueue("dc", keys="ba"), finish("a", _change)], lambda after, frees=_frees: {
        "the holder of the other key stays": after.got(0)[:-1] == ["b"] and after.state("b") == "running",
        "a job that succeeded keeps its key": frees or after.answer(0)[1].deduplicated,
        "any other ending frees the key": not (frees and after.before(1, 0) and after.answer(0)[1].deduplicated),
        "a job is added if its key was free":
            after.states("cd") == ["ready" if not after.answer(0)[1].deduplicated else None, None],
    })
race("keyed enqueue against cancel", [enqueue("a", **KEY)], [enqueue("b", **KEY), cancel("a")], lambda after: {
    "the old job is cancelled": after.state("a") == "cancelled",
    "the answer names the new job if it was added": after.got(0) == ["b" if after.state("b") == "ready" else "a"],
    "the cancel frees the key": not (after.before(1, 0) and after.got(0) != ["b"]),
})
for _how, _keys in (("enqueue", None), ("keyed enqueue", "k")):
    race(f"{_how} by a handler against rescue", [held("a")],
         [enqueue("b", keys=_keys, payload='{"n":2}', parent="a", now=LATE), rescue("a")], lambda after, keyed=_keys: {
        "a job is added if the answer names it": (after.state("b") == "ready") == bool(after.answer(0)),
        "its key is held if it is added": not keyed or bool(after.holders()) == bool(after.answer(0)),
        "a handler that lost its lease adds nothing": not (after.answer(0) and after.before(1, 0) and after.got(1)),
        "a handler that holds its lease adds the job": after.answer(0) or "a" in after.got(1),
    })


def child(name: str, parent: str) -> Step:
    return enqueue(name, payload="{}", parent=parent, now=LATE)


race("enqueues by handlers that share a commit against rescue, 3 sessions", [held("ab")],
     [together(child("c", "a"), child("d", "b")), together(child("e", "b"), child("f", "a")), rescue("ab")],
     lambda after: {
    "each job is added if its answer names it":
        [bool(one) for n in (0, 1) for one in after.answer(n)] == [after.state(name) == "ready" for name in "cdef"],
    "a handler that lost its lease adds nothing": not any(
        answer and after.before(2, n) and parent in after.got(2)
        for n, parents in enumerate(("ab", "ba")) for parent, answer in zip(parents, after.answer(n), strict=True)),
})

# Debounce


def debounce(payload: int, *, key: str = "k", **more: Any) -> Step:
    return enqueue(keys=key, payload=str(payload), debounce_ms=1000, **{"now": LATE, **more})


@deferred
def pending(after: After, *payloads: int, key: str = "k") -> dict[str, Any]:
    """Promise that one job lives under the key, and that the last to run has one of these payloads."""
    rows = after.rows("job", key=key)
    lasts = {int(row["payload"] if row["next"] is None else json.loads(row["next"])["payload"]) for row in rows}
    return {
        f"one job lives under the key {key}": len(rows) == 1,
        f"the last call decides what runs last under {key}": lasts <= {*payloads},
        f"nothing waits behind a job of {key} that has not begun":
            all(row["next"] is None or row["attempt"] for row in rows),
    }


waiting = [enqueue("a", **KEY, payload="0", delay_ms=1000)]  # debounced and due by LATE
running = [held("a", **KEY, payload="0")]
race("debounce against claim", waiting, [debounce(1), claim(1, now=LATE)], pending(1), lambda after: {
    "no job is claimed that was just put off": all(job.payload == "0" for job in after.answer(1)),
})
for _which, _behind in (("", []), (" of one that has another behind it", [debounce(1, now=NOW)])):
    for _how, _change in (("success", SUCCESS), ("dead", DEAD), ("retry", RETRY)):
        race(f"debounce{_which} against finish, {_how}", running + _behind,
             [debounce(2), finish("a", _change)], pending(2))
    race(f"debounce{_which} against rescue to death", [held("a", **KEY, payload="0", max_attempts=1), *_behind],
         [debounce(2), rescue("a")], pending(2))


@deferred
def debounced(after: After, *payloads: int, waits: bool = False) -> dict[str, Any]:
    """Promise that the last of the calls decides, and that all of them answer one job."""
    calls = after.sessions
    last = [payload for n, payload in enumerate(payloads) if not any(after.before(n, other) for other in calls)]
    return {
        **pending(*last)(after),
        "all calls answer the same job": len({*after.got(*calls)}) == 1,
        "one call is the first": waits or sum(not after.answer(n)[0].deduplicated for n in calls) == 1,
    }


for _name, _setup, _payloads in (
    ("debounce, 2 sessions", [], (1, 2)), ("debounce, 3 sessions", [], (1, 2, 3)),
    ("debounce of what waits, 3 sessions", waiting, (1, 2, 3)),
    ("debounce of what runs, 3 sessions", running, (1, 2, 3)),
    ("debounce of a key that is kept, 2 sessions", [held("a", **KEY), finish("a", SUCCESS, now=NOW)], (1, 2)),
):
    race(_name, _setup, [debounce(payload) for payload in _payloads], debounced(*_payloads, waits=_setup is waiting))
race("debounce against its repetition", [repeats(debounce(1))], [FIRST, AGAIN], pending(1), lambda after: {
    "both are answered the same": after.answer(0) == after.answer(1),
})
race("debounce against its repetition and the death of its job", [repeats(debounce(1))],
     [AGAIN, (FIRST, claim(1, now=LATE + 5000), finish_claimed(DEAD, now=LATE + 5000))], lambda after: {
    "one call makes one job": after.count("job") + after.count("done") == 1,
})


def ended_or_pending(after: After) -> dict[str, Any]:
    """Promise that the call changed the job before it ended, or made another one."""
    if after.got(0) == ["a"] and after.done("a"):
        return {"the job ends with the payload of the call": after.done("a")["payload"] == "1" and not after.jobs()}
    return {"the call answers one job": len(after.got(0)) == 1, **pending(1)(after)}


race("debounce against cancel", waiting, [debounce(1), cancel("a", now=LATE)], ended_or_pending)
race("debounce against expire", [enqueue("a", **KEY, payload="0", delay_ms=1000, expires_ms=2000)],
     [debounce(1), lambda scene: ops.expire(scene.all("a"), now=LATE)], ended_or_pending)
race("debounce against keyed enqueue", [], [debounce(1), enqueue(**KEY), debounce(2)], pending(1, 2))
race("debounce against prune of keys", expired_key,
     [debounce(1), lambda scene: ops.prune("keys", now=LATE)], pending(1))
race("debounce while the key is handed on and its next job claimed, 4 sessions", [*running, debounce(1, now=NOW)], [
    debounce(2), finish("a", SUCCESS), (claim(1, now=LATE + 5000), claim(1, now=LATE + 5000)), debounce(3)],
    lambda after: pending(*((3,) if after.before(0, 3) else (2,) if after.before(3, 0) else (2, 3)))(after))
race("handlers that debounce each other's keys", [held("ab", keys="ab")],
     [debounce(1, key="b", parent="a"), debounce(2, key="a", parent="b")], pending(1, key="b"), pending(2, key="a"))
race("debounce of two keys against the end of both", [held("ab", keys="ab")],
     [debounce(1, key="a"), debounce(2, key="b"), finish("ab", SUCCESS)], pending(1, key="a"), pending(2, key="b"))
