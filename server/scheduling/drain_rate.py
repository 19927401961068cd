"""How fast requests are being answered: what an honest Retry-After is made of."""

from __future__ import annotations

from math import exp

_MEMORY_S = 5.0
_UNKNOWN_S = 1.0
_LONGEST_S = 60.0


class DrainRate:
    """Answers per second of *busy* time, the last few seconds counting most. Idle time says nothing about how fast
    work would go, so it does not count."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._weighted_rows = 0.0
        self._weighted_s = 0.0

    def elapse(self, busy_s: float) -> None:
        """So much time has passed with work to do."""
        self._busy_s += busy_s

    def answered(self, rows: int) -> None:
        """So many requests were answered just now."""
        fade = exp(-self._busy_s / _MEMORY_S)
        self._weighted_rows = self._weighted_rows * fade + rows
        self._weighted_s = self._weighted_s * fade + _MEMORY_S * (1 - fade)
        self._busy_s = 0.0

    def time_to_drain_s(self, rows: int) -> float:
        """How long until so many are answered, as things go."""
        fade = exp(-self._busy_s / _MEMORY_S)
        weighted_s = self._weighted_s * fade + _MEMORY_S * (1 - fade)
        weighted_rows = self._weighted_rows * fade
        if not weighted_rows:
            return _UNKNOWN_S
        return min(rows * weighted_s / weighted_rows, _LONGEST_S)
