"""A lost answer looks like a lost write, so every write may be repeated. Lines J01, J08, J09 and law 9.

Each scenario runs on two stores that are the same but for this: on the second the answer of the operation is
lost and the driver asks again. Both must end in the same rows, and the second must get the right answer.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import psycopg
import pytest

from duly.errors import AnswerLost, EnqueueUnknown
from duly.model import (
    DAY_MS,
    PARKED,
    QUEUED,
    Change,
    Claimed,
    Enqueued,
    Envelope,
    Failure,
    NewJob,
    Overlap,
    State,
    Terms,
)
from duly.rules.firing import Firing, Run, Skip, Told
from duly.store import batches, ops, queues, schedules
from duly.store.batches import Added, Callbacks
from duly.store.driver import Driver, Point
from duly.store.op import Finish, Op
from duly.store.ops import Replay
from tests.contract.stores import (
    CALLBACKS,
    NOW,
    D1Store,
    PostgresStore,
    SQLiteStore,
    Store,
    callback,
    definition,
    held,
    snooze,
)
from tests.databases import Pool

FAILURE = Failure("builtins.ValueError", "no", "a traceback")
ON_DEAD = json.dumps(
    {
        "task": "told",
        "queue": "hooks",
        "priority": 0,
        "max_attempts": 1,
        "lease_ms": 1,
        "keep_ms": 1,
        "result_ttl_ms": 1,
    }
)
BATCH = "00000000-0000-7000-8000-00000000ba7c"


def name(number: int) -> str:
    """The same id on both stores."""
    return f"00000000-0000-7000-8000-{number:012d}"


def add(store: Store, number: int, *, key: str | None = None, payload: str = '{"n":1}', **terms: Any) -> str:
    job = NewJob(name(number), payload, key=key)
    store.run(ops.enqueue(Terms(**{"task": "work", **terms}), [job], now=NOW))
    return job.id


def take(store: Store, limit: int = 1, token: int = 77) -> list[Claimed]:
    return store.claim(limit, token=token)


def batch(store: Store, open: int) -> str:
    callbacks = [
        json.dumps({"id": name(900 + n), "payload": "{}", "envelope": None, **json.loads(ON_DEAD)}) for n in range(3)
    ]
    store.query(
        "insert into duly_batch (id, name, created_at, sealed_at, open, on_complete, on_success, on_first_dead)"
        " values (?, 'b', 1, 1, ?, ?, ?, ?)", BATCH, open, *callbacks,
    )  # fmt: skip
    return BATCH


def step(store: Store, job_id: str) -> None:
    store.query(
        "insert into duly_step (job_id, name, kind, state, created_at, changed_at)"
        " values (?, 's', 'once', 'started', 1, 1)",
        job_id,
    )


def same(answer: Any) -> Any:
    return answer


def already(answer: dict[str, Any]) -> dict[str, str]:
    return dict.fromkeys(answer, "already")


def gone(answer: dict[str, Any]) -> dict[str, str]:
    return dict.fromkeys(answer, "gone")


def nothing_left(answer: int) -> int:
    """Upkeep asks how much it took to know whether to come back: asked again, nothing was left."""
    assert answer > 0
    return 0


def none_left(answer: list[str]) -> list[str]:
    """Who asks is only told whom it concerned: asked again, it concerns nobody any more."""
    assert answer
    return []


class Scenario(NamedTuple):
    op: Callable[[Store], Op[Any]]
    answer: Callable[[Any], Any] = same


def enqueue(store: Store) -> Op[Any]:
    return ops.enqueue(Terms("work", delay_ms=5), [NewJob(name(1), "1"), NewJob(name(2), "2")], now=NOW)


def enqueue_keys(store: Store) -> Op[Any]:
    add(store, 8, key="live")
    add(store, 9, key="done", queue="q2")
    [job] = store.claim(1, queue="q2", token=5)
    store.succeed(job, '"r"')
    keys = ["new", "live", "done", "new"]
    jobs = [NewJob(name(n), '{"n":1}', key=key) for n, key in enumerate(keys, start=1)]
    return ops.enqueue(Terms("work"), [*jobs, NewJob(name(5), "2", key="live")], now=NOW)


def enqueue_key_keep_0(store: Store) -> Op[Any]:
    return ops.enqueue(Terms("work", keep_ms=0), [NewJob(name(1), "1", key="k")], now=NOW)


def debounce(store: Store, begun: str = "") -> Op[Any]:
    """Nothing is there under the key, or a job that waits, or one that runs, or the key is kept."""
    if begun:
        add(store, 8, key="k", delay_ms=5 if begun == "waiting" else 0)
    if begun in ("running", "behind", "kept"):
        [job] = take(store)
    if begun == "kept":
        store.succeed(job, '"r"')
    if begun == "behind":
        store.run(ops.enqueue(Terms("work", debounce_ms=5), [NewJob(name(7), "7", key="k")], now=NOW))
    return ops.enqueue(Terms("work", debounce_ms=9), [NewJob(name(1), "1", key="k")], now=NOW)


def finish_with_more_behind(store: Store) -> Op[Any]:
    store.run(debounce(store, "running"))
    [job] = store.run(ops.recall(77))
    return ops.finish([Finish(job, Change(State.SUCCEEDED, result='"r"'))], now=NOW + 1)


def claim(store: Store) -> Op[Any]:
    for number in range(5):
        add(store, number, delay_ms=number // 2)
    return ops.claim("default", limit=3, token=7, worker="w", now=NOW + 5)


def recall(store: Store) -> Op[Any]:
    add(store, 1)
    take(store)
    return ops.recall(77)


def extend(store: Store) -> Op[Any]:
    add(store, 1)
    return ops.extend(map(held, take(store)), now=NOW + 500)


def progress(store: Store) -> Op[Any]:
    add(store, 1)
    return ops.progress(held(take(store)[0]), 30, "so far")


def heartbeat(store: Store) -> Op[Any]:
    add(store, 1)
    return ops.heartbeat(held(take(store)[0]), now=NOW + 3)


def finish_plain(store: Store) -> Op[Any]:
    for number in range(3):
        add(store, number)
    return ops.finish([Finish(job, Change(State.SUCCEEDED, result='"r"')) for job in take(store, 3)], now=NOW + 1)


def finish_mixed(store: Store) -> Op[Any]:
    """Every kind of end, with everything the tail touches."""
    store.query(
        "insert into duly_schedule (name, task, spec, mode, interval_ms) values ('s', 'work', '', 'delay', 1000)"
    )
    b = batch(store, 3)
    add(store, 1)
    add(store, 2, key="a", batch_id=b)
    add(store, 3, key="b", batch_id=b, on_dead=ON_DEAD, schedule="s")
    add(store, 4, batch_id=b)
    add(store, 5)
    add(store, 6)
    add(store, 7)
    add(store, 8)
    ends = [
        Change(State.SUCCEEDED, result='"r"'),
        Change(State.SUCCEEDED, result='"r"'),
        Change(State.DEAD, error=FAILURE),
        Change(State.PARTIAL, reason="partial"),
        Change(State.SCHEDULED, after_ms=50, error=FAILURE),
        Change(State.WAITING, reason="event", give_back_attempt=True),
        Change(State.READY, error=FAILURE, crashed=True),
        Change(State.WAITING, reason=f"{PARKED}needs version 2", give_back_attempt=True),
    ]
    return ops.finish([Finish(*pair) for pair in zip(take(store, 8), ends, strict=True)], now=NOW + 1)


def finish_runs(store: Store) -> Op[Any]:
    """The last run that its schedule may lose, with one queued behind it, and one whose end is counted from."""
    add_run(store, 1, "paused", pause_after=1, overlap=Overlap.QUEUE)
    add_run(store, 2, "counted", "delay", pause_after=9)
    jobs = take(store, 2)
    store.now += 1
    store.fire("paused", id=name(3), reason=QUEUED)
    return ops.finish([Finish(job, Change(State.DEAD, error=FAILURE)) for job in jobs], now=NOW + 1)


def add_run(store: Store, number: int, which: str, *mode: str, **more: Any) -> str:
    """A schedule, and a run of it whose end is awaited."""
    store.schedule(which, *mode, **more)
    return store.fire(which, id=name(number))


def finish_keep_0(store: Store) -> Op[Any]:
    add(store, 1, keep_ms=0)
    return ops.finish([Finish(take(store)[0], Change(State.SUCCEEDED))], now=NOW + 1)


def finish_keep_0_after_a_retry(store: Store) -> Op[Any]:
    add(store, 1, keep_ms=0)
    store.retry(take(store)[0], after_ms=0)
    step(store, name(1))
    return ops.finish([Finish(take(store, token=78)[0], Change(State.SUCCEEDED))], now=NOW + 1)


def release(store: Store) -> Op[Any]:
    add(store, 1)
    return ops.release(take(store), now=NOW + 1)


def finish_put_off(store: Store) -> Op[Any]:
    add(store, 1)
    return snooze(take(store)[0], 500, now=NOW + 1)


def rescue(store: Store) -> Op[Any]:
    """One comes back, one is dead, one was asked to cancel."""
    add(store, 1)
    add(store, 2, max_attempts=1, on_dead=ON_DEAD, batch_id=batch(store, 1))
    add(store, 3, key="k")
    take(store, 3)
    store.run(ops.cancel([name(3)], by="me", why="no", now=NOW))
    later = NOW + 30_000
    return ops.rescue(store.run(ops.expired_leases(now=later)), now=later)


def promote(store: Store) -> Op[Any]:
    add(store, 1, delay_ms=5)
    add(store, 2, delay_ms=500)
    return ops.promote("default", now=NOW + 5)


def park(store: Store) -> Op[Any]:
    store.run(register(store))
    add(store, 1)
    add(store, 2, task="unknown")
    add(store, 3, task="unknown", delay_ms=5)
    return ops.park("default", now=NOW + 5)


def wake(store: Store) -> Op[Any]:
    store.run(park(store))
    return ops.wake({"unknown": 1}, ["default"])


def expire(store: Store) -> Op[Any]:
    add(store, 1, expires_ms=5, key="k", batch_id=batch(store, 2))
    add(store, 2, expires_ms=500)
    return ops.expire([name(1), name(2)], now=NOW + 5)


def cancel(store: Store) -> Op[Any]:
    """One waits, one runs, one has succeeded."""
    add(store, 1)
    add(store, 3)
    store.succeed(take(store)[0])
    take(store)
    add(store, 2, key="k", batch_id=batch(store, 1))
    return ops.cancel([name(1), name(2), name(3)], by="me", why="no", now=NOW + 5)


def retry(store: Store) -> Op[Any]:
    """One is put off, one is parked, one is ready, one has been cancelled."""
    store.run(park(store))
    add(store, 6, delay_ms=500)
    add(store, 4, delay_ms=500)
    store.run(ops.cancel([name(4)], now=NOW))
    return ops.retry([name(1), name(2), name(6), name(4), name(5)], by="me", why="now", now=NOW + 9)


def hold(store: Store) -> Op[Any]:
    """One runs, one is ready in a queue that is paused for a time; one schedule is paused already."""
    add(store, 1)
    take(store)
    add(store, 2, queue="mail")
    store.run(ops.pause("queue", "mail", by="ann", why="full", until_ms=5, now=NOW))
    for which, at in (("a", None), ("b", 1)):
        store.query(
            "insert into duly_schedule (name, task, spec, mode, paused_at) values (?, 'work', '', 'cron', ?)", which, at
        )
    return ops.hold(by="me", why="restored", now=NOW + 9)


def dead(store: Store, number: int, **terms: Any) -> str:
    add(store, number, **terms)
    store.kill(take(store, token=number)[0])
    return name(number)


def replay(store: Store) -> Op[Any]:
    """One with all it can have, one whose key is taken, one that succeeded, one that never was."""
    step(store, dead(store, 1, key="k", batch_id=batch(store, 1)))
    dead(store, 2, key="taken")
    add(store, 3, key="taken", delay_ms=5)
    add(store, 4)
    store.succeed(take(store)[0])
    asked = [Replay(name(n), name(100 + n), payload="2" if n == 1 else None) for n in (1, 2, 4, 5)]
    return ops.replay(asked, by="me", why="fixed", now=NOW + 5)


def resolve(store: Store) -> Op[Any]:
    dead(store, 1)
    dead(store, 2)
    store.run(ops.resolve([name(2)], by="bob", why="known", now=NOW))
    return ops.resolve([name(1), name(2)], by="me", why="settled", now=NOW + 5)


def purge(store: Store) -> Op[Any]:
    """One is there, one never was, and one was purged before by somebody else."""
    step(store, dead(store, 1))
    dead(store, 2)
    dead(store, 3)
    store.run(ops.purge([name(3)], by="you", now=NOW + 4))
    return ops.purge([name(1), name(3), name(4)], by="me", why="old", now=NOW + 5)


def pause(store: Store) -> Op[Any]:
    return ops.pause("queue", "default", by="me", why="a leak", until_ms=1000, now=NOW)


def resume(store: Store) -> Op[Any]:
    store.run(ops.pause("task", "work", by="me", why="a leak", now=NOW))
    return ops.resume("task", "work", by="me", why="fixed", now=NOW + 5)


def limit_queue(store: Store) -> Op[Any]:
    store.run(queues.limit_queue("default", max_depth=5, ageing_ms=9, by="you", why="so", now=NOW))
    return queues.limit_queue("default", max_depth=7, ageing_ms=queues.OFF, retry_share=0.5, by="me", why="so", now=NOW)


def note_depth(store: Store) -> Op[Any]:
    store.run(queues.limit_queue("default", max_depth=5, by="you", why="so", now=NOW))
    return queues.note_depth("default", 3, max_depth=5, now=NOW)


def claim_shaped(store: Store) -> Op[Any]:
    for number in range(5):
        add(store, number, delay_ms=number // 2, priority=number)
    return queues.claim("default", ageing_ms=1, retries=1, limit=3, token=7, worker="w", now=NOW + 5)


def register(store: Store) -> Op[Any]:
    return ops.register("w", host="h", pid=1, queues=["default"], tasks=["work"], beat_ms=10, now=NOW)


def leave(store: Store) -> Op[Any]:
    store.run(register(store))
    return ops.leave("w")


def define(store: Store) -> Op[Any]:
    """One is new, one is as it was read, one is not."""
    for which in ("read", "changed"):
        store.schedule(which)
    store.run(schedules.pause("changed", by="ann", why="so", now=NOW))
    wanted = [definition("new"), *(definition(which, "cron", revision=2) for which in ("read", "changed"))]
    return in_order(schedules.define(wanted, now=NOW + 5))


def in_order(op: Op[Any]) -> Op[Any]:
    """Have names answered in their order: a database gives what it wrote in any."""
    again = None if op.again is None else in_order(op.again)
    return replace(op, read=lambda rows: sorted(op.read(rows)), repeat=again)


def one_run(number: int, due_at: int = NOW, reason: str | None = None) -> Run:
    return Run(name(number), due_at, 0, Envelope(due_at=due_at), reason)


def fire(store: Store) -> Op[Any]:
    """Runs and misses, some of which are filled in; one schedule is not as it was read, one is not there."""
    for which in ("a", "b", "changed"):
        store.schedule(which)
    missed = Skip(NOW - 900, NOW - 500, 5, "missed")
    store.run(schedules.fire([Firing("a", 1, NOW, skips=(missed,))], now=NOW))
    store.run(schedules.pause("changed", by="ann", why="so", now=NOW))
    runs = (one_run(1, NOW - 900), one_run(2, NOW), one_run(3, NOW + 5, QUEUED))
    left = Skip(NOW - 800, NOW - 500, 4, "missed")
    told = Told("schedule.backfilled", by="me", data='{"count": 1}')
    op = schedules.fire(
        [
            Firing("a", 2, NOW + 600_000, NOW, runs, (left,), (NOW - 900,), (told,)),
            Firing("b", 1, None, NOW, (one_run(4),)),
            Firing("changed", 1, None, NOW, (one_run(5),), (left,), (), (told,)),
            Firing("nobody", 1, None, NOW, (one_run(6),)),
        ],
        now=NOW + 5,
    )
    return in_order(op)


def fire_a_resume(store: Store) -> Op[Any]:
    """What fell into the pause is recorded, and nothing is fired."""
    store.schedule("s")
    store.run(schedules.pause("s", by="ann", why="so", now=NOW))
    told = Told("schedule.resumed", by="me", why="fixed")
    missed = Skip(NOW, NOW + 600_000, 2, "paused")
    return schedules.fire(
        [Firing("s", 2, NOW + 1_200_000, skips=(missed,), told=(told,), resume=True)], now=NOW + 700_000
    )


def fire_misses(store: Store) -> Op[Any]:
    store.schedule("s")
    return schedules.fire([Firing("s", 1, NOW + 600_000, skips=(Skip(NOW, NOW, 1, "overlap"),))], now=NOW + 5)


def unqueue(store: Store) -> Op[Any]:
    """Two wait for nobody, one for one that runs."""
    store.schedule("s", overlap=Overlap.QUEUE)
    store.schedule("busy", overlap=Overlap.QUEUE)
    store.fire("busy", id=name(1))
    for number, which in ((2, "s"), (3, "s"), (4, "busy")):
        store.now += 1
        store.fire(which, id=name(number), reason=QUEUED)
    return schedules.unqueue(now=NOW + 5)


def readopt(store: Store) -> Op[Any]:
    store.run(abandon(store))
    return schedules.readopt(["ours", "gone"])


def abandon(store: Store) -> Op[Any]:
    """One is ours, one is a living worker's, one nobody's, one never stood in code."""
    for which in ("ours", "theirs", "gone"):
        store.schedule(which, in_code=True)
    store.schedule("made by hand")
    store.run(ops.register("w", host="h", pid=1, queues=[], tasks=[], schedules=["theirs"], beat_ms=1000, now=NOW))
    return schedules.abandon(["ours"], now=NOW + 5)


def pause_schedule(store: Store) -> Op[Any]:
    store.schedule("s")
    return schedules.pause("s", by="me", why="a leak", now=NOW + 5)


def delete(store: Store) -> Op[Any]:
    add_run(store, 1, "s")
    return schedules.delete("s", by="me", why="old", now=NOW + 5)


def open_batch(store: Store, number: int = 500, **more: Any) -> Op[Any]:
    told = Callbacks(*(callback(which, id=name(number + n)) for n, which in enumerate(CALLBACKS, start=1)))
    return batches.open_batch(name(number), "b", callbacks=told, now=NOW, **more)


def open_batch_of_a_key(store: Store) -> Op[Any]:
    """It is there, and filled."""
    store.run(open_batch(store, 600, key="k"))
    store.add_as(name(600), [name(1), name(2)], filling=0)
    return open_batch(store, key="k")


def add_to_batch(store: Store) -> Op[Any]:
    store.run(open_batch(store))
    return batches.add(Terms("work", batch_id=name(500)), [NewJob(name(1), "1"), NewJob(name(2), "2")], now=NOW)


def add_keys_to_batch(store: Store, **more: Any) -> Op[Any]:
    """One is new, one is live elsewhere, one comes twice, one is taken by other work."""
    store.run(open_batch(store, key="k"))
    add(store, 9, key="live")
    jobs = [NewJob(name(n), '{"n":1}', key=key) for n, key in enumerate(("new", "live", "new"), start=1)]
    other = NewJob(name(4), "2", key="live")
    return batches.add(Terms("work", batch_id=name(500)), [*jobs, other], now=NOW, **more)


def add_to_sealed_batch(store: Store) -> Op[Any]:
    op = add_to_batch(store)
    store.seal(name(500))
    return op


def add_in_order(store: Store) -> Op[Any]:
    store.run(open_batch(store, key="k"))
    store.add_as(name(500), [name(1)], filling=0, keep_ms=0)
    terms = Terms("work", keep_ms=0, batch_id=name(500))
    return batches.add(terms, [NewJob(name(2), "1"), NewJob(name(3), "2")], filling=1, now=NOW)


def filled_further(answer: Added) -> Added:
    """Asked again, the batch is filled with what was added the first time; who holds which key is answered alike."""
    assert answer.filled is not None
    return Added(answer.filled + len(answer.jobs), answer.sealed, answer.jobs)


def seal(store: Store) -> Op[Any]:
    """Everything in it has ended, so that it is complete with this."""
    store.run(open_batch(store))
    store.add_as(name(500), [name(1), name(2)])
    for job in take(store, 2):
        store.kill(job)
    return batches.seal(name(500), now=NOW + 5)


def cancel_batch(store: Store) -> Op[Any]:
    """As it is sealed, but it is no success."""
    seal(store)
    return batches.cancel(name(500), by="me", why="wrong", now=NOW + 5)


def prune(what: str) -> Callable[[Store], Op[Any]]:
    def make(store: Store) -> Op[Any]:
        add(store, 1, key="k")
        add(store, 2)
        for job in take(store, 2):
            store.succeed(job, '"r"')
        step(store, name(2))
        dead(store, 3)
        store.query("insert into duly_fire (schedule, due_at, outcome, at) values ('s', 1, 'fired', 1)")
        store.query("insert into duly_batch (id, name, created_at, completed_at) values (?, 'b', 1, 1)", BATCH)
        store.query("insert into duly_lane (name, task, used_at) values ('t:k', 't', 1)")
        store.run(register(store))
        return ops.prune(what, now=NOW + (2 if what == "results" else 30) * DAY_MS)

    return make


SCENARIOS: dict[str, Scenario] = {
    "enqueue": Scenario(enqueue),
    "enqueue keys": Scenario(enqueue_keys),
    "enqueue key keep 0": Scenario(enqueue_key_keep_0),
    **{
        f"enqueue debounced {begun}": Scenario(partial(debounce, begun=begun))
        for begun in ("", "waiting", "running", "behind", "kept")
    },
    "claim": Scenario(claim),
    "recall": Scenario(recall),
    "extend": Scenario(extend),
    "progress": Scenario(progress),
    "heartbeat": Scenario(heartbeat),
    "finish plain": Scenario(finish_plain, already),
    "finish with more behind": Scenario(finish_with_more_behind, same),
    "finish mixed": Scenario(finish_mixed, already),
    "finish runs": Scenario(finish_runs, already),
    "finish keep 0": Scenario(finish_keep_0, gone),
    "finish keep 0 after a retry": Scenario(finish_keep_0_after_a_retry, gone),
    "release": Scenario(release, already),
    "finish put off": Scenario(finish_put_off, already),
    "rescue": Scenario(rescue),
    "promote": Scenario(promote, nothing_left),
    "park": Scenario(park, nothing_left),
    "wake": Scenario(wake, nothing_left),
    "expire": Scenario(expire),
    "cancel": Scenario(cancel),
    "retry": Scenario(retry),
    "hold": Scenario(hold),
    "replay": Scenario(replay),
    "resolve": Scenario(resolve),
    "purge": Scenario(purge),
    "pause": Scenario(pause),
    "resume": Scenario(resume),
    "shape.limit_queue": Scenario(limit_queue),
    "shape.note_depth": Scenario(note_depth, lambda answer: False),  # nobody asks who was first
    "shape.claim": Scenario(claim_shaped),
    "register": Scenario(register),
    "leave": Scenario(leave),
    "schedules.define": Scenario(define),
    "schedules.fire": Scenario(fire),
    "schedules.fire a resume": Scenario(fire_a_resume),
    "schedules.fire misses": Scenario(fire_misses),
    "schedules.unqueue": Scenario(unqueue, none_left),
    "schedules.readopt": Scenario(readopt, none_left),
    "schedules.abandon": Scenario(abandon),
    "schedules.pause": Scenario(pause_schedule),
    "schedules.delete": Scenario(delete),
    "batches.open_batch": Scenario(open_batch),
    "batches.open_batch of a key": Scenario(open_batch_of_a_key),
    "batches.add": Scenario(add_to_batch),
    "batches.add keys": Scenario(add_keys_to_batch),
    "batches.add to a sealed one": Scenario(add_to_sealed_batch),
    "batches.add in order": Scenario(add_in_order, filled_further),
    "batches.add keys in order": Scenario(partial(add_keys_to_batch, filling=0), filled_further),
    "batches.seal": Scenario(seal),
    "batches.cancel": Scenario(cancel_batch),
    **{f"prune {what}": Scenario(prune(what), nothing_left) for what in ops.PRUNABLE},
}


@pytest.fixture(params=["sqlite", "postgres", "d1"])
def twins(request: pytest.FixtureRequest, tmp_path) -> Iterator[tuple[Store, Store]]:
    """Two stores of a kind, on which no answer is lost unless a test says so."""
    kind, made = request.param, list[Store]()
    with ExitStack() as stack:
        if kind == "postgres":
            pool: Pool = request.getfixturevalue("postgres_pool")
            made += [PostgresStore(stack.enter_context(pool.lend(request.node))) for _ in range(2)]
        else:
            files, opened = request.getfixturevalue("files"), {"sqlite": SQLiteStore, "d1": D1Store}[kind]
            made += [opened(files.fresh(kind, tmp_path / f"{n}.db")) for n in range(2)]
        for store in made:
            stack.callback(store.close)
            store.driver._pauses = (0.0, 0.0, 0.0)
            if isinstance(store, D1Store):
                store.lose(None)
        yield made[0], made[1]


def lose(store: Store, *, moment: str = "after", times: int = 1) -> list[str]:
    """Break the connection at the next commits; returns the list of what was lost, which fills as it happens."""
    lost: list[str] = []
    if isinstance(store, D1Store):

        def count(call: int) -> bool:
            if len(lost) < times:
                lost.append(str(call))
                return True
            return False

        store.lose(count)
        return lost

    def hook(point: Point) -> None:
        if (point.moment, point.section) == (moment, "commit") and len(lost) < times:
            lost.append(point.op)
            broken = sqlite3.OperationalError if store.kind == "sqlite" else psycopg.OperationalError
            raise broken("the connection broke")

    store.driver.hook = hook
    return lost


def comparable(store: Store) -> Any:
    """Every row, with the ids that the database made itself left out: a rolled back number is never used again."""
    others = re.compile(r"(?!00000000-)[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
    rows = store.snapshot()
    rows["duly_event"] = [event[1:] for event in sorted(rows["duly_event"])]
    return json.loads(others.sub("made", json.dumps(rows)))


@pytest.mark.parametrize("which", SCENARIOS)
def test_j01_a_write_whose_answer_was_lost_is_repeated_without_harm(twins: tuple[Store, Store], which: str) -> None:
    scenario = SCENARIOS[which]
    calm, shaken = twins
    expected = calm.run(scenario.op(calm))
    op = scenario.op(shaken)
    lost = lose(shaken)
    answer = shaken.run(op)
    assert len(lost) == 1
    assert comparable(shaken) == comparable(calm)
    assert answer == scenario.answer(expected)


@pytest.mark.parametrize("twins", ["sqlite", "postgres"], indirect=True)  # D1 commits what it has been sent
@pytest.mark.parametrize("which", SCENARIOS)
def test_j01_a_write_that_failed_before_its_commit_is_repeated_too(twins: tuple[Store, Store], which: str) -> None:
    """Seen from outside this is the same: nobody can tell whether it was written."""
    calm, shaken = twins
    scenario = SCENARIOS[which]
    expected = calm.run(scenario.op(calm))
    op = scenario.op(shaken)
    lost = lose(shaken, moment="before")
    answer = shaken.run(op)
    assert len(lost) == 1
    assert comparable(shaken) == comparable(calm)
    assert answer == expected


@pytest.mark.parametrize(
    "which", ["enqueue", "enqueue keys", "claim", "finish mixed", "cancel", "schedules.fire", "batches.add"]
)
def test_j01_a_coroutine_retries_too(twins: tuple[Store, Store], which: str) -> None:
    scenario = SCENARIOS[which]
    calm, shaken = twins
    expected = asyncio.run(calm.driver.arun(scenario.op(calm)))
    op = scenario.op(shaken)
    lost = lose(shaken)
    answer = asyncio.run(shaken.driver.arun(op))
    assert len(lost) == 1
    assert comparable(shaken) == comparable(calm)
    assert answer == scenario.answer(expected)


def test_j01_three_lost_answers_are_retried_and_the_fourth_raises(twins: tuple[Store, Store]) -> None:
    store, _ = twins
    lost = lose(store, times=3)
    assert store.run(enqueue(store)) == [Enqueued(name(1)), Enqueued(name(2))]
    assert len(lost) == 3
    lost = lose(store, times=4)
    with pytest.raises(AnswerLost):
        store.run(ops.enqueue(Terms("work"), [NewJob(name(3), "1")], now=NOW))
    assert len(lost) == 4
    assert sorted(row[0] for row in store.query("select id from duly_job")) == [name(1), name(2), name(3)]


@pytest.mark.parametrize("asked", [Driver.run, lambda driver, op: asyncio.run(driver.arun(op))], ids=["run", "arun"])
def test_j01_a_keyless_job_of_keep_0_is_not_repeated(twins: tuple[Store, Store], asked: Callable[..., Any]) -> None:
    store, _ = twins
    lost = lose(store, times=9)
    with pytest.raises(EnqueueUnknown):
        asked(store.driver, ops.enqueue(Terms("work", keep_ms=0), [NewJob(name(1), "1")], now=NOW))
    assert len(lost) == 1


READS = {
    "attempts", "clock", "dead_list", "dead_metrics", "events", "expirable", "expired_leases", "get", "head",
    "listing", "next_due", "parked", "paused", "prunable", "queues", "settle", "steps", "why", "workers",
    "schedules.due", "schedules.fired_between", "schedules.fires", "schedules.listing", "schedules.live_runs",
    "schedules.next_fire", "schedules.one", "schedules.skipped_between",
    "batches.added_before", "batches.get", "batches.listing", "batches.rest",
    "shape.depth", "shape.limits",
}  # fmt: skip


def test_j01_no_write_is_missing_here() -> None:
    made = {
        f"{before}{found}"
        for before, module in (("", ops), ("schedules.", schedules), ("batches.", batches), ("shape.", queues))
        for found, function in inspect.getmembers(module, inspect.isfunction)
        if not found.startswith("_")
        and function.__module__.startswith(module.__name__)
        and str(inspect.signature(function).return_annotation).startswith("Op[")
    }  # fmt: skip
    assert made - READS - {"while_held"} == {which.split()[0] for which in SCENARIOS}
