"""How a row is run: again where chance had its hand in it, never where something went wrong."""

from __future__ import annotations

import multiprocessing
import re
from contextlib import nullcontext

import pytest

from tests.proof import breaks, table
from tests.proof.__main__ import main
from tests.proof.abreast import Run
from tests.proof.table import Figure, Line, NotRun, Row


def row(*figures: Figure | Exception) -> tuple[Row, list[Figure | Exception]]:
    left = list(figures)

    def run(setting: table.Setting) -> Figure:
        figure = left.pop(0)
        if isinstance(figure, Exception):
            raise figure
        return figure

    return Row("P0", "a row", "a target", run, controls=()), left


class Here:
    """A run in this process, since no other knows of a row that a test makes up."""

    def __init__(self, run: Run, beside: bool) -> None:
        self.sentinel, self._end = multiprocessing.Pipe(duplex=False)
        self._line = table.run(run.row, seed=run.seed, full=run.full, control=run.control, beside=beside)
        self._end.close()

    def line(self) -> Line:
        self.sentinel.close()
        return self._line

    def interrupt(self) -> None: ...


SLOW = Figure("slow", False, only_slow=True)
WRONG = Figure("wrong", False)
FINE = Figure("fine", True)


def test_a_slow_row_is_measured_again_with_a_note():
    made, left = row(SLOW, FINE, FINE)
    line = table.run(made, seed=1, full=False)
    assert (line.verdict, len(left)) == ("green", 1)
    assert line.figure == "fine [run again, as it was too slow: slow]"


def test_a_row_slow_each_time_is_red_and_only_tolerated_with_the_option():
    made, left = row(SLOW, SLOW, SLOW, FINE)
    line = table.run(made, seed=1, full=False)
    assert (line.verdict, len(left)) == ("RED", 1)
    assert not table.holds(line)
    assert table.holds(line, tolerant=True)


@pytest.fixture
def a_defence(monkeypatch):
    """Offer a defence that can be taken away, and is nowhere."""
    monkeypatch.setitem(breaks.BREAKS, "none", lambda: lambda: None)
    return "none"


def test_a_control_that_stays_green_is_run_again_with_a_note(a_defence):
    made, left = row(FINE, WRONG, FINE)
    line = table.run(made, seed=1, full=False, control=a_defence)
    assert (line.verdict, len(left)) == ("red, as it must", 1)
    assert line.figure == "wrong [run again, as it stayed green: fine]"


def test_a_repeated_run_has_another_seed():
    seeds: list[int] = []

    def run(setting: table.Setting) -> Figure:
        seeds.append(setting.seed)
        return SLOW

    table.run(Row("P0", "a row", "a target", run, controls=()), seed=7, full=False)
    assert seeds == [7, 8, 9]


def test_a_control_that_stays_green_each_time_is_not_as_it_must_be(a_defence):
    made, left = row(FINE, FINE, FINE, WRONG)
    line = table.run(made, seed=1, full=False, control=a_defence)
    assert (line.verdict, len(left)) == ("STAYS GREEN", 1)
    assert not table.holds(line, tolerant=True)


@pytest.mark.parametrize("fault", [WRONG, RuntimeError("a fault of the row")])
def test_a_wrong_row_is_never_repeated_or_tolerated(fault, capsys):
    made, left = row(fault, FINE)
    line = table.run(made, seed=1, full=False)
    assert len(left) == 1
    assert not table.holds(line, tolerant=True)


def test_a_row_that_cannot_run_has_a_reason():
    made, _ = row(NotRun("no such server: install it"))
    line = table.run(made, seed=1, full=False)
    assert (line.verdict, line.figure) == ("NOT RUN", "no such server: install it")
    assert not table.holds(line)
    assert table.holds(line, tolerant=True)


@pytest.mark.parametrize("control", [None, "none"])
def test_a_row_slow_beside_others_is_not_judged(control, a_defence):
    made, left = row(SLOW, FINE)
    line = table.run(made, seed=1, full=False, control=control, beside=True)
    assert (line.verdict, len(left)) == (table.TOO_SLOW, 1)


def test_a_row_wrong_beside_others_is_judged():
    made, _ = row(WRONG)
    assert table.run(made, seed=1, full=False, beside=True).verdict == "RED"


def test_the_summary_repeats_every_failure(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("tests.proof.table.rows", lambda only: [row(FINE)[0], row(WRONG)[0]])
    monkeypatch.setattr("tests.proof.abreast.Process", Here)
    monkeypatch.setattr("tests.proof.__main__.initialised", nullcontext)
    monkeypatch.setattr("sys.argv", ["tests.proof", "--json", str(tmp_path / "proof.json")])
    assert main() == 1
    summary, again = capsys.readouterr().out.split("\n\n")[1].split("\n", 1)
    assert summary.startswith("1 of 2 rows green")
    assert re.search(r"RED .* wrong", again)
    assert "fine" not in again


def test_an_unknown_row_is_refused_with_the_names_of_all(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tests.proof", "--only", "p6,p7"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "--only: there is no row P6,P7; the rows are P1, P2, P3" in capsys.readouterr().err


def runs(monkeypatch, *words: str, seed: int) -> list[tuple[str, str | None]]:
    monkeypatch.setattr("sys.argv", ["tests.proof", "--seed", str(seed), *words])
    made: list[Run] = []
    monkeypatch.setattr("tests.proof.abreast.lines", lambda runs, **more: made.extend(runs) or [])
    monkeypatch.setattr("tests.proof.__main__.initialised", nullcontext)
    monkeypatch.setattr("tests.proof.table.write", lambda lines, path: None)
    main()
    return [(run.row.id, run.control) for run in made]


def test_a_short_proof_runs_one_control_of_each_row_and_the_next_seed_another(monkeypatch):
    short = [runs(monkeypatch, seed=seed) for seed in range(6)]
    for made in short:
        assert [row for row, control in made if control is None] == [row for row, control in made if control]
        assert not {"P4", "P9", "P10", "P16"} & {row for row, _ in made}
    whole = runs(monkeypatch, "--full", seed=1)
    assert {row for row, _ in whole} == {*table.names()}
    for row in ("P2", "P12", "P22"):
        assert {one for made in short for one in made if one[0] == row} == {one for one in whole if one[0] == row}


def test_a_row_of_the_long_proof_is_run_when_it_is_named(monkeypatch):
    assert [row for row, _ in runs(monkeypatch, "--only", "P4", seed=1)] == ["P4", "P4"]
