"""Dead letters: what is kept of them, and replay, resolve, purge and their figures."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from duly.model import Change, DeadFigure, Envelope, Event, Failure, NewJob, Replayed, State, Terms
from duly.rules import keys
from duly.store import ops
from duly.store.driver import Point
from duly.store.ops import Replay
from tests.contract.stores import PostgresStore, Store, new_id

DAY = 86_400_000


def replay(store: Store, job_id: str, *, by: str = "ann", why: str = "fixed", **more: Any) -> Replayed:
    (one,) = store.run(ops.replay([Replay(job_id, new_id(), **more)], by=by, why=why, now=store.now))
    return one


def replayed(store: Store, job_id: str, **more: Any) -> str:
    """Replay a job that is known to be replayable; answer the new id."""
    one = replay(store, job_id, **more)
    assert one.new_id is not None
    return one.new_id


def dead_ids(store: Store, **filters: Any) -> list[str]:
    return [job.id for job in store.run(ops.dead_list(now=store.now, **filters))]


def add_step(store: Store, job_id: str, name: str, state: str, result: str | None = None) -> None:
    store.query(
        "insert into duly_step (job_id, name, kind, state, attempt, key, result, error, created_at, changed_at) "
        "values (?, ?, 'once', ?, 2, 'k1', ?, 'e', 11, 12)",
        job_id,
        name,
        state,
        result,
    )


def add_batch(store: Store, size: int, **callbacks: str) -> str:
    batch_id = new_id()
    specs = {
        column: json.dumps(
            {
                "id": new_id(),
                "task": task,
                "queue": "callbacks",
                "priority": 0,
                "max_attempts": 5,
                "lease_ms": 1000,
                "keep_ms": 1,
                "result_ttl_ms": 1,
                "payload": "{}",
            }
        )
        for column, task in callbacks.items()
    }
    store.query(
        "insert into duly_batch (id, name, created_at, sealed_at, open, on_complete, on_success, on_first_dead) "
        "values (?, 'b', 1, 1, ?, ?, ?, ?)",
        batch_id,
        size,
        *(specs.get(column) for column in ("on_complete", "on_success", "on_first_dead")),
    )
    return batch_id


def counters(store: Store, batch_id: str) -> dict[str, int]:
    names = ("open", "succeeded", "partial", "dead", "cancelled")
    (row,) = store.query(f"select {', '.join(names)} from duly_batch where id = ?", batch_id)
    return {name: count for name, count in zip(names, row, strict=True) if count}


def event(store: Store, job_id: str, name: str) -> Event:
    """The one event of that name that a job has."""
    (one,) = [event for event in store.run(ops.events(job_id=job_id)) if event.name == name]
    return one


# R04: what a dead job keeps


def test_r04_a_dead_job_keeps_payload_envelope_steps_and_attempts_for_ever(store: Store) -> None:
    envelope = Envelope(3, "corr", "cause", "order 7", f"00-{'a' * 32}-{'b' * 16}-01", "blob:1")
    job_id = new_id()
    new = NewJob(job_id, '{"order":7,"text":"ü\\n"}', envelope=envelope)
    store.run(ops.enqueue(Terms("work", max_attempts=3, keep_ms=1), [new], now=store.now))
    add_step(store, job_id, "charge", "done", '{"id":9}')
    for number in (1, 2, 3):
        (job,) = store.claim()
        failure = Failure("app.Broken", f"no {number}", f"Traceback {number}\n  line")
        last = Change(State.DEAD, error=failure)
        store.finish(job, last if number == 3 else Change(State.SCHEDULED, after_ms=0, error=failure))
    store.now += 1000 * DAY
    for what in ops.PRUNABLE:
        store.run(ops.prune(what, keep_ms=1, now=store.now))

    kept = store.get(job_id)
    assert kept is not None
    assert (kept.state, kept.payload, kept.attempt) == (State.DEAD, {"order": 7, "text": "ü\n"}, 3)
    assert (kept.error, kept.reason) == ("app.Broken: no 3", "app.Broken")
    assert (kept.schema_version, kept.correlation_id, kept.causation_id) == (3, "corr", "cause")
    assert (kept.subject, kept.traceparent, kept.payload_ref) == (
        "order 7",
        envelope.traceparent,
        "blob:1",
    )
    assert [(a.attempt, a.outcome, a.error, a.traceback) for a in store.run(ops.attempts(job_id))] == [
        (n, "failed", f"app.Broken: no {n}", f"Traceback {n}\n  line") for n in (1, 2, 3)
    ]
    (step,) = store.run(ops.steps(job_id))
    assert (step.name, step.state, step.result) == ("charge", "done", '{"id":9}')


# R05: a dead job is replayed


def test_r05_a_replay_is_a_new_job_with_the_payload_and_no_attempt(store: Store) -> None:
    terms = {"queue": "mail", "priority": 7, "max_attempts": 1, "lease_ms": 9_000, "keep_ms": 5, "result_ttl_ms": 6}
    (old,) = store.dead(payload='{"a":[1,2]}', **terms)
    store.now += 50
    new = replayed(store, old)
    assert new != old
    job = store.get(new)
    assert job is not None
    assert (job.state, job.attempt, job.crashes, job.error, job.reason) == (State.READY, 0, 0, None, None)
    assert (job.task, job.payload, job.created_at, job.due_at) == ("work", {"a": [1, 2]}, store.now, store.now)
    kept = store.query("select queue, priority, max_attempts, lease_ms, keep_ms, result_ttl_ms from duly_job")
    assert kept == [("mail", 7, 1, 9_000, 5, 6)]
    assert [claimed.id for claimed in store.claim(queue="mail")] == [new]


def test_r05_a_replay_carries_the_envelope(store: Store) -> None:
    job_id = new_id()
    new = NewJob(job_id, "{}", envelope=Envelope(2, subject="s", correlation_id="c"))
    store.run(ops.enqueue(Terms("work"), [new], now=store.now))
    store.kill(store.claim()[0])
    replayed(store, job_id)
    (again,) = store.claim()
    assert again.envelope == new.envelope


def test_r05_steps_are_copied_and_open_ones_are_unknown(store: Store) -> None:
    (old,) = store.dead()
    states = ("started", "done", "failed", "unknown", "held")
    for state in states:
        add_step(store, old, f"a {state} step", state, f'"{state}"')
    new = replayed(store, old)
    copies = store.run(ops.steps(new))
    assert {step.name: step.state for step in copies} == {
        f"a {state} step": "unknown" if state == "started" else state for state in states
    }
    assert {(step.kind, step.attempt, step.key, step.error, step.created_at) for step in copies} == {
        ("once", 2, "k1", "e", 11)
    }
    assert {step.result for step in copies} == {f'"{state}"' for state in states}
    assert {step.name: step.state for step in store.run(ops.steps(old))} == {
        f"a {state} step": state for state in states
    }


def test_r05_origin_is_the_very_first_id_through_three_deaths(store: Store) -> None:
    (first,) = store.dead()
    lineage = [first]
    for count in (1, 2, 3):
        new = replayed(store, lineage[-1])
        job = store.get(new)
        assert job is not None
        assert (job.origin, job.replay_of, job.replay_count) == (first, lineage[-1], count)
        before = store.get(lineage[-1])
        assert before is not None
        assert (before.state, before.replayed_as) == (State.DEAD, new)
        (claimed,) = store.claim()
        assert claimed.replay_count == count
        store.kill(claimed)
        lineage.append(new)
    last = store.get(lineage[-1])
    assert last is not None
    assert (last.state, last.origin, last.replay_count) == (State.DEAD, first, 3)


def test_r05_who_and_why_are_audited(store: Store) -> None:
    (old,) = store.dead()
    store.now += 5
    new = replayed(store, old, by="ann", why="fixed it")
    told = event(store, old, "job.replayed")
    assert (told.by, told.why, told.at, told.subject) == ("ann", "fixed it", store.now, "work")
    assert json.loads(told.data) == {
        "as": new, "from": "dead", "old": None, "new": None, "old_key": None, "new_key": None,
    }  # fmt: skip


def test_r05_an_edited_payload_is_run_and_audited_with_old_and_new(store: Store) -> None:
    (old,) = store.dead(payload='{"n":1}')
    new = replayed(store, old, payload='{"n":2}')
    assert store.get(new).payload == {"n": 2}
    assert store.get(old).payload == {"n": 1}
    told = json.loads(event(store, old, "job.replayed").data)
    assert (told["old"], told["new"]) == ({"n": 1}, {"n": 2})


def test_r05_the_key_stays_the_same_and_is_held_again(store: Store) -> None:
    old = store.enqueue_key("k", payload='{"n":1}').id
    store.kill(store.claim()[0])
    new = replayed(store, old)
    assert store.get(new).key == "k"
    found = store.enqueue_key("k", payload='{"n":1}')
    assert (found.id, found.deduplicated, found.conflict) == (new, True, False)
    (job,) = store.claim()
    store.succeed(job, "5")
    found = store.enqueue_key("k", payload='{"n":1}')
    assert (found.id, found.succeeded, found.result) == (new, True, "5")


def test_r05_an_edited_payload_replaces_the_fingerprint_of_its_key(store: Store) -> None:
    old = store.enqueue_key("k", payload='{"n":1}').id
    store.kill(store.claim()[0])
    new = replayed(store, old, payload='{"n":2}')
    assert not store.enqueue_key("k", payload='{"n":2}').conflict
    assert store.enqueue_key("k", payload='{"n":1}').conflict
    assert store.enqueue_key("k", payload='{"n":1}').id == new


@pytest.mark.parametrize("had", ["k", None])
def test_r05_another_key_is_taken_when_given_and_audited(store: Store, had: str | None) -> None:
    if had:
        old = store.enqueue_key(had, key_ttl_ms=1000).id
        store.kill(store.claim()[0])
    else:
        (old,) = store.dead()
    fingerprint = '{"n":1}'
    new = replayed(store, old, key="other", **({} if had else {"payload": fingerprint}))
    assert store.get(new).key == "other"
    assert store.enqueue_key("other").id == new
    told = json.loads(event(store, old, "job.replayed").data)
    assert (told["old_key"], told["new_key"]) == (had, "other")
    if had:
        assert not store.enqueue_key(had).deduplicated  # nobody holds the old one


@pytest.mark.parametrize("holder_ended", [False, True])
def test_r05_a_key_taken_meanwhile_refuses_the_replay_and_changes_nothing(store: Store, holder_ended: bool) -> None:
    old = store.enqueue_key("k").id
    store.kill(store.claim()[0])
    holder = store.enqueue_key("k").id
    if holder_ended:
        store.succeed(store.claim()[0])
    before = store.snapshot()
    refused = replay(store, old)
    assert (refused.new_id, refused.first, refused.state, refused.key_holder) == (None, False, State.DEAD, holder)
    assert store.snapshot() == before


def test_r05_an_expired_key_does_not_prevent_a_replay(store: Store) -> None:
    old = store.enqueue_key("k", key_ttl_ms=10).id
    store.kill(store.claim()[0])
    store.enqueue_key("k", key_ttl_ms=10)
    store.succeed(store.claim()[0])
    store.now += 10
    new = replayed(store, old)
    assert store.enqueue_key("k").id == new


def test_r05_two_dead_jobs_of_one_key_do_not_both_come_back(store: Store) -> None:
    dead = []
    for _ in range(2):
        dead.append(store.enqueue_key("k").id)
        store.kill(store.claim()[0])
    replays = [Replay(job_id, new_id()) for job_id in dead]
    first, second = store.run(ops.replay(replays, now=store.now))
    assert (first.new_id, second.new_id, second.key_holder) == (replays[0].new_id, None, replays[0].new_id)
    assert len(store.claim(10)) == 1


def test_r05_a_second_replay_of_the_same_job_returns_the_firsts(store: Store) -> None:
    (old,) = store.dead()
    first = replay(store, old, by="ann", why="one")
    before = store.snapshot()
    second = replay(store, old, by="bob", why="two", payload='{"n":9}')
    assert first.first
    assert (second.new_id, second.first) == (first.new_id, False)
    assert store.snapshot() == before


def test_r05_a_replay_repeated_after_a_lost_answer_is_still_the_first(store: Store) -> None:
    (old,) = store.dead()
    op = ops.replay([Replay(old, new_id())], by="ann", why="x", now=store.now)
    (first,) = store.run(op)
    (claimed,) = store.claim()
    store.succeed(claimed)  # it may even have ended meanwhile
    before = store.snapshot()
    assert store.run(op) == [first]
    assert first.first
    assert store.snapshot() == before


@pytest.mark.parametrize("store", ["sqlite", "postgres"], indirect=True)  # D1 runs one batch at a time
def test_r05_replays_of_one_job_at_the_same_time_make_one_job(store: Store) -> None:
    (old,) = store.dead()
    add_step(store, old, "s", "done")
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: replay(store, old), range(12)))
    assert len({answer.new_id for answer in answers}) == 1
    assert [answer.first for answer in answers].count(True) == 1
    assert len(store.claim(20)) == 1
    assert event(store, old, "job.replayed")


@pytest.mark.parametrize("store", ["sqlite", "postgres"], indirect=True)  # D1 runs one batch at a time
def test_r05_keyed_replays_of_one_job_at_the_same_time_make_one_job(store: Store) -> None:
    old = store.enqueue_key("k").id
    store.kill(store.claim()[0])
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: replay(store, old), range(12)))
    assert len({answer.new_id for answer in answers}) == 1
    assert [claimed.id for claimed in store.claim(20)] == [answers[0].new_id]


def test_r05_a_replay_that_begins_before_the_first_has_committed_waits_for_it(postgres_url: str) -> None:
    store, first = PostgresStore(postgres_url), PostgresStore(postgres_url)
    (old,) = store.dead()
    answers: list[Replayed] = []
    second = threading.Thread(target=lambda: answers.append(replay(store, old)))

    def begin_the_second(point: Point) -> None:
        if point.moment == "before" and point.section == "commit":
            second.start()
            while second.is_alive() and not waits_for_a_lock(postgres_url):
                pass

    first.driver.hook = begin_the_second
    new = replayed(first, old)
    second.join()
    assert [(answer.new_id, answer.first) for answer in answers] == [(new, False)]
    assert [job.id for job in store.claim(5)] == [new]
    store.close()
    first.close()


def waits_for_a_lock(url: str) -> bool:
    with psycopg.connect(url) as conn:
        return conn.execute("select 1 from pg_locks where not granted").fetchone() is not None


@pytest.mark.parametrize("state", ["ready", "running", "unknown"])
def test_r05_a_job_that_has_not_ended_is_not_replayed(store: Store, state: str) -> None:
    job_id = new_id() if state == "unknown" else store.enqueue()[0]
    if state == "running":
        store.claim()
    before = store.snapshot()
    refused = replay(store, job_id, force=True)
    assert (refused.id, refused.new_id, refused.state, refused.key_holder) == (job_id, None, None, None)
    assert store.snapshot() == before


# R06: replay of what has succeeded


def test_r06_a_succeeded_job_is_replayed_only_by_force(store: Store) -> None:
    (old,) = store.enqueue()
    store.succeed(store.claim()[0], "1")
    before = store.snapshot()
    refused = replay(store, old)
    assert (refused.new_id, refused.state) == (None, State.SUCCEEDED)
    assert store.snapshot() == before
    new = replayed(store, old, force=True, by="ann", why="again")
    assert [job.id for job in store.claim()] == [new]
    told = event(store, old, "job.replayed")
    assert (told.by, told.why, json.loads(told.data)["from"]) == ("ann", "again", "succeeded")


def test_r06_with_a_key_it_gets_the_key_of_its_replay_and_the_success_keeps_its_own(store: Store) -> None:
    old = store.enqueue_key("k").id
    store.succeed(store.claim()[0], "1")
    new = replayed(store, old, force=True, key=keys.replay_key("k", 1))
    assert store.get(new).key == "k#replay1"
    found = store.enqueue_key("k")
    assert (found.id, found.succeeded, found.result) == (old, True, "1")
    assert store.enqueue_key("k#replay1").id == new


def test_r06_a_partial_job_is_replayed_without_force(store: Store) -> None:
    old = store.enqueue_key("k").id
    store.finish(store.claim()[0], Change(State.PARTIAL, reason="mail failed"))
    new = replayed(store, old)
    found = store.enqueue_key("k")
    assert (found.id, found.succeeded) == (new, False)


# R07: which dead jobs, in which order, how many


def test_r07_dead_jobs_are_listed_oldest_first_and_bounded(store: Store) -> None:
    ids = store.dead(5)
    assert dead_ids(store) == ids
    assert dead_ids(store, limit=2) == ids[:2]
    assert dead_ids(store, limit=2, after=ids[1]) == ids[2:4]


def test_r07_only_dead_jobs_are_listed(store: Store) -> None:
    store.enqueue(5)
    succeeded, cancelled, partial, retried = store.claim(4)
    store.succeed(succeeded)
    store.finish(cancelled, Change(State.CANCELLED, reason="x"))
    store.finish(partial, Change(State.PARTIAL, reason="x"))
    store.retry(retried)
    assert dead_ids(store, all=True) == []
    assert dead_ids(store, partial=True) == [partial.id]


def test_r07_partial_ones_stand_among_the_dead_in_their_order(store: Store) -> None:
    ids = store.enqueue(6)
    for number, job in enumerate(store.claim(6)):
        if number % 2:
            store.finish(job, Change(State.PARTIAL, reason="x"))
        else:
            store.kill(job)
    assert dead_ids(store, partial=True) == ids
    assert dead_ids(store, partial=True, limit=3) == ids[:3]
    assert dead_ids(store, partial=True, limit=3, after=ids[1]) == ids[2:5]
    assert dead_ids(store) == ids[::2]


def test_r07_the_list_is_filtered_by_task_queue_batch_error_and_time(store: Store) -> None:
    batch = add_batch(store, 1)
    kinds: dict[str, dict[str, Any]] = {
        "task": {"task": "other"},
        "queue": {"queue": "mail"},
        "batch": {"batch_id": batch},
        "plain": {},
    }
    ids, at = {}, {}
    for name, terms in kinds.items():
        store.now += 1000
        (ids[name],) = store.enqueue(**terms)
        (job,) = store.claim(queue=terms.get("queue", "default"))
        store.kill(job, f"went wrong with {name}")
        at[name] = store.now
    assert dead_ids(store, task="other") == [ids["task"]]
    assert dead_ids(store, task="work") == [ids["queue"], ids["batch"], ids["plain"]]
    assert dead_ids(store, queue="mail") == [ids["queue"]]
    assert dead_ids(store, batch_id=batch) == [ids["batch"]]
    assert dead_ids(store, error="with plain") == [ids["plain"]]
    assert dead_ids(store, error="builtins.ValueError") == list(ids.values())
    assert dead_ids(store, since=at["queue"], until=at["plain"]) == [ids["queue"], ids["batch"]]
    assert dead_ids(store, task="other", queue="mail") == []
    assert dead_ids(store, error="100%_") == []


def test_r07_the_reason_is_searched_like_the_error(store: Store) -> None:
    (lost,) = store.enqueue(max_attempts=1)
    store.claim()
    store.now += 30_000
    store.run(ops.rescue(store.run(ops.expired_leases(now=store.now)), now=store.now))
    assert dead_ids(store, error="last attempt") == [lost]


def test_r07_many_are_replayed_in_one_operation_each_with_its_own_verdict(store: Store) -> None:
    dead = store.dead(3)
    (live,) = store.enqueue()
    replays = [Replay(job_id, new_id()) for job_id in [*reversed(dead), live, new_id()]]
    answers = store.run(ops.replay(replays, by="ann", why="all", now=store.now))
    assert [answer.id for answer in answers] == [one.id for one in replays]
    assert [answer.new_id for answer in answers] == [*(one.new_id for one in replays[:3]), None, None]
    assert {job.id for job in store.claim(10)} == {live, *(one.new_id for one in replays[:3])}
    assert {event(store, job_id, "job.replayed").by for job_id in dead} == {"ann"}
    assert dead_ids(store) == []


# R09: figures, and settling for good


def test_r09_metrics_count_by_task_and_reason_with_the_age_of_the_oldest(store: Store) -> None:
    store.dead(2)
    store.now += 500
    store.dead(1)
    store.dead(1, task="other")
    store.enqueue(max_attempts=1)
    store.claim()
    store.now += 30_000
    store.run(ops.rescue(store.run(ops.expired_leases(now=store.now)), now=store.now))
    store.enqueue()
    store.succeed(store.claim()[0])
    store.now += 100
    assert store.run(ops.dead_metrics(now=store.now)) == [
        DeadFigure("work", "builtins.ValueError", 3, 30_600),
        DeadFigure("other", "builtins.ValueError", 1, 30_100),
        DeadFigure("work", "worker lost on the last attempt", 1, 100),
    ]


def test_r09_no_dead_jobs_are_no_figures(store: Store) -> None:
    assert store.run(ops.dead_metrics(now=store.now)) == []


def test_r09_a_resolved_job_has_the_resolver_and_the_reason(store: Store) -> None:
    (job_id,) = store.dead()
    store.now += 7
    assert store.run(ops.resolve([job_id], by="ann", why="paid by hand", now=store.now)) == [job_id]
    job = store.get(job_id)
    assert job is not None
    assert (job.state, job.resolved_at, job.resolved_by, job.resolved_why) == (
        State.DEAD,
        store.now,
        "ann",
        "paid by hand",
    )
    told = event(store, job_id, "job.resolved")
    assert (told.by, told.why, told.at, told.subject) == ("ann", "paid by hand", store.now, "work")


def test_r09_a_job_is_resolved_once(store: Store) -> None:
    (job_id,) = store.dead()
    store.run(ops.resolve([job_id], by="ann", why="x", now=store.now))
    before = store.snapshot()
    assert store.run(ops.resolve([job_id], by="bob", why="y", now=store.now + 1)) == []
    assert store.snapshot() == before


def test_r09_only_dead_and_partial_jobs_without_a_replay_are_resolved(store: Store) -> None:
    store.enqueue(5)
    dead, partial, succeeded, cancelled, running = store.claim(5)
    store.kill(dead)
    store.finish(partial, Change(State.PARTIAL, reason="x"))
    store.succeed(succeeded)
    store.finish(cancelled, Change(State.CANCELLED, reason="x"))
    (again,) = store.dead()
    replayed(store, again)
    asked = [job.id for job in (dead, partial, succeeded, cancelled, running)]
    resolved = store.run(ops.resolve([*asked, again, new_id()], by="a", why="b", now=store.now))
    assert set(resolved) == {dead.id, partial.id}
    assert len([e for e in store.run(ops.events()) if e.name == "job.resolved"]) == 2


def test_r09_lists_and_metrics_hide_replayed_and_resolved_jobs_by_default(store: Store) -> None:
    open_, again, settled = store.dead(3)
    replayed(store, again)
    store.run(ops.resolve([settled], by="a", why="b", now=store.now))
    assert dead_ids(store) == [open_]
    assert dead_ids(store, all=True) == [open_, again, settled]
    assert [figure.count for figure in store.run(ops.dead_metrics(now=store.now))] == [1]
    assert [figure.count for figure in store.run(ops.dead_metrics(all=True, now=store.now))] == [3]
    assert store.query("select count(*) from duly_dead") == [(1,)]


@pytest.mark.parametrize("verb", ["resolve", "purge", "expire"])
def test_r09_a_repeated_resolve_names_each_job_once(store: Store, verb: str) -> None:
    if verb == "expire":
        ids = store.enqueue(2, expires_ms=1)
        store.now += 1
        op = ops.expire(ids, now=store.now)
    else:
        ids = store.dead(2)
        op = getattr(ops, verb)(ids, by="ann", why="x", now=store.now)
    assert sorted(store.run(op.again)) == ids
    assert sorted(store.run(op.again)) == ids  # and the same when it had


# Purge


def test_purge_takes_dead_jobs_with_their_attempts_and_steps_and_is_audited(store: Store) -> None:
    gone, kept = store.dead(2)
    for job_id in (gone, kept):
        add_step(store, job_id, "s", "done")
    assert store.run(ops.purge([gone], by="ann", why="gdpr", now=store.now)) == [gone]
    assert store.get(gone) is None
    assert store.run(ops.attempts(gone)) == []
    assert store.run(ops.steps(gone)) == []
    assert store.state(kept) == "dead"
    assert len(store.run(ops.attempts(kept))) == len(store.run(ops.steps(kept))) == 1
    told = event(store, gone, "job.purged")
    assert (told.by, told.why, told.at, told.subject) == ("ann", "gdpr", store.now, "work")


def test_purge_deletes_only_dead_jobs(store: Store) -> None:
    store.enqueue(6)
    jobs = store.claim(5)
    for job, state in zip(jobs, (State.SUCCEEDED, State.PARTIAL, State.CANCELLED, State.SCHEDULED), strict=False):
        store.finish(job, Change(state, reason="x", after_ms=1))
    add_step(store, jobs[0].id, "s", "done")
    before = store.snapshot()
    everything = [row[0] for table in ("duly_job", "duly_done") for row in store.query(f"select id from {table}")]
    assert len(everything) == 6
    assert store.run(ops.purge([*everything, new_id()], by="a", why="b", now=store.now)) == []
    assert store.snapshot() == before


# Batches


def test_b02_a_replay_reopens_its_batch_and_the_counters_stay_exact(store: Store) -> None:
    batch = add_batch(store, 4)
    store.enqueue(4, batch_id=batch)
    dead, partial, succeeded, cancelled = store.claim(4)
    store.kill(dead)
    store.finish(partial, Change(State.PARTIAL, reason="x"))
    store.succeed(succeeded)
    store.finish(cancelled, Change(State.CANCELLED, reason="x"))
    assert counters(store, batch) == {"dead": 1, "partial": 1, "succeeded": 1, "cancelled": 1}
    replayed(store, dead.id)
    assert counters(store, batch) == {"open": 1, "partial": 1, "succeeded": 1, "cancelled": 1}
    replay(store, dead.id)
    assert counters(store, batch) == {"open": 1, "partial": 1, "succeeded": 1, "cancelled": 1}
    replays = [Replay(job.id, new_id(), force=True) for job in (partial, succeeded, cancelled)]
    store.run(ops.replay(replays, now=store.now))
    assert counters(store, batch) == {"open": 4}
    for job in store.claim(4):
        assert job.batch_id == batch
        store.succeed(job)
    assert counters(store, batch) == {"succeeded": 4}


def test_b03_a_replay_does_not_fire_callbacks_again(store: Store) -> None:
    batch = add_batch(store, 2, on_complete="complete", on_success="success", on_first_dead="first_dead")
    store.enqueue(2, batch_id=batch)
    one, two = store.claim(2)
    store.succeed(one)
    store.kill(two)
    callbacks = store.claim(9, queue="callbacks")
    assert sorted(job.task for job in callbacks) == ["complete", "first_dead"]
    (completed_at,) = store.query("select completed_at from duly_batch")
    for end in (store.kill, store.succeed):
        store.now += 1000
        (last,) = dead_ids(store, task="work")
        replayed(store, last)
        end(store.claim()[0])
    assert counters(store, batch) == {"succeeded": 2}
    assert store.claim(9, queue="callbacks") == []
    assert store.query("select completed_at from duly_batch") == [completed_at]


def test_b03_callbacks_wait_when_a_dead_job_is_replayed_before_the_batch_is_complete(store: Store) -> None:
    batch = add_batch(store, 2, on_complete="complete", on_success="success")
    store.enqueue(2, batch_id=batch)
    one, two = store.claim(2)
    store.kill(one)
    replayed(store, one.id)
    store.succeed(two)
    assert store.claim(9, queue="callbacks") == []
    store.succeed(store.claim()[0])
    assert sorted(job.task for job in store.claim(9, queue="callbacks")) == ["complete", "success"]
