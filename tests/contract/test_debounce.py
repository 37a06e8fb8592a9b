"""Many calls, one job: debounce, and keys that are kept from the enqueue on. Line B11."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest

from duly.app.context import SyncCtx
from duly.app.lease import Lease
from duly.errors import ConfigError
from duly.model import DAY_MS, Change, Claimed, Enqueued, Envelope, Failure, NewJob, Sighting, State, Terms
from duly.store import ops
from duly.store.op import Finish, Held
from duly.store.ops import Replay
from tests.contract.stores import D1Store, PostgresStore, Store, database_of, new_id, snooze

WINDOW = 30_000
HOUR = 3_600_000
NO = Failure("builtins.ValueError", "no", "a traceback")


def debounce(store: Store, payload: Any = 1, *, key: str = "k", parent: Held | None = None, **terms: Any) -> Enqueued:
    """One call under a key, and what came of it."""
    job = NewJob(
        terms.pop("id", None) or new_id(), json.dumps(payload), key=key, envelope=terms.pop("envelope", Envelope())
    )
    asked = Terms(**{"task": "work", "debounce_ms": WINDOW, **terms})
    return store.run(ops.enqueue(asked, [job], parent=parent, now=store.now))[0]


def live(store: Store) -> list[tuple[Any, ...]]:
    return store.query("select id, state, payload, due_at from duly_job order by id")


def holder(store: Store, key: str = "k") -> list[tuple[Any, ...]]:
    return store.query("select job_id, state, fingerprint from duly_key where key = ?", key)


def begin(store: Store, payload: Any = "first", **terms: Any) -> Claimed:
    """A debounced job that runs."""
    debounce(store, payload, **terms)
    store.now += WINDOW
    [job] = store.claim()
    return job


# Debounce


def test_b11_the_first_call_adds_a_job_that_is_due_after_the_window(store: Store) -> None:
    made = debounce(store, "a")
    assert not made.deduplicated
    assert live(store) == [(made.id, "scheduled", '"a"', store.now + WINDOW)]
    assert store.claim() == []
    store.now += WINDOW
    [job] = store.claim()
    assert (job.id, job.payload) == (made.id, '"a"')


def test_b11_the_last_payload_within_the_window_wins_and_each_call_puts_it_off(store: Store) -> None:
    first = debounce(store, "a", envelope=Envelope(subject="one"))
    for payload in ("b", "c"):
        store.now += WINDOW - 1
        again = debounce(store, payload, envelope=Envelope(subject=payload))
        assert again == Enqueued(first.id, deduplicated=True)
    assert live(store) == [(first.id, "scheduled", '"c"', store.now + WINDOW)]
    store.now += WINDOW
    [job] = store.claim(9)
    assert (job.payload, job.envelope.subject) == ('"c"', "c")


def test_b11_the_terms_are_those_of_the_last_call(store: Store) -> None:
    made = debounce(store, "a", queue="slow", priority=1, max_attempts=1, expires_ms=5)
    debounce(store, "b", queue="fast", priority=7, max_attempts=3, expires_ms=WINDOW * 9)
    job = store.get(made.id)
    assert job is not None
    assert (job.queue, job.priority, job.max_attempts) == ("fast", 7, 3)
    assert job.expires_at == store.now + WINDOW * 9
    debounce(store, "c")
    job = store.get(made.id)
    assert job is not None
    assert (job.queue, job.expires_at) == ("default", None)


def test_b11_a_call_reaches_a_job_that_is_due_and_has_not_begun(store: Store) -> None:
    made = debounce(store, "a")
    store.now += WINDOW
    store.run(ops.promote("default", now=store.now))
    assert store.state(made.id) == "ready"
    debounce(store, "b")
    assert live(store) == [(made.id, "scheduled", '"b"', store.now + WINDOW)]
    assert store.claim() == []


def test_b11_a_call_reaches_a_job_that_is_parked(store: Store) -> None:
    made = debounce(store, "a")
    store.now += WINDOW
    store.run(ops.register("w", host="h", pid=1, queues=["default"], tasks=["x"], beat_ms=9, now=store.now))
    store.run(ops.park("default", now=store.now))
    assert store.state(made.id) == "waiting"
    debounce(store, "b")
    assert live(store) == [(made.id, "scheduled", '"b"', store.now + WINDOW)]
    assert store.query("select reason, parked_version from duly_job") == [(None, None)]


def test_b11_keys_are_apart_by_task_and_by_key(store: Store) -> None:
    ids = {debounce(store, key="a").id, debounce(store, key="b").id, debounce(store, key="a", task="other").id}
    assert len(ids) == len(live(store)) == 3


def test_b11_another_payload_is_never_a_conflict(store: Store) -> None:
    plain = store.enqueue_key("k", payload='"plain"', delay_ms=5)
    assert debounce(store, "b") == Enqueued(plain.id, deduplicated=True)
    assert store.enqueue_key("k", payload='"b"').conflict is False
    assert store.enqueue_key("k", payload='"plain"').conflict is True
    assert live(store) == [(plain.id, "scheduled", '"b"', store.now + WINDOW)]


def test_b11_a_call_while_the_job_runs_begins_when_it_has_ended_and_is_not_lost(store: Store) -> None:
    job = begin(store)
    second = debounce(store, "b")
    assert second.id != job.id
    assert (second.deduplicated, second.behind) == (False, True)
    store.now += 10
    third = debounce(store, "c")
    assert third == Enqueued(second.id, deduplicated=True, behind=True)
    assert [row[0] for row in live(store)] == [job.id]
    assert store.query("select payload from duly_job") == [('"first"',)]
    called_at = store.now
    store.now += 10
    if isinstance(store, D1Store):
        store.lose(None)  # asked again, an end that was recorded is said to be so already
    assert store.succeed(job, '"r"') == "recorded"
    assert live(store) == [(second.id, "scheduled", '"c"', called_at + WINDOW)]
    assert holder(store)[0][:2] == (second.id, "live")
    store.now += WINDOW
    [following] = store.claim()
    assert (following.payload, following.key) == ('"c"', "k")
    assert store.succeed(following) == "recorded"
    assert live(store) == []
    assert holder(store)[0][:2] == (second.id, "succeeded")


def dies(store: Store, job: Claimed) -> None:
    store.kill(job)


def is_retried_to_death(store: Store, job: Claimed) -> None:
    store.retry(job, after_ms=0)
    [again] = store.claim()
    assert again.id == job.id
    store.kill(again)


def is_cancelled(store: Store, job: Claimed) -> None:
    store.run(ops.cancel([job.id], by="me", why="no", now=store.now))
    assert live(store)[0][0] == job.id
    store.finish(job, Change(State.CANCELLED, reason="asked"))


def is_cancelled_between_attempts(store: Store, job: Claimed) -> None:
    store.retry(job, after_ms=DAY_MS)
    store.run(ops.cancel([job.id], by="me", why="no", now=store.now))


def is_rescued_dead(store: Store, job: Claimed) -> None:
    store.now = job.lease_until + 1
    store.run(ops.rescue([Sighting(job.id, job.token, job.lease_until, job.lease_ms, "w1")], now=store.now))


def is_partly_done(store: Store, job: Claimed) -> None:
    store.finish(job, Change(State.PARTIAL, reason="half"))


def succeeds_in_a_turn(store: Store, job: Claimed) -> None:
    """With one that takes the same way and has nothing behind it, and one that takes another."""
    store.enqueue_key("other", keep_ms=DAY_MS)
    store.enqueue(keep_ms=DAY_MS)
    other, third = store.claim(2)
    ends = [(job, State.SUCCEEDED), (other, State.SUCCEEDED), (third, State.DEAD)]
    answer = store.run(ops.finish([Finish(one, Change(state)) for one, state in ends], now=store.now))
    assert len(answer) == len(ends)
    assert [store.state(one.id) for one in (other, third)] == ["succeeded", "dead"]


ENDS = [
    dies, is_retried_to_death, is_cancelled, is_cancelled_between_attempts, is_rescued_dead, is_partly_done,
    succeeds_in_a_turn,
]  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("keep_ms", [0, DAY_MS])
def test_b11_a_call_made_during_a_run_runs_after_any_end(
    store: Store, end: Callable[[Store, Claimed], None], keep_ms: int
) -> None:
    job = begin(store, max_attempts=1 if end is is_rescued_dead else 5, keep_ms=keep_ms, lease_ms=1000)
    following = debounce(store, "b", max_attempts=1, queue="next")
    due_at = store.now + WINDOW
    end(store, job)
    assert live(store) == [(following.id, "scheduled", '"b"', due_at)]
    assert holder(store)[0][:2] == (following.id, "live")
    store.now = due_at
    [following_job] = store.claim(queue="next")
    assert (following_job.id, following_job.max_attempts) == (following.id, 1)


@pytest.mark.parametrize("lost", range(3))
def test_b11_an_end_with_a_pending_call_is_recorded_whichever_answer_is_lost(tmp_path: Path, lost: int) -> None:
    store = D1Store(tmp_path / "duly.db")
    store.lose(None)
    job = begin(store)
    behind = debounce(store, "b")
    first = store.database.calls + 1
    store.lose(lambda call: call == first + lost)
    assert store.succeed(job, '"r"') in ("recorded", "already")
    assert store.database.calls > first + lost
    assert store.state(job.id) == "succeeded"
    assert [(row[0], row[2]) for row in live(store)] == [(behind.id, '"b"')]
    store.close()


def test_b11_a_callers_commit_wakes_a_worker_for_the_pending_call(postgres_url: str) -> None:
    store = PostgresStore(postgres_url)
    job = begin(store)
    debounce(store, "b")
    with psycopg.connect(postgres_url, autocommit=True) as worker, psycopg.connect(postgres_url) as conn:
        worker.execute("listen duly")
        SyncCtx(Lease(job, cast("Any", None), database_of(store), 0.0)).commit(conn)
        conn.commit()
        assert len(list(worker.notifies(timeout=5, stop_after=1))) == 1
    store.close()


def test_b11_a_call_due_before_the_job_ends_is_due_at_its_end(store: Store) -> None:
    job = begin(store)
    following = debounce(store, "b")
    store.now += 2 * WINDOW
    store.succeed(job)
    assert live(store) == [(following.id, "ready", '"b"', store.now)]


def test_b11_a_job_that_was_claimed_once_counts_as_begun(store: Store) -> None:
    """Its steps are those of its payload: with another they would be skipped."""
    job = begin(store)
    store.run(snooze(job, 1000, now=store.now))
    following = debounce(store, "b")
    assert following.id != job.id
    assert store.query("select payload from duly_job") == [('"first"',)]
    store.now += 1000
    store.succeed(store.claim()[0])
    assert [row[0] for row in live(store)] == [following.id]


def test_b11_a_replayed_job_is_not_given_another_payload(store: Store) -> None:
    job = begin(store)
    store.kill(job)
    again = new_id()
    store.run(ops.replay([Replay(job.id, again)], by="me", now=store.now))
    following = debounce(store, "b")
    assert following.id != again
    assert live(store)[0][:3] == (again, "ready", '"first"')


def test_b11_a_call_after_success_starts_again_without_the_old_result(store: Store) -> None:
    job = begin(store)
    store.succeed(job, '"old"')
    assert holder(store)[0][1] == "succeeded"
    made = debounce(store, "first")
    assert made == Enqueued(made.id)
    assert made.id != job.id
    assert live(store) == [(made.id, "scheduled", '"first"', store.now + WINDOW)]
    assert holder(store)[0][:2] == (made.id, "live")


@pytest.mark.parametrize("how", ["kill", "cancel"])
def test_b11_a_call_after_death_or_cancelling_starts_again(store: Store, how: str) -> None:
    if how == "kill":
        store.kill(begin(store))
    else:
        store.run(ops.cancel([debounce(store).id], now=store.now))
    made = debounce(store, "b")
    assert not made.deduplicated
    assert live(store) == [(made.id, "scheduled", '"b"', store.now + WINDOW)]


def test_b11_a_handler_debounces_its_own_key_while_it_holds_its_lease(store: Store) -> None:
    job = begin(store)
    following = debounce(store, "b", parent=Held(job.id, job.token))
    assert following.behind
    store.succeed(job)
    assert [row[0] for row in live(store)] == [following.id]


@pytest.mark.parametrize("begun", ["nothing", "waiting", "running", "succeeded"])
def test_b11_a_handler_that_lost_its_lease_debounces_nothing(store: Store, begun: str) -> None:
    store.enqueue(queue="q")
    [parent] = store.claim(queue="q")
    if begun == "waiting":
        debounce(store)
    elif begun != "nothing":
        job = begin(store)
        if begun == "succeeded":
            store.succeed(job)
    before = store.snapshot()
    job = NewJob(new_id(), '"lost"', key="k")
    stale = Held(parent.id, parent.token + 1)
    assert store.run(ops.enqueue(Terms("work", debounce_ms=9), [job], parent=stale, now=store.now)) == []
    assert store.snapshot() == before


def test_b11_a_repeated_call_counts_once_after_any_outcome(store: Store) -> None:
    """A repetition finds its own work, also where others have called or the job has run since."""

    def repeat(asked: Any) -> Any:
        return store.run(asked.again)

    def op(payload: str, **terms: Any) -> Any:
        job = NewJob(new_id(), json.dumps(payload), key="k")
        return ops.enqueue(Terms("work", debounce_ms=WINDOW, **terms), [job], now=store.now)

    first = op("a")
    made = store.run(first)
    second = op("b")
    store.run(second)
    store.now += 5
    before = store.snapshot()
    assert repeat(first) == made  # the other one came later, and counts
    assert repeat(second) == [Enqueued(made[0].id, deduplicated=True)]
    assert store.snapshot() == before
    store.now += WINDOW
    [job] = store.claim()
    before = store.snapshot()
    assert repeat(second) == [Enqueued(made[0].id, deduplicated=True)]
    assert store.snapshot() == before
    third, fourth = op("c"), op("d")
    [behind], _ = store.run(third), store.run(fourth)
    before = store.snapshot()
    assert repeat(fourth) == [Enqueued(behind.id, deduplicated=True, behind=True)]
    assert store.snapshot() == before
    assert repeat(third)[0].id == behind.id
    store.succeed(job)
    assert repeat(third) == [Enqueued(behind.id)]
    assert [row[:3] for row in live(store)] == [(behind.id, "scheduled", '"d"')]
    store.now += WINDOW
    store.succeed(store.claim()[0])
    before = store.snapshot()
    for asked in (first, third, fourth):
        repeat(asked)
    assert store.snapshot() == before
    # Somebody else runs under the key by now.
    store.run(op("e"))
    store.now += WINDOW
    store.claim()
    before = store.snapshot()
    assert repeat(first)[0].id == made[0].id
    assert store.snapshot() == before


@pytest.mark.parametrize("end", [dies, is_partly_done])
def test_b11_a_call_whose_job_has_ended_is_not_added_again(store: Store, end: Callable[[Store, Claimed], None]) -> None:
    job = NewJob(new_id(), "1", key="k")
    asked = ops.enqueue(Terms("work", debounce_ms=WINDOW), [job], now=store.now)
    store.run(asked)
    store.now += WINDOW
    end(store, store.claim()[0])
    before = store.snapshot()
    assert asked.again is not None
    assert store.run(asked.again)[0].id == job.id
    assert store.snapshot() == before


@pytest.mark.parametrize(
    ("terms", "jobs", "told"),
    [
        ({}, [NewJob(new_id(), "1")], "with a key"),
        ({}, [NewJob(new_id(), "1", key="a"), NewJob(new_id(), "1", key="b")], "one job"),
        ({"delay_ms": 5}, [NewJob(new_id(), "1", key="a")], "delay"),
        ({"batch_id": new_id()}, [NewJob(new_id(), "1", key="a")], "batch"),
        ({"key_window_ms": 5}, [NewJob(new_id(), "1", key="a")], "unique_for"),
    ],
)
def test_b11_options_that_a_debounce_cannot_keep_are_refused(
    terms: dict[str, Any], jobs: list[NewJob], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        ops.enqueue(Terms("work", debounce_ms=5, **terms), jobs)


# Keys that are kept from the enqueue on


def unique(store: Store, payload: Any = 1, window_ms: int = HOUR, **terms: Any) -> Enqueued:
    return store.enqueue_key("k", payload=json.dumps(payload), key_window_ms=window_ms, **terms)


def test_b11_unique_for_keeps_the_key_from_the_enqueue_on(store: Store) -> None:
    began = store.now
    made = unique(store)
    store.now += HOUR // 2
    [job] = store.claim()
    store.succeed(job, '"r"')
    store.now = began + HOUR - 1
    again = unique(store)
    assert (again.id, again.deduplicated, again.succeeded, again.result) == (made.id, True, True, '"r"')
    store.now += 1
    fresh = unique(store)
    assert not fresh.deduplicated
    assert fresh.id != made.id


@pytest.mark.parametrize("change", [Change(State.SUCCEEDED), Change(State.PARTIAL, reason="half")])
def test_b11_the_window_counts_whichever_way_the_job_ends(store: Store, change: Change) -> None:
    made = unique(store)
    began = store.now
    store.now += 10
    store.finish(store.claim()[0], change)
    assert store.query("select expires_at from duly_key") == [(began + HOUR,)]
    assert unique(store).id == made.id
    assert unique(store, "other").conflict


def test_b11_a_window_that_is_over_does_not_let_a_second_job_live_and_ends_with_the_first(store: Store) -> None:
    made = unique(store)
    store.now += 2 * HOUR
    assert unique(store).id == made.id
    store.succeed(store.claim()[0])
    fresh = unique(store)
    assert not fresh.deduplicated
    assert store.run(ops.prune("keys", now=store.now)) == 0


@pytest.mark.parametrize("state", [State.SUCCEEDED, State.PARTIAL])
def test_b11_the_result_is_kept_as_long_as_the_key(store: Store, state: State) -> None:
    long_keep = {"keep_ms": 9 * DAY_MS, "result_ttl_ms": 1000}
    end = Change(state, result='"r"')
    began = store.now
    unique(store, window_ms=DAY_MS, **long_keep)
    store.now += 500
    store.finish(store.claim()[0], end)
    assert store.query("select result_until, prune_at, key_until from duly_done") == [(began + DAY_MS,) * 3]
    store.enqueue_key("short", key_window_ms=1, **long_keep)
    store.now += 500
    store.finish(store.claim()[0], end)
    assert store.query("select result_until, prune_at from duly_done where key = 'short'") == [(store.now + 1000,) * 2]


@pytest.mark.parametrize("how", ["kill", "cancel"])
def test_b11_death_and_cancelling_free_a_key_within_its_window(store: Store, how: str) -> None:
    made = unique(store)
    if how == "kill":
        store.kill(store.claim()[0])
    else:
        store.run(ops.cancel([made.id], now=store.now))
    assert not unique(store, "other").deduplicated


def test_b11_a_replay_keeps_the_window(store: Store) -> None:
    began = store.now
    made = unique(store)
    store.kill(store.claim()[0])
    store.now += 1000
    store.run(ops.replay([Replay(made.id, new_id())], by="me", now=store.now))
    store.succeed(store.claim()[0])
    assert store.query("select expires_at from duly_key") == [(began + HOUR,)]


def test_b11_unique_for_needs_a_key() -> None:
    with pytest.raises(ConfigError, match="give key="):
        ops.enqueue(Terms("work", key_window_ms=5), [NewJob(new_id(), "1")])


def test_b11_a_debounce_takes_over_a_key_of_unique_for(store: Store) -> None:
    unique(store)
    store.succeed(store.claim()[0])
    made = debounce(store, "b")
    assert not made.deduplicated
    store.now += WINDOW
    store.succeed(store.claim()[0])
    assert store.enqueue_key("k", payload='"b"').id == made.id
