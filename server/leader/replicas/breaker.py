"""Circuit breaker: quarantines a worker that fails repeatedly, with exponential backoff. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_NAMES_KEPT = 4096
_FIRST_QUARANTINE_S = 0.5
_MAX_QUARANTINE_S = 30.0


@dataclass(slots=True)
class _Record:
    failures: int = 0
    """Consecutive failures."""
    until_s: float = float("-inf")
    """End of the quarantine."""
    given_up: object = None


class Breaker:
    """Counts consecutive failures of each worker, by its name.

    The first failure has no consequence. The second one quarantines the worker for 0.5 s, and each further one for twice as long,
    up to 30 s. After the quarantine the worker may join once; that attempt decides. A failure of a healthy worker counts as
    its first.
    """

    def __init__(self) -> None:
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def failed(self, worker: str, *, healthy: bool, now_s: float) -> float:
        """Count a failure; `healthy` if the worker had served well before. Returns the length of the quarantine in seconds."""
        record = self._records.setdefault(worker, _Record())
        self._records.move_to_end(worker)
        if len(self._records) > _NAMES_KEPT:
            self._records.popitem(last=False)
        record.failures = 1 if healthy else record.failures + 1
        quarantine_s = 0.0
        if record.failures > 1:  # the exponent is bounded to avoid a float overflow
            quarantine_s = min(_MAX_QUARANTINE_S, _FIRST_QUARANTINE_S * 2.0 ** min(record.failures - 2, 30))
        record.until_s = now_s + quarantine_s
        return quarantine_s

    def wait_s(self, worker: str, now_s: float) -> float:
        """Seconds until the quarantine of this worker ends; 0 if it may join now."""
        record = self._records.get(worker)
        return max(0.0, record.until_s - now_s) if record else 0.0

    def give_up(self, worker: str, attempt: object) -> None:
        """Remember what this worker is not to attempt again. Another attempt begins without failures."""
        self._records[worker] = _Record(given_up=attempt)

    def given_up(self, worker: str, attempt: object) -> bool:
        """Whether `give_up` was called for this worker and attempt, and not for another attempt since."""
        record = self._records.get(worker)
        return record is not None and record.given_up == attempt

    def quarantined(self, now_s: float) -> int:
        """How many workers are quarantined now."""
        return sum(record.until_s > now_s for record in self._records.values())

    def failures(self, worker: str) -> int:
        """Consecutive failures of this worker."""
        record = self._records.get(worker)
        return record.failures if record else 0
