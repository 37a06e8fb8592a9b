"""`duly queues`: list, pause, resume and limit queues."""

from __future__ import annotations

import sys
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, TypeVar

import click
import msgspec

from duly.cli import Named, output
from duly.cli.database import audit_options, database_options, json_option, opened
from duly.duly import Duly
from duly.errors import ConfigError
from duly.model import MANY, Limit, Pause, QueueFigure, TaskLimits
from duly.rules import durations
from duly.rules.durations import to_ms
from duly.rules.rate import Rate
from duly.store import ops

N = TypeVar("N", int, float)


@click.group(
    cls=Named,
    epilog="""\b
Examples:
  duly queues list
  duly queues pause mail --for 1h --why "mail server is down"
  duly queues resume mail
  duly queues limit mail --depth 10000 --retry-share 0.2
""",
)
def command() -> None:
    """List, pause, resume and limit queues."""


@command.command(
    "list",
    epilog="""\b
Examples:
  duly queues list
  duly queues list --json --url jobs.db
""",
)
@database_options
@json_option
def list_(url: str | None, schema: str | None, target: str | None, as_json: bool) -> None:
    """List queues with how many jobs each has, how long the oldest waits, its limits, and who paused it.

    A queue is known by its jobs, its pause, its limits, or a living worker. A count stops at 10,001 and is then told as
    10,000+.
    """
    with opened(url, schema, target) as app:
        figures, pauses = app.driver.run(ops.queues()), app.paused()
        limits = {limit.name: limit for limit in app.limits()}
        tasks = app.task_limits()
        now = app.driver.run(ops.clock())
    figures += [_empty(name) for name in limits if name not in {one.name for one in figures}]
    figures.sort(key=lambda one: one.name)
    queues = {pause.name: pause for pause in pauses if pause.kind == "queue"}
    if as_json:
        output.answer_json(
            [
                {**msgspec.to_builtins(one), "paused": queues.get(one.name), "limits": limits.get(one.name)}
                for one in figures
            ]
        )
        return
    columns = ["queue", "ready", "scheduled", "running", "waiting", "oldest", *(["limits"] if limits else []), "paused"]
    output.table(columns, [_line(one, limits, told_pause(queues.get(one.name), now)) for one in figures])
    if not figures:
        click.echo("there are no queues yet: a job or a worker makes one")
    for pause in pauses:
        if pause.kind == "task":
            click.echo(output.plain(f"task {pause.name!r} is paused {told_pause(pause, now)}"))
    for task in tasks:
        if told := _told_task(task):
            click.echo(output.plain(f"task {task.task!r} has {told}"))


def _line(one: QueueFigure, limits: dict[str, Limit], paused: str) -> list[str]:
    counts = (output.figure(number) for number in (one.ready, one.scheduled, one.running, one.waiting))
    told = [_told_limits(limits.get(one.name), one)] if limits else []
    return [one.name, *counts, output.age(one.oldest_ms), *told, paused]


def _empty(name: str) -> QueueFigure:
    return QueueFigure(name, ready=0, scheduled=0, running=0, waiting=0, oldest_ms=None)


def _told_limits(limit: Limit | None, figure: QueueFigure | None = None) -> str:
    """Say what a queue was told, and how near it is to its depth."""
    if limit is None:
        return ""
    told = []
    if limit.max_depth is not None:
        now = "" if figure is None else f"{_depth(limit, figure)} of "
        told.append(f"depth {now}{limit.max_depth:,}")
    if limit.ageing_ms is not None:
        told.append(f"ageing {durations.describe(limit.ageing_ms)}")
    if limit.retry_share is not None:
        told.append(f"retries {100 * limit.retry_share:g} %")
    return ", ".join(told)


def _depth(limit: Limit, figure: QueueFigure) -> str:
    """Give how many jobs wait: as counted now, or where that has stopped, as counted for the limit."""
    counts = (figure.ready, figure.scheduled, figure.waiting)
    if max(counts) <= MANY or limit.depth is None:
        return output.figure(sum(counts))
    return f"{limit.depth:,}"


def told_pause(pause: Pause | None, now: int) -> str:
    """Say who paused something, why, and until when."""
    if pause is None:
        return ""
    until = "" if pause.paused_until is None else f", until {output.moment(pause.paused_until)}"
    why = f": {pause.paused_why}" if pause.paused_why else ""
    return f"by {pause.paused_by} {output.ago(pause.paused_at, now)}{until}{why}"


