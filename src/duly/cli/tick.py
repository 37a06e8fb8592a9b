"""`duly tick module:app`: one bounded pass over the queue, for cron, timers and heartbeats."""

from __future__ import annotations

import asyncio

import click

from duly.app.locate import find_app
from duly.cli import logs, output
from duly.cli.options import json_option
from duly.cli.worker import read_queues, warn_of_slips
from duly.duly import Duly
from duly.store import ops
from duly.worker.tick import Ticked, Ticker


@click.command()
@click.argument("target", metavar="MODULE:APP", type=click.Path())
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="How many jobs to run at most; how many due times to fire, rows to promote and to prune at a time.",
)
@click.option(
    "--max-seconds",
    type=click.FloatRange(0, min_open=True),
    default=50.0,
    show_default=True,
    help="Begin nothing after so many seconds; what runs then has the grace time to end.",
)
@click.option("--concurrency", type=click.IntRange(1), default=10, show_default=True, help="How many jobs run at once.")
@click.option(
    "--queues", multiple=True, metavar="NAME[:LIMIT],…", help="Queues to serve. Default: those of the app's tasks."
)
@click.option("--grace", help="How long running jobs may go on after --max-seconds. Default: 30s. [$DULY_GRACE]")
@click.option("--url", help="The database, instead of the one that the app names. [$DULY_URL, if the app names none]")
@click.option(
    "--log-level",
    type=click.Choice(logs.LEVELS, case_sensitive=False),
    default="warning",
    show_default=True,
    help="What to log, beside the one line at the end.",
)
@json_option
def command(
    target: str,
    limit: int,
    max_seconds: float,
    concurrency: int,
    queues: tuple[str, ...],
    grace: str | None,
    url: str | None,
    log_level: str,
    as_json: bool,
) -> None:
    """Do one bounded pass over the queue, and end.

    Makes due what is due, takes jobs from workers that have gone, fires schedules, runs jobs, removes what has had its
    time. Ticks may overlap, with each other and with workers. A job whose worker died is taken over by a tick that has
    time to make sure: --max-seconds should be more than a third of its lease.

    Examples:
      duly tick tasks:app
      duly tick tasks:app --limit 500 --max-seconds 25 --json

    In a crontab, once a minute:
      * * * * * cd /srv/shop && .venv/bin/duly tick tasks:app

    Exit codes: 0 the pass is done, whatever became of the jobs; 1 the database is away; 2 wrong usage.
    """
    logs.configure(log_level, as_json=as_json)
    app = find_app(target, Duly, url=url)
    ticker = Ticker(
        app,
        limit=limit,
        max_seconds=max_seconds,
        queues=read_queues(queues),
        concurrency=concurrency,
        grace=grace,
    )
    app.driver.run(ops.clock())  # a tick does not wait for a database: the next one comes soon
    warn_of_slips(ticker)
    try:
        ticked = asyncio.run(ticker.tick())
    finally:
        app.close()
    if as_json:
        output.answer_json(ticked)
    else:
        click.echo(summary(ticked))


def summary(ticked: Ticked) -> str:
    """Say in one line what a tick came to."""
    ends = [f"{count} {word}" for word in ("succeeded", "failed", "dead") if (count := getattr(ticked, word))]
    words = [
        f"fired {ticked.fired}",
        f"ran {ticked.ran}" + (f" ({', '.join(ends)})" if ends else ""),
        *(f"{word} {count}" for word in ("promoted", "rescued", "pruned") if (count := getattr(ticked, word))),
        f"{ticked.seconds:.1f} s",
    ]
    if ticked.more:
        words.append("stopped at its bound: there may be more")
    if ticked.late:
        leases = output.plural(ticked.late, "ended lease")
        words.append(f"{leases} left: it takes {ticked.late_s:.0f} s more to be sure of them")
    return "tick: " + ", ".join(words)
