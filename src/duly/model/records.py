"""Records read from the database besides jobs: limits, pauses, workers, schedules, batches, counts."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import Struct

from duly.model.job import State


class TaskLimits(Struct, frozen=True):
    """How many jobs of a task, or of each of its keys, run at once and start within a window.

    `cap` and `rate_…` come from the code. `set_…` was set at run time and overrides them (0: no limit).
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
        """Whether a rate applies."""
        return bool(self.rate_count if self.set_rate_count is None else self.set_rate_count)


class Sighting(Struct, frozen=True):
    """A lease that was seen to have expired."""

    id: str
    token: int
    lease_until: int
    lease_ms: int
    worker: str


class Replayed(Struct, frozen=True):
    """The result of a replay. `new_id` is None if it was refused: `state` and `key_holder` give the cause."""

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
    """One row of the ledger: a step that a job has completed or started."""

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
    """One row of the audit log."""

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
    """The limits of a queue, who set them and why. None: this limit is not set.

    `depth` is how many jobs waited `depth_age_ms` ago; the count stops at `max_depth` + 1.
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
    """A worker that has registered, whether or not it is alive."""

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
    """How full a queue is. Counts stop at `MANY` + 1. `oldest_ms`: how long the oldest due job has waited."""

    name: str
    ready: int
    scheduled: int
    running: int
    waiting: int
    oldest_ms: int | None


class ParkedFigure(Struct, frozen=True):
    """Jobs of one task in one queue that wait for a worker that knows the task. The count stops at `MANY` + 1."""

    task: str
    queue: str
    count: int


class HoldFigure(Struct, frozen=True):
    """How much a hold stopped: running jobs, queues, schedules."""

    jobs: int
    queues: int
    schedules: int


class Catchup(StrEnum):
    """How due times are handled that no worker fired in time."""

    SKIP = "skip"  # fire the newest
    LAST = "last"  # fire the newest, with the others in `ctx.missed`
    ALL = "all"  # fire each


class Overlap(StrEnum):
    """How a due time is handled while an earlier run of the schedule has not ended."""

    ALLOW = "allow"
    SKIP = "skip"
    QUEUE = "queue"
    CANCEL_RUNNING = "cancel_running"


class ScheduleRecord(Struct, frozen=True):
    """A snapshot of a schedule. The field names are those of `--json`."""

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
    """One record of a schedule: a run, or consecutive misses from `due_at` to `until_at`."""

    schedule: str
    due_at: int
    until_at: int | None
    count: int
    outcome: str
    job_id: str | None
    reason: str | None
    at: int


class BatchRecord(Struct, frozen=True):
    """A batch and its progress. The field names are those of `--json`."""

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
        """Whether the batch is sealed and every job has ended. A replay of one of its jobs makes it incomplete."""
        return self.completed_at is not None and self.open == 0

    @property
    def success(self) -> bool | None:
        """Whether the batch succeeded, as `on_success` defines it. None before it is complete."""
        if not self.complete:
            return None
        # As in section `ended_callbacks`: in binary floating point 0.28 * 25 is slightly more than 7.
        return self.cancelled_at is None and self.succeeded + 0.000001 >= self.ok_at * self.total


class DeadFigure(Struct, frozen=True):
    """How many jobs of one task are dead for one reason."""

    task: str
    reason: str | None
    count: int
    oldest_ms: int
