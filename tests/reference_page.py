"""Writes docs/reference from the code: `python -m tests.reference_page`.

A test compares the pages with what this would write. What the code does not say in words, such as the meaning of a
setting, stands here; a setting, event or table without its words is an error.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pkgutil import iter_modules
from types import GenericAlias, ModuleType
from typing import Any, get_overloads

import click

import duly
from duly import duly as duly_class
from duly import errors
from duly.app import app, batches, context, dead, events, schedule_options, schedules
from duly.app.decorator import TaskDecorator
from duly.cli import COMMANDS, main
from duly.rules import backoff, control, durations
from duly.rules.settings import Settings
from duly.store import migrate

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "reference"
SOURCE = ROOT / "src" / "duly"
NOTE = "<!-- Written by `python -m tests.reference_page`. Change the code, not this page. -->"

SETTINGS = {
    "url": "the database: a path, `sqlite:///path`, `postgresql://user@host/db`",
    "listen_url": "PostgreSQL: a direct connection for wake-ups, where `url` goes through PgBouncer",
    "schema": "PostgreSQL: the schema of the tables",
    "prepared": "PostgreSQL: prepare statements; false behind PgBouncer in transaction mode",
    "durability": "SQLite's `synchronous`: `full`, or `normal`, which may lose the last commits in a power cut",
    "max_attempts": "how often a job runs at most, unless its task has its own limit",
    "max_payload": "the maximum size of a job's arguments, in bytes of JSON",
    "lease": "how long a job stays with a dead worker, unless its task has its own lease; a heartbeat is a third of it",
    "keep": "how long an ended job is kept, unless its task has its own time; dead jobs are kept forever",
    "result_ttl": "how long a result is kept, unless its task has its own time",
    "key_ttl": "how long the key of a job that succeeded is kept, with its result",
    "poll": "how often an idle worker polls, whether or not it was woken up",
    "busy_timeout": "SQLite: how long to wait for a locked file",
    "connect_timeout": "PostgreSQL: how long to wait for each host of the URL",
    "d1_timeout": "D1: how long to wait for an answer; a request that is executed later than that changes nothing",
    "d1_statements": "D1: the maximum number of statements in one request; the free plan allows 50, the paid one 1,000",
    "grace": "how long running handlers may continue when their worker stops",
}

LOGGED = {
    "dev.sync_call": "`duly dev`: a sync call inside a running event loop, which blocks the loop",
    "job.cancelled": "the job ended as cancelled",
    "job.crashed": "the child process in which the job ran died",
    "job.dead": "the job has no attempts left, or must not be retried",
    "job.ended_late": "a handler ended after it was abandoned; its result does not count",
    "job.failed": "the attempt failed, and will be retried (`retry_in_ms`)",
    "job.lease_lost": "another worker owns the job; the handler is asked to stop",
    "job.lost": "the attempt ended, but another worker owns the job; nothing was written",
    "job.not_judged": "the outcome could not be decided, for example because your own backoff raised",
    "job.not_recorded": "the database refuses to record the outcome; the job is rescued when its lease expires",
    "job.partial": "some channels were delivered, and none is left to try",
    "job.raised_after_commit": "the handler raised after `ctx.commit`; the job has succeeded anyway",
    "job.released": "the worker returned the job; the attempt does not count",
    "job.rescued": "the lease of a dead worker expired; the job runs again",
    "job.snoozed": "the handler asked to run again later",
    "job.stalled": "the handler has not called `ctx.heartbeat()` for longer than `stall_after`",
    "job.stuck": "a thread does not end after its timeout; its slot stays in use",
    "job.succeeded": "the attempt succeeded",
    "job.waiting": "the job waits for something other than a time",
    "handler.left_pending": "a handler ended, and tasks that it started still run (`pending` names them)",
    "handler.unforeseen": "the code around a handler failed unexpectedly; the attempt counts as failed",
    "listener.failed": "a listener of `app.events` raised",
    "postgres.listen_lost": "the connection for wake-ups closed; workers poll every second until it is back",
    "schedule.fired": "a due time of a schedule became a job",
    "schedule.skipped": "due times of a schedule were not fired (`count`, `reason`)",
    "schedule.unreadable": "a schedule cannot be fired here, for example without its time zone; others may",
    "schedules.abandoned": "no living worker has these schedules in its code; they are paused",
    "schedules.changed": "the worker found changed schedules in its code",
    "schedules.created": "the worker found new schedules in its code",
    "schedules.restored": "schedules are defined in code again and continue",
    "sqlite.checkpoint_busy": "a reader blocked a checkpoint; the write-ahead log grows until the next one",
    "sqlite.checkpoint_failed": "a checkpoint failed, and is retried",
    "supervisor.cannot_start": "no process can be started at the moment; this is retried",
    "supervisor.started_worker": "a worker process was started",
    "supervisor.stopped": "all worker processes have ended",
    "supervisor.stopping": "the supervisor stops its workers",
    "supervisor.worker_died": "a worker process ended unexpectedly, and is started again",
    "suspects.failed": "the search for suspects failed, and is retried",
    "suspects.no_process": "no process can be started for a suspect; it waits",
    "upkeep.failed": "rescuing, promoting or pruning failed, and is retried",
    "watch.callback_failed": "a wake-up arrived after its worker had stopped",
    "worker.about": "what runs here and on which database (`--log-json`)",
    "worker.beat_failed": "leases could not be extended; this is retried at once",
    "worker.connecting": "the first connection takes longer than a second",
    "worker.disconnected": "the database is unavailable",
    "worker.found_database": "the database, unavailable at the start, is available",
    "worker.loop_blocked": "a handler has blocked the event loop for long",
    "worker.other_sqlite": "the app has imported another SQLite library; two on one file release each other's locks",
    "worker.no_tasks": "the app has no tasks, so there is nothing to run",
    "worker.liveness_failed": "cannot write the liveness file that `duly check --worker` reads",
    "worker.reconnected": "the database is available again",
    "worker.restarting": "half of the threads are stuck; the process restarts",
    "worker.started": "the worker has started",
    "worker.stopped": "the worker has ended",
    "worker.stopping": "the worker claims no more jobs, and lets handlers end",
    "worker.summary": "how many jobs ended in the last minute, by outcome",
    "worker.unknown_queue": "no task of the app has this queue of `--queues`",
    "worker.waiting_for_database": "the database is unavailable at the start, or has not answered a write for 5 s",
}

RECORDED = {
    "database.held": "a database restored from a backup was held: nothing runs until it is resumed",
    "job.cancel_requested": "a user asked a running job to stop",
    "job.cancelled": "a user cancelled a job, or it expired",
    "job.dead": "a job died",
    "job.partial": "a job ended partial",
    "job.purged": "a user deleted a dead job",
    "job.replayed": "a user replayed a dead job",
    "job.resolved": "a user resolved a dead job",
    "job.retried": "a user made a job due now",
    "queue.limited": "a user changed the limits of a queue; `data` has them before and after",
    "queue.paused": "a user paused a queue",
    "queue.resumed": "a user resumed a queue",
    "schedule.backfilled": "a user fired due times of the past (`count`)",
    "schedule.deleted": "a user deleted a schedule",
    "schedule.missed": "due times of a schedule were not fired in time (`count`, `since`, `until`)",
    "schedule.paused": "a user paused a schedule, or duly did: too many dead runs, or no code has it any more",
    "schedule.resumed": "a user resumed a schedule",
    "schedule.triggered": "a user ran a schedule at once",
    "task.paused": "a user paused a task",
    "task.resumed": "a user resumed a task",
}

TABLES = {
    "duly_meta": "the version of the schema, and the oldest code that can use it",
    "duly_job": "live jobs: scheduled, ready, running, waiting",
    "duly_done": "ended jobs: succeeded, partial, dead, cancelled",
    "duly_key": "idempotency by (task, key)",
    "duly_attempt": "attempts that did not succeed",
    "duly_step": "the steps of jobs",
    "duly_batch": "counters and callbacks of batches",
    "duly_lane": "the lanes used recently: the starts that count against a rate, and the last position",
    "duly_schedule": "schedules",
    "duly_fire": "the due times that schedules fired or skipped",
    "duly_queue": "pauses and limits, one row for each queue or task",
    "duly_worker": "workers, with their tasks and whether they are alive",
    "duly_event": "the audit log: who did what and why",
    "duly_jobs": "live and finished jobs together",
    "duly_dead": "dead jobs that were neither replayed nor resolved",
    "duly_attempts": "attempts that did not succeed",
    "duly_batches": "batches and their progress",
    "duly_events": "the audit log: who did what and why",
    "duly_fires": "the due times that schedules fired or skipped",
    "duly_schedules": "schedules, and when each is due next",
    "duly_why": "why each live job is not running, as `duly why` reports it",
}


HOW_COMMANDS = """\
`duly COMMAND --help` prints the same. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no such job, schedule or batch.

