"""`duly dead`: jobs that ended without success and wait for a person."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from duly.app.app import user
from duly.cli import Named, output
from duly.cli.batches import whole_batch_id
from duly.cli.bulk import Done, Listing, Selection, change, need_some
from duly.cli.database import (
    audit_options,
    bulk_options,
    database_options,
    filter_options,
    json_option,
    opened,
    since_ms,
    whole_id,
)
from duly.cli.jobs import read_story, replay, tell_jobs
from duly.duly import Duly
from duly.errors import JobNotFound, KeyConflict, NotReplayable
from duly.model import JobRecord, State
from duly.store import ops
from duly.store.op import FIRST_ID

C = TypeVar("C", bound=Callable[..., Any])

DEAD = (State.DEAD, State.PARTIAL)
FILTERS = ("queue", "task", "since", "until", "error", "batch")


@click.group(
    "dead",
    cls=Named,
    epilog="""\b
Examples:
  duly dead list --task send_receipt
  duly dead replay 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55 --why "mail server is back"
  duly dead replay-all --error ConnectionError --limit 1000 --dry-run
  duly dead resolve 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55 --why "paid by hand"
""",
)
def command() -> None:
    """Look at dead letters, run them again, settle them."""


def dead_filters(command: C) -> C:
    """Add the options that say which dead jobs are meant."""
    until = click.option("--until", metavar="WHEN", help="Only jobs that died before then, written like --since.")
    batch = click.option("--batch", metavar="ID", help="Only jobs of this batch.")
    return filter_options(until(batch(command)))


def partial_option(command: C) -> C:
    """Add the option for jobs that some channels were not delivered of."""
    return click.option("--partial", is_flag=True, help="Partial jobs too, which were delivered only in part.")(command)


@command.command(
    "list",
    epilog="""\b
Examples:
  duly dead list
  duly dead list --task send_receipt --since 2h --error Timeout
  duly dead list --batch 01997f3e
  duly dead list --all --partial --limit 500 --json
  duly dead list --after 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55
""",
)
@dead_filters
@partial_option
@click.option("--all", "everything", is_flag=True, help="Those too that were replayed or resolved.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="How many at most.")
@click.option("--after", metavar="ID", help="Only jobs younger than this one: the next page.")
@database_options
@json_option
def list_(
    limit: int,
    after: str | None,
    everything: bool,
    url: str | None,
    schema: str | None,
    target: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """List dead jobs, oldest first, as replay-all takes them.

    Those that were replayed or resolved are settled, and not listed without --all. JSON is an array of jobs with all
    their fields.
    """
    with opened(url, schema, target) as app:
        listing = _listing(app, given, everything=everything)
        found = listing(None if after is None else whole_id(app, after), limit + 1)
        now = app.driver.run(ops.clock())
    if as_json:
        output.answer_json(found[:limit])
        return
    tell_jobs(found[:limit], now)
    if not found:
        filtered = after is not None or any(value not in (None, False) for value in given.values())
        click.echo("no dead job matches these filters" if filtered else "there are no dead jobs")
    elif len(found) > limit:
        click.echo(f"there are more: --after {found[limit - 1].id}", err=True)


def _listing(app: Duly, given: Mapping[str, Any], *, everything: bool = False, closed: bool = False) -> Listing:
    """Make the listing of what matches; a closed one does not get longer while it is walked."""
    since, until = since_ms(app, given["since"]), since_ms(app, given["until"], "--until")
    if closed and until is None:
        until = app.driver.run(ops.clock())  # a job that is replayed and dies again would come round and round
    filters = {name: given[name] for name in ("queue", "task", "error")} | {"partial": given.get("partial", False)}
    batch = given["batch"]
    filters["batch_id"] = None if batch is None else whole_batch_id(app, batch)

    def page(last: str | None, limit: int) -> list[JobRecord]:
        after = FIRST_ID if last is None else last
        op = ops.dead_list(**filters, since=since, until=until, all=everything, after=after, limit=limit)
        return app.driver.run(op)

    return page


@command.command(
    epilog="""\b
Examples:
  duly dead show 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55
  duly dead show 01997f3e --json
