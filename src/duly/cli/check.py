"""`duly check`: checks whether the workers on this machine are alive. It uses no database, for probes."""

from __future__ import annotations

import json
import sys

import click

from duly.rules.durations import to_ms
from duly.worker import liveness


@click.command()
@click.option(
    "--worker",
    is_flag=True,
    envvar="DULY_CHECK_WORKER",
    help="Check the workers of this user on this machine; this is the default.",
)
@click.option(
    "--within",
    default="30s",
    show_default=True,
    envvar="DULY_CHECK_WITHIN",
    help="How old the last sign of life may be. A worker writes one every second.",
)
@click.option("--json", "as_json", is_flag=True, envvar="DULY_CHECK_JSON", help="Answer in JSON.")
def command(worker: bool, within: str, as_json: bool) -> None:
    """Check whether the workers on this machine are alive, for probes.

    Exit code 0: at least one worker runs, and all are alive. 1: no worker runs, or one is silent because its event loop
    hangs. A worker that waits for its database is alive: a restart would not help.

    Examples:
      duly check
      duly check --within 10s --json
    """
    within_s = to_ms(within, what="--within") / 1000
    signs = list(liveness.signs())
    good = bool(signs) and all(sign.alive(within_s) for sign in signs)
    if as_json:
        workers = [
            {"worker": sign.worker, "pid": sign.pid, "age_s": round(sign.age_s, 1), "alive": sign.alive(within_s)}
            for sign in signs
        ]
        click.echo(json.dumps({"alive": good, "workers": workers}))
    else:
        for sign in signs:
            verdict = "alive" if sign.alive(within_s) else "silent"
            click.echo(f"{sign.worker} (pid {sign.pid}) is {verdict}: last sign of life {max(sign.age_s, 0):.0f} s ago")
        if not signs:
            click.echo(f"no worker of this user runs here (no sign of life in {liveness.folder()})")
    sys.exit(0 if good else 1)
