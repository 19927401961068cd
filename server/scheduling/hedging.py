"""When a batch is late, and whether a second copy of it can be afforded."""

from __future__ import annotations

from server.scheduling.batches import Copy
from server.scheduling.config import SchedulerConfig
from server.scheduling.priority_map import PriorityMap
from server.scheduling.work_times import WorkTimes

_BURST_BATCHES = 4


class Hedging:
    """Watches the copies in flight. A copy is late when it takes `hedge_factor` times what its stage usually takes for
    about so many rows, times the number of batches in its link's window, itself included.

    A hedge is paid from a purse that every ordinary row fills by `hedge_budget`; the purse holds a few batches at
    most, so a quiet day saves nothing up for a storm.
    """

    def __init__(self, config: SchedulerConfig, times: WorkTimes) -> None:
        self._times = times
        self._factor = config.hedge_factor
        self._floor_s = config.hedge_floor_s
        self._budget = config.hedge_budget
        self._purse_limit = float(_BURST_BATCHES * config.max_batch_size)
        self._purse = 0.0
        self.late: PriorityMap[Copy, float] = PriorityMap()
        """Copies watched, by when they are late."""

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
        usual_s = self._times.usual_s(copy)
        return None if usual_s is None else max(self._floor_s, usual_s * self._factor)
