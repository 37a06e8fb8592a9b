"""What the driver of D1 does about requests that come late, twice or not at all, on the stand-in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from duly import Duly
from duly.errors import AnswerLost, ConfigError, SchemaMismatch, StoreError, StoreRefused, StoreUnavailable
from duly.model import Change, NewJob, State, Terms
from duly.rules.keys import new_token
from duly.store import ops
from duly.store.d1.driver import D1Driver
from duly.store.d1.translate import TooLate, translate
from duly.store.d1.wire import Address, Line, Trouble, read_address
from duly.store.op import Finish, Op, Row
from duly.store.op import Held as Lease
from tests.contract.stores import D1Wire, new_id, spoiled
from tests.databases import Files
from tests.servers.d1 import D1Mannered

WHERE = Address("gate.test", None, True, "duly", "token")


class Held(D1Wire):
    """Keeps every request, and holds the next one back if a test says so: its caller gets no answer."""

    def __init__(self, database: D1Mannered) -> None:
        super().__init__(database)
        self.requests: list[list[Line]] = []
        self.hold = False
        self.lose = False

    def send(self, lines: Sequence[Line], seconds: float) -> list[list[Row]]:
        self.requests.append(list(lines))
        if self.hold or self.lose:
            self.hold = False
            raise Trouble(0, 0, "no answer came")
        return super().send(lines, seconds)

    def deliver(self, lines: Sequence[Line]) -> list[list[Row]]:
        return super().send(lines, 0)


@pytest.fixture
def wire(files: Files, tmp_path: Path) -> Iterator[Held]:
    made = Held(D1Mannered(files.fresh("d1", tmp_path / "d1.db")))
    yield made
    made.close()


def driver_on(wire: Held, **options: Any) -> D1Driver:
    made = D1Driver(WHERE, wire, **{"timeout_s": 0.1, "pauses": (0.0,) * 5, **options})
    made.run(ops.clock())
    return made


def plain(key: str | None = None, count: int = 1) -> Op[Any]:
    return ops.enqueue(Terms("work"), [NewJob(new_id(), "{}", key=key) for _ in range(count)])


def claim(limit: int = 1) -> Op[Any]:
    return ops.claim("default", limit=limit, token=new_token(), worker="w")


def rows(wire: Held) -> list[Any]:
    look = "select id, state, token from {} order by id"
    return [wire.database.query(look.format(table)) for table in ("duly_job", "duly_done")]


@pytest.mark.parametrize("offset", [0, 3600, -3600])
def test_c02_a_claim_that_is_asked_again_has_outlived_the_first_one(
    wire: Held, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    """The first one arrives when the second was answered. The clock of this machine is an hour wrong."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + offset)
    driver = driver_on(wire)
    driver.run(plain(count=3))
    wire.hold = True
    assert len(driver.run(claim())) == 1
    late = wire.requests[-2]
    before = rows(wire)
    with pytest.raises(Trouble, match="malformed JSON"):
        wire.deliver(late)
    assert rows(wire) == before
    driver.close()


@pytest.mark.parametrize("make", [plain, lambda: plain("k"), lambda: plain(count=2)], ids=["one", "keyed", "list"])
def test_c02_an_enqueue_that_comes_again_when_its_job_has_ended_changes_nothing(
    wire: Held, make: Callable[[], Op[Any]]
) -> None:
    driver = driver_on(wire)
    driver.run(make())
    sent = [lines[1:] for lines in wire.requests if any("enqueue" in line.section for line in lines)]
    jobs = driver.run(claim(5))
    driver.run(ops.finish([Finish(job, Change(State.SUCCEEDED)) for job in jobs]))
    before = rows(wire)
    for lines in sent:
        wire.deliver(lines)
    assert rows(wire) == before
    driver.close()


def test_c02_joined_enqueues_that_come_again_when_their_jobs_have_ended_change_nothing(wire: Held) -> None:
    driver = driver_on(wire)

    async def together() -> None:
        await asyncio.gather(*(driver.arun(plain()) for _ in range(20)))

    asyncio.run(together())
    sent = [lines[1:] for lines in wire.requests if any("enqueue" in line.section for line in lines)]
    assert len(sent) < 10  # they were joined
    jobs = driver.run(claim(20))
    assert len(jobs) == 20
    driver.run(ops.finish([Finish(job, Change(State.SUCCEEDED)) for job in jobs]))
    before = rows(wire)
    for lines in sent:
        wire.deliver(lines)
    assert rows(wire) == before
    driver.close()


def test_c02_an_operation_without_an_answer_is_sent_at_most_five_times_again(wire: Held) -> None:
    driver = driver_on(wire)
    del wire.requests[:]
    wire.lose = True
    with pytest.raises(AnswerLost):
        driver.run(plain())
    assert len(wire.requests) == 6
    assert driver.failures == 6
    driver.close()


def test_c02_a_request_that_came_too_late_is_sent_again_by_the_clock_as_it_is_now(wire: Held) -> None:
    driver = driver_on(wire)
    driver._clock = (1000, time.monotonic())  # the database's clock has moved far ahead since
    driver.run(plain())
    assert len(rows(wire)[0]) == 1
    driver.close()


