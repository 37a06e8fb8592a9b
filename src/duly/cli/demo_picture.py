"""How `duly demo` shows its progress: a live picture below the events on a terminal, plain lines elsewhere.

The picture is overwritten in one write, so that it does not flicker. Events are written above it and stay. Only the
cursor has to be restored at the end.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Self

from duly.model import State

COLOURS = {State.SCHEDULED: "34", State.READY: "36", State.RUNNING: "33", State.SUCCEEDED: "32", State.DEAD: "31"}
BOLD, DIM, RED = "1", "2", "31"
INDENT = " " * 9
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
CLEAR_LINE, CLEAR_BELOW = "\x1b[K", "\x1b[J"


class Line(NamedTuple):
    """A line and its colour."""

    text: str
    colour: str = ""


def teller(*, as_json: bool = False) -> Lines:
    """Choose how to show the progress."""
    live = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return Silence() if as_json else Picture() if live else Lines()


class Lines:
    """Plain lines: every event, and the progress at most once a second."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self._shown_at = 0.0
        self._shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pass

    @property
    def seconds(self) -> float:
        """The time since the start."""
        return time.monotonic() - self._began_at

    def act(self, text: str) -> None:
        """Print the title of a part."""
        self.line()
        self.line(text, BOLD)

    def event(self, text: str, colour: str = "") -> None:
        """Print an event with its time."""
        self.line(f"{self.seconds:5.1f} s  {text}", colour)

    def line(self, text: str = "", colour: str = "") -> None:
        """Print a line."""
        self._write(f"{text}\n")

    def show(self, states: Counter[State], workers: dict[str, str]) -> None:
        """Show the progress."""
        counts = ", ".join(f"{state} {states[state]:,}" for state in State if states[state])
        text = f"{_progress(states)} ({counts})"
        if text != self._shown and time.monotonic() - self._shown_at >= 1:
            self._shown, self._shown_at = text, time.monotonic()
            self.event(text)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class Silence(Lines):
    """Nothing: only the figures at the end are printed."""

    def line(self, text: str = "", colour: str = "") -> None:
        """Print nothing."""


class Picture(Lines):
    """A picture on a terminal: a bar for each state and a line for each worker."""

    def __init__(self) -> None:
        super().__init__()
        self._coloured = not os.environ.get("NO_COLOR")
        self._block = "█" if "utf" in (sys.stdout.encoding or "").lower() else "#"
        self._picture: list[Line] = []
        self._drawn: list[int] = []  # the lengths of its lines on the screen

    def __enter__(self) -> Self:
        self._write(HIDE_CURSOR)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._draw()
        self._picture, self._drawn = [], []
        self._write(f"\r{CLEAR_LINE}{SHOW_CURSOR}")  # Ctrl-C has written ^C at the cursor

    def line(self, text: str = "", colour: str = "") -> None:
        """Print a line above the picture."""
        width = shutil.get_terminal_size().columns - 1
        self._draw([Line(part, colour) for part in _wrapped(text, width)])

    def show(self, states: Counter[State], workers: dict[str, str]) -> None:
        """Draw the picture again."""
        room = max(shutil.get_terminal_size().columns - 20, 1)
        self._picture = [Line(""), Line(f"{self.seconds:5.1f} s  {_progress(states)}", DIM)]
        for state, colour in COLOURS.items():
            count = states[state]
            bar = self._block * (max(1, room * count // states.total()) if count else 0)
            self._picture.append(Line(f"{state:<10} {count:5,} {bar}", colour if count else DIM))
        lines = [Line(f"{name:<10} {text}", RED if "killed" in text else "") for name, text in workers.items()]
        self._picture += [Line(""), *lines]
        self._draw()

    def _draw(self, above: Sequence[Line] = ()) -> None:
        columns, rows = shutil.get_terminal_size()
        # A terminal that was made narrower has wrapped the old lines.
        up = sum(1 + max(length - 1, 0) // columns for length in self._drawn)
        picture = [Line(text[: columns - 1], colour) for text, colour in self._picture[: max(rows - 1, 0)]]
        self._drawn = [len(line.text) for line in picture]
        back = f"\x1b[{up}A\r" if up else ""
        self._write(back + "".join(f"{self._paint(line)}{CLEAR_LINE}\n" for line in [*above, *picture]) + CLEAR_BELOW)

    def _paint(self, line: Line) -> str:
        return f"\x1b[{line.colour}m{line.text}\x1b[0m" if line.colour and self._coloured else line.text


def _progress(states: Counter[State]) -> str:
    ended = sum(count for state, count in states.items() if state.ended)
    return f"{ended:,} of {states.total():,} jobs have ended"


def _wrapped(text: str, width: int) -> list[str]:
    """Wrap a line at the width of the terminal, with an indent; paths and commands stay whole."""
    if len(text) <= width or width <= 2 * len(INDENT):
        return [text]
    indent = INDENT if text.startswith(" ") else ""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
