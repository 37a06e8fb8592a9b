"""Everything duly asks of a database, one function per question.

A function here does no I/O. It names sections of SQL, fills their parameters and says how to read the
answer; a driver runs it and commits it as one. So the sync client, the async worker, your own open
transaction and Cloudflare D1 share every line of this file, and a store is only its `.sql` and its driver.

Batches travel as one JSON text: it is the fastest way in on PostgreSQL and the only one on D1, where every
number would turn into a float. `now` is for tests; without it the database reads its own clock.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from operator import attrgetter
from typing import Any, Generic, NamedTuple, NoReturn, TypeAlias, TypeVar, cast
from uuid import UUID

import msgspec
from msgspec.structs import replace as replace_fields

from duly.errors import ConfigError, StoreUnavailable
from duly.model import (
    HELD,
    KEEP_MS,
    KEY_TTL_MS,
    MANY,
    PARKED,
    Attempt,
    Change,
    Claimed,
    DeadFigure,
    Enqueued,
    Event,
    HoldFigure,
    JobRecord,
    NewJob,
    ParkedFigure,
    Pause,
    QueueFigure,
    Replayed,
    Sighting,
    State,
    Step,
    Terms,
    Verdict,
    WorkerRecord,
)
from duly.rules import codec, failure, keys
from duly.rules import envelope as envelopes
from duly.rules.why import Why, explain, facts_of

T = TypeVar("T")
Row: TypeAlias = Sequence[Any]
Rows: TypeAlias = Sequence[Row]

_json = msgspec.json.Encoder().encode

LIVE = frozenset({State.SCHEDULED, State.READY, State.RUNNING, State.WAITING})
FIRST_ID, LAST_ID = "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"

# All endings share this tail. `ended_delete` comes last: until then the sections find the row in duly_job.
TAIL = (
    "ended_key",
    "ended_next",
    "ended_batch",
    "ended_callbacks",
    "ended_schedule",
    "ended_event",
    "ended_done",
    "ended_delete",
)


# Nobody changes one. But frozen, each would take 2 µs to make, and every enqueue makes two.
@dataclass(slots=True)
class Op(Generic[T]):
    """One operation: sections of SQL that commit as one, their parameters, and the reader of their rows.

    The reader gets the rows of all statements in order. Every write may be repeated after a lost answer, by
    `again` where the repetition must look first, and never where `once` says that nobody could tell; `repeat` is
    that, or makes it when it is needed. `bare` makes what is sent instead when the database refuses the data. `follow`
    asks a second question when the answer leaves one open. `wakes` says that jobs may be ready after it, for which a
    worker sleeps. Plain enqueues of which `alike` is the same can be sent as one.
    """

    name: str
    sections: tuple[str, ...]
    params: Mapping[str, Any]
    read: Callable[[Rows], T]
    writes: bool = True
    urgent: bool = False
    wakes: bool = False
    once: bool = False
    repeat: Op[T] | Callable[[], Op[T]] | None = None
    bare: Callable[[], Op[T]] | None = None
    follow: Callable[[T], Op[T] | None] | None = field(default=None)
    alike: object = None

    @property
    def again(self) -> Op[T] | None:
        """What is asked after a lost answer; None: the same once more."""
        return self.repeat() if callable(self.repeat) else self.repeat

    def unread(self) -> Op[Rows]:
        """Give the same, but answering its rows as they come: `read` reads them when there is time."""
        again = self.again
        repeat = None if again is None else again.unread()
        return cast("Op[Rows]", replace(cast("Op[Any]", self), read=_as_they_come, repeat=repeat))


def _as_they_come(rows: Rows) -> Rows:
    return rows


class Finish(NamedTuple):
    """A job on lease and what becomes of it."""

    job: Claimed
    change: Change


class Held(NamedTuple):
    """A job as its holder names it in a write: only while the token stands does anything change."""

    id: str
    token: int


class Mark(NamedTuple):
    """A place in the order in which a queue is claimed, within one priority."""

    priority: int
    due_at: int
    id: str


class Head(NamedTuple):
    """Where the first job stands that a claim would take, and how long the database took to come to it.

    None: the database has no long ways to go.
    """

    mark: Mark | None
    took_ms: float | None


class Replay(NamedTuple):
    """One dead job to run again under a new id, as it was or with another key or payload.

    A key for a job that had none comes with the payload, whose fingerprint goes with the key.
    """

    id: str
    new_id: str
    key: str | None = None
    payload: str | None = None
    force: bool = False


# Enqueue


def enqueue(
    terms: Terms,
    jobs: Sequence[NewJob],
    *,
    parent: Held | None = None,
    checked: bool = False,
    now: int | None = None,
) -> Op[list[Enqueued]]:
    """Add jobs that share their terms; those with a key are added only where the key is free.

    `parent` is the job whose handler enqueues. If its lease is lost, nothing is added and nothing is answered.
    `checked`: a task has made the jobs, so that their ids are new, and their payloads were written and measured here.
    """
    accepted = _accept(terms)
    if not checked:
        _check_jobs(jobs, terms.task)
    keyed = [job for job in jobs if job.key is not None]
    if keyed and len(keyed) < len(jobs):
        raise ConfigError("one enqueue takes jobs with keys or jobs without, not both: split them")
    if terms.debounce_ms is not None:
        return _debounce(terms, keyed, parent, now)
    if terms.key_window_ms is not None and not keyed:
        raise ConfigError(f"{terms.task}: unique_for= keeps a key, and this job has none: give key=")
    if keyed:
        op = _enqueue_keyed(accepted, keyed, now)
    else:
        op = _enqueue_plain(accepted, jobs, now, guarded=parent is not None or terms.batch_id is not None)
    return op if parent is None else while_held(op, parent, [])


def while_held(op: Op[T], parent: Held, lost: T) -> Op[T]:
    """Make an enqueue that adds nothing once the lease of `parent` is lost, and then answers `lost`."""

    def read(rows: Rows) -> T:
        return op.read(rows[1:]) if rows and len(rows[0]) == 1 else lost

    params = {**op.params, "parent_id": parent.id, "parent_token": parent.token}
    again = op.again
    repeat = again and replace(again, sections=("hold_parent", *again.sections), params=params, read=read)
    return replace(op, sections=("hold_parent", *op.sections), params=params, read=read, repeat=repeat)


class _Accepted(NamedTuple):
    """Terms that were checked, as they are handed to the statements that add a list of jobs and a single one."""

    terms: Terms
    of_many: dict[str, Any]
    of_one: dict[str, Any]
    alike: Terms  # the first that were the same


# By their addresses, which nothing else can have while they are in here.
_accepted: dict[int, _Accepted] = {}
_firsts: dict[Terms, Terms] = {}
MOST_ACCEPTED = 1000


def _accept(terms: Terms) -> _Accepted:
    """Check terms once: most enqueues come on the same ones as those before them."""
    accepted = _accepted.get(id(terms))
    if accepted is None:
        _check(terms)
        if len(_accepted) >= MOST_ACCEPTED:
            _accepted.clear()
            _firsts.clear()
        alike = _firsts.setdefault(terms, terms)
        _accepted[id(terms)] = accepted = _Accepted(terms, _terms(terms), _own_terms(terms), alike)
    return accepted


def _check(terms: Terms) -> None:
    """Refuse terms that some store could not keep, so that all refuse the same."""
    for name in ("task", "queue"):
        text = getattr(terms, name)
        if not text or text != failure.escape_text(text):
            raise ConfigError(f"{name} is {text!r}: a name is not empty and has no NUL and no lone surrogate")
    for name, least in _LEAST.items():
        value = getattr(terms, name)
        most = _MOST.get(name, _LONG)
        if value is not None and not (isinstance(value, int) and least <= value <= most):
            raise ConfigError(f"{name} of {terms.task} is {value!r}: give a whole number from {least} to {most}")


def _check_jobs(jobs: Sequence[NewJob], task: str) -> None:
    what = f"the payload of {task}"
    for job in jobs:
        if not _is_id(job.id):
            raise ConfigError(f"{task}: the id of a job is a UUID in lower case (keys.Ids makes them), not {job.id!r}")
        codec.check_json(job.payload, what)
        codec.check_size(job.payload, task)
    if len({job.id for job in jobs}) < len(jobs):
        raise ConfigError(f"{task}: one enqueue got two jobs with the same id: give each one of its own")


_is_id = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}").fullmatch
_INT, _LONG = 2**31 - 1, 2**53 - 1
_LEAST = {
    "priority": -(2**31), "max_attempts": 1, "lease_ms": 1, "delay_ms": 0, "due_at": 0, "expires_ms": 0,
    "expires_at": 0, "keep_ms": 0, "result_ttl_ms": 0, "key_ttl_ms": 0, "key_window_ms": 0, "debounce_ms": 0,
}  # fmt: skip
_MOST = {"priority": _INT, "max_attempts": _INT, "lease_ms": _INT}


def _enqueue_plain(
    accepted: _Accepted, jobs: Sequence[NewJob], now: int | None, *, guarded: bool
) -> Op[list[Enqueued]]:
    terms, jobs = accepted.terms, tuple(jobs)  # which are read once more after a lost answer
    ordered = in_order(terms)
    added = [Enqueued(job.id) for job in jobs]

    def read(rows: Rows) -> list[Enqueued]:
        return added

    def again() -> Op[list[Enqueued]]:
        ids = json_text([job.id for job in jobs])
        params = {**accepted.of_many, "payloads": _payloads(jobs), "ids": ids, "now": now}
        return Op("enqueue", ("enqueue_again", "undo_finished", *ordered), params, read, wakes=True)

    # Where success leaves no trace, nobody can tell a lost enqueue from a finished one.
    once = terms.keep_ms == 0
    if len(jobs) == 1 and not (guarded or ordered):  # by a statement that costs less
        one = {**accepted.of_one, **_record_of(jobs[0]), "now": now}
        return Op("enqueue", ("enqueue_one",), one, read, wakes=True, once=once, repeat=again, alike=accepted.alike)
    repeated = again()
    alike = None if guarded or ordered else accepted.alike
    return replace(repeated, sections=("enqueue", *ordered), once=once, repeat=repeated, alike=alike)


def _payloads(jobs: Sequence[NewJob]) -> str:
    """Write jobs by their kinds, as {[lane, envelope]: {id: payload}}: most that come together are of one."""
    kinds: dict[str, dict[str, str]] = {}
    last: NewJob | None = None
    payloads: dict[str, str] = {}
    for job in jobs:
        if last is None or job.lane != last.lane or job.envelope is not last.envelope:
            payloads = kinds.setdefault(_in_common(job.lane, envelopes.pack(job.envelope)), {})
            last = job
        payloads[job.id] = job.payload
    return f"{{{','.join([f'{kind}:{json_text(payloads)}' for kind, payloads in kinds.items()])}}}"


def _in_common(lane: str | None, envelope: str | None) -> str:
    """Write what jobs of a list have in common, as a name in JSON."""
    return '"[null,null]"' if lane is envelope is None else json_text(json_text([lane, envelope]))


def listed(op: Op[Any]) -> str:
    """Write what a plain enqueue adds, as the inside of `payloads`; one of a single job has not done so yet."""
    params = op.params
    if "payloads" in params:
        return str(params["payloads"][1:-1])
    return f"{_in_common(params['lane'], params['envelope'])}:{json_text({params['id']: params['payload']})}"


def in_order(terms: Terms) -> tuple[str, ...]:
    """Give the sections by which jobs get their places, where their lanes keep an order."""
    return ("hand_out",) if terms.ordering_dead is not None else ()


def _enqueue_keyed(accepted: _Accepted, jobs: Sequence[NewJob], now: int | None) -> Op[list[Enqueued]]:
    terms = accepted.terms
    records = [
        {
            **_record_of(job),
            "key": keys.check_key(job.key or ""),
            "fingerprint": job.fingerprint or keys.fingerprint(job.payload),
        }
        for job in jobs
    ]
    params = {
        **accepted.of_many,
        "jobs": json_text(records),
        "ids": json_text([job.id for job in jobs]),
        "key_ttl_ms": terms.key_ttl_ms,
        "key_window_ms": terms.key_window_ms,
        "now": now,
    }
    ordered = in_order(terms)
    sections = ("reserve_keys", "enqueue_keyed", *ordered, "key_holders")
    repeated = ("lock_jobs", "reserve_keys", "enqueue_keyed_again", "undo_finished", *ordered, "key_holders")
    again = Op("enqueue", repeated, params, _enqueued, wakes=True)
    return replace(again, sections=sections, repeat=again)


def _record_of(job: NewJob) -> dict[str, Any]:
    record = {"id": job.id, "payload": job.payload, "envelope": envelopes.pack(job.envelope)}
    return record if job.lane is None else {**record, "lane": job.lane}


def _terms(terms: Terms) -> dict[str, Any]:
    own = _own_terms(terms)
    del own["lane"]  # of a list, each job may have one of its own
    return {
        **own,
        "batch_id": terms.batch_id,
        "ordering_dead": terms.ordering_dead,
        "parent_id": None,
        "parent_token": None,
        "filling": None,
    }


def _own_terms(terms: Terms) -> dict[str, Any]:
    return {
        "task": terms.task,
        "queue": terms.queue,
        "priority": terms.priority,
        "max_attempts": terms.max_attempts,
        "delay_ms": terms.delay_ms,
        "due_at": terms.due_at,
        "expires_ms": terms.expires_ms,
        "expires_at": terms.expires_at,
        "lease_ms": terms.lease_ms,
        "keep_ms": terms.keep_ms,
        "result_ttl_ms": terms.result_ttl_ms,
        "schedule": terms.schedule,
        "on_dead": terms.on_dead,
        "lane": None,
    }


def _enqueued(rows: Rows) -> list[Enqueued]:
    return [
        Enqueued(
            id=holder,
            deduplicated=holder != asked,
            conflict=bool(other_payload),
            succeeded=state == "succeeded",
            result=result,
            result_dropped=bool(dropped),
        )
        for asked, holder, other_payload, state, result, dropped in rows
    ]


# How often a debounce is asked again that found another job under its key each time, locked by somebody.
DEBOUNCE_TRIES = 10


def _debounce(terms: Terms, jobs: Sequence[NewJob], parent: Held | None, now: int | None) -> Op[list[Enqueued]]:
    """Have one job run when no further call under its key has come for a while, with what the last call gave."""
    if len(jobs) != 1:
        raise ConfigError(f"{terms.task}: debounce= is for one job with a key at a time, not for {len(jobs)}")
    if terms.batch_id is not None or terms.key_window_ms is not None or terms.delay_ms or terms.due_at is not None:
        raise ConfigError(f"{terms.task}: debounce= goes with no batch, no unique_for=, no delay= and no at=")
    [job] = jobs
    spec = {
        **_record_of(job),
        "fingerprint": job.fingerprint or keys.fingerprint(job.payload),
        **{name: getattr(terms, name) for name in _DEBOUNCED},
    }
    params = {
        "id": job.id,
        "task": terms.task,
        "key": keys.check_key(str(job.key)),
        "job": json_text(spec),
        "debounce_ms": terms.debounce_ms,
        "expires_ms": terms.expires_ms,
        "expires_at": terms.expires_at,
        "parent_id": parent and parent.id,
        "parent_token": parent and parent.token,
        "now": now,
    }
    return _debouncing(params, DEBOUNCE_TRIES)


_DEBOUNCED = ("queue", "priority", "max_attempts", "lease_ms", "keep_ms", "result_ttl_ms", "key_ttl_ms", "on_dead")


def _debouncing(params: dict[str, Any], tries: int) -> Op[list[Enqueued]]:
    """Lock the job that holds the key, then the key, as whoever ends the job does; only then see what is to be done."""
    held = ("hold_parent",) if params["parent_token"] is not None else ()
    sections = ("lock_debounced", *held, "take_key", "debounce", "debounced")

    def read(rows: Rows) -> list[Enqueued]:
        if held and len(rows[0]) != 1:
            return []
        holder, is_behind = rows[-1]
        return [Enqueued(holder or "", deduplicated=holder != params["id"], behind=bool(is_behind))]

    def follow(answer: list[Enqueued]) -> Op[list[Enqueued]] | None:
        if not answer or answer[0].id:
            return None
        return _debouncing(params, tries - 1).again if tries else _crowded(params["task"], params["key"])

    repeated = (*sections[:-1], "undo_finished", sections[-1])
    again = Op("enqueue", repeated, {**params, "ids": json_text([params["id"]])}, read, wakes=True, follow=follow)
    return replace(again, sections=sections, params=params, repeat=again)


def _crowded(task: str, key: str) -> NoReturn:
    error = StoreUnavailable(
        f"enqueue: the key {key!r} of {task} changed hands each time that it was to be debounced: try again, "
        "and on your own connection roll back before"
    )
    error.locked = True
    raise error


# Claim and keep

# What a worker's name ends in where a job runs in a child process of it: the child's death is seen by its worker, so a
# worker that stops beating says nothing against that job.
CHILD = "/child"


def claim(
    queue: str,
    *,
    limit: int,
    token: int,
    worker: str,
    tasks: Iterable[str] | None = None,
    alone: bool = False,
    marks: Iterable[Mark] = (),
    now: int | None = None,
) -> Op[list[Claimed]]:
    """Lease up to `limit` due jobs of `queue`, best first; `again` gives the same jobs by the same token.

    `tasks` are those the worker knows. `alone` takes suspects, which nothing else does. `marks` spare the database the
    way over what is gone: in the priority of each, nothing that stands before it is looked for, and no suspects.
    """
    if not 1 <= token < 2**53:
        raise ConfigError(
            f"the token of a claim is a number from 1 to 2**53 - 1 (keys.new_token makes one), not {token}"
        )
    if limit < 0:
        raise ConfigError(f"a claim takes 0 or more jobs, not {limit}")
    params: dict[str, Any] = {
        "queue": queue,
        "limit": limit,
        "token": token,
        "worker": worker,
        "tasks": None if tasks is None else json_text(sorted(tasks)),
        "alone": alone,
        "now": now,
    }
    section = "claim"
    if parts := _parts(queue, marks):
        section, params = "claim_marked", {**params, "parts": json_text(parts)}
        del params["alone"]
    again = Op("claim", ("await_claim", section, "recall"), params, _best_first)
    return Op("claim", (section,), params, _best_first, repeat=again)


def _parts(queue: str, marks: Iterable[Mark]) -> list[dict[str, Any]]:
    """Cut the order of a queue, best first: from each mark to the end of its priority, and all that lies between."""
    parts, top = [], _INT
    for mark in sorted(marks, reverse=True):
        if top > mark.priority:
            parts.append(_part(queue, top, mark.priority + 1))
        parts.append(_part(queue, mark.priority, mark.priority, mark.due_at, mark.id))
        top = mark.priority - 1
    if parts and top >= _LEAST["priority"]:
        parts.append(_part(queue, top, _LEAST["priority"]))
    return parts


def _part(queue: str, top: int, bottom: int, due_at: int = 0, id_: str = FIRST_ID) -> dict[str, Any]:
    return {"queue": queue, "top": top, "bottom": bottom, "due_at": due_at, "id": id_}


def head(queue: str, *, tasks: Iterable[str] | None = None, now: int | None = None) -> Op[Head]:
    """See what a claim of `queue` would take first, and how long the way to it is."""
    params = {"queue": queue, "tasks": None if tasks is None else json_text(sorted(tasks)), "now": now}
    return Op("head", ("head",), params, _head, writes=False)


def _head(rows: Rows) -> Head:
    for priority, due_at, id_, took_ms in rows:
        return Head(None if id_ is None else Mark(priority, due_at, id_), took_ms)
    return Head(None, None)


def recall(token: int) -> Op[list[Claimed]]:
    """Read what a token still holds, and take nothing new; a claim that is still on its way is waited for."""
    return Op("claim", ("await_claim", "recall"), {"token": token}, claimed)


def _best_first(rows: Rows) -> list[Claimed]:
    """Read a claim. Asked for again, it may tell both what it took just now and what it holds."""
    jobs = list({job.id: job for job in claimed(rows)}.values())
    # By one value after the other, which takes half as long: most come nearly in this order.
    jobs.sort(key=_by_id)
    jobs.sort(key=_by_due_at)
    jobs.sort(key=_by_priority, reverse=True)
    return jobs


_by_id, _by_due_at, _by_priority = map(attrgetter, ("id", "due_at", "priority"))


def claimed(rows: Rows) -> list[Claimed]:
    """Read jobs on lease, each a row of its values or of all of them as one text, which has the envelope last."""
    if rows and len(rows[0]) == 1:
        return [_from_text(row[0]) for row in rows]
    return [
        Claimed(*row[:6], *row[7:11], bool(row[11]), *row[12:], envelopes.unpack(row[6]))  # type: ignore[call-arg]
        for row in rows
    ]


_read_text = msgspec.json.Decoder(Claimed, strict=False).decode  # not strictly: SQLite has 0 and 1 for false and true
_WITHOUT = ",null]"  # how a text ends whose job has no envelope, as most have none


def _from_text(text: str) -> Claimed:
    """Read a job at once: to read a list of values and make a job of them takes twice as long."""
    if text.endswith(_WITHOUT):
        return _read_text(f"{text[: -len(_WITHOUT)]}]")
    *values, envelope = msgspec.json.decode(text)
    return replace_fields(msgspec.convert(values, Claimed, strict=False), envelope=envelopes.unpack(envelope))


def extend(held: Iterable[Held], *, now: int | None = None) -> Op[dict[str, int | None]]:
    """Renew leases; answers who is still held, and since when it is asked to cancel. The rest are lost."""
    return Op("extend", ("extend",), {"held": _held(held), "now": now}, _extended, urgent=True)


def _extended(rows: Rows) -> dict[str, int | None]:
    return dict(rows)  # type: ignore[arg-type]


def progress(held: Held, percent: float, message: str | None = None) -> Op[bool]:
    """Note how far a running job is, clamped to 0 to 100. False: the lease is lost."""
    percent = min(max(percent, 0.0), 100.0) if percent == percent else 0.0  # a NaN is no progress
    params = {"id": held.id, "token": held.token, "progress": percent, "message": _clean(message)}
    return Op("progress", ("progress",), params, bool)


def heartbeat(held: Held, *, now: int | None = None) -> Op[bool]:
    """Note that the handler itself is alive; the lease is another matter. False: the lease is lost."""
    return Op("heartbeat", ("heartbeat",), {"id": held.id, "token": held.token, "now": now}, bool)


# Finish


def finish(
    finishes: Sequence[tuple[Claimed, Change]], *, borrowed: bool = False, now: int | None = None
) -> Op[dict[str, Verdict]]:
    """Record how attempts ended, each fenced by its token; `borrowed` is for the connection of a caller.

    Successes take a short way. What ends in different `ways` had better be finished apart: together, all rows are
    locked beforehand.
    """
    short: defaultdict[Way, defaultdict[int, dict[str, str | None]]] = defaultdict(lambda: defaultdict(dict))
    rest: list[dict[str, Any]] = []
    ways = [way_of(job, change) for job, change in finishes]
    # Among others it would lock its batch before their keys, which every ending locks the other way round.
    by_batch_alone = set(ways) == {Way.BATCHED}
    for (job, change), way in zip(finishes, ways, strict=True):
        if change.result is not None:
            codec.check_json(change.result, f"the result of {job.task}")
        if way is _LONG_WAY or (way is _BATCHED and (borrowed or not by_batch_alone)):
            rest.append(_change(job, change))
        else:
            short[way][job.token][job.id] = change.result
    op = _finish(short, rest, finishes, now, borrowed=borrowed)
    if not any(change["error"] for change in rest):
        return op
    bare = [_without_texts(change) for change in rest]
    return replace(op, bare=lambda: _finish(short, bare, finishes, now, borrowed=borrowed))


class Way(StrEnum):
    """How the end of an attempt is written: most successes need less than all the others."""

    PLAIN = "plain"
    KEYED = "keyed"
    BATCHED = "batched"
    LONG = "long"


# To find the member of an enum takes Python 3.11 ten times as long as to find a name, and this is asked of every job.
_SUCCEEDED, _RECORDED = State.SUCCEEDED, Verdict.RECORDED
_PLAIN, _KEYED, _BATCHED, _LONG_WAY = Way


def way_of(job: Claimed, change: Change) -> Way:
    """Say which way an end takes."""
    if change.state is not _SUCCEEDED or job.schedule is not None:
        return _LONG_WAY
    if job.key is not None:
        return _KEYED if job.keep_ms > 0 and job.batch_id is None else _LONG_WAY
    # Earlier attempts left rows that a success with `keep=0` has to take along.
    if job.keep_ms == 0 and job.attempt > 1:
        return _LONG_WAY
    return _PLAIN if job.batch_id is None else _BATCHED


def _finish(
    short: Mapping[Way, Mapping[int, Mapping[str, str | None]]],
    rest: list[dict[str, Any]],
    finishes: Sequence[tuple[Claimed, Change]],
    now: int | None,
    *,
    borrowed: bool = False,
) -> Op[dict[str, Verdict]]:
    sections: tuple[str, ...] = ()
    params: dict[str, Any] = {"now": now}
    if Way.PLAIN in short:
        leaves_nothing = not any(job.keep_ms for job, _ in finishes)
        plain = "finish_gone" if leaves_nothing else "finish_plain"
        sections += ("plain_held", plain) if borrowed else (plain, "ends_written")
    if Way.KEYED in short:
        sections += ("keyed_held", "finish_keyed") if borrowed else ("finish_keyed", "ends_written")
    if Way.BATCHED in short:
        sections += ("finish_batched", "ends_written", "ended_callbacks")
        params |= ending([], batches={job.batch_id for job, _ in finishes if job.batch_id is not None})
    params |= {way.value: json_text(ends) for way, ends in short.items()}
    if rest:
        sections += ("finish", "failed_attempts", *TAIL)
        params |= ending([job.id for job, _ in finishes]) | {"changes": json_text(rest)}
    if len(short) + bool(rest) > 1:
        params.setdefault("ids", json_text(list(dict.fromkeys(job.id for job, _ in finishes))))
        sections = ("lock_jobs", *sections)
    wakes = any(change["state"] == "ready" for change in rest)

    def read(rows: Rows) -> dict[str, Verdict]:
        return _recorded(rows, short)

    return Op("finish", sections, params, read, wakes=wakes, follow=lambda answer: _further(finishes, answer, now))


def release(jobs: Iterable[Claimed], *, now: int | None = None) -> Op[dict[str, Verdict]]:
    """Give jobs back unfinished, their attempts uncounted."""
    change = Change(State.READY, give_back_attempt=True)
    return finish([Finish(job, change) for job in jobs], now=now)


def snooze(job: Claimed, after_ms: int, *, now: int | None = None) -> Op[dict[str, Verdict]]:
    """Put a job off, its attempt uncounted."""
    return finish([Finish(job, Change(State.SCHEDULED, after_ms=after_ms, give_back_attempt=True))], now=now)


def _change(job: Claimed, change: Change) -> dict[str, Any]:
    error = change.error
    return {
        "id": job.id,
        "token": job.token,
        "attempt": job.attempt,
        "state": change.state.value,
        "ending": int(change.state.ended),
        "after_ms": change.after_ms,
        "give_back": int(change.give_back_attempt),
        "result": change.result,
        "reason": _clean(change.reason),
        "kind": error and _clean(error.kind),
        "error": error and _clean(f"{error.kind}: {error.message}"),
        "traceback": error and _clean(error.traceback),
        "crashed": int(change.crashed),
        "parked": job.envelope.schema_version if _parks(change) else None,
    }


def _parks(change: Change) -> bool:
    return change.state is State.WAITING and (change.reason or "").startswith(PARKED)


def _without_texts(change: dict[str, Any]) -> dict[str, Any]:
    return {**change, "reason": None, "error": change["kind"], "traceback": None}


def _recorded(rows: Rows, short: Mapping[Way, Mapping[int, Mapping[str, Any]]]) -> dict[str, Verdict]:
    """Read which ends were recorded: they are named, but those of a short way are only counted.

    If some of those were not, none of them is taken for recorded here. It is asked then what became of each.
    """
    by_token = chain.from_iterable(ends.values() for ends in short.values())
    recorded = dict.fromkeys(chain.from_iterable(by_token), _RECORDED)  # an id comes twice if two tokens name it
    if sum(row[0] for row in rows if isinstance(row[0], int)) != len(recorded):
        recorded = {}
    return recorded | dict.fromkeys([row[0] for row in rows if isinstance(row[0], str)], _RECORDED)


def _further(
    finishes: Sequence[tuple[Claimed, Change]], answer: dict[str, Verdict], now: int | None
) -> Op[dict[str, Verdict]] | None:
    """Ask what became of ends that are not known to be recorded, and then see to those that had to go the long way."""
    op = _settle(finishes, answer)
    return op and replace(op, follow=lambda known: _by_long_way(finishes, known, now))


def _by_long_way(
    finishes: Sequence[tuple[Claimed, Change]], known: dict[str, Verdict], now: int | None
) -> Op[dict[str, Verdict]] | None:
    """Finish what the short way of keys has left: something may have to run next under its key."""
    left = [(job, end) for job, end in finishes if known[job.id] is Verdict.LOST and way_of(job, end) is Way.KEYED]
    if not left:
        return None
    op = _finish({}, [_change(job, change) for job, change in left], left, now)
    return replace(op, read=lambda rows: known | op.read(rows), wakes=True, follow=lambda last: _settle(left, last))


def _settle(finishes: Sequence[tuple[Claimed, Change]], known: dict[str, Verdict]) -> Op[dict[str, Verdict]] | None:
    """Ask what became of the writes that changed nothing. A fresh look: the first may have been too early."""
    lost = [job for job, _ in finishes if known.get(job.id, Verdict.LOST) is Verdict.LOST]
    if not lost:
        return None
    op = settle(Held(job.id, job.token) for job in lost)
    return replace(op, read=lambda rows: known | op.read(rows))


def settle(held: Iterable[Held]) -> Op[dict[str, Verdict]]:
    """Ask what became of jobs by their tokens: ended by them, vanished, or (still running, too) neither."""

    def read(rows: Rows) -> dict[str, Verdict]:
        # Of a job that is named under two tokens, what one of them has written counts.
        return {job_id: Verdict(verdict) for job_id, verdict in sorted(rows, key=lambda row: row[1] != Verdict.LOST)}

    return Op("settle", ("settle",), {"held": _held(held)}, read, writes=False)


# Upkeep


def expired_leases(limit: int = 1000, *, now: int | None = None) -> Op[list[Sighting]]:
    """See which leases have ended. Only one that is seen twice is taken."""
    return Op(
        "expired_leases",
        ("expired_leases",),
        {"limit": limit, "now": now},
        lambda rows: [Sighting(*row) for row in rows],
        writes=False,
    )


def rescue(seen: Sequence[Sighting], *, now: int | None = None) -> Op[dict[str, State]]:
    """Take jobs from workers that stopped beating: back to ready, or dead where they have had their chances."""
    seen = list(dict.fromkeys(seen))
    records = [{"id": s.id, "token": s.token, "lease_until": s.lease_until} for s in seen]
    params = {"seen": json_text(records), "now": now, **ending([s.id for s in seen])}
    sections = ("rescue", "crashed_attempts", *TAIL)
    return _repeatable("rescue", sections, params, _states, look="rescued", wakes=True)


def promote(queue: str, limit: int = 1000, *, retries: bool = True, now: int | None = None) -> Op[int]:
    """Make what is due ready, so that a backlog stands in its order; answers how many.

    Where `retries` have a budget, they are left to the claims.
    """
    return Op("promote", ("promote",), {"queue": queue, "limit": limit, "retries": retries, "now": now}, len)


def park(queue: str, limit: int = 1000, *, now: int | None = None) -> Op[int]:
    """Set aside what stands at the head of a queue and no living worker that serves it knows; answers how many.

    It looks at the first `limit` rows only, so it is asked again until it answers 0.
    """
    params = {"queue": queue, "limit": limit, "reason": f"{PARKED}no worker knows this task", "now": now}
    return Op("park", ("park",), params, len)


def wake(versions: Mapping[str, int], queues: Iterable[str], limit: int = 1000) -> Op[int]:
    """Make parked jobs of these queues ready that a worker can run; answers how many.

    `versions` are the tasks it knows, each with the newest schema version it understands. Said at every beat: a worker
    that registers while another parks would otherwise not find what was parked at that moment.
    """
    params = {"versions": json_text(dict(versions)), "queues": json_text(sorted(queues)), "limit": limit}
    return Op("wake", ("wake",), params, len, wakes=True)


def next_due(queue: str, *, now: int | None = None) -> Op[int | None]:
    """Read in how many milliseconds the next scheduled job of a queue is due; None: there is none."""
    return Op("next_due", ("next_due",), {"queue": queue, "now": now}, lambda rows: rows[0][0], writes=False)


def expirable(limit: int = 1000, *, now: int | None = None) -> Op[list[str]]:
    """Find jobs that were to start by now and have not."""
    return Op("expirable", ("expirable",), {"limit": limit, "now": now}, _ids, writes=False)


def expire(ids: Sequence[str], *, now: int | None = None) -> Op[list[str]]:
    """End jobs that did not start in time as cancelled, reason `expired`."""
    return _repeatable("expire", ("expire", *TAIL), {"now": now, **ending(_uuids(ids))}, _ids, look="cancelled")


PRUNABLE = ("results", "done", "keys", "events", "fires", "batches", "workers", "lanes")


def prune(what: str, limit: int = 1000, *, keep_ms: int = KEEP_MS, now: int | None = None) -> Op[int]:
    """Remove one chunk of what has had its time; answers how much that was."""
    if what not in PRUNABLE:
        raise ConfigError(f"cannot prune {what!r}; what can be pruned: {', '.join(PRUNABLE)}")
    params = {"limit": limit, "keep_ms": keep_ms, "now": now}
    return Op("prune", (f"prune_{what}",), params, len)


def prunable(*, keep_ms: int = KEEP_MS, now: int | None = None) -> Op[dict[str, int]]:
    """Count what `prune` would take now, by its names; no count goes beyond `MANY` + 1.

    Results and finished jobs are counted among the first 20,002 that have either: where one of the two counts has
    stopped, the other is what was seen until then.
    """
    params = {"keep_ms": keep_ms, "enough": MANY + 1, "now": now}
    return Op(
        "prunable",
        ("uncompiled", "prunable"),
        params,
        lambda rows: dict(zip(PRUNABLE, rows[0], strict=True)),
        writes=False,
    )


# People


def cancel(
    ids: Sequence[str], *, by: str | None = None, why: str | None = None, now: int | None = None
) -> Op[dict[str, State]]:
    """End jobs that do not run, and ask those that do. What had ended before is not in the answer."""
    params = {"now": now, **ending(_uuids(ids), by, why)}
    return _repeatable("cancel", ("cancel", *TAIL), params, _states, look="cancelled")


def retry(
    ids: Sequence[str], *, by: str | None = None, why: str | None = None, now: int | None = None
) -> Op[dict[str, State]]:
    """Make jobs due now that were put off or wait for something. What is in another state is not in the answer."""
    params = {"now": now, **ending(_uuids(ids), by, why)}
    return _repeatable("retry", ("retry",), params, _states, look="retried", wakes=True)


def replay(
    replays: Sequence[Replay],
    *,
    by: str | None = None,
    why: str | None = None,
    key_ttl_ms: int = KEY_TTL_MS,
    now: int | None = None,
) -> Op[list[Replayed]]:
    """Run dead jobs again under new ids, with their steps and their lineage; a second asking gets the first's."""
    for replay in replays:
        if replay.payload is not None:
            codec.check_json(replay.payload, f"the payload of {replay.id}")
            codec.check_size(replay.payload, replay.id)
        if replay.key is not None:
            keys.check_key(replay.key)
    records = [
        {
            "id": uuid_text(replay.id),
            "new_id": replay.new_id,
            "key": replay.key,
            "payload": replay.payload,
            "fingerprint": None if replay.payload is None else keys.fingerprint(replay.payload),
            "force": int(replay.force),
        }
        for replay in reversed({uuid_text(replay.id): replay for replay in reversed(replays)}.values())
    ]
    params = {
        "replays": json_text(records),
        "by": _clean(by),
        "why": _clean(why),
        "key_ttl_ms": key_ttl_ms,
        "ids": json_text([record["new_id"] for record in records]),
        "now": now,
    }
    return Op("replay", ("replay", "hand_out"), params, _replayed, wakes=True)


