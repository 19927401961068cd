"""Computes throughput and latency from the samples of a load. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from multiworld_serving.testing.load.clients import Load

SHARES = (0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
_MAX_ERRORS = 5


def measure(load: Load, since_s: float, until_s: float, *, rows_per_request: int = 1) -> dict[str, Any]:
    """Return the statistics of requests sent from `since_s` to `until_s`, even if they were answered later, as JSON values.

    answered_per_s: correct answers received in the interval, per second.
    latency_ms: latency of correct answers by name: "p50" … "max", and "mean"; empty if there are none.
    statuses: requests by HTTP status; "none" if there was no response.
    errors: the most frequent errors with their counts.
    unsent: requests of an open loop that were not sent.
    """
    seconds = max(1e-9, until_s - since_s)
    counted = [sample for sample in load.samples if since_s <= sample.sent_s <= until_s]
    right = [sample for sample in counted if not sample.failed and not sample.refused]
    in_time = sum(since_s <= s.done_s <= until_s and not s.failed and not s.refused for s in load.samples)
    failed = [sample for sample in counted if sample.failed]
    return {
        "seconds": seconds,
        "requests": len(counted),
        "answered": len(right),
        "refused": sum(sample.refused for sample in counted),
        "failed": len(failed),
        "unsent": load.unsent,
        "rows_per_request": rows_per_request,
        "answered_per_s": in_time / seconds,
        "rows_per_s": in_time / seconds * rows_per_request,
        "latency_ms": _latency_ms([sample.took_s for sample in right]),
        "statuses": dict(Counter(str(sample.status or "none") for sample in counted)),
        "errors": dict(Counter(sample.error for sample in failed).most_common(_MAX_ERRORS)),
    }


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least a fraction `share` of the values does not exceed; NaN if there are none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return the count, median, 99th percentile and maximum; None if there are no values."""
    shares = {"median": 0.5, "p99": 0.99, "max": 1.0}
    return {"count": len(values)} | {name: quantile(values, each) for name, each in shares.items()} if values else None


def _latency_ms(times_s: Sequence[float]) -> dict[str, float]:
    if not times_s:
        return {}
    ordered = sorted(times_s)
    named = {f"p{100 * share:g}" if share < 1 else "max": 1e3 * quantile(ordered, share) for share in SHARES}
    return named | {"mean": 1e3 * sum(ordered) / len(ordered)}
