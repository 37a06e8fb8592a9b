"""The handle of a job that was enqueued: wait for its end and read its result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any, Generic, TypeVar, cast

from duly.app.enqueue import Request
from duly.app.lease import current
from duly.errors import BadArguments, ConfigError, JobCancelled, JobDead, JobError, JobNotFound, ResultExpired
from duly.model import Enqueued, JobRecord, State
from duly.rules import codec
from duly.store import ops

R_co = TypeVar("R_co", covariant=True)


class Job(Generic[R_co]):
    """A job that was enqueued, or that was found because it has the same key."""

    __slots__ = ("_behind", "_by", "_enqueued")

    def __init__(self, by: Request, enqueued: Enqueued) -> None:
        self._by = by
        self._enqueued = enqueued
        self._behind = enqueued.behind

    @property
    def id(self) -> str:
        """The id of the job."""
        return self._enqueued.id

    @property
    def deduplicated(self) -> bool:
        """Whether this is an earlier job with the same key."""
        return self._enqueued.deduplicated

    def __repr__(self) -> str:
        return f"<job {self.id} of {self._by.definition.name}>"

    def result(self, timeout: float | None = None) -> R_co:
        """Wait until the job has ended and return its result. `timeout` is in seconds; without it there is no limit.

        Raises JobDead, JobCancelled or ResultExpired depending on how the job ended, or TimeoutError.
        """
        self._refuse_waiting()
        for pause in pauses(timeout):
            found, result = self._judge(self._by.database.run(ops.get(self.id)))
            if found:
                return cast("R_co", result)
            time.sleep(pause)
        raise TimeoutError(self._late(timeout))

    async def aresult(self, timeout: float | None = None) -> R_co:  # noqa: ASYNC109 (as in `result`)
        """Wait until the job has ended and return its result, from a coroutine."""
        self._refuse_waiting()
        for pause in pauses(timeout):
            found, result = self._judge(await self._by.database.arun(ops.get(self.id)))
            if found:
                return cast("R_co", result)
            await asyncio.sleep(pause)
        raise TimeoutError(self._late(timeout))

    def _refuse_waiting(self) -> None:
        if current.get() is not None:
            raise ConfigError(
                f"{self!r}: cannot wait for a job inside a handler, because this can deadlock. "
                "Let the other job enqueue what follows"
            )
        if self._by.terms.keep_ms == 0 and not self._enqueued.succeeded:
            raise ConfigError(f"{self!r}: its task has keep=0, so success leaves no result to wait for")

    def _judge(self, job: JobRecord | None) -> tuple[bool, Any]:
        """Return whether the job has ended, and its result."""
        if job is None and self._behind:
            return False, None  # it is added when another has ended
        self._behind = False
        if job is None:
            return True, self._remembered()
        match job.state:
            case State.SUCCEEDED | State.PARTIAL:
                if job.result is None and job.result_until is not None:
                    return True, self._remembered()
                return True, self._read(job.result)
            case State.DEAD:
                raise JobDead(f"{self!r} is dead: {job.reason}; {job.error}", self.id)
            case State.CANCELLED:
                raise JobCancelled(f"{self!r} was cancelled: {job.reason}", self.id)
        return False, None

    def _remembered(self) -> Any:
        """Return the result that is stored with the key, when the job's own row has no result."""
        known = self._enqueued
        if known.succeeded and not known.result_dropped:
            return None if known.result is None else codec.decode(known.result, self._by.definition.result_type)
        if self._by.is_staged and not known.succeeded:
            raise JobNotFound(
                f"{self!r} is not there yet: it was enqueued on your own connection; commit first. On another database "
                f'write ann.tasks["{self._by.definition.name}"].using(conn=…), with ann = app.at(url)',
                self.id,
            )
        raise ResultExpired(f"{self!r} has no result any more: it is kept for result_ttl, and not with keep=0", self.id)

    def _read(self, result: Any) -> Any:
        if result is None:
            return None
        try:
            return codec.reread(result, self._by.definition.result_type)
        except BadArguments as error:
            raise JobError(
                f"the result of {self!r} does not fit the result type of its task: {error}", self.id
            ) from error

    def _late(self, timeout: float | None) -> str:
        return f"{self!r} has not ended within {timeout:g} s" if timeout is not None else ""


def pauses(timeout: float | None) -> Iterable[float]:
    """Yield how long to sleep before each poll: briefly at first, so that a quick end is noticed quickly."""
    give_up_at = None if timeout is None else time.monotonic() + timeout
    pause = 0.002
    while True:
        left = pause if give_up_at is None else give_up_at - time.monotonic()
        yield max(0.0, min(pause, left))
        if left <= 0:
            return
        pause = min(pause * 1.5, 0.25)
