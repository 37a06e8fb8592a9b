"""When a worker takes a job from another, and how far ahead it claims: judged with a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from duly import Ctx, Duly
from duly.model import State
from duly.rules.keys import new_token
from duly.store import ops
from duly.store.op import Held
from duly.worker.prefetch import MOST_AHEAD, Prefetch
from duly.worker.upkeep.rescue import Rescue
from tests.contract.stores import D1OnFile
from tests.servers.d1 import D1Mannered

SECONDS = 20

LEASE_S = 0.03
PATIENCE_S = LEASE_S / 3 + 0.5


@pytest.fixture(params=["sqlite", "postgres", "d1"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Duly]:
    made = Duly(request.getfixturevalue("postgres_url") if request.param == "postgres" else tmp_path / "jobs.db")
    if request.param == "d1":
        driver = D1OnFile(D1Mannered(tmp_path / "d1.db"))
        driver.migrate()
        made.database.driver = driver

    @made.task(lease="30ms")
    def work() -> None: ...

    yield made
    made.close()


class Rescuer:
    """A rescue with a clock of its own and no worker around it."""

    def __init__(self, app: Duly) -> None:
        self.now = 100.0
        self.held: list[Any] = []
        shared: Any = SimpleNamespace(app=app, driver=app.driver, clock=lambda: self.now)
        held: Any = SimpleNamespace(leases=lambda: self.held)
        children: Any = SimpleNamespace(warm_up=lambda: None)
        suspects: Any = SimpleNamespace(hint=lambda: None)
        self._rescue = Rescue(shared, held, children, suspects)

    def look(self) -> None:
        asyncio.run(self._rescue.look())


def lost_job(app: Duly) -> Any:
    """A job whose worker is gone and whose lease has ended, by the database's own clock."""
    app.tasks["work"].enqueue()
    (job,) = app.driver.run(ops.claim("default", limit=1, token=new_token(), worker="gone"))
    while not app.driver.run(ops.expired_leases()):
        pass
    return job


def state(app: Duly, job: Any) -> State:
    found = app.get(job.id)
    assert found is not None
    return found.state


def test_j11_a_lease_is_taken_when_it_was_seen_twice_a_beat_and_half_a_second_apart(app: Duly) -> None:
    job, rescuer = lost_job(app), Rescuer(app)
    rescuer.look()
    rescuer.look()
    assert state(app, job) is State.RUNNING
    rescuer.now += PATIENCE_S - 0.01
    rescuer.look()
    assert state(app, job) is State.RUNNING
    rescuer.now += 0.02
    rescuer.look()
    assert state(app, job) is State.READY


def test_j11_a_lease_that_was_extended_meanwhile_was_not_seen_twice(app: Duly) -> None:
    job, rescuer = lost_job(app), Rescuer(app)
    rescuer.look()
    app.driver.run(ops.extend([Held(job.id, job.token)]))
    while not app.driver.run(ops.expired_leases()):
        pass
    rescuer.now += PATIENCE_S + 1
    rescuer.look()
    assert state(app, job) is State.RUNNING
    rescuer.now += PATIENCE_S
    rescuer.look()
    assert state(app, job) is State.READY


def test_j11_sightings_before_a_failed_connection_do_not_count(app: Duly) -> None:
    job, rescuer = lost_job(app), Rescuer(app)
    rescuer.look()
    rescuer.now += PATIENCE_S
    app.driver.failures += 1
    rescuer.look()
    assert state(app, job) is State.RUNNING
    rescuer.now += PATIENCE_S
    rescuer.look()
    assert state(app, job) is State.READY


def test_j11_a_worker_does_not_rescue_jobs_of_its_own(app: Duly) -> None:
    job, rescuer = lost_job(app), Rescuer(app)
    rescuer.held = [SimpleNamespace(job=job)]
    rescuer.look()
    rescuer.now += PATIENCE_S
    rescuer.look()
    assert state(app, job) is State.RUNNING


