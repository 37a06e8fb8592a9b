"""Reading: what people and programs see of jobs, attempts, steps, events, workers and pauses."""

from __future__ import annotations

import ast
import datetime
import json
from pathlib import Path
from typing import Any

import pytest

import duly
from duly.model import Attempt, Change, Envelope, NewJob, Pause, State, Step, Terms
from duly.store import batches, ops
from duly.store.op import Finish
from tests.contract.stores import NOW, D1Store, Store, held, new_id


def listed(store: Store, **filters: Any) -> list[str]:
    return [job.id for job in store.run(ops.listing(now=store.now, **filters))]


def add_batch(store: Store, size: int) -> str:
    batch_id = new_id()
    store.query("insert into duly_batch (id, name, created_at, open) values (?, 'b', 1, ?)", batch_id, size)
    return batch_id


def one_of_each_state(store: Store) -> dict[str, str]:
    """Make a job of every state; answer their ids by state, oldest first."""
    made = dict(zip(("succeeded", "partial", "dead", "cancelled", "waiting"), store.enqueue(5), strict=True))
    for state, job in zip(made, store.claim(5), strict=True):
        store.finish(job, Change(State(state), reason="x", after_ms=None if state != "waiting" else 9))
    (made["running"],) = store.enqueue()
    store.claim()
    (made["ready"],) = store.enqueue()
    (made["scheduled"],) = store.enqueue(delay_ms=9)
    return made


# One job


def test_an_unknown_id_is_no_job(store: Store) -> None:
    store.enqueue()
    assert store.get(new_id()) is None
    assert store.run(ops.attempts(new_id())) == []
    assert store.run(ops.steps(new_id())) == []
    assert store.run(ops.events(job_id=new_id())) == []


def test_a_job_is_read_as_it_was_enqueued(store: Store) -> None:
    batch, job_id = add_batch(store, 1), new_id()
    terms = Terms("mail", queue="q", priority=-3, max_attempts=9, delay_ms=50, expires_ms=70, batch_id=batch)
    envelope = Envelope(schema_version=4, subject="s", causation_id="c")
    store.run(ops.enqueue(terms, [NewJob(job_id, '{"a":{"b":[1,null]}}', envelope=envelope)], now=store.now))
    job = store.get(job_id)
    assert job is not None
    assert (job.id, job.task, job.queue, job.priority) == (job_id, "mail", "q", -3)
    assert (job.state, job.payload) == (State.SCHEDULED, {"a": {"b": [1, None]}})
    assert (job.created_at, job.due_at, job.expires_at) == (NOW, NOW + 50, NOW + 70)
    assert (job.attempt, job.max_attempts, job.batch_id) == (0, 9, batch)
    assert (job.schema_version, job.subject, job.causation_id) == (4, "s", "c")
    assert job.correlation_id == job_id  # a root's own id
    assert (job.finished_at, job.result, job.worker, job.lease_until, job.origin) == (None,) * 5


def test_a_running_job_shows_its_worker_lease_progress_and_heartbeat(store: Store) -> None:
    (job_id,) = store.enqueue()
    (claimed,) = store.claim()
    store.run(ops.progress(held(claimed), 37.5, "parsing"))
    store.run(ops.heartbeat(held(claimed), now=NOW + 5))
    job = store.get(job_id)
    assert job is not None
    assert (job.state, job.worker, job.lease_until, job.attempt) == (State.RUNNING, "w1", NOW + 30_000, 1)
    assert (job.progress, job.progress_message, job.heartbeat_at) == (37.5, "parsing", NOW + 5)


def test_a_finished_job_shows_when_and_how_it_ended(store: Store) -> None:
    (job_id,) = store.enqueue()
    (claimed,) = store.claim()
    store.run(ops.progress(held(claimed), 100, "done"))
    store.now += 9
    store.succeed(claimed, '{"x":[1]}')
    job = store.get(job_id)
    assert job is not None
    assert (job.state, job.finished_at, job.result) == (State.SUCCEEDED, NOW + 9, {"x": [1]})
    assert (job.worker, job.progress, job.progress_message, job.lease_until) == ("w1", 100, "done", None)
    assert job.result_until == NOW + 9 + 86_400_000


# Lists


