"""P2: what duly was told is done, played back to every point at which a crash could have cut it short.

A workload runs every kind of operation on the real driver while the disk is recorded. Whatever the driver answers is
written down with the length of the record at that moment. Then the file is rebuilt at each point of the record and
opened as after a crash: what was answered by then must be there, what was asked and not yet answered may be there whole
or not at all, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sqlite3
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from duly.model import QUEUED, Catchup, Change, Claimed, Failure, NewJob, Overlap, State, Terms
from duly.rules import keys
from duly.rules.firing import plan
from duly.rules.timing import Mode, Timing
from duly.store import batches, ops, schedules
from duly.store.batches import Added
from duly.store.group_commit import Waiting, rows_of
from duly.store.op import Finish, Held, Op
from duly.store.ops import Replay
from duly.store.schedules import Definition
from duly.store.sqlite.driver import SQLiteDriver
from tests.proof.disk import Disk, Event, lay_down

BEGINNING_MS = 1_800_000_000_000
LEASE_MS = 30_000
SHORT_KEEP_MS = 60_000
NAME = "jobs.db"
TABLES = (
    "duly_meta", "duly_job", "duly_done", "duly_key", "duly_attempt", "duly_step", "duly_batch", "duly_schedule",
    "duly_fire", "duly_queue", "duly_worker", "duly_event",
)  # fmt: skip
CALLBACK: dict[str, Any] = {
    "task": "callback", "queue": "default", "priority": 0, "max_attempts": 3, "lease_ms": LEASE_MS,
    "keep_ms": 86_400_000, "result_ttl_ms": 1000,
}  # fmt: skip

RUN_TERMS: dict[str, Any] = {
    "queue": "default", "priority": 1, "max_attempts": 2, "lease_ms": LEASE_MS, "keep_ms": 86_400_000,
    "result_ttl_ms": 1000, "expires_ms": None, "on_dead": None,
}  # fmt: skip

Content: TypeAlias = Mapping[str, Sequence[tuple[Any, ...]]]
# What a caller knows of a job by the answers: "live", "running", how it ended, or None where nothing is left.
Told: TypeAlias = dict[str, str | None]


@dataclass(frozen=True)
class Answer:
    """One commit: when it was asked, when it was answered, what was told and what the tables then held."""

    name: str
    asked_at: int
    at: int
    told: Told
    content: Content


@dataclass
class Recording:
    """What one workload did to the disk and what it was told."""

    log: list[Event]
    answers: list[Answer]
    files: dict[str, bytes]  # as they really were in the end
    library: str  # the SQLite that wrote them


def record(seed: int, steps: int, folder: Path) -> Recording:
    """Run a workload in an empty folder and record it."""
    from tests.proof.vfs import LIBRARY, recording  # not above: who only judges needs no second SQLite library

    with recording(seed) as log:
        workload = Workload(folder / NAME, log, random.Random(seed))
        try:
            workload.run(steps)
            files = {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith("-shm")}
            return Recording(list(log), workload.answers, files, LIBRARY)
        finally:
            workload.close()


class Workload:
    """Callers and workers of one database, one operation after the other."""

    def __init__(self, path: Path, log: list[Event], chance: random.Random) -> None:
        self._log = log
        self._chance = chance
        self._now = BEGINNING_MS
        self._new_id = keys.Ids(lambda: self._now * 1_000_000, chance.randbytes)
        self._cuts = False
        self._driver = SQLiteDriver(path)
        self._other: Any = None  # a second connection: checkpoints, a caller's own transaction, looking
        self.answers: list[Answer] = []
        self._leased: dict[str, Claimed] = {}
        self._asked: set[str] = set()  # to cancel, while they ran
        self._known: Told = {}
        self._fresh: Told = {}  # what the operation under way was told
        self._prunable_at: dict[str, int] = {}
        self._keeps: dict[str, int] = {}
        self._filled: dict[str, int] = {}  # batches that are not sealed, and how far those are that are filled in order

    def run(self, steps: int) -> None:
        """Do what there is to do, in a random order that meets every operation."""
        self._commit("open", self._open)
        kinds = [*_OFTEN * 4, *_SELDOM]
        for number in range(steps):
            self._now += self._chance.randrange(0, 4000)
            kind = _START[number] if number < len(_START) else self._chance.choice(kinds)
            if kind == "checkpoint":
                self._checkpoint()
            else:
                self._commit(kind, getattr(self, f"_{kind}"))

    def close(self) -> None:
        """Close the connections."""
        if self._other is not None:
            self._other.close()
        self._driver.close()

    def _commit(self, name: str, work: Any) -> None:
        asked_at, self._fresh = len(self._log), {}
        work()
        self._known.update(self._fresh)
        self.answers.append(Answer(name, asked_at, len(self._log), self._fresh, read(self._other)))

    def _open(self) -> None:
        self._driver.run(ops.clock())
        self._other = self._driver.connect()

    def _checkpoint(self) -> None:
        """Have the log begin anew, in turns over what it held and cut to nothing."""
        self._cuts = not self._cuts
        self._other.execute(f"pragma wal_checkpoint({'truncate' if self._cuts else 'restart'})").fetchall()

    # What callers do.

    def _plain(self) -> None:
        self._driver.run(self._enqueue(self._chance.randint(1, 4)))

    def _delayed(self) -> None:
        self._driver.run(self._enqueue(1, delay_ms=self._chance.randint(1, 20_000), expires_ms=10_000))

    def _fleeting(self) -> None:
        self._driver.run(self._enqueue(1, keep_ms=0))

    def _fatal(self) -> None:
        self._driver.run(self._enqueue(1, max_attempts=1, on_dead=json.dumps(CALLBACK)))

    def _keyed(self) -> None:
        wanted = [f"key {number}" for number in self._chance.sample(range(12), 2)]
        jobs = [self._job(key) for key in wanted]
        terms = self._terms(task="keyed", key_ttl_ms=20_000)
        answers = self._driver.run(ops.enqueue(terms, jobs, now=self._now))
        for job, answer in zip(jobs, answers, strict=True):
            self._fresh[job.id] = None if answer.deduplicated else "live"
            self._keeps[job.id] = terms.keep_ms

    def _batch(self) -> None:
        """Open, fill and seal a batch as a caller does in his own transaction."""
        batch = self._new_id()
        self._other.execute("begin immediate")
        self._driver.run_on(self._other, self._opening(batch))
        self._driver.run_on(self._other, self._adding(batch))
        self._driver.run_on(self._other, batches.seal(batch, now=self._now))
        self._other.execute("commit")

    def _open_batch(self) -> None:
        """Open a batch, half of them with a key."""
        batch = self._new_id()
        key = self._chance.choice([None, f"batch {batch}"])
        self._driver.run(self._opening(batch, key))
        self._filled[batch] = batches.ANYWHERE if key is None else 0

    def _fill(self) -> None:
        """Add to a batch that is not sealed; to one with a key in order."""
        for batch in self._chance.sample(sorted(self._filled), min(1, len(self._filled))):
            added = self._driver.run(self._adding(batch, self._filled[batch]))
            if self._filled[batch] != batches.ANYWHERE:
                self._filled[batch] += len(added.jobs)

    def _seal(self) -> None:
        for batch in self._chance.sample(sorted(self._filled), min(1, len(self._filled))):
            self._driver.run(batches.seal(batch, now=self._now))
            del self._filled[batch]

    def _undone(self) -> None:
        """Enqueue in a caller's transaction that is rolled back."""
        self._other.execute("begin immediate")
        op = self._enqueue(2)
        self._driver.run_on(self._other, op)
        self._other.execute("rollback")
        self._fresh = dict.fromkeys(self._fresh)

    def _together(self) -> None:
        """Have the writer take several operations at once and commit them as one."""
        writer = self._driver._open()
        extend = ops.extend([Held(job.id, job.token) for job in self._leased.values()], now=self._now)
        wanted = [self._enqueue(1), extend, self._enqueue(2)]
        with writer._wake:  # it finds all of them when it wakes
            waiting = [Waiting(op, Future()) for op in wanted]
            assert all(writer.submit(one) for one in waiting)
        for one in waiting:
            rows_of(one.future.result())

    def _cancel(self) -> None:
        ids = self._some("live", 1) + self._some("running", 1)
        for job, state in self._driver.run(ops.cancel(ids, by="ada", why="not needed", now=self._now)).items():
            if state is State.RUNNING:
                self._asked.add(job)
            else:
                self._ended(job, state.value)

    def _retry(self) -> None:
        self._driver.run(ops.retry(self._some("live", 3), by="ada", now=self._now))

    def _replay(self) -> None:
        replays = [Replay(job, self._new_id()) for job in self._some("dead", 2)]
        for replayed in self._driver.run(ops.replay(replays, by="ada", now=self._now)):
            if replayed.new_id is not None and replayed.first:
                self._fresh[replayed.new_id] = "live"
                self._keeps[replayed.new_id] = self._keeps.get(replayed.id, CALLBACK["keep_ms"])

    def _resolve(self) -> None:
        self._driver.run(ops.resolve(self._some("dead", 1), by="ada", why="seen", now=self._now))

    def _purge(self) -> None:
        for job in self._driver.run(ops.purge(self._some("dead", 1), by="ada", now=self._now)):
            self._fresh[job] = None

    def _pause(self) -> None:
        self._driver.run(ops.pause("task", "nobody", by="ada", why="rest", now=self._now))

    def _resume(self) -> None:
        self._driver.run(ops.resume("task", "nobody", by="ada", why="go", now=self._now))

    def _define(self) -> None:
        """Define a schedule, or change one as it was read."""
        name = self._chance.choice("xyz")
        mode = self._chance.choice((Mode.RATE, Mode.RATE, Mode.DELAY))
        there = self._driver.run(schedules.listing(names=[name], now=self._now))
        revision = there[0].record.revision + 1 if there else 1
        overlap = self._chance.choice((Overlap.ALLOW, Overlap.SKIP, Overlap.QUEUE))
        definition = Definition(
            name=name,
            task="recurring",
            timing=Timing(mode, "3s", "UTC", 3000, self._now),
            catchup=self._chance.choice(tuple(Catchup)),
            grace_ms=None,
            overlap=overlap,
            jitter_ms=0,
            pause_after=2,
            terms=json.dumps(RUN_TERMS),
            payload="{}",
            envelope=None,
            in_code=False,
            revision=revision,
            next_at=self._now + 3000,
        )
        assert self._driver.run(schedules.define([definition], now=self._now)) == [name]

    def _fire(self) -> None:
        """Fire what is due, as a worker does."""
        dues = self._driver.run(schedules.due(limit=10, now=self._now))
        firings = [plan(due, new_id=self._new_id, chance=self._chance.random) for due in dues]
        written = self._driver.run(schedules.fire(firings, now=self._now)) if firings else []
        assert sorted(written) == sorted(firing.name for firing in firings)
        for run in (run for firing in firings for run in firing.runs):
            self._fresh[run.id] = "live"
            self._keeps[run.id] = RUN_TERMS["keep_ms"]

    def _rest(self) -> None:
        self._driver.run(schedules.pause(self._chance.choice("xyz"), by="ada", why="rest", now=self._now))

    def _drop(self) -> None:
        self._driver.run(schedules.delete(self._chance.choice("xyz"), by="ada", why="old", now=self._now))

    # What workers do.

    def _claim(self) -> None:
        for alone in (False, True):
            token = self._chance.randrange(1, 2**53)
            limit = self._chance.randint(1, 4)
            op = ops.claim("default", limit=limit, token=token, worker="w1", alone=alone, now=self._now)
            claimed = self._driver.run(op)
            for job in claimed:
                self._leased[job.id] = job
                self._keeps[job.id] = job.keep_ms
                self._fresh[job.id] = "running"
            if claimed:
                return

    def _finish(self) -> None:
        self._end([(job, Change(State.SUCCEEDED, result=self._result())) for job in self._leases(3)])

    def _fail(self) -> None:
        self._end([(job, self._failure(job)) for job in self._leases(1)])

    def _snooze(self) -> None:
        later = Change(State.SCHEDULED, after_ms=5000, give_back_attempt=True)
        self._end([(job, later) for job in self._leases(1)])

    def _mixed(self) -> None:
        """End a turn of jobs that went well and badly."""
        leases = self._leases(4)
        good, bad = leases[::2], leases[1::2]
        self._end([(job, Change(State.SUCCEEDED)) for job in good] + [(job, self._failure(job)) for job in bad])

    def _release(self) -> None:
        self._end([(job, Change(State.READY, give_back_attempt=True)) for job in self._leases(1)])

    def _progress(self) -> None:
        for job in self._leases(1):
            self._driver.run(ops.progress(Held(job.id, job.token), self._chance.random() * 100, "on its way"))

    def _rescue(self) -> None:
        """Find that a worker has been silent for longer than its leases, and take what it held."""
        self._now += LEASE_MS + 1
        seen = self._driver.run(ops.expired_leases(now=self._now))
        for job, state in self._driver.run(ops.rescue(seen, now=self._now)).items():
            self._leased.pop(job, None)
            self._ended(job, state.value) if state.ended else self._fresh.update({job: "live"})

    def _promote(self) -> None:
        self._driver.run(ops.promote("default", now=self._now))

    def _expire(self) -> None:
        self._now += 10_000
        late = self._driver.run(ops.expirable(now=self._now))
        for job in self._driver.run(ops.expire(late, now=self._now)):
            self._ended(job, "cancelled")

    def _register(self) -> None:
        op = ops.register("w1", host="h", pid=1, queues=["default"], tasks=["work"], beat_ms=1000, now=self._now)
        self._driver.run(op)

    def _leave(self) -> None:
        self._driver.run(ops.leave("w1"))

    def _prune(self) -> None:
        self._now += SHORT_KEEP_MS // 2
        self._driver.run(ops.prune("done", now=self._now))
        for job in [job for job, at in self._prunable_at.items() if at <= self._now]:
            del self._prunable_at[job]
            self._fresh[job] = None

    def _forget(self) -> None:
        """Prune what else there is, of which one kind is at hand."""
        what = self._chance.choice([name for name in ops.PRUNABLE if name != "done"])
        self._driver.run(ops.prune(what, now=self._now))

    # How they do it.

    def _enqueue(self, count: int, **terms: Any) -> Op[Any]:
        jobs = [self._job() for _ in range(count)]
        wanted = self._terms(**terms)
        self._fresh |= {job.id: "live" for job in jobs}
        self._keeps |= {job.id: wanted.keep_ms for job in jobs}
        return ops.enqueue(wanted, jobs, now=self._now)

    def _opening(self, batch: str, key: str | None = None) -> Op[Any]:
        callbacks = {
            name: json.dumps({**CALLBACK, "id": self._new_id(), "payload": "{}", "envelope": None})
            for name in ("on_complete", "on_success", "on_first_dead")
        }
        return batches.open_batch(batch, "b", key=key, callbacks=batches.Callbacks(**callbacks), now=self._now)

    def _adding(self, batch: str, filling: int = batches.ANYWHERE) -> Op[Added]:
        count = self._chance.randint(1, 3)
        ids = [self._new_id() if filling < 0 else keys.id_in(batch, filling + n) for n in range(count)]
        terms = self._terms(batch_id=batch, keep_ms=86_400_000, max_attempts=2)
        self._fresh |= dict.fromkeys(ids, "live")
        self._keeps |= dict.fromkeys(ids, terms.keep_ms)
        jobs = [NewJob(job_id, json.dumps({"text": "x" * self._size()})) for job_id in ids]
        return batches.add(terms, jobs, filling=filling, now=self._now)

    def _job(self, key: str | None = None) -> NewJob:
        return NewJob(self._new_id(), json.dumps({"text": "x" * self._size()}), key=key)

    def _size(self) -> int:
        """Choose a length; some do not fit into one page."""
        return self._chance.choice([10, 40, 200, 1000, 6000])

    def _terms(self, **terms: Any) -> Terms:
        most = self._chance.choice([1, 2, 5])
        keep_ms = self._chance.choice([SHORT_KEEP_MS, 86_400_000])
        return Terms(**{"task": "work", "lease_ms": LEASE_MS, "max_attempts": most, "keep_ms": keep_ms, **terms})

    def _result(self) -> str | None:
        return self._chance.choice([None, json.dumps("r" * self._size())])

    def _failure(self, job: Claimed) -> Change:
        error = Failure("builtins.ValueError", "no", "a traceback of " + "some " * self._size())
        if job.attempt >= job.max_attempts:
            return Change(State.DEAD, error=error)
        return Change(State.SCHEDULED, after_ms=3000, error=error)

    def _some(self, what: str, count: int) -> list[str]:
        found = [job for job, told in self._known.items() if told == what]
        return self._chance.sample(found, min(count, len(found)))

    def _leases(self, most: int) -> list[Claimed]:
        held = list(self._leased.values())
        return self._chance.sample(held, min(most, len(held)))

    def _end(self, ends: list[tuple[Claimed, Change]]) -> None:
        if not ends:
            return
        verdicts = self._driver.run(ops.finish([Finish(job, change) for job, change in ends], now=self._now))
        for job, change in ends:
            assert verdicts[job.id] == "recorded", (job, verdicts)
            del self._leased[job.id]
            if change.state.ended:
                self._ended(job.id, change.state.value)
            elif job.id in self._asked:
                self._ended(job.id, "cancelled")
            else:
                self._fresh[job.id] = "live"

    def _ended(self, job: str, how: str) -> None:
        keep_ms = self._keeps[job]
        self._fresh[job] = None if how == "succeeded" and keep_ms == 0 else how
        if how != "dead" and self._fresh[job] is not None:
            self._prunable_at[job] = self._now + keep_ms


