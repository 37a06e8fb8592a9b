"""The database that a command works on: its options, how it is opened, and ids and times in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import click

from duly.app.locate import find_app
from duly.cli.options import json_option
from duly.cli.output import Row
from duly.duly import Duly
from duly.errors import ConfigError, JobNotFound, SchemaMismatch
from duly.rules.checks import moment
from duly.rules.durations import to_ms
from duly.store import ops

SHORTEST_ID, WHOLE_ID = 4, 32


class Choice(NamedTuple):
    """The database that the options of a command choose."""

    url: str | None
    schema: str | None
    target: str | None

    @contextmanager
    def opened(self, *, checked: bool = True) -> Iterator[Duly]:
        """Open the database. A file that does not exist, or has no tables of duly, is refused and not changed."""
        app = self.app()
        _check_file(app)
        if checked:
            check_tables(app)
        try:
            yield app
        finally:
            app.close()

    def app(self) -> Duly:
        """Make the app of this database; nothing is opened yet."""
        if self.target is None:
            return Duly(self.url, schema=self.schema)
        app = find_app(self.target, Duly, url=self.url)
        if self.schema is not None:
            app.database.change(schema=self.schema)
        return app


def with_app(command: Callable[..., None]) -> Callable[..., None]:
    """Add --url, --app, --schema and --json to a command, and hand in the opened app as its first argument."""

    @functools.wraps(command)
    def run(choice: Choice, **given: Any) -> None:
        with choice.opened() as app:
            command(app, **given)

    return database_options(json_option(run))


def database_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add --url, --app and --schema to a command, and hand them in as one `choice`."""

    @functools.wraps(command)
    def run(url: str | None, schema: str | None, target: str | None, **given: Any) -> None:
        command(choice=Choice(url, schema, target), **given)

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
        run = option(run)
    return run


def _check_file(app: Duly) -> None:
    from duly.store.sqlite.connection import check_path

    path = app.settings.url.path
    if path is None:
        return
    check_path(Path(path))
    if not Path(path).exists():
        raise ConfigError(
            f"there is no database {path} yet: a worker or an enqueue makes it. "
            "If it is another one, name it with --url, --app or $DULY_URL"
        )


def check_tables(app: Duly) -> None:
    """Refuse a SQLite file of another program: opening it would create our tables in it."""
    from duly.store.sqlite import schema

    path = app.settings.url.path
    if path is not None and not schema.look(path):
        raise SchemaMismatch(
            f"{path} has no tables of duly, and reading does not create them: name another database with --url, "
            "or run `duly migrate`"
        )


def whole_id(app: Duly, given: str) -> str:
    """Complete the id of a job of which the first digits were given."""
    if not is_id(given):
        raise JobNotFound(f"{given!r} is not the id of a job: {AN_ID}")
    if found := complete_id(given, lambda text: app.driver.run(ops.listing(prefix=text, limit=4)), "jobs"):
        return found
    raise JobNotFound(f"no job has an id that begins with {given}")


AN_ID = f"an id is {WHOLE_ID} hexadecimal digits, or the first {SHORTEST_ID} or more of them"


def is_id(given: str) -> bool:
    """Return whether this may be an id or its first digits."""
    text = _digits(given)
    return SHORTEST_ID <= len(text) <= WHOLE_ID and set(text) <= set("0123456789abcdef")


def _digits(given: str) -> str:
    return given.strip().lower().replace("-", "")


def complete_id(given: str, listing: Callable[[str], Sequence[Row]], what: str) -> str | None:
    """Complete an id, or its first digits, with a listing of all that begin so; None: no id does."""
    text = _digits(given)
    if len(text) == WHOLE_ID:
        return str(UUID(text))
    found = [one.id for one in listing(text)]
    if len(found) > 1:
        some = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
        raise ConfigError(f"several {what} have an id that begins with {given}: {some}. Give more of it")
    return found[0] if found else None


def since_ms(app: Duly, text: str | None, what: str = "--since") -> int | None:
    """Read a moment: a duration before the clock of the database, or a date."""
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        ago_ms = _ago_ms(text, what)  # a mistake is raised before the database is queried
        return max(0, app.driver.run(ops.clock()) - ago_ms)
    return moment(at if at.tzinfo else at.replace(tzinfo=UTC), what)


def _ago_ms(text: str, what: str) -> int:
    try:
        return to_ms(text, what=what)
    except ConfigError:
        raise ConfigError(
            f"{what} is {text!r}: give how long ago, as in 2h or 30m, or a date, as in 2026-01-31 or "
            "2026-01-31T12:00+01:00"
        ) from None