@command.command(
    epilog="""\b
Examples:
  duly queues pause mail --why "mail server is down"
  duly queues pause mail --for 1h30m
  duly queues pause send_receipt --task
"""
)
@click.argument("name")
@click.option("--task", "is_task", is_flag=True, help="NAME is a task, in whatever queues its jobs are.")
@click.option("--for", "lasting", metavar="DURATION", help="Only so long, as in 30m or 1h30m. Default: until resumed.")
@audit_options
@database_options
@json_option
def pause(
    name: str,
    is_task: bool,
    lasting: str | None,
    by: str,
    why: str | None,
    url: str | None,
    schema: str | None,
    target: str | None,
    as_json: bool,
) -> None:
    """Let no worker take a job of a queue, or of a task. What runs goes on.

    A name that nobody knows yet is paused all the same, with a warning.
    """
    kind = _kind(is_task)
    lasting_ms = None if lasting is None else to_ms(lasting, what="--for")
    if not name or lasting_ms == 0:
        raise click.UsageError("--for is 0: give a time, as in 30m." if name else "NAME is empty.")
    with opened(url, schema, target) as app:
        app.pause(
            queue=None if is_task else name,
            task=name if is_task else None,
            by=by,
            why=why or "",
            duration=None if lasting_ms is None else timedelta(milliseconds=lasting_ms),
        )
        paused = _paused(app, kind, name)
        _warn_if_unknown(app, kind, name)
        now = app.driver.run(ops.clock())
    if as_json:
        output.answer_json(paused)
    else:
        click.echo(output.plain(f"{kind} {name!r} is paused {told_pause(paused, now)}"))


def _kind(is_task: bool) -> str:
    return "task" if is_task else "queue"


def _paused(app: Duly, kind: str, name: str) -> Pause | None:
    return next((pause for pause in app.paused() if (pause.kind, pause.name) == (kind, name)), None)


def _warn_if_unknown(app: Duly, kind: str, name: str) -> None:
    """Warn of a name that no job and no living worker has: it may come later, or be misspelt."""
    workers = [worker for worker in app.driver.run(ops.workers()) if worker.alive]
    if kind == "task":
        known = {task for worker in workers for task in worker.tasks} | set(app.tasks)
        unknown = name not in known and not app.list(task=name, limit=1)
    else:
        figures = app.driver.run(ops.queues())
        known = {queue for worker in workers for queue in worker.queues}
        known |= {one.name for one in figures if one.ready or one.scheduled or one.running or one.waiting}
        unknown = name not in known
    if unknown:
        click.echo(f"duly: no job and no living worker has a {kind} {name!r}{meant(name, known)}", err=True)


def meant(name: str, known: set[str]) -> str:
    """Name the one that was meant, if one is like it."""
    close = get_close_matches(name, sorted(known), n=1)
    return f": did you mean {close[0]!r}?" if close else ""


@command.command(
    epilog="""\b
Examples:
  duly queues resume mail
  duly queues resume send_receipt --task --why "fixed"
"""
)
@click.argument("name")
@click.option("--task", "is_task", is_flag=True, help="NAME is a task.")
@audit_options
@database_options
@json_option
def resume(
    name: str,
    is_task: bool,
    by: str,
    why: str | None,
    url: str | None,
    schema: str | None,
    target: str | None,
    as_json: bool,
) -> None:
    """Let workers take jobs of a paused queue or task again.

    Exit code 1: it was not paused.
    """
    kind = _kind(is_task)
    with opened(url, schema, target) as app:
        known = {pause.name for pause in app.paused() if pause.kind == kind}
        resumed = app.resume(queue=None if is_task else name, task=name if is_task else None, by=by, why=why or "")
    if as_json:
        output.answer_json({"kind": kind, "name": name, "resumed": resumed})
    elif resumed:
        click.echo(f"{kind} {name!r} goes on")
    if not resumed:
        click.echo(f"duly: {kind} {name!r} was not paused{meant(name, known)}", err=True)
        sys.exit(1)


