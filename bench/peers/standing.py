"""How the contestants stand: medians and spreads, duly's ratio to each of them, the tables and the last line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.figures import Spread
from bench.peers.measure import QUANTITIES, Quantity
from bench.peers.roster import MEASURES, Contestant
from bench.report import number_text, ratio_text, spread_text

# duly does not run on Redis: who does is compared with duly on PostgreSQL, in the same repetition.
COMPARED_ON = {"redis": "postgres"}
NAMES = {"postgres": "PostgreSQL", "sqlite": "SQLite", "redis": "Redis"}


@dataclass
class Standing:
    """What a run has found so far: a value for each contestant, quantity and repetition, and what went amiss."""

    contestants: Sequence[Contestant]
    values: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    amiss: dict[tuple[str, str], str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, one: Contestant, repetition: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.values.setdefault(one.key, {}).setdefault(name, {})[repetition] = value

    def fail(self, one: Contestant, measure: str, reason: str) -> None:
        """Note that it went wrong here; none of its figures of this measure count any longer."""
        self.amiss[one.key, measure] = reason
        shared = {"c": "cf"}.get(measure, measure)
        mine = self.values.get(one.key, {})
        for name in [name for name in mine if QUANTITIES[name].measure in shared]:
            del mine[name]

    def spread(self, one: Contestant, name: str) -> Spread | None:
        found = self.values.get(one.key, {}).get(name)
        return Spread(tuple(found.values())) if found else None

    def ratio(self, one: Contestant, name: str) -> Spread | None:
        """Divide duly's value by that of a contestant, repetition by repetition."""
        ours = self.reference(one.store, name)
        if ours is None:
            return None
        mine, theirs = self.values[ours.key][name], self.values.get(one.key, {}).get(name, {})
        pairs = [(mine[turn], value) for turn, value in theirs.items() if turn in mine and value]
        return Spread(tuple(our / their for our, their in pairs)) if pairs else None

    def reference(self, store: str, name: str) -> Contestant | None:
        """Find the duly that contestants on this store are compared with: the first that has the figure."""
        where = COMPARED_ON.get(store, store)
        mine = (one for one in self.contestants if one.ours and one.store == where)
        return next((one for one in mine if self.spread(one, name)), None)

    def best_peer(self, store: str, name: str) -> Contestant | None:
        """Find the peer on this store with the best median."""
        found = {one: self.spread(one, name) for one in self.contestants if one.store == store and not one.ours}
        medians = {one: spread.median for one, spread in found.items() if spread is not None}
        choose = max if QUANTITIES[name].more_is_better else min
        return choose(medians, key=medians.__getitem__) if medians else None

    def plain(self) -> list[dict[str, Any]]:
        """Give every figure with its ratio, for JSON."""
        return [
            {
                "contestant": one.name,
                "store": one.store,
                "measure": QUANTITIES[name].measure,
                "quantity": name,
                "unit": QUANTITIES[name].unit,
                "more_is_better": QUANTITIES[name].more_is_better,
                "duly / it": ratio.plain() if (ratio := self.ratio(one, name)) else None,
                **spread.plain(),
            }
            for one in self.contestants
            for name in QUANTITIES
            if (spread := self.spread(one, name))
        ]


def tables(standing: Standing) -> Iterator[tuple[str, list[list[str]]]]:
    """Give one table a measure and store: a title, the head and the rows."""
    for measure, what in MEASURES.items():
        for store in dict.fromkeys(one.store for one in standing.contestants):
            rows = [one for one in standing.contestants if one.store == store and takes_part(one, measure)]
            names = [name for name, quantity in QUANTITIES.items() if shown(standing, rows, name, quantity, measure)]
            if names or any((one.key, measure) in standing.amiss for one in rows):
                title = f"({measure}) {NAMES[store]}: {what}"
                yield title, [head(names), *(row(standing, one, names, measure) for one in rows)]


def takes_part(one: Contestant, measure: str) -> bool:
    return measure in one.measures


def shown(standing: Standing, rows: Sequence[Contestant], name: str, quantity: Quantity, measure: str) -> bool:
    return quantity.measure == measure and any(standing.spread(one, name) for one in rows)


def head(names: Sequence[str]) -> list[str]:
    ratios = [f"duly / it: {QUANTITIES[name].title}{direction(name)}" for name in names if QUANTITIES[name].compared]
    return [
        "",
        *ratios,
        *(f"{QUANTITIES[name].title}, {QUANTITIES[name].unit}" for name in names),
        "keeps",
        "durability",
    ]


def direction(name: str) -> str:
    return "" if QUANTITIES[name].more_is_better else " (less is better)"


def row(standing: Standing, one: Contestant, names: Sequence[str], measure: str) -> list[str]:
    amiss = standing.amiss.get((one.key, {"f": "c"}.get(measure, measure)))
    nothing = ("WRONG" if amiss.startswith("WRONG") else "failed") if amiss else "-"
    ratios = [standing.ratio(one, name) for name in names if QUANTITIES[name].compared]
    values = [standing.spread(one, name) for name in names]
    return [
        one.name,
        *(spread_text(ratio, ratio_text) if ratio else nothing for ratio in ratios),
        *(spread_text(value, number_text) if value else nothing for value in values),
        one.keep,
        one.durability,
    ]


def aligned(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Write rows as columns, with a rule below the first."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in (lines[0], ["-" * width for width in widths], *lines[1:]):
        yield "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()


def summary(standing: Standing) -> str:
    """Write the one line that a run ends with: duly against the best peer of each store and measure."""
    parts = []
    for store in dict.fromkeys(one.store for one in standing.contestants):
        texts = [text for name in QUANTITIES if (text := against_best(standing, store, name))]
        if texts:
            against = f"{NAMES[store]}{' (duly on PostgreSQL)' if store in COMPARED_ON else ''}"
            parts.append(f"{against}: {', '.join(texts)}")
    return f"summary (duly / best peer; * less is better) {'; '.join(parts) or 'nothing to compare'}"


def against_best(standing: Standing, store: str, name: str) -> str | None:
    best = standing.best_peer(store, name) if QUANTITIES[name].compared else None
    ratio = standing.ratio(best, name) if best else None
    if best is None or ratio is None:
        return None
    return f"{name}{'' if QUANTITIES[name].more_is_better else '*'} {ratio_text(ratio.median)} ({best.name})"
