"""Quantiles of what was measured. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed; not-a-number when there are none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


@dataclass(frozen=True, slots=True)
class Spread:
    """How some values lie; not-a-number throughout when there were none."""

    count: int
    median: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(len(values), quantile(values, 0.5), quantile(values, 0.99), quantile(values, 1.0))
