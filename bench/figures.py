"""The nouns of a measurement, as `duly bench` has them."""

from duly.bench.figures import (
    Figure,
    Spread,
    Target,
    alone,
    compared,
    kept,
    number_text,
    percentile,
    ratio_text,
    spread_text,
)

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
