"""Computes throughput and latency from the samples of a load. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from multiworld_serving.testing.load.clients import Sample

SHARES = (0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
_MAX_ERRORS = 5


@dataclass(frozen=True)
class Measurement:
    """Statistics of the requests that were sent in an interval.

    Attributes:
        answered_per_s: correct answers received in the interval, per second.
        latency_ms: latency of correct answers by name: "p50" … "max", and "mean"; empty if there are none.
        statuses: requests by HTTP status; "none" if there was no response.
        errors: the most frequent errors with their counts.
        unsent: requests of an open loop that were not sent.
    """

    seconds: float
    requests: int
    answered: int
    refused: int
    failed: int
    unsent: int
    rows_per_request: int
    answered_per_s: float
    latency_ms: dict[str, float]
    statuses: dict[str, int]
    errors: dict[str, int]

    @property
    def rows_per_s(self) -> float:
        return self.answered_per_s * self.rows_per_request

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "rows_per_s": self.rows_per_s}


def measure(
    samples: Sequence[Sample], since_s: float, until_s: float, *, unsent: int = 0, rows_per_request: int = 1
) -> Measurement:
    """Compute the statistics of requests sent from `since_s` to `until_s`, even if they were answered later."""
    seconds = max(1e-9, until_s - since_s)
    counted = [sample for sample in samples if since_s <= sample.sent_s <= until_s]
    right = [sample for sample in counted if not sample.failed and not sample.refused]
    in_time = sum(since_s <= s.done_s <= until_s and not s.failed and not s.refused for s in samples)
    failed = [sample for sample in counted if sample.failed]
    return Measurement(
        seconds=seconds,
        requests=len(counted),
        answered=len(right),
        refused=sum(sample.refused for sample in counted),
        failed=len(failed),
        unsent=unsent,
        rows_per_request=rows_per_request,
        answered_per_s=in_time / seconds,
        latency_ms=_latency_ms([sample.took_s for sample in right]),
        statuses=dict(Counter(str(sample.status or "none") for sample in counted)),
        errors=dict(Counter(sample.error for sample in failed).most_common(_MAX_ERRORS)),
    )


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


def _latency_ms(times_s: Sequence[float]) -> dict[str, float]:
    if not times_s:
        return {}
    ordered = sorted(times_s)
    named = {f"p{100 * share:g}" if share < 1 else "max": 1e3 * quantile(ordered, share) for share in SHARES}
    return named | {"mean": 1e3 * sum(ordered) / len(ordered)}
