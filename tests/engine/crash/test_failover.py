"""The primary of PostgreSQL is killed under load, and its standby promoted. Line H01."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from duly.errors import AnswerLost, StoreUnavailable
from duly.model import NewJob, Terms
from duly.store import ops
from duly.store.postgres.driver import PostgresDriver
from duly.store.postgres.schema import bring_up_to_date
from tests.contract.stores import PostgresStore, new_id
from tests.engine.crash.workers import LEASE_MS, Scene, times
from tests.servers.pair import Pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.xdist_group("failover")]


@contextmanager
def producing(url: str, *, keyed: bool) -> Iterator[list[str]]:
    """Enqueue job after job; gives the ids of those that were acknowledged, as they come."""
    acknowledged: list[str] = []
    over = threading.Event()
    terms = Terms("quick", lease_ms=LEASE_MS)
    driver = PostgresDriver(url)

    def produce() -> None:
        while not over.wait(0.001):
            job = NewJob(new_id(), "{}", key=new_id() if keyed else None)
            try:
                driver.run(ops.enqueue(terms, [job]))
            except (StoreUnavailable, AnswerLost):
                over.wait(0.05)
            else:
                acknowledged.append(job.id)

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield acknowledged
    finally:
        over.set()
        thread.join()
        driver.close()


def test_h01_a_failover_loses_nothing_acknowledged_and_runs_nothing_again(tmp_path: Path) -> None:
    with Pair() as pair:
        bring_up_to_date(pair.url)
        scene = Scene(PostgresStore(f"{pair.url}?target_session_attrs=read-write"), pair.url, tmp_path)
        try:
            for _ in range(2):
                scene.start(concurrency=10)
            with producing(pair.url, keyed=False) as plain, producing(pair.url, keyed=True) as keyed:
                scene.wait(lambda: min(len(plain), len(keyed)) > 100, "the load")
                long = scene.enqueue("nap", 2, payload={"seconds": 2.0})
                scene.wait(lambda: len(scene.ledger(*long)) == 2, "the long jobs to begin")
                fail_over(scene, pair, plain, keyed)
            acknowledged = {*plain, *keyed, *long}
            scene.wait_ended()
            ran = times(scene.ledger())
            assert acknowledged - set(ran) == set(), "something acknowledged was lost"
            assert set(ran.values()) == {1}, "something ran twice"
            assert set(Counter(one.job for one in scene.told("job.succeeded")).values()) == {1}
            assert acknowledged <= {row[0] for row in scene.store.query("select id from duly_done")}
        finally:
            scene.close()


def fail_over(scene: Scene, pair: Pair, *producers: list[str]) -> None:
    """Kill the primary, promote its standby, and wait for all to continue."""
    pair.kill_primary()
    nowhere = PostgresDriver(pair.url)
    with pytest.raises(StoreUnavailable, match="has no primary that can be reached"):
        nowhere.run(ops.clock())
    nowhere.close()
    time.sleep(2 * LEASE_MS / 1000)
    pair.promote()
    scene.store._outside = None  # type: ignore[attr-defined]
    before = [len(one) for one in producers]
    scene.wait(lambda: all(len(one) > was for one, was in zip(producers, before, strict=True)), "enqueues to go on", 15)
    fresh = scene.enqueue("quick", 5, priority=1)
    scene.wait(lambda: len(scene.ledger(*fresh)) == 5, "the workers to go on", 15)
