"""Commands that change many jobs: those that the user names, or all that match, read page by page."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import click

from duly.cli import output
from duly.cli.database import Choice, database_options, whole_id
from duly.cli.options import COUNT, audit_options, bulk_options, json_option
from duly.duly import Duly
from duly.errors import JobNotFound, StoreError
from duly.model import MANY, JobRecord

PAGE = 500
SAMPLE = 10
NOT_FOUND = "not found"
# Options that let more jobs match, and choose none without a filter.
WIDENING = ("partial", "settled")

# Called with the last id of the page before, and the size of the page.
Listing: TypeAlias = Callable[[str | None, int], list[JobRecord]]
# Called with the app and the filters, gives the listings of what matches.
Matching: TypeAlias = Callable[[Duly, Mapping[str, Any]], Sequence[Listing]]


class Done(NamedTuple):
    """The outcome of one job."""

    id: str
    outcome: str
    new_id: str | None = None
    refused: bool = False


Act: TypeAlias = Callable[[Sequence[JobRecord]], list[Done]]


class Selection(NamedTuple):
    """A verb, and the jobs that it is done to."""

    verb: str
    ids: Sequence[str]
    matching: Sequence[Listing]
    limit: int | None
    ask_named: bool = False
    # The outcome for a named job, where its state tells it without the change.
    foreseen: Callable[[JobRecord], Done | None] = lambda job: None


def bulk_command(
    verb: str,
    matching: Matching,
    *,
    everything: str,
    ask_named: bool = False,
    foreseen: Callable[[JobRecord], Done | None] = lambda job: None,
    audit: Callable[[Callable[..., None]], Callable[..., None]] = audit_options,
    check: Callable[[Mapping[str, Any]], None] = lambda given: None,
) -> Callable[[Callable[..., list[Done]]], Callable[..., None]]:
    """Make a command of a function that changes some jobs: `act(app, jobs, by=…, why=…)`.

    `everything` is the help of --all; `check` may refuse the options before the database is opened.
    """

    def make(act: Callable[..., list[Done]]) -> Callable[..., None]:
        @functools.wraps(act)
        def run(choice: Choice, ids: Sequence[str], everything: bool, limit: int | None, **given: Any) -> None:
            changing = _take(given, "by", "why")
            how = _take(given, "dry_run", "yes", "as_json")
            check(changing | how)
            need_some(ids, given, everything)
            with choice.opened() as app:
                chosen = Selection(verb, ids, matching(app, given), limit, ask_named, foreseen)
                sys.exit(change(app, chosen, functools.partial(act, app, **changing), **how))

        command = bulk_options(audit(database_options(json_option(run))))
        command = click.option("--limit", type=COUNT, help="How many at most. Default: all that match.")(command)
        command = click.option("--all", "everything", is_flag=True, help=everything)(command)
        return click.argument("ids", metavar="[ID]…", nargs=-1)(command)

    return make


def _take(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: given.pop(name) for name in names}


def need_some(ids: Sequence[str], filters: Mapping[str, Any], everything: bool) -> None:
    """Refuse a command that names no jobs and gives no filters, or both."""
    chosen = (value for name, value in filters.items() if name not in WIDENING)
    filtered = everything or any(value is not None for value in chosen)
    if ids and filtered:
        raise click.UsageError("Name jobs or give filters, not both.")
    if not ids and not filtered:
        raise click.UsageError("Choose the jobs: name their ids, give filters, or --all for all of them.")


def change(app: Duly, chosen: Selection, act: Act, *, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Change the chosen jobs, print what became of them, and return the exit code."""
    if chosen.ids:
        return _change_named(app, chosen, act, dry_run=dry_run, yes=yes, as_json=as_json)
    if dry_run:
        return _print_matching(chosen, as_json=as_json)
    return _change_matching(chosen, act, yes=yes, as_json=as_json)


def _change_named(app: Duly, chosen: Selection, act: Act, *, dry_run: bool, yes: bool, as_json: bool) -> int:
    jobs, missing = named(app, chosen.ids)
    if dry_run:
        done = [chosen.foreseen(job) or Done(job.id, f"would {chosen.verb}, it is {job.state}") for job in jobs]
    elif chosen.ask_named and jobs and not output.confirmed(_question(chosen, len(jobs)), yes=yes):
        raise click.Abort
    else:
        done = act(jobs) if jobs else []
    _print_each(done + missing, as_json=as_json)
    if missing:
        return 3
    return 1 if any(one.refused for one in done) else 0


