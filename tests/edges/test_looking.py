"""Looking at jobs, queues and workers from the command line, and changing what people change by hand."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from duly.cli.top import CLOSE, OPEN, Rates
from duly.model import Change, JobRecord, NewJob, State, Terms, WorkerRecord
from duly.rules import codec
from duly.store import lanes, ops
from tests.edges.programs import NOBODY, complaint, run, say
from tests.edges.stock import (
    Mistake,
    Stock,
    answer_to,
    asked_and_said_no,
    dead,
    empty_of,
    fresh_of,
    new_id,
    shape,
    shut,
    to_look_at,
    told,
)
from tests.edges.watch import TERMINAL, Watch

READING = (["jobs", "list"], ["dead", "list"], ["queues", "list"], ["workers"], ["stats"], ["top", "--once"])


stock = to_look_at(Stock)
fresh = fresh_of(Stock)
empty = empty_of(Stock)


# Looking


def test_the_list_of_jobs_is_newest_first_and_says_what_is_worth_knowing(stock):
    lines = told(stock, "jobs", "list").splitlines()
    assert lines[0].split() == ["id", "state", "attempt", "when", "task", "queue", "note"]
    assert [re.split(r"  +", line)[4] for line in lines[1:]] == [
        "next", "next", "long", "stop", "again", "approve", "part", "boom", "boom", "boom", "add", "add", "mail",
        "mail", "mail",
    ]  # fmt: skip
    text = "\n".join(lines)
    assert re.search(r"running +1/5 +due \S+ ago +long +default +40%, parsing$", text, re.MULTILINE)
    assert re.search(r"scheduled +0/5 +in \dm +mail +mail", text)
    assert re.search(r"dead .* ago +boom +default +attempts used up; ValueError: no", text)
    assert re.search(r"cancelled .* stop .* not wanted$", text, re.MULTILINE)


@pytest.mark.process
def test_eighty_columns_show_what_one_looks_for_first(stock):
    for words in (["jobs", "list"], ["dead", "list"]):
        with Watch(*words, url=stock.url, columns=80, terminal=TERMINAL) as listing:
            lines = listing.until(" boom").splitlines()
            assert listing.wait() == 0
        assert re.search(r"id +(state +)?attempt +when +task", lines[0])
        assert all(len(re.sub(r"\x1b\[\d*m", "", line)) <= 80 for line in lines)


@pytest.mark.process
def test_no_color_is_obeyed_everywhere(stock):
    for words in (["jobs", "list"], ["doctor"], ["stats"]):
        for wish, coloured in (("", True), ("1", False)):
            with Watch(*words, url=stock.url, NO_COLOR=wish, terminal=TERMINAL) as command:
                assert (re.search(r"\x1b\[\d+m", command.rest()) is not None) == coloured, words


@pytest.mark.process
def test_a_dumb_terminal_gets_plain_lines(stock):
    with Watch("top", "--interval", "100ms", url=stock.url, TERM="dumb", terminal=TERMINAL) as top:
        seen = top.until("ready 2") + top.until("ready 2")
        top.send(signal.SIGINT)
        assert top.wait() == 0
    assert "\x1b" not in seen


def test_what_a_terminal_would_obey_is_not_printed(stock):
    for words in (["jobs", "list"], ["dead", "list"], ["top", "--once"], ["jobs", "show", stock.one("dead")]):
        answer = stock.say(*words)
        assert "\x1b" not in answer.stdout
        assert "[31mway" in answer.stdout


@pytest.mark.parametrize(
    ("filters", "tasks"),
    [
        (["--state", "dead"], ["boom"] * 3),
        (["--queue", "mail"], ["mail"] * 3),
        (["--task", "again"], ["again"]),
        (["--error", "net"], ["again"]),
        (["--since", "1h", "--state", "waiting"], ["approve"]),
        (["--since", "2100-01-01"], []),
        (["--since", "2020-01-01T12:00+01:00", "--state", "partial"], ["part"]),
        (["--limit", "1"], ["next"]),
    ],
)
def test_jobs_are_listed_by_filters(stock, filters, tasks):
    listed = json.loads(stock.say("jobs", "list", *filters, "--json").stdout)
    assert [job["task"] for job in listed] == tasks


def test_the_list_in_json_has_the_fields_of_the_model(stock):
    listed = json.loads(told(stock, "jobs", "list", "--json"))
    assert set(listed[0]) == set(JobRecord.__struct_fields__)
    assert [job["id"] for job in listed] == [job.id for job in stock.jobs()]


def test_a_list_says_how_to_get_the_next_page_and_the_pages_make_up_the_whole(stock):
    pages, before = [], []
    while True:
        answer = stock.say("jobs", "list", "--limit", "6", *before)
        pages += re.findall(r"^\S{36}", answer.stdout, re.MULTILINE)
        more = re.search(r"there are more: (--before) (\S+)", answer.stderr)
        if more is None:
            break
        before = [*more.groups()]
    assert pages == [job.id for job in stock.jobs()]


def test_a_list_without_jobs_says_so(stock, empty):
    assert stock.say("jobs", "list", "--task", "none").stdout == "no job matches these filters\n"
    assert stock.say("dead", "list", "--task", "none").stdout == "no dead job matches these filters\n"
    assert empty.say("jobs", "list").stdout == "there are no jobs\n"
    assert empty.say("dead", "list").stdout == "there are no dead jobs\n"
    assert "there are no workers yet" in empty.say("workers").stdout
    assert "there are no queues yet" in empty.say("queues", "list").stdout
    for words in (["jobs", "list"], ["dead", "list"], ["workers"], ["queues", "list"]):
        assert empty.say(*words, "--json").stdout == "[]\n"


def test_a_job_is_shown_with_its_attempts_events_and_why(stock):
    cancelled = stock.one("cancelled")
    text = told(stock, "jobs", "show", cancelled)
    assert re.search(r"^created_at +\S+ \S+ UTC \(.* ago\)$", text, re.MULTILINE)
    assert re.search(r"^event +.* job\.cancelled by eve: not wanted$", text, re.MULTILINE)
    assert re.search(r"^why +it is cancelled because: not wanted$", text, re.MULTILINE)
    assert "replay_count" not in text
    shown = json.loads(told(stock, "jobs", "show", stock.jobs(task="again")[0].id, "--json"))
    assert set(shown) == {*JobRecord.__struct_fields__, "attempts", "steps", "events"}
    assert [one["error"] for one in shown["attempts"]] == ["builtins.OSError: net"]


def test_the_beginning_of_an_id_will_do_where_it_is_the_only_one(stock):
    job_id = stock.jobs(task="approve")[0].id
    compact = job_id.replace("-", "").upper()
    others = {job.id.replace("-", "").upper() for job in stock.jobs()} - {compact}
    size = next(size for size in range(1, 33) if not any(other.startswith(compact[:size]) for other in others))
    assert json.loads(stock.say("jobs", "show", compact[:size], "--json").stdout)["id"] == job_id
    assert json.loads(stock.say("why", compact, "--json").stdout)["facts"]["id"] == job_id
    several = stock.say("why", job_id[:4])
    assert several.exit_code == 2
    assert f"several jobs have an id that begins with {job_id[:4]}" in several.stderr
    assert stock.say("why", "ffffff").exit_code == 3


def test_dead_jobs_are_listed_oldest_first_and_shown(stock):
    lines = told(stock, "dead", "list").splitlines()
    assert [line.split()[0] for line in lines[1:]] == [job.id for job in reversed(stock.jobs(state="dead"))]
    assert lines[0].split() == ["id", "attempt", "when", "task", "note"]  # all are dead, and in queue default
    assert "state" in told(stock, "dead", "list", "--partial").splitlines()[0]
    both = json.loads(stock.say("dead", "list", "--partial", "--json").stdout)
    assert [job["task"] for job in both] == ["boom", "boom", "boom", "part"]
    page = stock.say("dead", "list", "--limit", "2")
    after = re.search(r"there are more: --after (\S+)", page.stderr)
    assert len(json.loads(stock.say("dead", "list", "--after", after[1], "--json").stdout)) == 1
    assert json.loads(stock.say("dead", "list", "--until", "1h", "--json").stdout) == []
    shown = told(stock, "dead", "show", stock.one("dead"))
    assert "The traceback of attempt 1 (of all of them: --json):\na traceback" in shown
    not_dead = stock.say("dead", "show", stock.one("ready"))
    assert (not_dead.exit_code, not_dead.stdout) == (3, "")
    assert "is ready, not dead: duly jobs show" in not_dead.stderr


def test_queues_are_listed_with_who_paused_them(stock):
    text = told(stock, "queues", "list")
    assert re.search(r"^default +2 +1 +1 +1 +\S+$", text, re.MULTILINE)
    assert re.search(r"^mail +0 +3 +0 +0 +- +by eve .* ago, until .*: mail server is down$", text, re.MULTILINE)
    listed = {one["name"]: one for one in json.loads(told(stock, "queues", "list", "--json"))}
    assert listed["default"]["paused"] is None
    assert (listed["mail"]["scheduled"], listed["mail"]["paused"]["paused_by"]) == (3, "eve")


def test_workers_are_listed_with_their_slots_and_what_they_did(stock):
    assert re.search(
        r"^w1 +here +42 +alive, beat \S+ ago +1/4 +10 +2 +.* default +add, boom$", told(stock, "workers"), re.MULTILINE
    )
    [worker] = json.loads(told(stock, "workers", "--json"))
    assert (worker["id"], worker["slots"], worker["running"], worker["alive"]) == ("w1", 4, 1, True)


def test_a_worker_that_missed_its_beats_is_silent(empty):
    empty.register("w1", beat_ms=1, now=empty.run(ops.clock()) - 120_000)
    assert re.search(r"^w1 .* silent for 2m", empty.say("workers").stdout, re.MULTILINE)
    assert "none alive, 1 silent" in empty.say("stats").stdout


def test_why_gives_the_sentence_and_in_json_the_facts(stock):
    assert told(stock, "why", stock.one("waiting")).splitlines() == [
        "it waits for: approval",
        "also: no living worker knows task 'approve' and serves queue 'default'",
    ]
    why = json.loads(told(stock, "why", stock.one("waiting"), "--json"))
    assert (why["gate"], why["sentence"], why["facts"]["task"]) == ("waiting", "it waits for: approval", "approve")


def test_j25_a_payload_that_is_shown_is_json_that_can_be_replayed(empty):
    odd = {"data": {"\udc80\x00": "␛ ␛0041 \x7f\u202e\U000e0001"}}
    job = NewJob(new_id(), codec.encode(odd))
    empty.run(ops.enqueue(Terms("boom"), [job]))
    empty.end([job.id], Change(State.DEAD, result=codec.encode(odd)))
    as_json = told(empty, "dead", "list", "--json")
    assert as_json.isascii()
    assert [json.loads(as_json)[0][name] for name in ("payload", "result")] == [odd, odd]
    shown = dict(re.split("  +", line, maxsplit=1) for line in told(empty, "jobs", "show", job.id).splitlines())
    assert [json.loads(shown[name]) for name in ("payload", "result")] == [odd, odd]
    told(empty, "dead", "replay", job.id, "--payload", shown["payload"])
    assert empty.claim()[0].payload == job.payload


def test_b10_why_gives_the_gates_that_are_shut_beside_the_first(fresh):
    held, job = (NewJob(new_id(), "{}", lane="send:acme") for _ in range(2))
    fresh.run(ops.enqueue(Terms("send"), [held, job]))
    fresh.run(lanes.limit("send", cap=1, by="ops", why="provider slow"))
    fresh.run(lanes.claim("default", [lanes.Walk("send")], limit=9, lanes=9, token=77, worker="host:1"))
    fresh.run(ops.pause("task", "send", by="eve", why="it \x1b[2Jrains"))
    fresh.register("w2", tasks=["send"])
    first, second = told(fresh, "why", job.id).splitlines()
    assert first == "task 'send' is paused by eve: it \N{REPLACEMENT CHARACTER}[2Jrains"
    assert second == (
        "also: 1 of 1 job of lane 'send:acme' runs, the most its cap allows (set by ops at run time: provider slow): "
        f"{held.id} on host:1"
    )
    why = json.loads(told(fresh, "why", job.id, "--json"))
    assert (why["gate"], [other["gate"] for other in why["others"]]) == ("paused", ["cap"])
    assert why["facts"]["holders"] == [{"id": held.id, "worker": "host:1"}]
    assert why["facts"]["suspect"] is False


def test_stats_count_by_state_queue_and_reason(stock):
    text = told(stock, "stats")
    for state, count in {"ready": 2, "scheduled": 4, "running": 1, "waiting": 1, "dead": 3}.items():
        assert re.search(rf"^{state} +{count}$", text, re.MULTILINE)
    done = r"1 alive; 1 of 4 slots busy; 10 succeeded and 2 failed since they started \(as of the last beat, \S+ ago\)"
    assert re.search(done, text)
    assert re.search(r"^3 +boom .* ago +attempts used up$", text, re.MULTILINE)
    stats = json.loads(told(stock, "stats", "--json"))
    assert stats["states"] == {"ready": 2, "scheduled": 4, "running": 1, "waiting": 1, "dead": 3}
    assert stats["workers"]["slots"] == 4
    assert stats["beat_at"] <= stats["at"]
    assert [pause["name"] for pause in stats["paused"]] == ["mail"]


def test_a_count_that_was_given_up_on_says_so(empty):
    empty.enqueue("many", 10_500)
    assert re.search(r"^ready +more than 10,000$", empty.say("stats").stdout, re.MULTILINE)
    assert re.search(r"^default +10,000\+ ", empty.say("queues", "list").stdout, re.MULTILINE)
    assert "ready 10,000+" in empty.say("top", "--once").stdout
    would = empty.say("jobs", "cancel", "--all", "--dry-run").stdout
    assert would.startswith("would cancel more than 10,000 jobs; nothing was changed\n")


def test_every_look_answers_the_same_on_every_store(fresh, stock):
    for words in (*READING, ["dead", "list", "--partial", "--error", "no", "--since", "1h"]):
        here, there = (json.loads(one.say(*words, "--json").stdout) for one in (fresh, stock))
        assert shape(here) == shape(there), words
    for words in (["jobs", "show"], ["why"]):
        assert fresh.say(*words, fresh.one("dead")).exit_code == 0


# The live picture


def test_top_once_shows_queues_workers_running_and_dead_jobs(stock):
    text = told(stock, "top", "--once")
    assert "running 1/4  ready 2  scheduled 4  waiting 1  dead 3  done -/s  failed -/s  workers 1" in text
    for line in (
        r"^mail +0 +3 ",
        r"^w1 +here +alive, beat \S+ ago +1/4 ",
        r" long +default +1/5 .* 40%, parsing$",
        r" boom .*way$",
    ):
        assert re.search(line, text, re.MULTILINE), line
    look = json.loads(told(stock, "top", "--once", "--json"))
    assert (look["dead_count"], look["running"][0]["task"], look["succeeded_rate"]) == (3, "long", None)


@pytest.mark.process
def test_top_prints_one_line_a_look_where_there_is_no_terminal_and_ctrl_c_ends_it(stock):
    with Watch("top", "--interval", "100ms", url=stock.url) as top:
        for _ in range(3):
            assert re.match(r"\d\d:\d\d:\d\d  running 1/4  ready 2  ", top.line())
        top.send(signal.SIGINT)
        assert top.wait() == 0
        assert top.process.stderr.read() == ""


@pytest.mark.process
def test_top_waits_for_a_database_that_goes_away(postgres_url):
    stock = Stock(postgres_url)
    stock.app.close()
    with Watch("top", "--interval", "100ms", "--json", url=stock.url) as top:
        assert "queues" in json.loads(top.line())
        with shut(postgres_url):
            while "error" not in (line := json.loads(top.line())):
                pass
            assert line["code"] in ("store_unavailable", "answer_lost")
            assert not re.match(r"[a-z_]+: ", line["error"])
        while "queues" not in json.loads(top.line()):
            pass


@pytest.mark.process
def test_top_says_on_the_screen_that_the_database_is_away_and_goes_on(postgres_url):
    stock = Stock(postgres_url)
    stock.register("w1")
    stock.app.close()
    with Watch("top", "--interval", "100ms", url=postgres_url, columns=300, terminal=TERMINAL) as top:
        top.until("workers 1")
        with shut(postgres_url):
            seen = top.until("not currently accepting connections")
            assert "w1" in top.until("w1")  # the last picture stays
        top.until("workers 1")
        top.send(signal.SIGINT)
        assert top.wait() == 0
    assert CLOSE not in seen


@pytest.mark.process
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_top_gives_the_terminal_back_however_it_is_stopped(stock, number, code):
    with Watch("top", "--interval", "100ms", url=stock.url, terminal=TERMINAL) as top:
        seen = top.until("w1 ")
        top.send(number)
        assert top.wait() == code
        seen += top.until(CLOSE)
    assert seen.startswith(OPEN)
    frame = re.sub(r"\x1b\[\S*?[A-Za-z]", "", seen.split("\x1b[H")[1])
    assert all(len(line) <= 60 for line in frame.split("\r\n"))
    assert len(frame.split("\r\n")) <= 12


def test_rates_come_from_what_workers_count_between_two_beats():
    rates = Rates()
    assert rates.of([]) == (0, 0)
    assert rates.of([beat(1000, succeeded=10)]) == (None, None)
    assert rates.of([beat(3000, succeeded=30, failed=1)]) == (10.0, 0.5)
    assert rates.of([beat(3000, succeeded=30, failed=1)]) == (10.0, 0.5)  # no beat since: the last rate stands
    assert rates.of([beat(4000, succeeded=30, failed=1), beat(4000, id="new", succeeded=9000)]) == (0, 0)
    assert rates.of([beat(5000, succeeded=31, failed=1, alive=False)]) == (0, 0)


def beat(at: int, **more: Any) -> WorkerRecord:
    known = {"id": "w", "host": "h", "pid": 1, "queues": (), "tasks": (), "beat_ms": 1000, "started_at": 0}
    counts = {"slots": 1, "running": 0, "succeeded": 0, "failed": 0}
    return WorkerRecord(**{**known, **counts, "seen_at": at, "alive": True, **more})


# Changing


def test_jobs_are_cancelled_by_id_and_one_that_is_not_there_does_not_stop_the_others(fresh):
    ready, running, ended = fresh.one("ready"), fresh.one("running"), fresh.one("succeeded")
    answer = say(Path("/"), "jobs", "cancel", ready, NOBODY, running, ended, ready, DULY_URL=fresh.url, USER="eve")
    assert answer.returncode == 3
    assert answer.stderr == f"duly: no job has the id {NOBODY}\n"
    assert answer.stdout.splitlines() == [
        f"{ready}  cancelled",
        f"{running}  asked to stop",
        f"{ended}  had ended",
        "1 cancelled, 1 asked to stop, 1 had ended, 1 not found",
    ]
    assert fresh.state(ready) == "cancelled"
    assert [event.by for event in fresh.run(ops.events(job_id=ready))] == ["eve"]


def test_jobs_are_cancelled_by_filters_after_a_look_at_what_it_would_be(fresh):
    would = told(fresh, "jobs", "cancel", "--queue", "mail", "--dry-run")
    assert would.startswith("would cancel 3 jobs (3 scheduled); nothing was changed\n")
    assert len(fresh.jobs(state="scheduled")) == 4
    assert told(fresh, "jobs", "cancel", "--queue", "mail", "--yes", "--why", "too late") == "3 cancelled\n"
    assert [job.reason for job in fresh.jobs(queue="mail")] == ["too late"] * 3
    everything = json.loads(told(fresh, "jobs", "cancel", "--all", "--yes", "--json"))
    assert everything == {"counts": {"cancelled": 4, "asked to stop": 1}}
    assert {str(job.state) for job in fresh.jobs()} == {"running", "succeeded", "partial", "dead", "cancelled"}


def test_what_stays_in_the_listing_is_not_walked_for_ever(empty):
    empty.enqueue("long", 1200)
    assert len(empty.claim()) == 1200
    assert empty.say("jobs", "cancel", "--state", "running", "--yes").stdout == "1,200 asked to stop\n"


def test_a_limit_bounds_what_is_changed_and_says_that_there_may_be_more(fresh):
    answer = fresh.say("jobs", "cancel", "--all", "--limit", "3", "--yes")
    assert answer.stdout == "3 cancelled\n"
    assert "stopped at --limit 3; there may be more" in answer.stderr


def test_retry_makes_due_what_has_a_future_and_replays_what_has_ended(fresh):
    ids = {state: fresh.one(state) for state in ("scheduled", "waiting", "ready", "dead", "cancelled")}
    lines = told(fresh, "jobs", "retry", *ids.values()).splitlines()
    outcomes = [line.split("  ")[1] for line in lines[:-1]]
    assert outcomes[:3] == ["made due", "made due", "due already"]
    assert fresh.state(ids["scheduled"]) == fresh.state(ids["waiting"]) == "ready"
    for outcome, state in zip(outcomes[3:], ("dead", "cancelled"), strict=True):
        new = re.fullmatch(r"replayed as (\S+)", outcome)[1]
        assert fresh.app.get(new).replay_of == ids[state]
    assert lines[-1] == "2 made due, 2 replayed, 1 due already"
    assert f"had been replayed as {new}" in fresh.say("jobs", "retry", ids["cancelled"]).stdout


def test_retry_of_what_runs_or_has_succeeded_is_refused_with_exit_code_1(fresh):
    answer = fresh.say("jobs", "retry", fresh.one("running"), fresh.one("succeeded"), "--json")
    assert answer.exit_code == 1
    assert json.loads(answer.stdout)["counts"] == {"running": 1, "not run again: it has succeeded": 1}


def test_retry_by_filters_means_scheduled_and_waiting_jobs_unless_a_state_is_given(fresh):
    assert told(fresh, "jobs", "retry", "--all", "--yes") == "5 made due\n"
    assert told(fresh, "jobs", "retry", "--task", "boom", "--yes") == "nothing to retry: no job matches\n"
    assert told(fresh, "jobs", "retry", "--task", "boom", "--state", "dead", "--yes") == "3 replayed\n"


def test_a_dead_job_is_replayed_once_with_who_and_why(fresh):
    job_id = fresh.one("dead")
    first = told(fresh, "dead", "replay", job_id, "--by", "ann", "--why", "server is back").split()
    assert first[:3] == [job_id, "replayed", "as"]
    second = told(fresh, "dead", "replay", job_id).split()
    assert second == [job_id, "had", "been", "replayed", "as", first[-1]]
    [event] = [event for event in fresh.run(ops.events(job_id=job_id)) if event.name == "job.replayed"]
    assert (event.by, event.why) == ("ann", "server is back")
    assert [job["id"] for job in json.loads(fresh.say("dead", "list", "--all", "--json").stdout)].count(job_id) == 1
    assert job_id not in fresh.say("dead", "list").stdout


def test_a_dead_job_is_replayed_with_a_payload_that_fits_its_task(fresh, tmp_path):
    (tmp_path / "tasks.py").write_text(
        "from duly import Duly\napp = Duly()\n@app.task\ndef boom(n: int) -> None: ...\n"
    )
    job_id = fresh.one("dead")
    replay = ["dead", "replay", job_id, "--app", "tasks:app", "--payload"]
    refused = say(tmp_path, *replay, '{"n": "two"}', DULY_URL=fresh.url)
    assert "argument `n`: expected `int`" in complaint(refused, 2)
    assert fresh.app.get(job_id).replayed_as is None
    answer = say(tmp_path, *replay, '{"n": 2}', "--key", "two", DULY_URL=fresh.url)
    job = fresh.app.get(answer.stdout.split()[-1])
    assert (job.payload, job.key) == ({"n": 2}, "two")


@pytest.mark.parametrize(
    ("state", "said"),
    [("succeeded", "it is succeeded; --force replays it all the same"), ("ready", "it is ready and has not ended")],
)
def test_what_is_not_replayed_is_told_with_the_reason(fresh, state, said):
    answer = fresh.say("dead", "replay", fresh.one(state))
    assert answer.exit_code == 1
    assert f"not replayed: {said}" in answer.stdout


def test_force_replays_a_success(fresh):
    assert fresh.say("dead", "replay", fresh.one("succeeded"), "--force").exit_code == 0


def test_replay_all_counts_what_cannot_be_replayed_and_goes_on(fresh):
    [keyed] = fresh.enqueue("boom", key="one", priority=9)
    fresh.run(ops.cancel([job.id for job in fresh.jobs(state="ready") if job.id != keyed]))
    fresh.end([keyed], dead())
    fresh.enqueue("boom", key="one", delay_ms=60_000)
    assert "would replay 4 jobs (4 dead)" in told(fresh, "dead", "replay-all", "--dry-run")
    assert told(fresh, "dead", "replay-all", "--limit", "2", "--yes") == "2 replayed\n"
    rest = told(fresh, "dead", "replay-all", "--task", "boom", "--yes")
    assert rest == "1 replayed, 1 not replayed: another job has its key\n"


def test_what_dies_after_replay_all_began_is_not_replayed_by_it(empty):
    empty.end(empty.enqueue("boom"), dead(), now=empty.run(ops.clock()) + 600_000)
    assert empty.say("dead", "replay-all", "--yes").stdout == "nothing to replay: no job matches\n"


def test_thousands_of_dead_jobs_are_replayed_in_chunks(empty):
    empty.end(empty.enqueue("boom", 1700), dead())
    assert told(empty, "dead", "replay-all", "--limit", "1600", "--yes") == "1,600 replayed\n"
    assert len(empty.jobs(state="ready", limit=2000)) == 1600


def test_dead_and_partial_jobs_are_resolved_with_a_reason(fresh):
    job_id = fresh.one("dead")
    assert told(fresh, "dead", "resolve", job_id, "--why", "paid by hand") == f"{job_id}  resolved\n"
    assert (fresh.app.get(job_id).resolved_by, fresh.app.get(job_id).resolved_why) == ("eve", "paid by hand")
    again = fresh.say("dead", "resolve", job_id, fresh.one("ready"), "--why", "x")
    assert again.exit_code == 1
    assert "not resolved: it was resolved before" in again.stdout
    assert "not resolved: it is ready" in again.stdout
    assert fresh.say("dead", "resolve", "--all", "--partial", "--why", "x", "--yes").stdout == "3 resolved\n"


def test_what_would_be_resolved_is_told_without_a_reason(fresh):
    assert "would resolve 3 jobs" in told(fresh, "dead", "resolve", "--all", "--dry-run")
    assert "would resolve, it is dead" in told(fresh, "dead", "resolve", fresh.one("dead"), "--dry-run")
    assert len(json.loads(fresh.say("dead", "list", "--json").stdout)) == 3


@pytest.mark.process
def test_a_bar_does_not_pretend_to_know_a_count_that_was_given_up_on(empty):
    empty.enqueue("many", 10_700)
    with Watch("jobs", "cancel", "--all", "--yes", url=empty.url, terminal=TERMINAL) as command:
        seen = command.until("10,700 cancelled")
    assert re.search(r"\b10500\b", seen)
    assert "10001" not in seen
    assert "%" not in seen


def test_dead_jobs_are_purged_and_nothing_else_is(fresh):
    job_id, partial = fresh.one("dead"), fresh.one("partial")
    unasked = fresh.say("dead", "purge", job_id)
    assert (unasked.exit_code, fresh.state(job_id)) == (2, "dead")
    assert told(fresh, "dead", "purge", job_id, "--yes") == f"{job_id}  purged\n"
    assert fresh.app.get(job_id) is None
    assert "not purged: it is partial" in fresh.say("dead", "purge", partial, "--yes").stdout
    assert "would purge 2 jobs" in fresh.say("dead", "purge", "--task", "boom", "--dry-run").stdout
    fresh.say("dead", "resolve", fresh.one("dead"), "--why", "x")
    assert fresh.say("dead", "purge", "--all", "--yes").stdout == "1 purged\n"
    assert fresh.say("dead", "purge", "--all", "--settled", "--yes").stdout == "1 purged\n"
    assert fresh.state(partial) == "partial"


@pytest.mark.process
def test_who_is_asked_and_says_no_changes_nothing(fresh):
    assert "Cancel 8 jobs? [y/N]" in asked_and_said_no("jobs", "cancel", "--all", url=fresh.url)
    assert len(fresh.jobs(state="ready")) == 2


def test_a_queue_is_paused_for_a_time_and_resumed(fresh):
    assert "queue 'default' is paused by eve" in told(fresh, "queues", "pause", "default", "--for", "1h")
    [pause] = [pause for pause in fresh.app.paused() if pause.name == "default"]
    assert pause.paused_until - pause.paused_at == 3_600_000
    assert told(fresh, "queues", "resume", "default") == "queue 'default' is resumed\n"
    assert [pause.name for pause in fresh.app.paused()] == ["mail"]
    again = fresh.say("queues", "resume", "maill")
    assert (again.exit_code, again.stdout) == (1, "")
    assert again.stderr == "duly: queue 'maill' was not paused: did you mean 'mail'?\n"


def test_b09_a_queue_is_limited_and_told_so_in_the_list(fresh):
    limits = ("--depth", "10_000", "--ageing", "90s", "--retry-share", "0.2")
    answer = told(fresh, "queues", "limit", "default", *limits, "--why", "an outage")
    assert answer == "queue 'default' has limits: depth 10,000, ageing 1m 30s, retries 20 %\n"
    [limit] = fresh.app.limits()
    assert (limit.set_by, limit.set_why) == ("eve", "an outage")
    listed = told(fresh, "queues", "list")
    assert re.search(r"^default .* depth 4 of 10,000, ageing 1m 30s, retries 20 %$", listed, re.MULTILINE)
    [answer] = [one for one in json.loads(told(fresh, "queues", "list", "--json")) if one["name"] == "default"]
    assert (answer["limits"]["max_depth"], answer["limits"]["retry_share"]) == (10_000, 0.2)
    told(fresh, "queues", "limit", "default", "--depth", "off", "--ageing", "off")
    answer = json.loads(told(fresh, "queues", "limit", "default", "--retry-share", "0", "--json"))
    assert (answer["max_depth"], answer["ageing_ms"], answer["retry_share"]) == (None, None, 0)
    answer = told(fresh, "queues", "limit", "default", "--retry-share", "off")
    assert answer == "queue 'default' has no limits\n"


def test_b09_a_queue_that_nobody_knows_is_limited_with_a_warning_and_listed(fresh):
    answer = fresh.say("queues", "limit", "defalt", "--depth", "7")
    assert answer.exit_code == 0
    assert answer.stderr == "duly: no job and no living worker has a queue 'defalt': did you mean 'default'?\n"
    assert re.search(r"^defalt +0 +0 +0 +0 +- +depth 0 of 7$", told(fresh, "queues", "list"), re.MULTILINE)


def test_a_task_is_paused_and_told_among_the_queues(fresh):
    answer = fresh.say("queues", "pause", "boom", "--task", "--why", "it is broken", "--json")
    assert (json.loads(answer.stdout)["kind"], answer.stderr) == ("task", "")
    assert re.search("task 'boom' is paused by eve .*: it is broken", fresh.say("queues", "list").stdout)
    assert json.loads(fresh.say("queues", "resume", "boom", "--task", "--json").stdout)["resumed"] is True


def test_a_name_that_nobody_knows_is_paused_with_a_warning(fresh):
    answer = fresh.say("queues", "pause", "defalt")
    assert answer.exit_code == 0
    assert answer.stderr == "duly: no job and no living worker has a queue 'defalt': did you mean 'default'?\n"
    assert fresh.say("queues", "pause", "default").stderr == ""
    answer = fresh.say("queues", "pause", "bom", "--task")
    assert "did you mean 'boom'?" in answer.stderr


# Mistakes


MISTAKES = [
    Mistake("jobs list --state deed", 2, "'deed' is not one of 'scheduled'"),
    Mistake("jobs list --limit -1", 2, "-1 is not in the range"),
    Mistake(f"jobs list --limit {10**20}", 2, "is not in the range 1<=x<=1000000000"),
    Mistake(f"dead list --limit {10**20}", 2, "is not in the range"),
    Mistake("jobs list --since yesterday", 2, "--since is 'yesterday': give how long ago, as in 2h"),
    Mistake("jobs list --since -2h", 2, "--since is '-2h': give how long ago"),
    Mistake("jobs list --before xyz", 3, "'xyz' is not the id of a job"),
    Mistake("jobs lst", 2, "Did you mean 'list'?"),
    Mistake("jobs show xyz", 3, "'xyz' is not the id of a job: an id is 32 hexadecimal digits"),
    Mistake("jobs show ffffffff", 3, "no job has an id that begins with ffffffff"),
    Mistake(f"jobs show {NOBODY}", 3, f"no job has the id {NOBODY}"),
    Mistake("jobs cancel", 2, "Choose the jobs: name their ids, give filters, or --all"),
    Mistake(f"jobs cancel {NOBODY} --queue mail", 2, "Name jobs or give filters, not both"),
    Mistake("jobs cancel --all", 2, "Cancel 8 jobs? stdin is not a terminal: give --yes, or --dry-run"),
    Mistake("jobs cancel --state dead", 2, "'dead' is not one of"),
    Mistake("jobs cancel --all --limit 0 --yes", 2, "0 is not in the range"),
    Mistake(f"jobs cancel {NOBODY}", 3, f"no job has the id {NOBODY}"),
    Mistake("jobs retry", 2, "Choose the jobs"),
    Mistake("jobs retry --state succeeded --yes", 2, "'succeeded' is not one of"),
    Mistake("jobs retry --all", 2, "Retry 5 jobs? stdin is not a terminal"),
    Mistake("dead list --until tomorrow", 2, "--until is 'tomorrow'"),
    Mistake(f"dead show {NOBODY}", 3, f"no job has the id {NOBODY}"),
    Mistake("dead replay", 2, "Missing argument 'ID…'"),
    Mistake(f"dead replay {NOBODY}", 3, f"no job has the id {NOBODY}"),
    Mistake(f"dead replay {NOBODY} --payload [1]", 2, "--payload is no JSON object"),
    Mistake(f"dead replay {NOBODY} --payload {{", 2, "--payload is not JSON"),
    Mistake(f'dead replay {NOBODY} --payload {{"a":{"1" * 4301}}}', 2, "has a number of more than 4,300 digits"),
    Mistake(f"dead replay {NOBODY} --payload {'[' * 9999}", 2, "--payload is not JSON that can be used: it is nested"),
    Mistake(f'dead replay {NOBODY} --payload {{"a":1,"a":2}}', 2, "--payload has the name 'a' twice"),
    Mistake(f'dead replay {NOBODY} --payload {{"a":NaN}}', 2, "--payload has NaN in it"),
    Mistake(f"dead replay {NOBODY} {NOBODY} --key k", 2, "are for one job"),
    Mistake("dead replay-all", 2, "Replay 3 jobs? stdin is not a terminal"),
    Mistake("dead resolve --all --yes", 2, "Missing option '--why'"),
    Mistake("dead resolve --all --yes --why=", 2, "--why is empty: write for the record why it is settled"),
    Mistake("dead resolve --partial --why x", 2, "Choose the jobs"),
    Mistake("dead purge", 2, "Choose the jobs"),
    Mistake("dead purge --all", 2, "Purge 3 jobs? stdin is not a terminal"),
    Mistake("queues pause", 2, "Missing argument 'NAME'"),
    Mistake("queues pause mail --for 1x", 2, "--for is '1x', where 'x' is no unit"),
    Mistake("queues pause mail --for 0", 2, "--for is 0: give a time"),
    Mistake("queues resume default", 1, "queue 'default' was not paused"),
    Mistake("queues limit", 2, "Missing argument 'NAME'"),
    Mistake("queues limit mail", 2, "give a limit: --depth, --ageing, --retry-share"),
    Mistake("queues limit mail --depth few", 2, "--depth is 'few': give a number, or off"),
    Mistake("queues limit mail --depth 0", 2, "depth= is 0: give how many jobs may wait"),
    Mistake("queues limit mail --ageing 1x", 2, "ageing= is '1x', where 'x' is no unit"),
    Mistake("queues limit mail --retry-share 20", 2, "retry_share= is 20.0: give a share from 0 to 1"),
    Mistake(f"why {NOBODY}", 3, f"no job has the id {NOBODY}"),
    Mistake("top --interval 0", 2, "--interval is '0': give 100ms or more"),
    Mistake("top --interval soon", 2, "--interval is 'soon'"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.words)
def test_a_mistake_is_answered_in_a_line_and_nothing_is_changed(stock, mistake):
    before = [stock.jobs(), stock.app.paused()]
    answer_to(mistake, stock.say(*mistake.words.split()))
    assert [stock.jobs(), stock.app.paused()] == before


def test_missing_tables_are_answered_with_what_makes_them(tmp_path, postgres):
    url = postgres.new_database()
    for words in (["jobs", "list"], ["stats"], ["top", "--once"]):
        assert "duly migrate" in complaint(say(tmp_path, *words, "--url", url), 1)
    postgres.drop(url)


def test_an_app_names_the_database_and_a_schema_given_beside_it_counts(tmp_path, stock):
    (tmp_path / "tasks.py").write_text(f"from duly import Duly\napp = Duly({stock.url!r})\n")
    assert "boom" in say(tmp_path, "jobs", "list", "--app", "tasks:app").stdout
    (tmp_path / "far.py").write_text("from duly import Duly\napp = Duly('postgresql://nobody@127.0.0.1:1/db')\n")
    answer = say(tmp_path, "jobs", "list", "--app", "far:app", "--schema", "NOT VALID")
    assert "NOT VALID" in complaint(answer, 2)


def test_what_was_replayed_does_not_use_up_the_limit_of_the_next_retry(fresh):
    words = ["jobs", "retry", "--state", "dead", "--limit", "2", "--yes"]
    assert fresh.say(*words).stdout == "2 replayed\n"
    assert fresh.say(*words[:-1], "--dry-run").stdout.startswith("would retry 1 job")
    assert fresh.say(*words).stdout == "1 replayed\n"
    assert fresh.say(*words).stdout == "nothing to retry: no job matches\n"


@pytest.mark.parametrize(
    ("verb", "state", "outcome", "code"),
    [
        ("retry", "succeeded", "not run again: it has succeeded", 1),
        ("retry", "running", "running", 1),
        ("retry", "ready", "due already", 0),
        ("retry", "scheduled", "would retry, it is scheduled", 0),
        ("cancel", "succeeded", "had ended", 0),
        ("cancel", "ready", "would cancel, it is ready", 0),
    ],
)
def test_a_dry_run_of_a_named_job_says_what_would_become_of_it(stock, verb, state, outcome, code):
    answer = stock.say("jobs", verb, stock.one(state), "--dry-run")
    assert (answer.stdout.split("  ")[1].strip(), answer.exit_code) == (outcome, code)


@pytest.mark.process
@pytest.mark.parametrize(
    "words", [["jobs", "list"], ["jobs", "cancel", "--help"], ["jobs", "cancel", "--all", "--dry-run"]]
)
def test_a_terminal_that_knows_few_letters_gets_others_instead(stock, tmp_path, words):
    answer = run(tmp_path, *words, DULY_URL=stock.url, PYTHONIOENCODING="latin-1:strict", PYTHONUTF8="0")
    assert (answer.returncode, answer.stderr) == (0, "")


def test_a_reason_that_a_terminal_would_obey_is_not_printed_raw(empty):
    empty.enqueue("mail")
    for words in (["queues", "pause", "default", "--why", "\x1b[2Jgone"], ["doctor"]):
        assert "\x1b[2J" not in empty.say(*words, color=True).stdout
