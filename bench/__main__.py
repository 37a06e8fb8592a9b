"""`python -m bench`: duly's store beside what the bare database can do. `bench/README.md` explains the figures."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from bench import report
from bench.database import postgres_home, refuse_memory, sqlite_home
from bench.figures import Figure
from bench.measure import SMALL, Plan, everything
from tests.servers.postgres import ServerFailed

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    options = parse()
    begun = time.monotonic()
    options.dir.mkdir(parents=True, exist_ok=True)
    refuse_memory(options.dir)
    about = report.machine(options.dir)
    about["stores"] = []
    figures = list(measured(options, about["stores"]))
    about["load_at_end"] = round(os.getloadavg()[0], 2)
    about["seconds"] = round(time.monotonic() - begun, 1)
    report.progress("")
    document = report.write(RESULTS / "latest.json", about, figures)
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        report.show(about, figures)


def measured(options: argparse.Namespace, stores: list[str]) -> Iterator[Figure]:
    """Measure the stores that were asked for, and note what each of them is."""
    plan = planned(options)
    if options.store in (None, "sqlite"):
        with sqlite_home(options.dir) as home:
            stores.append(home.describe())
            yield from everything(home, plan)
    if options.store in (None, "postgres"):
        try:
            with postgres_home() as server:
                stores.append(server.describe())
                yield from everything(server, plan)
        except ServerFailed as failed:
            stores.append(f"PostgreSQL was not measured: {failed}")


def planned(options: argparse.Namespace) -> Plan:
    sizes = sorted(size for size in options.rows if size > SMALL)
    quick = options.quick
    return Plan(
        repeat=options.repeat,
        batches=options.batch or ([100] if quick else [100, 1000]),
        sizes=[size for size in sizes if size <= 100_000] if quick else sizes,
        jobs=2_000 if quick else 6_000,
        beats=2_000,
        cycles=20 if quick else 60,
        finished=0 if quick else max(sizes, default=0),
        say=report.progress,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--store", choices=["sqlite", "postgres"], help="measure only this one")
    parser.add_argument(
        "--rows",
        type=numbers,
        default=[0, 100_000, 1_000_000],
        help="table sizes for growth, beside one of 1,000 rows",
    )
    parser.add_argument("--batch", type=numbers, help="jobs a claim, several by comma (default 100,1000)")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions (default 3)")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, no 1,000,000 rows: half a minute")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the tables")
    parser.add_argument("--dir", type=Path, default=RESULTS, help="a folder on a real disk for SQLite's files")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(part.replace("_", "")) for part in text.split(",") if part]


if __name__ == "__main__":
    main()
