"""The plot is SVG that any reader of XML understands, on a scale of each group's own."""

from __future__ import annotations

from xml.etree import ElementTree as XML

from bench.plot import LABELS, NUMBERS, WIDTH, Bar, Group, draw, length_of

SVG = "{http://www.w3.org/2000/svg}"


def bars(text: str) -> list[XML.Element]:
    return [one for one in XML.fromstring(text).iter(f"{SVG}rect") if one.get("x")]


def test_the_longest_bar_of_a_group_fills_its_width() -> None:
    drawn = bars(draw("t", [Group("g", [Bar("a", 50, "50"), Bar("b", 100, "100")]), Group("h", [Bar("c", 7, "7")])]))
    widths = [float(bar.get("width", 0)) for bar in drawn]
    room = WIDTH - LABELS - NUMBERS
    assert widths == [room / 2, room, room]


def test_texts_are_escaped() -> None:
    drawn = XML.fromstring(draw("a < b & c", [Group("<g>", [Bar("p99 < 3", 1, "1 & more")])]))
    assert [text.text for text in drawn.iter(f"{SVG}text")] == ["a < b & c", "<g>", "p99 < 3", "1 & more"]


def test_ours_and_theirs_differ_in_colour() -> None:
    ours, theirs = bars(draw("t", [Group("g", [Bar("duly", 2, "2", ours=True), Bar("other", 1, "1")])]))
    assert ours.get("fill") != theirs.get("fill")


def test_nothing_is_drawn_below_zero_and_something_above_it() -> None:
    assert length_of(-1, 10) == 0
    assert length_of(0, 0) == 0
    assert length_of(1e-9, 10) == 1


def test_a_drawing_without_groups_is_still_a_drawing() -> None:
    assert XML.fromstring(draw("nothing", [])).tag == f"{SVG}svg"
