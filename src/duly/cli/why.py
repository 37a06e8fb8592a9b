"""`duly why ID`: why a job is not running."""

from __future__ import annotations

import click

from duly.cli import output
from duly.cli.database import database_options, json_option, opened, whole_id


@click.command(
    epilog="""\b
Examples:
  duly why 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55
  duly why 01997f3e --json
"""
)
@click.argument("job_id", metavar="ID")
@database_options
@json_option
def command(job_id: str, url: str | None, schema: str | None, target: str | None, as_json: bool) -> None:
    """Say why a job is not running: the first gate that is shut, and then the others that are.

    JSON has the gate, the sentence, the facts it was judged by and the others. Exit code 3: no job has this id.
    """
    with opened(url, schema, target) as app:
        why = app.why(whole_id(app, job_id))
    if as_json:
        output.answer_json(why)
    else:
        click.echo(output.plain(why.sentence))
        for other in why.others:
            click.echo(output.plain(f"also: {other.sentence}"))
