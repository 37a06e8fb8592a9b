"""The schema of a PostgreSQL database: reads its version, creates the tables, applies migrations, grants rights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import Connection, errors

from duly.errors import StoreError, StoreUnavailable
from duly.store import migrate, statements
from duly.store.postgres.connection import CONNECT_SECONDS, LOCK_TIMEOUT, connect, with_timeouts
from duly.store.postgres.plans import trusted
from duly.store.postgres.translate import describe, translate


def read_meta(conn: Connection[Any], schema: str) -> Mapping[str, str]:
    """Read the `duly_meta` of a database; empty if it has no tables of duly yet."""
    table = statements.qualified("duly.duly_meta", schema)
    if conn.execute("select to_regclass(%s)", [table]).fetchone() == (None,):
        return {}
    return dict(conn.execute(trusted(f"select name, value from {table}")).fetchall())  # noqa: S608 (quoted)


def look(url: str, *, schema: str = "duly") -> Mapping[str, str]:
    """Read the `duly_meta` of a database without changing it."""
    try:
        with connect(psycopg.connect, url, CONNECT_SECONDS, to_read=True) as conn:
            return read_meta(conn, schema)
    except psycopg.Error as error:
        raise translate(error, "migrate", describe(url), sent=False) from error


def bring_up_to_date(url: str, *, schema: str = "duly", grant: str | None = None) -> tuple[migrate.Migration, ...]:
    """Apply pending migrations and return them. Concurrent calls wait for each other; a failure changes nothing."""
    try:
        with psycopg.connect(with_timeouts(url, CONNECT_SECONDS)) as conn:
            conn.execute("select pg_advisory_xact_lock(hashtext(%s))", [f"duly migrate {schema}"])
            conn.execute(LOCK_TIMEOUT)  # statements that come after a migration that waits for a table wait too
            steps = migrate.pending("postgres", read_meta(conn, schema))
            for statement in migration_statements(schema, steps, grant=grant):
                conn.execute(trusted(statement))
    except errors.InsufficientPrivilege as error:
        raise StoreError(
            f"migrate: this role may not change {describe(url)} ({error.diag.message_primary}): run it as the owner"
        ) from error
    except errors.LockNotAvailable as error:
        raise StoreUnavailable(
            f"migrate: another transaction (such as a dump) has locked the tables of {describe(url)}, so nothing was "
            "changed. Run it again when that has ended: `duly doctor` names long transactions"
        ) from error
    except psycopg.Error as error:
        raise translate(error, "migrate", describe(url), sent=False) from error
    return steps


def migration_statements(schema: str, steps: tuple[migrate.Migration, ...], *, grant: str | None = None) -> list[str]:
    """Return the statements of migrations, and those that grant a role the use of the tables but no changes to them."""
    quoted = statements.quoted(schema)
    texts = [f"create schema if not exists {quoted}"] if steps and steps[0].number == 1 else []
    texts += [statements.qualified(statement, schema) for step in steps for statement in step.statements]
    if grant is not None:
        role = statements.quoted(grant)
        texts += [
            f"grant usage on schema {quoted} to {role}",
            f"grant select, insert, update, delete on all tables in schema {quoted} to {role}",
            f"revoke insert, update, delete on {quoted}.duly_meta from {role}",
            f"grant usage on all sequences in schema {quoted} to {role}",
        ]
    return texts
