"""Writes what was measured for people: ratios first, then the targets, then one line. Nothing is printed here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.figures import Figure, number_text, ratio_text, spread_text

HEADINGS = ("ratio", "to", "measure", "keep", "duly", "beside it", "unit")
TARGET_HEADINGS = ("target", "found", "", "measure", "store")
EXPLAINED = """\
A ratio is duly / what it is compared with, taken within a repetition: the median, with the least and the greatest.
The limit claims and deletes in one round trip, through the same client library, and syncs as hard; it keeps nothing,
or, where it says so, moves what it claimed to a narrow table.
keep says what becomes of jobs that succeed: kept as history, or keep=0, deleted."""


def rows(figures: Sequence[Figure]) -> Iterator[tuple[str, ...]]:
    """Give the lines of a table, one for each ratio of a figure."""
    for figure in figures:
        ours = spread_text(figure.duly, number_text)
        first = True
        for name, ratio in figure.ratios.items():
            beside = spread_text(figure.limits[name], number_text)
            what = (named(figure), figure.keep, ours) if first else ("", "", "")
            yield (spread_text(ratio, ratio_text), name, *what, beside, figure.unit)
            first = False
        if not figure.ratios:
            yield ("", "", named(figure), figure.keep, ours, "", figure.unit)


def named(figure: Figure) -> str:
    """Name a figure with its letter."""
    return f"({figure.part}) {figure.measure}" if figure.part else figure.measure


def target_rows(figures: Sequence[Figure]) -> Iterator[tuple[str, ...]]:
    """Give the lines of the table of targets: what was asked, what was found, and by how much it was missed."""
    for figure in figures:
        for name, found in figure.judgeable().items():
            assert figure.target is not None
            missed = figure.target.missed_by(found.median)
            of = f" {figure.unit}" if name == "value" else f" × {name}"  # noqa: RUF001
            keep = f", {figure.keep}" if figure.keep else ""
            yield (
                figure.target.text() + of,
                number_text(found.median),
                "met" if not missed else f"missed by {missed:.0%}",
                named(figure) + keep,
                figure.store,
            )


def summary(figures: Sequence[Figure]) -> str:
    """Write the one line that a run ends with, of the parts that have a letter."""
    figures = [figure for figure in figures if figure.part]
    stores = dict.fromkeys(figure.store for figure in figures)
    parts = [
        f"{store}: {', '.join(short_text(figure) for figure in figures if figure.store == store and figure.short)}"
        for store in stores
    ]
    met = [met for figure in figures for met in figure.verdicts().values()]
    return f"summary: {'; '.join(parts)}; targets met: {sum(met)} of {len(met)}"


def short_text(figure: Figure) -> str:
    """Write a figure in two or three words."""
    if not figure.ratios:
        return f"{figure.short} {number_text(figure.duly.median)} {figure.unit}"
    return f"{figure.short} {'|'.join(ratio_text(spread.median) for spread in figure.ratios.values())}"
