"""`duly queues`: list, pause, resume and limit queues."""

from __future__ import annotations

import sys
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, TypeVar

import click
import msgspec

from duly.cli import Named, output
from duly.cli.database import with_app
from duly.cli.options import audit_options, read_duration
from duly.duly import Duly
from duly.errors import ConfigError
from duly.model import MANY, Limit, Pause, QueueFigure, TaskLimits
from duly.rules import durations
from duly.rules.rate import Rate
from duly.store import ops

N = TypeVar("N", int, float)


@click.group(cls=Named)
def command() -> None:
    """List, pause, resume and limit queues.

    Examples:
      duly queues list
      duly queues pause mail --for 1h --why "mail server is down"
      duly queues resume mail
      duly queues limit mail --depth 10000 --retry-share 0.2
    """


@command.command("list")
@with_app
def list_(app: Duly, as_json: bool) -> None:
    """List queues with their counts of jobs, the age of the oldest due job, their limits and pauses.

    A queue is listed if it has jobs, a pause, limits, or a living worker. Counts stop at 10,001, which is printed as
    10,000+.

    Examples:
      duly queues list
      duly queues list --json --url jobs.db
    """
    figures, pauses = app.driver.run(ops.queues()), app.paused()
    limits = {limit.name: limit for limit in app.limits()}
    tasks = app.task_limits()
    now = app.driver.run(ops.clock())
    figures += [_empty(name) for name in limits if name not in {one.name for one in figures}]
    figures.sort(key=lambda one: one.name)
    paused = {pause.name: pause for pause in pauses if pause.kind == "queue"}
    if as_json:
        more = [{"paused": paused.get(one.name), "limits": limits.get(one.name)} for one in figures]
        output.answer_json([msgspec.to_builtins(one) | two for one, two in zip(figures, more, strict=True)])
        return
    columns = [*QUEUE_COLUMNS, *(["limits"] if limits else []), "paused"]
    output.table(columns, [_line(one, limits, pause_text(paused.get(one.name), now)) for one in figures])
    if not figures:
        click.echo("there are no queues yet: a job or a worker makes one")
    for pause in pauses:
        if pause.kind == "task":
            click.echo(output.plain(f"task {pause.name!r} is paused {pause_text(pause, now)}"))
    for task in tasks:
        if text := _task_text(task):
            click.echo(output.plain(f"task {task.task!r} has {text}"))


QUEUE_COLUMNS = ("queue", "ready", "scheduled", "running", "waiting", "oldest")


def queue_cells(one: QueueFigure) -> list[str]:
    """Write the counts of a queue for a table."""
    counts = (one.ready, one.scheduled, one.running, one.waiting)
    return [one.name, *map(output.figure, counts), output.age(one.oldest_ms)]


def _line(one: QueueFigure, limits: dict[str, Limit], paused: str) -> list[str]:
    return [*queue_cells(one), *([_limit_text(limits.get(one.name), one)] if limits else []), paused]


def _empty(name: str) -> QueueFigure:
    return QueueFigure(name, ready=0, scheduled=0, running=0, waiting=0, oldest_ms=None)


def _limit_text(limit: Limit | None, figure: QueueFigure | None = None) -> str:
    """Write the limits of a queue, and its present depth where it is known."""
    if limit is None:
        return ""
    parts = []
    if limit.max_depth is not None:
        now = "" if figure is None else f"{_depth(limit, figure)} of "
        parts.append(f"depth {now}{limit.max_depth:,}")
    if limit.ageing_ms is not None:
        parts.append(f"ageing {durations.describe(limit.ageing_ms)}")
    if limit.retry_share is not None:
        parts.append(f"retries {100 * limit.retry_share:g} %")
    return ", ".join(parts)


def _depth(limit: Limit, figure: QueueFigure) -> str:
    """Write how many jobs wait: counted now, or if that count was stopped, as counted for the limit."""
    counts = (figure.ready, figure.scheduled, figure.waiting)
    if max(counts) <= MANY or limit.depth is None:
        return output.figure(sum(counts))
    return f"{limit.depth:,}"


