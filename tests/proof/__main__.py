"""`python -m tests.proof [--full] [--only P6] [--seed 7]`: run the proof and print its table."""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from tests.proof import abreast, table
from tests.proof.abreast import Run
from tests.servers.postgres import initialised


def main() -> int:
    """Run the rows, each with its controls; 0 only if all rows are green and all controls red."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description=__doc__)
    parser.add_argument("--full", action="store_true", help="the long forms, under 90 minutes")
    parser.add_argument(
        "--only", action="append", default=[], metavar="ROW", help="only this row, such as P6; again for more"
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="what everything random follows from; default: a new one"
    )
    parser.add_argument("--no-controls", action="store_true", help="only the rows, not the runs without their defences")
    parser.add_argument(
        "--tolerant",
        action="store_true",
        help="do not fail for what only took too long, or could not be run: for machines of which not much is known",
    )
    parser.add_argument("--json", type=Path, default=Path("proof.json"), help="where to write the table for programs")
    given = parser.parse_args()
    if strangers := {name.upper() for name in given.only} - {*table.names()}:
        parser.error(f"--only: there is no row {min(strangers)}; the rows are {', '.join(table.names())}")
    seed = secrets.randbelow(1_000_000) if given.seed is None else given.seed
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what ends that which was started
    with nullcontext() if given.full else initialised():  # in full it is the runs that take long
        lines = abreast.lines(_runs(given, seed), start=abreast.Process, processors=table.processors(), show=table.show)
    table.write(lines, given.json)
    bad = [line for line in lines if not table.holds(line, tolerant=given.tolerant)]
    rows = [line for line in lines if line.control is None]
    print(
        f"\n{sum(line.verdict == 'green' for line in rows)} of {len(rows)} rows green, "
        f"{sum(line.verdict.startswith('red') for line in lines)} of {len(lines) - len(rows)} controls red, "
        f"{sum(line.verdict == table.NOT_RUN for line in lines)} not run, {time.monotonic() - began:.0f} s, seed {seed}"
    )
    for line in bad:  # once more: of a long table often only the end is kept
        table.show(line)
    return 1 if bad else 0


def _runs(given: argparse.Namespace, seed: int) -> list[Run]:
    """List the runs in the order of the table: each row, and after it its controls, or the one whose turn it is."""
    found = []
    for row in table.rows(given.only):
        if row.full_only and not given.full and not given.only:
            continue
        controls = (*row.controls, *row.in_full) if given.full else _in_turn(row.controls, seed)
        found += [Run(row, one, seed, given.full) for one in (None, *(() if given.no_controls else controls))]
    return found


def _in_turn(controls: Sequence[str], seed: int) -> Sequence[str]:
    return controls and [controls[seed % len(controls)]]


if __name__ == "__main__":
    sys.exit(main())
