"""A connection of the pool, on which a hint may be on its way."""

from __future__ import annotations

import select
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, LiteralString

import psycopg
from psycopg import errors, generators
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult

from duly.store import statements
from duly.store.postgres.listen import ALL_AWAKE, HINT
from duly.store.postgres.plans import PlannedConnection

CONNECT_SECONDS = 2.0
ADD = b"duly_add"  # what the server remembers a lone enqueue by
LOCK_TIMEOUT: LiteralString = "set local lock_timeout = '5s'"


class PooledConnection(PlannedConnection):
    """One of ours, on which a hint may be on its way."""

    _hint = b""
    _hinting = False
    _adds = False

    def hint(self) -> None:
        """Wake who sleeps, after a commit, and do not wait for it: whoever takes the connection next hears it out."""
        with suppress(psycopg.Error):  # he will also find out what is wrong
            self.pgconn.send_query(self._hint or HINT.encode())
            self._hinting = True
            self.pgconn.flush()

    def prepare_hint(self) -> None:
        """Have the server remember the hint, where the next one runs on the same connection."""
        self.execute(f"prepare duly_hint as {HINT}")
        self._hint = b"execute duly_hint"

    def add(self, statement: statements.Statement, params: Mapping[str, Any]) -> bool:
        """Commit one statement that adds a job, past psycopg, which takes half as long for it as the server does.

        Says whether all were awake: then nobody has to be woken.
        """
        values = [_text(params[name], self._encoding) for name in statement.parameters]
        if self._adds:
            with suppress(errors.InvalidSqlStatementName):  # somebody had the server forget what it remembered
                return self._add(values)
        self._prepare_to_add(statement)
        return self._add(values)

    def _prepare_to_add(self, statement: statements.Statement) -> None:
        self.pgconn.send_prepare(ADD, f"{statement.sql}\n{ALL_AWAKE}".encode(self._encoding))
        self._adds = True  # so who is interrupted from here on leaves no connection that does not know it
        try:
            self._answer()
        except psycopg.Error:
            self._adds = False
            raise

    def _add(self, values: Sequence[bytes | None]) -> bool:
        self.pgconn.send_query_prepared(ADD, values)
        return self._answer().get_value(0, 0) == b"t"

    def _answer(self) -> PGresult:
        """Wait for the answer to what was sent, and raise what it says if that is an error."""
        answer: PGresult | None = None
        while (result := self._next_result()) is not None:
            answer = result
        if answer is None:
            raise psycopg.OperationalError("the server has hung up")
        if answer.status == ExecStatus.FATAL_ERROR:
            raise errors.error_from_result(answer, encoding=self._encoding)
        return answer

    def _next_result(self) -> PGresult | None:
        pgconn = self.pgconn
        while pgconn.is_busy():
            wait = select.poll()
            wait.register(pgconn.socket, select.POLLIN | (select.POLLOUT if pgconn.flush() else 0))
            wait.poll()
            pgconn.consume_input()
        return pgconn.get_result()

    def hear_out(self) -> bool:
        """Wait for the end of a hint; whether it failed is nobody's concern. False: the server has hung up."""
        try:
            if self._hinting:
                self._hinting = False
                self.wait(generators.fetch_many(self.pgconn))
            for _ in range(2):  # the first may bring only the server's last word
                self.pgconn.consume_input()
        except psycopg.Error:
            return False
        return self.pgconn.transaction_status == TransactionStatus.IDLE

    @property
    def reusable(self) -> bool:
        """Whether somebody else may have it."""
        return self._hinting or self.pgconn.transaction_status == TransactionStatus.IDLE


def _text(value: str | int | None, encoding: str) -> bytes | None:
    """Write a parameter as the server reads it."""
    if value is None:
        return None
    if isinstance(value, int):
        return b"%d" % value
    text = str.encode(value, encoding)  # as it is: a member of an enum has another `str`
    if b"\0" in text:  # where libpq would take it to end
        raise psycopg.DataError("PostgreSQL keeps no text with a NUL in it")
    return text


def with_timeouts(url: str, seconds: float) -> str:
    """Bound the time a connection may take to open, unless the URL says so itself."""
    said = conninfo_to_dict(url)
    ours: dict[str, str | int] = {
        "connect_timeout": max(1, round(seconds)),
        "application_name": "duly",
        # A host that vanished is noticed within seconds, not after the system's two hours.
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": 10_000,
    }
    return make_conninfo(url, **{name: value for name, value in ours.items() if name not in said})
