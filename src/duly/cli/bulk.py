"""Which jobs a command changes: those that are named, or all that match, walked in pages."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import click

from duly.cli import output
from duly.cli.database import whole_id
from duly.duly import Duly
from duly.errors import JobNotFound, StoreError
from duly.model import MANY, JobRecord

PAGE = 500
SAMPLE = 10
NOT_FOUND = "not found"

# Asked with the last id of the page before, and how many at most.
Listing: TypeAlias = Callable[[str | None, int], list[JobRecord]]


class Done(NamedTuple):
    """What became of one job."""

    id: str
    outcome: str
    new_id: str | None = None
    refused: bool = False


Act: TypeAlias = Callable[[Sequence[JobRecord]], list[Done]]


class Selection(NamedTuple):
    """What is to be done, to which jobs, and how it is said."""

    verb: str
    ids: Sequence[str]
    matching: Sequence[Listing]
    limit: int | None
    ask_named: bool = False
    # What would become of a job that is named, where that can be told without doing it.
    foreseen: Callable[[JobRecord], Done | None] = lambda job: None


def need_some(ids: Sequence[str], filters: Iterable[Any], everything: bool, what: str = "filters") -> None:
    """Refuse to guess which jobs are meant."""
    filtered = everything or any(value not in (None, False) for value in filters)
    if ids and filtered:
        raise click.UsageError(f"Name jobs or give {what}, not both.")
    if not ids and not filtered:
        raise click.UsageError(f"Say which jobs: name their ids, give {what}, or --all for all of them.")


def change(app: Duly, chosen: Selection, act: Act, *, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Do it to the jobs that are meant, tell what became of them, and give the exit code."""
    if chosen.ids:
        return _change_named(app, chosen, act, dry_run=dry_run, yes=yes, as_json=as_json)
    if dry_run:
        return _say_what_matches(chosen, as_json=as_json)
    return _change_matching(chosen, act, yes=yes, as_json=as_json)


def _change_named(app: Duly, chosen: Selection, act: Act, *, dry_run: bool, yes: bool, as_json: bool) -> int:
    jobs, missing = named(app, chosen.ids)
    if dry_run:
        done = [chosen.foreseen(job) or Done(job.id, f"would {chosen.verb}, it is {job.state}") for job in jobs]
    elif chosen.ask_named and jobs and not output.confirmed(_question(chosen, len(jobs)), yes=yes):
        raise click.Abort
    else:
        done = act(jobs) if jobs else []
    _tell_each(done + missing, as_json=as_json)
    if missing:
        return 3
    return 1 if any(one.refused for one in done) else 0


def named(app: Duly, given: Iterable[str]) -> tuple[list[JobRecord], list[Done]]:
    """Read the jobs that were named, each once, and say which are not there."""
    found: dict[str, JobRecord] = {}
    missing: dict[str, Done] = {}
    for text in given:
        try:
            job = app.get(whole_id(app, text))
        except JobNotFound as error:
            click.echo(f"duly: {error}", err=True)
            missing[text] = Done(text, NOT_FOUND)
            continue
        if job is None:
            click.echo(f"duly: no job has the id {text}", err=True)
            missing[text] = Done(text, NOT_FOUND)
        else:
            found[job.id] = job
    return list(found.values()), list(missing.values())


def _tell_each(done: Sequence[Done], *, as_json: bool) -> None:
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


def _say_what_matches(chosen: Selection, *, as_json: bool) -> int:
    """Count what matches, as far as people count, and show the first few."""
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
    if not yes or sys.stderr.isatty():  # somebody wants to know how many
        total = sum(len(page) for page in walk(chosen.matching, _countable(chosen.limit)))
        if total and not output.confirmed(_question(chosen, total), yes=yes):
            raise click.Abort
    counts: Counter[str] = Counter()
    with _told_when_stopped(counts), output.progress(chosen.verb, _length(total)) as advance:
        for page in walk(chosen.matching, chosen.limit):
            counts.update(one.outcome for one in act(page))
            advance(len(page))
    if as_json:
        output.answer_json({"counts": counts})
    else:
        click.echo(summary(counts) if counts else f"nothing to {chosen.verb}: no job matches")
    if chosen.limit is not None and counts.total() >= chosen.limit:
        click.echo(f"duly: stopped at --limit {chosen.limit}; there may be more", err=True)
    return 0


@contextmanager
def _told_when_stopped(counts: Counter[str]) -> Iterator[None]:
    """Say what was done before it was stopped half-way."""
    try:
        yield
    except (KeyboardInterrupt, StoreError):
        if counts:
            click.echo(f"\nduly: stopped half-way: {summary(counts)}; the rest is as it was", err=True)
        raise


def walk(listings: Iterable[Listing], limit: int | None = None) -> Iterator[list[JobRecord]]:
    """Give all jobs of some listings in pages; what an act leaves as it was does not come again."""
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
    """Make a listing that leaves out what was replayed or resolved, so that it does not use up a limit."""

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
    """Write how many became what: "12 cancelled, 1 had ended"."""
    return ", ".join(f"{number:,} {outcome}" for outcome, number in counts.most_common())


def _length(total: int | None) -> int | None:
    """Give a count that a bar can end at; one that was given up on is none."""
    return total if total is None or total <= MANY else None


def _question(chosen: Selection, total: int) -> str:
    return f"{chosen.verb.capitalize()} {output.plural(total, 'job')}?"


def _countable(limit: int | None) -> int:
    return MANY + 1 if limit is None else min(limit, MANY + 1)
