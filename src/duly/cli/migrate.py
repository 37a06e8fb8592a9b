"""`duly migrate`: creates or updates the tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

import click

from duly.app.locate import find_app
from duly.cli import read_settings
from duly.cli.database import Choice, database_options
from duly.cli.options import json_option
from duly.duly import Duly
from duly.errors import ConfigError
from duly.rules.settings import Settings
from duly.store import migrate, open_driver, ops
from duly.store.driver import Driver
from duly.store.migrate import Migration
from duly.store.statements import Dialect


@click.command()
@database_options
@click.option("--grant", metavar="ROLE", help="PostgreSQL: let this role use the tables, but not alter them.")
@click.option("--plan", is_flag=True, help="Print what would be done, and change nothing.")
@click.option("--sql", is_flag=True, help="Print the SQL of what would be done, and change nothing.")
@json_option
def command(choice: Choice, grant: str | None, plan: bool, sql: bool, as_json: bool) -> None:
    """Create or update duly's tables.

    A SQLite file is also migrated whenever it is opened. PostgreSQL and D1 are migrated only by this command, so that
    workers need no right to create tables. Running it twice changes nothing.

    Examples:
      duly migrate --url postgresql://user@host/db
      duly migrate --url postgresql://owner@host/db --grant app
      duly migrate --app tasks:app
      duly migrate --plan
      duly migrate --sql > duly.sql
    """
    read = _settings(choice)
    driver = open_driver(read)  # opens nothing yet, and refuses an unknown kind of URL
    work = {"postgresql": _postgres, "d1": _d1}.get(read.url.store, _sqlite)
    found = work(driver, read, grant, not (plan or sql))
    if sql:
        click.echo("begin;\n" + "".join(f"{statement};\n" for statement in found.statements) + "commit;")
    else:
        _print(found, read, done=not plan, grant=grant, as_json=as_json)


def _settings(choice: Choice) -> Settings:
    if choice.target is None:
        return read_settings({"url": choice.url, "schema": choice.schema})
    if choice.schema is not None:
        raise ConfigError(
            f"--schema is for a database named by --url; {choice.target} names its own: Duly(…, schema=…)"
        )
    return find_app(choice.target, Duly, url=choice.url).settings


class Found(NamedTuple):
    """The migrations that a database lacks, or that were applied to it."""

    version: int
    steps: tuple[Migration, ...]
    statements: list[str]


def _postgres(driver: Driver, read: Settings, grant: str | None, apply: bool) -> Found:
    from duly.store.postgres import schema as postgres

    meta = postgres.look(read.url.dsn, schema=read.schema)
    steps = _lacking("postgres", meta, read)
    if apply and (steps or grant):
        postgres.bring_up_to_date(read.url.dsn, schema=read.schema, grant=grant)
    return Found(migrate.version(meta), steps, postgres.migration_statements(read.schema, steps, grant=grant))


def _sqlite(driver: Driver, read: Settings, grant: str | None, apply: bool) -> Found:
    from duly.store.sqlite import schema as sqlite

    if grant is not None:
        raise ConfigError(f"--grant is for PostgreSQL; {read.url} has no roles")
    meta = sqlite.look(read.url.path or "")
    steps = _lacking("sqlite", meta, read)
    if apply:
        driver.run(ops.clock())
        driver.close()
    return Found(migrate.version(meta), steps, [statement for step in steps for statement in step.statements])


def _d1(driver: Driver, read: Settings, grant: str | None, apply: bool) -> Found:
    from duly.store.d1.driver import D1Driver

    assert isinstance(driver, D1Driver)
    if grant is not None:
        raise ConfigError(f"--grant is for PostgreSQL; {read.url} has no roles")
    meta = driver.meta()
    steps = _lacking("sqlite", meta, read)
    if apply:
        driver.migrate()
        driver.close()
    return Found(migrate.version(meta), steps, [statement for step in steps for statement in step.statements])


def _lacking(dialect: Dialect, meta: Mapping[str, str], read: Settings) -> tuple[Migration, ...]:
    steps = migrate.pending(dialect, meta)
    if not steps:
        migrate.check(dialect, meta, str(read.url))  # it may be newer than this version
    return steps


def _print(found: Found, read: Settings, *, done: bool, grant: str | None, as_json: bool) -> None:
    names = [f"{step.number:04d}_{step.name}" for step in found.steps]
    version = found.steps[-1].number if done and found.steps else found.version
    granted = f", {'granted to' if done else 'would grant to'} {grant}" if grant else ""
    if as_json:
        key = "applied" if done else "pending"
        click.echo(json.dumps({"url": str(read.url), "schema_version": version, key: names, "grant": grant}))
    elif names:
        click.echo(f"{read.url}: {'applied' if done else 'would apply'} {', '.join(names)}{granted}")
    else:
        click.echo(f"{read.url}: up to date (schema version {version}){granted}")
