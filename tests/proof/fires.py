"""The record of a schedule, judged from outside: each due time stands in it once, fired or in a run of misses."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import psycopg

FIRES = "select due_at, until_at, count, job_id from duly_fire where schedule = ?"


class Fired(NamedTuple):
    """A line of the record: a due time that was fired, or due times that were not."""

    due: int
    until: int | None
    times: int
    job: str | None

    @property
    def last(self) -> int:
        """The last of its due times."""
        return self.due if self.until is None else self.until


def unexplained(fires: Iterable[Fired], first: int | None, follow: Callable[[Fired], int | None]) -> Iterator[str]:
    """List what comes where something else is due; `follow` says what is after a line, None: anything may."""
    expected = first
    for fire in fires:
        if expected is not None and fire.due != expected:
            yield f"{fire.due} comes where {expected} is due"
        expected = follow(fire)


def at_rate(every_ms: int) -> Callable[[Fired], int]:
    """Say what comes after a line where due times lie equally far apart."""

    def follow(fire: Fired) -> int:
        whole = fire.last == fire.due + (fire.times - 1) * every_ms
        return fire.last + every_ms if whole else -1  # a count that is wrong

    return follow


def ask(url: str, sql: str, *params: Any) -> list[tuple[Any, ...]]:
    """Look at the tables past the product; `?` marks a parameter, names are not qualified."""
    if not url.startswith("postgres"):
        conn = sqlite3.connect(url, isolation_level=None, timeout=10)
        try:
            return conn.execute(sql, params).fetchall()
        finally:
            conn.close()
    with psycopg.connect(url, autocommit=True, options="-c search_path=duly") as outside:
        rows = outside.execute(sql.replace("?", "%s"), params).fetchall()
    return [tuple(str(value) if type(value).__name__ == "UUID" else value for value in row) for row in rows]
