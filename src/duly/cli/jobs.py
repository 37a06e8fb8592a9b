"""`duly jobs`: list, show, cancel and retry jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click
import msgspec

from duly.cli import Named, output
from duly.cli.batch_lookup import whole_batch_id
from duly.cli.bulk import Done, Listing, Matching, bulk_command, unsettled
from duly.cli.database import since_ms, whole_id, with_app
from duly.cli.options import filter_options, page_options, state_option
from duly.duly import Duly
from duly.errors import JobNotFound
from duly.model import Attempt, Event, JobRecord, Replayed, State, Step
from duly.rules.keys import Ids
from duly.rules.why import Why
from duly.store import ops
from duly.store.ops import Replay

# In this order, so that a job that changes its state meanwhile is found in the next one.
CANCELLABLE = (State.SCHEDULED, State.WAITING, State.READY, State.RUNNING)
RETRIED = (State.WAITING, State.SCHEDULED)
REPLAYED = (State.DEAD, State.PARTIAL, State.CANCELLED)


@click.group(cls=Named)
def command() -> None:
    """List, show, cancel and retry jobs.

    Examples:
      duly jobs list --state dead --since 2h
      duly jobs show 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55
      duly jobs cancel --queue mail --dry-run
      duly jobs retry --error ConnectionError --yes
    """


@command.command("list")
@state_option()
@filter_options
@click.option("--batch", metavar="ID", help="Only jobs of this batch.")
@page_options("--before", "Only jobs older than this one")
@with_app
def list_(
    app: Duly, limit: int, before: str | None, batch: str | None, since: str | None, as_json: bool, **given: Any
) -> None:
    """List jobs, newest first.

    JSON is an array of jobs with all their fields, payloads and results too.

    Examples:
      duly jobs list
      duly jobs list --state scheduled --queue mail --limit 100
      duly jobs list --task send_receipt --since 2h --error Timeout
      duly jobs list --batch 01997f3e --state running
      duly jobs list --before 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55 --json
    """
    found = app.list(
        **given,
        batch_id=None if batch is None else whole_batch_id(app, batch),
        since=since_ms(app, since),
        before=None if before is None else whole_id(app, before),
        limit=limit + 1,
    )
    now = app.driver.run(ops.clock())
    filtered = any(value is not None for value in (batch, since, before, *given.values()))
    output.page(
        found,
        limit,
        flag="--before",
        show=lambda shown: print_jobs(shown, now),
        empty="no job matches these filters" if filtered else "there are no jobs",
        as_json=as_json,
    )


def print_jobs(jobs: Sequence[JobRecord], now: int, *, usual: Mapping[str, str] | None = None) -> None:
    """Print a table of jobs, without the columns in which every job has the `usual` text."""
    lines = [
        {
            "id": job.id, "state": job.state, "attempt": f"{job.attempt}/{job.max_attempts}", "when": _when(job, now),
            "task": job.task, "queue": job.queue, "note": note(job),
        }
        for job in jobs
    ]  # fmt: skip
    names = ["id", "state", "attempt", "when", "task", "queue", "note"]
    shown = [name for name in names if any(line[name] != (usual or {}).get(name) for line in lines)]
    output.table(shown, [[line[name] for name in shown] for line in lines])


def _when(job: JobRecord, now: int) -> str:
    """Write when a job ended, or when it is or was due."""
    if job.finished_at is not None:
        return output.ago(job.finished_at, now, units=1)
    due = output.ago(job.due_at, now, units=1)
    return f"due {due}" if job.due_at is not None and job.due_at <= now else due


def note(job: JobRecord) -> str:
    """Write the most important fact of a job beside its state."""
    if job.replayed_as is not None:
        return f"replayed as {job.replayed_as}"
    if job.resolved_at is not None:
        return f"resolved by {job.resolved_by}: {job.resolved_why}"
    if job.state is State.RUNNING:
        return ", ".join(_running_notes(job))
    if job.reason and job.error and job.error.startswith(job.reason):
        return job.error
    return "; ".join(text for text in (job.reason, job.error) if text)


def _running_notes(job: JobRecord) -> list[str]:
    notes = ["asked to stop"] if job.cancel_requested_at is not None else []
    if job.progress is not None:
        notes.append(f"{job.progress:.0f}%")
    return [*notes, job.progress_message] if job.progress_message else notes


@command.command()
@click.argument("job_id", metavar="ID")
@with_app
def show(app: Duly, job_id: str, as_json: bool) -> None:
    """Show a job with its failed attempts, its steps, its events, and why it is not running.

    The first digits of the id are enough. Exit code 3: no job has this id.

    Examples:
      duly jobs show 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55
      duly jobs show 01997f3e --json --url jobs.db
    """
    read_story(app, job_id).print(as_json=as_json)


class Story(NamedTuple):
    """A job with all its records."""

    job: JobRecord
    attempts: list[Attempt]
    steps: list[Step]
    events: list[Event]
    why: Why | None
    now: int

    def print(self, *, as_json: bool) -> None:
        """Print the job and its records."""
        if as_json:
            parts = {"attempts": self.attempts, "steps": self.steps, "events": self.events}
            output.answer_json({**msgspec.to_builtins(self.job), **parts})
            return
        output.facts([*_fields(self.job, self.now), *self._rows()])
        if self.attempts and (traceback := self.attempts[-1].traceback):
            number = self.attempts[-1].attempt
            click.echo(f"\nThe traceback of attempt {number} (of all of them: --json):\n{output.plain(traceback)}")

    def _rows(self) -> list[tuple[str, str]]:
        """Write the records of the job, one a line."""
        rows = [
            (
                f"attempt {one.attempt}",
                f"{output.moment(one.at)}  {one.outcome}: {one.error or 'no error was recorded'}",
            )
            for one in self.attempts
        ]
        rows += [
            ("step", f"{output.moment(one.changed_at)}  {one.name} ({one.kind}) {one.state}" + _after(one.error))
            for one in self.steps
        ]
        rows += [
            ("event", f"{output.moment(one.at)}  {one.name}" + (f" by {one.by}" if one.by else "") + _after(one.why))
            for one in self.events
        ]
        return rows if self.why is None else [*rows, ("why", self.why.sentence)]


def read_story(app: Duly, given: str) -> Story:
    """Read a job with all its records."""
    job_id = whole_id(app, given)
    job, why = app.get(job_id), app.driver.run(ops.why(job_id))
    if job is None:
        raise JobNotFound(f"no job has the id {job_id}", job_id)
    run = app.driver.run
    attempts, steps, events = run(ops.attempts(job_id)), run(ops.steps(job_id)), run(ops.events(job_id=job_id))
    return Story(job, attempts, steps, events, why, run(ops.clock()))


def _fields(job: JobRecord, now: int) -> list[tuple[str, str]]:
    usual = {"schema_version": 1, "crashes": 0, "replay_count": 0, "correlation_id": job.id}
    fields = msgspec.structs.asdict(job).items()
    return [
        (name, _shown(name, value, now)) for name, value in fields if value is not None and usual.get(name) != value
    ]


def _shown(name: str, value: Any, now: int) -> str:
    if isinstance(value, int) and name.endswith(("_at", "_until")):
        return f"{output.moment(value)} ({output.ago(value, now)})"
    return output.shown_json(value) if name in ("payload", "result") else str(value)


def _after(text: str | None) -> str:
    return f": {text}" if text else ""


def _matching(*default: State) -> Matching:
    """Find the jobs that match, one listing a state: of the given state, or of the default ones."""

    def matching(app: Duly, given: Mapping[str, Any]) -> list[Listing]:
        filters = {name: given[name] for name in ("queue", "task", "error")} | {"since": since_ms(app, given["since"])}
        states = default if given["state"] is None else (State(given["state"]),)

        def listing(state: State) -> Listing:
            return lambda last, limit: app.driver.run(ops.listing(state=state, before=last, limit=limit, **filters))

        listings = [listing(state) for state in states]
        return [unsettled(one) for one in listings] if states[0] in REPLAYED else listings

    return matching


def _foresee_cancel(job: JobRecord) -> Done | None:
    return Done(job.id, "had ended") if job.state.ended else None


@command.command()
@state_option(CANCELLABLE)
@filter_options
@bulk_command("cancel", _matching(*CANCELLABLE), everything="All jobs that have not ended.", foreseen=_foresee_cancel)
def cancel(app: Duly, jobs: Sequence[JobRecord], by: str, why: str | None) -> list[Done]:
    """Cancel jobs: those you name, or all that match.

    A job that does not run ends at once. A running one is asked to stop: its handler decides. Jobs that are enqueued
    meanwhile are left alone. Exit code 3: an id is that of no job; the other jobs are cancelled all the same.

    Examples:
      duly jobs cancel 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55 --why "wrong address"
      duly jobs cancel --queue mail --state scheduled --dry-run
      duly jobs cancel --task send_receipt --since 1h --yes
      duly jobs cancel --all
    """
    answer = app.driver.run(ops.cancel([job.id for job in jobs], by=by, why=why))
    return [Done(job.id, CANCELLED.get(answer.get(job.id), "had ended")) for job in jobs]


CANCELLED: dict[State | None, str] = {State.CANCELLED: "cancelled", State.RUNNING: "asked to stop"}


def _foresee_retry(job: JobRecord) -> Done | None:
    """Write why a job cannot be run now, where its state tells."""
    match job.state:
        case State.READY:
            return Done(job.id, "due already")
        case State.RUNNING:
            return Done(job.id, "running", refused=True)
        case State.SUCCEEDED:
            return Done(job.id, f"not run again: it has {job.state}", refused=True)
    return None


@command.command()
@state_option((*RETRIED, *REPLAYED))
@filter_options
@bulk_command(
    "retry", _matching(*RETRIED), everything="All jobs that are scheduled or waiting.", foreseen=_foresee_retry
)
def retry(app: Duly, jobs: Sequence[JobRecord], by: str, why: str | None) -> list[Done]:
    """Run jobs now: those you name, or all that match.

    A scheduled or waiting job becomes due at once. A dead, partial or cancelled one is replayed as a new job, whose id
    is printed. Filters without --state choose scheduled and waiting jobs. Exit code 1: a job you named runs or has
    succeeded. 3: an id is that of no job.

    Examples:
      duly jobs retry 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55
      duly jobs retry --error ConnectionError --dry-run
      duly jobs retry --queue mail --state dead --since 1d --yes
    """
    due = [job.id for job in jobs if job.state in RETRIED]
    made_due = app.driver.run(ops.retry(due, by=by, why=why)) if due else {}
    again = replay(app, [job for job in jobs if job.state in REPLAYED], by, why)
    return [again.get(job.id) or _retried(job, job.id in made_due) for job in jobs]


def _retried(job: JobRecord, made_due: bool) -> Done:
    if made_due:
        return Done(job.id, "made due")
    return _foresee_retry(job) or Done(job.id, "had begun or ended meanwhile")


new_id = Ids()


def replay(app: Duly, jobs: Sequence[JobRecord], by: str, why: str | None) -> dict[str, Done]:
    """Run ended jobs again under new ids, and give the outcome of each."""
    if not jobs:
        return {}
    replays = [Replay(job.id, new_id()) for job in jobs]
    answer = app.driver.run(ops.replay(replays, by=by, why=why, key_ttl_ms=app.settings.key_ttl_ms))
    return {one.id: _replayed(one) for one in answer}


def _replayed(one: Replayed) -> Done:
    if one.new_id is not None:
        return Done(one.id, "replayed" if one.first else "had been replayed", one.new_id)
    if one.key_holder not in (None, one.id):
        return Done(one.id, "not replayed: another job has its key", refused=True)
    return Done(one.id, "gone meanwhile" if one.state is None else "not replayed: it is settled", refused=True)
