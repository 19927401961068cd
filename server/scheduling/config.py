"""The numbers that the scheduler works by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """All durations in seconds, on the clock of `now_s`.

    Raises:
        ValueError: a number is out of its range.
    """

    num_stages: int
    max_batch_size: int = 8
    """Rows a batch at most."""
    batch_timeout_s: float = 0.002
    """How long the oldest request waits for a batch to fill."""
    adaptive_batching: bool = True
    """It waits only while every replica is busy, for waiting would win nothing where one idles; and then until one is nearly free."""
    window: int = 2
    """Batches in flight a link at most."""
    queue_limit: int = 256
    """An arrival is refused while so many requests wait for their first batch."""
    recovery_grace_s: float = 15.0
    """How long work waits for a stage without a replica."""
    max_attempts: int = 3
    """A request is refused as poison when it has broken so many worlds, the last one alone."""
    hang_timeout_s: float = 10.0
    """A link with something in flight that is silent for so long is broken."""
    hedge_factor: float | None = 2.0
    """A batch is late after this many times the stage's usual (95th percentile) time; None turns hedging off."""
    hedge_floor_s: float = 0.05
    """Nothing is late before this."""
    hedge_budget: float = 0.05
    """Extra rows that hedging may cost, as a share of all rows sent."""

    def __post_init__(self) -> None:
        for name in ("num_stages", "max_batch_size", "window", "queue_limit"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        for name in ("batch_timeout_s", "recovery_grace_s", "hedge_floor_s", "hedge_budget"):
            self._require(getattr(self, name) >= 0, name, "at least 0")
        self._require(self.max_attempts >= 2, "max_attempts", "at least 2: blame is certain only for who travels alone")
        self._require(self.hang_timeout_s > 0, "hang_timeout_s", "more than 0")
        self._require(self.hedge_factor is None or self.hedge_factor >= 1, "hedge_factor", "None or at least 1")

    def _require(self, satisfied: bool, name: str, expected: str) -> None:
        if not satisfied:
            raise ValueError(f"{name} is {getattr(self, name)!r}, it must be {expected}")
