"""Totals counted by the scheduler, for metrics and the status page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Totals since the start. Written by the scheduler only."""

    accepted: int = 0
    answered: int = 0
    cancelled: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By reason. Includes requests that were refused on arrival."""
    batches: int = 0
    """Batches formed."""
    rows_sent: int = 0
    """Rows sent to all stages, without hedges."""
    hedge_rows_sent: int = 0
    reroutes: Counter[int] = field(default_factory=Counter)
    """Batches sent again because their replica was lost, by stage."""
    retries: Counter[int] = field(default_factory=Counter)
    """Batches sent again because the stage raised, by stage."""
    hedges: Counter[str] = field(default_factory=Counter)
    """By outcome: "won" (the hedge returned first), "lost" (the first attempt returned first), "wasted" (the hedge's replica
    was lost, its stage raised, or all requests of the batch were closed)."""
    isolated: int = 0
    """Requests taken out of their batch to be sent alone."""
    restarted: int = 0
    """Requests sent back to the first stage because their version lost a stage and another version is complete."""
    hangs: int = 0
    """Replicas failed because they were silent."""
