"""P4: every write of a worker or a handler, with every token that does not hold the job: refused, and nothing changed.

A situation leaves somebody with a job and a token that is not, or no longer, the job's. From there each write is made
on each store, and all rows of all tables are compared. With the right token each write must be accepted, or the rest
would say nothing.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import psycopg
from msgspec import structs

from duly.app.context import SyncCtx
from duly.app.lease import Lease
from duly.errors import LeaseLost
from duly.model import PARKED, Change, Claimed, Failure, NewJob, State, Terms, Verdict
from duly.rules.keys import id_in
from duly.store import batches, ops
from duly.store.op import Finish, Held
from duly.store.postgres.schema import bring_up_to_date
from tests.contract.stores import D1Store, PostgresStore, SQLiteStore, Store, database_of, new_id
from tests.proof import breaks
from tests.proof.table import Figure, Row, Setting
from tests.servers.postgres import PostgresServer

LEASE = 30_000
NO = Failure("builtins.ValueError", "no", "a traceback")
CHANGES = {
    "finish: success": Change(State.SUCCEEDED),
    "finish: success with a result": Change(State.SUCCEEDED, result='"stale"'),
    "finish: partial": Change(State.PARTIAL, reason="half"),
    "finish: retry": Change(State.SCHEDULED, after_ms=1000, error=NO),
    "finish: dead": Change(State.DEAD, error=NO),
    "finish: crash": Change(State.READY, error=NO, crashed=True),
    "finish: cancelled": Change(State.CANCELLED, reason="no"),
    "finish: waiting": Change(State.WAITING, give_back_attempt=True, reason="a person"),
    "finish: parked": Change(State.WAITING, give_back_attempt=True, reason=f"{PARKED}too old"),
    "snooze": Change(State.SCHEDULED, after_ms=1000, give_back_attempt=True),
    "release": Change(State.READY, give_back_attempt=True),
}
BATCH, FILLED = new_id(), new_id()  # on every store: one to which anybody adds, one that is filled under a key
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "with a key": {"key": "k"}, "in a batch": {"batch_id": BATCH}, "keep=0": {"keep_ms": 0}
}  # fmt: skip

Rows: TypeAlias = dict[str, list[tuple[Any, ...]]]


class Stale(NamedTuple):
    """A job as somebody knows it who does not hold it, and what a finish of his is told."""

    job: Claimed
    verdict: Verdict


Situation: TypeAlias = Callable[[Store, dict[str, Any], random.Random], Stale]
# Makes a write, and says whether it was accepted.
Write: TypeAlias = Callable[[Store, Claimed, Verdict], bool]


@dataclass
class Tally:
    """What came of the writes."""

    cells: int = 0
    refused: int = 0
    rows_changed: int = 0
    faults: list[str] = field(default_factory=list)


def run(setting: Setting) -> Figure:
    """Fill the matrix on every store, in an order of the seed's."""
    chance = random.Random(setting.seed)
    tallies: dict[str, Tally] = {}
    for turn in range(setting.pick(1, 3)):
        for store in _stores(setting.folder, turn):
            _fill(setting, store, chance, tallies.setdefault(store.kind, Tally()))
    numbers = {
        kind: {"writes": tally.cells, "refused": tally.refused, "rows changed": tally.rows_changed}
        for kind, tally in tallies.items()
    }
    faults = [f"{kind}: {fault}" for kind, tally in tallies.items() for fault in tally.faults]
    cells, refused, changed = (
        sum(one[name] for one in numbers.values()) for name in ("writes", "refused", "rows changed")
    )
    text = f"{refused} of {cells} stale writes refused on {len(numbers)} stores, {changed} rows changed"
    return Figure(text + (f"; first: {faults[0]}" if faults else ""), not faults, numbers)


def _stores(folder: Path, turn: int) -> Iterator[Store]:
    with closing(SQLiteStore(folder / f"sqlite{turn}.db")) as sqlite:
        yield sqlite
    with closing(D1Store(folder / f"d1{turn}.db")) as d1:
        yield d1
    with ExitStack() as stack:
        server = stack.enter_context(PostgresServer())
        url = server.new_database()
        bring_up_to_date(url)
        yield stack.enter_context(closing(PostgresStore(url)))


