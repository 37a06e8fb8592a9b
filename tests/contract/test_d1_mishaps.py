"""Requests to D1 that get lost, come twice or come late: no job is lost, none runs twice, no lease is nobody's."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from duly.errors import AnswerLost, StoreUnavailable
from duly.model import Change, NewJob, State, Terms
from duly.rules.keys import new_token
from duly.store import ops
from duly.store.d1.driver import D1Driver
from duly.store.d1.wire import Address, Wire
from duly.store.op import Finish, Op
from tests.contract.stores import new_id
from tests.servers.mishaps import Mishaps
from tests.servers.workerd import Workerd, why_not

pytestmark = [
    pytest.mark.cloudflare,
    pytest.mark.skipif(why_not() is not None, reason=f"no Cloudflare runtime: {why_not()}"),
]

TIMEOUT_S = 0.4
JOBS = 160


@pytest.fixture
def runtime() -> Iterator[Workerd]:
    with Workerd() as made:
        yield made


@contextmanager
def driver_on(runtime: Workerd, port: int) -> Iterator[D1Driver]:
    address = Address("127.0.0.1", port, False, runtime.database, runtime.token)
    driver = D1Driver(address, Wire(address), timeout_s=TIMEOUT_S)
    try:
        yield driver
    finally:
        driver.close()


def surely(driver: D1Driver, op: Op[Any]) -> Any:
    """Run an operation until the database answers, as a worker does."""
    while True:
        try:
            return driver.run(op)
        except AnswerLost as lost:
            op = lost.again  # type: ignore[assignment]
        except StoreUnavailable:
            pass


class Crowd:
    """Producers and claimers on one database, and what they know."""

    def __init__(self, runtime: Workerd, proxy: Mishaps) -> None:
        self.runtime, self.proxy = runtime, proxy
        self.acked: list[str] = []
        self.runs: Counter[str] = Counter()
        self.over = threading.Event()

    def run(self, *roles: Callable[[D1Driver], None]) -> None:
        def play(role: Callable[[D1Driver], None]) -> None:
            try:
                with driver_on(self.runtime, self.proxy.port) as driver:
                    role(driver)
            except BaseException:
                self.over.set()
                raise

        threads = [threading.Thread(target=play, args=(role,)) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def produce(self, driver: D1Driver) -> None:
        for number in range(JOBS // 4):
            jobs = [NewJob(new_id(), "{}", key=f"{id(driver)}-{number}" if number % 2 else None)]
            if number % 4 == 0:
                jobs += [NewJob(new_id(), "{}"), NewJob(new_id(), "{}")]
            found = surely(driver, ops.enqueue(Terms("work"), jobs))
            assert [one.id for one in found] == [job.id for job in jobs]
            self.acked += [job.id for job in jobs]

    def work(self, driver: D1Driver) -> None:
        idle_since = time.monotonic()
        while not self.over.is_set() or time.monotonic() < idle_since + TIMEOUT_S:
            jobs = surely(driver, ops.claim("default", limit=5, token=new_token(), worker="w"))
            if not jobs:
                time.sleep(0.01)
                continue
            idle_since = time.monotonic()
            self.runs.update(job.id for job in jobs)
            verdicts = surely(driver, ops.finish([Finish(job, Change(State.SUCCEEDED)) for job in jobs]))
            assert {str(verdict) for verdict in verdicts.values()} <= {"recorded", "already"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_c02_requests_that_are_lost_doubled_and_late_change_nothing_twice(runtime: Workerd, seed: int) -> None:
    with Mishaps(runtime.host, runtime.port, seed=seed, late_s=2 * TIMEOUT_S) as proxy:
        with driver_on(runtime, proxy.port) as driver:
            driver._timeout_s = 10
            driver.migrate()
        crowd = Crowd(runtime, proxy)
        proxy.on = True

        def produce(driver: D1Driver) -> None:
            crowd.produce(driver)
            if len(crowd.acked) >= JOBS // 4 * 3:
                crowd.over.set()

        crowd.run(produce, produce, crowd.work, crowd.work, crowd.work)
        proxy.settle()
    assert all(proxy.count[kind] for kind in ("unsent", "unanswered", "doubled", "late"))
    look = runtime.gateway()
    assert look.query("select id, state, worker from duly_job") == []
    done = look.query("select id, state, attempt from duly_done")
    assert sorted(done) == sorted((job_id, "succeeded", 1) for job_id in crowd.acked)
    assert crowd.runs == Counter(crowd.acked)