def pause_text(pause: Pause | None, now: int) -> str:
    """Write who paused a queue or task, why, and until when."""
    if pause is None:
        return ""
    until = "" if pause.paused_until is None else f", until {output.moment(pause.paused_until)}"
    why = f": {pause.paused_why}" if pause.paused_why else ""
    return f"by {pause.paused_by} {output.ago(pause.paused_at, now)}{until}{why}"


@command.command()
@click.argument("name")
@click.option("--task", "is_task", is_flag=True, help="NAME is a task, in all queues of its jobs.")
@click.option(
    "--for",
    "duration_ms",
    metavar="DURATION",
    callback=read_duration,
    help="Only so long, as in 30m or 1h30m. Default: until resumed.",
)
@audit_options
@with_app
def pause(
    app: Duly, name: str, is_task: bool, duration_ms: int | None, by: str, why: str | None, as_json: bool
) -> None:
    """Stop workers from claiming the jobs of a queue, or of a task. Running jobs continue.

    An unknown name is paused all the same, with a warning.

    Examples:
      duly queues pause mail --why "mail server is down"
      duly queues pause mail --for 1h30m
      duly queues pause send_receipt --task
    """
    kind = _kind(is_task)
    if not name or duration_ms == 0:
        raise click.UsageError("--for is 0: give a time, as in 30m." if name else "NAME is empty.")
    duration = None if duration_ms is None else timedelta(milliseconds=duration_ms)
    app.pause(**_of(kind, name), by=by, why=why or "", duration=duration)
    paused = _paused(app, kind, name)
    _warn_if_unknown(app, kind, name)
    now = app.driver.run(ops.clock())
    output.answer(paused, f"{kind} {name!r} is paused {pause_text(paused, now)}", as_json=as_json)


def _of(kind: str, name: str) -> Any:
    """Give the name of a queue or task as a keyword argument."""
    return {kind: name}


def _kind(is_task: bool) -> str:
    return "task" if is_task else "queue"


def _paused(app: Duly, kind: str, name: str) -> Pause | None:
    return next((pause for pause in app.paused() if (pause.kind, pause.name) == (kind, name)), None)


def _warn_if_unknown(app: Duly, kind: str, name: str) -> None:
    """Warn if no job and no living worker has this name: it may be misspelt, or used later."""
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
        output.remark(f"no job and no living worker has a {kind} {name!r}{did_you_mean(name, known)}")


def did_you_mean(name: str, known: set[str]) -> str:
    """Write the known name that is most like a misspelt one, if there is one."""
    close = get_close_matches(name, sorted(known), n=1)
    return f": did you mean {close[0]!r}?" if close else ""


@command.command()
@click.argument("name")
@click.option("--task", "is_task", is_flag=True, help="NAME is a task.")
@audit_options
@with_app
def resume(app: Duly, name: str, is_task: bool, by: str, why: str | None, as_json: bool) -> None:
    """Let workers claim the jobs of a paused queue or task again.

    Exit code 1: it was not paused.

    Examples:
      duly queues resume mail
      duly queues resume send_receipt --task --why "fixed"
    """
    kind = _kind(is_task)
    known = {pause.name for pause in app.paused() if pause.kind == kind}
    resumed = app.resume(**_of(kind, name), by=by, why=why or "")
    if as_json:
        output.answer_json({"kind": kind, "name": name, "resumed": resumed})
    elif resumed:
        click.echo(f"{kind} {name!r} is resumed")
    if not resumed:
        output.remark(f"{kind} {name!r} was not paused{did_you_mean(name, known)}")
        sys.exit(1)


