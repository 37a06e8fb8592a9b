"""`duly prune`: remove what has had its time, all of it now, as the upkeep of a worker does bit by bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import click

from duly.cli import output
from duly.cli.database import bulk_options, database_options, json_option, opened
from duly.duly import Duly
from duly.errors import ConfigError
from duly.model import MANY
from duly.rules.durations import to_ms
from duly.store import ops
from duly.worker.upkeep import CHUNK

REST_S = 0.01  # room for others between two chunks
NOUNS = {"results": "result", "done": "finished job", "batches": "batch", "workers": "worker that has gone"}
PLURALS = {"batches": "batches", "workers": "workers that have gone"}


@click.command(
    epilog="""\b
Examples:
  duly prune --dry-run
  duly prune --yes --keep 2d --only events,workers
  duly prune --url postgresql://user@host/db --yes --json
"""
)
@click.option(
    "--keep",
    metavar="DURATION",
    help="Keep events, fires, batches and workers this long. Default: $DULY_KEEP, then 7d. "
    "A finished job has the time that it was enqueued with.",
)
@click.option("--only", metavar="NAME,…", help=f"Only these of {', '.join(ops.PRUNABLE)}.")
@bulk_options
@database_options
@json_option
def command(
    keep: str | None,
    only: str | None,
    dry_run: bool,
    yes: bool,
    url: str | None,
    schema: str | None,
    target: str | None,
    as_json: bool,
) -> None:
    """Remove what has had its time, now instead of bit by bit.

    Workers do the same every minute, so this is for a database that has none, or a shorter --keep. Dead jobs are
    never removed here: duly dead purge does that. A SQLite file keeps its size, and uses the room again.
    """
    names = _names(only)
    with opened(url, schema, target) as app:
        keep_ms = app.settings.keep_ms if keep is None else to_ms(keep, what="--keep")
        counted = app.driver.run(ops.prunable(keep_ms=keep_ms))
        found = {name: counted[name] for name in names}
        if dry_run:
            _tell("would remove", found, as_json, output.count)
        elif not any(found.values()):
            _tell("removed", found, as_json, _exactly)
        elif output.confirmed(f"Remove {_listed(found, output.count)}?", yes=yes):
            _tell("removed", _prune(app, found, keep_ms), as_json, _exactly)
        else:
            raise click.Abort


def _names(only: str | None) -> list[str]:
    """Read which kinds are meant, in the order in which upkeep removes them."""
    if only is None:
        return list(ops.PRUNABLE)
    given = {name.strip() for name in only.split(",") if name.strip()}
    if unknown := sorted(given - set(ops.PRUNABLE)):
        raise ConfigError(f"--only: cannot prune {unknown[0]!r}; what can be pruned: {', '.join(ops.PRUNABLE)}")
    if not given:
        raise ConfigError(f"--only names nothing: give some of {','.join(ops.PRUNABLE)}")
    return [name for name in ops.PRUNABLE if name in given]


def _prune(app: Duly, found: Mapping[str, int], keep_ms: int) -> dict[str, int]:
    """Remove a chunk after the other until none is full; answers how many of what went."""
    gone = dict.fromkeys(found, 0)
    given_up = any(number > MANY for number in found.values())
    with output.progress("pruning", None if given_up else sum(found.values())) as advance:
        for name in found:
            taken = CHUNK
            while taken >= CHUNK:
                taken = app.driver.run(ops.prune(name, CHUNK, keep_ms=keep_ms))
                gone[name] += taken
                advance(taken)
                time.sleep(REST_S)
    return gone


def _tell(done: str, figures: Mapping[str, int], as_json: bool, write: Callable[[int], str]) -> None:
    if as_json:
        output.answer_json({done.replace(" ", "_"): figures})
    elif any(figures.values()):
        click.echo(f"{done} {_listed(figures, write)}")
    else:
        click.echo("nothing has had its time")


def _listed(figures: Mapping[str, int], write: Callable[[int], str]) -> str:
    return ", ".join(f"{write(number)} {_noun(name, number)}" for name, number in figures.items() if number)


def _noun(name: str, number: int) -> str:
    one = NOUNS.get(name, name.removesuffix("s"))
    return one if number == 1 else PLURALS.get(name, f"{one}s")


def _exactly(number: int) -> str:
    return f"{number:,}"