def _replayed(rows: Rows) -> list[Replayed]:
    return [
        Replayed(
            id=old,
            new_id=replayed_as,
            first=replayed_as == new,
            state=None if state is None else State(state),
            key_holder=None if replayed_as else holder,
        )
        for old, new, state, replayed_as, holder in rows
    ]


def resolve(ids: Sequence[str], *, by: str, why: str, now: int | None = None) -> Op[list[str]]:
    """Mark dead and partial jobs as settled for good."""
    return _repeatable("resolve", ("resolve",), {"now": now, **ending(_uuids(ids), by, why)}, _ids, look="resolved")


def purge(
    ids: Sequence[str], *, by: str | None = None, why: str | None = None, now: int | None = None
) -> Op[list[str]]:
    """Delete dead jobs by hand, with their attempts and steps."""
    return _repeatable("purge", ("purge",), {"now": now, **ending(_uuids(ids), by, why)}, _ids, look="purged")


def pause(kind: str, name: str, *, by: str, why: str, until_ms: int | None = None, now: int | None = None) -> Op[None]:
    """Stop claims of a queue or a task, optionally only for a time."""
    params = {
        "kind": _kind(kind),
        "name": name,
        "by": _clean(by),
        "why": _clean(why),
        "until_ms": until_ms,
        "now": now,
    }
    return Op("pause", ("pause",), params, lambda rows: None)