- Every option can be set by an environment variable: `DULY_`, the command, the option, as in `DULY_PRUNE_KEEP`.
- Answers go to stdout, everything else to stderr. `--json` is for programs.
- Commands that change many jobs ask first. `--dry-run` shows the changes, `--yes` makes them without a question.
- An id may be shortened to its first digits if they are unique.
- Completion in bash: `eval "$(_DULY_COMPLETE=bash_source duly)"`; `zsh_source` and `fish_source` for others."""
HOW_SETTINGS = """\
An argument of `Duly(…)` or an option wins over the environment variable, which wins over `duly.toml` in this folder,
which wins over the default. Durations are `"250ms"`, `"30s"`, `"5m"`, `"1h30m"`, seconds or a `timedelta`. An unknown
setting is an error that suggests the closest name."""
MORE_SETTINGS = """\
Options of a task (`@app.task(lease="2m")`) win over `max_attempts`, `lease`, `keep` and `result_ttl`.

`$DULY_RUN_DIR` is the folder of the files that `duly check --worker` reads. Its default is a folder of this user in
the folder for temporary files."""
HOW_ERRORS = """\
Every error that duly raises on purpose is a `duly.errors.DulyError`. Its message gives the problem, its place, and
what to do next. The codes are stable. On the command line a `ConfigError` ends with exit code 2, a `JobNotFound`,
`ScheduleNotFound` or `BatchNotFound` with 3, every other with 1."""
HOW_LOGGED = """\
The message of a log line is the name of the event, its fields are in `extra`. Events of a job have `job_id task queue
attempt max_attempts correlation_id causation_id idempotency_key subject`; the end of an attempt adds `outcome
error_class error reason retry_in_ms ran_ms`. Payloads are not logged. The loggers are `duly.worker`,
`duly.supervisor` and `duly.store`.

