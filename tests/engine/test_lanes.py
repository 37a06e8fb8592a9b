"""B06, B07, B08 as a user meets them: options of a task, and a worker that keeps to them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pytest

from duly import Duly, Snooze
from duly.errors import AnswerLost, ConfigError
from duly.model import State, TaskLimits
from duly.store import lanes
from duly.store.op import Op
from duly.worker.worker import Worker
from tests.contract.stores import WAITING
from tests.engine.conftest import HOLDABLE

SECONDS = 30
BEFORE_UPKEEP_SECONDS = 8  # upkeep has a worker look again after ten


async def drained(app: Duly, **options: Any) -> None:
    await asyncio.wait_for(Worker(app, signals=False, drain=True, **options).run(), SECONDS)


class Crowd:
    """How many run at once, and how many did at most."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    async def be_in(self, name: str) -> None:
        self.now[name] += 1
        self.most[name] = max(self.most[name], self.now[name])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.now[name] -= 1


def test_b06_a_cap_holds_while_everything_is_done(app: Duly) -> None:
    crowd = Crowd()

    @app.task(cap=2)
    async def one(number: int) -> None:
        await crowd.be_in("one")

    @app.task(cap=3, cap_key=lambda tenant, **_: tenant)
    async def each(tenant: str, number: int) -> None:
        await crowd.be_in(tenant)

    @app.task
    async def free(number: int) -> None:
        await crowd.be_in("free")

    one.enqueue_many(one.call(number) for number in range(20))
    each.enqueue_many(each.call("ab"[number % 2], number) for number in range(40))
    free.enqueue_many(free.call(number) for number in range(20))
    asyncio.run(drained(app, concurrency=10))
    assert {job.state for job in app.list(limit=100)} == {State.SUCCEEDED}
    assert crowd.most["one"] <= 2
    assert crowd.most["a"] <= 3
    assert crowd.most["b"] <= 3
    assert len(app.list(limit=100)) == 80


def test_b06_sync_handlers_are_capped_too(app: Duly) -> None:
    crowd = Crowd()

    @app.task(cap=1)
    def one(number: int) -> None:
        crowd.now["one"] += 1
        crowd.most["one"] = max(crowd.most["one"], crowd.now["one"])
        time.sleep(0.001)
        crowd.now["one"] -= 1

    one.enqueue_many(one.call(number) for number in range(10))
    asyncio.run(drained(app, concurrency=5))
    assert crowd.most["one"] == 1
    assert Counter(job.state for job in app.list()) == {State.SUCCEEDED: 10}


@pytest.mark.slow
def test_b06_a_tenant_with_many_jobs_does_not_keep_another_waiting(app: Duly) -> None:
    order: list[str] = []

    @app.task(cap=2, cap_key=lambda tenant: tenant)
    async def work(tenant: str) -> None:
        order.append(tenant)

    work.enqueue_many(work.call("big") for _ in range(300))
    work.enqueue_many(work.call("small") for _ in range(5))
    asyncio.run(drained(app, concurrency=4))
    assert max(place for place, tenant in enumerate(order) if tenant == "small") < 60


def test_b06_full_lanes_before_it_do_not_hide_a_lane_that_has_room(app: Duly, outside: Any) -> None:
    ran: list[str] = []

    @app.task(cap=1, cap_key=lambda tenant: tenant)
    async def work(tenant: str) -> None:
        ran.append(tenant)

    work.enqueue_many(work.call(f"a{tenant:03}") for tenant in range(150) for _ in range(2))
    app.driver.run(lanes.declare({"work": TaskLimits("work", cap=1)}))
    app.driver.run(
        lanes.claim("default", [lanes.Walk("work")], limit=1000, lanes=1000, token=77, worker="somebody else")
    )
    work.enqueue("z")
    asyncio.run(drained(app, concurrency=4))
    assert ran[0] == "z"


@pytest.mark.slow
def test_b06_jobs_with_and_without_a_lane_take_turns(app: Duly) -> None:
    order: list[str] = []

    @app.task(cap=5, queue="q")
    async def laned(number: int) -> None:
        order.append("laned")

    @app.task(queue="q")
    async def plain(number: int) -> None:
        order.append("plain")

    laned.enqueue_many(laned.call(number) for number in range(100))
    plain.enqueue_many(plain.call(number) for number in range(100))
    asyncio.run(drained(app, concurrency=1))
    assert min(Counter(order[:20]).values()) >= 5
    assert len(set(order[:20])) == 2


def test_b06_jobs_in_lanes_that_the_code_knows_no_more_are_found(apps: Callable[..., Duly]) -> None:
    before, after = apps(), apps()
    ran: list[int] = []

    @before.task(name="work", cap=1)
    async def capped(number: int) -> None: ...

    @after.task(name="work")
    async def work(number: int) -> None:
        ran.append(number)

    capped.enqueue_many(capped.call(number) for number in range(3))
    asyncio.run(drained(after))
    assert sorted(ran) == [0, 1, 2]


