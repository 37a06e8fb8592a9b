"""The job: its states, its form when it is enqueued and when it is claimed, and the record that users read.

Names that end in `_at` are moments in whole milliseconds UTC, by the clock of the database. Names that end in `_ms`
are durations.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import Struct


class State(StrEnum):
    """The state of a job. `docs/lifecycle.md` draws the transitions."""

    SCHEDULED = "scheduled"
    READY = "ready"
    RUNNING = "running"
    WAITING = "waiting"
    SUCCEEDED = "succeeded"
    PARTIAL = "partial"
    DEAD = "dead"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether this state is final, unless the job is replayed."""
        return self in ENDED


DAY_MS = 86_400_000
KEEP_MS = 7 * DAY_MS
RESULT_TTL_MS = DAY_MS
KEY_TTL_MS = 15 * DAY_MS

# Counts stop here. A higher value means "more than 10,000".
MANY = 10_000

# Prefix of the reason of a job that waits for a worker that knows its task.
PARKED = "parked: "

# Prefix of the reason of a job that an operator must release before it runs again.
HELD = "held: "

# The reason of a scheduled run that starts when the previous run has ended.
QUEUED = "queued: an earlier run of its schedule has not ended"

ENDED = frozenset({State.SUCCEEDED, State.PARTIAL, State.DEAD, State.CANCELLED})


class Missed(Struct, frozen=True):
    """The missed due times that one run of a schedule replaces: how many, the first and the last."""

    count: int
    since: int
    until: int


class Envelope(Struct, frozen=True):
    """Metadata that travels with a job beside its payload: its origin and its subject.

    `correlation_id` is None on a root job: its own id is the correlation id of every job it causes. `due_at` and
    `missed` belong to a run of a schedule: its due time by the rule, and the misses it replaces. `batch` is the batch
    that a callback reports on.
    """

    schema_version: int = 1
    correlation_id: str | None = None
    causation_id: str | None = None
    subject: str | None = None
    traceparent: str | None = None
    payload_ref: str | None = None
    due_at: int | None = None
    missed: Missed | None = None
    batch: str | None = None


class NewJob(Struct, frozen=True, gc=False):
    """One job to be enqueued. The client creates `id`, so a repeated enqueue finds the job it already added."""

    id: str
    payload: str
    key: str | None = None
    fingerprint: str | None = None
    envelope: Envelope = Envelope()
    lane: str | None = None


class Terms(Struct, frozen=True):
    """The part that all jobs of one enqueue share: the task and the options under which it runs.

    `key_window_ms` keeps the key from the enqueue on; it replaces `key_ttl_ms`, which counts from the end of the job.
    With `debounce_ms` the last call under a key runs, once no other call has come for this long.
    """

    task: str
    queue: str = "default"
    priority: int = 0
    max_attempts: int = 5
    lease_ms: int = 30_000
    delay_ms: int = 0
    due_at: int | None = None
    expires_ms: int | None = None
    expires_at: int | None = None
    keep_ms: int = KEEP_MS
    result_ttl_ms: int = RESULT_TTL_MS
    key_ttl_ms: int = KEY_TTL_MS
    key_window_ms: int | None = None
    debounce_ms: int | None = None
    batch_id: str | None = None
    schedule: str | None = None
    on_dead: str | None = None
    ordering_dead: str | None = None


class Claimed(Struct, frozen=True, gc=False, array_like=True):
    """A leased job: everything a worker needs to run it and to record its outcome."""

    id: str
    token: int
    task: str
    queue: str
    priority: int
    payload: str
    key: str | None
    attempt: int
    max_attempts: int
    crashes: int
    suspect: bool
    lease_ms: int
    lease_until: int
    due_at: int
    created_at: int
    keep_ms: int
    batch_id: str | None
    schedule: str | None
    replay_count: int
    cancel_requested_at: int | None
    origin: str | None = None
    lane: str | None = None
    envelope: Envelope = Envelope()


class Enqueued(Struct, frozen=True, gc=False):
    """The answer to an enqueue: the job that was added, or the one that holds the key already.

    `behind`: the job is added when the job that holds the key has ended.
    """

    id: str
    deduplicated: bool = False
    conflict: bool = False
    succeeded: bool = False
    result: str | None = None
    result_dropped: bool = False
    behind: bool = False


class JobRecord(Struct, frozen=True):
    """A snapshot of a job, live or finished. The field names are those of `--json`."""

    id: str
    task: str
    queue: str
    priority: int
    state: State
    payload: Any
    schema_version: int
    correlation_id: str
    causation_id: str | None
    subject: str | None
    traceparent: str | None
    payload_ref: str | None
    key: str | None
    attempt: int
    max_attempts: int
    crashes: int
    created_at: int
    due_at: int | None
    expires_at: int | None
    worker: str | None
    lease_until: int | None
    heartbeat_at: int | None
    progress: float | None
    progress_message: str | None
    cancel_requested_at: int | None
    finished_at: int | None
    result: Any
    result_until: int | None
    reason: str | None
    error: str | None
    batch_id: str | None
    schedule: str | None
    lane: str | None
    origin: str | None
    replay_of: str | None
    replay_count: int
    replayed_as: str | None
    resolved_at: int | None
    resolved_by: str | None
    resolved_why: str | None