Listeners of `@app.events.listen` get every `job.…` event, and the start and stop of the worker."""
HOW_TABLES = """\
On PostgreSQL they are in the schema `duly`, or in your own. Payloads, results and envelopes are JSON text. Moments
end in `_at` or `_until`, or have the name `at`, and are whole milliseconds UTC."""


def pages() -> dict[str, str]:
    """Give every page of the reference by its name."""
    written = {
        "commands": commands_page(),
        "settings": settings_page(),
        "errors": errors_page(),
        "api": api_page(),
        "events": events_page(),
        "tables": tables_page(),
    }
    return {f"{name}.md": f"{text.strip()}\n" for name, text in written.items()}


# Commands


def commands_page() -> str:
    """Write every command with its options and examples."""
    lines = [
        "# Commands",
        NOTE,
        HOW_COMMANDS,
        table(
            ["command", "does"],
            [(f"[`duly {name}`](#duly-{name})", text) for name, text in sorted(COMMANDS.items())],
        ),
    ]
    ctx = click.Context(main, info_name="duly")
    for name in sorted(COMMANDS):
        found = main.get_command(ctx, name)
        assert found is not None
        lines += list(one_command(found, f"duly {name}", 2))
    return "\n\n".join(lines)


def one_command(command: click.Command, path: str, level: int) -> Iterator[str]:
    """Write a command, and those below it."""
    yield f"{'#' * level} {path}"
    yield prose(command.help)
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    options = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
    if isinstance(command, click.Group):
        for name, below in sorted(command.commands.items()):
            yield from one_command(below, f"{path} {name}", level + 1)
        return
    words = [
        path,
        *map(argument_word, arguments),
        *(["[OPTIONS]"] if options else []),
    ]
    yield f"```text\n{' '.join(words)}\n```"
    if options:
        yield table(["option", "means"], [(option_names(one), option_means(one)) for one in options])
    if command.epilog:
        yield examples(command.epilog)


def argument_word(argument: click.Argument) -> str:
    """Write an argument as the usage line shows it."""
    word = argument.metavar or str(argument.name).upper()
    return word if argument.required or word.startswith("[") else f"[{word}]"


def option_names(option: click.Option) -> str:
    """Write how an option is given."""
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if option.is_flag or option.count:
        return names
    return f"{names} {code(metavar(option))}"


def metavar(option: click.Option) -> str:
    """Say what an option takes, whatever version of click asks."""
    if option.metavar:
        return option.metavar
    if isinstance(option.type, click.Choice):
        return "|".join(str(choice) for choice in option.type.choices)
    return {"integer range": "INTEGER", "float range": "FLOAT"}.get(option.type.name, option.type.name.upper())


def option_means(option: click.Option) -> str:
    """Write what an option means, with its default where it shows one."""
    text = cell(option.help or "")
    if isinstance(option.show_default, str):
        return f"{text} Default: {option.show_default}."
    if option.show_default and not callable(option.default):
        return f"{text} Default: {option.default}."
    return text


def examples(epilog: str) -> str:
    """Write the examples of a command."""
    parts = re.split(r"^\s*\\b\n|\x08\n?", inspect.cleandoc(epilog.replace("\b", "\x08")), flags=re.MULTILINE)
    return "\n\n".join(f"```text\n{part.strip()}\n```" for part in parts if part.strip())


def prose(text: str | None) -> str:
    """Write a docstring as paragraphs; what click is told not to wrap stays as it is."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    written = [
        f"```text\n{inspect.cleandoc(one.partition(chr(8))[2])}\n```" if chr(8) in one else " ".join(one.split())
        for one in paragraphs
    ]
    return "\n\n".join(written)


