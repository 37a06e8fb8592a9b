"""B06, B07, B08: caps, rates and order, claimed from lanes that are counted from their rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest

from duly.model import Change, Claimed, Failure, NewJob, State, TaskLimits, Terms, Verdict
from duly.rules.rate import lane_of
from duly.store import lanes, ops
from duly.store.lanes import Walk
from duly.store.op import Finish
from duly.store.postgres.schema import bring_up_to_date
from tests.contract.stores import NOW, WAITING, D1Store, PostgresStore, Store, new_id, new_token
from tests.servers.postgres import PostgresServer

FAILED = Change(State.DEAD, error=Failure("E", "no"))


def add(
    store: Store,
    lane: str | None,
    count: int = 1,
    *,
    task: str = "t",
    ordering: str | None = None,
    key: str | None = None,
    now: int = NOW,
    **terms: Any,
) -> list[str]:
    """Enqueue jobs of a lane, and give their ids."""
    jobs = [NewJob(new_id(), "{}", lane=lane, key=key and f"{key}{one}") for one in range(count)]
    store.run(ops.enqueue(Terms(task, ordering_dead=ordering, **terms), jobs, now=now))
    return [job.id for job in jobs]


def limit(store: Store, task: str = "t", **limits: Any) -> None:
    store.run(lanes.declare({task: TaskLimits(task, **limits)}))


def take(
    store: Store,
    count: int = 100,
    *,
    tasks: Sequence[str] = ("t",),
    after: str = "",
    look_at: int = 1000,
    ordered: bool = False,
    now: int = NOW,
    **options: Any,
) -> list[Claimed]:
    walks = [Walk(task, after, ordered) for task in tasks]
    op = lanes.claim("default", walks, limit=count, lanes=look_at, token=new_token(), worker="w", now=now, **options)
    return store.run(op).jobs


def ids(jobs: Sequence[Claimed]) -> set[str]:
    return {job.id for job in jobs}


def succeed(store: Store, jobs: Sequence[Claimed], now: int = NOW) -> None:
    for job in jobs:
        assert store.run(ops.finish([Finish(job, Change(State.SUCCEEDED))], now=now))[job.id] in (
            Verdict.RECORDED,
            Verdict.ALREADY,
        )


def retry(store: Store, job: Claimed, after_ms: int, now: int = NOW) -> None:
    change = Change(State.SCHEDULED, after_ms=after_ms, error=Failure("E", "no"))
    store.run(ops.finish([Finish(job, change)], now=now))


# Caps


def test_b06_of_a_lane_no_more_run_than_its_cap(store: Store) -> None:
    limit(store, cap=3)
    add(store, "t", 10)
    first = take(store)
    assert len(first) == 3
    assert take(store) == []
    succeed(store, first[:2])
    assert len(take(store)) == 2
    assert take(store) == []


def test_b06_every_key_has_a_cap_of_its_own(store: Store) -> None:
    limit(store, cap=2)
    for tenant in "abc":
        add(store, lane_of("t", tenant), 5)
    assert Counter(job.lane for job in take(store)) == {"t:a": 2, "t:b": 2, "t:c": 2}


def test_b06_a_live_or_finished_job_has_its_lane(store: Store) -> None:
    limit(store, cap=2)
    [plain] = add(store, None)
    [laned] = add(store, lane_of("t", "a"))
    seen = {job.id: job.lane for job in store.run(ops.listing())}
    assert seen == {plain: None, laned: "t:a"}
    [job] = take(store)
    store.run(ops.finish([Finish(job, Change(State.DEAD, error=Failure("E", "no")))], now=NOW))
    assert store.run(ops.get(laned)).lane == "t:a"
    assert [job.lane for job in store.run(ops.dead_list())] == ["t:a"]


def test_b06_a_running_job_counts_after_its_lease_expired_until_it_is_rescued(store: Store) -> None:
    limit(store, cap=1)
    add(store, "t", 2, lease_ms=1000)
    [job] = take(store)
    late = NOW + 60_000
    assert take(store, now=late) == []
    seen = store.run(ops.expired_leases(now=late))
    store.run(ops.rescue(seen, now=late))
    [other] = take(store, now=late)
    assert other.id != job.id  # that one is a suspect now, and runs alone
    succeed(store, [other], now=late)
    [again] = take(store, now=late, alone=True)
    assert again.id == job.id


def test_b09_a_pause_of_a_queue_changes_no_lane_of_a_task_of_its_name(store: Store) -> None:
    limit(store, cap=1)
    store.run(ops.pause("queue", "t", by="ann", why="a leak", now=NOW))
    job, _ = add(store, "t", 2)
    assert ids(take(store)) == {job}


def test_b09_a_pause_until_a_time_ends_for_lanes_too(store: Store) -> None:
    if isinstance(store, D1Store):
        store.lose(None)  # after a lost answer `cut` is not known
    limit(store, cap=1)
    jobs = [add(store, lane)[0] for lane in ("t:a", "t:b", "t:c")]
    store.run(ops.pause("task", "t", by="ann", why="a leak", until_ms=1000, now=NOW))
    assert take(store, now=NOW + 999) == []
    walk = lanes.claim("default", [Walk("t")], limit=9, lanes=2, token=new_token(), worker="w", now=NOW + 1000)
    taken = store.run(walk)
    assert (ids(taken.jobs), taken.cut) == (set(jobs[:2]), {"t": "t:b"})


def test_b06_a_suspect_runs_alone_and_within_the_cap(store: Store) -> None:
    limit(store, cap=1)
    add(store, "t", 2, lease_ms=1000)
    [job] = take(store)
    late = NOW + 60_000
    store.run(ops.rescue(store.run(ops.expired_leases(now=late)), now=late))
    [other] = take(store, now=late)
    assert take(store, now=late, alone=True) == []
    succeed(store, [other], now=late)
    assert ids(take(store, now=late, alone=True)) == {job.id}


def test_b06_a_job_without_a_lane_uses_no_lane_rows(store: Store) -> None:
    limit(store, cap=1)
    [plain] = add(store, None)
    [laned] = add(store, "t")
    assert ids(store.run(ops.claim("default", limit=9, token=new_token(), worker="w", now=NOW))) == {plain}
    assert ids(take(store)) == {laned}


def test_b06_a_claim_takes_at_most_its_limit_and_one_job_of_each_lane_first(store: Store) -> None:
    limit(store, cap=5)
    add(store, "t:a", 100)
    add(store, "t:b", 100)
    add(store, "t:c", 2)
    assert Counter(job.lane for job in take(store, 3)) == {"t:a": 1, "t:b": 1, "t:c": 1}
    assert Counter(job.lane for job in take(store, 4)) == {"t:a": 2, "t:b": 1, "t:c": 1}


def test_b06_the_round_robin_starts_after_the_last_lane(store: Store) -> None:
    limit(store, cap=5)
    for tenant in "abcd":
        add(store, f"t:{tenant}", 5)
    assert [job.lane for job in take(store, 1, after="t:b")] == ["t:c"]
    assert [job.lane for job in take(store, 1, after="t:d")] == ["t:a"]
    assert Counter(job.lane for job in take(store, 2, after="t:c")) == {"t:d": 1, "t:a": 1}


@contextmanager
def held(store: PostgresStore, lane: str) -> Iterator[psycopg.Connection[Any]]:
    """Have a lane in the hands of somebody else, who has looked at it before."""
    add(store, lane)
    succeed(store, take(store))
    with psycopg.connect(store.url) as other:
        other.execute("select 1 from duly.duly_lane where name = %s for update", (lane,))
        yield other


def test_b06_lanes_that_another_claim_has_are_passed_by(postgres_url: str) -> None:
    with closing(PostgresStore(postgres_url)) as store, held(store, "t:a"):
        limit(store, cap=1)
        add(store, "t:a", 2)
        [free, _] = add(store, "t:b", 2)
        op = lanes.claim("default", [Walk("t")], limit=9, lanes=9, token=new_token(), worker="w", now=NOW)
        taken = store.run(op)
        assert ([job.id for job in taken.jobs], taken.passed_by) == ([free], True)


def test_b06_lanes_locked_by_another_claim_are_waited_for_on_request(postgres_url: str) -> None:
    with closing(PostgresStore(postgres_url)) as store, held(store, "t:a") as other, ThreadPoolExecutor(1) as beside:
        limit(store, cap=1)
        [first, _] = add(store, "t:a", 2)
        taken = beside.submit(take, store, wait=True)
        while not store.query(WAITING):
            assert not taken.done()
        other.commit()
        assert [job.id for job in taken.result()] == [first]


def test_b06_tasks_take_turns_under_any_collation(postgres: PostgresServer) -> None:
    with psycopg.connect(postgres.url, autocommit=True) as admin:
        admin.execute("create database turns template template0 locale 'C' locale_provider icu icu_locale 'en-US'")
    url = postgres.url_of("turns")
    bring_up_to_date(url)
    with closing(PostgresStore(url)) as store:
        served = [""]
        for task in ("a", "B", "c"):
            limit(store, task, cap=9)
            add(store, f"{task}:", 2, task=task)
        for _ in range(6):
            [job] = take(store, 1, tasks=("B", "a", "c"), turn=served[-1])
            served.append(job.task)
    postgres.drop(url)
    assert served[1:] == ["B", "a", "c"] * 2


def test_b06_a_claim_returns_where_it_stopped(store: Store) -> None:
    if isinstance(store, D1Store):
        store.lose(None)  # asked again, a claim knows what it got, not where it stopped
    limit(store, cap=1)
    for tenant in "abcd":
        add(store, f"t:{tenant}", 2)

    def claim(look_at: int, after: str = "") -> Any:
        op = lanes.claim("default", [Walk("t", after)], limit=9, lanes=look_at, token=new_token(), worker="w", now=NOW)
        return store.run(op).cut

    assert claim(2) == {"t": "t:b"}
    assert claim(2, "t:d") == {"t": "t:b"}
    assert claim(3, "t:b") == {"t": "t:a"}
    assert claim(5) == {}


def test_b06_limits_are_changed_at_run_time_and_reset_to_the_code(store: Store) -> None:
    limit(store, cap=2)
    add(store, "t", 9)
    store.run(lanes.limit("t", cap=4, by="me", why="more", now=NOW))
    assert len(take(store)) == 4
    store.run(lanes.limit("t", cap=0, by="me", why="all", now=NOW))
    assert len(take(store, 3)) == 3
    store.run(lanes.limit("t", reset=True, by="me", why="back", now=NOW))
    assert take(store) == []
    [said] = store.run(lanes.limits())
    assert (said.cap, said.set_cap, said.set_by, said.set_why) == (2, None, "me", "back")
    told = [event for event in store.run(ops.events()) if event.name == "task.limited"]
    assert [(event.subject, event.by, event.why) for event in told] == [
        ("t", "me", "more"),
        ("t", "me", "all"),
        ("t", "me", "back"),
    ]


def test_b06_a_limit_removed_from_the_code_ends(store: Store) -> None:
    limit(store, cap=1)
    add(store, "t", 3)
    assert len(take(store)) == 1
    limit(store)
    assert len(take(store)) == 2


def test_b06_a_paused_task_or_queue_gives_no_job(store: Store) -> None:
    add(store, "t", 2)
    store.run(ops.pause("task", "t", by="me", why="so", now=NOW))
    assert take(store) == []
    store.run(ops.resume("task", "t", by="me", why="so", now=NOW))
    store.run(ops.pause("queue", "default", by="me", why="so", now=NOW))
    assert take(store) == []
    store.run(ops.resume("queue", "default", by="me", why="so", now=NOW))
    assert len(take(store)) == 2


def test_b06_a_task_that_is_not_requested_is_left_alone(store: Store) -> None:
    add(store, "u", 1, task="u")
    assert take(store) == []
    assert store.run(lanes.tasks("default")) == ["u"]
    assert len(take(store, tasks=["t", "u"])) == 1


def test_j07_within_a_cap_lane_the_order_is_that_of_all_jobs(store: Store) -> None:
    limit(store, cap=1)
    [late] = add(store, "t", now=NOW + 5)
    [low] = add(store, "t", priority=-1)
    [high] = add(store, "t", priority=9, now=NOW + 9)
    [due] = add(store, "t", delay_ms=3)
    taken = []
    for _ in range(4):
        [job] = take(store, now=NOW + 10)
        taken.append(job.id)
        succeed(store, [job], now=NOW + 10)
    assert taken == [high, due, late, low]


def test_j05_a_job_of_a_lane_is_not_claimed_before_it_is_due_nor_after_it_has_expired(store: Store) -> None:
    [job] = add(store, "t", delay_ms=100)
    add(store, "t", expires_ms=50)
    assert take(store, now=NOW + 60) == []
    assert store.run(ops.next_due("default", now=NOW + 60)) == 40
    assert ids(take(store, now=NOW + 100)) == {job}


def test_j08_a_claim_of_lanes_with_a_lost_answer_is_recalled_and_takes_no_more(store: Store) -> None:
    limit(store, cap=5)
    add(store, "t", 3)
    op = lanes.claim("default", [Walk("t")], limit=2, lanes=9, token=new_token(), worker="w", now=NOW)
    first = store.run(op)
    assert op.again is not None
    assert ids(store.run(op.again).jobs) == ids(first.jobs)
    assert len(take(store)) == 1


def test_j19_a_lane_of_an_unknown_task_is_parked_and_woken(store: Store) -> None:
    store.run(ops.register("w", host="h", pid=1, queues=["default"], tasks=["t"], beat_ms=1000, now=NOW))
    add(store, "u:a", 2, task="u")
    add(store, "t", 1)
    assert store.run(ops.park("default", now=NOW)) in (2, 0)  # D1 may have lost the answer
    assert store.run(lanes.tasks("default")) == ["t"]
    store.run(ops.wake({"u": 1}, ["default"]))
    assert len(take(store, tasks=["u"])) == 2


# Rates


@pytest.mark.slow
def test_b07_no_more_begin_in_a_window_than_the_rate_allows(store: Store) -> None:
    limit(store, rate_count=3, rate_ms=1000)
    add(store, "t", 20)
    begun: list[int] = []
    for moment in range(NOW, NOW + 5000, 50):
        jobs = take(store, now=moment)
        begun += [moment] * len(jobs)
        succeed(store, jobs, now=moment)
    for start in range(NOW - 1000, NOW + 5000, 10):
        assert sum(start <= moment < start + 1000 for moment in begun) <= 3
    assert len(begun) == 12  # at 0, 1.25, 2.5 and 3.75 s


def test_b07_a_trickle_is_not_delayed(store: Store) -> None:
    limit(store, rate_count=2, rate_ms=1000)
    for moment in range(NOW, NOW + 10_000, 700):
        add(store, "t", now=moment)
        assert len(take(store, now=moment)) == 1


def test_b07_claimed_jobs_count_whether_or_not_they_ended(store: Store) -> None:
    limit(store, rate_count=1, rate_ms=1000)
    add(store, "t", 2)
    [job] = take(store)
    store.run(ops.release([job], now=NOW))
    assert take(store, now=NOW + 1249) == []
    assert len(take(store, now=NOW + 1251)) == 1


def test_b07_every_key_has_a_rate_of_its_own(store: Store) -> None:
    limit(store, rate_count=1, rate_ms=1000)
    add(store, "t:a", 2)
    add(store, "t:b", 2)
    assert Counter(job.lane for job in take(store)) == {"t:a": 1, "t:b": 1}
    assert take(store, now=NOW + 5) == []


def test_b07_a_cap_and_a_rate_hold_together(store: Store) -> None:
    limit(store, cap=2, rate_count=3, rate_ms=1000)
    add(store, "t", 9)
    first = take(store)
    assert len(first) == 2
    succeed(store, first)
    assert len(take(store, now=NOW + 1)) == 1
    assert take(store, now=NOW + 2) == []


def test_b07_the_next_permit_is_known(store: Store) -> None:
    limit(store, rate_count=2, rate_ms=1000)
    add(store, "t", 5)
    assert store.run(lanes.next_permit("default", ["t"], now=NOW)) is None
    take(store, 1)
    take(store, 1, now=NOW + 300)
    assert store.run(lanes.next_permit("default", ["t"], now=NOW + 400)) == 850
    assert store.run(lanes.next_permit("default", ["u"], now=NOW + 400)) is None


def test_b07_a_clock_that_steps_back_holds_a_rate_up_for_a_window_and_not_for_the_step(store: Store) -> None:
    limit(store, rate_count=1, rate_ms=1000)
    add(store, "t", 3)
    assert len(take(store)) == 1
    stepped = NOW - 3_600_000
    assert take(store, now=stepped) == []
    assert take(store, now=stepped + 1200) == []
    assert len(take(store, now=stepped + 1300)) == 1


# Order


def run_in_order(store: Store, count: int, **options: Any) -> list[str]:
    """Claim and finish one after the other, and give the ids in the order in which they ran."""
    ran = []
    for _ in range(count):
        [job] = take(store, ordered=True, **options)
        ran.append(job.id)
        succeed(store, [job])
    return ran


def test_b08_jobs_of_a_key_run_one_at_a_time_in_the_order_of_their_enqueue(store: Store) -> None:
    first = add(store, "t:a", 2, ordering="block", priority=-5)
    second = add(store, "t:a", 2, ordering="block", priority=9)
    other = add(store, "t:b", 1, ordering="block")
    jobs = take(store, ordered=True)
    assert ids(jobs) == {first[0], other[0]}
    assert take(store, ordered=True) == []
    succeed(store, jobs)
    assert run_in_order(store, 3) == [first[1], *second]


@pytest.mark.parametrize("key", [None, "k"])
def test_b08_places_are_handed_out_once_and_in_order(store: Store, key: str | None) -> None:
    jobs = [NewJob(new_id(), "{}", lane="t:a", key=key and f"{key}{one}") for one in range(3)]
    op = ops.enqueue(Terms("t", ordering_dead="skip"), jobs, now=NOW)
    store.run(op)
    assert op.again is not None
    store.run(op.again)
    rows = store.query("select id, seq from duly_job order by seq")
    assert [row[0] for row in rows] == [job.id for job in jobs]
    assert [row[1] for row in rows] == [1, 2, 3]


def test_b08_a_retrying_head_blocks_its_key_only(store: Store) -> None:
    first, second = add(store, "t:a", 2, ordering="block")
    add(store, "t:b", 1, ordering="block")
    head = next(job for job in take(store, ordered=True) if job.lane == "t:a")
    assert head.id == first
    retry(store, head, 500)
    assert take(store, ordered=True, now=NOW + 400) == []
    assert ids(take(store, ordered=True, now=NOW + 500)) == {first}
    assert second not in ids(take(store, ordered=True, now=NOW + 500))


def test_b08_a_delayed_first_job_holds_the_following_ones(store: Store) -> None:
    [first] = add(store, "t:a", 1, ordering="skip", delay_ms=100)
    add(store, "t:a", 1, ordering="skip")
    assert take(store, ordered=True) == []
    assert ids(take(store, ordered=True, now=NOW + 100)) == {first}


def test_b08_a_dead_head_blocks_until_it_is_replayed_and_takes_its_own_place(store: Store) -> None:
    first, second = add(store, "t:a", 2, ordering="block")
    [job] = take(store, ordered=True)
    store.run(ops.finish([Finish(job, FAILED)], now=NOW))
    assert take(store, ordered=True) == []
    again = new_id()
    store.run(ops.replay([ops.Replay(first, again)], by="me", why="so", now=NOW))
    assert run_in_order(store, 2) == [again, second]


@pytest.mark.parametrize("settled", ["resolve", "purge"])
def test_b08_a_dead_head_that_a_person_has_settled_blocks_no_more(store: Store, settled: str) -> None:
    first, second = add(store, "t:a", 2, ordering="block")
    [job] = take(store, ordered=True)
    store.run(ops.finish([Finish(job, FAILED)], now=NOW))
    settle: Callable[..., Any] = getattr(ops, settled)
    store.run(settle([first], by="me", why="so", now=NOW))
    assert ids(take(store, ordered=True)) == {second}


def test_b08_a_dead_head_is_skipped_where_that_is_wanted_and_replayed_at_the_end(store: Store) -> None:
    first, second = add(store, "t:a", 2, ordering="skip")
    [job] = take(store, ordered=True)
    store.run(ops.finish([Finish(job, FAILED)], now=NOW))
    again = new_id()
    store.run(ops.replay([ops.Replay(first, again)], by="me", why="so", now=NOW))
    assert run_in_order(store, 2) == [second, again]


def test_b08_a_cancelled_head_lets_the_next_begin(store: Store) -> None:
    first, second = add(store, "t:a", 2, ordering="block")
    store.run(ops.cancel([first], now=NOW))
    assert ids(take(store, ordered=True)) == {second}


def test_b08_a_pruned_lane_starts_again_unless_a_dead_job_blocks_it(store: Store) -> None:
    [first] = add(store, "t:a", 1, ordering="block")
    [job] = take(store, ordered=True)
    store.run(ops.finish([Finish(job, FAILED)], now=NOW))
    day = NOW + 86_400_000
    store.run(ops.prune("lanes", now=day))
    [second] = add(store, "t:a", 1, ordering="block", now=day)
    assert take(store, ordered=True, now=day) == []
    again = new_id()
    store.run(ops.replay([ops.Replay(first, again)], by="me", why="so", now=day))
    assert run_in_order(store, 2, now=day) == [again, second]
    store.run(ops.prune("lanes", now=day + 86_400_000))
    assert store.query("select name from duly_lane") == []


def test_b08_jobs_from_before_their_task_had_an_order_run_too(store: Store) -> None:
    [early] = add(store, "t:a")
    assert ids(take(store, ordered=True)) == {early}
    add(store, "t:a", 1, ordering="block")
    assert take(store, ordered=True) == []
