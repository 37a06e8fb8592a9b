"""`python -m bench`: duly beside what the bare database can do. `bench/README.md` explains the figures."""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import batches, growth, lanes, measure, report, schedules
from bench.database import PostgresHome, SQLiteHome, postgres_home, refuse_memory, sqlite_home
from bench.figures import Figure
from bench.parts import postgres, sqlite
from bench.parts.measure import LETTERS, measured
from bench.parts.part import QUICK, Plan
from duly.bench.report import load
from duly.rules.settings import Settings
from tests.servers.postgres import ServerFailed

RESULTS = Path(__file__).parent / "results"
# What fits into a minute a store; the operations of the store get half as long again.
SHORT: dict[str, Any] = {"singles": 300, "pick_ups": 50, "idle_s": 1.0, "mixed": 2_000, "counted": 4_000}


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers and files are removed then, too
    options = parse()
    begun = time.monotonic()
    options.dir.mkdir(parents=True, exist_ok=True)
    refuse_memory(options.dir)
    about = report.machine(options.dir)
    about["stores"] = []
    figures = list(everything(options, about["stores"]))
    about["load_at_end"] = load()
    about["seconds"] = round(time.monotonic() - begun, 1)
    report.progress("")
    document = report.write(RESULTS / f"{which(options)}.json", about, figures)
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        report.show(about, figures)


def which(options: argparse.Namespace) -> str:
    return next((name for name in ("growth", "schedules", "batches", "lanes") if getattr(options, name)), "latest")


def everything(options: argparse.Namespace, stores: list[str]) -> Iterator[Figure]:
    """Measure the stores that were asked for, and note what each of them is."""
    if options.store in (None, "sqlite"):
        with sqlite_home(options.dir) as home:
            stores.append(home.describe())
            yield from of_store(home, options)
    if options.store in (None, "postgres"):
        try:
            with postgres_home() as server:
                stores.append(server.describe())
                yield from of_store(server, options)
        except ServerFailed as failed:
            stores.append(f"PostgreSQL was not measured: {failed}")


def of_store(home: SQLiteHome | PostgresHome, options: argparse.Namespace) -> Iterator[Figure]:
    """Measure growth, or the parts of `duly bench` and then the operations."""
    with ExitStack() as stack:
        if options.growth:
            empty, large = (stack.enter_context(place(home)) for _ in range(2))
            yield from growth.grown(empty, large, growth_plan(options))
            return
        if options.schedules:
            yield from schedules.fired(stack.enter_context(place(home)), schedules_plan(options))
            return
        if options.batches:
            yield from batches.filled(stack.enter_context(place(home)), batches_plan(options))
            return
        if options.lanes:
            yield from lanes.claimed(stack.enter_context(place(home)), lanes_plan(options))
            return
        sizes = {**SHORT, **(QUICK if options.quick else {})}
        plan = Plan(repeat=options.repeat, say=report.progress, **sizes)
        yield from measured(stack.enter_context(place(home)), plan, options.only)
    if options.only == LETTERS:
        yield from measure.everything(home, operations_plan(options))


def place(home: SQLiteHome | PostgresHome) -> Any:
    if isinstance(home, SQLiteHome):
        return sqlite.place(home.folder, Settings())
    return postgres.place(home.new_url(), Settings())


def operations_plan(options: argparse.Namespace) -> measure.Plan:
    quick = options.quick
    return measure.Plan(
        repeat=options.repeat,
        batches=options.batch or [100],
        sizes=[] if quick else [100_000],
        jobs=1_000 if quick else 2_000,
        beats=500 if quick else 1_000,
        cycles=20,
        finished=0 if quick else 100_000,
        say=report.progress,
    )


def growth_plan(options: argparse.Namespace) -> growth.Plan:
    if options.quick:
        return growth.Plan(10_000, 10_000, 20_000, options.repeat, 2_000, 20, 10, report.progress)
    return growth.Plan(repeat=options.repeat, say=report.progress)


def schedules_plan(options: argparse.Namespace) -> schedules.Plan:
    if options.quick:
        return schedules.Plan(500, 1_000, options.repeat, 0.5, report.progress)
    return schedules.Plan(repeat=options.repeat, say=report.progress)


def batches_plan(options: argparse.Namespace) -> batches.Plan:
    if options.quick:
        return batches.Plan(20_000, 4_000, options.repeat, report.progress)
    return batches.Plan(repeat=options.repeat, say=report.progress)


def lanes_plan(options: argparse.Namespace) -> lanes.Plan:
    if options.quick:
        return lanes.Plan(2_000, 1_000, 1_000, options.repeat, report.progress)
    return lanes.Plan(repeat=options.repeat, say=report.progress)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--store", choices=["sqlite", "postgres"], help="measure only this one")
    parser.add_argument(
        "--only", default=LETTERS, help=f"only these parts, as in a,c, without the operations: {LETTERS}"
    )
    parser.add_argument("--growth", action="store_true", help="instead: (h), millions of rows beside none; ten minutes")
    parser.add_argument("--schedules", action="store_true", help="instead: what firing schedules takes; a minute")
    parser.add_argument("--batches", action="store_true", help="instead: a batch of a million jobs; four minutes")
    parser.add_argument(
        "--lanes", action="store_true", help="instead: tenants with a cap beside jobs without one; two minutes"
    )
    parser.add_argument("--batch", type=numbers, help="jobs a claim, of the operations (default 100)")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions (default 3)")
    parser.add_argument("--quick", action="store_true", help="far less of everything: to see that it works")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the tables")
    parser.add_argument("--dir", type=Path, default=RESULTS, help="a folder on a real disk for SQLite's files")
    options = parser.parse_args()
    if strangers := set(options.only) - {*LETTERS, ","}:
        parser.error(f"--only: there is no part {min(strangers)!r}; the parts are {','.join(LETTERS)}")
    return options


def numbers(text: str) -> list[int]:
    return [int(part.replace("_", "")) for part in text.split(",") if part]


if __name__ == "__main__":
    main()
