"""The same operations on Cloudflare's own runtime, with the same answers as on the other stores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from duly.errors import StoreError, StoreRefused
from duly.model import Change, Envelope, Event, Failure, NewJob, Sighting, State, Terms
from duly.rules.settings import load
from duly.store import open_driver, ops
from duly.store.d1.driver import D1Driver
from duly.store.driver import Driver
from duly.store.op import Finish, Held, Op
from duly.store.ops import Replay
from duly.store.postgres.driver import PostgresDriver
from duly.store.sqlite.driver import SQLiteDriver
from tests.contract.stores import NOW, new_id, spoiled
from tests.servers.workerd import Workerd, why_not

pytestmark = [
    pytest.mark.cloudflare,
    pytest.mark.skipif(why_not() is not None, reason=f"no Cloudflare runtime: {why_not()}"),
]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Workerd]:
    with Workerd() as made:
        driver = driver_on(made)
        driver.migrate()
        driver.close()
        yield made


def driver_on(runtime: Workerd) -> D1Driver:
    driver = open_driver(load({"url": runtime.d1_url}, {}))
    assert isinstance(driver, D1Driver)
    return driver


class Story:
    """One life of a queue, told to a driver; what it answered is kept line by line.

    Ids and tokens are made once, so that every database hears the same.
    """

    def __init__(self, driver: Driver, ids: list[str]) -> None:
        self.driver = driver
        self.ids = iter(ids)
        self.now = NOW
        self.token = 0
        self.told: list[Any] = []

    def ask(self, op: Op[Any]) -> Any:
        answer = self.driver.run(op)
        self.told.append((op.name, answer))
        return answer

    def enqueue(self, count: int = 1, *, key: str | None = None, **terms: Any) -> list[str]:
        envelope = Envelope(subject='a "subject" 😀')
        jobs = [NewJob(next(self.ids), '{"n":[1,null,"ü"]}', key=key, envelope=envelope) for _ in range(count)]
        self.ask(ops.enqueue(Terms(**{"task": "work", **terms}), jobs, now=self.now))
        return [job.id for job in jobs]

    def claim(self, limit: int = 10, **more: Any) -> Any:
        self.token += 1
        return self.ask(ops.claim("default", limit=limit, token=self.token, worker="w", now=self.now, **more))

    def tell(self) -> list[Any]:
        failure = Failure("builtins.ValueError", "no 'quotes' hurt", "Traceback\n  line")
        plain = self.enqueue(4, priority=3)
        (keyed,) = self.enqueue(key="k")
        self.enqueue(key="k")
        scheduled = self.enqueue(2, delay_ms=1000, expires_ms=5000)
        jobs = self.claim(tasks=["work", "other"])
        self.ask(ops.recall(self.token))
        self.ask(ops.extend([Held(job.id, job.token) for job in jobs], now=self.now + 5))
        self.ask(ops.progress(Held(jobs[0].id, jobs[0].token), 33.5, "a third"))
        self.ask(ops.heartbeat(Held(jobs[0].id, jobs[0].token), now=self.now + 6))
        self.ask(ops.get(jobs[0].id, now=self.now))
        changes = [
            Change(State.SUCCEEDED, result='{"big":12345678901}'),
            Change(State.SCHEDULED, after_ms=10, error=failure),
            Change(State.DEAD, error=failure),
            Change(State.CANCELLED, reason="enough"),
            Change(State.SUCCEEDED, result="[1]"),
        ]
        finishes = [Finish(job, change) for job, change in zip(jobs, changes, strict=True)]
        self.ask(ops.finish(finishes, now=self.now + 7))
        self.ask(ops.finish(finishes, now=self.now + 8))
        self.ask(ops.finish([Finish(replace(jobs[0], id=next(self.ids)), changes[0])], now=self.now))
        self.enqueue(key="k")
        self.ask(ops.get(keyed, now=self.now))
        self.ask(ops.attempts(plain[2]))

        self.ask(ops.dead_list(now=self.now))
        self.ask(ops.dead_metrics(now=self.now + 50))
        again = Replay(plain[2], next(self.ids), payload='{"n":2}')
        self.ask(ops.replay([again], by="ann", why="fixed", now=self.now + 60))
        self.ask(ops.replay([Replay(plain[2], next(self.ids)), Replay(plain[0], next(self.ids))], now=self.now))
        self.now += 100
        lost = self.claim(alone=False)
        self.now += 30_000
        seen = self.ask(ops.expired_leases(now=self.now))
        self.ask(ops.rescue(seen, now=self.now))
        self.ask(ops.rescue(seen, now=self.now))
        self.claim()
        suspects = self.claim(alone=True)
        self.ask(ops.cancel([suspects[0].id], by="ann", why="stop", now=self.now))
        self.ask(ops.finish([Finish(suspects[0], changes[1])], now=self.now))
        self.ask(ops.attempts(lost[0].id))
        self.ask(ops.next_due("default", now=self.now))
        self.ask(ops.expire(self.ask(ops.expirable(now=self.now)), now=self.now))
        self.ask(ops.get(scheduled[0], now=self.now))
        self.ask(ops.promote("default", now=self.now))

        self.ask(ops.pause("task", "work", by="ann", why="bug", until_ms=10, now=self.now))
        self.enqueue()
        self.claim()
        self.ask(ops.paused(now=self.now))
        self.ask(ops.resume("task", "work", by="ann", why="fixed", now=self.now))
        self.claim()
        self.ask(ops.register("w", host="h", pid=7, queues=["default"], tasks=["work"], beat_ms=100, now=self.now))
        self.ask(ops.workers(now=self.now))
        self.enqueue(2, task="nobody's", delay_ms=3)
        self.enqueue(queue="mail", delay_ms=9)
        late = self.enqueue(2, queue="mail", delay_ms=900)
        self.now += 9
        self.ask(ops.park("default", now=self.now))
        self.ask(ops.parked())
        self.ask(ops.queues(now=self.now))
        self.ask(ops.retry([late[0], plain[0]], by="ann", why="now", now=self.now))
        self.ask(ops.retry([late[0]], by="ann", why="now", now=self.now))
        self.ask(ops.listing(prefix=late[0][:20], now=self.now))
        self.ask(ops.claim("mail", limit=1, token=99, worker="w/child", now=self.now))
        self.ask(ops.workers(now=self.now))
        self.ask(ops.queues(now=self.now))
        self.ask(ops.hold(by="ann", why="restored", now=self.now))
        self.ask(ops.hold(by="ann", why="restored", now=self.now))
        self.ask(ops.paused(now=self.now))
        self.ask(ops.listing(now=self.now))
        self.ask(ops.listing(state=State.CANCELLED, limit=1, now=self.now))
        self.ask(ops.resolve(plain[2:3], by="ann", why="done", now=self.now))
        self.ask(ops.purge(plain[2:3], by="ann", why="gone", now=self.now))
        self.ask(ops.events())
        self.now += 100 * 86_400_000
        self.ask(ops.prunable(now=self.now))
        for what in ops.PRUNABLE:
            self.ask(ops.prune(what, 2, now=self.now))
        self.ask(ops.listing(now=self.now))
        self.ask(ops.leave("w"))
        return [(name, comparable(answer)) for name, answer in self.told]


def comparable(answer: Any) -> Any:
    """An answer without what is each database's own: blanks in JSON text, and the order of leases that end together."""
    if isinstance(answer, list) and answer and isinstance(answer[0], Event):
        return [replace(event, data=event.data and json.loads(event.data)) for event in answer]
    if isinstance(answer, list) and answer and isinstance(answer[0], Sighting):
        return sorted(answer, key=lambda seen: seen.id)
    return answer