def resume(kind: str, name: str, *, by: str, why: str, now: int | None = None) -> Op[bool]:
    """Let a paused queue or task go on. False: it was not paused."""
    params = {"kind": _kind(kind), "name": name, "by": _clean(by), "why": _clean(why), "now": now}
    return _repeatable("resume", ("resume",), params, bool, look="resumed", wakes=True)


def paused(*, now: int | None = None) -> Op[list[Pause]]:
    """List what is paused, by whom and why."""
    return Op("paused", ("paused",), {"now": now}, lambda rows: [Pause(*row) for row in rows], writes=False)


def hold(*, by: str, why: str, now: int | None = None) -> Op[HoldFigure]:
    """Keep everything from running in a database that was restored, until a person has looked.

    Jobs that ran wait, with their attempts given back; the queues that have jobs and all schedules are paused.
    """
    params = {"by": _clean(by), "why": _clean(why), "reason": f"{HELD}it ran when the backup was made", "now": now}
    return _repeatable("hold", ("hold",), params, _hold_figure, look="held")


def _hold_figure(rows: Rows) -> HoldFigure:
    return msgspec.json.decode(rows[-1][0], type=HoldFigure) if rows else HoldFigure(0, 0, 0)


def _kind(kind: str) -> str:
    if kind not in ("queue", "task"):
        raise ConfigError(f"cannot pause a {kind!r}: only a 'queue' or a 'task'")
    return kind


