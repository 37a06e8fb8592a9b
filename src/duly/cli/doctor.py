"""`duly doctor`: checks the database, the workers and the tasks, and prints each finding with its remedy."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import click

from duly.cli import output
from duly.cli.database import Choice, check_tables, database_options
from duly.cli.options import json_option
from duly.duly import Duly
from duly.errors import ConfigError, SchemaMismatch, StoreError
from duly.model import Pause, QueueFigure, WorkerRecord
from duly.rules import durations
from duly.rules.settings import Settings
from duly.rules.timing import Mode, Timing, next_after
from duly.store import ops
from duly.store.driver import Finding
from duly.store.schedules import GONE

SLOW_MS = 60_000
# A job is rescued once its lease is found expired twice; this long after that, no worker has looked.
UNSEEN_MS = 10_000
# Filling a batch takes seconds; one that is unsealed for longer was probably interrupted.
UNSEALED_MS = 3_600_000
MOST_BATCHES = 1000
ELSEWHERE = "repair it, or name another database with --url, --app or $DULY_URL"
COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


@click.command()
@click.option("--deep", is_flag=True, help="SQLite: read the whole file and check it for damage. This takes long.")
@click.option("--verbose", is_flag=True, help="Also print each setting and where it comes from.")
@database_options
@json_option
def command(choice: Choice, deep: bool, verbose: bool, as_json: bool) -> None:
    """Check the database, the workers and the tasks, and print what to do.

    With --app it also checks that living workers know the tasks of the app.

    Examples:
      duly doctor
      duly doctor --deep --app tasks:app --verbose
      duly doctor --url postgresql://user@host/db --json

    Exit codes: 0 no error (there may be warnings), 1 errors, 2 wrong usage.
    """
    with choice.opened(checked=False) as app:
        app.driver.to_read = True
        findings = _findings(app, deep)
        settings = _settings(app.settings)
    good = all(finding.level != "error" for finding in findings)
    if as_json:
        output.answer_json(
            {"good": good, "findings": [plain_finding(finding) for finding in findings], "settings": settings}
        )
    else:
        for finding in findings:
            print_finding(finding)
        if verbose:
            click.echo()
            output.table(
                ("setting", "value", "from"), [(name, *map(str, said.values())) for name, said in settings.items()]
            )
    sys.exit(0 if good else 1)


def _findings(app: Duly, deep: bool) -> list[Finding]:
    """Collect all findings; an error of the database is the last one."""
    findings: list[Finding] = []
    try:
        check_tables(app)
        findings += app.driver.examine(deep=deep)
        findings += _Workings(app).findings()
    except SchemaMismatch as error:
        findings.append(Finding("schema", "error", output.reason(error)))
    except (StoreError, ConfigError) as error:
        findings.append(Finding("database", "error", output.reason(error), ELSEWHERE))
    return findings


class _Workings:
    """The workers, queues and jobs of a database, read once."""

    def __init__(self, app: Duly) -> None:
        run = app.driver.run
        self._app = app
        self._now: int = run(ops.clock())
        known = run(ops.workers())
        self._workers: list[WorkerRecord] = [worker for worker in known if worker.alive]
        self._silent = len(known) - len(self._workers)
        self._queues: list[QueueFigure] = run(ops.queues())
        self._pauses: list[Pause] = run(ops.paused())
        self._paused = {pause.name: pause for pause in self._pauses if pause.kind == "queue"}
        self._due = [queue.name for queue in self._queues if queue.oldest_ms is not None]

    def findings(self) -> Iterator[Finding]:
        """Check workers, jobs, schedules and batches."""
        yield from self._check_workers()
        yield from self._check_tasks()
        yield from self._check_pauses()
        yield from self._check_leases()
        yield from self._check_queues()
        yield from self._check_schedules()
        yield from self._check_batches()
        yield from self._check_dead()

    def _check_workers(self) -> Iterator[Finding]:
        due = [name for name in self._due if name not in self._paused]
        none, start = "no worker is alive", "start one: duly worker module:app"
        if self._silent:
            none = f"no heartbeat of {output.plural(self._silent, 'worker')} was recorded lately"
            start = f"see whether they run (duly check); if not, {start}"
        if self._workers:
            hosts = sorted({worker.host for worker in self._workers})
            yield Finding("workers", "ok", f"{output.plural(len(self._workers), 'worker')} alive on {_some(hosts)}")
        elif due:
            yield Finding("workers", "error", f"{none}, and jobs are due in {_some(due)}", start)
        else:
            what = f"what is due is paused, in {_some(self._due)}" if self._due else "nothing is due"
            yield Finding("workers", "warning", f"{none}; {what}", start)
        served = {name for worker in self._workers for name in worker.queues}
        if self._workers and (unserved := [name for name in due if name not in served]):
            yield Finding(
                "workers",
                "error",
                f"jobs are due in {_some(unserved)}, which no living worker serves",
                f"start a worker for them: duly worker module:app --queues {shlex.quote(','.join(unserved[:5]))}",
            )

    def _check_tasks(self) -> Iterator[Finding]:
        parked = self._app.driver.run(ops.parked())
        for figure in parked:
            yield Finding(
                "tasks",
                "warning",
                f"{output.plural(figure.count, 'job')} of task {figure.task!r} in queue {figure.queue!r} "
                "wait for a worker that knows the task",
                "start a worker with the code of that task, or give the new name of the task aliases=",
            )
        known = {name for worker in self._workers for name in worker.tasks}
        names = {task.name for task in self._app.tasks.values()}
        unknown = sorted(names - known) if self._workers else []
        if unknown:
            yield Finding(
                "tasks",
                "warning",
                f"no living worker knows {_some(unknown)} of this app",
                "start workers with this version of the code",
            )
        if not parked and not unknown:
            yield Finding("tasks", "ok", "no job waits for a worker that knows its task")

    def _check_pauses(self) -> Iterator[Finding]:
        for pause in self._pauses:
            end = "" if pause.paused_until is None else f" until {output.moment(pause.paused_until)}"
            why = f": {pause.paused_why}" if pause.paused_why else ""
            since = output.age(self._now - pause.paused_at)
            flag = "" if pause.kind == "queue" else " --task"
            yield Finding(
                "pauses",
                "warning",
                f"{pause.kind} {pause.name!r} is paused by {pause.paused_by} since {since}{end}{why}",
                f"resume it: duly queues resume {shlex.quote(pause.name)}{flag}",
            )
        if not self._pauses:
            yield Finding("pauses", "ok", "nothing is paused")

    def _check_leases(self) -> Iterator[Finding]:
        seen = self._app.driver.run(ops.expired_leases())
        unseen = [one for one in seen if self._now - one.lease_until > one.lease_ms + UNSEEN_MS]
        if not unseen:
            yield Finding("leases", "ok", "no job is held by a dead worker")
            return
        oldest = max(self._now - one.lease_until for one in unseen)
        held = "1 job is" if len(unseen) == 1 else f"{len(unseen):,} jobs are"
        text = f"{held} held by dead workers for {output.age(oldest)}: no worker rescues them"
        start, read = "start a worker: any worker rescues them", "read the logs of the workers"
        yield Finding("leases", "error", text, read if self._workers else start)

    def _check_queues(self) -> Iterator[Finding]:
        held = [queue for queue in self._queues if queue.name in self._due and queue.name in self._paused]
        for queue in held:
            yield Finding(
                "queues",
                "warning",
                f"queue {queue.name!r}: jobs are due for {output.age(queue.oldest_ms)}, but it is paused "
                f"by {self._paused[queue.name].paused_by} ({output.count(queue.ready)} ready)",
                f"resume it: duly queues resume {shlex.quote(queue.name)}",
            )
        slow = [queue for queue in self._queues if (queue.oldest_ms or 0) > SLOW_MS and queue not in held]
        for queue in slow:
            yield Finding(
                "queues",
                "warning",
                f"queue {queue.name!r}: the oldest due job has waited for {output.age(queue.oldest_ms)} "
                f"({output.count(queue.ready)} ready, {output.count(queue.running)} running)",
                f"find the reason: duly jobs list --queue {shlex.quote(queue.name)} --state ready, then duly why ID; "
                "or start more workers",
            )
        if not slow and not held:
            yield Finding("queues", "ok", f"no due job waits longer than {durations.describe(SLOW_MS)}")

    def _check_schedules(self) -> Iterator[Finding]:
        found = self._app.schedules.list()
        rules: dict[Timing, list[str]] = {}  # many schedules may share a rule
        for one in found:
            timing = Timing(Mode(one.mode), one.spec, one.tz, one.interval_ms)
            rules.setdefault(timing, []).append(one.name)
        unreadable = [(names, problem) for timing, names in rules.items() if (problem := _problem(timing, self._now))]
        for names, problem in unreadable:
            text = f"{_some(names)} cannot be read on this machine: {problem}"
            yield Finding("schedules", "warning", text, "correct it: workers here cannot fire it")
        if gone := [one.name for one in found if one.paused_at is not None and one.paused_why == GONE]:
            remedy = f"start a worker that has it, or delete it: duly schedules delete {shlex.quote(gone[0])}"
            yield Finding("schedules", "warning", f"{_some(gone)} paused: {GONE}", remedy)
        overdue = [
            one.name for one in found if one.paused_at is None and (one.next_at or self._now) < self._now - SLOW_MS
        ]
        if overdue:
            yield Finding("schedules", "warning", f"{_some(overdue)} overdue: no worker fires it", "start a worker")
        if not unreadable and not gone and not overdue:
            yield Finding("schedules", "ok", "all schedules can be read on this machine")

    def _check_batches(self) -> Iterator[Finding]:
        active = self._app.batches.list(active=True, limit=MOST_BATCHES)
        unsealed = [one for one in active if one.sealed_at is None and self._now - one.created_at > UNSEALED_MS]
        if not unsealed:
            yield Finding("batches", "ok", f"no batch is unsealed for longer than {durations.describe(UNSEALED_MS)}")
            return
        oldest = min(unsealed, key=lambda one: one.created_at)
        named = f"batch {oldest.name!r} is" if len(unsealed) == 1 else f"{len(unsealed):,} batches are"
        yield Finding(
            "batches",
            "warning",
            f"{named} unsealed for {output.age(self._now - oldest.created_at, units=1)}: the filling was interrupted",
            f"fill it again under its key, or cancel it: duly batches cancel {oldest.id}",
        )

    def _check_dead(self) -> Iterator[Finding]:
        figures = self._app.driver.run(ops.dead_metrics())
        if not figures:
            yield Finding("dead", "ok", "no dead letters")
            return
        number, oldest = sum(figure.count for figure in figures), max(figure.oldest_ms for figure in figures)
        letters = "1 dead letter" if number == 1 else f"{number:,} dead letters"
        yield Finding(
            "dead",
            "warning",
            f"{letters}, the oldest {output.age(oldest)} old",
            "list them: duly dead list; then duly dead replay ID, or duly dead resolve ID",
        )


def _problem(timing: Timing, now: int) -> str | None:
    """Give the reason why a schedule cannot be read here: an unknown zone, or a rule of a newer version."""
    try:
        next_after(timing, now)
    except ConfigError as error:
        return str(error)
    return None


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _settings(settings: Settings) -> dict[str, dict[str, Any]]:
    """Give each setting with its value and where it comes from."""
    found = {}
    for field in dataclasses.fields(settings):
        if field.name == "origins":
            continue
        name, value = field.name.removesuffix("_ms"), getattr(settings, field.name)
        if name != field.name:
            value = durations.describe(value)
        # str() of a URL omits the password.
        shown = value if isinstance(value, bool | int | str) or value is None else str(value)
        found[name] = {"value": shown, "origin": settings.origin(name)}
    return found


def plain_finding(finding: Finding) -> dict[str, str | None]:
    """Return a finding as JSON has it."""
    return {"name": finding.name, "level": finding.level, "text": finding.text, "remedy": finding.remedy}


def print_finding(finding: Finding) -> None:
    """Print a finding, and its remedy below it."""
    level = output.style(f"{finding.level:<7}", fg=COLOURS[finding.level])
    click.echo(f"{level}  {finding.name:<12}  {output.plain(' '.join(finding.text.split()))}")
    if finding.remedy:
        click.echo(f"{'':23}to do: {output.plain(finding.remedy)}")