# Settings


def settings_page() -> str:
    """Write every setting with its variable, default and meaning."""
    fields = {name: field for name, field in Settings.__dataclass_fields__.items() if name != "origins"}
    names = {field: field.removesuffix("_ms") for field in fields}
    known(SETTINGS, names.values(), "setting")
    rows = [
        (f"`{names[field]}`", f"`$DULY_{names[field].upper()}`", default(field), cell(SETTINGS[names[field]]))
        for field in fields
    ]
    return "\n\n".join(
        [
            "# Settings",
            NOTE,
            HOW_SETTINGS,
            table(["setting", "variable", "default", "means"], rows),
            MORE_SETTINGS,
        ]
    )


def default(field: str) -> str:
    """Write the default of a setting."""
    value = getattr(Settings(), field)
    if value is None:
        return "none"
    if field.endswith("_ms"):
        return durations.describe(value)
    return str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else f"`{value}`"


# Errors


def errors_page() -> str:
    """Write the tree of errors and their codes."""
    tree = inspect.cleandoc(errors.__doc__ or "").partition("\n\n")[2].partition("\n\nEach class")[0]
    rows = [
        (f"`{one.__name__}`", f"`{one.code}`", cell(first_paragraph(one)))
        for one in vars(errors).values()
        if inspect.isclass(one) and issubclass(one, errors.DulyError)
    ]
    return "\n\n".join(
        [
            "# Errors",
            NOTE,
            HOW_ERRORS,
            f"```text\n{tree}\n```",
            table(["error", "code", "means"], rows),
        ]
    )


# The public API


