"""Every exception duly raises on purpose.

DulyError
├── ConfigError            a setting, option or URL is not valid; raised before anything is written
├── PayloadError           the arguments or the payload cannot be stored
│   ├── BadArguments       the arguments do not fit the handler's signature
│   └── PayloadTooLarge    more than 96,000 bytes, and no blob store is set
├── JobError               something about one job (`.job_id`)
│   ├── JobNotFound        no job has this id
│   ├── JobDead            its result was asked for, but it ended dead
│   ├── JobCancelled       its result was asked for, but it was cancelled
│   ├── JobTimeout         the handler ran longer than its timeout
│   ├── ResultExpired      it succeeded, but the result is no longer kept
│   ├── LeaseLost          another worker owns this job now; nothing was written
│   ├── NotReplayable      only dead, partial and cancelled jobs are replayed; a success only by force
│   └── TransitionRefused  no arrow leads from the job's state to the one asked for
├── ScheduleNotFound       no schedule has this name
├── ScheduleExists         another schedule with this name exists
├── BatchNotFound          no batch has this id
├── BatchSealed            the batch takes no more jobs
├── KeyConflict            the key is taken by a job with another payload (`.existing_id`)
├── QueueFull              the queue has reached its depth limit (`.queue`, `.enqueued`)
└── StoreError             the database failed (`__cause__` is the driver's own error)
    ├── StoreUnavailable   it cannot be reached now; nothing was written; retry later
    ├── AnswerLost         it may or may not have been written; `.again` is the operation that is safe to repeat
    ├── EnqueueUnknown     a job with keep=0 and no key may have been enqueued; duly does not repeat it
    ├── SchemaMismatch     the tables are missing, older or newer than this version: `duly migrate`
    └── StoreRefused       the database refuses this data; a retry cannot help

Each class has a stable `code`, used by HTTP bodies, exit codes and the docs.
"""

from __future__ import annotations

from typing import ClassVar


class DulyError(Exception):
    """Base of everything duly raises on purpose."""

    code: ClassVar[str] = "duly_error"


class ConfigError(DulyError):
    """A setting, option or URL is not valid."""

    code = "config"


class PayloadError(DulyError):
    """The arguments or the payload cannot be stored."""

    code = "payload"


class BadArguments(PayloadError):
    """The arguments do not fit the handler's signature."""

    code = "bad_arguments"


class PayloadTooLarge(PayloadError):
    """The payload is over the inline limit and no blob store is set."""

    code = "payload_too_large"


class JobError(DulyError):
    """An error of one job."""

    code = "job"

    def __init__(self, message: str, job_id: str | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id


class JobNotFound(JobError):
    """No job has this id."""

    code = "job_not_found"


class JobDead(JobError):
    """The job ended dead, so it has no result."""

    code = "job_dead"


class JobCancelled(JobError):
    """The job was cancelled, so it has no result."""

    code = "job_cancelled"


class JobTimeout(JobError):
    """The handler ran longer than its timeout."""

    code = "job_timeout"


class ResultExpired(JobError):
    """The job succeeded, but its result is no longer kept."""

    code = "result_expired"


class LeaseLost(JobError):
    """Another worker owns this job now; nothing was written."""

    code = "lease_lost"


class NotReplayable(JobError):
    """A job in this state is not replayed without force."""

    code = "not_replayable"


class TransitionRefused(JobError):
    """No arrow leads from the job's state to the one asked for."""

    code = "transition_refused"


class ScheduleNotFound(DulyError):
    """No schedule has this name."""

    code = "schedule_not_found"


class ScheduleExists(DulyError):
    """Another schedule with this name exists."""

    code = "schedule_exists"


class BatchNotFound(DulyError):
    """No batch has this id."""

    code = "batch_not_found"


class BatchSealed(DulyError):
    """The batch takes no more jobs."""

    code = "batch_sealed"


class KeyConflict(DulyError):
    """The key is taken by a job with another payload."""

    code = "key_conflict"

    def __init__(self, message: str, existing_id: str | None = None) -> None:
        super().__init__(message)
        self.existing_id = existing_id


class QueueFull(DulyError):
    """The queue has reached its depth limit; `enqueued` jobs of the same call were enqueued before."""

    code = "queue_full"

    def __init__(self, message: str, queue: str | None = None, *, enqueued: int = 0) -> None:
        super().__init__(message)
        self.queue = queue
        self.enqueued = enqueued


class StoreError(DulyError):
    """The database failed or refused."""

    code = "store"


class StoreUnavailable(StoreError):
    """The database cannot be reached now; nothing was written."""

    code = "store_unavailable"
    locked: bool = False  # it can be reached, but another transaction holds a lock


class AnswerLost(StoreError):
    """The write may or may not have happened; `again` repeats it safely."""

    code = "answer_lost"
    again: object = None


class EnqueueUnknown(StoreError):
    """A job with `keep=0` and no key may or may not have been enqueued."""

    code = "enqueue_unknown"


class SchemaMismatch(StoreError):
    """The tables are missing, older or newer than this version."""

    code = "schema_mismatch"


class StoreRefused(StoreError):
    """The database refuses this data; a retry cannot help."""

    code = "store_refused"