def test_only_quick_tasks_with_attempts_to_spare_are_claimed_ahead() -> None:
    app = Duly("unused.db")

    @app.task
    async def quick() -> None: ...

    @app.task
    async def slow() -> None: ...

    @app.task(max_attempts=1)
    async def only_once() -> None: ...

    pace = Prefetch(10, app.tasks, 5)
    assert pace.ahead(0.0) == (0, frozenset())
    for _ in range(50):
        pace.note("quick", 0.0001)
        pace.note("slow", 0.2)
        pace.note("only_once", 0.0001)
    assert pace.ahead(0.0) == (MOST_AHEAD, frozenset({"quick"}))
    pace.late(now=5.0)
    assert pace.ahead(5.5) == (0, frozenset())
    assert pace.ahead(6.1) == (MOST_AHEAD, frozenset({"quick"}))


class Growing(deque[float]):
    """What threads add to while it is looked at."""

    def __iter__(self) -> Iterator[float]:
        yield from list(super().__iter__())
        self.extend([0.0001] * 20)


def test_how_long_jobs_take_is_reckoned_also_while_threads_add_to_it() -> None:
    app = Duly("unused.db")

    @app.task
    def quick() -> None: ...

    pace = Prefetch(10, app.tasks, 5)
    pace._took["quick"] = Growing([0.0001] * 20)
    assert pace.ahead(0.0)[1] == {"quick"}
    assert len(pace._took["quick"]) == 40


def test_a_worker_that_prefetched_too_much_halves_its_prefetch() -> None:
    """Handlers that never wait run one after the other, and take longer together than each says of itself."""
    app = Duly("unused.db")

    @app.task
    async def quick() -> None: ...

    pace = Prefetch(10, app.tasks, 5)
    for _ in range(50):
        pace.note("quick", 0.0001)
    assert pace.ahead(0.0)[0] == MOST_AHEAD
    pace.too_far(1.0)
    pace.too_far(1.1)  # of the same mishap
    pace.too_far(2.1)
    assert pace.ahead(2.5) == (0, frozenset())
    assert pace.ahead(3.2)[0] == MOST_AHEAD // 4
    assert pace.ahead(61.0)[0] == MOST_AHEAD // 4
    assert [pace.ahead(now)[0] for now in (62.5, 63.0, 122.0, 123.0)] == [
        MOST_AHEAD // 2, MOST_AHEAD // 2, MOST_AHEAD // 2, MOST_AHEAD,
    ]  # fmt: skip
    for now in range(200, 220):
        pace.too_far(float(now))
    assert pace.ahead(221.0)[0] == 10  # no fewer than there are slots
    assert pace.ahead(1e9)[0] == 20


def test_prefetched_jobs_fit_into_memory_and_a_tenth_of_a_second() -> None:
    app = Duly("unused.db")

    @app.task
    async def quick() -> None: ...

    pace = Prefetch(10, app.tasks, 5)
    for _ in range(50):
        pace.note("quick", 0.01)
    assert pace.ahead(0.0)[0] == 100
    for _ in range(100):
        pace.note_claim(1, 1_000_000)
    assert pace.ahead(0.0)[0] == 8


@pytest.mark.slow
def test_j09_a_handler_gets_lease_lost_also_when_its_own_worker_claims_the_job_again(app: Duly) -> None:
    runs: list[str] = []

    @app.task
    async def waiting(ctx: Ctx) -> None:
        runs.append(f"begun {ctx.attempt}")
        if ctx.attempt > 1:
            return
        try:
            await asyncio.sleep(SECONDS)
        except asyncio.CancelledError:
            runs.append("told")
            raise

    async def run() -> list[str]:
        worker = app.worker(concurrency=2, signals=False)
        worker.heartbeat.beat = lambda: None  # type: ignore[method-assign]  # which would extend the lease, or tell
        running = asyncio.create_task(worker.run())
        job = await waiting.aenqueue()
        while not runs:
            await asyncio.sleep(0.01)
        later = await app.driver.arun(ops.clock()) + 120_000
        seen = await app.driver.arun(ops.expired_leases(now=later))
        await app.driver.arun(ops.rescue(seen, now=later))
        while (await app.aget(job.id)).state is not State.SUCCEEDED:  # type: ignore[union-attr]
            await asyncio.sleep(0.02)
        by_then = sorted(runs)  # the end of the worker tells it too
        worker.stop()
        await running
        return by_then

    assert asyncio.run(asyncio.wait_for(run(), SECONDS)) == ["begun 1", "begun 2", "told"]
