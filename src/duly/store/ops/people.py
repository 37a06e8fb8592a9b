"""Operations that people start: cancel, retry, replay, resolve, purge, pause, hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from duly.errors import ConfigError
from duly.model import HELD, KEY_TTL_MS, HoldFigure, Pause, Replayed, State
from duly.rules import codec, keys
from duly.store.op import TAIL, Op, Rows, clean, distinct, ending, json_text, repeatable, states, uuid_text, uuid_texts


class Replay(NamedTuple):
    """One dead job to run again under a new id, as it was or with another key or payload.

    If a key is given to a job that had none, give the payload too: the key stores its fingerprint.
    """

    id: str
    new_id: str
    key: str | None = None
    payload: str | None = None
    force: bool = False


def cancel(
    ids: Sequence[str], *, by: str | None = None, why: str | None = None, now: int | None = None
) -> Op[dict[str, State]]:
    """Cancel jobs that are not running, and ask running ones to stop. The answer leaves out jobs that had ended."""
    params = {"now": now, **ending(uuid_texts(ids), by, why)}
    return repeatable("cancel", ("cancel", *TAIL), params, states, look="cancelled")


def retry(
    ids: Sequence[str], *, by: str | None = None, why: str | None = None, now: int | None = None
) -> Op[dict[str, State]]:
    """Make scheduled or waiting jobs due now. The answer leaves out jobs in other states."""
    params = {"now": now, **ending(uuid_texts(ids), by, why)}
    return repeatable("retry", ("retry",), params, states, look="retried", wakes=True)


def replay(
    replays: Sequence[Replay],
    *,
    by: str | None = None,
    why: str | None = None,
    key_ttl_ms: int = KEY_TTL_MS,
    now: int | None = None,
) -> Op[list[Replayed]]:
    """Run dead jobs again under new ids, with their steps and lineage; a repetition returns the first replay."""
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
        "by": clean(by),
        "why": clean(why),
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
    return repeatable(
        "resolve", ("resolve",), {"now": now, **ending(uuid_texts(ids), by, why)}, distinct, look="resolved"
    )


def purge(
    ids: Sequence[str], *, by: str | None = None, why: str | None = None, now: int | None = None
) -> Op[list[str]]:
    """Delete dead jobs by hand, with their attempts and steps."""
    return repeatable("purge", ("purge",), {"now": now, **ending(uuid_texts(ids), by, why)}, distinct, look="purged")


def pause(kind: str, name: str, *, by: str, why: str, until_ms: int | None = None, now: int | None = None) -> Op[None]:
    """Stop claims of a queue or a task, optionally only for a time."""
    params = {
        "kind": _kind(kind),
        "name": name,
        "by": clean(by),
        "why": clean(why),
        "until_ms": until_ms,
        "now": now,
    }
    return Op("pause", ("pause",), params, lambda rows: None)


def resume(kind: str, name: str, *, by: str, why: str, now: int | None = None) -> Op[bool]:
    """Resume a paused queue or task. False: it was not paused."""
    params = {"kind": _kind(kind), "name": name, "by": clean(by), "why": clean(why), "now": now}
    return repeatable("resume", ("resume",), params, bool, look="resumed", wakes=True)


def paused(*, now: int | None = None) -> Op[list[Pause]]:
    """List the pauses of queues and tasks."""
    return Op("paused", ("paused",), {"now": now}, lambda rows: [Pause(*row) for row in rows], writes=False)


def hold(*, by: str, why: str, now: int | None = None) -> Op[HoldFigure]:
    """Prevent jobs from running in a restored database, until an operator has checked it.

    Jobs that were running now wait, without counting the attempt. Queues that have jobs and all schedules are paused.
    """
    params = {"by": clean(by), "why": clean(why), "reason": f"{HELD}it ran when the backup was made", "now": now}
    return repeatable("hold", ("hold",), params, _hold_figure, look="held")


def _hold_figure(rows: Rows) -> HoldFigure:
    return msgspec.json.decode(rows[-1][0], type=HoldFigure) if rows else HoldFigure(0, 0, 0)


def _kind(kind: str) -> str:
    if kind not in ("queue", "task"):
        raise ConfigError(f"cannot pause a {kind!r}: only a 'queue' or a 'task'")
    return kind
