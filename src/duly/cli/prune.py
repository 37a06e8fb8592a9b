"""`duly prune`: removes all expired rows at once, which the upkeep of workers removes in chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import click

from duly.cli import output
from duly.cli.database import with_app
from duly.cli.options import bulk_options, read_duration
from duly.duly import Duly
from duly.errors import ConfigError
from duly.model import MANY
from duly.store import ops
from duly.worker.upkeep import CHUNK

REST_S = 0.01  # between two chunks, so that other writers are not blocked
NOUNS = {"results": "result", "done": "finished job", "batches": "batch", "workers": "worker record"}
PLURALS = {"batches": "batches", "workers": "worker records"}


@click.command()
@click.option(
    "--keep",
    "keep_ms",
    metavar="DURATION",
    callback=read_duration,
    help="Keep events, fires, batches and workers this long. Default: $DULY_KEEP, then 7d. "
    "A finished job has the time that it was enqueued with.",
)
@click.option(
    "--only",
    "names",
    metavar="NAME,…",
    callback=lambda context, option, text: _names(text),
    help=f"Only these of {', '.join(ops.PRUNABLE)}.",
)
@bulk_options
@with_app
def command(app: Duly, keep_ms: int | None, names: list[str], dry_run: bool, yes: bool, as_json: bool) -> None:
    """Remove expired rows now, instead of in chunks.

    Workers do the same every minute: use this for a database without workers, or for a shorter --keep. Dead jobs are
    never removed here: duly dead purge does that. A SQLite file keeps its size, and reuses the space.

    Examples:
      duly prune --dry-run
      duly prune --yes --keep 2d --only events,workers
      duly prune --url postgresql://user@host/db --yes --json
    """
    keep_ms = app.settings.keep_ms if keep_ms is None else keep_ms
    counted = app.driver.run(ops.prunable(keep_ms=keep_ms))
    found = {name: counted[name] for name in names}
    if dry_run:
        _print("would remove", found, as_json, output.count)
    elif not any(found.values()):
        _print("removed", found, as_json, _exactly)
    elif output.confirmed(f"Remove {_listed(found, output.count)}?", yes=yes):
        _print("removed", _prune(app, found, keep_ms), as_json, _exactly)
    else:
        raise click.Abort


def _names(only: str | None) -> list[str]:
    """Read the kinds to prune, in the order in which upkeep prunes them."""
    if only is None:
        return list(ops.PRUNABLE)
    given = {name.strip() for name in only.split(",") if name.strip()}
    if unknown := sorted(given - set(ops.PRUNABLE)):
        raise ConfigError(f"--only: cannot prune {unknown[0]!r}; what can be pruned: {', '.join(ops.PRUNABLE)}")
    if not given:
        raise ConfigError(f"--only names nothing: give some of {','.join(ops.PRUNABLE)}")
    return [name for name in ops.PRUNABLE if name in given]


def _prune(app: Duly, found: Mapping[str, int], keep_ms: int) -> dict[str, int]:
    """Remove chunk by chunk until one is not full; return how many of each kind were removed."""
    removed = dict.fromkeys(found, 0)
    uncounted = any(number > MANY for number in found.values())
    with output.progress("pruning", None if uncounted else sum(found.values())) as advance:
        for name in found:
            taken = CHUNK
            while taken >= CHUNK:
                taken = app.driver.run(ops.prune(name, CHUNK, keep_ms=keep_ms))
                removed[name] += taken
                advance(taken)
                time.sleep(REST_S)
    return removed


def _print(done: str, figures: Mapping[str, int], as_json: bool, write: Callable[[int], str]) -> None:
    if as_json:
        output.answer_json({done.replace(" ", "_"): figures})
    elif any(figures.values()):
        click.echo(f"{done} {_listed(figures, write)}")
    else:
        click.echo("nothing has expired")


def _listed(figures: Mapping[str, int], write: Callable[[int], str]) -> str:
    return ", ".join(f"{write(number)} {_noun(name, number)}" for name, number in figures.items() if number)


def _noun(name: str, number: int) -> str:
    one = NOUNS.get(name, name.removesuffix("s"))
    return one if number == 1 else PLURALS.get(name, f"{one}s")


def _exactly(number: int) -> str:
    return f"{number:,}"
