"""Enqueue through the public names: what is refused, what is written, what a key does, whose transaction it is."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from duly import Ctx, Duly, SyncCtx
from duly.errors import BadArguments, ConfigError, KeyConflict, PayloadTooLarge, StoreUnavailable
from duly.model import State
from duly.rules import backoff
from duly.store import ops
from tests.engine.conftest import HOLDABLE, Outside, awork, found, work, work_until
from tests.servers.postgres import PostgresServer

HOUR = 3_600_000

# Arguments


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((1,), {}, r"send\(order, lines\): missing a required argument: 'lines'"),
        (("x", []), {}, r"argument `order`: expected `int`, got `str` \(`order` is int\)"),
        ((1, [{"n": 1}, {"n": "two"}]), {}, r"argument `lines\[1\]\[...\]`: expected `int`, got `str`"),
        ((1, []), {"odrer": 2}, r"unexpected keyword argument 'odrer'.*did you mean"),
        ((1, [{"n": object()}]), {}, r"send: lines.*object"),
        ((1, [], 3), {}, r"too many positional arguments"),
    ],
)
def test_j03_wrong_arguments_are_refused_with_the_path_and_the_type_and_nothing_is_written(
    app: Duly, outside: Outside, args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    @app.task
    def send(order: int, lines: list[dict[str, int]]) -> None: ...

    before = outside.snapshot()
    task: Any = send
    with pytest.raises(BadArguments, match=said):
        task.enqueue(*args, **kwargs)
    with pytest.raises(BadArguments, match=said):
        asyncio.run(task.aenqueue(*args, **kwargs))
    with pytest.raises(BadArguments, match=said):
        task.enqueue_many([task.call(1, []), task.call(*args, **kwargs)])
    assert outside.snapshot() == before


def test_j03_one_wrong_call_among_many_keeps_its_thousand_from_being_written(app: Duly, outside: Outside) -> None:
    @app.task
    def send(order: int) -> None: ...

    def calls() -> Iterator[Any]:
        yield send.call(1)
        yield send.call("two")  # type: ignore[arg-type]

    with pytest.raises(BadArguments, match="send: argument `order`"):
        send.enqueue_many(calls())
    assert outside.query("select count(*) from duly_job") == [(0,)]


@pytest.mark.parametrize(
    ("setting", "limit"), [({}, 96_000), ({"max_payload": 1_000}, 1_000), ({"max_payload": 200_000}, 96_000)]
)
def test_j04_a_payload_that_is_too_large_is_refused_before_anything_is_written(
    apps: Callable[..., Duly], outside: Outside, setting: dict[str, int], limit: int
) -> None:
    @apps(**setting).task
    def send(text: str) -> None: ...

    most = limit - len('{"text":""}')
    refused = f"send: the payload has {limit + 1:,} bytes, the limit is {limit:,}"
    with pytest.raises(PayloadTooLarge, match=refused):
        send.enqueue("x" * (most + 1))
    with pytest.raises(PayloadTooLarge, match=refused):
        asyncio.run(send.aenqueue("x" * (most + 1)))
    with pytest.raises(PayloadTooLarge, match=refused):
        send.enqueue_many(send.call("x" * length) for length in (1, most + 1))
    assert outside.query("select count(*) from duly_job") == [(0,)]
    send.enqueue("x" * most)
    assert outside.query("select count(*) from duly_job") == [(1,)]


def test_j03_a_call_stays_as_it_was_checked() -> None:
    app = Duly()

    @app.task
    def send(order: int) -> None: ...

    call: Any = send.call(1)
    with pytest.raises(AttributeError):
        call.payload = "not JSON"


# Terms


def test_the_terms_of_the_task_are_in_the_row(apps: Callable[..., Duly]) -> None:
    app = apps(keep="3d", max_attempts=8)

    @app.task(queue="mail", priority=3, lease="9s")
    def send() -> None: ...

    @app.task(keep="1h", result_ttl="2h", max_attempts=2)
    def other() -> None: ...

    record = found(app, send.enqueue().id)
    assert (record.state, record.queue, record.priority, record.max_attempts) == (State.READY, "mail", 3, 8)
    terms, others = send._terms(), other._terms()
    assert (terms.lease_ms, terms.keep_ms, terms.result_ttl_ms) == (9000, 72 * HOUR, 24 * HOUR)
    assert (others.lease_ms, others.keep_ms, others.result_ttl_ms, others.max_attempts) == (2000, HOUR, 2 * HOUR, 2)


def test_options_of_using_are_in_the_row_and_only_there(app: Duly, outside: Outside) -> None:
    @app.task(queue="mail")
    def send(number: int) -> None: ...

    other = send.using(
        delay="1h", expires="2h", priority=7, queue="slow", max_attempts=2, keep="1d", result_ttl="30m",
        subject="order 7", correlation_id="c-1", key="k",
    )  # fmt: skip
    record = found(app, other.enqueue(1).id)
    assert record.due_at is not None
    assert record.expires_at is not None
    assert (record.state, record.due_at - record.created_at) == (State.SCHEDULED, HOUR)
    assert record.expires_at - record.created_at == 2 * HOUR
    assert (record.priority, record.queue, record.max_attempts, record.key) == (7, "slow", 2, "k")
    assert (record.subject, record.correlation_id) == ("order 7", "c-1")
    rows = outside.query("select keep_ms, result_ttl_ms from duly_job where id = ?", record.id)
    assert rows == [(24 * HOUR, HOUR // 2)]
    plain = found(app, send.enqueue(1).id)
    assert (plain.state, plain.priority, plain.queue, plain.key) == (State.READY, 0, "mail", None)
    assert (plain.subject, plain.correlation_id, plain.expires_at) == (None, plain.id, None)


def test_a_moment_is_kept_to_the_millisecond_in_any_zone(app: Duly) -> None:
    @app.task
    def send() -> None: ...

    at = datetime(2031, 5, 1, 12, 0, 0, 250_000, tzinfo=UTC)
    elsewhere = at.astimezone(datetime.now().astimezone().tzinfo)
    jobs = [send.using(at=at).enqueue(), send.using(at=elsewhere, expires=at + timedelta(hours=1)).enqueue()]
    records = [found(app, job.id) for job in jobs]
    assert [record.due_at for record in records] == [1_935_403_200_250] * 2
    assert records[1].expires_at == 1_935_403_200_250 + HOUR


def test_the_later_of_two_times_of_using_counts(app: Duly) -> None:
    @app.task
    def send() -> None: ...

    at = datetime(2031, 5, 1, tzinfo=UTC)
    late = send.using(delay="1h").using(at=at)
    soon = late.using(delay="1h")
    assert found(app, late.enqueue().id).due_at == int(at.timestamp() * 1000)
    record = found(app, soon.enqueue().id)
    assert record.due_at is not None
    assert record.due_at - record.created_at == HOUR


@pytest.mark.slow
def test_j05_a_job_that_does_not_start_in_time_is_cancelled(app: Duly) -> None:
    @app.task
    def send() -> None: ...

    job = send.using(delay="1h", expires="50ms").enqueue()
    work_until(app, lambda: found(app, job.id).state.ended)
    assert (found(app, job.id).state, found(app, job.id).reason) == (State.CANCELLED, "expired")


def test_a_call_keeps_the_terms_of_the_task_that_enqueues_it(app: Duly) -> None:
    @app.task
    def send(number: int) -> None: ...

    [job] = send.using(delay="1h", subject="s", key="k").enqueue_many([send.call(1)])
    record = found(app, job.id)
    assert (record.state, record.subject, record.key) == (State.SCHEDULED, "s", "k")
    with pytest.raises(ConfigError, match=r"terms would be lost: write send\.using\(…\)\.enqueue_many"):
        send.enqueue_many([send.using(delay="1h").call(1)])


def test_a_call_of_another_task_is_refused(app: Duly) -> None:
    @app.task
    def send(number: int) -> None: ...

    @app.task
    def other(number: int) -> None: ...

    with pytest.raises(ConfigError, match=r"send\.enqueue_many got a call of other"):
        send.enqueue_many([other.call(1)])


def test_many_are_enqueued_in_order_and_none_enqueues_nothing(app: Duly) -> None:
    @app.task
    def send(number: int) -> None: ...

    jobs = send.enqueue_many(send.call(number) for number in range(1100))
    more = asyncio.run(send.aenqueue_many(send.call(number) for number in range(2)))
    assert [job.id for job in jobs] == sorted(job.id for job in jobs)
    assert len(app.list(limit=2000)) == 1102
    assert found(app, more[1].id).payload == {"number": 1}
    assert send.enqueue_many([]) == []


# Keys


def test_k01_while_a_job_is_live_its_key_gives_the_same_job(app: Duly) -> None:
    @app.task
    def charge(order: int) -> None: ...

    keyed = charge.using(key="order 1")
    first, second = keyed.enqueue(1), asyncio.run(keyed.aenqueue(1))
    assert (first.deduplicated, second.deduplicated) == (False, True)
    assert second.id == first.id
    assert len(app.list()) == 1


def test_k01_another_payload_under_the_same_key_is_refused_and_the_holder_is_named(app: Duly) -> None:
    @app.task
    def charge(order: int) -> None: ...

    keyed = charge.using(key="order 1")
    first = keyed.enqueue(1)
    with pytest.raises(
        KeyConflict, match=f"charge: the key is taken by job {first.id}, which has other arguments"
    ) as raised:
        keyed.enqueue(2)
    assert raised.value.existing_id == first.id
    work(app)
    with pytest.raises(KeyConflict):
        asyncio.run(keyed.aenqueue(2))


def test_k01_a_key_is_one_within_its_task_only(app: Duly) -> None:
    @app.task
    def charge(order: int) -> None: ...

    @app.task
    def mail(order: int) -> None: ...

    assert charge.using(key="k").enqueue(1).id != mail.using(key="k").enqueue(2).id


def test_k02_after_success_the_stored_result_is_returned_and_nothing_runs(app: Duly) -> None:
    runs: list[int] = []

    @app.task(key=lambda order: f"order {order}")
    def charge(order: int) -> dict[str, int]:
        runs.append(order)
        return {"order": order}

    first = charge.enqueue(1)
    work(app)
    again = charge.enqueue(1)
    assert (again.id, again.deduplicated, again.result(timeout=0)) == (first.id, True, {"order": 1})
    work(app)
    assert runs == [1]


def test_k02_the_stored_result_outlives_the_row(app: Duly, outside: Outside) -> None:
    @app.task(key=lambda order: f"order {order}", keep="1ms", result_ttl="1ms")
    def charge(order: int) -> datetime:
        return datetime(2030, 1, order, tzinfo=UTC)

    first = charge.enqueue(3)
    work(app)
    app.driver.run(ops.prune("done", now=app.driver.run(ops.clock()) + HOUR))
    assert app.get(first.id) is None
    again = charge.enqueue(3)
    assert (again.id, again.deduplicated) == (first.id, True)
    assert again.result(timeout=0) == datetime(2030, 1, 3, tzinfo=UTC)
    assert outside.query("select count(*) from duly_job") == [(0,)]


def test_k02_a_keyed_job_that_leaves_no_row_still_has_its_result(app: Duly) -> None:
    @app.task(key="daily", keep=0)
    def report() -> int:
        return 7

    first = report.enqueue()
    work(app)
    again = report.enqueue()
    assert (again.id, again.deduplicated, again.result(timeout=0)) == (first.id, True, 7)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_k09_one_conflict_among_many_leaves_the_others_enqueued(app: Duly, asynchronous: bool) -> None:
    @app.task(key=lambda order, note: f"order {order}")
    def charge(order: int, note: str = "") -> None: ...

    holder = charge.enqueue(3, "first")
    calls = [charge.call(order) for order in range(1200)]
    with pytest.raises(KeyConflict, match=f"{holder.id}.*the other 1199 were enqueued"):
        asyncio.run(charge.aenqueue_many(calls)) if asynchronous else charge.enqueue_many(calls)
    assert len(app.list(limit=5000)) == 1200
    assert found(app, holder.id).payload == {"order": 3, "note": "first"}


def test_k09_a_conflict_does_not_affect_those_that_were_coalesced_with_it(app: Duly) -> None:
    @app.task
    def charge(order: int) -> None: ...

    charge.using(key="k").enqueue(0)

    async def all_at_once() -> list[Any]:
        enqueues = [charge.using(key=f"k{n}" if n != 5 else "k").aenqueue(n) for n in range(1, 20)]
        return await asyncio.gather(*enqueues, return_exceptions=True)

    answers = asyncio.run(all_at_once())
    assert [type(answer) for answer in answers if isinstance(answer, Exception)] == [KeyConflict]
    assert len(app.list()) == 19


def test_k05_a_key_is_a_text_a_number_or_a_function_of_the_arguments(app: Duly) -> None:
    @app.task(key="one")
    def a() -> None: ...

    @app.task(key=7)
    def b() -> None: ...

    @app.task(key=lambda order, sort: f"{order}/{sort}")
    def c(order: int, sort: str = "plain") -> None: ...

    @app.task(key=lambda order: order)
    def d(ctx: SyncCtx, order: int, note: str = "") -> None: ...

    jobs = [a.enqueue(), b.enqueue(), c.enqueue(4), d.enqueue(9), d.using(key="mine").enqueue(10)]
    assert [found(app, job.id).key for job in jobs] == ["one", "7", "4/plain", "9", "mine"]


def test_k05_an_invalid_key_is_refused_with_the_task_and_nothing_is_written(app: Duly, outside: Outside) -> None:
    @app.task(key=lambda order: None)  # type: ignore[arg-type,return-value]
    def charge(order: int) -> None: ...

    @app.task(key=lambda nothing: "x")
    def mail(order: int, note: str) -> None: ...

    with pytest.raises(ConfigError, match=r"charge: key= gave a value of type NoneType"):
        charge.enqueue(1)
    with pytest.raises(ConfigError, match=r"mail: key= is a function of \(nothing\), but the handler's arguments"):
        mail.enqueue(1, "a")
    assert outside.query("select count(*) from duly_job") == [(0,)]


def test_k05_the_key_is_the_same_over_retries_producer_retries_and_replays(app: Duly) -> None:
    seen: list[tuple[str, int]] = []

    @app.task(key=lambda order: f"order {order}", max_attempts=2, backoff=[0])
    def charge(ctx: SyncCtx, order: int) -> None:
        seen.append((ctx.key, ctx.attempt))
        if ctx.replay_count == 0:
            raise ValueError

    job = charge.enqueue(1)
    assert charge.enqueue(1).id == job.id
    work_until(app, lambda: found(app, job.id).state.ended)
    again = app.dead.replay(job.id, by="me", why="test")
    work_until(app, lambda: found(app, again).state.ended)
    assert seen == [("order 1", 1), ("order 1", 2), ("order 1", 1)]
    assert found(app, again).key == "order 1"


def test_k06_without_a_key_ctx_key_is_the_first_id_over_retries_and_replays(app: Duly) -> None:
    seen: list[str] = []

    @app.task(max_attempts=2, backoff=backoff.fixed(0))
    async def charge(ctx: Ctx) -> None:
        seen.append(ctx.key)
        raise ValueError

    job_id = first = charge.enqueue().id
    for _ in range(2):
        work_until(app, lambda job_id=job_id: found(app, job_id).state.ended)  # type: ignore[misc]
        job_id = app.dead.replay(job_id)
    work_until(app, lambda: found(app, job_id).state.ended)
    assert seen == [first] * 6


# Where it is called from


def test_a_sync_enqueue_inside_a_running_loop_works(app: Duly) -> None:
    @app.task
    def send(number: int) -> None: ...

    async def main() -> list[str]:
        first = await send.aenqueue(1)
        second = send.enqueue(2)
        third = await send.aenqueue(3)
        return [first.id, second.id, third.id]

    ids = asyncio.run(main())
    assert [found(app, job_id).payload["number"] for job_id in ids] == [1, 2, 3]


def test_a_sync_enqueue_in_an_async_handler_works(app: Duly) -> None:
    @app.task
    async def parent() -> str:
        return child.enqueue(1).id

    @app.task
    def child(number: int) -> None: ...

    job = parent.enqueue()
    work(app)
    assert found(app, found(app, job.id).result).state is State.SUCCEEDED


def test_enqueues_of_many_threads_and_loops_share_one_driver(app: Duly) -> None:
    @app.task
    def send(number: int) -> None: ...

    def many(number: int) -> None:
        send.enqueue(number)
        asyncio.run(send.aenqueue(number))

    threads = [threading.Thread(target=many, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(app.list()) == 16


# M01: what travels along


def test_m01_the_correlation_of_a_root_job_is_its_own_id(app: Duly) -> None:
    @app.task
    def f(ctx: SyncCtx) -> str:
        return ctx.correlation_id

    job = f.enqueue()
    work(app)
    record = found(app, job.id)
    assert (record.correlation_id, record.causation_id, record.subject) == (job.id, None, None)
    assert record.result == job.id


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_m01_children_inherit_correlation_and_subject_and_name_their_cause(app: Duly, kind: str) -> None:
    def start() -> str:
        return middle.enqueue().id

    async def astart() -> str:
        return (await middle.aenqueue()).id

    @app.task
    async def middle() -> str:
        [job] = await last.aenqueue_many([last.call()])
        return job.id

    @app.task
    def last() -> None: ...

    first: Any = app.task(start) if kind == "sync" else app.task(astart)
    job = first.using(subject="order 7").enqueue()
    work(app)
    second = found(app, found(app, job.id).result)
    third = found(app, second.result)
    assert [(r.correlation_id, r.subject) for r in (second, third)] == [(job.id, "order 7")] * 2
    assert (second.causation_id, third.causation_id) == (job.id, second.id)


def test_m01_explicit_fields_override_inherited_ones(app: Duly) -> None:
    @app.task
    def parent() -> str:
        return child.using(correlation_id="mine", subject="other").enqueue().id

    @app.task(schema_version=3)
    def child() -> None: ...

    job = parent.using(correlation_id="theirs", subject="s").enqueue()
    work(app)
    record = found(app, found(app, job.id).result)
    assert (record.correlation_id, record.causation_id, record.subject) == ("mine", job.id, "other")
    assert (record.schema_version, found(app, job.id).schema_version) == (3, 1)
    assert found(app, job.id).correlation_id == "theirs"


# J02 through the public names: the kinds of connection are tested with the store


@pytest.fixture
def shared(where: tuple[str, str], app: Duly) -> Iterator[Any]:
    """A connection of the caller's own, with a transaction that is not committed."""
    kind, url = where
    app.driver.run(ops.clock())
    conn: Any = psycopg.connect(url) if kind == "postgres" else sqlite3.connect(url)
    conn.execute("create table orders (id integer)")
    conn.commit()
    yield conn
    conn.close()


