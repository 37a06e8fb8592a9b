"""Races for batches: endings of the last jobs, adds, seals, and places filled in order."""

from __future__ import annotations

# fmt: off
import json
from itertools import islice
from typing import Any

from duly import Duly
from duly.app.batches import Batch
from duly.model import NewJob, Terms
from duly.rules.keys import id_in
from duly.store import batches, ops
from duly.store.op import Op
from tests.contract.stores import NOW, new_id

from tests.proof.rows.p17_interleavings_race import (  # isort: skip
    AGAIN, CANCELLED, DEAD, FIRST, LATE, LEASE, RETRY, SUCCESS, After, Promise, Scene, Step, cancel, claim, claims,
    deferred, finish, finish_claimed, race, replay, rescue, repeats,
)

CALLBACKS = ("on_complete", "on_success", "on_first_dead")
CALLBACK = {
    "queue": "after", "priority": 0, "payload": "{}", "max_attempts": 5, "lease_ms": LEASE, "keep_ms": 1000,
    "result_ttl_ms": 1000,
}


@deferred
def opened(scene: Scene, key: str | None = None) -> Op[Any]:
    scene.batch, *ids = (new_id() for _ in ("batch", *CALLBACKS))
    tasks = zip(CALLBACKS, ids, strict=True)
    specs = {task: json.dumps({**CALLBACK, "id": one, "task": task}) for task, one in tasks}
    return batches.open_batch(scene.batch, "b", key=key, callbacks=batches.Callbacks(**specs), now=NOW)


@deferred
def add(scene: Scene, names: str = "", *, keys: str = "", parent: str = "") -> Op[Any]:
    """Add jobs to the batch: one for each name or key."""
    jobs = [NewJob(new_id(), '{"n":1}', key=key) for key in keys or [None] * len(names)]
    scene.ids.update(zip(names, (job.id for job in jobs), strict=False))
    [held] = scene.held(parent) or [None]
    return batches.add(Terms(task="work", batch_id=scene.batch), jobs, parent=held, now=NOW)


def seal(scene: Scene, now: int = LATE) -> Op[bool]:
    return batches.seal(scene.batch, now=now)


def claimed(names: str, *, keys: str = "") -> list[Step]:
    """Open a batch whose jobs are claimed."""
    return [opened(), add(names, keys=keys), claims(names)]


def full(names: str) -> list[Step]:
    """Seal a batch whose jobs are claimed."""
    return [opened(), add(names), lambda scene: seal(scene, NOW), claims(names)]


def complete(*, succeeded: int = 0, dead: int = 0, cancelled: int = 0) -> Promise:
    counts = {"open": 0, "succeeded": succeeded, "dead": dead, "cancelled": cancelled}
    return lambda after: {
        f"the batch counts {counts}": counts.items() <= after.batch.items(),
        "the batch is complete": after.batch["completed_at"] is not None,
    }


race("last two jobs of a batch", full("ab"), [finish("a", SUCCESS), finish("b", SUCCESS)], complete(succeeded=2))
race("last two jobs of a batch, one dead", full("ab"),
     [finish("a", SUCCESS), finish("b", DEAD)], complete(succeeded=1, dead=1))
race("last jobs of a batch, two dead, 3 sessions", full("abc"),
     [finish("a", DEAD), finish("b", DEAD), finish("c", SUCCESS)], complete(succeeded=1, dead=2))
# The first two wait for the third, each with what it has locked until then.
race("the last jobs of two batches end in lists of different orders, 3 sessions", [*full("abc"), *full("de")],
     [finish("da", SUCCESS), finish("be", DEAD), finish("c", SUCCESS)], lambda after: {
    "both batches are complete": all(row["completed_at"] is not None for row in after.rows("batch")),
})
race("finish of several of a batch against cancel in another order", full("abc"),
     [finish("cba", SUCCESS), cancel("abc", now=LATE), cancel("cba", now=LATE)], complete(succeeded=3))
race("seal against the last finish, success", claimed("a"), [finish("a", SUCCESS), seal], complete(succeeded=1))
race("seal against the last finish, dead", claimed("a"), [finish("a", DEAD), seal], complete(dead=1))
race("seal against cancel of the last", claimed("a"), [finish("a", CANCELLED), seal], complete(cancelled=1))
race("seal against seal and the last finish", claimed("a"), [seal, seal, finish("a", SUCCESS)], complete(succeeded=1))
race("add against finish in the same batch", claimed("a"),
     [add("bc"), finish("a", SUCCESS), add("de")], lambda after: {
    "the batch counts what was added and what ended":
        [after.batch[name] for name in ("open", "succeeded", "completed_at")] == [4, 1, None],
})
for _name, _keys, _last in (
    ("add against seal", "", ""), ("keyed add against seal", "ab", ""),
    ("add against seal and the last finish", "", "a"),
):
    race(_name, claimed(_last), [add("bc", keys=_keys), seal, *(finish(one, SUCCESS) for one in _last)], lambda after: {
        "the batch counts what was not refused": after.batch["open"] == (0 if after.answer(0).sealed else 2),
        "a batch that is not sealed refuses nothing": not (after.answer(0).sealed and after.before(0, 1)),
        "what is refused leaves no key": not (after.answer(0).sealed and after.holders()),
    })
