"""The operations of the store beside their limits. Whoever is compared takes turns, a few batches at a time."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from urllib.parse import urlsplit

from bench.contestant import Contestant, Duly, whole
from bench.database import Database, PostgresDatabase, PostgresHome, SQLiteHome
from bench.figures import Figure, Target, alone, compared, kept, percentile
from bench.limit import check_plan
from bench.wire import relayed
from duly.rules.keys import Ids
from duly.store.driver import Point
from duly.store.postgres.driver import PostgresDriver

Say = Callable[[str], None]

ENQUEUE = Target(at_least=0.6)
CYCLE = Target(at_least=0.6)
WAL_KEPT = Target(at_most=900)
WAL_GONE = Target(at_most=500)
HOT = Target(at_least=0.9)
GROWTH = Target(at_most=1.3)

BULK = 1_000
WARM_UP = 4
SLICE = 5  # turns of one lane before the next has its own
ORDER = random.Random(7)
SMALL = 1_000
MODES = {
    ("apart", "sqlite"): "two commits",
    ("together", "sqlite"): "one commit",
    ("apart", "postgres"): "one connection",
    ("together", "postgres"): "two connections",
}


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    repeat: int
    batches: Sequence[int]
    sizes: Sequence[int]
    jobs: int
    beats: int
    cycles: int
    finished: int
    say: Say


def everything(home: SQLiteHome | PostgresHome, plan: Plan) -> Iterator[Figure]:
    """Measure one store."""
    with closing(home.new_database()) as database:
        with ExitStack() as stack:
            lanes = [Lane(database, database.duly, keep=True)]
            for name, keep in (("bare", False), ("same rows", True), ("duly", False), ("same rows", False)):
                another = stack.enter_context(closing(home.new_database()))
                lanes.append(Lane(another, another.named(name), keep=keep))
            check_limits(database)
            yield from bulk_enqueue(lanes, plan)
            yield from cycles(lanes, plan)
        yield from wal(database, plan)
        yield from statements(database, plan)
        if isinstance(database, PostgresDatabase):
            yield from round_trips(database, plan)
            yield from beats(database, plan)
        yield from growth(home, plan)


def check_limits(database: Database) -> None:
    """See that the limits deserve the name."""
    for limit in database.limits:
        database.refill(limit, 5_000, keep=True)
        check_plan(limit.plan(), limit.name)


@dataclass(frozen=True)
class Lane:
    """A contestant on a database of its own, so that all can be filled first and then work in turns."""

    database: Database
    contestant: Contestant
    keep: bool

    @property
    def name(self) -> tuple[str, bool]:
        return self.contestant.name, self.keep

    def refill(self, turns: int, batch: int) -> None:
        """Start over with this much work, a few turns more of which are done at once to warm up."""
        self.database.refill(self.contestant, (WARM_UP + turns) * batch, keep=self.keep)
        self.contestant.apart(WARM_UP, batch, keep=self.keep)


def bulk_enqueue(lanes: Sequence[Lane], plan: Plan) -> Iterator[Figure]:
    """Rows a second, in batches of a thousand, each its own commit."""
    store, make_id = lanes[0].database.store, Ids()
    kept_and_bare = [lane for lane in lanes if lane.keep or lane.contestant.name == "bare"]
    taken: dict[str, list[float]] = {lane.contestant.name: [] for lane in kept_and_bare}
    for number in range(plan.repeat):
        plan.say(f"{store}: bulk enqueue ({number + 1}/{plan.repeat})")
        for lane in kept_and_bare:
            lane.refill(1, 100)

        def work(lane: Lane) -> float:
            ids = [make_id() for _ in range(BULK)]
            return timed(lambda: lane.contestant.enqueue(ids, keep=lane.keep))

        seconds = in_turns(kept_and_bare, work, 2 * plan.jobs // BULK)
        for lane in kept_and_bare:
            taken[lane.contestant.name].append(2 * plan.jobs / seconds[lane])
    target = ENQUEUE if store == "sqlite" else None  # PostgreSQL's is measured in peers
    yield compared(store, "bulk enqueue, batches of 1000", "rows/s", taken, target, short="enqueue")


def cycles(lanes: Sequence[Lane], plan: Plan) -> Iterator[Figure]:
    """Jobs a second through claim and finish: apart, and with the finish of one batch and the next claim together."""
    for batch in plan.batches:
        for mode in ("apart", "together"):
            yield from cycle(lanes, plan, batch, mode)


def cycle(lanes: Sequence[Lane], plan: Plan, batch: int, mode: str) -> Iterator[Figure]:
    store = lanes[0].database.store
    what = f"claim+finish by {batch}, {MODES[mode, store]}"
    rounds = max(plan.jobs // batch // SLICE, 2)
    taken: dict[tuple[str, bool], list[float]] = {lane.name: [] for lane in lanes}

    def work(lane: Lane) -> float:
        run = lane.contestant.apart if mode == "apart" else lane.contestant.together
        return timed(lambda: run(SLICE, batch, keep=lane.keep))

    for number in range(plan.repeat):
        plan.say(f"{store}: {what} ({number + 1}/{plan.repeat})")
        for lane in lanes:
            lane.refill(rounds * SLICE, batch)
        for lane, seconds in in_turns(lanes, work, rounds).items():
            whole(range(lane.database.live(lane.contestant)), 0)
            taken[lane.name].append(rounds * SLICE * batch / seconds)
    for keep in (True, False):
        short = f"{mode} {kept(keep)}" if batch == plan.batches[0] else ""
        samples = {"duly": taken["duly", keep], "bare": taken["bare", False], "same rows": taken["same rows", keep]}
        yield compared(store, f"{what}, {kept(keep)}", "jobs/s", samples, CYCLE, short=short)


def wal(database: Database, plan: Plan) -> Iterator[Figure]:
    """WAL bytes a job. Pages are filled after a checkpoint, so that none is logged whole for being touched first."""
    batch = plan.batches[0]
    turns = max(plan.jobs // batch // 2, 5)
    _, same = database.limits
    make_id = Ids()
    plan.say(f"{database.store}: WAL bytes")

    def prepare(contestant: Contestant, keep: bool) -> None:
        if isinstance(database, PostgresDatabase):
            database.checkpoint()
        database.refill(contestant, (WARM_UP + turns) * batch, keep=keep)
        contestant.apart(WARM_UP, batch, keep=keep)

    def enqueueing(contestant: Contestant) -> float:
        prepare(contestant, True)
        with database.writing() as written:
            for _ in range(4):
                contestant.enqueue([make_id() for _ in range(BULK)], keep=True)
        return written[0] / (4 * BULK)

    def cycling(contestant: Contestant, keep: bool) -> float:
        prepare(contestant, keep)
        with database.writing() as written:
            contestant.apart(turns, batch, keep=keep)
        return written[0] / (turns * batch)

    taken = {one.name: [enqueueing(one)] for one in database.contestants}
    yield compared(database.store, "WAL of bulk enqueue", "B/job", taken)
    gone = {one.name: [cycling(one, False)] for one in database.contestants}
    taken = {"duly": [cycling(database.duly, True)], "bare": gone["bare"], "same rows": [cycling(same, True)]}
    for keep, samples, target in ((True, taken, WAL_KEPT), (False, gone, WAL_GONE)):
        yield compared(
            database.store,
            f"WAL of claim+finish by {batch}, {kept(keep)}",
            "B/job",
            samples,
            target if database.store == "postgres" else None,
            judged="value",
            short=f"WAL {kept(keep)}",
        )


def statements(database: Database, plan: Plan) -> Iterator[Figure]:
    """Statements and commits of one turn, seen by the driver's hook."""
    batch, turns = plan.batches[0], 10
    plan.say(f"{database.store}: statements")
    for mode in ("apart", "together"):
        for keep in (True, False):
            seen: Counter[str] = Counter()

            def hook(point: Point, seen: Counter[str] = seen) -> None:
                if point.moment == "before":
                    seen["commits" if point.section == "commit" else "statements"] += 1

            watched = Duly(database.driver(hook=hook), database.table)
            database.refill(watched, (turns + 1) * batch, keep=keep)
            watched.apart(1, batch, keep=keep)
            seen.clear()
            (watched.apart if mode == "apart" else watched.together)(turns, batch, keep=keep)
            watched.close()
            for what in ("statements", "commits"):
                measure = f"{what} a turn, {MODES[mode, database.store]}, {kept(keep)}"
                yield alone(database.store, measure, what, [seen[what] / turns])