@pytest.mark.slow
def test_b07_a_worker_sleeps_until_the_next_permit(app: Duly) -> None:
    begun: list[float] = []

    @app.task(rate="2/300ms")
    async def work(number: int) -> None:
        begun.append(time.monotonic())
        if len(begun) == 5:
            worker.stop()

    work.enqueue_many(work.call(number) for number in range(5))
    worker = Worker(app, signals=False, concurrency=5)
    asyncio.run(asyncio.wait_for(worker.run(), SECONDS))
    begun.sort()
    for first, third in zip(begun, begun[2:], strict=False):
        assert third - first >= 0.3


def test_b07_jobs_with_a_rate_are_claimed_only_for_free_slots(app: Duly) -> None:
    held: list[int] = []

    @app.task(rate="1000/s", max_attempts=5)
    async def work(number: int) -> None:
        held.append(len(worker.held.leases()))

    work.enqueue_many(work.call(number) for number in range(200))
    worker = Worker(app, signals=False, drain=True, concurrency=3)
    asyncio.run(asyncio.wait_for(worker.run(), SECONDS))
    assert len(held) == 200
    assert max(held) <= 6  # three that run, and three whose ends are on their way


def test_b08_jobs_of_a_key_run_in_order(app: Duly) -> None:
    ran: dict[str, list[int]] = defaultdict(list)
    crowd = Crowd()

    @app.task(ordering_key=lambda account, **_: account)
    async def book(account: str, number: int) -> None:
        await crowd.be_in(account)
        ran[account].append(number)

    for number in range(10):
        for account in "ab":
            book.enqueue(account, number)
    book.enqueue_many(book.call("ab"[number % 2], 10 + number // 2) for number in range(20))
    asyncio.run(drained(app, concurrency=6))
    assert ran == {"a": list(range(20)), "b": list(range(20))}
    assert crowd.most == {"a": 1, "b": 1}


def test_b08_a_first_job_that_snoozes_holds_the_following_ones(app: Duly) -> None:
    ran: list[int] = []

    @app.task(ordering_key="all")
    async def book(number: int) -> None:
        if number == 0 and len(ran) < 1:
            ran.append(-1)
            raise Snooze("50ms")
        ran.append(number)
        if number == 2:
            worker.stop()

    for number in range(3):
        book.enqueue(number)
    worker = Worker(app, signals=False, concurrency=3)
    asyncio.run(asyncio.wait_for(worker.run(), SECONDS))
    assert ran == [-1, 0, 1, 2]


@pytest.mark.parametrize(("policy", "expected"), [("block", [0]), ("skip", [0, 1, 2])])
def test_b08_a_dead_head_blocks_or_is_skipped(app: Duly, policy: Any, expected: list[int]) -> None:
    ran: list[int] = []

    @app.task(ordering_key="all", ordering_dead=policy, max_attempts=1)
    async def book(number: int) -> None:
        ran.append(number)
        if number == 0:
            raise ValueError

    for number in range(3):
        book.enqueue(number)
    asyncio.run(drained(app, concurrency=3))
    assert ran == expected
    if policy == "block":
        [dead] = app.dead.list()
        app.dead.resolve(dead.id, by="me", why="so")
        asyncio.run(drained(app, concurrency=3))
        assert ran == [0, 1, 2]


def test_b08_a_batch_a_key_and_an_order_work_together(app: Duly) -> None:
    ran: list[int] = []

    @app.task(ordering_key="all", key=lambda number: f"k{number}")
    async def book(number: int) -> None:
        ran.append(number)

    with app.batch("books") as batch:
        for number in range(5):
            book.enqueue(number)
        book.enqueue(4)
    asyncio.run(drained(app, concurrency=3))
    assert ran == [0, 1, 2, 3, 4]
    assert batch.progress().succeeded == 5


@HOLDABLE
def test_b08_the_order_is_that_of_the_commits(app: Duly, outside: Any) -> None:
    ran: list[int] = []

    @app.task(ordering_key="all")
    async def book(number: int) -> None:
        ran.append(number)

    outside.query("begin")
    book.using(conn=outside._conn).enqueue(1)
    outside.query("commit")
    book.enqueue(2)
    asyncio.run(drained(app))
    assert ran == [1, 2]


def test_s08_a_schedule_of_a_capped_task_fills_its_lane(app: Duly) -> None:
    @app.task(cap=1)
    def report() -> None: ...

    app.schedules.create("hourly", report, "0 * * * *")
    app.schedules.trigger("hourly")
    [job] = app.list(state="ready")
    assert app.driver.run(lanes.tasks("default")) == ["report"]
    asyncio.run(drained(app))
    assert app.get(job.id).state is State.SUCCEEDED  # type: ignore[union-attr]


def test_r08_a_callback_of_a_capped_task_fills_its_lane(app: Duly) -> None:
    told: list[str] = []

    @app.task(cap=1)
    def tell(job_id: str) -> None:
        told.append(job_id)

    @app.task(max_attempts=1, on_dead=tell)
    def fail() -> None:
        raise ValueError

    job = fail.enqueue()
    asyncio.run(drained(app))
    assert told == [job.id]


def test_b06_limits_of_a_task_are_written_down_when_a_worker_starts(app: Duly) -> None:
    @app.task(cap=4, rate="100/min")
    def send() -> None: ...

    asyncio.run(drained(app))
    [said] = app.driver.run(lanes.limits())
    assert (said.task, said.cap, said.rate_count, said.rate_ms) == ("send", 4, 100, 60_000)


def drained_past(app: Duly, url: str) -> None:
    """Drain while all lanes that there are are in the hands of somebody else."""
    ran_past(Worker(app, drain=True, signals=False), url)


def ran_past(worker: Worker, url: str) -> None:
    """Have all lanes that there are in the hands of somebody else until the worker waits for one of them."""
    with (
        psycopg.connect(url) as other,
        psycopg.connect(url, autocommit=True) as watching,  # in a transaction, it would see the same for ever
        ThreadPoolExecutor(1) as beside,
    ):
        other.execute("select 1 from duly.duly_lane for update")
        working = beside.submit(lambda: asyncio.run(worker.run()))
        until = time.monotonic() + BEFORE_UPKEEP_SECONDS
        try:
            while not watching.execute(WAITING).fetchall():
                assert not working.done()
                assert time.monotonic() < until, "it waits for no lane"
        except AssertionError:
            worker.stop()
            raise
        finally:
            other.commit()
        working.result()


def test_b06_a_lane_locked_by_another_claim_is_waited_for_without_other_work(postgres_url: str) -> None:
    ran: list[int] = []
    with closing(Duly(postgres_url, poll="1h")) as app:

        @app.task(cap=1)
        async def work(number: int) -> None:
            ran.append(number)

        work.enqueue(1)
        asyncio.run(drained(app))
        work.enqueue(2)
        drained_past(app, postgres_url)
        assert ran == [1, 2]


def test_b06_a_lane_that_was_passed_by_is_not_left_for_later_while_slots_are_free(postgres_url: str) -> None:
    ran: list[str] = []
    with closing(Duly(postgres_url, poll="1h")) as app:

        @app.task(cap=1, cap_key=lambda tenant: tenant)
        async def work(tenant: str) -> None:
            ran.append(tenant)
            while tenant == "long" and ran.count("held") < 2:
                await asyncio.sleep(0.001)

        work.enqueue("held")
        asyncio.run(drained(app))
        work.enqueue_many(work.call(tenant) for tenant in ("held", "long"))
        drained_past(app, postgres_url)
        assert ran == ["held", "long", "held"]


def test_b06_a_worker_woken_by_the_clock_claims_a_skipped_lane(postgres_url: str) -> None:
    ran: list[str] = []
    with closing(Duly(postgres_url, poll="1h", grace="0s")) as app:

        @app.task(cap=1, cap_key=lambda tenant: tenant)
        async def work(tenant: str) -> None:
            ran.append(tenant)
            while tenant == "long" and ran.count("held") < 2:
                await asyncio.sleep(0.001)
            if tenant == "long":
                worker.stop()

        work.enqueue("held")
        asyncio.run(drained(app))
        worker = Worker(app, signals=False)
        work.using(delay="300ms").enqueue_many(work.call(tenant) for tenant in ("held", "long"))
        ran_past(worker, postgres_url)
        assert ran == ["held", "long", "held"]


def test_b06_a_drain_repeats_a_claim_of_lanes_without_an_answer(apps: Callable[..., Duly]) -> None:
    app, ran, lost = apps(), [], []
    send = app.driver.aexecute

    async def aexecute(op: Op[Any]) -> Any:
        if op.sections[-1] == "claim_lanes" and not lost:
            lost.append(op)
            raise AnswerLost("nothing was committed, and nobody knows")
        return await send(op)

    app.driver.aexecute = aexecute  # type: ignore[method-assign]

    @app.task(cap=1)
    async def work() -> None:
        ran.append(1)

    work.enqueue()
    asyncio.run(drained(app))
    assert (len(lost), ran) == (1, [1])


def test_b06_a_worker_without_lanes_sends_no_extra_statements(app: Duly) -> None:
    sent: list[tuple[str, ...]] = []
    send = app.driver.arun

    async def arun(op: Op[Any]) -> Any:
        sent.append(op.sections)
        return await send(op)

    app.driver.arun = arun  # type: ignore[method-assign]

    @app.task
    async def work() -> None: ...

    work.enqueue()
    asyncio.run(drained(app))
    assert {sections for sections in sent if sections[-1] in ("claim", "claim_lanes")} == {("claim",)}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "cap of 0": ({"cap": 0}, "pause it"),
    "cap below 0": ({"cap": -1}, "cap= is -1"),
    "cap of text": ({"cap": "5"}, "cap= is '5'"),
    "bad rate": ({"rate": "many"}, "rate= is 'many'"),
    "rate without time": ({"rate": "100"}, "'100/min'"),
    "rate of a bad time": ({"rate": "100/fortnight"}, "'fortnight' is no time"),
    "rate of 0": ({"rate": "0/min"}, "at least one job"),
    "rate of a number": ({"rate": 100}, "rate= is 100"),
    "order and cap": ({"ordering_key": "a", "cap": 2}, "leave cap="),
    "order and cap key": ({"ordering_key": "a", "cap_key": "b"}, "leave cap="),
    "key alone": ({"cap_key": "a"}, "give one of them"),
    "dead without order": ({"ordering_dead": "skip"}, "ordering_key="),
    "wrong dead": ({"ordering_key": "a", "ordering_dead": "wait"}, "'block' or 'skip'"),
    "key of a number": ({"cap": 1, "cap_key": 1.5}, "cap_key= is of type float"),
}


@pytest.mark.parametrize(("options", "told"), WRONG.values(), ids=WRONG)
def test_b06_wrong_limits_are_refused_at_definition(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:

        @Duly().task(**options)
        def work(n: int) -> None: ...

    assert told in str(error.value)


def test_b06_a_key_that_does_not_fit_the_arguments_is_refused_at_enqueue(app: Duly, outside: Any) -> None:
    @app.task(cap=1, cap_key=lambda nobody: nobody)
    def work(one: int, two: int) -> None: ...

    before = outside.snapshot()
    with pytest.raises(ConfigError, match="work: cap_key= is a function of"):
        work.enqueue(1, 2)
    assert outside.snapshot() == before


@pytest.mark.parametrize("option", ["cap_key", "ordering_key"])
def test_b06_a_callback_has_no_arguments_for_a_key(app: Duly, option: str) -> None:
    options: dict[str, Any] = {option: lambda: "a", **({"cap": 1} if option == "cap_key" else {})}

    @app.task(**options)
    def after() -> None: ...

    with pytest.raises(ConfigError, match=f"{option}="):
        app.batch("import", on_complete=after)


def test_b07_limits_are_set_by_the_app_and_reset(app: Duly) -> None:
    @app.task(cap=5, rate="100/min")
    def send() -> None: ...

    app.limit(task="send", cap=1, by="ada", why="slow")
    asyncio.run(app.alimit(task="send", rate="5/10s", by="bob", why="slower"))
    [said] = app.task_limits()
    assert (said.set_cap, said.set_rate_count, said.set_rate_ms, said.set_by) == (1, 5, 10_000, "bob")
    app.limit(task="send", cap="off", rate="off", by="ada")
    [said] = asyncio.run(app.atask_limits())
    assert (said.set_cap, said.set_rate_count, said.is_rated) == (0, 0, False)
    app.limit(task="send", reset=True, by="ada")
    [said] = app.task_limits()
    assert (said.set_cap, said.set_rate_count) == (None, None)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"cap": 0}, "cap= is 0"),
        ({"cap": "few"}, "cap= is 'few'"),
        ({"rate": "x"}, "rate= is 'x'"),
        ({"reset": True, "cap": 1}, "leave out cap="),
        ({}, "give at least one of"),
        ({"depth": 5}, "not for a task"),
        ({"speed": 5}, "there is no limit 'speed'"),
    ],
)
def test_b06_wrong_limits_at_run_time_are_refused(app: Duly, outside: Any, options: dict[str, Any], told: str) -> None:
    @app.task(cap=1)
    def send() -> None: ...

    before = outside.snapshot()
    with pytest.raises(ConfigError) as error:
        app.limit(task="send", **options)
    assert told in str(error.value)
    with pytest.raises(ConfigError, match="not for a queue"):
        app.limit(queue="mail", cap=5)
    assert outside.snapshot() == before


def test_b06_a_task_without_a_lane_cannot_be_limited(app: Duly) -> None:
    @app.task
    def send() -> None: ...

    with pytest.raises(ConfigError, match="has neither cap= nor rate= in its code"):
        app.limit(task="send", cap=5)
