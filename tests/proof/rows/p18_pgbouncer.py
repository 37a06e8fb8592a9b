"""P18: the contract holds behind PgBouncer in transaction mode, where no two transactions need share a session."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from duly.store.postgres.schema import bring_up_to_date
from tests.proof.breaks import BREAKS
from tests.proof.fleet import Fleet, fleet, producer
from tests.proof.ledger import records
from tests.proof.table import ALL, Figure, NotRun, Row, Setting
from tests.servers.pgbouncer import MISSING, PREPARED, VARIABLE, PgBouncer, find_binary
from tests.servers.postgres import PostgresServer

ROOT = Path(__file__).parents[3]
SITE = ROOT / "tests" / "servers" / "pgbouncer_site"
# Every operation, its answer and its repetition; commits that are shared; wake-ups.
SHORT = ("statements", "lost_answers", "coalesce", "wake")
CONTROL = ("processes", "claim")  # many at once on few connections
MOST_SECONDS = 1800
POLL, SLACK = 1.0, 0.3


def _prepared() -> Callable[[], None]:
    """Leave prepared statements on."""
    os.environ[PREPARED] = "on"

    def undo() -> None:
        del os.environ[PREPARED]

    return undo


BREAKS["p18:prepared"] = _prepared


def run(setting: Setting) -> Figure:
    """Run the suite with all that duly opens led through PgBouncer, then workers set as the documentation says."""
    if find_binary() is None:
        raise NotRun(MISSING)
    names = CONTROL if setting.broken else setting.pick(SHORT, ())
    paths = [f"tests/contract/test_{name}.py" for name in names] or ["tests/contract", "tests/engine"]
    ledger = setting.folder / "tests.jsonl"
    said = _suite(paths, ledger, ["--exitfirst"] if setting.broken else [])
    text, good, numbers = _judged(ledger, said)
    if setting.broken:
        return Figure(text, good, numbers)
    waits = _pick_up(setting)
    limits = {"listen_url": SLACK, "polling": POLL + SLACK}
    good = good and all(len(waits[way]) == _jobs(setting) and max(waits[way]) <= limits[way] for way in limits)
    parts = (f"with {way} in {max(waits[way], default=0) * 1000:.0f} ms" for way in limits)
    text += f"; jobs for an idle worker begin {', '.join(parts)} at most"
    return Figure(text, good, {**numbers, **{f"{way}_s": waits[way] for way in limits}})


def _suite(paths: list[str], ledger: Path, more: list[str]) -> str:
    """Run tests in a process of their own, and give the last that it said."""
    own = {VARIABLE: "on", "PROOF_LEDGER": str(ledger), "PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}"}
    words = [
        "-p",
        "tests.proof.behind",
        "-p",
        "no:cacheprovider",
        "-q",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "-m",
        "not nightly",
        *more,
    ]
    told = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *paths],
        cwd=ROOT, env={**os.environ, **own}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=MOST_SECONDS,
    )  # fmt: skip
    return "\n".join((told.stdout + told.stderr).strip().splitlines()[-30:])


def _judged(ledger: Path, said: str) -> tuple[str, bool, dict[str, Any]]:
    ended: dict[str, str] = {}
    left_out: dict[str, str] = {}
    why: list[str] = []
    through = 0
    for one in records(ledger):
        match one["what"]:
            case "test":
                ended[one["test"]] = one["how"] if ended.get(one["test"]) != "failed" else "failed"
                if one["how"] != "passed":
                    why.append(f"{one['test'].rpartition('::')[2]}: {one['why']}")
            case "left_out":
                left_out[one["test"]] = one["why"]
            case "through":
                through += one["transactions"]
    counts, reasons = Counter(ended.values()), Counter(left_out.values())
    text = f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
    if reasons:
        text += f", {len(left_out)} left out ({'; '.join(f'{number} {reason}' for reason, number in reasons.items())})"
    text += f"; {through:,} transactions through PgBouncer"
    good = set(counts) == {"passed"} and through > counts["passed"]
    if not good:
        text += f"; first: {why[0]}" if why else f"; {said}"
    return text, good, {**counts, "left_out": dict(reasons), "transactions": through, "why": why[:20]}


def _jobs(setting: Setting) -> int:
    return int(setting.pick(4, 20))


def _pick_up(setting: Setting) -> dict[str, list[float]]:
    """Have an idle worker, set by the environment as users do, begin jobs that come at random moments."""
    waits = {}
    with PostgresServer() as server, PgBouncer(server) as bouncer:
        for way in ("listen_url", "polling"):
            direct = server.new_database()
            bring_up_to_date(direct)
            url = direct.replace(str(server.port), str(bouncer.port))
            own = {"DULY_PREPARED": "false", **({"DULY_LISTEN_URL": direct} if way == "listen_url" else {})}
            folder = setting.folder / way
            folder.mkdir()
            with fleet(url, folder) as workers:
                workers.start(environ=own)
                waits[way] = _waits(workers, setting) if workers.started(1) else []
    return waits


def _waits(workers: Fleet, setting: Setting) -> list[float]:
    chance = random.Random(setting.seed)
    app = producer(workers)
    app.database.change(prepared=False)
    acknowledged: dict[str, float] = {}
    try:
        for number in range(_jobs(setting)):
            time.sleep(chance.uniform(0.3, 1.2))
            acknowledged[app.tasks["quick"].enqueue(number).id] = time.monotonic()
        workers.wait(lambda: len(workers.history().runs) == len(acknowledged), 5)
    finally:
        app.close()
        app.database.change(prepared=None)
    return [round(runs[0].begun - acknowledged[job], 4) for job, runs in workers.history().runs.items()]


ROW = Row(
    "P18",
    "behind PgBouncer in transaction mode",
    "the contract suite green (short: " + ", ".join(SHORT) + "; full: all of contract and engine), nothing skipped; "
    "pick-up within 0.3 s by listen_url and within the 1 s poll without",
    run,
    controls=("p18:prepared",),
    takes=ALL,
    control_takes=ALL,
)