def test_c02_an_operation_that_is_refused_fails_alone_within_its_request(wire: Held) -> None:
    driver = driver_on(wire)
    batch = [plain(), spoiled(plain("a")), plain("b"), plain(), claim()]

    async def together() -> list[Any]:
        return await asyncio.gather(*(driver.arun(op) for op in batch), return_exceptions=True)

    answers = asyncio.run(together())
    assert [isinstance(answer, StoreRefused) for answer in answers] == [False, True, False, False, False]
    assert len(rows(wire)[0]) == 3
    driver.close()


def test_c01_a_request_has_no_more_statements_than_the_plan_allows(wire: Held) -> None:
    driver = driver_on(wire)

    async def together() -> None:
        await asyncio.gather(*(driver.arun(plain(str(number))) for number in range(60)))

    asyncio.run(together())
    assert len(rows(wire)[0]) == 60
    assert 20 < max(map(len, wire.requests)) <= 45
    driver.close()


def test_c01_a_value_over_the_limit_is_refused_before_it_is_sent(wire: Held) -> None:
    driver = driver_on(wire)
    del wire.requests[:]
    with pytest.raises(StoreRefused, match="2,000,002 bytes"):
        driver.run(ops.progress(Lease(new_id(), 1), 1, "é" * 1_000_001))
    assert wire.requests == []
    driver.close()


def test_c11_the_looks_of_an_idle_worker_share_a_request(wire: Held, tmp_path: Path) -> None:
    app = Duly(tmp_path / "unused.db")
    app.database.driver = driver_on(wire, timeout_s=10)

    @app.task
    def work() -> None: ...

    def shared() -> bool:
        looks = {"claim", "expired_leases", "next_fire"}
        return any(looks <= {line.section for line in lines} for lines in wire.requests)

    async def idle() -> None:
        worker = app.worker(signals=False)
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(20):
            while not shared():
                await asyncio.sleep(0.05)
        worker.stop()
        await running

    asyncio.run(idle())
    app.close()


@pytest.mark.parametrize(
    ("status", "code", "text", "kind", "said"),
    [
        (401, 10000, "no bearer token", ConfigError, "secret API_TOKEN"),
        (403, 10000, "wrong token", ConfigError, "secret API_TOKEN"),
        (403, 7403, "the statement x 0 is none", ConfigError, "run duly cloudflare deploy"),
        (404, 7404, "not found", ConfigError, "does not serve the database 'duly'"),
        (409, 7409, "other statements", ConfigError, "run duly cloudflare deploy"),
        (301, 0, "moved", ConfigError, "no gateway"),
        (429, 0, "slow down", StoreUnavailable, "nothing was written"),
        (500, 7500, "D1 DB is overloaded. Requests queued for too long.", StoreUnavailable, "overloaded"),
        (500, 7500, "D1 has exceeded its daily row read limit", StoreUnavailable, "until 00:00 UTC"),
        (400, 7500, "UNIQUE failed: SQLITE_CONSTRAINT", StoreRefused, "refuses this data"),
        (400, 7500, "no such table: duly_job: SQLITE_ERROR", SchemaMismatch, "duly migrate"),
        (400, 7500, "malformed JSON: SQLITE_ERROR", TooLate, "nothing was written"),
        (400, 7500, 'near "x": syntax error: SQLITE_ERROR', StoreError, "syntax"),
        (500, 7500, "Network connection lost.", AnswerLost, "may or may not"),
        (500, 7500, "storage caused object to be reset", AnswerLost, "may or may not"),
        (503, 0, "words that nobody knows", AnswerLost, "may or may not"),
        (0, 0, "timed out", AnswerLost, "may or may not"),
    ],
)
def test_c02_only_what_is_known_not_to_have_run_is_said_to_be_unwritten(
    status: int, code: int, text: str, kind: type[Exception], said: str
) -> None:
    error = translate(Trouble(status, code, text), "enqueue", WHERE)
    assert type(error) is kind
    assert said in str(error)


def test_c02_without_a_connection_nothing_was_sent() -> None:
    assert type(translate(Trouble(0, 0, "refused", sent=False), "enqueue", WHERE)) is StoreUnavailable


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("d1://s3cret@duly.me.workers.dev/duly", ("duly.me.workers.dev", None, True, "s3cret")),
        ("d1://env:T@gate.test:8443/duly", ("gate.test", 8443, True, "of the variable")),
        ("d1://a%2Fb@127.0.0.1:8787/duly", ("127.0.0.1", 8787, False, "a/b")),
        ("d1://t@localhost/duly", ("localhost", None, False, "t")),
        ("d1://t@[::1]:1/duly", ("::1", 1, False, "t")),
    ],
)
def test_c01_the_url_names_the_gateway_and_only_loopback_goes_without_tls(url: str, found: tuple[Any, ...]) -> None:
    address = read_address(url, {"T": "of the variable"})
    assert (address.host, address.port, address.secure, address.token) == found
    assert "s3cret" not in f"{address!r} {address}"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("d1://gate.test/duly", "no valid token"),
        ("d1://env:NOT_SET@gate.test/duly", "the variable NOT_SET holds the token, and it is not set"),
        ("d1://t@gate.test", "names no database"),
        ("d1://t@gate.test:99999/duly", "the port of the URL is not valid"),
    ],
)
def test_c01_a_url_that_cannot_be_used_says_what_to_write(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_address(url, {})
