"""`duly schedules`, through the real program: looking at what recurs, and changing what people change by hand."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import pytest

from duly.model import FireRecord, ScheduleRecord
from duly.rules.timing import Mode, Timing
from duly.store import ops
from duly.store.schedules import Definition, abandon, define
from duly.testing import drain, frozen
from tests.edges.programs import complaint, run, say
from tests.edges.stock import (
    Mistake,
    Stock,
    answer_to,
    asked_and_said_no,
    empty_of,
    fresh_of,
    shape,
    to_look_at,
    told,
)
from tests.engine.test_schedules import fire

THURSDAY = datetime(2024, 3, 28, 12, tzinfo=UTC)  # three days before Vienna's clocks go forward
FIELDS = set(ScheduleRecord.__struct_fields__)
WINDOW = ("--since", "2024-03-01T00:00+01:00", "--until", "2024-03-30T12:00+01:00", "--force")
READING = (["list"], ["show", "daily"], ["next", "daily"])


class Plan(Stock):
    """A database with a schedule of every kind, and two days of history."""

    def fill(self) -> Self:
        @self.app.task(queue="mail", lease="2m")
        def report(kind: str = "short") -> None: ...

        @self.app.task
        def tidy() -> None: ...

        create = self.app.schedules.create
        with frozen(self.app, THURSDAY) as clock:
            create("daily", report.call(kind="long"), "0 9 * * *", tz="Europe/Vienna")
            create("often", tidy, "10m", overlap="skip", grace="1h")
            create("once", tidy, rrule="DTSTART:20240329T100000 RRULE:FREQ=DAILY;COUNT=1", tz="America/New_York")
            create("held", tidy, "@hourly")
            self.app.schedules.pause("held", by="ann", why="it rains \x1b[2J")
            clock.advance("2d")
            drain(self.app)
            create("after", tidy, "10m", mode="delay")
            clock.advance("10m")
            assert fire(self.app) == 2  # of the delay, and of the rate: nobody runs them
        return self

    def schedule(self, name: str) -> ScheduleRecord:
        found = self.app.schedules.get(name)
        assert found is not None
        return found

    def fires(self, name: str) -> list[FireRecord]:
        return self.app.schedules.fires(name)

    def events(self, name: str) -> list[tuple[str | None, str | None]]:
        return [(one.by, one.why) for one in self.run(ops.events(limit=1000)) if one.name == name]

    def everything(self) -> Any:
        names = ("daily", "often", "once", "held", "after")
        return self.app.schedules.list(), [self.fires(name) for name in names], self.jobs(limit=1000)


plan = to_look_at(Plan)
fresh = fresh_of(Plan)
empty = empty_of(Plan)


def answered(plan: Plan, *words: str, code: int = 0) -> Any:
    """Run the real program and read its JSON."""
    return json.loads(told(plan, "schedules", *words, "--json", code=code))


# Looking


def test_the_list_says_when_in_words_and_next_in_the_zone_and_in_utc(plan):
    lines = told(plan, "schedules", "list").splitlines()
    rows = {line.split()[0]: re.split(r"  +", line)[1:] for line in lines[1:]}
    assert re.split(r"  +", lines[0]) == ["name", "state", "next", "in UTC", "last", "when", "paused"]
    assert list(rows) == ["after", "daily", "held", "often", "once"]
    assert rows["daily"][:3] == ["active", "2024-03-31 09:00:00+02:00", "2024-03-31 07:00:00"]
    assert rows["daily"][4] == "at 09:00 every day, Europe/Vienna"
    assert re.fullmatch(r"\d+d ago", rows["daily"][3])
    assert rows["after"][0] == "running"
    assert rows["after"][-1] == "10 minutes after the end of the last run"
    assert rows["once"][:3] == ["ended", "-", "-"]
    assert (rows["held"][0], rows["held"][1]) == ("paused", "-")
    assert re.fullmatch(r"by ann \d+d .* ago: it rains .\[2J", rows["held"][-1])
    assert "\x1b" not in "\n".join(lines)


def test_the_list_in_json_has_the_fields_of_the_model_and_the_state(plan):
    listed = answered(plan, "list")
    assert all(set(one) == FIELDS | {"state", "when"} for one in listed)
    assert [(one["name"], one["state"]) for one in listed] == [
        ("after", "running"), ("daily", "active"), ("held", "paused"), ("often", "active"), ("once", "ended"),
    ]  # fmt: skip
    assert listed[1]["next_at"] == plan.schedule("daily").next_at


def test_the_list_of_what_is_paused(plan, empty):
    assert [one["name"] for one in answered(plan, "list", "--paused")] == ["held"]
    assert empty.say("schedules", "list", "--paused").stdout == "no schedule is paused\n"
    assert empty.say("schedules", "list").stdout.startswith("there are no schedules yet: @app.every")
    assert empty.say("schedules", "list", "--json").stdout == "[]\n"


def test_one_is_shown_with_its_terms_its_arguments_and_what_came_of_it(plan):
    text = told(plan, "schedules", "show", "daily")
    for line in (
        r"state +active",
        r"when +at 09:00 every day, Europe/Vienna",
        r'payload +\{"kind": "long"\}',
        r"terms\.queue +mail",
        r"terms\.lease_ms +2m",
        r"next_at +2024-03-31 09:00:00\+02:00 \(2024-03-31 07:00:00 UTC\), .* ago",
        r"Europe/Vienna +UTC +outcome +count +until +job +reason",
        r"2024-03-30 09:00:00\+01:00 +2024-03-30 08:00:00 +fired +1 +- +\S{36}",
        r"2024-03-29 09:00:00\+01:00 +2024-03-29 08:00:00 +skipped +1 +- +- +missed: no worker fired it in time",
    ):
        assert re.search(f"^{line}$", text, re.MULTILINE), line
    often = told(plan, "schedules", "show", "often")
    assert re.search(r"^2024-03-28 12:10:00 +skipped +\d+ +2024-03-30 1\d:\d0:00 ", often, re.MULTILINE)
    assert "it has not fired yet" in told(plan, "schedules", "show", "held")


def test_one_is_shown_in_json(plan):
    shown = answered(plan, "show", "daily")
    assert set(shown) == FIELDS | {"state", "when", "fires"}
    assert [(one["outcome"], one["count"]) for one in shown["fires"]] == [("fired", 1), ("skipped", 1)]
    assert set(shown["fires"][0]) == set(FireRecord.__struct_fields__)
    assert (shown["payload"], shown["terms"]["queue"]) == ({"kind": "long"}, "mail")


def test_at_most_ten_of_what_came_of_it_are_shown(fresh):
    window = ["--since", "2024-01-01T00:00Z", "--until", "2024-01-20T00:00Z"]
    assert len(answered(fresh, "backfill", "daily", *window, "--yes")["ids"]) == 19
    assert len(answered(fresh, "show", "daily")["fires"]) == 10


def test_next_is_told_in_the_zone_and_in_utc(plan):
    assert told(plan, "schedules", "next", "daily", "-n", "2").splitlines() == [
        "Europe/Vienna              UTC",
        "2024-03-31 09:00:00+02:00  2024-03-31 07:00:00",
        "2024-04-01 09:00:00+02:00  2024-04-01 07:00:00",
    ]
    [one] = answered(plan, "next", "daily", "--count", "1", "--after", "2024-10-27T00:00+02:00")
    assert one == {
        "due_at": 1_730_016_000_000, "local": "2024-10-27T09:00:00+01:00", "utc": "2024-10-27T08:00:00+00:00",
    }  # fmt: skip
    assert len(answered(plan, "next", "daily")) == 5


def test_next_after_a_date_without_a_zone_takes_it_in_the_schedules_and_says_so(plan):
    answer = say(Path("/"), "schedules", "next", "daily", "--after", "2024-07-01T09:00", "-n", "1", "--url", plan.url)
    assert answer.stdout.splitlines()[1] == "2024-07-02 09:00:00+02:00  2024-07-02 07:00:00"
    assert answer.stderr == ("duly: --after has no zone: read as 2024-07-01 09:00:00+02:00 (2024-07-01 07:00:00 UTC)\n")


def test_next_of_a_rate_keeps_its_beat_wherever_one_looks(plan):
    lines = told(plan, "schedules", "next", "often", "-n", "3", "--after", "2024-05-01T12:03:20Z").splitlines()
    assert lines == ["UTC", "2024-05-01 12:10:00", "2024-05-01 12:20:00", "2024-05-01 12:30:00"]
    before = told(plan, "schedules", "next", "often", "-n", "2", "--after", "2024-01-01T00:10Z").splitlines()
    assert before == ["UTC", "2024-01-01 00:20:00", "2024-01-01 00:30:00"]


def test_next_says_why_there_is_no_more(plan):
    for name, said in {
        "once": "'once' has no further due time",
        "after": "'after' is due 10 minutes after the end of the last run: later due times are not known yet",
    }.items():
        answer = plan.say("schedules", "next", name)
        assert (answer.exit_code, answer.stdout, answer.stderr) == (0, "", f"duly: {said}\n")
        assert plan.say("schedules", "next", name, "--json").stdout == "[]\n"


def test_next_of_a_paused_one_begins_where_it_would_be_resumed(plan):
    answer = plan.say("schedules", "next", "held", "--json")
    assert answer.stderr == "duly: 'held' is paused: nothing is fired before it is resumed\n"
    dues = [one["due_at"] for one in json.loads(answer.stdout)]
    assert dues[0] > time.time() * 1000 - 60_000
    assert [at % 3_600_000 for at in dues] == [0] * 5


def test_next_ends_where_dates_do(empty):
    @empty.app.task
    def rare() -> None: ...

    empty.app.schedules.create("rare", rare, "3653d")
    dues = json.loads(empty.say("schedules", "next", "rare", "-n", "1000", "--json").stdout)
    assert 700 < len(dues) < 1000
    assert dues[-1]["utc"].startswith("99")


def test_every_look_answers_the_same_on_every_store(fresh, plan):
    for words in READING:
        here, there = (json.loads(one.say("schedules", *words, "--json").stdout) for one in (fresh, plan))
        assert shape(here) == shape(there), words


def test_a_zone_that_is_not_known_here_does_not_hide_the_others(fresh):
    fresh.run(define([strange("strange")]))
    assert "strange" in fresh.say("schedules", "list").stdout
    shown = fresh.say("schedules", "show", "strange").stdout
    assert re.search(r"^next_at +1970-01-01 00:00:01\+00:00 \(1970-01-01 00:00:01 UTC\)", shown, re.MULTILINE)
    for words in (["next", "strange"], ["backfill", "strange", "--since", "2024-01-01", "--until", "2024-01-02"]):
        answer = fresh.say("schedules", *words)
        assert answer.exit_code == 2
        assert answer.stderr.startswith("duly: strange: schedule tz is 'Nowhere/Land', which is no zone")
    assert fresh.state(fresh.say("schedules", "trigger", "strange").stdout.strip()) == "ready"


TERMS = {"queue": "default", "priority": 0, "max_attempts": 1, "lease_ms": 30_000, "keep_ms": 1, "result_ttl_ms": 1}


def strange(name: str, tz: str = "Nowhere/Land", *, in_code: bool = False) -> Definition:
    """A schedule that a machine with another set of zones has made."""
    return Definition(
        name=name, task="tidy", timing=Timing(Mode.CRON, "0 9 * * *", tz), catchup="skip", grace_ms=None,
        overlap="allow", jitter_ms=0, pause_after=None,
        terms=json.dumps(TERMS), payload="{}", envelope=None, in_code=in_code, next_at=1000,
    )  # fmt: skip


# Changing


def test_one_is_paused_with_who_and_why_and_resumed(fresh):
    said = told(fresh, "schedules", "pause", "daily", "--by", "bob", "--why", "holidays")
    assert re.fullmatch(r"schedule 'daily' is paused by bob \S+ ago: holidays\n", said)
    assert (fresh.schedule("daily").paused_by, fresh.schedule("daily").paused_why) == ("bob", "holidays")
    said = told(fresh, "schedules", "resume", "daily")
    assert re.fullmatch(r"schedule 'daily' is resumed, due next at \S+ 09:00:00\+0\d:00 \(\S+ 0\d:00:00 UTC\)\n", said)
    assert fresh.schedule("daily").paused_at is None
    assert fresh.schedule("daily").next_at > time.time() * 1000 - 60_000
    assert fresh.fires("daily")[0].reason == "paused"
    assert fresh.events("schedule.resumed") == [("eve", "")]


def test_pause_and_resume_answer_in_json(fresh):
    paused = answered(fresh, "pause", "daily", "--why", "holidays")
    assert set(paused) == FIELDS | {"state", "when"}
    assert (paused["state"], paused["paused_by"], paused["paused_why"]) == ("paused", "eve", "holidays")
    resumed = answered(fresh, "resume", "daily")
    assert (resumed["state"], resumed["resumed"], resumed["paused_at"]) == ("active", True, None)
    again = answered(fresh, "resume", "daily", code=1)
    assert again["resumed"] is False


def test_what_does_not_say_when_it_is_due_next_is_resumed_all_the_same(fresh):
    for name, state in {"once": "ended", "after": "running"}.items():
        fresh.say("schedules", "pause", name)
        assert fresh.say("schedules", "resume", name).stdout == f"schedule '{name}' is resumed; it is {state}\n"


def test_one_that_no_code_has_is_resumed_with_a_warning(fresh):
    fresh.run(define([strange("orphan", "UTC", in_code=True)]))
    assert fresh.run(abandon([])) == ["orphan"]
    answer = fresh.say("schedules", "resume", "orphan")
    assert answer.exit_code == 0
    assert answer.stderr == (
        "duly: no worker has it in its code: the next worker that starts without it pauses it again\n"
    )


def test_one_is_triggered_and_the_id_of_its_job_is_printed(fresh):
    before = fresh.schedule("daily").next_at
    job = fresh.app.get(told(fresh, "schedules", "trigger", "daily").strip())
    assert (job.task, job.queue, job.payload, job.schedule) == ("report", "mail", {"kind": "long"}, "daily")
    assert fresh.schedule("daily").next_at == before
    second = answered(fresh, "trigger", "held", "--by", "bob")
    assert second["schedule"] == "held"
    assert fresh.state(second["id"]) == "ready"
    assert fresh.fires("held")[0].reason == "triggered by bob"
    assert fresh.events("schedule.triggered") == [("eve", None), ("bob", None)]


def test_a_backfill_says_how_many_and_a_dry_run_writes_nothing(fresh):
    before = fresh.everything()
    would = told(fresh, "schedules", "backfill", "daily", *WINDOW, "--dry-run").splitlines()
    assert would[0] == "would fire 29 due times of 'daily'; nothing was changed"  # the 30th of the month was fired
    assert would[1] == "  2024-03-01 09:00:00+01:00 (2024-03-01 08:00:00 UTC)"
    assert would[-1] == "  …"
    dry = json.loads(fresh.say("schedules", "backfill", "daily", *WINDOW, "--dry-run", "--json").stdout)
    assert (dry["dry_run"], dry["count"], len(dry["first"])) == (True, 29, 5)
    assert fresh.everything() == before
    assert told(fresh, "schedules", "backfill", "daily", *WINDOW, "--yes", "--by", "bob") == "fired 29 of 'daily'\n"
    fired = [one for one in fresh.fires("daily") if one.reason == "backfilled by bob"]
    assert len(fired) == 29
    assert {fresh.state(one.job_id) for one in fired} == {"ready"}
    assert [one.outcome for one in fresh.fires("daily")].count("skipped") == 0
    for how in ("--yes", "--dry-run"):
        nothing = fresh.say("schedules", "backfill", "daily", *WINDOW, how).stdout
        assert nothing == "nothing to fire: 'daily' has no due time there that was not fired\n"
    again = fresh.say("schedules", "backfill", "daily", *WINDOW, "--yes", "--json")
    assert json.loads(again.stdout) == {"count": 0, "ids": []}


def test_a_backfill_takes_dates_without_a_zone_in_the_schedules_and_says_so(fresh):
    words = [
        "schedules",
        "backfill",
        "daily",
        "--since",
        "2024-02-01T09:00",
        "--until",
        "2024-02-03",
        "--yes",
        "--json",
    ]
    answer = fresh.say(*words)
    assert json.loads(answer.stdout)["count"] == 2
    assert answer.stderr.splitlines() == [
        "duly: --since has no zone: read as 2024-02-01 09:00:00+01:00 (2024-02-01 08:00:00 UTC)",
        "duly: --until has no zone: read as 2024-02-03 00:00:00+01:00 (2024-02-02 23:00:00 UTC)",
    ]


def test_a_backfill_of_many_goes_in_parts_and_counts_as_far_as_people_count(empty):
    empty.fill()
    window = ["--since", "2024-02-01T00:00Z", "--until", "2024-02-15T00:00Z"]
    ids = json.loads(empty.say("schedules", "backfill", "often", *window, "--yes", "--json").stdout)["ids"]
    assert len(ids) == len(set(ids)) == 14 * 144 + 1
    window = ["--since", "2020-01-01T00:00Z", "--until", "2024-01-01T00:00Z"]
    would = empty.say("schedules", "backfill", "often", *window, "--dry-run").stdout
    assert would.startswith("would fire more than 10,000 due times of 'often'; nothing was changed\n")


@pytest.mark.process
def test_who_is_asked_and_says_no_changes_nothing(fresh):
    before = fresh.everything()
    for words, question in (
        (["backfill", "daily", *WINDOW], "Fire 29 due times of 'daily'? [y/N]"),
        (["delete", "daily"], "Delete schedule 'daily' (at 09:00 every day, Europe/Vienna)? [y/N]"),
    ):
        assert question in asked_and_said_no("schedules", *words, url=fresh.url)
    assert fresh.everything() == before


def test_one_is_deleted_and_its_jobs_and_its_record_stay(fresh):
    before = fresh.everything()
    would = told(fresh, "schedules", "delete", "daily", "--dry-run")
    assert would == "would delete schedule 'daily' (at 09:00 every day, Europe/Vienna); nothing was changed\n"
    assert answered(fresh, "delete", "daily", "--dry-run")["deleted"] is False
    assert fresh.everything() == before
    assert told(fresh, "schedules", "delete", "daily", "--yes", "--why", "unread") == "schedule 'daily' is deleted\n"
    assert fresh.app.schedules.get("daily") is None
    assert len(fresh.fires("daily")) == 2
    assert fresh.events("schedule.deleted") == [("eve", "unread")]
    gone = answered(fresh, "delete", "often", "--yes")
    assert (gone["deleted"], set(gone)) == (True, FIELDS | {"state", "when", "deleted"})


def test_one_that_is_in_code_is_deleted_with_a_warning(fresh):
    fresh.run(define([strange("orphan", "UTC", in_code=True)]))
    answer = fresh.say("schedules", "delete", "orphan", "--yes")
    assert (answer.exit_code, answer.stdout) == (0, "schedule 'orphan' is deleted\n")
    assert answer.stderr == "duly: it is defined in code: a worker that starts with this code creates it again\n"


# Mistakes


DATES = "--since 2024-03-01 --until 2024-03-02"
MISTAKES = [
    Mistake("lst", 2, "Did you mean 'list'?"),
    Mistake("list daily", 2, "unexpected extra argument (daily)"),
    Mistake("list --pased", 2, "No such option '--pased'"),
    Mistake("show", 2, "Missing argument 'NAME'"),
    Mistake("show dayli", 3, "duly: no schedule is named 'dayli': did you mean 'daily'?\n"),
    Mistake("show xyz", 3, "duly: no schedule is named 'xyz'\n"),
    Mistake("show daily often", 2, "unexpected extra argument (often)"),
    Mistake("next dayly", 3, "did you mean 'daily'?"),
    Mistake("next daily -n 0", 2, "0 is not in the range 1<=x<=1000"),
    Mistake("next daily --after tomorrow", 2, "duly: --after is 'tomorrow', which is no date: write 2026-01-31"),
    Mistake("next daily --after 2024-02-30", 2, "--after is '2024-02-30', which is no date"),
    Mistake("next daily --after 0001-01-01", 2, "--after is '0001-01-01': give a year from 1970 to 9998"),
    Mistake("next daily --after 9999-12-31T23:59Z", 2, "give a year from 1970 to 9998"),
    Mistake("next after --after 2024-01-01", 2, "after counts from the end of each run, so only its next due time"),
    Mistake("pause", 2, "Missing argument 'NAME'"),
    Mistake("pause offen", 3, "no schedule is named 'offen': did you mean 'often'?"),
    Mistake("pause daily --for 1h", 2, "No such option '--for'"),
    Mistake("resume", 2, "Missing argument 'NAME'"),
    Mistake("resume hold", 3, "no schedule is named 'hold': did you mean 'held'?"),
    Mistake("resume daily", 1, "duly: schedule 'daily' was not paused\n"),
    Mistake("trigger", 2, "Missing argument 'NAME'"),
    Mistake("trigger dail", 3, "did you mean 'daily'?"),
    Mistake("trigger daily --why x", 2, "No such option '--why'"),
    Mistake("trigger \udcff", 3, "no schedule is named '\\udcff'"),
    Mistake("backfill daily", 2, "Missing option '--since'"),
    Mistake("backfill daily --since 2024-03-01", 2, "Missing option '--until'"),
    Mistake(f"backfill dail {DATES} --yes", 3, "did you mean 'daily'?"),
    Mistake(f"backfill after {DATES}", 2, "duly: after counts from the end of each run"),
    Mistake(
        "backfill daily --since 2024-03-02 --until 2024-03-01", 2, "--until 2024-03-01 is before --since 2024-03-02"
    ),
    Mistake("backfill daily --since 1h --until 2024-03-01", 2, "--since is '1h', which is no date"),
    Mistake("backfill daily --since 2024-03-01 --until now", 2, "--until is 'now', which is no date"),
    Mistake("backfill daily --since 2024-03-01 --until 2999-01-01", 2, "its window reaches into the future"),
    Mistake(f"backfill daily {DATES}Z", 2, "--until is '2024-03-02Z', which is no date"),
    Mistake(
        "backfill daily --since 2024-03-01T00Z --until 2024-03-02T00Z", 2, "Fire 1 due time of 'daily'? stdin is not"
    ),
    Mistake("delete", 2, "Missing argument 'NAME'"),
    Mistake("delete daily", 2, "Delete schedule 'daily' (at 09:00 every day, Europe/Vienna)? stdin is not a terminal"),
    Mistake("delete dalyi --yes", 3, "did you mean 'daily'?"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: ascii(mistake.words))
def test_a_mistake_is_answered_in_a_line_and_nothing_is_changed(plan, mistake):
    before = plan.everything()
    answer_to(mistake, plan.say("schedules", *mistake.words.split()))
    assert plan.everything() == before


@pytest.mark.process
def test_a_wrong_name_is_answered_by_the_real_program_without_a_traceback(plan):
    for words in (["show", "dayli"], ["trigger", b"\xff".decode(errors="surrogateescape")]):
        assert "no schedule is named" in complaint(run(Path("/"), "schedules", *words, "--url", plan.url), 3)


@pytest.mark.process
def test_a_terminal_that_knows_few_letters_gets_others_instead(plan, tmp_path):
    for words in (["list"], ["backfill", "daily", *WINDOW, "--dry-run"], ["next", "--help"]):
        environ = {"DULY_URL": plan.url, "PYTHONIOENCODING": "latin-1:strict", "PYTHONUTF8": "0"}
        answer = run(tmp_path, "schedules", *words, **environ)
        assert (answer.returncode, answer.stderr) == (0, "")


# Doctor


NO_ZONE = "schedule tz is 'Nowhere/Land', which is no zone: give an IANA name such as 'Europe/Vienna'"


def test_doctor_names_what_cannot_be_read_here_and_what_no_code_has(fresh):
    [(level, overdue, remedy)] = findings(fresh)
    assert (level, "daily" in overdue, remedy) == ("warning", True, "start a worker")  # they are of years ago
    for one in fresh.app.schedules.list():
        fresh.app.schedules.pause(one.name)
    assert findings(fresh) == [("ok", "all schedules can be read on this machine", "")]
    fresh.run(define([strange("strange"), strange("stranger"), strange("gone one", "UTC", in_code=True)]))
    fresh.run(abandon([]))
    assert findings(fresh) == [
        (
            "warning",
            "strange, stranger cannot be read on this machine: " + NO_ZONE,
            "correct it: workers here cannot fire it",
        ),
        (
            "warning",
            "gone one paused: no worker has it in its code any more",
            "start a worker that has it, or delete it: duly schedules delete 'gone one'",
        ),
        ("warning", "strange, stranger overdue: no worker fires it", "start a worker"),
    ]


def findings(plan: Plan) -> list[tuple[str, str, str]]:
    answer = say(Path("/"), "doctor", "--json", "--url", plan.url)
    found = [one for one in json.loads(answer.stdout)["findings"] if one["name"] == "schedules"]
    return [(one["level"], one["text"], one["remedy"]) for one in found]
