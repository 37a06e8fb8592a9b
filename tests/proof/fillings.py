"""Batches of a simulated world: what they are given, and whether their counters and callbacks are what has happened."""

from __future__ import annotations

import json
import random
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

BATCHED = 0.4  # how many of the worlds have batches that a producer of their own fills
CALLBACKS: dict[str, Any] = {"on_complete": "complete", "on_success": "success", "on_first_dead": "first_dead"}


@dataclass(frozen=True)
class Filling:
    """One batch: which jobs it is given, in chunks, how often its producer is killed, and what people do with it."""

    name: str
    hows: tuple[str, ...]  # what its jobs do
    at: float
    chunk: int
    pace: float = 0.0  # how long its producer takes from one chunk to the next
    keyed: bool = True
    keep: bool = True
    ok_at: float = 1.0
    crashes: tuple[float, ...] = ()  # for how long it is filled until its producer is killed; the next one fills on
    given_up: bool = False  # after the last crash nobody fills on
    cancel_at: float | None = None
    replay_at: float | None = None


def made_up(chance: random.Random) -> tuple[Filling, ...]:
    """Make up the batches of a world: most have none, so that there is time for more of them."""
    if chance.random() >= BATCHED:
        return ()
    return tuple(_filling(chance, name) for name in "pq"[: chance.choice((1, 1, 2))])


def _filling(chance: random.Random, name: str) -> Filling:
    keyed = chance.random() < 0.7
    ill = chance.choice(((), ("bad",), ("bad", "bad", "gone", "flaky")))
    hows = ("good", "good", "good", "flaky", "slow", "snoozing", "parent", *ill)
    somebody = chance.random()
    return Filling(
        name,
        tuple(chance.choice(hows) for _ in range(chance.choice((0, 1, 2, 3, 5, 8)))),
        at=chance.uniform(0, 1),
        chunk=chance.choice((1, 2, 3)),
        pace=(pace := chance.choice((0.0, 0.0, 0.5))),
        keyed=keyed,
        keep=not keyed or chance.random() < 0.6,  # without a key and a trace nobody could ask again
        ok_at=chance.choice((1.0, 1.0, 0.5)),
        crashes=tuple(chance.uniform(0, 0.03 + 2 * pace) for _ in range(chance.choice((0, 1, 1, 3)))),
        given_up=chance.random() < 0.1,
        cancel_at=chance.uniform(0, 1.5) if somebody < 0.2 else None,
        replay_at=chance.uniform(0.5, 3.0) if somebody > 0.6 else None,
    )


