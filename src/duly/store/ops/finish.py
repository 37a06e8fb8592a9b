"""Operations that record how attempts ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import chain
from typing import Any

from duly.model import PARKED, Change, Claimed, State, Verdict
from duly.rules import codec
from duly.store.op import TAIL, Finish, Held, Op, Rows, clean, ending, held_text, json_text


def finish(
    finishes: Sequence[tuple[Claimed, Change]], *, borrowed: bool = False, now: int | None = None
) -> Op[dict[str, Verdict]]:
    """Record how attempts ended, each fenced by its token.

    Successes take a short way. Record different ways (`way_of`) separately: together, all rows are locked first.
    `borrowed` is for the connection of a caller. There, every end takes the long way. The short ways count the rows
    that the last statement changed, and a caller's connection may have run another one since.
    """
    short: defaultdict[Way, defaultdict[int, dict[str, str | None]]] = defaultdict(lambda: defaultdict(dict))
    rest: list[dict[str, Any]] = []
    ways = [way_of(job, change) for job, change in finishes]
    # Together with others it would lock its batch before their keys; every ending locks keys first.
    by_batch_alone = set(ways) == {Way.BATCHED}
    for (job, change), way in zip(finishes, ways, strict=True):
        if change.result is not None:
            codec.check_json(change.result, f"the result of {job.task}")
        if borrowed or way is _LONG_WAY or (way is _BATCHED and not by_batch_alone):
            rest.append(_change(job, change))
        else:
            short[way][job.token][job.id] = change.result
    # A call that was debounced behind a key may be due when the caller commits.
    wakes = borrowed and any(job.key is not None for job, _ in finishes)
    op = _finish(short, rest, finishes, now, wakes=wakes)
    if not any(change["error"] for change in rest):
        return op
    bare = [_without_texts(change) for change in rest]
    return replace(op, bare=lambda: _finish(short, bare, finishes, now, wakes=wakes))


class Way(StrEnum):
    """The statements by which the end of an attempt is recorded: most successes need fewer."""

    PLAIN = "plain"
    KEYED = "keyed"
    BATCHED = "batched"
    LONG = "long"


# Python 3.11 reads a member of an enum ten times slower than a name, and this is read for every job.
_SUCCEEDED, _RECORDED = State.SUCCEEDED, Verdict.RECORDED
_PLAIN, _KEYED, _BATCHED, _LONG_WAY = Way


def way_of(job: Claimed, change: Change) -> Way:
    """Return the way by which an end is recorded."""
    if change.state is not _SUCCEEDED or job.schedule is not None:
        return _LONG_WAY
    if job.key is not None:
        return _KEYED if job.keep_ms > 0 and job.batch_id is None else _LONG_WAY
    # Earlier attempts left rows, which a success with `keep=0` has to delete too.
    if job.keep_ms == 0 and job.attempt > 1:
        return _LONG_WAY
    return _PLAIN if job.batch_id is None else _BATCHED


def _finish(
    short: Mapping[Way, Mapping[int, Mapping[str, str | None]]],
    rest: list[dict[str, Any]],
    finishes: Sequence[tuple[Claimed, Change]],
    now: int | None,
    *,
    wakes: bool = False,
) -> Op[dict[str, Verdict]]:
    sections: tuple[str, ...] = ()
    params: dict[str, Any] = {"now": now}
    if Way.PLAIN in short:
        sections += ("finish_plain", "ends_written")
    if Way.KEYED in short:
        sections += ("finish_keyed", "ends_written")
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
    wakes = wakes or any(change["state"] == "ready" for change in rest)

    def read(rows: Rows) -> dict[str, Verdict]:
        return _recorded(rows, short)

    return Op("finish", sections, params, read, wakes=wakes, follow=lambda answer: _further(finishes, answer, now))


def release(jobs: Iterable[Claimed], *, now: int | None = None) -> Op[dict[str, Verdict]]:
    """Return jobs to their queue unfinished, without counting the attempt."""
    change = Change(State.READY, give_back_attempt=True)
    return finish([Finish(job, change) for job in jobs], now=now)


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
        "reason": clean(change.reason),
        "kind": error and clean(error.kind),
        "error": error and clean(f"{error.kind}: {error.message}"),
        "traceback": error and clean(error.traceback),
        "crashed": int(change.crashed),
        "parked": job.envelope.schema_version if _parks(change) else None,
    }


def _parks(change: Change) -> bool:
    return change.state is State.WAITING and (change.reason or "").startswith(PARKED)


def _without_texts(change: dict[str, Any]) -> dict[str, Any]:
    return {**change, "reason": None, "error": change["kind"], "traceback": None}


def _recorded(rows: Rows, short: Mapping[Way, Mapping[int, Mapping[str, Any]]]) -> dict[str, Verdict]:
    """Read which ends were recorded. The long way returns ids, the short ways only a count.

    If the count is too low, none of them is taken as recorded here, and `settle` reads the result of each.
    """
    by_token = chain.from_iterable(ends.values() for ends in short.values())
    recorded = dict.fromkeys(chain.from_iterable(by_token), _RECORDED)  # two tokens may name the same id
    if sum(row[0] for row in rows if isinstance(row[0], int)) != len(recorded):
        recorded = {}
    return recorded | dict.fromkeys([row[0] for row in rows if isinstance(row[0], str)], _RECORDED)


def _further(
    finishes: Sequence[tuple[Claimed, Change]], answer: dict[str, Verdict], now: int | None
) -> Op[dict[str, Verdict]] | None:
    """Settle ends that are not known to be recorded, then record those that need the long way."""
    op = _settle(finishes, answer)
    return op and replace(op, follow=lambda known: _by_long_way(finishes, known, now))


def _by_long_way(
    finishes: Sequence[tuple[Claimed, Change]], known: dict[str, Verdict], now: int | None
) -> Op[dict[str, Verdict]] | None:
    """Finish the jobs that the short way for keys left out: another job may have to run next under the key."""
    left = [(job, end) for job, end in finishes if known[job.id] is Verdict.LOST and way_of(job, end) is Way.KEYED]
    if not left:
        return None
    op = _finish({}, [_change(job, change) for job, change in left], left, now, wakes=True)
    return replace(op, read=lambda rows: known | op.read(rows), follow=lambda last: _settle(left, last))


def _settle(finishes: Sequence[tuple[Claimed, Change]], known: dict[str, Verdict]) -> Op[dict[str, Verdict]] | None:
    """Read the results of writes that changed nothing. A new statement, because the first may have read too early."""
    lost = [job for job, _ in finishes if known.get(job.id, Verdict.LOST) is Verdict.LOST]
    if not lost:
        return None
    op = settle(Held(job.id, job.token) for job in lost)
    return replace(op, read=lambda rows: known | op.read(rows))


def settle(held: Iterable[Held]) -> Op[dict[str, Verdict]]:
    """Read the results of jobs by their tokens: ended by the token, deleted, or lost (also if still running)."""

    def read(rows: Rows) -> dict[str, Verdict]:
        # If two tokens name a job, the one that has written counts.
        return {job_id: Verdict(verdict) for job_id, verdict in sorted(rows, key=lambda row: row[1] != Verdict.LOST)}

    return Op("settle", ("settle",), {"held": held_text(held)}, read, writes=False)
