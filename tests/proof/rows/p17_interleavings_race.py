"""A race as a value: its setup, one list of operations for each session, and what must hold after every order.

A race names its jobs by single letters: `enqueue("ab")` adds two, `cancel("ba")` cancels them in the other order. A
step makes an operation of the scene when the race begins. A promise maps sentences to whether they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, zip_longest
from typing import Any, TypeAlias

from duly.model import Change, Claimed, Failure, NewJob, Sighting, State, Terms, Verdict
from duly.store import ops
from duly.store.op import Finish, Held, Op
from duly.store.ops import Replay
from tests.contract.stores import NOW, PostgresStore, new_id
from tests.proof.enqueues import jobs_of
from tests.proof.interleaving import Outcome, Script

LEASE = 30_000
LATE = NOW + LEASE + 1  # the leases that began at NOW have expired
NO = Failure("builtins.ValueError", "no", "a traceback")
SUCCESS = Change(State.SUCCEEDED, result='"done"')
RETRY = Change(State.SCHEDULED, after_ms=1000, error=NO)
DEAD = Change(State.DEAD, error=NO)
CANCELLED = Change(State.CANCELLED, reason="no")
KEY = {"keys": "k"}


@dataclass
class Scene:
    """The tables a race begins with, and what its setup has made."""

    store: PostgresStore
    ids: dict[str, str] = field(default_factory=dict)  # of jobs, by name
    jobs: dict[str, Claimed] = field(default_factory=dict)  # those that the setup has claimed
    batch: str = ""
    dues: dict[str, Any] = field(default_factory=dict)  # schedules as a scheduler has read them
    runs: list[dict[str, str]] = field(default_factory=list)  # the ids by schedule, for each operation that fires
    repeated: Op[Any] | None = None  # the operation that is repeated
    tokens: Iterator[int] = field(default_factory=lambda: count(1001))

    def all(self, names: str) -> list[str]:
        return [self.ids[name] for name in names]

    def held(self, names: str) -> list[Held]:
        return [Held(self.jobs[name].id, self.jobs[name].token) for name in names]

    def do(self, *steps: Step) -> None:
        for step in steps:
            if isinstance(made := step(self), Op):
                self.store.run(made)


Step: TypeAlias = Callable[[Scene], Any]
Judge: TypeAlias = Callable[[Outcome], list[str]]
Promise: TypeAlias = "Callable[[After], dict[str, Any]]"


class After:
    """The answers and the tables after one order, with jobs by their names."""

    def __init__(self, scene: Scene, scripts: Sequence[Script], outcome: Outcome) -> None:
        self.scene, self.scripts, self.answers, self.before = scene, scripts, outcome.answers, outcome.before
        self.ended, self.rows, self.sessions = outcome.ended, outcome.rows, range(len(scripts))
        self._names = {job_id: name for name, job_id in scene.ids.items()}

    def answer(self, session: int) -> Any:
        """Return the last answer of a session."""
        return self.answers[session][-1]

    def got(self, *sessions: int) -> list[str]:
        """Return the names of the jobs in the last answers of these sessions."""
        answers = [one for session in sessions for one in getattr(self.answer(session), "jobs", self.answer(session))]
        return [self.name(one if isinstance(one, str) else one.id) for one in answers]

    def answer_for(self, session: int, name: str) -> Any:
        """Return what a session's last answer maps a job to."""
        return self.answer(session).get(self.scene.ids[name])

    def name(self, job_id: str) -> str:
        return self._names.get(job_id, job_id)

    def jobs(self, **fields: Any) -> list[str]:
        """Return the names of the live jobs with these values."""
        return [self.name(row["id"]) for row in self.rows("job", **fields)]

    def count(self, table: str, **fields: Any) -> int:
        return len(self.rows(table, **fields))

    def live(self, name: str) -> dict[str, Any]:
        """Return the row of a live job, or nothing."""
        return next(iter(self.rows("job", id=self.scene.ids.get(name, name))), {})

    def done(self, name: str) -> dict[str, Any]:
        """Return the row of an ended job, or nothing."""
        return next(iter(self.rows("done", id=self.scene.ids.get(name, name))), {})

    def values(self, name: str, *fields: str) -> tuple[Any, ...]:
        """Return values from the row of a live job."""
        return tuple(self.live(name).get(field) for field in fields)

    def state(self, name: str) -> str | None:
        return (self.live(name) or self.done(name)).get("state")

    def states(self, names: str) -> list[str | None]:
        return [self.state(name) for name in names]

    def holders(self) -> dict[str, str]:
        """Return the id of the job that holds each key."""
        return {row["key"]: row["job_id"] for row in self.rows("key")}

    @property
    def batch(self) -> dict[str, Any]:
        [row] = self.rows("batch")
        return row

    def enqueued(self, *sessions: int) -> list[tuple[dict[str, Any], Any]]:
        """Return the jobs that the first operations of these sessions add, each with its answer."""
        found = []
        for session in sessions:
            made, answers = self.scripts[session][0], self.answer(session)
            pairs = zip(made, answers, strict=True) if isinstance(made, tuple) else [(made, answers)]
            found += [pair for op, answer in pairs for pair in zip(jobs_of(op), answer, strict=True)]
        return found