@command.command(
    epilog="""\b
Examples:
  duly queues limit mail --depth 10000 --why "the disk is small"
  duly queues limit mail --ageing 1m --retry-share 0.2
  duly queues limit send_receipt --task --cap 2 --rate 10/min --why "the provider is slow"
  duly queues limit send_receipt --task --reset
"""
)
@click.argument("name")
@click.option("--depth", metavar="N|off", help="How many jobs may wait; more are refused with QueueFull.")
@click.option(
    "--ageing", metavar="DURATION|off", help="How much waiting counts as one priority, such as 1m; nothing is starved."
)
@click.option(
    "--retry-share", metavar="SHARE|off", help="What share of the work retries may be while other work waits: 0.2."
)
@click.option("--task", "is_task", is_flag=True, help="NAME is a task that has a cap or a rate in its code.")
@click.option("--cap", metavar="N|off", help="How many jobs of the task, or of each of its keys, run at once.")
@click.option("--rate", metavar="RATE|off", help="How many of them begin in any window, such as 100/min or 15/10s.")
@click.option("--reset", is_flag=True, help="Back to what the code of the task says.")
@audit_options
@database_options
@json_option
def limit(
    name: str,
    depth: str | None,
    ageing: str | None,
    retry_share: str | None,
    is_task: bool,
    cap: str | None,
    rate: str | None,
    reset: bool,
    by: str,
    why: str | None,
    url: str | None,
    schema: str | None,
    target: str | None,
    as_json: bool,
) -> None:
    """Tell a queue how many jobs it takes, how its priorities age, what share retries have; or a task its limits.

    What is left out stays as it is; `off` takes a limit away. A name that nobody knows yet is told all the same, with a
    warning. What is set so for a task goes before what its code says, in all workers, until it is reset.
    """
    of_queue = {
        "depth": _number("--depth", depth, int),
        "ageing": ageing,
        "retry_share": _number("--retry-share", retry_share, float),
    }
    of_task = {"cap": _number("--cap", cap, int), "rate": rate, "reset": reset or None}
    mine, other = (of_task, of_queue) if is_task else (of_queue, of_task)
    if not name:
        raise click.UsageError("NAME is empty.")
    if any(value is not None for value in other.values()):
        raise click.UsageError("--cap, --rate and --reset go with --task; --depth, --ageing and --retry-share do not.")
    if all(value is None for value in mine.values()):
        raise click.UsageError(f"say what to limit: {', '.join('--' + one.replace('_', '-') for one in mine)}.")
    kind = _kind(is_task)
    with opened(url, schema, target) as app:
        named: Any = {kind: name, **mine}
        app.limit(**named, by=by, why=why or "")
        told: Limit | TaskLimits | None = (
            next((one for one in app.task_limits() if one.task == name), None)
            if is_task
            else next((one for one in app.limits() if one.name == name), None)
        )
        _warn_if_unknown(app, kind, name)
    if as_json:
        output.answer_json(told)
    elif isinstance(told, TaskLimits):
        click.echo(output.plain(f"task {name!r} has {_told_task(told) or 'no limits'}"))
        if told.cap is None and told.rate_count is None:
            click.echo(
                "duly: no worker has said that its code has a cap or a rate; jobs enqueued without are not limited",
                err=True,
            )
    else:
        click.echo(
            output.plain(f"queue {name!r} has {'no limits' if told is None else f'limits: {_told_limits(told)}'}")
        )


def _told_task(limits: TaskLimits) -> str:
    """Say what a task is limited to, and whether by its code or by whom."""
    cap = limits.cap if limits.set_cap is None else limits.set_cap
    told = [f"cap {cap}"] if cap else []
    count, per_ms = limits.rate_count, limits.rate_ms
    if limits.set_rate_count is not None:
        count, per_ms = limits.set_rate_count, limits.set_rate_ms
    if count and per_ms:
        told.append(f"rate {Rate(count, per_ms)}")
    if limits.set_cap is not None or limits.set_rate_count is not None:
        why = f": {limits.set_why}" if limits.set_why else ""
        told.append(f"set by {limits.set_by}{why}")
    return ", ".join(told)


def _number(option: str, text: str | None, kind: type[N]) -> N | str | None:
    """Read a number, or `off`."""
    if text is None or text == "off":
        return text
    try:
        return kind(text.replace("_", "").replace(",", ""))
    except ValueError:
        raise ConfigError(f"{option} is {text!r}: give a number, or off") from None
