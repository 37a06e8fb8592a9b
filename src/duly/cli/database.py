"""Which database a command works on, and which jobs of it are meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import click

from duly.app.app import user
from duly.app.locate import find_app
from duly.duly import Duly
from duly.errors import ConfigError, JobNotFound, SchemaMismatch
from duly.model import State
from duly.rules.durations import to_ms
from duly.store import ops

C = TypeVar("C", bound=Callable[..., Any])

SHORTEST_ID, WHOLE_ID = 4, 32


def database_options(command: C) -> C:
    """Add the options that name a database."""
    for option in (
        click.option("--schema", help="PostgreSQL schema. Default: $DULY_SCHEMA, then duly.toml, then duly."),
        click.option(
            "--app",
            "target",
            metavar="MODULE:APP",
            type=click.Path(),  # completes files
            envvar="DULY_APP",
            help="The app whose database it is. [$DULY_APP]",
        ),
        click.option("--url", help="The database. Default: $DULY_URL, then duly.toml, then duly.db in this folder."),
    ):
        command = option(command)
    return command


def filter_options(command: C) -> C:
    """Add the options that say which jobs are meant, without their state."""
    for option in (
        click.option("--error", metavar="TEXT", help="Only jobs whose error or reason has this text in it."),
        click.option(
            "--since", metavar="WHEN", help="Only jobs since then: 2h (ago), 2026-01-31, 2026-01-31T12:00+01:00."
        ),
        click.option("--task", help="Only jobs of this task."),
        click.option("--queue", help="Only jobs of this queue."),
    ):
        command = option(command)
    return command


def json_option(command: C) -> C:
    """Add the option to answer for programs."""
    return click.option("--json", "as_json", is_flag=True, help="Answer in JSON; times are milliseconds UTC.")(command)


def audit_options(command: C) -> C:
    """Add the options that say who changes something and why; both are recorded."""
    command = click.option("--why", help="Why, for the record.")(command)
    return click.option("--by", default=user, show_default="whoever is logged in", help="Who, for the record.")(command)


def bulk_options(command: C) -> C:
    """Add the options of commands that change many things at once."""
    command = click.option("--yes", is_flag=True, help="Do it without asking.")(command)
    return click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")(command)


@contextmanager
def opened(url: str | None, schema: str | None, target: str | None, *, checked: bool = True) -> Iterator[Duly]:
    """Open a database that is there already: looking at a file that is not must not make it, nor tables in one."""
    app = Duly(url, schema=schema) if target is None else _app_of(target, url, schema)
    _check_file(app)
    if checked:
        check_tables(app)
    try:
        yield app
    finally:
        app.close()


def _check_file(app: Duly) -> None:
    from duly.store.sqlite import driver as sqlite

    path = app.settings.url.path
    if path is None:
        return
    sqlite.check_path(Path(path))
    if not Path(path).exists():
        raise ConfigError(
            f"there is no database {path} yet: a worker or an enqueue makes it. "
            "If it is another one, name it with --url, --app or $DULY_URL"
        )


def check_tables(app: Duly) -> None:
    """Refuse a SQLite file of somebody else's: opening it would put our tables into it."""
    from duly.store.sqlite import driver as sqlite

    path = app.settings.url.path
    if path is not None and not sqlite.look(path):
        raise SchemaMismatch(
            f"{path} has no tables of duly, and a look does not make them: name another database with --url, "
            "or run `duly migrate`"
        )


def _app_of(target: str, url: str | None, schema: str | None) -> Duly:
    app = find_app(target, Duly, url=url)
    if schema is not None:
        app._given["schema"] = schema
        app.__dict__.pop("settings", None)  # whatever importing it has read
    return app


def whole_id(app: Duly, given: str) -> str:
    """Give the whole id of a job of which a person gave the beginning."""
    if (text := id_digits(given)) is None:
        raise JobNotFound(f"{given!r} is not the id of a job: {AN_ID}")
    if len(text) == WHOLE_ID:
        return str(UUID(text))
    found = [job.id for job in app.driver.run(ops.listing(prefix=text, limit=4))]
    if not found:
        raise JobNotFound(f"no job has an id that begins with {given}")
    return the_one(found, given, "jobs")


AN_ID = f"an id is {WHOLE_ID} hexadecimal digits, or the first {SHORTEST_ID} or more of them"


def id_digits(given: str) -> str | None:
    """Give the digits of an id that a person may have shortened; None: it is no id."""
    text = given.strip().lower().replace("-", "")
    return text if SHORTEST_ID <= len(text) <= WHOLE_ID and set(text) <= set("0123456789abcdef") else None


def the_one(found: Sequence[str], given: str, what: str) -> str:
    """Give the only id that begins so, refusing to choose."""
    if len(found) > 1:
        some = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
        raise ConfigError(f"several {what} have an id that begins with {given}: {some}. Give more of it")
    return found[0]


def since_ms(app: Duly, text: str | None, what: str = "--since") -> int | None:
    """Read a moment: how long ago by the database's clock, or a date."""
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        ago_ms = _ago_ms(text, what)  # a mistake is told before the database is asked
        return max(0, app.driver.run(ops.clock()) - ago_ms)
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


def _ago_ms(text: str, what: str) -> int:
    try:
        return to_ms(text, what=what)
    except ConfigError:
        raise ConfigError(
            f"{what} is {text!r}: give how long ago, as in 2h or 30m, or a date, as in 2026-01-31 or "
            "2026-01-31T12:00+01:00"
        ) from None


def state_option(command: C) -> C:
    """Add the option that names a state."""
    return click.option("--state", type=click.Choice([str(state) for state in State]), help="Only jobs in this state.")(
        command
    )
