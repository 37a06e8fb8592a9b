"""Draws grouped horizontal bars as SVG text, each group on a scale of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH = 900
LABELS = 230
NUMBERS = 90
BAR = 16
STEP = 22
TITLE = 34
COLOURS = {True: "#2563eb", False: "#9ca3af"}


@dataclass(frozen=True)
class Bar:
    """One bar: what it stands for, how long it is, what is written beside it, and whether it is ours."""

    label: str
    value: float
    text: str
    ours: bool = False


@dataclass(frozen=True)
class Group:
    """Bars that are compared with one another."""

    title: str
    bars: Sequence[Bar]


def draw(title: str, groups: Sequence[Group]) -> str:
    """Draw the groups below one another; the longest bar of each fills its width."""
    parts = [text_at(10, 24, title, weight="bold", size=16)]
    top = 44
    for group in groups:
        parts += draw_group(group, top)
        top += TITLE + STEP * len(group.bars)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top + 10}" '
        f'viewBox="0 0 {WIDTH} {top + 10}" font-family="sans-serif">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{top + 10}" fill="white"/>', *parts, "</svg>", ""])


def draw_group(group: Group, top: float) -> list[str]:
    parts = [text_at(10, top + 18, group.title, weight="bold")]
    longest = max((bar.value for bar in group.bars), default=0.0)
    for number, bar in enumerate(group.bars):
        y = top + TITLE - 6 + number * STEP
        length = length_of(bar.value, longest)
        parts.append(text_at(LABELS - 8, y + BAR - 4, bar.label, anchor="end"))
        parts.append(f'<rect x="{LABELS}" y="{y:g}" width="{length:.1f}" height="{BAR}" fill="{COLOURS[bar.ours]}"/>')
        parts.append(text_at(LABELS + length + 6, y + BAR - 4, bar.text))
    return parts


def length_of(value: float, longest: float) -> float:
    """Scale a value to the drawing; below zero nothing is drawn, and something is always seen above it."""
    if value <= 0 or longest <= 0:
        return 0.0
    return max(1.0, value / longest * (WIDTH - LABELS - NUMBERS))


def text_at(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
