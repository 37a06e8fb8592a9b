"""The reference says what the code does: it is written from it, and nothing is forgotten."""

from __future__ import annotations

import re

import pytest

import duly
from duly import testing
from duly.cli import COMMANDS
from tests import reference_page


@pytest.mark.parametrize("name", ["commands.md", "settings.md", "errors.md", "api.md", "events.md", "tables.md"])
def test_a_page_of_the_reference_matches_the_code(name):
    page = (reference_page.FOLDER / name).read_text("utf-8")
    assert page == reference_page.pages()[name], "run `python -m tests.reference_page`"


def test_every_command_is_in_the_reference_with_an_example():
    page = reference_page.commands_page()
    for name in COMMANDS:
        _, heading, rest = page.partition(f"\n## duly {name}\n")
        assert heading, name
        assert f"  duly {name}" in rest.partition("\n## ")[0], f"duly {name} has no example"


def test_no_option_is_without_a_meaning():
    page = reference_page.commands_page()
    assert re.findall(r"^\| (.+) \| +\|$", page, re.MULTILINE) == []


def test_every_public_name_has_a_sentence():
    page = reference_page.api_page()
    assert re.findall(r"^### (.+)\n\n(?=#)", page, re.MULTILINE) == []
    for heading in (
        "Duly.get",
        "Task.enqueue",
        "Job.result",
        "app.dead.replay",
        "app.schedules.create",
        "Ctx.progress",
        "duly.Snooze",
    ):
        assert f"\n### {heading}\n" in page


def test_no_public_name_is_forgotten():
    page = reference_page.api_page()
    names = [name for name in duly.__all__ if name != "backoff"]
    assert [name for name in names if f"# duly.{name}\n" not in page] == []
    assert [name for name in testing.__all__ if f"### testing.{name}\n" not in page] == []
    assert [name for name in ("exponential", "fixed", "linear", "delays") if f"# backoff.{name}\n" not in page] == []


def test_a_name_without_a_sentence_is_refused():
    with pytest.raises(LookupError, match=r"say in tests/reference_page\.py what each setting means: b"):
        reference_page.known({"a": "x"}, ["a", "b"], "setting")
    with pytest.raises(LookupError, match="words for no table: c"):
        reference_page.known({"a": "x", "c": "y"}, ["a"], "table")
