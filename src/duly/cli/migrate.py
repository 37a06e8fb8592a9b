"""`duly migrate`: create or update the tables."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from duly import settings
from duly.errors import ConfigError
from duly.store import migrate, open_driver, ops
from duly.store.migrate import Migration
from duly.store.statements import Dialect


@click.command(
    epilog="""\b
Examples:
  duly migrate --url postgresql://user@host/db
  duly migrate --url postgresql://owner@host/db --grant app
  duly migrate --plan
  duly migrate --sql > duly.sql
"""
)
@click.option("--url", envvar="DULY_URL", show_envvar=True, help="The database. Default: duly.db in this folder.")
@click.option("--schema", envvar="DULY_SCHEMA", show_envvar=True, help="PostgreSQL schema. Default: duly.")
@click.option("--grant", metavar="ROLE", help="PostgreSQL: let this role work with the tables, but not change them.")
@click.option("--plan", is_flag=True, help="Say what would be done, and change nothing.")
@click.option("--sql", is_flag=True, help="Print the SQL of what would be done, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
def command(url: str | None, schema: str | None, grant: str | None, plan: bool, sql: bool, as_json: bool) -> None:
    """Create or update duly's tables.

    A SQLite file is also migrated by itself whenever it is opened; PostgreSQL only by this command, so that
    workers need no right to create tables. Running it twice changes nothing.
    """
    file = Path("duly.toml")
    read = settings.load({"url": url, "schema": schema}, os.environ, file.read_text() if file.is_file() else None)
    if read.url.store == "postgresql":
        steps, script = _postgres(read, grant, apply=not (plan or sql))
    else:
        if grant is not None:
            raise ConfigError(f"--grant is for PostgreSQL; {read.url} has no roles")
        steps, script = _sqlite(read, apply=not (plan or sql))
    if sql:
        click.echo(script)
    else:
        _tell(steps, read, done=not plan, as_json=as_json)


def _postgres(read: settings.Settings, grant: str | None, *, apply: bool) -> tuple[tuple[Migration, ...], str]:
    from duly.store import postgres

    if apply:
        steps = postgres.bring_up_to_date(read.url.dsn, schema=read.schema, grant=grant)
    else:
        steps = postgres.pending(read.url.dsn, schema=read.schema)
    return steps, postgres.migration_sql(read.schema, steps, grant=grant)


def _sqlite(read: settings.Settings, *, apply: bool) -> tuple[tuple[Migration, ...], str]:
    from duly.store import sqlite

    steps = sqlite.pending(read.url.path or "")
    if apply:
        driver = open_driver(read)
        driver.run(ops.clock())
        driver.close()
    return steps, "\n".join(step.text for step in steps)


def _tell(steps: tuple[Migration, ...], read: settings.Settings, *, done: bool, as_json: bool) -> None:
    dialect: Dialect = "postgres" if read.url.store == "postgresql" else "sqlite"
    names = [f"{step.number:04d}_{step.name}" for step in steps]
    if as_json:
        key = "applied" if done else "pending"
        click.echo(json.dumps({"url": str(read.url), "schema_version": migrate.newest(dialect), key: names}))
    elif names:
        click.echo(f"{read.url}: {'applied' if done else 'would apply'} {', '.join(names)}")
    else:
        click.echo(f"{read.url}: up to date (schema version {migrate.newest(dialect)})")