# What a workload begins with, so that a short one meets the most important; then what comes at random.
_START = (
    "plain", "keyed", "batch", "claim", "finish", "fatal", "checkpoint", "claim", "mixed", "keyed", "claim", "fail",
    "rescue", "checkpoint", "cancel", "claim", "snooze", "replay", "together", "claim", "finish", "define", "define",
    "fire", "claim", "rest", "finish", "open_batch", "fill", "fill", "claim", "finish", "seal", "claim", "mixed",
)  # fmt: skip
_OFTEN = ("plain", "keyed", "fatal", "claim", "claim", "finish", "mixed", "fail", "fire")
_SELDOM = (
    "delayed", "fleeting", "batch", "open_batch", "open_batch", "fill", "fill", "fill", "fill", "seal", "seal",
    "undone", "together", "cancel", "cancel", "retry", "replay", "replay", "resolve", "purge", "pause", "resume",
    "snooze", "release", "progress", "rescue", "promote", "expire", "register", "leave", "prune", "prune", "forget",
    "define", "define", "define", "rest", "drop", "checkpoint", "checkpoint", "checkpoint", "checkpoint",
)  # fmt: skip


def read(conn: Any) -> Content:
    """Read all rows of all tables; where there are none of ours yet, nothing."""
    if not conn.execute("select 1 from sqlite_master where name = 'duly_meta'").fetchall():
        return {}
    return {table: conn.execute(f"select * from {table}").fetchall() for table in TABLES}


