"""A stand-in for Cloudflare D1 over SQLite: its limits, its binding of numbers, its lost answers.

It is stricter than the runtime on one's own machine, which lets values over 2 MB and calls with more than 32
arguments pass that production refuses.
"""

from __future__ import annotations

import math
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Row = tuple[Any, ...]
Param = str | int | float | bool | None

MAX_PARAMS = 100
MAX_SQL_BYTES = 100_000
MAX_VALUE_BYTES = 2_000_000

LIMITS = {
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: MAX_PARAMS,
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 5,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 50,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 32,
}

REFUSED = {
    sqlite3.SQLITE_TRANSACTION: "BEGIN, COMMIT and ROLLBACK: a batch is the transaction",
    sqlite3.SQLITE_SAVEPOINT: "SAVEPOINT and RELEASE: a batch is the transaction",
    sqlite3.SQLITE_PRAGMA: "PRAGMA",
    sqlite3.SQLITE_ATTACH: "ATTACH and VACUUM",
    sqlite3.SQLITE_DETACH: "DETACH",
    sqlite3.SQLITE_CREATE_TEMP_TABLE: "TEMP tables",
    sqlite3.SQLITE_CREATE_TEMP_INDEX: "TEMP indexes",
    sqlite3.SQLITE_CREATE_TEMP_TRIGGER: "TEMP triggers",
    sqlite3.SQLITE_CREATE_TEMP_VIEW: "TEMP views",
    sqlite3.SQLITE_DROP_TEMP_TABLE: "TEMP tables",
    sqlite3.SQLITE_DROP_TEMP_INDEX: "TEMP indexes",
    sqlite3.SQLITE_DROP_TEMP_TRIGGER: "TEMP triggers",
    sqlite3.SQLITE_DROP_TEMP_VIEW: "TEMP views",
}

