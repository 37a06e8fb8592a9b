"""Turns what psycopg raises into errors of duly, and names a database for people."""

from __future__ import annotations

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict

from duly.errors import AnswerLost, ConfigError, SchemaMismatch, StoreError, StoreRefused, StoreUnavailable

# Nothing was written, and the same operation can succeed. The last: the server has forgotten a prepared statement.
ROLLED_BACK = (errors.SerializationFailure, errors.DeadlockDetected, errors.InvalidSqlStatementName)
# The server works, but another transaction is in the way.
IN_THE_WAY = (*ROLLED_BACK, errors.LockNotAvailable, errors.QueryCanceled)
# libpq's message for a host that it was not to take. It has no code. A libpq with translations gives another text in a
# process that sets LC_MESSAGES: such a host then counts as one that cannot be reached.
NO_WRITES = "session is read-only"
# The messages of a server for a wrong name, password or host: waiting does not help.
REFUSALS = (
    "does not exist",
    "authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "pg_hba.conf rejects",
    "not permitted to log in",
    "does not support SSL",
)


def describe(url: str) -> str:
    """Name a database for people: host, port and name, never the password."""
    try:
        info = conninfo_to_dict(url)
    except psycopg.ProgrammingError:  # whose message may quote a password
        raise ConfigError("libpq cannot read this PostgreSQL URL: look at its options") from None
    hosts = str(info.get("host") or info.get("hostaddr") or "localhost").split(",")
    ports = str(info.get("port") or 5432).split(",")
    # One port is that of every host.
    named = ",".join(f"{host}:{port or 5432}" for host, port in zip(hosts, ports * len(hosts), strict=False))
    return f"PostgreSQL {named}/{info.get('dbname') or info.get('user') or ''}"


def translate(error: psycopg.Error, op: str, where: str, *, sent: bool) -> StoreError:
    """Turn an error of psycopg into one of duly, with what happened and what to do."""
    # The server's message in one line. Its DETAIL would quote the whole row with the payload.
    detail = error.diag.message_primary or " ".join(str(error).split())
    match error:
        case errors.UndefinedTable() | errors.InvalidSchemaName() | errors.UndefinedColumn():
            return SchemaMismatch(
                f"{op}: {where} does not have the tables this version works with: run `duly migrate` ({detail})"
            )
        case errors.InsufficientPrivilege():
            return StoreError(
                f"{op}: this role may not use the tables of {where}: `duly migrate --grant ROLE` ({detail})"
            )
        case psycopg.DataError() | psycopg.IntegrityError() | errors.ProgramLimitExceeded():
            return StoreRefused(f"{op}: {where} refuses this data ({detail})")
        case errors.LockNotAvailable():
            locked = StoreUnavailable(
                f"{op}: what it needs is locked in {where} by another transaction; nothing was written. "
                "If that is your own, pass it as `conn=`"
            )
            locked.locked = True
            return locked
        case errors.QueryCanceled():
            return StoreUnavailable(f"{op}: {where} cancelled it ({detail}); nothing was written")
        case errors.ReadOnlySqlTransaction():
            return _no_primary(op, where, detail)
        case errors.DiskFull() | errors.TooManyConnections() | errors.OutOfMemory():
            return StoreUnavailable(f"{op}: {where} cannot write now ({detail}); nothing was written")
        case psycopg.OperationalError() | psycopg.InterfaceError() if sent:
            return AnswerLost(f"{op}: the connection to {where} broke before the answer came ({detail})")
        case psycopg.OperationalError() | psycopg.InterfaceError():
            return _not_connected(op, where, detail)
    return StoreError(f"{op}: {where}: {detail}")


def _not_connected(op: str, where: str, detail: str) -> StoreError:
    standby = NO_WRITES in detail
    if standby:
        hosts = detail.split(" - host: ")[1:] or [detail]  # psycopg lists them after the last error
        others = [f"host {host}" for host in hosts if NO_WRITES not in host]
        if not others and len(hosts) > where.count(","):
            return _no_primary(op, where, detail)
        # Any of them may be a living primary, so promote nothing.
        detail = "; ".join(others) or detail
    if any(words in detail for words in REFUSALS):
        kind = StoreUnavailable if standby else StoreError  # a standby may be promoted
        return kind(f"{op}: {where} refuses the connection ({detail}): look at the URL")
    if "FATAL" in detail:
        return StoreUnavailable(f"{op}: {where} refuses the connection ({detail})")
    what = "has no primary that can be reached" if standby else "cannot be reached"
    return StoreUnavailable(f"{op}: {where} {what} ({detail}): see that it runs, look at the URL")


def _no_primary(op: str, where: str, detail: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"{op}: {where} takes no writes ({detail}): the URL leads to no primary now, or default_transaction_read_only "
        "is on for this role. Nothing was written: name the primary in the URL; if none runs, promote a standby. "
        "To read only, set target_session_attrs=any in the URL"
    )


def is_down(error: BaseException | None) -> bool:
    """Return whether the server cannot be reached or written to."""
    away = (psycopg.OperationalError, psycopg.InterfaceError, errors.ReadOnlySqlTransaction)
    return isinstance(error, away) and not isinstance(error, IN_THE_WAY)


def is_read_only(error: BaseException | None) -> bool:
    """Return whether the server takes no writes: it is a standby, or its sessions are read-only."""
    if isinstance(error, psycopg.OperationalError):
        return NO_WRITES in str(error)
    return isinstance(error, errors.ReadOnlySqlTransaction)


def first_error(error: psycopg.Error) -> psycopg.Error:
    """Return the error that aborted a pipeline; the errors of later statements can hide it."""
    hidden = error.__context__
    return hidden if isinstance(error, errors.PipelineAborted) and isinstance(hidden, psycopg.Error) else error