def round_trips(database: PostgresDatabase, plan: Plan) -> Iterator[Figure]:
    """Round trips of one turn, counted on the wire, once the driver has prepared its statements."""
    batch, turns = plan.batches[0], 10
    where = urlsplit(database.url)
    with relayed(where.hostname or "127.0.0.1", where.port or 5432) as wire:
        relayed_url = where._replace(netloc=f"{where.username}@127.0.0.1:{wire.port}").geturl()
        duly = Duly(PostgresDriver(relayed_url), database.table)
        for keep in (True, False):
            database.refill(duly, (WARM_UP + turns) * batch, keep=keep)
            duly.apart(WARM_UP, batch, keep=keep)
            before = wire.round_trips
            duly.apart(turns, batch, keep=keep)
            made = (wire.round_trips - before) / turns
            yield alone(database.store, f"round trips a turn, {kept(keep)}", "round trips", [made])
        duly.close()


def beats(database: PostgresDatabase, plan: Plan) -> Iterator[Figure]:
    """The share of beats that rewrite a row in its page and touch no index, and the WAL of one."""
    plan.say("postgres: beats")
    rounds, batch = 10, 100
    database.checkpoint()
    database.refill(database.duly, plan.beats, keep=True)
    held = [database.duly.claim(batch) for _ in range(plan.beats // batch)]
    updates, hot = database.updates()
    with database.writing() as written:
        for _ in range(rounds):
            for jobs in held:
                database.duly.extend(jobs)
    updates_then, hot_then = database.updates()
    share = (hot_then - hot) / (updates_then - updates)
    yield alone("postgres", f"HOT share of {updates_then - updates} beats", "share", [share], HOT, short="HOT")
    yield alone("postgres", "WAL of a beat", "B/beat", [written[0] / (updates_then - updates)])


def growth(home: SQLiteHome | PostgresHome, plan: Plan) -> Iterator[Figure]:
    """A claim of 100 beside a large table and beside a small one, in turns."""
    small, large = home.new_database(), home.new_database()
    try:
        for database in (small, large):
            database.empty()
            database.fill(database.duly.table, SMALL, keep=True)
            database.settle()
        rows = SMALL
        for size in plan.sizes:
            plan.say(f"{home.store}: filling to {size:,} rows")
            large.fill(large.duly.table, size - rows, keep=True)
            large.settle()
            rows = size
            yield from at_size(small, large, f"{size:,} waiting", plan)
        if plan.finished:
            plan.say(f"{home.store}: filling to {plan.finished:,} finished rows")
            large.fill_done(plan.finished)
            large.settle()
            yield from at_size(small, large, f"{rows:,} waiting, {plan.finished:,} finished", plan)
    finally:
        small.close()
        large.close()


def at_size(small: Database, large: Database, size: str, plan: Plan) -> Iterator[Figure]:
    plan.say(f"{large.store}: claims at {size}")
    claims: dict[str, list[float]] = {"small": [], "large": []}
    whole_cycles: dict[str, list[float]] = {"small": [], "large": []}
    for number in range(WARM_UP + plan.cycles):
        for name, database in (("small", small), ("large", large)):
            claimed, finished = one_cycle(database)
            if number >= WARM_UP:
                claims[name].append(claimed * 1e3)
                whole_cycles[name].append((claimed + finished) * 1e3)
    for what, samples in (("claim of 100", claims), ("claim+finish of 100", whole_cycles)):
        for share, label in ((0.5, "p50"), (0.99, "p99")):
            taken = {"duly": [percentile(samples["large"], share)], "at 1 k": [percentile(samples["small"], share)]}
            judged = what == "claim of 100" and label == "p50"
            yield compared(
                large.store,
                f"{what} at {size}, {label}",
                "ms",
                taken,
                GROWTH if judged else None,
                part="h",
                keep="kept",
                short=f"claim at {size}" if judged else "",
            )


def one_cycle(database: Database) -> tuple[float, float]:
    """Claim and finish a hundred, each timed, then put a hundred in their place."""
    begun = time.perf_counter()
    jobs = database.duly.claim(100)
    claimed = time.perf_counter()
    database.duly.finish(jobs, keep=True)
    finished = time.perf_counter()
    database.fill(database.duly.table, 100, keep=True)
    return claimed - begun, finished - claimed


def in_turns(lanes: Sequence[Lane], work: Callable[[Lane], float], rounds: int) -> dict[Lane, float]:
    """Have each lane work a little in every round, in an order drawn anew, and add up the seconds of each.

    What disturbs the machine, or what one leaves to be written behind its back, then falls on all alike.
    """
    seconds = dict.fromkeys(lanes, 0.0)
    order = list(lanes)
    for _ in range(rounds):
        ORDER.shuffle(order)
        for lane in order:
            seconds[lane] += work(lane)
    return seconds


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
