"""How statements are planned on a connection.

What runs all day is planned once for a connection, whatever the tables hold, and so that it finds its rows by an
index: a plan that was made for an empty table would read the whole of a full one. The rest is planned as the server
would.
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
    """A connection that sets how each section is planned."""

    direct = False  # prepared statements stay on it, so a lone enqueue has one that asks for idle workers too
    _as_the_server: LiteralString = ""  # what has the rest of a transaction planned so; empty: everything is anyway

    def keep_plans(self) -> None:
        """Have what runs all day planned once, unless the connection is lent by a pooler: others get it next."""
        names = list(STEADY_PLANS)
        asked = ", ".join(f"current_setting('{name}')" for name in names)
        pid, *values = only(self.execute(trusted(f"select pg_backend_pid(), {asked}")))
        if pid == self.info.backend_pid:
            # Compiling is off for good: a table that must be read whole counts as expensive, however small it is.
            self.execute(trusted("; ".join(f"set {name} = {value}" for name, value in STEADY_PLANS.items())))
            self.execute("set jit = off")
            self.direct = True
            self._as_the_server = _for_now(dict(zip(names, values, strict=True)))

    def plans_right(self, section: str) -> bool:
        """Whether a section is planned as it should without anything being set."""
        return section in STEADY or not self._as_the_server

    def plan(self, section: str, *, steady: bool) -> bool:
        """Set how a section of a transaction is planned, if that was not set for the one before it; says how.

        Each has to be planned in one way, wherever it comes: the server keeps the first plan that it made of a text.
        """
        if not self._as_the_server or steady == (section in STEADY):
            return steady
        self.execute(self._as_the_server if steady else _for_now(STEADY_PLANS))
        return not steady


def _for_now(settings: Mapping[str, str]) -> LiteralString:
    """Write what sets something until the end of the transaction, as one statement."""
    return trusted("select " + ", ".join(f"set_config('{name}', '{value}', true)" for name, value in settings.items()))


def only(cursor: Cursor[Any]) -> Any:
    """Return the one row of an answer."""
    return cursor.fetchall()[0]


def trusted(sql: str) -> LiteralString:
    """Say that a statement comes from a file of ours: psycopg takes no other strings."""
    return sql
