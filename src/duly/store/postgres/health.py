"""Reads what `duly doctor` judges of a PostgreSQL server: settings, rights, tables, and what its sessions do."""

from __future__ import annotations

import time
from typing import Any

from psycopg import Connection, errors

from duly.store import health, migrate
from duly.store.driver import Finding
from duly.store.postgres.plans import only
from duly.store.postgres.schema import read_meta

OLD_TRANSACTION_SECONDS = 300.0


def examine(conn: Connection[Any], schema: str) -> list[Finding]:
    """Check the server, the rights on it, and transactions that prevent vacuum."""
    number = migrate.version(read_meta(conn, schema))
    return [
        *_look_at_server(conn),
        health.schema(number, migrate.newest("postgres")),
        *_look_at_tables(conn, schema),
        *_look_at_activity(conn),
    ]


def _look_at_server(conn: Connection[Any]) -> list[Finding]:
    version, number, fsync, commit, standby, read_only = only(
        conn.execute(
            "select current_setting('server_version'), current_setting('server_version_num')::int, "
            "current_setting('fsync'), current_setting('synchronous_commit'), pg_is_in_recovery(), "
            "current_setting('default_transaction_read_only') = 'on'"
        )
    )
    return [
        health.server(version.split()[0], number),
        health.sync(fsync=fsync, commit=commit),
        health.writable(standby=standby, read_only=read_only),
        health.replication(standbys(conn)),
        health.clock(_clock_offset_ms(conn)),
    ]


def durability(conn: Connection[Any]) -> str:
    """Describe what an acknowledged write survives."""
    fsync, commit = only(conn.execute("select current_setting('fsync'), current_setting('synchronous_commit')"))
    if fsync == "off" or commit == "off":
        return "fsync off" if fsync == "off" else "synchronous_commit off"
    return f"full, {health.failover(standbys(conn))}"


def standbys(conn: Connection[Any]) -> health.Standbys | None:
    """Read which standbys are connected; a role without rights sees little more than the names of some, or None."""
    (awaited,) = only(
        conn.execute(
            "select current_setting('synchronous_standby_names') <> '' "
            "   and current_setting('synchronous_commit') not in ('off', 'local')"
        )
    )
    try:
        receiving = conn.execute(
            "select application_name, state, sync_state from pg_stat_replication as r where not exists "
            "(select from pg_replication_slots where active_pid = r.pid and slot_type = 'logical')"
        ).fetchall()
    except errors.InsufficientPrivilege:  # what follows is for people, and decides nothing
        return None
    found = [(name, how) for name, state, how in receiving if state in (None, "catchup", "streaming")]
    names = sorted(name for name, how in found if awaited and how in (None, "sync", "quorum"))
    return health.Standbys(awaited, names, len(found) - len(names))


def _clock_offset_ms(conn: Connection[Any]) -> float:
    """Measure how far the server's clock is ahead of this machine's, by the fastest of three answers."""
    asked: list[tuple[float, float]] = []
    for _ in range(3):
        before = time.time()
        (theirs,) = only(conn.execute("select extract(epoch from clock_timestamp())::float8"))
        after = time.time()
        asked.append((after - before, theirs - (before + after) / 2))
    return min(asked)[1] * 1000


def _look_at_tables(conn: Connection[Any], schema: str) -> list[Finding]:
    role, function = only(
        conn.execute(
            "select current_user, (select min(oid::regprocedure::text) from pg_proc "
            " where proname = 'pg_logical_emit_message' and pronamespace = 'pg_catalog'::regnamespace "
            "   and proargtypes[2] = 'text'::regtype and not has_function_privilege(oid, 'execute'))"
        )
    )
    tables = conn.execute(
        "select relname, relname = 'duly_meta' or (has_table_privilege(c.oid, 'select') "
        "       and has_table_privilege(c.oid, 'insert') and has_table_privilege(c.oid, 'update') "
        "       and has_table_privilege(c.oid, 'delete')), "
        "       exists (select 1 from unnest(reloptions) as o where o in ('autovacuum_enabled=false', "
        "               'autovacuum_enabled=off', 'autovacuum_enabled=0', 'autovacuum_enabled=no')) "
        "  from pg_class as c join pg_namespace as n on n.oid = relnamespace "
        " where nspname = %s and relkind = 'r' and starts_with(relname, 'duly_') order by relname",
        [schema],
    ).fetchall()
    rows = conn.execute(
        "select n_live_tup, n_dead_tup from pg_stat_user_tables where schemaname = %s and relname = 'duly_job'",
        [schema],
    ).fetchone()
    (on,) = only(conn.execute("select current_setting('autovacuum') = 'on'"))
    return [
        health.rights([name for name, allowed, _ in tables if not allowed], role, function=function),
        health.vacuum(on=on, off_for=[name for name, _, off in tables if off]),
        health.dead_rows(*(rows or (0, 0))),
    ]


def _look_at_activity(conn: Connection[Any]) -> list[Finding]:
    # For sessions of other roles only their number is visible, so only that is judged.
    old = conn.execute(
        "select pid, coalesce(application_name, ''), extract(epoch from clock_timestamp() - xact_start)::float8, "
        "       starts_with(state, 'idle in transaction') "
        "  from pg_stat_activity "
        " where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend' "
        "   and xact_start < clock_timestamp() - make_interval(secs => %s) "
        " order by xact_start",
        [OLD_TRANSACTION_SECONDS],
    ).fetchall()
    used, most = only(
        conn.execute(
            "select (select count(*) from pg_stat_activity where backend_type = 'client backend'), "
            "current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int"
        )
    )
    return [
        health.transactions([health.Transaction(*one) for one in old]),
        health.connections(used, most),
    ]
