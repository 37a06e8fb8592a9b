"""`duly enqueue module:app TASK ARGS`: adds a job from a shell, and optionally waits for its end."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import click

from duly.app.job import Job
from duly.app.locate import find_app
from duly.app.task import Task
from duly.cli import output
from duly.cli.json_text import read_json
from duly.cli.options import URL_OF_APP, json_option
from duly.cli.queues import did_you_mean
from duly.cli.wait_for_database import is_away
from duly.duly import Duly
from duly.errors import BadArguments, ConfigError, JobCancelled, JobDead, PayloadError, StoreError
from duly.model import JobRecord
from duly.rules import codec, durations
from duly.rules.durations import to_ms
from duly.rules.why import Gate, Why
from duly.store import ops

T = TypeVar("T")

FIRST_LOOK_S, LAST_LOOK_S, AWAY_LOOK_S = 0.005, 0.25, 1.0
LATE_S = 60  # clocks differ and scripts take time: a moment this little in the past means now


@click.command()
@click.argument("target", metavar="MODULE:APP", type=click.Path())
@click.argument("task_name", metavar="TASK")
@click.argument("arguments", metavar="[ARGS]", required=False)
@click.option("--delay", metavar="DURATION", help="Not before this time has passed, such as 5m.")
@click.option("--at", metavar="WHEN", help="Not before then, such as 2030-01-31T12:00+01:00; UTC if it names no zone.")
@click.option("--key", help="Enqueue nothing if a job of this task with this key is there already.")
@click.option("--priority", type=int, help="A higher priority runs first. Default: that of the task.")
@click.option("--queue", help="The queue, instead of that of the task.")
@click.option("--subject", help="A note for the record, such as an order number.")
@click.option("--wait", is_flag=True, help="Wait until the job has ended, and print its result.")
@click.option("--timeout", metavar="DURATION", help="With --wait: how long. Default: as long as it takes.")
@URL_OF_APP
@json_option
def command(
    target: str, task_name: str, arguments: str | None, timeout: str | None, wait: bool, as_json: bool, **given: Any
) -> None:
    """Enqueue a job.

    ARGS is a JSON object of named arguments, or an array of arguments in order; - reads it from stdin. It is checked
    against the task's signature before anything is written. Prints the id of the job, with --wait its result as JSON.

    Examples:
      duly enqueue tasks:app send_receipt '{"order_id": 42, "email": "a@b.c"}'
      duly enqueue tasks:app add '[1, 2]' --wait --timeout 60s
      duly enqueue tasks:app report --at 2030-01-31T09:00+01:00 --key report:january
      duly enqueue tasks:app import_rows - --delay 5m < rows.json

    Exit codes: 0 done, 1 failed (with --wait also: it is dead, cancelled, or not done in time), 2 wrong usage, and then
    nothing was written.
    """
    if timeout is not None and not wait:
        raise ConfigError("--timeout limits --wait: give --wait too")
    patience_ms = None if timeout is None else to_ms(timeout, what="--timeout")
    app = find_app(target, Duly, url=given.pop("url"))
    try:
        task = find_task(app, target, task_name)
        if wait:
            _refuse_traceless(app, task)
        task = task.using(**_due(given.pop("delay"), given.pop("at")), **given)
        job = _enqueue(app, task, read_arguments(arguments))
        _warn_of_queue(app, given["queue"])
        if wait:
            _wait(app, target, job, patience_ms, as_json)
        else:
            _print_id(job, as_json)
    finally:
        app.close()


def find_task(app: Duly, target: str, name: str) -> Task[..., Any, Any]:
    """Find a task by its name or an alias; the error suggests the most similar name."""
    if name in app.tasks:
        return app.tasks[name]
    if not app.tasks:
        raise ConfigError(f"{target} has no task {name!r}, nor any other: define some with @app.task")
    close = get_close_matches(name, app.tasks, 1)
    tasks = f"tasks are {', '.join(sorted(app.tasks))}"
    meant = f"did you mean {close[0]!r}? Its {tasks}" if close else f"its {tasks}"
    raise ConfigError(f"{target} has no task {name!r}: {meant}")


def _refuse_traceless(app: Duly, task: Task[..., Any, Any]) -> None:
    """Refuse to wait for a job whose success leaves no row."""
    kept_ms = app.settings.keep_ms if task.definition.keep_ms is None else task.definition.keep_ms
    if kept_ms == 0:
        raise ConfigError(f"{task.name} has keep=0, so success leaves nothing to wait for: omit --wait")


def _due(delay: str | None, at: str | None) -> dict[str, Any]:
    """Read when the job is due."""
    if delay is not None and at is not None:
        raise ConfigError("give --delay or --at, not both")
    if delay is not None:
        return {"delay": timedelta(milliseconds=to_ms(delay, what="--delay"))}
    return {} if at is None else {"at": _moment(at)}


def _moment(text: str) -> datetime:
    """Read a moment. One in the past is a mistake: the job would start at once."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"--at is {text!r}, which is no date: write 2030-01-31, 2030-01-31T12:00 (UTC) or 2030-01-31T12:00+01:00"
        ) from None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    late_s = time.time() - at.timestamp()
    if late_s > LATE_S:
        ago = output.age(int(late_s * 1000))
        raise ConfigError(f"--at is {text}, which is {ago} in the past: omit it to run the job now")
    return at


