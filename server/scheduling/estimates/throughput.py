"""Estimates how fast requests are answered. Used for Retry-After and for admission control."""

from __future__ import annotations

from math import exp

_MEMORY_S = 5.0
"""Time constant of the exponentially weighted average."""
_UNKNOWN_S = 1.0
_LONGEST_S = 60.0
_EVIDENCE_S = 1.0
"""The saturated rate is used only after this much observed time."""
_STALE_S = 60.0
"""The saturated rate is not used when it is older than this."""


class _Rate:
    """Rows per second, exponentially weighted over the counted time."""

    def __init__(self) -> None:
        self.since_s = 0.0
        """Counted time since the last answer."""
        self._rows = 0.0
        self.weight_s = 0.0
        """How much counted time the rate rests on; at most `_MEMORY_S`."""

    def elapse(self, seconds: float) -> None:
        self.since_s += seconds

    def answered(self, rows: int) -> None:
        fade = exp(-self.since_s / _MEMORY_S)
        self._rows = self._rows * fade + rows
        self.weight_s = self.weight_s * fade + _MEMORY_S * (1 - fade)
        self.since_s = 0.0

    def time_for_s(self, rows: int) -> float | None:
        """Estimated time to answer `rows`; None before the first answer."""
        fade = exp(-self.since_s / _MEMORY_S)
        faded_rows = self._rows * fade
        return rows * (self.weight_s * fade + _MEMORY_S * (1 - fade)) / faded_rows if faded_rows else None


class ThroughputEstimator:
    """Two rates of answers: per second of busy time (idle time says nothing about speed) and per second of saturated time.

    Time is saturated while enough requests wait to fill batches (`SchedulerState.saturated`); that rate is the highest the service reaches.
    """

    def __init__(self) -> None:
        self._busy = _Rate()
        self._full = _Rate()
        self._full_ago_s = 0.0
        """Time since the last answer in saturated time."""

    def elapse(self, seconds: float, *, busy: bool, full: bool) -> None:
        """Count time. `busy`: requests were open; `full`: the time is saturated."""
        self._full_ago_s += seconds
        if busy:
            self._busy.elapse(seconds)
        if full:
            self._full.elapse(seconds)

    def answered(self, rows: int, *, full: bool) -> None:
        """Count `rows` answers at the current time."""
        self._busy.answered(rows)
        if full and self._full.since_s > 0:  # without saturated time the rate would grow without bound
            if self._full_ago_s > _STALE_S:
                self._full = _Rate()
            self._full.answered(rows)
            self._full_ago_s = 0.0

    def expected_time_s(self, rows: int) -> float:
        """Expected time until `rows` requests are answered, at the recent rate; at most `_LONGEST_S`."""
        time_s = self._busy.time_for_s(rows)
        return _UNKNOWN_S if time_s is None else min(time_s, _LONGEST_S)

    def min_time_s(self, rows: int) -> float:
        """Lower bound of the time for `rows` requests, at the saturated rate; 0 without enough recent observations."""
        if self._full_ago_s > _STALE_S or self._full.weight_s < _EVIDENCE_S:
            return 0.0
        return self._full.time_for_s(rows) or 0.0
