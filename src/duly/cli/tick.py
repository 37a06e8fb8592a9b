"""`duly tick module:app`: does one bounded pass over the queue, for cron and timers."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import click

from duly.app.define import span
from duly.app.locate import find_app
from duly.cli import logs, output
from duly.cli.options import COUNT, URL_OF_APP, json_option
from duly.cli.shutdown import LAST_SECONDS, stuck
from duly.cli.worker import read_queues, warn_of_mistakes
from duly.duly import Duly
from duly.worker.tick import Ticked, Ticker


@click.command()
@click.argument("target", metavar="MODULE:APP", type=click.Path())
@click.option(
    "--limit",
    type=COUNT,
    default=100,
    show_default=True,
    help="How many jobs to run at most; also the size of each chunk of fires, promoted rows and pruned rows.",
)
@click.option(
    "--max-seconds",
    default="50s",
    show_default=True,
    callback=lambda context, option, text: span(text, option.opts[0]) / 1000,
    help="Start nothing after this time, in seconds or as 50s; running jobs then have the grace time to end.",
)
@click.option("--concurrency", type=COUNT, default=10, show_default=True, help="How many jobs run at once.")
@click.option(
    "--queues", multiple=True, metavar="NAME[:LIMIT],…", help="Queues to serve. Default: those of the app's tasks."
)
@click.option("--grace", help="How long running jobs may continue after --max-seconds. Default: 30s. [$DULY_GRACE]")
@URL_OF_APP
@click.option(
    "--log-level",
    type=click.Choice(logs.LEVELS, case_sensitive=False),
    default="warning",
    show_default=True,
    help="The lowest level to log, besides the summary.",
)
@json_option
def command(
    target: str, queues: tuple[str, ...], url: str | None, log_level: str, as_json: bool, **bounds: Any
) -> None:
    """Do one bounded pass over the queue, and exit.

    Promotes due jobs, rescues jobs of dead workers, fires schedules, runs jobs, and removes expired rows. Ticks may
    overlap, with each other and with workers. A tick rescues a job only if it runs for more than a third of its lease:
    choose --max-seconds accordingly.

    Examples:
      duly tick tasks:app
      duly tick tasks:app --limit 500 --max-seconds 25 --json

    In a crontab, once a minute:
      * * * * * cd /srv/shop && .venv/bin/duly tick tasks:app

    Exit codes: 0 the pass is done, even if jobs failed; 1 the database is down or slow; 2 wrong usage.
    """
    logs.configure(log_level, as_json=as_json)
    app = find_app(target, Duly, url=url)
    ticker = Ticker(app, queues=read_queues(queues), **bounds)
    warn_of_mistakes(ticker)
    hard_end = threading.Timer(
        bounds["max_seconds"] + ticker.grace_s + LAST_SECONDS, stuck, ("tick", ticker.may_hold_jobs)
    )
    hard_end.daemon = True
    hard_end.start()
    try:
        ticked = asyncio.run(ticker.tick())
    finally:
        if not ticker.cut_off:  # else it would wait for the answer
            app.close()
        hard_end.cancel()
    output.answer(ticked, summary(ticked), as_json=as_json)


def summary(ticked: Ticked) -> str:
    """Write the result of a tick in one line."""
    ends = [f"{count} {word}" for word in ("succeeded", "failed", "dead") if (count := getattr(ticked, word))]
    words = [
        f"fired {ticked.fired}",
        f"ran {ticked.ran}" + (f" ({', '.join(ends)})" if ends else ""),
        *(f"{word} {count}" for word in ("promoted", "rescued", "pruned") if (count := getattr(ticked, word))),
        f"{ticked.seconds:.1f} s",
    ]
    if ticked.more:
        words.append("stopped at its limit: there may be more")
    if ticked.late:
        leases = output.plural(ticked.late, "expired lease")
        words.append(f"{leases} left: rescuing them takes {ticked.late_s:.0f} s more")
    return "tick: " + ", ".join(words)