def read_arguments(text: str | None) -> Any:
    """Read the arguments as JSON: an object, or an array."""
    if text is None:
        return {}
    where = "stdin" if text == "-" else "ARGS"
    how = """Write it as '{"name": 1}' or '[1, 2]'""" + (", in single quotes" if where == "ARGS" else "")
    if text == "-":
        try:
            text = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError:
            raise ConfigError("stdin is not JSON that can be used: it is not UTF-8") from None
    given = read_json(text, where, how)
    if not isinstance(given, dict | list):
        raise ConfigError(f"{where} is {_shown(text)}, neither an object nor an array. {how}")
    return given


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 40 else f"{text[:40]}…"


def _enqueue(app: Duly, task: Task[..., Any, Any], given: Any) -> Job[Any]:
    """Check the arguments and add the job; print the path of a database file that this creates."""
    path = app.settings.url.path
    is_new = path is not None and not os.path.exists(path)
    try:
        args, kwargs = _typed(task, given)
        job = task.enqueue(*args, **kwargs)
    except PayloadError as error:
        raise ConfigError(str(error)) from error
    if is_new:
        _say(f"created the database {Path(path or '').absolute()}")
    if job.deduplicated:
        _say(f"job {job.id} has this key already: nothing was added")
    return job


def _typed(task: Task[..., Any, Any], given: Any) -> tuple[list[Any], dict[str, Any]]:
    """Convert the arguments to the types of the task: its function for the key takes these."""
    reader = task.definition.codec
    if isinstance(given, list):
        return reader.decode_call(reader.encode_call(given, {}))
    try:
        text = codec.encode(given)
    except PayloadError as error:
        raise BadArguments(f"{task.name}: {error}") from error
    return reader.decode_call(text)


def _warn_of_queue(app: Duly, queue: str | None) -> None:
    """Warn of a queue that no task has and no worker serves: it may be misspelt."""
    if queue is None:
        return
    known = {task.definition.queue for task in app.tasks.values()}
    with suppress(StoreError):  # the job is enqueued: the command must not fail now
        if queue not in known:
            known |= {name for worker in app.driver.run(ops.workers()) if worker.alive for name in worker.queues}
    if queue not in known:
        _say(f"no task of this app has the queue {queue!r} and no living worker serves it{did_you_mean(queue, known)}")


def _print_id(job: Job[Any], as_json: bool) -> None:
    if as_json:
        output.answer_json({"id": job.id, "deduplicated": job.deduplicated})
        return
    click.echo(job.id)
    if sys.stderr.isatty():
        _say(f"show it with: duly jobs show {job.id}")