# What may hide a placeholder comes first, so that it is passed over whole.
TOKEN = re.compile(
    r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | `(?:[^`]|``)*` | \[[^\]]*\] | --[^\n]* | /\*.*?\*/
    | \?(?P<number>[0-9]*) | (?P<named>[:@$\#][A-Za-z0-9_]+)""",
    re.VERBOSE | re.DOTALL,
)


class D1Error(Exception):
    """D1 refused a statement, and nothing of its batch was written.

    `name` is SQLite's, such as SQLITE_CONSTRAINT_UNIQUE.
    """

    code = 7500

    def __init__(self, message: str, name: str = "SQLITE_ERROR") -> None:
        base = "_".join(name.split("_")[:2])
        super().__init__(f"{message}: {base}" + (f" (extended: {name})" if name != base else ""))
        self.name = name


class D1Lost(Exception):
    """The connection broke before the answer came: the batch may or may not have been written."""


def network_lost() -> Exception:
    return D1Lost("Network connection lost.")


class D1Mannered:
    """Run statements as D1 would, on a file of one's own.

    `lose` is asked after each commit, with the number of the call (from 1), whether its answer gets lost;
    `lost` makes the exception the caller then sees. Several threads and processes may use one file.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        lose: Callable[[int], bool] | None = None,
        lost: Callable[[], Exception] = network_lost,
    ) -> None:
        self.calls = 0
        self.lose = lose
        self.lost = lost
        self._lock = threading.Lock()
        self._ours = True
        self._refusal: str | None = None
        self._connection = sqlite3.connect(
            path, timeout=60, isolation_level=None, check_same_thread=False, cached_statements=0
        )
        for pragma in ("journal_mode = truncate", "synchronous = off", "foreign_keys = on"):
            self._connection.execute(f"pragma {pragma}").close()
        for limit, value in LIMITS.items():
            self._connection.setlimit(limit, value)
        self._connection.set_authorizer(self._authorize)

    def query(self, sql: str, params: Sequence[Param] = ()) -> list[Row]:
        """Run one statement, as a transaction of its own."""
        return self.batch([(sql, params)])[0]

    def batch(self, statements: Sequence[tuple[str, Sequence[Param]]]) -> list[list[Row]]:
        """Run statements in order: all of them happen, or none."""
        if not statements:
            raise D1Error("A batch needs at least one statement")
        prepared = [(number_placeholders(sql), bindings(sql, params)) for sql, params in statements]
        with self._lock:
            self.calls += 1
            call = self.calls
            with self._transaction():
                answers = [self._run(sql, values) for sql, values in prepared]
        if self.lose is not None and self.lose(call):
            raise self.lost()
        return answers

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _run(self, sql: str, values: dict[str, Any]) -> list[Row]:
        self._refusal = None
        try:
            return self._connection.execute(sql, values).fetchall()
        except (sqlite3.Error, sqlite3.Warning, UnicodeEncodeError) as error:
            if self._refusal is not None:
                raise D1Error(f"D1 does not take {self._refusal}", "SQLITE_AUTH") from error
            raise D1Error(str(error), getattr(error, "sqlite_errorname", "SQLITE_ERROR")) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._own("begin immediate")
        try:
            yield
            self._own("commit")
        except BaseException as error:
            if self._connection.in_transaction:
                self._own("rollback")
            if isinstance(error, sqlite3.Error):  # a deferred constraint speaks up at the commit
                raise D1Error(str(error), error.sqlite_errorname) from error
            raise

    def _own(self, sql: str) -> None:
        self._ours = True
        try:
            self._connection.execute(sql).close()
        finally:
            self._ours = False

    def _authorize(self, action: int, *_: str | None) -> int:
        if self._ours or action not in REFUSED:
            return sqlite3.SQLITE_OK
        self._refusal = REFUSED[action]
        return sqlite3.SQLITE_DENY


def number_placeholders(sql: str) -> str:
    """Give every `?` its number, and refuse what D1 refuses before SQLite sees it."""
    if len(sql.encode()) > MAX_SQL_BYTES:
        raise D1Error(f"The statement is longer than {MAX_SQL_BYTES:,} bytes", "SQLITE_TOOBIG")
    highest = 0

    def numbered(match: re.Match[str]) -> str:
        nonlocal highest
        if match["named"]:
            raise D1Error(f"Named parameters such as {match['named']} are not taken: use ? or ?NNN")
        if match["number"] is None:
            return match[0]
        number = int(match["number"] or highest + 1)
        highest = max(highest, number)
        return f"?{number}"

    return TOKEN.sub(numbered, sql)


def bindings(sql: str, params: Sequence[Param]) -> dict[str, Any]:
    """Check and convert the parameters; the names are the numbers `number_placeholders` gave."""
    if len(params) > MAX_PARAMS:
        raise D1Error(f"too many SQL variables: {len(params)}, and {MAX_PARAMS} are the limit")
    wanted = placeholders(sql)
    if wanted <= MAX_PARAMS and wanted != len(params):
        raise D1Error(f"Wrong number of parameter bindings: {len(params)} given, {wanted} needed")
    return {str(number): bound(value) for number, value in enumerate(params, start=1)}


def placeholders(sql: str) -> int:
    highest = 0
    for match in TOKEN.finditer(sql):
        if match["number"] is not None:
            highest = max(highest, int(match["number"] or highest + 1))
    return highest


def bound(value: Param) -> str | float | None:
    """Convert as JSON and JavaScript do on the way: every number becomes a double, and binds as REAL."""
    match value:
        case None:
            return None
        case str():
            if len(value.encode(errors="surrogatepass")) > MAX_VALUE_BYTES:
                raise D1Error(f"A value is longer than {MAX_VALUE_BYTES:,} bytes", "SQLITE_TOOBIG")
            return value
        case int() | float() if abs(value) <= 1.7976931348623157e308 and not math.isnan(value):
            return float(value)
    raise D1Error(f"Type '{type(value).__name__}' not supported for value {value!r:.60}")