# Workers


def register(
    worker: str,
    *,
    host: str,
    pid: int,
    queues: Iterable[str],
    tasks: Iterable[str],
    schedules: Iterable[str] = (),
    beat_ms: int,
    slots: int = 1,
    succeeded: int = 0,
    failed: int = 0,
    now: int | None = None,
) -> Op[None]:
    """Say that a worker is alive, what it knows and what it has done so far; said again at every beat."""
    params = {
        "id": worker,
        "host": host,
        "pid": pid,
        "queues": json_text(sorted(queues)),
        "tasks": json_text(sorted(tasks)),
        "schedules": json_text(sorted(schedules)),
        "beat_ms": beat_ms,
        "slots": slots,
        "succeeded": succeeded,
        "failed": failed,
        "now": now,
    }
    return Op("register", ("register",), params, lambda rows: None, urgent=True)


def leave(worker: str) -> Op[None]:
    """Say that a worker has gone."""
    return Op("leave", ("leave",), {"id": worker}, lambda rows: None)


def workers(*, now: int | None = None) -> Op[list[WorkerRecord]]:
    """List the workers that have been heard of."""

    def read(rows: Rows) -> list[WorkerRecord]:
        return [
            WorkerRecord(
                id=worker,
                host=host,
                pid=pid,
                queues=_list(queues),
                tasks=_list(tasks),
                beat_ms=beat_ms,
                started_at=started_at,
                seen_at=seen_at,
                alive=seen_at > at - 3 * beat_ms,
                slots=slots,
                running=running,
                succeeded=succeeded,
                failed=failed,
            )
            for (
                worker, host, pid, queues, tasks, beat_ms, started_at, seen_at, slots, running, succeeded, failed, at
            ) in rows
        ]  # fmt: skip

    return Op("workers", ("workers",), {"now": now}, read, writes=False)