@command.command()
@click.argument("name")
@click.option("--depth", metavar="N|off", help="How many jobs may wait; more are refused with QueueFull.")
@click.option(
    "--ageing", metavar="DURATION|off", help="How much waiting counts as one priority, such as 1m; nothing is starved."
)
@click.option(
    "--retry-share", metavar="SHARE|off", help="The largest share of retries while other jobs wait, such as 0.2."
)
@click.option("--task", "is_task", is_flag=True, help="NAME is a task that has a cap or a rate in its code.")
@click.option("--cap", metavar="N|off", help="How many jobs of the task, or of each of its keys, run at once.")
@click.option("--rate", metavar="RATE|off", help="How many of them begin in any window, such as 100/min or 15/10s.")
@click.option("--reset", is_flag=True, help="Back to the limits in the code of the task.")
@audit_options
@with_app
def limit(app: Duly, name: str, is_task: bool, by: str, why: str | None, as_json: bool, **given: Any) -> None:
    """Limit the depth of a queue, the ageing of its priorities and its share of retries; or the jobs of a task.

    Options that are left out change nothing; `off` removes a limit. An unknown name is limited all the same, with a
    warning. The limits of a task set here replace those in its code, in all workers, until --reset.

    Examples:
      duly queues limit mail --depth 10000 --why "the disk is small"
      duly queues limit mail --ageing 1m --retry-share 0.2
      duly queues limit send_receipt --task --cap 2 --rate 10/min --why "the provider is slow"
      duly queues limit send_receipt --task --reset
    """
    kind = _kind(is_task)
    limits = _read_limits(name, is_task, given)
    app.limit(**_of(kind, name), **limits, by=by, why=why or "")
    found: Limit | TaskLimits | None = (
        next((one for one in app.task_limits() if one.task == name), None)
        if is_task
        else next((one for one in app.limits() if one.name == name), None)
    )
    _warn_if_unknown(app, kind, name)
    if as_json:
        output.answer_json(found)
    elif isinstance(found, TaskLimits):
        click.echo(output.plain(f"task {name!r} has {_task_text(found) or 'no limits'}"))
        if found.cap is None and found.rate_count is None:
            output.remark(
                "no worker has a cap or a rate in the code of this task; jobs enqueued without are not limited"
            )
    else:
        limited = "no limits" if found is None else f"limits: {_limit_text(found)}"
        click.echo(output.plain(f"queue {name!r} has {limited}"))


def _read_limits(name: str, is_task: bool, given: dict[str, Any]) -> dict[str, Any]:
    """Read the limits of a queue or of a task, and refuse those of the other kind."""
    of_queue = {
        "depth": _number("--depth", given["depth"], int),
        "ageing": given["ageing"],
        "retry_share": _number("--retry-share", given["retry_share"], float),
    }
    of_task = {"cap": _number("--cap", given["cap"], int), "rate": given["rate"], "reset": given["reset"] or None}
    mine, other = (of_task, of_queue) if is_task else (of_queue, of_task)
    if not name:
        raise click.UsageError("NAME is empty.")
    if any(value is not None for value in other.values()):
        raise click.UsageError("--cap, --rate and --reset go with --task; --depth, --ageing and --retry-share do not.")
    if all(value is None for value in mine.values()):
        raise click.UsageError(f"give a limit: {', '.join('--' + one.replace('_', '-') for one in mine)}.")
    return mine


def _task_text(limits: TaskLimits) -> str:
    """Write the limits of a task, and the user who set them at run time."""
    cap = limits.cap if limits.set_cap is None else limits.set_cap
    parts = [f"cap {cap}"] if cap else []
    count, per_ms = limits.rate_count, limits.rate_ms
    if limits.set_rate_count is not None:
        count, per_ms = limits.set_rate_count, limits.set_rate_ms
    if count and per_ms:
        parts.append(f"rate {Rate(count, per_ms)}")
    if limits.set_cap is not None or limits.set_rate_count is not None:
        why = f": {limits.set_why}" if limits.set_why else ""
        parts.append(f"set by {limits.set_by}{why}")
    return ", ".join(parts)


def _number(option: str, text: str | None, kind: type[N]) -> N | str | None:
    """Read a number, or `off`."""
    if text is None or text == "off":
        return text
    try:
        return kind(text.replace("_", "").replace(",", ""))
    except ValueError:
        raise ConfigError(f"{option} is {text!r}: give a number, or off") from None
