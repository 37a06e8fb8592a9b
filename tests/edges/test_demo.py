"""`duly demo`, through the real program: on a terminal, in a pipe, interrupted, disturbed."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import itertools
import json
import os
import pty
import re
import select
import shlex
import signal
import sqlite3
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from duly import Duly

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.xdist_group("demo")]

DULY = str(Path(sys.executable).parent / "duly")
PATIENCE = 90
HOSTILE = {
    "DULY_URL": "postgresql://nobody@127.0.0.1:1/none",
    "DULY_POLL": "never",
    "DULY_QUEUES": "others",
    "DULY_APP": "no.such:app",
    "DULY_DEMO_DB": "/nowhere/demo.db",
}


def surroundings(folder: Path, **more: str) -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DULY_") and name not in ("HOME", "NO_COLOR", "COLUMNS", "LINES")
    } | {"TMPDIR": str(folder), "TERM": "xterm", **more}


@contextlib.contextmanager
def piped(folder: Path, temporary: Path, *words: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """Run a demo in a pipe; whatever happens, it has ended in the end."""
    demo = subprocess.Popen(
        [DULY, "demo", *words],
        cwd=folder,
        env=surroundings(temporary, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield demo
    finally:
        demo.kill()
        demo.communicate()


def read_until(demo: subprocess.Popen[str], text: str) -> str:
    assert demo.stdout is not None
    said = ""
    for line in demo.stdout:
        said += line
        if text in line:
            return said
    raise AssertionError(f"{text!r} was not said, but: {said}")


def where(said: str) -> Path:
    return Path(re.findall(r"\S+/demo\.db", said)[0])


def processes_in(folder: Path) -> list[str]:
    """List the processes that work below a folder, children of workers too."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "cwd").startswith(f"{folder}/") and (process / "cmdline").read_text():
                found.append(f"{process.name} {(process / 'cmdline').read_text()}".replace("\0", " "))
    return found


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> Iterator[dict[str, subprocess.CompletedProcess[str]]]:
    """One whole demo of each form without a terminal, beside each other."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "duly.toml").write_text('url = "toml.db"\npoll = "never"\n')
    folder.chmod(0o500)
    kept = tmp_path_factory.mktemp("json")
    with (
        # In a folder and with variables that are meant for others, and without a home.
        piped(folder, tmp_path_factory.mktemp("temporary"), **HOSTILE) as plain,
        piped(kept, kept, "--json", "--keep", "kept") as as_json,
        piped(kept, kept, "--keep", "disturbed") as disturbed,
    ):
        disturb(disturbed)
        running = {"plain": plain, "json": as_json, "disturbed": disturbed}
        said = {form: demo.communicate(timeout=PATIENCE)[0] for form, demo in running.items()}
    yield {form: subprocess.CompletedProcess(demo.args, demo.returncode, said[form]) for form, demo in running.items()}
    folder.chmod(0o700)


def disturb(demo: subprocess.Popen[str]) -> None:
    """Add a job that the demo does not know."""
    app = Duly(where(read_until(demo, "demo.db")))

    @app.task
    def tick(n: int) -> None: ...

    read_until(demo, "are here")
    tick.enqueue(1)
    app.close()


@pytest.fixture
def finished(demos) -> subprocess.CompletedProcess[str]:
    return demos["plain"]


def test_it_tells_its_story_in_plain_lines_where_there_is_no_terminal(finished):
    assert finished.returncode == 0, finished
    assert "\x1b" not in finished.stdout
    story = [
        r"^1\. Jobs are enqueued",
        r" 10 receipt +20 calls: 10 repeat a key",
        r"^2\. Two workers",
        r" s  flaky_import failed \(ConnectionError\)",
        r" s  poison: all 4 are dead",
        r"^3\. A worker is killed",
        r" s  worker-[12] is killed \(SIGKILL\) in part \d+ of 10 of slow_report; it held [1-4] jobs?; the last lease",
        r" s  the leases have expired",
        r" s  worker-[12] has rescued [1-4] jobs?: ",
        r" s  slow_report succeeded after all",
        r"^4\. How fast",
        r"^It adds up: 1,333 jobs",
    ]
    places = [re.search(line, finished.stdout, re.MULTILINE) for line in story]
    assert None not in places, [line for line, place in zip(story, places, strict=True) if place is None]
    starts = [place.start() for place in places if place]
    assert starts == sorted(starts)
    told = re.findall(r"^ *([\d.]+) s  [\d,]+ of [\d,]+ jobs have ended", finished.stdout, re.MULTILINE)
    assert len(told) > 3
    assert all(float(after) - float(before) > 0.8 for before, after in itertools.pairwise(told))


def test_its_numbers_add_up_and_are_those_of_the_database(finished):
    figure = {
        name: int(value.replace(",", ""))
        for name, value in re.findall(r"^(\w+) +([\d,]+)(?:  |$)", finished.stdout, re.MULTILINE)
    }
    assert figure["enqueued"] == figure["succeeded"] + figure["dead"] == 1333
    successes, failures, cut_off = re.findall(
        r"= ([\d,]+) successes \+ (\d+) failures \+ (\d+) cut off", finished.stdout
    )[0]
    assert figure["succeeded"] == int(successes.replace(",", ""))
    assert figure["attempts"] == figure["succeeded"] + int(failures) + int(cut_off)
    assert figure["rescued"] == int(cut_off) >= 1
    conn = sqlite3.connect(where(finished.stdout))
    states = dict(conn.execute("select state, count(*) from duly_jobs group by state"))
    attempts = conn.execute("select sum(attempt) from duly_jobs").fetchone()[0]
    conn.close()
    assert states == {"succeeded": figure["succeeded"], "dead": figure["dead"]}
    assert attempts == figure["attempts"]


def test_in_json_it_tells_no_story_and_its_numbers_add_up_too(demos):
    assert demos["json"].returncode == 0
    said = json.loads(demos["json"].stdout)
    assert said["wrong"] == []
    assert said["enqueued"] == said["succeeded"] + said["dead"] == 1333
    assert said["attempts"] == said["succeeded"] + said["failed"] + said["crashed"]
    assert said["rescued"] == said["crashed"] >= 1
    assert said["database"].endswith("/kept/demo.db")
    assert Path(said["database"]).exists()


def test_the_commands_it_names_in_the_end_work(finished, tmp_path):
    *named, removal = [shlex.split(line) for line in re.findall(r"^    (\S.*)$", finished.stdout, re.MULTILINE)]
    assert [words[1] for words in named] == ["dead", "jobs", "stats"]
    answers = [
        subprocess.run(words, cwd=tmp_path, env=surroundings(tmp_path), capture_output=True, text=True, check=False)
        for words in named
    ]
    assert [answer.returncode for answer in answers] == [0, 0, 0], answers
    assert "this one never works" in answers[0].stdout
    assert "crashed" in answers[1].stdout
    assert re.search(r"^dead +4$", answers[2].stdout, re.MULTILINE)
    assert removal == ["rm", "-r", str(where(finished.stdout).parent)]


class Screen:
    """A terminal, as far as the demo uses one; lines that scrolled away are kept, and out of reach."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.lines = [""]
        self.row = self.column = 0
        self.cursor_shown = True

    def feed(self, text: str) -> None:
        for token in re.findall(r"\x1b\[\??[\d;]*[A-Za-z]|[^\x1b]", text):
            if token == "\r":
                self.column = 0
            elif token == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif token.startswith("\x1b"):
                self.control(token)
            else:
                self.put(token)

    def control(self, token: str) -> None:
        if token.endswith("A"):
            self.row -= int(token[2:-1])
            assert self.row >= len(self.lines) - self.rows, "the cursor goes where a terminal has nothing any more"
        elif token.endswith(("K", "J")):
            self.lines[self.row] = self.lines[self.row][: self.column]
            if token.endswith("J"):
                del self.lines[self.row + 1 :]
        elif token in ("\x1b[?25l", "\x1b[?25h"):
            self.cursor_shown = token.endswith("h")
        else:
            assert token.endswith("m"), f"{token!r} is not known to be harmless"

    def put(self, letter: str) -> None:
        if self.column >= self.columns:
            self.feed("\r\n")
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
        self.column += 1

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)


