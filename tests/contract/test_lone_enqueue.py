"""A lone enqueue on PostgreSQL is one prepared statement, which asks for idle workers too. Line J01."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from types import FrameType
from typing import Any

import psycopg
import pytest

from duly.errors import StoreRefused
from duly.model import Change, NewJob, State, Terms
from duly.rules.codec import MAX_PAYLOAD
from duly.store import ops
from duly.store.driver import Watch
from duly.store.op import Finish
from duly.store.postgres import lone_enqueue
from duly.store.postgres.connection import PooledConnection
from duly.store.postgres.driver import PostgresDriver
from duly.store.postgres.listen import ADDING, ALL_AWAKE, LEAVE, PARK, PARKED, SETTLE, UNSETTLE
from duly.store.postgres.schema import bring_up_to_date
from tests.contract.stores import PostgresStore, new_id
from tests.contract.test_coalesce import blocked, locked, until


@pytest.fixture
def fleet(postgres_url: str) -> Iterator[PostgresStore]:
    store = PostgresStore(postgres_url)
    store.driver.run(ops.clock())
    yield store
    store.close()


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note which statements are sent so, and what they return: whether all workers were awake."""
    answers: list[bool] = []
    send = lone_enqueue.enqueue

    def noted(conn: PooledConnection, statement: Any, params: Any) -> bool:
        answers.append(False)
        answers[-1] = send(conn, statement, params)
        return answers[-1]

    monkeypatch.setattr(lone_enqueue, "enqueue", noted)
    return answers