class Race:
    """What two to four sessions do at the same time.

    `may_be_late`: the first try may come after its own repetition. Then it is refused, and its answer counts as lost.
    """

    def __init__(self, setup: Iterable[Step], sessions: Iterable[Any], *promises: Promise, may_be_late: bool = False):
        self.setup, self.promises, self.may_be_late = setup, promises, may_be_late
        self.sessions = [one if isinstance(one, tuple) else (one,) for one in sessions]

    def prepare(self, store: PostgresStore) -> tuple[list[Script], Judge]:
        """Set up the tables. Return the scripts of the sessions, and a function that lists the broken promises."""
        scene = Scene(store)
        scene.do(*self.setup)
        scripts = [[step(scene) for step in steps] for steps in self.sessions]

        def broken(outcome: Outcome) -> list[str]:
            after = After(scene, scripts, outcome)
            kept = [one for promise in self.promises for one in promise(after).items()]
            return [f"not kept: {one}; answers {outcome.answers!s:.300}" for one, holds in kept if not holds]

        return scripts, broken


RACES: dict[str, Race] = {}


def race(name: str, *parts: Any, **more: Any) -> None:
    """Add a race: its setup, its sessions, each one step or a tuple of steps, and its promises."""
    assert name not in RACES, name
    RACES[name] = Race(*parts, **more)


def deferred(make: Callable[..., Any]) -> Callable[..., Any]:
    """Take all arguments but the first now. The first is the scene of a step or the outcome of a promise."""
    return lambda *args, **more: lambda first: make(first, *args, **more)


# Steps that several kinds of races share


@deferred
def enqueue(
    scene: Scene,
    names: str = "",
    *,
    keys: str | None = None,
    lanes: str = "",
    payload: str = '{"n":1}',
    parent: str = "",
    now: int | None = NOW,
    **terms: Any,
) -> Op[Any]:
    """Enqueue jobs: one for each name, key or lane, whichever are most."""
    wanted = list(zip_longest(names, keys or "", lanes))
    jobs = [NewJob(new_id(), payload, key=key, lane=lane and f"work:{lane}") for _, key, lane in wanted]
    scene.ids.update({name: job.id for (name, _, _), job in zip(wanted, jobs, strict=True) if name})
    [held] = scene.held(parent) or [None]
    return ops.enqueue(Terms(**{"task": "work", **terms}), jobs, parent=held, now=now)


@deferred
def claims(scene: Scene, names: str) -> None:
    """Claim as many jobs as names, and remember them."""
    known = {job_id: name for name, job_id in scene.ids.items()}
    scene.jobs |= {known[job.id]: job for job in scene.store.claim(len(names))}


@deferred
def held(scene: Scene, names: str, *, keys: str | None = None, **terms: Any) -> None:
    """Enqueue jobs one by one, each claimed at once."""
    for name, key in zip_longest(names, keys or ""):
        scene.do(enqueue(name, keys=key, **terms), claims(name))


def dead(names: str, **terms: Any) -> Step:
    """Enqueue jobs that end dead."""
    return lambda scene: scene.do(held(names, **terms), *(finish(name, DEAD, now=NOW) for name in names))


@deferred
def repeats(scene: Scene, step: Step) -> None:
    """Make the operation that `FIRST` and `AGAIN` stand for."""
    scene.repeated = step(scene)