@dataclass
class Fillings:
    """What producers, people and handlers know of the batches, and the judge who goes by it."""

    conn: sqlite3.Connection
    given: dict[str, Filling] = field(default_factory=dict)  # by id
    sealed: set[str] = field(default_factory=set)  # a producer was told so
    cancelled: set[str] = field(default_factory=set)  # by people
    parts: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))  # tokens under which a job returned
    good: dict[str, bool] = field(default_factory=dict)  # whether a batch was a success when it was complete
    called: dict[tuple[str | None, str], set[str]] = field(default_factory=lambda: defaultdict(set))

    def made_of(self, one: Filling) -> list[str]:
        """Give the ids of the batches that were made of a filling; more than one only without a key."""
        return [batch for batch, filling in self.given.items() if filling is one]

    def look(self) -> Iterator[str]:
        """See, after a commit, that what is counted is there, and that what is complete is so at once."""
        for name, still_open, live, full, complete, good, batch in self.conn.execute(LOOK).fetchall():
            # One that was complete may be open again: somebody has replayed what was dead.
            right = complete == (full and not live) or (complete and full)
            if still_open != live or not right:
                yield f"batch {name}: {still_open} open, {live} there, sealed: {full}, complete: {complete}"
            if complete:
                self.good.setdefault(batch, bool(good))

    def judge(self) -> Iterator[str]:
        """Judge all batches in the end."""
        for batch in self.rows():
            yield from (f"batch {batch['name']}: {wrong}" for wrong in self.judge_one(batch))

    def rows(self) -> list[dict[str, Any]]:
        """Give the batches as the database has them."""
        cursor = self.conn.execute("select * from duly_batch")
        return [dict(zip((column[0] for column in cursor.description), row, strict=True)) for row in cursor]

    def judge_one(self, batch: Mapping[str, Any]) -> Iterator[str]:
        """Hold the counters against the rows and what was given, and the callbacks against what has happened."""
        jobs = [_Job(*row) for row in self.conn.execute(JOBS, [batch["id"]])]
        yield from self._miscounted(batch, jobs)
        if (one := self.given.get(batch["id"])) is not None:
            yield from self._misfilled(one, batch, sorted(job.place for job in jobs if job.first and job.place >= 0))
            for job in jobs:
                if job.state == "succeeded" and job.task == "part" and not self.parts[job.id]:
                    yield f"{job.id} succeeded without a run"
        if batch["cancelled_at"] is not None and batch["id"] not in self.cancelled:
            yield "it is cancelled, and nobody wanted that"
        complete = batch["sealed_at"] is not None and not batch["open"]
        if (batch["completed_at"] is not None) != complete:
            yield f"sealed: {batch['sealed_at']}, complete: {batch['completed_at']}, {batch['open']} open"
        good, died = self.good.get(batch["id"], False), any(job.state == "dead" for job in jobs)
        yield from self._miscalled(batch, "on_complete", batch["completed_at"], due=complete)
        yield from self._miscalled(batch, "on_success", batch["completed_at"], due=good)
        yield from self._miscalled(batch, "on_first_dead", batch["first_dead_at"], due=died)

    def _miscounted(self, batch: Mapping[str, Any], jobs: list[_Job]) -> Iterator[str]:
        counted = {name: batch[name] for name in ("open", "succeeded", "partial", "dead", "cancelled")}
        states = Counter(job.state for job in jobs if not job.replayed)
        there = {name: states[name] for name in counted}
        one = self.given.get(batch["id"])
        if one is not None and not one.keep:  # what succeeded has left no trace, but for what handlers have added
            added = sum(job.first and job.place < 0 for job in jobs)
            there["succeeded"] = batch["filled"] + added - sum(there.values()) + states["succeeded"]
        if counted != there:
            yield f"counts {counted}, and there are {there}"

    def _misfilled(self, one: Filling, batch: Mapping[str, Any], places: list[int]) -> Iterator[str]:
        whole = batch["id"] in self.sealed
        if batch["sealed_at"] is None and (whole or batch["id"] in self.cancelled):
            yield "somebody was told that it is sealed"
        count = len(one.hows) if whole else batch["filled"] if one.keyed else len(places)
        if one.keyed and batch["filled"] != count:
            yield f"{batch['filled']} of {count} were filled in"
        if one.keep and places != list(range(count)):
            yield f"given {count} jobs, and there are {places}"

    def _miscalled(self, batch: Mapping[str, Any], which: str, at: int | None, *, due: bool) -> Iterator[str]:
        """See that a callback came to be once, with what makes it due and not before, and was run."""
        job, task = json.loads(batch[which])["id"], CALLBACKS[which]
        made = self.conn.execute(CALLS, [task, batch["id"]]).fetchall()
        called = self.called[batch["id"], task]
        if [(made_id, made_at) for made_id, made_at, _ in made] != ([(job, at)] if due else []):
            yield f"{which}, due: {due}, at {at}, is {made}"
        elif called - {job} or (made and made[0][2] == "succeeded" and not called):
            yield f"{which} is {made}, and {called} were run"


@dataclass(frozen=True)
class _Job:
    """An ended job of a batch."""

    id: str
    task: str
    state: str
    replayed: bool
    replay_of: str | None
    payload: str

    @property
    def first(self) -> bool:
        """Whether it was given to the batch, and is not a replay of one that was."""
        return self.task == "part" and self.replay_of is None

    @property
    def place(self) -> int:
        """Its place in the order of giving; -1 where a handler has added it."""
        return int(json.loads(self.payload)["place"])


LOOK = """
select name, open, (select count(*) from duly_job where batch_id = duly_batch.id), sealed_at is not null,
       completed_at is not null,
       succeeded >= ok_at * (succeeded + partial + dead + cancelled) and cancelled_at is null, id
  from duly_batch
"""
JOBS = """
select id, task, state, replayed_as is not null, replay_of, payload
  from duly_done
 where batch_id = ?
"""
CALLS = "select id, created_at, state from duly_done where task = ? and envelope ->> 'batch' = ?"
