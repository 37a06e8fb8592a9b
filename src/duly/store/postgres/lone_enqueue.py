"""A lone enqueue: one prepared statement adds a job, commits it, and asks in the same message for idle workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from duly.store.postgres.connection import PooledConnection
from duly.store.postgres.listen import ALL_AWAKE
from duly.store.postgres.plans import only, trusted
from duly.store.statements import Statement


def enqueue(conn: PooledConnection, statement: Statement, params: Mapping[str, Any]) -> bool:
    """Commit one job. Return whether no worker is idle: then none has to be woken."""
    # Numbers as texts: psycopg prepares a statement anew for each combination of types, and a number has three.
    given = map(params.__getitem__, statement.parameters)
    values = [str(int(value)) if isinstance(value, int) else value for value in given]
    (all_awake,) = only(conn.lone.execute(trusted(f"{statement.sql}\n{ALL_AWAKE}"), values, prepare=True, binary=True))
    return bool(all_awake)