def _fill(setting: Setting, store: Store, chance: random.Random, tally: Tally) -> None:
    for batch_id, key in ((BATCH, None), (FILLED, "k")):
        store.run(batches.open_batch(batch_id, "b", key=key, now=store.now))
    _right(store, tally)
    _matrix(setting, store, chance, tally)
    if not (setting.broken and tally.faults):
        _among_others(store, chance, tally)


def _right(store: Store, tally: Tally) -> None:
    """See that each write is accepted from the holder, and changes something."""
    for name, write in _writes(store).items():
        job = _claimed(store, {})
        store.now += 1000
        before = store.snapshot()
        if not write(store, job, Verdict.RECORDED) or store.snapshot() == before:
            tally.faults.append(f"{name} with the right token was not accepted")


def _matrix(setting: Setting, store: Store, chance: random.Random, tally: Tally) -> None:
    for name, situation in SITUATIONS.items():
        # A short run has time for one more of each situation, as the seed says.
        beside = chance.choice(["with a key", "in a batch"])
        for variant in VARIANTS if setting.full else ("plain", beside):
            stale = _brought_about(situation, store, _terms(variant), chance)
            store.now += 1000  # so that what is written differs from what is there
            writes = list(_writes(store).items())
            chance.shuffle(writes)
            before = store.snapshot()
            for write_name, write in writes:
                before = _cell(store, f"{write_name}, {name} ({variant})", write, stale, tally, before)
            if tally.faults and setting.broken:
                return  # it is red, as it must be


def _terms(variant: str) -> dict[str, Any]:
    terms = dict(VARIANTS[variant])
    if "key" in terms:
        terms["key"] = new_id()
    return terms


def _brought_about(situation: Situation, store: Store, terms: dict[str, Any], chance: random.Random) -> Stale:
    """Bring a situation about; on D1 with all answers, since nobody can ask again for a job that leaves no trace."""
    if not isinstance(store, D1Store):
        return situation(store, terms, chance)
    lose, store.database.lose = store.database.lose, None
    try:
        return situation(store, terms, chance)
    finally:
        store.lose(lose)


def _cell(store: Store, name: str, write: Write, stale: Stale, tally: Tally, before: Rows) -> Rows:
    """Make one write, and give the rows as they are after it."""
    accepted = write(store, stale.job, stale.verdict)
    after = store.snapshot()
    changed = _changed(before, after)
    tally.cells += 1
    tally.refused += not accepted
    tally.rows_changed += changed
    if accepted or changed:
        tally.faults.append(f"{name}: {'accepted' if accepted else 'refused'}, {changed} rows changed")
    return after


def _changed(before: Rows, after: Rows) -> int:
    """Count the rows that were added, taken away or written anew."""
    pairs = ((set(map(repr, before[table])), set(map(repr, after[table]))) for table in before)
    return sum(max(len(was - now), len(now - was)) for was, now in pairs)


def _among_others(store: Store, chance: random.Random, tally: Tally) -> None:
    """Finish and extend good jobs in one list with a stale one: only they change."""
    for name, situation in SITUATIONS.items():
        stale = _brought_about(situation, store, {}, chance)
        good = [_claimed(store, {}) for _ in range(3)]
        jobs = [*good, stale.job]
        chance.shuffle(jobs)
        store.now += 1000
        before = _about(store, stale.job.id)
        extended = store.run(ops.extend([Held(job.id, job.token) for job in jobs], now=store.now))
        finishes = [Finish(job, chance.choice(list(CHANGES.values()))) for job in jobs]
        verdicts = store.run(ops.finish(finishes, now=store.now))
        changed = _changed(before, _about(store, stale.job.id))
        tally.cells += 2
        tally.refused += (stale.job.id not in extended) + (verdicts[stale.job.id] == stale.verdict)
        tally.rows_changed += changed
        if changed or set(extended) != {job.id for job in good} or verdicts[stale.job.id] != stale.verdict:
            tally.faults.append(f"{name}, in a list with others: {verdicts[stale.job.id]}, {changed} rows changed")
        # What was lost on the way and asked for again answers `already`.
        if not {verdicts[job.id] for job in good} <= {Verdict.RECORDED, Verdict.ALREADY, Verdict.GONE}:
            tally.faults.append(f"{name}: a good job beside it was not finished")


