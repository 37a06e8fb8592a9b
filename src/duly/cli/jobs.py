"""`duly jobs`: look at jobs."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from duly.cli import Named, read_settings
from duly.errors import ConfigError, JobNotFound
from duly.model import Attempt, JobRecord
from duly.store import open_driver, ops
from duly.store.driver import Driver
from duly.why import Why


@click.group(
    cls=Named,
    epilog="""\b
Examples:
  duly jobs show 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55
  duly jobs show 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55 --json
""",
)
def command() -> None:
    """Look at jobs."""


@command.command(
    epilog="""\b
Examples:
  duly jobs show 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55
  duly jobs show 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55 --json --url jobs.db
"""
)
@click.argument("job_id", metavar="ID")
@click.option("--url", help="The database. Default: $DULY_URL, then duly.toml, then duly.db in this folder.")
@click.option("--schema", help="PostgreSQL schema. Default: $DULY_SCHEMA, then duly.toml, then duly.")
@click.option("--json", "as_json", is_flag=True, envvar="DULY_JOBS_JSON", help="Answer in JSON.")
def show(job_id: str, url: str | None, schema: str | None, as_json: bool) -> None:
    """Show a job, what went wrong with it, and why it is not running.

    Exit code 3: no job has this id. Times in JSON are milliseconds UTC.
    """
    driver = _existing(url, schema)
    try:
        job, why = driver.run(ops.get(job_id)), driver.run(ops.why(job_id))
        if job is None:
            raise JobNotFound(f"no job has the id {job_id}", job_id)
        attempts = driver.run(ops.attempts(job_id))
    finally:
        driver.close()
    if as_json:
        click.echo(json.dumps({**msgspec.to_builtins(job), "attempts": msgspec.to_builtins(attempts)}))
    else:
        _tell(job, why, attempts)


def _existing(url: str | None, schema: str | None) -> Driver:
    """Open a database for reading: looking at a file that is not there must not make it."""
    read = read_settings({"url": url, "schema": schema})
    if read.url.path is not None and not Path(read.url.path).exists():
        raise ConfigError(f"there is no file {read.url.path}: name the database with --url or $DULY_URL")
    return open_driver(read)


def _tell(job: JobRecord, why: Why | None, attempts: list[Attempt]) -> None:
    for name, value in msgspec.structs.asdict(job).items():
        if value is not None:
            click.echo(f"{name:<16}  {_shown(name, value)}")
    for one in attempts:
        click.echo(
            f"attempt {one.attempt:<8}  {_shown('at', one.at)}  {one.outcome}: {one.error or 'no error was told'}"
        )
    if why is not None:
        click.echo(f"{'why':<16}  {why.sentence}")
    if attempts and attempts[-1].traceback:
        click.echo(
            f"\nThe traceback of attempt {attempts[-1].attempt} (of all of them: --json):\n{attempts[-1].traceback}"
        )


def _shown(name: str, value: Any) -> str:
    if isinstance(value, int) and (name == "at" or name.endswith(("_at", "_until"))):
        return datetime.fromtimestamp(value / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return json.dumps(value, ensure_ascii=False) if name in ("payload", "result") else str(value)
