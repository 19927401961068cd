"""Counts how the scheduler sends batches."""

from __future__ import annotations

import logging
from collections import Counter

from multiworld_serving.server.observability.metrics import HEDGE_OUTCOMES, Metrics
from multiworld_serving.server.replicas.replica_ids import link_id
from multiworld_serving.server.scheduling.actions import SendBatch

logger = logging.getLogger(__name__)


class BatchCounts:
    """Reports sent batches and hedges to the metrics, and reroutes to the log."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._hedges = dict.fromkeys(HEDGE_OUTCOMES, 0)
        """Hedges by outcome that were reported."""

    def sent(self, action: SendBatch) -> None:
        """A batch was sent."""
        if action.kind == "first" and action.stage == 0:
            self._metrics.batch_formed(len(action.requests))
            self._metrics.queued(action.waited_s)
        if action.kind == "reroute":
            self._metrics.rerouted(action.stage, action.waited_s)
            world, _, generation = link_id(action.replica).partition("#")
            logger.info(
                "batch=%d stage=%d rerouted to world=%s generation=%s attempt=%d after_s=%.3f",
                *(action.batch, action.stage, world, generation, action.attempt, action.waited_s),
            )
        if action.kind == "retry":
            self._metrics.retried(action.stage)

    def hedges(self, hedges: Counter[str]) -> None:
        """Report the hedges that have ended since the last call; `hedges` are all of them by outcome."""
        if hedges.total() > sum(self._hedges.values()):
            for outcome in HEDGE_OUTCOMES:
                for _ in range(hedges[outcome] - self._hedges[outcome]):
                    self._metrics.hedged(outcome)
                self._hedges[outcome] = hedges[outcome]
