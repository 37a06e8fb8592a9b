"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from duly.app.filters import user
from duly.cli import logs
from duly.model import State
from duly.rules.checks import MOST
from duly.rules.durations import to_ms

C = TypeVar("C", bound=Callable[..., Any])

SHORTEST_INTERVAL_MS = 100
COUNT = click.IntRange(1, MOST)


URL_OF_APP = click.option(
    "--url", help="The database, instead of the one that the app names. [$DULY_URL, if the app names none]"
)


def worker_options(command: C) -> C:
    """Add the options of commands that run a worker until it is stopped."""
    for option in (
        click.option(
            "--log-level",
            type=click.Choice(logs.LEVELS, case_sensitive=False),
            default="info",
            show_default=True,
            envvar="DULY_LOG_LEVEL",
            help="The lowest level to log. Successes are logged at debug. [$DULY_LOG_LEVEL]",
        ),
        URL_OF_APP,
        click.option(
            "--queues",
            multiple=True,
            envvar="DULY_QUEUES",
            metavar="NAME[:LIMIT],…",
            help="Queues to serve, each with how many of its jobs run at once in a process. "
            "Default: those of the app's tasks. [$DULY_QUEUES]",
        ),
        click.option(
            "--concurrency",
            type=COUNT,
            default=10,
            show_default=True,
            envvar="DULY_CONCURRENCY",
            help="How many jobs run at once in a process. [$DULY_CONCURRENCY]",
        ),
    ):
        command = option(command)
    return command


def filter_options(command: C) -> C:
    """Add the options that choose jobs, without their state."""
    for option in (
        click.option("--error", metavar="TEXT", help="Only jobs whose error or reason has this text in it."),
        click.option(
            "--since", metavar="WHEN", help="Only jobs since then: 2h (ago), 2026-01-31, 2026-01-31T12:00+01:00."
        ),
        click.option("--task", help="Only jobs of this task."),
        click.option("--queue", help="Only jobs of this queue."),
    ):
        command = option(command)
    return command


def state_option(states: Iterable[State] = State) -> Callable[[C], C]:
    """Make the option that chooses jobs by their state."""
    return click.option("--state", type=click.Choice([str(state) for state in states]), help="Only jobs in this state.")


def page_options(flag: str, which: str) -> Callable[[C], C]:
    """Make the options of a listing that is read page by page: --limit, and where the next page begins."""

    def add(command: C) -> C:
        command = click.option(flag, metavar="ID", help=f"{which}: the next page.")(command)
        return click.option("--limit", type=COUNT, default=50, show_default=True, help="How many at most.")(command)

    return add


def json_option(command: C) -> C:
    """Add the option to answer in JSON."""
    return click.option("--json", "as_json", is_flag=True, help="Answer in JSON; times are milliseconds UTC.")(command)


def by_option(command: C) -> C:
    """Add the option that names the person who makes a change."""
    return click.option("--by", default=user, show_default="your login name", help="Your name, for the record.")(
        command
    )


def audit_options(command: C) -> C:
    """Add the options that name the person who makes a change, and the reason; both are recorded."""
    return by_option(click.option("--why", help="The reason, for the record.")(command))


def bulk_options(command: C) -> C:
    """Add the options of commands that change many things at once."""
    command = click.option("--yes", is_flag=True, help="Do it without asking.")(command)
    return click.option("--dry-run", is_flag=True, help="Print what would be done, and change nothing.")(command)


def interval_option(command: C) -> C:
    """Add the option of commands that read the database again and again."""
    return click.option(
        "--interval",
        "interval_ms",
        default="1s",
        show_default=True,
        callback=_read_interval,
        help="How long to wait between two reads.",
    )(command)


def _read_interval(context: click.Context, option: click.Parameter, text: str) -> int:
    interval_ms = to_ms(text, what="--interval")
    if interval_ms < SHORTEST_INTERVAL_MS:
        raise click.UsageError(f"--interval is {text!r}: give {SHORTEST_INTERVAL_MS}ms or more.")
    return interval_ms


def read_duration(context: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """Read a duration in milliseconds, as the callback of an option."""
    return None if text is None else to_ms(text, what=option.opts[0])