# Reading


def queues(*, now: int | None = None) -> Op[list[QueueFigure]]:
    """Say how full each queue is that has live jobs, a pause or a living worker, by name."""

    def read(rows: Rows) -> list[QueueFigure]:
        return sorted((QueueFigure(*row) for row in rows), key=lambda figure: figure.name)

    return Op("queues", ("uncompiled", "queues"), {"enough": MANY + 1, "now": now}, read, writes=False)


def parked() -> Op[list[ParkedFigure]]:
    """Count the jobs that wait for a worker that knows their task, by task and queue."""

    def read(rows: Rows) -> list[ParkedFigure]:
        return sorted((ParkedFigure(*row) for row in rows), key=lambda figure: (figure.task, figure.queue))

    return Op("parked", ("uncompiled", "parked"), {"enough": MANY + 1}, read, writes=False)


def get(job_id: str, *, now: int | None = None) -> Op[JobRecord | None]:
    """Read one job, live or finished."""
    page = listing(limit=1, now=now)
    params = {**page.params, "first": uuid_text(job_id), "last": uuid_text(job_id)}
    return Op("get", page.sections, params, lambda rows: _record(rows[0]) if rows else None, writes=False)


def listing(
    *,
    state: State | None = None,
    task: str | None = None,
    queue: str | None = None,
    batch_id: str | None = None,
    since: int | None = None,
    error: str | None = None,
    prefix: str | None = None,
    before: str | None = None,
    limit: int = 100,
    now: int | None = None,
) -> Op[list[JobRecord]]:
    """List jobs, newest first; for the next page give the last id of this one as `before`.

    `prefix` is how an id begins that a person has shortened, with its dashes or without.
    """
    first, last = id_range(prefix, before)
    params = {
        "state": state and state.value,
        "task": task,
        "queue": queue,
        "batch_id": batch_id and uuid_text(batch_id),
        "since": since,
        "error": error,
        "first": first,
        "last": last,
        "limit": limit,
        "now": now,
    }
    return Op("list", ("list",), params, _records, writes=False)


