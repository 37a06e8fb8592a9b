"""`duly cloudflare`: the Worker through which duly uses a D1 database."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import click

from duly.cli import Named, output
from duly.cli.database import Choice, database_options
from duly.cli.doctor import plain_finding, print_finding
from duly.cli.options import json_option
from duly.cloudflare import project
from duly.duly import Duly
from duly.errors import ConfigError
from duly.store import ops
from duly.store.driver import Finding

FOLDER = click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=".")
FORCE = click.option("--force", is_flag=True, help="Overwrite files of duly/ that were changed by hand.")
ROUND_TRIPS = 5
NEXT = """
Next, in {folder}:
  npm install wrangler
  npx wrangler login
  npx wrangler d1 create duly           # write the id that it prints into wrangler.jsonc, as database_id
  duly cloudflare deploy                # prints the host of the Worker
  npx wrangler secret put API_TOKEN     # asks for the token: a long random text
  export DULY_D1_TOKEN=…                # the same text
  export DULY_URL=d1://env:DULY_D1_TOKEN@HOST/duly
  duly migrate
"""


@click.group("cloudflare", cls=Named)
def command() -> None:
    """Write, deploy and check the Worker through which duly uses a D1 database.

    Examples:
      duly cloudflare init worker
      duly cloudflare deploy worker
      duly cloudflare check --url d1://env:DULY_D1_TOKEN@duly.me.workers.dev/duly
    """


@command.command("init")
@FOLDER
@FORCE
def init(folder: Path, force: bool) -> None:
    """Write the files of a Worker into a folder, and print the commands to run next.

    The folder duly/ is written each time. wrangler.jsonc and src/index.mjs are yours: they are written once.

    Examples:
      duly cloudflare init worker
      duly cloudflare init worker --force
    """
    try:
        written = project.write(folder, force=force)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror}): choose another folder") from error
    for name in written:
        click.echo(f"wrote {folder / name}")
    click.echo(NEXT.format(folder=folder.resolve()), nl=False)


@command.command("deploy")
@FOLDER
@click.option("--dry-run", is_flag=True, help="Build the Worker, and upload nothing.")
@FORCE
def deploy(folder: Path, dry_run: bool, force: bool) -> None:
    """Write the folder duly/ again and deploy the Worker with the folder's wrangler.

    Run it after each upgrade of duly: a Worker of another version refuses the workers. The exit code is wrangler's.

    Examples:
      duly cloudflare deploy worker
      duly cloudflare deploy worker --dry-run
    """
    sys.exit(project.deploy(folder, dry_run=dry_run, force=force))


@command.command("check")
@database_options
@json_option
def check(choice: Choice, as_json: bool) -> None:
    """Check the gateway and its database: token, version, schema, clock, and the time of a round trip.

    Examples:
      duly cloudflare check --url d1://env:DULY_D1_TOKEN@duly.me.workers.dev/duly
      duly cloudflare check --app tasks:app --json

    Exit codes: 0 no error, 1 errors, 2 wrong usage, token or version.
    """
    with choice.opened(checked=False) as app:
        if app.settings.url.store != "d1":
            raise ConfigError(f"{app.settings.url} is no D1 database: check it with `duly doctor`")
        findings = [*app.driver.examine(), _round_trip(app)]
    if as_json:
        output.answer_json([plain_finding(finding) for finding in findings])
    else:
        for finding in findings:
            print_finding(finding)
    sys.exit(any(finding.level == "error" for finding in findings))


def _round_trip(app: Duly) -> Finding:
    """Measure the median time of a request that only reads the clock."""
    taken = []
    for _ in range(ROUND_TRIPS):
        began = time.monotonic()
        app.driver.run(ops.clock())
        taken.append(time.monotonic() - began)
    return Finding("round trip", "ok", f"{statistics.median(taken) * 1000:.0f} ms, the median of {ROUND_TRIPS}")