@HOLDABLE
def test_j02_an_enqueue_on_the_callers_connection_rolls_back_with_it(app: Duly, shared: Any) -> None:
    @app.task
    def send(order: int) -> None: ...

    shared.execute("insert into orders values (1)")
    gone = send.using(conn=shared).enqueue(1)
    more = send.using(conn=shared).enqueue_many([send.call(2), send.call(3)])
    shared.rollback()
    assert [app.get(job.id) for job in (gone, *more)] == [None] * 3
    shared.execute("insert into orders values (2)")
    kept = send.using(conn=shared).enqueue(2)
    assert app.get(kept.id) is None
    shared.commit()
    assert found(app, kept.id).state is State.READY
    assert shared.execute("select id from orders").fetchall() == [(2,)]


@HOLDABLE
def test_j02_a_worker_claims_jobs_committed_on_the_callers_connection(app: Duly, shared: Any) -> None:
    @app.task
    def send(order: int) -> int:
        return order

    async def main() -> int:
        working = asyncio.create_task(awork(app, drain=False))
        await asyncio.sleep(0.3)
        job = await send.using(conn=shared).aenqueue(5)
        shared.commit()
        result = await job.aresult(timeout=10)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        return result

    assert asyncio.run(main()) == 5


def test_j02_an_object_that_is_no_connection_is_refused_with_the_accepted_types(app: Duly) -> None:
    @app.task
    def send(order: int) -> None: ...

    with pytest.raises(ConfigError, match=r"`conn=` is a builtins\.object.*It takes sqlite3"):
        send.using(conn=object()).enqueue(1)