def test_jobs_are_listed_newest_first_over_live_and_finished(store: Store) -> None:
    ids = list(one_of_each_state(store).values())
    assert listed(store) == ids[::-1]
    assert listed(store, limit=3) == ids[:-4:-1]


def test_each_state_can_be_listed(store: Store) -> None:
    made = one_of_each_state(store)
    assert set(made) == {state.value for state in State}
    for state, job_id in made.items():
        assert listed(store, state=State(state)) == [job_id]


def test_lists_are_filtered_by_task_queue_batch_time_and_error(store: Store) -> None:
    batch = add_batch(store, 2)
    kinds: dict[str, dict[str, Any]] = {
        "task": {"task": "other"},
        "queue": {"queue": "q"},
        "batch": {"batch_id": batch},
    }
    live, finished = {}, {}
    for name, terms in kinds.items():
        (finished[name],) = store.enqueue(**terms)
        store.kill(store.claim(queue=terms.get("queue", "default"))[0], f"bad {name}")
        (live[name],) = store.enqueue(**terms)
        store.retry(store.claim(queue=terms.get("queue", "default"))[0], message=f"bad {name}")
        store.now += 1000

    def both(name: str) -> list[str]:
        return [live[name], finished[name]]

    assert listed(store, task="other") == both("task")
    assert listed(store, queue="q") == both("queue")
    assert listed(store, batch_id=batch) == both("batch")
    assert listed(store, error="bad queue") == both("queue")
    assert listed(store, error="ValueError") == [*both("batch"), *both("queue"), *both("task")]
    assert listed(store, since=NOW + 1000) == [*both("batch"), *both("queue")]
    assert listed(store, since=NOW + 1000, state=State.DEAD) == [finished["batch"], finished["queue"]]
    assert listed(store, task="other", queue="q") == []
    assert listed(store, error="%") == []


def test_pages_by_id_have_no_gaps_and_no_repeats(store: Store) -> None:
    ids = store.enqueue(20)
    for number, job in enumerate(store.claim(20)):
        if number % 3:
            store.succeed(job)
        elif number % 2:
            store.retry(job)
    seen: list[str] = []
    before = None
    while page := listed(store, limit=6, before=before):
        assert len(page) <= 6
        seen += page
        before = page[-1]
        store.enqueue()  # what comes meanwhile is newer, and disturbs no page
    assert seen == ids[::-1]


def test_a_page_with_a_filter_is_as_full_as_it_can_be(store: Store) -> None:
    ids = store.enqueue(12)
    for number, job in enumerate(store.claim(12)):
        if number % 2:
            store.succeed(job)
    running = ids[::2][::-1]
    assert listed(store, state=State.RUNNING, limit=4) == running[:4]
    assert listed(store, state=State.RUNNING, limit=4, before=running[3]) == running[4:]


def test_a_job_that_ends_between_two_pages_is_shown_once(store: Store) -> None:
    ids = store.enqueue(6)
    first = listed(store, limit=3)
    for job in store.claim(6):
        store.succeed(job)
    assert first + listed(store, limit=3, before=first[-1]) == ids[::-1]


# Attempts, steps, events


def test_attempts_are_read_in_their_order(store: Store) -> None:
    (job_id,) = store.enqueue()
    for number in (1, 2):
        store.retry(store.claim()[0], after_ms=5, message=f"no {number}")
        store.now += 5
    store.succeed(store.claim()[0])
    assert store.run(ops.attempts(job_id)) == [
        Attempt(job_id, n, NOW + 5 * (n - 1), "w1", "failed", f"builtins.ValueError: no {n}", "a traceback")
        for n in (1, 2)
    ]


def test_steps_are_read_in_the_order_they_began(store: Store) -> None:
    (job_id,) = store.enqueue()
    for name, at in (("b", 1), ("c", 2), ("a", 2)):
        store.query(
            "insert into duly_step (job_id, name, kind, state, attempt, key, result, error, created_at, changed_at) "
            "values (?, ?, 'step', 'done', 1, 'k', '1', 'e', ?, 9)",
            *(job_id, name, at),
        )
    assert store.run(ops.steps(job_id)) == [
        Step(job_id, name, "step", "done", 1, "k", "1", "e", at, 9) for name, at in (("b", 1), ("a", 2), ("c", 2))
    ]


