"""How long work takes: batches of each size at each stage, as they went lately; and so, when a replica will be free."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from server.scheduling.batches import Copy
from server.scheduling.pools import Link

_QUANTILE = 0.95
_SAMPLES = 64
_ENOUGH_SAMPLES = 8


class RecentTimes:
    """The last few times of one kind of work."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, time_s: float) -> None:
        """One more; the oldest is forgotten."""
        if len(self._recent) == _SAMPLES:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(time_s)
        insort(self._sorted, time_s)

    def usual_s(self) -> float | None:
        """The 95th percentile; None while there are too few to tell."""
        count = len(self._sorted)
        return self._sorted[int(_QUANTILE * (count - 1))] if count >= _ENOUGH_SAMPLES else None

    def least_s(self) -> float | None:
        """The shortest; None while there are too few to tell."""
        return self._sorted[0] if len(self._sorted) >= _ENOUGH_SAMPLES else None

    def middle_s(self) -> float:
        """The median; 0 while there is none."""
        return self._sorted[len(self._sorted) // 2] if self._sorted else 0.0


class _Work:
    """What is known of batches of one size at one stage."""

    def __init__(self) -> None:
        self.took = RecentTimes()
        """Until the answer, from when the link had nothing else to do."""
        self.computed = RecentTimes()
        self.transfer = RecentTimes()
        """There and back."""


class WorkTimes:
    """Learns from every copy that comes back."""

    def __init__(self) -> None:
        self._works: dict[tuple[int, int], _Work] = {}

    def observe(self, copy: Copy, worked_s: float, computed_s: float | None, transfer_s: float | None) -> None:
        """A copy came back."""
        work = self._works.setdefault(_kind_of_work(copy), _Work())
        work.took.add(worked_s)
        work.computed.add(worked_s if computed_s is None else computed_s)
        work.transfer.add(transfer_s or 0.0)

    def usual_s(self, copy: Copy) -> float | None:
        """How long such a batch usually takes until its answer; None if that cannot be told."""
        work = self._works.get(_kind_of_work(copy))
        return work.took.usual_s() if work else None

    def nearly_free_s(self, link: Link) -> float | None:
        """When a batch must be sent to reach this link as the work there ends; None if that cannot be told.

        Rather too early: it goes by the shortest time that such work took lately.
        """
        done_s, transfer_s = link.answered_s, 0.0
        for copy in link.copies.values():
            work = self._works.get(_kind_of_work(copy))
            if work is None or (least_s := work.computed.least_s()) is None:
                return None
            transfer_s = work.transfer.middle_s()
            done_s = max(done_s, copy.sent_s + transfer_s) + least_s
        return done_s - transfer_s


def _kind_of_work(copy: Copy) -> tuple[int, int]:
    """Stage and size, sizes by powers of two so that each sees samples soon."""
    return copy.link.pool.stage, len(copy.batch.rows).bit_length()