# J27: the database is down


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


def expect_unavailable(enqueue: Callable[[], Any], *, within: float = 2.0) -> str:
    begun = time.monotonic()
    with pytest.raises(StoreUnavailable) as raised:
        enqueue()
    assert time.monotonic() - begun < within
    return str(raised.value)


@pytest.mark.slow
def test_j27_a_stopped_postgres_raises_within_two_seconds_and_nothing_is_half_written(
    server: PostgresServer,
) -> None:
    app = Duly(server.new_database())
    app.migrate()

    @app.task
    def send(number: int) -> None: ...

    send.using(key="k").enqueue(0)
    server.halt("immediate")
    expect_unavailable(lambda: send.enqueue(1))  # on a connection that was open
    expect_unavailable(lambda: send.using(key="k1").enqueue(1))
    expect_unavailable(lambda: asyncio.run(send.aenqueue(1)))
    expect_unavailable(lambda: send.enqueue_many(send.call(n) for n in range(50)))
    server.start()
    assert [job.key for job in app.list()] == ["k"]
    assert send.using(key="k1").enqueue(1).deduplicated is False
    app.close()


@pytest.mark.slow
def test_j27_a_server_that_accepts_and_does_not_answer_raises_too() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        app = Duly(f"postgresql://me@127.0.0.1:{silent.getsockname()[1]}/x", connect_timeout="1500ms")

        @app.task
        def send(number: int) -> None: ...

        expect_unavailable(lambda: send.enqueue(1), within=4)
        app.close()


def test_j27_a_missing_folder_is_named(tmp_path: Path) -> None:
    app = Duly(tmp_path / "nowhere" / "jobs.db")

    @app.task
    def send(number: int) -> None: ...

    with pytest.raises(ConfigError, match=f"the folder {tmp_path}/nowhere does not exist: create it"):
        send.enqueue(1)
    (tmp_path / "nowhere").mkdir()
    assert found(app, send.enqueue(2).id).payload == {"number": 2}  # and it goes on by itself
    app.close()


@pytest.mark.slow
def test_j27_a_locked_file_raises_with_the_remedy(tmp_path: Path) -> None:
    app = Duly(tmp_path / "jobs.db", busy_timeout="1s")

    @app.task
    def send(number: int) -> None: ...

    send.enqueue(1)
    conn = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
    conn.execute("pragma wal_autocheckpoint = 0")
    conn.execute("begin immediate")
    said = expect_unavailable(lambda: send.enqueue(2), within=2.5)
    assert "conn=" in said
    conn.execute("rollback")
    assert len(app.list()) == 1
    send.enqueue(3)
    conn.close()
    app.close()
