"""Runs of the proof, each in a process of its own: beside each other where they mostly wait, and alone where not.

A row that compares speeds runs alone, and so does one that keeps every processor busy. What only took too long beside
others has not been shown either way: it is run again alone, and that counts.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol

from tests.proof import table
from tests.proof.table import Line, Row


class Run(NamedTuple):
    """One line to come: a row, or a row without one of its defences."""

    row: Row
    control: str | None
    seed: int
    full: bool

    @property
    def takes(self) -> float:
        """How many processors it keeps busy."""
        return self.row.takes if self.control is None else self.row.control_takes


class Started(Protocol):
    """A run that is under way."""

    sentinel: Any  # ready once the run has ended

    def line(self) -> Line:
        """Give what it came to."""

    def interrupt(self) -> None:
        """Have it end, with all that it started."""


LOWEST = 19  # priority

Start = Callable[[Run, bool], Started]  # a run, and whether others may run beside it


def lines(runs: Sequence[Run], *, start: Start, processors: int, show: Callable[[Line], None]) -> list[Line]:
    """Make all runs, show each line as soon as it is there, and give them in the order of the runs."""
    return _Table(runs, start, processors, show).filled()


class _Table:
    """The lines that are there, the runs that are under way, and those that are still to come."""

    def __init__(self, runs: Sequence[Run], start: Start, processors: int, show: Callable[[Line], None]) -> None:
        self._runs = runs
        self._start = start
        self._processors = processors
        self._show = show
        self._under_way: dict[int, Started] = {}
        self._too_slow: dict[int, Line] = {}  # beside others
        self._lines: dict[int, Line] = {}
        # What takes little fills up what the others leave free, and so comes after them; controls take less than rows.
        self._waiting = sorted(range(len(runs)), key=self._turn)

    def filled(self) -> list[Line]:
        try:
            while self._waiting or self._under_way:
                self._begin()
                self._end()
        except BaseException:
            for one in self._under_way.values():
                one.interrupt()
            raise
        return [self._lines[number] for number in range(len(self._runs))]

    def _turn(self, number: int) -> tuple[Any, ...]:
        """Say when a run has its turn: what has to be alone comes last."""
        run = self._runs[number]
        return self._alone(number), not run.row.patient, -run.takes, run.control is not None

    def _alone(self, number: int) -> bool:
        return self._runs[number].takes == table.ALL or number in self._too_slow

    def _begin(self) -> None:
        for number in [*self._waiting]:
            if self._fits(number):
                self._waiting.remove(number)
                self._under_way[number] = self._start(self._runs[number], not self._alone(number))

    def _fits(self, number: int) -> bool:
        if not self._under_way:
            return True
        together = [self._runs[one] for one in (number, *self._under_way)]
        if any(map(self._alone, (number, *self._under_way))):
            return False
        return (
            sum(run.takes for run in together if not run.row.patient) <= self._processors
            and sum(run.row.patient for run in together) <= 1
        )

    def _end(self) -> None:
        ready = wait([one.sentinel for one in self._under_way.values()])
        for number in [number for number, one in self._under_way.items() if one.sentinel in ready]:
            line = self._under_way.pop(number).line()
            if line.verdict == table.TOO_SLOW:
                self._too_slow[number] = line
                self._waiting.append(number)
                continue
            self._lines[number] = line = _after(self._too_slow.get(number), line)
            self._show(line)


def _after(beside: Line | None, line: Line) -> Line:
    """Have a line say what the run before it came to, beside others."""
    if beside is None:
        return line
    figure = f"{line.figure} [run again alone, as it was too slow beside others: {beside.figure}]"
    return replace(line, figure=figure, seconds=round(line.seconds + beside.seconds, 1))


class Process:
    """A run in a process of its own, which leads a group of its own."""

    def __init__(self, run: Run, beside: bool) -> None:
        self._run = run
        self._here, there = _context().Pipe(duplex=False)
        about = (run.row.id, run.control, run.seed, run.full, beside)
        self._process = _context().Process(target=_made, args=(there, *about))
        self._process.start()
        there.close()
        self.sentinel = self._here  # not its end: it may wait until somebody has read what it says

    def line(self) -> Line:
        """Give what it came to."""
        try:
            line: Line = self._here.recv()
        except EOFError:
            line = self._ended_without()
        self._process.join()
        self._here.close()
        return line

    def _ended_without(self) -> Line:
        self._process.join()
        row, figure = self._run.row, f"its process ended by itself, with {self._process.exitcode}"
        return Line(row.id, row.title, self._run.control, figure, row.target, "FAILED", self._run.seed, 0.0, {})

    def interrupt(self) -> None:
        """Interrupt it as a terminal does, and wait until it has ended what it started."""
        if self._process.is_alive():
            _interrupt(self._process.pid)
        self._process.join()


def _context() -> Any:
    """Have processes begin with all rows loaded, which would take each of them a second."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"tests.proof.rows.{name}" for name in table.ROWS])
    return context


def _made(there: Connection, row: str, control: str | None, seed: int, full: bool, beside: bool) -> None:
    os.setpgid(0, 0)  # so that a Ctrl-C reaches it once, by `interrupt`, together with what it started
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background has ignored
    threading.Thread(target=_end_with_parent, daemon=True).start()
    quiet()
    [known] = table.rows([row])
    if known.patient and beside:
        os.nice(LOWEST)
    try:
        line = table.run(known, seed=seed, full=full, control=control, beside=beside)
    except KeyboardInterrupt:
        sys.exit(130)
    there.send(line)


def _end_with_parent() -> None:
    """End what was started here even when the process that shows the table was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        _interrupt(os.getpid())


def _interrupt(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGINT)
    except ProcessLookupError:  # it has not come to lead its group yet
        os.kill(leader, signal.SIGINT)


def quiet() -> None:
    """Have nobody tell of every connection that a row ends."""
    logging.getLogger("psycopg").setLevel(logging.ERROR)
