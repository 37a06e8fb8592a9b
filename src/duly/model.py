"""The nouns: what a job is, how an attempt can end and what is then written.

Times end in `_at` and are whole milliseconds UTC by the database's clock; durations end in `_ms`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeAlias

from msgspec import Struct


class State(StrEnum):
    """Where a job stands. `docs/lifecycle.md` draws the arrows."""

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
        """Whether nothing more happens to a job in this state by itself."""
        return self in ENDED


DAY_MS = 86_400_000
KEEP_MS = 7 * DAY_MS
RESULT_TTL_MS = DAY_MS
KEY_TTL_MS = 15 * DAY_MS

# Where counting stops: whoever reads a figure above it knows that there are more.
MANY = 10_000

# How the reason of a job begins that waits only until a worker comes that can run it.
PARKED = "parked: "

# How the reason of a job begins that a person is to look at before it runs again.
HELD = "held: "

# The reason of a run that begins when the one before it has ended.
QUEUED = "queued: an earlier run of its schedule has not ended"

ENDED = frozenset({State.SUCCEEDED, State.PARTIAL, State.DEAD, State.CANCELLED})


class Missed(Struct, frozen=True):
    """The due times that one run of a schedule stands for beside its own: how many, the first and the last."""

    count: int
    since: int
    until: int


class Envelope(Struct, frozen=True):
    """What travels with a job beside its payload: where it came from and what it is about.

    `correlation_id` is None on a root job, whose own id then is the correlation id of all it causes. `due_at` and
    `missed` are those of a run of a schedule: when it was due by its rule, and what it stands for. `batch` is the one
    that a callback tells of.
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
    """One job to be enqueued. `id` is made by the client, so that who asks again can be told that it was added."""

    id: str
    payload: str
    key: str | None = None
    fingerprint: str | None = None
    envelope: Envelope = Envelope()
    lane: str | None = None


class Terms(Struct, frozen=True):
    """What all jobs of one enqueue have in common: the task, and the terms on which it runs.

    `key_window_ms` keeps the key from the enqueue on, in place of `key_ttl_ms` from the end on. With `debounce_ms` the
    last of the calls under a key counts, once no other has come for so long.
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


class Succeeded(Struct, frozen=True):
    """The handler returned; `result` is JSON text, None for no result."""

    result: str | None = None


class PartlyDone(Struct, frozen=True):
    """Some of the job's channels were delivered and none is left to try."""

    reason: str
    result: str | None = None


class Failed(Struct, frozen=True):
    """The handler raised, or did not end in time."""

    error: Failure
    retry: bool = True
    after_ms: int | None = None
    reason: str | None = None


class Crashed(Struct, frozen=True):
    """The process in which the job ran alone died of it, and its worker lives to tell."""

    error: Failure


class Snoozed(Struct, frozen=True):
    """The handler asks to be called again later; the attempt does not count."""

    after_ms: int


class Cancelled(Struct, frozen=True):
    """The handler, or a person through it, gave the job up."""

    reason: str


class Waiting(Struct, frozen=True):
    """The job waits for something that is not a time; `timeout_ms` bounds the wait. The attempt does not count."""

    reason: str
    timeout_ms: int | None = None


class Released(Struct, frozen=True):
    """The worker gives the job back unfinished; the attempt does not count."""


Outcome: TypeAlias = Succeeded | PartlyDone | Failed | Crashed | Snoozed | Cancelled | Waiting | Released


class Failure(Struct, frozen=True):
    """Why an attempt did not succeed: what a person reads first, and the traceback."""

    kind: str
    message: str
    traceback: str | None = None


class Change(Struct, frozen=True):
    """What is written when an attempt ends: what `lifecycle.decide` makes of an outcome.

    A job that goes waiting for a reason that begins with `PARKED` is parked: `ops.wake` brings it back.
    """

    state: State
    after_ms: int | None = None
    give_back_attempt: bool = False
    result: str | None = None
    reason: str | None = None
    error: Failure | None = None
    crashed: bool = False


class Claimed(Struct, frozen=True, gc=False, array_like=True):
    """A job on lease: all that a worker needs to run it and to record how it ended."""

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


class TaskLimits(Struct, frozen=True):
    """How many jobs of a task, or of each key of it, run at once and begin in a window.

    First what its code says, then what was set at run time and goes before it (0: no limit), by whom and why.
    """

    task: str
    cap: int | None = None
    rate_count: int | None = None
    rate_ms: int | None = None
    set_cap: int | None = None
    set_rate_count: int | None = None
    set_rate_ms: int | None = None
    set_at: int | None = None
    set_by: str | None = None
    set_why: str | None = None

    @property
    def is_rated(self) -> bool:
        """Whether a rate holds."""
        return bool(self.rate_count if self.set_rate_count is None else self.set_rate_count)


class Verdict(StrEnum):
    """What became of a write that named a token.

    Of a list of which not all was recorded, what was recorded may be answered ALREADY or GONE too.
    """

    RECORDED = "recorded"
    ALREADY = "already"
    GONE = "gone"
    LOST = "lost"


class JobRecord(Struct, frozen=True):
    """A job as it was when it was read, live or finished. The field names are those of `--json`."""

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


class Enqueued(Struct, frozen=True, gc=False):
    """What an enqueue found or made: the job to look for, and whether it was there before.

    `behind`: it is added when the job has ended that holds the key.
    """

    id: str
    deduplicated: bool = False
    conflict: bool = False
    succeeded: bool = False
    result: str | None = None
    result_dropped: bool = False
    behind: bool = False