def test_events_are_read_oldest_first_in_pages_and_for_one_job(store: Store) -> None:
    ids = store.dead(3)
    store.run(ops.resolve(ids[1:2], by="ann", why="x", now=store.now + 1))
    everything = store.run(ops.events())
    assert [(event.name, event.job_id) for event in everything] == [
        *(("job.dead", job_id) for job_id in ids),
        ("job.resolved", ids[1]),
    ]
    assert [event.at for event in everything] == [NOW, NOW, NOW, NOW + 1]
    first = store.run(ops.events(limit=3))
    assert first + store.run(ops.events(after=first[-1].id, limit=3)) == everything
    assert store.run(ops.events(job_id=ids[1])) == [everything[1], everything[3]]
    assert store.run(ops.events(job_id=ids[1], after=everything[1].id)) == [everything[3]]


# Workers and pauses


def test_workers_are_listed_with_their_tasks_and_liveness(store: Store) -> None:
    for name in ("a", "b"):
        store.run(ops.register(name, host="h", pid=7, queues=["q", "p"], tasks=["t", "s"], beat_ms=1000, now=store.now))
        store.now += 1
    store.now += 1999
    store.run(ops.register("b", host="h", pid=7, queues=["q"], tasks=["u"], beat_ms=1000, now=store.now))
    store.now = NOW + 3000
    a, b = store.run(ops.workers(now=store.now))
    assert (a.id, a.host, a.pid, a.queues, a.tasks, a.beat_ms) == ("a", "h", 7, ("p", "q"), ("s", "t"), 1000)
    assert (a.started_at, a.seen_at, a.alive) == (NOW, NOW, False)  # three beats are missing
    assert (b.queues, b.tasks, b.started_at, b.seen_at, b.alive) == (("q",), ("u",), NOW + 1, NOW + 2001, True)
    assert store.run(ops.workers(now=NOW + 2999))[0].alive
    store.run(ops.leave("a"))
    assert [worker.id for worker in store.run(ops.workers(now=store.now))] == ["b"]


def test_b09_a_pause_has_its_author_reason_and_end(store: Store) -> None:
    store.run(ops.pause("queue", "mail", by="ann", why="provider down", now=NOW))
    store.run(ops.pause("task", "work", by="bob", why="bug", until_ms=100, now=NOW + 1))
    mail = Pause("queue", "mail", NOW, "ann", "provider down", None)
    work = Pause("task", "work", NOW + 1, "bob", "bug", NOW + 101)
    assert store.run(ops.paused(now=NOW + 100)) == [mail, work]
    assert store.run(ops.paused(now=NOW + 101)) == [mail]
    assert store.run(ops.resume("queue", "mail", by="ann", why="back", now=NOW + 200))
    assert store.run(ops.paused(now=NOW + 50)) == [work]
    told = [(event.name, event.subject, event.by, event.why) for event in store.run(ops.events())]
    assert told == [
        ("queue.paused", "mail", "ann", "provider down"),
        ("task.paused", "work", "bob", "bug"),
        ("queue.resumed", "mail", "ann", "back"),
    ]


def test_b09_resume_returns_whether_there_was_a_pause(store: Store) -> None:
    if isinstance(store, D1Store):
        store.lose(None)  # asked again it could not tell
    assert store.run(ops.resume("task", "work", by="a", why="b", now=NOW)) is False
    assert store.run(ops.events()) == []


# J25: plain SQL


def test_j25_payloads_results_and_steps_are_json_to_the_database_itself(store: Store) -> None:
    text = json.dumps({"name": "Zoë \" ' \\ 😀", "n": 12345678901, "deep": {"list": [1, None, True]}})
    (live,) = store.enqueue(payload=text)
    (finished,) = store.enqueue(payload=text, priority=9)
    store.succeed(store.claim()[0], '{"total":3}')
    for table, job_id in (("duly_job", live), ("duly_done", finished)):
        if store.kind == "postgres":
            read = "payload::json ->> 'n', payload::json -> 'deep' -> 'list' ->> 0, payload::json ->> 'name'"
        else:
            read = "json_extract(payload, '$.n'), json_extract(payload, '$.deep.list[0]'), payload ->> 'name'"
        (row,) = store.query(f"select {read} from {table} where id = ?", job_id)
        assert [str(value) for value in row] == ["12345678901", "1", "Zoë \" ' \\ 😀"]
    total = "result::json ->> 'total'" if store.kind == "postgres" else "json_extract(result, '$.total')"
    assert [str(row[0]) for row in store.query(f"select {total} from duly_done")] == ["3"]