def id_range(prefix: str | None, before: str | None) -> tuple[str, str]:
    """Give the first and the last id that begin as a person has shortened one, and come before another."""
    first, last = _beginning_with(prefix or "")
    return first, last if before is None else min(last, _preceding(before))


def _beginning_with(prefix: str) -> tuple[str, str]:
    """Give the first and the last id that begin so. What no id begins with is that of no job."""
    digits = prefix.strip().replace("-", "").lower()
    if not _DIGITS.fullmatch(digits):
        return LAST_ID, FIRST_ID
    return uuid_text(digits.ljust(32, "0")), uuid_text(digits.ljust(32, "f"))


_DIGITS = re.compile(r"[0-9a-f]{0,32}")


def _preceding(job_id: str) -> str:
    return str(UUID(int=max(UUID(uuid_text(job_id)).int - 1, 0)))


def dead_list(
    *,
    task: str | None = None,
    queue: str | None = None,
    batch_id: str | None = None,
    error: str | None = None,
    since: int | None = None,
    until: int | None = None,
    partial: bool = False,
    all: bool = False,
    after: str = FIRST_ID,
    limit: int = 100,
    now: int | None = None,
) -> Op[list[JobRecord]]:
    """List dead jobs, oldest first, without those that were replayed or resolved unless `all`."""
    params = {
        "task": task,
        "queue": queue,
        "batch_id": batch_id and uuid_text(batch_id),
        "error": error,
        "since": since,
        "until": until,
        "partial": partial,
        "all": all,
        "after": uuid_text(after),
        "limit": limit,
        "now": now,
    }
    return Op("dead_list", ("dead_list",), params, _records, writes=False)


