"""Parameters of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = 2
"""Batches in flight per replica: one computes while the next one is sent."""
SLOW_BATCH_SIZE, FAST_BATCH_SIZE = 8, 32
"""Maximum rows per batch if the operator sets no limit: of any model, and of one whose batches are fast."""
FAST_BATCH_S = 0.05
"""A batch that takes longer is slow: growing it further would save little per row, and lose more when its worker is lost."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """All durations in seconds, on the clock of `now_s`. `LeaderSettings` checks the values."""

    num_stages: int
    max_batch_size: int = 8
    """Maximum rows per batch."""
    slow_batch_size: int | None = None
    """Maximum rows per batch as far as larger ones would take longer than `FAST_BATCH_S` at a stage; None: `max_batch_size`."""
    batch_timeout_s: float = 0.002
    """Maximum time that the oldest request waits for a batch to fill."""
    adaptive_batching: bool = True
    """Send a partial batch at once to an idle replica. While all replicas are busy, wait until one is about to become idle."""
    window: int = WINDOW
    """Maximum batches in flight per replica."""
    queue_limit: int = 256
    """Reject arrivals while this many requests wait for their first batch."""
    recovery_grace_s: float = 15.0
    """How long work waits for a stage that has no replica."""
    max_attempts: int = 3
    """Reject a request as poison when it was in flight on this many lost replicas, the last time alone. At least 2: only a request that
    was alone in its batch can be blamed."""
    hang_timeout_s: float = 10.0
    """Fail a replica that has batches in flight and returns none for this long."""
    hedge_factor: float | None = 2.0
    """A batch is late after this many times the 95th percentile of the stage's service time; None disables hedging."""
    hedge_floor_s: float = 0.05
    """No batch is late before this."""
    hedge_budget: float = 0.01
    """Maximum rows sent as hedges, as a fraction of all rows sent. Four full batches more are allowed at the start."""
