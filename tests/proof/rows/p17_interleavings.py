"""P17: every race of two to four sessions on PostgreSQL, statement by statement, with the planner forced four ways."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from duly import Duly
from duly.app.batches import Batch
from duly.model import (
    QUEUED,
    Catchup,
    Change,
    Claimed,
    Enqueued,
    Failure,
    NewJob,
    Overlap,
    Sighting,
    State,
    TaskLimits,
    Terms,
    Verdict,
)
from duly.rules.firing import Due
from duly.rules.firing import plan as planned
from duly.rules.keys import id_in
from duly.store import batches, lanes, ops, schedules
from duly.store.batches import Added
from duly.store.lanes import Walk
from duly.store.op import Finish, Held, Op
from duly.store.ops import Replay
from duly.store.postgres.schema import bring_up_to_date
from duly.store.sequence import Steps
from tests.contract.stores import NOW, PostgresStore, definition, new_id
from tests.proof import breaks
from tests.proof.enqueues import jobs_of
from tests.proof.interleaving import CALM, PLANS, Board, Orders, Outcome, Script, Sessions
from tests.proof.rows import p17_interleavings_jobs as _jobs  # noqa: F401
from tests.proof.rows import p17_interleavings_keys as _keys  # noqa: F401
from tests.proof.rows.p17_interleavings_race import RACES
from tests.proof.table import Figure, Row, Setting
from tests.servers.postgres import PostgresServer

Judge: TypeAlias = Callable[[Outcome], Iterable[str]]
Prepare: TypeAlias = Callable[[PostgresStore], tuple[Sequence[Script], Judge]]


class Prepared(NamedTuple):
    """A race whose setup makes scripts and judge."""

    prepare: Prepare
    may_be_late: bool = False


# A first try that comes after its own repetition is refused, and nobody hears of it: the answer was lost.
TRIED_AGAIN = (
    "keyed enqueue against its repetition",
    "enqueue in order against its repetition",
    "add against its repetition and seal",
)
LEASE = 30_000
LATE = NOW + LEASE + 1  # the leases that began at NOW have ended
NO = Failure("builtins.ValueError", "no", "a traceback")
SUCCESS = Change(State.SUCCEEDED, result='"done"')
RETRY = Change(State.SCHEDULED, after_ms=1000, error=NO)
DEAD = Change(State.DEAD, error=NO)


def race(name: str) -> Callable[[Prepare], Prepare]:
    """Add a race: it sets up the tables, and gives the scripts of its sessions and their judge."""

    def add(prepare: Prepare) -> Prepare:
        RACES[name] = Prepared(prepare, name in TRIED_AGAIN)
        return prepare

    return add


def run(setting: Setting) -> Figure:
    """Run the orders of every race, and count what came out otherwise than promised."""
    with PostgresServer(settings=CALM) as server:
        url = server.new_database()
        bring_up_to_date(url)
        return asyncio.run(_run(setting, url))


async def _run(setting: Setting, url: str) -> Figure:
    store, board = PostgresStore(url), Board(url)
    sessions = {plan: Sessions(url, plan) for plan in PLANS}
    numbers: dict[str, Any] = {}
    faults: list[str] = []
    unconcerned: set[str] = set()  # for which nothing is broken
    try:
        for one in sessions.values():
            await one.__aenter__()
        for name, turn in _turns(setting):
            if name in unconcerned:
                continue
            board.clear()
            scripts, judge = RACES[name].prepare(store)
            if setting.broken and not _concerns(setting.broken, scripts):
                unconcerned.add(name)
                continue
            board.save()
            numbers[name], found = await _race(setting, name, turn, (scripts, judge), sessions, board)
            faults += found
            if faults and setting.broken:
                break  # it is red, as it must be
    finally:
        for one in sessions.values():
            await one.__aexit__()
        board.close()
        store.close()
    return _figure(setting, numbers, faults)


def _turns(setting: Setting) -> Iterator[tuple[str, int]]:
    """List the races: once, or with a defence taken away those it may concern, again and again, in other orders."""
    called = CALLED.get(setting.broken or "", "")
    names = [name for name in RACES if called in name]
    return ((name, turn) for turn in range(TURNS_BROKEN if setting.broken else 1) for name in names)


def _concerns(control: str, scripts: Sequence[Script]) -> bool:
    section = CONTROLS[control][0]
    return control in CALLED or (_runs(scripts, section) and _runs(scripts, BESIDE.get(control, section)))


def _runs(scripts: Sequence[Script], section: str) -> bool:
    known = [op for script in scripts for made in script for op in (made if isinstance(made, tuple) else (made,))]
    return any(isinstance(op, Op) and section in op.sections for op in known)


async def _race(
    setting: Setting,
    name: str,
    turn: int,
    of: tuple[Sequence[Script], Judge],
    sessions: dict[str, Sessions],
    board: Board,
) -> tuple[dict[str, Any], list[str]]:
    scripts, judge = of
    played, whole, deadlocks = 0, 0, 0
    faults = []
    for plan, ring in sessions.items():
        orders = Orders(random.Random(f"{setting.seed} {turn} {name} {plan}"))
        for _ in range(ORDERS_SHORT if setting.broken else setting.pick(ORDERS_SHORT, ORDERS_FULL)):
            if orders.exhausted:
                break
            board.restore()
            outcome = await ring.play(scripts, orders)
            outcome.tables = board.look()
            played += 1
            deadlocks += sum(error.startswith("40P01") for error in outcome.errors)
            errors = [error for error in outcome.errors if not (RACES[name].may_be_late and TOO_LATE in error)]
            found = [*errors, *_unsound(outcome), *([] if errors else judge(outcome))]
            faults += [f"{name} ({plan}; order {''.join(map(str, outcome.order))}): {fault}" for fault in found]
            if played % TIDY_EVERY == 0:
                board.tidy()
        whole += orders.exhausted
    return {
        "orders": played,
        "all of them": whole == len(sessions),
        "deadlocks": deadlocks,
        "faults": len(faults),
    }, faults


TOO_LATE = 'violates unique constraint "duly_job_pkey"'
ORDERS_SHORT, ORDERS_FULL = 4, 300  # of each race with each plan
TURNS_BROKEN = 40  # at most: without `end_revision` one order in about 170 comes out wrong
TIDY_EVERY = 500


def _figure(setting: Setting, numbers: dict[str, Any], faults: list[str]) -> Figure:
    orders = sum(one["orders"] for one in numbers.values())
    deadlocks = sum(one["deadlocks"] for one in numbers.values())
    whole = sum(one["all of them"] for one in numbers.values())
    text = (
        f"{orders} orders of {len(numbers)} races (all there are in {whole}), {len(PLANS)} plans: "
        f"{deadlocks} deadlocks, {len(faults)} not as expected"
    )
    if faults:
        text += f"; first: {faults[0]}"
    repeat = f"python -m tests.proof --only P17 --seed {setting.seed}{' --full' if setting.full else ''}"
    return Figure(text, not faults, numbers, repeat)


def _unsound(outcome: Outcome) -> Iterator[str]:
    """Find what no order may leave behind, whatever raced."""
    live = {row["id"]: row for row in outcome.rows("job")}
    holders = {(row["task"], row["key"]): row for row in outcome.rows("key")}
    for row in outcome.rows("done"):
        if row["id"] in live:
            yield f"{row['id']} is live and has ended"
    for row in live.values():
        if row["finished_at"] is not None:
            yield f"{row['id']} has ended and was left among the live"
        if row["key"] is not None and holders.get((row["task"], row["key"]), {}).get("job_id") != row["id"]:
            yield f"{row['id']} is live and does not hold its key"
    for row in holders.values():
        if row["state"] == "live" and row["job_id"] not in live:
            yield f"the key {row['key']} is held by {row['job_id']}, which is not live"
    yield from _uncounted(outcome)


# Claim


def _claim(token: int, limit: int, *, now: int = NOW, **more: Any) -> Op[list[Claimed]]:
    return ops.claim("default", limit=limit, token=token, worker=f"w{token}", now=now, **more)


# Extend, rescue and finish


def _held(job: Claimed) -> Held:
    return Held(job.id, job.token)


def _rescue(*jobs: Claimed) -> Op[dict[str, State]]:
    return ops.rescue([Sighting(job.id, job.token, job.lease_until, job.lease_ms, "w1") for job in jobs], now=LATE)


def _finish(job: Claimed, change: Change, *, now: int = LATE) -> Op[dict[str, Verdict]]:
    return ops.finish([Finish(job, change)], now=now)


# Cancel


# Keys


TERMS = Terms(task="work")


def _keyed(*keys: str) -> Op[list[Enqueued]]:
    return ops.enqueue(TERMS, [NewJob(new_id(), '{"n":1}', key=key) for key in keys], now=NOW)


def _enqueuers(*batches: Sequence[str]) -> Prepare:
    def prepare(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
        made = [_keyed(*batch) for batch in batches]
        return [[op] for op in made], lambda outcome: _one_holder(outcome, made)

    return prepare


def _one_holder(outcome: Outcome, made: Sequence[Op[list[Enqueued]]]) -> Iterator[str]:
    holders = {row["key"]: row["job_id"] for row in outcome.rows("key")}
    firsts = []
    for number, op in enumerate(made):
        for job, answer in zip(jobs_of(op), outcome.answer(number), strict=True):
            if answer.id != holders.get(job["key"]):
                yield f"an enqueue was told that {answer.id} holds {job['key']}, which {holders.get(job['key'])} does"
            if not answer.deduplicated:
                firsts.append(job["key"])
    if sorted(firsts) != sorted(holders) or len(outcome.rows("job")) != len(holders):
        yield f"{len(outcome.rows('job'))} jobs and {len(firsts)} firsts for {len(holders)} keys"


# Replay, resolve, purge


# Retry, hold, park and wake


def _hold() -> Op[Any]:
    return ops.hold(by="p", why="restored", now=LATE)


# Batches


class Made(NamedTuple):
    """A batch, and the ids of the jobs that it adds."""

    id: str
    callbacks: dict[str, str]


def _open(store: PostgresStore, *, key: str | None = None) -> Made:
    made = Made(new_id(), {name: new_id() for name in CALLBACKS})
    specs = {name: json.dumps({**CALLBACK, "id": job_id, "task": name}) for name, job_id in made.callbacks.items()}
    store.run(batches.open_batch(made.id, "b", key=key, callbacks=batches.Callbacks(**specs), now=NOW))
    return made


CALLBACKS = ("on_complete", "on_success", "on_first_dead")
CALLBACK = {
    "queue": "after", "priority": 0, "payload": "{}", "max_attempts": 5, "lease_ms": LEASE, "keep_ms": 1000,
    "result_ttl_ms": 1000,
}  # fmt: skip


def _more(made: Made, count: int = 1, *, keys: Sequence[str] = (), **more: Any) -> Op[Added]:
    """Make the operation that adds jobs to a batch, one for each key where keys are given."""
    wanted: Sequence[str | None] = keys or [None] * count
    jobs = [NewJob(new_id(), '{"n":1}', key=key) for key in wanted]
    return batches.add(Terms(task="work", batch_id=made.id), jobs, now=NOW, **more)


def _seal(made: Made) -> Op[bool]:
    return batches.seal(made.id, now=LATE)


def _full(store: PostgresStore, count: int, *, sealed: bool = True, keys: Sequence[str] = ()) -> tuple[Made, Any]:
    """Have a batch, and its jobs claimed."""
    made = _open(store)
    store.run(_more(made, count, keys=keys))
    if sealed:
        store.run(batches.seal(made.id, now=NOW))
    return made, store.claim(count)


def _uncounted(outcome: Outcome) -> Iterator[str]:
    """Find batches whose counters are not their rows, and callbacks that are missing, doubled or not due."""
    there = Counter(row["id"] for table in ("job", "done") for row in outcome.rows(table))
    for batch in outcome.rows("batch"):
        ended = [row for row in outcome.rows("done", batch_id=batch["id"]) if row["replayed_as"] is None]
        states = Counter(row["state"] for row in ended)
        counted = {name: batch[name] for name in ("succeeded", "partial", "dead", "cancelled")}
        live = len(outcome.rows("job", batch_id=batch["id"]))
        if batch["open"] != live or counted != {name: states[name] for name in counted}:
            yield f"a batch counts {batch['open']} open and {counted}, rows say {live} and {dict(states)}"
        full = batch["sealed_at"] is not None
        again = bool(outcome.rows("event", name="job.replayed"))  # then it may be open again, or better than it was
        if (batch["completed_at"] is not None) != (full and not live) and not (again and full):
            yield f"a batch, sealed: {full}, with {live} open, is complete: {batch['completed_at'] is not None}"
        expected = {
            "on_complete": {batch["completed_at"] is not None},
            "on_success": {batch["completed_at"] is not None and states["succeeded"] == len(ended)},
            "on_first_dead": {batch["first_dead_at"] is not None},
        }
        if again:
            expected["on_success"].add(False)
        for name, due in expected.items():
            if batch[name] is not None and there[json.loads(batch[name])["id"]] not in due:
                yield f"{name} was made {there[json.loads(batch[name])['id']]} times, due: {due}"


def _complete(outcome: Outcome, *, succeeded: int = 0, dead: int = 0, cancelled: int = 0) -> Iterator[str]:
    """See that the batch is complete, and that so many of its jobs ended so."""
    [row] = outcome.rows("batch")
    found = tuple(row[name] for name in ("open", "succeeded", "dead", "cancelled"))
    if found != (0, succeeded, dead, cancelled) or row["completed_at"] is None:
        yield f"a batch whose jobs have ended is {row}"


def _last_of_batch(*ends: Callable[[Claimed], Op[Any]], **counts: int) -> Prepare:
    def prepare(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
        _, jobs = _full(store, len(ends))
        scripts: list[Script] = [[end(job)] for end, job in zip(ends, jobs, strict=True)]
        return scripts, lambda outcome: _complete(outcome, **counts)

    return prepare


def _succeeds(job: Claimed) -> Op[Any]:
    return _finish(job, SUCCESS)


def _dies(job: Claimed) -> Op[Any]:
    return _finish(job, DEAD)


race("last two jobs of a batch")(_last_of_batch(_succeeds, _succeeds, succeeded=2))
race("last two jobs of a batch, one dead")(_last_of_batch(_succeeds, _dies, succeeded=1, dead=1))
race("last jobs of a batch, two dead, 3 sessions")(_last_of_batch(_dies, _dies, _succeeds, succeeded=1, dead=2))


@race("the last jobs of two batches end in lists of different orders, 3 sessions")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    (_, ones), (_, others) = _full(store, 3), _full(store, 2)
    lists = [(SUCCESS, [others[0], ones[0]]), (DEAD, [ones[1], others[1]])]
    scripts = [[ops.finish([Finish(job, change) for job in some], now=LATE)] for change, some in lists]
    scripts.append([_succeeds(ones[2])])  # behind whom the two wait, each with what it has locked by then

    def judge(outcome: Outcome) -> Iterator[str]:
        if any(row["completed_at"] is None for row in outcome.rows("batch")):
            yield "a batch whose jobs have ended is not complete"

    return scripts, judge


@race("finish of several of a batch against cancel in another order")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    _, jobs = _full(store, 3)
    finish = ops.finish([Finish(job, SUCCESS) for job in jobs[::-1]], now=LATE)
    cancels = [ops.cancel([job.id for job in some], now=LATE) for some in (jobs, jobs[::-1])]
    return [[finish], *([cancel] for cancel in cancels)], lambda outcome: _complete(outcome, succeeded=3)


def _last_against_seal(end: Callable[[Claimed], Op[Any]], **counts: int) -> Prepare:
    def prepare(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
        made, [job] = _full(store, 1, sealed=False)
        return [[end(job)], [_seal(made)]], lambda outcome: _complete(outcome, **counts)

    return prepare


race("seal against the last finish, success")(_last_against_seal(_succeeds, succeeded=1))
race("seal against the last finish, dead")(_last_against_seal(_dies, dead=1))
race("seal against cancel of the last")(
    _last_against_seal(lambda job: _finish(job, Change(State.CANCELLED, reason="no")), cancelled=1)
)


@race("seal against seal and the last finish")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    made, [job] = _full(store, 1, sealed=False)
    return [[_seal(made)], [_seal(made)], [_succeeds(job)]], lambda outcome: _complete(outcome, succeeded=1)


@race("add against finish in the same batch")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    made, [job] = _full(store, 1, sealed=False)

    def judge(outcome: Outcome) -> Iterator[str]:
        [row] = outcome.rows("batch")
        if (row["open"], row["succeeded"], row["completed_at"]) != (4, 1, None):
            yield f"a batch to which two have added, and of which one job has ended, is {row}"

    return [[_more(made, 2)], [_succeeds(job)], [_more(made, 2)]], judge


def _add_against_seal(keys: Sequence[str], *rest: Callable[[Claimed], Op[Any]]) -> Prepare:
    """Have somebody add while another seals: what is not refused is counted."""

    def prepare(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
        made, jobs = _full(store, len(rest), sealed=False)
        op = _more(made, 2, keys=keys)

        def judge(outcome: Outcome) -> Iterator[str]:
            refused, [row] = outcome.answer(0).sealed, outcome.rows("batch")
            if row["open"] != (0 if refused else 2):
                yield f"refused: {refused}, and {row['open']} jobs are open"
            if refused and outcome.before(0, 1):
                yield "a batch that was not sealed took nothing"
            if outcome.rows("key") and refused:
                yield "what was refused has left its key"

        return [[op], [_seal(made)], *([end(job)] for end, job in zip(rest, jobs, strict=True))], judge

    return prepare


race("add against seal")(_add_against_seal(()))
race("keyed add against seal")(_add_against_seal("ab"))
race("add against seal and the last finish")(_add_against_seal((), _succeeds))


def _keyed_add_against_end(end: Callable[[Claimed], Op[Any]], *, frees: bool) -> Prepare:
    """Have the holder of a key end while somebody adds to its batch under that key."""

    def prepare(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
        made, [holder, _] = _full(store, 2, sealed=False, keys="ab")
        op = _more(made, keys="ba")

        def judge(outcome: Outcome) -> Iterator[str]:
            [row], [_, answer] = outcome.rows("batch"), outcome.answer(0).jobs
            fresh = not answer.deduplicated
            if row["open"] != 1 + fresh:
                yield f"the key was taken: {fresh}, and {row['open']} jobs are open"
            if fresh and not frees:
                yield "a second job has the key of one that succeeded"
            if frees and outcome.before(1, 0) and not fresh:
                yield "a key was not free after its holder had ended"

        return [[op], [end(holder)]], judge

    return prepare


race("keyed add against finish of the holder, success")(_keyed_add_against_end(_succeeds, frees=False))
race("keyed add against finish of the holder, dead")(_keyed_add_against_end(_dies, frees=True))


def _added_again(keys: Sequence[str], *more: Callable[[Made], Op[Any]]) -> Prepare:
    """Have an add that was not answered be repeated while what it added is claimed and ends."""

    def prepare(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
        made = _open(store)
        op = _more(made, 2, keys=keys)
        store.run(op)
        assert op.again is not None

        def finish(answers: list[Any]) -> Op[Any] | None:
            # What the repetition has locked is not claimed.
            changes = zip(answers[0], (SUCCESS, DEAD), strict=False)
            return ops.finish([Finish(*one) for one in changes], now=LATE) if answers[0] else None

        def judge(outcome: Outcome) -> Iterator[str]:
            [row], added = outcome.rows("batch"), outcome.answer(0)
            if added.sealed or any(answer.deduplicated for answer in added.jobs[:1]):
                yield f"an add said again, of what was added, is told {added}"
            if row["open"] + row["succeeded"] + row["dead"] != 2:
                yield f"two jobs were added, and added again: {row}"

        return [[op.again], [_claim(1001, 2), finish], *([make(made)] for make in more)], judge

    return prepare


race("repeated add against claim and finish")(_added_again(()))
race("repeated keyed add against claim and finish")(_added_again("ab"))
race("repeated add against seal, claim and finish")(_added_again((), _seal))


@race("add against its repetition and seal")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    made = _open(store)
    op = _more(made, 2)
    assert op.again is not None

    def judge(outcome: Outcome) -> Iterator[str]:
        [row] = outcome.rows("batch")
        refused = [added.sealed for number in (0, 1) for added in outcome.answers[number]]
        if row["open"] != (0 if all(refused) else 2):
            yield f"refused: {refused}, and {row['open']} jobs are open"
        if refused == [False, True] and not outcome.before(1, 0):
            yield "what was added is told to be refused when asked again"

    return [[op], [op.again], [_seal(made)]], judge


@race("add by a handler of the batch against its rescue")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    made, [parent] = _full(store, 1, sealed=False)
    op = _more(made, 2, parent=_held(parent))

    def judge(outcome: Outcome) -> Iterator[str]:
        added, [row] = not outcome.answer(0).lost, outcome.rows("batch")
        if row["open"] != (3 if added else 1):
            yield f"a handler added: {added}, and {row['open']} jobs are open"
        if added and outcome.before(1, 0):
            yield "a handler that had lost its lease added to a batch"

    return [[op], [_rescue(parent)]], judge


@race("replay against the last finish of a batch")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    _, jobs = _full(store, 2)
    store.kill(jobs[0])
    replay = ops.replay([Replay(jobs[0].id, new_id())], by="p", why="again", now=LATE)

    def finish(answers: list[Any]) -> Op[Any]:
        [job] = answers[1]
        return _finish(job, SUCCESS)

    scripts: list[Script] = [[replay, _claim(1001, 1, now=LATE), finish], [_succeeds(jobs[1])]]
    return scripts, lambda outcome: _complete(outcome, succeeded=2)


@race("cancel of the rest of a batch against finish")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    made, jobs = _full(store, 2, sealed=False)
    store.run(_more(made))
    seal, rest = _seal(made), batches.rest(made.id)

    def cancel(answers: list[Any]) -> Op[Any]:
        return ops.cancel(answers[1], by="p", now=LATE)

    def judge(outcome: Outcome) -> Iterator[str]:
        [row] = outcome.rows("batch")
        told = outcome.answer(0)
        if row["succeeded"] != 1 or row["open"] != (outcome.state(jobs[1].id) not in ("cancelled", "succeeded")):
            yield f"the rest was cancelled ({told}), one job succeeded, one is {outcome.state(jobs[1].id)}: {row}"
        if outcome.before(0, 1) and outcome.state(jobs[1].id) != "cancelled":
            yield f"a job that was asked to stop is {outcome.state(jobs[1].id)}"

    return [[seal, rest, cancel], [_finish(jobs[1], RETRY)], [_succeeds(jobs[0])]], judge


# What is added in order, under a key


PLACES = 5


def _placed(made: Made, begin: int, end: int) -> Op[Added]:
    jobs = [NewJob(id_in(made.id, place), json.dumps({"n": place})) for place in range(begin, end)]
    return batches.add(Terms(task="work", batch_id=made.id), jobs, filling=begin, now=NOW)


def _filling(made: Made, sizes: Sequence[int]) -> Script:
    """Fill a batch as the product does, in chunks of these sizes."""
    app = Duly("postgresql://nowhere")

    @app.task
    def work(n: int) -> None: ...

    going: list[Steps[list[Enqueued]]] = []

    def step(answers: list[Any]) -> Op[Any] | None:
        if not answers:
            places = iter(range(PLACES))
            chunks = [work._new_jobs([work.call(n) for n in islice(places, size)]) for size in sizes]
            batch = Batch(app.tasks, batches.open_batch(made.id, "b", key="k"))
            batch._opened, batch._place = batches.Opened(made.id, "b", "k", 0), 0
            going[:] = [batch._adding(batch._request(work), chunks, 0)]
        try:
            return going[0].send(answers[-1] if answers else None)
        except StopIteration:
            return None

    return [step] * (2 * PLACES)


def _each_place_once(outcome: Outcome, made: Made) -> Iterator[str]:
    [row] = outcome.rows("batch")
    there = sorted(json.loads(one["payload"])["n"] for table in ("job", "done") for one in outcome.rows(table)
                   if one["batch_id"] == made.id)  # fmt: skip
    if there != list(range(row["filled"])) or row["filled"] != PLACES:
        yield f"of {PLACES} places {row['filled']} are filled, with {there}"


@race("two fill one batch under its key")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    made = _open(store, key="k")
    return [_filling(made, (2, 3)), _filling(made, (3, 2))], lambda outcome: _each_place_once(outcome, made)


@race("two fill one batch under its key, which a third one claims and ends")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    made = _open(store, key="k")
    store.run(_placed(made, 0, 3))

    def finish(answers: list[Any]) -> Op[Any] | None:
        return ops.finish([Finish(job, SUCCESS) for job in answers[0]], now=LATE) if answers[0] else None

    scripts: list[Script] = [
        [_placed(made, 0, 3), _placed(made, 3, PLACES)], [_placed(made, 3, PLACES)], [_claim(1001, 2), finish]
    ]  # fmt: skip
    return scripts, lambda outcome: _each_place_once(outcome, made)


@race("one batch is opened twice under its key")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    opening = [batches.open_batch(new_id(), "b", key="k", now=NOW) for _ in range(2)]

    def judge(outcome: Outcome) -> Iterator[str]:
        if len({outcome.answer(number).id for number in (0, 1)}) != 1 or len(outcome.rows("batch")) != 1:
            yield f"two opened a batch under one key, and there are {len(outcome.rows('batch'))}"

    return [[op] for op in opening], judge


# Schedules


def _schedule(store: PostgresStore, *names: str, **more: Any) -> list[Due]:
    """Define schedules that are due, each in a commit of its own, and give what schedulers read of them."""
    for name in names:
        store.schedule(name, **more)
    dues: list[Due] = store.run(schedules.due(limit=10, now=NOW))
    return sorted(dues, key=lambda due: names.index(due.name))


def _fire(*dues: Due) -> tuple[Op[list[str]], dict[str, str]]:
    """Decide what comes of schedules, as one scheduler does; gives the ids of the runs by name, too."""
    firings = [planned(due, new_id=new_id, chance=lambda: 0.0) for due in dues]
    return schedules.fire(firings, now=NOW), {firing.name: firing.runs[0].id for firing in firings}


def _fired_once(outcome: Outcome, runs: Sequence[dict[str, str]], names: str) -> Iterator[str]:
    """See that of any number of schedulers one has fired, and that what it wrote belongs together."""
    for name in names:
        told = [made[name] for number, made in enumerate(runs) if name in outcome.answer(number)]
        jobs = [row["id"] for row in outcome.rows("job", schedule=name)]
        recorded = [row["job_id"] for row in outcome.rows("fire", schedule=name, due_at=NOW)]
        [row] = outcome.rows("schedule", name=name)
        if not (len(told) == 1 and told == jobs == recorded):
            yield f"{name}: {len(told)} were told that they fired, {len(jobs)} runs, {len(recorded)} on record"
        if (row["next_at"], row["revision"]) != (NOW + 600_000, 2):
            yield f"{name} is due next at {row['next_at']}, revision {row['revision']}"


def _schedulers(*chunks: str) -> Prepare:
    def prepare(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
        dues = {due.name: due for due in _schedule(store, *"cba")}
        made = [_fire(*(dues[name] for name in chunk)) for chunk in chunks]
        runs = [{name: run[name] for name in run} for _, run in made]
        names = "".join(sorted(set("".join(chunks))))
        return [[op] for op, _ in made], lambda outcome: _fired_once(outcome, runs, names)

    return prepare


race("two schedulers fire the same")(_schedulers("a", "a"))
race("two schedulers fire in different orders")(_schedulers("ab", "ba"))
race("three schedulers fire")(_schedulers("abc", "ca", "b"))


@race("fire against its repetition")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    op, run = _fire(*_schedule(store, "a"))
    assert op.again is not None

    def judge(outcome: Outcome) -> Iterator[str]:
        if outcome.answer(1) != ["a"]:
            yield "the repetition of a fire does not know that it was fired"
        outcome.answers = outcome.answers[1:]
        yield from _fired_once(outcome, [run], "a")

    return [[op], [op.again]], judge


def _schedulers_who_look(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    """Have two schedulers read for themselves what is due."""
    _schedule(store, "a", "b")

    def fire(answers: list[Any]) -> Op[Any] | None:
        return _fire(*answers[0])[0] if answers[0] else None

    def judge(outcome: Outcome) -> Iterator[str]:
        told = [names for answers in outcome.answers for names in answers[1:]]
        for name in "ab":
            jobs = {row["id"] for row in outcome.rows("job", schedule=name)}
            fired = {row["job_id"] for row in outcome.rows("fire", schedule=name)}
            if len(jobs) != 1 or jobs != fired or sum(name in names for names in told) != 1:
                yield f"{name} was fired {len(jobs)} times, {len(fired)} on record, told {told}"

    look = schedules.due(limit=10, now=NOW)
    return [[look, fire], [look, fire]], judge


race("two schedulers look and fire")(_schedulers_who_look)


def _followed(store: PostgresStore) -> tuple[Claimed, Op[list[str]], str]:
    """Have a run under way, and decide that another one is queued behind it."""
    store.schedule("a", overlap=Overlap.QUEUE)
    store.fire("a", next_at=NOW)
    [job] = store.claim()
    store.query("update duly_fire set due_at = due_at - 600000")  # that one was due before
    [due] = store.run(schedules.due(limit=10, now=NOW))
    op, run = _fire(due)
    return job, op, run["a"]


def _fire_against_end(end: Callable[[Claimed], Op[Any]]) -> Prepare:
    def prepare(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
        job, op, follower = _followed(store)

        def judge(outcome: Outcome) -> Iterator[str]:
            fired = "a" in outcome.answer(0)
            if outcome.live(job.id) is not None:
                yield f"the run before is {outcome.state(job.id)}"
            if outcome.state(follower) != ("ready" if fired else None):
                yield f"fired: {fired}, and the run that was queued is {outcome.state(follower)}"
            if outcome.before(1, 0) and fired:
                yield "a run was queued behind one that had ended"

        return [[op], [end(job)]], judge

    return prepare


race("fire against the end of the run before, success")(_fire_against_end(lambda job: _finish(job, SUCCESS)))
race("fire against the end of the run before, dead")(_fire_against_end(lambda job: _finish(job, DEAD)))
race("fire against rescue of the run before")(_fire_against_end(_rescue))


@race("fire and fire again against the end of the run before")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    job, op, _ = _followed(store)

    def again(answers: list[Any]) -> Op[Any] | None:
        return None if answers[0] else schedules.due(limit=10, now=NOW)

    def fire(answers: list[Any]) -> Op[Any] | None:
        return None if answers[0] else _fire(*answers[1])[0]

    def judge(outcome: Outcome) -> Iterator[str]:
        runs = [row["state"] for row in outcome.rows("job", schedule="a")]
        if runs != ["ready"]:
            yield f"the run after one that has ended is {runs}"

    return [[op, again, fire], [_finish(job, SUCCESS)]], judge


def _last_two_before(*more: Op[Any]) -> Prepare:
    """Have the two runs end that a third one is queued behind."""

    def prepare(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
        store.schedule("a", overlap=Overlap.QUEUE)
        for _ in range(2):
            store.now += 1
            store.fire("a", next_at=LATE)
        jobs = store.claim(2)
        store.now += 1
        follower = store.fire("a", next_at=LATE, reason=QUEUED)
        store.now = NOW

        def judge(outcome: Outcome) -> Iterator[str]:
            if outcome.state(follower) != "ready":
                yield f"both runs before have ended, and the one that was queued is {outcome.state(follower)}"

        return [*([_finish(job, SUCCESS)] for job in jobs), *([op] for op in more)], judge

    return prepare


race("the two runs before one that is queued end")(_last_two_before())
race("the two runs before one that is queued end, 3 sessions")(_last_two_before(schedules.unqueue(now=LATE)))


def _fire_against(change: Op[Any], *, told: Callable[[Any], bool] = bool) -> Prepare:
    """Have somebody write a schedule that is being fired: who is second has read what is no longer so."""

    def prepare(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
        op, run = _fire(*_schedule(store, "b", "a"))

        def judge(outcome: Outcome) -> Iterator[str]:
            fired = "a" in outcome.answer(0)
            jobs = [row["id"] for row in outcome.rows("job", schedule="a")]
            recorded = [row["job_id"] for row in outcome.rows("fire", schedule="a")]
            if not jobs == recorded == ([run["a"]] if fired else []):
                yield f"fired: {fired}, {len(jobs)} runs, {len(recorded)} on record"
            if fired and outcome.before(1, 0) and told(outcome.answer(1)):
                yield "a schedule was fired as it was read, and it was changed since"
            for row in outcome.rows("schedule", name="a"):
                if (row["next_at"] == NOW + 600_000) != fired:
                    yield f"fired: {fired}, and it is due next at {row['next_at']}"

        return [[op], [change]], judge

    return prepare


race("fire against pause of the schedule")(_fire_against(schedules.pause("a", by="p", why="so", now=NOW)))
race("fire against delete of the schedule")(_fire_against(schedules.delete("a", by="p", why="so", now=NOW)))
race("fire against hold")(_fire_against(_hold(), told=lambda answer: bool(answer.schedules)))
race("fire against a changed schedule")(
    _fire_against(schedules.define([definition("a", catchup=Catchup.ALL, revision=2)], now=NOW))
)


@race("the same schedule defined twice")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    chunks = (("a", "b"), ("b", "a"))
    scripts = [[schedules.define([definition(name) for name in chunk], now=NOW)] for chunk in chunks]

    def judge(outcome: Outcome) -> Iterator[str]:
        told = sorted(name for number in (0, 1) for name in outcome.answer(number))
        if told != ["a", "b"] or {row["revision"] for row in outcome.rows("schedule")} != {1}:
            yield f"two define the same, and were told to have written {told}"

    return scripts, judge


# Debounce


# Lanes


def _lanes(
    store: PostgresStore, *keys: str, cap: int | None = None, rate: int | None = None, **terms: Any
) -> list[str]:
    """Enqueue a job into the lane of each key, under limits of their task; gives their ids."""
    store.run(lanes.declare({"work": TaskLimits("work", cap, rate, rate and 60_000)}))
    op = _into(*keys, **terms)
    store.run(op)
    return _ids(op)


def _into(*keys: str, now: int | None = NOW, **terms: Any) -> Op[list[Enqueued]]:
    jobs = [NewJob(new_id(), '{"n":1}', lane=f"work:{key}") for key in keys]
    return ops.enqueue(Terms(task="work", **terms), jobs, now=now)


def _ids(*made: Op[Any]) -> list[str]:
    return [job["id"] for op in made for job in jobs_of(op)]


def _go_round(
    token: int, limit: int, *, ordered: bool = False, after: str = "", now: int | None = NOW, **more: Any
) -> Op[lanes.Taken]:
    walks, more = [Walk("work", after, ordered)], {"wait": True, **more}
    return lanes.claim("default", walks, limit=limit, lanes=20, token=token, worker=f"w{token}", now=now, **more)


def _taken(outcome: Outcome, *sessions: int) -> list[str]:
    """Give what the last lane claims of some sessions took, and see that nobody else has it."""
    return [job.id for session in sessions for job in outcome.answer(session).jobs]


def _at_work(outcome: Outcome, key: str) -> list[str]:
    return [row["id"] for row in outcome.rows("job", lane=f"work:{key}") if row["token"] is not None]


def _at_most(outcome: Outcome, most: int, *keys: str) -> Iterator[str]:
    for key in keys:
        if len(_at_work(outcome, key)) > most:
            yield f"{len(_at_work(outcome, key))} of {key} run, its cap is {most}"


def _under_a_cap(limit: int, *claimers: dict[str, Any]) -> Prepare:
    """Have a lane with five jobs, a cap of three and some who claim from it."""

    def prepare(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
        _lanes(store, *"aaaaa", cap=3)
        scripts = [[_go_round(1001 + number, limit, **more)] for number, more in enumerate(claimers)]

        def judge(outcome: Outcome) -> Iterator[str]:
            yield from _at_most(outcome, 3, "a")
            taken = _taken(outcome, *range(len(claimers)))
            if sorted(taken) != sorted(_at_work(outcome, "a")):
                yield f"{len(taken)} were answered, and {len(_at_work(outcome, 'a'))} run"
            passed_by = any(outcome.answer(session).passed_by for session in range(len(claimers)))
            if len(taken) != 3 and not passed_by:
                yield f"{len(taken)} of five were taken, and there was room for three"

        return scripts, judge

    return prepare


PASSING: dict[str, Any] = {"wait": False}
race("lane claim under a cap, 2 sessions")(_under_a_cap(3, {}, {}))
race("lane claim under a cap, 3 sessions")(_under_a_cap(2, {}, {}, {}))
race("lane claim under a cap, 2 sessions that pass by")(_under_a_cap(3, PASSING, PASSING))
race("lane claim under a cap, 3 sessions, 2 of which pass by")(_under_a_cap(2, {}, PASSING, PASSING))


@race("lane claim that waits against one that passes by, and a lane that is not made yet")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    _lanes(store, *"aabb", cap=1)
    store.query("insert into duly_lane (name, task, used_at) values ('work:b', 'work', ?)", NOW)

    def judge(outcome: Outcome) -> Iterator[str]:
        yield from _at_most(outcome, 1, "a", "b")
        if len(_taken(outcome, 0, 1)) != 2 and not outcome.answer(1).passed_by:
            yield f"{len(_taken(outcome, 0, 1))} were taken of two lanes that had room for one each"

    return [[_go_round(1001, 2)], [_go_round(1002, 2, wait=False)]], judge


@race("lane claim under a cap against one of suspects")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    ids = _lanes(store, *"aa", cap=1)
    store.query("update duly_job set suspect = true where id = ?", ids[0])

    def judge(outcome: Outcome) -> Iterator[str]:
        yield from _at_most(outcome, 1, "a")
        if len(_taken(outcome, 0, 1)) != 1:
            yield f"{len(_taken(outcome, 0, 1))} were taken, and there was room for one"

    return [[_go_round(1001, 1)], [_go_round(1002, 1, alone=True)]], judge


@race("lane claim of two lanes from different ends")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    _lanes(store, *"aabb", cap=1)

    def judge(outcome: Outcome) -> Iterator[str]:
        yield from _at_most(outcome, 1, "a", "b")
        if len(_taken(outcome, 0, 1)) != 2:
            yield f"{len(_taken(outcome, 0, 1))} were taken of two lanes that had room for one each"

    return [[_go_round(1001, 2)], [_go_round(1002, 2, after="work:a")]], judge


@race("lane claim against its repetition")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    _lanes(store, *"aaa", cap=2)
    op = _go_round(1001, 2)
    assert op.again is not None

    def judge(outcome: Outcome) -> Iterator[str]:
        held = {row["id"] for row in outcome.rows("job", token=1001)}
        # While the repetition looks, the first try takes nothing: nobody would know of it.
        if len(held) not in (0, 2) or set(_taken(outcome, 1)) not in (held, set()):
            yield f"the token holds {len(held)} jobs, the repetition knows {len(_taken(outcome, 1))}"

    return [[op], [op.again]], judge


def _room_made(end: Callable[[Claimed], Op[Any]], *, told: Callable[[Any], bool] = bool, **terms: Any) -> Prepare:
    """Have the place in a lane become free while somebody claims from it."""

    def prepare(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
        ids = _lanes(store, *"aa", cap=None if terms else 1, **terms)
        ordered = bool(terms)
        [job] = store.run(_go_round(1000, 1, ordered=ordered)).jobs

        def judge(outcome: Outcome) -> Iterator[str]:
            yield from _at_most(outcome, 1, "a")
            taken, free = _taken(outcome, 0), told(outcome.answer(1))
            if taken and (taken != ids[1:] or not free):
                yield f"{taken} was taken, the place is free: {free}"
            if outcome.before(1, 0) and free and not taken:
                yield "a place was free, and nobody took it"

        return [[_go_round(1001, 1, ordered=ordered, now=LATE)], [end(job)]], judge

    return prepare


race("lane claim against finish, success")(_room_made(lambda job: _finish(job, SUCCESS)))
race("lane claim against finish, retry")(_room_made(lambda job: _finish(job, RETRY)))
race("lane claim against rescue")(_room_made(_rescue))
IN_ORDER: dict[str, Any] = {"ordering_dead": "block"}
ON_AND_ON: dict[str, Any] = {"ordering_dead": "skip"}
race("claim in order against finish, success")(_room_made(lambda job: _finish(job, SUCCESS), **IN_ORDER))
race("claim in order against finish, dead, which is skipped")(_room_made(lambda job: _finish(job, DEAD), **ON_AND_ON))
race("claim in order against finish, dead, which blocks")(
    _room_made(lambda job: _finish(job, DEAD), told=lambda answer: False, **IN_ORDER)
)
race("claim in order against finish, retry")(
    _room_made(lambda job: _finish(job, RETRY), told=lambda answer: False, **IN_ORDER)
)
race("claim in order against rescue")(_room_made(_rescue, told=lambda answer: False, **IN_ORDER))


@race("lane claim against cancel")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    ids = _lanes(store, *"aaa", cap=2)

    def judge(outcome: Outcome) -> Iterator[str]:
        yield from _at_most(outcome, 2, "a")
        claimed = set(_taken(outcome, 0))
        for job_id in ids[:2]:
            told, state = outcome.answer(1).get(job_id), outcome.state(job_id)
            if told != state or told != (State.RUNNING if job_id in claimed else State.CANCELLED):
                yield f"cancel said {told}, the job is {state}, claimed: {job_id in claimed}"

    return [[_go_round(1001, 2)], [ops.cancel(ids[1::-1], now=NOW)]], judge


@race("lane claim against cancel of the first in order")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    ids = _lanes(store, *"aa", **IN_ORDER)

    def judge(outcome: Outcome) -> Iterator[str]:
        yield from _at_most(outcome, 1, "a")
        told = outcome.answer(1)[ids[0]]
        for job_id in _taken(outcome, 0):
            if job_id != ids[told is State.CANCELLED]:
                yield f"cancel said {told}, and the one behind was claimed: {job_id == ids[1]}"

    return [[_go_round(1001, 2, ordered=True)], [ops.cancel(ids[:1], now=NOW)]], judge


@race("lane claim against promote")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    _lanes(store, *"aaa", cap=2, delay_ms=1000)

    def judge(outcome: Outcome) -> Iterator[str]:
        yield from _at_most(outcome, 2, "a")
        if sorted(_taken(outcome, 0)) != sorted(_at_work(outcome, "a")):
            yield "what was taken is not what runs"

    return [[_go_round(1001, 3, now=LATE)], [ops.promote("default", 2, now=LATE)]], judge


@race("claim in order, 2 sessions")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    ids = _lanes(store, *"abab", **IN_ORDER)

    def judge(outcome: Outcome) -> Iterator[str]:
        yield from _at_most(outcome, 1, "a", "b")
        if not set(_taken(outcome, 0, 1)) <= set(ids[:2]):
            yield "one was taken that is not the first of its lane"
        # Who finds a lane locked leaves it alone; the other one has it then.
        if len(_taken(outcome, 0, 1)) != 2:
            yield f"{len(_taken(outcome, 0, 1))} were taken of two lanes"

    claims = [_go_round(1001, 2, ordered=True), _go_round(1002, 2, ordered=True, after="work:a")]
    return [[op] for op in claims], judge


def _in_their_places(outcome: Outcome, made: Sequence[Op[Any]]) -> Iterator[str]:
    """See that each has a place of its own, after all that were committed before it."""
    [order] = [sorted(range(len(made)), key=lambda number: outcome.ended[number] or 0)]
    for lane in {row["lane"] for row in outcome.rows("job")}:
        placed = sorted(outcome.rows("job", lane=lane), key=lambda row: row["seq"] or 0)
        came = [job for number in order for job in _ids(made[number])]
        there = [row["id"] for row in placed if row["id"] in came]
        if there != [job for job in came if job in there]:
            yield f"{lane}: those who came first have {[row['seq'] for row in placed]}, in another order"
        if len({row["seq"] for row in placed}) != len(placed) or None in [row["seq"] for row in placed]:
            yield f"{lane}: the places {[row['seq'] for row in placed]} were handed out"
        [kept] = outcome.rows("lane", name=lane)
        if placed and kept["last_seq"] < max(row["seq"] or 0 for row in placed):
            yield f"{lane}: {kept['last_seq']} was handed out last, and there are {[row['seq'] for row in placed]}"


def _enqueuers(*chunks: str, before: str = "", **terms: Any) -> Prepare:
    """Have some enqueue in order, each of them jobs of these keys in one commit."""

    def prepare(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
        _lanes(store, *before, **IN_ORDER)
        made = [_into(*chunk, **IN_ORDER, **terms) for chunk in chunks]
        return [[op] for op in made], lambda outcome: _in_their_places(outcome, made)

    return prepare


race("enqueue in order against enqueue in order")(_enqueuers("aa", "a"))
race("enqueue in order against enqueue in order, of a lane that is there")(_enqueuers("aa", "a", before="a"))
race("enqueue in order, two lanes in different orders")(_enqueuers("ba", "ab"))
race("enqueue in order, two lanes in different orders, 3 sessions")(_enqueuers("ba", "ab", "bb", before="ab"))


@race("enqueue in order against its repetition")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    op = _into(*"aa", **IN_ORDER)
    assert op.again is not None
    return [[op], [op.again]], lambda outcome: _in_their_places(outcome, [op])


@race("claim in order against enqueue in order")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    ids = _lanes(store, "a", **IN_ORDER)
    made = [_into(*chunk, **IN_ORDER) for chunk in ("ba", "ab")]

    def judge(outcome: Outcome) -> Iterator[str]:
        yield from _at_most(outcome, 1, "a", "b")
        taken = _taken(outcome, 2)
        first = [min(outcome.rows("job", lane="work:b"), key=lambda row: row["seq"])["id"]]
        if not set(taken) <= {*ids, *first}:
            yield "one was taken that is not the first of its lane"
        if outcome.before(0, 2) and outcome.before(1, 2) and len(taken) != 2:
            yield f"{len(taken)} were taken of two lanes that had room"
        yield from _in_their_places(outcome, made)

    return [*([op] for op in made), [_go_round(1001, 2, ordered=True)]], judge


@race("claim in order against replay of what blocks")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    _lanes(store, *"aa", **IN_ORDER)
    [head] = store.run(_go_round(1000, 1, ordered=True)).jobs
    store.kill(head)
    again = Replay(head.id, new_id())

    def judge(outcome: Outcome) -> Iterator[str]:
        yield from _at_most(outcome, 1, "a")
        if set(_taken(outcome, 0)) - {again.new_id}:
            yield "one was taken although the first of its lane is dead, or was and has not ended since"
        if outcome.before(1, 0) and _taken(outcome, 0) != [again.new_id]:
            yield f"the first of the lane was replayed, and {_taken(outcome, 0)} taken"

    return [[_go_round(1001, 1, ordered=True)], [ops.replay([again], by="p", why="so", now=NOW)]], judge


HOURS = 10 * 3_600_000


@race("lane claim against prune of lanes")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    _lanes(store, *"aaa", cap=2, rate=3)
    store.run(_go_round(1000, 1))
    scripts = [[_go_round(1001, 2, now=NOW + HOURS)], [_go_round(1002, 2, now=NOW + HOURS)]]

    def judge(outcome: Outcome) -> Iterator[str]:
        yield from _at_most(outcome, 2, "a")
        if len(_at_work(outcome, "a")) != 2:
            yield f"{len(_at_work(outcome, 'a'))} run, and there was room for two"

    return [*scripts, [ops.prune("lanes", now=NOW + HOURS)]], judge


@race("enqueue in order against prune of lanes")
def _(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
    ids = _lanes(store, *"a", **IN_ORDER)
    store.run(ops.cancel(ids, now=NOW))
    made = [_into(*chunk, now=NOW + HOURS, **IN_ORDER) for chunk in ("a", "aa")]
    scripts: list[Script] = [[made[0]], [made[1]], [ops.prune("lanes", now=NOW + HOURS)]]
    return scripts, lambda outcome: _in_their_places(outcome, made)


def _at_a_rate(*, claimers: int, now: int | None = NOW) -> Prepare:
    """Have some claim from a lane of which two may begin in a minute."""

    def prepare(store: PostgresStore) -> tuple[Sequence[Script], Judge]:
        _lanes(store, *"aaaaa", rate=2)
        scripts = [[_go_round(1001 + number, 1, now=now)] for number in range(claimers)]

        def judge(outcome: Outcome) -> Iterator[str]:
            begun = sorted(row["lease_until"] - row["lease_ms"] for row in outcome.rows("job") if row["token"])
            if len(begun) != 2:
                yield f"{len(begun)} began at a rate of 2"
            [lane] = outcome.rows("lane")
            kept = sorted(at for at, count in json.loads(lane["permits"]) for _ in range(count))
            if kept != begun:
                yield f"what began at {begun} is remembered as of {kept}"

        return scripts, judge

    return prepare


race("lane claim at a rate, 2 sessions")(_at_a_rate(claimers=2))
race("lane claim at a rate, 4 sessions")(_at_a_rate(claimers=4))
race("lane claim at a rate by the clock, 3 sessions")(_at_a_rate(claimers=3, now=None))


LOCKED = "order by id\n       for update"
SEEN = (
    "\n     cross join clock\n     where duly_job.id = any (array(select id from seen)) and duly_job.state = 'running'"
)
ENDED = "\n       and (duly_job.lease_until <= now or duly_job.lease_until > now + lease_ms + 2 * (lease_ms / 3))"

# Without each of these the row must be red: what it is called, the section, and what is changed in it.
CONTROLS: dict[str, tuple[str, str, str]] = {
    "claim_lock": ("claim", "room from asked)\n       for update skip locked", "room from asked)"),
    "claim_again": ("claim", "or exists (select 1 from duly.duly_job where token = :token::bigint)", ""),
    "rescue_guard": ("rescue", "\n       and duly_job.lease_until = seen.lease_until" + SEEN + ENDED, SEEN),
    "key_guard": ("reserve_keys", " where duly_key.expires_at <= :now", ""),
    "lock_order": ("cancel", LOCKED, "order by id desc\n       for update"),
    "cancel_lock": ("cancel", LOCKED, "order by id"),
    "second_look": ("undo_finished", "where id = any (array(\n", "where false and id = any (array(\n"),
    "replay_lock": ("replay", "order by duly_done.id\n       for update of duly_done", "order by duly_done.id"),
    "hold_lock": ("hold", LOCKED, "order by id"),
    "fire_lock": ("fire_lock", "order by name\n       for update", "order by name"),
    "end_revision": ("ended_schedule", "overlap <> 'allow' then 1", "overlap <> 'allow' then 0"),
    "batch_order": ("ended_batch", "order by id for update", "order by id desc for update"),
    "add_lock": ("lock_batch", " for no key update\n", "\n"),
    "add_again": ("count_added", "where duly_done.id = input.id)", "where false)"),
    "fill_guard": ("enqueue_again", "or filled = :filling::bigint)", "or true)"),
    "take_guard": ("take_key", " duly_key.state = 'succeeded' and", ""),
    "next_guard": ("finish_keyed", "\n       and next is null", ""),
    "begun_guard": ("debounce", "duly_job.state <> 'running' and attempt = 0 and last_token is null and", ""),
    "lane_lock": ("wait_for_lanes", "where not ordered or", "where false and"),
    "lane_order": ("hand_out", "group by lane\n order by lane", "group by lane\n order by min(id::text)"),
    "lane_head": ("claim_lanes", "seq is not null order by seq", "seq is not null and state = 'ready' order by seq"),
    "lane_permit": ("claim_lanes", "select now, spent.n)", "select now, 0)"),
}  # fmt: skip
# What else has to be changed for a defence to be gone.
ALONG = {
    # By its place alone no row is taken twice either: whoever waited for another's claim finds it in a new one.
    "claim_lock": (
        ("claim", "ready as materialized (\n    select ctid as", "ready as materialized (\n    select id as"),
        ("claim", "due as materialized (\n    select ctid as", "due as materialized (\n    select id as"),
        ("claim", "where ctid = any", "where id = any"),
    ),
    "fill_guard": (("count_filled", "and filled = :filling::bigint", ""),),
    "lane_lock": (("hold_lanes", "where (select name from duly.duly_lane where name = lane) is null", "where false"),
                  ("hold_lanes", "where name = any (array(\n", "where false and name = any (array(\n"),
                  ("claim_lanes", "join duly.duly_lane on duly_lane.name = walk_lane and held_by = :token::bigint",
                   "left join duly.duly_lane on duly_lane.name = walk_lane"),),
}  # fmt: skip
# Some sections are run by more than what they defend: those races are looked at that run another one too, or are called
# so.
BESIDE = {"end_revision": "fire_jobs", "fill_guard": "count_filled"}
CALLED = {
    "batch_order": "two batches",
    "lane_lock": "against one of suspects",
    "lane_order": "two lanes in different orders",
    "lane_head": "in order against finish, retry",
    "lane_permit": "at a rate, 2",
}
for _name, _change in CONTROLS.items():
    breaks.sql(_name, _change, *ALONG.get(_name, ()), dialects=("postgres",))

ROW = Row(
    "P17",
    "interleavings of 2 to 4 PostgreSQL sessions, planner forced four ways",
    "all as expected, 0 deadlocks, no limit, cap or rate exceeded, one holder of each key, each finish recorded once",
    run,
    controls=tuple(CONTROLS),
    takes=1.0,
    control_takes=1.0,
)
