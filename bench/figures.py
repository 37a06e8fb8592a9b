"""The nouns of a measurement: samples, what they are compared with, and the target they are held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from duly.bench.report import Spread, number_text, percentile, spread_text

__all__ = [
    "Figure",
    "Spread",
    "Target",
    "alone",
    "compared",
    "kept",
    "number_text",
    "percentile",
    "ratio_text",
    "spread_text",
]


@dataclass(frozen=True)
class Target:
    """What a figure is held to. A missed target is reported, and fails nothing."""

    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float) -> bool:
        """Say whether a value is good enough."""
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is None or value <= self.at_most

    def missed_by(self, value: float) -> float:
        """Say what share of the target is missing, or is too much."""
        if self.met(value):
            return 0.0
        bound = self.at_least if self.at_least is not None else self.at_most
        assert bound is not None
        return abs(value - bound) / bound

    def text(self) -> str:
        """Write it for people."""
        return f"≥ {number_text(self.at_least)}" if self.at_least is not None else f"≤ {number_text(self.at_most or 0)}"


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
    # What the target judges: all ratios, the value itself, or the ratio of this name.
    judged: str = "ratios"
    # Its name in the line that a run ends with, where it has a place there.
    short: str = ""
    # The letter of its part, and what becomes of jobs that succeed: "kept", "keep=0", or nothing where none does.
    part: str = ""
    keep: str = ""

    def judgeable(self) -> dict[str, Spread]:
        """Give what the target judges, by name."""
        if self.target is None:
            return {}
        if self.judged == "value":
            return {"value": self.duly}
        return {name: ratio for name, ratio in self.ratios.items() if self.judged in ("ratios", name)}

    def verdicts(self) -> dict[str, bool]:
        """Say of each judged value whether it meets the target."""
        target = self.target
        return {} if target is None else {name: target.met(found.median) for name, found in self.judgeable().items()}

    def plain(self) -> dict[str, Any]:
        """Give it as JSON has it."""
        return {
            "part": self.part,
            "store": self.store,
            "measure": self.measure,
            "keep": self.keep,
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
    part: str = "",
    keep: str = "",
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
        ratios={name: over(duly, spread) for name, spread in spreads.items()},
        target=target,
        judged=judged,
        short=short,
        part=part,
        keep=keep,
    )


def alone(
    store: str,
    measure: str,
    unit: str,
    samples: Sequence[float],
    target: Target | None = None,
    *,
    short: str = "",
    part: str = "",
    keep: str = "",
) -> Figure:
    """Make the figure of something that has no limit beside it."""
    spread = Spread(tuple(samples))
    return Figure(store, measure, unit, spread, target=target, judged="value", short=short, part=part, keep=keep)


def kept(keep: bool) -> str:
    """Name what becomes of a job that succeeds."""
    return "kept" if keep else "keep=0"


def ratio_text(value: float) -> str:
    """Write a ratio."""
    return f"{value:.2f}"


def over(ours: Spread, theirs: Spread) -> Spread:
    """Divide repetition by repetition: what disturbed the machine in one disturbed both sides of it."""
    return Spread(tuple(one / other for one, other in zip(ours.samples, theirs.samples, strict=True)))
