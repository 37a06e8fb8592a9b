"""Races of schedulers: who fires, what is queued behind a run, and changes of a schedule that is being fired."""

from __future__ import annotations

# fmt: off
from collections.abc import Iterable
from typing import Any

from duly.model import QUEUED, Catchup, Overlap
from duly.rules.firing import Due
from duly.rules.firing import plan as planned
from duly.store import schedules
from duly.store.op import Op
from tests.contract.stores import NOW, definition, new_id

from tests.proof.rows.p17_interleavings_race import (  # isort: skip
    AGAIN, DEAD, FIRST, LATE, SUCCESS, After, Scene, claims, deferred, finish, hold, race, rescue, repeats,
)


@deferred
def due(scene: Scene, names: str) -> None:
    """Define schedules that are due, each in a commit of its own, and read them as a scheduler does."""
    for name in names:
        scene.store.schedule(name)
    read(scene)


def read(scene: Scene) -> None:
    scene.dues = {one.name: one for one in scene.store.run(look(scene))}


def look(scene: Scene) -> Op[list[Due]]:
    return schedules.due(limit=10, now=NOW)


@deferred
def fire(scene: Scene, names: str) -> Op[Any]:
    """Fire schedules as they were read."""
    return firing([scene.dues[name] for name in names], scene)


def firing(dues: Iterable[Due], scene: Scene) -> Op[list[str]]:
    firings = [planned(one, new_id=new_id, chance=lambda: 0.0) for one in dues]
    scene.runs.append({one.name: one.runs[0].id for one in firings})
    return schedules.fire(firings, now=NOW)


def jobs_of(after: After, name: str) -> tuple[list[str], list[str]]:
    """Return the ids of the runs of a schedule, and those on its record."""
    fires = after.rows("fire", schedule=name)
    return [row["id"] for row in after.rows("job", schedule=name)], [row["job_id"] for row in fires]


@deferred
def fired_once(after: After, names: str, first: int = 0) -> dict[str, Any]:
    """Promise that of all schedulers, from a first session on, one fires each of these."""
    runs = list(enumerate(after.scene.runs, first))
    answered = {name: [made[name] for number, made in runs if name in after.answer(number)] for name in names}
    every = sorted((row["name"], row["next_at"], row["revision"]) for row in after.rows("schedule"))
    return {
        "one scheduler fires each": all(len(ids) == 1 for ids in answered.values()),
        "it makes one run, on record": all((ids, ids) == jobs_of(after, name) for name, ids in answered.items()),
        "each is on record as due now": all(row["due_at"] == NOW for row in after.rows("fire")),
        "each is due next after its interval": [one for one in every if one[0] in names] == [
            (name, NOW + 600_000, 2) for name in names],
    }


race("two schedulers fire the same", [due("cba")], [fire("a"), fire("a")], fired_once("a"))
race("two schedulers fire in different orders", [due("cba")], [fire("ab"), fire("ba")], fired_once("ab"))
race("three schedulers fire", [due("cba")], [fire("abc"), fire("ca"), fire("b")], fired_once("abc"))
race("fire against its repetition", [due("a"), repeats(fire("a"))], [FIRST, AGAIN],
     fired_once("a", first=1), lambda after: {
    "the repetition answers what was fired": after.answer(1) == ["a"],
})
race("two schedulers look and fire", [due("ab")],
     [(look, lambda scene: lambda answers: firing(answers[0], scene) if answers[0] else None)] * 2, lambda after: {
    "each makes one run, on record": all(
        len({*jobs}) == 1 and {*jobs} == {*fired} for jobs, fired in (jobs_of(after, name) for name in "ab")),
    "one scheduler fires each":
        sorted(name for answers in after.answers for names in answers[1:] for name in names) == ["a", "b"],
})

# Runs queued behind others


def run_before(scene: Scene) -> None:
    """Have a run under way, due before, and read that its schedule is due again."""
    scene.store.schedule("a", overlap=Overlap.QUEUE)
    scene.ids["r"] = scene.store.fire("a", next_at=NOW)
    scene.do(claims("r"))
    scene.store.query("update duly_fire set due_at = due_at - 600000")
    read(scene)


for _name, _end in (
    ("fire against the end of the run before, success", finish("r", SUCCESS)),
    ("fire against the end of the run before, dead", finish("r", DEAD)),
    ("fire against rescue of the run before", rescue("r")),
):
    race(_name, [run_before], [fire("a"), _end], lambda after: {
        "the run before has ended": not after.live("r"),
        "what was fired can begin":
            after.state(after.scene.runs[0]["a"]) == ("ready" if "a" in after.answer(0) else None),
        "nothing is queued behind a run that has ended": not (after.before(1, 0) and "a" in after.answer(0)),
    })
race("fire and fire again against the end of the run before", [run_before], [(
    fire("a"), lambda scene: lambda answers: None if answers[0] else look(scene),
    lambda scene: lambda answers: None if answers[0] else firing(answers[1], scene)), finish("r", SUCCESS)],
    lambda after: {
    "the next run can begin": [row["state"] for row in after.rows("job", schedule="a")] == ["ready"],
})


def two_runs_before(scene: Scene) -> None:
    """Have two runs under way, and a third one queued behind them."""
    store = scene.store
    store.schedule("a", overlap=Overlap.QUEUE)
    for name in "rs":
        store.now += 1
        scene.ids[name] = store.fire("a", next_at=LATE)
    scene.do(claims("rs"))
    store.now += 1
    scene.ids["q"] = store.fire("a", next_at=LATE, reason=QUEUED)
    store.now = NOW


for _name, _more in (
    ("the two runs before one that is queued end", []),
    ("the two runs before one that is queued end, 3 sessions", [lambda scene: schedules.unqueue(now=LATE)]),
):
    race(_name, [two_runs_before], [finish("r", SUCCESS), finish("s", SUCCESS), *_more], lambda after: {
        "the run that was queued can begin": after.state("q") == "ready",
    })

# Changes of a schedule that is being fired

for _what, _change in (
    ("pause of the schedule", lambda scene: schedules.pause("a", by="p", why="so", now=NOW)),
    ("delete of the schedule", lambda scene: schedules.delete("a", by="p", why="so", now=NOW)),
    ("hold", hold),
    ("a changed schedule",
     lambda scene: schedules.define([definition("a", catchup=Catchup.ALL, revision=2)], now=NOW)),
):
    race(f"fire against {_what}", [due("ba")], [fire("ba"), _change], lambda after: {
        "what was fired has one run, on record":
            jobs_of(after, "a") == (([after.scene.runs[0]["a"]],) * 2 if "a" in after.answer(0) else ([], [])),
        "a schedule is not fired as it was before the change": not (
            "a" in after.answer(0) and after.before(1, 0) and getattr(after.answer(1), "schedules", after.answer(1))),
        "it is due next if it was fired": all(
            (row["next_at"] == NOW + 600_000) == ("a" in after.answer(0)) for row in after.rows("schedule", name="a")),
    })
race("the same schedule defined twice", [],
     [lambda scene, names=_names: schedules.define([definition(name) for name in names], now=NOW)
      for _names in ("ab", "ba")], lambda after: {
    "each is written once": sorted(after.answer(0) + after.answer(1)) == ["a", "b"],
    "each has its first revision": {row["revision"] for row in after.rows("schedule")} == {1},
})