def dead_metrics(*, all: bool = False, now: int | None = None) -> Op[list[DeadFigure]]:
    """Count dead jobs by task and reason, with the age of the oldest."""

    def read(rows: Rows) -> list[DeadFigure]:
        return [DeadFigure(task, reason, count, moment - oldest) for task, reason, count, oldest, moment in rows]

    return Op("dead_metrics", ("dead_metrics",), {"all": all, "now": now}, read, writes=False)


def attempts(job_id: str) -> Op[list[Attempt]]:
    """Read the attempts of a job that did not succeed."""
    return Op(
        "attempts", ("attempts",), {"id": uuid_text(job_id)}, lambda rows: [Attempt(*row) for row in rows], writes=False
    )


def steps(job_id: str) -> Op[list[Step]]:
    """Read what a job's ledger says."""
    return Op("steps", ("steps",), {"id": uuid_text(job_id)}, lambda rows: [Step(*row) for row in rows], writes=False)


def events(*, job_id: str | None = None, after: int = 0, limit: int = 100) -> Op[list[Event]]:
    """Read the log of rare, meaningful things, oldest first."""
    params = {"after": after, "limit": limit} | ({} if job_id is None else {"job_id": uuid_text(job_id)})
    section = "events" if job_id is None else "job_events"
    return Op("events", (section,), params, lambda rows: [Event(*row) for row in rows], writes=False)


