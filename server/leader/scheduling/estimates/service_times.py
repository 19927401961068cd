"""Service times of batches by stage and batch size: when a replica becomes idle, and which batches are late.

A token budget limits the extra load of hedging. Hedged requests: Dean and Barroso, "The Tail at Scale", CACM 2013.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

from multiworld_serving.server.leader.scheduling.batches import Attempt, Replica
from multiworld_serving.server.leader.scheduling.config import SchedulerConfig
from multiworld_serving.server.leader.scheduling.priority_map import PriorityMap

_QUANTILE = 0.95
_SAMPLES = 64
_ENOUGH_SAMPLES = 8
_BURST_BATCHES = 4
"""The budget holds tokens for at most this many full batches. It begins with as many slow ones."""


class SlidingWindow:
    """Order statistics of the last `_SAMPLES` durations."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, time_s: float) -> None:
        """Add one duration; the oldest one is dropped when the window is full."""
        if len(self._recent) == _SAMPLES:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(time_s)
        insort(self._sorted, time_s)

    @property
    def has_enough(self) -> bool:
        """Whether there are enough samples for an estimate."""
        return len(self._sorted) >= _ENOUGH_SAMPLES

    def p95_s(self) -> float:
        """The 95th percentile of at least one sample."""
        return self._sorted[int(_QUANTILE * (len(self._sorted) - 1))]

    def min_s(self) -> float | None:
        """The minimum; None with fewer than `_ENOUGH_SAMPLES`."""
        return self._sorted[0] if self.has_enough else None

    def median_s(self) -> float:
        """The median; 0 without samples."""
        return self._sorted[len(self._sorted) // 2] if self._sorted else 0.0


class _SizeClass:
    """Durations of batches of about one size at one stage."""

    def __init__(self) -> None:
        self.took = SlidingWindow()
        """From when the replica had no earlier batch left to do until it returned this one."""
        self.computed = SlidingWindow()
        self.transfer = SlidingWindow()
        """Input and output together."""
        self.per_row = SlidingWindow()
        """Compute time divided by the number of rows."""


class ServiceTimes:
    """Learns from every attempt that returns."""

    def __init__(self) -> None:
        self._size_classes: dict[tuple[int, int], _SizeClass] = {}
        self._enough: dict[int, list[int]] = {}
        """The bits of the sizes with enough samples by stage, ascending."""

    def observe(self, attempt: Attempt, worked_s: float, computed_s: float | None, transfer_s: float | None) -> None:
        """Record the durations of an attempt that returned an output."""
        size_class = self._size_classes.setdefault(_key(attempt), _SizeClass())
        computed_s, transfer_s = worked_s if computed_s is None else computed_s, transfer_s or 0.0
        knew_enough = size_class.took.has_enough
        size_class.took.add(worked_s)
        if size_class.took.has_enough and not knew_enough:
            stage, bits = _key(attempt)
            insort(self._enough.setdefault(stage, []), bits)
        size_class.computed.add(computed_s)
        size_class.transfer.add(transfer_s)
        size_class.per_row.add(computed_s / len(attempt.batch.rows))

    def compute_s(self, stage: int, rows: int) -> float | None:
        """Median compute time of a batch of `rows`; None if no size has enough samples.

        For a size without enough samples, an upper bound from another one: a further row costs at most as much as the
        first, and a smaller batch takes at most as long as a larger one.
        """
        found = self._nearest(stage, rows)
        return found[1].per_row.median_s() * max(rows, 1 << (found[0] - 1)) if found else None

    def full_batch_s(self, stage: int, rows: int) -> float | None:
        """Median time that a replica needs for a batch of about so many rows; None with too few samples."""
        size_class = self._size_classes.get((stage, rows.bit_length()))
        return size_class.took.median_s() if size_class and size_class.took.has_enough else None

    def p95_s(self, attempt: Attempt) -> float | None:
        """95th percentile of the service time of such batches; None if no size has enough samples, as for `compute_s`."""
        stage, rows = attempt.replica.pool.stage, len(attempt.batch.rows)
        found = self._nearest(stage, rows)
        return found[1].took.p95_s() * max(1, rows >> (found[0] - 1)) if found else None

    def next_send_s(self, replica: Replica) -> float | None:
        """When to send a batch so that it arrives as this replica becomes idle; None with too few samples.

        Tends to be early: it assumes the shortest recent compute time for each batch in flight.
        """
        idle_s, transfer_s = replica.answered_s, 0.0
        for attempt in replica.in_flight.values():
            size_class = self._size_classes.get(_key(attempt))
            if size_class is None or (min_s := size_class.computed.min_s()) is None:
                return None
            transfer_s = size_class.transfer.median_s()
            idle_s = max(idle_s, attempt.sent_s + transfer_s) + min_s
        return idle_s - transfer_s

    def _nearest(self, stage: int, rows: int) -> tuple[int, _SizeClass] | None:
        """The bits and the samples of this size, else of the next smaller one with enough samples, else of the next larger one."""
        enough = self._enough.get(stage)
        if enough is None:
            return None
        bits = enough[max(0, bisect_right(enough, rows.bit_length()) - 1)]
        return bits, self._size_classes[stage, bits]


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


def _key(attempt: Attempt) -> tuple[int, int]:
    """Stage and batch size. Sizes are grouped by powers of two so that each group gets samples soon."""
    return attempt.replica.pool.stage, len(attempt.batch.rows).bit_length()
