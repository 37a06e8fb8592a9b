"""`duly enqueue module:app TASK ARGS`: add a job from a shell, and wait for its end if you like."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from duly.app.job import Job
from duly.app.locate import find_app
from duly.app.task import Task
from duly.cli import output
from duly.cli.options import json_option
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
LATE_S = 60  # clocks differ and scripts take their time: what is past by less is meant to run now


@click.command()
@click.argument("target", metavar="MODULE:APP", type=click.Path())
@click.argument("task_name", metavar="TASK")
@click.argument("arguments", metavar="[ARGS]", required=False)
@click.option("--delay", metavar="DURATION", help="Not before this time has passed, such as 5m.")
@click.option("--at", metavar="WHEN", help="Not before then, such as 2030-01-31T12:00+01:00; UTC if it names no zone.")
@click.option("--key", help="Enqueue nothing if a job of this task with this key is there already.")
@click.option("--priority", type=int, help="Higher goes first. Default: that of the task.")
@click.option("--queue", help="Another queue than that of the task.")
@click.option("--subject", help="What the job is about, for the record.")
@click.option("--wait", is_flag=True, help="Wait for the end of the job, and print its result.")
@click.option("--timeout", metavar="DURATION", help="With --wait: how long. Default: as long as it takes.")
@click.option("--url", help="The database, instead of the one that the app names. [$DULY_URL, if the app names none]")
@json_option
def command(
    target: str,
    task_name: str,
    arguments: str | None,
    delay: str | None,
    at: str | None,
    key: str | None,
    priority: int | None,
    queue: str | None,
    subject: str | None,
    wait: bool,
    timeout: str | None,
    url: str | None,
    as_json: bool,
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
        raise ConfigError("--timeout says how long to wait: give --wait with it")
    patience_ms = None if timeout is None else to_ms(timeout, what="--timeout")
    app = find_app(target, Duly, url=url)
    try:
        task = find_task(app, target, task_name)
        if wait:
            _refuse_traceless(app, task)
        task = task.using(**_due(delay, at), key=key, priority=priority, queue=queue, subject=subject)
        job = _enqueue(app, task, read_arguments(arguments))
        if queue is not None:
            _warn_of_queue(app, queue)
        if wait:
            _wait(app, target, job, patience_ms, as_json)
        else:
            _tell_id(job, as_json)
    finally:
        app.close()


def find_task(app: Duly, target: str, name: str) -> Task[..., Any, Any]:
    """Find a task by its name or an alias, or say which one was meant."""
    if name in app.tasks:
        return app.tasks[name]
    if not app.tasks:
        raise ConfigError(f"{target} has no task {name!r}, nor any other: define some with @app.task")
    close = get_close_matches(name, app.tasks, 1)
    tasks = f"tasks are {', '.join(sorted(app.tasks))}"
    meant = f"did you mean {close[0]!r}? Its {tasks}" if close else f"its {tasks}"
    raise ConfigError(f"{target} has no task {name!r}: {meant}")


def _refuse_traceless(app: Duly, task: Task[..., Any, Any]) -> None:
    """Refuse to wait for what nobody will be able to see the end of."""
    kept_ms = app.settings.keep_ms if task.definition.keep_ms is None else task.definition.keep_ms
    if kept_ms == 0:
        raise ConfigError(f"{task.name} has keep=0, so success leaves nothing to wait for: leave --wait away")


def _due(delay: str | None, at: str | None) -> dict[str, Any]:
    """Read when the job is due."""
    if delay is not None and at is not None:
        raise ConfigError("give --delay or --at, not both")
    if delay is not None:
        return {"delay": timedelta(milliseconds=to_ms(delay, what="--delay"))}
    return {} if at is None else {"at": _moment(at)}


def _moment(text: str) -> datetime:
    """Read a moment; one that is past is a slip, and what it would start at once could not be called back."""
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
        raise ConfigError(f"--at is {text}, which is past since {ago}: leave it away to have the job run now")
    return at


def read_arguments(text: str | None) -> Any:
    """Read the arguments as JSON: an object, or an array."""
    if text is None:
        return {}
    where = "stdin" if text == "-" else "ARGS"
    try:
        if text == "-":
            text = sys.stdin.buffer.read().decode()
        given = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {_place(error)}. {_how_to_write(where)}") from None
    except (UnicodeDecodeError, RecursionError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else "it is nested too deeply"
        raise ConfigError(f"{where} is not JSON that can be used: {why}") from None
    if not isinstance(given, dict | list):
        raise ConfigError(f"{where} is {_shown(text)}, neither an object nor an array. {_how_to_write(where)}")
    return given


def _place(error: json.JSONDecodeError) -> str:
    line = f"line {error.lineno}, " if "\n" in error.doc else ""
    rest = error.doc[error.pos : error.pos + 20].partition("\n")[0]
    return f"{error.msg[:1].lower()}{error.msg[1:]} at {line}column {error.colno}, " + (
        f"before {rest!r}" if rest else "where it ends"
    )


def _how_to_write(where: str) -> str:
    return """Write it as '{"name": 1}' or '[1, 2]'""" + (", in single quotes" if where == "ARGS" else "")


def _refuse_constant(name: str) -> NoReturn:
    raise ConfigError(f"ARGS has {name} in it, which is not JSON: use null, or a text")


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 40 else f"{text[:40]}…"


def _enqueue(app: Duly, task: Task[..., Any, Any], given: Any) -> Job[Any]:
    """Check the arguments and add the job; a file that is made by it is told of."""
    path = app.settings.url.path
    is_new = path is not None and not os.path.exists(path)
    try:
        args, kwargs = _typed(task, given)
        job = task.enqueue(*args, **kwargs)
    except PayloadError as error:
        raise ConfigError(str(error)) from error
    if is_new:
        _say(f"made the database {Path(path or '').absolute()}")
    if job.deduplicated:
        _say(f"job {job.id} has this key already: nothing was added")
    return job


def _typed(task: Task[..., Any, Any], given: Any) -> tuple[list[Any], dict[str, Any]]:
    """Read the arguments as the task's own types, which is what a function that makes its key takes."""
    reader = task.definition.codec
    if isinstance(given, list):
        return reader.decode_call(reader.encode_call(given, {}))
    try:
        text = codec.encode(given)
    except PayloadError as error:
        raise BadArguments(f"{task.name}: {error}") from error
    return reader.decode_call(text)