def test_j25_every_view_has_rows_with_readable_times(store: Store) -> None:
    job_id = new_id()
    new = NewJob(job_id, '{"n":1}', envelope=Envelope(schema_version=2, subject="order 7", causation_id="c"))
    store.run(ops.enqueue(Terms("work"), [new], now=NOW))
    store.kill(store.claim()[0])
    (scheduled,) = store.enqueue(delay_ms=1500)
    store.query("insert into duly_fire (schedule, due_at, outcome, at) values ('nightly', ?, 'fired', ?)", *(NOW, NOW))
    store.query(
        "insert into duly_schedule (name, task, spec, mode, next_at, last_at, paused_at)"
        " values ('nightly', 'work', '0 3 * * *', 'cron', ?, ?, ?)", NOW, NOW, NOW,
    )  # fmt: skip
    store.run(batches.open_batch(new_id(), "import", now=NOW))
    store.query("update duly_batch set sealed_at = ?, completed_at = ?", NOW, NOW)
    times = {
        "duly_jobs": ("created", "finished"),
        "duly_dead": ("finished",),
        "duly_attempts": ("ended",),
        "duly_events": ("happened",),
        "duly_fires": ("due",),
        "duly_schedules": ("next", "last", "paused"),
        "duly_batches": ("created", "sealed", "completed"),
    }
    if store.kind == "postgres":
        views = store.query("select table_name from information_schema.views where table_schema = 'duly'")
    else:
        views = store.query("select name from sqlite_master where type = 'view'")
    assert {row[0] for row in views} == {*times, "duly_why"}  # which has no times of its own
    for view, columns in times.items():
        where = f" where id = '{job_id}'" if view == "duly_jobs" else ""
        (row,) = store.query(f"select {', '.join(columns)} from {view}{where}")
        assert {moment(value) for value in row} == {NOW}
    due, lease = store.query(f"select due, lease_ends from duly_jobs where id = '{scheduled}'")[0]
    assert (moment(due), lease) == (NOW + 1500, None)
    spread = store.query(f"select subject, causation_id, correlation_id from duly_jobs where id = '{job_id}'")
    assert [str(value) for value in spread[0]] == ["order 7", "c", job_id]
    versions = store.query("select schema_version from duly_jobs order by id")
    assert [int(row[0]) for row in versions] == [2, 1]


def moment(value: Any) -> int:
    """Read an ISO time of SQLite or a timestamp of PostgreSQL as milliseconds."""
    at = datetime.datetime.fromisoformat(value) if isinstance(value, str) else value
    assert at.utcoffset() == datetime.timedelta(0)
    return round(at.timestamp() * 1000)


def test_j25_a_view_hides_an_expired_result(store: Store) -> None:
    """The views read the real clock, so the jobs here end by it too."""
    for ttl in (0, 86_400_000):
        store.enqueue(result_ttl_ms=ttl, task=f"ttl {ttl}")
        (job,) = store.claim()
        store.run(ops.finish([Finish(job, Change(State.SUCCEEDED, result="1"))]))
    rows = dict(store.query("select task, result from duly_jobs"))
    assert rows == {"ttl 0": None, "ttl 86400000": "1"}


def test_j25_a_row_that_cannot_be_read_hides_no_other(store: Store) -> None:
    """Of an earlier version, or changed by hand."""
    _, deep = store.enqueue(2)
    text = '{"a":' + "[" * 990 + "]" * 990 + "}"
    store.query("update duly_job set payload = ? where id = ?", text, deep)
    assert [job.payload for job in store.run(ops.listing(now=store.now))] == [text, {"n": 1}]


@pytest.mark.slow
@pytest.mark.parametrize("banned", ["pickle", "marshal", "shelve", "dill", "cloudpickle"])
def test_j25_no_pickle_anywhere(banned: str) -> None:
    package = Path(duly.__file__).parent
    files = list(package.rglob("*.py"))
    assert len(files) > 10
    for file in files:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert banned not in {name.split(".")[0] for name in names}, file
