"""`duly backup FILE`: copies a SQLite database while it is in use."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import click

from duly.cli import output
from duly.cli.database import with_app
from duly.duly import Duly
from duly.errors import ConfigError
from duly.rules.settings import Settings

Pages: TypeAlias = Callable[[int, int], None]


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
@with_app
def command(app: Duly, file: Path, force: bool, as_json: bool) -> None:
    """Copy a SQLite database while it is in use.

    The copy is consistent: workers need not stop. FILE appears when the copy is complete.

    Examples:
      duly backup backups/monday.db
      duly backup monday.db --url /var/lib/shop/jobs.db --force --json

    Restore it with duly restore. PostgreSQL: pg_dump.
    """
    source = _source(app.settings, file)
    if file.is_file() and not force:
        raise ConfigError(f"{file} exists: name another file, or give --force to overwrite it")
    from duly.store.sqlite import backup as backups

    began_at = time.monotonic()
    with pages("backup") as progress:
        backups.backup(source, file, replace=force, progress=progress)
    size, took_s = file.stat().st_size, time.monotonic() - began_at
    found = {"file": str(file.absolute()), "bytes": size, "took_ms": round(took_s * 1000)}
    output.answer(found, f"{file}: {in_bytes(size)} in {took_s:.1f} s", as_json=as_json)


def _source(settings: Settings, file: Path) -> Path:
    url = settings.url
    if url.store == "postgresql":
        raise ConfigError(
            f"duly backup copies SQLite files; {url} is a server: "
            + shlex.join(["pg_dump", "--format=custom", f"--schema={settings.schema}", f"--file={file}", str(url)])
        )
    if url.store == "d1":
        raise ConfigError(
            f"duly backup copies SQLite files; {url} is on Cloudflare: "
            f"wrangler d1 export DATABASE --remote --output={file}"
        )
    if url.path is None:
        raise ConfigError(f"duly backup copies SQLite files; {url} is not one")
    return Path(url.path)


@contextmanager
def pages(label: str) -> Iterator[Pages]:
    """Show the progress of a copy in percent: the number of pages is known only during the copy."""
    shown = 0
    with output.progress(label, 100) as advance:

        def progress(done: int, total: int) -> None:
            nonlocal shown
            percent = 100 * done // max(total, 1)
            if percent > shown:  # the copy restarts when another process writes
                advance(percent - shown)
                shown = percent

        yield progress


def in_bytes(size: int) -> str:
    """Write the size of a file."""
    for unit, whole in (("GB", 1_000_000_000), ("MB", 1_000_000), ("kB", 1_000)):
        if size >= whole:
            return f"{size / whole:.1f} {unit}"
    return f"{size} bytes"
