"""A connection of the pool, and the hint that it sends to idle workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any, LiteralString, TypeVar

import psycopg
from psycopg import RawCursor, generators
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.errors import Diagnostic
from psycopg.pq import TransactionStatus

from duly.store.postgres.listen import HINT
from duly.store.postgres.plans import PlannedConnection
from duly.store.postgres.translate import is_read_only

T = TypeVar("T")

CONNECT_SECONDS = 2.0
WAIT_CANCELLED = "canceling wait for synchronous replication"
LOCK_TIMEOUT: LiteralString = "set local lock_timeout = '5s'"


class PooledConnection(PlannedConnection):
    """A connection of the pool, on which a hint may be in flight."""

    _hint = b""
    _hinting = False
    wait_cancelled = False  # a commit was acknowledged that no standby has confirmed

    def noticed(self, notice: Diagnostic) -> None:
        """Note a commit whose wait for a standby was cancelled: the server acknowledges it with a mere warning."""
        # The message may be in any language, and its code is that of most warnings. A proxy may drop the function.
        said = notice.message_primary or ""
        if notice.source_function == "SyncRepWaitForLSN" or said.startswith(WAIT_CANCELLED):
            self.wait_cancelled = True

    def hint(self) -> None:
        """Wake idle workers after a commit, without waiting for the answer: the next user reads it."""
        with suppress(psycopg.Error):  # the next user gets the error
            self.pgconn.send_query(self._hint or HINT.encode())
            self._hinting = True
            self.pgconn.flush()

    def prepare_hint(self) -> None:
        """Prepare the hint on the server; only if the next statement runs on the same connection."""
        self.execute(f"prepare duly_hint as {HINT}")
        self._hint = b"execute duly_hint"

    @cached_property
    def lone(self) -> RawCursor[Any]:
        """The cursor of lone enqueues. Making one for each costs more than the rest of psycopg's part."""
        return RawCursor(self)

    def close(self) -> None:
        """Close the connection, and drop the cursor that refers to it."""
        self.__dict__.pop("lone", None)
        super().close()

    def finish_hint(self) -> bool:
        """Read the answer to a hint and ignore its errors. False: the server closed the connection."""
        try:
            if self._hinting:
                self._hinting = False
                self.wait(generators.fetch_many(self.pgconn))
            for _ in range(2):  # the first may read only the server's last message
                self.pgconn.consume_input()
        except psycopg.Error:
            return False
        return self.pgconn.transaction_status == TransactionStatus.IDLE

    @property
    def reusable(self) -> bool:
        """Whether another caller can use the connection."""
        return self._hinting or self.pgconn.transaction_status == TransactionStatus.IDLE


def connect(open_one: Callable[..., T], url: str, seconds: float, *, to_read: bool = False) -> T:
    """Connect to the host that takes writes; if none does and `to_read`, to one that does not."""
    try:
        return open_one(with_timeouts(url, seconds))
    except psycopg.OperationalError as error:
        if not (to_read and is_read_only(error)):
            raise
        return open_one(with_timeouts(url, seconds, session="any"))


def with_timeouts(url: str, seconds: float, *, session: str = "read-write") -> str:
    """Add timeouts, and which of several hosts is wanted, to a URL that does not set them."""
    given = conninfo_to_dict(url)
    if "service" in given or not os.environ.keys().isdisjoint(("PGSERVICE", "PGTARGETSESSIONATTRS")):
        given["target_session_attrs"] = ""  # libpq reads there which host is wanted
    ours: dict[str, str | int] = {
        "target_session_attrs": session,
        "connect_timeout": max(1, round(seconds)),  # of each host
        "application_name": "duly",
        # A host that disappears is noticed within seconds, not after the system's two hours.
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": 10_000,
    }
    return make_conninfo(url, **{name: value for name, value in ours.items() if name not in given})
