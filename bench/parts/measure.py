"""Runs the parts: all of them in every repetition, forwards and backwards by turns."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from bench.figures import Figure
from bench.parts.draining import Cost, Drains, OneWorker, RealPath, TwoWorkers
from bench.parts.enqueueing import BulkEnqueue, SingleEnqueue
from bench.parts.mixing import Mixed
from bench.parts.part import Part, Plan, in_order
from bench.parts.picking import PickUp
from bench.parts.place import Place

LETTERS = "abcdefgi"


def measured(place: Place, plan: Plan, only: Collection[str] = LETTERS) -> Iterator[Figure]:
    """Measure one place."""
    parts = [part for part in _parts(place, plan) if part.letter in only]
    for turn in range(plan.repeat):
        for part in in_order(parts, turn):
            plan.say(f"{place.store}: ({part.letter}) {part.title}, {turn + 1} of {plan.repeat}")
            part.run(turn)
    for part in parts:
        yield from part.figures()


def _parts(place: Place, plan: Plan) -> list[Part]:
    drains = Drains(place, plan)
    return [
        SingleEnqueue(place, plan),
        BulkEnqueue(place, plan),
        OneWorker(place, plan, drains),
        TwoWorkers(place, plan, drains),
        PickUp(place, plan),
        Cost(place, plan, drains),
        Mixed(place, plan),
        RealPath(place, plan, drains),
    ]
