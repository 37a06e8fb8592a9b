"""What runs side by side: what mostly waits; never beside another what compares speeds."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.proof import abreast, table
from tests.proof.abreast import Run
from tests.proof.table import Figure, Line, Row, Setting

ROOT = Path(__file__).parents[2]


def row(name: str, *, takes: float = 0.5, control_takes: float = 0.5, **more: bool) -> Row:
    return Row(name, "a row", "a target", _never, ("none",), takes=takes, control_takes=control_takes, **more)


def _never(setting: Setting) -> Figure:
    raise AssertionError("nobody runs it here")


class Stage:
    """Runs that take a while each, and who was beside whom."""

    def __init__(self, **verdicts: list[str]) -> None:
        self.verdicts = verdicts
        self.now: list[str] = []
        self.together: list[set[str]] = []
        self.alone: list[str] = []

    def start(self, run: Run, beside: bool) -> Played:
        name = run.row.id if run.control is None else f"{run.row.id} without"
        self.now.append(name)
        self.together.append(set(self.now))
        if not beside:
            self.alone.append(name)
        return Played(self, name, run)


class Played:
    def __init__(self, stage: Stage, name: str, run: Run) -> None:
        self._stage, self._name, self._run = stage, name, run
        self.sentinel, end = multiprocessing.Pipe(duplex=False)
        end.close()

    def line(self) -> Line:
        self.sentinel.close()
        self._stage.now.remove(self._name)
        verdicts = self._stage.verdicts.get(self._run.row.id, ["green"])
        row = self._run.row
        return Line(row.id, row.title, self._run.control, "so", row.target, verdicts.pop(0), 1, 2.0, {})

    def interrupt(self) -> None:
        self._stage.now.remove(self._name)


def played(stage: Stage, *rows: Row, processors: int = 2) -> tuple[list[Line], list[Line]]:
    shown: list[Line] = []
    runs = [Run(one, control, 1, False) for one in rows for control in (None, *one.controls)]
    for one in rows:
        stage.verdicts.setdefault(one.id, ["green"] * 2)
    return abreast.lines(runs, start=stage.start, processors=processors, show=shown.append), shown


def test_rows_that_compare_speeds_run_alone():
    stage = Stage()
    played(stage, row("P1", takes=table.ALL), row("P2"), row("P3", takes=table.ALL, control_takes=table.ALL), row("P4"))
    assert set(stage.alone) == {"P1", "P3", "P3 without"}
    assert all(len(some) == 1 for some in stage.together if some & set(stage.alone))
    assert any(len(some) > 1 for some in stage.together)


def test_at_most_as_many_runs_as_processors_are_concurrent():
    stage = Stage()
    played(stage, row("P1", takes=1.0, control_takes=1.0), row("P2"), row("P3"), row("P4", takes=1.5))
    shares = {"P1": 1.0, "P1 without": 1.0, "P4": 1.5}
    assert max(sum(shares.get(name, 0.5) for name in some) for some in stage.together) == 2.0


def test_patient_rows_run_one_at_a_time_beside_others():
    stage = Stage()
    played(stage, row("P1", patient=True), row("P2", takes=2.0), row("P3", patient=True), row("P4", takes=table.ALL))
    patient = {"P1", "P1 without", "P3", "P3 without"}
    assert max(len(some & patient) for some in stage.together) == 1
    assert any({"P2"} < some for some in stage.together)
    assert stage.alone == ["P4"]


def test_a_row_that_needs_more_processors_still_runs():
    lines, _ = played(Stage(), row("P1", takes=1.5), row("P2"), processors=1)
    assert len(lines) == 4


def test_a_row_too_slow_beside_others_is_run_again_alone_with_a_note():
    stage = Stage(P2=[table.TOO_SLOW, "green", "green"])
    lines, shown = played(stage, row("P1"), row("P2"), row("P3"))
    assert stage.alone == ["P2"]
    [line] = [line for line in lines if line.row == "P2" and line.control is None]
    assert line.figure == "so [run again alone, as it was too slow beside others: so]"
    assert (line.verdict, line.seconds) == ("green", 4.0)
    assert len(shown) == 6


def test_lines_are_printed_in_table_order():
    lines, shown = played(Stage(), row("P1", takes=table.ALL), row("P2"))
    assert [(line.row, line.control) for line in lines] == [
        ("P1", None), ("P1", "none"), ("P2", None), ("P2", "none"),
    ]  # fmt: skip
    assert shown[-1].row == "P1"


def test_an_interrupted_table_interrupts_its_running_rows():
    stage = Stage()

    def show(line: Line) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        abreast.lines(
            [Run(row(name), None, 1, False) for name in ("P1", "P2", "P3")],
            start=stage.start, processors=2, show=show,
        )  # fmt: skip
    assert stage.now == []


def test_every_row_of_speed_runs_alone_with_its_controls():
    of_speed = [one for one in table.rows([]) if one.of_speed]
    assert of_speed
    assert all(one.takes == one.control_takes == table.ALL for one in of_speed)


def test_rows_with_rates_or_time_limits_run_alone():
    assert {one.id for one in table.rows(["P1", "P5", "P7", "P8"]) if one.takes == table.ALL} == {
        "P1",
        "P5",
        "P7",
        "P8",
    }


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_proof_leaves_nothing(tmp_path, sign):
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN) if sign != signal.SIGINT else None  # as in a background
    words = ["--only", "P3", "--no-controls", "--json", str(tmp_path / "proof.json")]
    proof = subprocess.Popen(
        [sys.executable, "-m", "tests.proof", *words], cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0,
    )  # fmt: skip
    signal.signal(signal.SIGINT, ignored or signal.default_int_handler)
    try:
        port = server_of(tmp_path)
        proof.send_signal(sign)
        proof.wait(30)
    finally:
        proof.kill()
        proof.wait()
    assert soon(lambda: workers_of(tmp_path) == {})  # who was killed outright does not wait for the others
    assert soon(lambda: not listens(port))
    assert soon(lambda: [path for path in tmp_path.iterdir() if path.name.startswith("proof-")] == [])


def workers_of(folder: Path) -> dict[int, str]:
    """Find the workers whose ledger is in a folder, by their process ids, each with the server it works on."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        if f"PROOF_LEDGER={folder}" in text:
            found[int(path.parent.name)] = re.findall(r"PROOF_URL=([^\0]*)", text)[0]
    return found


def server_of(folder: Path) -> int:
    """Wait until workers are there, and give the port of their server."""
    assert soon(lambda: bool(workers_of(folder)))
    [url] = set(workers_of(folder).values())
    return urlsplit(url).port or 0


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def soon(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + 30
    while not (held := holds()) and time.monotonic() < until:
        time.sleep(0.05)
    return held
