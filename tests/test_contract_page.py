"""The page of promises: every line is there, with its tests or marked as for later."""

from __future__ import annotations

from tests import contract_page
from tests.contract_page import LINE, PAGE

# What the store alone keeps; a line of these without a test is a promise nobody holds.
# fmt: off
STORE = [
    "J01", "J02", "J04", "J05", "J06", "J07", "J08", "J09", "J13", "J14", "J20", "J22", "J23", "J25", "J26", "J28",
    "R01", "R03", "R04", "R05", "R06", "R07", "R09", "R10", "K01", "K02", "K03", "K04", "K09", "M01", "B09",
]
# fmt: on


def lines() -> list[str]:
    return [line[1] for text in PAGE.read_text("utf-8").splitlines() if (line := LINE.match(text))]


def test_the_page_names_the_tests_that_exist():
    page = PAGE.read_text("utf-8")
    assert page == contract_page.page_with_tests(page), "run `python -m tests.contract_page`"


def test_no_line_is_missing_or_doubled():
    assert len(lines()) == len(set(lines()))
    counts = {"J": 28, "R": 11, "K": 9, "S": 11, "B": 11, "L": 8, "D": 12, "M": 6, "P": 8, "C": 7, "H": 4}
    for letter, count in counts.items():
        assert {f"{letter}{n:02}" for n in range(1, count + 1)} <= set(lines())


def test_every_line_of_the_store_has_a_test():
    assert set(STORE) <= set(contract_page.tests_by_line())


def test_every_test_with_an_id_belongs_to_a_line():
    assert set(contract_page.tests_by_line()) <= set(lines())
