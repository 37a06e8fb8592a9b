"""The gateway of the Worker on Cloudflare's own runtime. It runs duly's statements by name, and no SQL by text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from duly.model import Change, NewJob, State, Terms
from duly.store import batches, ops
from duly.store.batches import Callbacks
from duly.store.d1 import catalogue
from duly.store.d1.driver import D1Driver
from duly.store.d1.wire import Address, Line
from duly.store.driver import Driver
from duly.store.op import Finish, Op, Row
from duly.store.statements import spell
from tests.contract.stores import new_id, new_token
from tests.contract.test_d1_runtime import Story
from tests.servers.workerd import ROOT, D1Gateway, GatewayError, Workerd, why_not

pytestmark = [
    pytest.mark.cloudflare,
    pytest.mark.skipif(why_not() is not None, reason=f"no Cloudflare runtime: {why_not()}"),
]
CLOCK = ("clock", 0, None)
PAUSE = ops.pause("queue", "letters", by="ann", why="closed")


class Counting:
    """Sends the batches of a driver, and counts the rows that D1 bills."""

    def __init__(self, gateway: D1Gateway) -> None:
        self.gateway = gateway
        self.written = self.read = 0

    def send(self, lines: Sequence[Line], seconds: float) -> list[list[Row]]:
        batch = [[line.section, line.number, *line.values] for line in lines]
        answers = self.gateway.post("query", {"batch": batch})
        self.written += sum(answer["meta"]["rows_written"] for answer in answers)
        self.read += sum(answer["meta"]["rows_read"] for answer in answers)
        return [[tuple(row.values()) for row in answer["results"]] for answer in answers]

    def close(self) -> None:
        self.gateway.close()


def entries(op: Op[Any]) -> list[list[Any]]:
    """Return the entries of an operation in a body."""
    return [
        [section, number, *(op.params[name] for name in statement.parameters)]
        for section in op.sections
        for number, statement in enumerate(spell("sqlite", section, "numbered"))
    ]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Workerd]:
    with Workerd(ALLOW_SQL="", API_TOKEN_2="the-next") as made:
        made.gateway().named(*(["migration", number] for number in catalogue.migrations()))
        yield made


@pytest.fixture
def gateway(runtime: Workerd) -> D1Gateway:
    return runtime.gateway()


@pytest.fixture
def wire(gateway: D1Gateway) -> Counting:
    return Counting(gateway)


@pytest.fixture
def driver(wire: Counting) -> Iterator[Driver]:
    made = D1Driver(Address("127.0.0.1", None, False, "duly", "token"), wire)
    yield made
    made.close()


def refusal(gateway: D1Gateway, *batch: Any, statements: str | None = None) -> tuple[int, int, str]:
    """Send a batch and return the status, the code and the message of its refusal."""
    headers = {} if statements is None else {"duly-statements": statements}
    body = json.dumps({"batch": batch}).encode()
    status, answer = gateway.request("POST", gateway.path + "/query", body, headers)
    assert not answer["success"]
    return status, answer["errors"][0]["code"], answer["errors"][0]["message"]


def is_paused(driver: Driver) -> bool:
    return "letters" in {pause.name for pause in driver.run(ops.paused())}


def test_c06_every_operation_of_a_story_runs_by_name(driver: Driver) -> None:
    assert len(Story(driver, [new_id() for _ in range(60)]).tell()) > 50


@pytest.mark.parametrize("theirs", ["0" * 64, ""])
def test_c01_a_caller_with_other_statements_is_refused(gateway: D1Gateway, driver: Driver, theirs: str) -> None:
    status, code, message = refusal(gateway, *entries(PAUSE), statements=theirs)
    assert (status, code) == (409, 7409)
    assert catalogue.digest()[:12] in message
    assert (theirs[:12] or "none") in message
    assert not is_paused(driver)


@pytest.mark.parametrize(
    "entry",
    [
        {"sql": "drop table duly_job"},
        *(["drop table duly_job", 0], ["clock", 1, None], ["clock", -1, None], ["constructor", 0], ["__proto__", 0]),
        *(["migration", 99], ["migration", 1, None], ["migration", -1]),
    ],
    ids=str,
)
def test_c01_a_batch_with_another_statement_is_refused(gateway: D1Gateway, driver: Driver, entry: Any) -> None:
    assert refusal(gateway, *entries(PAUSE), entry)[:2] == (403, 7403)
    assert not is_paused(driver)


@pytest.mark.parametrize("entry", [[], ["clock"], [0, "clock"], ["clock", 0.5], ["clock", "0"], ["clock", 0, [1]]])
def test_c01_an_entry_of_another_shape_is_refused(gateway: D1Gateway, entry: Any) -> None:
    assert refusal(gateway, entry)[:2] == (400, 7400)


def test_c01_a_batch_after_its_deadline_changes_nothing(gateway: D1Gateway, driver: Driver) -> None:
    [[(now,)], *_] = gateway.named(("deadline", 0, 9e15), *entries(PAUSE))
    assert abs(driver.run(ops.clock()) - now) < 60_000
    assert is_paused(driver)
    driver.run(ops.resume("queue", "letters", by="ann", why="open"))
    with pytest.raises(GatewayError, match="malformed JSON"):
        gateway.named(("deadline", 0, now - 1), *entries(PAUSE))
    assert not is_paused(driver)


def test_c01_a_repeated_migration_changes_nothing(gateway: D1Gateway) -> None:
    before = gateway.named(("meta", 0))
    assert dict(before[0])["schema"] == str(max(catalogue.migrations()))
    for number in catalogue.migrations():
        with pytest.raises(GatewayError, match="malformed JSON"):
            gateway.named(*entries(PAUSE), ("migration", number))
    assert gateway.named(("meta", 0)) == before


def test_c01_both_tokens_are_valid_while_they_change(runtime: Workerd) -> None:
    assert runtime.gateway(token="the-next").named(CLOCK)
    with pytest.raises(GatewayError) as refused:
        runtime.gateway(token="the-last").named(CLOCK)
    assert refused.value.status == 403


COUNTING = """
import { duly } from "../duly/index.mjs";
const lengths = [], compare = SubtleCrypto.prototype.timingSafeEqual;
SubtleCrypto.prototype.timingSafeEqual = function (a, b) {
  lengths.push(a.byteLength, b.byteLength);
  return compare.call(this, a, b);
};
export default duly({ fetch: () => Response.json({ success: true, lengths: lengths.splice(0) }) });
"""


def test_c01_tokens_are_compared_in_constant_time() -> None:
    with Workerd(index=COUNTING, API_TOKEN_2="the-next") as runtime:
        for token, status in (("x", 403), (runtime.token[:-1], 403), (runtime.token, 400)):
            gateway = runtime.gateway(token=token)
            assert gateway.request("POST", gateway.path + "/query", b"")[0] == status
            assert gateway.request("GET", "/")[1]["lengths"] == [32] * 4  # both tokens, each by its digest


# What a job costs: rows written alone, in turns of 100, and read likewise.

PAGE = (ROOT / "docs" / "running" / "cloudflare.md").read_text("utf-8")
COSTS = re.findall(r"^\| (plain|with a key|in a batch)[^|]*\| (.+) \|$", PAGE, re.MULTILINE)


def test_c11_the_page_has_these_lives() -> None:
    assert [life for life, _ in COSTS] == ["plain", "with a key", "in a batch"]


@pytest.mark.parametrize(("life", "figures"), COSTS)
def test_c11_a_job_costs_what_the_page_says(driver: Driver, wire: Counting, life: str, figures: str) -> None:
    driver.run(ops.clock())  # which connects
    documented = [int(figure) for figure in figures.split(" | ")]
    for count, written, read in ((1, *documented[::2]), (100, *documented[1::2])):
        wire.written = wire.read = 0
        live(driver, life, count)
        assert round(wire.written / count) == written
        assert abs(wire.read / count - read) < 2  # another row of the tables may stand in the way


def live(driver: Driver, life: str, count: int) -> None:
    """Enqueue, claim and finish some jobs in a queue of their own."""
    terms = Terms("work", queue=new_id())
    jobs = [NewJob(new_id(), "{}", key=new_id() if life == "with a key" else None) for _ in range(count)]
    if life == "in a batch":
        opened = driver.run(batches.open_batch(new_id(), "b", key=None, ok_at=1.0, callbacks=Callbacks()))
        driver.run(batches.add(replace(terms, batch_id=opened.id), jobs, filling=batches.ANYWHERE))
        driver.run(batches.seal(opened.id))
    else:
        driver.run(ops.enqueue(terms, jobs))
    claimed = driver.run(ops.claim(terms.queue, limit=count, token=new_token(), worker="w", tasks=["work"]))
    ends = driver.run(ops.finish([Finish(job, Change(State.SUCCEEDED, result="1")) for job in claimed]))
    assert list(ends.values()) == ["recorded"] * count