"""
)
@click.argument("job_id", metavar="ID")
@database_options
@json_option
def show(job_id: str, url: str | None, schema: str | None, target: str | None, as_json: bool) -> None:
    """Show a dead job, its attempts and the last traceback.

    Exit code 3: no dead job has this id.
    """
    with opened(url, schema, target) as app:
        story = read_story(app, job_id)
    if story.job.state not in DEAD:
        raise JobNotFound(f"job {story.job.id} is {story.job.state}, not dead: duly jobs show {story.job.id}")
    story.tell(as_json=as_json)


@command.command(
    "replay",
    epilog="""\b
Examples:
  duly dead replay 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55 --why "mail server is back"
  duly dead replay 01997f3e --payload '{"order_id": 42, "email": "a@b.c"}' --app tasks:app
  duly dead replay 01997f3e --key receipt:42b
""",
)
@click.argument("ids", metavar="ID…", nargs=-1, required=True)
@click.option("--key", help="Give the new job this key instead of its own.")
@click.option("--payload", metavar="JSON", help="Other arguments; with --app they are checked against the task.")
@click.option("--force", is_flag=True, help="Also what has succeeded or is resolved. It is recorded.")
@audit_options
@database_options
@json_option
def replay_(
    ids: tuple[str, ...],
    key: str | None,
    payload: str | None,
    force: bool,
    by: str,
    why: str | None,
    url: str | None,
    schema: str | None,
    target: str | None,
    as_json: bool,
) -> None:
    """Run dead, partial or cancelled jobs again, each as a new job; asked twice, the same new job is named.

    Exit code 1: one of them is not replayed, as is told. 3: one of the ids is that of no job.
    """
    if len(ids) > 1 and (key is not None or payload is not None):
        raise click.UsageError("--key and --payload are for one job: name one.")
    edited = _read_payload(payload)
    with opened(url, schema, target) as app:

        def act(jobs: Sequence[JobRecord]) -> list[Done]:
            return [_replay_one(app, job, by=by, why=why, key=key, payload=edited, force=force) for job in jobs]

        sys.exit(change(app, Selection("replay", ids, (), None), act, dry_run=False, yes=True, as_json=as_json))


def _read_payload(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        payload = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--payload is not JSON: {error}.") from None
    if not isinstance(payload, dict):
        raise click.UsageError("--payload is no JSON object: give the arguments by name, as in '{\"order_id\": 42}'.")
    return payload


def _replay_one(app: Duly, job: JobRecord, **options: Any) -> Done:
    try:
        new_id = app.dead.replay(job.id, **options)
    except (JobNotFound, KeyConflict, NotReplayable) as error:
        return Done(job.id, f"not replayed: {_hint(job, error)}", refused=True)
    return Done(job.id, "replayed" if job.replayed_as is None else "had been replayed", new_id)


def _hint(job: JobRecord, error: Exception) -> str:
    """Say why a job is not replayed, in the words of the command line."""
    match error:
        case KeyConflict():
            return f"its key is taken by job {error.existing_id}; give another with --key"
        case NotReplayable():
            what = "resolved" if job.resolved_at is not None else str(job.state)
            return f"it is {what}; --force does it all the same, and is recorded"
    return f"it is {job.state} and has not ended"


@command.command(
    "replay-all",
    epilog="""\b
Examples:
  duly dead replay-all --task send_receipt --dry-run
  duly dead replay-all --error ConnectionError --since 2h --yes
  duly dead replay-all --limit 50000 --why "mail server is back"
""",
)
@dead_filters
@partial_option
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="How many at most.")
@bulk_options
@audit_options
@database_options
@json_option
def replay_all(
    limit: int,
    dry_run: bool,
    yes: bool,
    by: str,
    why: str | None,
    url: str | None,
    schema: str | None,
    target: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Run all dead jobs that match again, oldest first.

    What dies while this runs is left alone. What cannot be replayed is counted, with the reason.
    """
    with opened(url, schema, target) as app:

        def act(jobs: Sequence[JobRecord]) -> list[Done]:
            return list(replay(app, jobs, by, why).values())

        chosen = Selection("replay", (), [_listing(app, given, closed=True)], limit)
        sys.exit(change(app, chosen, act, dry_run=dry_run, yes=yes, as_json=as_json))


