"""Decides which tensors of a leader's batches go over edges, and which through the leader."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from multiworld_serving.common.wire.tracing import TraceContext
from multiworld_serving.server.pipeline.batch_tensors import StoredInput, relayed_inputs
from multiworld_serving.server.replicas.worker_link import WorkerLink
from multiworld_serving.server.scheduling.actions import SendBatch

_UNCLAIMED_S = 10.0
"""How long a worker keeps the output of the last stage for frontends that do not fetch it."""
_MAX_HOLDERS = 10_000


class EdgeRouting:
    """Knows which pairs of processes cannot reach each other. Their tensors pass the leader until one of the two joins again.

    A consumer opens its edge to a producer with the first fetch. If that fails, the leader relays between the two from then on.

    Args:
        num_stages: of the pipeline.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._relayed: dict[str, set[str]] = {}
        """By producer, the names of the consumers that cannot reach it. No value is empty."""

    def relay(self, holder: str, consumer: str) -> None:
        """This consumer could not fetch from the producer."""
        if len(self._relayed) >= _MAX_HOLDERS:  # a process that ended before its consumer reported it stays here
            del self._relayed[next(iter(self._relayed))]
        self._relayed.setdefault(holder, set()).add(consumer)

    def forget(self, holder: str, consumer: str) -> None:
        """A process has ended, or its link: it was known by these names as a producer and a consumer."""
        self._relayed.pop(holder, None)
        for each in [each for each, consumers in self._relayed.items() if consumer in consumers]:
            self._relayed[each].discard(consumer)
            if not self._relayed[each]:
                del self._relayed[each]

    def unreachable_holders(self, stored: StoredInput, link: WorkerLink) -> frozenset[str]:
        """The producers of this input from which the worker cannot fetch."""
        if isinstance(stored, Tensor):
            return frozenset()
        if not link.request.edge:
            for holder in stored.holders:
                self.relay(holder, link.worker)
        return frozenset(each for each in stored.holders if link.worker in self._relayed.get(each, ()))

    def send(
        self,
        action: SendBatch,
        link: WorkerLink,
        stored: StoredInput,
        version: int,
        fetchers: Iterable[str | None],
        traced: Sequence[TraceContext],
    ) -> None:
        """Send a batch: its input, or where the worker fetches it, and whether the output is kept.

        Args:
            fetchers: for each request of the batch the frontend that fetches the answer itself; None if the leader needs it.
        """
        keep = self._keeps(action, link, fetchers)
        if isinstance(stored, Tensor) and not (keep and action.stage == 0):
            link.send(action.batch, stored, version, traced)
            return
        inputs = relayed_inputs(stored) if isinstance(stored, Tensor) else stored.inputs()
        expires_s = _UNCLAIMED_S if self._is_last(action) else 0.0
        link.send(action.batch, replace(inputs, keep=keep, expires_s=expires_s), version, traced)

    def _keeps(self, action: SendBatch, link: WorkerLink, fetchers: Iterable[str | None]) -> bool:
        """Whether the worker should keep the output, because everyone who needs it can fetch it."""
        holder = link.request.edge
        if not holder:
            return False
        if not self._is_last(action):
            return holder not in self._relayed
        relayed = self._relayed.get(holder, ())
        return all(fetcher is not None and fetcher not in relayed for fetcher in fetchers)

    def _is_last(self, action: SendBatch) -> bool:
        return action.stage + 1 == self._num_stages
