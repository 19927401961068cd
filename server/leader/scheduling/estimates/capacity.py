"""How many replicas each stage needs for the measured load. Pure: no clock, no I/O.

Each leader knows the load that reaches it, so its figures are shares. `common.service.capacity_report` combines those of all leaders.
"""

from __future__ import annotations

from collections import deque
from math import sqrt

from multiworld_serving.server.leader.scheduling.estimates.service_times import ServiceTimes

UTILISATION = 0.7
"""Share of its time that a replica should compute. At this share a request rarely waits for more than one batch."""
DRAIN_S = 2.0
"""Requests that wait longer than usual are to be answered within this time."""
_BUCKET_S = 0.25
_MIN_WINDOW_S, _MAX_WINDOW_S = 1.0, 30.0
_DEVIATIONS = 2.0
"""A shorter time counts by how many arrivals it had beyond chance: this many standard deviations below their number."""


class ArrivalRate:
    """Requests per second: the mean of the last 30 s or, after a rise, what a shorter recent time proves, at least 1 s."""

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, int]] = deque(maxlen=int(_MAX_WINDOW_S / _BUCKET_S) + 1)
        """Number of the bucket and arrivals in it, for buckets with arrivals."""
        self._since: int | None = None
        """The bucket of the first arrival."""

    def arrived(self, now_s: float, rows: int) -> None:
        """Count the rows of a request. `now_s` does not decrease."""
        bucket = int(now_s / _BUCKET_S)
        if self._since is None:
            self._since = bucket
        if self._buckets and self._buckets[-1][0] == bucket:
            self._buckets[-1] = (bucket, self._buckets[-1][1] + rows)
        else:
            self._buckets.append((bucket, rows))

    def per_s(self, now_s: float) -> float:
        """The rate. The bucket of `now_s` is not complete, and does not count."""
        current, arrivals, proven = int(now_s / _BUCKET_S), 0, 0.0
        if self._since is None or current <= self._since:
            return 0.0
        for bucket, count in reversed(self._buckets):
            age_s = (current - bucket) * _BUCKET_S
            if age_s > _MAX_WINDOW_S:
                break
            if bucket < current:
                arrivals += count
                proven = max(proven, (arrivals - _DEVIATIONS * sqrt(arrivals)) / max(_MIN_WINDOW_S, age_s))
        known_s = min(_MAX_WINDOW_S, max(_MIN_WINDOW_S, (current - self._since) * _BUCKET_S))
        return max(proven, arrivals / known_s)


def replicas_wanted(
    rate_per_s: float, backlog: int, times: ServiceTimes, num_stages: int, rows: int
) -> tuple[float, ...]:
    """Replicas that each stage needs for this load, as fractions; 0 for a stage whose compute time is not known yet.

    Args:
        rate_per_s: arrivals, including those that were rejected because of overload.
        backlog: requests that wait and would not, if there were enough replicas.
        times: measured times of batches.
        rows: of a full batch.
    """
    load_per_s = rate_per_s + backlog / DRAIN_S
    return tuple(load_per_s * (times.compute_s(stage, rows) or 0.0) / rows / UTILISATION for stage in range(num_stages))