def named(app: Duly, given: Iterable[str]) -> tuple[list[JobRecord], list[Done]]:
    """Read the named jobs, each once, and report those that do not exist."""
    found: dict[str, JobRecord] = {}
    missing: dict[str, Done] = {}
    for text in given:
        try:
            job = app.get(whole_id(app, text))
        except JobNotFound as error:
            output.remark(str(error))
            missing[text] = Done(text, NOT_FOUND)
            continue
        if job is None:
            output.remark(f"no job has the id {text}")
            missing[text] = Done(text, NOT_FOUND)
        else:
            found[job.id] = job
    return list(found.values()), list(missing.values())


def _print_each(done: Sequence[Done], *, as_json: bool) -> None:
    counts = Counter(one.outcome for one in done)
    if as_json:
        jobs = [{"id": one.id, "outcome": one.outcome, "new_id": one.new_id} for one in done]
        output.answer_json({"counts": counts, "jobs": jobs})
        return
    for one in done:
        if one.outcome != NOT_FOUND:
            click.echo(f"{one.id}  {one.outcome}" + (f" as {one.new_id}" if one.new_id else ""))
    if len(done) > 1:
        click.echo(summary(counts))


def _print_matching(chosen: Selection, *, as_json: bool) -> int:
    """Count what matches, up to the greatest count, and print the first few."""
    counts: Counter[str] = Counter()
    first: list[JobRecord] = []
    for page in walk(chosen.matching, _countable(chosen.limit)):
        counts.update(str(job.state) for job in page)
        first += page[: SAMPLE - len(first)]
    total = counts.total()
    if as_json:
        output.answer_json({"dry_run": True, "count": total, "counts": counts, "first": [job.id for job in first]})
    elif not total:
        click.echo(f"nothing to {chosen.verb}: no job matches")
    else:
        by_state = f" ({summary(counts)})" if total <= MANY else ""
        click.echo(f"would {chosen.verb} {output.plural(total, 'job')}{by_state}; nothing was changed")
        output.table(["id", "state", "task", "queue"], [[job.id, job.state, job.task, job.queue] for job in first])
        if total > len(first):
            click.echo("…")
    return 0


def _change_matching(chosen: Selection, act: Act, *, yes: bool, as_json: bool) -> int:
    total = None
    if not yes or sys.stderr.isatty():  # the question and the progress bar need the number
        total = sum(len(page) for page in walk(chosen.matching, _countable(chosen.limit)))
        if total and not output.confirmed(_question(chosen, total), yes=yes):
            raise click.Abort
    counts: Counter[str] = Counter()
    with _reported_when_stopped(counts), output.progress(chosen.verb, _length(total)) as advance:
        for page in walk(chosen.matching, chosen.limit):
            counts.update(one.outcome for one in act(page))
            advance(len(page))
    if as_json:
        output.answer_json({"counts": counts})
    else:
        click.echo(summary(counts) if counts else f"nothing to {chosen.verb}: no job matches")
    if chosen.limit is not None and counts.total() >= chosen.limit:
        output.remark(f"stopped at --limit {chosen.limit}; there may be more")
    return 0


@contextmanager
def _reported_when_stopped(counts: Counter[str]) -> Iterator[None]:
    """Print what was done before an interruption or an error."""
    try:
        yield
    except (KeyboardInterrupt, StoreError):
        if counts:
            click.echo(f"\nduly: stopped half-way: {summary(counts)}; the rest is as it was", err=True)
        raise


def walk(listings: Iterable[Listing], limit: int | None = None) -> Iterator[list[JobRecord]]:
    """Give all jobs of some listings in pages; a job that an act leaves unchanged does not come again."""
    left = limit
    for listing in listings:
        last = None
        while left is None or left > 0:
            size = PAGE if left is None else min(PAGE, left)
            page = listing(last, size)
            if page:
                yield page
                last = page[-1].id
                left = None if left is None else left - len(page)
            if len(page) < size:
                break


def unsettled(listing: Listing) -> Listing:
    """Make a listing without replayed and resolved jobs, so that they do not use up a limit."""

    def page(last: str | None, limit: int) -> list[JobRecord]:
        found: list[JobRecord] = []
        while len(found) < limit:
            jobs = listing(last, limit)
            found += [job for job in jobs if job.replayed_as is None and job.resolved_at is None]
            if len(jobs) < limit:
                break
            last = jobs[-1].id
        return found[:limit]

    return page


def summary(counts: Counter[str]) -> str:
    """Write how many jobs had each outcome: "12 cancelled, 1 had ended"."""
    return ", ".join(f"{number:,} {outcome}" for outcome, number in counts.most_common())


def _length(total: int | None) -> int | None:
    """Give the length of a progress bar; None where the count was stopped."""
    return total if total is None or total <= MANY else None


def _question(chosen: Selection, total: int) -> str:
    return f"{chosen.verb.capitalize()} {output.plural(total, 'job')}?"


def _countable(limit: int | None) -> int:
    return MANY + 1 if limit is None else min(limit, MANY + 1)