def api_page() -> str:
    """Write every public name with its signature and its sentence."""
    lines = [
        "# Python",
        NOTE,
        "Sync calls are plain; each has an async twin with an `a` in front, which is left out here.",
    ]
    skipped = {"spec", "elsewhere", "settings", "driver", "database", "dead", "schedules", "batches", "tasks"}
    lines += section("duly.Duly", duly.Duly, also=app.App, skip=skipped)
    lines += [
        "### Options of `@app.task`",
        code_block(signature("task", get_overloads(TaskDecorator.__call__)[-1], drop=1)),
    ]
    lines += ["### Filters of `list`", names_of(app.JobFilters)]
    lines += ["### Options of `worker`, `run` and `arun`", names_of(duly_class.WorkerOptions)]
    read = inspect.signature(schedule_options._terms).parameters.values()
    shown = ", ".join(f"`{one.name}={one.default!r}`" for one in read if one.name not in ("when", "name"))
    lines += ["### Options of `every` and `schedules.create`", shown]
    lines += section("duly.Task", duly.Task)
    lines += section("duly.Call", duly.Call)
    lines += section("duly.Job", duly.Job)
    lines += section("app.dead", dead.Dead)
    lines += ["### Filters of `dead.list` and `dead.replay_all`", names_of(dead.DeadFilters)]
    lines += section("app.schedules", schedules.Schedules)
    lines += section("duly.Batch", duly.Batch, skip={"new", "known"})
    lines += section("app.batches", batches.Batches)
    lines += ["### Filters of `batches.list`", names_of(batches.BatchFilters)]
    lines += section("duly.Ctx", context.Ctx, also=context._Context, keep_async=True)
    lines += section("duly.SyncCtx", context.SyncCtx, only={"progress", "heartbeat", "commit"})
    lines += ["Its properties are those of `Ctx`."]
    lines += ["## Signals", "Raised by a handler to say how its attempt ends."]
    for signal in (control.Snooze, control.Cancel, control.Retry):
        lines += [
            f"### duly.{signal.__name__}",
            code_block(signature(signal.__name__, signal)),
            first_paragraph(signal),
        ]
    lines += ["## duly.backoff", first_paragraph(backoff)]
    for function in (backoff.exponential, backoff.fixed, backoff.linear, backoff.delays):
        lines += [f"### backoff.{function.__name__}", code_block(signature(function.__name__, function)), doc(function)]
    lines += section("app.events", events.Events, only={"listen"})
    return "\n\n".join([*lines, *testing_section()])


def testing_section() -> Iterator[str]:
    """Write what `duly.testing` offers, where it is there."""
    try:
        testing = importlib.import_module("duly.testing")
    except ModuleNotFoundError:
        return
    yield "## duly.testing"
    yield doc(testing)
    for name in sorted(testing.__all__):
        found = getattr(testing, name)
        if isinstance(found, ModuleType):
            continue
        yield f"### testing.{name}"
        if inspect.isfunction(found):
            yield code_block(signature(name, found))
        yield doc(found)
        if inspect.isclass(found) and not issubclass(found, BaseException):
            fields = [one for one in inspect.get_annotations(found) if not one.startswith("_")]
            if fields:
                yield f"Fields: {', '.join(f'`{one}`' for one in fields)}."
            for member, value in vars(found).items():
                if not member.startswith("_") and member not in fields:
                    yield from one_member(name, member, value)


def section(
    title: str,
    owner: type,
    *,
    also: type | None = None,
    skip: Iterable[str] = (),
    only: Iterable[str] | None = None,
    keep_async: bool = False,
) -> Iterator[str]:
    """Write a class with its public methods and properties, in the order of its code."""
    yield f"## {title}"
    yield doc(owner)
    if owner is duly.Duly:
        yield code_block(signature("Duly", owner.__init__, drop=1))
    members = {**(vars(also) if also else {}), **vars(owner)}
    for name, member in members.items():
        if name.startswith("_") or name in skip or (only is not None and name not in only):
            continue
        if not keep_async and inspect.iscoroutinefunction(member) and name.startswith("a") and name[1:] in members:
            continue
        yield from one_member(title, name, member)


def one_member(title: str, name: str, member: Any) -> Iterator[str]:
    """Write one method or property."""
    owner = title.rpartition(".")[2] if title.startswith("duly.") else title
    if isinstance(member, property):
        yield f"### {owner}.{name}"
        yield doc(member)
    elif inspect.isfunction(member):
        yield f"### {owner}.{name}"
        yield code_block(signature(name, member, drop=1))
        yield doc(member)