def on_terminal(
    folder: Path, screen: Screen, look: Callable[[Screen], bytes | None], **more: str
) -> tuple[int | None, str]:
    """Run a demo on a terminal of its own and type what `look` gives; answers exit code and all that was written."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", screen.rows, screen.columns, 0, 0))
    # The first terminal that the leader of a session opens is where Ctrl-C reaches it.
    demo = subprocess.Popen(
        ["sh", "-c", 'exec "$0" demo <"$1" >"$1" 2>&1', DULY, os.ttyname(theirs)],
        cwd=folder,
        env=surroundings(folder, **more),
        start_new_session=True,
    )
    decoder = codecs.getincrementaldecoder("utf-8")()
    written = ""
    try:
        while demo.poll() is None or readable(ours):
            if not readable(ours, 0.1):
                continue
            text = decoder.decode(os.read(ours, 65536))
            written += text
            screen.feed(text)
            if typed := look(screen):
                os.write(ours, typed)
    finally:
        demo.kill()
        demo.wait()
        os.close(theirs)
        os.close(ours)
    return demo.returncode, written


def readable(descriptor: int, timeout: float = 0) -> bool:
    return bool(select.select([descriptor], [], [], timeout)[0])


def test_on_a_terminal_it_draws_a_picture_that_moves_and_leaves_the_story_standing(tmp_path):
    screen = Screen(60, 20)
    bars = set()

    def look(screen: Screen) -> None:
        bars.update(re.findall(r"^succeeded +[\d,]+ █+$", screen.text, re.MULTILINE))

    code, written = on_terminal(tmp_path, screen, look, NO_COLOR="1")
    assert code == 0, screen.text
    assert len(bars) > 10
    assert screen.cursor_shown
    assert "\x1b[?25l" in written
    assert not re.search(r"\x1b\[[\d;]*m", written)
    assert screen.text.count("jobs have ended") == 1, "an old picture is left standing"
    assert re.search(r"^worker-[12] +killed; all its jobs are rescued$", screen.text, re.MULTILINE)
    assert "It adds up: 1,333 jobs" in screen.text
    assert "\n\n\n" not in screen.text, "the picture wanders"
    for line in (
        "1. Jobs are enqueued",
        "3. A worker is killed",
        "poison: all 4 are dead",
        " s  1,000 tick ",
        "later: the 8",
    ):
        assert screen.text.count(line) == 1, screen.text


def test_ctrl_c_restores_the_terminal_and_leaves_no_process_and_no_file_behind(tmp_path):
    screen = Screen(80, 24)
    seen: list[str] = []

    def look(screen: Screen) -> bytes | None:
        if not seen and "is killed (SIGKILL)" in screen.text:
            seen.extend(processes_in(tmp_path))
            return b"\x03"
        return None

    code, written = on_terminal(tmp_path, screen, look)
    assert code == 130, screen.text
    assert seen
    assert screen.cursor_shown
    assert re.search(r"\x1b\[\d+m", written)
    assert written.rindex("\x1b[0m") > written.rindex("\x1b[3"), "a colour is left on"
    # The other words come where the key is pressed in the very moment in which something else is being ended.
    assert re.search(r"^(Stopped, and the workers too. The database is removed.|duly: interrupted)$", screen.text, re.M)
    assert "Traceback" not in screen.text
    assert processes_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_it_with_all_it_began(tmp_path, number, code):
    with piped(tmp_path, tmp_path) as demo:
        read_until(demo, "are here")
        assert len(processes_in(tmp_path)) >= 2
        demo.send_signal(number)
        assert demo.wait(20) == code
    assert processes_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_dies_by_itself_is_told_with_its_last_words(tmp_path):
    kept = tmp_path / "kept"
    with piped(tmp_path, tmp_path, "--keep", str(kept)) as demo:
        read_until(demo, "are here")
        worker = next(one for one in processes_in(tmp_path) if " duly worker " in one)
        os.kill(int(worker.split()[0]), signal.SIGKILL)
        said, _ = demo.communicate(timeout=PATIENCE)
    assert demo.returncode == 1
    assert re.search(r"worker-[12] exited with -9", said)
    assert f"{kept} is kept" in said
    assert re.search(r"^ +\d\d:\d\d:\d\d .*(worker|job)\.\w+", said, re.MULTILINE), said
    assert processes_in(tmp_path) == []


def test_numbers_that_do_not_add_up_are_a_failure(demos):
    said = demos["disturbed"].stdout
    assert demos["disturbed"].returncode == 1
    assert "this does not add up: jobs enqueued and jobs found" in said
    assert "It adds up" not in said


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--keep", "full"], 2, r"full is not empty: name a new or an empty folder"),
        (
            ["--keep", "full/file/folder"],
            1,
            r"cannot make a folder for the database: .*full/file.*Name one with --keep",
        ),
        (["--keep", "full/file"], 2, r"is a file"),
    ],
)
def test_a_folder_that_will_not_do_is_named(tmp_path, words, code, said):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with piped(tmp_path, tmp_path, *words) as demo:
        answer, _ = demo.communicate(timeout=PATIENCE)
    assert demo.returncode == code
    assert re.search(said, answer)
    assert "Traceback" not in answer
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full"]
