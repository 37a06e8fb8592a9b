"""`duly backup FILE`: copy a SQLite database while it is in use."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import click

from duly.cli import output
from duly.cli.database import database_options, json_option, opened
from duly.errors import ConfigError
from duly.rules.settings import Settings

Pages: TypeAlias = Callable[[int, int], None]


@click.command(
    epilog="""\b
Examples:
  duly backup backups/monday.db
  duly backup monday.db --url /var/lib/shop/jobs.db --force --json
\b
Bring it back with duly restore. PostgreSQL: pg_dump.
"""
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Write over FILE if it is there already.")
@database_options
@json_option
def command(file: Path, force: bool, url: str | None, schema: str | None, target: str | None, as_json: bool) -> None:
    """Copy a SQLite database while it is in use.

    The copy holds everything as it was at one moment; workers need not stop. FILE is there only once it is whole.
    """
    with opened(url, schema, target) as app:
        source = _source(app.settings, file)
        if file.is_file() and not force:
            raise ConfigError(f"{file} is there already: name another file, or say --force to write over it")
        from duly.store.sqlite import backup as backups

        began_at = time.monotonic()
        with pages("backup") as progress:
            backups.backup(source, file, replace=force, progress=progress)
    size, took_s = file.stat().st_size, time.monotonic() - began_at
    if as_json:
        output.answer_json({"file": str(file.absolute()), "bytes": size, "took_ms": round(took_s * 1000)})
    else:
        click.echo(f"{file}: {in_bytes(size)} in {took_s:.1f} s")


def _source(settings: Settings, file: Path) -> Path:
    url = settings.url
    if url.store == "postgresql":
        raise ConfigError(
            f"duly backup copies SQLite files; {url} is a server: "
            + shlex.join(["pg_dump", "--format=custom", f"--schema={settings.schema}", f"--file={file}", str(url)])
        )
    if url.path is None:
        raise ConfigError(f"duly backup copies SQLite files; {url} is none")
    return Path(url.path)


@contextmanager
def pages(label: str) -> Iterator[Pages]:
    """Show how far a copy is, in percent: how many pages there are is only known on the way."""
    shown = 0
    with output.progress(label, 100) as advance:

        def progress(done: int, total: int) -> None:
            nonlocal shown
            percent = 100 * done // max(total, 1)
            if percent > shown:  # it begins anew when another process writes
                advance(percent - shown)
                shown = percent

        yield progress


def in_bytes(size: int) -> str:
    """Write the size of a file."""
    for unit, whole in (("GB", 1_000_000_000), ("MB", 1_000_000), ("kB", 1_000)):
        if size >= whole:
            return f"{size / whole:.1f} {unit}"
    return f"{size} bytes"
