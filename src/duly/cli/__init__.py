"""The `duly` command. Each subcommand is imported only when it is called, so that `duly --version` is quick."""

from __future__ import annotations

import difflib
import errno
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.exceptions import NoArgsIsHelpError

from duly import __version__
from duly.errors import BatchNotFound, ConfigError, DulyError, JobNotFound, PayloadError, ScheduleNotFound
from duly.rules import settings

COMMANDS = {
    "backup": "Copy a SQLite database while it is in use.",
    "batches": "List, show, watch and cancel batches.",
    "bench": "Measure duly on your database.",
    "check": "Check whether the workers on this machine are alive, for probes.",
    "cloudflare": "Write, deploy and check the Worker through which duly uses a D1 database.",
    "dead": "List dead letters, run them again, settle them.",
    "demo": "Show jobs that run, fail, retry, die and are rescued, on a database of its own.",
    "dev": "Run the jobs of an app while you write it: reloads when a file changes.",
    "doctor": "Check the database, the workers and the tasks, and print what to do.",
    "enqueue": "Enqueue a job.",
    "jobs": "List, show, cancel and retry jobs.",
    "migrate": "Create or update duly's tables.",
    "prune": "Remove expired rows now, instead of in chunks.",
    "queues": "List, pause and resume queues.",
    "restore": "Restore a backup, optionally on hold.",
    "schedules": "List, preview, pause, resume, trigger, backfill and delete schedules.",
    "stats": "Count jobs by queue and state, and dead ones by reason.",
    "tick": "Do one bounded pass over the queue and exit, for cron and timers.",
    "top": "Watch queues and workers live.",
    "why": "Explain why a job is not running.",
    "worker": "Run the jobs of an app.",
    "workers": "List the workers.",
}


# Errors of a stream that cannot be written: the disk is full, or the reader has closed it.
UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EPIPE})
INTERRUPTED = 130


class Named(click.Group):
    """A group that suggests the right name for a misspelt command."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find a command, or suggest the most similar name."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            close = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            if not close or close[0] in error.message:
                raise
            raise click.UsageError(f"{error.message} Did you mean {close[0]!r}?", ctx) from None


class Commands(Named):
    """All commands. A mistake is answered with one line, never with a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands without importing them."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import this command, and no other."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"duly.cli.{cmd_name}").command
        _name_variables(command, f"DULY_{cmd_name.upper()}")
        _move_examples(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command and flush its output; a stream that cannot be written or a deleted folder becomes a message."""
        _open_streams()
        try:
            try:
                return super().main(*args, **extra)
            finally:
                sys.stdout.flush()
        except OSError as error:
            click.echo(f"duly: {_trouble(error)}", err=True)
            sys.exit(1)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Read the flags before the command."""
        with _shortly():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an error of duly becomes a message and an exit code."""
        try:
            with _shortly():
                return super().invoke(ctx)
        except DulyError as error:
            from duly.cli import output

            click.echo(f"duly: {output.plain(output.reason(error))}", err=True)
            sys.exit(_exit_code(error))
        except KeyboardInterrupt:
            click.echo("\nduly: interrupted" if sys.stderr.isatty() else "duly: interrupted", err=True)
            sys.exit(INTERRUPTED)


class Misuse(click.ClickException):
    """A usage error: the mistake, and the command that prints the help."""

    exit_code = 2

    def __init__(self, error: click.UsageError) -> None:
        super().__init__(error.format_message())
        self._command = None if error.ctx is None else error.ctx.command_path

    def show(self, file: Any = None) -> None:
        """Print two lines; --help prints the usage."""
        click.echo(f"duly: {self.format_message()}", file=file, err=True)
        if self._command is not None:
            click.echo(f"Try '{self._command} --help'", file=file, err=True)


@contextmanager
def _shortly() -> Iterator[None]:
    """Print errors of click in the short form of our own errors."""
    try:
        yield
    except NoArgsIsHelpError:  # a call without arguments prints the help
        raise
    except click.UsageError as error:
        if isinstance(error, click.BadParameter):
            _name_source(error)
        raise Misuse(error) from None


def _open_streams() -> None:
    """Open streams that the caller has closed: writes to stdout fail, writes to stderr are lost."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # a test has replaced the stream
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def _trouble(error: OSError) -> str:
    """Name the stream that cannot be written or the deleted folder; any other error keeps its traceback."""
    if error.filename is None and error.errno in UNWRITABLE:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python flushes it again at exit
        return f"stdout cannot be written ({error.strerror})"
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the current folder was deleted: cd to another one"
    raise error


def _name_source(error: click.BadParameter) -> None:
    """Name the environment variable of a wrong value instead of the flag."""
    option = error.param
    if error.ctx is None or not isinstance(option, click.Option) or option.name is None:
        return
    if error.ctx.get_parameter_source(option.name) is ParameterSource.ENVIRONMENT:
        error.param_hint = f"${option.envvar}"


def _name_variables(command: click.Command, prefix: str) -> None:
    """Give every flag a variable: `duly jobs list --state` has `$DULY_JOBS_LIST_STATE`, unless it names another."""
    for option in command.params:
        if isinstance(option, click.Option) and option.envvar is None:
            flag = max(option.opts, key=len).lstrip("-").replace("-", "_")
            option.envvar = f"{prefix}_{flag.upper()}"
    for name, child in getattr(command, "commands", {}).items():
        _name_variables(child, f"{prefix}_{name.replace('-', '_').upper()}")


def _move_examples(command: click.Command) -> None:
    """Move the examples of a docstring, and what follows them, below the options; their lines stay as they are."""
    text, found, rest = inspect.cleandoc(command.help or "").partition("\n\nExamples:\n")
    if found:
        command.help, command.epilog = text, "\b\nExamples:\n" + rest.replace("\n\n", "\n\b\n")
    for child in getattr(command, "commands", {}).values():
        _move_examples(child)


def _exit_code(error: DulyError) -> int:
    match error:
        case ConfigError() | PayloadError():
            return 2
        case JobNotFound() | ScheduleNotFound() | BatchNotFound():
            return 3
    return 1


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="duly", message="%(prog)s %(version)s")
def main() -> None:
    """Run work when it is due and make its effects happen once."""


def read_settings(options: Mapping[str, Any]) -> settings.Settings:
    """Read the settings for a command run here: its options, the environment, and the file in this folder."""
    return settings.read(options, os.environ, Path.cwd())
