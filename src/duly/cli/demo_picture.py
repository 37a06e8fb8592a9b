"""How `duly demo` tells its story: on a terminal a picture that moves below the events, elsewhere plain lines.

The picture is drawn over itself in one write, so that nothing flickers, and events are written above it, so that they
stay when the demo is over. No other screen is opened: whatever ends the demo, the cursor is all there is to restore.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, TypeAlias

from duly.model import State

SHOWN = (State.SCHEDULED, State.READY, State.RUNNING, State.SUCCEEDED, State.DEAD)
COLOURS = {
    State.SCHEDULED: "34",
    State.READY: "36",
    State.RUNNING: "33",
    State.SUCCEEDED: "32",
    State.DEAD: "31",
}
BOLD, DIM, RED = "1", "2", "31"
INDENT = "         "
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
CLEAR_LINE, CLEAR_BELOW = "\x1b[K", "\x1b[J"

# Pieces of text, each with the code of its colour, or none.
Line: TypeAlias = Sequence[tuple[str, str]]


class Scene(NamedTuple):
    """What there is to see at a moment."""

    states: Counter[State]
    workers: dict[str, str]

    @property
    def total(self) -> int:
        """How many jobs there are."""
        return self.states.total()

    @property
    def ended(self) -> int:
        """How many of them have ended."""
        return sum(count for state, count in self.states.items() if state.ended)


def teller(*, as_json: bool = False) -> Lines:
    """Choose how to tell the story here."""
    if as_json:
        return Silence()
    return Picture() if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" else Lines()


class Lines:
    """Tells in plain lines: every event, and in between how far it is, at most once a second."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self._told_at = 0.0
        self._told = ""

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    @property
    def seconds(self) -> float:
        """How long it has been telling."""
        return time.monotonic() - self._began_at

    def act(self, text: str) -> None:
        """Say what is about to be shown."""
        self.line()
        self.line(text, BOLD)

    def event(self, text: str, colour: str = "") -> None:
        """Say what has just happened."""
        self.line(f"{self.seconds:5.1f} s  {text}", colour)

    def line(self, text: str = "", colour: str = "") -> None:
        """Write a line."""
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def show(self, scene: Scene) -> None:
        """Show how far it is."""
        counts = ", ".join(f"{state} {scene.states[state]:,}" for state in State if scene.states[state])
        text = f"{scene.ended:,} of {scene.total:,} jobs have ended ({counts})"
        if text != self._told and time.monotonic() - self._told_at >= 1:
            self._told, self._told_at = text, time.monotonic()
            self.event(text)


class Silence(Lines):
    """Tells nothing: a program wants only the figures at the end."""

    def line(self, text: str = "", colour: str = "") -> None:
        """Write nothing."""


class Picture(Lines):
    """Tells in a picture on a terminal: a bar for each state and a line for each worker."""

    def __init__(self) -> None:
        super().__init__()
        self._coloured = not os.environ.get("NO_COLOR")
        self._block = "█" if "utf" in (sys.stdout.encoding or "").lower() else "#"
        self._scene: Scene | None = None
        self._drawn: list[int] = []  # how long the lines of the picture are that stand there now

    def __enter__(self) -> Lines:
        self._write(HIDE_CURSOR)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._draw()
        self._scene = None
        self._drawn = []
        # Ctrl-C has written ^C where the cursor stood.
        self._write(f"\r{CLEAR_LINE}{SHOW_CURSOR}")

    def line(self, text: str = "", colour: str = "") -> None:
        """Write a line above the picture."""
        width = shutil.get_terminal_size().columns - 1
        self._draw([[(part, colour)] for part in _wrapped(text, width)])

    def show(self, scene: Scene) -> None:
        """Draw the picture anew."""
        self._scene = scene
        self._draw()

    def _draw(self, above: Sequence[Line] = ()) -> None:
        columns, rows = shutil.get_terminal_size()
        picture = [] if self._scene is None else [_cut(line, columns - 1) for line in self._lines(self._scene, columns)]
        picture = picture[: max(rows - 1, 0)]
        # A terminal that was made narrower has broken the old lines.
        up = sum(1 + max(length - 1, 0) // columns for length in self._drawn)
        self._drawn = [sum(len(text) for text, _ in line) for line in picture]
        back = f"\x1b[{up}A\r" if up else ""
        self._write(back + "".join(f"{self._paint(line)}{CLEAR_LINE}\n" for line in [*above, *picture]) + CLEAR_BELOW)

    def _lines(self, scene: Scene, columns: int) -> list[Line]:
        width = max(columns - 20, 1)
        bars = [self._bar(state, scene.states[state], scene.total, width) for state in SHOWN]
        workers: list[Line] = [
            [(f"{name:<10} ", ""), (text, RED if text.startswith("killed") else "")]
            for name, text in scene.workers.items()
        ]
        head: Line = [(f"{self.seconds:5.1f} s  {scene.ended:,} of {scene.total:,} jobs have ended", DIM)]
        return [[], head, *bars, [], *workers]

    def _bar(self, state: State, count: int, total: int, width: int) -> Line:
        cells = max(1, width * count // total) if count else 0
        return [(f"{state:<10} {count:5,} ", "" if count else DIM), (self._block * cells, COLOURS[state])]

    def _paint(self, line: Line) -> str:
        return "".join(
            f"\x1b[{colour}m{text}\x1b[0m" if colour and text and self._coloured else text for text, colour in line
        )

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _wrapped(text: str, width: int) -> list[str]:
    """Break a line where the terminal ends, so that events stay a column; a path or a command stays whole."""
    if len(text) <= width or width <= 2 * len(INDENT):
        return [text]
    indent = INDENT if text.startswith(" ") else ""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _cut(line: Line, width: int) -> Line:
    """Leave away what does not fit."""
    kept: list[tuple[str, str]] = []
    for text, colour in line:
        kept.append((text[:width], colour))
        width -= len(kept[-1][0])
    return kept
