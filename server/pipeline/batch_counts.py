"""Counts how the scheduler sends batches."""

from __future__ import annotations

import logging

from multiworld_serving.server.observability.leader_metrics import LeaderMetrics
from multiworld_serving.server.replicas.replica_ids import link_id
from multiworld_serving.server.scheduling.actions import SendBatch

logger = logging.getLogger(__name__)


def count_sent(metrics: LeaderMetrics, action: SendBatch) -> None:
    """A batch was sent: count it. Reroutes are logged."""
    if action.kind == "first" and action.stage == 0:
        metrics.batch_size.observe(len(action.requests))
        metrics.queue_s.observe(action.waited_s)
    if action.kind == "reroute":
        metrics.reroutes[action.stage] += 1
        metrics.reroute_s.observe(action.waited_s)
        world, _, generation = link_id(action.replica).partition("#")
        logger.info(
            "batch=%d stage=%d rerouted to world=%s generation=%s attempt=%d after_s=%.3f",
            *(action.batch, action.stage, world, generation, action.attempt, action.waited_s),
        )
    if action.kind == "retry":
        metrics.retries[action.stage] += 1
