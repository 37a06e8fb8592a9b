"""Numbered migrations: plain SQL files per dialect, applied in order, each schema knowing the oldest code it serves.

SQLite is migrated when the file is opened. PostgreSQL is migrated by `duly migrate`, because there the right to
create tables seldom belongs to the worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from duly.errors import SchemaMismatch
from duly.store.statements import Dialect, split


class Migration(NamedTuple):
    """One step from a schema to the next."""

    number: int
    name: str
    text: str

    @property
    def statements(self) -> tuple[str, ...]:
        """The statements to run, in order, in one transaction."""
        return split(self.text)


@cache
def migrations(dialect: Dialect) -> tuple[Migration, ...]:
    """Return all migrations of a dialect, in order."""
    folder = files("duly.store.sql").joinpath(dialect, "migrations")
    found = []
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".sql"):
            number, _, name = file.name.removesuffix(".sql").partition("_")
            found.append(Migration(int(number), name, file.read_text("utf-8")))
    return tuple(found)


def newest(dialect: Dialect) -> int:
    """Return the number of the schema that this version of duly was written for."""
    return migrations(dialect)[-1].number


def pending(dialect: Dialect, meta: Mapping[str, str]) -> tuple[Migration, ...]:
    """Return what is still to be applied to a database whose duly_meta holds `meta` (empty: no tables yet)."""
    return tuple(step for step in migrations(dialect) if step.number > version(meta))


def version(meta: Mapping[str, str]) -> int:
    """Read the number of a database's schema, 0 for none."""
    found = meta.get("schema", "0")
    if not found.isdigit():
        raise SchemaMismatch(f"duly_meta has the schema {found!r}, which is no number: repair or restore the database")
    return int(found)


def check(dialect: Dialect, meta: Mapping[str, str], where: str, *, remedy: str = "duly migrate") -> None:
    """Refuse a schema that this version cannot work with.

    A newer schema is accepted if it works with this version: during an upgrade, workers of two versions run at once.
    """
    ours, theirs = newest(dialect), version(meta)
    if theirs == 0:
        raise SchemaMismatch(f"{where} has no duly tables yet: run `{remedy}` on it once")
    if theirs < ours:
        raise SchemaMismatch(f"{where} has schema {theirs}, this version of duly needs {ours}: run `{remedy}`")
    if int(meta.get("works_with", theirs)) > ours:
        raise SchemaMismatch(
            f"{where} has schema {theirs}, which needs a newer duly than this one (schema {ours}): upgrade duly"
        )
