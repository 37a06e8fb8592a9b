"""The nouns of a measurement: samples, what they are compared with, and the target they are held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Spread:
    """The repetitions of one measurement."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def low(self) -> float:
        return min(self.samples)

    @property
    def high(self) -> float:
        return max(self.samples)

    def over(self, other: Spread) -> Spread:
        """Divide repetition by repetition: what disturbed the machine in one disturbed both sides of it."""
        return Spread(tuple(ours / theirs for ours, theirs in zip(self.samples, other.samples, strict=True)))

    def plain(self) -> dict[str, Any]:
        return {"median": self.median, "min": self.low, "max": self.high, "samples": list(self.samples)}


@dataclass(frozen=True)
class Target:
    """What a figure is held to. A missed target is reported, and fails nothing."""

    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float) -> bool:
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is None or value <= self.at_most


@dataclass(frozen=True)
class Figure:
    """One measured thing: duly's own value, that of each limit, and duly's ratio to each of them."""

    store: str
    measure: str
    unit: str
    duly: Spread
    limits: Mapping[str, Spread] = field(default_factory=dict)
    ratios: Mapping[str, Spread] = field(default_factory=dict)
    target: Target | None = None
    # What the target judges: the ratios, or the value itself.
    judged: str = "ratios"
    # Its name in the line that a run ends with, where it has a place there.
    short: str = ""

    def verdicts(self) -> dict[str, bool]:
        """Say of each judged value whether it meets the target."""
        if self.target is None:
            return {}
        judged = {"value": self.duly} if self.judged == "value" else self.ratios
        return {name: self.target.met(spread.median) for name, spread in judged.items()}

    def plain(self) -> dict[str, Any]:
        return {
            "store": self.store,
            "measure": self.measure,
            "unit": self.unit,
            "ratios": {name: spread.plain() for name, spread in self.ratios.items()},
            "duly": self.duly.plain(),
            "limits": {name: spread.plain() for name, spread in self.limits.items()},
            "target": None
            if self.target is None
            else {
                "at_least": self.target.at_least,
                "at_most": self.target.at_most,
                "judged": self.judged,
                "met": self.verdicts(),
            },
        }


def compared(
    store: str,
    measure: str,
    unit: str,
    samples: Mapping[str, Sequence[float]],
    target: Target | None = None,
    *,
    judged: str = "ratios",
    short: str = "",
) -> Figure:
    """Make the figure of duly beside its limits from the samples of each, taken in turns."""
    spreads = {name: Spread(tuple(values)) for name, values in samples.items()}
    duly = spreads.pop("duly")
    return Figure(
        store,
        measure,
        unit,
        duly,
        limits=spreads,
        ratios={name: duly.over(spread) for name, spread in spreads.items()},
        target=target,
        judged=judged,
        short=short,
    )


def alone(
    store: str, measure: str, unit: str, value: float, target: Target | None = None, *, short: str = ""
) -> Figure:
    """Make the figure of something that has no limit beside it."""
    return Figure(store, measure, unit, Spread((value,)), target=target, judged="value", short=short)


def percentile(samples: Sequence[float], share: float) -> float:
    """Take the sample that `share` of all do not exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
