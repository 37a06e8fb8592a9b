"""The `duly` command. Each subcommand is imported only when it is called, so that `duly --version` is quick."""

from __future__ import annotations

import difflib
import sys
from importlib import import_module
from typing import Any

import click

from duly import __version__
from duly.errors import ConfigError, DulyError

COMMANDS = {
    "demo": "See jobs run, fail, retry, die and be rescued, on a database of its own.",
    "migrate": "Create or update duly's tables.",
}


class Commands(click.Group):
    """The commands by name; mistakes are answered in a line, never with a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands without importing them."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the one command that was asked for."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"duly.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find a command, or say which one was meant."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            if not close or close[0] in error.message:
                raise
            raise click.UsageError(f"{error.message} Did you mean {close[0]!r}?", ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; what duly itself raises becomes a message and an exit code."""
        try:
            return super().invoke(ctx)
        except DulyError as error:
            click.echo(f"duly: {error}", err=True)
            sys.exit(2 if isinstance(error, ConfigError) else 1)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="duly", message="%(prog)s %(version)s")
def main() -> None:
    """Run work when it is due and make its effects happen once."""
