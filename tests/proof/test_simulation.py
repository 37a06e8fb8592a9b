"""The simulation itself: one seed gives one world, a planted bug is found, and a failing world is made shorter."""

from __future__ import annotations

from dataclasses import astuple

from tests.proof.breaks import broken
from tests.proof.rows.p06_simulation import PLANTED, judge
from tests.proof.simulation import Simulation, scenario, shortened


def seen(seed: int) -> tuple[object, ...]:
    world = Simulation(scenario(seed))
    wrong = world.run()
    return wrong, [astuple(run) for run in world.ledger.runs], world.loop.now


def test_a_world_is_made_by_its_seed_alone():
    first, again = seen(11), seen(11)
    assert first == again
    assert first[1] != seen(12)[1]


def test_some_worlds_with_faults_end_well():
    assert [seed for seed in range(1_000, 1_020) if judge(seed)] == []


def test_a_planted_bug_is_found_and_its_world_is_made_shorter():
    with broken("sim:no_fence"):
        failing = next(seed for seed in range(200) if judge(seed))
        shorter = shortened(scenario(failing))
        assert Simulation(shorter).run()
    whole = scenario(failing)
    assert len(shorter.plans) + len(shorter.faults) < len(whole.plans) + len(whole.faults)
    assert Simulation(shorter).run() == []


def test_enough_bugs_are_planted():
    assert len(PLANTED) >= 12
