"""Detects late batches and limits the extra load of hedging with a token budget.

Hedged requests: Dean and Barroso, "The Tail at Scale", CACM 2013.
"""

from __future__ import annotations

from multiworld_serving.server.leader.scheduling.batches import Attempt, Replica
from multiworld_serving.server.leader.scheduling.config import SchedulerConfig
from multiworld_serving.server.leader.scheduling.estimates.service_times import ServiceTimes
from multiworld_serving.server.leader.scheduling.priority_map import PriorityMap

_BURST_BATCHES = 4
"""The budget holds tokens for at most this many full batches. It begins with as many slow ones."""


class Hedging:
    """Watches the attempts in flight.

    An attempt is late after `hedge_factor` times the 95th percentile of its stage and batch size, multiplied by the number of batches
    in flight on its replica. The budget is a token bucket: each row sent adds `hedge_budget` tokens, each row of a hedge takes one. If the
    replica of the late attempt is lost, the tokens are returned, because the hedge has replaced a reroute.
    """

    def __init__(self, config: SchedulerConfig, times: ServiceTimes) -> None:
        self._config = config
        self._times = times
        self._max_tokens = float(_BURST_BATCHES * config.max_batch_size)
        self._tokens = float(_BURST_BATCHES * (config.slow_batch_size or config.max_batch_size))
        self.late: PriorityMap[Attempt, float] = PriorityMap()
        """Watched attempts, by the time at which they are late. Then they are in `Pool.late`."""

    def watch(self, attempt: Attempt, now_s: float) -> None:
        """Add the attempt to `late`, unless it must not be hedged or there are too few samples."""
        factor, p95_s = self._config.hedge_factor, self._times.p95_s(attempt)
        if factor is not None and p95_s is not None and not attempt.batch.isolated:
            late_after_s = max(self._config.hedge_floor_s, p95_s * factor)
            self.late.set(attempt, now_s + late_after_s * max(1, len(attempt.replica.in_flight)))

    def forget(self, attempt: Attempt) -> None:
        """Do not hedge the attempt: it has returned, was abandoned, or must not be hedged."""
        self.late.discard(attempt)
        attempt.replica.pool.late.pop(attempt, None)

    def refill_budget(self, rows: int) -> None:
        """Add the tokens for rows that were sent and are not hedges."""
        self._tokens = min(self._tokens + rows * self._config.hedge_budget, self._max_tokens)

    def refund(self, replica: Replica) -> None:
        """The replica is lost: return the tokens for the hedges of its attempts."""
        rows = sum(len(attempt.batch.rows) for attempt in replica.in_flight.values() if attempt.hedged)
        self._tokens = min(self._tokens + rows, self._max_tokens)

    def try_acquire(self, rows: int) -> bool:
        """Take the tokens for a hedge of `rows`; returns False if there are too few."""
        if self._tokens < rows:
            return False
        self._tokens -= rows
        return True
