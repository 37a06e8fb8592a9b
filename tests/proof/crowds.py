"""Jobs of a simulated world that are not free to run at once, and whether their caps, rates and orders are kept.

The judge keeps his own books: which handlers are at work in a lane, when its jobs were taken, and in which order they
came. Nothing of it is read from what the product counts by.
"""

from __future__ import annotations

import random
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CROWDED = 0.2  # how many of the worlds have such jobs
KEYS = ("a", "b")
BACKOFF = "400ms"
ATTEMPTS = 3


@dataclass(frozen=True)
class Kind:
    """What a task with lanes promises: at most so many at once, so many in so many seconds, one after the other."""

    options: Mapping[str, Any]
    most: int | None = None
    rate: tuple[int, float] | None = None
    ordered: bool = False
    keyed: bool = True


def _key(crowd: int, place: int, key: str) -> str:
    return key


KINDS = {
    "few": Kind({"cap": 2}, most=2, keyed=False),
    "few_each": Kind({"cap": 1, "cap_key": _key}, most=1),
    "paced": Kind({"rate": "2/s"}, rate=(2, 1.0), keyed=False),
    "paced_each": Kind({"rate": "2/700ms", "cap": 2, "cap_key": _key}, most=2, rate=(2, 0.7)),
    "line": Kind({"ordering_key": _key}, most=1, ordered=True),
    "line_on": Kind({"ordering_key": _key, "ordering_dead": "skip"}, most=1, ordered=True),
    "line_paced": Kind({"ordering_key": _key, "rate": "3/s"}, most=1, rate=(3, 1.0), ordered=True),
}


@dataclass(frozen=True)
class Crowd:
    """Jobs of one task that are enqueued in one go: the key of each, and what it does."""

    name: int
    task: str
    jobs: tuple[tuple[str, str], ...]
    at: float
    takes: float
    delay: float = 0.0
    lost: bool = False  # the enqueue is not answered at first, and asked again a second later
    cancel_at: float | None = None  # when a person cancels the first of them


def made_up(seed: int) -> tuple[Crowd, ...]:
    """Make up the crowds of a world: most have none, so that there is time for more of them."""
    chance = random.Random(f"crowds {seed}")
    if chance.random() >= CROWDED:
        return ()
    tasks = chance.sample(sorted(KINDS), chance.choice((1, 2, 2, 3)))
    return tuple(_crowd(chance, name, chance.choice(tasks)) for name in range(chance.randrange(2, 7)))


def _crowd(chance: random.Random, name: int, task: str) -> Crowd:
    hows = ("good", "good", "good", "flaky", "flaky", "snoozing", *(("bad",) if KINDS[task].ordered else ()))
    return Crowd(
        name,
        task,
        tuple((chance.choice(KEYS), chance.choice(hows)) for _ in range(chance.choice((1, 1, 2, 3, 4)))),
        at=chance.choice((0.0, 0.5, chance.uniform(0, 2))),
        takes=chance.choice((0.0, 0.1, 0.5, 2.0)),
        delay=chance.choice((0.0, 0.0, 0.0, 0.7)),
        lost=chance.random() < 0.15,
        cancel_at=chance.uniform(0, 2) if chance.random() < 0.15 else None,
    )


@dataclass
class _Lane:
    kind: Kind
    at_work: set[tuple[str, int]] = field(default_factory=set)  # jobs and the tokens under which handlers have begun
    taken: list[float] = field(default_factory=list)  # when jobs of it were taken
    line: list[str] = field(default_factory=list)  # in the order in which they came