def why(job_id: str, *, now: int | None = None) -> Op[Why | None]:
    """Say why a job is not running: the first gate that is shut. None: no job has this id."""

    def read(rows: Rows) -> Why | None:
        return explain(facts_of(rows[0])) if rows else None

    return Op("why", ("why",), {"id": uuid_text(job_id), "now": now}, read, writes=False)


def clock() -> Op[int]:
    """Read the database's clock."""
    return Op("clock", ("clock",), {"now": None}, lambda rows: int(rows[0][0]), writes=False)


def _repeatable(
    name: str,
    sections: tuple[str, ...],
    params: Mapping[str, Any],
    read: Callable[[Rows], T],
    *,
    look: str,
    wakes: bool = False,
) -> Op[T]:
    """Make an operation that finds nothing left to do when repeated, and then looks for what it did before."""
    again = Op(name, (*sections, look), params, read, wakes=wakes)
    return replace(again, sections=sections, repeat=again)


def _records(rows: Rows) -> list[JobRecord]:
    return [_record(row) for row in rows]


def _record(row: Row) -> JobRecord:
    (
        job_id, task, queue, priority, state, payload, envelope, key, attempt, max_attempts, crashes, created_at,
        due_at, expires_at, worker, lease_until, heartbeat_at, progress_, progress_message, cancel_requested_at,
        finished_at, result, result_until, reason, error, batch_id, schedule, lane, origin, replay_of, replay_count,
        replayed_as, resolved_at, resolved_by, resolved_why, moment,
    ) = row  # fmt: skip
    carried = envelopes.unpack(envelope)
    expired = result_until is not None and result_until <= moment
    return JobRecord(
        id=job_id,
        task=task,
        queue=queue,
        priority=priority,
        state=State(state),
        payload=_decoded(payload),
        schema_version=carried.schema_version,
        correlation_id=carried.correlation_id or job_id,
        causation_id=carried.causation_id,
        subject=carried.subject,
        traceparent=carried.traceparent,
        payload_ref=carried.payload_ref,
        key=key,
        attempt=attempt,
        max_attempts=max_attempts,
        crashes=crashes,
        created_at=created_at,
        due_at=due_at,
        expires_at=expires_at,
        worker=worker,
        lease_until=lease_until,
        heartbeat_at=heartbeat_at,
        progress=progress_,
        progress_message=progress_message,
        cancel_requested_at=cancel_requested_at,
        finished_at=finished_at,
        result=None if expired or result is None else _decoded(result),
        result_until=result_until,
        reason=reason,
        error=error,
        batch_id=batch_id,
        schedule=schedule,
        lane=lane,
        origin=origin,
        replay_of=replay_of,
        replay_count=replay_count,
        replayed_as=replayed_as,
        resolved_at=resolved_at,
        resolved_by=resolved_by,
        resolved_why=resolved_why,
    )


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:  # written past us by hand: one such row must not hide the others
        return text


def uuid_text(job_id: str) -> str:
    """Spell an id as it is stored. What is no id at all is that of no job."""
    try:
        return str(UUID(job_id))
    except (ValueError, AttributeError, TypeError):
        return FIRST_ID


def _uuids(ids: Iterable[str]) -> list[str]:
    return [uuid_text(job_id) for job_id in ids]


def ending(
    ids: Sequence[str], by: str | None = None, why: str | None = None, *, batches: Iterable[str] = ()
) -> dict[str, Any]:
    """Give what the tail of every ending wants to know."""
    return {
        "ids": json_text(list(dict.fromkeys(ids))),
        "by": _clean(by),
        "why": _clean(why),
        "batches": json_text(sorted(batches)),
    }


def _held(held: Iterable[Held]) -> str:
    return json_text([{"id": one.id, "token": one.token} for one in held])


def _states(rows: Rows) -> dict[str, State]:
    return {job_id: State(state) for job_id, state in rows}


def _ids(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row[0] for row in rows))


def _list(text: str) -> tuple[str, ...]:
    return tuple(msgspec.json.decode(text))


def _clean(text: str | None) -> str | None:
    return text and failure.escape_text(text)


def json_text(records: Any) -> str:
    """Write what travels as one parameter."""
    return _json(records).decode()
