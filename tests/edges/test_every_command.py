"""What holds for every command that reads or changes a database, whatever it is about."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from duly.cli import main
from tests.edges.programs import NOBODY, assert_within
from tests.edges.stock import DOWN, IS_DOWN

WINDOW = "--since 2024-03-01T00:00+01:00 --until 2024-03-30T12:00+01:00 --force"
COMMANDS = f"""
    jobs list; jobs show {NOBODY}; jobs cancel {NOBODY}; jobs cancel --all --yes; jobs retry {NOBODY}
    dead list; dead show {NOBODY}; dead replay {NOBODY}; dead replay-all --yes; dead resolve {NOBODY} --why x
    dead purge {NOBODY} --yes; queues list; queues pause mail; queues resume mail; queues limit mail --depth 5
    workers; stats; top --once; why {NOBODY}
    batches list; batches show {NOBODY}; batches watch {NOBODY}; batches cancel {NOBODY} --yes
    schedules list; schedules show daily; schedules next daily; schedules pause daily; schedules resume daily
    schedules trigger daily; schedules backfill daily {WINDOW} --yes; schedules delete daily --yes
"""
every_command = pytest.mark.parametrize("words", [one.strip() for one in re.split("[;\n]", COMMANDS.strip())])


@every_command
def test_a_database_that_is_not_there_is_not_made(tmp_path, monkeypatch, words):
    """Neither the file nor its folder."""
    monkeypatch.chdir(tmp_path)
    for url, why in (("missing.db", r"there is no database .*missing\.db yet"), ("no/jobs.db", r"folder \S+/no does")):
        answer = CliRunner().invoke(main, words.split(), env={"DULY_URL": url, "DULY_APP": None})
        assert answer.exit_code == 2
        assert re.search(why, answer.stderr)
        assert list(Path().iterdir()) == []


@every_command
def test_a_database_that_is_down_is_told_within_two_seconds(words):
    began = time.monotonic()
    answer = CliRunner().invoke(main, words.split(), env={"DULY_URL": DOWN, "DULY_APP": None})
    assert_within(2, began)
    assert (answer.exit_code, answer.stderr) == (1, f"duly: {IS_DOWN}\n")
