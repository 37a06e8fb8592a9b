"""P12: every due time once: by the rules of every zone, after any downtime, and whoever else fires and is killed."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any
from zoneinfo import available_timezones

from duly import Duly
from duly.app import schedule_options
from duly.rules import days, timing
from duly.store import ops
from duly.store import schedules as store
from duly.store.postgres.schema import bring_up_to_date
from duly.testing import frozen
from duly.worker.upkeep.fire import Fire
from tests import schedule_judge
from tests.proof import breaks
from tests.proof.breaks import BREAKS
from tests.proof.checker import Findings, judge
from tests.proof.fires import FIRES, Fired, ask, at_rate, unexplained
from tests.proof.fleet import Fleet, fleet, producer
from tests.proof.ledger import records
from tests.proof.table import Figure, Row, Setting
from tests.servers.postgres import PostgresServer

MINUTE_MS, HOUR_MS = 60_000, 3_600_000


@dataclass(frozen=True)
class Part:
    """What one part of the row came to."""

    text: str
    wrong: list[str]
    numbers: dict[str, Any]


def run(setting: Setting) -> Figure:
    """Go through the zones, the downtimes and the races; without a defence, through what it concerns."""
    parts = {"p12:gap": (zones,), "p12:guard": (races,)}.get(setting.broken or "", (zones, downtimes, races))
    found = [part(setting) for part in parts]
    wrong = [each for part in found for each in part.wrong]
    text = "; ".join(part.text for part in found) + (f"; first: {wrong[0]}" if wrong else "")
    numbers = {name: number for part in found for name, number in part.numbers.items()}
    return Figure(text, not wrong, numbers, f"python -m tests.proof --only P12 --seed {setting.seed}")


# Zones

FIRST, AFTER = datetime(2024, 1, 1), datetime(2031, 1, 1)
DAYS = (AFTER - FIRST).days
AROUND = 26 * 60  # minutes that are looked at before and after a change of the clock
ONCE_A_DAY = ("30 2 * * *", "0 0 * * *", "59 23 * * *")
EXPRESSIONS = (
    *ONCE_A_DAY, "0 3 * * *", "15 1,2,3 * * *", "0,30 0-4 * * *", "45 2 * * sun", "0 2 29 3 *", "30 1 * oct,nov *",
    "0 9 * * mon-fri", "0 0 1 * *", "5/10 2 * * *", "30 0-23 * * *", "0 12 1,15 * fri",
    "* * * * *", "*/15 * * * *", "0 * * * *", "*/20 2 * * *", "30 */2 * * *", "7 * * 3,10,11 sun",
)  # fmt: skip
ZONES_SHORT = 30


def zones(setting: Setting) -> Part:
    """Compare the rules with the judge around every change of a zone's clock."""
    timing._almanac.cache_clear()
    names = sorted(available_timezones() - {"localtime", "posixrules"})
    chosen = names if setting.full else random.Random(f"zones {setting.seed}").sample(names, ZONES_SHORT)
    wrong: list[str] = []
    changes = 0
    for zone in chosen:
        at = schedule_judge.changes(zone, FIRST, AFTER)
        changes += len(at)
        for change in at or [random.Random(zone).randrange(*_span())]:
            wrong += _around(zone, change)
        wrong += _once_a_day(zone)
        if wrong and setting.broken:
            break
    timing._almanac.cache_clear()
    text = f"{len(chosen)} zones, {changes:,} changes, {len(EXPRESSIONS)} expressions: {len(wrong)} differ"
    return Part(text, wrong, {"zones": len(chosen), "changes": changes, "differ": len(wrong)})


