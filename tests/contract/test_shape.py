"""What a queue can be told: its depth, its ageing, the budget of its retries. Lines B09, J07 and R11."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import psycopg
import pytest

from duly.errors import ConfigError
from duly.model import Claimed, Limit, NewJob, Terms
from duly.store import ops, queues
from tests.contract.stores import NOW, PostgresStore, Store, new_id, new_token

MINUTE = 60_000


def limit(store: Store, queue: str = "default", *, by: str = "ann", why: str = "so", **limits: Any) -> None:
    store.run(queues.limit_queue(queue, by=by, why=why, now=store.now, **limits))


def limits(store: Store) -> list[Limit]:
    return store.run(queues.limits(now=store.now))


def claim(
    store: Store, count: int = 1, *, ageing_ms: int | None = None, retries: int | None = None, **more: Any
) -> list[Claimed]:
    more = {"queue": "default", "token": new_token(), "worker": "w1", "now": store.now, **more}
    return store.run(queues.claim(more.pop("queue"), limit=count, ageing_ms=ageing_ms, retries=retries, **more))


def ids(jobs: list[Claimed]) -> list[str]:
    return [job.id for job in jobs]


def depth(store: Store, enough: int = 1000, queue: str = "default") -> int:
    return store.run(queues.depth(queue, enough=enough))


def retries(store: Store, count: int, *, after_ms: int = 5, **terms: Any) -> list[str]:
    """Make jobs that failed once; they are due in a moment."""
    made = store.enqueue(count, **terms)
    for job in store.claim(count):
        store.retry(job, after_ms)
    return made


# What was told


def test_b09_limits_have_their_values_author_and_reason(store: Store) -> None:
    assert limits(store) == []
    limit(store, "mail", max_depth=100, ageing_ms=MINUTE)
    store.now += 5
    limit(store, "mail", retry_share=0.2, by="bob", why="outage")
    limit(store, "bulk", retry_share=0, max_depth=7)
    [bulk, mail] = limits(store)
    assert (bulk.name, bulk.max_depth, bulk.ageing_ms, bulk.retry_share) == ("bulk", 7, None, 0)
    assert (mail.kind, mail.name, mail.max_depth, mail.ageing_ms, mail.retry_share) == (
        "queue",
        "mail",
        100,
        MINUTE,
        0.2,
    )
    assert (mail.set_at, mail.set_by, mail.set_why) == (store.now, "bob", "outage")
    limit(store, "bulk", retry_share=queues.OFF, max_depth=queues.OFF)
    limit(store, "mail", ageing_ms=queues.OFF)
    [mail] = limits(store)
    assert (mail.max_depth, mail.ageing_ms, mail.retry_share) == (100, None, 0.2)


def test_b09_the_audit_log_has_each_change_of_a_limit(store: Store) -> None:
    limit(store, "mail", max_depth=100, by="ann", why="disk")
    limit(store, "mail", max_depth=100, by="bob", why="the same again")
    limit(store, "mail", max_depth=queues.OFF, retry_share=0.5, by="bob", why="over")
    first, second = store.run(ops.events())
    assert (first.name, first.subject, first.by, first.why) == ("queue.limited", "mail", "ann", "disk")
    assert json.loads(first.data) == {
        "before": {"depth": None, "ageing_ms": None, "retry_share": None},
        "after": {"depth": 100, "ageing_ms": None, "retry_share": None},
    }
    assert (second.by, second.why) == ("bob", "over")
    assert json.loads(second.data) == {
        "before": {"depth": 100, "ageing_ms": None, "retry_share": None},
        "after": {"depth": None, "ageing_ms": None, "retry_share": 0.5},
    }
    assert limits(store)[0].set_by == "bob"


def test_b09_a_queue_without_a_name_has_no_limit() -> None:
    for name in ("", "a\x00b"):
        with pytest.raises(ConfigError, match="a name is not empty"):
            queues.limit_queue(name, max_depth=1, by="a", why="b")


def test_b09_pauses_and_limits_of_a_queue_leave_each_other_alone(store: Store) -> None:
    limit(store, "mail", max_depth=100)
    store.run(ops.pause("queue", "mail", by="bob", why="down", now=store.now))
    limit(store, "mail", ageing_ms=5)
    store.run(ops.resume("queue", "mail", by="bob", why="up", now=store.now))
    [mail] = limits(store)
    assert (mail.max_depth, mail.ageing_ms, mail.set_by) == (100, 5, "ann")
    assert store.run(ops.paused(now=store.now)) == []


# Depth


def test_b09_depth_counts_waiting_jobs_and_not_running_ones(store: Store) -> None:
    assert depth(store) == 0
    store.enqueue(3)
    store.enqueue(2, delay_ms=500)
    store.enqueue(1, queue="other")
    store.run(ops.enqueue(Terms("work"), [NewJob(new_id(), "{}", lane="l") for _ in range(2)], now=store.now))
    store.run(ops.enqueue(Terms("work", delay_ms=9), [NewJob(new_id(), "{}", lane="l")], now=store.now))
    assert depth(store) == 8
    store.claim(1)
    assert depth(store) == 7
    rows = store.query("select id from duly_job where state = 'ready' and lane is null and queue = 'default'")
    store.query("update duly_job set state = 'waiting', parked_version = 1 where id = ?", rows[0][0])
    store.query("update duly_job set state = 'waiting' where id = ?", rows[1][0])
    assert depth(store) == 7
    assert depth(store, 5) == 5
    assert depth(store, queue="other") == 1


def test_b09_a_depth_that_was_counted_is_known_to_all_for_a_second(store: Store) -> None:
    def note(figure: int, max_depth: int = 100) -> bool:
        return store.run(queues.note_depth("mail", figure, max_depth=max_depth, now=store.now))

    assert not note(5)
    limit(store, "mail", max_depth=100)
    assert (limits(store)[0].depth, limits(store)[0].depth_age_ms) == (None, None)
    assert note(5) or store.kind == "d1"
    store.now += 999
    assert not note(6)
    assert (limits(store)[0].depth, limits(store)[0].depth_age_ms) == (5, 999)
    store.now += 1
    assert not note(6, max_depth=50)
    assert note(6) or store.kind == "d1"
    assert (limits(store)[0].depth, limits(store)[0].depth_at) == (6, store.now)
    store.now -= 5000  # the clock was set back
    assert note(7) or store.kind == "d1"
    assert limits(store)[0].depth == 7


def test_b09_a_depth_that_was_counted_up_to_another_limit_is_forgotten(store: Store) -> None:
    limit(store, "mail", max_depth=100)
    store.run(queues.note_depth("mail", 101, max_depth=100, now=store.now))
    limit(store, "mail", ageing_ms=5)
    assert limits(store)[0].depth == 101
    limit(store, "mail", max_depth=1000)
    assert (limits(store)[0].depth, limits(store)[0].depth_at) == (None, None)


# Ageing


def test_j07_with_ageing_rank_is_due_less_priority_times_ageing(store: Store) -> None:
    [old] = store.enqueue(priority=0)
    store.now += 3 * MINUTE
    [urgent] = store.enqueue(priority=4)
    [soon] = store.enqueue(priority=2)
    store.now += MINUTE
    [later] = store.enqueue(priority=5)
    expected = sorted(  # 0: NOW, 4: NOW + 3 - 4, 2: NOW + 3 - 2, 5: NOW + 4 - 5
        [(0, old), (-1, urgent), (1, soon), (-1, later)]
    )
    assert ids(claim(store, 10, ageing_ms=MINUTE)) == [id_ for _, id_ in expected]


def test_j07_ageing_takes_the_best_of_all_priorities_for_any_limit(store: Store) -> None:
    ranks = {}
    for number in range(60):
        store.now = NOW + (number * 37) % 60 * 1000
        priority = (number * 13) % 7 - 3
        [id_] = store.enqueue(priority=priority)
        ranks[id_] = (store.now - priority * 5000, id_)
    store.now = NOW + MINUTE
    taken = []
    for count in (1, 7, 3, 20, 29, 5):
        taken += ids(claim(store, count, ageing_ms=5000))
    assert taken == sorted(ranks, key=lambda id_: ranks[id_])


def test_j07_the_lowest_priority_is_not_starved_with_ageing_and_is_without(store: Store) -> None:
    def waits(ageing_ms: int | None, *, turns: int = 30) -> int | None:
        [low] = store.enqueue(priority=0)
        for turn in range(turns):
            store.enqueue(3, priority=9)  # more than is taken
            for job in claim(store, 2, ageing_ms=ageing_ms):
                store.succeed(job)
                if job.id == low:
                    return turn
            store.now += 1000
        return None

    assert waits(1000) == 13  # those of the first 9 s go before it, 9 priorities of a second each
    assert waits(None) is None


def test_j07_without_ageing_a_limited_claim_orders_by_priority_due_time_and_id(store: Store) -> None:
    low = store.enqueue(2, priority=-1)
    store.now += 5
    high = store.enqueue(2, priority=7)
    usual = store.enqueue(3)
    assert ids(claim(store, 4, retries=0)) == [*high, *usual[:2]]
    assert ids(claim(store, 9, retries=0)) == [usual[2], *low]


def test_j07_ageing_at_its_longest_and_priorities_at_their_ends_are_in_order(store: Store) -> None:
    least, most = store.enqueue(priority=-(2**31))[0], store.enqueue(priority=2**31 - 1)[0]
    assert ids(claim(store, 2, ageing_ms=36_525 * 86_400_000)) == [most, least]


def test_j07_a_shaped_claim_is_guarded_as_any_other(store: Store) -> None:
    store.enqueue(1, task="other")
    store.enqueue(1, queue="mail")
    store.enqueue(1, task="paused", priority=5)
    store.enqueue(1, expires_ms=0, priority=4)
    store.run(ops.enqueue(Terms("work"), [NewJob(new_id(), "{}", lane="l")], now=store.now))
    [suspect] = store.enqueue(1, priority=9)
    store.query("update duly_job set suspect = ? where id = ?", store.kind == "postgres" or 1, suspect)
    [good] = store.enqueue()
    [late] = store.enqueue(delay_ms=5)
    store.now += 5
    store.run(ops.pause("task", "paused", by="a", why="b", now=store.now))
    store.run(ops.pause("queue", "default", by="a", why="b", now=store.now))
    for shaped in ({"ageing_ms": MINUTE}, {"retries": 0}, {"ageing_ms": 1, "retries": 3}):
        assert claim(store, 9, tasks=["work", "paused"], **shaped) == []
    store.run(ops.resume("queue", "default", by="a", why="b", now=store.now))
    [first, second] = claim(store, 9, tasks=["work", "paused"], ageing_ms=MINUTE)
    assert [first.id, second.id] == [good, late]
    assert (first.attempt, first.lease_until) == (1, store.now + first.lease_ms)


@pytest.mark.parametrize("shaped", [{"ageing_ms": 1000}, {"retries": 1}, {"ageing_ms": 1000, "retries": 1}])
def test_j08_a_repeated_token_in_a_limited_queue_gets_the_same_jobs(store: Store, shaped: dict[str, int]) -> None:
    retries(store, 3)
    store.now += 5
    store.enqueue(5, priority=1)
    token = new_token()
    first = claim(store, 3, token=token, **shaped)
    assert len(first) == 3
    assert claim(store, 3, token=token, **shaped) == first
    asked_again = queues.claim(
        "default", **{"ageing_ms": None, "retries": None, **shaped}, limit=3, token=token, worker="w1", now=store.now
    ).again
    assert store.run(asked_again) == first
    assert store.query("select count(*) from duly_job where state = 'running'") == [(3,)]


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_j07_concurrent_limited_claims_share_all_jobs(store: PostgresStore) -> None:
    for priority in range(4):
        store.enqueue(25, priority=priority)

    async def claims() -> list[list[Claimed]]:
        return await asyncio.gather(
            *(
                store.driver.arun(
                    queues.claim(
                        "default", ageing_ms=1000, retries=None, limit=10, token=new_token(), worker="w", now=store.now
                    )
                )
                for _ in range(10)
            )
        )

    taken = asyncio.run(claims())
    assert [len(jobs) for jobs in taken] == [10] * 10
    assert len({job.id for jobs in taken for job in jobs}) == 100


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_j07_a_limited_claim_skips_locked_rows(store: PostgresStore) -> None:
    high, low = store.enqueue(3, priority=9), store.enqueue(3)
    with psycopg.connect(store.url) as conn:
        conn.execute("select id from duly.duly_job where id = any (%s::uuid[]) for update", [high])
        assert ids(claim(store, 2, ageing_ms=MINUTE)) == low[:2]
    assert ids(claim(store, 2, ageing_ms=MINUTE)) == high[:2]


# The budget of retries


def test_r11_retries_take_no_more_than_their_budget_while_other_work_waits(store: Store) -> None:
    failed = retries(store, 20)
    store.now += 5
    fresh = store.enqueue(20)
    taken = ids(claim(store, 10, retries=2))
    assert sorted(taken) == sorted([*failed[:2], *fresh[:8]])
    assert sorted(ids(claim(store, 10, retries=0))) == fresh[8:18]
    assert sorted(ids(claim(store, 10, retries=1))) == sorted([*failed[2:10], *fresh[18:]])
    assert ids(claim(store, 20, retries=0)) == failed[10:]


def test_r11_scheduled_work_that_is_due_is_claimed_before_retries_too(store: Store) -> None:
    failed = retries(store, 5)
    late = store.enqueue(5, delay_ms=5)
    store.now += 5
    assert ids(claim(store, 5, retries=1)) == sorted([failed[0], *late[:4]])


def test_r11_with_a_budget_due_retries_are_not_promoted_and_others_are(store: Store) -> None:
    failed = retries(store, 5)
    late = store.enqueue(3, delay_ms=5)
    store.now += 5
    promoted = store.run(ops.promote("default", retries=False, now=store.now))
    assert promoted == 3 or store.kind == "d1"
    assert [store.state(id_) for id_ in late] == ["ready"] * 3
    assert [store.state(id_) for id_ in failed] == ["scheduled"] * 5
    store.run(ops.promote("default", now=store.now))
    assert [store.state(id_) for id_ in failed] == ["ready"] * 5


def test_r11_an_outage_of_ten_thousand_retries_does_not_hold_up_fresh_work(store: Store) -> None:
    made = [NewJob(new_id(), "{}") for _ in range(10_000)]
    for first in range(0, 10_000, 1000):
        store.run(ops.enqueue(Terms("work", delay_ms=1 + first // 100), made[first : first + 1000], now=store.now))
    store.query("update duly_job set attempt = 1, max_attempts = 99")
    store.now += 1000
    for _ in range(3):
        fresh = store.enqueue(40)
        late = store.enqueue(5, delay_ms=5)
        store.now += 5
        store.run(ops.promote("default", retries=False, now=store.now))
        taken = claim(store, 50, retries=10)
        assert sum(job.attempt > 1 for job in taken) == 10
        assert {job.id for job in taken if job.attempt == 1} <= {*fresh, *late}
        left = claim(store, 50, retries=0)
        assert sum(job.attempt == 1 for job in left) == 5
        assert len(left) == 50
    assert store.query("select count(*) from duly_job where state = 'scheduled'") == [(10_000 - 3 * 55,)]


def test_r11_a_retry_that_is_not_due_is_not_taken(store: Store) -> None:
    retries(store, 3, after_ms=10)
    store.now += 9
    assert claim(store, 5, retries=5) == []


def test_r11_why_names_the_retry_budget_of_a_due_retry(store: Store) -> None:
    [failed] = retries(store, 1)
    store.run(ops.register("w", host="h", pid=1, queues=["default"], tasks=["work"], beat_ms=9999, now=store.now))
    store.now += 5
    assert store.run(ops.why(failed, now=store.now)).gate == "turn"
    limit(store, retry_share=0.2)
    why = store.run(ops.why(failed, now=store.now))
    assert why.gate == "budget"
    assert why.sentence == "it is a retry, and retries may take 20 % of queue 'default' while other work waits"
    [fresh] = store.enqueue()
    assert store.run(ops.why(fresh, now=store.now)).gate == "turn"


def test_j07_why_counts_no_jobs_ahead_with_ageing_priorities(store: Store) -> None:
    store.enqueue(priority=5)
    [low] = store.enqueue()
    store.run(ops.register("w", host="h", pid=1, queues=["default"], tasks=["work"], beat_ms=9999, now=store.now))
    assert store.run(ops.why(low, now=store.now)).sentence == "1 job is ahead of it in queue 'default'"
    limit(store, ageing_ms=90_000)
    why = store.run(ops.why(low, now=store.now))
    assert why.gate == "turn"
    assert why.sentence == (
        "it waits for its turn in queue 'default', where each priority counts as much as 1m 30s of waiting"
    )