@dataclass
class Crowds:
    """The books of one world."""

    conn: sqlite3.Connection
    offered: dict[str, Crowd] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    returned: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    unjust: list[str] = field(default_factory=list)
    jumped_at: list[float] = field(default_factory=list)  # when the clock was set forward
    _lanes: dict[str, _Lane] = field(default_factory=dict)
    _lane_of: dict[str, str] = field(default_factory=dict)
    _lost: set[tuple[str, int]] = field(default_factory=set)  # leases that were taken from their holders
    lifted: set[str] = field(default_factory=set)  # tasks whose rate a person has taken away
    _waits_since: dict[str, float] = field(default_factory=dict)

    # What is committed

    def came(self, jobs: Iterable[Mapping[str, Any]], task: str) -> None:
        """Note which jobs were enqueued, each at the end of its line."""
        for job in jobs:
            lane = job.get("lane")
            if lane is None or job["id"] in self._lane_of or not self._is_there(job["id"]):
                continue
            self._lane_of[job["id"]] = lane
            self._lanes.setdefault(lane, _Lane(KINDS[task])).line.append(job["id"])

    def came_back(self, replays: Iterable[Mapping[str, Any]]) -> None:
        """Note which dead jobs were replayed: in its place where others waited for it, else at the end of the line."""
        for replay in replays:
            lane = self._lane_of.get(replay["id"])
            if lane is None or replay["new_id"] in self._lane_of or not self._is_there(replay["new_id"]):
                continue
            self._lane_of[replay["new_id"]] = lane
            self.offered[replay["new_id"]] = self.offered[replay["id"]]
            line = self._lanes[lane].line
            blocks = "select 1 from duly_done where id = ? and state = 'dead' and ordering_dead = 'block'"
            if self.conn.execute(blocks, [replay["id"]]).fetchone():
                line[line.index(replay["id"])] = replay["new_id"]
            else:
                line.append(replay["new_id"])

    def _is_there(self, job: str) -> bool:
        return self.conn.execute("select 1 from duly_job where id = ?", [job]).fetchone() is not None

    def taken(self, jobs: Sequence[str], now: float) -> None:
        """See that what a claim takes comes in its order, and not too soon after what was taken before."""
        for job in jobs:
            if (name := self._lane_of.get(job)) is None:
                continue
            lane = self._lanes[name]
            lane.taken.append(now)
            self._see_rate(name, lane, now)
            if lane.kind.ordered:
                self._see_order(name, lane.line[: lane.line.index(job)], job)

    def _see_rate(self, name: str, lane: _Lane, now: float) -> None:
        if lane.kind.rate is None or self._task(lane) in self.lifted:
            return
        count, window_s = lane.kind.rate
        within = sum(now - at < window_s for at in lane.taken)
        if within > count and not any(now - at < window_s for at in self.jumped_at):
            self.unjust.append(f"{name}: {within} taken within {window_s} s")

    def _task(self, lane: _Lane) -> str:
        return self.offered[lane.line[0]].task

    def _see_order(self, name: str, before: Sequence[str], job: str) -> None:
        for other in before:
            if self._is_there(other):
                self.unjust.append(f"{name}: {job} was taken before {other}, which came before it")
            elif self.conn.execute(f"select 1 {BLOCKS} and id = ?", [other]).fetchone():
                self.unjust.append(f"{name}: {job} was taken although {other} is dead, which came before it")

    def rescued(self, job: str, token: int) -> None:
        """Note that a lease was taken from its holder, whose handler counts no more, wherever it is."""
        if (name := self._lane_of.get(job)) is not None:
            self._lost.add((job, token))
            self._lanes[name].at_work.discard((job, token))

    # What handlers do

    def began(self, job: str, token: int, now: float) -> None:
        """See, as a handler begins, that there are not too many at work in its lane."""
        name = self._lane_of[job]
        lane = self._lanes[name]
        if (job, token) in self._lost:  # and it does not know yet
            return
        lane.at_work.add((job, token))
        if lane.kind.most is not None and len(lane.at_work) > lane.kind.most:
            self.unjust.append(f"{name}: {len(lane.at_work)} at work at {now:.3f} s: {sorted(lane.at_work)}")

    def ended(self, job: str, token: int) -> None:
        """Note that a handler came to an end. One whose process was killed has not: its lease stands."""
        self._lanes[self._lane_of[job]].at_work.discard((job, token))

    # People

    def in_the_way(self, now: float) -> list[tuple[str, int]]:
        """Give the dead jobs that hold up others for some time, each with how often it was replayed."""
        found = self.conn.execute(f"select id, replay_count {BLOCKS} and {WAITED_FOR}").fetchall()
        return [(job, count) for job, count in found if self._waited(job, now) >= 1.0]

    def starved(self, now: float) -> set[str]:
        """Give the tasks with a rate of which a suspect waits for long.

        A worker that runs suspects in itself claims one to see that there is one, gives it back, and claims it again
        once it is emptied. Each time takes a permit, and where many workers look there may be none left.
        """
        found = self.conn.execute(
            "select id, task from duly_job where state = 'ready' and suspect and lane is not null"
        )
        rated = [(job, task) for job, task in found.fetchall() if KINDS[task].rate and task not in self.lifted]
        return {task for job, task in rated if self._waited(job, now) >= 8.0}

    def _waited(self, job: str, now: float) -> float:
        return now - self._waits_since.setdefault(job, now)

    # The verdict

    def judge(self) -> Iterator[str]:
        """Judge in the end what became of each."""
        yield from self.unjust
        done = {row[0]: row[1:] for row in self.conn.execute(f"select id, task, state, token from duly_done {LANED}")}
        live = {row[0] for row in self.conn.execute(f"select id from duly_job {LANED}")}
        yield from (f"lost: {job} {self.offered[job]}" for job in self.acknowledged - {*done, *live})
        yield from (f"unexpected: {job}" for job in done if job not in self.offered)
        for job, (_, state, token) in done.items():
            if state == "succeeded" and token not in self.returned[job]:
                yield f"succeeded without a run: {job}"


LANED = "where task in ({})".format(", ".join(f"'{task}'" for task in sorted(KINDS)))
BLOCKS = """
  from duly_done
 where state = 'dead' and ordering_dead = 'block' and replayed_as is null and resolved_at is null
"""
WAITED_FOR = "exists (select 1 from duly_job where duly_job.lane = duly_done.lane)"