def signature(name: str, function: Callable[..., Any], drop: int = 0) -> str:
    """Write a signature as its source says it, one parameter a line where it is long."""
    found = inspect.signature(function)
    parameters = list(found.parameters.values())[drop:]
    words, star = [], False
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not star:
            words.append("*")
            star = True
        star = star or one.kind is one.VAR_POSITIONAL
        words.append(parameter(one, function.__module__))
    module = function.__module__
    answer = "" if found.return_annotation is found.empty else annotation(found.return_annotation, module)
    makes = inspect.isclass(function) or name in ("Duly", "task")
    if hasattr(function, "__wrapped__") and answer.startswith("Iterator["):  # made by @contextmanager
        answer = f"ContextManager[{answer.removeprefix('Iterator[')}"
    arrow = f" -> {answer}" if answer and not makes else ""
    name = f"async {name}" if inspect.iscoroutinefunction(function) else name
    line = f"{name}({', '.join(words)}){arrow}"
    if len(line) <= 110:
        return line
    return f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){arrow}"


def parameter(one: inspect.Parameter, module: str) -> str:
    """Write one parameter of a function of a module."""
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    said = "" if one.annotation is one.empty else f": {annotation(one.annotation, module)}"
    if one.default is one.empty:
        return f"{stars}{one.name}{said}"
    return f"{one.name}{said} = {one.default!r}" if said else f"{one.name}={one.default!r}"


def annotation(said: Any, module: str) -> str:
    """Write an annotation; ours are texts, so that no version of Python writes them in its own way."""
    text = said if isinstance(said, str) else getattr(said, "__name__", str(said))
    for alias, meaning in {**LISTS.get(module, {}), **ALIASES}.items():
        text = re.sub(rf"\b{alias}\b", meaning, text)
    return text


# Names that only the code needs: in classes with a method `list`, lists have other names.
LISTS = {
    module.__name__: {
        name: f"list[{value.__args__[0].__name__}]"
        for name, value in vars(module).items()
        if isinstance(value, GenericAlias) and value.__origin__ is list
    }
    for module in map(importlib.import_module, (f"duly.app.{one.name}" for one in iter_modules(duly.app.__path__)))
}
ALIASES = {
    "App": "Duly",
    "R_co": "R",
    r"backoffs\.Backoff": "Backoff",
    r"(?:keys\.)?Key": "str | Callable[..., str]",
    "Adds": "Batch",
    "HasTasks": "Duly",
    "When": "str | float | timedelta",
}


def names_of(options: Any) -> str:
    """List the keys of a typed dict."""
    return ", ".join(f"`{name}`" for name in options.__annotations__)


# Events


def events_page() -> str:
    """Write the names that appear in the log and in duly_event."""
    logged, recorded = logged_names(), recorded_names()
    known(LOGGED, logged, "logged event", exactly=False)
    known(RECORDED, recorded, "recorded event", exactly=False)
    return "\n\n".join(
        [
            "# Events",
            NOTE,
            "## In the log",
            HOW_LOGGED,
            table(["event", "means"], [(f"`{name}`", cell(LOGGED[name])) for name in sorted(logged)]),
            "## In the table `duly_event`",
            "Rare, meaningful things, with who, when and why: never a row for each job.",
            table(["event", "means"], [(f"`{name}`", cell(RECORDED[name])) for name in sorted(recorded)]),
        ]
    )


LOG_CALL = re.compile(r"(?:log|self\._log)\.(?:debug|info|warning|error|exception)\(\s*\"([a-z]+\.[a-z_]+)\"")
TOLD = re.compile(r"\"((?:job|worker)\.[a-z_]+)\", logging\.[A-Z]+|\btell\(\s*\"([a-z]+\.[a-z_]+)\"")


# What may come of a schedule in code when a worker starts.
RECONCILED = re.findall(r"\"(\w+)\": \[\]", inspect.getsource(schedules._reconcile))


def logged_names() -> set[str]:
    """Find the names of events in the code."""
    found: set[str] = set()
    for file in SOURCE.rglob("*.py"):
        text = file.read_text("utf-8")
        found |= set(LOG_CALL.findall(text))
        found |= {one or other for one, other in TOLD.findall(text)}
        if 'f"schedules.{what}"' in text:
            found |= {f"schedules.{what}" for what in RECONCILED}
    return found