def FIRST(scene: Scene) -> Any:
    return scene.repeated


def AGAIN(scene: Scene) -> Any:
    """Repeat the operation, as after a lost answer."""
    assert scene.repeated is not None
    assert scene.repeated.again is not None
    return scene.repeated.again


def together(*steps: Step) -> Step:
    """Commit several operations as one."""
    return lambda scene: tuple(step(scene) for step in steps)


@deferred
def then(scene: Scene, step: Step) -> Any:
    """Make a step only if the answer before it was not empty."""
    made = step(scene)
    return lambda answers: made if answers[-1] else None


@deferred
def claim(scene: Scene, limit: int, **more: Any) -> Op[Any]:
    token = next(scene.tokens)
    return ops.claim("default", limit=limit, token=token, worker=f"w{token}", **{"now": NOW, **more})


@deferred
def rescue(scene: Scene, names: str) -> Op[Any]:
    jobs = [scene.jobs[name] for name in names]
    return ops.rescue([Sighting(job.id, job.token, job.lease_until, job.lease_ms, "w1") for job in jobs], now=LATE)


def finish(names: str, *changes: Change, now: int = LATE) -> Step:
    """Record a change of each job, or the same one of all."""
    wanted = list(zip(names, changes * len(names), strict=False))
    return lambda scene: ops.finish([Finish(scene.jobs[name], change) for name, change in wanted], now=now)


def finish_claimed(*changes: Change, now: int = LATE) -> Step:
    """Record changes of the jobs in the answer before, if it has any."""

    def made(answers: list[Any]) -> Op[Any] | None:
        ends = [Finish(job, change) for job, change in zip(answers[-1], changes * len(answers[-1]), strict=False)]
        return ops.finish(ends, now=now) if ends else None

    return lambda scene: made


def extend(names: str) -> Step:
    return lambda scene: ops.extend(scene.held(names), now=LATE)


def cancel(names: str, *, now: int = NOW) -> Step:
    return lambda scene: ops.cancel(scene.all(names), now=now)


def retry(names: str, *, now: int = NOW) -> Step:
    return lambda scene: ops.retry(scene.all(names), now=now)


@deferred
def replay(scene: Scene, names: str, *, new: str = "", now: int = NOW) -> Op[Any]:
    """Replay dead jobs, as jobs of new names."""
    replays = [Replay(one, new_id()) for one in scene.all(names)]
    scene.ids.update(zip(new, (one.new_id for one in replays), strict=False))
    return ops.replay(replays, by="p", why="again", now=now)


def hold(scene: Scene) -> Op[Any]:
    return ops.hold(by="p", why="restored", now=LATE)


# Promises that several kinds of races share


@deferred
def claimed_once(after: After, limit: int, sessions: int = 1) -> dict[str, Any]:
    """Promise that the claims of the first sessions keep their limit, and know what they hold."""
    pairs = [(after.got(number), after.jobs(token=1001 + number)) for number in range(sessions)]
    return {
        "no claim takes more than its limit": all(len(answer) <= limit >= len(has) for answer, has in pairs),
        "each claim answers the jobs it holds": all({*answer} == {*has} for answer, has in pairs),
        "each job is claimed once": all(row["attempt"] <= 1 for row in after.rows("job")),
    }


def recorded(names: str) -> Promise:
    return lambda after: {
        "the first session finishes each job": all(after.answer_for(0, name) == Verdict.RECORDED for name in names),
        "and no other": len(after.answer(0)) == len(names),
    }


def cancel_or_claim(names: str) -> Promise:
    """Promise that a cancel beside a claim answers the state of each job."""
    return lambda after: {
        "cancel answers the state of each job, which runs if it was claimed": all(
            after.answer_for(1, name) == after.state(name) == ("running" if name in after.got(0) else "cancelled")
            for name in names
        )
    }


@deferred
def requested(after: After, names: str) -> dict[str, Any]:
    """Promise that the log has one request for each running job that was cancelled, and no other."""
    requests = [row["job_id"] for row in after.rows("event", name="job.cancel_requested")]
    running = [one for name in names for one in after.scene.all(name) if after.answer_for(1, name) is State.RUNNING]
    return {"the log has one request for each running job that was cancelled": sorted(requests) == sorted(running)}