def _wait(app: Duly, target: str, job: Job[Any], patience_ms: int | None, as_json: bool) -> None:
    """Wait until a job has ended and print its result. The job continues if the wait is interrupted."""
    _say(f"waiting for job {job.id}")
    patience = Patience(job.id, patience_ms)
    try:
        _print_obstacle(patience.ask(lambda: app.driver.run(ops.why(job.id))), target)
        _wait_for_end(app, job, patience)
        patience.ask(lambda: _print_end(app, job, as_json))
    except KeyboardInterrupt:
        _say(f"stopped waiting; job {job.id} continues. Show it with: duly jobs show {job.id}")
        sys.exit(1)
    except OutOfTime:
        late = durations.describe(patience_ms or 0)
        _say(f"job {job.id} has not ended within {late}, and continues. Find the reason with: duly why {job.id}")
        sys.exit(1)


class OutOfTime(Exception):
    """--timeout is over."""


class Patience:
    """Waits up to --timeout, also for a database that is down."""

    def __init__(self, job_id: str, patience_ms: int | None) -> None:
        self._job_id = job_id
        self._give_up_at = None if patience_ms is None else time.monotonic() + patience_ms / 1000
        self._printed = False

    def ask(self, question: Callable[[], T]) -> T:
        """Query the database, and retry while it is down."""
        while True:
            try:
                return question()
            except StoreError as error:
                if not is_away(error):
                    raise
                self._print_outage(error)
                self.rest(AWAY_LOOK_S)

    def rest(self, seconds: float) -> None:
        """Sleep, at most until --timeout is over."""
        left = seconds if self._give_up_at is None else self._give_up_at - time.monotonic()
        if left <= 0:
            raise OutOfTime
        time.sleep(min(seconds, left))

    def _print_outage(self, error: StoreError) -> None:
        if not self._printed:
            click.echo("\r\x1b[K" if sys.stderr.isatty() else "", err=True, nl=False)  # over the line with the progress
            _say(f"the database is down, waiting for it; job {self._job_id} continues. {output.reason(error)}")
        self._printed = True


def _print_obstacle(why: Why | None, target: str) -> None:
    """Print what keeps the job from running."""
    if why is None or why.gate in ("ended", "lease"):
        return
    for gate in (Gate(why.gate, why.sentence), *why.others):
        if gate.gate not in ("turn", "no_worker", "unknown_task"):
            _say(gate.sentence)
    if why.facts.knowing_workers == 0:
        _say(
            f"no living worker knows task {why.facts.task!r} and serves queue {why.facts.queue!r}: "
            f"start one with duly worker {shlex.quote(target)}"
        )


def _wait_for_end(app: Duly, job: Job[Any], patience: Patience) -> None:
    """Wait until the job has ended, and show its progress."""
    pause = FIRST_LOOK_S
    with Line() as line:
        while True:
            record = patience.ask(lambda: app.get(job.id))
            if record is None or record.state.ended:
                return
            line.show(_progress(record))
            patience.rest(pause)
            pause = min(pause * 1.5, LAST_LOOK_S)


class Line:
    """A line on a terminal that is overwritten; nothing elsewhere."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty()
        self._shown = ""

    def show(self, text: str) -> None:
        """Overwrite the line."""
        if self._on and text != self._shown:
            click.echo(f"\r\x1b[K{output.plain(text)}", err=True, nl=False)
            self._shown = text

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            click.echo("\r\x1b[K", err=True, nl=False)


def _progress(record: JobRecord) -> str:
    done = "" if record.progress is None else f" {record.progress:.0f} %"
    message = f" {' '.join(record.progress_message.split())[:60]}" if record.progress_message else ""
    return f"{record.state.value}{done}{message}"


def _print_end(app: Duly, job: Job[Any], as_json: bool) -> None:
    try:
        # As plain data: a result may have any type.
        result = codec.decode(codec.encode(job.result(timeout=0)), Any)
    except (JobDead, JobCancelled):
        if as_json:
            _answer_end(app, job, None)
        raise
    if as_json:
        _answer_end(app, job, result)
    else:
        output.answer_json(result)


def _answer_end(app: Duly, job: Job[Any], result: Any) -> None:
    record = app.get(job.id)
    output.answer_json(
        {
            "id": job.id,
            "deduplicated": job.deduplicated,
            "state": "succeeded" if record is None else record.state,
            "result": result,
            "reason": record and record.reason,
            "error": record and record.error,
        }
    )


def _say(text: str) -> None:
    click.echo(f"duly: {output.plain(text)}", err=True)
