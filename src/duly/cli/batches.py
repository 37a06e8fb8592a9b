"""`duly batches`: lists batches, shows one, watches its progress, and cancels the rest of it.

All is read from the database: no code of the app is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from duly.app.batches import Batch
from duly.cli import Named, output
from duly.cli.batch_lookup import COUNTS, find_batch, percent, plain, state, whole_batch_id
from duly.cli.batch_watch import remark_dead, watch
from duly.cli.database import with_app
from duly.cli.options import audit_options, bulk_options, page_options
from duly.cli.queues import did_you_mean
from duly.duly import Duly
from duly.model import BatchRecord
from duly.store import ops, sequence
from duly.store.op import Op

TIMES = ("created_at", "sealed_at", "completed_at", "first_dead_at")


@click.group(cls=Named)
def command() -> None:
    """List, show, watch and cancel batches.

    Examples:
      duly batches list --active
      duly batches show 01997f3e
      duly batches watch 01997f3e
      duly batches cancel 01997f3e --why "the wrong file" --dry-run
    """


command.add_command(watch)


@command.command("list")
@click.option("--name", help="Only batches of this name.")
@click.option("--active", is_flag=True, help="Only batches with jobs that have not ended.")
@page_options("--before", "Only batches older than this one")
@with_app
def list_(app: Duly, name: str | None, active: bool, limit: int, before: str | None, as_json: bool) -> None:
    """List batches and their progress, newest first.

    The state is unsealed (it is being filled, or the filling was interrupted), open (some of its jobs have not ended)
    or complete.

    Examples:
      duly batches list
      duly batches list --active --name import
      duly batches list --before 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55 --json
    """
    older = None if before is None else whole_batch_id(app, before)
    found = app.batches.list(name=name, active=active or None, before=older, limit=limit + 1)
    known = set() if found or name is None else {one.name for one in app.batches.list()}
    now = app.driver.run(ops.clock())
    filtered = name is not None or active or before is not None
    output.page(
        found,
        limit,
        flag="--before",
        show=lambda shown: _print_batches(shown, now),
        empty=f"no batch matches these filters{did_you_mean(name or '', known)}"
        if filtered
        else "there are no batches yet: with app.batch(…) makes one",
        as_json=as_json,
        plain_of=plain,
    )


def _print_batches(found: Sequence[BatchRecord], now: int) -> None:
    """Print a table of batches; the columns that matter most fit into 80 characters."""
    output.table(
        ["id", "state", "done", "dead", "name", "jobs", "running", "created", "key"],
        [
            [
                one.id,
                state(one),
                percent(one),
                f"{one.dead:,}",
                one.name,
                f"{one.total:,}",
                f"{one.running:,}",
                output.ago(one.created_at, now, units=1),
                one.key or "",
            ]
            for one in found
        ],
    )


@command.command()
@click.argument("batch_id", metavar="ID")
@with_app
def show(app: Duly, batch_id: str, as_json: bool) -> None:
    """Show a batch: its progress, its times, and whether it is a success.

    The first digits of the id are enough. Exit code 3: no batch has this id.

    Examples:
      duly batches show 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55
      duly batches show 01997f3e --json --url jobs.db
    """
    record = find_batch(app, batch_id).progress()
    now = app.driver.run(ops.clock())
    if as_json:
        output.answer_json(plain(record))
        return
    output.facts(_facts(record, now))
    _advise(record)


def _facts(record: BatchRecord, now: int) -> list[tuple[str, str]]:
    known = {"id": record.id, "name": record.name, "key": record.key, "state": state(record)}
    known |= {"done": percent(record), **{name: f"{getattr(record, name):,}" for name in COUNTS}}
    known |= {name: _moment(getattr(record, name), now) for name in TIMES}
    known |= {"cancelled by": record.cancelled_by, "why": record.cancelled_why}
    success = {None: None, True: "yes", False: "no"}[record.success]
    known |= {"ok_at": f"{record.ok_at:g}", "success": success}
    return [(name, value) for name, value in known.items() if value is not None]


def _moment(at: int | None, now: int) -> str | None:
    return None if at is None else f"{output.moment(at)} ({output.ago(at, now)})"


def _advise(record: BatchRecord) -> None:
    """Print what to do about an unsealed batch and about dead jobs."""
    if record.sealed_at is None:
        fill_on = "" if record.key is None else "fill it on under its key, or "
        output.remark(
            f"it is not sealed: it is being filled, or the filling was interrupted; then {fill_on}cancel it: "
            f"duly batches cancel {record.id}"
        )
    if record.dead:
        remark_dead(record)


@command.command()
@click.argument("batch_id", metavar="ID")
@bulk_options
@audit_options
@with_app
def cancel(app: Duly, batch_id: str, dry_run: bool, yes: bool, by: str, why: str | None, as_json: bool) -> None:
    """Cancel the rest of a batch: seal it, cancel its waiting jobs, and ask running jobs to stop.

    Ended jobs stay as they are. The batch is complete when all its jobs have ended. Exit code 3: no batch has this id.

    Examples:
      duly batches cancel 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55 --dry-run
      duly batches cancel 01997f3e --why "the wrong file" --yes
    """
    batch = find_batch(app, batch_id)
    before = after = batch.progress()
    count = before.open
    if not (dry_run or before.complete):
        if not output.confirmed(f"Cancel the rest of batch {before.name!r} ({_rest(before)})?", yes=yes):
            raise click.Abort
        count = _cancel(app, batch, by, why, before.open)
        after = batch.progress()
    stopping = f"; {after.running:,} still running, asked to stop" if after.running else ""
    done = f"cancelled the rest of batch {before.name!r}: {_jobs(count)}{stopping}"
    if before.complete:
        done = f"nothing to cancel: batch {before.name!r} is complete"
    elif dry_run:
        done = f"would cancel the rest of batch {before.name!r}: {_rest(before)}; nothing was changed"
    output.answer({**plain(after), "dry_run": dry_run, "count": count}, done, as_json=as_json)


def _rest(record: BatchRecord) -> str:
    return f"{_jobs(record.open)}, {record.running:,} running" if record.running else _jobs(record.open)


def _jobs(number: int) -> str:
    return f"{number:,} {'job' if number == 1 else 'jobs'}"


def _cancel(app: Duly, batch: Batch, by: str, why: str | None, total: int) -> int:
    """Cancel the batch chunk by chunk, and show the progress."""
    with output.progress("cancel", total) as advance:

        def ask(op: Op[Any]) -> Any:
            answer = app.driver.run(op)
            if op.name == "cancel":
                advance(len(answer))
            return answer

        return sequence.run(batch._cancelling(by, why), ask)
