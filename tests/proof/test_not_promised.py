"""What is not promised is written where people look, and the table of the proof names the rows that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.proof.table import rows

PAGE = (Path(__file__).parents[2] / "docs" / "proof.md").read_text("utf-8")


@pytest.mark.parametrize(
    "said",
    [
        r"A job may run twice",
        r"Duplicates come only after a lease\s+has ended",
        r"is not exactly\s+once",
        r"Start times are not exact",
        r"Order is not kept\*\* without an ordering key",
        r"do not share the work evenly",
        r"Results are not kept for ever",
        r"A SQLite file is on one host",
        r"asynchronous replica may lack what was acknowledged",
    ],
)
def test_n01_the_page_lists_what_is_not_promised(said):
    assert re.search(said, PAGE.partition("## What is not promised")[2])


@pytest.mark.parametrize("part", [0, 2], ids=["what they are", "what they measured"])
def test_the_page_lists_exactly_the_rows(part):
    text = PAGE.partition("## The last runs")[part]
    assert re.findall(r"^\| (P\d+) \|", text, re.MULTILINE) == [row.id for row in rows([])]
