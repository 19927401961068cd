"""Estimates how fast requests are answered. Used for Retry-After and for admission control."""

from __future__ import annotations

from math import exp

_MEMORY_S = 5.0
"""Time constant of the exponentially weighted average."""
_EVIDENCE_S = 1.0
"""The rate is used only after this much saturated time."""
_STALE_S = 60.0
"""The rate is not used when it is older than this."""


class ThroughputEstimator:
    """Answered rows per second of saturated time, exponentially weighted: the highest rate that the service reaches.

    Time is saturated while enough requests wait to fill batches (`SchedulerState.saturated`). Other time says nothing about the speed.
    """

    def __init__(self) -> None:
        self._rows = 0.0
        self._weight_s = 0.0
        """How much saturated time the rate rests on; at most `_MEMORY_S`."""
        self._since_s = 0.0
        """Saturated time since the last answer."""
        self._ago_s = 0.0
        """Time since the last answer in saturated time."""

    def elapse(self, seconds: float, *, saturated: bool) -> None:
        """Count time."""
        self._ago_s += seconds
        if saturated:
            self._since_s += seconds

    def answered(self, rows: int) -> None:
        """Count `rows` answers at the current time, which is saturated."""
        if not self._since_s:  # without saturated time the rate would grow without bound
            return
        if self._ago_s > _STALE_S:
            self._rows = self._weight_s = 0.0
        fade = exp(-self._since_s / _MEMORY_S)
        self._rows = self._rows * fade + rows
        self._weight_s = self._weight_s * fade + _MEMORY_S * (1 - fade)
        self._since_s = self._ago_s = 0.0

    def min_time_s(self, rows: int) -> float:
        """Lower bound of the time for `rows` requests; 0 without enough recent observations."""
        if self._ago_s > _STALE_S or self._weight_s < _EVIDENCE_S:
            return 0.0
        fade = exp(-self._since_s / _MEMORY_S)
        return rows * (self._weight_s * fade + _MEMORY_S * (1 - fade)) / (self._rows * fade)
