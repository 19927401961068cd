"""Quantiles. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least a fraction `share` of the values does not exceed; NaN if there are none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


@dataclass(frozen=True, slots=True)
class Spread:
    """Summary of a distribution."""

    count: int
    median: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """Return the summary; None if there are no values."""
        if not values:
            return None
        return cls(len(values), quantile(values, 0.5), quantile(values, 0.99), quantile(values, 1.0))