def _warn_of_queue(app: Duly, queue: str) -> None:
    """Warn of a queue that no task has and nobody serves: it may be misspelt."""
    known = {task.definition.queue for task in app.tasks.values()}
    with suppress(StoreError):  # the job is enqueued: nothing may fail now
        if queue not in known:
            known |= {name for worker in app.driver.run(ops.workers()) if worker.alive for name in worker.queues}
    if queue not in known:
        _say(f"no task of this app has the queue {queue!r} and no living worker serves it{did_you_mean(queue, known)}")


def _tell_id(job: Job[Any], as_json: bool) -> None:
    if as_json:
        output.answer_json({"id": job.id, "deduplicated": job.deduplicated})
        return
    click.echo(job.id)
    if sys.stderr.isatty():
        _say(f"look at it with: duly jobs show {job.id}")


def _wait(app: Duly, target: str, job: Job[Any], patience_ms: int | None, as_json: bool) -> None:
    """Wait for the end of a job and tell its result; whatever happens here, the job goes on."""
    _say(f"waiting for job {job.id}")
    patience = Patience(job.id, patience_ms)
    try:
        _tell_obstacle(patience.ask(lambda: app.driver.run(ops.why(job.id))), target)
        _wait_for_end(app, job, patience)
        patience.ask(lambda: _tell_end(app, job, as_json))
    except KeyboardInterrupt:
        _say(f"stopped waiting; job {job.id} goes on. Look at it with: duly jobs show {job.id}")
        sys.exit(1)
    except OutOfTime:
        late = durations.describe(patience_ms or 0)
        _say(f"job {job.id} has not ended within {late}, and goes on. Look at it with: duly why {job.id}")
        sys.exit(1)


class OutOfTime(Exception):
    """The time of --timeout is over."""


class Patience:
    """Waits as long as --timeout allows, also for a database that is away."""

    def __init__(self, job_id: str, patience_ms: int | None) -> None:
        self._job_id = job_id
        self._give_up_at = None if patience_ms is None else time.monotonic() + patience_ms / 1000
        self._told = False

    def ask(self, question: Callable[[], T]) -> T:
        """Ask the database, again and again while it is away."""
        while True:
            try:
                return question()
            except StoreError as error:
                if not is_away(error):
                    raise
                self._tell(error)
                self.rest(AWAY_LOOK_S)

    def rest(self, seconds: float) -> None:
        """Sleep, but not beyond the time that there is."""
        left = seconds if self._give_up_at is None else self._give_up_at - time.monotonic()
        if left <= 0:
            raise OutOfTime
        time.sleep(min(seconds, left))

    def _tell(self, error: StoreError) -> None:
        if not self._told:
            click.echo("\r\x1b[K" if sys.stderr.isatty() else "", err=True, nl=False)  # how far it is stands there
            _say(f"the database is away, and waited for; job {self._job_id} goes on. {output.reason(error)}")
        self._told = True


def _tell_obstacle(why: Why | None, target: str) -> None:
    """Say at once what keeps the job from running, where something does."""
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
    """Wait until the job has ended, showing how far it is."""
    pause = FIRST_LOOK_S
    with Line() as line:
        while True:
            record = patience.ask(lambda: app.get(job.id))
            if record is None or record.state.ended:
                return
            line.show(_how_far(record))
            patience.rest(pause)
            pause = min(pause * 1.5, LAST_LOOK_S)


class Line:
    """One line on a terminal that is written over; nothing elsewhere."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty()
        self._shown = ""

    def show(self, text: str) -> None:
        """Write over what was shown before."""
        if self._on and text != self._shown:
            click.echo(f"\r\x1b[K{output.plain(text)}", err=True, nl=False)
            self._shown = text

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            click.echo("\r\x1b[K", err=True, nl=False)


def _how_far(record: JobRecord) -> str:
    done = "" if record.progress is None else f" {record.progress:.0f} %"
    message = f" {' '.join(record.progress_message.split())[:60]}" if record.progress_message else ""
    return f"{record.state.value}{done}{message}"


def _tell_end(app: Duly, job: Job[Any], as_json: bool) -> None:
    try:
        # Written and read as plain data, for a result may be of any type.
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