@command.command(
    epilog="""\b
Examples:
  duly dead resolve 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55 --why "paid by hand"
  duly dead resolve --task send_receipt --until 2026-01-31 --why "customers were told" --dry-run
"""
)
@click.argument("ids", metavar="[ID]…", nargs=-1)
@dead_filters
@partial_option
@click.option("--all", "everything", is_flag=True, help="All dead jobs.")
@click.option("--limit", type=click.IntRange(1), help="How many at most. Default: all that match.")
@bulk_options
@click.option("--why", help="Why it is settled, for the record. Required, unless --dry-run.")
@click.option("--by", default=user, show_default="whoever is logged in", help="Who, for the record.")
@database_options
@json_option
def resolve(
    ids: tuple[str, ...],
    everything: bool,
    limit: int | None,
    dry_run: bool,
    yes: bool,
    by: str,
    why: str | None,
    url: str | None,
    schema: str | None,
    target: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Mark dead jobs as settled for good: those you name, or all that match.

    They are not listed and not replayed any more, and stay for the record. Exit code 1: one of those you named is not
    dead, or settled already. 3: one of the ids is that of no job.
    """
    if not (dry_run or (why or "").strip()):
        missing = "Missing option '--why'" if why is None else "--why is empty"
        raise click.UsageError(f"{missing}: say for the record why it is settled.")
    need_some(ids, (given[name] for name in FILTERS), everything)
    with opened(url, schema, target) as app:

        def act(jobs: Sequence[JobRecord]) -> list[Done]:
            resolved = app.driver.run(ops.resolve([job.id for job in jobs], by=by, why=why or ""))
            return [Done(job.id, "resolved") if job.id in resolved else _not("resolved", job) for job in jobs]

        chosen = Selection("resolve", ids, [_listing(app, given, closed=True)], limit)
        sys.exit(change(app, chosen, act, dry_run=dry_run, yes=yes, as_json=as_json))


@command.command(
    epilog="""\b
Examples:
  duly dead purge 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55 --yes
  duly dead purge --until 2026-01-31 --dry-run
  duly dead purge --all
"""
)
@click.argument("ids", metavar="[ID]…", nargs=-1)
@dead_filters
@click.option("--settled", is_flag=True, help="Those too that were replayed or resolved.")
@click.option("--all", "everything", is_flag=True, help="All dead jobs.")
@click.option("--limit", type=click.IntRange(1), help="How many at most. Default: all that match.")
@bulk_options
@audit_options
@database_options
@json_option
def purge(
    ids: tuple[str, ...],
    settled: bool,
    everything: bool,
    limit: int | None,
    dry_run: bool,
    yes: bool,
    by: str,
    why: str | None,
    url: str | None,
    schema: str | None,
    target: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Delete dead jobs with their attempts and steps: those you name, or all that match.

    It cannot be undone; that it was done, by whom and why is recorded.
    Exit code 1: one of those you named is not dead. 3: one of the ids is that of no job.
    """
    need_some(ids, (given[name] for name in FILTERS), everything)
    with opened(url, schema, target) as app:

        def act(jobs: Sequence[JobRecord]) -> list[Done]:
            gone = app.driver.run(ops.purge([job.id for job in jobs], by=by, why=why))
            return [Done(job.id, "purged") if job.id in gone else _not("purged", job) for job in jobs]

        listing = _listing(app, given, everything=settled, closed=True)
        chosen = Selection("purge", ids, [listing], limit, ask_named=True)
        sys.exit(change(app, chosen, act, dry_run=dry_run, yes=yes, as_json=as_json))


def _not(done: str, job: JobRecord) -> Done:
    """Say why nothing was done to a job."""
    if job.state is State.DEAD or (job.state is State.PARTIAL and done == "resolved"):
        settled = "was resolved" if job.resolved_at is not None else "was replayed"
        return Done(job.id, f"not {done}: it {settled} before", refused=True)
    return Done(job.id, f"not {done}: it is {job.state}", refused=True)