def _about(store: Store, job_id: str) -> Rows:
    """Give all rows that name a job."""
    return {table: [row for row in rows if job_id in map(str, row)] for table, rows in store.snapshot().items()}


# What is written


def _writes(store: Store) -> dict[str, Write]:
    writes: dict[str, Write] = {name: _finishing(change) for name, change in CHANGES.items()}
    writes |= {
        "extend": _extend,
        "progress": _progress,
        "heartbeat": _heartbeat,
        "enqueue by the handler": _child(None),
        "keyed enqueue by the handler": _child("child"),
        "add to a batch by the handler": _joining(None),
        "keyed add to a batch by the handler": _joining("child"),
        "fill of a batch by the handler": _filling,
    }
    if isinstance(store, SQLiteStore | PostgresStore):  # D1 has no transaction of the caller's
        writes["ctx.commit"] = _commit
    return writes


def _finishing(change: Change) -> Write:
    def write(store: Store, job: Claimed, verdict: Verdict) -> bool:
        told = store.run(ops.finish([Finish(job, change)], now=store.now))[job.id]
        # Asked again after a lost answer, it finds its own: that is accepted, too.
        if verdict is Verdict.RECORDED:
            return told in (Verdict.RECORDED, Verdict.ALREADY, Verdict.GONE)
        return bool(told != verdict)

    return write


def _extend(store: Store, job: Claimed, verdict: Verdict) -> bool:
    return job.id in store.run(ops.extend([Held(job.id, job.token)], now=store.now))


def _progress(store: Store, job: Claimed, verdict: Verdict) -> bool:
    return bool(store.run(ops.progress(Held(job.id, job.token), 50.0, "half")))


def _heartbeat(store: Store, job: Claimed, verdict: Verdict) -> bool:
    return bool(store.run(ops.heartbeat(Held(job.id, job.token), now=store.now)))


def _child(key: str | None) -> Write:
    def write(store: Store, job: Claimed, verdict: Verdict) -> bool:
        child = NewJob(new_id(), '{"n":2}', key=key and new_id())
        terms = Terms(task="work", queue="children")
        return bool(store.run(ops.enqueue(terms, [child], parent=Held(job.id, job.token), now=store.now)))

    return write


def _joining(key: str | None) -> Write:
    def write(store: Store, job: Claimed, verdict: Verdict) -> bool:
        child = NewJob(new_id(), '{"n":2}', key=key and new_id())
        terms = Terms(task="work", queue="children", batch_id=BATCH)
        return not store.run(batches.add(terms, [child], parent=Held(job.id, job.token), now=store.now)).lost

    return write


def _filling(store: Store, job: Claimed, verdict: Verdict) -> bool:
    """Add at the place where a batch with a key is filled."""
    [(filled,)] = store.query("select filled from duly_batch where id = ?", FILLED)
    terms = Terms(task="work", queue="children", batch_id=FILLED)
    child = NewJob(id_in(FILLED, filled), '{"n":2}')
    op = batches.add(terms, [child], filling=filled, parent=Held(job.id, job.token), now=store.now)
    return not store.run(op).lost


def _commit(store: Store, job: Claimed, verdict: Verdict) -> bool:
    """Stage a finish in a transaction of the caller's, who commits whatever he is told."""
    ctx = SyncCtx(Lease(job, cast("Any", None), database_of(store), 0.0))
    conn = _connection(store)
    try:
        ctx.commit(conn, result="stale")
    except LeaseLost:
        return False
    finally:
        conn.commit()
        conn.close()
    # Finished before by this very token, it is told so by silence.
    return verdict is not Verdict.ALREADY


