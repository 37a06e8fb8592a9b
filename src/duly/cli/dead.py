"""`duly dead`: jobs that ended without success and wait for a person."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from duly.cli import Named, output
from duly.cli.batch_lookup import whole_batch_id
from duly.cli.bulk import Done, Listing, Selection, bulk_command, change
from duly.cli.database import since_ms, whole_id, with_app
from duly.cli.jobs import print_jobs, read_story, replay
from duly.cli.json_text import read_json
from duly.cli.options import COUNT, C, audit_options, bulk_options, by_option, filter_options, page_options
from duly.duly import Duly
from duly.errors import ConfigError, JobNotFound, KeyConflict, NotReplayable
from duly.model import JobRecord, State
from duly.store import ops
from duly.store.op import FIRST_ID

DEAD = (State.DEAD, State.PARTIAL)


@click.group("dead", cls=Named)
def command() -> None:
    """List dead letters, run them again, settle them.

    Examples:
      duly dead list --task send_receipt
      duly dead replay 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55 --why "mail server is back"
      duly dead replay-all --error ConnectionError --limit 1000 --dry-run
      duly dead resolve 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55 --why "paid by hand"
    """


def dead_filters(command: C) -> C:
    """Add the options that choose dead jobs."""
    until = click.option("--until", metavar="WHEN", help="Only jobs that died before then, written like --since.")
    batch = click.option("--batch", metavar="ID", help="Only jobs of this batch.")
    return filter_options(until(batch(command)))


def partial_option(command: C) -> C:
    """Add the option for jobs that were delivered to some channels only."""
    return click.option("--partial", is_flag=True, help="Partial jobs too, which were delivered only in part.")(command)


@command.command("list")
@dead_filters
@partial_option
@click.option("--all", "everything", is_flag=True, help="Replayed and resolved ones too.")
@page_options("--after", "Only jobs younger than this one")
@with_app
def list_(app: Duly, limit: int, after: str | None, everything: bool, as_json: bool, **given: Any) -> None:
    """List dead jobs, oldest first, as replay-all takes them.

    Replayed and resolved jobs are settled, and not listed without --all. JSON is an array of jobs with all their
    fields.

    Examples:
      duly dead list
      duly dead list --task send_receipt --since 2h --error Timeout
      duly dead list --batch 01997f3e
      duly dead list --all --partial --limit 500 --json
      duly dead list --after 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55
    """
    listing = _listing(app, given, everything=everything)
    found = listing(None if after is None else whole_id(app, after), limit + 1)
    now = app.driver.run(ops.clock())
    filtered = after is not None or any(value not in (None, False) for value in given.values())
    output.page(
        found,
        limit,
        flag="--after",
        show=lambda shown: print_jobs(shown, now, usual={"state": State.DEAD, "queue": "default"}),
        empty="no dead job matches these filters" if filtered else "there are no dead jobs",
        as_json=as_json,
    )


def _listing(app: Duly, given: Mapping[str, Any], *, everything: bool = False, closed: bool = False) -> Listing:
    """Make the listing of what matches; a closed one ends at the present time, so that it does not grow."""
    since, until = since_ms(app, given["since"]), since_ms(app, given["until"], "--until")
    if closed and until is None:
        until = app.driver.run(ops.clock())  # else a replayed job that dies again would come again
    filters = {name: given[name] for name in ("queue", "task", "error")} | {"partial": given.get("partial", False)}
    batch = given["batch"]
    filters["batch_id"] = None if batch is None else whole_batch_id(app, batch)

    def page(last: str | None, limit: int) -> list[JobRecord]:
        after = FIRST_ID if last is None else last
        op = ops.dead_list(**filters, since=since, until=until, all=everything, after=after, limit=limit)
        return app.driver.run(op)

    return page


@command.command()
@click.argument("job_id", metavar="ID")
@with_app
def show(app: Duly, job_id: str, as_json: bool) -> None:
    """Show a dead job, its attempts and the last traceback.

    Exit code 3: no dead job has this id.

    Examples:
      duly dead show 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55
      duly dead show 01997f3e --json
    """
    story = read_story(app, job_id)
    if story.job.state not in DEAD:
        raise JobNotFound(f"job {story.job.id} is {story.job.state}, not dead: duly jobs show {story.job.id}")
    story.print(as_json=as_json)


@command.command("replay")
@click.argument("ids", metavar="ID…", nargs=-1, required=True)
@click.option("--key", help="Give the new job this key instead of its own.")
@click.option(
    "--payload",
    metavar="JSON",
    callback=lambda context, option, text: _read_payload(text),
    help="Other arguments; with --app they are checked against the task.",
)
@click.option("--force", is_flag=True, help="Succeeded and resolved jobs too. It is recorded.")
@audit_options
@with_app
def replay_(app: Duly, ids: Sequence[str], as_json: bool, **options: Any) -> None:
    """Run dead, partial or cancelled jobs again, each as a new job. Replayed twice, a job still has one new job.

    Exit code 1: a job is not replayed; the reason is printed. 3: an id is that of no job.

    Examples:
      duly dead replay 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55 --why "mail server is back"
      duly dead replay 01997f3e --payload '{"order_id": 42, "email": "a@b.c"}' --app tasks:app
      duly dead replay 01997f3e --key receipt:42b
    """
    if len(ids) > 1 and (options["key"] is not None or options["payload"] is not None):
        raise click.UsageError("--key and --payload are for one job: name one.")

    def act(jobs: Sequence[JobRecord]) -> list[Done]:
        return [_replay_one(app, job, **options) for job in jobs]

    sys.exit(change(app, Selection("replay", ids, (), None), act, dry_run=False, yes=True, as_json=as_json))


def _read_payload(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    how = "Give the arguments by name, as in '{\"order_id\": 42}'"
    payload = read_json(text, "--payload", how)
    if not isinstance(payload, dict):
        raise ConfigError(f"--payload is no JSON object. {how}")
    return payload


def _replay_one(app: Duly, job: JobRecord, **options: Any) -> Done:
    try:
        new_id = app.dead.replay(job.id, **options)
    except (JobNotFound, KeyConflict, NotReplayable) as error:
        return Done(job.id, f"not replayed: {_hint(job, error)}", refused=True)
    return Done(job.id, "replayed" if job.replayed_as is None else "had been replayed", new_id)


def _hint(job: JobRecord, error: Exception) -> str:
    """Write why a job is not replayed, and the option to use."""
    match error:
        case KeyConflict():
            return f"its key is taken by job {error.existing_id}; give another with --key"
        case NotReplayable():
            what = "resolved" if job.resolved_at is not None else str(job.state)
            return f"it is {what}; --force replays it all the same, and is recorded"
    return f"it is {job.state} and has not ended"


@command.command("replay-all")
@dead_filters
@partial_option
@click.option("--limit", type=COUNT, default=100, show_default=True, help="How many at most.")
@bulk_options
@audit_options
@with_app
def replay_all(
    app: Duly, limit: int, dry_run: bool, yes: bool, by: str, why: str | None, as_json: bool, **given: Any
) -> None:
    """Run all dead jobs that match again, oldest first.

    Jobs that die meanwhile are left alone. Jobs that cannot be replayed are counted, with the reason.

    Examples:
      duly dead replay-all --task send_receipt --dry-run
      duly dead replay-all --error ConnectionError --since 2h --yes
      duly dead replay-all --limit 50000 --why "mail server is back"
    """

    def act(jobs: Sequence[JobRecord]) -> list[Done]:
        return list(replay(app, jobs, by, why).values())

    chosen = Selection("replay", (), _matching(app, given), limit)
    sys.exit(change(app, chosen, act, dry_run=dry_run, yes=yes, as_json=as_json))


def _matching(app: Duly, given: Mapping[str, Any]) -> list[Listing]:
    return [_listing(app, given, everything=given.get("settled", False), closed=True)]


def _reason_options(command: C) -> C:
    why = click.option("--why", help="Why it is settled, for the record. Required, unless --dry-run.")
    return why(by_option(command))


def _need_reason(given: Mapping[str, Any]) -> None:
    why: str | None = given["why"]
    if not (given["dry_run"] or (why or "").strip()):
        missing = "Missing option '--why'" if why is None else "--why is empty"
        raise click.UsageError(f"{missing}: write for the record why it is settled.")


@command.command()
@dead_filters
@partial_option
@bulk_command("resolve", _matching, everything="All dead jobs.", audit=_reason_options, check=_need_reason)
def resolve(app: Duly, jobs: Sequence[JobRecord], by: str, why: str) -> list[Done]:
    """Mark dead jobs as settled for good: those you name, or all that match.

    They are not listed and not replayed any more, and stay for the record. Exit code 1: a job you named is not dead, or
    was settled before. 3: an id is that of no job.

    Examples:
      duly dead resolve 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55 --why "paid by hand"
      duly dead resolve --task send_receipt --until 2026-01-31 --why "customers have been informed" --dry-run
    """
    resolved = app.driver.run(ops.resolve([job.id for job in jobs], by=by, why=why))
    return [Done(job.id, "resolved") if job.id in resolved else _not("resolved", job) for job in jobs]


@command.command()
@dead_filters
@click.option("--settled", is_flag=True, help="Replayed and resolved ones too.")
@bulk_command("purge", _matching, everything="All dead jobs.", ask_named=True)
def purge(app: Duly, jobs: Sequence[JobRecord], by: str, why: str | None) -> list[Done]:
    """Delete dead jobs with their attempts and steps: those you name, or all that match.

    It cannot be undone. Your name and the reason are recorded.
    Exit code 1: a job you named is not dead. 3: an id is that of no job.

    Examples:
      duly dead purge 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55 --yes
      duly dead purge --until 2026-01-31 --dry-run
      duly dead purge --all
    """
    purged = app.driver.run(ops.purge([job.id for job in jobs], by=by, why=why))
    return [Done(job.id, "purged") if job.id in purged else _not("purged", job) for job in jobs]


def _not(done: str, job: JobRecord) -> Done:
    """Write why a job was not changed."""
    if job.state is State.DEAD or (job.state is State.PARTIAL and done == "resolved"):
        settled = "was resolved" if job.resolved_at is not None else "was replayed"
        return Done(job.id, f"not {done}: it {settled} before", refused=True)
    return Done(job.id, f"not {done}: it is {job.state}", refused=True)