def _span() -> tuple[int, int]:
    return tuple(int(at.replace(tzinfo=UTC).timestamp()) // 60 for at in (FIRST, AFTER))  # type: ignore[return-value]


def _around(zone: str, change: int) -> Iterator[str]:
    table = schedule_judge.minutes(zone, change - AROUND, change + AROUND)
    for expression in EXPRESSIONS:
        expected = schedule_judge.due(expression, table)
        if (got := _due(expression, zone, change - AROUND, change + AROUND)) != expected:
            differ = sorted(set(got) ^ set(expected)) or got
            yield f"{expression} in {zone} at {datetime.fromtimestamp(differ[0] / 1000, UTC):%Y-%m-%d %H:%M} UTC"


def _due(expression: str, zone: str, begin: int, end: int) -> list[int]:
    """Give the due times between two minutes of UTC, as the product says them."""
    after = timing.occurrences(timing.timing(expression, tz=zone), begin * MINUTE_MS - 1)
    return list(takewhile(lambda at: at < end * MINUTE_MS, after))


def _once_a_day(zone: str) -> Iterator[str]:
    """See that a fixed time comes once on each local day, whatever the clock does."""
    begin, end = (schedule_judge._minute(at) for at in (FIRST, AFTER))
    begin, end = begin - schedule_judge._offset(zone, begin), end - schedule_judge._offset(zone, end)
    for expression in ONCE_A_DAY:
        if (count := len(_due(expression, zone, begin, end))) != DAYS:
            yield f"{expression} in {zone} comes {count} times on {DAYS} days"


# Downtimes

NOON = datetime(2026, 3, 27, 12, tzinfo=UTC)  # on the next Sunday the clock is set in Europe
BEGIN_MS = int(NOON.timestamp()) * 1000
WHEN = (
    ("*/30 * * * *", "Europe/Vienna"), ("30 2 * * *", "Europe/Vienna"), ("0 * * * *", "Asia/Kolkata"),
    ("0 9 * * mon-fri", "America/New_York"), ("17m", "UTC"), ("5h", "UTC"),
)  # fmt: skip
GRACES = (None, 3 * HOUR_MS)
EVERY_MS = {"17m": 17 * MINUTE_MS, "5h": 5 * HOUR_MS}
LONGEST = 48 * 60


@dataclass(frozen=True)
class Promise:
    """A schedule, and what it promises after a downtime."""

    name: str
    when: str
    tz: str
    catchup: str
    grace_ms: int | None

    def dues(self, since_ms: int, now_ms: int) -> list[int]:
        """Count the due times of a downtime, without the product."""
        if every_ms := EVERY_MS.get(self.when):
            first = BEGIN_MS + ((since_ms - BEGIN_MS) // every_ms + 1) * every_ms
            return list(range(first, now_ms + 1, every_ms))
        return schedule_judge.due(self.when, _table(self.tz, since_ms // MINUTE_MS + 1, now_ms // MINUTE_MS + 1))

    def runs(self, dues: Sequence[int], now_ms: int) -> list[tuple[int, int]]:
        """Say which due times are run, and for how many each stands."""
        if self.catchup == "all":
            return [(at, 0) for at in dues if not self._late(at, now_ms)]
        if not dues or self._late(dues[-1], now_ms):
            return []
        return [(dues[-1], len(dues) if self.catchup == "last" and len(dues) > 1 else 0)]

    def _late(self, at: int, now_ms: int) -> bool:
        return self.grace_ms is not None and at < now_ms - self.grace_ms


_table = lru_cache(maxsize=8)(schedule_judge.minutes)
PROMISES = (
    Promise("minutely", "* * * * *", "UTC", "all", None),  # more than are fired at once
    *(
        Promise(f"{when} {tz} {catchup} {grace_ms}", when, tz, catchup, grace_ms)
        for when, tz in WHEN
        for catchup in ("skip", "last", "all")
        for grace_ms in GRACES
    ),
)


def downtimes(setting: Setting) -> Part:
    """Let nobody fire for up to 48 hours, time and again, and count what comes after it."""
    chance = random.Random(f"downtimes {setting.seed}")
    spans = [0, *(chance.randrange(1, LONGEST) for _ in range(setting.pick(4, 60))), LONGEST]
    wrong: list[str] = []
    runs = 0
    with PostgresServer() as server:
        url = server.new_database()
        bring_up_to_date(url)
        for where in (str(setting.folder / "downtimes.db"), url):
            count, found = _down(where, spans)
            runs, wrong = runs + count, wrong + found
    text = f"{2 * len(spans)} downtimes of {len(PROMISES)} schedules, {runs:,} runs: {len(wrong)} not as promised"
    return Part(text, wrong, {"downtimes": 2 * len(spans), "runs": runs, "not as promised": len(wrong)})


def _down(url: str, spans: Sequence[int]) -> tuple[int, list[str]]:
    app = Duly(url)

    @app.task
    async def note() -> None: ...

    wrong: list[str] = []
    count = 0
    with closing(app), frozen(app, NOON) as clock:
        for one in PROMISES:
            grace = None if one.grace_ms is None else timedelta(milliseconds=one.grace_ms)
            app.schedules.create(one.name, note, one.when, tz=one.tz, catchup=one.catchup, grace=grace)
        for span in spans:
            since_ms = clock.ms
            clock.advance(timedelta(minutes=span))
            asyncio.run(_fire_all(app, span))
            runs = _taken(url)
            wrong += _broken_promises(since_ms, clock.ms, runs)
            count += sum(map(len, runs.values()))
        wrong += [each for one in PROMISES for each in _gaps(url, one, clock.ms)]
    return count, wrong


async def _fire_all(app: Duly, span: int) -> None:
    """Fire what is due, as a worker does: at most a thousand runs of one schedule at a time."""
    worker = app.worker()
    scheduler = Fire(worker.shared, worker.wakeups)
    for _ in range(2 + 2 * span // 1000):
        await scheduler.all_due()


def _taken(url: str) -> dict[str, list[tuple[int, int]]]:
    """Take away the jobs that were fired; gives for which due time each is, and for how many it stands."""
    runs: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for name, text in ask(url, "delete from duly_job returning schedule, envelope"):
        envelope = json.loads(text)
        runs[name].append((envelope["due_at"], (envelope.get("missed") or {}).get("count", 0)))
    return runs


def _broken_promises(since_ms: int, now_ms: int, runs: Mapping[str, list[tuple[int, int]]]) -> Iterator[str]:
    """Compare what was fired after a downtime with what is promised."""
    for one in PROMISES:
        expected = one.runs(one.dues(since_ms, now_ms), now_ms)
        if (fired := sorted(runs.get(one.name, ()))) != expected:
            yield f"{one.name} from {since_ms} to {now_ms}: {len(fired)} runs {fired[:3]}, not {expected[:3]}"


def _gaps(url: str, one: Promise, now_ms: int) -> Iterator[str]:
    """See that the record has every due time once, in a line of its own or in a run of misses."""
    dues, place = one.dues(BEGIN_MS, now_ms), 0
    for line in _record(url, one.name):
        covered = dues[place : place + line.times]
        if not covered or (covered[0], covered[-1], len(covered)) != (line.due, line.last, line.times):
            yield f"{one.name}: the record says {line}, due are {covered[:1]} to {covered[-1:]}"
            return
        place += line.times
    if place != len(dues):
        yield f"{one.name}: {len(dues) - place} due times are not on record"


# Races

SCHEDULES = 240
SPANS_MS = (1000, 1500, 2000, 3000)
SCHEDULERS = 3
LEASE = "2s"
DRAIN_SECONDS = 30.0


def races(setting: Setting) -> Part:
    """Have three processes fire the same schedules, and kill them at random."""
    wanted = 500 if setting.broken else setting.pick(1_000, 10_000)
    with PostgresServer() as server:
        url = server.new_database()
        bring_up_to_date(url)
        made = [_race(setting, url, "postgres", wanted)]
    if not (setting.broken and made[0].wrong):
        made.append(_race(setting, str(setting.folder / "races.db"), "sqlite", wanted))
    return Part(
        "; ".join(one.text for one in made),
        [each for one in made for each in one.wrong],
        {name: number for one in made for name, number in one.numbers.items()},
    )


def _race(setting: Setting, url: str, kind: str, wanted: int) -> Part:
    folder = setting.folder / kind
    folder.mkdir()
    chance = random.Random(f"{kind} {setting.seed}")
    with fleet(url, folder, lease=LEASE) as schedulers:
        for _ in range(SCHEDULERS):
            schedulers.start(concurrency=20)
        schedulers.started(SCHEDULERS)
        with closing(producer(schedulers)) as app:
            firsts = _defined(app, chance)
        kills = _killed(schedulers, chance, wanted)
        with closing(producer(schedulers)) as app:
            for name in firsts:
                app.schedules.pause(name, by="the row", why="enough")
        empty = schedulers.wait(lambda: not ask(url, "select 1 from duly_job limit 1"), DRAIN_SECONDS)
    wrong = [] if empty else ["runs are left that nobody ends"]
    return _judged(schedulers, kind, kills, firsts, wrong)


def _defined(app: Duly, chance: random.Random) -> dict[str, tuple[int, int]]:
    """Define the schedules, all due at the same moments, so that each firing is a race.

    Gives when each is due for the first time, and how far its due times lie apart.
    """
    begin = (app.driver.run(ops.clock()) // 1000 + 1) * 1000
    made = []
    for number in range(SCHEDULES):
        catchup = chance.choice(("skip", "last", "all"))
        overlap = chance.choice(("allow", "allow", "skip", "queue"))
        every = timedelta(milliseconds=chance.choice(SPANS_MS))
        said = schedule_options.terms(every, "a schedule", {"catchup": catchup, "overlap": overlap})
        one = schedule_options.defined(f"s{number}", app.tasks["tick"], said)
        made.append(one.definition(revision=1, now=begin))
    app.driver.run(store.define(made))
    return {one.name: (one.next_at or 0, one.timing.interval_ms or 0) for one in made}


def _killed(schedulers: Fleet, chance: random.Random, wanted: int) -> int:
    """Kill and replace at random until enough was due."""
    kills, until = 0, time.monotonic() + 30 + wanted / 20
    while time.monotonic() < until:
        time.sleep(chance.uniform(0.2, 1.0))
        if len(there := schedulers.at_work()) == SCHEDULERS:
            # Once all of them, so that something is missed.
            for one in there if kills == 2 else [chance.choice(there)]:
                schedulers.kill(one)
                schedulers.start(concurrency=20)
                kills += 1
        [[count]] = ask(schedulers.url, "select count(*) from duly_fire where outcome = 'fired'")
        if count >= wanted:
            break
    return kills


def _judged(schedulers: Fleet, kind: str, kills: int, firsts: dict[str, tuple[int, int]], wrong: list[str]) -> Part:
    record = {name: _record(schedulers.url, name) for name in firsts}
    lines = [line for fires in record.values() for line in fires]
    for name, (first, every_ms) in firsts.items():
        [[next_at]] = ask(schedulers.url, "select next_at from duly_schedule where name = ?", name)
        following = Fired(next_at, None, 0, None)
        wrong += [f"{name}: {each}" for each in unexplained([*record[name], following], first, at_rate(every_ms))]
    fired = {fire.job: (name, fire.due) for name, fires in record.items() for fire in fires if fire.job}
    doubled = list(_doubled(schedulers.path, fired))
    found = _found(schedulers, fired)
    wrong += doubled + ([] if found.valid else [str(found)])
    occurrences, misses = sum(line.times for line in lines), sum(line.times for line in lines if line.job is None)
    text = (
        f"{kind}: {occurrences:,} due, {len(fired):,} fired and {misses:,} recorded as missed, {kills} kills, "
        f"{len(doubled)} doubled, {len(wrong) - len(doubled)} unexplained"
    )
    numbers = {"due": occurrences, "fired": len(fired), "kills": kills, "wrong": len(wrong)}
    return Part(text, wrong, {f"{kind} {name}": number for name, number in numbers.items()})


def _record(url: str, name: str) -> list[Fired]:
    return [Fired(*row) for row in ask(url, f"{FIRES} order by due_at", name)]


def _doubled(path: Path, fired: dict[str, tuple[str, int]]) -> Iterator[str]:
    """List the runs that no fire tells of, and the attempts that began twice, as handlers wrote it down."""
    attempts: Counter[tuple[str, int]] = Counter()
    for line in records(path):
        if line["what"] == "begun":
            attempts[line["id"], line["attempt"]] += 1
            if fired.get(line["id"]) != (line["schedule"], line["due_at"]):
                yield f"{line['schedule']} ran for {line['due_at']} as {line['id']}, which its record does not know"
    yield from (
        f"attempt {attempt} of {job} began {count} times" for (job, attempt), count in attempts.items() if count > 1
    )


def _found(schedulers: Fleet, fired: Iterable[str]) -> Findings:
    """Have the judge of all rows look at the runs: whoever is on record as fired was acknowledged."""
    history = schedulers.history()
    history.offered = history.acknowledged = set(fired)
    return judge(history)


# Without these defences


def _without_gap(zone: Any, begin: int) -> list[tuple[int, int, int, int]]:
    """Forget what the clock left out."""
    return [(since, until, offset, offset) for since, until, _, offset in _stretches(zone, begin)]


_stretches = days._stretches
breaks.python("p12:gap", days, "_stretches", _without_gap)

breaks.sql(
    "p12:guard on sqlite",
    ("fire_jobs", "and revision = run.value ->> 'revision'", ""),
    ("fire_jobs", "where not exists (", "where true or not exists ("),
    ("fire_rows", "and revision = row.value ->> 'revision'", ""),
    ("fire_advance", "and revision = fire.value ->> 'revision'", ""),
    dialects=("sqlite",),
)
breaks.sql(
    "p12:guard on postgres",
    ("fire_jobs", "and duly_schedule.revision = run.revision", ""),
    ("fire_jobs", "where not exists (", "where true or not exists ("),
    ("fire_rows", "and duly_schedule.revision = row.revision", ""),
    ("fire_advance", "and duly_schedule.revision = fire.revision", ""),
    dialects=("postgres",),
)


def _both() -> Callable[[], None]:
    first, second = BREAKS["p12:guard on sqlite"](), BREAKS["p12:guard on postgres"]()

    def undo() -> None:
        second()
        first()

    return undo


BREAKS["p12:guard"] = _both

ROW = Row(
    "P12",
    "schedules: all zones, downtimes of up to 48 h, three schedulers racing and killed",
    "every due time once, fired or recorded as missed; fixed times once each local day, the others by elapsed time",
    run,
    controls=("p12:guard", "p12:gap"),
    takes=1.0,
    control_takes=1.0,
)