def _connection(store: Store) -> Any:
    if isinstance(store, PostgresStore):
        return psycopg.connect(store.url)
    assert isinstance(store, SQLiteStore)
    return sqlite3.connect(store.path, timeout=5)


# Who does not hold the job


def _claimed(store: Store, terms: dict[str, Any], **more: Any) -> Claimed:
    """Enqueue a job in a queue of its own, and claim it."""
    terms = {"queue": new_id(), **terms}
    key = terms.pop("key", None)
    if "batch_id" in terms:
        store.run(batches.add(Terms(task="work", **terms), [NewJob(new_id(), '{"n":1}')], now=store.now))
    elif key is None:
        store.enqueue(1, **terms)
    else:
        store.enqueue_key(key, **terms)
    return _claim(store, terms["queue"], **more)


def _claim(store: Store, queue: str, **more: Any) -> Claimed:
    [job] = store.claim(1, queue=queue, **more)
    return job


def _lose(store: Store, job: Claimed) -> None:
    """Let the lease of a job end, and rescue it."""
    store.now += 2 * LEASE
    seen = [one for one in store.run(ops.expired_leases(now=store.now)) if one.id == job.id]
    store.run(ops.rescue(seen, now=store.now))


def _older(store: Store, terms: dict[str, Any], chance: random.Random) -> Stale:
    job = _claimed(store, terms)
    store.run(ops.release([job], now=store.now))
    _claim(store, job.queue)
    return Stale(job, Verdict.ALREADY)  # it did give the job back


def _older_after_two(store: Store, terms: dict[str, Any], chance: random.Random) -> Stale:
    job = _claimed(store, terms)
    store.run(ops.release([job], now=store.now))
    store.run(ops.release([_claim(store, job.queue)], now=store.now))
    _claim(store, job.queue)
    return Stale(job, Verdict.LOST)


def _newer(store: Store, terms: dict[str, Any], chance: random.Random) -> Stale:
    job = _claimed(store, terms)
    return Stale(structs.replace(job, token=job.token + chance.randrange(10**6, 10**9)), Verdict.LOST)


def _other_job(store: Store, terms: dict[str, Any], chance: random.Random) -> Stale:
    job, other = _claimed(store, terms), _claimed(store, {})
    return Stale(structs.replace(job, token=other.token), Verdict.LOST)


def _never_claimed(store: Store, terms: dict[str, Any], chance: random.Random) -> Stale:
    job = _claimed(store, terms)
    ready = _claimed(store, {})
    store.run(ops.release([ready], now=store.now))
    return Stale(structs.replace(job, id=ready.id), Verdict.LOST)


def _finished(store: Store, terms: dict[str, Any], chance: random.Random) -> Stale:
    job = _claimed(store, terms)
    store.succeed(job)
    return Stale(job, Verdict.GONE if job.keep_ms == 0 else Verdict.ALREADY)


def _finished_by_another(store: Store, terms: dict[str, Any], chance: random.Random) -> Stale:
    job = _claimed(store, terms)
    _lose(store, job)
    store.succeed(_claim(store, job.queue, alone=True))
    return Stale(job, Verdict.GONE if job.keep_ms == 0 else Verdict.LOST)


def _dead(store: Store, terms: dict[str, Any], chance: random.Random) -> Stale:
    job = _claimed(store, terms)
    store.kill(job)
    return Stale(job, Verdict.ALREADY)


def _deleted(store: Store, terms: dict[str, Any], chance: random.Random) -> Stale:
    job = _claimed(store, terms)
    store.kill(job)
    store.run(ops.purge([job.id], by="p", why="away", now=store.now))
    return Stale(job, Verdict.GONE)


def _never_was(store: Store, terms: dict[str, Any], chance: random.Random) -> Stale:
    return Stale(structs.replace(_claimed(store, terms), id=new_id()), Verdict.GONE)


def _rescued(store: Store, terms: dict[str, Any], chance: random.Random) -> Stale:
    job = _claimed(store, terms)
    _lose(store, job)
    return Stale(job, Verdict.LOST)


