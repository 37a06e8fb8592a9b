"""`duly why ID`: why a job is not running."""

from __future__ import annotations

import click

from duly.cli import output
from duly.cli.database import whole_id, with_app
from duly.duly import Duly


@click.command()
@click.argument("job_id", metavar="ID")
@with_app
def command(app: Duly, job_id: str, as_json: bool) -> None:
    """Explain why a job is not running: the first condition that stops it, and then the others.

    JSON has the name of the condition (gate), its sentence, the facts, and the others. Exit code 3: no job has this id.

    Examples:
      duly why 01997f3e-2a40-7c11-9d0c-5a1f0e8b7a55
      duly why 01997f3e --json
    """
    why = app.why(whole_id(app, job_id))
    if as_json:
        output.answer_json(why)
    else:
        click.echo(output.plain(why.sentence))
        for other in why.others:
            click.echo(output.plain(f"also: {other.sentence}"))
