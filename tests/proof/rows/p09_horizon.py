"""P9: what somebody else's open transaction keeps from being cleared away does not slow the queue.

Two queues work side by side, each on a server of its own: a transaction that has a number holds the horizon of all the
databases of its server. The other queue shows what the rest of the machine does to both meanwhile, and every change is
judged beside its change.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from duly import Duly
from duly.store.op import Op
from duly.store.postgres.schema import bring_up_to_date
from duly.worker.shared import Shared
from duly.worker.watermark import Watermark
from tests.proof import breaks
from tests.proof.fleet import fleet
from tests.proof.ledger import Ledger, records
from tests.proof.table import ALL, Figure, Row, Setting
from tests.servers.postgres import PostgresServer

LEAST_RATE, MOST_P99, MOST_RECOVERY = 0.9, 3.0, 60.0
READERS = 4
# Jobs as a task leaves them that was called without arguments; each becomes due a little after the one before.
FILL = """
insert into duly.duly_job (id, task, queue, priority, state, max_attempts, created_at, due_at, lease_ms, keep_ms,
                           result_ttl_ms, payload)
select ('00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 'nothing', 'default', 0, 'ready', 5, now,
       now + n / 20, 30000, 3600000, 3600000, '{}'
  from generate_series(%(first)s::bigint, %(last)s::bigint) as n
 cross join (select (extract(epoch from clock_timestamp()) * 1000)::bigint - 3600000 as now) as clock
"""

# What the workers run

app = Duly(os.environ.get("PROOF_URL", "proof.db"))


@app.task
async def nothing() -> None:
    """Take no time."""


class Tally:
    """Counts what was done, and writes the count down time and again."""

    def __init__(self, path: Path) -> None:
        self._ledger = Ledger(path)
        self._done = 0
        self._noted_at = 0.0

    def done(self) -> None:
        """Count one job whose end is acknowledged."""
        self._done += 1
        now = time.monotonic()
        if now >= self._noted_at + 0.02:
            self._ledger.note("done", count=self._done)
            self._done, self._noted_at = 0, now

    def claimed(self, count: int, seconds: float) -> None:
        """Note what a claim got, and how long it took."""
        self._ledger.note("claimed", count=count, seconds=seconds)


def _count_here(path: Path) -> None:
    """Have the worker of this process write down what it does."""
    tally, surely = Tally(path), Shared.surely

    @app.events.listen
    def told(name: str, fields: Mapping[str, Any]) -> None:
        if name == "job.succeeded":
            tally.done()

    async def timed(self: Shared, op: Op[Any], **options: Any) -> Any:
        began = time.monotonic()
        answer = await surely(self, op, **options)
        if op.name == "claim" and answer:
            tally.claimed(len(answer), time.monotonic() - began)
        return answer

    Shared.surely = timed  # type: ignore[method-assign]


if "PROOF_TALLY" in os.environ:
    _count_here(Path(os.environ["PROOF_TALLY"]))

# What is measured


class Phase(NamedTuple):
    """How fast a queue was for a while: jobs a second in each round, and how long its claims took."""

    rates: list[float]
    claims: list[float]

    @property
    def rate(self) -> float:
        """Give the rate of the round in the middle."""
        return statistics.median(self.rates)

    @property
    def p99_ms(self) -> float:
        """Say how long all but a hundredth of the claims took at most."""
        return sorted(self.claims)[int(len(self.claims) * 0.99)] * 1000


class Pair(NamedTuple):
    """The same while of the queue whose horizon is held at times, and of the one beside it."""

    held: Phase
    free: Phase


def run(setting: Setting) -> Figure:
    """Measure both queues before, while and after transactions are held."""
    with ExitStack() as stack:
        servers = [stack.enter_context(PostgresServer()) for _ in Pair._fields]
        queues = [_queue(server, setting.folder / name) for server, name in zip(servers, Pair._fields, strict=True)]
        for queue in queues:
            workers = stack.enter_context(fleet(queue.url, queue.tally.parent, app=f"{__name__}:app"))
            # A limit keeps it from claiming ahead, a thousand at a time: so many jobs would hide what a claim costs.
            more = ("--queues", f"default:{SLOTS}")
            workers.start(concurrency=SLOTS, more=more, environ={"PROOF_TALLY": str(queue.tally)})
        if not all(queue.wait_for(WARM) for queue in queues):
            return Figure("the workers did not begin", False)
        before = _measured(queues, ROUNDS)
        seconds = setting.pick(HELD_SHORT, HELD_FULL)
        for queue in queues:
            queue.add(int(max(before.held.rate, before.free.rate) * (seconds + SPARE)))
        with held(queues[0].url):
            time.sleep(seconds - ROUNDS * ROUND)
            during = _measured(queues, ROUNDS)
        left = min(queue.left() for queue in queues)
        recovery = None if setting.broken else _back_after(queues, before)
    return _figure(before, during, recovery, left)


SLOTS = 100
WARM, FIRST = 10_000, 100_000
ROUNDS, ROUND = 3, 2.0
HELD_SHORT, HELD_FULL, SPARE = 12.0, 60.0, 10.0


@contextmanager
def held(url: str) -> Iterator[None]:
    """Hold a transaction that has a number, and the snapshots of readers."""
    with ExitStack() as stack:
        for number in range(1 + READERS):
            conn = stack.enter_context(psycopg.connect(url))
            conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            conn.execute("select count(*) from duly.duly_queue")
            if number == 0:
                conn.execute("select pg_current_xact_id()")
        yield


class Queue:
    """A queue that is measured: a backlog, and what its worker writes down."""

    def __init__(self, url: str, tally: Path) -> None:
        self.url = url
        self.tally = tally
        self._made = 0
        tally.touch()

    def add(self, count: int) -> None:
        """Add jobs at the end."""
        with psycopg.connect(self.url, autocommit=True) as conn:
            conn.execute(FILL, {"first": self._made + 1, "last": self._made + count})
            conn.execute("analyze duly.duly_job")
        self._made += count

    def wait_for(self, count: int) -> bool:
        """Wait until so many jobs are done."""
        until = time.monotonic() + 30
        while (done := self._done()) < count and time.monotonic() < until:
            time.sleep(0.1)
        return done >= count

    def left(self) -> int:
        """Count what is not done."""
        return self._made - self._done()

    def _done(self) -> int:
        return sum(one["count"] for one in records(self.tally) if one["what"] == "done")

    def phase(self, since: float, rounds: int) -> Phase:
        """Read what was done from a moment on."""
        found = [one for one in records(self.tally) if since <= one["at"] < since + rounds * ROUND]
        done = [0] * rounds
        for one in found:
            if one["what"] == "done":
                done[int((one["at"] - since) / ROUND)] += one["count"]
        return Phase([count / ROUND for count in done], [one["seconds"] for one in found if one["what"] == "claimed"])


def _queue(server: PostgresServer, folder: Path) -> Queue:
    """Make a database with a backlog."""
    folder.mkdir()
    url = server.new_database()
    bring_up_to_date(url)
    queue = Queue(url, folder / "tally.jsonl")
    queue.add(FIRST)
    return queue


def _measured(queues: Sequence[Queue], rounds: int) -> Pair:
    """Measure both from now on."""
    since = time.monotonic()
    time.sleep(rounds * ROUND + 0.05)
    return Pair(*(queue.phase(since, rounds) for queue in queues))


def _back_after(queues: Sequence[Queue], before: Pair) -> float | None:
    """Say after how long the queue is as fast as it was; None: it is not within the time it has."""
    since = time.monotonic()
    while time.monotonic() < since + MOST_RECOVERY:
        for queue in queues:
            if queue.left() < FIRST / 2:
                queue.add(FIRST // 2)
        if _rate(before, _measured(queues, 1)) >= LEAST_RATE:
            return time.monotonic() - since
    return None


def _rate(before: Pair, then: Pair) -> float:
    """Say which part of its rate the queue kept, where the one beside it kept all of it."""
    return (then.held.rate / before.held.rate) / max(then.free.rate / before.free.rate, 0.001)


def _p99(before: Pair, then: Pair) -> float:
    """Say how many times as long claims took as before, or as beside it where those take longer by now."""
    return then.held.p99_ms / max(before.held.p99_ms, then.free.p99_ms)


def _figure(before: Pair, during: Pair, recovery: float | None, left: int) -> Figure:
    rate, p99 = _rate(before, during), _p99(before, during)
    text = (
        f"{before.held.rate:,.0f} jobs/s, while held {during.held.rate:,.0f} (beside it {before.free.rate:,.0f} and "
        f"{during.free.rate:,.0f}): {rate:.0%}; claim p99 {before.held.p99_ms:.0f} and {during.held.p99_ms:.0f} ms "
        f"({before.free.p99_ms:.0f} and {during.free.p99_ms:.0f}): x {p99:.1f}; "
        + ("not back" if recovery is None else f"back after {recovery:.1f} s")
    )
    numbers = {
        "rate": rate, "p99": p99, "recovery_s": recovery, "left": left,
        **{f"{when}_{which}": {"rates": phase.rates, "claims": len(phase.claims), "p99_ms": phase.p99_ms}
           for when, pair in (("before", before), ("held", during))
           for which, phase in zip(pair._fields, pair, strict=True)},
    }  # fmt: skip
    if left < SLOTS:
        return Figure(f"{text}; but the backlog came to its end", False, numbers, only_slow=True)
    good = rate >= LEAST_RATE and p99 <= MOST_P99 and recovery is not None
    return Figure(text, good, numbers, only_slow=True)


# Each claim begins at the head of the queue.
breaks.python("watermark", Watermark, "marks", lambda self: [])

ROW = Row(
    "P9",
    "a transaction and 4 readers hold the horizon of PostgreSQL",
    "throughput >= 90 %, claim p99 <= 3 x those of before and of a queue beside it, back within 60 s",
    run,
    controls=("watermark",),
    of_speed=True,
    full_only=True,
    takes=ALL,
    control_takes=ALL,
)