for _how, _change, _frees in (("success", SUCCESS, False), ("dead", DEAD, True)):
    race(f"keyed add against finish of the holder, {_how}", claimed("ab", keys="ab"),
         [add(keys="ba"), finish("a", _change)], lambda after, frees=_frees: {
        "the batch counts the new job": after.batch["open"] == 1 + (not after.answer(0).jobs[1].deduplicated),
        "a job that succeeded keeps its key": frees or after.answer(0).jobs[1].deduplicated,
        "death frees the key": not (frees and after.before(1, 0) and after.answer(0).jobs[1].deduplicated),
        "each job is answered": len(after.answer(0).jobs) == 2,
    })
for _name, _keys, _more in (
    ("repeated add against claim and finish", "", []), ("repeated keyed add against claim and finish", "ab", []),
    ("repeated add against seal, claim and finish", "", [seal]),
):
    race(_name, [opened(), repeats(add("ab", keys=_keys)), FIRST],  # a claim passes by what the repetition has locked
         [AGAIN, (claim(2), finish_claimed(SUCCESS, DEAD)), *_more], lambda after: {
        "the repetition answers that the jobs were added":
            not after.answer(0).sealed and not any(answer.deduplicated for answer in after.answer(0).jobs[:1]),
        "each job is counted once": after.batch["open"] + after.batch["succeeded"] + after.batch["dead"] == 2,
    })


def refused(after: After) -> list[bool]:
    return [added.sealed for number in (0, 1) for added in after.answers[number]]


race("add against its repetition and seal", [opened(), repeats(add("ab"))], [FIRST, AGAIN, seal], lambda after: {
    "the batch counts what was not refused": after.batch["open"] == (0 if all(refused(after)) else 2),
    "what was added is not refused to the repetition": refused(after) != [False, True] or after.before(1, 0),
}, may_be_late=True)
race("add by a handler of the batch against its rescue", claimed("a"),
     [add("bc", parent="a"), rescue("a")], lambda after: {
    "the batch counts what was added": after.batch["open"] == (1 if after.answer(0).lost else 3),
    "a handler that lost its lease adds nothing": after.answer(0).lost or not after.before(1, 0),
})
race("replay against the last finish of a batch", [*full("ab"), finish("a", DEAD, now=NOW)],
     [(replay("a", now=LATE), claim(1, now=LATE), finish_claimed(SUCCESS)), finish("b", SUCCESS)],
     complete(succeeded=2))
race("cancel of the rest of a batch against finish", [*claimed("ab"), add("c")], [
    (seal, lambda scene: batches.rest(scene.batch),
     lambda scene: lambda answers: ops.cancel(answers[1], by="p", now=LATE)),
    finish("b", RETRY), finish("a", SUCCESS)], lambda after: {
    "the job that was finished succeeded": after.batch["succeeded"] == 1,
    "the batch counts what is open": after.batch["open"] == (after.state("b") not in ("cancelled", "succeeded")),
    "a job that was asked to stop is cancelled": not after.before(0, 1) or after.state("b") == "cancelled",
})

# Jobs added in order, under a key

PLACES = 5


@deferred
def placed(scene: Scene, begin: int, end: int) -> Op[Any]:
    jobs = [NewJob(id_in(scene.batch, place), json.dumps({"n": place})) for place in range(begin, end)]
    return batches.add(Terms(task="work", batch_id=scene.batch), jobs, filling=begin, now=NOW)


def _work(n: int) -> None: ...


def filling(*sizes: int) -> tuple[Step, ...]:
    """Fill a batch as the app does, in chunks of these sizes."""
    going: list[Any] = []

    def begin(scene: Scene) -> Any:
        app = Duly("postgresql://nowhere")
        work = app.task(_work)
        places = iter(range(PLACES))
        chunks = [work._new_jobs([work.call(n) for n in islice(places, size)]) for size in sizes]
        batch = Batch(app.tasks, batches.open_batch(scene.batch, "b", key="k"))
        batch._opened, batch._place = batches.Opened(scene.batch, "b", "k", 0), 0
        return batch._adding(batch._request(work), chunks, 0)

    def step(scene: Scene) -> Any:
        def made(answers: list[Any]) -> Op[Any] | None:
            if not answers:
                going[:] = [begin(scene)]
            try:
                return going[0].send(answers[-1] if answers else None)
            except StopIteration:
                return None

        return made

    return (step,) * (2 * PLACES)


def each_place_once(after: After) -> dict[str, Any]:
    rows = [row for table in ("job", "done") for row in after.rows(table, batch_id=after.scene.batch)]
    return {
        "each place has one job": sorted(json.loads(row["payload"])["n"] for row in rows) == [*range(PLACES)],
        "the batch is filled": after.batch["filled"] == PLACES,
    }


race("two fill one batch under its key", [opened(key="k")], [filling(2, 3), filling(3, 2)], each_place_once)
race("two fill one batch under its key, which a third one claims and ends", [opened(key="k"), placed(0, 3)],
     [(placed(0, 3), placed(3, PLACES)), placed(3, PLACES), (claim(2), finish_claimed(SUCCESS))], each_place_once)
race("one batch is opened twice under its key", [],
     [lambda scene: batches.open_batch(new_id(), "b", key="k", now=NOW)] * 2, lambda after: {
    "both answers name one batch, and it is the only one":
        [row["id"] for row in after.rows("batch")] == [*{after.answer(0).id, after.answer(1).id}],
})