ENDED = "(select count(*) from duly_done where batch_id = duly_batch.id and replayed_as is null and state = '{}')"
NOT_PURGED = "not exists (select 1 from duly_event where name = 'job.purged')"
SPEC = "(case which when 1 then on_complete else on_first_dead end)"
# What no operation leaves behind, whatever else has happened: each answers with the rows that are wrong.
HALF_DONE = {
    "a job is live and finished": "select id from duly_job where id in (select id from duly_done)",
    "a job has ended and was not moved out": "select id from duly_job where finished_at is not null",
    "a live job with a key does not have the key": """
        select id from duly_job where key is not null and not exists (
            select 1 from duly_key
             where duly_key.task = duly_job.task and duly_key.key = duly_job.key and job_id = id and state = 'live')""",
    "a live key is that of no live job": """
        select job_id from duly_key where state = 'live' and not exists (
            select 1 from duly_job
             where id = job_id and duly_job.task = duly_key.task and duly_job.key = duly_key.key)""",
    "the key of a live job says that it succeeded": """
        select job_id from duly_key join duly_job on id = job_id where duly_key.state = 'succeeded'""",
    "the counters of a batch are not those of its jobs": f"""
        select id from duly_batch
         where open <> (select count(*) from duly_job where batch_id = duly_batch.id)
            or succeeded <> {ENDED.format("succeeded")}
            or cancelled <> {ENDED.format("cancelled")}
            or dead < {ENDED.format("dead")}
            or dead > {ENDED.format("dead")} and {NOT_PURGED}""",
    "a batch was given more or less than it has": f"""
        select id from duly_batch
         where key is not null and {NOT_PURGED} and filled <>
               (select count(*) from duly_job where batch_id = duly_batch.id and replay_of is null)
               + (select count(*) from duly_done where batch_id = duly_batch.id and replay_of is null)""",
    "a batch is complete and does not say so, or says so and was never sealed": """
        select id from duly_batch
         where sealed_at is not null and open = 0 and completed_at is null or sealed_at is null and completed_at >= 0
            or dead > 0 and first_dead_at is null""",
    "a batch is complete, or has its first dead, and its callback is not there": f"""
        select duly_batch.id
          from duly_batch
         cross join (select 1 as which union all select 2)
         where case which when 1 then completed_at else first_dead_at end is not null and {NOT_PURGED}
           and not exists (select 1 from duly_job where id = {SPEC} ->> 'id')
           and not exists (select 1 from duly_done where id = {SPEC} ->> 'id')""",
    "a batch is not complete, and its callback is there": """
        select duly_batch.id
          from duly_batch
         where completed_at is null
           and (on_complete ->> 'id' in (select id from duly_job union all select id from duly_done)
                or on_success ->> 'id' in (select id from duly_job union all select id from duly_done))""",
    "a job is dead and its callback is not there": """
        select id from duly_done as dead
         where state = 'dead' and on_dead is not null
           and not exists (select 1 from duly_job where payload ->> 'job_id' = dead.id)
           and not exists (select 1 from duly_done where payload ->> 'job_id' = dead.id)""",
    "a job is dead and its last attempt is not there": """
        select id from duly_done where state = 'dead' and not exists (
            select 1 from duly_attempt where job_id = id and duly_attempt.attempt = duly_done.attempt)""",
    "an attempt is left of a job that has gone": """
        select job_id from duly_attempt
         where job_id not in (select id from duly_job) and job_id not in (select id from duly_done)""",
    "a job has ended badly and the log does not say so": """
        select id from duly_done where state <> 'succeeded' and not exists (
            select 1 from duly_event where job_id = duly_done.id and name = 'job.' || state)""",
    "a job was replayed and nothing says as what": """
        select id from duly_job where replay_of is not null and not exists (
            select 1 from duly_done where duly_done.id = duly_job.replay_of and replayed_as = duly_job.id)
           and exists (select 1 from duly_done where duly_done.id = duly_job.replay_of)""",
    "a run that no fire tells of": """
        select id from (select id, schedule, replay_of from duly_job
                        union all select id, schedule, replay_of from duly_done)
         where schedule is not null and replay_of is null
           and id not in (select job_id from duly_fire where job_id is not null)""",
    "queued runs wait for nobody": f"""
        select schedule from duly_job
         where schedule in (select name from duly_schedule)
         group by schedule having count(*) = count(*) filter (where reason is '{QUEUED}')""",
    "a job is marked to be pruned and still there": "select id from duly_done where prune_at = -1",
}


