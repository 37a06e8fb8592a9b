"""Loads the `.sql` files and writes their sections in the style of each driver.

Each dialect has a folder. A file has many sections. A section is one statement or a list of statements:

    -- name: claim
    -- The reason for the way it is written.
    update duly_job ...;
    select ...;

Parameters are written `:name`. `:now` is special: the database's own clock, unless the caller binds a time.
A section `enqueue` with the line

    -- again: on conflict (id) do nothing

has a twin `enqueue_again`: the same statement with that ending, sent after a lost answer. A section with the line

    -- same as: claim

has the statements of `claim`, which stands before it. SQL that stands three times or more in a dialect is a fragment:

    -- fragment: known_tasks
    (:tasks is null or ...)

A section of any file of the dialect includes it as `{known_tasks}`. Fragments have no parameters and include no others.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Literal, NamedTuple, TypeAlias

Dialect: TypeAlias = Literal["sqlite", "postgres"]
# `:name` for sqlite3, `%(name)s` for psycopg and Django, `?1` for D1, `$1` for asyncpg.
Style: TypeAlias = Literal["named", "pyformat", "numbered", "dollar"]

CLOCK = {
    "sqlite": "cast(coalesce(:now, round((julianday('now') - 2440587.5) * 86400000.0)) as integer)",
    "postgres": "coalesce(:now::bigint, (extract(epoch from clock_timestamp()) * 1000)::bigint)",
}

# Locks, waits and hints, which SQLite with its one writer does not need: there these sections are empty.
POSTGRES_ONLY = frozenset(
    {
        "await_claim",
        "fire_lock",
        "lock_debounced",
        "lock_jobs",
        "notify",
        "uncompiled",
        "unqueue_lock",
        "wait_for_lanes",
    }
)
# PostgreSQL counts in the statement that writes.
SQLITE_ONLY = frozenset({"ends_written"})
EMPTY: dict[Dialect, frozenset[str]] = {"sqlite": POSTGRES_ONLY, "postgres": SQLITE_ONLY}

_PART = re.compile(r"^-- (name|fragment): (\w+)$", re.MULTILINE)
_FRAGMENT = re.compile(r"\{(\w+)\}")
_AGAIN = re.compile(r"^-- again: (.+)$", re.MULTILINE)
_SAME = re.compile(r"^-- same as: (\w+)$", re.MULTILINE)
_COMMENT = re.compile(r"--.*$", re.MULTILINE)
_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)")  # `:id`, but not the cast `::bigint`
_NOW = re.compile(r"(?<![:\w]):now\b")
_SCHEMA = re.compile(r"\bduly\.(?=duly_)")


class Statement(NamedTuple):
    """One statement in a driver's own spelling, and the parameters it takes in order of first use."""

    sql: str
    parameters: tuple[str, ...]


@cache
def sections(dialect: Dialect) -> dict[str, tuple[str, ...]]:
    """Return the statements of every section of a dialect, by the section's name."""
    folder = files("duly.store.sql").joinpath(dialect)
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".sql"))
    return parse("".join(folder.joinpath(name).read_text("utf-8") for name in names), dialect)


def parse(text: str, dialect: Dialect) -> dict[str, tuple[str, ...]]:
    """Cut the text of all files of a dialect into sections, with their fragments filled in."""
    found: dict[str, tuple[str, ...]] = dict.fromkeys(EMPTY[dialect], ())
    _, *parts = _PART.split(text)
    named = list(zip(parts[::3], parts[1::3], parts[2::3], strict=True))
    fragments = {name: _COMMENT.sub("", part).strip() for kind, name, part in named if kind == "fragment"}
    for _, name, part in (one for one in named if one[0] == "name"):
        if name in found:
            raise ValueError(f"{dialect}: section {name!r} is defined twice")
        same = _SAME.search(part)
        found[name] = found[same[1]] if same else split(_FRAGMENT.sub(lambda used: fragments[used[1]], part))
        if again := _AGAIN.search(part):
            [statement] = found[name]
            found[f"{name}_again"] = (f"{statement}\n    {again[1]}",)
    return found


def split(text: str) -> tuple[str, ...]:
    """Cut a section into its statements. No text literal of ours holds a semicolon or a double dash."""
    statements = (statement.strip() for statement in _COMMENT.sub("", text).split(";"))
    return tuple(re.sub(r"\n\s*\n", "\n", statement) for statement in statements if statement)


@cache
def spell(dialect: Dialect, section: str, style: Style, schema: str = "duly") -> tuple[Statement, ...]:
    """Write a section the way a driver wants it."""
    return tuple(_spell(sql, dialect, style, schema) for sql in sections(dialect)[section])


def _spell(sql: str, dialect: Dialect, style: Style, schema: str) -> Statement:
    names = tuple(dict.fromkeys(_PARAMETER.findall(sql)))
    text = _NOW.sub(lambda _: CLOCK[dialect], sql)
    if dialect == "postgres":
        text = qualified(text, schema)
    match style:
        case "named":
            return Statement(text, names)
        case "pyformat":
            return Statement(_PARAMETER.sub(r"%(\1)s", text.replace("%", "%%")), names)
        case "numbered":
            return Statement(_PARAMETER.sub(lambda m: f"?{names.index(m[1]) + 1}", text), names)
        case "dollar":
            text = _PARAMETER.sub(lambda m: f"${names.index(m[1]) + 1}", text)
            # asyncpg would hand a json parameter to the codec that its owner may have set for json.
            return Statement(re.sub(r"(\$\d+)::json\b", r"\1::text::json", text), names)


def qualified(sql: str, schema: str) -> str:
    """Put the tables of `sql`, written `duly.duly_job`, into `schema`."""
    prefix = quoted(schema) + "."
    return _SCHEMA.sub(lambda _: prefix, sql)


def quoted(name: str) -> str:
    """Quote a name for PostgreSQL."""
    return '"' + name.replace('"', '""') + '"'
