"""A part of the bench: one letter, run once a repetition, with its figures in the end."""

from __future__ import annotations

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bench.figures import Figure
from bench.parts.place import BenchFailed, Place
from bench.parts.tally import Tally

T = TypeVar("T")

PATIENCE_SECONDS = 60.0
LOOK_SECONDS = 0.005


@dataclass(frozen=True)
class Plan:
    """How much is measured. `say` is called as each part begins a repetition."""

    repeat: int = 3
    jobs: int = 20_000
    singles: int = 600
    callers: int = 16
    rows: int = 20_000
    pick_ups: int = 100
    idle_s: float = 2.0
    counted: int = 5_000
    mixed: int = 4_000
    say: Callable[[str], None] = lambda text: None


# Enough to see that everything works, not to compare by.
QUICK = {
    "jobs": 2_000,
    "singles": 100,
    "rows": 4_000,
    "pick_ups": 20,
    "idle_s": 0.5,
    "counted": 1_000,
    "mixed": 400,
}


class Part(ABC):
    """One measure."""

    letter: str
    title: str

    def __init__(self, place: Place, plan: Plan) -> None:
        self.place = place
        self.plan = plan

    @abstractmethod
    def run(self, turn: int) -> None:
        """Measure once; whoever is compared goes first every other turn."""

    @abstractmethod
    def figures(self) -> Iterator[Figure]:
        """Give what was measured."""


def in_order(sides: Sequence[T], turn: int) -> Sequence[T]:
    """Give who is compared, there and back."""
    return sides if turn % 2 == 0 else sides[::-1]


@contextmanager
def tallied(jobs: int) -> Iterator[Tally]:
    """Make the tally of some jobs, for as long as the `with` lasts."""
    with (
        tempfile.TemporaryDirectory(prefix="duly-tally-") as folder,
        closing(Tally.blank(Path(folder) / "tally", jobs)) as tally,
    ):
        yield tally


def wait_for(done: Callable[[], bool], what: str) -> None:
    """Wait until something is so."""
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while not done():
        if time.monotonic() > give_up_at:
            raise BenchFailed(f"after {PATIENCE_SECONDS:.0f} s: {what}")
        time.sleep(LOOK_SECONDS)