@dataclass(frozen=True)
class Wrong:
    """What is wrong with one image."""

    kind: str  # "corrupt", "half-done" or "lost"
    text: str
    point: int
    crash: str


@dataclass
class Tally:
    """What came out of many images."""

    library: str
    events: int
    commits: int
    wrong: list[Wrong] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)  # of operations
    crashes: Counter[str] = field(default_factory=Counter)  # images by the crash they come from

    @property
    def images(self) -> int:
        """How many files were rebuilt and judged."""
        return self.crashes.total()


class Judge:
    """Opens images and says what is wrong with them."""

    def __init__(self, recording: Recording, folder: Path) -> None:
        self._answers = recording.answers
        self._folder = folder
        self._told: Told = {}
        self._answered = 0
        self._good: deque[Content] = deque(maxlen=3)

    def judge(self, image: dict[str, bytes], point: int) -> tuple[str, str] | None:
        """Say what is wrong with an image of this point; points come in their order."""
        self._learn(point)
        lay_down(image, self._folder)
        conn = sqlite3.connect(self._folder / NAME, isolation_level=None)
        try:
            [[verdict]] = conn.execute("pragma integrity_check(1)").fetchall()
            if verdict != "ok":
                return "corrupt", verdict
            content = read(conn)
            return self._half_done(conn, content) or self._lost(content) or self._strange(content)
        except sqlite3.DatabaseError as error:
            return "corrupt", str(error)
        finally:
            conn.close()

    def _learn(self, point: int) -> None:
        while self._answered < len(self._answers) and self._answers[self._answered].at <= point:
            self._told |= self._answers[self._answered].told
            self._answered += 1

    def _half_done(self, conn: sqlite3.Connection, content: Content) -> tuple[str, str] | None:
        """Look for what no operation leaves behind. The same rows are not looked at twice."""
        if not content or any(content == good for good in self._good):
            return None
        for what, sql in HALF_DONE.items():
            rows = conn.execute(sql).fetchall()
            if rows:
                return "half-done", f"{what}: {rows[:3]}"
        self._good.append(content)
        return None

    def _lost(self, content: Content) -> tuple[str, str] | None:
        """Hold what callers were told against what is there, but for what is under way."""
        if not content:
            return ("lost", "all tables") if self._answered else None
        under_way = self._answers[self._answered].told if self._answered < len(self._answers) else {}
        found = _states(content)
        for job, told in self._told.items():
            if found.get(job) != told and (job not in under_way or found.get(job) != under_way[job]):
                return "lost", f"job {job} is {found.get(job)}, and callers were told {told}"
        return None

    def _strange(self, content: Content) -> tuple[str, str] | None:
        """Hold every row against what was there before the operation under way, and after it."""
        if content in self._expected():
            return None
        if any(content == answer.content for answer in self._answers[: self._answered]):
            return "lost", f"it is as it was before {self._answers[self._answered - 1].name!r} was answered"
        return "half-done", "it is neither as it was before the operation under way nor as it was after"

    def _expected(self) -> list[Content]:
        last = self._answers[self._answered - 1].content if self._answered else {}
        return [last, *(answer.content for answer in self._answers[self._answered : self._answered + 1])]


