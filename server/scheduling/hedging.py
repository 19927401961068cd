"""How long work takes: when a replica will be free, when a batch is late, and whether a second copy of it can be afforded."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from server.scheduling.batches import Copy
from server.scheduling.config import SchedulerConfig
from server.scheduling.pools import Link
from server.scheduling.priority_map import PriorityMap

_QUANTILE = 0.95
_SAMPLES = 64
_ENOUGH_SAMPLES = 8
_BURST_BATCHES = 4


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


class Hedging:
    """Watches the copies in flight. A copy is late when it takes `hedge_factor` times what its stage usually takes for
    about so many rows, times the number of batches in its link's window, itself included.

    A hedge is paid from a purse that every ordinary row fills by `hedge_budget`; the purse holds a few batches at
    most, so a quiet day saves nothing up for a storm.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._factor = config.hedge_factor
        self._floor_s = config.hedge_floor_s
        self._budget = config.hedge_budget
        self._purse_limit = float(_BURST_BATCHES * config.max_batch_size)
        self._purse = 0.0
        self._times: dict[tuple[int, int], RecentTimes] = {}
        self.late: PriorityMap[Copy, float] = PriorityMap()
        """Copies watched, by when they are late."""

    def observe(self, copy: Copy, worked_s: float) -> None:
        """A copy came back."""
        self.forget(copy)
        self._times.setdefault(_kind_of_work(copy), RecentTimes()).add(worked_s)

    def busy_until_s(self, link: Link) -> float | None:
        """Until when this link has work at the least, going by the shortest that such work took lately; None if that cannot be told."""
        until_s = link.answered_s
        for copy in link.copies.values():
            times = self._times.get(_kind_of_work(copy))
            least_s = times.least_s() if times else None
            if least_s is None:
                return None
            until_s = max(until_s, copy.sent_s) + least_s
        return until_s

    def watch(self, copy: Copy, now_s: float) -> None:
        """Tell when this copy is late, if that can be told."""
        patience_s = self._patience_s(copy)
        if patience_s is not None:
            self.late.set(copy, now_s + patience_s * max(1, len(copy.link.copies)))

    def forget(self, copy: Copy) -> None:
        """It no longer matters whether this copy is late."""
        self.late.discard(copy)

    def earn(self, rows: int) -> None:
        """Ordinary rows went out."""
        self._purse = min(self._purse + rows * self._budget, self._purse_limit)

    def pay(self, rows: int) -> bool:
        """Take the price of a hedge from the purse; False if it holds too little."""
        if self._purse < rows:
            return False
        self._purse -= rows
        return True

    def _patience_s(self, copy: Copy) -> float | None:
        if self._factor is None or copy.batch.isolated:
            return None
        times = self._times.get(_kind_of_work(copy))
        usual_s = times.usual_s() if times else None
        return None if usual_s is None else max(self._floor_s, usual_s * self._factor)


def _kind_of_work(copy: Copy) -> tuple[int, int]:
    """Stage and size, sizes by powers of two so that each sees samples soon."""
    return copy.link.pool.stage, len(copy.batch.rows).bit_length()
