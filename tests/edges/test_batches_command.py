"""`duly batches`, through the real program: looking at batches, watching one to its end, and cancelling the rest."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

from duly.app.batches import Batch
from duly.cli.batch_watch import Snapshot, Speed, bar_line
from duly.model import BatchRecord, Change, State
from duly.store import ops
from duly.store.op import Finish
from tests.edges.programs import NOBODY, complaint, run
from tests.edges.stock import (
    Mistake,
    Stock,
    answer_to,
    asked_and_said_no,
    dead,
    empty_of,
    fresh_of,
    shape,
    shut,
    to_look_at,
    told,
)
from tests.edges.watch import TERMINAL, Watch

FIELDS = set(BatchRecord.__struct_fields__)
SUCCESS = Change(State.SUCCEEDED, result="1")


class Lot(Stock):
    """A database with a batch of every kind."""

    def __init__(self, url: str) -> None:
        super().__init__(url)

        @self.app.task(max_attempts=1)
        def work(n: int) -> int:
            return n

        @self.app.task(queue="told")
        def tell_me() -> None: ...

        self.work, self.tell_me = work, tell_me
        self.ids: dict[str, str] = {}

    def fill(self) -> Self:
        self.batch("good", 3)
        self.finish(3, SUCCESS)
        self.batch("fair", 4, ok_at=0.75)
        self.finish(3, SUCCESS)
        self.finish(1, dead("no \x1b[31mway"))
        self.batch("bad", 2)
        self.finish(1, SUCCESS)
        self.finish(1, dead())
        self.batch("none", 0)
        self.batch("import \x1b[2J", 10, on_complete=self.tell_me)
        self.finish(3, SUCCESS)
        self.finish(1, dead())
        self.running = self.claim(1)
        self.broken_off("nightly", 2, key="monday")
        self.ids["import"] = self.ids["import \x1b[2J"]
        self.register("w1")
        return self

    def batch(self, name: str, count: int, **options: Any) -> Batch:
        with self.app.batch(name, **options) as batch:
            batch.fill(self.work.call(n) for n in range(count))
        self.ids[name] = batch.id
        return batch

    def broken_off(self, name: str, count: int, **options: Any) -> None:
        with suppress(RuntimeError), self.app.batch(name, **options) as batch:
            self.ids[name] = batch.id
            batch.fill(self.work.call(n) for n in range(count))
            raise RuntimeError

    def finish(self, count: int, change: Change) -> None:
        """Claim the next jobs and end them."""
        claimed = self.claim(count)
        assert len(claimed) == count
        self.run(ops.finish([Finish(job, change) for job in claimed]))

    def record(self, name: str) -> BatchRecord:
        return self.app.batches.get(self.ids[name]).progress()

    def everything(self) -> Any:
        return self.app.batches.list(), self.jobs(limit=1000), self.run(ops.events(limit=1000))


lot = to_look_at(Lot)
fresh = fresh_of(Lot)
empty = empty_of(Lot)


def answered(lot: Lot, *words: str, code: int = 0) -> Any:
    """Run the real program and read its JSON."""
    return json.loads(told(lot, "batches", *words, "--json", code=code))


# Looking


def test_the_list_is_newest_first_and_says_how_far_each_is(lot):
    lines = told(lot, "batches", "list").splitlines()
    assert lines[0].split() == ["id", "state", "done", "dead", "name", "jobs", "running", "created", "key"]
    rows = [re.split(r"  +", line) for line in lines[1:]]
    assert [row[1:7] for row in rows] == [
        ["unsealed", "0%", "0", "nightly", "2", "0"],
        ["open", "40%", "1", "import �[2J", "10", "1"],
        ["complete", "100%", "0", "none", "0", "0"],
        ["complete", "100%", "1", "bad", "2", "0"],
        ["complete", "100%", "1", "fair", "4", "0"],
        ["complete", "100%", "0", "good", "3", "0"],
    ]
    assert (rows[0][0], rows[0][8]) == (lot.ids["nightly"], "monday")


def test_the_list_in_json_has_the_fields_of_the_model_and_what_follows_from_them(lot):
    listed = answered(lot, "list")
    assert all(set(one) == FIELDS | {"state", "success"} for one in listed)
    assert [(one["state"], one["success"]) for one in listed] == [
        ("unsealed", None), ("open", None), ("complete", True), ("complete", False), ("complete", True),
        ("complete", True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        (["--active"], ["nightly", "import"]),
        (["--name", "fair"], ["fair"]),
        (["--name", "fair", "--active"], []),
        (["--limit", "1"], ["nightly"]),
    ],
)
def test_batches_are_listed_by_filters(lot, filters, names):
    listed = json.loads(lot.say("batches", "list", *filters, "--json").stdout)
    assert [one["id"] for one in listed] == [lot.ids[name] for name in names]


def test_the_pages_of_a_list_make_up_the_whole(lot):
    pages, before = [], []
    while True:
        answer = lot.say("batches", "list", "--limit", "4", *before)
        pages += re.findall(r"^\S{36}", answer.stdout, re.MULTILINE)
        more = re.search(r"there are more: (--before) (\S+)", answer.stderr)
        if more is None:
            break
        before = [*more.groups()]
    assert pages == [one.id for one in lot.app.batches.list()]


def test_a_list_without_batches_says_so_and_what_was_meant(lot, empty):
    assert empty.say("batches", "list").stdout == "there are no batches yet: with app.batch(…) makes one\n"
    assert empty.say("batches", "list", "--active").stdout == "no batch matches these filters\n"
    assert empty.say("batches", "list", "--json").stdout == "[]\n"
    assert lot.say("batches", "list", "--name", "nightli").stdout == (
        "no batch matches these filters: did you mean 'nightly'?\n"
    )


@pytest.mark.process
def test_eighty_columns_show_what_one_looks_for_first(lot):
    with Watch("batches", "list", url=lot.url, columns=80, terminal=TERMINAL) as listing:
        lines = listing.until("  good ").splitlines()
        assert listing.wait() == 0
    assert re.search(r"id +state +done +dead +name", lines[0])
    assert all(len(re.sub(r"\x1b\[\d*m", "", line)) <= 80 for line in lines)


def test_one_is_shown_with_its_counts_and_times(lot):
    text = told(lot, "batches", "show", lot.ids["import"])
    for line in (
        r"name +import .\[2J",
        r"state +open",
        r"done +40%",
        r"total +10",
        r"pending +5",
        r"running +1",
        r"succeeded +3",
        r"dead +1",
        r"created_at +\S+ \S+ UTC \(.* ago\)",
        r"first_dead_at +\S+ \S+ UTC \(.* ago\)",
        r"ok_at +1",
    ):
        assert re.search(f"^{line}$", text, re.MULTILINE), line
    assert not re.search(r"^(key|completed_at|success)", text, re.MULTILINE)
    fair = told(lot, "batches", "show", lot.ids["fair"])
    assert re.search(r"^ok_at +0\.75\nsuccess +yes$", fair, re.MULTILINE)
    assert re.search(r"^success +no$", told(lot, "batches", "show", lot.ids["bad"]), re.MULTILINE)
    shown = answered(lot, "show", lot.ids["import"])
    assert set(shown) == FIELDS | {"state", "success"}
    assert (shown["percent"], shown["pending"]) == (40.0, 5)


def test_one_that_is_empty_is_complete_and_a_success(lot):
    text = told(lot, "batches", "show", lot.ids["none"])
    assert re.search(r"^state +complete\ndone +100%\ntotal +0$", text, re.MULTILINE)
    assert re.search(r"^success +yes$", text, re.MULTILINE)


def test_one_that_is_not_sealed_or_in_which_jobs_died_is_shown_with_what_to_do(lot):
    nightly, bad = lot.ids["nightly"], lot.ids["bad"]
    assert lot.say("batches", "show", nightly).stderr == (
        "duly: it is not sealed: it is being filled, or the filling was interrupted; then fill it on under its key, or "
        f"cancel it: duly batches cancel {nightly}\n"
    )
    assert lot.say("batches", "show", bad).stderr == f"duly: list the dead jobs: duly dead list --batch {bad}\n"
    assert lot.say("batches", "show", lot.ids["good"]).stderr == ""
    assert lot.say("batches", "show", nightly, "--json").stderr == ""


def test_one_without_a_key_cannot_be_filled_on_and_nothing_of_it_is_no_percent(empty):
    empty.broken_off("broken", 0)
    answer = empty.say("batches", "show", empty.ids["broken"])
    assert "the filling was interrupted; then cancel it: duly batches cancel" in answer.stderr
    assert re.search(r"^done +-$", answer.stdout, re.MULTILINE)


def test_the_beginning_of_an_id_will_do_where_it_is_the_only_one(lot):
    batch_id = lot.ids["bad"]
    compact = batch_id.replace("-", "").upper()
    assert json.loads(lot.say("batches", "show", compact[:31], "--json").stdout)["id"] == batch_id
    assert json.loads(lot.say("batches", "show", compact, "--json").stdout)["id"] == batch_id
    several = lot.say("batches", "show", batch_id[:4])
    assert several.exit_code == 2
    assert f"several batches have an id that begins with {batch_id[:4]}: " in several.stderr
    assert several.stderr.endswith(", …. Give more of it\n")


def test_an_id_that_is_that_of_a_job_is_told_as_such(lot):
    job = lot.jobs(batch_id=lot.ids["bad"])[0]
    answer = lot.say("batches", "show", job.id)
    assert (answer.exit_code, answer.stdout) == (3, "")
    assert answer.stderr == f"duly: no batch has the id {job.id}: it is that of a job of batch {lot.ids['bad']}\n"
    callback = lot.enqueue("other", queue="told")[0]
    assert lot.say("batches", "show", callback).stderr.endswith(": it is that of a job\n")


def test_a_name_that_is_given_for_an_id_is_answered_with_the_id(lot):
    answer = lot.say("batches", "show", "nightly")
    assert (answer.exit_code, answer.stdout) == (3, "")
    assert answer.stderr.startswith("duly: 'nightly' is not the id of a batch: an id is 32 hexadecimal digits")
    assert answer.stderr.endswith(f"; the newest batch of that name is {lot.ids['nightly']}\n")


def test_jobs_and_dead_letters_are_listed_by_batch(lot):
    listed = json.loads(lot.say("jobs", "list", "--batch", lot.ids["import"], "--json").stdout)
    assert len(listed) == 10
    assert {job["batch_id"] for job in listed} == {lot.ids["import"]}
    died = json.loads(told(lot, "dead", "list", "--batch", lot.ids["bad"], "--json"))
    assert [job["batch_id"] for job in died] == [lot.ids["bad"]]
    assert lot.say("jobs", "list", "--batch", lot.ids["none"]).stdout == "no job matches these filters\n"
    assert lot.say("dead", "list", "--batch", lot.ids["good"]).stdout == "no dead job matches these filters\n"
    for words in (["jobs", "list"], ["dead", "list"]):
        answer = lot.say(*words, "--batch", "ffffff")
        assert (answer.exit_code, answer.stderr) == (3, "duly: no batch has an id that begins with ffffff\n")


def test_every_look_answers_the_same_on_every_store(fresh, lot):
    for words in (["list"], ["show", "import"], ["watch", "fair"]):
        here, there = (
            json.loads(one.say("batches", *(one.ids.get(word, word) for word in words), "--json").stdout)
            for one in (fresh, lot)
        )
        assert shape(here) == shape(there), words


# Watching


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("good", 0, r"batch 'good' is complete after \S+: 3 succeeded"),
        ("fair", 0, r"batch 'fair' is complete after \S+: 3 succeeded, 1 dead"),
        ("bad", 1, r"batch 'bad' is complete after \S+: 1 succeeded, 1 dead; no success, which takes 100% of them"),
        ("none", 0, r"batch 'none' is complete after \S+: it was empty"),
    ],
)
def test_to_watch_one_that_is_complete_tells_what_became_of_it(lot, name, code, said):
    assert re.fullmatch(f"{said}\n", told(lot, "batches", "watch", lot.ids[name], code=code))


def test_a_share_that_is_met_exactly_is_a_success_as_it_is_for_the_callback(empty):
    empty.batch("share", 25, ok_at=0.28, on_success=empty.tell_me)
    empty.finish(7, SUCCESS)
    empty.finish(18, dead())
    assert len(empty.jobs(task="tell_me")) == 1
    assert empty.say("batches", "watch", empty.ids["share"]).exit_code == 0


def watching(lot: Lot, name: str, *words: str, **how: Any) -> Watch:
    return Watch("batches", "watch", lot.ids[name], "--interval", "100ms", *words, url=lot.url, **how)


@pytest.mark.process
def test_elsewhere_than_on_a_terminal_it_is_a_line_for_every_change_of_the_percent(fresh):
    with watching(fresh, "import") as watch:
        first = r"\d\d:\d\d:\d\d  40%  4/10  -/s  \? left  dead 1  running 1\n"
        assert re.fullmatch(first, watch.line())
        fresh.finish(2, SUCCESS)
        second = r"\d\d:\d\d:\d\d  60%  6/10  \d+\.?\d*/s  [\w ]+ left  dead 1  running 1\n"
        assert re.fullmatch(second, watch.line())
        fresh.run(ops.cancel([job.id for job in fresh.jobs(batch_id=fresh.ids["import"], state="ready")]))
        third = r"\d\d:\d\d:\d\d  90%  9/10  \d+\.?\d*/s  [\w ]+ left  dead 1  cancelled 3  running 1\n"
        assert re.fullmatch(third, watch.line())
        fresh.run(ops.finish([Finish(job, SUCCESS) for job in fresh.running]))
        out, err = watch.ended()
    assert re.fullmatch(
        r"batch 'import .*\[2J' is complete after \S+( \S+)?: 6 succeeded, 1 dead, 3 cancelled; no success, .*\n", out
    )
    assert err == f"duly: list the dead jobs: duly dead list --batch {fresh.ids['import']}\n"
    assert watch.process.returncode == 1


@pytest.mark.process
def test_in_json_it_is_an_object_whenever_anything_has_changed(fresh):
    with watching(fresh, "import", "--json") as watch:
        first = json.loads(watch.line())
        assert set(first) == FIELDS | {"state", "success", "rate", "left_ms"}
        assert (first["percent"], first["state"], first["rate"], first["left_ms"]) == (40.0, "open", None, None)
        fresh.finish(1, SUCCESS)
        second = json.loads(watch.line())
        while second["succeeded"] == 3:  # it was claimed and has not ended yet
            second = json.loads(watch.line())
        assert second["percent"] == 50.0
        assert second["rate"] > 0
        assert second["left_ms"] == pytest.approx(5 / second["rate"] * 1000, abs=1)


@pytest.mark.process
def test_to_watch_one_that_is_being_filled_goes_on_until_it_is_sealed_and_done(empty):
    empty.broken_off("slow", 2)
    empty.register("w1")
    with watching(empty, "slow") as watch:
        assert "  0%  0/2  -/s  not sealed yet  dead 0\n" in watch.line()
        empty.app.batches.get(empty.ids["slow"]).seal()
        assert re.search(r"  0%  0/2  0\.0/s  \? left  dead 0\n", watch.line())
        empty.finish(2, SUCCESS)
        out, err = watch.ended()
        assert watch.process.returncode == 0
    assert re.fullmatch(r"batch 'slow' is complete after \S+( \S+)?: 2 succeeded\n", out)
    assert err == ""


@pytest.mark.process
def test_that_no_worker_is_alive_is_told_once_where_there_is_something_to_run(empty):
    empty.batch("idle", 2)
    with watching(empty, "idle") as watch:
        assert "  0%  0/2" in watch.line()
        empty.finish(2, SUCCESS)
        _, err = watch.ended()
    assert err == "duly: no worker is alive: start one with duly worker module:app\n"
    assert empty.say("batches", "watch", empty.ids["idle"]).stderr == ""


@pytest.mark.process
def test_on_a_terminal_it_is_one_line_with_a_bar_that_is_written_over(fresh):
    words = [
        "batches",
        "watch",
        fresh.ids["import"],
        "--interval",
        "100ms",
    ]
    with Watch(*words, url=fresh.url, columns=100, terminal=TERMINAL) as watch:
        first = watch.until("running 1")
        assert re.search(r"\rimport .\[2J  \[#{13,16}-{20,24}\]  40%  4/10  -/s  \? left  dead 1  running 1", first)
        fresh.run(ops.cancel([job.id for job in fresh.jobs(batch_id=fresh.ids["import"], state="ready")]))
        assert "\r\n" not in watch.until("90%")
        fresh.run(ops.finish([Finish(job, SUCCESS) for job in fresh.running]))
        last = watch.until("--batch")
        assert watch.wait() == 1
    assert re.search(r"\[#+\]  100%  10/10  .*\r\nbatch 'import .*' is complete after", last)


def test_on_a_narrow_terminal_the_line_is_never_broken():
    record = progress(total=1000, succeeded=620, dead=30, running=12, pending=338)
    look = Snapshot(record, 1234.5, 90_000)
    wide = bar_line(look, 200)
    assert wide == f"import  [{'#' * 26}{'-' * 14}]  65%  650/1,000  1,234/s  1m 30s left  dead 30  running 12"
    for width in range(1, 200):
        assert len(bar_line(look, width)) <= width
    assert "\n" not in bar_line(Snapshot(progress(name="two\nlines"), None, None), 200)
    assert "[" not in bar_line(look, 60)
    assert bar_line(look, 20) == "import  65%  650/1,…"
    unsealed = bar_line(Snapshot(progress(sealed_at=None, percent=100.0), None, None), 200)
    assert unsealed == f"import  [{'-' * 40}]  -  0/0  -/s  not sealed yet  dead 0"


def progress(**more: Any) -> BatchRecord:
    times = {
        "created_at": 0,
        "sealed_at": 1,
        "completed_at": None,
        "first_dead_at": None,
        "cancelled_at": None,
        "cancelled_by": None,
        "cancelled_why": None,
    }
    counts = dict.fromkeys(("pending", "running", "succeeded", "partial", "dead", "cancelled", "total"), 0)
    known = {"id": NOBODY, "name": "import", "key": None, "ok_at": 1.0, **times, **counts, **more}
    ended = sum(known[name] for name in ("succeeded", "partial", "dead", "cancelled"))
    return BatchRecord(**{"percent": 100.0 * ended / (known["total"] or 1), **known})


def test_what_has_not_ended_is_never_told_as_all():
    almost = progress(total=1_000_000, succeeded=999_999, running=1)
    assert "99.9%" in bar_line(Snapshot(almost, 1.0, 1000), 200)


def test_the_rate_is_that_of_the_last_seconds_and_the_time_left_follows_from_it():
    speed = Speed()

    def at(second: float, succeeded: int, **more: Any) -> tuple[float | None, int | None]:
        record = progress(total=1000, succeeded=succeeded, pending=1000 - succeeded, **more)
        look = speed.add(record, second)
        return look.rate, look.left_ms

    assert at(0, 0) == (None, None)
    assert at(5, 50) == (10, 95_000)
    assert at(10, 100) == (10, 90_000)
    assert at(20, 100) == (0, None)  # nothing has ended for ten seconds
    assert at(30, 700) == (60, 5_000)
    assert at(31, 400) == (None, None)  # replays have reopened some
    assert at(32, 500) == (100, 5_000)
    assert at(33, 600, sealed_at=None) == (100, None)  # nobody knows how much is to come


@pytest.mark.process
@pytest.mark.parametrize("words", [[], ["--json"]])
def test_ctrl_c_ends_it_quietly_and_not_as_if_it_were_complete(lot, words):
    with watching(lot, "import", *words) as watch:
        watch.line()
        watch.send(signal.SIGINT)
        out, err = watch.ended()
    assert (watch.process.returncode, out, err) == (130, "", "")


@pytest.mark.process
def test_ctrl_c_on_a_terminal_leaves_the_bar_and_goes_on_below_it(lot):
    with Watch("batches", "watch", lot.ids["import"], url=lot.url, terminal=TERMINAL) as watch:
        watch.until("40%")
        watch.send(signal.SIGINT)
        assert watch.until("\n").endswith("\r\n")
        assert watch.wait() == 130


@pytest.mark.process
def test_a_dumb_terminal_gets_plain_lines(lot):
    words = [
        "batches",
        "watch",
        lot.ids["import"],
    ]
    with Watch(*words, url=lot.url, TERM="dumb", terminal=TERMINAL) as watch:
        seen = watch.until("running 1\r\n")
        watch.send(signal.SIGINT)
        assert watch.wait() == 130
    assert "\x1b" not in seen


@pytest.mark.process
def test_it_waits_for_a_database_that_goes_away(postgres_url):
    lot = Lot(postgres_url)
    batch = lot.batch("import", 1)
    lot.app.close()
    with watching(lot, "import") as lines, watching(lot, "import", "--json") as objects:
        assert "0/1" in lines.line()
        assert json.loads(objects.line())["total"] == 1
        with shut(postgres_url):
            assert not re.search(r"\d\d  [a-z_]+: ", told_away(lines))
            assert set(error := json.loads(objects.line())) == {"error", "code"}
            assert error["code"] in ("store_unavailable", "answer_lost")
        back = Lot(postgres_url)
        back.app.batches.get(batch.id).cancel()
        back.app.close()
        for watch in (lines, objects):
            out, _ = watch.ended()
            assert watch.process.returncode == 1
            assert "complete" in out


def told_away(watch: Watch) -> str:
    line = watch.line()
    assert "%" not in line
    return line


@pytest.mark.process
def test_on_a_terminal_it_says_that_the_database_is_away_and_goes_on(postgres_url):
    lot = Lot(postgres_url)
    lot.batch("import", 1)
    lot.app.close()
    words = [
        "batches",
        "watch",
        lot.ids["import"],
        "--interval",
        "100ms",
    ]
    with Watch(*words, url=postgres_url, columns=300, terminal=TERMINAL) as watch:
        watch.until("0/1")
        with shut(postgres_url):
            watch.until("not currently accepting connections")
        watch.until("0/1")
        watch.send(signal.SIGINT)
        assert watch.wait() == 130


@pytest.mark.process
def test_one_that_is_gone_meanwhile_is_told_so(empty):
    empty.register("w1")
    empty.batch("import", 1)
    with watching(empty, "import") as watch:
        watch.line()
        with sqlite3.connect(empty.url) as conn:
            conn.execute("delete from duly_batch")
        conn.close()
        out, err = watch.ended()
    assert (watch.process.returncode, out) == (3, "")
    assert err == f"duly: no batch has the id {empty.ids['import']}\n"


# Changing


def test_a_dry_run_says_what_would_be_cancelled_and_changes_nothing(fresh):
    before = fresh.everything()
    said = told(fresh, "batches", "cancel", fresh.ids["import"], "--dry-run")
    assert said == "would cancel the rest of batch 'import \\x1b[2J': 6 jobs, 1 running; nothing was changed\n"
    dry = answered(fresh, "cancel", fresh.ids["import"], "--dry-run")
    assert (dry["dry_run"], dry["count"], dry["state"], dry["cancelled"]) == (True, 6, "open", 0)
    assert fresh.everything() == before


def test_the_rest_is_cancelled_and_what_runs_is_asked_to_stop(fresh):
    said = told(fresh, "batches", "cancel", fresh.ids["import"], "--yes", "--by", "bob", "--why", "the wrong file")
    assert said.endswith(": 6 jobs; 1 still running, asked to stop\n")
    record = fresh.record("import")
    assert (record.cancelled, record.running, record.pending, record.complete) == (5, 1, 0, False)
    assert record.succeeded == 3
    recorded = [(one.name, one.by, one.why) for one in fresh.run(ops.events(limit=1000)) if one.by == "bob"]
    assert sorted(recorded) == [
        ("batch.cancelled", "bob", "the wrong file"),
        ("job.cancel_requested", "bob", "the wrong file"),
        *[("job.cancelled", "bob", "the wrong file")] * 5,
    ]
    again = answered(fresh, "cancel", fresh.ids["import"], "--yes")
    assert (again["count"], again["cancelled"], again["state"]) == (0, 5, "open")
    assert fresh.jobs(task="tell_me") == []


def test_one_that_is_not_sealed_is_sealed_and_complete_with_that(fresh):
    done = answered(fresh, "cancel", fresh.ids["nightly"], "--yes")
    assert (done["state"], done["success"], done["count"], done["cancelled"]) == ("complete", False, 2, 2)
    assert fresh.record("nightly").sealed_at is not None
    fresh.broken_off("broken", 0)
    assert told(fresh, "batches", "cancel", fresh.ids["broken"], "--yes") == (
        "cancelled the rest of batch 'broken': 0 jobs\n"
    )
    assert fresh.record("broken").complete


def test_its_callback_is_fired_when_that_completes_it(empty):
    empty.batch("import", 3, on_complete=empty.tell_me)
    assert told(empty, "batches", "cancel", empty.ids["import"], "--yes") == (
        "cancelled the rest of batch 'import': 3 jobs\n"
    )
    assert [str(job.state) for job in empty.jobs(task="tell_me")] == ["ready"]


def test_to_cancel_one_that_is_complete_changes_nothing(fresh):
    before = fresh.everything()
    for how in ([], ["--yes"], ["--dry-run"]):
        said = fresh.say("batches", "cancel", fresh.ids["good"], *how)
        assert (said.exit_code, said.stdout) == (0, "nothing to cancel: batch 'good' is complete\n")
    assert answered(fresh, "cancel", fresh.ids["good"], "--yes")["count"] == 0
    assert fresh.everything() == before


@pytest.mark.process
def test_thousands_are_cancelled_in_chunks_and_a_terminal_sees_how_far_it_is(empty):
    empty.batch("big", 2500)
    with Watch("batches", "cancel", empty.ids["big"], "--yes", url=empty.url, terminal=TERMINAL) as command:
        seen = command.until("cancelled the rest of batch 'big': 2,500 jobs")
    assert re.search(r"cancel +\[#+-+\] +1000/2500", seen)
    assert empty.record("big").cancelled == 2500


@pytest.mark.process
def test_who_is_asked_and_says_no_changes_nothing(fresh):
    before = fresh.everything()
    question = asked_and_said_no("batches", "cancel", fresh.ids["nightly"], url=fresh.url)
    assert "Cancel the rest of batch 'nightly' (2 jobs)? [y/N]" in question
    assert fresh.everything() == before


# Mistakes


MISTAKES = [
    Mistake("lst", 2, "Did you mean 'list'?"),
    Mistake("wach import", 2, "Did you mean 'watch'?"),
    Mistake("list import", 2, "unexpected extra argument"),
    Mistake("list --activ", 2, "No such option '--activ'"),
    Mistake("list --limit 0", 2, "0 is not in the range 1<=x<=1000000000"),
    Mistake("list --before ffff", 3, "duly: no batch has an id that begins with ffff\n"),
    Mistake("show", 2, "Missing argument 'ID'"),
    Mistake("show import good", 2, "unexpected extra argument"),
    Mistake("show ffffff", 3, "duly: no batch has an id that begins with ffffff\n"),
    Mistake("show nightli", 3, "duly: 'nightli' is not the id of a batch: an id is 32 hexadecimal digits"),
    Mistake("show 01a", 3, "'01a' is not the id of a batch"),
    Mistake("show \udcff", 3, "is not the id of a batch"),
    Mistake(f"show {NOBODY}", 3, f"duly: no batch has the id {NOBODY}\n"),
    Mistake(f"watch {NOBODY}", 3, f"duly: no batch has the id {NOBODY}\n"),
    Mistake("watch", 2, "Missing argument 'ID'"),
    Mistake("watch import --interval 0", 2, "--interval is '0': give 100ms or more"),
    Mistake("watch import --interval soon", 2, "--interval is 'soon'"),
    Mistake(f"cancel {NOBODY} --yes", 3, f"duly: no batch has the id {NOBODY}\n"),
    Mistake("cancel", 2, "Missing argument 'ID'"),
    Mistake("cancel nightly", 2, "Cancel the rest of batch 'nightly' (2 jobs)? stdin is not a terminal: give --yes"),
    Mistake("cancel nightly --force", 2, "No such option '--force'"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: ascii(mistake.words))
def test_a_mistake_is_answered_in_a_line_and_nothing_is_changed(lot, mistake):
    before = lot.everything()
    answer_to(mistake, lot.say("batches", *(lot.ids.get(word, word) for word in mistake.words.split())))
    assert lot.everything() == before


@pytest.mark.process
def test_a_wrong_id_is_answered_by_the_real_program_without_a_traceback(lot):
    for words in (["show", NOBODY], ["watch", "ffffff"], ["cancel", NOBODY, "--yes"]):
        assert "no batch has " in complaint(run(Path("/"), "batches", *words, "--url", lot.url), 3)


@pytest.mark.process
def test_a_terminal_that_knows_few_letters_gets_others_instead(lot, tmp_path):
    for words in (["list"], ["list", "--name", "x"], ["show", lot.ids["good"]], ["watch", lot.ids["good"]]):
        environ = {"DULY_URL": lot.url, "PYTHONIOENCODING": "latin-1:strict", "PYTHONUTF8": "0"}
        answer = run(tmp_path, "batches", *words, **environ)
        assert (answer.returncode, answer.stderr) == (0, "")
