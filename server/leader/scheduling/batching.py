"""Batching: decides when the next batch is formed, and from which requests."""

from __future__ import annotations

from multiworld_serving.server.leader.scheduling.batches import Replica, Request
from multiworld_serving.server.leader.scheduling.state import SchedulerState


def key_due(state: SchedulerState, replica: Replica) -> str | None:
    """The key of the next batch for this replica, the least loaded one with room; None if no batch is due."""
    oldest = state.backlog.oldest()
    if oldest is None:
        return None
    full = state.backlog.is_full(oldest.key)
    if full or state.draining or state.now_s >= _due_s(state, oldest, replica):
        return oldest.key
    return state.backlog.first_full


def next_batch_s(state: SchedulerState) -> float | None:
    """When the oldest waiting request is due; None if it waits for something other than time."""
    oldest, entry_pool = state.backlog.oldest(), state.table.entry_pool
    if (
        oldest is None
        or entry_pool is None
        or entry_pool.pipeline.saturated
        or (replica := entry_pool.available.first()) is None
    ):
        return None
    return _due_s(state, oldest, replica)


def _due_s(state: SchedulerState, oldest: Request, replica: Replica) -> float:
    """When to send a partial batch. Waiting costs nothing until the replica is about to become idle."""
    due_s = oldest.arrived_s + state.config.batch_timeout_s
    if not state.config.adaptive_batching:
        return due_s
    next_send_s = state.service_times.next_send_s(replica)
    if not replica.in_flight:
        return oldest.arrived_s if next_send_s is None else max(oldest.arrived_s, next_send_s)
    return due_s if next_send_s is None else max(due_s, next_send_s - state.config.batch_timeout_s)