@pytest.mark.slow
def test_c06_the_runtime_answers_as_the_other_stores_do(runtime: Workerd, tmp_path: Path, postgres_url: str) -> None:
    ids = [new_id() for _ in range(60)]
    on_d1 = driver_on(runtime)
    told = Story(on_d1, ids).tell()
    on_d1.close()
    assert len(told) > 50
    for other in (SQLiteDriver(tmp_path / "duly.db"), PostgresDriver(postgres_url)):
        theirs = Story(other, ids).tell()
        other.close()
        for number, (ours, wanted) in enumerate(zip(told, theirs, strict=True)):
            assert ours == wanted, f"line {number}: {ours[0]}"


def test_c06_the_runtime_refuses_a_broken_constraint_and_writes_nothing(runtime: Workerd) -> None:
    driver = driver_on(runtime)
    before = driver.run(ops.listing(limit=1000))
    job_id = new_id()
    with pytest.raises(StoreError) as raised:
        driver.run(spoiled(ops.enqueue(Terms("work"), [NewJob(job_id, "{}")])))
    assert isinstance(raised.value, StoreRefused)
    assert driver.run(ops.listing(limit=1000)) == before
    driver.close()


def test_c06_the_runtimes_clock_is_used_without_a_bound_time(runtime: Workerd) -> None:
    driver = driver_on(runtime)
    assert 1_700_000_000_000 < driver.run(ops.clock()) < NOW * 2
    driver.close()