def _states(content: Content) -> dict[str, str]:
    found = {row[0]: "running" if row[4] == "running" else "live" for row in content["duly_job"]}
    return {row[0]: row[4] for row in content["duly_done"]} | found


def images(recording: Recording, chance: random.Random, cuts: int) -> Iterator[tuple[int, str, dict[str, bytes]]]:
    """Rebuild the file at each point: as a kill leaves it, and as several power cuts may leave it."""
    disk = Disk()
    answered = {answer.at for answer in recording.answers}
    yield 0, "kill", {}
    for point, event in enumerate(recording.log, 1):
        disk.take(event)
        # A sync changes nothing that a kill would show, but more may have been promised since.
        if event.what != "sync" or point in answered:
            yield point, "kill", disk.after_kill()
        for _ in range(cuts if disk.in_doubt else 1):
            yield point, "power cut", disk.after_power_cut(chance)
    if disk.after_kill() != recording.files:
        raise AssertionError("the record played back to its end does not give the files that were there")


def judged(seed: int, *, steps: int, cuts: int, folder: Path) -> Tally:
    """Record a workload and judge it at every point, in two folders inside `folder` that are made for it."""
    place, images_of = folder / f"record-{seed}", folder / f"image-{seed}"
    place.mkdir()
    images_of.mkdir()
    recording = record(seed, steps, place)
    shutil.rmtree(place)
    tally = Tally(recording.library, len(recording.log), len(recording.answers))
    tally.kinds.update(answer.name for answer in recording.answers)
    judge = Judge(recording, images_of)
    for point, crash, image in images(recording, random.Random(seed), cuts):
        tally.crashes[crash] += 1
        found = judge.judge(image, point)
        if found is not None:
            tally.wrong.append(Wrong(*found, point, crash))
    shutil.rmtree(images_of)
    return tally


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """Have a folder in memory where there is one: thousands of files are written, and none is to last."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="crashes-", dir=memory) as folder:
        yield Path(folder)


def main() -> int:
    """Judge one recording and print what is wrong at which point."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.crashes", description="One recording of P2.")
    parser.add_argument("seed", type=int)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--cuts", type=int, default=2)
    given = parser.parse_args()
    with folder_in_memory() as folder:
        tally = judged(given.seed, steps=given.steps, cuts=given.cuts, folder=folder)
    for one in tally.wrong:
        print(f"{one.crash} at point {one.point} of {tally.events}: {one.kind}, {one.text}")
    print(f"{len(tally.wrong)} of {tally.images:,} images are wrong")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