def _rescued_and_running(store: Store, terms: dict[str, Any], chance: random.Random) -> Stale:
    job = _claimed(store, terms)
    _lose(store, job)
    _claim(store, job.queue, alone=True)
    return Stale(job, Verdict.LOST)


def _rescued_dead(store: Store, terms: dict[str, Any], chance: random.Random) -> Stale:
    job = _claimed(store, {**terms, "max_attempts": 1})
    _lose(store, job)
    return Stale(job, Verdict.LOST)


def _put_off_and_cancelled(store: Store, terms: dict[str, Any], chance: random.Random) -> Stale:
    job = _claimed(store, terms)
    store.retry(job)
    store.run(ops.cancel([job.id], now=store.now))
    return Stale(job, Verdict.ALREADY)


def _stopped_by_a_hold(store: Store, terms: dict[str, Any], chance: random.Random) -> Stale:
    job = _claimed(store, terms)
    store.run(ops.hold(by="p", why=new_id(), now=store.now))
    return Stale(job, Verdict.LOST)


SITUATIONS: dict[str, Situation] = {
    "an older token": _older,
    "a token older by two": _older_after_two,
    "a newer token": _newer,
    "the token of another job": _other_job,
    "a token and a job that is ready": _never_claimed,
    "a job that has succeeded": _finished,
    "a job that another has finished": _finished_by_another,
    "a job that is dead": _dead,
    "a job that was deleted": _deleted,
    "a job that never was": _never_was,
    "a job that was rescued": _rescued,
    "a job that was rescued and runs": _rescued_and_running,
    "a job that was rescued dead": _rescued_dead,
    "a job that was cancelled after a retry": _put_off_and_cancelled,
    "a job that was held": _stopped_by_a_hold,
}


# Without these the row must be red. The dialects compare the token in words of their own.
def _without(name: str, sqlite: tuple[tuple[str, str, str], ...], postgres: tuple[tuple[str, str, str], ...]) -> str:
    breaks.sql(f"{name}:sqlite", *sqlite, dialects=("sqlite",))
    breaks.sql(f"{name}:postgres", *postgres, dialects=("postgres",))

    def apply() -> Callable[[], None]:
        undo = [breaks.BREAKS[f"{name}:{dialect}"]() for dialect in ("sqlite", "postgres")]

        def undo_both() -> None:
            for one in undo:
                one()

        return undo_both

    breaks.BREAKS[name] = apply
    return name


PLAIN = "token = cast(held.key as integer) and state = 'running'"
ON_POSTGRES = " and token is not distinct from :{}::bigint"
CONTROLS = (
    _without(
        "finish_token",
        (
            ("finish", " and token = held_token", ""),
            ("finish_plain", f"{PLAIN} and keep_ms > 0", "state = 'running' and keep_ms > 0"),
            ("finish_plain", f"{PLAIN}\n          and", "state = 'running'\n          and"),
        ),
        (
            ("finish", " and duly_job.token is not distinct from change.token", ""),
            ("finish_plain", " and duly_job.token is not distinct from input.token", ""),
        ),
    ),
    _without(
        "extend_token",
        (("extend", " and duly_job.token = held.token", ""),),
        (
            ("extend", " and duly_job.token is not distinct from held.token\n     where", "\n     where"),
            ("extend", " and duly_job.token is not distinct from held.token", ""),
        ),
    ),
    _without(
        "progress_token",
        (("progress", " and token = :token", ""),),
        (
            ("progress", ON_POSTGRES.format("token") + " and state = 'running'\n       for", " and true\n       for"),
            ("progress", ON_POSTGRES.format("token"), ""),
        ),
    ),
    _without(
        "parent_token",
        (("hold_parent", " and token = :parent_token", ""),),
        (("hold_parent", ON_POSTGRES.format("parent_token"), ""),),
    ),
)

ROW = Row(
    "P4",
    "stale-token matrix: every write of a worker or handler with every token that does not hold the job",
    "100 % refused, 0 rows changed",
    run,
    controls=CONTROLS,
    full_only=True,
    takes=1.0,
    control_takes=1.0,
)
