"""The store: operations as values, their SQL, and the drivers that run them."""

from __future__ import annotations

import os

from duly.errors import ConfigError
from duly.rules.settings import Settings
from duly.store.driver import Driver


def open_driver(settings: Settings) -> Driver:
    """Make the driver for the database that is set. Nothing is opened before its first operation."""
    url = settings.url
    match url.store:
        case "sqlite":
            from duly.store.sqlite.driver import SQLiteDriver

            return SQLiteDriver(url.path or "", durability=settings.durability, busy_s=settings.busy_timeout_ms / 1000)
        case "postgresql":
            try:
                from duly.store.postgres.driver import PostgresDriver
            except ImportError as error:
                raise ConfigError(
                    f"{url} needs psycopg, which is not installed: pip install 'duly[postgres]'"
                ) from error
            return PostgresDriver(
                url.dsn,
                schema=settings.schema,
                prepared=settings.prepared,
                connect_s=settings.connect_timeout_ms / 1000,
                listen_url=None if settings.listen_url is None else settings.listen_url.dsn,
            )
        case "d1":
            from duly.store.d1.driver import D1Driver
            from duly.store.d1.wire import Wire, read_address

            address = read_address(url.dsn, os.environ)
            return D1Driver(
                address,
                Wire(address),
                timeout_s=settings.d1_timeout_ms / 1000,
                most_statements=settings.d1_statements,
            )
    raise ConfigError(f"{url}: this version of duly has no store for {url.store!r} yet")
