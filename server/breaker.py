"""The circuit breaker: a worker that fails again and again is kept away for longer and longer. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_NAMES_KEPT = 4096


@dataclass(slots=True)
class _Record:
    failures: int = 0
    """In a row."""
    until_s: float = float("-inf")
    """Not to be taken in before."""


class Breaker:
    """Counts the failures of each worker, by its name.

    Closed after one failure: anybody may fall once. From the second in a row on it is open for `first_s`, and twice as
    long each time, up to `longest_s`; then one attempt is let through, and decides. A worker that has proven itself
    starts from nothing.

    Args:
        longest_s: 0 turns the breaker off.
    """

    def __init__(self, *, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def failed(self, worker: str, *, proven: bool, now_s: float) -> float:
        """It failed; `proven` if it had served well until then. Returns how long it is kept away, in seconds."""
        record = self._records.setdefault(worker, _Record())
        self._records.move_to_end(worker)
        if len(self._records) > _NAMES_KEPT:
            self._records.popitem(last=False)
        record.failures = 1 if proven else record.failures + 1
        away_s = 0.0
        if record.failures > 1:  # the exponent is bounded: it may fail for weeks
            away_s = min(self._longest_s, self._first_s * 2.0 ** min(record.failures - 2, 30))
        record.until_s = now_s + away_s
        return away_s

    def wait_s(self, worker: str, now_s: float) -> float:
        """How long until this worker may be taken in; 0 for now."""
        record = self._records.get(worker)
        return max(0.0, record.until_s - now_s) if record else 0.0

    def kept_away(self, now_s: float) -> int:
        """How many workers may not be taken in now."""
        return sum(record.until_s > now_s for record in self._records.values())

    def failures(self, worker: str) -> int:
        """In a row, up to now."""
        record = self._records.get(worker)
        return record.failures if record else 0