class Sighting(Struct, frozen=True):
    """A lease that was seen to have ended."""

    id: str
    token: int
    lease_until: int
    lease_ms: int
    worker: str


class Replayed(Struct, frozen=True):
    """What a replay came to. `new_id` is None where it was refused: see `state` and `key_holder`."""

    id: str
    new_id: str | None
    first: bool
    state: State | None
    key_holder: str | None


class Attempt(Struct, frozen=True):
    """One attempt that did not succeed."""

    job_id: str
    attempt: int
    at: int
    worker: str | None
    outcome: str
    error: str | None
    traceback: str | None


class Step(Struct, frozen=True):
    """One row of the ledger: something a job has done, or has begun."""

    job_id: str
    name: str
    kind: str
    state: str
    attempt: int
    key: str | None
    result: str | None
    error: str | None
    created_at: int
    changed_at: int


class Event(Struct, frozen=True):
    """One row of the log of rare, meaningful things."""

    id: int
    at: int
    name: str
    job_id: str | None
    subject: str | None
    by: str | None
    why: str | None
    data: str | None


class Pause(Struct, frozen=True):
    """A queue or a task that is paused."""

    kind: str
    name: str
    paused_at: int
    paused_by: str
    paused_why: str
    paused_until: int | None


class Limit(Struct, frozen=True):
    """What a queue was told, by whom and why; None where it was not.

    `depth` is how many jobs waited `depth_age_ms` ago, counted no further than `max_depth` + 1.
    """

    kind: str
    name: str
    max_depth: int | None
    depth: int | None
    depth_at: int | None
    ageing_ms: int | None
    retry_share: float | None
    set_at: int
    set_by: str
    set_why: str
    depth_age_ms: int | None


class WorkerRecord(Struct, frozen=True):
    """A worker that has been heard of."""

    id: str
    host: str
    pid: int
    queues: tuple[str, ...]
    tasks: tuple[str, ...]
    beat_ms: int
    started_at: int
    seen_at: int
    alive: bool
    slots: int
    running: int
    succeeded: int
    failed: int


class QueueFigure(Struct, frozen=True):
    """How full a queue is; no count goes beyond `MANY` + 1. `oldest_ms`: how long a due job has been waiting."""

    name: str
    ready: int
    scheduled: int
    running: int
    waiting: int
    oldest_ms: int | None


class ParkedFigure(Struct, frozen=True):
    """Jobs of one task in one queue that wait for a worker that knows it; no count goes beyond `MANY` + 1."""

    task: str
    queue: str
    count: int


class HoldFigure(Struct, frozen=True):
    """What a hold stopped: jobs that ran, queues, schedules."""

    jobs: int
    queues: int
    schedules: int


class Catchup(StrEnum):
    """What becomes of due times that nobody fired in time."""

    SKIP = "skip"  # the newest is fired
    LAST = "last"  # the newest is fired and told of the others
    ALL = "all"  # each is fired


class Overlap(StrEnum):
    """What becomes of a due time while an earlier run of the schedule has not ended."""

    ALLOW = "allow"
    SKIP = "skip"
    QUEUE = "queue"
    CANCEL_RUNNING = "cancel_running"


class ScheduleRecord(Struct, frozen=True):
    """A schedule as it was when it was read. The field names are those of `--json`."""

    name: str
    task: str
    mode: str
    spec: str
    tz: str
    interval_ms: int | None
    anchor_at: int | None
    catchup: Catchup
    grace_ms: int | None
    overlap: Overlap
    jitter_ms: int
    pause_after: int | None
    terms: dict[str, Any]
    payload: Any
    schema_version: int
    subject: str | None
    in_code: bool
    revision: int
    created_at: int
    changed_at: int
    next_at: int | None
    last_at: int | None
    dead_runs: int
    paused_at: int | None
    paused_by: str | None
    paused_why: str | None


class FireRecord(Struct, frozen=True):
    """One thing that came of a schedule: a run, or a run of misses from `due_at` to `until_at`."""

    schedule: str
    due_at: int
    until_at: int | None
    count: int
    outcome: str
    job_id: str | None
    reason: str | None
    at: int


class BatchRecord(Struct, frozen=True):
    """A batch and how far it is. The field names are those of `--json`."""

    id: str
    name: str
    key: str | None
    created_at: int
    sealed_at: int | None
    completed_at: int | None
    cancelled_at: int | None
    cancelled_by: str | None
    cancelled_why: str | None
    first_dead_at: int | None
    ok_at: float
    pending: int
    running: int
    succeeded: int
    partial: int
    dead: int
    cancelled: int
    total: int
    percent: float

    @property
    def open(self) -> int:
        """How many jobs have not ended."""
        return self.pending + self.running

    @property
    def complete(self) -> bool:
        """Whether nothing is added any more and everything has ended. One that was replayed since is not."""
        return self.completed_at is not None and self.open == 0

    @property
    def success(self) -> bool | None:
        """Whether it is a success, as `on_success` counts it; None before it is complete."""
        if not self.complete:
            return None
        # As in section `ended_callbacks`: 0.28 of 25 is a little more than 7 where numbers are binary.
        return self.cancelled_at is None and self.succeeded + 0.000001 >= self.ok_at * self.total


class DeadFigure(Struct, frozen=True):
    """Dead jobs of one task for one reason."""

    task: str
    reason: str | None
    count: int
    oldest_ms: int