@pytest.fixture
def hints(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Note who sends a hint."""
    sent: list[object] = []
    hint = PooledConnection.hint

    def noted(self: PooledConnection) -> None:
        sent.append(self)
        hint(self)

    monkeypatch.setattr(PooledConnection, "hint", noted)
    return sent


def enqueue(driver: PostgresDriver, payload: str = "1", *, job_id: str | None = None, **terms: Any) -> str:
    job_id = job_id or new_id()
    driver.run(ops.enqueue(Terms(**{"task": "work", **terms}), [NewJob(job_id, payload)]))
    return job_id


def payload_of(fleet: PostgresStore, job_id: str) -> str:
    [(payload,)] = fleet.query("select payload from duly_job where id = ?", job_id)
    return str(payload)


@pytest.mark.parametrize(
    "payload",
    [
        '{"text": "\'; drop table duly_job --"}',
        r'"\\ \" \u00e4 %s %(id)s $1 :id"',
        '"語🦆"',
        f'"{"x" * (MAX_PAYLOAD - 2)}"',
    ],
    ids=["quotes", "escapes", "letters", "large"],
)
def test_j01_a_lone_job_is_stored_exactly(fleet: PostgresStore, direct: list[bool], payload: str) -> None:
    assert payload_of(fleet, enqueue(fleet.driver, payload)) == payload
    assert direct == [True]


def test_j01_a_statement_larger_than_the_socket_buffer_arrives(
    fleet: PostgresStore, direct: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duly.rules.codec.check_size", lambda payload, task: None)
    payload = f'"{"x" * 20_000_000}"'
    assert payload_of(fleet, enqueue(fleet.driver, payload)) == payload
    assert payload_of(fleet, enqueue(fleet.driver, "2")) == "2"
    assert direct == [True, True]


def test_j01_a_refused_enqueue_raises_and_the_connection_stays_usable(fleet: PostgresStore, direct: list[bool]) -> None:
    taken = enqueue(fleet.driver)
    pid = backend(fleet)
    with pytest.raises(StoreRefused, match="duplicate key"):
        enqueue(fleet.driver, job_id=taken)
    with pytest.raises(StoreRefused, match="NUL"):
        enqueue(fleet.driver, on_dead="a\0b")
    enqueue(fleet.driver)
    assert fleet.query("select count(*) from duly_job") == [(2,)]
    assert backend(fleet) == pid
    assert direct == [True, False, False, True]


def backend(fleet: PostgresStore) -> int:
    """Say which connection the next operation gets."""
    with fleet.driver._pool.connection() as conn:
        return conn.info.backend_pid


def test_j01_an_interrupted_caller_leaves_no_connection_inside_a_message(
    fleet: PostgresStore, direct: list[bool]
) -> None:
    enqueue(fleet.driver)
    with interrupted_while_blocked(fleet):
        enqueue(fleet.driver)
    after = enqueue(fleet.driver, "2")
    assert payload_of(fleet, after) == "2"
    assert len(direct) == 3


@contextmanager
def interrupted_while_blocked(fleet: PostgresStore) -> Iterator[None]:
    """Interrupt this thread as soon as what it sends waits for a lock."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt_who_waits() -> None:
        until(lambda: blocked(fleet))
        signal.pthread_kill(main, signal.SIGUSR1)

    thread = threading.Thread(target=interrupt_who_waits)
    try:
        with locked(fleet):
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                yield
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def test_j01_behind_a_pooler_a_lone_job_is_added_without_a_prepared_statement(
    postgres_url: str, direct: list[bool]
) -> None:
    store = PostgresStore(postgres_url)
    store.driver._prepared = False
    assert payload_of(store, enqueue(store.driver, "3")) == "3"
    assert direct == []
    store.close()


def test_j01_letters_are_written_in_the_encoding_of_the_connection(postgres_url: str, direct: list[bool]) -> None:
    driver = PostgresDriver(psycopg.conninfo.make_conninfo(postgres_url, client_encoding="latin1"))
    store = PostgresStore(postgres_url)
    assert payload_of(store, enqueue(driver, '"ä"')) == '"ä"'
    assert direct == [True]
    driver.close()
    store.close()


def test_a_lone_enqueue_notifies_only_idle_workers(
    fleet: PostgresStore, direct: list[bool], hints: list[object]
) -> None:
    with psycopg.connect(fleet.url, autocommit=True) as sleeper:
        enqueue(fleet.driver)
        assert (direct, len(hints)) == ([True], 0)
        sleeper.execute(PARK)
        sleeper.execute(SETTLE)
        for number in range(3):
            job_id = enqueue(fleet.driver, str(number))
            assert len(list(sleeper.notifies(timeout=10, stop_after=1))) == 1
            assert fleet.driver.run(ops.get(job_id)) is not None  # whose answer is not that of the hint
        assert (direct, len(hints)) == ([True, False, False, False], 3)
        sleeper.execute(UNSETTLE)
        sleeper.execute(LEAVE)
        enqueue(fleet.driver)
        assert (direct[-1], len(hints)) == (True, 3)


@contextmanager
def adding(fleet: PostgresStore) -> Iterator[None]:
    """Be in the middle of adding a job, and be told that all are awake; it is committed at the end."""
    with psycopg.connect(fleet.url) as conn:
        assert conn.execute(TRIES).fetchone() == (True,)
        yield


TRIES = f"select {ALL_AWAKE.removeprefix('returning ')}".encode()
PATIENCE = 30


@pytest.fixture
def watch(fleet: PostgresStore) -> Iterator[tuple[Watch, threading.Event]]:
    called = threading.Event()
    watch = fleet.driver.watch(called.set)
    yield watch, called
    watch.close()


def holders(fleet: PostgresStore, lock: int, *, granted: bool = True) -> int:
    [[count]] = fleet.query(
        "select count(*) from pg_locks where locktype = 'advisory' and mode = 'ShareLock' "
        "and objid = ? and granted = ?",
        lock % 2**32,
        granted,
    )
    return int(count)


def test_a_worker_going_idle_during_an_enqueue_waits_for_its_commit_and_claims(
    fleet: PostgresStore, watch: tuple[Watch, threading.Event]
) -> None:
    """It would not see the job, and who adds it has been told that all are awake."""
    sleeper, called = watch
    with adding(fleet):
        sleeper.arm()  # waits for a moment only
        until(lambda: holders(fleet, ADDING, granted=False))
        assert holders(fleet, ADDING) == 0
        with psycopg.connect(fleet.url, autocommit=True) as other:  # or who falls asleep would wait for ever
            assert other.execute(TRIES).fetchone() == (False,)
        called.clear()
    assert called.wait(PATIENCE)
    assert holders(fleet, ADDING) == 1


def test_a_worker_waiting_to_go_idle_receives_hints(fleet: PostgresStore, watch: tuple[Watch, threading.Event]) -> None:
    sleeper, called = watch
    with adding(fleet):
        sleeper.arm()
        until(lambda: holders(fleet, PARKED))
        assert called.wait(PATIENCE)  # that it could not be armed in time
        called.clear()
        fleet.enqueue_key("a")
        assert called.wait(PATIENCE)
        assert holders(fleet, ADDING) == 0


def test_a_worker_waiting_to_go_idle_is_armed_and_closed_at_once(
    fleet: PostgresStore, watch: tuple[Watch, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper, _ = watch
    with adding(fleet):
        sleeper.arm()
        waited: list[float | None] = []
        monkeypatch.setattr(threading.Event, "wait", lambda self, timeout=None: waited.append(timeout))
        sleeper.disarm()
        sleeper.arm()
        monkeypatch.undo()
        assert waited == []
        sleeper.close()  # which ends its thread
        assert holders(fleet, PARKED) == 0


def test_a_server_with_a_short_lock_timeout_is_not_reported_as_away(
    fleet: PostgresStore, watch: tuple[Watch, threading.Event], caplog: pytest.LogCaptureFixture
) -> None:
    fleet.query("alter database current set statement_timeout = '20ms'".replace("current", database_of(fleet)))
    failures = fleet.driver.failures
    sleeper, called = watch
    with adding(fleet):
        sleeper.arm()
        until(lambda: holders(fleet, PARKED))
        assert called.wait(PATIENCE)
        called.clear()
    assert called.wait(PATIENCE) or holders(fleet, ADDING) == 1
    until(lambda: holders(fleet, ADDING) == 1)
    assert fleet.driver.failures == failures
    assert [record.message for record in caplog.records] == []


def database_of(fleet: PostgresStore) -> str:
    return str(fleet.query("select current_database()")[0][0])


def test_concurrent_enqueues_take_each_other_for_idle_and_wake_no_worker(
    fleet: PostgresStore, direct: list[bool], hints: list[object]
) -> None:
    with psycopg.connect(fleet.url) as other:
        other.execute(TRIES)
        with psycopg.connect(fleet.url, autocommit=True) as listener:
            listener.execute("listen duly")
            enqueue(fleet.driver)
            assert (direct, len(hints)) == ([False], 1)
            fleet.driver.run(ops.clock())  # by which the hint is over
            assert list(listener.notifies(timeout=0.2)) == []


def test_j01_a_caller_retries_when_its_connection_closes_during_the_wait(
    fleet: PostgresStore, direct: list[bool]
) -> None:
    """Whether the end of the connection comes with the server's last word or after it is a matter of chance."""
    with ThreadPoolExecutor(1) as threads:
        for _ in range(8):
            with locked(fleet):
                added = threads.submit(enqueue, fleet.driver)
                until(lambda: blocked(fleet))
                [first] = blocked(fleet)
                fleet.query("select pg_terminate_backend(?)", first)
                until(lambda: any(pid != first for pid in blocked(fleet)))  # noqa: B023 (used at once)
            assert fleet.query("select count(*) from duly_job where id = ?", added.result(timeout=30)) == [(1,)]
    assert direct == [False] * 8


class Queue(str, Enum):  # noqa: UP042 (which has another `str` than a StrEnum)
    MAIL = "mail"


class Level(int, Enum):
    HIGH = 5


def test_j01_members_of_enums_are_stored_as_their_values(fleet: PostgresStore, direct: list[bool]) -> None:
    job_id = enqueue(fleet.driver, queue=Queue.MAIL, priority=Level.HIGH)
    assert fleet.query("select queue, priority from duly_job where id = ?", job_id) == [("mail", 5)]
    assert direct == [True]


@pytest.mark.parametrize("how", ["deallocate all", "discard all", "deallocate {name}"])
def test_j01_a_connection_with_deallocated_statements_stays_usable(
    fleet: PostgresStore, hints: list[object], how: str
) -> None:
    """Another program can do so past psycopg, which then executes a statement that the server does not know."""
    enqueue(fleet.driver)
    with fleet.driver._pool.connection() as conn:
        [[name]] = conn.execute(
            "select name from pg_prepared_statements where statement ~ 'returning pg_try'"
        ).fetchall()
        conn.pgconn.exec_(how.format(name=name).encode())
    pid = backend(fleet)
    with psycopg.connect(fleet.url, autocommit=True) as sleeper:
        sleeper.execute(PARK)
        sleeper.execute(SETTLE)
        for number in range(3):
            assert payload_of(fleet, enqueue(fleet.driver, str(number))) == str(number)
            assert len(list(sleeper.notifies(timeout=10, stop_after=1))) == 1
    assert backend(fleet) != pid  # another connection, which has its settings
    with fleet.driver._pool.connection() as conn:
        assert conn.execute("show plan_cache_mode").fetchone() == ("force_generic_plan",)
    assert len(hints) == 3


def test_a_lone_enqueue_is_prepared_once_whatever_its_numbers(fleet: PostgresStore) -> None:
    for terms in ({}, {"delay_ms": 1}, {"delay_ms": 10**6, "lease_ms": 10}, {"delay_ms": 10**12, "keep_ms": 10**11}):
        enqueue(fleet.driver, **terms)
    with fleet.driver._pool.connection() as conn:
        prepared = conn.execute("select count(*) from pg_prepared_statements where statement ~ 'returning pg_try'")
        assert prepared.fetchall() == [(1,)]


def test_j01_every_operation_works_after_its_statements_were_deallocated(postgres_url: str) -> None:
    driver = PostgresDriver(postgres_url, connections=1)
    store = PostgresStore(postgres_url)
    store.driver.close()
    store.driver = driver

    def forget() -> None:
        with driver._pool.connection() as conn:
            conn.pgconn.exec_(b"deallocate all")

    for number in range(6):
        run_a_job(store, str(number), forget if number > 2 else lambda: None)
    assert store.query("select count(*) from duly_done") == [(6,)]
    assert driver.failures == 0
    store.close()


def run_a_job(store: PostgresStore, key: str, before_each: Callable[[], None]) -> None:
    before_each()
    store.driver.run(ops.enqueue(Terms("work", key_ttl_ms=60_000), [NewJob(new_id(), "1", key=key, fingerprint="f")]))
    before_each()
    [job] = store.driver.run(ops.claim("default", limit=1, token=int(key) + 7, worker="w", tasks=["work"]))
    before_each()
    store.driver.run(ops.finish([Finish(job, Change(State.SUCCEEDED))]))


def test_j01_an_interrupt_during_prepare_leaves_a_usable_connection(
    fleet: PostgresStore,
) -> None:
    with interrupted_while_blocked(fleet):
        enqueue(fleet.driver)
    for number in range(3):
        assert payload_of(fleet, enqueue(fleet.driver, str(number))) == str(number)


def test_j01_a_role_that_cannot_read_idle_workers_can_still_enqueue(postgres_url: str, hints: list[object]) -> None:
    store = PostgresStore(postgres_url)
    signature = "pg_try_advisory_xact_lock(bigint)"
    store.query(f"revoke execute on function {signature} from public")
    store.query("create role modest login")
    store.query("grant usage on schema duly to modest")
    store.query("grant select, insert, update, delete on all tables in schema duly to modest")
    driver = PostgresDriver(psycopg.conninfo.make_conninfo(postgres_url, user="modest"))
    assert payload_of(store, enqueue(driver, "1")) == "1"
    assert payload_of(store, enqueue(driver, "2")) == "2"
    assert len(hints) == 2
    driver.close()
    for undo in (f"grant execute on function {signature} to public", "drop owned by modest", "drop role modest"):
        store.query(undo)
    store.close()


def test_j01_a_schema_with_letters_is_named_in_the_encoding_of_the_connection(
    postgres_url: str, direct: list[bool]
) -> None:
    bring_up_to_date(postgres_url, schema="dülý")
    driver = PostgresDriver(psycopg.conninfo.make_conninfo(postgres_url, client_encoding="latin1"), schema="dülý")
    enqueue(driver)
    assert direct == [True]
    driver.close()
