"""The quickstart, as a stranger follows it: its file in an empty folder, its commands in its order, its transcript."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_docs import ROOT, blocks, commands, matches, run, write_files

pytestmark = pytest.mark.process

PAGE = ROOT / "docs" / "quickstart.md"
DULY = str(Path(sys.executable).parent / "duly")
READY = "Edit a file and it reloads, Ctrl-C ends."


class Step(NamedTuple):
    command: str
    code: int
    expected: str


def steps() -> list[Step]:
    """The commands of the page, without those that install."""
    texts = [block.text for block in blocks() if block.page == PAGE and block.language == "console"]
    found = [Step(*one) for text in texts for one in commands(text)]
    return [step for step in found if step.command.startswith("duly ")]


class Dev:
    """`duly dev` in a terminal of its own."""

    def __init__(self, command: str, folder: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DULY_")}
        self.process = subprocess.Popen(
            [DULY, *command.split()[1:]],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said: list[str] = []
        self._heard = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._heard:
                self.said.append(line.rstrip("\n"))
                self._heard.notify_all()

    def wait_for(self, text: str) -> None:
        with self._heard:
            heard = self._heard.wait_for(lambda: any(text in line for line in self.said), 30)
        assert heard, f"{text!r} was not said, but:\n" + "\n".join(self.said)

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        code = self.process.wait(30)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture
def folder(tmp_path) -> Path:
    made = tmp_path / "shop"
    made.mkdir()
    write_files(PAGE, made)
    return made


def test_the_quickstart_does_what_its_page_says(folder):
    dev_step, *others = steps()
    assert dev_step.command == "duly dev tasks.py"
    dev = Dev(dev_step.command, folder)
    try:
        dev.wait_for(READY)
        for step in others:
            answer = run(step.command, folder)
            assert answer.returncode == step.code, f"$ {step.command}\n{answer.stdout}"
            assert matches(step.expected, answer.stdout), f"$ {step.command}\n{answer.stdout}"
        dev.wait_for(" succeeded ")
    finally:
        code = dev.end()
    assert code == 0
    assert matches(dev_step.expected, "\n".join(dev.said)), "\n".join(dev.said)


def test_the_file_of_the_quickstart_has_at_most_ten_lines_and_its_job_runs_once(folder):
    assert len((folder / "tasks.py").read_text().splitlines()) <= 10
    answer = run("duly enqueue tasks.py send_receipt '[1, \"ann@example.org\"]'", folder)
    dev = Dev("duly dev tasks.py", folder)
    try:
        dev.wait_for(" succeeded ")
    finally:
        assert dev.end() == 0
    job_id = answer.stdout.splitlines()[-1]
    assert [line for line in dev.said if job_id in line and " succeeded " in line] != []
    assert len([line for line in dev.said if " succeeded " in line]) == 1
