"""Dead letters: jobs that failed for good, to be replayed, resolved or purged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias, TypedDict, Unpack

from duly.app.filters import checked
from duly.app.tasks import Tasks
from duly.errors import JobNotFound, KeyConflict, NotReplayable, PayloadError
from duly.model import DeadFigure, JobRecord, Replayed
from duly.rules import codec
from duly.store import ops
from duly.store.op import Op
from duly.store.ops import Replay

# In the class below `list` is a method.
Jobs: TypeAlias = list[JobRecord]
Replays: TypeAlias = list[Replayed]
Figures: TypeAlias = list[DeadFigure]


class DeadFilters(TypedDict, total=False):
    """Which dead jobs are meant. `all` includes replayed and resolved jobs, `partial` includes partial jobs."""

    task: str | None
    queue: str | None
    batch_id: str | None
    error: str | None
    since: datetime | int | None
    until: datetime | int | None
    partial: bool
    all: bool


class DeadPage(DeadFilters, total=False):
    """Which dead jobs to list, and how many at most. For the next page pass the last id of this page as `after`."""

    after: str
    limit: int


class Dead:
    """The dead letters of an app. Lists and counts leave out replayed and resolved jobs, except with `all`."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks

    def list(self, **filters: Unpack[DeadPage]) -> Jobs:
        """List dead jobs, oldest first."""
        return self._tasks.database.run(ops.dead_list(**checked(filters, DeadPage)))

    async def alist(self, **filters: Unpack[DeadPage]) -> Jobs:
        """List dead jobs, from a coroutine."""
        return await self._tasks.database.arun(ops.dead_list(**checked(filters, DeadPage)))

    def replay(
        self,
        job_id: str,
        *,
        by: str | None = None,
        why: str | None = None,
        key: str | None = None,
        payload: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> str:
        """Run a dead job again under a new id, and return that id. A second replay returns the id of the first."""
        job = self._tasks.database.run(ops.get(job_id)) if key is not None or payload is not None else None
        replayed = self._tasks.database.run(self._replay(job_id, job, by, why, key, payload, force))[0]
        return _new_id(replayed, job_id, force, edited=job is not None)

    async def areplay(
        self,
        job_id: str,
        *,
        by: str | None = None,
        why: str | None = None,
        key: str | None = None,
        payload: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> str:
        """Run a dead job again, from a coroutine."""
        job = await self._tasks.database.arun(ops.get(job_id)) if key is not None or payload is not None else None
        replay = self._replay(job_id, job, by, why, key, payload, force)
        return _new_id((await self._tasks.database.arun(replay))[0], job_id, force, edited=job is not None)

    def replay_all(
        self, *, limit: int = 100, by: str | None = None, why: str | None = None, **filters: Unpack[DeadFilters]
    ) -> Replays:
        """Run dead jobs again, oldest first and at most `limit`, by the filters of `list`."""
        found = self.list(limit=limit, **filters)
        return self._tasks.database.run(self._replays(found, by, why)) if found else []

    async def areplay_all(
        self, *, limit: int = 100, by: str | None = None, why: str | None = None, **filters: Unpack[DeadFilters]
    ) -> Replays:
        """Run dead jobs again, from a coroutine."""
        found = await self.alist(limit=limit, **filters)
        return await self._tasks.database.arun(self._replays(found, by, why)) if found else []

    def resolve(self, job_id: str, *, by: str, why: str) -> None:
        """Mark a dead or partial job as resolved."""
        _changed(self._tasks.database.run(ops.resolve([job_id], by=by, why=why)), job_id)

    async def aresolve(self, job_id: str, *, by: str, why: str) -> None:
        """Mark a dead or partial job as resolved, from a coroutine."""
        _changed(await self._tasks.database.arun(ops.resolve([job_id], by=by, why=why)), job_id)

    def purge(self, ids: str | Sequence[str], *, by: str | None = None, why: str | None = None) -> int:
        """Delete dead jobs with their attempts and steps. Returns how many."""
        return len(self._tasks.database.run(ops.purge(_each(ids), by=by, why=why)))

    async def apurge(self, ids: str | Sequence[str], *, by: str | None = None, why: str | None = None) -> int:
        """Delete dead jobs, from a coroutine."""
        gone = await self._tasks.database.arun(ops.purge(_each(ids), by=by, why=why))
        return len(gone)

    def metrics(self, *, all: bool = False) -> Figures:
        """Count dead jobs by task and reason, with the age of the oldest."""
        return self._tasks.database.run(ops.dead_metrics(all=all))

    async def ametrics(self, *, all: bool = False) -> Figures:
        """Count dead jobs, from a coroutine."""
        return await self._tasks.database.arun(ops.dead_metrics(all=all))

    def _replay(
        self,
        job_id: str,
        job: JobRecord | None,
        by: str | None,
        why: str | None,
        key: str | None,
        payload: Mapping[str, Any] | None,
        force: bool,
    ) -> Op[Replays]:
        text = None if payload is None else self._edited(job, payload)
        if text is None and key is not None and job is not None:
            if isinstance(job.payload, str):  # it could not be decoded
                raise PayloadError(f"the payload of job {job.id} cannot be read: give payload= beside key=")
            text = codec.encode(job.payload)  # a key is stored with the fingerprint of a payload
        replay = Replay(job_id, self._tasks.database.new_id(), key=key, payload=text, force=force)
        return ops.replay([replay], by=by, why=why, key_ttl_ms=self._tasks.database.settings.key_ttl_ms)

    def _edited(self, job: JobRecord | None, payload: Mapping[str, Any]) -> str:
        """Encode an edited payload; raise if it does not fit its task."""
        text = codec.encode(dict(payload))
        task = None if job is None else self._tasks.get(job.task)
        if task is not None:
            task.definition.codec.decode_call(text)
        return text

    def _replays(self, found: Sequence[JobRecord], by: str | None, why: str | None) -> Op[Replays]:
        replays = [Replay(job.id, self._tasks.database.new_id()) for job in found]
        return ops.replay(replays, by=by, why=why, key_ttl_ms=self._tasks.database.settings.key_ttl_ms)


def _each(ids: str | Sequence[str]) -> Sequence[str]:
    return [ids] if isinstance(ids, str) else ids


def _new_id(replayed: Replayed, job_id: str, force: bool, *, edited: bool) -> str:
    """Return the id of the new job, or raise the reason why the job was not replayed."""
    if replayed.new_id is not None and edited and not replayed.first:
        raise NotReplayable(
            f"job {replayed.id} was replayed before, as {replayed.new_id}: the new key or payload was not "
            "used. Replay that job if it is dead",
            replayed.id,
        )
    if replayed.new_id is not None:
        return replayed.new_id
    if replayed.state is None:
        raise JobNotFound(f"no finished job has the id {job_id}", job_id)
    if replayed.key_holder is not None:
        raise KeyConflict(
            f"job {replayed.id} is not replayed: its key is taken by job {replayed.key_holder}; give key= for another",
            replayed.key_holder,
        )
    hint = "" if force else "; force=True replays it anyway, and is recorded"
    raise NotReplayable(f"job {replayed.id} is {replayed.state.value}, which is not replayed{hint}", replayed.id)


def _changed(ids: list[str], job_id: str) -> None:
    if not ids:
        raise JobNotFound(f"no dead or partial job that is not resolved yet has the id {job_id}", job_id)
