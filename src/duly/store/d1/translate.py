"""Turns failures of D1, of its gateway and of the connection into errors of duly.

Only a text that is known to come before the execution counts as "not executed". Every unknown one may have been
written: an operation that is repeated is always safe.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from duly.errors import AnswerLost, ConfigError, SchemaMismatch, StoreError, StoreRefused, StoreUnavailable
from duly.store.d1 import catalogue
from duly.store.d1.wire import Address, Trouble

_USED_UP = re.compile(r"daily .*(row|limit)", re.IGNORECASE)
_NOT_EXECUTED = re.compile(r"overloaded|long-running export|currently processing a long-running", re.IGNORECASE)
_REFUSED = re.compile(r"SQLITE_(CONSTRAINT|TOOBIG|MISMATCH)")
_NO_TABLES = re.compile(r"no such table|no such column|has no column named")
_TOO_LATE = "malformed JSON"
_NO_GATEWAY = (301, 302, 307, 308, 404, 405)


class TooLate(StoreUnavailable):
    """The batch came after its deadline, so it was rolled back."""


def translate(trouble: Trouble, op: str, where: Address) -> Exception:
    """Return the error for a failed batch: what happened and what to do."""
    text = str(trouble)
    if not trouble.sent:
        return StoreUnavailable(f"{op}: {where} cannot be reached ({text}): see that it runs, look at the URL")
    if (error := _misconfigured(trouble, where)) is not None:
        return error
    if _USED_UP.search(text):
        return StoreUnavailable(
            f"{op}: the free plan's rows for today are used up until 00:00 UTC (in {_to_midnight()})"
        )
    if trouble.status == 429 or trouble.code == 7429 or _NOT_EXECUTED.search(text):
        return StoreUnavailable(f"{op}: {where} takes no more now ({text}); nothing was written")
    if _NO_TABLES.search(text):
        return SchemaMismatch(f"{op}: {where} does not have the tables this version works with ({text}): duly migrate")
    if trouble.status == 413 or _REFUSED.search(text):
        return StoreRefused(f"{op}: {where} refuses this data ({text})")
    if _TOO_LATE in text:
        return TooLate(f"{op}: {where} executes requests later than they are waited for; nothing was written")
    if trouble.status == 400:
        return StoreError(f"{op}: {where}: {text}")
    return AnswerLost(f"{op}: the answer of {where} was lost ({text}); it may or may not have been written")


def _misconfigured(trouble: Trouble, where: Address) -> ConfigError | None:
    gateway = f"the gateway at {where.host}"
    match trouble.status, trouble.code:
        case 401 | 403, code if code != 7403:
            return ConfigError(
                f"{gateway} refuses the token: it is the Worker's secret API_TOKEN (wrangler secret put API_TOKEN)"
            )
        case 404, 7404:
            return ConfigError(f"{gateway} does not serve the database {where.database!r}: look at the end of the URL")
        case _, 7409 | 7403:
            return ConfigError(
                f"the Worker at {where.host} was deployed by another version of duly than this one, whose statements "
                f"are {catalogue.digest()[:12]} ({trouble}): run duly cloudflare deploy"
            )
        case _, 10001:
            return ConfigError(f"{gateway} has no token: wrangler secret put API_TOKEN")
        case status, _ if status in _NO_GATEWAY:
            return ConfigError(f"{where.host} answers as no gateway of duly does (HTTP {status}): look at the URL")
    return None


def _to_midnight() -> str:
    now = datetime.now(UTC)
    left = timedelta(days=1) - timedelta(hours=now.hour, minutes=now.minute)
    return f"{left.seconds // 3600} h {left.seconds // 60 % 60} m"
