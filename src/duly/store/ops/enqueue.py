"""Operations that add jobs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, TypeVar

from duly.errors import ConfigError, StoreUnavailable
from duly.model import Enqueued, NewJob, Terms
from duly.rules import codec, failure, keys
from duly.rules import envelope as envelopes
from duly.store.op import HIGHEST_PRIORITY, LOWEST_PRIORITY, Held, Op, Rows, json_text

T = TypeVar("T")


def enqueue(
    terms: Terms | Accepted,
    jobs: Sequence[NewJob],
    *,
    parent: Held | None = None,
    checked: bool = False,
    now: int | None = None,
) -> Op[list[Enqueued]]:
    """Add jobs that share their terms; a job with a key is added only if the key is free.

    `parent` is the job whose handler enqueues. If its lease is lost, nothing is added and the answer is empty.
    `checked`: a task has made the jobs, so their ids are new and their payloads are checked.
    """
    accepted = terms if isinstance(terms, Accepted) else accept(terms)
    terms = accepted.terms
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
    """Make an enqueue that adds nothing and returns `lost` if the lease of `parent` is lost."""

    def read(rows: Rows) -> T:
        return op.read(rows[1:]) if rows and len(rows[0]) == 1 else lost

    params = {**op.params, "parent_id": parent.id, "parent_token": parent.token}
    again = op.again
    repeat = again and replace(again, sections=("hold_parent", *again.sections), params=params, read=read)
    return replace(op, sections=("hold_parent", *op.sections), params=params, read=read, repeat=repeat)


class Accepted(NamedTuple):
    """Checked terms, with the parameters of the statements that add a list of jobs and a single one."""

    terms: Terms
    of_many: dict[str, Any]
    of_one: dict[str, Any]


def accept(terms: Terms) -> Accepted:
    """Check terms, once for all enqueues that share them."""
    _check(terms)
    return Accepted(terms, _terms(terms), _own_terms(terms))


def _check(terms: Terms) -> None:
    """Refuse terms that one of the stores could not keep, so that all stores refuse the same."""
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
    "priority": LOWEST_PRIORITY, "max_attempts": 1, "lease_ms": 1, "delay_ms": 0, "due_at": 0, "expires_ms": 0,
    "expires_at": 0, "keep_ms": 0, "result_ttl_ms": 0, "key_ttl_ms": 0, "key_window_ms": 0, "debounce_ms": 0,
}  # fmt: skip
_MOST = {"priority": HIGHEST_PRIORITY, "max_attempts": _INT, "lease_ms": _INT}


def _enqueue_plain(accepted: Accepted, jobs: Sequence[NewJob], now: int | None, *, guarded: bool) -> Op[list[Enqueued]]:
    terms, jobs = accepted.terms, tuple(jobs)  # read again after a lost answer
    ordered = in_order(terms)
    added = [Enqueued(job.id) for job in jobs]

    def read(rows: Rows) -> list[Enqueued]:
        return added

    def again() -> Op[list[Enqueued]]:
        ids = json_text([job.id for job in jobs])
        params = {**accepted.of_many, "payloads": _payloads(jobs), "ids": ids, "now": now}
        return Op("enqueue", ("enqueue_again", "undo_finished", *ordered), params, read, wakes=True)

    # If success leaves no trace, a lost enqueue looks like a finished one.
    once = terms.keep_ms == 0
    if len(jobs) == 1 and not (guarded or ordered):  # a statement for one job costs less
        one = {**accepted.of_one, **_record_of(jobs[0]), "now": now}
        return Op("enqueue", ("enqueue_one",), one, read, wakes=True, once=once, repeat=again, alike=accepted.terms)
    repeated = again()
    alike = None if guarded or ordered else accepted.terms
    return replace(repeated, sections=("enqueue", *ordered), once=once, repeat=repeated, alike=alike)


def _payloads(jobs: Sequence[NewJob]) -> str:
    """Write jobs as {[lane, envelope]: {id: payload}}: most jobs of one list share lane and envelope."""
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
    """Write the lane and envelope that jobs share, as a name in JSON."""
    return '"[null,null]"' if lane is envelope is None else json_text(json_text([lane, envelope]))


def listed(op: Op[Any]) -> str:
    """Write the jobs of a plain enqueue as the inside of `payloads`; an enqueue of one job has none yet."""
    params = op.params
    if "payloads" in params:
        return str(params["payloads"][1:-1])
    return f"{_in_common(params['lane'], params['envelope'])}:{json_text({params['id']: params['payload']})}"


def in_order(terms: Terms) -> tuple[str, ...]:
    """Return the sections that give jobs their places, if their lanes keep an order."""
    return ("hand_out",) if terms.ordering_dead is not None else ()


def _enqueue_keyed(accepted: Accepted, jobs: Sequence[NewJob], now: int | None) -> Op[list[Enqueued]]:
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


# How often a debounce is repeated that found another locked job under its key each time.
DEBOUNCE_TRIES = 10


def _debounce(terms: Terms, jobs: Sequence[NewJob], parent: Held | None, now: int | None) -> Op[list[Enqueued]]:
    """Run one job with the arguments of the last call, when no call under its key has come for a while."""
    if len(jobs) != 1:
        raise ConfigError(f"{terms.task}: debounce= is for one job with a key at a time, not for {len(jobs)}")
    if terms.batch_id is not None or terms.key_window_ms is not None or terms.delay_ms or terms.due_at is not None:
        raise ConfigError(f"{terms.task}: debounce= cannot be combined with a batch, unique_for=, delay= or at=")
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
    """Lock the job that holds the key, then the key, as every ending does; then decide."""
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
        f"enqueue: another job took the key {key!r} of {task} during each of several tries to debounce it. "
        "Try again; on your own connection, roll back first"
    )
    error.locked = True
    raise error
