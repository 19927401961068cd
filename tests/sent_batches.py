"""Links of a leader without its scheduler."""

import time

from torch import Tensor

from multiworld_serving.common.wire.inputs import BatchInputs
from multiworld_serving.common.wire.join import JoinRequest
from multiworld_serving.server.leader.replicas.worker import SentBatch, SlotId, Worker
from multiworld_serving.server.leader.replicas.worker_link import WorkerLink


def worker_at(slot: SlotId, request: JoinRequest | None = None) -> Worker:
    """A worker that is about to join."""
    return Worker(request or JoinRequest("w", "cpu", "here", 1), slot, 1)


def send(link: WorkerLink, batch: int, payload: Tensor | BatchInputs, version: int = 1) -> SentBatch:
    """Send a batch of rows that belong to no request."""
    if isinstance(payload, Tensor):
        payload = BatchInputs(len(payload), (), payload, tuple(range(len(payload))), keep=False)
    sent = SentBatch(batch, link.worker.stage, version, (0,) * payload.rows, "replica", time.monotonic())
    link.send(sent, payload)
    return sent
