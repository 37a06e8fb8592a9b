"""How statements are planned on a connection.

The statements of a worker are planned once for a connection, and always to find their rows by an index. A plan made for
an empty table would read all of a full one. All other statements are planned by the settings of the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, LiteralString

from psycopg import Connection, Cursor

STEADY_PLANS = {"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "enable_bitmapscan": "off"}
STEADY = frozenset({
    "await_claim", "claim", "claim_marked", "enqueue", "enqueue_one", "expirable", "expired_leases", "extend",
    "finish_batched", "finish_keyed", "finish_plain", "head", "heartbeat", "hold_parent", "next_due",
    "next_fire", "progress", "recall",
})  # fmt: skip


class PlannedConnection(Connection[Any]):
    """A connection that plans each section in its own way."""

    direct = False  # prepared statements stay on it, so a lone enqueue has one that asks for idle workers too
    _as_the_server: LiteralString = ""  # sets that for the rest of a transaction; empty: all is planned so

    def keep_plans(self) -> None:
        """Plan the statements of a worker once, unless a pooler gives the connection to other clients too."""
        names = list(STEADY_PLANS)
        asked = ", ".join(f"current_setting('{name}')" for name in names)
        pid, *values = only(self.execute(trusted(f"select pg_backend_pid(), {asked}")))
        if pid == self.info.backend_pid:
            # JIT is off for all: with enable_seqscan off, a table that must be read whole counts as expensive.
            self.execute(trusted("; ".join(f"set {name} = {value}" for name, value in STEADY_PLANS.items())))
            # A mere warning tells that a commit did not wait for a standby, so warnings are shown.
            self.execute("set jit = off; set client_min_messages = warning")
            self.direct = True
            self._as_the_server = _for_now(dict(zip(names, values, strict=True)))

    def plans_right(self, section: str) -> bool:
        """Return whether a section is planned in its own way without a setting."""
        return section in STEADY or not self._as_the_server

    def plan(self, section: str, *, steady: bool) -> bool:
        """Set how a section of a transaction is planned, unless the one before it set the same. Return how.

        A section must be planned in the same way everywhere: the server keeps the first plan of a prepared text.
        """
        if not self._as_the_server or steady == (section in STEADY):
            return steady
        self.execute(self._as_the_server if steady else _for_now(STEADY_PLANS))
        return not steady


def _for_now(settings: Mapping[str, str]) -> LiteralString:
    """Write one statement that sets parameters until the end of the transaction."""
    return trusted("select " + ", ".join(f"set_config('{name}', '{value}', true)" for name, value in settings.items()))


def only(cursor: Cursor[Any]) -> Any:
    """Return the one row of an answer."""
    return cursor.fetchall()[0]


def trusted(sql: str) -> LiteralString:
    """Mark the text of a statement as trusted, as psycopg requires: it comes from a file of duly."""
    return sql
