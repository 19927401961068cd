"""What the scheduler has counted, for metrics and the status page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Totals since the start. Read them; only the scheduler writes."""

    accepted: int = 0
    answered: int = 0
    cancelled: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By reason, newcomers included."""
    batches: int = 0
    """Batches formed."""
    rows_sent: int = 0
    """Rows sent to all stages, hedges not counted."""
    hedge_rows_sent: int = 0
    reroutes: Counter[int] = field(default_factory=Counter)
    """Batches sent again because their link broke or left, by stage."""
    retries: Counter[int] = field(default_factory=Counter)
    """Batches sent again because the stage raised, by stage."""
    hedges: Counter[str] = field(default_factory=Counter)
    """By outcome: "won" (the hedge answered first), "lost" (the first copy did), "wasted" (the hedge's link broke, its
    stage raised, or nobody wanted the answer any more)."""
    isolated: int = 0
    """Requests taken out of their batch to travel alone."""
    restarted: int = 0
    """Requests sent back to the first stage because their version lost a stage and another one is complete."""
    hangs: int = 0
    """Links broken because they were silent."""
