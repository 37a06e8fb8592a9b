"""`python -m bench.field`: duly beside its peers, the same work for all. `bench/peers/README.md` explains it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import report
from bench.database import refuse_memory
from bench.peers import alone, process
from bench.peers.measure import MEASURING, QUANTITIES, Size, WrongRuns
from bench.peers.place import Place, place_of
from bench.peers.process import NotHere, ScriptFailed
from bench.peers.roster import CONTESTANTS, MEASURES, STORES, Contestant
from bench.peers.standing import NAMES, Standing, aligned, summary, tables
from bench.plot import Bar, Group, draw

RESULTS = Path(__file__).parent / "results"
QUICK = Size(jobs=2_000, calls=200, rows=2_000, pick_ups=30, limit_s=90)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the servers are removed then, too
    options = parse()
    RESULTS.mkdir(exist_ok=True)
    refuse_memory(RESULTS)
    about = report.machine(RESULTS)
    try:
        with ExitStack() as stack:
            if options.idle or options.memory:
                measure_alone(options, about, stack)
            else:
                sys.exit(measure_field(options, about, stack))
    except KeyboardInterrupt:
        sys.exit("stopped: nothing was written")


def measure_field(options: argparse.Namespace, about: dict[str, Any], stack: ExitStack) -> int:
    """Measure duly and its peers, and give the exit code: a peer's failure is none, duly's own is."""
    begun = time.monotonic()
    asked = [one for one in CONTESTANTS if wanted(one, options)]
    not_run: dict[str, str] = {}
    places = open_places(asked, not_run, stack)
    install_peers([one for one in asked if one.store in places], not_run)
    here = [one for one in asked if one.peer not in not_run and one.store in places]
    about.update({NAMES[store]: place.describe() for store, place in places.items()})
    about["versions"] = {peer: process.versions(peer) for peer in dict.fromkeys(one.peer for one in here)}
    about["versions"]["Python's own SQLite"] = {"sqlite": sqlite3.sqlite_version}
    standing = Standing(here)
    compete(standing, places, options)
    about["load_at_end"] = round(os.getloadavg()[0], 2)
    about["seconds"] = round(time.monotonic() - begun, 1)
    report.progress("")
    write(about, options, standing, not_run)
    show(about, options, standing, not_run)
    return 1 if any(one.ours and one.key == key for key, _ in standing.amiss for one in here) else 0


def wanted(one: Contestant, options: argparse.Namespace) -> bool:
    return one.store in options.stores and (not options.only or one.peer in options.only)


def open_places(asked: Sequence[Contestant], not_run: dict[str, str], stack: ExitStack) -> dict[str, Place]:
    """Start what the contestants work on; where that cannot be, they are not run."""
    places = {}
    for store in dict.fromkeys(one.store for one in asked):
        report.progress(f"starting {NAMES[store]}")
        try:
            places[store] = stack.enter_context(place_of(store, RESULTS))
        except NotHere as reason:
            not_run.update({f"{one.peer} on {NAMES[store]}": str(reason) for one in asked if one.store == store})
    return places


def install_peers(asked: Sequence[Contestant], not_run: dict[str, str]) -> None:
    for peer in dict.fromkeys(one.peer for one in asked):
        report.progress(f"installing {peer}")
        try:
            process.install(peer)
        except NotHere as reason:
            not_run[peer] = str(reason)


def compete(standing: Standing, places: dict[str, Place], options: argparse.Namespace) -> None:
    """Let all do the same measure one after the other, there and back, as often as asked."""
    for turn in range(options.repeat):
        for measure in MEASURING:
            if measure not in options.measures:
                continue
            in_order = standing.contestants if turn % 2 == 0 else standing.contestants[::-1]
            for one in in_order:
                if measure in one.measures and (one.key, measure) not in standing.amiss:
                    report.progress(f"{turn + 1} of {options.repeat}: {MEASURES[measure]}: {one.key}")
                    attempt(standing, one, measure, places[one.store], options.size, turn)


def attempt(standing: Standing, one: Contestant, measure: str, place: Place, size: Size, turn: int) -> None:
    """Take one measure of one contestant; who fails is listed and not asked again."""
    begun = time.monotonic()
    try:
        standing.add(one, turn, MEASURING[measure](one, place, size))
    except WrongRuns as wrong:
        standing.fail(one, measure, f"WRONG: {wrong}")
    except ScriptFailed as failed:
        standing.fail(one, measure, f"failed: {str(failed).splitlines()[0]}: {process.reason_of(failed)}")
    name = f"({measure}) {one.key}"
    standing.seconds[name] = round(standing.seconds.get(name, 0) + time.monotonic() - begun, 1)


def write(about: dict[str, Any], options: argparse.Namespace, standing: Standing, not_run: dict[str, str]) -> None:
    """Write the run as JSON and as a plot."""
    document = {
        "about": about,
        "repetitions": options.repeat,
        "size": vars(options.size),
        "contestants": [{**one.plain(), "jobs": min(one.most_jobs, options.size.jobs)} for one in standing.contestants],
        "not_run": not_run,
        "amiss": {f"({measure}) {key}": reason for (key, measure), reason in standing.amiss.items()},
        "seconds": standing.seconds,
        "figures": standing.plain(),
        "summary": summary(standing),
    }
    (RESULTS / "peers.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    (RESULTS / "peers.svg").write_text(draw(f"duly and its peers, medians of {options.repeat}", groups(standing)))


def groups(standing: Standing) -> list[Group]:
    """Make a group of bars of every compared quantity on every store, the best first."""
    found = []
    for name, quantity in QUANTITIES.items():
        for store in dict.fromkeys(one.store for one in standing.contestants) if quantity.compared else ():
            better = "more" if quantity.more_is_better else "less"
            title = f"{NAMES[store]}: {name}, {quantity.unit} ({better} is better)"
            bars = bars_of(standing, store, name)
            if bars:
                found.append(Group(title, sorted(bars, key=lambda bar: bar.value, reverse=quantity.more_is_better)))
    return found


def bars_of(standing: Standing, store: str, name: str) -> list[Bar]:
    return [
        Bar(one.name, spread.median, report.number_text(spread.median), one.ours)
        for one in standing.contestants
        if one.store == store and (spread := standing.spread(one, name))
    ]


def show(about: dict[str, Any], options: argparse.Namespace, standing: Standing, not_run: dict[str, str]) -> None:
    """Print the machine, one table a measure, who is missing, and the line of ratios."""
    for key, value in about.items():
        print(f"{key + ':':15} {versions_text(value) if isinstance(value, dict) else value}")
    fewer = [f"{one.name} {one.most_jobs:,}" for one in standing.contestants if one.most_jobs < options.size.jobs]
    print(f"{'repetitions:':15} {options.repeat}; shown: median (least-most); a ratio is taken within a repetition")
    print(f"{'jobs a drain:':15} {options.size.jobs:,}{', but ' if fewer else ''}{', '.join(fewer)}\n")
    for title, lines in tables(standing):
        if title[1] in options.measures:
            print(title, *aligned(lines), "", sep="\n")
    for (key, measure), reason in standing.amiss.items():
        print(f"({measure}) {key}: {reason}")
    print(f"not run: {len(not_run)}", *(f"  {peer}: not run: {reason}" for peer, reason in not_run.items()), sep="\n")
    if about["load_at_start"] > about["cores"] / 2:
        print(f"The machine was busy (load {about['load_at_start']}): repeat this on a quiet one.")
    print(summary(standing))


def versions_text(versions: dict[str, dict[str, str]]) -> str:
    return "; ".join(dict.fromkeys(f"{name} {held}" for one in versions.values() for name, held in one.items()))


def measure_alone(options: argparse.Namespace, about: dict[str, Any], stack: ExitStack) -> None:
    """Measure what only duly is asked: an idle worker, or the memory of a long drain."""
    name = "idle" if options.idle else "memory"
    document: dict[str, Any] = {"about": about}
    for store in [store for store in options.stores if store != "redis"]:
        place = stack.enter_context(place_of(store, RESULTS))
        about[NAMES[store]] = place.describe()
        if options.idle:
            figures = alone.measure_idle(place, options.idle_seconds)
        else:
            figures = alone.measure_memory(place, options.jobs or 200_000)
        report.progress("")
        document[store] = figures
        rows = [
            [what, report.number_text(value), alone.unit(what) if options.idle else ""]
            for what, value in figures.items()
        ]
        print(*aligned([[f"{NAMES[store]}: {name}", "", ""], *rows]), "", sep="\n")
    about["load_at_end"] = round(os.getloadavg()[0], 2)
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    for key, value in about.items():
        print(f"{key + ':':15} {value}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.field", description=__doc__)
    peers = sorted({one.peer for one in CONTESTANTS})
    parser.add_argument("--only", type=words(peers), help=f"only these, by comma: {', '.join(peers)}")
    parser.add_argument(
        "--measure",
        dest="measures",
        type=words(MEASURES),
        default=list(MEASURES),
        help=f"only these, by comma: {'; '.join(f'{letter} {what}' for letter, what in MEASURES.items())}",
    )
    parser.add_argument("--store", dest="stores", type=words(STORES), default=list(STORES), help="only these, by comma")
    parser.add_argument("--jobs", type=int, help="jobs a drain (default 20,000, slow peers fewer; --memory 200,000)")
    parser.add_argument("--repeat", type=int, help="repetitions (default 3, with --quick 1)")
    parser.add_argument("--quick", action="store_true", help="2,000 jobs, one repetition: to see that all works")
    parser.add_argument("--idle", action="store_true", help="instead: what an idle worker of duly costs")
    parser.add_argument("--idle-seconds", type=float, default=20, help="how long it has nothing to do (default 20)")
    parser.add_argument("--memory", action="store_true", help="instead: memory of one worker of duly over many jobs")
    options = parser.parse_args()
    options.repeat = options.repeat or (1 if options.quick else 3)
    size = QUICK if options.quick else Size()
    options.size = Size(**{**vars(size), **({"jobs": options.jobs} if options.jobs else {})})
    if "f" in options.measures and "c" not in options.measures:
        options.measures.append("c")  # the drain of (c) is what (f) is the cost of
    return options


def words(known: Any) -> Any:
    """Read a list by comma of which each must be known."""

    def read(text: str) -> list[str]:
        given = [part.strip() for part in text.split(",") if part.strip()]
        unknown = [part for part in given if part not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(known)}")
        return given

    return read


if __name__ == "__main__":
    main()