def recorded_names() -> set[str]:
    """Find the names of events in the SQL, and in the operations that hand them to it."""
    found: set[str] = set()
    for file in [*(SOURCE / "store").rglob("*.sql"), *(SOURCE / "store").rglob("*.py")]:
        for name in re.findall(r"['\"]((?:job|database|schedule|queue)\.[a-z_]+)['\"]", file.read_text("utf-8")):
            found.add(name)
    for file in SOURCE.rglob("*.py"):
        found |= set(re.findall(r"\bTold\(\s*\"(schedule\.[a-z_]+)\"", file.read_text("utf-8")))
    for file in (SOURCE / "store" / "sql" / "sqlite").glob("*.sql"):
        text = file.read_text("utf-8")
        found |= {f"job.{state}" for state in ("dead", "partial", "cancelled") if "'job.' || state" in text}
        for verb in re.findall(r"\|\| '\.(paused|resumed)'", text):
            found |= {f"queue.{verb}", f"task.{verb}"}
    return found


# Tables


def tables_page() -> str:
    """Write the tables and views with their columns."""
    conn = sqlite3.connect(":memory:")
    for step in migrate.migrations("sqlite"):
        conn.executescript(step.text)
    found = conn.execute("select type, name from sqlite_master where type in ('table', 'view') and name like 'duly%'")
    kinds = {name: kind for kind, name in found}
    known(TABLES, kinds, "table or view")
    views = [name for name in TABLES if kinds[name] == "view"]
    rows = [
        (f"`{name}`", cell(TABLES[name]), " ".join(f"`{one}`" for one in view_columns(conn, name))) for name in views
    ]
    lines = [
        "# Tables and views",
        NOTE,
        HOW_TABLES,
        "## Views, for people",
        "They show times twice, in milliseconds and readable. Their columns stay; nothing of duly reads them.",
        table(["view", "shows", "columns"], rows),
        "## Tables",
        "These may change with each schema: read them, and change them through duly.",
    ]
    for name in TABLES:
        if kinds[name] == "table":
            columns = conn.execute(f"select name, type, \"notnull\", pk from pragma_table_info('{name}')").fetchall()
            lines += [
                f"### {name}",
                TABLES[name].capitalize() + ".",
                table(["column", "type", ""], map(column, columns)),
            ]
    conn.close()
    return "\n\n".join(lines)


def view_columns(conn: sqlite3.Connection, name: str) -> list[str]:
    """List the columns of a view."""
    return [row[0] for row in conn.execute(f"select name from pragma_table_info('{name}')")]


def column(row: tuple[str, str, int, int]) -> tuple[str, str, str]:
    """Write one column."""
    name, kind, required, key = row
    return f"`{name}`", kind.lower(), "key" if key else "" if required else "may be null"


# Writing


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Write a table."""
    lines = [list(headings), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(text: str) -> str:
    """Write a text so that it stays inside its cell."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Write code inside a cell."""
    return f"`{cell(text)}`"


def code_block(text: str) -> str:
    """Write code that is to be read, not run."""
    return f"```text\n{text}\n```"


def doc(found: Any) -> str:
    """Give a docstring."""
    return prose(found.__doc__)


def first_paragraph(found: Any) -> str:
    """Give the first paragraph of a docstring."""
    return prose(found.__doc__).partition("\n\n")[0]


def known(words: dict[str, str], found: Iterable[str], what: str, *, exactly: bool = True) -> None:
    """Refuse what has no words here, and words for what is not there any more."""
    missing = sorted(set(found) - set(words))
    if missing:
        raise LookupError(f"say in tests/reference_page.py what each {what} means: {', '.join(missing)}")
    if exactly and (gone := sorted(set(words) - set(found))):
        raise LookupError(f"tests/reference_page.py has words for no {what}: {', '.join(gone)}")


def write() -> list[str]:
    """Write the pages that have changed, and name them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    changed = []
    for name, text in pages().items():
        file = FOLDER / name
        if not file.exists() or file.read_text("utf-8") != text:
            file.write_text(text, "utf-8")
            changed.append(name)
    return changed


if __name__ == "__main__":
    print(f"docs/reference of duly {duly.__version__}: {', '.join(write()) or 'nothing has changed'}")
