"""Batches: filled once whatever happens, counted by every end, telling of themselves once. Lines B01 to B05."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from duly.model import DAY_MS, KEEP_MS, Change, Claimed, Enqueued, NewJob, State, Terms
from duly.rules import keys
from duly.store import batches, ops
from duly.store.batches import ANYWHERE, Added, Callbacks
from duly.store.driver import Point
from duly.store.op import Finish, Held, Op
from duly.store.ops import Replay
from tests.contract import test_caller
from tests.contract.stores import CALLBACKS, NOW, D1Store, PostgresStore, Store, callback, held, new_id, snooze

WENT_WELL = ["on_complete", "on_success"]


def counts(store: Store, batch_id: str) -> tuple[int, ...]:
    """Open, and how the others ended: succeeded, partial, dead, cancelled."""
    [row] = store.query("select open, succeeded, partial, dead, cancelled from duly_batch where id = ?", batch_id)
    return row


def filled(store: Store, batch_id: str) -> int:
    return int(store.query("select filled from duly_batch where id = ?", batch_id)[0][0])


def places(batch_id: str, *numbers: int) -> list[str]:
    return [keys.id_in(batch_id, number) for number in numbers]


def adding(batch_id: str, jobs: list[NewJob], *, now: int = NOW, **more: Any) -> Op[Added]:
    terms = {name: more.pop(name) for name in list(more) if name not in ("filling", "parent")}
    return batches.add(Terms(**{"task": "work", **terms, "batch_id": batch_id}), jobs, now=now, **more)


def with_keys(*names: str, payload: str = '{"n":1}') -> list[NewJob]:
    return [NewJob(new_id(), payload, key=name) for name in names]


# Filling


def test_b01_an_empty_batch_completes_at_once_with_percent_100(store: Store) -> None:
    batch = store.batch()
    assert store.progress(batch).complete is False
    store.now += 5
    assert store.seal(batch) is True
    progress = store.progress(batch)
    assert (progress.complete, progress.percent, progress.total) == (True, 100.0, 0)
    assert (progress.sealed_at, progress.completed_at) == (NOW + 5, NOW + 5)
    assert store.told() == WENT_WELL


def test_b01_a_batch_that_is_sealed_twice_was_sealed_the_first_time(store: Store) -> None:
    batch = store.batch()
    store.seal(batch)
    before = store.snapshot()
    store.now += 9
    assert store.seal(batch) is True
    assert store.snapshot() == before


def test_b01_sealing_or_reading_an_unknown_batch_raises(store: Store) -> None:
    for unknown in (new_id(), "no id at all"):
        assert store.seal(unknown) is False
        assert store.run(batches.get(unknown)) is None
    assert store.add_as(new_id(), [new_id()]) == Added(None, False, [])
    assert store.query("select id from duly_job") == []


@pytest.mark.parametrize("last", ["seal", "end"])
def test_b01_it_is_complete_only_when_sealed_and_all_jobs_ended(store: Store, last: str) -> None:
    batch = store.batch()
    store.add(batch, 2)
    first, second = store.claim(2)
    store.succeed(first)
    steps: list[Callable[[], Any]] = [lambda: store.succeed(second), lambda: store.seal(batch)]
    for step in steps if last == "seal" else reversed(steps):
        assert not store.progress(batch).complete
        assert store.told() == []
        step()
    assert store.progress(batch).complete
    assert store.told() == WENT_WELL


def test_b01_the_name_is_a_label_that_any_number_of_batches_may_have(store: Store) -> None:
    first, second = store.batch("nightly"), store.batch("nightly")
    store.add(second)
    assert counts(store, first) == (0, 0, 0, 0, 0)
    assert counts(store, second) == (1, 0, 0, 0, 0)


def test_b01_a_batch_is_found_by_its_key_unchanged(store: Store) -> None:
    batch = store.batch("first", key="k", ok_at=0.5)
    store.add_as(batch, places(batch, 0, 1), filling=0)
    other = batches.open_batch(new_id(), "second", key="k", now=store.now + 9)
    found = store.run(other)
    assert (found.id, found.name, found.key, found.filled) == (batch, "first", "k", 2)
    assert store.query("select created_at, sealed_at from duly_batch") == [(NOW, None)]
    store.seal(batch)
    assert store.run(other) == found
    assert store.batch(key="K") != batch


@pytest.mark.parametrize("end", ["live", "succeeded", "dead", "cancelled"])
def test_b01_a_repeated_add_after_a_lost_answer_is_counted_once(store: Store, end: str) -> None:
    batch = store.batch()
    ids = [new_id(), new_id()]
    op = adding(batch, [NewJob(one, "1") for one in ids])
    assert store.run(op) == Added(0, False, [Enqueued(one) for one in ids])
    if end != "live":
        store.finish(store.claim(1)[0], Change(State(end)))
    before = store.snapshot()
    assert op.again is not None
    assert store.run(op.again) == Added(0, False, [Enqueued(one) for one in ids])
    assert store.snapshot() == before
    assert counts(store, batch)[0] == (2 if end == "live" else 1)


def test_b01_a_repeated_add_of_an_added_job_succeeds_after_sealing(store: Store) -> None:
    """Its answer was lost, and meanwhile somebody else has sealed the batch."""
    batch = store.batch()
    op = adding(batch, [NewJob(new_id(), "1"), NewJob(new_id(), "2")])
    store.run(op)
    store.succeed(store.claim(1)[0])
    store.seal(batch)
    before = store.snapshot()
    assert op.again is not None
    answer = store.run(op.again)
    assert (answer.sealed, len(answer.jobs)) == (False, 2)
    assert store.snapshot() == before


def test_b01_with_a_key_each_place_is_filled_once_and_in_order(store: Store) -> None:
    if isinstance(store, D1Store):
        store.lose(None)  # asked again, a filling says how far the batch is by then
    batch = store.batch(key="k")
    assert store.add_as(batch, places(batch, 0, 1), filling=0).filled == 0
    before = store.snapshot()
    for begin, numbers in ((0, (0, 1)), (0, (0, 1, 2, 3)), (1, (1, 2)), (5, (5,))):
        assert store.add_as(batch, places(batch, *numbers), filling=begin).filled == 2
        assert store.snapshot() == before
    assert store.add_as(batch, places(batch, 2, 3, 4), filling=2).filled == 2
    assert (filled(store, batch), counts(store, batch)[0]) == (5, 5)
    assert sorted(row[0] for row in store.query("select id from duly_job")) == places(batch, 0, 1, 2, 3, 4)


def test_b01_with_a_key_an_ended_job_of_keep_0_is_not_added_again(store: Store) -> None:
    batch = store.batch(key="k")
    store.add_as(batch, places(batch, 0, 1, 2), filling=0, keep_ms=0)
    for job in store.claim(2):
        store.succeed(job)
    assert store.query("select id from duly_done") == []
    before = store.snapshot()
    assert store.add_as(batch, places(batch, 0, 1, 2), filling=0, keep_ms=0).filled == 3
    assert store.snapshot() == before
    assert counts(store, batch) == (1, 2, 0, 0, 0)


def test_b01_the_places_of_two_batches_are_never_the_same(store: Store) -> None:
    made = [store.batch(key=f"k{n}") for n in range(20)]
    ids = {one for batch in made for one in places(batch, 0, 1, 2, 1_000_000, 4_000_000_000)}
    assert len(ids) == 20 * 5
    assert places(made[0], *range(300)) == sorted(places(made[0], *range(300)))


@pytest.mark.parametrize("filling", [ANYWHERE, 0])
@pytest.mark.parametrize("keyed", [False, True])
def test_b01_a_sealed_batch_refuses_jobs_and_keeps_no_key(store: Store, filling: int, keyed: bool) -> None:
    batch = store.batch(key=None if filling == ANYWHERE else "k")
    store.enqueue_key("live", queue="other")
    store.seal(batch)
    before = store.snapshot()
    jobs = with_keys("new", "live") if keyed else [NewJob(new_id(), "1")]
    added = store.run(adding(batch, jobs, filling=filling))
    assert added.sealed is True
    assert store.snapshot() == before


def test_b01_only_jobs_that_got_their_key_count(store: Store) -> None:
    """One is new, one comes twice, one is live elsewhere, one has succeeded, one is taken by other work."""
    batch = store.batch()
    live = store.enqueue_key("live", queue="other").id
    done = store.enqueue_key("done").id
    store.succeed(store.claim(1)[0], '"r"')
    store.enqueue_key("taken", payload="2", queue="other")
    jobs = with_keys("new", "new", "live", "done", "taken")
    answers = store.run(adding(batch, jobs)).jobs
    assert [(answer.id, answer.deduplicated) for answer in answers[:4]] == [
        (jobs[0].id, False), (jobs[0].id, True), (live, True), (done, True),
    ]  # fmt: skip
    assert [answer.conflict for answer in answers] == [False, False, False, False, True]
    assert counts(store, batch) == (1, 0, 0, 0, 0)
    assert store.query("select id from duly_job where batch_id = ?", batch) == [(jobs[0].id,)]


@pytest.mark.parametrize("filling", [ANYWHERE, 0])
@pytest.mark.parametrize("end", ["live", "succeeded", "dead", "cancelled"])
def test_b01_jobs_with_keys_are_counted_once_after_a_lost_answer_too(store: Store, filling: int, end: str) -> None:
    batch = store.batch(key=None if filling == ANYWHERE else "k")
    store.enqueue_key("live", queue="other")
    jobs = with_keys("a", "b", "live")
    op = adding(batch, jobs, filling=filling)
    store.run(op)
    if end != "live":
        store.finish(store.claim(1)[0], Change(State(end)))
    before = store.snapshot()
    assert op.again is not None
    again = store.run(op.again)
    assert store.snapshot() == before
    assert counts(store, batch)[0] == (2 if end == "live" else 1)
    assert again.filled == (0 if filling == ANYWHERE else 3)


@pytest.mark.parametrize("filling", [ANYWHERE, 0])
@pytest.mark.parametrize("keyed", [False, True])
def test_b01_a_handler_that_lost_its_lease_adds_nothing(store: Store, filling: int, keyed: bool) -> None:
    batch = store.batch(key=None if filling == ANYWHERE else "k")
    store.enqueue()
    [parent] = store.claim(1)
    jobs = with_keys("a", "b") if keyed else [NewJob(new_id(), "1"), NewJob(new_id(), "2")]
    before = store.snapshot()
    for lost in (Held(parent.id, parent.token + 1), Held(new_id(), parent.token)):
        op = adding(batch, jobs, filling=filling, parent=lost)
        assert op.again is not None
        for asked in (op, op.again):
            assert store.run(asked).lost is True
            assert store.snapshot() == before
    added = store.run(adding(batch, jobs, filling=filling, parent=held(parent)))
    assert (added.lost, added.sealed, len(added.jobs)) == (False, False, 2)
    assert counts(store, batch)[0] == 2


# Progress


def test_b02_progress_counts_pending_running_and_every_end(store: Store) -> None:
    batch, other = store.batch(), store.batch()
    store.add(batch, 8)
    store.add(other, 1)
    taken = [job for job in store.claim(9) if job.batch_id == batch]
    for job, end in zip(taken, ("succeeded", "succeeded", "partial", "dead", "cancelled"), strict=False):
        store.finish(job, Change(State(end)))
    store.run(ops.release(taken[5:6], now=store.now))
    progress = store.progress(batch)
    assert (progress.pending, progress.running, progress.open) == (1, 2, 3)
    assert (progress.succeeded, progress.partial, progress.dead, progress.cancelled) == (2, 1, 1, 1)
    assert (progress.total, progress.percent) == (8, 62.5)
    assert (progress.name, progress.key, progress.ok_at, progress.created_at) == ("b", None, 1.0, NOW)
    assert (store.progress(other).pending, store.progress(other).running) == (0, 1)


def test_b02_counters_are_exact_for_every_end_of_a_job(store: Store) -> None:
    """Each of them takes another way; `open` falls by one for each end, and only then."""
    batch = store.batch()
    retried, snoozed, rescued, released = store.add(batch, 4)
    for job in store.claim(4):
        if job.id == retried:
            store.retry(job, after_ms=0)
        elif job.id == snoozed:
            store.run(snooze(job, 0, now=store.now))
        elif job.id == released:
            store.run(ops.release([job], now=store.now))
    store.now += 100_000
    seen = store.run(ops.expired_leases(now=store.now))
    assert list(store.run(ops.rescue(seen, now=store.now))) == [rescued]
    assert counts(store, batch) == (4, 0, 0, 0, 0)
    for job in [*store.claim(9), *store.claim(1, alone=True)]:
        store.succeed(job)
        store.succeed(job)
    assert counts(store, batch) == (0, 4, 0, 0, 0)
    [cancelled] = store.add(batch, 1)
    store.run(ops.cancel([cancelled], now=store.now))
    [expired] = store.add(batch, 1, expires_ms=5, delay_ms=50)
    store.now += 5
    store.run(ops.expire([expired], now=store.now))
    [running] = store.add(batch, 1)
    [job] = store.claim(1)
    store.run(ops.cancel([running], now=store.now))
    assert counts(store, batch) == (1, 4, 0, 0, 2)
    store.kill(job)
    assert counts(store, batch) == (0, 4, 0, 1, 2)
    [crashed] = store.add(batch, 1, max_attempts=1)
    store.claim(1)
    store.now += 100_000
    store.run(ops.rescue(store.run(ops.expired_leases(now=store.now)), now=store.now))
    assert store.state(crashed) == "dead"
    assert counts(store, batch) == (0, 4, 0, 2, 2)


@pytest.mark.parametrize("at_once", [True, False])
def test_b02_ends_of_every_kind_in_one_turn_are_counted_each_in_its_batch(store: Store, at_once: bool) -> None:
    """Successes with and without a key, with `keep=0` after a retry, a death, and one that is of no batch."""
    one, two = store.batch(), store.batch(key="k")
    store.add(one, 2)
    store.run(adding(one, with_keys("a")))
    [gone] = places(two, 0)
    store.add_as(two, [gone], filling=0, keep_ms=0)
    [died] = store.add(two)
    store.enqueue()
    [first] = [job for job in store.claim(9) if job.id == gone]
    store.retry(first, after_ms=0)
    assert len(store.run(ops.attempts(gone))) == 1
    for batch in (one, two):
        store.seal(batch)
    jobs = [*running(store), *store.claim(9)]
    assert len(jobs) == 6
    finishes = [Finish(job, Change(State.DEAD if job.id == died else State.SUCCEEDED, result="1")) for job in jobs]
    for group in [finishes] if at_once else [[finish] for finish in finishes]:
        assert set(store.run(ops.finish(group, now=store.now)).values()) <= {"recorded", "already", "gone"}
    assert counts(store, one) == (0, 3, 0, 0, 0)
    assert counts(store, two) == (0, 1, 0, 1, 0)
    assert store.told() == ["on_complete", "on_complete", "on_first_dead", "on_success"]
    assert store.run(ops.attempts(gone)) == []
    assert len(store.query("select id from duly_done")) == 5
    assert store.query("select state from duly_key") == [("succeeded",)]


def running(store: Store) -> list[Claimed]:
    """What is claimed, as its workers have it."""
    tokens = store.query("select distinct token from duly_job where token is not null")
    return [job for (token,) in tokens for job in store.run(ops.recall(token))]


def test_b02_a_success_of_a_worker_that_lost_its_lease_is_not_counted(store: Store) -> None:
    batch = store.batch()
    store.add(batch, 2)
    lost, other = store.claim(2)
    store.now += 100_000
    store.run(ops.rescue(store.run(ops.expired_leases(now=store.now)), now=store.now))
    before = store.snapshot()
    for job in (lost, other):
        assert store.succeed(job) == "lost"
    assert store.snapshot() == before
    assert counts(store, batch) == (2, 0, 0, 0, 0)


@pytest.mark.parametrize("end", ["succeeded", "partial", "dead", "cancelled"])
def test_b02_a_replay_reopens_a_complete_batch_until_it_has_ended_again(store: Store, end: str) -> None:
    batch = store.batch()
    [job_id] = store.add(batch)
    store.seal(batch)
    store.finish(store.claim(1)[0], Change(State(end)))
    completed_at = store.progress(batch).completed_at
    told = store.told()
    store.now += 5
    replay = ops.replay([Replay(job_id, new_id(), force=end == "succeeded")], by="me", why="so", now=store.now)
    store.run(replay)
    store.run(replay)
    assert counts(store, batch) == (1, 0, 0, 0, 0)
    assert (store.progress(batch).complete, store.progress(batch).percent) == (False, 0.0)
    assert [one.id for one in store.run(batches.listing(active=True))] == [batch]
    store.succeed(store.claim(1)[0])
    assert counts(store, batch) == (0, 1, 0, 0, 0)
    assert (store.progress(batch).complete, store.progress(batch).completed_at) == (True, completed_at)
    assert store.told() == told


def test_b02_batches_are_listed_newest_first_by_name_key_and_pending(store: Store) -> None:
    made = [store.batch(f"n{n % 2}", key=f"k{n}" if n < 2 else None) for n in range(6)]
    store.add(made[4])
    store.seal(made[4])
    store.seal(made[5])
    newest = made[::-1]

    def listed(**filters: Any) -> list[str]:
        return [one.id for one in store.run(batches.listing(**filters))]

    assert listed() == newest
    assert listed(name="n1") == [made[5], made[3], made[1]]
    assert listed(key="k1") == [made[1]]
    assert listed(key="k1", name="n0") == []
    assert listed(active=False) == [made[5]]
    assert listed(active=True) == newest[1:]
    assert listed(limit=2) == newest[:2]
    assert listed(limit=2, before=newest[1]) == newest[2:4]
    assert listed(limit=9, before=newest[4], name="n0") == [made[0]]
    assert listed(prefix=made[2]) == [made[2]]
    assert listed(prefix=made[2][:30], before=made[2]) == [
        one for one in newest if one[:30] == made[2][:30] and one < made[2]
    ]
    assert listed(prefix="no id") == []


def test_b02_the_view_for_people_shows_totals_and_times(store: Store) -> None:
    batch = store.batch("import", key="k")
    store.add(batch, 2)
    store.kill(store.claim(1)[0])
    store.seal(batch)
    [row] = store.query("select name, key, open, dead, total, created, sealed, completed from duly_batches")
    assert row[:5] == ("import", "k", 1, 1, 2)
    assert str(row[5])[:10] == "2027-01-15"
    assert row[6] is not None
    assert row[7] is None


# Callbacks


@pytest.mark.parametrize(
    ("ok_at", "succeeded", "total", "success"),
    [
        (1.0, 3, 3, True),
        (1.0, 2, 3, False),
        (0.5, 1, 2, True),
        (0.5, 1, 3, False),
        (0.28, 7, 25, True),  # 0.28 * 25 is a little more than 7 where numbers are binary
        (0.28, 6, 25, False),
        (0.95, 19, 20, True),
        (0.95, 18, 20, False),
        (0.01, 0, 2, False),
    ],
)
@pytest.mark.parametrize("last", ["seal", "end"])
def test_b03_a_batch_succeeds_from_the_share_of_ok_at(
    store: Store, ok_at: float, succeeded: int, total: int, success: bool, last: str
) -> None:
    batch = store.batch(ok_at=ok_at)
    store.add(batch, total)
    if last == "end":
        store.seal(batch)
    others = [State.DEAD, State.PARTIAL, State.CANCELLED]
    ends = [State.SUCCEEDED] * succeeded + [others[n % 3] for n in range(total - succeeded)]
    jobs = store.claim(total)
    for job, end in zip(jobs, ends, strict=True):
        assert not {"on_complete", "on_success"} & set(store.told())
        store.finish(job, Change(end))
    if last == "seal":
        store.seal(batch)
    assert [one for one in store.told() if one != "on_first_dead"] == ["on_complete", "on_success"][: 1 + success]


@pytest.mark.parametrize("at_once", [True, False])
def test_b03_the_last_two_ends_call_back_once(store: Store, at_once: bool) -> None:
    batch = store.batch()
    store.add(batch, 2)
    store.seal(batch)
    finishes = [Finish(job, Change(State.SUCCEEDED)) for job in store.claim(2)]
    for group in [finishes] if at_once else [finishes[:1], finishes[1:]]:
        store.run(ops.finish(group, now=store.now))
    assert store.told() == WENT_WELL
    before = store.snapshot()
    store.seal(batch)
    store.run(ops.finish(finishes, now=store.now))
    assert store.snapshot() == before


def test_b03_the_first_death_calls_back_at_once_and_no_other_does(store: Store) -> None:
    batch = store.batch()
    ids = store.add(batch, 3, max_attempts=1)
    jobs = store.claim(3)
    store.kill(jobs[0])
    assert store.told() == ["on_first_dead"]
    assert store.progress(batch).first_dead_at == NOW
    store.now += 5
    store.run(ops.replay([Replay(ids[0], new_id())], now=store.now))
    store.kill(store.claim(1)[0])
    store.kill(jobs[1])
    store.seal(batch)
    store.kill(jobs[2])
    assert store.told() == ["on_complete", "on_first_dead"]
    assert store.progress(batch).first_dead_at == NOW
    assert counts(store, batch) == (0, 0, 0, 3, 0)


def test_b03_a_callback_is_a_job_with_the_terms_and_the_words_it_was_given(store: Store) -> None:
    told = callback("told", queue="late", priority=-2, max_attempts=7, payload='{"a":1}', envelope='{"batch":"b"}')
    opening = batches.open_batch(new_id(), "b", callbacks=Callbacks(on_complete=told), now=store.now)
    store.seal(store.run(opening).id)
    [job] = store.claim(5, queue="late")
    assert (job.id, job.task, job.priority, job.max_attempts) == (json.loads(told)["id"], "told", -2, 7)
    assert (job.payload, job.envelope.batch, job.batch_id) == ('{"a":1}', "b", None)
    assert store.told() == []


def test_b03_a_batch_without_callbacks_enqueues_none(store: Store) -> None:
    batch = store.run(batches.open_batch(new_id(), "b", now=store.now)).id
    store.add(batch, 2)
    first, second = store.claim(2)
    store.kill(first)
    store.succeed(second)
    store.seal(batch)
    assert store.query("select id from duly_job") == []
    assert store.progress(batch).complete


def at_the_same_moment(*actions: Callable[[], Any]) -> None:
    barrier = threading.Barrier(len(actions))
    failed: list[BaseException] = []

    def run(action: Callable[[], Any]) -> None:
        try:
            barrier.wait(10)
            action()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_b03_the_last_end_and_the_seal_at_the_same_moment_call_back_once(postgres_url: str) -> None:
    one, two = PostgresStore(postgres_url), PostgresStore(postgres_url)
    for _ in range(30):
        batch = one.batch()
        one.add(batch)
        [job] = one.claim(1)
        at_the_same_moment(partial(one.succeed, job), partial(two.seal, batch))
        assert one.told() == WENT_WELL
        assert one.progress(batch).complete
        one.query("delete from duly_job")
    one.close()
    two.close()


def test_b01_two_that_fill_one_batch_at_the_same_moment_add_each_place_once(postgres_url: str) -> None:
    stores = PostgresStore(postgres_url), PostgresStore(postgres_url)
    made = [store.batch(key="k") for store in stores]
    assert made[0] == made[1]
    batch = made[0]
    for begin in range(0, 60, 2):
        ids = places(batch, begin, begin + 1)
        at_the_same_moment(*(partial(store.add_as, batch, ids, filling=begin) for store in stores))
    assert (filled(stores[0], batch), counts(stores[0], batch)[0]) == (60, 60)
    for store in stores:
        store.close()


@pytest.mark.parametrize("filling", [ANYWHERE, 0])
@pytest.mark.parametrize("section", ["count_added", "count_filled", "enqueue", "enqueue_again"])
def test_b01_a_batch_is_not_sealed_while_something_is_added(postgres_url: str, filling: int, section: str) -> None:
    one, two = PostgresStore(postgres_url), PostgresStore(postgres_url)
    batch = one.batch(key="k")
    sealing = threading.Thread(target=two.seal, args=(batch,))

    def seal_meanwhile(point: Point) -> None:
        if (point.moment, point.section) == ("before", section):
            sealing.start()
            sealing.join(0.3)  # it waits for the end of this

    one.driver.hook = seal_meanwhile
    added = one.add_as(batch, [new_id(), new_id()], filling=filling)
    if sealing.ident is None:  # this section is not asked here
        sealing.start()
    sealing.join()
    assert added.sealed is False
    assert counts(one, batch) == (2, 0, 0, 0, 0)
    assert one.query("select count(*) from duly_job where queue = 'default'") == [(2,)]
    for store in (one, two):
        store.close()


def test_b01_a_batch_opened_twice_at_the_same_moment_under_one_key_is_one(postgres_url: str) -> None:
    stores = PostgresStore(postgres_url), PostgresStore(postgres_url)
    for n in range(20):
        at_the_same_moment(*(partial(store.batch, key=f"k{n}") for store in stores))
        assert len(stores[0].query("select id from duly_batch")) == n + 1
    for store in stores:
        store.close()


# On a connection of the caller's own

borrowed = test_caller.borrowed


@pytest.mark.parametrize("commit", [True, False])
def test_b01_a_batch_commits_or_rolls_back_with_the_caller_on_every_kind_of_connection(
    borrowed: tuple[Store, test_caller.Caller], commit: bool
) -> None:
    store, theirs = borrowed
    before = store.snapshot()
    told = Callbacks(*map(callback, CALLBACKS))
    batch = theirs.enqueue(batches.open_batch(new_id(), "b", key="k", ok_at=0.5, callbacks=told, now=NOW)).id
    for op in (
        adding(batch, [NewJob(new_id(), "1")]),
        adding(batch, with_keys("a", "b")),
        adding(batch, [NewJob(one, "1") for one in places(batch, 0, 1)], filling=0),
        adding(batch, with_keys("c"), filling=2),
    ):
        assert not theirs.enqueue(op).sealed
    assert theirs.enqueue(batches.seal(batch, now=NOW)) is True
    assert store.snapshot() == before
    if not commit:
        theirs.rollback()
        assert store.snapshot() == before
        return
    theirs.commit()
    assert (store.progress(batch).pending, filled(store, batch)) == (6, 3)
    for job in store.claim(9):
        store.succeed(job)
    assert store.told() == WENT_WELL


# Only a label


def test_b04_claiming_is_global_and_a_rescued_job_of_an_old_batch_runs_like_any_other(store: Store) -> None:
    old = store.batch()
    [first] = store.add(old, 1)
    store.claim(1)
    store.now += 100_000
    new = store.batch()
    [second] = store.add(new)
    [outside] = store.enqueue()
    store.run(ops.rescue(store.run(ops.expired_leases(now=store.now)), now=store.now))
    taken = [*store.claim(9), *store.claim(1, alone=True)]
    assert sorted(job.id for job in taken) == sorted([first, second, outside])
    assert {job.id: job.batch_id for job in taken} == {first: old, second: new, outside: None}


def test_b04_jobs_are_added_while_others_run_and_have_ended_until_it_is_sealed(store: Store) -> None:
    batch = store.batch()
    store.add(batch)
    store.succeed(store.claim(1)[0])
    assert counts(store, batch) == (0, 1, 0, 0, 0)
    assert store.told() == []
    store.add(batch, 2)
    assert counts(store, batch) == (2, 1, 0, 0, 0)
    store.seal(batch)
    assert store.add_as(batch, [new_id()]).sealed
    for job in store.claim(2):
        store.succeed(job)
    assert store.told() == WENT_WELL


def test_b04_the_rest_of_a_batch_has_neither_ended_nor_been_cancelled(store: Store) -> None:
    batch, other = store.batch(), store.batch()
    ids = store.add(batch, 4)
    store.add(other)
    ended, asked, running = store.claim(3)
    store.succeed(ended)
    store.run(ops.cancel([asked.id], now=store.now))
    assert sorted(store.run(batches.rest(batch))) == sorted([running.id, ids[3]])
    assert len(store.run(batches.rest(batch, limit=1))) == 1
    assert store.run(batches.rest(new_id())) == []


def test_b05_claims_rescue_and_cleanup_work_in_a_batch_that_is_never_sealed(store: Store) -> None:
    batch = store.batch()
    store.add(batch, 3)
    first, second, _ = store.claim(3)
    store.succeed(first)
    store.kill(second)
    store.now += 100_000
    store.run(ops.rescue(store.run(ops.expired_leases(now=store.now)), now=store.now))
    [job] = store.claim(1, alone=True)
    store.succeed(job)
    store.now += KEEP_MS + DAY_MS
    assert store.run(ops.prune("done", now=store.now)) == 2
    assert store.run(ops.prune("batches", now=store.now)) == 0
    assert counts(store, batch) == (0, 2, 0, 1, 0)


def test_b05_a_complete_batch_is_pruned_with_its_jobs_and_not_before(store: Store) -> None:
    complete, opened, waiting, reopened = (store.batch() for _ in range(4))
    store.add(complete)
    store.add(waiting, delay_ms=10 * KEEP_MS)
    [dead] = store.add(reopened)
    store.succeed(store.claim(1)[0])
    store.kill(store.claim(1)[0])
    for batch in (complete, waiting, reopened):
        store.seal(batch)
    store.run(ops.replay([Replay(dead, new_id())], now=store.now))
    store.run(ops.purge([dead], now=store.now))
    assert store.run(ops.prune("batches", now=store.now + KEEP_MS - 1)) == 0
    store.now += KEEP_MS
    assert store.run(ops.prune("batches", now=store.now)) == 0  # its job is still there
    store.run(ops.prune("done", now=store.now))
    assert store.run(ops.prunable(now=store.now))["batches"] == 1
    assert store.run(ops.prune("batches", now=store.now)) == 1
    left = {one.id for one in store.run(batches.listing())}
    assert left == {opened, waiting, reopened}


def test_b05_a_key_is_free_again_once_its_batch_is_pruned(store: Store) -> None:
    batch = store.batch(key="k")
    store.seal(batch)
    store.now += KEEP_MS
    assert store.batch(key="k") == batch
    store.run(ops.prune("batches", now=store.now))
    assert store.batch(key="k") != batch


def test_b03_there_are_exactly_three_callbacks() -> None:
    assert set(CALLBACKS) == set(Callbacks.__struct_fields__)
