"""How fast requests are being answered: what an honest Retry-After, and the refusal of a hopeless request, are made of."""

from __future__ import annotations

from math import exp

_MEMORY_S = 5.0
_UNKNOWN_S = 1.0
_LONGEST_S = 60.0
_EVIDENCE_S = 1.0
_STALE_S = 60.0


class _Rate:
    """Rows a second of the time that is counted, the last few seconds counting most."""

    def __init__(self) -> None:
        self.since_s = 0.0
        """Time that was counted since the last answer."""
        self._rows = 0.0
        self.weight_s = 0.0
        """On how much time it rests, `_MEMORY_S` at the most."""

    def elapse(self, seconds: float) -> None:
        self.since_s += seconds

    def answered(self, rows: int) -> None:
        fade = exp(-self.since_s / _MEMORY_S)
        self._rows = self._rows * fade + rows
        self.weight_s = self.weight_s * fade + _MEMORY_S * (1 - fade)
        self.since_s = 0.0

    def time_for_s(self, rows: int) -> float | None:
        """None when nothing was answered yet."""
        fade = exp(-self.since_s / _MEMORY_S)
        faded_rows = self._rows * fade
        return rows * (self.weight_s * fade + _MEMORY_S * (1 - fade)) / faded_rows if faded_rows else None


class DrainRate:
    """Answers per second of *busy* time: idle time says nothing about how fast work would go. And of *full* time, when
    there was enough to fill batches, which is how fast it can go."""

    def __init__(self) -> None:
        self._busy = _Rate()
        self._full = _Rate()
        self._full_ago_s = 0.0
        """Since an answer in full time."""

    def elapse(self, seconds: float, *, busy: bool, full: bool) -> None:
        """So much time has passed; `busy`: with work to do, `full`: with more than a batch of it waiting."""
        self._full_ago_s += seconds
        if busy:
            self._busy.elapse(seconds)
        if full:
            self._full.elapse(seconds)

    def answered(self, rows: int, *, full: bool) -> None:
        """So many requests were answered just now."""
        self._busy.answered(rows)
        if full and self._full.since_s > 0:  # without any full time, rows would only add up
            if self._full_ago_s > _STALE_S:
                self._full = _Rate()
            self._full.answered(rows)
            self._full_ago_s = 0.0

    def time_to_drain_s(self, rows: int) -> float:
        """How long until so many are answered, as things go."""
        time_s = self._busy.time_for_s(rows)
        return _UNKNOWN_S if time_s is None else min(time_s, _LONGEST_S)

    def least_time_s(self, rows: int) -> float:
        """How long it takes at the least, going by full time; 0 when that was not seen lately for long enough."""
        if self._full_ago_s > _STALE_S or self._full.weight_s < _EVIDENCE_S:
            return 0.0
        return self._full.time_for_s(rows) or 0.0
